"""Formats of other people's quantized weights: bit for bit the numbers that the format defines, or an error by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outpace.errors import ModelError
from outpace.loading.foreign.format import Format, PackedFormat, Parts
from outpace.loading.foreign.method import read_method
from outpace.loading.foreign.mxfp4 import Mxfp4
from outpace.quant import compressed
from outpace.quant.rounding import as_packed, quantized
from outpace.quant.scheme import Scheme
from tests.loading.packers import CASES, FP8, GPTQ, INT4, Stored, ct_config, gptq, mxfp4

LAYER = "model.layers.0.mlp.up_proj"
KINDS = {"8 bits": "int8", "ct int8": "int8", "fp8": "fp8", "fbgemm": "fp8"}


def stored(case: str, rows: int = 24, columns: int = 96) -> Stored:
    return CASES[case][1](rows, columns, np.random.default_rng(1))


def found(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Format, Parts]:
    """The format of a layer, and its tensors."""
    method, names = read_method(config), {LAYER + ending: tensor for ending, tensor in tensors.items()}
    weights = [weight for name, tensor in names.items() if (weight := method.find(name, tensor.dtype)) is not None]
    assert len(weights) == 1
    stem, layout = weights[0]
    held = {ending: names[stem + ending] for ending in layout.endings if stem + ending in names}
    return layout, Parts(stem, held)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [(24, 96), (64, 32), (8, 160)])
def test_every_number_is_the_one_that_the_format_defines(case: str, size: tuple[int, int]) -> None:
    made = stored(case, *size)
    layout, parts = found(CASES[case][0], made.tensors)
    assert isinstance(layout, PackedFormat)
    assert layout.shape(parts) == size
    weight = layout.packed(parts)
    assert weight.packed.kind == next((kind for part, kind in KINDS.items() if part in case), "int4")
    assert torch.equal(weight.dequantized(torch.float32), made.weight)
    for dtype in (torch.bfloat16, torch.float16):  # rounded once
        assert torch.equal(weight.dequantized(dtype), made.weight.to(dtype))


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("ct ")])
def test_sizes_that_fill_no_word(case: str) -> None:
    made = stored(case, 5 if "blocks" not in case else 16, 32)
    layout, parts = found(CASES[case][0], made.tensors)
    assert torch.equal(layout.dequantized(parts, torch.float32), made.weight)


@pytest.mark.parametrize("columns", [5, 36, 37])
def test_rows_that_fill_no_word(columns: int) -> None:
    made = stored("ct int4 rows", 3, columns)
    layout, parts = found(CASES["ct int4 rows"][0], made.tensors)
    assert torch.equal(layout.dequantized(parts, torch.float32), made.weight)


def test_the_last_group_of_gptq_may_be_short() -> None:
    made = gptq(4, 40)(16, 96, np.random.default_rng(0))
    layout, parts = found(GPTQ | {"group_size": 40}, made.tensors)
    assert torch.equal(layout.dequantized(parts, torch.float32), made.weight)


def test_weights_of_many_rows_are_converted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.loading.foreign.format._AT_ONCE", 200)
    for case in ("fp8 blocks", "fp8 static", "gptq act-order"):
        made = stored(case, 64, 96)
        layout, parts = found(CASES[case][0], made.tensors)
        assert torch.equal(layout.dequantized(parts, torch.float32), made.weight)


def test_symmetric_weights_have_no_zeros() -> None:
    for case in ("gptq symmetric", "ct int4", "ct int8", "gptq 8 bits, symmetric, rows"):
        layout, parts = found(CASES[case][0], stored(case).tensors)
        assert isinstance(layout, PackedFormat)
        assert layout.packed(parts).packed.zero is None


def test_mxfp4() -> None:
    made = mxfp4(24, 96, np.random.default_rng(0))
    parts = Parts("experts.down_proj", made.tensors)
    assert Mxfp4().shape(parts) == (24, 96)
    assert torch.equal(Mxfp4().dequantized(parts, torch.float32), made.weight)


def test_every_scale_of_mxfp4_is_a_power_of_two() -> None:
    scales = torch.arange(255, dtype=torch.uint8)
    ones = torch.full((255, 1, 16), 0x22, dtype=torch.uint8)
    weight = Mxfp4().dequantized(Parts("w", {"_blocks": ones, "_scales": scales[:, None]}), torch.float64)
    assert torch.equal(weight, (2.0 ** (scales.double() - 127))[:, None].expand(255, 32))


DAMAGED: Mapping[str, tuple[str, dict[str, Tensor | None], str]] = {
    "gptq scales": ("gptq", {".scales": None}, "scales is missing; download the model again"),
    "gptq zeros": ("gptq", {".qzeros": None}, "qzeros is missing"),
    "gptq dtype": ("gptq", {".scales": torch.ones(3, 24, dtype=torch.int32)}, "scales is int32 instead of float16 or"),
    "gptq group": ("gptq", {".scales": torch.ones(6, 24)}, r"scales has the shape \[6, 24\] instead of \[3, 24\]"),
    "gptq words": ("gptq", {".qweight": torch.ones(12, 24)}, "qweight is float32 instead of int32"),
    "gptq order": ("gptq act-order", {".g_idx": None}, "g_idx is missing, which desc_act needs"),
    "gptq uneven": ("gptq act-order", {".g_idx": torch.zeros(96, dtype=torch.int32)}, "g_idx does not put 32 columns"),
    "awq scales": ("awq", {".scales": None}, "scales is missing"),
    "awq zeros": ("awq", {".qzeros": torch.ones(3, 2, dtype=torch.int32)}, r"qzeros .*\[3, 2\] instead of \[3, 3\]"),
    "ct scale": ("ct int4", {".weight_scale": None}, "weight_scale is missing"),
    "ct shape": ("ct int4", {".weight_shape": None}, "weight_shape is missing"),
    "ct other shape": ("ct int4", {".weight_shape": torch.tensor([24, 128])}, r"\[24, 12\] instead of \[24, 16\]"),
    "ct groups": ("ct int4", {".weight_scale": torch.ones(24, 4)}, r"\[24, 4\] instead of \[24, 3\]"),
    "ct zeros": ("ct int4 zeros", {".weight_zero_point": None}, "weight_zero_point is missing"),
    "ct zeros too many": ("ct int4", {".weight_zero_point": torch.ones(3, 3, dtype=torch.int32)}, "symmetric"),
    "ct order": ("ct int4 act-order", {".weight_g_idx": None}, "weight_g_idx is missing, which actorder needs"),
    "ct int8 scale": ("ct int8", {".weight_scale": None}, "weight_scale is missing"),
    "ct dtype": ("ct fp8 dynamic", {".weight": torch.ones(24, 96, dtype=torch.int8)}, "int8 instead of float8_e4m3fn"),
    "fp8 scale": ("fp8 blocks", {".weight_scale_inv": None}, "scale_inv is missing"),
    "fp8 blocks": ("fp8 blocks", {".weight_scale_inv": torch.ones(1, 1)}, r"\[1, 1\] instead of \[1, 3\]"),
    "fp8 e5m2": ("fp8 static", {".weight": torch.ones(24, 96).to(torch.float8_e5m2)}, "e5m2 instead of float8_e4m3fn"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tensors_are_named_before_any_is_read(case: str) -> None:
    kind, changes, says = DAMAGED[case]
    kept = {
        ending: tensor for ending, tensor in stored(kind).tensors.items() if changes.get(ending, tensor) is not None
    }
    layout, parts = found(CASES[kind][0], kept | {end: tensor for end, tensor in changes.items() if tensor is not None})
    without_values = {
        ending: tensor if ending in layout.peeks else tensor.to("meta") for ending, tensor in parts.tensors.items()
    }
    with pytest.raises(ModelError, match=says) as caught:
        layout.shape(Parts(parts.stem, without_values))
    assert str(caught.value).startswith(f"model: {LAYER}")


def test_groups_that_do_not_divide() -> None:
    made = stored("ct int4", 24, 96)
    layout, parts = found(ct_config("pack-quantized", INT4 | {"group_size": 40}), made.tensors)
    with pytest.raises(ModelError, match="groups of 40 do not divide its 96 columns"):
        layout.shape(parts)
    layout, parts = found(CASES["awq"][0] | {"group_size": 40}, stored("awq").tensors)
    with pytest.raises(ModelError, match="groups of 40 do not divide its 96 columns"):
        layout.shape(parts)


def ct(**weights: Any) -> dict[str, Any]:
    return ct_config("pack-quantized", INT4 | weights)


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "'bitsandbytes' is not .*original weights",
    ),
    "another method": (
        {"quant_method": "aqlm"},
        "quant_method 'aqlm' is not supported; use the original weights, or a",
    ),
    "no method": ({"bits": 4}, "quant_method is missing"),
    "gptq 3 bits": (GPTQ | {"bits": 3}, "bits 3 is not supported; use a checkpoint with 4 or 8"),
    "gptq 2 bits": (GPTQ | {"bits": 2}, "bits 2 is not supported"),
    "gptq bits missing": ({"quant_method": "gptq"}, "quantization_config.bits is missing"),
    "gptq words": (GPTQ | {"bits": "four"}, "quantization_config.bits: expected a number, got 'four'"),
    "gptq groups": (GPTQ | {"group_size": 0}, "group_size: expected -1 or a number above 0, got 0"),
    "gptq marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    "gptq layers": (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic .*single layers.* is not supported"),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ version 'gemv' is not supported"),
    "awq 8 bits": ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported"),
    "awq without zeros": ({"quant_method": "awq", "zero_point": False}, "zero_point false is not supported"),
    "fp8 experts in 4 bits": (FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported"),
    "fp8 blocks": (FP8 | {"weight_block_size": [128]}, "weight_block_size: expected two numbers above 0"),
    "ct 3 bits": (ct(num_bits=3), "config_groups.group_0.weights: num_bits 3 is not supported"),
    "ct nvfp4": (
        ct_config("nvfp4-pack-quantized", FLOAT4 := {"num_bits": 4, "type": "float"}),
        "'nvfp4-pack-quantized'",
    ),
    "ct fp4": (ct_config("float-quantized", FLOAT4), "num_bits 4 is not supported"),
    "ct sparse": (ct() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity 'sparse-24-bitmask'"),
    "ct 2:4": (ct_config("marlin-24", INT4), "format 'marlin-24' is not supported"),
    "ct rotated": (ct() | {"transform_config": {"config_groups": {"R1": {}}}}, "rotations at run time.* not supported"),
    "ct strategy": (ct(strategy="attn_head"), "strategy 'attn_head' is not supported"),
    "ct no groups": (ct() | {"config_groups": {}}, "without config_groups is not supported"),
    "ct preset": (ct() | {"config_groups": {"W4A16": ["Linear"]}}, "W4A16: a scheme by its name alone"),
    "ct pattern": (ct() | {"config_groups": {"a": {"targets": ["re:("], "weights": INT4}}}, "not a valid pattern"),
    "ct group size": (ct(group_size=None), "group_size is missing|group_size: expected"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(case: str) -> None:
    config, says = REFUSED[case]
    with pytest.raises(ModelError, match=says) as caught:
        read_method(config)
    assert str(caught.value).startswith("model: quantization_config")


def test_groups_of_layers_by_name_pattern_and_class() -> None:
    eight = {"num_bits": 8, "type": "int", "strategy": "channel"}
    groups = {
        "all": {"targets": ["Linear"], "weights": INT4},
        "pattern": {"targets": ["re:.*down_proj"], "weights": eight},
        "one": {"targets": ["layers.3.down_proj"], "weights": eight | {"num_bits": 4}},
        "bytes": {"targets": ["re:.*o_proj$"], "weights": eight, "format": "int-quantized"},
    }
    method = read_method(ct() | {"config_groups": groups, "format": "pack-quantized"})
    labels = {}
    for layer in ("layers.1.up_proj", "layers.1.down_proj", "layers.3.down_proj"):
        named = method.find(f"{layer}.weight_packed", torch.int32)
        assert named is not None
        labels[layer] = (named[1].label, named[1].span.group)  # type: ignore[attr-defined]
    assert labels == {
        "layers.1.up_proj": ("compressed-tensors int4", 32),
        "layers.1.down_proj": ("compressed-tensors int8", None),
        "layers.3.down_proj": ("compressed-tensors int4", None),
    }
    assert method.find("layers.1.o_proj.weight", torch.int8) is not None
    assert method.find("layers.1.o_proj.weight", torch.bfloat16) is None
    with pytest.raises(ModelError, match=r"o_proj.*_packed is not stored as quantization_config says"):
        method.find("layers.1.o_proj.weight_packed", torch.int32)


OURS = {
    "int4": Scheme("int4", group=32),
    "int4 with zeros": Scheme("int4", group=32, symmetric=False),
    "int8": Scheme("int8"),
    "int8 with zeros": Scheme("int8", symmetric=False),
    "int8 activations": Scheme("int8", activations="int8"),
    "fp8": Scheme("fp8", activations="fp8"),
}


@pytest.mark.parametrize("name", OURS)
def test_what_we_write_ourselves_is_read(name: str) -> None:
    scheme, weight = OURS[name], torch.randn(21, 96, generator=torch.Generator().manual_seed(0))
    made = quantized(weight, scheme)
    tensors = {f".{ending}": tensor for ending, tensor in compressed.stored(made, scheme).items()}
    if ".weight_packed" in tensors:
        tensors[".weight_shape"] = torch.tensor(weight.shape)
    layout, parts = found(compressed.quantization_config({LAYER: scheme}, []), tensors)
    wanted = as_packed(made, scheme, (21, 96)).dequantized(torch.float32)
    assert torch.equal(layout.dequantized(parts, torch.float32), wanted)


def test_layers_that_the_config_does_not_have() -> None:
    method = read_method(ct())
    with pytest.raises(ModelError, match=r"lm_head is stored quantized, but quantization_config.ignore names it"):
        method.find("lm_head.weight_packed", torch.int32)
    other = ct() | {"config_groups": {"a": {"targets": ["re:.*up_proj"], "weights": INT4}}}
    with pytest.raises(ModelError, match="down_proj is stored quantized, but no group"):
        read_method(other).find("down_proj.weight_packed", torch.int32)


def test_what_is_said_about_activations_is_kept_for_the_log() -> None:
    assert read_method(CASES["ct fp8 static"][0]).note == "static fp8 activations"
    assert read_method(CASES["ct int8"][0]).note == "dynamic int8 activations"
    assert read_method(FP8 | {"activation_scheme": "static"}).note == "static fp8 activations"
    assert read_method(ct() | {"kv_cache_scheme": {"num_bits": 8}}).note == "a quantized cache"
    assert read_method(GPTQ).note is None
