"""Checkpoints that several ranks saved, through `open_weights`: DeepSpeed's and Megatron's folders, and descriptors."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outpace.loading.open import open_weights
from tests.loading.checkpoints import FAMILIES, Tensors, check_equal, refused, save_deepspeed, shapes_of, split, state

DEGREES = (1, 2, 4)
VERSIONS = (0, 1.0, 2.0)
HIDDEN, HEADS, LAYERS, VOCAB = 8, 4, 2, 12


def whole_megatron() -> Tensors:
    """The tensors of a tiny model of Megatron, by flat names."""
    torch.manual_seed(0)
    sizes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
        "embedding.position_embeddings.weight": (16, HIDDEN),
        "encoder.final_layernorm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        sizes |= {
            f"encoder.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (HIDDEN,),
                "self_attention.query_key_value.weight": (3 * HIDDEN, HIDDEN),
                "self_attention.query_key_value.bias": (3 * HIDDEN,),
                "self_attention.dense.weight": (HIDDEN, HIDDEN),
                "self_attention.dense.bias": (HIDDEN,),
                "mlp.dense_h_to_4h.weight": (4 * HIDDEN, HIDDEN),
                "mlp.dense_h_to_4h.bias": (4 * HIDDEN,),
                "mlp.dense_4h_to_h.weight": (HIDDEN, 4 * HIDDEN),
                "mlp.dense_4h_to_h.bias": (HIDDEN,),
            }.items()
        }
    return {f"language_model.{name}": torch.randn(shape) for name, shape in sizes.items()}


def split_megatron(whole: Tensors, degree: int, version: float) -> list[Tensors]:
    """As Megatron's ranks hold them, written down head by head from what the versions mean.

    0: queries of all heads of the rank, then keys, then values. 1.0, 2.0: all of the first head, then of the second ..
    """
    ranks: list[Tensors] = [{} for _ in range(degree)]
    heads = HEADS // degree
    for name, value in whole.items():
        for rank, own in enumerate(ranks):
            if "query_key_value" in name and version == 0:
                rows = value.reshape(3, HEADS, -1, *value.shape[1:])
                own[name] = rows[:, rank * heads : (rank + 1) * heads].reshape(-1, *value.shape[1:]).clone()
            elif "query_key_value" in name:
                rows = value.reshape(HEADS, -1, *value.shape[1:])
                own[name] = rows[rank * heads : (rank + 1) * heads].reshape(-1, *value.shape[1:]).clone()
            elif "dense_h_to_4h" in name or "word_embeddings" in name:
                own[name] = value.chunk(degree, 0)[rank].clone()
            elif name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
                own[name] = value.chunk(degree, 1)[rank].clone()
            else:
                own[name] = value.clone()
    return ranks


def nested(tensors: Tensors) -> dict[str, Any]:
    """As Megatron nests them: language_model, embedding or encoder, and so on."""
    model: dict[str, Any] = {"language_model": {"embedding": {}, "encoder": {}}}
    for name, value in tensors.items():
        _, part, rest = name.split(".", 2)
        model["language_model"][part][rest] = value
    return model


def save_megatron(folder: Path, ranks: list[Tensors], **more: Any) -> Path:
    for rank, tensors in enumerate(ranks):
        path = folder / "iter_0000100" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": nested(tensors), "iteration": 100, **more}, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("100\n")
    return folder


def describe(folder: Path, ranks: list[Tensors], **fields: Any) -> dict[str, Any]:
    """A descriptor of files tp_00.pt, tp_01.pt .."""
    names = [f"tp_{rank:02d}.pt" for rank in range(len(ranks))]
    for name, tensors in zip(names, ranks, strict=True):
        torch.save({"module": tensors} if fields.get("type") == "Megatron" else tensors, folder / name)
    return {"type": "ds_model", "checkpoints": names, "version": 1.0, "base_dir": str(folder), **fields}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("degree", DEGREES)
def test_ranks_of_megatron(degree: int, version: float, tmp_path: Path) -> None:
    whole = whole_megatron()
    ranks = split_megatron(whole, degree, version)
    own = {} if version == 0 else {"checkpoint_version": version}
    folder = save_megatron(tmp_path, ranks, **own)
    check_equal(open_weights(folder), whole)
    check_equal(open_weights(folder / "iter_0000100", training_mp_size=degree), whole)
    check_equal(open_weights(folder, shapes=shapes_of(whole)), whole)
    described = describe(tmp_path, ranks, type="Megatron", version=version, mp_size=degree, parallelization="tp")
    check_equal(open_weights(described), whole)


def test_the_versions_differ(tmp_path: Path) -> None:
    """Were the version ignored, the tests above would say nothing."""
    ranks = split_megatron(whole_megatron(), 2, 0)
    fused = "language_model.encoder.layers.0.self_attention.query_key_value.weight"
    found = [open_weights(describe(tmp_path, ranks, type="Megatron", version=v)).sources[fused] for v in (0, 2.0, None)]
    assert [len(source.pieces) for source in found] == [6, 2, 6]


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_from_ranks(family: str, degree: int, tmp_path: Path) -> None:
    whole = state(family)
    shapes = shapes_of(whole)
    folder = save_deepspeed(tmp_path, split(whole, degree, 0))
    check_equal(open_weights(folder, shapes=shapes, training_mp_size=degree), whole)
    check_equal(open_weights(folder / "global_step7", shapes=shapes), whole)
    parts = split(whole, degree)
    described = describe(tmp_path, parts, parallelization="tp")
    check_equal(open_weights(described, shapes=shapes), whole)
    prefixed = {f"net.{name}": shape for name, shape in shapes.items()}
    check_equal(open_weights(described, shapes=prefixed), whole)
    bare = {name: shape for name, shape in shapes.items() if name.startswith("lm_head")}
    bare |= {name.partition(".")[2]: shape for name, shape in shapes.items()}
    check_equal(open_weights(described, shapes=bare), whole)


def test_a_descriptor_in_its_forms(tmp_path: Path) -> None:
    whole = state("bloom")
    parts = split(whole, 2)
    fields = describe(tmp_path, parts, type="BLOOM", parallelization="tp", tp_size=5, mp_size=2, dtype="float32")
    shapes = shapes_of(whole)
    check_equal(open_weights(fields, shapes=shapes), whole)
    check_equal(open_weights(fields | {"checkpoints": "tp_*.pt"}, shapes=shapes), whole)
    del fields["base_dir"]
    (file := tmp_path / "ckpt.json").write_text(json.dumps(fields))
    check_equal(open_weights(file, shapes=shapes), whole)
    (tmp_path / "other").mkdir()
    moved = file.rename(tmp_path / "other" / "ckpt.json")
    check_equal(open_weights(str(moved), base_dir=str(tmp_path), shapes=shapes), whole)
    check_equal(open_weights("other/ckpt.json", base_dir=str(tmp_path), shapes=shapes), whole)
    fields["checkpoints"] = [str(tmp_path / name) for name in fields["checkpoints"]]
    check_equal(open_weights(fields, base_dir=str(tmp_path), shapes=shapes), whole)


def test_a_descriptor_of_whole_files(tmp_path: Path) -> None:
    whole = state("llama")
    names = sorted(whole)
    torch.save({name: whole[name] for name in names[:4]}, tmp_path / "a.bin")
    save_file({name: whole[name] for name in names[4:]}, tmp_path / "b.safetensors")
    fields = {"type": "ds_model", "checkpoints": ["a.bin", "b.safetensors"], "version": 1.0}
    check_equal(open_weights(fields, base_dir=str(tmp_path)), whole)
    torch.save(whole, tmp_path / "a.bin")
    assert "is in two files" in refused(fields, base_dir=str(tmp_path))
    check_equal(open_weights(fields | {"checkpoints": "a.bin"}, base_dir=str(tmp_path)), whole)


def test_files_of_ranks_in_the_order_of_deepspeed(tmp_path: Path) -> None:
    """tp_RR_MM: the first part of every rank, then the second of every rank; and what is not split, apart."""
    whole = state("gpt_neox")
    names = sorted(whole)
    torch.save({name: whole[name] for name in names[:3]}, tmp_path / "non-tp.pt")
    parts = split({name: whole[name] for name in names[3:]}, 2)
    halves = (names[3:8], names[8:])
    for rank, tensors in enumerate(parts):
        for number, half in enumerate(halves):
            torch.save({name: tensors[name] for name in half}, tmp_path / f"tp_{rank:02d}_{number:02d}.pt")
    listed = [f"tp_{rank:02d}_{number:02d}.pt" for number in range(2) for rank in range(2)]
    fields = {"type": "ds_model", "checkpoints": {"non_tp": ["non-tp.pt"], "tp": listed}, "version": 1.0, "tp_size": 2}
    (tmp_path / "ds_inference_config.json").write_text(json.dumps(fields | {"parallelization": "tp"}))
    check_equal(open_weights(tmp_path, shapes=shapes_of(whole)), whole)
    torch.save(whole, tmp_path / "non-tp.pt")
    assert "is both in non_tp and in tp" in refused(tmp_path, shapes=shapes_of(whole))


Change = dict[str, Any]
DESCRIPTORS: dict[str, tuple[Change, str]] = {
    "no type": ({"type": None}, "checkpoint: type: None is unknown; use 'ds_model', 'bloom' or 'Megatron'"),
    "another type": ({"type": "megatron"}, "type: 'megatron' is unknown"),
    "a typing error": ({"tpsize": 2}, "tpsize: a descriptor has no such key; did you mean tp_size?"),
    "an unknown key": ({"zzz": 2}, "zzz: a descriptor has no such key; known are"),
    "a version": ({"version": 4}, "version: 4 is unknown; use 0, 1.0, 2.0 or 3.0"),
    "text as a version": ({"version": "2"}, "version: expected a number, got '2'; use 0, 1.0, 2.0 or 3.0"),
    "no version": ({"version": None}, "version: expected a number, got None"),
    "true as a version": ({"version": True}, "version: expected a number, got True"),
    "a parallelization": ({"parallelization": "dp"}, "parallelization: 'dp' is unknown"),
    "pp of ranks": ({"parallelization": "pp"}, "mp_size: 2 ranks need parallelization 'tp'"),
    "pp of Megatron": ({"type": "Megatron", "parallelization": "pp"}, "'pp' contradicts files of ranks"),
    "a number of ranks": ({"mp_size": 0}, "mp_size: 0 is not a number of ranks"),
    "text as a number of ranks": ({"mp_size": "2"}, "mp_size: expected a number of ranks, got '2'"),
    "a number as a dtype": ({"dtype": 16}, "dtype: expected a name, got 16"),
    "a list of parts": (
        {"parallelization": None, "mp_size": 1},
        'if the files are parts of ranks, add "parallelization": "tp"',
    ),
    "too few files": ({"mp_size": 3}, "checkpoints: 2 files cannot belong to 3 ranks"),
    "too many files": ({"type": "Megatron", "mp_size": 1}, "Megatron saves one .pt file for each of 1 ranks"),
    "a file that is not there": ({"checkpoints": ["tp_00.pt", "tp_07.pt"]}, "tp_07.pt does not exist"),
    "a file twice": ({"checkpoints": ["tp_00.pt", "tp_00.pt"]}, "checkpoints: names a file twice"),
    "no files": ({"checkpoints": []}, "checkpoints: needs a list of file names"),
    "numbers": ({"checkpoints": [1, 2]}, "checkpoints: needs a list of file names"),
    "no pattern": ({"checkpoints": "x_*.pt"}, "matches 'x_*.pt'; correct it"),
    "other keys": ({"checkpoints": {"pp": ["tp_00.pt"]}}, "checkpoints: needs the keys non_tp and tp"),
    "a path outside": ({"checkpoints": ["../tp_00.pt", "tp_01.pt"]}, "checkpoints: '../tp_00.pt' lies outside"),
    "an absolute path": ({"checkpoints": ["/etc/passwd"]}, "checkpoints: '/etc/passwd' lies outside"),
    "another kind of file": ({"checkpoints": ["x.json"]}, "checkpoints: x.json is not a checkpoint"),
    "a dtype": ({"dtype": "float7"}, "dtype: 'float7' cannot be read"),
    "int8": ({"dtype": "int8"}, "dtype: 'int8' cannot be read; this release reads no int8 weights"),
    "another dtype": ({"dtype": "float16"}, "dtype: the files hold float32, not float16"),
    "no folder": ({"base_dir": "/no/such/folder"}, "base_dir: /no/such/folder is not a folder"),
    "a number as a folder": ({"base_dir": 5}, "base_dir: expected a path, got 5"),
}


@pytest.mark.parametrize("case", DESCRIPTORS)
def test_descriptors_that_cannot_work(case: str, tmp_path: Path) -> None:
    whole = state("llama")
    (tmp_path / "x.json").touch()
    change, expected = DESCRIPTORS[case]
    fields = describe(tmp_path, split(whole, 2), parallelization="tp", mp_size=2) | change
    assert expected in refused(fields, shapes=shapes_of(whole))


def test_keys_that_a_descriptor_needs(tmp_path: Path) -> None:
    fields = describe(tmp_path, [state("llama")])
    for key in ("type", "checkpoints", "version"):
        assert f"checkpoint: {key}: the descriptor lacks this key" in refused(
            {k: fields[k] for k in fields if k != key}
        )


@pytest.mark.parametrize("content", ["", "[]", "{", '{"type": "ds_model", "type": "bloom"}', "[" * 100_000])
def test_files_that_are_no_descriptor(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    assert "is not a checkpoint descriptor" in refused(tmp_path / "x.json")


def test_a_descriptor_file_does_not_point_outside(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    fields = describe(tmp_path, [state("llama")], checkpoints=["tp_00.pt"])
    (file := tmp_path / "own" / "x.json").write_text(json.dumps(fields))
    outside = f"base_dir: '{tmp_path}' lies outside {tmp_path / 'own'}; copy the files into it"
    assert f"{outside}, or pass base_dir yourself" in refused(file, field="checkpoint")
    assert refused(file).endswith(outside), "LLM and the commands have no base_dir for their model"
    check_equal(open_weights(file, base_dir=str(tmp_path)), state("llama"))
    file.write_text(json.dumps(fields | {"base_dir": ".."}))
    assert "base_dir: '..' lies outside" in refused(file)


def deepspeed_of(whole: Tensors) -> Callable[[Path], Path]:
    return lambda folder: save_deepspeed(folder, split(whole, 2)) / "global_step7"


def resave(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)


def touch(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).touch()


def in_rank(number: int, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return lambda folder: resave(folder / f"mp_rank_{number:02d}_model_states.pt", change)


NAME = "model.layers.0.mlp.up_proj.weight"
FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "ZeRO-3": (touch("zero_pp_rank_0_mp_rank_00_model_states.pt"), "is a ZeRO-3 checkpoint"),
    "ZeRO-3 in bf16": (touch("bf16_zero_pp_rank_3_mp_rank_01_model_states.pt"), "run zero_to_fp32.py"),
    "experts": (touch("layer_0_expert_3_mp_rank_00_model_states.pt"), "has files of experts"),
    "old experts": (touch("expert_3_mp_rank_00_model_states.pt"), "has files of experts"),
    "a pipeline": (touch("layer_01-model_00-model_states.pt"), "is split into pipeline stages"),
    "a pipeline of Megatron": (touch("mp_rank_00_001"), "is split into pipeline stages"),
    "a rank that is not there": (
        lambda folder: (folder / "mp_rank_00_model_states.pt").rename(folder / "mp_rank_99999999_model_states.pt"),
        "lacks the file of rank 0",
    ),
    "fewer ranks than saved": (
        lambda folder: (folder / "mp_rank_01_model_states.pt").unlink(),
        "was saved by 2 ranks, but the file of rank 1 is missing; copy the files of all ranks",
    ),
    "an empty rank folder": (lambda folder: (folder / "mp_rank_02").mkdir(), "has no model_optim_rng.pt"),
    "a rank twice": (
        lambda folder: os.link(folder / "mp_rank_01_model_states.pt", folder / "mp_rank_1_model_states.pt"),
        "has two files of rank 1",
    ),
    "both keys": (in_rank(0, lambda saved: saved.update(model={})), "both keys 'module' and 'model'"),
    "no key": (in_rank(0, lambda saved: saved.pop("module")), "neither a key 'module' nor 'model'"),
    "no weights": (
        in_rank(0, lambda saved: saved.update(module={"a": torch.empty(0)})),
        "holds no weights: ZeRO-3 keeps them",
    ),
    "stages inside": (
        in_rank(0, lambda saved: saved.update(model0=saved.pop("module"))),
        "holds interleaved pipeline stages",
    ),
    "a tensor less": (in_rank(1, lambda saved: saved["module"].pop(NAME)), f"{NAME!r}: rank 1 lacks it"),
    "a tensor more": (in_rank(1, lambda saved: saved["module"].update(x=torch.ones(2))), "'x': rank 1 has it"),
    "another size": (
        in_rank(1, lambda saved: saved["module"].update({NAME: torch.ones(4, 32)})),
        "do not add up to the model's (48, 32)",
    ),
    "another dtype": (
        in_rank(1, lambda saved: saved["module"].update({NAME: saved["module"][NAME].half()})),
        "several dtypes or numbers of dimensions",
    ),
    "other versions": (in_rank(1, lambda saved: saved.update(checkpoint_version=1.0)), "differs between ranks"),
    "a version that is no number": (
        in_rank(1, lambda saved: saved.update(checkpoint_version="x")),
        "checkpoint_version is 'x', not a number",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_of_training_that_cannot_be_read(case: str, tmp_path: Path) -> None:
    whole = state("llama")
    damage, expected = FOLDERS[case]
    damage(deepspeed_of(whole)(tmp_path))
    assert expected in refused(tmp_path, shapes=shapes_of(whole))


@pytest.mark.parametrize("tag", ["", "..", "../x", "/", "global_step8", "x\0y", "x" * 10_000])
def test_latest_names_a_folder_beside_it(tag: str, tmp_path: Path) -> None:
    deepspeed_of(state("llama"))(tmp_path)
    (tmp_path / "latest").write_text(tag)
    assert "or name the folder of another tag or iteration" in refused(tmp_path)


def test_a_missing_iteration_of_megatron_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("99")
    assert "has no folder 'iter_0000099'; copy it there" in refused(tmp_path)


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    whole = state("llama")
    save_deepspeed(tmp_path, split(whole, 2))
    assert "was saved by 2 ranks, not 4" in refused(tmp_path, shapes=shapes_of(whole), training_mp_size=4)
    assert "neither its name nor a tensor of the model shows how ranks split it" in refused(tmp_path)
    torch.save(whole, tmp_path / "x.pt")
    assert "was saved by 1 rank, not 2" in refused(tmp_path / "x.pt", training_mp_size=2)
    (other := tmp_path / "other").mkdir()
    assert "is not in" in refused(tmp_path / "x.pt", base_dir=str(other))
    check_equal(open_weights("x.pt", base_dir=str(tmp_path)), whole)


def test_fused_tensors_of_deepspeed_itself(tmp_path: Path) -> None:
    fields = describe(tmp_path, [{"transformer.h.0.attention.attn_qkvw": torch.ones(4, 4)}] * 2, parallelization="tp")
    assert "fused tensor of DeepSpeed's own layers" in refused(fields)
