"""A job on several machines: their launchers compare facts, all train by one plan for the devices of all, and one error
says where they differ.
"""

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

from sft_play.config.call import flatten
from sft_play.config.load import LoadedConfig
from sft_play.errors import TOKEN, CheckpointError, DataError, HardwareError, UserError
from sft_play.files import text_sha256
from sft_play.launch.environment import MAKE_ONE, VARIABLE, interface_of
from sft_play.launch.job import Job
from sft_play.launch.machines import FETCH, Facts, Machines
from sft_play.launch.run_folder import has_started, remove_left, require_disk_space
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
    """Yield the job that knows the devices of all machines, with its part among them; of one machine the same job.

    `choose` returns the checkpoint that a resumed run continues from, told whether the others have trained while this
    machine waited for them. Whatever the body raises is reported to the
    others. Raise `UserError` for machines that do not agree, the same on each, and `RetryableError` for those that do
    not come within `launch.join_seconds`.
    """
    if job.node.count == 1:
        yield replace(job, checkpoint=choose(False) if choose else None)
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
    """Return the job of an attempt, which knows the devices of all machines. Raise as `join_machines` does."""
    machines = job.machines
    assert machines is not None, "one machine has nobody to meet"
    mark, checkpoint, nodes = _leave_mark(run) if job.node.rank == 0 else None, None, list[tuple[Device, ...]]()

    def facts(late: bool) -> Facts:
        nonlocal checkpoint
        checkpoint = choose(late) if choose else None
        return _facts(job, machines.name, resumed=choose is not None, checkpoint=checkpoint)

    def answer(of_all: Sequence[Facts]) -> Facts:
        nodes[:] = [tuple(map(_device, facts["devices"])) for facts in of_all]
        what = "GPU" if job.hardware.kind == "cuda" else "process"
        here = [f"{facts['node']} with {plural(len(facts['devices']), what)}" for facts in of_all]
        day = day_of(run.prepared) if choose else date.today().isoformat()
        return {"mark": mark, "processes": sum(map(len, nodes)), "here": here, "day": day}

    common = machines.meet(facts, compare_facts, answer)
    print_line(f"all {len(common['here'])} nodes are here: {', '.join(common['here'])}")
    request = replace(job.options.request, node_devices=tuple(nodes))
    return replace(
        job,
        processes=common["processes"],
        node=replace(job.node, interface=_interface(machines.addresses(), job.node.interface)),
        options=replace(job.options, request=request),
        shared=job.node.rank > 0 and common["mark"] is not None and (run.path / common["mark"]).exists(),
        checkpoint=checkpoint,
        day=common["day"],
    )


def agree(job: Job, prepared: Prepared, run: RunFolder, recoveries: tuple[Mapping[str, Any], ...]) -> tuple[Job, Plan]:
    """Return the job with the port of the workers' store, and the plan. Of several machines node 0 plans, when all have
    prepared the same.

    Raise `DataError`, `CheckpointError` (parts of checkpoints on several disks) or `HardwareError`, the same on every
    machine.
    """
    machines, config, planned = job.machines, job.loaded.config, list[Plan]()
    if job.node.rank == 0:  # all are here, and none has begun to write
        planned.append(replace(job.plan(prepared), recoveries=recoveries))
        require_disk_space(planned[0], config, run)
        remove_left(run, range(planned[0].world_size))
    if machines is None:
        return job, planned[0]
    apart = job.node.rank > 0 and not job.shared
    mine = {
        "node": machines.name,
        "prepared": _content(prepared),
        "apart": apart,
        "alone": apart and FETCH not in os.environ,
    }
    common = machines.share(
        "prepared",
        mine,
        lambda of_all: compare_prepared(of_all, strategy=planned[0].strategy, save_strategy=config.train.save_strategy),
        lambda of_all: {
            "plan": planned[0].to_json(),
            "port": machines.workers_port(),
            "alone": [facts["node"] for facts in of_all if facts["alone"]],
        },
    )
    _remove_marks(job, run)
    if common["alone"] and config.launch.max_restarts:
        print_line(
            f"note: {', '.join(common['alone'])}: no restart can continue there without the run folder of node 0; share"
            " RUNS_DIR"
        )
    plan = Plan.from_json(common["plan"])
    require_disk_space(plan, config, run)
    machines.ranks_by_node = plan.ranks_by_node
    return replace(job, node=replace(job.node, workers_port=common["port"])), plan


@contextlib.contextmanager
def remove_own_part(job: Job, run: RunFolder) -> Iterator[None]:
    """Remove what this node has of its own in a shared run folder when the body raises before workers have started, and
    what is then empty.
    """
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
    """Leave a file with a random name in node 0's run folder, until all have looked: by that they see whether they
    share it.
    """
    path = run.path / f".seen-{secrets.token_hex(8)}"
    try:
        path.touch()
    except OSError:  # a folder that cannot be written says so again, and better
        return None
    return path.name


def _remove_marks(job: Job, run: RunFolder) -> None:
    for path in run.path.glob(".seen-*") if job.node.rank == 0 else []:
        with contextlib.suppress(OSError):
            path.unlink()


def _interface(addresses: Sequence[str], known: str | None) -> str | None:
    """Return the interface that really carries the connections to other nodes: a host's name may lead to 127.0.1.1."""
    names = [name for address in addresses if (name := interface_of(address))]
    return next((name for name in names if not name.startswith("lo")), next(iter(names), known))


# ---- What a machine says of itself


def _facts(job: Job, name: str, *, resumed: bool, checkpoint: Path | None) -> Facts:
    """Return what must be the same on all machines, and the devices of this one's ranks, in order."""
    request, options, kind = job.options.request, job.options, job.hardware.kind
    command: dict[str, Any] = {
        "command": request.command_strategy,
        "DEEPSPEED_CONFIG": dict(options.deepspeed.settings) if options.deepspeed else None,
        "FSDP settings": dict(options.fsdp),
    }
    return {
        "node": name,
        "num_nodes": job.node.count,
        "resumed": resumed,
        "checkpoint": f"{checkpoint.name} ({checksum(checkpoint / MANIFEST)[:12]})" if checkpoint else None,
        "command": {name: json.dumps(value, sort_keys=True) for name, value in command.items()},
        "config": config_here(job.loaded),
        "versions": versions_here(kind),
        "kind": kind,
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
"""Keys that each node may have its own way: none of them is seen by another."""
PLACES = ("model.name", "model.adapter", "model.tokenizer", "data.")
"""Keys that may name a file by a path of this machine; their content is compared after the preparation."""
SECRET_KEY = re.compile(r"(?:hub_token|password|api_key)$")


def versions_here(kind: str) -> dict[str, str]:
    """Return the versions that must be the same on every node: Python, packages, CUDA of torch's build, our own
    source.
    """
    here = versions()
    cuda = {"torch's CUDA": torch_cuda() or "none"} if kind == "cuda" else {}
    python = ".".join(here["python"].split(".")[:2])
    return {**here, "python": python, **cuda, "source of sft_play": code_sha256()[:12]}


def config_here(loaded: LoadedConfig) -> dict[str, str]:
    """Return the configuration as it is compared: every key but those that each node may have its own way."""
    flat = {
        key: json.dumps(_drop_folders(key, value)) for key, value in flatten(loaded).items() if key not in OWN_CHOICE
    }
    return {key: _hide_secret(key, text) for key, text in flat.items()}


def _hide_secret(key: str, text: str) -> str:
    """Return a value that can be sent over the network and shown: of a secret only a few letters of its hash."""
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
    """Return what must be the same on every node, in words that end with a hash."""
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


# ---- What must be the same


LONGEST_VALUE, MOST_DIFFERENCES = 120, 20
"""Letters of a value, and differences, that a message shows."""


def compare_facts(of_all: Sequence[Facts]) -> list[UserError]:
    """Return what is wrong with what these machines say of themselves, all at once."""
    shared = "let RUNS_DIR be a folder that all machines share, or copy the run's folder from node 0 to the others"
    gpus = "`make gpu-info` on each node; CUDA_VISIBLE_DEVICES= on all of them trains on CPUs"
    same_command, same_file = "type the same command on every node", "give every node the same file and variables"
    resumed = [facts["resumed"] for facts in of_all]

    def all_of(key: str, words: Mapping[Any, str] | None = None) -> dict[str, Any]:
        return {facts["node"]: words.get(facts[key], facts[key]) if words else facts[key] for facts in of_all}

    kinds = all_of("kind", {"cuda": "GPUs", "cpu": "no GPU"})
    ways = all_of("resumed", {True: "continues the run", False: "starts it"})
    starts = all_of("checkpoint", {None: "its start"}) if all(resumed) else {}
    command = {} if any(resumed) else all_of("command")
    counts, versions, same_versions = all_of("num_nodes"), all_of("versions"), "install the same on every node"
    return [
        *_unlike(counts, "`NUM_NODES` is not the same on every node", UserError, "give every node the same NUM_NODES"),
        *_unlike(ways, "some nodes start the run, others continue it", CheckpointError, shared),
        *_unlike(kinds, "some nodes have GPUs and some have none", HardwareError, gpus),
        *_differing(versions, "versions differ", HardwareError, same_versions),
        *_differing(command, "the command differs", UserError, same_command),
        *_differing(all_of("config"), "the configuration differs", UserError, same_file),
        *_unlike(starts, "the nodes would continue from different checkpoints", CheckpointError, shared),
    ]


def compare_prepared(of_all: Sequence[Facts], *, strategy: str, save_strategy: str) -> list[UserError]:
    """Return what is wrong with what nodes have prepared, and with run folders in which no checkpoint could be
    complete.
    """
    hint = (
        "bring the same files to every node (`data.sync` does it for `make train-cluster`), or let all read one shared"
        " folder"
    )
    prepared = {facts["node"]: facts["prepared"] for facts in of_all}
    errors = _differing(prepared, "nodes prepared different data", DataError, hint)
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


def _unlike(words: Mapping[str, Any], what: str, kind: type[UserError], hint: str) -> list[UserError]:
    """Return one error with what each node has, where that is not the same."""
    told = ", ".join(f"{name}: {word}" for name, word in words.items())
    return [kind(f"{what}: {told}", hint=hint)] if len(set(words.values())) > 1 else []


def _differing(tables: Mapping[str, Mapping[str, Any]], what: str, kind: type[UserError], hint: str) -> list[UserError]:
    """Return one error with every key that differs from the first node's, and its values."""
    first, lines = next(iter(tables), ""), []
    for name, theirs in tables.items():
        mine = tables[first]
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            if mine.get(key) != theirs.get(key):
                lines.append(f"`{key}` is {_quote(mine.get(key))} on {first}, {_quote(theirs.get(key))} on {name}")
    rest = f"; and {len(lines) - MOST_DIFFERENCES} more" if len(lines) > MOST_DIFFERENCES else ""
    return [kind(f"{what}: {'; '.join(lines[:MOST_DIFFERENCES])}{rest}", hint=hint)] if lines else []


def _quote(value: Any) -> str:
    text = "not there" if value is None else str(value)
    return f"`{text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 20] + ' ... ' + text[-15:]}`"
