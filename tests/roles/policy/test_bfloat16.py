"""bfloat16: rounding to nearest even, exact widening, and files that others read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from protocol.errors import StoreCorrupt
from roles.policy.bfloat16 import from_bits, rounded, to_bits
from roles.policy.compose import Factors, factors_digest
from roles.policy.peft_export import factors_bytes, read_factors

RANDOM_BITS = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
_HEX = (
    "0 7FFF 8000 8001 FFFF 17FFF 18000 18001 7F7F7FFF 7F7F8000 7F7FFFFF 7F800000 7F800001 7FFFFFFF "
    "1 7FFFFF 3F808000 3F818000"
)
EDGES = np.array([int(text, 16) for text in _HEX.split()], np.uint32)
NUMBERS = np.concatenate([RANDOM_BITS, EDGES, EDGES | np.uint32(1 << 31)]).view(np.float32)


def some_factors() -> Factors:
    generator = np.random.default_rng(1)
    shapes = {"b.lora_A.weight": (3, 5), "a.lora_B.weight": (5, 3), "a.lora_A.weight": (1, 1)}
    return {name: rounded(generator.normal(size=s).astype(np.float32)) for name, s in shapes.items()}


def test_numbers_are_rounded_as_torch_rounds_them():
    theirs = torch.from_numpy(NUMBERS.copy()).to(torch.bfloat16).float().numpy()
    ours, nan = rounded(NUMBERS), np.isnan(NUMBERS)
    np.testing.assert_array_equal(ours[~nan].view(np.uint32), theirs[~nan].view(np.uint32))
    assert np.isnan(ours[nan]).all()


def test_a_tie_goes_to_the_even_neighbour():
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], np.float32)
    assert rounded(ties).tolist() == [1.0, 1 + 2**-6, -1.0]


def test_every_bfloat16_survives_being_a_float32():
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = from_bits(bits)
    number = ~np.isnan(numbers)
    np.testing.assert_array_equal(to_bits(numbers)[number], bits[number])


def test_rounding_keeps_shape_and_takes_any_memory_order():
    tensor = np.asfortranarray(np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32))
    np.testing.assert_array_equal(rounded(tensor), rounded(np.ascontiguousarray(tensor)))
    tensor[1, 2] = np.nan
    assert np.argwhere(np.isnan(rounded(tensor))).tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_factors_come_back_from_a_file_exactly_and_equal_factors_are_equal_bytes(tmp_path: Path, dtype):
    factors = some_factors()
    data = factors_bytes(factors, dtype)
    assert factors_bytes(dict(reversed(factors.items())), dtype) == data
    (tmp_path / "f").write_bytes(data)
    found = read_factors(tmp_path / "f", dtype)
    assert factors_digest(found) == factors_digest(factors)
    assert {tensor.dtype for tensor in found.values()} == {np.dtype(np.float32)}


def test_a_bfloat16_file_is_half_the_size_and_torch_reads_it():
    factors = {"a": rounded(np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32))}
    data = factors_bytes(factors, "bfloat16")
    theirs = safetensors.torch.load(data)["a"]
    assert theirs.dtype == torch.bfloat16
    np.testing.assert_array_equal(theirs.float().numpy(), factors["a"])
    assert len(data) < len(factors_bytes(factors)) * 0.51


@pytest.mark.parametrize(
    ("stored", "wanted", "why"),
    [
        ("bfloat16", "float32", "is BF16, not float32"),
        ("float32", "bfloat16", "is F32, not bfloat16"),
    ],
)
def test_a_file_of_another_dtype_than_the_runs_is_refused(tmp_path: Path, stored, wanted, why: str):
    (tmp_path / "f").write_bytes(factors_bytes(some_factors(), stored))
    with pytest.raises(StoreCorrupt, match=why):
        read_factors(tmp_path / "f", wanted)


@pytest.mark.parametrize("dtype", ["F16", "F64", "I32", "F8_E4M3"])
def test_other_dtypes_are_refused_whatever_the_run_says(tmp_path: Path, dtype: str):
    size = {"F16": 2, "F64": 8, "I32": 4, "F8_E4M3": 1}[dtype]
    header = json.dumps({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}).encode()
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    for wanted in ("float32", "bfloat16"):
        with pytest.raises(StoreCorrupt, match="as all of this run"):
            read_factors(tmp_path / "f", wanted)


@pytest.mark.parametrize("cut", [0, 4, 10, -1])
def test_a_cut_bfloat16_file_is_corrupt(tmp_path: Path, cut: int):
    (tmp_path / "f").write_bytes(factors_bytes(some_factors(), "bfloat16")[:cut])
    with pytest.raises(StoreCorrupt, match="not a safetensors file"):
        read_factors(tmp_path / "f", "bfloat16")
