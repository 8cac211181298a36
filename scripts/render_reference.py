"""Render the table of `TrainingArguments`, `docs/configuration.md` and `configs/schema.json` from code.

Run `python scripts/render_reference.py` after each change of the schema or of the transformers pin. The table lets
layer 1 check `train.*` without importing torch; `tests/contract/test_config_command.py` detects drift.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import json
import os
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from sft_play.config.keys import Key, extra_keys, schema_keys, sections  # noqa: E402
from sft_play.config.reader import (  # noqa: E402
    Range,
    describe,
    fields_of,
    limits_of,
    literals,
    options,
    required_fields,
)
from sft_play.config.schema import DataSource  # noqa: E402
from sft_play.config.yaml_files import scalar_text  # noqa: E402

TABLE = ROOT / "sft_play" / "config" / "training_arguments.json"
NAMES = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null", dict: "dict", list: "list[str]"}


ALSO_TAKEN = {"train.packing": "boolean", "tuning.lora.target_modules": "string"}
"""Key -> JSON type of the values that `config.keys.as_meant` knows."""


@functools.cache
def read_field_docs(record: type) -> dict[str, str]:
    """Return field -> the docstring under it, from a dataclass's source file."""
    (definition,) = ast.parse(inspect.getsource(record)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(str(ast.literal_eval(text.value)).split())
        for field, text in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }


def members(annotation: Any) -> list[Any]:
    """Return the members of a union, or just the annotation."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [part for member in typing.get_args(annotation) for part in members(member)]
    return [annotation]


def type_names(annotation: Any) -> tuple[list[str], list[str]]:
    """Return the JSON types of a field, and its choices if it is an enumeration."""
    names: list[str] = []
    words: list[str] = []
    for part in members(annotation):
        origin = typing.get_origin(part)
        if isinstance(part, type) and issubclass(part, enum.Enum):
            words += [str(member.value) for member in part]
        elif origin is typing.Literal:
            names.append("bool")
        else:
            names.append(NAMES.get(origin or part, "dict"))
    return [name for name in dict.fromkeys(names) if not (name == "str" and words)], words


def training_arguments() -> dict[str, Any]:
    """Return the table: field -> type, default, choices and help of the installed transformers."""
    import transformers
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    table: dict[str, Any] = {}
    for field in dataclasses.fields(TrainingArguments):
        names, words = type_names(hints[field.name])
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        row: dict[str, Any] = {"type": names, "default": default.value if isinstance(default, enum.Enum) else default}
        if words := words or list(field.metadata.get("choices") or []):
            row["choices"] = words
            row["type"] = [name for name in names if name != "str"]
        row["help"] = " ".join(str(field.metadata.get("help", "")).split())
        table[field.name] = row
    return {"transformers": transformers.__version__, "fields": table}


def render_table() -> str:
    """Return the text of `sft_play/config/training_arguments.json`."""
    head = {"rendered_by": "python scripts/render_reference.py"}
    return json.dumps({**head, **training_arguments()}, indent=1, ensure_ascii=False) + "\n"


# `docs/configuration.md` and `configs/schema.json`, from the schema's own documentation.


RENDERED = "<!-- Rendered by `make render`; edit `sft_play/config/schema.py`. -->"
INTRODUCTION = """# Configuration

One YAML file describes a run. Only `model.name` is required ([not from scratch](pretraining.md)). Defaults are
**bold**; a key without a default is null. For `auto` the plan decides and gives the reason. An integer is at least 1
unless its row says otherwise.

```bash
make config CONFIG=configs/quickstart.yaml TRAIN_LEARNING_RATE=1e-4
```

This prints every key with the origin of its value.

- **Overrides**: `SECTION_KEY=value` sets `section.key`: `TRAIN_BATCH_SIZE=1`,
  `DATA_SOURCES='[{path: a.jsonl}, {path: b.jsonl}]'`. Nothing after `=` means null, if the key takes null.
- **Order**, later wins: defaults, `extends:` parents, the file, `SFT_SECTION_KEY` in the environment, the command line.
- **Presets**: `extends: run_bnb` takes the keys of `configs/run_bnb.yaml`, or of a file next to yours; not its
  validation data if you set training data.
- **YAML 1.2**: only `true` and `false` are booleans, `2e-4` is a number. `${section.key}` is another key's value.
- **Editors**: begin a file with `# yaml-language-server: $schema=configs/schema.json`.
"""
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
"""A link, which pages have, but which an editor that shows the schema cannot follow."""


def render_document() -> str:
    """Return the text of `docs/configuration.md`."""
    lines = [RENDERED, INTRODUCTION]
    for section, record in sections().items():
        keys = [key for key in schema_keys().values() if key.name.rpartition(".")[0] == section]
        if not section or not keys:
            continue
        lines += [f"## `{section}`", "", "| key | value | meaning |", "|---|---|---|"]
        texts = read_field_docs(record)
        for key in keys:
            leaf = key.name.rpartition(".")[2]
            lines.append(f"| `{leaf}` | {_cell(_values(key))} | {_cell(texts.get(leaf, ''))} |")
        lines.append("")
        if section == "data":
            lines += _sources()
    return "\n".join([*lines, *_extras()]) + "\n"


def _sources() -> list[str]:
    lines = ["### Entries of `data.sources` and `data.validation`", "", "| key | value | meaning |", "|---|---|---|"]
    texts = read_field_docs(DataSource)
    for name, annotation in fields_of(DataSource).items():
        lines.append(
            f"| `{name}` | {_cell(_short(describe(annotation)).removesuffix(', null'))} |"
            f" {_cell(texts.get(name, ''))} |"
        )
    return [*lines, ""]


def _extras() -> list[str]:
    names = ", ".join(f"`{key.name.rpartition('.')[2]}`" for key in extra_keys().values())
    about = (
        (
            "Fields of `transformers.TrainingArguments`, with their defaults"
            " (except [`report_to`](watching.md#trackers): `tensorboard`)."
        ),
        "Other fields are refused, with what to use instead.",
    )
    return ["## Further keys of `train`", "", *about, "", f"{names}."]


def _values(key: Key) -> str:
    """Return a key's accepted values with its default in bold, unless that is null."""
    shown = str(key.default).lower() if isinstance(key.default, bool) else key.default
    text, default = _expected(key), f"`{shown}`"
    if shown is None:
        return text.removesuffix(", null")
    return (
        text.replace(default, f"**{default}**", 1) if default in text else f"{text}; **`{scalar_text(key.default)}`**"
    )


def _expected(key: Key) -> str:
    words = literals(key.annotation)
    if len(words) > 8:
        return f"one of {len(words)} words"
    return _short(describe(key.annotation))


def _short(expected: str) -> str:
    """Shorten a description for a table cell: the form of lists and mappings, no articles, not the minimum of most
    integers.
    """
    forms = re.sub(r"\ba (list|mapping)( of mappings)? such as ", "", expected)
    return re.sub(r"integer >= 1(?!\d| and)", "integer", re.sub(r"\ban? ", "", forms)).replace(" or ", ", ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def render_schema() -> str:
    """Return the text of `configs/schema.json`, a JSON Schema for editors."""
    root: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": "Rendered by `make render` from sft_play/config/schema.py.",
        "title": "SFT-Play configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "extends": {
                "description": "Preset or file, or several, whose keys this file changes.",
                "type": ["string", "array"],
            }
        },
    }
    for section, record in sections().items():
        if section:
            node = _object(root, section)
            node["description"] = (record.__doc__ or "").strip().splitlines()[0]
    for key in [*schema_keys().values(), *extra_keys().values()]:
        section, _, leaf = key.name.rpartition(".")
        text = LINK.sub(r"\1", key.help or read_field_docs(sections()[section]).get(leaf, ""))
        _object(root, section)["properties"][leaf] = _json_type(key) | {"description": text}
    return json.dumps(root, indent=1, ensure_ascii=False) + "\n"


def _object(root: dict[str, Any], section: str) -> dict[str, Any]:
    node = root
    for part in section.split("."):
        node = node["properties"].setdefault(part, {"type": "object", "additionalProperties": False, "properties": {}})
    return node


def _json_type(key: Key) -> dict[str, Any]:
    """Return the JSON Schema of a key."""
    choices = _json_choices(key.annotation)
    choices += [{"type": ALSO_TAKEN[key.name]}] if key.name in ALSO_TAKEN else []
    return {"anyOf": choices, "default": list(key.default) if isinstance(key.default, (list, tuple)) else key.default}


def _json_choices(annotation: Any) -> list[dict[str, Any]]:
    """Return the JSON Schemas of an annotation; interpolations are text, so any value may also be `${...}`."""
    parts = [_json_part(part, limits_of(annotation)) for part in options(annotation)]
    return [{"type": "string", "pattern": r"^\$\{.+\}$"}, *parts]


def _json_part(part: Any, limits: Range) -> dict[str, Any]:
    if typing.get_origin(part) is typing.Literal:
        return {"enum": list(typing.get_args(part))}
    if typing.get_origin(part) is list:
        return {"type": "array", "items": _json_part(typing.get_args(part)[0], Range())}
    if isinstance(part, type) and dataclasses.is_dataclass(part):
        texts = read_field_docs(part)
        properties = {
            name: {"anyOf": _json_choices(annotation), "description": LINK.sub(r"\1", texts.get(name, ""))}
            for name, annotation in fields_of(part).items()
        }
        return {
            "type": "object",
            "required": required_fields(part),
            "additionalProperties": False,
            "properties": properties,
        }
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    schema: dict[str, Any] = {"type": names.get(typing.get_origin(part) or part, "object")}
    if part in (int, float) and limits.also is None:
        pairs = (
            ("minimum", limits.minimum),
            ("maximum", limits.maximum),
            ("exclusiveMinimum", limits.above),
            ("exclusiveMaximum", limits.below),
        )
        schema |= {word: limit for word, limit in pairs if limit is not None}
    return schema


def main() -> int:
    """Write all rendered files."""
    TABLE.write_text(render_table(), encoding="utf-8")
    (ROOT / "docs" / "configuration.md").write_text(render_document(), encoding="utf-8")
    (ROOT / "configs").mkdir(exist_ok=True)
    (ROOT / "configs" / "schema.json").write_text(render_schema(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
