"""What `train-cluster` was asked for, and the commands that it types on every machine: the ones that a person would."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from sft_play.cluster.board import plan_of
from sft_play.cluster.hosts import Facts, forwarded, require_master_here, shared_variables
from sft_play.cluster.ssh import is_here
from sft_play.config.call import Call, Override
from sft_play.config.cluster import Host, Inventory, inventory_for_call
from sft_play.config.keys import variable_name
from sft_play.config.load import LoadedConfig, override_config
from sft_play.config.rules import elastic_bounds
from sft_play.errors import HardwareError, UserError, raise_all
from sft_play.files import read_json, text_sha256, typed_path, write_json
from sft_play.launch.deepspeed import read_user_json
from sft_play.launch.machines import ABSENT
from sft_play.launch.network import holder_of, port_is_free
from sft_play.launch.preparation import DELIVERED, FETCH
from sft_play.launch.resume import check_overrides
from sft_play.launch.run_folder import choose_name, find_run, has_started
from sft_play.launch.settings import NO_DEFAULT_FILE
from sft_play.runs.folder import RunFolder, cache_folder, runs_folder
from sft_play.runs.space import NO_ROOM

FIRST_PORT, MOST_PORTS = 29500, 100
OF_A_DISK = (*NO_ROOM, errno.EROFS, errno.ESTALE)
"""What only a disk says, also where Python knows no name: a write to an open file."""
OF_A_FILE = (
    *OF_A_DISK, errno.EIO, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG, errno.ENXIO,
)  # fmt: skip
"""What is the disk's or the user's where a file is named; without a name a terminal or a socket may have said it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One `train-cluster`."""

    call: Call
    inventory: Inventory
    loaded: LoadedConfig
    run: RunFolder
    resuming: bool
    """`RUN=` was given: the run exists and goes on."""
    deepspeed: str | None = None
    """Text of the user's `DEEPSPEED_CONFIG`, read and checked before anything is sent."""

    @property
    def shared(self) -> bool:
        """Whether run folders and cache stand on a disk that all machines see."""
        return self.loaded.config.data.sync == "shared"

    @property
    def bounds(self) -> tuple[int, int] | None:
        """The least and the most machines, where their number may change."""
        return elastic_bounds(self.loaded.config.launch.elastic)

    @property
    def least(self) -> int:
        """How many machines there must be."""
        count = len(self.inventory.hosts)
        return min(self.bounds[0], count) if self.bounds else count

    @property
    def most(self) -> int:
        """How many machines there may be."""
        count = len(self.inventory.hosts)
        return min(self.bounds[1], count) if self.bounds else count


def read_task(call: Call) -> Task:
    """Returns what was asked for. Raises `UserError` for what cannot be started."""
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    name = call.options.get("RUN")
    if not name:
        loaded = call.load_config()
        run = RunFolder(runs_folder() / choose_name(call.options.get("RUN_NAME"), loaded.path))
        if run.path.exists() and not (loaded.config.launch.auto_resume and (not run.config.is_file() or has_started(run))):
            raise UserError(
                f"the run `{run.name}` exists already: `{run.path}`",
                hint=f"choose another RUN_NAME, or go on with it: {command(inventory, run)}",
            )
    else:
        run = find_run(name)
        if call.options.get("CONFIG") or call.options.get("RUN_NAME"):
            given = "CONFIG" if call.options.get("CONFIG") else "RUN_NAME"
            raise UserError(f"`RUN` goes on with a run, and `{given}` starts a new one", hint="give one of them")
        if run.path.resolve() != (runs_folder() / run.name).resolve():
            raise UserError(
                f"`{run.path}` is not in `{runs_folder()}`, where the machines look for runs", hint="RUNS_DIR says where"
            )
        _refuse_of_a_start(call)
        check_overrides(call)
        loaded = call.load_config()
    if not name and inventory.network and loaded.config.launch.network is None:
        loaded = override_config(loaded, [Override(key="launch.network", text=inventory.network, origin=str(inventory.path))])
    own = read_user_json(typed_path(call.options["DEEPSPEED_CONFIG"])) if call.options.get("DEEPSPEED_CONFIG") else None
    deepspeed = json.dumps(dict(own.settings), indent=2) if own else None
    task = Task(call=call, inventory=inventory, loaded=loaded, run=run, resuming=bool(name), deepspeed=deepspeed)
    _check_bounds(task)
    return task


def _refuse_of_a_start(call: Call) -> None:
    """Raises `UserError` for what a run that goes on keeps from its start."""
    if call.options.get("DEEPSPEED_CONFIG"):
        raise UserError(
            "`RUN` goes on with a run under its own DeepSpeed settings, and `DEEPSPEED_CONFIG` gives others",
            place=f"DEEPSPEED_CONFIG={call.options['DEEPSPEED_CONFIG']}",
            hint="leave it away, or start a new run with it (RUN_NAME)",
        )
    if call.options.get("CLUSTER_NETWORK"):
        speed = call.options["CLUSTER_NETWORK"]
        raise UserError(
            "`RUN` goes on with the network's speed that the run has in its configuration",
            place=f"CLUSTER_NETWORK={speed}",
            hint=f"LAUNCH_NETWORK={speed} changes it",
        )


def _check_bounds(task: Task) -> None:
    bounds, count = task.bounds, len(task.inventory.hosts)
    if bounds and bounds[0] > count:
        raise UserError(
            f"`launch.elastic` is `{task.loaded.config.launch.elastic}`, and the inventory has {count} host{'s' if count > 1 else ''}",
            place=task.loaded.origins.get("launch.elastic"),
            hint="lower its first number, or add hosts",
        )


def command(inventory: Inventory, run: RunFolder) -> str:
    """Returns what a user types to go on with a run."""
    return f"make train-cluster CLUSTER={inventory.path} RUN={run.name}"


def require_one_disk(task: Task, hosts: Sequence[Host], facts: Mapping[str, Facts]) -> None:
    """Raises `UserError` where parts of the states would stay on machines with run folders of their own."""
    strategy, apart = (
        task.loaded.config.launch.strategy,
        [h.name for h in hosts if not is_here(h) and not facts[h.name].shares_runs],
    )
    if apart and (strategy.startswith("zero") or strategy == "fsdp2" or task.deepspeed):
        if task.loaded.config.train.save_strategy == "no":
            return
        raise UserError(
            f"under ZeRO and FSDP2 every machine writes a part of each checkpoint, and `{apart[0]}` has a run folder of its own",
            place=task.loaded.origins.get("launch.strategy"),
            hint="DATA_SYNC=shared with RUNS_DIR and SFT_PLAY_CACHE on a disk that all hosts see; or LAUNCH_STRATEGY=ddp, where a whole copy fits "
            "each device; or TRAIN_SAVE_STRATEGY=no: no checkpoints",
        )


def require_unused_name(task: Task, hosts: Sequence[Host], facts: Mapping[str, Facts]) -> None:
    """Raises `UserError` where a machine still has a run of a new run's name: one that was removed only on this machine."""
    if task.run.path.exists():  # its own start, which is repeated or gone on with
        return
    raise_all(
        [
            UserError(
                f"host `{host.name}` still has a run `{task.run.name}`, of another start: `{facts[host.name].run_there}`",
                place=host.place or None,
                hint="choose another RUN_NAME; or remove that folder there",
            )
            for host in hosts
            if not is_here(host) and not facts[host.name].shares_runs and facts[host.name].run_there
        ]
    )


def choose_port(task: Task) -> int:
    """Returns the port of the launchers' store: the typed one, else a free one from 29500 on. Raises `HardwareError`."""
    typed = task.call.port("MASTER_PORT")
    if typed is not None:
        if not port_is_free(typed):
            raise HardwareError(
                f"port {typed} is taken by another process on this machine{holder_of(typed)}",
                place=f"MASTER_PORT={typed}",
                hint="end it, or choose another MASTER_PORT; `ss -ltnp` lists who listens",
            )
        return typed
    ports = range(FIRST_PORT, FIRST_PORT + MOST_PORTS)
    port = next((port for port in ports if port_is_free(port)), None)
    if port is None:
        raise HardwareError(
            f"ports {FIRST_PORT} to {FIRST_PORT + MOST_PORTS - 1} are all taken on this machine", hint="MASTER_PORT=40000"
        )
    if port != ports[0]:
        print(f"port {ports[0]} is taken; taking {port}", file=sys.stderr, flush=True)
    return port


def files_folder(facts: Facts, run: RunFolder, host: Host) -> str:
    """Returns where a machine keeps what it is told of a run; by host, since machines may share a cache."""
    return f"{facts.cache}/cluster/{run.name}/{host.name}"


def node_words(task: Task, host: Host, facts: Facts, rank: int, count: int, port: int, *, resume: bool) -> list[str]:
    """Returns argv of the launcher on one machine, `NODE_RANK` `rank` of `count`: what a person would type there."""
    words = [sys.executable if is_here(host) else _python(host, facts), "-m", "sft_play"]
    if resume:
        words += ["resume", f"RUN={task.run.name}"]
        words += [f"{variable_name(one.key)}={one.text}" for one in task.call.overrides] if task.resuming else []
    else:
        folder = files_folder(facts, task.run, host)
        words += ["train-deepspeed" if task.deepspeed else "train-distributed", f"CONFIG={folder}/config.json"]
        words += [f"RUN_NAME={task.run.name}", NO_DEFAULT_FILE]
        words += [f"DEEPSPEED_CONFIG={folder}/deepspeed.json"] if task.deepspeed else []
    gpus = host.gpus if host.gpus is not None else facts.gpus
    words += [f"NUM_GPUS={max(1, gpus)}", f"NUM_NODES={count}", f"MASTER_PORT={port}"]
    return words + ([f"NODE_RANK={rank}", f"MASTER_ADDR={task.inventory.master.address}"] if count > 1 else [])


def _python(host: Host, facts: Facts) -> str:
    """Returns the interpreter of a machine's environment, absolute."""
    if host.python.startswith("~/"):
        return f"{facts.home}/{host.python.removeprefix('~/')}"
    return host.python if host.python.startswith("/") or "/" not in host.python else f"{facts.folder}/{host.python}"


def node_variables(task: Task, host: Host, facts: Facts, *, absent: Sequence[int] = ()) -> dict[str, str]:
    """Returns what a machine's launcher gets on top of its own environment. `absent`: ranks of machines that are known not to come."""
    given = shared_variables(task.shared) | {DELIVERED: f"{files_folder(facts, task.run, host)}/prepared.json"}
    if not is_here(host):
        given |= forwarded() | {"HF_HUB_OFFLINE": "1"}  # everything has been brought; asking the hub would make machines differ
    if host.interface:
        # To NCCL a name without `=` is a prefix: `eth1` would be `eth10` too.
        given |= {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": f"={host.interface}"}
    if not is_here(host) and not facts.shares_runs:
        given[FETCH] = "1"
    if absent:
        given[ABSENT] = " ".join(map(str, absent))
    if host.gpus == 0:
        given["CUDA_VISIBLE_DEVICES"] = ""
    return given


def is_begun(run: RunFolder) -> bool:
    """Whether workers were ever started for a run, so that it is gone on with."""
    return has_started(run) and plan_of(run) is not None


# ---- Of two commands for one run, the second is refused; `cluster-stop` finds the first


def lock_file(run: RunFolder) -> Path:
    """Returns the file that the command which controls a run holds; not in its folder, which its own launcher makes."""
    return cache_folder() / "cluster" / f"{text_sha256(str(run.path.absolute()))[:16]}.lock"


@contextlib.contextmanager
def disk_errors_told(path: Path) -> Iterator[None]:
    """Turns an `OSError` of the body that a disk or a file's rights cause, such as a full disk's, into a `HardwareError` with its place; `path`
    where it names none itself. Any other (a socket's, a program that is missing) is our own fault and passes."""
    try:
        yield
    except OSError as error:
        named = isinstance(error.filename, str | os.PathLike)
        if error.errno not in (OF_A_FILE if named else OF_A_DISK):
            raise
        raise _of_disk(error, path) from error


def _of_disk(error: OSError, path: Path) -> HardwareError:
    place = str(error.filename) if isinstance(error.filename, str | os.PathLike) else str(path)
    hint = "`df` says what is full; RUNS_DIR, SFT_PLAY_CACHE and TMPDIR move what is written" if error.errno in NO_ROOM else None
    return HardwareError(f"cannot be used: {error.strerror or error}", place=place, hint=hint)


@contextlib.contextmanager
def controlling(run: RunFolder, inventory: Path | None = None) -> Iterator[None]:
    """Keeps a run for this command, given with the file of `CLUSTER=`. Raises `UserError` when another controls it."""
    path = lock_file(run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _of_disk(error, path) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
            raise UserError(
                f"the run `{run.name}` is in use: process {owner or '?'} trains it on a cluster",
                hint=f"wait for it, or: make cluster-stop CLUSTER={inventory or '...'} RUN={run.name}",
            ) from None
        except OSError as error:
            hint = "SFT_PLAY_CACHE on a disk of this machine; a network disk may know no locks"
            raise HardwareError(f"its disk gives no lock: {error.strerror}", place=str(path), hint=hint) from error
        try:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise _of_disk(error, path) from error
        yield
    finally:
        os.close(descriptor)


def controller(run: RunFolder) -> psutil.Process | None:
    """Returns the process of this machine that controls a run over its cluster now; `None` where there is none."""
    path = lock_file(run)
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        with path.open("rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                pass
        return psutil.Process(int(path.read_text(encoding="utf-8")))
    return None


# ---- What the command does before any launcher is there to be asked: `cluster-status` shows it

Phase = Literal["preparing", "sending"]


def phase_file(run: RunFolder) -> Path:
    """Returns where it is noted: beside the lock, since the run may have no folder yet."""
    return lock_file(run).with_suffix(".json")


@contextlib.contextmanager
def noting(run: RunFolder, phase: Phase) -> Iterator[None]:
    """Notes what is done while the body runs. A full disk loses the note, and ends nothing."""
    path = phase_file(run)
    with contextlib.suppress(OSError):
        write_json(path, {"run": str(run.path.absolute()), "phase": phase})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def noted() -> list[tuple[RunFolder, str]]:
    """Returns the runs of this machine whose command is at one of these now."""
    found = []
    for path in sorted(lock_file(RunFolder(Path())).parent.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, UserError):
            facts = read_json(path)
            run = RunFolder(Path(facts["run"]))
            if phase_file(run) == path and controller(run) is not None:  # one that was killed leaves its note
                found.append((run, str(facts["phase"])))
    return found
