"""The quantization rules that the `quant` options of a config ask for."""

from outpace.config import InferenceConfig
from outpace.config.quantization import GroupQuantConfig, QuantizationConfig, activates
from outpace.quant.plan import QuantPlan
from outpace.quant.rules import KEEP, Rules
from outpace.quant.scheme import Activations, Scheme, Values

NAMED: dict[str, Scheme] = {
    "int8": Scheme("int8"),
    "int4": Scheme("int4", group=128),
    "fp8": Scheme("fp8", activations="fp8"),
    "w8a8": Scheme("int8", activations="int8"),
}


def asked_plan(config: InferenceConfig) -> QuantPlan | None:
    """The plan in a config; None: it has none."""
    quant = config.asked_quant
    return None if quant is None or quant.plan is None else QuantPlan.read(quant.plan)


def runs_stored(config: InferenceConfig) -> tuple[bool, str]:
    """Whether weights that are stored quantized run without conversion; and the reason, or the option that changes
    it."""
    quant = config.asked_quant
    if quant is not None and quant.scheme == "stored":
        return True, "asked for"
    if quant is not None:
        return False, "asked for" if asked_rules(config) is KEEP else "they are quantized as asked for"
    if config.torch_device.type == "cpu" or config.keep_module_on_host:
        return False, "a CPU is faster with converted weights; quant.scheme 'stored' runs them without conversion"
    return True, "the checkpoint's own format; quant.scheme 'none' converts them"


def asked_rules(config: InferenceConfig) -> Rules:
    """The rules for a config's weights. With `quant.auto` nothing is quantized until the plan has been measured."""
    quant = config.asked_quant
    if quant is None or quant.auto is not None:
        return KEEP
    if quant.plan is not None:
        return QuantPlan.read(quant.plan).rules
    if quant.scheme is not None:
        named = NAMED.get(quant.scheme)  # "stored" and "none" have no scheme
        return KEEP if named is None else Rules(named, qkv=quant.qkv.enabled, fit=True)
    return _weight_rules(quant) if quant.weight.enabled else KEEP


def _weight_rules(quant: QuantizationConfig) -> Rules:
    """The rules of DeepSpeed's options under `quant.weight`."""
    weight, qkv = quant.weight, quant.qkv.enabled
    activations: Activations | None = "int8" if activates(quant) else None
    if weight.post_init_quant is not None:
        rules = weight.post_init_quant
        named = {name: _grouped(rule, activations) for name, rule in rules.items()}
        fitted = frozenset(name for name, rule in rules.items() if rule.group_size is None)
        return Rules(None, named=named, fitted=fitted)
    if (rule := weight.quantized_initialization) is not None:
        field = "quantized_initialization.group_size"
        return Rules(_grouped(rule, activations), qkv=qkv, fit=rule.group_size is None, field=field)
    values: Values = "int8" if weight.num_bits == 8 else "int4"
    fit = values == "int4" and weight.group_size is None and weight.q_groups == 1 and not weight.per_tensor
    group = NAMED["int4"].group if fit else weight.group_size
    scheme = Scheme(values, group, weight.per_tensor, weight.q_type == "symmetric", activations)
    return Rules(scheme, groups=weight.q_groups if weight.q_groups > 1 else None, qkv=qkv, fit=fit)


def _grouped(rule: GroupQuantConfig, activations: Activations | None) -> Scheme:
    values: Values = "int8" if rule.num_bits == 8 else "int4"
    group = rule.group_size or (NAMED["int4"].group if values == "int4" else None)
    return Scheme(values, group, symmetric=rule.symmetric, activations=activations)
