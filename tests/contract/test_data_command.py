"""`make data`: prepares and caches, nothing else; the same rows for any number of processes; nothing half-made when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from sft_play.__main__ import main
from sft_play.config.load import load_config
from sft_play.runs.prepared import lookup
from tests.conftest import ROOT, Done, environment
from tests.contract.test_prepare import pairs, write_rows
from tests.training_runs import nested_yaml

pytestmark = pytest.mark.slow

Data = Callable[..., Done]


@pytest.fixture
def variables(tmp_path: Path) -> Mapping[str, str]:
    return environment(tmp_path / "cache", tmp_path / "runs", {"CUDA_VISIBLE_DEVICES": ""})


@pytest.fixture
def data(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Data]:
    """Runs `make data JSON=1` on `key: value` lines, in this process."""
    for name, value in (("RUNS_DIR", tmp_path / "runs"), ("SFT_PLAY_CACHE", tmp_path / "cache"), ("HF_HUB_OFFLINE", 1)):
        monkeypatch.setenv(name, str(value))

    def run(*lines: str, words: tuple[str, ...] = ("JSON=1",), cache: str = "cache") -> Done:
        monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / cache))
        document = configured(tmp_path, tiny, lines)
        capfd.readouterr()
        code = main(["data", f"CONFIG={document}", *words])
        told = capfd.readouterr()
        return Done(code, told.out, told.err)

    yield run
    assert not (tmp_path / "runs").exists(), "no run is made"


def configured(folder: Path, model: Path, lines: Sequence[str]) -> Path:
    document = folder / "x.yaml"
    document.write_text(nested_yaml([f"model.name: {model}", "model.max_seq_len: 64", *lines]), encoding="utf-8")
    return document


def test_it_prepares_counts_and_tells_the_plan(data: Data, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [*pairs(30), *pairs(4)])
    more = write_rows(tmp_path / "more.jsonl", [{"question": f"q{i}", "answer": "a"} for i in range(5)])
    held = write_rows(tmp_path / "held.jsonl", [*pairs(3, start=28), {"prompt": "long", "completion": "word " * 100}])
    lines = [
        f'data.sources: [{{"path": "{train}", "weight": 3}}, {{"path": "{more}", "name": "more", "weight": 2}}]',
        f'data.validation: [{{"path": "{held}"}}]', "data.overlong: drop",
    ]  # fmt: skip
    done = data(*lines)
    assert done.code == 0, done.err
    found = done.json
    first, second = found["train"]["sources"]
    assert (first["name"], first["format"], first["rows_read"], first["kept"]) == (str(train), "prompt_completion", 34, 30)
    assert (first["duplicates"], first["dropped"]) == (4, {})
    assert (second["name"], second["format"], second["kept"]) == ("more", "question_answer", 5)
    assert first["tokens"] + second["tokens"] == found["train"]["split"]["tokens"]
    assert first["trained_tokens"] + second["trained_tokens"] == found["train"]["split"]["label_tokens"]
    assert found["train"]["length_quantiles"].keys() == {"5%", "25%", "50%", "75%", "95%"}
    assert len(first["content_sha256"]) == 64
    assert found["validation"]["overlap"] == {"with": "train", "rows": 2}
    assert found["validation"]["sources"][0]["dropped"] == {"longer than model.max_seq_len": 1}
    assert f"  {train}: 34 read as prompt_completion, 30 kept, 4 left out (duplicate); " in done.err
    assert "rows that are in the training data too: 2" in done.err
    folder = Path(found["train"]["split"]["path"])
    prepared = lookup(load_config(tmp_path / "x.yaml", environ={}).config)
    assert prepared and prepared.train and [fact.weight for fact in prepared.train.sources] == [3, 2]
    words = data(*lines, words=())
    assert words.out.splitlines() == [f"train: {folder}", f"validation: {found['validation']['split']['path']}"]
    kept = data(*lines, "data.duplicates: keep").json
    assert kept["train"]["sources"][0]["kept"] == 34


def test_the_same_rows_for_every_number_of_processes(data: Data, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [*pairs(1500), *pairs(20)])
    one, two = (
        data(f"data.train_path: {file}", "data.validation: 0.1", f"data.num_proc: {number}", cache=f"cache-{number}").json
        for number in (1, 2)
    )
    for split in ("train", "validation"):
        assert one[split]["split"].pop("path") != two[split]["split"].pop("path")
    assert one == two
    assert one["train"]["split"]["rows"] + one["validation"]["split"]["rows"] == 1500
    assert sum(one[split]["sources"][0]["duplicates"] for split in ("train", "validation")) == 20


def test_a_group_is_wholly_on_one_side(data: Data, tmp_path: Path) -> None:
    import datasets

    file = write_rows(tmp_path / "rows.jsonl", pairs(200))
    done = data(f"data.train_path: {file}", "data.validation: 0.4", "data.group_by: author")
    sides = [set(), set()]  # type: list[set[int]]
    for side, split in zip(sides, ("train", "validation"), strict=True):
        for answer in datasets.load_from_disk(done.json[split]["split"]["path"])["reference"]:
            side.add(int(answer.removeprefix("Answer ").rstrip(".")) % 7)
    assert sides[0] | sides[1] == set(range(7))
    assert not sides[0] & sides[1]
    missing = data(f"data.train_path: {file}", "data.validation: 0.4", "data.group_by: writer")
    assert missing.code == 4
    assert f"error: {file}:1: `data.group_by` names the column `writer`" in missing.err
    assert "(200 such rows; the first is here)" in missing.err


def test_rows_longer_than_the_model_knows_are_refused_and_validation_is_scored(data: Data, tmp_path: Path) -> None:
    train, held_out = (write_rows(tmp_path / f"{name}.jsonl", pairs(4, start)) for name, start in (("a", 0), ("b", 9)))
    lines = (f"data.train_path: {train}", f"data.val_path: {held_out}")
    done = data(*lines, words=("MODEL_MAX_SEQ_LEN=1024",))
    assert done.code == 2 and "knows 512 positions" in done.err and "MODEL_MAX_SEQ_LEN=512 at most" in done.err, done.err
    told = data(*lines).err
    assert "% of them trained, median" in told.partition("validation data: ")[0], told
    assert "% of them scored, median" in told.partition("validation data: ")[2], told


class Running:
    """`make data` on many rows, once its processes are at work."""

    def __init__(self, document: Path, cache: Path, env: Mapping[str, str]) -> None:
        self.cache = cache
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sft_play", "data", f"CONFIG={document}"], env=dict(env), cwd=ROOT, stderr=subprocess.PIPE, text=True
        )  # fmt: skip
        deadline = time.monotonic() + 300
        self.workers: list[psutil.Process] = []
        while len(self.workers) < 2 and time.monotonic() < deadline:
            assert self.process.poll() is None
            self.workers = psutil.Process(self.process.pid).children(recursive=True)
            time.sleep(0.02)
        assert len(self.workers) == 2

    def end(self) -> tuple[int, str]:
        """Waits for its end, and for that of its processes."""
        err = self.process.communicate(timeout=60)[1]
        assert not psutil.wait_procs(self.workers, timeout=10)[1], "its processes end with it"
        return self.process.returncode, err

    def left(self) -> int:
        return sum(path.name.startswith(".") for path in (self.cache / "data").iterdir())


@pytest.fixture
def running(tmp_path: Path, tiny: Path, variables: Mapping[str, str]) -> Callable[[], Running]:
    file = write_rows(tmp_path / "many.jsonl", pairs(60_000))
    document = configured(tmp_path, tiny, [f"data.train_path: {file}", "data.num_proc: 2"])
    return lambda: Running(document, tmp_path / "cache", variables)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)])
def test_a_signal_leaves_nothing(number: int, code: int, running: Callable[[], Running]) -> None:
    started = running()
    os.kill(started.process.pid, number)
    assert started.end()[0] == code
    assert not list((started.cache / "data").iterdir())


@pytest.mark.long
def test_a_killed_process_is_told_and_a_killed_preparation_is_cleared(running: Callable[[], Running]) -> None:
    started = running()
    started.workers[1].kill()
    code, err = started.end()
    assert code == 3
    assert "error: a process that prepares the data was killed" in err
    assert "DATA_NUM_PROC=1" in err
    assert started.left() == 0
    again = running()
    again.process.kill()
    again.end()
    assert again.left() == 1, "a killed process cannot clear up; the next one does"
    last = running()
    assert last.left() == 1
    os.kill(last.process.pid, signal.SIGTERM)
    assert last.end()[0] == 143
