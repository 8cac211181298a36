"""Renders `docs/configuration.md` and `configs/schema.json` from the schema's own documentation."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sft_play.config.keys import REFUSED, REQUIRED, Key, documented, extra_keys, schema_keys, sections
from sft_play.config.schema import DataSource
from sft_play.config.types import describe, options
from sft_play.config.values import ALSO_TAKEN
from sft_play.config.yaml_files import scalar_text

RENDERED = "<!-- Rendered by `make render`; edit `sft_play/config/schema.py`. -->"
INTRODUCTION = """# Configuration

One YAML file describes a run. Only `model.name` is required ([not from scratch](pretraining.md)). An unknown key, a wrong type
or a value out of range stops the command with its place; all problems are shown at once.

```bash
make config CONFIG=configs/quickstart.yaml TRAIN_LEARNING_RATE=1e-4
```

prints every key with where its value came from.

- **Overrides**: `SECTION_KEY=value` sets `section.key`: `TRAIN_BATCH_SIZE=1`, `DATA_SOURCES='[{path: a.jsonl}, {path: b.jsonl}]'`. Values are
  taken letter for letter; `null` or nothing is null where a key takes it.
- **Order**, the later wins: defaults, `extends:` parents, the file, `SFT_SECTION_KEY` in the environment, the command line. `DATA_SOURCES=` also
  replaces a file's `data.train_path`; both in one file are refused.
- **Presets**: `extends: run_bnb` takes the keys of `configs/run_bnb.yaml` or of a file next to yours; `CONFIG=run_bnb` uses it as it is.
  Your training data also replace a preset's validation data.
- **YAML 1.2**: only `true` and `false` are booleans, `2e-4` is a number. `${section.key}` is another key's value.
- **Editors**: begin a file with `# yaml-language-server: $schema=configs/schema.json`.
- `auto` means that the plan decides and says why: `make plan CONFIG=file.yaml`.
"""


def render_document() -> str:
    """Returns the text of `docs/configuration.md`."""
    lines = [RENDERED, INTRODUCTION]
    for section, record in sections().items():
        keys = [key for key in schema_keys().values() if key.name.rpartition(".")[0] == section]
        if not section or not keys:
            continue
        about = (record.__doc__ or "").strip().splitlines()[0]
        lines += [f"## `{section}`", "", about, "", "| key | value | default | meaning |", "|---|---|---|---|"]
        texts = documented(record)
        for key in keys:
            leaf = key.name.rpartition(".")[2]
            lines.append(f"| `{leaf}` | {_cell(_expected(key))} | {_default(key)} | {_cell(texts.get(leaf, ''))} |")
        lines.append("")
        if section == "data":
            lines += _sources()
    return "\n".join([*lines, *_extras(), *_refused()]) + "\n"


def _sources() -> list[str]:
    lines = ["### Entries of `data.sources` and `data.validation`", "", "| key | value | meaning |", "|---|---|---|"]
    texts = documented(DataSource)
    for name, annotation in get_type_hints(DataSource).items():
        lines.append(f"| `{name}` | {_cell(describe(annotation))} | {_cell(texts.get(name, ''))} |")
    return [*lines, ""]


def _extras() -> list[str]:
    keys = [f"`{key.name.rpartition('.')[2]}` ({_default(key)})" for key in extra_keys().values()]
    about = "Other fields of the pinned `transformers.TrainingArguments`, with their defaults:"
    return ["## Further keys of `train`", "", about, ", ".join(keys) + ".", ""]


def _refused() -> list[str]:
    lines = ["## Fields of `TrainingArguments` that are refused", "", "| field | use instead | why |", "|---|---|---|"]
    fields: dict[tuple[str | None, str], list[str]] = {}
    for name, reason in REFUSED.items():
        fields.setdefault(reason, []).append(f"`{name}`")
    return lines + [
        f"| {', '.join(names)} | {f'`{instead}`' if instead else ''} | {_cell(why)} |" for (instead, why), names in fields.items()
    ]


def _expected(key: Key) -> str:
    words = [word for part in options(key.annotation) if get_origin(part) is Literal for word in get_args(part)]
    return f"one of {len(words)} words, such as `{words[0]}`" if len(words) > 12 else describe(key.annotation, key.limits)


def _default(key: Key) -> str:
    return "required" if key.default is REQUIRED else f"`{scalar_text(key.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def render_schema() -> str:
    """Returns the text of `configs/schema.json`, a JSON Schema for editors."""
    root: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": "Rendered by `make render` from sft_play/config/schema.py.",
        "title": "SFT-Play configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "extends": {"description": "Preset or file, or several, whose keys this file changes.", "type": ["string", "array"]}
        },
    }
    for section, record in sections().items():
        if section:
            node = _object(root, section)
            node["description"] = (record.__doc__ or "").strip().splitlines()[0]
    for key in [*schema_keys().values(), *extra_keys().values()]:
        section, _, leaf = key.name.rpartition(".")
        text = key.help or documented(sections()[section]).get(leaf, "")
        _object(root, section)["properties"][leaf] = _json_type(key) | {"description": text}
    return json.dumps(root, indent=1, ensure_ascii=False) + "\n"


def _object(root: dict[str, Any], section: str) -> dict[str, Any]:
    node = root
    for part in section.split("."):
        node = node["properties"].setdefault(part, {"type": "object", "additionalProperties": False, "properties": {}})
    return node


def _json_type(key: Key) -> dict[str, Any]:
    """Returns the JSON Schema of a key; interpolations are text, so every value may be `${...}` too."""
    choices: list[dict[str, Any]] = [{"type": "string", "pattern": r"^\$\{.+\}$"}]
    for part in options(key.annotation):
        choices.append(_json_part(part, key))
    choices += [{"type": ALSO_TAKEN[key.name]}] if key.name in ALSO_TAKEN else []
    schema: dict[str, Any] = {"anyOf": choices}
    return schema if key.default is REQUIRED else schema | {"default": _json_default(key.default)}


def _json_entry(entry: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(entry):
        return _json_source()
    return {"type": "object" if get_origin(entry) is Mapping else "string"}


def _json_part(part: Any, key: Key) -> dict[str, Any]:
    if get_origin(part) is Literal:
        return {"enum": list(get_args(part))}
    if get_origin(part) is list:
        (entry,) = get_args(part)
        return {"type": "array", "items": _json_entry(entry)}
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    name = names.get(get_origin(part) or part, "object")
    schema: dict[str, Any] = {"type": name}
    if name in ("integer", "number") and key.limits.also is None:
        pairs = (
            ("minimum", key.limits.minimum),
            ("maximum", key.limits.maximum),
            ("exclusiveMinimum", key.limits.above),
            ("exclusiveMaximum", key.limits.below),
        )
        schema |= {word: limit for word, limit in pairs if limit is not None}
    return schema


def _json_source() -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, annotation in get_type_hints(DataSource).items():
        words = [word for part in options(annotation) if get_origin(part) is Literal for word in get_args(part)]
        properties[name] = ({"enum": words} if words else {"type": ["string", "null"]}) | {
            "description": documented(DataSource).get(name, "")
        }
    return {"type": "object", "required": ["path"], "additionalProperties": False, "properties": properties}


def _json_default(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
