"""Opens a checkpoint of any kind and checks the names and shapes of its tensors before reading any."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.errors import ModelError
from outpace.loading.checkpoint import local_path
from outpace.loading.descriptor import Descriptor, read_descriptor
from outpace.loading.dtypes import short
from outpace.loading.foreign.method import stored_settings
from outpace.loading.join_ranks import RankPart, Shape, Splits, Wanted, join_parts, join_ranks, read_parts
from outpace.loading.layout import DESCRIPTOR, SAVE_ID, Layout, find_layout, lone_safetensors, read_index
from outpace.loading.safetensors_file import sources_of
from outpace.loading.safetensors_header import read_header
from outpace.loading.torch_file import RankFile, read_rank, read_torch
from outpace.loading.training import find_ranks
from outpace.loading.weights import Source, Weights
from outpace.log import chosen, logger

_TORCH = (".pt", ".pth", ".bin")
_PARTS = "regions"  # metadata key in files of `outpace shard`
_WHOLE = "list it under tp, or shard the model again"
_ADD_TP = 'if the files are parts of ranks, add "parallelization": "tp" to the descriptor'
_DEEPSPEED_NAMES = (".attn_qkvw", ".attn_ow", ".inter_w", ".output_w")


def open_weights(
    source: str | Path | Mapping[str, Any],
    *,
    base_dir: str = "",
    training_mp_size: int = 1,
    shapes: Mapping[str, Shape] | None = None,
    splits: Splits | None = None,
    field: str = "model",
) -> Weights:
    """The weights of a folder, a file or a descriptor; tensors that ranks split are joined.

    base_dir: the folder of a descriptor's files. training_mp_size: number of ranks that saved it; 1: as many as there
    are. shapes: shapes of the model's tensors by name, to find out how ranks split them. splits: how the model would be
    split over ranks, to find the order of rows in fused query, key and value. field: the option that named the source,
    for errors.
    """
    try:
        degree, weights = _open(source, base_dir, Wanted(shapes or {}, splits), field)
    except OSError as error:
        raise ModelError(f"{field}: cannot read the checkpoint ({error}); check names and rights") from error
    except ModelError as error:
        start, _, rest = str(error).partition(": ")
        if start in (field, "base_dir") or (start == "checkpoint" and isinstance(source, Mapping)):
            raise
        raise ModelError(f"{field}: {rest if start == 'model' else error}") from error
    if training_mp_size not in (1, degree):
        raise ModelError(
            f"training_mp_size: {weights.origin} was saved by {degree} rank{'s' * (degree != 1)}, "
            f"not {training_mp_size}; remove it"
        )
    return weights


def _open(source: str | Path | Mapping[str, Any], base_dir: str, wanted: Wanted, field: str) -> tuple[int, Weights]:
    """(number of ranks that saved it, weights)."""
    takes_base_dir = field != "model"  # the model argument of LLM and the commands has no base_dir
    if isinstance(source, Mapping):
        return _of_descriptor(read_descriptor(source, base_dir), wanted)
    path = _find(source, base_dir)
    if path.is_dir() and (layout := find_layout(path)):
        return 1, _of_layout(path, layout)
    if path.is_dir() and (path / DESCRIPTOR).is_file():
        return _of_descriptor(read_descriptor(path / DESCRIPTOR, base_dir, takes_base_dir=takes_base_dir), wanted)
    if path.is_dir():
        return _of_training(path, wanted)
    if path.name.endswith(".index.json"):
        return 1, _of_layout(path.parent, read_index(path))
    if path.suffix.lower() == ".json":
        return _of_descriptor(read_descriptor(path, base_dir, takes_base_dir=takes_base_dir), wanted)
    return 1, Weights(str(path), _of_file(path), stored_settings(path.parent))


def _find(source: str | Path, base_dir: str) -> Path:
    """The file or folder of `source`, looked up in base_dir first."""
    base = Path(base_dir).expanduser()
    if base_dir and (below := base / source).absolute().is_relative_to(base.absolute()) and below.exists():
        return below
    path = local_path(source)
    if path is None:
        raise ModelError(f"model: no such file or folder {str(source)!r}; check the name")
    if base_dir and not (path.suffix.lower() == ".json" or (path / DESCRIPTOR).is_file()):
        raise ModelError(f"base_dir: {path} is not in {base_dir}; remove base_dir")
    return path


def _of_layout(folder: Path, layout: Layout) -> Weights:
    sources = _union([(path, _of_file(path)) for path in layout.files], layout.places)
    return Weights(str(folder), sources, stored_settings(folder))


def _of_file(path: Path, remedy: str = "name the folder that holds all of them") -> Mapping[str, Source]:
    """The whole tensors of a file. remedy: for the error if it holds the part of a rank."""
    suffix = path.suffix.lower()
    if suffix in _TORCH:
        return read_torch(path, remedy=remedy)
    if suffix == ".gguf":
        from outpace.loading.gguf import read_gguf  # imported late: gguf and transformers take seconds

        return read_gguf(path).weights().sources
    if suffix != ".safetensors":
        raise ModelError(
            f"model: {path} is not a checkpoint; name a folder, or a file .safetensors, .gguf, .pt or .bin"
        )
    sources, parts = _of_safetensors(path)
    if parts:
        raise ModelError(f"model: {path} holds the part of one rank; {remedy}")
    return sources


def _of_safetensors(path: Path) -> tuple[dict[str, Source], dict[str, RankPart]]:
    header = read_header(path)
    parts = read_parts(path, header.metadata[_PARTS]) if _PARTS in header.metadata else {}
    if unknown := parts.keys() - header.entries.keys():
        raise ModelError(f"model: {path}: regions name {min(unknown)[:200]!r}, which it lacks; shard the model again")
    return sources_of(path, header), parts


def _of_training(folder: Path, wanted: Wanted) -> tuple[int, Weights]:
    if files := find_ranks(folder):
        return len(files), Weights(str(folder), _of_ranks(str(folder), files, None, wanted))
    if layout := lone_safetensors(folder):
        return 1, _of_layout(folder, layout)
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in (".gguf", *_TORCH))
    remedy = f"name the file itself: {folder / names[0]}" if names else "download the model again"
    raise ModelError(f"model: {folder} has no weights (model.safetensors); {remedy}")


def _of_ranks(origin: str, files: Sequence[Path], version: float | None, wanted: Wanted) -> dict[str, Source]:
    ranks = [read_rank(path) for path in files]
    for path, rank in zip(files, ranks, strict=True):
        if rank.degree not in (None, len(files)):
            raise ModelError(f"{origin}: {path.name} {_wrong_degree(rank.degree or 0, len(files))}")
    return join_ranks(origin, [rank.sources for rank in ranks], version=_version(origin, ranks, version), wanted=wanted)


def _wrong_degree(degree: int, files: int) -> str:
    if degree < files:
        return f"was saved by {degree} of {files} ranks; remove the files that are of another checkpoint"
    missing = ", ".join(str(rank) for rank in range(files, min(degree, files + 5)))
    return f"was saved by {degree} ranks, but the file of rank {missing} is missing; copy the files of all ranks"


def _version(origin: str, ranks: Sequence[RankFile], asked: float | None) -> float:
    """Megatron's version: the descriptor's, else that of the files; version 0 if they have none."""
    found = {rank.version for rank in ranks} if asked is None else {asked}
    if len(found) > 1 or (known := found.pop()) not in (None, 0, 1, 2, 3):
        raise ModelError(f"{origin}: checkpoint_version differs between ranks, or is not 0, 1.0, 2.0 or 3.0")
    if known is None and len(ranks) > 1 and any("query_key_value" in name for name in ranks[0].sources):
        chosen("query_key_value", "version 0", "the files name no checkpoint_version; a descriptor can name another")
    return known or 0


def _of_descriptor(found: Descriptor, wanted: Wanted) -> tuple[int, Weights]:
    degree = max(1, len(found.ranks))
    _check_together(found)
    if found.megatron:
        files = [rank[0] for rank in found.ranks]
        sources = _of_ranks(found.origin, files, found.version, wanted)
    else:
        remedy = _WHOLE if found.ranks else _ADD_TP
        sources = _union([(path, _of_file(path, remedy)) for path in found.whole], remedy=remedy)
        split = _of_split(found, wanted)
        if both := sources.keys() & split.keys():
            raise ModelError(f"{found.origin}: {min(both)[:200]!r} is both in non_tp and in tp; save it again")
        sources |= split
    floats = {short(source.dtype) for source in sources.values() if source.dtype.is_floating_point}
    if found.dtype and floats and found.dtype not in floats:
        raise ModelError(f"{found.origin}: dtype: the files hold {', '.join(sorted(floats))}, not {found.dtype}")
    return degree, Weights(found.origin, sources)


def _check_together(found: Descriptor) -> None:
    """Check that all files of `outpace shard` come from one run. Older releases wrote no id."""
    files = [*found.whole, *(path for files in found.ranks for path in files)]
    ids: dict[Path, str | None] = {}
    for path in files:
        if path.suffix.lower() == ".safetensors":
            metadata = read_header(path).metadata
            if found.save_id or SAVE_ID in metadata or _PARTS in metadata:
                ids[path] = metadata.get(SAVE_ID)
    wanted = found.save_id or next(iter(ids.values()), None)
    for path, own in ids.items():
        if own != wanted:
            other = "the descriptor" if found.save_id else next(iter(ids)).name
            raise ModelError(
                f"{found.origin}: {path.name} was not written together with {other} ({SAVE_ID} differs): they may be "
                "of different models; copy all files of one run, or shard the model again"
            )


def _of_split(found: Descriptor, wanted: Wanted) -> dict[str, Source]:
    """Join the files of ranks: those of `outpace shard` by the parts in their metadata, others by shapes."""
    ranks: list[dict[str, Source]] = []
    parts: dict[str, list[tuple[RankPart, Source]]] = {}
    for files in found.ranks:
        own: list[tuple[Path, Mapping[str, Source]]] = []
        for path in files:
            if path.suffix.lower() == ".safetensors":
                sources, described = _of_safetensors(path)
            else:
                sources, described = read_torch(path, ranks=len(found.ranks)), {}
            for name, part in described.items():
                parts.setdefault(name, []).append((part, sources.pop(name)))
            own.append((path, sources))
        ranks.append(_union(own))
    for name in ranks[0] if ranks else ():
        if name.endswith(_DEEPSPEED_NAMES):
            raise ModelError(
                f"{found.origin}: {name!r} is a fused tensor of DeepSpeed's own layers (save_mp_checkpoint_path); "
                "name the checkpoint that these files were made from"
            )
    whole = join_ranks(found.origin, ranks, version=found.version or 0, wanted=wanted) if ranks else {}
    if both := whole.keys() & parts.keys():
        raise ModelError(f"{found.origin}: {min(both)[:200]!r} has a region in one file and none in another")
    return whole | {name: join_parts(f"{found.origin}: {name[:200]!r}", held) for name, held in parts.items()}


def _union(
    files: Sequence[tuple[Path, Mapping[str, Source]]],
    places: Mapping[str, Path] | None = None,
    remedy: str = "remove one of them",
) -> dict[str, Source]:
    """The tensors of several files. places: the index, which decides if a tensor is in two files."""
    by_path, places = dict(files), places or {}
    found = {name: by_path[path][name] for name, path in places.items() if name in by_path[path]}
    owner, settled = {name: places[name] for name in found}, set(found)
    for path, sources in files:
        for name, source in sources.items():
            if found.setdefault(name, source) is not source and name not in settled:
                raise ModelError(f"model: {name[:200]!r} is in two files, {owner[name]} and {path}; {remedy}")
            owner.setdefault(name, path)
    if stale := sorted(places.keys() - found.keys()):
        # only a warning: tensors that the model needs are reported as missing later
        logger.warning("weights that the index lists and no file has: %s (%d)", ", ".join(stale[:5]), len(stale))
    return found
