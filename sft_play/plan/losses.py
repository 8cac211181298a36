"""When head and loss run in chunks of label positions, and what their logits take then. Pure.

Whole, the logits of K label positions take 12 bytes each at the worst moment of the backward pass: fp32 log-softmax, its gradient
and that of the logits. In chunks (`model/chunked_head.py`) only those of one chunk ever exist; for that, the gradient of all
positions' hidden states is held from the forward pass on, and a trained head's gradient is summed in a buffer of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from sft_play.config.schema import Config
from sft_play.plan.layouts import CHUNKED_HEAD_MODEL_TYPES
from sft_play.plan.shape import ModelShape
from sft_play.plan.words import gib

if TYPE_CHECKING:
    from sft_play.plan.memory import Setup

LOGIT_BYTES = 12
CHUNK_BYTES = {"cuda": (768 * 2**20, 256 * 2**20), "cpu": (256 * 2**20,)}
"""What the logits of a chunk may take, the first of which there is room for. Each chunk reads the whole head three times: on a GPU
512 positions of 128,256 words are 512 operations a byte, where an RTX 4090 needs 164 and an H200 206 to be bound by computing; 128 are not
enough (by arithmetic, unverified). A 4-bit 8B model in 7.5 GiB has no room for 1,024."""
LEAST_POSITIONS = 128
"""A chunk reads the whole head: with fewer positions that costs more than the arithmetic."""
ALIGNED = 64
HEADS = frozenset({"lm_head", "embed_out"})


def with_chunks(config: Config, shape: ModelShape, setup: Setup) -> Setup:
    """Returns the setup with head and loss in chunks, where they can be."""
    least = CHUNK_BYTES[setup.device][-1]
    return setup if _whole_because(config, shape, setup) else replace(setup, loss_chunk=_positions(config, shape, least))


def settle_chunks(
    config: Config, shape: ModelShape, setup: Setup, micro_batch: int, fits: Callable[[Setup], bool], reasons: list[str]
) -> Setup:
    """Returns the setup with chunks only where they save memory: where most tokens of the worst micro-batch have labels.

    They are as large as `fits`, the least size apart, which was planned with.
    """
    *larger, least = [replace(setup, loss_chunk=_positions(config, shape, size)) for size in CHUNK_BYTES[setup.device]]
    whole, chunked = replace(setup, loss_chunk=0), next((one for one in larger if fits(one)), least)
    labels = micro_batch * setup.row_tokens * setup.label_share
    before, after = (logit_bytes(config, shape, case, labels) for case in (whole, chunked))
    if after >= before:
        return whole
    if why := _whole_because(config, shape, setup):
        reasons.append(f"head and loss at all {labels:.0f} label positions at once, {gib(before)}: {why}")
        return whole
    sizes = f"{gib(after)} instead of {gib(before)} of logits"
    reasons.append(f"head and loss in chunks of {chunked.loss_chunk} label positions: {sizes}")
    return chunked


def _positions(config: Config, shape: ModelShape, size: int) -> int:
    """Returns the label positions of a chunk whose logits take `size` bytes."""
    chunk = max(LEAST_POSITIONS, size // (LOGIT_BYTES * shape.vocab_size))
    if config.tuning.mode == "full":
        # Each chunk adds a gradient as large as the head: with h/4 positions its logits are half of that, and it is read seldom.
        chunk = max(chunk, shape.hidden_size // 4)
    return chunk // ALIGNED * ALIGNED


def _whole_because(config: Config, shape: ModelShape, setup: Setup) -> str | None:
    """Returns why head and loss cannot be chunked, or `None` when they can."""
    if config.tuning.backend == "unsloth":
        return "unsloth has a loss of its own"
    if shape.model_type not in CHUNKED_HEAD_MODEL_TYPES:
        return f"what `{shape.model_type}` does to its logits was not tried in chunks"
    targets = config.tuning.lora.target_modules
    on_head = config.tuning.mode != "full" and not isinstance(targets, str) and any(t.split(".")[-1] in HEADS for t in targets)
    return "ZeRO-3 gathers the head's adapters one by one" if on_head and setup.strategy == "zero3" else None


def logit_bytes(config: Config, shape: ModelShape, setup: Setup, labels: float) -> float:
    """Returns the bytes of the logits of `labels` positions, with what chunks need beside, at the worst moment.

    Where chunks would need more than the whole, the whole counts: `settle_chunks` turns them off.
    """
    whole = labels * shape.vocab_size * LOGIT_BYTES
    if not setup.loss_chunk or labels <= setup.loss_chunk:
        return whole
    hidden = 4 if setup.autocast else setup.width
    each = 8 if setup.width == 4 else 10  # the logit, its logarithm and, where that is narrower, an fp32 copy
    logits = setup.loss_chunk * shape.vocab_size * each
    head = shape.vocab_size * shape.hidden_size * (4 + hidden) if config.tuning.mode == "full" else 0
    return min(whole, logits + labels * shape.hidden_size * hidden + head)
