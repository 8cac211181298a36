"""`make gpu-info` and `make memory-check`: what this machine has, who holds its memory, and whether CONFIG fits into
the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft_play.config.call import Call
from sft_play.errors import UserError
from sft_play.plan.detect import Shown, all_hidden, detect, look_at_gpus, nvml_session, other_gpu, versions_of
from sft_play.plan.hardware import GIB, Device, cpu_only
from sft_play.plan.plan import LaunchRequest
from sft_play.plan.request import DoesNotFitError
from sft_play.plan.sources import needs_several, parse_source, plan_for
from sft_play.text import gib

LINKS = {
    10: "same board",
    20: "one PCIe switch",
    30: "several PCIe switches",
    40: "one PCIe host bridge",
    50: "one CPU socket",
    60: "across sockets",
}
"""NVML's levels of `nvmlDeviceGetTopologyCommonAncestor`."""
SHOWN_PROCESSES = 5


def gpu_info(call: Call) -> int:
    """Print the GPUs that a run here would see, and how they are linked; return 0."""
    facts = gpu_facts()
    print(json.dumps(facts, indent=2) if call.json else _gpu_lines(facts))
    return 0


def gpu_facts() -> dict[str, Any]:
    """Return `{"count", "driver", "cuda", "visible_devices", "gpus": [...], "links": [...], "cpu": {...},
    "reason"}`.
    """
    hardware = cpu_only()
    (device,) = hardware.devices
    cpu = {
        "name": device.name,
        "threads": hardware.cpu_threads,
        "memory_bytes": device.memory_bytes,
        "free_bytes": device.free_bytes,
    }
    cpu["bf16"] = device.bf16
    facts: dict[str, Any] = {
        "count": 0,
        "driver": None,
        "cuda": None,
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpus": [],
        "links": [],
        "cpu": cpu,
        "reason": None,
    }
    with nvml_session() as nvml:
        if nvml is None:
            return facts | {"reason": other_gpu() or "no NVIDIA driver answers on this machine"}
        found, count = look_at_gpus(nvml)
        facts["count"], (facts["driver"], facts["cuda"]) = len(found), versions_of(nvml)
        facts["gpus"], facts["links"] = [_gpu(nvml, *one) for one in found], _links(nvml, [gpu for gpu, _ in found])
    if not found:
        hidden = f"CUDA_VISIBLE_DEVICES={facts['visible_devices']} hides all {count}"
        facts["reason"] = hidden if count else "the NVIDIA driver answers, but there is no GPU"
    return facts


def _gpu(nvml: Any, gpu: Shown, device: Device) -> dict[str, Any]:
    return {
        "index": device.number,
        "name": device.name,
        "uuid": nvml.nvmlDeviceGetUUID(gpu.handle),
        "memory_bytes": device.memory_bytes,
        "free_bytes": device.free_bytes,
        "compute_capability": ".".join(map(str, device.compute_capability or ())),
        "bf16": device.bf16,
        "fp8": device.fp8,
    }


def _links(nvml: Any, gpus: list[Shown]) -> list[dict[str, Any]]:
    """Return how each pair of cards is connected."""
    links = []
    for position, first in enumerate(gpus):
        for second in gpus[position + 1 :]:
            try:
                lanes = _nvlinks(nvml, first.card, second.card)
                level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(first.card, second.card))
                kind = f"NVLink x {lanes}" if lanes else LINKS.get(level, f"PCIe, level {level}")
            except nvml.NVMLError as error:
                kind = f"unknown ({error})"
            links.append({"from": first.number, "to": second.number, "link": kind})
    return links


def _nvlinks(nvml: Any, one: Any, other: Any) -> int:
    """Count the active NVLinks of `one` that lead to `other`; through a switch every active link counts."""
    bus = nvml.nvmlDeviceGetPciInfo(other).busId.lower()
    count = 0
    for link in range(18):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(one, link):
                continue
            remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo(one, link).busId.lower()
        except nvml.NVMLError:
            break
        count += remote == bus or not remote.strip("\0")
    return count


def _gpu_lines(facts: dict[str, Any]) -> str:
    """Return the facts as lines; the first is `Number of GPUs: N`."""

    def room(of: dict[str, Any]) -> str:
        return f"{of['memory_bytes'] / GIB:.1f} GiB ({of['free_bytes'] / GIB:.1f} free)"

    lines = [f"Number of GPUs: {facts['count']}"]
    lines += [f"  {facts['reason']}"] if facts["reason"] else []
    lines += [f"  driver {facts['driver']}, CUDA {facts['cuda']}"] if facts["driver"] else []
    lines += [f"  CUDA_VISIBLE_DEVICES={facts['visible_devices']}"] if facts["visible_devices"] is not None else []
    for gpu in facts["gpus"]:
        bf16, fp8 = ("yes" if gpu[kind] else "no" for kind in ("bf16", "fp8"))
        lines.append(
            f"  {gpu['index']}: {gpu['name']}, {room(gpu)}, compute capability {gpu['compute_capability']}, bf16"
            f" {bf16}, fp8 {fp8}"
        )
    lines += [f"  {link['from']} - {link['to']}: {link['link']}" for link in facts["links"]]
    return "\n".join([*lines, f"CPU: {facts['cpu']['name']}, {facts['cpu']['threads']} threads, {room(facts['cpu'])}"])


def memory_check(call: Call) -> int:
    """Print the memory and return 0; 3 when CONFIG would not fit. Raise `DoesNotFitError` after it where not even one
    row does.
    """
    facts: dict[str, Any] = {"devices": _devices_now(), "need": None}
    refusal: UserError | None = None
    if call.options.get("CONFIG") or call.options.get("RUN"):
        facts["need"], refusal = _need(call)
    print(json.dumps(facts, indent=2) if call.json else _memory_lines(facts), flush=True)
    if refusal:
        raise refusal
    need = facts["need"]
    return 3 if need and not all(rank["fits"] for rank in need["ranks"]) else 0


def _need(call: Call) -> tuple[dict[str, Any], UserError | None]:
    """Return what CONFIG would need of each rank, part by part; where it does not fit, of the first row, with the ways
    out.
    """
    loaded, hardware = call.load_config(), detect()
    launch = LaunchRequest(num_gpus=call.integer("NUM_GPUS", minimum=1))
    launch = replace(launch, command_strategy="auto" if needs_several(loaded, hardware, launch) else "single")
    try:
        plan = plan_for(loaded, hardware, launch, source=parse_source(call.options.get("SOURCE"), "known"))
    except DoesNotFitError as error:
        rank = _need_of_rank(None, hardware.kind, error.micro_batch, error.parts, error.capacity_bytes)
        found: dict[str, Any] = {
            "strategy": error.setup.strategy,
            "global_batch_size": None,
            "error": error.message,
            "ranks": [rank],
        }
        return found | {"remedies": [str(remedy) for remedy in error.remedies]}, error
    ranks = []
    for one in plan.ranks:
        kind, _, index = one.device.partition(":")  # by the driver's number, as the list of what is in use has it
        device = f"{kind}:{hardware.devices[int(index)].number}" if kind == "cuda" else kind
        ranks.append(_need_of_rank(one.rank, device, one.micro_batch, one.memory_bytes, one.capacity_bytes))
    found = {
        "strategy": plan.strategy,
        "global_batch_size": plan.global_batch_size,
        "source": plan.source,
        "ranks": ranks,
    }
    return found | {"remedies": list(plan.remedies)}, None


def _need_of_rank(
    rank: int | None, device: str, micro_batch: int, parts: Mapping[str, int], capacity: int
) -> dict[str, Any]:
    peak = sum(size for name, size in parts.items() if name != "free")
    return {
        "rank": rank,
        "device": device,
        "micro_batch": micro_batch,
        "peak_bytes": peak,
        "capacity_bytes": capacity,
        "memory_bytes": dict(parts),
        "fits": peak <= capacity,
    }


def _devices_now() -> list[dict[str, Any]]:
    """Return each device with its memory and the processes that hold most of it."""
    if not all_hidden():
        with nvml_session() as nvml:
            if nvml is not None and (found := look_at_gpus(nvml)[0]):
                return [_in_use(f"cuda:{gpu.number}", device, _holders(nvml, gpu.handle)) for gpu, device in found]
    import psutil

    processes = [one.info for one in psutil.process_iter(["pid", "name", "memory_info"])]
    holders = [
        {"pid": one["pid"], "name": one["name"], "bytes": int(one["memory_info"].rss)}
        for one in processes
        if one["memory_info"]
    ]
    return [_in_use("cpu", cpu_only().devices[0], holders)]


def _in_use(label: str, device: Device, holders: list[dict[str, Any]]) -> dict[str, Any]:
    most = sorted(holders, key=lambda holder: -holder["bytes"])[:SHOWN_PROCESSES]
    shown = {"device": label, "name": device.name, "memory_bytes": device.memory_bytes, "free_bytes": device.free_bytes}
    return shown | {"processes": most}


def _holders(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """Return the processes that hold memory of a GPU; none where the driver does not tell (WSL, containers)."""
    import psutil

    found = []
    with contextlib.suppress(nvml.NVMLError):
        for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            name = "?"
            with contextlib.suppress(psutil.Error):
                name = psutil.Process(one.pid).name()
            found.append({"pid": int(one.pid), "name": name, "bytes": int(one.usedGpuMemory or 0)})
    return found


def _memory_lines(facts: dict[str, Any]) -> str:
    lines = []
    for device in facts["devices"]:
        total, free = device["memory_bytes"], device["free_bytes"]
        lines.append(
            f"{device['device']}  {device['name']}: {gib(total - free)} of {gib(total)} used, {gib(free)} free"
        )
        lines += [f"  {gib(p['bytes']):>10}  {p['name']} (pid {p['pid']})" for p in device["processes"]]
    if need := facts["need"]:
        rows = f", {need['global_batch_size']} rows a step" if need["global_batch_size"] else ""
        lines.append(f"this configuration, {need['strategy']}{rows}:")
        for rank in need["ranks"]:
            who = (
                f"rank {rank['rank']} on {rank['device']}"
                if rank["rank"] is not None
                else f"a rank on {rank['device']}"
            )
            lines.append(
                f"  {who}: {gib(rank['peak_bytes'])} with micro-batch {rank['micro_batch']}, "
                f"{gib(rank['capacity_bytes'])} may be used: {'fits' if rank['fits'] else 'does NOT fit'}"
            )
            parts = sorted(
                ((size, name) for name, size in rank["memory_bytes"].items() if size and name != "free"), reverse=True
            )
            lines += [f"    {gib(size):>10}  {name}" for size, name in parts]
        if need["remedies"]:
            lines += ["to make it fit:", *(f"  {remedy}" for remedy in need["remedies"])]
    return "\n".join(lines)
