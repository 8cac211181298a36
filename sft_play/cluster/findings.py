"""What is wrong with the machines of a cluster by what was measured, in words, with the remedy. No effects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sft_play.cluster.inventory import Host, Inventory
from sft_play.cluster.measured import Examined, Seen, Wanted, sum_seconds
from sft_play.cluster.probe import Facts
from sft_play.errors import HardwareError, UserError
from sft_play.plan.hardware import GIB, network_speed
from sft_play.plan.torch_check import LACKING_REMEDY, lacking, supports
from sft_play.runs.origin import OPTIONAL, PACKAGES
from sft_play.text import Finding

SKEW_FAIL_SECONDS, SKEW_SECONDS = 5.0, 1.0
DISK_FAIL_BYTES, DISK_LOW_BYTES = GIB, 10 * GIB
"""With less than the first, not even logs and a small adapter's checkpoints have room."""
SHM_BYTES = GIB
"""NCCL and data workers pass tensors through /dev/shm."""
FREE_SHARE = 0.8
"""Of a GPU's memory; with less free, something else is using it."""
MOST_LISTED = 6
ADAPTERS = 8_388_608
"""Parameters of a LoRA on q and v of a 7B model, r 16: the size in which a network's speed is given."""
DRIVERS = {"11": 450, "12": 525, "13": 580}
"""CUDA's major version -> the first driver that runs its programs (NVIDIA's CUDA compatibility table, minor versions included)."""
RTT_MS = 5.0
SLOW_MBIT, OF_STATED = 500.0, 0.6
"""Below the first a gigabit line is not what it says: a bad cable, 100 Mbit/s, Wi-Fi. The second is the share of the inventory's `network`
that must be there."""
FASTER = 1.5
"""How many times as fast as the interface in use another one must be to be named."""
FOR_A_RUN = ("no-linux", "versions", "not-shared", "rsync", "gpus", "interface")
"""What keeps a machine from a run, as far as its facts tell: `train-cluster` measures nothing."""


def judge(examined: Examined, inventory: Inventory, wanted: Wanted) -> dict[str, list[Finding]]:
    """Return host name -> findings, the worst first; one about two machines is with the one where it is fixed."""
    slow, found = _slow(examined, inventory), {}
    for name, seen in examined.hosts.items():
        some = [seen.trouble] if seen.trouble else []
        if facts := seen.facts:
            some += [*_system(facts, seen, inventory), *_files(facts, seen.host, wanted), *_cards(facts, seen, examined, wanted)]
            some += _next_to_others(facts, seen, examined)
        some += [*_ports(seen, inventory, examined, wanted), *_links(seen, examined), *slow.get(name, ())]
        found[name] = sorted(some, key=lambda one: one.severity != "fail")
    return found


def faults(facts: Mapping[str, Facts], inventory: Inventory, wanted: Wanted) -> dict[str, list[UserError]]:
    """Return host name -> why no run can be started on it, as far as facts tell, each with its remedy."""
    hosts = {host.name: Seen(host, facts=facts[host.name]) for host in inventory.hosts if host.name in facts}
    return {
        name: [
            HardwareError(f"host `{name}`: {one.text}", place=hosts[name].host.place, hint=one.remedy)
            for one in some if one.severity == "fail" and one.id in FOR_A_RUN
        ]
        for name, some in judge(Examined(hosts), inventory, wanted).items()
    }  # fmt: skip


def verdict(findings: Sequence[Finding]) -> str:
    """Return `ok`, `warning` or `fail`."""
    severities = {one.severity for one in findings}
    return "fail" if "fail" in severities else "warning" if severities else "ok"


def _fail(name: str, text: str, remedy: str) -> Finding:
    return Finding(id=name, severity="fail", text=text, remedy=remedy)


def _warn(name: str, text: str, remedy: str, *, fails: bool = False) -> Finding:
    return Finding(id=name, severity="fail" if fails else "warning", text=text, remedy=remedy)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(f"`{name}`" for name in names[:MOST_LISTED]) + more


def _alike(host: Host) -> str:
    return f"`make cluster-install CLUSTER={host.cluster}` makes them the same"


def _system(facts: Facts, seen: Seen, inventory: Inventory) -> Iterator[Finding]:
    if not facts.linux:
        yield _fail("no-linux", "it does not run Linux", "leave it out of the inventory")
    if (skew := abs(seen.skew_seconds or 0.0)) > SKEW_SECONDS:
        text = f"its clock is {skew:.1f} s {'ahead' if (seen.skew_seconds or 0) > 0 else 'behind'} of this machine's"
        remedy = "`sudo timedatectl set-ntp true` on both; `timedatectl` then says `synchronized: yes`"
        yield _warn("clock", text, remedy, fails=skew >= SKEW_FAIL_SECONDS)
    told = set()
    for what in ("runs", "cache", "folder"):
        if not (disk := facts.disks[what]):
            continue
        where, free, total = f"`{disk['path']}` ({what})", disk["free_bytes"], disk["total_bytes"]
        if not disk["writable"]:
            yield _fail("read-only", f"{where} cannot be written to", "`ls -ld` and `mount` there say why")
        if free < DISK_FAIL_BYTES or (free < DISK_LOW_BYTES and (free, total) not in told):
            remedy = "make room, or move it: `SFT_PLAY_CACHE` for the cache, `RUNS_DIR` for runs"
            text = f"the disk of {where} has {free / GIB:.2f} of {total / GIB:.1f} GiB free"
            yield _warn("disk", text, remedy, fails=free < DISK_FAIL_BYTES)
        told.add((free, total))
    if (shm := (facts.disks["shm"] or {}).get("free_bytes", SHM_BYTES)) < SHM_BYTES:
        text = f"/dev/shm has {shm / GIB:.2f} GiB free, through which processes of a machine pass tensors"
        yield _warn("shm", text, "`sudo mount -o remount,size=8G /dev/shm`; in a container `--shm-size=8g`")
    if not facts.rsync and len(inventory.hosts) > 1:
        would = "bring code and data to the others" if seen.host == inventory.master else "get code and data"
        yield _fail("rsync", f"there is no `rsync`, by which it would {would}", "on it: `sudo apt install rsync`")


def _files(facts: Facts, host: Host, wanted: Wanted) -> Iterator[Finding]:
    """Code and data against this machine's; data that a machine lacks is brought to it, where no disk is shared."""

    def apart(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
        return [name for name in own if name in theirs and theirs[name] != own[name]]

    code, data, rows = apart(wanted.code, facts.code), apart(wanted.data, facts.data), apart(wanted.prepared, facts.prepared)
    if code:
        copies = f"`make cluster-install CLUSTER={host.cluster}` copies them, as `make train-cluster` does before each run"
        text = f"{len(code)} of the project's {len(wanted.code)} files are not the same as here: {_listed(code)}"
        yield _fail("code", text, f"{copies}; manually: the same commit")
    if others := [name for name in data if facts.data[name] is not None]:
        yield _fail(
            "data", f"other data than here: {_listed(others)}", "copy the files again, and `make data` where they are right"
        )
    if others := [name for name in rows if facts.prepared[name] is not None]:
        remedy = "remove them from its cache; `make train-cluster` brings the right ones"
        yield _fail("data", f"other prepared rows than here: {_listed(others)}", remedy)
    if not wanted.shared:
        return
    shares = {"RUNS_DIR": facts.shares_runs, "SFT_PLAY_CACHE": facts.shares_cache}
    if unseen := [name for name, sees in shares.items() if sees is False]:
        remedy = "mount them there at the same place (RUNS_DIR and SFT_PLAY_CACHE say where they are), or take `data.sync: rsync`"
        yield _fail(
            "not-shared", f"`data.sync` is `shared`, but it does not see this machine's folders of {_listed(unseen)}", remedy
        )
    if missing := [name for name in rows if facts.prepared[name] is None]:
        text = f"`data.sync` is `shared`, but its cache `{(facts.disks['cache'] or {}).get('path')}` has no {_listed(missing)}"
        yield _fail("data", text, "mount the shared folder there, and point `SFT_PLAY_CACHE` to it")


def _cards(facts: Facts, seen: Seen, examined: Examined, wanted: Wanted) -> Iterator[Finding]:
    soft, stated = seen.software, seen.host.gpus
    by_driver, cards = bool(seen.without or not soft), soft.get("gpus") or []
    usable = facts.gpu_count if by_driver else soft.get("usable_gpus") or 0
    hidden, torch, cuda = soft.get("hidden"), str(soft.get("torch")), str(soft.get("cuda"))
    if stated is not None and stated > usable:
        finder, of = "its driver shows" if by_driver else "torch finds", f" ({len(cards)} in the machine)" if cards else ""
        remedy = f"correct `gpus` ({seen.host.place}), or see `make gpu-info` and `make doctor` on it"
        yield _fail("gpus", f"`gpus: {stated}` in the inventory, but {finder} {usable}{of}", remedy)
    elif cards and not usable and stated != 0 and not hidden:
        yield _fail("gpus", f"it has {len(cards)} GPUs, but torch {torch} cannot use them", "`make doctor` on it says why")
    elif not (usable or by_driver or soft.get("error")):
        others = any(one.software.get("usable_gpus") and not one.without for one in examined.hosts.values())
        why = "while others have" if others else "which `launch.backend: nccl` needs"
        if wanted.backend == "nccl" or (others and stated is None):
            remedy = "leave it out of the inventory, or see `make doctor` on it"
            yield _fail("gpus", f"it has no GPU that torch can use, {why}", remedy)
    needed, driver = DRIVERS.get(cuda.partition(".")[0], 0), str(soft.get("driver"))
    if driver.partition(".")[0].isdigit() and int(driver.partition(".")[0]) < needed:
        text = f"driver {driver} is too old for CUDA {cuda}, which torch was built with (from {needed} on)"
        yield _fail("driver", text, "`sudo ubuntu-drivers install`, then restart it")
    built = soft.get("architectures") or []
    kinds = {(card["name"], card["capability"]) for card in cards if card["capability"] and built and stated != 0}
    bad = sorted(kind for kind in kinds if not supports(built, kind[1]))
    others_do = bool(hidden) and any((card["name"], card["capability"]) not in bad for card in cards)
    for kind in bad:
        yield _warn("torch-lacks-architecture", lacking(torch, built, *kind), LACKING_REMEDY, fails=not others_do)
    for k, card in enumerate(cards):
        if stated != 0 and card["free_bytes"] < FREE_SHARE * card["total_bytes"]:
            held = f"; held by {', '.join(card['held_by'])}" if card["held_by"] else ""
            text = (
                f"GPU {k} ({card['name']}) has {card['free_bytes'] / GIB:.1f} of {card['total_bytes'] / GIB:.1f} GiB free{held}"
            )
            yield _warn("gpu-memory", text, "end what uses it, a desktop's browser included; the plan takes what is free")
    if soft.get("error") and not seen.without:
        yield _fail("torch", f"torch cannot be imported: {soft['error']}", "`make install` on it again (`make cluster-install`)")


def _next_to_others(facts: Facts, seen: Seen, examined: Examined) -> Iterator[Finding]:
    """Versions next to those of the first host that answers; of two hosts that are one machine, the other."""
    others = [(one, one.facts) for one in examined.hosts.values() if one.facts]
    twin = next(one.host.name for one, own in others if own.machine == facts.machine)
    if twin != seen.host.name:
        text = f"`{twin}` and `{seen.host.name}` are one machine, `{facts.host_name}`"
        yield _fail("same-machine", text, "one entry for each machine; `gpus` says how many of its GPUs take part")
    first, ours = next(((one, own) for one, own in others if not one.without), (seen, facts))
    if seen.without or first is seen:
        return
    alike, there, own_soft, soft = _alike(seen.host), f"on `{first.host.name}`", first.software, seen.software
    if facts.python != ours.python:
        yield _warn("versions", f"Python {facts.python}, {there} {ours.python}", alike, fails=minor(facts) != minor(ours))
    for key, what in (("torch", "torch"), ("cuda", "CUDA of torch"), ("nccl", "NCCL")):
        if own_soft and soft and not soft.get("error") and (soft.get(key) or "none") != (own_soft.get(key) or "none"):
            yield _fail("versions", f"{what} {soft.get(key) or 'none'}, {there} {own_soft.get(key) or 'none'}", alike)
    apart = pinned_apart(ours, facts)
    if names := [name for name in apart if not (name == "torch" and soft)]:
        text = f"other versions than {there}: {', '.join(apart[name] for name in names)}"
        yield _fail("versions", text, versions_remedy(names, seen.host, facts, ours, there, alike))


def pinned_apart(ours: Facts, theirs: Facts) -> dict[str, str]:
    """Return the packages that change what a rank computes or sends and of which two machines have other versions, both in words."""
    own, other = ours.packages, theirs.packages
    apart = [name for name in PACKAGES if own.get(name) != other.get(name)]
    return {name: f"{name} {other.get(name, 'missing')} (there {own.get(name, 'missing')})" for name in apart}


def versions_remedy(names: Iterable[str], host: Host, theirs: Facts, ours: Facts, where: str, install: str) -> str:
    """Return how a host gets the versions of `where`; `install` brings the pinned ones, and no installation of ours the others."""
    hints = [install] if set(names) - set(OPTIONAL) else []
    for name in OPTIONAL:
        version = ours.packages.get(name)
        if version != theirs.packages.get(name):
            words = f"install {name}=={version}, or uninstall" if version else f"uninstall {name}, or install"
            hints.append(f"on `{host.name}`, in `{host.folder}`: {host.python} -m pip {words} it {where}")
    return "; ".join(hints)


def minor(facts: Facts) -> str:
    """Return the minor version of a machine's Python, such as `3.11`."""
    return facts.python.rpartition(".")[0]


def _ports(seen: Seen, inventory: Inventory, examined: Examined, wanted: Wanted) -> Iterator[Finding]:
    """The master's port, and the random high ones that gloo and NCCL need: told once for a host that reaches nobody."""
    name, pairs, held = seen.host.name, examined.pairs, examined.port_held
    ways = {one: [pair for pair in pairs if pair.source == one] for one in examined.hosts}
    mute = {one for one, own in ways.items() if len(own) > 1 and all(pair.error for pair in own)}
    closed = {p.source: p.error for p in pairs if p.error and p.target == name and not mute & {p.source, name}}
    unreachable = {pair.source for pair in pairs if pair.target == name and pair.error}

    def let_in(sources: Iterable[str], what: str = "") -> str:
        words = ", ".join(f"`sudo ufw allow from {examined.hosts[one].host.address}{what}`" for one in sources)
        return f"on it: {words} (or the same with nft or firewalld)"

    if seen.host == inventory.master:
        if held:
            text = f"port {wanted.port}, at which the machines meet, is held by {held.get('held_by') or 'another process'}"
            yield _fail("port-taken", text, "end it, or choose another port: MASTER_PORT=29501")
        reached = {one: examined.master_port.get(one) for one in examined.hosts if one not in unreachable}
        if shut_out := {one: why for one, why in reached.items() if why}:
            text = f"port {wanted.port} of this host, at which the machines meet, is closed to {_listed([*shut_out])}"
            remedy = let_in(shut_out, f" to any port {wanted.port} proto tcp")
            yield _fail("port-closed", f"{text} ({next(iter(shut_out.values()))})", remedy)
    if name in mute:
        remedy = "is it in the same network (`ip -br address`), and are its own connections let out (`sudo nft list ruleset`)?"
        yield _fail("ports-closed", f"it reaches no other host, though SSH gets in ({ways[name][0].error})", remedy)
    if closed:
        text = f"random high ports of it, which gloo and NCCL need, are closed to {_listed([*closed])}"
        yield _fail("ports-closed", f"{text} ({next(iter(closed.values()))})", let_in(closed))


def _links(seen: Seen, examined: Examined) -> Iterator[Finding]:
    """Its interfaces, the ways that were not measured, the sum."""
    name, host, summed = seen.host.name, seen.host, examined.all_reduce
    own = [pair for pair in examined.pairs if pair.source == name]
    used, links = sorted({pair.interface for pair in own if pair.interface}), seen.facts.interfaces if seen.facts else {}
    if links and host.interface and host.interface not in links:
        text = f"there is no interface `{host.interface}`; it has {_listed([*links])}"
        yield _fail("interface", text, f"correct `interface` ({host.place}), or omit it: the route to the master is taken")
    elif used and host.interface and host.interface not in used:
        text = f"the way to the others leads over {_listed(used)}, not over `{host.interface}` of the inventory"
        yield _warn("interface", text, "give the interface that carries `address`")
    usual = {pair.target: pair.mbit for pair in own if pair.mbit}
    further = [pair for pair in examined.further_ways if pair.source == name and pair.interface]
    for link in sorted({pair.interface or "" for pair in further}):
        mbit = {pair.target: pair.mbit for pair in further if pair.interface == link and pair.mbit}
        if usual and mbit.keys() == usual.keys() and min(mbit.values()) > FASTER * min(usual.values()):
            text = f"`{link}` carries {min(mbit.values()):.0f} Mbit/s to the others, `{used[0]}` {min(usual.values()):.0f}"
            remedy = f"`interface: {link}` for it in the inventory: gloo and NCCL then send over that one"
            yield _warn("faster-interface", text, remedy)
    mtus = [other.route.get("mtu") for other in examined.hosts.values() if other.facts]
    mtu, common = seen.route.get("mtu"), max(mtus, key=mtus.count, default=None)
    if mtu and mtu != common:
        text = f"its interface sends packets of {mtu} bytes (MTU), the others' of {common}: large ones may be lost without a word"
        yield _warn("mtu", text, f"`sudo ip link set {seen.route['interface']} mtu {common}`")
    for way in examined.pairs:
        if (way.rtt_ms or 0) > RTT_MS and way.source < way.target == name:
            text = f"`{way.source}` -> `{way.target}`: a round trip takes {way.rtt_ms:.1f} ms"
            yield _warn("latency", text, "Wi-Fi, VPN or a busy machine? Fewer, larger messages: `launch.local_steps`")
    unmeasured = [pair.target for pair in own if pair.error is None and pair.mbit is None]
    if left := [one for one in unmeasured if seen.answers and examined.hosts[one].answers]:
        text = f"the speed from it to {_listed(left)} was not measured: no time was left"
        yield _warn("not-measured", text, 'check again, or fewer machines at once: CLUSTER_HOSTS="name name"')
    if summed and (error := summed.errors.get(name)):
        remedy = (
            "`interface` in the inventory; `GLOO_SOCKET_IFNAME`/`NCCL_SOCKET_IFNAME` of your own; firewalls between all pairs"
        )
        yield _fail("all-reduce", f"a sum over all machines ({summed.backend}) failed: {error}", remedy)


def _slow(examined: Examined, inventory: Inventory) -> dict[str, list[Finding]]:
    """Return host name -> the slowest way of those that are told there: each with the one of its two hosts that has more of them."""
    stated = network_speed(inventory.network, str(inventory.path)) * 8 / 1e6 if inventory.network else None
    least = stated * OF_STATED if stated else SLOW_MBIT
    slow = [(pair.mbit, pair) for pair in examined.pairs if pair.mbit is not None and pair.mbit < least]
    found: dict[str, list[Finding]] = {}
    for name in sorted(examined.hosts, key=lambda name: -sum(name in (pair.source, pair.target) for _, pair in slow)):
        own = [one for one in slow if name in (ends := {one[1].source, one[1].target}) and not ends & found.keys()]
        if own:
            mbit, way = min(own, key=lambda one: one[0])
            why = f"the inventory says `{inventory.network}`" if stated else "less than gigabit Ethernet"
            seconds = sum_seconds(ADAPTERS * 4, len(examined.hosts), mbit or 1)
            step = f"{ADAPTERS / 1e6:.1f} M parameters in fp32 take {seconds:.1f} s a step"
            remedy = "cable, switch and `ethtool` speed; else `launch.compression`, more rows a step, `launch.local_steps` (docs/slow-networks.md)"
            found[name] = [_warn("slow-network", f"`{way.source}` -> `{way.target}`: {mbit:.0f} Mbit/s, {why}; {step}", remedy)]
    return found
