"""`outpace quantize`: write a model with quantized weights, in a layout that others read too."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outpace.cli.model import Model, SameModel, one_model
from outpace.cli.shard import bar, ended_by_signals, float_dtype, has_tokenizer
from outpace.cli.talk import DType
from outpace.errors import ConfigError
from outpace.log import size_text

if TYPE_CHECKING:
    from outpace.loading.write_quantized import WrittenQuantized

SCHEMES = ("int8", "int4", "w8a8", "fp8")


def command(
    scheme: Annotated[str, typer.Option("--scheme", metavar="S", help=f"One of {', '.join(SCHEMES)}.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; its parent must exist.")],
    model: Model = None,
    same_model: SameModel = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", metavar="N", help="Columns that share a scale (int8, int4).")
    ] = None,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="With zero points (int4).")] = False,
    head: Annotated[
        str | None, typer.Option("--head", metavar="int8", help="Quantize the head too; else it stays as it is.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="NAME", help="Leave linears with NAME in their names; may be repeated."),
    ] = None,
    dtype: DType = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DIR, if it holds quantized weights.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write a model with quantized weights. They are in the layout of compressed-tensors.

    int8 and int4: weights alone. w8a8 and fp8: rows are quantized too, as they come. One process needs little memory,
    whatever the size of the model. The folder appears when it is complete; a run that was ended is gone on with by
    the same command.
    """
    name = one_model(model, same_model)
    if scheme not in SCHEMES:
        raise ConfigError(f"scheme: expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    wanted = None if dtype is None else float_dtype(dtype)

    from outpace.loading.quantize import Asked, quantize_model  # imported late: this takes seconds

    asked = Asked(scheme, group_size, asymmetric, head, tuple(exclude or ()), wanted)  # type: ignore[arg-type]
    with ended_by_signals(), bar(Console(stderr=True)) as progress:
        written = quantize_model(name, out, asked, force=force, progress=progress)
    typer.echo(json.dumps(_summary(written)) if as_json else _text(written))


def _summary(written: "WrittenQuantized") -> dict[str, object]:
    return {
        "folder": str(written.folder),
        "files": written.files,
        "bytes_before": written.before,
        "bytes": written.nbytes,
        "quantized": len(written.errors),
        "worst": dict(written.worst),
        "errors": written.errors,
        "taken_up": written.taken_up,
        "tokenizer": has_tokenizer(written),
        "seconds": round(written.seconds, 3),
    }


def _text(written: "WrittenQuantized") -> str:
    share = written.nbytes / max(1, written.before)
    sizes = f"{size_text(written.before)} became {size_text(written.nbytes)} ({share:.0%})"
    lines = [f"{written.folder}: {sizes} in {written.seconds:.1f} s"]
    if written.taken_up:
        lines.append(f"  {len(written.taken_up)} of {len(written.files)} files were finished by an earlier run")
    lines.append(f"  {len(written.errors)} weights quantized; the largest relative errors of a weight:")
    lines += [f"    {error:.3%}  {name}" for name, error in written.worst]
    if not has_tokenizer(written):
        lines.append("  no tokenizer: the model has none; put its files into the folder")
    return "\n".join(lines)
