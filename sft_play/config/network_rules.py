"""Rules between the keys of slow networks (`launch.compression`, `launch.local_steps`). As those of `config.rules`: no effects."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config
from sft_play.errors import UserError

SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*[GM]bit(?:/s)?", re.IGNORECASE)
"""As `plan.hardware` reads it."""
REPLICAS = ("auto", "ddp")
"""Strategies under which every rank holds all weights that train."""


def network_keys(config: Config) -> list[tuple[str, str]]:
    """Returns the keys that change what replicas send each other, each with its value in words, and only those that are not as usual."""
    launch = config.launch
    found = [("launch.compression", f"`{launch.compression}`")] if launch.compression != "none" else []
    return found + ([("launch.local_steps", str(launch.local_steps))] if launch.local_steps > 1 else [])


def replicas_only(config: Config, origins: Origins) -> Iterator[UserError]:
    """ZeRO and FSDP2 send parts of weights and states by operations of their own."""
    if config.launch.strategy in REPLICAS:
        return
    for key, value in network_keys(config):
        yield problem(
            origins, key, f"`{key}` is {value}, but `launch.strategy: {config.launch.strategy}` exchanges in a way of its own",
            f"set `launch.strategy: ddp`, or leave `{key}` out",
        )  # fmt: skip


def together(config: Config, origins: Origins) -> Iterator[UserError]:
    """What local steps and PowerSGD cannot be combined with."""
    launch = config.launch
    if launch.local_steps > 1 and launch.compression == "powersgd":
        yield problem(
            origins, "launch.compression", f"`launch.compression` is `powersgd`, but with `launch.local_steps: {launch.local_steps}` no "
            "gradients are sent", "take `fp16` or `bf16`, which narrow the averages too, or `launch.local_steps: 1`",
        )  # fmt: skip
    if not config.train.fp16:
        return
    if launch.local_steps > 1:
        yield problem(
            origins, "launch.local_steps", f"`launch.local_steps` is {launch.local_steps}, but with `train.fp16` each rank would leave out "
            "other steps and scale its loss otherwise", "set `train.bf16: true` instead of fp16, or `launch.local_steps: 1`",
        )  # fmt: skip
    if launch.compression == "powersgd":
        yield problem(
            origins, "launch.compression", "`launch.compression` is `powersgd`, but with `train.fp16` gradients overflow now and then, and "
            "PowerSGD would carry that into every later step", "set `train.bf16: true` instead of fp16, or `launch.compression: fp16`",
        )  # fmt: skip


def speed(config: Config, origins: Origins) -> Iterator[UserError]:
    """A speed of the network that the plan could not read."""
    text = config.launch.network
    match = SPEED.fullmatch(text.strip()) if text is not None else None
    if text is not None and not (match and float(match.group(1)) > 0):
        yield problem(
            origins,
            "launch.network",
            f"`launch.network` is `{text}`; expected a speed such as `1Gbit`",
            "LAUNCH_NETWORK=1Gbit, or 250Mbit",
        )


RULES = (replicas_only, together, speed)
