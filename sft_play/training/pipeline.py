"""Pipeline parallelism: stages pass a step's micro-batches forward and back (1F1B, Narayanan et al. 2019, SOSP).

Every stage reads the same batches, so only hidden states and their gradients are sent, while the next micro-batch is
computed. They have separate process groups, because on GPUs the operations of one group wait for each other.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grads_with_norm_
from transformers.utils import ModelOutput

from sft_play.data.batches import Batch
from sft_play.model.kernels import COMPUTE_TYPES
from sft_play.model.objective import PLAIN, Objective
from sft_play.model.parallel import Stage
from sft_play.plan.plan import Plan
from sft_play.training.loss import NOT_FOR_THE_MODEL, sums_of, token_loss_sum
from sft_play.training.ranks import Ranks, group_of, outline, replicas_of

CACHES = ("past_key_values", "cache_params")
"""Models' names for the cache of earlier tokens."""


def _no_step(_: str) -> None:
    """Ignore the phase: evaluation belongs to no step."""


class Pipeline:
    """This rank's stage and its neighbours in the group."""

    def __init__(self, model: Any, plan: Plan, ranks: Ranks, timeout_seconds: float) -> None:
        """Make `model` this rank's stage, and create the process groups. Collective over all ranks."""
        self.stage, self.ranks = Stage(model, *plan.layers_of(ranks.rank)), ranks
        self.dtype = torch.bfloat16 if plan.precision == "bf16" else getattr(torch, plan.weights_dtype)
        """Type of hidden states on the wire."""
        narrow = plan.precision != "fp32"
        self.autocast = functools.partial(torch.autocast, plan.device, COMPUTE_TYPES[plan.precision], enabled=narrow)
        """A stage calls its decoder directly, below the forward pass that accelerate runs under autocast."""
        number = ranks.rank % ranks.group_size
        self.behind = ranks.group_size - 1 - number
        """Number of stages after this one."""
        self.before, self.after, self.last = ranks.rank - 1, ranks.rank + 1, ranks.rank + self.behind
        self.group, self.gradients = group_of(ranks, timeout_seconds), group_of(ranks, timeout_seconds)
        self.replicas = replicas_of(ranks, timeout_seconds)
        pairs = [[first, first + ranks.group_size - 1] for first in range(0, ranks.world, ranks.group_size)]
        self.ends, _ = distributed.new_subgroups_by_enumeration(pairs, timeout=timedelta(seconds=timeout_seconds))
        """Group of the first and last stage, which may hold the same embedding."""
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self.enter: Callable[[str], None] = _no_step
        """Called with each phase of a step when it begins (`metrics.PHASES`)."""

    # ---- Passes

    def train(
        self,
        batches: Sequence[Batch],
        objective: Objective,
        scale: Tensor,
        at: Callable[[Batch], None],
        enter: Callable[[str], None],
    ) -> Tensor:
        """Compute the gradients of `scale` times the summed loss of a step's micro-batches.

        Return `sums_of` them on every stage. `at` is called with each batch before its pass, `enter` with
        each phase. Collective over the group.
        """
        self.enter = enter
        pending: deque[tuple[Tensor | None, Tensor]] = deque()
        sums = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        warm = min(self.behind, len(batches))
        for number, batch in enumerate(batches):
            at(batch)
            pending.append(self._forward(batch, sums, objective))
            if number >= warm:
                self._backward(*pending.popleft(), scale)
        while pending:
            self._backward(*pending.popleft(), scale)
        self.enter("communication")
        self._settle()
        self.enter = _no_step
        return self._share_sums(sums)

    def measure(self, batch: Batch) -> Tensor:
        """Return `sums_of` a batch on every stage, without gradients. Collective in the group."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        with torch.no_grad():
            self._forward(batch, sums)
        self._settle()
        return self._share_sums(sums)[[0, 2]]

    def _forward(self, batch: Batch, sums: Tensor, objective: Objective = PLAIN) -> tuple[Tensor | None, Tensor]:
        self.enter("communication")
        hidden = self._receive(batch["input_ids"])
        if hidden is not None:
            hidden.requires_grad_(torch.is_grad_enabled())
        self.enter("forward")
        with self.autocast():
            if self.stage.ends:
                output = token_loss_sum(self.stage.model, self.stage.inputs_of(batch, hidden), objective)
                sums += sums_of(output, batch)
                return hidden, output
            inputs = {name: value for name, value in batch.items() if name not in NOT_FOR_THE_MODEL}
            output, _ = self.stage.run_layers(inputs, hidden)
        self._send(output.detach().to(self.dtype), self.after, self.group)
        return hidden, output

    def _backward(self, hidden: Tensor | None, output: Tensor, scale: Tensor) -> None:
        if self.stage.ends:
            self.enter("backward")
            (output * scale).backward()
        else:
            self.enter("communication")
            gradient = torch.empty(output.shape, dtype=self.dtype, device=output.device)
            distributed.recv(gradient, src=self.after, group=self.gradients)
            self.enter("backward")
            torch.autograd.backward(output, gradient.to(output.dtype))
        if hidden is not None:
            assert hidden.grad is not None
            self._send(hidden.grad, self.before, self.gradients)

    def _receive(self, ids: Tensor) -> Tensor | None:
        """Return the previous stage's hidden states [B, T, H] for tokens [B, T], or `None` on the first stage."""
        if self.stage.begins:
            return None
        hidden = torch.empty(*ids.shape, self.stage.hidden, dtype=self.dtype, device=self.ranks.device)
        distributed.recv(hidden, src=self.before, group=self.group)
        return hidden

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Let the model's own `generate` run on all stages: each caches its layers, and all get the last logits."""
        base = self.stage.base
        patched, whole = base.__dict__.get("forward"), base.forward

        @functools.wraps(whole)
        def forward(**inputs: Any) -> ModelOutput:
            ids = inputs["input_ids"]
            received = self._receive(ids)
            if self.stage.ends:
                output = whole(**self.stage.inputs_of(inputs, received))
                logits = output.logits[:, -1:].float().contiguous()
            else:
                with self.autocast():
                    hidden, output = self.stage.run_layers(inputs, received)
                self._send(hidden.to(self.dtype), self.after, self.group)
                logits = torch.empty(len(ids), 1, base.config.get_text_config().vocab_size, device=self.ranks.device)
            distributed.broadcast(logits, src=self.last, group=self.group)
            return ModelOutput(logits=logits, **{name: output[name] for name in CACHES if output.get(name) is not None})

        base.forward = forward
        try:
            yield
        finally:
            self._settle()
            del base.forward
            if patched is not None:
                base.forward = patched

    def _send(self, tensor: Tensor, to: int, group: Any) -> None:
        tensor = tensor.contiguous()
        self._sent.append((distributed.isend(tensor, dst=to, group=group), tensor))
        # Sends this old have arrived, but gloo keeps their memory until they are waited for.
        while len(self._sent) > 2 * (self.behind + 2):
            self._sent.popleft()[0].wait()

    def _settle(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait()

    def _share_sums(self, sums: Tensor) -> Tensor:
        distributed.broadcast(sums, src=self.last, group=self.group)
        return sums

    # ---- Gradients and weights

    def share_gradients(self) -> None:
        """Sum gradients over the pipelines, and those of an embedding shared by first and last stage.

        Collective over all ranks.
        """
        trained = [parameter for parameter in self.stage.model.parameters() if parameter.requires_grad]
        if self.ranks.data_world > 1:
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                distributed.all_reduce(parameter.grad, group=self.replicas)
        if self.stage.begins or self.stage.ends:
            for parameter in self.stage.shared:
                assert parameter.grad is not None
                distributed.all_reduce(parameter.grad, group=self.ends)

    def clip(self, parameters: Iterator[nn.Parameter], max_norm: float) -> Tensor:
        """Clip the gradients of all stages to `max_norm`, and return their norm. Collective over the group."""
        twice = {id(parameter) for parameter in self.stage.shared} if not self.stage.begins else set()
        trained = [weight for weight in parameters if weight.grad is not None]
        total = torch.zeros((), device=self.ranks.device)
        for weight in trained:
            if id(weight) not in twice:
                total += torch.linalg.vector_norm(weight.grad, dtype=torch.float32).square()
        distributed.all_reduce(total, group=self.group)
        norm = total.sqrt()
        clip_grads_with_norm_(trained, max_norm, norm)
        return norm

    def whole_state(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all stages of the first pipeline on rank 0, and `mine` on others.

        A tensor that only one stage trains is taken from that stage; others may hold it frozen. Collective over all
        ranks.
        """
        state = {name: tensor.detach() for name, tensor in mine.items()}
        facts = self.ranks.gather([outline(state), [name for name, tensor in mine.items() if tensor.requires_grad]])
        for rank in range(1, self.ranks.group_size):
            if self.ranks.rank == rank:
                self.ranks.send(state)
            elif self.ranks.first:
                there, trained = facts[rank]
                received = self.ranks.receive(rank, there)
                state |= {name: tensor for name, tensor in received.items() if name in trained or name not in state}
        return state
