"""Calls that several ranks make together: checks that all ranks make the same call and end in the same step."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from outpace.errors import InputError, NotSupported
from outpace.parallel.group import Group

_SAME_EVERYWHERE = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)


def check_alike(group: Group, name: str, call: Any, device: torch.device) -> None:
    """Raise on all ranks of a group if one of them makes a different call; otherwise they would deadlock."""
    if group.size > 1:
        _compare(group, name, call, device)


def common_generate(
    group: Group, arguments: dict[str, Any], also: Any, device: torch.device, max_time: float | None
) -> dict[str, Any]:
    """Arguments for a `generate` call made by all ranks of a group. Only some ranks may have a streamer."""
    if group.size == 1:
        return arguments
    own = {name: value for name, value in arguments.items() if name != "streamer"}
    streams = arguments.get("streamer") is not None
    if _compare(group, "generate", (own, also, max_time), device, streams=streams) and not streams:
        own["streamer"] = _Silent()  # so that all ranks take the same code path
    elif streams:
        own["streamer"] = arguments["streamer"]
    if max_time is not None:
        raise NotSupported("max_time: ranks would stop at different steps; use max_new_tokens")
    if own.get("stopping_criteria"):
        own["stopping_criteria"] = StoppingCriteriaList(
            each if isinstance(each, _SAME_EVERYWHERE) else _FromFirst(each, group) for each in own["stopping_criteria"]
        )
    return own


def _compare(group: Group, name: str, call: Any, device: torch.device, *, streams: bool = False) -> bool:
    """Whether any rank streams; raises if the calls differ."""
    number = int.from_bytes(hashlib.sha256(repr((name, _described(call))).encode()).digest()[:7])
    low, high, no_streams = group.lowest([number, -number, int(not streams)], device)
    if low != -high:
        raise InputError(
            f"{name}: the ranks that share this model make different calls; give all of them the same prompts, "
            "arguments and seed, in the same order"
        )
    return not no_streams


def _described(value: Any) -> Any:
    """What is compared: the values of integer tensors, the shape of float tensors, the class of other objects."""
    if isinstance(value, Tensor):
        whole = not value.is_floating_point() and not value.is_complex()
        return tuple(value.shape), str(value.dtype), value.flatten().tolist() if whole else None
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, GenerationConfig):
        return _described({name: item for name, item in vars(value).items() if not name.startswith("_")})
    if isinstance(value, Mapping):
        return sorted((str(name), repr(_described(item))) for name, item in value.items())
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    return type(value).__name__


class _Silent(BaseStreamer):
    """A streamer that drops its tokens: another rank shows them."""

    def put(self, value: Any) -> None:
        """Drop the tokens."""

    def end(self) -> None:
        """Nothing to finish."""


class _FromFirst(StoppingCriteria):
    """A stopping criterion evaluated on the first rank only: a clock, say, differs between ranks."""

    def __init__(self, criterion: Any, group: Group) -> None:
        self._criterion, self._group = criterion, group

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        own = torch.as_tensor(self._criterion(input_ids, scores, **kwargs), device=input_ids.device)
        done = own.to(torch.uint8).expand(len(input_ids)).contiguous()
        return self._group.from_first(done).bool()
