"""`make doctor`: report what will or may go wrong in this environment, each finding with its id, severity and remedy.

Every check is independent and needs only the standard library, so that the doctor also works without the packages: GPUs
are queried through NVML as in every launch, and torch in a separate process. `python -m sft_play.doctor` also works
without the packages of the configuration. `docs/doctor.md` lists the findings.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sft_play
from sft_play.errors import HUB_LOGIN, HardwareError, by_make
from sft_play.isolation import LAUNCHER_VARIABLES, shadowed_libraries
from sft_play.plan.detect import all_hidden, ask_torch, detect, open_nvml, other_gpu
from sft_play.plan.hardware import GIB, cpu_only
from sft_play.runs.folder import accelerate_default, cache_folder, hub_cache, hub_folder, is_offline, runs_folder
from sft_play.runs.origin import UNSLOTH_HINT, has_unsloth, versions
from sft_play.text import Finding, finding_lines, plural

if TYPE_CHECKING:
    from sft_play.config.call import Call
    from sft_play.config.schema import Config

SEVERITIES = ("error", "warning", "note")
HUB_SECONDS = 4.0
GATED = ("meta-llama/", "google/gemma", "mistralai/", "black-forest-labs/")
"""Prefixes of hub ids whose models require that a licence is accepted."""
PORT = 29500
OLDEST_PYTHON = (3, 11)
ROOT = Path(sft_play.__file__).parent.parent
"""The repository, if the package is installed as editable (`make install`)."""
MIN_SHARED_MEMORY_BYTES = GIB


def main(call: Call) -> int:
    """Run every check; return 3 if one found an error, else 0."""
    config = call.load_config().config if "CONFIG" in call.options else None
    return report(config, as_json=call.json)


def report(config: Config | None = None, *, as_json: bool) -> int:
    """Print the findings, errors first, and return the exit code."""
    checks: list[Callable[[], Iterable[Finding]]] = [
        python_version,
        packages,
        partial(unsloth, config),
        shadowing_files,
        compilers,
        gpus,
        hidden,
        folders,
        shared_memory,
        variables,
        port,
        hub,
        partial(token, config.model.name if config else None),
    ]
    findings = sorted(
        (finding for check in checks for finding in check()), key=lambda entry: SEVERITIES.index(entry.severity)
    )
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    if as_json:
        print(
            json.dumps(
                {
                    "checks": len(checks),
                    "counts": counts,
                    "findings": [asdict(finding) for finding in findings],
                    "machine": machine(),
                },
                indent=2,
            )
        )
    else:
        for line in finding_lines(findings):
            print(line)
        print(f"{len(checks)} checks: {', '.join(plural(count, severity) for severity, count in counts.items())}")
    sys.stdout.flush()
    return 3 if counts["error"] else 0


def machine() -> dict[str, Any]:
    """Return the facts that `make cluster-check` compares between machines (`cluster.check.Facts`)."""
    try:
        hardware = detect()
    except HardwareError:  # `gpus` reports it
        hardware = cpu_only()
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return {
        "host_name": socket.gethostname(),
        "identity": f"{boot.read_text().strip()}:{network.readlink()}" if boot.exists() else socket.gethostname(),
        "system": platform.system(),
        "versions": dict(versions()),
        "driver": hardware.driver,
        "gpus": [
            {"name": device.name, "memory_bytes": device.memory_bytes, "free_bytes": device.free_bytes}
            for device in hardware.devices
            if hardware.kind == "cuda"
        ],
        "interfaces": [name for _, name in socket.if_nameindex()],
        "rsync": shutil.which("rsync") is not None,
        "home": str(Path.home()),
        "folder": str(Path.cwd()),
        "runs": str(runs_folder().absolute()),
        "cache": str(cache_folder().absolute()),
        "hub": str(hub_cache()),
    }


# Python, packages, compilers, and files that shadow libraries.


def python_version() -> Iterator[Finding]:
    """Report a Python that is too old."""
    version = sys.version_info
    if version < OLDEST_PYTHON:
        yield Finding(
            "python-version",
            "error",
            text=f"Python {version[0]}.{version[1]} runs; {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer is needed",
            remedy="make install PYTHON=python3.11",
        )


def packages() -> Iterator[Finding]:
    """Report packages that are missing or differ from the versions that were tested together."""
    overlay = pinned_versions("constraints-unsloth.txt") if has_unsloth() else {}
    pins = pinned_versions("constraints.txt") | overlay
    missing, different = [], []
    for name in dict.fromkeys(canonical(name) for name in [*required_packages(), *overlay]):
        try:
            version = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if (pin := pins.get(name)) and version != pin:
            different.append(f"{name} {version} (tested: {pin})")
    if missing:
        text = f"not installed in {sys.prefix}: {', '.join(missing)}"
        yield Finding(
            "package-missing",
            "error",
            text=text,
            remedy="make install" if by_make() else f"pip install {' '.join(missing)}",
        )
    if different:
        text = f"other versions than the tested ones: {', '.join(different)}"
        suffix = "-unsloth" if overlay else ""
        remedy = f"remove .venv{suffix} and run make install{suffix}, or expect differences"
        yield Finding("package-version", "warning", text=text, remedy=remedy)


def unsloth(config: Config | None) -> Iterator[Finding]:
    """Report that Unsloth is missing, if the configuration asks for it."""
    if config and config.tuning.backend == "unsloth" and not has_unsloth():
        text = "`tuning.backend: unsloth` needs the package `unsloth`"
        yield Finding("package-missing", "error", text=text, remedy=UNSLOTH_HINT)


def required_packages() -> list[str]:
    """Return the names of the runtime dependencies."""
    project = ROOT / "pyproject.toml"
    if project.is_file():
        requirements = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        requirements = [r for r in importlib.metadata.requires("sft-play") or [] if "extra ==" not in r]
    return [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements]


def pinned_versions(name: str) -> dict[str, str]:
    """Return package -> version of a file of constraints, in the repository or the wheel; empty without it."""
    files = [folder / name for folder in (ROOT, ROOT / "sft_play" / "shipped") if (folder / name).is_file()]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return {
        canonical(line.split("==")[0]): line.split("==")[1].strip() for line in lines if "==" in line and line[0] != "#"
    }


def canonical(name: str) -> str:
    """Return a package's name as PyPI normalises it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def shadowing_files() -> Iterator[Finding]:
    """Report files of PYTHONPATH that are imported instead of a library; the working folder is never searched."""
    for name, file in shadowed_libraries():
        text = f"`{file}` is imported instead of the library `{name}`"
        yield Finding("shadowed-library", "error", text=text, remedy="rename it, or unset PYTHONPATH")


def compilers() -> Iterator[Finding]:
    """Report missing tools that DeepSpeed needs to compile its CPU optimizer."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")):
        yield Finding(
            "no-compiler",
            "warning",
            text="no C++ compiler on the PATH; DeepSpeed compiles the optimizer of a run that offloads it",
            remedy="apt-get install g++ (Debian, Ubuntu) or the like; all but offloading works without",
        )
    beside_python = Path(sys.executable).with_name("ninja")  # not on the PATH unless the environment is activated
    if not shutil.which("ninja") and not beside_python.is_file():
        yield Finding(
            "no-ninja",
            "warning",
            text="`ninja` is missing; DeepSpeed needs it to compile the optimizer of a run that offloads it",
            remedy="make install, or pip install ninja",
        )


# GPUs and the driver.


def gpus() -> Iterator[Finding]:
    """Report a driver, a GPU or a MIG slice that does not work, and GPUs that torch cannot use."""
    if text := other_gpu():
        yield Finding("other-gpu", "warning", text, "a machine with an NVIDIA GPU, or stay on the CPU")
    try:
        hardware = detect()
    except HardwareError as error:
        yield Finding("gpus-refused", "error", error.message, error.hint or "look at `nvidia-smi`")
        return
    if hardware.kind != "cuda":
        if not all_hidden() and (failure := _nvidia_smi_error()):
            text = f"`nvidia-smi` fails: {failure.splitlines()[0]}"
            yield Finding("driver-broken", "error", text, "reinstall the NVIDIA driver, or reboot after its update")
        return
    yield from ask_torch(hardware, range(len(hardware.devices)), os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})


def _nvidia_smi_error() -> str:
    """Return the error of a failing `nvidia-smi`, since NVML does not distinguish a broken driver from none."""
    if not shutil.which("nvidia-smi"):
        return ""
    try:
        asked = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ((asked.stdout + asked.stderr).strip() or f"exit code {asked.returncode}") if asked.returncode else ""


def hidden() -> Iterator[Finding]:
    """Report a `CUDA_VISIBLE_DEVICES` that hides every GPU."""
    if not all_hidden():
        return
    try:
        nvml = open_nvml()
    except HardwareError:  # a hidden GPU may be broken
        return
    if nvml is not None:
        count = int(nvml.nvmlDeviceGetCount())
        nvml.nvmlShutdown()
        if count:
            value = os.environ["CUDA_VISIBLE_DEVICES"]
            text = f"CUDA_VISIBLE_DEVICES=`{value}` hides all GPUs ({count}): training would use the CPU"
            yield Finding("gpus-hidden", "warning", text, "unset CUDA_VISIBLE_DEVICES")


def folders() -> Iterator[Finding]:
    """Report folders that cannot be written and disks that are nearly full."""
    for finding_id, folder, variable in (
        ("runs-folder", runs_folder(), "RUNS_DIR"),
        ("cache-folder", cache_folder(), "SFT_PLAY_CACHE"),
    ):
        base = folder
        while not base.exists() and base != base.parent:
            base = base.parent
        try:
            with tempfile.NamedTemporaryFile(dir=base, prefix=".sft-play-doctor-"):
                pass
        except OSError as error:
            yield Finding(
                finding_id,
                "error",
                text=f"`{folder}` cannot be written: {error.strerror}",
                remedy=f"make it writable, or set {variable} to another folder",
            )
            continue
        free = shutil.disk_usage(base).free
        if free < 10 * GIB:
            yield Finding(
                "disk-low",
                "error" if free < GIB / 2 else "warning",
                text=(
                    f"the disk of `{folder}` has {free / GIB:.1f} GiB free; a run of a 7B model with adapters needs"
                    " about 20"
                ),
                remedy=f"free some space, or set {variable} to a folder on another disk",
            )


def shared_memory() -> Iterator[Finding]:
    """Report little shared memory for data loading and NCCL."""
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < MIN_SHARED_MEMORY_BYTES:
        yield Finding(
            "shared-memory",
            "warning",
            text=(
                f"/dev/shm has {size / 2**20:.0f} MiB; data loaders and NCCL share memory there, and die with a bus"
                " error"
            ),
            remedy=(
                "docker run --shm-size=8g, or an emptyDir with medium Memory at /dev/shm; or"
                " train.dataloader_num_workers: 0"
            ),
        )


def variables() -> Iterator[Finding]:
    """Report variables that launchers read silently, and accelerate's default file."""
    stray = sorted(name for name in os.environ if LAUNCHER_VARIABLES.fullmatch(name))
    if stray:
        yield Finding(
            "stray-variables",
            "warning",
            text=f"set in this shell: {', '.join(stray)}; torchrun, accelerate or DeepSpeed would obey them",
            remedy=f"unset {' '.join(stray)} (our own launches take them out)",
        )
    if default := accelerate_default():
        yield Finding(
            "accelerate-default-config",
            "note",
            text=(
                f"`{default}` exists; runs read it where it asks for several machines or a strategy, and nothing typed"
                " says otherwise"
            ),
            remedy=f"to use it always: ACCELERATE_CONFIG={default}; never: ACCELERATE_CONFIG=none",
        )


# Ports, the hub, gated models.


def port() -> Iterator[Finding]:
    """Report if the port at which several nodes meet is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            remedy = "a single machine chooses a free port; several nodes: MASTER_PORT=29501"
            yield Finding(f"port-{PORT}", "note", f"port {PORT} is taken (multi-node runs meet there)", remedy)


def hub() -> Iterator[Finding]:
    """Report if models and data cannot be downloaded."""
    if is_offline():
        text = "HF_HUB_OFFLINE is set: only models and data on this machine are used"
        yield Finding("hub-offline", "note", text=text, remedy="unset HF_HUB_OFFLINE to download")
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        with urllib.request.urlopen(endpoint, timeout=HUB_SECONDS):
            return
    except urllib.error.HTTPError:
        return  # the hub is reachable
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        yield Finding(
            "hub-unreachable",
            "warning",
            text=f"{endpoint} cannot be reached: {reason}",
            remedy=(
                "check the network and HTTPS_PROXY; local folders work, and so does the quickstart if pip reaches its"
                " index"
            ),
        )


def token(name: str | None) -> Iterator[Finding]:
    """Report a gated model without a token."""
    if not name or not name.startswith(GATED) or Path(name).exists():
        return
    file = Path(os.environ.get("HF_TOKEN_PATH") or hub_folder() / "token")
    if not os.environ.get("HF_TOKEN") and not file.is_file():
        yield Finding(
            "token-missing",
            "warning",
            text=f"`{name}` is gated, and no hub token is set",
            remedy=f"accept the licence on https://huggingface.co/{name}, then set HF_TOKEN or run {HUB_LOGIN}",
        )


if __name__ == "__main__":
    sys.exit(report(as_json="JSON=1" in sys.argv[1:]))
