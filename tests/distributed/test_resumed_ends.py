"""Runs ended between their last step and their `model/`, resumed: published without another step, and only from
complete checkpoints.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sft_play.config.load import read_config
from sft_play.files import read_json, write_json
from sft_play.runs.checkpoints import link
from sft_play.runs.folder import RunFolder
from tests.tiny_models import build_tiny_llama
from tests.training_runs import Trial, logs, make_run, must_train, rows, train

pytestmark = pytest.mark.long
EARLY = (
    "train.early_stopping_patience: 1",
    "train.early_stopping_threshold: 100.0",
    "train.load_best_model_at_end: true",
    "train.eval_steps: 2",
    "train.save_steps: 2",
)
"""The first evaluation is better than none, the second not by 100."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("ends") / "model")


def weights(run: RunFolder) -> bytes:
    return (run.model / "model.safetensors").read_bytes()


def test_a_run_that_had_stopped_early_is_published_without_another_step(base: Path, tmp_path: Path) -> None:
    run = must_train(make_run(tmp_path / "run", base, Trial(settings=EARLY)))
    expected, metrics_before = weights(run), read_json(run.training_metrics)
    assert (
        metrics_before["steps"] == 4
        and metrics_before["model_step"] == metrics_before["best_step"] == 4
        and metrics_before["stopped_early"]
    )
    shutil.rmtree(run.model)
    link(run.best, run.checkpoint(2))  # as when its process ended before the link
    done = train(run, run.checkpoint(4))
    assert done.returncode == 0, logs(run)
    again = read_json(run.training_metrics)
    assert (again["steps"], again["stopped_early"]) == (4, metrics_before["stopped_early"])
    assert weights(run) == expected and run.best.resolve().name == "step-000004"
    assert [row["step"] for row in rows(run, "eval")] == [2, 4]

    shutil.rmtree(run.model)
    damaged = run.checkpoint(4) / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(bytes(content))
    done = train(run, run.checkpoint(2))  # it trains step 3 and 4 again, and saves the best one again
    assert done.returncode == 0, logs(run)
    assert weights(run) == expected


def test_intervals_that_a_resumed_run_may_change_count(base: Path, tmp_path: Path) -> None:
    run = must_train(make_run(tmp_path / "run", base, Trial()))
    for lost in (run.checkpoint(8), run.model):
        shutil.rmtree(lost)
    document = json.loads(run.config.read_text())
    document["config"]["train"] |= {"save_steps": 3, "eval_steps": 3, "logging_steps": 2}
    write_json(run.config, document)
    assert read_config(run.config).config.train.save_steps == 3
    assert train(run, run.checkpoint(4)).returncode == 0, logs(run)
    assert [row["step"] for row in rows(run, "save")] == [4, 6, 8]
    assert [row["step"] for row in rows(run, "eval")] == [4, 6, 8]
