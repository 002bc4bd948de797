"""`outpace info`: the machine, the versions, and what Outpace would use here and why."""

import json
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.console import Console

from outpace._version import __version__
from outpace.bench.tables import table

PACKAGES = ("torch", "transformers", "triton", "safetensors", "tokenizers", "gguf", "pydantic")


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Print the machine, the versions, and what is used here and why."""
    if as_json:
        typer.echo(json.dumps(_content()))
        return
    console = Console()
    console.print(table("Machine", ("", ""), _machine(), justify="left"))
    console.print(table("Versions", ("", ""), _versions(), justify="left"))
    console.print(table("What is used here", ("what", "choice", "why"), _choices(), justify="left"))
    console.print(table("Which quantization runs fast here", ("scheme", "fast", "why"), _schemes(), justify="left"))


def _content() -> dict[str, object]:
    return {
        "machine": {row[0]: row[1] for row in _machine()},
        "versions": {row[0]: row[1] for row in _versions()},
        "choices": [{"what": what, "choice": choice, "why": why} for what, choice, why in _choices()],
        "schemes": [{"scheme": scheme, "fast": fast, "why": why} for scheme, fast, why in _schemes()],
    }


def _machine() -> Iterator[tuple[str, ...]]:
    import torch

    from outpace.loading.cache import cache_dir

    yield "system", f"{platform.system()} {platform.machine()}"
    yield "cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index}",
            f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, capability {facts.major}.{facts.minor}",
        )
    yield "cache", str(cache_dir())


def _versions() -> Iterator[tuple[str, ...]]:
    yield "outpace", __version__
    yield "python", platform.python_version()
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"


def _schemes() -> Iterator[tuple[str, str, str]]:
    from outpace.config import InferenceConfig
    from outpace.quant.fast import on_device

    for each in on_device(InferenceConfig().torch_device):
        yield each.scheme, each.fast, each.why


def _choices() -> Iterator[tuple[str, str, str]]:
    from outpace.config import InferenceConfig
    from outpace.kernels.dispatch import default_kernels
    from outpace.loading.dtypes import default_dtype
    from outpace.quant.asked import runs_stored

    device = InferenceConfig().torch_device
    dtype, reason = default_dtype(device)
    yield "device", str(device), "torch sees a GPU" if device.type == "cuda" else "torch sees no GPU"
    yield "dtype", str(dtype).removeprefix("torch."), f"init_inference: {reason}"
    default, why = default_kernels(device)
    yield "attention", "the model's own (sdpa where it can)", "with kernel_inject=True: pages and the kernels below"
    yield "kernels", default, f"in fused layers (kernel_inject=True): {why}"
    stored, why = runs_stored(InferenceConfig())
    yield "quantized checkpoints", "run from their own bits" if stored else "converted to the model's dtype", why
    graphs = "on request" if device.type == "cuda" else "no"
    yield "cuda graphs", graphs, "enable_cuda_graph=True" if device.type == "cuda" else "a CPU has none"
