"""The prompts that a model is verified with: a padded batch, a long one, a short one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from outpace.loading.inspect import ModelInfo

Inputs = dict[str, Tensor]
"""input_ids and attention_mask, [B, L]."""

NEW_TOKENS = 32
LENGTHS: Mapping[str, tuple[int, ...]] = {"batch": (23, 7, 41, 2), "long": (300,), "short": (1,)}
"""Tokens of the prompts in each set; a model with few positions gets fewer."""
TEXT = (
    "The lighthouse keeper wrote down the weather every morning: wind from the west, 14 knots, and a grey sea. In 1911 "
    "he counted 37 ships, two of them under sail; by 1926 there were none. His daughter, who had learned to read from "
    'those pages, asked why anyone would want to know. "Because," he said, "somebody may ask later, and then it is too '
    'late to look." She kept the habit, first in a notebook, then in a table of numbers: date, pressure, temperature, '
    "rain. When the records were compared with the harbour's own, the two never differed by more than one degree."
)


def new_tokens(info: ModelInfo) -> int:
    """New tokens of each prompt, with room for the prompt in the model's positions."""
    return NEW_TOKENS if info.max_positions is None else min(NEW_TOKENS, max(1, info.max_positions // 2))


def make_prompts(
    model: nn.Module, info: ModelInfo, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> dict[str, Inputs]:
    """Sets of prompts by name."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    limit = max(LENGTHS["long"]) if info.max_positions is None else max(1, info.max_positions - new_tokens(info))
    tokens, device = text_tokens(tokenizer, embedding.weight.shape[0], seed), embedding.weight.device
    return {name: _padded(excerpts(tokens, lengths, limit), device) for name, lengths in LENGTHS.items()}


def text_tokens(tokenizer: PreTrainedTokenizerBase | None, vocab: int, seed: int) -> list[int]:
    """A text if the model has a tokenizer for it, random tokens otherwise."""
    tokens = [] if tokenizer is None else list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    if tokens and max(tokens) < vocab:
        return tokens
    drawn = torch.randint(min(3, vocab - 1), vocab, (512,), generator=torch.Generator().manual_seed(seed))
    return drawn.tolist()


def excerpts(tokens: list[int], lengths: tuple[int, ...], limit: int) -> list[list[int]]:
    """Parts of the tokens, each from another place, at most `limit` long."""
    return [
        [tokens[(31 * row + place) % len(tokens)] for place in range(min(length, limit))]
        for row, length in enumerate(lengths)
    ]


def _padded(rows: list[list[int]], device: torch.device) -> Inputs:
    """Pad on the left, as Hugging Face's generate needs it; padding is marked by the mask, not by a token."""
    width = max(len(row) for row in rows)
    ids = [[row[0]] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}
