"""The attempts of a launch: preparation, probes, the files of each attempt, its workers, and what follows."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

from sft_play.config.load import save_config
from sft_play.config.reader import record_of
from sft_play.errors import CheckpointError, HardwareError, RetryableError, UserError, typed_here
from sft_play.files import read_json, write_json, write_text
from sft_play.launch import recovery
from sft_play.launch.agreement import agree, meet
from sft_play.launch.deepspeed import resolve
from sft_play.launch.environment import (
    DROPPED,
    Node,
    WorkerEnvironment,
    dump_variables,
    indices_of,
    ranks_of,
    remove_stale_build_locks,
)
from sft_play.launch.job import Job
from sft_play.launch.liveness import LIMITS
from sft_play.launch.machines import FETCH
from sft_play.launch.node import WORKER_MODULE, supervise
from sft_play.launch.panel import is_terminal, show_live
from sft_play.launch.process import StoppedBySignal, bind_to_parent, raise_what_was_heard, stop_code
from sft_play.launch.recovery import Following, Restarts
from sft_play.launch.resume import launch_facts, newest_checkpoint
from sft_play.launch.run_folder import RECOVERED, explain_disk_errors, record_event
from sft_play.launch.settings import accelerate_yaml
from sft_play.launch.verdict import LOST, OUT_OF_MEMORY, Outcome, stop_facts
from sft_play.plan.detect import detect
from sft_play.plan.hardware import GIB, Hardware
from sft_play.plan.plan import Plan, describe_batches
from sft_play.plan.request import Request
from sft_play.plan.show import show_plan
from sft_play.plan.sources import Probed, load_probe, memory_of, save_probe
from sft_play.runs.checkpoints import step_of
from sft_play.runs.folder import OWN, RunFolder
from sft_play.runs.prepared import Prepared
from sft_play.runs.progress import PANEL, notify
from sft_play.text import tell


def run_attempts(job: Job, run: RunFolder, *, event: str) -> Outcome:
    """Run the workers; restart them after a lost rank, or with smaller micro-batches after memory ran out.

    Return how the last attempt ended.
    """
    prepared = Prepared.load(job.home(run).prepared)
    if job.call.options.get("SOURCE") == "probe":
        probe(job, run, prepared)
    job, plan = agree(job, prepared, run)
    first = step_of(job.checkpoint) if job.checkpoint else 0
    budget = Restarts(limit=job.loaded.config.launch.max_restarts, step=first)
    with explain_disk_errors(run):
        outcome = run_attempt(job, plan, run, event=event)
    try:
        with explain_disk_errors(run):
            while outcome.code == LOST:
                # Lazy and cached, since it reads every byte and an end does not need it.
                newest = cache(partial(newest_checkpoint, run))
                following, alone = _follow(job, partial(_decide, job, prepared, plan, outcome, budget, newest))
                if not following.again:
                    return following.outcome or outcome
                job = _restart(job, run, following, newest, alone=alone)
                if job.machines or following.less:
                    job, plan = agree(job, prepared, run)
                if plan.device == "cuda":
                    wait_until_free(job.hardware, indices_of(plan, job.node))
                outcome = run_attempt(job, plan, run, event=None)
    except (UserError, StoppedBySignal, KeyboardInterrupt) as error:  # no worker lives
        if isinstance(error, UserError):
            outcome = Outcome(code=error.exit_code, message=error.render())
        else:
            number = signal.Signals[error.signal] if isinstance(error, StoppedBySignal) else signal.SIGINT
            outcome = Outcome(code=stop_code(number), stop=stop_facts(run, (number,), ()))
        if job.machines:
            job.machines.fail(error)
    return outcome


def _follow(job: Job, decide: Callable[[], Following]) -> tuple[Following, bool]:
    """Return what follows, the same on all machines, and whether this one decided alone because node 0 is gone."""
    decided = job.machines.follow(lambda: asdict(decide())) if job.machines else None
    return (Following.from_json(decided), False) if decided else (decide(), job.machines is not None)


def _restart(job: Job, run: RunFolder, following: Following, newest: Callable[[], Path | None], *, alone: bool) -> Job:
    """Report and record what follows, and return the job of the next attempt, for which machines meet again.

    A machine that is `alone` connects to node 0 again, which may come back.
    """
    tell(f"\n{following.message}")
    if following.less:
        job = job.with_request(replace(job.options.request, **following.less))
    facts = {**({"launch": launch_facts(job.options)} if following.less else {}), **following.facts}
    with contextlib.suppress(OSError):  # a full disk must not end the run for lack of this record
        record_event(run, following.event, node_rank=job.node.rank, **facts)
    if job.node.rank == 0:
        notify(job.loaded.config.launch.notify, run, following.event, f"{run.name}: {following.message}")
    time.sleep(following.pause)
    if (machines := job.machines) is None:
        return replace(job.with_fresh_port(), checkpoint=newest())
    if alone:
        machines.close()
        machines.open()
    return meet(job, run, lambda _: newest_here(run, job.node.rank))


FETCH_POLL_SECONDS = 0.2


def newest_here(run: RunFolder, node_rank: int) -> Path | None:
    """Return the newest valid checkpoint, once `cluster.train` has brought node 0's to this machine, where it does."""
    if node_rank and os.environ.get(FETCH):
        wish = run.path / f".fetch-node{node_rank}"
        wish.touch()
        while wish.exists():
            time.sleep(FETCH_POLL_SECONDS)
            raise_what_was_heard()
    return newest_checkpoint(run)


def _decide(
    job: Job, prepared: Prepared, plan: Plan, outcome: Outcome, budget: Restarts, newest: Callable[[], Path | None]
) -> Following:
    """Return what follows the end of an attempt."""
    if outcome.cause != OUT_OF_MEMORY and not budget.limit:
        return Following()
    try:
        checkpoint = newest()
    except CheckpointError as error:
        message = f"{error.render()}\n\nwhy the attempt ended: {outcome.first_line}"
        return Following(outcome=Outcome(code=error.exit_code, rank=outcome.rank, message=message))
    if outcome.cause == OUT_OF_MEMORY:
        return _with_less(job, prepared, plan, outcome, checkpoint, budget) if job.node.rank == 0 else Following()
    return budget.following(outcome, checkpoint)


def _with_less(
    job: Job, prepared: Prepared, before: Plan, outcome: Outcome, checkpoint: Path | None, budget: Restarts
) -> Following:
    """Return what follows after memory ran out."""
    config, launch = job.loaded.config, job.options.request
    request = Request(config=config, hardware=job.hardware, shape=job.shape, launch=launch)
    reduced = recovery.remedy(request, before, outcome, budget.retries)
    if isinstance(reduced, str):
        return Following(outcome=replace(outcome, message=f"{outcome.message}\n\n{reduced}"))
    budget.retries += 1
    job = job.with_request(reduced)
    plan = job.plan(prepared)
    changed = recovery.facts(before, plan, outcome, checkpoint)
    text = recovery.announcement(config, before, plan, outcome, checkpoint, budget.retries)
    less = {name: getattr(reduced, name) for name in recovery.LESS}
    return Following(again=True, message=text, event=RECOVERED, facts=changed, less=less)


def worker_arguments(
    run: RunFolder, node: Node, *, checkpoint: Path | None = None, plan: Plan | None = None
) -> list[str]:
    """Return the arguments of `accelerate launch`, run by this Python so that it belongs to this environment.

    `plan` is required where nodes have unequal numbers of ranks.
    """
    arguments = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(run.accelerate)]
    if node.count > 1:
        # Every node has the same accelerate.yaml, perhaps on a shared disk; only the node's rank differs.
        arguments += ["--machine_rank", str(node.rank)]
    if plan and len(set(plan.node_ranks)) > 1:
        # accelerate starts num_processes // num_machines processes on this node and has no other option for their
        # number; the world size is the sum over all nodes, which the agents of torchrun exchange. The environment is
        # that of a launch with equal numbers.
        arguments += ["--num_processes", str(len(ranks_of(plan, node)) * node.count)]
    arguments += ["--monitor_interval", "0.5", "--max_restarts", "0", "-m", WORKER_MODULE, "--run", str(run.path)]
    return arguments + (["--resume", str(checkpoint)] if checkpoint else [])


def show_launch(arguments: Sequence[str], environment: WorkerEnvironment) -> str:
    """Return the command and the variables of a launch, in a form that can be typed."""
    lines = ["launch", f"  {shlex.join(['accelerate', 'launch', *arguments[3:]])}"]
    lines += [f"  {name}={shlex.quote(value)}" for name, value in sorted(environment.set_here.items())]
    lines += [f"  {name}={value}  (yours)" for name, value in environment.inherited.items()]
    lines += [f"  because of {note}" for note in environment.notes]
    return "\n".join(lines)


def run_attempt(job: Job, plan: Plan, run: RunFolder, *, event: str | None) -> Outcome:
    """Write the run's files and run the workers to their end; with an `event`, record it and print the plan.

    Several machines all return how the first of them failed.
    """
    notices = write_launch_files(job, plan, run)
    own = dump_variables(plan, run.logs, os.environ) | ({OWN: str(job.home(run).path)} if job.shared else {})
    environment = job.environment(plan, own)
    remove_stale_build_locks(os.environ.get("TORCH_EXTENSIONS_DIR"))
    arguments = worker_arguments(run, job.node, checkpoint=job.checkpoint, plan=plan)
    console = sys.stderr if job.call.json else sys.stdout
    launched = show_launch(arguments, environment)
    if event:
        why, saves = job.call.flag("WHY"), job.loaded.config.train.save_strategy != "no"
        stops = "saves and stops it" if saves else "stops it and saves nothing (`train.save_strategy: no`)"
        print("\n".join([show_plan(plan, why=why), *([launched] if why else [])]), file=console)
        for notice in (*job.options.notices, *notices):
            print(f"note: {notice}", file=console)
        print(
            typed_here(
                f"run {run.path}; make watch RUN={run.typed} shows it, Ctrl-C or make stop RUN={run.typed} {stops}"
            )
            + ("" if why else f"; WHY=1 shows the reasons, {run.plan.name} keeps them")
            + "\n",
            file=console,
            flush=True,
        )
        record_event(
            run,
            event,
            node_rank=job.node.rank,
            world_size=plan.world_size,
            strategy=plan.strategy,
            steps=plan.steps,
            batches=describe_batches(plan.ranks),
            checkpoint=job.checkpoint.name if job.checkpoint else None,
            launch=launch_facts(job.options),
        )
    ranks, variables = ranks_of(plan, job.node), environment.variables
    live = ranks.start == 0 and is_terminal(console) and not job.loaded.config.train.extra.get("disable_tqdm")
    with show_live(run, console, enabled=live) as rank0:
        outcome = supervise(
            arguments,
            {**variables, PANEL: "1"} if live else variables,
            run,
            ranks,
            console=rank0,
            shown=f"{launched}\n",
            machines=job.machines,
        )
    return job.machines.settle(outcome) if job.machines else outcome


def write_launch_files(job: Job, plan: Plan, run: RunFolder) -> list[str]:
    """Write config.json, plan.json, accelerate.yaml and deepspeed.json; return notices about the user's own JSON."""
    notices: list[str] = []
    if plan.zero:
        config, hidden_size = job.loaded.config, job.shape.hidden_size
        settings, notices = resolve(job.options.deepspeed, plan, config, hidden_size=hidden_size)
        write_json(run.deepspeed, settings)
    if not job.shared:  # a shared folder has node 0's, with the paths of that machine
        save_config(job.loaded, run.config)
    plan.save(run.plan)
    write_text(run.accelerate, accelerate_yaml(plan, job.node, run, fsdp=job.options.fsdp))
    return notices


PREPARATION_END_SECONDS = 6.0
"""Three times this is within the 25 s that a stop on request may take."""
DELIVERED = "SFT_PLAY_PREPARED"
"""Variable of a launcher started by `train-cluster`, which itself reports what to type next: a file with the facts of
model and data that it prepared and sent.
"""


def obtain_prepared(run: RunFolder, *words: str, day: str | None = None) -> None:
    """Resolve the model and prepare the data in a separate process, since that needs torch.

    `day` is the date that the chat template writes into rows (`data.prepare.prepare_data`). Where another machine has
    already prepared model and data for this one, use its result. Raise `SystemExit` with the code of the process if it
    is not 0, `RetryableError` if a signal killed it.

    An exception here stops the process too, which gets time to end its own children and to remove half-written files.
    If this process is killed, the kernel stops it.
    """
    if not words and (brought := os.environ.get(DELIVERED)):
        record_of(read_json(Path(brought)), Prepared).save(run.prepared)
        return
    argv = [sys.executable, "-m", "sft_play.prepare", "--run", str(run.path), *words, *(["--day", day] if day else [])]
    environment = {k: v for k, v in os.environ.items() if k not in DROPPED}
    bound = bind_to_parent(signal.SIGTERM)
    # `preexec_fn` is safe here: the only other thread writes to sockets.
    with subprocess.Popen(argv, env=environment, stdout=sys.stderr, preexec_fn=bound) as process:  # noqa: PLW1509
        try:
            code = process.wait()
        except BaseException as error:
            _stop(process, interrupted=isinstance(error, KeyboardInterrupt))
            raise
    if code < 0:
        raise RetryableError(
            f"the preparation was killed by {signal.Signals(-code).name}, which this program did not send",
            hint="`dmesg` says whether memory ran out; the same command starts again, and finished parts are kept",
        )
    if code:
        raise SystemExit(code)


def _stop(process: subprocess.Popen[bytes], *, interrupted: bool) -> None:
    """End the preparation. If `interrupted`, Ctrl-C reached it too, and a second signal would disturb its clean-up."""
    for ask in (*(() if interrupted else (process.terminate,)), process.poll, process.terminate, process.kill):
        ask()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PREPARATION_END_SECONDS)
            return


MOST_PROBES = 4
STEPS = 2


def probe(job: Job, run: RunFolder, prepared: Prepared) -> None:
    """Probe this job's plan in a folder inside the run folder, and repeat with the measurements until the plan holds.

    Raise `HardwareError` for workers that fail for another reason than memory.
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
        if load_probe(path):
            return
        micro = max(rank.micro_batch for rank in plan.ranks)
        tell(f"probe: {STEPS} steps with the longest rows, micro-batch {micro} ...")
        short = replace(plan, steps=STEPS, steps_per_epoch=STEPS, warmup_steps=0)
        write_launch_files(quiet, short, folder)
        variables = job.environment(short).variables
        arguments = [*worker_arguments(folder, job.node), "--probe"]
        with Path(os.devnull).open("wb") as nowhere:
            outcome = supervise(arguments, variables, folder, ranks_of(plan, job.node), console=nowhere.fileno())
        save_probe(path, _measure(outcome, plan, folder))


def _measure(outcome: Outcome, plan: Plan, run: RunFolder) -> list[Probed]:
    """Return each rank's measurements; after memory ran out, ranks with as large a micro-batch as failed."""
    if outcome.code == 0:
        return [Probed(**read_json(run.logs / f"probe-rank{rank.rank}.json")) for rank in plan.ranks]
    if outcome.code in (130, 143):
        raise SystemExit(outcome.code)
    if outcome.cause != OUT_OF_MEMORY:
        raise HardwareError(f"the probe failed: {outcome.message}", hint="SOURCE=trace plans without one")
    tell("probe: memory ran out; trying less")
    return [
        Probed(
            allocated_bytes=0,
            reserved_bytes=0,
            device_bytes=0,
            failed=outcome.rank is None
            or rank.rank == outcome.rank
            or rank.micro_batch >= plan.ranks[outcome.rank].micro_batch,
        )
        for rank in plan.ranks
    ]


MEMORY_SLACK = 0.02
"""Share of a card's memory that may be missing, since programs such as a display take and free memory."""


def wait_until_free(before: Hardware, devices: Collection[int]) -> None:
    """Wait until as much memory is free on these devices as `before` the run, for at most `LIMITS.free_memory` seconds.

    Raise `HardwareError` for a card that no longer answers.
    """
    deadline, announced = time.monotonic() + LIMITS.free_memory, False
    while taken := _held(before, detect(), devices):
        words = ", ".join(f"{size / GIB:.1f} GiB on cuda:{index}" for index, size in taken.items())
        if time.monotonic() > deadline:
            tell(
                f"\nwarning: {words} still held after {LIMITS.free_memory:.0f} s; continuing"
                "\n\nhint: `nvidia-smi` shows the programs that hold it"
            )
            return
        if not announced:
            tell(f"\nwaiting for the memory of ended processes to be freed: {words}")
        announced = True
        time.sleep(LIMITS.look)


def _held(before: Hardware, now: Hardware, devices: Collection[int]) -> dict[int, int]:
    """Return index -> bytes that were free before and are not now; empty if the driver has disappeared."""
    if now.kind != before.kind:
        return {}
    pairs = enumerate(zip(before.devices, now.devices, strict=False))
    missing = {index: then.free_bytes - card.free_bytes for index, (then, card) in pairs if index in devices}
    return {index: size for index, size in missing.items() if size > MEMORY_SLACK * before.devices[index].memory_bytes}
