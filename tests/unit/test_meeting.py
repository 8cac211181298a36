"""Launchers of several nodes that meet: real sockets on loopback, one thread a node."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sft_play.errors import CheckpointError, DataError, HardwareError, RetryableError, UserError
from sft_play.launch import meeting, meeting_guest, meeting_host
from sft_play.launch.agreement import (
    NodeFacts,
    config_here,
    data_apart,
    disagreements,
    errors_from_json,
    errors_to_json,
    folders_apart,
    versions_here,
)
from sft_play.launch.environment import Node, ranks_of, worker_environment
from sft_play.launch.joining import judge_prepared
from sft_play.launch.local import worker_arguments
from sft_play.launch.meeting import Given, Meeting
from sft_play.launch.meeting_guest import Guest
from sft_play.launch.meeting_host import Host
from sft_play.launch.network import free_port, port_is_free
from sft_play.launch.settings import accelerate_yaml
from sft_play.launch.wire import HEAD, LARGEST_BYTES, MAGIC, GoneError, Line, StrangerError, pack, unpack
from sft_play.plan.hardware import Device
from sft_play.runs.folder import RunFolder
from tests.documents import on_page
from tests.plans import simple_plan
from tests.unit.test_calibration import calibration

CARD = Device(name="RTX 3060", memory_bytes=12 * 2**30, free_bytes=11 * 2**30, bf16=True, compute_capability=(8, 6))
Act = Callable[[Meeting], Any]


class Clock:
    """The time in which this process ran: where a busy machine lets it stand for longer than half a second, nobody is late for that."""

    def __init__(self) -> None:
        self.now, self.read, self.lock = 0.0, time.monotonic(), threading.Lock()
        self.sleep = time.sleep

    def monotonic(self) -> float:
        with self.lock:
            read = time.monotonic()
            self.now, self.read = self.now + min(read - self.read, 0.5), read
            return self.now


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_host, "GRACE_SECONDS", 1.0)
    clock = Clock()
    for module in (meeting, meeting_host, meeting_guest):
        monkeypatch.setattr(module, "time", clock)


def facts(rank: int, **changes: Any) -> NodeFacts:
    known: dict[str, Any] = {
        "rank": rank, "host": "abcd"[rank], "num_nodes": 3, "run": "lan", "resumed": False, "checkpoint": None,
        "command": {"command": '"auto"'}, "config": {"train.seed": "1", "train.batch_size": '"auto"'},
        "versions": {"python": "3.11", "torch": "2.13.0"}, "kind": "cuda", "devices": (CARD,) * (rank + 1),
    }  # fmt: skip
    return NodeFacts(**{**known, **changes})


def judge(given: Sequence[Given]) -> list[UserError]:
    return disagreements([NodeFacts.from_json(one) for one in given])


def agree(given: Sequence[Given]) -> list[UserError]:
    return []


class Nodes:
    """Nodes of one meeting, each in a thread: what each returned or raised."""

    def __init__(self, count: int = 3, patience: float = 10.0) -> None:
        self.port, self.count, self.patience = free_port(), count, patience
        self.ended: dict[str, Any] = {}
        self.threads: list[threading.Thread] = []

    def make(self, rank: int, host: str = "", **changes: Any) -> Meeting:
        node = Node(rank=rank, count=changes.pop("count", self.count), master_port=self.port, key=changes.pop("key", None))
        kind = Guest if rank else Host
        return kind(node=node, host=host or "abcd"[rank], patience=changes.pop("patience", self.patience), **changes)

    def start(self, meeting: Meeting, act: Act, name: str = "") -> None:
        def body() -> None:
            try:
                self.ended[name or meeting.host] = act(meeting)
            except (UserError, GoneError) as error:
                self.ended[name or meeting.host] = error
                meeting.fail(error)
            finally:
                meeting.close()

        self.threads.append(threading.Thread(target=body, daemon=True))
        self.threads[-1].start()

    def end(self) -> dict[str, Any]:
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive()
        return self.ended

    def listening(self) -> None:
        until = time.monotonic() + 5
        while port_is_free(self.port):
            assert time.monotonic() < until
            time.sleep(0.01)


def one_round(given: NodeFacts) -> Act:
    return lambda meeting: meeting.exchange(given.to_json(), judge)


def refused(nodes: Nodes, kind: type[UserError], *words: str) -> str:
    """Every node ended by the same error; returns it."""
    errors = list(nodes.end().values())
    assert all(type(error) is kind for error in errors), errors
    assert len({error.render() for error in errors}) == 1, errors
    for word in words:
        assert word in errors[0].render(), errors[0].render()
    return errors[0].render()


def test_a_late_node_is_waited_for_and_all_get_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes()

    def act(meeting: Meeting) -> Any:
        first = meeting.exchange(facts(meeting.node.rank).to_json(), judge)
        second = meeting.exchange({"hash": "x", "plan": meeting.node.rank}, agree)
        meeting.over = True
        return first, second, meeting.addresses()

    nodes.start(nodes.make(2), act)  # comes before there is anybody
    nodes.start(nodes.make(0), act)
    time.sleep(0.7)
    nodes.start(nodes.make(1), act)
    ended = nodes.end()
    first, second, addresses = ended["a"]
    assert ended["b"][:2] == ended["c"][:2] == (first, second)
    assert [NodeFacts.from_json(one) for one in first] == [facts(rank) for rank in range(3)]
    assert second == [{"hash": "x", "plan": rank} for rank in range(3)]
    assert addresses == ["127.0.0.1"] * 2 and ended["b"][2] == ["127.0.0.1"]
    assert port_is_free(nodes.port), "torch's store listens there next"
    assert "node 1 (b) has come" in capfd.readouterr().err


def test_absent_nodes_are_named_on_every_node() -> None:
    nodes = Nodes(count=3, patience=0.8)
    for rank in (0, 1):
        nodes.start(nodes.make(rank, patience=0.8 if rank == 0 else 20), one_round(facts(rank)))
    assert on_page("hangs-after-initialized", refused(nodes, RetryableError, "launch.join_seconds"))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"num_nodes": 2}, UserError, ("`NUM_NODES` is not the same", "node 0 (a): 3", "node 1 (b): 2")),
        ({"run": "other"}, UserError, ("`lan`", "`other`", "RUN_NAME")),
        (
            {"versions": {"python": "3.11", "torch": "2.12.0"}},
            HardwareError,
            ("`torch` is `2.13.0` on node 0 (a), `2.12.0` on node 1 (b)",),
        ),
        (
            {"versions": {"python": "3.11", "torch": "2.13.0", "flash-attn": "2.8.1"}},
            HardwareError,
            ("`flash-attn` is `not there` on node 0 (a), `2.8.1` on node 1 (b)",),
        ),
        (
            {"config": {"train.seed": "2", "train.batch_size": '"auto"'}},
            UserError,
            ("`train.seed` is `1` on node 0 (a), `2` on node 1 (b)",),
        ),
        (
            {"config": {"train.seed": "1"}},
            UserError,
            ('`train.batch_size` is `"auto"` on node 0 (a), `not there` on node 1 (b)',),
        ),
        ({"command": {"command": '"zero"'}}, UserError, ("the command differs",)),
        ({"kind": "cpu"}, HardwareError, ("some nodes have GPUs", "node 0 (a): 1 x RTX 3060", "node 1 (b): no GPU")),
        ({"resumed": True}, CheckpointError, ("node 1 (b): goes on with the run", "node 0 (a): begins it")),
    ],
)
def test_what_differs_is_refused_by_one_error_on_every_node(
    change: dict[str, Any], kind: type[UserError], words: tuple[str, ...]
) -> None:
    nodes = Nodes(count=2)
    others = {"num_nodes": 2} if "num_nodes" not in change else {}
    nodes.start(nodes.make(0), one_round(facts(0, **others)))
    nodes.start(nodes.make(1), one_round(facts(1, **(others | change))))
    shown = refused(nodes, kind, *words)
    assert "2.12.0" not in words[0] or on_page("different-versions-on-machines", shown)


def test_checkpoints_must_be_the_same() -> None:
    first = facts(0, resumed=True, checkpoint="step-000004 (aa)")
    other = facts(1, resumed=True, checkpoint="step-000002 (bb)")
    assert not disagreements([first, facts(1, resumed=True, checkpoint="step-000004 (aa)")])
    (error,) = disagreements([first, other, facts(2, resumed=True)])
    assert isinstance(error, CheckpointError)
    assert "node 0 (a) from step-000004, node 1 (b) from step-000002, node 2 (c) from its start" in error.message
    (error,) = disagreements([first, replace(other, checkpoint="step-000004 (bb)")])
    assert "is not the same checkpoint" in error.message


def test_several_problems_are_told_at_once() -> None:
    found = disagreements([facts(0), facts(1, run="x", versions={"python": "3.12", "torch": "2.13.0"})])
    assert [type(error) for error in found] == [UserError, HardwareError]


def test_two_nodes_with_one_rank() -> None:
    nodes = Nodes(count=3)
    nodes.start(nodes.make(0), one_round(facts(0)))
    nodes.listening()
    nodes.start(nodes.make(1), one_round(facts(1)))
    time.sleep(0.4)
    nodes.start(nodes.make(1, host="b2"), one_round(facts(1, host="b2")))
    time.sleep(0.4)
    nodes.start(nodes.make(2), one_round(facts(2)))
    refused(nodes, UserError, "two nodes have `NODE_RANK=1`: b and b2")


def test_a_second_node_0_and_a_rank_beyond() -> None:
    nodes = Nodes(count=3)
    nodes.start(nodes.make(0), one_round(facts(0)))
    nodes.listening()
    nodes.start(Guest(node=Node(rank=0, count=3, master_port=nodes.port), host="z", patience=5), one_round(facts(0)))
    refused(nodes, UserError, "two nodes have `NODE_RANK=0`: a and z")
    nodes = Nodes(count=2)
    nodes.start(nodes.make(0), one_round(facts(0, num_nodes=2)))
    nodes.start(nodes.make(2, count=3), one_round(facts(2)))
    refused(nodes, UserError, "`NODE_RANK` is 2 on c with `NUM_NODES=3`, but node 0 (a) has `NUM_NODES=2`")


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        yield sock


def test_strangers_are_dropped(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_host, "STRANGER_SECONDS", 0.5)
    nodes = Nodes(count=2)
    nodes.start(nodes.make(0), one_round(facts(0, num_nodes=2)))
    nodes.listening()
    greetings = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"",
        HEAD.pack(MAGIC, 1, LARGEST_BYTES + 1),
        HEAD.pack(MAGIC, 1, 2) + b"[]",
        pack({"kind": "hello", "rank": -1}),
        pack({"kind": "hello", "rank": 1, "num_nodes": 2, "host": 7, "session": "x", "given": {}}),
    ]
    for greeting in greetings:
        with connected(nodes.port) as sock:
            sock.sendall(greeting)
            assert sock.recv(10) == b"", greeting
    nodes.start(nodes.make(1), one_round(facts(1, num_nodes=2)))
    assert len(nodes.end()["a"]) == 2
    assert "dropped a connection from 127.0.0.1" in capfd.readouterr().err


def test_facts_that_are_not_understood_are_refused() -> None:
    from sft_play.launch.joining import _judge_nodes

    good = json.loads(json.dumps(facts(1).to_json()))
    assert NodeFacts.from_json(good) == facts(1)
    bad: list[dict[str, Any]] = [
        {"rank": "1"}, {"rank": True}, {"num_nodes": 2**20}, {"host": "x" * 300}, {"config": {"a": 1}}, {"devices": []},
        {"devices": [{"name": "x"}]}, {"devices": [{**good["devices"][0], "free_bytes": -1}]}, {"checkpoint": 1}, {"resumed": 1},
        {"devices": [{**good["devices"][0], "compute_capability": ["8"]}]}, {"more": 1},
    ]  # fmt: skip
    for change in bad:
        with pytest.raises(ValueError, match=r"."):
            NodeFacts.from_json(good | change)
        (error,) = _judge_nodes([{"facts": good}, {"facts": good | change}])
        assert isinstance(error, HardwareError)


def test_what_a_node_measured_goes_with_its_facts() -> None:
    """Its links stay at home, and what is not understood, or is of a device that it has not, is one error."""
    from sft_play.launch.joining import _judge_nodes

    known = calibration("NVIDIA RTX 3060", "cuda", links={})
    good = json.loads(json.dumps(facts(1, measured=(known,)).to_json()))
    assert NodeFacts.from_json(good) == facts(1, measured=(known,))
    one = good["measured"][0]
    linked = {**one, "links": {"nccl": {"ranks": 2, "latency_seconds": 1e-4, "bytes_per_second": 2e9}}}
    assert NodeFacts.from_json(good | {"measured": [linked]}) == facts(1, measured=(known,))
    step = one["steps"][0]
    bad: list[Any] = [
        None, {}, [None], [[]], [{}], [{**one, "device": "H200"}], [{**one, "kind": "cpu"}], [one, one], [{**one, "threads": None}],
        [{**one, "bandwidth": 0}], [{**one, "bandwidth": "9"}], [{**one, "bandwidth": float("nan")}], [{**one, "bandwidth": 10**400}],
        [{**one, "matmul_flops": {"512": -1.0}}], [{**one, "matmul_flops": []}], [{**one, "versions": {"torch": 2}}],
        [{**one, "steps": {}}], [{**one, "steps": [{}]}], [{**one, "steps": [{**step, "flops_per_second": 0}]}], [{**one, "more": 1}],
        [{**one, "steps": [{**step, "work": 1}]}], [{**one, "steps": [{**step, "threads": True}]}], [{**one, "links": {"nccl": 1}}],
        [{**one, "others": {"a": one}}], [{**one, "measured": "x" * 300}], [{**one, "steps": [{**step, "seconds_per_micro_step": -1}]}],
    ]  # fmt: skip
    for value in bad:
        (error,) = _judge_nodes([{"facts": good}, {"facts": good | {"measured": value}}])
        assert isinstance(error, HardwareError) and "a node sent what is not understood" in error.message, value
        assert error.hint == "install the same SFT-Play on every node"


def test_a_node_that_was_never_measured_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    from sft_play.launch.joining import _say_unmeasured

    known = calibration("RTX 3060", "cuda", links={})
    other = replace(CARD, name="RTX 4070")
    _say_unmeasured([facts(0), facts(1)])
    _say_unmeasured([facts(0), facts(1, measured=(known,))])
    assert not capfd.readouterr().err
    _say_unmeasured([facts(0, measured=(known,)), facts(1), facts(2, devices=(other,))])
    assert "`make bench` was not run on node 2 (c)\n" in capfd.readouterr().err


def test_another_version_of_the_protocol_is_told_to_both() -> None:
    nodes = Nodes(count=2)
    nodes.start(nodes.make(0), one_round(facts(0, num_nodes=2)))
    nodes.listening()
    with connected(nodes.port) as sock:
        sock.sendall(HEAD.pack(MAGIC, 2, 2) + b"{}")
        assert HEAD.unpack(sock.recv(HEAD.size))[1] == 1
    assert "speaks version 2" in str(nodes.end()["a"])


def test_a_node_that_was_started_again_takes_its_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_host, "ANSWER_SECONDS", 0.5)
    nodes = Nodes(count=4)
    nodes.start(nodes.make(0), one_round(facts(0, num_nodes=4)))
    nodes.listening()
    lines = [Line.over(socket.create_connection(("127.0.0.1", nodes.port))) for _ in range(2)]
    for rank, line in enumerate(lines, start=1):
        line.send(
            "hello",
            rank=rank,
            num_nodes=4,
            host="old",
            session=f"old{rank}",
            given=facts(rank, host="old", num_nodes=4).to_json(),
        )
    time.sleep(0.3)
    lines[0].close()  # the process has ended; the machine of the other has lost its power, and says nothing any more
    for rank in (1, 2):
        nodes.start(nodes.make(rank), one_round(facts(rank, num_nodes=4)))
    time.sleep(1.0)
    nodes.start(nodes.make(3), one_round(facts(3, num_nodes=4)))
    ended = nodes.end()
    assert [one["host"] for one in ended["a"]] == ["a", "b", "c", "d"] == [one["host"] for one in ended["c"]]
    lines[1].close()


def test_node_0_may_be_started_again_too() -> None:
    nodes = Nodes(count=2)
    with socket.create_server(("127.0.0.1", nodes.port)) as server:
        nodes.start(nodes.make(1), one_round(facts(1, num_nodes=2)))
        line = Line.over(server.accept()[0])
        until = time.monotonic() + 5
        while not line.receive() and time.monotonic() < until:
            time.sleep(0.01)
        line.send("heard")
        line.close()
    nodes.start(nodes.make(0), one_round(facts(0, num_nodes=2)))
    assert [one["host"] for one in nodes.end()["b"]] == ["a", "b"]


def test_why_node_0_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(meeting_guest, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(meeting_guest, "HEARD_SECONDS", 0.3)
    nodes = Nodes(count=2, patience=0.2)

    def ended() -> str:
        nodes.start(nodes.make(1), one_round(facts(1)))
        error = nodes.end()["b"]
        assert isinstance(error, RetryableError)
        return error.render()

    assert "127.0.0.1:" in (said := ended()) and on_page("connect-call-failed", said) and "NODE_RANK=0" in said
    with socket.create_server(("127.0.0.1", nodes.port)):
        assert "no launcher of SFT-Play" in (said := ended()) and "NUM_NODES" in said
    with socket.socket() as full:  # a queue that is full drops what comes, as a firewall does
        full.bind(("127.0.0.1", nodes.port))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", nodes.port))
        said = ended()
        assert "no answer" in said and "firewall" in said
        for one in waiting:
            one.close()
    monkeypatch.setattr(meeting_guest, "RESOLVE_SECONDS", 0.1)
    unknown = Guest(node=Node(rank=1, count=2, master_address="no-such-host.invalid", master_port=1), host="b", patience=0.2)
    with pytest.raises(UserError, match=r"`MASTER_ADDR` is `no-such-host\.invalid`, which cannot be resolved"):
        unknown.exchange({}, agree)


def test_who_has_the_port() -> None:
    nodes = Nodes(count=2)
    with socket.create_server(("", nodes.port)):
        nodes.start(nodes.make(0), one_round(facts(0)))
        error = nodes.end()["a"]
    assert isinstance(error, HardwareError) and f"port {nodes.port}" in error.message
    assert on_page("address-already-in-use", error.message)


def test_a_failure_between_the_rounds_is_told_to_all() -> None:
    nodes = Nodes(count=3)

    def act(meeting: Meeting) -> Any:
        meeting.exchange(facts(meeting.node.rank).to_json(), judge)
        if meeting.node.rank == 1:
            raise DataError("the file is empty", place="rows.jsonl", hint="fill it")
        return meeting.exchange({}, agree)

    for rank in range(3):
        nodes.start(nodes.make(rank), act)
    ended = nodes.end()
    assert ended["b"].message == "the file is empty"
    assert (
        ended["a"].render()
        == ended["c"].render()
        == "error: node 1 (b) could not go on: rows.jsonl: the file is empty\n\nhint: fill it"
    )
    assert type(ended["a"]) is type(ended["c"]) is DataError


@pytest.mark.parametrize("gone", [0, 1])
def test_a_node_that_vanishes_between_the_rounds(gone: int) -> None:
    nodes = Nodes(count=3)

    def act(meeting: Meeting) -> Any:
        meeting.exchange(facts(meeting.node.rank).to_json(), judge)
        if meeting.node.rank == gone:
            meeting.over = True  # as a process that was killed: it says nothing
            return None
        return meeting.exchange({}, agree)

    for rank in range(3):
        nodes.start(nodes.make(rank), act)
    ended = nodes.end()
    others = [ended["abcd"[rank]] for rank in range(3) if rank != gone]
    assert all(isinstance(error, RetryableError) and "before the workers started" in error.message for error in others), others


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_node_that_hangs_between_the_rounds_is_named(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says no word any more, and its connection stays: the others do not wait for ever."""
    monkeypatch.setattr(meeting, "LEAST_SILENCE", 1.0)
    nodes, over = Nodes(count=3), threading.Event()

    def act(here: Meeting) -> Any:
        here.exchange(facts(here.node.rank).to_json(), judge)
        here.patience = 2.0  # of silence; nobody was late for the first round
        if here.node.rank == frozen:
            here._rest()
            here.over = over.wait(60)
            return None
        try:
            return here.exchange({}, agree)
        finally:
            over.set()

    for rank in range(3):
        nodes.start(nodes.make(rank), act)
    ended = nodes.end()
    told = [ended["abcd"[rank]] for rank in range(3) if rank != frozen]
    assert any(
        isinstance(error, RetryableError) and f"node {frozen}" in error.message and "said nothing" in error.message
        for error in told
    ), told


def test_a_node_may_prepare_for_longer_than_it_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LEAST_SILENCE", 1.0)
    nodes = Nodes(count=3, patience=1.5)

    def act(here: Meeting) -> Any:
        here.exchange(facts(here.node.rank).to_json(), judge)
        time.sleep((2.5, 0.0, 2.0)[here.node.rank])
        return here.exchange({"rank": here.node.rank}, agree)

    for rank in range(3):
        nodes.start(nodes.make(rank), act)
    assert list(nodes.end().values()) == [[{"rank": rank} for rank in range(3)]] * 3


def narrow(here: Meeting) -> None:
    """Gives a node's connections the smallest buffers, and half a second for what the other side takes no more."""
    for line in here._open():
        for name in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            line.sock.setsockopt(socket.SOL_SOCKET, name, 1)
        line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 500)


def test_both_sides_may_prepare_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both only beat, and nobody asks for a round: buffers of a few KiB stand for hours with those of a kernel."""
    monkeypatch.setattr(meeting, "BEAT_SECONDS", 0.002)
    nodes = Nodes(count=2)

    def act(here: Meeting) -> Any:
        here.exchange(facts(here.node.rank, num_nodes=2).to_json(), judge)
        narrow(here)
        time.sleep((3.0, 2.5)[here.node.rank])
        return here.exchange({"rank": here.node.rank}, agree)

    for rank in range(2):
        nodes.start(nodes.make(rank), act)
    assert list(nodes.end().values()) == [[{"rank": 0}, {"rank": 1}]] * 2


def test_a_node_may_prepare_for_hours_while_node_0_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(meeting_host, "SAY_SECONDS", 0.0)
    monkeypatch.setattr(meeting_host, "wait_for", lambda *_: time.sleep(0.001))
    nodes = Nodes(count=2)

    def act(here: Meeting) -> Any:
        here.exchange(facts(here.node.rank, num_nodes=2).to_json(), judge)
        narrow(here)
        time.sleep((0.0, 2.5)[here.node.rank])
        return here.exchange({"rank": here.node.rank}, agree)

    for rank in range(2):
        nodes.start(nodes.make(rank), act)
    assert list(nodes.end().values()) == [[{"rank": 0}, {"rank": 1}]] * 2


def test_what_comes_between_the_rounds_is_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line.over(socket.create_connection(server.getsockname()))
        other, _ = server.accept()
    with other:
        other.sendall(b"".join(pack({"kind": kind}) for kind in ("here", "given", "wait", "here", "failed")) + b"SFTP")
        until = time.monotonic() + 5
        while len(line.kept) < 2 and time.monotonic() < until:
            line.drain()
        assert [line.receive(), line.receive()] == [{"kind": "given"}, {"kind": "failed"}]
        assert line.receive() is None and bytes(line.buffer) == b"SFTP"
        other.sendall(b"NOT US\n")
        while bytes(line.buffer) == b"SFTP" and time.monotonic() < until:
            line.drain()
        for _ in range(2):
            line.drain()
            with pytest.raises(StrangerError):
                line.receive()
    line.close()


def test_stops_are_told_as_such() -> None:
    from sft_play.launch.meeting import why

    assert "was stopped on request" in why(KeyboardInterrupt(), "node 1 (b)")[0].message
    assert "was stopped on request" in why(SystemExit(143), "node 1 (b)")[0].message
    (prepared,) = why(SystemExit(4), "node 1 (b)")
    assert isinstance(prepared, DataError) and "its own output" in prepared.message
    assert isinstance(why(ZeroDivisionError(), "node 1 (b)")[0], RetryableError)


def test_folders_apart() -> None:
    nodes = [facts(rank=1), facts(rank=2)]
    for strategy, save, found in (("ddp", "steps", nodes), ("fsdp2", "no", nodes), ("zero2", "steps", [])):
        assert not folders_apart(found, strategy=strategy, save_strategy=save)
    (error,) = folders_apart(nodes, strategy="zero2", save_strategy="steps")
    assert isinstance(error, CheckpointError)
    assert f"{nodes[0].name}, {nodes[1].name} do not see the run folder of node 0" in error.message
    (told,) = errors_from_json(errors_to_json([error]))
    assert (type(told), told.render()) == (CheckpointError, error.render())


def test_data_apart() -> None:
    here = [facts(rank, num_nodes=3) for rank in range(3)]
    same = {"base model": "m", "training data": "8 rows, 90 tokens, abc"}
    assert not data_apart(here, [same, dict(same), dict(same)])
    (error,) = data_apart(here, [same, same | {"training data": "9 rows, 95 tokens, def"}, {"base model": "m"}])
    assert isinstance(error, DataError)
    assert "the training data: 8 rows, 90 tokens, abc on node 0 (a), 9 rows, 95 tokens, def on node 1 (b)" in error.message
    assert "none on node 2 (c)" in error.message


def test_every_node_plans_for_all_processes() -> None:
    here = [facts(rank, num_nodes=2) for rank in range(2)]  # with 1 and 2 devices
    content = {"base model": "m", "training data": "8 rows, 90 tokens, abc"}
    assert not judge_prepared(
        here, [{"prepared": content, "world_size": 3, "plan": {}}, {"prepared": content, "world_size": 3}], "steps"
    )
    (error,) = judge_prepared(here, [{"prepared": content, "world_size": 3}, {"prepared": content, "world_size": 4}], "steps")
    assert isinstance(error, HardwareError)
    assert error.message == "the nodes have 3 processes in all, but node 0 (a) plans for 3, node 1 (b) plans for 4"
    assert (error.place, error.hint) == ("NUM_GPUS", "give NUM_GPUS on every node")
    (error,) = judge_prepared(here, [{"prepared": content, "world_size": 2}, {"prepared": content}], "steps")
    assert "node 0 (a) plans for 2, node 1 (b) plans for None" in error.message
    (error,) = judge_prepared(
        here, [{"prepared": content, "world_size": 3}, {"prepared": {"base model": 1}, "world_size": 3}], "steps"
    )
    assert "not understood" in error.message and error.hint == "install the same SFT-Play on every node"
    (error,) = judge_prepared(
        here, [{"prepared": content, "world_size": 3}, {"prepared": content | {"base model": "n"}, "world_size": 3}], "steps"
    )
    assert isinstance(error, DataError)


def test_strict_json() -> None:
    assert unpack(pack({"kind": "x", "ü": [1.5, None]})[HEAD.size :]) == {"kind": "x", "ü": [1.5, None]}
    for body in (b'{"kind":"x","a":NaN}', b'{"kind":"x","kind":"y"}', b'["kind"]', b'{"kind":1}', b"\xff", b"[" * 100_000):
        with pytest.raises(StrangerError):
            unpack(body)
    with pytest.raises(ValueError, match="bytes"):
        pack({"kind": "x", "text": "y" * LARGEST_BYTES})
    for bad in (None, [], [1], [{"message": 1}], [{"message": "x", "hint": 3}]):
        with pytest.raises(ValueError, match="error"):
            errors_from_json(bad)


def test_what_a_node_compares(tmp_path: Path) -> None:
    from sft_play.config.load import load_config

    def here(folder: str, extra: str = "") -> dict[str, str]:
        path = tmp_path / "x.yaml"
        path.write_text(f"model:\n  name: {folder}/tiny\ndata:\n  train_path: {folder}/rows.jsonl\n{extra}")
        return config_here(load_config(path))

    one, other = here("/home/ann"), here("/home/bob")
    assert one == other and one["data.train_path"] == '".../rows.jsonl"', "the content is compared after the preparation"
    assert here("/home/ann", "train:\n  seed: 7\n")["train.seed"] == "7" != one["train.seed"]
    assert here("/home/ann", "launch:\n  join_seconds: 7\n") == one
    assert {"python", "torch", "sft_play", "deepspeed", "source of sft_play"} <= versions_here("cpu").keys()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_unequal_numbers_of_processes_have_the_environment_of_equal_ones(strategy: str, tmp_path: Path) -> None:
    """What accelerate itself makes of our command line, on both nodes: as many processes as asked for, and no other difference."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    run = RunFolder(tmp_path)

    def launched(counts: tuple[int, int], rank: int) -> tuple[dict[str, str], str]:
        node = Node(rank=rank, count=2, master_address="127.0.0.1", master_port=free_port(), interface="lo")
        unequal = counts if len(set(counts)) > 1 else ()
        plan = simple_plan(world_size=sum(counts), num_nodes=2, strategy=strategy, backend="gloo", node_ranks=unequal)
        assert len(ranks_of(plan, node)) == counts[rank]
        run.accelerate.write_text(accelerate_yaml(plan, node, deepspeed_file=run.deepspeed, fsdp={}))
        variables = worker_environment(plan, node, {"OMP_NUM_THREADS": "1"}, cpu_threads=8).variables
        with mock.patch.dict(os.environ, variables, clear=True):
            args, _, _ = _validate_launch_command(launch_command_parser().parse_args(worker_arguments(run, node, plan=plan)[3:]))
            args.deepspeed_fields_from_accelerate_config = ""
            env = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
        assert (args.nnodes, args.node_rank) == ("2", rank)
        return env, args.nproc_per_node

    for rank, count in enumerate((1, 2)):
        env, started = launched((1, 2), rank)
        assert started == str(count)
        assert (env, started) == launched((count, count), rank)
        assert env["ACCELERATE_MIXED_PRECISION"] == "no"


KEY, OTHER = "a key that the nodes of this run know", "a key of another run, as long as it"


def test_only_who_knows_the_key_joins(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes(count=2)
    nodes.start(nodes.make(0, key=KEY), one_round(facts(0, num_nodes=2)))
    nodes.listening()
    seen = []
    for first in ({"kind": "hello"}, {"kind": "knock", "word": "x"}):  # a stranger that speaks our protocol, and has no key
        with connected(nodes.port) as sock:
            line, message = Line.over(sock), None
            for words in (first, {"kind": "hello"}):
                line.send(
                    **words, rank=1, num_nodes=2, host="evil", session="s", given=facts(1, num_nodes=2).to_json(), proof="ä"
                )
                until = time.monotonic() + 5
                while (message := line.receive()) is None and time.monotonic() < until:
                    time.sleep(0.01)
                seen.append(message)
                if message and message["kind"] == "refused":
                    break
    assert [one and one["kind"] for one in seen] == ["refused", "word", "refused"] and "facts" not in str(seen)
    for key in (None, OTHER):
        nodes.start(nodes.make(1, "x", key=key), one_round(facts(1, num_nodes=2)), str(key))
    nodes.start(nodes.make(1, key=KEY), one_round(facts(1, num_nodes=2)))
    ended = nodes.end()
    assert [one["host"] for one in ended["a"]] == ["a", "b"] == [one["host"] for one in ended["b"]]
    assert "takes only nodes that know its `MASTER_KEY`" in str(ended["None"]) and "another `MASTER_KEY`" in str(ended[OTHER])
    assert "or has another `MASTER_KEY`" in capfd.readouterr().err


@pytest.mark.parametrize("answers", [["heard"], ["word", "heard"]])
def test_a_node_tells_a_false_node_0_nothing(answers: list[str]) -> None:
    nodes = Nodes(count=2, patience=1.0)
    with socket.create_server(("127.0.0.1", nodes.port)) as server:
        nodes.start(nodes.make(1, key=KEY), one_round(facts(1, num_nodes=2)))
        line = Line.over(server.accept()[0])
        until, heard = time.monotonic() + 5, []
        while time.monotonic() < until and not heard:
            heard += [message] if (message := line.receive()) else []
        for kind in answers:
            line.send(kind, word="x", proof="0" * 64)
        error = nodes.end()["b"]
        assert [message["kind"] for message in heard] == ["knock"] and "given" not in heard[0]
        assert "another `MASTER_KEY`" in str(error) if "word" in answers else "did not reach node 0" in str(error)
        line.close()
