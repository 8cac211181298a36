"""`SCALE=1..10`: the same run planned for several numbers of devices or machines. And `PRICE_PER_HOUR`. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sft_play.errors import UserError
from sft_play.plan.hardware import Hardware
from sft_play.plan.nodes import one_each
from sft_play.plan.plan import LaunchRequest, Plan
from sft_play.text import duration, figure

MOST_DEVICES = 4096
MOST_ROWS = 100
PART = re.compile(r"(\d{1,6})(?:\.\.(\d{1,6}))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """One row of the table; `None` where nothing can be forecast, `problem` where nothing fits."""

    count: int
    tokens_per_second: float | None = None
    efficiency: float | None = None
    """Tokens per second over what the first row would give if speed grew with the number."""
    communication_share: float | None = None
    communication_seconds: float | None = None
    """Of a step; known for a stated network even where the devices' speed is not."""
    seconds_per_step: float | None = None
    total_seconds: float | None = None
    cost: float | None = None
    strategy: str | None = None
    problem: str | None = None


def parse_scale(text: str) -> tuple[int, ...]:
    """Return the numbers that `SCALE=1..10`, `1,2,4,8` or a mixture names, rising. Raise `UserError`."""
    found: set[int] = set()
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        low, high = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (0, 0)
        if not 1 <= low <= high <= MOST_DEVICES:
            raise _bad_scale(text)
        found |= set(range(low, high + 1))
        if len(found) > MOST_ROWS:
            raise _bad_scale(text)
    return tuple(sorted(found))


def _bad_scale(text: str) -> UserError:
    return UserError(
        f"`SCALE` is `{text}`; expected rising numbers from 1 to {MOST_DEVICES}, at most {MOST_ROWS} of them",
        hint="SCALE=1..10 or SCALE=1,2,4,8",
    )


def parse_price(text: str) -> float:
    """Return the price of a machine's hour. Raise `UserError` for anything but a number of 0 or more."""
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not (math.isfinite(price) and price >= 0):
        raise UserError(
            f"`PRICE_PER_HOUR` is `{text}`; expected a number such as `2.5`: what one machine costs an hour, in any currency"
        )
    return price


def machines(plan: Plan, hardware: Hardware) -> int:
    """Return how many machines are paid for: each device is one where only a stated network joins those of one node."""
    apart = hardware.network_bytes_per_second is not None and plan.num_nodes == 1 and hardware.nodes == 1
    return plan.world_size if apart else plan.num_nodes


def with_cost(plan: Plan, hardware: Hardware, price: float | None) -> Plan:
    """Return the plan with what all its steps cost at `price` a machine and hour."""
    if price is None or plan.total_seconds is None:
        return plan
    return replace(plan, cost=price * machines(plan, hardware) * plan.total_seconds / 3600)


def counts_nodes(hardware: Hardware, request: LaunchRequest) -> bool:
    """Whether the numbers are of machines like this one, rather than of devices or processes in it."""
    return request.num_nodes > 1 or (hardware.kind == "cpu" and hardware.network_bytes_per_second is not None)


def scaled(hardware: Hardware, request: LaunchRequest, count: int) -> tuple[Hardware, LaunchRequest]:
    """Return hardware and launch with `count` devices (the first ones, and then more of the last), processes or machines."""
    request = replace(request, command_strategy="auto" if request.command_strategy == "single" else request.command_strategy)
    if request.num_nodes > 1 and one_each(hardware, request):  # each more is a machine like the last one
        devices = (*hardware.devices, *[hardware.devices[-1]] * count)[:count]
        nodes = tuple((device,) for device in devices)
        return replace(hardware, devices=devices), replace(request, num_nodes=count, node_devices=nodes if count > 1 else ())
    if counts_nodes(hardware, request):
        return hardware, replace(request, num_nodes=count)
    if hardware.kind == "cpu":
        return hardware, replace(request, num_gpus=count)
    devices = (*hardware.devices, *[hardware.devices[-1]] * count)[:count]
    return replace(hardware, devices=devices, described=True), replace(request, num_gpus=count)


def scale_table(
    plan_with: Callable[[Hardware, LaunchRequest], Plan], hardware: Hardware, request: LaunchRequest, counts: Sequence[int], price: float | None
) -> tuple[Scale, ...]:  # fmt: skip
    """Return a row for each of `counts`, each from a plan of its own."""
    rows: list[Scale] = []
    base: tuple[int, float] | None = None
    for count in counts:
        case, launch = scaled(hardware, request, count)
        try:
            plan = with_cost(plan_with(case, launch), case, price)
        except UserError as error:
            rows.append(Scale(count=count, problem=str(error)))
            continue
        speed = plan.tokens_per_second
        if speed and base is None:
            base = count, speed
        rows.append(
            Scale(
                count=count, tokens_per_second=speed, communication_share=plan.communication_share, strategy=plan.strategy,
                communication_seconds=plan.communication_seconds,
                efficiency=speed / (base[1] * count / base[0]) if speed and base else None,
                seconds_per_step=plan.seconds_per_step, total_seconds=plan.total_seconds, cost=plan.cost,
            )
        )  # fmt: skip
    return tuple(rows)


def scale_json(rows: Sequence[Scale]) -> list[dict[str, Any]]:
    """Return the rows as plain data."""
    return [asdict(row) for row in rows]


def show_scale(rows: Sequence[Scale], hardware: Hardware, request: LaunchRequest, basis: str | None) -> str:
    """Return the table with what its columns mean."""
    unit = "machines" if counts_nodes(hardware, request) else "processes" if hardware.kind == "cpu" else "GPUs"
    priced, timed = any(row.cost is not None for row in rows), any(row.total_seconds is not None for row in rows)
    head = f"  {unit:>9}{'tokens/s':>12}{'efficiency':>12}{'communication':>15}{'s a step':>10}"
    lines = [head + (f"{'in all':>12}" if timed else "") + (f"{'cost':>10}" if priced else "") + "  strategy"]
    for row in rows:
        if row.problem:
            lines.append(f"  {row.count:>9}  does not work: {row.problem}")
            continue
        if row.tokens_per_second is None or row.seconds_per_step is None:
            waits = (
                f"; {figure(row.communication_seconds, 2)} s of each step for communication"
                if row.communication_seconds is not None
                else ""
            )
            lines.append(f"  {row.count:>9}  speed unknown{waits}  {row.strategy}")
            continue
        line = f"  {row.count:>9}{row.tokens_per_second:>12,.0f}{_percent(row.efficiency):>12}{_percent(row.communication_share):>15}"
        line += f"{figure(row.seconds_per_step):>10}"
        line += f"{duration(row.total_seconds):>12}" if row.total_seconds is not None else ""
        line += f"{row.cost:>10.2f}" if row.cost is not None else ""
        lines.append(f"{line}  {row.strategy}")
    lines.append(
        f"  ({basis or 'no forecast'}; efficiency against the first row; the rows of a step are the same for every number)"
    )
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
