"""The runtime on a CPU: SmolLM2, many requests at once and one alone, against Hugging Face in the same run.

Only the ratios count: both sides run one after another on the same machine, in turns, and the best of each is taken.
"""

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from bench import report
from outpace.kernels import limits
from outpace.loading.default_model import default_model_path

REQUESTS, NEW, TURNS = 32, 48, 3
TOPICS = ("rain", "bread", "the moon", "trains", "sleep", "rivers", "music", "bees")


def prompts(tokenizer: object) -> list[list[int]]:
    """Chat prompts of different lengths."""
    asked = [f"Tell me {'something ' * (number % 5)}about {topic}." for number in range(4) for topic in TOPICS]
    chat = [[{"role": "user", "content": text}] for text in asked]
    return [
        tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=True)["input_ids"]  # type: ignore[attr-defined]
        for each in chat
    ]


def main() -> None:
    """Measure and write the table."""
    folder = report.parser(__doc__).parse_args().out
    model_path = default_model_path()
    work = prompts(AutoTokenizer.from_pretrained(model_path))
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    llm = outpace.LLM(model_path, device="cpu", dtype="fp32", enable_prefix_caching=False)
    greedy = outpace.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)

    def hugging_face(ids: list[int]) -> Any:
        row = torch.tensor([ids])
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        return plain.generate(row, attention_mask=torch.ones_like(row), **options)

    def speed(count: int, run: object) -> float:
        begin = time.perf_counter()
        run()  # type: ignore[operator]
        return count * NEW / (time.perf_counter() - begin)

    best = {"theirs, one": 0.0, "ours, one": 0.0, "ours, many": 0.0}
    for _ in range(TURNS):
        best["theirs, one"] = max(best["theirs, one"], speed(2, lambda: [hugging_face(ids) for ids in work[:2]]))
        best["ours, one"] = max(best["ours, one"], speed(2, lambda: [llm.generate(ids, greedy) for ids in work[:2]]))
        many = speed(REQUESTS, lambda: llm.generate(work, greedy, use_tqdm=False))
        best["ours, many"] = max(best["ours, many"], many)
    theirs = best["theirs, one"]
    rows = [
        {"what": "Hugging Face, one request at a time", "tokens/s": theirs, "times": 1.0, "target": "-"},
        {
            "what": "LLM, one request",
            "tokens/s": best["ours, one"],
            "times": best["ours, one"] / theirs,
            "target": 0.83,
        },
        {
            "what": f"LLM, {REQUESTS} at once",
            "tokens/s": best["ours, many"],
            "times": best["ours, many"] / theirs,
            "target": 4.0,
        },
    ]
    notes = {"threads": torch.get_num_threads(), "model": Path(model_path).name}
    report.write("cpu", limits.device_name(torch.device("cpu")), rows, notes, folder)


if __name__ == "__main__":
    main()
