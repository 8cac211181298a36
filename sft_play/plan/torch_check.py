"""Whether torch can use the GPUs that the driver shows: asked before anything is started, of a process of its own (acts).

`make doctor`, `make plan` and every launch speak with the same words. Needs the standard library only.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sft_play.errors import HardwareError, raise_all
from sft_play.runs.origin import torch_version
from sft_play.text import Finding

if TYPE_CHECKING:
    from sft_play.plan.hardware import Hardware

TORCH_FACTS = """
import json, sys, torch
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "architectures": [], "failures": {}}
if torch.version.cuda:
    facts["architectures"] = (torch._C._cuda_getArchFlags() or "").split()
    for index in range(int(sys.argv[1])):
        try:
            torch.ones(1, device=f"cuda:{index}").item()
        except Exception as error:
            facts["failures"][index] = str(error).strip().splitlines()[0]
print(json.dumps(facts))
"""
"""One number on each GPU: that is a context, an allocation and a kernel, so what no list of versions tells is found too."""
ASKING_SECONDS = 180
OLDEST = {13: "7.5"}
"""CUDA's major version -> the oldest compute capability that its compiler still knows."""
LACKING_REMEDY = "install a torch build for this GPU: a newer one for new cards, an older one for cards that were dropped"
VISIBLE = "CUDA_VISIBLE_DEVICES=`{value}` names {names}, but {machine}"
VISIBLE_REMEDY = "unset CUDA_VISIBLE_DEVICES, or name GPUs of `nvidia-smi -L`"


class Gpu(NamedTuple):
    """A GPU as the driver names it."""

    name: str
    capability: str
    """Such as `8.9`."""


def gpus_here(count: int) -> str:
    """Return how many GPUs a machine has, in words."""
    return f"this machine has {count} GPU{'' if count == 1 else 's'}"


def _fault(name: str, text: str, remedy: str) -> Finding:
    return Finding(id=name, severity="error", text=text, remedy=remedy)


def problems(facts: Mapping[str, Any] | str, gpus: Sequence[Gpu], driver: str, driver_cuda: str | None) -> list[Finding]:
    """Return why torch cannot use some of `gpus`; `facts` are what `TORCH_FACTS` prints, or the error of importing torch.

    Without `failures` torch was not asked, and versions alone are compared.
    """
    if isinstance(facts, str):
        return [_fault("torch-broken", f"torch cannot be imported: {facts}", "make install")]
    version, cuda = facts["version"], facts["cuda"]
    if cuda is None:
        text = f"{gpus_here(len(gpus))}, but torch {version} is a build without CUDA: training would use the CPU"
        remedy = "install torch's CUDA build: remove .venv, unset a CPU-only index in pip's settings, make install"
        return [_fault("torch-without-cuda", text, remedy)]
    failures = facts.get("failures")
    if failures == {}:
        return []
    # Minor versions of CUDA are compatible within a major one.
    if driver_cuda and number(cuda)[0] > number(driver_cuda)[0]:
        text = f"torch {version} is built for CUDA {cuda}, driver {driver} is for {driver_cuda}"
        return [_fault("driver-too-old", text, "update the NVIDIA driver, or install a torch built for an older CUDA")]
    faults, explained = [], set()
    for capability in sorted({gpu.capability for gpu in gpus}):
        alike = [index for index, gpu in enumerate(gpus) if gpu.capability == capability]
        if _lacks(facts, capability):
            explained.update(alike)
            names = ", ".join(sorted({gpus[index].name for index in alike}))
            faults.append(
                _fault("torch-lacks-architecture", lacking(version, facts["architectures"], names, capability), LACKING_REMEDY)
            )
    for index, error in (failures or {}).items():
        if int(index) not in explained:
            text = f"torch {version} cannot use GPU {index} ({gpus[int(index)].name}): {error}"
            faults.append(
                _fault(
                    "gpu-unusable", text, "look at `nvidia-smi`: its processes, compute mode and errors; then restart the machine"
                )
            )
    return faults


def torch_facts(count: int, environment: Mapping[str, str]) -> dict[str, Any] | str:
    """Ask the installed torch, once, about the first `count` GPUs; returns what `TORCH_FACTS` prints, or the error of importing it."""
    return _asked(count, tuple(sorted(environment.items())))


@cache
def _asked(count: int, environment: tuple[tuple[str, str], ...]) -> dict[str, Any] | str:
    try:
        process = subprocess.run(
            [sys.executable, "-c", TORCH_FACTS, str(count)],
            capture_output=True, text=True, timeout=ASKING_SECONDS, check=False, env=dict(environment),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it does not answer within {ASKING_SECONDS} s"
    if process.returncode:
        return process.stderr.strip().splitlines()[-1] if process.stderr.strip() else f"exit code {process.returncode}"
    facts: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return facts


def unasked(hardware: Hardware) -> list[Finding]:
    """Return what versions alone tell, without a process: of what is installed here and the driver."""
    found = torch_version()
    if found is None or hardware.driver is None:
        return []
    facts: dict[str, Any] = {"version": found[0], "cuda": found[1], "architectures": []}
    return problems(facts, _gpus(hardware, range(len(hardware.devices))), hardware.driver, hardware.driver_cuda)


def unusable(hardware: Hardware, indices: Sequence[int], environment: Mapping[str, str]) -> list[Finding]:
    """Ask torch, under the workers' environment, for these GPUs; returns all that is wrong."""
    gpus = _gpus(hardware, indices)
    return problems(torch_facts(len(gpus), environment), gpus, hardware.driver or "", hardware.driver_cuda)


def require_usable(hardware: Hardware, indices: Sequence[int], environment: Mapping[str, str]) -> None:
    """Raise `HardwareError` with all that is wrong with the GPUs that a plan uses."""
    raise_all([HardwareError(one.text, hint=one.remedy) for one in unusable(hardware, indices, environment)])


def _gpus(hardware: Hardware, indices: Sequence[int]) -> list[Gpu]:
    chosen = [hardware.devices[index] for index in indices]
    return [Gpu(one.name, ".".join(map(str, one.compute_capability or ()))) for one in chosen]


def _lacks(facts: Mapping[str, Any], capability: str) -> bool:
    if facts["architectures"]:
        return not supports(facts["architectures"], capability)
    oldest = OLDEST.get(number(facts["cuda"])[0])
    return bool(oldest and number(capability) < number(oldest))


def number(version: str) -> tuple[int, ...]:
    """Return a version as numbers that compare."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def supports(architectures: Sequence[str], capability: str) -> bool:
    """Whether code for `sm_XY` runs on the card: same major version, minor not newer; or PTX of anything not newer."""
    card = number(capability)
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        digits = re.sub(r"\D.*", "", digits)
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and built[0] == card[0] and built[1] <= card[1]:
            return True
        if kind == "compute" and built <= card:
            return True
    return False


def lacking(torch: str, architectures: Sequence[str], names: str, capability: str) -> str:
    """Return the words for cards that a torch has no code for."""
    text = f"torch {torch} has no code for {names} (compute capability {capability})"
    return f"{text}; it has {', '.join(architectures)}" if architectures else text
