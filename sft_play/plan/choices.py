"""Automatic choices with their reasons, and refusals of impossible settings with the way around them. Pure."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, cast

from sft_play.config.optimizers import (
    OPTIM,
    OPTIMIZERS,
    WITHOUT_WARMUP,
    lr_settings,
)
from sft_play.config.schema import Config
from sft_play.errors import HardwareError, UserError
from sft_play.plan.hardware import GIB, Device
from sft_play.plan.memory import ADAM_MOMENTS, LOGIT_BYTES, logit_bytes, trainable_parameters, trained_bytes
from sft_play.plan.plan import DTYPE_BYTES, Layout, Precision, Setup, Strategy
from sft_play.plan.request import Request
from sft_play.plan.shape import (
    BY_LENGTHS,
    CHUNKED_HEAD_MODEL_TYPES,
    FLATTENED_MODEL_TYPES,
    FLATTENED_TOKENS,
    LIGER_MODEL_TYPES,
    SINK_MODEL_TYPES,
    SLICED_MODEL_TYPES,
    UNMASKED_MODEL_TYPES,
    VARLEN,
    VARLEN_MODEL_TYPES,
    ModelShape,
)
from sft_play.text import gib, plural

LARGE_STATES = 0.03
"""Share of a card's memory above which adapters' optimizer states justify bitsandbytes' paged optimizer, which
synchronises with the card after every tensor.
"""
ADAPTER_RATE, FULL_RATE, SCRATCH_RATE = 2e-4, 2e-5, 6e-4

Reasons = dict[str, str]
"""Kind of a choice -> its reason; a later decision replaces an earlier one."""


def choose_backend(config: Config, kind: str, ranks: int, reasons: Reasons) -> str:
    """Return `none`, `gloo` or `nccl`. Raise `UserError`."""
    configured = config.launch.backend
    if configured == "nccl" and kind == "cpu":
        raise UserError("`launch.backend` is `nccl`, which needs GPUs", hint="leave it to `auto`: gloo between CPUs")
    if ranks == 1:
        return "none"
    if configured != "auto":
        reasons["backend"] = f"backend {configured}: as configured"
        return configured
    chosen, between = ("nccl", "GPUs") if kind == "cuda" else ("gloo", "CPU processes")
    reasons["backend"] = f"backend {chosen}: between {between}"
    return chosen


def choose_precision(request: Request, strategy: Strategy, reasons: Reasons) -> Precision:
    """Return the type of the computation. Raise `HardwareError`, with the key as its place, for a typed one that the
    hardware lacks.
    """
    train, cpu = request.config.train, request.hardware.kind == "cpu"
    without, refused = request.ranks.without_bf16, ""
    if cpu and strategy not in ("single", "ddp"):
        refused = f"{strategy} on a CPU computes in fp32 only"
    elif without:
        who = "this CPU does not compute in bfloat16 any faster than in fp32"
        refused = who if cpu else f"{without.name} does not compute in bfloat16"
    if train.bf16 is True and refused:
        hint = "leave `train.bf16` to `auto`" + ("" if cpu else ", or set TRAIN_FP16=true")
        raise _refused_precision(request, "bf16", refused, hint)
    if train.fp16 and cpu:
        raise _refused_precision(request, "fp16", "fp16 with loss scaling needs a GPU", "omit it: fp32 is used")
    precision, why = "fp32", "as configured"
    if train.fp16 or train.bf16 is True:
        precision = "fp16" if train.fp16 else "bf16"
    elif train.bf16 == "auto" and not cpu:
        precision, why = (
            ("fp16", f"{without.name} has no bfloat16") if without else ("bf16", "every GPU here computes in it")
        )
    elif train.bf16 == "auto":
        why = (
            "this CPU has no bfloat16 units"
            if without
            else "exact; TRAIN_BF16=true would use this CPU's bfloat16 units"
        )
    reasons["precision"] = f"precision {precision}: {why}"
    return cast(Precision, precision)


def _refused_precision(request: Request, precision: str, why: str, hint: str) -> HardwareError:
    key, asked = f"train.{precision}", f"`train.{precision}` is `true`"
    if precision in request.launch.by_accelerate:
        asked = f"`mixed_precision` is `{precision}`"
        hint = "write `mixed_precision: " + ("'no'`, which is fp32" if request.hardware.kind == "cpu" else "fp16`")
    return HardwareError(f"{asked}, but {why}", place=key, hint=hint)


ROUNDED = "without an fp32 copy, so that small updates are lost to rounding"


def choose_weights_dtype(config: Config, kind: str, strategy: Strategy, precision: Precision, reasons: Reasons) -> str:
    """Return the type of the base's weights. Raise `UserError` for trained weights in float16."""
    if config.model.dtype == "float16" and config.tuning.mode == "full":
        raise UserError(
            "`model.dtype` is `float16`, but every weight is trained: small updates vanish in it, and loss scaling"
            " refuses it",
            hint=(
                "leave `model.dtype` to `auto` (TRAIN_FP16=true still computes in it), or `bfloat16` for half"
                " the memory"
            ),
        )
    typed, narrow, dtype, why = config.model.dtype, "bfloat16" if precision == "bf16" else "float16", "", ""
    if precision != "fp32" and strategy.startswith("zero"):
        dtype, why = narrow, "DeepSpeed computes with them, and updates an fp32 copy of those that are trained"
    elif precision != "fp32" and strategy == "fsdp2" and config.tuning.mode == "full":
        dtype, why = "float32", f"fsdp2 updates them in it, and computes with {narrow} copies of a layer at a time"
    if dtype:
        despite = f", whatever `model.dtype` says ({typed})" if typed not in ("auto", dtype) else ""
        reasons["weights"] = f"weights in {dtype}: {why}{despite}"
        return dtype
    if typed != "auto":
        rounded = config.tuning.mode == "full" and DTYPE_BYTES[typed] < 4
        reasons["weights"] = f"weights in {typed}: as configured" + (f", {ROUNDED}" if rounded else "")
        return typed
    if kind == "cpu" or precision == "fp32" or config.tuning.mode == "full":
        why = "trained weights need its precision" if config.tuning.mode == "full" else "what is computed in"
        reasons["weights"] = f"weights in float32: {why}"
        if kind == "cpu" and config.tuning.mode == "qlora":
            reasons["base"] = (
                f"base in {config.tuning.quantization}: made for GPU memory; on a CPU each pass writes every weight out"
                " again, which costs time"
            )
        return "float32"
    reasons["weights"] = f"weights in {narrow}: they are frozen, half the memory of fp32"
    return narrow


def choose_attention(request: Request, precision: Precision, reasons: Reasons) -> str:
    """Return the attention implementation. Raise for one that devices, precision or family do not support."""
    config, shape, kind = request.config, request.shape, request.hardware.kind
    configured, family = config.model.attn_implementation, shape.model_type
    no_flash = _without_flash(kind, request.ranks.without_bf16, precision)
    by_rows = kind == "cpu" or family in SINK_MODEL_TYPES  # `varlen` without a dedicated kernel
    no_varlen = _without_varlen(config, shape, by_rows)
    why = (not by_rows and no_flash) or no_varlen
    if (size := config.launch.sequence_parallel) > 1:
        if family not in SLICED_MODEL_TYPES:
            why = f"`{family}` is not among the families whose tokens meet in attention alone, computed by lengths"
        if why:
            raise UserError(f"`launch.sequence_parallel` is {size}, but {why}", hint="LAUNCH_SEQUENCE_PARALLEL=1")
        reasons["attention"] = (
            "attention varlen: on a share of the heads and all tokens of a line, by `launch.sequence_parallel`"
        )
        return VARLEN
    if configured != "auto":
        if configured in BY_LENGTHS and no_flash and not (configured == VARLEN and by_rows):
            raise HardwareError(
                f"`model.attn_implementation` is `{configured}`, but {no_flash}", hint="leave it to `auto`"
            )
        if configured == "flex_attention" and kind == "cpu":
            raise HardwareError(
                f"`model.attn_implementation` is `{configured}`, which torch trains on GPUs only",
                hint="leave it to `auto`",
            )
        if configured in ("sdpa", "flash_attention_2") and configured not in shape.attention:
            raise UserError(
                f"`model.attn_implementation` is `{configured}`, but transformers has no such kernel for `{family}`",
                hint="leave it to `auto`",
            )
        if configured == VARLEN and no_varlen:
            raise UserError(f"`model.attn_implementation` is `varlen`, but {no_varlen}", hint="leave it to `auto`")
        return configured
    flash = "flash_attention_2" in shape.attention and family not in VARLEN_MODEL_TYPES - FLATTENED_MODEL_TYPES
    if flash and not no_flash and importlib.util.find_spec("flash_attn"):
        reasons["attention"] = "attention flash_attention_2: it is installed"
        return "flash_attention_2"
    if not why:
        own = "row by row" if by_rows else "torch's own flash attention takes rows of any length in one line"
        reasons["attention"] = f"attention varlen: {own}, without a mask"
        return VARLEN
    if "sdpa" not in shape.attention:
        reasons["attention"] = f"attention eager: transformers has no sdpa kernel for `{family}`"
        return "eager"
    if kind == "cuda":
        reasons["attention"] = f"attention sdpa: {why}"
    return "sdpa"


def _without_flash(kind: str, old: Device | None, precision: Precision) -> str | None:
    """Return why neither the package's flash attention nor torch's can compute rows by their lengths here."""
    if kind == "cpu":
        return "flash attention needs a GPU"
    if old:
        major, minor = old.compute_capability or (7, 5)
        return f"flash attention needs compute capability 8.0, and {old.name} has {major}.{minor}"
    return "flash attention computes in bf16 and fp16 only, and this run in fp32" if precision == "fp32" else None


def _without_varlen(config: Config, shape: ModelShape, by_rows: bool) -> str | None:
    """Return why `varlen` cannot be this model's attention, or `None` if it can."""
    if config.tuning.backend == "unsloth":
        return "unsloth has its own attention"
    if shape.model_type not in VARLEN_MODEL_TYPES:
        return f"`{shape.model_type}` is not among the families proven to compute with `varlen`"
    # The GPU's kernel was compiled for these head sizes.
    if not by_rows and (shape.head_dim % 8 or (shape.head_dim > 192 and shape.head_dim != 256)):
        return f"torch's own flash attention has no heads of {shape.head_dim}"
    if shape.attention_dropout:
        return f"`varlen` has no dropout, and this model's is {shape.attention_dropout:g}"
    return None


def why_padded(request: Request, setup: Setup, rows: int, row_tokens: int) -> str:
    """Return why the rows of the largest micro-batch cannot be flattened; empty if they can."""
    family, backend, attention = request.shape.model_type, request.config.tuning.backend, setup.attn_implementation
    if backend == "unsloth":
        return "unsloth keeps rows apart only by an attention mask"
    if family not in (VARLEN_MODEL_TYPES if attention == VARLEN else FLATTENED_MODEL_TYPES):
        return f"`{family}` is not among the families proven to keep flattened rows apart"
    if attention == "eager" and rows > 1:
        return "eager attention would keep scores between all flattened rows"
    if setup.device == "cuda" and attention == "sdpa" and rows > 1 and rows * row_tokens > FLATTENED_TOKENS:
        return f"{rows * row_tokens} flattened tokens would need a quadratic mask; padded ones need none"
    return ""


def padded_layout(request: Request) -> Layout:
    """Return how rows are padded: without an attention mask where a test proves that omitting it changes nothing.

    Unsloth's kernels need a mask, and LongRoPE needs each row's length (`model.rope`).
    """
    shape = request.shape
    masked = (
        request.config.tuning.backend == "unsloth" or shape.model_type not in UNMASKED_MODEL_TYPES or shape.moving_rope
    )
    return "padded" if masked else "unmasked"


def choose_optimizer(request: Request, setup: Setup, reasons: Reasons) -> str:
    """Return the optimizer that runs. Raise for one that cannot run here as typed."""
    config, strategy = request.config, setup.strategy
    configured, replicas = config.train.optim, not setup.sharded
    # The fused kernel needs no copies of the weights, but under FSDP2 it cannot take a loss scaler's tensors next to
    # sharded ones.
    fused = replicas or (strategy == "fsdp2" and setup.precision != "fp16")
    chosen, why = "adamw_torch_fused" if fused else "adamw_torch", "AdamW"
    if configured != "auto" and (replicas or not OPTIMIZERS[configured].bitsandbytes):
        _check_optimizer(config, request.shape, setup)
        return configured
    if configured != "auto":
        reasons["optimizer"] = f"optimizer {chosen} instead of {configured}: its states cannot be sharded by {strategy}"
        return chosen
    states = ADAM_MOMENTS * trained_bytes(config, setup) * trainable_parameters(config, request.shape)
    large = states > LARGE_STATES * min(device.memory_bytes for device in request.ranks.devices)
    if setup.device == "cuda" and config.tuning.mode == "qlora" and replicas and large:
        chosen = "paged_adamw_8bit"
        why = f"AdamW's states of these adapters are {states / GIB:.1f} GiB, more than {LARGE_STATES:.0%} of the memory"
    reasons["optimizer"] = f"optimizer {chosen}: {why}"
    return chosen


def _check_optimizer(config: Config, shape: ModelShape, setup: Setup) -> None:
    """Raise `UserError` for a typed optimizer that this strategy or this model does not allow."""
    optimizer, whole = config.train.optim, not setup.sharded and setup.tensor_parallel == 1
    if OPTIMIZERS[optimizer].whole and not whole:
        divider = setup.strategy if setup.tensor_parallel == 1 else "`launch.tensor_parallel`"
        raise UserError(
            f"`{OPTIM}` is `{optimizer}`, which needs complete parameters, but {divider} shards them",
            place=OPTIM,
            hint="`make train` or `make train-distributed`, or `train.optim: auto`",
        )
    if OPTIMIZERS[optimizer].matrices and shape.expert_parameters:
        raise UserError(
            f"`{OPTIM}` is `{optimizer}`, which takes single matrices, and a `{shape.model_type}` model stacks those of"
            " its experts",
            place=OPTIM,
            hint="`train.optim: auto`",
        )
    if OPTIMIZERS[optimizer].two_faced and config.launch.local_steps > 1:
        raise UserError(
            f"`{OPTIM}` is `{optimizer}`, which averages weights itself, and so does `launch.local_steps:"
            f" {config.launch.local_steps}`",
            place=OPTIM,
            hint="omit one of the two",
        )


def choose_learning_rate(config: Config, reasons: Reasons) -> float:
    """Return the peak learning rate."""
    if config.train.learning_rate != "auto":
        return config.train.learning_rate
    if config.model.init == "random":
        reasons["learning rate"] = f"learning rate {SCRATCH_RATE:g}: the usual one for small models from scratch"
        return SCRATCH_RATE
    full = config.tuning.mode == "full"
    chosen = FULL_RATE if full else ADAPTER_RATE
    reasons["learning rate"] = f"learning rate {chosen:g}: the usual one for {'full tuning' if full else 'adapters'}"
    return chosen


def warmup(config: Config, steps: int | None) -> int | None:
    """Return the steps over which the learning rate rises. Raise `UserError` if the run has too few steps."""
    train, schedule = config.train, config.train.lr_scheduler_type
    if schedule in WITHOUT_WARMUP and not OPTIMIZERS[train.optim].two_faced:
        return 0
    if steps is None:
        return train.warmup_steps
    spare = schedule == "polynomial"  # it divides by the remaining steps
    rising = train.warmup_steps
    if rising is None:
        rising = min(math.ceil(train.warmup_ratio * steps), steps - spare)
    if rising > steps - spare:
        raise UserError(
            f"`train.warmup_steps` is {rising}, but the run has {plural(steps, 'step')}"
            + (", and `polynomial` needs one to decay" if spare else ""),
            place="train.warmup_steps",
            hint=f"TRAIN_WARMUP_STEPS={min(-(-steps // 10), steps - spare)}, or omit it",
        )
    falling = lr_settings(config).get("num_decay_steps", 0)
    if rising + falling > steps:
        raise UserError(
            f"`train.lr_scheduler_kwargs.num_decay_steps` is {falling} after a warm-up of {rising}, but the run has"
            f" {plural(steps, 'step')}: the learning rate would begin in the middle of its fall",
            place="train.lr_scheduler_kwargs",
            hint=f"`lr_scheduler_kwargs: {{num_decay_steps: {steps - rising}}}` at most",
        )
    return rising


def check_schedule(config: Config, rate: float) -> None:
    """Raise `UserError` for a schedule that ends above this learning rate, or cannot be computed with it."""
    schedule, settings = config.train.lr_scheduler_type, lr_settings(config)
    if schedule == "polynomial":
        end, can_decay = float(settings.get("lr_end", 1e-7)), "`lr_scheduler_kwargs: {lr_end: 0}`"
        refused = rate <= end
    else:
        share = settings.get("min_lr_rate")
        end = float(settings.get("min_lr") or 0.0) if share is None else share * rate
        can_decay = "`lr_scheduler_kwargs: {min_lr_rate: 0.1}`"
        refused = "with_min_lr" in schedule and rate < end
    if refused:
        raise UserError(
            f"`train.lr_scheduler_type` is `{schedule}`, which ends at {end:g}, but the learning rate is {rate:g}",
            place="train.lr_scheduler_type",
            hint=f"a larger TRAIN_LEARNING_RATE, or {can_decay}",
        )


def choose_kernels(request: Request, reasons: Reasons) -> Literal["off", "liger"]:
    """Return the kernels for norms, rotary embeddings and SwiGLU. Raise `HardwareError` if typed ones cannot run."""
    config, shape, kind = request.config, request.shape, request.hardware.kind
    configured = config.train.kernels
    if configured == "off":
        return "off"
    without = request.ranks.without_bf16
    if kind == "cpu":
        why = "Triton's kernels need an NVIDIA GPU"
    elif without is not None:
        why = f"Triton supports compute capability 8.0 and later, and {without.name} has less"
    elif config.tuning.backend == "unsloth":
        why = "unsloth has its own kernels"
    elif config.launch.tensor_parallel > 1 or config.launch.strategy == "pipeline":
        why = "Liger's were not tried with slices or stages"
    elif shape.model_type not in LIGER_MODEL_TYPES:
        why = f"Liger's were not tried with `{shape.model_type}`"
    elif importlib.util.find_spec("liger_kernel") is None:
        why = "the package `liger-kernel` is not installed"
    else:
        reasons["kernels"] = (
            "kernels liger: norms, rotary embeddings and SwiGLU in one pass over memory each, and fewer activations"
        )
        return "liger"
    if configured == "liger":
        hint = (
            "`.venv/bin/python -m pip install '.[kernels]'`, or `train.kernels: auto`"
            if "installed" in why
            else "leave it to `auto`"
        )
        raise HardwareError(f"`train.kernels` is `liger`, but {why}", hint=hint)
    if kind == "cuda":
        reasons["kernels"] = f"kernels plain: {why}"
    return "off"


def loader_workers(config: Config, kind: str) -> int:
    """Return the processes per rank that load batches."""
    workers = config.train.dataloader_num_workers
    if workers != "auto":
        return workers
    # With two, a GPU does not wait while a step's batches are made.
    return 2 if kind == "cuda" else 0


CHUNK_BYTES = {"cuda": (768 * 2**20, 256 * 2**20), "cpu": (256 * 2**20,)}
"""Bytes of a chunk's logits; the first size that fits is used. Each chunk reads the complete head three times: on a GPU
512 positions of 128,256 words are 512 operations per byte, while an RTX 4090 needs 164 and an H200 206 to be compute
bound; 128 are not enough (by arithmetic, unverified). A 4-bit 8B model in 7.5 GiB has no room for 1,024.
"""
LEAST_POSITIONS = 128
"""With fewer positions, reading the head for each chunk costs more than the arithmetic."""
ALIGNED = 64
HEADS = frozenset({"lm_head", "embed_out"})


def with_chunks(config: Config, shape: ModelShape, setup: Setup) -> Setup:
    """Return the setup with head and loss in chunks, where the model allows it."""
    if _why_unchunked(config, shape, setup):
        return setup
    least = CHUNK_BYTES[setup.device][-1]
    return replace(setup, loss_chunk=_positions(config, shape, least))


def settle_chunks(
    config: Config, shape: ModelShape, setup: Setup, micro_batch: int, fits: Callable[[Setup], bool], reasons: Reasons
) -> Setup:
    """Return the setup with chunks only where they save memory: where most tokens of the worst micro-batch have labels.

    Chunks are as large as `fits` allows; the smallest size needs no check, since the plan assumed it.
    """
    *larger, least = [replace(setup, loss_chunk=_positions(config, shape, size)) for size in CHUNK_BYTES[setup.device]]
    whole, chunked = replace(setup, loss_chunk=0), next((setting for setting in larger if fits(setting)), least)
    labels = micro_batch * setup.row_tokens / setup.sequence_parallel * setup.slice_label_share
    before, after = (logit_bytes(config, shape, case, labels) for case in (whole, chunked))
    if after >= before:
        return whole
    if why := _why_unchunked(config, shape, setup):
        reasons["head and loss"] = f"head and loss at all {labels:.0f} label positions at once, {gib(before)}: {why}"
        return whole
    sizes = f"{gib(after)} instead of {gib(before)} of logits"
    reasons["head and loss"] = f"head and loss in chunks of {chunked.loss_chunk} label positions: {sizes}"
    return chunked


def _positions(config: Config, shape: ModelShape, size: int) -> int:
    """Return the label positions of a chunk whose logits take `size` bytes."""
    chunk = max(LEAST_POSITIONS, size // (LOGIT_BYTES * shape.vocab_size))
    if config.tuning.mode == "full":
        # Each chunk adds a gradient as large as the head; with h/4 positions its logits are half of that, and the
        # head is read seldom.
        chunk = max(chunk, shape.hidden_size // 4)
    return chunk // ALIGNED * ALIGNED


def _why_unchunked(config: Config, shape: ModelShape, setup: Setup) -> str | None:
    """Return why head and loss cannot be chunked, or `None` if they can."""
    if config.tuning.backend == "unsloth":
        return "unsloth has its own loss"
    if shape.model_type not in CHUNKED_HEAD_MODEL_TYPES:
        return f"what `{shape.model_type}` does to its logits was not tried in chunks"
    targets = config.tuning.lora.target_modules
    on_head = (
        config.tuning.mode != "full"
        and not isinstance(targets, str)
        and any(target.split(".")[-1] in HEADS for target in targets)
    )
    return "ZeRO-3 gathers the head's adapters one by one" if on_head and setup.strategy == "zero3" else None
