"""`make stop` and `make logs`, and which launcher trains a run, by the lock that it holds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sft_play.config.call import Call
from sft_play.errors import HardwareError, UserError
from sft_play.files import lock
from sft_play.launch.node import is_alive
from sft_play.launch.run_folder import FINAL_EVENTS, find_run, read_events
from sft_play.launch.verdict import CAUSE_VARIABLE, describe_stop
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
    locks = {int(name[1]): path for path in run.path.glob(".launcher-node*.lock") if (name := LOCK.fullmatch(path.name))}
    return [Holder(node_rank=rank, process=_owner(path)) for rank, path in sorted(locks.items()) if _is_locked(path)]


def _is_locked(path: Path) -> bool:
    try:
        descriptor = lock(path, shared=True)
    except OSError:  # a disk without file locks: then only a launcher of this machine can be known
        return _owner(path) is not None
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _owner(path: Path) -> psutil.Process | None:
    """Returns the process that is named in a lock, if it has that very file open: another may have got its number."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(path.read_text(encoding="utf-8")))
        if any(path.samefile(file.path) for file in process.open_files() if Path(file.path).name == path.name):
            return process
    return None


def _named_run(call: Call) -> RunFolder:
    if not call.options.get("RUN"):
        raise UserError(f"`make {call.command}` needs `RUN=name-or-folder`", hint=f"make {call.command} RUN=NAME")
    return find_run(call.options["RUN"])


def stop(call: Call) -> int:
    """`make stop RUN=`: asks the run's launcher here to save and leave, waits for it and says what is saved."""
    run = _named_run(call)
    known = holders(run)
    if not known:
        raise UserError(f"nothing trains `{run.name}` now", hint="`make runs` shows which runs are under way")
    mine = [holder.process for holder in known if holder.process is not None]
    if not mine:
        by_slurm = "; where Slurm started it, `scancel JOBID` saves and ends it for good" if (run.path / "slurm").is_dir() else ""
        raise HardwareError(
            f"the launcher of `{run.name}` runs on another machine, or under another user",
            hint=f"type `make stop` there; the stop of one machine stops all{by_slurm}",
        )
    goes_on = f"make resume RUN={run.name} continues it"
    if job := _slurm_job(mine[0]):
        goes_on = (
            f"after a stop its batch script takes another turn, as often as `slurm.max_requeues` allows; `scancel {job}` ends it"
            " for good"
        )
        print(f"hint: Slurm job {job} trains `{run.name}`: {goes_on}", file=sys.stderr, flush=True)
    node = next(holder.node_rank for holder in known if holder.process is mine[0])
    return ask_to_leave(call, run, mine, node, goes_on)


def ask_to_leave(call: Call, run: RunFolder, launchers: Sequence[psutil.Process], node_rank: int, goes_on: str) -> int:
    """Ask processes that train a run to save and leave, wait for it and say how node `node_rank` ended; return the exit code."""
    asked = begun = time.time()
    with contextlib.suppress(psutil.Error):
        begun = launchers[0].create_time() - 0.5  # the kernel counts from the machine's start, in hundredths of a second
    for launcher in launchers:
        _ask(launcher, run)
    deadline = time.monotonic() + LONGEST_SECONDS
    while left := [launcher.pid for launcher in launchers if is_alive(launcher)]:  # a zombie has left
        if time.monotonic() > deadline:
            raise HardwareError(f"process {left[0]} has not left within {LONGEST_SECONDS:.0f} s", hint=f"kill -KILL {left[0]}")
        time.sleep(0.1)
    return _told(call, run, ending(run, node_rank, begun=begun, asked=asked), goes_on)


def _slurm_job(launcher: psutil.Process) -> str | None:
    """Returns the job whose batch script, of `make slurm`, has started a launcher; `None` for any other launcher."""
    with contextlib.suppress(psutil.Error, OSError):
        variables = launcher.environ()
        return variables.get("SLURM_JOB_ID") if CAUSE_VARIABLE in variables else None
    return None


def _ask(launcher: psutil.Process, run: RunFolder) -> None:
    print(f"asking process {launcher.pid} to stop `{run.name}`", file=sys.stderr, flush=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        suspended = launcher.status() == psutil.STATUS_STOPPED
        launcher.send_signal(signal.SIGTERM)
        if suspended:  # by Ctrl-Z: it would hear nothing before it goes on
            print(f"process {launcher.pid} was suspended; it is continued, so that it can stop", file=sys.stderr, flush=True)
            launcher.send_signal(signal.SIGCONT)


def ending(run: RunFolder, node_rank: int, *, begun: float, asked: float) -> dict[str, Any]:
    """Returns the event with which one launcher ended: its own, never one that an earlier launch left.

    `begun`, `asked`: when the launcher began and was asked to stop (seconds since 1970). The event is `removed` where the run's folder
    went with it, `unknown` where its workers had started and it could not write how they ended.
    """
    if not run.path.is_dir():
        return {"event": "removed", "code": 143}
    events = [(float(event.get("time", 0.0)), event) for event in read_events(run) if event.get("node", 0) == node_rank]
    started = [at for at, event in events if event["event"] in ("started", "resumed") and at >= begun]
    since = started[-1] if started else asked
    ended = [event for at, event in events if event["event"] in FINAL_EVENTS and at >= since]
    if ended:
        return dict(ended[-1])
    if started:
        return {"event": "unknown", "code": HardwareError.exit_code}
    return {"event": "stopped", "code": 143, "note": "its workers had not started; nothing was trained in this launch"}


def _told(call: Call, run: RunFolder, last: Mapping[str, Any], goes_on: str) -> int:
    """Says how it ended, and after a stop how it `goes_on`; returns the exit code."""
    name, event = run.name, last["event"]
    if call.json:
        print(json.dumps({"run": str(run.path), **last}))
    elif event == "removed":
        print(f"`{name}` was stopped before its workers started; nothing was trained, and its folder is removed")
    elif event == "stopped" and "signal" not in last:
        print(f"stopped; {last['note']}\n{goes_on}")
    elif event == "stopped":
        print(f"{describe_stop(last)}\n{goes_on}")
    elif event == "finished":
        print(f"`{name}` was finished before it could be stopped")
    elif event == "failed":
        print(f"{last.get('error') or 'error: it failed'}\n\n`{name}` failed while it was asked to stop", file=sys.stderr)
    else:
        text = f"error: the launcher of `{name}` has left, but `{run.events}` does not say how: it may be that nothing can be written there"
        print(f"{text}\n\nhint: see what the launcher printed, and {run.logs}", file=sys.stderr)
    return int(last.get("code", 1)) if event in ("failed", "unknown") else 0


def logs(call: Call) -> int:
    """`make logs RUN= RANK= FOLLOW=1`: prints the log of a rank, and with `FOLLOW` what is added while the run goes on."""
    run, rank, follow = _named_run(call), call.integer("RANK") or 0, call.flag("FOLLOW")
    path = run.rank_log(rank)
    if not path.is_file():
        ranks = sorted(int(one.stem.removeprefix("rank")) for one in run.logs.glob("rank*.log") if one.stem[4:].isdigit())
        there = f"there are those of ranks {', '.join(map(str, ranks))}" if ranks else "its workers have not started yet"
        raise UserError(f"`{run.name}` has no log of rank {rank}", hint=there)
    if call.json:
        print(json.dumps({"run": str(run.path), "rank": rank, "path": str(path), "text": path.read_text("utf-8", "replace")}))
        return 0
    with path.open(encoding="utf-8", errors="replace") as stream:
        while True:
            going = follow and bool(holders(run))  # asked before reading, so that the last lines are not missed
            while text := stream.read(65536):
                sys.stdout.write(text)
                sys.stdout.flush()
            if not going:
                return 0
            time.sleep(0.5)
