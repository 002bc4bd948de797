"""A model cut to the layers of one pipeline stage. The model's own code runs it, as if it had no other layers.

The first layer of a stage takes the output of the stage before instead of its own input. The output of the last layer
goes to the next stage; what the model then computes from it is ignored. The results of the last stage go to all stages.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outpace.errors import ModelError, NotSupported
from outpace.inject.modules import FusedLayer
from outpace.log import chosen
from outpace.offload.units import find_layers
from outpace.parallel.group import ALONE, Group
from outpace.parallel.mesh import Mesh
from outpace.parallel.micro_batches import in_parts, joined
from outpace.parallel.pipeline import Stage
from outpace.parallel.spans import Span
from outpace.parallel.stages import FIELD, as_asked, balanced
from outpace.parallel.vocabulary import ALL

PARTS = 4  # micro-batches per stage
_OF_ALL_LAYERS = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class EndTable:
    """The embedding before the layers, or the head after them."""

    path: str
    width: int
    """Of its output."""
    embeds: bool
    """Its input is token ids."""


Ends = tuple[EndTable | None, EndTable | None]


@dataclass
class StageCut:
    """The layers of one stage."""

    model: nn.Module
    stage: Stage
    span: Span
    path: str
    """Path of the list of layers."""
    ends: Ends
    """Embedding and head, if the model names them."""
    beside: Group = ALONE
    """Ranks with other rows that share experts with this one: they must make the same number of calls."""
    dtype: torch.dtype = torch.float32
    """Of the rows between stages."""
    problems: list[Exception | None] | None = None
    """Errors of each micro-batch, raised after the last one; None: a call raises its own error."""
    _awaited: bool = False
    """The running call has yet to receive from the stage before."""
    _owed: bool = False
    """The running call has yet to send to the next stage."""

    @property
    def layers(self) -> nn.Module:
        return self.model.get_submodule(self.path)

    @property
    def device(self) -> torch.device:
        """Of its layers."""
        return next(self.layers.parameters()).device

    def apply(self, dtype: torch.dtype) -> None:
        """Drop all other layers, and embedding or head if another stage has it. Names stay the same."""
        layers, self.dtype = self.layers, dtype
        for place, name in enumerate([*layers._modules]):
            if not self.span[0] <= place < self.span[1]:
                del layers._modules[name]
        for end, needed in zip(self.ends, (self.stage.is_first, self.stage.is_last), strict=True):
            if end is not None and not needed:
                self.model.set_submodule(end.path, Blank(end, dtype))

    def settle(self) -> None:
        """After loading: number the layers from 0, as caches and configs expect; hook the first and the last one."""
        layers, first = self.layers, self.span[0]
        layers._modules = {str(place): layer for place, layer in enumerate(layers._modules.values())}
        for module in layers.modules():
            if isinstance(module, FusedLayer):
                module.index -= first
            if isinstance(vars(module).get("layer_idx"), int):
                module.layer_idx -= first  # type: ignore[operator,assignment]
        _shorten(self.model, self.span)
        inner = list(layers.children())
        inner[0].register_forward_pre_hook(self._take_in, with_kwargs=True)
        inner[-1].register_forward_hook(self._hand_on)
        own: Callable[..., Any] = self.model.forward

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs) if self.stage.handed is not None else self._call(own, args, kwargs)

        self.model.forward = forward

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], parts: int | None) -> Any:
        """Call the model in micro-batches: while one is in the next stage, the following one is here."""
        config = getattr(self.model, "config", None)
        self.refuse_outputs(lambda name: getattr(config, name, None) if kwargs.get(name) is None else kwargs[name])
        parts = PARTS * self.stage.count if parts is None else parts
        calls = in_parts(args, kwargs, parts, self.beside, self.device)
        problems = self.problems = []
        try:
            outputs = [self.model(*own, **more) for own, more in calls]
        finally:
            self.problems = None
        self._share(outputs, problems)
        return joined(outputs)

    def _call(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the model. After an error the other stages still get what they wait for."""
        self._awaited, self._owed = not self.stage.is_first, not self.stage.is_last
        output, problem = None, None
        try:
            output = own(*args, **kwargs)
            if self.stage.is_last:
                self.stage.link.end(None)
        except Exception as error:
            problem = error
            self._make_up(args, kwargs)
        if self.problems is None:
            self._share([output], [problem])
        else:
            self.problems.append(problem)
        return output

    def _make_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """After an error: receive from the stage before and send zeros to the next one, so that neither waits."""
        given = kwargs.get("inputs_embeds", kwargs.get("input_ids", args[0] if args else None))
        if not isinstance(given, Tensor):
            return
        width = getattr(getattr(self.model, "config", None), "hidden_size", None)
        shape = given.shape if given.is_floating_point() else (*given.shape, width or 0)
        x = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if self._awaited:
            self.stage.link.receive(x)
        if self._owed:
            self.stage.link.send(torch.zeros_like(x))

    def _share(self, outputs: Sequence[Any], problems: Sequence[Exception | None]) -> None:
        """Send the last stage's results to all stages; or raise an error on all of them."""
        found = next((problem for problem in problems if problem is not None), None)
        good = self.stage.everyone.least(int(found is None), self.device)
        self.stage.link.flush()
        if found is not None:
            raise found
        if not good:
            raise ModelError("forward: another stage of the pipeline failed in this call; the log of its rank says why")
        for finish in [self.stage.peers.start_from_first(each) for each in _tensors(outputs)]:
            finish()

    def refuse_outputs(self, setting: Callable[[str], object]) -> None:
        """Raise if a call asks for something of every layer: a stage only has its own."""
        asked = [name for name in _OF_ALL_LAYERS if setting(name)]
        if asked:
            raise NotSupported(
                f"{', '.join(asked)}: no stage of a pipeline has those of all layers; remove them from the call, and "
                "turn them off in the model's config"
            )

    def _take_in(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the first argument by the output of the stage before."""
        own, handed = args[0] if args else kwargs["hidden_states"], self.stage.handed
        x = None if handed is None else handed.given
        if handed is None:
            x = None if self.stage.is_first else torch.empty(own.shape, dtype=own.dtype, device=own.device)
            self.stage.link.begin(x)
            self._awaited = False
        if x is None:
            return None
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    def _hand_on(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Send the output of the last layer to the next stage."""
        x = output if isinstance(output, Tensor) else output[0]
        if (handed := self.stage.handed) is not None:
            handed.taken = x
        elif not self.stage.is_last:
            self._owed = False
            self.stage.link.end(x)


def plan_cut(model: nn.Module, mesh: Mesh, asked: tuple[int, ...] | None) -> StageCut | None:
    """The cut of a whole model, before injection; None: there is one stage."""
    stage, beside = mesh.stage, ALONE if mesh.experts_like_layers else mesh.ep
    if stage.count == 1:
        return None
    path, ends, spans = stages_of(model, stage.count, asked)
    each = ", ".join(str(stop - start) for start, stop in spans)
    why = "asked for" if asked else "balanced by weights"
    chosen("layers of each stage", each, f"{why}; this is stage {stage.number}")
    return StageCut(model, stage, spans[stage.number], path, ends, beside)


def stages_of(model: nn.Module, count: int, asked: tuple[int, ...] | None) -> tuple[str, Ends, tuple[Span, ...]]:
    """Path of the list of layers, the ends, and the layers of each stage. Raises for a model that cannot be cut."""
    found = find_layers(model)
    lists = {path.rpartition(".")[0] for path, _ in found}
    lists = {path for path in lists if "expert" not in path.rpartition(".")[2].lower()}  # experts are not layers
    if len(lists) != 1 or not all(isinstance(model.get_submodule(path), nn.ModuleList) for path in lists):
        raise NotSupported(
            f"{FIELD}: {type(model).__name__} has {len(lists) or 'no'} lists of layers (nn.ModuleList), and stages are "
            "cut from one; use tensor parallelism, or run it on one rank"
        )
    _check(model, found[0][1])
    ends = _end(model, "get_input_embeddings", 1), _end(model, "get_output_embeddings", 0)
    sizes = [_size(layer) for _, layer in found]
    at_ends = [0 if end is None else _size(model.get_submodule(end.path)) for end in ends]
    spans = balanced(sizes, count, *at_ends) if asked is None else as_asked(asked, len(found))
    return lists.pop(), ends, spans


def _check(model: Any, layer: nn.Module) -> None:
    """Raise for a model whose layers depend on other stages."""
    config = getattr(model, "config", None)
    if getattr(config, "scale_attn_by_inverse_layer_idx", False) and not isinstance(layer, FusedLayer):
        raise NotSupported(f"{FIELD}: its layers scale by their number (scale_attn_by_inverse_layer_idx); remove it")
    if getattr(config, "is_encoder_decoder", False):
        raise NotSupported(f"{FIELD}: {type(model).__name__} is an encoder with a decoder; use tensor parallelism")
    if getattr(config, "num_kv_shared_layers", 0):
        raise NotSupported(f"{FIELD}: {type(model).__name__} shares keys between layers; use tensor parallelism")


def _end(model: Any, name: str, dim: int) -> EndTable | None:
    """Embedding or head, as Hugging Face's method names it. dim: of its weight, the size of the output."""
    try:
        table = getattr(model, name)()
    except (AttributeError, NotImplementedError):
        return None
    path = next((path for path, module in model.named_modules() if module is table), None)
    weight = getattr(table, "weight", None)
    return None if path is None or weight is None else EndTable(path, weight.shape[dim], embeds=dim == 1)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shorten(model: nn.Module, span: Span) -> None:
    """Cut configs to the layers of a stage. Copies them, because other models may share them."""
    start, stop = span
    memo: dict[int, Any] = {}
    configs: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(getattr(whole := getattr(module, "config", None), "num_hidden_layers", None), int):
            own = copy.deepcopy(whole, memo)
            configs[id(own)] = own
            module.config = own  # type: ignore[assignment]
    for config in configs.values():
        count = config.num_hidden_layers
        for name, value in list(vars(config).items()):
            if isinstance(value, list | tuple) and len(value) == count and name.endswith(("layer_types", "layers")):
                setattr(config, name, value[start:stop])
        config.num_hidden_layers = stop - start


class Blank(nn.Module):
    """Replaces embedding or head if another stage has it; its output has the same shape."""

    def __init__(self, end: EndTable, dtype: torch.dtype) -> None:
        super().__init__()
        self.end = end
        self.dtype = dtype
        """Of its output."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., width] of zeros, for ids [...] or rows [..., any]."""
        shape = x.shape if self.end.embeds else x.shape[:-1]
        return torch.zeros(*shape, self.end.width, dtype=self.dtype, device=x.device)


def width(head: Any) -> int:
    """Width of all logits of a head, on any rank and stage."""
    if isinstance(head, Blank):
        return head.end.width
    vocabulary = getattr(head, "vocabulary", ALL)
    return sum(vocabulary.sizes) or int(getattr(head, "out_features", 0) or head.weight.shape[0])


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a model's output, without caches, which each stage has."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
