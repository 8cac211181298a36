"""The plan as a pure function of a request, and what lies around it: what would need less memory, and what would be
faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sft_play.config.layers import shipped
from sft_play.plan.batch import rows_each
from sft_play.plan.choices import padded_layout
from sft_play.plan.decide import GAIN, SMALL_OPTIMIZER, decide, other_optimizer, try_plan
from sft_play.plan.hardware import GIB, HEADROOM
from sft_play.plan.memory import host_bytes, rank_memory
from sft_play.plan.network import KEY, TENSOR_KEY, slow_network
from sft_play.plan.plan import LaunchRequest, Plan, RankPlan, Setup, setup_of, tightest
from sft_play.plan.request import SHORTEST_ROW, DoesNotFitError, Remedy, Request, with_machines
from sft_play.text import figure

MOST_REMEDIES = 6
LONGEST_ROW = 2**22
"""Where the search for the longest row ends, for models without a limit of positions."""
MORE_OR_LESS = "MODEL_MAX_SEQ_LEN=", "MODEL_DTYPE="
"""Remedies that begin alike are one: the first of them that fits."""
RECOMPUTED = {"train.gradient_checkpointing": True}
GATHERED = {"launch.slow_network": "allow"}


def make_plan(request: Request) -> Plan:
    """Return every decision about a run with its reason. Raise `UserError` or `HardwareError` for an impossible one."""
    request = with_machines(request)
    try:
        plan = decide(request)
    except DoesNotFitError as error:
        raise with_remedies(request, error) from None
    notices = *_faster_ways(request, plan), *plan.notices
    return replace(plan, longest_row=_longest_row(request, plan), notices=notices)


def _longest_row(request: Request, plan: Plan) -> int:
    """Return the tokens of the longest rows with which the planned micro-batches fit every rank."""
    most, setup = min(request.shape.max_positions, LONGEST_ROW), setup_of(plan)
    cases = [setup]
    if setup.layout == "flattened" and not setup.pack_tokens:
        # Flattened rows are padded where their mask would not fit.
        cases.append(replace(setup, layout=padded_layout(request)))
    kinds = {(setup.on(rank.rank).stage, rank.micro_batch, rank.capacity_bytes): rank for rank in plan.ranks}
    return min(
        max(request.longest(case.on(rank.rank), rank.micro_batch, rank.capacity_bytes, most) for case in cases)
        for rank in kinds.values()
    )


def with_remedies(request: Request, error: DoesNotFitError) -> DoesNotFitError:
    """Return the error with remedies: first those that fit, and over a slow network, sharing weights last."""
    need, slow = error.need_bytes, slow_network(request)

    def order(remedy: Remedy) -> tuple[bool, bool, bool]:
        shares_out = remedy.command in ("make train-fsdp", "make train-deepspeed")
        return not remedy.fits, bool(slow) and shares_out, "TUNING_MODE" not in remedy.variables

    in_use = tuple(
        f"other programs hold {(device.memory_bytes - device.free_bytes) / GIB:.1f} of GPU {device.number}'s "
        f"{device.memory_bytes / GIB:.1f} GiB (`make memory-check` names them); without them it would fit"
        for device in request.hardware.devices
        if device.number is not None
        and HEADROOM["cuda"] * device.free_bytes < need <= HEADROOM["cuda"] * device.memory_bytes
    )
    ways = remedies(request, error.setup, error.micro_batch, need)
    ways = ways if any(way.fits for way in ways) else (*_pair(request, error), *ways)
    others = _fewer_fit(request) or ([] if any(way.fits for way in ways) else _more_fit(request))
    return error.add(tuple(sorted(ways, key=order)), notes=(*other_optimizer(request, error.setup), *in_use, *others))


def remedies(request: Request, setup: Setup, rows: int, before: int) -> tuple[Remedy, ...]:
    """Return what would need less than the `before` bytes of `rows` rows in this setup: first what fits, in the order
    of `_overrides`.
    """

    def remedy_of(command: str, variables: str, changed: Request) -> Remedy | None:
        """Return the effect of a change; `None` if it is refused for another reason, is not obeyed or saves nothing."""
        refused = (plan := try_plan(request, changed)) is None
        if refused:  # perhaps for its host memory, which the remedy says
            plan = try_plan(request, replace(changed, hardware=replace(changed.hardware, ram_known=False)))
        if plan is None:
            return None
        if isinstance(plan, DoesNotFitError):
            need, capacity, other, each = plan.need_bytes, plan.capacity_bytes, plan.setup, plan.micro_batch
        else:
            rank = tightest(plan.ranks)
            need, capacity, other, each = rank.peak_bytes, rank.capacity_bytes, plan, rows
        host = changed.ranks.local * host_bytes(changed.config, changed.shape, other, each)
        if need >= before:
            return None
        if changed.config.train.optim not in (request.config.train.optim, other.optim):
            return None
        remedy = Remedy(
            command=command,
            variables=variables,
            need_bytes=need,
            saving_bytes=before - need,
            fits=need <= capacity,
            host_bytes=host,
            ram_bytes=request.hardware.ram_bytes if request.hardware.ram_known else 0,
            recomputes=need <= capacity and other.gradient_checkpointing and option not in variables,
        )
        if refused and not remedy.overfills:
            return None
        return replace(remedy, fits=remedy.fits and not remedy.overfills)

    may_add, option = request.config.train.gradient_checkpointing is False, _typed(RECOMPUTED)
    ways: dict[str, Remedy] = {}
    for command, variables, changed in _overrides(request, setup, rows):
        kind = next((kind for kind in MORE_OR_LESS if variables.startswith(kind)), f"{command} {variables}")
        if kind in ways and ways[kind].fits:
            continue  # by changing less
        remedy = remedy_of(command, variables, changed)
        if not remedy and setup.gathers and request.hardware.network_bytes_per_second:
            remedy = remedy_of(command, f"{variables} {_typed(GATHERED)}".strip(), changed.with_keys(GATHERED))
        # Turn recomputation on in addition only where it is necessary.
        if may_add and option not in variables and not (remedy and remedy.fits):
            remedy = remedy_of(command, f"{variables} {option}".strip(), changed.with_keys(RECOMPUTED)) or remedy
        if remedy and (kind not in ways or remedy.fits):
            ways[kind] = remedy
    ordered = sorted(ways.values(), key=lambda way: (not way.fits, 0 if way.fits else way.need_bytes))
    return tuple(ordered[:MOST_REMEDIES])


def _fewer_fit(request: Request) -> list[str]:
    """Return a note on the cards or machines that hold the run without the others: the fastest of such sets."""
    if not request.hardware.described and request.launch.num_nodes == 1:
        return []  # CUDA_VISIBLE_DEVICES in the error names them
    plans = [(words, try_plan(request, fewer)) for words, fewer in _fewer(request)[:MOST_TRIED]]
    fitting = [(plan.seconds_per_step or math.inf, words) for words, plan in plans if isinstance(plan, Plan)]
    return [
        f"{words} it fits" + (f": {figure(seconds)} s a step" if seconds < math.inf else "")
        for seconds, words in sorted(fitting)[:1]
    ]


def _more_fit(request: Request) -> list[str]:
    """Return a note on the smallest number of like cards in one machine that would hold the run."""
    hardware, launch = request.hardware, request.launch.without_json("auto")
    if hardware.kind == "cpu" or launch.num_nodes > 1 or len(set(hardware.devices)) > 1:
        return []
    for count in range(len(hardware.devices) + 1, MOST_TRIED + 1):
        cards = replace(hardware, devices=hardware.devices[:1] * count, described=True)
        extended = replace(request, hardware=cards, launch=replace(launch, num_gpus=None))
        if isinstance(try_plan(request, extended), Plan):
            return [f"on {count} such cards in one machine it fits (make plan with HARDWARE={count}x...)"]
    return []


def _pair(request: Request, error: DoesNotFitError) -> Iterator[Remedy]:
    """Yield the first two changes that fit together, as one."""
    for command, variables, changed in _overrides(request, error.setup, error.micro_batch):
        plan = try_plan(request, changed)
        ways = (
            remedies(changed, plan.setup, plan.micro_batch, error.need_bytes)
            if isinstance(plan, DoesNotFitError)
            else ()
        )
        if way := next((way for way in ways if way.fits), None):
            words = dict(word.split("=", 1) for word in f"{variables} {way.variables}".split())
            typed = " ".join(f"{name}={value}" for name, value in words.items())
            yield replace(way, command=way.command or command, variables=typed)
            return


def _typed(keys: Mapping[str, Any]) -> str:
    """Return the command-line variables that set these keys."""
    values = {key: "true" if value is True else value for key, value in keys.items()}
    return " ".join(f"{key.replace('.', '_').upper()}={value}" for key, value in values.items())


def _overrides(request: Request, setup: Setup, rows: int) -> list[tuple[str, str, Request]]:
    """Return every change to try, what changes least first: command and variables to type, and the request with it."""
    config, launch, train = request.config, request.launch, request.config.train
    mode, strategy = config.tuning.mode, config.launch.strategy
    whole = replace(launch, halvings=0)
    halved, pinned = launch, dict[str, Any]()
    if request.divides:
        # Compare at the same micro-batch; of unequal ranks, the largest one may exceed the share of the others.
        halved, pinned = whole, {"train.batch_size": rows}
        if train.global_batch_size != "auto" and rows > rows_each(train.global_batch_size, setup.data_world):
            pinned["train.global_batch_size"] = rows * setup.data_world
    overrides: list[tuple[str, str, Request]] = []

    def add(keys: dict[str, Any], command: str = "", launch: LaunchRequest = halved, file: str = "") -> None:
        changed = replace(request, launch=launch).with_keys(pinned | keys)
        overrides.append((command, f"{file} {_typed(keys)}".strip(), changed))

    if rows > 1:
        typed = train.batch_size != "auto", train.grad_accum != "auto"
        auto = {(True, False): "TRAIN_BATCH_SIZE=auto", (False, True): "TRAIN_GRAD_ACCUM=auto"}.get(typed)
        fewer = {"train.batch_size": 1, "train.grad_accum": "auto"} if auto else {"train.batch_size": rows // 2}
        overrides.append(("", auto or _typed(fewer), replace(request, launch=whole).with_keys(fewer)))
    recomputes, moves = setup.gradient_checkpointing, setup.activation_offload or setup.device == "cpu"
    if not (recomputes and moves):
        add({"train.activation_offload": "on"} if recomputes else RECOMPUTED)
    changes: list[dict[str, Any]] = [
        {"model.max_seq_len": max(SHORTEST_ROW, setup.row_tokens // part)} for part in (2, 4, 8)
    ]
    changes += [{"tuning.mode": other} for other in ("lora", "qlora") if mode not in (other, "qlora")]
    if mode == "full" and setup.device == "cuda" and (setup.zero or setup.strategy == "fsdp2"):
        changes += [{"train.optim": "adafactor"}]  # AdamW's 8-bit states cannot be sharded
    elif mode == "full" and setup.device == "cuda" and setup.precision == "bf16":
        narrow, small = {"model.dtype": "bfloat16"}, {"train.optim": SMALL_OPTIMIZER}
        changes += [small] if config.model.dtype == "bfloat16" else [narrow, narrow | small]
    for keys in changes:
        add(keys)
    if mode != "qlora" and setup.world_size > 1 and setup.strategy in ("ddp", "zero1", "zero2"):
        keys = {} if strategy in ("auto", "fsdp2") else {"launch.strategy": "fsdp2"}
        add(keys, "make train-fsdp", halved.without_json("fsdp2"))
    alone = setup.strategy == "ddp" and setup.group_size == 1 and strategy in ("auto", "ddp")
    if alone and setup.world_size > 1:
        size = setup.world_size // launch.num_nodes
        ways: list[dict[str, Any]] = [
            {"launch.strategy": "pipeline"},
            {"launch.tensor_parallel": size},
            {"launch.sequence_parallel": size},
        ]
        for keys in ways:
            add(keys, "make train-distributed", replace(halved, command_strategy="auto"))
    if mode != "qlora" and setup.device == "cuda" and not setup.offload_parameters:
        keys = {} if strategy in ("auto", "zero3") else {"launch.strategy": "zero3"}
        file = f"DEEPSPEED_CONFIG={shipped('deepspeed/zero3_offload.json')}"
        add(keys, "make train-deepspeed", halved.with_offloading(), file)
    return overrides


MOST_TRIED = 8
"""Largest number of smaller sets of cards or machines that are planned to see whether fewer are faster."""
CLEAR_GAIN = 1.1
"""Speed-ups below this factor are not worth a note: a forecast is not that exact."""
ALONE = {"launch.strategy": "auto", "launch.stages": "auto", "launch.tensor_parallel": 1, "launch.sequence_parallel": 1}


def _faster_ways(request: Request, plan: Plan) -> list[str]:
    """Return a note where the forecast says that the same step is made clearly sooner by fewer cards or machines or
    another way to share the work, or as soon by fewer.
    """
    if not (now := plan.seconds_per_step):
        return []

    def speeds(ways: list[tuple[str, Request]]) -> list[tuple[float, str]]:
        plans = [(words, try_plan(request, changed)) for words, changed in ways]
        return [
            (other.seconds_per_step or math.inf, words)
            for words, other in plans
            if isinstance(other, Plan)
            and other.global_batch_size == plan.global_batch_size
            and ("8bit" in plan.optim or "8bit" not in other.optim)  # else it is not the same step
        ]

    smaller = sorted(_fewer(request), key=lambda way: len(way[1].ranks.devices))[:MOST_TRIED]
    if plan.activation_offload:  # perhaps only the others need it
        off = {"train.activation_offload": "off"}
        smaller += [(f"{words} with {_typed(off)}", changed.with_keys(off)) for words, changed in smaller]
    fewer = speeds(smaller)
    best, words = min([*fewer, *speeds(_other_ways(request, plan))], default=(math.inf, ""))
    if now > CLEAR_GAIN * best:
        return [f"FASTER {words}: {figure(best)} s a step instead of {figure(now)} s"]
    return [
        f"AS FAST with less, {words}: {figure(as_fast)} s a step" for as_fast, words in fewer if as_fast <= GAIN * now
    ][:1]


def _other_ways(request: Request, plan: Plan) -> list[tuple[str, Request]]:
    """Return requests in which all ranks share the work otherwise: as replicas, by shards, slices or stages, or with
    recomputation where ranks gather shards, which then happens less often, for larger micro-batches.
    """
    config, command, ways = request.config, request.launch.command_strategy, list[tuple[str, Request]]()
    if plan.gathers and config.train.gradient_checkpointing == "auto" and not plan.gradient_checkpointing:
        ways.append((f"with {_typed(RECOMPUTED)}", request.with_keys(RECOMPUTED)))
    if plan.world_size == 1:
        return ways
    free, where = request, ""
    if command not in ("auto", "ddp"):
        free, where = replace(request, launch=request.launch.without_json("auto")), " (make train-distributed)"
    between = "auto" if config.launch.strategy == "auto" and not where else "ddp"
    sizes = [size for size in (2, 4, 8) if math.gcd(*request.ranks.nodes) % size == 0]
    layouts: list[dict[str, Any]] = [{"launch.strategy": strategy} for strategy in ("ddp", "fsdp2", "pipeline")]
    layouts += [{"launch.strategy": between, key: size} for key in (TENSOR_KEY, KEY) for size in sizes]
    for layout in layouts:
        keys = (ALONE | layout).items()
        if typed := {key: value for key, value in keys if value != getattr(config.launch, key.partition(".")[2])}:
            ways.append((f"with {_typed(typed)}{where}", free.with_keys(typed)))
    return ways


def _fewer(request: Request) -> list[tuple[str, Request]]:
    """Return requests with one machine (or, on a single machine, one card) removed, and with it alone.

    Like units count once, and of like cards in one machine only a single card is considered.
    """
    ranks, hardware, cpu = request.ranks, request.hardware, request.hardware.kind == "cpu"
    several, network = len(ranks.nodes) > 1, request.hardware.network
    groups = list(map(ranks.ranks_of, range(len(ranks.nodes)))) if several else [(rank,) for rank in range(ranks.local)]
    units = [tuple(ranks.devices[rank] for rank in group) for group in groups]
    requests: list[tuple[str, Request]] = []
    for place, unit in enumerate(units):
        if len(units) < 2 or (cpu and not several) or unit in units[:place]:
            continue
        name = f"node {place} ({ranks.name_of(place)})" if several else f"rank {place} ({unit[0].name})"
        others = [*units[:place], *units[place + 1 :]]
        apart = several or network is not None or len(set(units)) > 1
        ways = [(f"on {name} alone", [unit])]
        ways += [(f"without {name}", others)] if apart and len(others) > 1 else []
        for words, staying in ways:
            devices = tuple(device for unit_devices in staying for device in unit_devices)
            nodes = len(staying) if several else 1
            launch = replace(
                request.launch,
                num_gpus=len(devices) if cpu else None,
                num_nodes=nodes,
                node_rank=0,
                node_devices=tuple(staying) if nodes > 1 else (),
            )
            fewer = replace(
                request,
                launch=launch if len(devices) > 1 else launch.without_json("single"),
                hardware=replace(
                    hardware,
                    devices=devices[:1] if cpu else devices,
                    described=True,
                    network=network if len(staying) > 1 else None,
                ),
            )
            requests.append((words, fewer if len(devices) > 1 else fewer.with_keys(ALONE)))
    return requests


def ways_out(request: Request, plan: Plan, rank: RankPlan) -> tuple[Remedy, ...]:
    """Return what would need less memory than a rank of this plan, which ran out although it should have fitted.

    Sizes come from the formulas.
    """
    need = rank_memory(request.config, request.shape, plan, rank.micro_batch)
    return remedies(with_machines(request), plan, rank.micro_batch, sum(need.values()))
