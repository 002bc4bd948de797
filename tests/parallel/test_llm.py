"""LLM on two ranks says what it says on one; it ends with its ranks, and they with it."""

import gc
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import outpace
from outpace.cli.app import app
from outpace.errors import ConfigError, EngineDead, InputError, NotSupported, StateError
from outpace.ranks import agree
from outpace.ranks.leader import Ranks
from outpace.ranks.process import versions
from outpace.ranks.world import check_world
from outpace.runner.runner import Runner
from outpace.structured.outputs import StructuredOutputs
from outpace.types import RequestOutput, SamplingParams
from tests.models import tiny
from tests.parallel import follower
from tests.patience import PATIENCE

TEXTS = ["The sky is", "Bread", "Two and two make four, and three and three", "a"]
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "fp32", "max_model_len": 96, "block_size": 16, "num_blocks": 10, "max_num_seqs": 4,
    "max_num_batched_tokens": 24, "kv_offloading_size": 1e-4, "max_logprobs": -1,
}  # fmt: skip
WAYS = ("tensor_parallel_size", "pipeline_parallel_size")
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"seed": 3},
    "filtered": {"seed": 5, "top_k": 20, "top_p": 0.9, "temperature": 0.8, "n": 2},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"temperature": 0, "logit_bias": {65: 3.0}, "bad_words": ["b"], "min_tokens": 3},
    "allowed": {"seed": 1, "allowed_token_ids": list(range(60, 90))},
    "logprobs": {"seed": 2, "logprobs": 3},
    "all logprobs": {"temperature": 0, "max_tokens": 2, "logprobs": -1},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 2, "max_tokens": 4},
    "prompt alone": {"max_tokens": 0, "prompt_logprobs": 1},
    "structured": {"seed": 4, "max_tokens": 30, "structured_outputs": StructuredOutputs(regex="[a-f]{4}[0-9]{3}")},
    "stops": {"seed": 6, "stop": ["e"], "max_tokens": 40},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    made = tmp_path_factory.mktemp("ranks") / "llama"
    tiny("llama", vocab_size=len(tokenizer) + 2, max_position_embeddings=128, eos_token_id=0).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def one(folder: Path) -> outpace.LLM:
    return outpace.LLM(folder, **OPTIONS)


@pytest.fixture(scope="module")
def ranked() -> Iterator[pytest.MonkeyPatch]:
    """Ranks compare their rows after every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outpace.ranks.process.PROGRAM", follower.NAME)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield patch


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Any:
    """The option that asks for two ranks."""
    return {request.param: 2}


@pytest.fixture(scope="module")
def two(folder: Path, ranked: pytest.MonkeyPatch, way: dict[str, Any]) -> Iterator[outpace.LLM]:
    with outpace.LLM(folder, async_scheduling=True, **OPTIONS, **way) as llm:
        yield llm


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "launch", follower.launch_and_compare)


def pids(llm: outpace.LLM) -> list[int]:
    return [each.process.pid for each in llm.engine.ranks._followers if each.process is not None]


def said(outputs: list[RequestOutput]) -> list[Any]:
    """Everything that must be equal to the last bit."""
    return [[(each.token_ids, each.text, each.finish_reason) for each in output.outputs] for output in outputs]


def numbers(outputs: list[RequestOutput]) -> list[tuple[int, float]]:
    """Log-probabilities by token, which differ in their last bits."""
    found = []
    for output in outputs:
        entries = [
            *(output.prompt_logprobs or ()),
            *(entry for each in output.outputs for entry in each.logprobs or ()),
        ]
        found += [(token, value.logprob) for entry in entries if entry for token, value in sorted(entry.items())]
    return found


@pytest.mark.usefixtures("compared")
class TestTheSameAsOne:
    @pytest.mark.parametrize("case", CASES)
    def test_tokens_text_and_log_probabilities(self, one: outpace.LLM, two: outpace.LLM, case: str) -> None:
        params = SamplingParams(**{"max_tokens": 10, **CASES[case]})
        wanted, found = one.generate(TEXTS, params), two.generate(TEXTS, params)
        assert said(found) == said(wanted)
        assert [token for token, _ in numbers(found)] == [token for token, _ in numbers(wanted)]
        assert [value for _, value in numbers(found)] == pytest.approx(
            [value for _, value in numbers(wanted)], abs=1e-4
        )

    def test_requests_of_every_kind_at_once_with_preemption(self, one: outpace.LLM, two: outpace.LLM) -> None:
        params = [SamplingParams(**{"max_tokens": 50, **case, "n": 1}) for case in CASES.values()]
        prompts = [TEXTS[index % len(TEXTS)] for index in range(len(params))]
        before = two.engine.totals.preemptions
        assert said(two.generate(prompts, params)) == said(one.generate(prompts, params))
        assert two.engine.totals.preemptions > before

    def test_prefixes_are_shared(self, two: outpace.LLM) -> None:
        greedy = SamplingParams(temperature=0, max_tokens=3)
        first, again = (two.generate("a prefix that is shared by both", greedy)[0] for _ in range(2))
        assert said([first]) == said([again])
        assert (again.num_cached_tokens or 0) > (first.num_cached_tokens or 0)

    @pytest.mark.parametrize("pooling", ["mean", "last"])
    def test_vectors(self, one: outpace.LLM, two: outpace.LLM, pooling: Any) -> None:
        wanted, found = ([each.outputs.embedding for each in llm.embed(TEXTS, pooling=pooling)] for llm in (one, two))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-5, rtol=1e-4)

    def test_logits_of_a_prompt(self, one: outpace.LLM, two: outpace.LLM) -> None:
        ids = one.tokenize(TEXTS[2])
        kept: list[dict[int, torch.Tensor]] = [{}, {}]
        for llm, into in zip((one, two), kept, strict=True):
            llm.prompt_logits([ids], lambda _, position, logits, into=into: into.update({position: logits.clone()}))  # type: ignore[misc]
        assert kept[0].keys() == kept[1].keys()
        for position, logits in kept[0].items():
            torch.testing.assert_close(kept[1][position], logits, atol=1e-5, rtol=1e-4)

    def test_an_aborted_request_leaves_nothing(self, two: outpace.LLM) -> None:
        stream = two.stream(TEXTS[0], SamplingParams(max_tokens=60, seed=1, ignore_eos=True))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        two.generate("a", SamplingParams(max_tokens=2, temperature=0))
        assert two.engine.scheduler.pool.num_free == OPTIONS["num_blocks"]

    def test_what_goes_wrong_in_the_first_rank_alone_costs_its_requests_and_no_rank(
        self, one: outpace.LLM, two: outpace.LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wrong(*arguments: object) -> None:
            raise RuntimeError("the watcher fell asleep")

        with pytest.raises(RuntimeError, match="fell asleep"):
            two.prompt_logits([one.tokenize(TEXTS[2])], wrong)
        with monkeypatch.context() as patch:
            patch.setattr("outpace.runner.runner.sample", wrong)
            with pytest.raises(RuntimeError, match="fell asleep"):
                two.generate("a", SamplingParams(seed=1))
        params = SamplingParams(seed=1, max_tokens=4)
        assert said(two.generate(TEXTS, params)) == said(one.generate(TEXTS, params))

    def test_a_bad_request_hurts_only_itself(self, two: outpace.LLM) -> None:
        with pytest.raises(InputError):
            two.generate([[9999]], SamplingParams(max_tokens=1))
        assert two.generate("a", SamplingParams(max_tokens=1, temperature=0))[0].finished

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_fork_has_no_say_in_the_ranks(self, one: outpace.LLM, two: outpace.LLM) -> None:
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(StateError, match="this one is a fork; make a new LLM here"):
                    two.generate("a", use_tqdm=False)
                two.shutdown()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        params = SamplingParams(seed=2, max_tokens=4)
        assert said(two.generate(TEXTS, params)) == said(one.generate(TEXTS, params))

    def test_one_such_llm_at_a_time(self, one: outpace.LLM, two: outpace.LLM, folder: Path) -> None:
        with pytest.raises(StateError, match="shut that one down first"):
            outpace.LLM(folder, tensor_parallel_size=2, **OPTIONS)
        with pytest.raises(StateError, match=r"tp_size=2, .* only serve an LLM; shut it down first"):
            outpace.init_inference(tiny("llama"), tensor_parallel={"tp_size": 2}, device="cpu")
        params = SamplingParams(seed=7, max_tokens=4)
        assert said(two.generate(TEXTS, params)) == said(one.generate(TEXTS, params)), "it still works"

    def test_a_killed_rank_is_named_and_nobody_is_left(self, two: outpace.LLM, folder: Path) -> None:
        """Last of those that use this LLM."""
        (other,) = pids(two)
        stream = two.stream(TEXTS[0], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
        next(stream)
        os.kill(other, signal.SIGKILL)
        with pytest.raises(EngineDead, match="rank 1 of 2 was killed by SIGKILL"):
            for _ in stream:
                pass
        with pytest.raises(EngineDead, match="rank 1 of 2 was killed by SIGKILL"):
            two.generate("a")
        two.shutdown()
        assert not Path(f"/proc/{other}").exists()
        assert not dist.is_initialized()


class TestRagged:
    @pytest.mark.parametrize("way", [{"tensor_parallel": {"tp_size": 2}}, {"pipeline_parallel": {"pp_size": 2}}])
    def test_logits(self, folder: Path, ranked: pytest.MonkeyPatch, way: Any) -> None:
        options = {name: OPTIONS[name] for name in ("device", "dtype", "max_model_len", "num_blocks", "max_num_seqs")}
        alone = outpace.RaggedEngine(folder, **options)
        engine = outpace.RaggedEngine(folder, **way, **options)
        for batch in ({1: [5, 6, 7], 2: [9]}, {1: [8], 3: [4, 4]}, {2: [3, 3, 3], 3: [7]}):
            wanted, found = (each.put(list(batch), list(batch.values())) for each in (alone, engine))
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        (other,) = engine._ranks._followers
        engine.flush(2)
        del engine
        gc.collect()
        assert other.process is not None
        assert other.process.returncode == 0, "it ends with its engine"
        assert not dist.is_initialized()


def test_experts_are_shared(tmp_path: Path, ranked: pytest.MonkeyPatch, compared: None) -> None:
    tiny("mixtral").save_pretrained(tmp_path)
    params = [SamplingParams(temperature=0, max_tokens=8), SamplingParams(seed=1, max_tokens=8)]
    found = []
    several: dict[str, Any] = {"tensor_parallel_size": 2, "moe": {"ep_size": 2}}
    for options in ({}, several):
        with outpace.LLM(tmp_path, device="cpu", dtype="fp32", num_blocks=8, **options) as llm:
            outputs = llm.generate([[5, 6, 7, 8], [9, 10]], params, use_tqdm=False)
            found.append((said(outputs), llm.expert_load().tolist()))
    assert found[0] == found[1]


def test_no_stage_has_counted_all_experts(tmp_path: Path, ranked: pytest.MonkeyPatch) -> None:
    tiny("mixtral").save_pretrained(tmp_path)
    with outpace.LLM(tmp_path, device="cpu", dtype="fp32", num_blocks=8, pipeline_parallel_size=2) as llm:
        llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=2), use_tqdm=False)
        with pytest.raises(NotSupported, match=r"expert_load: .* stages counts only the experts of its own layers"):
            llm.expert_load()


class TestFailures:
    def test_a_rank_that_cannot_load(self, folder: Path, ranked: pytest.MonkeyPatch) -> None:
        with ranked.context() as patch:
            patch.setenv(follower.FAILS, "load")
            with pytest.raises(EngineDead, match="rank 1 of 2 failed: MemoryError: no room in load"):
                outpace.LLM(folder, tensor_parallel_size=2, **OPTIONS)
        assert not dist.is_initialized()

    def test_ranks_that_differ(self) -> None:
        own = versions()
        agree.check_same(own, dict(own), 1)
        with pytest.raises(EngineDead, match=r"ranks differ in torch: .* in rank 0, 1\.0 in rank 1"):
            agree.check_same(own, {**own, "torch": "1.0"}, 1)

    @pytest.mark.parametrize("way", WAYS)
    def test_a_rank_that_fails_in_a_step(self, folder: Path, ranked: pytest.MonkeyPatch, way: str) -> None:
        with ranked.context() as patch:
            patch.setenv(follower.FAILS, "step")
            llm = outpace.LLM(folder, **{**OPTIONS, way: 2})
            with pytest.raises(EngineDead, match="rank 1 of 2 failed: MemoryError: no room in step"):
                llm.generate("a", SamplingParams(max_tokens=3))
            llm.shutdown()

    def test_the_model_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(outpace.errors.ModelError, match="no such file"):
            outpace.LLM(tmp_path / "nowhere", tensor_parallel_size=2, device="cpu")

    @pytest.mark.parametrize("way", WAYS)
    def test_a_live_module_is_refused_with_the_remedy(self, way: str) -> None:
        with pytest.raises(NotSupported, match=f"{way}: a live module .* save_pretrained"):
            outpace.LLM(tiny("llama"), **{**OPTIONS, way: 2})

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"tensor_parallel": {"tp_size": 2, "mpu": object()}}, "tensor_parallel.mpu: cannot be sent"),
            (
                {"tensor_parallel_size": 2, "injection_policy": {torch.nn.Linear: ("a",)}},
                "injection_policy: contains values",
            ),
        ],
    )
    def test_objects_are_refused_by_name(self, folder: Path, options: dict[str, Any], problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            outpace.LLM(folder, device="cpu", **options)

    def test_more_ranks_than_heads(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Ranks, "start", lambda *_: pytest.fail("a rank is started"))
        with pytest.raises(ConfigError, match=r"tensor_parallel_size=9: .* 4 attention heads cannot be split"):
            outpace.LLM(folder, device="cpu", tensor_parallel_size=9)

    def test_more_ranks_than_the_memory_holds(self) -> None:
        size = 100_000_000
        with pytest.raises(ConfigError, match=r"100000000 ranks need .* are free; ask for at most \d+"):
            check_world(size, None, "cpu", size)

    def test_torchrun(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "1")
        with pytest.raises(ConfigError, match="without torchrun"):
            outpace.LLM(folder, device="cpu", tensor_parallel_size=2)


@pytest.mark.usefixtures("compared")
def test_verify_compares_ranks_with_one(folder: Path, ranked: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["verify", str(folder), "--device", "cpu", "--tp", "2", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "llama in float32 on cpu, 2 ranks beside one\n" in result.stdout
    assert result.stdout.endswith("32 greedy tokens of each: equal\nPASS\n")
    found = json.loads(file.read_text())
    assert found["passed"]
    assert 0 < found["error"] < found["allowed"], "they are not the same computation"


SCRIPT = """
import os, sys
import outpace

llm = outpace.LLM(sys.argv[1], device="cpu", tensor_parallel_size=2, num_blocks=8, max_model_len=16)
llm.generate([[1, 2, 3]], outpace.SamplingParams(max_tokens=2), use_tqdm=False)
print(*(each.process.pid for each in llm.engine.ranks._followers), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("ends", ["killed", "exits"])
def test_no_rank_outlives_the_first(folder: Path, ends: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watched = os.pidfd_open(int(process.stdout.readline()))
        if ends == "killed":
            process.kill()
        else:
            process.communicate("\n")
        assert select.select([watched], [], [], PATIENCE)[0]
        os.close(watched)
        assert process.wait(PATIENCE) == (-signal.SIGKILL if ends == "killed" else 0)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"pp_size": 9}, "9 stages, and the model has 2 layers"),
        ({"pp_size": 2, "layers": [3, 1]}, "make them add up to 2"),
    ],
)
def test_stages_that_cannot_be_are_refused_before_a_rank_is_started(
    asked: dict[str, Any], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "start", lambda *_: pytest.fail("a rank is started"))
    with pytest.raises(ConfigError, match=says):
        outpace.LLM(folder, **OPTIONS, pipeline_parallel=asked)
