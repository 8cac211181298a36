"""What a run takes of a machine's own memory beside its GPUs: what DeepSpeed offloads, and weights on their way. Pure."""

from __future__ import annotations

from dataclasses import replace

from sft_play.config.schema import Config
from sft_play.plan.memory import CONTEXT_BYTES, frozen_bytes, states_bytes
from sft_play.plan.plan import Setup
from sft_play.plan.shape import ModelShape


def host_bytes(config: Config, shape: ModelShape, setup: Setup) -> int:
    """Return what DeepSpeed keeps in the machine's memory for one rank instead of on its GPU."""
    if not (setup.offload_optimizer or setup.offload_parameters) or not setup.zero or setup.device != "cuda":
        return 0
    whole = states_bytes(config, shape, replace(setup, offload_optimizer=False, offload_parameters=False))
    left = states_bytes(config, shape, setup)
    return int(sum(whole.values()) - sum(left.values()))


def loading_host_bytes(config: Config, shape: ModelShape, setup: Setup, processes: int) -> int:
    """Return the bytes of a machine's memory that its processes take while they load, beside files that are mapped.

    Under FSDP2 each process makes what trains fp32 there, or quantises a base there, before it is shared out. Frozen weights in the type
    of their file stay in the file's pages (2 of 237 MiB, measured with /proc/self/smaps_rollup); other strategies read onto the card.
    """
    if setup.device != "cuda" or setup.strategy != "fsdp2" or shape.quantized_bits or config.tuning.mode == "lora":
        return 0
    full = config.tuning.mode == "full"
    weights = 4.0 * shape.parameters if full else sum(frozen_bytes(config, shape, setup))
    return int(processes * (weights + CONTEXT_BYTES["cpu"]))
