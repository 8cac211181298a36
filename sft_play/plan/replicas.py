"""What replicas hold for `launch.compression` and `launch.local_steps`, beside DDP's buckets. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sft_play.config.schema import Config

if TYPE_CHECKING:
    from sft_play.plan.memory import Setup

AVERAGED_AT_A_TIME = 2**24
"""Numbers that local steps average by one message, at most, where a parameter is not larger: 64 MiB."""


def slow_network_bytes(config: Config, setup: Setup, trained: int, width: int) -> float:
    """Returns the bytes on one rank with `trained` weights that train, of `width` bytes each."""
    launch = config.launch
    if setup.strategy != "ddp" or setup.world_size == 1:
        return 0.0
    if launch.local_steps > 1:
        return 8.0 * trained + 8.0 * min(trained, AVERAGED_AT_A_TIME)  # anchor and momentum in fp32; differences on their way
    if launch.compression == "powersgd":
        return 8.0 * trained  # what was not sent yet, and gradients with it
    return 2.0 * trained if launch.compression != "none" and width > 2 else 0.0
