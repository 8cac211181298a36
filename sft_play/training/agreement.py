"""What all ranks must know of each other at the end of a step, by one small sum; and stopping together when one was asked to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl

from sft_play.training.loss import all_sum
from sft_play.training.metrics import rows_until
from sft_play.training.ranks import from_rank_0
from sft_play.training.requests import StopRequest
from sft_play.training.stopping import catch_up

if TYPE_CHECKING:
    from sft_play.training.trainer import SftTrainer

AGREE_SECONDS = 0.5
"""How often ranks agree between the batches of an evaluation."""


class EvaluationStopped(Exception):
    """Raised on all ranks in the middle of an evaluation, which then counts as not made."""


class Agreement:
    """Flags of all ranks, summed in one collective operation of a few numbers.

    `add("disk_full", flag)` before training adds one: `flag()` is asked on every rank whenever they agree (at the end of each step, after
    each save, now and then in an evaluation), and `sums["disk_full"]` is the sum over ranks, the same on each.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self.flags: dict[str, Callable[[], float]] = {}
        self.sums: dict[str, float] = {}

    def add(self, name: str, flag: Callable[[], float]) -> None:
        """Adds a flag; on every rank in the same order."""
        assert name not in self.flags, name
        self.flags[name] = flag

    def agree(self, *, seconds: float = 0.0) -> float:
        """Sums all flags over the ranks (collective); returns the sum of `seconds`."""
        found = [seconds, *(flag() for flag in self.flags.values())]
        if distributed.is_available() and distributed.is_initialized():  # a single process need not ask its GPU
            found = all_sum(torch.tensor(found, dtype=torch.float32, device=self.device)).tolist()
        self.sums = dict(zip(self.flags, found[1:], strict=True))
        return float(found[0])


class StopOnRequest(TrainerCallback):
    """Lets the step end when any rank was asked to stop; all agree, save (unless `train.save_strategy` is `no`) and stop."""

    def __init__(self, request: StopRequest, device: torch.device | str) -> None:
        self.request = request
        self.agreement = Agreement(device)
        self.agreement.add("interrupted", lambda: float(request.heard == signal.SIGINT))
        self.agreement.add("asked to stop", lambda: float(request.heard not in (None, signal.SIGINT)))
        self.stopped = False
        self._batches, self._every, self._looked = 0, 1, 0.0

    @property
    def code(self) -> int:
        """The exit code of the stop: 130 where only Ctrl-C was heard."""
        return 143 if self.agreement.sums.get("asked to stop") else 130

    def _agreed(self, *, seconds: float = 0.0) -> tuple[bool, float]:
        total = self.agreement.agree(seconds=seconds)
        asked = bool(self.agreement.sums["interrupted"] or self.agreement.sums["asked to stop"])
        if asked and self.request.heard is None:  # another rank's request: this one must end in time too
            self.request.hear(signal.SIGTERM if self.agreement.sums["asked to stop"] else signal.SIGINT)
        return asked, total

    # ---- Steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.step = self.request.first_step = state.global_step
        self.request.saved = state.global_step or None
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            self.request.share(_store)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.step = state.global_step
        self.request.nothing_to_save = args.save_strategy == "no" and state.global_step < state.max_steps
        if self._agreed()[0]:
            self._stop(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.request.saved = state.global_step
        if not self.stopped and self._agreed()[0]:
            self._stop(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.stopped:  # an evaluation that is due here is made by the resumed run
            control.should_log = control.should_evaluate = control.should_save = False

    def _stop(self, args: Any, state: Any, control: Any) -> None:
        control.should_evaluate = False
        control.should_training_stop = True
        if args.save_strategy == "no" and state.global_step >= state.max_steps:
            return  # all is trained, and only the model can keep it: it is written, and the run is complete
        self.stopped = True
        control.should_save = args.save_strategy != "no" and state.global_step > 0 and self.request.saved != state.global_step
        control.should_log = control.should_log or control.should_save

    # ---- Evaluations

    def begin_evaluation(self) -> None:
        """Call before the batches of an evaluation, on all ranks."""
        self._batches, self._every, self._looked = 0, 1, time.monotonic()

    def between_batches(self) -> None:
        """Call before each batch, on all ranks equally often. Raises `EvaluationStopped` on all of them together.

        Ranks agree after a number of batches that takes about half a second, so that waiting for each other costs nothing.
        """
        self._batches += 1
        if self._batches < self._every:
            return
        now = time.monotonic()
        asked, total = self._agreed(seconds=now - self._looked)
        if asked:
            raise EvaluationStopped
        world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        per_batch = total / world / self._batches
        self._every = max(1, min(4 * self._every, int(AGREE_SECONDS / max(per_batch, 1e-6))))
        self._batches, self._looked = 0, now

    def after_batches(self) -> None:
        """Call after the last batch, on all ranks, where some may have left theirs. Raises `EvaluationStopped` on all of them."""
        if self._agreed()[0]:
            raise EvaluationStopped

    def asked_here(self) -> bool:
        """Whether this rank has heard a request; no collective operation."""
        return self.request.heard is not None

    def leave_evaluation(self, args: Any, state: Any, control: Any) -> None:
        """After `EvaluationStopped`: the step before it is saved, if it is not yet."""
        self._stop(args, state, control)


class MissedEvaluation(TrainerCallback):
    """Makes the evaluation that was due at the checkpoint from which a run goes on, when its figures were never written.

    A schedule that goes by evaluations is shown what it has missed. Must be the last callback: the rows of `metrics.jsonl` after the
    checkpoint are gone by then, and the best value so far is known.
    """

    def __init__(self, trainer: SftTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        if not state.global_step:
            return
        args.eval_on_start = False  # it was at the run's start; here it would be a second row of this step
        rows = from_rank_0([row for row in rows_until(trainer.run.metrics, state.global_step) if row["kind"] == "eval"])
        catch_up(trainer.lr_scheduler, args.metric_for_best_model, rows)
        due = evaluation_due(args, state, trainer.plan.steps_per_epoch) and not control.should_training_stop
        if due and not any(row["step"] == state.global_step for row in rows):
            metrics = trainer._evaluate(None, None)
            trainer._determine_best_metric(metrics, None)


def evaluation_due(args: Any, state: Any, steps_per_epoch: int | None) -> bool:
    """Whether transformers evaluates after the step of `state`: asked of its own rule."""
    control, rule = TrainerControl(), DefaultFlowCallback()
    rule.on_step_end(args, state, control)
    if (steps_per_epoch and state.global_step % steps_per_epoch == 0) or state.global_step >= state.max_steps:
        rule.on_epoch_end(args, state, control)
    return bool(control.should_evaluate)


def _store() -> Any:
    """Returns a connection of its own to the store of this run's rendezvous: threads must not wait for each other."""
    return distributed.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
