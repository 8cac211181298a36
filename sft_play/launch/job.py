"""What one launch is: configuration, options, hardware, model and this machine's place, known before a run folder is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sft_play.config.call import Call
from sft_play.config.load import LoadedConfig
from sft_play.launch import recovery
from sft_play.launch.environment import Node
from sft_play.launch.network import address_towards, free_port, interface_of, loopback_interface, require_free_port
from sft_play.launch.options import LaunchOptions
from sft_play.plan.calibration import load_calibration
from sft_play.plan.detect import detect
from sft_play.plan.fit import Memory
from sft_play.plan.hardware import Hardware
from sft_play.plan.make import make_plan
from sft_play.plan.plan import Plan
from sft_play.plan.request import LaunchRequest
from sft_play.plan.shape import ModelShape, shape_of
from sft_play.plan.sources import parse_source, planned
from sft_play.runs.prepared import Prepared


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything that is known before a run folder is touched."""

    call: Call
    loaded: LoadedConfig
    options: LaunchOptions
    hardware: Hardware
    shape: ModelShape
    node: Node

    def plan(self, prepared: Prepared | None) -> Plan:
        """The plan, early (`prepared` unknown) or final."""
        config, typed, calibration = self.loaded.config, self.loaded.typed, load_calibration(self.hardware)
        request = replace(self.options.request, early=prepared is None)

        def make(memory: Memory) -> Plan:
            return make_plan(
                config, typed, self.hardware, self.shape, launch=request, prepared=prepared, calibration=calibration, memory=memory
            )  # fmt: skip

        source = parse_source(self.call.options.get("SOURCE"), "auto")
        return planned(make, config, self.shape, prepared, source if prepared else "formula")

    def ranks_here(self, plan: Plan) -> range:
        """Returns the ranks that this node runs."""
        local = plan.world_size // plan.num_nodes
        return range(self.node.rank * local, (self.node.rank + 1) * local)

    def again(self, request: LaunchRequest) -> Job:
        """Returns the job of another attempt on the same hardware."""
        return replace(self, options=recovery.without_batch_numbers(replace(self.options, request=request))).elsewhere()

    def elsewhere(self) -> Job:
        """Returns the same job with another port, where it is ours to choose: the old one may not be free again yet."""
        ours = self.node.count == 1 and self.options.master_port is None
        return replace(self, node=replace(self.node, master_port=free_port())) if ours else self


def job_of(call: Call, loaded: LoadedConfig, options: LaunchOptions) -> Job:
    """Returns what a call asks for, on this machine."""
    return Job(
        call=call, loaded=loaded, options=options, hardware=detect(), shape=shape_of(loaded.config.model), node=_node(options)
    )


def _node(options: LaunchOptions) -> Node:
    """This machine's place, with a port that is free now. Raises `HardwareError` where a port that was asked for is taken."""
    request, port = options.request, options.master_port
    if request.num_nodes == 1:
        if port:
            require_free_port(port, hint="leave MASTER_PORT away: on one machine a free port is chosen")
        return Node(master_port=port or free_port(), interface=loopback_interface())
    assert options.master_address is not None, "read_options requires MASTER_ADDR for several nodes"
    port = port or 29500
    if request.node_rank == 0:
        require_free_port(port, hint="choose another MASTER_PORT, the same on every node")
    return Node(
        rank=request.node_rank,
        count=request.num_nodes,
        master_address=options.master_address,
        master_port=port,
        interface=interface_of(address_towards(options.master_address, port)),
    )
