"""What each way to share gradients costs on the network between ranks, and which strategies that network does not carry. Pure.

An all-reduce around a ring takes 2(N-1)/N x bytes / bandwidth: of 33.6 MB (8.4 million fp32 adapter weights) on 3 ranks at 1 Gbit/s
0.38 s, of 1.6 GB 18 s. Gathering weights takes (N-1)/N x bytes / bandwidth in each pass: of a frozen bf16 7B model 153 s a micro-step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sft_play.config.rules import network_keys
from sft_play.config.schema import Config
from sft_play.errors import UserError
from sft_play.plan.backends import may_quantise
from sft_play.plan.exchange import GATHERING, communication_seconds, compressed_bytes, gathering_seconds, local_bytes
from sft_play.plan.fit import Fit
from sft_play.plan.hardware import Hardware
from sft_play.plan.memory import Setup, trained_bytes
from sft_play.plan.shape import ModelShape
from sft_play.plan.strategies import SLOW_NETWORK, gathering_arithmetic
from sft_play.plan.words import figure, rate_in_words

EXAMPLE_LOCAL_STEPS = 16
"""What the table shows where `launch.local_steps` is 1."""
MOST_GATHERING = 0.5
"""Share of a step beyond which waiting for weights is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One way to share what was learned in a step."""

    choice: str
    """What to type: `compression: fp16`, `local_steps: 16`, `compression: none`."""
    chosen: bool
    bytes: float
    """Of an optimizer step, that the ranks have to agree on."""
    seconds: float
    """Of an optimizer step, on the slowest link."""
    share: float | None
    """Of a step, unless computation hides it; `None` where the devices' speed is not known."""


def exchanges(
    config: Config, shape: ModelShape, setup: Setup, ranks: int, bytes_per_second: float | None, computing_seconds: float | None
) -> tuple[Mapping[str, Any], ...]:  # fmt: skip
    """Returns every choice under DDP, as plain data; nothing elsewhere, or where the link's speed is not known."""
    if setup.strategy != "ddp" or ranks < 2 or not bytes_per_second:
        return ()
    launch, width = config.launch, trained_bytes(config, setup)
    local = launch.local_steps if launch.local_steps > 1 else EXAMPLE_LOCAL_STEPS
    plain = launch.local_steps == 1

    def row(name: str, sent: float, *, chosen: bool) -> Mapping[str, Any]:
        seconds = communication_seconds(sent, ranks, bytes_per_second)
        share = None if computing_seconds is None else seconds / (seconds + computing_seconds)
        return asdict(Exchange(choice=name, chosen=chosen, bytes=sent, seconds=seconds, share=share))

    kinds = {
        "none": f"compression: none ({'fp32' if width == 4 else '16 bits'})",
        "fp16": "compression: fp16",
        "bf16": "compression: bf16",
        "powersgd": f"compression: powersgd, rank {launch.powersgd_rank}",
    }
    rows = [
        row(name, compressed_bytes(config, shape, width, kind, launch.powersgd_rank), chosen=plain and launch.compression == kind)
        for kind, name in kinds.items()
    ]
    return (*rows, row(f"local_steps: {local}", local_bytes(config, shape, local), chosen=not plain))


def show_exchanges(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the table of `exchanges`."""
    if not rows:
        return []
    timed = any(row["share"] is not None for row in rows)
    lines = [f"  {'to share a step, without latency':<34}{'MB':>10}{'s a step':>10}" + (f"{'of it':>8}" if timed else "")]
    for row in rows:
        share = f"{row['share']:>8.1%}" if row["share"] is not None else ""
        mark = "  <- this run" if row["chosen"] else ""
        lines.append(f"  {row['choice']:<34}{figure(row['bytes'] / 1e6):>10}{figure(row['seconds'], 2):>10}{share}{mark}")
    return lines


def without_effect(config: Config, setup: Setup) -> list[str]:
    """Returns what the keys of slow networks come to with one process; where ranks share out states, `strategies` refuses them."""
    if setup.world_size > 1:
        return []
    return [f"`{key}` {value} has no effect: one process shares nothing" for key, value in network_keys(config)]


def check_precision(config: Config, setup: Setup) -> None:
    """Raises `UserError` for PowerSGD and local steps where the plan computes in fp16 with a loss scaler, whoever chose that.

    Gradients that overflow would stay in PowerSGD's error feedback for good; with local steps each rank would scale its loss by itself.
    `config.rules` says the same of a typed `train.fp16` before any hardware is looked at.
    """
    launch = config.launch
    if setup.precision != "fp16" or setup.world_size == 1:
        return
    exact = "cards with bf16, or TRAIN_BF16=false to compute in fp32 (slower, more memory)"
    if launch.local_steps > 1:
        raise UserError(
            f"`launch.local_steps` is {launch.local_steps}, but these cards compute in fp16, where each rank would leave out other steps",
            hint=f"LAUNCH_LOCAL_STEPS=1 LAUNCH_COMPRESSION=fp16 halves what travels; or {exact}",
        )
    if launch.compression == "powersgd":
        raise UserError(
            "`launch.compression` is `powersgd`, but these cards compute in fp16, where a gradient that overflows would stay in every later step",
            hint=f"LAUNCH_COMPRESSION=fp16 halves what travels; or {exact}",
        )


def check_gathering(
    fit: Fit, setup: Setup, hardware: Hardware, accumulation: int, computing_seconds: float | None
) -> None:  # fmt: skip
    """Raises `UserError` for shared-out weights over a stated network on which waiting for them takes most of a step.

    `computing_seconds` is the forecast of a step's computing, with the speed of typical cards where theirs is not known.
    `launch.slow_network: allow` lets it pass.
    """
    speed, config = hardware.network_bytes_per_second, fit.config
    slow = speed is not None and speed < SLOW_NETWORK  # a fast one hides behind computing what it takes
    if setup.strategy not in GATHERING or not speed or not slow or setup.world_size == 1 or config.launch.slow_network == "allow":
        return
    waits = accumulation * gathering_seconds(config, fit.shape, setup, setup.world_size, speed)
    if computing_seconds is None or waits <= MOST_GATHERING * (waits + computing_seconds):
        return
    share = waits / (waits + computing_seconds)
    smaller = "TUNING_MODE=qlora, " if may_quantise(config) else ""
    raise UserError(
        f"{setup.strategy} over a network of {rate_in_words(speed)} would wait for weights {share:.0%} of each step: "
        f"{gathering_arithmetic(fit, setup, hardware)}, {figure(waits)} s in the {accumulation} of a step",
        hint=f"replicas send gradients alone: LAUNCH_STRATEGY=ddp (make train-distributed); {smaller}shorter rows or a smaller model make "
        "them fit; LAUNCH_SLOW_NETWORK=allow runs it all the same",
    )
