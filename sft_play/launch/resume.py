"""What `make resume` and `launch.auto_resume` need: how the run was launched, its newest valid checkpoint, and what may
differ now.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sft_play.config.call import Call, flatten
from sft_play.config.layers import Override
from sft_play.config.load import LoadedConfig, read_config
from sft_play.config.schema import Config, needs_own_word
from sft_play.errors import CheckpointError, UserError, raise_all
from sft_play.files import read_json_lines, write_bytes
from sft_play.launch.deepspeed import settings_from_run
from sft_play.launch.job import LaunchOptions, leave_gpus, set_train, without_batch_numbers
from sft_play.launch.recovery import LESS, remedies_so_far
from sft_play.launch.run_folder import cannot_continue, has_started, launches, read_events
from sft_play.plan.architecture import label
from sft_play.plan.batch import rows_each
from sft_play.plan.plan import COMMANDS, LaunchRequest, Plan, make_stamp
from sft_play.plan.ranks import group_size
from sft_play.plan.request import global_rows
from sft_play.runs.checkpoints import clean_up, newest_valid, step_of
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.runs.manifest import check_states, read_facts
from sft_play.runs.prepared import Prepared
from sft_play.runs.stamp import CHANGEABLE, STAMPED, Stamp, compare, fixed_settings, refuse
from sft_play.text import plural


def launch_facts(options: LaunchOptions) -> dict[str, Any]:
    """Return what `events.jsonl` keeps about a launch, so that `resume` can repeat it."""
    request = options.request
    return {
        "command": request.command_strategy,
        **{name: getattr(request, name) for name in ("num_gpus", "num_nodes", *LESS)},
        "deepspeed": dict(options.deepspeed.settings) if options.deepspeed else None,
        "fsdp": dict(options.fsdp),
        "cpu": options.cpu,
    }


def last_launch(run: RunFolder, node_rank: int) -> dict[str, Any]:
    """Return the facts of the launch that a user last asked for, on this node where nodes share the folder."""
    found = launches(run)
    own = [event for event in found if event.get("node", 0) == node_rank]
    return dict((own or found)[-1]["launch"])


def options_of_run(call: Call, run: RunFolder, before: Plan) -> LaunchOptions:
    """Return the options of the run's last launch on this node, with what was typed now in their place. Raise
    `UserError`.

    `before` is the run's last plan.
    """
    node_rank = call.integer("NODE_RANK", minimum=0)
    facts, own = last_launch(run, node_rank or 0), before.ranks_by_node
    here = own[node_rank or 0] if (node_rank or 0) < len(own) else before.world_size // before.num_nodes
    num_nodes = call.integer("NUM_NODES", minimum=1) or int(facts["num_nodes"])
    address = call.options.get("MASTER_ADDR")
    if num_nodes > 1 and (node_rank is None or not address):
        raise UserError(f"`{run.name}` runs on {num_nodes} nodes, so every node needs `NODE_RANK` and `MASTER_ADDR`")
    if call.options.get("RUN_NAME") not in (None, run.name):
        raise UserError("`RUN_NAME` starts a new run; `make resume` continues `RUN`", hint="omit RUN_NAME")
    if call.options.get("ACCELERATE_CONFIG"):
        raise UserError(
            "a resumed run keeps its own launch settings; `ACCELERATE_CONFIG` does not go with `make resume`"
        )
    if facts.get("cpu"):
        leave_gpus()
    deepspeed = settings_from_run(facts["deepspeed"], run, run.events) if facts["deepspeed"] else None
    less = remedies_so_far(run)
    if any(o.key in ("train.batch_size", "train.grad_accum") for o in call.overrides):
        less["halvings"] = 0  # what is typed now is what memory is to be tried with
    options = LaunchOptions(
        request=LaunchRequest(
            command_strategy=_command(call, run, facts, before),
            num_gpus=call.integer("NUM_GPUS", minimum=1) or facts["num_gpus"] or here,
            num_nodes=num_nodes,
            node_rank=node_rank or 0,
            **(deepspeed.request if deepspeed else {}),
            **less,
        ),
        master_address=address,
        master_port=call.port("MASTER_PORT"),
        deepspeed=deepspeed,
        fsdp=facts["fsdp"],
        cpu=bool(facts.get("cpu")),
    )
    return without_batch_numbers(options) if less["halvings"] or less["unpack"] else options


def _command(call: Call, run: RunFolder, facts: Mapping[str, Any], before: Plan) -> Any:
    """Return what the run's command asks for, or what is typed now: states fit any strategy and number of processes."""
    command, planned = facts["command"], before.strategy
    typed = next((o.text for o in call.overrides if o.key == "launch.strategy" and o.text != planned), "auto")
    if typed != "auto" and facts["deepspeed"]:
        raise UserError(
            f"`{run.name}` runs under your DeepSpeed JSON, so `launch.strategy` cannot become `{typed}`", hint="omit it"
        )
    if typed != "auto":
        return "zero" if typed.startswith("zero") else "fsdp2" if typed == "fsdp2" else "auto"
    nodes = call.integer("NUM_NODES", minimum=1) or int(facts["num_nodes"])
    if command == "single" and nodes * (call.integer("NUM_GPUS", minimum=1) or 1) > 1:
        return "ddp"
    # What `auto` turned to stays, even if another strategy fits better now: a run should compute in one way.
    whole = before.copies == before.sequence_parallel == 1
    return planned if command == "auto" and planned in ("ddp", "fsdp2") and whole else command


def choose_checkpoint(run: RunFolder, *, first_node: bool = True) -> Path | None:
    """Return what `newest_checkpoint` does, and say so; what killed processes left is removed.

    Raise `CheckpointError` on what is to be the first node where another node's folder is all there is: its checkpoints
    are on node 0.
    """
    for left in clean_up(run):
        print(f"removed: {left}", file=sys.stderr)
    checkpoint = newest_checkpoint(run)
    events = read_events(run)
    if checkpoint is None and first_node and events and all(event.get("node", 0) for event in events):
        raise CheckpointError(
            f"`{run.name}` trained on several machines, and its checkpoints are on node 0",
            place=str(run.path),
            hint="continue there, or copy the run's folder from node 0 to here first",
        )
    print(
        f"resuming {run.path} from {checkpoint.name if checkpoint else 'its start: it has no checkpoint yet'}",
        file=sys.stderr,
    )
    return checkpoint


def newest_checkpoint(run: RunFolder) -> Path | None:
    """Return the newest valid checkpoint, and say which were skipped and why; `None` where the run has saved none yet.

    Raise `CheckpointError` for a run that had some, or has a model: to train from its start would write over what may
    be rescued.
    """
    checkpoint, skipped = newest_valid(run)
    for reason in skipped:
        print(f"skipped: {reason}", file=sys.stderr, flush=True)
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
        hint=f"put the checkpoints back, then: make resume RUN={run.typed}; or start again under a new RUN_NAME",
    )


OF_SCHEDULERS = ("slurm.", "kubernetes.")
"""Sections that say where a run is started, and nothing of what it computes."""
BY_RESUME = "resume, in place of "
"""How the origin begins of what `with_its_batch` has computed anew; the value that was written follows, as JSON."""


def check_overrides(call: Call) -> None:
    """Raise `UserError` for overrides that would make it another run."""
    refused = [
        o
        for o in call.overrides
        if o.key not in CHANGEABLE
        and not o.key.startswith((*STAMPED, *OF_SCHEDULERS, "train.profile."))
        and not needs_own_word(o.key)
    ]
    raise_all(
        [
            UserError(
                f"`{o.key}` cannot change in a resumed run: what the run has"
                f" {'scored' if o.key.startswith('eval.') else 'learned'} so far depends on it",
                place=o.origin,
                hint='leave it out, or start a new run with it (another RUN_NAME); docs/launching.md lists under "Resuming" what may change',
            )
            for o in refused
        ]
    )


def steps_asked(config: Config, plan: Plan) -> int:
    """Return the optimizer steps in all that a configuration asks for; `plan` is the run's last, which knows those of
    an epoch.
    """
    if config.train.max_steps > 0 or not plan.steps_per_epoch:
        return max(config.train.max_steps, 0)
    return max(1, math.ceil(config.train.epochs * plan.steps_per_epoch))


def is_longer(config: Config, plan: Plan) -> bool:
    """Whether this configuration asks a complete run, whose last plan is `plan`, to go on."""
    return steps_asked(config, plan) > (plan.steps or 0)


def refuse_fewer_steps(config: Config, plan: Plan, checkpoint: Path) -> None:
    """Raise `UserError` where fewer steps are asked for than have been made."""
    asked, made = steps_asked(config, plan), step_of(checkpoint)
    if 0 < asked < made:
        raise UserError(
            f"{asked} steps in all are asked for, and `{checkpoint.name}` has made {made}",
            hint="omit `train.max_steps` and `train.epochs`, or ask for more",
        )


def with_its_batch(loaded: LoadedConfig, call: Call, before: Plan, world: int) -> tuple[LoadedConfig, str | None]:
    """Return the configuration with the run's own global batch, and a note where a number that was given no longer
    makes it.

    `train.batch_size` and `train.grad_accum` both given make the global batch, times the number of processes (of
    `world`, those with rows of their own): where that, or one of them, is another now, the other is computed again, and
    so is a micro-batch that is too large for so many. Both typed now, or a typed global batch, stay for the stamp to
    judge.
    """
    group = group_size(loaded.config.launch, world)
    groups = max(1, world // group)
    train, typed, wanted = loaded.config.train, {o.key for o in call.overrides}, before.global_batch_size
    given = "train.global_batch_size" in typed or {"train.batch_size", "train.grad_accum"} <= typed
    too_large = (
        train.batch_size != "auto" and "train.batch_size" not in typed and train.batch_size > rows_each(wanted, groups)
    )
    both = train.batch_size != "auto" and train.grad_accum != "auto"
    fits = global_rows(train, groups) == wanted or (not both and train.global_batch_size != "auto")
    if given or (fits and not too_large):
        return loaded, None
    fixed = [
        key for key in ("grad_accum", "batch_size") if f"train.{key}" not in typed and getattr(train, key) != "auto"
    ]
    again = fixed if too_large else fixed[:1] if both else []
    changes: dict[str, Any] = {"global_batch_size": wanted, **dict.fromkeys(again, "auto")}
    written = {
        key: loaded.origins.get(f"train.{key}", "") for key in changes
    }  # one by us says already what was written
    places = {
        key: old if old.startswith(BY_RESUME) else BY_RESUME + json.dumps(getattr(train, key))
        for key, old in written.items()
    }
    many, names = plural(groups, "process" if group == 1 else "group"), " and ".join(f"`train.{key}`" for key in again)
    note = f"note: the run's global batch stays {wanted} rows; for {many} {names} is computed again" if again else None
    return set_train(loaded, changes, places), note


def compare_early(checkpoint: Path, config: Config) -> None:
    """Compare what the configuration alone decides, before anything is planned or downloaded. Raise
    `CheckpointError`.
    """
    old = Stamp.load(checkpoint)
    read_facts(checkpoint)
    tuning = config.tuning
    new = replace(
        old,
        backend=tuning.backend,
        mode=tuning.mode,
        quantization=tuning.quantization if tuning.mode == "qlora" else "none",
        base_model=old.base_model if tuning.adapter == "merge" else label(config.model),
        lora=None if tuning.mode == "full" else asdict(tuning.lora),
        max_seq_len=config.model.max_seq_len,
        seed=config.train.seed,
        settings=fixed_settings(config),
    )
    refuse(compare(old, new, "resume"), f"checkpoint `{checkpoint.name}`")


def compare_fully(checkpoint: Path, config: Config, plan: Plan, prepared: Prepared) -> None:
    """Compare the checkpoint's stamp with what would go on. Prints warnings; raise `CheckpointError` with every
    refusal.
    """
    check_states(checkpoint, strategy=plan.strategy, world_size=plan.world_size)
    differences = compare(Stamp.load(checkpoint), make_stamp(config, plan, prepared), "resume")
    for warning in refuse(differences, f"checkpoint `{checkpoint.name}`"):
        print(warning, file=sys.stderr)


@contextlib.contextmanager
def restore_on_error(path: Path) -> Iterator[None]:
    """Give a file back its old content when the body raises: a refused resume must leave the run as it was."""
    before = path.read_bytes() if path.is_file() else None
    try:
        yield
    except BaseException:
        if before is not None and (not path.is_file() or path.read_bytes() != before):
            with contextlib.suppress(OSError):  # of a full disk the body's own error tells
                write_bytes(path, before)
        raise


OF_A_START = frozenset({"CONFIG", "RUN_NAME", "ACCELERATE_CONFIG", "DEEPSPEED_CONFIG"})
"""Options of a first start: what they led to is compared with what the run was started with."""
OF_REPLICAS = frozenset({"single", "ddp", "auto"})
"""What commands stand for whose processes each hold a whole model, however many they are."""


def existing_run(options: LaunchOptions, loaded: LoadedConfig) -> RunFolder | None:
    """Return the run to continue; `None` where a new one is to be started, in a folder that was only reserved too.

    Raise `UserError` without `RUN_NAME`: a name made of the time would be another one each time; `CheckpointError` for
    a run without its configuration.
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
        raise cannot_continue(run, run.config)
    return run


def as_resume(call: Call, options: LaunchOptions, loaded: LoadedConfig, run: RunFolder) -> Call:
    """Return the call of `make resume` that this start amounts to: keys that differ from the run's own are its
    overrides.

    The number of nodes and of processes may be another than before. Raise `UserError` where the run was launched in
    another way.
    """
    first, mine, request = launches(run)[0]["launch"], launch_facts(options), options.request
    before, now = first["command"], mine["command"]
    # `make train` and `make train-distributed` differ by the number of processes only
    same = before == now or ({before, now} <= OF_REPLICAS and (now == "single" or request.num_gpus is not None))
    how = "" if same else f"by `make {COMMANDS[before]}`, not by `make {COMMANDS[now]}`"
    for name in ("deepspeed", "fsdp"):
        if json.dumps(first[name], sort_keys=True) != json.dumps(mine[name], sort_keys=True):
            how = how or f"with other launch settings (`{name}`)"
    if how:
        hint = f"type the same command, or: make resume RUN={run.typed}"
        raise UserError(f"the run `{run.name}` was started {how}", hint=hint)
    if (nodes := last_launch(run, request.node_rank)["num_nodes"]) != request.num_nodes:
        print(
            f"note: `{run.name}` ran on {plural(nodes, 'node')}, and continues with {request.num_nodes}",
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


def changes(old: LoadedConfig, new: LoadedConfig) -> list[Override]:
    """Return the keys whose values differ, as overrides with the place where the new value was written.

    What a resume on another number of processes computed anew (`resume.with_its_batch`) is no wish to change it back,
    as long as the command says what it said before.
    """
    before, after = flatten(old), flatten(new)
    return [
        Override(
            key=key, text=value if isinstance(value, str) else json.dumps(value), origin=new.origins.get(key, "default")
        )
        for key, value in after.items()
        if (key not in before or before[key] != value) and old.origins.get(key) != BY_RESUME + json.dumps(value)
    ]
