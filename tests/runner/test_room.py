"""The memory that is left for pages, on a device whose memory is a pair of numbers."""

import pytest
import torch
from torch import Tensor

from outpace.config import LLMConfig
from outpace.runner import room
from outpace.runner.runner import Limits, Runner
from outpace.runner.step_graphs import Shape, shapes
from tests.runner.counting import Counting

TOTAL = 1_000_000
LOGITS = 4 * 50  # bytes of a row of the counting model


class Memory:
    """A step takes a byte per token. torch keeps it in its cache, which each capture empties."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached = self.graphs = 0
        warm_up = Runner.warm_up
        memory = self

        def run(runner: Runner, shape: Shape) -> Tensor:
            memory.cached = max(memory.cached, shape.num_tokens)
            return warm_up(runner, shape)

        def capture(runner: Runner, shape: Shape) -> bool:
            memory.cached, memory.graphs = 0, max(memory.graphs, shape.num_tokens)
            return True

        monkeypatch.setattr(Runner, "warm_up", run)
        monkeypatch.setattr(Runner, "capture", capture)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - self.cached - self.graphs, TOTAL))
        monkeypatch.setattr(room, "device_budget", lambda config: TOTAL)

    def empty(self) -> None:
        """Also frees the graphs: their runner is gone when this is called."""
        self.cached = self.graphs = 0


@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_that_is_larger_than_all_graphs_has_its_memory_beside_them(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline steps are larger than all graphs. Their memory must not go to pages."""
    Memory(monkeypatch)
    limits = Limits(max_num_seqs=16, max_num_batched_tokens=4096, max_model_len=40)
    wanted = shapes(16, 512) if graphs else ()
    kept = sum(shape.num_seqs for shape in wanted) * LOGITS
    free = room._free_memory(Counting(), LLMConfig(device="cpu"), limits, wanted)
    assert TOTAL - free == 4096 + (512 + kept if graphs else 0)
