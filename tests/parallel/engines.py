"""What the cases of a world have in common: models and engines, the same on every rank, and how they are compared."""

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import outpace
from tests import sharded_models
from tests.inject.mixtures import mixture
from tests.offload.placed import deep
from tests.parallel import own_models

TOLERANCE = 1e-5
NEW = 12


def model_of(name: str) -> Any:
    """A tiny model, the same on every rank: of the families of injection, of experts ("moe: ..."), or a deeper one."""
    if name.startswith("own: "):
        return own_models.make(name.removeprefix("own: "))
    if name.startswith("five layers: "):
        return deep(name.removeprefix("five layers: "), 5)
    kind, _, case = name.rpartition("moe: ")
    return mixture(case) if kind or name.startswith("moe: ") else sharded_models.make(name)


def engine_of(model: Any, options: Mapping[str, Any]) -> Any:
    """An engine in fp32; the keys of an injection_policy are names of classes."""
    given = {"replace_with_kernel_inject": True, **options}
    if "injection_policy" in options:
        kinds = {type(module).__name__: type(module) for module in model.modules()}
        given["injection_policy"] = {kinds[kind]: tuple(names) for kind, names in options["injection_policy"].items()}
    return outpace.init_inference(model, dtype="fp32", device="cpu", **given)


def of_first(compute: Callable[[], Any]) -> Any:
    """What the first rank computes, on all ranks: references, which all ranks would compute alike."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [(True, compute())]
        except Exception as error:
            told = [(False, repr(error))]
    dist.broadcast_object_list(told)
    works, value = told[0]
    assert works, f"the reference failed: {value}"
    return value


def same_logits(engine: Any, model: Any, inputs: Mapping[str, Tensor], want: Tensor | None = None) -> None:
    """Of a model in one process, wherever a token stands. want: its logits, if they are known."""
    with torch.no_grad():
        want = model(**inputs).logits if want is None else want
        found = engine(**inputs).logits
    keep = inputs["attention_mask"].bool() if want.shape[:2] == inputs["attention_mask"].shape else slice(None)
    error = ((found - want)[keep].abs().max() / want[keep].abs().max()).item()
    assert error <= TOLERANCE, f"logits differ by {error:.1e}"


def folder_of(model: Any) -> str:
    """A new folder, of which the first rank has written the model; it is the first rank's to remove."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    return str(folder[0])


def gathered(value: Any) -> list[Any]:
    """What every rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def largest(engine: Any) -> Any:
    """Bytes of the weights of the rank that has the most: all ranks fail with it, and none waits for another."""
    return max(gathered(stored(engine.module)))


def stored(model: Any) -> int:
    """Bytes of the weights of a model."""
    return sum(each.numel() * each.element_size() for each in model.parameters())


class Shown:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        """Keep them."""
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Nothing."""


class Button:
    """A stopping criterion that somebody presses on one rank."""

    def __init__(self, at: int, *, pressed: bool) -> None:
        self.at, self.pressed = at, pressed

    def __call__(self, ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """For all rows."""
        return torch.full((len(ids),), self.pressed and ids.shape[1] >= self.at)
