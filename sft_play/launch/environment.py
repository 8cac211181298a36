"""What workers get from this machine: their variables, a port, an interface, and the key of a run over several
machines.

The key keeps strangers out. `train-cluster` makes one for each start and sends it over SSH, a Slurm script makes one
for its job, pods take it from a Secret; manually it is `MASTER_KEY` in the environment of every node. It is in no file
and on no command line, and is never sent: an HMAC-SHA256 over random words shows that a peer knows it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sft_play.errors import HardwareError, UserError, mask
from sft_play.launch.process import signals_to_hear
from sft_play.plan.hardware import NO_PEER_TO_PEER, Device
from sft_play.plan.plan import Plan
from sft_play.plan.ranks import visible_names
from sft_play.runs.folder import extensions_folder

VARIABLE = "MASTER_KEY"
LEAST = 16
"""Characters that a key must have: a shorter one is guessed."""
MAKE_ONE = f"export {VARIABLE}=$(openssl rand -hex 32), and the same value on every node"


def new_word() -> str:
    """Return a random word: a key, or what the other side must prove its key with."""
    return secrets.token_hex(32)


def key_here(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the key of the environment, `None` when there is none. Raise `UserError` for a weak one."""
    key = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if key and len(key) < LEAST:
        raise UserError(
            f"`{VARIABLE}` has {len(key)} characters; expected at least {LEAST}", place="environment", hint=MAKE_ONE
        )
    return key or None


def proof(key: str, *said: object) -> str:
    """Return the HMAC-SHA256 of what both sides know, in hexadecimal digits."""
    return hmac.new(key.encode(errors="surrogateescape"), json.dumps(said).encode(), "sha256").hexdigest()


def proves(key: str, given: object, *said: object) -> bool:
    """Whether a peer's proof was made with the key."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), proof(key, *said).encode())


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that nothing listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, address: str = "") -> bool:
    """Whether a listener could be opened on `port`; the default address is every interface."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def next_free_port(wanted: int, address: str, variable: str) -> int:
    """Return `wanted`, or the next port that is free at `address`. Raise `HardwareError`, which names the `variable` to
    set.
    """
    for port in range(wanted, min(wanted + 100, 65536)):
        if port_is_free(port, address):
            return port
    raise HardwareError(
        f"no port from {wanted} on is free at {address}", hint=f"set {variable}, or a HOST that this machine has"
    )


def require_free_port(port: int, *, hint: str) -> None:
    """Raise `HardwareError` when another process has the port."""
    if not port_is_free(port):
        raise HardwareError(f"port {port} is taken by another process on this machine{holder_of(port)}", hint=hint)


NAME_LOOKUPS = "timeout:1 attempts:1"
"""`RES_OPTIONS` of a run on several machines, where the user has set none. torch asks for the name of each peer when it
connects and when it accepts, in the thread that serves a store: where no name server answers, each question would stop
all machines for 10 s.
"""


def shorten_name_lookups() -> None:
    """Make this process's questions to DNS end after a second; call it before the first of them. `os.environ` stays as
    it is.
    """
    if "RES_OPTIONS" not in os.environ:
        os.putenv("RES_OPTIONS", NAME_LOOKUPS)


def interface_of(address: str) -> str | None:
    """Return the name of the interface that carries `address` (`eth0`, `lo`), or `None`."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family in INTERNET and entry.address == address for entry in entries):
            return name
    return None


def loopback_interface() -> str:
    """Return the loopback interface's name (`lo` on Linux, `lo0` on macOS)."""
    return interface_of("127.0.0.1") or "lo"


def holder_of(port: int) -> str:
    """Return `: NAME (process N) has it` for what listens on `port` here; empty where that cannot be seen."""
    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port:
                if one.pid is None:
                    return ": a process of another user has it"
                return f": `{' '.join(psutil.Process(one.pid).cmdline())[:100]}` (process {one.pid}) has it"
    return ""


def is_of_this_machine(host: str) -> bool:
    """Whether `MASTER_ADDR`, a name or an address, is this machine's own. Raise `UserError` where it cannot be
    resolved.
    """
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except socket.gaierror as error:
        raise UserError(
            f"`MASTER_ADDR` is `{host}`, which cannot be resolved: {error.strerror}",
            hint="give the IP address of node 0",
        ) from error
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in INTERNET}
    return any(address in own or address.startswith("127.") for address in found)


SCRUBBED = re.compile(
    r"PET_\w+|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|MASTER_(ADDR|PORT)|NODE_RANK|TORCHELASTIC_\w+|ACCELERATE_\w+|FSDP_\w+"
    r"|(OMPI_COMM_WORLD|MV2_COMM_WORLD|PMI)_\w+|MPI_LOCAL\w+|DS_ACCELERATOR|SFT_PLAY_OWN_FOLDER"
)
"""Names that torchrun, accelerate or DeepSpeed obey in silence. We set the right ones ourselves; a stray one changes
the run.
"""
DROPPED = frozenset({"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MAKE_TERMOUT", "MAKE_TERMERR"})
"""Make's own, which would make compilers that workers start (DeepSpeed's extensions) part of this make."""
SHOWN = re.compile(r"CUDA_VISIBLE_DEVICES|NCCL_\w+|HF_\w+|AIM_REPO|GLOO_\w+|OMP_NUM_THREADS|PYTORCH_(CUDA_)?ALLOC_CONF")
INTERFACES = Path("/sys/class/net")
INTERNET = (socket.AF_INET, socket.AF_INET6)
ALLOCATOR = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnvironment:
    """The variables for the workers, and what the user should read about them."""

    variables: Mapping[str, str]
    set_here: Mapping[str, str]
    """Name -> value of everything that differs from the user's environment."""
    inherited: Mapping[str, str]
    """The user's own `CUDA_VISIBLE_DEVICES`, `NCCL_*`, `HF_*`, ...; secrets masked."""
    notes: tuple[str, ...]
    """Why some of it is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """This machine's place in the run."""

    rank: int = 0
    """`NODE_RANK`: ranks are numbered by it."""
    count: int = 1
    """`NUM_NODES`"""
    master_address: str = "127.0.0.1"
    master_port: int = 0
    """Of the launchers' store; on one machine, where there is none, of the workers'."""
    workers_port: int | None = None
    """Of the workers' store on several machines: another for each attempt."""
    interface: str | None = None
    """Network interface towards the master."""
    key: str | None = field(default=None, repr=False)
    """What the nodes of this run know and nobody else; `None` where the network is trusted."""

    @property
    def master(self) -> str:
        """Where the launchers' store is, in messages."""
        host = self.master_address
        return f"[{host}]:{self.master_port}" if ":" in host else f"{host}:{self.master_port}"


def ranks_of(plan: Plan, node: Node) -> range:
    """Return the ranks that a node runs."""
    first = sum(plan.ranks_by_node[: node.rank])
    return range(first, first + plan.ranks_by_node[node.rank])


def worker_environment(
    plan: Plan,
    node: Node,
    ambient: Mapping[str, str],
    *,
    cpu_threads: int,
    devices: Sequence[Device] = (),
    more: Mapping[str, str] = {},
) -> WorkerEnvironment:
    """Return the workers' environment for `plan` on this node; `cpu_threads` and `devices` are what this machine has in
    all.
    """
    kept = {k: v for k, v in ambient.items() if not SCRUBBED.fullmatch(k) and k not in DROPPED}
    # Slurm warns with SIGUSR1, perhaps every process of a job: torchrun would die of it and leave its workers alone.
    # Under `nohup` it must not hear SIGHUP, and its workers inherit that.
    heard = ",".join(number.name for number in (*signals_to_hear(), signal.SIGQUIT))
    chosen = ALWAYS | {
        "PET_SIGNALS_TO_HANDLE": heard,
        "OMP_NUM_THREADS": str(max(1, cpu_threads // len(ranks_of(plan, node)))),
    }
    notes = []
    if plan.device == "cpu":
        chosen |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    if plan.strategy.startswith("zero"):
        chosen["TORCH_EXTENSIONS_DIR"] = str(extensions_folder())
    if plan.device == "cpu" and plan.strategy in {"single", "ddp"}:
        # Without it each process of a `MULTI_GPU` launch believes to be rank 0 of 1; with it accelerate would drop
        # DeepSpeed and FSDP in silence, so there the worker chooses gloo itself (ADR 4).
        chosen["ACCELERATE_USE_CPU"] = "true"
    if plan.device == "cpu" and plan.gradient_checkpointing:
        chosen["MALLOC_MMAP_THRESHOLD_"] = "1048576"
        notes.append(
            "MALLOC_MMAP_THRESHOLD_: tensors get mappings of their own, or the heap's gaps would take what recomputing"
            " saves"
        )
    if plan.device == "cuda":
        if not ALLOCATOR & kept.keys() and plan.expandable_segments:
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
            chosen["NCCL_SOCKET_IFNAME"] = f"={node.interface}"  # exactly: without the sign `eth1` means `eth10` too
            notes.append(
                f"NCCL_SOCKET_IFNAME=={node.interface}: NCCL might take {why}, which other machines cannot reach"
            )
    ours = {k: v for k, v in chosen.items() if k not in USER_DECIDES or not kept.get(k)}
    return WorkerEnvironment(
        variables={**kept, **ours, **more},
        set_here={**ours, **more},
        inherited={k: mask(k, v) for k, v in sorted(kept.items()) if SHOWN.fullmatch(k) and k not in ours},
        notes=tuple(notes),
    )


def nccl_might_take(interface: str) -> str | None:
    """Return an interface that NCCL may choose by itself and that leads to no other machine; `None` where its choice is
    better than one name.

    NCCL takes every interface that is up, without `lo` and `docker*`, and weighs network cards by their speed: on a
    machine with a slow card for management and a fast one for data, naming the one that the launchers met on would
    train over the slow one. Only bridges of containers, VPNs and the like mislead it: they have an address and no
    device.
    """
    up = {
        name
        for name, state in psutil.net_if_stats().items()
        if state.isup and name != "lo" and not name.startswith("docker")
    }
    wired = {name for name, found in psutil.net_if_addrs().items() if any(one.family in INTERNET for one in found)}
    return next(
        (name for name in sorted((up & wired) - {interface}) if not (INTERFACES / name / "device").exists()), None
    )


def dump_variables(plan: Plan, logs: Path, ambient: Mapping[str, str]) -> dict[str, str]:
    """Return what makes torch's flight recorder, which is on by default, write to `logs` when NCCL fails or times out.

    Its own default is a folder that a pod loses when it ends. The names are those of torch 2.13 (FlightRecorder.cpp,
    ProcessGroupNCCL.hpp).
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
"""Our values for these are only defaults: the user's own win."""


ALWAYS = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # preparation has resolved everything; a worker that asks the hub would make ranks differ
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    # torchrun kills workers that take longer to leave than this after a signal, a rank 0 that is saving included. After
    # a failure it takes no notice of it and gives 30 s (`TimeLimits.saving`).
    "PET_SHUTDOWN_TIMEOUT": "600",
}
"""Variables of every worker."""


def without_peer_to_peer(names: Sequence[str]) -> dict[str, str]:
    """Return what keeps NCCL from transfers that these cards cannot make; nothing for one card."""
    lacking = len(names) > 1 and any(NO_PEER_TO_PEER.search(name) for name in names)
    return {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"} if lacking else {}


def indices_of(plan: Plan, node: Node) -> list[int]:
    """Return which of this node's devices its ranks have, in order."""
    return [int(plan.ranks[rank].device.partition(":")[2] or 0) for rank in ranks_of(plan, node)]


def visible_cards(indices: Sequence[int], devices: Sequence[Device]) -> dict[str, str]:
    """Return what shows a launch the cards of its plan and no other; `devices` may be unknown (empty).

    CUDA numbers cards as the driver does, not fastest first. A single process that saw a second card would train under
    `torch.nn.DataParallel`, and unasked CUDA shows a slice of a card that MIG splits rather than the whole cards beside
    it.
    """
    names = visible_names(devices, indices) if devices else map(str, indices)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(names)}
