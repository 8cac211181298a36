"""The entry point under an operator's variables, with a real training: the processes of two containers find each other
and train.

`tests/unit/test_entry.py` covers the other schedulers and signals; `tests/multinode` covers how ranks stop and resume.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.launch.environment import free_port
from tests.conftest import metrics
from tests.launcher import SECONDS, Launcher

pytestmark = pytest.mark.slow


def own_address() -> str:
    """Return an address of this machine other than loopback; looking up a route sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            pytest.skip("this machine has no address but loopback")


def operators_variables(rank: int, address: str, port: int) -> dict[str, str]:
    """Return what the Training Operator gives pod `rank` of two with one process each."""
    mine = "localhost" if rank == 0 else address  # as older operators tell their masters
    return {
        "MASTER_ADDR": mine,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": mine,
        "PET_MASTER_PORT": str(port),
        "POD_IP": address,
    }


@pytest.mark.broad
def test_two_pods_find_each_other_and_train(tmp_path: Path, tiny: Path) -> None:
    """Use the words that `make kubernetes` renders."""
    launcher, address, port = Launcher(tmp_path, tiny), own_address(), free_port()
    command = [
        sys.executable,
        "-m",
        "sft_play.schedulers.entry",
        "train-distributed",
        f"CONFIG={launcher.config}",
        "RUN_NAME=demo",
        "NUM_GPUS=1",
        "NUM_NODES=2",
        f"MASTER_PORT={port}",
        "LAUNCH_JOIN_SECONDS=120",
    ]
    pods = [
        subprocess.Popen(
            command,
            env=launcher.environment | operators_variables(rank, address, port),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [pod.communicate(timeout=SECONDS)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    assert "NODE_RANK=1" in outputs[1] and "LAUNCH_AUTO_RESUME=true" in outputs[1]
    assert [len(row["rank_tokens"]) for row in metrics(launcher.runs / "demo")] == [2, 2]
