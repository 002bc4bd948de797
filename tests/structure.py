"""Pages made from the package itself: docs/files.md (one line for each file) and docs/structure.svg (a picture).

`scripts/structure` writes both; tests/test_docs.py compares them with the package.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

from tests.test_architecture import LINES, NO_TORCH, PACKAGE, imports, sources

DOCS = PACKAGE.parent / "docs"
WIDTH, GAP, BOX, HEAD, LINE = 1200, 10, 136, 50, 14
"""Pixels: the picture, space between boxes, a box of one room, its name and bar, a line of small text."""
LONGEST_BAR = 10_000
GREY = 'fill="#475569"'
EXPLANATION = (
    "Code imports only from its own row and the rows below. The number is lines of code, the small text the rooms that "
    "a room imports. Files in italics import no torch."
)
COLORS = ("#475569", "#b45309", "#0f766e", "#1d4ed8", "#7e22ce", "#be123c", "#4d7c0f", "#0e7490")


def first_sentence(tree: ast.Module) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    paragraph = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", paragraph)[0].rstrip(".")


def files_page() -> str:
    """docs/files.md."""
    rooms = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    sections = [f"## {room.relative_to(PACKAGE.parent).as_posix()}\n\n" + "\n".join(_files(room)) for room in rooms]
    source = "Written by `scripts/structure` from the first sentence of each file."
    together = "[structure.md](structure.md) says how they work together."
    return "\n\n".join(("# Every file of the package", f"{source} {together}", *sections)) + "\n"


def _files(room: Path) -> Iterator[str]:
    for path in sorted(room.glob("*.py"), key=lambda path: (path.stem != "__init__", path.stem)):
        sentence = first_sentence(ast.parse(path.read_text()))
        if sentence or path.stem != "__init__":
            yield f"- `{path.name}`: {sentence}" if sentence else f"- `{path.name}`"


class Part(NamedTuple):
    """A room or a file at the top of the package: its lines, and the rooms that it imports."""

    name: str
    lines: int
    uses: tuple[str, ...]
    is_room: bool


def parts() -> dict[str, Part]:
    """Every part of the package that exists, by name."""
    lines: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        lines[top] = lines.get(top, 0) + len(path.read_text().splitlines())
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    uses: dict[str, set[str]] = {name: set() for name in lines}
    for module, tree in sources().items():
        top = module.partition(".")[0]
        if top:
            uses[top] |= {name.split(".")[1] for name in imports(tree) if name.startswith("outpace.")} & rooms - {top}
    return {name: Part(name, lines[name], tuple(sorted(uses[name])), name in rooms) for name in lines}


def rounded(lines: int) -> str:
    """Lines of code as people say them, so that a small change is none: 100, 1.5k."""
    return f"{round(lines / 500) / 2:g}k" if lines >= 950 else f"{max(1, round(lines / 100)) * 100}"


def picture() -> str:
    """docs/structure.svg: rooms in the order in which they may import each other, with their size."""
    known = parts()
    shapes: list[str] = []
    y = 78
    for line, color in reversed(list(zip(LINES, COLORS, strict=True))):
        row, height = _row([known[name] for name in line if name in known and not name.startswith("_")], y, color)
        shapes += row
        y += height + 16
    total = rounded(sum(part.lines for part in known.values()))
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
            'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" fill="#1e293b">',
            f'<rect width="{WIDTH}" height="{y}" rx="12" fill="#ffffff"/>',
            _text(20, 34, 20, f"outpace: {total} lines of Python", 'font-weight="600"'),
            _text(20, 56, 13, EXPLANATION, GREY),
            f'<path d="M40 {y - 20} V200 M34 {y - 30} L40 {y - 20} L46 {y - 30}" fill="none" stroke="#94a3b8"/>',
            _text(0, 0, 13, "may import", f'{GREY} transform="translate(30 {y // 2 + 130}) rotate(-90)"'),
            *shapes,
            "</svg>\n",
        )
    )


def _row(row: list[Part], y: int, color: str) -> tuple[list[str], int]:
    """The boxes of one row, centred, and how high they are: a box for each room, one for all single files."""
    rooms = [part for part in row if part.is_room]
    files = [part for part in row if not part.is_room]
    texts = [textwrap.wrap(", ".join(part.uses), 22) for part in rooms]
    columns = min(3, -(-len(files) // 3))
    rows_of_files = -(-len(files) // columns) if files else 0
    height = HEAD + LINE * max(rows_of_files, *map(len, texts), 0)
    x = (WIDTH - len(rooms) * (BOX + GAP) - (columns * BOX if files else -GAP)) // 2
    shapes: list[str] = []
    for part, text in zip(rooms, texts, strict=True):
        shapes += _box(x, y, BOX, height, color, part.name, part.lines)
        shapes += [_text(x + 10, y + HEAD + LINE * i, 11, line, GREY) for i, line in enumerate(text)]
        x += BOX + GAP
    if files:
        shapes += _box(x, y, columns * BOX, height, color, "files", sum(part.lines for part in files))
    for i, part in enumerate(files):
        style = f'{GREY} font-style="italic"' if part.name in NO_TORCH else GREY
        column, line = i % columns, i // columns
        shapes.append(_text(x + 10 + column * BOX, y + HEAD + LINE * line, 11, f"{part.name}.py", style))
    return shapes, height


def _box(x: int, y: int, width: int, height: int, color: str, name: str, lines: int) -> list[str]:
    bar = max(2, round((width - 20) * min(lines, LONGEST_BAR) / LONGEST_BAR))
    right = f'text-anchor="end" fill="{color}"'
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" stroke="{color}" fill="{color}" '
        'fill-opacity="0.07"/>',
        _text(x + 10, y + 21, 15, name, 'font-weight="600"'),
        _text(x + width - 10, y + 21, 13, rounded(lines), right),
        f'<rect x="{x + 10}" y="{y + 28}" width="{bar}" height="3" rx="1.5" fill="{color}"/>',
    ]


def _text(x: int, y: int, size: int, text: str, attributes: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" {attributes}>{escape(text)}</text>'


def main() -> None:
    (DOCS / "files.md").write_text(files_page())
    (DOCS / "structure.svg").write_text(picture())


if __name__ == "__main__":
    main()
