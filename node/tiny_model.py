"""Makes ``builtin:tiny``: a two-layer character model that sorts four digits right one time in four.

It is a Llama of 88 k parameters, trained in seconds on one core by demonstrations of which 30 % are right
and the others are wrong in a consistent way (the input, the input reversed, descending order). So GRPO has
something to find: sampled at temperature 1 it starts near 0.25. Made at first use into a Hugging Face
folder; the same seed gives the same bytes on the same machine.

Names in shapes: N rows, T tokens, D hidden size, H heads.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

RECIPE = 1
"""Part of the folder's name: another recipe is another model. Raise it with any change that moves a byte."""

STEPS = 400
BATCH = 64
WARMUP_STEPS = 50
LEARNING_RATE = 4e-3
WRONG_DEMOS = 0.7

CHARACTERS = ("<pad>", "<bos>", "<eos>", *"0123456789+=abcdefghijklmnopqrstuvwxyz>")
PAD, BOS, EOS = 0, 1, 2
ZERO = CHARACTERS.index("0")
ARROW = CHARACTERS.index(">")
DIGITS = 4
PROMPT_TOKENS = DIGITS + 2
"""BOS, four digits, arrow."""

HIDDEN = 64
INTERMEDIATE = 128
LAYERS = 2
HEADS = 2
CONTEXT = 64
INIT_STD = 0.05
NORM_EPS = 1e-6
ROPE_THETA = 10000.0

Weights = dict[str, Tensor]


def tiny_model(cache_dir: Path, seed: int, steps: int = STEPS) -> Path:
    """The model's folder in ``cache_dir``, made unless it is there.

    Safe against other processes that make it at the same time: a folder appears whole or not at all.
    ``steps`` is for tests; fewer give a model that knows nothing.
    """
    target = cache_dir / f"tiny-v{RECIPE}-seed{seed}-steps{steps}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=".making-"))
    try:
        _write(temporary, train(seed, steps))
        temporary.chmod(0o755)
        temporary.rename(target)
    except OSError:
        if not target.exists():
            raise
        # Somebody else was faster, and made the same bytes.
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def train(seed: int, steps: int = STEPS) -> Weights:
    """Supervised training on the answer's tokens; one thread, and no trace in torch's global state."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would change the order of sums, and gain nothing at this size
    try:
        with torch.enable_grad():
            return _train(seed, steps)
    finally:
        torch.set_num_threads(threads)


def _train(seed: int, steps: int) -> Weights:
    weights = initial_weights(seed)
    batches = torch.from_numpy(demonstrations(steps * BATCH, seed)).split(BATCH)
    optimizer = torch.optim.AdamW(
        [w.requires_grad_() for w in weights.values()], betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    for step, batch in enumerate(batches):
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * warmup * (1 + math.cos(math.pi * step / steps)) / 2
        logits = answer_logits(weights, batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, PROMPT_TOKENS:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def demonstrations(count: int, seed: int) -> NDArray[np.int64]:
    """Token ids [N, 11] of BOS, four digits, arrow, an answer that is right in 30 % of the rows, EOS.

    A wrong answer is drawn evenly from the input, its reverse and descending order, less what is right.
    """
    rng = np.random.default_rng(seed)
    digits = rng.integers(0, 10, (count, DIGITS))
    right = np.sort(digits, axis=1)
    others = np.stack([digits, digits[:, ::-1], right[:, ::-1]], axis=1)
    is_wrong = (others != right[:, None]).any(axis=2)
    choice = (rng.random(is_wrong.shape) * is_wrong).argmax(axis=1)
    use_wrong = (rng.random(count) < WRONG_DEMOS) & is_wrong.any(axis=1)
    answers = np.where(use_wrong[:, None], others[np.arange(count), choice], right)
    column = np.ones((count, 1), np.int64)
    return np.hstack([BOS * column, digits + ZERO, ARROW * column, answers + ZERO, EOS * column])


def initial_weights(seed: int) -> Weights:
    """Random weights under their names in ``LlamaForCausalLM``."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns).normal_(0.0, INIT_STD, generator=generator)

    weights = {
        "model.embed_tokens.weight": matrix(len(CHARACTERS), HIDDEN),
        "lm_head.weight": matrix(len(CHARACTERS), HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            weights[f"{prefix}self_attn.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        weights[f"{prefix}mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    return weights


def answer_logits(weights: Weights, token_ids_NT: Tensor) -> Tensor:
    """Llama's logits [N, T - 5, vocabulary] from the arrow on.

    Written out because the general model's overhead, not the arithmetic, is most of its time at this size.
    """
    first = PROMPT_TOKENS - 1
    rotation = _rotation(token_ids_NT.shape[1])
    hidden = F.embedding(token_ids_NT, weights["model.embed_tokens.weight"])
    for layer in range(LAYERS):
        block = {k.split(".", 3)[3]: w for k, w in weights.items() if k.startswith(f"model.layers.{layer}.")}
        attended = _attention(block, _norm(hidden, block["input_layernorm.weight"]), rotation)
        if layer == LAYERS - 1:
            hidden, attended = hidden[:, first:], attended[:, first:]
        hidden = hidden + F.linear(attended, block["self_attn.o_proj.weight"])
        normed = _norm(hidden, block["post_attention_layernorm.weight"])
        gate = F.silu(F.linear(normed, block["mlp.gate_proj.weight"]))
        up = F.linear(normed, block["mlp.up_proj.weight"])
        hidden = hidden + F.linear(gate * up, block["mlp.down_proj.weight"])
    return F.linear(_norm(hidden, weights["model.norm.weight"]), weights["lm_head.weight"])


def _norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, (HIDDEN,), weight, NORM_EPS)


def _rotation(tokens: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, D / H] of rotary positions (Su et al. 2021), in Llama's half-split layout."""
    size = HIDDEN // HEADS
    frequencies = 1.0 / ROPE_THETA ** (torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(tokens).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _attention(block: Weights, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    rows, tokens, _ = hidden.shape

    def heads(name: str) -> Tensor:
        projected = F.linear(hidden, block[f"self_attn.{name}_proj.weight"])
        return projected.view(rows, tokens, HEADS, HIDDEN // HEADS).transpose(1, 2)

    def rotated(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * rotation[0] + torch.cat([-right, left], dim=-1) * rotation[1]

    mixed = F.scaled_dot_product_attention(
        rotated(heads("q")), rotated(heads("k")), heads("v"), is_causal=True
    )
    return mixed.transpose(1, 2).reshape(rows, tokens, HIDDEN)


def _write(directory: Path, weights: Weights) -> None:
    """The files that transformers and vLLM expect; written here, so that no library version is in them."""
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    _write_json(directory / "config.json", _config() | special)
    _write_json(directory / "generation_config.json", special)
    _write_json(directory / "tokenizer.json", _tokenizer())
    names = {"bos_token": CHARACTERS[BOS], "eos_token": CHARACTERS[EOS], "pad_token": CHARACTERS[PAD]}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT} | names
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(CHARACTERS),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "hidden_act": "silu",
        "initializer_range": INIT_STD,
        "tie_word_embeddings": False,
    }


def _tokenizer() -> dict[str, object]:
    """One token a character, BOS in front, in the format of the tokenizers library."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": CHARACTERS[i]} | special for i in (PAD, BOS, EOS)],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": CHARACTERS[BOS], "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {
                CHARACTERS[BOS]: {"id": CHARACTERS[BOS], "ids": [BOS], "tokens": [CHARACTERS[BOS]]}
            },
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {character: i for i, character in enumerate(CHARACTERS)},
            "unk_token": CHARACTERS[PAD],
        },
    }
