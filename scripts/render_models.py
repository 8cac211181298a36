"""`python -m scripts.render_models [kept] [FAMILY ...]`: writes the tables of families in `docs/models.md` by running
tiny models of them.

All families take half an hour; with names, only theirs are made again. `kept` makes the second table only, in two
minutes.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.families import FAMILIES
from tests.family_facts import facts_of
from tests.family_runs import Road, travel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
END = "\n<!-- end -->"


class Table(NamedTuple):
    """A table of the page."""

    begin: str
    head: str


TUNED = Table(
    "<!-- begin families -->\n", "| families | rows | LoRA `auto` adapts | `full` trains |\n|---|---|---|---|"
)
COLUMNS = (
    "families",
    "base's own, known to its class",
    "stops",
    "router loss",
    "rotary angles",
    "decayed without a matrix",
)
KEPT = Table("<!-- begin kept -->\n", f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")

SHORT = {"MLP": "down_proj, gate_proj, up_proj", "attention": "k_proj, o_proj, q_proj, v_proj"}
"""Word of the table -> the layers that most families have."""


def cells(name: str) -> tuple[str, ...]:
    """Return what the table says of a family."""
    with tempfile.TemporaryDirectory() as folder:
        lora, full = (travel(name, mode, Path(folder), Path(folder) / "cache") for mode in ("lora", "full"))
        plan = lora.plan or full.plan
        rows = "" if not plan else "packed" if plan.pack_tokens else plan.layout
        return rows, adapted_cell(lora), trained_cell(full)


def kept_cells(name: str) -> tuple[str, ...]:
    """Return what the second table says of a family."""
    with tempfile.TemporaryDirectory() as folder:
        return facts_of(name, Path(folder))


def read_table(page: str, table: Table = TUNED) -> dict[str, tuple[str, ...]]:
    """Return family -> its cells in the page."""
    lines = page.partition(table.begin)[2].partition(END)[0].splitlines()[2:]
    split = [line.strip("| ").split(" | ") for line in lines]
    return {name: tuple(rest) for first, *rest in split for name in re.findall(r"`(\w+)`", first)}


def write_table(table: Table, known: Mapping[str, tuple[str, ...]]) -> None:
    """Write the table into the page, one row for all families that are alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for family in FAMILIES:
        if family in known:
            alike.setdefault(tuple(known[family]), []).append(f"`{family}`")
    rows = "\n".join([table.head, *(f"| {' | '.join([', '.join(names), *found])} |" for found, names in alike.items())])
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(table.begin)
    PAGE.write_text(before + begin + rows + END + rest.partition(END)[2], encoding="utf-8")


def adapted_cell(road: Road) -> str:
    """Return the names of the layers that `auto` has adapted."""
    if road.at:
        return _stopped(road)
    names = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in road.adapted()))
    for word, layers in SHORT.items():
        names = re.sub(rf"\b{layers}", word, names)
    return names


def trained_cell(road: Road) -> str:
    """Return which weights full tuning has left as they were."""
    if road.at:
        return _stopped(road)
    kept = dict.fromkeys(name.removesuffix(".weight") for name in road.untouched())
    return "all" if not kept else f"all but {_few(kept)}"


def _few(names: Iterable[str]) -> str:
    parts = sorted({next((part for part in ("vision", "visual", "indexer") if part in name), name) for name in names})
    return ", ".join(f"`{part}`" for part in parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def _stopped(road: Road) -> str:
    said = re.sub(r"\S*/base/?\S*: ", "", road.refused.split("error: ")[-1].splitlines()[0] if road.refused else "")
    return f"{'refused' if road.at == 'plan' else f'fails ({road.at})'}: {said.replace('|', '/')[:160]}"


def main(words: list[str]) -> None:
    """Make the rows of these families anew, each written as soon as it is known."""
    names = [word for word in words if word != "kept"]
    for name in names or FAMILIES:
        for table, made in ((KEPT, kept_cells), *(() if "kept" in words else ((TUNED, cells),))):
            known = read_table(PAGE.read_text(encoding="utf-8"), table) | {name: made(name)}
            print(f"{name}: {' | '.join(known[name])}", flush=True)
            write_table(table, known)


if __name__ == "__main__":
    main(sys.argv[1:])
