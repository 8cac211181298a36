"""Resuming a run (`make resume`, `launch.auto_resume`): its last launch, its newest valid checkpoint, and what may
differ.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.layers import Override
from sft_play.config.load import LoadedConfig, flatten, read_config
from sft_play.config.schema import Config, needs_own_word
from sft_play.errors import CheckpointError, UserError, raise_all
from sft_play.files import read_json_lines, write_bytes
from sft_play.launch.deepspeed import settings_from_run
from sft_play.launch.job import LaunchOptions, check_place, leave_gpus, set_train, without_batch_numbers
from sft_play.launch.recovery import LESS, remedies_so_far
from sft_play.launch.run_folder import cannot_continue, has_started, last_plan, launches, read_events
from sft_play.plan.architecture import label
from sft_play.plan.batch import rows_each
from sft_play.plan.plan import COMMANDS, LaunchRequest, Plan, make_stamp
from sft_play.plan.ranks import group_size
from sft_play.plan.request import global_rows
from sft_play.runs.checkpoints import clean_up, newest_valid, step_of
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.runs.gate import check_run
from sft_play.runs.manifest import check_states, read_facts
from sft_play.runs.prepared import Prepared
from sft_play.runs.stamp import CHANGEABLE, STAMPED, Stamp, compare, fixed_settings, refuse
from sft_play.text import plural, tell


def launch_facts(options: LaunchOptions) -> dict[str, Any]:
    """Return the facts of a launch for `events.jsonl`, by which `resume` repeats it."""
    request = options.request
    return {
        "command": request.command_strategy,
        **{name: getattr(request, name) for name in ("num_gpus", "num_nodes", *LESS)},
        "deepspeed": dict(options.deepspeed.settings) if options.deepspeed else None,
        "fsdp": dict(options.fsdp),
        "cpu": options.cpu,
    }


def last_launch(run: RunFolder, node_rank: int) -> dict[str, Any]:
    """Return the facts of the user's last launch, preferably on this node where nodes share the folder."""
    events = launches(run)
    own = [event for event in events if event["node"] == node_rank]
    return dict((own or events)[-1]["launch"])


def options_of_run(call: Call, run: RunFolder, before: Plan, *, rehearsal: bool = False) -> LaunchOptions:
    """Return the options of the run's last launch on this node, with what is typed now in their place.

    `before` is the run's last plan. A `rehearsal` starts nothing, perhaps on other `HARDWARE`. Raise `UserError`.
    """
    node_rank = call.integer("NODE_RANK", minimum=0)
    facts, own = last_launch(run, node_rank or 0), before.ranks_by_node
    here = own[node_rank or 0] if (node_rank or 0) < len(own) else before.world_size // before.num_nodes
    num_nodes = call.integer("NUM_NODES", minimum=1) or int(facts["num_nodes"])
    if facts.get("cpu"):
        leave_gpus()
    deepspeed = settings_from_run(facts["deepspeed"], run.events) if facts["deepspeed"] else None
    less = remedies_so_far(run)
    if any(override.key in ("train.batch_size", "train.grad_accum") for override in call.overrides):
        less["halvings"] = 0  # a batch that is typed now is tried as it is
    options = LaunchOptions(
        request=LaunchRequest(
            command_strategy=_command(call, run, facts, before),
            num_gpus=call.integer("NUM_GPUS", minimum=1)
            or (None if "HARDWARE" in call.options else facts["num_gpus"] or here),
            num_nodes=num_nodes,
            node_rank=node_rank or 0,
            **(deepspeed.request if deepspeed else {}),
            **less,
        ),
        master_address=call.options.get("MASTER_ADDR"),
        master_port=call.port("MASTER_PORT"),
        run_name=run.name,
        deepspeed=deepspeed,
        fsdp=facts["fsdp"],
        cpu=bool(facts.get("cpu")),
    )
    if not rehearsal:
        check_place(options, node_rank_given=node_rank is not None)
    return without_batch_numbers(options) if less["halvings"] or less["unpack"] else options


def _command(call: Call, run: RunFolder, facts: Mapping[str, Any], before: Plan) -> Any:
    """Return the strategy by the run's command, or the one typed now: states fit any strategy and world size."""
    command, planned = facts["command"], before.strategy
    strategies = (override.text for override in call.overrides if override.key == "launch.strategy")
    typed = next((strategy for strategy in strategies if strategy != planned), "auto")
    if typed != "auto" and facts["deepspeed"]:
        raise UserError(
            f"`{run.name}` runs under your DeepSpeed JSON, so `launch.strategy` cannot become `{typed}`", hint="omit it"
        )
    if typed != "auto":
        return "zero" if typed.startswith("zero") else "fsdp2" if typed == "fsdp2" else "auto"
    nodes = call.integer("NUM_NODES", minimum=1) or int(facts["num_nodes"])
    if command == "single" and nodes * (call.integer("NUM_GPUS", minimum=1) or 1) > 1:
        return "ddp"
    # The strategy that `auto` chose stays, even if another fits better now: a run should compute in the same way.
    stays = before.copies == before.sequence_parallel == 1 and "HARDWARE" not in call.options
    return planned if command == "auto" and planned in ("ddp", "fsdp2") and stays else command


def choose_checkpoint(run: RunFolder, *, first_node: bool = True) -> Path | None:
    """Return and report the newest valid checkpoint, after removing leftovers of killed processes.

    Raise `CheckpointError` on the first node for a folder of another node, since checkpoints are on node 0.
    """
    for path in clean_up(run):
        tell(f"removed: {path}")
    checkpoint = newest_checkpoint(run)
    events = read_events(run)
    if checkpoint is None and first_node and events and all(event["node"] for event in events):
        raise CheckpointError(
            f"`{run.name}` trained on several machines, and its checkpoints are on node 0",
            place=str(run.path),
            hint="continue there, or copy the run's folder from node 0 to here first",
        )
    tell(f"resuming {run.path} from {checkpoint.name if checkpoint else 'its start: it has no checkpoint yet'}")
    return checkpoint


def newest_checkpoint(run: RunFolder) -> Path | None:
    """Return the newest valid checkpoint, and report skipped ones; `None` if the run has not saved any.

    Raise `CheckpointError` for a run that saved checkpoints or a model but has no valid checkpoint: training from its
    start would overwrite what may still be rescued.
    """
    checkpoint, skipped = newest_valid(run)
    for reason in skipped:
        tell(f"skipped: {reason}")
    saved = [row["step"] for row in read_json_lines(run.metrics) if row.get("kind") == "save" and not row.get("failed")]
    if checkpoint or not (skipped or saved or run.model.is_dir()):
        return checkpoint
    had = (
        f"had saved checkpoints (the last at step {max(saved)})"
        if saved
        else "has a model"
        if not skipped
        else "has checkpoints"
    )
    raise CheckpointError(
        f"`{run.name}` {had}, and no valid checkpoint to continue from: it would train again from its start, over what"
        " is there",
        place=str(run.checkpoints),
        hint=f"restore the checkpoints, then: make resume RUN={run.typed}; or start again under a new RUN_NAME",
    )


OF_THE_BASE = ("model.adapter", "tuning.adapter", "data.new_tokens")
"""Keys of what a run starts from, of which its prepared base is made."""
CONSENT = "eval.metrics"
"""Typed again, it lets a metric's code run; the stamp refuses another list."""
OF_SCHEDULERS = ("slurm.", "kubernetes.")
"""Sections that say where a run is started and do not affect what it computes."""
BY_RESUME = "resume, in place of "
"""Prefix of the origin of values that `with_its_batch` computed; the value that they replace follows as JSON."""


def check_overrides(call: Call) -> None:
    """Raise `UserError` for overrides of keys that cannot change in a resumed run."""
    refused = [
        override
        for override in call.overrides
        if override.key in OF_THE_BASE
        or not (
            override.key in CHANGEABLE
            or override.key == CONSENT
            or override.key.startswith((*STAMPED, *OF_SCHEDULERS, "train.profile."))
            or needs_own_word(override.key)
        )
    ]
    hint = (
        "omit it, or start a new run with it (RUN_NAME=); MODEL_ADAPTER= or MODEL_NAME= starts that from these weights"
        ' (docs/checkpoints.md#resume); docs/launching.md lists under "Resuming" what may change'
    )
    raise_all(
        [
            UserError(
                f"`{override.key}` cannot change in a resumed run: what the run has"
                f" {'scored' if override.key.startswith('eval.') else 'learned'} so far depends on it",
                place=override.origin,
                hint=hint,
            )
            for override in refused
        ]
    )


def steps_asked(config: Config, plan: Plan) -> int:
    """Return the total optimizer steps that a configuration asks for, by the steps per epoch of the run's last plan."""
    if config.train.max_steps > 0 or not plan.steps_per_epoch:
        return max(config.train.max_steps, 0)
    return max(1, math.ceil(config.train.epochs * plan.steps_per_epoch))


def is_longer(config: Config, plan: Plan) -> bool:
    """Return whether this configuration asks for more steps than the last plan of a complete run."""
    return steps_asked(config, plan) > (plan.steps or 0)


def refuse_fewer_steps(config: Config, plan: Plan, checkpoint: Path) -> None:
    """Raise `UserError` if the configuration asks for fewer steps than a checkpoint has made."""
    asked, completed = steps_asked(config, plan), step_of(checkpoint)
    if 0 < asked < completed:
        raise UserError(
            f"the configuration asks for {plural(asked, 'step')} in all, but `{checkpoint.name}` has made {completed}",
            hint="omit `train.max_steps` and `train.epochs`, or ask for more",
        )


def with_its_batch(loaded: LoadedConfig, call: Call, before: Plan, world: int) -> tuple[LoadedConfig, str | None]:
    """Return the configuration with the run's own global batch, and a note if configured numbers no longer give it.

    Where `train.batch_size` and `train.grad_accum` are both configured, the global batch is their product with the
    number of processes (in `world`, those with separate rows). If any of these has changed, the other is computed
    again, and so is a micro-batch that is too large for the number of processes. Both numbers typed now, or a typed
    global batch, are left to the comparison of stamps.
    """
    group = group_size(loaded.config.launch, world)
    groups = max(1, world // group)
    train, typed, rows = loaded.config.train, {o.key for o in call.overrides}, before.global_batch_size
    decided = "train.global_batch_size" in typed or {"train.batch_size", "train.grad_accum"} <= typed
    too_large = (
        train.batch_size != "auto" and "train.batch_size" not in typed and train.batch_size > rows_each(rows, groups)
    )
    both = train.batch_size != "auto" and train.grad_accum != "auto"
    fits = global_rows(train, groups) == rows or (not both and train.global_batch_size != "auto")
    if decided or (fits and not too_large):
        return loaded, None
    fixed = [
        key for key in ("grad_accum", "batch_size") if f"train.{key}" not in typed and getattr(train, key) != "auto"
    ]
    again = fixed if too_large else fixed[:1] if both else []
    changes: dict[str, Any] = {"global_batch_size": rows, **dict.fromkeys(again, "auto")}
    # An origin by an earlier resume already names the value that was written.
    written = {key: loaded.origins.get(f"train.{key}", "") for key in changes}
    places = {
        key: old if old.startswith(BY_RESUME) else BY_RESUME + json.dumps(getattr(train, key))
        for key, old in written.items()
    }
    many, names = plural(groups, "process" if group == 1 else "group"), " and ".join(f"`train.{key}`" for key in again)
    note = f"note: the run's global batch stays {rows} rows; for {many} {names} is computed again" if again else None
    return set_train(loaded, changes, places), note


def compare_early(checkpoint: Path, config: Config) -> None:
    """Compare the checkpoint's stamp with the configuration, before anything is planned or downloaded.

    Raise `CheckpointError`.
    """
    old = Stamp.load(checkpoint)
    read_facts(checkpoint)
    tuning = config.tuning
    new = replace(
        old,
        backend=tuning.backend,
        mode=tuning.mode,
        quantization=tuning.quantization if tuning.mode == "qlora" else "none",
        # What preparation makes of the base is compared when it was made.
        base_model=old.base_model if tuning.adapter == "merge" or config.data.new_tokens else label(config.model),
        lora=None if tuning.mode == "full" else asdict(tuning.lora),
        max_seq_len=config.model.max_seq_len,
        seed=config.train.seed,
        settings=fixed_settings(config),
    )
    refuse(compare(old, new, "resume"), f"checkpoint `{checkpoint.name}`")


def compare_fully(checkpoint: Path, config: Config, plan: Plan, prepared: Prepared) -> None:
    """Compare the checkpoint's stamp with that of the resumed run, and print warnings.

    Raise `CheckpointError` with every refusal.
    """
    check_states(checkpoint, strategy=plan.strategy, world_size=plan.world_size)
    differences = compare(Stamp.load(checkpoint), make_stamp(config, plan, prepared), "resume")
    for warning in refuse(differences, f"checkpoint `{checkpoint.name}`"):
        tell(warning)


@contextlib.contextmanager
def restore_on_error(path: Path) -> Iterator[None]:
    """Restore a file's content if the body raises: a refused resume must leave the run as it was."""
    before = path.read_bytes() if path.is_file() else None
    try:
        yield
    except BaseException:
        if before is not None and (not path.is_file() or path.read_bytes() != before):
            with contextlib.suppress(OSError):  # the body's own error reports a full disk
                write_bytes(path, before)
        raise


SETS_KEYS = re.compile(r"SFT_|^\s*(source|\.)\s")
"""What a line of `slurm.setup` may set keys by: a variable, or a file that sets it."""
OF_A_START = frozenset({"CONFIG", "RUN_NAME", "ACCELERATE_CONFIG", "DEEPSPEED_CONFIG"})
"""Options of a first start, whose effects are compared with the run instead."""
OF_REPLICAS = frozenset({"single", "ddp", "auto"})
"""Strategies of commands whose processes each hold a complete model."""


def existing_run(options: LaunchOptions, loaded: LoadedConfig) -> RunFolder | None:
    """Return the run that `launch.auto_resume` continues; `None` to start a new one.

    A folder that was only reserved does not count. Raise `UserError` without `RUN_NAME`, since a name from the time
    would differ each time, and `CheckpointError` for a run without its configuration.
    """
    if not loaded.config.launch.auto_resume:
        return None
    if options.run_name is None:
        raise UserError(
            "`launch.auto_resume` needs `RUN_NAME`: by it the same command finds its run again",
            place=loaded.origins.get("launch.auto_resume"),
            hint="add RUN_NAME=NAME to the command",
        )
    return started_run(options.run_name)


def started_run(name: str) -> RunFolder | None:
    """Return the run of this name if its workers ever started. Raise `CheckpointError` if it has no configuration."""
    run = RunFolder(runs_folder() / name)
    if not run.path.is_dir() or not has_started(check_run(run)):
        return None
    if not run.config.is_file():
        raise cannot_continue(run, run.config)
    return run


def refuse_changes(call: Call, loaded: LoadedConfig, run: RunFolder) -> None:
    """Raise `UserError` if a later start with this configuration would be refused, since it continues `run`; leave that
    to a job whose setup may set keys.
    """
    if any(map(SETS_KEYS.search, loaded.config.slurm.setup)):
        return
    check_overrides(replace(call, overrides=tuple(changes(read_config(run.config), loaded))))
    if newest := newest_valid(run, sizes_only=True)[0]:
        compare_early(newest, loaded.config)
        refuse_fewer_steps(loaded.config, last_plan(run), newest)


def as_resume(call: Call, options: LaunchOptions, loaded: LoadedConfig, run: RunFolder) -> Call:
    """Return the `make resume` call that is equivalent to this start: keys that differ from the run's are overrides.

    The number of nodes and of processes may differ. Raise `UserError` if the run was launched in another way.
    """
    first, mine, request = launches(run)[0]["launch"], launch_facts(options), options.request
    before, now = first["command"], mine["command"]
    # `make train` and `make train-distributed` differ only in the number of processes.
    same = before == now or ({before, now} <= OF_REPLICAS and (now == "single" or request.num_gpus is not None))
    how = "" if same else f"by `make {COMMANDS[before]}`, not by `make {COMMANDS[now]}`"
    for name in ("deepspeed", "fsdp"):
        if json.dumps(first[name], sort_keys=True) != json.dumps(mine[name], sort_keys=True):
            how = how or f"with other launch settings (`{name}`)"
    if how:
        hint = f"type the same command, or: make resume RUN={run.typed}"
        raise UserError(f"the run `{run.name}` was started {how}", hint=hint)
    if (nodes := last_launch(run, request.node_rank)["num_nodes"]) != request.num_nodes:
        tell(f"note: `{run.name}` ran on {plural(nodes, 'node')}, and continues with {request.num_nodes}")
    call_options = {name: text for name, text in call.options.items() if name not in OF_A_START}
    call_options |= {"RUN": str(run.path)}
    places = {
        "NUM_GPUS": 1 if mine["command"] == "single" else request.num_gpus,
        "NUM_NODES": request.num_nodes,
        "NODE_RANK": request.node_rank if request.num_nodes > 1 else None,
        "MASTER_ADDR": options.master_address,
        "MASTER_PORT": options.master_port,
    }
    call_options |= {name: str(value) for name, value in places.items() if value is not None}
    return replace(
        call, command="resume", options=call_options, overrides=tuple(changes(read_config(run.config), loaded))
    )


def changes(old: LoadedConfig, new: LoadedConfig) -> list[Override]:
    """Return the keys whose values differ, as overrides with the place of the new value.

    A value that a resume on another number of processes computed (`with_its_batch`) does not count as changed
    while the command still has the value that it replaced.
    """
    before, after = flatten(old), flatten(new)
    return [
        Override(
            key=key, text=value if isinstance(value, str) else json.dumps(value), origin=new.origins.get(key, "default")
        )
        for key, value in after.items()
        if (key not in before or before[key] != value) and old.origins.get(key) != BY_RESUME + json.dumps(value)
    ]
