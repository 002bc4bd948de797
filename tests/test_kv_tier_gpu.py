"""Pages in host memory and files on a GPU: bits survive the way, tokens stay those of Hugging Face."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.cache.host_pages import HostPages
from outpace.cache.kv_cache import allocate
from outpace.offload.store_memory import aligned
from outpace.runner.copies import Copies
from outpace.types import Copy, Step, Way
from tests.exactness import BLOCK, MOST_NEW, SHORTER, assert_same, expected, model, served, work

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PAGE = 4096
SMALL = -(-(SHORTER + MOST_NEW) // BLOCK)


def pages_and_copies(dtype: torch.dtype, num_blocks: int, num_host: int) -> tuple[list[Tensor], Copies]:
    """Pages of random bytes, and copies to host memory, three blocks at a time."""
    device = torch.device("cuda")
    pages = allocate([(2, 64, 64), (2, 64, 48), (1, 16, 16)], num_blocks, dtype, device, 16)
    for tensor in pages.tensors():
        tensor.view(torch.uint8).random_(0, 256)
    row = sum(tensor[0].nbytes for tensor in pages.tensors())
    host = HostPages(aligned(num_host * row, pinned=True)[: num_host * row].view(num_host, row), device)
    host.per_copy = 3
    host.bind(pages)
    return list(pages.tensors()), Copies(host)


def wait(copies: Copies) -> None:
    while not copies.done(wait=True):
        pass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_bits_survive_the_way_beside_a_stream_that_writes(dtype: torch.dtype) -> None:
    tensors, copies = pages_and_copies(dtype, 40, 50)
    kept = [tensor.view(torch.uint8).clone() for tensor in tensors]
    out, back = tuple((index, 49 - index) for index in range(40)), tuple((49 - index, index) for index in range(40))
    copies.begin(Step(0, copies=[Copy(0, Way.STORE, out)], after=[0]))
    for tensor in tensors:
        tensor.view(torch.uint8).zero_()  # on the stream of steps: it must wait for the copy
    wait(copies)
    copies.begin(Step(1, copied=[0], copies=[Copy(1, Way.LOAD, back)]))
    wait(copies)
    copies.begin(Step(2, copied=[1]))
    for tensor, before in zip(tensors, kept, strict=True):
        assert torch.equal(tensor.view(torch.uint8), before)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("files", [False, True], ids=["host", "files"])
def test_l_6_n_8_the_second_time_the_prompts_come_from_below(eager: bool, files: bool, tmp_path: Path) -> None:
    offload: dict[str, Any] = {"kv": (40 if files else 300) * PAGE}
    if files:
        offload |= {"kv_files": 400 * PAGE, "nvme": tmp_path}
    llm = LLM(
        model("llama"), device="cuda", dtype="fp32", block_size=BLOCK, num_blocks=2 * SMALL, max_num_seqs=8,
        max_num_batched_tokens=64, enforce_eager=eager, offload=offload,
    )  # fmt: skip
    with llm:
        for seed in range(2):
            assert_same(served(llm.engine, work(SHORTER), seed=seed), expected("llama", SHORTER))
            llm.engine.scheduler.assert_consistent()
        assert llm.engine.levels["host_hits"] + llm.engine.levels["file_hits"] > 0
        assert llm.engine.levels["failed"] == 0


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_n_8_logits_are_those_of_pages_that_never_left(cache: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=5)
    prompt, others = list(range(3, 60)), [[number] * (SMALL * BLOCK - 8) for number in range(3, 9)]
    common: dict[str, Any] = {"device": "cuda", "dtype": "fp32", "block_size": BLOCK, "kv_cache_dtype": cache}
    with LLM(model("llama"), num_blocks=200, deterministic=True, **common) as llm:
        llm.generate(prompt, params)
        (want,) = llm.generate(prompt, params)
    with LLM(model("llama"), num_blocks=2 * SMALL, kv_offloading_size=0.01, deterministic=True, **common) as llm:
        llm.generate(prompt, params)
        llm.generate(others, params, use_tqdm=False)
        (found,) = llm.generate(prompt, params)
        assert llm.engine.levels["host_hits"] > 0
    assert found.num_cached_tokens == want.num_cached_tokens
    assert found.outputs[0].token_ids == want.outputs[0].token_ids
    assert found.outputs[0].logprobs == want.outputs[0].logprobs
