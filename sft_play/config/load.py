"""Load files, environment and command line into one frozen `Config` that records the origin of every key.

The steps: files with places -> layers (`layers`) -> merged, each value with its origin -> `${...}` (`interpolation`) ->
converted to the schema's types (`reader`) -> rules (`rules`). Order of the layers, the later wins: the schema's
defaults, `extends:` parents, the file, `SFT_SECTION_KEY` variables, the command line. All problems are reported
together, each with its place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from json import JSONDecodeError
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sft_play.config import names
from sft_play.config.interpolation import interpolate, texts_in
from sft_play.config.keys import as_meant, extra_keys, find_key, schema_keys, sections, variable_name
from sft_play.config.layers import (
    DEFAULT,
    OLD_TIMEOUT,
    TIMEOUT,
    TRAINING,
    VALIDATION,
    Layer,
    Override,
    Value,
    environment_layer,
    file_layers,
    merge,
    saved_layer,
    settle_batch,
    timeout_layer,
    typed_layer,
)
from sft_play.config.metrics import LIBRARY
from sft_play.config.reader import Mismatch, convert
from sft_play.config.rules import check_rules
from sft_play.config.schema import Config, DataSource, needs_own_word
from sft_play.config.yaml_files import is_writable
from sft_play.errors import CheckpointError, UserError, raise_all
from sft_play.files import read_json, read_object, write_json
from sft_play.runs.folder import runs_folder

NO_EFFECT = ("train.eval_accumulation_steps", "train.eval_do_concat_batches")
"""Keys about logits of transformers' evaluation; ours keeps no logits (`evaluation.held_out`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A configuration and where each of its values came from."""

    config: Config
    origins: Mapping[str, str]
    """Dotted key -> `configs/x.yaml:12`, `make TRAIN_LEARNING_RATE=...`, `environment SFT_...` or `default`."""
    path: Path | None = None
    notices: tuple[str, ...] = ()
    """Notices for the user, such as one about an old variable."""
    of_run: frozenset[str] = frozenset()
    """Keys whose value comes from a file in a run's folder."""

    def typed(self, key: str) -> bool:
        """Return whether a user set this key."""
        return self.origins.get(key, DEFAULT) != DEFAULT


def load_config(
    path: Path | None, overrides: Iterable[Override] = (), environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Return the configuration of a file with overrides. Raise `UserError` with every problem at once.

    A run's `config.json` is read as saved, so that `CONFIG=runs/NAME/config.json` repeats the run.
    """
    environ, problems = os.environ if environ is None else environ, list[UserError]()
    typed = [environment_layer(environ, problems), typed_layer(overrides, problems)]
    if path is not None and _is_saved(path):
        saved, path = _read_saved(path, problems, of_run=True)
        files = [saved]
        problems += _without_effect(typed)  # a saved file lists every key
    else:
        files = file_layers(path, problems) if path is not None else []
        problems += _without_effect([*files, *typed])
    loaded = _finish([timeout_layer(environ), *files, *typed], path, problems)
    if not environ.get(OLD_TIMEOUT):
        return loaded
    text, origin = f"no library reads `{OLD_TIMEOUT}`", loaded.origins[TIMEOUT]
    ours = (
        f"; it sets `{TIMEOUT}` to {environ[OLD_TIMEOUT]}"
        if OLD_TIMEOUT in origin
        else f", and `{TIMEOUT}` is given: {origin}"
    )
    return replace(loaded, notices=(*loaded.notices, text + ours))


def read_config(path: Path, overrides: Iterable[Override] = (), *, of_run: bool = True) -> LoadedConfig:
    """Return the configuration of a run's `config.json`. Raise `CheckpointError` for a file that is not one, else
    `UserError`.

    Keys that only this user may set (`schema.OWN_WORD`) are skipped, unless this user's command has just written the
    file (`of_run=False`).
    """
    problems: list[UserError] = []
    saved, source = _read_saved(path, problems, of_run=of_run)
    return _finish([saved, typed_layer(overrides, problems)], source, problems)


def override_config(loaded: LoadedConfig, overrides: Iterable[Override]) -> LoadedConfig:
    """Return `loaded` with further overrides. Raise `UserError`."""
    problems: list[UserError] = []
    typed = typed_layer(overrides, problems)
    if not typed and not problems:
        return loaded
    base = saved_layer(saved_form(loaded), str(loaded.path), problems, of_run=False)
    base = [(key, replace(value, of_run=key in loaded.of_run)) for key, value in base]
    return _finish([base, typed], loaded.path, problems, loaded.notices)


# A run's `config.json`.


def _is_saved(path: Path) -> bool:
    """Return whether a file is a run's `config.json`, not a configuration that somebody wrote as JSON."""
    return path.suffix == ".json" and {"config", "origins"} <= read_object(path, follow=True).keys()


def _read_saved(path: Path, problems: list[UserError], *, of_run: bool) -> tuple[Layer, Path | None]:
    """Return the layer of a run's `config.json` and the YAML file that it was loaded from. Raise `CheckpointError`."""
    try:
        saved = read_json(path, follow=False)
        source = Path(saved["path"]) if saved.get("path") else None
        return saved_layer(saved, str(path), problems, of_run=of_run), source
    except (FileNotFoundError, NotADirectoryError):
        problem, hint = f"there is no run in `{path.parent}`", "RUN= takes the name or the folder of a run"
        raise CheckpointError(problem, hint=hint) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        text = f"{type(error).__name__} {error}"
        if isinstance(error, JSONDecodeError):
            text = f"it is cut short, or not JSON ({error})"
        elif isinstance(error, KeyError):
            text = f"it has no {error}"
        raise CheckpointError(
            f"not the configuration of a run: {text}",
            place=str(path),
            hint=(
                "if it is damaged, restore it from a backup, or copy it from a run that the same command starts under"
                " another RUN_NAME"
            ),
        ) from None


def save_config(loaded: LoadedConfig, path: Path) -> None:
    """Write `config.json`: the complete configuration, the origin of every key, and the file it was loaded from."""
    write_json(path, saved_form(loaded))


def saved_form(loaded: LoadedConfig) -> dict[str, Any]:
    """Return the content of `config.json`."""
    config = replace(loaded.config, train=replace(loaded.config.train, extra=dict(loaded.config.train.extra)))
    origins, path = dict(loaded.origins), str(loaded.path) if loaded.path else None
    return {"config": dataclasses.asdict(config), "origins": origins, "path": path}


def flatten(loaded: LoadedConfig) -> dict[str, Any]:
    """Return dotted key -> plain value; entries of lists are without their empty fields."""
    layer = saved_layer(saved_form(loaded), "", [], of_run=False)
    return {key: _without_null(value.node.plain()) for key, value in layer}


def _without_null(value: Any) -> Any:
    entries = value if isinstance(value, list) else []
    if any(isinstance(entry, dict) for entry in entries):
        return [{name: part for name, part in entry.items() if part is not None} for entry in entries]
    return value


# From layers to a configuration.


ADAPTED = ("lora", "qlora")
"""Values of `tuning.mode` with adapters."""


def modes_with(key: str) -> tuple[str, ...]:
    """Return the values of `tuning.mode` with which a key has an effect; none for a key that always has."""
    return ADAPTED if key.startswith("tuning.lora.") else ("qlora",) if key == "tuning.quantization" else ()


def _without_effect(layers: Sequence[Layer]) -> Iterable[UserError]:
    """Yield an error for each key that `tuning.mode` makes useless, unless the mode was set after it: a word on the
    command line may change that of a file with adapters.
    """
    modes = [(number, value) for number, layer in enumerate(layers) for key, value in layer if key == "tuning.mode"]
    first, mode = (modes[-1][0], modes[-1][1].node.value) if modes else (0, "lora")
    for key, value in (item for layer in layers[first:] for item in layer):
        used = modes_with(key)
        if used and mode in ("full", *ADAPTED) and mode not in used and (value.literal or not _is_default(key, value)):
            message, hint = f"`{key}` has no effect with `tuning.mode: {mode}`", f"TUNING_MODE={used[0]}, or omit it"
            yield UserError(message, place=value.origin, hint=hint)


def _is_default(key: str, value: Value) -> bool:
    """Return whether a value is the schema's, as in a file that lists every key."""
    schema_key = schema_keys()[key]
    return bool(convert(as_meant(key, value.node), schema_key.annotation, key, []) == schema_key.default)


def _finish(
    layers: Sequence[Layer], path: Path | None, problems: list[UserError], before: Iterable[str] = ()
) -> LoadedConfig:
    """Merge, interpolate, convert, fill in defaults and apply rules; `before` are earlier notices."""
    notices = list(before)
    values = interpolate(merge(layers, problems, notices), problems)
    settle_batch(values, notices)
    converted = _convert(values, path, problems)
    raise_all(problems)
    origins = dict.fromkeys(schema_keys(), DEFAULT) | {key: value.origin for key, value in values.items()}
    for short, key in (TRAINING, VALIDATION):
        if converted.get(short) and converted.get(key) is None:
            converted[key], origins[key] = [DataSource(path=converted[short])], origins[short]
    config = _build(converted)
    raise_all([*check_rules(config, origins), *_template(config, values)])
    notices += [
        f"{origins[key]}: `{key}` has no effect: evaluation adds up losses and keeps no logits, whatever its value"
        for key in NO_EFFECT
        if key in values and converted[key] != schema_keys()[key].default
    ]
    notices += _beside_file(config, values)
    of_run = frozenset(key for key, value in values.items() if value.of_run)
    return LoadedConfig(
        config=config,
        origins=MappingProxyType(origins),
        path=path,
        notices=tuple(dict.fromkeys(notices)),
        of_run=of_run,
    )


def _template(config: Config, values: Mapping[str, Value]) -> Iterator[UserError]:
    """Yield the error of a chat template that does not exist; runs keep the text of theirs."""
    value, template = values.get("data.chat_template"), config.data.chat_template
    if value and template and not value.of_run and (error := names.unknown_template(template, value.origin)):
        yield error


def _beside_file(config: Config, values: Mapping[str, Value]) -> Iterator[str]:
    """Yield a notice for each path in a file that leads somewhere from the file's folder only, and not from here."""
    data, held_out = config.data, config.data.validation
    paths = {
        **{key: [source.path for source in data.sources] for key in TRAINING},
        **{key: [source.path for source in held_out] for key in VALIDATION if isinstance(held_out, list)},
        "model.name": [config.model.name],
        "data.chat_template": [data.chat_template or ""],
    }
    for key in (key for key in paths if key in values and not values[key].of_run):
        file = Path(values[key].origin.rpartition(":")[0])
        for path in paths[key] if file.is_file() else ():
            with contextlib.suppress(OSError):  # of a name that no disk takes
                here = Path(path).exists() or (key == "model.name" and (runs_folder() / path).exists())
                if path and not here and (there := file.parent / path).exists():
                    yield f"`{path}` counts from the folder in which you typed the command; `{there}` exists"


def _convert(values: Mapping[str, Value], path: Path | None, problems: list[UserError]) -> dict[str, Any]:
    """Return each key's value converted to the schema's type, and report mismatches."""
    converted: dict[str, Any] = {}
    for key, value in values.items():
        schema_key, mismatches = find_key(key), list[Mismatch]()
        assert schema_key is not None
        converted[key] = convert(as_meant(key, value.node), schema_key.annotation, key, mismatches)
        problems += [_as_error(mismatch, value, path) for mismatch in mismatches]
        if not mismatches and not is_writable("".join(texts_in(value.node))):
            problems.append(UserError(f"`{key}` contains a character that no file can contain", place=value.origin))
    if not {"model.name", "model.adapter"} & values.keys() and converted.get("model.init") != "random":
        hint = "set MODEL_NAME, or write it in the file"
        problems.append(UserError("`model.name` is missing", place=str(path) if path else None, hint=hint))
    return converted


def _as_error(mismatch: Mismatch, value: Value, path: Path | None) -> UserError:
    """Return the error of a mismatch, with its line and the best hint."""
    place, text = value.origin, mismatch.node.value
    if path is not None and mismatch.node.line and ":" in place and not value.literal:
        place = f"{place.rpartition(':')[0]}:{mismatch.node.line}"
    hint = names.VALUES.get(text.lower()) if isinstance(text, str) else None
    return UserError(f"`{mismatch.key}` {mismatch.problem}", place=place, hint=hint or mismatch.hint)


def _build(values: Mapping[str, Any]) -> Config:
    """Return the filled dataclasses."""
    extra = {key.removeprefix("train."): value for key, value in values.items() if key in extra_keys()}
    complete = {**values, "train.extra": MappingProxyType(extra)}

    def section(name: str) -> Any:
        record = sections()[name]
        keys = {item.name: f"{name}.{item.name}".removeprefix(".") for item in dataclasses.fields(record)}
        inner = {leaf: section(key) for leaf, key in keys.items() if key in sections()}
        return record(**inner, **{leaf: complete[key] for leaf, key in keys.items() if key in complete})

    config: Config = section("")
    return config


def own_words(loaded: LoadedConfig) -> list[str]:
    """Return `NAME=value` words for the keys that only this user may set, for a command that starts from a copy of
    this configuration.
    """
    config = loaded.config
    values = {
        key: value
        for key, value in flatten(loaded).items()
        if needs_own_word(key) and key.startswith(("launch.", "train.")) and value is not None
    }
    if config.model.trust_remote_code and "model.trust_remote_code" not in loaded.of_run:
        values["model.trust_remote_code"] = True
    if any(name.startswith(LIBRARY) for name in config.eval.metrics) and "eval.metrics" not in loaded.of_run:
        values["eval.metrics"] = config.eval.metrics
    return [
        f"{variable_name(key)}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in values.items()
    ]
