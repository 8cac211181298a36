"""The only `Trainer` subclass, limited to what transformers' own cannot do:

- batches of the same rows at every world size, already divided among the ranks;
- a loss that is exact over micro-batches and ranks, computed only where there are labels;
- evaluation that gives the same figures on any number of ranks (`evaluation.held_out`);
- checkpoints that appear complete or not at all (`training.saving`).
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor, distributed
from transformers import Trainer

from sft_play.config.optimizers import BY_METRIC, OPTIMIZERS
from sft_play.data import WEIGHTS
from sft_play.data.batches import Batch, GlobalBatchSampler
from sft_play.model.objective import objective_of
from sft_play.model.parallel import Slicer
from sft_play.training.balance import Balancer
from sft_play.training.loss import IDLE, step_totals, sums_of, token_loss_sum, train_loader
from sft_play.training.metrics import PHASES, Lap, Readings, Stopwatch, as_logs, figures
from sft_play.training.muon import MuonWithAdamW, take_out
from sft_play.training.noise import NEFTUNE, RowNoise
from sft_play.training.offload import offload_inputs
from sft_play.training.pipeline import Pipeline
from sft_play.training.ranks import TrainContext, replicas_of
from sft_play.training.saving import Saver
from sft_play.training.slow_network import LocalSteps, local_steps_of
from sft_play.training.states import restore
from sft_play.training.states.facts import random_states_kept, restore_random
from sft_play.training.states.layout import ShardProof, inner_optimizer, whole_shape
from sft_play.training.stopping import (
    EvaluationStopped,
    Finite,
    Patience,
    StopOnRequest,
    is_better,
    value_of,
)


def reduce_in_fp32(plugin: Any) -> None:
    """Reduce in fp32 under the mixed-precision policy of accelerate's FSDP plugin, if it has one (not with fp32)."""
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)


UNDECAYED = re.compile(r"(?:^|\.)(?:A_log|D|time_mix_\w+)$")
"""Parameters of Mamba and its relatives (`_no_weight_decay` in the authors' code), and of RWKV."""
HISTORY = 16
"""Logged rows kept in transformers' state, in memory and in checkpoints; `metrics.jsonl` has all of them."""


class AmongReplicas(DistributedDataParallelKwargs):
    """accelerate's DDP settings, with gradients averaged only over the ranks of `group`."""

    def __init__(self, settings: DistributedDataParallelKwargs, group: Any) -> None:
        super().__init__(**vars(settings))
        self.among = settings.to_kwargs() | {"process_group": group}

    def to_kwargs(self) -> dict[str, Any]:
        return self.among


def split_for_lora_plus(optimizer: Any, model: Any, ratio: float) -> None:
    """Move B matrices and vectors to groups with `ratio` times the learning rate, as `create_loraplus_optimizer`."""
    faster = {
        id(parameter)
        for name, parameter in model.named_parameters()
        if ".lora_B" in name or len(whole_shape(parameter)) == 1
    }
    for group in list(optimizer.param_groups):
        if moved := take_out(group, faster):
            optimizer.add_param_group({**group, "params": moved, "lr": group["lr"] * ratio})


SUMS = ("loss", "label_weight", "label_tokens", "tokens", "rows")
"""What a rank adds up between two rows of metrics; it sends the sums, seconds per step of each of `PHASES`, readings.
"""


class SftTrainer(Trainer):
    """transformers' Trainer for prepared rows, following a plan."""

    control: Any
    optimizer: Any

    def __init__(
        self,
        context: TrainContext,
        *,
        sampler: GlobalBatchSampler,
        stop: StopOnRequest,
        parts: Slicer | Pipeline | None,
        evaluate_rows: Callable[[Trainer, Any], dict[str, float]],
        **arguments: Any,
    ) -> None:
        """Take `evaluate_rows`, which returns the metrics of held-out rows, and the base class's `arguments`."""
        self.context, self.stop, self.parts, self.evaluate_rows = context, stop, parts, evaluate_rows
        self.local: LocalSteps | None = None
        self.tokens_trained = 0
        self.training_seconds = 0.0
        """Spent on optimizer steps, without evaluation and saving."""
        super().__init__(**arguments)
        self.loss_is_scaled_for_ga = True  # `compute_loss` divides by the label tokens of the complete global batch
        self.watch = Stopwatch(context.ranks.device)
        self.objective = objective_of(context.config.train)
        alpha = context.config.train.extra.get(NEFTUNE)
        self.noise = RowNoise(self.model, alpha, self.args.seed, context.ranks.part) if alpha else None
        self.shard_proof, self.patience = ShardProof(), Patience(context)
        self.balancer = Balancer(context, sampler, self.watch)
        self.saver = Saver(context, self, self.counters)
        self.finite = Finite(context, self, self.saver)
        for callback in (self.shard_proof, self.patience, self.saver, self.balancer):
            self.add_callback(callback)
        self._micro_batches: list[Batch] = []
        """Micro-batches of a step that a pipeline has not started yet."""
        self._readings, self._lap, self._begun, self._logged_step = Readings(), Lap(self.watch), time.perf_counter(), 0
        self._saved_step: int | None = None
        self._window = torch.zeros(len(SUMS), dtype=torch.float64, device=context.ranks.device)
        """`SUMS` since the last row of metrics."""

    @property
    def pipeline(self) -> Pipeline | None:
        return self.parts if isinstance(self.parts, Pipeline) else None

    def create_accelerator_and_postprocess(self) -> None:
        """Let FSDP2 reduce gradients in fp32; accelerate 1.15 uses the compute dtype, which loses small gradients."""
        super().create_accelerator_and_postprocess()
        # A strategy other than the planned one is refused right after this.
        if self.context.plan.strategy == "fsdp2" and self.is_fsdp_enabled:
            reduce_in_fp32(self.accelerator.state.fsdp_plugin)
            if self.parts is not None:
                self.accelerator.state.fsdp_plugin.auto_wrap_policy = None  # the slices are distributed already
        if self.parts is not None:
            replicas = replicas_of(self.context.ranks, self.context.config.launch.timeout_seconds)
            self.accelerator.ddp_handler = AmongReplicas(self.accelerator.ddp_handler, replicas)

    def _build_accelerator_args(self, **arguments: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**arguments)
        for handler in built["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.gradient_as_bucket_view = True  # otherwise DDP's buckets are a second copy of all gradients
        if self.context.plan.world_size > 1 and self.context.plan.device == "cpu":
            # Without it accelerate sees a world of one under DeepSpeed on a CPU, and nothing is sharded.
            built["kwargs_handlers"].append(InitProcessGroupKwargs(backend="gloo"))
        return built

    # ---- Steps

    def get_train_dataloader(self) -> Any:
        """Return this rank's micro-batches."""
        loader = train_loader(self.balancer.sampler, self.train_dataset, self.data_collator, self.args)
        return self.accelerator.prepare_data_loader(loader)

    def get_batch_samples(self, *arguments: Any, **named: Any) -> Any:
        """Measure the wait for rows."""
        self.watch.enter("data")
        return super().get_batch_samples(*arguments, **named)

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> Tensor:
        """Return the weight of the label tokens of the complete global batch, over all ranks."""
        self.watch.enter("communication")
        activity, step = self.context.activity, self.state.global_step + 1
        activity.enter("training", step=step)
        activity.micro_batch = self.balancer.micro_batch(step)
        self.finite.rows = [row for batch in batch_samples for row in batch["rows"]]
        self.shard_proof.rows_trained += self.finite.rows
        total = step_totals(self.context.ranks, batch_samples, together=self.context.plan.sharded)
        self._micro_batches = [batch for batch in batch_samples if not batch[IDLE]]
        if self.local is not None:
            self.local.begin_step(batch_samples, total)
        return total

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """Move a batch to the device; weights stay in fp32, which the base class would narrow under DeepSpeed."""
        prepared: Batch = super()._prepare_inputs(inputs)
        return prepared | {name: value.to(self.args.device) for name, value in inputs.items() if name == WEIGHTS}

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Skip an empty micro-step (`step_totals`) without a pass, so that gradient accumulation never sees it."""
        if inputs.pop(IDLE):
            return torch.zeros((), device=self.args.device)
        if self.pipeline is not None:
            assert num_items_in_batch is not None
            return self._train_through_stages(self.pipeline, num_items_in_batch)
        self.watch.begin(inputs)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.watch.enter("optimizer")
        return loss if self.local is None else self.local.scale_loss(loss)

    def _train_through_stages(self, pipeline: Pipeline, labels: Tensor | int) -> Tensor:
        """Run all micro-batches of a step at its first micro-step; return the loss as `compute_loss` does."""
        batches, self._micro_batches = [self._prepare_inputs(batch) for batch in self._micro_batches], []
        if not batches:
            return torch.zeros((), device=self.args.device)
        self.model.train()
        for batch in batches:
            self.watch.begin(batch)
        at, scale = self.context.activity.next_batch, torch.as_tensor(1 / labels, device=self.args.device)
        if (scaler := self.accelerator.scaler) is not None:
            scale = scaler.scale(scale)
        sums = pipeline.train(batches, self.objective, scale, lambda batch: at(batch["rows"]), self.watch.enter)
        self.watch.enter("optimizer")
        self._add_to_window(sums, batches)
        return sums[0].float() * self.context.ranks.data_world / labels

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Return `world_size / copies * sum / N`, so that the average over ranks is the exact mean over label tokens of
        weight N.

        With `launch.local_steps` return the mean over this rank's own label tokens, since it steps alone.
        """
        assert num_items_in_batch is not None and not return_outputs
        self.context.activity.next_batch(inputs["rows"])
        if self.noise is not None:
            self.noise.begin(inputs, self.state.global_step)
        total = token_loss_sum(model, inputs, self.objective)
        self.watch.passed(total)
        self._add_to_window(sums_of(total, inputs), [inputs])
        # DeepSpeed updates the weights inside the backward pass, so the loss must be checked before it.
        if self.is_deepspeed_enabled and self.accelerator.sync_gradients:
            self.finite.require_finite_loss(self._window[0])
        if self.local is not None:
            return total / self.local.own_tokens
        return total * (self.context.plan.world_size / self.context.ranks.copies) / num_items_in_batch

    def _add_to_window(self, sums: Tensor, batches: Sequence[Batch]) -> None:
        """Count batches, of which `sums` are the `sums_of`, for the next row of metrics."""
        counts = sum(batch["tokens"] for batch in batches), sum(len(batch["rows"]) for batch in batches)
        # Filled on the device: a copy from the host would wait for it.
        self._window += torch.stack([*sums, *(torch.full_like(sums[0], count) for count in counts)])

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip gradients; if ranks hold slices, by the norm over all slices."""
        if self.parts is None:
            return super()._clip_grad_norm(model)
        return self._clip_slices(model, self.args.max_grad_norm)

    def _clip_slices(self, model: Any, max_norm: float) -> Tensor:
        assert self.parts is not None
        self.parts.share_gradients()
        if (scaler := self.accelerator.scaler) is not None:
            self.accelerator.unscale_gradients()
            for overflown in scaler._found_inf_per_device(self.optimizer.optimizer).values():
                # Otherwise a rank without an overflow would make an update that the others skip.
                distributed.all_reduce(overflown)
        return self.parts.clip(model.parameters(), max_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Stop before the update if loss or gradients are not finite.

        DeepSpeed steps inside the backward pass: it skips an update that is not finite itself, and we stop afterwards.
        """
        self.context.activity.enter("updating", step=self.state.global_step + 1)
        if self.parts is not None and grad_norm is None:
            grad_norm = self._clip_slices(model, math.inf)
        norm = super()._get_grad_norm(model, grad_norm)
        value = float(getattr(norm, "full_tensor", lambda: norm)())
        if self.local is not None:
            norm = value = self.local.agree(value)
        self.finite.require_finite_norm(value, self._window[0])
        self.finite.require_finite_loss(self._window[0])
        if self.local is not None and self.local.empty:
            # An optimizer skips parameters without a gradient, while the schedule continues.
            model.zero_grad(set_to_none=True)
        return norm

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Return the matrices, to which `train.weight_decay` applies, without those that their authors exclude."""
        matrices = {
            name
            for name, parameter in model.named_parameters()
            if len(whole_shape(parameter)) > 1 and not UNDECAYED.search(name)
        }
        return [name for name in super().get_decay_parameter_names(model) if name in matrices]

    def create_optimizer(self, *arguments: Any, **named: Any) -> Any:
        """Create transformers' optimizer; with LoRA+ the B matrices learn faster, with Muon it has a second part."""
        exists = self.optimizer is not None  # transformers asks again under DeepSpeed, and returns the same one
        optimizer = super().create_optimizer(*arguments, **named)
        ratio = self.context.config.tuning.lora.plus_ratio
        if ratio is not None and self.context.config.tuning.mode != "full" and not exists:
            split_for_lora_plus(optimizer, self.model, ratio)
        if OPTIMIZERS[self.context.plan.optim].matrices and not exists:
            self.optimizer = optimizer = MuonWithAdamW(optimizer, self.model)
        return optimizer

    def floating_point_ops(self, inputs: Batch) -> int:
        """Return 0: the plan counts operations, and the base class would visit all parameters at every micro-step."""
        return 0

    def store_flos(self) -> None:
        """Do nothing: the base class would sum those zeros over all ranks at every log, and wait for it."""

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        """Log, save, then evaluate, so that a failing evaluation costs no checkpoint.

        A resumed run repeats what an evaluation changes (`MissedEvaluation`).
        """
        self.watch.enter("")
        due, self.control.should_evaluate = self.control.should_evaluate, False
        super()._maybe_log_save_evaluate(*arguments, **named)
        if due and not self.stop.stopped:
            self.control.should_save = False
            self.score()
            if self.control.should_save:  # this step is the best so far, or the last
                super()._maybe_log_save_evaluate(*arguments, **named)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what each rank did since the last row, by one small collective."""
        if "grad_norm" in logs and "loss" in logs:
            now = time.perf_counter()
            seconds = max(now - self._begun, 1e-9)
            lap, steps = self._lap.take(), max(self.state.global_step - self._logged_step, 1)
            mine = [*(lap[phase] / steps for phase in PHASES), *self._readings.read()]
            table = self.context.ranks.table(torch.cat([self._window, self._window.new_tensor(mine)]))
            names = (*SUMS, *PHASES)
            rows = [dict(zip(names, numbers, strict=False)) for numbers in table]
            tokens, ranks = sum(row["tokens"] for row in rows) / self.context.ranks.copies, self.context.plan.ranks
            extra: dict[str, Any] = {
                "rank_loss": [row["loss"] / (row["label_weight"] or 1) for row in rows],
                "rank_tokens": [int(row["label_tokens"]) for row in rows],
                "rank_rows": [int(row["rows"]) for row in rows],
                "tokens_per_second": tokens / seconds,
                "step_seconds": seconds / steps,
                **{f"rank_{name}_seconds": [figures(row[name]) for row in rows] for name in PHASES},
                "rank_tokens_per_second": [
                    figures(row["tokens"] / steps / max(row["forward"] + row["backward"], 1e-9)) for row in rows
                ],
                **as_logs([numbers[len(names) :] for numbers in table]),
                "rank_memory_limit_gib": [figures(rank.capacity_bytes / 2**30) for rank in ranks],
                "rank_memory_plan_gib": [figures(rank.peak_bytes / 2**30) for rank in ranks],
            }
            self._logged_step = self.state.global_step
            self.tokens_trained += int(tokens)
            self.training_seconds += seconds
            plan = self.context.plan
            if plan.mfu and plan.tokens_per_second:  # they relate operations to the devices' peak
                extra["mfu"] = plan.mfu * tokens / seconds / plan.tokens_per_second
            if self.local is not None:
                extra["rank_grad_norm"] = self.local.norms
            logs = {**logs, **extra}
            self._window.zero_()
            self._begun = now
        super().log(logs, start_time)
        del self.state.log_history[:-HISTORY]

    def _run_epoch(self, **arguments: Any) -> None:
        """Skip the epoch if a run resumes at its last step, or if an evaluation before the first step ended it."""
        if not self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            super()._run_epoch(**arguments)

    # ---- Evaluation

    def score(self, row: dict[str, Any] | None = None) -> None:
        """Evaluate this step, or apply its saved evaluation `row`: to the best step, patience and learning rate."""
        if row is None:
            metrics = self._evaluate(None, None, skip_scheduler=True)
        else:
            metrics = {name: value for name, value in row.items() if name.startswith("eval_")}
            self.state.log_history.append({**metrics, "epoch": self.state.epoch, "step": self.state.global_step})
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        value = value_of(metrics, self.args.metric_for_best_model or "loss")
        if value is not None and self.args.lr_scheduler_type in BY_METRIC:
            self.lr_scheduler.step(value)
        self._determine_best_metric(metrics, None)
        self.saver.link_best()

    def as_average(self) -> contextlib.AbstractContextManager[None]:
        """Give the model, in the body, the weights that are scored and saved: with local steps the ranks' average."""
        return contextlib.nullcontext() if self.local is None else self.local.averaged()

    def show_scored_weights(self) -> None:
        """Switch a schedule-free optimizer to the weights that are scored and saved, until the next micro-step."""
        inner = inner_optimizer(self.optimizer)
        if callable(turn := getattr(inner, "eval", None)):
            turn()

    def _evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """Return the metrics, or none if a stop request ended the evaluation, which the resumed run then repeats."""
        try:
            metrics: dict[str, float] = super()._evaluate(*arguments, **named)
        except EvaluationStopped:
            self.stop.stop(self.args, self.state, self.control)
            return {}
        return metrics

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the validation rows' token-weighted loss and perplexity, total and per source, and answer scores."""
        started = time.perf_counter()
        self.context.activity.enter("evaluating", step=self.state.global_step)
        self.show_scored_weights()
        # Random states are kept because a run that resumes before this evaluation must draw the same numbers.
        with self.as_average(), random_states_kept():
            metrics = self.evaluate_rows(self, self.eval_dataset if eval_dataset is None else eval_dataset)
        metrics["eval_seconds"] = time.perf_counter() - started
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._begun = time.perf_counter()
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Remember the best step; the base class would look for checkpoints by its own names."""
        name = self.args.metric_for_best_model
        if name is None or not metrics:
            return False
        value = value_of(metrics, name)
        if value is None or not is_better(value, self.state.best_metric, greater=bool(self.args.greater_is_better)):
            return False
        self.state.best_metric = value
        self.state.best_global_step = self.state.global_step
        if self.context.config.train.load_best_model_at_end:
            self.control.should_save = True
        return True

    # ---- Checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save, or start saving, at most once per step; a full disk does not end the run."""
        if self._saved_step == self.state.global_step and self.saver.problem is None:
            return
        self._saved_step = self.state.global_step
        self.show_scored_weights()
        self.saver.save()
        self._begun = time.perf_counter()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Restore a checkpoint's states once model and optimizer are wrapped; the base class would load pickles."""
        if self.context.plan.activation_offload:
            offload_inputs(self.model)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self.local = self.saver.local = local_steps_of(self.context, self)
        if self.local is not None:
            self.add_callback(self.local)
        if resume_from_checkpoint is not None:
            # The checkpoint's state contains the intervals of the run that wrote it.
            self.state.compute_steps(self.args, max_steps)
            counters = restore(self.context, self, self.local, Path(resume_from_checkpoint))
            self.tokens_trained, self.training_seconds = (
                int(counters["tokens_trained"]),
                float(counters["training_seconds"]),
            )
            self._logged_step = self.state.global_step
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: `restore` loads the weights under every strategy."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore random states just before the first step, since skipping rows may have drawn random numbers."""
        if checkpoint is not None:
            restore_random(self.context, Path(checkpoint))

    def counters(self) -> dict[str, Any]:
        """Return the totals since the run's start, for a checkpoint."""
        return {"tokens_trained": self.tokens_trained, "training_seconds": self.training_seconds}
