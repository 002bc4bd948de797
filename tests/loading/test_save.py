"""Checkpoints and live modules saved as shards: resharded any number of times, the bits stay the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outpace
from outpace.errors import InputError, ModelError, NotSupported, OutpaceError
from outpace.inject.split import split_model
from outpace.loading.build import find
from outpace.loading.open import open_weights
from outpace.loading.read_source import read
from outpace.loading.save import save_shards, shard_model
from tests.loading.tiny import tiny_model, write_gguf
from tests.models import CYCLE, byte_tokenizer, chain_model, tiny
from tests.sharded_models import NAMES, make


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Everything that a folder holds, put together."""
    return {name: read(source) for name, source in open_weights(folder).sources.items()}


def wanted_of(model: nn.Module) -> dict[str, Tensor]:
    """One name of each tensor of a model."""
    once: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        once.setdefault(id(value), name)
    return {name: model.state_dict()[name] for name in once.values()}


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_comes_back_from_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    model = make(name).bfloat16()
    model.save_pretrained(tmp_path / "0")
    for step, ranks in enumerate((1, 2, 4, 2, 1)):
        written = shard_model(tmp_path / str(step), ranks, tmp_path / str(step + 1))
        assert len(written.files) == ranks + 1
        same(tensors_of(tmp_path / str(step + 1)), wanted_of(model))
    assert (tmp_path / "5" / "config.json").read_bytes() == (tmp_path / "0" / "config.json").read_bytes()


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_a_model_that_cannot_be_split_is_saved_for_one_rank(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(NotSupported, match=f"nothing says how {type(model).__name__} is split over 2 ranks"):
        shard_model(tmp_path / "model", 2, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    shard_model(tmp_path / "model", 1, tmp_path / "out")
    same(tensors_of(tmp_path / "out"), wanted_of(model))


def test_live_modules(tmp_path: Path) -> None:
    for number, model in enumerate(
        (tiny("llama"), make("tied"), tiny("t5"), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    ):
        save_shards(model, tmp_path / str(number), 1, None)
        same(tensors_of(tmp_path / str(number)), wanted_of(model))
    save_shards(tiny("llama", weights_seed=1), tmp_path / "0", 2, torch.float16)  # shards are replaced
    found = tensors_of(tmp_path / "0")
    same(found, {name: value.half() for name, value in wanted_of(tiny("llama", weights_seed=1)).items()})
    config = json.loads((tmp_path / "0" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("float16", ["LlamaForCausalLM"])
    assert (tmp_path / "0" / "generation_config.json").is_file()


def test_a_module_without_values(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="weight and 1 more have no values; give checkpoint="):
        save_shards(model, tmp_path / "out", 1, None)
    save_shards(nn.Linear(2, 2), tmp_path / "full", 1, None)
    sources = open_weights(tmp_path / "full").sources
    save_shards(model, tmp_path / "out", 1, None, sources)
    same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "full"))


def test_what_its_author_keeps_in_float32_is_not_rounded(tmp_path: Path) -> None:
    model = tiny("t5")  # _keep_in_fp32_modules: wo
    save_shards(model, tmp_path / "out", 1, torch.float16)
    found = tensors_of(tmp_path / "out")
    kept = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    assert kept == {name for name in found if ".wo." in name}
    assert kept


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A folder of a model with everything beside its weights, in shards of a Hugging Face index."""
    tokenizer = byte_tokenizer()
    folder = tmp_path / "chain"
    chain_model(tokenizer).save_pretrained(folder, max_shard_size="100KB")
    tokenizer.save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").is_file()
    (folder / "modeling.py").write_text("raise SystemExit")
    (folder / "outpace.json").write_text("{}")
    return folder


def test_the_folder_is_a_model(chain: Path, tmp_path: Path) -> None:
    shard_model(chain, 2, tmp_path / "out", dtype=torch.bfloat16)
    beside = {path.name for path in chain.iterdir() if path.suffix in (".json", ".jinja")}
    beside -= {"model.safetensors.index.json", "outpace.json"}
    weights = {"ds_inference_config.json", "non_tp.safetensors", "tp_00.safetensors", "tp_01.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == beside | weights
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_folder_runs_in_the_dtype_that_it_is_stored_in(chain: Path, tmp_path: Path) -> None:
    shard_model(chain, 2, tmp_path / "out", dtype=torch.bfloat16)
    found = find(tmp_path / "out", device=torch.device("cuda"))
    assert (found.dtype, found.dtype_reason) == (torch.bfloat16, "the checkpoint's own")


def test_files_that_ranks_of_deepspeed_saved(tmp_path: Path) -> None:
    """Their shapes and the split of the model say how they are put together."""
    model = tiny("llama")
    model.config.save_pretrained(tmp_path)
    splits = split_model(model, 2)
    for rank in range(2):
        held = {}
        for name, value in model.state_dict().items():
            split = splits[name]
            spans = () if split is None else split.spans[rank]
            parts = [value.narrow(split.dim, start, stop - start) for start, stop in spans] if split else [value]
            held[name] = torch.cat(parts, split.dim if split else 0).clone()
        torch.save({"module": held, "mp_world_size": 2}, tmp_path / f"mp_rank_{rank:02}_model_states.pt")
    shard_model(tmp_path, 4, tmp_path / "out")
    same(tensors_of(tmp_path / "out"), wanted_of(model))


def test_a_gguf_file(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model)
    shard_model(path, 2, tmp_path / "out")
    same(tensors_of(tmp_path / "out"), wanted_of(model))
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


def _no_config(folder: Path) -> dict[str, Any]:
    (folder / "config.json").unlink()
    return {}


def _bad_config(folder: Path) -> dict[str, Any]:
    (folder / "config.json").write_text("{")
    return {}


def _lost(folder: Path) -> dict[str, Any]:
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"hidden_layers": 1', '"x": 1'))
    content = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(content))
    return {}


REFUSED: Mapping[str, tuple[Any, type[OutpaceError], str]] = {
    "no config": (_no_config, ModelError, "has no config.json, which describes the model"),
    "a bad config": (_bad_config, ModelError, r"cannot use .*config\.json"),
    "a missing layer": (_lost, ModelError, r"model\.layers\.1"),
    "the model itself": (lambda folder: {"out": folder, "force": True}, InputError, "is never replaced"),
    "too many ranks": (lambda folder: {"ranks": 3}, NotSupported, "^tp: 2 attention heads .* 3 ranks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_before_anything_is_written(case: str, chain: Path, tmp_path: Path) -> None:
    change, kind, words = REFUSED[case]
    options = {"ranks": 2, "out": tmp_path / "out", **change(chain)}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(kind, match=words):
        shard_model(chain, **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_shards_are_not_replaced_by_themselves(chain: Path, tmp_path: Path) -> None:
    shard_model(chain, 2, tmp_path / "out")
    for source in (tmp_path / "out", tmp_path / "out" / "ds_inference_config.json"):
        with pytest.raises(InputError, match="out holds the model itself"):
            shard_model(source, 1, tmp_path / "out", force=True)


@pytest.mark.parametrize("injected", [False, True])
def test_init_inference_writes_the_module_as_it_was_given(injected: bool, tmp_path: Path) -> None:
    inputs = {"input_ids": torch.arange(3, 9)[None]}
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "kernel_inject": injected}
    first = outpace.init_inference(tiny("llama"), save_mp_checkpoint_path=str(tmp_path / "out"), **options)
    same(tensors_of(tmp_path / "out"), wanted_of(tiny("llama")))
    with outpace.OnDevice("meta"):
        empty = type(tiny("llama"))(tiny("llama").config)
    again = outpace.init_inference(
        empty, checkpoint=str(tmp_path / "out"), save_mp_checkpoint_path=str(tmp_path / "copy"), **options
    )
    assert torch.equal(again(**inputs).logits, first(**inputs).logits)
    same(tensors_of(tmp_path / "copy"), wanted_of(tiny("llama")))


def test_a_checkpoint_is_not_replaced_while_it_is_read(tmp_path: Path) -> None:
    save_shards(tiny("llama"), tmp_path / "out", 2, None)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for name in ("out", "link"):
        with pytest.raises(InputError, match=r"save_mp_checkpoint_path: .*out holds the model itself"):
            outpace.init_inference(
                tiny("llama"), device="cpu", checkpoint=str(tmp_path / "out"),
                save_mp_checkpoint_path=str(tmp_path / name),
            )  # fmt: skip
    same(tensors_of(tmp_path / "out"), wanted_of(tiny("llama")))


def test_a_model_stays_as_it_is_when_its_shards_cannot_be_written(tmp_path: Path) -> None:
    model = tiny("llama")
    layer = type(model.model.layers[0])
    with pytest.raises(InputError, match="there is no folder"):
        outpace.init_inference(
            model, device="cpu", kernel_inject=True, save_mp_checkpoint_path=str(tmp_path / "no" / "x")
        )
    assert type(model.model.layers[0]) is layer


def test_errors_name_the_option_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    (damaged := tmp_path / "x.bin").write_bytes(b"")
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    torch.save({"module": {"a": torch.ones(1)}, "mp_world_size": 2}, ranks / "mp_rank_00_model_states.pt")
    options: tuple[tuple[str, Any], ...] = (
        ("save_mp_checkpoint_path", tmp_path), ("checkpoint", "nope"), ("checkpoint", damaged), ("checkpoint", ranks),
        ("checkpoint", {"type": "x"}), ("checkpoint_config.checkpoint_dir", damaged),
    )  # fmt: skip
    for name, value in options:
        section, _, field = name.rpartition(".")
        given = {section: {field: value}} if section else {field: value}
        with pytest.raises(OutpaceError) as caught:
            outpace.init_inference(tiny("llama"), device="cpu", **given)
        assert str(caught.value).startswith(f"{name}: "), caught.value


def test_a_training_run_is_loaded_with_the_config_of_the_model(chain: Path, tmp_path: Path) -> None:
    """As the error for a folder without config.json says: named beside the model folder."""
    (run := tmp_path / "run").mkdir()
    saved = {name: value.clone() for name, value in tensors_of(chain).items()}
    torch.save({"module": saved}, run / "mp_rank_00_model_states.pt")
    llm = outpace.LLM(chain, checkpoint=run, device="cpu", max_model_len=64)
    text = llm.generate("?", outpace.SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].text
    assert CYCLE.startswith(text)


def test_shards_of_two_models_do_not_load_as_one(tmp_path: Path) -> None:
    """Not even if every shape is the same; shards of older releases have no id, and load."""
    for seed in (0, 1):
        save_shards(tiny("llama", weights_seed=seed), tmp_path / str(seed), 2, None)
    name, descriptor = "tp_01.safetensors", tmp_path / "0" / "ds_inference_config.json"
    own = (tmp_path / "0" / name).read_bytes()
    (tmp_path / "0" / name).write_bytes((tmp_path / "1" / name).read_bytes())
    with pytest.raises(ModelError, match=r"tp_01\.safetensors was not written together with the descriptor"):
        open_weights(tmp_path / "0")
    fields = json.loads(descriptor.read_text())
    del fields["save_id"]
    descriptor.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=r"tp_01\.safetensors was not written together with non_tp.safetensors"):
        open_weights(tmp_path / "0")
    for path in (tmp_path / "0").glob("*.safetensors"):
        content = own if path.name == name else path.read_bytes()
        path.write_bytes(content.replace(b'"save_id"', b'"other_i"'))
    same(tensors_of(tmp_path / "0"), wanted_of(tiny("llama")))


def test_shards_answer_as_the_model_does(chain: Path, tmp_path: Path) -> None:
    shard_model(chain, 2, tmp_path / "out")
    params = outpace.SamplingParams(max_tokens=8, temperature=0)
    texts = []
    for folder in (chain, tmp_path / "out"):
        llm = outpace.LLM(folder, device="cpu", max_model_len=64)
        texts.append(llm.generate("?", params)[0].outputs[0].text)
    assert texts[0] == texts[1]
    assert CYCLE.startswith(texts[0])
