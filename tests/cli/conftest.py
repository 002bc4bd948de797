"""The command in this process, with its exit code."""

import sys
from pathlib import Path

import pytest

from outpace.cli.app import main
from tests.cli.command import Main


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """`main()` with its handling of errors: exit code, standard output, standard error."""

    def call(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outpace", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return call
