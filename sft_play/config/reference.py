"""`make config`: the resolved configuration as YAML, each key with where its value came from; and `sft-play COMMAND --help`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from sft_play.config.call import Call, Command
from sft_play.config.load import LoadedConfig
from sft_play.config.names import VARIABLES
from sft_play.config.yaml_files import scalar_text

COLUMN = 44
"""Where origins begin, when the value leaves room."""


def show(call: Call) -> int:
    """Prints the configuration and returns 0."""
    loaded = call.load_config()
    flat = flatten(loaded)
    if call.json:
        print(json.dumps({key: {"value": value, "origin": loaded.origins[key]} for key, value in flat.items()}, indent=2))
    else:
        print(as_yaml(flat, loaded.origins))
    return 0


def flatten(loaded: LoadedConfig) -> dict[str, Any]:
    """Returns dotted key -> plain value, in the schema's order; further `TrainingArguments` stand behind the schema's own."""
    flat: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        for item in dataclasses.fields(value):
            key, inner = f"{name}.{item.name}" if name else item.name, getattr(value, item.name)
            if key == "train.extra":
                flat.update({f"train.{field}": _plain(part) for field, part in inner.items()})
            elif dataclasses.is_dataclass(inner):
                walk(inner, key)
            else:
                flat[key] = _plain(inner)

    walk(loaded.config, "")
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {k: v for k, v in dataclasses.asdict(value).items() if v is not None}
    return dict(value) if isinstance(value, Mapping) else value


def as_yaml(flat: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Returns block YAML that can be saved and used again; origins are comments."""
    lines: list[str] = []
    open_sections: list[str] = []
    for key, value in flat.items():
        *sections, name = key.split(".")
        shared = 0
        while shared < min(len(sections), len(open_sections)) and sections[shared] == open_sections[shared]:
            shared += 1
        for depth in range(shared, len(sections)):
            lines.append("  " * depth + f"{sections[depth]}:")
        open_sections = sections
        text = "  " * len(sections) + f"{name}: {scalar_text(value)}"
        lines.append(f"{text:<{COLUMN}}  # {_comment(origins[key])}")
    return "\n".join(lines)


def _comment(origin: str) -> str:
    """A comment ends at the line's end, whatever was typed."""
    return origin if origin.isprintable() else origin.encode("unicode_escape").decode("ascii")


# `sft-play COMMAND --help`.


def command_help(name: str, row: Command) -> str:
    """Returns what `sft-play NAME --help` prints."""
    taken = [option for option in VARIABLES if option in row.options]
    lines = [f"sft-play {name} NAME=value ...", "", f"  {row.help}", ""]
    width = max(map(len, [*taken, "SECTION_KEY"])) + 2
    lines += [f"  {option:<{width}}{VARIABLES[option]}" for option in taken]
    if row.overrides:
        lines.append(f"  {'SECTION_KEY':<{width}}any key of docs/configuration.md: `TRAIN_BATCH_SIZE=1` is `train.batch_size: 1`")
    return "\n".join(lines if taken or row.overrides else [*lines, "  it takes no variables"])
