"""Gradients in fewer bytes on the wire (`launch.compression`), as communication hooks of DDP that gloo and NCCL both take.

- `fp16`, `bf16`: each bucket travels in 16 bits. Torch's own hooks do the same, but its bf16 hook insists on NCCL, and its fp16 hook
  casts before it scales: gradients below 6e-5 lose digits and those above 65,504 become infinite.
- `powersgd`: matrices travel as factors of low rank with error feedback (Vogels et al. 2019, arXiv 1905.13727). Torch's own hook keeps
  its states by bucket, which a resumed run cuts otherwise, and starts collective operations from callbacks, whose order gloo does not
  fix. This one keeps them by parameter, so that a checkpoint can hold them, and sends two messages after the last bucket.

A hook is called only where gradients are synchronised: once for each bucket and optimizer step.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its types.
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket
from torch.futures import Future

from sft_play.plan.exchange import powersgd_elements

FP16_SCALE = 1024.0
"""Gradients are multiplied by it on the wire as fp16, and divided again: three digits from 6e-8 to 64 instead of from 6e-5 to 65,504.

Gradients of a mean over tokens are small: see docs/slow-networks.md for how many a scale of one would lose.
"""
FP16_MOST = 65504.0
PLAIN_STEPS = 10
"""Optimizer steps at a run's start (those of the warm-up, where they are more) before `powersgd` begins."""
ERROR, BASIS = "powersgd_error", "powersgd_basis"
"""States of a parameter in a checkpoint: what this rank has not sent yet, and the factor that the next step starts from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrow:
    """How numbers travel in 16 bits."""

    dtype: torch.dtype
    scale: float = 1.0
    """A power of two: it costs no digit."""
    bounded: bool = False
    """Whether finite numbers beyond fp16's range are held at its end instead of becoming infinite."""

    def pack(self, values: Tensor, ranks: int) -> Tensor:
        """Returns this rank's part of the average over `ranks`, in 16 bits. What is no number stays none."""
        part = values * (self.scale / ranks)
        if self.bounded:
            most = FP16_MOST / ranks  # so that a sum cannot overflow either
            part = torch.where(part.isfinite(), part.clamp(-most, most), part)
        return part.to(self.dtype)

    def unpack(self, summed: Tensor, into: Tensor) -> Tensor:
        """Writes the sum over ranks of what `pack` returned into `into`, and returns it."""
        into.copy_(summed)
        return into.mul_(1.0 / self.scale) if self.scale != 1.0 else into


def narrow_of(kind: str, *, scaled: bool) -> Narrow | None:
    """Returns how numbers travel under `launch.compression: kind`; `None` where in their own type.

    `scaled`: whether a loss scaler has made gradients fit fp16 already, and must see where they overflow.
    """
    if kind == "fp16":
        return Narrow(dtype=torch.float16) if scaled else Narrow(dtype=torch.float16, scale=FP16_SCALE, bounded=True)
    return Narrow(dtype=torch.bfloat16) if kind == "bf16" else None


def average_(values: Tensor, narrow: Narrow | None) -> Tensor:
    """Turns fp32 `values` into their mean over all ranks, in place. Collective."""
    ranks = distributed.get_world_size()
    if narrow is None:
        distributed.all_reduce(values.div_(ranks))
        return values
    sent = narrow.pack(values, ranks)
    distributed.all_reduce(sent)
    return narrow.unpack(sent, values)


def narrow_hook(state: Narrow, bucket: GradBucket) -> Future[Tensor]:
    """Averages a bucket in 16 bits; gradients that have 16 bits already travel as they are."""
    buffer = bucket.buffer()
    if buffer.element_size() <= state.dtype.itemsize:
        return plain(buffer)
    sent = state.pack(buffer, distributed.get_world_size())
    future: Future[Any] = distributed.all_reduce(sent, async_op=True).get_future()

    def unpacked(done: Future[Any]) -> Tensor:
        return state.unpack(done.value()[0], buffer)

    return future.then(unpacked)


def plain(buffer: Tensor) -> Future[Tensor]:
    """Averages a bucket as it is."""
    buffer.div_(distributed.get_world_size())
    future: Future[Any] = distributed.all_reduce(buffer, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


@dataclass(kw_only=True, slots=True)
class Waiting:
    """A bucket whose average is computed with those of all others."""

    buffer: Tensor
    names: list[str]
    gradients: list[Tensor]
    """Views of `buffer`."""
    average: Future[Tensor]


@dataclass(kw_only=True, slots=True)
class PowerSgd:
    """Rank-`rank` approximations of the mean gradient, with error feedback and warm start."""

    rank: int
    names: Mapping[int, str]
    """`id` of a trained parameter -> its name."""
    seed: int
    plain_steps: int = PLAIN_STEPS
    step: int = 0
    """Optimizer steps that have been made; the trainer sets it."""
    error: dict[str, Tensor] = field(default_factory=dict)
    """[rows, columns], fp32: what this rank's gradients had beyond what was sent."""
    basis: dict[str, Tensor] = field(default_factory=dict)
    """[columns, rank], fp32: the same on every rank."""
    waiting: list[Waiting] = field(default_factory=list)
    computed: Callable[[], None] = lambda: None
    """Called when all of this rank's gradients are there, before it waits for those of other ranks."""
    undoable: bool = False
    """Whether an update may be left out after its gradients were sent (`train.spike_guard: skip`)."""
    before: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
    """Error and basis before the last exchange, until `settle`. That takes no more memory than the exchange itself."""

    def settle(self, *, made: bool) -> None:
        """Call when it is known whether the update of the last exchange is made: one that is left out leaves no trace here either."""
        if self.before is not None and not made:
            self.error, self.basis = self.before
        self.before = None

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether a parameter's gradient travels as factors."""
        return self.numbers_sent(shape) < math.prod(shape)

    def numbers_sent(self, shape: Sequence[int]) -> int:
        """Returns how many numbers a gradient travels as."""
        return powersgd_elements(*matrix_shape(shape), self.rank)

    def start_of(self, name: str, columns: int, rank: int, device: torch.device) -> Tensor:
        """Returns the first basis of a parameter, [columns, rank]: drawn from its name, so that every rank draws the same."""
        chance = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
        return torch.randn(columns, rank, generator=chance).to(device)

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Returns what a checkpoint keeps: state -> parameter -> tensor. `ERROR` is this rank's own."""
        return {ERROR: self.error, BASIS: self.basis}


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns rows and columns of a parameter as a matrix; a vector is one row, which is never compressed."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def powersgd_hook(state: PowerSgd, bucket: GradBucket) -> Future[Tensor]:
    """Averages all buckets when the last one is there, by two messages, in a fixed order."""
    buffer = bucket.buffer()
    if state.step < state.plain_steps:
        return plain(buffer)
    average: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
    names = [state.names[id(parameter)] for parameter in bucket.parameters()]
    state.waiting.append(Waiting(buffer=buffer, names=names, gradients=bucket.gradients(), average=average))
    if bucket.is_last():
        state.computed()  # every gradient of this rank is there: DDP calls hooks in order, and this is the last one
        state.before = (dict(state.error), dict(state.basis)) if state.undoable else None
        waiting, state.waiting = state.waiting, []
        average_low_rank(state, {name: one for w in waiting for name, one in zip(w.names, w.gradients, strict=True)})
        for one in waiting:
            one.average.set_result(one.buffer)
    return average


def average_low_rank(state: PowerSgd, gradients: Mapping[str, Tensor]) -> None:
    """Turns gradients into their mean over all ranks (of matrices: into its approximation), in place. Collective.

    M = gradient + error; P = orthogonal basis of sum(M Q); Q = mean(M^T P); the average is P Q^T, and the error M - P Q^T.
    """
    ranks = distributed.get_world_size()
    order = sorted(gradients)  # buckets differ between a run's first step and its later ones
    others = [name for name in order if not state.compresses(gradients[name].shape)]
    chosen = [name for name in order if state.compresses(gradients[name].shape)]
    matrices, bases = {}, {}
    for name in chosen:
        flat = gradients[name].reshape(matrix_shape(gradients[name].shape)).float()
        matrices[name] = flat + state.error[name] if name in state.error else flat.clone()
        columns, rank = flat.shape[1], min(state.rank, *flat.shape)
        start = state.basis.get(name)
        bases[name] = state.start_of(name, columns, rank, flat.device) if start is None else start
    bases = orthogonal(bases)
    first = [gradients[name].float() / ranks for name in others] + [matrices[name] @ bases[name] for name in chosen]
    first = summed(first)
    for name, mean in zip(others, first, strict=False):
        gradients[name].copy_(mean)
    rows = orthogonal(dict(zip(chosen, first[len(others) :], strict=True)))
    second = summed([matrices[name].T @ rows[name] / ranks for name in chosen])
    for name, basis in zip(chosen, second, strict=True):
        approximation = rows[name] @ basis.T
        gradients[name].copy_(approximation.view_as(gradients[name]))
        state.error[name] = matrices[name].sub_(approximation)
        state.basis[name] = basis


def summed(parts: list[Tensor]) -> list[Tensor]:
    """Returns fp32 tensors summed over all ranks, sent as one message. Collective; nothing where there are none."""
    if not parts:
        return []
    flat = torch.cat([part.reshape(-1) for part in parts])
    distributed.all_reduce(flat)
    return [one.view(part.shape).clone() for one, part in zip(flat.split([part.numel() for part in parts]), parts, strict=True)]


def orthogonal(matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns orthonormal bases of the columns of each matrix; those of one shape are computed together."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for name, matrix in matrices.items():
        shapes.setdefault(tuple(matrix.shape), []).append(name)
    found: dict[str, Tensor] = {}
    for names in shapes.values():
        bases = torch.linalg.qr(torch.stack([matrices[name] for name in names])).Q
        found.update(zip(names, bases, strict=True))
    return found


def register(trainer: Any) -> PowerSgd | None:
    """Registers the hook of `launch.compression` with a trainer's wrapped model; returns PowerSGD's states where it has some.

    Local steps send no gradients: there the differences of weights are narrowed (`training.local_steps`).
    """
    launch, plan = trainer.config.launch, trainer.plan
    if plan.strategy != "ddp" or plan.world_size == 1 or launch.compression == "none" or launch.local_steps > 1:
        return None
    model = trainer.model_wrapped
    narrow = narrow_of(launch.compression, scaled=bool(trainer.args.fp16))
    if narrow is not None:
        model.register_comm_hook(narrow, narrow_hook)
        return None
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    state = PowerSgd(
        rank=launch.powersgd_rank,
        names=names,
        seed=trainer.config.train.seed,
        plain_steps=max(PLAIN_STEPS, plan.warmup_steps or 0),
        step=trainer.state.global_step,
        computed=trainer.balancer.computed,
        undoable=trainer.config.train.spike_guard == "skip",
    )
    model.register_comm_hook(state, powersgd_hook)
    return state
