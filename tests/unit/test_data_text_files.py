"""Text files that are not what they should be: encodings, separators, quotes, keys that are there twice, hidden files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sft_play.config.schema import DataSource
from sft_play.data.readers import read_file
from sft_play.data.sources import files_of
from sft_play.errors import DataError


def refusals(path: Path, content: bytes) -> list[DataError]:
    """Returns all errors of a file: those of its rows, and what ends its reading."""
    path.write_bytes(content)
    found: list[DataError] = []
    try:
        found += [row for _, row in read_file(path) if isinstance(row, DataError)]
    except DataError as error:
        found.append(error)
    return found


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_file_of_wide_characters_is_one_error_with_its_encoding(name: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / name
    (error,) = refusals(path, ('{"question": "a", "answer": "b"}\n' * 3).encode(encoding))
    name = encoding.upper()
    assert (error.place, error.message) == (str(path), f"is {name}, and not UTF-8 text")
    assert error.hint == f"convert it: `iconv -f {name} -t UTF-8 {path} > NEW`"


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ";"), ("a.csv", "\t"), ("a.csv", "|"), ("a.tsv", "\t"), ("a.csv.gz", ";")])
def test_the_header_tells_what_separates_columns(name: str, mark: str, tmp_path: Path) -> None:
    content = f'question{mark}answer\n1,5{mark}"b{mark}c"\n'.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [row for _, row in read_file(tmp_path / name)] == [{"question": "1,5", "answer": f"b{mark}c"}]


@pytest.mark.parametrize(("name", "told"), [("README", "a file whose name has no ending"), ("ls.1.gz", "files ending in `.1`")])
def test_a_file_that_is_no_kind_of_data_is_told_how_plain_text_is_named(name: str, told: str, tmp_path: Path) -> None:
    (error,) = refusals(tmp_path / name, b"text")
    assert told in error.message and "plain text is `.txt`" in (error.hint or "")
    with pytest.raises(DataError) as folder:
        files_of(DataSource(path=str(tmp_path)))
    assert f"it holds `{name}`" in (folder.value.hint or "")


@pytest.mark.parametrize("row", ['"a,b', 'a,"b'])
def test_a_quote_that_is_never_closed_is_told_where_it_opens(row: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    (error,) = refusals(path, f'question,answer\n"x\ny",z\n{row}\nc,d\ne,f\n'.encode())
    assert error.place == f"{path}:4"
    assert "never closed" in error.message


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b'{"a": 1}\n{"question": "a", "question": "c"}\n', ":2"),
        (b'{"a": 1}\n{"m": [{"question": "a", "question": "c"}]}\n', ":2"),
        (b'[{"a": 1},\n{"question": "a", "question": "c"}]', ""),
    ],
)
def test_a_key_that_is_there_twice_is_an_error(content: bytes, place: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    (error,) = refusals(path, content)
    assert (error.place, error.message) == (f"{path}{place}", "the key `question` is there more than once")
    assert '"question": "c"' in (error.hint or "")
