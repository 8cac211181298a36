"""The plan of a call without launching: what `make plan` and `make memory-check` show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sft_play.config.load import LoadedConfig
from sft_play.plan.calibration import load_calibration
from sft_play.plan.detect import detect
from sft_play.plan.fit import Memory
from sft_play.plan.hardware import Hardware, parse_hardware
from sft_play.plan.make import make_plan
from sft_play.plan.plan import Plan
from sft_play.plan.request import LaunchRequest
from sft_play.plan.shape import shape_of
from sft_play.plan.sources import Source, planned
from sft_play.runs.prepared import Prepared
from sft_play.runs.prepared_index import lookup

if TYPE_CHECKING:
    from sft_play.config.call import Call


def hardware_of(call: Call) -> Hardware:
    """Returns the hardware that `HARDWARE` describes, else this machine's. Raises `HardwareError`."""
    described = call.options.get("HARDWARE")
    return parse_hardware(described) if described else detect()


def plan_for(
    loaded: LoadedConfig, hardware: Hardware, request: LaunchRequest, prepared: Prepared | None = None, source: Source = "known"
) -> Plan:
    """Returns the plan with what is known of the data: `prepared`, or what an earlier preparation found. Raises `UserError`."""
    config = loaded.config
    known, shape, calibration = prepared or lookup(config), shape_of(config.model), load_calibration(hardware)

    def make(memory: Memory) -> Plan:
        return make_plan(
            config, loaded.typed, hardware, shape, launch=request, prepared=known, calibration=calibration, memory=memory
        )  # fmt: skip

    return planned(make, config, shape, known, source)


def needs_several(loaded: LoadedConfig, hardware: Hardware, request: LaunchRequest) -> bool:
    """Whether a run would be more than one process: several GPUs, or something that was asked for."""
    asked = (request.num_gpus or 1) > 1 or request.num_nodes > 1 or loaded.config.launch.strategy != "auto"
    return asked or (hardware.kind == "cuda" and len(hardware.devices) > 1 and request.num_gpus != 1)
