"""A launch: the user's options, combined and checked, and this machine's hardware.

All of it is known before a run folder is touched, except for facts of other machines.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.load import LoadedConfig
from sft_play.config.schema import Config
from sft_play.config.trackers import missing_packages
from sft_play.errors import HardwareError, UserError, raise_all
from sft_play.files import typed_path
from sft_play.launch.deepspeed import BATCH_KEYS, UserDeepSpeed, ask_deepspeed, load_user_json, resolve
from sft_play.launch.environment import (
    PORT,
    Node,
    WorkerEnvironment,
    free_port,
    indices_of,
    is_of_this_machine,
    key_here,
    loopback_interface,
    require_free_port,
    shorten_name_lookups,
    worker_environment,
)
from sft_play.launch.machines import Machines
from sft_play.launch.settings import (
    NO_DEFAULT_FILE,
    NO_FILE,
    AccelerateChoices,
    machines_and_strategy,
    read_accelerate_config,
)
from sft_play.plan.architecture import shape_of
from sft_play.plan.detect import all_hidden, detect, require_usable
from sft_play.plan.hardware import Hardware
from sft_play.plan.plan import COMMANDS, CommandStrategy, LaunchRequest, Plan
from sft_play.plan.shape import ModelShape
from sft_play.plan.sources import parse_source, plan_for
from sft_play.runs.folder import RunFolder, accelerate_default
from sft_play.runs.prepared import Prepared
from sft_play.text import tell


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """The launch as typed; the plan decides what is left open."""

    request: LaunchRequest
    master_address: str | None = None
    master_port: int | None = None
    run_name: str | None = None
    deepspeed: UserDeepSpeed | None = None
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    """FSDP settings of a user's accelerate config that differ from ours."""
    accelerate_config: Path | None = None
    """The accelerate config that was read."""
    cpu: bool = False
    """Whether an accelerate config asks to ignore GPUs."""
    notices: tuple[str, ...] = ()


def read_options(
    call: Call, loaded: LoadedConfig, asked_strategy: CommandStrategy, *, rehearsal: bool = False
) -> tuple[LaunchOptions, LoadedConfig]:
    """Return the options, and the configuration with the settings of an accelerate config. Raise `UserError`.

    A `rehearsal` starts nothing, so several nodes need no address, rank or name.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "").strip()
    if threads and not threads.isdecimal():
        text = f"`OMP_NUM_THREADS` is `{threads}`; expected a number of threads"
        raise UserError(text, place="environment", hint="export OMP_NUM_THREADS=4, or unset it: the plan chooses it")
    path = _accelerate_config(call, loaded, asked_strategy)
    choices = read_accelerate_config(path) if path else AccelerateChoices()
    loaded = _with_choices(loaded, choices)
    deepspeed = _deepspeed(call, choices, loaded, asked_strategy)
    if deepspeed:
        loaded = _with_batch(loaded, deepspeed)
    if choices.strategy and asked_strategy not in ("auto", choices.strategy):
        raise UserError(
            f"`ACCELERATE_CONFIG` `{choices.path}` asks for `{choices.strategy}`, but `make {call.command}` is for"
            f" `{asked_strategy}`",
            hint=f"use `make {COMMANDS[choices.strategy]}`",
        )
    if choices.strategy == "single" and (choices.num_gpus or 1) > 1:
        text = f"`num_processes` is {choices.num_gpus}, but `distributed_type: 'NO'` is one process"
        hint = "write `distributed_type: MULTI_GPU`, or `num_processes: 1`"
        raise UserError(text, place=str(choices.path), hint=hint)
    by_files = "zero" if deepspeed else choices.strategy
    node_rank = _typed_or_from_file(call.integer("NODE_RANK", minimum=0), "NODE_RANK", choices)
    options = LaunchOptions(
        request=LaunchRequest(
            command_strategy=by_files or "auto" if asked_strategy == "auto" else asked_strategy,
            num_gpus=_typed_or_from_file(call.integer("NUM_GPUS", minimum=1), "NUM_GPUS", choices),
            num_nodes=_typed_or_from_file(call.integer("NUM_NODES", minimum=1), "NUM_NODES", choices) or 1,
            node_rank=node_rank or 0,
            by_accelerate=(*(("strategy",) if choices.strategy else ()), *choices.train),
            **(deepspeed.request if deepspeed else {}),
        ),
        master_address=call.options.get("MASTER_ADDR") or choices.master_address,
        master_port=_typed_or_from_file(call.port("MASTER_PORT"), "MASTER_PORT", choices),
        run_name=call.options.get("RUN_NAME"),
        deepspeed=deepspeed,
        fsdp=choices.fsdp,
        accelerate_config=path,
        cpu=choices.cpu,
        notices=(
            *choices.notices,
            *(f"{package.message}: {package.hint}" for package in missing_packages(loaded.config) if rehearsal),
        ),
    )
    if choices.cpu:
        leave_gpus(path)
    if not rehearsal:
        check_place(options, node_rank_given=node_rank is not None)
    return options, loaded


def leave_gpus(path: Path | None = None) -> None:
    """Hide GPUs from this process and its children, and report it if the file at `path` causes that."""
    if path and not all_hidden():
        tell(f"note: `{path}` asks for the CPU, so GPUs are left alone, as by CUDA_VISIBLE_DEVICES=")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


WITHOUT_DEFAULT = frozenset({"slurm", "kubernetes", "quickstart"})
"""Commands that ignore accelerate's default file, since it describes only this machine."""


def _accelerate_config(call: Call, loaded: LoadedConfig, asked_strategy: CommandStrategy) -> Path | None:
    """Return the accelerate config to read: the named one, or accelerate's default file.

    The default file counts if it asks for several machines or a strategy and nothing typed contradicts that (STATUS
    C4). Report whether it is read, before anything is refused because of it.
    """
    if named := call.options.get("ACCELERATE_CONFIG"):
        return None if named == NO_FILE else typed_path(named)
    path = accelerate_default()
    if path is None or call.command in WITHOUT_DEFAULT or {"HARDWARE", "RUN"} & call.options.keys():
        return None
    machines, strategy = machines_and_strategy(path)
    asks = [f"{machines} machines"] if machines > 1 and "NUM_NODES" not in call.options else []
    if (
        strategy
        and asked_strategy == "auto"
        and "DEEPSPEED_CONFIG" not in call.options
        and not loaded.typed("launch.strategy")
    ):
        asks.append(f"`{strategy}`")
    if not asks or asked_strategy == "single" or _is_contradicted(call, loaded, path):
        tell(f"note: accelerate's default file is not read; to use it: ACCELERATE_CONFIG={path}")
        return None
    left_out = f"{NO_DEFAULT_FILE} leaves it out"
    tell(f"note: accelerate's default file `{path}` asks for {' and '.join(asks)}, so it is read; {left_out}")
    return path


def _is_contradicted(call: Call, loaded: LoadedConfig, path: Path) -> bool:
    """Return whether something typed contradicts a default file; what is wrong with the file itself is said later."""
    try:
        choices = read_accelerate_config(path)
    except UserError:
        return False
    try:
        _with_choices(loaded, choices)
        for name in ("NUM_GPUS", "NUM_NODES"):
            _typed_or_from_file(call.integer(name, minimum=1), name, choices)
    except UserError:
        return True
    return False


def _typed_or_from_file(typed: int | None, name: str, choices: AccelerateChoices) -> int | None:
    from_file: int | None = getattr(choices, name.lower())
    if typed is not None and from_file is not None and typed != from_file:
        raise UserError(f"`{name}` is {typed}, but `{choices.path}` says {from_file}", hint="give it in one place only")
    return from_file if typed is None else typed


def _deepspeed(
    call: Call, choices: AccelerateChoices, loaded: LoadedConfig, asked_strategy: CommandStrategy
) -> UserDeepSpeed | None:
    path = call.options.get("DEEPSPEED_CONFIG")
    if path and choices.deepspeed:
        raise UserError(
            f"`DEEPSPEED_CONFIG` and the DeepSpeed settings of `{choices.path}` are both given", hint="give one of them"
        )
    user = load_user_json(typed_path(path)) if path else choices.deepspeed
    if user and asked_strategy in ("zero", "auto") and loaded.typed("launch.strategy"):
        configured = loaded.config.launch.strategy
        if configured not in ("auto", f"zero{user.stage}"):
            raise UserError(
                f"`launch.strategy` is `{configured}`, but the DeepSpeed JSON has stage {user.stage}",
                place=user.place("zero_optimization.stage"),
                hint="make the two agree, or omit one of them",
            )
    return user


def _with_choices(loaded: LoadedConfig, choices: AccelerateChoices) -> LoadedConfig:
    """Return the configuration with an accelerate config's precision and recomputation; refuse other typed values."""
    for key, value in choices.train.items():
        current = getattr(loaded.config.train, key)
        if loaded.typed(f"train.{key}") and current not in ("auto", value):
            raise UserError(
                f"`train.{key}` is `{str(current).lower()}`, but `{choices.path}` asks for `{str(value).lower()}`",
                place=loaded.origins[f"train.{key}"],
                hint="make the two agree, or omit one of them",
            )
    return set_train(loaded, choices.train, choices.places)


def _with_batch(loaded: LoadedConfig, user: UserDeepSpeed) -> LoadedConfig:
    """Return the configuration with the batch of a DeepSpeed JSON where it is not typed; `resolve` compares the two."""
    asked = {key: value for key, value in user.batch.items() if not loaded.typed(f"train.{key}")}
    return set_train(loaded, asked, {key: user.place(BATCH_KEYS[key]) for key in asked})


def set_train(loaded: LoadedConfig, values: Mapping[str, Any], places: Mapping[str, str]) -> LoadedConfig:
    """Return the configuration with other values of `train.` keys, and the places where these come from."""
    config = replace(loaded.config, train=replace(loaded.config.train, **values))
    return replace(
        loaded, config=config, origins={**loaded.origins, **{f"train.{key}": place for key, place in places.items()}}
    )


def check_place(options: LaunchOptions, *, node_rank_given: bool) -> None:
    """Raise `UserError` for a place among several machines that is incomplete, or not valid."""
    request = options.request
    if request.num_nodes == 1:
        if request.node_rank or options.master_address:
            option = "NODE_RANK" if request.node_rank else "MASTER_ADDR"
            raise UserError(
                f"`{option}` is given, but `NUM_NODES` is 1", hint="set NUM_NODES to the number of machines"
            )
        return
    if request.command_strategy == "single":
        raise UserError("`make train` runs one process; `NUM_NODES` needs several", hint="use `make train-distributed`")
    missing = [] if node_rank_given else ["NODE_RANK"]
    missing += [] if options.master_address else ["MASTER_ADDR"]
    missing += [] if options.run_name else ["RUN_NAME"]
    if missing:
        raise UserError(
            f"`NUM_NODES` is {request.num_nodes}, so every node needs {', '.join(f'`{name}`' for name in missing)} too",
            hint=(
                "the same command on each machine, NODE_RANK from 0 on, MASTER_ADDR the address of node 0, one RUN_NAME"
                " for all"
            ),
        )
    address = options.master_address or ""
    if address.count(":") == 1 or address.startswith("["):
        text = "expected the name or the IP address of node 0 alone, such as 192.168.1.10 or fd00::1"
        raise UserError(
            text, place=f"MASTER_ADDR={address}", hint="a port goes into MASTER_PORT; an IPv6 address needs no brackets"
        )
    if request.node_rank >= request.num_nodes:
        raise UserError(f"`NODE_RANK` is {request.node_rank}; expected 0 to {request.num_nodes - 1}")


def without_batch_numbers(options: LaunchOptions) -> LaunchOptions:
    """Return the options with the batch numbers of a user's DeepSpeed JSON as `auto`, since the plan changes them."""
    user = options.deepspeed
    if user is None:
        return options
    settings = {key: "auto" if key in BATCH_KEYS.values() else value for key, value in user.settings.items()}
    return replace(options, deepspeed=replace(user, settings=settings))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A launch; the fields from `machines` on are known after machines have met."""

    call: Call
    loaded: LoadedConfig
    options: LaunchOptions
    hardware: Hardware
    shape: ModelShape
    node: Node
    machines: Machines | None = None
    """This machine's part among several."""
    checkpoint: Path | None = None
    """Checkpoint from which this attempt continues."""
    shared: bool = False
    """Whether this is a node other than 0 that shares node 0's run folder."""
    day: str | None = None
    """Date that the chat template writes into rows: node 0's, or in a resumed run that of its rows."""

    @property
    def has_met(self) -> bool:
        """Whether this is node 0 and the other machines have joined."""
        return self.node.rank == 0 and bool(self.options.request.node_devices)

    def environment(self, plan: Plan, additions: Mapping[str, str] = {}) -> WorkerEnvironment:
        """Return the environment of this node's workers, with `additions`."""
        here = self.hardware
        return worker_environment(
            plan, self.node, os.environ, cpu_threads=here.cpu_threads, devices=here.devices, additions=additions
        )

    def plan(self, prepared: Prepared | None) -> Plan:
        """Return the plan: final, or early if `prepared` is `None`."""
        launch = replace(self.options.request, early=prepared is None)
        source = parse_source(self.call.options.get("SOURCE"), "auto")
        if not prepared and not (self.shape.counted and source == "auto"):
            source = "formula"
        return plan_for(self.loaded, self.hardware, launch, prepared, source, self.shape)

    def world_size(self, before: Plan) -> int:
        """Return the number of processes of all nodes; `before` is the last plan of a resumed run."""
        request = self.options.request
        met = sum(map(len, request.node_devices))
        return met or (request.num_gpus or before.world_size // before.num_nodes) * request.num_nodes

    def home(self, run: RunFolder) -> RunFolder:
        """Return the folder for this node's configuration and preparation: the run's, or its part of a shared one."""
        return run.of_node(self.node.rank) if self.shared else run

    def with_request(self, request: LaunchRequest) -> Job:
        """Return the job of another attempt on the same hardware."""
        return replace(self, options=without_batch_numbers(replace(self.options, request=request))).with_fresh_port()

    def with_fresh_port(self) -> Job:
        """Return the same job with another port, unless the port was typed: the old one may not be free yet."""
        ours = self.machines is None and self.options.master_port is None
        return replace(self, node=replace(self.node, master_port=free_port())) if ours else self


def job_of(call: Call, loaded: LoadedConfig, options: LaunchOptions) -> Job:
    """Return the job of a call on this machine."""
    node = _node(options)  # first, since it limits name lookups, also those for the model
    return Job(
        call=call, loaded=loaded, options=options, hardware=detect(), shape=shape_of(loaded.config.model), node=node
    )


def refuse_early(job: Job) -> None:
    """Raise what the early plan refuses, but not a lack of devices while other nodes are missing.

    Check before a run folder is made that torch can use the GPUs of the plan.
    """
    raise_all(missing_packages(job.loaded.config))
    try:
        plan = job.plan(None)
        refuse_files(job.options, plan, job.loaded.config, job.shape)
    except HardwareError:
        if job.node.count == 1 or job.has_met:
            raise
        return
    here = {name for _, name in socket.if_nameindex()}
    asked = os.environ.get("GLOO_SOCKET_IFNAME") or ""
    if plan.world_size > 1 and (missing := [name for name in asked.split(",") if name and name not in here]):
        text = f"`GLOO_SOCKET_IFNAME` names `{missing[0]}`, but this machine has {', '.join(sorted(here))}"
        raise HardwareError(text, place="environment", hint="unset it: the launcher chooses the interface")
    for name in ("sitecustomize.py", "usercustomize.py") if plan.zero else ():
        if (file := Path.cwd() / name).exists():  # accelerate adds this folder to the PYTHONPATH of DeepSpeed's workers
            text = "DeepSpeed's workers would run it at their start"
            raise HardwareError(text, place=str(file), hint="rename it, or start in another folder")
    if plan.device == "cuda":
        require_usable(job.hardware, indices_of(plan, job.node), job.environment(plan).variables)


def refuse_files(options: LaunchOptions, plan: Plan, config: Config, shape: ModelShape) -> None:
    """Raise `UserError` for a user's DeepSpeed JSON that does not suit the plan, before anything is prepared."""
    if options.deepspeed:
        ask_deepspeed(options.deepspeed, resolve(options.deepspeed, plan, config, hidden_size=shape.hidden_size)[0])


def _node(options: LaunchOptions) -> Node:
    """Return this machine's place in the run with a free port. Raise `HardwareError` for a typed port that is taken."""
    request, port = options.request, options.master_port
    if request.num_nodes == 1:
        if port:
            require_free_port(port, hint="omit MASTER_PORT: on one machine a free port is chosen")
        return Node(master_port=port or free_port(), interface=loopback_interface())
    assert options.master_address is not None, "read_options requires MASTER_ADDR for several nodes"
    port = port or PORT
    shorten_name_lookups()
    if request.node_rank == 0:
        if not is_of_this_machine(options.master_address):
            tell(
                f"note: `MASTER_ADDR` `{options.master_address}` is not an address of this machine; the others look for"
                " node 0 there"
            )
        require_free_port(port, hint="choose another MASTER_PORT, the same on every node")
    # The interface is known after the meeting, whose connections it carries; MASTER_ADDR may resolve to 127.0.1.1.
    return Node(
        rank=request.node_rank,
        count=request.num_nodes,
        master_address=options.master_address,
        master_port=port,
        key=key_here(),
    )
