"""`make memory-check`: memory in use now, by device and process, and what CONFIG would need beside what is free."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sft_play.errors import UserError
from sft_play.plan.detect import all_hidden, cpu_name, gpu_memory, name_of, open_nvml, ram_bytes, shown_gpus
from sft_play.plan.hardware import Hardware
from sft_play.plan.words import gib

if TYPE_CHECKING:
    from sft_play.config.call import Call

SHOWN_PROCESSES = 5


def main(call: Call) -> int:
    """Prints the memory, and returns 0; 3 when CONFIG would not fit. Raises `DoesNotFitError` after it where not even one row does."""
    facts: dict[str, Any] = {"devices": devices_now(), "need": None}
    refusal: UserError | None = None
    if call.options.get("CONFIG") or call.options.get("RUN"):
        facts["need"], refusal = _need(call)
    print(json.dumps(facts, indent=2) if call.json else as_text(facts), flush=True)
    if refusal:
        raise refusal
    need = facts["need"]
    return 3 if need and not all(rank["fits"] for rank in need["ranks"]) else 0


def _need(call: Call) -> tuple[dict[str, Any], UserError | None]:
    """Returns what CONFIG would need of each rank, part by part; where it does not fit, of the first row, with the ways out."""
    from sft_play.plan.command import needs_several, plan_for
    from sft_play.plan.detect import detect
    from sft_play.plan.fit import DoesNotFitError
    from sft_play.plan.request import LaunchRequest
    from sft_play.plan.sources import parse_source

    loaded, hardware = call.load_config(), detect()
    source = parse_source(call.options.get("SOURCE"), "known")
    request = LaunchRequest(num_gpus=call.integer("NUM_GPUS", minimum=1))
    several = needs_several(loaded, hardware, request)
    request = replace(request, command_strategy="auto" if several else "single")
    try:
        plan = plan_for(loaded, hardware, request, source=source)
    except DoesNotFitError as error:
        rank = {
            "rank": None, "device": hardware.kind, "micro_batch": error.micro_batch, "peak_bytes": sum(error.parts.values()),
            "capacity_bytes": error.capacity_bytes, "memory_bytes": error.parts, "fits": False,
        }  # fmt: skip
        remedies = [str(remedy) for remedy in error.remedies]
        strategy = error.setup.strategy
        need = {"strategy": strategy, "global_batch_size": None, "error": error.message, "remedies": remedies, "ranks": [rank]}
        return need, error
    ranks = [
        {
            "rank": rank.rank,
            "device": _numbered(rank.device, hardware),
            "micro_batch": rank.micro_batch,
            "peak_bytes": rank.peak_bytes,
            "capacity_bytes": rank.capacity_bytes,
            "memory_bytes": dict(rank.memory_bytes),
            "fits": rank.peak_bytes <= rank.capacity_bytes,
        }
        for rank in plan.ranks
    ]
    found = {
        "strategy": plan.strategy, "global_batch_size": plan.global_batch_size, "source": plan.source, "remedies": list(plan.remedies),
        "ranks": ranks,
    }  # fmt: skip
    return found, None


def _numbered(device: str, hardware: Hardware) -> str:
    """Returns a rank's device with the driver's number, as the list of what is in use has it."""
    kind, _, index = device.partition(":")
    return f"{kind}:{hardware.devices[int(index)].number}" if kind == "cuda" else device


def devices_now() -> list[dict[str, Any]]:
    """Returns each device with its memory and the processes that hold most of it."""
    nvml = None if all_hidden() else open_nvml()
    gpus = _gpus(nvml) if nvml else []
    return gpus or [_cpu()]


def _gpus(nvml: Any) -> list[dict[str, Any]]:
    try:
        found = []
        for gpu in shown_gpus(nvml)[0]:
            total, free = gpu_memory(nvml, gpu)
            holders = _holders(nvml, gpu.handle)
            found.append(
                {
                    "device": f"cuda:{gpu.number}",
                    "name": name_of(nvml, gpu),
                    "memory_bytes": total,
                    "free_bytes": free,
                    "processes": sorted(holders, key=lambda p: -int(str(p["bytes"])))[:SHOWN_PROCESSES],
                }
            )
        return found
    finally:
        nvml.nvmlShutdown()


def _holders(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """Returns the processes that hold memory of a GPU; none where the driver does not tell (WSL, containers)."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return []
    return [{"pid": int(p.pid), "name": _process_name(int(p.pid)), "bytes": int(p.usedGpuMemory or 0)} for p in running]


def _cpu() -> dict[str, Any]:
    import psutil

    total, free = ram_bytes()
    holders = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        memory = process.info["memory_info"]
        if memory is not None:
            holders.append({"pid": process.info["pid"], "name": process.info["name"], "bytes": int(memory.rss)})
    holders.sort(key=lambda holder: -holder["bytes"])
    return {
        "device": "cpu", "name": cpu_name(), "memory_bytes": total, "free_bytes": free, "processes": holders[:SHOWN_PROCESSES],
    }  # fmt: skip


def _process_name(pid: int) -> str:
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "?"


def as_text(facts: dict[str, Any]) -> str:
    """Returns the facts as lines."""
    lines = []
    for device in facts["devices"]:
        used = device["memory_bytes"] - device["free_bytes"]
        lines.append(
            f"{device['device']}  {device['name']}: {gib(used)} of {gib(device['memory_bytes'])} used, {gib(device['free_bytes'])} free"
        )
        lines += [f"  {gib(p['bytes']):>10}  {p['name']} (pid {p['pid']})" for p in device["processes"]]
    if facts["need"]:
        lines += _need_lines(facts["need"])
    return "\n".join(lines)


def _need_lines(need: dict[str, Any]) -> list[str]:
    rows = f", {need['global_batch_size']} rows a step" if need["global_batch_size"] else ""
    lines = [f"this configuration, {need['strategy']}{rows}:"]
    for rank in need["ranks"]:
        verdict = "fits" if rank["fits"] else "does NOT fit"
        who = f"rank {rank['rank']} on {rank['device']}" if rank["rank"] is not None else f"a rank on {rank['device']}"
        lines.append(
            f"  {who}: {gib(rank['peak_bytes'])} with micro-batch {rank['micro_batch']}, "
            f"{gib(rank['capacity_bytes'])} may be used: {verdict}"
        )
        parts = sorted(((size, name) for name, size in rank["memory_bytes"].items() if size and name != "free"), reverse=True)
        lines += [f"    {gib(size):>10}  {name}" for size, name in parts]
    if need["remedies"]:
        lines += ["to make it fit:", *(f"  {remedy}" for remedy in need["remedies"])]
    return lines


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
