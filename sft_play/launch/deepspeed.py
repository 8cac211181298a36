"""DeepSpeed's JSON: ours from the plan, and a user's own, checked against the pinned release and filled in from the plan."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sft_play.config.schema import Config
from sft_play.errors import UserError, raise_all
from sft_play.files import read_json
from sft_play.plan.plan import Plan, Precision
from sft_play.plan.shape import ModelShape

TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|[{}\[\]:,]', re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonDocument:
    """A parsed object and where its keys stand."""

    path: Path
    value: Mapping[str, Any]
    lines: Mapping[str, int]
    """Dotted key -> line, counted from 1; keys inside lists are left out."""

    def place(self, key: str) -> str:
        """Returns `file:line` of a dotted key, or of its nearest parent."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.path}:{self.lines[key]}" if key else str(self.path)


def read_document(path: Path) -> JsonDocument:
    """Reads an object from `path`. Raises `UserError` for no file, bad JSON (line and column), or a key given twice."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"`{path}` cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"`{path}` is not UTF-8 text (byte {error.start})") from error
    plain = _without_comments(text)
    try:
        value = json.loads(plain)
    except json.JSONDecodeError as error:
        place = f"{path}:{error.lineno}:{error.colno}"
        raise UserError(
            f"not JSON: {error.msg}", place=place, hint="`//` and `/* */` comments and trailing commas are fine"
        ) from error
    if not isinstance(value, dict):
        raise UserError(f"holds a {type(value).__name__}; expected an object `{{...}}`", place=f"{path}:1")
    return JsonDocument(path=path, value=value, lines=_key_lines(plain, path))


def _without_comments(text: str) -> str:
    """Replaces comments and trailing commas by spaces, so that every line and column stays."""

    def blank(found: re.Match[str]) -> str:
        token = found[0]
        return re.sub(r"[^\n]", " ", token) if token.startswith("/") else token

    text = TOKEN.sub(blank, text)
    characters = list(text)
    comma: int | None = None
    for found in TOKEN.finditer(text):
        if found[0] in "}]" and comma is not None and not text[comma + 1 : found.start()].strip():
            characters[comma] = " "
        comma = found.start() if found[0] == "," else None
    return "".join(characters)


def _key_lines(text: str, path: Path) -> dict[str, int]:
    """Returns dotted key -> line. Raises `UserError` for a key that stands twice in one object, of which JSON keeps the last."""
    lines: dict[str, int] = {}
    stack: list[str | None] = []
    """One entry per open bracket: the key that is being read, or `None` in a list."""
    key, expects_key = "", False
    for found in TOKEN.finditer(text):
        token = found[0]
        if token in "{[":
            stack.append(None if token == "[" else "")
            expects_key = token == "{"
        elif token in "}]":
            stack.pop()
            expects_key = False
        elif token == ",":
            expects_key = bool(stack) and stack[-1] is not None
        elif token.startswith('"') and expects_key:
            stack[-1] = json.loads(token)
            expects_key = False
            if None not in stack:
                key = ".".join(str(part) for part in stack)
                line = text.count("\n", 0, found.start()) + 1
                if key in lines:
                    raise UserError(f"`{key}` is given twice, on lines {lines[key]} and {line}", place=f"{path}:{line}")
                lines[key] = line
    return lines


TOP_LEVEL = frozenset({
    "activation_checkpointing", "aio", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger", "communication_data_type",
    "compile", "csv_monitor", "data_types", "disable_allgather", "disable_python_gc", "dump_state", "flops_profiler",
    "fp16", "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "log_level",
    "memory_breakdown", "optimizer", "prescale_gradients", "scheduler", "steps_per_print", "tensorboard", "timers",
    "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu", "vocabulary_size", "wall_clock_breakdown",
    "wandb", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
})  # fmt: skip
"""Top-level keys that we hand on to DeepSpeed, which itself ignores unknown ones in silence."""
NOT_OURS: Mapping[str, str] = {
    "autotuning": "the plan chooses the batch; measure with `make plan`",
    "data_efficiency": "the order of rows is fixed by the seed, the same for every strategy",
    "dataloader_drop_last": "no row is ever dropped",
    "expert_parallel": "this release shards by ZeRO only",
    "gradient_allreduce_op": "the loss is already scaled for a mean",
    "hybrid_engine": "it is for reinforcement learning",
    "pipeline": "this release shards by ZeRO only",
    "sequence_parallel_size": "this release shards by ZeRO only",
    "tensor_parallel": "this release shards by ZeRO only",
    "weight_quantization": "`tuning.mode: qlora` quantises the base",
}
"""Keys that DeepSpeed knows and that would change what the run computes behind the plan's back."""
BATCH_KEYS: Mapping[str, str] = {
    "batch_size": "train_micro_batch_size_per_gpu", "grad_accum": "gradient_accumulation_steps", "global_batch_size": "train_batch_size",
}  # fmt: skip
"""Key of `train.` -> key of DeepSpeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchNumbers:
    """The batch as DeepSpeed counts it: slots, which the last micro-batches of a step may leave partly empty."""

    micro_batch: int
    accumulation: int
    world_size: int

    @staticmethod
    def of(plan: Plan) -> BatchNumbers:
        """The plan's numbers; where ranks differ, the largest, since DeepSpeed knows one for all."""
        return BatchNumbers(
            micro_batch=max(r.micro_batch for r in plan.ranks),
            accumulation=max(r.accumulation for r in plan.ranks),
            world_size=plan.world_size,
        )

    @property
    def settings(self) -> dict[str, int]:
        slots = self.micro_batch * self.accumulation * self.world_size
        return dict(zip(BATCH_KEYS.values(), (self.micro_batch, self.accumulation, slots), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class UserDeepSpeed:
    """A user's file after the checks that need no plan."""

    document: JsonDocument
    settings: Mapping[str, Any]
    """With old spellings translated; `auto` still inside."""
    stage: int
    notices: tuple[str, ...] = field(default=())
    problems: tuple[UserError, ...] = ()
    """What is wrong in the file and leaves a plan possible: `resolve` raises it together with what contradicts the plan."""

    @property
    def batch(self) -> dict[str, int]:
        """The batch that the file asks for, by keys of `train.`; empty where it says `auto`, or no number of rows."""
        given = {key: self.settings.get(name) for key, name in BATCH_KEYS.items()}
        found = {key: value for key, value in given.items() if isinstance(value, int) and value > 0 and value is not True}
        if found.keys() >= {"batch_size", "grad_accum"}:
            found.pop("global_batch_size", None)  # the product, which `resolve` compares
        return found

    def offloads(self, what: Literal["optimizer", "param"]) -> bool:
        """Whether the file keeps optimizer states or weights outside the GPU."""
        part = self.settings["zero_optimization"].get(f"offload_{what}")
        return isinstance(part, dict) and str(part.get("device", "none")) != "none"


def deepspeed_settings(
    *,
    stage: int,
    device: str,
    precision: Precision | None,
    batch: BatchNumbers | None,
    clipping: float | None,
    offload: bool = False,
    hidden_size: int | None = None,
) -> dict[str, Any]:
    """Returns the JSON for a ZeRO stage. What is `None` becomes `auto`, as in the files that are kept for people.

    Bucket sizes count elements; those by `hidden_size` are the formulas that transformers uses for `auto`.
    """
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": device == "cuda",
        "reduce_bucket_size": hidden_size * hidden_size if hidden_size else "auto",
        "allgather_bucket_size": 200_000_000,
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size) if hidden_size else "auto",
            "stage3_param_persistence_threshold": 10 * hidden_size if hidden_size else "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device == "cuda"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": device == "cuda"}
    # By itself DeepSpeed reduces gradients and adds up those of micro-steps in the type of the weights, with 8 bits of mantissa.
    exact = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}} if precision == "bf16" else {}
    # Stage 1 would otherwise hold every weight's gradient in bf16 too until the backward pass ends.
    at_once = {"immediate_grad_update": True} if exact and stage == 1 else {}
    return {
        **(batch.settings if batch else dict.fromkeys(BATCH_KEYS.values(), "auto")),
        **exact,
        "gradient_clipping": "auto" if clipping is None else clipping,
        "bf16": {"enabled": precision == "bf16" if precision else "auto", **at_once},
        "fp16": {"enabled": precision == "fp16" if precision else "auto"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own CPU Adam is only worth its compile time when a GPU's optimizer states are kept in memory.
        "zero_force_ds_cpu_optimizer": offload and device == "cuda",
    }


@cache
def known_keys() -> dict[str, Any]:
    """The table of `scripts/render_deepspeed_keys.py`."""
    table: dict[str, Any] = read_json(Path(__file__).with_name("deepspeed_keys.json"))
    return table


def read_user_json(path: Path) -> UserDeepSpeed:
    """Reads and checks a user's DeepSpeed JSON. Raises `UserError` with every problem, each with `file:line`."""
    user = examine_user_json(path)
    raise_all(user.problems)
    return user


def examine_user_json(path: Path) -> UserDeepSpeed:
    """Reads a user's DeepSpeed JSON with its `problems`. Raises `UserError` with all of them where no plan can be made."""
    document = read_document(path)
    problems: list[UserError] = []
    settings, notices = _translated(document, problems)
    _check_keys(document, problems)
    zero = settings.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else None
    readable = isinstance(zero, dict) and stage in {1, 2, 3} and not isinstance(stage, bool)
    if zero is None:
        problems.append(
            UserError("`zero_optimization` is missing", place=str(path), hint='add "zero_optimization": {"stage": 2}')
        )
    elif not isinstance(zero, dict):
        text = f"`zero_optimization` is `{zero}`; expected an object with a `stage`"
        problems.append(UserError(text, place=document.place("zero_optimization")))
    elif not readable:
        place = document.place("zero_optimization.stage")
        hint = "`make train-distributed` trains without sharding" if stage == 0 else None
        problems.append(UserError(f"`zero_optimization.stage` is `{stage}`; expected 1, 2 or 3", place=place, hint=hint))
    if not readable:
        raise_all(problems)
    return UserDeepSpeed(
        document=document, settings=settings, stage=int(stage or 0), notices=tuple(notices), problems=tuple(problems)
    )


def _translated(document: JsonDocument, problems: list[UserError]) -> tuple[dict[str, Any], list[str]]:
    """Old spellings in today's words, each with a notice."""
    settings = deepcopy(dict(document.value))
    notices = []
    if "bfloat16" in settings:
        settings["bf16"] = settings.pop("bfloat16")
        notices.append(f"{document.place('bfloat16')}: `bfloat16` is now `bf16`")
    zero = settings.get("zero_optimization")
    if isinstance(zero, dict):
        pin = zero.pop("cpu_offload_use_pin_memory", None)
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if old not in zero:
                continue
            place = document.place(f"zero_optimization.{old}")
            value = zero.pop(old)
            if new in zero:
                problems.append(UserError(f"`{old}` and `{new}` are both given; keep `{new}`", place=place))
            elif not isinstance(value, bool):
                problems.append(UserError(f"`zero_optimization.{old}` is `{value}`; expected true or false", place=place))
            elif value:
                zero[new] = {"device": "cpu"} | ({"pin_memory": pin} if isinstance(pin, bool) else {})
                notices.append(
                    f'{place}: `{old}: true` is the old spelling of `"{new}": {{"device": "cpu"}}`, and is read as that'
                )
        if "stage3_gather_fp16_weights_on_model_save" in zero:
            value = zero.pop("stage3_gather_fp16_weights_on_model_save")
            zero.setdefault("stage3_gather_16bit_weights_on_model_save", value)
            notices.append("`stage3_gather_fp16_weights_on_model_save` is now `stage3_gather_16bit_weights_on_model_save`")
    return settings, notices


def _check_keys(document: JsonDocument, problems: list[UserError]) -> None:
    removed, sections = known_keys()["removed"], known_keys()["sections"]
    for key in document.value:
        if key in removed:
            problems.append(UserError(f"`{key}`: {removed[key]}", place=document.place(key), hint="take the key out"))
        elif key in NOT_OURS:
            problems.append(
                UserError(f"`{key}` is not supported here: {NOT_OURS[key]}", place=document.place(key), hint="take the key out")
            )
        elif key not in TOP_LEVEL:
            problems.append(_unknown(document, key, sorted(TOP_LEVEL)))
    for section, keys in sections.items():
        part = _at(document.value, section)
        if isinstance(part, dict):
            _check_section(document, section, part, keys, problems)
        elif part is not None and section != "zero_optimization":
            problems.append(UserError(f"`{section}` is `{part}`; expected an object", place=document.place(section)))
    for part in ("offload_optimizer", "offload_param"):
        if _at(document.value, f"zero_optimization.{part}.device") == "nvme":
            place = document.place(f"zero_optimization.{part}.device")
            problems.append(
                UserError(
                    f"`{part}.device` is `nvme`: states there cannot be saved in a checkpoint", place=place, hint="use `cpu`"
                )
            )


def _check_section(
    document: JsonDocument, section: str, part: Mapping[str, Any], keys: Mapping[str, str], problems: list[UserError]
) -> None:
    removed = known_keys()["removed"]
    for key, value in part.items():
        dotted = f"{section}.{key}"
        if dotted in removed:
            problems.append(UserError(f"`{dotted}`: {removed[dotted]}", place=document.place(dotted), hint="take the key out"))
        elif key not in keys:
            problems.append(_unknown(document, dotted, [f"{section}.{known}" for known in keys]))
        elif value not in ("auto", None) and not _fits(value, keys[key]):
            text = f"`{dotted}` is `{value}`; expected {EXPECTED[keys[key]]}"
            problems.append(UserError(text, place=document.place(dotted)))


EXPECTED = {
    "bool": "true or false",
    "int": "an integer",
    "number": "a number",
    "string": "a text",
    "object": "an object",
    "any": "a value",
}


def _fits(value: Any, kind: str) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":  # 5e8 is how everybody writes bucket sizes
        return isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer()
    if kind == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, {"string": str, "object": dict}.get(kind, object))


def _unknown(document: JsonDocument, key: str, known: list[str]) -> UserError:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    hint = f"did you mean `{close[0]}`?" if close else "DeepSpeed 0.19 has no such key; take it out"
    return UserError(f"unknown DeepSpeed key `{key}`", place=document.place(key), hint=hint)


def _at(value: Mapping[str, Any], dotted: str) -> Any:
    part: Any = value
    for name in dotted.split("."):
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


AGREED: Mapping[str, str] = {
    "train_micro_batch_size_per_gpu": "the plan's rows per device; set `train.batch_size`",
    "gradient_accumulation_steps": "the plan's micro-steps; set `train.grad_accum`",
    "train_batch_size": "the plan's micro-batch x accumulation x world size; set `train.global_batch_size`",
    "gradient_clipping": "set `train.max_grad_norm`",
}
"""Top-level numbers that the plan or the configuration decides, each with where."""
OURS_UNLESS_TYPED = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type", "data_types")
SCHEDULES = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
SECTIONS_WITH_DEFAULTS = frozenset({"zero_optimization", "fp16", "bf16", "activation_checkpointing"})


def resolve(
    user: UserDeepSpeed, plan: Plan, config: Config, *, hidden_size: int, early: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Returns the JSON for the run and what the user should know.

    Raises `UserError` with all that is wrong in the file and each contradiction, with both values. An `early` plan does not know the
    data: only what the configuration itself says of the batch is compared with it.
    """
    work = _Resolution(user=user, plan=plan, config=config, settings=deepcopy(dict(user.settings)), notices=list(user.notices))
    ours = deepspeed_settings(
        stage=user.stage,
        device=plan.device,
        precision=plan.precision,
        batch=BatchNumbers.of(plan),
        clipping=config.train.max_grad_norm,
        offload=_offloads(work.settings),
        hidden_size=hidden_size,
    )
    open_ones = {name for key, name in BATCH_KEYS.items() if early and not _decided(config, key)}
    for key, because in AGREED.items():
        if key in open_ones:
            work.settings[key] = ours[key]
            continue
        work.agree(work.settings, key, ours[key], because)
    for section in ("bf16", "fp16"):
        part = work.settings.setdefault(section, {})
        work.agree(part, "enabled", ours[section]["enabled"], f"the plan's precision is {plan.precision}", section=section)
    work.leave_optimizer_out()
    work.leave_scheduler_out()
    for key in OURS_UNLESS_TYPED:
        if key in ours:
            work.settings.setdefault(key, ours[key])
    work.settings["bf16"] = ours["bf16"] | work.settings["bf16"]
    work.fill_automatic(work.settings, ours, prefix="")
    raise_all([*user.problems, *work.problems])
    return _whole_numbers(work.settings), work.notices


def checked_plan(user: UserDeepSpeed | None, config: Config, shape: ModelShape, make: Callable[[], Plan]) -> Plan:
    """Returns the plan that `make` makes. Raises with it, before anything is prepared, what `resolve` would refuse of a user's file."""
    if user is None:
        return make()
    try:
        plan = make()
    except UserError as error:
        if user.problems:
            raise_all([*user.problems, error])
        raise
    resolve(user, plan, config, hidden_size=shape.hidden_size, early=plan.steps_per_epoch is None)
    return plan


def _decided(config: Config, key: str) -> bool:
    train = config.train
    both = train.batch_size != "auto" and train.grad_accum != "auto"
    return both or (key != "global_batch_size" and getattr(train, key) != "auto")


@dataclass(kw_only=True, slots=True)
class _Resolution:
    """A user's settings on their way; collects every problem before any is raised."""

    user: UserDeepSpeed
    plan: Plan
    config: Config
    settings: dict[str, Any]
    notices: list[str]
    problems: list[UserError] = field(default_factory=list)

    def refuse(self, text: str, key: str, hint: str) -> None:
        self.problems.append(UserError(text, place=self.user.document.place(key), hint=hint))

    def agree(self, part: dict[str, Any], key: str, ours: Any, because: str, *, section: str = "") -> None:
        """Sets `part[key]` to our value; another value of the user's is a problem."""
        theirs = part.get(key, "auto")
        if theirs not in ("auto", ours):
            dotted = f"{section}.{key}" if section else key
            text = f"`{dotted}` is `{_json(theirs)}`, but the run uses `{_json(ours)}` ({because})"
            self.refuse(text, dotted, f'write "{key}": "auto", or make the two agree')
        part[key] = ours

    def leave_optimizer_out(self) -> None:
        """One optimizer for every strategy, so that all give one loss curve: the section must agree with the plan."""
        section = self.settings.pop("optimizer", None)
        if section is None:
            return
        kind = _type_of(section)
        if kind.lower() not in {"adam", "adamw"} or "adam" not in self.plan.optim:
            text = f"`optimizer.type` is `{kind}`, but the run uses `{self.plan.optim}`"
            self.refuse(text, "optimizer.type", "set `train.optim` and take `optimizer` out")
            return
        train = self.config.train
        betas = [train.extra.get("adam_beta1", 0.9), train.extra.get("adam_beta2", 0.999)]
        ours: dict[str, tuple[Any, str]] = {
            "lr": (self.plan.learning_rate, "train.learning_rate"),
            "betas": (betas, "train.adam_beta1 and train.adam_beta2"),
            "eps": (train.extra.get("adam_epsilon", 1e-8), "train.adam_epsilon"),
            "weight_decay": (train.weight_decay, "train.weight_decay"),
            "adam_w_mode": (True, "train.optim"),
        }
        for key, value in section.get("params", {}).items():
            dotted = f"optimizer.params.{key}"
            if key == "torch_adam":  # which of two implementations of one formula runs
                continue
            if key not in ours:
                self.refuse(f"`{dotted}` has no counterpart here", dotted, "take `optimizer` out and set `train.optim`")
            elif value not in ("auto", ours[key][0]):
                text = f"`{dotted}` is `{_json(value)}`, but the run uses `{_json(ours[key][0])}`"
                self.refuse(text, dotted, f"set `{ours[key][1]}`")
        place = self.user.document.place("optimizer")
        self.notices.append(f"{place}: `optimizer` agrees with the plan's `{self.plan.optim}`, which runs")

    def leave_scheduler_out(self) -> None:
        """One schedule for every strategy, for the same reason."""
        section = self.settings.pop("scheduler", None)
        if section is None:
            return
        kind, ours = _type_of(section), self.config.train.lr_scheduler_type
        name = SCHEDULES.get(kind.lower())
        if name != ours:
            text = f"`scheduler.type` is `{kind}`, but the run's schedule is `{ours}`"
            wanted = f"set `train.lr_scheduler_type: {name}`" if name else "set `train.lr_scheduler_type`"
            self.refuse(text, "scheduler.type", f"{wanted}, or take `scheduler` out")
            return
        for key, value in section.get("params", {}).items():
            if value != "auto":
                dotted = f"scheduler.params.{key}"
                hint = 'write "auto", and set `train.warmup_steps`, `train.max_steps` or `train.learning_rate`'
                self.refuse(f"`{dotted}` is `{_json(value)}`, which the plan decides", dotted, hint)
        place = self.user.document.place("scheduler")
        self.notices.append(f"{place}: `scheduler` agrees with `train.lr_scheduler_type: {name}`, which runs")

    def fill_automatic(self, part: dict[str, Any], ours: Mapping[str, Any], *, prefix: str) -> None:
        """Replaces each `auto`: by our value, else by DeepSpeed's default where its section has one; else it is a problem."""
        for key, value in list(part.items()):
            inner = ours.get(key)
            if isinstance(value, dict):
                self.fill_automatic(value, inner if isinstance(inner, Mapping) else {}, prefix=f"{prefix}{key}.")
            elif value == "auto" and key in ours:
                part[key] = inner
            elif value == "auto" and prefix.partition(".")[0] in SECTIONS_WITH_DEFAULTS:
                del part[key]
            elif value == "auto":
                self.refuse(f"`{prefix}{key}` is `auto`, but nothing decides it", f"{prefix}{key}", "write a value")


def _type_of(section: Any) -> str:
    return str(section.get("type", "")) if isinstance(section, Mapping) else _json(section)


def _offloads(settings: Mapping[str, Any]) -> bool:
    offload = settings["zero_optimization"].get("offload_optimizer") or {}
    return str(offload.get("device", "none")) != "none"


def _whole_numbers(value: Any) -> Any:
    """Turns 5e8 into 500000000, as the typed keys of DeepSpeed want."""
    if isinstance(value, dict):
        return {k: _whole_numbers(v) for k, v in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() and value >= 1000 else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
