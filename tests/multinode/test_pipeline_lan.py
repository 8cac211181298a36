"""One pipeline over three machines with links of 1 Gb/s, each with its own files (contract B16)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_play.plan.plan import Plan
from tests.conftest import metrics
from tests.home_machines import OWN, Home, home
from tests.lan import losses
from tests.multinode.test_train_cluster import events
from tests.quota import memory_limit, move
from tests.tiny_models import build_tiny_llama

pytestmark = pytest.mark.long
STEPS = 30


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Home]:
    with home(tmp_path, build_tiny_llama(tmp_path / "four", num_hidden_layers=4)) as home_machines:
        yield home_machines


def test_a_stage_is_killed_and_the_run_continues_from_the_first_machines_checkpoint(machines: Home) -> None:
    """Losses are those of one process; no machine has all layers, and the checkpoint on the first one has those of
    all.
    """
    words = (f"TRAIN_MAX_STEPS={STEPS}", "TRAIN_BATCH_SIZE=1")
    before = [machines.net.sent_bytes(k) for k in range(3)]
    machines.train("staged", "LAUNCH_STRATEGY=pipeline", "LAUNCH_MAX_RESTARTS=1", "TRAIN_SAVE_STEPS=5", *words)
    machines.until_step("staged", 8)
    for pid in machines.net.workers(1):
        os.kill(pid, signal.SIGKILL)
    machines.finish()
    assert "restarting: rank 1 (node2) was killed by SIGKILL" in machines.said(), machines.said()
    run = machines.run("staged")
    assert events(run) == ["started", "restarted", "finished"]
    assert losses(run) == pytest.approx(machines.alone(*words), rel=1e-5)
    assert len(list(run.checkpoint(STEPS).glob("optimizer-rank*.safetensors"))) == 3
    tokens = sum(metrics(run.path)[-1]["rank_tokens"][:1])
    assert tokens and all(machines.net.sent_bytes(k) > sent for k, sent in enumerate(before))


def test_a_model_that_fits_no_machine_is_trained_as_a_pipeline_by_default(tmp_path: Path) -> None:
    """The machines have 1.2 GB each, which the kernel enforces; states and weights of the model take as much in
    addition to torch's libraries.
    """
    most, cgroup = 1_200_000_000, "/sys/fs/cgroup"
    model = build_tiny_llama(
        tmp_path / "nine", hidden_size=512, intermediate_size=2048, num_hidden_layers=9, num_attention_heads=8
    )
    with home(tmp_path, model, own=[*OWN, cgroup]) as machines, contextlib.ExitStack() as stack:
        groups = [stack.enter_context(memory_limit(most)) for _ in range(3)]
        for k in range(3):
            for name, text in (("max", str(most)), ("current", "0"), ("stat", "inactive_file 0")):
                (machines.own(k, cgroup) / f"memory.{name}").write_text(text)
        words = ("TUNING_MODE=full", "TRAIN_MAX_STEPS=3", "TRAIN_SAVE_STRATEGY=no", "LAUNCH_NETWORK=1Gbit")
        machines.train("unasked", *words)
        limited: set[int] = set()

        def limit() -> bool:
            for k, group in enumerate(groups):
                for pid in machines.net.workers(k):
                    move(pid, group)
                    limited.add(k)
            return len(limited) == len(groups)

        machines.until(limit)
        machines.finish()
        run = machines.run("unasked")
    plan = Plan.load(run.plan)
    assert len(plan.stages) == 3
    assert any("pipeline, since a complete replica on each needs" in reason for reason in plan.reasons.values()), (
        plan.reasons
    )
    assert len(losses(run)) == 3 and (run.path / "model" / "model.safetensors").is_file()
