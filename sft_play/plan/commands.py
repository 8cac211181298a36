"""`make gpu-info` and `make memory-check`: this machine's GPUs, who holds their memory, and whether CONFIG fits."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from typing import Any

from sft_play.config.call import Call
from sft_play.plan.detect import Shown, all_hidden, detect, look_at_gpus, nvml_session, other_gpu, versions_of
from sft_play.plan.hardware import GIB, Device, cpu_only
from sft_play.plan.plan import LaunchRequest
from sft_play.plan.request import DoesNotFitError
from sft_play.plan.show import misfit_json, show_misfit, show_plan
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
"""Levels of NVML's `nvmlDeviceGetTopologyCommonAncestor`."""
SHOWN_PROCESSES = 5


def gpu_info(call: Call) -> int:
    """Print the GPUs that a run on this machine would see, and the links between them; return 0."""
    facts = gpu_facts()
    print(json.dumps(facts, indent=2) if call.json else _gpu_lines(facts))
    return 0


def gpu_facts() -> dict[str, Any]:
    """Return `{"count", "driver", "cuda", "visible_devices", "gpus": [...], "links": [...], "cpu": {...},
    "reason"}`.
    """
    hardware = cpu_only()
    facts: dict[str, Any] = {
        "count": 0,
        "driver": None,
        "cuda": None,
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "gpus": [],
        "links": [],
        "cpu": {"threads": hardware.cpu_threads, **_facts(hardware.devices[0], "bf16")},
        "reason": None,
    }
    with nvml_session() as nvml:
        if nvml is None:
            return facts | {"reason": other_gpu() or "no NVIDIA driver answers on this machine"}
        gpus, count = look_at_gpus(nvml)
        facts["count"], (facts["driver"], facts["cuda"]) = len(gpus), versions_of(nvml)
        facts["gpus"], facts["links"] = [_gpu(nvml, *pair) for pair in gpus], _links(nvml, [gpu for gpu, _ in gpus])
    if not gpus:
        hidden = f"CUDA_VISIBLE_DEVICES={facts['visible_devices']} hides all {count}"
        facts["reason"] = hidden if count else "the NVIDIA driver answers, but there is no GPU"
    return facts


def _gpu(nvml: Any, gpu: Shown, device: Device) -> dict[str, Any]:
    return {
        "index": device.number,
        "uuid": nvml.nvmlDeviceGetUUID(gpu.handle),
        **_facts(device, "bf16", "fp8"),
        "compute_capability": ".".join(map(str, device.compute_capability or ())),
    }


def _facts(device: Device, *names: str) -> dict[str, Any]:
    return {name: getattr(device, name) for name in ("name", "memory_bytes", "free_bytes", *names)}


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


def _nvlinks(nvml: Any, card: Any, other: Any) -> int:
    """Return the number of active NVLinks from `card` to `other`; behind a switch every active link counts."""
    bus = nvml.nvmlDeviceGetPciInfo(other).busId.lower()
    count = 0
    for link in range(18):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(card, link):
                continue
            remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo(card, link).busId.lower()
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
    """Print the memory and return 0; raise `DoesNotFitError` after it if CONFIG does not fit."""
    facts: dict[str, Any] = {"devices": _devices_now(), "need": None}
    lines, refusal = _device_lines(facts["devices"]), None
    if call.options.get("CONFIG") or call.options.get("RUN"):
        loaded, hardware = call.load_config(), detect()
        launch = LaunchRequest(num_gpus=call.integer("NUM_GPUS", minimum=1))
        launch = replace(launch, command_strategy="auto" if needs_several(loaded, hardware, launch) else "single")
        try:
            plan = plan_for(loaded, hardware, launch, source=parse_source(call.options.get("SOURCE"), "known"))
            facts["need"] = plan.to_json()
            lines.append(show_plan(plan, why=False, details=True))
        except DoesNotFitError as error:
            facts["need"], refusal = misfit_json(error), error.without_remedies()
            lines.append(show_misfit(error))
    print(json.dumps(facts, indent=2) if call.json else "\n".join(lines), flush=True)
    if refusal:
        raise refusal
    return 0


def _devices_now() -> list[dict[str, Any]]:
    """Return each GPU with its memory and the processes that hold most of it, or the CPU with its memory."""
    if not all_hidden():
        with nvml_session() as nvml:
            if nvml is not None and (gpus := look_at_gpus(nvml)[0]):
                return [_in_use(f"cuda:{gpu.number}", device, _holders(nvml, gpu.handle)) for gpu, device in gpus]
    return [_in_use("cpu", cpu_only().devices[0], [])]


def _in_use(label: str, device: Device, holders: list[dict[str, Any]]) -> dict[str, Any]:
    most = sorted(holders, key=lambda holder: -holder["bytes"])[:SHOWN_PROCESSES]
    return {"device": label, **_facts(device), "processes": most}


def _holders(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    """Return the processes that hold memory of a GPU; empty if the driver does not report them (WSL, containers)."""
    import psutil

    holders = []
    with contextlib.suppress(nvml.NVMLError):
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            name = "?"
            with contextlib.suppress(psutil.Error):
                name = psutil.Process(process.pid).name()
            holders.append({"pid": int(process.pid), "name": name, "bytes": int(process.usedGpuMemory or 0)})
    return holders


def _device_lines(devices: list[dict[str, Any]]) -> list[str]:
    lines = []
    for device in devices:
        total, free = device["memory_bytes"], device["free_bytes"]
        lines.append(
            f"{device['device']}  {device['name']}: {gib(total - free)} of {gib(total)} used, {gib(free)} free"
        )
        lines += [f"  {gib(p['bytes']):>10}  {p['name']} (pid {p['pid']})" for p in device["processes"]]
    return lines
