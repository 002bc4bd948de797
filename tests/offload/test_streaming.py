"""Layers in host memory and on disk: bit for bit what the resident model gives (N-8), and errors instead of garbage."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outpace
from outpace import ConfigError
from outpace.errors import OffloadError
from tests.models import padded, prompts
from tests.offload.placed import LAYERS, PLACES, deep, offload_at
from tests.offload.streamed import answers, llm_of, streaming_of

FAMILIES = ("llama", "gpt2", "opt", "bloom", "mixtral")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", FAMILIES)
def test_n8_every_placement_gives_the_bits_of_the_resident_model(family: str, place: str, tmp_path: Path) -> None:
    model = deep(family)
    with llm_of(model) as resident:
        wanted = answers(resident)
    with llm_of(model, offload=offload_at(place, model, tmp_path)) as llm:
        assert answers(llm) == wanted
        tiers = streaming_of(llm).placement.tiers
        assert streaming_of(llm).counts.loads > 2 * len(streaming_of(llm).units)
    assert len(tiers) == LAYERS
    assert ("host" in tiers, "disk" in tiers) == (place != "disk", place != "host")
    assert ("device" in tiers) == (place == "some stay")
    assert not any(tmp_path.iterdir()), "a live module has no name, so its file must not stay"


@pytest.mark.parametrize("scheme", ["int8", "int4", "w8a8"])
def test_quantized_layers_travel_quantized(scheme: str, tmp_path: Path) -> None:
    model = deep("llama", hidden_size=64, intermediate_size=128)
    options = {"quantization": scheme, "offload": {"cpu_offload_gb": 1.0, "nvme": str(tmp_path)}}
    with llm_of(model, quantization=scheme) as resident:
        wanted = answers(resident)
    with llm_of(model, offload=offload_at("host", model, tmp_path)) as llm:
        whole = streaming_of(llm).tier_bytes()["host"]
    with llm_of(model, **options) as llm:
        assert answers(llm) == wanted
        assert streaming_of(llm).tier_bytes()["host"] < whole / 2


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize(
    ("family", "inject"),
    [*((family, inject) for family in ("llama", "gpt2", "bert") for inject in (True, False)), ("t5", False)],
)
def test_forward_and_generate_of_a_module(family: str, inject: bool, place: str, tmp_path: Path) -> None:
    model = deep(family)
    options: dict[str, Any] = {"replace_with_kernel_inject": inject, "device": "cpu"}
    inputs = padded(prompts(4, 9), "left")
    if family == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :3]
    resident = outpace.init_inference(copy.deepcopy(model), **options)
    engine = outpace.init_inference(copy.deepcopy(model), offload=offload_at(place, model, tmp_path), **options)
    assert engine.streaming is not None
    for _ in range(2):
        assert torch.equal(engine(**inputs).logits, resident(**inputs).logits)
    if engine.info.can_generate:
        inputs.pop("decoder_input_ids", None)
        made = [each.generate(**inputs, max_new_tokens=6, do_sample=False) for each in (engine, resident)]
        assert torch.equal(*made)
    assert engine.streaming.counts.loads > 2 * len(engine.streaming.units)
    engine.destroy()


def test_any_module_with_a_list_of_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))), nn.Linear(16, 4))
    x = torch.randn(3, 8)
    wanted = model(x)
    engine = outpace.init_inference(model, device="cpu", offload={"cpu_offload_gb": 1.0})
    assert engine.streaming is not None
    assert len(engine.streaming.units) == 3 * 2
    assert torch.equal(engine(x), wanted)
    plain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    wanted = plain(torch.zeros(1, 16))
    engine = outpace.init_inference(plain, device="cpu", offload={"cpu_offload_gb": 1.0})
    assert engine.streaming is not None
    assert torch.equal(engine(torch.zeros(1, 16)), wanted)
    alone = outpace.init_inference(nn.ModuleList([nn.Linear(4, 4)]), device="cpu", offload="auto")
    assert alone.streaming is None
    with pytest.raises(ConfigError, match="offload: Linear has no list of layers"):
        outpace.init_inference(nn.Linear(4, 4), device="cpu", offload="auto")


def test_the_file_of_a_checkpoint_is_written_once(tmp_path: Path) -> None:
    model, folder, files = deep("llama"), tmp_path / "model", tmp_path / "files"
    model.save_pretrained(folder)
    options = {"offload": offload_at("mixed", model, files), "tokenizer": None}
    with llm_of(model) as resident:
        wanted = answers(resident)
    found = []
    for _ in range(2):
        with llm_of(str(folder), **options) as llm:
            assert answers(llm) == wanted
        found.append({path.name: path.stat().st_mtime_ns for path in files.iterdir()})
    assert found[0]
    assert found[0] == found[1]


def damaged(path: Path) -> None:
    """Flip a bit of some layer."""
    place = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [damaged, cut])
def test_f9_a_file_that_changes_under_a_running_engine(harm: Any, tmp_path: Path) -> None:
    model, folder, files = deep("llama", hidden_size=256), tmp_path / "model", tmp_path / "files"
    model.save_pretrained(folder)
    with llm_of(str(folder), offload=offload_at("disk", model, files)) as llm, llm_of(model) as other:
        wanted = answers(llm)
        (path,) = files.iterdir()
        kept = path.read_bytes()
        harm(path)
        for _ in range(2):
            with pytest.raises(OffloadError, match=r"wrong checksum|too early"):
                answers(llm)
        assert answers(other) == wanted
        path.write_bytes(kept)
        assert answers(llm) == wanted, "the engine goes on once the file is whole again"


def test_f9_a_file_that_stays_damaged_is_made_anew_by_the_next_start(tmp_path: Path) -> None:
    model, folder, files = deep("llama", hidden_size=256), tmp_path / "model", tmp_path / "files"
    model.save_pretrained(folder)
    with llm_of(str(folder), offload=offload_at("disk", model, files)) as llm:
        wanted = answers(llm)
        damaged(*files.iterdir())
        with pytest.raises(OffloadError, match="wrong checksum"):
            answers(llm)
    assert not any(files.iterdir())
    with llm_of(str(folder), offload=offload_at("disk", model, files)) as llm:
        assert answers(llm) == wanted


def test_f10_what_does_not_fit_is_said_with_the_bytes_that_are_missing(tmp_path: Path) -> None:
    model = deep("llama")
    enough = offload_at("host", model, tmp_path)
    for given, says in (
        ({**enough, "device_memory": enough["device_memory"] - 1000}, r"offload.device_memory: .* give .* more"),
        ({**enough, "host_memory": 5000}, r"are missing; raise offload.host_memory .* offload.nvme"),
        (
            {**enough, "host_memory": 0, "nvme": "/proc/nowhere"},
            r"offload.nvme: /proc/nowhere .* make the folder first",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            llm_of(model, offload=given)
    assert not any(tmp_path.iterdir())


def test_f10_page_locked_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, calls = deep("llama"), []

    def refuse(nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        calls.append(nbytes)
        if len(calls) == 3:
            raise OffloadError(f"{nbytes} of page-locked host memory wanted, 0 are free")
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr("outpace.offload.streaming.aligned", refuse)
    with pytest.raises(OffloadError, match="page-locked host memory wanted, 0 are free"):
        llm_of(model, offload=offload_at("host", model, tmp_path))
    assert len(calls) == 3, "it stops there"


def test_f3_a_step_that_fails_half_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = deep("llama")
    with llm_of(model, offload=offload_at("mixed", model, tmp_path)) as llm:
        wanted = answers(llm)
        layer: Any = streaming_of(llm).units[4].layer
        run = layer.qkv.forward
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(layer.qkv, "forward", lambda *args, **kwargs: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    answers(llm)
            assert layer.qkv.forward == run
            assert answers(llm) == wanted


ZERO = {"stage": 3, "max_live_parameters": 0, "param_persistence_threshold": 0, "prefetch_bucket_size": 1000}


@pytest.mark.parametrize(
    ("zero", "tiers", "slots"),
    [
        ({"offload_param": {"device": "cpu"}}, {"host"}, 2),
        ({"offload_param": {"device": "cpu", "pin_memory": False}, "prefetch_bucket_size": 0}, {"host"}, 1),
        ({"offload_param": {"device": "cpu"}, "prefetch_bucket_size": 30_000}, {"host"}, 4),
        ({"offload_param": {"device": "nvme", "max_in_cpu": 0}}, {"disk"}, 2),
        ({"offload_param": {"device": "nvme", "max_in_cpu": 20_000}, "aio": {"thread_count": 2}}, {"host", "disk"}, 2),
        ({"offload_param": {"device": "cpu"}, "max_live_parameters": 40_000}, {"device", "host"}, 2),
        ({"offload_param": {"device": "cpu"}, "max_live_parameters": 40_000, "max_reuse_distance": 9}, {"host"}, 2),
    ],
)
def test_deepspeed_s_dictionary(zero: dict[str, Any], tiers: set[str], slots: int, tmp_path: Path) -> None:
    model, zero = deep("llama"), copy.deepcopy({**ZERO, **zero})
    if zero["offload_param"]["device"] == "nvme":
        zero["offload_param"]["nvme_path"] = str(tmp_path)
    with llm_of(model) as resident:
        wanted = answers(resident)
    with llm_of(model, config=json.loads(json.dumps({"zero": zero}))) as llm:
        assert answers(llm) == wanted
        placement = streaming_of(llm).placement
        assert (set(placement.tiers), placement.slots) == (tiers, slots)


def test_small_parameters_stay_as_zero_s_thresholds_say() -> None:
    sizes = {}
    for threshold, most in ((0, 10**9), (100, 10**9), (100, 64)):
        zero = {**ZERO, "offload_param": {"device": "cpu"}, "param_persistence_threshold": threshold}
        with llm_of(deep("llama"), zero={**zero, "model_persistence_threshold": most}) as llm:
            sizes[threshold, most] = sum(len(unit.held) for unit in streaming_of(llm).units)
    assert sizes[0, 10**9] == 6 * LAYERS, "four linears and two norms"
    assert sizes[100, 10**9] == 4 * LAYERS
    assert sizes[100, 64] == 6 * LAYERS - 2, "two norms, and no more"


def test_auto_keeps_everything_where_it_fits() -> None:
    with llm_of(deep("llama"), offload="auto") as llm:
        assert llm.engine.streaming is None
