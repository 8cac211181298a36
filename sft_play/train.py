"""The worker: `accelerate launch -m sft_play.train --run runs/NAME [--resume CHECKPOINT]`, one process per rank.

Reads only the JSON of its run folder and decides nothing: what to do stands in the plan.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from sft_play.config.load import read_config
from sft_play.config.schema import Config
from sft_play.errors import UserError
from sft_play.files import write_json
from sft_play.launch.beats import MARK
from sft_play.launch.node import woken_with_parent
from sft_play.launch.recovery import restarts
from sft_play.launch.verdict import PEER
from sft_play.plan.plan import Plan
from sft_play.runs.checkpoints import clean_up
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared
from sft_play.runs.stamp import Stamp, compare, make_stamp, refuse
from sft_play.training.console import log_alone, quiet_libraries, redirect
from sft_play.training.exit_record import describe_full_disk, lost_its_peer, ran_out_of_disk, reserve
from sft_play.training.heartbeat import Heartbeat, beating, hang_limit
from sft_play.training.imports import import_libraries
from sft_play.training.memory_errors import Activity, describe, ran_out_of_memory
from sft_play.training.requests import StopRequest, code_of
from sft_play.training.world import (
    check_folders,
    check_launch,
    check_start,
    check_world,
    launched_world,
    leave,
    prepare_state,
    ranks_together,
)

if TYPE_CHECKING:
    from sft_play.training.agreement import StopOnRequest
    from sft_play.training.guards import Holdings
    from sft_play.training.trainer import SftTrainer

LOST = 75
IN_ORDER = (0, 130, 143)
"""Codes of a worker that has done its work, or was stopped on request."""
THREAD_SECONDS = 3.0
"""What threads get at the end of a process; a stop that was asked for ends it after 4 s anyhow."""
Program = Callable[[RunFolder, "Path | None", "TextIO | None", Activity, StopRequest], int]


def main(arguments: list[str] | None = None, program: Program | None = None) -> int:
    """Trains this rank's share (or runs another `program` of a worker) and returns the exit code, recorded for the launcher too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    options = parser.parse_args(arguments)
    woken_with_parent()
    run = RunFolder(options.run)
    rank, _ = launched_world()
    console = redirect(run.rank_log(rank), rank)
    doing = Activity()
    request = StopRequest(run=run, rank=rank, doing=doing)
    request.listen()
    record: dict[str, Any] = {"code": 1, "error": ""}
    try:
        reserve(run, rank)
        record["code"] = (program or work)(run, options.resume, console, doing, request)
    except Exception as problem:  # noqa: BLE001 - the last stop of a worker
        record = verdict(problem, run, doing)
        if request.heard is not None and record.get("cause") == PEER:  # a rank that was asked to stop may leave before this one
            record = {"code": code_of(request.heard), "error": ""}
        say(problem, record)
    finally:
        request.finish(record)
    code: int = record["code"]
    if code in IN_ORDER:
        leave()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def verdict(problem: Exception, run: RunFolder, doing: Activity) -> dict[str, Any]:
    """Returns what the launcher is told of an error: exit code, message, and for want of memory its cause and where."""
    if isinstance(problem, UserError):
        return {"code": problem.exit_code, "error": problem.render(), **getattr(problem, "facts", {})}
    if ran_out_of_disk(problem, run):
        return {"code": 3, "error": describe_full_disk(problem, run), "cause": "disk_full"}
    if ran_out_of_memory(problem):
        return {"code": LOST, "error": describe(problem, doing), "cause": "out_of_memory", "doing": doing.facts()}
    if isinstance(problem, OSError):
        return {"code": 3, "error": f"error: {problem.filename or run.path}: {problem.strerror or problem}"}
    error = f"{type(problem).__name__}: {problem}"
    return {"code": LOST, "error": error, "cause": PEER} if lost_its_peer(problem) else {"code": 1, "error": error}


def say(problem: Exception, record: dict[str, Any]) -> None:
    """Writes an error down: a user's mistake in one line, everything else with its traceback; what the launcher itself
    says (all but what nobody foresaw) goes to the rank's log alone, and not to the console a second time."""
    with contextlib.suppress(MemoryError, OSError):  # the record counts, and is written even when there is no room to say more
        # by the launcher, which ends with a worker's words, or names the rank whose end was the cause
        told = MARK in os.environ and record["code"] != 1
        if told or record.get("cause", PEER) != PEER:
            with os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace") as log:
                if not isinstance(problem, UserError):
                    traceback.print_exception(problem, file=log)
                if record["error"].startswith("error: "):
                    print(record["error"], file=log)
            return
        if not isinstance(problem, UserError):
            traceback.print_exception(problem)
        if record["error"].startswith("error: "):
            print(record["error"], file=sys.stderr)


def work(run: RunFolder, checkpoint: Path | None, console: TextIO | None, doing: Activity, request: StopRequest) -> int:
    """The whole road of a worker, with signs of life."""
    quiet_libraries()
    with beating(run, doing) as heart:
        return road(run, checkpoint, console, doing, request, heart)


def road(
    run: RunFolder, checkpoint: Path | None, console: TextIO | None, doing: Activity, request: StopRequest, heart: Heartbeat
) -> int:
    """The road, top to bottom."""
    config, plan, prepared = read_config(run.config).config, Plan.load(run.plan), Prepared.load(run.prepared)
    import_libraries(config, plan, prepared)
    from sft_play.training.agreement import MissedEvaluation
    from sft_play.training.checkpoint_files import publish_model
    from sft_play.training.held_out import require_best
    from sft_play.training.saving import END_SECONDS

    check_launch(plan)
    heart.join(hang_seconds=hang_limit(config.launch.hang_seconds), timeout_seconds=config.launch.timeout_seconds)
    stamp = settle_stamp(run, config, plan, prepared, checkpoint)
    trainer, stop, holdings = build(run, config, plan, prepared, stamp, console, doing, request)
    trainer.add_callback(MissedEvaluation(trainer))
    check_world(plan, trainer.accelerator, trainer.args.n_gpu)
    trainer.saver.together = ranks_together(plan, run.path)
    check_folders(plan, config.train.save_strategy, trainer.saver.together)
    check_start(checkpoint)
    if trainer.is_world_process_zero():
        clean_up(run)
    trainer.accelerator.wait_for_everyone()
    require_best(trainer)
    started = time.time()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.saver.finish()
    if stop.stopped:
        trainer.saver.require_saved()
    else:
        doing.enter("saving", step=trainer.state.global_step)  # from here on a stop lets the model be written
    save_holdings(run, trainer, holdings)
    if stop.stopped:
        return stop.code
    doing.enter("saving", step=trainer.state.global_step)
    trainer.saver.tidy(wait_seconds=END_SECONDS)
    model_step = publish_model(run, trainer, config)
    if trainer.is_world_process_zero():
        facts = summary(trainer, time.time() - started, resumed=checkpoint is not None)
        write_json(run.training_metrics, facts | {"model_step": model_step})
    trainer.saver.require_saved()
    return 0


def settle_stamp(run: RunFolder, config: Config, plan: Plan, prepared: Prepared, checkpoint: Path | None) -> Stamp:
    """Returns the run's stamp; on resume the checkpoint's is compared first. Raises `CheckpointError` on a refusal."""
    rank, _ = launched_world()
    stamp = make_stamp(config, plan, prepared)
    if checkpoint is not None:
        notes = refuse(compare(Stamp.load(checkpoint), stamp, "resume"), f"the checkpoint `{checkpoint.name}`")
        for note in notes if rank == 0 else []:
            print(note, file=log_alone() if MARK in os.environ else sys.stdout)  # the launcher has said it on the console
    if rank == 0:
        stamp.save(run.path)
    return stamp


def build(
    run: RunFolder, config: Config, plan: Plan, prepared: Prepared, stamp: Stamp, console: TextIO | None, doing: Activity,
    request: StopRequest,
) -> tuple[SftTrainer, StopOnRequest, Holdings]:  # fmt: skip
    """Returns the trainer with model, rows and callbacks. The order matters: arguments first, since ZeRO-3 shards on load."""
    from sft_play.data.store import Rows
    from sft_play.model.load import load_for_training
    from sft_play.training.agreement import StopOnRequest
    from sft_play.training.arguments import training_arguments
    from sft_play.training.guards import Holdings, SaveAtEnd
    from sft_play.training.stopping import Patience
    from sft_play.training.trainer import SftTrainer

    args = training_arguments(config, plan, run, has_validation=prepared.validation is not None)
    prepare_state(plan, args)
    model, tokenizer = load_for_training(config, plan, prepared)
    assert prepared.train is not None
    stop, holdings = StopOnRequest(request, args.device), Holdings()
    trainer = SftTrainer(
        config=config,
        plan=plan,
        run=run,
        stamp=stamp,
        split=prepared.train,
        doing=doing,
        tokenizer=tokenizer,
        model=model,
        args=args,
        train_dataset=Rows(prepared.train.path, ("input_ids", "labels", "row")),
        eval_dataset=Rows(prepared.validation.path) if prepared.validation else None,
        callbacks=[
            SaveAtEnd(),
            stop,
            holdings,
            Patience(run, config.train.early_stopping_patience, config.train.early_stopping_threshold),
        ],
    )
    quiet_callbacks(trainer)
    add_reporters(trainer, run, config, console)
    return trainer, stop, holdings


def quiet_callbacks(trainer: SftTrainer) -> None:
    """Removes transformers' own printing; this program has its own line."""
    from transformers import PrinterCallback, ProgressCallback

    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)


def add_reporters(trainer: SftTrainer, run: RunFolder, config: Config, console: TextIO | None) -> None:
    """Rank 0 writes metrics and curves and says how far it is, in its log and on the console."""
    from sft_play.config.metrics import AIM, trackers
    from sft_play.training.aim_tracker import AimTracker
    from sft_play.training.arguments import wants_tensorboard
    from sft_play.training.curves import Curves
    from sft_play.training.metrics import MetricsFile, Progress

    if trainer.is_world_process_zero():
        trainer.add_callback(MetricsFile(run.metrics))
        if wants_tensorboard(config):
            trainer.add_callback(Curves(run.tensorboard))
        if AIM in trackers(config):
            trainer.add_callback(AimTracker(run))
        trainer.add_callback(Progress(None if config.train.extra.get("disable_tqdm") else console, log_alone()))


def save_holdings(run: RunFolder, trainer: SftTrainer, holdings: Holdings) -> None:
    """Each rank writes what it held and which rows it trained and scored."""
    rank = trainer.args.process_index
    holdings.save(run.rank_holdings(rank), rows_trained=trainer.rows_trained, rows_scored=trainer.rows_scored)


def summary(trainer: SftTrainer, seconds: float, *, resumed: bool) -> dict[str, Any]:
    """Returns the content of `training_metrics.json`."""
    from sft_play.training.curves import peak_memory_bytes
    from sft_play.training.metrics import finite, rows_until, saving_totals

    rows = rows_until(trainer.run.metrics, trainer.state.global_step)
    losses = [row["loss"] for row in rows if row["kind"] == "train" and row.get("loss") is not None]
    scores = [row for row in rows if row["kind"] == "eval"]
    spent = trainer.training_seconds()
    return {
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "train_loss": finite(sum(losses) / len(losses)) if losses else None,
        "final_loss": finite(losses[-1]) if losses else None,
        "tokens": trainer.tokens_trained,
        "tokens_per_second": trainer.tokens_trained / spent if spent else None,
        "seconds": seconds,
        "train_runtime": next((row["train_runtime"] for row in trainer.state.log_history if "train_runtime" in row), None),
        "training_seconds": spent,
        "peak_memory_bytes": peak_memory_bytes(),
        "forecast": planned(trainer.plan, trainer.args.process_index, resumed=resumed),
        "saving": saving_totals(rows),
        "recoveries": [dict(recovery) for recovery in trainer.plan.recoveries],
        "restarts": restarts(trainer.run),
        "stopped_early": trainer.stopped_early(),
        "best_step": trainer.state.best_global_step,
        "best_metric": finite(trainer.state.best_metric),
        **{key: finite(value) for key, value in (scores[-1] if scores else {}).items() if key.startswith("eval_")},
    }


def planned(plan: Plan, rank: int, *, resumed: bool) -> dict[str, Any]:
    """Returns what the plan said beforehand about what `training_metrics.json` measures; a resumed run trains only a part."""
    return {
        "tokens_per_second": plan.tokens_per_second,
        "training_seconds": None if resumed else plan.total_seconds,
        "mfu": plan.mfu,
        "basis": plan.speed_basis,
        "peak_memory_bytes": plan.ranks[rank].peak_bytes,
    }


def end(code: int) -> NoReturn:
    """Ends this process without taking the interpreter down: a thread that then comes back from torch's C++ would abort it.

    Where all went in order, threads that are no daemons are waited for `THREAD_SECONDS` at most, as an interpreter waits for them, and what
    registered itself for the end has its turn: trackers may have something to send. Else peers may hang in a collective operation that
    this rank has left; the launcher ends them.
    """
    if code in IN_ORDER:
        let_threads_end(THREAD_SECONDS)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def let_threads_end(seconds: float) -> None:
    """Waits for threads that are no daemons; those of executors, which wait for work, are told first that none will come."""
    deadline = time.monotonic() + seconds
    executors = sys.modules.get("concurrent.futures.thread")
    tells = [threading.Thread(target=executors._python_exit, daemon=True)] if executors is not None else []
    for thread in tells:
        thread.start()  # it waits for them without a limit
    alive = [one for one in threading.enumerate() if not one.daemon and one is not threading.current_thread()]
    for thread in [*tells, *alive]:
        thread.join(max(0.0, deadline - time.monotonic()))


if __name__ == "__main__":
    end(main())
