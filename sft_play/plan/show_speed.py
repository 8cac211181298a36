"""The forecast as people read it: speed, time, communication, energy and money."""

from __future__ import annotations

import json
import os
from typing import Any

from sft_play.files import read_json
from sft_play.plan.hardware import GIB
from sft_play.plan.plan import Plan
from sft_play.plan.words import figure
from sft_play.runs.folder import RunFolder

CARDS = "unknown for these devices until they have trained (`make bench` measures them)"
NAME_CARDS = "to forecast it, name the cards (HARDWARE=2xRTX4090), or give `bf16_tflops` and `bandwidth_gb_s` in a hardware file"


def show_speed(plan: Plan) -> list[str]:
    """Returns what a run is expected to take, the most asked first; one line where nothing is known."""
    if plan.tokens_per_second is None or plan.seconds_per_step is None:
        return [*_missing(plan), *_exchange(plan)]
    first = f"about {plan.tokens_per_second:,.0f} tokens/s ({plan.speed_basis or 'a prior, not measured here'})"
    first += f", {figure(plan.seconds_per_step)} s a step"
    if plan.mfu is not None:
        first += f", MFU {plan.mfu:.0%}"
    return [first, *_times(plan), *_communication(plan), *_price(plan)]


def _missing(plan: Plan) -> list[str]:
    """Returns which of the two is not known, the devices' speed or the network's, and how to tell it."""
    lines = [] if all(rank.cost for rank in plan.ranks) else [CARDS, NAME_CARDS]
    if plan.num_nodes > 1 and plan.communication_seconds is None:
        speed = "100Gbit" if plan.device == "cuda" else "1Gbit"
        lines.append("unknown for the network between the nodes")
        lines.append(f"to forecast it, name the network: LAUNCH_NETWORK={speed} (`launch.network`), or HARDWARE=...@{speed}")
    return lines or [CARDS]


def _exchange(plan: Plan) -> list[str]:
    """Returns what a stated network costs where the devices' speed is not known."""
    if plan.communication_seconds is None:
        return []
    return [f"{figure(plan.communication_seconds, 2)} s of each step go into communication, unless computation hides it"]


def _times(plan: Plan) -> list[str]:
    found = []
    if plan.total_seconds is not None:
        found.append(f"{duration(plan.total_seconds)} in all")
    if plan.epoch_seconds is not None:
        found.append(f"{duration(plan.epoch_seconds)} an epoch")
    return [", ".join(found) + ", without loading, evaluation and saving"] if found else []


def _communication(plan: Plan) -> list[str]:
    if not plan.communication_share or plan.communication_seconds is None:
        return []
    share = f"{plan.communication_share:.0%}" if plan.communication_share >= 0.01 else "under 1 %"
    return [f"{share} of it communication: {figure(plan.communication_seconds, 2)} s of each step, unless computation hides it"]


def _price(plan: Plan) -> list[str]:
    found = []
    if plan.energy_kwh is not None:
        found.append(f"at most {figure(plan.energy_kwh)} kWh by the GPUs at their power limits")
    if plan.cost is not None:
        found.append(f"costs {plan.cost:.2f} at PRICE_PER_HOUR")
    return ["; ".join(found)] if found else []


def duration(seconds: float) -> str:
    """Returns a time in the largest unit that leaves a readable number."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


MOST_CHANGE = 3.0
"""A share beyond which two figures speak for themselves."""


def beside_forecast(run: RunFolder) -> str:
    """Returns lines with speed, time and memory of a finished run beside what its plan had said; none where nothing was kept."""
    try:
        measured = read_json(run.training_metrics)
        forecast = measured["forecast"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError):  # not rank 0's machine, or a run of an earlier version
        return ""
    rows = [
        ("speed", "tokens_per_second", lambda value: f"{value:,.0f} tokens/s"),
        ("time", "training_seconds", duration),
        ("memory", "peak_memory_bytes", lambda value: f"{value / GIB:.2f} GiB"),
    ]
    lines = [
        f"  {label:<9}{_pair(measured.get(key), forecast.get(key), write)}" for label, key, write in rows if measured.get(key)
    ]
    if lines and measured.get("peak_memory_bytes") and forecast.get("peak_memory_bytes"):
        lines[-1] += " for a micro-batch of the longest rows"
    speed, expected = measured.get("tokens_per_second"), forecast.get("tokens_per_second")
    if speed and expected and abs(speed / expected - 1) > UNEXPLAINED:
        lines.append(f"           {_cause(measured.get('training_seconds'), forecast.get('basis'))}")
    return "".join(f"{line}\n" for line in lines)


UNEXPLAINED, SHORT_SECONDS = 0.5, 60
"""Share of the forecast beyond which a measured speed needs a cause; a run in which start-up (first steps, first saves) still counts."""


def _cause(seconds: float | None, basis: str | None) -> str:
    """Returns what may have made the speed another than the forecast's, by what is known when the run has ended."""
    found = [] if basis and not basis.startswith("a prior") else ["this machine's speed was a guess (`make bench` measures it)"]
    if seconds and seconds < SHORT_SECONDS:
        found.append("start-up counts in so short a run")
    if os.getloadavg()[0] > (os.cpu_count() or 1) + 1:
        found.append("other processes use these cores")
    return "unlike the forecast: " + (", and ".join(found) or "`make bench` measures this machine anew")


def _pair(measured: float, forecast: float | None, write: Any) -> str:
    if not forecast:
        return str(write(measured))
    change = f" ({measured / forecast - 1:+.0%})" if abs(measured / forecast - 1) < MOST_CHANGE else ""
    return f"{write(measured)}, forecast {write(forecast)}{change}"
