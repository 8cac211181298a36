"""Memory of one rank by closed formulas, divided into named parts. Pure.

Sources: saved activations per token and layer of Llama-style models under SDPA, checked against a trace of the real
models to 0.1 %; nf4 from bitsandbytes' own layout; ZeRO and FSDP2 shards (Rajbhandari et al. 2019, arXiv 1910.02054,
and the sources of the pinned DeepSpeed).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from importlib.metadata import distributions
from typing import Literal

from sft_play.config.optimizers import OPTIMIZERS
from sft_play.config.schema import Config
from sft_play.plan.plan import Plan, Setup
from sft_play.plan.shape import BY_LENGTHS, CHANGED_LOGITS, ModelShape, fuses_adapters, quantises_experts
from sft_play.runs.adapters import embeddings_of

MIB = 2**20
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Packed half bytes, an 8-bit scale per 64 weights, and an fp32 scale per 256 of those."""
NF4_CODES = 16 + 256 + 1
"""Numbers of each matrix by which weights and scales are read."""
INT8_BYTES = 1.0
CUDA_BUILD = any("nvidia" in text for torch in distributions(name="torch") for text in torch.requires or ())
CONTEXT_BYTES = {"cuda": 700 * MIB, "cpu": 600 * MIB + CUDA_BUILD * 320 * MIB}
"""CUDA context and kernels (a bare context took 526 MiB on an H100); Python and libraries on a CPU (475 MiB after the
imports, 800 MiB with a CUDA build of torch, measured).
"""
NCCL_BYTES = 300 * MIB
"""NCCL's buffers on each of several GPUs (0.1 to 0.5 GiB were seen elsewhere; unverified here); an NVLink switch adds
`request.SWITCHED_BYTES`.
"""
WORKSPACE_BYTES = {"cuda": 2 * 32 * MIB, "cpu": 0}
"""cuBLAS takes 32 MiB since Hopper, 8 MiB before, in each of two threads: the backward pass runs in a separate one."""
FRAGMENTATION = {"cuda": 0.06, "native": 0.12, "cpu": 0.42, "by row": 0.22, "mapped": 0.05}
"""Share of a step's temporary memory that an allocator loses. On a CPU glibc's heap keeps gaps that it cannot fill:
0.33 to 0.48 were measured with a mask over all rows, 0.0 to 0.28 with attention row by row (docs/memory.md). `native`
is CUDA's allocator without expandable segments: 0.117, compared with 0.074 with them, in a trace of the quickstart
(`SOURCE=trace HARDWARE=RTX4090 TRAIN_BATCH_SIZE=8`). `mapped` is where tensors are mapped one by one: with
recomputation on a CPU the heap would lose several times what is in use (ADR 5).
"""
OPTIMIZER_BYTES = {
    "adamw_bnb_8bit": 2.03, "adamw_8bit": 2.03, "paged_adamw_8bit": 2.03,
    "ademamix_8bit": 3.05, "paged_ademamix_8bit": 3.05,
    "lion_8bit": 1.02, "paged_lion_8bit": 1.02, "lion_32bit": 4.0, "paged_lion_32bit": 4.0,
    "adafactor": 0.1, "sgd": 0.0, "paged_adamw_32bit": 8.0, "ademamix": 12.0, "paged_ademamix_32bit": 12.0,
    "adagrad": 4.0, "rmsprop": 4.0, "rmsprop_bnb": 4.0, "rmsprop_bnb_32bit": 4.0, "rmsprop_bnb_8bit": 1.02,
    "schedule_free_sgd": 4.0,
}  # fmt: skip
"""Bytes of state per trained weight. bitsandbytes holds its 32-bit moments in fp32 whatever the type of the weights,
and AdEMAMix has three. Other optimizers are counted as Adam: two moments in the type of the weights.
"""
ADAM_MOMENTS = 2
AVERAGED_AT_A_TIME = 2**24
"""Largest number of values that local steps average in one message, unless a parameter is larger: 64 MiB."""
STATES = ("frozen", "quant_state", "trained", "adapters", "gradients", "optimizer")
"""Parts that stay for all of a step."""
MOVING = ("activations", "recompute", "logits", "casts", "dequantised", "workspace")
"""Parts that come and go within it."""
LABELS = {"quant_state": "quantisation", "recompute": "recomputed layer", "casts": "16-bit copies"}
"""Parts that are shown by another name."""
FIRST_RETURNING = 2 / 3
"""Share of a layer's gradients in the backward pass that exist before the layer releases its activations (traced)."""


def trainable_parameters(config: Config, shape: ModelShape) -> int:
    """Return how many weights are trained."""
    if config.tuning.mode == "full":
        return shape.parameters - shape.vision_parameters
    return shape.adapter_parameters(config.tuning.lora, len(config.data.new_tokens))


def rank_memory(config: Config, shape: ModelShape, setup: Setup, micro_batch: int) -> dict[str, int]:
    """Return the bytes of every part on one rank at the peak of a step.

    In a pipeline the rank is on `setup.stage`, or on the stage that needs most.
    """
    if setup.stages and setup.stage is None:
        each = (
            rank_memory(config, shape, replace(setup, stage=stage), micro_batch) for stage in range(len(setup.stages))
        )
        return max(each, key=lambda parts: sum(parts.values()))
    return max(_moments(config, shape, setup, micro_batch), key=lambda parts: sum(parts.values()))


def _moments(config: Config, shape: ModelShape, setup: Setup, micro_batch: int) -> Iterator[dict[str, int]]:
    """Yield the bytes of every part on one rank at each moment that can be the peak."""
    shape, passing = shape.take_slice(setup.tensor_parallel), 1
    if setup.stages:
        shape, setup, passing = stage_of(shape, setup)
    states, tokens = states_bytes(config, shape, setup), -(-micro_batch * setup.row_tokens // setup.sequence_parallel)
    moving = _moving(config, shape, setup, tokens)
    if setup.stages:
        # Hidden states that were received, and that wait to be sent.
        states["buffers"] += 2.0 * (passing + 1) * tokens * shape.hidden_size * setup.width
    expanded = _expanded_bytes(config, shape, setup) if _bits(config, shape) else 0.0
    stays = nf4_experts(config, shape, setup.strategy) and not setup.gradient_checkpointing
    for moment, parts in moving.items():
        parts["activations"] *= passing
        parts["dequantised"] = expanded if stays or not moment.endswith("head") else 0.0
    # Temporaries of the optimizer's step exist only when activations do not.
    moving["update"] = {**dict.fromkeys(MOVING, 0.0), "workspace": _optimizer_step_bytes(config, shape, setup)}
    context = CONTEXT_BYTES[setup.device] + (NCCL_BYTES if setup.device == "cuda" and setup.world_size > 1 else 0)
    if setup.device == "cuda":
        lost = FRAGMENTATION["cuda" if setup.expandable_segments else "native"]
    else:
        lost = FRAGMENTATION["mapped" if setup.gradient_checkpointing else "by row" if _by_row(setup) else "cpu"]
    for parts in moving.values():
        whole = states | parts | {"workspace": WORKSPACE_BYTES[setup.device] + parts.get("workspace", 0.0)}
        whole["context"] = context
        whole["fragmentation"] = lost * sum(size for name, size in parts.items() if name != "dequantised")
        yield {name: int(size) for name, size in whole.items()}


def stage_of(shape: ModelShape, setup: Setup) -> tuple[ModelShape, Setup, int]:
    """Return shape and setup of a stage, and its most micro-batches in flight: its own and one for each later stage."""
    assert setup.stage is not None
    last = len(setup.stages) - 1
    stage = shape.take_stage(setup.stages[setup.stage], embeds=setup.stage == 0, predicts=setup.stage == last)
    behind = last - setup.stage
    return stage, replace(setup, label_share=setup.label_share if not behind else 0.0), behind + 1


def _moving(config: Config, shape: ModelShape, setup: Setup, tokens: int) -> dict[str, dict[str, float]]:
    """Return the temporary memory of a micro-step at each moment where it can be largest."""
    saved = _saved_bytes_per_token(config, shape, setup, tokens) * tokens
    returning = _returning_bytes(config, shape, setup) * tokens
    labels = tokens * setup.slice_label_share
    logits, with_head = _logit_parts(config, shape, setup, labels)
    if config.tuning.backend == "unsloth":
        # Its forward pass ignores which positions need logits (`model/load.py`).
        logits += setup.width * tokens * shape.vocab_size
    full = config.tuning.mode == "full"
    # Weights cast for a multiplication stay until the backward pass has read them.
    head, layer = _cast_bytes(config, shape, setup)
    ends, weights = _ends_bytes(config, shape, setup, tokens), _dora_weight_bytes(config, shape, setup)
    if not setup.gradient_checkpointing:
        base = {
            "activations": saved * shape.layers,
            "recompute": 0.0,
            "logits": 0.0,
            "casts": head + layer * shape.layers,
        }
        return {
            "forward last": base | {"workspace": weights},
            "backward head": base | {"activations": saved * shape.layers + ends + with_head, "logits": logits},
            "backward last": base | {"workspace": returning * FIRST_RETURNING},
        }
    residual = residual_bytes(config, shape, setup)
    resident, back, embedded = layer_input_bytes(config, shape, setup, tokens), 0.0, 0.0
    if setup.activation_offload and setup.device == "cuda":
        # The running layer's input returns; that of the first layer stays where no gradient goes on to the embedding.
        resident, back, embedded = 0.0, resident, 0.0 if full else resident
    inputs = resident + _int8_inputs(config, shape, setup) * tokens
    kinds = 2 if shape.qk_norm and shape.norms_per_layer == 4 else 1  # Gemma 3: of layers with and without a window
    angles = kinds * 2 * setup.width * shape.head_dim * tokens
    inputs_and_angles = inputs * shape.layers + embedded + angles
    base = {"activations": inputs_and_angles, "recompute": 0.0, "logits": 0.0, "casts": layer}
    # Autocast keeps the casts of trained weights until the forward pass ends, those of recomputed layers too; the last
    # layer's `down_proj` comes after its peak.
    casts = layer * (shape.layers if full or weights else 1)
    before_down = casts - 2.0 * shape.ffn_size * shape.hidden_size * (full and setup.autocast)
    inner = setup.width * (3 if shape.gated else 2) * shape.ffn_size * max(1, shape.experts_per_token)
    if weights:  # an fp32 sum of layer and adapter, by parts
        inner += (setup.width + 12) * shape.ffn_size * max(1, shape.experts_per_token)
    running = (inner + 2 * residual * shape.hidden_size) * tokens
    in_dora = weights and weights + setup.width * (shape.ffn_size + shape.hidden_size) * tokens
    moments = {
        "forward last": base | {"activations": inputs_and_angles + 2 * back - embedded + running, "casts": before_down},
        # The logits are freed before the first layer is recomputed; its gradients are added to its activations.
        "backward last": base | {"recompute": saved + max(returning, in_dora) + back},
    }
    normed = _norm_bytes(config, shape, setup) * shape.hidden_size * tokens
    if with_head:
        # In chunks the loss is computed during the forward pass, while the last norm keeps its input, and the output
        # is there twice.
        at_head = (0 if full else normed + ends) + (3 if full else 2) * residual * shape.hidden_size * tokens
        at_end = {"activations": inputs_and_angles + at_head + with_head, "logits": logits, "casts": head + casts}
        return moments | {"forward head": base | at_end}
    if full:  # the head keeps its input, and transformers' norm the normalised values
        normed += (setup.width + (0 if setup.kernels == "liger" else residual)) * shape.hidden_size * tokens
    at_end = {"activations": inputs_and_angles + normed + ends, "logits": logits, "casts": head}
    narrow = setup.width * labels * shape.vocab_size * (2 if shape.model_type in CHANGED_LOGITS else 1)
    before: float = inputs_and_angles + normed + ends + 2 * residual * shape.hidden_size * tokens
    computed = {"activations": before, "logits": narrow, "casts": head + casts}
    return moments | {"forward head": base | computed, "backward head": base | at_end}


def trained_rows(config: Config) -> Literal["none", "new", "all"]:
    """Return which rows of embedding and head are trained."""
    full = config.tuning.mode == "full"
    return "all" if full else embeddings_of(config.tuning.lora, len(config.data.new_tokens))


def trains_ends(config: Config, shape: ModelShape) -> tuple[bool, bool]:
    """Return whether all of the embedding and of the head is trained."""
    if trained_rows(config) == "all":
        return True, True
    saved = [
        m for m in shape.matrices if m.kind == "ends" and any(map(m.is_called, config.tuning.lora.modules_to_save))
    ]
    head = [matrix.inputs == shape.hidden_size for matrix in saved]
    return (bool(saved), bool(saved)) if shape.tied else (not all(head), any(head))


def trains_layers(config: Config, shape: ModelShape) -> bool:
    """Return whether `modules_to_save` trains more than embedding and head, which the formulas do not know."""
    ends = [matrix for matrix in shape.matrices if matrix.kind == "ends"]
    saved = config.tuning.lora.modules_to_save if config.tuning.mode != "full" else []
    return any(not any(matrix.is_called(name) for matrix in ends) for name in saved)


def residual_bytes(config: Config, shape: ModelShape, setup: Setup) -> int:
    """Return the bytes of a number between layers: fp32 where autocast computes over an fp32 embedding."""
    embeds = config.tuning.mode != "full" and trains_ends(config, shape)[0] and _casts_adapters(config, setup)
    return 4 if setup.autocast or embeds else setup.width


def _casts_adapters(config: Config, setup: Setup) -> bool:
    """Return whether autocast casts adapters that are trained in fp32."""
    replicas = config.tuning.mode != "full" and not setup.sharded
    return replicas and setup.width == 2 and trained_bytes(config, setup) == 4


def _cast_bytes(config: Config, shape: ModelShape, setup: Setup) -> tuple[float, float]:
    """Return the bytes of the head's weights and of a layer's that autocast casts."""
    table, adapters = 2.0 * shape.vocab_size * shape.hidden_size, _casts_adapters(config, setup)
    head = table if setup.autocast or (adapters and trains_ends(config, shape)[1]) else 0.0
    layer = 2.0 * shape.layer_linear_parameters if setup.autocast else 0.0
    if adapters:
        settings = replace(config.tuning.lora, variant="lora", modules_to_save=[], embeddings="none", bias="none")
        layer += 2.0 * shape.adapter_parameters(settings) / shape.layers
    return head, layer


def _ends_bytes(config: Config, shape: ModelShape, setup: Setup, tokens: int) -> float:
    """Return the bytes that a head keeps for its weights: its input, and with new rows the whole table with them."""
    if config.tuning.mode == "full":
        return 0.0
    rows = trained_rows(config) == "new"
    inputs = setup.width * shape.hidden_size * tokens if rows or trains_ends(config, shape)[1] else 0
    return float(inputs + (setup.weight_bytes * shape.vocab_size * shape.hidden_size if rows else 0))


def _dora_weight_bytes(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Return the bytes of the largest weight that DoRA makes to measure its rows: a unit matrix through the adapter."""
    if config.tuning.mode == "full" or config.tuning.lora.variant != "dora":
        return 0.0
    unit = setup.width + (4 if _casts_adapters(config, setup) else 0)
    targets = shape.adapter_targets(config.tuning.lora.target_modules)
    weight = setup.width * (2 if _bits(config, shape) else 1)  # and the expanded one
    return max((float(m.inputs) * (m.inputs * unit + m.outputs * weight) for m in targets), default=0.0)


def states_bytes(config: Config, shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Return the bytes of weights, gradients, optimizer states and buffers on one rank, after sharding."""
    trained, full = trainable_parameters(config, shape), config.tuning.mode == "full"
    shards = setup.world_size // setup.tensor_parallel
    width = trained_bytes(config, setup)
    vision = float(shape.vision_parameters * setup.weight_bytes)
    frozen, quant_state = (vision, 0.0) if full else frozen_bytes(config, shape, setup)
    weights, gradients = float(trained * width), float(trained * gradient_bytes(config, setup))
    # DeepSpeed updates fp32 master weights and moments, whatever the type of the weights.
    step_width = 4 if setup.zero else width
    each = OPTIMIZER_BYTES.get(setup.optim, ADAM_MOMENTS * step_width)
    optimizer = trained * (
        4 * round(each)
        if setup.device == "cpu" and OPTIMIZERS[setup.optim].bitsandbytes and "8bit" in setup.optim
        else each
    )
    if OPTIMIZERS[setup.optim].matrices:
        optimizer -= shape.linear_parameters * step_width  # Muon has one moment
    if setup.zero:
        optimizer += trained * 4
    buffers = slow_network_bytes(config, setup, trained, width)
    base = (frozen + quant_state) * gathered_share(setup, setup.weight_bytes)
    base += weights * gathered_share(setup, width) if full else 0
    buffers += _buffers(shape, setup, trained, full, base)
    if setup.sharded:
        optimizer /= shards
    if setup.strategy in ("zero2", "zero3", "fsdp2"):
        gradients /= shards
    if setup.gathers:
        weights /= shards
        # FSDP2 shards neither the integers of a base that was quantised beforehand nor quantisation states, which are
        # not parameters.
        frozen /= 1 if setup.strategy == "fsdp2" and shape.quantized_bits else shards
    if setup.zero and setup.device == "cuda":
        if setup.offload_optimizer:
            optimizer = gradients = 0.0
        if setup.offload_parameters:
            frozen = quant_state = weights = 0.0
    return {
        "frozen": frozen,
        "quant_state": quant_state,
        "trained" if full else "adapters": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "buffers": buffers,
    }


def trained_bytes(config: Config, setup: Setup) -> int:
    """Return the bytes of a trained weight.

    Adapters are fp32, except that over a quantised base that computes in bf16 they are bf16 (`model/load.py`), though
    not with Unsloth. DeepSpeed casts trained weights to the computation's type, and accelerate's FSDP2 makes them fp32.
    """
    if setup.precision != "fp32" and setup.sharded:
        return 2 if setup.zero else 4
    if config.tuning.mode == "full":
        return setup.weight_bytes
    narrow = config.tuning.mode == "qlora" and setup.weights_dtype == "bfloat16" and config.tuning.backend == "bnb"
    return 2 if narrow else 4


def gradient_bytes(config: Config, setup: Setup) -> int:
    """Return the bytes of a trained weight's gradient as it is accumulated and reduced (`launch/deepspeed.py`)."""
    return 4 if setup.zero and setup.precision == "bf16" else trained_bytes(config, setup)


def _buffers(shape: ModelShape, setup: Setup, trained: int, full: bool, gathered: float) -> float:
    """Return the bytes of a strategy's communication buffers; `gathered` is the size of the base as it is gathered."""
    if not setup.sharded:
        return 0.0  # gradients are views into DDP's buckets
    # We write reduce_bucket_size h^2 and prefetch 0.9 h^2 into the DeepSpeed JSON; overlapping needs two of each. bf16
    # gradients are reduced in fp32.
    bucket_width = 2 * setup.width + (4 if setup.precision == "bf16" else 0)
    bucket = min(shape.hidden_size**2, trained) * bucket_width
    if setup.strategy in ("zero1", "zero2"):
        return float(bucket)
    per_layer = gathered * (shape.largest_layer_parameters / max(1, shape.parameters))
    ends = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2) * setup.width
    if setup.strategy == "zero3":
        return 2 * per_layer + 0.9 * shape.hidden_size**2 * setup.width + ends + bucket
    # FSDP2 holds the current and the next layer unsharded, embedding and head from the first layer to the last, and
    # reduces in fp32.
    return 2 * per_layer + ends + 4.0 * (shape.largest_layer_parameters if full else trained / shape.layers)


def gathered_share(setup: Setup, weight_bytes: int) -> float:
    """Return the bytes that FSDP2 gathers per byte of weights: fp32 weights travel in the computation's type."""
    return setup.width / weight_bytes if setup.strategy == "fsdp2" and weight_bytes == 4 else 1.0


def nf4_experts(config: Config, shape: ModelShape, strategy: str) -> bool:
    """Return whether this model has fused experts that QLoRA quantises."""
    return shape.expert_parameters > 0 and not shape.quantized_bits and quantises_experts(config.tuning, strategy)


def quantised_parameters(config: Config, shape: ModelShape, strategy: str) -> int:
    """Return how many weights QLoRA quantises."""
    return shape.quantised_parameters + (shape.expert_parameters if nf4_experts(config, shape, strategy) else 0)


def _expanded_bytes(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Return the bytes of dequantised weights that exist at a time, with the fp32 scales of a linear one.

    Both passes expand one linear weight at a time, but all experts of a layer, which autograd keeps for the backward
    pass.
    """
    largest = max((matrix.inputs * matrix.outputs for matrix in shape.matrices if matrix.quantised), default=0)
    linear = largest * (setup.width + 4 / 64)
    if not nf4_experts(config, shape, setup.strategy):
        return linear
    expert_weights = sum(
        matrix.parameters // (max(1, matrix.count // max(1, shape.experts)) if setup.gradient_checkpointing else 1)
        for matrix in shape.matrices
        if matrix.kind == "experts"
    )
    return max(linear, expert_weights * setup.weight_bytes)


def frozen_bytes(config: Config, shape: ModelShape, setup: Setup) -> tuple[float, float]:
    """Return the bytes of the frozen base and of its quantisation state."""
    bits, weight = _bits(config, shape), setup.weight_bytes
    if not bits:
        return float(shape.parameters * weight), 0.0
    quantised = quantised_parameters(config, shape, setup.strategy)
    rest = float((shape.parameters - quantised) * weight)
    if bits == 8:
        scales = 4 * sum(matrix.count * matrix.outputs for matrix in shape.matrices if matrix.quantised)
        return rest + quantised * INT8_BYTES, float(scales)
    codes = 4 * NF4_CODES * sum(matrix.count for matrix in shape.matrices if matrix.quantised)
    return rest + quantised * 0.5, quantised * (NF4_BYTES - 0.5) + codes


def _bits(config: Config, shape: ModelShape) -> int:
    """Return the bits of a quantised weight; 0 if none is quantised."""
    if not shape.quantised_parameters:
        return 0
    return shape.quantized_bits or {"nf4": 4, "int8": 8}[config.tuning.quantization] * (config.tuning.mode == "qlora")


def _by_row(setup: Setup) -> bool:
    # `model.kernels` on a CPU computes attention one row at a time.
    return setup.device == "cpu" and setup.attn_implementation in BY_LENGTHS


def _saved_bytes_per_token(config: Config, shape: ModelShape, setup: Setup, tokens: int) -> float:
    """Return the bytes that one layer keeps per token for its backward pass.

    Norms compute in fp32 and keep their input in it; attention keeps q, k, v, its output and fp32 sums; the
    feed-forward part keeps gate, activation and up. Liger's norms keep their input as it is, its SwiGLU only gate and
    up. A linear layer's input is kept only for a weight that trains.
    """
    h, w, liger = shape.hidden_size, setup.width, setup.kernels == "liger"
    ffn = shape.ffn_size * max(1, shape.experts_per_token)
    attention, kv = shape.heads * shape.head_dim, math.lcm(shape.kv_heads, setup.sequence_parallel) * shape.head_dim
    norms = shape.norms_per_layer * _norm_bytes(config, shape, setup) * h
    norms += (w if liger else 4) * (attention + kv) * shape.qk_norm
    outputs = 3 if _by_row(setup) else 2  # row by row, the outputs of all rows are collected in one more tensor
    heads = w * (outputs * attention + 2 * kv) + 4 * shape.heads + 8
    inner = (3 if shape.gated and not liger else 2) * w * ffn
    if config.tuning.mode == "full":
        residual = (6 if liger else 10) * h if setup.autocast else 0  # it is fp32
        normalised = 0 if liger else shape.norms_per_layer * w * h
        inputs = float(normalised + 2 * w * h + w * ffn + residual)
        if shape.norms_per_layer == 4:  # Gemma multiplies by the norm's weight in fp32
            inputs += (4 - w) * (4 * h + (attention + kv) * shape.qk_norm)
    else:
        inputs = _adapter_inputs(config, shape, setup)
    return norms + heads + inner + inputs + _mask_bytes(shape, setup, tokens)


def _norm_bytes(config: Config, shape: ModelShape, setup: Setup) -> int:
    """Return the bytes of a number that a layer's norm keeps: fp32, or with Liger's kernels as it came."""
    return residual_bytes(config, shape, setup) if setup.kernels == "liger" else 4


def _returning_bytes(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Return the bytes per token of the gradients that exist at a time in a layer's backward pass.

    At most three are as wide as the feed-forward part; two where layer and adapter are one function, and two in fp32
    where PEFT casts (traced).
    """
    ffn, width = shape.ffn_size * max(1, shape.experts_per_token), setup.width
    adapters, narrow = config.tuning.mode != "full", setup.precision != "fp32"
    if adapters and not narrow and trained_bytes(config, setup) != width:
        return 8.0 * ffn
    return (2 if adapters and narrow and fuses_adapters(setup.strategy, config.tuning.lora) else 3) * width * ffn


def _adapter_inputs(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Return the bytes per token of the inputs that a layer's adapters keep.

    Adapters share inputs in the computation's type; where inputs are cast to fp32 for each multiplication, each
    adapter keeps a copy.
    """
    settings, w = config.tuning.lora, setup.width
    maps = shape.linear_maps()
    targets = [target for target in shape.adapter_targets(settings.target_modules) if target.typed in maps]
    names = [target.typed for target in targets]
    per_target = sum(maps[name][0] for name in names)
    ranks = w * sum(target.rank(settings) for target in targets)
    if settings.variant == "dora":  # keeps what the layer and its adapter return
        ranks += 2 * w * sum(target.outputs for target in targets)
    masks = (3 if setup.device == "cuda" else 4) * per_target if settings.dropout > 0 else 0
    if residual_bytes(config, shape, setup) > w:  # `o_proj` reads what attention keeps, in the type of the computation
        return 2 * (per_target - sum(maps[name][0] for name in names if name == "o_proj")) + ranks + masks
    if setup.precision == "fp32" and trained_bytes(config, setup) != w:
        return 4 * per_target + ranks + masks
    # `o_proj` reads what attention keeps.
    return w * _distinct_inputs(shape, {name for name in names if name != "o_proj"}) + ranks + masks


def _distinct_inputs(shape: ModelShape, names: Collection[str]) -> int:
    """Return the numbers per token that these linear maps of a layer read; those that read the same count once."""
    shared = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "mlp", "up_proj": "mlp"}
    read = {shared.get(name, name): inputs for name, (inputs, _) in shape.linear_maps().items() if name in names}
    return sum(read.values())


def _int8_inputs(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Return the bytes per token and layer of inputs that bitsandbytes' int8 layers keep despite recomputation.

    Its autograd function keeps the input as an attribute, which checkpointing's hooks do not see (bitsandbytes 0.50,
    traced).
    """
    if _bits(config, shape) != 8:
        return 0.0
    return float(setup.width * _distinct_inputs(shape, shape.linear_maps()))


def _mask_bytes(shape: ModelShape, setup: Setup, tokens: int) -> float:
    """Return the bytes per token and layer that keeping rows apart costs.

    Eager attention keeps scores. SDPA keeps a mask in the computation's type for flattened rows, under padding or with
    windows, and with a mask transformers repeats grouped keys and values for every head. Attention by lengths needs
    neither.
    """
    length = tokens if setup.layout == "flattened" else setup.row_tokens
    if setup.attn_implementation == "eager":
        return (6.0 if setup.width == 2 else 4.0) * length * shape.heads  # fp32 softmax, and its copy in a narrow type
    together = tokens > setup.row_tokens or setup.pack_tokens
    masked = (together and setup.layout != "unmasked") or 0 < shape.sliding_window < length
    if setup.attn_implementation != "sdpa" or not masked:
        return 0.0
    return setup.width * (length + 2 * shape.head_dim * (shape.heads - shape.kv_heads))


def _optimizer_step_bytes(config: Config, shape: ModelShape, setup: Setup) -> float:
    """Return the bytes of the optimizer step's temporaries.

    On a GPU, `foreach` makes one more copy of all weights. Muon has one matrix's update in its type and twice in bf16,
    and two products of its shorter side (traced).
    """
    if OPTIMIZERS[setup.optim].matrices:
        sizes = [(matrix.inputs, matrix.outputs) for matrix in shape.matrices if matrix.kind == "linear"]
        return max((setup.weight_bytes + 4.0) * a * b + 4 * min(a, b) ** 2 for a, b in sizes)
    on_host = setup.device != "cuda" or (setup.zero and setup.offload_optimizer)
    if on_host or setup.optim != "adamw_torch":
        return 0.0
    shards = setup.world_size // setup.tensor_parallel if setup.sharded else 1
    return trainable_parameters(config, shape) * 4 / shards


def slow_network_bytes(config: Config, setup: Setup, trained: int, width: int) -> float:
    """Return the bytes that local steps or compression take on a rank with `trained` weights of `width` bytes each."""
    launch = config.launch
    if setup.strategy != "ddp" or setup.world_size == 1:
        return 0.0
    if launch.local_steps > 1:
        # Anchor and momentum in fp32, and differences in transit.
        return 8.0 * trained + 8.0 * min(trained, AVERAGED_AT_A_TIME)
    return 2.0 * trained if launch.compression != "none" and width > 2 else 0.0


LOGIT_BYTES = 12
"""Bytes per label position and vocabulary entry at the peak of the backward pass: fp32 log-softmax, its gradient and
that of the logits. DFT and smoothed targets replace the first by the second.
"""


def logit_bytes(config: Config, shape: ModelShape, setup: Setup, labels: float) -> float:
    """Return the peak bytes of the logits of `labels` positions, including what chunks need in addition."""
    return sum(_logit_parts(config, shape, setup, labels))


def _logit_parts(config: Config, shape: ModelShape, setup: Setup, labels: float) -> tuple[float, float]:
    """Return the bytes of logits and of what chunks need in addition; the latter is 0 where all exist at once.

    In chunks (`model/kernels.py`) only the logits of one chunk exist; in return, the gradient of all positions' hidden
    states is kept from the forward pass on, and a trained head's gradient is summed in a buffer, to which that of a
    chunk is added when the logits are narrow again. Where that needs more than all logits at once, the latter count.
    """
    each = 8 if setup.width == 4 else 10  # the logit, its logarithm and, where the logit is narrower, an fp32 copy
    plain = config.train.loss == "nll" and not config.train.label_smoothing_factor
    whole = labels * shape.vocab_size * (LOGIT_BYTES if plain else each)
    if not setup.loss_chunk or labels <= setup.loss_chunk:
        return whole, 0.0
    logits, table = float(setup.loss_chunk * shape.vocab_size), shape.vocab_size * shape.hidden_size
    moments = [(each * logits, 0.0)]
    if trains_ends(config, shape)[1]:
        added = setup.width + (4 if setup.autocast or _casts_adapters(config, setup) else 0)
        moments = [(each * logits, 4.0 * table), (2 * setup.width * logits, (4.0 + added) * table)]
    elif trained_rows(config) == "new":  # their gradients are taken from one of the whole table
        moments.append((2 * setup.width * logits, float(setup.weight_bytes * table)))
    most, extra = max(moments, key=sum)
    extra += labels * shape.hidden_size * residual_bytes(config, shape, setup)
    return (most, extra) if most + extra < whole else (whole, 0.0)


def host_bytes(config: Config, shape: ModelShape, setup: Setup, micro_batch: int) -> int:
    """Return the bytes that one rank keeps in host memory instead of on its GPU."""
    if setup.device != "cuda":
        return 0
    need = _inputs_host_bytes(config, shape, setup, micro_batch)
    if setup.zero and (setup.offload_optimizer or setup.offload_parameters):
        whole = states_bytes(config, shape, replace(setup, offload_optimizer=False, offload_parameters=False))
        need += int(sum(whole.values()) - sum(states_bytes(config, shape, setup).values()))
    return need


def layer_input_bytes(config: Config, shape: ModelShape, setup: Setup, tokens: int) -> float:
    """Return the bytes of a layer's input."""
    return float(residual_bytes(config, shape, setup) * shape.hidden_size * tokens)


def _inputs_host_bytes(config: Config, shape: ModelShape, setup: Setup, micro_batch: int) -> int:
    """Return the bytes of the inputs of recomputed layers that we, or Unsloth, move to host memory.

    Each is in a pinned block whose size is a power of two (torch 2.13; unsloth_zoo 2026.10.9,
    `gradient_checkpointing.py`; unverified on a GPU). `_moving` counts Unsloth's on the GPU as well, as a margin for
    its two buffers and other memory there.
    """
    unsloth = config.tuning.backend == "unsloth" and setup.gradient_checkpointing
    if not (setup.activation_offload or unsloth):
        return 0
    if setup.stages and setup.stage is None:
        stages = (replace(setup, stage=stage) for stage in range(len(setup.stages)))
        return max(_inputs_host_bytes(config, shape, stage, micro_batch) for stage in stages)
    passing = 1
    if setup.stages:
        shape, setup, passing = stage_of(shape, setup)
    tokens = -(-micro_batch * setup.row_tokens // setup.sequence_parallel)
    block = int(layer_input_bytes(config, shape, setup, tokens))
    return passing * shape.layers * (1 << (block - 1).bit_length())


def loading_host_bytes(config: Config, shape: ModelShape, setup: Setup, processes: int) -> int:
    """Return the bytes of host memory that a machine's processes take while loading, without memory-mapped files.

    Under FSDP2 each process converts trained weights to fp32 in host memory, or quantises a base there, before
    sharding. Frozen weights in the type of their file stay in the file's pages (2 of 237 MiB, measured with
    /proc/self/smaps_rollup); other strategies read onto the card.
    """
    if setup.device != "cuda" or setup.strategy != "fsdp2" or shape.quantized_bits or config.tuning.mode == "lora":
        return 0
    full = config.tuning.mode == "full"
    weights = 4.0 * shape.parameters if full else sum(frozen_bytes(config, shape, setup))
    return int(processes * (weights + CONTEXT_BYTES["cpu"]))


def machine_bytes(config: Config, shape: ModelShape, plan: Plan, processes: int) -> int:
    """Return the bytes of a machine's memory that its processes need: the complete peak on CPUs, else what is
    offloaded, or what loading takes.
    """
    if plan.device == "cpu":
        return sum(rank.peak_bytes for rank in plan.ranks[:processes])
    offloaded = processes * host_bytes(config, shape, plan, max(rank.micro_batch for rank in plan.ranks))
    return max(offloaded, loading_host_bytes(config, shape, plan, processes))
