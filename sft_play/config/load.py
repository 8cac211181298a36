"""From files, environment and command line to one frozen `Config` in which every key knows its origin.

Order, the later wins: the schema's defaults, `extends:` parents, the file, `SFT_SECTION_KEY` variables, the command line. All problems
are reported together, each with its place.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from json import JSONDecodeError
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sft_play.config import names
from sft_play.config.keys import REQUIRED, extra_keys, find_key, schema_keys, sections, variable_name, variables
from sft_play.config.metrics import metrics_hint
from sft_play.config.schema import Config, DataSource
from sft_play.config.sources import config_path, leaves, read_file
from sft_play.config.types import INVALID, Mismatch, convert, shown
from sft_play.config.values import TRAINING, Value, Values, as_meant, interpolate
from sft_play.config.yaml_files import wrap
from sft_play.errors import CheckpointError, UserError, raise_all
from sft_play.files import read_json, write_json

if TYPE_CHECKING:
    from sft_play.config.call import Call, Override

DEFAULT = "default"
NOT_KEYS = ("SFT_PLAY_",)
"""Variables of the program itself, such as `SFT_PLAY_CACHE`."""
DEEPEST = 60
"""Levels of lists and mappings that a saved configuration may have."""
OLD_TIMEOUT = "NCCL_TIMEOUT"
NO_EFFECT = ("train.eval_accumulation_steps", "train.eval_do_concat_batches")
"""What transformers' evaluation does with the logits of its batches; ours keeps none (`training.held_out`)."""


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


def load_config(path: Path | None, overrides: Iterable[Override] = (), environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """Returns the configuration of a file with overrides. Raises `UserError` with every problem at once.

    A run's `config.json` is taken as the run had it, so that `CONFIG=runs/NAME/config.json` makes the same run again.
    """
    found = Values()
    if path is not None and _is_saved(path):
        found, path = _read_saved(path)
    elif path is not None:
        read_file(path, found)
    environ = os.environ if environ is None else environ
    _read_environment(environ, found)
    _read_overrides(overrides, found)
    _note_other_data(found)
    _note_unread(environ, found)
    return _finish(found, path)


def load_for_call(call: Call, default: str | None) -> LoadedConfig:
    """Returns the configuration that a command is about. Raises `UserError`; prints notices to stderr."""
    run = call.options.get("RUN")
    if run and call.options.get("CONFIG"):
        raise UserError(
            "`CONFIG` and `RUN` are both given", hint="a run keeps the configuration that it was started with; give one of them"
        )
    if not run:
        name = call.options.get("CONFIG") or default
        if not name:
            raise UserError(f"`{call.command}` needs a configuration", hint="CONFIG=my.yaml, or a preset: CONFIG=quickstart")
        loaded = load_config(config_path(name), call.overrides)
    else:
        from sft_play.runs.folder import run_path, runs_folder

        folder = run_path(run) or (Path(run) if Path(run).is_dir() else runs_folder() / run)
        loaded = override_config(read_config(folder / "config.json"), call.overrides)
    for notice in loaded.notices:
        print(f"note: {notice}", file=sys.stderr)
    give_consent(call, loaded)
    return loaded


def give_consent(call: Call, loaded: LoadedConfig) -> None:
    """Notes what code the user lets run: by the words of this command, or in a YAML of theirs."""
    from sft_play.runs import consent

    path = config_path(call.options["CONFIG"]) if "CONFIG" in call.options else None
    # By name and place, not by its contents, which a stranger chose.
    saved = "RUN" in call.options or (
        path is not None and (path.name == "config.json" or _is_saved(path) or consent.in_run(path))
    )
    typed = {override.key for override in call.overrides}
    if loaded.config.model.trust_remote_code and (not saved or "model.trust_remote_code" in typed):
        consent.give("model")
    if not saved or "eval.metrics" in typed:
        consent.give("metrics")


def read_config(path: Path, overrides: Iterable[Override] = ()) -> LoadedConfig:
    """Returns the configuration of a run's `config.json`. Raises `CheckpointError` for a file that is none, else `UserError`."""
    found, source = _read_saved(path)
    _read_overrides(overrides, found)
    return _finish(found, source)


def _note_other_data(found: Values) -> None:
    """Notes what is left of the quickstart's settings, which fit its own rows, where others are trained on."""
    ours = [layer for layer, name in found.presets.items() if name == "quickstart"]
    others = any(found.values[key].layer not in ours for key in TRAINING if key in found.values)
    kept = [f"`{key}: {shown(value.node)}`" for key, value in found.values.items() if value.layer in ours]
    if others and kept:
        found.notices.append(
            f"the data are not the quickstart's, whose settings fit its own: {', '.join(kept)}; `run_cpu` is the same without them"
        )


def _is_saved(path: Path) -> bool:
    """Whether a file is the `config.json` of a run, rather than a configuration that somebody wrote as JSON."""
    if path.suffix != ".json":
        return False
    try:
        saved = read_json(path)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(saved, dict) and {"config", "origins"} <= saved.keys()


def _is_deep(value: object) -> bool:
    """Whether lists and mappings lie in each other deeper than any configuration; what reads them calls itself at each level."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            part for one in level for part in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
        ]
    return bool(level)


def _read_saved(path: Path) -> tuple[Values, Path | None]:
    """Returns the values of a run's `config.json`, and the file that they came from. Raises `CheckpointError`."""
    try:
        saved = read_json(path)
        tree, origins = dict(saved["config"]), {str(key): str(origin) for key, origin in saved["origins"].items()}
        tree["train"] = {**tree["train"], **tree["train"]["extra"]}
        del tree["train"]["extra"]
        source = Path(saved["path"]) if saved.get("path") else None
        if _is_deep(tree):
            raise ValueError(f"nested deeper than {DEEPEST} levels")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"there is no run in `{path.parent}`", hint="RUN= takes the name or the folder of a run") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"not the configuration of a run: {_in_words(error)}",
            place=str(path),
            hint="if it is damaged, put it back from a backup, or from a run of another RUN_NAME that the same command starts: it has the same one",
        ) from None
    return _values_of(tree, origins, place=str(path)), source


def _in_words(error: Exception) -> str:
    if isinstance(error, JSONDecodeError):
        return f"it is cut short, or no JSON ({error})"
    return f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__} {error}"


def override_config(loaded: LoadedConfig, overrides: Iterable[Override]) -> LoadedConfig:
    """Returns `loaded` with further overrides. Raises `UserError`."""
    overrides = list(overrides)
    if not overrides:
        return loaded
    tree = dataclasses.asdict(_plain(loaded.config))
    tree["train"].update(tree["train"].pop("extra"))
    found = _values_of(tree, loaded.origins, place=str(loaded.path))
    found.notices = list(loaded.notices)
    _read_overrides(overrides, found)
    return _finish(found, loaded.path)


def _values_of(tree: Mapping[str, Any], origins: Mapping[str, str], place: str) -> Values:
    """Returns a whole configuration as one layer: what this version's defaults are does not matter to a run that exists."""
    found = Values()
    for key, node in leaves(wrap(tree), ""):
        if find_key(key) is None:
            found.problems.append(UserError(f"`{key}` is not a key of this version", place=place))
        else:
            found.put(key, node, origins.get(key, DEFAULT), literal=True)
    return found


def save_config(loaded: LoadedConfig, path: Path) -> None:
    """Writes `config.json`: the whole configuration, the origin of every key, and the file it came from."""
    write_json(path, saved_form(loaded))


def saved_form(loaded: LoadedConfig) -> dict[str, Any]:
    """Returns what `config.json` holds."""
    value = {"config": dataclasses.asdict(_plain(loaded.config)), "origins": dict(loaded.origins)}
    return value | {"path": str(loaded.path) if loaded.path else None}


def _plain(config: Config) -> Config:
    return replace(config, train=replace(config.train, extra=dict(config.train.extra)))


# ---- Environment and command line


def _read_environment(environ: Mapping[str, str], found: Values) -> None:
    """Adds `SFT_SECTION_KEY` variables as one layer; one that is nearly such a name is an error, any other is not ours."""
    found.layer += 1
    for name, text in sorted(environ.items()):
        if not name.startswith("SFT_") or name.startswith(NOT_KEYS):
            continue
        key = variables().get(name.removeprefix("SFT_"))
        if key is not None and find_key(key):
            found.put_text(key, text, f"environment {name}={text}")
        elif key is not None:
            found.problems.append(_refused(key, place=f"environment {name}={text}"))
        elif problem := _unknown_variable(name):
            found.problems.append(problem)
    timeout = environ.get(OLD_TIMEOUT)
    if timeout and "launch.timeout_seconds" not in found.values:
        found.put_text("launch.timeout_seconds", timeout, f"environment {OLD_TIMEOUT}={timeout}")
        found.notices.append(f"no library reads `{OLD_TIMEOUT}`; it sets `launch.timeout_seconds` to {timeout}")
    elif timeout:
        origin = found.values["launch.timeout_seconds"].origin
        found.notices.append(f"no library reads `{OLD_TIMEOUT}`, and `launch.timeout_seconds` is given: {origin}")


def _note_unread(environ: Mapping[str, str], found: Values) -> None:
    """Says which variables of the environment look like settings and are none, where nothing else was typed for them."""
    typed = {key for key, value in found.values.items() if value.layer >= found.layer - 1}
    for name in sorted(environ):
        if (key := names.ambient_key(name)) and key not in typed:
            found.notices.append(f"`{name}` of the environment is not read; `SFT_{variable_name(key)}` would be")
        elif name.lower() in names.OF_ENVIRONMENT and name not in names.OF_ENVIRONMENT.values():
            found.notices.append(f"`{name}` of the environment is not read; `{names.OF_ENVIRONMENT[name.lower()]}` would be")


def _unknown_variable(name: str) -> UserError | None:
    bare = name.removeprefix("SFT_")
    prefix = bare.partition("_")[0].lower()
    of_section = bool(prefix) and prefix in sections()
    if not of_section and not get_close_matches(bare, variables(), n=1, cutoff=0.85):
        return None
    better = names.suggest(bare.lower(), options=())
    hint = f"did you mean `SFT_{variable_name(better)}`?" if better else "docs/configuration.md lists every key"
    return UserError(f"unknown variable `{name}`", place="environment", hint=hint)


def _read_overrides(overrides: Iterable[Override], found: Values) -> None:
    found.layer += 1
    for one in overrides:
        if find_key(one.key) is None:
            found.problems.append(_refused(one.key, place=one.origin))
        else:
            found.put_text(one.key, one.text, one.origin)


def _refused(key: str, place: str) -> UserError:
    instead, why = names.refusal(key) or (None, "there is no such key")
    hint = f"use `{variable_name(instead) if '.' in instead else instead}`" if instead else None
    return UserError(f"`{key}` is not taken: {why}", place=names.without_secret(place, key), hint=hint)


# ---- Together


def _finish(found: Values, path: Path | None) -> LoadedConfig:
    """Interpolates, checks types, fills defaults in, applies rules."""
    from sft_play.config.rules import check_rules

    interpolate(found)
    found.settle_batch()
    values: dict[str, Any] = {}
    for key, value in found.values.items():
        known = find_key(key)
        assert known is not None
        mismatches: list[Mismatch] = []
        converted = convert(as_meant(key, value.node), known.annotation, known.limits, key, mismatches)
        found.problems += [_as_error(mismatch, value, path) for mismatch in mismatches]
        if converted is not INVALID:
            values[key] = converted
    for known in schema_keys().values():
        if known.default is REQUIRED and known.name not in found.values:
            found.problems.append(_missing(known.name, path))
    if "model.name" not in found.values and values.get("model.init") != "random":
        found.problems.append(_missing("model.name", path))
    if values.get("data.train_path") and values.get("data.sources") == []:
        raise_all([*found.problems, _both(found, "data.train_path", "data.sources")])
    raise_all(found.problems)
    origins = {key: found.values[key].origin if key in found.values else DEFAULT for key in schema_keys()}
    origins |= {key: value.origin for key, value in found.values.items() if key in extra_keys()}
    for short, key in (("data.train_path", "data.sources"), ("data.val_path", "data.validation")):
        if values.get(short) and not values.get(key):
            origins[key] = origins[short]
    config = _with_paths(_build(values))
    raise_all(check_rules(config, origins))
    for key in NO_EFFECT:
        notice = f"{origins[key]}: `{key}` has no effect: evaluation adds up losses and keeps no logits, whatever its value"
        if key in found.values and values[key] != schema_keys()[key].default and notice not in found.notices:
            found.notices.append(notice)
    return LoadedConfig(config=config, origins=MappingProxyType(origins), path=path, notices=tuple(found.notices))


def _both(found: Values, key: str, other: str) -> UserError:
    return UserError(f"`{key}` and `{other}` are both given", place=found.values[key].origin, hint="keep one of them")


def _missing(key: str, path: Path | None) -> UserError:
    place = str(path) if path else None
    return UserError(f"`{key}` is missing", place=place, hint=f"set {variable_name(key)}, or write it in the file")


def _as_error(mismatch: Mismatch, value: Value, path: Path | None) -> UserError:
    place = value.origin
    if path is not None and mismatch.node.line and ":" in place and not value.literal:
        place = f"{place.rpartition(':')[0]}:{mismatch.node.line}"
    given = mismatch.node.value
    hint = metrics_hint(given) if mismatch.key == "eval.metrics" else None
    if isinstance(given, str):
        hint = hint or names.VALUES.get(given.lower())
    return UserError(f"`{mismatch.key}` {mismatch.problem}", place=place, hint=hint or mismatch.hint)


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
