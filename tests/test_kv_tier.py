"""Host memory and files as levels of the prefix cache of LLM: the tokens of Hugging Face, whatever is where."""

import os
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.errors import ConfigError, OffloadError
from outpace.runner import room
from outpace.types import Way
from tests.exactness import BLOCK, MOST_NEW, SHORTER, assert_same, expected, model, served, watched, work

PAGE = 4096
"""Bytes of a page of these models, which is what files need it to be a multiple of."""
SMALL = -(-(SHORTER + MOST_NEW) // BLOCK)
"""Blocks of the largest request: with so few nothing stays on the device for long."""


def tiered(kv: int, files: Path | None = None, kv_files: int = 400, **more: Any) -> LLM:
    """A pool of as few blocks as can be, and so many in host memory and in files."""
    offload: dict[str, Any] = {"kv": kv * PAGE}
    if files is not None:
        offload |= {"kv_files": kv_files * PAGE, "nvme": files}
    options: dict[str, Any] = {"num_blocks": 2 * SMALL, "max_num_seqs": 8, "max_num_batched_tokens": 64, **more}
    return LLM(model("llama"), device="cpu", block_size=BLOCK, offload=offload, **options)


def twice(llm: LLM) -> None:
    """64 requests that come at random moments, and the same again: in fp32 they get the tokens of Hugging Face."""
    for seed in range(2):
        with watched(llm.engine):
            outputs = served(llm.engine, work(SHORTER), seed=seed)
        assert_same(outputs, expected("llama", SHORTER))
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.num_blocks
    llm.engine.scheduler.assert_consistent()


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in-turn"])
def test_l_6_n_8_the_second_time_host_memory_has_the_prompts(ahead: bool) -> None:
    llm = tiered(300, async_scheduling=ahead)
    assert llm.engine.scheduler.tiers.host.num_blocks == 300
    twice(llm)
    totals = llm.engine.totals
    assert totals.tiers.host_hits > 500
    assert totals.prefix_hits >= totals.tiers.host_hits
    assert totals.tiers.copied[Way.LOAD] > 30
    assert totals.tiers.copied[Way.READ] == 0


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in-turn"])
def test_l_6_n_8_the_second_time_files_have_the_prompts(ahead: bool, tmp_path: Path) -> None:
    llm = tiered(40, tmp_path, async_scheduling=ahead)
    twice(llm)
    totals = llm.engine.totals.tiers
    assert totals.file_hits > 0
    assert totals.copied[Way.WRITE] > 20
    assert totals.failed == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["error", "altered", "full disk"])
def test_f_9_files_that_fail_cost_time_and_no_token(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, calls = os.preadv, iter(range(10**9))

    def broken(*args: Any) -> int:
        if fault == "altered":
            found = preadv(*args)
            if next(calls) % 2:
                args[1][0][:8] = b"\0garbage"
            return found
        raise OSError(5, "Input/output error")

    llm = tiered(40, tmp_path)
    monkeypatch.setattr(os, "pwrite" if fault == "full disk" else "preadv", broken)
    twice(llm)
    assert llm.engine.totals.tiers.failed > 0


def test_f_10_memory_that_is_not_there_is_said_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_memory", lambda: 1 << 30)
    monkeypatch.setattr(room, "allocate", lambda *_: pytest.fail("pages were made"))
    with pytest.raises(ConfigError, match=r"offload.kv: 4.0 GiB of host memory .* 1.0 are free, so 3.0 are missing"):
        LLM(model("llama"), device="cpu", offload={"kv": 4 << 30})
    with pytest.raises(ConfigError, match=r"kv_offloading_size=2.5: 2.5 GiB .* so 1.5 are missing; give less"):
        LLM(model("llama"), device="cpu", kv_offloading_size=2.5)

    def refuse(*_: object, **__: object) -> None:
        raise OffloadError("64 KB of page-locked host memory cannot be had")

    monkeypatch.setattr(room, "aligned", refuse)
    with pytest.raises(OffloadError, match="cannot be had"):
        LLM(model("llama"), device="cpu", offload={"kv": 1 << 20})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": 1, "swap_space": 1}, "swap_space with offload.kv or kv_offloading_size"),
        ({"kv_offloading_size": 1, "offload_kv": "1GB"}, "offload.kv with kv_offloading_size"),
        ({"offload": {"kv_files": "1GB", "nvme": "."}}, "offload.kv_files without offload.kv"),
        ({"offload": {"kv_files": "1GB", "kv": "1GB"}}, "offload.kv_files without offload.nvme"),
        (
            {"offload": {"kv_files": "1GB", "kv": "1GB", "nvme": "."}, "enable_prefix_caching": False},
            "files hold prefixes",
        ),
        ({"offload": {"kv": 10}}, "offload.kv: less than one page"),
        ({"offload": {"kv": "1MB", "kv_files": 10, "nvme": "."}}, "offload.kv_files: less than one page"),
    ],
)
def test_what_does_not_go_together_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model("llama"), device="cpu", **options)


def test_cached_tokens_of_every_level_are_told() -> None:
    llm, params = tiered(300), SamplingParams(temperature=0, max_tokens=2)
    prompt, others = list(range(3, 60)), [[number] * (SMALL * BLOCK - 4) for number in range(3, 7)]
    (first,) = llm.generate(prompt, params)
    llm.generate(others, params, use_tqdm=False)
    (again,) = llm.generate(prompt, params)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    assert llm.engine.totals.tiers.host_hits == 48
    levels = llm.engine.levels
    assert (levels["host_hits"], levels["load_bytes"], levels["host_blocks"]) == (48, 3 * PAGE, 300)
    assert levels["device_queries"] == llm.engine.totals.prefix_queries
    assert LLM(model("llama"), device="cpu", num_blocks=9).engine.levels == {}
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def test_without_prefix_caching_it_is_for_preempted_requests_alone() -> None:
    llm = tiered(300, enable_prefix_caching=False, num_blocks=SMALL)
    assert_same(served(llm.engine, work(SHORTER), seed=1), expected("llama", SHORTER))
    assert llm.engine.totals.preemptions > 0
    assert llm.engine.totals.tiers.host_hits == 0
    assert llm.engine.totals.tiers.copied[Way.LOAD] > 0


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "in-turn"])
def test_aborts_and_errors_while_loading_leave_nothing(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiered(300, async_scheduling=ahead)
    twice(llm)
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=4)
    for number, prompt in enumerate(work(SHORTER).prompts):
        engine.add_request(f"gone {number}", prompt, params)
        engine.step()
        if number % 2:
            engine.abort(f"gone {number}")
        engine.scheduler.assert_consistent()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "_compute", lambda _: (_ for _ in ()).throw(ZeroDivisionError("a step fails")))
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert not engine.has_unfinished_requests
    assert engine.scheduler.tiers.num_in_flight == 0
    twice(llm)
