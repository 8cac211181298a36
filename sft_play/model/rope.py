"""Choose between two sets of rotary factors (LongRoPE) by each row's own length, not by the longest row of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ORIGINAL = "original_max_position_embeddings"


def switch_length(model: Any) -> int | None:
    """Return the length up to which rows use the short factors, or `None` for models with one set."""
    settings: Mapping[str, Any] = model.config.get_text_config().to_dict()
    rope = settings.get("rope_parameters") or {}
    original = rope.get(ORIGINAL) or settings.get(ORIGINAL)
    return int(original) if original and rope.get("rope_type") in ("longrope", "su") else None


def switches_within(model: Any, tokens: int) -> bool:
    """Return whether a row of `tokens` tokens changes its factors while it grows, so that it is computed again."""
    switch = switch_length(model)
    return switch is not None and tokens > switch


def choose_factors_by_row(model: Any) -> None:
    """Give each row of a pass the angles that it would have alone; transformers goes by the pass's largest position."""
    switch = switch_length(model)
    if switch is None:
        return

    def by_row(
        module: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        hidden = named["x"] if "x" in named else inputs[0]
        positions = named["position_ids"] if "position_ids" in named else inputs[1]
        rest = {name: value for name, value in named.items() if name not in ("x", "position_ids")}
        short = module.forward(hidden, positions.clamp(max=switch - 1), *inputs[2:], **rest)
        is_long = (row_lengths(positions) > switch)[..., None]
        return tuple(torch.where(is_long, there, here) for there, here in zip(output, short, strict=True))

    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            module.register_forward_hook(by_row, with_kwargs=True)


def row_lengths(positions: Tensor) -> Tensor:
    """Return the length of each token's row, for position ids [B, T]; a new row begins where positions decrease."""
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    rows = begins.flatten().cumsum(0)
    longest = torch.zeros(rows.numel() + 1, dtype=positions.dtype, device=positions.device)
    longest.scatter_reduce_(0, rows, positions.flatten() + 1, "amax")
    return longest[rows].view_as(positions)
