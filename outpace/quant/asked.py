"""The rules that a config asks for."""

from outpace.config import InferenceConfig
from outpace.config.quant_rules import activates
from outpace.config.sections import GroupQuantConfig, QuantizationConfig
from outpace.errors import NotSupportedYet
from outpace.quant.rules import KEEP, Rules
from outpace.quant.scheme import Scheme, Values

NAMED: dict[str, Scheme] = {
    "int8": Scheme("int8"),
    "int4": Scheme("int4", group=128),
    "fp8": Scheme("fp8", activations="fp8"),
    "w8a8": Scheme("int8", activations="int8"),
}


def asked_rules(config: InferenceConfig) -> Rules:
    """Which weights become what."""
    quant = config.quantization
    rules = KEEP if quant is None else _rules(quant)
    if rules.scheme is not None and rules.scheme.activations is not None:
        field = "quant.activation" if quant is None or quant.scheme is None else "quant.scheme"
        raise NotSupportedYet(field, "quantized activations")
    return rules


def _rules(quant: QuantizationConfig) -> Rules:
    weight, qkv = quant.weight, quant.qkv.enabled
    if quant.scheme is not None:
        return Rules(NAMED[quant.scheme], qkv=qkv, fit=True)
    if not weight.enabled:
        return KEEP
    if weight.post_init_quant is not None:
        return Rules(None, named={name: _grouped(rule) for name, rule in weight.post_init_quant.items()}, qkv=qkv)
    if (rule := weight.quantized_initialization) is not None:
        return Rules(_grouped(rule), qkv=qkv, fit=rule.group_size is None)
    symmetric, activations = weight.q_type == "symmetric", "int8" if activates(quant) else None
    values: Values = "int8" if weight.num_bits == 8 else "int4"
    fit = values == "int4" and weight.group_size is None and weight.q_groups == 1 and not weight.per_tensor
    group = NAMED["int4"].group if fit else weight.group_size
    scheme = Scheme(values, group, weight.per_tensor, symmetric, activations)  # type: ignore[arg-type]
    return Rules(scheme, groups=weight.q_groups if weight.q_groups > 1 else None, qkv=qkv, fit=fit)


def _grouped(rule: GroupQuantConfig) -> Scheme:
    values: Values = "int8" if rule.num_bits == 8 else "int4"
    group = rule.group_size or (NAMED["int4"].group if values == "int4" else None)
    return Scheme(values, group, symmetric=rule.symmetric)
