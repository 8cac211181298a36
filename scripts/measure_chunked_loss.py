"""Time head and loss, forward and backward, complete and in chunks: SmolLM2's head, with every token a label.

`python scripts/measure_chunked_loss.py [ROUNDS [POSITIONS ...]]` prints the minimum over the rounds (5 by default),
which alternate between both ways.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from sft_play.model.kernels import chunk_head
from sft_play.training.loss import token_loss_sum

HIDDEN, VOCABULARY, CHUNK = 576, 49152, 448
POSITIONS = (1024, 4096)


class Head(nn.Module):  # type: ignore[misc]
    """A model that consists only of its head."""

    def __init__(self, *, trains: bool, chunk: int) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(trains)
        self.config = SimpleNamespace(model_type="llama")
        if chunk:
            chunk_head(self, chunk)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    # The loss passes `use_cache` to every model.
    def forward(self, hidden: Tensor, use_cache: bool) -> SimpleNamespace:  # noqa: ARG002
        return SimpleNamespace(logits=self.head(hidden))


def seconds(model: Head, hidden: Tensor, targets: Tensor) -> float:
    """Return the time of one forward and backward pass."""
    start = time.perf_counter()
    token_loss_sum(model, {"hidden": hidden.detach().requires_grad_(), "targets": targets}).backward()
    model.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    """Print a table."""
    rounds, *all_positions = map(int, sys.argv[1:] or ["5"])
    print(f"| head | label positions | whole, s | chunks of {CHUNK}, s |\n|---|---|---|---|")
    for trains in (False, True):
        models = [Head(trains=trains, chunk=chunk) for chunk in (0, CHUNK)]
        for positions in all_positions or POSITIONS:
            hidden, targets = torch.randn(1, positions, HIDDEN), torch.randint(VOCABULARY, (positions,))
            least = [
                min(times)
                for times in zip(*([seconds(m, hidden, targets) for m in models] for _ in range(rounds)), strict=True)
            ]
            print(
                f"| {'trained' if trains else 'frozen'} | {positions} | {least[0]:.2f} | {least[1]:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
