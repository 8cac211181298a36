"""NEFTune per row: noise depends on the row's id and length and on the step, not on its micro-batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sft_play.data.batches import Batch
from sft_play.training.states.facts import fresh_seed

NEFTUNE = "neftune_noise_alpha"


class RowNoise:
    """Add uniform noise up to alpha / sqrt(length x width) to a model's embeddings (Jain et al. 2023, 2310.05914)."""

    def __init__(self, model: Any, alpha: float, seed: int, part: tuple[int, int]) -> None:
        """Hook into the model; `part` is this rank's slice of each line, as in `data.batches.Collator`."""
        self.alpha, self.seed, self.part = alpha, seed, part
        self.rows: list[tuple[int, int]] = []
        self.step = 0
        while hasattr(model, "module"):
            model = model.module
        model.get_input_embeddings().register_forward_hook(self._add)

    def begin(self, batch: Batch, step: int) -> None:
        """Set the rows (id, length) of the next pass."""
        self.rows, self.step = list(zip(batch["rows"], batch["lengths"], strict=True)), step

    def _add(self, module: Any, inputs: Any, embedded: Tensor) -> Tensor | None:
        """Return the embeddings [B, T, H] with noise."""
        if not module.training or not self.rows:
            return None
        each = [self._noise_of(row, length, embedded) for row, length in self.rows]
        if embedded.shape[0] > 1 or (len(each) == 1 and self.part[1] == 1):  # one line per row
            noise = torch.stack([pad(part, (0, 0, 0, embedded.shape[1] - len(part))) for part in each])
        else:
            (which, number), width = self.part, embedded.shape[1]
            line = torch.cat(each)
            noise = pad(line, (0, 0, 0, width * number - len(line)))[which * width : (which + 1) * width][None]
        return embedded + noise.to(embedded.dtype)

    def _noise_of(self, row: int, length: int, like: Tensor) -> Tensor:
        """Return a row's noise [length, H] in fp32."""
        draws = torch.Generator(device=like.device).manual_seed(fresh_seed(self.seed, row, self.step))
        most = self.alpha / math.sqrt(length * like.shape[-1])
        return torch.empty(length, like.shape[-1], device=like.device).uniform_(-most, most, generator=draws)
