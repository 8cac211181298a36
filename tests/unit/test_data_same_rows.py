"""The same rows give the same tokens and mask from every kind of file, and what Arrow keeps is what its writer put
in.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import feather, ipc, parquet

from sft_play.config.schema import Config, DataSource, ModelConfig
from sft_play.data.formats import understand
from sft_play.data.sources import read_source
from sft_play.data.tokens import Encoder
from sft_play.data.tools import FILLED
from sft_play.errors import DataError
from tests.chat_tokenizers import load_with, save_tokenizer

pytestmark = pytest.mark.slow
Row = dict[str, Any]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = save_tokenizer(
        tmp_path_factory.mktemp("same") / "t", "llama3", special=["<|im_start|>", "<|im_end|>"], bos="<s>", eos="</s>"
    )
    return Encoder(Config(model=ModelConfig(name="tiny", max_seq_len=1 << 20)), load_with(folder, "qwen3"))


def encoded(path: Path, encoder: Encoder, form: str | None = None) -> list[Any]:
    """Return for each row its tokens and labels, or why it is refused."""
    rows_of_tokens: list[Any] = []
    for _, row in read_source(DataSource(path=str(path))):
        try:
            example = understand(("here", row), form)
            (outcome,) = encoder.encode([example])
            if outcome.error:
                raise outcome.error
            rows_of_tokens.append([(list(encoding.input_ids), list(encoding.labels)) for encoding in outcome.rows])
        except DataError as error:
            rows_of_tokens.append((error.message, error.hint))
    return rows_of_tokens


def write_all(folder: Path, rows: list[Row]) -> list[Path]:
    """Write rows as every kind of file, the tables as `datasets` and pyarrow do."""
    import datasets

    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    contents = {
        "a.jsonl": lines,
        "a.json": json.dumps(rows, indent=1).encode(),
        "list.jsonl": json.dumps(rows).encode(),
    }
    contents |= {"a.jsonl.gz": gzip.compress(lines), "a.jsonl.zst": pyarrow.compress(lines, "zstd", asbytes=True)}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    dataset = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    dataset.to_parquet(str(folder / "a.parquet"))
    dataset.save_to_disk(str(folder / "saved"))
    table = dataset.data.table
    parquet.write_table(table, folder / "b.parquet", compression="zstd", store_schema=False)
    feather.write_feather(table, folder / "a.feather")
    with ipc.new_stream(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    names = ["a.parquet", "b.parquet", "saved", "a.feather", "a.arrow"]
    return [folder / name for name in (*contents, *names)]


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
words = texts.map(lambda text: f"w{text}w")
scalars = st.one_of(words, st.integers(-(2**40), 2**40), st.booleans())


@st.composite
def arguments(draw: st.DrawFn) -> Row:
    """Return keys in the order of a struct, without nulls, which a struct also has for missing keys."""
    value = {"a": scalars, "b": st.lists(words, max_size=2), "c": st.fixed_dictionaries({"d": scalars})}
    return {key: draw(value[key]) for key in "abc"[: draw(st.integers(1, 3))]}


@st.composite
def conversation(draw: st.DrawFn) -> Row:
    turns: list[Row] = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        content = draw(words)
        turns.append(
            {"role": "user", "content": [{"type": "text", "text": content}] if draw(st.booleans()) else content}
        )
        if draw(st.booleans()):
            call = {"type": "function", "function": {"name": "add", "arguments": draw(arguments())}}
            turns.append({"role": "assistant", "content": draw(texts), "tool_calls": [call]})
            turns.append({"role": "tool", "content": draw(words)})
        answer: Row = {"role": "assistant", "content": draw(words)}
        if draw(st.booleans()):
            answer["train"] = draw(st.booleans())
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(words)
        turns.append(answer)
    properties = {key: {"type": "string"} for key in "abc"[: draw(st.integers(1, 3))]}
    described = {"name": "add", "parameters": {"type": "object", "properties": properties}}
    return {"messages": turns, "tools": [{"type": "function", "function": described}]}


FORMATS: dict[str, st.SearchStrategy[Row]] = {
    "messages": conversation(),
    "prompt_completion": st.fixed_dictionaries({"prompt": words, "completion": st.one_of(words, st.integers(-9, 9))}),
    # Not any text: beside a number, `datasets` writes the text "0" without quotes, which is then a number too.
    "instruction": st.fixed_dictionaries(
        {
            "instruction": words,
            "input": st.one_of(st.sampled_from(["", " "]), words, st.none(), st.just(0)),
            "output": words,
        }
    ),
    "question_answer": st.fixed_dictionaries({"question": words, "answer": st.one_of(words, st.just([]), st.none())}),
    "tokens": st.fixed_dictionaries(
        {
            "input_ids": st.lists(st.integers(5, 90), min_size=4, max_size=4),
            "completion_mask": st.lists(st.integers(0, 1), min_size=4, max_size=4),
        }
    ),
}


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_each_kind_of_file_gives_the_same_tokens_and_mask(
    form: str, data: st.DataObject, encoder: Encoder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    first, *others = write_all(folder, data.draw(st.lists(FORMATS[form], min_size=1, max_size=3)))
    expected = encoded(first, encoder, form)
    for path in others:
        assert encoded(path, encoder, form) == expected, path.name


MIXED: dict[str, list[Row]] = {
    "answers": [{"prompt": "2+2?", "completion": 4}, {"prompt": "capital of Norway?", "completion": "Oslo"}],
    "contents": [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            ]
        }
    ],
    "arguments": [
        {
            "messages": [
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
                },
            ],
            "tools": [{"name": "f", "parameters": {"properties": arguments}}],
        }
        for arguments in ({"x": {"type": "string"}, "y": None}, {"x": [1]}, {"z": "text"})
    ],
}


@pytest.mark.parametrize("name", MIXED)
def test_columns_of_mixed_types_keep_the_values_given_to_datasets(name: str, encoder: Encoder, tmp_path: Path) -> None:
    """As `load_dataset("json")` types them; nulls in them are real."""
    import datasets

    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in MIXED[name]), encoding="utf-8")
    loaded = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(tmp_path / "cache"))
    loaded.to_parquet(str(tmp_path / "a.parquet"))
    loaded.save_to_disk(str(tmp_path / "saved"))
    expected = encoded(source, encoder)
    assert encoded(tmp_path / "a.parquet", encoder) == encoded(tmp_path / "saved", encoder) == expected
    assert name == "arguments" or any(not isinstance(row, list) for row in expected) == (name == "answers")


def test_maps_dictionaries_and_nulls_are_read_at_any_depth(tmp_path: Path) -> None:
    extension = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(['{"n": null}', None]))
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 2, 2], pyarrow.int32()), extension)
    structs = pyarrow.StructArray.from_arrays([pyarrow.array([None, 3]), lists], ["v", "w"])
    table = pyarrow.table(
        {
            "map": pyarrow.MapArray.from_arrays([0, 2, 2, 2], ["k", "l"], structs),
            "nulls": pyarrow.array([[("k", None)], None, []], pyarrow.map_(pyarrow.string(), pyarrow.int8())),
            "mixed": pyarrow.array([[None, {"a": None, "b": 1}], [{"a": 2, "b": None}], []]),
            "kind": pyarrow.array(["x", "y", "x"]).dictionary_encode(),
        }
    )
    expected = [
        {
            "map": {"k": {"w": [{"n": None}, None]}, "l": {"v": 3, "w": []}},
            "nulls": {"k": None},
            "mixed": [None, {"b": 1}],
            "kind": "x",
        },
        {"map": {}, "nulls": None, "mixed": [{"a": 2}], "kind": "y"},
        {"map": {}, "nulls": {}, "mixed": [], "kind": "x"},
    ]
    parquet.write_table(table, tmp_path / "a.parquet")
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        assert [row for _, row in read_source(DataSource(path=str(tmp_path / name)))] == expected
    twice = pyarrow.table(
        {"map": pyarrow.array([[("k", 1), ("k", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int8()))}
    )
    parquet.write_table(twice, tmp_path / "twice.parquet")
    ((place, error),) = read_source(DataSource(path=str(tmp_path / "twice.parquet")))
    assert isinstance(error, DataError) and "`map` the key `k` appears more than once" in error.message
    assert place.endswith("twice.parquet, row 1")


def test_nulls_that_look_like_missing_keys_are_reported(tmp_path: Path) -> None:
    def row(arguments: Row) -> Row:
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return {"messages": [{"role": "user", "content": "q"}, call], "tools": [{"name": "f"}]}

    for name, rows, expected in (
        ("same", [{"a": 1}, {"a": 2}], [False, False]),
        ("other", [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}], [True, True, False]),
    ):
        parquet.write_table(pyarrow.Table.from_pylist(list(map(row, rows))), tmp_path / f"{name}.parquet")
        examples = [
            understand(placed, None) for placed in read_source(DataSource(path=str(tmp_path / f"{name}.parquet")))
        ]
        assert [FILLED in example.doubts for example in examples] == expected
        assert [
            example.messages[1]["tool_calls"][0]["function"]["arguments"] for example in examples if example.messages
        ] == rows


def reading(path: Path) -> int:
    """Return by how many MiB the memory of a process grows that reads a file."""
    code = f"""
import resource, pyarrow.parquet
from pathlib import Path
from sft_play.data.readers import read_file
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak(); print(sum(1 for _ in read_file(Path({str(path)!r}))), (peak() - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    rows, grown = map(int, done.stdout.split())
    assert rows == 600
    return grown


@pytest.mark.parametrize("way", ["dictionary", "prefixes", "nested", "arrow"])
@pytest.mark.broad_but("nested")
def test_a_text_that_many_rows_share_is_in_memory_a_few_times_at_most(way: str, tmp_path: Path) -> None:
    text, path = "x" * (4 << 20), tmp_path / ("a.arrow" if way == "arrow" else "a.parquet")
    shared = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 600, pyarrow.int32()), pyarrow.array([text]))
    if way == "prefixes":
        table = pyarrow.table({"text": pyarrow.array([text] * 400 + ["y"] * 200, pyarrow.large_string())})
        options: Any = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    else:
        turns = pyarrow.StructArray.from_arrays([pyarrow.array(["user"] * 600), shared], ["role", "content"])
        several = pyarrow.ListArray.from_arrays(pyarrow.array(range(601), pyarrow.int32()), turns)
        table, options = pyarrow.table({"messages": several} if way == "nested" else {"text": shared}), {}
    if way == "arrow":
        with ipc.new_file(path, table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
    else:
        parquet.write_table(table, path, compression="zstd", **options)
    del table, shared
    assert path.stat().st_size < 1 << 20 and reading(path) < 500


def test_a_duplicate_key_is_found_in_linear_time(tmp_path: Path) -> None:
    """Compare with the plain reader's time, measured in the same test: a busy machine slows both."""
    path, keys = tmp_path / "a.jsonl", ", ".join(f'"k{number}": 0' for number in range(60_000))
    path.write_text("".join(f'{{{keys}, "k59999": 1}}\n' for _ in range(5)), encoding="utf-8")
    begun = time.process_time()
    for line in path.read_text(encoding="utf-8").splitlines():
        json.loads(line, object_pairs_hook=dict)
    plain, begun = time.process_time() - begun, time.process_time()
    rows = [row for _, row in read_source(DataSource(path=str(path)))]
    assert time.process_time() - begun < 20 * plain
    assert (
        all(isinstance(row, DataError) and "`k59999` appears more than once" in row.message for row in rows)
        and len(rows) == 5
    )


@pytest.mark.parametrize("limit", [1 << 20, 64])
def test_batches_reach_over_row_groups_and_dictionaries_that_end(limit: int, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "a"}]}
        for number in range(3000)
    ]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(
        table, tmp_path / "a.parquet", row_group_size=700, dictionary_pagesize_limit=limit, data_page_size=512
    )
    assert [row for _, row in read_source(DataSource(path=str(tmp_path / "a.parquet")))] == rows
