"""What a command asks of the plan beside the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sft_play.plan.hardware import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """The launch as the user typed it; what is `None` is for the plan to decide."""

    command_strategy: Literal["single", "ddp", "zero", "fsdp2", "auto"] = "single"
    """What the command stands for: `make train` is `single`, `make train-distributed` is `auto`."""
    num_gpus: int | None = None
    """Processes on this machine."""
    num_nodes: int = 1
    node_rank: int = 0
    node_devices: tuple[tuple[Device, ...], ...] = ()
    """The devices of every node's ranks, in the order of the nodes; empty when nodes have not met: then each has those of this one."""
    zero_stage: int | None = None
    """Stage of a user's own DeepSpeed JSON."""
    offload_optimizer: bool = False
    """Whether that JSON keeps optimizer states and gradients in the machine's memory."""
    offload_parameters: bool = False
    """Whether that JSON keeps the weights there too (stage 3)."""
    early: bool = False
    """Whether the data are still to be prepared: then only what no data could change is refused for want of memory."""
    halvings: int = 0
    """How often the micro-batch was halved because memory ran out."""
    force_checkpointing: bool = False
    """Whether activations are recomputed because memory ran out at a micro-batch of 1; a typed `false` still counts."""
    unpack: bool = False
    """Whether rows stay unpacked because memory ran out with one pack; a typed `on` still counts."""


COMMANDS: Mapping[str, str] = {
    "single": "train", "ddp": "train-distributed", "auto": "train-distributed", "fsdp2": "train-fsdp", "zero": "train-deepspeed",
}  # fmt: skip
"""What a command stands for -> its name."""


def command_of(strategy: str) -> str:
    """Returns the command that trains by a strategy, such as `train-distributed`."""
    return COMMANDS["zero" if strategy.startswith("zero") else strategy]
