"""The container's entry point: `python -m sft_play.schedulers.entry train-distributed CONFIG=... RUN_NAME=...`.

Schedulers set a container's place in their own variables (`PET_*`, `JOB_COMPLETION_INDEX`), which become `NUM_NODES`,
`NODE_RANK`, `MASTER_ADDR` and `MASTER_PORT` of the command that people type manually, with `LAUNCH_AUTO_RESUME=true`,
so that the same container starts and continues a run. Signals are forwarded, and exit code 75 becomes 175: a PyTorchJob
with restart policy `ExitCode` only restarts pods for codes from 128.

A PyTorchJob with `ExitCode` has no limit of restarts (kubeflow/trainer#2045: `backoffLimit` counts restarts of
containers, and these pods are recreated). If `SFT_PLAY_MAX_RESTARTS` sets one, node 0 ends the job with 3 when so many
launches in a row made no newer checkpoint, by the run's events.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sft_play.errors import HardwareError, RetryableError, UserError
from sft_play.launch.process import end_by_signals, hear_signals
from sft_play.launch.run_folder import FINAL_EVENTS, STARTS, read_events, record_event
from sft_play.launch.settings import NO_FILE
from sft_play.launch.verdict import LOST, OUT_OF_MEMORY
from sft_play.runs.checkpoints import list_checkpoints
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.text import plural

FOR_KUBERNETES, KILLED = 175, 128 + signal.SIGKILL
LIMIT = "SFT_PLAY_MAX_RESTARTS"
"""Variable of a pod: most restarts in a row without a newer checkpoint (`kubernetes.max_restarts`)."""
JOIN_SECONDS = 600
"""Default of `launch.join_seconds`, unless the command has `LAUNCH_JOIN_SECONDS=`."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command at this container's place and return its exit code: 175 for 75, or 3 after too many tries."""
    words, mark = list(sys.argv[1:] if words is None else words), None
    try:
        with end_by_signals():  # process 1 of a container only receives signals that it handles
            command = complete_command(words, os.environ)
            if is_launch(command):
                mark = require_progress(command, os.environ)
                _wait_for_master(_typed(command))
                print(f"entry: {shlex.join(['python', '-m', 'sft_play', *command])}", file=sys.stderr, flush=True)
            code = supervise([sys.executable, "-m", "sft_play", *command])
    except UserError as error:
        print(error.render(), file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:  # a signal before the command started
        code = stop.code if isinstance(stop.code, int) else 1
    if mark and code != KILLED:
        mark.unlink(missing_ok=True)
    return FOR_KUBERNETES if code == LOST else code


def is_launch(words: Sequence[str]) -> bool:
    """Return whether a command starts or resumes a run."""
    return bool(words) and (words[0] in ("quickstart", "resume") or words[0].startswith("train"))


def complete_command(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the words of `python -m sft_play`: `words` and the place that the scheduler sets for this container.

    Typed words win. Raise `UserError` for a place that is not a number.
    """
    if not is_launch(words):
        return list(words)
    typed, place = _typed(words), place_of(environ)
    if (typed.get("NUM_NODES") or place.get("NUM_NODES") or "1") == "1":
        place = {"NUM_GPUS": place.get("NUM_GPUS")}
    if words[0] == "train":
        place["NUM_GPUS"] = None
    if words[0] != "resume":
        place["LAUNCH_AUTO_RESUME"] = "true" if typed.get("RUN_NAME") else None
        place["ACCELERATE_CONFIG"] = NO_FILE
    return [*words, *(f"{name}={value}" for name, value in place.items() if value and name not in typed)]


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Return a number from the pod's environment, or `None` if it is not set. Raise `UserError`."""
    text = environ.get(name, "")
    if text and not text.isdecimal():
        hint = "omit `elasticPolicy`: the number of pods is fixed" if ":" in text else "correct it in the manifest"
        raise UserError(f"`{name}` is `{text}`; expected an integer", place="environment", hint=hint)
    return int(text) if text else None


def place_of(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return this container's place, as its scheduler sets it, as variables of our command; `None` for those it does
    not set. Raise `UserError`: `PET_NNODES` of a job with an `elasticPolicy` is a range.
    """
    get = environ.get
    for name in ("PET_NNODES", "PET_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX"):
        _number(environ, name)
    if get("JOB_COMPLETION_INDEX") and not get("PET_NNODES"):  # an indexed Job
        return {
            "NODE_RANK": get("JOB_COMPLETION_INDEX"),
            "MASTER_ADDR": get("MASTER_ADDR"),
            "MASTER_PORT": get("MASTER_PORT"),
        }
    # PyTorchJob (Training Operator v1) and TrainJob (Trainer v2). `RANK` is a pod's number there, and `WORLD_SIZE` pods
    # times `PET_NPROC_PER_NODE`: with one process a pod it counts pods.
    each, world = get("PET_NPROC_PER_NODE", ""), None if get("PET_NNODES") else _number(environ, "WORLD_SIZE")
    processes = each if each.isdecimal() else None  # with `auto` and `gpu` we choose
    master = get("PET_MASTER_ADDR") or get("MASTER_ADDR")
    return {
        "NUM_NODES": get("PET_NNODES") or (str(world // int(processes or 1)) if world else None),
        "NODE_RANK": get("PET_NODE_RANK") or get("RANK"),
        # Some operators set `localhost` on the master itself, which the others would look for on their own machine.
        "MASTER_ADDR": get("POD_IP", master) if master in ("localhost", "127.0.0.1") else master,
        "MASTER_PORT": get("PET_MASTER_PORT") or get("MASTER_PORT"),
        "NUM_GPUS": processes,
    }


def supervise(argv: Sequence[str]) -> int:
    """Run `argv`, forward signals to it, and return its exit code, or 128 + N if signal N ended it."""
    early: list[int] = []
    # Without the operator's variables, which are now words of the command: it reads options from there only.
    environment = {name: text for name, text in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    with (
        hear_signals(lambda number, _: early.append(number)),
        subprocess.Popen(argv, env=environment) as process,
        hear_signals(lambda number, _: process.send_signal(number)),
    ):
        for number in early:
            process.send_signal(number)
        code = process.wait()
    return code if code >= 0 else 128 - code


def _typed(words: Sequence[str]) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in words[1:])


def _wait_for_master(typed: Mapping[str, str]) -> None:
    """Wait until the master's name resolves, which takes a while after its pod starts. Raise `RetryableError`."""
    master = typed.get("MASTER_ADDR")
    limit = typed.get("LAUNCH_JOIN_SECONDS", "")
    seconds = int(limit) if limit.isdecimal() else JOIN_SECONDS
    end, announced = time.monotonic() + seconds, False
    while master:
        try:
            socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RetryableError(
                    f"the master `{master}` has no address after {seconds} s: {error}",
                    hint="is its pod scheduled (`kubectl get pods`), and is there a headless Service of that name?",
                ) from error
        if not announced:
            print(f"entry: waiting up to {seconds} s for the name `{master}`", file=sys.stderr, flush=True)
            announced = True
        time.sleep(1)


def require_progress(words: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """Raise `HardwareError` on node 0 if more launches than the limit, in a row, made no newer checkpoint.

    Launches that the kernel killed count too; one that was stopped, or ended for good, restarts the count. Return the
    mark that only such a launch leaves, next to the run: one that is killed while it prepares data records no event.
    """
    typed = _typed(words)
    limit, name = _number(environ, LIMIT), typed.get("RUN_NAME")
    if not limit or not name or typed.get("NODE_RANK", "0") != "0":
        return None
    run, tries, memory = RunFolder(runs_folder() / name), 0, False
    mark = run.path.with_name(f".{name}.killed")
    saved = max((path.stat().st_mtime for path in list_checkpoints(run)), default=0.0)
    for event in read_events(run, 0):
        if event["time"] < saved or (event["event"] in FINAL_EVENTS and event.get("code") != LOST):
            tries, memory = 0, False
        elif event["event"] in STARTS:
            tries += 1
        elif event["event"] == "failed":
            memory = tries > 0 and event.get("cause") == OUT_OF_MEMORY
    killed = mark.stat().st_size if mark.is_file() and mark.stat().st_mtime > saved else 0
    tries = max(tries, killed)
    if memory or tries > limit:
        why = "memory ran out" if memory else f"`kubernetes.max_restarts` is {limit}"
        error = HardwareError(
            f"{plural(tries, 'attempt')} in a row made no newer checkpoint, and {why}",
            place=f"run {run.name}",
            hint=f"the reasons are in `{run.events}`; the count starts over for a job that is submitted again",
        )
        mark.unlink(missing_ok=True)
        if run.path.is_dir():
            record_event(run, "failed", code=error.exit_code, error=error.message)
        raise error
    with contextlib.suppress(OSError):  # a full disk ends the run with its own error
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_bytes(b"." * (killed + 1))
    return mark


if __name__ == "__main__":
    sys.exit(main())
