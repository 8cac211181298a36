"""What one launch is: configuration, options, hardware, model and this machine's place, known before a run folder is touched."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from sft_play.config.call import Call
from sft_play.config.load import LoadedConfig
from sft_play.config.metrics import missing
from sft_play.errors import HardwareError, UserError, raise_all
from sft_play.launch import recovery
from sft_play.launch.agreement import NodeFacts
from sft_play.launch.deepspeed import checked_plan
from sft_play.launch.environment import Node, WorkerEnvironment, indices_of, ranks_of, worker_environment
from sft_play.launch.key import key_here
from sft_play.launch.network import address_towards, free_port, loopback_interface, require_free_port
from sft_play.launch.options import LaunchOptions
from sft_play.launch.rendezvous import Rendezvous
from sft_play.plan.calibration import load_calibration, of_all_nodes
from sft_play.plan.commands import explained
from sft_play.plan.detect import detect
from sft_play.plan.fit import Memory
from sft_play.plan.hardware import Hardware
from sft_play.plan.make import make_plan
from sft_play.plan.plan import Plan
from sft_play.plan.request import LaunchRequest
from sft_play.plan.shape import ModelShape, shape_of
from sft_play.plan.sources import parse_source, planned
from sft_play.plan.torch_check import require_usable
from sft_play.runs.folder import RunFolder
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
    rendezvous: Rendezvous | None = None
    """With the launchers of the other machines, from the first hello to the last exit."""
    checkpoint: Path | None = None
    """What this attempt continues from."""
    nodes: tuple[NodeFacts, ...] = ()
    """What the nodes said of themselves, where there are several."""
    shared: bool = False
    """Whether this is a node other than 0 that sees node 0's run folder."""
    apart: bool = False
    """Whether this is a node that does not see node 0's run folder."""

    def environment(self, plan: Plan) -> WorkerEnvironment:
        """Returns the environment of this node's workers."""
        here = self.hardware
        return worker_environment(plan, self.node, os.environ, cpu_threads=here.cpu_threads, devices=here.devices)

    def plan(self, prepared: Prepared | None) -> Plan:
        """The plan, early (`prepared` unknown) or final."""
        config, typed = self.loaded.config, self.loaded.typed
        calibration = of_all_nodes(load_calibration(self.hardware), [node.measured for node in self.nodes])
        request = replace(self.options.request, early=prepared is None)

        def make(memory: Memory) -> Plan:
            return make_plan(
                config, typed, self.hardware, self.shape, launch=request, prepared=prepared, calibration=calibration, memory=memory
            )  # fmt: skip

        source = parse_source(self.call.options.get("SOURCE"), "auto")
        if not prepared and not (self.shape.counted and source == "auto"):
            source = "formula"
        try:
            return planned(make, config, self.shape, prepared, source)
        except HardwareError as error:
            raise explained(self.loaded, self.hardware, error) from None

    def world_size(self, before: Plan) -> int:
        """Returns the processes of all nodes; `before` is the last plan of a run that is resumed."""
        if self.nodes:
            return sum(len(node.devices) for node in self.nodes)
        return (self.options.request.num_gpus or before.world_size // before.num_nodes) * self.options.request.num_nodes

    def ranks_here(self, plan: Plan) -> range:
        """Returns the ranks that this node runs."""
        return ranks_of(plan, self.node)

    def home(self, run: RunFolder) -> RunFolder:
        """Returns where this node keeps its configuration and what it prepares: the run's folder, or its own part of a shared one."""
        return run.of_node(self.node.rank) if self.shared else run

    def again(self, request: LaunchRequest) -> Job:
        """Returns the job of another attempt on the same hardware."""
        return replace(self, options=recovery.without_batch_numbers(replace(self.options, request=request))).elsewhere()

    def elsewhere(self) -> Job:
        """Returns the same job with another port, where it is ours to choose: the old one may not be free again yet."""
        ours = self.rendezvous is None and self.options.master_port is None
        return replace(self, node=replace(self.node, master_port=free_port())) if ours else self


def job_of(call: Call, loaded: LoadedConfig, options: LaunchOptions) -> Job:
    """Returns what a call asks for, on this machine."""
    return Job(
        call=call, loaded=loaded, options=options, hardware=detect(), shape=shape_of(loaded.config.model), node=_node(options)
    )


def refuse_early(job: Job) -> None:
    """Raises what the early plan refuses; not yet for want of devices where other nodes are still to come.

    Torch is asked here whether it can use the GPUs of the plan: before a run folder is made.
    """
    raise_all(missing(job.loaded.config))
    try:
        plan = checked_plan(job.options.deepspeed, job.loaded.config, job.shape, lambda: job.plan(None))
    except HardwareError:
        if job.node.count == 1 or job.nodes:
            raise
        return
    if plan.device == "cuda":
        require_usable(job.hardware, indices_of(plan, job.node), job.environment(plan).variables)


def _node(options: LaunchOptions) -> Node:
    """This machine's place, with a port that is free now. Raises `HardwareError` where a port that was asked for is taken."""
    request, port = options.request, options.master_port
    if request.num_nodes == 1:
        if port:
            require_free_port(port, hint="leave MASTER_PORT away: on one machine a free port is chosen")
        return Node(master_port=port or free_port(), interface=loopback_interface())
    assert options.master_address is not None, "read_options requires MASTER_ADDR for several nodes"
    port = port or 29500
    if ":" in options.master_address:
        raise UserError(
            f"`MASTER_ADDR` is `{options.master_address}`; nodes meet over IPv4 only", hint="give the IPv4 address of node 0"
        )
    if request.node_rank == 0:
        address_towards(options.master_address, port)  # a name that node 0 itself does not know would be told much later
        require_free_port(port, hint="choose another MASTER_PORT, the same on every node")
    # The interface is the one that carries the meeting: what MASTER_ADDR resolves to may be 127.0.1.1 on node 0.
    return Node(
        rank=request.node_rank, count=request.num_nodes, master_address=options.master_address, master_port=port, key=key_here()
    )
