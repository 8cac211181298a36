"""Liger's Triton kernels in place of a model's norms, rotary embeddings and SwiGLU (`train.kernels`)."""

from __future__ import annotations

from typing import Any

SILU = ("silu", "swish")


def use_kernels(model: Any) -> None:
    """Replaces what Liger has kernels for, the loss apart: ours runs in chunks (`model.chunked_head`). Call it before adapters are added.

    Parameters and names stay. Rotary embeddings are replaced in the family's module, for all models of this process.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(
        model,
        rope=True,
        rms_norm=True,
        swiglu=model.config.hidden_act in SILU,  # Liger takes it for granted
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )
