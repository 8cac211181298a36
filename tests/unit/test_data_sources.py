"""Files of every kind, compressed or damaged, saved data sets, and which rows of a source are taken."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from sft_play.config.schema import DataSource
from sft_play.data.builtin import read_builtin
from sft_play.data.formats import recognise, understand
from sft_play.data.readers import read_file
from sft_play.data.sources import OTHER_FILE, LeftOut, files_of, read_source, start_of_places
from sft_play.errors import DataError
from sft_play.infer import read_questions

ROWS = [{"prompt": f"q{n}", "completion": "ä" * n} for n in range(1, 40)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, "zstd", asbytes=True))


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


# ---- Files


def arrow(rows: Sequence[Any]) -> bytes:
    sink, table = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(rows)
    with ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    return bytes(sink.getvalue().to_pybytes())


def parquet_of(table: Any) -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())


TWO = [{"prompt": 'a, "b"', "completion": "c\nd"}, {"prompt": "\u00e4", "completion": "2"}]
CONTENTS: dict[str, bytes] = {
    "jsonl": ("\n".join(json.dumps(row) for row in TWO) + "\n\n").encode(),
    "json": json.dumps(TWO, indent=1).encode(),
    "lines.json": "\n".join(json.dumps(row) for row in TWO).encode(),
    "csv": 'prompt,completion\r\n"a, ""b""","c\nd"\r\n\u00e4,2\r\n'.encode(),
    "parquet": parquet_of(pyarrow.Table.from_pylist(TWO)),
    "arrow": arrow(TWO),
}
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("kind", CONTENTS)
def test_each_kind_gives_the_same_rows_through_each_compression(ending: str, kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows.{kind}{ending}", PACK[ending](CONTENTS[kind]))
    places, rows = zip(*read_file(path), strict=True)
    assert list(rows) == TWO and places[1] in (f"{path}:2", f"{path}:4", f"{path}, row 2")
    if kind not in ("parquet", "arrow"):
        assert rows_of(write(path, PACK[ending](b"\xef\xbb\xbf" + CONTENTS[kind]))) == TWO, "with a byte order mark"


@pytest.mark.parametrize(
    ("pattern", "place", "message"),
    [
        ("missing.jsonl", "missing.jsonl", "there is no such file"),
        ("deep/folder/missing", "deep/folder/missing", "there is no such file"),
        ("{folder}/*.csv", "{folder}/*.csv", "no file matches `{folder}/*.csv`"),
        ("{folder}", "{folder}", "the folder contains no json"),
    ],
)
def test_missing_files_are_named(pattern: str, place: str, message: str, tmp_path: Path) -> None:
    error = refused(pattern.format(folder=tmp_path))
    assert error.place == place.format(folder=tmp_path) and error.message.startswith(message.format(folder=tmp_path))


@pytest.mark.parametrize("path", ["a", "a/", "./a/x.jsonl", ".", "*/x.jsonl", "{folder}/[ab]/*.jsonl", "{folder}"])
def test_all_places_of_a_source_begin_alike(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a" / "x.jsonl", LINES)
    source = DataSource(path=path.format(folder=tmp_path))
    assert all(place.startswith(start_of_places(source)) for place, _ in read_source(source))


def test_a_mistyped_file_is_answered_with_the_one_beside_it(tmp_path: Path) -> None:
    right = write(tmp_path / "tickets_2025.csv", CONTENTS["csv"])
    assert refused(str(tmp_path / "ticket_2025.csv")).hint == f"did you mean `{right}`?"
    assert "paths count from" in (refused(str(tmp_path / "other.csv")).hint or "")


# ---- The built-in set


@pytest.mark.slow
@pytest.mark.broad
def test_the_built_in_set_is_stable_and_its_modules_do_not_overlap() -> None:
    train, validation = list(read_builtin("docstrings", "train")), list(read_builtin("docstrings", "validation"))
    assert len(train) > 1000
    assert len(validation) == 80
    assert {place.split()[0] for place, _ in train}.isdisjoint(place.split()[0] for place, _ in validation)
    assert validation == list(read_builtin("docstrings", "validation"))
    assert all(recognise(row) == "messages" for _, row in train + validation)


@pytest.mark.parametrize(("path", "split"), [("builtin:poems", None), ("builtin:docstrings", "test")])
def test_an_unknown_built_in_set_or_split_lists_the_available_ones(path: str, split: str | None) -> None:
    error = refused(path, split=split)
    assert "docstrings" in f"{error.message} {error.hint}"


def test_a_parquet_file_with_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"ok", b"a\xff"], pyarrow.binary()).buffers())
    path = write(tmp_path / "a.parquet", parquet_of(pyarrow.table({"text": bad})))
    error = refused(path)
    assert error.place == str(path) and "utf-8" in error.message


def test_keys_that_arrow_added_to_mappings_are_removed(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "train": False}]
    path = write(tmp_path / "a.parquet", parquet_of(pyarrow.Table.from_pylist([{"messages": turns}])))
    assert rows_of(path) == [{"messages": turns}]


@pytest.mark.parametrize("indent", [None, 1])
def test_rows_of_an_export_are_read_next_to_other_keys(indent: int | None, tmp_path: Path) -> None:
    export = {"version": 2, "tags": ["a"], "tickets": ROWS}
    path = write(tmp_path / "a.json", json.dumps(export, indent=indent).encode())
    assert rows_of(path) == ROWS
    single = write(
        tmp_path / "one.json",
        b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}',
    )
    assert [list(row) for row in rows_of(single)] == [["messages"]], "one row of JSON lines"


@pytest.mark.parametrize("indent", [None, 1])
def test_a_table_by_columns_is_read_as_rows(indent: int | None, tmp_path: Path) -> None:
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    of_pandas = {name: {str(place): value for place, value in enumerate(values)} for name, values in columns.items()}
    for name, table in (("pandas", of_pandas), ("datasets", columns)):
        path = write(tmp_path / f"{name}.json", json.dumps(table, indent=indent).encode())
        assert rows_of(path) == ROWS
    tokens = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    turns = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    for name, row in (("tokens", tokens), ("turns", turns)):
        path = write(tmp_path / f"{name}.json", json.dumps(row).encode())
        assert rows_of(path) == [row], "one row whose values are lists"


def test_turns_stored_by_their_keys_are_a_conversation(tmp_path: Path) -> None:
    turns = {"from": ["human", "gpt"], "value": ["q", "a"], "weight": [None, 0.5]}
    path = write(tmp_path / "a.parquet", parquet_of(pyarrow.Table.from_pylist([{"conversations": turns}])))
    [row] = rows_of(path)
    example = understand(("", row), None)
    assert example.messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "train": 0.5},
    ]


@pytest.mark.parametrize(
    "listed",
    [
        ["is it?", "yes", "and now?", "no"],
        [{"human": "is it?", "assistant": "yes"}, {"human": "and now?", "assistant": "no"}],
        [{"input": "is it?", "output": "yes"}, {"input": "and now?", "output": "no"}],
    ],
)
def test_texts_and_pairs_are_refused_with_a_command_that_makes_turns_of_them(listed: list[Any], tmp_path: Path) -> None:
    path = write(tmp_path / "old.jsonl", json.dumps({"id": 1, "data": listed}).encode())
    with pytest.raises(DataError) as caught:
        understand(("", rows_of(path)[0]), None)
    command = re.search(r"`(jq .+?)` makes turns", caught.value.hint or "")
    assert command
    with pytest.raises(DataError, match=r"messages\[0\]"):
        understand(("", rows_of(path, columns={"messages": "data"})[0]), None)
    if not shutil.which("jq"):
        pytest.skip("jq is not installed")
    words = command[1].replace("OLD", str(path)).replace("NEW", str(tmp_path / "new"))
    subprocess.run(["bash", "-c", words], check=True)
    example = understand(("", rows_of(str(tmp_path / "new.jsonl"))[0]), None)
    assert [(turn["role"], turn["content"]) for turn in example.messages or []] == [
        ("user", "is it?"),
        ("assistant", "yes"),
        ("user", "and now?"),
        ("assistant", "no"),
    ]


THREAD = {
    "messages": "thread",
    "messages.role": "from",
    "messages.content": "body",
    "messages.role.user": "customer|visitor",
    "messages.role.assistant": "agent",
}


def test_a_conversation_is_read_under_other_names(tmp_path: Path) -> None:
    turns = [{"from": who, "at": 1, "body": f"by {who}"} for who in ("system", "customer", "agent", "visitor", "agent")]
    path = write(tmp_path / "a.jsonl", json.dumps({"id": 1, "from": "x", "thread": turns}).encode())
    [row] = rows_of(path, columns=THREAD)
    example = understand(("", row), "messages")
    assert [turn["role"] for turn in example.messages or []] == ["system", "user", "assistant", "user", "assistant"]
    assert [turn["content"] for turn in example.messages or []] == [turn["body"] for turn in turns]
    [question] = read_questions(path, [THREAD])
    assert question.reference == "by agent" and question.messages[-1] == {"role": "user", "content": "by visitor"}
    assert "lacks; its columns are" in refused(path, columns={"messages": "c.x"}).message
    with pytest.raises(DataError) as caught:
        recognise(rows_of(path)[0])
    names = ", ".join(f"{new}: {old}" for new, old in THREAD.items())
    assert f"columns: {{{names}}}" in (caught.value.hint or ""), "no format has such names"


@pytest.mark.parametrize(
    ("senders", "role"),
    [
        ((11, 12), "who"),
        ((True, False), "who"),
        (({"name": "Ann", "bot": False}, {"name": "Bob", "bot": True}), "who.name"),
        (({"id": 1}, {"id": 2}), "who.id"),
    ],
)
def test_roles_may_be_numbers_and_stand_within_a_key(senders: tuple[Any, Any], role: str, tmp_path: Path) -> None:
    turns = [{"who": who, "parts": [{"text": text}]} for who, text in zip(senders, "qa", strict=True)]
    path = write(tmp_path / "a.jsonl", json.dumps({"thread": turns}).encode())
    columns = {"messages": "thread", "messages.role": role, "messages.content": "parts"}
    with pytest.raises(DataError) as caught:
        understand(("", rows_of(path, columns={"messages": "thread"})[0]), None)
    assert f"messages.role: {role}, messages.content: parts" in (caught.value.hint or "")
    named = [str(next(iter(who.values())) if isinstance(who, dict) else who) for who in senders]
    columns |= {f"messages.role.{new}": old for new, old in zip(("user", "assistant"), named, strict=True)}
    [row] = rows_of(path, columns=columns)
    expected = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert understand(("", row), None).messages == expected


# ---- Folders


def test_a_saved_data_set_is_read_by_its_own_list(tmp_path: Path) -> None:
    import datasets

    saved = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    )
    saved.save_to_disk(str(tmp_path / "both"))
    saved["test"].save_to_disk(str(tmp_path / "one"))
    write(tmp_path / "one" / "stray.jsonl", b'{"prompt": "x"}\n')
    assert rows_of(tmp_path / "both", split="train") == ROWS
    assert rows_of(tmp_path / "one") == ROWS[:2]
    assert "several splits: `train` (1 file), `test` (1 file)" in refused(tmp_path / "both").message
    assert "there is no split `val`: `train` (1 file), `test`" in refused(tmp_path / "both", split="val").message
    assert "there is no split `test`: `train`" in refused(tmp_path / "one", split="test").message


def test_a_folder_yields_its_tables_or_else_its_documents_sorted_by_name(tmp_path: Path) -> None:
    write(tmp_path / "README.md", b"# about")
    write(tmp_path / ".cache" / "a.jsonl", LINES)
    write(tmp_path / "deep" / "b.txt", b"two")
    assert files_of(DataSource(path=str(tmp_path))) == [tmp_path / "README.md", tmp_path / "deep" / "b.txt"]
    write(tmp_path / "d.jsonl", b'{"prompt": "last"}\n')
    write(tmp_path / "a.jsonl.gz", gzip.compress(LINES))
    (tmp_path / "empty.json").mkdir()
    assert rows_of(tmp_path) == rows_of(tmp_path / "**" / "*.jsonl*") == [*ROWS, {"prompt": "last"}]
    left_out = LeftOut()
    list(read_source(DataSource(path=str(tmp_path)), skipped=left_out))
    assert left_out.places == {OTHER_FILE: [str(tmp_path / "README.md"), str(tmp_path / "deep" / "b.txt")]}, (
        "every skipped file is reported"
    )


def test_a_folder_names_links_and_what_programs_installed_and_does_not_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    own = write(folder / "README.md", b"ours")
    others = [
        write(folder / "node_modules" / "lib" / "README.md", b"theirs"),
        write(folder / "package.json", b'{"name": "x"}'),
        write(folder / "venv" / "site-packages" / "x" / "LICENSE.txt", b"theirs"),
    ]
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    left_out = LeftOut()
    assert [place for place, _ in read_source(DataSource(path=str(folder)), skipped=left_out)] == [str(own)]
    assert left_out.places == {OTHER_FILE: sorted([*map(str, others), str(folder / "link")])}
    (folder / "gone.md").symlink_to("nowhere.md")
    assert refused(folder).place == str(folder / "gone.md")


def test_slices_of_local_files_and_names_that_only_some_files_have_lead_to_what_works(tmp_path: Path) -> None:
    path = write(tmp_path / "data" / "train.jsonl", LINES)
    for place in (path, path.parent):
        assert "`rows: 500`" in (refused(place, split="train[:50%]").hint or "")
    write(tmp_path / "a.csv", b"frage,antwort\nq,a\n")
    write(tmp_path / "b.csv", b"question,answer\nq,a\n")
    error = refused(tmp_path / "*.csv", columns={"question": "frage", "answer": "antwort"})
    assert error.place == f"{tmp_path / 'b.csv'}:2" and "need their own source" in (error.hint or "")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", "prompt,completion\nq,a\n Prompt ,Completion\n", "the row repeats the header"),
        ("a.tsv", 'prompt\tcompletion\n"abc\tx1\ndef"\ty1\n', "a quote joins 2 lines that each have the columns"),
        ("a.csv", "prompt,completion\nFrage,Antwort\nq,a\n", "a second header"),
        ("a.csv", "prompt,completion\nstring,string\nq,a\n", "a second header"),
        ("a.csv", "FAQ of 2024\nprompt,completion\nq,a\n", "2 and not 1, separated by commas"),
    ],
)
def test_rows_of_sheets_that_are_no_rows_are_refused(name: str, content: str, problem: str, tmp_path: Path) -> None:
    assert problem in refused(write(tmp_path / name, content.encode())).message
    two_lines = write(tmp_path / "b.tsv", b'prompt\tcompletion\n"q\ny"\ta\n')
    assert rows_of(two_lines) == [{"prompt": "q\ny", "completion": "a"}]
    assert rows_of(write(tmp_path / "commas.tsv", b"prompt,completion\nq,a\n")) == [{"prompt": "q", "completion": "a"}]


def test_a_blank_line_between_rows_and_a_row_as_header_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.csv", b'prompt,completion\n"q\n1",a\n\nname,age\n\nBob,3\n\n')
    assert len(rows_of(path)) == 3
    note = "a blank line, and rows after it, which are read as the same table"
    assert capsys.readouterr().err == f"note: {path}:4: {note}\n"
    assert len(rows_of(write(tmp_path / "b.csv", b"How are you?,Fine.\nAnd you?,Good.\n"))) == 1
    assert f"{tmp_path / 'b.csv'}:1: `How are you?`, `Fine.` are taken as names" in capsys.readouterr().err


# ---- Columns, filter, rows


def test_columns_lead_into_columns_at_any_depth(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"meta": {"prompt": {"text": "q"}, "stars": 3}, "reply": {"best": "a"}}\n')
    columns = {"prompt": "meta.prompt.text", "completion": "reply.best"}
    (row,) = rows_of(path, columns=columns, filter="meta.stars > 2")
    assert (row["prompt"], row["completion"]) == ("q", "a")


def test_a_filter_accepts_either_name_and_counts_skipped_rows(tmp_path: Path) -> None:
    path, left_out = write(tmp_path / "a.jsonl", LINES), LeftOut()
    source = DataSource(path=str(path), columns={"question": "prompt"}, filter='question == "q3" or prompt == "q5"')
    assert [row["question"] for _, row in read_source(source, skipped=left_out) if not isinstance(row, DataError)] == [
        "q3",
        "q5",
    ]
    assert left_out.counts == {"not in the filter": len(ROWS) - 2}
    assert f"keeps none of the {len(ROWS)} rows" in refused(path, filter='prompt == "x"').message
    assert refused(path, filter="prompt ==").place == str(path)
    assert refused(path, filter="nothing == 1").place == f"{path}:1"


def test_a_value_that_a_filter_means_in_another_case_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "q", "completion": "a", "stage": stage} for stage in ("Draft", "draft", "final ", "else")]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    assert len(rows_of(path, filter='stage not in ["draft", "final"]')) == 3
    noted = capsys.readouterr().err
    assert f"note: {path}: for `filter`, `Draft` is another text than `draft`\n" in noted and "`final `" in noted
    assert len(rows_of(path, filter='stage in ["else", "Draft", "draft", "final "]')) == 4
    assert not capsys.readouterr().err


def test_rows_are_chosen_by_the_seed_in_their_order(tmp_path: Path) -> None:
    path, left_out = write(tmp_path / "a.jsonl", LINES), LeftOut()

    def chosen(count: int, seed: int) -> list[int]:
        rows = read_source(DataSource(path=str(path), rows=count), seed=seed, skipped=left_out)
        return [ROWS.index(dict(row)) for _, row in rows if not isinstance(row, DataError)]

    ten = chosen(10, 1)
    assert left_out.counts == {"not chosen by `rows`": len(ROWS) - 10}
    assert len(ten) == 10 and ten == sorted(ten) == chosen(10, 1)
    assert set(ten) < set(chosen(20, 1))
    assert ten != chosen(10, 2)
    assert chosen(1000, 1) == list(range(len(ROWS)))


@pytest.mark.parametrize("option", [{"streaming": True}, {"split": "train"}, {"config": "x"}, {"revision": "main"}])
def test_options_of_hub_datasets_are_refused_for_a_file(option: dict[str, Any], tmp_path: Path) -> None:
    assert "but only hub datasets" in refused(write(tmp_path / "a.jsonl", LINES), **option).message


# ---- Malformed files

WIDE = '{"question": "a", "answer": "b"}\n' * 3
OPEN_QUOTE = 'question,answer\n"x\ny",z\n{row}\nc,d\ne,f\n'
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
TWICE = "the key `question` appears more than once"


@pytest.mark.parametrize(
    ("content", "read"), [(b"caf\xe9 or \x93tea\x94\n", "café or “tea”"), (b"a \x81pump\n", "a pump")]
)
def test_the_command_that_converts_a_text_leaves_one_file_that_can_be_read(
    content: bytes, read: str, tmp_path: Path
) -> None:
    (tmp_path / "my text.txt").write_bytes(content)
    source = DataSource(path=str(tmp_path))
    with pytest.raises(DataError, match="is not UTF-8") as caught:
        raise next(row for _, row in read_source(source) if isinstance(row, DataError))
    command = re.findall("`(iconv.*?)`", caught.value.hint or "")[0]
    subprocess.run(["bash", "-c", command], check=False, capture_output=True)
    assert [row["text"] for _, row in read_source(source) if not isinstance(row, DataError)] == [read]


@pytest.mark.parametrize(
    ("name", "content", "place", "message", "hint"),
    [
        ("a.jsonl", b"[1]", ":1", "the row is a list", None),
        ("a.jsonl", b"null", ":1", "the row is empty", None),
        *[
            (
                f"a.{kind}",
                WIDE.encode(encoding),
                "",
                f"is {encoding}, and not UTF-8 text",
                f"convert it: `iconv -f {encoding} -t UTF-8 ",
            )
            for kind in ("jsonl", "json", "csv", "txt")
            for encoding in ("UTF-16", "UTF-32", "UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE")
        ],
        (
            "a.csv",
            b"question,answer\ncaf\xe9,b\n",
            ":2",
            "is not UTF-8 text: byte 4 of the line",
            "convert it: `iconv -f WINDOWS-1252 -t UTF-8 ",
        ),
        ("README", b"text", "", "a file whose name has no ending", "plain text is `.txt`"),
        ("ls.1.gz", b"text", "", "files ending in `.1`", "plain text is `.txt`"),
        (
            "a.csv",
            OPEN_QUOTE.format(row='"a,b').encode(),
            ":4",
            "a quote is opened in the row that begins here, and never closed",
            None,
        ),
        (
            "a.csv",
            OPEN_QUOTE.format(row='a,"b').encode(),
            ":4",
            "a quote is opened in the row that begins here, and never closed",
            None,
        ),
        ("a.json", b'{"a": 1}\n{"question": "a", "question": "c"}\n', ":2", TWICE, '"question": "c"'),
        ("a.json", b'{"a": 1}\n{"m": [{"question": "a", "question": "c"}]}\n', ":2", TWICE, '"question": "c"'),
        ("a.json", b'[{"a": 1},\n{"question": "a", "question": "c"}]', "", TWICE, '"question": "c"'),
        (
            "a.csv",
            b"question,answer\n1,2\n\xef\xbb\xbfquestion,answer\n3,4\n",
            ":3",
            "the row repeats the header",
            "DATA_BAD_ROWS=drop",
        ),
        (
            "a.csv",
            b"question,answer\n1,2\nquestion,answer\n3,4\n",
            ":3",
            "the row repeats the header",
            "DATA_BAD_ROWS=drop",
        ),
        ("a.csv", b"sep=;\nquestion;answer\na;b\n", ":1", "`sep=` is no header", "remove this line"),
        ("a.csv", b"question,answer,,\na,b,,\n", ":1", "columns have no names", "remove the empty columns"),
        ("a.jsonl", b'{\n "a": 1\n}\n{\n "a": 2\n}\n', "", "its rows take several lines each", "jq -c . "),
        ("a.json", b'{"train": [{"a": 1}], "test": [{"a": 1}]}', "", "is neither a list", "jq -c '.train[]'"),
        *[
            (f"a.{kind}", LFS, "", "only says where Git LFS keeps the file", "git lfs pull")
            for kind in ("jsonl", "csv", "parquet", "arrow", "txt", "pdf")
        ],
        ("a.jsonl", b"\x1f\x8b\x08...", "", "is compressed by gzip", "give it the ending `.gz`"),
        ("a.csv", b"BZh91AY...", "", "is compressed by bzip2", "give it the ending `.bz2`"),
        ("a.csv", b"\xd0\xcf\x11\xe0...", "", "is a file of Microsoft Office", "save it as CSV"),
        (
            "a.jsonl",
            b"<!DOCTYPE html>\n<title>Sign in</title>",
            "",
            "is HTML, in place of data most likely a page",
            "in a browser",
        ),
        ("a.csv", b"# made by bob\nquestion,answer\na,b\n", ":1", "`# made by bob` is no header", "remove this line"),
        ("a.json", b'{"test": [{"a": 1}], "n": 1}', "", "has its rows under `test`", "jq -c '.test[]'"),
        ("a.json", b'{"rejected": [{"a": 1}]}', "", "has its rows under `rejected`", "jq -c '.rejected[]'"),
        ("a.csv", b"PK\x03\x04...", "", "is a zip archive", "unpack it"),
    ],
)
def test_a_malformed_file_is_one_error(
    name: str, content: bytes, place: str, message: str, hint: str | None, tmp_path: Path
) -> None:
    path, errors = write(tmp_path / name, content), list[DataError]()
    try:
        errors += [row for _, row in read_file(path) if isinstance(row, DataError)]
    except DataError as error:
        errors.append(error)
    (error,) = errors
    assert error.place == f"{path}{place}" and error.message.startswith(message) and (hint or "") in (error.hint or "")


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_json_list_is_read_from_a_file_named_jsonl(indent: int | None, ending: str, tmp_path: Path) -> None:
    content = b"\n" + json.dumps(ROWS, indent=indent).encode()
    assert rows_of(write(tmp_path / f"a.jsonl{ending}", PACK[ending](content))) == ROWS
    lists = write(tmp_path / "lists.jsonl", b'[{"a": "b"}]\n[{"a": "b"}]\n')
    assert "the row is a list; expected an object" in refused(lists).message


@pytest.mark.parametrize(
    ("name", "form"),
    [("a.json", "[%s, %s]"), ("a.jsonl", "%s\n%s\n"), ("b.json", '{"messages": %s,\n "id": 1}')],
)
def test_turns_without_a_column_are_a_conversation_and_so_is_one_object(name: str, form: str, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = rows_of(write(tmp_path / name, (form % ((json.dumps(turns),) * form.count("%s"))).encode()))
    assert [row["messages"] for row in rows] == [turns] * form.count("%s")
    listed = write(tmp_path / "d.json", b'{"conversations": [{"id": 1}],\n "id": 1}')
    assert "neither a list of rows" in refused(listed).message, "a list of conversations"


def test_marks_where_files_were_joined_are_not_part_of_a_row(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    assert rows_of(write(tmp_path / "a.jsonl", mark + LINES + mark + LINES + mark)) == [*ROWS, *ROWS]
    assert rows_of(write(tmp_path / "a.json", mark + LINES + mark + LINES)) == [*ROWS, *ROWS]
    assert rows_of(write(tmp_path / "a.csv", b"a,b\n1,2\n" + mark + b"3,4\n")) == [
        {"a": "1", "b": "2"},
        {"a": "3", "b": "4"},
    ]


def test_a_folder_without_data_says_how_plain_text_is_named(tmp_path: Path) -> None:
    write(tmp_path / "README", b"text")
    assert "it contains `README`; plain text is read from files" in (refused(tmp_path).hint or "")


@pytest.mark.parametrize(
    ("name", "mark"), [("a.csv", ";"), ("a.csv", "\t"), ("a.csv", "|"), ("a.tsv", "\t"), ("a.csv.gz", ";")]
)
def test_the_header_decides_the_separator_of_columns(name: str, mark: str, tmp_path: Path) -> None:
    content = f'question{mark}answer\n1,5{mark}"b{mark}c"\n'.encode()
    path = write(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    assert rows_of(path) == [{"question": "1,5", "answer": f"b{mark}c"}]


def test_blanks_before_quotes_and_rules_below_headers_are_no_values(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('question,answer\n--------,------\nq, "a"\nq,"a, b"\nq, a "b"\n')
    errors = {
        place: row.message for place, row in read_source(DataSource(path=str(path))) if isinstance(row, DataError)
    }
    assert list(errors) == [f"{path}:2", f"{path}:3"]
    assert "is a rule" in errors[f"{path}:2"] and "`answer` begins with a blank before its quote" in errors[f"{path}:3"]


def test_what_an_export_says_once_for_all_rows_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rows = tmp_path / "a.json", [{"question": "q", "answer": "a"}]
    for name in ("system", "system_prompt", "tools", "text"):
        path.write_text(json.dumps({name: "x", "rows": rows}))
        with pytest.raises(DataError) as caught:
            list(read_source(DataSource(path=str(path))))
        assert f"has `{name}` next to the rows of `rows`" in caught.value.message
    path.write_text(json.dumps({"system": None, "version": 2, "rows": rows}))
    assert [row for _, row in read_source(DataSource(path=str(path)))] == rows
    assert "next to the rows of `rows`, and not read: `system` None, `version` 2\n" in capsys.readouterr().err


def test_rows_chosen_by_an_old_datasets_and_words_lock_files_are_noticed(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"question": "q", "answer": "a"}]).save_to_disk(str(tmp_path / "saved"))
    state = tmp_path / "saved" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(DataError, match="lists the rows that were chosen"):
        list(read_source(DataSource(path=str(tmp_path / "saved"))))
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("words")
    (folder / "~$a.docx").write_bytes(b"\x05user")
    assert [row for _, row in read_source(DataSource(path=str(folder)))] == [
        {"text": "words", "path": str(folder / "a.txt"), "title": None}
    ]
