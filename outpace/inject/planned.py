"""Models that keep their own layers over ranks: which modules are cut, by Hugging Face's plan or by the caller's names,
and their replacements."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import NotSupported
from outpace.inject.apply import refuse_to_save, stand_in
from outpace.inject.experts_interface import act_of, computes_otherwise, is_stack, stack_roles
from outpace.inject.linears import is_linear, is_transposed, role_of
from outpace.inject.make import Maker
from outpace.inject.named_linears import by_names
from outpace.inject.plan import config_of
from outpace.inject.rank_plan import Cut, Kind, RankPlan, no_linear
from outpace.inject.ranks import RankFeatures, RankLinear, RankTable
from outpace.inject.split import check_heads, generic, hugging_face_plan, split_stack
from outpace.log import chosen, size_text
from outpace.parallel.spans import Split, even_split

_STYLES: Mapping[str, Cut] = {
    "colwise": Cut("column"),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), Cut("column", whole=True)),
    "rowwise": Cut("row"),
    **dict.fromkeys(("rowwise_rep", "rowwise_split_input"), Cut("row", whole=True)),
    "packed_colwise": Cut("packed"),
    "embedding_rowwise": Cut("vocabulary"),
    "embedding_colwise": Cut("features", whole=True),
}
"""Hugging Face's styles of splitting a module."""
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts")
"""Styles that leave a module whole on every rank. Stacked experts are found by their attributes instead."""


def plan_ranks(
    model: nn.Module, names: Mapping[type[nn.Module], Sequence[str]], ranks: int, *, without: Sequence[str] = ()
) -> RankPlan:
    """Cut by the caller's names of linears whose outputs are summed, or else by Hugging Face's plan.

    Nothing is cut without either, with one rank, and inside the paths `without`.
    """
    plan = RankPlan()
    if ranks == 1:
        return plan
    if names:
        by_names(model, names, ranks, plan)
    else:
        _by_hugging_face(model, ranks, plan)
    for path in [path for path in plan.modules if _inside(path, without)]:
        del plan.modules[path]
    known = {id(tensor): name for name, tensor in model.named_parameters()}
    for path, cut in plan.modules.items():
        for tensor, split in _splits(model.get_submodule(path), cut, path, ranks):
            if plan.splits.setdefault(known[id(tensor)], split) != split:
                raise NotSupported(
                    f"tensor parallelism: {path} shares its weight with {known[id(tensor)]}, which is split differently"
                )
    return plan


def add_stacks(model: nn.Module, plan: RankPlan, ranks: int, *, asked: bool) -> None:
    """Add the stacked experts that our kernels can run. Others stay whole; asked: they raise an error."""
    for path, module in model.named_modules():
        if not is_stack(module):
            continue
        reason = computes_otherwise(module)
        if reason is None:
            plan.stacks.append(path)
            if ranks > 1:
                plan.splits.update(split_stack(module, path, ranks))
        elif asked:
            raise NotSupported(f"moe.ep_size: {path} ({type(module).__name__}) {reason}; leave ep_size at 1")


def put_in(model: nn.Module, plan: RankPlan, make: Maker) -> None:
    """Replace each cut module by this rank's part: empty, with recipes."""
    places = list(model.named_modules(remove_duplicate=False))
    by_path = dict(places)
    made: dict[int, nn.Module] = {}
    for path, cut in plan.modules.items():
        made[id(by_path[path])] = _part(make, path, by_path[path], cut)
    for path in plan.stacks:
        stack: Any = by_path[path]
        made[id(stack)] = make.stack(stack, stack_roles(stack), act_of(stack) or "silu")
    kept = [(by_path[owner], leaf) for owner, _, leaf in (name.rpartition(".") for name in plan.values)]
    values = [(module, leaf, make.values(module.get_parameter(leaf))) for module, leaf in kept]
    for path, module in places:  # a module may be used in several places
        if (ours := made.get(id(module))) is None:
            continue
        if isinstance(module, nn.Embedding) and type(module) is not nn.Embedding:
            _replace_parameter(module, "weight", ours, RankTable)
        else:
            stand_in(ours.eval(), module)
            model.set_submodule(path, ours)
    for module, leaf, own in values:
        _replace_parameter(module, leaf, own)
    for path, name, number in plan.numbers:
        setattr(by_path[path], name, number)
    refuse_to_save(model)
    count = len(plan.modules) + len(plan.stacks)
    chosen("injection", f"{count} modules of {type(model).__name__}", "each rank has a part of them")


def report_whole(model: nn.Module, splits: Mapping[str, Split | None], more: Sequence[str] = ()) -> None:
    """Log the weights that every rank holds whole, once for each kind. more: paths that are shared in other ways."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in model.named_parameters():
        if tensor.dim() > 1 and splits.get(name) is None and not _inside(name, more):
            found.setdefault(generic(name), []).append(tensor)
    for name, tensors in found.items():
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        chosen(name, f"whole on every rank: {size_text(size)}", "nothing says how it is split")


def _inside(path: str, places: Sequence[str]) -> bool:
    return path.startswith(tuple(f"{place}." for place in places))


def _part(make: Maker, path: str, module: nn.Module, cut: Cut) -> nn.Module:
    """This rank's part, with the forward of the whole module."""
    if cut.kind in ("vocabulary", "features"):
        table = make.embedding(module, 1.0)
        return RankFeatures(table, make.outputs(module)) if cut.whole else table
    linear = make.linear([module], role_of(path), transposed=is_transposed(module))
    if cut.kind != "row":
        return RankLinear(linear, gives=make.outputs(module)) if cut.whole else linear
    return RankLinear(linear, takes=make.inputs(module) if cut.whole else None)


def _replace_parameter(module: nn.Module, name: str, ours: nn.Module, *bases: type[nn.Module]) -> None:
    """Make a module read this rank's part as its parameter. bases: come after its own class."""
    own, kind = f"{name}_of_rank", type(module)
    if module._parameters.pop(name, None) is None:
        return  # done before: it is used in several places
    module.add_module(own, ours.eval())
    found = property(lambda self: getattr(self, own).weight)
    module.__class__ = type(kind.__name__, (kind, *bases), {name: found, "__module__": kind.__module__})


@torch.no_grad()
def try_out(model: Any) -> None:
    """Call a generative model with two tokens. Raises if its code cannot run with a part of the heads."""
    if getattr(model, "main_input_name", None) != "input_ids":
        return
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    try:
        model(input_ids=ids, **more)
    except Exception as cause:  # the model's own code, with fewer heads than it expects
        raise NotSupported(
            f"tensor parallelism: {type(model).__name__} cannot run with a part of its heads ({type(cause).__name__}: "
            f"{cause}); run it on one rank, or write a policy (docs/adding-a-model.md)"
        ) from cause


def _splits(module: nn.Module, cut: Cut, path: str, ranks: int) -> Iterator[tuple[Tensor, Split]]:
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    assert weight is not None, "linears and tables have one"
    column, row = (1, 0) if is_transposed(module) else (0, 1)
    dim = {"row": row, "vocabulary": 0, "features": 1}.get(cut.kind, column)
    what = f"{'the inputs' if cut.kind == 'row' else 'the outputs'} of {path}"
    split = even_split(dim, weight.shape[dim], ranks, what, packed=cut.kind == "packed")
    yield weight, split
    if bias is not None and cut.kind in ("column", "packed"):
        yield bias, Split(0, split.spans)


def _by_hugging_face(model: nn.Module, ranks: int, plan: RankPlan) -> None:
    rules = hugging_face_plan(model)
    check_heads(model, config_of(model), rules, ranks)
    used = set()
    stacks = [path for path, module in model.named_modules() if is_stack(module)]
    for path, module in model.named_modules():
        style = rules.get(generic(path))
        if style is None or not path or _inside(path, stacks):
            continue
        used.add(generic(path))
        if style not in _WHOLE and (cut := _styled(path, module, style)) is not None:
            plan.modules[path] = cut
    for name, parameter in model.named_parameters():
        style = rules.get(generic(name))
        used.add(generic(name))
        if style == "colwise" and parameter.dim() == 1 and not _inside(name, stacks):
            plan.values.append(name)
            plan.splits[name] = even_split(0, len(parameter), ranks, f"the values of {name}")
    for rule in rules.keys() - used:
        chosen(f"rule {rule} of Hugging Face's plan", "not used", f"{type(model).__name__} has no such module")
    _add_table(model, plan)


def _styled(path: str, module: nn.Module, style: str) -> Cut | None:
    """How this style cuts a module; None: it stays whole."""
    if style not in _STYLES:
        raise NotSupported(
            f"tensor parallelism: Hugging Face's plan splits {path} as {style!r}, which Outpace does not know; run the "
            "model on one rank, or give injection_policy with the names of the linears whose outputs are added up"
        )
    cut = _STYLES[style]
    if isinstance(module, nn.Embedding):
        if not _is_table(module):
            return None
        tables: Mapping[Kind, Kind] = {"row": "vocabulary", "column": "features"}
        return Cut(tables.get(cut.kind, cut.kind), cut.whole)
    if cut.kind in ("vocabulary", "features") or not is_linear(module):
        raise no_linear(path, module)
    return cut


def _is_table(module: nn.Module) -> bool:
    """Whether a module is an embedding, or a subclass that only changes its rows."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    return type(module) is nn.Embedding or "super().forward(" in inspect.getsource(type(module).forward)


def _add_table(model: Any, plan: RankPlan) -> None:
    """Cut the embedding if the head is cut, so that both can share one tensor."""
    heads = [path for path, cut in plan.modules.items() if cut == Cut("column", whole=True)]
    ends = getattr(model, "get_output_embeddings", lambda: None)(), getattr(model, "get_input_embeddings", None)
    if ends[0] is None or ends[1] is None or not any(model.get_submodule(path) is ends[0] for path in heads):
        return
    table = ends[1]()
    path = next((path for path, module in model.named_modules() if module is table), None)
    if path is None or path in plan.modules or not _is_table(table):
        return
    if table.weight.shape[0] == ends[0].weight.shape[0]:
        plan.modules[path] = Cut("vocabulary")
