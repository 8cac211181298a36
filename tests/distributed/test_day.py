"""A template that writes today's date: rows keep the day of their first preparation, on later days and on other
machines.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from sft_play.config.load import load_config
from sft_play.launch.environment import free_port
from sft_play.model.tokenizer import load_tokenizer
from sft_play.prepare import prepare
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared, PreparedSplit
from tests.chat_families import save_family
from tests.launcher import Launcher
from tests.places import Place, question_rows
from tests.programs import need
from tests.tiny_models import build_tiny_llama

pytestmark = pytest.mark.slow


def prepared_of(run: Path) -> Prepared:
    return Prepared.load(RunFolder(run).prepared)


def texts(folder: Path, model: Path) -> list[str]:
    from sft_play.data.rows import Rows

    tokenizer = load_tokenizer(model)
    return [tokenizer.decode(row) for row in Rows(str(folder))["input_ids"]]


@pytest.fixture
def dated(tmp_path: Path) -> Path:
    """Build a model whose template writes the date, as in Llama 3.1."""
    folder = build_tiny_llama(tmp_path / "model")
    return save_family(folder, "llama3_1")


def configured(folder: Path, model: Path) -> Place:
    place, rows = Place(folder), folder / "rows.jsonl"
    rows.write_text(question_rows(0, 12, longest=5))
    place.config.write_text(
        f"model: {{name: {model}, max_seq_len: 256}}\ndata: {{train_path: {rows}, validation: 0.3}}\n"
        "train: {max_steps: 1, global_batch_size: 4, generation_max_new_tokens: 4}\neval: {samples: 2}\n"
    )
    return place


def test_rows_have_the_requested_day_or_that_of_their_first_preparation(
    tmp_path: Path, dated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    config, today = load_config(configured(tmp_path, dated).config).config, date.today()

    def rows(day: str | None = None) -> PreparedSplit:
        train = prepare(config, day=day)[0].train
        assert train
        return train

    first, old = rows(), rows("2026-01-05")
    assert (first.day, old.day) == (today.isoformat(), "2026-01-05") and first.fingerprint != old.fingerprint
    assert all(f"Today Date: {today:%d %b %Y}" in text for text in texts(Path(first.path), dated))
    assert all("Today Date: 05 Jan 2026" in text for text in texts(Path(old.path), dated))
    assert rows() == rows(today.isoformat()) == first and rows("2026-01-05") == old
    shutil.rmtree(tmp_path / "cache")
    assert rows("2026-01-05").fingerprint == old.fingerprint
    save_family(dated, "qwen3_5")
    assert rows("2026-01-05") == rows() and rows().day is None


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_resume_on_another_day_trains_on_the_same_rows(tmp_path: Path, dated: Path) -> None:
    need("faketime")
    place = configured(tmp_path, dated)

    def run(day: str, *words: str) -> str:
        command = ["faketime", "-m", f"{day} 10:00:00", *place.command(*words)]
        done = subprocess.run(command, env=place.environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("2026-01-05", "train", f"CONFIG={place.config}", "RUN_NAME=one")
    first = prepared_of(tmp_path / "runs" / "one")
    assert first.train and first.validation and first.train.day == first.validation.day == "2026-01-05"
    shutil.rmtree(tmp_path / "cache")
    run("2026-01-07", "resume", "RUN=one", "TRAIN_MAX_STEPS=2")
    again = prepared_of(tmp_path / "runs" / "one")
    assert again.train and (again.train.day, again.train.fingerprint) == ("2026-01-05", first.train.fingerprint)
    shutil.rmtree(tmp_path / "cache")
    assert json.loads(run("2026-01-08", "eval", "RUN=one", "JSON=1"))["answers"] == 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_machines_prepare_the_rows_of_node_0s_day(tmp_path: Path, dated: Path) -> None:
    """Node 1 has another day's rows in its cache."""
    launcher = Launcher(tmp_path, dated)
    caches = [{"SFT_PLAY_CACHE": str(tmp_path / f"cache{rank}")} for rank in range(2)]
    words = [sys.executable, "-m", "sft_play", "data", f"CONFIG={launcher.config}", "MODEL_MAX_SEQ_LEN=256"]
    need("faketime")
    process = subprocess.run(
        ["faketime", "-m", "2026-01-05 10:00:00", *words],
        env=launcher.environment | caches[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    start = (
        "train-distributed",
        f"CONFIG={launcher.config}",
        "NUM_NODES=2",
        "NUM_GPUS=1",
        "RUN_NAME=apart",
        "TRAIN_MAX_STEPS=1",
        "MODEL_MAX_SEQ_LEN=256",
        "MASTER_ADDR=127.0.0.1",
        f"MASTER_PORT={free_port()}",
    )
    nodes = [
        launcher.start(*start, f"NODE_RANK={rank}", RUNS_DIR=str(tmp_path / f"runs{rank}"), **caches[rank])
        for rank in range(2)
    ]
    for code, outputs in [node.end() for node in nodes]:
        assert code == 0, outputs
    prepared = [prepared_of(tmp_path / f"runs{rank}" / "apart").train for rank in range(2)]
    assert [part.day for part in prepared if part] == [date.today().isoformat()] * 2
