"""What a plan is asked for (configuration, hardware, model, data), and what of it fits into a rank's memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from sft_play.config.rules import check_rules
from sft_play.config.schema import Config, LaunchConfig, TrainConfig
from sft_play.errors import HardwareError, UserError
from sft_play.plan.calibration import Calibration
from sft_play.plan.hardware import GIB, HEADROOM, Device, Hardware
from sft_play.plan.memory import rank_memory
from sft_play.plan.nodes import Ranks, ranks_of
from sft_play.plan.plan import LaunchRequest, Plan, Setup
from sft_play.plan.shape import ModelShape
from sft_play.runs.prepared import Prepared, PreparedSplit
from sft_play.text import plural

Memory = Callable[[Config, ModelShape, Setup, int], dict[str, int]]
"""(configuration, shape, setup, micro-batch) -> bytes of every part of a rank at its worst moment."""
DEFAULT_GLOBAL_BATCH = 32
SHORTEST_ROW = 8
MOST_ROWS = 2**20
"""Where the search for the largest micro-batch ends."""
SWITCHED_CHIPS, SWITCHED_RANKS, SWITCHED_BYTES = {(9, 0), (10, 0)}, 4, GIB
"""Where NCCL reduces inside NVLink's switch (H100, H200 and B200, so many or more on a board) it takes about so much more of each card (0.9
to 1.5 GiB in all on eight H100 were seen elsewhere; unverified here)."""


def global_rows(train: TrainConfig, world: int) -> int:
    """Return the rows of an optimizer step."""
    if train.batch_size != "auto" and train.grad_accum != "auto":
        return train.batch_size * train.grad_accum * world
    if train.global_batch_size != "auto":
        return train.global_batch_size
    return DEFAULT_GLOBAL_BATCH if train.batch_size == "auto" else max(DEFAULT_GLOBAL_BATCH, train.batch_size * world)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that a plan is a function of."""

    config: Config
    hardware: Hardware
    shape: ModelShape
    launch: LaunchRequest = field(default_factory=LaunchRequest)
    typed: Callable[[str], bool] = frozenset[str]().__contains__
    """Whether a key was given on the command line."""
    prepared: Prepared | None = None
    calibration: Calibration | None = None
    """What was measured on these very devices; without it, speeds are priors."""
    memory: Memory = rank_memory
    """The closed formulas, or those corrected by a trace or a probe."""

    @cached_property
    def ranks(self) -> Ranks:
        """Where the ranks are. Raise `HardwareError` for devices that are not there, or full."""
        return ranks_of(self.hardware, self.launch)

    @property
    def group_size(self) -> int:
        """Neighbouring ranks that train the same rows, in slices: rows are divided among such groups."""
        return group_size(self.config.launch, len(self.ranks.devices))

    @property
    def stages(self) -> int:
        """Ranks of one pipeline; 1 without one."""
        return stages(self.config.launch, len(self.ranks.devices))

    @property
    def data_devices(self) -> tuple[Device, ...]:
        """One device of each group; those of a group are alike (`plan.sequence_parallel`)."""
        return self.ranks.devices[:: self.group_size]

    @cached_property
    def room(self) -> tuple[int, ...]:
        """Bytes that each rank of a group may use, for each group."""
        found = self.rank_room
        return tuple(min(found[start : start + self.group_size]) for start in range(0, len(found), self.group_size))

    @cached_property
    def rank_room(self) -> tuple[int, ...]:
        """Bytes that each rank may use; processes on a CPU share its memory."""
        share = HEADROOM[self.hardware.kind]
        found = []
        for rank, device in enumerate(self.ranks.devices):
            together = self.ranks.on_node_of(rank)
            if self.hardware.kind == "cpu":
                found.append(int(device.free_bytes * share / together))
            else:
                switched = together >= SWITCHED_RANKS and (device.compute_capability or (0, 0)) in SWITCHED_CHIPS
                found.append(int(device.free_bytes * share) - (SWITCHED_BYTES if switched else 0))
        return tuple(found)

    @property
    def train_split(self) -> PreparedSplit | None:
        return self.prepared.train if self.prepared else None

    @property
    def unit(self) -> str:
        """What has rows of its own."""
        if self.group_size > 1:
            return "group"
        return "device" if self.hardware.kind == "cuda" else "process"

    @property
    def divides(self) -> bool:
        """Whether micro-batch and accumulation are both for the plan to choose."""
        return self.config.train.batch_size == "auto" and self.config.train.grad_accum == "auto"

    @property
    def wanted_rows(self) -> int:
        """Rows per rank that must fit: the micro-batch that was typed, or that a typed accumulation needs; else one."""
        train, world = self.config.train, len(self.data_devices)
        if train.batch_size != "auto":
            return train.batch_size
        if train.grad_accum == "auto" or train.packing == "on":  # what fits there are packs, not known yet
            return 1
        return math.ceil(global_rows(train, world) / (train.grad_accum * world))

    def with_keys(self, keys: Mapping[str, Any]) -> Request:
        """Return the request as if these keys, such as `train.batch_size`, had been typed."""
        original, typed, memory, config = self.config, self.typed, self.memory, self.config
        for key, value in keys.items():
            section, name = key.split(".")
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})

        def memory_of(config: Config, shape: ModelShape, setup: Setup, micro_batch: int) -> dict[str, int]:
            # What was traced is known of the configuration as it stood; beside the setup, memory depends on its tuning alone.
            return memory(original if config.tuning == original.tuning else config, shape, setup, micro_batch)

        prepared = None if "model.max_seq_len" in keys else self.prepared  # rows of another length
        return replace(
            self, config=config, memory=memory_of, prepared=prepared, typed=lambda key: typed(key) or key in keys
        )  # fmt: skip

    def on(self, setup: Setup, rank: int) -> Setup:
        """Return the setup of a rank: of a pipeline its stage."""
        return replace(setup, stage=rank % len(setup.stages)) if setup.stages else setup

    def parts(self, setup: Setup, micro_batch: int) -> dict[str, int]:
        """Return the bytes of every part of a rank at its worst moment."""
        return self.memory(self.config, self.shape, setup, micro_batch)

    def need(self, setup: Setup, micro_batch: int) -> int:
        """Return the bytes of all parts."""
        return sum(self.parts(setup, micro_batch).values())

    def fits(self, setup: Setup, micro_batches: tuple[int, ...]) -> bool:
        """Whether these micro-batches fit, each on its rank."""
        return (
            all(rows <= most for rows, most in zip(micro_batches, self.largest(setup), strict=True))
            if setup.stages
            else all(self.need(setup, rows) <= room for rows, room in set(zip(micro_batches, self.room, strict=True)))
        )

    def largest(self, setup: Setup) -> tuple[int, ...]:
        """Return the most rows that fit each rank, or all stages of each pipeline; 0 where not even one does."""
        if setup.stages:
            each = [self.largest_in(self.on(setup, rank), room) for rank, room in enumerate(self.rank_room)]
            return tuple(min(each[start : start + self.group_size]) for start in range(0, len(each), self.group_size))
        known = {room: self.largest_in(setup, room) for room in set(self.room)}
        return tuple(known[room] for room in self.room)

    def largest_in(self, setup: Setup, capacity: int) -> int:
        """Return the most rows that fit: exactly, by bisection, for memory that grows with them in any way."""
        if self.need(setup, 1) > capacity:
            return 0
        # Memory is nearly linear: the answer is near where a line through one row and two arrives.
        low, step = 1, max(1, (capacity - self.need(setup, 1)) // max(1, self.need(setup, 2) - self.need(setup, 1)))
        while low < MOST_ROWS and self.need(setup, low + step) <= capacity:
            low += step
        high = min(low + step, MOST_ROWS + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.need(setup, middle) <= capacity else (low, middle)
        return low

    def longest(self, setup: Setup, micro_batch: int, capacity: int, most: int) -> int:
        """Return the tokens, at most `most`, of the longest rows of which `micro_batch` fit; 0 when none do."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.need(replace(setup, row_tokens=middle), micro_batch) <= capacity:
                low = middle
            else:
                high = middle - 1
        return low

    def require(self, setup: Setup, fitting: tuple[int, ...]) -> None:
        """Raise `DoesNotFitError` with the parts when what was asked for, or not even one row, fits.

        Before the data are known, one row counts as the shortest there can be: its length is not known yet.
        """
        rank, wanted, train = min(range(len(fitting)), key=lambda i: fitting[i]), self.wanted_rows, self.config.train
        room, name = self.room[rank], self.data_devices[rank].name
        if self.launch.early:
            wanted, setup = 1, replace(setup, row_tokens=min(SHORTEST_ROW, setup.row_tokens))
        if (self.largest_in(setup, room) if self.launch.early else fitting[rank]) >= wanted:
            return
        parts = self.parts(setup, wanted)
        listed = ", ".join(f"{n} {size / GIB:.1f}" for n, size in sorted(parts.items(), key=lambda p: -p[1]) if size > GIB / 20)
        what = f"not even one row of {setup.row_tokens} tokens fits"
        if wanted > 1:
            what = f"a micro-batch of {wanted} rows of {setup.row_tokens} tokens does not fit"
            if train.batch_size == "auto" and train.grad_accum != "auto":
                world = len(fitting)
                what += f" (`train.grad_accum` {train.grad_accum} needs it: {global_rows(train, world)} global / "
                what += f"({train.grad_accum} x {plural(world, 'rank' if self.group_size == 1 else 'group')}))"
        needs = f"rank {rank * self.group_size} ({name}) needs {sum(parts.values()) / GIB:.1f} GiB of {room / GIB:.1f} GiB ({listed} GiB)"
        raise DoesNotFitError(f"{what}: {needs}", setup=setup, micro_batch=wanted, parts=parts, capacity_bytes=room)


Decide = Callable[[Request], Plan]


def try_plan(request: Request, changed: Request, decide: Decide) -> Plan | DoesNotFitError | None:
    """Return the changed plan, or how far it is from fitting; `None` where it is refused when it is typed."""
    if {one.message for one in check_rules(changed.config, {})} - {one.message for one in check_rules(request.config, {})}:
        return None
    try:
        return decide(changed)
    except DoesNotFitError as error:
        return error
    except UserError:
        return None


def group_size(launch: LaunchConfig, world: int) -> int:
    """Return how many of `world` ranks train the same rows."""
    return launch.sequence_parallel * launch.tensor_parallel * stages(launch, world)


def stages(launch: LaunchConfig, world: int) -> int:
    """Return how many of `world` ranks make one pipeline; 1 without one."""
    if launch.strategy != "pipeline":
        return 1
    return world if launch.stages == "auto" else launch.stages


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
        notes = f"{self.saving_bytes / GIB:.1f} less"
        if self.slower is not None and abs(self.slower - 1) >= 0.01:
            notes += f", {self.slower - 1:.0%} slower" if self.slower > 1 else f", {1 - self.slower:.0%} faster"
        return f"{self.override}: {self.need_bytes / GIB:.1f} GiB ({notes})" + ("" if self.fits else ", still too much")


class DoesNotFitError(HardwareError):
    """Not even what was asked for, or one row, fits; carries what `make plan` shows."""

    def __init__(
        self, message: str, *, setup: Setup, micro_batch: int, parts: dict[str, int], capacity_bytes: int,
        remedies: tuple[Remedy, ...] = (), notes: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        hint = "; ".join(map(str, remedies[:5])) or "use a smaller model, or more memory"
        super().__init__(message, hint="; ".join([hint, *notes]))
        self.setup, self.micro_batch = setup, micro_batch
        self.parts, self.capacity_bytes, self.remedies, self.notes = parts, capacity_bytes, remedies, notes

    @property
    def need_bytes(self) -> int:
        return sum(self.parts.values())

    def with_remedies(
        self, remedies: tuple[Remedy, ...] = (), *, notes: tuple[str, ...] = (), after: str = ""
    ) -> DoesNotFitError:
        """Return the error with ways to need less and notes added, and `after` at the end of its message."""
        return DoesNotFitError(
            self.message + after, setup=self.setup, micro_batch=self.micro_batch, parts=self.parts, capacity_bytes=self.capacity_bytes,
            remedies=self.remedies + remedies, notes=self.notes + notes,
        )  # fmt: skip
