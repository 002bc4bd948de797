"""What documents say is true: commands and examples run, figures have results, generated pages are up to date."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from outpace.cli.app import app
from outpace.config.describe import markdown
from outpace.inject.policies import POLICIES
from tests import structure

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
GENERATED = {
    "docs/configuration.md": (markdown, "python -m outpace.config.describe > docs/configuration.md"),
    "docs/files.md": (structure.files_page, "scripts/structure"),
    "docs/structure.svg": (structure.picture, "scripts/structure"),
}
EXAMPLES = [
    example for text in (README, DOCS["requests.md"]) for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
INDENTED = re.findall(
    r"^    ((?:scripts/|outpace ).*)$",
    README.split("## Where things are")[0] + DOCS["commands.md"],
    re.MULTILINE,
)
COMMANDS = list(dict.fromkeys(line.split("#")[0].strip() for line in INDENTED))
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
    'outpace complete "The sea is" --max-tokens 20': ("tests/cli/test_chat.py", r'"complete"'),
    "outpace chat --url http://127.0.0.1:8000": ("tests/cli/test_chat.py", r'"chat"'),
    "outpace run-batch in.jsonl out.jsonl": ("tests/cli/test_run_batch.py", r'"run-batch"'),
    "outpace bench latency --input-len 16 --output-len 16": ("tests/cli/test_bench.py", r'"latency"'),
    "outpace bench serve --url http://127.0.0.1:8000": ("tests/bench/test_serve.py", r'"bench", "serve"'),
    "outpace bench pipeline --pp 2": ("tests/bench/test_pipeline.py", r'"pipeline"'),
}
"""Commands that a test beside their code runs, and where."""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, text=True, capture_output=True, check=False
    )


@pytest.mark.parametrize("page", GENERATED)
def test_generated_pages_are_up_to_date(page: str) -> None:
    make, command = GENERATED[page]
    assert (ROOT / page).read_text() == make(), f"run: {command}"


def commands_of(command: Any, path: str) -> Iterator[str]:
    """`outpace NAME` of every command that does something, subcommands too."""
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from commands_of(each, f"{path} {name}")
    else:
        yield path


@pytest.mark.parametrize("command", list(commands_of(typer.main.get_command(app), "outpace")))
def test_every_command_is_in_the_documents(command: str) -> None:
    assert any(re.search(rf"{command}\b(?!-)", text) for text in (README, *DOCS.values()))


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
    for name in re.findall(r"^      ([\w./]+)|· ([\w./]+):", tree, re.MULTILINE):
        assert (ROOT / "outpace" / "".join(name)).exists(), name


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{name}" for name in DOCS)])
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for name, section in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), name
        if section:
            assert section in anchors(target.read_text()), f"{name}#{section}"


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_names_in_the_recipes_exist() -> None:
    """Files, and `Class.member` of the file that was named last before it."""
    where = ""
    for name in re.findall(r"`([\w./]+)`", (ROOT / "CONTRIBUTING.md").read_text()):
        if "/" in name and name.endswith(".py"):
            where = (ROOT / name).read_text()
        elif member := re.fullmatch(r"[A-Z][a-z]\w+\.(\w+)", name):
            assert re.search(rf"\b{member[1]}\b", where), name


def test_the_index_has_every_page() -> None:
    assert set(re.findall(r"\]\((\w[\w-]*\.md)\)", DOCS["README.md"])) == DOCS.keys() - {"README.md"}


def test_the_list_of_models_has_every_policy() -> None:
    listed = set(re.findall(r"`(\w+)`", DOCS["models.md"].split("| layer classes |")[1]))
    assert listed == {layer.split(".")[-1] for policy in POLICIES for layer in policy.layers}


# Figures of README, by bench/figures.toml

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
FIGURES: Mapping[str, Mapping[str, list[str]]] = tomllib.loads((ROOT / "bench/figures.toml").read_text())


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every table, headers first, without the line of dashes."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    rows = [[line.strip("|").split(" | ") for line in block.splitlines()] for block in blocks]
    return [[[cell.strip() for cell in row] for row in table if set("".join(row)) != {"-", "|"}] for table in rows]


def shown() -> dict[tuple[str, str], list[str]]:
    """The numbers of each row of the tables of figures, as README shows them."""
    section = README.split("## Figures")[1].split("\n## ")[0]
    return {(table[0][0], row[0]): NUMBER.findall(" ".join(row[1:])) for table in tables(section) for row in table[1:]}


def anchor(model: str, system: str, column: str) -> float:
    """A figure of another system; a row without a model belongs to the model above it."""
    for header, *rows in tables((ROOT / "bench/anchors.md").read_text()):
        name = ""
        for row in rows:
            name = row[0] or name
            if (name, row[1]) == (model, system) and column in header:
                return float(NUMBER.findall(row[header.index(column)])[0].replace(",", ""))
    raise LookupError(f"{model}, {system}, {column}")


def source(reference: str) -> float:
    """What a reference of bench/figures.toml says."""
    file, *path = reference.split(" / ")
    if file == "anchor":
        return anchor(*path)
    rows: list[dict[str, Any]] = json.loads((ROOT / f"bench/results/{file}.json").read_text())["rows"]
    name, column = path
    (row,) = [row for row in rows if (row.get("what") or f"{row.get('case')}, {row.get('work')}") == name]
    return float(row[column])


def test_every_figure_of_the_readme_has_a_source() -> None:
    assert shown().keys() == {(table, row) for table, rows in FIGURES.items() for row in rows}


@pytest.mark.parametrize(("table", "row"), [(table, row) for table, rows in FIGURES.items() for row in rows])
def test_figures_of_the_readme_are_those_of_the_results(table: str, row: str) -> None:
    for number, reference in zip(shown()[table, row], FIGURES[table][row], strict=True):
        decimals = len(number.partition(".")[2])
        value = source(reference)
        assert abs(float(number.replace(",", "")) - value) <= 0.5000001 * 10**-decimals, f"{number}: {reference}"
