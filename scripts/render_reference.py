"""Write what is rendered from code: the table of `TrainingArguments`, `docs/configuration.md`, `configs/schema.json` and `AGENTS.md`.

`python scripts/render_reference.py` after each change of the schema or of the transformers pin. The table lets layer 1 check
`train.*` without importing torch; `tests/contract/test_config_command.py` notices drift.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

TABLE = ROOT / "sft_play" / "config" / "training_arguments.json"
NAMES = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null", dict: "dict", list: "list[str]"}


def members(annotation: Any) -> list[Any]:
    """Returns the members of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [part for member in typing.get_args(annotation) for part in members(member)]
    return [annotation]


def type_names(annotation: Any) -> tuple[list[str], list[str]]:
    """Returns the JSON types of a field and the words it takes, if they are an enumeration."""
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
    """Returns the table: field -> type, default, choices and help of the installed transformers."""
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
    """Returns the text of `sft_play/config/training_arguments.json`."""
    head = {"rendered_by": "python scripts/render_reference.py"}
    return json.dumps({**head, **training_arguments()}, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Write these files."""
    TABLE.write_text(render_table(), encoding="utf-8")
    from sft_play.__main__ import COMMANDS
    from sft_play.config.reference import render_agents, render_document, render_schema

    (ROOT / "docs" / "configuration.md").write_text(render_document(), encoding="utf-8")
    (ROOT / "configs").mkdir(exist_ok=True)
    (ROOT / "configs" / "schema.json").write_text(render_schema(), encoding="utf-8")
    (ROOT / "AGENTS.md").write_text(render_agents(COMMANDS), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
