"""What transformers and the libraries under it raise for files that are not what they should be, and how it is told."""

import pickle

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

LOAD_ERRORS = (
    *(OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError, AttributeError, EOFError),
    *(SafetensorError, StrictDataclassError, pickle.UnpicklingError),
)
REMEDY = "download the model again, or use one that transformers runs by itself: Outpace never runs code from a model"


def line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
