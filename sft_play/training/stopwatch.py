"""How long a rank computes in its micro-steps, without what it waits for other ranks (`training.balance` compares that)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Stopwatch:
    """Seconds of this rank's micro-steps that have rows, without what it waits for others.

    A backward pass ends for us when all gradients of this rank are there: a callback that the pass itself queues before DDP queues the
    one that waits for the all-reduces. With ZeRO, which communicates in the backward pass, only the forward pass counts. On a GPU events
    on its stream are compared when the sums are taken, so that nothing waits for the device meanwhile.
    """

    def __init__(self, device: torch.device, *, forward_only: bool) -> None:
        self.device = device
        self.forward_only = forward_only
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._begun: Any = None
        self._events: list[tuple[Any, Any]] = []

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Call before the forward pass of a micro-step."""
        self._begun = None
        if batch["rows"]:
            self._sums[1] += len(batch["rows"])
            self._sums[2] += batch["input_ids"].numel()
            self._sums[3] += 1
            self._begun = self._now()

    def passed(self, loss: Tensor) -> None:
        """Call when the forward pass has given the loss, whose backward pass comes next."""
        if self._begun is None:
            return
        if self.forward_only:
            self._end()
        elif loss.requires_grad:
            loss.register_hook(self._queue)

    def computed(self) -> None:
        """Call in the backward pass when this rank's gradients are all there and something is about to wait for other ranks."""
        self._end()

    def take(self) -> list[float]:
        """Returns seconds, rows, tokens (padding included) and micro-steps since the last call, and begins anew."""
        if self._events:
            self._events[-1][1].synchronize()
            self._sums[0] += sum(begun.elapsed_time(ended) for begun, ended in self._events) / 1000
        found, self._sums, self._events = self._sums, [0.0, 0.0, 0.0, 0.0], []
        return found

    def _queue(self, _: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _end(self) -> None:
        if self._begun is None:  # told before: a hook that waits within the backward pass
            return
        ended = self._now()
        if isinstance(ended, float):
            self._sums[0] += ended - self._begun
        else:
            self._events.append((self._begun, ended))
        self._begun = None
