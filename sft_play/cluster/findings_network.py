"""What is wrong between the machines of a cluster: closed ports and who closes them, slow lines, a sum that does not come about."""

from __future__ import annotations

from sft_play.cluster.examined import Examined, Pair, Wanted, sum_seconds
from sft_play.cluster.finding import Finding
from sft_play.config.cluster import Inventory
from sft_play.plan.hardware import network_speed

RTT_MS = 5.0
SLOW_MBIT = 500.0
"""Below, a gigabit line is not what it says: a bad cable, 100 Mbit/s, Wi-Fi."""
OF_STATED = 0.6
"""Share of the inventory's `network` that must be there."""
ADAPTERS = 8_388_608
"""Parameters of a LoRA on q and v of a 7B model, r 16: the size in which a network's speed is told."""


def network_findings(examined: Examined, inventory: Inventory, wanted: Wanted) -> dict[str, list[Finding]]:
    """Returns host name -> findings; one about two machines stands with the one where it is mended."""
    found: dict[str, list[Finding]] = {name: [] for name in examined.hosts}
    _master_port(examined, inventory, wanted, found)
    _closed(examined, found)
    _interfaces(examined, found)
    _slow(examined, inventory, found)
    _not_measured(examined, found)
    _sum(examined, found)
    return found


def _master_port(examined: Examined, inventory: Inventory, wanted: Wanted, found: dict[str, list[Finding]]) -> None:
    master = inventory.master
    if examined.port_held:
        held = examined.port_held.get("held_by")
        text = f"port {wanted.port}, at which the machines meet, is held by {held or 'another process'}"
        remedy = "end it, or choose another port: MASTER_PORT=29501"
        found[master.name].append(Finding(id="port-taken", severity="fail", text=text, remedy=remedy))
    unreachable = {pair.source for pair in examined.pairs if pair.target == master.name and pair.error}
    answers = {name: examined.master_port.get(name) for name in examined.hosts}
    closed = {name: why for name, why in answers.items() if why and name not in unreachable}
    if closed:
        names, why = ", ".join(f"`{name}`" for name in closed), next(iter(closed.values()))
        text = f"port {wanted.port} of this host, at which the machines meet, is closed to {names} ({why})"
        remedy = _let_in(examined, list(closed), f"to any port {wanted.port} proto tcp")
        found[master.name].append(Finding(id="port-closed", severity="fail", text=text, remedy=remedy))


def _let_in(examined: Examined, sources: list[str], what: str = "") -> str:
    """Returns the firewall's commands that let other hosts in."""
    commands = [f"`sudo ufw allow from {examined.hosts[name].host.address}{' ' if what else ''}{what}`" for name in sources]
    return f"on it: {', '.join(commands)} (or the same with nft or firewalld)"


def _closed(examined: Examined, found: dict[str, list[Finding]]) -> None:
    """Random high ports, which gloo and NCCL need between all: told once for a host that nobody reaches, or that reaches nobody."""
    bad = [pair for pair in examined.pairs if pair.error]
    sources = {name: [pair for pair in examined.pairs if pair.source == name] for name in examined.hosts}
    mute = {name for name, pairs in sources.items() if len(pairs) > 1 and all(pair.error for pair in pairs)}
    for name in mute:
        if all(pair.error for pair in examined.pairs if name in (pair.source, pair.target)):
            text = f"no connection between it and any other host ({sources[name][0].error})"
            remedy = "is it in the same network? `ip -br address` and `sudo nft list ruleset` on it"
            found[name].append(Finding(id="cut-off", severity="fail", text=text, remedy=remedy))
        else:
            text = f"it reaches no other host, though SSH gets in ({sources[name][0].error})"
            found[name].append(
                Finding(
                    id="ports-closed", severity="fail", text=text, remedy="let its own connections out: `sudo nft list ruleset`"
                )
            )
    by_target: dict[str, list[Pair]] = {}
    for pair in bad:
        if pair.source not in mute and pair.target not in mute:
            by_target.setdefault(pair.target, []).append(pair)
    for name, pairs in by_target.items():
        names = ", ".join(f"`{pair.source}`" for pair in pairs)
        text = f"random high ports of it, which gloo and NCCL need, are closed to {names} ({pairs[0].error})"
        remedy = _let_in(examined, [pair.source for pair in pairs])
        found[name].append(Finding(id="ports-closed", severity="fail", text=text, remedy=remedy))


def _interfaces(examined: Examined, found: dict[str, list[Finding]]) -> None:
    mtus = {name: (seen.facts.get("route") or {}).get("mtu") for name, seen in examined.hosts.items() if seen.facts}
    usual = max(set(mtus.values()), key=list(mtus.values()).count, default=None)
    for name, seen in examined.hosts.items():
        wanted, route = seen.host.interface, (seen.facts.get("route") if seen.facts else None) or {}
        if seen.facts and wanted and wanted not in seen.facts["interfaces"]:
            text = f"there is no interface `{wanted}`; it has {', '.join(f'`{one}`' for one in seen.facts['interfaces'])}"
            remedy = f"correct `interface` ({seen.host.place}), or leave it away: the route to the master is taken"
            found[name].append(Finding(id="interface", severity="fail", text=text, remedy=remedy))
        elif wanted and route.get("interface") and route["interface"] != wanted:
            text = f"the way to the others leads over `{route['interface']}`, not over `{wanted}` of the inventory"
            found[name].append(
                Finding(id="interface", severity="warning", text=text, remedy="give the interface that carries `address`")
            )
        if mtus.get(name) and mtus[name] != usual:
            text = f"its interface sends packets of {mtus[name]} bytes (MTU), the others' of {usual}: large ones may be lost without a word"
            remedy = f"`sudo ip link set {route.get('interface')} mtu {usual}`"
            found[name].append(Finding(id="mtu", severity="warning", text=text, remedy=remedy))


def _slow(examined: Examined, inventory: Inventory, found: dict[str, list[Finding]]) -> None:
    stated = network_speed(inventory.network, str(inventory.path)) * 8 / 1e6 if inventory.network else None
    limit = stated * OF_STATED if stated else SLOW_MBIT
    told: set[str] = set()
    slow = [pair for pair in examined.pairs if pair.mbit is not None and pair.mbit < limit]
    for name in sorted(examined.hosts, key=lambda name: -sum(name in (pair.source, pair.target) for pair in slow)):
        own = [pair for pair in slow if name in (pair.source, pair.target) and not {pair.source, pair.target} & told]
        if not own:
            continue
        told.add(name)
        worst = min(own, key=lambda pair: pair.mbit or 0)
        seconds = sum_seconds(ADAPTERS * 4, len(examined.hosts), worst.mbit or 1)
        why = f"the inventory says `{inventory.network}`" if stated else "less than gigabit Ethernet"
        text = (
            f"`{worst.source}` -> `{worst.target}`: {worst.mbit:.0f} Mbit/s, {why}; "
            f"{ADAPTERS / 1e6:.1f} M parameters in fp32 take {seconds:.1f} s a step"
        )
        remedy = "cable, switch and `ethtool` speed; else `launch.compression`, more rows a step, `launch.local_steps` (docs/slow-networks.md)"
        found[name].append(Finding(id="slow-network", severity="warning", text=text, remedy=remedy))
    for pair in examined.pairs:
        if pair.rtt_ms is not None and pair.rtt_ms > RTT_MS and pair.source < pair.target:
            text = f"`{pair.source}` -> `{pair.target}`: a round trip takes {pair.rtt_ms:.1f} ms"
            remedy = "Wi-Fi, VPN or a busy machine? Fewer, larger messages: `launch.local_steps`"
            found[pair.target].append(Finding(id="latency", severity="warning", text=text, remedy=remedy))


def _not_measured(examined: Examined, found: dict[str, list[Finding]]) -> None:
    """Ways for which no time was left, told by the machine that they begin at."""
    lost = {name for name, seen in examined.hosts.items() if seen.lost is not None}
    for name, own in found.items():
        ways = [pair for pair in examined.pairs if pair.source == name and pair.error is None and pair.mbit is None]
        targets = [f"`{pair.target}`" for pair in ways if not {pair.source, pair.target} & lost]
        if targets:
            text = f"the speed from it to {', '.join(targets)} was not measured: no time was left"
            remedy = 'check again, or fewer machines at once: CLUSTER_HOSTS="name name"'
            own.append(Finding(id="not-measured", severity="warning", text=text, remedy=remedy))


def _sum(examined: Examined, found: dict[str, list[Finding]]) -> None:
    summed = examined.summed
    if summed is None or not summed.errors:
        return
    for name, why in summed.errors.items():
        text = f"a sum over all machines ({summed.backend}) failed: {why}"
        remedy = (
            "`interface` in the inventory; `GLOO_SOCKET_IFNAME`/`NCCL_SOCKET_IFNAME` of your own; firewalls between all pairs"
        )
        found[name].append(Finding(id="all-reduce", severity="fail", text=text, remedy=remedy))
