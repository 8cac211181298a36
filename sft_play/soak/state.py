"""What a soak has done so far, in one file, so that it can go on in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sft_play.errors import UserError
from sft_play.files import read_json, write_json

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One kill -9 and what came of it."""

    number: int
    run: int
    """Number of the disturbed run, from 1."""
    aim: str
    """`time` (a random moment), or the phase that was waited for."""
    phase: str
    """What the run was doing as the signal was sent, seen from outside."""
    target: str
    """`launcher`, `agent`, `rank 0`, ..., `preparation`, or `everything`."""
    seconds: float
    """After the launch began."""
    step: int
    """Last step in `metrics.jsonl`."""
    checkpoint: int
    """Step of the newest valid checkpoint afterwards; 0 without one."""
    code: int | None
    """The launcher's exit code; `None` where it was killed itself."""
    over_seconds: float
    """From the kill until no process of the launch was left."""

    @property
    def lost(self) -> int:
        """Steps that are trained again."""
        return max(0, self.step - self.checkpoint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A disturbed run that was completed, beside the undisturbed one."""

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

    path: Path
    settings: Mapping[str, Any]
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
    marks: dict[str, float] = field(default_factory=dict)
    """Seconds from a launch until each phase began, from undisturbed starts: for choosing moments."""
    seconds: float = 0.0
    """Time that all chunks took."""

    def save(self) -> None:
        """Publishes the file."""
        values = {
            name: getattr(self, name) for name in ("settings", "problems", "launches", "run", "run_kills", "run_over", "marks")
        }
        values |= {"format": FORMAT, "seconds": round(self.seconds, 1)}
        values |= {"kills": [asdict(kill) for kill in self.kills], "comparisons": [asdict(one) for one in self.comparisons]}
        write_json(self.path, values)


def load_state(path: Path, settings: Mapping[str, Any]) -> State:
    """Returns the state of an earlier chunk, or a new one. Raises `UserError` where the chunk would be of another soak."""
    if not path.is_file():
        return State(path=path, settings=settings)
    try:
        found: dict[str, Any] = read_json(path)
        assert found.pop("format") == FORMAT, "written by another release"
        found["kills"] = [Kill(**kill) for kill in found["kills"]]
        found["comparisons"] = [Comparison(**{**one, "problems": tuple(one["problems"])}) for one in found["comparisons"]]
        state = State(path=path, **found)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise UserError(
            f"the soak's state cannot be read: {error}", place=str(path), hint="remove its folder, or choose another RUN_NAME"
        ) from error
    differ = sorted(name for name in {*settings, *state.settings} if settings.get(name) != state.settings.get(name))
    if differ:
        said = ", ".join(f"`{name}` was `{state.settings.get(name)}` and is `{settings.get(name)}`" for name in differ)
        raise UserError(
            f"another soak is kept there: {said}", place=str(path.parent), hint="choose another RUN_NAME, or remove that folder"
        )
    return state
