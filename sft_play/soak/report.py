"""What a soak has shown: kept in one file, compared with the undisturbed run, as a table, as JSON, in a document."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sft_play.config.reader import record_of
from sft_play.errors import UserError
from sft_play.files import read_json, read_json_lines, write_json
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder
from sft_play.text import markdown_table

STARTING, SAVING = "starting", "saving"
PHASES = (STARTING, "loading", "training", "evaluating", SAVING, "leaving")
"""What rank 0 writes to `phase.json`, in the order of a run; before it does, `starting`."""
EVERYTHING = "everything"


def as_json(state: State) -> dict[str, Any]:
    """Return what `JSON=1` prints: the totals of all chunks, and every kill."""
    unequal = [one for one in state.comparisons if not one.equal]
    return {
        "settings": dict(state.settings),
        "kills": len(state.kills),
        "inside_a_save": sum(kill.phase == SAVING for kill in state.kills),
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
    """Return mean and maximum."""
    return {"mean": round(sum(values) / len(values), 2) if values else 0.0, "max": max(values, default=0)}


def as_text(state: State) -> str:
    """Return the table of kills by phase, and the totals below it, as Markdown."""
    rows = [["phase", "kills", "steps lost, mean (max)"]]
    for phase in (*PHASES, "all"):
        if found := [kill for kill in state.kills if phase in (kill.phase, "all")]:
            lost = spread([kill.lost for kill in found])
            rows.append([phase, str(len(found)), f"{lost['mean']:.1f} ({lost['max']:.0f})"])
    result = as_json(state)
    over, seed = result["over_seconds"], " ".join([str(state.settings["seed"]), *state.settings["overrides"]])
    lines = [*markdown_table(rows), ""]
    lines.append(
        f"`{state.settings['strategy']}`, seed {seed}: {len(state.kills)} kills, {result['inside_a_save']} of them inside a save; "
        f"{state.launches} launches in {state.seconds / 60:.0f} min; all processes gone after {over['mean']:.1f} s (at most {over['max']:.1f} s)."
    )
    equal, rows_compared = result["equal"], state.comparisons[0].rows if state.comparisons else 0
    lines.append(
        f"{equal} of {result['runs']} disturbed runs equal the undisturbed one to the bit ({rows_compared} rows each, every step once); "
        f"{len(state.problems)} other problems."
    )
    lines += [f"- run {one['run']}: {text}" for one in result["unequal"] for text in one["problems"]]
    lines += [f"- {text}" for text in state.problems]
    return "\n".join(lines)


# A completed run compared with the undisturbed one: metrics to the bit, each step once.


TIMES = re.compile(r"seconds|per_second|memory|_gib|mfu|percent|mb_s|utilisation|temperature|watts|throttled")
"""Names of figures that a clock or the machine decides."""
MOST_SHOWN = 9


def compare_runs(reference: RunFolder, run: RunFolder) -> tuple[int, list[str]]:
    """Return how many rows of metrics were compared, and what differs, at most `MOST_SHOWN` of it."""
    expected, found = read_json_lines(reference.metrics), read_json_lines(run.metrics)
    problems = [*differing_rows(expected, found), *leftovers(run)]
    more = [f"{len(problems) - MOST_SHOWN} more"] if len(problems) > MOST_SHOWN else []
    return len(expected), problems[:MOST_SHOWN] + more


def differing_rows(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Return the differences between two runs' rows; JSON keeps every bit of a float."""
    problems = []
    for kind in ("train", "eval"):
        before, after = ([row for row in rows if row["kind"] == kind] for rows in (expected, found))
        steps = [row["step"] for row in before], [row["step"] for row in after]
        if steps[0] != steps[1]:
            problems.append(f"{kind} rows: steps {steps[1]} instead of {steps[0]}")
        by_step = {row["step"]: row for row in after}
        problems += [
            f"{kind} rows: step {row['step']}: `{name}` {by_step[row['step']].get(name)} instead of {value}"
            for row in before
            if row["step"] in by_step
            for name, value in row.items()
            if by_step[row["step"]].get(name) != value and not TIMES.search(name)
        ]
    return problems


def leftovers(run: RunFolder) -> list[str]:
    """Return what a completed run should not hold: half-written or temporary files, checkpoints that are not complete."""
    hidden = [path.relative_to(run.path) for path in sorted(run.path.rglob(".*")) if path.suffix != ".lock"]
    newest, skipped = newest_valid(run)
    problems = [*(f"left over: {path}" for path in hidden), *skipped]
    if newest is None or run.last.resolve() != newest.resolve():
        problems.append(
            f"`last` is {run.last.resolve().name}, the newest valid checkpoint {newest.name if newest else 'missing'}"
        )
    return problems


# What a soak has done so far, in one file, so that it can go on in chunks.


FORMAT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One kill -9 and what came of it."""

    aim: str
    """`time` (a random moment), or the phase that was waited for."""
    phase: str
    """What the run was doing as the signal was sent."""
    target: str
    """`launcher`, `agent`, `rank 0`, ..., or `everything`."""
    seconds: float
    """After the launch began."""
    number: int = 0
    run: int = 0
    """Number of the disturbed run, from 1."""
    step: int = 0
    """Last step in `metrics.jsonl`."""
    checkpoint: int = 0
    """Step of the newest valid checkpoint afterwards; 0 without one."""
    code: int | None = None
    """The launcher's exit code; `None` where it was killed itself."""
    over_seconds: float = 0.0
    """From the kill until no process of the launch was left."""

    @property
    def lost(self) -> int:
        """Steps that are trained again."""
        return max(0, self.step - self.checkpoint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A disturbed run that was completed, compared with the undisturbed one."""

    run: int
    kills: int
    rows: int
    """Rows of `metrics.jsonl` that were compared."""
    problems: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not self.problems


@dataclass(kw_only=True, slots=True)
class State:
    """The whole soak. `save` after every change."""

    settings: dict[str, Any]
    """What every chunk must share: strategy, seed, configuration, overrides."""
    kills: list[Kill] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Everything that was not as promised, with the number of its kill."""
    launches: int = 0
    run: int = 0
    """Number of the disturbed run that is under way or was the last."""
    run_kills: int = 0
    """Kills of that run so far."""
    run_over: bool = True
    """Whether that run has been compared."""
    marks: dict[str, Any] = field(default_factory=dict)
    """Seconds from a launch until each phase began, from undisturbed starts: for choosing moments."""
    seconds: float = 0.0
    """Time that all chunks took."""

    def save(self, path: Path) -> None:
        """Publish the file."""
        write_json(path, {"format": FORMAT, **asdict(self)})


def load_state(path: Path, settings: dict[str, Any]) -> State:
    """Return the state of an earlier chunk, or a new one. Raise `UserError` where the chunk would be of another soak."""
    if not path.is_file():
        return State(settings=settings)
    try:
        found: dict[str, Any] = read_json(path)
        if found.pop("format", None) != FORMAT:
            raise ValueError("it was written by another release")
        state = record_of(found, State)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"the soak's state cannot be read: {error}", place=str(path), hint="remove its folder, or choose another RUN_NAME"
        ) from error
    differ = sorted(name for name in {*settings, *state.settings} if settings.get(name) != state.settings.get(name))
    if differ:
        said = ", ".join(f"`{name}` was `{state.settings.get(name)}` and is `{settings.get(name)}`" for name in differ)
        raise UserError(
            f"another soak's results are there: {said}",
            place=str(path.parent),
            hint="choose another RUN_NAME, or remove that folder",
        )
    return state
