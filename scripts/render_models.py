"""`python -m scripts.render_models [FAMILY ...]`: writes the table of families in `docs/models.md` by running tiny models of them end to end.

All families take half an hour; with names, only theirs are made again.
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
BEGIN, END = "<!-- begin families -->\n", "\n<!-- end -->"
HEAD = "| families | rows | LoRA `auto` adapts | `full` trains |\n|---|---|---|---|"

SHORT = {"MLP": "down_proj, gate_proj, up_proj", "attention": "k_proj, o_proj, q_proj, v_proj"}
"""Word of the table -> the layers that most families have."""


def cells(name: str) -> tuple[str, ...]:
    """Return what the table says of a family."""
    with tempfile.TemporaryDirectory() as folder:
        lora, full = (travel(name, mode, Path(folder), Path(folder) / "cache") for mode in ("lora", "full"))
        plan = lora.plan or full.plan
        rows = "" if not plan else "packed" if plan.pack_tokens else plan.layout
        return rows, adapted_cell(lora), trained_cell(full)


def read_table(page: str) -> dict[str, tuple[str, ...]]:
    """Return family -> its cells in the page."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    split = [line.strip("| ").split(" | ") for line in lines]
    return {name: tuple(rest) for first, *rest in split for name in re.findall(r"`(\w+)`", first)}


def table(known: Mapping[str, tuple[str, ...]]) -> str:
    """Return the table, one row for all families that are alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for family in FAMILIES:
        if family in known:
            alike.setdefault(known[family], []).append(f"`{family}`")
    return "\n".join([HEAD, *(f"| {' | '.join([', '.join(names), *found])} |" for found, names in alike.items())])


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


def main(names: list[str]) -> None:
    """Make the rows of these families anew, each written as soon as it is known."""
    for name in names or FAMILIES:
        page = PAGE.read_text(encoding="utf-8")
        known = read_table(page) | {name: cells(name)}
        print(f"{name}: {' | '.join(known[name])}", flush=True)
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        PAGE.write_text(before + BEGIN + table(known) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
