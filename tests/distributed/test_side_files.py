"""Training goes on without the files beside it, and a resumed run without what was torn or lost of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sft_play.files import read_json
from tests.tiny_models import build_tiny_llama
from tests.training_runs import Trial, logs, make_run, must_train, rows, train

pytestmark = pytest.mark.long
SETTINGS = (
    "train.eval_on_start: true", "train.predict_with_generate: true", "train.generation_max_new_tokens: 4", "eval.samples: 3",
    "train.eval_steps: 2", "train.save_steps: 2", "train.spike_guard: report", "train.spike_factor: 1.000001", "train.max_steps: 6",
)  # fmt: skip


def test_a_run_without_room_for_side_files_and_resumed_from_torn_ones(tmp_path: Path) -> None:
    base = build_tiny_llama(tmp_path / "model")
    run = make_run(tmp_path / "run", base, Trial(settings=SETTINGS, steps=6))
    run.evaluation(0).parent.symlink_to("/sys")  # where nobody, root included, can make a folder
    done = train(run)
    assert done.returncode == 0, logs(run)
    assert (done.stdout + done.stderr).count("the answers of an evaluation could not be written") == 1
    assert [row["step"] for row in rows(run, "eval")] == [0, 2, 4, 6]
    assert all(row["eval_answers"] == 3 for row in rows(run, "eval"))
    said = read_json(run.training_metrics)
    assert (said["steps"], said["saving"]["saved"]) == (6, 3)
    assert len(read_json(run.checkpoint(6) / "trainer_state.json")["log_history"]) <= 16

    for lost in (run.checkpoint(6), run.checkpoint(4), run.model):
        shutil.rmtree(lost)
    with run.metrics.open("ab") as stream:
        stream.write('{"kind": "eval", "what": "Grö'.encode()[:-1])
    (run.logs / "spikes.jsonl").write_bytes(b'{"step": 1, "ro')
    must_train(run, run.checkpoint(2))
    assert [row["step"] for row in rows(run, "eval")] == [0, 2, 4, 6], "each step once"
    assert read_json(run.training_metrics)["saving"]["saved"] == 3, "those of the whole run"

    for lost in (run.checkpoint(6), run.checkpoint(4), run.model):
        shutil.rmtree(lost)
    run.metrics.unlink()
    done = train(run, run.checkpoint(2))
    assert done.returncode == 0, logs(run)
    assert "metrics.jsonl: it is gone; it begins again after step 2" in done.stdout + done.stderr
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [row["step"] for row in found if row["kind"] == "eval"] == [2, 4, 6], "that of the checkpoint is made again"
    assert [row["step"] for row in found if row["kind"] == "train"] == [3, 4, 5, 6]
