"""Run folders at launch: their names, exclusive reservation, events, and disk space."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.reader import fields_of, misfit
from sft_play.config.schema import Config
from sft_play.errors import CheckpointError, HardwareError, UserError
from sft_play.files import (
    append_json_line,
    lock,
    open_own,
    read_json_lines,
    read_object,
    remove_half_written,
    translate_disk_errors,
)
from sft_play.plan.plan import LaunchRequest, Plan
from sft_play.runs.checkpoints import NAME as CHECKPOINT
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder, meant_run, run_path, runs_folder
from sft_play.runs.gate import all_runs, check_run
from sft_play.text import as_typed, list_some, tell

NAME_PATTERN = re.compile(r"[^\W_][\w.+=-]{0,119}")
"""Letters, digits, `_ . + = -`; a letter or digit first, so that the folder is visible and not taken for an option."""
OF_CHECKPOINT = "`make resume` continues from its newest checkpoint; infer, eval and merge take one as CHECKPOINT="
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
STARTS, FINAL_EVENTS = frozenset({"started", "resumed"}), frozenset({"finished", "failed", "stopped"})
RECOVERED, RESTARTED = "recovered", "restarted"
OF_LAUNCHES = ("event", "time", "node", "launch")
"""Fields of an event that only the launcher reads."""
EVENT: Mapping[str, Any] = {
    "event": str,
    "time": float,
    "node": int,
    "code": int | None,
    "error": str | None,
    "launch": Mapping[str, Any],
    "step": int | None,
    "saved": str | None,
    "signal": str | None,
    "note": str | None,
}
LAUNCH: Mapping[str, Any] = {
    "command": fields_of(LaunchRequest)["command_strategy"],
    "num_gpus": int | None,
    "num_nodes": int,
    "deepspeed": Mapping[str, Any] | None,
    "fsdp": Mapping[str, Any],
}
"""Types of the fields of an event, and of a launch in it."""


MEASURING = ("bench", "profile")
"""Commands whose runs are made for their measurements, and named so."""


def choose_name(run_name: str | None, config_path: Path | None, command: str = "") -> str:
    """Return `RUN_NAME`, or the config's name and the time (`quickstart-20261121-051500`, `quickstart-bench-...`).

    Raise `UserError` for a name that is not valid.
    """
    if run_name is None:
        stem = re.sub(r"[^\w.+=-]", "-", config_path.stem if config_path else "run").lstrip("._-+=") or "run"
        return "-".join([stem, *(word for word in MEASURING if word == command), time.strftime("%Y%m%d-%H%M%S")])
    if not NAME_PATTERN.fullmatch(run_name):
        raise UserError(
            f"`RUN_NAME` is `{run_name}`; expected up to 120 letters, digits and `_ . + = -`, the first a letter or"
            " digit",
            hint="RUNS_DIR moves the folder that runs are kept in; RUN_NAME is only the name inside it",
        )
    return run_name


@contextlib.contextmanager
def reserve_folder(
    name: str, *, node_rank: int = 0, never_started_too: bool = False, unnamed: bool = False
) -> Iterator[RunFolder]:
    """Reserve `runs/NAME/` for this launch, and remove it if the body raises before workers start.

    mkdir is atomic, so exactly one of two launches with the same name gets it; if `unnamed`, the other takes the next
    free name, such as `demo-20261121-051500.2`. Nodes other than 0 may share the folder with node 0 on a network disk:
    they join a folder in which their node has not started yet. With `never_started_too`, take over a folder that an
    earlier launch left before its workers started.
    """
    run = RunFolder(runs_folder() / name)
    if unnamed:
        others = (RunFolder(runs_folder() / f"{name}.{number}") for number in itertools.count(2))
        run, created = next(run for run in itertools.chain([run], others) if _make(run, node_rank, unnamed=True)), True
    else:
        created = not (never_started_too and run.path.is_dir() and not has_started(run)) and _make(run, node_rank)
    try:
        yield run
    except BaseException:
        if created and not has_started(run):
            shutil.rmtree(run.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # removes `runs/` only if it is empty
                run.path.parent.rmdir()
        raise


def _make(run: RunFolder, node_rank: int, *, unnamed: bool = False) -> bool:
    """Create the folder; return whether this process created it. An existing one is an error if the name was typed."""
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.mkdir()
    except FileExistsError:
        if not run.path.parent.is_dir() or not run.path.is_dir():
            raise UserError(
                f"`{run.path}` cannot be made: a file or a dangling link is in its way",
                hint="remove it or set RUNS_DIR",
            ) from None
        if unnamed or (node_rank > 0 and not started_by(run, node_rank)):
            return False
        if has_trained(run) and not run.config.is_file():
            raise cannot_continue(run, run.config) from None
        raise UserError(
            f"the run `{run.name}` exists already: `{run.path}`",
            hint=f"choose another RUN_NAME, or continue it: make resume RUN={run.typed}",
        ) from None
    except OSError as error:
        raise UserError(
            f"`{run.path}` cannot be made: {error.strerror}", hint="RUNS_DIR moves the folder that runs are kept in"
        ) from error
    return True


@contextlib.contextmanager
def lock_run(run: RunFolder, *, node_rank: int = 0) -> Iterator[None]:
    """Lock a run for this node's launcher, since two launchers would overwrite each other's files.

    The kernel releases the lock when this process ends in any way. Raise `UserError` if another launcher has it,
    `HardwareError` if nothing can be written. A disk without locks (Lustre or NFS with some mount options) causes a
    warning.
    """
    check_run(run, writes=True)
    path = run.path / f".launcher-node{node_rank}.lock"
    with contextlib.ExitStack() as stack:
        try:
            # `make stop` finds the owner by this file, even on a disk without locks.
            own = stack.enter_context(open_own(path))
            for _ in range(10):  # `make runs` may hold the lock for a moment
                if (descriptor := lock(path)) is not None:
                    stack.callback(os.close, descriptor)
                    break
                time.sleep(0.02)
            else:
                owner = os.pread(own.fileno(), 20, 0).decode("utf-8", "replace").strip() or "?"
                text = f"the run `{run.name}` is in use: process {owner} trains it"
                raise UserError(text, hint="wait for it, or end that process first")
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise _not_writable(run, error) from error
            tell(
                f"warning: {run.path}: this disk has no file locks ({error.strerror}), so a second launcher would not"
                " be detected; do not start one\n\nhint: mount it with locks (Lustre: `-o flock`; NFS: without"
                " `nolock`, or with `local_lock=flock`), or set RUNS_DIR"
            )
        try:
            own.truncate(0)
            own.write(f"{os.getpid()}\n".encode())
        except OSError as error:
            raise _not_writable(run, error) from error
        yield


def _not_writable(run: RunFolder, error: OSError) -> HardwareError:
    hint = "a run needs a folder that can be written, and room on its disk: `df` and `mount` say more, or set RUNS_DIR"
    return HardwareError(f"the run cannot be written: {error.strerror}", place=str(run.path), hint=hint)


def read_events(run: RunFolder, node_rank: int | None = None) -> list[dict[str, Any]]:
    """Return the run's events, or those of a node, oldest first, without a line that a crash cut short."""
    return [
        {"node": 0, **event}
        for event in read_json_lines(run.events)
        if "event" in event
        and misfit(event, EVENT) is None
        and event.get("node", 0) >= 0
        and node_rank in (None, event.get("node", 0))
    ]


def record_event(run: RunFolder, event: str, *, node_rank: int = 0, **facts: Any) -> None:
    """Append a line to `events.jsonl`: the event, its time in seconds since 1970, and its node."""
    append_json_line(run.events, {"event": event, "time": time.time(), "node": node_rank, **facts})


def has_started(run: RunFolder) -> bool:
    """Return whether workers ever started in this folder, by its events or, as these may be lost, by workers' files."""
    return any(event["event"] in STARTS for event in read_events(run)) or has_trained(run)


def has_trained(run: RunFolder) -> bool:
    """Return whether this folder has files of workers: a checkpoint, even a partial one, a model, or metrics."""
    measured = run.metrics.is_file() and run.metrics.stat().st_size > 0
    return measured or run.model.is_dir() or any(run.checkpoints.glob("step-*"))


def started_by(run: RunFolder, node_rank: int) -> bool:
    """Return whether this node has started its workers in this folder, or the run has ended."""
    return any(event["node"] == node_rank or event["event"] in FINAL_EVENTS for event in read_events(run))


def find_run(name: str, *, writes: bool = False) -> RunFolder:
    """Return the run called `name`, or in the folder `name`, after the checks of `runs.gate`.

    `writes` says whether the command writes into the run's folder. Raise `CheckpointError` with the existing runs, or
    for a missing `config.json`.
    """
    if path := run_path(name):
        if CHECKPOINT.fullmatch(path.name) and path.parent.name == RunFolder(path).checkpoints.name:
            of = path.absolute().parent.parent
            raise CheckpointError(
                f"`{path}` is a checkpoint, not a run", hint=f"the run is RUN={as_typed(of)}; {OF_CHECKPOINT}"
            )
        return check_run(RunFolder(path), writes=writes)
    for folder in ([] if "/" in name else [runs_folder() / name]) + [Path(name)]:
        if folder.is_dir() and has_started(check_run(RunFolder(folder))):
            raise cannot_continue(RunFolder(folder), RunFolder(folder).config)
    stem, _, step = name.partition("@")
    if step and run_path(stem):  # as `MODEL_NAME` and `MODEL_ADAPTER` take it
        hint = f"RUN={as_typed(stem)}; {OF_CHECKPOINT}{as_typed(step)}"
        raise CheckpointError(f"`{name}` is a checkpoint, not a run", hint=hint)
    listing = list_some([run.name for run in all_runs()], 10) or "none"
    hint = f"{meant_run(name)}runs in `{runs_folder()}`, newest first: {listing}; RUN= also takes a folder"
    raise CheckpointError(f"there is no run `{name}`", hint=hint)


def find_named_run(call: Call, *, writes: bool = False) -> RunFolder:
    """Return the run that a command's `RUN` names. Raise `UserError` without `RUN`, and like `find_run`."""
    if not call.options.get("RUN"):
        raise UserError(
            f"`make {call.command}` needs `RUN=name-or-folder`",
            hint=f"make {call.command} RUN=NAME; `make runs` lists the runs",
        )
    return find_run(call.options["RUN"], writes=writes)


def is_finished(run: RunFolder) -> bool:
    """Return whether the run's last event says that it finished, and its model exists."""
    events = read_events(run, 0)
    return bool(events) and events[-1]["event"] == "finished" and (run.model / "stamp.json").is_file()


def exit_records(run: RunFolder, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Return the records of workers that have left: rank -> `{"rank", "code", "error", "time"}`."""
    records = {}
    for rank in ranks:
        if record := read_object(run.rank_exit(rank)):
            records[rank] = record | {"rank": rank}
    return records


def remove_left(run: RunFolder, ranks: range) -> None:
    """Remove half-written files of killed launchers and workers; none may be writing."""
    of_launchers = (run.config, run.plan, run.prepared, run.accelerate, run.deepspeed, run.report)
    for path in (*of_launchers, *map(run.rank_exit, ranks), run.stamp, run.training_metrics):
        remove_half_written(path)


def facts_of(run: RunFolder, kind: str) -> tuple[Mapping[str, Any], ...]:
    """Return what plan, stamp and `training_metrics.json` keep of a run's recoveries or restarts, oldest first."""
    events = [event for event in read_events(run, 0) if event["event"] == kind]
    return tuple({name: value for name, value in event.items() if name not in OF_LAUNCHES} for event in events)


def launches(run: RunFolder) -> list[dict[str, Any]]:
    """Return the events of the user's launches, oldest first. Raise `CheckpointError` if there are none."""
    events = [event for event in read_events(run) if event["event"] in STARTS and event.get("launch")]
    facts = [event["launch"] for event in events]
    if not facts or any(not launch.keys() >= LAUNCH.keys() or misfit(launch, LAUNCH) is not None for launch in facts):
        raise cannot_continue(run, run.events)
    return events


def last_plan(run: RunFolder) -> Plan:
    """Return the run's last plan. Raise `CheckpointError` if it is missing."""
    if not run.plan.is_file():
        raise cannot_continue(run, run.plan)
    return Plan.load(run.plan)


def cannot_continue(run: RunFolder, path: Path) -> CheckpointError:
    """Return the error for a run whose file `path` is missing or damaged, with what can still be used."""
    if not has_started(run):
        text = f"`{run.name}` never started, so there is nothing to continue from"
        return CheckpointError(text, hint="start it again under another RUN_NAME")
    newest = newest_valid(run, sizes_only=True)[0]
    hint = "restore it from a backup, or copy it from a run that the same command starts under another RUN_NAME"
    if newest:
        hint += f"; infer, eval and merge still take RUN={run.typed} CHECKPOINT={newest.name}"
    return CheckpointError(
        f"`{run.name}` has started, but its `{path.name}` is missing or damaged", place=str(path), hint=hint
    )


SPARE_BYTES = 64 * 2**20
"""Size of a run's logs, TensorBoard, tokenizer and JSON files."""


def checkpoint_bytes(plan: Plan) -> int:
    """Return the size of a checkpoint: trained weights (for `full`, the complete model) and optimizer states."""
    sizes = 0
    for name, shards in (
        ("adapters", plan.gathers),
        ("trained", plan.gathers),
        ("optimizer", plan.sharded),
    ):
        values = [int(rank.memory_bytes.get(name, 0)) for rank in plan.ranks]
        sizes += sum(values) if shards else max(values, default=0)
    return sizes


def require_disk_space(plan: Plan, config: Config, run: RunFolder) -> None:
    """Raise `HardwareError` if the disk of the run folder lacks space for the run's largest extent.

    That is the retained checkpoints, the best one, a new one in addition, and `model/`. Existing checkpoints already
    have their space, except for the new one and the model.
    """
    size, limit = checkpoint_bytes(plan), config.train.save_total_limit
    checkpoints = 0 if config.train.save_strategy == "no" else (3 if limit is None else limit) + 1
    there = sum(path.lstat().st_size for path in run.checkpoints.rglob("*") if path.is_file())
    needed = SPARE_BYTES + size * (checkpoints + 1 + bool(checkpoints)) - min(checkpoints * size, there)
    free = shutil.disk_usage(run.path).free
    if free < needed:
        raise HardwareError(
            f"the disk of `{run.path.parent}` has {free / 2**30:.3f} GiB free, but this run needs {needed / 2**30:.3f}"
            f" GiB: checkpoints of {size / 2**30:.3f} GiB each, the model and logs",
            hint="free some space, set RUNS_DIR to another disk, or lower `train.save_total_limit`",
        )


def explain_disk_errors(run: RunFolder) -> AbstractContextManager[None]:
    """Turn an `OSError` of the body about a full or read-only disk into a `HardwareError` with its place."""

    def hint(full: bool, _: Path) -> str:
        then = f"make resume RUN={run.typed}" if has_started(run) else "the same command again"
        return f"{'free some space' if full else '`mount` and `dmesg` may say why'}, then: {then}"

    return translate_disk_errors(run.path, hint)
