"""One attempt of a launch: the run's files are written, and the workers run to their end."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from sft_play.config.load import save_config
from sft_play.files import write_json, write_text
from sft_play.launch.deepspeed import BatchNumbers, deepspeed_settings, resolve
from sft_play.launch.environment import dump_variables
from sft_play.launch.job import Job
from sft_play.launch.local import show_launch, worker_arguments
from sft_play.launch.machines import elsewhere_of
from sft_play.launch.node import remove_abandoned_locks, supervise
from sft_play.launch.resume import launch_facts
from sft_play.launch.run_folder import record_event
from sft_play.launch.settings import accelerate_yaml
from sft_play.launch.verdict import Outcome
from sft_play.plan.plan import Plan
from sft_play.plan.show import show_plan
from sft_play.runs.folder import OWN, RunFolder
from sft_play.runs.stamp import divided


def run_attempt(job: Job, plan: Plan, run: RunFolder, *, event: str | None, checkpoint: Path | None) -> Outcome:
    """Writes the run's files and runs the workers to their end. With an `event`, which is recorded, the plan is shown.

    Of several machines all return how the first of them failed.
    """
    notices = write_launch_files(job, plan, run)
    environment = job.environment(plan)
    own = dump_variables(plan, run.logs, os.environ) | ({OWN: str(job.home(run).path)} if job.shared else {})
    environment = replace(environment, variables={**environment.variables, **own}, set_here={**environment.set_here, **own})
    if plan.strategy.startswith("zero"):
        remove_abandoned_locks(environment.variables)
    arguments = worker_arguments(run, job.node, checkpoint=checkpoint, plan=plan)
    console = sys.stderr if job.call.json else sys.stdout
    launched = show_launch(arguments, environment)
    if event:
        why = job.call.flag("WHY")
        print("\n".join([show_plan(plan, why=why), *([launched] if why else [])]), file=console)
        for notice in (*job.options.notices, *notices, *environment.notices):
            print(f"note: {notice}", file=console)
        print(
            f"run {run.path}" + ("" if why else f"; WHY=1 shows the reasons, {run.plan.name} keeps them") + "\n",
            file=console,
            flush=True,
        )
        record_event(run, event, node_rank=job.node.rank, world_size=plan.world_size, strategy=plan.strategy,
                     steps=plan.steps, batches=divided(plan.ranks),
                     checkpoint=checkpoint.name if checkpoint else None, launch=launch_facts(job.options))  # fmt: skip
    outcome = supervise(
        arguments, environment.variables, run, job.ranks_here(plan), console=console.fileno(), shown=f"{launched}\n",
        elsewhere=elsewhere_of(job, run), **({"share": job.rendezvous.share_standings} if job.rendezvous else {}),
    )  # fmt: skip
    return job.rendezvous.settle(outcome) if job.rendezvous else outcome


def write_launch_files(job: Job, plan: Plan, run: RunFolder) -> list[str]:
    """Writes config.json, plan.json, accelerate.yaml and deepspeed.json; returns notices about the user's DeepSpeed JSON."""
    notices: list[str] = []
    deepspeed: Path | None = None
    if plan.strategy.startswith("zero"):
        hidden_size = job.shape.hidden_size
        if job.options.deepspeed:
            settings, notices = resolve(job.options.deepspeed, plan, job.loaded.config, hidden_size=hidden_size)
        else:
            settings = deepspeed_settings(
                stage=int(plan.strategy[-1]),
                device=plan.device,
                precision=plan.precision,
                batch=BatchNumbers.of(plan),
                clipping=job.loaded.config.train.max_grad_norm,
                offload=plan.offload_optimizer,
                hidden_size=hidden_size,
            )
        deepspeed = run.deepspeed
        write_json(deepspeed, settings)
    if not job.shared:  # node 0's stands there, with its own folders
        save_config(job.loaded, run.config)
    plan.save(run.plan)
    write_text(run.accelerate, accelerate_yaml(plan, job.node, deepspeed_file=deepspeed, fsdp=job.options.fsdp))
    return notices
