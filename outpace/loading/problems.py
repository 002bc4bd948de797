"""The errors that transformers and its libraries raise for bad files, and the text for our errors."""

import pickle

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

LOAD_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError, AttributeError, EOFError),
    *(ArithmeticError, SafetensorError, StrictDataclassError, pickle.UnpicklingError),
)
REMEDY = "download the model again, or use one that transformers knows: Outpace never runs code from a model"


_LONGEST = 300


def line(error: Exception) -> str:
    """The first line of an error's message; of a failed validation all lines, since the reason is in the second."""
    if isinstance(error, StrictDataclassError):
        text = " ".join(str(error).split())
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}.."
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
