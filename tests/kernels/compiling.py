"""Compiles kernels for a GPU that is not there: what a launcher would launch is compiled for it instead.

Triton's interpreter runs kernels, but checks neither types nor shapes as its compiler does. Run as a program in which
TRITON_INTERPRET is not set: `python -m tests.kernels.compiling`. Every line it prints is one compiled kernel.
"""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

TARGET = ("cuda", 90, 32)  # Hopper
TOLD = {"has_pdl": lambda device: True, "sm_count": lambda device: 132}  # what its device would tell


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs of the device."""

    name: str
    warps: int
    stages: int
    shared: int
    registers: int
    stack: int
    """Bytes of local memory: registers that did not fit."""
    overlaps: bool
    """Whether it may start before the previous kernel ends."""
    waits: bool
    """Whether it waits for that end."""
    early_reads: int
    """Reads of global memory before this wait."""
    early_writes: int
    barriers: int
    """Instructions of barriers that copies signal."""


class NoGPU:
    """As much of Triton's driver as its compiler asks for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGET)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compile_instead() -> Iterator[list[Compiled]]:
    """Inside, launches compile: what they compiled is in the list. Tensors may be on the meta device."""
    import triton
    from triton.runtime.jit import JITFunction

    done: dict[int, Compiled] = {}
    found: list[Compiled] = []

    def compile_one(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            made = kernel.run(*args, grid=grid, warmup=True, **options)
            if id(made) not in done:
                done[id(made)] = resources(made)
                found.append(done[id(made)])

        return launch

    ours = [vars(module) for name, module in sys.modules.items() if name.startswith("outpace.kernels")]
    triton.runtime.driver.set_active(NoGPU())
    with mock.patch.object(JITFunction, "__getitem__", compile_one):
        for names in ours:
            names.update({name: told for name, told in TOLD.items() if name in names})
        yield found


def resources(kernel: Any) -> Compiled:
    """What the compiler's own tool says of a compiled kernel, and what its PTX has before it waits."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    meta = kernel.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    numbers = dict(word.split(":") for word in told.stdout.split() if word.count(":") == 1 and word[-1].isdigit())
    before, wait, _ = kernel.asm["ptx"].rpartition("griddepcontrol.wait")
    return Compiled(
        *(meta.name, meta.num_warps, meta.num_stages, meta.shared, int(numbers["REG"]), int(numbers["STACK"])),
        overlaps=meta.launch_pdl,
        waits=wait != "",
        early_reads=len(re.findall(r"\b(ld|cp\.async\S*)\.global", before)),
        early_writes=len(re.findall(r"\b(st|atom|red)\.global", before)),
        barriers=kernel.asm["ptx"].count("mbarrier."),
    )


def kernels() -> set[str]:
    """The names of all kernels of the package."""
    from triton.runtime.jit import JITFunction

    import outpace.kernels

    for module in pkgutil.iter_modules(outpace.kernels.__path__, "outpace.kernels."):
        importlib.import_module(module.name)
    modules = [module for name, module in sys.modules.items() if name.startswith("outpace.kernels")]
    values = [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
    return {value.__name__ for value in values if value.__name__.endswith("_kernel")}


def main() -> None:
    """Compile everything that tests/kernels/launches.py launches; last, say which kernels it did not launch."""
    from triton.language import constexpr

    from outpace.kernels import triton_stub

    triton_stub.NATIVE = constexpr(True)  # as where there is such a GPU; kernels ask for it when they are imported
    from tests.kernels import launches

    left = kernels()
    for launch in launches.ALL:
        with compile_instead() as found:
            launch()
        for kernel in found:
            left.discard(kernel.name)
            print(json.dumps(asdict(kernel)), flush=True)
    print(json.dumps(sorted(left)))


if __name__ == "__main__":
    main()
