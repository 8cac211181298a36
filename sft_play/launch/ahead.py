"""A run that is planned here and started elsewhere: by a scheduler, on hardware that `HARDWARE` describes. Starts nothing, writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sft_play.config.call import Call
from sft_play.config.load import LoadedConfig
from sft_play.launch.deepspeed_resolve import checked_plan
from sft_play.launch.options import LaunchOptions, read_options
from sft_play.plan.command import hardware_of, needs_several, plan_for
from sft_play.plan.hardware import Hardware
from sft_play.plan.plan import Plan
from sft_play.plan.shape import shape_of

TARGETS = {"single": "train", "ddp": "train-distributed", "fsdp2": "train-fsdp"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """What is known before the machines are there."""

    loaded: LoadedConfig
    options: LaunchOptions
    hardware: Hardware
    plan: Plan

    @property
    def processes(self) -> int:
        """Ranks on each node."""
        return self.plan.world_size // self.plan.num_nodes

    @property
    def target(self) -> str:
        """The command that trains by this plan, such as `train-distributed`."""
        return TARGETS.get(self.plan.strategy, "train-deepspeed")


def planned_ahead(call: Call) -> Ahead:
    """Returns the configuration and the plan of a call, for `HARDWARE` or else hardware like this machine's. Raises `UserError`."""
    loaded = call.load_config()
    hardware = hardware_of(call)
    options, loaded = read_options(call, loaded, "auto", rehearsal=True)
    request = options.request
    if hardware.nodes > 1 and request.num_nodes == 1 and "NUM_NODES" not in call.options:
        request = replace(request, num_nodes=hardware.nodes)
    if request.command_strategy == "auto" and not needs_several(loaded, hardware, request):
        request = replace(request, command_strategy="single")
    plan = checked_plan(options, loaded.config, shape_of(loaded.config.model), lambda: plan_for(loaded, hardware, request))
    return Ahead(loaded=loaded, options=replace(options, request=request), hardware=hardware, plan=plan)
