"""`make train-cluster`: one run on all machines of an inventory, started, watched and stopped from here.

On every machine the command that a person would type there is started over SSH. The launchers meet in the store that node 0's serves on this
machine (`launch.rendezvous`): who takes part, what came first, whether all start again, with how many and with how much, is settled there.
This command prepares and brings what the machines lack, shows what they say, starts a launcher where one is missing, and ends as node 0's does.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sft_play.cluster import bring
from sft_play.cluster.hosts import MOST_WAITING, Inbox, Session
from sft_play.cluster.inventory import Host
from sft_play.cluster.probe import Facts
from sft_play.cluster.ssh import SSH_FAILED, is_here, on_all, say
from sft_play.cluster.status import Board, Logs, last_words
from sft_play.cluster.task import (
    Task,
    choose_port,
    chosen,
    command,
    controlling,
    is_begun,
    judged,
    node_variables,
    node_words,
    prepare,
    read_task,
    supplied,
    supply,
    taken_over,
)
from sft_play.config.call import Call
from sft_play.errors import HardwareError, UserError
from sft_play.files import disk_errors_told
from sft_play.launch.environment import VARIABLE, key_here, new_word
from sft_play.launch.node import Stop, hear_signals
from sft_play.launch.process import ended_by_signals, stop_code
from sft_play.launch.run_folder import read_events
from sft_play.launch.verdict import LOST
from sft_play.launch.watch import is_terminal, live_panel
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared
from sft_play.runs.progress import PANEL

TICK_SECONDS = 0.2
POLL_SECONDS = 10.0
"""How often a machine that is missing is asked whether it is there again."""
GRACE_SECONDS = 10.0
"""How long node 0 may take to say why a machine could not begin."""
LEAVE_SECONDS = 2.0
"""How long the others may take to end after node 0, which waits for all that answer."""
STATES_SECONDS = 6.0
"""How long a machine may take to hand over the random states of its ranks; without them they are drawn again."""
MOST_STARTS, EARLY_SECONDS = 3, 60.0
"""How often in a row a machine's launcher may fail within so many seconds before it is not started again."""
ENDS = {0: "finished", 130: "stopped", 143: "stopped", -9: "killed"}


def main(call: Call) -> int:
    """Train on the machines of `CLUSTER` and return the exit code: that of node 0's launcher."""
    task = read_task(call)
    with (
        ended_by_signals(),
        disk_errors_told(task.run.path, lambda full, _: "`df` says what is full" if full else "`mount` and `dmesg` may say why"),
        controlling(task.run, task.inventory.path) as note,
    ):
        facts = chosen(task)
        port = choose_port(task)  # one that is taken is reported before anything is prepared
        task = taken_over(task)
        note("preparing")
        prepared = prepare(task)
        note("sending")
        crew = supplied(task, facts, prepared)
        note("")
        code, message = Control(task=task, prepared=prepared, port=port).train(crew)
    return finish(task, code, message)


# ---- While it goes on


@dataclass(kw_only=True, slots=True)
class Member:
    """A machine whose launcher was started, at its `NODE_RANK`."""

    host: Host
    facts: Facts
    session: Session
    code: int | None = None
    """How its launcher ended; -1 where it could not be started, or its connection has ended."""
    why: str = ""
    """What is known of that."""
    words: str = ""
    """The end of what it printed on stderr."""
    started: bool = False
    detached: bool = False
    """Its connection has ended, and its launcher may live."""
    begun: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0

    @property
    def state(self) -> str:
        if self.code is None:
            return "running"
        return self.why or ENDS.get(self.code, f"ended with code {self.code}")


@dataclass(kw_only=True, slots=True)
class Control:
    """The launchers of one command."""

    task: Task
    prepared: Prepared
    port: int
    count: int = 1
    """Machines that may take part."""
    members: dict[int, Member] = field(default_factory=dict)
    inbox: Inbox = field(default_factory=lambda: queue.Queue(maxsize=MOST_WAITING))
    stop: Stop = field(default_factory=Stop)
    ready: list[tuple[Host, Facts]] = field(default_factory=list)
    """Machines that have been brought what they lack, and whose launcher is to be started."""
    _key: str = field(default_factory=lambda: key_here() or new_word())
    _logs: Logs = field(init=False)
    _starts_before: int = 0
    _failures: dict[str, int] = field(default_factory=dict)
    _said: dict[str, str] = field(default_factory=dict)
    _told: int = 0
    _asked_at: float = field(default_factory=time.monotonic)
    _seeker: threading.Thread | None = None
    _supplying: threading.Lock = field(default_factory=threading.Lock)
    _on_terminal: bool = field(init=False)
    """Whether a live panel is shown."""

    def __post_init__(self) -> None:
        self._on_terminal = is_terminal(sys.stdout) and not self.task.call.json

    def train(self, crew: Sequence[tuple[Host, Facts]]) -> tuple[int, str]:
        """Start the launchers and wait until node 0's has ended; return its exit code, and what is to be said besides."""
        task, board = self.task, Board(self.task.run)
        self._logs, self._starts_before = Logs(task.run), starts(task.run)
        self.count = task.bounds[1] if task.elastic else len(crew)
        for rank, (host, facts) in enumerate(crew):
            resume = is_begun(task.run) and task.resuming
            self._start(rank, host, facts, resume=resume, absent=range(len(crew), self.count))
        problem: tuple[int, str] | None = None
        shown = live_panel(sys.stdout, task.run, lambda: "running") if self._on_terminal else contextlib.nullcontext()
        with shown, hear_signals(self.stop):
            while self.members[0].code is None:
                self._receive()
                problem = problem or self._unable()
                self._seek()
                board.show({one.host.name: one.state for _, one in sorted(self.members.items())})
            until = time.monotonic() + LEAVE_SECONDS
            while any(one.code is None for one in self.members.values()) and time.monotonic() < until:
                self._receive()
        for one in self.members.values():
            self._over(one, -1, "lost: no answer")
            one.session.close()
        self._receive()
        self._gather_logs()
        board.show({one.host.name: one.state for _, one in sorted(self.members.items())})
        return self._ended(problem)

    def _start(self, rank: int, host: Host, facts: Facts, *, resume: bool, absent: Sequence[int] = ()) -> None:
        task, here = self.task, is_here(host)
        variables = node_variables(task, host, facts, absent=absent) | ({VARIABLE: self._key} if self.count > 1 else {})
        variables |= {PANEL: "1"} if rank == 0 and self._on_terminal else {}
        session = Session(host, variables, inbox=self.inbox)
        session.say(
            do="launch", seconds=0, run=task.run.name, node=rank, token=secrets.token_hex(16),
            words=node_words(task, host, facts, rank, self.count, self.port, resume=resume),
            store=None if here else (task.inventory.master.address, self.port), stream=not here and not facts.shares_runs,
            silent_seconds=task.loaded.config.launch.silent_seconds,
        )  # fmt: skip
        self.members[rank] = Member(host=host, facts=facts, session=session)

    # ---- What comes

    def _receive(self) -> None:
        """Take what waits, `MOST_WAITING` messages at most: signals and lost machines are not kept waiting by a rank that prints."""
        with contextlib.suppress(queue.Empty):
            session, message = self.inbox.get(timeout=TICK_SECONDS)
            for _ in range(MOST_WAITING):
                self._take(session, message)
                session, message = self.inbox.get_nowait()
            self._take(session, message)
        self._logs.flush()
        self._pass_signals()

    def _take(self, session: Session, message: Mapping[str, Any]) -> None:
        rank, one = next(((rank, one) for rank, one in self.members.items() if one.session is session), (0, None))
        if one is None:
            return  # of an earlier start there
        if "out" in message or "err" in message:
            text = str(message.get("out", message.get("err")))
            one.words = (one.words + text)[-20_000:] if "err" in message else one.words
            if rank:
                self._logs.add(f"node{rank}.log", text)
            else:
                stream = sys.stderr if "err" in message or self.task.call.json else sys.stdout
                stream.write(text)
                stream.flush()
        elif "log" in message:
            self._logs.add(str(message["log"]), str(message["text"]))
        elif "fetch" in message:
            threading.Thread(target=self._fetch, args=(one,), name=f"fetch-{one.host.name}", daemon=True).start()
        elif "ended" in message:
            self._over(one, int(message["ended"]))
            if message.get("left"):
                say(f"warning: {message['left']} processes on `{one.host.name}` could not be killed")
        elif "problem" in message:
            self._over(one, -1, str(message["problem"]))
        elif "closed" in message and one.code is None:
            session.close()
            one.detached = one.started and message["closed"] in (SSH_FAILED, -signal.SIGKILL, -signal.SIGTERM)
            if one.detached:
                what = "its ranks continue training while node 0 answers them; their logs come when it has ended"
                say(f"\nwarning: the SSH connection to `{one.host.name}` has ended: {what}")
            self._over(one, -1, "no SSH connection" if one.detached else session.trouble().text)
        one.started |= "started" in message

    def _over(self, one: Member, code: int, why: str = "") -> None:
        if one.code is None:
            one.code, one.why, one.ended_at = code, why, time.monotonic()
            early = code not in (0, 130, 143) and not one.detached and one.ended_at - one.begun < EARLY_SECONDS
            self._failures[one.host.name] = self._failures.get(one.host.name, 0) + 1 if early else 0

    def _fetch(self, one: Member) -> None:
        """Bring a machine the checkpoint from which all start again."""
        with self._supplying:
            try:
                bring.send_run(one.host, one.facts, self.task.run, newest_valid(self.task.run)[0])
            except UserError as error:
                say(f"not ready: {error.message}")
        one.session.say(fetched=True)

    def _gather_logs(self) -> None:
        """Bring the logs of machines whose connection has ended before their launcher."""
        loose = {one.host.name: one for one in self.members.values() if one.detached and not one.facts.shares_runs}

        def fetch(host: Host) -> None:
            bring.fetch(host, f"{loose[host.name].facts.runs}/{self.task.run.name}/logs/", self.task.run.logs, STATES_SECONDS)

        on_all([one.host for one in loose.values()], fetch)

    # ---- What follows

    def _pass_signals(self) -> None:
        """Tell the launchers of a request to stop; a second Ctrl-C kills them."""
        if self._told < len(self.stop.signals):
            if not self._told:
                text = "the workers finish their step, save a checkpoint and leave; Ctrl-C once more kills them"
                say(f"\nstopping all hosts: {text}")
            self._told = len(self.stop.signals)
            self._tell(signal=self.stop.signals[0])
            if self.stop.at_once:
                say("\nkilling the workers on all hosts")
                self._tell(kill=True)

    def _tell(self, **words: Any) -> None:
        for one in self.members.values():
            if one.code is None:
                one.session.say(**words)

    def _has_begun(self) -> bool:
        return starts(self.task.run) > self._starts_before

    def _unable(self) -> tuple[int, str] | None:
        """End all where a machine could not begin, and node 0, which waits for it, has not said so; return exit code and error."""
        due = time.monotonic() - GRACE_SECONDS
        failed = [
            one for rank, one in sorted(self.members.items()) if rank and one.code and not one.detached and one.ended_at < due
        ]
        if not failed or self.stop.wanted or self._has_begun():
            return None
        self._tell(signal=int(signal.SIGTERM))
        one = failed[0]
        why = one.why or last_words(one.words).removeprefix("error: ") or one.state
        return one.code if one.code and one.code > 0 else HardwareError.exit_code, f"error: host `{one.host.name}`: {why}"

    def _seek(self) -> None:
        """Start launchers on machines that are ready, and look for others while machines are missing."""
        living = {one.host.name for one in self.members.values() if one.code is None}
        free = [rank for rank in range(1, self.count) if rank not in self.members or self.members[rank].code is not None]
        while self.ready:
            host, facts = self.ready.pop(0)
            own = [rank for rank in free if rank in self.members and self.members[rank].host.name == host.name]
            if (own or free) and not self.stop.wanted and host.name not in living:
                rank = (own or free)[0]
                free.remove(rank)
                self._start(rank, host, facts, resume=True)
        wanted = (self.task.elastic or self.task.loaded.config.launch.max_restarts > 0) and free and not self.stop.wanted
        if not wanted or (self._seeker and self._seeker.is_alive()) or time.monotonic() - self._asked_at < POLL_SECONDS:
            return
        missing = [
            host for host in self.task.inventory.hosts[1:]
            if host.name not in living and self._failures.get(host.name, 0) < MOST_STARTS
        ]  # fmt: skip
        if missing and self._has_begun():
            self._seeker = threading.Thread(target=self._look_for, args=(missing,), name="seeker", daemon=True)
            self._seeker.start()

    def _look_for(self, hosts: Sequence[Host]) -> None:
        """Bring what they lack to machines that are back and fit."""
        try:
            answers = judged(self.task, hosts)
            for host in hosts:
                try:
                    if isinstance(answer := answers[host.name], UserError):
                        raise answer
                    self._require_its_gpus(host, answer)
                    if not answer.trains:
                        supply(self.task, host, answer, self.prepared, bring.code_files())
                        again = "; it is taken in after the next checkpoint" if self.task.elastic else ""
                        say(f"\n`{host.name}` answers again{again}")
                        self._said.pop(host.name, None)
                        self.ready.append((host, answer))
                except UserError as error:
                    if self._said.get(host.name) != error.message:
                        self._said[host.name] = error.message
                        say(f"not ready: {error.message}")
        except UserError as error:  # this machine's own disk: the run itself will say so
            say(f"warning: {error.message}")
        finally:
            self._asked_at = time.monotonic()

    def _require_its_gpus(self, host: Host, facts: Facts) -> None:
        had = max((one.facts.gpu_count for one in self.members.values() if one.host.name == host.name), default=0)
        if host.gpus is None and facts.gpu_count < had:
            raise HardwareError(
                f"host `{host.name}` had {had} GPU{'s' if had > 1 else ''}, and its driver shows {facts.gpu_count} now",
                place=host.place,
                hint="`nvidia-smi` and `dmesg` there say what became of it; `gpus` in the inventory makes do with fewer",
            )

    def _ended(self, problem: tuple[int, str] | None) -> tuple[int, str]:
        """Return the exit code of the command, and what node 0 has not said."""
        first = self.members[0]
        code = first.code if first.code is not None else -1
        if self.stop.wanted and code < 0:
            return stop_code(self.stop.signals[0]), ""
        if problem:
            return problem
        if code < 0:
            what = first.why or f"its launcher was killed by signal {-code}"
            return (HardwareError.exit_code if first.why else LOST), f"error: host `{first.host.name}`: {what}"
        return code, ""


def starts(run: RunFolder) -> int:
    """Return how often workers of node 0 were started."""
    return sum(event["event"] in ("started", "resumed") and event.get("node", 0) == 0 for event in read_events(run))


# ---- Afterwards


def finish(task: Task, code: int, message: str) -> int:
    """Say how it ended and what can be done next, besides what node 0 has said; return the exit code."""
    if message:
        print(f"\n{message}", file=sys.stderr)
    if code in (LOST, 130, 143) and is_begun(task.run):
        print(f"hint: resume it with: {command(task.inventory, task.run)}", file=sys.stderr)
    if task.call.json:
        last: dict[str, Any] = next((event for event in reversed(read_events(task.run)) if event.get("node", 0) == 0), {})
        told = last if code and last.get("event") == "failed" else {}
        model = str(task.run.model) if task.run.model.is_dir() else None
        error = message or told.get("error") or None
        print(json.dumps({"run": str(task.run.path), "code": code, "rank": told.get("rank"), "error": error, "model": model}))
    return code
