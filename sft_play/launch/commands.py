"""The training commands: configuration -> plan -> run folder -> preparation -> workers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from sft_play.config.call import Call
from sft_play.config.load import LoadedConfig, save_config
from sft_play.errors import UserError, typed_here
from sft_play.files import is_gone, read_object
from sft_play.launch.agreement import join_machines, remove_own_part
from sft_play.launch.attempt import DELIVERED, newest_here, obtain_prepared, run_attempts
from sft_play.launch.job import Job, job_of, read_options, refuse_early, without_batch_numbers
from sft_play.launch.machines import FETCH
from sft_play.launch.process import end_by_signals
from sft_play.launch.resume import (
    as_resume,
    check_overrides,
    choose_checkpoint,
    compare_early,
    compare_fully,
    existing_run,
    is_longer,
    options_of_run,
    refuse_fewer_steps,
    restore_on_error,
    with_its_batch,
)
from sft_play.launch.run_folder import (
    choose_name,
    find_named_run,
    is_finished,
    last_plan,
    lock_run,
    record_event,
    remove_left,
    reserve_folder,
)
from sft_play.launch.verdict import LOST, Outcome, describe_stop, write_cause
from sft_play.plan.plan import CommandStrategy
from sft_play.plan.show import beside_forecast
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder, metric_rows, runs_folder
from sft_play.runs.gate import eval_command, read_facts
from sft_play.runs.prepared import Prepared, day_of
from sft_play.runs.progress import describe_model, end_text, notify, risen_losses, wait_until_sent
from sft_play.runs.stamp import STAMPED
from sft_play.text import plural, tell

STRATEGIES: Mapping[str, CommandStrategy] = {
    "train": "single",
    "train-distributed": "auto",
    "train-deepspeed": "zero",
    "train-fsdp": "fsdp2",
}
"""Command -> the strategy that it implies."""


def train(call: Call) -> int:
    """Train a new run with the strategy of its command (also with `-tb`), and report its end; return the exit code."""
    return finish(call, *start_run(call, STRATEGIES[call.command.removesuffix("-tb")]))


def start_run(
    call: Call, asked_strategy: CommandStrategy, *, before_launch: Callable[[Job, RunFolder], None] | None = None
) -> tuple[RunFolder, Outcome]:
    """Train a new run, or with `launch.auto_resume` continue an existing one; return its folder and outcome.

    A failure before workers start leaves no trace of a new run. `before_launch` is called after model and data are
    prepared.
    """
    loaded = call.load_config()
    options, loaded = read_options(call, loaded, asked_strategy)
    if existing := existing_run(options, loaded):
        again = as_resume(call, options, loaded, existing)
        check_overrides(again)
        with end_by_signals(), lock_run(existing, node_rank=options.request.node_rank):
            return existing, _resume(again, existing, loaded)
    job = job_of(call, loaded, options)
    refuse_early(job)
    name, rank = choose_name(options.run_name, loaded.path, call.command), job.node.rank
    again_too = loaded.config.launch.auto_resume
    with end_by_signals(), contextlib.ExitStack() as stack:
        if rank > 0:  # on a shared disk node 0 makes the folder
            job = stack.enter_context(join_machines(job, RunFolder(runs_folder() / name)))
        unnamed = options.run_name is None
        run = stack.enter_context(reserve_folder(name, node_rank=rank, never_started_too=again_too, unnamed=unnamed))
        stack.enter_context(lock_run(run, node_rank=rank))
        if rank == 0:
            job = stack.enter_context(join_machines(job, run))
        stack.enter_context(remove_own_part(job, run))
        if job.has_met:
            refuse_early(job)
        save_config(loaded, job.home(run).config)
        obtain_prepared(job.home(run), day=job.day)
        if before_launch:
            before_launch(job, run)
        outcome = end_run(job, run, run_attempts(job, run, event="started"))
    return run, outcome


def resume(call: Call) -> int:
    """Continue `RUN` from its newest valid checkpoint, with the run's own configuration; return the exit code."""
    run = find_named_run(call)
    check_overrides(call)
    with lock_run(run, node_rank=call.integer("NODE_RANK", minimum=0) or 0):
        outcome = _resume(call, run, call.load_config())
    return finish(call, run, outcome)


def _resume(call: Call, run: RunFolder, loaded: LoadedConfig) -> Outcome:
    before = last_plan(run)
    first_node = not call.integer("NODE_RANK", minimum=0)
    if is_finished(run) and not is_longer(loaded.config, before):
        if newest := newest_valid(run)[0]:
            compare_early(newest, loaded.config)
            refuse_fewer_steps(loaded.config, before, newest)
            if first_node and any(override.key.startswith(STAMPED) for override in call.overrides):
                with restore_on_error(run.config), restore_on_error(run.prepared):
                    save_config(loaded, run.config)
                    obtain_prepared(run, day=day_of(run.prepared))
                    compare_fully(newest, loaded.config, before, Prepared.load(run.prepared))
        remove_left(run, range(before.world_size))
        if first_node and not run.report.is_file():
            write_report_of(run)
        tell(f"{run.path} is complete; nothing is left to train")
        return Outcome(code=0)
    if is_finished(run) and (early := read_object(run.training_metrics).get("stopped_early")):
        raise UserError(
            f"`{run.name}` {early}; more steps would train nothing",
            hint=f"{'MODEL_NAME' if loaded.config.tuning.mode == 'full' else 'MODEL_ADAPTER'}={run.name} trains a new"
            " run on from it",
        )
    options = options_of_run(call, run, before)
    # A checkpoint that was brought to this machine may be outdated.
    first = newest_valid(run)[0] if FETCH in os.environ else choose_checkpoint(run, first_node=first_node)
    if first:
        compare_early(first, loaded.config)
    alone = job_of(call, loaded, options)
    with join_machines(alone, run, choose=lambda late: newest_here(run, alone.node.rank) if late else first) as met:
        job, checkpoint = met, met.checkpoint
        if checkpoint:
            loaded, note = with_its_batch(loaded, call, before, job.world_size(before))
            options = without_batch_numbers(job.options) if note else job.options
            job = replace(job, loaded=loaded, options=options)
            if note:
                tell(note)
            refuse_fewer_steps(loaded.config, before, checkpoint)
        if job.node.rank == 0:  # node 0 plans for all
            if (world := job.world_size(before)) != before.world_size and "NUM_GPUS" not in call.options:
                had = plural(before.world_size, "process")
                tell(f"note: `{run.name}` ran with {had}, and continues with {world}; `NUM_GPUS` says how many")
            refuse_early(job)
        home = job.home(run)
        with restore_on_error(home.config), restore_on_error(home.prepared):
            save_config(loaded, home.config)  # the preparation reads it
            obtain_prepared(home, day=job.day)
            prepared = Prepared.load(home.prepared)
            if checkpoint and job.node.rank == 0:
                compare_fully(checkpoint, loaded.config, job.plan(prepared), prepared)
        return end_run(job, run, run_attempts(job, run, event="resumed"))


def end_run(job: Job, run: RunFolder, outcome: Outcome) -> Outcome:
    """Record how a run ended, send notifications, and write its report; return the outcome."""
    ended, removed = {0: "finished", 130: "stopped", 143: "stopped"}.get(outcome.code, "failed"), is_gone(run.config)
    if not removed:  # new files in a removed folder would resemble a run
        with contextlib.suppress(OSError):  # a full disk must not hide how the run ended
            record_event(
                run,
                ended,
                node_rank=job.node.rank,
                code=outcome.code,
                rank=outcome.rank,
                error=outcome.message or None,
                **({"cause": outcome.cause} if outcome.cause else {}),
                **outcome.stop,
            )
    if job.node.rank == 0:  # several machines may share the folder
        notify(job.loaded.config.launch.notify, run, ended, end_text(run, ended, outcome.message))
        if not removed:
            write_report_of(run)
        wait_until_sent()
    return outcome


def finish(call: Call, run: RunFolder, outcome: Outcome) -> int:
    """Report how a run ended and what to do next; return the exit code."""
    write_cause(outcome)
    if outcome.message:
        tell(f"\n{outcome.message}")
    if outcome.stop:
        tell(f"\n{describe_stop(outcome.stop)}")
    if outcome.code in (LOST, 130, 143) and DELIVERED not in os.environ:
        again = "start again" if outcome.stop and not outcome.stop.get("saved") else "continue"
        tell(f"hint: {again} with: make resume RUN={run.typed}")
    report = run.report if run.report.is_file() else None
    if call.json:
        result = {"run": str(run.path), "code": outcome.code, "rank": outcome.rank, "error": outcome.message or None}
        result |= {"report": str(report) if report else None}
        print(json.dumps(result | {"model": str(run.model) if run.model.is_dir() else None}))
    elif outcome.code == 0:
        for finding in risen_losses(metric_rows(run.metrics)):
            tell(f"\nwarning: {finding.text}\nhint: {finding.remedy}")
        print(f"\ndone: {run.path}\n{_what_is_there(call, run)}" + (f"\n  report   {report}" if report else ""))
    elif report:
        tell(f"report: {report}")
    return outcome.code


def write_report_of(run: RunFolder) -> None:
    """Write the report of a run that made a step; a failure to write it does not fail the run."""
    if run.metrics.is_file() and run.stamp.is_file():
        from sft_play.report.page import write_report

        try:
            write_report(run)
        except Exception as error:  # noqa: BLE001 a week of training must not fail because of its report
            tell(f"no report was written: {error}")


def _what_is_there(call: Call, run: RunFolder) -> str:
    """Return lines that say where a finished run's model is and how to use it; only node 0 has it."""
    if not run.model.is_dir():
        address = call.options.get("MASTER_ADDR")
        return "  the model is on node 0" + (f" ({address})" if address else "")
    scores = f"\n  scores   {eval_command(run)}" if read_facts(run.prepared).get("validation") else ""
    step = f": {described}" if (described := describe_model(run)) else ""
    return typed_here(
        f"  model    {run.model}{step}\n{beside_forecast(run)}  answers  make infer RUN={run.typed}{scores}"
    )
