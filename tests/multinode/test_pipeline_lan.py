"""One pipeline over three machines with links of 1 Gb/s, each with its own files (contract B16)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import metrics
from tests.home_machines import Home
from tests.lan import lan
from tests.multinode.test_train_cluster import events, kill_workers, losses
from tests.tiny_models import build_tiny_llama

pytestmark = pytest.mark.long
STEPS = 30


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Home]:
    folder = tmp_path / "lan"
    own = [folder / name for name in ("runs", "cache", "project", "models")]
    model = build_tiny_llama(tmp_path / "four", num_hidden_layers=4)
    with lan(folder, nodes=3, private=own) as net:
        yield Home(net, tmp_path, model, net.hosts[0].private[folder / "models"])


def test_a_stage_is_killed_and_the_run_continues_from_the_first_machines_checkpoint(machines: Home) -> None:
    """Losses are those of one process; no machine has all layers, and the checkpoint on the first one has those of all."""
    words = (f"TRAIN_MAX_STEPS={STEPS}", "TRAIN_BATCH_SIZE=1")
    before = [machines.net.sent_bytes(k) for k in range(3)]
    machines.start(
        "train-cluster", f"CONFIG={machines.config}", "RUN_NAME=staged", "LAUNCH_STRATEGY=pipeline", "LAUNCH_MAX_RESTARTS=1",
        "TRAIN_SAVE_STEPS=5", *words,
    )  # fmt: skip
    machines.until_step("staged", 8)
    assert kill_workers(machines, 1)
    machines.until(lambda: "restarting: " in machines.said())
    assert "restarting: rank 1 (node2) was killed by SIGKILL" in machines.said(), machines.said()
    assert machines.end() == 0, machines.said()
    run = machines.run("staged")
    assert events(run) == ["started", "restarted", "finished"]
    assert losses(run) == pytest.approx(machines.alone(*words), rel=1e-5)
    assert len(list(run.checkpoint(STEPS).glob("optimizer-rank*.safetensors"))) == 3
    tokens = sum(metrics(run.path)[-1]["rank_tokens"][:1])
    assert tokens and all(machines.net.sent_bytes(k) > sent for k, sent in enumerate(before))
