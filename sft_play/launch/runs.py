"""`make stop`, `make logs` and `make runs`, and which launcher trains a run, by the lock that it holds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from sft_play.config.call import Call
from sft_play.errors import HardwareError, UserError
from sft_play.files import read_json, read_json_lines
from sft_play.launch.run_folder import FINAL_EVENTS, find_run, read_events
from sft_play.launch.verdict import CAUSE_VARIABLE, describe_stop
from sft_play.launch.watch import is_alive
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.text import table

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
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a disk without file locks: then only a launcher of this machine can be known
        return _owner(path) is not None
    return False


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
    goes_on = f"make resume RUN={run.name} goes on"
    if job := _slurm_job(mine[0]):
        goes_on = (
            f"after a stop its batch script takes another turn, as often as `slurm.max_requeues` allows; `scancel {job}` ends it"
            " for good"
        )
        print(f"hint: Slurm job {job} trains `{run.name}`: {goes_on}", file=sys.stderr, flush=True)
    asked = begun = time.time()
    with contextlib.suppress(
        psutil.Error
    ):  # somewhat early: the kernel counts from the machine's start, in hundredths of a second
        begun = mine[0].create_time() - 0.5
    for launcher in mine:
        _ask(launcher, run)
    deadline = time.monotonic() + LONGEST_SECONDS
    while left := [launcher.pid for launcher in mine if is_alive(launcher)]:  # a zombie has left
        if time.monotonic() > deadline:
            raise HardwareError(f"process {left[0]} has not left within {LONGEST_SECONDS:.0f} s", hint=f"kill -KILL {left[0]}")
        time.sleep(0.1)
    node = next(holder.node_rank for holder in known if holder.process is mine[0])
    return _told(call, run, ending(run, node, begun=begun, asked=asked), goes_on)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run."""

    name: str
    state: str
    """`preparing`, `running`, `finished`, `stopped`, `failed`, `killed` (its launcher has gone without a word), `never started`."""
    code: int | None
    """Exit code of its last launch, where that has ended."""
    step: int
    steps: int | None
    loss: float | None
    """Of the last step in `metrics.jsonl`, nats."""
    best: float | None
    """Best value of `train.metric_for_best_model` among its evaluations."""
    metric: str | None
    age_seconds: float
    """Since something last happened to it."""


def main(call: Call) -> int:
    """Prints the runs, the newest first."""
    folders = [path.parent for path in runs_folder().glob("*/config.json")]
    rows = sorted((row_of(RunFolder(path)) for path in folders), key=lambda row: (row.age_seconds, row.name))
    if call.json:
        print(json.dumps([asdict(row) for row in rows]))
    elif not rows:
        print(f"no runs in `{runs_folder()}`")
    else:
        print(*table([("run", "state", "step", "loss", "best", "age"), *map(_cells, rows)]), sep="\n")
    return 0


def row_of(run: RunFolder) -> Row:
    """Returns what is known of a run, from its files alone; a file that is torn or missing leaves its cells empty."""
    events = [event for event in read_events(run) if event.get("node", 0) == 0]
    last = str(events[-1]["event"]) if events else ""
    over = last in FINAL_EVENTS
    state = (
        ("running" if last and not over else "preparing")
        if holders(run)
        else last
        if over
        else "killed"
        if last
        else "never started"
    )
    metrics: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        metrics = [row for row in read_json_lines(run.metrics) if isinstance(row.get("step"), int)]
    train = [row for row in metrics if row.get("kind") == "train"]
    wanted = _read(run.config).get("config", {}).get("train", {}).get("metric_for_best_model")
    metric = str(wanted or "loss").removeprefix("eval_")
    scores = [row[f"eval_{metric}"] for row in metrics if row.get("kind") == "eval" and row.get(f"eval_{metric}") is not None]
    best = min if metric.partition("/")[0] in ("loss", "perplexity") else max
    touched = [path.stat().st_mtime for path in (run.config, run.events, run.metrics) if path.is_file()]
    return Row(
        name=run.name,
        state=state,
        code=events[-1].get("code") if over else None,
        step=int(train[-1]["step"]) if train else 0,
        steps=_read(run.plan).get("steps"),
        loss=train[-1].get("loss") if train else None,
        best=best(scores) if scores else None,
        metric=metric if scores else None,
        age_seconds=max(0.0, time.time() - max(touched, default=time.time())),
    )


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = read_json(path)
        return found if isinstance(found, dict) else {}
    return {}


def _cells(row: Row) -> tuple[str, ...]:
    state = f"{row.state} ({row.code})" if row.code and row.state == "failed" else row.state
    step = f"{row.step}/{row.steps}" if row.steps else str(row.step)
    best = f"{row.best:.4f} {row.metric}" if row.best is not None else "-"
    return row.name, state, step, f"{row.loss:.4f}" if row.loss is not None else "-", best, age(row.age_seconds)


def age(seconds: float) -> str:
    """Returns a time span in its largest unit: `3 h`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
