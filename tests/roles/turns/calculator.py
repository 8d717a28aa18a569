"""A model of two layers that asks a calculator and repeats what it says, well enough to be right at times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from roles.turns.dialogue import Dialogue
from tests.roles.turns.chat import END, PAD, a_call, a_character_tokenizer, encoded, rendered

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)
STEPS = 300
BATCH = 12
DIGITS = 5


def a_tokenizer() -> PreTrainedTokenizerFast:
    return a_character_tokenizer(TEMPLATE)


def asked(a: int, b: int) -> str:
    return f"{a}+{b}"


def save_calculator(directory: Path) -> Path:
    """Train on conversations in which the model calls ``add`` and then says what it replied."""
    torch.manual_seed(0)
    tokenizer = a_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    _train(model, tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    rng = np.random.default_rng(0)
    dialogue = Dialogue(tokenizer, (END,), 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * (1 - step / STEPS)
        rows = [
            _conversation(tokenizer, dialogue, *rng.integers(0, DIGITS, 2).tolist()) for _ in range(BATCH)
        ]
        ids = torch.tensor([row[0] for row in rows])
        labels = torch.tensor([row[1] for row in rows])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _conversation(
    tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue, a: int, b: int
) -> tuple[list[int], list[int]]:
    """Ids of a whole conversation, all of one length, and what is learnt of them."""
    prompt = rendered(tokenizer, [{"role": "user", "content": asked(a, b)}], more=True)
    call = [*encoded(tokenizer, a_call(a=a, b=b)), END]
    reply = dialogue.reply_ids([str(a + b)]).tolist()
    answer = [*encoded(tokenizer, str(a + b)), END]
    ids = prompt + call + reply + answer
    labels = [-100] * len(prompt) + call + [-100] * len(reply) + answer
    return ids, labels
