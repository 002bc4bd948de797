"""The ways to a GPU, tried on a CPU with streams and events that do nothing: who copies what, and in which order."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outpace.offload.store_memory import aligned
from outpace.offload.streaming import Streaming
from outpace.offload.ways import Stores, ToDevice, Way
from outpace.offload.ways_file import ToDeviceFromFile
from tests.offload.placed import deep, offload_at
from tests.offload.streamed import answers, llm_of, model_of, offload_of, run, streaming_of


class Event:
    """What is launched has run: whoever waits only looks whether there is something to wait for."""

    def __init__(self) -> None:
        self.recorded = False

    def record(self, _: object = None) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded


class Stream:
    def __init__(self, *_: object) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        assert event.recorded

    def synchronize(self) -> None:
        pass


@contextmanager
def launching_on(_: Stream) -> Iterator[None]:
    yield


def way(_: Streaming, slots: list[Tensor], stores: Stores) -> Way:
    """As `Streaming` chooses it for a GPU."""
    if not stores.in_file:
        return ToDevice(slots, stores)
    buffers = [aligned(len(slots[0])) for _ in range(3)]
    return ToDeviceFromFile(slots, stores, buffers, aligned(len(slots[0])))


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {"Event": Event, "Stream": Stream, "stream": launching_on, "current_stream": Stream}
    for name, fake in {**fakes, "set_device": lambda _: None}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Streaming, "_way", way)


@pytest.mark.parametrize("how", ["host, none", "host, some", "disk, none", "disk, some", "mixed, some"])
def test_experts_by_need_and_whole_layers_by_turns(how: str, tmp_path: Path) -> None:
    model = model_of("qwen3")
    with llm_of(model) as resident:
        wanted = answers(resident)
    with llm_of(model, offload=offload_of(how, model, tmp_path)) as llm:
        for many in (40, 1, 40):
            assert answers(llm) == wanted
            run(llm, many, 2)  # 40 tokens need all experts
        assert answers(llm) == wanted
        assert streaming_of(llm).counts.misses > 0


@pytest.mark.parametrize("place", ["host", "disk", "mixed"])
def test_layers_without_experts(place: str, tmp_path: Path) -> None:
    model = deep("llama")
    with llm_of(model) as resident:
        wanted = answers(resident)
    with llm_of(model, offload=offload_at(place, model, tmp_path)) as llm:
        for _ in range(2):
            assert answers(llm) == wanted
