"""Rules that give each weight a scheme, by its role in the model and its name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from outpace.errors import ConfigError
from outpace.quant.scheme import Scheme
from outpace.quant.stored import StoredForms

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Linears that fused layers join into one weight, in Outpace and elsewhere."""
SMALLEST = 16  # columns of the smallest group
Role = Literal["qkv", "out", "mlp", "head", "experts", "router", "other"]


@dataclass(frozen=True)
class Rules:
    """The schemes of a model's linears."""

    scheme: Scheme | None
    """Scheme of linears that no other rule covers."""
    groups: int | None = None
    """Number of groups in a row (q_groups), instead of a number of columns."""
    fit: bool = False
    """Use smaller groups where they do not divide the columns of a weight."""
    qkv: bool = True
    """Whether the query, key and value projections are quantized."""
    named: Mapping[str, Scheme | None] = field(default_factory=dict)
    """Part of a weight's name -> its scheme; None: not quantized."""
    fitted: frozenset[str] = frozenset()
    """Keys of `named` to which `fit` applies."""
    exact: Mapping[str, tuple[Scheme | None, int]] | None = None
    """From a plan: weight's name -> its scheme and number of columns. If given, no other rule is used."""
    kind: str | None = None
    """From a plan: the class of its model."""
    field: str = "group_size"
    """The field in quant.weight that sets the columns of a group, for errors."""
    stored: StoredForms | None = None
    """Weights that run as the checkpoint stores them; None: no weight does."""

    @property
    def activates(self) -> bool:
        """Whether some scheme quantizes activations."""
        return any(scheme.activations is not None for scheme in self.schemes)

    @property
    def schemes(self) -> list[Scheme]:
        found = (self.scheme, *self.named.values(), *(scheme for scheme, _ in (self.exact or {}).values()))
        return [scheme for scheme in found if scheme is not None]

    def of(self, role: Role, names: Sequence[str], shape: tuple[int, ...]) -> Scheme | None:
        """The scheme of a weight that is made of these tensors; None: it is not quantized."""
        if self.exact is not None:
            return _planned(self.exact, role, names, shape)
        keys = [self._key(name) for name in names]
        found = {None if key is None else (self.named[key], key in self.fitted) for key in keys}
        if len(found) > 1:
            raise ConfigError(
                f"quant: {', '.join(names)} are one weight in the fused layer, but their rules differ; "
                "let one rule cover all of them"
            )
        if (key := keys[0]) is not None:
            rule = self.named[key]
            return None if rule is None else replace(rule, group=self._group(rule, shape[-1], names[0], key))
        if self.scheme is None or role == "router" or (role == "qkv" and not self.qkv):
            return None
        if role == "head" and self.scheme.values != "int8":
            return Scheme("int8")  # an fp8 head loses as much accuracy as all other weights together
        return replace(self.scheme, group=self._group(self.scheme, shape[-1], names[0]))

    def _key(self, name: str) -> str | None:
        """The key of `named` that a weight matches, if any."""
        keys = [key for key in self.named if key in name]
        if len(keys) > 1:
            raise ConfigError(f"quant: {name} matches several rules ({', '.join(keys)}); let only one match")
        return keys[0] if keys else None

    def _group(self, scheme: Scheme, columns: int, name: str, key: str | None = None) -> int | None:
        """Columns of this weight that share a scale. key: its rule in `named`."""
        fit = self.fit if key is None else key in self.fitted
        group = scheme.group if self.groups is None else max(1, columns // self.groups)
        if group is None or group == columns or (fit and group > columns):
            return None
        while fit and columns % group and group > SMALLEST:
            group //= 2
        if columns % group == 0 and (self.groups is None or columns % self.groups == 0):
            return group
        if fit:
            return None
        field, value = (self.field, group) if self.groups is None else ("q_groups", self.groups)
        field = field if key is None else f"post_init_quant.{key}.group_size"
        raise ConfigError(
            f"quant.weight.{field}: {value} does not divide the {columns} columns of {name}; give a divisor"
        )


def _planned(
    plan: Mapping[str, tuple[Scheme | None, int]], role: Role, names: Sequence[str], shape: tuple[int, ...]
) -> Scheme | None:
    """The plan's scheme for a weight that is made of these tensors."""
    known = [name for name in names if name in plan]
    if not known and role in ("router", "experts"):
        return None
    missing = [name for name in names if name not in plan]
    if missing:
        raise ConfigError(f"quant.plan: it has no entry for {missing[0]}; make a plan for this model with quant.auto")
    for name in names:
        if plan[name][1] != shape[-1]:
            raise ConfigError(
                f"quant.plan: {name} has {plan[name][1]} columns in the plan, but {shape[-1]} in the model; make a "
                "plan for this model with quant.auto"
            )
    if len({plan[name] for name in names}) > 1:
        raise ConfigError(
            f"quant.plan: {', '.join(names)} are one weight in the fused layer, and the plan gives them different "
            "schemes; give them the same"
        )
    return plan[names[0]][0]


KEEP = Rules(None)
"""Nothing is quantized."""
