"""What a machine says about itself. The texts of this module and of `probe_network` are sent over SSH to a host's own Python, stored nowhere.

It reads a request a line from stdin, `{"call": "clock", ...}`, and answers each by a line, `{"ok": ...}` or `{"error": "..."}`. It uses the
standard library, and of the host's packages what is there; it writes no file, and ends when its input does, or after `LONGEST_SECONDS`. Its
working folder is the project's.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from sft_play.cluster.probe_network import (
    PIECE,
    all_reduce,
    close,
    command_of,
    listen,
    own_addresses,
    reach,
    reach_all,
    read_text,
    route,
)

MARK = "sft-play probe"
"""First line of the answers: what a login shell prints comes before it."""
LONGEST_SECONDS = 120


# ---- The machine


def clock() -> float:
    """Seconds since 1970, by this machine's clock."""
    return time.time()


def facts(towards: str) -> dict[str, Any]:
    """Returns what needs no package: system, disks, limits, names, the interface on the route to `towards`."""
    cache, runs = _folders()
    places = {"folder": str(Path.cwd()), "cache": cache, "runs": runs, "shm": "/dev/shm"}
    return {
        "host_name": socket.gethostname(),
        "machine": _boot() + " " + ",".join(sorted(own_addresses())),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disks": {name: _disk(place) for name, place in places.items()},
        "nofile": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "names_itself": _resolved(socket.gethostname()),
        "ports": read_text("/proc/sys/net/ipv4/ip_local_port_range").split(),
        "rsync": shutil.which("rsync") is not None,
        "route": route(towards),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "packages": _packages(),
    }


def _folders() -> tuple[str, str]:
    """Returns the cache and the folder of runs, by the project's own rules where it is there."""
    try:
        found = importlib.import_module("sft_play.runs.folder")
        return str(Path(found.cache_folder()).absolute()), str(Path(found.runs_folder()).absolute())
    except Exception:  # noqa: BLE001 - another version, or none: the defaults do
        return str(Path.home() / ".cache" / "sft_play"), str(Path.cwd() / "runs")


def _disk(place: str) -> dict[str, Any] | None:
    """Returns the file system of `place`, or of the folder above it that is there."""
    path = Path(place)
    while not path.is_dir() and path != path.parent:
        path = path.parent
    with contextlib.suppress(OSError):
        used = shutil.disk_usage(path)
        writable = os.access(path, os.W_OK) and not os.statvfs(path).f_flag & os.ST_RDONLY
        return {"path": place, "free_bytes": used.free, "total_bytes": used.total, "writable": bool(writable)}
    return None


def _packages() -> dict[str, str]:
    """Returns distribution -> version, by the names of the folders that pip leaves; of two on the path, the first is imported."""
    found: dict[str, str] = {}
    for entry in sys.path:
        with contextlib.suppress(OSError):
            for path in sorted(Path(entry).glob("*.dist-info")):
                name, _, version = path.stem.rpartition("-")
                found.setdefault(name.lower().replace("_", "-"), version)
    return found


def _boot() -> str:
    return read_text("/proc/sys/kernel/random/boot_id").strip()


def _resolved(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    return []


# ---- Packages and GPUs


def software() -> dict[str, Any]:
    """Returns what torch says of itself, and the GPUs; importing torch takes seconds."""
    found: dict[str, Any] = {"torch": None, "cuda": None, "nccl": None, "usable_gpus": 0, "architectures": [], "error": None}
    try:
        torch = importlib.import_module("torch")
        cuda = torch.version.cuda
        found.update(
            torch=torch.__version__, cuda=cuda, usable_gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0
        )
        if cuda:
            flags = getattr(
                torch._C, "_cuda_getArchFlags", str
            )()  # torch.cuda.get_arch_list() says nothing where no GPU can be used
            found["architectures"] = (flags or "").split()
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # noqa: BLE001 - whatever a broken package raises is what we report
        found["error"] = f"{type(error).__name__}: {error}"
    return {**found, **_gpus()}


def _gpus() -> dict[str, Any]:
    """Returns the driver and every GPU with its memory in bytes, by the driver's own library."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, no driver, or a driver that was replaced under a running kernel
        return _gpus_of_driver()
    gpus = []
    for k in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(k)
        memory, users = nvml.nvmlDeviceGetMemoryInfo(handle), []
        with contextlib.suppress(Exception):
            users = [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        gpus.append({
            "name": _text(nvml.nvmlDeviceGetName(handle)), "total_bytes": memory.total, "free_bytes": memory.free,
            "capability": list(nvml.nvmlDeviceGetCudaComputeCapability(handle)), "held_by": [command_of(str(pid)) for pid in users],
        })  # fmt: skip
    return {"driver": _text(nvml.nvmlSystemGetDriverVersion()), "gpus": gpus, "hidden": os.environ.get("CUDA_VISIBLE_DEVICES")}


def _gpus_of_driver() -> dict[str, Any]:
    """Returns the same by the driver's program, for a Python without its library; megabytes there are 2**20 bytes."""
    found: dict[str, Any] = {"driver": None, "gpus": [], "hidden": os.environ.get("CUDA_VISIBLE_DEVICES")}
    words = ["nvidia-smi", "--query-gpu=driver_version,memory.total,memory.free,name", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        for line in subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines():
            driver, total, free, name = (word.strip() for word in line.split(",", 3))
            found["driver"] = driver
            gpu = {"name": name, "total_bytes": int(total) * PIECE, "free_bytes": int(free) * PIECE}
            found["gpus"].append({**gpu, "capability": None, "held_by": []})
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# ---- Files


class OutOfTime(Exception):
    """A file was not read to its end."""


def files(paths: list[str], seconds: float) -> dict[str, str | None]:
    """Returns path (counted from the project's folder) -> sha256 of its bytes, `None` where there is no such file.

    What was not read within `seconds` is left out.
    """
    until, found = time.monotonic() + seconds, {}
    for path in paths:
        with contextlib.suppress(OutOfTime):
            found[path] = sha256(Path(path).expanduser(), until)
    return found


def sha256(path: Path, until: float) -> str | None:
    """Returns the sha256 of a file, `None` where it cannot be read. Raises `OutOfTime` at `until` (monotonic seconds)."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while piece := stream.read(PIECE):
                if time.monotonic() > until:
                    raise OutOfTime
                digest.update(piece)
    except OSError:
        return None
    return digest.hexdigest()


def prepared(names: list[str]) -> dict[str, str | None]:
    """Returns prepared split (`train-0123...`) -> the fingerprint of its rows; `None` where this machine has not got it."""
    cache, _ = _folders()
    found: dict[str, str | None] = {}
    for name in names:
        try:
            manifest = json.loads((Path(cache) / "data" / name / "manifest.json").read_text())
            found[name] = str(manifest["split"]["fingerprint"])
        except (OSError, ValueError, LookupError, TypeError):
            found[name] = None
    return found


# ---- Requests


def in_background(call: Any, arguments: dict[str, Any], timeout: float) -> Any:
    """Returns what `call` returns; leaves it behind after `timeout` seconds: a collective that hangs cannot be called off."""
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found["ok"] = call(**arguments)
        except Exception as error:  # noqa: BLE001 - it is reported
            found["error"] = error

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    worker.join(timeout)
    if "error" in found:
        raise found["error"]
    if worker.is_alive():
        raise TimeoutError(f"no end after {timeout:g} s")
    return found["ok"]


CALLS = {one.__name__: one for one in (clock, facts, software, files, prepared, listen, close, reach, reach_all, all_reduce)}


def serve() -> None:
    """Answers requests until the input ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    end = threading.Timer(LONGEST_SECONDS, os._exit, (1,))
    end.daemon = True
    end.start()
    print(MARK, file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        name, limit = request.pop("call"), request.pop("limit", None)
        try:
            value = in_background(CALLS[name], request, limit) if limit else CALLS[name](**request)
            answer = {"ok": value}
        except Exception as error:  # noqa: BLE001 - the other side decides what it means
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    os._exit(0)  # a thread that hangs in a collective must not keep this process
