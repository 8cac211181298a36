"""`make train-cluster`: one run on all machines of an inventory, started, watched, stopped and started again from here.

Reads top to bottom: what was asked, which machines are there and alike, model and data prepared here and brought to them, launchers started over
SSH (the command of `docs/launching.md`, "several machines by hand"), watched until the last has ended, and what came first.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from sft_play.cluster import bring as sync
from sft_play.cluster import cause, elastic, phase, recovering
from sft_play.cluster.agent import Agent, Message, ask
from sft_play.cluster.board import Board, Logs, say, shares
from sft_play.cluster.facts import Facts, shared_variables
from sft_play.cluster.remote import hub_folder
from sft_play.cluster.session import Node, Session
from sft_play.cluster.ssh import ended_with_us, is_here
from sft_play.cluster.task import (
    Task,
    choose_port,
    command,
    controlling,
    disk_errors_told,
    files_folder,
    is_begun,
    node_variables,
    node_words,
    read_task,
)
from sft_play.config.call import Call, Override
from sft_play.config.cluster import Host
from sft_play.config.load import override_config, save_config
from sft_play.errors import HardwareError, UserError, raise_all
from sft_play.launch import recovery
from sft_play.launch.key import VARIABLE, key_here, new_word
from sft_play.launch.node import Stop
from sft_play.launch.preparation import run_preparation
from sft_play.launch.recovery import Restarts
from sft_play.launch.resume import newest_told
from sft_play.launch.run_folder import ended_by_signals, read_events, record_event, stop_code
from sft_play.launch.verdict import LOST, OUT_OF_MEMORY, Outcome
from sft_play.runs.checkpoints import newest_valid, step_of
from sft_play.runs.folder import RunFolder, cache_folder
from sft_play.runs.prepared import Prepared


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """The machines of one start."""

    hosts: Sequence[Host]
    facts: Mapping[str, Facts]

    def away(self) -> list[Host]:
        """Returns those that are other machines."""
        return [host for host in self.hosts if not is_here(host)]


def main(call: Call) -> int:
    """Trains on the machines of `CLUSTER` and returns the exit code: 75 for a lost host, 130 or 143 for a stop on request."""
    task = read_task(call)
    with ended_by_signals(), disk_errors_told(task.run.path), controlling(task.run, task.inventory.path):
        muster = elastic.Muster(task)
        crew = _crew(*muster.for_start())
        if task.call.options.get("MASTER_PORT"):
            choose_port(task, 0)  # a port that is taken is told before anything is prepared
        with phase.noting(task.run, "preparing"):
            prepared = prepare(task)
        outcome = train(task, muster, crew, prepared)
    return finish(task, outcome)


def taken_over(task: Task, attempt: int) -> Task:
    """Returns the task; of a run that was killed before its workers started, one that begins in the folder that was left."""
    left = (task.resuming or attempt > 0) and task.run.path.is_dir() and not is_begun(task.run)
    if not left or task.loaded.config.launch.auto_resume:
        return task
    say(f"`{task.run.name}` had not begun; it begins now")
    given = Override(key="launch.auto_resume", text="true", origin=f"RUN={task.run.name}")
    return replace(task, loaded=override_config(task.loaded, [given]))


def train(task: Task, muster: elastic.Muster, crew: Crew, prepared: Prepared) -> Outcome:
    """Starts the run on its machines, and again after a lost one where that is allowed, or with less at a time when memory ran out."""
    newest = newest_valid(task.run)[0] if is_begun(task.run) else None
    lost = Restarts(limit=0, step=step_of(newest) if newest else 0)
    attempt, retries, resumed, before = 0, 0, resumptions(task.run), crew
    while True:
        task = taken_over(task, attempt)
        crew = supplied(task, muster, crew, prepared, restarted=attempt > 0)
        # What was typed beside RUN= is passed until the launchers have taken it up.
        begun = resumptions(task.run)
        session, returned = start(task, muster, crew, attempt, overrides=task.resuming and begun == resumed)
        outcome = cause.judge(session, shares(task.run, len(crew.hosts)))
        if attempt and 1 <= outcome.code <= 5:
            new = [host for host in crew.hosts if host not in before.hosts] if resumptions(task.run) == begun else []
            outcome = without_sick(muster, crew, session, outcome, new)
        clear_up(task, crew, session)
        grown = session.asked == "grow" and outcome.code == stop_code(15) and not session.stop.wanted
        if grown:
            say(f"\nstarting again with {', '.join(f'`{host.name}`' for host in returned)}")
        elif outcome.cause == OUT_OF_MEMORY and not session.stop.wanted:
            if ended := recovering.with_less(task.run, task.inventory, prepared, outcome, retries):
                return ended
            retries += 1
        elif not _again(task, outcome, lost):
            return lost.refused(outcome) if lost.limit and outcome.code == LOST else outcome
        attempt, before = attempt + 1, crew
        crew = _crew(*muster.for_restart(time.monotonic()))


def without_sick(muster: elastic.Muster, crew: Crew, session: Session, outcome: Outcome, new: Sequence[Host]) -> Outcome:
    """Returns how a start again ended: as a lost machine where one could not start its launcher, or came back (`new`) and no worker began."""
    sick = [node.host for node in session.nodes if node.problem] or [host for host in new if host in crew.hosts]
    for host in sick:
        muster.refuse(
            host, crew.facts[host.name], HardwareError(f"host `{host.name}` failed at the start: {outcome.message[:300]}")
        )
    return replace(outcome, code=LOST, cause="unreachable") if sick else outcome


def resumptions(run: RunFolder) -> int:
    """Returns how often workers of node 0 were started again."""
    return sum(event["event"] == "resumed" and event.get("node", 0) == 0 for event in read_events(run))


def supplied(task: Task, muster: elastic.Muster, crew: Crew, prepared: Prepared, *, restarted: bool) -> Crew:
    """Brings the machines of a start what they lack; where others can do without one that fails, or wait for it, it counts as missing.

    Raises what failed at a first start without `launch.elastic`, and what `Muster` raises when too few are left.
    """
    begun = time.monotonic()
    while True:
        with phase.noting(task.run, "sending"):
            failed = bring(task, crew, prepared)
        if not failed:
            return crew
        if not restarted and task.bounds is None:
            raise_all(list(failed.values()))
        for host in crew.hosts:
            if error := failed.get(host.name):
                say(f"not ready: {error.message}")
                muster.refuse(host, crew.facts[host.name], error)
        crew = _crew(*(muster.for_restart(begun) if restarted else muster.for_start()))


def _crew(hosts: Sequence[Host], facts: Mapping[str, Facts]) -> Crew:
    """Returns the machines, and says which they are."""
    say(f"hosts: {', '.join(f'`{host.name}` ({host.address})' for host in hosts)}")
    return Crew(hosts=hosts, facts=facts)


def _again(task: Task, outcome: Outcome, lost: Restarts) -> bool:
    """Whether to start again after a lost rank or machine; waits out the pause, and says and records why."""
    launch = task.loaded.config.launch
    elastic_too = task.bounds is not None and outcome.cause == "unreachable"
    lost.limit = max(launch.max_restarts, len(task.inventory.hosts)) if elastic_too else launch.max_restarts
    if outcome.code != LOST:
        return False
    checkpoint, damaged = newest_told(task.run) if is_begun(task.run) else (None, [])
    if (damaged and checkpoint is None) or not lost.allows(outcome, checkpoint):
        return False
    say("\n" + recovery.restart_announcement(outcome, checkpoint, lost))
    if is_begun(task.run):
        with contextlib.suppress(OSError):  # what a full disk leaves out here is no reason to end
            record_event(task.run, recovery.RESTARTED, **recovery.restart_facts(outcome, checkpoint))
    elastic.pause(lost.pause())
    return True


# ---- Before


def prepare(task: Task) -> Prepared:
    """Finds the model and prepares the data on this machine, once for all."""
    folder = cache_folder() / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"prepare-{task.run.name}-", dir=folder) as name:
        run = RunFolder(Path(name))
        save_config(task.loaded, run.config)
        run_preparation([sys.executable, "-m", "sft_play.prepare", "--run", str(run.path)])
        return Prepared.load(run.prepared)


def bring(task: Task, crew: Crew, prepared: Prepared) -> dict[str, UserError]:
    """Brings to every machine what it lacks: code, model, prepared rows, and of a run that goes on its newest checkpoint.

    Returns host name -> why it could not be done.
    """
    checkpoint = newest_valid(task.run)[0] if is_begun(task.run) else None
    away = crew.away()
    files = sync.code_files(say) if away else []
    if away:
        what = f"{len(files)} files of the project{'' if task.shared else ', model and data'}"
        say(f"bringing to {len(away)} host{'s' if len(away) > 1 else ''} what they lack: {what}")

    def one(host: Host) -> UserError | None:
        try:
            _bring_to(task, host, crew.facts[host.name], prepared, checkpoint, files)
        except UserError as error:
            return error
        return None

    with ThreadPoolExecutor(max_workers=len(crew.hosts)) as pool, ended_with_us():
        problems = zip(crew.hosts, pool.map(one, crew.hosts), strict=True)
        return {host.name: problem for host, problem in problems if problem is not None}


def _bring_to(task: Task, host: Host, facts: Facts, prepared: Prepared, checkpoint: Path | None, files: Sequence[str]) -> None:
    inventory, there = task.inventory, prepared
    if not is_here(host):
        sync.send_code(host, inventory, files)
        # What an earlier start left there, of a host whose link was cut and is back, would hold the run.
        ask(host, inventory, "end", timeout=60, run=task.run.name, grace=0, variables=shared_variables(task.shared))
        if not task.shared:
            there = sync.send_prepared(host, inventory, facts, task.loaded.config, prepared, hub_folder())
        if is_begun(task.run):
            sync.send_run(host, inventory, facts, task.run, checkpoint)
    with tempfile.TemporaryDirectory() as name:
        save_config(task.loaded, Path(name) / "config.json")
        config = (Path(name) / "config.json").read_text(encoding="utf-8")
    folder = files_folder(facts, task.run, host)
    given = {
        f"{folder}/config.json": config,
        f"{folder}/prepared.json": json.dumps({"run": task.run.name, "prepared": asdict(there)}),
    }
    if task.deepspeed:
        given[f"{folder}/deepspeed.json"] = task.deepspeed
    ask(host, inventory, "write", timeout=60, files=given)


# ---- While it goes on


def start(task: Task, muster: elastic.Muster, crew: Crew, attempt: int, *, overrides: bool) -> tuple[Session, list[Host]]:
    """Starts the launchers and waits for the last to end; returns what is known, and machines that have come back meanwhile."""
    port, resume = choose_port(task, attempt), is_begun(task.run) and (task.resuming or attempt > 0)
    inbox: queue.Queue[Message] = queue.Queue()
    shared = {VARIABLE: key_here() or new_word()} if len(crew.hosts) > 1 else {}
    nodes, streams = [], [not is_here(host) and not crew.facts[host.name].shares_runs for host in crew.hosts]
    for place, host in enumerate(crew.hosts):
        facts = crew.facts[host.name]
        words = node_words(task, crew.hosts, crew.facts, place, port, resume=resume, overrides=overrides)
        request = {
            "argv": words,
            "variables": node_variables(task, host, facts) | shared,
            "run": task.run.name,
            "stream": streams[place],
        }
        agent = Agent(place, host, task.inventory, inbox, token=secrets.token_hex(16), **request)
        nodes.append(Node(host=host, agent=agent))
    missing = [host for host in task.inventory.hosts if host not in crew.hosts]
    growing = task.bounds is not None and len(crew.hosts) < task.most
    returning = elastic.Returning(muster, missing if growing else [], task.run, say)
    console: TextIO = sys.stderr if task.call.json else sys.stdout
    with contextlib.closing(returning):
        session = Session(
            inventory=task.inventory, run=task.run, nodes=nodes, inbox=inbox, logs=Logs(task.run),
            board=Board(task.run, [h.name for h in crew.hosts]), console=console, stop=Stop(), streams=streams, wanted=returning.wanted,
        )  # fmt: skip
        session.watch()
    return session, returning.back


# ---- Afterwards


def clear_up(task: Task, crew: Crew, session: Session) -> None:
    """Ends what is left on machines that can be reached, and brings random states here, so that others can go on with them."""
    if left := cause.strays(session.nodes):
        say(left)
    checkpoint = newest_valid(task.run)[0] if task.run.checkpoints.is_dir() else None

    def one(node: Node) -> None:
        with contextlib.suppress(UserError):  # a machine that is gone: what it has is missing, and drawn anew
            if node.lost or node.code is None:
                ask(
                    node.host,
                    task.inventory,
                    "end",
                    timeout=20,
                    run=task.run.name,
                    grace=0,
                    variables=shared_variables(task.shared),
                )
            if checkpoint is not None:
                sync.fetch_random_states(node.host, task.inventory, crew.facts[node.host.name], task.run, checkpoint)

    away = [node for node in session.nodes if not is_here(node.host)]
    with ThreadPoolExecutor(max_workers=max(1, len(away))) as pool:
        list(pool.map(one, away))


def finish(task: Task, outcome: Outcome) -> int:
    """Says how it ended and what can be done next; returns the exit code. How a stop went, node 0 has said."""
    if outcome.message:
        print(f"\n{outcome.message}", file=sys.stderr)
    if outcome.code in (LOST, 130, 143) and is_begun(task.run):
        print(f"hint: go on with: {command(task.inventory, task.run)}", file=sys.stderr)
    if task.call.json:
        model = str(task.run.model) if task.run.model.is_dir() else None
        print(
            json.dumps(
                {
                    "run": str(task.run.path),
                    "code": outcome.code,
                    "rank": outcome.rank,
                    "error": (outcome.message or None) if outcome.code else None,
                    "model": model,
                }
            )
        )
    return outcome.code
