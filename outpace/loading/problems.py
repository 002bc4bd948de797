"""The errors that transformers and its libraries raise for bad files, and the text for our errors."""

import pickle

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

LOAD_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError, AttributeError, EOFError),
    *(SafetensorError, StrictDataclassError, pickle.UnpicklingError),
)
REMEDY = "download the model again, or use one that transformers knows: Outpace never runs code from a model"


def line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
