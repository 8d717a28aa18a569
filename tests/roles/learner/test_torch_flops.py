"""Operations of a step: held to torch's own counter, and a share of the peak only where a peak is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

from roles.learner.packing import Part
from roles.learner.torch_adapter import causal_model, open_adapter
from roles.learner.torch_flops import PEAKS, Amount, Work, attended_pairs, pairs_of, peak, speed_metrics
from roles.learner.torch_logprobs import PaddedRows
from roles.learner.torch_packed_row import PackedRow
from tests.roles.learner.tiny_llama import VOCABULARY, a_sample, a_spec

CPU = torch.device("cpu")
HIDDEN, INNER, LAYERS, RANK = 32, 48, 2, 4


def product_in_place(_, left, right, **__):
    """Operations of ``addmm_`` by shapes, which torch's counter does not know."""
    return 2 * left[0] * left[1] * right[1]


IN_PLACE = {torch.ops.aten.addmm_: product_in_place}


@pytest.fixture(scope="module")
def model(model_dir):
    return open_adapter(model_dir, a_spec().model, a_spec().lora, CPU)


def test_the_sizes_are_those_of_the_model(model):
    linear = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    factors = RANK * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))
    heads = 2 * 16
    expected = Work(LAYERS * linear, LAYERS * factors, VOCABULARY * HIDDEN, LAYERS * heads)
    assert Work.of(model) == expected


def test_matrix_products_are_those_that_torch_counts(model):
    """Torch's counter does not see attention on the CPU, so no pairs here."""
    work, tokens = Work.of(model), 16
    assert work is not None
    amount = Amount(tokens, tokens, pairs=0)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as forward:
        out = causal_model(model)(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=False).logits
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as backward:
        out.logsumexp(-1).sum().backward()
    assert work.forward(amount) == forward.get_total_flops()
    # The first layer's queries, keys and values need no gradient of their input, the embedding.
    spared = 2 * tokens * 3 * (HIDDEN * HIDDEN + RANK * HIDDEN)
    assert work.backward(amount) == backward.get_total_flops() + spared


def test_attention_is_four_operations_a_pair_and_channel_and_twice_that_backward(model):
    work = Work.of(model)
    assert work is not None
    amount = Amount(0, 0, attended_pairs([3, 2]))
    assert amount.pairs == 6 + 3
    assert work.forward(amount) == 4 * 9 * LAYERS * HIDDEN
    assert work.backward(amount) == 2 * work.forward(amount)


def test_a_shared_prompt_is_attended_by_each_completion_and_computed_once():
    rng = np.random.default_rng(0)
    prompt = np.array([3, 4, 5], np.int32)
    samples = [a_sample(rng, length=n, prompt_token_ids=prompt) for n in (2, 4)]
    row = PackedRow.of(samples, [Part((0, 1), 0)], CPU)
    assert pairs_of(row) == 6 + (1 * 3 + 1) + (3 * 3 + 6)  # the last token of each is not forwarded
    assert pairs_of(PaddedRows.of(samples, CPU)) == attended_pairs([5, 7])


def test_a_mixture_of_experts_is_not_measured(tmp_path):
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    lora = a_spec().lora.model_copy(update={"target_modules": ("q_proj",)})
    assert Work.of(open_adapter(tmp_path, a_spec().model, lora, CPU)) is None


def test_no_peak_is_known_for_a_cpu_nor_for_fp32():
    assert peak([CPU], torch.bfloat16) is None
    assert peak([CPU], torch.float32) is None


def test_several_devices_have_their_peaks_together(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert peak(devices, torch.bfloat16) == 2 * PEAKS["NVIDIA H200"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Something New")
    assert peak(devices, torch.bfloat16) is None


def test_the_share_of_the_peak_is_what_was_done_over_what_could_have_been():
    work, amount = Work(base=100, factors=10, head=20, attention=2), Amount(50, 30, 40)
    done = work.forward(amount) + work.backward(amount)
    metrics = speed_metrics(work, 1e6, amount, 0.5)
    assert metrics["perf/mfu_fwd_bwd"] == pytest.approx(done / 0.5 / 1e6)
    assert metrics["perf/forwarded_tok_s_fwd_bwd"] == 100
    more = speed_metrics(work, 1e6, amount, 0.5, genesis=True)["perf/mfu_fwd_bwd"]
    assert more - metrics["perf/mfu_fwd_bwd"] == pytest.approx(work.forward(amount) / 0.5 / 1e6)


def test_what_is_not_known_is_left_out():
    amount = Amount(50, 30, 40)
    assert speed_metrics(None, 1e6, amount, 0.5).keys() == {"perf/fwd_bwd_s", "perf/forwarded_tok_s_fwd_bwd"}
    assert "perf/mfu_fwd_bwd" not in speed_metrics(Work(1, 1, 1, 1), None, amount, 0.5)
    assert speed_metrics(None, None, amount, 0.0) == {}
