"""Trainings killed at random moments: SIGKILL from outside, the same command again, and the result of an undisturbed
run to the bit.

`SOAK_KILLS=100 .venv/bin/python -m pytest tests/distributed/test_soak.py -m long -k ddp -s` prints the table of
docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from sft_play.files import read_json_lines, read_object
from sft_play.launch.verdict import LOST
from sft_play.runs.checkpoints import newest_valid, step_of
from sft_play.runs.folder import RunFolder
from tests.conftest import ROOT, environment
from tests.places import question_rows

COMMANDS = {
    "single": ("train",),
    "ddp": ("train-distributed", "NUM_GPUS=2", "LAUNCH_STRATEGY=ddp"),
    "zero2": ("train-deepspeed", "NUM_GPUS=2", "LAUNCH_STRATEGY=zero2"),
    "fsdp2": ("train-fsdp", "NUM_GPUS=2"),
}
KILLS, STEPS, SAVE_STEPS = int(os.environ.get("SOAK_KILLS", "4")), 20, 5
AIMS = {"any": 40, "training": 25, "saving": 25, "evaluating": 10}
"""Weights of the moment: at any time of the launch, or once rank 0 is in this phase."""
TARGETS = {"rank": 45, "launcher": 25, "agent": 15, "all": 15}
"""Weights of what is killed."""
MARK = "SOAK_LAUNCH"
"""Variable that all processes of a launch inherit."""
GONE_SECONDS = 30.0
"""Within which everything of a launch must have ended after a kill (contract row B9)."""
CLOCKED = re.compile(r"seconds|per_second|memory|_gib|mfu|percent|mb_s|utilisation|temperature|watts|throttled")
"""Figures that a clock or the machine decides."""


@dataclass(kw_only=True)
class Soak:
    """One configuration, trained again and again by the same command."""

    folder: Path
    words: tuple[str, ...]
    variables: dict[str, str]
    chance: random.Random = field(default_factory=lambda: random.Random(5))
    lost_steps: list[int] = field(default_factory=list)
    gone_seconds: list[float] = field(default_factory=list)
    launches: int = 0

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.folder / "runs" / name)

    def processes(self) -> Iterator[tuple[psutil.Process, str]]:
        """Yield every living process of the newest launch with its role."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) != str(self.launches) or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                line = process.cmdline()
                agent, rank = "accelerate.commands.launch" in line, "sft_play.train" in line
                yield process, "agent" if agent else "rank" if rank else "launcher" if "sft_play" in line else "helper"

    def launch(self, run: RunFolder, *, kill_before: float | None) -> int | None:
        """Start the command; return its code, or `None` if it was killed within about `kill_before` seconds."""
        self.launches += 1
        run.phase.unlink(missing_ok=True)  # an earlier launch's
        argv = [sys.executable, "-m", "sft_play", *self.words, f"RUN_NAME={run.name}"]
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=self.variables | {MARK: str(self.launches)},
            start_new_session=True,
        )
        try:
            target = self._kill_in_time(process, run, kill_before) if kill_before else None
            begun = time.monotonic()
            output, _ = process.communicate(timeout=GONE_SECONDS if target else 600)
            while target and list(self.processes()) and time.monotonic() - begun < GONE_SECONDS:
                time.sleep(0.05)
            remaining = [f"{role} {child.pid}" for child, role in self.processes()]
            assert not remaining, f"alive after {GONE_SECONDS:.0f} s: {remaining}"
        finally:
            for child, _ in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        if target is None:
            assert process.returncode == 0, output
            return 0
        self.gone_seconds.append(time.monotonic() - begun)
        complete = process.returncode == 0 and run.training_metrics.is_file()  # a rank that had done all its work
        assert target in ("launcher", "all") or process.returncode == LOST or complete, output
        return 0 if complete else None

    def _kill_in_time(self, process: subprocess.Popen[str], run: RunFolder, before: float) -> str | None:
        """Send SIGKILL at a random moment; return its target, or `None` if the launch ended first."""
        aim = self.chance.choices(list(AIMS), list(AIMS.values()))[0]
        moment, begun = self.chance.uniform(0.05, before) if aim == "any" else 0.0, time.monotonic()
        while process.poll() is None:
            saving = any(run.checkpoints.glob(".step-*.partial"))
            phase = "saving" if saving else str(read_object(run.phase).get("phase", ""))
            if time.monotonic() - begun >= moment and aim in ("any", phase):
                time.sleep(self.chance.uniform(0, 0.05))
                alive = list(self.processes())
                roles = {role for _, role in alive} & TARGETS.keys() | {"all"}
                target = self.chance.choices(sorted(roles), [TARGETS[role] for role in sorted(roles)])[0]
                victims = [child for child, role in alive if target in (role, "all")]
                for child in self.chance.sample(victims, 1) if target == "rank" else victims:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                return target
            time.sleep(0.002)
        return None

    def check_checkpoints(self, run: RunFolder) -> None:
        """Assert that published checkpoints are complete and at most one save interval is lost."""
        newest, skipped = newest_valid(run)
        assert not skipped
        reached = max((row["step"] for row in read_json_lines(run.metrics) if row["kind"] == "train"), default=0)
        self.lost_steps.append(max(0, reached - (step_of(newest) if newest else 0)))
        assert self.lost_steps[-1] <= SAVE_STEPS


def exact(run: RunFolder) -> list[dict[str, Any]]:
    """Return the metrics rows in order without timings; JSON keeps every bit of a float."""
    rows = [row for row in read_json_lines(run.metrics) if row["kind"] in ("train", "eval")]
    return [{name: value for name, value in row.items() if not CLOCKED.search(name)} for row in rows]


@pytest.mark.long
@pytest.mark.timeout(60 * KILLS + 900)
@pytest.mark.parametrize("strategy", COMMANDS)
def test_killed_trainings_end_like_an_undisturbed_one(strategy: str, cache: Path, tmp_path: Path) -> None:
    for name, count in (("train", 200), ("val", 8)):
        (tmp_path / f"{name}.jsonl").write_text(question_rows(0, count, longest=8))
    config = tmp_path / "soak.yaml"  # JSON is YAML
    model = {
        "init": "random",
        "tokenizer": "train",
        "vocab_size": 300,
        "hidden_size": 64,
        "attention_heads": 4,
        "layers": 2,
    }
    train = {
        "global_batch_size": 8,
        "batch_size": 2,
        "max_steps": STEPS,
        "save_steps": SAVE_STEPS,
        "save_total_limit": 2,
    }
    answers = {
        "eval_strategy": "steps",
        "eval_steps": 8,
        "predict_with_generate": True,
        "generation_max_new_tokens": 12,
    }
    data = {
        "chat_template": "chatml",
        "train_path": str(tmp_path / "train.jsonl"),
        "val_path": str(tmp_path / "val.jsonl"),
    }
    tuning = {"mode": "full"}
    config.write_text(
        json.dumps({"model": model | {"max_seq_len": 128}, "tuning": tuning, "data": data, "train": train | answers})
    )
    variables = environment(cache, tmp_path / "runs", {"OMP_NUM_THREADS": "1"})
    soak = Soak(
        folder=tmp_path, words=(*COMMANDS[strategy], f"CONFIG={config}", "LAUNCH_AUTO_RESUME=true"), variables=variables
    )
    begun = time.monotonic()
    assert soak.launch(soak.run("undisturbed"), kill_before=None) == 0
    lasts, expected = time.monotonic() - begun, exact(soak.run("undisturbed"))
    assert [row["step"] for row in expected if row["kind"] == "train"] == list(range(1, STEPS + 1))
    runs = 0
    while len(soak.gone_seconds) < KILLS:
        runs += 1
        run = soak.run(f"disturbed-{runs}")
        while soak.launch(run, kill_before=lasts if len(soak.gone_seconds) < KILLS else None) != 0:
            soak.check_checkpoints(run)
        assert exact(run) == expected
        newest, skipped = newest_valid(run)
        assert newest is not None and not skipped and run.last.resolve() == newest.resolve()
        assert not [path for path in run.path.rglob(".*") if path.suffix != ".lock"], "half-written files"
    means = [sum(values) / max(1, len(values)) for values in (soak.gone_seconds, soak.lost_steps)]
    print(
        f"\n{strategy}: {len(soak.gone_seconds)} kills; processes gone after {means[0]:.1f} s"
        f" ({max(soak.gone_seconds):.1f} s); steps lost {means[1]:.1f} ({max(soak.lost_steps, default=0)}); {runs} of"
        f" {runs} runs equal to the bit"
    )
