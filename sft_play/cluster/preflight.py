"""`make cluster-check CLUSTER=`: whether all machines are ready for a run, what is not, and the remedy. Changes nothing anywhere.

Order: clocks and facts, then the network while nothing else runs, then torch, whose import takes seconds, then a sum over all machines.
`BENCH=1` trains some steps on each of them, which keeps the calibration there that `make bench` keeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from sft_play.cluster import probe
from sft_play.cluster.bring import project
from sft_play.cluster.findings import (
    ADAPTERS,
    GIB,
    Examined,
    Finding,
    Pair,
    Seen,
    Summed,
    Wanted,
    judge,
    sum_megabytes,
    sum_seconds,
    verdict,
)
from sft_play.cluster.ssh import CONNECT_SECONDS, WITHOUT, arguments, in_folder, is_here, last_word, no_client, on_all, run_on
from sft_play.config.call import Call
from sft_play.config.cluster import Host, Inventory, inventory_for_call
from sft_play.config.load import LoadedConfig, saved_form
from sft_play.config.schema import Config
from sft_play.errors import UserError, printable
from sft_play.files import file_sha256
from sft_play.runs.origin import SOURCES
from sft_play.runs.prepared import lookup, sources_of
from sft_play.text import table

SECONDS = 26.0
"""For everything; what then goes on is ended, within 3 s."""
START_SECONDS = CONNECT_SECONDS + 8.0
CONNECT_LIMIT, ROUND_SECONDS = 3.0, 1.5
"""For a connection between two machines; for both ways between them."""
MEGABYTES = 16
"""Sent at most between two machines to see how fast that is: on a slower line as much as passes in half a second."""
TORCH_SECONDS = 13.0
"""Kept for the import of torch, and the sum over all machines."""
SUM_SECONDS = 15.0
END_SECONDS = 3.0
BENCH_SECONDS = 1200.0
"""For one machine, the download of a model that it does not have yet included."""
ROUND_TRIPS, MOST_PAIRS, MOST_DATA = 20, 12, 2_000
PORT, FAILED = 29500, 3
BOOT = "import sys; exec(compile(sys.stdin.read(int(sys.stdin.readline())), 'probe', 'exec'))"
"""Runs the program whose length and text come first on stdin; the requests follow there."""
BENCH = (
    "import pathlib, sys, tempfile; from sft_play.__main__ import main\n"
    "with tempfile.TemporaryDirectory() as folder:\n"
    " config = pathlib.Path(folder, 'config.json'); config.write_text(sys.stdin.read())\n"
    " sys.exit(main(['bench', f'CONFIG={config}', 'JSON=1']))\n"
)
"""The configuration comes by stdin: a file of it need not be there."""


def main(call: Call) -> int:
    """Prints what was found; returns 0, or 3 where a machine cannot take part. Raises `UserError`."""
    inventory = inventory_for_call(call)
    given = call.options.get("CONFIG") or call.options.get("RUN")
    if call.overrides and not given:
        raise UserError(f"`{call.overrides[0].origin}` is given, but no configuration", hint="CONFIG=configs/home_lan.yaml")
    if call.flag("BENCH") and not given:
        raise UserError("`BENCH=1` trains some steps, and there is no configuration", hint="CONFIG=configs/home_lan.yaml")
    loaded = call.load_config() if given else None
    wanted = wanted_of(loaded.config if loaded else None, call.port("MASTER_PORT") or PORT)
    examined = Examination(inventory, wanted).run()
    findings = judge(examined, inventory, wanted, call.options["CLUSTER"], here=is_here(inventory.master))
    if not call.json:
        print(printable("\n".join(report(examined, inventory, wanted, findings))), flush=True)
    able = [name for name, some in findings.items() if verdict(some) != "fail"]
    benched = bench_hosts(inventory, loaded, able) if loaded and call.flag("BENCH") else {}
    if call.json:
        print(json.dumps(as_json(examined, inventory, findings) | ({"bench": benched} if benched else {}), indent=2))
    elif benched:
        print(printable("\n".join(("", *bench_report(benched)))))
    return FAILED if len(able) < len(findings) or any("error" in found for found in benched.values()) else 0


def wanted_of(config: Config | None, port: int) -> Wanted:
    """Returns what the machines shall agree with: this machine's code and, with a configuration, data and backend."""
    package, here = project() / "sft_play", Path.cwd()
    files = [path for path in sorted(package.rglob("*")) if path.suffix in SOURCES and path.is_file()]
    code = {str(path.relative_to(project())): file_sha256(path) for path in files}
    if config is None:
        return Wanted(port=port, code=code)
    data = sorted(itertools.islice(_data_files(config), MOST_DATA))
    sizes = {str(path.relative_to(here) if path.is_relative_to(here) else path): path.stat().st_size for path in data}
    known = lookup(config)
    rows = {Path(split.path).name: split.fingerprint for split in (known.train, known.validation) if split} if known else {}
    shared = config.data.sync == "shared"
    return Wanted(port=port, backend=config.launch.backend, code=code, data=sizes, prepared=rows, shared=shared)


def _data_files(config: Config) -> Iterator[Path]:
    for source in sources_of(config):
        path = Path(source.path).expanduser()
        found = path.rglob("*") if path.is_dir() else path.parent.glob(path.name) if "*" in path.name else [path]
        yield from (one for one in found if one.is_file())


# ---- A host's probe


class Probe:
    """The probe on one host: its Python runs the text of `probe`, over SSH or here, and answers one request at a time."""

    def __init__(self, host: Host, inventory: Inventory, *, system: bool = False) -> None:
        """Starts; nothing is waited for. Raises `HardwareError` where there is no ssh program.

        `system`: by the machine's own `python3` in the user's home, where it has no environment yet.
        """
        start, here = (
            ["-u", "-B", "-c", BOOT],
            is_here(host),
        )  # here it is this very project and interpreter, whatever the inventory says
        there = ["python3", *start] if system else in_folder(host, [host.python, *start])
        words = [sys.executable, *start] if here else arguments(host, inventory, there)
        self.errors, self.beside = tempfile.TemporaryFile(), ""  # noqa: SIM115 - closed by `close`
        try:
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, errors="replace", bufsize=1,
                cwd=project() if here else None, start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            raise no_client() from None
        assert self.process.stdin and self.process.stdout
        self.requests, self.answers = self.process.stdin, self.process.stdout
        text = Path(probe.__file__).read_text(encoding="utf-8")
        self._write(f"{len(text)}\n{text}")

    def greeting(self, timeout: float) -> None:
        """Waits for the probe's first line. Raises `TimeoutError` or `EOFError`, after which there are no answers."""
        while (line := self._line(timeout)) != probe.MARK:
            self.beside += line + "\n"  # of a login shell

    def call(self, name: str, timeout: float, /, **request: Any) -> dict[str, Any]:
        """Returns what the probe's function `name` returns, or `error`. Raises as `greeting`."""
        self._write(json.dumps({"call": name, **request}) + "\n")
        found: dict[str, Any] = json.loads(self._line(timeout))
        return found

    def close(self) -> tuple[int, str]:
        """Ends the probe, which ends with its input; returns the exit code of it or of ssh, and what came beside the answers."""
        with contextlib.suppress(OSError):  # it has ended
            self.requests.close()
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.answers.close()
        with self.errors:
            self.errors.seek(0)
            return code, (self.beside + self.errors.read().decode(errors="replace")).strip()

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended: the missing answer says so
            self.requests.write(text)
            self.requests.flush()

    def _line(self, timeout: float) -> str:
        late = threading.Timer(timeout, self.process.kill)
        late.start()
        line, silent = self.answers.readline(), late.finished.is_set()
        late.cancel()
        if not line.endswith("\n"):
            raise TimeoutError(f"no answer within {timeout:.0f} s") if silent else EOFError("the connection ended")
        return line.rstrip("\n")


# ---- Asking


class Examination:
    """Asks all machines at once, and lets them reach each other, within `SECONDS`. Leaves nothing behind on them."""

    def __init__(self, inventory: Inventory, wanted: Wanted) -> None:
        self.inventory, self.wanted = inventory, wanted
        self.until = time.monotonic() + SECONDS
        self.found = Examined(hosts={host.name: Seen(host) for host in inventory.hosts})
        self.probes: dict[str, Probe] = {}

    def run(self) -> Examined:
        try:
            self.each(self.meet)
            self.network()
            self.each(self.software)
            self.found.all_reduce = self.sum_over_all()
        finally:
            self.parallel(one.close for one in self.probes.values())
        self.found.seconds = SECONDS - self.left()
        return self.found

    def left(self) -> float:
        return self.until - time.monotonic()

    def parallel(self, calls: Iterable[Callable[[], object]]) -> None:
        with ThreadPoolExecutor(max_workers=len(self.inventory.hosts)) as pool:
            started = [pool.submit(call) for call in calls]
            try:
                for future in started:
                    future.result()
            except BaseException:  # Ctrl-C: whoever waits for an answer gets to know that there will be none
                self.until = 0.0
                for one in self.probes.values():
                    one.process.kill()
                raise

    def each(self, call: Callable[[Seen], None]) -> None:
        """Calls for every host that answers, all at once."""
        self.parallel(partial(call, seen) for seen in self.found.hosts.values() if seen.answers)

    def ask(self, seen: Seen, name: str, most: float, /, **request: Any) -> dict[str, Any]:
        """Returns an answer, which may be an `error`; empty where there is none: a host that is silent once is lost from then on."""
        if not seen.answers:
            return {}
        try:
            return self.probes[seen.host.name].call(name, max(0.5, min(most, self.left())), **request)
        except (TimeoutError, EOFError) as error:
            seen.lost = f"{name}: {error}"
            return {}

    def meet(self, seen: Seen) -> None:
        """Waits for the host's Python, compares the clocks, asks for what costs little.

        Where the environment is missing the machine's own Python answers: clock, disks, cards and ports need none.
        """
        for system in (False, True):
            one = self.probes[seen.host.name] = Probe(seen.host, self.inventory, system=system)
            try:
                one.greeting(max(0.5, min(START_SECONDS, self.left())))
                seen.start, seen.without = None, seen.code
                break
            except (TimeoutError, EOFError) as error:
                code, said = self.probes.pop(seen.host.name).close()
                if not system:
                    seen.start, seen.code = said or str(error), code
                if code not in WITHOUT:
                    return
        self.clock(seen)
        master, others = self.inventory.master, [host for host in self.inventory.hosts if host != seen.host]
        towards = master if seen.host != master else (others or [master])[0]
        wanted = self.wanted if not seen.without else Wanted(port=0)
        names = {"code": list(wanted.code), "data": list(wanted.data), "prepared": list(wanted.prepared)}
        ports = [0, self.wanted.port] if seen.host == master else [0]
        found = self.ask(seen, "facts", 10, towards=towards.address, ports=ports, **names)
        if "error" in found:
            seen.lost = f"facts: {found['error']}"
        else:
            seen.facts = found

    def clock(self, seen: Seen) -> None:
        trips = []
        for _ in range(ROUND_TRIPS):
            sent = time.time()
            theirs = self.ask(seen, "clock", 5).get("now")
            if theirs is None:
                return
            received = time.time()
            trips.append((received - sent, theirs - (sent + received) / 2))
        shortest, seen.skew_seconds = min(trips)
        seen.ssh_ms = shortest * 1e3

    def software(self, seen: Seen) -> None:
        seen.software = self.ask(seen, "software", 20)

    # ---- Network

    def network(self) -> None:
        """Lets all reach all, at the master's port and a random one of each host, then measures pair by pair."""
        hosts = {name: seen for name, seen in self.found.hosts.items() if seen.answers}
        ports = {name: seen.facts["listens"][0]["port"] for name, seen in hosts.items()}
        if master := hosts.get(self.inventory.master.name):
            opened = master.facts["listens"][1]
            self.found.port_held = opened if opened["port"] is None else None
        self.parallel(partial(self.reach, seen, ports) for seen in hosts.values())
        order = list(self.found.hosts)
        self.found.pairs.sort(key=lambda pair: (order.index(pair.source), order.index(pair.target)))
        for ways in (self.found.pairs, self.found.further_ways):
            for pairs in rounds(list(ports)):
                if self.left() >= TORCH_SECONDS + ROUND_SECONDS:  # the pairs that are left are named
                    self.parallel(partial(self.measure, ways, {a, b}, ports) for a, b in pairs)

    def addresses(self, name: str) -> list[str]:
        """Returns the address at which a host's gloo and NCCL are reached, then those of its further interfaces that no other host has."""
        seen, links = self.found.hosts[name], self.found.hosts[name].facts["interfaces"]
        held = [link["address"] for one in self.found.hosts.values() for link in one.facts.get("interfaces", {}).values()]
        usual = links.get(seen.host.interface, {}).get("address") or seen.host.address
        further = {link["address"] for link in links.values() if link["address"] and held.count(link["address"]) == 1}
        return [usual, *sorted(further - {usual, seen.route.get("address")})]

    def reach(self, seen: Seen, ports: Mapping[str, int]) -> None:
        """Lets one host connect to the others."""
        name, master = seen.host.name, self.inventory.master
        ways = [Pair(name, other, address=address) for other in ports if other != name for address in self.addresses(other)]
        targets = [(pair.address, ports[pair.target]) for pair in ways]
        if name != master.name and master.name in ports and not self.found.port_held:
            targets.append((master.address, self.wanted.port))
        answers = self.ask(seen, "reach", 2 * CONNECT_LIMIT + 2, targets=targets, megabytes=0, timeout=CONNECT_LIMIT).get("ways")
        if answers is None:
            return
        if len(targets) > len(ways):
            self.found.master_port[name] = answers.pop().get("error")
        links = {link["address"]: link_name for link_name, link in seen.facts["interfaces"].items()}
        usual: dict[str, Pair] = {}
        for pair, answer in zip(ways, answers, strict=True):
            pair.error, pair.interface = answer.get("error"), links.get(answer.get("own"))
            first = usual.setdefault(pair.target, pair)
            if pair.interface and first.interface and pair.interface != first.interface:
                self.found.further_ways.append(pair)
        self.found.pairs += usual.values()

    def measure(self, ways: Sequence[Pair], ends: set[str], ports: Mapping[str, int]) -> None:
        """Measures all ways between two hosts, one after the other."""
        for pair in ways:
            if {pair.source, pair.target} == ends and not pair.error:
                target, source = (pair.address, ports[pair.target]), self.found.hosts[pair.source]
                for way in self.ask(source, "reach", 20, targets=[target], megabytes=MEGABYTES, timeout=CONNECT_LIMIT).get(
                    "ways", ()
                ):
                    pair.error, pair.rtt_ms, pair.mbit = way.get("error"), way.get("rtt_ms"), way.get("mbit")

    def sum_over_all(self) -> Summed | None:
        """Lets torch sum over all machines as a training does; not where that can only hang."""
        hosts = self.found.hosts
        if len(hosts) < 2:
            return None
        gpus = all(seen.host.gpus != 0 and seen.software.get("usable_gpus") for seen in hosts.values())
        summed = Summed(backend="nccl" if self.wanted.backend == "nccl" or (self.wanted.backend == "auto" and gpus) else "gloo")
        why_not = [name for name, seen in hosts.items() if not seen.answers or seen.without or not seen.software.get("torch")]
        if why_not:
            summed.skipped = f"{', '.join(f'`{name}`' for name in why_not)} cannot take part"
        elif self.found.port_held or any(self.found.master_port.values()) or any(pair.error for pair in self.found.pairs):
            summed.skipped = "not all ports are open"
        elif self.left() < 3:
            summed.skipped = "no time was left"
        elif summed.backend == "nccl" and not gpus:
            summed.skipped = "NCCL needs a GPU on every machine"
        else:
            summed.megabytes, limit = sum_megabytes(self.found), min(SUM_SECONDS, self.left()) - 1
            self.parallel(partial(self.sum_now, summed, limit, rank, seen) for rank, seen in enumerate(hosts.values()))
            summed.seconds = None if summed.errors else summed.seconds
        return summed

    def sum_now(self, summed: Summed, limit: float, rank: int, seen: Seen) -> None:
        answer = self.ask(
            seen, "all_reduce", limit + 0.5, backend=summed.backend, address=self.inventory.master.address, port=self.wanted.port, rank=rank,
            world=len(self.found.hosts), interface=seen.host.interface or seen.route.get("interface") or "", stated=bool(seen.host.interface),
            megabytes=summed.megabytes, timeout=limit,
        )  # fmt: skip
        if "seconds" in answer:
            summed.seconds = max(summed.seconds or 0.0, answer["seconds"])
        else:
            summed.errors[seen.host.name] = answer.get("error") or seen.lost or "no answer"


def rounds(names: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yields every pair of hosts once, in rounds in which no host stands twice (the circle method of tournaments)."""
    ring: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


# ---- Output


def as_json(examined: Examined, inventory: Inventory, findings: Mapping[str, Sequence[Finding]]) -> dict[str, Any]:
    """Returns everything that was measured and found."""
    found = dataclasses.asdict(examined)
    for name, host in found["hosts"].items():
        host.update(verdict=verdict(findings[name]), findings=[dataclasses.asdict(one) for one in findings[name]])
    return {"ok": all(verdict(some) != "fail" for some in findings.values()), "master": inventory.master.name, **found}


def report(examined: Examined, inventory: Inventory, wanted: Wanted, findings: Mapping[str, Sequence[Finding]]) -> Iterator[str]:
    """Yields the lines: a row for each host, the network, what is wrong with the remedy, the verdict."""
    rows: list[Sequence[str]] = [("host", "verdict", "python", "torch", "GPUs", "free", "clock", "disk free")]
    yield from table(rows + [_row(seen, verdict(findings[name])) for name, seen in examined.hosts.items()])
    yield ""
    yield from _network(examined)
    for name, some in findings.items():
        for one in some:
            yield f"{name}: {one.severity}: {one.text}  [{one.id}]"
            yield f"    remedy: {one.remedy}"
    if any(findings.values()):
        yield ""
    data = f", {len(wanted.data)} of the data, {len(wanted.prepared)} prepared splits" if wanted.data or wanted.prepared else ""
    compared = f"{len(wanted.code)} files of the project{data}"
    yield f"compared: {compared}; port {wanted.port} of `{inventory.master.name}`; {examined.seconds:.1f} s"
    words = [verdict(some) for some in findings.values()]
    noun = "machine" if len(words) == 1 else "machines"
    ok, warned, failed = (words.count(word) for word in ("ok", "warning", "fail"))
    yield f"{len(words)} {noun}: {ok} ok, {warned} with a warning, {failed} cannot take part"


def _row(seen: Seen, word: str) -> tuple[str, ...]:
    if not seen.facts:
        return (seen.host.name, word, *["-"] * 6)
    gpus, skew = list(seen.software.get("gpus") or ()), seen.skew_seconds
    names = [gpu["name"].removeprefix("NVIDIA ").removeprefix("GeForce ") for gpu in gpus]
    shown = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    free = f"{min(gpu['free_bytes'] for gpu in gpus) / GIB:.1f} GiB" if gpus else f"{seen.facts['ram_bytes'] / GIB:.0f} GiB RAM"
    clock = "-" if skew is None else f"{skew * 1e3:+.1f} ms" if abs(skew) < 1 else f"{skew:+.1f} s"
    disk = (seen.facts["disks"]["runs"] or {}).get("free_bytes")
    torch, room = str(seen.software.get("torch") or "-"), "-" if disk is None else f"{disk / GIB:.1f} GiB"
    return (seen.host.name, word, seen.facts["python"], torch, shown, free, clock, room)


def _network(examined: Examined) -> Iterator[str]:
    """Yields the slowest pairs, what a step's gradients would take, and the sum that torch made."""
    pairs = sorted((pair for pair in examined.pairs if pair.mbit is not None), key=lambda pair: pair.mbit or 0)
    if pairs:
        rows = [("from", "to", "round trip", "speed")]
        rows += [(pair.source, pair.target, f"{pair.rtt_ms:.2f} ms", f"{pair.mbit:.0f} Mbit/s") for pair in pairs[:MOST_PAIRS]]
        yield from table(rows)
        if len(pairs) > MOST_PAIRS:
            yield f"and {len(pairs) - MOST_PAIRS} faster ways"
        seconds = sum_seconds(ADAPTERS * 4, len(examined.hosts), pairs[0].mbit or 1)
        size = f"{ADAPTERS / 1e6:.1f} M parameters in fp32 ({ADAPTERS * 4 / 1e6:.0f} MB)"
        yield f"gradients of {size} would take {seconds:.2f} s a step at the slowest speed"
    summed = examined.all_reduce
    if summed and summed.seconds is not None:
        yield f"a sum of {summed.megabytes:g} MiB over all machines ({summed.backend}): {summed.seconds:.3f} s"
    elif summed:
        yield f"a sum over all machines ({summed.backend}): {'not tried, ' + summed.skipped if summed.skipped else 'failed'}"
    if pairs or summed:
        yield ""


# ---- BENCH=1: `make bench` on each machine by itself, all at once


def bench_hosts(inventory: Inventory, loaded: LoadedConfig, able: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Returns host -> the JSON of `make bench`, or `{"error": ...}`, for the hosts of `able`."""
    text = json.dumps(saved_form(loaded))

    def call(host: Host) -> Mapping[str, Any]:
        if host.name not in able:
            return {"error": "not tried: it cannot take part"}
        here = ["env", "-C", str(Path.cwd()), sys.executable, "-c", BENCH]
        words = here if is_here(host) else in_folder(host, [host.python, "-c", BENCH])
        done = run_on(host, inventory, words, input=text, timeout=BENCH_SECONDS)
        if done.code:
            errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
            return {"error": errors[0] if errors else last_word(done.stderr, done.stdout)}
        found: Mapping[str, Any] = json.loads(done.stdout)
        return found

    return on_all(inventory, call)


def bench_report(benched: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines: speed and memory of each machine beside its plan."""
    rows: list[Sequence[str]] = [("alone", "tokens/s", "plan", "memory", "plan")]
    for name, found in benched.items():
        by_unit: dict[str, Any] = {
            row["unit"]: row for row in reversed(found.get("rows", ()))
        }  # the plan's own before this measurement
        if by_unit:
            speed, memory = by_unit["tokens/s"], by_unit["GiB"]
            expected = f"{speed['expected']:,.0f}" if speed["expected"] else "-"
            rows.append(
                (name, f"{speed['measured']:,.0f}", expected, f"{memory['measured']:.1f} GiB", f"{memory['expected']:.1f} GiB")
            )
    yield from table(rows) if len(rows) > 1 else ()
    for name, found in benched.items():
        if "error" in found:
            yield f"{name}: no steps: {found['error']}"
        yield from (f"{name}: note: {note}" for note in found.get("notes", ()))
