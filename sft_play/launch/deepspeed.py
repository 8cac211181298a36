"""DeepSpeed's JSON: rendered from the plan, or a user's own, checked against the pinned release and completed."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sft_play.config.reader import closest_word
from sft_play.config.schema import Config, TrainConfig
from sft_play.config.yaml_files import YamlNode, fill, parse_yaml, read_plain_yaml, read_text
from sft_play.errors import UserError, raise_all
from sft_play.files import text_sha256, write_text
from sft_play.plan.plan import Plan, Precision
from sft_play.runs.folder import RunFolder, cache_folder
from sft_play.text import plural

SECTIONS = frozenset({
    "activation_checkpointing", "aio", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger", "compile",
    "csv_monitor", "data_types", "flops_profiler", "fp16", "optimizer", "scheduler", "tensorboard", "timers",
    "torch_autocast", "wandb", "zero_optimization",
})  # fmt: skip
"""Top-level keys with an object. Of other values DeepSpeed says that a `bool` has no `get`, without the key."""
FLAGS = frozenset({
    "disable_allgather", "disable_python_gc", "dump_state", "memory_breakdown", "prescale_gradients",
    "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
})  # fmt: skip
"""Top-level keys with a boolean. DeepSpeed takes any text as true, `"false"` too."""
TOP_LEVEL = SECTIONS | FLAGS | {
    "communication_data_type", "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor",
    "log_level", "steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu", "vocabulary_size",
}  # fmt: skip
"""Top-level keys that are passed to DeepSpeed, which itself silently ignores unknown ones."""
NOT_OURS: Mapping[str, str] = {
    "autotuning": "the plan chooses the batch; measure with `make plan`",
    "data_efficiency": "the order of rows is fixed by the seed, the same for every strategy",
    "dataloader_drop_last": "no row is ever dropped",
    "expert_parallel": "this release shards by ZeRO only",
    "gradient_allreduce_op": "the loss is already scaled for a mean",
    "hybrid_engine": "it is for reinforcement learning",
    "pipeline": "`launch.strategy: pipeline` puts layers on ranks one after the other, without DeepSpeed",
    "sequence_parallel_size": "`launch.sequence_parallel` cuts lines into slices, with rows kept apart",
    "tensor_parallel": "`launch.tensor_parallel` slices layers, without DeepSpeed",
    "weight_quantization": "`tuning.mode: qlora` quantises the base",
}
"""Keys of DeepSpeed that would change what the run computes without the plan's knowledge."""

REMOVED = frozenset({
    "amp", "compression_training", "curriculum_learning", "eigenvalue", "elasticity", "graph_harvesting", "nebula",
    "progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients",
})  # fmt: skip
"""Keys that DeepSpeed 0.19 itself refuses, but only after workers have started."""

TEMPLATES = Path(__file__).with_name("templates")
GATHERED = "stage3_gather_16bit_weights_on_model_save"
OLD: Mapping[str, str] = {
    "bfloat16": '"bf16"',
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": f'"{GATHERED}"',
    "zero_optimization.cpu_offload": '"offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": '"offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": '"pin_memory" in "offload_optimizer"',
}
"""Old spelling of a key -> what is written today."""

ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "prescale_gradients": ((False,), "the loss is already scaled for a mean"),
    "gradient_predivide_factor": ((1,), "the loss is already scaled for a mean"),
    "zero_optimization.legacy_stage1": ((False,), "DeepSpeed has removed the old stage 1"),
    "zero_optimization.offload_optimizer.device": (("none", "cpu"), "states elsewhere cannot be saved in a checkpoint"),
    "zero_optimization.offload_param.device": (("none", "cpu"), "states elsewhere cannot be saved in a checkpoint"),
    "zero_optimization.offload_optimizer.ratio": ((1,), "a checkpoint takes an optimizer's states from one place"),
    "wandb.enabled": ((False,), "`train.report_to: wandb` records the run, and checks the login before it starts"),
    "comet.enabled": ((False,), "`train.report_to: comet_ml` records the run"),
    "torch_autocast.enabled": ((False,), "`train.bf16` decides what is computed in 16 bits"),
}
"""Key -> its only allowed values, and the reason."""
NO_EFFECT: Mapping[str, str] = {
    "activation_checkpointing": "`train.gradient_checkpointing` decides what is recomputed",
    "aio": "nothing is offloaded to a disk",
    "checkpoint": "checkpoints have one form for every strategy",
}
"""Sections that are left out, since they are about what is not done here, and the reason."""
ON_GPUS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
"""Keys of `zero_optimization` for which DeepSpeed has no code on a CPU."""
OFFLOAD = ("offload_optimizer", "offload_param")
BATCH_KEYS: Mapping[str, str] = {
    "batch_size": "train_micro_batch_size_per_gpu",
    "grad_accum": "gradient_accumulation_steps",
    "global_batch_size": "train_batch_size",
}
"""Key of `train.` -> key of DeepSpeed."""
OURS_UNLESS_TYPED = (
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "communication_data_type",
    "data_types",
)
MONITORS = ("csv_monitor", "tensorboard")
"""Sections that write into the folder in which the command was typed, unless they have an `output_path`."""
SUMS = ("communication_data_type", "data_types.grad_accum_dtype")
"""Types in which gradients are summed: between ranks, and over micro-steps."""
SCHEDULES = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
WITH_DEFAULTS = ("zero_optimization.", "fp16.", "bf16.", "activation_checkpointing.")
MODELS = "sft_play.training.deepspeed_models"
MODELS_SECONDS = 120.0
COMMENT, COMMA = r"//[^\n]*|/\*.*?\*/", r",(?=\s*[}\]])"


@dataclass(frozen=True, kw_only=True, slots=True)
class UserDeepSpeed:
    """A user's DeepSpeed settings after checks that need no plan."""

    path: Path
    settings: Mapping[str, Any]
    """Including values of `auto`."""
    source: YamlNode = field(default_factory=lambda: YamlNode({}))
    """The file with line numbers; empty for a run's own settings, which `resume` reads."""
    notices: tuple[str, ...] = ()
    problems: tuple[UserError, ...] = ()
    """Errors that no plan can fix, raised together with contradictions to the plan."""

    @property
    def stage(self) -> int:
        return int(self.settings["zero_optimization"]["stage"])

    @property
    def batch(self) -> dict[str, int]:
        """Batch numbers of the file, by keys of `train.`, without those that are `auto` or not valid."""
        values = {key: self.settings.get(name) for key, name in BATCH_KEYS.items()}
        numbers = {
            key: value for key, value in values.items() if isinstance(value, int) and value > 0 and value is not True
        }
        if numbers.keys() >= {"batch_size", "grad_accum"}:
            numbers.pop("global_batch_size", None)  # `resolve` compares it with the product
        return numbers

    @property
    def request(self) -> dict[str, Any]:
        """The settings as fields of `LaunchRequest`."""
        zero, stage = self.settings["zero_optimization"], self.stage
        optimizer, weights = (
            (zero.get(f"offload_{what}") or {}).get("device", "none") != "none" for what in ("optimizer", "param")
        )
        return {"zero_stage": stage, "offload_optimizer": optimizer, "offload_parameters": stage == 3 and weights}

    def place(self, key: str) -> str:
        """Return `file:line` of a dotted key, or of its nearest parent."""
        return self.source.place(self.path, key)


def batch_numbers(*, micro_batch: int, accumulation: int, world_size: int) -> dict[str, int]:
    """Return the batch as DeepSpeed counts it: in slots, some of which may stay empty in a step."""
    return dict(
        zip(BATCH_KEYS.values(), (micro_batch, accumulation, micro_batch * accumulation * world_size), strict=True)
    )


def settings_of(plan: Plan, *, clipping: float, hidden_size: int) -> dict[str, Any]:
    """Return the JSON for a plan. DeepSpeed has one batch for all ranks, so where they differ the largest counts."""
    micro_batch = max(rank.micro_batch for rank in plan.ranks)
    accumulation = max(rank.accumulation for rank in plan.ranks)
    return deepspeed_settings(
        stage=int(plan.strategy[-1]),
        device=plan.device,
        precision=plan.precision,
        batch=batch_numbers(micro_batch=micro_batch, accumulation=accumulation, world_size=plan.world_size),
        clipping=clipping,
        offload=plan.offload_optimizer,
        hidden_size=hidden_size,
    )


def deepspeed_settings(
    *,
    stage: int,
    device: str,
    precision: Precision | None,
    batch: Mapping[str, int] | None,
    clipping: float | None,
    offload: bool = False,
    hidden_size: int | None = None,
) -> dict[str, Any]:
    """Return the JSON for a ZeRO stage; `None` becomes `auto`, as in the files in `deepspeed/`."""
    on_gpus, size, exact = device == "cuda", hidden_size or 0, precision == "bf16"
    facts: dict[str, Any] = {
        **dict.fromkeys(BATCH_KEYS.values(), "auto"),
        **(batch or {}),
        "bucket": size * size or "auto",
        "prefetch": (int(0.9 * size * size) or "auto") if stage == 3 else None,
        "persistence": (10 * size or "auto") if stage == 3 else None,
        "sums": "fp32" if exact else None,
        "at_once": True if exact and stage == 1 else None,
        "clipping": "auto" if clipping is None else clipping,
        "bf16": exact if precision else "auto",
        "fp16": precision == "fp16" if precision else "auto",
        "stage": stage,
        "on_gpus": on_gpus,
        "gathered": True if stage == 3 else None,
        "offload": offload,
        "offload_weights": offload and stage == 3,
        "cpu_adam": offload and on_gpus,
    }
    return dict(fill(read_plain_yaml(TEMPLATES / "deepspeed.yaml"), facts))


def read_user_json(path: Path) -> UserDeepSpeed:
    """Read and check a user's DeepSpeed JSON. Raise `UserError` with every problem, each with `file:line`."""
    user = load_user_json(path)
    raise_all(user.problems)
    return user


def load_user_json(path: Path) -> UserDeepSpeed:
    """Read a user's DeepSpeed JSON with its `problems`. Raise `UserError` with all of them if no plan is possible."""
    settings, source = _read(path)
    run = RunFolder(path.parent)
    if path.name == run.deepspeed.name and run.events.exists():
        return settings_from_run(settings, path, source)
    return check_settings(settings, source, path)


OWN_WORD = ("checkpoint", "comet", "compile", "csv_monitor", "flops_profiler", "tensorboard", "wandb")
"""Sections that write, contact a server or name code to import, accepted only from a file of the user."""


def settings_from_run(settings: dict[str, Any], path: Path, source: YamlNode | None = None) -> UserDeepSpeed:
    """Check settings from a run's own files, which a stranger may have written."""
    allowed, notices = dict(settings), list[str]()
    for section in OWN_WORD:
        if allowed.pop(section, None) is not None:
            notices.append(f"{path}: `{section}` is not read from a run: only your DeepSpeed JSON can set it")
    user = check_settings(allowed, source or YamlNode({}), path)
    raise_all(user.problems)
    return replace(user, notices=tuple(notices))


def check_settings(settings: dict[str, Any], source: YamlNode, path: Path) -> UserDeepSpeed:
    """Check settings that were read from `path`, with `source` for line numbers.

    DeepSpeed's own models check the values later (`ask_deepspeed`). Raise `UserError` if no plan is possible.
    """
    problems = [
        UserError(text, place=source.place(path, key), hint=hint) for key, text, hint in _refused_keys(settings)
    ]
    if settings.get("zero_optimization") is None:
        hint = 'add "zero_optimization": {"stage": 2}'
        problems.append(UserError("`zero_optimization` is missing", place=str(path), hint=hint))
    settings = {key: value for key, value in settings.items() if value is not None}
    if (
        any(key.split(".")[0] in SECTIONS for key, *_ in _misshapen(settings))
        or settings.get("zero_optimization") is None
    ):
        raise_all(problems)
    return UserDeepSpeed(path=path, settings=settings, source=source, problems=tuple(problems))


def _read(path: Path) -> tuple[dict[str, Any], YamlNode]:
    """Return a file's object and the places of its keys. Raise `UserError`.

    `//` and `/* */` comments and trailing commas are allowed.
    """
    text = read_text(path)
    for extension in (COMMENT, COMMA):  # replaced by spaces, so that lines and columns stay the same
        text = re.sub(rf'"(?:[^"\\\n]|\\.)*"|({extension})', _blank, text, flags=re.DOTALL)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        hint = "`//` and `/* */` comments and trailing commas are fine"
        raise UserError(f"not JSON: {error.msg}", place=place, hint=hint) from error
    except RecursionError as error:
        raise UserError("not JSON that can be read: nested too deeply", place=str(path)) from error
    if not isinstance(value, dict):
        raise UserError(f"contains a {type(value).__name__}; expected an object `{{...}}`", place=f"{path}:1")
    # JSON is YAML except for tabs; this also refuses duplicate keys.
    return value, parse_yaml(text.replace("\t", " "), str(path))


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0]) if match[1] else match[0]


def _refused_keys(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each key that is refused, the reason, and a hint."""
    yield from _misshapen(settings)
    for key, today in OLD.items():
        if _at(settings, key) is not None:
            yield key, f"`{key}` is an old spelling", f"write {today}"
    for key in settings.keys() - TOP_LEVEL:
        if key in NOT_OURS:
            yield key, f"`{key}` is not supported here: {NOT_OURS[key]}", "remove the key"
        elif key in REMOVED:
            yield key, f"`{key}` is no longer in DeepSpeed, which would end with it", "remove the key"
        else:
            close = closest_word(key, sorted(TOP_LEVEL))
            hint = f"did you mean `{close}`?" if close else "DeepSpeed 0.19 has none; remove the key"
            yield key, f"unknown DeepSpeed key `{key}`", hint
    types = settings.get("data_types")
    for key in sorted(types.keys() - {"grad_accum_dtype"}) if isinstance(types, Mapping) else ():
        yield f"data_types.{key}", f"unknown DeepSpeed key `data_types.{key}`", "it has `grad_accum_dtype` only"
    for key, value in settings.items():
        if key in FLAGS and not isinstance(value, bool | None) and value != "auto":
            yield key, f"`{key}` is `{_json(value)}`; expected true or false", ""
    yield from _homeless(settings)
    for key, (values, why) in ONLY.items():
        if (value := _at(settings, key)) not in (None, "auto", *values):
            yield key, f"`{key}` is `{_json(value)}`: {why}", "remove the key"


def _homeless(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for section in MONITORS:
        if _at(settings, f"{section}.enabled") is True and not _at(settings, f"{section}.output_path"):
            folder = _at(settings, f"{section}.job_name") or "DeepSpeedJobName"
            text = f"`{section}` has no `output_path`, so it would write `{folder}/` where the command was typed"
            yield section, text, "remove the section, since `make tensorboard` shows every run; or add the path"


def _misshapen(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each key whose value the plan could not read, the reason, and a hint."""
    params = ("optimizer.params", "scheduler.params")
    for key in (*sorted(SECTIONS), *params, *(f"zero_optimization.{part}" for part in OFFLOAD)):
        if not isinstance(value := _at(settings, key), Mapping | None):
            yield key, f"`{key}` is `{_json(value)}`; expected an object", ""
    zero = settings.get("zero_optimization")
    if isinstance(zero, Mapping) and ((stage := zero.get("stage")) not in (1, 2, 3) or stage is True):
        hint = "`make train-distributed` trains without sharding" if stage in (0, None) else ""
        yield "zero_optimization.stage", f"`zero_optimization.stage` is `{_json(stage)}`; expected 1, 2 or 3", hint


def _at(value: Mapping[str, Any], dotted: str) -> Any:
    part: Any = value
    for name in dotted.split(".") if dotted else ():
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def resolve(
    user: UserDeepSpeed | None, plan: Plan, config: Config, *, hidden_size: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON for the run, by the plan and the user's JSON, without any `auto`, and notices for the user.

    Raise `UserError` with all problems of the file and all contradictions to the plan, with both values. The file's
    batch is compared with the configuration and with the rows of a step, not with the plan's slots, which may hold
    packs or exceed the rows and are not known before the data are.
    """
    ours = settings_of(plan, clipping=config.train.max_grad_norm, hidden_size=hidden_size)
    if user is None:
        return ours, []
    settings, notices, problems = deepcopy(dict(user.settings)), list(user.notices), list(user.problems)

    def refuse(key: str, text: str, hint: str) -> None:
        problems.append(UserError(text, place=user.place(key), hint=hint))

    asked: dict[str, Any] = {name: getattr(config.train, key) for key, name in BATCH_KEYS.items()}
    asked["train_batch_size"] = plan.global_batch_size
    decided = {
        name: f"set by `train.{key}`" for key, name in {**BATCH_KEYS, "max_grad_norm": "gradient_clipping"}.items()
    }
    if config.train.max_grad_norm == TrainConfig().max_grad_norm:
        decided["gradient_clipping"] = "the default of `train.max_grad_norm`"
    if user.batch.keys() >= {"batch_size", "grad_accum"}:
        product = " x ".join(f"`{BATCH_KEYS[key]}` {user.batch[key]}" for key in ("batch_size", "grad_accum"))
        decided["train_batch_size"] = f"{product} x {plural(plan.world_size, 'process')}"
    decided |= dict.fromkeys(("bf16.enabled", "fp16.enabled"), f"the plan's precision is {plan.precision}")
    for dotted, because in decided.items():
        section, _, key = dotted.rpartition(".")
        part = settings.setdefault(section, {}) if section else settings
        expected, theirs = _at(ours, dotted), part.get(key, "auto")
        part[key] = expected
        expected = expected if asked.get(key, "auto") == "auto" else asked[key]
        if theirs not in ("auto", expected):
            text = f"`{dotted}` is `{_json(theirs)}`, but the run uses `{_json(expected)}` ({because})"
            refuse(dotted, text, f'write "{key}": "auto", or make the two agree')
    for name in ("optimizer", "scheduler"):
        if (section_of := settings.pop(name, None)) is not None:
            agrees = _compare(name, section_of, plan, config, refuse)
            notices.append(f"{user.place(name)}: `{name}` agrees with `train.{agrees}`, which runs")
    for name in sorted(settings.keys() & NO_EFFECT.keys()):
        del settings[name]
        notices.append(f"{user.place(name)}: `{name}` has no effect here: {NO_EFFECT[name]}")
    settings = {key: ours[key] for key in OURS_UNLESS_TYPED if key in ours} | settings
    settings["bf16"] = ours["bf16"] | settings["bf16"]
    rough = {key: typed for key in SUMS if (typed := _at(user.settings, key)) in ("bf16", "fp16")}
    notices += [
        f"{user.place(key)}: by `{key}` gradients are summed in `{typed}` instead of fp32"
        for key, typed in rough.items()
        if typed != plan.precision or typed == "bf16"
    ]
    if user.stage == 3:  # otherwise DeepSpeed refuses to gather weights, but only when it saves
        if (gathered := settings["zero_optimization"].get(GATHERED)) not in (None, True, "auto"):
            why = "or DeepSpeed could not save the model"
            notices.append(
                f"{user.place(f'zero_optimization.{GATHERED}')}: `{GATHERED}` is `{_json(gathered)}`, but the run uses"
                f" `true`, {why}"
            )
        settings["zero_optimization"][GATHERED] = True
    for key in ON_GPUS if plan.device == "cpu" else ():
        if settings["zero_optimization"].get(key) is True:
            refuse(
                f"zero_optimization.{key}",
                f"`zero_optimization.{key}` is `true`, which DeepSpeed does on GPUs only",
                "remove the key",
            )
    _fill_automatic(settings, ours, "", refuse)
    raise_all(problems)
    return _whole_numbers(settings), notices


def ask_deepspeed(user: UserDeepSpeed, settings: Mapping[str, Any]) -> None:
    """Raise `UserError` with everything that DeepSpeed's own models refuse in the `settings` that `resolve` returned.

    Accepted settings are remembered. Where DeepSpeed cannot be imported, or does not answer, the workers report it.
    """
    text = json.dumps(settings, sort_keys=True)
    if not find_spec("deepspeed"):
        return
    accepted = cache_folder() / "deepspeed" / f"{version('deepspeed')}-{text_sha256(text)[:24]}"
    if accepted.is_file():
        return
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        words = [sys.executable, "-m", MODELS]
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=MODELS_SECONDS, check=True)
        refusals = json.loads(done.stdout.splitlines()[-1])
        if not refusals:
            write_text(accepted, text)
        raise_all([_refused(user, settings, refusal["key"], refusal["words"]) for refusal in refusals])


def _refused(user: UserDeepSpeed, settings: Mapping[str, Any], key: str, words: str) -> UserError:
    value = _at(settings, key) if key else None
    what = "the settings: " if value is None else f"`{key}` is `{_json(value)}`; "
    return UserError(
        f"{what}DeepSpeed says: {words}", place=user.place(key), hint="correct the value, or remove the key"
    )


Refuse = Callable[[str, str, str], None]


def _compare(name: str, section: Mapping[str, Any], plan: Plan, config: Config, refuse: Refuse) -> str:
    """Refuse an optimizer or schedule other than the run's, so that all strategies give the same loss curve.

    Return what runs.
    """
    kind, train, params = str(section.get("type", "")), config.train, section.get("params") or {}
    ours: dict[str, Any] = {}
    if name == "optimizer":
        key, runs, agrees = "optim", plan.optim, kind.lower() in {"adam", "adamw"} and "adam" in plan.optim
        betas = [train.extra.get("adam_beta1", 0.9), train.extra.get("adam_beta2", 0.999)]
        eps = train.extra.get("adam_epsilon", 1e-8)
        ours = {
            "lr": plan.learning_rate,
            "betas": betas,
            "eps": eps,
            "weight_decay": train.weight_decay,
            "adam_w_mode": True,
        }
        ours["torch_adam"] = params.get("torch_adam")
    else:
        key, runs = "lr_scheduler_type", str(train.lr_scheduler_type)
        agrees = SCHEDULES.get(kind.lower()) == runs
    if not agrees:
        text = f"`{name}.type` is `{kind}`, but the run uses `{runs}`"
        refuse(f"{name}.type", text, f"set `train.{key}`, or take `{name}` out")
        return key
    for param, value in params.items():
        if value not in ("auto", ours.get(param, "auto")):
            uses = f"the run uses `{_json(ours[param])}`" if param in ours else "the plan decides it"
            text = f"`{name}.params.{param}` is `{_json(value)}`, but {uses}"
            refuse(f"{name}.params.{param}", text, 'write "auto", or the same under `train.`')
    return f"{key}: {runs}"


def _fill_automatic(part: dict[str, Any], ours: Mapping[str, Any], prefix: str, refuse: Refuse) -> None:
    """Replace each `auto` by our value, or by DeepSpeed's default where its section has defaults; refuse others."""
    for key, value in list(part.items()):
        inner = ours.get(key)
        if isinstance(value, dict):
            _fill_automatic(value, inner if isinstance(inner, dict) else {}, f"{prefix}{key}.", refuse)
        elif value == "auto" and key in ours:
            part[key] = inner
        elif value == "auto" and prefix.startswith(WITH_DEFAULTS):
            del part[key]
        elif value == "auto":
            refuse(f"{prefix}{key}", f"`{prefix}{key}` is `auto`, but nothing decides it", "write a value")


def _whole_numbers(value: Any) -> Any:
    """Return a value with numbers such as 5e8 as integers, which DeepSpeed's typed keys require."""
    if isinstance(value, dict):
        return {key: _whole_numbers(part) for key, part in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() and value >= 1000 else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
