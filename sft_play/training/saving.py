"""Save checkpoints that appear complete or not at all; a full disk ends no run (STATUS B8, T7).

    space      every rank compares what it will write with the free space; all agree
    snapshot   collect all ranks' states; rank 0 gets the weights, and states of ranks that do not see its folder
    write      each rank writes its own files, in a thread with `train.async_save` (never collective)
    agree      has every rank succeeded?
    publish    rank 0 joins the lists, renames the folder, moves `last` and `best`
    rotate     rank 0 removes old checkpoints

A rank that cannot write reports it when they agree, so none waits for it. Then the partial folder is removed, the user
gets one warning, training continues, and the next interval tries again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from sft_play.errors import HardwareError
from sft_play.files import disk_problem, free_bytes, is_gone, side_file
from sft_play.plan.hardware import ram_bytes
from sft_play.runs.checkpoints import discard, link, list_checkpoints, partial_folder, publish, rotate
from sft_play.runs.folder import folder_gone
from sft_play.runs.manifest import SPARE_MEMORY_BYTES, Room, seal, verify, with_spare
from sft_play.text import gib, tell
from sft_play.training.checkpoint_files import Writing, gather_weights, predicted_bytes
from sft_play.training.ranks import TrainContext
from sft_play.training.slow_network import LocalSteps
from sft_play.training.states import bring_together, collect
from sft_play.training.states.layout import count_bytes


class Saver(TrainerCallback):
    """Save the checkpoints of a trainer; as its callback, publish what a thread has written meanwhile."""

    def __init__(self, context: TrainContext, trainer: Trainer, counters: Callable[[], dict[str, Any]]) -> None:
        """Take `counters`, which returns the totals since the run's start."""
        self.context, self.trainer, self.counters = context, trainer, counters
        self.local: LocalSteps | None = None
        """Set by the trainer when it starts training."""
        self.problem: str | None = None
        """Why the newest save failed, the same on every rank; `None` after a success."""
        self.together: tuple[int, ...] = tuple(range(context.plan.world_size))
        """The ranks that write into rank 0's folder (`ranks_together`)."""
        self._pending: tuple[Writing, threading.Thread] | None = None
        """A checkpoint that a thread is writing."""
        self._predicted: int | None = None
        self._synchronous_reported = False

    # ---- Called by the trainer, equally on every rank

    def save(self) -> None:
        """Save this step's checkpoint, or start to in the background; report a failed write, not raise. Collective."""
        step = self.trainer.state.global_step
        self.finish()
        self.context.activity.enter("saving", step=step)
        started = time.perf_counter()
        reason = self._begin(step)
        if reason is not None:
            self._failed(step, reason, pause=time.perf_counter() - started)
            return
        background = self.context.config.train.async_save and self._memory_allows()
        writing = self._snapshot(step, background)
        if background:
            # A daemon, which does not keep the process alive.
            thread = threading.Thread(target=writing.run, name=f"save-{step}", daemon=True)
            thread.start()
            self._pending = writing, thread
            writing.pause_seconds = time.perf_counter() - started
        else:
            writing.run()
            self._settle(writing, started, background=False)

    def finish(self) -> None:
        """Wait for a checkpoint that is written in the background, and publish it. Collective."""
        if self._pending is not None:
            started, (writing, thread) = time.perf_counter(), self._pending
            self.context.activity.enter("saving", step=writing.step)
            thread.join()
            self._pending = None
            self._settle(writing, started, background=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Fix `best` if a process ended before it was linked, or if a copied run has a folder instead of the link."""
        run, step = self.context.run, state.best_global_step
        if not (state.global_step and step and self.context.ranks.first):
            return
        if run.best.resolve() != run.checkpoint(step).resolve() and verify(run.checkpoint(step)) is None:
            self.link_best()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Publish a pending checkpoint once every rank has written its part, at the cost of one number per step."""
        if self._pending is not None and not self.context.ranks.any(self._pending[1].is_alive()):
            self.finish()
            self.context.activity.enter("training", step=state.global_step + 1)

    def _rotate(self, newest: Path) -> None:
        """Remove old checkpoints; call on rank 0."""
        run, step = self.context.run, self.trainer.state.best_global_step
        with contextlib.suppress(OSError):  # the next save tries again
            keep = self.context.config.train.save_total_limit
            rotate(run, keep, newest, best=run.checkpoint(step) if step else None)

    def link_best(self) -> None:
        """Let `best` point at the best step's checkpoint, if that exists; only rank 0 does."""
        run, step = self.context.run, self.trainer.state.best_global_step
        if self.context.ranks.first and step and run.checkpoint(step).is_dir():
            with side_file(run.best, "the link to the best checkpoint"):
                link(run.best, run.checkpoint(step))

    def require_saved(self) -> None:
        """Raise `HardwareError` on every rank if the last save failed, since no later one can make up for it."""
        self.finish()
        self.link_best()
        if self.problem is not None:
            run = self.context.run
            hint = f"free some disk space, then: make resume RUN={run.typed}"
            raise HardwareError(
                f"the last save failed: {self.problem}; {self.name_newest()}", place=str(run.checkpoints), hint=hint
            )

    def name_newest(self) -> str:
        """Describe the newest checkpoint in words."""
        names = [path.name for path in list_checkpoints(self.context.run)[:1]]
        return f"the last checkpoint, {names[0]}, is intact" if names else "there is no checkpoint yet"

    # ---- The steps of a save

    def _begin(self, step: int) -> str | None:
        """Create the partial folder, or return why there is no space, the same on every rank. Collective."""
        run, ranks, problem = self.context.run, self.context.ranks, None
        needed = with_spare(self._predict())
        try:
            free = float(free_bytes(run.path)) if ranks.rank in self.together else math.inf
            if ranks.first:
                discard(run, step)
                run.checkpoints.mkdir(exist_ok=True)  # may have been removed; the run's own folder is never recreated
                partial_folder(run, step).mkdir()
        except OSError as error:
            problem, free = disk_problem(error), 0
        asked = ranks.table([needed, free, problem is not None])
        if any(failed for *_, failed in asked):
            return ranks.first_problem(problem)
        room = Room(int(sum(bytes_needed for bytes_needed, *_ in asked)), int(min(there for _, there, _ in asked)))
        return None if room.enough else f"there is no space for it on the disk: {room}"

    def _predict(self) -> int:
        """Return the bytes that this rank will write: as many as at its last save, or estimated from its tensors."""
        if self._predicted is not None:
            return self._predicted
        first, weights = self.context.ranks.first, predicted_bytes(self.trainer)
        state_bytes = count_bytes(self.trainer.model, self.trainer.optimizer)["optimizer"]
        if self.context.config.tuning.mode != "full":
            state_bytes += weights  # an adapter's weights are also written with the states, under their full names
        if self.local is not None:  # anchor, momentum and average on rank 0, own weights on the others
            return (3 if first else 1) * 2 * weights + state_bytes
        shared = not self.context.plan.sharded and self.trainer.parts is None and not first
        return (weights if first else 0) + (0 if shared else state_bytes)

    def _snapshot(self, step: int, background: bool) -> Writing:
        """Return what is to be written, copied if training continues meanwhile. Collective."""
        context, trainer, local = self.context, self.trainer, self.local
        with contextlib.nullcontext() if local is None else local.averaged():
            weights = gather_weights(context, trainer, clone=background or (local is not None and local.window > 0))
            average = local.copies() if local is not None and context.ranks.first else {}
        states = collect(context, trainer, local, self.counters(), clone=background, average=average)
        return Writing(
            context=context,
            trainer=trainer,
            step=step,
            folder=partial_folder(context.run, step),
            states=bring_together(context.ranks, states, self.together),
            weights=weights,
            trainer_state=self._trainer_state() if context.ranks.first else None,
        )

    def _memory_allows(self) -> bool:
        """Return whether host memory has room for a copy of its ranks' states; report once if not. Collective."""
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed, free = self._predict() * ranks_here, ram_bytes()[1]
        if not self.context.ranks.any(free - needed < SPARE_MEMORY_BYTES):
            return True
        if not self._synchronous_reported:
            self._synchronous_reported = True
            room = f"a copy of the states takes {gib(needed)}, and {gib(free)} of host memory are free"
            self._say(f"note: `train.async_save`: {room}; training waits while checkpoints are written")
        return False

    def _trainer_state(self) -> str:
        state, trainer = self.trainer.state, self.trainer
        for callback in [
            c for c in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(c, ExportableState)
        ]:
            state.stateful_callbacks[type(callback).__name__] = callback.state()
        return json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"

    def _settle(self, writing: Writing, started: float, *, background: bool) -> None:
        """Publish what all ranks have written, or report why that is impossible. Collective."""
        run, ranks = self.context.run, self.context.ranks
        written = ranks.table([writing.write_seconds, writing.verify_seconds, writing.bytes])
        reason = ranks.first_problem(writing.problem)
        if writing.error is not None:
            raise writing.error  # not caused by the disk: a bug, or memory
        if reason is None:
            problem = None
            if ranks.first:
                try:
                    seal(writing.folder, ranks=self.together)
                    if self.context.metrics is not None:
                        self.context.metrics.sync()
                    newest = publish(run, writing.step)
                    self.link_best()
                    self._rotate(newest)
                except OSError as error:
                    problem = disk_problem(error)
            reason = ranks.first_problem(problem)
        pause = writing.pause_seconds + time.perf_counter() - started
        if reason is not None:
            self._failed(writing.step, reason, pause=pause)
            return
        self._predicted = writing.bytes
        if self.problem is not None:
            self._say(f"checkpoints are being saved again: {writing.folder.name[1:].removesuffix('.partial')}")
        self.problem = None
        write, verified, count = zip(*written, strict=True)
        self.context.add_row(
            kind="save",
            step=writing.step,
            pause_seconds=pause,
            write_seconds=max(write),
            verify_seconds=max(verified),
            bytes=int(sum(count)),
            background=background,
        )

    def _failed(self, step: int, reason: str, *, pause: float) -> None:
        """Remove what was written, and warn. Collective.

        Raise `HardwareError` on every rank if the run's folder is gone, since all later work would be lost.
        """
        run = self.context.run
        if self.context.ranks.any(is_gone(run.path)):
            raise folder_gone(run)
        self.problem = reason
        if not self.context.ranks.first:
            return
        discard(run, step)
        self._say(
            f"warning: {run.path}: the checkpoint of step {step} was not saved: {reason}; {self.name_newest()};"
            " training continues and tries again at the next save"
        )
        self.context.add_row(kind="save", step=step, pause_seconds=pause, failed=reason)

    def _say(self, text: str) -> None:
        if self.context.ranks.first:
            tell(text)
