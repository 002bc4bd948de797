"""Nested inputs and outputs: find, replace and describe the tensors in them."""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from transformers import BatchEncoding, DynamicCache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from outpace.tree import map_tensors, moved, signature, tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Box:
    value: Any
    label: str = "name"


@dataclasses.dataclass
class Open:
    value: Any


class Opaque:
    def __init__(self) -> None:
        self.value = torch.ones(1)


def one(value: float = 1.0) -> Any:
    return torch.tensor([value])


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    return cache


def keys_of(cache: Any) -> set[float]:
    return set(cache.layers[0].keys.flatten().tolist())


STRUCTURES: dict[str, tuple[Any, int]] = {
    "tensor": (one(), 1),
    "dict": ({"a": one(), "b": {"c": one(), "d": 3}}, 2),
    "ordered dict": (OrderedDict(a=one(), b=None), 1),
    "batch encoding": (BatchEncoding({"input_ids": one(), "n": 4}), 1),
    "model output": (BaseModelOutput(last_hidden_state=one(), hidden_states=(one(), one())), 3),
    "list": ([one(), "text", [one()]], 2),
    "tuple": ((one(), (one(),)), 2),
    "named tuple": (Pair(one(), {"x": one()}), 2),
    "frozen dataclass": (Box([one()]), 1),
    "dataclass": (Open(Box(one())), 1),
    "constant": ("text", 0),
    "nothing": (None, 0),
    "empty": ({}, 0),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_tensor_is_found_and_replaced_and_the_classes_are_kept(name: str) -> None:
    structure, count = STRUCTURES[name]
    assert len(list(tensors(structure))) == count
    result = map_tensors(lambda tensor: tensor + 1, structure)
    assert type(result) is type(structure)
    assert [tensor.tolist() for tensor in tensors(result)] == [[2.0]] * count
    assert [tensor.tolist() for tensor in tensors(structure)] == [[1.0]] * count, "the original was changed"


def test_a_model_output_is_changed_by_name_and_by_position() -> None:
    result = map_tensors(lambda tensor: tensor + 1, CausalLMOutputWithPast(logits=one()))
    assert result.logits is result["logits"] is result[0]
    assert result.logits.tolist() == [2.0]
    assert result.loss is None


def test_constants_are_kept() -> None:
    result = map_tensors(torch.clone, Pair({"n": 4, "s": "x", "none": None}, Box(one(), "label")))
    assert result.left == {"n": 4, "s": "x", "none": None}
    assert result.right.label == "label"


def test_a_cache_is_copied_with_its_layers() -> None:
    cache = filled_cache()
    result = map_tensors(lambda tensor: tensor + 1, cache)
    assert result is not cache
    assert isinstance(result, DynamicCache)
    assert keys_of(result) == {2.0}
    assert keys_of(cache) == {1.0}


def test_what_is_on_its_device_already_is_not_copied() -> None:
    structure = {"ids": one(), "cache": filled_cache()}
    assert moved(structure, torch.device("cpu")) is structure


def test_what_is_elsewhere_is_moved() -> None:
    result = moved({"a": [one()], "b": 2}, torch.device("meta"))
    assert result["a"][0].device == torch.device("meta")
    assert result["b"] == 2


SAME = [
    (one(1.0), one(2.0)),
    ({"a": one(), "n": 3}, {"a": one(5.0), "n": 3}),
    (Box(one()), Box(one(2.0))),
    ((one(), None, torch.float16), (one(), None, torch.float16)),
]
DIFFERENT = [
    (one(), torch.ones(2)),
    (one(), one().long()),
    ({"n": 3}, {"n": 4}),
    ({"n": 1}, {"n": True}),
    ({"a": one()}, {"b": one()}),
    ([one()], (one(),)),
    (Box(one(), "x"), Box(one(), "y")),
    ((one(),), (one(), one())),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_equal_signatures(left: Any, right: Any) -> None:
    assert signature(left) is not None
    assert signature(left) == signature(right)
    assert hash(signature(left)) == hash(signature(right))


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_different_signatures(left: Any, right: Any) -> None:
    assert signature(left) != signature(right)


@pytest.mark.parametrize("value", [filled_cache(), Opaque(), {"deep": [Opaque()]}, (one(), filled_cache())])
def test_what_has_a_state_has_no_signature(value: Any) -> None:
    assert signature(value) is None


def test_an_unknown_object_is_a_constant() -> None:
    opaque = Opaque()
    assert list(tensors([opaque])) == []
    assert map_tensors(torch.clone, [opaque])[0] is opaque
