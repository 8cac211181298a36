"""The division of a step's rows into micro-batches: rows or packs, shares of unlike ranks, layout and loss chunks.

Decisions rest on memory and plain rules. Unlike cards share a step by the speeds in the catalogue, or in proportion to
their memory where a card is not in it, until training has measured them (`training/balance.py`). Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sft_play.config.schema import Config
from sft_play.errors import UserError
from sft_play.plan import choices
from sft_play.plan.batch import (
    Cost,
    StepBatch,
    choose_batch,
    equal_shares,
    even_micro_batches,
    halve_batch,
    in_words,
    rank_rows,
    share_out,
    spans,
    step_seconds,
)
from sft_play.plan.epoch import Packs, mixture_of, packs_of
from sft_play.plan.plan import Setup
from sft_play.plan.request import MOST_ROWS, Request, global_rows
from sft_play.plan.shape import BY_LENGTHS, FLATTENED_TOKENS
from sft_play.text import plural

MOST_TOGETHER = {"cuda": 64, "cpu": 4}
"""Largest micro-batch in rows; on a CPU matrices are large enough by then, and only memory would grow."""
WORTH = 0.10
"""Smallest share of micro-steps that packing must save, and of tokens that flattened rows must save where they need a
mask over all rows.
"""
LEAST_PADDING = 0.01
"""Share of tokens below which padding is not mentioned."""
NAMED = 8
"""Largest number of ranks whose shares are listed one by one."""
FILLS = 4
"""Micro-batches per stage where the data allow it, so that filling and draining the pipeline takes at most a fifth of a
step.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """How rows become micro-batches."""

    setup: Setup
    batch: StepBatch
    packs: Packs | None = None
    """`None` without packing."""

    @property
    def micro_steps(self) -> int:
        """Micro-steps that a step is expected to need, without the empty ones, which are skipped."""
        if self.packs is None:
            return self.batch.accumulation
        if self.own_steps:
            return max(self.own_steps)
        return max(1, round(self.packs.micro_steps(sum(self.batch.micro_batches))))

    @property
    def own_steps(self) -> tuple[int, ...]:
        """Micro-steps that each rank is expected to make where they differ; otherwise empty."""
        if self.packs is None or not self.batch.own_steps:
            return self.batch.own_steps
        return tuple(
            max(1, -(-packs // max(1, micro)))
            for packs, micro in zip(self.shares, self.batch.micro_batches, strict=True)
        )

    @property
    def rows(self) -> int:
        """Rows per step, or packs where micro-batches count packs."""
        return self.batch.global_batch if self.packs is None else max(1, round(self.packs.mean))

    @property
    def shares(self) -> list[int]:
        """Largest number of rows (or packs) of each rank in a step."""
        if self.batch.own_steps:
            return list(spans(self.rows, self.batch.slots))
        return rank_rows(self.rows, self.batch.micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What is known of the rows of a step."""

    row_tokens: float
    """Tokens of an average row."""
    longest: float
    label_share: float
    """Share of tokens that have labels."""
    inside: float = 0.0
    """With packing, where the fields above describe packs: tokens of the row that the average token is in."""

    def padded_tokens(self, micro: float) -> float:
        """Return the tokens of each of `micro` rows, padded to the longest of them.

        The longest of m rows spread evenly around the mean is (m - 1) / (m + 1) of the way from the mean to the
        longest row of all.
        """
        return self.row_tokens + max(0.0, self.longest - self.row_tokens) * max(0.0, micro - 1) / (micro + 1)


def divide(request: Request, setup: Setup, fitting: tuple[int, ...], reasons: dict[str, str]) -> Division:
    """Return micro-batch, accumulation, packing, layout and loss chunks. Raise `UserError`.

    `fitting` is the number of rows that each rank's memory holds.
    """
    config, launch, train = request.config, request.launch, request.config.train
    # Under packing, packs must fit, not rows; and before the data are known, the assumption that all rows have the
    # greatest length must not refuse a typed value.
    if train.packing == "on" or (launch.early and train.grad_accum != "auto"):
        fitting = (MOST_ROWS,) * len(fitting)
    plain = choose_batch(train, fitting, _most_together(request, setup), request.unit)
    division = choose_packing(request, _with_layout(request, setup, plain, {}), plain, reasons)
    division = _with_shares(request, division, reasons)
    batch = halve_batch(division.batch, launch.halvings, request.unit)
    reasons |= {kind: text for kind, text in batch.reasons.items() if kind not in division.batch.reasons}
    setup = _with_layout(request, division.setup, batch, reasons)
    padding = _padding(request, division, batch)
    if setup.layout != "flattened" and padding >= LEAST_PADDING:
        reasons["padding"] = (
            f"padding about {padding:.0%} of all tokens: rows are as long as the longest of their micro-batch"
        )
    setup = replace(setup, accumulates=batch.accumulation > 1)

    def fits(larger: Setup) -> bool:
        # After memory ran out, the plan's own figures have proven too low to allow anything larger.
        recovers = launch.halvings or launch.force_checkpointing
        return not recovers and request.fits(larger, tuple(max(1, rows) for rows in batch.micro_batches))

    chunks = choices.settle_chunks(config, request.shape, setup, max(batch.micro_batches), fits, reasons)
    return replace(division, setup=chunks, batch=batch)


def _most_together(request: Request, setup: Setup) -> int:
    """Return the most rows of a micro-batch; in a pipeline few enough to keep all stages busy in a step."""
    most = MOST_TOGETHER[setup.device]
    if not setup.stages or not request.divides:
        return most
    rows = global_rows(request.config.train, setup.data_world) / setup.data_world
    return max(1, min(most, math.floor(rows / (FILLS * len(setup.stages)))))


# The layout of a micro-batch.


def rows_data(request: Request, division: Division) -> Data:
    """Return the average row (with packing: pack); memory is planned for the worst one instead."""
    split, packs, longest = request.train_split, division.packs, division.setup.row_tokens
    if not split or not split.rows or not split.tokens:
        return Data(row_tokens=longest, longest=longest, label_share=1.0)
    rows, tokens, labels = float(split.rows), float(split.tokens), float(split.label_tokens)
    if mixture := mixture_of(request.config.data, split.sources):
        taken = [
            (count / source.rows, source)
            for count, source in zip(mixture.epoch_rows, split.sources, strict=True)
            if count
        ]
        rows = float(sum(mixture.epoch_rows))
        tokens = sum(times * source.tokens for times, source in taken)
        labels = sum(times * source.label_tokens for times, source in taken)
    if packs is None:
        return Data(row_tokens=tokens / rows, longest=split.longest, label_share=labels / tokens)
    each = packs.step_tokens / division.rows
    return Data(row_tokens=each, longest=max(each, packs.longest), label_share=labels / tokens, inside=packs.row_tokens)


def _padding(request: Request, division: Division, batch: StepBatch) -> float:
    """Return the share of tokens that padding would take."""
    data = rows_data(request, division)
    return 1 - data.row_tokens / data.padded_tokens(max(batch.micro_batches))


def _with_layout(request: Request, setup: Setup, batch: StepBatch, reasons: dict[str, str]) -> Setup:
    """Return the setup with the layout of its rows.

    Rows are flattened where that is exact and fits, unless it needs a mask over all rows and saves little padding.
    """
    if setup.pack_tokens:
        return setup
    padded, rows = replace(setup, layout=choices.padded_layout(request)), max(batch.micro_batches)
    flattened = replace(setup, layout="flattened")
    why = choices.why_padded(request, setup, rows, setup.row_tokens)
    needs_mask = rows > 1 and setup.attn_implementation not in BY_LENGTHS
    if not why and needs_mask:
        padding = _padding(request, Division(setup=setup, batch=batch), batch)
        if not request.fits(flattened, batch.micro_batches) and request.fits(padded, batch.micro_batches):
            why = f"the mask of {rows * setup.row_tokens} flattened tokens would not fit"
        elif request.train_split and padding < WORTH:
            why = f"{padding:.0%} of padding costs less than a mask over rows in one line"
    reasons["layout"] = f"rows padded: {why}" if why else "rows flattened: no time and memory for padding"
    return padded if why else flattened


# Rows or packs.


def pack_if_typed(request: Request, setup: Setup) -> Setup:
    """Return the setup with packs for `train.packing: on`, so that all decisions are for packs. Raise `UserError`."""
    config = request.config
    if config.train.packing != "on":
        return setup
    if why := _unpackable(request, setup, 1):
        raise UserError(f"`train.packing` is `on`, but {why}", hint="leave `train.packing` to `auto`, or `off`")
    return _packed(config, setup, packs_of(request, global_rows(config.train, setup.data_world)))


def _packed(config: Config, setup: Setup, packs: Packs | None) -> Setup:
    """Return the setup whose row is the longest possible pack, with the largest share of labels of any."""
    limit = config.model.max_seq_len
    longest, share = (packs.longest, packs.label_share) if packs else (limit, 1.0)
    return replace(setup, pack_tokens=limit, layout="flattened", row_tokens=longest, label_share=share)


def choose_packing(request: Request, setup: Setup, plain: StepBatch, reasons: dict[str, str]) -> Division:
    """Return how rows become micro-batches, with the reasons. Raise `UserError`.

    `setup` is packed already where `train.packing` is `on`.
    """
    config, wish = request.config, request.config.train.packing

    def off(why: str = "") -> Division:
        reasons.update(plain.reasons | ({"packing": f"packing off: {why}"} if why else {}))
        return Division(setup=setup, batch=plain)

    # Where one micro-step holds all rows, packing saves nothing.
    if wish == "off" or (wish == "auto" and plain.accumulation == 1):
        return off()
    packs = packs_of(request, plain.global_batch)
    if wish == "auto":
        if request.launch.unpack:
            return off("memory ran out with it")
        if packs is None:
            return off(
                "the lengths of these rows are not known"
                if request.train_split
                else "decided when the data are prepared"
            )
        if why := _unpackable(request, setup, packs.longest):
            return off(why)
    packed = _packed(config, setup, packs)
    fitting = request.largest(packed)
    micros = _micro_batches(request, Division(setup=packed, batch=plain, packs=packs), fitting)
    if any(micro > most for micro, most in zip(micros, fitting, strict=True)):
        capacity = f"{'only ' + str(min(fitting)) if min(fitting) else 'not one'} pack of {packed.row_tokens} tokens"
        if wish == "auto":
            return off(f"{capacity} would fit")
        raise UserError(
            f"`train.packing` is `on`, but only {capacity} of the {max(micros)} packs in a micro-batch fit",
            hint="a smaller `model.max_seq_len`, TRAIN_GRADIENT_CHECKPOINTING=true, or TRAIN_PACKING=off",
        )
    bound, slots = packs.bound if packs else plain.global_batch, sum(micros)
    accumulation = math.ceil(bound / slots)
    arithmetic = f"how much it saves is known when the data are prepared; packs of up to {packed.pack_tokens} tokens"
    if packs:
        before, after = plain.accumulation, packs.micro_steps(slots)
        saved = 1 - after / before
        arithmetic = (
            f"{packs.rows} rows in {packs.mean:.1f} packs of {packs.limit} tokens, {packs.efficiency:.0%} full;"
            f" {after:.1f} micro-steps "
        )
        arithmetic += f"instead of {before}" + (f" = {saved:.0%} fewer" if saved > 0 else "")
        if wish == "auto" and saved <= WORTH:
            return off(f"{arithmetic}; worth it from {WORTH:.0%} fewer")
    reasons["global batch"] = plain.reasons["global batch"]
    reasons["packing"] = f"packing on: {arithmetic}" + (", as configured" if wish == "on" else "")
    micro = in_words(micros)
    reasons["micro-batch"] = (
        f"micro-batch {micro} {'pack' if micro == '1' else 'packs'} of up to {packed.row_tokens} tokens per"
        f" {request.unit}: {plural(min(fitting), 'pack')} would fit; accumulation {accumulation} = at most"
        f" {plural(bound, 'pack')} / {slots}, and micro-steps without any are skipped"
    )
    batch = replace(plain, slots=tuple((micro, accumulation) for micro in micros))
    return Division(setup=packed, batch=batch, packs=packs)


def _unpackable(request: Request, setup: Setup, longest: int) -> str:
    """Return why rows cannot be packed; empty if they can."""
    # A pack is several flattened rows, such as two of half its length.
    return choices.why_padded(request, setup, 2, -(-longest // 2))


def _micro_batches(request: Request, packed: Division, fitting: tuple[int, ...]) -> tuple[int, ...]:
    """Return the packs per micro-step of each rank."""
    train, world, packs = request.config.train, len(fitting), packed.packs
    per_step = max(packs.counts) if packs else packed.batch.global_batch
    # A typed accumulation must hold for any number of packs that a step may have.
    if train.grad_accum != "auto":
        return (math.ceil((packs.bound if packs else per_step) / (train.grad_accum * world)),) * world
    if train.batch_size != "auto":
        return (min(train.batch_size, math.ceil(per_step / world)),) * world
    most = _most_packs(packed)
    return even_micro_batches(per_step, [min(most, rows) for rows in fitting]) if min(fitting) else (1,) * world


def _most_packs(packed: Division) -> int:
    """Return the number of packs with as many tokens as the largest micro-batch of rows, at least 1."""
    setup, packs = packed.setup, packed.packs
    mean = packs.step_tokens / packs.rows if packs else setup.row_tokens
    most = max(1, int(MOST_TOGETHER[setup.device] * mean) // setup.row_tokens)
    if setup.device == "cuda" and setup.attn_implementation == "sdpa":
        most = min(most, max(1, FLATTENED_TOKENS // setup.row_tokens))
    return most


# Shares of ranks on unlike devices.


def _with_shares(request: Request, division: Division, reasons: dict[str, str]) -> Division:
    """Return the division with shares by speed and memory where ranks are unlike and the batch is `auto`."""
    setup, devices = division.setup, request.data_devices
    same, speeds_known = setup.sharded, all(device.peak_flops for device in devices)
    most = (
        max(_most_packs(division), *division.batch.micro_batches)
        if setup.pack_tokens
        else _most_together(request, setup)
    )
    costs = [
        Cost(row_seconds=1 / ((speeds_known and device.peak_flops) or device.memory_bytes), most_rows=min(most, rows))
        for device, rows in zip(devices, request.largest(setup), strict=True)
    ]
    if not request.divides or len(set(costs)) < 2 or not all(cost.most_rows for cost in costs):
        return division
    equal = equal_shares(division.rows, costs, same_steps=same)
    shares = equal if request.config.launch.balance == "off" else share_out(division.rows, costs, same_steps=same)
    counts, even = (", ".join(map(str, spans(division.rows, each))) for each in (shares, equal))
    reasons.pop("micro-batch", None)
    reasons.pop("accumulation", None)
    unit = "pack" if setup.pack_tokens else "row"
    division_text = f"{counts if len(costs) <= NAMED else 'rows'} of {plural(division.rows, unit)} a step"
    if shares == equal:
        off = ", as `launch.balance: off` says" if request.config.launch.balance == "off" else ""
        reasons["shares"] = f"equal shares{off}: {division_text}, in micro-batches by memory"
    else:
        gain = step_seconds(division.rows, equal, costs) / step_seconds(division.rows, shares, costs)
        by_speed = f"speed and memory: {division_text} instead of {even}, {gain:.2f} times as fast by the catalogue"
        by_memory = f"memory, since no speed is known: {division_text} instead of {even}"
        reasons["shares"] = (
            f"shares by {by_speed if speeds_known else by_memory}, until training has measured it"
            " (`launch.balance: off`: equal shares)"
        )
    if setup.pack_tokens:
        # The step with most packs must have room.
        bound = division.packs.bound if division.packs else division.batch.global_batch
        times = max(1.0, bound / sum(micro * steps for micro, steps in shares))
        shares = tuple((micro, math.ceil(steps * times)) for micro, steps in shares)
    return replace(division, batch=replace(division.batch, slots=shares))
