"""Rows to tensors. The head of the model runs only where a loss is computed (`logits_to_keep`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sft_play.plan.layouts import BY_LENGTHS

IGNORED = -100
"""Target that no loss is computed for; the value that `torch.nn.functional.cross_entropy` ignores."""

Batch = dict[str, Any]


class Collator:
    """Turns a micro-batch of prepared rows into a batch dictionary.

    `flattened`: rows one after another in one line, told apart by restarting position ids, without an attention mask:
    `input_ids` and `position_ids` [1, T], `logits_to_keep` [K] (positions whose next token is trained), `targets` [K].

    `padded`: one line per row, padded on the right: `input_ids`, `attention_mask`, `position_ids` [B, S], `logits_to_keep` [P]
    (the union over rows), `targets` [B, P] with -100 where a row has none. `unmasked`: the same without mask and position ids, for
    families whose attention is causal: no token of a row sees the padding behind it.

    Where `attention` tells rows apart by their lengths, a flattened batch has them (`lengths_of`).

    An empty micro-batch gives one dummy line with one ignored target: its loss is 0 and its gradients are 0, but every
    collective operation of a step still happens. `rows` keeps the rows' ids and `tokens` counts theirs; neither reaches the model.
    """

    def __init__(self, layout: str, pad_token_id: int, attention: str = "sdpa", device: str = "cpu") -> None:
        if layout not in ("flattened", "padded", "unmasked"):
            raise ValueError(f"unknown layout `{layout}`")
        self.layout = layout
        self.pad_token_id = pad_token_id
        self.by_lengths = attention in BY_LENGTHS
        self.device = device

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        parts = [(list(row["input_ids"]), list(row["labels"])) for row in rows]
        batch = self._flattened(parts) if self.layout == "flattened" else self._padded(parts)
        batch["rows"] = [int(row.get("row", -1)) for row in rows]
        batch["tokens"] = sum(len(tokens) for tokens, _ in parts)
        return batch

    def _flattened(self, parts: Sequence[tuple[list[int], list[int]]]) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        targets: list[int] = []
        ends = [0]
        for tokens, labels in parts or [([self.pad_token_id] * 2, [IGNORED] * 2)]:
            start = len(ids)
            ids += tokens
            positions += range(len(tokens))
            ends.append(len(ids))
            for index in range(1, len(tokens)):  # the first token of a row follows nothing
                if labels[index] != IGNORED:
                    keep.append(start + index - 1)
                    targets.append(labels[index])
        if not keep:
            keep, targets = [0], [IGNORED]
        return {
            "input_ids": torch.tensor([ids]),
            "position_ids": torch.tensor([positions]),
            "logits_to_keep": torch.tensor(keep),
            "targets": torch.tensor(targets),
            **(lengths_of(ends, max(positions) + 1, self.device) if self.by_lengths else {}),
        }

    def _padded(self, parts: Sequence[tuple[list[int], list[int]]]) -> Batch:
        lines = parts or [([self.pad_token_id] * 2, [IGNORED] * 2)]
        width = max(2, *(len(tokens) for tokens, _ in lines))  # a lone first token still needs a place for its ignored target
        keep = sorted({i - 1 for _, labels in lines for i in range(1, len(labels)) if labels[i] != IGNORED}) or [0]
        padded = [
            (tokens + [self.pad_token_id] * (width - len(tokens)), labels + [IGNORED] * (width - len(labels)))
            for tokens, labels in lines
        ]
        batch = {
            "input_ids": torch.tensor([tokens for tokens, _ in padded]),
            "logits_to_keep": torch.tensor(keep),
            "targets": torch.tensor([[labels[i + 1] for i in keep] for _, labels in padded]),
        }
        if self.layout == "padded":
            mask = torch.tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens, _ in lines])
            batch |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        return batch


def lengths_of(ends: Sequence[int], longest: int, device: str) -> Batch:
    """Returns where rows end, [R + 1] from 0: as numbers for `model.varlen`; for a GPU's flash attention too, int32, with the longest."""
    if device == "cpu":
        return {"row_ends": tuple(ends)}
    places = torch.tensor(ends, dtype=torch.int32)
    of_kernels = {"cu_seq_lens_q": places, "cu_seq_lens_k": places, "max_length_q": longest, "max_length_k": longest}
    return {"row_ends": tuple(ends), **of_kernels}
