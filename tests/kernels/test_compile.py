"""Every kernel compiles for a Hopper GPU, on a machine without one: the interpreter checks no types and no layouts."""

import json
import os
import subprocess
import sys

import pytest

from outpace.kernels.triton_stub import HAS_TRITON
from tests.patience import PATIENCE

SHARED = 227 << 10  # bytes of shared memory that a block can have on an H100 or H200
SPILLS = {"_draw_kernel"}  # 32 warps leave 64 registers to a thread
EARLY = {"_gemv_kernel", "_packed_gemv_kernel", "_pair_down_kernel", "_packed_down_kernel"}
"""Kernels that read weights, which no kernel before them writes, before they wait for the previous kernel."""


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_every_kernel_compiles() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compiling"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=4 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    *found, never = [json.loads(line) for line in done.stdout.splitlines()]
    for kernel in found:
        assert kernel["shared"] <= SHARED, kernel
        assert kernel["stack"] == 0 or kernel["name"] in SPILLS, f"registers spill to memory: {kernel}"
        assert kernel["overlaps"] == kernel["waits"], kernel
        assert kernel["early_writes"] == 0, f"the previous kernel may still read it: {kernel}"
        assert kernel["early_reads"] == 0 or kernel["name"] in EARLY, f"the previous kernel may write it: {kernel}"
        assert kernel["barriers"] == 0, f'see docs/log.md, "A step that did not end": {kernel}'
    assert never == [], "tests/kernels/launches.py launches every kernel"
    names = {kernel["name"] for kernel in found if kernel["overlaps"]}
    assert names >= {"_rms_norm_kernel", "_layer_norm_kernel", "_rope_and_cache_kernel", "_gated_act_kernel"}
