"""Finds the files of ranks in training checkpoints of DeepSpeed and Megatron. Imports no torch."""

import re
from pathlib import Path

from outpace.errors import ModelError

_RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_RANK_FOLDER = re.compile(r"mp_rank_(\d+)")
_FILES_OF_RANK = ("model_optim_rng.pt", "model_rng.pt")
_LATEST = "latest"
_LATEST_ITERATION = "latest_checkpointed_iteration.txt"

_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r".*zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt"),
        "is a ZeRO-3 checkpoint, whose weights are split over the files of the optimizer; run zero_to_fp32.py "
        "(DeepSpeed puts it beside them) and name what it writes",
    ),
    (
        re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt"),
        "has files of experts, which this release does not read; save the model as a Hugging Face folder",
    ),
    (
        re.compile(r"layer_\d+-model_\d+-model_states\.pt|mp_rank_\d+_\d+"),
        "is split into pipeline stages, which this release does not read; convert it with the tools of the training "
        "framework to a Hugging Face folder",
    ),
)


def find_ranks(folder: Path) -> tuple[Path, ...] | None:
    """The files of all ranks in order; None: the folder is not a training checkpoint.

    folder: of one tag or iteration, or their parent folder, where the latest one is used.
    """
    return _ranks_of(_newest(folder) or folder)


def _newest(folder: Path) -> Path | None:
    for name in (_LATEST, _LATEST_ITERATION):
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                tag = file.read(200).decode("utf-8", "replace").strip()
            found = folder / (f"iter_{int(tag):07d}" if name == _LATEST_ITERATION and tag.isdecimal() else tag)
            if not tag or "\0" in tag or Path(tag).name != tag or tag == ".." or not found.is_dir():
                raise ModelError(
                    f"model: {folder / name} says {tag!r}, but {folder} has no folder {found.name!r}; "
                    "copy it there, or name the folder of another tag or iteration"
                )
            return found
    return None


def _ranks_of(folder: Path) -> tuple[Path, ...] | None:
    entries = sorted(folder.iterdir())
    for entry in entries:
        for pattern, problem in _REFUSED:
            if pattern.fullmatch(entry.name):
                raise ModelError(f"model: {folder} {problem} (found {entry.name})")
    ranks: dict[int, Path] = {}
    for entry in entries:
        path: Path | None = entry
        found = _RANK_FILE.fullmatch(entry.name)
        if not found and (found := _RANK_FOLDER.fullmatch(entry.name)):
            path = next((entry / name for name in _FILES_OF_RANK if (entry / name).is_file()), None)
        if not found:
            continue
        if path is None:
            raise ModelError(f"model: {entry} has no {_FILES_OF_RANK[0]}; copy the checkpoint again")
        if (rank := int(found[1])) in ranks:
            raise ModelError(f"model: {folder} has two files of rank {rank}, {ranks[rank].name} and {path.name}")
        ranks[rank] = path
    for rank in range(len(ranks)):
        if rank not in ranks:
            raise ModelError(f"model: {folder} lacks the file of rank {rank} (mp_rank_{rank:02d}); copy it again")
    return tuple(ranks[rank] for rank in range(len(ranks))) or None
