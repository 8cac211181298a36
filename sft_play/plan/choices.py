"""Each automatic choice with its reason, and each impossible wish with the way round. Pure."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Literal

from sft_play.config.schema import Config
from sft_play.errors import HardwareError, UserError
from sft_play.plan.backends import layout_for
from sft_play.plan.batch import DEFAULT_GLOBAL_BATCH
from sft_play.plan.hardware import COMPUTE_MODE_REMEDY, FULL, GIB, Device, Hardware
from sft_play.plan.layouts import (
    BY_LENGTHS,
    FLATTENED_MODEL_TYPES,
    FLATTENED_TOKENS,
    LIGER_MODEL_TYPES,
    SINK_MODEL_TYPES,
    UNMASKED_MODEL_TYPES,
    VARLEN,
    VARLEN_MODEL_TYPES,
    WITHOUT_FLASH_ATTENTION,
    WITHOUT_SDPA,
)
from sft_play.plan.memory import ADAM_MOMENTS, Setup, trainable_parameters, trained_bytes
from sft_play.plan.plan import Layout, Precision, Strategy
from sft_play.plan.request import LaunchRequest
from sft_play.plan.shape import ROUTER, ROUTES, ModelShape

MOST_CPU_PROCESSES = 64
GPU_ONLY_OPTIMIZERS = {
    "paged_adamw_8bit": "adamw_torch", "paged_adamw_32bit": "adamw_torch", "paged_adamw": "adamw_torch", "adamw_8bit": "adamw_torch",
    "adamw_bnb_8bit": "adamw_torch", "adamw_apex_fused": "adamw_torch", "paged_lion_8bit": "adamw_torch", "paged_lion_32bit": "adamw_torch",
    "lion_8bit": "adamw_torch", "lion_32bit": "adamw_torch", "ademamix_8bit": "adamw_torch", "paged_ademamix_8bit": "adamw_torch",
    "paged_ademamix_32bit": "adamw_torch", "ademamix": "adamw_torch", "rmsprop_bnb": "rmsprop", "rmsprop_bnb_8bit": "rmsprop",
    "rmsprop_bnb_32bit": "rmsprop",
}  # fmt: skip
"""Optimizers that need a GPU -> the nearest one that runs on a CPU."""
LARGE_STATES = 0.03
"""Share of a card's memory above which adapters' states are worth bitsandbytes' paged ones, which wait for the card after every tensor."""
ADAPTER_RATE, FULL_RATE, SCRATCH_RATE = 2e-4, 2e-5, 6e-4

Reasons = list[str]


def devices_for(hardware: Hardware, request: LaunchRequest, wants_one: bool) -> tuple[tuple[int, ...], tuple[Device, ...]]:
    """Returns the index and the device of each of this machine's ranks.

    Raises `HardwareError` when there are not enough, or when other programs fill one that would be used.
    """
    asked = request.num_gpus
    if wants_one and (asked or 1) > 1:
        raise UserError(f"`NUM_GPUS` is {asked}, but `make train` runs one process", hint="use make train-distributed")
    if hardware.kind == "cpu":
        count = 1 if wants_one else asked or min(2, hardware.cpu_threads)
        if count > MOST_CPU_PROCESSES:
            raise HardwareError(
                f"`NUM_GPUS` is {count}, but there is no GPU, and {MOST_CPU_PROCESSES} processes on a CPU are the most",
                hint=f"this machine has {hardware.cpu_threads} CPU threads: NUM_GPUS={min(2, hardware.cpu_threads)}",
            )
        return (0,) * count, hardware.devices * count
    if asked and asked > len(hardware.devices):
        names = ", ".join(device.name for device in hardware.devices)
        raise HardwareError(
            f"`NUM_GPUS` is {asked}, but there {'is' if len(hardware.devices) == 1 else 'are'} {len(hardware.devices)} ({names})",
            hint=f"NUM_GPUS={len(hardware.devices)}, or look at `make gpu-info` and CUDA_VISIBLE_DEVICES",
        )
    if wants_one:
        best = max(range(len(hardware.devices)), key=lambda index: _worth(hardware.devices[index]))
        _refuse_full(hardware, (hardware.devices[best],))
        return (best,), (hardware.devices[best],)
    chosen = hardware.devices[: asked or len(hardware.devices)]
    _refuse_full(hardware, chosen)
    return tuple(range(len(chosen))), chosen


def _worth(device: Device) -> tuple[bool, int, float]:
    """The best device for one process may be used and has the most free memory, in steps of a GiB; among equals, the fastest."""
    return not device.blocked, device.free_bytes // GIB, device.peak_flops or 0.0


def _refuse_full(hardware: Hardware, chosen: tuple[Device, ...]) -> None:
    """Raises `HardwareError` for a GPU that other programs fill, with the way to leave it out."""
    for device in chosen:
        if device.blocked:
            raise HardwareError(device.cannot_be_used, hint=COMPUTE_MODE_REMEDY)
    full = [index for index, device in enumerate(chosen) if device.full]
    if not full:
        return
    first = chosen[full[0]]
    share = first.free_bytes / max(1, first.memory_bytes)
    usable = [(index, device) for index, device in enumerate(hardware.devices) if not device.full]
    if hardware.described:
        hint = "leave it out of `HARDWARE`, or give it more `free_gb`"
    elif not usable:
        hint = "`make memory-check` says who holds them; wait, or end those programs"
    else:
        free = sum(device.free_bytes for _, device in usable) / GIB
        hint = f"{showing(hardware, [index for index, _ in usable])} leaves out what is full: {free:.1f} GiB free on "
        hint += f"{len(usable)} of {len(hardware.devices)} GPUs; `make memory-check` says who holds the rest"
    raise HardwareError(
        f"GPU {hardware.devices.index(first)} ({first.name}) is full: {first.free_bytes / GIB:.1f} of {first.memory_bytes / GIB:.1f} GiB free "
        f"= {share:.1%}, less than the {FULL:.0%} that CUDA and the first layers take",
        hint=hint,
    )


def showing(hardware: Hardware, indices: list[int]) -> str:
    """Returns the `CUDA_VISIBLE_DEVICES` that shows these of the devices, by the driver's numbers."""
    return "CUDA_VISIBLE_DEVICES=" + ",".join(visible_names(hardware.devices, indices))


def visible_names(devices: Sequence[Device], indices: Sequence[int]) -> list[str]:
    """Returns how `CUDA_VISIBLE_DEVICES` names these of the devices: slices by UUID, cards by number, unknown ones by place."""
    chosen = [(index, devices[index]) for index in indices]
    return [device.mig_uuid or str(index if device.number is None else device.number) for index, device in chosen]


def choose_backend(config: Config, kind: str, ranks: int, reasons: Reasons) -> str:
    """Returns `none`, `gloo` or `nccl`. Raises `UserError`."""
    wanted = config.launch.backend
    if wanted == "mpi":
        raise UserError("`launch.backend` is `mpi`, which torch's published builds lack", hint="leave it to `auto`: nccl or gloo")
    if wanted == "nccl" and kind == "cpu":
        raise UserError("`launch.backend` is `nccl`, which needs GPUs", hint="leave it to `auto`: gloo between CPUs")
    if ranks == 1:
        return "none"
    chosen = wanted if wanted != "auto" else ("nccl" if kind == "cuda" else "gloo")
    reasons.append(
        f"backend {chosen}: "
        + ("as configured" if wanted != "auto" else "between GPUs" if kind == "cuda" else "between CPU processes")
    )
    return chosen


def choose_precision(
    config: Config, hardware: Hardware, devices: tuple[Device, ...], strategy: Strategy, reasons: Reasons
) -> Precision:
    """Returns what is computed in. A typed `true` that the hardware lacks is an error, with the key as its place."""
    train = config.train
    if train.bf16 is True and hardware.kind == "cpu" and strategy not in ("single", "ddp"):
        message = f"`train.bf16` is `true`, but {strategy} on a CPU computes in fp32 only"
        raise HardwareError(message, place="train.bf16", hint="leave it to `auto`")
    without = next((device for device in devices if not device.bf16), None)
    if train.bf16 is True and without is not None:
        raise HardwareError(
            f"`train.bf16` is `true`, but {'this CPU' if hardware.kind == 'cpu' else without.name} does not compute in bfloat16"
            + (" any faster than in fp32" if hardware.kind == "cpu" else ""),
            place="train.bf16",
            hint="leave `train.bf16` to `auto`" + ("" if hardware.kind == "cpu" else ", or set TRAIN_FP16=true"),
        )
    if train.fp16:
        if hardware.kind == "cpu":
            message = "`train.fp16` is `true`, but fp16 with loss scaling needs a GPU"
            raise HardwareError(message, place="train.fp16", hint="leave it away: fp32 is used")
        reasons.append("precision fp16: as configured")
        return "fp16"
    if train.bf16 is True or (train.bf16 == "auto" and hardware.kind == "cuda" and without is None):
        reasons.append("precision bf16: " + ("as configured" if train.bf16 is True else "every GPU here computes in it"))
        return "bf16"
    if train.bf16 == "auto" and hardware.kind == "cuda":
        reasons.append(f"precision fp16: {without.name if without else 'a GPU'} has no bfloat16")
        return "fp16"
    units = "exact; TRAIN_BF16=true would use this CPU's bfloat16 units" if without is None else "this CPU has no bfloat16 units"
    reasons.append("precision fp32: " + ("as configured" if train.bf16 is False else units))
    return "fp32"


def choose_weights_dtype(config: Config, kind: str, precision: Precision, reasons: Reasons) -> str:
    """Returns the type of the base's weights. Raises `UserError` for trained weights in float16."""
    if config.model.dtype == "float16" and config.tuning.mode == "full":
        raise UserError(
            "`model.dtype` is `float16`, but every weight is trained: small updates vanish in it, and loss scaling refuses it",
            hint="leave `model.dtype` to `auto` (TRAIN_FP16=true computes in it all the same), or `bfloat16` for half the memory",
        )
    if config.model.dtype != "auto":
        reasons.append(f"weights in {config.model.dtype}: as configured")
        return config.model.dtype
    if kind == "cpu" or precision == "fp32" or config.tuning.mode == "full":
        why = "trained weights need its precision" if config.tuning.mode == "full" else "what is computed in"
        reasons.append(f"weights in float32: {why}")
        if kind == "cpu" and config.tuning.mode == "qlora":
            reasons.append(
                f"base in {config.tuning.quantization}: made for GPU memory; on a CPU each pass writes every weight out again, which costs time"
            )
        return "float32"
    chosen = "bfloat16" if precision == "bf16" else "float16"
    reasons.append(f"weights in {chosen}: they are frozen, half the memory of fp32")
    return chosen


def choose_attention(
    config: Config, shape: ModelShape, kind: str, devices: tuple[Device, ...], precision: Precision, reasons: Reasons
) -> str:
    """Returns the attention implementation. Raises for one that these devices, this precision or this family does not have."""
    wanted, family = config.model.attn_implementation, shape.model_type
    no_flash = _without_flash(kind, devices, precision)
    by_rows = kind == "cpu" or family in SINK_MODEL_TYPES  # `varlen` without a kernel of its own
    lacks = {"sdpa": WITHOUT_SDPA, "flash_attention_2": WITHOUT_FLASH_ATTENTION}
    if wanted != "auto":
        if wanted in BY_LENGTHS and no_flash and not (wanted == VARLEN and by_rows):
            raise HardwareError(f"`model.attn_implementation` is `{wanted}`, but {no_flash}", hint="leave it to `auto`")
        if family in lacks.get(wanted, frozenset()):
            raise UserError(
                f"`model.attn_implementation` is `{wanted}`, but transformers has no such kernel for `{family}`",
                hint="leave it to `auto`",
            )
        if wanted == VARLEN and (why := _without_varlen(config, shape, by_rows)):
            raise UserError(f"`model.attn_implementation` is `varlen`, but {why}", hint="leave it to `auto`")
        return wanted
    only_varlen = VARLEN_MODEL_TYPES - FLATTENED_MODEL_TYPES
    if not no_flash and importlib.util.find_spec("flash_attn") and family not in WITHOUT_FLASH_ATTENTION | only_varlen:
        reasons.append("attention flash_attention_2: it is installed")
        return "flash_attention_2"
    why = (not by_rows and no_flash) or _without_varlen(config, shape, by_rows)
    if not why:
        own = "row by row" if by_rows else "torch's own flash attention takes rows of any length in one line"
        reasons.append(f"attention varlen: {own}, without a mask")
        return VARLEN
    if family in WITHOUT_SDPA:
        reasons.append(f"attention eager: transformers has no sdpa kernel for `{family}`")
        return "eager"
    if kind == "cuda":
        reasons.append(f"attention sdpa: {why}")
    return "sdpa"


def _without_flash(kind: str, devices: tuple[Device, ...], precision: Precision) -> str | None:
    """Returns why no flash attention, the package's or torch's own, computes rows by their lengths here."""
    if kind == "cpu":
        return "flash attention needs a GPU"
    if old := next((device for device in devices if not device.bf16), None):
        major, minor = old.compute_capability or (7, 5)
        return f"flash attention needs compute capability 8.0, and {old.name} has {major}.{minor}"
    return "flash attention computes in bf16 and fp16 only, and this run in fp32" if precision == "fp32" else None


def _without_varlen(config: Config, shape: ModelShape, by_rows: bool) -> str | None:
    """Returns why `varlen` cannot be this model's attention; the head sizes are those that the GPU's kernel was compiled for."""
    if config.tuning.backend == "unsloth":
        return "unsloth has its own attention"
    if shape.model_type not in VARLEN_MODEL_TYPES:
        return f"`{shape.model_type}` is not among the families proven to compute with `varlen`"
    if not by_rows and (shape.head_dim % 8 or (shape.head_dim > 192 and shape.head_dim != 256)):
        return f"torch's own flash attention has no heads of {shape.head_dim}"
    if shape.attention_dropout:
        return f"`varlen` has no dropout, and this model's is {shape.attention_dropout:g}"
    return None


def check_targets(config: Config, shape: ModelShape) -> None:
    """Raises `UserError` for typed LoRA targets that mean nothing in this model, or what no adapter can be on."""
    lora = config.tuning.lora
    if config.tuning.mode == "full" or isinstance(lora.target_modules, str):
        return
    missing = {name: "" for name in lora.target_modules if not shape.adapted([name])}
    for name in missing:
        why = next((one.refused for one in shape.matrices if one.refused and one.is_called(name)), "")
        if not why and shape.expert_parameters and ROUTER.search(name):  # many a router is no linear layer
            why = ROUTES
        missing[name] = f" ({why})" if why else ""
    if missing:
        quoted = ", ".join(f"`{name}`{why}" for name, why in missing.items())
        known = dict.fromkeys(one.typed for one in shape.matrices if one.kind in ("experts", "ends") or one.auto)
        raise UserError(
            f"`tuning.lora.target_modules` names {quoted}, where a `{shape.model_type}` model takes no adapter",
            hint=f"it takes them on {', '.join(known)}; or `auto` for every linear layer but the head",
        )
    if shape.tied and any(one.kind == "ends" for one in shape.adapted(lora.target_modules)):
        raise UserError(
            "`tuning.lora.target_modules` names the head or the input embeddings, which share one weight in this model: an adapter on one could not "
            "be merged without changing the other",
            hint="leave it out",
        )
    if lora.dropout and any(one.kind == "experts" for one in shape.adapted(lora.target_modules)):
        raise UserError(
            f"`tuning.lora.dropout` is {lora.dropout:g}, and adapters on fused experts have no dropout",
            hint="set `tuning.lora.dropout: 0`, or leave the experts out of `tuning.lora.target_modules`",
        )


def adapted(config: Config, shape: ModelShape) -> list[str]:
    """Returns the reason that names what is adapted, with the parameters of its adapters."""
    lora = config.tuning.lora
    if config.tuning.mode == "full":
        return []
    found = shape.adapted(lora.target_modules)
    names = ", ".join(dict.fromkeys(one.typed for one in found))
    frozen = dict.fromkeys(one.typed for one in shape.matrices if one.kind == "experts" and one not in found)
    return [
        f"adapters of rank {lora.r} on {names}: {shape.adapter_parameters(lora.r, lora.target_modules):,} parameters"
        + (f"; {', '.join(frozen)} stay frozen" if frozen else "")
    ]


def choose_layout(
    config: Config, shape: ModelShape, kind: str, attention: str, rows: int, row_tokens: int, reasons: Reasons
) -> Layout:
    """Returns how the rows of a micro-batch (the largest one) become tensors: flattened wherever that is exact and not slower."""
    alone = padded_layout(config, shape)
    if layout_for(config.tuning.backend):
        reasons.append(f"rows padded: {config.tuning.backend} tells rows apart by an attention mask only")
        return alone
    if shape.model_type not in (VARLEN_MODEL_TYPES if attention == VARLEN else FLATTENED_MODEL_TYPES):
        reasons.append(f"rows padded: `{shape.model_type}` is not among the families proven to keep flattened rows apart")
        return alone
    if attention == "eager" and rows > 1:
        reasons.append("rows padded: eager attention would keep scores between all flattened rows")
        return alone
    if kind == "cuda" and attention == "sdpa" and rows > 1 and rows * row_tokens > FLATTENED_TOKENS:
        reasons.append(f"rows padded: {rows * row_tokens} flattened tokens would need a quadratic mask; padded ones need none")
        return alone
    reasons.append("rows flattened: no time and memory for padding")
    return "flattened"


def padded_layout(config: Config, shape: ModelShape) -> Layout:
    """Returns how rows are padded: without an attention mask where a test proves that it changes nothing."""
    return "padded" if layout_for(config.tuning.backend) or shape.model_type not in UNMASKED_MODEL_TYPES else "unmasked"


def choose_optimizer(config: Config, shape: ModelShape, setup: Setup, memory_bytes: int, reasons: Reasons) -> str:
    """Returns the optimizer that runs on cards of `memory_bytes`; one that needs a GPU becomes the nearest one elsewhere."""
    wanted, kind, strategy = config.train.optim, setup.device, setup.strategy
    # The fused kernel needs no copies of the weights. It takes a loss scaler's tensors beside shards of others only without FSDP2.
    fused = strategy in ("single", "ddp") or (strategy == "fsdp2" and setup.precision != "fp16")
    chosen = "adamw_torch_fused" if fused else "adamw_torch"
    if wanted == "auto":
        states = ADAM_MOMENTS * trained_bytes(config, setup) * trainable_parameters(config, shape)
        if (
            kind == "cuda"
            and config.tuning.mode == "qlora"
            and strategy in ("single", "ddp")
            and states > LARGE_STATES * memory_bytes
        ):
            share = f"AdamW's states of these adapters are {states / GIB:.1f} GiB, more than {LARGE_STATES:.0%} of the memory"
            reasons.append(f"optimizer paged_adamw_8bit: {share}")
            return "paged_adamw_8bit"
        reasons.append(f"optimizer {chosen}: AdamW")
        return chosen
    if kind == "cpu" and wanted in GPU_ONLY_OPTIMIZERS:
        nearest = GPU_ONLY_OPTIMIZERS[wanted]
        reasons.append(f"optimizer {nearest} instead of {wanted}, which needs a GPU")
        return nearest
    if strategy not in ("single", "ddp") and wanted in GPU_ONLY_OPTIMIZERS:
        reasons.append(f"optimizer {chosen} instead of {wanted}: its states cannot be sharded by {strategy}")
        return chosen
    return wanted


def choose_learning_rate(config: Config, reasons: Reasons) -> float:
    """Returns the peak learning rate."""
    if config.train.learning_rate != "auto":
        return config.train.learning_rate
    if config.model.init == "random":
        reasons.append(f"learning rate {SCRATCH_RATE:g}: the usual one for small models from scratch")
        return SCRATCH_RATE
    full = config.tuning.mode == "full"
    chosen = FULL_RATE if full else ADAPTER_RATE
    reasons.append(f"learning rate {chosen:g}: the usual one for {'full tuning' if full else 'adapters'}")
    return chosen


def scale_learning_rate(config: Config, rate: float, global_batch: int, reasons: Reasons) -> float:
    """Returns the learning rate for a global batch other than the default, for which rates are quoted, with its arithmetic.

    `sqrt` keeps the noise of Adam's updates (Malladi et al. 2022, arXiv 2205.10287), `linear` that of SGD's (Goyal et al. 2017,
    arXiv 1706.02677).
    """
    ratio, rule = global_batch / DEFAULT_GLOBAL_BATCH, config.train.learning_rate_scaling
    rules = {"sqrt": (rate * math.sqrt(ratio), "sqrt"), "linear": (rate * ratio, "")}
    if ratio == 1:
        if rule != "none":
            reasons.append(f"learning rate {rate:g}: nothing to scale, the global batch is {DEFAULT_GLOBAL_BATCH}")
        return rate
    if rule == "none":
        others = ", ".join(f"{name} {scaled:.3g}" for name, (scaled, _) in rules.items())
        reasons.append(
            f"learning rate {rate:g} not scaled for {global_batch} rows instead of {DEFAULT_GLOBAL_BATCH} "
            f"(TRAIN_LEARNING_RATE_SCALING would make it: {others})"
        )
        return rate
    scaled, function = rules[rule]
    reasons.append(
        f"learning rate {scaled:.3g} = {rate:g} x {function}({global_batch} global / {DEFAULT_GLOBAL_BATCH}): "
        f"`train.learning_rate_scaling` is {rule}"
    )
    return scaled


def warmup(config: Config, steps: int | None) -> int | None:
    """Returns the steps over which the learning rate rises."""
    if config.train.warmup_steps is not None:
        return config.train.warmup_steps
    return None if steps is None else math.ceil(config.train.warmup_ratio * steps)


def choose_kernels(
    config: Config, shape: ModelShape, devices: tuple[Device, ...], kind: str, reasons: Reasons
) -> Literal["off", "liger"]:
    """Returns whose kernels compute norms, rotary embeddings and SwiGLU. Raises `HardwareError` where typed ones cannot run."""
    wanted = config.train.kernels
    if wanted == "off":
        return "off"
    without = next((device for device in devices if not device.bf16), None)
    if kind == "cpu":
        why = "Triton's kernels need an NVIDIA GPU"
    elif without is not None:
        why = f"Triton supports compute capability 8.0 and later, and {without.name} has less"
    elif config.tuning.backend == "unsloth":
        why = "unsloth has kernels of its own"
    elif shape.model_type not in LIGER_MODEL_TYPES:
        why = f"Liger's were not tried with `{shape.model_type}`"
    elif importlib.util.find_spec("liger_kernel") is None:
        why = "the package `liger-kernel` is not installed"
    else:
        reasons.append("kernels liger: norms, rotary embeddings and SwiGLU in one pass over memory each; planned as without them")
        return "liger"
    if wanted == "liger":
        hint = (
            "`.venv/bin/python -m pip install '.[kernels]'`, or `train.kernels: auto`"
            if "installed" in why
            else "leave it to `auto`"
        )
        raise HardwareError(f"`train.kernels` is `liger`, but {why}", hint=hint)
    if kind == "cuda":
        reasons.append(f"kernels plain: {why}")
    return "off"


def loader_workers(config: Config, kind: str) -> int:
    """Returns the processes per rank that load batches: on a GPU two, so that it does not wait while a step's batches are made."""
    wanted = config.train.dataloader_num_workers
    return (2 if kind == "cuda" else 0) if wanted == "auto" else wanted
