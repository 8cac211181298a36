"""A launch that goes on by itself after a rank was lost (`launch.max_restarts`), from the newest valid checkpoint.

This is the launcher's work, not torchrun's: across nodes its `--max-restarts` was seen to hang, and it knows nothing of checkpoints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sft_play.config.schema import Config
from sft_play.errors import CheckpointError
from sft_play.launch.run_folder import read_events
from sft_play.launch.verdict import LOST, OUT_OF_MEMORY, Outcome
from sft_play.runs.checkpoints import step_of
from sft_play.runs.folder import RunFolder

EVENT = "restarted"
KEPT = ("rank", "cause", "error", "checkpoint")
"""Fields of the event that `training_metrics.json` keeps."""
FIRST_SECONDS, MOST_SECONDS = 2.0, 60.0
CONTROLLED = "SFT_PLAY_CLUSTER"
"""Variable of a launcher that `train-cluster` has started: that command starts all machines again, so none does so by itself."""


@dataclass(kw_only=True, slots=True)
class Restarts:
    """Counts the restarts of one launch: so many in a row without a newer checkpoint are allowed."""

    limit: int
    step: int
    """Step of the newest checkpoint at the last start."""
    used: int = 0
    """Restarts since a newer checkpoint appeared."""

    def allows(self, outcome: Outcome, checkpoint: Path | None) -> bool:
        """Whether what ended so may start again from `checkpoint`; counts it."""
        if outcome.code != LOST or outcome.cause == OUT_OF_MEMORY or not self.limit:
            return False
        step = step_of(checkpoint) if checkpoint else 0
        if step > self.step:
            self.used, self.step = 0, step
        if self.used >= self.limit:
            return False
        self.used += 1
        return True

    def pause(self) -> float:
        """Returns the seconds to wait before the next start: 2, 4, 8, ... at most 60."""
        return float(min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** (self.used - 1)))

    def refused(self, outcome: Outcome) -> Outcome:
        """Returns the outcome; where restarts were allowed but are used up, with that as the reason why it ends."""
        if outcome.code != LOST or outcome.cause == OUT_OF_MEMORY or not self.limit:
            return outcome
        times = "restart" if self.limit == 1 else "restarts"
        why = f"{self.used} of {self.limit} {times} without a newer checkpoint are used up (`launch.max_restarts`)"
        return replace(outcome, message=f"{outcome.message}\n\n{why}")


def limit_of(config: Config) -> int:
    """Returns how often in a row this launcher may start again by itself."""
    return 0 if is_controlled() else config.launch.max_restarts


def is_controlled() -> bool:
    """Whether `train-cluster` has started this launcher."""
    return bool(os.environ.get(CONTROLLED))


def is_left_to_cluster(outcome: Outcome) -> bool:
    """Whether `train-cluster`, which has started this launcher, says what follows: memory that ran out on one machine changes all of them."""
    return outcome.cause == OUT_OF_MEMORY and is_controlled()


def facts(outcome: Outcome, checkpoint: Path | None) -> dict[str, Any]:
    """Returns the event's fields."""
    return {
        "rank": outcome.rank,
        "cause": outcome.cause,
        "error": first_line(outcome),
        "checkpoint": checkpoint.name if checkpoint else None,
    }


def announcement(outcome: Outcome, checkpoint: Path | None, state: Restarts) -> str:
    """Returns the one line that says what happened and where it goes on."""
    source = checkpoint.name if checkpoint else "step 0: there is no checkpoint yet"
    return f"restarting: {first_line(outcome)}; going on from {source} in {state.pause():g} s (restart {state.used} of {state.limit})"


def nothing_to_go_on_from(run: RunFolder, outcome: Outcome, *, gone: int | None = None) -> Outcome:
    """Returns the end of a launch whose checkpoints are all damaged: beginning at step 0 would write over what may be rescued.

    `gone`: the last step that the run had saved, where none of its checkpoints is there any more.
    """
    text, hint = (
        f"error: `{run.name}` has no valid checkpoint to go on from; the reasons stand above",
        "start again under another RUN_NAME",
    )
    if gone:
        text = (
            f"error: {run.checkpoints}: `{run.name}` had saved checkpoints (the last at step {gone}), and none is left; it would train"
            " again from its start"
        )
        hint = f"put them back, then: make resume RUN={run.name}; or {hint}"
    message = f"{text}\n\nhint: {hint}\n\nwhy it had ended: {first_line(outcome)}"
    return Outcome(code=CheckpointError.exit_code, rank=outcome.rank, message=message)


def first_line(outcome: Outcome) -> str:
    """Returns what happened, without what follows from it."""
    line = outcome.message.strip().partition("\n")[0].removeprefix("error: ")
    if outcome.cause == "peer":
        return f"rank {outcome.rank} lost its connection to another rank ({line[:100]})"
    return line.removesuffix("; all other ranks were stopped").removesuffix("; all ranks were stopped")


def wait(state: Restarts) -> None:
    """Waits out the pause."""
    time.sleep(state.pause())


def restarts(run: RunFolder) -> list[Mapping[str, Any]]:
    """Returns the restarts of a run, oldest first, from its events."""
    events = [event for event in read_events(run) if event.get("event") == EVENT and event.get("node", 0) == 0]
    return [{key: event[key] for key in KEPT if key in event} for event in events]
