"""What the machines of a cluster do: the lines of `train-cluster`; `make cluster-status`, `cluster-logs` and
`cluster-stop`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.cluster.hosts import NoEnvironment, ask, on_all, print_line, require_master_here
from sft_play.cluster.inventory import Inventory, inventory_for_call
from sft_play.cluster.task import command, controlled_runs, controller, plan_of
from sft_play.config.call import Call
from sft_play.errors import HardwareError, UserError
from sft_play.launch import runs
from sft_play.launch.run_folder import NAME_PATTERN, find_run
from sft_play.launch.watch import Follower
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.text import table

LINES_SECONDS = 30.0
"""How often the machines' lines are shown while nothing but the step changes."""
LARGEST_WAITING = 4_000_000
"""Letters of logs that are kept while the run has no folder yet."""
SECONDS = 20.0


# ---- How far a run is


def last_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the last training row; empty where there is none."""
    return next((row for row in reversed(rows) if row.get("kind") == "train"), {})


def ranks_of(run: RunFolder, position: int) -> range:
    """Return the ranks of a machine, which has this position among those that take part; none where there is no plan
    yet.
    """
    plan = plan_of(run)
    counts = plan.ranks_by_node if plan else ()
    return range(sum(counts[:position]), sum(counts[: position + 1]))


def speed_of(row: Mapping[str, Any], ranks: range) -> float | None:
    """Return the tokens a second of a machine: its ranks' part of the row's."""
    tokens, speed = row.get("rank_tokens") or [], row.get("tokens_per_second")
    own = tokens[ranks.start : ranks.stop]
    return speed * sum(own) / (sum(tokens) or 1) if speed and own else None


class Board:
    """Prints the machines' lines when one of them has another state, and now and then."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.metrics = run, Follower(run.metrics)
        self.before = last_row(self.metrics.look())  # of an earlier start
        self.shown: Mapping[str, str] = {}
        self.due = 0.0

    def show(self, states: Mapping[str, str]) -> None:
        """`states`: host -> `running` (which is `loading`, and `training` once a step has ended), or how its launcher
        ended.
        """
        row = last_row(self.metrics.look())
        row = {} if row == self.before else row
        now = {
            name: ("training" if row else "loading") if state == "running" else state for name, state in states.items()
        }
        if now == self.shown and (not row or time.monotonic() < self.due):
            return
        self.shown, self.due = now, time.monotonic() + LINES_SECONDS
        plan = plan_of(self.run)
        of_all = f"/{plan.steps}" if plan and plan.steps else ""
        rows = []
        working = [name for name, state in now.items() if state == "training"]
        for name, state in now.items():
            speed = speed_of(row, ranks_of(self.run, working.index(name))) if name in working else None
            step = f"step {row['step']}{of_all}" if name in working else ""
            rows.append([f"  {name}", state, step, f"{speed:,.0f} tokens/s" if speed is not None else ""])
        print_line("\n".join(table(rows)))


class Logs:
    """Files in a run's `logs/` that machines send in pieces; kept in memory while the run has no folder."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.waiting: dict[str, str] = {}

    def add(self, name: str, text: str) -> None:
        """Append to `logs/NAME`."""
        self.waiting[name] = (self.waiting.get(name, "") + text)[-LARGEST_WAITING:]

    def flush(self) -> None:
        """Write what waits, where there is a folder by now. A full disk leaves a log short, and ends nothing."""
        if not self.run.config.is_file():
            return
        for name, text in self.waiting.items():
            with contextlib.suppress(OSError):
                self.run.logs.mkdir(parents=True, exist_ok=True)
                with (self.run.logs / Path(name).name).open("a", encoding="utf-8") as stream:
                    stream.write(text)
        self.waiting.clear()


# ---- Status


def main(call: Call) -> int:
    """`make cluster-status`: what runs on each machine, and how far it is; 3 where one cannot be asked."""
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    name = run_named(call.options["RUN"]).name if call.options.get("RUN") else None
    own = [run.name for run in controlled_runs() if name in (None, run.name)]
    answers = on_all(inventory.hosts, lambda host: ask(host, "status", timeout=SECONDS, run=name))
    nodes = sorted(
        {(one["run"], one["node"]) for known in answers.values() if isinstance(known, dict) for one in known["runs"]}
    )
    rows = [
        {"host": host.name, "address": host.address, **row}
        for host in inventory.hosts
        for row in rows_of(answers[host.name], own if host == inventory.master else [], nodes)
    ]
    if call.json:
        print(json.dumps(rows))
    else:
        _print(rows)
    return HardwareError.exit_code if any(isinstance(answer, UserError) for answer in answers.values()) else 0


def rows_of(
    answer: Mapping[str, Any] | UserError, controlled: Sequence[str], nodes: Sequence[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
    """Yield what a machine does. `controlled`: runs of which it has the command; `nodes`: run and `NODE_RANK` of all
    launchers.
    """
    if isinstance(answer, UserError):
        state = "no environment" if isinstance(answer, NoEnvironment) else "unreachable"
        yield {"state": state, "error": answer.message, "hint": answer.hint}
        return
    launched = [one["run"] for one in answer["runs"]]
    preparing = [run for run in controlled if run not in launched]
    yield from ({"state": "preparing", "run": run} for run in preparing)
    if not launched and not preparing:
        yield {"state": "idle"}
    for one in answer["runs"]:
        run, since = RunFolder(runs_folder() / one["run"]), time.time() - float(one["seconds"])
        is_new = run.metrics.is_file() and run.metrics.stat().st_mtime > since
        row, plan = last_row(Follower(run.metrics).look()) if is_new else {}, plan_of(run)
        ranks = ranks_of(run, [node for name, node in nodes if name == run.name].index(one["node"]))
        yield {
            "state": "training" if row else "starting",
            "run": one["run"],
            "node": one["node"],
            "ranks": list(ranks),
            "step": row.get("step"),
            "steps": plan.steps if plan else None,
            "loss": row.get("loss"),
            "tokens_per_second": speed_of(row, ranks),
            "memory_gib": row.get("rank_memory_gib", [])[ranks.start : ranks.stop],
            "processes": one["processes"],
            "seconds": one["seconds"],
        }


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [["host", "state", "run", "ranks", "step", "loss", "tokens/s", "memory (GiB)", "processes"]]
    for row in rows:
        speed, step, loss = row.get("tokens_per_second"), row.get("step"), row.get("loss")
        found = [
            row["host"],
            row["state"],
            row.get("run"),
            ", ".join(map(str, row.get("ranks", ()))),
            f"{step}/{row['steps'] or '?'}" if step is not None else "",
            f"{loss:.4f}" if loss is not None else "",
            f"{speed:,.0f}" if speed is not None else "",
            ", ".join(f"{one:.1f}" for one in row.get("memory_gib", ()) if one is not None),
            str(row.get("processes", "")),
        ]
        cells.append([cell or "-" for cell in found])
    print("\n".join(table(cells)))
    for row in rows:
        if "error" in row:
            print(f"\n{UserError(row['error'], hint=row['hint']).render()}", file=sys.stderr)


# ---- Logs, stop


def logs(call: Call) -> int:
    """`make cluster-logs RUN= RANK= FOLLOW=1`: the log of a rank, as `train-cluster` gathers them on the master."""
    require_master_here(inventory := inventory_for_call(call))
    _require_run(call, inventory, " RANK=1")
    return runs.logs(call)


def _require_run(call: Call, inventory: Inventory, more: str = "") -> str:
    if not (name := call.options.get("RUN")):
        hint = f"make {call.command} CLUSTER={inventory.path} RUN=NAME{more}"
        raise UserError(f"`make {call.command}` needs `RUN=name`", hint=hint)
    return name


def stop(call: Call) -> int:
    """`make cluster-stop RUN=`: ask the command that controls the run to stop all hosts; without it launchers end by
    themselves.
    """
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    run = run_named(_require_run(call, inventory))
    if process := controller(run):
        return runs.ask_to_leave(call, run, [process], 0, f"{command(inventory, run)} resumes it")
    raise UserError(
        f"no command of this machine trains `{run.name}`",
        hint=(
            f"launchers without it save and leave by themselves; `make cluster-status CLUSTER={inventory.path}` shows"
            " them"
        ),
    )


def run_named(name: str) -> RunFolder:
    """Return the run called `name`; also one that has no folder yet, since its command still prepares or sends what it
    needs.
    """
    run = RunFolder(runs_folder() / Path(name).name)
    if not run.path.exists() and NAME_PATTERN.fullmatch(run.name) and controller(run) is not None:
        return run
    return find_run(name)
