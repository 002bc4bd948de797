"""Quantized checkpoints run from their own bits: the tokens are those of Hugging Face with the same numbers."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

import outpace
from outpace import ConfigError, ModelError
from outpace.inject.quantized import PackedLinear
from outpace.kernels.packed import KINDS, Packed
from outpace.loading.gguf_blocks import LAYOUTS, GGUFWeight
from outpace.loading.quantize import quantize_model
from outpace.loading.quantize_options import Asked
from outpace.loading.weights import Source
from outpace.quant.asked import runs_stored
from outpace.quant.rounding import as_packed
from outpace.quant.scheme import Scheme
from outpace.quant.stored import common, fitted, scheme_of
from tests.inject.level0 import SMALL
from tests.loading.packers import CASES, GPTQ, Pack, add_config, ct_packed, write_folder
from tests.loading.tiny import requantized, tiny_model, write_gguf
from tests.models import tiny
from tests.quant.fake import fake_quantized, rounded, rounded_fp8

IDS = torch.arange(3, 43).reshape(2, 20)
GREEDY = outpace.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ROWS = {"ct int8": rounded, "ct fp8 dynamic": rounded_fp8, "ct fp8 static": rounded_fp8, "fp8 static": rounded_fp8}
ROWS |= {"fbgemm": rounded_fp8}
"""Formats whose linears quantize rows too, and how."""
EXACT = {"packed_linear": "torch"}  # not by torch's int4 kernel, which rounds to bf16
ACT_ORDER = [case for case in CASES if "act-order" in case]


def tokens_of(model: Any) -> list[int]:
    with torch.inference_mode():
        found = model.generate(IDS[:1], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    tokens: list[int] = found[0, IDS.shape[1] :].tolist()
    return tokens


def run(source: Path, **options: Any) -> tuple[list[int], Any]:
    """The tokens of an answer, and what was quantized."""
    asked = {"quantization": "stored", "dtype": "fp32", "kernels": EXACT, **options}
    with outpace.LLM(str(source), device="cpu", max_model_len=64, **asked) as llm:
        return list(llm.generate([IDS[0].tolist()], GREEDY)[0].outputs[0].token_ids), llm.quantized


def with_rows(model: Any, case: str) -> Any:
    """The model with the rows of its quantized linears rounded, if the format does that."""
    if case in ROWS:
        fake_quantized(model.model, how=lambda weight: weight, activations=ROWS[case])
    return model


@pytest.mark.parametrize("case", [case for case in CASES if case not in ACT_ORDER])
def test_tokens_of_every_format(tmp_path: Path, case: str) -> None:
    model = tiny_model("llama")
    folder = write_folder(tmp_path, model, case)
    found, quantized = run(folder)
    assert quantized.weights == 4 * model.config.num_hidden_layers
    assert all(scheme.endswith("as stored") for scheme in quantized.schemes)
    assert found == tokens_of(with_rows(model, case))


def olmo2() -> Any:
    """A family that no policy knows."""
    torch.manual_seed(0)
    return hf.Olmo2ForCausalLM(hf.Olmo2Config(**SMALL)).eval()


def loaded(folder: Path, **options: Any) -> outpace.InferenceEngine:
    with outpace.OnDevice("meta"):
        empty: Any = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(folder))
    asked = {"dtype": "fp32", "device": "cpu", "kernel_inject": True, "quant": {"scheme": "stored"}, **options}
    return outpace.init_inference(empty, checkpoint=str(folder), **asked)


FACES = {
    "level 1": (lambda: tiny_model("llama"), True),
    "level 1, rows of heads": (lambda: tiny("gpt_neox"), True),
    "level 0": (olmo2, True),
    "no injection": (lambda: tiny_model("llama"), False),
}


@pytest.mark.parametrize("case", ["awq, AutoAWQ's names", "ct int8 zeros", "fp8 blocks"])
@pytest.mark.parametrize("face", FACES)
def test_init_inference(tmp_path: Path, face: str, case: str) -> None:
    make, inject = FACES[face]
    model = make()
    write_folder(tmp_path, model, case)
    engine = loaded(tmp_path, kernel_inject=inject)
    with torch.inference_mode():
        torch.testing.assert_close(engine(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert any(isinstance(module, PackedLinear) for module in engine.module.modules())


@pytest.mark.parametrize("case", ACT_ORDER)
def test_columns_in_another_order_are_converted(tmp_path: Path, case: str) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    folder = write_folder(tmp_path, model, case)
    with pytest.raises(ConfigError, match=r"no weights here run as they are stored: .* int\d: .*\(act-order\)"):
        run(folder)
    assert run(folder, quantization="none") == (tokens_of(model), None)


def test_linears_of_several_forms_in_one_weight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Integers have a form in common; what has none is converted, and the log says how much."""
    packs: dict[str, tuple[dict[str, Any], Pack]] = {
        "q_proj": ({"num_bits": 8, "strategy": "channel"}, ct_packed(8, -1)),
        "k_proj": ({"num_bits": 4, "strategy": "group", "group_size": 32}, ct_packed(4, 32)),
        "v_proj": (
            {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
            ct_packed(4, 16, sym=False),
        ),
    }
    model = tiny_model("llama", num_hidden_layers=1)
    write_folder(tmp_path, model, "ct int4")
    file, random = tmp_path / "model.safetensors", np.random.default_rng(1)
    tensors, config = load_file(file), json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    for name, (weights, pack) in packs.items():
        path = f"model.layers.0.self_attn.{name}"
        for old in [key for key in tensors if key.startswith(f"{path}.")]:
            del tensors[old]
        rows, columns = model.get_parameter(f"{path}.weight").shape
        made = pack(rows, columns, random)
        model.get_parameter(f"{path}.weight").data.copy_(made.weight)
        tensors |= {path + ending: tensor for ending, tensor in made.tensors.items()}
        config["config_groups"][name] = {"targets": [f"re:.*{name}"], "weights": {"type": "int", **weights}}
    save_file(tensors, file, metadata={"format": "pt"})
    add_config(tmp_path, config)
    found, quantized = run(tmp_path)
    assert found == tokens_of(model)
    assert quantized.schemes == ("int4 in groups of 32, as stored", "int8 in groups of 16, asymmetric, as stored")
    plain = model.model.layers[0].self_attn.v_proj.weight.detach()
    for old in [key for key in tensors if ".v_proj." in key]:
        del tensors[old]
    save_file(tensors | {"model.layers.0.self_attn.v_proj.weight": plain}, file, metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, "outpace"):
        found, quantized = run(tmp_path)
    assert found == tokens_of(model)
    assert quantized.weights == 3
    assert "compressed-tensors int8: converted to float32 while loading (1 weights, " in caplog.text


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_gguf(tmp_path: Path, kind: Kind, tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Embedding and head too; tied ones are in memory once."""
    model = tiny_model("llama", tie_word_embeddings=tied, vocab_size=320)
    path = write_gguf(tmp_path / "m.gguf", model, kind)
    expected = tokens_of(requantized(model, kind))
    found, quantized = run(path)
    assert run(path, kernels=None)[0][0] == expected[0]  # weights in tiles, also the one that the embedding reads
    assert (found, quantized.weights) == (expected, 4 * model.config.num_hidden_layers + (1 if tied else 2))
    with caplog.at_level(logging.INFO, "outpace"):
        converted, nothing = run(path, quantization=None)
    assert (converted, nothing) == (expected, None)
    assert f"GGUF {kind.name}: converted to float32 while loading" in caplog.text
    assert "quant.scheme 'stored' runs them without conversion" in caplog.text


def blocks(kind: str, rows: int, count: int) -> np.ndarray[Any, Any]:
    """Random blocks whose float16 numbers are small; the first has steps of nothing, the second is all zeros."""
    size, random = gguf.GGML_QUANT_SIZES[Kind[kind]][1], np.random.default_rng(0)
    raw = random.integers(0, 256, (rows, count, size), dtype=np.uint8)
    places = [208] if kind == "Q6_K" else [0, 2] if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]
    for place in places:
        raw[..., place : place + 2] = random.uniform(1e-3, 2e-2, (rows, count, 1)).astype(np.float16).view(np.uint8)
    raw[0, 0, places[0] : places[0] + 2] = 0
    raw[0, 1] = 0
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_block_of_gguf(kind: str, dtype: torch.dtype) -> None:
    """In 16 bits no number is further off than by the rounding of a weight to float16."""
    raw = blocks(kind, 6, 3)
    wanted = torch.from_numpy(dequantize(raw, Kind[kind]))
    stored = {"": Source(raw.shape, torch.uint8, ())}
    weight = GGUFWeight("w", kind, (6, wanted.shape[1]), stored, 0, lambda: wanted)
    scheme = weight.scheme(dtype)
    assert isinstance(scheme, Scheme)
    found = weight.packed({"": torch.from_numpy(raw)}, scheme.kept)
    error = (found.dequantized(torch.float32) - wanted).abs().max() / wanted.abs().max()
    assert error <= (1e-6 if dtype == torch.float32 else 2**-11)
    assert scheme == scheme_of(found)
    raw[1, 208 if kind == "Q6_K" else 0 :][:2] = (0x00, 0x7C)  # infinity
    with pytest.raises(ModelError, match="w: holds values that are not finite"):
        weight.packed({"": torch.from_numpy(raw)}, scheme.kept)


def packed(kind: str, group: int, block: int, *, zeros: bool) -> Packed:
    """A random weight [48, 96]."""
    made = Packed.empty(kind, (48, 96), group, block, with_zero=zeros)
    numbers = torch.Generator().manual_seed(group + block)
    made.values.copy_(torch.randint(0, 120, made.values.shape, generator=numbers).to(KINDS[kind]))
    for tensor in (made.scale, made.zero):
        if tensor is not None:
            tensor.copy_(torch.randint(1, 9, tensor.shape, generator=numbers))
    return made


@pytest.mark.parametrize("ordered", [False, True])
def test_a_common_form_has_the_same_numbers(ordered: bool) -> None:
    several: list[list[Packed]] = [
        [packed("int8", 96, 1, zeros=False), packed("int4", 32, 1, zeros=False), packed("int4", 40, 1, zeros=True)],
        [packed("int8", 96, 48, zeros=True), packed("int8", 16, 1, zeros=False)],
        [packed("fp8", 96, 48, zeros=False), packed("fp8", 96, 48, zeros=False)],
        [packed("fp8", 32, 32, zeros=False), packed("fp8", 32, 32, zeros=False)],
        [packed("fp8", 32, 16, zeros=False), packed("fp8", 32, 16, zeros=False)],
    ]
    for weights in several:
        schemes = [scheme for weight in weights if (scheme := scheme_of(weight)) is not None]
        scheme = common(schemes, [48] * len(schemes), 96, ordered=ordered)
        assert scheme is not None
        assert scheme.block_rows == 1 or not ordered
        for weight in weights:
            found = as_packed(fitted(weight, scheme), scheme, (48, 96))
            assert torch.equal(found.dequantized(torch.float32), weight.dequantized(torch.float32))
    mixed = [scheme_of(packed(kind, 96, 1, zeros=False)) for kind in ("int8", "fp8")]
    assert common([scheme for scheme in mixed if scheme is not None], [48, 48], 96, ordered=False) is None
    assert scheme_of(packed("int8", 4, 1, zeros=False)) is None


@pytest.mark.parametrize(
    ("asked", "quant"),
    [
        (Asked("int8", dtype=torch.float32, head="int8"), {"scheme": "int8"}),
        (Asked("w8a8", dtype=torch.float32, head="int8"), {"scheme": "w8a8"}),
        (Asked("int4", 32, dtype=torch.float16, head="int8"), {"weight": {"num_bits": 4, "group_size": 32}}),
    ],
)
def test_what_outpace_quantize_wrote_is_what_quantizing_at_load_makes(
    asked: Asked, quant: dict[str, Any], tmp_path: Path
) -> None:
    """What the head reads: the scales of a head in int8 beside int4 are float16 there and float32 here."""
    tiny_model("llama", tie_word_embeddings=False).half().save_pretrained(tmp_path / "plain")
    quantize_model(tmp_path / "plain", tmp_path / "small", asked)
    engines = loaded(tmp_path / "small"), loaded(tmp_path / "plain", quant=quant)
    first, second = (engine(IDS, output_hidden_states=True) for engine in engines)
    assert torch.equal(first.hidden_states[-1], second.hidden_states[-1])
    assert asked.scheme == "int4" or torch.equal(first.logits, second.logits)


def test_which_is_usual_where() -> None:
    def usual(device: str, **more: Any) -> bool:
        given = {"asked_quant": None, "keep_module_on_host": False, **more}
        return runs_stored(cast(Any, SimpleNamespace(torch_device=torch.device(device), **given)))[0]

    assert usual("cuda")
    assert not usual("cpu")
    assert not usual("cuda", keep_module_on_host=True)


def test_what_cannot_be_meant(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"no weights here run as they are stored: they are not quantized; remove it"):
        run(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"no weights here run as they are stored: they are not quantized"):
        outpace.init_inference(model, device="cpu", dtype="fp32", quant={"scheme": "stored"})
    with pytest.raises(ConfigError, match=r"quant.qkv.enabled=False with quant.scheme stored or none"):
        outpace.init_inference(model, quant={"scheme": "none", "qkv": {"enabled": False}})
    folder = write_folder(tmp_path / "gptq", model, "gptq")
    add_config(folder, GPTQ | {"sym": True})
    with pytest.raises(ModelError, match=r"sym is true, but its zero points are not those of .*; set sym to false"):
        run(folder)


def test_experts_are_converted_and_the_rest_runs_as_it_is_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("mixtral", num_hidden_layers=1, num_local_experts=3, num_experts_per_tok=2)
    folder = write_folder(tmp_path, model, "awq")
    with caplog.at_level(logging.INFO, "outpace"):
        found, quantized = run(folder)
    assert found == tokens_of(model)
    assert quantized.weights == 2
    assert "AWQ int4: converted to float32 while loading (9 weights, " in caplog.text
    assert "such as experts, cannot run as they are stored yet" in caplog.text
