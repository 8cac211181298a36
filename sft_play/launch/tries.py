"""How often a container's command was tried without getting on, so that a scheduler which starts pods again for ever is told to stop.

A PyTorchJob with restart policy `ExitCode` and a SkyPilot task with `recover_on_exit_codes` know no limit (kubeflow/trainer#2045:
`backoffLimit` counts restarts of containers, and these pods are made anew). So node 0 counts here, in a file beside the run's folder,
which is taken away where a launch ended before its workers started. A newer checkpoint begins the count anew; so does an end that is
not tried again, since a person has looked at it before the next one.
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

    def end(self, code: int) -> int:
        """Returns the code with which the container ends: `code`, or 3 where another try would be one too many, with the reason on stderr."""
        if code in STOPPED:  # somebody asked for it: no failure
            _save(self.run, used=self.used - 1, step=self.step, events=self.events)
        elif code < FIRST_SIGNAL and code != LOST:
            self.run.tries.unlink(missing_ok=True)
        elif newest_step(self.run) == self.step and (
            problem := _hopeless(self.run, self.limit, self.used, self.step, self.events)
        ):
            self.run.tries.unlink(missing_ok=True)
            print(f"\n{problem.render()}", file=sys.stderr, flush=True)
            return problem.exit_code
        return code


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
    step, (used, step_before, events_before) = newest_step(run), _saved(run)
    if step_before != step:
        used = 0
    if used and (problem := _hopeless(run, limit, used, step, events_before)):
        run.tries.unlink(missing_ok=True)
        raise problem
    tries = Tries(run=run, limit=limit, used=used + 1, step=step, events=len(_events(run)))
    _save(run, used=tries.used, step=step, events=tries.events)
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
        hint = f"the reasons stand above and in `{run.events}`; a job that is submitted again is counted anew"
    else:
        return None
    return HardwareError(why, place=f"run {run.name}", hint=hint)


def _saved(run: RunFolder) -> tuple[int, int, int]:
    """Returns tries, step and events as the last try left them; no tries where nothing can be read."""
    try:
        found = read_json(run.tries)
        return int(found["used"]), int(found["step"]), int(found["events"])
    except UNREADABLE:
        return 0, 0, 0


def _save(run: RunFolder, *, used: int, step: int, events: int) -> None:
    with contextlib.suppress(OSError):  # a full disk ends the run by itself, with its own reason
        write_json(run.tries, {"used": used, "step": step, "events": events})


def _events(run: RunFolder) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        return read_events(run)
    return []
