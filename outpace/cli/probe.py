"""`outpace probe`: measures this machine's device, link and disk, and shows what is free."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from outpace.cli.talk import Device
from outpace.errors import ConfigError
from outpace.log import size_text

if TYPE_CHECKING:
    import torch

    from outpace.offload.probe import Probe


def command(
    nvme: Annotated[
        Path | None, typer.Option("--nvme", metavar="DIR", help="Measure the disk of this folder, too.")
    ] = None,
    device: Device = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again, even if results are cached.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Measure how fast device, link and disk are.

    This takes about 2 s; the results are kept in the cache folder. A disk is measured with a file of 1 GiB, which is
    removed again.
    """
    check_folder(nvme)

    from outpace.loading.cache import cache_dir
    from outpace.offload.probe import probe

    where = device_of(device)
    found = probe(where, nvme, cache_dir(), again=again)
    if as_json:
        typer.echo(json.dumps({**asdict(found), "free": free(where, nvme)}))
        return
    table = Table(title=f"{found.device}, measured {found.date}", title_justify="left", show_header=False)
    for row in _rows(found, free(where, nvme)):
        table.add_row(*row)
    Console().print(table)


def check_folder(nvme: Path | None) -> None:
    """Refuse a folder that does not exist."""
    if nvme is not None and not nvme.is_dir():
        raise ConfigError(f"nvme: {nvme} is not a folder; name one on the disk that will hold layers")


def device_of(name: str | None) -> "torch.device":
    """The device by its name, or the first GPU, or the CPU."""
    from outpace.config import InferenceConfig

    return InferenceConfig.of(None, **({} if name is None else {"device": name})).torch_device


def free(device: "torch.device", nvme: Path | None) -> dict[str, int | None]:
    """Free bytes of the device, of host memory, and of a folder's disk."""
    import torch

    from outpace.loading.memory import free_bytes

    disk = None if nvme is None else shutil.disk_usage(nvme).free
    return {"device": free_bytes(device), "host": free_bytes(torch.device("cpu")), "disk": disk}


def _rows(found: "Probe", room: dict[str, int | None]) -> Iterator[tuple[str, str]]:
    is_cpu = found.rates.link is None
    yield "device memory, read", f"{size_text(found.bandwidth)}/s"
    yield f"products in {'fp32' if is_cpu else 'bf16'}", f"{found.flops / 1e12:.3g} TFLOP/s"
    yield "memory, copied" if is_cpu else "pinned host memory to the device", f"{size_text(found.link)}/s"
    if found.disk is not None:
        yield f"disk of {found.folder}, read", f"{size_text(found.disk)}/s"
    for place, size in room.items():
        if size is not None:
            yield f"free: {place}", size_text(size)
