"""Reads the rows of one file by its ending, row by row and in bounded memory; only a `.json` list and a document are
loaded completely.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from sft_play.config.reader import kind_of, names_of
from sft_play.data.documents import DOCUMENTS, read_document
from sft_play.data.streams import COMPRESSED, kind, open_bytes, refuse_other_kind, refuse_wide, report_damage, utf8
from sft_play.errors import DataError
from sft_play.text import tell

Placed = tuple[str, Mapping[str, Any] | DataError]
"""A row and where it stands: `file:line`, or `file, row n`. A line that is no row is its error, so that later ones are
read too.
"""

TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
TABLES = (*TEXTS, ".parquet", ".pq", ".arrow", ".feather")
SHOWN_CHARACTERS, SHOWN_COLUMNS = 60, 8
"""Of a row in a message."""
MARK_BYTES = 32
HEADER_BYTES = 1 << 16
BOM = "\ufeff".encode()
QUOTES = "a value that contains the separator, a line end or a quote is quoted, and a quote in it is written twice"
RULES = ({"-"}, {"-", "+"}, {"="})
"""What database clients draw below a header."""
SECOND_HEADER = re.compile(
    r"(?:question|answer|prompt|completion|instruction|(?:in|out)put|response|text|label|id|frage|antwort|pregunta"
    r"|respuesta|réponse|domanda|risposta|pergunta|resposta|вопрос|ответ|问题|回答|答案|質問)(?:[ _]?(?:text|id))?"
    r"|string|str|int(?:eger)?|float|bool(?:ean)?|varchar|object|\{\"ImportId\".*",
    re.IGNORECASE,
)
"""What a second header contains: names in another language, types of columns, the ids of a survey."""
LIKE_A_VALUE = re.compile(r"\s\S+[.!?]\s*\Z|.{40}")
"""A name of a column that may be a value: in a table without a header."""
AS_TEXT = re.compile(r'\A="([^"]*)"\Z')
"""How spreadsheets export a cell that they must not take for a number."""
BLANK_QUOTE = re.compile(r'[ \t]+"[^"]*"\s*$')
OF_A_ROW = ("messages", "conversations", "prompt", "completion", "tools")
"""Lists of objects that one row has."""
OF_ALL_ROWS = ("system", "system_prompt", "system_message", "tools", "text", "messages", "conversations")
"""What an export may say once that belongs to all of its rows, or is the text that they are cut from."""
ASIDE = re.compile(
    r"reject\w*|refused|bad|wrong|incorrect|discard\w*|fail\w*|errors?|invalid|deleted|raw|old|backup|archive|drafts?"
    r"|unreviewed|predict\w*",
    re.IGNORECASE,
)
"""Whole names of files, folders and lists of rows that their author has put aside."""
OF_ANOTHER_SPLIT = re.compile("(?:test|eval(?:uation)?|val(?:id(?:ation)?)?|dev)(?:_set|_data)?", re.IGNORECASE)
LEAVE_OUT = "`DATA_BAD_ROWS=drop` skips such rows and counts them"
MARKS = {"\t": "tabs", ",": "commas"}
ENDINGS = "json, jsonl, csv, tsv, parquet, arrow, feather, txt, md, html, docx or pdf"


def read_file(path: Path, skip: Callable[[str, str], None] = lambda *_: None) -> Iterator[Placed]:
    """Yield the rows of one file. Raise `DataError` for a table; a document that cannot be read is one bad row.

    Tell `skip` the reason and the place of a document without text.
    """
    ending = kind(path)
    if ending not in TABLES and ending not in DOCUMENTS:
        raise DataError(
            f"files ending in `{ending}` are not read" if ending else "a file whose name has no ending is not read",
            place=str(path),
            hint="plain text is `.txt`, and sheets and databases can be saved as `.csv`; all that is read:"
            f" {', '.join((*TABLES, *DOCUMENTS))}; each may be compressed ({', '.join(COMPRESSED)})",
        )
    try:
        yield from _rows_of(path, ending, skip)
    except DataError as error:
        if ending in TABLES:
            raise
        yield error.place or str(path), error


def _rows_of(path: Path, ending: str, skip: Callable[[str, str], None]) -> Iterator[Placed]:
    with report_damage(path):
        with open_bytes(path) as stream:
            start = stream.read(MARK_BYTES)
        refuse_other_kind(start, ending, str(path))
        if ending in TEXTS:
            refuse_wide(start[:4], str(path))
        try:
            yield from READERS[ending](path) if ending in TABLES else _read_document(path, skip)
        except UnicodeDecodeError:  # a decoder that reads in pieces does not know the line
            if ending not in TEXTS:
                raise
            with open_bytes(path) as stream:
                for number, line in enumerate(stream, 1):
                    utf8(line, f"{path}:{number}")
            raise


def _read_jsonl(path: Path) -> Iterator[Placed]:
    first, second = _first_lines(path)
    if (
        first.startswith(b"[") and first[1:].lstrip()[:1] in (b"", b"{") and not second.startswith(b"[")
    ):  # one list, in spite of its name
        yield from _read_json(path)
        return
    if first == b"{":
        raise DataError(
            "its rows take several lines each", place=str(path), hint="`jq -c . OLD > NEW` writes a row a line"
        )
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, 1):
            if not line.removeprefix(BOM).strip():
                continue
            place = f"{path}:{number}"
            try:
                text = utf8(line.rstrip(b"\r\n"), place).removeprefix("\ufeff")  # also where files were joined
                yield _object(_parse(text, path, number), place)
            except DataError as error:
                yield place, error


def _first_lines(path: Path) -> tuple[bytes, bytes]:
    """Return the first two lines of a file that are not blank, without white space around them."""
    with open_bytes(path) as stream:
        lines = (line.removeprefix(BOM).strip() for line in stream)
        first, second = [*islice((line for line in lines if line), 2), b"", b""][:2]
    return first, second


def _read_json(path: Path) -> Iterator[Placed]:
    first, second = _first_lines(path)
    if not first:
        return
    if first[:1] + first[-1:] == b"{}":
        document = None if second else _parse(utf8(first, str(path)), path, 1)
        if document is None or not (_rows_in(document) or _from_columns(document) is not document):  # JSON lines
            yield from _read_jsonl(path)
            return
    with open_bytes(path) as stream:
        rows = _parse(stream.read().decode("utf-8-sig"), path, 1)
    name = "row"
    if (
        isinstance(rows, dict) and len(lists := _rows_in(rows)) == 1
    ):  # an export: its rows, next to what else is said of them
        if beside := next((key for key in OF_ALL_ROWS if rows.get(key) and key != lists[0]), None):
            raise DataError(
                f"has `{beside}` next to the rows of `{lists[0]}`, and it is not read",
                place=str(path),
                hint=f"write it into each row, or keep the rows alone: `jq -c '.{lists[0]}[]' OLD > NEW.jsonl`",
            )
        if OF_ANOTHER_SPLIT.fullmatch(lists[0]) or ASIDE.fullmatch(lists[0]):
            raise DataError(
                f"has its rows under `{lists[0]}`, which are used only if you name them",
                place=str(path),
                hint=f"`jq -c '.{lists[0]}[]' OLD > NEW.jsonl` writes them, if they are meant",
            )
        if beside := ", ".join(
            f"`{key}` {str(value)[:SHOWN_CHARACTERS]}" for key, value in rows.items() if key != lists[0]
        ):
            tell(f"note: {path}: next to the rows of `{lists[0]}`, and not read: {beside}")
        name, rows = f"row of `{lists[0]}`", rows[lists[0]]
    if isinstance(rows, dict) and any(_are_turns(rows.get(key)) for key in OF_A_ROW):
        rows = [rows]
    rows = _from_columns(rows)
    if not isinstance(rows, list):
        columns = f"; it has {names_of(rows)}" if isinstance(rows, dict) else ""
        lists = [name for name, value in rows.items() if isinstance(value, list)] if isinstance(rows, dict) else []
        raise DataError(
            f"is neither a list of rows, nor an object with one, nor one JSON object a line{columns}",
            place=str(path),
            hint="; ".join(f"`jq -c '.{name}[]' OLD > NEW.jsonl` writes the rows of `{name}`" for name in lists[:3])
            or None,
        )
    for index, row in enumerate(rows):
        yield _object(row, f"{path}, {name} {index + 1}")


def _from_columns(table: Any) -> Any:
    """Return the rows of an object that holds a table by its columns, as pandas (`to_json`) and `datasets` (`to_dict`)
    write it: `{"a": {"0": 1, "1": 2}}` or `{"a": [1, 2], "b": [3, 4]}`; anything else as it is.
    """
    columns = [*table.values()] if isinstance(table, dict) else []
    numbered = all(isinstance(column, dict) and column and all(map(str.isdecimal, column)) for column in columns)
    if columns and numbered and len({*map(tuple, columns)}) == 1:
        columns = [[*column.values()] for column in columns]
    elif len(columns) < 2 or not all(isinstance(column, list) and column for column in columns):
        return table
    elif any(isinstance(column[0], (dict, list)) for column in columns) or len({*map(len, columns)}) > 1:
        return table  # one row with lists
    elif not any(isinstance(column[0], str) for column in columns):
        return table  # one row of tokens
    return [dict(zip(table, row, strict=True)) for row in zip(*columns, strict=True)]


def _rows_in(document: Any) -> list[str]:
    """Return the names of an object's lists of objects that are not turns."""
    return [
        name
        for name, value in document.items()
        if name not in OF_A_ROW and isinstance(value, list) and value and isinstance(value[0], dict)
    ]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raise `DataError` for a duplicate key, since one of its values would be lost."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise DataError(
            f"the key `{twice}` appears more than once", hint=f"only the last would be read: {show_row(unique)}"
        )
    return unique


DECODER = json.JSONDecoder(object_pairs_hook=_once)


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return DECODER.decode(text)
    except DataError as error:  # a duplicate key
        error.place = f"{path}:{line}" if "\n" not in text else str(path)
        raise
    except json.JSONDecodeError as error:
        raise DataError(
            f"is not JSON: {error.msg}",
            place=f"{path}:{line + error.lineno - 1}:{error.colno}",
            hint=f"the line reads: {' '.join(text[:200].split())[:100]}",
        ) from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of more digits than Python converts
        raise DataError(f"is not JSON that can be read: {str(error).split(';')[0]}", place=f"{path}:{line}") from None


def parse_json(text: str, name: str = "") -> Any:
    """Return a string parsed as JSON. Raise `DataError` with the `name` of what contains it."""
    begins = f"`{name}` " if name else ""
    try:
        return DECODER.decode(text.strip())
    except DataError as error:  # a duplicate key
        raise DataError(f"{begins}is JSON in which {error.message}", hint=error.hint) from None
    except json.JSONDecodeError as error:
        python = "it looks like Python's own notation: write it with `json.dumps`" if "'" in text[:3] else None
        raise DataError(
            f"{begins}is text that is not JSON: {error.msg} at character {error.pos + 1}", hint=python
        ) from None
    except (RecursionError, ValueError):
        raise DataError(f"{begins}is JSON nested too deeply") from None


def show_row(row: Mapping[str, Any]) -> str:
    """Return a row as JSON with long values cut, for messages."""
    values = {
        name: value if len(text := str(value)) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
        for name, value in islice(row.items(), SHOWN_COLUMNS)
    }
    return json.dumps(values, ensure_ascii=False, default=str)


def _are_turns(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and any(key in first for key in ("role", "from", "author", "sender", "speaker"))


def _object(row: Any, place: str) -> Placed:
    if _are_turns(row):  # without a column
        row = {"messages": row}
    if not isinstance(row, dict):
        return place, DataError(f"the row is {kind_of(row)}; expected an object with named columns", place=place)
    return place, row


def _read_csv(path: Path) -> Iterator[Placed]:
    csv.field_size_limit(2**31 - 1)
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as stream:
        # Strict: else a quote that is never closed takes in all that follows.
        mark, _ = csv_marks(path)
        reader = csv.DictReader(stream, strict=True, delimiter=mark)
        last = 0
        try:
            header = reader.fieldnames or []
            place = f"{path}:{reader.line_num}"
            if header and (header[0].lower().startswith("sep=") or (header[0].startswith("#") and len(header) == 1)):
                raise DataError(f"`{header[0][:SHOWN_CHARACTERS]}` is no header", place=place, hint="remove this line")
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                unnamed = "remove the empty columns; names of columns stand in the first line"
                problem = f"the header contains `{twice[0]}` more than once" if twice[0] else "columns have no names"
                raise DataError(problem, place=place, hint=None if twice[0] else unnamed)
            if any(map(LIKE_A_VALUE.search, header)):
                tell(
                    f"note: {place}: {names_of(header)} are taken as names; if they are a row, write a header above it"
                )
            last, blank_lines = reader.line_num, False
            for row in reader:
                before, last = last, reader.line_num
                if header and isinstance(first := row[header[0]], str) and first.startswith("\ufeff"):
                    row[header[0]] = first.removeprefix("\ufeff")
                if wrong := _problem_of(row, header, mark):
                    place = f"{path}:{last}"
                    yield place, DataError(wrong[0], place=place, hint=wrong[1])
                    continue
                text = "|".join(row.values())  # a quoted value may span lines; the row is looked for where it begins
                begins = last - (text.count("\r") + text.count("\n") - text.count("\r\n"))
                if begins > before + 1 and not blank_lines:
                    blank_lines = True
                    tell(
                        f"note: {path}:{before + 1}: a blank line, and rows after it, which are read as the same table"
                    )
                yield f"{path}:{begins}", {name: AS_TEXT.sub(r"\1", value) for name, value in row.items()}
        except csv.Error as error:
            if "unexpected end" in str(error):
                problem = "a quote is opened in the row that begins here, and never closed"
                raise DataError(problem, place=f"{path}:{last + 1}", hint=QUOTES) from None
            place = f"{path}:{reader.line_num + 1}"  # only lines that were read to their end are counted
            raise DataError(f"is not CSV: {error}", place=place, hint=QUOTES) from None


def _problem_of(row: Mapping[Any, Any], header: Sequence[str], mark: str) -> tuple[str, str] | None:
    """Return what is wrong with a row of a CSV file, and a hint; surplus values are a list under `None`, missing ones
    are `None`.
    """
    if None in row or None in row.values():
        have = len(row.get(None) or ()) + sum(value is not None for name, value in row.items() if name is not None)
        by = MARKS.get(mark, f"`{mark}`")
        return (
            f"the row has another number of columns than the header: {have} and not {len(header)}, separated by {by}",
            f"the header reads {names_of(header)}; {QUOTES}",
        )
    if all(value.strip().casefold() == name.strip().casefold() for name, value in row.items()):
        return "the row repeats the header: two files were joined", LEAVE_OUT
    if len(header) > 1 and all(SECOND_HEADER.fullmatch(value.strip()) for value in row.values()):
        return "the row is a second header, and no values", LEAVE_OUT
    if (blank := next((name for name in header if BLANK_QUOTE.match(row[name])), None)) is not None:
        return (
            f"`{blank}` begins with a blank before its quote, so the quotes would be part of the text",
            "remove the blank",
        )
    if set("".join(row.values())) in RULES:
        return "the row is a rule below the header, and no values", LEAVE_OUT
    lines = mark.join(row.values()).split("\n") if mark == "\t" else []
    if len(lines) > 1 and all(line.count(mark) == len(header) - 1 for line in lines):
        return f"a quote joins {len(lines)} lines that each have the columns of a row", QUOTES
    return None


def csv_marks(path: Path) -> tuple[str, str]:
    """Return what separates the columns, and the byte-order mark or nothing.

    They are separated by the first mark that gives the header several and the row after it as many, else by a comma, or
    a tab in a `.tsv`.
    """
    marks = "\t,;|" if kind(path) == ".tsv" else ",;\t|"
    with open_bytes(path) as stream:
        text = stream.read(HEADER_BYTES).decode("utf-8", "replace")
    beginning, widths = text.removeprefix("\ufeff"), {}
    for mark in marks:
        rows = list(islice((row for row in csv.reader(io.StringIO(beginning, newline=""), delimiter=mark) if row), 2))
        widths[mark] = [len(row) for row in rows]
    several = [mark for mark, columns in widths.items() if columns and columns[0] > 1]
    mark = next((mark for mark in several if len(set(widths[mark])) == 1), several[0] if several else marks[0])
    return mark, text[: len(text) - len(beginning)]


def _read_document(path: Path, skip: Callable[[str, str], None]) -> Iterator[Placed]:
    with open_bytes(path) as stream:
        document = read_document(stream.read(), kind(path), str(path))
    if isinstance(document, str):
        skip(document, str(path))
    else:
        if document.note:
            tell(f"note: {path}: {document.note}")
        yield str(path), {"text": document.text, "path": str(path), "title": document.title}


# Parquet and Arrow files. Arrow keeps values that differ between rows as JSON in text (`extension<arrow.json>`, `Json`
# in `datasets`), mappings with free keys as lists of pairs, and gives every struct of a column the keys of all others.
# A row is what its writer put in.


BATCH_ROWS = 32
"""Rows of a file that are in memory at once: few, since a file may contain once a long text that many of them have."""
FILE_MARK = b"ARROW1"
"""How an Arrow file begins; a stream has no mark."""


def _read_parquet(path: Path) -> Iterator[Placed]:
    from pyarrow import parquet

    with _seekable(path) as stream:
        yield from placed_rows(parquet.ParquetFile(stream).iter_batches(batch_size=BATCH_ROWS), str(path))


def _read_arrow(path: Path) -> Iterator[Placed]:
    """Yield the rows of an Arrow file, or of an Arrow stream, as `datasets` keeps them."""
    from pyarrow import feather, ipc

    with _seekable(path) as stream:
        mark = stream.read(len(FILE_MARK))
        stream.seek(0)
        if mark == FILE_MARK:
            file = ipc.open_file(stream)
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
        elif mark.startswith(b"FEA1"):
            batches = iter(feather.read_table(stream).to_batches())
        else:
            batches = ipc.open_stream(stream) if mark else iter(())
        yield from placed_rows(batches, str(path))


def _seekable(path: Path) -> IO[bytes]:
    """Open a file for random access; a compressed file is unpacked in memory."""
    stream = open_bytes(path)
    if path.suffix.lower() not in COMPRESSED:
        return stream
    with stream:
        return io.BytesIO(stream.read())


def placed_rows(batches: Iterable[Any], place: str) -> Iterator[Placed]:
    """Yield the rows of Arrow's record batches."""
    number = 0
    for batch in batches:
        if twice := [name for name, count in Counter(batch.schema.names).items() if count > 1]:
            raise DataError(f"two columns are named `{twice[0]}`", place=place)
        decoders = {field.name: decoder(field.type) for field in batch.schema}
        for start in range(0, batch.num_rows, BATCH_ROWS):  # writers may put a complete table into one batch
            for row in batch.slice(start, BATCH_ROWS).to_pylist():
                number += 1
                yield _decoded(row, decoders, f"{place}, row {number}")


def _decoded(row: dict[str, Any], decoders: Mapping[str, Callable[[Any], Any]], place: str) -> Placed:
    name = ""
    try:
        for name, decode in decoders.items():
            row[name] = decode(row[name])
    except DataError as error:  # JSON that is none
        return place, DataError(f"`{name}` {error.message}", place=place, hint=error.hint)
    return place, row


def decoder(kind: Any) -> Callable[[Any], Any]:
    """Return the function that converts pyarrow's value of an Arrow type into what a JSON file would contain."""
    from pyarrow import types

    if isinstance(getattr(kind, "extension_name", None), str):
        inner = decoder(kind.storage_type)
        return (lambda value: value and parse_json(value)) if kind.extension_name == "arrow.json" else inner
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return decoder(kind.value_type)
    if types.is_struct(kind):
        fields = {field.name: decoder(field.type) for field in kind}
        if len(fields) < kind.num_fields:
            raise DataError(
                f"a struct has two fields with the same name; it has {names_of(field.name for field in kind)}"
            )
        return lambda value: value and _without_nulls({name: decode(value[name]) for name, decode in fields.items()})
    if types.is_map(kind):
        key_of, value_of = decoder(kind.key_type), decoder(kind.item_type)
        return lambda value: value if value is None else _once([(key_of(key), value_of(part)) for key, part in value])
    if types.is_nested(kind) and not types.is_union(kind):  # lists of every kind
        part_of = decoder(kind.value_type)
        return (
            (lambda value: value)
            if part_of is _as_it_is
            else (lambda value: value and [part_of(part) for part in value])
        )
    return _as_it_is


class Filled(dict[str, Any]):
    """A struct without its nulls: its row may have had them, or not these keys, which Arrow cannot tell."""


def _without_nulls(struct: dict[str, Any]) -> dict[str, Any]:
    return (
        Filled({name: part for name, part in struct.items() if part is not None}) if None in struct.values() else struct
    )


def _as_it_is(value: Any) -> Any:
    return value


READERS: Mapping[str, Callable[[Path], Iterator[Placed]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".pq": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
"""Ending of a file of rows -> what reads it."""
