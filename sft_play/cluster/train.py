"""`make train-cluster`: one run on all machines of an inventory, started, watched and stopped from here.

On every machine the command that a person would type there is started over SSH. The launchers meet in the store that
node 0's serves on this machine (`launch.machines`): who takes part, what came first, whether all start again, with
how many and with how much, is settled there. This command prepares and brings what the machines lack, shows what they
say, starts a launcher where one is missing, and ends as node 0's does.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.cluster import bring
from sft_play.cluster.hosts import MOST_WAITING, SSH_FAILED, Inbox, Session, is_here, on_all, print_line
from sft_play.cluster.inventory import Host
from sft_play.cluster.remote import Facts
from sft_play.cluster.status import Board, Logs
from sft_play.cluster.task import (
    Task,
    choose_machines,
    choose_port,
    command,
    control_run,
    is_begun,
    judge_machines,
    node_variables,
    node_words,
    prepare,
    read_task,
    supply,
    supply_all,
    take_over,
)
from sft_play.config.call import Call
from sft_play.errors import HardwareError, UserError, printable
from sft_play.files import translate_disk_errors
from sft_play.launch.environment import VARIABLE, key_here, new_word
from sft_play.launch.node import Stop
from sft_play.launch.process import end_by_signals, hear_signals, stop_code
from sft_play.launch.run_folder import read_events
from sft_play.launch.verdict import LOST
from sft_play.launch.watch import is_terminal, live_panel
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.prepared import Prepared
from sft_play.runs.progress import PANEL
from sft_play.text import plural

TICK_SECONDS = 0.2
POLL_SECONDS = 10.0
"""How often a machine that is missing is asked whether it is there again."""
GRACE_SECONDS = 10.0
"""How long node 0 may take to say why a machine could not begin."""
LEAVE_SECONDS = 2.0
"""How long the others may take to end after node 0, which waits for all that answer."""
LOGS_SECONDS = 6.0
"""How long a machine may take to hand over its logs."""
LAST_LETTERS = 20_000
ENDS = {0: "finished", 130: "stopped", 143: "stopped", -9: "killed"}


def main(call: Call) -> int:
    """Train on the machines of `CLUSTER` and return the exit code: that of node 0's launcher."""
    task = read_task(call)
    with (
        end_by_signals(),
        control_run(task) as named,
        translate_disk_errors(
            named.run.path, lambda full, _: "`df` says what is full" if full else "`mount` and `dmesg` may say why"
        ),
    ):
        facts = choose_machines(named)
        port = choose_port(named)  # one that is taken is reported before anything is prepared
        task = take_over(named)
        prepared = prepare(task)
        crew = supply_all(task, facts, prepared)
        code, message = Control(task, prepared, port).train(crew)
    if message:
        print(f"\n{message}", file=sys.stderr)
    if code in (LOST, 130, 143) and is_begun(task.run):
        print(f"hint: resume it with: {command(task.inventory, task.run)}", file=sys.stderr)
    if call.json:
        last = (_events(task) or [{}])[-1]
        failed = last if code and last.get("event") == "failed" else {}
        model = str(task.run.model) if task.run.model.is_dir() else None
        error = message or failed.get("error") or None
        print(
            json.dumps(
                {"run": str(task.run.path), "code": code, "rank": failed.get("rank"), "error": error, "model": model}
            )
        )
    return code


def _events(task: Task) -> list[dict[str, Any]]:
    """Return what node 0 has recorded."""
    return [event for event in read_events(task.run) if event.get("node", 0) == 0]


def _starts(task: Task) -> int:
    """Return how often workers of node 0 were started."""
    return sum(event["event"] in ("started", "resumed") for event in _events(task))


# ---- While it trains


@dataclass(slots=True)
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
    ended_at: float = 0.0

    @property
    def state(self) -> str:
        if self.code is None:
            return "running"
        return self.why or ENDS.get(self.code, f"ended with code {self.code}")

    def end(self, code: int, why: str = "") -> None:
        """Note how its launcher ended, once."""
        if self.code is None:
            self.code, self.why, self.ended_at = code, why, time.monotonic()

    def last_words(self) -> str:
        """Return the end of what it printed on stderr, from its last `error:` on."""
        return printable(self.words).rpartition("error: ")[2].strip()


class Seeker(threading.Thread):
    """Looks for machines that are missing while a run trains, and brings them what they lack."""

    def __init__(self, task: Task, prepared: Prepared, missing: Callable[[], Mapping[Host, int]]) -> None:
        """`missing` returns the machines that are to be looked for -> the GPUs that each of them had."""
        super().__init__(name="seeker", daemon=True)
        self.task, self.prepared, self.missing = task, prepared, missing
        self.ready: list[tuple[Host, Facts]] = []
        """Machines that have all, and whose launcher is to be started."""
        self.unready: dict[str, str] = {}
        """Host name -> why it cannot take part, as it was last said."""

    def run(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            if missing := self.missing():
                with contextlib.suppress(OSError):  # of this machine's disk
                    self.look_for(missing)
                time.sleep(POLL_SECONDS)

    def look_for(self, missing: Mapping[Host, int]) -> None:
        """Supply machines that are back and fit; say of another why it is not, once."""
        answers = judge_machines(self.task, list(missing))
        for host, gpus in missing.items():
            try:
                self.supply(host, answers[host.name], gpus)
            except UserError as error:
                if self.unready.get(host.name) != error.message:
                    self.unready[host.name] = error.message
                    print_line(f"not ready: {error.message}")

    def supply(self, host: Host, answer: Facts | UserError, gpus: int) -> None:
        """Bring one machine what it lacks, unless a launcher of the run lives there. Raise why it cannot take part."""
        if isinstance(answer, UserError):
            raise answer
        if host.gpus is None and answer.gpu_count < gpus:
            raise HardwareError(
                f"host `{host.name}` had {plural(gpus, 'GPU')}, and its driver shows {answer.gpu_count} now"
            )
        if not answer.trains:
            supply(self.task, host, answer, self.prepared, bring.code_files())
            print_line(f"\n`{host.name}` answers again")
            self.unready.pop(host.name, None)
            self.ready.append((host, answer))


class Control:
    """The launchers of one command."""

    def __init__(self, task: Task, prepared: Prepared, port: int) -> None:
        self.task, self.port = task, port
        self.count = 0
        """Machines that take part; known when training starts."""
        self.members: dict[int, Member] = {}
        self.inbox: Inbox = queue.Queue(maxsize=MOST_WAITING)
        self.stop = Stop()
        self.stops_passed = 0
        self.seeker = Seeker(task, prepared, self.missing)
        self.key = key_here() or new_word()
        self.board, self.logs = Board(task.run), Logs(task.run)
        self.starts_before = _starts(task)
        self.on_terminal = is_terminal(sys.stdout) and not task.call.json

    def train(self, crew: Sequence[tuple[Host, Facts]]) -> tuple[int, str]:
        """Start the launchers and wait until node 0's has ended; return its exit code, and an error to print."""
        task = self.task
        self.count = len(crew)
        for rank, (host, facts) in enumerate(crew):
            resume = is_begun(task.run) and task.resuming
            self.start(rank, host, facts, resume=resume)
        if task.loaded.config.launch.max_restarts:
            self.seeker.start()
        problem: tuple[int, str] | None = None
        panel = live_panel(sys.stdout, task.run, lambda: "running") if self.on_terminal else contextlib.nullcontext()
        with panel, hear_signals(self.stop.note):
            while self.members[0].code is None:
                self.receive()
                problem = problem or self.end_where_one_cannot_begin()
                self.replace_missing()
                self.show()
            until = time.monotonic() + LEAVE_SECONDS
            while any(one.code is None for one in self.members.values()) and time.monotonic() < until:
                self.receive()
        for one in self.members.values():
            one.end(-1, "lost: no answer")
            one.session.close()
        self.receive()
        self.gather_logs()
        self.show()
        first = self.members[0]
        code = first.code or 0
        if self.stop.wanted and code < 0:
            return stop_code(self.stop.signals[0]), ""
        if problem:
            return problem
        if code < 0:
            what = first.why or f"its launcher was killed by signal {-code}"
            return (HardwareError.exit_code if first.why else LOST), f"error: host `{first.host.name}`: {what}"
        return code, ""

    def start(self, rank: int, host: Host, facts: Facts, *, resume: bool) -> None:
        task, here = self.task, is_here(host)
        variables = node_variables(task, host, facts) | ({VARIABLE: self.key} if self.count > 1 else {})
        variables |= {PANEL: "1"} if rank == 0 and self.on_terminal else {}
        session = Session(host, variables, inbox=self.inbox)
        session.send(
            do="launch",
            seconds=0,
            run=task.run.name,
            node=rank,
            words=node_words(task, host, facts, rank, self.count, self.port, resume=resume),
            store=None if here else (task.inventory.master.address, self.port),
            stream=not here and not facts.shares_runs,
            silent_seconds=task.loaded.config.launch.silent_seconds,
        )
        self.members[rank] = Member(host, facts, session)

    def show(self) -> None:
        self.board.show({one.host.name: one.state for _, one in sorted(self.members.items())})

    # ---- What comes

    def receive(self) -> None:
        """Take what waits, `MOST_WAITING` messages at most: signals and lost machines are not kept waiting by a rank
        that prints.
        """
        with contextlib.suppress(queue.Empty):
            self.take(*self.inbox.get(timeout=TICK_SECONDS))
            for _ in range(MOST_WAITING):
                self.take(*self.inbox.get_nowait())
        self.logs.flush()
        if self.stops_passed < len(self.stop.signals):
            self.pass_signals()

    def take(self, session: Session, message: Mapping[str, Any]) -> None:
        """Take a message: what `cluster/remote.py` sends of a launcher, and that the session has ended."""
        # started=pid; out=text, err=text: what it prints; log=name, text=more of that file of its run folder;
        # fetch=true: it asks for the checkpoint; ended=code, left=processes that could not be killed; closed=code of
        # ssh.
        rank, one = next(((rank, one) for rank, one in self.members.items() if one.session is session), (0, None))
        if one is None:
            return  # of an earlier start there
        if "out" in message or "err" in message:
            text = str(message.get("out", message.get("err")))
            one.words = (one.words + text)[-LAST_LETTERS:] if "err" in message else one.words
            if rank:
                self.logs.add(f"node{rank}.log", text)
            else:
                stream = sys.stderr if "err" in message or self.task.call.json else sys.stdout
                stream.write(text)
                stream.flush()
        elif "log" in message:
            self.logs.add(str(message["log"]), str(message["text"]))
        elif "started" in message:
            one.started = True
        elif "fetch" in message:
            threading.Thread(target=self.fetch, args=(one,), name=f"fetch-{one.host.name}", daemon=True).start()
        elif "ended" in message:
            one.end(int(message["ended"]))
            if message["left"]:
                print_line(f"warning: {message['left']} processes on `{one.host.name}` could not be killed")
        elif one.code is None:  # closed
            session.close()
            one.detached = one.started and message["closed"] in (SSH_FAILED, -signal.SIGKILL, -signal.SIGTERM)
            if one.detached:
                what = "its ranks continue training while node 0 answers them; their logs come when it has ended"
                print_line(f"\nwarning: the SSH connection to `{one.host.name}` has ended: {what}")
            one.end(-1, "no SSH connection" if one.detached else session.trouble().text)

    def fetch(self, one: Member) -> None:
        """Bring a machine the checkpoint from which all start again."""
        try:
            bring.send_run(one.host, one.facts, self.task.run, newest_valid(self.task.run)[0])
        except UserError as error:
            print_line(f"not ready: {error.message}")
        one.session.send(fetched=True)

    def gather_logs(self) -> None:
        """Bring the logs of machines whose connection has ended before their launcher."""
        run = self.task.run
        loose = {one.host.name: one for one in self.members.values() if one.detached and not one.facts.shares_runs}
        on_all(
            [one.host for one in loose.values()],
            lambda host: bring.fetch(host, f"{loose[host.name].facts.runs}/{run.name}/logs/", run.logs, LOGS_SECONDS),
        )

    # ---- What follows

    def pass_signals(self) -> None:
        """Tell the launchers of a request to stop; a second Ctrl-C kills them."""
        if not self.stops_passed:
            text = "the workers finish their step, save a checkpoint and leave; Ctrl-C once more kills them"
            print_line(f"\nstopping all hosts: {text}")
        self.stops_passed = len(self.stop.signals)
        self.tell(signal=self.stop.signals[0])
        if self.stop.at_once:
            print_line("\nkilling the workers on all hosts")
            self.tell(kill=True)

    def tell(self, **words: Any) -> None:
        for one in self.members.values():
            if one.code is None:
                one.session.send(**words)

    def has_begun(self) -> bool:
        return _starts(self.task) > self.starts_before

    def end_where_one_cannot_begin(self) -> tuple[int, str] | None:
        """End all where a machine could not begin, and node 0, which waits for it, has not said so; return exit code
        and error.
        """
        due = time.monotonic() - GRACE_SECONDS
        failed = [one for one in self.members.values() if one.code and not one.detached and one.ended_at < due]
        if not failed or self.stop.wanted or self.has_begun():
            return None
        self.tell(signal=int(signal.SIGTERM))
        one = failed[0]
        code = one.code if one.code and one.code > 0 else HardwareError.exit_code
        return code, f"error: host `{one.host.name}`: {one.why or one.last_words() or one.state}"

    def free_ranks(self) -> list[int]:
        """Return the places of machines that have no launcher."""
        return [
            rank for rank in range(1, self.count) if rank not in self.members or self.members[rank].code is not None
        ]

    def replace_missing(self) -> None:
        """Start launchers on machines that are ready, each in the place that it had."""
        while self.seeker.ready and not self.stop.wanted and (free := self.free_ranks()):
            host, facts = self.seeker.ready.pop(0)
            had = [rank for rank in free if rank in self.members and self.members[rank].host.name == host.name]
            self.start((had or free)[0], host, facts, resume=True)

    def missing(self) -> dict[Host, int]:
        """Return the machines whose launcher is to be started again -> the GPUs that they had; none while there is no
        place for one.
        """
        if self.members[0].code is not None or self.stop.wanted or not self.free_ranks() or not self.has_begun():
            return {}
        members = list(self.members.values())
        # A code below 6 is an error after which no launcher tries again.
        out = {one.host.name for one in members if one.code is None or one.code in range(1, 6)}
        hosts = [host for host in self.task.inventory.hosts[1:] if host.name not in out]
        return {
            host: max((one.facts.gpu_count for one in members if one.host.name == host.name), default=0)
            for host in hosts
        }
