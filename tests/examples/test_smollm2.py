"""The conversion of GGUF weights: names, and the order of rotary rows."""

from __future__ import annotations

import numpy as np

from examples.smollm2 import LAYER_NAMES, OTHER_NAMES, half_split


def test_interleaved_rotary_rows_become_two_halves_in_each_head():
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert half_split(rows, heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_every_tensor_of_a_layer_has_a_name_of_its_own():
    names = [*LAYER_NAMES.values(), *OTHER_NAMES.values()]
    assert len(set(names)) == len(names)
