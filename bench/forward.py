"""One decode-sized forward (batch 1, one token): Hugging Face eager against the engine with CUDA graphs.

The limit is the time to read the weights once at the bandwidth that this device shows in the same run.
"""

import gc
from typing import Any

import torch

import outpace
from bench import report
from outpace.bench import shapes
from outpace.kernels import limits


def measure(name: str, dtype: torch.dtype, bandwidth: float) -> dict[str, Any]:
    """Milliseconds of one forward, eager and from a graph, beside the limit."""
    model = shapes.build(name, dtype, "cuda")
    ids = torch.randint(10, 30000, (1, 1), device="cuda")
    floor = shapes.bytes_read_per_token(model) / bandwidth * 1e3
    with torch.no_grad():
        eager = limits.gpu_ms(lambda: model(input_ids=ids, use_cache=False))
    engine = outpace.init_inference(model, dtype=dtype, enable_cuda_graph=True)
    graph = limits.gpu_ms(lambda: engine(input_ids=ids, use_cache=False))
    engine.destroy()
    return {
        "model": name, "dtype": str(dtype).removeprefix("torch."), "eager_ms": eager, "graph_ms": graph,
        "speedup": eager / graph, "floor_ms": floor, "floor/graph": floor / graph,
    }  # fmt: skip


def main() -> None:
    """Measure every shape and write the results."""
    options = report.parser(__doc__).parse_args()
    bandwidth = limits.read_bandwidth()
    rows = []
    for name in shapes.SMALL:
        rows.append(measure(name, torch.bfloat16, bandwidth))
        gc.collect()
        torch.cuda.empty_cache()
    device = limits.device_name(torch.device("cuda"))
    notes = {"read bandwidth TB/s": bandwidth / 1e12, "what is timed": "events around one call, median of 50"}
    report.write("forward", device, rows, notes, options.out)


if __name__ == "__main__":
    main()
