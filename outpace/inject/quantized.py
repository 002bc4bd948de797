"""Linears whose weight is quantized: they bring a product of their own, what stands around it stays as it is."""

from torch import Tensor, nn

from outpace.inject.modules import Linear
from outpace.inject.recipe import Recipe
from outpace.kernels.dispatch import Kernels
from outpace.kernels.packed import Packed
from outpace.quant.rounding import as_packed


class PackedLinear(Linear):
    """A linear whose weight is kept by a scheme."""

    weight_scale: nn.Parameter
    weight_zero: nn.Parameter | None

    def __init__(self, weight: Recipe, bias: Recipe | None, kernels: Kernels) -> None:
        super().__init__(weight, bias, kernels)
        assert weight.scheme is not None, "a linear without a scheme is a PlainLinear"
        self.scheme = weight.scheme
        if self.scheme.symmetric:
            self.weight_zero = None
        self._packed: Packed | None = None

    @property
    def packed(self) -> Packed:
        """The weight as the kernels take it."""
        if self._packed is None or self._packed.values is not self.weight:
            tensors = {"": self.weight, "_scale": self.weight_scale}
            if self.weight_zero is not None:
                tensors["_zero"] = self.weight_zero
            self._packed = as_packed(tensors, self.scheme, (self.out_features, self.in_features))
        return self._packed

    def product(
        self, x: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """With the weight as it is kept."""
        result: Tensor = self._kernels.packed_linear(x, self.packed, bias=bias, add=add, out=out)
        return result

    def extra_repr(self) -> str:
        """What is printed of it."""
        return f"{self.in_features} -> {self.out_features}, {self.scheme}"
