"""Pictures of results: `python -m bench.plot bench/results/kernels_h200_2026-11-15.json` writes the .png beside it."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"1b": "#9ecae1", "8b": "#4292c6", "70b": "#084594"}


def kernels(content: dict[str, Any], path: Path) -> None:
    """Each kernel's fraction of its limit, a bar for each shape."""
    rows = content["rows"][::-1]
    figure, axis = plt.subplots(figsize=(10, 0.26 * len(rows) + 1.2))
    names = [f"{row['model']}  {row['kernel']}: {row['what']}" for row in rows]
    axis.barh(names, [row["of limit"] for row in rows], color=[COLOURS[row["model"]] for row in rows])
    for place, row in enumerate(rows):
        axis.text(row["of limit"] + 0.01, place, f"{row['us']:.0f} us", va="center", fontsize=7)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.axvline(0.85, color="grey", linewidth=0.8, linestyle=":")
    axis.set_xlim(0, 1.15)
    axis.set_xlabel("fraction of what the device was measured to do (bytes read, bytes copied, or bf16 products)")
    axis.set_title(f"Kernels on {content['device']}, {content['date']}", loc="left")
    axis.tick_params(axis="y", labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Draw every file named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        kernels(json.loads(path.read_text()), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
