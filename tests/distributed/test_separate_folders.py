"""Machines with separate run folders: one checkpoint holds the states of all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sft_play.launch.environment import free_port
from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import verify
from tests.launcher import Launcher

pytestmark = pytest.mark.long


@pytest.fixture
def launcher(tmp_path: Path, tiny: Path) -> Launcher:
    return Launcher(tmp_path, tiny)


def on_both(launcher: Launcher, *words: str) -> list[tuple[int, str]]:
    """Return exit code and output of the two nodes."""
    shared = ("MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}")
    nodes = [
        launcher.start(*words, f"NODE_RANK={rank}", *shared, RUNS_DIR=str(launcher.folder / f"runs{rank}"))
        for rank in range(2)
    ]
    return [node.end() for node in nodes]


def start(launcher: Launcher, command: str, *words: str) -> list[tuple[int, str]]:
    return on_both(
        launcher, command, f"CONFIG={launcher.config}", "NUM_NODES=2", "NUM_GPUS=1", "RUN_NAME=apart", *words
    )


def test_the_states_of_all_ranks_are_in_the_first_machines_checkpoint(launcher: Launcher) -> None:
    words = ("TRAIN_MAX_STEPS=4", "TRAIN_SAVE_STEPS=2", "TUNING_LORA_DROPOUT=0.3", "LAUNCH_LOCAL_STEPS=3")
    for code, output in start(launcher, "train-distributed", *words):
        assert code == 0, output
    first, second = (RunFolder(launcher.folder / f"runs{rank}" / "apart") for rank in range(2))
    names = {path.name for path in first.checkpoint(2).iterdir()}
    assert verify(first.checkpoint(2)) is None
    assert {
        "rng-rank0.safetensors",
        "rng-rank1.safetensors",
        "optimizer-rank0.safetensors",
        "optimizer-rank1.safetensors",
    } <= names
    assert not second.checkpoints.exists() and not list(first.path.glob(".seen-*"))
    expected = (first.model / "adapter_model.safetensors").read_bytes()

    def again() -> str:
        shutil.rmtree(first.checkpoint(4), ignore_errors=True)
        shutil.rmtree(first.model)
        shutil.rmtree(second.checkpoints, ignore_errors=True)
        shutil.copytree(first.checkpoints, second.checkpoints, symlinks=True)
        for run in (first, second):
            lines = [line for line in run.events.read_text().splitlines(keepends=True) if '"finished"' not in line]
            run.events.write_text("".join(lines))
        outputs = on_both(launcher, "resume", "RUN=apart")
        assert [code for code, _ in outputs] == [0, 0], outputs
        return outputs[0][1] + first.rank_log(0).read_text()

    assert "no random states" not in again()
    assert (first.model / "adapter_model.safetensors").read_bytes() == expected
