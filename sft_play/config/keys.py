"""Every key of the configuration with its type, range, default and documentation, and its name as a variable."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_type_hints

from sft_play.config import schema
from sft_play.config.ranges import RANGES, REFUSED
from sft_play.config.types import ANY_NUMBER, Range

TABLE = Path(__file__).with_name("training_arguments.json")
REQUIRED = object()
"""The default of a key that has none."""
TYPES: Mapping[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "dict": dict, "list[str]": list[str], "null": type(None),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key, `train.learning_rate`."""

    name: str
    annotation: Any
    limits: Range
    default: Any
    """A plain value, or `REQUIRED`."""
    help: str
    extra: bool = False
    """Whether it is a field of `TrainingArguments` that the schema does not own."""

    @property
    def variable(self) -> str:
        """Its name on a command line: `TRAIN_LEARNING_RATE`."""
        return variable_name(self.name)


def variable_name(key: str) -> str:
    """Returns the variable of a dotted key."""
    return key.replace(".", "_").upper()


def documented(record: type) -> dict[str, str]:
    """Returns field -> the text under it, from a dataclass's source. Needs the schema's file, not torch."""
    return _docs_of_module().get(record.__name__, {})


@functools.cache
def _docs_of_module() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef):
            texts = found.setdefault(node.name, {})
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                    texts[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


@functools.cache
def sections() -> Mapping[str, type]:
    """Returns dotted section -> its dataclass: `tuning.lora` -> `LoraSettings`; the root is ``."""
    found: dict[str, type] = {}

    def walk(record: type, name: str) -> None:
        found[name] = record
        for field, annotation in get_type_hints(record).items():
            if dataclasses.is_dataclass(annotation):
                walk(cast(type, annotation), f"{name}.{field}" if name else field)

    walk(schema.Config, "")
    return found


@functools.cache
def schema_keys() -> Mapping[str, Key]:
    """Returns the keys that the schema owns, in its order. `help` is left out: it costs a parse of the source."""
    found = {}
    for section, record in sections().items():
        hints = get_type_hints(record)
        for field in dataclasses.fields(record):
            name = f"{section}.{field.name}" if section else field.name
            if name in sections() or name == "train.extra":
                continue
            default = field.default if field.default is not dataclasses.MISSING else REQUIRED
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            limits = RANGES.get(name, ANY_NUMBER)
            found[name] = Key(
                name=name, annotation=_with_choices(name, hints[field.name]), limits=limits, default=default, help=""
            )
    return found


def _with_choices(name: str, annotation: Any) -> Any:
    """Gives `train.optim` and `train.lr_scheduler_type` the words that the pinned transformers takes."""
    if name == "train.optim":
        return _words([*table()["optim"]["choices"], "auto"])
    if name == "train.lr_scheduler_type":
        return _words(table()["lr_scheduler_type"]["choices"])
    return annotation


def _words(words: list[str]) -> Any:
    return cast(Any, Literal)[tuple(words)]


@functools.cache
def table() -> Mapping[str, Any]:
    """Returns the fields of the pinned `TrainingArguments`: type, default, choices, help."""
    return cast(Mapping[str, Any], json.loads(TABLE.read_text(encoding="utf-8"))["fields"])


@functools.cache
def extra_keys() -> Mapping[str, Key]:
    """Returns the further fields of `TrainingArguments` that `train.` takes."""
    found = {}
    for field, row in table().items():
        name = f"train.{field}"
        if name in schema_keys() or field in REFUSED:
            continue
        parts = [TYPES[kind] for kind in row["type"]] + ([_words(row["choices"])] if "choices" in row else [])
        found[name] = Key(
            name=name,
            annotation=functools.reduce(operator.or_, parts),
            limits=RANGES.get(name, ANY_NUMBER),
            default=row["default"],
            help=row["help"],
            extra=True,
        )
    return found


def find_key(name: str) -> Key | None:
    """Returns the key of a dotted name, or `None`."""
    return schema_keys().get(name) or extra_keys().get(name)


@functools.cache
def variables() -> Mapping[str, str]:
    """Returns variable -> dotted key for every key that can be set, refused ones included so that their reason can be given."""
    names = [*schema_keys(), *extra_keys(), *(f"train.{field}" for field in REFUSED)]
    return {variable_name(name): name for name in names}
