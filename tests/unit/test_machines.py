"""Launchers of several machines: real connections on loopback, one thread a machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from sft_play.errors import DataError, HardwareError, RetryableError, UserError
from sft_play.launch import store
from sft_play.launch.environment import Node, free_port
from sft_play.launch.machines import Facts, Machines
from sft_play.launch.verdict import Outcome
from tests.documents import on_page
from tests.waiting import until

Act = Callable[[Machines], Any]
KEY, OTHER = "a key that the nodes of this run know", "a key of another run, as long as it"
LOST = Outcome(
    code=75, rank=1, cause="killed", message="error: rank 1 (b) was killed by SIGKILL; all other ranks were stopped"
)


def agree(facts: Sequence[Facts]) -> list[UserError]:
    return []


def everything(facts: Sequence[Facts]) -> Facts:
    return {"all": facts}


class Nodes:
    """Machines of one run, each in a thread: what each returned or raised."""

    def __init__(self, count: int = 3, patience: float = 120.0, silent: float = 60.0) -> None:
        self.port, self.count, self.patience, self.silent = free_port(), count, patience, silent
        self.ended: dict[str, Any] = {}
        self.threads: list[threading.Thread] = []
        self.there: dict[str, Machines] = {}

    def start(self, rank: int, act: Act, host: str = "", **changes: Any) -> None:
        node = Node(
            rank=rank, count=changes.pop("count", self.count), master_port=self.port, key=changes.pop("key", None)
        )
        host = host or "abcd"[rank]
        options = {"run": "lan", "patience": self.patience, "silent_seconds": self.silent, **changes}
        ours = self.there[host] = Machines(node, host=host, **options)

        def body() -> None:
            try:
                ours.open()
                self.ended[host] = act(ours)
            except UserError as error:
                self.ended[host] = error
                ours.fail(error)
            finally:
                if self.ended.get(host) != "vanished":
                    ours.close()

        self.threads.append(threading.Thread(target=body, daemon=True))
        self.threads[-1].start()

    def end(self) -> dict[str, Any]:
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive()
        return self.ended

    def run(self, act: Act) -> dict[str, Any]:
        """Start all machines, and return what each returned or raised."""
        for rank in range(self.count):
            self.start(rank, act)
        return self.end()


def meet(ours: Machines) -> list[str]:
    return [machine["who"] for machine in ours.meet(lambda _: {"who": ours._mine["host"]}, agree, everything)["all"]]


def vanish(ours: Machines) -> str:
    """Leave like a killed process: silently, and without further heartbeats."""
    assert ours._store is not None
    ours._store.close()
    ours._store = None  # with node 0's goes what it serves
    return "vanished"


def test_machines_wait_for_a_late_one_and_share_facts(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes()

    def act(ours: Machines) -> Any:
        first = ours.meet(lambda _: {"who": ours._mine["host"]}, agree, everything)
        return first, ours.share("prepared", {"hash": "x", "plan": ours.node.rank}, agree, everything)

    nodes.start(2, act, key=KEY)  # comes before there is anybody
    nodes.start(0, act, key=KEY)
    nodes.start(1, act, key=KEY)
    ended = nodes.end()
    assert ended["a"] == ended["b"] == ended["c"]
    assert ended["a"][0]["all"] == [{"who": "a"}, {"who": "b"}, {"who": "c"}]
    assert "node 1 (b) has come" in capfd.readouterr().err


def test_absent_machines_are_named_on_every_one() -> None:
    nodes = Nodes(patience=1.0)
    nodes.start(0, meet)
    nodes.start(1, meet, patience=60.0)
    ended = nodes.end()
    assert ended["a"].render() == ended["b"].render() and isinstance(ended["b"], RetryableError)
    assert on_page("hangs-after-initialized", ended["a"].render())


def test_all_differences_are_one_error_on_all_machines() -> None:
    def judge(facts: Sequence[Facts]) -> list[UserError]:
        return [UserError(f"{len(facts)} are here, and differ"), HardwareError("so do their versions")]

    a, b = Nodes(count=2).run(lambda ours: ours.meet(lambda _: {}, judge, everything)).values()
    assert a.render() == b.render() and "2 are here, and differ" in a.render() and "so do their versions" in a.render()


def test_duplicate_and_excess_node_ranks_are_refused() -> None:
    """Whoever has the wrong number is refused; the others wait for the right one."""
    nodes = Nodes()
    nodes.start(0, meet)
    nodes.start(1, meet)
    until(lambda: 1 in nodes.there["a"]._here)
    nodes.start(1, meet, host="b2")
    nodes.start(3, meet, count=4)
    until(lambda: len(nodes.ended) == 2)
    assert "two nodes have `NODE_RANK=1`: b and b2" in str(nodes.ended["b2"])
    assert "`NODE_RANK` is 3 on d with `NUM_NODES=4`, but node 0 (a) has `NUM_NODES=3`" in str(nodes.ended["d"])
    nodes.start(2, meet)
    ended = nodes.end()
    assert ended["a"] == ended["b"] == ended["c"] == ["a", "b", "c"]


def test_an_excess_machine_does_not_end_a_training(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither does a launcher of another run that still looks for its node 0, a stranger, or what a stranger writes."""
    nodes, over = Nodes(count=2), threading.Event()

    def train(ours: Machines) -> Any:
        ours.meet(lambda _: {"who": ours._mine["host"]}, agree, everything)
        while not over.wait(0.1):
            assert ours.ended_elsewhere() is None
        return sorted(ours._here)

    for rank in range(2):
        nodes.start(rank, train, key=KEY)
    until(lambda: len(nodes.there["a"]._here) == 2)
    time.sleep(1.0)
    nodes.start(1, meet, host="twin", key=KEY, patience=0.5)
    nodes.start(1, meet, host="yesterday", key=KEY, run="other")
    nodes.start(1, meet, host="other key", key=OTHER)
    with socket.create_connection(("127.0.0.1", nodes.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    raw = store.tcp_store()("127.0.0.1", nodes.port, is_master=False, wait_for_workers=False)
    for name in ("0/end", "0/next", "attempt"):
        raw.set(name, b"-" * 64 + b"x")
    until(lambda: len(nodes.ended) == 3)
    time.sleep(1.5)
    over.set()
    ended = nodes.end()
    assert ended["a"] == ended["b"] == [0, 1]
    assert "did not start again within 0.5 s" in str(ended["twin"])
    assert "different runs: node 0 (a): `lan`, node 1 (yesterday): `other`" in str(ended["yesterday"])
    assert "another `MASTER_KEY`" in str(ended["other key"])


def test_a_restarted_launcher_takes_its_place() -> None:
    nodes = Nodes(count=3)
    nodes.start(0, meet)
    nodes.start(1, vanish, host="old")
    until(lambda: "old" in nodes.ended)
    nodes.start(1, meet)
    nodes.start(2, meet)
    ended = nodes.end()
    assert ended["a"] == ended["b"] == ["a", "b", "c"]


def test_an_unreachable_node_0_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a stranger that accepts connections and never answers."""
    nodes = Nodes(count=2, patience=0.2)

    def ended() -> str:
        nodes.start(1, meet)
        error = nodes.end()["b"]
        assert isinstance(error, RetryableError)
        return error.render()

    assert "127.0.0.1:" in (error := ended()) and on_page("connect-call-failed", error) and "NODE_RANK=0" in error
    with socket.create_server(("127.0.0.1", nodes.port)):
        assert "not a launcher of SFT-Play" in ended()
    monkeypatch.setattr(store, "RESOLVE_SECONDS", 0.1)
    node = Node(rank=1, count=2, master_address="no-such-host.invalid", master_port=1)
    with pytest.raises(UserError, match=r"`MASTER_ADDR` is `no-such-host\.invalid`, which cannot be resolved"):
        Machines(node, host="b", run="lan", patience=0.2, silent_seconds=5).open()


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    nodes = Nodes(count=2)
    with socket.create_server(("", nodes.port)):
        nodes.start(0, meet)
        error = nodes.end()["a"]
    assert isinstance(error, HardwareError) and f"port {nodes.port}" in error.message
    assert on_page("address-already-in-use", error.message)


@pytest.mark.parametrize("vanishes", [False, True])
def test_a_machine_that_is_lost_between_the_steps_ends_all(vanishes: bool) -> None:
    nodes = Nodes(silent=3.0)

    def act(ours: Machines) -> Any:
        ours.meet(lambda _: {}, agree, everything)
        if ours.node.rank == 1:
            if vanishes:
                return vanish(ours)
            raise DataError("the file is empty", place="rows.jsonl", hint="fill it")
        return ours.share("prepared", {}, agree, everything)

    ended = nodes.run(act)
    for host in "ac":
        if vanishes:
            assert isinstance(ended[host], RetryableError) and "before the workers started" in ended[host].message
        else:
            assert type(ended[host]) is DataError
            error = "error: node 1 (b) could not continue: rows.jsonl: the file is empty\n\nhint: fill it"
            assert ended[host].render() == error


@pytest.mark.parametrize("gone", [0, 1])
def test_a_machine_that_vanishes_from_a_training_is_named(gone: int) -> None:
    """Its heartbeats end, and node 0 reports it; the store of a lost node 0 is gone."""
    nodes = Nodes(silent=3.0)

    def act(ours: Machines) -> Any:
        ours.meet(lambda _: {}, agree, everything)
        ours.ranks_by_node = (1, 2, 1)
        if ours.node.rank == gone:
            time.sleep(0.5)
            return vanish(ours)
        return ours.settle(Outcome(code=75, rank=0, cause="peer", message="error: Connection closed by peer"))

    ended = nodes.run(act)
    who = f"error: rank {gone} ({'ab'[gone]}) cannot be reached: node {gone} ({'ab'[gone]}) has"
    for host, outcome in ended.items():
        if outcome != "vanished":
            assert (outcome.code, outcome.rank, outcome.cause) == (75, gone, "unreachable"), host
            assert outcome.message.startswith(who), outcome


def test_the_first_cause_is_settled_for_all_and_the_next_attempt_follows() -> None:
    def act(ours: Machines) -> Any:
        meet(ours)
        peer = Outcome(code=75, rank=0, cause="peer", message="error: Connection closed by peer")
        outcome = ours.settle(LOST if ours.node.rank == 1 else peer)
        return outcome, ours.follow(lambda: {"again": True, "message": outcome.message}), meet(ours), ours.attempt

    expected = replace(LOST, host="b"), {"again": True, "message": LOST.message}, ["a", "b", "c"], 1
    assert list(Nodes().run(act).values()) == [expected] * 3


def test_ranks_are_frozen_only_if_all_machines_report_it() -> None:
    alone = threading.Event()

    def act(ours: Machines) -> Any:
        ours.meet(lambda _: {}, agree, everything)
        mine = {str(ours.node.rank): {"at": [1, 0, 0], "host": ours._mine["host"]}}
        if ours.node.rank == 0:
            for _ in range(15):
                assert ours.share_standings(mine) is None, "rank 1 saves"
                time.sleep(0.1)
            alone.set()
        assert alone.wait(240)
        while (standings := ours.share_standings(mine)) is None and not ours.ended_elsewhere():
            time.sleep(0.05)
        return ours.settle(replace(LOST, doing=standings or {})).doing

    assert (
        list(Nodes(count=2).run(act).values())
        == [{"0": {"at": [1, 0, 0], "host": "a"}, "1": {"at": [1, 0, 0], "host": "b"}}] * 2
    )


def test_a_late_machine_waits_for_the_next_attempt() -> None:
    """Its launcher was restarted before the loss of the old one was noticed."""
    nodes, trains, waits = Nodes(), threading.Event(), threading.Event()

    def train(ours: Machines) -> Any:
        seen = [meet(ours)]
        if ours.node.rank == 2:
            trains.set()
            return vanish(ours)
        assert waits.wait(60)
        ours.settle(LOST)
        ours.follow(lambda: {"again": True})
        return [*seen, meet(ours)]

    for rank in range(3):
        nodes.start(rank, train)
    assert trains.wait(60)
    until(lambda: nodes.ended.pop("c", None) == "vanished")
    nodes.start(2, lambda ours: ours.meet(lambda late: {"who": f"c, late: {late}"}, agree, everything)["all"][2]["who"])
    time.sleep(1.0)
    waits.set()
    ended = nodes.end()
    assert ended["a"] == ended["b"] == [["a", "b", "c"], ["a", "b", "c, late: True"]], ended
    assert ended["c"] == "c, late: True"


def test_a_machine_whose_link_was_cut_joins_the_restart() -> None:
    """It sends facts before its next heartbeat is due, and node 0 counts them as a sign of life."""
    nodes = Nodes(silent=3.0)
    lost = threading.Event()

    def act(ours: Machines) -> Any:
        meet(ours)
        ours.ranks_by_node = (1, 1, 1)
        if ours.node.rank == 2:
            vanish(ours)
            assert lost.wait(60)
            ours.open()
            return meet(ours)
        outcome = ours.settle(Outcome(code=75, rank=0, cause="peer", message="error: Connection closed by peer"))
        assert outcome.cause == "unreachable"
        ours.follow(lambda: {"again": True})
        lost.set()
        return meet(ours)

    assert list(nodes.run(act).values()) == [["a", "b", "c"]] * 3


def test_a_machine_reveals_nothing_to_a_false_node_0() -> None:
    """Whoever serves a store at that address without knowing the key learns no facts."""
    nodes = Nodes(count=2, patience=1.0)
    false = store.tcp_store()("127.0.0.1", nodes.port, is_master=True, wait_for_workers=False)
    honest = store.Store(lambda: false, key=None, seconds=5)
    honest.set("session", {"protocol": store.PROTOCOL, "run": "lan", "word": "w", "host": "a", "nodes": 2})
    nodes.start(1, meet, key=KEY)
    assert "another `MASTER_KEY`" in str(nodes.end()["b"])
    with suppress(Exception):
        assert not false.check(["seat/1"]) and not false.check(["0/facts/1"])
