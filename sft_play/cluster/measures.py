"""Asks all machines of a cluster at once, and lets them reach each other. Judges nothing: `findings` does.

Order: clocks and facts, then the network while nothing else runs, then torch, whose import takes seconds, then a sum over all machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from sft_play.cluster.conversation import Gone, Refused, Session, Silent
from sft_play.cluster.examined import SUM_MEGABYTES, Examined, Pair, Seen, Summed, Wanted, sum_seconds
from sft_play.cluster.ssh import CONNECT_SECONDS, WITHOUT
from sft_play.config.cluster import Inventory

START_SECONDS = CONNECT_SECONDS + 8.0
ROUND_TRIPS = 20
CONNECT_LIMIT = 3.0
"""Seconds for a connection between two machines."""
MEGABYTES = 16
"""Sent at most between two machines to see how fast that is: on a slower line as much as passes in half a second."""
ROUND_SECONDS = 1.5
"""For both ways between two machines."""
HASH_SECONDS = 4.0
"""How long a machine may read the files that are compared."""
TORCH_SECONDS = 13.0
"""Kept for the import of torch, and the sum over all machines."""
SUM_SECONDS = 15.0
ONE_SUM_SECONDS = 1.0
"""On a network on which the sum would take longer, it is one of less."""


def examine(inventory: Inventory, wanted: Wanted, *, seconds: float) -> Examined:
    """Asks all hosts, within about `seconds`. Leaves nothing behind on them."""
    return _Examination(inventory, wanted, seconds).run()


class _Examination:
    def __init__(self, inventory: Inventory, wanted: Wanted, seconds: float) -> None:
        self.inventory, self.wanted = inventory, wanted
        self.began = time.monotonic()
        self.until = self.began + seconds
        self.found = Examined(hosts={host.name: Seen(host) for host in inventory.hosts})
        self.sessions: dict[str, Session] = {}

    def run(self) -> Examined:
        try:
            for host in self.inventory.hosts:
                self.sessions[host.name] = Session(host, self.inventory)
            self.each(self.meet)
            self.network()
            self.each(self.software)
            self.found.summed = self.sum_over_all()
        finally:
            codes = self.parallel({name: session.close for name, session in self.sessions.items()})
            for name, seen in self.found.hosts.items():
                if seen.start is not None and name in codes:
                    said = self.sessions[name].beside + self.sessions[name].errors
                    seen.start, seen.code = said.strip() or seen.start, codes[name]
        self.found.seconds = time.monotonic() - self.began
        return self.found

    # ---- Asking

    def left(self, most: float) -> float:
        """Returns the seconds that a request may take."""
        return max(0.5, min(most, self.until - time.monotonic()))

    def parallel(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        with ThreadPoolExecutor(max_workers=max(1, len(calls))) as pool:
            started = {name: pool.submit(call) for name, call in calls.items()}
            try:
                return {name: future.result() for name, future in started.items()}
            except BaseException:  # Ctrl-C: whoever waits for an answer is told that there will be none
                for session in self.sessions.values():
                    session.process.kill()
                raise

    def each(self, call: Callable[[Seen], None]) -> None:
        """Calls for every host that answers, all at once."""
        self.parallel({name: partial(call, seen) for name, seen in self.found.hosts.items() if seen.answers})

    def ask(self, seen: Seen, name: str, most: float, /, **request: Any) -> Any:
        """Returns an answer; `None` where there is none, and why is kept: a host that is silent once is lost from then on."""
        try:
            return self.ask_for(seen, name, most, **request)
        except Refused as error:
            seen.refused[name] = str(error)
            return None

    def ask_for(self, seen: Seen, name: str, most: float, /, **request: Any) -> Any:
        """As `ask`, but raises `Refused`."""
        if not seen.answers:
            return None
        try:
            return self.sessions[seen.host.name].call(name, self.left(most), **request)
        except (Silent, Gone) as error:
            seen.lost = f"{name}: {error}"
            return None

    def meet(self, seen: Seen) -> None:
        """Waits for the host's Python, compares the clocks, asks for what costs little."""
        try:
            self.sessions[seen.host.name].await_start(self.left(START_SECONDS))
        except (Silent, Gone) as error:
            if isinstance(error, Silent) or not self.meet_without(seen):
                seen.start = str(error)
                return
        self.clock(seen)
        others = [host for host in self.inventory.hosts if host.name != seen.host.name]
        towards = (
            self.inventory.master.address if seen.host.name != self.inventory.master.name else (others or [seen.host])[0].address
        )
        seen.facts = self.ask(seen, "facts", 10, towards=towards) or {}
        if seen.without:
            return
        until = min(time.monotonic() + HASH_SECONDS, self.until - TORCH_SECONDS)
        seen.code_files = self.hashed(seen, self.wanted.code, until)
        seen.sources = self.hashed(seen, self.wanted.sources, until)
        seen.prepared = self.ask(seen, "prepared", 5, names=list(self.wanted.prepared)) or {}

    def hashed(self, seen: Seen, paths: Iterable[str], until: float) -> Mapping[str, str | None]:
        """Asks for the files' sha256; those that were not read by `until` are left out."""
        seconds = max(0.0, until - time.monotonic())
        return self.ask(seen, "files", seconds + 5, paths=list(paths), seconds=seconds) or {}

    def meet_without(self, seen: Seen) -> bool:
        """Asks a host's own `python3` where the environment is missing: clock, disks, cards and ports are there without one."""
        name = seen.host.name
        first = self.sessions[name]
        code = first.close()
        if code not in WITHOUT:
            return False
        self.sessions[name] = Session(seen.host, self.inventory, system=True)
        try:
            self.sessions[name].await_start(self.left(START_SECONDS))
        except (Silent, Gone):
            self.sessions[name].close()
            self.sessions[name] = first
            return False
        seen.without = code
        return True

    def clock(self, seen: Seen) -> None:
        trips = []
        for _ in range(ROUND_TRIPS):
            sent = time.time()
            theirs = self.ask(seen, "clock", 5)
            if theirs is None:
                return
            received = time.time()
            trips.append((received - sent, theirs - (sent + received) / 2))
        shortest, skew = min(trips)
        seen.ssh_ms, seen.skew_seconds = shortest * 1e3, skew

    def software(self, seen: Seen) -> None:
        seen.software = self.ask(seen, "software", 20) or {}

    # ---- Network

    def network(self) -> None:
        """Opens the master's port and a random one on each host, lets all reach all, then measures pair by pair."""
        answering = {name: seen for name, seen in self.found.hosts.items() if seen.answers}
        master = answering.get(self.inventory.master.name)
        opened = self.ask(master, "listen", 5, port=self.wanted.port) if master else None
        if opened and opened["port"] is None:
            self.found.port_held = opened
        ports = {name: answer["port"] for name, answer in self.parallel(
            {name: partial(self.ask, seen, "listen", 5, port=0) for name, seen in answering.items()}
        ).items() if answer and answer["port"]}  # fmt: skip
        master_open = bool(opened and opened["port"])
        self.parallel({name: partial(self.reach, seen, ports, master_open) for name, seen in answering.items() if seen.answers})
        order = list(self.found.hosts)
        self.found.pairs.sort(key=lambda pair: (order.index(pair.source), order.index(pair.target)))
        for pairs in rounds(list(ports)):
            if self.until - time.monotonic() < TORCH_SECONDS + ROUND_SECONDS:
                break  # the pairs that are left are named
            self.parallel({a: partial(self.measure, a, b, ports) for a, b in pairs})
        self.each(lambda seen: self.ask(seen, "close", 5))

    def reach(self, seen: Seen, ports: Mapping[str, int], master_open: bool) -> None:
        """Lets one host connect to the others."""
        others = [name for name in ports if name != seen.host.name]
        targets = [(self.found.hosts[name].host.address, ports[name]) for name in others]
        to_master = master_open and seen.host.name != self.inventory.master.name
        if to_master:
            targets.append((self.inventory.master.address, self.wanted.port))
        answers = self.ask(seen, "reach_all", 2 * CONNECT_LIMIT + 2, targets=targets, timeout=CONNECT_LIMIT)
        if answers is None:
            return
        if to_master:
            self.found.master_port[seen.host.name] = answers.pop()
        self.found.pairs += [Pair(seen.host.name, name, error) for name, error in zip(others, answers, strict=True)]

    def measure(self, one: str, other: str, ports: Mapping[str, int]) -> None:
        """Measures both ways between two hosts, one after the other."""
        for source, target in ((one, other), (other, one)):
            pair = next((pair for pair in self.found.pairs if (pair.source, pair.target) == (source, target)), None)
            if pair is None or pair.error:
                continue
            address = self.found.hosts[target].host.address
            try:
                way = self.ask_for(
                    self.found.hosts[source], "reach", 20, address=address, port=ports[target], megabytes=MEGABYTES, timeout=CONNECT_LIMIT
                )  # fmt: skip
            except Refused as error:
                pair.error = str(error)
                continue
            if way:
                pair.rtt_ms, pair.mbit = way["rtt_ms"], way["mbit"]

    def sum_over_all(self) -> Summed | None:
        """Lets torch sum over all machines as a training does; not where that can only hang."""
        hosts = self.found.hosts
        if len(hosts) < 2:
            return None
        gpus = all(seen.host.gpus != 0 and seen.software.get("usable_gpus") for seen in hosts.values())
        summed = Summed(backend="nccl" if self.wanted.backend == "nccl" or (self.wanted.backend == "auto" and gpus) else "gloo")
        why_not = [name for name, seen in hosts.items() if not seen.answers or seen.without or not seen.software.get("torch")]
        if why_not:
            summed.skipped = f"{_names(why_not)} cannot take part"
        elif self.found.port_held or any(self.found.master_port.values()) or any(pair.error for pair in self.found.pairs):
            summed.skipped = "not all ports are open"
        elif self.until - time.monotonic() < 3:
            summed.skipped = "no time was left"
        elif summed.backend == "nccl" and not gpus:
            summed.skipped = "NCCL needs a GPU on every machine"
        else:
            self.sum_now(summed)
        return summed

    def sum_now(self, summed: Summed) -> None:
        limit = self.left(SUM_SECONDS) - 1
        summed.megabytes = sum_megabytes(self.found)
        times: dict[str, float] = {}
        errors: dict[str, str] = {}

        def one(rank: int, seen: Seen) -> None:
            try:
                answer = self.ask_for(
                    seen, "all_reduce", limit + 1, backend=summed.backend, address=self.inventory.master.address, port=self.wanted.port,
                    rank=rank, world=len(self.found.hosts), interface=seen.host.interface or (seen.facts.get("route") or {}).get("interface") or "",
                    megabytes=summed.megabytes, timeout=limit, limit=limit,
                )  # fmt: skip
            except Refused as error:
                errors[seen.host.name] = str(error)
                return
            if answer is None:
                errors[seen.host.name] = seen.lost or "no answer"
            else:
                times[seen.host.name] = answer

        self.parallel({name: partial(one, k, seen) for k, (name, seen) in enumerate(self.found.hosts.items())})
        summed.errors = errors
        summed.seconds = max(times.values()) if times and not errors else None


def sum_megabytes(examined: Examined) -> float:
    """Returns how many MiB are summed: half as many, and so on, while that would take more than `ONE_SUM_SECONDS` on the slowest way."""
    slowest = min((pair.mbit for pair in examined.pairs if pair.mbit), default=1000.0)
    size = SUM_MEGABYTES
    while size > SUM_MEGABYTES / 128 and sum_seconds(size * 2**20, len(examined.hosts), slowest) > ONE_SUM_SECONDS:
        size /= 2
    return size


def rounds(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yields every pair of hosts once, in rounds in which no host stands twice (the circle method of tournaments)."""
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
