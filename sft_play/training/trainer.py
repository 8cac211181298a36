"""The one `Trainer` subclass. It holds only what transformers' own cannot do:

- batches that are the same rows on every world size, already shared out over ranks;
- a loss that is exact over micro-batches and ranks, computed only where there are labels;
- evaluation that gives the same figures on any number of ranks, with generated answers when asked;
- checkpoints that appear complete or not at all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor, distributed
from transformers import Trainer

from sft_play.config.schema import Config
from sft_play.data.batches import Batch, Collator
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import PreparedSplit
from sft_play.runs.stamp import Stamp
from sft_play.training.agreement import EvaluationStopped, StopOnRequest
from sft_play.training.arguments import reduce_in_fp32
from sft_play.training.balance import Balancer, together
from sft_play.training.compression import PowerSgd, register
from sft_play.training.curves import Readings, as_logs
from sft_play.training.guards import Finite, SpikeGuard
from sft_play.training.held_out import evaluate
from sft_play.training.local_steps import local_steps_of, seen_as_average
from sft_play.training.loss import IDLE, label_tokens, sampler_of, step_totals, token_loss_sum, train_loader
from sft_play.training.memory_errors import Activity
from sft_play.training.metrics import operations_per_token, peak_operations
from sft_play.training.saving import Saver
from sft_play.training.states import restore, restore_random
from sft_play.training.stopping import Patience, is_better, value_of

ROWS_NOTED = 100_000
"""Rows that each rank remembers having trained, the newest."""
HISTORY = 16
"""Logged rows that transformers' state holds, in memory and in checkpoints; `metrics.jsonl` has all."""


class SftTrainer(Trainer):
    """transformers' Trainer over prepared rows, obeying a plan."""

    control: Any

    def __init__(
        self, *, config: Config, plan: Plan, run: RunFolder, stamp: Stamp, split: PreparedSplit, tokenizer: Any, doing: Activity,
        **arguments: Any,
    ) -> None:  # fmt: skip
        """`split` says what the training rows are; the other arguments are those of the base class."""
        self.doing, self.split = doing, split
        self.config, self.plan, self.run, self.stamp = config, plan, run, stamp
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.collator = Collator(plan.layout, pad, plan.attn_implementation, plan.device)
        self.rows_trained: deque[int] = deque(maxlen=ROWS_NOTED)
        self.rows_scored: list[int] = []
        self.said_how_evaluated = False
        self.tokens_trained = 0
        self.peak_flops: float | None = None
        """Operations per second of all ranks together, where every device's are known."""
        self._operations: int | None = None
        super().__init__(data_collator=self.collator, processing_class=tokenizer, **arguments)
        self.spikes = SpikeGuard(
            config.train.spike_guard, config.train.spike_factor, run.logs / "spikes.jsonl", self.args.process_index
        )
        self.add_callback(self.spikes)
        self.loss_is_scaled_for_ga = True  # `compute_loss` divides by the label tokens of the whole global batch
        self._readings = Readings()
        self._window = torch.zeros(4, dtype=torch.float64, device=self._sums_on())
        self._step_rows: list[int] = []
        self._seconds, self._begun = 0.0, time.perf_counter()
        self.saver = Saver(self)
        self.add_callback(self.saver)
        self.finite = Finite(self)
        self.balancer = Balancer(self)
        self.add_callback(self.balancer)
        self.powersgd: PowerSgd | None = None
        self.local = local_steps_of(self)
        if self.local is not None:
            self.add_callback(self.local)

    def create_accelerator_and_postprocess(self) -> None:
        """Lets FSDP2 reduce gradients in fp32; accelerate 1.15 takes the computation's type, whose 8 bits of mantissa lose small ones."""
        super().create_accelerator_and_postprocess()
        if self.plan.strategy == "fsdp2" and self.is_fsdp_enabled:  # another strategy than planned is refused right after
            reduce_in_fp32(self.accelerator.state.fsdp_plugin)

    def _sums_on(self) -> torch.device:
        return torch.device(self.args.device)

    def _build_accelerator_args(self, **arguments: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**arguments)
        for handler in built["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.gradient_as_bucket_view = True  # else DDP's buckets are a second copy of all gradients
        if self.plan.world_size > 1 and self.plan.device == "cpu":
            # Without it accelerate sees a world of one under DeepSpeed on a CPU, and nothing is sharded.
            built["kwargs_handlers"].append(InitProcessGroupKwargs(backend="gloo"))
        return built

    # ---- Data

    def get_train_dataloader(self) -> Any:
        """Returns this rank's micro-batches; accelerate must not share them out again."""
        sampler = sampler_of(self.config, self.plan, self.split, self.train_dataset, self.args.process_index)
        self.balancer.sampler = sampler
        loader = train_loader(sampler, self.train_dataset, self.collator, self.args)
        return self.accelerator.prepare_data_loader(loader)

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> Tensor:
        """Returns the label tokens of the whole global batch, over all ranks."""
        self.doing.enter("training", step=self.state.global_step + 1)
        self.doing.micro_batch = self.balancer.micro_batch(self.state.global_step + 1)
        self._step_rows = [row for batch in batch_samples for row in batch["rows"]]
        self.rows_trained += self._step_rows
        total = step_totals(batch_samples, device, together=together(self.plan))
        if self.powersgd is not None:
            self.powersgd.step = self.state.global_step
        if self.local is not None:
            self.local.begin_step(batch_samples, total, IDLE)
        return total

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Skips a micro-step that is empty (`step_totals`): no pass, so nothing that accumulates gradients ever sees it."""
        if inputs.pop(IDLE):
            return torch.zeros((), device=self.args.device)
        self.balancer.begin(inputs)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss if self.local is None else self.local.shared(loss)

    # ---- Loss

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Returns `world_size * sum / N`, so that the average over ranks is the exact mean over N label tokens.

        With `launch.local_steps` the mean over this rank's own: it makes its step by itself.
        """
        assert num_items_in_batch is not None and not return_outputs
        self.doing.next_batch(inputs["rows"])
        total = token_loss_sum(model, inputs)
        self.balancer.passed(total)
        sums = [total.detach().double(), label_tokens(inputs).double()]
        # Filled on the device: a copy from the host would wait for it.
        counts = [torch.full_like(sums[0], count) for count in (inputs["tokens"], len(inputs["rows"]))]
        self._window += torch.stack([*sums, *counts])
        if self.is_deepspeed_enabled and self.accelerator.sync_gradients:  # it makes the update inside the backward pass
            self.finite.loss(self._window[0])
        if self.local is not None:
            return total / self.local.own_tokens
        return total * self.plan.world_size / num_items_in_batch

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Stops before the update when loss or gradients are no numbers, and leaves it out when they jump (`train.spike_guard`).

        DeepSpeed steps inside the backward pass: it leaves out an update that is no number by itself, and only then we stop.
        """
        step = self.state.global_step + 1
        self.doing.enter("updating", step=step)
        norm = super()._get_grad_norm(model, grad_norm)
        value = float(getattr(norm, "full_tensor", lambda: norm)())
        if self.local is not None:
            norm = value = self.local.agree(value)
        self.finite.norm(value)
        self.finite.loss(self._window[0])
        jumps = self.spikes.jumps(value, step=step, rows=self._step_rows)
        if self.powersgd is not None:
            self.powersgd.settle(made=not jumps)
        if jumps and self.local is not None:
            self.local.leave_out()
        if jumps or (self.local is not None and self.local.empty):
            model.zero_grad(set_to_none=True)  # an optimizer passes over parameters without a gradient; the schedule goes on
        return norm

    def floating_point_ops(self, inputs: Batch) -> int:
        """Counted by the plan; the base class would walk over all parameters at every micro-step."""
        return 0

    def store_flos(self) -> None:
        """Nothing: the base class would add those zeros up over all ranks, and wait for that, at every log."""

    # ---- Logging

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds what each rank did since the last row, by one small collective operation."""
        if "grad_norm" in logs and "loss" in logs:
            now = time.perf_counter()
            readings = self._window.new_tensor(self._readings.read())
            gathered, seconds = self._gather(torch.cat([self._window, readings])).tolist(), max(now - self._begun, 1e-9)
            ranks = [row[:4] for row in gathered]
            tokens = sum(read for _, _, read, _ in ranks)
            extra: dict[str, Any] = {
                "rank_loss": [float(total / max(count, 1)) for total, count, *_ in ranks],
                "rank_tokens": [int(count) for _, count, *_ in ranks],
                "rank_rows": [int(rows) for *_, rows in ranks],
                "tokens_per_second": tokens / seconds,
                **as_logs([row[4:] for row in gathered]),
            }
            self.tokens_trained += int(tokens)
            self._seconds += seconds
            if self.peak_flops:
                self._operations = self._operations or operations_per_token(self.accelerator.unwrap_model(self.model))
                extra["mfu"] = self._operations * tokens / seconds / self.peak_flops
            if self.local is not None:
                extra["rank_grad_norm"] = self.local.norms
            logs = {**logs, **extra}
            self._window.zero_()
            self._begun = now
        super().log(logs, start_time)
        del self.state.log_history[:-HISTORY]

    def _gather(self, values: Tensor) -> Tensor:
        """Returns [world_size, ...] with every rank's `values`."""
        if self.plan.world_size == 1:
            return values[None].clone()
        parts = [torch.empty_like(values) for _ in range(self.plan.world_size)]
        distributed.all_gather(parts, values)
        return torch.stack(parts)

    def _run_epoch(self, **arguments: Any) -> None:
        """Nothing where a run goes on from its last step, or an evaluation before the first step ended it."""
        if not self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            super()._run_epoch(**arguments)

    # ---- Evaluation

    @property
    def stop(self) -> StopOnRequest:
        """The callback that ends a run on request."""
        return next(one for one in self.callback_handler.callbacks if isinstance(one, StopOnRequest))

    def _evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """Returns the metrics, none where a request to stop ended the evaluation: the resumed run makes it again."""
        try:
            metrics: dict[str, float] = super()._evaluate(*arguments, **named)
        except EvaluationStopped:
            self.stop.leave_evaluation(self.args, self.state, self.control)
            return {}
        return metrics

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Returns token-weighted loss and perplexity of the validation rows, in all and per source, and scores of answers."""
        started = time.perf_counter()
        self.doing.enter("evaluating", step=self.state.global_step)
        with seen_as_average(self.local):
            metrics = evaluate(self, self.eval_dataset if eval_dataset is None else eval_dataset, metric_key_prefix)
        metrics[f"{metric_key_prefix}_seconds"] = time.perf_counter() - started
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._begun = time.perf_counter()
        return metrics

    # ---- Checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves or begins to; a disk that cannot take it ends no run (`training.saving`)."""
        self.saver.save()
        self._begun = time.perf_counter()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Puts a checkpoint's states back when model and optimizer are wrapped; the base class would load pickles."""
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        peaks = self._gather(self._window.new_tensor([peak_operations(self.plan.device) or 0.0]))
        self.peak_flops = float(peaks.sum()) if bool((peaks > 0).all()) else None
        self.powersgd = register(self)
        if self.local is not None:
            self.local.begin()
        if resume_from_checkpoint is not None:
            self.state.compute_steps(
                self.args, max_steps
            )  # the checkpoint's state brought the intervals of the run that wrote it
            restore(self, Path(resume_from_checkpoint))
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Does nothing: `restore` puts the weights in, under every strategy."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The last thing before the first step: skipping rows may have drawn random numbers."""
        if checkpoint is not None:
            restore_random(self, Path(checkpoint))

    def counters(self) -> dict[str, Any]:
        """Returns what is counted from the run's start, for a checkpoint."""
        shares = {"shares": kept} if (kept := self.balancer.kept()) else {}
        return {"tokens_trained": self.tokens_trained, "training_seconds": self._seconds, **shares}

    def set_counters(self, kept: Mapping[str, Any]) -> None:
        """Puts back what `counters` returned."""
        self.tokens_trained, self._seconds = int(kept["tokens_trained"]), float(kept["training_seconds"])
        self.balancer.resume(kept.get("shares", ()))

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Remembers the best step; the base class would look for checkpoints under its own names."""
        name = self.args.metric_for_best_model
        if name is None or not metrics:
            return False
        value = value_of(metrics, name)
        if not is_better(value, self.state.best_metric, greater=bool(self.args.greater_is_better)):
            return False
        self.state.best_metric = value
        self.state.best_global_step = self.state.global_step
        self.saver.finish()
        self.saver.link_best()  # an epoch's evaluation comes after the save of its last step
        if self.config.train.load_best_model_at_end:
            self.control.should_save = True
        return True

    def stopped_early(self) -> str | None:
        """Returns why training ended before its last step (`train.early_stopping_patience`), if it did."""
        return next((c.reason for c in self.callback_handler.callbacks if isinstance(c, Patience)), None)

    def training_seconds(self) -> float:
        """Seconds spent on optimizer steps, evaluation and saving left out."""
        return self._seconds


def stamp_at(stamp: Stamp, step: int) -> Stamp:
    """Returns the run's stamp for weights after `step` optimizer steps."""
    return replace(stamp, step=step)
