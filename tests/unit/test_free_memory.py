"""Before another attempt: GPU memory that the driver has not taken back yet, processes that SIGKILL does not end, locks of dead ones."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from sft_play.launch import attempt
from sft_play.launch.liveness import SCALE
from tests.nvml_double import MACHINES, Machine

PROGRAM = """
import sys
from sft_play.launch import attempt
from sft_play.plan.detect import detect
before = detect()
print("ready", flush=True)
sys.stdin.readline()
attempt.wait_until_free(before, [1])
"""


def becomes(folder: Path, machine: Machine) -> None:
    """Changes the machine at once: the other process may be looking."""
    machine.write(folder / "next")
    (folder / "next" / "machine.json").replace(folder / "machine.json")


@pytest.mark.parametrize(("scale", "freed"), [("1", True), ("0", False)])
def test_a_restart_waits_for_the_memory_of_its_own_cards(scale: str, freed: bool, tmp_path: Path) -> None:
    pair = MACHINES["rtx3090_pair"]
    first, second = pair.cards
    variables = {**os.environ, **pair.environment(tmp_path), SCALE: scale}
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=variables, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "ready\n"
        becomes(
            tmp_path, replace(pair, cards=(replace(first, free=1.0), replace(second, free=2.1)))
        )  # the first is not the run's
        process.stdin.write("\n")
        process.stdin.flush()
        said = [process.stderr.readline() for _ in range(2)][1]
        assert "21.5 GiB on cuda:1" in said and "cuda:0" not in said
        if freed:
            assert said.startswith("waiting until the memory of the processes that have ended is free")
            becomes(tmp_path, replace(pair, cards=(replace(first, free=1.0), second)))
        _, rest = process.communicate(timeout=30)
    assert process.returncode == 0
    assert ("still held after 0 s" in said + rest) is not freed


def test_locks_of_torchs_extension_builder_that_nobody_holds_are_removed(tmp_path: Path) -> None:
    folders = [tmp_path / "torch_extensions" / "py311_cpu" / name for name in ("held", "left")]
    for folder in folders:
        folder.mkdir(parents=True)
    held = FileBaton(str(folders[0] / "lock"))
    assert held.try_acquire()
    (folders[1] / "lock").touch()  # as a process leaves it that was killed
    for variables in ({"XDG_CACHE_HOME": str(tmp_path)}, {"HOME": str(tmp_path / "nobody")}):
        attempt.remove_abandoned_locks(variables)
        assert (folders[0] / "lock").exists() and not (folders[1] / "lock").exists()
    held.release()
