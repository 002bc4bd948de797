"""Quantized weights as other people's tools store them, written from the published layouts, number by number.

Nothing here uses the package: a mistake in a reader cannot be made twice.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Stored:
    """The tensors of one weight by the endings of their names, and what they stand for in float32."""

    tensors: dict[str, Tensor]
    weight: Tensor


Pack = Callable[[int, int, np.random.Generator], Stored]
"""Makes a random weight [rows, columns]."""


def words(numbers: Array, bits: int) -> Array:
    """Unsigned numbers of each row in words of 32 bits, the first in the lowest bits; the last word ends with zeros."""
    each = 32 // bits
    rows, columns = numbers.shape
    packed = np.zeros((rows, -(-columns // each)), np.uint32)
    for row in range(rows):
        for column in range(columns):
            packed[row, column // each] |= np.uint32(int(numbers[row, column]) << bits * (column % each))
    return packed.view(np.int32)


def product(numbers: Array, zero: Array, scale: Array, group_of: Array) -> Tensor:
    """(number - zero) * scale, where column k has the zero and scale of group group_of[k]."""
    exact = (numbers.astype(np.float64) - zero[:, group_of]) * scale.astype(np.float64)[:, group_of]
    return torch.from_numpy(exact.astype(np.float32))


def scales_of(shape: tuple[int, ...], random: np.random.Generator, dtype: Any = np.float16) -> Array:
    return (random.uniform(0.005, 0.02, shape) * random.choice([-1, 1], shape)).astype(dtype)


def groups_of(columns: int, group: int, act_order: bool, random: np.random.Generator) -> Array:
    """The group of each column; with act-order those of a group lie anywhere."""
    order = np.arange(columns) // group
    return random.permutation(order) if act_order else order


def gptq(bits: int, group: int, *, v2: bool = False, sym: bool = False, act_order: bool = False) -> Pack:
    def pack(rows: int, columns: int, random: np.random.Generator) -> Stored:
        size = columns if group == -1 else group
        count = -(-columns // size)
        numbers = random.integers(0, 2**bits, (rows, columns))
        zero = np.full((rows, count), 2 ** (bits - 1)) if sym else random.integers(0, 2**bits, (rows, count))
        scale, of = scales_of((rows, count), random), groups_of(columns, size, act_order, random)
        kept = zero if v2 else (zero - 1) % 2**bits
        tensors = {
            ".qweight": torch.from_numpy(words(numbers, bits).T.copy()),
            ".qzeros": torch.from_numpy(words(kept.T, bits)),
            ".scales": torch.from_numpy(scale.T.copy()),
            ".g_idx": torch.from_numpy(of.astype(np.int32)),
        }
        return Stored(tensors, product(numbers, zero, scale, of))

    return pack


def awq(group: int) -> Pack:
    def interleaved(numbers: Array) -> Array:
        """Of each eight outputs: 0 2 4 6 1 3 5 7, the first in the lowest bits."""
        return words(numbers.reshape(len(numbers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape), 4)

    def pack(rows: int, columns: int, random: np.random.Generator) -> Stored:
        count = columns // group
        numbers, zero = random.integers(0, 16, (rows, columns)), random.integers(0, 16, (rows, count))
        scale = scales_of((rows, count), random)
        tensors = {
            ".qweight": torch.from_numpy(interleaved(numbers.T)),
            ".qzeros": torch.from_numpy(interleaved(zero.T)),
            ".scales": torch.from_numpy(scale.T.copy()),
        }
        return Stored(tensors, product(numbers, zero, scale, np.arange(columns) // group))

    return pack


def ct_packed(bits: int, group: int, *, sym: bool = True, act_order: bool = False) -> Pack:
    def pack(rows: int, columns: int, random: np.random.Generator) -> Stored:
        size, half = columns if group == -1 else group, 2 ** (bits - 1)
        count = columns // size
        numbers = random.integers(-half, half, (rows, columns))
        zero = np.zeros((rows, count), int) if sym else random.integers(-half, half, (rows, count))
        scale, of = scales_of((rows, count), random, np.float32), groups_of(columns, size, act_order, random)
        tensors = {
            ".weight_packed": torch.from_numpy(words(numbers + half, bits)),
            ".weight_scale": torch.from_numpy(scale),
            ".weight_shape": torch.tensor([rows, columns]),
        }
        if not sym:
            tensors[".weight_zero_point"] = torch.from_numpy(words((zero + half).T, bits).T.copy())
        if act_order:
            tensors[".weight_g_idx"] = torch.from_numpy(of.astype(np.int32))
        return Stored(tensors, product(numbers, zero, scale, of))

    return pack


def ct_int8(*, group: int = -1, sym: bool = True, per_tensor: bool = False) -> Pack:
    def pack(rows: int, columns: int, random: np.random.Generator) -> Stored:
        size = columns if group == -1 else group
        numbers = random.integers(-128, 128, (rows, columns))
        scale = scales_of((1,) if per_tensor else (rows, columns // size), random, np.float32)
        full = np.broadcast_to(scale.reshape(1, 1), (rows, 1)) if per_tensor else scale
        zero = np.zeros(full.shape, int) if sym else random.integers(-128, 128, full.shape)
        tensors = {".weight": torch.from_numpy(numbers.astype(np.int8)), ".weight_scale": torch.from_numpy(scale)}
        if not sym:
            tensors[".weight_zero_point"] = torch.from_numpy(zero.astype(np.int8))
        return Stored(tensors, product(numbers, zero, full, np.arange(columns) // size))

    return pack


def e4m3(shape: tuple[int, ...], random: np.random.Generator) -> tuple[Tensor, Array]:
    """Random bytes that are no NaN, and their numbers: sign, 4 bits of exponent (bias 7), 3 of fraction."""
    found = random.integers(0, 256, shape)
    found = np.where(found % 128 == 127, 0, found)
    sign, exponent, fraction = np.where(found < 128, 1.0, -1.0), found // 8 % 16, found % 8 / 8
    value = sign * np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7.0))
    return torch.from_numpy(found.astype(np.uint8)).view(torch.float8_e4m3fn), value


def fp8(names: tuple[str, str], blocks: tuple[int, int] | None, *, powers: bool = False, static: bool = False) -> Pack:
    """blocks: rows and columns with one scale; 0: all of them, None: one for the tensor, stored as a single number."""

    def pack(rows: int, columns: int, random: np.random.Generator) -> Stored:
        stored, value = e4m3((rows, columns), random)
        high, wide = (size or whole for size, whole in zip(blocks or (0, 0), (rows, columns), strict=True))
        scale: Array = scales_of((-(-rows // high), -(-columns // wide)), random, np.float32) / 16
        if powers:
            scale = np.exp2(random.integers(-12, -7, scale.shape)).astype(np.float32)
        exact = value * scale.astype(np.float64)[np.arange(rows) // high][:, np.arange(columns) // wide]
        kept = torch.from_numpy(scale if blocks else scale.reshape(()))
        kept = (kept.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu) if powers else kept
        tensors = {names[0]: stored, names[1]: kept}
        if static:
            tensors[".input_scale"] = torch.tensor([0.5])
        return Stored(tensors, torch.from_numpy(exact.astype(np.float32)))

    return pack


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(rows: int, columns: int, random: np.random.Generator) -> Stored:
    """One expert; the model has the transpose of this weight."""
    numbers = random.integers(0, 16, (rows, columns))
    exponents = random.integers(119, 124, (rows, columns // 32))
    pairs = (numbers[:, 0::2] + 16 * numbers[:, 1::2]).astype(np.uint8).reshape(rows, columns // 32, 16)
    value = np.array((*E2M1, *(-number for number in E2M1)))[numbers]
    exact = value * (2.0 ** (exponents - 127))[:, np.arange(columns) // 32]
    tensors = {"_blocks": torch.from_numpy(pairs), "_scales": torch.from_numpy(exponents.astype(np.uint8))}
    return Stored(tensors, torch.from_numpy(exact.astype(np.float32)))


def ct_config(kind: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    group |= {"input_activations": more.pop("input_activations", None)}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        **more,
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT = {"num_bits": 8, "type": "float"}
DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_WEIGHT, _SCALE = ".weight", ".weight_scale"

CASES: Mapping[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (GPTQ, gptq(4, 32)),
    "gptq symmetric": (GPTQ | {"sym": True}, gptq(4, 32, sym=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 32, v2=True)),
    "gptq act-order": (GPTQ | {"desc_act": True}, gptq(4, 32, act_order=True)),
    "gptq 8 bits": (GPTQ | {"bits": 8}, gptq(8, 32)),
    "gptq 8 bits, symmetric, rows": (GPTQ | {"bits": 8, "sym": True, "group_size": -1}, gptq(8, -1, sym=True)),
    "gptq 8 bits, act-order": (GPTQ | {"bits": 8, "desc_act": True}, gptq(8, 32, act_order=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq(32)),
    "awq, AutoAWQ's names": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "version": "GEMM"}, awq(16)),
    "ct int4": (ct_config("pack-quantized", INT4), ct_packed(4, 32)),
    "ct int4 rows": (ct_config("pack-quantized", {**INT8, "num_bits": 4}), ct_packed(4, -1)),
    "ct int4 zeros": (ct_config("pack-quantized", INT4 | {"symmetric": False}), ct_packed(4, 32, sym=False)),
    "ct int4 act-order": (ct_config("pack-quantized", INT4 | {"actorder": "group"}), ct_packed(4, 32, act_order=True)),
    "ct int8 in words": (ct_config("pack-quantized", INT8), ct_packed(8, -1)),
    "ct int8 in words, zeros": (
        ct_config("pack-quantized", INT4 | {"num_bits": 8, "symmetric": False}),
        ct_packed(8, 32, sym=False),
    ),
    "ct int8": (ct_config("int-quantized", INT8, input_activations=DYNAMIC | {"type": "int"}), ct_int8()),
    "ct int8 tensor": (ct_config("int-quantized", INT8 | {"strategy": "tensor"}), ct_int8(per_tensor=True)),
    "ct int8 zeros": (ct_config("int-quantized", INT8 | {"symmetric": False}), ct_int8(sym=False)),
    "ct int8 groups": (ct_config("naive-quantized", INT4 | {"num_bits": 8}), ct_int8(group=32)),
    "ct fp8 dynamic": (
        ct_config("float-quantized", FLOAT | {"strategy": "channel"}, input_activations=DYNAMIC),
        fp8((_WEIGHT, _SCALE), (1, 0)),
    ),
    "ct fp8 static": (
        ct_config("float-quantized", FLOAT | {"strategy": "tensor"}, input_activations=FLOAT | {"dynamic": False}),
        fp8((_WEIGHT, _SCALE), None, static=True),
    ),
    "ct fp8 blocks": (
        ct_config("float-quantized", FLOAT | {"strategy": "block", "block_structure": [16, 32]}),
        fp8((_WEIGHT, _SCALE), (16, 32)),
    ),
    "fp8 blocks": (FP8 | {"weight_block_size": [24, 40]}, fp8((_WEIGHT, ".weight_scale_inv"), (24, 40))),
    "fp8 blocks, powers of two": (
        FP8 | {"weight_block_size": [24, 40], "scale_fmt": "ue8m0"},
        fp8((_WEIGHT, ".weight_scale_inv"), (24, 40), powers=True),
    ),
    "fp8 static": (FP8 | {"activation_scheme": "static"}, fp8((_WEIGHT, _SCALE), None, static=True)),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8((_WEIGHT, _SCALE), (1, 0))),
}
"""Every format: a quantization_config, and a packer that fits it."""


def is_linear(name: str, value: Tensor) -> bool:
    """Whether tools would quantize it: a matrix in a layer, no router."""
    return ".layers." in name and value.dim() == 2 and not name.endswith(".gate.weight")


def write_folder(folder: Path, model: PreTrainedModel, case: str, **more: Tensor | None) -> Path:
    """Write a model whose linear layers get random weights of a format; the model gets the same. None: left out."""
    config, pack = CASES[case]
    random = np.random.default_rng(0)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    state = model.state_dict()
    for name, value in _saved(model).items():
        if not is_linear(name, value):
            tensors[name] = value.contiguous()
            continue
        layer = name.removesuffix(".weight")
        stored = pack(value.shape[0], value.shape[1], random)
        tensors |= {layer + ending: tensor for ending, tensor in stored.tensors.items()}
        _put(state, name, stored.weight)
    for name, tensor in more.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    add_config(folder, config)
    return folder


def add_config(folder: Path, config: Mapping[str, Any] | None) -> None:
    """Put a quantization_config into config.json; None: remove it."""
    content = json.loads((folder / "config.json").read_text())
    content.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(content | ({"quantization_config": config} if config else {})))


def _saved(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors under the names that published checkpoints have: Mixtral's experts one by one."""
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if value.dim() == 3 and name.endswith("gate_up_proj"):
            for expert, both in enumerate(value):
                for part, weight in zip(("w1", "w3"), both.chunk(2), strict=True):
                    found[_expert(name, expert, part)] = weight
        elif value.dim() == 3 and name.endswith("down_proj"):
            found |= {_expert(name, expert, "w2"): weight for expert, weight in enumerate(value)}
        else:
            found[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = value
    return found


def _expert(name: str, expert: int, part: str) -> str:
    return f"{name.rpartition('.')[0].replace('.mlp.', '.block_sparse_moe.')}.{expert}.{part}.weight"


def _put(state: Mapping[str, Tensor], name: str, weight: Tensor) -> None:
    """Give the model a weight that is stored under a name."""
    if ".block_sparse_moe.experts." not in name:
        state[name].copy_(weight)
        return
    before, after = name.split(".block_sparse_moe.experts.")
    expert, part, _ = after.split(".")
    stack = state[f"{before}.mlp.experts.{'down_proj' if part == 'w2' else 'gate_up_proj'}"][int(expert)]
    half = {"w1": stack[: len(stack) // 2], "w3": stack[len(stack) // 2 :], "w2": stack}[part]
    half.copy_(weight)
