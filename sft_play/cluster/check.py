"""`make cluster-check CLUSTER=`: report whether all machines are ready for a run, with a remedy for each problem.

It compares the facts that `make doctor JSON=1` prints on each machine and changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sft_play.cluster.inventory import Host, Inventory, inventory_for_call
from sft_play.cluster.ssh import (
    arguments,
    ask,
    last_word,
    on_all,
    program,
    require_master_here,
    run,
    start,
    trouble,
)
from sft_play.config.call import Call
from sft_play.config.reader import Count, record_of
from sft_play.errors import HardwareError, UserError, printable, raise_all
from sft_play.launch.environment import PORT, holder_of
from sft_play.plan.hardware import GIB, network_speed
from sft_play.runs.folder import cache_folder, runs_folder
from sft_play.runs.origin import OPTIONAL, PACKAGES
from sft_play.text import Finding, finding_lines, plural, table

CONNECT_SECONDS, SEND_SECONDS = 5, 1.0
"""Time limit of a connection to the master's port; duration of the transfer that measures its speed."""
CHUNK = os.urandom(2**18)
"""Random bytes, so that a compressing tunnel does not look fast."""
FREE_SHARE = 0.8
"""Share of a GPU's memory; with less free, another program is using it."""
SLOW_MBIT, OF_STATED = 500.0, 0.6
"""Least speed of a gigabit line (slower ones have a bad cable, 100 Mbit/s or Wi-Fi), and least share of the inventory's
`network`.
"""
OF_ONE_MACHINE = ("package-version", "no-compiler", "no-ninja")
"""Findings of `make doctor` that do not matter to a run on several machines, whose versions are compared here."""
CONNECT = 'exec 3<>"/dev/tcp/$1/$2" && cat <&3 >/dev/null && echo >&3'
"""Reads everything from an address and port, then answers (bash)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """A GPU."""

    name: str
    memory_bytes: Count
    free_bytes: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One machine's facts by its own `make doctor` (`doctor.machine`); paths are absolute paths there."""

    host_name: str
    identity: str
    """Unique among running machines, whatever their host names."""
    system: str
    versions: Mapping[str, str]
    driver: str | None
    gpus: list[GpuFacts]
    """GPUs that a process in its environment sees."""
    interfaces: list[str]
    rsync: bool
    home: str
    folder: str
    runs: str
    cache: str
    hub: str
    """Cache of huggingface_hub."""

    @property
    def python(self) -> str:
        """The minor version of its Python, such as `3.11`."""
        return self.versions["python"].rpartition(".")[0]


@dataclass(slots=True)
class HostReport:
    """One host's facts and findings."""

    host: Host
    facts: Facts | None = None
    """`None` if it cannot be reached; a finding gives the reason."""
    findings: list[Finding] = field(default_factory=list)
    mbit: float | None = None
    """Measured speed from the master to it."""

    def add(self, name: str, text: str, remedy: str, *, fails: bool = True) -> None:
        self.findings.append(Finding(name, "fail" if fails else "warning", text, remedy))

    @property
    def verdict(self) -> str:
        """`ok`, `warning` or `fail`."""
        severities = {finding.severity for finding in self.findings}
        return "fail" if "fail" in severities else "warning" if severities else "ok"


def ask_doctor(host: Host, shared: Mapping[str, str]) -> HostReport:
    """Run `make doctor` on one host and return its report, offline, since only the master needs the hub."""
    answer = HostReport(host)
    words = program(host, ["doctor", "JSON=1"], {**shared, "HF_HUB_OFFLINE": "1"})
    code, out, err = run(arguments(host, ["timeout", "60", *words]))
    try:
        report = json.loads(out)
    except ValueError:
        answer.findings.append(trouble(host, code, err, out.decode(errors="replace")))
        return answer
    try:
        answer.facts = record_of(report["machine"], Facts)
    except (LookupError, ValueError):
        text, remedy = f"the project in `{host.folder}` is another version", f"cluster-install CLUSTER={host.cluster}"
        answer.add("versions", text, f"`make {remedy}` brings this one")
    for finding in report["findings"]:
        if finding["severity"] != "note" and finding["id"] not in OF_ONE_MACHINE:
            fails = finding["severity"] == "error"
            answer.add(finding["id"], finding["text"], finding["remedy"], fails=fails)
    return answer


def compare(inventory: Inventory, *, shared: Mapping[str, str], backend: str) -> list[HostReport]:
    """Query all hosts in parallel and return their reports; `shared` are the variables of folders that all must see,
    `backend` is the run's.
    """
    with mark_in(*shared.values()) as marks:
        asked = on_all(inventory.hosts, lambda host: ask_doctor(host, shared))
        raise_all([result for result in asked.values() if isinstance(result, UserError)])
        answers = [result for result in asked.values() if isinstance(result, HostReport)]
        unseen = on_all(
            [answer.host for answer in answers if answer.facts and marks], lambda host: _unseen(host, marks)
        )
    first = next((answer for answer in answers if answer.facts), None)
    for answer in answers:
        if answer.facts and first and first.facts:
            _compare(answer, answer.facts, first.host, first.facts)
            _look_at_cards(answer, answer.facts, answers, backend)
            _look_at_system(answer, answer.facts, alone=len(answers) == 1)
        if folders := unseen.get(answer.host.name):
            text = f"`data.sync` is `shared`, but it does not see this machine's folders of {folders}"
            remedy = "mount them there at the same place (RUNS_DIR, SFT_PLAY_CACHE), or take `data.sync: rsync`"
            answer.add("not-shared", text, remedy)
    return answers


def _compare(answer: HostReport, facts: Facts, first: Host, ours: Facts) -> None:
    """Report where a machine differs from the first that answered."""
    host = answer.host
    if host is not first and facts.identity == ours.identity:
        text = f"`{first.name}` and `{host.name}` are one machine, `{facts.host_name}`"
        answer.add("same-machine", text, "one entry for each machine; `gpus` says how many of its GPUs take part")
    if differences := other_versions(ours, facts):
        remedy = versions_remedy(differences, f"`make cluster-install CLUSTER={host.cluster}` makes them the same")
        text = f"other versions than on `{first.name}`: {', '.join(differences.values())}"
        answer.add("versions", text, remedy)
    if facts.driver and ours.driver and facts.driver != ours.driver:
        text = f"its NVIDIA driver is {facts.driver}, that of `{first.name}` {ours.driver}"
        answer.add("driver", text, "install the same one; different ones mostly work together", fails=False)


def other_versions(ours: Facts, theirs: Facts) -> dict[str, str]:
    """Return name -> both versions in words, for packages that affect results or communication and differ."""
    here, there = ({**facts.versions, "Python": facts.python} for facts in (ours, theirs))
    names = [name for name in ("Python", *PACKAGES) if here.get(name) != there.get(name)]
    return {name: f"{name} {there.get(name, 'missing')} (there {here.get(name, 'missing')})" for name in names}


def versions_remedy(names: Mapping[str, str], install: str) -> str:
    """Return how to install the same versions on a host; `install` is the remedy for pinned packages."""
    optional = " and ".join(name for name in names if name in OPTIONAL)
    return (
        f"install the same version of {optional} on all machines with pip, or on none; {install}"
        if optional
        else install
    )


def _look_at_cards(answer: HostReport, facts: Facts, answers: Sequence[HostReport], backend: str) -> None:
    stated, count = answer.host.gpus, len(facts.gpus)
    reasons = {
        f"`gpus: {stated}` in the inventory": stated is not None,
        "other hosts have GPUs": any(other.facts.gpus for other in answers if other.facts),
        "`launch.backend: nccl` needs GPUs": backend == "nccl",
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why and count < (1 if stated is None else stated):
        remedy = f"correct `gpus` ({answer.host.place}), or see `make gpu-info` and `make doctor` on it"
        answer.add("gpus", f"{why}, but its driver shows {count}", remedy)
    for number, card in enumerate(facts.gpus if stated != 0 else ()):
        if card.free_bytes < FREE_SHARE * card.memory_bytes:
            sizes = f"{card.free_bytes / GIB:.1f} of {card.memory_bytes / GIB:.1f} GiB free"
            remedy = "end what uses it (`nvidia-smi` there), a desktop's browser included; the plan takes what is free"
            answer.add("gpu-memory", f"GPU {number} ({card.name}) has {sizes}", remedy, fails=False)


def _look_at_system(answer: HostReport, facts: Facts, *, alone: bool) -> None:
    host = answer.host
    if facts.system != "Linux":
        answer.add("no-linux", f"it runs {facts.system}", "omit it from the inventory: runs need Linux")
    if not facts.rsync and not alone:
        text = "there is no `rsync`, by which code and data come from the first host to the others"
        answer.add("rsync", text, "on it: `sudo apt install rsync`")
    if host.interface and host.interface not in facts.interfaces:
        text = f"there is no interface `{host.interface}`; it has {', '.join(f'`{name}`' for name in facts.interfaces)}"
        answer.add("interface", text, f"correct `interface` ({host.place}), or omit it")


# ---- Folders that all must see


def shared_folders(sync: str) -> dict[str, str]:
    """Return the variables of the shared folders of runs and cache, if `data.sync` is `shared`."""
    folders = {"RUNS_DIR": str(runs_folder().absolute()), "SFT_PLAY_CACHE": str(cache_folder().absolute())}
    return folders if sync == "shared" else {}


@contextlib.contextmanager
def mark_in(*folders: str) -> Iterator[list[Path]]:
    """Yield files put into `folders`, by which another machine recognises that it sees the same folders."""
    marks = [Path(folder) / f".seen-{secrets.token_hex(8)}" for folder in folders]
    try:
        for mark in marks:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        yield marks
    finally:
        for mark in marks:
            with contextlib.suppress(OSError):
                mark.unlink()


def _unseen(host: Host, marks: Sequence[Path]) -> str:
    """Return the variables whose folders a host does not see."""
    script = 'for mark; do [ -e "$mark" ] || echo "$mark"; done'
    missing = ask(host, ["sh", "-c", script, "sh", *map(str, marks)], "folders cannot be looked at").split("\n")
    names = zip(("`RUNS_DIR`", "`SFT_PLAY_CACHE`"), map(str, marks), strict=True)
    return ", ".join(name for name, mark in names if mark in missing)


# ---- The master's port


def measure(answers: Sequence[HostReport], inventory: Inventory, port: int) -> None:
    """Let each host in turn connect to the master's port, and measure the speed."""
    master, others = answers[0], [answer for answer in answers[1:] if answer.facts]
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        text = f"port {port}, at which the machines meet, cannot be opened{holder_of(port)}: {error.strerror}"
        master.add("port-taken", text, "end what has it, or choose another port: MASTER_PORT=29501")
        return
    closed: dict[str, str] = {}
    with server:
        server.settimeout(CONNECT_SECONDS)
        for answer in others:
            answer.mbit, why = _send_to(answer.host, server, inventory.master.address, port)
            if why:
                closed[answer.host.name] = f"`sudo ufw allow from {answer.host.address} to any port {port} proto tcp`"
                reason = why
    if closed:
        names = ", ".join(f"`{name}`" for name in closed)
        text = f"port {port} of this host, at which the machines meet, is closed to {names} ({reason})"
        remedy = f"on it: {', '.join(closed.values())} (or the same with nft or firewalld), and the ports above 1024"
        master.add("port-closed", text, remedy)
    stated = network_speed(inventory.network, str(inventory.path)) * 8 / 1e6 if inventory.network else None
    for answer in others:
        if answer.mbit is not None and answer.mbit < (stated * OF_STATED if stated else SLOW_MBIT):
            why = f"the inventory says `{inventory.network}`" if stated else "less than gigabit Ethernet"
            text = f"`{master.host.name}` -> `{answer.host.name}`: {answer.mbit:.0f} Mbit/s, {why}"
            remedy = "cable, switch and `ethtool` speed; else see docs/slow-networks.md"
            answer.add("slow-network", text, remedy, fails=False)


def _send_to(host: Host, server: socket.socket, address: str, port: int) -> tuple[float | None, str]:
    """Return the speed from here to `host` in Mbit/s, or `None` and why it cannot connect."""
    words = ["timeout", f"{3 * CONNECT_SECONDS}", "bash", "-c", CONNECT, "bash", address, str(port)]
    argv = arguments(host, words)
    with start(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            with server.accept()[0] as link:
                link.settimeout(2 * CONNECT_SECONDS)
                began, size = time.perf_counter(), 0
                while time.perf_counter() - began < SEND_SECONDS:
                    link.sendall(CHUNK)
                    size += len(CHUNK)
                link.shutdown(socket.SHUT_WR)
                link.recv(1)
                return size * 8 / 1e6 / (time.perf_counter() - began), ""
        except OSError:
            process.kill()
            message = last_word(process.stderr.read().decode(errors="replace"))
            return None, message.rpartition(": ")[2] or "no answer"
        finally:
            process.kill()


# ---- The command


def main(call: Call) -> int:
    """Print the findings; return 0, or 3 if a machine cannot take part. Raise `UserError`."""
    began = time.monotonic()
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    named = call.options.get("CONFIG") or call.options.get("RUN")
    if not named and call.overrides:
        text = f"`{call.overrides[0].origin}` is given, and there is no configuration"
        raise UserError(text, hint="CONFIG=configs/home_lan.yaml")
    config = call.load_config().config if named else None
    port = call.port("MASTER_PORT") or PORT
    shared = shared_folders(config.data.sync if config else "rsync")
    answers = compare(inventory, shared=shared, backend=config.launch.backend if config else "auto")
    if answers[0].facts and len(answers) > 1:
        measure(answers, inventory, port)
    for answer in answers:
        answer.findings.sort(key=lambda finding: finding.severity != "fail")
    verdicts = [answer.verdict for answer in answers]
    if call.json:
        hosts = {answer.host.name: {"verdict": answer.verdict, **asdict(answer)} for answer in answers}
        print(json.dumps({"ok": "fail" not in verdicts, "hosts": hosts}, indent=2, default=str))
    else:
        rows = [("host", "verdict", "python", "torch", "GPUs", "free", "driver", f"from {answers[0].host.name}")]
        print(*table(rows + [_row(answer) for answer in answers]), "", sep="\n")
        for answer in answers:
            print(
                *map(printable, finding_lines(answer.findings, f"{answer.host.name}: ")),
                sep="\n",
                end="\n" * bool(answer.findings),
            )
        counts = f"{verdicts.count('ok')} ok, {verdicts.count('warning')} with a warning, {verdicts.count('fail')}"
        seconds = time.monotonic() - began
        print(f"{plural(len(answers), 'machine')}: {counts} cannot take part; port {port}; {seconds:.1f} s")
    return HardwareError.exit_code if "fail" in verdicts else 0


def _row(answer: HostReport) -> tuple[str, ...]:
    if not (facts := answer.facts):
        return (answer.host.name, answer.verdict, *["-"] * 6)
    names = [card.name.removeprefix("NVIDIA ").removeprefix("GeForce ") for card in facts.gpus]
    cards = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    free = f"{min(card.free_bytes for card in facts.gpus) / GIB:.1f} GiB" if facts.gpus else "-"
    speed = f"{answer.mbit:.0f} Mbit/s" if answer.mbit is not None else "-"
    torch = facts.versions.get("torch", "-")
    return (answer.host.name, answer.verdict, facts.python, torch, cards, free, facts.driver or "-", speed)
