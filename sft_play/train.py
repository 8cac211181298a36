"""The worker: `accelerate launch -m sft_play.train --run runs/NAME [--resume CHECKPOINT]`, one process per rank.

It reads only the JSON of its run folder and follows the plan; `training.faults` handles its errors. With `--probe` it
trains two steps of the worst batch, without evaluation and checkpoint, and writes the memory and time that they needed.
"""

from __future__ import annotations

import sft_play.isolation  # noqa: F401 - before anything else is imported

# isort: split
import argparse
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from sft_play.config.load import read_config
from sft_play.config.schema import Config
from sft_play.files import write_json
from sft_play.launch.liveness import MARK
from sft_play.launch.run_folder import RESTARTED, facts_of
from sft_play.plan.plan import Plan, make_stamp
from sft_play.runs.checkpoints import clean_up
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared
from sft_play.runs.progress import PANEL
from sft_play.runs.stamp import Stamp, compare, refuse
from sft_play.training.faults import Heartbeat, contain, end, show_life
from sft_play.training.process import check_launch, import_libraries, launched_world, log_alone, quiet_libraries
from sft_play.training.stop_request import StopRequest

if TYPE_CHECKING:
    from sft_play.model.parallel import Slicer
    from sft_play.training.pipeline import Pipeline
    from sft_play.training.ranks import Ranks
    from sft_play.training.trainer import SftTrainer


def main(arguments: list[str] | None = None) -> int:
    """Train or probe as one rank; record the exit code for the launcher and return it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--resume", type=Path, help="checkpoint to continue from")
    parser.add_argument("--probe", action="store_true", help="two steps of the worst batch")
    options = parser.parse_args(arguments)
    return contain(probe_rank if options.probe else work_with_heartbeat, RunFolder(options.run), options.resume)


def work_with_heartbeat(request: StopRequest, checkpoint: Path | None, console: TextIO | None) -> int:
    """Train as a rank with a heartbeat."""
    quiet_libraries()
    with show_life(request.run, request.activity) as heart:
        return train_rank(request, checkpoint, console, heart)


def train_rank(request: StopRequest, checkpoint: Path | None, console: TextIO | None, heart: Heartbeat) -> int:
    """Train as a rank, from its arguments to the published model."""
    run, activity = request.run, request.activity
    if launched_world()[0] == 0:
        activity.phase_file = run.phase
        activity.write_phase("loading")
    config, plan, prepared = read_run(run)
    from sft_play.training.checkpoint_files import publish_model
    from sft_play.training.metrics import forget_peak
    from sft_play.training.ranks import check_world, ranks_together

    heart.join(config.launch)
    stamp = settle_stamp(run, config, plan, prepared, checkpoint)
    trainer = build_trainer(request, config, plan, prepared, stamp, console)
    context, saver = trainer.context, trainer.saver
    check_world(plan, trainer.accelerator, trainer.args.n_gpu)
    saver.together = ranks_together(context)
    if context.ranks.first:
        clean_up(run)
    trainer.accelerator.wait_for_everyone()
    started = time.time()
    forget_peak()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    saver.finish()
    if trainer.stop.stopped:
        saver.require_saved()
        trainer.shard_proof.save(context)
        return trainer.stop.code
    activity.enter("saving", step=trainer.state.global_step)  # from here on a stop waits until the model is written
    trainer.shard_proof.save(context)
    trainer.show_scored_weights()
    model_step = publish_model(context, trainer)
    if context.ranks.first:
        facts = summary(trainer, time.time() - started, resumed=checkpoint is not None)
        write_json(run.training_metrics, facts | {"model_step": model_step})
    saver.require_saved()
    return 0


def read_run(run: RunFolder) -> tuple[Config, Plan, Prepared]:
    """Return configuration, plan and prepared data, and import the libraries they need. Raise `HardwareError` as
    `check_launch`.
    """
    config, plan, prepared = (
        read_config(run.config, of_run=False).config,
        Plan.load(run.plan),
        Prepared.load(run.prepared),
    )
    import_libraries(config, plan, prepared)
    check_launch(plan)
    return config, plan, prepared


def settle_stamp(run: RunFolder, config: Config, plan: Plan, prepared: Prepared, checkpoint: Path | None) -> Stamp:
    """Save and return the run's stamp. Raise `CheckpointError` if the checkpoint's stamp does not allow a resume."""
    rank, _ = launched_world()
    stamp = make_stamp(config, plan, prepared)
    if checkpoint is not None:
        notes = refuse(compare(Stamp.load(checkpoint), stamp, "resume"), f"the checkpoint `{checkpoint.name}`")
        for note in notes if rank == 0 else []:
            # The launcher has printed it on the console.
            print(note, file=log_alone() if MARK in os.environ else sys.stdout)
    if rank == 0:
        stamp.save(run.path)
    return stamp


def build_trainer(
    request: StopRequest, config: Config, plan: Plan, prepared: Prepared, stamp: Stamp, console: TextIO | None
) -> SftTrainer:
    """Return the trainer with model, rows and callbacks, built in this order since ZeRO-3 shards while it loads.

    Raise `DataError` if the validation rows cannot yield `train.metric_for_best_model`.
    """
    from sft_play.data import WEIGHTS
    from sft_play.data.batches import Collator
    from sft_play.data.rows import Rows
    from sft_play.evaluation.while_training import WhileTraining
    from sft_play.model.load import load_for_training
    from sft_play.training.arguments import training_arguments
    from sft_play.training.loss import sampler_of
    from sft_play.training.metrics import MetricsFile
    from sft_play.training.ranks import TrainContext, join_ranks
    from sft_play.training.stopping import MissedEvaluation, StepEnds, StopOnRequest
    from sft_play.training.trainer import SftTrainer

    run = request.run
    args = training_arguments(config, plan, run, has_validation=prepared.validation is not None)
    ranks = join_ranks(plan, args)
    model, tokenizer = load_for_training(config, plan, prepared)
    parts = _split_model(model, config, plan, ranks)
    context = TrainContext(
        config=config,
        plan=plan,
        run=run,
        stamp=stamp,
        ranks=ranks,
        activity=request.activity,
        metrics=MetricsFile(run.metrics) if ranks.first else None,
    )
    assert prepared.train is not None
    rows = Rows(prepared.train.path, ("input_ids", "labels", WEIGHTS, "row"))
    held_out = Rows(prepared.validation.path) if prepared.validation else None
    stop, ends = StopOnRequest(request, ranks), StepEnds(plan.steps_per_epoch)
    while_training = WhileTraining(context, stop, prepared.validation)
    if held_out is not None:
        while_training.require_best(held_out)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    trainer = SftTrainer(
        context,
        sampler=sampler_of(context, prepared.train, rows),
        stop=stop,
        parts=parts,
        evaluate_rows=while_training.evaluate,
        model=model,
        args=args,
        processing_class=tokenizer,
        data_collator=Collator(plan.layout, pad, plan.attn_implementation, plan.device, ranks.part),
        train_dataset=rows,
        eval_dataset=held_out,
        callbacks=[ends, stop],
    )
    _add_reporting(trainer, console)
    trainer.add_callback(MissedEvaluation(trainer, ends))
    return trainer


def _add_reporting(trainer: SftTrainer, console: TextIO | None) -> None:
    """Replace transformers' printing callbacks by ours: on rank 0 metrics, curves, trackers and progress."""
    from transformers import PrinterCallback, ProgressCallback

    from sft_play.training.arguments import wants_tensorboard
    from sft_play.training.metrics import Progress
    from sft_play.training.trackers import Curves, tracker_callbacks

    context = trainer.context
    config, run = context.config, context.run
    for printing in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printing)
    if context.metrics is not None:
        trainer.add_callback(context.metrics)
        if wants_tensorboard(config):
            trainer.add_callback(Curves(run))
        for tracker in tracker_callbacks(config, run):
            trainer.add_callback(tracker)
        shown = None if config.train.extra.get("disable_tqdm") else console
        trainer.add_callback(Progress(shown, log_alone(), panel=PANEL in os.environ))
    if config.train.profile.steps and context.ranks.rank in config.train.profile.ranks:
        from sft_play.training.profiling import Profiler

        trainer.add_callback(Profiler(context, trainer.watch))


def _split_model(model: Any, config: Config, plan: Plan, ranks: Ranks) -> Slicer | Pipeline | None:
    """Split rows, layers or stages over the ranks of a group; return the object that describes the parts of the
    weights. Collective.
    """
    from sft_play.training.ranks import group_of, replicas_of

    limit = config.launch.timeout_seconds
    if plan.sequence_parallel > 1:
        from sft_play.model.parallel import share_heads

        share_heads(group_of(ranks, limit))
    if plan.tensor_parallel > 1:
        from sft_play.model.parallel import Slicer

        slicer = Slicer(ranks.rank % ranks.group_size, ranks.group_size, group_of(ranks, limit))
        slicer.cut(model)
        if plan.strategy == "fsdp2":
            slicer.shard(model, replicas_of(ranks, limit), plan.precision)
        return slicer
    if plan.stages:
        from sft_play.training.pipeline import Pipeline

        return Pipeline(model, plan, ranks, limit)
    return None


def summary(trainer: SftTrainer, seconds: float, *, resumed: bool) -> dict[str, Any]:
    """Return the content of `training_metrics.json`; `forecast` has the plan's figures, without totals for a resumed
    run.
    """
    from sft_play.files import finite
    from sft_play.runs.progress import energy_kwh
    from sft_play.training.metrics import peak_memory_bytes, rows_until

    run, plan, state = trainer.context.run, trainer.context.plan, trainer.state
    rows = rows_until(run.metrics, state.global_step)
    trained = [row for row in rows if row.get("kind") == "train"]
    losses = [row["loss"] for row in trained if row.get("loss") is not None]
    speeds = [row["tokens_per_second"] for row in trained[len(trained) > 1 :] if row.get("tokens_per_second")]
    scores = [row for row in rows if row.get("kind") == "eval"]
    spent = trainer.training_seconds
    return {
        "steps": state.global_step,
        "epochs": state.epoch,
        "train_loss": finite(sum(losses) / len(losses)) if losses else None,
        "final_loss": finite(losses[-1]) if losses else None,
        "tokens": trainer.tokens_trained,
        "tokens_per_second": trainer.tokens_trained / spent if spent else None,
        "steady_tokens_per_second": median(speeds) if speeds else None,
        "work": asdict(plan.work) if plan.work and not trainer.context.config.train.profile.steps else None,
        "seconds": seconds,
        "train_runtime": next((row["train_runtime"] for row in state.log_history if "train_runtime" in row), None),
        "training_seconds": spent,
        "resumed": resumed,
        "energy_kwh": energy_kwh(rows, spent),
        "peak_memory_bytes": peak_memory_bytes(),
        "forecast": {
            "tokens_per_second": plan.tokens_per_second,
            "training_seconds": None if resumed else plan.total_seconds,
            "mfu": plan.mfu,
            "basis": plan.speed_basis,
            "peak_memory_bytes": plan.ranks[trainer.context.ranks.rank].peak_bytes,
        },
        "recoveries": [dict(recovery) for recovery in plan.recoveries],
        "restarts": facts_of(run, RESTARTED),
        "stopped_early": trainer.patience.reason,
        "best_step": state.best_global_step,
        "best_metric": finite(state.best_metric),
        **{key: finite(value) for key, value in (scores[-1] if scores else {}).items() if key.startswith("eval_")},
    }


# ---- Probes


def worst_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return rows for all steps, each as long as the longest row and with the label share of the worst micro-batch."""
    length = max(2, plan.row_tokens)
    if plan.pack_tokens:  # several rows per pack, so that attention is masked between them
        length = max(2, length // _rows_of_a_pack(plan))
    labels = min(length - 1, max(1, round(length * plan.label_share)))
    row = {"input_ids": [1] * length, "labels": [-100] * (length - labels) + [1] * labels}
    return [row | {"row": number} for number in range((plan.steps or 1) * plan.global_batch_size)]


def _rows_of_a_pack(plan: Plan) -> int:
    """Return the rows per pack with which a step's rows nearly fill two micro-steps, or one if it has only one."""
    slots = sum(micro * min(2, steps) for micro, steps in plan.slots)
    return max(2, -(-plan.global_batch_size // slots))


def probe_rank(request: StopRequest, _: Path | None, __: TextIO | None) -> int:
    """Train two steps of the worst batch and write this rank's memory and time."""
    quiet_libraries()
    run = request.run
    config, plan, prepared = read_run(run)

    from sft_play.data.rows import write_rows
    from sft_play.plan.sources import Probed
    from sft_play.training.metrics import forget_peak
    from sft_play.training.ranks import check_world

    before = used_bytes()
    stamp = settle_stamp(run, config, plan, prepared, None)
    rank, _world = launched_world()
    path, rows = run.logs / f"probe-rows-rank{rank}", worst_rows(plan)
    write_rows(rows, path)
    assert prepared.train is not None
    train = replace(prepared.train, path=str(path), rows=len(rows), sources=())
    trainer = build_trainer(request, config, plan, replace(prepared, train=train, validation=None), stamp, None)
    check_world(plan, trainer.accelerator, trainer.args.n_gpu)
    forget_peak()
    trainer.train()
    allocated, reserved, device_bytes = peaks(before)
    peak = Probed(allocated_bytes=allocated, reserved_bytes=reserved, device_bytes=device_bytes)
    write_json(run.logs / f"probe-rank{rank}.json", asdict(peak))
    return 0


def used_bytes() -> int:
    """Return the bytes in use on this rank's GPU by all programs and the driver; 0 if NVML cannot report them, as for a
    MIG slice.
    """
    import pynvml
    import torch

    if not torch.cuda.is_available():
        return 0
    try:
        return int(torch.cuda.device_memory_used(int(os.environ.get("LOCAL_RANK", "0"))))
    except (pynvml.NVMLError, RuntimeError, ValueError):
        return 0


def peaks(before_bytes: int) -> tuple[int, int, int]:
    """Return the peak bytes allocated, reserved and used on the device by this process; `before_bytes` were in use
    before it started.
    """
    import torch

    from sft_play.training.metrics import peak_memory_bytes

    if not torch.cuda.is_available():
        return 0, 0, peak_memory_bytes()
    free, total = torch.cuda.mem_get_info()
    # CUDA's total excludes the driver's own memory (0.3 to 0.6 GiB); NVML's figures include it in both.
    device_bytes = used_bytes() - before_bytes if before_bytes else total - free
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), device_bytes


if __name__ == "__main__":
    end(main())
