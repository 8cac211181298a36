"""The container's entry point: `python -m sft_play.schedulers.entry train-distributed CONFIG=... RUN_NAME=...`.

Schedulers tell a container its place in their own variables (`PET_*`, `JOB_COMPLETION_INDEX`, `SKYPILOT_*`, `SLURM_*`); here they become
`NUM_NODES`, `NODE_RANK`, `MASTER_ADDR` and `MASTER_PORT` of the command that people type by hand, with `LAUNCH_AUTO_RESUME=true`, so that
the same container starts a run and continues it. Signals are passed on, and exit code 75 becomes 175: a PyTorchJob with restart
policy `ExitCode` tries again only from 128 on (contract section 7).

A PyTorchJob with `ExitCode` and a SkyPilot task with `recover_on_exit_codes` know no limit (kubeflow/trainer#2045: `backoffLimit` counts
restarts of containers, and these pods are recreated). Where `SFT_PLAY_MAX_RESTARTS` gives one, node 0 counts in a file next to the run's
folder, which is removed where a launch ended before its workers started, and ends for good with 3. The count starts over with a newer
checkpoint, another run of that name, and an end that is not tried again. `LOST` before any worker is not counted: pods had not come.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from sft_play.errors import HardwareError, RetryableError, UserError
from sft_play.files import read_json, remove_half_written, write_json
from sft_play.launch.process import ended_by_signals
from sft_play.launch.run_folder import read_events
from sft_play.launch.settings import NO_FILE
from sft_play.launch.verdict import LOST, OUT_OF_MEMORY
from sft_play.runs.checkpoints import published, step_of
from sft_play.runs.folder import RunFolder, runs_folder

TRAINING = frozenset({
    "quickstart", "train", "train-tb", "train-distributed", "train-distributed-tb", "train-deepspeed", "train-deepspeed-tb", "train-fsdp",
})  # fmt: skip
"""Commands that start a run, and with `launch.auto_resume` continue it."""
LAUNCHED = TRAINING | {"resume"}
FOR_KUBERNETES = 175
LIMIT = "SFT_PLAY_MAX_RESTARTS"
"""Variable of a pod: how often in a row it may be tried again without a newer checkpoint (`kubernetes.max_restarts`)."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
JOIN_SECONDS = 600
"""As `launch.join_seconds`; `LAUNCH_JOIN_SECONDS=` among the words wins."""
HOST_LIST = re.compile(r"(?P<name>[^,\[]+)(?:\[(?P<numbers>[0-9]+)[^\]]*\](?P<rest>[^,\[]*))?")
"""The first of a list as Slurm writes it: `node[003-007,12],other` is `node003`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a scheduler put this container; `None` is what it does not say."""

    source: str
    """Whose variables said it."""
    nodes: int | None = None
    rank: int | None = None
    master: str | None = None
    port: int | None = None
    gpus: int | None = None


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command at this container's place and returns its exit code, 175 for 75, 3 when that failed too often."""
    words = list(sys.argv[1:] if words is None else words)
    counted: Tries | None = None
    try:
        with ended_by_signals():  # process 1 of a container hears no signal that it has no handler for
            command = normalised(words, os.environ)
            if words and words[0] in LAUNCHED:
                counted = begin_try(command, os.environ)
                _wait_for_master(_typed(command))
                print(f"entry: {shlex.join(['python', '-m', 'sft_play', *command])}", file=sys.stderr, flush=True)
            code = supervised([sys.executable, "-m", "sft_play", *command])
    except UserError as error:
        print(error.render(), file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:  # a signal before the command had begun
        code = stop.code if isinstance(stop.code, int) else 1
    if counted:
        code = counted.end(code)
    return FOR_KUBERNETES if code == LOST else code


def normalised(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns the words of `python -m sft_play`: those given, and what the scheduler says of this container's place.

    What was typed wins where the scheduler is silent, and must agree with it where it is not. Raises `UserError`.
    """
    if not words or words[0] not in LAUNCHED:
        return list(words)
    typed, place = _typed(words), place_of(environ)
    nodes = _agreed("NUM_NODES", typed, place.nodes, place) or 1
    rank = _agreed("NODE_RANK", typed, place.rank, place)
    added: dict[str, str | int | None] = {}
    if nodes > 1:
        if rank is None:
            raise UserError(
                f"`NUM_NODES` is {nodes}, and no variable says which of them this is",
                place="environment", hint="a PyTorchJob, a TrainJob, an indexed Job, SkyPilot and Slurm say it; else give NODE_RANK",
            )  # fmt: skip
        if rank >= nodes:
            raise UserError(f"this is node {rank} by {place.source}, but `NUM_NODES` is {nodes}", place="environment")
        master = None if "MASTER_ADDR" in typed else _seen_from_outside(place.master, rank, environ)
        added = {"NUM_NODES": nodes, "NODE_RANK": rank, "MASTER_ADDR": master, "MASTER_PORT": place.port or None}
    if words[0] != "train":
        added["NUM_GPUS"] = place.gpus or None
    if words[0] in TRAINING:
        added["LAUNCH_AUTO_RESUME"] = "true" if typed.get("RUN_NAME") else None
        added["ACCELERATE_CONFIG"] = NO_FILE
    return [*words, *(f"{name}={value}" for name, value in added.items() if value is not None and name not in typed)]


def place_of(environ: Mapping[str, str]) -> Place:
    """Returns this container's place by the variables of whatever scheduler started it. Raises `UserError` for nonsense in them."""

    def number(*names: str) -> int | None:
        found = (value for value in (_number(environ, name) for name in names) if value is not None)
        return next(found, None)

    if environ.get("SKYPILOT_NODE_RANK"):
        return Place(
            source="SkyPilot", nodes=number("SKYPILOT_NUM_NODES"), rank=number("SKYPILOT_NODE_RANK"),
            master=next(iter(environ.get("SKYPILOT_NODE_IPS", "").split()), None), gpus=number("SKYPILOT_NUM_GPUS_PER_NODE"),
        )  # fmt: skip
    operator = environ.get("PET_NNODES") or environ.get("PET_NODE_RANK")
    if environ.get("JOB_COMPLETION_INDEX") and not operator:
        return Place(
            source="the indexed Job", rank=number("JOB_COMPLETION_INDEX"), master=environ.get("MASTER_ADDR"), port=number("MASTER_PORT")
        )  # fmt: skip
    if environ.get("SLURM_NODEID") and environ.get("SLURM_JOB_ID") and not operator:
        listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
        return Place(
            source="Slurm", nodes=number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"), rank=number("SLURM_NODEID"),
            master=environ.get("MASTER_ADDR") or first_host(listed), gpus=number("SLURM_GPUS_ON_NODE"),
            port=number("MASTER_PORT") or 20_000 + (number("SLURM_JOB_ID") or 0) % 1000 * 10,  # as in `slurm.sh`
        )  # fmt: skip
    # PyTorchJob (Training Operator v1) and TrainJob (Trainer v2). `RANK` is a pod's number there, and `WORLD_SIZE` pods times
    # `PET_NPROC_PER_NODE`: with one process a pod it counts pods.
    each = environ.get("PET_NPROC_PER_NODE", "")
    processes = int(each) if each.isdecimal() and int(each) else None  # `auto` and `gpu` leave it to us
    low, between, high = environ.get("PET_NNODES", "").partition(":")
    if between and low != high:
        raise UserError(
            f"`PET_NNODES` is `{low}:{high}`, and the number of nodes must be one", place="environment",
            hint="omit `elasticPolicy`: a run that is started again with other machines continues by itself",
        )  # fmt: skip
    if not operator and not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        return Place(source="nobody")
    count = _number({"PET_NNODES": low}, "PET_NNODES")
    if count is None and (world := number("WORLD_SIZE")):
        count = world // (processes or 1)
    return Place(
        source="the operator", nodes=count, rank=number("PET_NODE_RANK", "RANK"), gpus=processes,
        master=environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR"), port=number("PET_MASTER_PORT", "MASTER_PORT"),
    )  # fmt: skip


def first_host(listed: str) -> str | None:
    """Returns the first machine of a list as Slurm writes it (`n[3-5,7],m1` is `n3`); `None` of an empty one."""
    match = HOST_LIST.match(listed)
    return f"{match['name']}{match['numbers'] or ''}{match['rest'] or ''}" if match else None


def supervised(argv: Sequence[str]) -> int:
    """Runs `argv`, passes signals on to it, and returns its exit code, 128 + N where signal N ended it.

    Process 1 of a container inherits the orphans of all others, so whatever ends meanwhile is taken off the kernel's list too.
    """
    child = 0
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        else:
            early.append(number)

    previous = {number: signal.signal(number, pass_on) for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN}
    try:
        child = os.posix_spawn(argv[0], list(argv), os.environ, setsigdef=list(previous))
        for number in early:
            os.kill(child, number)
        while True:
            ended, status = os.waitpid(-1, 0)
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _typed(words: Sequence[str]) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in words[1:])


def _agreed(name: str, typed: Mapping[str, str], said: int | None, place: Place) -> int | None:
    """Returns what was typed, or what the scheduler says. Raises `UserError` where the two differ."""
    given = _number(typed, name)
    if given is not None and said is not None and given != said:
        hint = "render the job again, or omit it from its command"
        raise UserError(f"`{name}` is {given}, but {place.source} says {said}", hint=hint)
    return said if given is None else given


def _number(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name, "").strip()
    if text and not re.fullmatch(r"[0-9]{1,9}", text):
        raise UserError(f"`{name}` is `{text}`; expected an integer >= 0", place="environment")
    return int(text) if text else None


def _seen_from_outside(master: str | None, rank: int, environ: Mapping[str, str]) -> str | None:
    """Returns an address at which the other nodes find the master: some operators tell the master itself that it is `localhost`."""
    if not master or not _is_loopback(master):
        return master or None
    if rank:
        raise HardwareError(
            f"the master's address is `{master}`, which is this machine's own, and this is node {rank}", place="environment"
        )
    if environ.get("POD_IP"):
        return environ["POD_IP"]
    with contextlib.suppress(OSError):  # the address under which this machine's name is known, IPv6 where there is no other
        found = [str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
        return next((address for address in sorted(found, key=lambda one: ":" in one) if not _is_loopback(address)), master)
    return master


def _is_loopback(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return address.is_loopback or address.is_link_local  # the latter needs the name of an interface, which others do not share


def _wait_for_master(typed: Mapping[str, str]) -> None:
    """Waits until the master's name has an address: a pod's name is known a while after the pod. Raises `RetryableError`."""
    master = typed.get("MASTER_ADDR")
    if not master or typed.get("NUM_NODES", "1") == "1":
        return
    seconds = _number(typed, "LAUNCH_JOIN_SECONDS") or JOIN_SECONDS
    end, told = time.monotonic() + seconds, False
    while True:
        try:
            socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RetryableError(
                    f"the master `{master}` has no address after {seconds} s: {error}",
                    hint="is its pod scheduled (`kubectl get pods`), and is there a headless Service of that name?",
                ) from error
        if not told:
            print(f"entry: waiting up to {seconds} s for the name `{master}`", file=sys.stderr, flush=True)
            told = True
        time.sleep(1)


# ---- Tries without a newer checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Tries:
    """The tries in a row without a newer checkpoint, the one that is under way included; the last four are in a file between two tries."""

    run: RunFolder
    limit: int
    """Restarts that are allowed in a row: one try more than that."""
    used: int
    step: int
    """Of the newest checkpoint when this try began; 0 without one."""
    events: int
    """Of the run when this try began."""
    began: float | None
    """When the run had its first event, by which it is told from another of that name; `None` before that."""

    def end(self, code: int) -> int:
        """Returns the code with which the container ends: `code`, or 3 where another try would be one too many, with the reason on stderr."""
        step, events = _seen(self.run)
        since = events[self.events :]
        if code in (130, 143) or (code == LOST and not any(event["event"] in ("started", "resumed") for event in since)):
            self.save(self.used - 1)  # somebody asked for it, or others had not come: no failure
        elif code < 128 and code != LOST:
            self.run.tries.unlink(missing_ok=True)
        elif step == self.step and (problem := self.hopeless(since)):
            self.run.tries.unlink(missing_ok=True)
            print(f"\n{problem.render()}", file=sys.stderr, flush=True)
            return problem.exit_code
        else:
            self.save(self.used)
        return code

    def save(self, used: int) -> None:
        """Keeps the count for the next try."""
        _, events = _seen(self.run)
        began = events[0].get("time") if events else self.began
        with contextlib.suppress(OSError):  # a full disk ends the run by itself, with its own reason
            write_json(self.run.tries, {"used": used, "step": self.step, "events": self.events, "began": began})

    def hopeless(self, since: Sequence[Mapping[str, Any]]) -> HardwareError | None:
        """Returns why there is no sense in another try; `since`: the events of this one."""
        missing = f"no newer checkpoint than that of step {self.step}" if self.step else "no checkpoint"
        if any(event["event"] == "failed" and event.get("cause") == OUT_OF_MEMORY for event in since):
            why = f"memory ran out for good, and there is {missing}: another try would end in the same way"
            hint = "docs/reliability.md says what needs less memory; the job can be submitted again when that is fixed"
        elif self.used > self.limit:
            why = f"{self.used} tries in a row made {missing}, and `kubernetes.max_restarts` is {self.limit}"
            hint = f"the reasons are above and in `{self.run.events}`; the count starts over for a job that is submitted again"
        else:
            return None
        return HardwareError(why, place=f"run {self.run.name}", hint=hint)


def begin_try(words: Sequence[str], environ: Mapping[str, str]) -> Tries | None:
    """Counts this try of a command on node 0; `None` elsewhere, and where nobody gave a limit.

    Raises `HardwareError` where the tries before this one are used up: a pod that the kernel killed could not say so itself.
    """
    typed = _typed(words)
    limit, name = _number(environ, LIMIT), typed.get("RUN_NAME")
    if not limit or not name or typed.get("NODE_RANK", "0") != "0":
        return None
    run = RunFolder(runs_folder() / name)
    with contextlib.suppress(OSError):
        remove_half_written(run.tries)
    (step, events), used = _seen(run), 0
    began = events[0].get("time") if events else None
    with contextlib.suppress(OSError, ValueError, TypeError):  # no file, or none of ours
        before = Tries(run=run, limit=limit, **read_json(run.tries))
        if before.step == step and before.began in (None, began):
            used = before.used
            if used and (problem := before.hopeless(events[before.events :])):
                run.tries.unlink(missing_ok=True)
                raise problem
    tries = Tries(run=run, limit=limit, used=used + 1, step=step, events=len(events), began=began)
    tries.save(tries.used)
    return tries


def _seen(run: RunFolder) -> tuple[int, list[dict[str, Any]]]:
    """Returns the step of the newest checkpoint, unchecked, or 0, and the run's events."""
    with contextlib.suppress(OSError):
        return max(map(step_of, published(run)), default=0), read_events(run)
    return 0, []


if __name__ == "__main__":
    sys.exit(main())
