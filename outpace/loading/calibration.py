"""The text that `quant.calibration` names, as tokens."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from outpace.config.sections import CalibrationConfig
from outpace.errors import ConfigError, InputError
from outpace.loading.text import read_text
from outpace.loading.windows import Tokens, read_tokens


def read_calibration(asked: CalibrationConfig, tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, Tokens]:
    """Where the text comes from, and all its tokens: those after the first `asked.tokens` are not for calibration.

    tokenizer: None, where the text is token ids.
    """
    text = Path(asked.text) if isinstance(asked.text, str) else asked.text
    try:
        name, content = read_text(text)
        if isinstance(content, str) and tokenizer is None:
            raise ConfigError(
                "quant.calibration.text: there is no tokenizer to read a text with; give token ids, or use outpace.LLM "
                "with a model that has one"
            )
        return name, read_tokens(tokenizer, content, None)
    except InputError as error:
        raise ConfigError(f"quant.calibration.{error}") from error
