"""Saving on disks that fill, in the background, and under SIGKILL: real processes, real file systems."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sft_play.files import read_json
from sft_play.runs.checkpoints import clean_up, newest_valid
from sft_play.runs.folder import RunFolder
from tests.launcher import family
from tests.tiny_models import build_tiny_llama
from tests.training_runs import Trial, column, command, logs, make_run, must_train, rows, train
from tests.waiting import until

SECONDS = 240
SIZE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
"""A model of 0.8 million weights: 10 MB a checkpoint, states included."""
TIMED = ("trainer_state.json", "stamp.json", "states.json", "adapter_config.json")
"""Files that hold seconds and memory, what the working tree was like, or (PEFT's) a set, in another order in every
process.
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("saving") / "model", **SIZE)


@contextlib.contextmanager
def mounted(place: Path) -> Iterator[Path]:
    """Mount a disk of 64 MB."""
    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(path: Path) -> None:
    """Fill the disk of `path`."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(2**20))


@contextlib.contextmanager
def training(run: RunFolder, console: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield the workers of a run and end them; their output goes to a file on a disk that is not full."""
    arguments, variables = command(run)
    with console.open("w") as output:
        process = subprocess.Popen(arguments, env=variables, stdout=output, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        for running in [*family(process.pid), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                running.kill()
        process.wait(240)


def wait(
    condition: Callable[[], object], process: subprocess.Popen[str], run: RunFolder, *, pause: float = 0.05
) -> None:
    until(condition, process=process, seconds=SECONDS, pause=pause, explanation=lambda: logs(run))


@pytest.fixture
def console(tmp_path: Path) -> Path:
    return tmp_path / "console.txt"


def steps(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.glob("step-*"))


def partials(run: RunFolder) -> list[Path]:
    return list(run.checkpoints.glob(".step-*.partial"))


@pytest.mark.slow
def test_training_continues_when_the_disk_fills_during_a_save(base: Path, tmp_path: Path, console: Path) -> None:
    settings = (
        "train.save_steps: 2",
        "train.max_steps: 100000",
        "train.eval_steps: 100000",
        "train.save_total_limit: 2",
    )
    with mounted(tmp_path / "disk") as disk:
        run = make_run(disk / "run", base, Trial(ranks=((8, 1),), settings=settings, steps=100_000))
        filler = disk / "other"
        with training(run, console) as process:
            wait(lambda: steps(run), process, run)
            wait(lambda: partials(run), process, run, pause=0.0005)
            fill(filler)
            wait(lambda: "was not saved" in console.read_text(), process, run)
            assert "no space" in console.read_text()
            checkpoint, _ = newest_valid(run)
            assert checkpoint is not None and not partials(run)
            wait(lambda: console.read_text().count("was not saved") > 2, process, run)
            assert newest_valid(run)[0] == checkpoint
            filler.unlink()
            wait(lambda: "checkpoints are being saved again: step-" in console.read_text(), process, run)
            newer, skipped = newest_valid(run)
            assert newer is not None and newer.name > checkpoint.name and not skipped
        assert "Traceback" not in console.read_text()
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        trained = [row["step"] for row in lines if row["kind"] == "train"]
        assert trained == sorted(set(trained)), "each step at most once; rows for which there was no room are lost"


def content(checkpoint: Path) -> dict[str, Any]:
    """Return size and checksum of each file."""
    files = read_json(checkpoint / "manifest.json")["files"]
    return {name: facts for name, facts in files.items() if name not in TIMED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("ddp", "full"),
        pytest.param("zero3", "lora", marks=pytest.mark.long),
        pytest.param("fsdp2", "full", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_written_in_the_background_has_the_same_bytes(
    base: Path, tmp_path: Path, strategy: str, mode: str
) -> None:
    """Of two ranks that save at steps 4 and 8."""
    synchronous, background = (
        must_train(
            make_run(
                tmp_path / name / "run",
                base,
                Trial(ranks=((4, 1), (4, 1)), strategy=strategy, mode=mode, settings=(f"train.async_save: {name}",)),
            )
        )
        for name in ("false", "true")
    )
    assert steps(background) == ["step-000004", "step-000008"] == steps(synchronous)
    for name in steps(background):
        before, after = content(synchronous.checkpoints / name), content(background.checkpoints / name)
        assert before == after
        sizes, states = (
            json.loads((run.checkpoints / name / "states.json").read_text()) for run in (synchronous, background)
        )
        assert states | {"counters": {}} == sizes | {"counters": {}}
        assert sum("rng-rank" in file for file in after) == 2
        assert len({path.stat().st_mode for path in (background.checkpoints / name).iterdir()}) == 1, (
            "all files may be read alike"
        )
    assert column(background, "loss") == column(synchronous, "loss")
    for run, expected in ((synchronous, False), (background, True)):
        saves = rows(run, "save")
        assert [row["step"] for row in saves] == [4, 8]
        assert [row["background"] for row in saves] == [expected, expected]
        for row in saves:
            size = sum(
                path.stat().st_size for path in run.checkpoint(row["step"]).iterdir() if path.name != "manifest.json"
            )
            assert row["bytes"] == size
            assert min(row["verify_seconds"], row["write_seconds"], row["pause_seconds"]) > 0


@pytest.mark.slow
def test_a_process_killed_while_it_writes_in_the_background_leaves_the_previous_checkpoint(
    base: Path, tmp_path: Path, console: Path
) -> None:
    settings = ("train.save_steps: 2", "train.max_steps: 100000", "train.eval_steps: 100000", "train.async_save: true")
    run = make_run(tmp_path / "run", base, Trial(ranks=((8, 1),), settings=settings, steps=100_000))
    with training(run, console) as process:
        wait(lambda: steps(run), process, run)
        wait(lambda: partials(run), process, run, pause=0.0005)
        family(process.pid, "sft_play.train")[0].kill()
        process.wait(240)
    unfinished = partials(run)
    newest, skipped = newest_valid(run)
    assert newest is not None and not skipped
    assert len(clean_up(run)) == len(unfinished) and not partials(run)
    assert newest_valid(run) == (newest, [])


@pytest.mark.slow
def test_a_last_save_on_a_full_disk_is_an_error_and_keeps_earlier_checkpoints(base: Path, tmp_path: Path) -> None:
    """Of two ranks, at the end of training: both leave with code 3, and what was saved before stays."""
    trial = Trial(ranks=((4, 1), (4, 1)), strategy="ddp", settings=("train.save_steps: 4", "train.eval_steps: 100000"))
    with mounted(tmp_path / "disk") as disk:
        run = make_run(disk / "run", base, trial)
        room = shutil.disk_usage(disk).free - 15_000_000  # for one checkpoint, not for two
        with (disk / "other").open("wb") as other:
            os.posix_fallocate(other.fileno(), 0, room)
        done = train(run)
        assert done.returncode != 0
        for rank in (0, 1):
            record = json.loads(run.rank_exit(rank).read_text())
            assert (
                record["code"] == 3
                and "the last save failed" in record["error"]
                and f"make resume RUN={run.path}" in record["error"]
            ), record
        assert steps(run) == ["step-000004"]
        assert newest_valid(run) == (run.checkpoint(4), [])
