"""`launch.auto_resume`: the command that starts a run goes on with it when it exists, by the same checks as `make resume`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from sft_play.config.call import Call, Override
from sft_play.config.load import DEFAULT, LoadedConfig, override_config, read_config
from sft_play.config.show import flatten
from sft_play.errors import UserError
from sft_play.launch.options import COMMAND_FOR, LaunchOptions
from sft_play.launch.resume import BY_RESUME, LONGER, launch_facts, steps_asked
from sft_play.launch.run_folder import NEEDED, first_launch, has_started, last_launch, last_plan, without_config
from sft_play.runs.folder import RunFolder, runs_folder

OF_A_START = frozenset({"CONFIG", "RUN_NAME", "ACCELERATE_CONFIG", "DEEPSPEED_CONFIG"})
"""Options of a first start: what they led to is compared with what the run was started with."""
OF_REPLICAS = frozenset({"single", "ddp", "auto"})
"""What commands stand for whose processes each hold a whole model, however many they are."""


def existing_run(options: LaunchOptions, loaded: LoadedConfig) -> RunFolder | None:
    """Returns the run to go on with; `None` where a new one is to be started, in a folder that was only reserved too.

    Raises `UserError` without `RUN_NAME`: a name made of the time would be another one each time; `CheckpointError` for a run without its
    configuration.
    """
    if not loaded.config.launch.auto_resume:
        return None
    if options.run_name is None:
        raise UserError(
            "`launch.auto_resume` needs `RUN_NAME`: by it the same command finds its run again",
            place=loaded.origins.get("launch.auto_resume"),
            hint="add RUN_NAME=NAME to the command",
        )
    run = RunFolder(runs_folder() / options.run_name)
    if not run.path.is_dir() or not has_started(run):
        return None
    if not run.config.is_file():
        raise without_config(run)
    return run


def as_long(loaded: LoadedConfig, run: RunFolder) -> LoadedConfig:
    """Returns the configuration with the run's own length where that is greater: `make resume` has made the run longer since."""
    plan = last_plan(run)
    if steps_asked(loaded.config, plan) >= (plan.steps or 0):
        return loaded
    own = read_config(run.config)
    print(f"note: `{run.name}` keeps its {plan.steps} steps; `make resume` changes them", file=sys.stderr)
    flat = flatten(own)
    return override_config(
        loaded, [Override(key=key, text=str(flat[key]), origin=own.origins.get(key, DEFAULT)) for key in sorted(LONGER)]
    )


def as_resume(call: Call, options: LaunchOptions, loaded: LoadedConfig, run: RunFolder) -> Call:
    """Returns the call of `make resume` that this start amounts to: keys that differ from the run's own are its overrides.

    The number of nodes and of processes may be another than before. Raises `UserError` where the run was launched in another way.
    """
    first, mine, request = first_launch(run, needed=NEEDED), launch_facts(options), options.request
    if not _same_command(first["command"], mine["command"], given=request.num_gpus is not None):
        raise UserError(
            f"the run `{run.name}` was started by {COMMAND_FOR[first['command']]}, not by {COMMAND_FOR[mine['command']]}",
            hint=f"type the same command, or: make resume RUN={run.name}",
        )
    for name in ("deepspeed", "fsdp"):
        if json.dumps(first[name], sort_keys=True) != json.dumps(mine[name], sort_keys=True):
            raise UserError(
                f"the run `{run.name}` was started with other launch settings (`{name}`)",
                hint=f"type the same command, or: make resume RUN={run.name}",
            )
    if (nodes := last_launch(run, request.node_rank)["num_nodes"]) != request.num_nodes:
        print(
            f"note: `{run.name}` ran on {nodes} node{'s' if nodes > 1 else ''}, and goes on with {request.num_nodes}",
            file=sys.stderr,
        )
    given = {name: text for name, text in call.options.items() if name not in OF_A_START}
    given |= {"RUN": str(run.path)}
    places = {
        "NUM_GPUS": 1 if mine["command"] == "single" else request.num_gpus,
        "NUM_NODES": request.num_nodes,
        "NODE_RANK": request.node_rank if request.num_nodes > 1 else None,
        "MASTER_ADDR": options.master_address,
        "MASTER_PORT": options.master_port,
    }
    given |= {name: str(value) for name, value in places.items() if value is not None}
    return replace(call, command="resume", options=given, overrides=tuple(changes(read_config(run.config), loaded)))


def _same_command(first: str, now: str, *, given: bool) -> bool:
    """Whether a command goes on with what another began: `make train` and `make train-distributed` differ by the number of processes only.

    `given`: whether `NUM_GPUS` says how many there are to be now.
    """
    return first == now or ({first, now} <= OF_REPLICAS and (now == "single" or given))


def changes(old: LoadedConfig, new: LoadedConfig) -> list[Override]:
    """Returns the keys whose values differ, as overrides with the place where the new value was written.

    What a resume on another number of processes computed anew (`resume.with_its_batch`) is no wish to change it back, as long as the
    command says what it said before.
    """
    before, after = flatten(old), flatten(new)
    return [
        Override(key=key, text=value if isinstance(value, str) else json.dumps(value), origin=new.origins.get(key, "default"))
        for key, value in after.items()
        if (key not in before or before[key] != value) and old.origins.get(key) != BY_RESUME + json.dumps(value)
    ]
