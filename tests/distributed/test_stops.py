"""Stops on request in every phase, with real processes: the exit code, in time, nothing lost; then the same command goes on to the bit."""

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

from tests.conftest import environment, metrics, ragged_rows, run_program
from tests.fault_runs import Started, start

IN_TIME = 25.0
"""Seconds from the signal to the launcher's end that the documentation promises."""
EXACT = {
    "train": ("step", "loss", "grad_norm", "learning_rate", "rank_loss", "rank_tokens"),
    "eval": ("step", "eval_loss", "eval_rougeL", "eval_answers", "eval_answer_tokens"),
}
STEPS, EVERY = 6, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A configuration and the run that nobody disturbed."""

    config: Path
    environment: dict[str, str]
    words: tuple[str, ...]

    def start(self, name: str, *more: str) -> Started:
        return start(self.environment, *self.words, f"CONFIG={self.config}", *more, name=name)

    def again(self, name: str, *more: str) -> Started:
        """The same command to its end; it must succeed."""
        launch = self.start(name, *more)
        with launch:
            code, said = launch.end()
        assert code == 0, said
        return launch


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
    place.again("whole")
    return place


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, tiny: Path, cache: Path) -> Place:
    return make_place(tmp_path_factory.mktemp("stops"), tiny, cache, "train")


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory, tiny: Path, cache: Path) -> Place:
    return make_place(tmp_path_factory.mktemp("stops2"), tiny, cache, "train-distributed", "NUM_GPUS=2")


def figures(run: Path) -> dict[str, list[list[Any]]]:
    """Returns everything that a resumed run must repeat to the bit, each step once."""
    return {kind: [[row[key] for key in keys] for row in metrics(run, kind)] for kind, keys in EXACT.items()}


def assert_same(launch: Started) -> None:
    run, whole = launch.run, launch.run.parent / "whole"
    assert figures(run) == figures(whole), launch.output.read_text()
    weights = Path("model") / "adapter_model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def rows(launch: Started, kind: str) -> int:
    path = launch.run / "metrics.jsonl"
    return path.read_text().count(f'"kind": "{kind}"') if path.is_file() else 0


def preparing(launch: Started) -> bool:
    return bool(launch.family("sft_play.prepare"))


def loading(launch: Started) -> bool:
    return (launch.run / "logs" / "exit-rank0.reserved").is_file()


def before_steps(launch: Started) -> bool:
    """The rows of an earlier attempt are removed just before the first step."""
    return (launch.run / "metrics.jsonl").is_file()


def stepping(launch: Started) -> bool:
    return rows(launch, "train") == 1


def evaluating(launch: Started) -> bool:
    return rows(launch, "train") == EVERY and rows(launch, "eval") == 0


def saving(launch: Started) -> bool:
    return bool(list((launch.run / "checkpoints").glob(".step-*.partial"))) if (launch.run / "checkpoints").is_dir() else False


def publishing(launch: Started) -> bool:
    return (launch.run / ".model.partial").is_dir()


def stop(launch: Started, moment: Callable[[Started], bool], number: int, target: str = "launcher") -> int:
    """Sends a signal at a moment; returns the exit code, which must come in time."""
    with launch:
        launch.wait_for(lambda: moment(launch))
        everybody = [psutil.Process(launch.process.pid), *launch.family()]
        if target == "launcher":
            launch.process.send_signal(number)
        elif target == "group":
            os.killpg(launch.process.pid, number)
        elif target == "everybody":  # as Slurm does to all processes of a job
            for one in everybody:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(number)
        elif target == "agent":
            launch.agent().send_signal(number)
        else:
            launch.workers()[int(target)].send_signal(number)
        code, said = launch.end(within=IN_TIME)
    assert "Traceback" not in said, said
    return code


@pytest.mark.parametrize("target", ["1", "agent"])
def test_two_ranks_stop_in_an_evaluation_and_the_same_command_goes_on(double: Place, target: str) -> None:
    launch = double.start(f"evaluation-{target}")
    assert stop(launch, evaluating, signal.SIGTERM, target) == 143, launch.output.read_text()
    last = launch.events()[-1]
    assert (last["event"], last["signal"], last["step"], last["saved"]) == ("stopped", "SIGTERM", EVERY, "step-000003")
    assert not rows(launch, "eval"), "an evaluation that did not end leaves no figures"
    again = double.again(launch.run.name)
    assert "step-000003" in again.output.read_text()
    assert_same(again)


def test_before_the_first_step_all_leave_at_once(double: Place) -> None:
    launch = double.start("loading")
    assert stop(launch, loading, signal.SIGUSR1, "everybody") == 143
    assert not checkpoints(launch.run)
    assert launch.events()[-1]["event"] == "stopped"


@pytest.mark.parametrize(("changed", "words"), [
    (("TRAIN_LEARNING_RATE=1e-3",), ("`train.learning_rate` cannot change", "TRAIN_LEARNING_RATE=1e-3")),
    (("MODEL_MAX_SEQ_LEN=128",), ("max_seq_len", "set `model.max_seq_len` back")),
])  # fmt: skip
def test_another_run_is_refused_as_resume_refuses_it(double: Place, changed: tuple[str, ...], words: tuple[str, ...]) -> None:
    before = figures(Path(double.environment["RUNS_DIR"]) / "whole")
    launch = double.start("whole", *changed)
    code, said = launch.end(within=60)
    assert code in (2, 5)
    assert all(word in said for word in words) and "Traceback" not in said, said
    assert figures(launch.run) == before


def test_without_a_name_or_by_another_command_nothing_goes_on(double: Place) -> None:
    done = run_program(["train", f"CONFIG={double.config}"], double.environment)
    assert done.code == 2 and "`launch.auto_resume` needs `RUN_NAME`" in done.err and "stops.yaml" in done.err, done.err
    done = run_program(["train-fsdp", f"CONFIG={double.config}", "RUN_NAME=whole", "NUM_GPUS=2"], double.environment)
    assert done.code == 2 and "was started by `make train-distributed`, not by `make train-fsdp`" in done.err, done.err


MOMENTS = {
    "preparing-everybody": (preparing, signal.SIGTERM, "everybody"),
    "loading-ctrl-c": (loading, signal.SIGINT, "group"),
    "before-steps": (before_steps, signal.SIGTERM, "launcher"),
    "step-ctrl-c": (stepping, signal.SIGINT, "group"),
    "step-worker": (stepping, signal.SIGUSR1, "0"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MOMENTS)
def test_a_stop_loses_nothing(single: Place, name: str) -> None:
    moment, number, target = MOMENTS[name]
    launch = single.start(name)
    assert stop(launch, moment, number, target) == (130 if number == signal.SIGINT else 143), launch.output.read_text()
    if moment == preparing:
        assert not launch.run.exists(), "what never began leaves no trace"
    else:
        assert launch.events()[-1]["event"] == "stopped"
    if moment == stepping:
        assert checkpoints(launch.run)[-1] == f"step-{metrics(launch.run)[-1]['step']:06d}"
    assert_same(single.again(name))


@pytest.mark.long
@pytest.mark.parametrize(("command", "words"), [("train-fsdp", ()), ("train-deepspeed", ("LAUNCH_STRATEGY=zero3",))])
def test_sharded_ranks_leave_an_evaluation_together(
    command: str, words: tuple[str, ...], tmp_path: Path, tiny: Path, cache: Path
) -> None:
    place = make_place(tmp_path, tiny, cache, command, "NUM_GPUS=2", *words)
    launch = place.start("sharded")
    assert stop(launch, evaluating, signal.SIGTERM, "1") == 143, launch.output.read_text()
    last = launch.events()[-1]
    assert (last["step"], last["saved"], rows(launch, "eval")) == (EVERY, "step-000003", 0)
    assert_same(place.again("sharded"))


@pytest.mark.long
def test_a_save_is_finished_and_none_follows(single: Place) -> None:
    launch = single.start("save", "TRAIN_SAVE_STEPS=2")
    assert stop(launch, saving, signal.SIGTERM) == 143, launch.output.read_text()
    last = launch.events()[-1]
    assert checkpoints(launch.run)[-1] == last["saved"]
    assert_same(single.again("save"))


@pytest.mark.long
def test_a_step_that_does_not_end_is_left(double: Place) -> None:
    launch = double.start("frozen", "TRAIN_SAVE_STEPS=1")
    launch.wait_for(lambda: "step-000002" in checkpoints(launch.run))
    launch.workers()[1].suspend()
    time.sleep(1)
    assert stop(launch, lambda _: True, signal.SIGTERM) == 143, launch.output.read_text()
    last = launch.events()[-1]
    assert last["event"] == "stopped" and last["saved"] in checkpoints(launch.run)
    assert_same(double.again("frozen"))


@pytest.mark.long
def test_a_folder_that_was_only_reserved_is_taken(single: Place) -> None:
    launch = single.start("reserved")
    with launch:
        launch.wait_for(lambda: preparing(launch))
    assert (launch.run / "config.json").is_file() and not (launch.run / "events.jsonl").exists()
    assert_same(single.again("reserved"))


@pytest.mark.long
@pytest.mark.parametrize("moment", [publishing, lambda launch: rows(launch, "train") == STEPS], ids=["model", "last-evaluation"])
def test_what_no_checkpoint_keeps_is_published_after_the_last_step(single: Place, moment: Callable[[Started], bool]) -> None:
    launch = single.start(f"only-model-{time.monotonic_ns()}", "TRAIN_SAVE_STRATEGY=no")
    assert stop(launch, moment, signal.SIGTERM) == 0, launch.output.read_text()
    weights = Path("model") / "adapter_model.safetensors"
    assert (launch.run / weights).read_bytes() == (launch.run.parent / "whole" / weights).read_bytes()
    assert launch.events()[-1]["event"] == "finished" and not checkpoints(launch.run)
