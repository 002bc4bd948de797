"""What loading takes beside the weights themselves: bytes of the stream's own, never a second copy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.config import LLMConfig
from outpace.errors import ModelError
from outpace.load_paged import load_paged
from outpace.loading.targets import Target
from tests.loading.skeletons import Kept, empty_llama

WATCH = """
import re, sys
import torch
from transformers import LlamaConfig
from outpace.config import LLMConfig
from outpace.loading import stream
from outpace.load_paged import load_paged

def anonymous(what):
    return int(re.search(what + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

tiny, large, dtype, scheme = sys.argv[1:]
config = LLMConfig(dtype=dtype, device="cpu", quantization=scheme or None)
load_paged(tiny, config, tokenizer=False)  # everything is imported
before = anonymous("RssAnon")
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
parts = load_paged(large, config, tokenizer=False)
weights = sum(p.numel() * p.element_size() for p in parts.module.parameters())
largest = max(p.numel() * p.element_size() for p in parts.module.parameters())
files = anonymous("RssFile")
print(weights, largest, anonymous("VmHWM") - files - before, 2 * stream.CHUNK * stream.THREADS)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_checkpoint_of_more_than_a_gigabyte_is_in_memory_once(dtype: str, tmp_path: Path) -> None:
    empty_llama(tmp_path / "tiny", 64, 1, 64)
    stored = empty_llama(tmp_path / "large", 2048, 7, 16384)
    assert stored > 1 << 30
    command = [sys.executable, "-c", WATCH, str(tmp_path / "tiny"), str(tmp_path / "large"), dtype, ""]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    weights, largest, peak, ring = map(int, found.stdout.split())
    assert weights == stored * (2 if dtype == "fp32" else 1)
    assert weights * 0.95 < peak <= weights + ring + largest


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("scheme", "share"), [("int8", 1 / 2), ("int4", 1 / 4)])
def test_quantized_weights_and_one_layer_are_in_memory(scheme: str, share: float, tmp_path: Path) -> None:
    """One weight at a time is there in the dtype of the model, and a million of its values are rounded together."""
    width, vocab = 1024, 2048
    empty_llama(tmp_path / "tiny", 64, 1, 64)
    stored = empty_llama(tmp_path / "large", width, 24, vocab)
    command = [sys.executable, "-c", WATCH, str(tmp_path / "tiny"), str(tmp_path / "large"), "bf16", scheme]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    weights, _, peak, ring = map(int, found.stdout.split())
    layer = 2 * (4 + 3 * 4) * width * width
    assert stored * share < weights < stored * (share + 0.03)
    assert weights * 0.95 < peak <= weights + ring + layer


def awq(shapes: dict[str, list[int]], group: int) -> Kept:
    """The tensors of a Llama whose linears are AWQ: dtypes and shapes."""
    found: Kept = {}
    for name, shape in shapes.items():
        if "_proj" not in name:
            found[name] = ("BF16", shape)
            continue
        layer, (rows, columns) = name.removesuffix(".weight"), shape
        found[f"{layer}.qweight"] = ("I32", [columns, rows // 8])
        found[f"{layer}.qzeros"] = ("I32", [columns // group, rows // 8])
        found[f"{layer}.scales"] = ("F16", [columns // group, rows])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_that_run_as_they_are_stored_take_the_bytes_of_the_file(tmp_path: Path) -> None:
    width = 1024
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    for name, size in (("tiny", (256, 1, 64)), ("large", (width, 24, 2048))):
        stored = empty_llama(tmp_path / name, *size, kept=lambda shapes: awq(shapes, 128))
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    command = [sys.executable, "-c", WATCH, str(tmp_path / "tiny"), str(tmp_path / "large"), "bf16", "stored"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    weights, _, peak, ring = map(int, found.stdout.split())
    layer = 2 * (4 + 3 * 4) * width * width
    assert stored < weights < 1.03 * stored
    assert weights * 0.95 < peak <= weights + ring + layer


def test_too_little_memory_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    empty_llama(tmp_path / "tiny", 64, 1, 64)
    monkeypatch.setattr(Target, "empty", fail)
    with pytest.raises(ModelError, match=r"its weights take \d+\.\d\d KB on cpu, which has not enough free memory"):
        load_paged(tmp_path / "tiny", LLMConfig(dtype="fp32", device="cpu"), tokenizer=False)


def test_too_little_memory_for_a_weight_that_is_quantized_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    empty_llama(tmp_path / "tiny", 64, 1, 64)
    monkeypatch.setattr("outpace.loading.fill._bytes", fail)
    with pytest.raises(ModelError, match=r"a weight of \d+\.\d\d KB is assembled in memory before it is quantized"):
        load_paged(tmp_path / "tiny", LLMConfig.of(dtype="fp32", device="cpu", quantization="int8"), tokenizer=False)
