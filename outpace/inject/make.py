"""Makes all modules with weights: plain, quantized, or with this rank's part."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from outpace.errors import ModelError
from outpace.inject.exchange import ExchangedExperts, ExpertMap
from outpace.inject.experts import Dense, Experts, MixtureOfExperts, Router, router_class
from outpace.inject.modules import Embedding, Linear, Norm, PlainLinear
from outpace.inject.parts import Parts
from outpace.inject.policy import LayerSettings, MoERoles, Policy
from outpace.inject.quantized import PackedEmbedding, PackedExperts, PackedLinear, StandInExperts
from outpace.inject.ranks import SplitEmbedding, SplitNorm, SummedLinear, Values
from outpace.inject.recipe import PairedRows, Recipe, RowOrder
from outpace.inject.shard import Shard
from outpace.kernels.dispatch import Kernels
from outpace.parallel.group import ALONE, Group
from outpace.parallel.mesh import NO_MESH
from outpace.parallel.spans import Span
from outpace.parallel.vocabulary import Vocabulary
from outpace.quant.rules import KEEP, Role, Rules
from outpace.quant.scheme import Scheme
from outpace.quant.stored import common

_EPS_NAMES = ("eps", "variance_epsilon")


class Maker:
    """Makes the modules that replace those of one model. Knows the model's tensors by name."""

    def __init__(self, model: nn.Module, kernels: Kernels, rules: Rules = KEEP, shard: Shard | None = None) -> None:
        tensors = (*model.named_buffers(), *model.named_parameters())
        self._names = {id(tensor): name for name, tensor in tensors}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._kernels = kernels
        self.shard = Shard(NO_MESH, {}) if shard is None else shard
        """This rank's part of the weights."""
        self.rules = rules
        self.schemes: dict[str, Scheme | None] = {}
        """Scheme of each linear that was made, by the name that rules use."""
        self.roles: set[Role] = set()
        """Roles of all weights so far."""
        self.quantized_experts = False
        self._mixtures = 0  # made so far
        self.weights: dict[tuple[str, ...], tuple[Role, Recipe]] = {}
        """Role and recipe of each linear that was made, by the names of all its parts."""

    def linear(
        self,
        modules: Sequence[nn.Module],
        role: Role = "other",
        *,
        transposed: bool = False,
        order: RowOrder | None = None,
        summed: bool = True,
    ) -> Linear:
        """One linear for one or several of the model's, with their rows stacked.

        summed: False: the caller sums over ranks, and the first rank adds the bias.
        """
        weights = [_parameter(module, "weight") for module in modules]
        for module, weight in zip(modules, weights, strict=True):
            if weight is None or weight.dim() != 2:
                raise ModelError(f"injection: {type(module).__name__} is not a linear layer with a weight")
        whole = Recipe.joined([self._tensor(weight) for weight in weights], transposed=transposed, order=order)
        recipe = self.shard.cut(whole)
        biases = [_parameter(module, "bias") for module in modules]
        bias = None
        if any(each is not None for each in biases):
            rows = [part.shape_in_weight[0] for part in whole.parts]
            tensors = [count if each is None else self._tensor(each) for each, count in zip(biases, rows, strict=True)]
            bias = self.shard.cut_bias(Recipe.joined(tensors, order=order), whole, recipe)
        names = [f"{self._paths[id(module)]}.weight" for module in modules]
        scheme = self._stored(recipe) or self._scheme(role, names, recipe)
        shares = self.shard.adds_up(whole)
        first = None if shares and (summed or self.shard.tp.rank) else bias
        made = self._linear(recipe, scheme, first)
        return SummedLinear(made, bias, self.shard.tp, self._kernels) if shares and summed else made

    def _linear(self, recipe: Recipe, scheme: Scheme | None, bias: Recipe | None) -> Linear:
        if scheme is None:
            return PlainLinear(recipe, bias, self._kernels)
        if scheme.per_tensor and len(recipe.parts) > 1:
            scheme = replace(scheme, sources=tuple(part.shape_in_weight[0] for part in recipe.parts))
        return PackedLinear(replace(recipe, scheme=scheme), bias, self._kernels)

    def head(self, module: nn.Module) -> Linear:
        """The model's head. Over ranks each has the rows of some tokens."""
        made = self.linear([module], "head")
        name, _ = self._tensor(_parameter(module, "weight"))
        if self.shard.spans(name) is not None:
            made.vocabulary = Vocabulary(self.shard.tp, self.shard.sizes(name))
        return made

    def _stored(self, recipe: Recipe) -> Scheme | None:
        """The scheme of a weight that is used as the checkpoint stores it; None: it is converted."""
        forms = {} if self.rules.stored is None else self.rules.stored.schemes
        schemes = [forms[part.name] for part in recipe.parts if part.name in forms]
        if len(schemes) < len(recipe.parts) or any(part.transposed or part.slices for part in recipe.parts):
            return None
        rows = [part.shape_in_weight[0] for part in recipe.parts]
        return common(schemes, rows, recipe.shape[1], ordered=any(part.order for part in recipe.parts))

    def _scheme(self, role: Role, names: Sequence[str], recipe: Recipe) -> Scheme | None:
        self.roles.add(role)
        scheme = self.rules.of(role, names, recipe.shape)
        self.schemes.update(dict.fromkeys(names, scheme))
        self.weights[tuple(names)] = (role, recipe)
        return scheme

    def mixture(self, part: Parts, roles: MoERoles, config: Any, act: str) -> MixtureOfExperts:
        """Router, experts and shared MLP of a layer or of a module. part: finds its submodules."""
        router, experts = self._router(part, roles, config), self.experts(part(roles.experts), roles, config, act)
        if router.num_experts != self._count(part(roles.experts), roles):
            raise ModelError(
                f"injection: {roles.router} chooses among {router.num_experts} experts, and {roles.experts} has "
                f"{self._count(part(roles.experts), roles)}"
            )
        dense = None
        if roles.shared is not None:
            inner = Parts(part(roles.shared))
            names = (roles.shared_up,) if isinstance(roles.shared_up, str) else roles.shared_up
            up = self.linear([inner(name) for name in names], "mlp")
            down = self.linear([inner(roles.shared_down)], "mlp", summed=False)
            dense = Dense(up, down, act, gated=roles.gated)
        gate, coefficient = (
            None if path is None else self.linear([part(path)], "router")
            for path in (roles.shared_gate, roles.coefficient)
        )
        made = MixtureOfExperts(router, experts, self._kernels, dense, gate, coefficient)
        made.experts, made.where, made.group = self._of_ranks(made.experts, router.num_experts)
        if self.shard.exchanges or (self.shard.mesh.ep.size > 1 and not self.shard.mesh.experts_like_layers):
            made.together, made.dense_group = False, self.shard.tp
        return made

    def outputs(self, module: nn.Module) -> Vocabulary:
        """How the outputs of all ranks are joined, for a linear or a table that is cut by outputs."""
        name, _ = self._tensor(_parameter(module, "weight"))
        return Vocabulary(self.shard.tp, self.shard.sizes(name))

    def inputs(self, module: nn.Module) -> Span:
        """This rank's inputs, for a linear that is cut by inputs."""
        found = self.shard.spans(self._tensor(_parameter(module, "weight"))[0])
        assert found is not None, "it is cut"
        _, (span,) = found
        return span

    def stack(self, module: nn.Module, roles: MoERoles, act: str) -> StandInExperts:
        """This rank's part of a stack of experts, with the forward of the module that it replaces."""
        experts = self.experts(module, roles, None, act)
        return StandInExperts(*self._of_ranks(experts, self._count(module, roles))).eval()

    def _of_ranks(self, experts: Experts, count: int) -> tuple[Experts, Callable[[Tensor], Tensor] | None, Group]:
        """The experts to call, a map from expert numbers to this rank's own, and the ranks that sum their results."""
        shard, mesh = self.shard, self.shard.mesh
        self._mixtures += 1
        if mesh.ep.size == 1:
            return experts, None, shard.tp
        where = ExpertMap(shard.held_experts(count, self._mixtures - 1), mesh.ep.rank)
        if shard.exchanges:
            sliced = mesh.expert_tp if shard.expert_splits else ALONE
            return ExchangedExperts(experts, where, mesh.ep, sliced), None, ALONE
        experts.add_module("where", where)  # so that its tables move with the experts
        return experts, where.own, mesh.ep

    def _router(self, part: Parts, roles: MoERoles, config: Any) -> Router:
        module = part(roles.router)
        weight, bias = self._whole(_parameter(module, "weight")), _parameter(module, "bias")
        return router_class(type(module))(
            weight,
            None if bias is None else self._whole(bias),
            None if roles.correction is None else self._whole(part.tensor(roles.correction)),
            roles.routing(config),
            self._kernels,
            in_float32=roles.in_float32,
        )

    def experts(self, module: nn.Module, roles: MoERoles, config: Any, act: str) -> Experts:
        """The experts of a module with stacked weights, or of a list of modules."""
        find = self._listed if isinstance(module, nn.ModuleList) else self._stacked
        up, up_bias = self._of_rank(*find(module, roles.up, roles.transposed, roles.paired))
        down, down_bias = self._of_rank(*find(module, roles.down, roles.transposed, False))
        slicing = self.shard.tp if self.shard.mesh.ep.size == 1 else self.shard.of_one_expert.tp
        if slicing.rank and (self.shard.mesh.ep.size == 1 or self.shard.expert_splits):
            down_bias = None  # ranks with parts of the same expert sum their results: one of them adds the bias
        limit, alpha = roles.clamp(config) or (None, None)
        up, down = self._with_scheme(up), self._with_scheme(down)
        quantized = any(recipe.scheme is not None for recipe in (up, down))
        self.quantized_experts |= quantized
        return (PackedExperts if quantized else Experts)(
            up, down, up_bias, down_bias, self._kernels, act=act, gated=roles.gated, limit=limit, alpha=alpha
        )

    def _of_rank(self, weight: Recipe, bias: Recipe | None) -> tuple[Recipe, Recipe | None]:
        """This rank's part of a stacked weight and of its bias."""
        count, shard = weight.shape[0], self.shard
        own = shard.cut_experts(weight, count, self._mixtures)
        if bias is None:
            return own, None
        if shard.mesh.ep.size == 1:
            return own, shard.cut_bias(bias, weight, own)
        if shard.expert_splits:
            bias = shard.of_one_expert.cut_bias(bias, weight, shard.of_one_expert.cut(weight))
        return own, shard.of_experts(bias, count, self._mixtures)

    def _count(self, module: nn.Module, roles: MoERoles) -> int:
        if isinstance(module, nn.ModuleList):
            return len(module)
        stack = _parameter(module, roles.down)
        return -1 if stack is None else stack.shape[0]

    def _with_scheme(self, recipe: Recipe) -> Recipe:
        """A stacked weight with the scheme that rules ask for."""
        names = list(dict.fromkeys(part.name for part in recipe.parts))
        scheme = self._scheme("experts", names, recipe)
        first = [part for part in recipe.parts if part.expert == 0 and len(part.shape) == 2]
        if scheme is not None and scheme.per_tensor and len(first) > 1:
            scheme = replace(scheme, sources=tuple(part.shape_in_weight[0] for part in first))
        return replace(recipe, scheme=scheme)

    def _stacked(
        self, module: nn.Module, name: str | tuple[str, str], transposed: bool, paired: bool
    ) -> tuple[Recipe, Recipe | None]:
        """Weight [E, N, K] and bias [E, N] of experts in stacked tensors."""
        weight = _parameter(module, name) if isinstance(name, str) else None
        if weight is None or weight.dim() != 3:
            raise ModelError(f"injection: {type(module).__name__} has no stack of weights {name!r}")
        bias = _parameter(module, f"{name}_bias")
        order = PairedRows(weight.shape[2 if transposed else 1] // 2) if paired else None
        stacked = Recipe.stack(*self._tensor(weight), transposed=transposed, order=order)
        return stacked, None if bias is None else Recipe.stack(*self._tensor(bias), order=order)

    def _listed(
        self, module: nn.Module, names: str | tuple[str, str], transposed: bool, paired: bool
    ) -> tuple[Recipe, Recipe | None]:
        """The same for experts that are modules of their own."""
        paths = (names,) if isinstance(names, str) else names
        linears = [[Parts(expert)(path) for path in paths] for expert in module.children()]
        weights = [[_parameter(linear, "weight") for linear in each] for each in linears]
        if any(weight is None or weight.dim() != 2 for each in weights for weight in each):
            raise ModelError(f"injection: {' or '.join(paths)} of an expert is not a linear layer with a weight")
        if len({tuple(weight.shape for weight in each if weight is not None) for each in weights}) > 1:
            raise ModelError("injection: the experts of a layer have different sizes; leave kernel injection off")
        stacked = Recipe.stacked([[self._tensor(weight) for weight in each] for each in weights], transposed=transposed)
        biases = [[_parameter(linear, "bias") for linear in each] for each in linears]
        if not any(bias is not None for each in biases for bias in each):
            return stacked, None
        rows = [part.shape_in_weight[0] for part in stacked.parts[: len(paths)]]
        kept = [
            [count if bias is None else self._tensor(bias) for bias, count in zip(each, rows, strict=True)]
            for each in biases
        ]
        return stacked, Recipe.stacked(kept)

    def embedding(self, module: nn.Module, scale: float) -> Embedding:
        """The model's embedding. scale: the factor that the module itself applies."""
        weight = _parameter(module, "weight")
        if weight is None or weight.dim() != 2:
            raise ModelError(f"injection: {type(module).__name__} is not an embedding with a weight")
        whole = self._whole(weight)
        recipe, found = self.shard.cut(whole), self.shard.spans(whole.parts[0].name)
        if found is not None:
            dim, ((first, _),) = found
            if dim == 1:
                return Embedding(recipe, self._kernels, scale)
            return SplitEmbedding(recipe, self._kernels, scale, first, self.shard.tp)
        scheme, stored = self._stored(recipe), self.rules.stored
        if scheme is None or stored is None or scheme.block_rows > 1:
            return Embedding(recipe, self._kernels, scale)
        return PackedEmbedding(replace(recipe, scheme=scheme), self._kernels, scale, stored.dtype)

    def norm(self, module: nn.Module, policy: Policy) -> Norm:
        return make_norm(module, policy, self._kernels)

    def head_norm(self, module: nn.Module, policy: Policy, settings: LayerSettings, *, keys: bool) -> Norm:
        """A norm of q or k; its weights may differ between heads."""
        norm, weight, bias = self.norm(module, policy), _parameter(module, "weight"), _parameter(module, "bias")
        if weight is None or self.shard.spans(self._tensor(weight)[0]) is None:
            return norm
        cut = self.shard.cut
        made = SplitNorm(norm, cut(self._whole(weight)), None if bias is None else cut(self._whole(bias)))
        if policy.qk_norm_over == "all":
            heads = settings.num_kv_heads if keys else settings.num_heads
            copies = self.shard.copies(settings) if keys else 1
            made.shares = self.shard.tp, heads * settings.head_dim, copies
        return made

    def values(self, values: Tensor) -> Values:
        """A vector with a value for each head."""
        return Values(self.shard.cut(self._whole(values)))

    def _whole(self, tensor: Tensor | None) -> Recipe:
        return Recipe.whole(*self._tensor(tensor))

    def _tensor(self, tensor: Tensor | None) -> tuple[str, tuple[int, ...]]:
        assert tensor is not None, "checked by the caller"
        return self._names[id(tensor)], tuple(tensor.shape)


def make_norm(module: nn.Module, policy: Policy, kernels: Kernels) -> Norm:
    """Our norm, sharing the weights of the model's own."""
    named = (getattr(module, name, None) for name in _EPS_NAMES)
    eps = next((value for value in (policy.norm_eps, *named) if value is not None), None)
    if eps is None:
        raise ModelError(
            f"injection: {type(module).__name__} has neither {' nor '.join(_EPS_NAMES)}; set norm_eps in its policy"
        )
    return Norm(
        policy.norm,
        _parameter(module, "weight"),
        _parameter(module, "bias"),
        eps,
        kernels,
        offset=policy.norm_offset,
        round_before_weight=policy.round_before_weight,
    )


def _parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    value = getattr(module, name, None)
    return value if isinstance(value, nn.Parameter) else None
