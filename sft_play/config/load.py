"""From files, environment and command line to one frozen `Config` in which every key knows its origin.

Order, the later wins: the schema's defaults, `extends:` parents, the file, `SFT_SECTION_KEY` variables, the command line. All problems
are reported together, each with its place.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sft_play.config import names
from sft_play.config.keys import REQUIRED, Key, extra_keys, find_key, schema_keys, sections, variable_name, variables
from sft_play.config.schema import Config, DataSource
from sft_play.config.types import INVALID, Mismatch, allows_null, convert, takes_text
from sft_play.config.yaml_source import Node, parse_yaml, read_yaml, wrap
from sft_play.errors import UserError, raise_all
from sft_play.files import read_json, write_json

if TYPE_CHECKING:
    from sft_play.config.call import Call, Override

PRESETS = Path(__file__).resolve().parents[2] / "configs"
"""The shipped presets."""
DEFAULT = "default"
NOT_KEYS = frozenset({"SFT_PLAY_CACHE", "SFT_PLAY_TEST_CACHE"})
OLD_TIMEOUT = "NCCL_TIMEOUT"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A configuration and where each of its values came from."""

    config: Config
    origins: Mapping[str, str]
    """Dotted key -> `configs/x.yaml:12`, `make TRAIN_LEARNING_RATE=...`, `environment SFT_...` or `default`."""
    path: Path | None = None
    notices: tuple[str, ...] = ()
    """What the user should read, such as an old variable that was understood."""

    def typed(self, key: str) -> bool:
        """Whether somebody wrote this key, rather than the schema."""
        return self.origins.get(key, DEFAULT) != DEFAULT


@dataclass(frozen=True, slots=True)
class _Value:
    """One value before it is checked."""

    node: Node
    origin: str
    literal: bool = False
    """Whether `${` in it stands for itself: what was typed on a command line is never interpolated."""


@dataclass(slots=True)
class _Sources:
    """Values collected so far, and what is wrong with them."""

    values: dict[str, _Value] = field(default_factory=dict)
    problems: list[UserError] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def load_config(path: Path | None, overrides: Iterable[Override] = (), environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """Returns the configuration of a file with overrides. Raises `UserError` with every problem at once."""
    found = _Sources()
    if path is not None:
        _read_file(path, found, ())
    _read_environment(os.environ if environ is None else environ, found)
    _read_overrides(overrides, found)
    return _finish(found, path)


def load_for_call(call: Call, default: str | None) -> LoadedConfig:
    """Returns the configuration that a command is about. Raises `UserError`; prints notices to stderr."""
    run = call.options.get("RUN")
    if call.options.get("CONFIG") or not run:
        name = call.options.get("CONFIG") or default
        if not name:
            raise UserError(f"`{call.command}` needs a configuration", hint=f"make {call.command} CONFIG=configs/quickstart.yaml")
        loaded = load_config(_config_path(name), call.overrides)
    else:
        from sft_play.runs.folder import runs_folder

        folder = Path(run) if Path(run).is_dir() else runs_folder() / run
        loaded = override_config(read_config(folder / "config.json"), call.overrides)
    for notice in loaded.notices:
        print(f"note: {notice}", file=sys.stderr)
    return loaded


def read_config(path: Path, overrides: Iterable[Override] = ()) -> LoadedConfig:
    """Returns the configuration of a run's `config.json`. Raises `UserError`."""
    try:
        saved = read_json(path)
        nested, origins = saved["config"], saved["origins"]
        source = Path(saved["path"]) if saved.get("path") else None
    except FileNotFoundError:
        raise UserError("there is no such run, or it was never configured", place=str(path)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"is not a run's configuration: {error}", place=str(path)) from None
    found = _Sources()
    nested = {**nested, "train": {**nested.get("train", {}), **nested.get("train", {}).get("extra", {})}}
    nested["train"].pop("extra", None)
    for key, value in _leaves(wrap(nested), ""):
        if find_key(key) is None:
            found.problems.append(UserError(f"`{key}` is not a key of this version", place=str(path)))
        elif origins.get(key, DEFAULT) != DEFAULT:
            found.values[key] = _Value(value, origins[key], literal=True)
    _read_overrides(overrides, found)
    return _finish(found, source)


def override_config(loaded: LoadedConfig, overrides: Iterable[Override]) -> LoadedConfig:
    """Returns `loaded` with further overrides. Raises `UserError`."""
    overrides = list(overrides)
    if not overrides:
        return loaded
    found = _Sources()
    nested = _as_tree(loaded.config)
    for key, value in _leaves(wrap(nested), ""):
        if loaded.typed(key):
            found.values[key] = _Value(value, loaded.origins[key], literal=True)
    _read_overrides(overrides, found)
    return _finish(found, loaded.path)


def save_config(loaded: LoadedConfig, path: Path) -> None:
    """Writes `config.json`: the whole configuration, the origin of every key, and the file it came from."""
    value = {"config": dataclasses.asdict(_plain(loaded.config)), "origins": dict(loaded.origins)}
    write_json(path, value | {"path": str(loaded.path) if loaded.path else None})


def _plain(config: Config) -> Config:
    return replace(config, train=replace(config.train, extra=dict(config.train.extra)))


def _as_tree(config: Config) -> dict[str, Any]:
    tree = dataclasses.asdict(_plain(config))
    tree["train"].update(tree["train"].pop("extra"))
    return tree


# ---- Files


def _config_path(name: str) -> Path:
    """Returns the file that `CONFIG=` names; a bare preset name is its file."""
    path = Path(name)
    preset = _preset(name)
    if not path.suffix and path.name == name and not path.exists() and preset.is_file():
        return preset
    if not path.is_file():
        near = names.closest_file(path, PRESETS)
        raise UserError(
            f"there is no file `{name}`",
            hint=f"did you mean `{near}`?" if near else "CONFIG= takes a YAML file or a preset's name",
        )
    return path


def _preset(name: str) -> Path:
    """Returns the path of a preset, as short as it can be shown."""
    path = PRESETS / f"{name}.yaml"
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _read_file(path: Path, found: _Sources, chain: tuple[Path, ...]) -> None:
    """Adds a file's values, its parents' first."""
    if path.resolve() in (other.resolve() for other in chain):
        names_of = " -> ".join(str(p) for p in (*chain, path))
        raise UserError(f"`extends` goes round in a circle: {names_of}", place=str(chain[0]))
    root = read_yaml(path)
    if root.value is None:
        root = Node({}, line=1)
    if not isinstance(root.value, dict):
        raise UserError("a configuration is a mapping of sections", place=f"{path}:{root.line}", hint="model:\n  name: ...")
    tree = dict(root.value)
    parent = tree.pop("extends", None)
    for one in _parents(parent, path):
        _read_file(one, found, (*chain, path))
    for key, node in _leaves(Node(tree, line=1), ""):
        place = f"{path}:{node.line}"
        if find_key(key) is None:
            found.problems.append(_unknown_key(key, place, node))
        else:
            found.values[key] = _Value(node, place)


def _parents(node: Node | None, path: Path) -> list[Path]:
    if node is None:
        return []
    place = f"{path}:{node.line}"
    wanted = node.plain() if isinstance(node.value, list) else [node.value]
    parents = []
    for name in wanted:
        if not isinstance(name, str) or not name:
            raise UserError(f"`extends` is `{name}`; expected a preset's name or a file", place=place)
        beside, preset = path.parent / name, _preset(name)
        if beside.is_file():
            parents.append(beside)
        elif "/" not in name and preset.is_file():
            parents.append(preset)
        else:
            near = names.closest_file(Path(name), PRESETS)
            hint = f"did you mean `{Path(near).stem}`?" if near else "files count from the folder of the file that extends"
            raise UserError(f"`extends` is `{name}`, which is neither a preset nor a file", place=place, hint=hint)
    return parents


def _leaves(node: Node, prefix: str) -> Iterable[tuple[str, Node]]:
    """Yields dotted key -> node, going into sections only."""
    assert isinstance(node.value, dict)
    for name, part in node.value.items():
        key = f"{prefix}.{name}" if prefix else name
        if key in sections() and part.value is None:
            continue  # an empty section says nothing
        if key in sections() and isinstance(part.value, dict):
            yield from _leaves(part, key)
        else:
            yield key, part


def _unknown_key(key: str, place: str, node: Node) -> UserError:
    if key in sections():
        return UserError(f"`{key}` is `{node.plain()}`; expected a mapping of its keys", place=place)
    if refusal := names.refusal(key):
        instead, why = refusal
        return UserError(f"`{key}` is not taken: {why}", place=place, hint=f"use `{instead}`" if instead else None)
    section, _, leaf = key.rpartition(".")
    better = names.suggest(leaf, section)
    return UserError(
        f"unknown key `{key}`",
        place=place,
        hint=f"did you mean `{better}`?" if better else "docs/configuration.md lists every key",
    )


# ---- Environment and command line


def _read_environment(environ: Mapping[str, str], found: _Sources) -> None:
    for name, text in sorted(environ.items()):
        if not name.startswith("SFT_") or name in NOT_KEYS:
            continue
        key = variables().get(name.removeprefix("SFT_"))
        origin = f"environment {name}={text}"
        if key is not None and find_key(key):
            _add_text(key, text, origin, found)
        elif name.removeprefix("SFT_").partition("_")[0].lower() in sections():
            better = names.suggest(name.removeprefix("SFT_").lower())
            hint = f"did you mean `SFT_{variable_name(better)}`?" if better else "docs/configuration.md lists every key"
            found.problems.append(UserError(f"unknown variable `{name}`", place="environment", hint=hint))
    timeout = environ.get(OLD_TIMEOUT)
    if timeout and "launch.timeout_seconds" not in found.values:
        _add_text("launch.timeout_seconds", timeout, f"environment {OLD_TIMEOUT}={timeout}", found)
        found.notices.append(f"no library reads `{OLD_TIMEOUT}`; it sets `launch.timeout_seconds` to {timeout}")


def _read_overrides(overrides: Iterable[Override], found: _Sources) -> None:
    for one in overrides:
        if find_key(one.key) is None:
            instead, why = names.refusal(one.key) or (None, "there is no such key")
            hint = f"use `{variable_name(instead) if instead and '.' in instead else instead}`" if instead else None
            found.problems.append(UserError(f"`{one.key}` is not taken: {why}", place=one.origin, hint=hint))
        else:
            _add_text(one.key, one.text, one.origin, found)


def _add_text(key: str, text: str, origin: str, found: _Sources) -> None:
    """Adds a value typed as text; the key's type says whether it is text or YAML."""
    known = find_key(key)
    assert known is not None
    found.values[key] = _Value(_node_of(text, known), origin, literal=True)


def _node_of(text: str, key: Key) -> Node:
    if "\0" in text:
        return Node(text, text=text)
    if not text and allows_null(key.annotation):
        return Node(None)
    only_text = takes_text(key.annotation) and not key.extra
    if only_text:
        return Node(None if text == "null" and allows_null(key.annotation) else text)
    try:
        node = parse_yaml(text, key.name)
    except UserError:
        return Node(text, text=text)
    if node.value is None and not allows_null(key.annotation):
        return Node(text, text=text)
    return node


# ---- Together


def _finish(found: _Sources, path: Path | None) -> LoadedConfig:
    """Interpolates, checks types, fills defaults in, applies rules."""
    from sft_play.config.rules import check_rules

    _interpolate(found)
    values: dict[str, Any] = {}
    for key, value in found.values.items():
        known = find_key(key)
        assert known is not None
        mismatches: list[Mismatch] = []
        converted = convert(value.node, known.annotation, known.limits, key, mismatches)
        found.problems += [_as_error(mismatch, value, path) for mismatch in mismatches]
        if converted is not INVALID:
            values[key] = converted
    for known in schema_keys().values():
        if known.default is REQUIRED and known.name not in found.values:
            found.problems.append(
                UserError(
                    f"`{known.name}` is missing",
                    place=str(path) if path else None,
                    hint=f"set {known.variable}, or write it in the file",
                )
            )
    raise_all(found.problems)
    origins = {key: found.values[key].origin if key in found.values else DEFAULT for key in schema_keys()}
    origins |= {key: value.origin for key, value in found.values.items() if key in extra_keys()}
    config = _with_paths(_build(values))
    raise_all(check_rules(config, origins))
    return LoadedConfig(config=config, origins=MappingProxyType(origins), path=path, notices=tuple(found.notices))


def _as_error(mismatch: Mismatch, value: _Value, path: Path | None) -> UserError:
    place = value.origin
    if path is not None and mismatch.node.line and ":" in place and not value.literal:
        place = f"{place.rpartition(':')[0]}:{mismatch.node.line}"
    return UserError(f"`{mismatch.key}` {mismatch.problem}", place=place, hint=mismatch.hint)


def _interpolate(found: _Sources) -> None:
    """Resolves `${section.key}` and OmegaConf's own resolvers in values that come from files."""
    open_ones = [key for key, value in found.values.items() if not value.literal and _has_interpolation(value.node)]
    if not open_ones:
        return
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    unresolved = (OmegaConfBaseException, RecursionError, ValueError)
    for key in list(open_ones):
        try:
            OmegaConf.create({"value": found.values[key].node.plain()})
        except unresolved as error:  # not OmegaConf's grammar at all
            _cannot_resolve(key, error, found)
            open_ones.remove(key)
    layers = [
        OmegaConf.create(_tree_of(_defaults())),
        OmegaConf.create(_tree_of({key: _escaped(value) for key, value in found.values.items()})),
    ]
    merged = OmegaConf.merge(*layers)
    for key in open_ones:
        value = found.values[key]
        try:
            resolved = OmegaConf.select(merged, key, throw_on_missing=True)
            plain = OmegaConf.to_container(resolved, resolve=True) if OmegaConf.is_config(resolved) else resolved
        except unresolved as error:
            _cannot_resolve(key, error, found)
            continue
        found.values[key] = _Value(replace(wrap(plain, value.node.line)), value.origin)


def _cannot_resolve(key: str, error: Exception, found: _Sources) -> None:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    found.problems.append(UserError(f"`{key}` cannot be resolved: {first}", place=found.values.pop(key).origin))


def _has_interpolation(node: Node) -> bool:
    if isinstance(node.value, dict):
        return any(_has_interpolation(part) for part in node.value.values())
    if isinstance(node.value, list):
        return any(_has_interpolation(part) for part in node.value)
    return isinstance(node.value, str) and "${" in node.value


def _escaped(value: _Value) -> Any:
    plain = value.node.plain()
    return plain.replace("${", "\\${") if value.literal and isinstance(plain, str) else plain


def _defaults() -> dict[str, Any]:
    return {key.name: key.default for key in schema_keys().values() if key.default is not REQUIRED}


def _tree_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree


def _build(values: Mapping[str, Any]) -> Config:
    """Returns the dataclasses, filled from the inside out."""
    extra = {key.removeprefix("train."): value for key, value in values.items() if key in extra_keys()}

    def section(name: str, record: type) -> Any:
        arguments: dict[str, Any] = {}
        for item in dataclasses.fields(record):
            key = f"{name}.{item.name}" if name else item.name
            if key in sections():
                arguments[item.name] = section(key, sections()[key])
            elif key == "train.extra":
                arguments[item.name] = MappingProxyType(extra)
            elif key in values:
                arguments[item.name] = values[key]
        return record(**arguments)

    config: Config = section("", Config)
    return config


def _with_paths(config: Config) -> Config:
    """Turns `data.train_path` and `data.val_path` into the sources that they are short for."""
    data = config.data
    if data.train_path and not data.sources:
        data = replace(data, sources=[DataSource(path=data.train_path)])
    if data.val_path and data.validation is None:
        data = replace(data, validation=[DataSource(path=data.val_path)])
    return replace(config, data=data)
