"""`make train-cluster`: one run on all machines of an inventory, started, watched and stopped from here.

On every machine the command that a person would type there is started over SSH. The launchers meet in the store that node 0's serves on this
machine (`launch.rendezvous`): who takes part, what came first, whether all start again, with how many and with how much, is settled there.
This command prepares and brings what the machines lack, shows what they say, starts a launcher where one is missing, and ends as node 0's does.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sft_play.cluster import bring
from sft_play.cluster.board import Board, Logs, last_words, say
from sft_play.cluster.hosts import MOST_WAITING, Facts, Launcher, ask, check, gather, shared_variables
from sft_play.cluster.remote import hub_folder
from sft_play.cluster.ssh import is_here, on_all
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
    noting,
    read_task,
    require_one_disk,
    require_unused_name,
)
from sft_play.config.call import Call, Override
from sft_play.config.cluster import Host
from sft_play.config.load import override_config, save_config
from sft_play.errors import HardwareError, Problems, UserError, raise_all
from sft_play.launch.key import VARIABLE, key_here, new_word
from sft_play.launch.node import Stop, signals_noted
from sft_play.launch.preparation import run_preparation
from sft_play.launch.run_folder import ended_by_signals, read_events, stop_code
from sft_play.launch.verdict import LOST
from sft_play.runs.checkpoints import newest_valid
from sft_play.runs.folder import RunFolder, cache_folder
from sft_play.runs.prepared import Prepared

TICK_SECONDS = 0.2
POLL_SECONDS = 10.0
"""How often a machine that is missing is asked whether it is there again."""
GRACE_SECONDS = 10.0
"""How long node 0 may take to say why a machine could not begin."""
LEAVE_SECONDS = 2.0
"""How long the others may take to end after node 0, which waits for all that answer."""
STATES_SECONDS = 6.0
"""How long a machine may take to hand over the random states of its ranks; without them they are drawn anew."""
MOST_STARTS, EARLY_SECONDS = 3, 60.0
"""How often in a row a machine's launcher may fail within so many seconds before it is not started again."""


def main(call: Call) -> int:
    """Trains on the machines of `CLUSTER` and returns the exit code: that of node 0's launcher."""
    task = read_task(call)
    with ended_by_signals(), disk_errors_told(task.run.path), controlling(task.run, task.inventory.path):
        facts = chosen(task)
        port = choose_port(task)  # one that is taken is told before anything is prepared
        task = taken_over(task)
        with noting(task.run, "preparing"):
            prepared = prepare(task)
        with noting(task.run, "sending"):
            crew = supplied(task, facts, prepared)
        control = Control(task=task, prepared=prepared, port=port)
        code, message = control.train(crew)
    return finish(task, code, message)


def chosen(task: Task) -> dict[str, Facts]:
    """Asks all machines; returns the facts of those that take part, in the inventory's order.

    Raises every reason when too few are there; with `launch.elastic` it says who is left out.
    """
    answers = judged(task, task.inventory.hosts)
    missing = [answer for answer in answers.values() if isinstance(answer, UserError)]
    found = {name: answer for name, answer in answers.items() if isinstance(answer, Facts)}
    if missing and (len(found) < task.least or task.inventory.master.name not in found or task.bounds is None):
        raise_all([one for error in missing for one in _parts(error)])
    for error in missing:
        say(f"left out: {error.message}")
    return dict(list(found.items())[: task.most])


def judged(task: Task, hosts: Sequence[Host]) -> dict[str, Facts | UserError]:
    """Returns host name -> its facts, or why it cannot take part. Asks the master too, with which the others are compared."""
    master, inventory = task.inventory.master, task.inventory
    asked = hosts if master in hosts else [master, *hosts]
    answers = gather(replace(inventory, hosts=tuple(asked)), shared_variables(task.shared), task.run.name)
    own = answers[master.name]
    for host in asked:
        if isinstance(found := answers[host.name], Facts):
            known = {master.name: own, host.name: found} if isinstance(own, Facts) else {host.name: found}
            hosts_known = (master,) if host == master else (replace(master, gpus=None, interface=None), host)
            problems = [
                *_raised(check, replace(inventory, hosts=hosts_known), known, task.shared),
                *_raised(require_one_disk, task, [host], known),
                *_raised(require_unused_name, task, [host], known),
            ]
            if problems:
                answers[host.name] = problems[0] if len(problems) == 1 else Problems(problems)
    return {host.name: answers[host.name] for host in hosts}


def _raised(judge: Callable[..., None], *given: Any) -> list[UserError]:
    """Returns what `judge` raises, problem by problem."""
    try:
        judge(*given)
    except UserError as error:
        return _parts(error)
    return []


def _parts(error: UserError) -> list[UserError]:
    return list(error.problems) if isinstance(error, Problems) else [error]


def taken_over(task: Task) -> Task:
    """Returns the task; of a run that was killed before its workers started, one that begins in the folder that was left."""
    if not (task.resuming and task.run.path.is_dir()) or is_begun(task.run) or task.loaded.config.launch.auto_resume:
        return task
    say(f"`{task.run.name}` had not begun; it begins now")
    given = Override(key="launch.auto_resume", text="true", origin=f"RUN={task.run.name}")
    return replace(task, loaded=override_config(task.loaded, [given]))


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


def supplied(task: Task, facts: Mapping[str, Facts], prepared: Prepared) -> list[tuple[Host, Facts]]:
    """Brings every machine what it lacks: code, model, prepared rows, and of a run that continues its newest checkpoint.

    Returns the machines that have it all. Raises why others have not, unless enough remain under `launch.elastic`.
    """
    hosts = [host for host in task.inventory.hosts if host.name in facts]
    say(f"hosts: {', '.join(f'`{host.name}` ({host.address})' for host in hosts)}")
    away = [host for host in hosts if not is_here(host)]
    files = bring.code_files(say) if away else []
    if away:
        what = f"{len(files)} files of the project{'' if task.shared else ', model and data'}"
        say(f"bringing to {len(away)} host{'s' if len(away) > 1 else ''} what they lack: {what}")
    checkpoint = newest_valid(task.run)[0] if is_begun(task.run) else None

    def one(host: Host) -> UserError | None:
        try:
            supply(task, host, facts[host.name], prepared, checkpoint, files)
        except UserError as error:
            return error
        return None

    answers = on_all(replace(task.inventory, hosts=tuple(hosts)), one)
    failed = {name: error for name, error in answers.items() if error}
    if failed and (task.bounds is None or len(hosts) - len(failed) < task.least or hosts[0].name in failed):
        raise_all(list(failed.values()))
    for error in failed.values():
        say(f"not ready: {error.message}")
    return [(host, facts[host.name]) for host in hosts if host.name not in failed]


def supply(task: Task, host: Host, facts: Facts, prepared: Prepared, checkpoint: Path | None, files: Sequence[str]) -> None:
    """Brings one machine what it lacks, and what its launcher is told. Raises `UserError`."""
    inventory, there = task.inventory, prepared
    if not is_here(host):
        bring.send_code(host, inventory, files)
        # What an earlier start left there, of a host whose link was cut and is back, would hold the run.
        ask(host, inventory, "end", timeout=60, run=task.run.name, grace=0, variables=shared_variables(task.shared))
        if not task.shared:
            there = bring.send_prepared(host, inventory, facts, task.loaded.config, prepared, hub_folder())
        if is_begun(task.run):
            bring.send_run(host, inventory, facts, task.run, checkpoint)
    folder = files_folder(facts, task.run, host)
    with tempfile.TemporaryDirectory() as name:
        save_config(task.loaded, Path(name) / "config.json")
        config = (Path(name) / "config.json").read_text(encoding="utf-8")
    given = {
        f"{folder}/config.json": config,
        f"{folder}/prepared.json": json.dumps({"run": task.run.name, "prepared": asdict(there)}),
    }
    if task.deepspeed:
        given[f"{folder}/deepspeed.json"] = task.deepspeed
    ask(host, inventory, "write", timeout=60, files=given)


# ---- While it goes on


@dataclass(kw_only=True, slots=True)
class Member:
    """A machine whose launcher was started, at its `NODE_RANK`."""

    host: Host
    facts: Facts
    launcher: Launcher
    code: int | None = None
    """How its launcher ended; -1 where it could not be started, or its connection has ended."""
    why: str = ""
    """What is known of that."""
    words: str = ""
    """The end of what it printed on stderr."""
    begun: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0


@dataclass(kw_only=True, slots=True)
class Control:
    """The launchers of one command."""

    task: Task
    prepared: Prepared
    port: int
    members: dict[int, Member] = field(default_factory=dict)
    inbox: queue.Queue[tuple[Launcher, dict[str, Any]]] = field(default_factory=lambda: queue.Queue(maxsize=MOST_WAITING))
    stop: Stop = field(default_factory=Stop)
    ready: list[tuple[Host, Facts]] = field(default_factory=list)
    """Machines that have been brought what they lack, and whose launcher is to be started."""
    _key: str = field(default_factory=lambda: key_here() or new_word())
    _logs: Logs | None = None
    _starts_before: int = 0
    _failures: dict[str, int] = field(default_factory=dict)
    _said: dict[str, str] = field(default_factory=dict)
    _told: int = 0
    _asked_at: float = 0.0
    _seeker: threading.Thread | None = None
    _supplying: threading.Lock = field(default_factory=threading.Lock)

    def train(self, crew: Sequence[tuple[Host, Facts]]) -> tuple[int, str]:
        """Starts the launchers and waits until node 0's has ended; returns its exit code, and what is to be said besides."""
        task, self._starts_before, self._asked_at = self.task, starts(self.task.run), time.monotonic()
        self._logs = Logs(task.run)
        board = Board(task.run)
        count = task.most if task.bounds else len(crew)
        resume = is_begun(task.run) and task.resuming
        for rank, (host, facts) in enumerate(crew):
            self._start(rank, count, host, facts, resume=resume, absent=range(len(crew), count))
        problem: tuple[int, str] | None = None
        with signals_noted(self.stop):
            while self.members[0].code is None:
                self._receive()
                self._pass_signals()
                problem = problem or self._unable()
                self._seek(count)
                board.show({one.host.name: self._state(one) for _, one in sorted(self.members.items())})
            until = time.monotonic() + LEAVE_SECONDS
            while any(one.code is None for one in self.members.values()) and time.monotonic() < until:
                self._receive()
                self._pass_signals()
        for one in self.members.values():
            self._over(one, -1, "lost: no answer")
            one.launcher.close()
        self._receive()
        self._logs.close()
        self._gather_states()
        board.show({one.host.name: self._state(one) for _, one in sorted(self.members.items())})
        return self._ended(problem)

    def _start(self, rank: int, count: int, host: Host, facts: Facts, *, resume: bool, absent: Sequence[int] = ()) -> None:
        task, here = self.task, is_here(host)
        words = node_words(task, host, facts, rank, count, self.port, resume=resume)
        variables = node_variables(task, host, facts, absent=absent) | ({VARIABLE: self._key} if count > 1 else {})
        store = None if here else (task.inventory.master.address, self.port)
        launcher = Launcher(
            rank, host, task.inventory, self.inbox, argv=words, variables=variables, run=task.run.name, store=store,
            silent_seconds=task.loaded.config.launch.silent_seconds, stream=not here and not facts.shares_runs,
        )  # fmt: skip
        self.members[rank] = Member(host=host, facts=facts, launcher=launcher)

    @staticmethod
    def _state(one: Member) -> str:
        if one.code is None:
            return "running"
        words = {0: "finished", 130: "stopped", 143: "stopped", -9: "killed"}
        return one.why or words.get(one.code, f"ended with code {one.code}")

    # ---- What comes

    def _receive(self) -> None:
        """Takes what waits, `MOST_WAITING` messages at most: signals and lost machines are not kept waiting by a rank that prints."""
        with contextlib.suppress(queue.Empty):
            launcher, facts = self.inbox.get(timeout=TICK_SECONDS)
            for _ in range(MOST_WAITING):
                self._take(launcher, facts)
                launcher, facts = self.inbox.get_nowait()
            self._take(launcher, facts)
        assert self._logs is not None
        self._logs.flush()

    def _take(self, launcher: Launcher, facts: Mapping[str, Any]) -> None:
        one, logs = self.members[launcher.node], self._logs
        assert logs is not None
        if one.launcher is not launcher:
            return  # of an earlier start there
        if "out" in facts or "err" in facts:
            text = str(facts.get("out", facts.get("err")))
            one.words = (one.words + text)[-20_000:] if "err" in facts else one.words
            if launcher.node:
                logs.add(f"node{launcher.node}.log", text)
            else:
                stream = sys.stderr if "err" in facts or self.task.call.json else sys.stdout
                stream.write(text)
                stream.flush()
        elif "log" in facts:
            logs.add(str(facts["log"]), str(facts["text"]))
        elif "fetch" in facts:
            threading.Thread(target=self._fetch, args=(one,), name=f"fetch-{one.host.name}", daemon=True).start()
        elif "ended" in facts:
            self._over(one, int(facts["ended"]))
            if facts.get("left"):
                say(f"warning: {facts['left']} processes on `{one.host.name}` could not be killed")
        elif "problem" in facts:
            self._over(one, -1, str(facts["problem"]))
        elif "closed" in facts:
            refusal = launcher.refusal()
            self._over(one, -1, refusal.message.partition(": ")[2] if refusal else "its connection has ended")

    def _over(self, one: Member, code: int, why: str = "") -> None:
        if one.code is None:
            one.code, one.why, one.ended_at = code, why, time.monotonic()
            early = code not in (0, 130, 143) and one.ended_at - one.begun < EARLY_SECONDS
            self._failures[one.host.name] = self._failures.get(one.host.name, 0) + 1 if early else 0

    def _fetch(self, one: Member) -> None:
        """Brings a machine the checkpoint from which all start again, with the random states of the ranks of all."""
        with self._supplying:
            try:
                self._gather_states()
                checkpoint = newest_valid(self.task.run)[0]
                bring.send_run(one.host, self.task.inventory, one.facts, self.task.run, checkpoint)
            except UserError as error:
                say(f"not ready: {error.message}")
        one.launcher.say(fetched=True)

    def _gather_states(self) -> None:
        """Brings the random states of other machines' ranks here, so that others can continue with them."""
        checkpoint = newest_valid(self.task.run)[0] if self.task.run.checkpoints.is_dir() else None
        away = {one.host.name: one for one in self.members.values() if not is_here(one.host) and one.why == ""}

        def fetch(host: Host) -> None:
            with contextlib.suppress(UserError):  # a machine that is gone: what it has is missing, and drawn anew
                assert checkpoint is not None
                bring.fetch_random_states(
                    host, self.task.inventory, away[host.name].facts, self.task.run, checkpoint, STATES_SECONDS
                )

        if checkpoint and away:
            on_all(replace(self.task.inventory, hosts=tuple(one.host for one in away.values())), fetch)

    # ---- What follows

    def _pass_signals(self) -> None:
        """Tells the launchers of a request to stop; a second Ctrl-C kills them."""
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
                one.launcher.say(**words)

    def _has_begun(self) -> bool:
        return starts(self.task.run) > self._starts_before

    def _unable(self) -> tuple[int, str] | None:
        """Ends all where a machine could not begin, and node 0, which waits for it, has not said so; returns exit code and error."""
        now = time.monotonic()
        failed = [one for rank, one in sorted(self.members.items()) if rank and one.code and now - one.ended_at > GRACE_SECONDS]
        if not failed or self.stop.wanted or self._has_begun():
            return None
        self._tell(signal=int(signal.SIGTERM))
        one = failed[0]
        why = one.why or last_words(one.words).removeprefix("error: ") or self._state(one)
        return one.code if one.code and one.code > 0 else HardwareError.exit_code, f"error: host `{one.host.name}`: {why}"

    def _seek(self, count: int) -> None:
        """Starts launchers on machines that are ready, and looks for others while machines are missing."""
        living = {one.host.name for one in self.members.values() if one.code is None}
        free = [rank for rank in range(1, count) if rank not in self.members or self.members[rank].code is not None]
        while self.ready:
            host, facts = self.ready.pop(0)
            own = [rank for rank in free if rank in self.members and self.members[rank].host.name == host.name]
            if (own or free) and not self.stop.wanted and host.name not in living:
                rank = (own or free)[0]
                free.remove(rank)
                self._start(rank, count, host, facts, resume=True)
        launch = self.task.loaded.config.launch
        wanted = (self.task.bounds is not None or launch.max_restarts > 0) and free and not self.stop.wanted
        if not wanted or (self._seeker and self._seeker.is_alive()) or time.monotonic() - self._asked_at < POLL_SECONDS:
            return
        missing = [
            host for host in self.task.inventory.hosts
            if host.name not in living and host != self.task.inventory.master and self._failures.get(host.name, 0) < MOST_STARTS
        ]  # fmt: skip
        if missing and self._has_begun():
            self._seeker = threading.Thread(target=self._look_for, args=(missing,), name="seeker", daemon=True)
            self._seeker.start()

    def _look_for(self, hosts: Sequence[Host]) -> None:
        """Brings what they lack to machines that are back and fit."""
        try:
            for name, answer in judged(self.task, hosts).items():
                host = next(host for host in hosts if host.name == name)
                try:
                    if isinstance(answer, UserError):
                        raise answer
                    self._require_its_gpus(host, answer)
                    if not answer.trains:
                        supply(self.task, host, answer, self.prepared, newest_valid(self.task.run)[0], bring.code_files())
                        again = "; it is taken in after the next checkpoint" if self.task.bounds else ""
                        say(f"\n`{name}` answers again{again}")
                        self._said.pop(name, None)
                        self.ready.append((host, answer))
                except UserError as error:
                    if self._said.get(name) != error.message:
                        self._said[name] = error.message
                        say(f"not ready: {error.message}")
        except UserError as error:  # this machine's own disk: the run itself will say so
            say(f"warning: {error.message}")
        finally:
            self._asked_at = time.monotonic()

    def _require_its_gpus(self, host: Host, facts: Facts) -> None:
        had = max((one.facts.gpus for one in self.members.values() if one.host.name == host.name), default=0)
        if host.gpus is None and facts.gpus < had:
            raise HardwareError(
                f"host `{host.name}` had {had} GPU{'s' if had > 1 else ''}, and its driver shows {facts.gpus} now",
                place=host.place or None,
                hint="`nvidia-smi` and `dmesg` there say what became of it; `gpus` in the inventory makes do with fewer",
            )

    def _ended(self, problem: tuple[int, str] | None) -> tuple[int, str]:
        """Returns the exit code of the command, and what node 0 has not said."""
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
    """Returns how often workers of node 0 were started."""
    return sum(event["event"] in ("started", "resumed") and event.get("node", 0) == 0 for event in read_events(run))


# ---- Afterwards


def finish(task: Task, code: int, message: str) -> int:
    """Says how it ended and what can be done next, beside what node 0 has said; returns the exit code."""
    if message:
        print(f"\n{message}", file=sys.stderr)
    if code in (LOST, 130, 143) and is_begun(task.run):
        print(f"hint: go on with: {command(task.inventory, task.run)}", file=sys.stderr)
    if task.call.json:
        last: dict[str, Any] = next((event for event in reversed(read_events(task.run)) if event.get("node", 0) == 0), {})
        told = last if code and last.get("event") == "failed" else {}
        model = str(task.run.model) if task.run.model.is_dir() else None
        error = message or told.get("error") or None
        print(json.dumps({"run": str(task.run.path), "code": code, "rank": told.get("rank"), "error": error, "model": model}))
    return code
