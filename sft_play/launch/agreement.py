"""A job on several machines: launchers compare facts, agree on a plan for all devices, and report where they differ."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Any

from sft_play.config.load import LoadedConfig, flatten
from sft_play.errors import TOKEN, CheckpointError, DataError, HardwareError, UserError
from sft_play.files import text_sha256
from sft_play.launch.environment import MAKE_ONE, VARIABLE, interface_of
from sft_play.launch.job import Job
from sft_play.launch.machines import FETCH, Facts, Machines
from sft_play.launch.run_folder import RECOVERED, facts_of, has_started, remove_left, require_disk_space
from sft_play.launch.store import print_line
from sft_play.plan.hardware import Device
from sft_play.plan.plan import Plan
from sft_play.plan.ranks import devices_for
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import NAME as MANIFEST
from sft_play.runs.manifest import SHARDED, checksum
from sft_play.runs.origin import code_sha256, torch_cuda, versions
from sft_play.runs.prepared import Prepared, day_of
from sft_play.text import plural

Choose = Callable[[bool], Path | None]


@contextlib.contextmanager
def join_machines(job: Job, run: RunFolder, *, choose: Choose | None = None) -> Iterator[Job]:
    """Yield the job with the devices of all machines; on a single machine, the same job.

    `choose` returns the checkpoint from which a resumed run continues; its argument is whether the others trained while
    this machine waited. Errors of the body are reported to the other machines. Raise `UserError`, the same on each, for
    machines that do not agree, and `RetryableError` for those that do not join within `launch.join_seconds`.
    """
    if job.node.count == 1:
        yield replace(job, checkpoint=choose(False), day=day_of(run.prepared)) if choose else job
        return
    if job.call.options.get("SOURCE") == "probe":
        text = "`SOURCE=probe` measures on one machine, and `NUM_NODES` is more"
        raise UserError(text, hint="SOURCE=trace plans without a probe")
    node, launch, host = job.node, job.loaded.config.launch, socket.gethostname()[:255]
    if node.key is None:
        print_line(f"WARNING: there is no `{VARIABLE}`, so whoever reaches port {node.master_port} can join this run")
        print_line(f"hint: {MAKE_ONE}")
    print_line(
        f"node {node.rank} ({host}): meeting the other nodes at {node.master}"
        if node.rank
        else f"node 0 ({host}): waiting for {node.count - 1} more at port {node.master_port}, up to"
        f" {launch.join_seconds} s"
    )
    silent = float(launch.silent_seconds)
    machines = Machines(node, host=host, run=run.name, patience=float(launch.join_seconds), silent_seconds=silent)
    machines.open()
    try:
        yield meet(replace(job, machines=machines), run, choose)
    except BaseException as error:
        machines.fail(error)
        raise
    finally:
        _remove_marks(job, run)
        machines.close()


def meet(job: Job, run: RunFolder, choose: Choose | None) -> Job:
    """Return the job of an attempt, with the devices of all machines. Raise like `join_machines`."""
    machines = job.machines
    assert machines is not None, "a single machine does not meet others"
    mark, checkpoint = _leave_mark(run) if job.node.rank == 0 else None, None

    def facts(late: bool) -> Facts:
        nonlocal checkpoint
        checkpoint = choose(late) if choose else None
        return _facts(job, machines.name, resumed=choose is not None, checkpoint=checkpoint)

    def answer(of_all: Sequence[Facts]) -> Facts:
        what = "GPU" if job.hardware.kind == "cuda" else "process"
        here = [f"{facts['node']} with {plural(len(facts['devices']), what)}" for facts in of_all]
        day = day_of(run.prepared) if choose else date.today().isoformat()
        return {"mark": mark, "devices": [facts["devices"] for facts in of_all], "here": here, "day": day}

    common = machines.meet(facts, compare_facts, answer)
    print_line(f"all {len(common['here'])} nodes are here: {', '.join(common['here'])}")
    devices = tuple(tuple(map(_device, of_node)) for of_node in common["devices"])
    request = replace(job.options.request, node_devices=devices)
    return replace(
        job,
        node=replace(job.node, interface=_interface(machines.addresses(), job.node.interface)),
        options=replace(job.options, request=request),
        shared=job.node.rank > 0 and common["mark"] is not None and (run.path / common["mark"]).exists(),
        checkpoint=checkpoint,
        day=common["day"],
    )


def agree(job: Job, prepared: Prepared, run: RunFolder) -> tuple[Job, Plan]:
    """Return the job with the port of the workers' store, and the plan, which node 0 makes for all machines.

    Raise `DataError` if machines prepared different data, `CheckpointError` for parts of checkpoints on several
    disks, or `HardwareError`, the same on every machine.
    """
    machines, config, planned = job.machines, job.loaded.config, list[Plan]()
    if job.node.rank == 0:  # all machines have joined, and none writes yet
        planned.append(replace(job.plan(prepared), recoveries=facts_of(run, RECOVERED)))
        require_disk_space(planned[0], config, run)
        remove_left(run, range(planned[0].world_size))
    if machines is None:
        return job, planned[0]
    apart = job.node.rank > 0 and not job.shared
    mine = {
        "node": machines.name,
        "prepared": _content(prepared),
        "apart": apart,
    }
    common = machines.share(
        "prepared",
        mine,
        lambda of_all: compare_prepared(of_all, strategy=planned[0].strategy, save_strategy=config.train.save_strategy),
        lambda _: {
            "plan": planned[0].to_json(),
            "port": machines.workers_port(),
        },
    )
    _remove_marks(job, run)
    if apart and config.launch.max_restarts and FETCH not in os.environ:
        print_line(f"note: {machines.name} has no run folder of node 0, so no restart can continue; share RUNS_DIR")
    plan = Plan.from_json(common["plan"])
    require_disk_space(plan, config, run)
    machines.ranks_by_node = plan.ranks_by_node
    return replace(job, node=replace(job.node, workers_port=common["port"])), plan


@contextlib.contextmanager
def remove_own_part(job: Job, run: RunFolder) -> Iterator[None]:
    """Remove this node's folder in a shared run folder, and empty parents, if the body raises before workers start."""
    try:
        yield
    except BaseException:
        if job.shared and not has_started(run):
            folder = job.home(run).path
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                for part in (folder.parent, folder.parent.parent, run.path):
                    part.rmdir()
        raise


def _leave_mark(run: RunFolder) -> str | None:
    """Create a file with a random name in node 0's run folder, by which others see whether they share the folder."""
    path = run.path / f".seen-{secrets.token_hex(8)}"
    try:
        path.touch()
    except OSError:  # a folder that cannot be written causes a better error later
        return None
    return path.name


def _remove_marks(job: Job, run: RunFolder) -> None:
    for path in run.path.glob(".seen-*") if job.node.rank == 0 else []:
        with contextlib.suppress(OSError):
            path.unlink()


def _interface(addresses: Sequence[str], default: str | None) -> str | None:
    """Return the interface that carries the connections to other nodes; a host's name may resolve to 127.0.1.1."""
    names = [name for address in addresses if (name := interface_of(address))]
    return next((name for name in names if not name.startswith("lo")), next(iter(names), default))


# ---- The facts of a machine


def _facts(job: Job, name: str, *, resumed: bool, checkpoint: Path | None) -> Facts:
    """Return the tables of `COMPARED` on this machine, and the devices of its ranks, in order."""
    request, options, kind = job.options.request, job.options, job.hardware.kind
    command: dict[str, Any] = {
        "command": request.command_strategy,
        "DEEPSPEED_CONFIG": dict(options.deepspeed.settings) if options.deepspeed else None,
        "FSDP settings": dict(options.fsdp),
    }
    start = "its start"
    if checkpoint:
        start = f"{checkpoint.name} ({checksum(checkpoint / MANIFEST)[:12]})"
    return {
        "node": name,
        "nodes": {"NUM_NODES": job.node.count},
        "run": {"run": f"continued from {start}" if resumed else "started"},
        "gpus": {"GPUs": "there" if kind == "cuda" else "none"},
        "versions": versions_here(kind),
        # A resumed run has its own.
        "command": {} if resumed else {name: json.dumps(value, sort_keys=True) for name, value in command.items()},
        "config": config_here(job.loaded),
        "devices": [asdict(device) for device in devices_for(job.hardware, request, False)[1]],
    }


def _device(facts: Facts) -> Device:
    return Device(**facts | {"compute_capability": tuple(facts["compute_capability"] or ()) or None})


OWN_CHOICE = frozenset(
    {
        "launch.join_seconds",
        "launch.silent_seconds",
        "train.dataloader_num_workers",
        "train.dataloader_pin_memory",
    }
)
"""Keys that may differ between nodes, since they have no effect on others."""
PLACES = ("model.name", "model.adapter", "model.tokenizer", "data.")
"""Keys that may name a file by a path of this machine; contents are compared after the preparation."""
SECRET_KEY = re.compile(r"(?:hub_token|password|api_key)$")


def versions_here(kind: str) -> dict[str, str]:
    """Return the versions that must be the same on every node: Python, packages, torch's CUDA, our source code."""
    here = versions()
    cuda = {"torch's CUDA": torch_cuda() or "none"} if kind == "cuda" else {}
    python = ".".join(here["python"].split(".")[:2])
    return {**here, "python": python, **cuda, "source of sft_play": code_sha256()[:12]}


def config_here(loaded: LoadedConfig) -> dict[str, str]:
    """Return the keys of the configuration that must be the same on every node, without secrets and folders."""
    flat = {
        key: json.dumps(_drop_folders(key, value)) for key, value in flatten(loaded).items() if key not in OWN_CHOICE
    }
    return {key: _hide_secret(key, text) for key, text in flat.items()}


def _hide_secret(key: str, text: str) -> str:
    """Return a value that is safe to send and print: for a secret, a few letters of its hash."""
    if text != "null" and (SECRET_KEY.search(key) or TOKEN.search(text)):
        return f"(not shown) {text_sha256(text)[:8]}"
    return text


def _drop_folders(key: str, value: Any) -> Any:
    """Return a value without the folders of this machine."""
    if not key.startswith(PLACES):
        return value
    if isinstance(value, str) and value.startswith(("/", "~")):
        return f".../{PurePosixPath(value).name}"
    if isinstance(value, Mapping):
        return {name: _drop_folders(key, part) for name, part in value.items()}
    return [_drop_folders(key, part) for part in value] if isinstance(value, list) else value


def _content(prepared: Prepared) -> dict[str, str]:
    """Return descriptions of prepared model and data that must be the same on every node, each with a hash."""
    model = prepared.model
    splits = {"training data": prepared.train, "validation data": prepared.validation}
    return {
        "base model": model.fingerprint[:12],
        "tokenizer and template": model.tokenizer_fingerprint[:12],
        **({"adapter": prepared.adapter.fingerprint[:12]} if prepared.adapter else {}),
        **{
            name: f"{split.rows} rows, {split.tokens} tokens, {split.fingerprint[:12]}"
            for name, split in splits.items()
            if split
        },
    }


# ---- Comparison


LONGEST_VALUE, MOST_DIFFERENCES = 120, 20
"""Largest number of letters of a value, and of differences, in a message."""


SAME_DATA = (
    "bring the same files to every node (`data.sync` does it for `make train-cluster`), or let all read a shared folder"
)
SAME_FOLDER = "let RUNS_DIR be a folder that all machines share, or copy the run's folder from node 0 to the others"
COMPARED: tuple[tuple[str, str, type[UserError], str], ...] = (
    ("nodes", "the number of nodes differs", UserError, "give every node the same NUM_NODES"),
    ("run", "the nodes begin at different points", CheckpointError, SAME_FOLDER),
    ("gpus", "some nodes have GPUs and some have none", HardwareError,
     "`make gpu-info` on each node; CUDA_VISIBLE_DEVICES= on all of them trains on CPUs"),
    ("versions", "versions differ", HardwareError, "install the same on every node"),
    ("command", "the command differs", UserError, "type the same command on every node"),
    ("config", "the configuration differs", UserError, "give every node the same file and variables"),
)  # fmt: skip
"""Table of a machine's facts, and the error where it differs."""


def compare_facts(of_all: Sequence[Facts]) -> list[UserError]:
    """Return all errors about facts of machines that differ; a machine without a table is not compared by it."""
    return [
        error
        for name, what, kind, hint in COMPARED
        if all(facts[name] for facts in of_all)
        for error in _differing({facts["node"]: facts[name] for facts in of_all}, what, kind, hint)
    ]


def compare_prepared(of_all: Sequence[Facts], *, strategy: str, save_strategy: str) -> list[UserError]:
    """Return the errors about nodes that prepared different data, or whose run folders split checkpoints."""
    prepared = {facts["node"]: facts["prepared"] for facts in of_all}
    errors = _differing(prepared, "nodes prepared different data", DataError, SAME_DATA)
    apart = ", ".join(facts["node"] for facts in of_all if facts["apart"])
    if apart and strategy in SHARDED and save_strategy != "no":
        text = (
            f"under {strategy} every machine writes a part of each checkpoint, and {apart} cannot see the run folder of"
            " node 0"
        )
        hint = (
            "let RUNS_DIR be a folder that all machines share, or take `make train-distributed` with `launch.strategy:"
            " ddp`, or set `train.save_strategy: no`"
        )
        errors.append(CheckpointError(text, hint=hint))
    return errors


def _differing(tables: Mapping[str, Mapping[str, Any]], what: str, kind: type[UserError], hint: str) -> list[UserError]:
    """Return an error with every key that differs from the first node's, and its values."""
    first, lines = next(iter(tables), ""), []
    for name, table in tables.items():
        reference = tables[first]
        for key in [*reference, *(key for key in table if key not in reference)]:
            if reference.get(key) != table.get(key):
                lines.append(f"`{key}` is {_quote(reference.get(key))} on {first}, {_quote(table.get(key))} on {name}")
    rest = f"; and {len(lines) - MOST_DIFFERENCES} more" if len(lines) > MOST_DIFFERENCES else ""
    return [kind(f"{what}: {'; '.join(lines[:MOST_DIFFERENCES])}{rest}", hint=hint)] if lines else []


def _quote(value: Any) -> str:
    text = "not there" if value is None else str(value)
    return f"`{text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 20] + ' ... ' + text[-15:]}`"
