"""`outpace quantize`: write a model with quantized weights, in a layout that other engines read too."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outpace.cli.model import Model, SameModel, one_model
from outpace.cli.shard import bar, ended_by_signals, float_dtype, has_tokenizer
from outpace.cli.talk import Device, DType, given
from outpace.errors import ConfigError
from outpace.log import size_text

if TYPE_CHECKING:
    from outpace.config import LLMConfig
    from outpace.loading.write_quantized import WrittenQuantized
    from outpace.quant.plan import QuantPlan

SCHEMES = ("int8", "int4", "w8a8", "fp8")
BOUNDS = {"auto": "max_perplexity_increase", "max_bytes": "max_bytes", "bits_per_weight": "bits_per_weight"}
"""Options that measure a plan -> fields of quant.auto."""


def command(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; its parent must exist.")],
    model: Model = None,
    same_model: SameModel = None,
    scheme: Annotated[
        str | None, typer.Option("--scheme", metavar="S", help=f"One of {', '.join(SCHEMES)}, for all weights.")
    ] = None,
    auto: Annotated[
        float | None,
        typer.Option(
            "--auto", metavar="X", help="Measure a scheme for each weight: perplexity grows by X at most; 0.01 is 1 %."
        ),
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="SIZE", help="Likewise: all weights take SIZE at most, as 4GB.")
    ] = None,
    bits_per_weight: Annotated[
        float | None, typer.Option("--bits-per-weight", metavar="B", help="Likewise: linears have B bits on average.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="A plan that was measured earlier: outpace-plan.json.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Calibration text in UTF-8.", show_default="a built-in text"),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Number of its tokens to use.", show_default="2048")
    ] = None,
    device: Device = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", metavar="N", help="Columns that share a scale (int8, int4).")
    ] = None,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="With zero points (int4).")] = False,
    head: Annotated[
        str | None, typer.Option("--head", metavar="int8", help="Quantize the head too; else it stays as it is.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="NAME", help="Skip linears with NAME in their names; may be repeated."),
    ] = None,
    method: Annotated[
        str,
        typer.Option("--method", metavar="M", help="rtn (round to nearest) or gptq (calibrated on --text)."),
    ] = "rtn",
    smooth: Annotated[
        float | None,
        typer.Option("--smooth", metavar="ALPHA", help="SmoothQuant, calibrated on --text: 0 to 1, as 0.5."),
    ] = None,
    dtype: DType = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DIR, if it holds quantized weights.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write a model with quantized weights. They are in the layout of compressed-tensors.

    int8 and int4 quantize only weights; w8a8 and fp8 also quantize activations at run time. One process needs little
    memory, whatever the size of the model; but --auto, --max-bytes and --bits-per-weight hold the whole model in memory
    to measure it, and each weight becomes int4 or int8, or stays as it is. The folder appears when it is complete; the
    same command continues a run that was stopped. --method gptq and --smooth run the model on a text, with one weight
    in memory at a time; such a run starts again from the beginning.
    """
    name = one_model(model, same_model)
    bounds = given(auto=auto, max_bytes=max_bytes, bits_per_weight=bits_per_weight)
    ways = [*given(scheme=scheme, plan=plan), *bounds]
    if len(ways) != 1:
        flags = ", ".join(f"--{way.replace('_', '-')}" for way in ("scheme", "plan", *BOUNDS))
        raise ConfigError(f"scheme: give one of {flags}{f', not {len(ways)}' if ways else ''}")
    if scheme is not None and scheme not in SCHEMES:
        raise ConfigError(f"scheme: expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    if scheme is None and (any((group_size, asymmetric, head, exclude)) or method != "rtn" or smooth is not None):
        raise ConfigError(
            "group-size, asymmetric, head, exclude, method, smooth: a plan has a scheme for each weight; remove them"
        )
    calibrates = method != "rtn" or smooth is not None
    if not (bounds or calibrates) and (unused := next(iter(given(text=text, tokens=tokens, device=device)), None)):
        raise ConfigError(f"{unused}: nothing is measured or calibrated; remove it, or give --auto or --method gptq")
    if dtype is not None and dtype.removeprefix("torch.") == "int8":
        raise ConfigError("dtype: it is that of scales and of other weights; for int8 weights give --scheme int8")
    wanted = None if dtype is None else float_dtype(dtype)
    measured = _asked_auto(bounds, text, tokens, dtype, device) if bounds else None

    from outpace.config.quantization import CalibrationConfig
    from outpace.loading.quantize import quantize_model  # imported late: this takes seconds
    from outpace.loading.quantize_options import Asked
    from outpace.quant.plan import QuantPlan

    found = None if plan is None else QuantPlan.read(str(plan))
    if measured is not None:
        found = _measured(name, measured, out, force)
    given_text = CalibrationConfig.of(given(text=text, tokens=tokens)) if calibrates else CalibrationConfig()
    how = (method, smooth, given_text, device if calibrates else None)
    asked = Asked(scheme, group_size, asymmetric, head, tuple(exclude or ()), wanted, found, *how)  # type: ignore[arg-type]
    with ended_by_signals(), bar(Console(stderr=True)) as progress:
        written = quantize_model(name, out, asked, force=force, progress=progress)
    if as_json:
        more = {} if found is None else {"plan": found.model_dump(mode="json")}
        typer.echo(json.dumps(_summary(written) | more))
    else:
        lines = [] if found is None else [found.summary, *found.measured]
        typer.echo("\n".join([_text(written), *(f"  {line}" for line in lines)]))


def _asked_auto(
    bounds: Mapping[str, Any], text: Path | None, tokens: int | None, dtype: str | None, device: str | None
) -> "LLMConfig":
    from outpace.config import LLMConfig

    auto = {BOUNDS[name]: value for name, value in bounds.items()}
    calibration = given(text=None if text is None else str(text), tokens=tokens)
    return LLMConfig.of(quant={"auto": auto, "calibration": calibration}, **given(dtype=dtype, device=device))


def _measured(model: str | None, config: "LLMConfig", out: Path, force: bool) -> "QuantPlan":
    """Measure the plan for a model, after the folder is checked."""
    from outpace.load_paged import find_plan
    from outpace.loading.out_folder import check_out
    from outpace.loading.write_quantized import QUANTIZED

    check_out(out, QUANTIZED, force=force)
    return find_plan(model, config)


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
