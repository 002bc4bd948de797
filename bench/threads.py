"""How many threads compute on a CPU, and how they wait for each other: alone, and beside programs that use it as well.

Each setting is a process of its own, since libgomp reads its environment when it is loaded. They take turns, so that
all of them see the same machine; one that does not run sleeps. Only ratios count.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import outpace
from bench import report
from outpace.kernels import limits
from outpace.loading.default_model import default_model_path

ALL = str(os.cpu_count())
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "follows the machine": {},
    "all cores": {"OMP_NUM_THREADS": ALL},
    "all cores, spin 1000": {"OMP_NUM_THREADS": ALL, "GOMP_SPINCOUNT": "1000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
BASE = "all cores"
PROMPT, TURNS = 64, 5


def measure(llm: outpace.LLM, requests: int, new: int) -> dict[str, float]:
    """Tokens/s of some requests at once, and seconds until the first token."""
    prompts = [[(7 * place + request) % 1000 + 10 for place in range(PROMPT)] for request in range(requests)]
    params = outpace.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    begin, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - begin
    first = min((output.metrics.first_token_time or 0) - output.metrics.arrival_time for output in outputs)
    return {"tokens/s": requests * new / took, "first": first, "cores": (time.process_time() - cpu) / took}


def child() -> None:
    """Measure whenever a line comes."""
    llm = outpace.LLM(default_model_path(), device="cpu", dtype="fp32", enable_prefix_caching=False)
    measure(llm, 1, 2)
    print(json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(measure(llm, asked["requests"], asked["new"])), flush=True)


class Setting:
    """A process with an environment."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.threads", "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def run(self, **asked: int) -> dict[str, float]:
        """One measurement."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def read(self) -> dict[str, float]:
        """Its next line."""
        assert self._process.stdout is not None, "it is a pipe"
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Programs that compute without end."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def row(count: int, name: str, turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """One setting beside so many busy programs: medians of the turns, and of the ratios within each."""

    def median(figure: str) -> float:
        return statistics.median(turn[name][figure] for turn in turns)

    ratio = statistics.median(turn[name]["tokens/s"] / turn[BASE]["tokens/s"] for turn in turns)
    figures = {"tokens/s": median("tokens/s"), f"of '{BASE}'": ratio, "first token, s": median("first")}
    return {"busy programs": count, "setting": name, **figures, "cores used": median("cores")}


def main() -> None:
    """Measure and write the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--child", action="store_true", help="be one of the processes")
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 2, 7], help="busy programs beside it")
    parser.add_argument("--requests", type=int, default=8, help="at once")
    parser.add_argument("--new", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--turns", type=int, default=TURNS, help="each setting has one in each")
    given = parser.parse_args()
    if given.child:
        child()
        return
    settings = [Setting(name, environment) for name, environment in SETTINGS.items()]
    rows: list[dict[str, Any]] = []
    try:
        threads = [setting.read()["threads"] for setting in settings]
        for count in given.busy:
            with busy(count):
                turns = [
                    {setting.name: setting.run(requests=given.requests, new=given.new) for setting in settings}
                    for _ in range(given.turns)
                ]
            rows += [row(count, setting.name, turns) for setting in settings]
        report.show("threads", rows)
    finally:
        for setting in settings:
            setting.close()
    notes = {
        "requests": given.requests,
        "new tokens": given.new,
        "cores": os.cpu_count(),
        "threads": threads[0],
        "load": os.getloadavg()[1],
    }
    report.save("threads", limits.device_name(torch.device("cpu")), rows, notes, given.out)


if __name__ == "__main__":
    main()
