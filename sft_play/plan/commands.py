"""`make plan`, `make gpu-info` and `make memory-check`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.load import LoadedConfig
from sft_play.config.sources import PRESETS
from sft_play.errors import HardwareError, UserError
from sft_play.plan.calibration import load_calibration
from sft_play.plan.detect import (
    Shown,
    all_hidden,
    capability_of,
    cpu_name,
    cpu_threads,
    detect,
    fast_bf16,
    gpu_memory,
    name_of,
    open_nvml,
    other_gpu,
    ram_bytes,
    shown_gpus,
)
from sft_play.plan.fit import DoesNotFitError, Memory
from sft_play.plan.hardware import GIB, Hardware, parse_hardware
from sft_play.plan.make import make_plan
from sft_play.plan.plan import Plan
from sft_play.plan.request import LaunchRequest
from sft_play.plan.shape import shape_of
from sft_play.plan.sources import Source, planned
from sft_play.plan.words import gib
from sft_play.runs.prepared import Prepared, lookup

if TYPE_CHECKING:
    from sft_play.config.call import Call


LAN = "12GB+8GB+8GB@1Gbit"
MADE_FOR = {
    "run_bnb": "24GB", "run_unsloth": "24GB", "rtx4090_sli": "2xRTX4090", "a100_pair": "2xA100", "h100_pair": "2xH100",
    "h200_pair": "2xH200", "h200_quad": "4xH200", "l40s_single": "L40S", "l40s_pair": "2xL40S", "home_lan": LAN, "home_lan_13b": LAN,
    "smoke": "8GB+8GB@1Gbit", "from_scratch": "24GB", "run_bnb_qwen3_5": "16GB", "rtx4090_sli_gemma4": "2xRTX4090",
    "home_lan_smollm3": LAN, "h200_pair_gemma4": "2xH200", "h200_single_gpt_oss": "H200",
}  # fmt: skip
"""Preset -> the hardware that it is for, as docs/presets.md has it."""


def hardware_of(call: Call) -> Hardware:
    """Returns the hardware that `HARDWARE` describes, else this machine's. Raises `HardwareError`."""
    described = call.options.get("HARDWARE")
    return parse_hardware(described) if described else detect()


def explained(loaded: LoadedConfig, hardware: Hardware, error: HardwareError) -> HardwareError:
    """Returns the refusal of a plan with where the key that it names was written.

    One of too little memory here gets the hardware that the preset is for: the file itself, or one that it extends.
    """
    if error.place and error.place in loaded.origins:
        error.place = loaded.origins[error.place]
    if hardware.described or not isinstance(error, DoesNotFitError):
        return error
    files = [str(loaded.path), *(loaded.origins[key].rpartition(":")[0] for key in ("model.name", *loaded.origins))]
    presets = (file for file in map(Path, files) if file.stem in MADE_FOR and file.resolve().parent == PRESETS)
    name = next((file.stem for file in presets), None)
    if name is None:
        return error
    return error.with_remedies(notes=(f"the preset `{name}` is for HARDWARE={MADE_FOR[name]}, which `make plan` plans for",))


def plan_for(
    loaded: LoadedConfig, hardware: Hardware, request: LaunchRequest, prepared: Prepared | None = None, source: Source = "known"
) -> Plan:
    """Returns the plan with what is known of the data: `prepared`, or what an earlier preparation found. Raises `UserError`."""
    config = loaded.config
    known, shape, calibration = prepared or lookup(config), shape_of(config.model), load_calibration(hardware)

    def make(memory: Memory) -> Plan:
        return make_plan(
            config, loaded.typed, hardware, shape, launch=request, prepared=known, calibration=calibration, memory=memory
        )  # fmt: skip

    try:
        return planned(make, config, shape, known, source)
    except HardwareError as error:
        raise explained(loaded, hardware, error) from None


def needs_several(loaded: LoadedConfig, hardware: Hardware, request: LaunchRequest) -> bool:
    """Whether a run would be more than one process: several GPUs, or something that was asked for."""
    asked = (request.num_gpus or 1) > 1 or request.num_nodes > 1 or loaded.config.launch.strategy != "auto"
    return asked or (hardware.kind == "cuda" and len(hardware.devices) > 1 and request.num_gpus != 1)


# `make gpu-info`: the GPUs that a run here would see, and how they are linked.


LINKS = {
    10: "same board", 20: "one PCIe switch", 30: "several PCIe switches", 40: "one PCIe host bridge", 50: "one CPU socket", 60: "across sockets",
}  # fmt: skip
"""NVML's levels of `nvmlDeviceGetTopologyCommonAncestor`."""


def gpu_info(call: Call) -> int:
    """Prints the facts and returns 0."""
    facts = gpu_facts()
    print(json.dumps(facts, indent=2) if call.json else gpus_as_text(facts))
    return 0


def gpu_facts() -> dict[str, Any]:
    """Returns `{"count", "driver", "cuda", "visible_devices", "gpus": [...], "links": [...], "cpu": {...}}`."""
    total, free = ram_bytes()
    cpu = {"name": cpu_name(), "threads": cpu_threads(), "memory_bytes": total, "free_bytes": free, "bf16": fast_bf16()}
    facts: dict[str, Any] = {
        "count": 0, "driver": None, "cuda": None, "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"), "gpus": [], "links": [],
        "cpu": cpu, "reason": None,
    }  # fmt: skip
    nvml = open_nvml()
    if nvml is None:
        return facts | {"reason": other_gpu() or "no NVIDIA driver answers on this machine"}
    try:
        shown, count = shown_gpus(nvml)
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
        facts |= {
            "count": len(shown),
            "driver": _gpu_text(nvml.nvmlSystemGetDriverVersion()),
            "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
        facts["gpus"] = [_gpu(nvml, gpu) for gpu in shown]
        facts["links"] = _links(nvml, shown)
        if not shown:
            hidden = f"CUDA_VISIBLE_DEVICES={facts['visible_devices']} hides all {count}"
            facts["reason"] = hidden if count else "the NVIDIA driver answers, but there is no GPU"
    finally:
        nvml.nvmlShutdown()
    return facts


def _gpu(nvml: Any, gpu: Shown) -> dict[str, Any]:
    total, free = gpu_memory(nvml, gpu)
    major, minor = capability_of(nvml, gpu)
    return {
        "index": gpu.number,
        "name": name_of(nvml, gpu),
        "uuid": _gpu_text(nvml.nvmlDeviceGetUUID(gpu.handle)),
        "memory_bytes": total,
        "free_bytes": free,
        "compute_capability": f"{major}.{minor}",
        "bf16": (major, minor) >= (8, 0),
        "fp8": (major, minor) >= (8, 9),
    }


def _links(nvml: Any, gpus: list[Shown]) -> list[dict[str, Any]]:
    """Returns how each pair of cards is connected."""
    links = []
    for position, first in enumerate(gpus):
        for second in gpus[position + 1 :]:
            one, other = first.card, second.card
            try:
                lanes = _nvlinks(nvml, one, other)
                level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
                kind = f"NVLink x {lanes}" if lanes else LINKS.get(level, f"PCIe, level {level}")
            except nvml.NVMLError as error:
                kind = f"unknown ({error})"
            links.append({"from": first.number, "to": second.number, "link": kind})
    return links


def _nvlinks(nvml: Any, one: Any, other: Any) -> int:
    """Counts the active NVLinks of `one` that lead to `other`; through a switch every active link counts."""
    bus = _gpu_text(nvml.nvmlDeviceGetPciInfo(other).busId).lower()
    count = 0
    for link in range(18):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(one, link):
                continue
            remote = _gpu_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(one, link).busId).lower()
        except nvml.NVMLError:
            break
        count += remote == bus or not remote.strip("\0")
    return count


def gpus_as_text(facts: dict[str, Any]) -> str:
    """Returns the facts as lines; the first is `Number of GPUs: N`."""
    lines = [f"Number of GPUs: {facts['count']}"]
    if facts["reason"]:
        lines.append(f"  {facts['reason']}")
    if facts["driver"]:
        lines.append(f"  driver {facts['driver']}, CUDA {facts['cuda']}")
    if facts["visible_devices"] is not None:
        lines.append(f"  CUDA_VISIBLE_DEVICES={facts['visible_devices']}")
    for gpu in facts["gpus"]:
        lines.append(
            f"  {gpu['index']}: {gpu['name']}, {gpu['memory_bytes'] / GIB:.1f} GiB ({gpu['free_bytes'] / GIB:.1f} free), "
            f"compute capability {gpu['compute_capability']}, bf16 {_yes(gpu['bf16'])}, fp8 {_yes(gpu['fp8'])}"
        )
    lines += [f"  {link['from']} - {link['to']}: {link['link']}" for link in facts["links"]]
    cpu = facts["cpu"]
    lines.append(
        f"CPU: {cpu['name']}, {cpu['threads']} threads, {cpu['memory_bytes'] / GIB:.1f} GiB ({cpu['free_bytes'] / GIB:.1f} free)"
    )
    return "\n".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _gpu_text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# `make memory-check`: memory in use now, by device and process, and what CONFIG would need beside what is free.


SHOWN_PROCESSES = 5


def memory_check(call: Call) -> int:
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
