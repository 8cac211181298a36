"""What runs before the workers: the preparation, in a process of its own, and probes of the plan."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sft_play.errors import DataError, HardwareError, RetryableError, UserError
from sft_play.files import read_json
from sft_play.launch.attempt import write_launch_files
from sft_play.launch.environment import DROPPED
from sft_play.launch.job import Job
from sft_play.launch.local import worker_arguments
from sft_play.launch.node import bound_to_parent, supervise
from sft_play.launch.run_folder import raise_what_was_heard
from sft_play.launch.verdict import OUT_OF_MEMORY, Outcome
from sft_play.plan.measured import Probed, load, save
from sft_play.plan.plan import Plan
from sft_play.plan.sources import memory_of
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared

END_SECONDS = 6.0
"""Three times this, and everything has ended within the 25 s of a stop on request."""


def run_preparation(words: Sequence[str]) -> None:
    """Runs a command to its end; raises `SystemExit` with its code where that is not 0, `RetryableError` where a signal killed it.

    Whatever stops us stops it too: it ends the processes that it started and removes what is half-written, for which it has a while. When we are
    killed, the kernel stops it.
    """
    environment = {k: v for k, v in os.environ.items() if k not in DROPPED}
    bound = bound_to_parent(signal.SIGTERM)
    with subprocess.Popen(words, env=environment, stdout=sys.stderr, preexec_fn=bound) as process:  # noqa: PLW1509 - its thread only writes to sockets
        try:
            code = process.wait()
        except BaseException as error:
            _stop(process, told=isinstance(error, KeyboardInterrupt))
            raise
    if code < 0:
        raise RetryableError(
            f"the preparation was killed by {_name(-code)}, by nothing that this program does",
            hint="`dmesg` says whether memory ran out; the same command begins again, and what was ready is kept",
        )
    if code:
        raise SystemExit(code)


def _name(number: int) -> str:
    """Returns a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _stop(process: subprocess.Popen[bytes], *, told: bool) -> None:
    """Ends the preparation. `told`: Ctrl-C reached it too, and a second signal would only disturb its clearing up."""
    for ask in (*(() if told else (process.terminate,)), process.poll, process.terminate, process.kill):
        ask()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return


DELIVERED = "SFT_PLAY_PREPARED"
"""Variable that names a file: model and data were prepared on another machine and brought to this one (`cluster`)."""

FETCH = "SFT_PLAY_FETCH"
"""Variable of a launcher whose run folder is not node 0's: what started it over SSH brings checkpoints when it is asked."""
WISH_SECONDS = 0.2


def fetch_checkpoint(run: RunFolder, node_rank: int) -> None:
    """Waits until this machine has the checkpoint from which node 0 continues, where that has to be brought (`cluster.remote`)."""
    if os.environ.get(FETCH):
        wish = run.path / f".fetch-node{node_rank}"
        wish.touch()
        while wish.exists():
            time.sleep(WISH_SECONDS)
            raise_what_was_heard()


def delivered(run: RunFolder) -> Prepared | None:
    """Returns what another machine has prepared for this run, with where it stands here; `None` where nothing was brought.

    Raises `UserError` where the variable is not meant for this run, `DataError` where what it names is not there.
    """
    if not (name := os.environ.get(DELIVERED)):
        return None
    try:
        found = read_json(Path(name))
        prepared, meant = Prepared.from_json(found["prepared"]), str(found["run"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"`{DELIVERED}` does not name what a cluster's master brought: {error}", place=name) from error
    if meant != run.name:
        raise UserError(
            f"`{DELIVERED}` is meant for the run `{meant}`, not for `{run.name}`", place=name, hint=f"unset {DELIVERED}"
        )
    folders = [prepared.model.path, *(split.path for split in (prepared.train, prepared.validation) if split)]
    if missing := [folder for folder in folders if not Path(folder).is_dir()]:
        raise DataError(f"`{missing[0]}`, which the master should have brought, is not on this machine", place=name)
    return prepared


def prepare(run: RunFolder, *words: str) -> None:
    """Resolves the model and prepares the data in a process of its own, since that needs torch. Its error becomes ours.

    Where another machine has done so for this one, what it brought is taken.
    """
    if not words and (prepared := delivered(run)):
        prepared.save(run.prepared)
        return
    run_preparation([sys.executable, "-m", "sft_play.prepare", "--run", str(run.path), *words])


MOST_PROBES = 4
STEPS = 2


def probe(job: Job, run: RunFolder, prepared: Prepared) -> None:
    """Probes this job's plan in a folder inside the run's, and plans again with what was found, until the plan is one that was probed.

    Raises `HardwareError` for workers that fail for another reason than memory.
    """
    folder = RunFolder(run.path / "probe")
    folder.path.mkdir(exist_ok=True)
    prepared.save(folder.prepared)
    config = job.loaded.config
    train = replace(config.train, eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
    train = replace(train, extra={**train.extra, "report_to": "none"})
    quiet = replace(job, loaded=replace(job.loaded, config=replace(config, train=train)))
    for _ in range(MOST_PROBES):
        plan = job.plan(prepared)
        path = memory_of(config, prepared).probe_path(plan)
        if load(path):
            return
        micro = max(rank.micro_batch for rank in plan.ranks)
        print(f"probe: {STEPS} steps with the longest rows, micro-batch {micro} ...", file=sys.stderr, flush=True)
        short = replace(plan, steps=STEPS, steps_per_epoch=STEPS, warmup_steps=0)
        write_launch_files(quiet, short, folder)
        variables = job.environment(short).variables
        arguments = worker_arguments(folder, job.node, module="sft_play.probe")
        with Path(os.devnull).open("wb") as nowhere:
            outcome = supervise(arguments, variables, folder, job.ranks_here(plan), console=nowhere.fileno())
        save(path, _measure(outcome, plan, folder))


def _measure(outcome: Outcome, plan: Plan, run: RunFolder) -> list[Probed]:
    """Returns what each rank wrote; after a shortage of memory the rank that ran short is marked, and all others with it."""
    if outcome.code == 0:
        return [Probed(**read_json(run.logs / f"probe-rank{rank.rank}.json")) for rank in plan.ranks]
    if outcome.code in (130, 143):
        raise SystemExit(outcome.code)
    if outcome.cause != OUT_OF_MEMORY:
        raise HardwareError(f"the probe failed: {outcome.message}", hint="SOURCE=trace plans without one")
    print("probe: memory ran out; trying less", file=sys.stderr)
    return [
        Probed(
            rank=rank.rank, micro_batch=rank.micro_batch, allocated_bytes=0, reserved_bytes=0, device_bytes=0, seconds_per_step=0.0,
            failed=outcome.rank is None or rank.rank == outcome.rank or rank.micro_batch >= plan.ranks[outcome.rank].micro_batch,
        )
        for rank in plan.ranks
    ]  # fmt: skip
