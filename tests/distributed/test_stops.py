"""Stops on request in every phase, with real processes: exit in time with the right code, lose nothing, and continue
bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from sft_play.launch.process import STOPS
from tests.conftest import environment, metrics, ragged_rows, run_program
from tests.launcher import Started, start

pytestmark = pytest.mark.broad

IN_TIME = 25.0
"""Seconds from the signal to the launcher's end that the documentation promises."""
EXACT = {
    "train": ("step", "loss", "grad_norm", "learning_rate", "rank_loss", "rank_tokens"),
    "eval": ("step", "eval_loss", "eval_rougeL", "eval_answers", "eval_answer_tokens"),
}
STEPS, EVERY = 6, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A configuration and its undisturbed run."""

    config: Path
    environment: dict[str, str]
    words: tuple[str, ...]

    def start(self, name: str, *words: str) -> Started:
        return start(self.environment, *self.words, f"CONFIG={self.config}", *words, name=name)

    def complete(self, name: str, *words: str) -> str:
        """Run the same command to its end and return its output; it must succeed."""
        with self.start(name, *words) as launch:
            code, output = launch.end()
        assert code == 0, output
        return output

    def require_same(self, launch: Started, *words: str) -> str:
        """Complete a stopped launch to the undisturbed run's figures and weights; return its output."""
        output = self.complete(launch.run.name, *words)
        assert figures(launch.run) == figures(launch.run.parent / "whole"), output
        assert weights(launch.run) == weights(launch.run.parent / "whole")
        return output


def make_place(folder: Path, tiny: Path, cache: Path, *words: str) -> Place:
    train, held_out = ragged_rows(folder / "train.jsonl", 21), ragged_rows(folder / "val.jsonl", 12, seed=1)
    config = folder / "stops.yaml"
    config.write_text(
        f"model: {{name: {tiny}, max_seq_len: 256}}\n"
        "tuning: {mode: lora, lora: {r: 4, dropout: 0.1}}\n"
        f"data: {{train_path: {train}, val_path: {held_out}}}\n"
        f"train: {{global_batch_size: 8, batch_size: 2, max_steps: {STEPS}, learning_rate: 5.0e-3, save_steps: 100,\n"
        f"  eval_strategy: steps, eval_steps: {EVERY}, predict_with_generate: true, generation_max_new_tokens: 150}}\n"
        "eval: {batch_size: 2}\n"
        "launch: {auto_resume: true}\n",
        encoding="utf-8",
    )
    (folder / "runs").mkdir()
    place = Place(config=config, environment=environment(cache, folder / "runs", {"OMP_NUM_THREADS": "1"}), words=words)
    place.complete("whole")
    return place


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, tiny: Path, cache: Path) -> Place:
    return make_place(tmp_path_factory.mktemp("stops"), tiny, cache, "train")


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory, tiny: Path, cache: Path) -> Place:
    return make_place(tmp_path_factory.mktemp("stops2"), tiny, cache, "train-distributed", "NUM_GPUS=2")


def figures(run: Path) -> dict[str, list[list[Any]]]:
    """Return everything that a resumed run must repeat to the bit, each step once."""
    return {kind: [[row[key] for key in keys] for row in metrics(run, kind)] for kind, keys in EXACT.items()}


def weights(run: Path) -> bytes:
    return (run / "model" / "adapter_model.safetensors").read_bytes()


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def rows(launch: Started, kind: str) -> int:
    path = launch.run / "metrics.jsonl"
    return path.read_text().count(f'"kind": "{kind}"') if path.is_file() else 0


def preparing(launch: Started) -> bool:
    return bool(launch.family("sft_play.prepare"))


def loading(launch: Started) -> bool:
    return (launch.run / "logs" / "rank0.log").is_file()


def before_steps(launch: Started) -> bool:
    """Return whether metrics exist; a resume removes later rows only just before its first step."""
    return (launch.run / "metrics.jsonl").is_file()


def stepping(launch: Started) -> bool:
    return rows(launch, "train") == 1


def evaluating(launch: Started) -> bool:
    return rows(launch, "train") == EVERY and rows(launch, "eval") == 0


def saving(launch: Started) -> bool:
    return (
        bool(list((launch.run / "checkpoints").glob(".step-*.partial")))
        if (launch.run / "checkpoints").is_dir()
        else False
    )


def publishing(launch: Started) -> bool:
    return (launch.run / ".model.partial").is_dir()


def stop(launch: Started, moment: Callable[[Started], bool], number: int, target: str = "launcher") -> int:
    """Send a signal at a moment; return the exit code, which must arrive in time."""
    with launch:
        launch.wait_for(lambda: moment(launch))
        everybody = [psutil.Process(launch.process.pid), *launch.family()]
        if target == "launcher":
            launch.process.send_signal(number)
        elif target == "group":
            os.killpg(launch.process.pid, number)
        elif target == "everybody":  # as Slurm does to all processes of a job
            for process in everybody:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        elif target == "agent":
            launch.agent().send_signal(number)
        else:
            launch.workers()[int(target)].send_signal(number)
        code, output = launch.end(within=IN_TIME)
    assert "Traceback" not in output, output
    return code


ZERO3 = ("train-deepspeed", "LAUNCH_STRATEGY=zero3")


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ((), "1"),
        ((), "agent"),
        *(pytest.param(words, "1", marks=pytest.mark.long) for words in (("train-fsdp",), ZERO3)),
    ],
)
def test_ranks_leave_an_evaluation_together_and_the_same_command_continues(
    words: tuple[str, ...], target: str, double: Place, tmp_path: Path, tiny: Path, cache: Path
) -> None:
    place = make_place(tmp_path, tiny, cache, *words, "NUM_GPUS=2") if words else double
    launch = place.start(f"evaluation-{target}")
    assert stop(launch, evaluating, signal.SIGTERM, target) == 143, launch.output.read_text()
    last = launch.events()[-1]
    assert (last["event"], last["signal"], last["step"], last["saved"]) == ("stopped", "SIGTERM", EVERY, "step-000003")
    assert not rows(launch, "eval"), "an evaluation that did not end leaves no figures"
    assert "step-000003" in place.require_same(launch)


@pytest.mark.parametrize(
    "numbers",
    [(number,) for number in STOPS if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    + [(signal.SIGTERM, signal.SIGHUP)],
)
def test_a_session_that_ends_loses_nothing(double: Place, numbers: tuple[signal.Signals, ...]) -> None:
    """A closed terminal sends SIGHUP to all processes, a login manager SIGTERM first."""
    launch = double.start(f"session-{'-'.join(number.name for number in numbers)}")
    with launch:
        launch.wait_for(lambda: stepping(launch))
        everybody = [psutil.Process(launch.process.pid), *launch.family()]
        for number, running in ((number, running) for number in numbers for running in everybody):
            with contextlib.suppress(psutil.NoSuchProcess):
                running.send_signal(number)
        code, output = launch.end(within=IN_TIME)
    assert code == 143 and "Traceback" not in output, output
    last = launch.events()[-1]
    assert (last["event"], last["saved"]) == ("stopped", f"step-{last['step']:06d}")
    assert last["signal"] in [number.name for number in numbers], (
        "of two that wait, the kernel delivers the smaller first"
    )
    double.require_same(launch)


@pytest.mark.cold
def test_under_nohup_a_session_that_ends_changes_nothing(double: Place) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # children inherit it
    try:
        launch = double.start("nohup")
    finally:
        signal.signal(signal.SIGHUP, before)
    with launch:
        launch.wait_for(lambda: stepping(launch))
        for process in [psutil.Process(launch.process.pid), *launch.family()]:
            process.send_signal(signal.SIGHUP)
        code, output = launch.end(within=100)
    assert code == 0, output
    assert figures(launch.run) == figures(launch.run.parent / "whole")


def test_all_ranks_leave_at_once_before_the_first_step(double: Place) -> None:
    launch = double.start("loading")
    assert stop(launch, loading, signal.SIGUSR1, "everybody") == 143
    assert not checkpoints(launch.run)
    assert launch.events()[-1]["event"] == "stopped"


def test_a_stop_without_checkpoints_reports_that_nothing_is_saved(single: Place) -> None:
    launch = single.start("unsaved", "TRAIN_SAVE_STRATEGY=no")
    assert stop(launch, stepping, signal.SIGTERM) == 143
    output = launch.output.read_text()
    assert "make stop RUN=unsaved stops it and saves nothing (`train.save_strategy: no`)" in output
    assert "hint: start again with: make resume RUN=unsaved" in output
    assert not checkpoints(launch.run)
    again = single.start("unsaved", "TRAIN_SAVE_STRATEGY=no")  # as the hint says
    assert again.end()[0] == 0 and figures(launch.run) == figures(launch.run.parent / "whole")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            "train-distributed RUN_NAME=whole TRAIN_LEARNING_RATE=1e-3",
            2,
            ("`train.learning_rate` cannot change", "TRAIN_LEARNING_RATE=1e-3"),
        ),
        ("train-distributed RUN_NAME=whole MODEL_MAX_SEQ_LEN=128", 5, ("max_seq_len", "set `model.max_seq_len` back")),
        ("train-fsdp RUN_NAME=whole", 2, ("was started by `make train-distributed`, not by `make train-fsdp`",)),
        ("train-distributed", 2, ("`launch.auto_resume` needs `RUN_NAME`", "stops.yaml")),
    ],
)
def test_another_run_is_refused_as_by_resume(double: Place, words: str, code: int, message: tuple[str, ...]) -> None:
    whole = Path(double.environment["RUNS_DIR"]) / "whole"
    before = figures(whole)
    run_program([*words.split(), f"CONFIG={double.config}", "NUM_GPUS=2"], double.environment).refused(code, *message)
    assert figures(whole) == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("moment", "number", "target", "words"),
    [
        (preparing, signal.SIGTERM, "everybody", ()),
        (loading, signal.SIGINT, "group", ()),
        (before_steps, signal.SIGTERM, "launcher", ()),
        (stepping, signal.SIGINT, "group", ()),
        (stepping, signal.SIGUSR1, "0", ()),
        (saving, signal.SIGTERM, "launcher", ("TRAIN_SAVE_STEPS=2",)),
    ],
)
def test_a_stop_loses_nothing(
    single: Place, moment: Callable[[Started], bool], number: signal.Signals, target: str, words: tuple[str, ...]
) -> None:
    launch = single.start(f"{moment.__name__}-{target}", *words)
    assert stop(launch, moment, number, target) == (130 if number == signal.SIGINT else 143), launch.output.read_text()
    if moment == preparing:
        assert not launch.run.exists(), "what never began leaves no trace"
    else:
        assert launch.events()[-1]["event"] == "stopped"
    if moment == stepping:
        assert checkpoints(launch.run)[-1] == f"step-{metrics(launch.run)[-1]['step']:06d}"
    if moment == saving:
        assert checkpoints(launch.run)[-1] == launch.events()[-1]["saved"], "it is finished, and none follows"
    single.require_same(launch, *words)


@pytest.mark.long
def test_a_step_that_does_not_end_is_abandoned(double: Place) -> None:
    launch = double.start("frozen", "TRAIN_SAVE_STEPS=1")
    launch.wait_for(lambda: "step-000002" in checkpoints(launch.run))
    launch.workers()[1].suspend()
    time.sleep(1)
    assert stop(launch, lambda _: True, signal.SIGTERM) == 143, launch.output.read_text()
    last = launch.events()[-1]
    assert last["event"] == "stopped" and last["saved"] in checkpoints(launch.run)
    double.require_same(launch)


@pytest.mark.long
def test_a_reserved_folder_without_a_run_is_reused(single: Place) -> None:
    launch = single.start("reserved")
    with launch:
        launch.wait_for(lambda: preparing(launch))
    assert (launch.run / "config.json").is_file() and not (launch.run / "events.jsonl").exists()
    single.require_same(launch)


@pytest.mark.long
@pytest.mark.parametrize(
    "moment", [publishing, lambda launch: rows(launch, "train") == STEPS], ids=["model", "last-evaluation"]
)
def test_a_stop_after_the_last_step_publishes_a_run_without_checkpoints(
    single: Place, moment: Callable[[Started], bool]
) -> None:
    launch = single.start(f"only-model-{time.monotonic_ns()}", "TRAIN_SAVE_STRATEGY=no")
    assert stop(launch, moment, signal.SIGTERM) == 0, launch.output.read_text()
    assert weights(launch.run) == weights(launch.run.parent / "whole")
    assert launch.events()[-1]["event"] == "finished" and not checkpoints(launch.run)
