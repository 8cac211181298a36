"""Rules about data (sources, validation, the task, adapters and new tokens) and the language of `filter`."""

from __future__ import annotations

import ast
import contextlib
import datetime
import json
import keyword
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sft_play.config.reader import KINDS, Conflict, kind_of, names_of
from sft_play.config.schema import Config, DataSource
from sft_play.errors import DataError, MissingColumn
from sft_play.files import typed_path

NO_CHAT = ("auto", "text", "tokens")
"""Formats that are not conversations, or need not be."""


def sources(config: Config) -> Iterator[tuple[str, int, DataSource]]:
    """Yield (key, index, source) of training and validation."""
    validation = config.data.validation
    for key, listed in (
        ("data.sources", config.data.sources),
        ("data.validation", validation if isinstance(validation, list) else []),
    ):
        yield from ((key, index, source) for index, source in enumerate(listed))


# ---- The model


def names_file(path: str) -> bool:
    """Return whether a source's path can only name a file or folder, and neither a hub dataset nor a built-in set."""
    plain = not path.startswith("builtin:")
    return plain and (bool(Path(path).suffix) or path.count("/") != 1 or path.startswith((".", "/", "~")))


PATHS_COUNT = "paths count from the folder in which you typed the command; a hub dataset is `OWNER/NAME`"


def hint_absent(path: str) -> str:
    """Return a hint for a file that is not here."""
    typed = typed_path(path)
    close = get_close_matches(typed.name, [other.name for other in typed.parent.glob("*")], n=1, cutoff=0.75)
    if close:
        return f"did you mean `{typed.parent / close[0]}`?"
    return PATHS_COUNT


def is_glob(path: str) -> bool:
    """Return whether a source's path is a pattern."""
    return any(mark in path for mark in "*?[")


def adapter(config: Config) -> Iterator[Conflict]:
    """Check that the other keys fit a run that starts from an adapter."""
    model, tuning = config.model, config.tuning
    if model.adapter is None:
        if tuning.adapter != "continue":
            yield Conflict("tuning.adapter", ", but there is no `model.adapter`", "MODEL_ADAPTER=run, folder or hub id")
        return
    if model.init == "random":
        yield Conflict(
            "model.init", ", but `model.adapter` belongs to the weights and tokens of its base", "omit one of the two"
        )
    if tuning.mode == "full" and tuning.adapter == "continue":
        yield Conflict(
            "tuning.mode",
            ", but `model.adapter` names an adapter to train on, which has few of the weights",
            "`tuning.mode: lora` trains it further; `tuning.adapter: merge` merges it into the model whose weights are"
            " trained; MODEL_NAME= takes a run with a complete model",
        )


def adapters(config: Config) -> Iterator[Conflict]:
    """Refuse shapes of adapters that cannot be combined with other keys."""
    tuning, lora, launch = config.tuning, config.tuning.lora, config.launch
    if tuning.mode == "full":
        return
    mutates = lora.init in ("pissa", "olora")
    others = {
        "variant": lora.variant != "lora",
        "init": lora.init != "default",
        "rank_pattern": lora.rank_pattern,
        "alpha_pattern": lora.alpha_pattern,
        "modules_to_save": lora.modules_to_save,
        "bias": lora.bias != "none",
        "rslora": lora.rslora,
    }
    shapes = [name for name, asked in others.items() if asked]
    sliced = [name for name in ("variant", "modules_to_save", "bias") if name in shapes]
    if shapes and tuning.backend == "unsloth":
        yield Conflict(
            f"tuning.lora.{shapes[0]}", ", but `tuning.backend: unsloth` makes plain LoRA", "`tuning.backend: bnb`"
        )
    if sliced and launch.tensor_parallel > 1:
        yield Conflict(
            f"tuning.lora.{sliced[0]}",
            f", but `launch.tensor_parallel` is {launch.tensor_parallel}",
            "omit one of the two",
        )
    if mutates and tuning.mode == "qlora":
        yield Conflict(
            "tuning.lora.init",
            ", which takes a part out of the base, but `tuning.mode: qlora` quantises it",
            "`tuning.mode: lora`",
        )
    if mutates and lora.variant == "dora":
        yield Conflict("tuning.lora.init", ", but `tuning.lora.variant` is `dora`", "omit one of the two")
    if config.model.adapter and tuning.adapter == "continue" and lora.init != "default":
        yield Conflict("tuning.lora.init", ", but an adapter that is trained on starts as it is", "omit one of the two")
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key):
            try:
                re.compile(pattern)
            except re.error as error:
                hint = "`{down_proj: 8}`, or a regular expression of Python"
                yield Conflict(f"tuning.lora.{key}", f"`tuning.lora.{key}` has `{pattern}`: {error}", hint)
    if lora.init == "orthogonal" and any(rank % 2 for rank in (lora.r, *lora.rank_pattern.values())):
        yield Conflict("tuning.lora.init", ", which needs even ranks", "TUNING_LORA_R=16")


def new_tokens(config: Config) -> Iterator[Conflict]:
    """Check new tokens, and that the other keys allow them."""
    tokens, embeddings = config.data.new_tokens, config.tuning.lora.embeddings
    if twice := [token for token, count in Counter(tokens).items() if count > 1 or not token.strip()]:
        yield Conflict("data.new_tokens", f", and `{twice[0]}` appears twice, or is blank", "name each token once")
    continued = config.model.adapter is not None and config.tuning.adapter == "continue"
    if embeddings == "new" and not (tokens or continued):
        yield Conflict("tuning.lora.embeddings", ", but there are no `data.new_tokens`", "`all` trains every row")
    if tokens and config.model.init == "random":
        yield Conflict("data.new_tokens", ", but `model.init` is `random`", "put them into the tokenizer")
    trained = config.tuning.mode != "full" and (embeddings in ("new", "all") or (tokens and embeddings == "auto"))
    if trained and config.tuning.backend == "unsloth":
        yield Conflict("tuning.backend", ", which trains no embeddings here", "`tuning.backend: bnb`")
    if trained and config.launch.tensor_parallel > 1:
        yield Conflict("launch.tensor_parallel", ", but rows of the embedding are trained", "omit one of the two")


# ---- Sources


def both(config: Config) -> Iterator[Conflict]:
    """Refuse a short key next to the list that it stands for, and a column for a split that is not made."""
    data = config.data
    held_out = data.validation if isinstance(data.validation, list) else None
    if data.train_path and [source.path for source in data.sources] != [data.train_path]:
        yield Conflict("data.train_path", "`data.train_path` and `data.sources` are both given", "keep one of them")
    if data.val_path and (held_out is None or [source.path for source in held_out] != [data.val_path]):
        yield Conflict("data.val_path", "`data.val_path` and `data.validation` are both given", "keep one of them")
    if data.group_by is not None and (held_out is not None or not data.validation):
        text = (
            "`data.group_by` says which rows stay together when a fraction is held out, and `data.validation` is not"
            " a fraction"
        )
        yield Conflict("data.group_by", text, "set `data.validation: 0.05`, or omit `data.group_by`")


def task(config: Config) -> Iterator[Conflict]:
    """Refuse explicit formats that the task does not take; `auto` is checked when the rows are read."""
    for key, index, source in sources(config):
        if reason := refused_format(config.tuning.task, source.format):
            yield Conflict(f"{key}[{index}].format", f", but {reason[0]}", reason[1])


def refused_format(kind: str, form: str) -> tuple[str, str] | None:
    """Return why `tuning.task: kind` does not take rows of the format `form`, and a hint; `None` if it does."""
    if kind == "sft" and form == "text":
        return (
            "`tuning.task: sft` learns answers, and plain text has none",
            "set `tuning.task: cpt` to learn every token of it, or `mixed` for text and conversations",
        )
    if kind == "cpt" and form not in NO_CHAT:
        return (
            "`tuning.task: cpt` learns documents and plain text, not conversations",
            "set `tuning.task: mixed`, which learns every token of text and the answers of conversations",
        )
    return None


def entries(config: Config) -> Iterator[Conflict]:
    """Refuse empty texts, which would be no choice at all, a `filter` that cannot be parsed, and two sources with one
    name.
    """
    for key, index, source in sources(config):
        name = f"{key}[{index}]"
        for field in ("filter", "split", "config", "revision"):
            if (text := getattr(source, field)) is not None and not text.strip():
                yield Conflict(key, f"`{name}.{field}` is empty", "omit it")
        try:
            Condition(source.filter) if source.filter and source.filter.strip() else None
        except DataError as error:
            yield Conflict(key, f"`{name}.filter` {error.message.removeprefix('`filter` ')}", error.hint)
    for key in ("data.sources", "data.validation"):  # scores and counts are reported by name
        names = Counter(source.name for of, _, source in sources(config) if of == key and source.name is not None)
        if twice := sorted(name for name, count in names.items() if count > 1):
            yield Conflict(
                key, f"`{key}` has two sources with the name `{twice[0]}`", "counts and scores are reported by name"
            )


def weights(config: Config) -> Iterator[Conflict]:
    """Check that weights are shares: not negative, not all 0, and either on every training source or on none."""
    for key, index, source in sources(config):
        if source.weight is not None and source.weight < 0:
            yield Conflict(f"{key}[{index}].weight", "; a share cannot be negative", "0 excludes a source")
        elif source.weight is not None and key == "data.validation":
            text = ", but validation is not mixed: every row is scored"
            yield Conflict(f"{key}[{index}].weight", text, "omit it; `rows` limits a source")
    shares = [source.weight for source in config.data.sources]
    if any(weight is not None and weight < 0 for weight in shares):
        return
    if None in shares and any(weight is not None for weight in shares):
        text = f"`data.sources[{shares.index(None)}]` has no `weight`, though other sources have one"
        yield Conflict("data.sources", text, "give every source a weight, or none: then each row is taken once")
    elif shares and shares[0] is not None and not any(shares):
        yield Conflict("data.sources", "all weights of `data.sources` are 0, so nothing would be trained", "omit them")


RULES = (adapter, adapters, new_tokens, both, task, entries, weights)


# `filter` of a source: a condition over the columns of a row, in a small part of Python's syntax.
#
# It has comparisons, `and`, `or`, `not`, numbers, text, lists of them, columns by their names, and five functions:
# `len`, `blank` (null, or only spaces), `has` (the column exists and is not null), `number` (parses text, as CSV files
# contain it) and `column("my name")` for a column whose name is not an identifier. Anything else is refused before any
# of the expression runs.


Row = Mapping[str, Any]

SYNTAX = (
    'conditions look like `lang == "en" and score >= 3`, `source in ["a", "b"]`, `not blank(text)`, `len(answer) <'
    " 2000`"
)
OF_OTHERS = {"=": "==", "===": "==", "<>": "!=", "&&": "and", "||": "or", "!": "not", "“": '"', "”": '"', "„": '"'}
OF_OTHERS |= {"AND": "and", "OR": "or", "NOT": "not", "IN": "in"}
OTHER = re.compile(r"===|<>|&&|\|\||[“”„]|\b(?:AND|OR|NOT|IN)\b|(?<![<>=!])=(?!=)|!(?!=)")
"""Operators and quotes of other languages."""
PARTS = (
    ast.Expression, ast.BoolOp, ast.boolop, ast.Not, ast.USub, ast.Compare, ast.cmpop, ast.Constant, ast.expr_context,
    ast.UnaryOp, ast.List, ast.Tuple, ast.Set,
)  # fmt: skip
FUNCTIONS = ("len", "blank", "number", "has", "column")
"""The last two take a column's name and not its value."""
MISSING = object()


def look_up(row: Row, name: str) -> Any:
    """Return the value of a column, or `MISSING`; `meta.lang` reads a field inside a column, `answers.0` of a list."""
    if name in row:
        return row[name]
    head, _, rest = name.partition(".")
    return look_up(inside(row.get(head)), rest) if rest else MISSING


def inside(value: Any) -> Row:
    """Return what is within a value, or within JSON in a text, by its keys or, in a list, by its places."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, list):
        return {str(index): part for index, part in enumerate(value)}
    return value if isinstance(value, Mapping) else {}


def without(row: Row, names: Iterable[str]) -> dict[str, Any]:
    """Return a row without what `look_up` finds by `names`; what stands next to that in its column becomes a column of
    its own.
    """
    others = {**row}
    for name in sorted({*names}):  # a column before what is within it
        while name not in others and (head := next((key for key in others if name.startswith(f"{key}.")), "")):
            others |= {f"{head}.{key}": part for key, part in inside(others.pop(head)).items()}
        others.pop(name, None)
    return others


def close_name(row: Row, name: str) -> str | None:
    """Return the column of a row, or what is within one, that `name` may mean."""
    head = name.rpartition(".")[0]
    names = [*row, *(f"{head}.{key}" for key in inside(look_up(row, head)))]
    return next(iter(get_close_matches(name, names, n=1, cutoff=0.75)), None)


def in_filter(column: str) -> str:
    """Return how a condition names a column."""
    plain = all(part.isidentifier() and not keyword.iskeyword(part) for part in column.split("."))
    return column if plain else f"column({json.dumps(column, ensure_ascii=False)})"


class Condition:
    """A parsed `filter`; calling it with a row returns whether the row is kept. Raises `DataError`."""

    def __init__(self, expression: str) -> None:
        self.expression = expression.strip()
        try:
            columns = _Columns()
            self._columns = columns.names
            tree = columns.visit(ast.parse(self.expression, mode="eval"))
            self.names = {part for name in columns.names | columns.sought for part in (name, name.partition(".")[0])}
            """Names of columns; of dotted ones also what stands before the dot."""
            if not self.names:
                raise ValueError("it names no column")
            quoted = {text for node in ast.walk(ast.parse(self.expression)) if (text := _quoted(node))}
            self._sought = {text.strip().casefold(): text for text in quoted} | {text: text for text in quoted}
            self.near: set[tuple[str, str]] = set()
            """Values of its columns that differ from its texts only by case or blanks, with these."""
            self._code = compile(ast.fix_missing_locations(tree), "filter", "eval")
        except SyntaxError as error:
            rest = (error.text or "")[(error.offset or 1) - 1 :].strip()
            other = OTHER.search(re.sub(r"\"[^\"]*\"|'[^']*'", "", self.expression))
            hint = f"write `{OF_OTHERS[other[0]]}` for `{other[0]}`; {SYNTAX}" if other else SYNTAX
            raise self._error(error.msg + (f" at `{rest[:40]}`" if rest else ""), hint) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._error(str(error) or "it is nested too deeply") from None

    def __call__(self, row: Row, shown: Iterable[str] = ()) -> bool:
        """`shown`: the columns that an error lists, if not all of the row's."""

        def column(name: str) -> Any:
            if (cell := look_up(row, name)) is MISSING:
                close = close_name(row, name)
                raise MissingColumn(
                    f"`filter: {self.expression[:200]}` names the column `{name}`, which is missing; "
                    f"the columns are {names_of(shown or row)}",
                    hint=f"did you mean `{in_filter(close)}`?"
                    if close
                    else f'text is written in quotes: `"{name}"`; `has({name})` tells whether a row has the column',
                )
            if isinstance(cell, datetime.date):  # or a time, of Arrow
                cell = cell.isoformat().removesuffix("T00:00:00")
            if type(cell) is not str:
                return cell
            sought = self._sought.get(cell, self._sought.get(cell.strip().casefold(), cell))
            if cell != sought:
                self.near.add((cell, sought))
            return _Text(cell)

        names = {
            "__builtins__": {},
            "len": len,
            "blank": lambda value: value is None or (isinstance(value, str) and not value.strip()),
            "number": _number,
            "text": _Text,
            "has": lambda name: look_up(row, name) not in (None, MISSING),
            "column": column,
        }
        try:
            verdict = eval(self._code, names)
        except UnfitError as error:
            raise self._error(str(error)) from None
        except (TypeError, ValueError, AttributeError):
            raise self._unfit(row) from None
        if not isinstance(verdict, bool):
            gives = "text" if isinstance(verdict, str) else kind_of(verdict)
            raise self._error(f"it gives {gives}, not true or false")
        return verdict

    def _unfit(self, row: Row) -> DataError:
        """Return the error for values that a function or an order does not take."""
        cells = {name: look_up(row, name) for name in sorted(self._columns)}
        kinds = {name: kind_of(cell) for name, cell in cells.items() if cell is not MISSING}
        empty = [name for name, kind in kinds.items() if kind == KINDS["NoneType"]]
        text = ", ".join(f"`{name}` is {kinds[name]}" for name in empty or kinds)
        has = " and ".join(f"has({in_filter(name)})" for name in empty)
        hint = f"`{has} and ...` leaves out such rows" if empty else SYNTAX
        return self._error(f"it does not fit the row, where {text}", hint)

    def _error(self, problem: str, hint: str = SYNTAX) -> DataError:
        return DataError(f"`filter` cannot be used: {problem}: `{self.expression[:200]}`", hint=hint)


NUMBER = re.compile(r"-?\d+(?:\.\d+)?|true|false", re.IGNORECASE)
DATE = re.compile(r"\d{1,2}([./-])\d{1,2}\1\d{2,4}.*", re.DOTALL)
"""A date that does not begin with its year."""
TRUTHS = (
    *(("true", "false"), ("yes", "no"), ("1", "0"), ("t", "f"), ("y", "n"), ("wahr", "falsch"), ("ja", "nein")),
    *(
        ("vrai", "faux"),
        ("oui", "non"),
        ("verdadero", "falso"),
        ("sí", "no"),
        ("vero", "falso"),
        ("✓", "✗"),
        ("✔", "✘"),
    ),
)
"""What tables write for true and false."""


class UnfitError(Exception):
    """A condition does not fit a row; the message says so in a user's words."""


class _Text(str):
    """A text, of a column or in quotes. What would keep wrong rows raises `UnfitError`: comparing it with a number that
    it writes or with no text at all, ordering numbers and dates by their letters, and taking `no` for true.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return str.__eq__(self, other)
        if other is None and not self.strip():
            raise UnfitError("an empty text is compared with null: write `blank(...)`, which is true of both")
        if other is None or (isinstance(other, (bool, int, float)) and not NUMBER.fullmatch(self)):
            return False
        raise UnfitError(
            f'`"{self}"` is text and is compared with {kind_of(other)}: quotes mean text, and `number(...)` reads the'
            " number in a column's text"
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        if any(self.lower() in pair for pair in TRUTHS):
            raise UnfitError(f'`"{self}"` is text, and neither true nor false: compare it, `NAME == "{self}"`')
        return len(self) > 0

    def _ordered(self, other: object, order: Callable[[Any, Any], bool]) -> bool:
        if not isinstance(other, str):
            raise UnfitError(f'`"{self}"` is text and is compared with {kind_of(other)}: write `number(...)`')
        if DATE.fullmatch(self) or DATE.fullmatch(other):
            raise UnfitError(f'dates are ordered by their letters, which only `"2024-12-31"` allows, not `"{self}"`')
        try:
            numbers = order(float(self), float(other))
        except ValueError:
            numbers = order(str(self), str(other))
        if numbers != order(str(self), str(other)):
            raise UnfitError(f'`"{self}"` and `"{other}"` are ordered by their letters: write `number(...)`, no quotes')
        return numbers

    def __lt__(self, other: object) -> bool:
        return self._ordered(other, operator.lt)

    def __le__(self, other: object) -> bool:
        return self._ordered(other, operator.le)

    def __gt__(self, other: object) -> bool:
        return self._ordered(other, operator.gt)

    def __ge__(self, other: object) -> bool:
        return self._ordered(other, operator.ge)

    __hash__ = str.__hash__


class _Columns(ast.NodeTransformer):
    """Replaces column names with calls of `column`. Raises `ValueError` for syntax outside the language."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.sought: set[str] = set()
        """Columns that need not be there."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Set):  # which would compare hashes
            node = ast.List(node.elts, ast.Load())
        if text := _quoted(node):
            return ast.Call(ast.Name("text", ast.Load()), [ast.Constant(text)], [])
        if name := _dotted(node):
            self.names.add(name)
            return ast.Call(ast.Name("column", ast.Load()), [ast.Constant(name)], [])
        shown = f"`{ast.unparse(node)[:40]}`"
        if isinstance(node, ast.Call):
            function = _dotted(node.func)
            argument = node.args[0] if len(node.args) == 1 and not node.keywords else None
            if argument and function == "has" and (column := _quoted(argument) or _dotted(argument)):
                self.sought.add(column)
                return ast.Call(node.func, [ast.Constant(column)], [])
            if argument and function in FUNCTIONS[:3]:
                return ast.Call(node.func, [self.visit(argument)], [])
            raise ValueError(f"{shown} is not a function of one value; there are {', '.join(FUNCTIONS)}")
        if isinstance(node, (ast.Is, ast.IsNot)):  # meant for `None`, where `==` is equivalent
            return ast.Eq() if isinstance(node, ast.Is) else ast.NotEq()
        if not isinstance(node, PARTS):
            raise ValueError(f"{shown} is not part of the language")
        if isinstance(node, ast.BoolOp) and any(isinstance(value, ast.Constant) for value in node.values):
            raise ValueError(f"{shown} joins a value and no condition; a list is written `NAME in [...]`")
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[-1], (ast.In, ast.NotIn))
            and _quoted(node.comparators[-1])
            and _dotted(node.left)
        ):
            raise ValueError(f"{shown} looks for a piece of a text; a list is written `[...]`")
        return self.generic_visit(node)


def _dotted(node: ast.AST) -> str:
    """Return the name of a column, `lang`, `meta.lang` or `column("a b")`, or an empty string for another
    expression.
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and _dotted(node.func) == "column" and len(node.args) == 1 and not node.keywords:
        return _quoted(node.args[0]) or _dotted(node.args[0])
    head = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{head}.{node.attr}" if isinstance(node, ast.Attribute) and head else ""


def _quoted(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _number(value: Any) -> float | None:
    try:
        return None if value is None or value == "" else float(value)
    except ValueError:
        raise UnfitError(f"`number(...)` reads numbers, and not `{str(value)[:40]}`") from None
