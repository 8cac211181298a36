"""The container's entry point: `python -m sft_play.schedulers.entry train-distributed CONFIG=... RUN_NAME=...`.

Schedulers set a container's place in their own variables (`PET_*`, `JOB_COMPLETION_INDEX`), which become `NUM_NODES`,
`NODE_RANK`, `MASTER_ADDR` and `MASTER_PORT` of the command that people type manually, with `LAUNCH_AUTO_RESUME=true`,
so that the same container starts and continues a run. Signals are forwarded, and exit code 75 becomes 175: a PyTorchJob
with restart policy `ExitCode` only restarts pods for codes from 128.

A PyTorchJob with `ExitCode` has no limit of restarts (kubeflow/trainer#2045: `backoffLimit` counts restarts of
containers, and these pods are recreated). If `SFT_PLAY_MAX_RESTARTS` sets one, node 0 counts tries in a file next to
the run's folder (a launch that ends before its workers start removes the folder), and ends the job with 3.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.errors import HardwareError, RetryableError, UserError
from sft_play.files import read_object, write_json
from sft_play.launch.process import end_by_signals, hear_signals
from sft_play.launch.run_folder import read_events
from sft_play.launch.settings import NO_FILE
from sft_play.launch.verdict import LOST, OUT_OF_MEMORY
from sft_play.runs.checkpoints import list_checkpoints, step_of
from sft_play.runs.folder import RunFolder, runs_folder

TRAINING = frozenset(
    {
        "quickstart",
        "train",
        "train-tb",
        "train-distributed",
        "train-distributed-tb",
        "train-deepspeed",
        "train-deepspeed-tb",
        "train-fsdp",
    }
)
"""Commands that start a run and, with `launch.auto_resume`, continue it."""
LAUNCHED = TRAINING | {"resume"}
FOR_KUBERNETES = 175
LIMIT = "SFT_PLAY_MAX_RESTARTS"
"""Variable of a pod: most restarts in a row without a newer checkpoint (`kubernetes.max_restarts`)."""
JOIN_SECONDS = 600
"""Default of `launch.join_seconds`, unless the command has `LAUNCH_JOIN_SECONDS=`."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command at this container's place and return its exit code: 175 for 75, or 3 after too many tries."""
    words = list(sys.argv[1:] if words is None else words)
    counted: Tries | None = None
    try:
        with end_by_signals():  # process 1 of a container only receives signals that it handles
            command = complete_command(words, os.environ)
            if words and words[0] in LAUNCHED:
                counted = begin_try(command, os.environ)
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
    if counted:
        code = counted.end(code)
    return FOR_KUBERNETES if code == LOST else code


def complete_command(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the words of `python -m sft_play`: `words` and the place that the scheduler sets for this container.

    Typed words count if the scheduler sets nothing, and must agree with it otherwise. Raise `UserError`.
    """
    if not words or words[0] not in LAUNCHED:
        return list(words)
    typed, (source, place) = _typed(words), place_of(environ)
    for name in ("NUM_NODES", "NODE_RANK"):
        if place.get(name) and typed.get(name, place[name]) != place[name]:
            hint = "render the job again, or omit it from its command"
            raise UserError(f"`{name}` is {typed[name]}, but {source} says {place[name]}", hint=hint)
    if (typed.get("NUM_NODES") or place.get("NUM_NODES") or "1") == "1":
        place = {"NUM_GPUS": place.get("NUM_GPUS")}
    if words[0] == "train":
        place["NUM_GPUS"] = None
    if words[0] in TRAINING:
        place["LAUNCH_AUTO_RESUME"] = "true" if typed.get("RUN_NAME") else None
        place["ACCELERATE_CONFIG"] = NO_FILE
    return [*words, *(f"{name}={value}" for name, value in place.items() if value and name not in typed)]


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Return an integer from the pod's environment, or `None` if it is not set. Raise `UserError`."""
    if not (text := environ.get(name, "")):
        return None
    if not re.fullmatch("[0-9]{1,9}", text):
        hint = (
            "omit `elasticPolicy`: this program restarts automatically, with a fixed number of pods"
            if ":" in text
            else "correct it in the manifest"
        )
        raise UserError(f"`{name}` is `{text}`; expected an integer", place="environment", hint=hint)
    return int(text)


def place_of(environ: Mapping[str, str]) -> tuple[str, dict[str, str | None]]:
    """Return which scheduler started this container, and its place as variables of our command, `None` for those it
    does not set.

    Raise `UserError` for a value that is not an integer: `PET_NNODES` of a job with an `elasticPolicy` is a range.
    """
    get = environ.get
    for name in ("PET_NNODES", "PET_NODE_RANK", "RANK", "JOB_COMPLETION_INDEX"):
        _number(environ, name)
    if get("JOB_COMPLETION_INDEX") and not get("PET_NNODES"):
        return "the indexed Job", {
            "NODE_RANK": get("JOB_COMPLETION_INDEX"),
            "MASTER_ADDR": get("MASTER_ADDR"),
            "MASTER_PORT": get("MASTER_PORT"),
        }
    # PyTorchJob (Training Operator v1) and TrainJob (Trainer v2). `RANK` is a pod's number there, and `WORLD_SIZE` pods
    # times `PET_NPROC_PER_NODE`: with one process a pod it counts pods.
    each, world = get("PET_NPROC_PER_NODE", ""), None if get("PET_NNODES") else _number(environ, "WORLD_SIZE")
    processes = each if each.isdecimal() else None  # with `auto` and `gpu` we choose
    master = get("PET_MASTER_ADDR") or get("MASTER_ADDR")
    return "the operator", {
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


# ---- Tries without a newer checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Tries:
    """Tries in a row without a newer checkpoint, including the current one; a file keeps `used` and `step` between
    tries.
    """

    run: RunFolder
    limit: int
    """Most restarts in a row, one less than the tries."""
    used: int
    step: int
    """Step of the newest checkpoint when this try began; 0 without one."""
    events: int
    """Number of the run's events when this try began."""

    def end(self, code: int) -> int:
        """Return the container's exit code: `code`, or 3 with the reason on stderr if another try would exceed the
        limit.
        """
        step, events = _look(self.run)
        since = events[self.events :]
        began = any(event["event"] in ("started", "resumed") for event in since)
        out_of_memory = any(event.get("cause") == OUT_OF_MEMORY for event in since if event["event"] == "failed")
        if code in (130, 143) or (code == LOST and not began):
            self.save(self.used - 1)  # a requested stop, or missing peers, is not a failure
        elif step > self.step or (code < 128 and code != LOST):
            self.run.tries.unlink(missing_ok=True)
        elif out_of_memory or self.used > self.limit:
            self.run.tries.unlink(missing_ok=True)
            problem = self.without_memory() if out_of_memory else self.used_up()
            print(f"\n{problem.render()}", file=sys.stderr, flush=True)
            return problem.exit_code
        return code

    def without_memory(self) -> HardwareError:
        """Return the error for memory that ran out before a newer checkpoint."""
        return HardwareError(
            "memory ran out, and there is no newer checkpoint: another try would end in the same way",
            place=f"run {self.run.name}",
            hint="docs/troubleshooting.md#cuda-out-of-memory says what saves memory; submit the job again with that",
        )

    def used_up(self) -> HardwareError:
        """Return the error for too many tries."""
        missing = f"no newer checkpoint than that of step {self.step}" if self.step else "no checkpoint"
        return HardwareError(
            f"{min(self.used, self.limit + 1)} tries in a row made {missing}, and `kubernetes.max_restarts` is"
            f" {self.limit}",
            place=f"run {self.run.name}",
            hint=(
                f"the reasons are above and in `{self.run.events}`; the count starts over for a job that is submitted"
                " again"
            ),
        )

    def save(self, used: int) -> None:
        """Save the count for the next try."""
        with contextlib.suppress(OSError):  # a full disk ends the run with its own error
            write_json(self.run.tries, {"used": used, "step": self.step})


def begin_try(words: Sequence[str], environ: Mapping[str, str]) -> Tries | None:
    """Count this try of a command on node 0; return `None` on other nodes and without a limit.

    Raise `HardwareError` if earlier tries have reached the limit, which a pod killed by the kernel could not report.
    """
    typed = _typed(words)
    limit, name = _number(environ, LIMIT), typed.get("RUN_NAME")
    if not limit or not name or typed.get("NODE_RANK", "0") != "0":
        return None
    run = RunFolder(runs_folder() / name)
    (step, events), before = _look(run), read_object(run.tries)
    used = 1 + (before["used"] if before.get("step") == step else 0)
    tries = Tries(run=run, limit=limit, used=used, step=step, events=len(events))
    if used > limit + 1:
        run.tries.unlink(missing_ok=True)
        raise tries.used_up()
    tries.save(used)
    return tries


def _look(run: RunFolder) -> tuple[int, list[dict[str, Any]]]:
    """Return the step of the newest checkpoint (unchecked; 0 without one) and the run's events."""
    with contextlib.suppress(OSError):
        return max(map(step_of, list_checkpoints(run)), default=0), read_events(run)
    return 0, []


if __name__ == "__main__":
    sys.exit(main())
