"""CUDA graphs of whole steps: a bounded set of shapes to which steps are padded, captured at the start or when used."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outpace.kernels.compile_ahead import only_compiled
from outpace.kernels.library import LT_ROWS, gemm_library
from outpace.log import logger
from outpace.runner.capture import CAPTURING, Uncapturable, captured, mend

FEW = 8  # sequences of the small shapes: a prompt that comes alone, or nearly so
CHUNK_SIZES = (
    *(32, 64, 96, 128, 192, 256, 320, 384, 480, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048),
    *(2560, 3072, 4096, 5120, 6144, 7168, 8192),
)
"""Tokens that steps with prompts are padded to. Larger steps run without a graph: the host has time to launch them.

Sizes that are no faster than a larger one are left out: for the 8B 448 rows take 13.8 ms and 480 take 10.2, 544 and 640
take 13.0 (docs/log.md).
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph is captured for: any step of this kind that is no larger can run in it."""

    num_tokens: int
    num_seqs: int
    kind: Literal["decode", "chunks", "mixed", "fresh"]
    """decode: at most one token for each sequence. mixed: decodes among chunks of prompts, each with their own kernel;
    chunks: all through the kernel for prompts. fresh: one prompt from its first token on, through torch's attention."""

    @classmethod
    def of(cls, num_seqs: int, num_tokens: int, *, fresh: bool = False) -> "Shape":
        """The shape of a step, without padding."""
        if num_tokens == num_seqs:
            return cls(num_tokens, num_seqs, "decode")
        alone: Literal["fresh", "chunks"] = "fresh" if fresh else "chunks"
        return cls(num_tokens, num_seqs, alone if num_seqs == 1 else "mixed")


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes of decode graphs: padding costs little, since rows without keys read none."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def shapes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Shape, ...]:
    """Every shape that gets a graph, the largest first: graphs share memory, and the first takes the most."""
    sizes = [size for size in CHUNK_SIZES if size <= max_num_batched_tokens]
    few = min(FEW, max_num_seqs)
    found = [Shape(size, few, "chunks") for size in sizes]
    if max_num_seqs > few:
        found += [Shape(size, max_num_seqs, "mixed") for size in sizes if size > FEW]
    found += [Shape(size, size, "decode") for size in decode_sizes(max_num_seqs)]
    return tuple(sorted(found, key=lambda shape: (-shape.num_tokens, -shape.num_seqs)))


class StepGraphs:
    """The graphs of a runner."""

    def __init__(self, device: torch.device, later: Iterable[Shape] = ()) -> None:
        """`later`: shapes that may be captured when a step first needs them."""
        self._device = device
        self._graphs: dict[Shape, Callable[[], tuple[Tensor, Tensor]]] = {}
        self._later = dict.fromkeys(later)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.uncapturable = False
        """Whether a capture has failed: there are no graphs then."""

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._graphs

    def capture(self, shape: Shape, run: Callable[[Shape], tuple[Tensor, Tensor]], *, compiled: bool = False) -> bool:
        """Capture `run` of this shape. If that fails, every step runs without graphs, and the log says why.

        compiled: its kernels have most likely run already, so that this one need not run before it is captured.
        """
        try:
            if not (compiled and self._has_like(shape) and self._capture_at_once(shape, run)):
                self._graphs[shape] = self._captured(shape, run, warm_ups=1)
        except Uncapturable as error:
            mend(self._device)
            self._graphs.clear()
            self._later.clear()
            self.uncapturable = True
            logger.warning("cuda graphs: a step cannot be captured, running without graphs (%s)", error)
            return False
        self._later.pop(shape, None)
        return True

    def _captured(
        self, shape: Shape, run: Callable[[Shape], tuple[Tensor, Tensor]], *, warm_ups: int
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        with CAPTURING, gemm_library(shape.num_tokens):
            return captured(lambda: run(shape), pool=self._pool, warm_ups=warm_ups)

    def _has_like(self, shape: Shape) -> bool:
        """Whether a step like this one was captured. The first makes what torch and its libraries make once, and the
        memory that graphs share: torch takes it back from a capture that fails if no other graph has it."""
        like = shape.kind, shape.num_tokens in LT_ROWS
        return any((other.kind, other.num_tokens in LT_ROWS) == like for other in self._graphs)

    def _capture_at_once(self, shape: Shape, run: Callable[[Shape], tuple[Tensor, Tensor]]) -> bool:
        """Capture a step that has not run before. False: that does not work, for example since a kernel is new."""
        try:
            with only_compiled():
                self._graphs[shape] = self._captured(shape, run, warm_ups=0)
            return True
        except Uncapturable as error:
            logger.debug("cuda graphs: %s is captured again, after a run (%s)", shape, str(error))
        mend(self._device)
        return False

    def fitting(self, num_seqs: int, num_tokens: int, *, fresh: bool = False) -> Shape | None:
        """The smallest shape that holds a step and is captured or may be; None: the step runs without a graph."""
        kind = Shape.of(num_seqs, num_tokens, fresh=fresh).kind
        kinds = (kind,) if kind in ("decode", "fresh") else ("chunks", "mixed")
        holding = (
            shape
            for shape in (*self._graphs, *self._later)
            if shape.kind in kinds and shape.num_seqs >= num_seqs and shape.num_tokens >= num_tokens
        )
        return min(holding, key=lambda shape: (shape.num_tokens, shape.num_seqs), default=None)

    def replay(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """Run a captured step: logits [S, V] and the likeliest tokens [S], which the next replay overwrites."""
        return self._graphs[shape]()
