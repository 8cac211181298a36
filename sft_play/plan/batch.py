"""Micro-batch and accumulation from the global batch (contract B1, B2). Pure arithmetic, with the sentence that explains it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sft_play.config.schema import TrainConfig
from sft_play.errors import UserError
from sft_play.plan.balance import Slots

DEFAULT_GLOBAL_BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The batch of a run."""

    micro_batches: tuple[int, ...]
    """Rows per micro-step of each rank."""
    accumulation: int
    """Micro-steps per optimizer step: of every rank, or the most of any where `own_steps` differ."""
    global_batch: int
    reasons: tuple[str, ...]
    own_steps: tuple[int, ...] = ()
    """Micro-steps of each rank where they are not the same: under DDP, whose ranks meet once a step."""

    @property
    def slots(self) -> tuple[Slots, ...]:
        """Micro-batch and micro-steps of each rank."""
        steps = self.own_steps or (self.accumulation,) * len(self.micro_batches)
        return tuple(zip(self.micro_batches, steps, strict=True))


def choose_batch(train: TrainConfig, fitting: tuple[int, ...], most: int, unit: str = "device") -> Batch:
    """Returns the batch for ranks whose memory holds `fitting` rows each. Raises `UserError` with the arithmetic.

    `most` is the largest micro-batch that gains speed; only an explicit wish goes beyond it. The global batch depends on the number of
    ranks only where it is not given, and a micro-batch is: together with an accumulation, or with more rows at once than the default.
    """
    units = count(len(fitting), unit)
    given, accumulation = train.batch_size, train.grad_accum
    if given != "auto" and accumulation != "auto":
        return _both(train, given, accumulation, len(fitting), unit)
    wanted = global_rows(train, len(fitting))
    reasons = [_whole(train, wanted, len(fitting), unit)]
    if accumulation != "auto":
        if accumulation > wanted:
            raise UserError(
                f"`train.grad_accum` is {accumulation}, but a step has {wanted} rows: {accumulation - wanted} micro-steps would be empty",
                hint=f"TRAIN_GRAD_ACCUM={wanted} at most, or TRAIN_GLOBAL_BATCH_SIZE={accumulation}",
            )
        micro = _around(wanted, accumulation, fitting, unit)
        reasons.append(f"micro-batch {micro} = {wanted} global / ({accumulation} accumulation, as configured, x {units})")
        reasons += _idle(wanted, len(fitting), unit)
        return Batch(
            micro_batches=(micro,) * len(fitting), accumulation=accumulation, global_batch=wanted, reasons=tuple(reasons)
        )
    if given != "auto":
        micros = (given,) * len(fitting)
        reasons.append(f"micro-batch {given} per {unit}, as configured")
    else:
        room = tuple(min(most, rows) for rows in fitting)
        micros = _auto(wanted, room)
        held = f"up to {count(min(fitting), 'row')}" if min(fitting) == max(fitting) else f"{min(fitting)} to {max(fitting)} rows"
        fits = "fits" if held == "up to 1 row" else "fit"
        why = f"{held} {fits}, but more than {most} gain nothing" if min(fitting) > most else f"{held} {fits}"
        reasons.append(f"micro-batch {_words(micros)} per {unit}: {why}; the work is divided evenly")
    steps = math.ceil(wanted / sum(micros))
    total = f"{micros[0]} per {unit} x {units}" if len(set(micros)) == 1 else " + ".join(map(str, micros))
    reasons.append(f"accumulation {steps} = {wanted} global / ({total})" + _remainder(wanted, steps * sum(micros)))
    reasons += _idle(wanted, len(fitting), unit)
    return Batch(micro_batches=micros, accumulation=steps, global_batch=wanted, reasons=tuple(reasons))


def global_rows(train: TrainConfig, world: int) -> int:
    """Returns the rows of an optimizer step, as `choose_batch` settles them."""
    if train.batch_size != "auto" and train.grad_accum != "auto":
        return train.batch_size * train.grad_accum * world
    if train.global_batch_size != "auto":
        return train.global_batch_size
    return DEFAULT_GLOBAL_BATCH if train.batch_size == "auto" else max(DEFAULT_GLOBAL_BATCH, train.batch_size * world)


def rows_each(wanted: int, world: int) -> int:
    """Returns the largest micro-batch of which `world` ranks need no smaller one for a step of `wanted` rows."""
    return math.ceil(wanted / world)


def said_aloud(train: TrainConfig, world: int, unit: str = "device") -> str:
    """Returns how many rows a typed micro-batch makes of a global batch that nobody gave; empty where it stays the default."""
    rows = global_rows(train, world)
    if train.batch_size == "auto" or train.global_batch_size != "auto":
        return ""
    if train.grad_accum != "auto":
        product = (
            f"global batch {rows} = {train.batch_size} per {unit} x {train.grad_accum} accumulation x {count(world, unit)}: "
        )
        return product + f"batch and accumulation are both given, so it differs with the number of {plural(unit)}"
    if rows == DEFAULT_GLOBAL_BATCH:
        return ""
    return f"global batch {rows} = {train.batch_size} per {unit} x {count(world, unit)}: more at once than the default of {DEFAULT_GLOBAL_BATCH}"


def _whole(train: TrainConfig, wanted: int, world: int, unit: str) -> str:
    """Returns where the rows of a step come from. Raises `UserError` for a micro-batch of which a smaller one makes the same step."""
    if raised := said_aloud(train, world, unit):
        return raised
    if train.global_batch_size == "auto":
        return f"global batch {wanted} rows per optimizer step (the default), on any number of {plural(unit)}"
    if train.batch_size != "auto" and train.batch_size > rows_each(wanted, world):
        at_once = train.batch_size * world
        raise UserError(
            f"{train.batch_size} per {unit} x {count(world, unit)} = {at_once} rows at once, but `train.global_batch_size` is {wanted}: "
            f"{at_once - wanted} of them would stay empty",
            hint=f"TRAIN_BATCH_SIZE={rows_each(wanted, world)} at most, or TRAIN_GLOBAL_BATCH_SIZE={at_once}",
        )
    return f"global batch {wanted} rows per optimizer step (as configured), on any number of {plural(unit)}"


def halved(batch: Batch, halvings: int, unit: str = "device") -> Batch:
    """Returns the batch with half the micro-batch (rounded up) and twice the accumulation, `halvings` times over (contract B10).

    The global batch stays, and with it the rows of each step; even a micro-batch that was typed is halved. No rank goes below one
    row, and where all have one already nothing changes.
    """
    micros, accumulation, own = batch.micro_batches, batch.accumulation, batch.own_steps
    for _ in range(halvings):
        if max(micros) == 1:
            break
        own = tuple(steps * (2 if micro > 1 else 1) for micro, steps in zip(micros, own, strict=False))
        micros, accumulation = tuple(min(micro, halve(micro, 1)) for micro in micros), max(own, default=2 * accumulation)
    if micros == batch.micro_batches:
        return batch
    reason = (
        f"memory ran out: micro-batch {_words(batch.micro_batches)} x accumulation {_words(batch.own_steps or (batch.accumulation,))} became "
        f"{_words(micros)} x {_words(own or (accumulation,))} on every {unit}, the global batch {batch.global_batch} as before"
    )
    return replace(batch, micro_batches=micros, accumulation=accumulation, own_steps=own, reasons=(*batch.reasons, reason))


def halve(rows: int, times: int) -> int:
    """Returns `rows` halved and rounded up, `times` times over; 1 at least."""
    return (rows + (1 << times) - 1) >> times


def plural(unit: str) -> str:
    """Returns `devices` or `processes`."""
    return unit + ("es" if unit.endswith("s") else "s")


def count(number: int, unit: str) -> str:
    """Returns `1 device` or `2 devices`."""
    return f"{number} {unit if number == 1 else plural(unit)}"


def _around(wanted: int, accumulation: int, fitting: tuple[int, ...], unit: str) -> int:
    """Returns the micro-batch that a given accumulation leaves. Raises `UserError` when it does not fit."""
    micro = math.ceil(wanted / (accumulation * len(fitting)))
    if micro > min(fitting):
        least = math.ceil(wanted / (min(fitting) * len(fitting)))
        raise UserError(
            f"`train.grad_accum` {accumulation} needs {micro} rows per {unit} = {wanted} global / "
            f"({accumulation} x {count(len(fitting), unit)}), but only {min(fitting)} fit",
            hint=f"set TRAIN_GRAD_ACCUM to {least} or more, or leave it to `auto`",
        )
    return micro


def _both(train: TrainConfig, micro: int, accumulation: int, world: int, unit: str) -> Batch:
    product = micro * accumulation * world
    arithmetic = f"{micro} per {unit} x {accumulation} accumulation x {count(world, unit)} = {product}"
    if train.global_batch_size not in ("auto", product):
        raise UserError(
            f"{arithmetic} rows per optimizer step, but `train.global_batch_size` is {train.global_batch_size}",
            hint="leave one of TRAIN_BATCH_SIZE, TRAIN_GRAD_ACCUM and TRAIN_GLOBAL_BATCH_SIZE to `auto`",
        )
    reason = said_aloud(train, world, unit) or f"global batch {arithmetic}, as configured"
    return Batch(micro_batches=(micro,) * world, accumulation=accumulation, global_batch=product, reasons=(reason,))


def _auto(wanted: int, room: tuple[int, ...]) -> tuple[int, ...]:
    """Returns micro-batches with as few micro-steps as fit, shared out so that none is larger than it must be."""
    steps = math.ceil(wanted / sum(room))
    if len(set(room)) == 1:
        # The smallest micro-batch that needs no more steps: 32 over room for 12 gives 3 steps of 11, not 12, 12 and 8.
        return (max(1, math.ceil(wanted / (steps * len(room)))),) * len(room)
    share = wanted / (steps * sum(room))
    return tuple(max(1, min(rows, math.ceil(rows * share))) for rows in room)


def _words(micros: tuple[int, ...]) -> str:
    return str(micros[0]) if len(set(micros)) == 1 else ", ".join(map(str, micros))


def _remainder(wanted: int, slots: int) -> str:
    return f", {slots - wanted} of the {slots} slots stay empty" if slots > wanted else ""


def _idle(wanted: int, world: int, unit: str) -> list[str]:
    if world <= wanted:
        return []
    return [
        f"{world - wanted} of {count(world, unit)} have nothing to do: a step has {wanted} rows; raise TRAIN_GLOBAL_BATCH_SIZE"
    ]
