"""A job on several machines: it joins the other nodes' launchers, and all of them make one plan from the devices of all."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sft_play.errors import HardwareError, UserError, first_line
from sft_play.launch.agreement import NodeFacts, config_here, data_apart, disagreements, folders_apart, versions_here
from sft_play.launch.job import Job
from sft_play.launch.key import MAKE_ONE, VARIABLE
from sft_play.launch.meeting import Given, Meeting, say
from sft_play.launch.meeting_guest import Guest
from sft_play.launch.meeting_host import Host
from sft_play.launch.network import interface_of, is_of_this_machine
from sft_play.launch.run_folder import has_started
from sft_play.plan.calibration import Calibration, read_calibration, same_name
from sft_play.plan.choices import devices_for
from sft_play.plan.hardware import Device
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import NAME as MANIFEST
from sft_play.runs.manifest import checksum
from sft_play.runs.prepared import Prepared

MARK = re.compile(r"\.seen-[0-9a-f]{16}")
"""Names of the files by which nodes see whether they share a run folder."""


@contextlib.contextmanager
def joined(job: Job, run: RunFolder, *, resumed: bool, checkpoint: Path | None, again: bool = False) -> Iterator[Job]:
    """Yields the job that knows the devices of all nodes, with its meeting; the same job where there is one node.

    `again`: this launcher has launched the run before. Whatever the body raises is told to the other nodes. Raises `UserError` for
    nodes that do not agree, the same on each, and `RetryableError` for those that do not come within `launch.join_seconds`.
    """
    if job.node.count == 1:
        yield job
        return
    if job.call.options.get("SOURCE") == "probe":
        raise UserError(
            "`SOURCE=probe` measures on one machine, and `NUM_NODES` is more", hint="SOURCE=trace plans without a probe"
        )
    facts = _facts(job, run.name, resumed=resumed, checkpoint=checkpoint)
    meeting = _meeting(job, facts.host, again=again)
    try:
        with _marked(job, run) as mark:
            found = meeting.exchange({"facts": facts.to_json(), "mark": mark}, _judge_nodes)
            first = found[0]["mark"]
            shared = job.node.rank > 0 and _sees(run, first)
            meeting.exchange({}, lambda _: [])  # all have looked
        nodes = [NodeFacts.from_json(one["facts"]) for one in found]
        yield replace(_with_all(job, meeting, nodes), shared=shared, apart=first is not None and job.node.rank > 0 and not shared)
    except BaseException as error:
        meeting.fail(error)
        raise
    finally:
        meeting.close()


@contextlib.contextmanager
def _marked(job: Job, run: RunFolder) -> Iterator[str | None]:
    """Leaves a file with a random name in node 0's run folder for a while: by that the others see whether they share it."""
    if job.node.rank > 0:
        yield None
        return
    path, left = run.path / f".seen-{secrets.token_hex(8)}", False
    with contextlib.suppress(OSError):  # a folder that cannot be written says so again, and better
        path.touch()
        left = True
    try:
        yield path.name if left else None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _sees(run: RunFolder, mark: object) -> bool:
    return isinstance(mark, str) and MARK.fullmatch(mark) is not None and (run.path / mark).exists()


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


def agreed(job: Job, plan: Plan, prepared: Prepared) -> Plan:
    """Returns node 0's plan, by which all nodes train, when all have prepared the same; ends the meeting.

    A node's own plan may rest on what was measured on it alone. Raises `DataError`, `CheckpointError` (parts of checkpoints on several
    disks) or `HardwareError`, the same on every node.
    """
    if job.meeting is None:
        return plan
    given: Given = {"prepared": _content(prepared), "world_size": plan.world_size, "apart": job.apart}
    if job.node.rank == 0:
        given["plan"] = plan.to_json()
    saving = job.loaded.config.train.save_strategy
    found = job.meeting.exchange(given, lambda all_of_them: judge_prepared(job.nodes, all_of_them, saving))
    job.meeting.over = True
    job.meeting.close()
    try:
        return Plan.from_json(found[0]["plan"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise HardwareError(
            f"node 0's plan cannot be read: {first_line(error)}", hint="install the same SFT-Play on every node"
        ) from error


def _facts(job: Job, run: str, *, resumed: bool, checkpoint: Path | None) -> NodeFacts:
    request, options = job.options.request, job.options
    command: dict[str, Any] = {
        "command": request.command_strategy,
        "DEEPSPEED_CONFIG": dict(options.deepspeed.settings) if options.deepspeed else None,
        "FSDP settings": dict(options.fsdp),
    }
    devices = devices_for(job.hardware, request, False)[1]
    return NodeFacts(
        rank=job.node.rank, host=socket.gethostname()[:255], num_nodes=job.node.count, run=run, resumed=resumed,
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


def _meeting(job: Job, host: str, *, again: bool) -> Meeting:
    node, patience = job.node, float(job.loaded.config.launch.join_seconds)
    where = f"{node.master_address}:{node.master_port}"
    if node.key is None:
        say(
            f"WARNING: there is no `{VARIABLE}`, so whoever reaches port {node.master_port} can join this run: the network is trusted"
        )
        say(f"hint: {MAKE_ONE}")
    if node.rank > 0:
        say(f"node {node.rank} ({host}): meeting the other nodes at {where}")
        return Guest(node=node, host=host, patience=patience)
    say(f"node 0 ({host}): waiting for {node.count - 1} more at port {node.master_port}, up to {patience:g} s")
    if not is_of_this_machine(node.master_address):
        say(f"note: `MASTER_ADDR` `{node.master_address}` is no address of this machine; the others look for node 0 there")
    return Host(node=node, host=host, patience=patience, again=again)


def _judge_nodes(given: Sequence[Given]) -> list[UserError]:
    try:
        return disagreements([NodeFacts.from_json(one.get("facts")) for one in given])
    except (ValueError, TypeError, KeyError) as error:
        return [HardwareError(f"a node sent what is not understood: {error}", hint="install the same SFT-Play on every node")]


def _with_all(job: Job, meeting: Meeting, nodes: Sequence[NodeFacts]) -> Job:
    request = replace(job.options.request, node_devices=tuple(node.devices for node in nodes))
    interface = _interface(meeting.addresses(), job.node.interface)
    say(f"all {len(nodes)} nodes are here: {', '.join(_counted(node) for node in nodes)}")
    _say_unmeasured(nodes)
    return replace(
        job, meeting=meeting, nodes=tuple(nodes), node=replace(job.node, interface=interface),
        options=replace(job.options, request=request),
    )  # fmt: skip


def _say_unmeasured(nodes: Sequence[NodeFacts]) -> None:
    """Says which nodes keep the others' measures from counting: a measured speed and a guessed one do not compare."""
    known = {same_name(one.device) for node in nodes for one in node.measured}
    without = [node.name for node in nodes if any(same_name(device.name) not in known for device in node.devices)]
    if known and without:
        say(f"note: speeds are guessed until training has measured them: `make bench` was not run on {', '.join(without)}")


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


def judge_prepared(nodes: Sequence[NodeFacts], given: Sequence[Given], save_strategy: str) -> list[UserError]:
    """Returns why nodes cannot train together with what each has prepared and plans for; none where they can."""
    content = [one.get("prepared") for one in given]
    if not all(isinstance(one, dict) and all(isinstance(v, str) for v in one.values()) for one in content):
        return [HardwareError("a node sent what is not understood", hint="install the same SFT-Play on every node")]
    ranks = sum(len(node.devices) for node in nodes)
    planned = {one.get("world_size") for one in given}
    if planned != {ranks}:
        told = ", ".join(f"{node.name} plans for {one.get('world_size')}" for node, one in zip(nodes, given, strict=True))
        text = f"the nodes have {ranks} processes in all, but {told}"
        return [HardwareError(text, place="NUM_GPUS", hint="give NUM_GPUS on every node")]
    return [
        *data_apart(nodes, [one for one in content if isinstance(one, dict)]),
        *folders_apart(
            [node for node, one in zip(nodes, given, strict=True) if one.get("apart") is True],
            strategy=_strategy(given), save_strategy=save_strategy,
        ),
    ]  # fmt: skip


def _strategy(given: Sequence[Given]) -> str:
    """Returns the strategy of node 0's plan; a plan that cannot be read says so elsewhere."""
    plan = given[0].get("plan")
    return str(plan.get("strategy")) if isinstance(plan, dict) else ""
