"""Rules between keys, as plain functions without effects. Each returns problems; none raises."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sft_play.config import data_rules, metrics, scheduler_rules
from sft_play.config.rule import Origins, Rule, problem
from sft_play.config.schema import Config
from sft_play.config.types import shown
from sft_play.config.yaml_files import Node
from sft_play.errors import HUB_LOGIN, TOKEN, UserError
from sft_play.files import is_file_name, typed_path

# Rules of keys that name files: a name that no file system takes is said with its key, before anything is looked for. No effects.


def paths(config: Config, origins: Origins) -> Iterator[UserError]:
    """Names that are too long, and homes of users who are not here."""
    for key, name, text in _named(config):
        given = f"`{name}` is `{shown(Node(text))}`"
        if not is_file_name(text):
            yield problem(
                origins,
                key,
                f"{given}, longer than a file's name or path may be",
                "a part of a path has at most 255 bytes, a path 4,095",
            )
        elif any("**" in part and part != "**" for part in text.split("/")):
            yield problem(origins, key, f"{given}, and `**` is a whole part of a path", "`data/**/*.jsonl`")
        elif text.startswith("~") and not _has_home(text):
            yield problem(origins, key, f"{given}, and there is no such user", "`~/` is your own folder")


def _named(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields (key, name in messages, value) of everything that may be a path."""
    data = config.data
    single = {
        "model.name": config.model.name, "model.tokenizer": config.model.tokenizer, "data.chat_template": data.chat_template,
        "data.train_path": data.train_path, "data.val_path": data.val_path,
    }  # fmt: skip
    yield from ((key, key, text) for key, text in single.items() if text)
    for key, short, sources in (
        ("data.sources", data.train_path, data.sources),
        ("data.validation", data.val_path, data.validation if isinstance(data.validation, list) else []),
    ):
        if not short:  # else it is the same path, and was looked at
            yield from ((key, f"{key}[{index}].path", source.path) for index, source in enumerate(sources))


def _has_home(text: str) -> bool:
    try:
        Path(text).expanduser()
    except RuntimeError:
        return False
    return True


PATH_RULES = (paths,)


# Rules that keep tokens out of files and strangers' code from running. As those of `config.rules`: no effects.


COMMIT = re.compile(r"[0-9a-f]{40}")
FROM_VARIABLE = "environment "
"""How the origin of a key begins that a variable of the environment gave (`config.load`)."""
FROM_ENVIRONMENT = (
    f"set the token as an environment variable (`HF_TOKEN` for the hub) or by {HUB_LOGIN}: what stands in a configuration is kept in "
    "the run folder; and take a new token, since this one has been written down"
)


def tokens(config: Config, origins: Origins) -> Iterator[UserError]:
    """No value may be, or hold, a token."""
    for key, text in _texts(config, ""):
        if TOKEN.search(text):
            yield problem(origins, key, f"`{key}` holds what looks like an access token", FROM_ENVIRONMENT)


def code(config: Config, origins: Origins) -> Iterator[UserError]:
    """A stranger's code runs only where somebody said so for this run, and at a commit that was named.

    A variable of the environment is none: it may stand in a shell's profile, an image or a job's template, and would hold for every
    model. The code in a folder of this machine is the user's own, and a folder has no commit.
    """
    model = config.model
    if not model.trust_remote_code:
        return
    if origins.get("model.trust_remote_code", "").startswith(FROM_VARIABLE):
        yield problem(
            origins, "model.trust_remote_code",
            "`model.trust_remote_code` lets a model's code run, and the environment would say so for every model",
            "take the variable away, and write `trust_remote_code: true` under `model:`, or type MODEL_TRUST_REMOTE_CODE=true with the command",
        )  # fmt: skip
    own = is_file_name(model.name) and typed_path(model.name).is_dir()
    if own or COMMIT.fullmatch(model.revision or ""):
        return
    given = f"`model.revision` is `{model.revision}`" if model.revision else "`model.revision` is not given"
    yield problem(
        origins, "model.trust_remote_code",
        f"`model.trust_remote_code` runs code that comes with the model, so it must be pinned to one commit, and {given}",
        "set `model.revision` to the full commit (40 hexadecimal digits) whose code you have read",
    )  # fmt: skip


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields every text of a configuration with the dotted key that it belongs to."""
    if isinstance(value, str):
        yield key, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            inner = getattr(value, item.name)
            yield from _texts(inner, _inside(key, item.name))
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(str(name), key)
            yield from _texts(part, _inside(key, str(name)) if key == "train.extra" else key)
    elif isinstance(value, (list, tuple)):
        for part in value:
            # Of a source the key is `data.sources`, whatever field of it the text is in.
            yield from ((key, text) for _, text in _texts(part, key))


def _inside(key: str, name: str) -> str:
    return name if not key else f"train.{name}" if key == "train.extra" else f"{key}.{name}"


SECURITY_RULES = (tokens, code)


# `launch.elastic`: how many machines a cluster run may have.


ELASTIC = re.compile(r"(\d{1,3}):(\d{1,3})")


def elastic_bounds(text: str | None) -> tuple[int, int] | None:
    """Returns the least and the most machines of `2:4`; `None` where nothing is given, or no such thing."""
    found = ELASTIC.fullmatch(text.strip()) if text else None
    least, most = (int(found[1]), int(found[2])) if found else (0, 0)
    return (least, most) if 1 <= least <= most else None


def _elastic(config: Config, origins: Origins) -> Iterator[UserError]:
    text = config.launch.elastic
    if text is not None and elastic_bounds(text) is None:
        yield problem(
            origins, "launch.elastic", f"`launch.elastic` is `{text}`; expected the least and the most machines, such as `2:4`",
            "the first number is at least 1 and not above the second",
        )  # fmt: skip


ELASTIC_RULES = (_elastic,)


# Rules between the keys of slow networks (`launch.compression`, `launch.local_steps`). As those of `config.rules`: no effects.


SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*[GM]bit(?:/s)?", re.IGNORECASE)
"""As `plan.hardware` reads it."""
REPLICAS = ("auto", "ddp")
"""Strategies under which every rank holds all weights that train."""


def network_keys(config: Config) -> list[tuple[str, str]]:
    """Returns the keys that change what replicas send each other, each with its value in words, and only those that are not as usual."""
    launch = config.launch
    found = [("launch.compression", f"`{launch.compression}`")] if launch.compression != "none" else []
    return found + ([("launch.local_steps", str(launch.local_steps))] if launch.local_steps > 1 else [])


def replicas_only(config: Config, origins: Origins) -> Iterator[UserError]:
    """ZeRO and FSDP2 send parts of weights and states by operations of their own."""
    if config.launch.strategy in REPLICAS:
        return
    for key, value in network_keys(config):
        yield problem(
            origins, key, f"`{key}` is {value}, but `launch.strategy: {config.launch.strategy}` exchanges in a way of its own",
            f"set `launch.strategy: ddp`, or leave `{key}` out",
        )  # fmt: skip


def together(config: Config, origins: Origins) -> Iterator[UserError]:
    """What local steps and PowerSGD cannot be combined with."""
    launch = config.launch
    if launch.local_steps > 1 and launch.compression == "powersgd":
        yield problem(
            origins, "launch.compression", f"`launch.compression` is `powersgd`, but with `launch.local_steps: {launch.local_steps}` no "
            "gradients are sent", "take `fp16` or `bf16`, which narrow the averages too, or `launch.local_steps: 1`",
        )  # fmt: skip
    if not config.train.fp16:
        return
    if launch.local_steps > 1:
        yield problem(
            origins, "launch.local_steps", f"`launch.local_steps` is {launch.local_steps}, but with `train.fp16` each rank would leave out "
            "other steps and scale its loss otherwise", "set `train.bf16: true` instead of fp16, or `launch.local_steps: 1`",
        )  # fmt: skip
    if launch.compression == "powersgd":
        yield problem(
            origins, "launch.compression", "`launch.compression` is `powersgd`, but with `train.fp16` gradients overflow now and then, and "
            "PowerSGD would carry that into every later step", "set `train.bf16: true` instead of fp16, or `launch.compression: fp16`",
        )  # fmt: skip


def speed(config: Config, origins: Origins) -> Iterator[UserError]:
    """A speed of the network that the plan could not read."""
    text = config.launch.network
    match = SPEED.fullmatch(text.strip()) if text is not None else None
    if text is not None and not (match and float(match.group(1)) > 0):
        yield problem(
            origins,
            "launch.network",
            f"`launch.network` is `{text}`; expected a speed such as `1Gbit`",
            "LAUNCH_NETWORK=1Gbit, or 250Mbit",
        )


NETWORK_RULES = (replicas_only, together, speed)


def check_rules(config: Config, origins: Origins) -> list[UserError]:
    """Returns every violated rule, each at the place of the key that broke it."""
    return [one for rule in RULES for one in rule(config, origins)]


def _precision(config: Config, origins: Origins) -> Iterator[UserError]:
    if config.train.fp16 and config.train.bf16 is True:
        yield problem(
            origins, "train.fp16", "`train.fp16` and `train.bf16` are both `true`", "keep one; bf16 needs no loss scaling"
        )


def _data(config: Config, origins: Origins) -> Iterator[UserError]:
    data = config.data
    if data.train_path and [source.path for source in data.sources] != [data.train_path]:
        yield problem(origins, "data.train_path", "`data.train_path` and `data.sources` are both given", "keep one of them")
    if data.val_path and not (isinstance(data.validation, list) and [s.path for s in data.validation] == [data.val_path]):
        yield problem(origins, "data.val_path", "`data.val_path` and `data.validation` are both given", "keep one of them")
    for index, source in enumerate(data.sources):
        if not source.path.strip():
            yield problem(origins, "data.sources", f"`data.sources[{index}].path` is empty")
    if data.group_by is not None and (isinstance(data.validation, list) or not data.validation):
        message = (
            "`data.group_by` says which rows stay together when a fraction is held out, and `data.validation` is no fraction"
        )
        yield problem(origins, "data.group_by", message, "set `data.validation: 0.05`, or leave `data.group_by` out")


def _names(config: Config, origins: Origins) -> Iterator[UserError]:
    """Text that must say something."""
    said = {"model.name": config.model.name, "model.revision": config.model.revision, "data.train_path": config.data.train_path,
            "data.val_path": config.data.val_path}  # fmt: skip
    for key, text in said.items():
        if text is not None and not text.strip() and not (key == "model.name" and config.model.init == "random"):
            yield problem(origins, key, f"`{key}` is empty")
    if isinstance(config.data.validation, list):
        for index, source in enumerate(config.data.validation):
            if not source.path.strip():
                yield problem(origins, "data.validation", f"`data.validation[{index}].path` is empty")
    targets = config.tuning.lora.target_modules
    if isinstance(targets, list) and not all(name.strip() for name in targets or [""]):
        yield problem(origins, "tuning.lora.target_modules", "`tuning.lora.target_modules` names no module", "leave it to `auto`")


def _evaluation(config: Config, origins: Origins) -> Iterator[UserError]:
    train = config.train
    held_out = config.data.validation is not None and config.data.validation != 0.0
    if train.eval_strategy in ("steps", "epoch") and not held_out:
        yield problem(
            origins, "train.eval_strategy", f"`train.eval_strategy` is `{train.eval_strategy}`, but there is no validation data",
            "set `data.val_path`, or `data.validation: 0.05`",
        )  # fmt: skip
    if train.predict_with_generate is True and not held_out:
        yield problem(
            origins, "train.predict_with_generate", "`train.predict_with_generate` is `true`, but there is no validation data to answer",
            "set `data.val_path`, or `data.validation: 0.05`",
        )  # fmt: skip
    if train.eval_strategy == "steps" and train.eval_steps is None:
        yield problem(
            origins,
            "train.eval_strategy",
            "`train.eval_strategy` is `steps`, but `train.eval_steps` is not given",
            "TRAIN_EVAL_STEPS=100",
        )
    if train.eval_steps is not None and train.eval_strategy != "steps":
        yield problem(
            origins, "train.eval_steps", f"`train.eval_steps` is {train.eval_steps}, but `train.eval_strategy` is `{train.eval_strategy}`",
            "set `train.eval_strategy: steps`, or leave `train.eval_steps` out",
        )  # fmt: skip


def _launch(config: Config, origins: Origins) -> Iterator[UserError]:
    if config.launch.backend == "mpi":
        yield problem(
            origins, "launch.backend", "`launch.backend` is `mpi`, which torch's published builds lack",
            "leave it to `auto`: nccl between GPUs, gloo between CPUs",
        )  # fmt: skip


def _warmup(config: Config, origins: Origins) -> Iterator[UserError]:
    train = config.train
    if train.warmup_steps is not None and train.max_steps > 0 and train.warmup_steps > train.max_steps:
        yield problem(
            origins,
            "train.warmup_steps",
            f"`train.warmup_steps` is {train.warmup_steps}, but the run has {train.max_steps} steps",
        )


RULES: tuple[Rule, ...] = (
    _names, _precision, _data, _evaluation, _launch, _warmup, *ELASTIC_RULES, *scheduler_rules.KUBERNETES_RULES, *metrics.METRIC_RULES,
    *NETWORK_RULES, *PATH_RULES, *SECURITY_RULES, *scheduler_rules.SLURM_RULES, *data_rules.SOURCE_RULES, *data_rules.TASK_RULES,
    *metrics.TRACKER_RULES,
)  # fmt: skip
