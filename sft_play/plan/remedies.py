"""Where in a step the peak of memory is and what it is made of; and ways to need less, each planned as if it were typed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from sft_play.config.rules import check_rules
from sft_play.config.schema import Config
from sft_play.config.sources import shipped
from sft_play.errors import UserError
from sft_play.plan.batch import rows_each
from sft_play.plan.calibration import Calibration
from sft_play.plan.fit import SHORTEST_ROW, DoesNotFitError, Memory, Remedy
from sft_play.plan.hardware import GIB, HEADROOM, Hardware
from sft_play.plan.losses import with_chunks
from sft_play.plan.memory import OPTIMIZER_BYTES, Setup, rank_memory, rank_moments
from sft_play.plan.plan import Plan, RankPlan
from sft_play.plan.request import LaunchRequest
from sft_play.plan.shape import ModelShape
from sft_play.plan.strategies import slow_network
from sft_play.plan.throughput import token_cost
from sft_play.plan.trace_case import setup_of
from sft_play.plan.words import peak_in_words
from sft_play.runs.prepared import Prepared

MOST_REMEDIES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Everything that a plan is a function of."""

    config: Config
    typed: Callable[[str], bool]
    hardware: Hardware
    shape: ModelShape
    launch: LaunchRequest
    prepared: Prepared | None
    calibration: Calibration | None
    memory: Memory

    def changed(self, override: Override) -> Case:
        """Returns the case as it is with this override typed."""
        original, typed = self.config, self.typed

        def memory(config: Config, shape: ModelShape, setup: Setup, micro_batch: int) -> dict[str, int]:
            # What was traced is known of the configuration as it stood; memory depends on its tuning alone, beside the setup.
            return self.memory(original if config.tuning == original.tuning else config, shape, setup, micro_batch)

        return replace(
            self, config=override.config, launch=override.launch, memory=memory, prepared=self.prepared if override.keeps_data else None,
            typed=lambda key: typed(key) or key in override.keys,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """Something to type, and what it makes of configuration and launch."""

    text: str
    config: Config
    launch: LaunchRequest
    keys: frozenset[str] = frozenset()
    keeps_data: bool = True
    """Whether the rows that were prepared still hold: not at another length."""


def with_remedies(case: Case, decide: Callable[[Case], Plan], error: DoesNotFitError) -> DoesNotFitError:
    """Returns the error with what would make it fit, in the order that this hardware calls for: quantise before sharing out weights."""
    found = remedies(case, decide, error.setup, error.micro_batch, sum(error.parts.values()))
    network = slow_network(case.hardware, case.launch.num_nodes, error.setup.world_size)

    def order(remedy: Remedy) -> tuple[bool, bool, bool]:
        shares_out = remedy.override.startswith(("make train-fsdp", "make train-deepspeed"))
        return not remedy.fits, network is not None and shares_out, not remedy.override.startswith("TUNING_MODE")

    return error.with_remedies(tuple(sorted(found, key=order)), notes=_in_use(case.hardware, sum(error.parts.values())))


def _in_use(hardware: Hardware, need_bytes: int) -> tuple[str, ...]:
    """Returns which GPUs here would do if nothing else were on them."""
    return tuple(
        f"other programs hold {(device.memory_bytes - device.free_bytes) / GIB:.1f} of GPU {device.number}'s "
        f"{device.memory_bytes / GIB:.1f} GiB (`make memory-check` names them); without them it would fit"
        for device in hardware.devices
        if device.number is not None
        and HEADROOM["cuda"] * device.free_bytes < need_bytes <= HEADROOM["cuda"] * device.memory_bytes
    )


def remedies(case: Case, decide: Callable[[Case], Plan], setup: Setup, rows: int, before: int) -> tuple[Remedy, ...]:
    """Returns what would need less than the `before` bytes of `rows` rows in this setup: what fits first, then the cheapest in speed."""
    found = []
    for options in _overrides(case.config, case.launch, setup, rows):
        tried = [remedy for override in options if (remedy := _tried(case, decide, override, setup, rows, before))]
        # Recomputation is turned on beside it only where it must be.
        if tried := [remedy for remedy in tried if remedy.fits][:1] or tried[-1:]:
            found += tried
    found.sort(key=lambda r: (not r.fits, _price(r), r.need_bytes))
    return tuple(found[:MOST_REMEDIES])


def planned(case: Case, decide: Callable[[Case], Plan], override: Override) -> Plan | DoesNotFitError | None:
    """Returns the plan with an override, or how far it is from fitting; `None` where the override is refused when it is typed."""
    if {one.message for one in check_rules(override.config, {})} - {one.message for one in check_rules(case.config, {})}:
        return None
    try:
        return decide(case.changed(override))
    except DoesNotFitError as error:
        return error
    except UserError:
        return None


def _tried(case: Case, decide: Callable[[Case], Plan], override: Override, setup: Setup, rows: int, before: int) -> Remedy | None:
    """Returns what an override comes to; `None` where it is refused for another reason, or needs no less."""
    plan, changed = planned(case, decide, override), case.changed(override)
    if plan is None:
        return None
    if isinstance(plan, DoesNotFitError):
        need, capacity, other, fits = sum(plan.parts.values()), plan.capacity_bytes, plan.setup, False
        rows = plan.micro_batch
    else:
        tightest = max(plan.ranks, key=lambda rank: rank.peak_bytes - rank.capacity_bytes)
        need, capacity, other = tightest.peak_bytes, tightest.capacity_bytes, setup_of(plan)
        fits = not plan.remedies
    if need >= before:
        return None
    slower = None
    if other.strategy == setup.strategy and not other.offload_parameters:
        device = min(case.hardware.devices, key=lambda one: one.peak_flops or 0.0)
        now = token_cost(case.config, case.shape, setup, rows, device)
        slower = token_cost(changed.config, case.shape, other, rows, device) / now
    return Remedy(
        override=override.text, need_bytes=need, saving_bytes=before - need, fits=fits and need <= capacity, slower=slower
    )


def _overrides(config: Config, launch: LaunchRequest, setup: Setup, rows: int) -> list[list[Override]]:
    """Returns everything that could be changed; each as a list of what to try in turn."""
    pinned, whole = _pinned(config, rows, setup.world_size), replace(launch, halvings=0)
    halved = launch if pinned is config else whole
    found: list[list[Override]] = []

    def add(
        text: str, changed: Config, *, keys: tuple[str, ...] = (), request: LaunchRequest = halved, keeps_data: bool = True
    ) -> None:
        options = [Override(text=text, config=changed, launch=request, keys=frozenset(keys), keeps_data=keeps_data)]
        if config.train.gradient_checkpointing is False:
            saving = replace(changed, train=replace(changed.train, gradient_checkpointing=True))
            options.append(replace(options[0], text=f"{text} TRAIN_GRADIENT_CHECKPOINTING=true", config=saving))
        found.append(options)

    if rows > 1:
        typed = config.train.batch_size != "auto", config.train.grad_accum != "auto"
        auto = {(True, False): "TRAIN_BATCH_SIZE=auto", (False, True): "TRAIN_GRAD_ACCUM=auto"}.get(typed)
        fewer = replace(config.train, batch_size=1 if auto else rows // 2, grad_accum="auto" if auto else config.train.grad_accum)
        add(auto or f"TRAIN_BATCH_SIZE={rows // 2}", replace(config, train=fewer), request=whole)
    if not setup.gradient_checkpointing:
        text, saving = "TRAIN_GRADIENT_CHECKPOINTING=true", replace(pinned.train, gradient_checkpointing=True)
        found.append([Override(text=text, config=replace(pinned, train=saving), launch=halved)])
    if setup.row_tokens > SHORTEST_ROW:
        short = max(SHORTEST_ROW, setup.row_tokens // 2)
        shorter = replace(pinned, model=replace(config.model, max_seq_len=short))
        add(f"MODEL_MAX_SEQ_LEN={short}", shorter, keeps_data=False)
    for mode in ("lora", "qlora"):
        if config.tuning.mode not in (mode, "qlora"):
            tuned = replace(pinned, tuning=replace(config.tuning, mode=cast(Any, mode)))
            add(f"TUNING_MODE={mode}", tuned, keys=("tuning.mode",))
    if config.tuning.mode == "full" and setup.device == "cuda" and setup.precision == "bf16" and not setup.zero:
        narrow = replace(pinned.train, optim="adamw_bnb_8bit")
        narrowed = replace(pinned, model=replace(config.model, dtype="bfloat16"), train=narrow)
        add("MODEL_DTYPE=bfloat16 TRAIN_OPTIM=adamw_bnb_8bit", narrowed, keys=("model.dtype", "train.optim"))
    for text, strategy, request in _other_strategies(config, halved, setup):
        stated = "" if config.launch.strategy in ("auto", strategy) else f" LAUNCH_STRATEGY={strategy}"
        wanted = replace(config.launch, strategy=cast(Any, strategy)) if stated else config.launch
        add(f"{text}{stated}", replace(pinned, launch=wanted), keys=("launch.strategy",) if stated else (), request=request)
    return found


def _pinned(config: Config, rows: int, world: int) -> Config:
    """Returns the configuration with the micro-batch whose memory is compared, where nothing that was typed decides it."""
    if config.train.batch_size != "auto" or config.train.grad_accum != "auto":
        return config
    train, written = replace(config.train, batch_size=rows), config.train.global_batch_size
    if written != "auto" and rows > rows_each(written, world):  # of unequal ranks the largest micro-batch is not for all
        train = replace(train, global_batch_size=rows * world)
    return replace(config, train=train)


def _other_strategies(config: Config, launch: LaunchRequest, setup: Setup) -> list[tuple[str, str, LaunchRequest]]:
    """Returns (command, strategy, launch) of the ways to share out what a rank holds."""
    found = []
    if config.tuning.mode == "qlora":
        return []
    whole = replace(launch, zero_stage=None, offload_optimizer=False, offload_parameters=False)
    if setup.world_size > 1 and setup.strategy in ("ddp", "zero1", "zero2"):
        found.append(("make train-fsdp", "fsdp2", replace(whole, command_strategy="fsdp2")))
    if setup.device == "cuda" and not setup.offload_parameters:
        request = replace(launch, command_strategy="zero", zero_stage=3, offload_optimizer=True, offload_parameters=True)
        found.append((f"make train-deepspeed DEEPSPEED_CONFIG={shipped('deepspeed/zero3_offload.json')}", "zero3", request))
    return found


def _price(remedy: Remedy) -> float:
    """Orders remedies whose price arithmetic does not give: sharding costs some communication, offloading much."""
    if remedy.slower is not None:
        return max(1.0, remedy.slower)
    return 4.0 if "offload" in remedy.override else 1.3


# Where in a step a plan's peak stands, what it is mostly made of, and what would lower it, in words. Pure.


WORTH_SAYING = GIB // 50
CHANGEABLE = {"update": ("optimizer", "gradients", "workspace"), "": ("activations", "recompute", "logits", "casts")}
"""Parts of which one is named as what the peak is made of: at the update, and at any other moment."""
NAMES = {"recompute": "the layer that is computed again", "casts": "the cast weights", "optimizer": "the optimizer's states"}


def with_peak(plan: Plan, config: Config, shape: ModelShape, moment: str = "", operation: str = "") -> Plan:
    """Returns the plan with its peak in words; `moment` and `operation` as a trace found them, else the formula's worst moment."""
    setup = setup_of(plan)
    rank = tightest(plan)
    if not moment:
        moments = rank_moments(config, shape, setup, rank.worst_rows)
        moment = max(moments, key=lambda name: sum(moments[name].values()))
    remedy = _remedy(config, shape, setup, rank, moment)
    return replace(plan, peak_at=peak_in_words(moment, operation), peak_remedy=remedy)


def tightest(plan: Plan) -> RankPlan:
    """Returns the rank whose peak comes nearest to what it may use."""
    return max(plan.ranks, key=lambda rank: rank.peak_bytes / max(1, rank.capacity_bytes))


def _remedy(config: Config, shape: ModelShape, setup: Setup, rank: RankPlan, moment: str) -> str | None:
    """Returns what the peak is mostly made of and what would make that smaller, with the saving by formula."""
    part = _largest(rank.memory_bytes, CHANGEABLE.get(moment, CHANGEABLE[""]))
    if part is None:
        return None
    before = sum(rank_memory(config, shape, setup, rank.worst_rows).values())
    for words, other, rows in _changes(config, shape, setup, rank.worst_rows, part):
        saving = before - sum(rank_memory(config, shape, other, rows).values())
        if saving >= WORTH_SAYING:
            return f"{NAMES.get(part, f'the {part}')}: {words}, minus {saving / GIB:.1f} GiB"
    return None


def _largest(parts: Mapping[str, int], names: tuple[str, ...]) -> str | None:
    found = max(names, key=lambda name: parts.get(name, 0))
    return found if parts.get(found, 0) >= WORTH_SAYING else None


def _changes(config: Config, shape: ModelShape, setup: Setup, rows: int, part: str) -> list[tuple[str, Setup, int]]:
    """Returns (words, setup, rows) of what makes a part smaller, what costs least first."""
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
