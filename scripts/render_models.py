"""Write the table of families in `docs/models.md` by running tiny models of them.

`python -m scripts.render_models [FAMILY ...]` takes half an hour for all families; with names, only their rows are
measured again.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.families import FAMILIES
from tests.family_runs import Road, travel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN = "<!-- begin families -->\n"
HEAD = "| families | rows | LoRA `auto` adapts | `full` trains |\n|---|---|---|---|"
END = "\n<!-- end -->"
SHORT = {"MLP": "down_proj, gate_proj, up_proj", "attention": "k_proj, o_proj, q_proj, v_proj"}
"""Short name in the table -> layers that most families have."""


def cells(name: str) -> tuple[str, ...]:
    """Return a family's cells of the table."""
    with tempfile.TemporaryDirectory() as folder:
        lora, full = (travel(name, mode, Path(folder), Path(folder) / "cache") for mode in ("lora", "full"))
        plan = lora.plan or full.plan
        rows = "" if not plan else "packed" if plan.pack_tokens else plan.layout
        return rows, adapted_cell(lora), trained_cell(full)


def read_table(page: str) -> dict[str, tuple[str, ...]]:
    """Return family -> its cells on the page."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    split = [line.strip("| ").split(" | ") for line in lines]
    return {name: tuple(rest) for first, *rest in split for name in re.findall(r"`(\w+)`", first)}


def write_table(cells_of: Mapping[str, tuple[str, ...]]) -> None:
    """Write the table into the page, with one row for all families that have the same cells."""
    same_cells: dict[tuple[str, ...], list[str]] = {}
    for family in FAMILIES:
        if family in cells_of:
            same_cells.setdefault(tuple(cells_of[family]), []).append(f"`{family}`")
    rows = "\n".join(
        [HEAD, *(f"| {' | '.join([', '.join(names), *row_cells])} |" for row_cells, names in same_cells.items())]
    )
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + begin + rows + END + rest.partition(END)[2], encoding="utf-8")


def adapted_cell(road: Road) -> str:
    """Return the names of the layers that `auto` adapted."""
    if road.at:
        return _stopped(road)
    names = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in road.adapted()))
    for word, layers in SHORT.items():
        names = re.sub(rf"\b{layers}", word, names)
    return names


def trained_cell(road: Road) -> str:
    """Return which weights full tuning did not change."""
    if road.at:
        return _stopped(road)
    untouched = dict.fromkeys(name.removesuffix(".weight") for name in road.untouched())
    return "all" if not untouched else f"all but {_few(untouched)}"


def _few(names: Iterable[str]) -> str:
    parts = sorted({next((part for part in ("vision", "visual", "indexer") if part in name), name) for name in names})
    return ", ".join(f"`{part}`" for part in parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def _stopped(road: Road) -> str:
    reason = re.sub(r"\S*/base/?\S*: ", "", road.refused.split("error: ")[-1].splitlines()[0] if road.refused else "")
    return f"{'refused' if road.at == 'plan' else f'fails ({road.at})'}: {reason.replace('|', '/')[:160]}"


def main(words: list[str]) -> None:
    """Measure the rows of these families again, and write each as soon as it is known."""
    for name in words or FAMILIES:
        cells_of = read_table(PAGE.read_text(encoding="utf-8")) | {name: cells(name)}
        print(f"{name}: {' | '.join(cells_of[name])}", flush=True)
        write_table(cells_of)


if __name__ == "__main__":
    main(sys.argv[1:])
