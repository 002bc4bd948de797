"""`outpace shard`: write a model as one file for each rank of tensor parallelism."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outpace.cli.model import Model, SameModel, one_model
from outpace.cli.talk import DType
from outpace.errors import ConfigError, NotSupportedYet
from outpace.log import size_text

if TYPE_CHECKING:
    import torch

    from outpace.loading.write_shards import Written


def command(
    tp: Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Number of ranks.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; its parent must exist.")],
    model: Model = None,
    same_model: SameModel = None,
    dtype: DType = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DIR, if it holds shards.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write a model as one file for each rank of tensor parallelism. The folder loads like any other model folder.

    One process writes all files and needs little memory, whatever the size of the model: weights pass through in
    blocks. The folder appears when it is complete; if something fails, nothing is left.
    """
    name = one_model(model, same_model)
    wanted = None if dtype is None else float_dtype(dtype)

    from outpace.loading.save import shard_model  # imported late: this takes seconds, and bad options fail first

    with ended_by_signals(), bar(Console(stderr=True)) as progress:
        written = shard_model(name, tp, out, dtype=wanted, force=force, progress=progress)
    typer.echo(json.dumps(_summary(written)) if as_json else _text(written))


def float_dtype(name: str) -> "torch.dtype":
    from outpace.config.values import parse_dtype

    try:
        found = parse_dtype(name)
    except ValueError as error:
        raise ConfigError(f"dtype: {error}") from None
    if not found.is_floating_point:
        raise NotSupportedYet(f"dtype={name}", "sharding of quantized weights")
    return found


@contextmanager
def bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with GB and GB/s, on terminals only."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _summary(written: "Written") -> dict[str, object]:
    return {
        "folder": str(written.folder),
        "files": written.files,
        "bytes": written.nbytes,
        "tokenizer": has_tokenizer(written),
        "seconds": round(written.seconds, 3),
        "gb_per_second": round(written.nbytes / 1e9 / written.seconds, 3),
    }


def _text(written: "Written") -> str:
    sizes = (f"  {name}  {size_text(size)}" for name, size in written.files.items())
    speed = size_text(written.nbytes / written.seconds)
    total = f"{size_text(written.nbytes)} in {written.seconds:.1f} s ({speed}/s)"
    missing = [] if has_tokenizer(written) else ["  no tokenizer: the model has none; put its files into the folder"]
    return "\n".join([f"{written.folder}: {total}", *sizes, *missing])


def has_tokenizer(written: "Written") -> bool:
    from outpace.loading.checkpoint import holds_tokenizer

    return holds_tokenizer(written.folder)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block like Ctrl-C, so that it cleans up; exit code 128 + N."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]

    def leave(number: int, frame: object) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)  # a second signal must not stop the clean-up
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
