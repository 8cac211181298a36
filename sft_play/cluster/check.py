"""`make cluster-check CLUSTER=`: whether all machines are ready for a run, what is not, and the remedy. Changes nothing anywhere.

`BENCH=1` trains some steps on each of them, which keeps the calibration there that `make bench` keeps.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sft_play.cluster import bench
from sft_play.cluster.examined import Examined, Seen, Wanted, sum_seconds
from sft_play.cluster.finding import Finding, verdict
from sft_play.cluster.findings import GIB, judge
from sft_play.cluster.findings_network import ADAPTERS
from sft_play.cluster.measures import HASH_SECONDS, examine
from sft_play.cluster.own_files import wanted_of
from sft_play.cluster.ssh import is_here
from sft_play.config.call import Call
from sft_play.config.cluster import Inventory, inventory_for_call
from sft_play.errors import UserError, printable

SECONDS = 26.0
"""For everything, the hashing of this machine's files too; what then goes on is ended, within 3 s."""
PORT = 29500
MOST_PAIRS = 12
FAILED = 3


def main(call: Call) -> int:
    """Prints what was found; returns 0, or 3 where a machine cannot take part. Raises `UserError`."""
    began = time.monotonic()
    inventory = inventory_for_call(call)
    given = call.options.get("CONFIG") or call.options.get("RUN")
    if call.overrides and not given:
        raise UserError(f"`{call.overrides[0].origin}` is given, but no configuration", hint="CONFIG=configs/home_lan.yaml")
    if call.flag("BENCH") and not given:
        raise UserError("`BENCH=1` trains some steps, and there is no configuration", hint="CONFIG=configs/home_lan.yaml")
    loaded = call.load_config() if given else None
    config = loaded.config if loaded else None
    wanted = wanted_of(config, call.port("MASTER_PORT") or PORT, HASH_SECONDS)
    hashed = time.monotonic() - began
    examined = examine(inventory, wanted, seconds=SECONDS - hashed)
    examined.seconds += hashed
    findings = judge(examined, inventory, wanted, call.options["CLUSTER"], here=is_here(inventory.master))
    if not call.json:
        print(printable("\n".join(report(examined, inventory, wanted, findings))), flush=True)
    failed = any(verdict(some) == "fail" for some in findings.values())
    benched: Mapping[str, Mapping[str, Any]] = {}
    if loaded and call.flag("BENCH"):
        benched = bench.bench_hosts(inventory, loaded, [name for name, some in findings.items() if verdict(some) != "fail"])
    if call.json:
        print(json.dumps(as_json(examined, inventory, wanted, findings) | ({"bench": benched} if benched else {}), indent=2))
    elif benched:
        print(printable("\n".join(("", *bench.report(benched, _table)))))
    return FAILED if failed or any("error" in found for found in benched.values()) else 0


# ---- Output


def as_json(
    examined: Examined, inventory: Inventory, wanted: Wanted, findings: Mapping[str, Sequence[Finding]]
) -> dict[str, Any]:
    """Returns everything that was measured and found."""
    hosts = {}
    for name, seen in examined.hosts.items():
        known = {key: value for key, value in seen.facts.items() if key != "packages"}
        hosts[name] = {
            "verdict": verdict(findings[name]),
            "findings": [dataclasses.asdict(one) for one in findings[name]],
            "address": seen.host.address,
            "skew_seconds": seen.skew_seconds,
            "ssh_ms": seen.ssh_ms,
            "software": dict(seen.software),
            **known,
        }
    return {
        "ok": all(host["verdict"] != "fail" for host in hosts.values()),
        "seconds": round(examined.seconds, 2),
        "master": inventory.master.name,
        "hosts": hosts,
        "not_compared": {"files": wanted.left_files, "bytes": wanted.left_bytes, "more": wanted.more_left},
        "pairs": [dataclasses.asdict(pair) for pair in examined.pairs],
        "all_reduce": dataclasses.asdict(examined.summed) if examined.summed else None,
    }


def report(examined: Examined, inventory: Inventory, wanted: Wanted, findings: Mapping[str, Sequence[Finding]]) -> Iterator[str]:
    """Yields the lines: a row for each host, the network, what is wrong with the remedy, the verdict."""
    rows: list[Sequence[str]] = [("host", "verdict", "python", "torch", "GPUs", "free", "clock", "disk free")]
    rows += [_row(seen, verdict(findings[name])) for name, seen in examined.hosts.items()]
    yield from _table(rows)
    yield ""
    yield from _network(examined)
    for name, some in findings.items():
        for one in some:
            yield f"{name}: {one.severity}: {one.text}  [{one.id}]"
            yield f"    remedy: {one.remedy}"
    if any(findings.values()):
        yield ""
    compared = f"{len(wanted.code)} files of the project"
    compared += (
        f", {len(wanted.sources)} of the data, {len(wanted.prepared)} prepared splits"
        if wanted.sources or wanted.prepared
        else ""
    )
    yield f"compared: {compared}; port {wanted.port} of `{inventory.master.name}`; {examined.seconds:.1f} s"
    if wanted.left_files or wanted.more_left:
        more = "at least " if wanted.more_left else ""
        told = "" if wanted.prepared else "; after `make data` the prepared rows are compared, by their fingerprint"
        yield f"data not compared: {more}{wanted.left_bytes / 1e9:.1f} GB in {wanted.left_files} file{'' if wanted.left_files == 1 else 's'}{told}"
    counts = [verdict(some) for some in findings.values()]
    failed = counts.count("fail")
    noun = "machine" if len(counts) == 1 else "machines"
    yield f"{len(counts)} {noun}: {counts.count('ok')} ok, {counts.count('warning')} with a warning, {failed} cannot take part"


def _row(seen: Seen, word: str) -> tuple[str, ...]:
    if not seen.facts:
        return (seen.host.name, word, *["-"] * 6)
    gpus = list(seen.software.get("gpus") or ())
    names = [gpu["name"].removeprefix("NVIDIA ").removeprefix("GeForce ") for gpu in gpus]
    shown = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    free = f"{min(gpu['free_bytes'] for gpu in gpus) / GIB:.1f} GiB" if gpus else f"{seen.facts['ram_bytes'] / GIB:.0f} GiB RAM"
    clock = (
        "-"
        if seen.skew_seconds is None
        else f"{seen.skew_seconds * 1e3:+.1f} ms"
        if abs(seen.skew_seconds) < 1
        else f"{seen.skew_seconds:+.1f} s"
    )
    disk = (seen.facts["disks"].get("runs") or {}).get("free_bytes")
    return (
        seen.host.name, word, seen.facts["python"], str(seen.software.get("torch") or "-"), shown, free, clock,
        f"{disk / GIB:.1f} GiB" if disk is not None else "-",
    )  # fmt: skip


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _network(examined: Examined) -> Iterator[str]:
    """Yields the slowest pairs, what a step's gradients would take, and the sum that torch made."""
    pairs = sorted((pair for pair in examined.pairs if pair.mbit is not None), key=lambda pair: pair.mbit or 0)
    if pairs:
        rows = [("from", "to", "round trip", "speed")]
        rows += [(pair.source, pair.target, f"{pair.rtt_ms:.2f} ms", f"{pair.mbit:.0f} Mbit/s") for pair in pairs[:MOST_PAIRS]]
        yield from _table(rows)
        if len(pairs) > MOST_PAIRS:
            yield f"and {len(pairs) - MOST_PAIRS} faster ways"
        seconds = sum_seconds(ADAPTERS * 4, len(examined.hosts), pairs[0].mbit or 1)
        size = f"{ADAPTERS / 1e6:.1f} M parameters in fp32 ({ADAPTERS * 4 / 1e6:.0f} MB)"
        yield f"gradients of {size} would take {seconds:.2f} s a step at the slowest speed"
    summed = examined.summed
    if summed and summed.seconds is not None:
        yield f"a sum of {summed.megabytes:g} MiB over all machines ({summed.backend}): {summed.seconds:.3f} s"
    elif summed:
        yield f"a sum over all machines ({summed.backend}): {'not tried, ' + summed.skipped if summed.skipped else 'failed'}"
    if pairs or summed:
        yield ""
