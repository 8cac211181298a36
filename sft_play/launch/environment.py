"""The environment of workers on this machine: variables, ports, network interface, and the key of a run on several
machines.

The key keeps strangers out. `train-cluster` generates one for each start and sends it over SSH, a Slurm script
generates one for its job, and pods read it from a Secret; for a manual start it is `MASTER_KEY` in the environment of
every node. It is never in a file, on a command line or sent to a peer: an HMAC-SHA256 over random words proves that a
peer knows it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sft_play.errors import HardwareError, UserError, mask
from sft_play.files import text_sha256
from sft_play.isolation import LAUNCHER_VARIABLES
from sft_play.launch.process import signals_to_hear
from sft_play.plan.hardware import NO_PEER_TO_PEER, Device
from sft_play.plan.plan import Plan
from sft_play.plan.ranks import visible_names
from sft_play.runs.folder import OWN

VARIABLE = "MASTER_KEY"
PORT = 29500
"""`MASTER_PORT` of several machines unless it is given."""
LEAST = 16
"""Minimum number of characters of a key, since a shorter one can be guessed."""
MAKE_ONE = f"export {VARIABLE}=$(openssl rand -hex 32), and the same value on every node"


def key_here() -> str | None:
    """Return the key in the environment, or `None` without one. Raise `UserError` for one that is too short."""
    key = os.environ.get(VARIABLE, "").strip()
    if key and len(key) < LEAST:
        raise UserError(
            f"`{VARIABLE}` has {len(key)} characters; expected at least {LEAST}", place="environment", hint=MAKE_ONE
        )
    return key or None


def proof(key: str, *words: object) -> str:
    """Return the HMAC-SHA256 of words that both sides know, in hexadecimal digits."""
    return hmac.new(key.encode(errors="surrogateescape"), json.dumps(words).encode(), "sha256").hexdigest()


def proves(key: str, claim: object, *words: object) -> bool:
    """Return whether a peer's claim is the proof of these words by the key."""
    return isinstance(claim, str) and hmac.compare_digest(claim.encode(errors="replace"), proof(key, *words).encode())


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, address: str = "") -> bool:
    """Return whether a listener could be opened on `port`; the default address is every interface."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def next_free_port(first: int, address: str, variable: str) -> int:
    """Return `first` or the next port that is free at `address`. Raise `HardwareError` with the `variable` to set."""
    for port in range(first, min(first + 100, 65536)):
        if port_is_free(port, address):
            return port
    raise HardwareError(
        f"no port from {first} on is free at {address}", hint=f"set {variable}, or a HOST that this machine has"
    )


def require_free_port(port: int, *, hint: str) -> None:
    """Raise `HardwareError` if another process has the port."""
    if not port_is_free(port):
        raise HardwareError(f"port {port} is taken by another process on this machine{holder_of(port)}", hint=hint)


NAME_LOOKUPS = "timeout:1 attempts:1"
"""Default of `RES_OPTIONS` in a run on several machines. torch looks up the name of each peer when it connects and when
it accepts, in the thread that serves a store: if no name server answers, each lookup would stop all machines for 10 s.
"""


def shorten_name_lookups() -> None:
    """Limit this process's DNS lookups to a second, without changing `os.environ`; call it before the first lookup."""
    if "RES_OPTIONS" not in os.environ:
        os.putenv("RES_OPTIONS", NAME_LOOKUPS)


def interface_of(address: str) -> str | None:
    """Return the name of the interface that carries `address` (`eth0`, `lo`), or `None`."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family in INTERNET and entry.address == address for entry in entries):
            return name
    return None


def loopback_interface() -> str:
    """Return the name of the loopback interface (`lo` on Linux, `lo0` on macOS)."""
    return interface_of("127.0.0.1") or "lo"


def holder_of(port: int) -> str:
    """Return `: NAME (process N) has it` for the listener on `port`; empty if it cannot be determined."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                if connection.pid is None:
                    return ": a process of another user has it"
                return (
                    f": `{' '.join(psutil.Process(connection.pid).cmdline())[:100]}` (process {connection.pid}) has it"
                )
    return ""


def is_of_this_machine(host: str) -> bool:
    """Return whether `MASTER_ADDR`, a name or address, is this machine's. Raise `UserError` if it does not resolve."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except socket.gaierror as error:
        raise UserError(
            f"`MASTER_ADDR` is `{host}`, which cannot be resolved: {error.strerror}",
            hint="give the IP address of node 0",
        ) from error
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in INTERNET}
    return any(address in own or address.startswith("127.") for address in addresses)


DROPPED = frozenset({"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MAKE_TERMOUT", "MAKE_TERMERR", OWN})
"""Variables of another launch: make's, which would affect builds that workers start (DeepSpeed's extensions), and ours.
"""
SHOWN = re.compile(r"CUDA_VISIBLE_DEVICES|NCCL_\w+|HF_\w+|AIM_REPO|GLOO_\w+|OMP_NUM_THREADS|PYTORCH_(CUDA_)?ALLOC_CONF")
INTERFACES = Path("/sys/class/net")
INTERNET = (socket.AF_INET, socket.AF_INET6)
ALLOCATOR = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnvironment:
    """The variables of workers, and what to report about them."""

    variables: Mapping[str, str]
    set_here: Mapping[str, str]
    """Name -> value of every variable that differs from the user's environment."""
    inherited: Mapping[str, str]
    """The user's own `CUDA_VISIBLE_DEVICES`, `NCCL_*`, `HF_*`, ...; secrets masked."""
    notes: tuple[str, ...]
    """Reasons for some of the variables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """This machine's place in the run."""

    rank: int = 0
    """`NODE_RANK`, by which ranks are numbered."""
    count: int = 1
    """`NUM_NODES`."""
    master_address: str = "127.0.0.1"
    master_port: int = 0
    """Port of the launchers' store; on a single machine, which has none, port of the workers' store."""
    workers_port: int | None = None
    """Port of the workers' store on several machines, different for each attempt."""
    interface: str | None = None
    """Network interface towards other nodes."""
    key: str | None = field(default=None, repr=False)
    """Secret of the nodes of this run; `None` if the network is trusted."""

    @property
    def master(self) -> str:
        """Address and port of the launchers' store, for messages."""
        host = self.master_address
        return f"[{host}]:{self.master_port}" if ":" in host else f"{host}:{self.master_port}"


def ranks_of(plan: Plan, node: Node) -> range:
    """Return the ranks that a node runs."""
    first = sum(plan.ranks_by_node[: node.rank])
    return range(first, first + plan.ranks_by_node[node.rank])


LONGEST_BUILD_SECONDS = 900.0


def extensions_folder() -> Path:
    """Return where torch keeps the extensions that it compiles: each environment on each machine has its own, or a
    build elsewhere would replace what the ranks here are about to load.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "torch_extensions" / f"sft_play-{text_sha256(f'{sys.prefix} on {socket.gethostname()}')[:12]}"


def remove_stale_build_locks(typed: str | None) -> None:
    """Remove the locks that killed builds left in `extensions_folder`, or in a `typed` folder: loading an extension
    would wait for them forever.

    A running build here holds its lock open; one on another machine may share a typed folder, where only old locks are
    removed.
    """
    locks = list((Path(typed) if typed else extensions_folder()).rglob("lock"))
    processes = psutil.process_iter(["open_files"]) if locks else ()
    opened = {file.path for process in processes for file in process.info["open_files"] or ()}
    for lock in locks:
        with contextlib.suppress(OSError):
            may_run = typed and time.time() - lock.stat().st_mtime < LONGEST_BUILD_SECONDS
            if not may_run and str(lock.resolve()) not in opened:
                lock.unlink()


def worker_environment(
    plan: Plan,
    node: Node,
    ambient: Mapping[str, str],
    *,
    cpu_threads: int,
    devices: Sequence[Device] = (),
    additions: Mapping[str, str] = {},
) -> WorkerEnvironment:
    """Return the workers' environment for `plan` on this node, with all `cpu_threads` and `devices` of the machine."""
    inherited = {
        name: value for name, value in ambient.items() if not LAUNCHER_VARIABLES.fullmatch(name) and name not in DROPPED
    }
    # Slurm warns with SIGUSR1, perhaps every process of a job, which would kill torchrun but not its workers. Under
    # `nohup` torchrun must not handle SIGHUP, and its workers inherit that.
    heard = ",".join(number.name for number in signals_to_hear())
    chosen = ALWAYS | {
        "PET_SIGNALS_TO_HANDLE": heard,
        "OMP_NUM_THREADS": str(max(1, cpu_threads // len(ranks_of(plan, node)))),
    }
    notes = []
    if plan.device == "cpu":
        chosen |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    if plan.zero and "TORCH_EXTENSIONS_DIR" not in ambient:
        chosen["TORCH_EXTENSIONS_DIR"] = str(extensions_folder())
    if plan.device == "cpu" and not plan.sharded:
        # Without it each process of a `MULTI_GPU` launch would be rank 0 of 1. With it accelerate would silently ignore
        # DeepSpeed and FSDP, so under these the worker chooses gloo itself (ADR 4).
        chosen["ACCELERATE_USE_CPU"] = "true"
    if plan.device == "cpu" and plan.gradient_checkpointing:
        chosen["MALLOC_MMAP_THRESHOLD_"] = "1048576"
        notes.append(
            "MALLOC_MMAP_THRESHOLD_: tensors get separate mappings, or the heap's gaps would take what recomputing"
            " saves"
        )
    if plan.device == "cuda":
        if not ALLOCATOR & inherited.keys() and plan.expandable_segments:
            chosen["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
            notes.append(
                "PYTORCH_ALLOC_CONF=expandable_segments:True: blocks grow in place, so less memory is lost between them"
            )
        chosen |= visible_cards(indices_of(plan, node), devices)
        if without := without_peer_to_peer([rank.device_name for rank in plan.ranks]):
            chosen |= without
            notes.append("NCCL_P2P_DISABLE=1: GeForce RTX 40 and 50 cards have no peer-to-peer transfers")
    if node.count > 1:
        chosen["RES_OPTIONS"] = NAME_LOOKUPS
    if plan.world_size > 1 and node.interface:
        chosen["GLOO_SOCKET_IFNAME"] = node.interface
        if plan.device == "cuda" and node.count > 1 and (why := nccl_might_take(node.interface)):
            chosen["NCCL_SOCKET_IFNAME"] = f"={node.interface}"  # without the sign, `eth1` would match `eth10` too
            notes.append(
                f"NCCL_SOCKET_IFNAME=={node.interface}: NCCL might take {why}, which other machines cannot reach"
            )
    ours = {name: value for name, value in chosen.items() if name not in USER_DECIDES or not inherited.get(name)}
    shown = {name: value for name, value in sorted(inherited.items()) if SHOWN.fullmatch(name) and name not in ours}
    return WorkerEnvironment(
        variables={**inherited, **ours, **additions},
        set_here={**ours, **additions},
        inherited={name: mask(name, value) for name, value in shown.items()},
        notes=tuple(notes),
    )


def nccl_might_take(interface: str) -> str | None:
    """Return an interface without a route to other machines that NCCL may choose; `None` if NCCL should choose.

    NCCL takes every active interface except `lo` and `docker*`, and prefers fast network cards: on a machine with a
    slow card for management and a fast one for data, naming the interface of the launchers would train over the slow
    one. Only bridges of containers, VPNs and the like mislead NCCL: they have an address but no device.
    """
    up = {
        name
        for name, state in psutil.net_if_stats().items()
        if state.isup and name != "lo" and not name.startswith("docker")
    }
    wired = {
        name for name, entries in psutil.net_if_addrs().items() if any(entry.family in INTERNET for entry in entries)
    }
    return next(
        (name for name in sorted((up & wired) - {interface}) if not (INTERFACES / name / "device").exists()), None
    )


def dump_variables(plan: Plan, logs: Path, ambient: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make torch's flight recorder write to `logs` when NCCL fails or times out.

    The recorder is on by default but writes to a folder that is lost when a pod ends. The names are those of torch 2.13
    (FlightRecorder.cpp, ProcessGroupNCCL.hpp).
    """
    if plan.device != "cuda" or plan.world_size == 1:
        return {}
    ours = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in ambient:  # the older name
        ours["TORCH_FR_DUMP_TEMP_FILE"] = f"{logs.absolute()}/nccl-dump-rank"
    return {name: value for name, value in ours.items() if name not in ambient}


USER_DECIDES = frozenset(
    {
        "OMP_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "NCCL_P2P_DISABLE",
        "NCCL_IB_DISABLE",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "TOKENIZERS_PARALLELISM",
        "PET_SHUTDOWN_TIMEOUT",
        "MALLOC_MMAP_THRESHOLD_",
        "RES_OPTIONS",
    }
)
"""Variables for which our values are only defaults: the user's take precedence."""


ALWAYS = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # the preparation has resolved everything; answers of the hub could differ between ranks
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    # torchrun kills workers that take longer to leave after a signal, including a rank 0 that is saving. After a
    # failure it ignores this limit and allows 30 s (`TimeLimits.saving`).
    "PET_SHUTDOWN_TIMEOUT": "600",
}
"""Variables of every worker."""


def without_peer_to_peer(names: Sequence[str]) -> dict[str, str]:
    """Return variables that keep NCCL from transfers that these cards do not support; empty for a single card."""
    lacking = len(names) > 1 and any(NO_PEER_TO_PEER.search(name) for name in names)
    return {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} if lacking else {}


def indices_of(plan: Plan, node: Node) -> list[int]:
    """Return the indices of this node's devices that its ranks use, in order."""
    return [int(plan.ranks[rank].device.partition(":")[2] or 0) for rank in ranks_of(plan, node)]


def visible_cards(indices: Sequence[int], devices: Sequence[Device]) -> dict[str, str]:
    """Return variables that show a launch only the cards of its plan; `devices` is empty if unknown.

    With them CUDA numbers cards as the driver does, not fastest first. A single process that saw a second card would
    train with `torch.nn.DataParallel`, and by default CUDA shows a MIG slice instead of the complete cards next to it.
    """
    names = visible_names(devices, indices) if devices else map(str, indices)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(names)}
