"""What a soak has shown, as a table, as JSON, and as a part of a document."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sft_play.errors import UserError
from sft_play.files import write_text
from sft_play.soak.phases import PHASES
from sft_play.soak.processes import AGENT, LAUNCHER, PREPARATION
from sft_play.soak.state import Kill, State

LAST_TARGETS = (AGENT, LAUNCHER, PREPARATION, "everything")


def as_json(state: State) -> dict[str, Any]:
    """Returns what `JSON=1` prints: the totals of all chunks, and every kill."""
    unequal = [one for one in state.comparisons if not one.equal]
    return {
        "settings": dict(state.settings),
        "kills": len(state.kills),
        "inside_a_save": sum(kill.phase == "save" for kill in state.kills),
        "by_phase": dict(Counter(kill.phase for kill in state.kills)),
        "by_target": dict(Counter(kill.target for kill in state.kills)),
        "launches": state.launches,
        "runs": len(state.comparisons),
        "equal": len(state.comparisons) - len(unequal),
        "unequal": [asdict(one) for one in unequal],
        "problems": list(state.problems),
        "steps_lost": spread([kill.lost for kill in state.kills]),
        "over_seconds": spread([kill.over_seconds for kill in state.kills]),
        "seconds": round(state.seconds, 1),
        "every_kill": [asdict(kill) for kill in state.kills],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns mean and maximum."""
    return {"mean": round(sum(values) / len(values), 2) if values else 0.0, "max": max(values, default=0)}


def as_text(state: State) -> str:
    """Returns the table of kills by phase and target, and the totals below it, as Markdown."""
    targets = [*sorted({kill.target for kill in state.kills} - {*LAST_TARGETS}), *LAST_TARGETS]
    rows = [["phase", *targets, "all", "steps lost, mean (max)"]]
    for phase in (*PHASES, "all"):
        found = [kill for kill in state.kills if phase in (kill.phase, "all")]
        if found:
            rows.append(
                [phase, *(str(sum(k.target == target for k in found)) for target in targets), str(len(found)), _lost(found)]
            )
    result = as_json(state)
    over = result["over_seconds"]
    lines = [*_table(rows), ""]
    lines.append(
        f"{_how(state.settings)}: {len(state.kills)} kills, {result['inside_a_save']} of them inside a save; {state.launches} launches in "
        f"{state.seconds / 60:.0f} min; all processes gone after {over['mean']:.1f} s (at most {over['max']:.1f} s)."
    )
    equal, rows_compared = result["equal"], state.comparisons[0].rows if state.comparisons else 0
    lines.append(
        f"{equal} of {result['runs']} disturbed runs equal the undisturbed one to the bit ({rows_compared} rows each, every step once in "
        f"`metrics.jsonl` and TensorBoard); {len(state.problems)} other problems."
    )
    lines += [f"- run {one['run']}: {text}" for one in result["unequal"] for text in one["problems"]]
    lines += [f"- {text}" for text in state.problems]
    return "\n".join(lines)


def _lost(kills: Sequence[Kill]) -> str:
    found = spread([kill.lost for kill in kills])
    return f"{found['mean']:.1f} ({found['max']:.0f})"


def _how(settings: Mapping[str, Any]) -> str:
    extra = "".join(f" {word}" for word in settings["overrides"])
    return f"`{settings['strategy']}`, seed {settings['seed']}{extra}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def write_table(path: Path, state: State) -> None:
    """Puts the table into a document between its marks (`<!-- soak zero2 -->` to `<!-- end -->`), or writes a new file.

    Raises `UserError` for a file without them.
    """
    begin, end = marks(state)
    block = f"{begin}\n{as_text(state)}\n{end}"
    if not path.exists():
        write_text(path, block + "\n")
        return
    text = path.read_text(encoding="utf-8")
    whole = re.compile(
        rf"^{re.escape(begin)}$.*?^{re.escape(end)}$", re.MULTILINE | re.DOTALL
    )  # a text may speak of these marks, too
    if not whole.search(text):
        raise UserError(
            f"`{path}` exists and has no place for this table", hint=f"put the lines `{begin}` and `{end}` where it belongs"
        )
    write_text(path, whole.sub(lambda _: block, text, count=1))


def marks(state: State) -> tuple[str, str]:
    """Returns the lines between which a document holds this soak's table."""
    return f"<!-- soak {state.settings['strategy']} -->", "<!-- end -->"
