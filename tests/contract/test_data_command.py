"""`make data`: what it prints, keeps in the cache and refuses; the same rows for any number of processes; nothing
half-written after a stop.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from sft_play.__main__ import main
from sft_play.config.load import load_config, save_config
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared, lookup
from tests.conftest import ROOT, Done, environment
from tests.training_runs import nested_yaml

pytestmark = pytest.mark.slow

Data = Callable[..., Done]


@pytest.fixture
def data(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Data]:
    """Run `make data JSON=1` on `key: value` lines, in this process."""
    for name, value in (("RUNS_DIR", tmp_path / "runs"), ("SFT_PLAY_CACHE", tmp_path / "cache"), ("HF_HUB_OFFLINE", 1)):
        monkeypatch.setenv(name, str(value))

    def run(*lines: str, words: tuple[str, ...] = ("JSON=1",)) -> Done:
        document = configured(tmp_path, tiny, lines)
        capfd.readouterr()
        code = main(["data", f"CONFIG={document}", *words])
        captured = capfd.readouterr()
        return Done(code, captured.out, captured.err)

    yield run
    assert not (tmp_path / "runs").exists(), "no run is made"


def configured(folder: Path, model: Path, lines: Sequence[str]) -> Path:
    document = folder / "x.yaml"
    document.write_text(nested_yaml([f"model.name: {model}", "model.max_seq_len: 64", *lines]), encoding="utf-8")
    return document


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Question {i}?", "completion": f"Answer {i}.", "author": f"a{i % 7}"}
        for i in range(start, start + count)
    ]


def answers(done: Done, split: str = "train") -> list[str]:
    """Return the answers of a prepared split, read by `datasets`."""
    import datasets

    assert done.code == 0, done.err
    rows = datasets.load_from_disk(done.json[split]["split"]["path"])
    assert len(rows) == done.json[split]["split"]["rows"]
    return list(rows["reference"])


def test_data_are_prepared_and_counted_for_the_plan(data: Data, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [*pairs(30), *pairs(4)])
    appended = write_rows(tmp_path / "more.jsonl", [{"question": f"q{i}", "answer": "a"} for i in range(5)])
    validation = write_rows(
        tmp_path / "held.jsonl", [*pairs(3, start=28), {"prompt": "long", "completion": "word " * 100}]
    )
    lines = [
        f'data.sources: [{{"path": "{train}", "weight": 3}}, {{"path": "{appended}", "name": "more", "weight": 2}}]',
        f'data.validation: [{{"path": "{validation}"}}]',
        "data.overlong: drop",
    ]
    done = data(*lines)
    assert done.code == 0, done.err
    summary = done.json
    first, second = summary["train"]["sources"]
    assert (first["name"], first["format"], first["rows_read"], first["kept"]) == (
        str(train),
        "prompt_completion",
        34,
        30,
    )
    assert (first["duplicates"], first["dropped"]) == (4, {})
    assert (second["name"], second["format"], second["kept"]) == ("more", "question_answer", 5)
    assert first["tokens"] + second["tokens"] == summary["train"]["split"]["tokens"]
    assert first["trained_tokens"] + second["trained_tokens"] == summary["train"]["split"]["label_tokens"]
    assert summary["train"]["length_quantiles"].keys() == {"5%", "25%", "50%", "75%", "95%"}
    assert len(first["content_sha256"]) == 64
    assert summary["validation"]["overlap"] == {"with": "train", "rows": 2, "questions": 0, "labels": {}}
    assert summary["validation"]["sources"][0]["dropped"] == {"longer than model.max_seq_len": 1}
    assert f"  {train}: 34 read as prompt_completion, 30 kept, 4 left out (duplicate); " in done.err
    assert "rows that are in the training data too: 2" in done.err
    notice = done.err.partition("validation data: ")
    assert "% of them trained, median" in notice[0] and "% of them scored, median" in notice[2]
    prepared = lookup(load_config(tmp_path / "x.yaml", environ={}).config)
    assert prepared and prepared.train and [fact.weight for fact in prepared.train.sources] == [3, 2]
    words = data(*lines, words=())
    assert words.out.splitlines() == [f"{name}: {summary[name]['split']['path']}" for name in ("train", "validation")]
    assert data(*lines, "data.duplicates: keep").json["train"]["sources"][0]["kept"] == 34
    refused = data(*lines, words=("MODEL_MAX_SEQ_LEN=1024",))
    assert refused.code == 2 and "has 512 positions" in refused.err and "MODEL_MAX_SEQ_LEN=512 at most" in refused.err
    none = data(f"data.train_path: {train}", "data.validation: []")
    assert none.code == 0 and none.json["validation"] is None


def test_keys_of_turns_named_as_columns_are_answered_with_their_names(tmp_path: Path, data: Data) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = write_rows(tmp_path / "chat.jsonl", [{"messages": turns}])
    done = data(f'data.sources: [{{"path": "{rows}", "columns": {{"messages": "messages", "role": "role"}}}}]')
    done.refused(4, "of turns it is `messages.role`; `role` and `content`, or `from` and `value`, are read anyway")


def test_what_may_be_no_answer_and_questions_that_come_again_are_counted(tmp_path: Path, data: Data) -> None:
    rows = [{"prompt": f"q{i}", "completion": answer} for i, answer in enumerate(("a", "N/A", "n/a", "b", "c"))]
    train = write_rows(tmp_path / "train.jsonl", [*rows, {"prompt": "q0", "completion": "other"}])
    validation = write_rows(tmp_path / "held.jsonl", [rows[0], {"prompt": "q3", "completion": "not b"}])
    done = data(f"data.train_path: {train}", f"data.val_path: {validation}")
    assert "texts that may stand for none, or for another (`N/A`, `None`, `-`, `see above`): 2 rows" in done.err
    assert "answers to a question, with all that stands before it, of an earlier row: 1" in done.err
    assert "rows with a question of the training data: 1; `data.group_by`" in done.err
    assert done.json["train"]["asked_again"] == 1


def called(number: int, question: str) -> dict[str, Any]:
    call = {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    return {"messages": turns}


def test_copies_are_known_whatever_the_ids_of_their_calls(tmp_path: Path, data: Data) -> None:
    train = write_rows(tmp_path / "train.jsonl", [called(i, f"q{i % 3}") for i in range(6)])
    held_out = write_rows(tmp_path / "held.jsonl", [called(9, "q0"), called(10, "q3")])
    lines = (f"data.train_path: {train}", f"data.val_path: {held_out}", "data.chat_template: qwen3")
    done = data(*lines, words=("JSON=1", "MODEL_MAX_SEQ_LEN=256"))
    assert done.json["train"]["sources"][0]["duplicates"] == 3
    validation = done.json["validation"]  # `qwen3` needs a row for each answer
    assert (validation["split"]["rows"], validation["overlap"]["rows"]) == (4, 2)


def test_trained_documents_are_counted_by_their_rows_like_others(tmp_path: Path, data: Data) -> None:
    document = write_rows(tmp_path / "docs.jsonl", [{"text": "A pump moves water. " * 60}])
    chat = write_rows(tmp_path / "chat.jsonl", [{"prompt": "q", "completion": "a"}])
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": "q", "completion": "b"}])
    source = '{"path": "%s"}'
    trained = f"data.sources: [{source % document}, {source % chat}]"
    done = data(trained, f"data.validation: [{source % document}, {source % other}]", "tuning.task: mixed")
    rows = done.json["validation"]["split"]["rows"]
    assert rows > 2 and done.json["validation"]["overlap"]["rows"] == rows - 1
    assert done.json["validation"]["overlap"]["questions"] == 1


def test_answers_in_conversations_that_grow_and_answers_of_one_length_are_said(tmp_path: Path, data: Data) -> None:
    turns = [{"role": role, "content": f"{role} {i}" + " the" * 25} for i in range(3) for role in ("user", "assistant")]
    train = write_rows(tmp_path / "log.jsonl", [{"messages": turns[:end]} for end in (2, 4, 6)])
    done = data(f"data.train_path: {train}", words=("MODEL_MAX_SEQ_LEN=256",))
    assert "answers to a question, with all that stands before it, of an earlier row: 3" in done.err
    assert "the 3 longest answers have 111 characters each, as if something had cut them" in done.err
    ended = [{"prompt": f"q{i}", "completion": f"answer {i}" + " the" * 25 + "."} for i in range(4)]
    file = write_rows(tmp_path / "ended.jsonl", ended)
    assert "had cut them" not in data(f"data.train_path: {file}", words=("MODEL_MAX_SEQ_LEN=256",)).err


def test_columns_that_text_is_learnt_without_are_named_but_not_those_of_documents(tmp_path: Path, data: Data) -> None:
    rows = write_rows(tmp_path / "a.jsonl", [{"title": "Berlin", "text": "It is a city."}])
    assert f"not read of {rows}: title (1: `Berlin` 1)" in data(f"data.train_path: {rows}", "tuning.task: cpt").err
    (tmp_path / "a.html").write_text("<html><head><title>t</title></head><body>Words of a page.</body></html>")
    assert "not read" not in data(f"data.train_path: {tmp_path / 'a.html'}", "tuning.task: cpt").err


def test_a_second_preparation_reads_the_cache_without_heavy_packages(tmp_path: Path, tiny: Path) -> None:
    """Run it in a separate process, as the launcher does."""
    file = write_rows(tmp_path / "rows.jsonl", pairs(40))
    document = configured(tmp_path, tiny, [f"data.train_path: {file}", "data.validation: 0.2"])
    env = environment(tmp_path / "cache", tmp_path / "runs") | {"PYTHONPROFILEIMPORTTIME": "1"}
    summaries = []
    for name in ("first", "second"):
        run = RunFolder(tmp_path / "runs" / name)
        run.path.mkdir(parents=True)
        save_config(load_config(document, environ={}), run.config)
        done = subprocess.run(
            [sys.executable, "-m", "sft_play.prepare", "--run", str(run.path)],
            capture_output=True,
            text=True,
            timeout=200,
            env=env,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        summaries.append(Prepared.load(run.prepared))
        imported = {
            line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")
        }
        assert ("transformers" in imported) == (name == "first")
    prepared = summaries[0]
    assert prepared == summaries[1] and prepared.train and prepared.validation
    assert prepared.train.rows + prepared.validation.rows == 40 and prepared.validation.rows > 0
    assert (prepared.model.source, prepared.model.path) == ("folder", str(tiny.resolve()))


def test_every_number_of_processes_prepares_the_same_rows(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [*pairs(1500), *pairs(20)])
    summaries = []
    for number in (1, 2):
        monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / f"cache-{number}"))
        summaries.append(data(f"data.train_path: {file}", "data.validation: 0.1", f"data.num_proc: {number}").json)
    first, second = summaries
    for split in ("train", "validation"):
        assert first[split]["split"].pop("path") != second[split]["split"].pop("path")
    assert first == second
    assert first["train"]["split"]["rows"] + first["validation"]["split"]["rows"] == 1500
    assert sum(first[split]["sources"][0]["duplicates"] for split in ("train", "validation")) == 20


def test_a_group_is_wholly_on_one_side(data: Data, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", pairs(200))
    done = data(f"data.train_path: {file}", "data.validation: 0.4", "data.group_by: author")
    sides = [
        {int(re.sub(r"\D", "", answer)) % 7 for answer in answers(done, split)} for split in ("train", "validation")
    ]
    assert sides[0] | sides[1] == set(range(7))
    assert not sides[0] & sides[1]
    assert (
        re.search(r"  groups of `data.group_by`: 2, with [2-6]\d% of the rows, 40% asked\n", done.err)
        and done.json["validation"]["groups"] == 2
    )
    missing = data(f"data.train_path: {file}", "data.validation: 0.4", "data.group_by: writer")
    assert missing.code == 4
    assert f"error: {file}:1: `data.group_by` names the column `writer`" in missing.err
    assert "(200 such rows; the first is here)" in missing.err and "DATA_BAD_ROWS" not in missing.err
    assert "`columns: {writer: NAME}` of that source says which of its columns is the group" in missing.err


@pytest.mark.parametrize(("fraction", "held_out"), [(0.001, {"a4"}), (0.2, {"a3"}), (0.999, {"a0", "a3"})])
def test_of_few_groups_at_least_one_is_on_each_side(
    data: Data, tmp_path: Path, fraction: float, held_out: set[str]
) -> None:
    sizes = {"a0": 30, "a3": 9, "a4": 3}
    groups = [group for group, rows in sizes.items() for _ in range(rows)]
    rows = [{"prompt": f"{group}?", "completion": f"{group} {i}", "by": group} for i, group in enumerate(groups)]
    lines = [
        f"data.train_path: {write_rows(tmp_path / 'rows.jsonl', rows)}",
        f"data.validation: {fraction}",
        "data.group_by: by",
    ]
    done = data(*lines)
    assert {answer.split()[0] for answer in answers(done, "validation")} == held_out
    assert {answer.split()[0] for answer in answers(done)} == sizes.keys() - held_out
    assert "note: `data.group_by: by`: a hash gives all 3 groups to" in done.err
    shutil.rmtree(done.json["validation"]["split"]["path"])
    assert data(*lines).json == done.json
    write_rows(tmp_path / "rows.jsonl", [row | {"by": "me"} for row in rows])
    assert "all 42 are of one group of `data.group_by: by`" in data(*lines).err


@pytest.mark.parametrize("bad_rows", ["stop", "drop"])
def test_a_column_that_no_row_of_a_source_has_is_no_bad_row(data: Data, tmp_path: Path, bad_rows: str) -> None:
    table = write_rows(tmp_path / "rows.jsonl", [*pairs(20), {"prompt": "q", "completion": "a"}])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("Words of a note.")
    (tmp_path / "notes" / "b.md").write_text("Words of another note.")

    def prepared(of_table: str, of_notes: str, *lines: str) -> Done:
        sources = f"data.sources: [{{path: {table}{of_table}}}, {{path: {tmp_path / 'notes'}{of_notes}}}]"
        return data(sources, "tuning.task: mixed", "data.validation: 0.4", f"data.bad_rows: {bad_rows}", *lines)

    whole_sources = {
        "`columns: {author: path}` of that source gives each file": prepared("", "", "data.group_by: author"),
        "lacks; its columns are `prompt`, `completion`, `author`": prepared(", columns: {words: autor}", ""),
        "missing; the columns are `prompt`, `completion`, `author`": prepared(
            ", columns: {question: prompt, answer: completion}, filter: autor == 'a1'", ""
        ),
    }
    for words, done in whole_sources.items():
        assert done.code == 4 and words in done.err and "DATA_BAD_ROWS=drop" not in done.err
        assert ("did you mean `author`?" in done.err) == ("`prompt`" in words)
    one_row = prepared("", ", columns: {author: path}", "data.group_by: author")
    dropped = bad_rows == "drop"
    assert one_row.code == (0 if dropped else 4) and ("DATA_BAD_ROWS=drop skips them" in one_row.err) != dropped


def test_rows_left_out_before_the_split_are_told_apart(data: Data, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [*pairs(40), *pairs(20)])
    source = f"data.sources: [{{path: {file}, filter: author != 'a0', rows: 30}}]"
    done = data(source, "data.validation: 0.3")
    out = {"not in the filter, before the split": 9, "not chosen by `rows`, before the split": 21}
    train, validation = (done.json[split]["sources"][0] for split in ("train", "validation"))
    assert (train["dropped"], validation["dropped"]) == (out, {})
    assert train["rows_read"] + validation["rows_read"] == 60
    assert data(source).json["train"]["sources"][0]["dropped"].keys() == {"not in the filter", "not chosen by `rows`"}


def test_held_out_rows_stay_held_out_when_rows_are_added(data: Data, tmp_path: Path) -> None:
    sides = []
    for rows in (pairs(60), pairs(30, start=60) + pairs(60)):
        file = write_rows(tmp_path / "rows.jsonl", rows)
        done = data(f"data.train_path: {file}", "data.validation: 0.3")
        sides.append([set(answers(done, split)) for split in ("train", "validation")])
    before, after = sides
    assert before[0] <= after[0] and before[1] <= after[1]
    assert not after[0] & after[1] and len(after[0] | after[1]) == 90


@pytest.mark.parametrize(
    "change", ["content", "length", "data.overlong: drop", "train.loss_on: all", "data.system: Be brief.", "template"]
)
def test_everything_that_changes_rows_is_part_of_the_cache_key(
    change: str, data: Data, tiny: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    file = write_rows(tmp_path / "rows.jsonl", pairs(5))
    lines = [f"model.name: {model}", f"data.train_path: {file}"]
    before = data(*lines).json
    if change == "content":
        write_rows(file, pairs(5, start=1))
    elif change == "length":
        lines.append("model.max_seq_len: 63")
    elif ":" in change:
        lines.append(change)
    else:
        template = model / "chat_template.jinja"
        template.write_text("{# another #}" + template.read_text())
    after = data(*lines).json
    assert before["train"]["split"]["path"] != after["train"]["split"]["path"]
    fingerprints = [summary["model"]["tokenizer_fingerprint"] for summary in (before, after)]
    assert (fingerprints[0] != fingerprints[1]) == (change in ("template", "data.system: Be brief."))


@pytest.mark.parametrize("damage", ["cut", "one bit, size and times kept"])
def test_a_damaged_cache_is_rebuilt(damage: str, data: Data, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", pairs(5))
    first = data(f"data.train_path: {file}")
    arrow = next(Path(first.json["train"]["split"]["path"]).glob("*.arrow"))
    written, times = arrow.read_bytes(), arrow.stat()
    middle = len(written) // 2
    changed = written[:middle] + bytes([written[middle] ^ 1]) + written[middle + 1 :]
    arrow.write_bytes(written[:-8] if damage == "cut" else changed)
    os.utime(arrow, ns=(times.st_atime_ns, times.st_mtime_ns))
    again = data(f"data.train_path: {file}")
    assert again.json == first.json
    assert arrow.read_bytes() == written and len(answers(again)) == 5


def test_two_processes_can_prepare_the_same_rows_at_once(data: Data, tiny: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", pairs(300))
    lines = [f"data.train_path: {file}", "data.validation: 0.1"]
    document = configured(tmp_path, tiny, lines)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=lambda: sys.exit(main(["data", f"CONFIG={document}"]))) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=240)
    assert [child.exitcode for child in children] == [0, 0]
    assert len(list((tmp_path / "cache" / "data").iterdir())) == 2, "nothing is left aside"
    done = data(*lines)
    assert len(answers(done)) + len(answers(done, "validation")) == 300


def test_lookup_knows_what_was_prepared_until_a_file_changes(data: Data, tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    write_rows(tmp_path / "data" / "deep" / "a.jsonl", pairs(5))
    summary = data(f"model.name: {model}", f"data.train_path: {tmp_path}/data/*/*.jsonl").json

    def known() -> str | None:
        prepared = lookup(load_config(tmp_path / "x.yaml", environ={}).config)
        return prepared.train.path if prepared and prepared.train else None

    assert known() == summary["train"]["split"]["path"]
    added = write_rows(tmp_path / "data" / "deep" / "b.jsonl", pairs(1))
    assert known() is None
    added.unlink()
    assert known() == summary["train"]["split"]["path"]
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert known() is None


LONG = {"prompt": "Question?", "completion": "a long answer that goes on and on, " * 30}
LONG_PROMPT = {"prompt": "a long question that goes on and on, " * 30, "completion": "yes"}


@pytest.mark.parametrize(
    ("rows", "line", "code", "messages"),
    [
        (
            [*pairs(3), LONG],
            "data.overlong: error",
            4,
            (
                "error: {file}:4: 1 of 4 rows are longer than `model.max_seq_len` 64; the longest has ",
                "DATA_OVERLONG=drop",
            ),
        ),
        (
            [*pairs(3), LONG],
            "data.overlong: drop",
            0,
            (
                "4 read as prompt_completion, 3 kept, 1 left out (longer than model.max_seq_len); ",
                "; 1 were too long (",
            ),
        ),
        (
            [*pairs(1), LONG, LONG_PROMPT],
            "data.overlong: drop",
            0,
            ("warning: 2 of 3 rows are left out for their length; raise MODEL_MAX_SEQ_LEN, or cut them",),
        ),
        (
            [LONG_PROMPT, LONG_PROMPT | {"completion": "no"}, LONG_PROMPT],
            "data.overlong: drop",
            4,
            (
                "no row is left of 3: 1 left out (duplicate), 2 left out (longer than model.max_seq_len)",
                "raise MODEL_MAX_SEQ_LEN",
            ),
        ),
        (
            pairs(2),
            "data.validation: 0.0001",
            4,
            ("`data.validation: 0.0001` leaves no row for validation: there are 2, and a hash of content",),
        ),
    ],
)
def test_rows_that_are_too_long_or_too_few_are_counted_or_refused(
    rows: list[dict[str, Any]], line: str, code: int, messages: tuple[str, ...], data: Data, tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    done = data(f"data.train_path: {file}", line)
    assert done.code == code
    assert all(text.format(file=file) in done.err for text in messages), done.err
    assert ("warning" in done.err) == messages[0].startswith("warning")


def test_bad_rows_stop_or_are_skipped_and_one_file_lists_them(data: Data, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = [json.dumps(row) for row in pairs(4)]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    unwritten = json.dumps(
        {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [call]}
    )  # ChatML writes no calls
    file.write_text(
        "\n".join([good[0], "not json", good[1], '{"prompt": "q"}', "not json", good[2], unwritten, good[3]]) + "\n"
    )
    stopped = data(f"data.train_path: {file}")
    assert stopped.code == 4
    assert f"{file}:2:1: is not JSON" in stopped.err and "(2 such rows; the first is here)" in stopped.err
    assert "bad rows: 4, each with its reason in " in stopped.err and "; DATA_BAD_ROWS=drop skips them" in stopped.err
    dropped = data(f"data.train_path: {file}", "data.bad_rows: drop")
    assert len(answers(dropped)) == 4
    assert "8 read as prompt_completion, 4 kept, 4 left out (bad row); " in dropped.err
    assert f"left out: {file}:2:1: is not JSON: Expecting value (2 such rows; the first is here)" in dropped.err
    for error in (stopped.err, dropped.err):
        (named,) = re.findall(r"each with its reason in (\S+);", error)
        places = re.findall(r"^.*jsonl:(\d+).*: .*$", Path(named).read_text(encoding="utf-8"), re.MULTILINE)
        assert sorted(map(int, places)) == [2, 4, 5, 7]
    file.write_text("not json\n")
    assert (
        "the sources hold no row: 1 left out (bad row)" in data(f"data.train_path: {file}", "data.bad_rows: drop").err
    )


def test_documents_that_cannot_be_read_are_bad_rows(data: Data, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for name in ("first", "second"):
        (folder / f"{name}.txt").write_bytes(b"Good line\nCaf\xe9 au lait\n")
    (folder / "damaged.docx").write_bytes(b"PK\x03\x04 and no more")
    (folder / "whole.txt").write_text("A pump moves water.\n" * 3)
    lines = (f"data.train_path: {folder}", "tuning.task: cpt")
    stopped = data(*lines)
    assert stopped.code == 4 and "bad rows: 3, each with its reason in " in stopped.err
    assert (
        f"{folder}/first.txt:2: is not UTF-8 text: byte 4 of the line (2 such rows; the first is here)" in stopped.err
    )
    assert f"{folder}/damaged.docx: " in stopped.err
    (source,) = data(*lines, "data.bad_rows: drop").json["train"]["sources"]
    assert (source["rows_read"], source["kept"], source["dropped"]) == (4, 1, {"bad row": 3})


def test_labels_that_differ_by_case_or_blanks_are_named_and_columns_by_the_files_names(
    data: Data, tmp_path: Path
) -> None:
    file = tmp_path / "tickets.jsonl"
    labels = ["billing", "Billing", "billing ", "delivery"]
    file.write_text("".join(json.dumps({"body": f"Ticket {i}", "kind": labels[i % 4]}) + "\n" for i in range(8)))
    source = f'data.sources: [{{"path": "{file}", "columns": {{"prompt": "body", "completion": "kind"}}}}]'
    done = data(source)
    assert (
        "learnt apart: `billing` (2), `Billing` (2), `billing ` (2)\n" in done.err
        and "answers that begin" not in done.err
    )
    assert "may be misspelt" not in done.err
    assert "answers are labels, 4 in all: `billing` (2), `Billing` (2), `billing ` (2), `delivery` (2)\n" in done.err
    tests = write_rows(
        tmp_path / "tests.jsonl", [{"body": f"Test {i}", "kind": ["delivery", "refund"][i % 2]} for i in range(5)]
    )
    held_out = source.replace(str(file), str(tests)).removeprefix("data.sources: ")
    done = data(source, f"data.validation: {held_out}")
    assert "  labels that no row of the training data has: `refund` (2)\n" in done.err
    kinds = [*["Rechnung"] * 6, "Rechnug", *["Lieferung"] * 6, *["Lieferant"] * 2, *["level 12", "level 13"]]
    write_rows(file, [{"body": f"Ticket {i}", "kind": kind} for i, kind in enumerate(kinds)])
    assert "  labels that may be misspelt: `Rechnug` (1) for `Rechnung` (6)\n" in data(source).err
    file.write_text('{"body": "Ticket 1", "kind": ""}\n')
    data(source).refused(4, "`kind` is empty, so there is nothing to learn")
    write_rows(file, [{"body": f"Ticket {i}", "kind": f"{'Yes' if i % 2 else 'yes'}, {i // 2}."} for i in range(220)])
    texts = data(source).err
    assert "learnt apart" not in texts and "are labels" not in texts


def test_a_text_with_a_label_gets_a_hint_to_learn_the_label(data: Data, tmp_path: Path) -> None:
    file = tmp_path / "tickets.csv"
    file.write_text("text,label\nMy invoice is wrong,billing\n")
    done = data(f"data.train_path: {file}")
    hint = "`data.sources: [{path: FILE, columns: {prompt: text, completion: label}}]` learns `label`"
    assert done.code == 4 and hint in done.err
    columns = "columns: {prompt: text, completion: label}"
    misplaced = data(f"data.train_path: {file}", f"data.{columns}")
    assert misplaced.code == 2 and "it belongs to a source: `data.sources: [{path: FILE, columns: {" in misplaced.err
    assert answers(data(f"data.sources: [{{path: {file}, {columns}}}]")) == ["billing"]
    incomplete = data(f"data.sources: [{{path: {file}, {columns.replace('completion', 'answer')}}}]")
    assert f"hint: `data.sources: [{{path: FILE, {columns}}}]`" in incomplete.err, incomplete.err
    assert "; prompt_completion: prompt, completion; " in incomplete.err


def test_preference_rows_get_a_hint_to_train_on_the_chosen_answer(data: Data, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}])
    refused = data(f"data.train_path: {file}")
    assert refused.code == 4 and "preferences are not trained here" in refused.err
    assert "`columns: {completion: chosen}`" in refused.err
    source = f'data.sources: [{{"path": "{file}", "columns": {{"%s": "%s"}}}}]'
    assert answers(data(source % ("completion", "chosen"))) == ["4"]
    assert "the other way round: `columns: {completion: chosen}`" in data(source % ("chosen", "completion")).err


class Running:
    """`make data` on many rows, once its processes are at work."""

    def __init__(self, document: Path, cache: Path) -> None:
        self.cache = cache / "data"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sft_play", "data", f"CONFIG={document}"],
            env=environment(cache, cache),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 300
        self.workers: list[psutil.Process] = []
        while len(self.workers) < 2 and time.monotonic() < deadline:
            assert self.process.poll() is None
            self.workers = psutil.Process(self.process.pid).children(recursive=True)
            time.sleep(0.02)
        assert len(self.workers) == 2

    def end(self) -> tuple[int, str]:
        """Wait for its end, and for that of its processes."""
        err = self.process.communicate(timeout=240)[1]
        assert not psutil.wait_procs(self.workers, timeout=240)[1], "its processes end with it"
        return self.process.returncode, err

    def left(self) -> int:
        return len(list(self.cache.iterdir()))


@pytest.fixture
def running(tmp_path: Path, tiny: Path) -> Callable[[], Running]:
    file = write_rows(tmp_path / "many.jsonl", pairs(60_000))
    document = configured(tmp_path, tiny, [f"data.train_path: {file}", "data.num_proc: 2"])
    return lambda: Running(document, tmp_path / "cache")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_a_signal_leaves_no_process(number: int, code: int, running: Callable[[], Running]) -> None:
    started = running()
    os.kill(started.process.pid, number)
    assert started.end()[0] == code and not started.left()


@pytest.mark.long
def test_a_killed_process_is_reported_and_its_preparation_removed(running: Callable[[], Running]) -> None:
    started = running()
    started.workers[1].kill()
    code, err = started.end()
    assert code == 3 and "error: a process that prepares the data was killed" in err and "DATA_NUM_PROC=1" in err
    assert not started.left()
    again = running()
    again.process.kill()
    again.end()
    assert again.left() == 1, "a killed process cannot clear up; the next one does"
    last = running()
    assert last.left() == 1
    os.kill(last.process.pid, signal.SIGTERM)
    assert last.end()[0] == 143


def test_a_row_that_json_cannot_write_is_a_bad_row_with_its_place(data: Data, tmp_path: Path) -> None:
    import datetime

    from pyarrow import Table, parquet

    def row(number: int, value: Any) -> dict[str, Any]:
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": value}}}],
        }
        described = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        return {"messages": [{"role": "user", "content": f"q{number}"}, call], "tools": described}

    half = write_rows(tmp_path / "half.jsonl", [row(1, "x"), row(2, "\ud83d"), row(3, "y")])
    dated = tmp_path / "dated.parquet"
    parquet.write_table(Table.from_pylist([row(1, datetime.date(2026, 1, 1))]), dated)
    for file, place, message in (
        (half, ":2", "an unpaired surrogate"),
        (dated, ", row 1", "is date, which JSON cannot represent"),
    ):
        refused = data(f"data.train_path: {file}", "data.chat_template: qwen3", "model.max_seq_len: 512")
        assert (
            refused.code == 4
            and f"{file}{place}: `messages[1].tool_calls[0].arguments.a` " in refused.err
            and message in refused.err
        )
    dropped = data(
        f"data.train_path: {half}", "data.chat_template: qwen3", "model.max_seq_len: 512", "data.bad_rows: drop"
    )
    assert dropped.code == 0, dropped.err
    assert (dropped.json["train"]["sources"][0]["kept"], dropped.json["train"]["sources"][0]["dropped"]) == (
        2,
        {"bad row": 1},
    )


def test_a_folder_of_splits_is_trained_and_validated_by_its_splits(data: Data, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for name, first in (("train", 0), ("test", 10), ("validation", 20)):
        write_rows(folder / f"{name}.jsonl", pairs(5, start=first))
    refused = data(f"data.train_path: {folder}")
    assert (
        refused.code == 4
        and "there are several splits: `train` (1 file), `validation` (1 file), `test` (1 file)" in refused.err
    )
    done = data(
        f'data.sources: [{{"path": "{folder}", "split": "train"}}]',
        f'data.validation: [{{"path": "{folder}", "split": "validation"}}]',
    )
    assert sorted(answers(done)) == [f"Answer {i}." for i in range(5)]
    assert sorted(answers(done, "validation")) == [f"Answer {i}." for i in range(20, 25)]


def test_what_is_in_rows_and_not_learnt_is_said(data: Data, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q", "ts": 1}, {"role": "assistant", "content": "a\n"}]
    rows = [{"messages": [*turns, turns[0]], "lang": "de"}, {"messages": turns, "id": 7, "lang": "de"}]
    path = write_rows(tmp_path / "t.jsonl", rows)
    lines = (f"data.sources: [{{path: {path}, filter: 'lang == \"de\"'}}]", "data.chat_template: zephyr")
    done = data(*lines, words=())
    assert done.code == 0, done.err
    assert "turns after the last answer of their conversation, left out: 1" in done.err
    assert f"not read of {path}: id (1), messages.ts (2)" in done.err
    source = data(*lines).json["train"]["sources"][0]
    assert source["columns_unread"] == {"id": {"7": 1}, "messages.ts": {"1": 2}}
    assert list(source["doubts"]) == ["turns after the last answer of their conversation, left out"]
    write_rows(path, [{"translation": {"en": "cat", "fr": "chat", "de": "Katze", "by": "Ann"}, "id": 7}])
    source = f"path: {path}, columns: {{prompt: translation.en, completion: translation.fr}}"
    unread = f"not read of {path}: translation.by (1: `Ann` 1), translation.de (1: `Katze` 1), id (1)\n"
    assert unread in data(f"data.sources: [{{{source}}}]", words=()).err
    unread = f"not read of {path}: translation.by (1: `Ann` 1), id (1)\n"
    assert unread in data(f"data.sources: [{{{source}, filter: has(translation.de)}}]", words=()).err


def test_values_of_what_is_not_read_and_lines_that_come_again_are_shown(data: Data, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q{i}", "completion": f"a{i}\nHope this helps", "meta": {"stage": stage}, "id": i}
        for i, stage in enumerate(("final", "first try", "final"))
    ]
    path = write_rows(tmp_path / "t.jsonl", rows)
    done = data(f"data.sources: [{{path: {path}}}]", words=())
    assert f"not read of {path}: meta.stage (3: `final` 2, `first try` 1), id (3)\n" in done.err
    assert "answers that begin or end with the same line: 3, `Hope this helps`\n" in done.err
    rows = [{"prompt": f"q{i}", "completion": "It is one of the words. " * i, "kind": "note"} for i in (2, 3, 4)]
    rows += [{"prompt": "q", "completion": word} for word in ("<b>+1</b>", "ok")]
    done = data(f"data.sources: [{{path: {write_rows(path, rows)}}}]", words=())
    assert f"not read of {path}: kind (3: `note` 3)\n" in done.err
    assert f"in texts of {path}, learnt as they are if a program put them there: `<b>` 1\n" in done.err
    assert "shortest answers: `ok`, `<b>+1</b>`" in done.err


def test_rows_with_doubts_are_counted(data: Data, tmp_path: Path) -> None:
    rows = [{"prompt": f"how {answer}", "completion": answer} for answer in ("pos", "neg", "It&#39;s")]
    path = write_rows(tmp_path / "t.jsonl", rows)
    done = data(f"data.sources: [{{path: {path}}}]", words=())
    assert f"texts with letters as HTML writes them (`&amp;`, `&#39;`): 1 row, first {path}:3\n" in done.err
    assert list(data(f"data.sources: [{{path: {path}}}]").json["train"]["sources"][0]["doubts"].values()) == [1]


def test_token_rows_with_doubts_are_counted(data: Data, tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [5, 6, -100, -100]},
        {"input_ids": [5, 6, 7, 9, 9, 9, 9]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"input_ids": [5, 6, 7]},
    ]
    done = data(f"data.train_path: {write_rows(tmp_path / 't.jsonl', rows)}", words=())
    for number, doubt in enumerate(("as if the mask said the opposite", "of another tokenizer", "teach no stop"), 1):
        assert f"{doubt}: 1 row, first {tmp_path / 't.jsonl'}:{number}\n" in done.err


def test_calls_that_cannot_be_are_counted_with_the_first_place(data: Data, tmp_path: Path) -> None:
    def row(number: int, name: str = "f", result: str = "1") -> dict[str, Any]:
        call = {"id": "1", "function": {"name": name, "arguments": {}}}
        turns = [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "tool_calls": [call]}]
        turns += [{"role": "tool", "tool_call_id": result, "content": "r"}, {"role": "assistant", "content": "a"}]
        return {"messages": turns, "tools": [{"type": "function", "function": {"name": "f"}}]}

    rows = [row(1), row(2), row(3, name="g"), row(4, result="2"), row(5, name="h")]
    path = write_rows(tmp_path / "t.jsonl", rows)
    done = data(f"data.train_path: {path}", "data.chat_template: qwen3", "model.max_seq_len: 512", words=())
    assert done.code == 0, done.err
    assert f"calls of functions that the row's tools do not describe: 2 rows, first {path}:3\n" in done.err
    assert f"results whose `tool_call_id` is not that of the call in their place: 1 row, first {path}:4\n" in done.err


def test_answers_that_a_template_trims_are_counted_and_another_templates_end_is_refused(
    data: Data, tmp_path: Path
) -> None:
    rows = [{"prompt": "q", "completion": " a\n"}, {"prompt": "q2", "completion": "b"}]
    template = tmp_path / "trims.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    train = write_rows(tmp_path / "t.jsonl", rows)
    lines = [f"data.sources: [{{path: {train}}}]", f"data.chat_template: {template}"]
    done = data(*lines, words=())
    assert "answers learnt without the blanks at their ends, which the chat template removes: 1" in done.err
    write_rows(train, [{"prompt": "q", "completion": "a</s>"}, {"prompt": "q", "completion": "<s>old</s>"}])
    done = data(*lines)
    assert done.code == 4 and "ends with `</s>`, which another template ends turns with" in done.err
    assert done.err.count("another template ends turns with") == 1
