"""Prefetches streamed layers into a ring of slots on the device while other layers are computed.

Streamed layer k always uses slot k mod S, so its parameters are views with fixed addresses. When a layer is done, its
slot is filled with the next layer of this slot; after the last layers follow the first ones, for the next step. The
last layer of the model waits for these copies, so every step starts with the first S layers in their slots, and a step
with its copies can be captured in a CUDA graph. A layer that runs out of order is fetched when it runs.

For a layer with experts only the dense part is prefetched, unless the step has so many tokens that it needs all
experts. After the router has run, the host reads which experts were chosen, and these are copied to their places in the
slot: from the cache on the device or from where the layer is stored. Such a step cannot be captured. Cached experts are
also used when a layer is fetched with all its experts.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import NotSupported, StateError
from outpace.inject.experts import Experts
from outpace.inject.modules import FusedLayer
from outpace.offload.experts import ALL, Counts, Kept
from outpace.offload.units import Unit, experts_of
from outpace.offload.ways import Way


class Ring:
    """The slots and their content. Threads take turns, layer by layer."""

    def __init__(self, units: Sequence[Unit], slots: Sequence[Tensor], way: Way, kept: Mapping[int, Kept]) -> None:
        """kept: unit with experts -> its cache."""
        assert len(units) > len(slots) >= 1, "there are fewer slots than layers"
        self.way = way
        self._count, self._size = len(units), len(slots)
        self._forms, self._kept = [unit.form for unit in units], kept
        self._holds: list[int | None] = [None] * len(slots)
        self._experts: list[set[int]] = [set() for _ in slots]  # experts that are in each slot
        self._all = False  # whether the last step needed all experts
        self._capturing = False  # a CUDA graph is being captured
        self._lock = threading.RLock()  # held while a layer runs, so that its slot is not refilled
        self._running: list[int] = []  # stack of running layers: a layer may call another
        self.counts = Counts()
        """Counters of fetched layers and experts."""
        for number, unit in enumerate(units):
            unit.bind(slots[number % len(slots)])
        self._bound = [(unit.path, unit.held[0].parameter, slots[n % len(slots)]) for n, unit in enumerate(units)]

    def begin(self, number: int) -> None:
        """A layer, or a module in it, is about to run; other threads wait until it is done."""
        self._lock.acquire()
        try:
            if number not in self._running:
                self._check(number)
                self.enter(number)
        except BaseException:
            self._lock.release()
            raise
        self._running.append(number)

    def _check(self, number: int) -> None:
        path, parameter, slot = self._bound[number]
        if parameter.untyped_storage().data_ptr() != slot.untyped_storage().data_ptr():
            raise StateError(
                f"offload: the weights of {path} were converted or moved, but streamed layers cannot be; make the "
                "engine again, with dtype and device"
            )
        if any(other % self._size == number % self._size for other in self._running):
            raise NotSupported(
                "offload: a layer of this model calls another one while it runs, and both have the same slot; give "
                f"offload.slots={self._size + 1}, or remove offload"
            )

    def done(self, number: int) -> None:
        """The layer that began last in this thread has been launched."""
        try:
            self._running.pop()
            if number not in self._running:
                self.leave(number)
        finally:
            self._lock.release()

    def enter(self, number: int) -> None:
        """A layer is about to run."""
        slot, capturing = number % self._size, _capturing()
        if self._capturing and not capturing:  # a capture failed: its copies never ran
            self._forget()
        self._capturing = capturing
        if self._holds[slot] != number:
            if capturing:
                raise RuntimeError("a streamed layer is not where a graph expects it")
            self._load(number, slot)
        try:
            self.way.arrive(slot)
        except BaseException:
            self._holds[slot] = None
            raise

    def need(self, number: int, chosen: Tensor) -> None:
        """The running layer is about to run the experts in `chosen` [T, K]; ids outside its range are ignored."""
        slot, every = number % self._size, range(self._forms[number].experts)
        assert self._holds[slot] == number, "the layer was entered"
        self._all = chosen.numel() >= ALL * len(every)
        there, kept = self._experts[slot], self._kept[number]
        complete = len(there) == len(every)  # then nothing is missing, and any expert may be cached
        used = set(every) if self._all or complete else set(every).intersection(chosen.flatten().tolist())
        wanted = sorted(used - there)
        found, fresh = kept.find(wanted), dict[int, Tensor]()
        missing = [expert for expert in wanted if expert not in found]
        try:
            if wanted:
                self.way.bring(number, slot, found, missing)
            fresh = kept.take(sorted(used), used)
            if fresh:
                self.way.keep(number, slot, fresh)
        except BaseException:
            kept.forget(fresh)
            raise
        kept.put(fresh)
        there.update(wanted)
        self.counts.hits += len(found)
        self.counts.misses += len(missing)
        self.counts.nbytes += len(missing) * self._forms[number].piece

    def leave(self, number: int) -> None:
        """A layer has been launched: refill its slot once it has run."""
        slot = number % self._size
        following = number + self._size
        self._load(following if following < self._count else slot, slot)

    def end(self) -> None:
        """The last layer of a step has been launched: wait for all copies, so that a captured step is complete.

        Without graphs each layer waits for its own copy, and copies overlap with what follows.
        """
        if self._kept or not self.way.capturable:
            return
        with self._lock:
            for slot, unit in enumerate(self._holds):
                if unit is not None:
                    self.way.arrive(slot)
            self._capturing = False

    def restore(self) -> None:
        """Load the first units into their slots, unless they are there."""
        with self._lock:
            if self._capturing or self._holds != list(range(self._size)):
                self._forget()
                for slot in range(self._size):
                    self._load(slot, slot)
            self.end()

    def _forget(self) -> None:
        self.way.forget()
        self._holds = [None] * self._size
        self._capturing = False

    def _load(self, unit: int, slot: int) -> None:
        form, kept = self._forms[unit], dict[int, Tensor]()
        every = range(form.experts) if self._all else range(0)
        if every:
            kept = self._kept[unit].find(every)
        experts = [expert for expert in every if expert not in kept]
        self._holds[slot] = None
        self.way.load(unit, slot, experts, kept)
        self._holds[slot] = unit
        self._experts[slot] = set(every)
        self.counts.loads += 1
        self.counts.nbytes += form.dense + len(experts) * form.piece


def attach(ring: Ring, units: Sequence[Unit], last: nn.Module) -> None:
    """Wrap layers so that they are fetched when they run, and the last layer so that it ends the step."""
    for number, unit in enumerate(units):
        for module in _runs(unit):
            _wrap(module, functools.partial(ring.begin, number), functools.partial(ring.done, number))
        unit.layer.register_state_dict_pre_hook(functools.partial(_refuse, unit.path))
        unit.layer.register_load_state_dict_pre_hook(functools.partial(_refuse, unit.path))
        if unit.form.experts and (experts := experts_of(unit.layer)) is not None:
            _ask(experts, functools.partial(ring.need, number))
    _wrap(last, lambda: None, ring.end)


def _runs(unit: Unit) -> list[nn.Module]:
    """The modules to wrap: a fused layer, or for other layers also their modules with weights, which may run on their
    own."""
    if isinstance(unit.layer, FusedLayer):
        return [unit.layer]
    held = {id(each.parameter) for each in unit.held}
    return [
        module
        for module in unit.layer.modules()
        if module is unit.layer or any(id(each) in held for each in module.parameters(recurse=False))
    ]


def _refuse(path: str, *_: object) -> None:
    """Refuse state_dict: the slots hold other layers' weights, and values loaded into them would be lost."""
    raise StateError(
        f"state_dict: the weights of {path} are streamed (offload, zero) and not on the device; save or load them "
        "before the engine is made, or make it without offload"
    )


def _ask(experts: Experts, need: Callable[[Tensor], None]) -> None:
    """Call `need` with the chosen experts before they run."""
    run = experts.forward

    @functools.wraps(run)
    def call(x: Tensor, weights: Tensor, chosen: Tensor, add: Tensor | None = None) -> Tensor:
        need(chosen)
        return run(x, weights, chosen, add)

    experts.__dict__["forward"] = call


def _wrap(layer: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` around a layer. Hooks would make `generate` leave our loop for Hugging Face's."""
    name = "run" if isinstance(layer, FusedLayer) else "forward"
    run: Callable[..., Any] = getattr(layer, name)

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            with torch.no_grad():  # a backward pass would find other weights in the slots
                return run(*args, **kwargs)
        finally:
            after()

    layer.__dict__[name] = call


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
