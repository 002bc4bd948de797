"""The parts of the soak that judge: what they must see, and what they must not overlook."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.soak import __main__ as soak_main
from bench.soak.client import Answer, Ledger, outcomes
from bench.soak.leaks import Sample, growth, positive_control
from bench.soak.row import Result, Soak, percentile
from bench.soak.streams import differences

NAMES = ("done", "rejected", "cancelled", "failed", "invalid")


@given(pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=6), cut=st.integers(0, 5))
def test_chunks_are_read_and_a_missing_end_is_seen(pieces: list[bytes], cut: int) -> None:
    data = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    found = answered("HTTP/1.1 200 x\ntransfer-encoding: chunked", data[: len(data) - cut])
    assert (found.body, found.whole) == (b"".join(pieces), not cut)


def answered(head: str, body: bytes) -> Answer:
    answer = Answer(0.0)
    answer.parse(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    return answer


def test_outcomes_of_answers() -> None:
    def plain(status: int, body: bytes = b"{}", length: int = 2) -> str:
        return answered(f"HTTP/1.1 {status} x\ncontent-length: {length}", body).outcome

    assert [plain(status) for status in (200, 400, 429, 503, 500)] == [
        *("done", "invalid", "rejected", "rejected", "failed")
    ]
    assert plain(200, length=3) == "lost"
    head = "HTTP/1.1 200 x\ncontent-type: text/event-stream\ntransfer-encoding: chunked"

    def stream(text: bytes) -> str:
        return answered(head, b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text)).outcome

    assert stream(b"data: {}\n\ndata: [DONE]\n\n") == "done"
    assert stream(b'data: {"error":{}}\n\ndata: [DONE]\n\n') == "failed"
    assert stream(b"data: {}\n\n") == "lost"
    assert Answer(0.0).outcome == "lost"


@given(ends=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 50), min_size=1), name=st.sampled_from(NAMES))
def test_n1_a_ledger_agrees_with_the_same_counts_alone(ends: dict[str, int], name: str) -> None:
    ledger = Ledger(sum(ends.values()), Counter(ends))
    assert ledger.agrees(ends)
    assert not ledger.agrees({**ends, name: ends.get(name, 0) + 1})
    assert not Ledger(ledger.sent + 1, Counter(ends)).agrees(ends)
    assert not Ledger(ledger.sent + 1, Counter({**ends, "lost": 1})).agrees({**ends, name: ends.get(name, 0) + 1})


def test_n1_a_request_that_was_left_may_have_ended_before() -> None:
    ledger = Ledger(5, Counter(done=3, cancelled=2))
    assert ledger.agrees({"done": 4, "cancelled": 1})
    assert not ledger.agrees({"done": 2, "cancelled": 3})


def test_counts_of_the_metrics_are_found() -> None:
    text = 'outpace:http_requests_total{model_name="a b",outcome="done"} 1200.0\nother{outcome="done"} 1.0\n'
    assert outcomes(text) == {"done": 1200}


@pytest.mark.parametrize(
    ("later", "leaks"),
    [
        ((149.0, 9, 3), False),
        ((151.0, 9, 3), True),
        ((100.0, 10, 3), True),
        ((100.0, 9, 4), True),
        ((90.0, 8, 2), False),
    ],
)
def test_l5_growth_of_memory_files_and_threads_is_seen(later: tuple[float, int, int], leaks: bool) -> None:
    before = [Sample(0.0, 100.0, 9, 3)] * 5
    after = [Sample(9.0, *later)] * 5
    assert growth(before, after).leaks == leaks


def test_l5_a_deliberate_leak_is_caught() -> None:
    found = asyncio.run(positive_control(0.4))
    assert found.leaks
    assert min(found.rss_mb, found.fds, found.threads) > 0


@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=30), percent=st.integers(1, 100))
def test_a_percentile_has_so_many_values_below(values: list[float], percent: int) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100


def test_counts_are_the_full_ones_from_ten_minutes_on() -> None:
    here = Path()
    assert [Soak(here, here, minutes=minutes).count(200) for minutes in (0.001, 1, 10, 60)] == [1, 20, 200, 200]
    assert [Soak(here, here, minutes=minutes).seconds(60) for minutes in (0.001, 5, 20)] == [1.0, 30.0, 120.0]


CHOICE = {"index": 0, "text": "abc", "finish_reason": "stop"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 2}
PLAIN = Answer(0.0, status=200, whole=True, body=json.dumps({"choices": [CHOICE], "usage": USAGE}).encode())


def streamed(*texts: str, reasons: int = 1, usage: object = USAGE) -> Answer:
    parts = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts]
    parts += [{"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}] * reasons
    events = [*parts, {"choices": [], "usage": usage}]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    return Answer(0.0, status=200, whole=True, headers={"content-type": "text/event-stream"}, body=body)


@pytest.mark.parametrize(
    ("stream", "word"),
    [
        (streamed("a", "bc"), ""),
        (streamed("a", "b"), "text"),
        (streamed("abc", reasons=2), "finish reasons"),
        (streamed("abc", reasons=0), "finish reasons"),
        (streamed("abc", usage={"prompt_tokens": 2}), "usage"),
        (Answer(0.0), "lost"),
        (PLAIN, "[DONE]"),
    ],
)
def test_n2_what_a_stream_has_wrong_is_seen(stream: Answer, word: str) -> None:
    found = differences(PLAIN, stream)
    assert (word in found[0]) if word else found == []


def test_a_failed_row_fails_the_run_and_results_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def row(soak: Soak) -> Result:
        soak.details["overload"] = {"accepted": [[0.0, 1.0]], "rejected": [[0.0, 0.01]]}
        return Result("none", "as measured", soak.minutes > 5, "1 run")

    monkeypatch.setattr(soak_main, "OWN", {"F-3": row})
    codes = []
    for minutes in ("10", "1"):
        monkeypatch.setattr("sys.argv", ["soak", "--minutes", minutes, "--only", "F-3", "--out", str(tmp_path)])
        codes.append(soak_main.main())
    assert codes == [0, 1]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".png"]
    (found,) = tmp_path.glob("soak_cpu_*.json")
    (written,) = json.loads(found.read_text())["rows"]
    assert (written["row"], written["passed"], written["measured"]) == ("F-3", "FAIL", "as measured")
    assert "as measured" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["soak", "--only", "X-1"])
    with pytest.raises(SystemExit):
        soak_main.main()
