"""What a run starts from: an adapter (`model.adapter`), or another run's model (`model.name`). No torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sft_play.config.layers import DEFAULT
from sft_play.config.load import LoadedConfig, read_config
from sft_play.config.reader import misfit
from sft_play.config.schema import Config, LoraSettings
from sft_play.errors import CheckpointError, UserError, first_line
from sft_play.files import file_sha256, read_json, text_sha256
from sft_play.runs.checkpoints import kind_of, weights_folder
from sft_play.runs.folder import RunFolder, cache_folder, meant_model, model_folder, run_path
from sft_play.runs.prepared import KEYS, ParentAdapter, Prepared, PreparedSplit, trained_too
from sft_play.runs.stamp import MADE, Stamp, own_stamp
from sft_play.text import as_typed

CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGED = "merged"
"""Folder of `make merge` in a run."""
Row = tuple[str, Mapping[Any, Any]]
IN_PEFT: Mapping[str, Row] = {
    "r": ("r", {}),
    "alpha": ("lora_alpha", {}),
    "dropout": ("lora_dropout", {}),
    "variant": ("use_dora", {"lora": False, "dora": True}),
    "rslora": ("use_rslora", {}),
    "init": ("init_lora_weights", {"default": True}),
    "rank_pattern": ("rank_pattern", {}),
    "alpha_pattern": ("alpha_pattern", {}),
    "modules_to_save": ("modules_to_save", {}),
    "bias": ("bias", {}),
}
"""Key of `tuning.lora` -> its name in PEFT's `LoraConfig`, and values with another name there; a new shape of adapters
is a row here.
"""
CHANGED_FREELY = frozenset({"dropout"})
"""Keys that may differ from those of the parent adapter, since no weight depends on them."""
MUTATING = ("pissa", "olora")
"""Initialisations that subtract the adapter's product from the base."""
CHAT = ("data.chat_template", "data.system", "data.style")
"""Keys that an adapter takes over from its run, if none of them is typed."""


def embeddings_of(lora: LoraSettings, new_tokens: int) -> Literal["none", "new", "all"]:
    """Return which rows of embedding and head are trained."""
    if lora.embeddings == "auto":
        return "new" if new_tokens else "none"
    return lora.embeddings


def peft_settings(lora: LoraSettings) -> dict[str, Any]:
    """Return the keywords of PEFT's `LoraConfig`, except its targets."""
    values = asdict(lora) | {"modules_to_save": lora.modules_to_save or None}
    values["alpha"] = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    return {
        name: other.get(values[key], values[key]) if other else values[key] for key, (name, other) in IN_PEFT.items()
    }


def _from_peft(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `tuning.lora` in an adapter's configuration, with the default initialisation; an older PEFT
    did not write every key.
    """
    settings, absent = dict[str, Any](), LoraSettings(r=8, alpha=8.0)
    for key, (name, other) in IN_PEFT.items():
        value = saved.get(name)
        missing = key == "init" or value is None
        ours = next((ours for ours, theirs in other.items() if theirs == value), value)
        settings[key] = getattr(absent, key) if missing else ours
    settings["alpha"] = float(settings["alpha"])
    settings["modules_to_save"] = [name.removeprefix(".") for name in settings["modules_to_save"]]
    return settings


def settle_parents(loaded: LoadedConfig) -> LoadedConfig:
    """Return the configuration with runs replaced by the folders of their weights, and with the shape of a parent
    adapter. Raise `UserError`, `CheckpointError`.
    """
    config, origins = loaded.config, dict(loaded.origins)
    name, adapter = config.model.name, config.model.adapter
    if run := _run_of(name):
        config = replace(config, model=replace(config.model, name=str(_whole_model(run, name, origins["model.name"]))))
    if adapter is not None:
        place, (name_of_run, _, checkpoint) = adapter, adapter.rpartition("@")
        if run := _run_of(adapter):
            place = str(weights_folder(run, None))
        elif run := _run_of(name_of_run):
            place = str(weights_folder(run, checkpoint))
        config = replace(config, model=replace(config.model, adapter=place))
        folder = find_adapter(config, origins["model.adapter"])
        stamp = own_stamp(folder)
        saved = dict(read_json(folder / CONFIG))
        if not name:
            base = _base_of(folder, stamp.base_model if stamp else saved.get("base_model_name_or_path"))
            config, origins["model.name"] = (
                replace(config, model=replace(config.model, name=base)),
                f"adapter {adapter}",
            )
        if config.tuning.adapter == "continue":
            lora = _shape(loaded, folder, saved, stamp)
            config = replace(config, tuning=replace(config.tuning, lora=lora))
            origins |= {
                f"tuning.lora.{key}": f"adapter {adapter}"
                for key in asdict(lora)
                if origins[f"tuning.lora.{key}"] == DEFAULT
            }
            chat = {key: origin for key, origin in origins.items() if key.startswith(CHAT)}
            run = run_around(folder)
            theirs = read_config(run.config).config if run and config.tuning.task != "cpt" else None
            if theirs and theirs.tuning.task != "cpt" and set(chat.values()) != {DEFAULT}:
                _refuse_other_chat(config, theirs, folder, origins)
            elif theirs and set(chat.values()) == {DEFAULT}:
                taken = config.data if theirs.tuning.task == "cpt" else theirs.data
                data = replace(config.data, chat_template=taken.chat_template, system=taken.system, style=taken.style)
                if data != config.data:
                    config, origins = replace(config, data=data), origins | dict.fromkeys(chat, f"adapter {adapter}")
    return replace(loaded, config=config, origins=MappingProxyType(origins))


def _refuse_other_chat(config: Config, theirs: Config, folder: Path, origins: Mapping[str, str]) -> None:
    """Raise `CheckpointError` for texts around the turns that the adapter was not trained with."""
    for key in ("system", "style"):
        if getattr(config.data, key) != getattr(theirs.data, key):
            raise CheckpointError(
                f"`data.{key}` is not that of the adapter's run",
                place=origins.get(f"data.{key}", str(folder)),
                hint=KEEP_CHAT,
            )


KEEP_CHAT = (
    "keep the `data.chat_template`, `data.system` and `data.style` of its run (in that run's folder: omit all three);"
    " TUNING_ADAPTER=merge takes others, with the same tokenizer"
)


def made_folder(name: str) -> Path:
    """Return the place in this cache of a base that a preparation makes; the name says of what."""
    return cache_folder() / "models" / Path(name).name


def _base_of(folder: Path, name: str | None) -> str:
    """Return the base that an adapter names. Raise `CheckpointError` if it is a folder that is not here."""
    if name and f"/{MADE}-" in name and made_folder(name).is_dir():  # perhaps in another cache then
        return str(made_folder(name))
    if name and not (name.startswith(("/", ".", "~")) and not model_folder(name).is_dir()):
        return name
    hint = "MODEL_NAME=folder or hub id of the model that it was trained over"
    if f"/{MADE}-" in (name or ""):
        hint += "; `make data RUN=` of its run makes that folder again"
    raise CheckpointError(
        f"the adapter was trained over `{name}`, and there is no such folder" if name else "the adapter names no base",
        place=str(folder / CONFIG),
        hint=hint,
    )


def _run_of(name: str) -> RunFolder | None:
    """Return the run that a model or an adapter names, or `None`; the folder of a model or an adapter has precedence
    over a run of that name.
    """
    is_model = any((Path(name) / file).is_file() for file in ("config.json", CONFIG))
    if not name or (is_model and not (Path(name) / "plan.json").is_file()):
        return None
    folder = run_path(name)
    return RunFolder(folder) if folder and (folder / "plan.json").is_file() else None


def run_around(weights: Path) -> RunFolder | None:
    """Return the run in whose folder these weights are, if its configuration and the facts of its data are there."""
    runs = (RunFolder(folder) for folder in (weights.resolve().parents[:2] if weights.is_dir() else ()))
    return next((run for run in runs if run.prepared.is_file() and run.config.is_file()), None)


def ancestors_of(prepared: Prepared, below: Sequence[Path] = ()) -> list[tuple[RunFolder, Stamp]]:
    """Return the runs that made what a run starts from, the oldest first, each with the stamp of the weights that were
    taken, as far as they are here. `below`: folders of runs that come after it.
    """
    chain = dict[Path, tuple[RunFolder, Stamp]]()
    for place in [prepared.model.path, *([prepared.adapter.path] if prepared.adapter else [])]:
        weights = model_folder(place)
        with contextlib.suppress(CheckpointError):  # of a run that was damaged since
            parent, stamp = run_around(weights), own_stamp(weights)
            if parent and stamp and parent.path not in below:
                older = ancestors_of(Prepared.load(parent.prepared), [*below, parent.path])
                chain |= {ancestor.path: (ancestor, taken) for ancestor, taken in [*older, (parent, stamp)]}
    return list(chain.values())


def count_trained(split: PreparedSplit, prepared: Prepared, own: PreparedSplit | None = None) -> int | None:
    """Return how many rows of a split are in `own`, or were trained by the runs that made what a run starts from;
    `None` if the cache has lost what tells them.
    """
    trains = [own, *(Prepared.load(older.prepared).train for older, _ in ancestors_of(prepared))]
    try:
        keys = (Path(split.path) / KEYS).read_bytes()
        return sum(map(any, zip(*(trained_too(keys, train.path) for train in trains if train), strict=True)))
    except OSError:
        return None


def _whole_model(run: RunFolder, name: str, place: str) -> Path:
    for folder in (run.model, run.path / MERGED):
        if kind_of(folder) == "full":
            return folder
    run_word, kinds = as_typed(name), {*map(kind_of, (run.model, *run.checkpoints.glob("step-*")))}
    what, hint = "has neither a model nor a checkpoint yet", f"`make resume RUN={run_word}` continues it"
    if "full" in kinds:
        what = "was stopped before it had a model"
        hint = f"`make merge RUN={run_word}` makes one of its newest checkpoint, then MODEL_NAME={run_word} works"
    elif "adapter" in kinds:
        what = "has an adapter, not a complete model"
        hint = (
            f"`make merge RUN={run_word}` makes a complete model of it; MODEL_ADAPTER={run_word} trains the adapter"
            " further"
        )
    raise UserError(f"the run `{name}` {what}", place=place, hint=hint)


def find_adapter(config: Config, place: str | None = None) -> Path:
    """Return the folder of `model.adapter`, downloaded if it is not a local folder. Raise `UserError` unless it is a
    complete LoRA adapter in safetensors.
    """
    name = config.model.adapter or ""
    folder = model_folder(name)
    if not folder.is_dir():
        folder = _from_hub(name, place)
    if kind_of(folder) == "adapter":
        check_adapter(folder / CONFIG, ours=False)
        return folder
    if not (folder / CONFIG).is_file():
        full = kind_of(folder) == "full"
        raise UserError(
            f"`{name}` is {'a complete model' if full else f'not an adapter: it lacks `{CONFIG}`'}",
            place=place,
            hint=f"MODEL_NAME={as_typed(name)}"
            if full
            else "`model.adapter` takes a run, a folder that PEFT wrote, or a hub id",
        )
    pickled = next(folder.glob("adapter_model.*"), None)
    raise UserError(
        f"the adapter `{name}` lacks `{ADAPTER_WEIGHTS}`"
        + (f"; `{pickled.name}` is not read, only safetensors" if pickled else ""),
        place=place,
        hint="load it with PEFT and save it with `save_pretrained`"
        if pickled
        else "copy the folder again, with all its files",
    )


def _from_hub(name: str, place: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    hint = "a run's name, a folder, or the hub id of an adapter; paths count from where you typed the command"
    if name.count("/") != 1 or name[0] in "./~":
        text = f"the adapter `{name}` is neither a run nor a folder (any more)"
        raise UserError(text, place=place, hint=meant_model(name) + hint)
    for offline in (True, False):
        try:
            return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], local_files_only=offline))
        except (OSError, ValueError, HfHubHTTPError) as error:
            why = error
    raise UserError(
        f"there is no folder `{name}`, and the hub did not provide it: {first_line(why)}", place=place, hint=hint
    )


def parent_of(config: Config) -> ParentAdapter | None:
    """Return the facts about `model.adapter` that a run records, or `None`."""
    if config.model.adapter is None:
        return None
    folder = find_adapter(config)
    own = Path(config.model.adapter)
    named = own.parent.parent.name + "@" + own.name if own.parent.name == "checkpoints" else own.parent.name
    files = "\n".join(file_sha256(folder / file) for file in (CONFIG, ADAPTER_WEIGHTS))
    return ParentAdapter(
        name=named if folder == own and own_stamp(folder) else config.model.adapter,
        path=str(folder.resolve()),
        fingerprint=text_sha256(files),
    )


# The shape of an adapter.


def _shape(loaded: LoadedConfig, folder: Path, saved: Mapping[str, Any], stamp: Stamp | None) -> LoraSettings:
    """Return `tuning.lora` with the adapter's shape. Raise `UserError` if another shape was typed."""
    typed = loaded.config.tuning.lora
    own = _from_peft(saved)
    targets = (stamp.lora or {}).get("target_modules") if stamp else None
    own["target_modules"] = targets or _targets(folder, saved)
    own["embeddings"] = _trained_rows(saved, stamp)
    for key, value in own.items():
        asked = getattr(typed, key)
        if not loaded.typed(f"tuning.lora.{key}") or _same(asked, value):
            continue
        if key in CHANGED_FREELY:
            own[key] = asked
            continue
        raise UserError(
            f"`tuning.lora.{key}` is `{_shown(asked)}`, but the adapter `{loaded.config.model.adapter}` has"
            f" `{_shown(value)}`",
            place=loaded.origins[f"tuning.lora.{key}"],
            hint=f"omit it: {KEEPS_ITS_SHAPE}",
        )
    if loaded.config.data.new_tokens and own["embeddings"] == "none" and not own["modules_to_save"]:
        raise UserError(
            f"`data.new_tokens` adds rows to train, and the adapter `{loaded.config.model.adapter}` trains none",
            place=loaded.origins["data.new_tokens"],
            hint=KEEPS_ITS_SHAPE,
        )
    return replace(typed, **own)


KEEPS_ITS_SHAPE = "an adapter keeps its shape; `tuning.adapter: merge` starts a new one of any shape"


def _trained_rows(saved: Mapping[str, Any], stamp: Stamp | None) -> str:
    """Return an adapter's `tuning.lora.embeddings`."""
    if saved.get("trainable_token_indices"):
        return "new"
    return "all" if stamp and (stamp.lora or {}).get("embeddings") == "all" else "none"


def _same(asked: Any, value: Any) -> bool:
    if isinstance(asked, list) and isinstance(value, list):
        return set(asked) == set(value)
    return bool(asked in (value, "auto"))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value).lower()


def _targets(folder: Path, saved: Mapping[str, Any]) -> list[str]:
    """Return the modules of the adapter's weights, named as in `tuning.lora.target_modules`."""
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(folder / ADAPTER_WEIGHTS, framework="np")
        names = list(file.keys())
    except SafetensorError as error:
        raise CheckpointError(
            f"is cut short, or is not a safetensors file: {error}",
            place=str(folder / ADAPTER_WEIGHTS),
            hint="copy it again",
        ) from None
    modules = {
        match[1] for name in names if (match := ON_LAYER.search(name)) and match[1] not in ("base_layer", "experts")
    }
    return sorted({*modules, *(saved.get("target_parameters") or ())})


ON_LAYER = re.compile(r"([^.]+)\.lora_(?:embedding_)?A\b")
Patterns = Mapping[str, float]
ADAPTER: Mapping[str, Any] = {
    "peft_type": Literal["LORA"],
    "r": int,
    "lora_alpha": float,
    "lora_dropout": float,
    "target_modules": list[str] | str | None,
    "target_parameters": list[str] | None,
    "layer_replication": type(None),
    "rank_pattern": Patterns,
    "alpha_pattern": Patterns,
    "modules_to_save": list[str] | None,
    "exclude_modules": list[str] | str | None,
    "base_model_name_or_path": str | None,
}
"""Types of an adapter's configuration; PEFT's `layer_replication` could make the model arbitrarily large."""


def check_adapter(path: Path, *, ours: bool = True) -> None:
    """Raise `CheckpointError` for an adapter's configuration of another kind. With `ours=False` it may be a link, as in
    the hub's cache.
    """
    if not path.exists():
        return
    hint = "train the adapter again, or take another CHECKPOINT=" if ours else "take a LoRA adapter as PEFT writes it"
    value = dict[str, Any]()
    try:
        value = dict(read_json(path, follow=not ours))
        wrong = misfit(value, ADAPTER) or (None if "peft_type" in value else "peft_type")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"not the configuration of an adapter: {error}", place=str(path), hint=hint) from None
    if wrong is not None:
        raise CheckpointError(
            f"not the configuration of a LoRA adapter{' of ours' if ours else ''}: `{wrong}` is"
            f" `{_short(value, wrong)}`",
            place=str(path),
            hint=hint,
        )


def _short(value: Mapping[str, Any], key: str) -> str:
    return str(value.get(key.partition(".")[0]))[:80]
