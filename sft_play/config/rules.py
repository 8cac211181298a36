"""Rules between keys: pure functions of a configuration that yield conflicts; `check_rules` adds values and places."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from sft_play.config import data_rules, metrics, optimizers, schedulers, trackers
from sft_play.config.keys import variable_name
from sft_play.config.reader import Conflict, quoted
from sft_play.config.schema import Config, ModelConfig, ProfileSettings
from sft_play.errors import HUB_LOGIN, TOKEN, UserError, mask, without_tokens
from sft_play.files import is_file_name, read_json, typed_path
from sft_play.text import meant_speed, plural

Origins = Mapping[str, str]
"""Dotted key -> where its value was written, or `default`."""
COMMIT = re.compile(r"[0-9a-f]{40}")
FROM_VARIABLE = "environment "
"""Prefix of the origin of a key that an environment variable sets (`config.load`)."""
FROM_ENVIRONMENT = (
    f"set the token as an environment variable (`HF_TOKEN` for the hub) or by {HUB_LOGIN}: what is in a configuration"
    " is kept in the run folder; and create a new token: this one has been written to a file"
)
SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*[GM]bit(?:/s)?", re.IGNORECASE)
"""As `plan.hardware` reads it."""
NOTIFIED = re.compile(r"https?://\S+|\$\w*NOTIFY\w*")
SECRET_PART = re.compile(r"/(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{20,}")
"""A part of an address that cannot be guessed."""
PATHS = (
    *("model.adapter", "model.revision", "model.tokenizer"),
    *("data.chat_template", "data.train_path", "data.val_path"),
)
SHAPE_KEYS = ("vocab_size", "hidden_size", "attention_heads", "layers")
SMALLEST_VOCABULARY = 260
"""For a tokenizer that is trained here: 256 bytes, eos, pad, and the two marks of ChatML."""
REPLICAS = ("auto", "ddp")
"""Strategies under which every rank has all trained weights."""


def check_rules(config: Config, origins: Origins) -> list[UserError]:
    """Return every violated rule, each at the place of the key that broke it."""
    conflicts = [conflict for rule in RULES for conflict in rule(config)]
    conflicts += [conflict for rule in schedulers.SLURM_RULES for conflict in rule(config.slurm)]
    conflicts += [conflict for rule in schedulers.KUBERNETES_RULES for conflict in rule(config.kubernetes)]
    return [_error(conflict, config, origins) for conflict in [*conflicts, *_typed_for_this_run(config, origins)]]


def _error(conflict: Conflict, config: Config, origins: Origins) -> UserError:
    keys = [key.partition("[")[0] for key in (conflict.key, conflict.or_key) if key]
    place = next((origins[key] for key in keys if origins.get(key, "default") != "default"), None)
    text = conflict.text
    if text[0] in ",;":
        text = f"`{conflict.key}` is {_in_words(config, conflict.key)}{text}"
    return UserError(text, place=without_tokens(place) if place else None, hint=conflict.hint)


def _in_words(config: Config, key: str) -> str:
    value: Any = config
    for name in re.findall(r"[^.\[\]]+", key):
        value = value[int(name)] if isinstance(value, (list, tuple)) else getattr(value, name)
    if isinstance(value, bool) or value is None:
        return f"`{ {True: 'true', False: 'false', None: 'null'}[value] }`"
    if isinstance(value, float):
        return f"{value:g}"
    return f"`{quoted(value)}`" if isinstance(value, str) else str(value)


# ---- Files and secrets


def paths(config: Config) -> Iterator[Conflict]:
    """Refuse names that are empty and patterns that mean nothing; whether the files exist is checked later."""
    short = {"data.sources": config.data.train_path, "data.validation": config.data.val_path}
    nameless = None if config.model.init == "random" or config.model.adapter else ""
    named = [
        *((key, key, attrgetter(key)(config)) for key in PATHS),
        ("model.name", "model.name", config.model.name or nameless),
        # A short key is the path of the only source.
        *((key, f"{key}[{i}].path", source.path) for key, i, source in data_rules.sources(config) if not short[key]),
    ]
    for key, name, text in named:
        if text is not None and not text.strip():
            yield Conflict(key, f"`{name}` is empty")
        elif text and not is_file_name(text):
            hint = "a part of a path has at most 255 bytes, a path 4,095"
            yield Conflict(key, f"`{name}` is `{quoted(text)}`, longer than a file's name or path may be", hint)
        elif text and any("**" in part and part != "**" for part in text.split("/")):
            yield Conflict(
                key, f"`{name}` is `{quoted(text)}`, and `**` must be a complete part of a path", "`data/**/*.jsonl`"
            )


def tokens(config: Config) -> Iterator[Conflict]:
    """Refuse a value that contains a token."""
    for key, text in _texts(config, ""):
        if TOKEN.search(text) and key != "launch.notify":
            yield Conflict(key, f"`{key}` contains what looks like an access token", FROM_ENVIRONMENT)


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for every text of a configuration; a source's texts belong to `data.sources`."""
    if isinstance(value, str):
        yield key, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            inner = f"{key}.{item.name}".removeprefix(".")
            yield from _texts(getattr(value, item.name), inner.removesuffix(".extra"))
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(str(name), key)
            yield from _texts(part, f"train.{name}" if key == "train" else key)
    elif isinstance(value, (list, tuple)):
        yield from ((key, text) for part in value for _, text in _texts(part, key))


def code(config: Config) -> Iterator[Conflict]:
    """Require a pinned commit for a stranger's code; code in a folder is the user's own and has no commit."""
    model = config.model
    own = typed_path(model.name).is_dir()
    if model.trust_remote_code and not own and not COMMIT.fullmatch(model.revision or ""):
        revision = f"`model.revision` is `{model.revision}`" if model.revision else "`model.revision` is not given"
        yield Conflict(
            "model.trust_remote_code",
            "`model.trust_remote_code` runs code that comes with the model, so it must be pinned to one commit, and"
            f" {revision}",
            "set `model.revision` to the full commit (40 hexadecimal digits) whose code you have read",
        )


def _typed_for_this_run(config: Config, origins: Origins) -> Iterator[Conflict]:
    """Refuse consent by an environment variable: in a shell's profile, an image or a job's template it would allow the
    code of every model.
    """
    key = "model.trust_remote_code"
    if config.model.trust_remote_code and origins.get(key, "").startswith(FROM_VARIABLE):
        yield Conflict(
            key,
            f"`{key}` lets a model's code run, and an environment variable would allow it for every model",
            "unset the variable, and write `trust_remote_code: true` under `model:`, or type"
            " MODEL_TRUST_REMOTE_CODE=true with the command",
        )


# ---- Training


def precision(config: Config) -> Iterator[Conflict]:
    if config.train.fp16 and config.train.bf16 is True:
        yield Conflict(
            "train.fp16", "`train.fp16` and `train.bf16` are both `true`", "keep one; bf16 needs no loss scaling"
        )


def loss(config: Config) -> Iterator[Conflict]:
    """Refuse a combination of losses that is not defined."""
    train = config.train
    if train.loss != "nll" and train.label_smoothing_factor:
        yield Conflict(
            "train.label_smoothing_factor",
            f", which goes with `train.loss: nll`, and that is `{train.loss}`",
            "omit one of them",
        )


def offload(config: Config) -> Iterator[Conflict]:
    """Refuse to move inputs of layers that are not recomputed, or that Unsloth moves itself."""
    key, train = "train.activation_offload", config.train
    if train.activation_offload == "off":
        return
    if train.gradient_checkpointing is False:
        hint = "omit one of the two"
        yield Conflict(key, ", which needs recomputation, but `train.gradient_checkpointing` is `false`", hint)
    if config.tuning.backend == "unsloth":
        yield Conflict(key, ", but unsloth moves the inputs of recomputed layers itself", "omit it")


def profile(config: Config) -> Iterator[Conflict]:
    asked = config.train.profile
    if not asked.steps and asked != ProfileSettings():
        yield Conflict(
            "train.profile.steps",
            "`train.profile` is given without `steps`",
            "TRAIN_PROFILE_STEPS=3 profiles three steps",
        )


def notify(config: Config) -> Iterator[Conflict]:
    """Take a command, or an address with a secret, only from an environment variable."""
    target, hint = config.launch.notify or "", "export MY_NOTIFY='...' and set `launch.notify: $MY_NOTIFY`"
    if target and not NOTIFIED.fullmatch(target):
        yield Conflict(
            "launch.notify",
            ", which is neither a URL nor the name of a variable with `NOTIFY` in it",
            f"for a command: {hint}",
        )
    elif TOKEN.search(target) or mask("", target) != target or SECRET_PART.search(target):
        yield Conflict(
            "launch.notify", "`launch.notify` is an address with a secret in it, which the run's files would keep", hint
        )


def names(config: Config) -> Iterator[Conflict]:
    """Refuse a list of modules with an empty name."""
    targets = config.tuning.lora.target_modules
    if isinstance(targets, list) and not all(name.strip() for name in targets or [""]):
        yield Conflict(
            "tuning.lora.target_modules", "`tuning.lora.target_modules` names no module", "leave it to `auto`"
        )


def evaluation(config: Config) -> Iterator[Conflict]:
    train, held_out = config.train, bool(config.data.validation)
    validate = "set `data.val_path`, or `data.validation: 0.05`"
    if train.eval_strategy in ("steps", "epoch") and not held_out:
        yield Conflict("train.eval_strategy", ", but there is no validation data", validate)
    if train.predict_with_generate is True and not held_out:
        yield Conflict("train.predict_with_generate", ", but there is no validation data to answer", validate)
    if train.eval_strategy == "steps" and train.eval_steps is None:
        yield Conflict("train.eval_strategy", ", but `train.eval_steps` is not given", "TRAIN_EVAL_STEPS=100")
    if train.eval_steps is not None and train.eval_strategy != "steps":
        hint = "set `train.eval_strategy: steps`, or omit `train.eval_steps`"
        yield Conflict("train.eval_steps", f", but `train.eval_strategy` is `{train.eval_strategy}`", hint)


def warmup(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.warmup_steps is not None and 0 < train.max_steps < train.warmup_steps:
        yield Conflict(
            "train.warmup_steps",
            f", but the run has {plural(train.max_steps, 'step')}",
            f"TRAIN_WARMUP_STEPS={-(-train.max_steps // 10)}, or omit it",
        )


# ---- The model's shape


def pretrained(config: Config) -> Iterator[Conflict]:
    """Refuse keys that a pretrained model would ignore."""
    model, hint = config.model, "omit it, or set `model.init: random` to start from scratch"
    if model.init == "pretrained":
        for key in SHAPE_KEYS:
            if getattr(model, key) is not None:
                yield Conflict(f"model.{key}", ", but a pretrained model has its own shape", hint)
        if model.tokenizer is not None:
            yield Conflict(
                "model.tokenizer", ", but a pretrained model's embeddings were learnt for its own tokens", hint
            )


def from_scratch(config: Config) -> Iterator[Conflict]:
    """Check what a model with random weights needs."""
    model, tuning = config.model, config.tuning
    if model.init != "random":
        return
    if tuning.mode != "full":
        text = (
            f"`model.init` is `random`, but `tuning.mode` is `{tuning.mode}`: adapters over random weights learn little"
        )
        yield Conflict("tuning.mode", text, "set `tuning.mode: full`", or_key="model.init")
    if tuning.backend == "unsloth":
        text = "`model.init` is `random`, but `tuning.backend: unsloth` tunes pretrained models"
        yield Conflict("tuning.backend", text, "omit it")
    shape = [key for key in SHAPE_KEYS if getattr(model, key) is not None]
    missing = [key for key in SHAPE_KEYS if key not in shape]
    if model.name and shape:
        yield Conflict(
            f"model.{shape[0]}",
            f"`model.name` and {_keys(shape)} are both given: two shapes for one model",
            "keep `model.name` for its shape with random weights (`MODEL_NAME=` clears it), or the shape keys",
        )
    elif not model.name and missing:
        sizes = {"vocab_size": tokens_of(model)}
        variables = " ".join(f"{variable_name(f'model.{key}')}={sizes.get(key) or '...'}" for key in missing)
        yield Conflict(
            "model.init",
            f", but {_keys(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            f"set {variables}, or `model.name` for the shape of another model",
        )
    if not model.name and model.revision is not None:
        yield Conflict("model.revision", "`model.revision` is set, but `model.name` is not")
    yield from _shape(config)


def _shape(config: Config) -> Iterator[Conflict]:
    """Refuse a shape that no model can have."""
    model = config.model
    if model.hidden_size and model.attention_heads:
        size, heads = model.hidden_size, model.attention_heads
        even = f"for example {max(2 * heads, round(size / (2 * heads)) * 2 * heads)}"
        if size % heads:
            yield Conflict(
                "model.hidden_size",
                f"`model.hidden_size` {size} cannot be divided by `model.attention_heads` {heads}",
                even,
            )
        elif size // heads % 2:
            text = f"a head is {size} / {heads} = {size // heads} wide, but rotary positions need an even number"
            yield Conflict("model.hidden_size", text, even)
    trained = model.tokenizer == "train" or (model.tokenizer is None and not model.name)
    if trained and model.vocab_size is not None and model.vocab_size < SMALLEST_VOCABULARY:
        text = f", but a byte-level tokenizer has at least {SMALLEST_VOCABULARY} tokens: 256 bytes and 4 marks"
        yield Conflict("model.vocab_size", text)
    if model.vocab_size and (tokens := tokens_of(model) or 0) > model.vocab_size:
        text = f", but the tokenizer `{model.tokenizer}` has {tokens} tokens"
        yield Conflict("model.vocab_size", text, f"MODEL_VOCAB_SIZE={tokens} or more")


def tokens_of(model: ModelConfig) -> int | None:
    """Return the number of tokens in the `tokenizer.json` of `model.tokenizer`, unless that is not a folder here."""
    path = typed_path(model.tokenizer or "") / "tokenizer.json"
    try:
        return _tokens_in(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@functools.lru_cache(4)
def _tokens_in(path: Path, _changed: int) -> int | None:
    """Read a file of many megabytes once, though each remedy of a plan is checked by the rules."""
    try:
        content = read_json(path)
        words, added = content["model"]["vocab"], content.get("added_tokens") or ()
        return len(
            {*(word if isinstance(word, str) else word[0] for word in words), *(each["content"] for each in added)}
        )
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _keys(names: list[str]) -> str:
    return ", ".join(f"`model.{name}`" for name in names)


# ---- Several processes


def launch(config: Config) -> Iterator[Conflict]:
    if config.launch.backend == "mpi":
        yield Conflict(
            "launch.backend",
            ", which torch's published builds lack",
            "leave it to `auto`: nccl between GPUs, gloo between CPUs",
        )
    text = config.launch.network
    match = SPEED.fullmatch(text.strip()) if text is not None else None
    if text is not None and not (match and float(match[1]) > 0):
        hint = meant_speed(text) or "LAUNCH_NETWORK=1Gbit, or 250Mbit"
        yield Conflict("launch.network", "; expected a speed such as `1Gbit`", hint)


def network_keys(config: Config) -> list[tuple[str, str]]:
    """Return (key, value in words) of the keys that change what replicas exchange, if they differ from the default."""
    launch = config.launch
    keys = [("launch.compression", f"`{launch.compression}`")] if launch.compression != "none" else []
    return keys + ([("launch.local_steps", str(launch.local_steps))] if launch.local_steps > 1 else [])


def slow_network(config: Config) -> Iterator[Conflict]:
    """Refuse a changed exchange under ZeRO and FSDP2, which send parts of weights and states by their own means."""
    launch = config.launch
    for key, _ in network_keys(config) if launch.strategy not in REPLICAS else []:
        hint = f"set `launch.strategy: ddp`, or omit `{key}`"
        yield Conflict(key, f", but `launch.strategy: {launch.strategy}` has its own way to exchange", hint)
    for name, neutral in (("outer_learning_rate", 1.0), ("outer_momentum", 0.0)):
        if launch.local_steps == 1 and getattr(launch, name) != neutral:
            yield Conflict(f"launch.{name}", ", but `launch.local_steps` is 1", "LAUNCH_LOCAL_STEPS=50, or omit it")
    if config.train.fp16 and launch.local_steps > 1:
        yield Conflict(
            "launch.local_steps",
            ", but with `train.fp16` each rank would skip other steps and scale its loss differently",
            "set `train.bf16: true` instead of fp16, or `launch.local_steps: 1`",
        )


def stages(config: Config) -> Iterator[Conflict]:
    """Refuse what needs replicas when each rank has other layers."""
    key, launch, tuning = "launch.strategy", config.launch, config.tuning
    if launch.strategy != "pipeline":
        if launch.stages != "auto":
            yield Conflict(
                "launch.stages", f", but `launch.strategy` is `{launch.strategy}`", "LAUNCH_STRATEGY=pipeline"
            )
        return
    for other, value in (("sequence_parallel", launch.sequence_parallel), ("tensor_parallel", launch.tensor_parallel)):
        if value > 1:
            yield Conflict(key, f", but `launch.{other}` is {value}", "omit one of the two")
    if config.train.extra.get("neftune_noise_alpha"):
        yield Conflict(
            key,
            ", but with `train.neftune_noise_alpha` each row's noise is drawn where it is embedded",
            "omit one of the two",
        )
    if tuning.backend == "unsloth" or config.model.trust_remote_code:
        who = "`tuning.backend: unsloth`" if tuning.backend == "unsloth" else "`model.trust_remote_code: true`"
        yield Conflict(key, f", but with {who} the model's layers cannot be shared out", "omit one of the two")


def layers(config: Config) -> Iterator[Conflict]:
    """Refuse what cannot be combined with layers sliced over a group of ranks."""
    key, launch, tuning = "launch.tensor_parallel", config.launch, config.tuning
    if launch.tensor_parallel == 1:
        return
    if launch.sequence_parallel > 1:
        yield Conflict(key, f", but `launch.sequence_parallel` is {launch.sequence_parallel}", "omit one of the two")
    if launch.strategy not in (*REPLICAS, "fsdp2"):
        hint = "`launch.strategy: ddp` or `fsdp2` with it, or omit it: ZeRO shares out the weights itself"
        yield Conflict(key, f", but `launch.strategy` is `{launch.strategy}`", hint)
    for other, value in network_keys(config):
        yield Conflict(key, f", but `{other}` is {value}", "omit one of the two")
    if tuning.mode == "qlora" or tuning.backend == "unsloth":
        why = (
            f", but `{'tuning.mode' if tuning.mode == 'qlora' else 'tuning.backend'}:"
            f" {'qlora' if tuning.mode == 'qlora' else 'unsloth'}`"
        )
        yield Conflict(
            key,
            f"{why} has layers that cannot be sliced",
            "`tuning.mode: lora` with `tuning.backend: bnb`; or `make train-fsdp`",
        )


def slices(config: Config) -> Iterator[Conflict]:
    """Refuse what cannot be combined with rows sliced over ranks, which step together and need attention by lengths."""
    key, launch, attention = "launch.sequence_parallel", config.launch, config.model.attn_implementation
    if launch.sequence_parallel == 1:
        return
    if launch.local_steps > 1:
        hint = "omit one of the two: ranks with slices of one line cannot step alone"
        yield Conflict(key, f", but `launch.local_steps` is {launch.local_steps}", hint)
    if config.tuning.backend == "unsloth":
        yield Conflict(key, ", but unsloth has its own attention", "`tuning.backend: bnb`")
    if attention not in ("auto", "varlen"):
        yield Conflict(
            key, f", but `{attention}` attention sees only a rank's slice", "`model.attn_implementation: auto`"
        )


RULES: tuple[Callable[[Config], Iterator[Conflict]], ...] = (
    names,
    precision,
    loss,
    offload,
    profile,
    notify,
    evaluation,
    launch,
    warmup,
    slow_network,
    stages,
    layers,
    slices,
    pretrained,
    from_scratch,
    paths,
    tokens,
    code,
    *data_rules.RULES,
    *metrics.RULES,
    *optimizers.RULES,
    trackers.known_trackers,
)
