"""Ways to need less memory, each planned as if it were typed; and where in a step the peak stands and what it is made of. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from sft_play.config.layers import shipped
from sft_play.config.schema import Config
from sft_play.plan.batch import rows_each
from sft_play.plan.choices import with_chunks
from sft_play.plan.hardware import GIB, HEADROOM
from sft_play.plan.memory import OPTIMIZER_BYTES, rank_memory, rank_moments
from sft_play.plan.network import slow_network
from sft_play.plan.plan import LaunchRequest, Plan, RankPlan, Setup, least_room, tightest
from sft_play.plan.request import SHORTEST_ROW, Decide, DoesNotFitError, Remedy, Request, try_plan
from sft_play.plan.shape import ModelShape
from sft_play.plan.throughput import token_cost

MOST_REMEDIES = 6


def with_remedies(request: Request, decide: Decide, error: DoesNotFitError) -> DoesNotFitError:
    """Return the error with what would make it fit, in the order that this hardware calls for: quantise before sharing out weights."""
    need, slow = error.need_bytes, slow_network(request)

    def order(remedy: Remedy) -> tuple[bool, bool, bool]:
        shares_out = remedy.override.startswith(("make train-fsdp", "make train-deepspeed"))
        return not remedy.fits, bool(slow) and shares_out, not remedy.override.startswith("TUNING_MODE")

    in_use = tuple(
        f"other programs hold {(device.memory_bytes - device.free_bytes) / GIB:.1f} of GPU {device.number}'s "
        f"{device.memory_bytes / GIB:.1f} GiB (`make memory-check` names them); without them it would fit"
        for device in request.hardware.devices
        if device.number is not None and HEADROOM["cuda"] * device.free_bytes < need <= HEADROOM["cuda"] * device.memory_bytes
    )
    found = remedies(request, decide, error.setup, error.micro_batch, need)
    return error.with_remedies(tuple(sorted(found, key=order)), notes=in_use)


def remedies(request: Request, decide: Decide, setup: Setup, rows: int, before: int) -> tuple[Remedy, ...]:
    """Return what would need less than the `before` bytes of `rows` rows in this setup: what fits first, then the cheapest in speed."""
    found = []
    for text, changed in _overrides(request, setup, rows):
        remedy = _try_override(request, changed, text, decide, setup, rows, before)
        # Recomputation is turned on as well only where it must be.
        if request.config.train.gradient_checkpointing is False and not (remedy and remedy.fits):
            saving = replace(changed.config.train, gradient_checkpointing=True)
            both = replace(changed, config=replace(changed.config, train=saving))
            option = "TRAIN_GRADIENT_CHECKPOINTING=true"
            if option not in text:
                remedy = _try_override(request, both, f"{text} {option}", decide, setup, rows, before) or remedy
        found += [remedy] if remedy else []
    found.sort(key=lambda r: (not r.fits, _price(r), r.need_bytes))
    return tuple(found[:MOST_REMEDIES])


def remedies_for_loading(request: Request, decide: Decide) -> list[str]:
    """Return what to type, adapters first, where the machine's memory is too small for all weights; each is planned."""
    config, options = request.config, list[tuple[str, Request]]()
    if config.tuning.mode != "lora":
        adapters = replace(config, tuning=replace(config.tuning, mode="lora"))
        options.append(("TUNING_MODE=lora", request.with_config(adapters, "tuning.mode")))
    if request.launch.command_strategy != "zero":
        shards = replace(config, launch=replace(config.launch, strategy="zero3"))
        launch = replace(request.launch, command_strategy="zero", zero_stage=None)
        text = "make train-deepspeed LAUNCH_STRATEGY=zero3"
        options.append((text, replace(request, launch=launch).with_config(shards, "launch.strategy")))
    found = ((text, try_plan(request, changed, decide)) for text, changed in options)
    return [text for text, plan in found if isinstance(plan, Plan) and not plan.remedies]


def _try_override(
    request: Request, changed: Request, text: str, decide: Decide, setup: Setup, rows: int, before: int
) -> Remedy | None:
    """Return what an override comes to; `None` where it is refused for another reason, or needs no less."""
    plan = try_plan(request, changed, decide)
    if plan is None:
        return None
    if isinstance(plan, DoesNotFitError):
        need, capacity, other, rows, fits = plan.need_bytes, plan.capacity_bytes, plan.setup, plan.micro_batch, False
    else:
        rank = least_room(plan.ranks)
        need, capacity, other, fits = rank.peak_bytes, rank.capacity_bytes, plan, not plan.remedies
    if need >= before:
        return None
    slower = None
    alike = (other.strategy, other.copies, other.sequence_parallel) == (setup.strategy, setup.copies, setup.sequence_parallel)
    if alike and not other.offload_parameters:
        device = min(request.hardware.devices, key=lambda one: one.peak_flops or 0.0)
        now = token_cost(request.config, request.shape, setup, rows, device)
        slower = token_cost(changed.config, request.shape, other, rows, device) / now
    return Remedy(override=text, need_bytes=need, saving_bytes=before - need, fits=fits and need <= capacity, slower=slower)


def _overrides(request: Request, setup: Setup, rows: int) -> list[tuple[str, Request]]:
    """Return everything that could be changed: what to type, and what it makes of the request."""
    config, launch, train = request.config, request.launch, request.config.train
    whole = replace(launch, halvings=0)
    pinned = config
    if request.divides:  # the micro-batch whose memory is compared
        pinned = replace(config, train=replace(train, batch_size=rows))
        if train.global_batch_size != "auto" and rows > rows_each(train.global_batch_size, setup.data_world):
            # Of unequal ranks the largest micro-batch is not for all.
            pinned = replace(pinned, train=replace(pinned.train, global_batch_size=rows * setup.data_world))
    halved = whole if request.divides else launch
    found: list[tuple[str, Request]] = []

    def add(text: str, changed: Config, *keys: str, launch: LaunchRequest = halved) -> None:
        found.append((text, replace(request, launch=launch).with_config(changed, *keys)))

    if rows > 1:
        typed = train.batch_size != "auto", train.grad_accum != "auto"
        auto = {(True, False): "TRAIN_BATCH_SIZE=auto", (False, True): "TRAIN_GRAD_ACCUM=auto"}.get(typed)
        fewer = replace(train, batch_size=1 if auto else rows // 2, grad_accum="auto" if auto else train.grad_accum)
        add(auto or f"TRAIN_BATCH_SIZE={rows // 2}", replace(config, train=fewer), launch=whole)
    if not setup.gradient_checkpointing:
        saving = replace(pinned.train, gradient_checkpointing=True)
        add("TRAIN_GRADIENT_CHECKPOINTING=true", replace(pinned, train=saving))
    if setup.row_tokens > SHORTEST_ROW:
        short = max(SHORTEST_ROW, setup.row_tokens // 2)
        add(f"MODEL_MAX_SEQ_LEN={short}", replace(pinned, model=replace(config.model, max_seq_len=short)))
    for mode in ("lora", "qlora"):
        if config.tuning.mode not in (mode, "qlora"):
            tuned = replace(pinned, tuning=replace(config.tuning, mode=cast(Any, mode)))
            add(f"TUNING_MODE={mode}", tuned, "tuning.mode")
    if config.tuning.mode == "full" and setup.device == "cuda" and setup.precision == "bf16" and not setup.zero:
        narrow = replace(pinned.train, optim="adamw_bnb_8bit")
        narrowed = replace(pinned, model=replace(config.model, dtype="bfloat16"), train=narrow)
        add("MODEL_DTYPE=bfloat16 TRAIN_OPTIM=adamw_bnb_8bit", narrowed, "model.dtype", "train.optim")

    def add_strategy(command: str, strategy: str, launch: LaunchRequest) -> None:
        if config.launch.strategy in ("auto", strategy):
            add(command, pinned, launch=launch)
        else:
            other = replace(pinned, launch=replace(config.launch, strategy=cast(Any, strategy)))
            add(f"{command} LAUNCH_STRATEGY={strategy}", other, "launch.strategy", launch=launch)

    if config.tuning.mode != "qlora" and setup.world_size > 1 and setup.strategy in ("ddp", "zero1", "zero2"):
        held = replace(halved, command_strategy="fsdp2", zero_stage=None, offload_optimizer=False, offload_parameters=False)
        add_strategy("make train-fsdp", "fsdp2", held)
    if config.tuning.mode != "qlora" and setup.device == "cuda" and not setup.offload_parameters:
        held = replace(halved, command_strategy="zero", zero_stage=3, offload_optimizer=True, offload_parameters=True)
        add_strategy(f"make train-deepspeed DEEPSPEED_CONFIG={shipped('deepspeed/zero3_offload.json')}", "zero3", held)
    alone = setup.strategy == "ddp" and setup.copies == setup.sequence_parallel == 1 and config.launch.strategy in ("auto", "ddp")
    if alone and setup.world_size > 1:
        groups = setup.world_size // request.launch.num_nodes
        for key, value in (("strategy", "pipeline"), ("tensor_parallel", groups), ("sequence_parallel", groups)):
            other = replace(pinned, launch=replace(config.launch, **cast(Any, {key: value})))
            add(
                f"make train-distributed LAUNCH_{key.upper()}={value}",
                other,
                f"launch.{key}",
                launch=replace(halved, command_strategy="auto"),
            )
    return found


def _price(remedy: Remedy) -> float:
    """Return what orders remedies whose price arithmetic does not give: sharding costs some communication, offloading much."""
    if remedy.slower is not None:
        return max(1.0, remedy.slower)
    if "train-distributed" in remedy.override:  # slices and stages are for what nothing simpler makes fit
        return 2.0
    return 4.0 if "offload" in remedy.override else 1.3


WORTH_SAYING = GIB // 50
CHANGEABLE = {"update": ("optimizer", "gradients", "workspace"), "": ("activations", "recompute", "logits", "casts")}
"""Parts of which one is named as what the peak is made of: at the update, and at any other moment."""
NAMES = {"recompute": "the layer that is computed again", "casts": "the cast weights", "optimizer": "the optimizer's states"}


def with_peak(plan: Plan, config: Config, shape: ModelShape, moment: str = "", operation: str = "") -> Plan:
    """Return the plan with its peak in words; `moment` and `operation` as a trace found them, else the formula's worst moment."""
    rank = tightest(plan.ranks)
    setup = replace(plan, stage=rank.rank % len(plan.stages) if plan.stages else None)
    if not moment:
        moments = rank_moments(config, shape, setup, rank.worst_rows)
        moment = max(moments, key=lambda name: sum(moments[name].values()))
    remedy = _remedy(config, shape, setup, rank, moment)
    return replace(plan, peak_at=peak_in_words(moment, operation), peak_remedy=remedy)


def _remedy(config: Config, shape: ModelShape, setup: Setup, rank: RankPlan, moment: str) -> str | None:
    """Return what the peak is mostly made of and what would make that smaller, with the saving by formula."""
    part = max(CHANGEABLE.get(moment, CHANGEABLE[""]), key=lambda name: rank.memory_bytes.get(name, 0))
    if rank.memory_bytes.get(part, 0) < WORTH_SAYING:
        return None
    before = sum(rank_memory(config, shape, setup, rank.worst_rows).values())
    for words, other, rows in _changes(config, shape, setup, rank.worst_rows, part):
        saving = before - sum(rank_memory(config, shape, other, rows).values())
        if saving >= WORTH_SAYING:
            return f"{NAMES.get(part, f'the {part}')}: {words}, minus {saving / GIB:.1f} GiB"
    return None


def _changes(config: Config, shape: ModelShape, setup: Setup, rows: int, part: str) -> list[tuple[str, Setup, int]]:
    """Return (words, setup, rows) of what makes a part smaller, what costs least first."""
    found: list[tuple[str, Setup, int]] = []
    bf16_on_gpu = setup.device == "cuda" and setup.precision == "bf16" and config.tuning.mode == "full" and not setup.zero
    if part in ("optimizer", "gradients", "workspace"):
        if bf16_on_gpu and setup.optim not in OPTIMIZER_BYTES:
            found.append(("TRAIN_OPTIM=adamw_bnb_8bit", replace(setup, optim="adamw_bnb_8bit"), rows))
        return found
    if part == "logits" and not setup.loss_chunk:
        found.append(("chunk the loss", with_chunks(config, shape, setup), rows))
    if part == "casts" and bf16_on_gpu:
        found.append(("MODEL_DTYPE=bfloat16", replace(setup, weights_dtype="bfloat16"), rows))
    if part in ("activations", "casts") and not setup.gradient_checkpointing:
        found.append(("TRAIN_GRADIENT_CHECKPOINTING=true", replace(setup, gradient_checkpointing=True), rows))
    if rows > 1:
        found.append((f"TRAIN_BATCH_SIZE={rows // 2}", setup, rows // 2))
    shorter = max(SHORTEST_ROW, setup.row_tokens // 2)
    return [*found, (f"rows of at most {shorter} tokens", replace(setup, row_tokens=shorter), rows)]


MOMENTS = {
    "forward first": "in the first layer's forward pass", "forward middle": "in the forward pass",
    "forward last": "in the last layer's forward pass", "forward head": "where the logits and the loss are computed",
    "backward head": "where the gradient of the logits is computed", "backward last": "in the last layer's backward pass, all activations held",
    "backward middle": "in the backward pass", "backward first": "at the end of the backward pass, all gradients held",
    "update": "in the optimizer's update",
}  # fmt: skip


def peak_in_words(moment: str, operation: str) -> str:
    """Return where in the step the peak stands: the moment, and the operation of torch that reached it."""
    name = operation.removeprefix("aten.").removesuffix(".default")
    return MOMENTS.get(moment, moment) + (f" (`{name}`)" if name else "")
