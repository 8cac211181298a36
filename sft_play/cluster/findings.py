"""What was measured of the machines of a cluster, and what is wrong with them, in words, with the remedy. No
effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sft_play.cluster.inventory import Host, Inventory
from sft_play.cluster.remote import Facts
from sft_play.errors import HardwareError, UserError
from sft_play.plan.hardware import GIB, network_speed
from sft_play.runs.origin import OPTIONAL, PACKAGES
from sft_play.text import Finding

SKEW_FAIL_SECONDS, SKEW_SECONDS = 5.0, 1.0
FREE_SHARE = 0.8
"""Of a GPU's memory; with less free, something else is using it."""
MOST_LISTED = 6
ADAPTERS = 8_388_608
"""Parameters of a LoRA on q and v of a 7B model, r 16: the size in which a network's speed is given."""
OF_THE_DOCTOR = ("package-version", "no-compiler", "no-ninja")
"""Findings of `make doctor` that say nothing of a run on several machines, which compares versions itself."""
RTT_MS = 5.0
SLOW_MBIT, OF_STATED = 500.0, 0.6
"""Below the first a gigabit line is not what it says: a bad cable, 100 Mbit/s, Wi-Fi. The second is the share of the
inventory's `network` that must be there.
"""
FASTER = 1.5
"""How many times as fast as the interface in use another one must be to be named."""
FOR_A_RUN = ("no-linux", "versions", "not-shared", "rsync", "gpus", "interface")
"""What keeps a machine from a run, as far as its facts tell: `train-cluster` measures nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What must be the same on all machines, as it is on this one."""

    port: int = 0
    """At which the machines meet, on the master."""
    backend: str = "auto"
    """`nccl`, `gloo`, or `auto`: NCCL where all machines have GPUs."""
    code: Mapping[str, str] = field(default_factory=dict)
    """File of the project -> sha256."""
    data: Mapping[str, int] = field(default_factory=dict)
    """File of the data -> size in bytes."""
    prepared: Mapping[str, str] = field(default_factory=dict)
    """Prepared split -> fingerprint of its rows."""
    shared: bool = False
    """Whether runs and cache are on a disk that all machines see (`data.sync: shared`)."""


@dataclass(slots=True)
class Seen:
    """What is known of one host."""

    host: Host
    answers: bool = False
    trouble: Finding | None = None
    """Why it does not answer, or has no environment, so that the machine's own `python3` answers."""
    skew_seconds: float | None = None
    """Its clock minus ours, +- half of the shortest round trip."""
    facts: Facts | None = None
    doctor: Sequence[Mapping[str, str]] = ()
    """What `make doctor` finds there."""

    @property
    def without(self) -> bool:
        """Whether it has no environment."""
        return self.trouble is not None and self.trouble.id == "no-environment"

    def lose(self, why: str) -> None:
        """It has stopped answering."""
        self.answers, remedy = False, "check again; a machine that swaps or sleeps does that"
        self.trouble = self.trouble or Finding("lost", "fail", f"it stopped answering ({why})", remedy)

    @property
    def route(self) -> Mapping[str, Any]:
        """Its own address, interface and MTU on the way to the master; empty where there is none."""
        return (self.facts and self.facts.route) or {}


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
    megabytes: float = 8.0
    """MiB that each machine gives."""


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
    """Return the seconds of a ring's sum, 2 (N - 1) / N * bytes / bandwidth: each machine sends and takes that much."""
    return 2 * (machines - 1) / machines * size_bytes / (mbit * 1e6 / 8)


# ---- What is wrong


def judge(examined: Examined, inventory: Inventory, wanted: Wanted) -> dict[str, list[Finding]]:
    """Return host name -> findings, the worst first; one about two machines is with the one where it is fixed."""
    slow, found = _slow_ways(examined, inventory), {}
    for name, seen in examined.hosts.items():
        some = [seen.trouble] if seen.trouble else []
        if facts := seen.facts:
            some += [
                *_system(facts, seen, inventory),
                *_cards(facts, seen, examined, wanted),
                *_versions(facts, seen, examined),
            ]
            some += [] if seen.without else [*_files(facts, wanted), *_of_the_doctor(seen)]
        some += [*_ports(seen, inventory, examined, wanted), *_links(seen, examined), *slow.get(name, ())]
        found[name] = sorted(some, key=lambda one: one.severity != "fail")
    return found


def faults(facts: Mapping[str, Facts], inventory: Inventory, wanted: Wanted) -> dict[str, list[UserError]]:
    """Return host name -> why no run can be started on it, as far as facts tell, each with its remedy."""
    hosts = {host.name: Seen(host, facts=facts[host.name]) for host in inventory.hosts if host.name in facts}
    return {
        name: [
            HardwareError(f"host `{name}`: {one.text}", place=hosts[name].host.place, hint=one.remedy)
            for one in some
            if one.severity == "fail" and one.id in FOR_A_RUN
        ]
        for name, some in judge(Examined(hosts), inventory, wanted).items()
    }


def verdict(findings: Sequence[Finding]) -> str:
    """Return `ok`, `warning` or `fail`."""
    severities = {one.severity for one in findings}
    return "fail" if "fail" in severities else "warning" if severities else "ok"


def _fail(name: str, text: str, remedy: str) -> Finding:
    return Finding(id=name, severity="fail", text=text, remedy=remedy)


def _warn(name: str, text: str, remedy: str, *, fails: bool = False) -> Finding:
    return Finding(id=name, severity="fail" if fails else "warning", text=text, remedy=remedy)


def _listed(names: Iterable[str]) -> str:
    words = [f"`{name}`" for name in names]
    more = f" and {len(words) - MOST_LISTED} more" if len(words) > MOST_LISTED else ""
    return ", ".join(words[:MOST_LISTED]) + more


def _system(facts: Facts, seen: Seen, inventory: Inventory) -> Iterator[Finding]:
    if not facts.linux:
        yield _fail("no-linux", "it does not run Linux", "leave it out of the inventory")
    skew = seen.skew_seconds or 0.0
    if abs(skew) > SKEW_SECONDS:
        text = f"its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'} of this machine's"
        remedy = "`sudo timedatectl set-ntp true` on both; `timedatectl` then says `synchronized: yes`"
        yield _warn("clock", text, remedy, fails=abs(skew) >= SKEW_FAIL_SECONDS)
    if not facts.rsync and len(inventory.hosts) > 1:
        text = "there is no `rsync`, by which code and data come from the first host to the others"
        yield _fail("rsync", text, "on it: `sudo apt install rsync`")


def _files(facts: Facts, wanted: Wanted) -> Iterator[Finding]:
    """Code and data against this machine's; data that a machine lacks is brought to it, where no disk is shared."""
    if code := [name for name, there in facts.code.items() if there != wanted.code[name]]:
        remedy = "`make cluster-install` copies them, as `make train-cluster` does before each run"
        yield _fail(
            "code",
            f"{len(code)} of the project's {len(wanted.code)} files are not the same as here: {_listed(code)}",
            remedy,
        )
    data = [name for name, there in facts.data.items() if there not in (None, wanted.data[name])]
    data += [name for name, there in facts.prepared.items() if there not in (None, wanted.prepared[name])]
    if data:
        remedy = (
            "copy files again, and `make data` where they are right; remove prepared rows from its cache, and they are"
            " brought"
        )
        yield _fail("data", f"other data than here: {_listed(data)}", remedy)
    if not wanted.shared:
        return
    shares = {"RUNS_DIR": facts.shares_runs, "SFT_PLAY_CACHE": facts.shares_cache}
    if unseen := [name for name, sees in shares.items() if sees is False]:
        remedy = (
            "mount them there at the same place (RUNS_DIR and SFT_PLAY_CACHE say where they are), or take `data.sync:"
            " rsync`"
        )
        yield _fail(
            "not-shared",
            f"`data.sync` is `shared`, but it does not see this machine's folders of {_listed(unseen)}",
            remedy,
        )
    if missing := [name for name, there in facts.prepared.items() if there is None]:
        text = f"`data.sync` is `shared`, but its cache `{facts.cache}` has no {_listed(missing)}"
        yield _fail("data", text, "mount the shared folder there, and point `SFT_PLAY_CACHE` to it")


def _of_the_doctor(seen: Seen) -> Iterator[Finding]:
    """Driver, GPUs, torch's build for them, folders, disks, memory: by the words of `make doctor` there."""
    for one in seen.doctor:
        if one["severity"] != "note" and one["id"] not in OF_THE_DOCTOR:
            yield _warn(one["id"], one["text"], one["remedy"], fails=one["severity"] == "error")


def _cards(facts: Facts, seen: Seen, examined: Examined, wanted: Wanted) -> Iterator[Finding]:
    stated, count = seen.host.gpus, facts.gpu_count
    reasons = {
        f"`gpus: {stated}` in the inventory": stated is not None,
        "other hosts have GPUs": (
            seen.answers and any(one.facts.gpu_count for one in examined.hosts.values() if one.facts)
        ),
        "`launch.backend: nccl` needs GPUs": wanted.backend == "nccl",
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why and count < (1 if stated is None else stated):
        of = f" ({len(facts.gpus)} in the machine)" if len(facts.gpus) > count else ""
        remedy = f"correct `gpus` ({seen.host.place}), or see `make gpu-info` and `make doctor` on it"
        yield _fail("gpus", f"{why}, but its driver shows {count}{of}", remedy)
    for k, card in enumerate(facts.gpus if stated != 0 else ()):
        free, total = card["free_bytes"], card["total_bytes"]
        if free < FREE_SHARE * total:
            text = f"GPU {k} ({card['name']}) has {free / GIB:.1f} of {total / GIB:.1f} GiB free"
            remedy = "end what uses it (`nvidia-smi` there), a desktop's browser included; the plan takes what is free"
            yield _warn("gpu-memory", text, remedy)


def _versions(facts: Facts, seen: Seen, examined: Examined) -> Iterator[Finding]:
    """Versions next to those of the first host that answers; of two hosts that are one machine, the other."""
    others = [(one, one.facts) for one in examined.hosts.values() if one.facts]
    twin = next(one.host.name for one, own in others if own.machine == facts.machine)
    if twin != seen.host.name:
        text = f"`{twin}` and `{seen.host.name}` are one machine, `{facts.host_name}`"
        yield _fail("same-machine", text, "one entry for each machine; `gpus` says how many of its GPUs take part")
    first, ours = next(((one, own) for one, own in others if not one.without), (seen, facts))
    if seen.without:
        return
    apart = other_versions(ours, facts)
    if apart:
        remedy = versions_remedy(apart, f"`make cluster-install CLUSTER={seen.host.cluster}` makes them the same")
        yield _fail("versions", f"other versions than on `{first.host.name}`: {', '.join(apart.values())}", remedy)


def other_versions(own: Facts, theirs: Facts) -> dict[str, str]:
    """Return what changes how a rank computes or sends, and has other versions on two machines: its name, both in
    words.
    """
    here, there = ({"Python": minor(one), **one.packages} for one in (own, theirs))
    apart = [name for name in ("Python", *PACKAGES) if here.get(name) != there.get(name)]
    return {name: f"{name} {there.get(name, 'missing')} (there {here.get(name, 'missing')})" for name in apart}


def versions_remedy(names: Iterable[str], install: str) -> str:
    """Return how a host gets the same versions; `install` brings the pinned ones, and no installation of ours the
    others.
    """
    own = [name for name in names if name in OPTIONAL]
    hints = [install] if set(names) - set(own) else []
    hints += (
        [f"install the same version of {' and '.join(own)} on all machines with pip, or uninstall it on all"]
        if own
        else []
    )
    return "; ".join(hints)


def minor(facts: Facts) -> str:
    """Return the minor version of a machine's Python, such as `3.11`."""
    return facts.python.rpartition(".")[0]


def _ports(seen: Seen, inventory: Inventory, examined: Examined, wanted: Wanted) -> Iterator[Finding]:
    """The master's port, and the random high ones that gloo and NCCL need."""
    held = examined.port_held
    closed = {pair.source: pair.error for pair in examined.pairs if pair.error and pair.target == seen.host.name}
    shut_out = {name: why for name in examined.hosts if (why := examined.master_port.get(name)) and name not in closed}

    def finding(name: str, what: str, sources: Mapping[str, str], port: str = "") -> Finding:
        rules = ", ".join(f"`sudo ufw allow from {examined.hosts[one].host.address}{port}`" for one in sources)
        text = f"{what} closed to {_listed(sources)} ({next(iter(sources.values()))})"
        return _fail(name, text, f"on it: {rules} (or the same with nft or firewalld)")

    if seen.host == inventory.master and held:
        text = f"port {wanted.port}, at which the machines meet, is held by {held.get('held_by') or 'another process'}"
        yield _fail("port-taken", text, "end it, or choose another port: MASTER_PORT=29501")
    if seen.host == inventory.master and shut_out:
        what = f"port {wanted.port} of this host, at which the machines meet, is"
        yield finding("port-closed", what, shut_out, f" to any port {wanted.port} proto tcp")
    if closed:
        yield finding("ports-closed", "random high ports of it, which gloo and NCCL need, are", closed)


def _links(seen: Seen, examined: Examined) -> Iterator[Finding]:
    """Its interfaces, the ways that were not measured, the sum."""
    name, host, summed = seen.host.name, seen.host, examined.all_reduce
    ways = [pair for pair in examined.pairs if pair.source == name]
    links = seen.facts.interfaces if seen.facts else {}
    if links and host.interface and host.interface not in links:
        text = f"there is no interface `{host.interface}`; it has {_listed(links)}"
        yield _fail(
            "interface", text, f"correct `interface` ({host.place}), or omit it: the route to the master is taken"
        )
    usual = {pair.target: pair.mbit for pair in ways if pair.mbit}
    further = [pair for pair in examined.further_ways if pair.source == name and pair.mbit]
    for link in sorted({str(pair.interface) for pair in further}):
        mbit = {pair.target: pair.mbit or 0.0 for pair in further if pair.interface == link}
        if usual and mbit.keys() == usual.keys() and min(mbit.values()) > FASTER * min(usual.values()):
            text = (
                f"`{link}` carries {min(mbit.values()):.0f} Mbit/s to the others, `{ways[0].interface}`"
                f" {min(usual.values()):.0f}"
            )
            yield _warn(
                "faster-interface",
                text,
                f"`interface: {link}` for it in the inventory: gloo and NCCL then send over that one",
            )
    mtus = [other.route.get("mtu") for other in examined.hosts.values() if other.facts]
    mtu, common = seen.route.get("mtu"), max(mtus, key=mtus.count, default=None)
    if mtu and mtu != common:
        text = (
            f"its interface sends packets of {mtu} bytes (MTU), the others' of {common}: large ones may be lost without"
            " a word"
        )
        yield _warn("mtu", text, f"`sudo ip link set {seen.route['interface']} mtu {common}`")
    for way in examined.pairs:
        if (way.rtt_ms or 0) > RTT_MS and way.source < way.target == name:
            text = f"`{way.source}` -> `{way.target}`: a round trip takes {way.rtt_ms:.1f} ms"
            yield _warn("latency", text, "Wi-Fi, VPN or a busy machine? Fewer, larger messages: `launch.local_steps`")
    unmeasured = [pair.target for pair in ways if pair.error is None and pair.mbit is None]
    if left := [one for one in unmeasured if seen.answers and examined.hosts[one].answers]:
        text = f"the speed from it to {_listed(left)} was not measured: no time was left"
        yield _warn("not-measured", text, 'check again, or fewer machines at once: CLUSTER_HOSTS="name name"')
    if summed and (error := summed.errors.get(name)):
        remedy = (
            "`interface` in the inventory; `GLOO_SOCKET_IFNAME`/`NCCL_SOCKET_IFNAME` of your own; firewalls between all"
            " pairs"
        )
        yield _fail("all-reduce", f"a sum over all machines ({summed.backend}) failed: {error}", remedy)


def _slow_ways(examined: Examined, inventory: Inventory) -> dict[str, list[Finding]]:
    """Return host name -> its slowest way; a slow way is reported with the one of its two hosts that has more of
    them.
    """
    stated = network_speed(inventory.network, str(inventory.path)) * 8 / 1e6 if inventory.network else None
    least, order = stated * OF_STATED if stated else SLOW_MBIT, list(examined.hosts)
    slow = [pair for pair in examined.pairs if pair.mbit is not None and pair.mbit < least]
    counts = Counter(name for pair in slow for name in (pair.source, pair.target))
    worst: dict[str, list[Finding]] = {}
    for pair in sorted(slow, key=lambda pair: -(pair.mbit or 0)):
        why = f"the inventory says `{inventory.network}`" if stated else "less than gigabit Ethernet"
        seconds = sum_seconds(ADAPTERS * 4, len(order), pair.mbit or 1)
        step = f"{ADAPTERS / 1e6:.1f} M parameters in fp32 take {seconds:.1f} s a step"
        remedy = (
            "cable, switch and `ethtool` speed; else `launch.compression`, more rows a step, `launch.local_steps`"
            " (docs/slow-networks.md)"
        )
        name = max(sorted((pair.source, pair.target), key=order.index), key=lambda name: counts[name])
        worst[name] = [
            _warn("slow-network", f"`{pair.source}` -> `{pair.target}`: {pair.mbit:.0f} Mbit/s, {why}; {step}", remedy)
        ]
    return worst
