"""`make cluster-check CLUSTER=`: whether all machines are ready for a run, what is not, and the remedy. Changes nothing
anywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sft_play.cluster.bring import project
from sft_play.cluster.findings import Examined, Pair, Seen, Summed, Wanted, judge, sum_seconds, verdict
from sft_play.cluster.hosts import CONNECT_SECONDS, NoAnswer, Session, on_all, require_master_here
from sft_play.cluster.inventory import Inventory, inventory_for_call
from sft_play.cluster.remote import Facts
from sft_play.config.call import Call
from sft_play.config.schema import Config
from sft_play.errors import UserError, printable
from sft_play.files import file_sha256
from sft_play.plan.hardware import GIB
from sft_play.runs.origin import SOURCES
from sft_play.runs.prepared import lookup, sources_of
from sft_play.text import Finding, finding_lines, plural, table

SECONDS = 26.0
"""For everything; what still runs then is ended, within 3 s."""
START_SECONDS = CONNECT_SECONDS + 8.0
CONNECT_LIMIT, ROUND_SECONDS = 3.0, 1.5
"""For a connection between two machines; for both ways between them."""
MEGABYTES = 16
"""Sent at most between two machines to see how fast that is: on a slower line as much as passes in half a second."""
TORCH_SECONDS = 13.0
"""Kept for the import of torch, and the sum over all machines."""
SUM_SECONDS = 15.0
ROUND_TRIPS, MOST_PAIRS, MOST_DATA = 10, 12, 2_000
PORT, FAILED = 29500, 3


def main(call: Call) -> int:
    """Print what was found; return 0, or 3 where a machine cannot take part. Raise `UserError`."""
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    given = call.options.get("CONFIG") or call.options.get("RUN")
    if not given and call.overrides:
        raise UserError(
            f"`{call.overrides[0].origin}` is given, and there is no configuration", hint="CONFIG=configs/home_lan.yaml"
        )
    loaded = call.load_config() if given else None
    wanted = wanted_of(loaded.config if loaded else None, call.port("MASTER_PORT") or PORT)
    examined = Examination(inventory, wanted).run()
    findings = judge(examined, inventory, wanted)
    if not call.json:
        print(printable("\n".join(report(examined, inventory, wanted, findings))), flush=True)
    able = [name for name, some in findings.items() if verdict(some) != "fail"]
    if call.json:
        print(json.dumps(as_json(examined, inventory, findings), indent=2, default=str))
    return FAILED if len(able) < len(findings) else 0


def wanted_of(config: Config | None, port: int) -> Wanted:
    """Return what must be the same on all machines: this machine's code and, with a configuration, data and backend."""
    root, here = project(), Path.cwd()
    files = [path for path in sorted((root / "sft_play").rglob("*")) if path.suffix in SOURCES and path.is_file()]
    code = {str(path.relative_to(root)): file_sha256(path) for path in files}
    if config is None:
        return Wanted(port=port, code=code)
    data = sorted(itertools.islice(_data_files(config), MOST_DATA))
    sizes = {str(path.relative_to(here) if path.is_relative_to(here) else path): path.stat().st_size for path in data}
    known = lookup(config)
    rows = (
        {Path(split.path).name: split.fingerprint for split in (known.train, known.validation) if split}
        if known
        else {}
    )
    shared = config.data.sync == "shared"
    return Wanted(port=port, backend=config.launch.backend, code=code, data=sizes, prepared=rows, shared=shared)


def _data_files(config: Config) -> Iterator[Path]:
    for source in sources_of(config):
        path = Path(source.path).expanduser()
        found = path.rglob("*") if path.is_dir() else path.parent.glob(path.name) if "*" in path.name else [path]
        yield from (one for one in found if one.is_file())


# ---- Asking


class Examination:
    """Asks all machines at once, and lets them reach each other, within `SECONDS`. Leaves nothing behind on them."""

    def __init__(self, inventory: Inventory, wanted: Wanted) -> None:
        self.inventory, self.wanted = inventory, wanted
        self.until = time.monotonic() + SECONDS
        self.found = Examined(hosts={host.name: Seen(host) for host in inventory.hosts})
        self.sessions: dict[str, Session] = {}

    def run(self) -> Examined:
        try:
            self.each(self.meet)
            self.connect()
            self.each(self.ask_doctor)
            self.found.all_reduce = self.sum_over_all()
        finally:
            for session in self.sessions.values():
                session.close()
        self.found.seconds = SECONDS - self.left()
        return self.found

    def left(self) -> float:
        return self.until - time.monotonic()

    def each(self, call: Callable[[Seen], object], names: Sequence[str] | None = None) -> None:
        """Do it for all hosts, or the named ones, at once."""
        hosts = self.found.hosts
        on_all([hosts[name].host for name in (hosts if names is None else names)], lambda host: call(hosts[host.name]))

    def ask(self, seen: Seen, do: str, most: float, /, **request: Any) -> dict[str, Any]:
        """Return an answer, which may be a `problem`; empty where there is none: a host that is silent once is lost
        from then on.
        """
        if not seen.answers:
            return {}
        try:
            return self.sessions[seen.host.name].call(do, max(0.5, min(most, self.left())), **request)
        except NoAnswer as error:
            seen.lose(f"{do}: {error}")
            return {}

    def meet(self, seen: Seen) -> None:
        """Wait for the host's Python, compare the clocks, ask for what costs little.

        Where the environment is missing the machine's own Python answers: clock, disks, cards and ports need none.
        """
        while not seen.answers:
            session = self.sessions[seen.host.name] = Session(seen.host, system=seen.without)
            try:
                session.call("clock", max(0.5, min(START_SECONDS, self.left())))
                seen.answers = True
            except NoAnswer:
                session.close()
                retried = seen.without
                seen.trouble = seen.trouble or session.trouble()
                if retried or not seen.without:
                    return
        trips = []
        for _ in range(ROUND_TRIPS):
            sent = time.time()
            theirs, received = self.ask(seen, "clock", 5).get("now", sent), time.time()
            trips.append((received - sent, theirs - (sent + received) / 2))
        seen.skew_seconds = min(trips)[1]
        master = self.inventory.master
        others = [host for host in self.inventory.hosts if host != seen.host]
        towards = master if seen.host != master else (others or [master])[0]
        ports = [0, self.wanted.port] if seen.host == master else [0]
        names = {what: list(getattr(self.wanted, what)) for what in ("code", "data", "prepared")}
        found = self.ask(seen, "facts", 10, towards=towards.address, ports=ports, **names)
        if "problem" in found:
            seen.lose(f"facts: {found['problem']}")
        elif found:
            seen.facts = Facts(**found)

    def ask_doctor(self, seen: Seen) -> None:
        if seen.without:
            return
        offline = {"HF_HUB_OFFLINE": "1"}  # other machines need not reach the hub
        found = self.ask(seen, "run_module", 20, words=["sft_play.doctor"], variables=offline)
        if "problem" in found:
            seen.trouble = Finding(
                "broken-python", "fail", found["problem"], f"make cluster-install CLUSTER={seen.host.cluster}"
            )
        seen.doctor = found.get("findings", ())

    # ---- Network

    def connect(self) -> None:
        """Let all reach all, at the master's port and a random one of each host, then measure pair by pair."""
        facts = {name: seen.facts for name, seen in self.found.hosts.items() if seen.answers and seen.facts}
        ports = {name: one.listens[0]["port"] for name, one in facts.items()}
        if (master := facts.get(self.inventory.master.name)) and master.listens[1]["port"] is None:
            self.found.port_held = master.listens[1]
        addresses = {name: self.addresses(self.found.hosts[name], facts) for name in facts}
        self.each(lambda seen: self.reach(seen, addresses, ports), list(facts))
        order = list(self.found.hosts)
        self.found.pairs.sort(key=lambda pair: (order.index(pair.source), order.index(pair.target)))
        for ways in (self.found.pairs, self.found.further_ways):
            for partners in rounds(list(facts)):
                if self.left() >= TORCH_SECONDS + ROUND_SECONDS:  # the pairs that are left are named
                    self.each(partial(self.measure, ways, partners, ports), list(partners))

    def addresses(self, seen: Seen, facts: Mapping[str, Facts]) -> list[str]:
        """Return the address at which a host's gloo and NCCL are reached, then those of its further interfaces that no
        other host has.
        """
        held = [link["address"] for one in facts.values() for link in one.interfaces.values()]
        links = facts[seen.host.name].interfaces
        usual = links.get(seen.host.interface or "", {}).get("address") or seen.host.address
        further = {link["address"] for link in links.values() if link["address"] and held.count(link["address"]) == 1}
        return [usual, *sorted(further - {usual, seen.route.get("address")})]

    def reach(self, seen: Seen, addresses: Mapping[str, Sequence[str]], ports: Mapping[str, int]) -> None:
        """Let one host connect to the others."""
        name, master = seen.host.name, self.inventory.master
        ways = [Pair(name, other, address=address) for other in ports if other != name for address in addresses[other]]
        targets = [(pair.address, ports[pair.target]) for pair in ways]
        if name != master.name and master.name in ports and not self.found.port_held:
            targets.append((master.address, self.wanted.port))
        most = 2 * CONNECT_LIMIT + 2
        answers = self.ask(seen, "reach", most, targets=targets, megabytes=0, timeout=CONNECT_LIMIT).get("ways")
        if answers is None:
            return
        if len(targets) > len(ways):
            self.found.master_port[name] = answers.pop().get("error")
        links = {
            link["address"]: link_name for link_name, link in (seen.facts.interfaces if seen.facts else {}).items()
        }
        usual: dict[str, Pair] = {}
        for pair, answer in zip(ways, answers, strict=True):
            pair.error, pair.interface = answer.get("error"), links.get(answer.get("own"))
            first = usual.setdefault(pair.target, pair)
            if pair.interface and first.interface and pair.interface != first.interface:
                self.found.further_ways.append(pair)
        self.found.pairs += usual.values()

    def measure(self, ways: Sequence[Pair], partners: Mapping[str, str], ports: Mapping[str, int], seen: Seen) -> None:
        """Measure the ways between a host and its partner, one after the other."""
        ends = {seen.host.name, partners[seen.host.name]}
        for pair in ways:
            if {pair.source, pair.target} == ends and not pair.error:
                source, targets = self.found.hosts[pair.source], [(pair.address, ports[pair.target])]
                found = self.ask(source, "reach", 20, targets=targets, megabytes=MEGABYTES, timeout=CONNECT_LIMIT)
                for way in found.get("ways", ()):
                    pair.error, pair.rtt_ms, pair.mbit = way.get("error"), way.get("rtt_ms"), way.get("mbit")

    def sum_over_all(self) -> Summed | None:
        """Let torch sum over all machines as a training does; not where that can only hang."""
        hosts, found = self.found.hosts, self.found
        if len(hosts) < 2:
            return None
        gpus = {name: seen.facts.gpu_count if seen.facts and seen.host.gpus != 0 else 0 for name, seen in hosts.items()}
        summed = Summed(
            "nccl"
            if self.wanted.backend == "nccl" or (self.wanted.backend == "auto" and all(gpus.values()))
            else "gloo"
        )
        needs_gpus = summed.backend == "nccl"
        unable = [
            name for name, seen in hosts.items() if not seen.answers or seen.trouble or (needs_gpus and not gpus[name])
        ]
        if unable:
            summed.skipped = f"{', '.join(f'`{name}`' for name in unable)} cannot take part"
        elif found.port_held or any(found.master_port.values()) or any(pair.error for pair in found.pairs):
            summed.skipped = "not all ports are open"
        elif self.left() < 3:
            summed.skipped = "no time was left"
        if summed.skipped:
            return summed
        slowest = min((pair.mbit for pair in found.pairs if pair.mbit), default=1000.0)
        seconds = sum_seconds(summed.megabytes * 2**20, len(hosts), slowest)
        summed.megabytes /= math.ceil(seconds)  # so that it takes a second at most
        limit, ranks = min(SUM_SECONDS, self.left()) - 1, list(hosts)

        def take_part(seen: Seen) -> None:
            interface = seen.host.interface or seen.route.get("interface") or ""
            answer = self.ask(
                seen,
                "all_reduce",
                limit + 0.5,
                backend=summed.backend,
                address=self.inventory.master.address,
                port=self.wanted.port,
                rank=ranks.index(seen.host.name),
                world=len(hosts),
                interface=interface,
                stated=bool(seen.host.interface),
                megabytes=summed.megabytes,
                timeout=limit,
            )
            if "seconds" in answer:
                summed.seconds = max(summed.seconds or 0.0, answer["seconds"])
            else:
                summed.errors[seen.host.name] = answer.get("problem") or (
                    seen.trouble.text if seen.trouble else "no answer"
                )

        self.each(take_part)
        summed.seconds = None if summed.errors else summed.seconds
        return summed


def rounds(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield every pair of hosts once, in rounds in which no host stands twice (the circle method of tournaments)."""
    ring = [*names, *([""] if len(names) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        yield {a: b for a, b in zip(ring[:half], reversed(ring[half:]), strict=True) if a and b}
        ring = [ring[0], ring[-1], *ring[1:-1]]


# ---- Output


def as_json(examined: Examined, inventory: Inventory, findings: Mapping[str, Sequence[Finding]]) -> dict[str, Any]:
    """Return all that was measured and found."""
    found = dataclasses.asdict(examined)
    for name, host in found["hosts"].items():
        host |= {"verdict": verdict(findings[name]), "findings": [dataclasses.asdict(one) for one in findings[name]]}
    return {"ok": all(verdict(some) != "fail" for some in findings.values()), "master": inventory.master.name, **found}


def report(
    examined: Examined, inventory: Inventory, wanted: Wanted, findings: Mapping[str, Sequence[Finding]]
) -> Iterator[str]:
    """Yield the lines: a row for each host, the network, what is wrong with the remedy, the verdict."""
    rows: list[Sequence[str]] = [("host", "verdict", "python", "torch", "GPUs", "free", "clock")]
    yield from table(rows + [_row(seen, verdict(findings[name])) for name, seen in examined.hosts.items()])
    yield ""
    yield from _network(examined)
    for name, some in findings.items():
        yield from finding_lines(some, f"{name}: ")
    if any(findings.values()):
        yield ""
    data = (
        f", {len(wanted.data)} of the data, {len(wanted.prepared)} prepared splits"
        if wanted.data or wanted.prepared
        else ""
    )
    yield (
        f"compared: {len(wanted.code)} files of the project{data}; port {wanted.port} of `{inventory.master.name}`;"
        f" {examined.seconds:.1f} s"
    )
    words = [verdict(some) for some in findings.values()]
    ok, warned, failed = (words.count(word) for word in ("ok", "warning", "fail"))
    yield f"{plural(len(words), 'machine')}: {ok} ok, {warned} with a warning, {failed} cannot take part"


def _row(seen: Seen, word: str) -> tuple[str, ...]:
    if not (facts := seen.facts):
        return (seen.host.name, word, *["-"] * 5)
    gpus, skew = list(facts.gpus), seen.skew_seconds or 0.0
    names = [gpu["name"].removeprefix("NVIDIA ").removeprefix("GeForce ") for gpu in gpus]
    shown = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    free = f"{min(gpu['free_bytes'] for gpu in gpus) / GIB:.1f} GiB" if gpus else "-"
    clock = f"{skew * 1e3:+.1f} ms" if abs(skew) < 1 else f"{skew:+.1f} s"
    return (seen.host.name, word, facts.python, facts.packages.get("torch", "-"), shown, free, clock)


def _network(examined: Examined) -> Iterator[str]:
    """Yield the slowest pairs, what a step's gradients would take, and the sum that torch made."""
    if pairs := sorted((pair for pair in examined.pairs if pair.mbit is not None), key=lambda pair: pair.mbit or 0):
        rows = [("from", "to", "round trip", "speed")]
        rows += [
            (pair.source, pair.target, f"{pair.rtt_ms:.2f} ms", f"{pair.mbit:.0f} Mbit/s")
            for pair in pairs[:MOST_PAIRS]
        ]
        yield from table(rows)
    summed = examined.all_reduce
    if summed and summed.seconds is not None:
        yield f"a sum of {summed.megabytes:g} MiB over all machines ({summed.backend}): {summed.seconds:.3f} s"
    elif summed:
        yield (
            f"a sum over all machines ({summed.backend}):"
            f" {'not tried, ' + summed.skipped if summed.skipped else 'failed'}"
        )
    if pairs or summed:
        yield ""
