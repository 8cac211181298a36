"""Saving a checkpoint so that it appears complete or not at all, and so that a full disk ends no run (contract B8, T7).

    space      every rank compares what it will write with what is free; all agree
    snapshot   states of all ranks, weights gathered to rank 0 (collective)
    write      each rank its own files (`training.checkpoint_files`: never collective, in a thread where `train.async_save` says so)
    agree      has every rank succeeded?
    publish    rank 0 joins the lists, renames, moves `last` and `best`
    rotate     rank 0 removes what is too old when all of the new one has been read from the disk once more, beside the next steps

A rank that cannot write says so when they agree, so none waits for it. Then the partial folder is removed, one warning is given, the
run trains on and tries again at the next interval.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from sft_play.errors import HardwareError
from sft_play.files import append_json_line
from sft_play.runs.checkpoints import claim, discard, link, partial_folder, publish, published, rotate, rotate_own
from sft_play.runs.manifest import seal, verify
from sft_play.runs.space import (
    SPARE_MEMORY_BYTES,
    Room,
    describe,
    folder_gone,
    free_bytes,
    free_memory_bytes,
    is_gone,
    side_file,
    size,
    with_spare,
)
from sft_play.training.checkpoint_files import DiskCheck, Writing, gather_weights, predicted_bytes
from sft_play.training.holdings import bytes_held
from sft_play.training.local_steps import seen_as_average
from sft_play.training.loss import all_sum
from sft_play.training.metrics import MetricsFile
from sft_play.training.ranks import gather
from sft_play.training.states import collect

if TYPE_CHECKING:
    from pathlib import Path

    from sft_play.training.trainer import SftTrainer

CHECK_SECONDS = 10.0
"""How long a save waits for the reading of the one before, which had a whole interval's time."""
END_SECONDS = 600.0
"""How long the end of training waits for it."""
EVENTS_KEPT = 100
"""Events that wait for room on the disk, at most."""


class Saver(TrainerCallback):
    """Saves checkpoints of one trainer; as its callback it publishes what a thread has written meanwhile."""

    def __init__(self, trainer: SftTrainer) -> None:
        self.trainer = trainer
        self.problem: str | None = None
        """Why the newest save failed, the same on every rank; `None` after one that succeeded."""
        self.together: tuple[int, ...] = tuple(range(trainer.plan.world_size))
        """The ranks that write into one folder with rank 0 (`world.ranks_together`)."""
        self._pending: Writing | None = None
        self._check: DiskCheck | None = None
        self._predicted = 0
        self._said_synchronous = False
        self._events: list[dict[str, Any]] = []

    # ---- What the trainer calls, on every rank alike

    def save(self) -> None:
        """Saves this step's checkpoint, or begins to in the background. What cannot be written is told, not raised. Collective."""
        trainer, step = self.trainer, self.trainer.state.global_step
        self.finish()
        self.tidy(wait_seconds=CHECK_SECONDS)
        trainer.doing.enter("saving", step=step)
        started = time.perf_counter()
        reason = self._begin(step)
        if reason is not None:
            self._failed(step, reason, pause=time.perf_counter() - started)
            return
        writing = self._snapshot(step)
        if writing.background:
            writing.start(trainer)
            self._pending = writing
            writing.pause_seconds = time.perf_counter() - started
        else:
            writing.run(trainer)
            self._settle(writing, started)

    def finish(self) -> None:
        """Waits for a checkpoint that is being written in the background, and publishes it. Collective."""
        if self._pending is not None:
            started, writing = time.perf_counter(), self._pending
            self.trainer.doing.enter("saving", step=writing.step)
            writing.wait()
            self._pending = None
            self._settle(writing, started)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Moves `best` where a process ended between the naming of the best checkpoint and the link, or a copy has a folder there."""
        run, step = self.trainer.run, state.best_global_step
        if not (state.global_step and step and self.trainer.is_world_process_zero()):
            return
        if run.best.resolve() != run.checkpoint(step).resolve() and verify(run.checkpoint(step)) is None:
            self.link_best()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Publishes a pending checkpoint when every rank has written its part; asks for it by one number."""
        self.tidy()
        if self._pending is not None and not self._sum(self._pending.running):
            self.finish()
            self.trainer.doing.enter("training", step=state.global_step + 1)

    def tidy(self, *, wait_seconds: float = 0.0) -> None:
        """Removes old checkpoints once the newest has been read from the disk; what is not read in time keeps them. Rank 0's own work."""
        check = self._check
        if check is None or not check.ended(wait_seconds=wait_seconds):
            return
        self._check = None
        if check.damage is None:
            self._remove_old(check.checkpoint)
        else:
            self._say(
                f"warning: {check.checkpoint}: the disk does not give back what was written: {check.damage}; older ones stay"
            )
            self._event("checkpoint_damaged", checkpoint=check.checkpoint.name, reason=check.damage)

    def link_best(self) -> None:
        """Lets `best` point at the best step's checkpoint, where that is there; rank 0's own work."""
        run, step = self.trainer.run, self.trainer.state.best_global_step
        if self.trainer.is_world_process_zero() and step and run.checkpoint(step).is_dir():
            with side_file(run.best, "the link to the best checkpoint"):
                link(run.best, run.checkpoint(step))

    def require_saved(self) -> None:
        """Raises `HardwareError` when the newest save failed, on every rank alike: nothing comes after the last one."""
        self.finish()
        self.link_best()
        if self.problem is not None:
            raise HardwareError(
                f"the last save failed: {self.problem}; {self.kept()}",
                place=str(self.trainer.run.checkpoints),
                hint=f"make room, then: make resume RUN={self.trainer.run.name}",
            )

    def agreed(self, problem: str | None) -> str | None:
        """Returns the first rank's problem on every rank, `None` when none has one. Collective."""
        if not self._sum(problem is not None):
            return None
        found = gather(problem)
        rank, reason = next((rank, reason) for rank, reason in enumerate(found) if reason is not None)
        return reason if all(found) else f"rank {rank}: {reason}"

    # ---- The steps of a save

    def _begin(self, step: int) -> str | None:
        """Makes the partial folder where there is room. Returns why there is none, the same on every rank. Collective."""
        trainer, problem = self.trainer, None
        needed = with_spare(self._predicted or self._first_prediction())
        try:
            free = free_bytes(trainer.run.path)
            if trainer.is_world_process_zero():
                claim(trainer.run)
                discard(trainer.run, step)
                trainer.run.checkpoints.mkdir(exist_ok=True)  # whatever was removed, but never the run's own folder anew
                partial_folder(trainer.run, step).mkdir()
        except OSError as error:
            problem, free = describe(error), 0
        asked = trainer._gather(torch.tensor([needed, free, problem is not None], dtype=torch.float64, device=trainer._sums_on()))
        room = Room(int(asked[:, 0].sum()), int(asked[:, 1].min()))
        if not asked[:, 2].any() and not room.enough:
            return f"there is no space for it on the disk: {room}"
        return self.agreed(problem) if asked[:, 2].any() else None

    def _first_prediction(self) -> int:
        """Returns the bytes that this rank will write, from what it holds; later saves go by the one before."""
        trainer = self.trainer
        held = bytes_held(trainer.model, trainer.optimizer)["optimizer"]
        if trainer.config.tuning.mode != "full":
            held += predicted_bytes(trainer)  # an adapter's weights stand beside its states too, under their full names
        if trainer.local is not None:  # anchor, momentum and average on rank 0, own weights on the others
            return (3 if trainer.is_world_process_zero() else 1) * 2 * predicted_bytes(trainer) + held
        shared = trainer.plan.strategy in ("single", "ddp") and not trainer.is_world_process_zero()
        return (predicted_bytes(trainer) if trainer.is_world_process_zero() else 0) + (0 if shared else held)

    def _snapshot(self, step: int) -> Writing:
        """Returns what is to be written, copied where training goes on meanwhile. Collective."""
        trainer = self.trainer
        background = trainer.config.train.async_save and self._memory_allows()
        apart = trainer.args.process_index not in self.together
        local, first = trainer.local, trainer.is_world_process_zero()
        with seen_as_average(local):
            weights = gather_weights(trainer, clone=background or (local is not None and local.window > 0))
            average = local.copies() if local is not None and first else {}
        states = collect(trainer, clone=background, average=average)
        return Writing(
            step=step,
            folder=trainer.run.random_states(step) if apart else partial_folder(trainer.run, step),
            apart=apart,
            rank=trainer.args.process_index,
            states=states,
            weights=weights,
            trainer_state=self._trainer_state() if trainer.is_world_process_zero() else None,
            best=trainer.state.best_global_step == step,
            background=background,
        )

    def _memory_allows(self) -> bool:
        """Whether the host's memory holds a copy of the states of all its ranks; says once when it does not. Collective."""
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed, free = (self._predicted or self._first_prediction()) * ranks_here, free_memory_bytes()
        lacking = free is not None and free - needed < SPARE_MEMORY_BYTES
        if not self._sum(lacking):
            return True
        if not self._said_synchronous:
            self._said_synchronous = True
            room = f"a copy of the states takes {size(needed)}, {size(free or 0)} of host memory are free"
            self._say(f"note: `train.async_save`: {room}; training waits while checkpoints are written")
        return False

    def _trainer_state(self) -> str:
        state, trainer = self.trainer.state, self.trainer
        for callback in [c for c in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(c, ExportableState)]:
            state.stateful_callbacks[type(callback).__name__] = callback.state()
        return json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"

    def _settle(self, writing: Writing, started: float) -> None:
        """Publishes what all ranks have written, or says why it cannot be. Collective."""
        trainer = self.trainer
        mine = [writing.write_seconds, writing.verify_seconds, float(writing.bytes)]
        found = trainer._gather(torch.tensor(mine, dtype=torch.float64, device=trainer._sums_on()))
        reason = self.agreed(writing.problem)
        if writing.error is not None:
            raise writing.error  # no disk's fault: a bug, or memory
        if reason is None:
            problem = None
            if trainer.is_world_process_zero():
                try:
                    seal(writing.folder, ranks=self.together)
                    checkpoint = publish(trainer.run, writing.step)
                    self._after(checkpoint, writing)
                except OSError as error:
                    problem = describe(error)
            reason = self.agreed(problem)
        pause = writing.pause_seconds + time.perf_counter() - started
        if reason is not None:
            self._failed(writing.step, reason, pause=pause)
            return
        if writing.apart:
            rotate_own(trainer.run, trainer.config.train.save_total_limit, writing.step)
        self._predicted = writing.bytes
        self._saved(writing, pause, *found[:, :2].max(dim=0).values.tolist(), bytes_written=int(found[:, 2].sum()))

    def _after(self, checkpoint: Path, writing: Writing) -> None:
        """Moves `best`, and lets the disk be read again. The checkpoint is there already, so what fails here only waits."""
        if writing.best or self.trainer.state.best_global_step == writing.step:
            with contextlib.suppress(OSError):
                link(self.trainer.run.best, checkpoint)
        if writing.background:  # each rank has read its part from the disk
            self._remove_old(checkpoint)
        else:
            self._check = DiskCheck(checkpoint)

    def _remove_old(self, verified: Path) -> None:
        """Removes old checkpoints, never the best step's: where the link to it failed it is made first. The next save tries again."""
        run, step = self.trainer.run, self.trainer.state.best_global_step
        best = run.checkpoint(step) if step else None
        with contextlib.suppress(OSError):
            if best is not None and run.best.resolve() != best.resolve():
                self.link_best()
        with contextlib.suppress(OSError):
            rotate(run, self.trainer.config.train.save_total_limit, verified, best=best)

    # ---- What is told

    def _saved(self, writing: Writing, pause: float, write: float, verify: float, *, bytes_written: int) -> None:
        if self.problem is not None:
            self._say(f"checkpoints are saved again: {writing.folder.name[1:].removesuffix('.partial')}")
            self._event("saved_again", step=writing.step)
        self.problem = None
        self._row(
            step=writing.step,
            pause_seconds=pause,
            write_seconds=write,
            verify_seconds=verify,
            bytes=bytes_written,
            background=writing.background,
        )

    def _failed(self, step: int, reason: str, *, pause: float) -> None:
        """Removes what was written, and warns, once until a save succeeds again. Collective.

        Raises `HardwareError` on every rank where the run's folder is gone: all that comes after it would be lost.
        """
        trainer, first = self.trainer, self.problem is None
        if self._sum(is_gone(trainer.run.path)):
            raise folder_gone(trainer.run)
        self.problem = reason
        if not trainer.is_world_process_zero():
            return
        discard(trainer.run, step)
        if first:
            goes_on = "training goes on and tries again at the next save"
            self._say(
                f"warning: {trainer.run.path}: the checkpoint of step {step} was not saved: {reason}; {self.kept()}; {goes_on}"
            )
        self._event("save_failed", step=step, reason=reason)
        self._row(step=step, pause_seconds=pause, failed=reason)

    def kept(self) -> str:
        """Returns which checkpoint there is, in words."""
        names = [path.name for path in published(self.trainer.run)[:1]]
        return f"the last checkpoint, {names[0]}, is as it was" if names else "there is no checkpoint yet"

    def _say(self, text: str) -> None:
        if self.trainer.is_world_process_zero():
            print(text, file=sys.stderr, flush=True)

    def _event(self, name: str, **facts: Any) -> None:
        """Appends to `events.jsonl`; what finds no room there goes with the next one."""
        if not self.trainer.is_world_process_zero():
            return
        self._events = [*self._events, {"event": name, "time": time.time(), "node": 0, **facts}][-EVENTS_KEPT:]
        with contextlib.suppress(OSError):
            while self._events:
                append_json_line(self.trainer.run.events, self._events[0])
                self._events.pop(0)

    def _row(self, **row: Any) -> None:
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, MetricsFile):
                callback.add({"kind": "save", **row})

    def _sum(self, flag: bool) -> int:
        return int(all_sum(torch.tensor([int(flag)], device=self.trainer._sums_on())).item())
