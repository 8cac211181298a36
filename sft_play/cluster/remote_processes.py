"""Processes of runs on a machine of a cluster: found by what they inherited, shown, ended; and the log of a rank. See `remote`."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from sft_play.cluster.remote import gpus, runs_folder, tell

TOKEN = "SFT_PLAY_CLUSTER"
"""Variable with an id of its own for each start on each machine; it tells the launcher, too, that restarts are not its business."""
CHUNK = 65536
SAVING_SECONDS = 5.0
"""A checkpoint's folder in which nothing has changed for so long is not being written."""
LONGEST_SAVE_SECONDS = 3600.0


def places(request: dict[str, Any]) -> list[Path]:
    """The folders of runs to look in: this machine's, and where the one that asks keeps its own, which may be a shared disk."""
    found = {path.resolve(): path for path in (runs_folder(), *map(Path, request.get("also", ()))) if path.is_dir()}
    return list(found.values())


def folder_of(request: dict[str, Any]) -> Path:
    """The folder of the run that is asked for."""
    found = [place / str(request["run"]) for place in places(request)]
    return next((run for run in found if run.is_dir()), runs_folder() / str(request["run"]))


def tail(request: dict[str, Any]) -> int:
    """Sends the text of a run's log, and with `follow` what is added while its launcher here lives and somebody reads."""
    run = folder_of(request)
    path = run / "logs" / f"rank{int(request['rank'])}.log"
    if not path.is_file():
        tell(missing=True, ranks=ranks_here(run))
        return 0
    done = threading.Event()
    threading.Thread(target=_until_gone, args=(done,), daemon=True).start()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with path.open("rb") as stream:
        while True:
            going = request["follow"] and bool(living(run)) and not done.is_set()
            while content := stream.read(CHUNK):
                tell(text=decoder.decode(content))
            if not going:
                return 0
            time.sleep(0.5)


def _until_gone(done: threading.Event) -> None:
    while os.read(0, CHUNK):  # a thread inside `sys.stdin` when Python ends makes it abort
        pass
    done.set()


def ranks_here(run: Path) -> list[int]:
    """The ranks of which a run has a log on this machine."""
    found = (re.fullmatch(r"rank(\d+)\.log", path.name) for path in (run / "logs").glob("rank*.log"))
    return sorted(int(name[1]) for name in found if name)


def pid_file(run: Path, node: int) -> Path:
    """Says which processes train a run here, for `cluster-status` and `cluster-stop`."""
    return run / f".cluster-node{node}.json"


def with_token(token: str) -> list[int]:
    """The processes that inherited a token, this one excepted."""
    wanted = f"{TOKEN}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if wanted in variables and not is_zombie(entry):
                    found.append(int(entry.name))
    return found


def is_zombie(entry: Path) -> bool:
    """Whether a process has ended and only waits to be reaped."""
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def send(pids: list[int], number: int) -> None:
    """Sends a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(token: str) -> int:
    """Kills what has the token, however often it forks; returns how many are left."""
    for _ in range(20):
        if not (pids := with_token(token)):
            return 0
        send(pids, signal.SIGKILL)
        time.sleep(0.1)
    return len(with_token(token))


def living(run: Path) -> list[dict[str, Any]]:
    """The pid files of a run whose launcher lives here."""
    found = []
    for path in sorted(run.glob(".cluster-node*.json")):
        with contextlib.suppress(OSError, ValueError):
            facts_of = json.loads(path.read_text(encoding="utf-8"))
            if facts_of.get("machine") == machine() and facts_of.get("launcher") in with_token(facts_of["token"]):
                found.append(facts_of)
    return found


def machine() -> str:
    """An id of this machine's start and its network: several may share a disk, and on tests' machines a kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text().strip() if boot.is_file() else ""
    with contextlib.suppress(OSError):
        text += ":" + str(Path("/proc/self/ns/net").readlink())
    return text


def status(request: dict[str, Any]) -> int:
    """Runs under way here: of `run`, or of all."""
    runs = [folder_of(request)] if request.get("run") else [path for place in places(request) for path in place.glob("*")]
    found = []
    for run in runs:
        for one in living(run):
            logs = sorted((run / "logs").glob("rank*.log"), key=lambda path: path.stat().st_mtime)
            found.append(
                one | {"run": run.name, "processes": len(with_token(one["token"])), "last": last_line(logs[-1]) if logs else None}
            )
    tell(runs=found, gpus=gpus(), host=socket.gethostname())
    return 0


def last_line(path: Path) -> str:
    """The last line of a log, cut to 200 letters."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 4000))
        lines = stream.read().decode("utf-8", "replace").replace("\r", "\n").strip().splitlines()
    return lines[-1][:200] if lines else ""


def saves(run: Path) -> bool:
    """Whether a checkpoint is being written: its folder has been touched within some seconds."""
    newest = 0.0
    for folder in (run / "checkpoints").glob(".step-*.partial"):
        with contextlib.suppress(OSError):
            newest = max([newest, folder.stat().st_mtime, *(path.stat().st_mtime for path in folder.iterdir())])
    return time.time() - newest < SAVING_SECONDS


def end(request: dict[str, Any]) -> int:
    """Ends what trains a run here: SIGTERM to its launcher (save and leave), SIGKILL to what is left after `grace` seconds.

    A save that takes longer goes on while it grows, an hour at most. Without `grace` nothing is waited for.
    """
    run, left = folder_of(request), 0
    ended = living(run)
    send([one["launcher"] for one in ended], signal.SIGTERM if request["grace"] else signal.SIGKILL)
    begun, grace = time.monotonic(), float(request["grace"])
    while (waited := time.monotonic() - begun) < grace or (grace and waited < LONGEST_SAVE_SECONDS and saves(run)):
        if not any(with_token(one["token"]) for one in ended):
            break
        time.sleep(0.2)
    for one in ended:
        left += kill_all(one["token"])
        pid_file(run, one["node"]).unlink(missing_ok=True)
    for path in run.glob(".cluster-node*.json"):  # of a launcher that is gone, whose descendants are not
        with contextlib.suppress(OSError, ValueError):
            one = json.loads(path.read_text(encoding="utf-8"))
            if one.get("machine") == machine():
                left += kill_all(one["token"])
                path.unlink(missing_ok=True)
    tell(ended=[one["node"] for one in ended], left=left)
    return 0
