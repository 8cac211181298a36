"""How often a container's command was tried without getting on, so that a scheduler which starts pods again for ever is told to stop.

A PyTorchJob with restart policy `ExitCode` and a SkyPilot task with `recover_on_exit_codes` know no limit (kubeflow/trainer#2045:
`backoffLimit` counts restarts of containers, and these pods are made anew). So node 0 counts here, in a file beside the run's folder,
which is taken away where a launch ended before its workers started. A newer checkpoint begins the count anew; so does an end that is
not tried again, since a person has looked at it before the next one, and so does another run in a folder of that name. A try that ended
while it waited for nodes which a scheduler had not started yet (`LOST` before any worker) is not counted: nothing was tried.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.errors import HardwareError, UserError
from sft_play.files import read_json, remove_half_written, write_json
from sft_play.launch.run_folder import read_events
from sft_play.launch.verdict import LOST, OUT_OF_MEMORY
from sft_play.runs.checkpoints import published, step_of
from sft_play.runs.folder import RunFolder, runs_folder

LIMIT = "SFT_PLAY_MAX_RESTARTS"
"""Variable of a pod: how often in a row it may be tried again without a newer checkpoint (`kubernetes.max_restarts`)."""
STOPPED = (130, 143)
FIRST_SIGNAL = 128
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tries:
    """The tries in a row without a newer checkpoint, the one that is under way included."""

    run: RunFolder
    limit: int
    """Restarts that are allowed in a row: one try more than that."""
    used: int
    step: int
    """Of the newest checkpoint when this try began; 0 without one."""
    events: int
    """Of the run when this try began."""
    began: float | None = None
    """When the run had its first event, in seconds since 1970; `None` before that."""

    def end(self, code: int) -> int:
        """Returns the code with which the container ends: `code`, or 3 where another try would be one too many, with the reason on stderr."""
        if code in STOPPED or (code == LOST and not _has_begun(self.run, self.events)):
            self._save(self.used - 1)  # somebody asked for it, or others had not come: no failure
        elif code < FIRST_SIGNAL and code != LOST:
            self.run.tries.unlink(missing_ok=True)
        elif newest_step(self.run) == self.step and (
            problem := _hopeless(self.run, self.limit, self.used, self.step, self.events)
        ):
            self.run.tries.unlink(missing_ok=True)
            print(f"\n{problem.render()}", file=sys.stderr, flush=True)
            return problem.exit_code
        else:
            self._save(self.used)
        return code

    def _save(self, used: int) -> None:
        found = {"used": used, "step": self.step, "events": self.events, "began": _began(self.run) or self.began}
        with contextlib.suppress(OSError):  # a full disk ends the run by itself, with its own reason
            write_json(self.run.tries, found)


def begin(words: Sequence[str], environ: Mapping[str, str]) -> Tries | None:
    """Counts this try of a command on node 0; `None` elsewhere, and where nobody gave a limit.

    Raises `HardwareError` where the tries before this one are used up: a pod that the kernel killed could not say so itself.
    """
    typed = dict(word.partition("=")[::2] for word in words[1:])
    limit, name = _limit(environ), typed.get("RUN_NAME")
    if not limit or not name or typed.get("NODE_RANK", "0") != "0":
        return None
    run = RunFolder(runs_folder() / name)
    with contextlib.suppress(OSError):
        remove_half_written(run.tries)
    step, began, (used, step_before, events_before, began_before) = newest_step(run), _began(run), _saved(run)
    if step_before != step or began_before not in (None, began):
        used = 0
    if used and (problem := _hopeless(run, limit, used, step, events_before)):
        run.tries.unlink(missing_ok=True)
        raise problem
    tries = Tries(run=run, limit=limit, used=used + 1, step=step, events=len(_events(run)), began=began)
    tries._save(tries.used)
    return tries


def newest_step(run: RunFolder) -> int:
    """Returns the step of the newest checkpoint, unchecked; 0 without one."""
    with contextlib.suppress(OSError):
        return max(map(step_of, published(run)), default=0)
    return 0


def _limit(environ: Mapping[str, str]) -> int:
    text = environ.get(LIMIT, "")
    if text and not (text.isascii() and text.isdecimal()):
        raise UserError(f"`{LIMIT}` is `{text}`; expected an integer >= 0", place="environment")
    return int(text or 0)


def _hopeless(run: RunFolder, limit: int, used: int, step: int, events: int) -> HardwareError | None:
    """Returns why there is no sense in another try."""
    missing = f"no newer checkpoint than that of step {step}" if step else "no checkpoint"
    if any(event["event"] == "failed" and event.get("cause") == OUT_OF_MEMORY for event in _events(run)[events:]):
        why = f"memory ran out for good, and there is {missing}: another try would end in the same way"
        hint = "docs/reliability.md says what needs less memory; the job can be submitted again when that is mended"
    elif used > limit:
        why = f"{used} tries in a row made {missing}, and `kubernetes.max_restarts` is {limit}"
        hint = f"the reasons are above and in `{run.events}`; the count starts over for a job that is submitted again"
    else:
        return None
    return HardwareError(why, place=f"run {run.name}", hint=hint)


def _saved(run: RunFolder) -> tuple[int, int, int, float | None]:
    """Returns tries, step, events and the run's beginning as the last try left them; no tries where nothing can be read."""
    try:
        found = read_json(run.tries)
        began = found.get("began")
        return int(found["used"]), int(found["step"]), int(found["events"]), None if began is None else float(began)
    except UNREADABLE:
        return 0, 0, 0, None


def _began(run: RunFolder) -> float | None:
    """Returns the time of the run's first event, by which it is told from another in a folder of that name; `None` without one."""
    with contextlib.suppress(*UNREADABLE):
        return float(_events(run)[0]["time"])
    return None


def _has_begun(run: RunFolder, events: int) -> bool:
    """Whether workers were started since the run had so many events."""
    return any(event["event"] in ("started", "resumed") for event in _events(run)[events:])


def _events(run: RunFolder) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        return read_events(run)
    return []
