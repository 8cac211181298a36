"""What each rank of a run that is settled does, needs and costs, and what its machines' network means for a step. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sft_play.config.schema import Config
from sft_play.plan import network, nodes
from sft_play.plan.balance import Cost
from sft_play.plan.batch import Batch, choose_batch, halve
from sft_play.plan.exchange import GATHERING, exchange_seconds
from sft_play.plan.fastest import Rows
from sft_play.plan.fit import MOST_ROWS, Fit
from sft_play.plan.hardware import GIB, Device
from sft_play.plan.memory import Setup
from sft_play.plan.packing import Division, gaining
from sft_play.plan.plan import RankPlan
from sft_play.plan.remedies import Case
from sft_play.plan.rows import rows_data
from sft_play.plan.shape import ModelShape
from sft_play.plan.throughput import Forecast, unequal
from sft_play.plan.unequal import SHARED, fewer_machines, fits, rank_costs, shares_in_words
from sft_play.plan.words import figure, rate_in_words

LONGEST_ROW = 2**22
"""Where the search for the longest row ends, for models that know no limit of positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What is settled before memory is asked."""

    ranks: nodes.Ranks
    backend: str
    rate: float
    setup: Setup
    room: list[int]
    """Bytes that each rank may use."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """Of all ranks."""
        return self.ranks.devices

    @property
    def unit(self) -> str:
        return "device" if self.setup.device == "cuda" else "process"


def most_together(config: Config, division: Division, plain: Batch, rows: Rows) -> int:
    """Returns the largest micro-batch (of rows or packs) to share out by: none larger gains speed, or a forecast found it slower."""
    if division.pack_tokens:
        return max(gaining(division, rows.most), *division.batch.micro_batches)
    if config.train.batch_size != "auto" or config.train.grad_accum != "auto":
        return rows.most
    whole = choose_batch(config.train, rows.fitting, rows.most, rows.unit)
    return rows.most if plain.micro_batches == whole.micro_batches else max(plain.micro_batches)


def costs_of(
    case: Case, fit: Fit, start: Start, division: Division, devices: tuple[Device, ...], most: int
) -> tuple[Cost, ...]:  # fmt: skip
    """Returns what rows cost each rank, in micro-batches of `most` at most; nothing where the speed of one is not known."""
    data = division.data(rows_data(case.config, case.prepared, division.setup))
    found = rank_costs(
        case.config, case.shape, division, case.hardware, devices, data, fits(division.setup, start.room, fit.largest, most),
        nodes=case.launch.num_nodes, calibration=case.calibration,
    )  # fmt: skip
    return found or ()


def rank_plans(case: Case, fit: Fit, start: Start, division: Division, costs: tuple[Cost, ...]) -> tuple[RankPlan, ...]:
    """Returns what each rank does and needs."""
    setup, kind = division.setup, case.hardware.kind
    largest = fits(setup, start.room, fit.largest, MOST_ROWS)
    found = []
    for rank, ((micro, steps), room) in enumerate(zip(division.batch.slots, start.room, strict=True)):
        parts = fit.parts(setup, max(1, micro))
        peak = sum(parts.values())
        found.append(
            RankPlan(
                rank=rank, device="cpu" if kind == "cpu" else f"cuda:{start.ranks.places[rank]}", device_name=start.devices[rank].name,
                micro_batch=micro, accumulation=steps, memory_bytes={**parts, "free": max(0, room - peak)}, peak_bytes=peak,
                capacity_bytes=room, most_rows=max(micro, halve(largest[rank], case.launch.halvings)),
                cost=(costs[rank].fixed_seconds, costs[rank].row_seconds) if costs else (),
            )
        )  # fmt: skip
    return tuple(found)


def longest_row(fit: Fit, setup: Setup, ranks: tuple[RankPlan, ...], shape: ModelShape) -> int:
    """Returns the tokens of the longest rows that the planned micro-batches allow on every rank."""
    kinds = {(rank.micro_batch, rank.capacity_bytes) for rank in ranks}
    most = min(shape.max_positions, LONGEST_ROW)
    padded = replace(setup, layout="unmasked")  # what flattened rows turn into where their mask would not fit
    cases = (setup, padded) if setup.layout == "flattened" and not setup.packed else (setup,)
    return min(max(fit.longest(case, micro, capacity, most) for case in cases) for micro, capacity in kinds)


def tight(ranks: tuple[RankPlan, ...]) -> list[str]:
    """Returns which rank may run short, if any."""
    over = max(ranks, key=lambda rank: rank.peak_bytes - rank.capacity_bytes)
    if over.peak_bytes <= over.capacity_bytes:
        return []
    return [f"rank {over.rank} may run short: {over.peak_bytes / GIB:.1f} of {over.capacity_bytes / GIB:.1f} GiB"]


def waiting(case: Case, setup: Setup, accumulation: int) -> list[str]:
    """Returns what a step sends where the speed of the network was given."""
    speed, world = case.hardware.network_bytes_per_second, setup.world_size
    if speed is None or world == 1:
        return []
    seconds = exchange_seconds(case.config, case.shape, setup, world, accumulation, speed)
    what = "weights and gradients" if setup.strategy in GATHERING else "gradients"
    if case.config.launch.local_steps > 1:
        what = f"trained weights, once in {case.config.launch.local_steps} steps,"
    return [
        f"a step waits {figure(seconds, 2)} s for {what} over the network of {rate_in_words(speed)}, unless computation hides it"
    ]


def computing_seconds(speed: Forecast) -> float | None:
    """Returns the seconds of a step without its exchange, `None` where they are not known."""
    if speed.seconds_per_step is None or speed.communication_seconds is None:
        return None
    return speed.seconds_per_step - speed.communication_seconds


def uneven(
    case: Case, fit: Fit, start: Start, division: Division, ranks: tuple[RankPlan, ...], costs: tuple[Cost, ...], speed: Forecast,
    reasons: list[str],
) -> None:  # fmt: skip
    """Says where ranks wait for a slower one, and when a step would be faster on fewer machines in micro-batches no larger than now."""
    if any(reason.startswith(SHARED) for reason in reasons):
        told = shares_in_words(division, [rank.most_rows for rank in ranks])
        reasons[:] = [told if reason.startswith(SHARED) else reason for reason in reasons]
    else:
        reasons += unequal(speed.rank_seconds, division.shares, [device.name for device in start.devices])
    train, machines = case.config.train, nodes.machines_of(case.hardware, start.ranks)
    typed = train.batch_size != "auto" or train.grad_accum != "auto"
    if machines is None or typed or not costs:
        return

    def beside(steps: int) -> Callable[[tuple[int, ...]], float] | None:
        return nodes.beside_computing(
            case.config, case.shape, division.setup, case.hardware, start.ranks, steps, case.calibration
        )  # fmt: skip

    def around(staying: tuple[int, ...], steps: int) -> float:
        found = beside(steps)
        assert found is not None, "a link is known however many micro-steps there are"
        return found(staying)

    def holding(staying: tuple[int, ...]) -> list[int]:
        if division.setup.strategy == "ddp":
            return [costs[rank].most_rows for rank in staying]
        fewer = replace(division.setup, world_size=len(staying))
        return [fit.largest(fewer, start.room[rank]) for rank in staying]

    if beside(division.batch.accumulation) is not None:
        reasons += fewer_machines(costs, division, machines, around, holding)


def exchanges(case: Case, setup: Setup, speed: Forecast) -> tuple[Any, ...]:
    """Returns what each way to share gradients would cost over a network whose speed was given."""
    link = case.hardware.network_bytes_per_second
    return network.exchanges(case.config, case.shape, setup, setup.world_size, link, computing_seconds(speed))
