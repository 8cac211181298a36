"""Folders with several splits, by the hub's own layout: compared with what `datasets` makes of the same folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import DataSource
from sft_play.config.yaml_files import parse_yaml
from sft_play.data.sources import OF_NO_SPLIT, LeftOut, read_source
from sft_play.errors import DataError

ROW = {"prompt": "q", "completion": ""}
README = """---
configs:
- config_name: {name}
  data_files:
  - split: train
    path: [en/tr-*.jsonl, "more/**"]
  - split: test
    path: en/te.jsonl
- config_name: de
  data_files: de/*.jsonl
---
# A data set
"""


def fill(folder: Path, *names: str) -> None:
    """Write files whose one row's answer is the file's name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**ROW, "completion": name}) + "\n", encoding="utf-8")


def answers(path: Path | str, left_out: LeftOut | None = None, **options: Any) -> list[str]:
    rows = read_source(DataSource(path=str(path), **options), skipped=left_out)
    return [row["completion"] for _, row in rows if not isinstance(row, DataError)]


def refused(path: Path | str, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        answers(path, **options)
    return caught.value


def by_datasets(folder: Path, cache: Path, name: str | None = None) -> dict[str, list[str]]:
    import datasets

    splits = datasets.load_dataset(str(folder), name, cache_dir=str(cache))
    return {split: sorted(splits[split]["completion"]) for split in splits}


LAYOUTS: dict[str, tuple[str, ...]] = {
    "names": ("train.jsonl", "test.jsonl", "validation.jsonl"),
    "other names": ("my_train_1.jsonl", "my_dev_1.jsonl", "eval.jsonl"),
    "folders": ("training/a.jsonl", "training/b.jsonl", "valid/a.jsonl"),
    "shards": ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"),
    "shards of other splits": ("data/train_sft-00000-of-00001.jsonl", "data/test_sft-00000-of-00001-abc.jsonl"),
    "languages": ("en/train.jsonl", "de/train.jsonl", "en/test.jsonl"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_are_those_that_datasets_finds(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    fill(folder, *LAYOUTS[layout])
    expected = by_datasets(folder, tmp_path / "cache")
    assert {split: sorted(answers(folder, split=split)) for split in expected} == expected
    for path in (folder, f"{folder}/**/*.jsonl"):
        error = refused(path)
        assert error.message.startswith("there are several splits: ") and f"split: {next(iter(expected))}" in (
            error.hint or ""
        )
        assert "there is no split `other`" in refused(path, split="other").message


@pytest.mark.slow
def test_a_readme_says_which_files_are_which_split(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    fill(folder, "en/tr-1.jsonl", "en/tr-2.jsonl", "en/te.jsonl", "de/all.jsonl", "more/a/b.jsonl", "notes.jsonl")
    (folder / "README.md").write_text(README.format(name="default"), encoding="utf-8")
    expected = by_datasets(folder, tmp_path / "cache")
    assert {split: sorted(answers(folder, split=split)) for split in expected} == expected
    assert answers(folder, config="de") == by_datasets(folder, tmp_path / "cache", "de")["train"] == ["de/all.jsonl"]
    assert "several splits: `train` (3 files), `test` (1 file)" in refused(folder).message
    assert "no configuration `fr`" in refused(folder, config="fr").message
    (folder / "README.md").write_text(README.format(name="en"), encoding="utf-8")
    assert "several configurations" in refused(folder).message and "`en`, `de`" in (refused(folder).hint or "")
    (folder / "README.md").write_text("---\nconfigs:\n- data_files: '*.csv'\n  sep: ';'\n---\n", encoding="utf-8")
    assert "has `sep`, which is not read" in refused(folder).message


def test_only_training_splits_are_used_silently(tmp_path: Path) -> None:
    fill(tmp_path / "one", "a.jsonl", "b.jsonl")
    assert answers(tmp_path / "one") == answers(tmp_path / "one", split="train") == ["a.jsonl", "b.jsonl"]
    (tmp_path / "one" / "dataset_infos.json").write_text(
        '{"default": {"splits": [{"name": "train"}]}}', encoding="utf-8"
    )
    assert answers(tmp_path / "one") == ["a.jsonl", "b.jsonl"], "it describes the set"
    fill(tmp_path / "held", "test.jsonl")
    assert "the only split is `test` (1 file)" in refused(tmp_path / "held").message
    assert answers(tmp_path / "held", split="test") == answers(tmp_path / "held/*.jsonl") == ["test.jsonl"]
    fill(tmp_path / "some", "train.jsonl", "extra.jsonl")
    left_out = LeftOut()
    assert answers(tmp_path / "some", left_out) == ["train.jsonl"]
    assert left_out.places == {OF_NO_SPLIT: [str(tmp_path / "some" / "extra.jsonl")]}
    assert "but only hub datasets have it" in refused(tmp_path / "one" / "a.jsonl", split="train").message


def test_what_an_author_put_aside_is_used_only_if_it_is_named(tmp_path: Path) -> None:
    fill(
        tmp_path,
        "a/accepted/x.jsonl",
        "a/rejected/y.jsonl",
        "b/good.jsonl",
        "b/bad.jsonl",
        "c/pos.jsonl",
        "c/neg.jsonl",
    )
    fill(tmp_path, "e/rows.jsonl", "e/predictions.jsonl")
    rows = [("a", "accepted/x.jsonl", "rejected"), ("b", "good.jsonl", "bad"), ("e", "rows.jsonl", "predictions")]
    for path, good, bad in rows:
        for pattern in (path, f"{path}/**/*.jsonl"):
            assert f"`train` (1 file), `{bad}` (1 file)" in refused(tmp_path / pattern).message
            assert answers(tmp_path / pattern, split="train") == [f"{path}/{good}"]
        assert len(answers(tmp_path / path, split=bad)) == 1
    assert len(answers(tmp_path / "c")) == 2, "classes"
    assert len(answers(tmp_path / "a" / "rejected")) == 1, "it is named"
    fill(tmp_path, "d/raw/x.jsonl", "d/data/train-00000-of-00001.jsonl")
    assert answers(tmp_path / "d") == ["d/data/train-00000-of-00001.jsonl"]


def test_missing_shards_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, "data/train-00000-of-00003.jsonl", "data/train-00002-of-00003.jsonl")
    assert len(answers(tmp_path)) == 2
    err = capsys.readouterr().err
    assert f"note: {tmp_path}: 2 files, train-00000-of-00003.jsonl, train-00002-of-00003.jsonl\n" in err
    assert f"note: {tmp_path / 'data' / 'train'}: 2 of 3 shards\n" in err
    fill(tmp_path, "data/train-00001-of-00003.jsonl")
    assert len(answers(tmp_path)) == 3 and "of 3 shards" not in capsys.readouterr().err


def test_documents_have_splits_only_by_complete_names(tmp_path: Path) -> None:
    for name in ("docs/testing.md", "docs/evaluation/a.md", "docs/intro.md", "wiki/train.txt", "wiki/test.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    assert len(list(read_source(DataSource(path=str(tmp_path / "docs"))))) == 3
    assert "several splits: `train` (1 file), `test` (1 file)" in refused(tmp_path / "wiki").message


def test_a_source_that_follows_its_hint_is_read(tmp_path: Path) -> None:
    import datasets

    fill(tmp_path / "names", "train.jsonl", "test.jsonl")
    fill(tmp_path / "held", "dev.jsonl")
    saved = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list([ROW]), "test": datasets.Dataset.from_list([ROW])}
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    for path in ("names", "names/*", "held", "saved"):
        hint = refused(tmp_path / path).hint or ""
        piece, *_ = [piece for piece in re.findall(r"`([^`]+)`", hint) if "split: " in piece]
        (source,) = parse_yaml(piece if piece.startswith("sources") else f"sources: [{{{piece}}}]", "hint").plain()[
            "sources"
        ]
        assert answers(**{"path": str(tmp_path / path), **source})
