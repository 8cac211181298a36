"""Train over slow networks: send gradients in fewer bytes (`launch.compression`), or take local steps.

Compression is a DDP communication hook for gloo and NCCL: each bucket is sent in 16 bits. Torch's own hooks do the
same, but its bf16 hook requires NCCL, and its fp16 hook casts before it scales, so that gradients below 6e-5 lose
digits and those above 65,504 become infinite.

Local steps (`launch.local_steps`) follow DiLoCo (Douillard et al. 2023, arXiv 2311.08105). Every rank takes its rows of
each global batch as usual, with the mean loss over *its own* label tokens, and updates its own weights by its own
optimizer. After every H steps, and after the last one,

    g = anchor - sum_i n_i w_i / sum_i n_i     n_i: label tokens of rank i since the last average
    v = momentum * v + g
    anchor = anchor - rate * (g + momentum * v)     Nesterov, as in torch.optim.SGD

and all continue from the anchor. Only trained weights are sent. Evaluations and checkpoints in between use the average
of the ranks' weights and change nothing: a resumed run equals the uninterrupted one to the bit, since a checkpoint
holds each rank's own weights and optimizer states. A step still exchanges some numbers (token counts, norms, stop
requests).
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with its types.
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from transformers import Trainer, TrainerCallback

from sft_play.data.batches import Batch
from sft_play.plan.memory import AVERAGED_AT_A_TIME
from sft_play.training.loss import IDLE, label_weight
from sft_play.training.ranks import TrainContext

FP16_SCALE = 1024.0
"""Factor of gradients when sent in fp16: three digits from 6e-8 to 64 instead of from 6e-5 to 65,504.

Gradients of a mean over tokens are small: a scale of one would lose many.
"""
FP16_MOST = 65504.0
ANCHOR, MOMENTUM, AVERAGE = "outer_anchor", "outer_momentum", "average"
"""A parameter's states in a checkpoint: two that all ranks share, and the average of their weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowFormat:
    """A 16-bit format in which numbers are sent."""

    dtype: torch.dtype
    scale: float = 1.0
    """A power of two, so that scaling costs no digit."""
    bounded: bool = False
    """Whether finite numbers beyond fp16's range are clamped instead of becoming infinite."""

    def pack(self, values: Tensor, ranks: int) -> Tensor:
        """Return this rank's part of the average over `ranks` in 16 bits; non-finite values stay non-finite."""
        part = values * (self.scale / ranks)
        if self.bounded:
            limit = FP16_MOST / ranks  # so that a sum cannot overflow either
            part = torch.where(part.isfinite(), part.clamp(-limit, limit), part)
        return part.to(self.dtype)

    def unpack(self, summed: Tensor, into: Tensor) -> Tensor:
        """Write the sum over ranks of what `pack` returned into `into`, and return it."""
        into.copy_(summed)
        return into.mul_(1.0 / self.scale) if self.scale != 1.0 else into


def narrow_of(kind: str, *, scaled: bool) -> NarrowFormat | None:
    """Return the format of `launch.compression: kind`, or `None` if numbers are sent in their own type.

    `scaled` means that a loss scaler already makes gradients fit fp16, and must see overflows.
    """
    if kind == "fp16":
        return (
            NarrowFormat(dtype=torch.float16)
            if scaled
            else NarrowFormat(dtype=torch.float16, scale=FP16_SCALE, bounded=True)
        )
    return NarrowFormat(dtype=torch.bfloat16) if kind == "bf16" else None


def narrow_hook(state: NarrowFormat, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket in 16 bits; gradients that already have 16 bits are sent unchanged."""
    buffer = bucket.buffer()
    if buffer.element_size() <= state.dtype.itemsize:
        return allreduce_hook(distributed.group.WORLD, bucket)
    sent = state.pack(buffer, distributed.get_world_size())
    future: Future[Any] = distributed.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: state.unpack(done.value()[0], buffer))


class LocalSteps(TrainerCallback):
    """The outer optimizer of a trainer, with this rank's progress since the last average."""

    def __init__(self, context: TrainContext, trainer: Trainer) -> None:
        """Stop DDP from sending gradients; call when the model is wrapped."""
        launch = context.config.launch
        self.context = context
        self.steps, self.rate, self.momentum = launch.local_steps, launch.outer_learning_rate, launch.outer_momentum
        self.narrow = narrow_of(launch.compression, scaled=False)
        self.window = 0
        """Optimizer steps since the last average."""
        self.tokens = 0.0
        """This rank's label tokens in them, each by its weight."""
        self.own_tokens = 1.0
        """This rank's label tokens in the current step by weight, 1 if there are none."""
        self.norms: list[float] = []
        """Each rank's gradient norm of the last step."""
        self._step_tokens, self._part = 0.0, torch.ones(())
        trainer.model_wrapped.require_backward_grad_sync = False
        # No buffers either: `train.ddp_broadcast_buffers` sends them in the first forward pass, which a rank without
        # rows does not run.
        trainer.model_wrapped.require_forward_param_sync = False
        trained = [(name, parameter) for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
        self.names: list[str] = [name for name, _ in trained]
        self.parameters: list[Tensor] = [parameter for _, parameter in trained]
        self.anchor = [
            parameter.detach().float().clone(memory_format=torch.contiguous_format) for parameter in self.parameters
        ]
        """The ranks' common start, in fp32; one tensor per parameter, like all lists here."""
        self.velocity = [torch.zeros_like(anchor) for anchor in self.anchor]

    # ---- Called by the trainer

    def begin_step(self, batches: Sequence[Batch], total: Tensor) -> None:
        """Prepare a step with `total` label tokens over all ranks, and mark this rank's empty micro-batches."""
        self._step_tokens = sum(float(label_weight(batch)) for batch in batches if batch["rows"])
        self.own_tokens = self._step_tokens or 1.0
        self._part = self.own_tokens * self.context.ranks.world / total
        for batch in batches:
            batch[IDLE] = not batch["rows"]

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Scale a loss over this rank's own tokens for the logs, so that the mean over ranks is the loss over all."""
        return loss * self._part.to(loss.device)

    @property
    def empty(self) -> bool:
        """Whether this rank has no label tokens in this step; its optimizer then does not change its weights."""
        return not self._step_tokens

    def agree(self, norm: float) -> float:
        """Return the largest of all ranks' gradient norms, the same on each; NaN if any is NaN. Collective."""
        self.norms = [norm_there for (norm_there,) in self.context.ranks.table([norm])]
        return float(torch.tensor(self.norms, dtype=torch.float64).max())  # torch's maximum propagates a NaN

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.window += 1
        self.tokens += self._step_tokens
        if self.window >= self.steps or state.global_step >= state.max_steps:
            self.context.activity.enter("updating", step=state.global_step)
            self.synchronise()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the average into the model if training ended early, as in the last checkpoint and `model/`."""
        if self.window:
            self._put_average()
            self.window, self.tokens = 0, 0.0

    def copies(self) -> dict[str, Tensor]:
        """Return copies of the trained parameters on the CPU (in `averaged`, the average), none if all ranks agree."""
        if not self.window:
            return {}
        return {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in zip(self.names, self.parameters, strict=True)
        }

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (state, parameter, values) for what all ranks share."""
        for name, anchor, velocity in zip(self.names, self.anchor, self.velocity, strict=True):
            yield ANCHOR, name, anchor
            yield MOMENTUM, name, velocity

    # ---- Averages

    @torch.no_grad()
    def synchronise(self) -> None:
        """Take an outer step from the ranks' average; afterwards all ranks have the same weights. Collective."""
        for index, gradient in self._differences():
            velocity, anchor = self.velocity[index], self.anchor[index]
            velocity.mul_(self.momentum).add_(gradient)
            anchor.sub_(gradient.add(velocity, alpha=self.momentum), alpha=self.rate)
            self.parameters[index].copy_(anchor)
        self.window, self.tokens = 0, 0.0

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model the ranks' average in the context, and each rank its own weights afterwards. Collective."""
        if not self.window:
            yield
            return
        own = [parameter.detach().clone() for parameter in self.parameters]
        self._put_average()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, weights in zip(self.parameters, own, strict=True):
                    parameter.copy_(weights)

    @torch.no_grad()
    def _put_average(self) -> None:
        for index, gradient in self._differences():
            self.parameters[index].copy_(self.anchor[index] - gradient)

    def _differences(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each parameter's index and anchor minus the ranks' token-weighted average (fp32). Collective."""
        ranks, counts = self.context.ranks, self.counts()
        world = ranks.world
        # This rank's weight relative to an equal share.
        weight = self.tokens * world / sum(counts) if sum(counts) else 1.0
        for group in split_into_groups([parameter.numel() for parameter in self.parameters]):
            parts = [(self.anchor[index] - self.parameters[index].detach().float()).reshape(-1) for index in group]
            flat = torch.cat(parts).mul_(weight)
            if self.narrow is None:
                ranks.total(flat.div_(world))
            else:
                self.narrow.unpack(ranks.total(self.narrow.pack(flat, world)), flat)
            for index, part in zip(group, flat.split([len(tensor) for tensor in parts]), strict=True):
                yield index, part.view(self.parameters[index].shape)

    def counts(self) -> list[float]:
        """Return each rank's tokens, by their weights, since the last average. Collective."""
        return [count for (count,) in self.context.ranks.table([self.tokens])]


def split_into_groups(sizes: Sequence[int]) -> list[list[int]]:
    """Return indices in groups of at most `AVERAGED_AT_A_TIME` numbers, in order; a larger one is a separate group."""
    groups: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = AVERAGED_AT_A_TIME
        groups[-1].append(index)
        room -= size
    return groups


def local_steps_of(context: TrainContext, trainer: Trainer) -> LocalSteps | None:
    """Return local steps, or register the hook of `launch.compression` with the wrapped model.

    Local steps send no gradients; they compress the differences of weights instead.
    """
    launch, plan = context.config.launch, context.plan
    if plan.strategy != "ddp" or plan.world_size == 1:
        return None
    if launch.local_steps > 1:
        return LocalSteps(context, trainer)
    if narrow := narrow_of(launch.compression, scaled=bool(trainer.args.fp16)):
        trainer.model_wrapped.register_comm_hook(narrow, narrow_hook)
    return None
