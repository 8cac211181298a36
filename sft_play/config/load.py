"""From files, environment and command line to one frozen `Config` in which every key knows its origin.

Order, the later wins: the schema's defaults, `extends:` parents, the file, `SFT_SECTION_KEY` variables, the command
line. All problems are reported together, each with its place.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from json import JSONDecodeError
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sft_play.config import names
from sft_play.config.keys import extra_keys, find_key, schema_keys, sections, variable_name, variables
from sft_play.config.layers import (
    TRAINING,
    VALIDATION,
    Override,
    Value,
    Values,
    as_meant,
    interpolate,
    leaves,
    read_file,
    texts_in,
)
from sft_play.config.metrics import metrics_hint
from sft_play.config.reader import INVALID, Mismatch, convert, shown
from sft_play.config.rules import check_rules
from sft_play.config.schema import Config, DataSource, needs_own_word
from sft_play.config.yaml_files import is_writable, wrap
from sft_play.errors import CheckpointError, UserError, raise_all, without_secret
from sft_play.files import read_json, write_json

DEFAULT = "default"
NOT_KEYS = ("SFT_PLAY_",)
"""Variables of the program itself, such as `SFT_PLAY_CACHE`."""
OLD_TIMEOUT = "NCCL_TIMEOUT"
NO_EFFECT = ("train.eval_accumulation_steps", "train.eval_do_concat_batches")
"""What transformers' evaluation does with the logits of its batches; ours keeps none (`evaluation.held_out`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A configuration and where each of its values came from."""

    config: Config
    origins: Mapping[str, str]
    """Dotted key -> `configs/x.yaml:12`, `make TRAIN_LEARNING_RATE=...`, `environment SFT_...` or `default`."""
    path: Path | None = None
    notices: tuple[str, ...] = ()
    """What the user should read, such as an old variable that was understood."""
    of_run: frozenset[str] = frozenset()
    """Keys whose value a file of a run's folder said."""

    def typed(self, key: str) -> bool:
        """Whether somebody wrote this key, rather than the schema."""
        return self.origins.get(key, DEFAULT) != DEFAULT


def load_config(
    path: Path | None, overrides: Iterable[Override] = (), environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Return the configuration of a file with overrides. Raise `UserError` with every problem at once.

    A run's `config.json` is taken as the run had it, so that `CONFIG=runs/NAME/config.json` makes the same run again.
    """
    found = Values()
    if path is not None and is_saved(path):
        found, path = _read_saved(path, of_run=True)
    elif path is not None:
        read_file(path, found)
    environ = os.environ if environ is None else environ
    _read_environment(environ, found)
    _read_overrides(overrides, found)
    _note_other_data(found)
    _note_unread(environ, found)
    return _finish(found, path)


def read_config(path: Path, overrides: Iterable[Override] = (), *, of_run: bool = True) -> LoadedConfig:
    """Return the configuration of a run's `config.json`. Raise `CheckpointError` for a file that is none, else
    `UserError`.

    What needs this user's own word (`schema.OWN_WORD`) is left out, unless this user's command has just written the
    file (`of_run=False`).
    """
    found, source = _read_saved(path, of_run=of_run)
    _read_overrides(overrides, found)
    return _finish(found, source)


def _note_other_data(found: Values) -> None:
    """Notes what is left of the quickstart's settings, which fit its own rows, where others are trained on."""
    ours = [layer for layer, name in found.presets.items() if name == "quickstart"]
    others = any(found.values[key].layer not in ours for key in TRAINING if key in found.values)
    kept = [f"`{key}: {shown(value.node)}`" for key, value in found.values.items() if value.layer in ours]
    if others and kept:
        found.notices.append(
            f"the data are not the quickstart's, whose settings fit its own: {', '.join(kept)}; `run_cpu` is the same"
            " without them"
        )


def is_saved(path: Path) -> bool:
    """Whether a file is the `config.json` of a run, rather than a configuration that somebody wrote as JSON."""
    if path.suffix != ".json":
        return False
    try:
        saved = read_json(path)
    except (OSError, ValueError):
        return False
    return isinstance(saved, dict) and {"config", "origins"} <= saved.keys()


def _read_saved(path: Path, *, of_run: bool) -> tuple[Values, Path | None]:
    """Return the values of a run's `config.json`, and the file that they came from. Raise `CheckpointError`."""
    try:
        saved = read_json(path, follow=False)
        return _values_of(saved, place=str(path), of_run=of_run), Path(saved["path"]) if saved.get("path") else None
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"there is no run in `{path.parent}`", hint="RUN= takes the name or the folder of a run"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"not the configuration of a run: {_in_words(error)}",
            place=str(path),
            hint=(
                "if it is damaged, put it back from a backup, or from a run of another RUN_NAME that the same command"
                " starts: it has the same one"
            ),
        ) from None


def _in_words(error: Exception) -> str:
    if isinstance(error, JSONDecodeError):
        return f"it is cut short, or no JSON ({error})"
    return f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__} {error}"


def override_config(loaded: LoadedConfig, overrides: Iterable[Override]) -> LoadedConfig:
    """Return `loaded` with further overrides. Raise `UserError`."""
    overrides = list(overrides)
    if not overrides:
        return loaded
    found = _values_of(saved_form(loaded), place=str(loaded.path))
    found.values = {key: replace(value, of_run=key in loaded.of_run) for key, value in found.values.items()}
    found.notices = list(loaded.notices)
    _read_overrides(overrides, found)
    return _finish(found, loaded.path)


def _values_of(saved: Mapping[str, Any], place: str, *, of_run: bool = False) -> Values:
    """Return a complete configuration as one layer: what this version's defaults are does not matter to a run that
    exists.
    """
    tree, origins, found = dict(saved["config"]), saved["origins"], Values(of_run=of_run)
    tree["train"] = {**tree["train"], **tree["train"]["extra"]}
    del tree["train"]["extra"]
    for key, node in leaves(wrap(tree), ""):
        if find_key(key) is None:
            found.problems.append(UserError(f"`{key}` is not a key of this version", place=place))
        else:
            found.put(key, node, str(origins.get(key, DEFAULT)), literal=True)
    found.of_run = False
    return found


def save_config(loaded: LoadedConfig, path: Path) -> None:
    """Write `config.json`: the whole configuration, the origin of every key, and the file it came from."""
    write_json(path, saved_form(loaded))


def saved_form(loaded: LoadedConfig) -> dict[str, Any]:
    """Return what `config.json` holds."""
    config = replace(loaded.config, train=replace(loaded.config.train, extra=dict(loaded.config.train.extra)))
    origins, path = dict(loaded.origins), str(loaded.path) if loaded.path else None
    return {"config": dataclasses.asdict(config), "origins": origins, "path": path}


# ---- Environment and command line


def _read_environment(environ: Mapping[str, str], found: Values) -> None:
    """Add `SFT_SECTION_KEY` variables as one layer; one that is nearly such a name is an error, any other is not
    ours.
    """
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
    """Say which variables of the environment look like settings and are none, where nothing else was typed for them."""
    typed = {key for key, value in found.values.items() if value.layer >= found.layer - 1}
    for name in sorted(environ):
        if (key := names.ambient_key(name)) and key not in typed:
            found.notices.append(f"`{name}` of the environment is not read; `SFT_{variable_name(key)}` would be")
        elif name.lower() in names.OF_ENVIRONMENT and name not in names.OF_ENVIRONMENT.values():
            found.notices.append(
                f"`{name}` of the environment is not read; `{names.OF_ENVIRONMENT[name.lower()]}` would be"
            )


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
    place = without_secret(place, key)
    return names.refusal(key, place, variable_name) or UserError(
        f"`{key}` is not taken: there is no such key", place=place
    )


# ---- Together


def _finish(found: Values, path: Path | None) -> LoadedConfig:
    """Interpolate, check types, fill in defaults, apply rules."""
    interpolate(found)
    found.settle_batch()
    values: dict[str, Any] = {}
    for key, value in found.values.items():
        known = find_key(key)
        assert known is not None
        mismatches: list[Mismatch] = []
        converted = convert(as_meant(key, value.node), known.annotation, key, mismatches)
        found.problems += [_as_error(mismatch, value, path) for mismatch in mismatches]
        if not mismatches and not all(map(is_writable, texts_in(value.node))):
            found.problems.append(UserError(f"`{key}` holds a character that no file can hold", place=value.origin))
        if converted is not INVALID:
            values[key] = converted
    if "model.name" not in found.values and values.get("model.init") != "random":
        hint = "set MODEL_NAME, or write it in the file"
        found.problems.append(UserError("`model.name` is missing", place=str(path) if path else None, hint=hint))
    raise_all(found.problems)
    origins = {key: found.values[key].origin if key in found.values else DEFAULT for key in schema_keys()}
    origins |= {key: value.origin for key, value in found.values.items() if key in extra_keys()}
    for short, key in (TRAINING, VALIDATION):
        if values.get(short) and values.get(key) is None:
            values[key], origins[key] = [DataSource(path=values[short])], origins[short]
    config = _build(values)
    raise_all(check_rules(config, origins))
    for key in NO_EFFECT:
        notice = (
            f"{origins[key]}: `{key}` has no effect: evaluation adds up losses and keeps no logits, whatever its value"
        )
        if key in found.values and values[key] != schema_keys()[key].default and notice not in found.notices:
            found.notices.append(notice)
    of_run = frozenset(key for key, value in found.values.items() if value.of_run)
    return LoadedConfig(
        config=config, origins=MappingProxyType(origins), path=path, notices=tuple(found.notices), of_run=of_run
    )


def own_words(loaded: LoadedConfig) -> list[str]:
    """Return as `NAME=value` what this user said for themselves, for a command that begins with a copy of this
    configuration.
    """
    keys = [key for key in loaded.origins if needs_own_word(key) and not key.startswith(("slurm.", "kubernetes."))]
    values = {
        key: getattr(loaded.config.launch, key.partition(".")[2], None) for key in keys if key.startswith("launch.")
    }
    values |= {
        f"train.{name}": value for name, value in loaded.config.train.extra.items() if needs_own_word(f"train.{name}")
    }
    if loaded.config.model.trust_remote_code and "model.trust_remote_code" not in loaded.of_run:
        values["model.trust_remote_code"] = "true"
    return [
        f"{variable_name(key)}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
        if value is not None
    ]


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
    """Return the dataclasses, filled from the inside out."""
    extra = {key.removeprefix("train."): value for key, value in values.items() if key in extra_keys()}

    def section(name: str) -> Any:
        record = sections()[name]
        keys = {item.name: f"{name}.{item.name}".removeprefix(".") for item in dataclasses.fields(record)}
        inner = {leaf: section(key) for leaf, key in keys.items() if key in sections()}
        return record(**inner, **{leaf: known[key] for leaf, key in keys.items() if key in known})

    known = {**values, "train.extra": MappingProxyType(extra)}
    config: Config = section("")
    return config
