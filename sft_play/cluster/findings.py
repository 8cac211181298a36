"""What is wrong with a machine of a cluster, and the remedy: each thing that was measured against what a run needs. No effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sft_play.cluster.examined import Examined, Seen, Wanted
from sft_play.cluster.finding import Finding, Severity, listed, optional_hints
from sft_play.cluster.findings_network import network_findings
from sft_play.cluster.ssh import (
    NO_FOLDER,
    NO_PROGRAM,
    NOT_A_PROGRAM,
    SSH_FAILED,
    WITHOUT,
    last_word,
    trouble,
    without_environment,
)
from sft_play.config.cluster import Inventory
from sft_play.plan.torch_check import LACKING_REMEDY, lacking, supports
from sft_play.runs.origin import OPTIONAL, PACKAGES

GIB = 2**30
DISK_FAIL_BYTES = GIB
"""With less, not even logs and a small adapter's checkpoints have room."""
DISK_LOW_BYTES = 10 * GIB
SHM_BYTES = GIB
"""NCCL and data workers pass tensors through /dev/shm."""
NOFILE = 4096
SKEW_FAIL_SECONDS, SKEW_SECONDS = 5.0, 1.0
FREE_SHARE = 0.8
"""Of a GPU's memory; with less free, something else is using it."""
NO_MATTER = ("pip", "setuptools", "wheel")
DRIVERS = {"11": 450, "12": 525, "13": 580}
"""CUDA's major version -> the first driver that runs its programs (NVIDIA's CUDA compatibility table, minor versions included)."""


def judge(
    examined: Examined, inventory: Inventory, wanted: Wanted, cluster: str, *, here: bool = True
) -> dict[str, list[Finding]]:
    """Returns host name -> findings, the worst first; `cluster` is what `CLUSTER=` was,
    `here` whether this machine is the first host."""
    found: dict[str, list[Finding]] = {name: [] for name in examined.hosts}
    reference = next((seen for seen in examined.hosts.values() if seen.facts and not seen.without), None)
    for name, seen in examined.hosts.items():
        found[name] += _start(seen, inventory, cluster)
        if not seen.facts:
            continue
        found[name] += [*_clock(seen), *_system(seen), *_rsync(seen, inventory), *_files(seen, wanted, cluster), *_gpus(seen)]
        if seen.without:
            continue
        if reference is not None and reference is not seen:
            found[name] += _apart(seen, reference, cluster)
        found[name] += _torch(seen)
    _one_machine_twice(examined, found)
    _some_without_gpu(examined, wanted, found)
    _elsewhere(inventory, found, here=here)
    for name, more in network_findings(examined, inventory, wanted).items():
        found[name] += more
    return {name: sorted(some, key=lambda one: one.severity != "fail") for name, some in found.items()}


def _start(seen: Seen, inventory: Inventory, cluster: str) -> Iterator[Finding]:
    """Why its Python did not start, or stopped answering."""
    host, install = seen.host, f"`make cluster-install CLUSTER={cluster}` makes it"
    code = seen.without or (seen.code if seen.start is not None else 0)
    if code == NO_FOLDER:
        text = f"the project's folder `{host.folder}` is not there, so there is no environment either"
        yield Finding(id="no-environment", severity="fail", text=text, remedy=install)
    elif code in (NO_PROGRAM, NOT_A_PROGRAM):
        text = f"no environment: `{host.python}` in `{host.folder}` cannot be started"
        yield Finding(id="no-environment", severity="fail", text=text, remedy=install)
    elif code in WITHOUT:
        why = without_environment(host, code, install)
        yield Finding(id=why.id, severity="fail", text=f"no environment: {why.text}", remedy=why.remedy)
    elif seen.start is not None and seen.code in (SSH_FAILED, -9):
        why = trouble(host, inventory, seen.start)
        yield Finding(id=why.id, severity="fail", text=why.text, remedy=why.remedy)
    elif seen.start is not None:
        text = f"`{host.python}` ended with code {seen.code}: {last_word(seen.start) or 'no word'}"
        yield Finding(id="broken-python", severity="fail", text=text, remedy=f"start it there by hand; {install} anew")
    elif seen.lost is not None:
        text = f"it stopped answering ({seen.lost})"
        yield Finding(id="lost", severity="fail", text=text, remedy="check again; a machine that swaps or sleeps does that")
    for name, reason in seen.refused.items():
        yield Finding(
            id="not-measured", severity="warning", text=f"`{name}` could not be measured: {reason}", remedy="see the reason given"
        )


def _clock(seen: Seen) -> Iterator[Finding]:
    skew = seen.skew_seconds
    if skew is not None and abs(skew) > SKEW_SECONDS:
        yield Finding(
            id="clock", severity="fail" if abs(skew) >= SKEW_FAIL_SECONDS else "warning",
            text=f"its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'} of this machine's",
            remedy="`sudo timedatectl set-ntp true` on both; `timedatectl` then says `synchronized: yes`",
        )  # fmt: skip


def _system(seen: Seen) -> Iterator[Finding]:
    disks: Mapping[str, Any] = seen.facts["disks"]
    told: set[tuple[int, int]] = set()
    for name in ("runs", "cache", "folder"):
        disk = disks.get(name)
        if disk is None:
            continue
        size = (disk["free_bytes"], disk["total_bytes"])
        if not disk["writable"]:
            remedy = "`ls -ld` and `mount` there say why"
            yield Finding(id="read-only", severity="fail", text=f"`{disk['path']}` ({name}) cannot be written to", remedy=remedy)
        if disk["free_bytes"] < DISK_LOW_BYTES and size not in told:
            told.add(size)
            severity: Severity = "fail" if disk["free_bytes"] < DISK_FAIL_BYTES else "warning"
            text = f"the disk of `{disk['path']}` ({name}) has {disk['free_bytes'] / GIB:.2f} of {disk['total_bytes'] / GIB:.1f} GiB free"
            yield Finding(
                id="disk",
                severity=severity,
                text=text,
                remedy="make room, or move it: `SFT_PLAY_CACHE` for the cache, `RUNS_DIR` for runs",
            )
    shm = disks.get("shm")
    if shm and shm["free_bytes"] < SHM_BYTES:
        text = f"/dev/shm has {shm['free_bytes'] / GIB:.2f} GiB free, through which processes of a machine pass tensors"
        yield Finding(
            id="shm",
            severity="warning",
            text=text,
            remedy="`sudo mount -o remount,size=8G /dev/shm`; in a container `--shm-size=8g`",
        )
    if seen.facts["nofile"][0] != -1 and seen.facts["nofile"][0] < NOFILE:
        remedy = f"`ulimit -n {NOFILE}` before the run, or `LimitNOFILE=` of sshd's unit"
        yield Finding(
            id="nofile", severity="warning", text=f"a process may open {seen.facts['nofile'][0]} files only", remedy=remedy
        )
    own = seen.facts["names_itself"]
    if own and all(address.startswith("127.") or address == "::1" for address in own) and not seen.host.interface:
        text = f"its own name, `{seen.facts['host_name']}`, is {', '.join(own)} to it: what asks for its address gets one that no other reaches"
        remedy = (
            f"put `{seen.host.address} {seen.facts['host_name']}` in its /etc/hosts instead, or give `interface` in the inventory"
        )
        yield Finding(id="own-name", severity="warning", text=text, remedy=remedy)


def _rsync(seen: Seen, inventory: Inventory) -> Iterator[Finding]:
    """Code goes to every other machine by rsync, also where runs and cache are shared."""
    if not seen.facts["rsync"] and len(inventory.hosts) > 1:
        what = "bring code and data to the others" if seen.host is inventory.master else "get code and data"
        text = f"there is no `rsync`, by which it would {what}"
        yield Finding(id="rsync", severity="fail", text=text, remedy="on it: `sudo apt install rsync`")


def _files(seen: Seen, wanted: Wanted, cluster: str) -> Iterator[Finding]:
    """Code and data against this machine's."""
    apart = [path for path, digest in wanted.code.items() if path in seen.code_files and seen.code_files[path] != digest]
    if apart:
        text = f"{len(apart)} of the project's {len(wanted.code)} files are not the same as here: {listed(apart)}"
        remedy = f"`make cluster-install CLUSTER={cluster}` copies them, as `make train-cluster` does before each run; by hand: the same commit"
        yield Finding(id="code", severity="fail", text=text, remedy=remedy)
    other = [path for path, digest in wanted.sources.items() if seen.sources.get(path) not in (digest, None)]
    if other:
        text = f"other data than here: {listed(other)}"
        yield Finding(id="data", severity="fail", text=text, remedy="copy the files anew, and `make data` where they are right")
    unread = [path for path in (*wanted.code, *wanted.sources) if path not in seen.code_files and path not in seen.sources]
    if unread and seen.answers and not seen.without and "files" not in seen.refused:
        text = f"{len(unread)} files could not be compared, since it reads them slowly: {listed(unread)}"
        remedy = "check again: what was read once is read faster; else compare `sha256sum` by hand"
        yield Finding(id="not-measured", severity="warning", text=text, remedy=remedy)
    stale = [name for name, mark in wanted.prepared.items() if seen.prepared.get(name) not in (mark, None)]
    if stale:
        text = f"other prepared rows than here: {listed(stale)}"
        yield Finding(
            id="data", severity="fail", text=text, remedy="remove them from its cache; `make train-cluster` brings the right ones"
        )
    missing = [name for name in wanted.prepared if seen.prepared and seen.prepared.get(name) is None]
    if missing and wanted.shared:
        text = f"`data.sync` is `shared`, but its cache `{seen.facts['disks']['cache']['path']}` has no {listed(missing)}"
        yield Finding(
            id="data", severity="fail", text=text, remedy="mount the shared folder there, and point `SFT_PLAY_CACHE` to it"
        )


def _gpus(seen: Seen) -> Iterator[Finding]:
    soft = seen.software
    if not soft:
        return
    gpus, stated = list(soft.get("gpus") or ()), seen.host.gpus
    usable = len(gpus) if seen.without else int(soft.get("usable_gpus") or 0)
    if stated is not None and stated > usable:
        text = f"`gpus: {stated}` in the inventory, but {'its driver shows' if seen.without else 'torch finds'} {usable}" + (
            f" ({len(gpus)} in the machine)" if gpus else ""
        )
        remedy = f"correct `gpus` ({seen.host.place}), or see `make gpu-info` and `make doctor` on it"
        yield Finding(id="gpus", severity="fail", text=text, remedy=remedy)
    elif gpus and not usable and stated != 0 and not soft.get("hidden"):
        text = f"it has {len(gpus)} GPUs, but torch {soft['torch']} cannot use them"
        yield Finding(id="gpus", severity="fail", text=text, remedy="`make doctor` on it says why")
    major = str(soft.get("cuda") or "").partition(".")[0]
    driver = str(soft.get("driver") or "").partition(".")[0]
    if driver.isdigit() and int(driver) < DRIVERS.get(major, 0):
        text = (
            f"driver {soft['driver']} is too old for CUDA {soft['cuda']}, which torch was built with (from {DRIVERS[major]} on)"
        )
        yield Finding(id="driver", severity="fail", text=text, remedy="`sudo ubuntu-drivers install`, then start it anew")
    yield from _without_code(seen, gpus)
    for k, gpu in enumerate(gpus):
        if stated != 0 and gpu["free_bytes"] < FREE_SHARE * gpu["total_bytes"]:
            held = f"; held by {', '.join(gpu['held_by'])}" if gpu["held_by"] else ""
            text = f"GPU {k} ({gpu['name']}) has {gpu['free_bytes'] / GIB:.1f} of {gpu['total_bytes'] / GIB:.1f} GiB free{held}"
            yield Finding(
                id="gpu-memory",
                severity="warning",
                text=text,
                remedy="end what uses it, a desktop's browser included; the plan takes what is free",
            )


def _without_code(seen: Seen, gpus: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Cards that torch has no code for; where `CUDA_VISIBLE_DEVICES` chooses others of the machine, they only could be taken."""
    soft = seen.software
    built = list(soft.get("architectures") or ())
    if not built or seen.host.gpus == 0:
        return
    bad: dict[str, list[str]] = {}
    for gpu in gpus:
        capability = ".".join(map(str, gpu["capability"] or ()))
        if capability and not supports(built, capability):
            bad.setdefault(capability, []).append(gpu["name"])
    chosen = soft.get("hidden") and sum(map(len, bad.values())) < len(gpus)
    for capability, names in sorted(bad.items()):
        text = lacking(soft["torch"], built, ", ".join(sorted(set(names))), capability)
        yield Finding(id="torch-lacks-architecture", severity="warning" if chosen else "fail", text=text, remedy=LACKING_REMEDY)


def _torch(seen: Seen) -> Iterator[Finding]:
    if seen.software.get("error"):
        text = f"torch cannot be imported: {seen.software['error']}"
        yield Finding(id="torch", severity="fail", text=text, remedy="`make install` anew on it (`make cluster-install`)")


def _apart(seen: Seen, reference: Seen, cluster: str) -> Iterator[Finding]:
    """Versions beside those of the first host that answers."""
    here, there = reference.facts, seen.facts
    first, install = f"`{reference.host.name}`", f"`make cluster-install CLUSTER={cluster}` makes them the same"
    if here["python"] != there["python"]:
        minor = here["python"].rpartition(".")[0] != there["python"].rpartition(".")[0]
        text = f"Python {there['python']}, on {first} {here['python']}"
        yield Finding(id="versions", severity="fail" if minor else "warning", text=text, remedy=install)
    soft, other = seen.software, reference.software
    for key, what in (("torch", "torch"), ("cuda", "CUDA of torch"), ("nccl", "NCCL")):
        if soft and other and soft.get(key) != other.get(key) and not soft.get("error"):
            text = f"{what} {soft.get(key) or 'none'}, on {first} {other.get(key) or 'none'}"
            yield Finding(id="versions", severity="fail", text=text, remedy=install)
    mine, theirs = here["packages"], there["packages"]
    apart = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name) and name not in NO_MATTER)
    pinned = [name for name in PACKAGES if name in apart and not (name == "torch" and soft)]
    if pinned:
        text = f"other versions than on {first}: {_versions(pinned, theirs, mine)}"
        remedies = [install] if set(pinned) - set(OPTIONAL) else []
        remedies += optional_hints(seen.host, theirs, mine, f"on {first}")
        yield Finding(id="versions", severity="fail", text=text, remedy="; ".join(remedies))
    if rest := [name for name in apart if name not in PACKAGES]:
        text = f"smaller packages apart from {first}: {_versions(rest, theirs, mine)}"
        remedy = f"{install}, of those that are pinned; no run is refused for the others"
        yield Finding(id="packages", severity="warning", text=text, remedy=remedy)


def _versions(names: Sequence[str], theirs: Mapping[str, str], mine: Mapping[str, str]) -> str:
    return listed([f"{name} {theirs.get(name, 'missing')} (there {mine.get(name, 'missing')})" for name in names], marks="")


def _one_machine_twice(examined: Examined, found: dict[str, list[Finding]]) -> None:
    """Two names that lead to one machine: its GPUs would be asked for twice."""
    first: dict[str, str] = {}
    for name, seen in examined.hosts.items():
        machine = seen.facts.get("machine") if seen.facts else None
        if machine and first.setdefault(machine, name) != name:
            text = f"`{first[machine]}` and `{name}` are one machine, `{seen.facts['host_name']}`"
            remedy = "one entry for each machine; `gpus` says how many of its GPUs take part"
            found[name].append(Finding(id="same-machine", severity="fail", text=text, remedy=remedy))


def _elsewhere(inventory: Inventory, found: dict[str, list[Finding]], *, here: bool) -> None:
    if not here:
        text = "this machine is not the first host, on which `make train-cluster` is typed: rank 0's launcher, logs and checkpoints are there"
        remedy = f"log in there, or put this machine first in `{inventory.path}`"
        found[inventory.master.name].append(Finding(id="master-elsewhere", severity="warning", text=text, remedy=remedy))


def _some_without_gpu(examined: Examined, wanted: Wanted, found: dict[str, list[Finding]]) -> None:
    usable = {
        name: int(seen.software.get("usable_gpus") or 0)
        for name, seen in examined.hosts.items()
        if seen.software and not seen.without
    }
    if not any(usable.values()) and wanted.backend != "nccl":
        return
    for name, count in usable.items():
        known = any(one.id in ("gpus", "torch") for one in found[name])
        if not count and not known and (examined.hosts[name].host.gpus is None or wanted.backend == "nccl"):
            text = "it has no GPU that torch can use, " + (
                "while others have" if any(usable.values()) else "which `launch.backend: nccl` needs"
            )
            found[name].append(
                Finding(id="gpus", severity="fail", text=text, remedy="leave it out of the inventory, or see `make doctor` on it")
            )
