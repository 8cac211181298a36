"""`make cluster-status`, `cluster-logs` and `cluster-stop`: runs under way on the machines of an inventory."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from sft_play.cluster.board import host_speeds, last_row, plan_of, shares
from sft_play.cluster.hosts import NoEnvironment, ask, parse, python_of, refused, request_of, require_master_here
from sft_play.cluster.ssh import is_here, on_all
from sft_play.cluster.task import command, controller, noted
from sft_play.config.call import Call
from sft_play.config.cluster import Host, Inventory, inventory_for_call
from sft_play.errors import HardwareError, UserError
from sft_play.launch import runs
from sft_play.launch.run_folder import NAME_PATTERN, find_run
from sft_play.launch.verdict import describe_stop
from sft_play.launch.watch import is_alive
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.text import table

SECONDS = 20.0
STOP_SECONDS = 27.0
"""For launchers whose controlling command is gone: they have 24 s to save and leave, and longer while a save grows."""
LONGEST_SECONDS = 3700.0
Answer = Mapping[str, Any]


def also() -> list[str]:
    """Returns where this machine keeps runs: other machines may see the same disk."""
    return [str(runs_folder().absolute())]


def asked(inventory: Inventory, run: str | None) -> dict[str, Answer | UserError]:
    """Returns what each machine says of runs under way, or why it cannot be asked."""

    def one(host: Host) -> Answer | UserError:
        try:
            return ask(host, inventory, "status", timeout=SECONDS, run=run, also=also())
        except UserError as error:
            return error

    return on_all(inventory, one)


def main(call: Call) -> int:
    """`make cluster-status`: what runs on each machine, and how far it is; 3 where one cannot be asked."""
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    name = run_named(call.options["RUN"]).name if call.options.get("RUN") else None
    early = [(run, state) for run, state in noted() if name in (None, run.name)]
    answers = asked(inventory, name)
    known = [answer for answer in answers.values() if not isinstance(answer, UserError)]
    nodes = sorted({(one["run"], one["node"]) for answer in known for one in answer["runs"]})
    rows = [
        row for host in inventory.hosts
        for row in _rows(host, answers[host.name], early if host == inventory.master else [], nodes)
    ]  # fmt: skip
    if call.json:
        print(json.dumps(rows))
    else:
        _print(rows)
    return HardwareError.exit_code if any(isinstance(answer, UserError) for answer in answers.values()) else 0


def _rows(
    host: Host, answer: Answer | UserError, early: Sequence[tuple[RunFolder, str]], nodes: Sequence[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
    """Yields what a machine does. `early`: runs that are still prepared, or sent to the others; `nodes`: run and `NODE_RANK` of all launchers."""
    if isinstance(answer, UserError):
        state = "no environment" if isinstance(answer, NoEnvironment) else "unreachable"
        yield {"host": host.name, "address": host.address, "state": state, "error": answer.message, "hint": answer.hint}
        return
    for run, state in early:
        yield {
            "host": host.name, "address": host.address, "state": state, "run": run.name, "node": 0, "ranks": [], "pid": None, "processes": 0,
            "step": None, "steps": None, "tokens_per_second": None, "seconds": None, "last": None, "gpus": answer["gpus"],
        }  # fmt: skip
    if not answer["runs"] and not early:
        yield {"host": host.name, "address": host.address, "state": "idle", "gpus": answer["gpus"]}
    for one in answer["runs"]:
        run = RunFolder(runs_folder() / one["run"])
        row = last_row(run.metrics, time.time() - float(one["seconds"]))
        plan = plan_of(run)
        ranks = shares(run, plan.num_nodes if plan else 0)
        place = [node for name, node in nodes if name == run.name].index(one["node"])
        own = ranks[place] if place < len(ranks) else range(0)
        speeds = host_speeds(row, ranks)
        yield {
            "host": host.name, "address": host.address, "state": "training" if row else "starting", "run": one["run"], "node": one["node"],
            "ranks": list(own), "pid": one["launcher"], "processes": one["processes"], "step": row.get("step"), "steps": plan.steps if plan else None,
            "tokens_per_second": speeds[place] if place < len(speeds) else None, "seconds": one["seconds"],
            "last": one["last"], "gpus": answer["gpus"],
        }  # fmt: skip


def _print(rows: list[dict[str, Any]]) -> None:
    cells = [["host", "state", "run", "ranks", "step", "tokens/s", "processes"]]
    for row in rows:
        speed, step = row.get("tokens_per_second"), row.get("step")
        found = [row["host"], row["state"], row.get("run"), ", ".join(map(str, row.get("ranks", ())))]
        found += [
            f"{step}/{row['steps']}" if step is not None and row["steps"] else "",
            f"{speed:,.0f}" if speed is not None else "",
        ]
        cells.append([cell or "-" for cell in [*found, str(row.get("processes", ""))]])
    print("\n".join(table(cells)))
    for row in rows:
        if row.get("error"):
            print(f"\n{row['error']}" + (f"\n\nhint: {row['hint']}" if row["hint"] else ""), file=sys.stderr)


# ---- Logs


def logs(call: Call) -> int:
    """`make cluster-logs RUN= RANK= FOLLOW=1`: the log of a rank. `train-cluster` gathers them here; of others it comes from their machine."""
    inventory = inventory_for_call(call)
    if not call.options.get("RUN"):
        raise UserError(
            "`make cluster-logs` needs `RUN=name`", hint=f"make cluster-logs CLUSTER={inventory.path} RUN=NAME RANK=1"
        )
    run, rank = find_run(call.options["RUN"]), call.integer("RANK") or 0
    here = replace(call, options={name: text for name, text in call.options.items() if not name.startswith("CLUSTER")})
    if run.rank_log(rank).is_file():
        return runs.logs(here)
    follow = call.flag("FOLLOW")
    there: set[int] = {int(path.stem[4:]) for path in run.logs.glob("rank*.log") if path.stem[4:].isdigit()}
    for host in inventory.hosts:
        if not is_here(host):
            found = _tail(host, inventory, run, rank, follow=follow, as_json=call.json)
            if found is None:
                return 0
            there |= set(found)
    listed = f"there are those of ranks {', '.join(map(str, sorted(there)))}" if there else "its workers have not started yet"
    raise UserError(f"`{run.name}` has no log of rank {rank} on any host that can be reached", hint=listed)


def _tail(host: Host, inventory: Inventory, run: RunFolder, rank: int, *, follow: bool, as_json: bool) -> list[int] | None:
    """Prints a log from its machine and returns `None`; else the ranks of which it has one."""
    process = subprocess.Popen(python_of(host, inventory), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    text = ""
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request_of(host, "tail", run=run.name, rank=rank, follow=follow, also=also()).encode())
            process.stdin.flush()
        for line in iter(process.stdout.readline, b""):
            facts = parse(line.decode("utf-8", "replace")) or {}
            if facts.get("missing"):
                return [int(one) for one in facts["ranks"]]
            text += str(facts.get("text", "")) if as_json else ""
            if not as_json:
                sys.stdout.write(str(facts.get("text", "")))
                sys.stdout.flush()
        if process.wait():
            print(f"left out: {refused(host, inventory, process.returncode, process.stderr.read().decode('utf-8', 'replace')).message}",
                  file=sys.stderr)  # fmt: skip
            return []
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(OSError):
                stream.close()
    if as_json:
        print(json.dumps({"run": str(run.path), "rank": rank, "host": host.name, "text": text}))
    return None


# ---- Stop


def stop(call: Call) -> int:
    """`make cluster-stop RUN=`: asks the command that controls the run to stop all hosts; where it is gone, each host's launcher."""
    inventory = inventory_for_call(call)
    require_master_here(inventory)
    if not call.options.get("RUN"):
        raise UserError("`make cluster-stop` needs `RUN=name`", hint=f"make cluster-stop CLUSTER={inventory.path} RUN=NAME")
    run = run_named(call.options["RUN"])
    process = controller(run)
    if process is not None:
        return _stop_controller(call, inventory, run, process)
    answers = asked(inventory, run.name)
    training = [host for host in inventory.hosts if not isinstance(answers[host.name], UserError) and _runs(answers[host.name])]
    unknown = [error for error in answers.values() if isinstance(error, UserError)]
    if not training:
        seen = f"`make cluster-status CLUSTER={inventory.path}` shows what is under way"
        hint = f"{unknown[0].message}" if unknown else seen
        raise UserError(f"nothing trains `{run.name}` on the hosts that can be reached", hint=hint)
    print(
        f"the command that started `{run.name}` is gone; asking {', '.join(f'`{h.name}`' for h in training)}",
        file=sys.stderr,
        flush=True,
    )
    ended = on_all(
        replace(inventory, hosts=tuple(training)),
        lambda host: ask(host, inventory, "end", timeout=LONGEST_SECONDS, run=run.name, grace=STOP_SECONDS, also=also()),
    )
    left = {name: answer["left"] for name, answer in ended.items() if answer["left"]}
    if call.json:
        print(
            json.dumps(
                {"run": str(run.path), "stopped": list(ended), "left": left, "unreachable": [error.message for error in unknown]}
            )
        )
    else:
        print(f"stopped on {', '.join(f'`{name}`' for name in ended)}\n{command(inventory, run)} goes on")
    for error in unknown:
        print(f"warning: {error.message}", file=sys.stderr)
    return HardwareError.exit_code if left or unknown else 0


def run_named(name: str) -> RunFolder:
    """Returns the run called `name`; also one that has no folder yet, since its command still prepares or sends what it needs."""
    run = RunFolder(runs_folder() / Path(name).name)
    if not run.path.exists() and NAME_PATTERN.fullmatch(run.name) and controller(run) is not None:
        return run
    return find_run(name)


def _runs(answer: Answer | UserError) -> bool:
    return not isinstance(answer, UserError) and bool(answer["runs"])


def _stop_controller(call: Call, inventory: Inventory, run: RunFolder, process: psutil.Process) -> int:
    begun, now = process.create_time() - 0.5, time.time()
    print(f"asking process {process.pid} to stop `{run.name}` on all hosts", file=sys.stderr, flush=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGTERM)
        if process.status() == psutil.STATUS_STOPPED:
            process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + runs.LONGEST_SECONDS
    while is_alive(process):
        if time.monotonic() > deadline:
            raise HardwareError(
                f"process {process.pid} has not left within {runs.LONGEST_SECONDS:.0f} s", hint=f"kill -KILL {process.pid}"
            )
        time.sleep(0.1)
    last = runs.ending(run, 0, begun=begun, asked=now)
    code = int(last.get("code", 1)) if last["event"] in ("failed", "unknown") else 0
    if call.json:
        print(json.dumps({"run": str(run.path), **last}))
    elif last["event"] == "removed":
        print(f"`{run.name}` was stopped before its workers started; nothing was trained, and it has no folder")
    elif last["event"] == "stopped":
        print(f"{describe_stop(last) if 'signal' in last else 'stopped'}\n{command(inventory, run)} goes on")
    else:
        print(f"`{run.name}`: {last['event']}", file=sys.stderr if code else sys.stdout)
    return code
