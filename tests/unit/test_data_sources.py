"""Files of every kind, compressed or damaged, saved data sets, and which rows of a source are taken."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from sft_play.config.schema import DataSource
from sft_play.data.formats import recognise, understand
from sft_play.data.readers import read_file
from sft_play.data.sources import OTHER_FILE, LeftOut, files_of, read_builtin, read_source
from sft_play.errors import DataError
from sft_play.infer import read_questions

ROWS = [{"prompt": f"q{n}", "completion": "ä" * n} for n in range(1, 40)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, "zstd", asbytes=True))


PACK: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


def rows_of(path: Path | str, **options: Any) -> list[Any]:
    return [row for _, row in read_source(DataSource(path=str(path), **options))]


def refused(path: Path | str, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        for row in rows_of(path, **options):
            if isinstance(row, DataError):
                raise row
    return caught.value


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def table() -> Any:
    return pyarrow.Table.from_pylist(ROWS)


def arrow_bytes(kind: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    if kind == "parquet":
        parquet.write_table(table(), sink)
    else:
        opener = ipc.new_file if kind == "file" else ipc.new_stream
        with opener(sink, table().schema) as writer:
            writer.write_table(table(), max_chunksize=10)
    return bytes(sink.getvalue().to_pybytes())


# ---- Files


TWO = [{"prompt": 'a, "b"', "completion": "c\nd"}, {"prompt": "ä", "completion": "2"}]
CONTENTS: dict[str, str] = {
    "rows.jsonl": "\n".join(json.dumps(row) for row in TWO) + "\n\n",
    "rows.json": json.dumps(TWO, indent=1),
    "lines.json": "\n".join(json.dumps(row) for row in TWO),
    "rows.csv": 'prompt,completion\r\n"a, ""b""","c\nd"\r\nä,2\r\n',
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "bom"])
def test_each_kind_of_file_gives_the_same_rows(name: str, mark: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, (mark + CONTENTS[name]).encode())
    assert [row for _, row in read_file(path)] == TWO


def test_globs_and_folders_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/c"):
        write(tmp_path / f"{name}.jsonl", json.dumps({"prompt": name}).encode())
    write(tmp_path / "notes.txt", b"not data")
    (tmp_path / "empty.json").mkdir()

    def prompts(pattern: Path) -> list[str]:
        return [row["prompt"] for row in rows_of(pattern)]

    assert prompts(tmp_path / "**" / "*.jsonl") == ["a", "b", "deep/c"]
    assert prompts(tmp_path) == ["a", "b", "deep/c"]


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "deep/folder/missing"])
def test_a_missing_file_is_named(name: str) -> None:
    error = refused(name)
    assert (error.place, error.message) == (name, "there is no such file")


def test_a_glob_without_a_match_and_a_folder_without_data_are_named(tmp_path: Path) -> None:
    assert f"no file matches `{tmp_path}/*.csv`" in refused(tmp_path / "*.csv").message
    assert refused(tmp_path).place == str(tmp_path)


@pytest.mark.parametrize(("content", "kind"), [("[1]", "list"), ("3", "a number"), ('"text"', "text"), ("null", "empty")])
def test_a_line_that_is_no_object_is_named(content: str, kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", content.encode())
    error = refused(path)
    assert error.place == f"{path}:1"
    assert kind in error.message


# ---- The built-in set


@pytest.mark.slow
def test_the_built_in_set_is_stable_and_its_modules_do_not_overlap() -> None:
    train, validation = list(read_builtin("docstrings", "train")), list(read_builtin("docstrings", "validation"))
    assert len(train) > 1000
    assert len(validation) == 80
    assert {place.split()[0] for place, _ in train}.isdisjoint(place.split()[0] for place, _ in validation)
    assert validation == list(read_builtin("docstrings", "validation"))
    assert all(recognise(row) == "messages" for _, row in train + validation)


@pytest.mark.parametrize(("path", "split"), [("builtin:poems", None), ("builtin:docstrings", "test")])
def test_an_unknown_built_in_set_or_split_names_what_there_is(path: str, split: str | None) -> None:
    error = refused(path, split=split)
    assert "docstrings" in f"{error.message} {error.hint}"


# ---- Compressed, Arrow


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_each_kind_is_read_through_each_compression(ending: str, kind: str, tmp_path: Path) -> None:
    contents = {
        "jsonl": LINES, "json": json.dumps(ROWS).encode(), "parquet": arrow_bytes("parquet"), "arrow": arrow_bytes("file"),
        "csv": ("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in ROWS)).encode(),
    }  # fmt: skip
    path = write(tmp_path / f"rows.{kind}.{ending}", PACK[ending](contents[kind]))
    assert rows_of(path) == ROWS
    assert [p for p, _ in read_file(path)][1] in (f"{path}:2", f"{path}:3", f"{path}, row 2")


def test_a_parquet_file_with_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"ok", b"a\xff"], pyarrow.binary()).buffers())
    parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "a.parquet")
    error = refused(tmp_path / "a.parquet")
    assert error.place == str(tmp_path / "a.parquet") and "utf-8" in error.message


def test_keys_that_arrow_added_to_mappings_are_left_out(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "train": False}]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns}]), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [{"messages": turns}]


@pytest.mark.parametrize("indent", [None, 1])
def test_an_export_has_its_rows_beside_what_else_it_says(indent: int | None, tmp_path: Path) -> None:
    export = {"version": 2, "tags": ["a"], "tickets": ROWS}
    path = write(tmp_path / "a.json", json.dumps(export, indent=indent).encode())
    assert rows_of(path) == ROWS
    one = write(tmp_path / "one.json", b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}')
    assert [list(row) for row in rows_of(one)] == [["messages"]], "one row of JSON lines"


THREAD = {
    "messages": "thread", "messages.role": "from", "messages.content": "body", "messages.role.user": "customer|visitor",
    "messages.role.assistant": "agent",
}  # fmt: skip


def test_a_conversation_under_other_names(tmp_path: Path) -> None:
    turns = [{"from": who, "at": 1, "body": f"by {who}"} for who in ("system", "customer", "agent", "visitor", "agent")]
    path = write(tmp_path / "a.jsonl", json.dumps({"id": 1, "from": "x", "thread": turns}).encode())
    [row] = rows_of(path, columns=THREAD)
    example = understand(("", row), 0, "messages")
    assert [turn["role"] for turn in example.messages or []] == ["system", "user", "assistant", "user", "assistant"]
    assert [turn["content"] for turn in example.messages or []] == [turn["body"] for turn in turns]
    [question] = read_questions(path, [THREAD])
    assert question.reference == "by agent" and question.messages[-1] == {"role": "user", "content": "by visitor"}
    assert "lacks; its columns are" in refused(path, columns={"messages": "c.x"}).message
    with pytest.raises(DataError) as caught:
        recognise(rows_of(path)[0])
    assert "columns: {messages: thread, messages.role: NAME," in (caught.value.hint or ""), "no format has such names"


# ---- Folders


def test_a_saved_data_set_is_read_by_its_own_list(tmp_path: Path) -> None:
    import datasets

    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])})
    saved.save_to_disk(str(tmp_path / "both"))
    saved["test"].save_to_disk(str(tmp_path / "one"))
    write(tmp_path / "one" / "stray.jsonl", b'{"prompt": "x"}\n')
    assert rows_of(tmp_path / "both", split="train") == ROWS
    assert rows_of(tmp_path / "one") == ROWS[:2]
    assert "the data set has splits: `train`, `test`" in refused(tmp_path / "both").message
    assert "there is no split `val`: `train`, `test`" in refused(tmp_path / "both", split="val").message
    assert "has no splits" in refused(tmp_path / "one", split="train").message


def test_a_folder_gives_its_tables_else_its_documents(tmp_path: Path) -> None:
    write(tmp_path / "README.md", b"# about")
    write(tmp_path / ".cache" / "a.jsonl", LINES)
    write(tmp_path / "deep" / "b.txt", b"two")
    assert files_of(DataSource(path=str(tmp_path))) == [tmp_path / "README.md", tmp_path / "deep" / "b.txt"]
    write(tmp_path / "deep" / "c.jsonl.gz", gzip.compress(LINES))
    assert rows_of(tmp_path) == ROWS
    left = LeftOut()
    list(read_source(DataSource(path=str(tmp_path)), left=left))
    assert left.places == {OTHER_FILE: [str(tmp_path / "README.md"), str(tmp_path / "deep" / "b.txt")]}, (
        "nothing is passed over in silence"
    )


# ---- Columns, filter, rows


def test_columns_lead_into_columns_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"meta": {"prompt": {"text": "q"}, "stars": 3}, "reply": {"best": "a"}}\n')
    source = DataSource(
        path=str(path), columns={"prompt": "meta.prompt.text", "completion": "reply.best"}, filter="meta.stars > 2"
    )
    ((_, row),) = read_source(source)
    assert isinstance(row, Mapping) and (row["prompt"], row["completion"]) == ("q", "a")


def test_a_filter_takes_either_name_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    path, left = write(tmp_path / "a.jsonl", LINES), LeftOut()
    source = DataSource(path=str(path), columns={"question": "prompt"}, filter='question == "q3" or prompt == "q5"')
    assert [row["question"] for _, row in read_source(source, left=left) if not isinstance(row, DataError)] == ["q3", "q5"]
    assert left.counts == {"not in the filter": len(ROWS) - 2}
    assert f"keeps none of the {len(ROWS)} rows" in refused(path, filter='prompt == "x"').message
    assert refused(path, filter="prompt ==").place == str(path)
    assert refused(path, filter="nothing == 1").place == f"{path}:1"


def test_rows_are_chosen_by_the_seed_in_their_order(tmp_path: Path) -> None:
    path, left = write(tmp_path / "a.jsonl", LINES), LeftOut()

    def chosen(count: int, seed: int) -> list[int]:
        rows = read_source(DataSource(path=str(path), rows=count), seed=seed, left=left)
        return [ROWS.index(dict(row)) for _, row in rows if not isinstance(row, DataError)]

    ten = chosen(10, 1)
    assert left.counts == {"not chosen by `rows`": len(ROWS) - 10}
    assert len(ten) == 10 and ten == sorted(ten) == chosen(10, 1)
    assert set(ten) < set(chosen(20, 1))
    assert ten != chosen(10, 2)
    assert chosen(1000, 1) == list(range(len(ROWS)))


@pytest.mark.parametrize("option", [{"streaming": True}, {"split": "train"}, {"config": "x"}, {"revision": "main"}])
def test_what_only_a_hub_dataset_has_is_refused_for_a_file(option: dict[str, Any], tmp_path: Path) -> None:
    assert "but only a hub dataset" in refused(write(tmp_path / "a.jsonl", LINES), **option).message


# Text files that are not what they should be.


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
