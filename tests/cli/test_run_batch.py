"""`outpace run-batch`: bad lines fail alone, answers are written as they come, and a run goes on where it ended."""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outpace import InputError, OutpaceError, StateError
from outpace.cli import run_batch
from tests.cli.command import run
from tests.cli.fake_openai import FakeOpenAI, served
from tests.models import CYCLE


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOpenAI]:
    monkeypatch.setattr(run_batch, "FIRST_DELAY", 0.01)
    with served(FakeOpenAI()) as server:
        yield server


def line(name: str, prompt: str = "hi", **more: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 4}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body, **more})


def records(path: Path) -> dict[str, Any]:
    """By custom id, or by the number of the line."""
    found = [json.loads(text) for text in path.read_text().splitlines()]
    return {record["custom_id"] or record["id"]: record for record in found}


def test_every_line_gets_its_answer_and_a_bad_one_fails_alone(fake: FakeOpenAI, tmp_path: Path) -> None:
    lines = [line("a"), line("b", "bad"), "{not json", line("c", method="GET"), "", line("d", url="/v1/files")]
    lines += [line("e", body={"stream": True}), line("a"), '{"custom_id": 3}', line("f", body=[]), line("g")]
    (tmp_path / "in").write_text("\n".join(lines))
    result = run("run-batch", tmp_path / "in", tmp_path / "out", "--url", fake.url, "--max-concurrency", "2")
    assert result.exit_code == 1
    assert "2 answered, 8 failed, 0 were there" in result.stderr
    found = records(tmp_path / "out")
    good = found["a"]
    assert good["error"] is None
    assert good["response"]["status_code"] == 200
    assert good["response"]["body"] == {"route": "completions", "choices": [{"text": "Hello wörld"}]}
    assert found["b"]["response"]["status_code"] == 400
    wrong = {name: record["error"]["message"] for name, record in found.items() if record["error"]}
    assert wrong.keys() == {"b", "c", "d", "e", "f", "line-3", "line-8", "line-9"}
    for name, said in (
        ("b", "prompt: bad"),
        ("c", "line 4: method: expected POST"),
        ("d", "line 6: url: expected one of"),
        ("e", "line 7: stream: a batch has no streams"),
        ("f", "line 10: body: expected an object"),
        ("line-3", "line 3 is not JSON"),
        ("line-8", "line 8: custom_id: 'a' is in another line too"),
        ("line-9", "line 9: expected an object with custom_id"),
    ):
        assert wrong[name].startswith(said)


def test_a_second_run_asks_only_for_what_is_missing(fake: FakeOpenAI, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join([line("a"), "{", line("b"), line("c")]))
    assert run("run-batch", source, target, "--url", fake.url).exit_code == 1
    whole = target.read_text().splitlines(keepends=True)
    kept = [text for text in whole if '"b"' not in text]
    target.write_text("".join(kept) + next(text for text in whole if '"b"' in text)[:20])  # as if killed within b
    fake.bodies.clear()
    result = run("run-batch", source, target, "--url", fake.url)
    assert result.exit_code == 1, "one failed in the run before"
    assert "1 answered, 0 failed, 3 were there (1 of them failed)" in result.stderr
    assert len(fake.bodies) == 1
    assert records(target).keys() == {"a", "b", "c", "line-2"}
    assert run("run-batch", source, target, "--url", fake.url).exit_code == 1
    assert len(fake.bodies) == 1


def test_a_busy_server_is_asked_again(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.busy = 2
    (tmp_path / "in").write_text(line("a"))
    assert run("run-batch", tmp_path / "in", tmp_path / "out", "--url", fake.url).exit_code == 0
    assert len(fake.bodies) == 3
    fake.busy = 100
    (tmp_path / "in").write_text(line("b"))
    assert run("run-batch", tmp_path / "in", tmp_path / "out", "--url", fake.url).exit_code == 1
    assert records(tmp_path / "out")["b"]["error"] == {"code": "503", "message": "not now"}


def test_a_server_that_is_not_there_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_batch, "FIRST_DELAY", 0.0)
    (tmp_path / "in").write_text(line("a"))
    result = run("run-batch", tmp_path / "in", tmp_path / "out", "--url", "http://127.0.0.1:9")
    assert isinstance(result.exception, OutpaceError)
    assert "run the same command again to continue" in str(result.exception)
    assert (tmp_path / "out").read_text() == ""


def test_item_11_a_wrong_key_ends_the_batch_and_spoils_no_line(fake: FakeOpenAI, tmp_path: Path) -> None:
    fake.key = "right"
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join([line("a"), line("b")]))
    result = run("run-batch", source, target, "--url", fake.url, "--api-key", "wrong")
    assert isinstance(result.exception, OutpaceError)
    assert "api_key: the server refuses it (401)" in str(result.exception)
    assert target.read_text() == ""
    assert run("run-batch", source, target, "--url", fake.url, "--api-key", "right").exit_code == 0
    assert records(target).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        (("none", "out"), (), "in: cannot read"),
        (("in", "in"), (), "out: the same file as in"),
        (("in", "no/out"), (), "out: there is no folder"),
        (("in", "other"), (), "out: line 1 of .* is no answer of a batch"),
        (("in", "out"), ("model",), "model, dtype, device, served-model-name: the server at url has its own"),
        (("in", "out"), ("--served-model-name", "x"), "served-model-name: the server at url has its own"),
        (("in", "folder"), (), "out: .*folder is not a file"),
    ],
)
def test_files_that_cannot_be_used(names: tuple[str, str], options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line("a"))
    (tmp_path / "other").write_text("my notes\n")
    (tmp_path / "folder").mkdir()
    result = run("run-batch", *(tmp_path / name for name in names), *options, "--url", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=said):
        raise result.exception or AssertionError


def test_item_11_a_line_that_is_not_json_for_everybody_fails_alone(fake: FakeOpenAI, tmp_path: Path) -> None:
    """Python reads half of a surrogate pair, NaN and 1e999, but cannot write them as JSON."""
    source, target = tmp_path / "in", tmp_path / "out"
    lines = [
        line("a"),
        line("\ud800"),
        line("b", "\ud800"),
        line("c").replace("4", "NaN"),
        line("d").replace("4", "1e999"),
    ]
    lines += [line("e", body={"deep": None}).replace("null", "[" * 900 + "]" * 900), line("f")]
    source.write_text("\n".join(lines))
    command = ("run-batch", source, target, "--url", fake.url)
    assert run(*command).exit_code == 1
    assert len(fake.bodies) <= 3
    found = records(target)
    assert found.keys() == {"a", "line-2", "b", "c", "d", "e", "f"}
    assert found["a"]["error"] is found["f"]["error"] is None
    for name, said in (
        ("line-2", r"line 2: custom_id: '\ud800' has half of a surrogate pair"),
        ("b", "line 3: body: a text has half of a surrogate pair"),
        ("c", "line 4: body: NaN, Infinity and numbers beyond 1e308 are not JSON"),
        ("d", "line 5: body: NaN, Infinity and numbers beyond 1e308 are not JSON"),
    ):
        assert found[name]["error"]["message"].startswith(said)
    before = target.read_bytes()
    assert "0 answered, 0 failed, 7 were there" in run(*command).stderr
    assert target.read_bytes() == before


@pytest.mark.parametrize(
    ("reply", "code", "text"),
    [
        (b'{"text": "\\ud800"}', None, "\ud800"),
        (b'{"text": NaN}', "invalid_answer", None),
        (b"<html>", "invalid_answer", None),
    ],
)
def test_item_11_an_answer_that_is_not_json_fails_alone(
    reply: bytes, code: str | None, text: str | None, fake: FakeOpenAI, tmp_path: Path
) -> None:
    fake.reply = reply
    (tmp_path / "in").write_text(line("a"))
    assert run("run-batch", tmp_path / "in", tmp_path / "out", "--url", fake.url).exit_code == (1 if code else 0)
    (record,) = records(tmp_path / "out").values()
    assert (record["error"] and record["error"]["code"]) == code
    assert record["response"]["body"].get("text") == text


def test_item_11_two_runs_on_one_output_file(fake: FakeOpenAI, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a"))
    (tmp_path / "link").symlink_to(target)
    target.write_text('{"half')  # the first run may be writing this line now
    with locked_by_another_process(target):
        for name in ("out", "link"):
            result = run("run-batch", source, tmp_path / name, "--url", fake.url)
            assert isinstance(result.exception, StateError)
            assert f"out: another run-batch writes to {tmp_path / name}" in str(result.exception)
    assert (target.read_text(), fake.bodies) == ('{"half', [])
    assert run("run-batch", source, target, "--url", fake.url).exit_code == 0
    assert records(target).keys() == {"a"}


@contextmanager
def locked_by_another_process(target: Path) -> Iterator[None]:
    """Another run-batch has the file."""
    code = "import sys, filelock\nwith filelock.FileLock(sys.argv[1] + '.lock'): print(flush=True), sys.stdin.read()"
    command = [sys.executable, "-c", code, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate()


def test_item_11_a_custom_id_that_looks_like_the_number_of_a_broken_line(fake: FakeOpenAI, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join([line("line-2"), "{"]))
    assert run("run-batch", source, target, "--url", fake.url).exit_code == 1
    whole = target.read_text().splitlines(keepends=True)
    assert len({json.loads(text)["id"] for text in whole}) == 2
    for kept in whole:  # as if the run had ended after either record
        target.write_text(kept)
        run("run-batch", source, target, "--url", fake.url)
        assert sorted(target.read_text().splitlines(keepends=True)) == sorted(whole)


def test_item_11_a_full_disk_is_an_error_and_the_run_goes_on_later(fake: FakeOpenAI, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(str(number)) for number in range(5)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))  # the system writes a part of a line, then refuses
    try:
        result = run("run-batch", source, target, "--url", fake.url, "--max-concurrency", "1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert type(result.exception) is OutpaceError
    said = f"out: cannot write to {target} (File too large); mend that and run the same command again to continue"
    assert str(result.exception) == said
    assert 0 < len(records(target)) < 5
    assert run("run-batch", source, target, "--url", fake.url).exit_code == 0
    assert len(fake.bodies) == 6  # the one that could not be written was asked for again
    assert len(target.read_text().splitlines()) == 5


def test_item_24_a_model_of_its_own_and_the_names_that_requests_may_give_it(
    chain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_API_KEYS", "some-key")
    chat = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    lines = [line(name, body={"model": name, "prompt": "E", "temperature": 0}) for name in ("one", "two", "other")]
    lines += [line("unnamed", body={"prompt": "E", "temperature": 0}), line("empty", body={"prompt": ""})]
    lines.append(line("chat", url="/v1/chat/completions", body=chat))
    (tmp_path / "in").write_text("\n".join(lines))
    names = ("--served-model-name", "one", "--served-model-name", "two")
    result = run("run-batch", tmp_path / "in", tmp_path / "out", chain_folder, *names, "--device", "cpu")
    assert result.exit_code == 1, result.output
    found = {name: record["response"] for name, record in records(tmp_path / "out").items()}
    status = {"one": 200, "two": 200, "other": 404, "unnamed": 200, "empty": 400, "chat": 200}
    assert {name: response["status_code"] for name, response in found.items()} == status
    assert found["two"]["body"]["choices"][0]["text"] == found["unnamed"]["body"]["choices"][0]["text"] == "NDx"
    assert found["chat"]["body"]["choices"][0]["message"]["content"] == CYCLE
