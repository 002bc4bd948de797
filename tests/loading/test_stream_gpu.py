"""The stream onto a GPU: the same bits as on the host, and no memory beside weights, one of them and the ring."""

import gc
from pathlib import Path

import pytest
import torch

import outpace
from outpace.config import LLMConfig
from outpace.errors import ModelError
from outpace.load_paged import load_paged
from outpace.loading import stream
from tests.loading.checkpoints import saved
from tests.loading.skeletons import empty_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
FAMILIES = ("llama", "gpt2", "bloom", "falcon-40b", "codegen", "mixtral", "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_bits_as_on_the_host(family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CHUNK", 4096)  # several runs for each tensor
    monkeypatch.setattr(stream, "DEVICE_CHUNK", 4096)
    saved(family, tmp_path)
    configs = [LLMConfig(dtype=dtype, device=device, max_out_tokens=64) for device in ("cpu", "cuda")]
    there, here = (load_paged(tmp_path, config, tokenizer=False).module for config in configs)
    for (name, expected), found in zip(there.named_parameters(), here.parameters(), strict=True):
        assert found.is_cuda
        assert torch.equal(found.cpu(), expected), name
    for (name, made), buffer in zip(there.named_buffers(), here.buffers(), strict=True):
        assert torch.equal(buffer.cpu(), made), name


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_memory_of_the_device_holds_the_weights_once(dtype: str, tmp_path: Path) -> None:
    empty_llama(tmp_path / "tiny", 64, 1, 64)
    empty_llama(tmp_path / "large", 2048, 7, 16384)
    load_paged(tmp_path / "tiny", LLMConfig(dtype=dtype, device="cuda"), tokenizer=False)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    parts = load_paged(tmp_path / "large", LLMConfig(dtype=dtype, device="cuda"), tokenizer=False)
    sizes = [p.numel() * p.element_size() for p in parts.module.parameters()]
    ring = stream.DEVICE_CHUNK * (stream.THREADS + stream.SPARE)
    assert torch.cuda.max_memory_reserved() - before <= sum(sizes) + max(sizes) + ring


def test_a_file_that_is_cut_leaves_nothing_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_llama(tmp_path / "large", 1024, 4, 8192)
    config = LLMConfig(dtype="bf16", device="cuda")
    load_paged(tmp_path / "large", config, tokenizer=False)
    gc.collect()
    before = torch.cuda.memory_allocated()
    original = stream._Work.run

    def cut(self: stream._Work, *args: object) -> None:
        with (tmp_path / "large" / "model.safetensors").open("r+b") as file:
            file.truncate(1 << 20)
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(stream._Work, "run", cut)
    with pytest.raises(ModelError, match="ends early"):
        load_paged(tmp_path / "large", config, tokenizer=False)
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_tokens_of_a_model_that_was_streamed(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, max_new_tokens=9)[0, 3:].tolist()  # type: ignore[operator]
    llm = outpace.LLM(tmp_path, dtype="fp32", device="cuda")
    params = outpace.SamplingParams(max_tokens=9, temperature=0)
    assert llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids == expected
