"""A run on several machines goes on with less at a time on all of them when memory ran out on one (contract B10).

The remedy is that of one machine (`launch.recovery`), planned as node 0 will plan it. It stands in the run's events, from which the launchers of
the next start take it (`resume.options_of_run`); all of them train by node 0's plan.
"""

from __future__ import annotations

from dataclasses import replace

from sft_play.cluster.board import plan_of, say
from sft_play.config.call import Call
from sft_play.config.cluster import Inventory
from sft_play.config.load import read_config
from sft_play.errors import UserError
from sft_play.launch import recovery
from sft_play.launch.environment import Node
from sft_play.launch.job import Job
from sft_play.launch.resume import launch_facts, newest_told, options_of_run, without_checkpoints
from sft_play.launch.run_folder import record_event
from sft_play.launch.verdict import Outcome
from sft_play.plan.detect import cpu_only, detect
from sft_play.plan.nodes import devices_of
from sft_play.plan.plan import Plan
from sft_play.plan.shape import shape_of
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared

TYPED_HERE = (
    ("make train-fsdp LAUNCH_STRATEGY=", "LAUNCH_STRATEGY="),
    ("make train-fsdp", "LAUNCH_STRATEGY=fsdp2"),
    ("make train-deepspeed DEEPSPEED_CONFIG=", "a new run with DEEPSPEED_CONFIG="),
)
"""Commands of one machine among the ways out -> what is typed with `make train-cluster` for the same."""


def with_less(run: RunFolder, inventory: Inventory, prepared: Prepared, outcome: Outcome, retries: int) -> Outcome | None:
    """Says and records with how much less the run goes on; where it does not, returns how it ends and what could be changed.

    `retries`: how often this command has done so before.
    """
    before = plan_of(run)
    if before is None:
        return outcome
    checkpoint, damaged = newest_told(run)
    if ended := without_checkpoints(run, outcome, checkpoint, damaged):
        return ended
    try:
        job = last_job(run, inventory, before)
        found = recovery.remedy(job.loaded.config, job.shape, before, job.options.request, outcome, retries)
        if isinstance(found, recovery.Refusal):
            return recovery.refused(outcome, replace(found, hint=_typed_here(found.hint)))
        job = job.again(found)
        after = job.plan(prepared)
    except UserError as error:
        return Outcome(code=error.exit_code, message=f"{error.render()}\n\nwhy it had ended: {outcome.message.strip()}")
    say("\n" + recovery.announcement(job.loaded.config, before, after, outcome, checkpoint, retries + 1))
    record_event(run, recovery.EVENT, launch=launch_facts(job.options), **recovery.facts(before, after, outcome, checkpoint))
    return None


def last_job(run: RunFolder, inventory: Inventory, before: Plan) -> Job:
    """Returns what node 0 was started with last: the run's own configuration, with the devices of all machines as they were planned for.

    Raises `UserError`.
    """
    nodes = before.num_nodes
    place = {"NODE_RANK": "0", "MASTER_ADDR": inventory.master.address} if nodes > 1 else {}
    call = Call(command="resume", options={"RUN": run.name, "NUM_NODES": str(nodes), **place})
    options = options_of_run(call, run, before)
    request = replace(options.request, node_devices=devices_of(before) if nodes > 1 else ())
    loaded = read_config(run.config)
    return Job(
        call=call, loaded=loaded, options=replace(options, request=request), hardware=cpu_only() if before.device == "cpu" else detect(),
        shape=shape_of(loaded.config.model), node=Node(count=nodes, master_address=inventory.master.address),
    )  # fmt: skip


def _typed_here(hint: str) -> str:
    for there, here in TYPED_HERE:
        hint = hint.replace(there, here)
    return hint
