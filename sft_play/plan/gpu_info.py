"""`make gpu-info`: the GPUs that a run here would see, and how they are linked."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from sft_play.plan.detect import (
    Shown,
    capability_of,
    cpu_name,
    cpu_threads,
    fast_bf16,
    gpu_memory,
    name_of,
    open_nvml,
    other_gpu,
    ram_bytes,
    shown_gpus,
)
from sft_play.plan.hardware import GIB

if TYPE_CHECKING:
    from sft_play.config.call import Call

LINKS = {
    10: "same board", 20: "one PCIe switch", 30: "several PCIe switches", 40: "one PCIe host bridge", 50: "one CPU socket", 60: "across sockets",
}  # fmt: skip
"""NVML's levels of `nvmlDeviceGetTopologyCommonAncestor`."""


def main(call: Call) -> int:
    """Prints the facts and returns 0."""
    facts = gpu_facts()
    print(json.dumps(facts, indent=2) if call.json else as_text(facts))
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
            "driver": _text(nvml.nvmlSystemGetDriverVersion()),
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
        "uuid": _text(nvml.nvmlDeviceGetUUID(gpu.handle)),
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
    bus = _text(nvml.nvmlDeviceGetPciInfo(other).busId).lower()
    count = 0
    for link in range(18):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(one, link):
                continue
            remote = _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(one, link).busId).lower()
        except nvml.NVMLError:
            break
        count += remote == bus or not remote.strip("\0")
    return count


def as_text(facts: dict[str, Any]) -> str:
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


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
