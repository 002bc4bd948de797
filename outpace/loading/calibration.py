"""Reads the calibration text of `quant.calibration` as tokens."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outpace.config.quantization import CalibrationConfig
from outpace.errors import ConfigError, InputError
from outpace.loading.text import read_text
from outpace.loading.windows import TextTokens, read_tokens
from outpace.log import chosen

WINDOW = 1024
"""Maximum tokens of a window."""
MIN_TOKENS = 16
"""Minimum tokens of a text."""


def read_calibration(asked: CalibrationConfig, tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, TextTokens]:
    """The source of the text, and all its tokens; only the first `asked.tokens` are for calibration.

    tokenizer: None if the text is token ids.
    """
    text = Path(asked.text) if isinstance(asked.text, str) else asked.text
    try:
        name, content = read_text(text)
        if isinstance(content, str) and tokenizer is None:
            raise ConfigError(
                "quant.calibration.text: the model has no tokenizer to read a text with; put the tokenizer's files "
                "into its folder, or give token ids (in Python)"
            )
        tokens = read_tokens(tokenizer, content, None)
    except InputError as error:
        raise ConfigError(f"quant.calibration.{error}") from error
    if len(tokens.ids) < MIN_TOKENS:
        raise ConfigError(
            f"quant.calibration.text: {len(tokens.ids)} tokens are too few, at least {MIN_TOKENS} are needed; give a "
            "longer text"
        )
    return name, tokens


def read_windows(
    asked: CalibrationConfig, tokenizer: PreTrainedTokenizerBase | None, config: PreTrainedConfig
) -> Tensor:
    """The tokens for calibration as full windows [windows, tokens]; the remainder is not used."""
    name, tokens = read_calibration(asked, tokenizer)
    text: Any = config.get_text_config()
    ids = tokens.ids[: asked.tokens]
    if max(ids) >= text.vocab_size:
        raise ConfigError(
            f"quant.calibration.text: token {max(ids)} is not among the {text.vocab_size} tokens of the model"
        )
    most = min(WINDOW, getattr(text, "max_position_embeddings", None) or WINDOW) - len(tokens.prefix)
    length = min(most, len(ids))
    windows = [tokens.prefix + ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    chosen("calibration", f"{len(windows)} windows of {len(windows[0])} tokens", name)
    return torch.tensor(windows)
