"""CUDA graphs of steps: a bounded set of shapes to which steps are padded, captured at the start or on first use."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outpace.kernels.compile_ahead import only_compiled
from outpace.kernels.gemm_library import LT_ROWS, gemm_library
from outpace.kernels.launch_options import MAX_ROWS
from outpace.log import logger
from outpace.runner.capture import CAPTURING, Uncapturable, captured, mend, side_stream

FEW = 8  # sequences of the small shapes, for prompts that run alone or with few others
CHUNK_SIZES = (
    *(32, 64, 96, 128, 192, 256, 320, 384, 480, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048),
    *(2560, 3072, 4096, 5120, 6144, 7168, 8192),
)
"""Sizes to which steps with prompts are padded. Larger steps run without a graph: the host has time to launch them.

Sizes no faster than a larger one are left out: for the 8B, 448 rows take 13.8 ms and 480 take 10.2, 544 and 640
take 13.0 (docs/log.md).
"""
LEAST = 64  # smallest size in tokens: smaller steps take as long and would need attention kernels of their own


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a graph: any step of this kind that is no larger can run in it."""

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
    """Batch sizes of decode graphs. Padding costs little, since padding rows read no keys."""
    sizes = {1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def shapes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[Shape, ...]:
    """Every shape that gets a graph, the largest first, since it determines the size of the shared memory pool."""
    least = LEAST if max_num_batched_tokens >= LEAST else 0
    sizes = [size for size in CHUNK_SIZES if least <= size <= max_num_batched_tokens]
    few = min(FEW, max_num_seqs)
    found = [Shape(size, few, "chunks") for size in sizes]
    if max_num_seqs > few:
        found += [Shape(size, max_num_seqs, "mixed") for size in sizes if size > FEW]
    found += [Shape(size, size, "decode") for size in decode_sizes(max_num_seqs)]
    return tuple(sorted(found, key=lambda shape: (-shape.num_tokens, -shape.num_seqs)))


def smallest(given: Iterable[Shape], num_seqs: int, num_tokens: int, *, fresh: bool = False) -> Shape | None:
    """The smallest of these shapes in which a step fits."""
    kind = Shape.of(num_seqs, num_tokens, fresh=fresh).kind
    kinds = (kind,) if kind in ("decode", "fresh") else ("chunks", "mixed")
    holding = (
        shape
        for shape in given
        if shape.kind in kinds and shape.num_seqs >= num_seqs and shape.num_tokens >= num_tokens
    )
    return min(holding, key=lambda shape: (shape.num_tokens, shape.num_seqs), default=None)


class StepGraphs:
    """The graphs of a runner."""

    def __init__(self, device: torch.device, later: Iterable[Shape] = ()) -> None:
        """later: shapes that may be captured when a step first needs them."""
        self._device = device
        self._graphs: dict[Shape, Callable[[], tuple[Tensor, Tensor]]] = {}
        self._later = dict.fromkeys(later)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._side = side_stream(device)
        self.uncapturable = False
        """Whether a capture has failed; then there are no graphs."""

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._graphs

    def capture(self, shape: Shape, run: Callable[[Shape], tuple[Tensor, Tensor]], *, compiled: bool = False) -> bool:
        """Capture `run` for this shape. If that fails, all steps run without graphs (the reason is logged).

        compiled: its kernels have most likely run already, so the capture is first tried without a warm-up.
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

    def add(self, shape: Shape, run: Callable[[Shape], tuple[Tensor, Tensor]], *, at_once: bool) -> str | None:
        """Capture one more graph; the existing ones stay. Returns None, or the reason why it failed.

        at_once: only if that works without running the step first.
        """
        try:
            if self._has_like(shape) and self._capture_at_once(shape, run):
                return None
            if at_once:
                return "it has to run first"
            self._graphs[shape] = self._captured(shape, run, warm_ups=1)
            return None
        except Exception as error:  # whatever the error, steps run without this graph
            mend(self._device)
            return (str(error).strip().splitlines() or [type(error).__name__])[0]

    def _captured(
        self, shape: Shape, run: Callable[[Shape], tuple[Tensor, Tensor]], *, warm_ups: int
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        with CAPTURING, gemm_library(shape.num_tokens):
            return captured(lambda: run(shape), pool=self._pool, side=self._side, warm_ups=warm_ups)

    def _has_like(self, shape: Shape) -> bool:
        """Whether a step of this kind was captured. The first capture allocates what torch, its libraries and kernels
        for few rows need once for a stream, and the shared memory pool, which torch frees again after a failed capture
        unless another graph uses it."""

        def traits(of: Shape) -> tuple[object, ...]:
            return of.kind, of.num_tokens in LT_ROWS, of.num_tokens <= MAX_ROWS

        return any(traits(other) == traits(shape) for other in self._graphs)

    def _capture_at_once(self, shape: Shape, run: Callable[[Shape], tuple[Tensor, Tensor]]) -> bool:
        """Capture a step without running it first. False: that failed, for example because a kernel is not compiled."""
        try:
            with only_compiled():
                self._graphs[shape] = self._captured(shape, run, warm_ups=0)
            return True
        except Uncapturable as error:
            logger.debug("cuda graphs: %s is captured again, after a run (%s)", shape, str(error))
        mend(self._device)
        return False

    def fitting(self, num_seqs: int, num_tokens: int, *, fresh: bool = False) -> Shape | None:
        """The smallest shape in which a step fits and that has or may get a graph; None: run without a graph."""
        return smallest((*self._graphs, *self._later), num_seqs, num_tokens, fresh=fresh)

    def replay(self, shape: Shape) -> tuple[Tensor, Tensor]:
        """Replay a step: logits [S, V] and greedy tokens [S], which the next replay overwrites."""
        return self._graphs[shape]()
