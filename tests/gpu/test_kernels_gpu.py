"""Liger's kernels against transformers' own operations, one by one, in bf16 on a GPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("liger_kernel", reason="the package liger-kernel is not installed")


def close(found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """Not further from fp32 than twice what the plain operations in bf16 are."""
    distance = (plain.float() - exact).norm() / exact.norm()
    assert (found.float() - exact).norm() / exact.norm() <= 2 * distance + 1e-4


def both(plain: object, kernel: object, *inputs: torch.Tensor) -> None:
    """Compares results and gradients of two functions of the same tensors."""
    results = []
    for function, dtype in ((plain, torch.float32), (plain, torch.bfloat16), (kernel, torch.bfloat16)):
        leaves = [value.to("cuda", dtype).requires_grad_() for value in inputs]
        out = function(*leaves)  # type: ignore[operator]
        outs = out if isinstance(out, tuple) else (out,)
        torch.stack(
            [(part.float() * torch.linspace(-1, 1, part.numel(), device="cuda").view(part.shape)).sum() for part in outs]
        ).sum().backward()
        results.append([*(part.detach() for part in outs), *(leaf.grad for leaf in leaves)])
    for exact, rough, found in zip(*results, strict=True):
        close(found, rough, exact)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_norm() -> None:
    from liger_kernel.transformers.functional import liger_rms_norm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        norm = LlamaRMSNorm(weight.shape[0], eps=1e-6)
        return torch.func.functional_call(norm, {"weight": weight}, (x,))  # type: ignore[no-any-return]

    both(plain, lambda x, weight: liger_rms_norm(x, weight, 1e-6), random(1, 300, 576), random(576))


def test_swiglu() -> None:
    from liger_kernel.transformers.functional import liger_swiglu

    both(lambda gate, up: torch.nn.functional.silu(gate) * up, liger_swiglu, random(1, 300, 1536), random(1, 300, 1536))


def test_rotary_embeddings() -> None:
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    angles = (torch.arange(300)[:, None] / 10_000 ** (torch.arange(0, 64, 2) / 64)).repeat(1, 2)[None].cuda()

    def rotated(function: object) -> object:
        return lambda q, k: function(q, k, angles.cos().to(q.dtype), angles.sin().to(q.dtype))  # type: ignore[operator]

    both(rotated(apply_rotary_pos_emb), rotated(liger_rotary_pos_emb), random(1, 9, 300, 64), random(1, 3, 300, 64))
