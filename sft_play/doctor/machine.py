"""Checks of GPUs, driver and torch's build for them, of disks, memory, limits, clock and environment variables.

GPUs are asked through NVML as every launch does, and torch in a process of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sft_play.errors import HardwareError
from sft_play.plan.detect import all_hidden, detect, is_wsl, open_nvml, other_gpu, unusable
from sft_play.plan.hardware import COMPUTE_MODE_REMEDY, NO_PEER_TO_PEER, Hardware, ram_bytes
from sft_play.runs.folder import accelerate_default, cache_folder, runs_folder
from sft_play.text import Finding

GIB = 2**30
LAUNCHER_VARIABLES = re.compile(
    r"PET_\w+|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|NODE_RANK|TORCHELASTIC_\w+|ACCELERATE_\w+"
)
MIN_OPEN_FILES = 4096
MIN_SHARED_MEMORY_BYTES = GIB
MIN_RAM_BYTES = 8 * GIB


@cache
def seen() -> Hardware | HardwareError:
    """Returns what a launch would see of this machine, or why it would refuse it."""
    try:
        return detect()
    except HardwareError as error:
        return error


def driver() -> Iterator[Finding]:
    """A driver, a card or a slice that does not answer, and names that no GPU has."""
    hardware = seen()
    if isinstance(hardware, HardwareError):
        yield Finding(id="gpus-refused", severity="error", text=hardware.message, remedy=hardware.hint or "look at `nvidia-smi`")
    elif hardware.kind == "cpu" and not all_hidden() and (error := _nvidia_smi_error()):
        yield Finding(
            id="driver-broken",
            severity="error",
            text=f"`nvidia-smi` fails: {error.splitlines()[0]}",
            remedy="reinstall the NVIDIA driver, or reboot after its update",
        )


def _nvidia_smi_error() -> str:
    """Returns what an `nvidia-smi` says that is here and fails: to NVML a driver that is not loaded is none."""
    if not shutil.which("nvidia-smi"):
        return ""
    try:
        asked = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ((asked.stdout + asked.stderr).strip() or f"exit code {asked.returncode}") if asked.returncode else ""


def _gpus() -> Hardware | None:
    """Returns the GPUs that a process here sees."""
    hardware = seen()
    return hardware if isinstance(hardware, Hardware) and hardware.kind == "cuda" else None


def torch_for_gpu() -> Iterator[Finding]:
    """A compute mode that lets nobody on a card; a torch built without CUDA, for a newer driver, or without code for these GPUs."""
    hardware = _gpus()
    if not hardware:
        return
    blocked = [device for device in hardware.devices if device.blocked]
    for device in blocked:
        yield Finding(id="gpu-blocked", severity="error", text=device.cannot_be_used, remedy=COMPUTE_MODE_REMEDY)
    if not blocked:
        environment = os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        yield from unusable(hardware, range(len(hardware.devices)), environment)


def platform() -> Iterator[Finding]:
    """WSL2, and GPUs of other makers."""
    if is_wsl():
        yield Finding(
            id="wsl2",
            severity="note",
            text="this is WSL2: workers run without `expandable_segments`, for which its driver fails at the first allocation",
            remedy="nothing to do: plans count what torch's other allocator loses",
        )
    if text := other_gpu():
        yield Finding(id="other-gpu", severity="warning", text=text, remedy="a machine with an NVIDIA GPU, or stay on the CPU")


def hidden() -> Iterator[Finding]:
    """`CUDA_VISIBLE_DEVICES` that hides every GPU."""
    if not all_hidden():
        return
    try:
        nvml = open_nvml()
    except HardwareError:  # what is hidden may be broken
        return
    if nvml is None:
        return
    count = int(nvml.nvmlDeviceGetCount())
    nvml.nvmlShutdown()
    if count:
        value = os.environ["CUDA_VISIBLE_DEVICES"]
        yield Finding(
            id="gpus-hidden",
            severity="warning",
            text=f"CUDA_VISIBLE_DEVICES=`{value}` hides all GPUs ({count}): training would use the CPU",
            remedy="unset CUDA_VISIBLE_DEVICES",
        )


def consumer_cards() -> Iterator[Finding]:
    """Several cards that cannot reach each other's memory, or that differ."""
    hardware = _gpus()
    if not hardware or len(hardware.devices) < 2:
        return
    names = sorted({device.name for device in hardware.devices})
    if any(NO_PEER_TO_PEER.search(name) for name in names):
        yield Finding(
            id="no-peer-to-peer",
            severity="note",
            text="GeForce RTX 40 and 50 cards have no peer-to-peer transfers: gradients go through memory",
            remedy="nothing to do: NCCL_P2P_DISABLE=1 is set for the workers; prefer LoRA, or fewer and larger steps",
        )
    if len(names) > 1:
        yield Finding(
            id="mixed-gpus",
            severity="note",
            text=f"different GPUs: {', '.join(names)}; each step waits for the slowest",
            remedy="make plan shows each rank's share; CUDA_VISIBLE_DEVICES chooses among them",
        )


def folders() -> Iterator[Finding]:
    """Folders that cannot be written, and disks that are nearly full."""
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
                id=finding_id,
                severity="error",
                text=f"`{folder}` cannot be written: {error.strerror}",
                remedy=f"make it writable, or set {variable} to another folder",
            )
            continue
        free = shutil.disk_usage(base).free
        if free < 10 * GIB:
            yield Finding(
                id="disk-low",
                severity="error" if free < GIB / 2 else "warning",
                text=f"the disk of `{folder}` has {free / GIB:.1f} GiB free; a run of a 7B model with adapters needs about 20",
                remedy=f"free some space, or set {variable} to a folder on another disk",
            )


def memory() -> Iterator[Finding]:
    """Little memory, an address space limit, or little shared memory for data loading and NCCL."""
    total, (usable, _) = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), ram_bytes()
    if usable < MIN_RAM_BYTES:
        within = " (this container's limit)" if usable < total else ""
        yield Finding(
            id="memory-low",
            severity="warning",
            text=f"{usable / GIB:.1f} GiB of memory{within}; a 135M model needs 4, a 7B model 16 to load",
            remedy="choose a small model, and lower model.max_seq_len",
        )
    import resource

    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY:
        yield Finding(
            id="address-space-limit",
            severity="warning",
            text=f"`ulimit -v` limits processes to {soft / GIB:.1f} GiB of address space; CUDA and mapped files need far more",
            remedy="ulimit -v unlimited",
        )
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < MIN_SHARED_MEMORY_BYTES:
        yield Finding(
            id="shared-memory",
            severity="warning",
            text=f"/dev/shm has {size / 2**20:.0f} MiB; data loaders and NCCL share memory there, and die with a bus error",
            remedy="docker run --shm-size=8g, or an emptyDir with medium Memory at /dev/shm; or train.dataloader_num_workers: 0",
        )


def open_files() -> Iterator[Finding]:
    """Few open files allowed."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        yield Finding(
            id="open-files",
            severity="warning",
            text=f"a process may open {soft} files; sharded models and data loader processes need {MIN_OPEN_FILES} and more",
            remedy=f"ulimit -n {min(65536, hard) if hard > 0 else 65536}",
        )


def clock() -> Iterator[Finding]:
    """A clock behind the runs on disk: names of new runs would sort before old ones, and certificates may seem invalid."""
    newest = max((p.stat().st_mtime for p in runs_folder().glob("*") if p.exists()), default=0.0)
    ahead = newest - time.time()
    if ahead > 300:
        yield Finding(
            id="clock",
            severity="warning",
            text=f"the clock says {time.strftime('%Y-%m-%d %H:%M')}, but a run was written {ahead / 3600:.1f} hours later",
            remedy="set the clock (timedatectl set-ntp true)",
        )


def variables() -> Iterator[Finding]:
    """Variables that launchers obey in silence, and some that do not do what people think."""
    stray = sorted(name for name in os.environ if LAUNCHER_VARIABLES.fullmatch(name))
    if stray:
        yield Finding(
            id="stray-variables",
            severity="warning",
            text=f"set in this shell: {', '.join(stray)}; torchrun and accelerate would obey them",
            remedy=f"unset {' '.join(stray)} (our own launches take them out)",
        )
    if "NCCL_TIMEOUT" in os.environ:
        yield Finding(
            id="nccl-timeout-variable",
            severity="note",
            text="NCCL_TIMEOUT is set, which no library reads; here it sets `launch.timeout_seconds`",
            remedy="write `launch.timeout_seconds` in the YAML file",
        )
    threads, cores = os.environ.get("OMP_NUM_THREADS", ""), os.cpu_count() or 1
    if threads.isdigit() and int(threads) > cores:
        yield Finding(
            id="too-many-threads",
            severity="warning",
            text=f"OMP_NUM_THREADS={threads}, but there are {cores} cores: threads wait for each other",
            remedy="unset OMP_NUM_THREADS; the launcher shares the cores out",
        )
    if default := accelerate_default():
        yield Finding(
            id="accelerate-default-config",
            severity="note",
            text=f"`{default}` exists; runs read it where it asks for several machines or a strategy, and nothing typed says otherwise",
            remedy=f"to use it always: ACCELERATE_CONFIG={default}; never: ACCELERATE_CONFIG=none",
        )


CHECKS = (driver, torch_for_gpu, platform, hidden, consumer_cards, folders, memory, open_files, clock, variables)
