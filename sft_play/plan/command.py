"""`make plan`: everything about a run before it, for this machine or for a described one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sft_play.plan.detect import detect
from sft_play.plan.hardware import parse_hardware
from sft_play.plan.make import make_plan
from sft_play.plan.plan import Plan
from sft_play.plan.request import LaunchRequest
from sft_play.plan.shape import shape_of
from sft_play.plan.show import show_plan
from sft_play.runs.prepared_index import lookup

if TYPE_CHECKING:
    from sft_play.config.call import Call


def main(call: Call) -> int:
    """Prints the plan and returns 0."""
    plan = plan_for(call)
    print(json.dumps(plan.to_json(), indent=2) if call.json else show_plan(plan, details=True))
    return 0


def plan_for(call: Call) -> Plan:
    """Returns the plan of a call. Raises `UserError`."""
    loaded = call.load_config()
    config = loaded.config
    described = call.options.get("HARDWARE")
    hardware = parse_hardware(described) if described else detect()
    asked = call.integer("NUM_GPUS", minimum=1)
    wanted = config.launch.strategy
    several = (hardware.kind == "cuda" and len(hardware.devices) > 1) or (asked or 1) > 1 or wanted != "auto"
    request = LaunchRequest(
        command_strategy="auto" if several else "single", num_gpus=asked, num_nodes=call.integer("NUM_NODES", minimum=1) or 1
    )
    return make_plan(config, loaded.typed, hardware, shape_of(config.model), launch=request, prepared=lookup(config))
