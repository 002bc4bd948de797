"""Layers over ranks in DeepSpeed's form: the caller names the linears whose outputs are summed over ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from outpace.errors import NotSupported
from outpace.inject.linears import is_linear, is_transposed
from outpace.inject.parts import Parts
from outpace.inject.rank_plan import Cut, Kind, RankPlan, no_linear
from outpace.inject.split import ROUTERS

_FUSED = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "in_proj", "kv_proj", "kv", "att_proj")
"""Names of fused linears: the order of their outputs is unknown."""
_HEADS = ("n_heads", "num_heads", "num_attention_heads", "num_attn_heads", "num_key_value_heads", "num_kv_heads",
          "kv_n_heads", "num_kv")  # fmt: skip
"""Attributes of attention modules that count heads."""
_WIDTHS = ("inner_dim", "all_head_size", "embed_dim", "hidden_size", "d_model")
"""Attributes of attention modules with the width of all heads."""
_HEAD_DIMS = ("key_value_proj_dim", "head_dim", "attention_head_size", "dim_per_head")


def by_names(model: nn.Module, names: Mapping[type[nn.Module], Sequence[str]], ranks: int, plan: RankPlan) -> None:
    """Add the layers of these classes to a plan."""
    for kind, reduced in names.items():
        for at, layer in model.named_modules():
            if isinstance(layer, kind):
                _layer(at, layer, reduced, ranks, plan)


def _layer(at: str, layer: nn.Module, reduced: Sequence[str], ranks: int, plan: RankPlan) -> None:
    """Cut the named linears by inputs, and all others by outputs."""
    part = Parts(layer)
    rows = {path for name in reduced for path in part.ending_in(name)}
    for path, module in layer.named_modules():
        where, last = f"{at}.{path}", path.rpartition(".")[2]
        if not is_linear(module):
            if path in rows:
                raise no_linear(where, module)
            continue
        beside = layer.get_submodule(path.rpartition(".")[0]).named_children()
        if path not in rows and last in ROUTERS and any("expert" in name for name, _ in beside):
            continue
        if path not in rows and last in _FUSED:
            raise NotSupported(
                f"tensor parallelism: {where} computes queries, keys and values at once, and injection_policy does not "
                "say in which order; set replace_with_kernel_inject=True if Outpace has a policy of it, or write one "
                "(docs/adding-a-model.md)"
            )
        kind: Kind = "row" if path in rows else "packed" if last == "gate_up_proj" else "column"
        _check_even(module, kind, where, ranks)
        plan.modules[where] = Cut(kind)
    for path, module in layer.named_modules():
        _count_heads(f"{at}.{path}" if path else at, module, ranks, plan)


def _check_even(module: nn.Module, kind: Kind, where: str, ranks: int) -> None:
    out, size = module.get_parameter("weight").shape
    if is_transposed(module):
        out, size = size, out
    size, what = (size, "inputs") if kind == "row" else (out, "outputs")
    if size % (2 * ranks if kind == "packed" else ranks):
        raise NotSupported(
            f"tensor parallelism: {where} has {size} {what}, which do not divide by {ranks} ranks; use another number "
            "of ranks"
        )


def _count_heads(where: str, module: Any, ranks: int, plan: RankPlan) -> None:
    """Set the attributes of attention to this rank's heads, and cut an embedding with a column for each head."""
    own = {name: child for name, child in module.named_children() if f"{where}.{name}" in plan.modules}
    outputs = [child for name, child in own.items() if plan.modules[f"{where}.{name}"].kind == "column"]
    read = {name: getattr(module, name, None) for name in (*_HEADS, *_WIDTHS)}
    numbers = {name: value for name, value in read.items() if isinstance(value, int) and not isinstance(value, bool)}
    _check_whole_heads(where, module, outputs, ranks)
    if not outputs or not set(numbers) & set(_HEADS):
        return
    for name, value in numbers.items():
        if value % ranks:
            raise NotSupported(
                f"tensor parallelism: {name}={value} of {where} does not divide by {ranks} ranks; use another number "
                "of ranks"
            )
        plan.numbers.append((where, name, value // ranks))
    heads = next(numbers[name] for name in _HEADS if name in numbers)
    for name, child in module.named_children():
        if type(child) is nn.Embedding and child.embedding_dim == heads:
            plan.modules[f"{where}.{name}"] = Cut("features")


def _check_whole_heads(where: str, module: nn.Module, outputs: Sequence[nn.Module], ranks: int) -> None:
    """Raise if a rank would get a part of a head, for attention that only knows the size of a head."""
    size = next((value for name in _HEAD_DIMS if isinstance(value := getattr(module, name, None), int)), None)
    for child in outputs:
        out = child.get_parameter("weight").shape[1 if is_transposed(child) else 0]
        if size is not None and out // ranks % size:
            raise NotSupported(
                f"tensor parallelism: {out // size} heads of {where} do not divide by {ranks} ranks; use another "
                "number of ranks"
            )
