"""What faults look like over NCCL: who is named when a rank is killed, and what the flight recorder tells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import environment
from tests.launcher import start, tiny_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "variables", [{}, {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}], ids=["shared memory", "sockets"]
)
@pytest.mark.usefixtures("two_gpus")
def test_a_killed_rank_is_named_and_the_run_continues(
    variables: dict[str, str], cache: Path, tiny: Path, tmp_path: Path
) -> None:
    """Over sockets, as between machines, the other rank sees its peer go at once, and NCCL's watchdog may abort it."""
    words = ("train-distributed", "NUM_GPUS=2", "LAUNCH_MAX_RESTARTS=1", f"CONFIG={tiny_config(tmp_path, tiny)}")
    with start(environment(cache, tmp_path / "runs", variables), *words, name="killed") as launch:
        launch.wait_for_step(7)
        launch.workers()[1].kill()
        code, error = launch.end()
    assert code == 0, error
    restarted = next(event for event in launch.events() if event["event"] == "restarted")
    assert (restarted["rank"], restarted["cause"]) == (1, "killed"), error


PROGRAM = """
import json, sys
from pathlib import Path
import torch
from torch import distributed
from sft_play.training import faults
device = torch.device("cuda:0")
distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1, device_id=device)
before = faults.collectives_begun() or 0
for _ in range(3):
    distributed.all_reduce(torch.ones(4, device="cuda"))
torch.cuda.synchronize()
faults.keep_trace(Path(sys.argv[1]))
print(json.dumps(faults.collectives_begun() - before))
distributed.destroy_process_group()
"""


def test_the_flight_recorder_counts_nccls_operations(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "trace.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3"
    assert "nccl:all_reduce" in (tmp_path / "trace.json").read_text()
