"""Micro-batch and accumulation from the global batch (contract B1, B2). Pure arithmetic, with the sentence that explains it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sft_play.config.schema import TrainConfig
from sft_play.errors import UserError

DEFAULT_GLOBAL_BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The batch of a run."""

    micro_batches: tuple[int, ...]
    """Rows per micro-step of each rank."""
    accumulation: int
    """Micro-steps per optimizer step, the same on every rank, so that collective operations match."""
    global_batch: int
    reasons: tuple[str, ...]


def choose_batch(train: TrainConfig, largest: tuple[int, ...], unit: str = "device") -> Batch:
    """Returns the batch for ranks that can hold `largest` rows each. Raises `UserError` with the arithmetic.

    The global batch never depends on the number of ranks, unless batch and accumulation are both given and it is not.
    """
    world = len(largest)
    given, accumulation = train.batch_size, train.grad_accum
    if given != "auto" and accumulation != "auto":
        return _both(train, given, accumulation, world, unit)
    wanted = DEFAULT_GLOBAL_BATCH if train.global_batch_size == "auto" else train.global_batch_size
    source = "the default" if train.global_batch_size == "auto" else "as configured"
    reasons = [f"global batch {wanted} rows per optimizer step ({source}), whatever the number of {unit}s"]
    if accumulation != "auto":
        micro = math.ceil(wanted / (accumulation * world))
        if micro > min(largest):
            raise UserError(
                f"`train.grad_accum` {accumulation} needs {micro} rows per {unit} = {wanted} global / ({accumulation} x {world} {unit}s), "
                f"but only {min(largest)} fit",
                hint=f"set TRAIN_GRAD_ACCUM to {math.ceil(wanted / (min(largest) * world))} or more, or leave it to `auto`",
            )
        micros = (micro,) * world
        reasons.append(
            f"micro-batch {micro} = {wanted} global / ({accumulation} accumulation, as configured, x {world} {unit}{'s' * (world > 1)})"
        )
        return Batch(micro_batches=micros, accumulation=accumulation, global_batch=wanted, reasons=tuple(reasons))
    if given != "auto":
        micros = (given,) * world
        reasons.append(f"micro-batch {given} per {unit}, as configured")
    else:
        micros = _auto(wanted, largest)
        held = f"{min(largest)}" if min(largest) == max(largest) else f"{min(largest)} to {max(largest)}"
        reasons.append(f"micro-batch {_words(micros)} per {unit}: up to {held} rows fit, and it divides the work evenly")
    steps = math.ceil(wanted / sum(micros))
    total = (
        f"{micros[0]} per {unit} x {world} {unit}{'s' * (world > 1)}" if len(set(micros)) == 1 else " + ".join(map(str, micros))
    )
    reasons.append(f"accumulation {steps} = {wanted} global / ({total})" + _remainder(wanted, steps * sum(micros)))
    return Batch(micro_batches=micros, accumulation=steps, global_batch=wanted, reasons=tuple(reasons))


def _both(train: TrainConfig, micro: int, accumulation: int, world: int, unit: str) -> Batch:
    product = micro * accumulation * world
    arithmetic = f"{micro} per {unit} x {accumulation} accumulation x {world} {unit}{'s' * (world > 1)} = {product}"
    if train.global_batch_size == "auto":
        reason = f"global batch {arithmetic}: batch and accumulation are both given, so it differs with the number of {unit}s"
        return Batch(micro_batches=(micro,) * world, accumulation=accumulation, global_batch=product, reasons=(reason,))
    wanted = train.global_batch_size
    if wanted != product:
        raise UserError(
            f"{arithmetic}, but `train.global_batch_size` is {wanted}",
            hint="leave one of TRAIN_BATCH_SIZE, TRAIN_GRAD_ACCUM and TRAIN_GLOBAL_BATCH_SIZE to `auto`",
        )
    return Batch(
        micro_batches=(micro,) * world,
        accumulation=accumulation,
        global_batch=wanted,
        reasons=(f"global batch {arithmetic}, as configured",),
    )


def _auto(wanted: int, largest: tuple[int, ...]) -> tuple[int, ...]:
    """Returns micro-batches with as few micro-steps as fit, shared out so that none is larger than it must be."""
    steps = math.ceil(wanted / sum(largest))
    if len(set(largest)) == 1:
        # The smallest micro-batch that needs no more steps: 32 over room for 12 gives 3 steps of 11, not 12, 12 and 8.
        return (max(1, math.ceil(wanted / (steps * len(largest)))),) * len(largest)
    share = wanted / (steps * sum(largest))
    return tuple(max(1, min(room, math.ceil(room * share))) for room in largest)


def _words(micros: tuple[int, ...]) -> str:
    return str(micros[0]) if len(set(micros)) == 1 else ", ".join(map(str, micros))


def _remainder(wanted: int, slots: int) -> str:
    return f", the last micro-batches {slots - wanted} rows smaller in all" if slots > wanted else ""
