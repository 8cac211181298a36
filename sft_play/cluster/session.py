"""One start of a run on all its machines: launchers begun, heard, told to stop together, until the last has ended.

Machines that are lost (ssh has gone, or nothing was heard for `LOST_SECONDS`) make the others stop: SIGTERM, and after `GRACE_SECONDS` SIGKILL, so
that everything has ended within 30 s of a cut link. A launcher that has ended with an error gives the others the same time to notice by
themselves, since they can say more about it.
"""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sft_play.cluster.agent import Agent, Message
from sft_play.cluster.board import Board, Logs, say
from sft_play.config.cluster import Host, Inventory
from sft_play.files import write_json
from sft_play.launch.node import Stop, signals_noted
from sft_play.runs.folder import RunFolder

LOST_SECONDS = 12.0
"""How long a machine may say nothing; its agent speaks every second, and ssh gives a dead link up after 9 s."""
GRACE_SECONDS = 10.0
"""How long launchers may take to notice by themselves, and once more after SIGTERM."""
FINISHED_SECONDS = 120.0
"""How long others may take to leave when node 0 has finished."""
STOP_SECONDS = 90.0
"""After a request to stop, when a launcher that neither ends nor says that it saves is killed; it has its own limit of 24 s."""
START_SECONDS = 60.0
"""How long ssh and a machine's Python may take to say the first word."""
TICK_SECONDS = 0.2
LARGEST_WORDS = 20_000


@dataclass(kw_only=True, slots=True)
class Node:
    """One machine of this start."""

    host: Host
    agent: Agent
    state: str = "starting"
    code: int | None = None
    """Exit code of its launcher."""
    event: Mapping[str, Any] = field(default_factory=dict)
    """With which its launcher said how the run ended."""
    words: str = ""
    """The end of what its launcher printed on stderr."""
    records: dict[int, tuple[Mapping[str, Any], float]] = field(default_factory=dict)
    """Rank -> what the worker recorded when it left, and when that came here."""
    problem: str = ""
    """Why its launcher could not be started."""
    lost: str = ""
    """Why it counts as lost."""
    ended_at: float | None = None
    """When it ended, or was lost (monotonic seconds)."""
    left: int = 0
    """Processes there that could not be killed."""

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self.ended_at is not None


@dataclass(kw_only=True, slots=True)
class Session:
    """What is known while it goes on."""

    inventory: Inventory
    run: RunFolder
    nodes: list[Node]
    inbox: queue.Queue[Message]
    logs: Logs
    board: Board
    console: TextIO
    """Where rank 0 prints."""
    stop: Stop
    streams: Sequence[bool]
    """Of each machine, whether its files are sent here."""
    wanted: Callable[[], bool]
    """Whether another machine is to be taken in, for which this start is ended in order."""
    asked: str = ""
    """Why everything is being stopped: `signal`, `failure` or `grow`."""
    asked_at: float = 0.0
    killed: bool = False
    _told: int = 0

    def watch(self) -> None:
        """Returns when every launcher has ended or is lost."""
        with signals_noted(self.stop):
            while not all(node.over for node in self.nodes):
                self._receive()
                self._look()
                self._decide()
                self.logs.flush()
                self.board.show([self._state(node) for node in self.nodes])
        for node in self.nodes:
            node.agent.close()
        self._receive(wait=False)
        self.logs.flush()
        self.logs.close()

    @staticmethod
    def _state(node: Node) -> str:
        if node.lost:
            return f"lost: {node.lost}"
        if node.code is not None:
            words = {0: "finished", 130: "stopped", 143: "stopped", -9: "killed"}
            return words.get(node.code, f"ended with code {node.code}")
        return node.state if not node.problem else "not started"

    # ---- What comes

    def _receive(self, *, wait: bool = True) -> None:
        try:
            message = self.inbox.get(timeout=TICK_SECONDS) if wait else self.inbox.get_nowait()
            while True:
                self._take(self.nodes[message.node], message)
                message = self.inbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, node: Node, message: Message) -> None:
        facts, index = message.facts, message.node
        if "out" in facts or "err" in facts:
            self._printed(index, node, str(facts.get("out", facts.get("err"))), error="err" in facts)
        elif "log" in facts:
            self.logs.add(str(facts["log"]), str(facts["text"]))
        elif "record" in facts:
            self._recorded(index, node, str(facts["record"]), facts["facts"], message.at)
        elif "beat" in facts:
            node.state = str(facts["beat"])
        elif "problem" in facts:
            node.problem, node.ended_at = str(facts["problem"]), message.at
        elif "ended" in facts:
            node.code, node.event, node.left = int(facts["ended"]), facts.get("event") or {}, int(facts.get("left", 0))
            node.ended_at = message.at
        elif "closed" in facts and not node.over:
            refusal = node.agent.refusal()
            self._lose(node, refusal.message.partition(": ")[2] if refusal else "its connection has ended")

    def _printed(self, index: int, node: Node, text: str, *, error: bool) -> None:
        if error:
            node.words = (node.words + text)[-LARGEST_WORDS:]
        if index == 0:
            stream = sys.stderr if error else self.console
            stream.write(text)
            stream.flush()
        else:
            self.logs.add(f"node{index}.log", text)

    def _recorded(self, index: int, node: Node, name: str, facts: Mapping[str, Any], at: float) -> None:
        rank = int("".join(filter(str.isdigit, name)))
        node.records[rank] = facts, at
        if self.streams[index] and self.run.logs.is_dir():
            try:
                write_json(self.run.logs / Path(name).name, facts)
            except OSError as error:  # it is known here; the hosts are stopped in order, whatever this disk says
                say(f"warning: {self.run.logs / Path(name).name} cannot be written: {error.strerror or error}")

    # ---- What follows

    def _look(self) -> None:
        now = time.monotonic()
        for node in self.nodes:
            if not node.over:
                limit = START_SECONDS if node.agent.heard == node.agent.begun else LOST_SECONDS
                if now - node.agent.heard > limit:
                    self._lose(node, f"no sign of life for {limit:.0f} s")

    def _lose(self, node: Node, why: str) -> None:
        node.lost, node.ended_at = why, time.monotonic()

    def _decide(self) -> None:
        now, going = time.monotonic(), [node for node in self.nodes if not node.over]
        if self.stop.wanted and self._told < len(self.stop.signals):
            self._told = len(self.stop.signals)
            if not self.asked:
                say(
                    "\nstopping all hosts: the workers finish their step, save a checkpoint and leave; Ctrl-C once more kills them"
                )
            self._ask("signal", self.stop.signals[0])
            if self.stop.at_once:
                say("\nkilling the workers on all hosts")
                self._kill(going)
        elif not self.asked and self._is_over(now):
            self._ask("failure", signal.SIGTERM)
        elif not self.asked and self.wanted():
            self._ask("grow", signal.SIGTERM)
        patience = GRACE_SECONDS if self.asked == "failure" else STOP_SECONDS
        if self.asked and self.asked != "failure" and any(node.lost for node in self.nodes):
            patience = GRACE_SECONDS
        if self.asked and not self.killed and now - self.asked_at > patience and not self._saving(now):
            self._kill(going)

    def _saving(self, now: float) -> bool:
        """Whether a checkpoint may still be on its way to the disk; not when a machine is lost, since it would never be complete."""
        lost = any(node.lost for node in self.nodes)
        return not lost and any(node.state == "saving" for node in self.nodes if not node.over) and now - self.asked_at < 3600

    def _is_over(self, now: float) -> bool:
        """Whether the others are to be stopped: at once for a machine that is lost, else when they have had their time."""
        failed = any(node.code for node in self.nodes)
        gone = any(node.lost or node.problem for node in self.nodes)
        return gone or self._ended_for(now) > (GRACE_SECONDS if failed else FINISHED_SECONDS)

    def _ended_for(self, now: float) -> float:
        """Returns the seconds since the first launcher ended; 0 while all work."""
        ends = [node.ended_at for node in self.nodes if node.ended_at is not None]
        return now - min(ends) if ends else 0.0

    def _ask(self, why: str, number: int) -> None:
        if not self.asked:
            self.asked_at = time.monotonic()
        self.asked = self.asked or why
        for node in self.nodes:
            if not node.over:
                node.agent.say(signal=int(number))

    def _kill(self, going: Sequence[Node]) -> None:
        self.killed = True
        for node in going:
            node.agent.say(kill=True)
