"""The command line that starts a run's workers on this machine, and how it is shown."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sft_play.launch.environment import Node, WorkerEnvironment, ranks_of
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder


def worker_arguments(
    run: RunFolder, node: Node, *, checkpoint: Path | None = None, module: str = "sft_play.train", plan: Plan | None = None
) -> list[str]:
    """Returns argv: `accelerate launch` by this Python (so that it is this environment's) with the run's own config file.

    `plan` is needed where nodes have unequal numbers of ranks.
    """
    arguments = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(run.accelerate)]
    if node.count > 1:
        # Every node has the same accelerate.yaml, perhaps on one network disk; only its own rank differs.
        arguments += ["--machine_rank", str(node.rank if node.place is None else node.place)]
    if plan and len(set(plan.node_ranks)) > 1:
        # accelerate starts num_processes // num_machines processes here, and knows no other way to say how many; the world is the sum
        # over all nodes, which the agents of torchrun tell each other. The environment is that of a launch with equal numbers.
        arguments += ["--num_processes", str(len(ranks_of(plan, node)) * node.count)]
    arguments += ["--monitor_interval", "0.5", "--max_restarts", "0", "-m", module, "--run", str(run.path)]
    return arguments + (["--resume", str(checkpoint)] if checkpoint else [])


def show_launch(arguments: Sequence[str], environment: WorkerEnvironment) -> str:
    """Returns the block that says what is started, with which variables, in a form that can be typed by hand."""
    lines = ["launch", f"  {shlex.join(['accelerate', 'launch', *arguments[3:]])}"]
    lines += [f"  {name}={shlex.quote(value)}" for name, value in sorted(environment.set_here.items())]
    lines += [f"  {name}={value}  (yours)" for name, value in environment.inherited.items()]
    lines += [f"  because of {note}" for note in environment.notes]
    return "\n".join(lines)
