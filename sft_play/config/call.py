"""A command with what the user gave it, and the configuration that it is about; `make config` and `sft-play COMMAND --help`."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sft_play.config.layers import Override, config_path
from sft_play.config.load import LoadedConfig, is_saved, load_config, override_config, read_config
from sft_play.config.names import VARIABLES
from sft_play.config.yaml_files import scalar_text
from sft_play.errors import UserError
from sft_play.runs.folder import give_consent, in_run, run_path, runs_folder

LARGEST_PORT = 65_535
TRUE, FALSE = frozenset({"1", "true", "yes"}), frozenset({"", "0", "false", "no"})


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the table of commands: where the code is, what the user reads in `make help`, which variables it takes."""

    target: str
    """`module:function`; the function takes a `Call` and returns an exit code."""
    help: str
    takes: str = ""
    """The names of its variables, with spaces between."""
    overrides: bool = True
    """Whether `SECTION_KEY=value` is accepted."""

    @property
    def options(self) -> frozenset[str]:
        """The names of its variables."""
        return frozenset(self.takes.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A command with everything that came with it."""

    command: str
    options: Mapping[str, str] = field(default_factory=dict)
    """`CONFIG`, `RUN`, `NUM_GPUS`, ...: only those that the command takes."""
    overrides: tuple[Override, ...] = ()
    json: bool = False
    """Whether machine-readable output is wanted on stdout."""
    trusts_code: bool = False
    """Whether MODEL_TRUST_REMOTE_CODE=true was typed with `RUN`: this user lets the code of the run's base model run."""

    def load_config(self, default: str | None = None) -> LoadedConfig:
        """Return the configuration of `CONFIG` (else of `RUN`, else of `default`) with the overrides; prints notices to stderr.

        Raise `UserError` with every problem at once.
        """
        run = self.options.get("RUN")
        if run and self.options.get("CONFIG"):
            raise UserError(
                "`CONFIG` and `RUN` are both given",
                hint="a run keeps the configuration that it was started with; give one of them",
            )
        if not run:
            name = self.options.get("CONFIG") or default
            if not name:
                raise UserError(f"`{self.command}` needs a configuration", hint="CONFIG=my.yaml, or a preset: CONFIG=quickstart")
            loaded = load_config(config_path(name), self.overrides)
        else:
            folder = run_path(run) or (Path(run) if Path(run).is_dir() else runs_folder() / run)
            loaded = override_config(read_config(folder / "config.json"), self.overrides)
        for notice in loaded.notices:
            print(f"note: {notice}", file=sys.stderr)
        note_consent(self, loaded)
        return loaded

    def port(self, name: str) -> int | None:
        """Return a port, `None` when it was not given. Raise `UserError`."""
        port = self.integer(name, minimum=1)
        if port is not None and port > LARGEST_PORT:
            raise UserError(f"`{name}` is `{port}`; expected a port, 1 to {LARGEST_PORT}")
        return port

    def flag(self, name: str) -> bool:
        """Return whether an option is switched on. Raise `UserError`."""
        text = self.options.get(name, "").lower()
        if text not in TRUE | FALSE:
            raise UserError(f"`{name}` is `{self.options[name]}`; expected `1` or `0`")
        return text in TRUE

    def integer(self, name: str, minimum: int = 0) -> int | None:
        """Return a whole-number option, `None` when it was not given. Raise `UserError`."""
        text = self.options.get(name)
        if text is None:
            return None
        if not re.fullmatch(r"[0-9]{1,10}", text.strip()) or int(text) < minimum:
            raise UserError(f"`{name}` is `{text}`; expected an integer >= {minimum}")
        return int(text)


def note_consent(call: Call, loaded: LoadedConfig) -> None:
    """Notes what code the user lets run: by the words of this command, or in a YAML of theirs."""
    path = config_path(call.options["CONFIG"]) if "CONFIG" in call.options else None
    # By name and place, not by its contents, which a stranger chose.
    saved = "RUN" in call.options or (path is not None and (path.name == "config.json" or is_saved(path) or in_run(path)))
    typed = {override.key for override in call.overrides}
    if loaded.config.model.trust_remote_code and (not saved or "model.trust_remote_code" in typed):
        give_consent("model")
    if not saved or "eval.metrics" in typed:
        give_consent("metrics")


# `make config`: the resolved configuration as YAML, each key with where its value came from.


COLUMN = 44
"""Where origins begin, when the value leaves room."""


def show(call: Call) -> int:
    """Print the configuration and return 0."""
    loaded = call.load_config()
    flat = flatten(loaded)
    if call.json:
        print(json.dumps({key: {"value": value, "origin": loaded.origins[key]} for key, value in flat.items()}, indent=2))
    else:
        print(as_yaml(flat, loaded.origins))
    return 0


def flatten(loaded: LoadedConfig) -> dict[str, Any]:
    """Return dotted key -> plain value, in the schema's order; further `TrainingArguments` stand behind the schema's own."""
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
    """Return block YAML that can be saved and used again; origins are comments."""
    lines: list[str] = []
    opened: set[str] = set()
    for key, value in flat.items():
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if (head := ".".join(sections[: depth + 1])) not in opened:
                opened.add(head)
                lines.append("  " * depth + f"{section}:")
        text = "  " * len(sections) + f"{name}: {scalar_text(value)}"
        lines.append(f"{text:<{COLUMN}}  # {_comment(origins[key])}")
    return "\n".join(lines)


def _comment(origin: str) -> str:
    """A comment ends at the line's end, whatever was typed."""
    return origin if origin.isprintable() else origin.encode("unicode_escape").decode("ascii")


# `sft-play COMMAND --help`.


def command_help(name: str, row: Command) -> str:
    """Return what `sft-play NAME --help` prints."""
    taken = [option for option in VARIABLES if option in row.options]
    lines = [f"sft-play {name} NAME=value ...", "", f"  {row.help}", ""]
    width = max(map(len, [*taken, "SECTION_KEY"])) + 2
    lines += [f"  {option:<{width}}{VARIABLES[option]}" for option in taken]
    if row.overrides:
        lines.append(f"  {'SECTION_KEY':<{width}}any key of docs/configuration.md: `TRAIN_BATCH_SIZE=1` is `train.batch_size: 1`")
    return "\n".join(lines if taken or row.overrides else [*lines, "  it takes no variables"])
