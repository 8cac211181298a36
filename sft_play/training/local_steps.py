"""Steps that each rank makes by itself (`launch.local_steps`), in the way of DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

Every rank takes its rows of each global batch as usual, with the mean loss over *its own* label tokens, and updates its own weights by
its own optimizer. After every H steps, and after the last one,

    g = anchor - sum_i n_i w_i / sum_i n_i     n_i: label tokens of rank i since the last average
    v = momentum * v + g
    anchor = anchor - rate * (g + momentum * v)     Nesterov, as torch.optim.SGD has it

and all go on from the anchor. Only weights that train travel. Evaluations and checkpoints in between see the average of the ranks'
weights and change nothing: a run that is stopped and resumed is the uninterrupted one to the bit, since a checkpoint holds each rank's
own weights and optimizer states. A step still exchanges some numbers (counts of tokens, norms, requests to stop).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from sft_play.plan.replicas import AVERAGED_AT_A_TIME
from sft_play.training.compression import Narrow, average_, narrow_of
from sft_play.training.loss import label_tokens

if TYPE_CHECKING:
    from sft_play.data.batches import Batch
    from sft_play.training.trainer import SftTrainer

ANCHOR, MOMENTUM, AVERAGE = "outer_anchor", "outer_momentum", "average"
"""States of a parameter in a checkpoint: all ranks' common ones, and the average that was neither."""


class LocalSteps(TrainerCallback):
    """The outer optimizer of one trainer, and what this rank has trained since the last average."""

    def __init__(self, trainer: SftTrainer) -> None:
        launch = trainer.config.launch
        self.trainer = trainer
        self.steps, self.rate, self.momentum = launch.local_steps, launch.outer_learning_rate, launch.outer_momentum
        self.narrow: Narrow | None = narrow_of(launch.compression, scaled=False)
        self.window = 0
        """Optimizer steps since the last average."""
        self.tokens = 0
        """This rank's label tokens in them."""
        self.own_tokens = 1
        """Of the step that is being made, 1 at least."""
        self.norms: list[float] = []
        """Each rank's gradient norm of the last step."""
        self._step_tokens, self._part = 0, torch.ones(())
        self.names: list[str] = []
        self.parameters: list[Tensor] = []
        self.anchor: list[Tensor] = []
        """fp32, as long as all ranks' weights are their common start; one for each parameter, as all lists here."""
        self.velocity: list[Tensor] = []

    # ---- What the trainer calls

    def begin(self) -> None:
        """Call when the model is wrapped and a checkpoint's weights are in. From here on DDP sends no gradients."""
        self.trainer.model_wrapped.require_backward_grad_sync = False
        # Nor buffers, which `train.ddp_broadcast_buffers` sends in the first forward pass: a rank without rows makes none.
        self.trainer.model_wrapped.require_forward_param_sync = False
        trained = [(name, one) for name, one in self.trainer.model.named_parameters() if one.requires_grad]
        self.names, self.parameters = [name for name, _ in trained], [one for _, one in trained]
        self.anchor = [one.detach().float().clone(memory_format=torch.contiguous_format) for one in self.parameters]
        self.velocity = [torch.zeros_like(anchor) for anchor in self.anchor]

    def begin_step(self, batches: Sequence[Batch], total: Tensor, idle: str) -> None:
        """Takes up a step's micro-batches, `total` label tokens over all ranks; this rank passes over those that it has nothing in."""
        self._step_tokens = sum(int(label_tokens(batch)) for batch in batches if batch["rows"])
        self.own_tokens = max(1, self._step_tokens)
        self._part = self.own_tokens * self.trainer.plan.world_size / total
        for batch in batches:
            batch[idle] = not batch["rows"]

    def shared(self, loss: Tensor) -> Tensor:
        """Returns a loss over this rank's own tokens as its part of the loss over all, for the logs: their mean over ranks is that loss."""
        return loss * self._part.to(loss.device)

    @property
    def empty(self) -> bool:
        """Whether this rank has nothing to learn from in this step: its optimizer then leaves its weights alone."""
        return not self._step_tokens

    def agree(self, norm: float) -> float:
        """Returns the largest of all ranks' gradient norms, the same on each; no number where one is none. Collective."""
        trainer = self.trainer
        found = trainer._gather(torch.tensor([norm], dtype=torch.float64, device=trainer._sums_on()))[:, 0]
        self.norms = found.tolist()
        return float(found.max())  # which passes a NaN on

    def leave_out(self) -> None:
        """The update of this step is not made, so its tokens do not count."""
        self._step_tokens = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.window += 1
        self.tokens += self._step_tokens
        if self.window >= self.steps or state.global_step >= state.max_steps:
            self.synchronise()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leaves the average in the model where training ended early: that is what the last checkpoint and `model/` have."""
        if self.window and self.anchor:
            self._put_average()
            self.window = self.tokens = 0

    def copies(self) -> dict[str, Tensor]:
        """Returns the trained parameters as they are now, on the CPU; within `averaged`, the average. Nothing where all ranks have the same."""
        if not self.window:
            return {}
        return {name: one.detach().to("cpu", copy=True) for name, one in zip(self.names, self.parameters, strict=True)}

    # ---- Averages

    @torch.no_grad()
    def synchronise(self) -> None:
        """Makes an outer step from the ranks' average; all ranks have the same weights afterwards. Collective."""
        self.trainer.doing.enter("updating", step=self.trainer.state.global_step)
        for index, gradient in self._differences():
            velocity, anchor = self.velocity[index], self.anchor[index]
            velocity.mul_(self.momentum).add_(gradient)
            anchor.sub_(gradient.add(velocity, alpha=self.momentum), alpha=self.rate)
            self.parameters[index].copy_(anchor)
        self.window = self.tokens = 0

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the model has the ranks' average; afterwards each rank has its own weights again. Collective."""
        if not self.window:
            yield
            return
        own = [parameter.detach().clone() for parameter in self.parameters]
        self._put_average()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, kept in zip(self.parameters, own, strict=True):
                    parameter.copy_(kept)

    @torch.no_grad()
    def _put_average(self) -> None:
        for index, gradient in self._differences():
            self.parameters[index].copy_(self.anchor[index] - gradient)

    def _differences(self) -> Iterator[tuple[int, Tensor]]:
        """Yields each parameter's index with anchor minus the ranks' token-weighted average, fp32, in its shape. Collective."""
        weight = self._weight()
        for group in grouped([parameter.numel() for parameter in self.parameters]):
            parts = [(self.anchor[index] - self.parameters[index].detach().float()).reshape(-1) for index in group]
            flat = torch.cat(parts).mul_(weight)
            for index, part in zip(group, average_(flat, self.narrow).split([len(one) for one in parts]), strict=True):
                yield index, part.view(self.parameters[index].shape)

    def _weight(self) -> float:
        """Returns how much more than an equal share this rank's weights count. Collective."""
        counts = self.counts()
        return self.tokens * len(counts) / sum(counts) if sum(counts) else 1.0

    def counts(self) -> list[int]:
        """Returns each rank's tokens since the last average. Collective."""
        trainer = self.trainer
        return [int(n) for n in trainer._gather(torch.tensor([self.tokens], device=trainer._sums_on()))[:, 0].tolist()]


def local_steps_of(trainer: SftTrainer) -> LocalSteps | None:
    """Returns the trainer's local steps; `None` in ordinary training."""
    wanted = trainer.config.launch.local_steps > 1 and trainer.plan.strategy == "ddp" and trainer.plan.world_size > 1
    return LocalSteps(trainer) if wanted else None


def seen_as_average(local: LocalSteps | None) -> contextlib.AbstractContextManager[None]:
    """Returns `local.averaged()`; in ordinary training a context that does nothing."""
    return contextlib.nullcontext() if local is None else local.averaged()


def grouped(sizes: Sequence[int], most: int = AVERAGED_AT_A_TIME) -> list[list[int]]:
    """Returns indices in groups of at most `most` numbers (one that is larger makes a group of its own), in order."""
    groups: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(index)
        room -= size
    return groups
