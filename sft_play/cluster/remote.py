"""What machines of a cluster are asked over SSH: facts and files. Sent as text, with `remote_processes` and `remote_launch`, by `agent`.

These three files need nothing but the standard library of the Python there, and are always of the version of the machine that asks. A request is
one line of JSON on standard input, answers are lines of JSON on standard output; no value of a request meets a shell. Linux.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from importlib import metadata, util
from pathlib import Path
from typing import Any

_lock = threading.Lock()


def tell(**facts: Any) -> None:
    """Writes one line of JSON; a reader that has gone is no error, what follows from that is decided elsewhere."""
    with _lock, contextlib.suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()


def runs_folder() -> Path:
    """As `runs.folder.runs_folder`, absolute."""
    return Path(os.environ.get("RUNS_DIR") or "runs").absolute()


def cache_folder() -> Path:
    """As `runs.folder.cache_folder`."""
    return Path(os.environ.get("SFT_PLAY_CACHE") or Path.home() / ".cache" / "sft_play")


def hub_folder() -> Path:
    """Where huggingface_hub keeps models."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home).expanduser() / "hub")


def facts(request: dict[str, Any]) -> int:
    """Folders, versions of `packages` without importing any, GPUs, and in which folders this machine sees the file `mark`, made elsewhere."""
    mark = request["mark"]
    folder = Path(request["folder"]).expanduser()
    sys.path.insert(0, str(folder))
    versions = {}
    for name in request["packages"]:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    with contextlib.suppress(OSError):
        runs_folder().mkdir(parents=True, exist_ok=True)
        cache_folder().mkdir(parents=True, exist_ok=True)
    tell(
        host=socket.gethostname(),
        python=".".join(map(str, sys.version_info[:3])),
        versions=versions,
        code=util.find_spec("sft_play") is not None,
        folder=str(folder.absolute()) if folder.is_dir() else None,
        runs=str(runs_folder()),
        cache=str(cache_folder()),
        hub=str(hub_folder()),
        gpus=gpus(),
        rsync=shutil.which("rsync") is not None,
        home=str(Path.home()),
        shares_runs=(runs_folder() / mark).exists(),
        shares_cache=(cache_folder() / mark).exists(),
        linux=sys.platform == "linux",
        run_there=_run_there(request.get("run")),
        interfaces=sorted({name for _, name in socket.if_nameindex()} - {"lo"}),
    )
    return 0


def _run_there(name: str | None) -> str | None:
    """The folder of a run of this name that was begun on this machine; `None` where there is none."""
    folder = runs_folder() / str(name)
    with contextlib.suppress(OSError):
        if name and (folder / "events.jsonl").stat().st_size:
            return str(folder)
    return None


def gpus() -> int:
    """How many NVIDIA GPUs the driver shows to a process of this environment."""
    count = 0
    if program := shutil.which("nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=15, check=False)
            count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([part for part in visible.split(",") if part.strip()]))


# ---- Files


def write(request: dict[str, Any]) -> int:
    """Writes small files aside and renames them; `files` maps paths (relative to the folder) to text."""
    for name, text in request["files"].items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    tell(ok=True)
    return 0


def one_checkpoint(request: dict[str, Any]) -> int:
    """Sets aside checkpoints newer than `step`, which this run is about to make again; nothing is deleted."""
    folder = runs_folder() / request["run"] / "checkpoints"
    aside = []
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else []:
        number = path.name.partition("-")[2]
        if number.isdigit() and (request["step"] is None or int(number) > request["step"]):
            target = path.with_name(f".{path.name}.set-aside-{int(time.time())}")
            path.rename(target)
            aside.append(target.name)
    tell(ok=True, aside=aside)
    return 0
