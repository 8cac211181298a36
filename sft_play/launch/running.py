"""Which launcher trains a run, by the lock that it holds: `make stop`, and the state that `make runs` shows."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from sft_play.config.call import Call
from sft_play.errors import HardwareError, UserError
from sft_play.launch.run_folder import find_run, read_events
from sft_play.launch.stopped import describe
from sft_play.launch.watch import is_alive
from sft_play.runs.folder import RunFolder

LOCK = re.compile(r"\.launcher-node(\d+)\.lock")
LONGEST_SECONDS = 3600.0
"""How long `make stop` waits; a launcher leaves within 25 s, unless a checkpoint takes longer to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who holds a run's lock."""

    node_rank: int
    process: psutil.Process | None
    """The launcher; `None` when it runs on another machine (a network disk), or is another user's."""


def holders(run: RunFolder) -> list[Holder]:
    """Returns the launchers that train a run now, one a node, node 0 first."""
    found = []
    for path in run.path.glob(".launcher-node*.lock"):
        name = LOCK.fullmatch(path.name)
        if name and _is_locked(path):
            found.append(Holder(node_rank=int(name.group(1)), process=_owner(path)))
    return sorted(found, key=lambda holder: holder.node_rank)


def _is_locked(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _owner(path: Path) -> psutil.Process | None:
    """Returns the process that is named in a lock, if it has that very file open: another may have got its number."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(path.read_text(encoding="utf-8")))
        if any(path.samefile(file.path) for file in process.open_files() if Path(file.path).name == path.name):
            return process
    return None


def stop(call: Call) -> int:
    """`make stop RUN=`: asks the run's launcher here to save and leave, waits for it and says what is saved."""
    if not call.options.get("RUN"):
        raise UserError("`make stop` needs `RUN=name-or-folder`", hint="make stop RUN=NAME")
    run = find_run(call.options["RUN"])
    known = holders(run)
    if not known:
        raise UserError(f"nothing trains `{run.name}` now", hint="`make runs` shows which runs are under way")
    mine = [holder for holder in known if holder.process is not None]
    if not mine:
        raise HardwareError(
            f"the launcher of `{run.name}` runs on another machine, or under another user",
            hint="type `make stop` there; the stop of one machine stops all",
        )
    for holder in mine:
        assert holder.process is not None
        print(f"asking process {holder.process.pid} to stop `{run.name}`", file=sys.stderr, flush=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            holder.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + LONGEST_SECONDS
    while left := [holder.process for holder in mine if holder.process and is_alive(holder.process)]:  # a zombie has left
        if time.monotonic() > deadline:
            pid = left[0].pid
            raise HardwareError(f"process {pid} has not left within {LONGEST_SECONDS:.0f} s", hint=f"kill -KILL {pid}")
        time.sleep(0.1)
    return _told(call, run)


def _told(call: Call, run: RunFolder) -> int:
    events = read_events(run)
    last = events[-1] if events else {}
    if not run.path.is_dir():
        last = {"event": "removed"}
    if call.json:
        print(json.dumps({"run": str(run.path), **last}))
    elif last.get("event") == "stopped":
        print(f"{describe(last)}\nmake resume RUN={run.name} goes on")
    elif last.get("event") == "finished":
        print(f"`{run.name}` was finished before it could be stopped")
    else:
        print(f"`{run.name}` was stopped before its workers started; nothing was trained")
    return 0 if last.get("event") != "failed" else int(last.get("code", 1))


def logs(call: Call) -> int:
    """`make logs RUN= RANK= FOLLOW=1`: prints the log of a rank, and with `FOLLOW` what is added while the run goes on."""
    if not call.options.get("RUN"):
        raise UserError("`make logs` needs `RUN=name-or-folder`", hint="make logs RUN=NAME")
    run, rank = find_run(call.options["RUN"]), call.integer("RANK") or 0
    follow = call.options.get("FOLLOW", "0").lower()
    if follow not in ("0", "1", "true", "false"):
        raise UserError(f"`FOLLOW` is `{call.options['FOLLOW']}`; expected `1` or `0`")
    path = run.rank_log(rank)
    if not path.is_file():
        ranks = sorted(int(one.stem.removeprefix("rank")) for one in run.logs.glob("rank*.log") if one.stem[4:].isdigit())
        there = f"there are those of ranks {', '.join(map(str, ranks))}" if ranks else "its workers have not started yet"
        raise UserError(f"`{run.name}` has no log of rank {rank}", hint=there)
    if call.json:
        print(json.dumps({"run": str(run.path), "rank": rank, "path": str(path), "text": path.read_text("utf-8", "replace")}))
        return 0
    _print(path, run, follow=follow in ("1", "true"))
    return 0


def _print(path: Path, run: RunFolder, *, follow: bool) -> None:
    with path.open(encoding="utf-8", errors="replace") as stream:
        while True:
            going = follow and bool(holders(run))  # asked before reading, so that the last lines are not missed
            while text := stream.read(65536):
                sys.stdout.write(text)
                sys.stdout.flush()
            if not going:
                return
            time.sleep(0.5)
