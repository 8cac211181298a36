"""The moment and the operation of a peak, in words."""

from __future__ import annotations

MOMENTS = {
    "forward first": "in the first layer's forward pass", "forward middle": "in the forward pass",
    "forward last": "in the last layer's forward pass", "forward head": "where the logits and the loss are computed",
    "backward head": "where the gradient of the logits is computed", "backward last": "in the last layer's backward pass, all activations held",
    "backward middle": "in the backward pass", "backward first": "at the end of the backward pass, all gradients held",
    "update": "in the optimizer's update",
}  # fmt: skip


def peak_in_words(moment: str, operation: str) -> str:
    """Returns where in the step the peak stands: the moment, and the operation of torch that reached it."""
    name = operation.removeprefix("aten.").removesuffix(".default")
    return MOMENTS.get(moment, moment) + (f" (`{name}`)" if name else "")
