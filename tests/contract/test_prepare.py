"""Preparation as its program is called: what it prints, writes, keeps and refuses."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sft_play import prepare
from sft_play.config.load import load_config, save_config
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared, lookup
from tests.conftest import environment
from tests.training_runs import nested_yaml

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one preparation ended."""

    code: int
    told: str
    run: RunFolder

    @property
    def prepared(self) -> Prepared:
        assert self.code == 0, self.told
        return Prepared.load(self.run.prepared)


Prepare = Callable[..., Outcome]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that only this test sees."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SFT_PLAY_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


def write_run(folder: Path, lines: Sequence[str]) -> RunFolder:
    """Writes a run folder with `config.json` from `key: value` lines."""
    folder.mkdir(parents=True, exist_ok=True)
    document = folder / "typed.yaml"
    document.write_text(nested_yaml(lines), encoding="utf-8")
    run = RunFolder(folder)
    save_config(load_config(document, environ={}), run.config)
    return run


@pytest.fixture
def prepared_by(own_cache: Path, tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Prepare]:
    """Prepares the tiny model and `lines` on top, in this process: `prepared_by("data.train_path: x.jsonl")`."""
    count = 0

    def run(*lines: str) -> Outcome:
        nonlocal count
        count += 1
        folder = write_run(tmp_path / "runs" / f"r{count}", [f"model.name: {tiny}", "model.max_seq_len: 64", *lines])
        capfd.readouterr()
        code = prepare.main(["--run", str(folder.path)])
        return Outcome(code, capfd.readouterr().err, folder)

    yield run


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Question {i}?", "completion": f"Answer {i}.", "author": f"a{i % 7}"} for i in range(start, start + count)
    ]


def rows_of(path: str) -> Any:
    import datasets

    return datasets.load_from_disk(path)


def test_a_second_preparation_takes_all_from_the_cache_without_a_heavy_package(tmp_path: Path, tiny: Path) -> None:
    """In a process of its own, as the launcher starts it."""
    data = write_rows(tmp_path / "rows.jsonl", pairs(40))
    env = environment(tmp_path / "cache", tmp_path / "runs") | {"PYTHONPROFILEIMPORTTIME": "1"}
    found = []
    for name in ("first", "second"):
        run = write_run(
            tmp_path / "runs" / name,
            [f"model.name: {tiny}", "model.max_seq_len: 64", f"data.train_path: {data}", "data.validation: 0.2"],
        )
        done = subprocess.run(
            [sys.executable, "-m", "sft_play.prepare", "--run", str(run.path)],
            capture_output=True, text=True, timeout=200, env=env, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(Prepared.load(run.prepared))
        imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
        assert ("transformers" in imported) == (name == "first")
    prepared = found[0]
    assert prepared == found[1] and prepared.train and prepared.validation
    assert prepared.train.rows + prepared.validation.rows == 40 and prepared.validation.rows > 0
    assert (prepared.model.source, prepared.model.path) == ("folder", str(tiny.resolve()))


def test_an_empty_list_of_validation_sources_is_none(prepared_by: Prepare, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", pairs(10))
    assert prepared_by(f"data.train_path: {data}", "data.validation: []").prepared.validation is None


def test_held_out_rows_stay_held_out_when_rows_are_added(prepared_by: Prepare, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    write_rows(data, pairs(60))
    lines = (f"data.train_path: {data}", "data.validation: 0.3")
    before = prepared_by(*lines).prepared
    write_rows(data, pairs(30, start=60) + pairs(60))
    after = prepared_by(*lines).prepared
    assert before.train and before.validation and after.train and after.validation

    def answers(path: str) -> set[str]:
        return set(rows_of(path)["reference"])

    assert answers(before.validation.path) <= answers(after.validation.path)
    assert answers(before.train.path) <= answers(after.train.path)
    assert not answers(after.train.path) & answers(after.validation.path)
    assert after.train.rows + after.validation.rows == 90


@pytest.mark.parametrize(
    "change", ["content", "length", "data.overlong: drop", "train.loss_on: all", "data.system: Be brief.", "template"]
)
def test_what_matters_is_part_of_the_cache_key(change: str, prepared_by: Prepare, tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", pairs(5))
    lines = [f"model.name: {model}", f"data.train_path: {data}"]
    before = prepared_by(*lines).prepared
    if change == "content":
        write_rows(data, pairs(5, start=1))
    elif change == "length":
        lines.append("model.max_seq_len: 63")
    elif ":" in change:
        lines.append(change)
    else:
        template = model / "chat_template.jinja"
        template.write_text("{# another #}" + template.read_text())
    after = prepared_by(*lines).prepared
    assert before.train and after.train
    assert before.train.path != after.train.path
    assert (before.model.tokenizer_fingerprint != after.model.tokenizer_fingerprint) == (
        change in ("template", "data.system: Be brief.")
    )


@pytest.mark.parametrize("damage", ["cut", "one bit, size and times kept"])
def test_a_damaged_cache_is_made_again(damage: str, prepared_by: Prepare, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", pairs(5))
    first = prepared_by(f"data.train_path: {data}").prepared
    assert first.train
    arrow = next(Path(first.train.path).glob("*.arrow"))
    written, times = arrow.read_bytes(), arrow.stat()
    middle = len(written) // 2
    if damage == "cut":
        arrow.write_bytes(written[:-8])
    else:
        arrow.write_bytes(written[:middle] + bytes([written[middle] ^ 1]) + written[middle + 1 :])
        os.utime(arrow, ns=(times.st_atime_ns, times.st_mtime_ns))
    again = prepared_by(f"data.train_path: {data}").prepared
    assert again == first
    assert arrow.read_bytes() == written
    assert len(rows_of(first.train.path)) == 5


def _prepare_in_child(run: str, cache: str) -> None:
    os.environ["SFT_PLAY_CACHE"] = cache
    sys.exit(prepare.main(["--run", run]))


def test_two_processes_prepare_the_same_rows_at_once(own_cache: Path, tiny: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", pairs(300))
    lines = [f"model.name: {tiny}", f"data.train_path: {data}", "data.validation: 0.1", "model.max_seq_len: 512"]
    runs = [write_run(tmp_path / "runs" / f"r{i}", lines) for i in range(2)]
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_prepare_in_child, args=(str(run.path), str(own_cache))) for run in runs]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=120)
    assert [child.exitcode for child in children] == [0, 0]
    first, second = (Prepared.load(run.prepared) for run in runs)
    assert first == second
    assert first.train and len(rows_of(first.train.path)) == first.train.rows
    assert not [path for path in (own_cache / "data").iterdir() if path.name.startswith(".")], "nothing is left aside"


def test_lookup_knows_what_was_prepared_until_a_file_changes(prepared_by: Prepare, tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    folder = tmp_path / "data" / "deep"
    folder.mkdir(parents=True)
    write_rows(folder / "a.jsonl", pairs(5))
    outcome = prepared_by(f"model.name: {model}", f"data.train_path: {tmp_path}/data/*/*.jsonl")
    config = load_config(outcome.run.path / "typed.yaml", environ={}).config
    assert lookup(config) == outcome.prepared
    write_rows(folder / "b.jsonl", pairs(1))
    assert lookup(config) is None
    (folder / "b.jsonl").unlink()
    assert lookup(config) == outcome.prepared
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert lookup(config) is None


LONG = {"prompt": "Question?", "completion": "a long answer that goes on and on, " * 30}
LONG_PROMPT = {"prompt": "a long question that goes on and on, " * 30, "completion": "yes"}


@pytest.mark.parametrize(
    ("rows", "lines", "code", "said"),
    [
        (
            [*pairs(3), LONG], (), 4,
            ("error: {data}:4: 1 of 4 rows are longer than `model.max_seq_len` 64; the longest has ", "DATA_OVERLONG=drop"),
        ),
        (
            [*pairs(3), LONG], ("data.overlong: drop",), 0,
            ("4 read as prompt_completion, 3 kept, 1 left out (longer than model.max_seq_len); ", "; 1 were too long ("),
        ),
        (
            [*pairs(1), LONG, LONG_PROMPT], ("data.overlong: drop",), 0,
            ("warning: 2 of 3 rows are left out for their length; raise MODEL_MAX_SEQ_LEN, or cut them",),
        ),
        (
            [LONG_PROMPT, LONG_PROMPT | {"completion": "no"}, LONG_PROMPT], ("data.overlong: drop",), 4,
            ("no row is left of 3: 1 left out (duplicate), 2 left out (longer than model.max_seq_len)", "raise MODEL_MAX_SEQ_LEN"),
        ),
        (
            pairs(2), ("data.validation: 0.0001",), 4,
            ("`data.validation: 0.0001` leaves no row for validation: there are 2, and a hash of each",),
        ),
    ],
)  # fmt: skip
def test_rows_that_are_too_long_or_too_few_are_counted_or_refused(
    rows: list[dict[str, Any]], lines: tuple[str, ...], code: int, said: tuple[str, ...], prepared_by: Prepare, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows)
    outcome = prepared_by(f"data.train_path: {data}", *lines)
    assert outcome.code == code and outcome.run.prepared.exists() == (code == 0)
    assert all(text.format(data=data) in outcome.told for text in said), outcome.told
    assert ("warning" in outcome.told) == said[0].startswith("warning")


def test_bad_rows_stop_or_are_left_out_and_one_file_names_them_all(prepared_by: Prepare, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    good = [json.dumps(row) for row in pairs(4)]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    unwritten = json.dumps({"prompt": [{"role": "user", "content": "2+2?"}], "completion": [call]})  # ChatML writes no calls
    data.write_text("\n".join([good[0], "not json", good[1], '{"prompt": "q"}', "not json", good[2], unwritten, good[3]]) + "\n")
    stopped = prepared_by(f"data.train_path: {data}")
    assert stopped.code == 4
    assert f"{data}:2:1: is not JSON" in stopped.told and "(2 such rows; the first is here)" in stopped.told
    assert "bad rows: 4, each with its reason in " in stopped.told and "; DATA_BAD_ROWS=drop leaves them out" in stopped.told
    dropped = prepared_by(f"data.train_path: {data}", "data.bad_rows: drop")
    assert dropped.prepared.train and dropped.prepared.train.rows == 4
    assert "8 read as prompt_completion, 4 kept, 4 left out (bad row); " in dropped.told
    assert f"left out: {data}:2:1: is not JSON: Expecting value (2 such rows; the first is here)" in dropped.told
    for told in (stopped.told, dropped.told):
        (file,) = re.findall(r"each with its reason in (\S+);", told)
        named = Path(file).read_text(encoding="utf-8").splitlines()
        assert sorted(int(re.search(r"jsonl:(\d+)", line)[1]) for line in named) == [2, 4, 5, 7]  # type: ignore[index]
        assert all(": " in line.partition("jsonl:")[2] for line in named)
    data.write_text("not json\n")
    assert "the sources hold no row: 1 left out (bad row)" in prepared_by(f"data.train_path: {data}", "data.bad_rows: drop").told


def test_rows_of_preferences_are_told_how_to_train_on_the_chosen(prepared_by: Prepare, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}])
    refused = prepared_by(f"data.train_path: {data}")
    assert refused.code == 4 and "preferences are not trained here" in refused.told
    assert "`columns: {completion: chosen}`" in refused.told
    source = f'data.sources: [{{"path": "{data}", "columns": {{"%s": "%s"}}}}]'
    train = prepared_by(source % ("completion", "chosen")).prepared.train
    assert train and [row["reference"] for row in rows_of(train.path)] == ["4"]
    swapped = prepared_by(source % ("chosen", "completion"))
    assert "the other way round: `columns: {completion: chosen}`" in swapped.told
