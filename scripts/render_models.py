"""`python -m scripts.render_models [FAMILY ...]`: writes the table of families in `docs/models.md` by taking tiny models of them the whole road.

All families take half an hour; with names, only their rows are made anew.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from tests.families import FAMILIES
from tests.family_runs import Road, travel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- begin families -->\n", "\n<!-- end -->"
HEAD = "| family | rows | LoRA `auto` adapts | `full` trains | memory by | made on |\n|---|---|---|---|---|---|"

LLAMAS = "down_proj, gate_proj, up_proj, k_proj, o_proj, q_proj, v_proj"


def row(name: str) -> str:
    """Returns a family's row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        lora, full = (travel(name, mode, Path(folder), Path(folder) / "cache") for mode in ("lora", "full"))
        plan = lora.plan or full.plan
        rows = "" if not plan else "packed" if plan.pack_tokens else plan.layout
        traced = plan and any("formulas do not know" in reason for reason in plan.reasons)
        memory = "" if not plan else "trace" if traced else "formula"
        cells = [f"`{name}`", rows, adapted_cell(lora), trained_cell(full), memory, f"{datetime.now(UTC):%Y-%m-%d}"]
    return f"| {' | '.join(cells)} |"


def adapted_cell(road: Road) -> str:
    """Returns the names of the layers that `auto` has adapted."""
    if road.at:
        return _stopped(road)
    names = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in road.adapted()))
    return "Llama's seven" if names == LLAMAS else names


def trained_cell(road: Road) -> str:
    """Returns which weights full tuning has left as they were."""
    if road.at:
        return _stopped(road)
    kept = dict.fromkeys(name.removesuffix(".weight") for name in road.untouched())
    return "all" if not kept else f"all but {_few(kept)}"


def _few(names: Iterable[str]) -> str:
    parts = list(dict.fromkeys(next((part for part in ("vision", "visual", "indexer") if part in name), name) for name in names))
    return ", ".join(f"`{part}`" for part in parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def _stopped(road: Road) -> str:
    said = re.sub(r"\S*/base/?\S*: ", "", road.refused.split("error: ")[-1].splitlines()[0] if road.refused else "")
    return f"{'refused' if road.at == 'plan' else f'fails ({road.at})'}: {said.replace('|', '/')[:160]}"


def main(names: list[str]) -> None:
    """Makes the rows of these families anew, each written as soon as it is known."""
    for name in names or FAMILIES:
        made = row(name)
        print(made, flush=True)
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        table, after = rest.split(END, 1)
        known = {line.split("`")[1]: line for line in table.splitlines()[2:]} | {name: made}
        lines = [HEAD, *(known[family] for family in FAMILIES if family in known)]
        PAGE.write_text(before + BEGIN + "\n".join(lines) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
