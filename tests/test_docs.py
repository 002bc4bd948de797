"""What the documents say is true: commands and examples of README and guide run, tables are up to date."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.config.describe import markdown

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = [
    example
    for text in (README, (ROOT / "docs/requests.md").read_text())
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
INDENTED = re.findall(r"^    ((?:scripts/|outpace ).*)$", README.split("## Where things are")[0], re.MULTILINE)
COMMANDS = [line.split("#")[0].strip() for line in INDENTED]
RUN_ELSEWHERE = {
    "scripts/test": (".ci/run", r"^(time )?scripts/test$"),  # running it here would never end
    "outpace verify": ("tests/cli/test_verify.py", r"def test_the_default_model"),
    """outpace eval --dtype bf16 --against-config '{"dtype": "fp32"}'""": (
        *("tests/cli/test_eval.py", r"def test_the_default_model"),
    ),
    "outpace shard --tp 2 --out shards": ("tests/cli/test_shard.py", r"def test_a_summary_for_people"),
    "outpace quantize --scheme int4 --out small": ("tests/cli/test_quantize.py", r"def test_a_summary_for_people"),
    "outpace deploy --ray": ("tests/deploy/test_cluster.py", r"def test_a_cluster_that_is_started_here"),
    "outpace serve": ("tests/cli/test_serve.py", r"def test_a_server_answers_and_ends_with_0"),
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, text=True, capture_output=True, check=False
    )


def test_the_options_document_is_the_generated_one() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == markdown(), (
        "run: python -m outpace.config.describe > docs/configuration.md"
    )


def test_the_readme_has_its_commands_and_examples() -> None:
    assert {"scripts/demo", "scripts/test", "outpace info", "outpace models"} <= set(COMMANDS)
    assert len(EXAMPLES) >= 4


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.usefixtures("default_model_folder")
@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in RUN_ELSEWHERE])
def test_commands_of_the_readme_run(command: str) -> None:
    done = run(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "generate" in command or "demo" in command:
        assert "tokens/s" in done.stderr
        assert "first token after" in done.stderr


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.usefixtures("default_model_folder")
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: str) -> None:
    done = run(sys.executable, "-c", example)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 5
    if "capital of France" in example:
        assert "Paris" in done.stdout


@pytest.mark.parametrize("command", RUN_ELSEWHERE)
def test_what_is_not_run_here_is_run_elsewhere(command: str) -> None:
    file, pattern = RUN_ELSEWHERE[command]
    assert command in COMMANDS
    assert re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)


def test_files_the_readme_names_exist() -> None:
    tree = README.split("## Where things are")[1]
    for name in re.findall(r"^      ([\w./]+)", tree, re.MULTILINE):
        assert (ROOT / "outpace" / name).exists(), name
    for name in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / name).exists(), name
