"""The one place where modules with weights are made: which kind each is, its scheme says."""

from collections.abc import Mapping, Sequence

from torch import nn

from outpace.errors import ModelError
from outpace.inject.modules import Embedding, Linear, Norm, PlainLinear
from outpace.inject.policy import Policy
from outpace.inject.recipe import Recipe, RowOrder, Scheme
from outpace.kernels.dispatch import Kernels

LINEARS: Mapping[Scheme, type[Linear]] = {"plain": PlainLinear}
_EPS_NAMES = ("eps", "variance_epsilon")


class Maker:
    """Makes the modules that stand in for those of one model, which knows its tensors by name."""

    def __init__(self, model: nn.Module, kernels: Kernels) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._kernels = kernels

    def linear(
        self, modules: Sequence[nn.Module], *, transposed: bool = False, order: RowOrder | None = None
    ) -> Linear:
        """One linear for several of the model's, whose rows come one below the other."""
        weights = [_parameter(module, "weight") for module in modules]
        for module, weight in zip(modules, weights, strict=True):
            if weight is None or weight.dim() != 2:
                raise ModelError(f"injection: {type(module).__name__} is not a linear layer with a weight")
        recipe = Recipe.joined([self._tensor(weight) for weight in weights], transposed=transposed, order=order)
        biases = [_parameter(module, "bias") for module in modules]
        bias = None
        if any(each is not None for each in biases):
            rows = [part.shape_in_weight[0] for part in recipe.parts]
            tensors = [count if each is None else self._tensor(each) for each, count in zip(biases, rows, strict=True)]
            bias = Recipe.joined(tensors, order=order)
        return LINEARS[recipe.scheme](recipe, bias, self._kernels)

    def embedding(self, module: nn.Module, scale: float) -> Embedding:
        """The model's table of tokens; `scale`: what it multiplies them with by itself."""
        weight = _parameter(module, "weight")
        if weight is None or weight.dim() != 2:
            raise ModelError(f"injection: {type(module).__name__} is not an embedding with a weight")
        return Embedding(Recipe.whole(*self._tensor(weight)), self._kernels, scale)

    def norm(self, module: nn.Module, policy: Policy) -> Norm:
        """See `make_norm`."""
        return make_norm(module, policy, self._kernels)

    def _tensor(self, parameter: nn.Parameter | None) -> tuple[str, tuple[int, ...]]:
        assert parameter is not None, "asked before"
        return self._names[id(parameter)], tuple(parameter.shape)


def make_norm(module: nn.Module, policy: Policy, kernels: Kernels) -> Norm:
    """A norm with the weights of the model's own, which it shares."""
    named = (getattr(module, name, None) for name in _EPS_NAMES)
    eps = next((value for value in (policy.norm_eps, *named) if value is not None), None)
    if eps is None:
        raise ModelError(f"injection: {type(module).__name__} does not say its eps")
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
