"""A template that writes today's date: rows keep the day of their first preparation, on later days and on other machines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sft_play.launch.environment import free_port
from sft_play.model.tokenizer import load_tokenizer
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared
from tests.chat_families import save_family
from tests.launcher import Launcher
from tests.places import Place, question_rows
from tests.programs import need
from tests.tiny_models import build_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.cold]


def library() -> str:
    """Returns the library that shows a program another clock."""
    need("faketime")
    return str(next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")))


def on(day: str) -> dict[str, str]:
    return {"LD_PRELOAD": library(), "FAKETIME": f"@{day} 10:00:00", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def prepared_of(run: Path) -> Prepared:
    return Prepared.load(RunFolder(run).prepared)


def texts(folder: Path, model: Path) -> list[str]:
    from sft_play.data.store import Rows

    tokenizer = load_tokenizer(model)
    return [tokenizer.decode(row) for row in Rows(str(folder))["input_ids"]]


@pytest.fixture
def dated(tmp_path: Path) -> Path:
    """A model whose template writes the date, as Llama 3.1's does."""
    folder = build_tiny_llama(tmp_path / "model")
    return save_family(folder, "llama3_1")


@pytest.mark.timeout(300)
def test_a_resume_on_another_day_trains_on_the_same_rows(tmp_path: Path, dated: Path) -> None:
    place = Place(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(question_rows(0, 12, longest=5))
    place.config.write_text(
        f"model: {{name: {dated}, max_seq_len: 256}}\ndata: {{train_path: {rows}, validation: 0.3}}\n"
        "train: {max_steps: 1, global_batch_size: 4, generation_max_new_tokens: 4}\neval: {samples: 2}\n"
    )

    def run(day: str, *words: str) -> Any:
        place.environment.update(on(day))
        done = place.run(*words)
        assert done.returncode == 0, done.stderr
        return done

    run("2026-01-05", "train", f"CONFIG={place.config}", "RUN_NAME=one")
    first = prepared_of(tmp_path / "runs" / "one")
    assert first.train and first.validation and first.train.day == first.validation.day == "2026-01-05"
    assert all("Today Date: 05 Jan 2026" in text for text in texts(Path(first.train.path), dated))

    shutil.rmtree(tmp_path / "cache")
    run("2026-01-06", "train", f"CONFIG={place.config}", "RUN_NAME=other")
    other = prepared_of(tmp_path / "runs" / "other")
    assert other.train and other.train.day == "2026-01-06" and other.train.fingerprint != first.train.fingerprint

    run("2026-01-07", "resume", "RUN=one", "TRAIN_MAX_STEPS=2")
    again = prepared_of(tmp_path / "runs" / "one")
    assert again.train and (again.train.day, again.train.fingerprint) == ("2026-01-05", first.train.fingerprint)

    shutil.rmtree(tmp_path / "cache")
    assert json.loads(run("2026-01-08", "eval", "RUN=one", "JSON=1").stdout)["answers"] == 2


@pytest.mark.long
@pytest.mark.timeout(300)
def test_machines_on_both_sides_of_midnight_prepare_the_rows_of_node_0(tmp_path: Path, dated: Path) -> None:
    launcher = Launcher(tmp_path, dated)

    def both(*words: str, days: Sequence[str]) -> None:
        shared = ("MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}")
        nodes = [
            launcher.start(
                *words, f"NODE_RANK={rank}", *shared, RUNS_DIR=str(tmp_path / f"runs{rank}"),
                SFT_PLAY_CACHE=str(tmp_path / f"cache{rank}"), **on(day),
            )
            for rank, day in enumerate(days)
        ]  # fmt: skip
        for code, said in [node.end() for node in nodes]:
            assert code == 0, said

    start = ("train-distributed", f"CONFIG={launcher.config}", "NUM_NODES=2", "NUM_GPUS=1", "RUN_NAME=apart", "TRAIN_MAX_STEPS=1")
    both(*start, days=["2026-01-05", "2026-01-06"])
    found = [prepared_of(tmp_path / f"runs{rank}" / "apart").train for rank in range(2)]
    assert [part.day for part in found if part] == ["2026-01-05"] * 2
