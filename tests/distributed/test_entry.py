"""The entry point under an operator's variables, with real trainings: two containers' worth of processes find each other and train."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sft_play.launch.environment import free_port
from tests.conftest import ROOT, metrics
from tests.tiny_models import build_tiny_llama

SECONDS = 240
pytestmark = pytest.mark.slow


def own_address() -> str:
    """Returns an address of this machine that is not loopback; asking for a route sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            pytest.skip("this machine has no address but loopback")


def operators_variables(rank: int, address: str, port: int) -> dict[str, str]:
    """Returns what the Training Operator gives pod `rank` of two with one process each; `tests/unit/test_entry.py` has the other schedulers."""
    mine = "localhost" if rank == 0 else address  # as older operators tell their masters
    return {
        "MASTER_ADDR": mine, "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank), "PET_NNODES": "2",
        "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": mine, "PET_MASTER_PORT": str(port), "POD_IP": address,
    }  # fmt: skip


class Pods:
    """Two containers of one run, on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.started: list[subprocess.Popen[str]] = []
        rows = [{"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"I say {i} now"}]}
                for i in range(8)]  # fmt: skip
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config = folder / "demo.yaml"
        self.config.write_text(
            f"model:\n  name: {build_tiny_llama(folder / 'tiny')}\n  max_seq_len: 64\ntuning:\n  mode: lora\n"
            f"data:\n  train_path: {folder / 'rows.jsonl'}\ntrain:\n  global_batch_size: 4\n  save_steps: 5\n"
        )

    def start(self, environ: Mapping[str, str], *words: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ACCELERATE_", "SFT_", "SKYPILOT_"))}
        ours = {"PYTHONPATH": str(ROOT), "RUNS_DIR": str(self.runs), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                "SFT_PLAY_CACHE": str(self.folder / "cache")}  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "sft_play.schedulers.entry",
            "train-distributed",
            f"CONFIG={self.config}",
            "RUN_NAME=demo",
            *words,
        ]
        one = subprocess.Popen(
            command, env={**kept, **ours, **environ}, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.started.append(one)
        return one

    def pair(self, *words: str) -> list[subprocess.Popen[str]]:
        """Starts both pods with the words that `make kubernetes` renders."""
        address, port = own_address(), free_port()
        typed = ("NUM_GPUS=1", "NUM_NODES=2", f"MASTER_PORT={port}", "LAUNCH_JOIN_SECONDS=120", *words)
        return [self.start(operators_variables(rank, address, port), *typed) for rank in range(2)]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    found = Pods(tmp_path)
    yield found
    for one in found.started:
        one.kill()
        one.wait()


def ended(both: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    said = [one.communicate(timeout=SECONDS)[0] for one in both]
    return [one.returncode for one in both], said


def events(pods: Pods) -> list[Any]:
    return [json.loads(line)["event"] for line in (pods.runs / "demo" / "events.jsonl").read_text().splitlines()]


def test_two_pods_find_each_other_and_train(pods: Pods) -> None:
    codes, said = ended(pods.pair("TRAIN_MAX_STEPS=3"))
    assert codes == [0, 0], said
    assert "NODE_RANK=1" in said[1] and "LAUNCH_AUTO_RESUME=true" in said[1]
    assert len(metrics(pods.runs / "demo")) == 3
    assert [len(row["rank_tokens"]) for row in metrics(pods.runs / "demo")] == [2] * 3


@pytest.mark.long
def test_a_pod_that_is_drained_saves_and_the_same_command_goes_on(pods: Pods) -> None:
    both = pods.pair("TRAIN_MAX_STEPS=300")
    rows, until = pods.runs / "demo" / "metrics.jsonl", time.monotonic() + SECONDS
    while not (rows.is_file() and len(rows.read_text().splitlines()) > 6):
        assert all(one.poll() is None for one in both) and time.monotonic() < until, [one.poll() for one in both]
        time.sleep(0.2)
    both[1].send_signal(signal.SIGTERM)
    codes, said = ended(both)
    assert codes == [143, 143], said
    assert len(metrics(pods.runs / "demo")) < 300
    codes, said = ended(pods.pair("TRAIN_MAX_STEPS=300"))
    assert codes == [0, 0], said
    assert [row["step"] for row in metrics(pods.runs / "demo")] == list(range(1, 301))
    assert events(pods).count("resumed") >= 1
