"""The layers of a configuration (files and what they extend, a run's `config.json`, the environment, typed words) and
which of them wins.

Each function returns the values of a source with their origins; `merge` stacks the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_origin

from sft_play.config import names
from sft_play.config.keys import Key, find_key, sections, variable_name, variables
from sft_play.config.reader import options, quoted, shown
from sft_play.config.schema import needs_own_word
from sft_play.config.yaml_files import YamlNode, parse_yaml, read_yaml, resolve_scalar, wrap
from sft_play.errors import IN_WHEEL, UserError, without_secret
from sft_play.files import typed_path
from sft_play.runs.folder import is_strangers

DEFAULT = "default"
GLOBAL_BATCH = "train.global_batch_size"
TIMEOUT, OLD_TIMEOUT = "launch.timeout_seconds", "NCCL_TIMEOUT"
NOT_KEYS = ("SFT_PLAY_",)
"""Prefixes of the program's own variables, such as `SFT_PLAY_CACHE`."""
TRAINING, VALIDATION = ("data.train_path", "data.sources"), ("data.val_path", "data.validation")
WITHOUT_OTHERS = (None, "none", "tensorboard", ["tensorboard"])
"""Values of `train.report_to` that contact no server."""
RIVALS = (TRAINING, VALIDATION, ("train.warmup_ratio", "train.warmup_steps"))
"""Keys that express the same setting: a later layer's replaces an earlier layer's, and both in one file are a
contradiction.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """A key set on the command line."""

    key: str
    """`train.learning_rate`"""
    text: str
    """The value verbatim; the key's type decides how it is read."""
    origin: str
    """As the user typed it: `make TRAIN_LEARNING_RATE=1e-4`."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value before it is checked."""

    node: YamlNode
    origin: str
    literal: bool = False
    """Whether `${` in it is literal: words typed on a command line are never interpolated."""
    of_run: bool = False
    """Whether it comes from a file in a run's folder or a cache, which a stranger may have written."""
    preset: str = ""
    """The shipped preset that it comes from: a preset's validation data belong to its training data."""
    layer: int = 0
    """Number of its layer in `merge`; the higher wins."""


Layer = list[tuple[str, Value]]
"""Dotted key and value, in the order of the source."""


# Files: where they are, what they extend, and their values.


SHIPPED = IN_WHEEL if IN_WHEEL.is_dir() else IN_WHEEL.parents[1]
"""Parent of `README.md` and the folders `configs`, `deepspeed`, `examples` and `docs`: next to the package in a clone,
inside it in a wheel (`setup.py`).
"""
PRESETS = SHIPPED / "configs"
"""The shipped presets."""
DATA = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".pq", ".arrow", ".feather")
"""Endings of data files; `.json` may be a configuration too."""


def config_path(
    name: str, folder: str = "configs", takes: str = "CONFIG= takes a YAML file or a preset's name"
) -> Path:
    """Return the file that `CONFIG=` names; a bare name is that of a shipped file in `folder`. Raise `UserError`."""
    path, preset = typed_path(name), shipped(f"{folder}/{name}.yaml")
    if not path.suffix and path.name == name and not path.exists() and preset.is_file():
        return preset
    if path.is_dir():
        raise UserError(f"`{name}` is a folder; expected a YAML file")
    if path.suffix.lower() in DATA:
        hint = f"make train CONFIG=file.yaml DATA_TRAIN_PATH={name}"
        raise UserError(f"`{name}` contains rows and is not a configuration", hint=hint)
    if not path.exists():
        near = names.closest_file(path, SHIPPED / folder, folder)
        hint = f"did you mean `{near if Path(near).is_file() else Path(near).stem}`?" if near else takes
        raise UserError(f"there is no file `{name}`", hint=hint)
    return path


def preset_path(name: str) -> Path:
    """Return the path of a preset."""
    return shipped(f"configs/{name}.yaml")


def shipped(name: str) -> Path:
    """Return the shortest path of a shipped file; a copy made by `sft-play init`, which the user may have changed,
    comes first.
    """
    if Path(name).is_file():
        return Path(name)
    path = SHIPPED / name
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def file_layers(
    path: Path, problems: list[UserError], chain: tuple[Path, ...] = (), *, of_run: bool = False
) -> list[Layer]:
    """Return the layers of a file, its parents' first. Raise `UserError` if it is not a YAML mapping.

    `of_run`: whether a file in a run's folder extends it.
    """
    if path.resolve() in (other.resolve() for other in chain):
        way = " -> ".join(str(p) for p in (*chain, path))
        raise UserError(f"`extends` forms a cycle: {way}", place=str(chain[0]))
    root = read_yaml(path)
    tree = {} if root.value is None else root.value
    if not isinstance(tree, dict):
        place, hint = f"{path}:{root.line}", "a file begins with `model:`"
        raise UserError(f"`{shown(root)}` is not a mapping of sections", place=place, hint=hint)
    parents = _parents(tree.get("extends"), path)
    # The file's name and place decide, not its contents, which a stranger may have written.
    of_run = of_run or path.name == "config.json" or is_strangers(path)
    layers = [layer for parent in parents for layer in file_layers(parent, problems, (*chain, path), of_run=of_run)]
    preset = path.stem if path.resolve().parent == PRESETS else ""
    layer: Layer = []
    for key, node in leaves(YamlNode({name: part for name, part in tree.items() if name != "extends"})):
        place = f"{path}:{node.line}"
        if find_key(key):
            layer.append((key, Value(node, place, of_run=of_run, preset=preset)))
        else:
            problems.append(names.unknown_key(key, place, node))
    return [*layers, layer]


def _parents(node: YamlNode | None, path: Path) -> Iterator[Path]:
    for entry in [] if node is None else node.value if isinstance(node.value, list) else [node]:
        place = f"{path}:{entry.line}"
        name = entry.value if isinstance(entry.value, str) else entry.text
        if not name:
            raise UserError(f"`extends` is `{shown(entry)}`; expected a preset's name or a file", place=place)
        sibling, preset = path.parent / name, preset_path(name)
        if sibling.is_file():
            yield sibling
        elif "/" not in name and preset.is_file():
            yield preset
        else:
            near, hint = names.closest_file(Path(name), PRESETS), "files count from the folder of the file that extends"
            if (path.parent / f"{name}.yaml").is_file():
                hint = f"did you mean `{name}.yaml`, the file next to this one?"
            elif near:
                hint = f"did you mean `{Path(near).stem}`?"
            raise UserError(f"`extends` is `{name}`, which is neither a preset nor a file", place=place, hint=hint)


def leaves(node: YamlNode, prefix: str = "") -> Iterator[tuple[str, YamlNode]]:
    """Yield dotted key and node of each value of a mapping, descending into sections only and skipping empty ones."""
    for name, part in node.value.items():
        key = f"{prefix}.{name}" if prefix else name
        is_section = bool(name) and key in sections()
        if is_section and isinstance(part.value, dict):
            yield from leaves(part, key)
        elif not is_section or part.value is not None:
            yield key, part


def saved_layer(saved: Mapping[str, Any], place: str, problems: list[UserError], *, of_run: bool) -> Layer:
    """Return the layer of a configuration saved by `config.load.saved_form`, which is complete: this version's defaults
    do not apply to an existing run. A key that this version lacks is an error, unless it had its default.
    """
    tree, origins, layer = dict(saved["config"]), saved["origins"], Layer()
    train = {**tree["train"], **tree["train"]["extra"]}
    del train["extra"]
    for key, node in leaves(wrap(tree | {"train": train})):
        if find_key(key):
            layer.append((key, Value(node, str(origins.get(key, DEFAULT)), literal=True, of_run=of_run)))
        elif str(origins.get(key, DEFAULT)) != DEFAULT:
            problems.append(UserError(f"`{key}` is not a key of this version", place=place))
    return layer


# The environment and the command line.


def timeout_layer(environ: Mapping[str, str]) -> Layer:
    """Return what `NCCL_TIMEOUT` sets, below every other layer."""
    text = environ.get(OLD_TIMEOUT)
    return (
        typed_layer([Override(key=TIMEOUT, text=text, origin=f"environment {OLD_TIMEOUT}={text}")], []) if text else []
    )


def environment_layer(environ: Mapping[str, str], problems: list[UserError]) -> Layer:
    """Return the `SFT_SECTION_KEY` variables and report names that nearly match one; any other variable is not ours."""
    overrides = []
    for name, text in sorted(environ.items()):
        bare = name.removeprefix("SFT_")
        if bare == name or name.startswith(NOT_KEYS):
            continue
        if key := variables().get(bare):
            overrides.append(Override(key=key, text=text, origin=f"environment {name}={text}"))
        elif bare.partition("_")[0].lower() in sections() or get_close_matches(bare, variables(), n=1, cutoff=0.85):
            better = names.suggest(bare, options=())
            hint = f"did you mean `SFT_{variable_name(better)}`?" if better else "docs/configuration.md lists every key"
            problems.append(UserError(f"unknown variable `{name}`", place="environment", hint=hint))
    return typed_layer(overrides, problems)


def typed_layer(overrides: Iterable[Override], problems: list[UserError]) -> Layer:
    """Return the layer of typed words, each read by its key's type."""
    layer: Layer = []
    for override in overrides:
        key, text, place = find_key(override.key), override.text, override.origin
        if key is None:
            refused = names.refusal(override.key, without_secret(place, override.key), variable_name)
            assert refused is not None
            problems.append(refused)
            continue
        try:
            layer.append((key.name, Value(node_of_text(text, key), place, literal=True)))
        except UserError as error:
            problem = f"`{key.name}` is `{quoted(text)}`: {error.message}"
            problems.append(UserError(problem, place=place, hint=error.hint))
    return layer


def node_of_text(text: str, key: Key) -> YamlNode:
    """Return the value of `text` as `key` takes it: text verbatim, lists and mappings as YAML, else a scalar.

    An empty string or `null` is null if the key allows it. Raise `UserError` for a list or mapping that is not YAML.
    """
    parts = options(key.annotation)
    if text in ("", "null") and type(None) in parts:
        return YamlNode(None)
    if all(part in (str, type(None)) for part in parts):
        return YamlNode(text)
    holds_more = any((get_origin(part) or part) in (list, dict, Mapping) for part in parts)
    if holds_more and text.lstrip().startswith(("[", "{", "- ")):
        return parse_yaml(text, key.name)
    value = resolve_scalar(text.strip())
    if value is None or isinstance(value, str):
        value = text if str in parts else text.strip()
    return YamlNode(value, text=text)


# Stacking the layers.


def merge(layers: Iterable[Layer], problems: list[UserError], notices: list[str]) -> dict[str, Value]:
    """Return each key's value from the last layer that sets it, without values that a later layer contradicts.

    Keys that only this user may set are not read from a run's folder.
    """
    merged: dict[str, Value] = {}
    for number, layer in enumerate(layers):
        ours: dict[str, Value] = {}
        for key, value in layer:
            if value.of_run and needs_own_word(key):
                if value.node.plain() not in (getattr(find_key(key), "default", None), *WITHOUT_OTHERS):
                    hint = f"type {variable_name(key)}=... with the command if you want it"
                    notices.append(f"`{key}` is not read from a run's folder: {hint}")
            elif key in ours:  # `train.seed: 1` and `train: {seed: 2}` in one file
                problem = f"`{key}` is given twice, also in {ours[key].origin}"
                problems.append(UserError(problem, place=value.origin, hint="give it once"))
            else:
                ours[key] = replace(value, layer=number)
        for other in [other for key, value in ours.items() for other in _contradicted(key, value, merged)]:
            merged.pop(other, None)
        merged |= ours
    _note_other_data(merged, notices)
    return merged


def _contradicted(key: str, value: Value, merged: Mapping[str, Value]) -> Iterator[str]:
    """Yield the keys of earlier layers that a value replaces."""
    yield from (other for pair in RIVALS if key in pair for other in pair if other != key)
    if key == "train.epochs":
        yield "train.max_steps"  # which would hide them
    if key in TRAINING:
        yield from (other for other in VALIDATION if other in merged and merged[other].preset)
    if key == "train.eval_strategy" and value.node.value != "steps":
        yield "train.eval_steps"


def _note_other_data(merged: Mapping[str, Value], notices: list[str]) -> None:
    """Note which settings of the quickstart still apply when other rows are trained on."""
    settings = [f"`{key}: {shown(value.node)}`" for key, value in merged.items() if value.preset == "quickstart"]
    if settings and any(merged[key].preset != "quickstart" for key in TRAINING if key in merged):
        notices.append(
            f"the data are not the quickstart's, whose settings fit its own: {', '.join(settings)}; `run_cpu` is the"
            " same without them"
        )


def settle_batch(values: dict[str, Value], notices: list[str]) -> None:
    """Drop an earlier layer's global batch when a later one sets micro-batch and accumulation: typed words outrank a
    file (STATUS B2).
    """
    numbers = [values.get(key) for key in ("train.batch_size", "train.grad_accum", GLOBAL_BATCH)]
    micro, steps, rows = (value if value and value.node.value != "auto" else None for value in numbers)
    if micro and steps and rows and rows.layer < min(micro.layer, steps.layer):
        del values[GLOBAL_BATCH]
        notices.append(
            f"the rows of a step are {shown(micro.node)} x {shown(steps.node)} x the number of devices, by"
            f" `{micro.origin}` and `{steps.origin}`: they outrank `{GLOBAL_BATCH}` {shown(rows.node)} of {rows.origin}"
        )
