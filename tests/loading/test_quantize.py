"""`outpace quantize`: what it writes is what the layout says, and what quantizing at load time would have made."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.config import LLMConfig
from outpace.errors import ConfigError, InputError, ModelError, NotSupported, OutpaceError
from outpace.inject.modules import Made
from outpace.kernels.packed import unpack_nibbles
from outpace.load_paged import load_paged
from outpace.loading.cache import models_dir
from outpace.loading.default_model import DEFAULT_MODEL, SAMPLING
from outpace.loading.quantize import quantize_model
from outpace.loading.quantize_options import Asked
from tests.loading.tiny import tiny_model, write_gguf
from tests.loading.unpack import config_of, stored, unpacked
from tests.models import CYCLE, tiny


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bfloat16; 96 columns of down_proj need smaller groups than 64."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    tiny_model("llama").bfloat16().save_pretrained(folder)
    return folder


ASKED = [
    Asked("int8"),
    Asked("int8", group_size=32, head="int8"),
    Asked("int4"),
    Asked("int4", group_size=32),
    Asked("int4", group_size=16, asymmetric=True, head="int8"),
    Asked("int4", asymmetric=True, dtype=torch.float16),
    Asked("w8a8"),
    Asked("w8a8", head="int8"),
    Asked("fp8"),
]
FORMATS = {"int8": "pack-quantized", "int4": "pack-quantized", "w8a8": "int-quantized", "fp8": "float-quantized"}


@pytest.mark.parametrize("asked", ASKED, ids=repr)
def test_every_weight_is_within_half_a_step(asked: Asked, llama: Path, tmp_path: Path) -> None:
    written = quantize_model(llama, tmp_path / "out", asked)
    before, after, found = stored(llama), stored(tmp_path / "out"), unpacked(tmp_path / "out")
    linears = {name.removesuffix(".weight") for name in before if "_proj" in name or ("lm_head" in name and asked.head)}
    assert found.keys() == linears
    assert written.errors.keys() == {f"{name}.weight" for name in linears}
    dtype = asked.dtype or torch.bfloat16
    for name, part in found.items():
        exact = before[f"{name}.weight"].float()
        step = part.scale.float().repeat_interleave(part.group, 1)[:, : exact.shape[1]]
        allowed = exact.abs() / 16 + step / 512 if asked.scheme == "fp8" else 0.5001 * step
        assert part.scale.dtype == dtype
        assert ((part.weight - exact).abs() <= allowed).all(), name
        error = (part.weight - exact).norm() / exact.norm()
        assert written.errors[f"{name}.weight"] == pytest.approx(float(error), rel=1e-4)
    for name in after.keys() & before.keys():
        if after[name].dtype.itemsize > 1:
            assert torch.equal(after[name], before[name].to(dtype)), name
    assert {name for name in before if name.removesuffix(".weight") not in linears} <= after.keys()
    assert sorted(name for name, _ in written.worst) == sorted(
        sorted(written.errors, key=lambda name: -written.errors[name])[:5]
    )


def check_loaded(model: Path, out: Path, plain: Path) -> None:
    """Outpace's own reader makes the weights that the layout's description gives."""
    made: Any = hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, part in unpacked(out).items():
        if "experts" not in name:
            made.get_parameter(f"{name}.weight").data = part.weight
    made.save_pretrained(plain)
    config = LLMConfig(dtype="fp32", device="cpu")
    found, wanted = (load_paged(folder, config, tokenizer=False).module.state_dict() for folder in (out, plain))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if "experts" not in name:
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("asked", [each for each in ASKED if each.dtype is None], ids=repr)
def test_outpace_reads_it(asked: Asked, llama: Path, tmp_path: Path) -> None:
    quantize_model(llama, tmp_path / "out", asked)
    check_loaded(llama, tmp_path / "out", tmp_path / "plain")


def test_outpace_reads_a_head_that_was_tied(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    quantize_model(tmp_path / "model", tmp_path / "out", Asked("int4", head="int8"))
    module: Any = load_paged(tmp_path / "out", LLMConfig(dtype="fp32", device="cpu"), tokenizer=False).module
    assert torch.equal(module.lm_head.weight, unpacked(tmp_path / "out")["lm_head"].weight)
    exact = stored(tmp_path / "model")["model.embed_tokens.weight"]
    assert torch.equal(module.get_parameter("model.embed_tokens.weight"), exact)


def test_a_quantized_folder_writes_text(chain_folder: Path, tmp_path: Path) -> None:
    quantize_model(chain_folder, tmp_path / "out", Asked("int4", head="int8"))
    with LLM(tmp_path / "out", device="cpu", dtype="fp32") as llm:
        (answer,) = llm.generate([CYCLE[0]], SamplingParams(temperature=0, max_tokens=5))
    assert answer.outputs[0].text == CYCLE[1:6]


@pytest.mark.parametrize("asked", ASKED, ids=repr)
def test_the_config_says_what_is_stored(asked: Asked, llama: Path, tmp_path: Path) -> None:
    quantize_model(llama, tmp_path / "out", asked)
    config = config_of(tmp_path / "out")
    assert (config["quant_method"], config["quantization_status"]) == ("compressed-tensors", "compressed")
    assert (config["format"], config["kv_cache_scheme"]) == (FORMATS[str(asked.scheme)], None)
    assert config["ignore"] == ([] if asked.head else ["lm_head"])
    for group in config["config_groups"].values():
        rows, weights = group["input_activations"], group["weights"]
        kind = "float" if asked.scheme == "fp8" else "int"
        if asked.scheme in ("w8a8", "fp8"):
            assert (rows["dynamic"], rows["strategy"], rows["num_bits"], rows["type"]) == (True, "token", 8, kind)
        else:
            assert rows is None
        assert (weights["type"], weights["dynamic"]) == (kind, False)


def test_names_and_dtypes_are_those_of_the_layout(llama: Path, tmp_path: Path) -> None:
    quantize_model(llama, tmp_path / "out", Asked("int4", group_size=32, asymmetric=True))
    name = "model.layers.0.self_attn.k_proj.weight"
    found = {each: tensor for each, tensor in stored(tmp_path / "out").items() if each.startswith(name)}
    assert {each.removeprefix(name): (tensor.dtype, tuple(tensor.shape)) for each, tensor in found.items()} == {
        "_packed": (torch.int32, (32, 8)),
        "_scale": (torch.bfloat16, (32, 2)),
        "_zero_point": (torch.int32, (4, 2)),
        "_shape": (torch.int64, (2,)),
    }
    assert found[f"{name}_shape"].tolist() == [32, 64]


def at_load(folder: Path, scheme: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Values and scales by the names of the linears, as loading with quant= makes them."""
    config = LLMConfig(dtype="fp32", device="cpu", quant={"scheme": scheme})
    module: Any = load_paged(folder, config, tokenizer=False).module
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for made in module.modules():
        recipe = made.recipes.get("weight") if isinstance(made, Made) else None
        if recipe is None or recipe.scheme is None:
            continue
        values, row = made.weight, 0
        if recipe.scheme.values == "int4":
            values = unpack_nibbles(values, recipe.shape[1]).to(torch.int16) - 8
        sizes = dict(module_shapes(folder))
        for part in recipe.parts:
            rows = sizes[part.name][0]
            name = "lm_head" if "embed_tokens" in part.name else part.name.removesuffix(".weight")  # it may be tied
            found[name] = values[row : row + rows], made.weight_scale[row : row + rows]
            row += rows
    return found


def module_shapes(folder: Path) -> dict[str, torch.Size]:
    tensors = {name: tensor.shape for name, tensor in stored(folder).items()}
    return {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}


def check_same(model: Path, out: Path, scheme: str) -> None:
    """Values and scales are those that loading makes."""
    wanted, found = at_load(model, scheme), unpacked(out)
    if scheme == "int4":  # the head's scales are of rows: float32 at load time, the model's dtype here
        wanted.pop("lm_head"), found.pop("lm_head")
    assert wanted.keys() == found.keys()
    for name, (values, scale) in wanted.items():
        assert torch.equal(found[name].values, values.to(found[name].values.dtype)), name
        assert torch.equal(found[name].scale.float(), scale.float()), name


@pytest.mark.parametrize(("scheme", "dtype"), [("int8", torch.float32), ("int4", torch.float16)], ids=["int8", "int4"])
def test_the_same_numbers_as_quantizing_at_load_time(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In the dtype that scales have at load time: float32 of rows, float16 of groups; 576 columns as SmolLM2 has."""
    model = tiny_model("llama", hidden_size=576, intermediate_size=256, num_attention_heads=9, num_key_value_heads=3)
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(tmp_path / "model")
    quantize_model(tmp_path / "model", tmp_path / "out", Asked(scheme, head="int8", dtype=dtype))
    check_same(tmp_path / "model", tmp_path / "out", scheme)
    groups = {group["weights"]["group_size"] for group in config_of(tmp_path / "out")["config_groups"].values()}
    assert groups == ({None} if scheme == "int8" else {None, 16, 64, 128})


def test_a_tied_head_gets_a_weight_of_its_own(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    quantize_model(tmp_path / "model", tmp_path / "plain", Asked("int8"))
    assert json.loads((tmp_path / "plain/config.json").read_text())["tie_word_embeddings"] is True
    assert config_of(tmp_path / "plain")["ignore"] == ["lm_head"]
    quantize_model(tmp_path / "model", tmp_path / "out", Asked("int8", head="int8"))
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    exact = stored(tmp_path / "model")["model.embed_tokens.weight"]
    head = unpacked(tmp_path / "out")["lm_head"]
    assert ((head.weight - exact).abs() <= 0.5001 * head.scale).all()
    assert torch.equal(stored(tmp_path / "out")["model.embed_tokens.weight"], exact)


def test_what_a_model_wants_in_fp32_stays(tmp_path: Path) -> None:
    tiny("t5").save_pretrained(tmp_path / "model")
    quantize_model(tmp_path / "model", tmp_path / "out", Asked("int8"))
    ignored = config_of(tmp_path / "out")["ignore"]
    assert "encoder.block.0.layer.1.DenseReluDense.wo" in ignored
    assert not [name for name in unpacked(tmp_path / "out") if name.endswith(".wo")]


def test_experts_are_written_one_by_one_and_routers_stay(tmp_path: Path) -> None:
    tiny("mixtral").save_pretrained(tmp_path / "model")
    quantize_model(tmp_path / "model", tmp_path / "out", Asked("int4", exclude=("self_attn",)))
    before, found = stored(tmp_path / "model"), unpacked(tmp_path / "out")
    assert found.keys() == {name.removesuffix(".weight") for name in before if ".experts." in name}
    assert len(found) == 2 * 4 * 3
    for name, part in found.items():
        step = part.scale.float().repeat_interleave(part.group, 1)
        assert ((part.weight - before[f"{name}.weight"]).abs() <= 0.5001 * step).all()
    ignored = set(config_of(tmp_path / "out")["ignore"])
    routers = {name.removesuffix(".weight") for name in before if name.endswith(".gate.weight")}
    assert routers
    assert routers < ignored
    assert "model.layers.1.self_attn.o_proj" in ignored
    model: Any = load_paged(tmp_path / "out", LLMConfig(dtype="fp32", device="cpu"), tokenizer=False).module
    downs = [found[f"model.layers.0.block_sparse_moe.experts.{number}.w2"].weight for number in range(4)]
    assert any(torch.equal(tensor, torch.stack(downs)) for tensor in model.parameters() if tensor.dim() == 3)


def test_stacked_experts_are_refused_by_name(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "hidden_size": 32, "vocab_size": 97}
    sizes |= {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    hf.GptOssForCausalLM(hf.GptOssConfig(**sizes)).save_pretrained(tmp_path / "model")  # type: ignore[arg-type]
    with pytest.raises(NotSupported, match=r"scheme: model\.layers\.0\.mlp\.experts\.\w+ holds all experts of a layer"):
        quantize_model(tmp_path / "model", tmp_path / "out", Asked("int8"))
    assert not (tmp_path / "out").exists()
    quantize_model(tmp_path / "model", tmp_path / "out", Asked("int8", exclude=("experts",)))
    assert all("self_attn" in name for name in unpacked(tmp_path / "out"))


def test_a_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    quantize_model(file, tmp_path / "out", Asked("int8", dtype=torch.bfloat16))
    assert len(unpacked(tmp_path / "out")) == 14
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert {tensor.dtype for name, tensor in stored(tmp_path / "out").items() if "norm" in name} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scheme": "int3"}, "scheme: expected one of int8, int4, fp8, w8a8, got 'int3'"),
        ({"scheme": "int4", "group_size": 20}, "group_size: expected a multiple of 8, at least 16, got 20"),
        ({"scheme": "fp8", "group_size": 32}, "group_size: fp8 has one scale for each row"),
        ({"scheme": "int8", "asymmetric": True}, "asymmetric: int8 has no zero points"),
        ({"scheme": "int8", "head": "int4"}, "head: expected int8, got 'int4'"),
        ({"scheme": "fp8", "head": "int8"}, "head: a folder of fp8 weights cannot hold an int8 head"),
        ({"scheme": "int8", "dtype": torch.int8}, "dtype: expected float32, float16 or bfloat16, got int8"),
        ({"scheme": "int4", "group_size": 48}, "group_size: 48 does not divide the 64 columns of model"),
        ({"scheme": "int8", "exclude": ("norm",)}, "exclude: 'norm' is in no name of a linear's weight; names are "),
        ({"scheme": "int8", "exclude": ("q_proj",)}, "exclude: q_proj, k_proj, v_proj of model.layers.0.self_attn are"),
    ],
)
def test_options_that_cannot_work(fields: dict[str, Any], words: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        quantize_model(llama, tmp_path / "out", Asked(**fields))
    assert str(caught.value).startswith(words)
    assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_be_quantized(llama: Path, tmp_path: Path) -> None:
    def refused(model: Path, words: str, kind: type[OutpaceError] = ModelError, out: Path = tmp_path / "new") -> None:
        with pytest.raises(kind, match=words):
            quantize_model(model, out, Asked("int8"), force=True)
        assert not (tmp_path / "new").exists()

    quantize_model(llama, tmp_path / "out", Asked("int8"))
    refused(tmp_path / "out", r"is quantized already \(compressed-tensors\); give the original model")
    refused(llama, "holds no quantized weights", InputError, out=llama)
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    refused(tmp_path / "gpt2", r"GPT2LMHeadModel has no linear that can be quantized \(the format does not support")
    broken = tiny_model("llama")
    broken.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 5] = float("nan")
    broken.save_pretrained(tmp_path / "broken")
    refused(tmp_path / "broken", r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity")


@pytest.mark.parametrize(
    "asked", [Asked("int8"), Asked("int4", 16, asymmetric=True), Asked("w8a8"), Asked("fp8")], ids=repr
)
def test_the_library_of_the_layout_reads_it(asked: Asked, llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    quantize_model(llama, tmp_path / "out", asked)
    plain = hf.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for name, part in unpacked(tmp_path / "out").items():
        plain.get_parameter(f"{name}.weight").data.copy_(part.weight)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        found = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(ids).logits
        wanted = plain(ids).logits
    assert (found - wanted).norm() / wanted.norm() < (0.1 if asked.scheme in ("w8a8", "fp8") else 1e-3)


@pytest.mark.real
@pytest.mark.parametrize(("scheme", "dtype"), [("int8", torch.float32), ("int4", torch.float16)], ids=["int8", "int4"])
def test_the_default_model(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from outpace.loading.default_model import default_model_path

    written = quantize_model(None, tmp_path / "out", Asked(scheme, head="int8", dtype=dtype))
    check_same(default_model_path(), tmp_path / "out", scheme)
    assert max(written.errors.values()) < (0.03 if scheme == "int8" else 0.25)


def test_the_sampling_that_is_recommended_for_the_default_model_goes_along(
    chain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(chain_folder, models_dir() / DEFAULT_MODEL)
    quantize_model(models_dir() / DEFAULT_MODEL, tmp_path / "out", Asked("int8"))
    sampling = LLM(tmp_path / "out", device="cpu").get_default_sampling_params()
    assert (sampling.temperature, sampling.top_p) == (SAMPLING["temperature"], SAMPLING["top_p"])
