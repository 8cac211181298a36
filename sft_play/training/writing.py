"""One checkpoint on its way to the disk, on one rank: written, synced, listed with checksums, read back and compared.

Nothing here is a collective operation, so it may run in a thread, and a disk that fills on one rank keeps no other waiting.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer import TRAINER_STATE_NAME

from sft_play.runs.manifest import damage, describe, sync, verify, write_part
from sft_play.runs.space import describe as describe_problem
from sft_play.runs.space import errno_of
from sft_play.training.states import States
from sft_play.training.states.apart import seal_own
from sft_play.training.weights_out import write_weights

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer

OF_RANK = re.compile(r"-rank(\d+)\.")
"""In the name of a file that one rank writes."""


@dataclass(kw_only=True, slots=True)
class Writing:
    """This rank's part of a checkpoint. Rank 0 writes the weights and the trainer's state too."""

    step: int
    folder: Path
    rank: int
    states: States | None
    weights: dict[str, Any] | None
    trainer_state: str | None
    best: bool
    """Whether this step's evaluation was the best so far."""
    background: bool
    apart: bool = False
    """Whether this rank does not see rank 0's folder: what it writes stays beside its own, with a manifest of its own."""
    pause_seconds: float = 0.0
    write_seconds: float = 0.0
    """Until everything was on the disk."""
    verify_seconds: float = 0.0
    """For checksums, and for comparing with them."""
    bytes: int = 0
    """Of this rank's files."""
    problem: str | None = None
    """Why the disk did not take them, or gave back something else."""
    error: Exception | None = None
    """What was no disk's fault."""
    thread: threading.Thread | None = field(default=None, repr=False)

    def start(self, trainer: SftTrainer) -> None:
        """Begins in a thread that does not keep the process alive."""
        self.thread = threading.Thread(target=self.run, args=(trainer,), name=f"save-{self.step}", daemon=True)
        self.thread.start()

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def wait(self) -> None:
        """Returns when the thread has ended."""
        if self.thread is not None:
            self.thread.join()

    def run(self, trainer: SftTrainer) -> None:
        """Writes, syncs, lists and reads back; what goes wrong is kept for when the ranks agree."""
        try:
            times = [time.perf_counter()]
            files = self._write(trainer)
            times.append(time.perf_counter())
            facts = describe(self.folder, files)
            self.bytes = sum(int(one["bytes"]) for one in facts.values())
            times.append(time.perf_counter())
            sync(files)
            times.append(time.perf_counter())
            self.problem = damage(self.folder, facts, from_disk=self.background)  # in a thread it keeps no step waiting
            if not self.apart:
                write_part(self.folder, self.rank, facts)
            elif self.problem is None:
                seal_own(self.folder, self.rank, facts)
            times.append(time.perf_counter())
            self.write_seconds = times[1] - times[0] + times[3] - times[2]
            self.verify_seconds = times[2] - times[1] + times[4] - times[3]
        except Exception as error:  # noqa: BLE001 - raised by the caller where it is no disk's fault; the ranks agree first
            self.problem = describe_problem(error)
            self.error = None if errno_of(error) is not None else error
        finally:
            self.weights = self.states = None  # copies may be as large as the model

    def _write(self, trainer: SftTrainer) -> list[Path]:
        """Returns the files of this rank."""
        assert self.states is not None
        trainer.run.path.stat()  # raises where the run's folder is gone: it is not made anew
        self.folder.mkdir(
            parents=True, exist_ok=True
        )  # rank 0 made it; on a network disk, or another machine's own, it is not there
        if self.weights is None or self.trainer_state is None:
            return self.states.write(self.folder)
        from sft_play.training.trainer import stamp_at

        write_weights(trainer, self.weights, self.folder)
        (self.folder / TRAINER_STATE_NAME).write_text(self.trainer_state, encoding="utf-8")
        stamp_at(trainer.stamp, self.step).save(self.folder)
        written = self.states.write(self.folder)
        return [*written, *(path for path in self.folder.rglob("*") if path.is_file() and _of_rank_0(path))]


class DiskCheck:
    """Compares a published checkpoint with its manifest once more, from the disk, in a thread of rank 0.

    Reading a disk takes about as long as writing it, so training does not wait for it; what is older stays until it is done.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.damage: str | None = "it was not read to its end"
        self._thread = threading.Thread(target=self._run, name=f"check-{checkpoint.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.damage = verify(self.checkpoint, from_disk=True)
        except Exception as error:  # noqa: BLE001 - of a thread nobody hears it: what was not compared must not count as whole
            self.damage = f"it could not be read: {str(error) or type(error).__name__}"

    def ended(self, *, wait_seconds: float = 0.0) -> bool:
        """Whether `damage` is known, after `wait_seconds` at most."""
        self._thread.join(wait_seconds)
        return not self._thread.is_alive()


def _of_rank_0(path: Path) -> bool:
    """Whether a file is not another rank's, which may be half-written now."""
    match = OF_RANK.search(path.name)
    return not path.name.startswith(".") and (match is None or int(match.group(1)) == 0)
