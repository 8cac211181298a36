"""`make cluster-check BENCH=1`: `make bench` on each machine by itself, all at once, and what it found there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.cluster.ssh import in_folder, is_here, last_word, on_all, run_on
from sft_play.config.cluster import Host, Inventory
from sft_play.config.load import LoadedConfig, saved_form

SECONDS = 1200.0
"""For one machine, the download of a model that it does not have yet included."""
BOOT = (
    "import pathlib, sys, tempfile; from sft_play.__main__ import main\n"
    "with tempfile.TemporaryDirectory() as folder:\n"
    " config = pathlib.Path(folder, 'config.json'); config.write_text(sys.stdin.read())\n"
    " sys.exit(main(['bench', f'CONFIG={config}', 'JSON=1']))\n"
)
"""The configuration comes by stdin: a file of it need not be there."""
HERE = 'cd "$1" && shift && exec "$@"'


def bench_hosts(inventory: Inventory, loaded: LoadedConfig, able: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Returns host -> the JSON of `make bench`, or `{"error": ...}`, for the hosts of `able`."""
    text = json.dumps(saved_form(loaded))

    def call(host: Host) -> Mapping[str, Any]:
        if host.name not in able:
            return {"error": "not tried: it cannot take part"}
        here = ["sh", "-c", HERE, "sh", str(Path.cwd()), sys.executable, "-c", BOOT]
        words = here if is_here(host) else in_folder(host, [host.python, "-c", BOOT])
        done = run_on(host, inventory, words, input=text, timeout=SECONDS)
        if done.code:
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            return {"error": errors[0].removeprefix("error: ") if errors else last_word(done.stderr, done.stdout)}
        found: Mapping[str, Any] = json.loads(done.stdout)
        return found

    return on_all(inventory, call)


def report(benched: Mapping[str, Mapping[str, Any]], table: Callable[[Sequence[Sequence[str]]], Iterator[str]]) -> Iterator[str]:
    """Yields the lines: speed and memory of each machine beside its plan."""
    rows: list[Sequence[str]] = [("alone", "tokens/s", "plan", "memory", "plan")]
    for name, found in benched.items():
        if "error" in found:
            continue
        by_unit: dict[str, Any] = {row["unit"]: row for row in reversed(found["rows"])}  # the plan's own before this measurement
        speed, memory = by_unit["tokens/s"], by_unit["GiB"]
        expected = f"{speed['expected']:,.0f}" if speed["expected"] else "-"
        sizes = (f"{memory['measured']:.1f} GiB", f"{memory['expected']:.1f} GiB")
        rows.append((name, f"{speed['measured']:,.0f}", expected, *sizes))
    yield from table(rows) if len(rows) > 1 else ()
    for name, found in benched.items():
        if "error" in found:
            yield f"{name}: no steps: {found['error']}"
        yield from (f"{name}: note: {note}" for note in found.get("notes", ()))
