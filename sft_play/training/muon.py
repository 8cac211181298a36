"""Muon for the matrices of a model's layers, AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from transformers.pytorch_utils import Conv1D


class MuonWithAdamW(Optimizer):
    """torch's Muon and AdamW, which share their groups and states with this optimizer.

    Muon's updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so one learning rate and one
    weight decay serve both.
    """

    def __init__(self, adamw: AdamW, model: Any) -> None:
        """Move the matrices of `model`'s layers from `adamw` to groups of Muon."""
        matrices, groups = matrices_of(model), []
        for group in adamw.param_groups:
            if moved := take_out(group, matrices):
                groups.append({"params": moved, "lr": group["lr"], "weight_decay": group["weight_decay"]})
        self.muon, self.adamw = Muon(groups, adjust_lr_fn="match_rms_adamw"), adamw
        super().__init__([*self.muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: Any = None) -> None:
        # Set at each step, since `load_state_dict` replaces groups and states.
        for part in (self.muon, self.adamw):
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if ("ns_steps" in group) == (part is self.muon)]
            part.step()


def take_out(group: dict[str, Any], ids: set[int]) -> list[Any]:
    """Remove the parameters with these `ids` from a group of an optimizer, and return them."""
    moved = [parameter for parameter in group["params"] if id(parameter) in ids]
    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
    return moved


def matrices_of(model: Any) -> set[int]:
    """Return the ids of the weights of a model's linear layers, without its head."""
    linear = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))}
    return linear - {id(getattr(model.get_output_embeddings(), "weight", None))}
