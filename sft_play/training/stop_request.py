"""Handle stop requests by signals (`launch.process.STOPS`).

A thread reads the signals from a pipe, because a main thread that waits in a collective, or for a library to load,
would not receive them. What a request leads to:

- before the first step has ended there is nothing to save, and the process exits at once;
- afterwards the ranks agree at the end of a step (`training.stopping`), save and exit;
- without checkpoints (`train.save_strategy: no`) the process exits at once, unless the last step has ended: then it
  writes the model;
- if no step ends within `stop_patience`, the process exits without a new checkpoint, except in the middle of a save.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sft_play.launch.liveness import LIMITS, stop_patience
from sft_play.launch.process import STOPS, leave_stops_to_parent, signals_to_hear, stop_code
from sft_play.runs.folder import RunFolder
from sft_play.text import tell
from sft_play.training.process import Activity, leave_record

AFTER_SAVE_SECONDS = LIMITS.after_save
LOOK_SECONDS = 0.1


@dataclass(kw_only=True, slots=True)
class StopRequest:
    """A request to this worker to stop, which ends the process if it cannot stop in an orderly way."""

    run: RunFolder
    rank: int
    activity: Activity
    heard: int | None = None
    """The signal received here, or SIGTERM for one received by another rank."""
    nothing_to_save: bool = True
    """True until the first step has ended; without checkpoints, until the last step has."""
    step: int = 0
    """The last optimizer step that has ended."""
    first_step: int = 0
    """The step from which this process resumed."""
    saved: int | None = None
    """The step of the newest checkpoint of this process."""
    _ended: bool = False
    _code: int = 1
    _ending: threading.Lock = field(default_factory=threading.Lock)

    def listen(self) -> None:
        """Install the signal handlers; call once, in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in signals_to_hear():
            signal.signal(number, _nothing)  # the byte in the pipe is what counts
        signal.signal(signal.SIGALRM, lambda number, _: self.hear(number))  # the pipe also gets alarms of libraries
        os.register_at_fork(after_in_child=_as_child)
        threading.Thread(target=self._read, args=(reader,), name="requests to stop", daemon=True).start()

    def hear(self, number: int) -> None:
        """Accept a request; only the first counts."""
        if self.heard is None:
            self.heard = number
            threading.Thread(target=self._wait, name="time to leave", daemon=True).start()

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write this process's exit record; all that remains is to exit."""
        with self._ending:
            if not self._ended:
                leave_record(self.run, self.rank, self._with_facts(record))
                self._code, self._ended = int(record["code"]), True

    def _with_facts(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Add the facts of a stop to its exit record."""
        if self.heard is None or record["code"] not in (130, 143):
            return dict(record)
        stop = {"signal": signal.Signals(self.heard).name, "step": self.step}
        return {**record, "stop": stop}

    def _read(self, reader: int) -> None:
        while received := os.read(reader, 64):
            for number in received:
                if number in STOPS and number != signal.SIGALRM:  # others have handlers too (SIGCHLD)
                    self.hear(number)

    def _wait(self) -> None:
        """End the process if it does not end in time."""
        patience = stop_patience(self.activity.longest_step)
        deadline = time.monotonic() + patience
        while not self._ended:
            if self.activity.phase == "saving":  # a save is finished, however long it takes
                deadline = max(deadline, time.monotonic() + AFTER_SAVE_SECONDS)
            elif self.nothing_to_save:
                lost = f"`train.save_strategy` is `no`, so nothing after step {self.first_step} is kept"
                self._leave("no step has ended since the start" if self.step == self.first_step else lost)
            if time.monotonic() > deadline:
                self._leave(f"no step ended within {patience:.0f} s, so there is no new checkpoint")
            time.sleep(LOOK_SECONDS)
        # An interpreter that hangs in its final cleanup must not keep its launcher waiting.
        time.sleep(AFTER_SAVE_SECONDS)
        os._exit(self._code)

    def _leave(self, why: str) -> None:
        assert self.heard is not None
        with self._ending:
            if self._ended:
                return
            name = signal.Signals(self.heard).name
            with contextlib.suppress(OSError, ValueError):
                tell(f"{name} {self.activity}: rank {self.rank} exits; {why}")
            code = stop_code(self.heard)
            leave_record(self.run, self.rank, self._with_facts({"code": code, "error": "", "note": why}))
            os._exit(code)


def _nothing(_number: int, _frame: object) -> None:
    pass


def _as_child() -> None:
    """Reset signal handling in a forked process, which must not write into the pipe."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        leave_stops_to_parent()
