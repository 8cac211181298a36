"""The same command typed on every machine: launchers that meet, unequal numbers of processes, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sft_play.runs.checkpoints import list_checkpoints, step_of
from sft_play.runs.prepared import Prepared
from tests.conftest import metrics
from tests.lan import Lan, Typed, command_line, lan, losses
from tests.launcher import Launcher

pytestmark = pytest.mark.broad

PORT = "23456"


class Lan2(Typed):
    """A LAN whose hosts are given the same command, each with its rank."""

    def __init__(self, net: Lan, folder: Path, model: Path) -> None:
        super().__init__(net, folder)
        self.config = Launcher(folder, model).config

    def start(
        self, k: int, *words: str, nodes: int = 2, name: str = "by_hand", master: str | None = None, **env: str
    ) -> None:
        address = master or self.net.hosts[0].address
        run = () if words[0] == "resume" else (f"CONFIG={self.config}", f"RUN_NAME={name}")
        place = (f"NUM_NODES={nodes}", f"NODE_RANK={k}", f"MASTER_ADDR={address}", f"MASTER_PORT={PORT}")
        self.launch(k, *words, *run, *place, **env)

    def start_all(self, *words: str, nodes: int = 2, **options: str) -> None:
        """Type the same on every host, with one process each."""
        for k in range(nodes):
            self.start(k, "train-distributed", "NUM_GPUS=1", *words, nodes=nodes, **options)

    def end_all(self) -> list[tuple[int, str]]:
        """Return exit code and output of everything that was started."""
        ended = [(self.end(number=k), self.said(k)) for k in range(len(self.started))]
        self.started = []
        return ended


@pytest.fixture
def two(tmp_path: Path, tiny: Path) -> Iterator[Lan2]:
    with lan(tmp_path / "lan", nodes=2) as net:
        yield Lan2(net, tmp_path, tiny)


def all_ended_with_0(ended: Sequence[tuple[int, str]]) -> None:
    assert [code for code, _ in ended] == [0] * len(ended), "\n\n".join(output for _, output in ended)


def test_machines_train_with_unequal_numbers_of_processes_and_a_latecomer(two: Lan2) -> None:
    """Ranks 0, and 1 and 2: the losses are those of one process, which is trained while node 0 waits for node 1."""
    key = "known-on-both-nodes-only"
    two.start(0, "train-distributed", "NUM_GPUS=1", MASTER_KEY=key)
    alone = two.alone(k=1)
    two.until("waiting for node 1, up to 600 s; here: node 0 (node1)")
    two.start(1, "train-distributed", "NUM_GPUS=2", MASTER_KEY=key)
    ended = two.end_all()
    all_ended_with_0(ended)
    assert "the network is trusted" not in ended[0][1] and key not in ended[0][1] + ended[1][1]
    assert not [
        path for path in two.run("by_hand").path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()
    ]
    assert "all 2 nodes are here: node 0 (node1) with 1 process, node 1 (node2) with 2 processes" in ended[0][1]
    run = two.run("by_hand")
    assert sorted(path.name for path in run.logs.glob("rank*.log")) == ["rank0.log", "rank1.log", "rank2.log"]
    assert losses(run) == pytest.approx(alone, rel=1e-5)
    assert len(metrics(run.path)[0]["rank_tokens"]) == 3


@pytest.mark.long
def test_the_name_of_node_0_may_resolve_to_127_0_1_1_there(two: Lan2) -> None:
    """Debian's /etc/hosts names the loopback: without the rendezvous node 0 would offer it to the others."""
    hosts = two.folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node1\n")
    done = two.net.run(0, ["mount", "--bind", hosts, "/etc/hosts"])
    assert done.returncode == 0, done.stderr
    two.start_all(master="node1")
    ended = two.end_all()
    all_ended_with_0(ended)
    for name in ("launcher.log", "launcher-from-rank1.log"):
        assert "GLOO_SOCKET_IFNAME=eth0" in (two.run("by_hand").logs / name).read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize("cut", ["while it trains", "before the first step"])
def test_a_cut_link_ends_every_launcher_and_names_the_node(cut: str, tmp_path: Path, tiny: Path) -> None:
    """The launcher behind the cut ends by itself, also before the first step, as when a shared disk blocks imports."""
    with lan(tmp_path / "lan", nodes=3) as net:
        three = Lan2(net, tmp_path, tiny)
        three.start_all("TRAIN_MAX_STEPS=100000", "TRAIN_SAVE_STEPS=5", nodes=3)
        run = three.run("by_hand")
        if "first" in cut:
            three.until("\nrun ", 2)
        else:
            three.until(lambda: run.metrics.is_file() and len(metrics(run.path)) > 20)
        net.link(2, up=False)
        began = time.monotonic()
        ended = three.end_all()
        assert [code for code, _ in ended] == [75] * 3, ended
        assert time.monotonic() - began < (60 if "first" in cut else 30), ended
        errors = [[line for line in output.splitlines() if line.startswith("error: rank 2")] for _, output in ended[:2]]
        assert errors[0] == errors[1] and errors[0][0].startswith(
            "error: rank 2 (node3) cannot be reached: node 2 (node3) has been silent for"
        ), ended
        assert "error: rank 0 (node1) cannot be reached: node 0 (node1) has not answered for" in ended[2][1]
        assert not any(map(net.workers, range(3)))


@pytest.mark.long
def test_a_machine_that_vanishes_after_its_last_step_does_not_delay_others(two: Lan2) -> None:
    """Its ranks have done their work; torchrun's agents would wait 300 s for each other."""
    two.start_all("TRAIN_MAX_STEPS=20", "LAUNCH_SILENT_SECONDS=6")
    run = two.run("by_hand")
    two.until(lambda: run.metrics.is_file() and bool(metrics(run.path)))
    for pid in two.net.pids(1):
        if "accelerate.commands.launch" in command_line(pid):
            os.kill(pid, signal.SIGSTOP)
    two.until(run.rank_exit(1).exists)
    two.started[1][0].send_signal(signal.SIGSTOP)
    assert two.end(60, 0) == 0 and f"done: {run.path}" in two.said(0)


def test_a_machine_joins_the_restart_when_its_link_is_back(tmp_path: Path, tiny: Path) -> None:
    """The others wait for it and continue from a checkpoint; then one machine is asked to stop, and all save."""
    with lan(tmp_path / "lan", nodes=3) as net:
        three = Lan2(net, tmp_path, tiny)
        words = ("TRAIN_MAX_STEPS=100000", "TRAIN_SAVE_STEPS=5", "LAUNCH_MAX_RESTARTS=1", "LAUNCH_SILENT_SECONDS=6")
        three.start_all(*words, nodes=3, MASTER_KEY="known-on-all-three-of-them")
        run = three.run("by_hand")
        three.until(lambda: run.checkpoint(5).exists())
        net.link(2, up=False)
        three.until("waiting for node 2", 0)
        three.until("waiting for node 0 at", 2)
        net.link(2, up=True)
        three.until(lambda: three.said(2).count("all 3 nodes are here") == 2)
        reached = metrics(run.path)[-1]["step"]
        three.until(lambda: metrics(run.path)[-1]["step"] > reached)
        three.started[1][0].terminate()
        ended = three.end_all()
        assert [code for code, _ in ended] == [143] * 3, ended
        assert "restarting: rank 2 (node3) cannot be reached: node 2 (node3) has been silent for" in ended[0][1]
        last = max(step_of(path) for path in list_checkpoints(run))
        assert [row["step"] for row in metrics(run.path)] == list(range(1, last + 1)), (
            "nothing is trained twice, nothing is lost"
        )


@pytest.mark.long
def test_a_resumed_run_meets_first_and_each_node_reads_its_own_rows(two: Lan2) -> None:
    """A node has the same rows in another folder and a separate cache; unequal numbers are remembered per node."""
    for k, count in enumerate((1, 2)):
        folder = two.folder / f"home{k}"
        folder.mkdir()
        rows = shutil.copy(two.folder / "rows.jsonl", folder)
        words = (f"NUM_GPUS={count}", f"DATA_TRAIN_PATH={rows}", "TRAIN_MAX_STEPS=4", "TRAIN_SAVE_STEPS=2")
        two.start(k, "train-distributed", *words, SFT_PLAY_CACHE=str(folder / "cache"))
    all_ended_with_0(two.end_all())
    run = two.run("by_hand")
    for k, node_run in enumerate((run, run.of_node(1))):
        prepared = Prepared.load(node_run.prepared).train
        assert prepared and str(two.folder / f"home{k}") in prepared.path
    for k in range(2):
        two.start(
            k, "resume", "RUN=by_hand", "TRAIN_MAX_STEPS=6", SFT_PLAY_CACHE=str(two.folder / f"home{k}" / "cache")
        )
    ended = two.end_all()
    all_ended_with_0(ended)
    assert "node 1 (node2) with 2 processes" in ended[0][1]
    assert metrics(run.path)[-1]["step"] == 6
