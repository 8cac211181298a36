"""What the machines of a cluster do: the lines of `train-cluster`; `make cluster-status`, `cluster-logs` and `cluster-stop`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sft_play.cluster.hosts import NoEnvironment, ask, require_master_here
from sft_play.cluster.inventory import Inventory, inventory_for_call
from sft_play.cluster.ssh import on_all, say
from sft_play.cluster.task import command, controller, early_phases, plan_of
from sft_play.config.call import Call
from sft_play.errors import HardwareError, UserError, printable
from sft_play.launch import runs
from sft_play.launch.run_folder import NAME_PATTERN, find_run
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.text import table

LINES_SECONDS = 30.0
"""How often the machines' lines are shown while nothing but the step changes."""
LARGEST_WAITING = 4_000_000
"""Letters of logs that are kept while the run has no folder yet."""
SECONDS = 20.0


# ---- How far a run is


def last_row(path: Path, since: float) -> Mapping[str, Any]:
    """Return the last training row of a `metrics.jsonl` that was written after `since`; empty where there is none."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime < since:
            return {}
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 65536))
            lines = stream.read().decode("utf-8", "replace").splitlines()
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                row: dict[str, Any] = json.loads(line)
                if row.get("kind") == "train":
                    return row
    return {}


def ranks_of(counts: Sequence[int]) -> list[range]:
    """Return the ranks of each machine, of which there are so many."""
    return [range(sum(counts[:place]), sum(counts[: place + 1])) for place in range(len(counts))]


def speed_of(row: Mapping[str, Any], ranks: range) -> float | None:
    """Return the tokens a second of a machine: its ranks' part of the row's."""
    tokens, speed = row.get("rank_tokens") or [], row.get("tokens_per_second")
    return (
        speed * sum(tokens[ranks.start : ranks.stop]) / (sum(tokens) or 1)
        if speed and ranks and len(tokens) >= ranks.stop
        else None
    )


class Board:
    """Prints a machine's line when it has something new, and those of all now and then."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.begun = run, time.time()
        self._shown: dict[str, str] = {}
        self._at, self._row_at = 0.0, -1
        self._before = last_row(run.metrics, 0.0)  # of an earlier start

    def show(self, states: Mapping[str, str]) -> None:
        """Show what is new: host -> `running` (which is `loading`, and `training` once a step has ended), or how its launcher ended."""
        row = last_row(self.run.metrics, self.begun)
        row = {} if row == self._before else row
        now = {name: ("training" if row else "loading") if state == "running" else state for name, state in states.items()}
        step = row.get("step", -1)
        due = time.monotonic() - self._at > LINES_SECONDS and step != self._row_at
        if now == self._shown and not due:
            return
        new = [name for name, state in now.items() if due or self._shown.get(name) != state]
        self._shown, self._row_at = now, step
        self._at = time.monotonic() if due or not self._at else self._at
        plan = plan_of(self.run)
        working = [name for name, state in now.items() if state == "training"]
        ranks = zip(working, ranks_of(plan.ranks_by_node if plan else ()), strict=False)
        say("\n".join(lines(now, new, row, plan.steps if plan else None, {name: speed_of(row, own) for name, own in ranks})))


def lines(
    states: Mapping[str, str], names: Sequence[str], row: Mapping[str, Any], steps: int | None, speeds: Mapping[str, float | None]
) -> Iterator[str]:
    """Yield a line for each of the named machines: state, step, tokens a second."""
    width, at = max(map(len, states)), f"step {row['step']}{f'/{steps}' if steps else ''}" if "step" in row else ""
    for name in names:
        speed = speeds.get(name)
        more = [at, f"{speed:,.0f} tokens/s" if speed is not None else ""] if states[name] == "training" else []
        yield f"  {name:<{width}}  {'  '.join(part for part in [states[name], *more] if part)}".rstrip()


class Logs:
    """Files in a run's `logs/` that machines send in pieces; kept in memory while the run has no folder."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._waiting: dict[str, str] = {}

    def add(self, name: str, text: str) -> None:
        """Append to `logs/NAME`. A full disk leaves a log short, and ends nothing."""
        self._waiting[name] = (self._waiting.get(name, "") + text)[-LARGEST_WAITING:]
        self.flush()

    def flush(self) -> None:
        """Write what waits, where there is a folder by now."""
        if not self._waiting or not self.run.config.is_file():
            return
        for name, text in self._waiting.items():
            with contextlib.suppress(OSError):
                self.run.logs.mkdir(parents=True, exist_ok=True)
                with (self.run.logs / Path(name).name).open("a", encoding="utf-8") as stream:
                    stream.write(text)
        self._waiting.clear()


def last_words(text: str, lines_shown: int = 12) -> str:
    """Return the end of what a launcher printed on stderr, from its last `error:` on."""
    found = printable(text).strip()
    at = found.rfind("error: ")
    return found[at:].strip() if at >= 0 else "\n".join(found.splitlines()[-lines_shown:])


# ---- Status


def main(call: Call) -> int:
    """`make cluster-status`: what runs on each machine, and how far it is; 3 where one cannot be asked."""
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    name = run_named(call.options["RUN"]).name if call.options.get("RUN") else None
    early = [(run, phase) for run, phase in early_phases() if name in (None, run.name)]
    own = str(runs_folder().absolute())  # which other machines may see, too
    answers = on_all(inventory.hosts, lambda host: ask(host, "status", timeout=SECONDS, run=name, own=own))
    known = [answer for answer in answers.values() if not isinstance(answer, UserError)]
    nodes = sorted({(one["run"], one["node"]) for answer in known for one in answer["runs"]})
    rows = [
        {"host": host.name, "address": host.address, **row} for host in inventory.hosts
        for row in rows_of(answers[host.name], early if host == inventory.master else [], nodes)
    ]  # fmt: skip
    if call.json:
        print(json.dumps(rows))
    else:
        _print(rows)
    return HardwareError.exit_code if len(known) < len(answers) else 0


def rows_of(
    answer: Mapping[str, Any] | UserError, early: Sequence[tuple[RunFolder, str]], nodes: Sequence[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
    """Yield what a machine does. `early`: runs that are still prepared, or sent to the others; `nodes`: run and `NODE_RANK` of all launchers."""
    if isinstance(answer, UserError):
        state = "no environment" if isinstance(answer, NoEnvironment) else "unreachable"
        yield {"state": state, "error": answer.message, "hint": answer.hint}
        return
    unknown = dict.fromkeys(("pid", "step", "steps", "loss", "tokens_per_second", "memory_gib", "seconds"))
    for run, state in early:
        yield {**unknown, "state": state, "run": run.name, "node": 0, "ranks": [], "processes": 0}
    if not answer["runs"] and not early:
        yield {"state": "idle"}
    for one in answer["runs"]:
        run = RunFolder(runs_folder() / one["run"])
        row = last_row(run.metrics, time.time() - float(one["seconds"]))
        plan, own = plan_of(run), [node for name, node in nodes if name == run.name]
        counts = plan.ranks_by_node if plan and len(plan.ranks_by_node) == len(own) else [0] * len(own)
        ranks = ranks_of(counts)[own.index(one["node"])]
        yield {
            "state": "training" if row else "starting", "run": one["run"], "node": one["node"],
            "ranks": list(ranks), "memory_gib": row.get("rank_memory_gib", [])[ranks.start : ranks.stop], "loss": row.get("loss"),
            "pid": one["launcher"], "processes": one["processes"], "step": row.get("step"),
            "steps": plan.steps if plan else None, "tokens_per_second": speed_of(row, ranks), "seconds": one["seconds"],
        }  # fmt: skip


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [["host", "state", "run", "ranks", "step", "loss", "tokens/s", "memory (GiB)", "processes"]]
    for row in rows:
        speed, step, loss = row.get("tokens_per_second"), row.get("step"), row.get("loss")
        memory = ", ".join(f"{one:.1f}" for one in row.get("memory_gib") or () if one is not None)
        found = [
            row["host"], row["state"], row.get("run"), ", ".join(map(str, row.get("ranks", ()))),
            f"{step}/{row['steps']}" if step is not None and row["steps"] else "", f"{loss:.4f}" if loss is not None else "",
            f"{speed:,.0f}" if speed is not None else "", memory, str(row.get("processes", "")),
        ]  # fmt: skip
        cells.append([cell or "-" for cell in found])
    print("\n".join(table(cells)))
    for row in rows:
        if row.get("error"):
            print(f"\n{row['error']}" + (f"\n\nhint: {row['hint']}" if row["hint"] else ""), file=sys.stderr)


# ---- Logs, stop


def logs(call: Call) -> int:
    """`make cluster-logs RUN= RANK= FOLLOW=1`: the log of a rank, as `train-cluster` gathers them on the master."""
    require_master_here(inventory := inventory_for_call(call))
    _required_run(call, inventory, " RANK=1")
    return runs.logs(replace(call, options={name: text for name, text in call.options.items() if not name.startswith("CLUSTER")}))


def _required_run(call: Call, inventory: Inventory, more: str = "") -> str:
    if not (name := call.options.get("RUN")):
        hint = f"make {call.command} CLUSTER={inventory.path} RUN=NAME{more}"
        raise UserError(f"`make {call.command}` needs `RUN=name`", hint=hint)
    return name


def stop(call: Call) -> int:
    """`make cluster-stop RUN=`: ask the command that controls the run to stop all hosts; without it launchers end by themselves."""
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    run = run_named(_required_run(call, inventory))
    if process := controller(run):
        return runs.ask_to_leave(call, run, [process], 0, f"{command(inventory, run)} resumes it")
    raise UserError(
        f"no command of this machine trains `{run.name}`",
        hint=f"launchers without it save and leave by themselves; `make cluster-status CLUSTER={inventory.path}` shows them",
    )


def run_named(name: str) -> RunFolder:
    """Return the run called `name`; also one that has no folder yet, since its command still prepares or sends what it needs."""
    run = RunFolder(runs_folder() / Path(name).name)
    if not run.path.exists() and NAME_PATTERN.fullmatch(run.name) and controller(run) is not None:
        return run
    return find_run(name)
