"""A configuration that asks for Unsloth runs in the separate Unsloth environment, or is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.config.call import Call
from sft_play.errors import UserError
from tests.conftest import Program, environment
from tests.documents import ROOT

PROGRAM = "import sys; sys.prefix = sys.argv.pop(1); from sft_play.__main__ import main; sys.exit(main())"


@pytest.fixture
def unsloth_command(cache: Path, tmp_path: Path):
    """Run a command as the Python of the environment `env` under `tmp_path`."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "env"), *words]
        env = environment(cache, tmp_path / "runs")
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=240, check=False)

    return run


def test_unsloths_environment_gets_the_same_arguments(unsloth_command, tmp_path: Path) -> None:
    python = tmp_path / "env-unsloth" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; exit 9\n', encoding="utf-8")
    python.chmod(0o755)
    words = ("plan", "CONFIG=run_unsloth", "HARDWARE=24GB", "MODEL_NAME=it's 'one' $word")
    done = unsloth_command(*words)
    assert (done.returncode, done.stdout.splitlines()) == (9, ["-m", "sft_play", *words])
    assert unsloth_command("plan", "CONFIG=run_bnb", "HARDWARE=24GB", "JSON=1").returncode == 0


def test_without_unsloth_a_plan_is_made_and_training_names_its_installation(unsloth_command, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("method: grid\nkeys: {train.learning_rate: [1.0e-4, 2.0e-4]}\n")
    assert unsloth_command("plan", "CONFIG=run_unsloth", "HARDWARE=24GB").returncode == 0
    for command in ("train", "train-distributed", "sweep", "quickstart", "slurm", "doctor"):
        arguments = (f"SWEEP={sweep}",) if command == "sweep" else ()
        done = unsloth_command(command, "CONFIG=run_unsloth", *arguments)
        shown = done.stdout if command == "doctor" else done.stderr
        assert done.returncode == 3 and "make install-unsloth" in shown, shown


def test_commands_that_start_other_environments_are_refused_by_name(in_process: Program) -> None:
    in_process("kubernetes", "CONFIG=run_unsloth").refused(2, "`tuning.backend` is `unsloth`", "`kubernetes`")
    for command in ("train-cluster", "cluster-check"):
        with pytest.raises(UserError, match=f"`{command}` starts other environments, which lack Unsloth"):
            Call(command=command, options={"CONFIG": "run_unsloth"}).load_config()
