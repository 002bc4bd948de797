"""Pages in host memory that a GPU's attention reads over the link: the same bits, with graphs and without."""

from typing import Any

import pytest
import torch

from outpace import LLM
from outpace.runner import room
from tests.offload.streamed_gpu import answers, llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_the_same_bits(kind: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"dtype": "bf16", "enable_cuda_graph": graphs, "max_num_seqs": 8, "kv_cache_dtype": kind}
    options |= {"enable_prefix_caching": False, "max_num_batched_tokens": 64, "num_blocks": 40}
    with LLM(llama(), **options) as resident:
        wanted = answers(resident, 1000)
    monkeypatch.setattr(room, "_free_memory", lambda *args: 3_000_000)
    with LLM(llama(), **options, offload={"host_pages": "1GB"}) as llm:
        pages = llm.engine._runner._pages
        away = [page.numel() for page in pages.keys if page.data_ptr() and not _is_device(page)]
        assert 0 < len(away) < len(pages.keys)
        for _ in range(2):
            assert answers(llm, 1000) == wanted


def _is_device(tensor: torch.Tensor) -> bool:
    """Whether the memory is the GPU's own: torch's allocator knows of it."""
    segments = torch.cuda.memory_snapshot()
    return any(part["address"] <= tensor.data_ptr() < part["address"] + part["total_size"] for part in segments)
