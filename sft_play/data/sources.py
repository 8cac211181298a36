"""Which rows a source gives, each with its place: files in a fixed order or what `datasets` knows, then `columns`,
`filter` and `rows`.
"""

from __future__ import annotations

import heapq
import json
import platform
import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from glob import glob
from importlib.metadata import version
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NoReturn

from sft_play.config.data_rules import (
    MISSING,
    NO_CHAT,
    PATHS_COUNT,
    Condition,
    close_name,
    hint_absent,
    in_filter,
    is_glob,
    look_up,
    names_file,
    without,
)
from sft_play.config.reader import names_of
from sft_play.config.schema import DataSource
from sft_play.config.yaml_files import is_writable, scalar_text
from sft_play.data.builtin import read_builtin
from sft_play.data.formats import FORMATS
from sft_play.data.judged import good, keepers, says_what_is_good, speaks_against
from sft_play.data.layout import (
    NO_SPLIT,
    Splits,
    choose_split,
    missing_shards,
    splits_of_folder,
    splits_of_glob,
    visible_files,
)
from sft_play.data.readers import Placed, placed_rows, read_file
from sft_play.data.tools import is_filled
from sft_play.data.values import in_snake_case, is_blank, json_of, list_of, not_read
from sft_play.errors import DataError, MissingColumn, first_line
from sft_play.files import NOT_PLAIN, read_json, text_sha256, typed_path
from sft_play.plan.architecture import hub_reachable
from sft_play.runs.folder import require_inside
from sft_play.runs.manifest import digests_of
from sft_play.text import list_some, tell

OTHER_FILE = "another kind of file, a link to a folder, or of an installed package"
"""Why a file gives nothing to learn."""
OF_NO_SPLIT = "a file whose name means no split, where others do"
SHOWN_FAULTS = 5
SHOWN_PLACES = 20
"""Of what was left out for one reason."""


class LeftOut:
    """Counts rows and files that were read and are no part of the data, by reason, with the first places of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}
        self.there: int | None = None
        """How many rows there were, where `rows` asks for more."""
        self.commit: str | None = None
        """Of a hub dataset, the commit that was read."""

    def add(self, reason: str, place: str) -> None:
        """Count one."""
        place = place.encode(
            "utf-8", "backslashreplace"
        ).decode()  # a file's name may be no text, and manifests are JSON
        self.counts[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < SHOWN_PLACES:
            places.append(place)


def saved_splits(folder: Path) -> Splits | None:
    """Return split -> Arrow files of a folder that `save_to_disk` wrote; `None` for another. Raise `DataError`."""
    names = folder / "dataset_dict.json"
    if names.is_file():
        splits = {name: _saved_files(folder / name) for name in _strings(names, "splits")}
    elif (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        splits = {"train": _saved_files(folder)}
    else:
        return None
    require_inside((file for files in splits.values() for file in files), folder)
    return splits


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a split in order. Raise `DataError`."""
    state = folder / "state.json"
    files = [folder / name for name in _strings(state, "_data_files")]
    if any(read_json(state).get(key) for key in ("_indices_data_files", "_indices_files")):
        raise DataError(
            "lists the rows that were chosen, as `datasets` before 2.0 did, and they are not read",
            place=str(state),
            hint="`datasets.load_from_disk(OLD).flatten_indices().save_to_disk(NEW)` writes only those",
        )
    if missing := next((file for file in files if not file.is_file()), None):
        raise DataError("the file is missing, though `state.json` names it", place=str(missing))
    return files


def _strings(path: Path, key: str) -> list[str]:
    """Return the texts that a file of `save_to_disk` lists under `key`. Raise `DataError`."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))[key]
        names = [entry["filename"] if isinstance(entry, dict) else entry for entry in listed]
    except (ValueError, KeyError, TypeError, RecursionError, OSError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"lists no `{key}`, as `datasets.save_to_disk` would", place=str(path))
    return names


# Rows of a dataset of the hub: downloaded, or streamed row by row.


DEFAULT_SPLIT = "train"
COMMIT = re.compile("[0-9a-f]{40}")
SECONDS = 30
"""How long the hub may take to say which commit a revision is."""


def read_hub(source: DataSource, skipped: LeftOut) -> Iterator[Placed]:
    """Yield the rows of a hub dataset, whose commit `skipped` keeps. Raise `DataError`."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    split = source.split or DEFAULT_SPLIT
    number = 0
    try:
        revision = _commit(source)
        skipped.commit = revision if revision and COMMIT.fullmatch(revision) else None
        loaded: Any = datasets.load_dataset(
            source.path, source.config, split=split, revision=revision, streaming=source.streaming
        )
        tables = loaded.with_format("arrow").iter(batch_size=1000)
        batches = (batch for table in tables for batch in table.to_batches())
        for placed in placed_rows(batches, f"{source.path} ({split})"):
            number += 1
            yield placed
    except (
        *HfHubHTTPError.__bases__,  # `OSError` and the errors of the HTTP library that the client uses
        ValueError,
        RuntimeError,
        datasets.exceptions.DatasetsError,
    ) as error:
        raise _problem(source, error, number) from error


def _commit(source: DataSource) -> str | None:
    """Return the commit that the revision stands for. Raise `huggingface_hub`'s error if there is none.

    The library itself takes whatever it has cached of the dataset when a revision is not found, and only logs that.
    """
    from huggingface_hub import HfApi

    if not hub_reachable():
        return source.revision
    return str(HfApi().dataset_info(source.path, revision=source.revision, timeout=SECONDS).sha)


def _problem(source: DataSource, error: Exception, rows: int) -> DataError:
    first = first_line(error)
    if rows:
        return DataError(f"reading stopped after row {rows:,}: {first}", place=source.path, hint="try again")
    if not hub_reachable():
        return DataError(
            "there is no such file, and the hub cannot be reached",
            place=source.path,
            hint=f"check the network, or HF_HOME with a cached copy; {PATHS_COUNT}",
        )
    return DataError(
        f"neither a file nor a hub dataset that can be loaded: {first}",
        place=source.path,
        hint="streaming takes whole splits: `rows` limits them"
        if source.streaming and "[" in (source.split or "")
        else "check the name, `config`, `split`, `revision` and the network; a private dataset needs HF_TOKEN",
    )


BUILTIN = "builtin:"


def files_of(source: DataSource) -> list[Path] | None:
    """Return the local files of a source in a fixed order; `None` for a hub id or a built-in set. Raise `DataError`."""
    files = _find_files(source)
    if odd := next((path for path in files or () if not is_writable(str(path))), None):
        raise DataError("the file's name is not UTF-8 text", place=str(odd), hint="give it another name")
    return files


def _find_files(source: DataSource) -> list[Path] | None:
    if source.path.startswith(BUILTIN):
        return None
    path = typed_path(source.path)
    if path.is_file():  # first, since a file's name may hold `[`
        return [path]
    if path.is_dir():
        return choose_split(saved_splits(path) or splits_of_folder(path, source), source)
    if is_glob(source.path):
        # `Path.glob` would include hidden files.
        matches = sorted(p for p in map(Path, glob(str(path), recursive=True)) if p.is_file())  # noqa: PTH207
        if not matches:
            raise DataError(f"no file matches `{source.path}`", hint=PATHS_COUNT)
        return choose_split(splits_of_glob(matches, path, source), source)
    if path.exists():
        raise DataError(NOT_PLAIN, place=source.path)
    if names_file(source.path):
        raise DataError("there is no such file", place=source.path, hint=hint_absent(source.path))
    return None


def start_of_places(source: DataSource) -> str:
    """Return what the places of all rows of a source begin with: its file or folder, or the hub's name."""
    if source.path.startswith(BUILTIN):
        return ""
    path = typed_path(source.path)
    if is_glob(source.path) and not path.exists():
        path = Path(*takewhile(lambda part: not is_glob(part), path.parts))
    return "" if path == Path() else str(path)


def identify(source: DataSource, before: str | None = None) -> tuple[list[Any], str | None]:
    """Return all that the rows of a source depend on, and a sha256 of its files, `None` for what is not files. Raise
    `DataError`.

    `before` is the sha256 at an earlier preparation: of files that are gone it is taken.
    """
    try:
        files = files_of(source)
        content = files_sha256(files) if files else None
    except DataError:
        if before is None or typed_path(source.path).exists():
            raise
        content = before
    # Of a built-in set the rows are the interpreter's own library, and transformers' own code.
    brought = [platform.python_version(), version("transformers")] if source.path.startswith(BUILTIN) else []
    return [asdict(replace(source, name=None, weight=None)), content, *brought], content  # neither changes a row


def files_sha256(paths: Sequence[Path]) -> str:
    """Return a sha256 over names and contents of `paths`, in order. Raise `DataError` for a file that cannot be
    read.
    """
    try:
        digests = digests_of(paths, "data")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", place=str(error.filename or paths[0])) from None
    return text_sha256("\n".join(f"{path.name} {digest}" for path, digest in zip(paths, digests, strict=True)))


def is_hub(source: DataSource) -> bool:
    """Return whether a source is a dataset of the hub. Raise `DataError` if it is neither that nor a file."""
    return not source.path.startswith(BUILTIN) and files_of(source) is None


def _refuse_hub_options(source: DataSource, *allowed: str) -> None:
    """Raise `DataError` for options of hub datasets on a local source: nothing typed is ignored."""
    for name in ("split", "config", "revision"):
        if name not in allowed and getattr(source, name) is not None:
            raise DataError(
                f"`{name}: {getattr(source, name)}` is set, but only hub datasets have it",
                place=source.path,
                hint="`rows: 500` takes so many" if name == "split" else None,
            )
    if source.streaming:
        raise DataError(
            "`streaming: true` is set, but only hub datasets are streamed",
            place=source.path,
            hint="files are read row by row in any case",
        )


def read_source(source: DataSource, *, seed: int = 0, skipped: LeftOut | None = None) -> Iterator[Placed]:
    """Yield the rows that a source takes: after its `columns`, `filter` and `rows` (chosen by `seed`, which is
    `train.seed`).

    What is left out is counted in `skipped`. Raise `DataError` with the place of what cannot be read.
    """
    skipped = skipped if skipped is not None else LeftOut()
    try:
        rows = _all_rows(source, skipped)
        if source.columns or source.filter is not None:
            rows = _fitting(rows, source, skipped)
        rows = _refuse_judged(rows, source)
        if source.rows is None:
            yield from rows
        elif source.streaming:
            yield from _first(rows, source.rows, skipped)
        else:
            yield from _choose(rows, source.rows, seed, skipped)
    except DataError as error:
        error.place = error.place or source.path
        raise


def _all_rows(source: DataSource, skipped: LeftOut) -> Iterator[Placed]:
    if source.path.startswith(BUILTIN):
        _refuse_hub_options(source, "split")
        yield from read_builtin(source.path.removeprefix(BUILTIN), source.split or "train")
        return
    files = files_of(source)
    if files is None:
        yield from read_hub(source, skipped)
        return
    folder = typed_path(source.path)
    saved = folder.is_dir() and saved_splits(folder) is not None
    _refuse_hub_options(
        source, *([] if folder.is_file() else ["split"]), *(["config"] if folder.is_dir() and not saved else [])
    )
    if folder.is_dir() and not saved:
        splits = splits_of_folder(folder, source)
        for path in sorted(
            set(visible_files(folder)).difference(*(splits[split] for split in splits if split != NO_SPLIT))
        ):
            skipped.add(OF_NO_SPLIT if path in splits.get(NO_SPLIT, ()) else OTHER_FILE, str(path))
    if len(files) > 1:
        tell(f"note: {source.path}: {len(files)} files, {list_some([path.name for path in files], SHOWN_FAULTS)}")
    for note in missing_shards(files):
        tell(f"note: {note}")
    for path in files:
        count, before = 0, skipped.counts.total()
        for placed in read_file(path, skipped.add):
            count += 1
            yield placed
        if not count and skipped.counts.total() == before:
            raise DataError("the file contains no row", place=str(path))


# Which rows of a source are taken.


FILTERED = "not in the filter"
NOT_CHOSEN = "not chosen by `rows`"


def _refuse_judged(rows: Iterator[Placed], source: DataSource) -> Iterator[Placed]:
    """Yield rows; one that a column judges is an error unless a `filter` uses it: wrong answers would be learnt."""
    heeded = Condition(source.filter).names if source.filter is not None else set()
    chats = [
        columns for form, (columns, _) in FORMATS.items() if form not in NO_CHAT and source.format in ("auto", form)
    ]
    marks: dict[str, Counter[Any]] = {}
    asked: dict[str, int] = {}
    for place, row in rows:
        if not isinstance(row, DataError):
            forms = [columns for columns in chats if row.keys() >= {*columns}]
            chat, read = bool(forms), set().union(*forms)
            unread = {name: row[name] for name in sorted(row.keys() - read)}
            if chat and (column := _half_marked(unread, heeded, marks)):
                _refuse_half_marked(place, column, marks, islice(rows, LOOKED_AT))
            pair = chat and len(forms[0]) > 1
            if pair and (column := _continued(unread, str(row[forms[0][0]]), heeded, asked)):
                problem = f"is {row[column]}: the row seems to continue the conversation of an earlier one"
                yield place, not_read(column, problem, "make one row of each conversation, `messages`")
                continue
            judgements = _judgements(unread, chat)
            if judged := next((parts for parts in judgements if parts[1] and parts[0] not in heeded), None):
                column, condition = judged
                weighs = (
                    f"`columns: {scalar_text({'weight': column})}` weighs by it, " if "weight" in column.lower() else ""
                )
                yield (
                    place,
                    DataError(
                        f"`{column}` seems to say whether to learn the row, and is not read",
                        place=place,
                        hint=f"{weighs}`filter: {scalar_text(condition)}` keeps what is good, {_keep_all(column)}",
                    ),
                )
                continue
        yield place, row


CONVERSATION = re.compile("(?:conversation|conv|dialog(?:ue)?|session|chat|thread|ticket|call|episode)_?id")
TURN = re.compile("(?:turn|message|utterance)(?:_?(?:id|index|idx|number|num|no))?|round|step|seq")
"""Names of columns with a conversation's name, and with the number of a turn."""
NAMED, LATER = re.compile("(?!None)\\S"), re.compile("[2-9]|[1-9]\\d+")
"""Their values: any name, and the number of a turn that is not the first."""


def _continued(row: Mapping[str, Any], question: str, heeded: Collection[str], asked: dict[str, int]) -> str | None:
    """Return a column by which a row of one answer continues a conversation: its number, or the name of a conversation
    that an earlier row has with another question; adds it to `asked`.
    """
    spelt = {name: in_snake_case(name) for name in row if name not in heeded}
    ids = [name for name in spelt if CONVERSATION.fullmatch(spelt[name]) and NAMED.match(str(row[name]))]
    if not ids:
        return None
    first = hash(question)
    again = {name for name in ids if asked.setdefault(f"{spelt[name]} {row[name]}", first) != first}
    later = {name for name in spelt if TURN.fullmatch(spelt[name]) and LATER.fullmatch(str(row[name]))}
    return next((name for name in spelt if name in again | later), None)


MOST_MARKS, LOOKED_AT = 20, 10_000
"""Different marks of a column that are kept, and further rows that are read for an error to list them."""


def _half_marked(row: Mapping[str, Any], heeded: Collection[str], marks: dict[str, Counter[Any]]) -> str | None:
    """Return a column that marks some rows as good and is empty in others; adds its values to `marks`."""
    for name in (name for name in row if name not in heeded and says_what_is_good(name)):
        values, value = marks.setdefault(name, Counter()), None if is_blank(row[name]) else row[name]
        if value is None or (isinstance(value, (str, int, float)) and len(values) < MOST_MARKS):
            values[value] += 1
        if None in values and len(values) > 1:
            return name
    return None


def _refuse_half_marked(place: str, column: str, marks: dict[str, Counter[Any]], rows: Iterator[Placed]) -> NoReturn:
    """Raise `DataError` with what the column has in the rows; of no single row, so that none is left out for it."""
    for _, row in rows:
        if not isinstance(row, DataError) and column in row:
            _half_marked({column: row[column]}, (), marks)
    counts = marks[column]
    listed = list_some(
        [f"{'nothing' if value is None else f'`{value}`'} ({count:,})" for value, count in counts.most_common()], 8
    )
    keeps = scalar_text(good(in_filter(column), [value for value in counts if value is not None]))
    raise DataError(
        f"`{column}` marks some rows and not others, and is not read: {listed}",
        place=place,
        hint=f"`filter: {keeps}` keeps those with a mark, {_keep_all(column)}",
    )


def _keep_all(column: str) -> str:
    """Return the end of a hint: a filter that names `column`, so that it counts as used, and keeps every row."""
    has = f"has({in_filter(column)})"
    return f"`filter: {scalar_text(f'{has} or not {has}')}` all"


def _judgements(row: Mapping[str, Any], chat: bool, within: str = "") -> Iterator[tuple[str, str]]:
    """Yield the columns that may judge a row, and what does within one at any depth, with the `filter` that keeps good
    rows, if the value needs it.
    """
    for key, value in row.items():
        name = within + key
        if within:
            yield name, speaks_against(key, value, in_filter(name))
        for keep in keepers(key, chat) if not within else ():
            yield name, keep(in_filter(name), value)
        if chat and isinstance(value, Mapping):
            yield from _judgements(value, chat, f"{name}.")


def _fitting(rows: Iterator[Placed], source: DataSource, skipped: LeftOut) -> Iterator[Placed]:
    condition = Condition(source.filter) if source.filter is not None else None
    read = fitting = 0
    for place, entry in rows:
        read += 1
        row, keep = entry, True
        if not isinstance(row, DataError):
            try:
                renamed = rename(row, source.columns)
                # Both names work, so that a filter may be written with the file open or with the formats in mind.
                keep = condition is None or condition({**row, **renamed}, row)
                row = renamed
            except DataError as error:
                error.place = error.place or place
                row = error
        fitting += keep
        if keep:
            yield place, row
        else:
            skipped.add(FILTERED, place)
    for value, sought in sorted(condition.near if condition else ()):
        tell(f"note: {source.path}: for `filter`, `{value}` is another text than `{sought}`")
    if read and not fitting:
        raise DataError(f"`filter: {source.filter}` keeps none of the {read:,} rows", place=source.path)


def rename(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a row under new names: `columns` is new name -> the file's. Raise `DataError` for a column that is not
    there.

    Names with a dot are those within the turns: `messages.role: from`, and of their values, `messages.role.user:
    customer|visitor`.
    """
    if not columns:
        return row
    of_turns = {*row, *columns}
    within = {new: old for new, old in columns.items() if "." in new and new.partition(".")[0] in of_turns}
    columns = {new: old for new, old in columns.items() if new not in within}
    values = {name: value for name in columns.values() if (value := _named(row, name)) is not MISSING}
    missing = sorted(map(_column, {*columns.values()} - values.keys()))
    if missing:
        swapped = scalar_text({new: old for old, new in columns.items()})
        close = close_name(row, missing[0])
        key = next((new for new in columns if new in ("role", "content", "from", "value")), None)
        raise MissingColumn(
            f"`columns` names {', '.join(f'`{name}`' for name in missing)}, which the row lacks; its columns are"
            f" {names_of(row)}",
            hint=(
                f"the other way round: `columns: {swapped}`; files with these names need their own source"
                if all(name in row for name in columns)
                else f"of turns it is `messages.{key}`; `role` and `content`, or `from` and `value`, are read anyway"
                if key
                else f"did you mean `{close}`?"
                if close
                else "write `columns: {question: name in the file}`"
            ),
        )
    renamed = without(row, map(_column, values)) | {new: values[name] for new, name in columns.items()}
    for column in {new.partition(".")[0] for new in within}:
        if isinstance(turns := renamed.get(column), (list, str)):
            turns = list_of(turns, column)
            names = {new.removeprefix(f"{column}."): old for new, old in within.items() if new.startswith(f"{column}.")}
            renamed[column] = [_turn(turn, names) if isinstance(turn, Mapping) else turn for turn in turns]
    return renamed


AS_JSON = re.compile(r"\Ajson\((.+)\)\Z")


def _column(name: str) -> str:
    return AS_JSON.sub(r"\1", name)


def _named(row: Mapping[str, Any], name: str) -> Any:
    """Return what `columns` names, or `MISSING`; `json(NAME)` is what is no text as JSON. Raise `DataError`."""
    column = _column(name)
    value = look_up(row, column)
    if column == name or value is MISSING or value is None or isinstance(value, str):
        return value
    if is_filled(value, True):
        hint = "write it as JSON in a text, or as JSON lines"
        raise DataError(f"`{column}` lacks keys, or has nulls, which Arrow cannot tell apart", hint=hint)
    return json.dumps(json_of(value, column), ensure_ascii=False)


def _turn(turn: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a turn under new names, `role` -> the file's, and with new values, `role.user` -> the file's, `|` between
    several.
    """
    values = {new: _named(turn, old) for new, old in names.items() if "." not in new}
    values = {new: value for new, value in values.items() if value is not MISSING}
    renamed = without(turn, (_column(names[new]) for new in values)) | values
    for new, old in names.items():
        key, dot, value = new.partition(".")
        if dot and str(renamed.get(key)) in old.split("|"):
            renamed[key] = value
    return renamed


def _first(rows: Iterator[Placed], count: int, skipped: LeftOut) -> Iterator[Placed]:
    number = 0
    for number, placed in enumerate(rows, 1):
        yield placed
        if number == count:
            return
    skipped.there = number


def _choose(rows: Iterator[Placed], count: int, seed: int, skipped: LeftOut) -> Iterator[Placed]:
    """Yield `count` rows: those with the smallest of as many random numbers as there are rows, one for each in order.

    A row's number depends on the seed and its position alone, so a larger `count` takes the same rows and more. Only
    the chosen rows are in memory. A row that cannot be read is yielded at once, as its error.
    """
    draw = random.Random(seed).random
    heap: list[tuple[float, int, Placed]] = []  # the largest number first, as its negative; no two share an index
    for index, placed in enumerate(rows):
        number = draw()
        if isinstance(placed[1], DataError):
            yield placed
        elif len(heap) < count:
            heapq.heappush(heap, (-number, index, placed))
        else:
            out = heapq.heappushpop(heap, (-number, index, placed))
            skipped.add(NOT_CHOSEN, out[2][0])
    if len(heap) < count:
        skipped.there = len(heap)
    for _, _, placed in sorted(heap, key=lambda entry: entry[1]):
        yield placed
