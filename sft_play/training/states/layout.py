"""Describe how each strategy lays out parameters: the optimizer's tensors, the parameters in them, and their bytes.

`ShardProof` records what each rank really held.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import TrainerCallback

from sft_play.errors import CheckpointError
from sft_play.files import side_file, write_json
from sft_play.model.parallel import local_part, slice_of
from sft_play.training.ranks import TrainContext
from sft_play.training.states.files import Share


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A tensor that the optimizer steps on this rank."""

    label: str
    key: Tensor
    """Key of the optimizer's `state`."""
    local: Tensor
    """A writable view of the values [elements of this rank]: the master copy if weights are less precise."""
    shares: tuple[Share, ...]
    """Parts of parameters, without padding."""
    master: bool
    """Whether `local` is more precise than the weights."""
    wrap: Callable[[Tensor], Tensor]
    """[elements] -> a state tensor in the optimizer's form."""
    unwrap: Callable[[Tensor], Tensor | None]
    """The inverse; `None` for a state without one number per element."""


def _nothing() -> None:
    """Do nothing, since there is only one copy of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A trainer's bundles and the optimizer that steps them."""

    optimizer: Any
    bundles: tuple[Bundle, ...]
    sharded: bool
    """Whether ranks hold different parts; otherwise all hold the same, and rank 0 writes it."""
    begin: Callable[[], None] = _nothing
    """Called before values are restored; collective."""
    finish: Callable[[], None] = _nothing
    """Copies the values into the weights that the model computes with; collective."""


def layout_of(trainer: Any) -> Layout:
    """Return the layout of this rank's trainable parameters and states. Raise `CheckpointError` if not savable."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    if trainer.is_deepspeed_enabled:
        zero = trainer.model_wrapped.optimizer
        if hasattr(zero, "fp16_partitioned_groups_flat"):
            return _zero3(zero, names)
        return _zero12(zero, names)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    wrapped = [parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) in names]
    make = _fsdp2 if trainer.is_fsdp_enabled else _plain
    return Layout(
        optimizer=optimizer,
        bundles=tuple(make(names[id(parameter)], parameter) for parameter in wrapped),
        sharded=bool(trainer.is_fsdp_enabled) or trainer.parts is not None,
    )


def _plain(name: str, parameter: Tensor) -> Bundle:
    if not parameter.data.is_contiguous():
        parameter.data = parameter.data.contiguous()
    shape, part = tuple(parameter.shape), slice_of(parameter)
    share = Share.complete(name, shape)
    if part is not None:
        width = 1 if part.dim else math.prod(shape[1:])
        share = Share(
            name=name, shape=part.shape, start=part.start * width, end=part.end * width, columns=part.dim == 1
        )
    return Bundle(
        label=name,
        key=parameter,
        local=parameter.data.view(-1),
        shares=(share,),
        master=False,
        wrap=lambda flat: flat.view(shape),
        unwrap=lambda state: state.reshape(-1) if _per_element(state, shape) else None,
    )


def _per_element(state: Tensor, shape: Sequence[int]) -> bool:
    return state.is_floating_point() and tuple(state.shape) == tuple(shape)


def _fsdp2(name: str, parameter: Any) -> Bundle:
    """Return the bundle of a DTensor sharded by rows: the rows of a rank are one range of elements."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return _plain(name, parameter)
    part = slice_of(parameter)
    dim = part.dim if part is not None else 0
    if any(isinstance(placement, Shard) and placement.dim != dim for placement in parameter.placements):
        raise CheckpointError(
            f"`{name}` is not sharded by rows ({parameter.placements}), so its states cannot be saved"
        )
    mesh, placements, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    local = parameter.data.to_local()
    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    first, width = part.start if part is not None else 0, 1 if dim else math.prod(shape[1:])
    start = first * width + (min(offset[dim] * width, parameter.numel()) if shape else 0)
    end = start + (local.shape[1] if dim else local.numel())
    share = Share(name=name, shape=part.shape if part else tuple(shape), start=start, end=end, columns=dim == 1)
    rows = local.shape
    return Bundle(
        label=name,
        key=parameter,
        local=local.view(-1),
        shares=(share,),
        master=False,
        wrap=lambda flat: DTensor.from_local(
            flat.view(rows), mesh, placements, run_check=False, shape=shape, stride=stride
        ),
        unwrap=lambda state: (
            state.to_local().reshape(-1) if isinstance(state, DTensor) and _per_element(state, shape) else None
        ),
    )


def _flat(label: str, key: Tensor, shares: Sequence[Share], *, master: bool) -> Bundle:
    """Return the bundle of a flat DeepSpeed buffer."""
    return Bundle(
        label=label,
        key=key,
        local=key.data,
        shares=tuple(shares),
        master=master,
        wrap=lambda flat: flat,
        unwrap=lambda state: state if _per_element(state, key.shape) else None,
    )


def _zero12(zero: Any, names: dict[int, str]) -> Layout:
    """Return the layout of ZeRO-1 and 2: a group's parameters in one buffer, in equal parts, padded at the end."""
    bundles = []
    for index, process_group in enumerate(zero.real_dp_process_group):
        rank = distributed.get_rank(process_group)
        if hasattr(zero, "bf16_groups"):  # ZeRO-1 in bf16 with `data_types.grad_accum_dtype: fp32`
            parameters, flat = zero.bf16_groups[index], zero.fp32_groups_flat_partition[index]
            offsets = list(itertools.accumulate((parameter.numel() for parameter in parameters[:-1]), initial=0))
        else:
            parameters, flat = zero.round_robin_bit16_groups[index], zero.single_partition_of_fp32_groups[index]
            offsets = zero.round_robin_bit16_offsets[index]
        begin, shares = rank * flat.numel(), []
        for parameter, offset in zip(parameters, offsets, strict=True):
            complete = Share.complete(names[id(parameter)], tuple(parameter.shape))
            start, end = max(0, begin - offset), min(complete.end, begin + flat.numel() - offset)
            if start < end:
                shares.append(replace(complete, start=start, end=end, offset=offset + start - begin))
        bundles.append(_flat(f"group-{index}", flat, shares, master=flat.dtype != parameters[0].dtype))
    return Layout(optimizer=zero.optimizer, bundles=tuple(bundles), sharded=True, finish=zero.update_lp_params)


def _zero3(zero: Any, names: dict[int, str]) -> Layout:
    """Return the layout of ZeRO-3: each parameter in equal parts, the last padded; a rank's parts in one buffer."""
    bundles = []
    for index, (parameters, flat) in enumerate(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)):
        rank, world = zero._get_sub_group_partition_rank(index), zero._get_sub_group_partition_count(index)
        shares, offset = [], 0
        for parameter in parameters:
            complete, size = (
                Share.complete(names[id(parameter)], tuple(parameter.ds_shape)),
                parameter.partition_numel(),
            )
            assert size == -(-complete.end // world), (complete, size, world)
            start, end = rank * size, min((rank + 1) * size, complete.end)
            if start < end:
                shares.append(replace(complete, start=start, end=end, offset=offset))
            offset += size
        bundles.append(_flat(f"group-{index}", flat, shares, master=flat.dtype != parameters[0].dtype))

    def finish() -> None:
        for index in range(len(bundles)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        zero.checkpoint_event_epilogue()

    return Layout(
        optimizer=zero.optimizer,
        bundles=tuple(bundles),
        sharded=True,
        begin=zero.checkpoint_event_prologue,
        finish=finish,
    )


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the complete parameter, of which a rank may hold a part."""
    part = slice_of(parameter)
    return part.shape if part else tuple(getattr(parameter, "ds_shape", parameter.shape))


def count_bytes(model: Any, optimizer: Any) -> dict[str, int]:
    """Return the bytes of distinct storages on this rank: of weights, and of the optimizer (states, fp32 masters)."""
    engine, inner = getattr(optimizer, "optimizer", optimizer), inner_optimizer(optimizer)
    weights = [held_part(parameter) for parameter in model.parameters()]
    mine = {storage_of(tensor) for tensor in weights}
    tensors = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
    tensors += getattr(engine, "fp32_partitioned_groups_flat", [])  # ZeRO-3's masters
    others = [tensor for tensor in map(held_part, tensors) if storage_of(tensor) not in mine]
    return {"weights": _storage_bytes(weights), "optimizer": _storage_bytes(others)}


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's and DeepSpeed's wrappers."""
    engine = getattr(optimizer, "optimizer", optimizer)
    return getattr(engine, "optimizer", engine)


def held_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor` as a plain tensor: a DTensor's shard, ZeRO-3's partition, or all of it."""
    partition: Tensor | None = getattr(tensor, "ds_tensor", None)
    return local_part(tensor) if partition is None else partition


def storage_of(tensor: Tensor) -> int:
    """Return the address of this rank's part of `tensor`, since a DTensor itself has none."""
    return int(held_part(tensor).untyped_storage().data_ptr())


def _storage_bytes(tensors: list[Tensor]) -> int:
    return sum({storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


ROWS_NOTED = 100_000
"""The newest trained rows that each rank remembers."""


class ShardProof(TrainerCallback):
    """Count what this rank's own tensors hold at its first update, as proof of sharding, and record its rows."""

    def __init__(self) -> None:
        self.counts: dict[str, Any] = {}
        self.rows_trained: deque[int] = deque(maxlen=ROWS_NOTED)
        self.rows_scored: list[int] = []
        """Rows of the newest evaluation."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **references: Any) -> None:
        parameters = list(references["model"].parameters())
        self.counts["parameters"] = {
            kind: sum(held_part(parameter).numel() for parameter in parameters if parameter.requires_grad == trained)
            for kind, trained in (("trainable", True), ("frozen", False))
        }
        engine = getattr(references["optimizer"], "optimizer", None)
        if hasattr(engine, "averaged_gradients"):  # DeepSpeed steps inside the backward pass, before any callback
            self._count_before_step(engine, references["model"])

    def _count_before_step(self, engine: Any, model: Any) -> None:
        step = engine.step

        def counted(*arguments: Any, **named: Any) -> Any:
            self.counts["gradients"] = count_gradients(model, engine)
            engine.step = step
            return step(*arguments, **named)

        engine.step = counted

    def on_substep_end(self, args: Any, state: Any, control: Any, **references: Any) -> None:
        if "gradients_between" not in self.counts:  # does not see gradients that FSDP2 keeps unsharded
            self.counts["gradients_between"] = count_gradients(references["model"], references["optimizer"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **references: Any) -> None:
        if "gradients" not in self.counts:
            self.counts["gradients"] = count_gradients(references["model"], references["optimizer"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **references: Any) -> None:
        if "optimizer" not in self.counts:
            optimizer_states = inner_optimizer(references["optimizer"]).state.values()
            moments = [
                moment
                for state in optimizer_states
                for moment in state.values()
                if torch.is_tensor(moment) and moment.dim() > 0
            ]
            self.counts["optimizer"] = sum(held_part(moment).numel() for moment in moments)
            self.counts["bytes"] = count_bytes(references["model"], references["optimizer"])

    def save(self, context: TrainContext) -> None:
        """Write the counts with the ids of the rows that this rank trained and scored."""
        path = context.run.rank_holdings(context.ranks.rank)
        with side_file(path, "what a rank holds"):
            write_json(
                path, self.counts | {"rows_trained": sorted(self.rows_trained), "rows_scored": sorted(self.rows_scored)}
            )


def count_gradients(model: Any, optimizer: Any) -> int:
    """Return the number of gradient elements on this rank just before the update."""
    averaged = getattr(optimizer, "averaged_gradients", None)
    if averaged:  # ZeRO keeps this rank's share of the reduced gradients here
        return sum(int(g.numel()) for group in averaged.values() if group for g in group if g is not None)
    return sum(held_part(p.grad).numel() for p in model.parameters() if p.grad is not None)
