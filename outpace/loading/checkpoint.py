"""Finds the folder of a model by its name, and checks its files before any weights are read."""

import re
from difflib import get_close_matches
from pathlib import Path

from outpace.errors import ModelError
from outpace.loading.descriptor import read_descriptor
from outpace.loading.layout import DESCRIPTOR, find_layout, lone_safetensors
from outpace.loading.safetensors_header import read_header
from outpace.loading.training import find_ranks
from outpace.log import chosen

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")


def local_path(source: str | Path) -> Path | None:
    """The file or folder that `source` names; None: it can only be a Hugging Face id."""
    if not str(source):
        raise ModelError("model: the name is empty; name a folder, a .gguf file or a Hugging Face id")
    try:
        path = Path(source).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # a name too long, no rights, no such user
        raise ModelError(
            f"model: {str(source)[:200]!r} cannot be a file or folder ({error}); check the name"
        ) from error
    is_id = isinstance(source, str) and _HUB_ID.fullmatch(source) and path.suffix.lower() != ".gguf"
    if is_id:
        return None
    raise ModelError(f"model: no such file or folder {str(source)!r}{close_names(path)}")


def close_names(path: Path) -> str:
    """`; did you mean ...`, if a similar name exists in the same folder."""
    if not path.parent.is_dir():
        return f"; {path.parent} does not exist either"
    near = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=3, cutoff=0.6)
    return f"; did you mean {', '.join(str(path.parent / name) for name in near)}?" if near else "; check the name"


def fetch(name: str) -> Path:
    """The folder of a model on Hugging Face, downloaded if it is not in its cache; respects HF_HUB_OFFLINE."""
    from huggingface_hub import snapshot_download  # imported late: a local folder does not need it

    skip = ["*/*", "consolidated*"]  # other formats of the same weights
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=skip))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*.bin"], ignore_patterns=skip)
    except Exception as error:  # the hub's client raises the errors of several libraries
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"model: {name!r} is no local file or folder, and cannot be fetched from Hugging Face ({line}); "
            "check the name and the connection, or name a local folder or .gguf file"
        ) from error
    return folder


def open_checkpoint(path: Path) -> Path:
    """The folder of a model or of a weight file, after a check that it has a config and complete weight files."""
    folder = path if path.is_dir() else path.parent
    if path != folder and path.suffix.lower() not in WEIGHT_FILES:
        raise ModelError(
            f"model: {path} is neither a folder nor a file of weights; name the folder that holds the model"
        )
    if not (folder / "config.json").is_file():
        inside = sorted(path.name for path in folder.glob("*.gguf"))
        if inside:
            remedy = f"name the file itself: {folder / inside[0]}"
        elif find_ranks(folder):
            remedy = (
                "a training run saved it: copy config.json and the tokenizer of the model into it, or in Python load "
                f"LLM('model folder', checkpoint='{folder}')"
            )
        else:
            remedy = "name the folder that holds the model"
        raise ModelError(f"model: {folder} has no config.json; {remedy}")
    files = weight_files(path)
    if not files:
        raise ModelError(f"model: {folder} has no weights (model.safetensors); download the model again")
    if all(file.suffix.lower() == ".safetensors" for file in files):
        for file in files:
            read_header(file)
    else:
        chosen(
            "weights",
            files[0].name,
            "the folder has no safetensors; only tensors are read, code in the file never runs",
        )
    return folder


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that `open_weights` would read."""
    if not folder.is_dir():
        return (folder,)
    if layout := find_layout(folder):
        return layout.files
    if (folder / DESCRIPTOR).is_file():
        found = read_descriptor(folder / DESCRIPTOR)
        return (*found.whole, *(path for files in found.ranks for path in files))
    if ranks := find_ranks(folder):
        return ranks
    return layout.files if (layout := lone_safetensors(folder)) else ()
