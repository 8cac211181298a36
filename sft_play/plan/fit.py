"""What fits: the memory of a rank from the best source there is, the largest batch, and the ways to need less. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from sft_play.config.schema import Config
from sft_play.errors import HardwareError
from sft_play.plan.batch import count, global_rows
from sft_play.plan.hardware import GIB
from sft_play.plan.memory import Setup, rank_memory
from sft_play.plan.shape import ModelShape
from sft_play.plan.throughput import flops_per_token

Memory = Callable[[Config, ModelShape, Setup, int], dict[str, int]]
"""(configuration, shape, setup, micro-batch) -> bytes of every part of a rank at its worst moment."""
SHORTEST_ROW = 8
MOST_REMEDIES = 6
MOST_ROWS = 2**20
"""Where the search for the largest micro-batch ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One way to need less memory."""

    override: str
    """What to type."""
    need_bytes: int
    saving_bytes: int
    fits: bool
    slower: float | None
    """Time of a token over what it takes without the remedy, by arithmetic; `None` where that says nothing."""

    def __str__(self) -> str:
        notes = [f"{self.saving_bytes / GIB:.1f} less"]
        if self.slower is not None and abs(self.slower - 1) >= 0.01:
            notes.append(_change(self.slower))
        return f"{self.override}: {self.need_bytes / GIB:.1f} GiB ({', '.join(notes)})" + (
            "" if self.fits else ", still too much"
        )


def _change(slower: float) -> str:
    return f"{slower - 1:.0%} slower" if slower > 1 else f"{1 - slower:.0%} faster"


class DoesNotFitError(HardwareError):
    """Not even what was asked for, or one row, fits; carries what `make plan` shows."""

    def __init__(
        self,
        message: str,
        *,
        setup: Setup,
        micro_batch: int,
        parts: dict[str, int],
        capacity_bytes: int,
        remedies: tuple[Remedy, ...],
    ) -> None:
        hint = "; ".join(map(str, remedies[:5])) or "use a smaller model, or more memory"
        super().__init__(message, hint=hint)
        self.setup, self.micro_batch = setup, micro_batch
        self.parts, self.capacity_bytes, self.remedies = parts, capacity_bytes, remedies


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Questions about the memory of one configuration."""

    config: Config
    shape: ModelShape
    memory: Memory = rank_memory

    def parts(self, setup: Setup, micro_batch: int) -> dict[str, int]:
        """Returns the bytes of every part."""
        return self.memory(self.config, self.shape, setup, micro_batch)

    def need(self, setup: Setup, micro_batch: int) -> int:
        """Returns the bytes of all parts."""
        return sum(self.parts(setup, micro_batch).values())

    def largest(self, setup: Setup, capacity: int) -> int:
        """Returns the most rows that fit: exactly, by bisection, for memory that grows with them in any way."""

        def fits(rows: int) -> bool:
            return self.need(setup, rows) <= capacity

        if not fits(1):
            return 0
        # Memory is nearly linear: the answer is near where a line through one row and two arrives.
        low, step = 1, max(1, (capacity - self.need(setup, 1)) // max(1, self.need(setup, 2) - self.need(setup, 1)))
        while low < MOST_ROWS and fits(low + step):
            low += step
        high = min(low + step, MOST_ROWS + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def longest(self, setup: Setup, micro_batch: int, capacity: int, most: int) -> int:
        """Returns the tokens, at most `most`, of the longest rows of which `micro_batch` fit; 0 when none do."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.need(replace(setup, row_tokens=middle), micro_batch) <= capacity:
                low = middle
            else:
                high = middle - 1
        return low

    def require(self, setup: Setup, room: list[int], fitting: tuple[int, ...], names: list[str], *, early: bool) -> None:
        """Raises `DoesNotFitError` with the parts and the ways out when what was asked for, or not even one row, fits.

        `early`, before the data are known, one row counts as the shortest there can be: its length is not known yet.
        """
        rank = min(range(len(room)), key=lambda i: fitting[i])
        wanted = wanted_rows(self.config, setup.world_size)
        if early:
            wanted, setup = 1, replace(setup, row_tokens=min(SHORTEST_ROW, setup.row_tokens))
            if self.largest(setup, room[rank]) >= 1:
                return
        if fitting[rank] >= wanted:
            return
        parts = self.parts(setup, wanted)
        listed = ", ".join(f"{n} {size / GIB:.1f}" for n, size in sorted(parts.items(), key=lambda p: -p[1]) if size > GIB / 20)
        rows = f"a micro-batch of {wanted} rows of" if wanted > 1 else "not even one row of"
        asked = _asked(self.config, setup.world_size) if wanted > 1 else ""
        raise DoesNotFitError(
            f"{rows} {setup.row_tokens} tokens {'does not fit' if wanted > 1 else 'fits'}{asked}: rank {rank} ({names[rank]}) needs "
            f"{sum(parts.values()) / GIB:.1f} GiB of {room[rank] / GIB:.1f} GiB ({listed} GiB)",
            setup=setup,
            micro_batch=wanted,
            parts=parts,
            capacity_bytes=room[rank],
            remedies=self.remedies(setup, wanted, room[rank]),
        )

    def remedies(self, setup: Setup, micro_batch: int, capacity: int) -> tuple[Remedy, ...]:
        """Returns what would need less than `micro_batch` rows do now, what fits first, then the cheapest in speed."""
        before = self.need(setup, micro_batch)
        pace = self._flops(self.config, setup)
        found = []
        for override, config, other, rows in self._changes(setup, micro_batch):
            need = sum(self.memory(config, self.shape, other, rows).values())
            slower = None if other.offload_parameters or other.strategy != setup.strategy else self._flops(config, other) / pace
            if need < before:
                found.append(
                    Remedy(override=override, need_bytes=need, saving_bytes=before - need, fits=need <= capacity, slower=slower)
                )
        found.sort(key=lambda r: (not r.fits, _price(r), r.need_bytes))
        return tuple(found[:MOST_REMEDIES])

    def _flops(self, config: Config, setup: Setup) -> float:
        return flops_per_token(config, self.shape, setup.row_tokens, recompute=setup.gradient_checkpointing)

    def _changes(self, setup: Setup, rows: int) -> list[tuple[str, Config, Setup, int]]:
        """Returns (override, configuration, setup, rows) of everything that could be changed."""
        config = self.config
        saving = replace(setup, gradient_checkpointing=True)
        typed_off = " TRAIN_GRADIENT_CHECKPOINTING=true" if config.train.gradient_checkpointing is False else ""
        found: list[tuple[str, Config, Setup, int]] = []
        if rows > 1:
            typed = isinstance(config.train.batch_size, int), config.train.grad_accum != "auto"
            auto = {(True, False): "TRAIN_BATCH_SIZE=auto", (False, True): "TRAIN_GRAD_ACCUM=auto"}.get(typed)
            found.append((auto or f"TRAIN_BATCH_SIZE={rows // 2}", config, setup, 1 if auto else rows // 2))
        if not setup.gradient_checkpointing:
            found.append(("TRAIN_GRADIENT_CHECKPOINTING=true", config, saving, rows))
        if setup.row_tokens > SHORTEST_ROW:
            short = max(SHORTEST_ROW, setup.row_tokens // 2)
            found.append((f"MODEL_MAX_SEQ_LEN={short}", config, replace(saving, row_tokens=short), rows))
        for mode in ("lora", "qlora"):
            if config.tuning.mode not in (mode, "qlora"):
                changed = replace(config, tuning=replace(config.tuning, mode=cast(Any, mode)))
                frozen = "bfloat16" if setup.precision == "bf16" else setup.weights_dtype
                found.append((f"TUNING_MODE={mode}{typed_off}", changed, replace(saving, weights_dtype=frozen), rows))
        if config.tuning.mode == "full" and setup.device == "cuda" and setup.precision == "bf16" and not setup.zero:
            narrow = replace(saving, weights_dtype="bfloat16", optim="adamw_bnb_8bit")
            found.append((f"MODEL_DTYPE=bfloat16 TRAIN_OPTIM=adamw_bnb_8bit{typed_off}", config, narrow, rows))
        return found + self._other_strategies(saving, rows, typed_off)

    def _other_strategies(self, saving: Setup, rows: int, typed_off: str) -> list[tuple[str, Config, Setup, int]]:
        config, found = self.config, []
        if saving.world_size > 1 and saving.strategy in ("ddp", "zero1", "zero2") and config.tuning.mode != "qlora":
            stated = "" if config.launch.strategy in ("auto", "fsdp2") else " LAUNCH_STRATEGY=fsdp2"
            found.append((f"make train-fsdp{stated}{typed_off}", config, replace(saving, strategy="fsdp2"), rows))
        if saving.device == "cuda" and config.tuning.mode != "qlora" and not saving.offload_parameters:
            stated = "" if config.launch.strategy in ("auto", "zero3") else " LAUNCH_STRATEGY=zero3"
            offloading = replace(saving, strategy="zero3", offload_optimizer=True, offload_parameters=True)
            command = f"make train-deepspeed DEEPSPEED_CONFIG=deepspeed/zero3_offload.json{stated}{typed_off}"
            found.append((command, config, offloading, rows))
        return found


def _price(remedy: Remedy) -> float:
    """Orders remedies whose price arithmetic does not give: sharding costs some communication, offloading much."""
    if remedy.slower is not None:
        return max(1.0, remedy.slower)
    return 4.0 if "offload" in remedy.override else 1.3


def wanted_rows(config: Config, world: int) -> int:
    """Returns the rows per rank that must fit: the micro-batch that was typed, or that a typed accumulation needs; else one."""
    train = config.train
    if train.batch_size != "auto":
        return train.batch_size
    if train.grad_accum == "auto" or train.packing == "on":  # what fits there are packs, not known yet
        return 1
    return math.ceil(global_rows(train, world) / (train.grad_accum * world))


def _asked(config: Config, world: int) -> str:
    """Returns why so many rows must fit, for an error: the arithmetic of a typed accumulation."""
    train = config.train
    if train.batch_size != "auto" or train.grad_accum == "auto":
        return ""
    rows = global_rows(train, world)
    return f" (`train.grad_accum` {train.grad_accum} needs it: {rows} global / ({train.grad_accum} x {count(world, 'rank')}))"
