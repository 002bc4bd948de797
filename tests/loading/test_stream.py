"""Bytes of files into their places in weights: every way they can be cut, turned, put in order and sliced."""

import gc
import threading
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outpace.errors import ModelError
from outpace.inject.recipe import PairedRows, Part, Recipe, RowOrder, Slice
from outpace.loading import landing
from outpace.loading import stream as streaming
from outpace.loading.jobs import jobs
from outpace.loading.regions import cut, join, stack
from outpace.loading.stream import stream
from outpace.loading.targets import write
from outpace.loading.weights import Extent, Piece, Source, stored_bytes

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def stored(folder: Path, tensor: Tensor, name: str = "data") -> Extent:
    """A tensor's bytes in a file, with other bytes around them."""
    path = folder / name
    path.write_bytes(b"\xff" * 24 + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() + b"\xff" * 7)
    return Extent(path, 24)


def filled(recipe: Recipe, sources: dict[str, Source], dtype: torch.dtype) -> Tensor:
    """The weight that the stream makes, over memory that must all be written."""
    weight = torch.full(recipe.shape, float("nan"), dtype=dtype)
    if recipe.has_gaps:
        weight.zero_()
    stream([*jobs(recipe, weight, sources)], CPU)
    return weight


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """A dimension in consecutive parts."""
    places = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    return list(zip([0, *places], [*places, size], strict=True))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rows, columns = draw(st.integers(1, 13)), draw(st.integers(1, 9))
    return {
        "shape": (rows, columns),
        "cuts": draw(cuts(draw(st.just(rows)))),
        "swap": draw(st.booleans()),
        "transposed": draw(st.booleans()),
        "made": draw(st.booleans()),
        "padded": draw(st.integers(0, 2)),
        "dtypes": draw(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES))),
        "chunk": draw(st.sampled_from((1, 16, 64, 1 << 20))),
    }


@given(case=cases(), data=st.data())
def test_pieces_fill_a_weight_as_whole_tensors_would(
    case: dict[str, Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    kept, wanted = case["dtypes"]
    tensor = torch.randn(case["shape"], generator=torch.Generator().manual_seed(0)).to(kept)
    pieces = []
    for number, (start, stop) in enumerate(case["cuts"]):
        part = tensor[start:stop].t() if case["swap"] else tensor[start:stop]
        pad = case["padded"]
        whole = torch.nn.functional.pad(part, (0, pad, pad, 0)).contiguous()  # what is stored holds more than is taken
        take = (slice(pad, pad + part.shape[0]), slice(0, part.shape[1]))
        place: Any = (lambda whole=whole: whole) if case["made"] else stored(folder, whole, str(number))
        swap = (0, 1) if case["swap"] else None
        pieces.append(Piece(place, tuple(whole.shape), kept, take, swap, (slice(start, stop),)))
    source = Source(tuple(tensor.shape), kept, tuple(pieces))
    dim = data.draw(st.integers(0, 1))
    start = data.draw(st.integers(0, tensor.shape[dim] - 1))
    length = data.draw(st.integers(1, tensor.shape[dim] - start))
    cut = data.draw(st.sampled_from(((), (Slice(dim, start, length),))))
    alone = Part("x", tuple(tensor.shape), 0, case["transposed"], None, cut)
    rows, columns = alone.shape_in_weight
    recipe = Recipe((2 * rows + 1, columns), (alone, Part("x", alone.shape, rows + 1, case["transposed"], None, cut)))
    expected = torch.zeros(recipe.shape, dtype=wanted)
    for each in recipe.parts:
        write(each, expected, tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "CHUNK", case["chunk"])
        assert torch.equal(filled(recipe, {"x": source}, wanted), expected)


@pytest.mark.parametrize("kind", ["heads", "groups", "quarters"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chunk", [128, 1 << 20])
def test_rows_that_are_stored_in_another_order(
    kind: Any, transposed: bool, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "CHUNK", chunk)
    order = RowOrder(kind, num_heads=8, num_kv_heads=2 if kind == "groups" else 8, head_dim=2)
    rows = order.rows()
    values = torch.randn(len(rows), 5)
    expected = torch.empty_like(values)
    expected[rows] = values
    kept = (values.t() if transposed else values).to(torch.float16)
    halves = kept.split(len(rows) // 2 if not transposed else 3)
    pieces, start = [], 0
    for number, half in enumerate(halves):
        into = (slice(start, start + len(half)),)
        pieces.append(Piece(stored(tmp_path, half, str(number)), tuple(half.shape), kept.dtype, into=into))
        start += len(half)
    shape = tuple(kept.shape)
    recipe = Recipe.joined([("x", shape)], transposed=transposed, order=order)
    found = filled(recipe, {"x": Source(shape, kept.dtype, tuple(pieces))}, torch.float32)
    assert torch.equal(found, expected.half().float())


def test_experts_that_are_stored_one_by_one_go_into_one_tensor(tmp_path: Path) -> None:
    experts = torch.randn(4, 6, 3)
    pieces = []
    for number in range(4):
        for half in range(2):
            part = experts[number, 3 * half : 3 * half + 3]
            extent = stored(tmp_path, part, f"{number}.{half}")
            pieces.append(Piece(extent, (3, 3), part.dtype, into=(number, slice(3 * half, 3 * half + 3))))
    source = Source((4, 6, 3), torch.float32, tuple(pieces))
    assert torch.equal(filled(Recipe.whole("x", (4, 6, 3)), {"x": source}, torch.float32), experts)
    sliced = Recipe((2, 6, 3), (Part("x", (4, 6, 3), slices=(Slice(0, 1, 2),)),))
    assert torch.equal(filled(sliced, {"x": source}, torch.float32), experts[1:3])
    inner = Recipe((4, 2, 3), (Part("x", (4, 6, 3), slices=(Slice(1, 2, 2),)),))
    assert torch.equal(filled(inner, {"x": source}, torch.bfloat16), experts[:, 2:4].bfloat16())


@st.composite
def stacks(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "sizes": (draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 5))),
        "one by one": draw(st.booleans()),
        "swap": draw(st.booleans()),
        "transposed": draw(st.booleans()),
        "pairs": draw(st.booleans()),
        "slice": draw(st.sampled_from((None, "experts", "inputs"))),
        "dtypes": draw(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES))),
        "chunk": draw(st.sampled_from((1, 16, 64, 1 << 20))),
    }


@given(case=stacks())
def test_stacks_of_experts_fill_a_weight_however_they_are_stored(
    case: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("stacks")
    experts, units, inputs = case["sizes"]
    kept, wanted = case["dtypes"]
    gates_and_ups = torch.randn(experts, 2 * units, inputs, generator=torch.Generator().manual_seed(0)).to(kept)
    rows = gates_and_ups.view(experts, 2, units, inputs)
    own = rows.transpose(1, 2).reshape(gates_and_ups.shape) if case["pairs"] else gates_and_ups
    own = own.transpose(1, 2) if case["transposed"] else own  # as the model has it
    pieces = []
    for number, part in enumerate(own if case["one by one"] else [own]):
        bytes_ = (part.transpose(-1, -2) if case["swap"] else part).contiguous()
        swap = (part.dim() - 2, part.dim() - 1) if case["swap"] else None
        into = (number,) if case["one by one"] else ()
        pieces.append(Piece(stored(folder, bytes_, str(number)), tuple(bytes_.shape), kept, (), swap, into))
    recipe = Recipe.stack(
        "x", tuple(own.shape), transposed=case["transposed"], order=PairedRows(units) if case["pairs"] else None
    )
    expected = gates_and_ups.to(wanted)
    if case["slice"] is not None:
        column = 1 if case["transposed"] else 2
        dim, weight_dim = (0, 0) if case["slice"] == "experts" else (column, 2)
        length = expected.shape[weight_dim] - expected.shape[weight_dim] // 2
        cut = Slice(dim, expected.shape[weight_dim] - length, length)
        part = replace(recipe.parts[0], slices=(cut,))
        recipe, expected = Recipe(part.shape_in_weight, (part,)), expected.narrow(weight_dim, cut.start, length)
    assert not recipe.has_gaps
    live = torch.full(recipe.shape, float("nan"), dtype=wanted)
    write(recipe.parts[0], live, own)
    assert torch.equal(live, expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "CHUNK", case["chunk"])
        assert torch.equal(filled(recipe, {"x": Source(tuple(own.shape), kept, tuple(pieces))}, wanted), expected)


@given(case=stacks(), gap=st.booleans())
def test_parts_go_to_the_place_of_their_expert(case: dict[str, Any], gap: bool) -> None:
    experts, units, inputs = case["sizes"]
    kept, wanted = case["dtypes"]
    weights = torch.randn(experts, 2, units, inputs).to(kept)
    names: list[list[Any]] = [[(f"{number}.{half}", (units, inputs)) for half in range(2)] for number in range(experts)]
    if gap:
        for parts in names:
            parts[0] = units
        weights[:, 0] = 0
    if case["transposed"]:
        names = [[part if isinstance(part, int) else (part[0], part[1][::-1]) for part in parts] for parts in names]
    recipe = Recipe.stacked(names, transposed=case["transposed"])
    assert recipe.has_gaps == gap
    sources = {}
    for part in recipe.parts:
        number, half = map(int, part.name.split("."))
        own = weights[number, half].t() if case["transposed"] else weights[number, half]
        made = own.contiguous()
        place = partial(Tensor.clone, made)
        sources[part.name] = Source(tuple(made.shape), kept, (Piece(place, tuple(made.shape), kept),))
    assert torch.equal(filled(recipe, sources, wanted), weights.view(experts, 2 * units, inputs).to(wanted))


def test_a_rank_takes_its_units_of_gates_and_ups_from_one_tensor(tmp_path: Path) -> None:
    experts = torch.randn(3, 8, 5)  # four units
    source = Source((3, 8, 5), torch.float32, (Piece(stored(tmp_path, experts), (3, 8, 5), torch.float32),))
    parts = [
        Part("x", (3, 8, 5), start=start, slices=(Slice(1, 4 * half + 2, 2),), dim=1)
        for half, start in ((0, 0), (1, 2))
    ]
    found = filled(Recipe((3, 4, 5), tuple(parts)), {"x": source}, torch.float32)
    assert torch.equal(found, torch.cat([experts[:, 2:4], experts[:, 6:8]], dim=1))
    pairs = Part("x", (3, 8, 5), order=PairedRows(2), slices=(Slice(1, 4, 4),), dim=1)
    found = filled(Recipe((3, 4, 5), (pairs,)), {"x": source}, torch.float32)
    assert torch.equal(found, torch.cat([experts[:, 4::2], experts[:, 5::2]], dim=1))


@pytest.mark.parametrize("tensor", [torch.tensor(3.5), torch.zeros(0, 4), torch.arange(5)])
def test_numbers_empty_tensors_and_integers(tensor: Tensor, tmp_path: Path) -> None:
    shape = tuple(tensor.shape)
    source = Source(shape, tensor.dtype, (Piece(stored(tmp_path, tensor.reshape(-1)), shape, tensor.dtype),))
    weight = torch.empty(shape, dtype=tensor.dtype)
    stream([*jobs(Recipe.whole("x", shape), weight, {"x": source})], CPU)
    assert torch.equal(weight, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_stored_one_by_one_go_into_one_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    numbers = torch.randn(3)
    pieces = [Piece(stored(tmp_path, each[None], str(at)), (), each.dtype) for at, each in enumerate(numbers)]
    pieces[1] = Piece(lambda: numbers[1], (), torch.float32)
    source = stack([Source((), torch.float32, (piece,)) for piece in pieces], 0)
    assert torch.equal(filled(Recipe.whole("x", (3,)), {"x": source}, dtype), numbers.to(dtype))


class Copied:
    """An event of a device that is not there."""

    pending = False

    def record(self, stream: object) -> None:
        self.pending = True

    def synchronize(self) -> None:
        self.pending = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device whose memory is the host's: what the stream does for a GPU, without one."""
    copies = SimpleNamespace(device=CPU, wait_stream=lambda other: None, synchronize=lambda: None)
    for name in ("Stream", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda given: copies)
    monkeypatch.setattr(torch.cuda, "Event", Copied)
    monkeypatch.setattr(landing, "page_locked", partial(torch.empty, dtype=torch.uint8))
    fill = landing._Slot.fill

    def watched(slot: Any, *args: Any) -> Tensor:
        assert not slot.copied.pending, "a slot is filled that is still copied from"
        return fill(slot, *args)

    monkeypatch.setattr(landing._Slot, "fill", watched)
    return SimpleNamespace(type="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("chunk", [64, 1 << 10])
def test_slots_on_the_way_to_a_device(
    dtype: torch.dtype, chunk: int, device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "DEVICE_CHUNK", chunk)
    made: list[int] = []

    def page_locked(size: int) -> Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(landing, "page_locked", page_locked)
    tensor = torch.randn(300, 48)  # rows of 192 bytes: some are more than a chunk
    pieces = Piece(stored(tmp_path, tensor), (300, 48), torch.float32), Piece(lambda: tensor, (300, 48), torch.float32)
    for piece in pieces:
        weight = torch.full((300, 48), float("nan"), dtype=dtype)
        source = Source((300, 48), torch.float32, (piece,))
        stream([*jobs(Recipe.whole("x", (300, 48)), weight, {"x": source})], device)
        assert torch.equal(weight, tensor.to(dtype))
    assert max(made) <= max(chunk, 192)
    assert len(made) <= 2 * (streaming.THREADS + streaming.SPARE)


def test_an_error_on_the_way_to_a_device_ends_all_threads(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "DEVICE_CHUNK", 256)
    tensor = torch.randn(3000, 16)
    extent = stored(tmp_path, tensor)
    extent.path.write_bytes(extent.path.read_bytes()[:5000])
    source = Source((3000, 16), torch.float32, (Piece(extent, (3000, 16), torch.float32),))
    with pytest.raises(ModelError, match="ends early"):
        stream([*jobs(Recipe.whole("x", (3000, 16)), torch.empty(3000, 16), {"x": source})], device)
    assert not [thread for thread in threading.enumerate() if thread.name == "outpace-load"]


def large(folder: Path) -> tuple[Recipe, dict[str, Source]]:
    shape, path = (64, landing.CHUNK // 8), folder / "large"
    with path.open("wb") as file:
        file.truncate(4 * shape[0] * shape[1])
    return Recipe.whole("x", shape), {
        "x": Source(shape, torch.float32, (Piece(Extent(path, 0), shape, torch.float32),))
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_file_that_is_cut_while_it_is_read_is_an_error(dtype: torch.dtype, tmp_path: Path) -> None:
    recipe, sources = large(tmp_path)
    with (tmp_path / "large").open("r+b") as file:
        file.truncate(1 << 20)
    with pytest.raises(ModelError, match="ends early"):
        filled(recipe, sources, dtype)
    (tmp_path / "large").unlink()
    with pytest.raises(ModelError, match="cannot open"):
        filled(recipe, sources, dtype)
    assert not [thread for thread in threading.enumerate() if thread.name == "outpace-load"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_after_an_error_nothing_keeps_the_weights(interrupted: bool, tmp_path: Path) -> None:
    recipe, sources = large(tmp_path)
    if not interrupted:
        (tmp_path / "large").unlink()
    weight = torch.empty(recipe.shape)
    alive = weakref.ref(weight)
    gc.collect()
    gc.disable()  # memory of a device must not wait for the collector
    try:
        with pytest.raises(KeyboardInterrupt if interrupted else ModelError) as raised:
            stream([*jobs(recipe, weight, sources)], CPU, interrupt if interrupted else lambda count: None)
        del weight, raised
        assert alive() is None
    finally:
        gc.enable()


def interrupt(count: int) -> None:
    raise KeyboardInterrupt


def test_an_interruption_ends_all_threads(tmp_path: Path) -> None:
    recipe, sources = large(tmp_path)
    weight = torch.empty(recipe.shape)
    with pytest.raises(KeyboardInterrupt):
        stream([*jobs(recipe, weight, sources)], CPU, interrupt)
    assert not [thread for thread in threading.enumerate() if thread.name == "outpace-load"]


def test_every_byte_is_told(tmp_path: Path) -> None:
    recipe, sources = large(tmp_path)
    told: list[int] = []
    stream([*jobs(recipe, torch.empty(recipe.shape), sources)], CPU, told.append)
    assert sum(told) == 4 * int(np.prod(recipe.shape))


def test_what_is_taken_of_a_stored_tensor_is_what_counts(tmp_path: Path) -> None:
    tensor = torch.randn(9, 4)
    whole = Source((9, 4), tensor.dtype, (Piece(stored(tmp_path, tensor), (9, 4), tensor.dtype),))
    source = join([cut(whole, 0, start, start + 3) for start in (6, 0, 3)], 0)  # as ranks of Megatron store qkv
    told: list[int] = []
    stream([*jobs(Recipe.whole("x", (9, 4)), torch.empty(9, 4), {"x": source})], CPU, told.append)
    assert sum(told) == stored_bytes({"x": source, "tied": source}) == 9 * 4 * 4


def test_a_tensor_that_is_not_what_its_file_said(tmp_path: Path) -> None:
    source = Source((2,), torch.float32, (Piece(lambda: torch.zeros(3), (2,), torch.float32),))
    with pytest.raises(ModelError, match="differs from what its file described"):
        filled(Recipe.whole("x", (2,)), {"x": source}, torch.float32)
