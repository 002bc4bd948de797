"""An empty module that `init_inference(checkpoint=...)` fills has the bits that were saved, in every kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import outpace
from outpace.inject.split import known_splits
from tests.loading.checkpoints import FAMILIES, save_deepspeed
from tests.models import FAMILIES as CLASSES
from tests.models import PAD, tiny

Save = Callable[[Any, Path], Any]
"""Saves a model in some kind; what to give as `checkpoint`."""


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def folder(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    return path


def pieces(model: Any, path: Path) -> Path:
    model.save_pretrained(path, max_shard_size="10KB")
    return path


def safetensors_file(model: Any, path: Path) -> Path:
    path.mkdir()
    save_file(tensors(model), path / "any.safetensors")
    return path / "any.safetensors"


def bin_folder(model: Any, path: Path) -> Path:
    path.mkdir()
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    return path


def pt_file(model: Any, path: Path) -> Path:
    path.mkdir()
    torch.save({"module": model.state_dict()}, path / "model.pt")
    return path / "model.pt"


def described(model: Any, path: Path) -> dict[str, Any]:
    pt_file(model, path)
    return {"type": "ds_model", "version": 1.0, "checkpoints": ["model.pt"], "base_dir": str(path)}


def split(model: Any, degree: int) -> list[dict[str, torch.Tensor]]:
    """What each rank would hold of a model; of one whose parts nobody knows, all of it."""
    splits = known_splits(model, degree)
    ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(degree)]
    for name, value in tensors(model).items():
        cut = splits.get(name)
        for number, rank in enumerate(ranks):
            spans = () if cut is None else cut.spans[number]
            parts = [value.narrow(cut.dim, start, stop - start) for start, stop in spans] if cut is not None else []
            rank[name] = torch.cat(parts, cut.dim) if cut is not None else value
    return ranks


def deepspeed(degree: int) -> Save:
    def save(model: Any, path: Path) -> Path:
        path.mkdir()
        return save_deepspeed(path, split(model, degree))

    return save


def megatron(model: Any, path: Path) -> Path:
    for rank, part in enumerate(split(model, 2)):
        (path / f"mp_rank_{rank:02}").mkdir(parents=True)
        saved = {"model": part, "checkpoint_version": 2.0}
        torch.save(saved, path / f"mp_rank_{rank:02}" / "model_optim_rng.pt")
    return path


KINDS: dict[str, Save] = {
    "folder": folder,
    "folder in pieces": pieces,
    "safetensors": safetensors_file,
    "bin folder": bin_folder,
    "pt": pt_file,
    "descriptor": described,
    "deepspeed": deepspeed(1),
    "deepspeed, 2 ranks": deepspeed(2),
    "deepspeed, 4 ranks": deepspeed(4),
    "megatron, 2 ranks": megatron,
}


def empty(family: str) -> nn.Module:
    kind, config, options = CLASSES[family]
    with outpace.OnDevice("meta"):
        return kind(config(**options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_module_gets_the_bits_that_were_saved(family: str, kind: str, tmp_path: Path) -> None:
    model = tiny(family)
    checkpoint = KINDS[kind](model, tmp_path / "saved")
    engine = outpace.init_inference(empty(family), dtype="fp32", device="cpu", checkpoint=checkpoint)
    found = engine.module.state_dict()
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name
    assert not any(value.is_meta for value in (*engine.module.parameters(), *engine.module.buffers()))


@pytest.mark.parametrize("kind", ["folder in pieces", "pt", "deepspeed, 2 ranks"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("bert", "t5")])
def test_fused_layers_are_filled_from_every_kind(family: str, kind: str, tmp_path: Path) -> None:
    model = tiny(family)
    checkpoint = KINDS[kind](model, tmp_path / "saved")
    options: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "replace_with_kernel_inject": True}
    engine = outpace.init_inference(empty(family), checkpoint=checkpoint, max_out_tokens=32, **options)
    ids = torch.tensor([[5, 6, 7, 8]])
    sampling = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD}
    assert torch.equal(engine.generate(ids, **sampling), model.generate(ids, **sampling))


class Plain(nn.Module):
    """A module of somebody's own, with a tie, a buffer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.seen: torch.Tensor
        self.table: torch.Tensor
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale + self.table + self.seen


def test_a_plain_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Plain()
    model.get_buffer("seen").add_(4)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    with outpace.OnDevice("meta"):
        made = Plain()
    assert (made.first.weight.is_meta, made.table.is_meta) == (True, False)
    engine = outpace.init_inference(made, dtype="fp32", device="cpu", checkpoint=tmp_path / "plain.pt")
    assert engine.module.second.weight is engine.module.first.weight  # type: ignore[union-attr]
    x = torch.randn(2, 6)
    assert torch.equal(engine(x), model(x))


def test_a_live_module_gets_other_weights(tmp_path: Path) -> None:
    other = tiny("llama", weights_seed=3)
    other.save_pretrained(tmp_path)
    engine = outpace.init_inference(tiny("llama"), dtype="fp32", device="cpu", checkpoint=tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(engine(ids).logits, other(ids).logits)


def test_without_a_checkpoint_an_empty_module_is_refused() -> None:
    with pytest.raises(outpace.ModelError, match=r"meta device .* name them with checkpoint="):
        outpace.init_inference(empty("llama"), device="cpu")


def test_a_module_made_on_torchs_own_meta_device_gets_its_buffers(tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    kind, config, options = CLASSES["llama"]
    with torch.device("meta"):
        made = kind(config(**options))
    assert any(buffer.is_meta for buffer in made.buffers())
    engine = outpace.init_inference(made, dtype="fp32", device="cpu", checkpoint=tmp_path)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(engine(ids).logits, model(ids).logits)


def test_llm_takes_an_empty_module_and_a_file_in_a_folder(tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path / "saved")
    ids, params = [5, 6, 7, 8], outpace.SamplingParams(max_tokens=8, temperature=0)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, 4:].tolist()
    file = tmp_path / "saved" / "model.safetensors"
    cases: list[tuple[Any, dict[str, Any]]] = [
        (empty("llama"), {"checkpoint": file}),
        (file, {}),
        (tmp_path / "saved", {"checkpoint": file}),
    ]
    for source, options in cases:
        llm = outpace.LLM(source, dtype="fp32", device="cpu", **options)
        assert llm.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("wrong", [7, "cuda:x", object()])
def test_on_device_refuses_what_is_no_device(wrong: Any) -> None:
    with pytest.raises(outpace.ConfigError, match=r"device|dtype"):
        outpace.OnDevice(wrong)


def test_on_device_ends_as_it_began() -> None:
    register, dtype = nn.Module.register_parameter, torch.get_default_dtype()

    def fail() -> None:
        with outpace.OnDevice(torch.float16, "meta"):
            made = nn.Linear(2, 2)
            assert (made.weight.device.type, made.weight.dtype) == ("meta", torch.float16)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert (nn.Module.register_parameter, torch.get_default_dtype()) == (register, dtype)
    with outpace.OnDevice(device="meta", enabled=False):
        assert nn.Linear(2, 2).weight.device.type == "cpu"
