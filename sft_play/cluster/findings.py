"""What is wrong with the machines of a cluster, and the remedies: a table of rules over what was measured. No effects."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sft_play.cluster import ssh
from sft_play.cluster.hosts import optional_hints
from sft_play.config.cluster import Host, Inventory
from sft_play.plan.hardware import network_speed
from sft_play.plan.torch_check import LACKING_REMEDY, lacking, supports
from sft_play.runs.origin import OPTIONAL, PACKAGES

Severity = Literal["fail", "warning"]
GIB = 2**30
KILLED = -9
"""Exit code of an ssh that we ended since it was silent."""
SKEW_FAIL_SECONDS, SKEW_SECONDS = 5.0, 1.0
DISK_FAIL_BYTES, DISK_LOW_BYTES = GIB, 10 * GIB
"""With less than the first, not even logs and a small adapter's checkpoints have room."""
SHM_BYTES = GIB
"""NCCL and data workers pass tensors through /dev/shm."""
NOFILE = 4096
FREE_SHARE = 0.8
"""Of a GPU's memory; with less free, something else is using it."""
DRIVERS = {"11": 450, "12": 525, "13": 580}
"""CUDA's major version -> the first driver that runs its programs (NVIDIA's CUDA compatibility table, minor versions included)."""
NO_MATTER = ("pip", "setuptools", "wheel")
MOST_LISTED = 6
RTT_MS = 5.0
SLOW_MBIT = 500.0
"""Below, a gigabit line is not what it says: a bad cable, 100 Mbit/s, Wi-Fi."""
OF_STATED = 0.6
"""Share of the inventory's `network` that must be there."""
FASTER = 1.5
"""How many times as fast as the interface in use another one must be to be named."""
ADAPTERS = 8_388_608
"""Parameters of a LoRA on q and v of a 7B model, r 16: the size in which a network's speed is given."""
SUM_MEGABYTES, SUM_SECONDS = 8.0, 1.0
"""MiB that all machines sum, where the network is not too slow for it: where that would take longer than the second, it is less."""


# ---- What was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the machines shall agree with."""

    port: int
    """At which the machines meet, on the master."""
    backend: str = "auto"
    """`nccl`, `gloo`, or `auto`: NCCL where all machines have GPUs."""
    code: Mapping[str, str] = field(default_factory=dict)
    """File of the project -> sha256, as on this machine."""
    data: Mapping[str, int] = field(default_factory=dict)
    """File of the data -> size in bytes, as on this machine."""
    prepared: Mapping[str, str] = field(default_factory=dict)
    """Prepared split -> fingerprint of its rows, as on this machine."""
    shared: bool = False
    """Whether runs and cache stand on a disk that all machines see (`data.sync: shared`)."""


@dataclass(slots=True)
class Seen:
    """What is known of one host."""

    host: Host
    start: str | None = None
    """Why its Python did not start; stderr of ssh and of what it ran. `None` where it did."""
    code: int = 0
    """Exit code then."""
    without: int = 0
    """Exit code of its environment's Python, where that is missing and the machine's own `python3` answers instead."""
    lost: str | None = None
    """What was being asked when it stopped answering."""
    skew_seconds: float | None = None
    """Its clock minus ours, +- half of the shortest round trip."""
    ssh_ms: float | None = None
    """The shortest round trip over SSH."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """`probe.facts`; empty where it does not answer."""
    software: Mapping[str, Any] = field(default_factory=dict)
    """`probe.software`."""

    @property
    def answers(self) -> bool:
        return self.start is None and self.lost is None

    @property
    def route(self) -> Mapping[str, Any]:
        """Its own address, interface and MTU on the way to the master; empty where there is none."""
        return self.facts.get("route") or {}


@dataclass(slots=True)
class Pair:
    """The way from one machine to another."""

    source: str
    target: str
    error: str | None = None
    """Why a random high port of the target cannot be reached."""
    rtt_ms: float | None = None
    mbit: float | None = None
    """`None` where it was not measured."""
    address: str = ""
    """Of the target."""
    interface: str | None = None
    """Of the source."""


@dataclass(slots=True)
class Summed:
    """A sum over all machines."""

    backend: str
    seconds: float | None = None
    errors: dict[str, str] = field(default_factory=dict)
    """Host name -> what it says."""
    skipped: str | None = None
    """Why it was not tried."""
    megabytes: float = SUM_MEGABYTES
    """MiB that each machine gave."""


@dataclass(slots=True)
class Examined:
    """Everything that was found."""

    hosts: dict[str, Seen]
    pairs: list[Pair] = field(default_factory=list)
    further_ways: list[Pair] = field(default_factory=list)
    """The ways over further interfaces."""
    master_port: dict[str, str | None] = field(default_factory=dict)
    """Host name -> why it cannot reach the master's port; `None` where it can."""
    port_held: Mapping[str, Any] | None = None
    """The master's answer where its port could not be opened."""
    all_reduce: Summed | None = None
    seconds: float = 0.0


def sum_seconds(size_bytes: float, machines: int, mbit: float) -> float:
    """Returns the seconds of a ring's sum, 2 (N - 1) / N * bytes / bandwidth: each machine sends and takes that much."""
    return 2 * (machines - 1) / machines * size_bytes / (mbit * 1e6 / 8)


def sum_megabytes(examined: Examined) -> float:
    """Returns how many MiB are summed: half as many, and so on, while that would take more than `SUM_SECONDS` on the slowest way."""
    slowest = min((pair.mbit for pair in examined.pairs if pair.mbit), default=1000.0)
    size = SUM_MEGABYTES
    while size > SUM_MEGABYTES / 128 and sum_seconds(size * 2**20, len(examined.hosts), slowest) > SUM_SECONDS:
        size /= 2
    return size


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that keeps a host from taking part (`fail`), or makes it worse (`warning`)."""

    id: str
    """Stable name, listed in docs/home-cluster.md."""
    severity: Severity
    text: str
    remedy: str


def verdict(findings: Sequence[Finding]) -> str:
    """Returns `ok`, `warning` or `fail`."""
    severities = {one.severity for one in findings}
    return "fail" if "fail" in severities else "warning" if severities else "ok"


# ---- Rules


class Fields(dict[str, Any]):
    """What is known of a machine, or of a part of it; `None` for what is not."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class _Text(string.Formatter):
    """Formats texts over fields: `{free:GiB}` is a number of bytes in GiB, a list its first words in backticks (`{names:bare}`: without)."""

    def format_field(self, value: Any, form: str) -> str:
        if isinstance(value, list):
            mark = "" if form == "bare" else "`"
            more = f" and {len(value) - MOST_LISTED} more" if len(value) > MOST_LISTED else ""
            return ", ".join(f"{mark}{word}{mark}" for word in value[:MOST_LISTED]) + more
        return f"{value / GIB:{form[:-3]}f}" if form.endswith("GiB") else format(value, form)


@dataclass(frozen=True, slots=True)
class Rule:
    """A finding for each machine, or each of its `each`, for whose fields `when` holds; all texts are formats over these fields."""

    id: str
    severity: Severity | Callable[[Fields], bool]
    """The latter: whether it fails, else it warns."""
    when: Callable[[Fields], object]
    text: str
    remedy: str
    each: str | None = None


INSTALL = "`make cluster-install CLUSTER={cluster}` makes it"
ALIKE = "`make cluster-install CLUSTER={cluster}` makes them the same"
NO_GPU = "leave it out of the inventory, or see `make doctor` on it"
OR_OTHERS = "(or the same with nft or firewalld)"
RULES = (
    # ---- Does it answer?
    Rule("no-environment", "fail", lambda m: m.exit == ssh.NO_FOLDER,
         "the project's folder `{host.folder}` is not there, so there is no environment either", INSTALL),
    Rule("no-environment", "fail", lambda m: m.exit in (ssh.NO_PROGRAM, ssh.NOT_A_PROGRAM),
         "no environment: `{host.python}` in `{host.folder}` cannot be started", INSTALL),
    Rule("no-environment", "fail", lambda m: m.exit in (ssh.NOT_A_FOLDER, ssh.CLOSED_FOLDER), "no environment: {trouble.text}", "{trouble.remedy}"),
    Rule("{trouble.id}", "fail", lambda m: m.exit in (ssh.SSH_FAILED, KILLED), "{trouble.text}", "{trouble.remedy}"),
    Rule("broken-python", "fail", lambda m: m.exit is not None and not m.trouble, "`{host.python}` ended with code {exit}: {last}",
         f"start it there by hand; {INSTALL} anew"),
    Rule("lost", "fail", lambda m: m.lost, "it stopped answering ({lost})", "check again; a machine that swaps or sleeps does that"),
    # ---- The system
    Rule("clock", lambda m: m.skew >= SKEW_FAIL_SECONDS, lambda m: m.skew and m.skew > SKEW_SECONDS,
         "its clock is {skew:.1f} s {ahead} of this machine's",
         "`sudo timedatectl set-ntp true` on both; `timedatectl` then says `synchronized: yes`"),
    Rule("read-only", "fail", lambda disk: not disk.writable, "`{path}` ({what}) cannot be written to",
         "`ls -ld` and `mount` there say why", each="places"),
    Rule("disk", lambda disk: disk.free_bytes < DISK_FAIL_BYTES, lambda disk: disk.first and disk.free_bytes < DISK_LOW_BYTES,
         "the disk of `{path}` ({what}) has {free_bytes:.2GiB} of {total_bytes:.1GiB} GiB free",
         "make room, or move it: `SFT_PLAY_CACHE` for the cache, `RUNS_DIR` for runs", each="places"),
    Rule("shm", "warning", lambda m: m.shm is not None and m.shm < SHM_BYTES,
         "/dev/shm has {shm:.2GiB} GiB free, through which processes of a machine pass tensors",
         "`sudo mount -o remount,size=8G /dev/shm`; in a container `--shm-size=8g`"),
    Rule("nofile", "warning", lambda m: m.nofile and -1 < m.nofile < NOFILE, "a process may open {nofile} files only",
         f"`ulimit -n {NOFILE}` before the run, or `LimitNOFILE=` of sshd's unit"),
    Rule("own-name", "warning", lambda m: m.loopback and not m.host.interface,
         "its own name, `{host_name}`, is {names_itself:bare} to it: what asks for its address gets one that no other reaches",
         "put `{host.address} {host_name}` in its /etc/hosts instead, or give `interface` in the inventory"),
    Rule("rsync", "fail", lambda m: m.rsync is False and len(m.inventory.hosts) > 1, "there is no `rsync`, by which it would {rsync_would}",
         "on it: `sudo apt install rsync`"),
    # ---- Code and data
    Rule("code", "fail", lambda m: m.code_apart, "{code_count} of the project's {code_total} files are not the same as here: {code_apart}",
         "`make cluster-install CLUSTER={cluster}` copies them, as `make train-cluster` does before each run; by hand: the same commit"),
    Rule("data", "fail", lambda m: m.data_apart, "other data than here: {data_apart}", "copy the files anew, and `make data` where they are right"),
    Rule("data", "fail", lambda m: m.prepared_apart, "other prepared rows than here: {prepared_apart}",
         "remove them from its cache; `make train-cluster` brings the right ones"),
    Rule("data", "fail", lambda m: m.prepared_missing, "`data.sync` is `shared`, but its cache `{disks[cache][path]}` has no {prepared_missing}",
         "mount the shared folder there, and point `SFT_PLAY_CACHE` to it"),
    # ---- Cards
    Rule("gpus", "fail", lambda m: m.gpus_fault == "fewer", "`gpus: {host.gpus}` in the inventory, but {finder} {usable}{in_machine}",
         "correct `gpus` ({host.place}), or see `make gpu-info` and `make doctor` on it"),
    Rule("gpus", "fail", lambda m: m.gpus_fault == "unusable", "it has {count} GPUs, but torch {torch} cannot use them",
         "`make doctor` on it says why"),
    Rule("driver", "fail", lambda m: m.driver_needed,
         "driver {driver} is too old for CUDA {cuda}, which torch was built with (from {driver_needed} on)",
         "`sudo ubuntu-drivers install`, then start it anew"),
    Rule("torch-lacks-architecture", lambda card: not card.others_do, bool, "{text}", LACKING_REMEDY, each="lacking"),
    Rule("gpu-memory", "warning", lambda card: card.host.gpus != 0 and card.free_bytes < FREE_SHARE * card.total_bytes,
         "GPU {k} ({name}) has {free_bytes:.1GiB} of {total_bytes:.1GiB} GiB free{held}",
         "end what uses it, a desktop's browser included; the plan takes what is free", each="cards"),
    # ---- Next to the first host that answers, and to the others
    Rule("versions", lambda one: not one.mild, bool, "{what} {theirs}, on `{first}` {ours}", ALIKE, each="versions_apart"),
    Rule("versions", "fail", lambda m: m.pinned_apart, "other versions than on `{first}`: {pinned_apart:bare}", "{pinned_remedy}"),
    Rule("packages", "warning", lambda m: m.small_apart, "smaller packages apart from `{first}`: {small_apart:bare}",
         f"{ALIKE}, of those that are pinned; no run is refused for the others"),
    Rule("torch", "fail", lambda m: m.error and not m.exit, "torch cannot be imported: {error}",
         "`make install` anew on it (`make cluster-install`)"),
    Rule("same-machine", "fail", lambda m: m.twin, "`{twin}` and `{host.name}` are one machine, `{host_name}`",
         "one entry for each machine; `gpus` says how many of its GPUs take part"),
    Rule("gpus", "fail", lambda m: m.gpus_fault == "none" and m.any_gpu, "it has no GPU that torch can use, while others have", NO_GPU),
    Rule("gpus", "fail", lambda m: m.gpus_fault == "none" and not m.any_gpu,
         "it has no GPU that torch can use, which `launch.backend: nccl` needs", NO_GPU),
    Rule("master-elsewhere", "warning", lambda m: m.is_master and not m.here,
         "this machine is not the first host, on which `make train-cluster` is typed: rank 0's launcher, logs and checkpoints are there",
         "log in there, or put this machine first in `{inventory.path}`"),
    # ---- Ports
    Rule("port-taken", "fail", lambda m: m.holder, "port {port}, at which the machines meet, is held by {holder}",
         "end it, or choose another port: MASTER_PORT=29501"),
    Rule("port-closed", "fail", lambda m: m.shut_out,
         "port {port} of this host, at which the machines meet, is closed to {shut_out} ({shut_out_why})",
         f"on it: {{shut_out_remedy}} {OR_OTHERS}"),
    Rule("cut-off", "fail", lambda m: m.mute and m.deaf, "no connection between it and any other host ({mute})",
         "is it in the same network? `ip -br address` and `sudo nft list ruleset` on it"),
    Rule("ports-closed", "fail", lambda m: m.mute and not m.deaf, "it reaches no other host, though SSH gets in ({mute})",
         "let its own connections out: `sudo nft list ruleset`"),
    Rule("ports-closed", "fail", lambda m: m.closed, "random high ports of it, which gloo and NCCL need, are closed to {closed} ({closed_why})",
         f"on it: {{closed_remedy}} {OR_OTHERS}"),
    # ---- The network
    Rule("interface", "fail", lambda m: m.interfaces and m.host.interface and m.host.interface not in m.interfaces,
         "there is no interface `{host.interface}`; it has {interface_names}",
         "correct `interface` ({host.place}), or leave it away: the route to the master is taken"),
    Rule("interface", "warning", lambda m: m.used and m.host.interface in m.interfaces and m.host.interface not in m.used,
         "the way to the others leads over {used}, not over `{host.interface}` of the inventory", "give the interface that carries `address`"),
    Rule("faster-interface", "warning", bool, "`{name}` carries {mbit:.0f} Mbit/s to the others, `{used[0]}` {used_mbit:.0f}",
         "`interface: {name}` for it in the inventory: gloo and NCCL then send over that one", each="faster"),
    Rule("mtu", "warning", lambda m: m.mtu and m.mtu != m.usual_mtu,
         "its interface sends packets of {mtu} bytes (MTU), the others' of {usual_mtu}: large ones may be lost without a word",
         "`sudo ip link set {route[interface]} mtu {usual_mtu}`"),
    Rule("slow-network", "warning", lambda m: m.slow, "`{slow.source}` -> `{slow.target}`: {slow.mbit:.0f} Mbit/s, {slow_why}; "
         f"{ADAPTERS / 1e6:.1f} M parameters in fp32 take {{slow_seconds:.1f}} s a step",
         "cable, switch and `ethtool` speed; else `launch.compression`, more rows a step, `launch.local_steps` (docs/slow-networks.md)"),
    Rule("latency", "warning", bool, "`{way.source}` -> `{way.target}`: a round trip takes {way.rtt_ms:.1f} ms",
         "Wi-Fi, VPN or a busy machine? Fewer, larger messages: `launch.local_steps`", each="late"),
    Rule("not-measured", "warning", lambda m: m.unmeasured, "the speed from it to {unmeasured} was not measured: no time was left",
         'check again, or fewer machines at once: CLUSTER_HOSTS="name name"'),
    Rule("all-reduce", "fail", lambda m: m.sum_error, "a sum over all machines ({sum_backend}) failed: {sum_error}",
         "`interface` in the inventory; `GLOO_SOCKET_IFNAME`/`NCCL_SOCKET_IFNAME` of your own; firewalls between all pairs"),
)  # fmt: skip


def judge(
    examined: Examined, inventory: Inventory, wanted: Wanted, cluster: str, *, here: bool = True
) -> dict[str, list[Finding]]:
    """Returns host name -> findings, the worst first; one about two machines is with the one where it is fixed.

    `cluster` is what `CLUSTER=` was, `here` whether this machine is the first host.
    """
    found = {}
    for name, seen in examined.hosts.items():
        m = Fields(host=seen.host, cluster=cluster, inventory=inventory, here=here, is_master=seen.host == inventory.master)
        m.update(_start(seen, inventory, cluster))
        if seen.facts:
            m |= {**seen.facts, **seen.software, **_system(seen, m), **_files(seen, wanted), **_cards(seen, examined, wanted)}
            m |= _next_to_others(seen, examined, cluster)
        m |= _ports(seen, m, examined, wanted) | _links(seen, examined) | _slow(examined, inventory).get(name, {})
        found[name] = sorted(_findings(m), key=lambda one: one.severity != "fail")
    return found


def _findings(machine: Fields) -> Iterator[Finding]:
    fill = _Text().vformat
    for rule in RULES:
        for x in [machine] if rule.each is None else [Fields({**machine, **part}) for part in machine.get(rule.each) or ()]:
            if rule.when(x):
                severity = rule.severity if isinstance(rule.severity, str) else "fail" if rule.severity(x) else "warning"
                yield Finding(
                    id=fill(rule.id, (), x), severity=severity, text=fill(rule.text, (), x), remedy=fill(rule.remedy, (), x)
                )


# ---- Fields


def _start(seen: Seen, inventory: Inventory, cluster: str) -> dict[str, Any]:
    """Why its Python did not start, or stopped answering."""
    code = seen.without or (seen.code if seen.start is not None else None)
    why = None
    if code in ssh.WITHOUT:
        why = ssh.without_environment(seen.host, code, INSTALL.format(cluster=cluster))
    elif code in (ssh.SSH_FAILED, KILLED):
        why = ssh.trouble(seen.host, inventory, seen.start or "")
    return {"exit": code, "trouble": why, "last": ssh.last_word(seen.start or "") or "no word", "lost": seen.lost}


def _system(seen: Seen, m: Fields) -> dict[str, Any]:
    facts, skew = seen.facts, seen.skew_seconds or 0.0
    places = [{"what": what, **facts["disks"][what]} for what in ("runs", "cache", "folder") if facts["disks"][what]]
    sizes = [(one["free_bytes"], one["total_bytes"]) for one in places]
    return {
        "skew": abs(skew), "ahead": "ahead" if skew > 0 else "behind", "shm": (facts["disks"]["shm"] or {}).get("free_bytes"),
        "places": [{**one, "first": sizes.index(size) == k} for k, (one, size) in enumerate(zip(places, sizes, strict=True))],
        "loopback": all(one.startswith("127.") or one == "::1" for one in facts["names_itself"]) and facts["names_itself"],
        "rsync_would": "bring code and data to the others" if m.is_master else "get code and data",
    }  # fmt: skip


def _files(seen: Seen, wanted: Wanted) -> dict[str, Any]:
    """Code and data against this machine's; data that a machine lacks is brought to it, where no disk is shared."""

    def apart(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
        return [name for name in own if name in theirs and theirs[name] != own[name]]

    code, data, rows = (seen.facts[kind] for kind in ("code", "data", "prepared"))
    code_apart, rows_apart = apart(wanted.code, code), apart(wanted.prepared, rows)
    return {
        "code_apart": code_apart, "code_count": len(code_apart), "code_total": len(wanted.code),
        "data_apart": [name for name in apart(wanted.data, data) if data[name] is not None],
        "prepared_apart": [name for name in rows_apart if rows[name] is not None],
        "prepared_missing": [name for name in rows_apart if wanted.shared and rows[name] is None],
    }  # fmt: skip


def _cards(seen: Seen, examined: Examined, wanted: Wanted) -> dict[str, Any]:
    soft, stated = Fields(seen.software), seen.host.gpus
    cards, usable = soft.gpus or [], (len(soft.gpus or []) if seen.without else soft.usable_gpus or 0)
    any_gpu = any(one.software.get("usable_gpus") and not one.without for one in examined.hosts.values())
    fault = None
    if soft and stated is not None and stated > usable:
        fault = "fewer"
    elif cards and not usable and stated != 0 and not soft.hidden:
        fault = "unusable"
    elif soft and not (usable or seen.without or soft.error) and (wanted.backend == "nccl" or (any_gpu and stated is None)):
        fault = "none"
    needed, driver = DRIVERS.get(str(soft.cuda).partition(".")[0], 0), str(soft.driver).partition(".")[0]
    kinds = {(card["name"], card["capability"]) for card in cards if card["capability"] and soft.architectures and stated != 0}
    bad = sorted(kind for kind in kinds if not supports(soft.architectures, kind[1]))
    others_do = soft.hidden and any((card["name"], card["capability"]) not in bad for card in cards)
    return {
        "gpus_fault": fault, "any_gpu": any_gpu, "usable": usable, "count": len(cards),
        "finder": "its driver shows" if seen.without else "torch finds", "in_machine": f" ({len(cards)} in the machine)" if cards else "",
        "driver_needed": needed if driver.isdigit() and int(driver) < needed else None,
        "lacking": [{"text": lacking(soft.torch, soft.architectures, *kind), "others_do": others_do} for kind in bad],
        "cards": [{**card, "k": k, "held": f"; held by {', '.join(card['held_by'])}" if card["held_by"] else ""} for k, card in enumerate(cards)],
    }  # fmt: skip


def _next_to_others(seen: Seen, examined: Examined, cluster: str) -> dict[str, Any]:
    """Versions next to those of the first host that answers; of two hosts that are one machine, the other."""
    others = [one for one in examined.hosts.values() if one.facts]
    twin = next(one.host.name for one in others if one.facts["machine"] == seen.facts["machine"])
    first = next((one for one in others if not one.without), seen)
    if seen.without or first is seen:
        return {"twin": twin if twin != seen.host.name else None}
    mine, theirs = first.facts["packages"], seen.facts["packages"]
    apart = sorted(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name) and name not in NO_MATTER)
    pinned = [name for name in PACKAGES if name in apart and not (name == "torch" and seen.software)]
    remedies = [ALIKE.format(cluster=cluster)] if set(pinned) - set(OPTIONAL) else []
    words = {name: f"{name} {theirs.get(name, 'missing')} (there {mine.get(name, 'missing')})" for name in apart}
    python, other = seen.facts["python"], first.facts["python"]
    versions = [
        {"what": "Python", "theirs": python, "ours": other, "mild": python.rpartition(".")[0] == other.rpartition(".")[0]}
    ]
    if first.software and seen.software and not seen.software.get("error"):
        for key, what in (("torch", "torch"), ("cuda", "CUDA of torch"), ("nccl", "NCCL")):
            versions.append({"what": what, "theirs": seen.software.get(key) or "none", "ours": first.software.get(key) or "none"})
    return {
        "twin": twin if twin != seen.host.name else None, "first": first.host.name,
        "versions_apart": [one for one in versions if one["theirs"] != one["ours"]],
        "pinned_apart": [words[name] for name in pinned], "small_apart": [words[name] for name in apart if name not in PACKAGES],
        "pinned_remedy": "; ".join([*remedies, *optional_hints(seen.host, theirs, mine, f"on `{first.host.name}`")]),
    }  # fmt: skip


def _ports(seen: Seen, m: Fields, examined: Examined, wanted: Wanted) -> dict[str, Any]:
    """The master's port, and the random high ones that gloo and NCCL need: told once for a host that nobody reaches, or that reaches nobody."""
    name, pairs, held = seen.host.name, examined.pairs, examined.port_held
    ways = {one: [pair for pair in pairs if pair.source == one] for one in examined.hosts}
    mute = {one for one, own in ways.items() if len(own) > 1 and all(pair.error for pair in own)}
    closed = {pair.source: pair.error for pair in pairs if pair.error and pair.target == name and not mute & {pair.source, name}}
    unreachable = {pair.source for pair in pairs if pair.target == name and pair.error}
    reached = {one: examined.master_port.get(one) for one in examined.hosts if m.is_master and one not in unreachable}
    shut_out = {one: why for one, why in reached.items() if why}

    def let_in(sources: Iterable[str], what: str = "") -> str:
        return ", ".join(f"`sudo ufw allow from {examined.hosts[one].host.address}{what}`" for one in sources)

    return {
        "port": wanted.port, "holder": (held.get("held_by") or "another process") if held and m.is_master else None,
        "mute": ways[name][0].error if name in mute else None, "deaf": all(pair.error for pair in pairs if pair.target == name),
        "closed": list(closed), "closed_why": next(iter(closed.values()), None), "closed_remedy": let_in(closed),
        "shut_out": list(shut_out), "shut_out_why": next(iter(shut_out.values()), None),
        "shut_out_remedy": let_in(shut_out, f" to any port {wanted.port} proto tcp"),
    }  # fmt: skip


def _links(seen: Seen, examined: Examined) -> dict[str, Any]:
    """Its interfaces, the ways that were not measured, the sum."""
    name, summed = seen.host.name, examined.all_reduce
    own = [pair for pair in examined.pairs if pair.source == name]
    used = sorted({pair.interface for pair in own if pair.interface})
    lost = {one for one, other in examined.hosts.items() if other.lost is not None}
    mtus = [other.route.get("mtu") for other in examined.hosts.values() if other.facts]
    usual, faster = {pair.target: pair.mbit for pair in own if pair.mbit}, []
    for link in sorted({pair.interface for pair in examined.further_ways if pair.source == name and pair.interface}):
        mbit = {
            pair.target: pair.mbit
            for pair in examined.further_ways
            if (pair.source, pair.interface) == (name, link) and pair.mbit
        }
        if usual and mbit.keys() == usual.keys() and min(mbit.values()) > FASTER * min(usual.values()):
            faster.append({"name": link, "mbit": min(mbit.values()), "used_mbit": min(usual.values())})
    return {
        "used": used, "faster": faster, "interface_names": list(seen.facts.get("interfaces") or {}),
        "mtu": seen.route.get("mtu"), "usual_mtu": max(mtus, key=mtus.count, default=None),
        "late": [{"way": pair} for pair in examined.pairs if (pair.rtt_ms or 0) > RTT_MS and pair.source < pair.target == name],
        "unmeasured": [p.target for p in own if p.error is None and p.mbit is None and not {name, p.target} & lost],
        "sum_backend": summed and summed.backend, "sum_error": summed and summed.errors.get(name),
    }  # fmt: skip


def _slow(examined: Examined, inventory: Inventory) -> dict[str, dict[str, Any]]:
    """Returns host name -> the slowest way of those that are told there: each with the one of its two hosts that has more of them."""
    stated = network_speed(inventory.network, str(inventory.path)) * 8 / 1e6 if inventory.network else None
    why = f"the inventory says `{inventory.network}`" if stated else "less than gigabit Ethernet"
    slow = [
        pair for pair in examined.pairs if pair.mbit is not None and pair.mbit < (stated * OF_STATED if stated else SLOW_MBIT)
    ]
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(examined.hosts, key=lambda name: -sum(name in (pair.source, pair.target) for pair in slow)):
        own = [pair for pair in slow if name in (pair.source, pair.target) and not {pair.source, pair.target} & found.keys()]
        if own:
            worst = min(own, key=lambda pair: pair.mbit or 0)
            seconds = sum_seconds(ADAPTERS * 4, len(examined.hosts), worst.mbit or 1)
            found[name] = {"slow": worst, "slow_why": why, "slow_seconds": seconds}
    return found
