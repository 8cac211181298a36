"""A job on several machines: the launchers meet in the store of node 0, and all of them train by one plan for the devices of all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sft_play.config.rules import elastic_bounds
from sft_play.errors import HardwareError, UserError
from sft_play.launch.agreement import NodeFacts, config_here, data_apart, disagreements, folders_apart, versions_here
from sft_play.launch.environment import MAKE_ONE, VARIABLE, interface_of
from sft_play.launch.job import Job
from sft_play.launch.meeting import Given
from sft_play.launch.node import Elsewhere
from sft_play.launch.rendezvous import Rendezvous
from sft_play.launch.run_folder import has_started, remove_left, require_disk_space
from sft_play.launch.store import say
from sft_play.launch.verdict import Outcome
from sft_play.plan.calibration import Calibration, read_calibration, same_name
from sft_play.plan.hardware import Device
from sft_play.plan.nodes import devices_for
from sft_play.plan.plan import Plan
from sft_play.runs.checkpoints import published, step_of
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import NAME as MANIFEST
from sft_play.runs.manifest import checksum
from sft_play.runs.prepared import Prepared

ABSENT = "SFT_PLAY_ABSENT"
"""Variable of node 0's launcher: ranks of machines that what started it knows not to come now; an elastic run does not wait for them."""
MARK = re.compile(r"\.seen-[0-9a-f]{16}")
"""Names of the files by which machines see whether they share a run folder."""
LOOK_SECONDS = 1.0
"""How often node 0 of an elastic run looks for machines that want to take part, and for a checkpoint that is newer."""


@contextlib.contextmanager
def joined(job: Job, run: RunFolder, *, choose: Callable[[], Path | None] | None = None) -> Iterator[Job]:
    """Yields the job that knows the devices of all machines, with its rendezvous; of one machine the same job.

    `choose` returns the checkpoint that a resumed run continues from, anew for a later attempt that takes this machine in.

    Whatever the body raises is told to the others. Raises `UserError` for machines that do not agree, the same on each, and
    `RetryableError` for those that do not come within `launch.join_seconds`.
    """
    if job.node.count == 1:
        yield replace(job, checkpoint=choose() if choose else None)
        return
    if job.call.options.get("SOURCE") == "probe":
        raise UserError(
            "`SOURCE=probe` measures on one machine, and `NUM_NODES` is more", hint="SOURCE=trace plans without a probe"
        )
    ours = opened(job, run)
    try:
        yield meet(replace(job, rendezvous=ours), run, choose)
    except BaseException as error:
        ours.fail(error)
        raise
    finally:
        _remove_marks(job, run)
        ours.close()


def meet(job: Job, run: RunFolder, choose: Callable[[], Path | None] | None) -> Job:
    """Returns the job of an attempt, which knows its machines, their devices and its own place among them. Raises as `joined` does."""
    ours = job.rendezvous
    assert ours is not None, "one machine has nobody to meet"
    mark, checkpoint = _mark(run) if job.node.rank == 0 else None, None

    def give() -> Given:
        nonlocal checkpoint
        checkpoint = choose() if choose else None
        facts = _facts(job, run.name, resumed=choose is not None, checkpoint=checkpoint)
        return {"facts": facts.to_json()}

    nodes: list[NodeFacts] = []

    def answer(found: Sequence[Given]) -> Given:
        nodes[:] = [NodeFacts.from_json(one["facts"]) for one in found]
        here = f"all {len(nodes)} nodes are here: {', '.join(_counted(node) for node in nodes)}"
        return {"mark": mark, "processes": [len(node.devices) for node in nodes], "said": [here, *_unmeasured(nodes)]}

    found = ours.meet(give, _judge_nodes, answer)
    for line in found["said"]:
        say(line)
    shared = job.node.rank > 0 and _sees(run, found["mark"])
    place, count = ours.members.index(job.node.rank), len(ours.members)
    request = replace(job.options.request, node_devices=tuple(node.devices for node in nodes), num_nodes=count, node_rank=place)
    node = replace(job.node, count=count, place=place, interface=_interface(ours.own_addresses(), job.node.interface))
    return replace(
        job, nodes=tuple(nodes), processes=sum(found["processes"]), node=node, options=replace(job.options, request=request),
        shared=shared, apart=found["mark"] is not None and job.node.rank > 0 and not shared, checkpoint=checkpoint,
    )  # fmt: skip


def agreed(job: Job, prepared: Prepared, run: RunFolder, recoveries: tuple[Mapping[str, Any], ...]) -> tuple[Job, Plan]:
    """Returns the job with the port of the workers' store, and the plan. Of several machines node 0 plans, when all have prepared the same.

    Raises `DataError`, `CheckpointError` (parts of checkpoints on several disks) or `HardwareError`, the same on every machine.
    """
    ours, config, planned = job.rendezvous, job.loaded.config, list[Plan]()
    if job.node.rank == 0:  # all are here, and none has begun to write
        planned.append(replace(job.plan(prepared), recoveries=recoveries))
        require_disk_space(planned[0], config, run)
        remove_left(run, range(planned[0].world_size))
    if ours is None:
        return job, planned[0]

    def judge(found: Sequence[Given]) -> list[UserError]:
        apart = [node for node, one in zip(job.nodes, found, strict=True) if one.get("apart")]
        return [
            *data_apart(job.nodes, [one["prepared"] for one in found]),
            *folders_apart(apart, strategy=planned[0].strategy, save_strategy=config.train.save_strategy),
        ]

    found = ours.share(
        "prepared", {"prepared": _content(prepared), "apart": job.apart}, judge,
        lambda _: {"plan": planned[0].to_json(), "port": ours.workers_port()},
    )  # fmt: skip
    _remove_marks(job, run)
    plan = Plan.from_json(found["plan"])
    require_disk_space(plan, config, run)
    ours.share("room", {}, lambda _: [], lambda _: {})
    ours.ranks_by_node = plan.ranks_by_node
    return replace(job, node=replace(job.node, workers_port=int(found["port"]))), plan


def opened(job: Job, run: RunFolder) -> Rendezvous:
    """Returns this machine's end of the run's store, open. Raises as `Rendezvous.open` does."""
    node, launch = job.rendezvous.node if job.rendezvous else job.node, job.loaded.config.launch
    bounds = elastic_bounds(launch.elastic)
    host = socket.gethostname()[:255]
    if node.key is None:
        say(
            f"WARNING: there is no `{VARIABLE}`, so whoever reaches port {node.master_port} can join this run: the network is trusted"
        )
        say(f"hint: {MAKE_ONE}")
    if node.rank > 0:
        say(f"node {node.rank} ({host}): meeting the other nodes at {node.master}")
    else:
        say(f"node 0 ({host}): waiting for {node.count - 1} more at port {node.master_port}, up to {launch.join_seconds} s")
    ours = Rendezvous(
        node, host=host, run=run.name, patience=float(launch.join_seconds), silent_seconds=float(launch.silent_seconds),
        least=min(bounds[0], node.count) if bounds else None, absent=[int(word) for word in os.environ.get(ABSENT, "").split()],
    )  # fmt: skip
    ours.open()
    return ours


def elsewhere_of(job: Job, run: RunFolder) -> Elsewhere | None:
    """Returns what tells the supervising loop how the attempt ended on another machine; `None` where there is none.

    On node 0 of an elastic run it also looks for machines that want to take part: they are taken in after the next checkpoint.
    """
    ours = job.rendezvous
    if ours is None:
        return None
    looked, since = 0.0, None

    def ask(stopping: bool) -> Outcome | int | None:
        nonlocal looked, since
        if job.node.rank == 0 and ours.least is not None and not stopping and time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            names = ours.names(ours.look_for_wants(lambda facts: judge_want(job, facts)))
            step = max(map(step_of, published(run)), default=0) if names else 0
            if names and since is None:
                since = step
                say(f"{names} has come; it is taken in after the next checkpoint")
            elif names and since is not None and step > since:
                ours.ask_to_stop(f"starting again with {names}")
        return ours.ended_elsewhere(stopping=stopping)

    return ask


def judge_want(job: Job, given: Given) -> list[UserError]:
    """Node 0: returns why a machine that comes while the run trains cannot be taken in; the checkpoint is compared when it is."""
    try:
        theirs = NodeFacts.from_json(given.get("facts"))
    except ValueError as error:
        return [_not_understood(error)]
    return disagreements([job.nodes[0], replace(theirs, resumed=job.nodes[0].resumed, checkpoint=job.nodes[0].checkpoint)])


def _mark(run: RunFolder) -> str | None:
    """Leaves a file with a random name in node 0's run folder, until all have looked: by that they see whether they share it."""
    path = run.path / f".seen-{secrets.token_hex(8)}"
    try:
        path.touch()
    except OSError:  # a folder that cannot be written says so again, and better
        return None
    return path.name


def _sees(run: RunFolder, mark: object) -> bool:
    return isinstance(mark, str) and MARK.fullmatch(mark) is not None and (run.path / mark).exists()


def _remove_marks(job: Job, run: RunFolder) -> None:
    for path in run.path.glob(".seen-*") if job.node.rank == 0 else []:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def own_part(job: Job, run: RunFolder) -> Iterator[None]:
    """Removes what this node has of its own in a shared run folder when the body raises before workers have started, and what is then empty."""
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


def _facts(job: Job, run: str, *, resumed: bool, checkpoint: Path | None) -> NodeFacts:
    request, options, ours = job.options.request, job.options, job.rendezvous
    assert ours is not None, "one machine has nobody to tell"
    command: dict[str, Any] = {
        "command": request.command_strategy,
        "DEEPSPEED_CONFIG": dict(options.deepspeed.settings) if options.deepspeed else None,
        "FSDP settings": dict(options.fsdp),
    }
    devices = devices_for(job.hardware, request, False)[1]
    return NodeFacts(
        rank=job.node.rank, host=ours.host, num_nodes=ours.node.count, run=run, resumed=resumed,
        checkpoint=_named(checkpoint), command={name: json.dumps(value, sort_keys=True) for name, value in command.items()},
        config=config_here(job.loaded), versions=versions_here(job.hardware.kind), kind=job.hardware.kind,
        devices=devices, measured=_measured(devices, job.hardware.kind),
    )  # fmt: skip


def _measured(devices: Sequence[Device], kind: str) -> tuple[Calibration, ...]:
    """Returns what `make bench` measured here on these devices, for the plan of all nodes."""
    found = (read_calibration(name) for name in {same_name(device.name): device.name for device in devices}.values())
    return tuple(replace(one, links={}) for one in found if one is not None and one.kind == kind)


def _named(checkpoint: Path | None) -> str | None:
    """Returns a checkpoint's name with the beginning of its manifest's checksum: by that its content is known."""
    return f"{checkpoint.name} ({checksum(checkpoint / MANIFEST)[:12]})" if checkpoint else None


def _judge_nodes(given: Sequence[Given]) -> list[UserError]:
    try:
        return disagreements([NodeFacts.from_json(one.get("facts")) for one in given])
    except ValueError as error:
        return [_not_understood(error)]


def _not_understood(error: ValueError) -> UserError:
    return HardwareError(f"a node sent what is not understood: {error}", hint="install the same SFT-Play on every node")


def _unmeasured(nodes: Sequence[NodeFacts]) -> list[str]:
    """Returns a note on nodes that keep the others' measures from counting: a measured speed and a guessed one do not compare."""
    known = {same_name(one.device) for node in nodes for one in node.measured}
    without = [node.name for node in nodes if any(same_name(device.name) not in known for device in node.devices)]
    note = f"note: speeds are guessed until training has measured them: `make bench` was not run on {', '.join(without)}"
    return [note] if known and without else []


def _counted(node: NodeFacts) -> str:
    count, unit = len(node.devices), "GPU" if node.kind == "cuda" else "process"
    plural = "" if count == 1 else "s" if unit == "GPU" else "es"
    return f"{node.name} with {count} {unit}{plural}"


def _interface(addresses: Sequence[str], known: str | None) -> str | None:
    """Returns the interface that really carries the connections to other nodes: a host's name may lead to 127.0.1.1."""
    found = [name for address in addresses if (name := interface_of(address))]
    outside = [name for name in found if not name.startswith("lo")] or found
    if len(set(outside)) > 1:
        names = ", ".join(dict.fromkeys(outside))
        say(
            f"note: other nodes are reached by several interfaces ({names}); `{outside[0]}` is used: set GLOO_SOCKET_IFNAME for another"
        )
    return outside[0] if outside else known


def _content(prepared: Prepared) -> dict[str, str]:
    """Returns what must be the same on every node, in words that end with a hash."""
    found = {
        "base model": prepared.model.fingerprint[:12],
        "tokenizer and template": prepared.model.tokenizer_fingerprint[:12],
    }
    for name, split in (("training data", prepared.train), ("validation data", prepared.validation)):
        if split:
            found[name] = f"{split.rows} rows, {split.tokens} tokens, {split.fingerprint[:12]}"
    return found
