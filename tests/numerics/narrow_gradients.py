"""Two gloo ranks under the policies that a GPU gets in bf16: the gradient of 16 micro-steps against its sum in fp32.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.numerics.narrow_gradients fsdp2 RESULT

The reference adds the same bf16 gradients of all micro-steps and ranks in fp64: what is left are the errors of reducing
and adding up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

MICRO_STEPS = 16


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48, bias=False), nn.Tanh(), nn.Linear(48, 8, bias=False))


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    """Return the loss of a micro-batch; a few of them are far larger than the others, which a narrow sum would
    lose.
    """
    generator = torch.Generator().manual_seed(100 * rank + step)
    rows = torch.randn(3, 24, generator=generator).bfloat16() * (8 if step == 0 else 1)
    loss: Tensor = model(rows).float().square().mean()
    return loss


def reference() -> Tensor:
    """Return the mean over ranks of the sum over micro-steps of the gradients that a bf16 copy of the model computes,
    [weights].
    """
    flat = []
    for rank in range(distributed.get_world_size()):
        for step in range(MICRO_STEPS):
            narrow = model().bfloat16()
            loss_of(narrow, rank, step).backward()
            gradients = [parameter.grad.double() for parameter in narrow.parameters()]  # type: ignore[union-attr]
            flat.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    return torch.stack(flat).sum(0) / distributed.get_world_size()


def under_fsdp2() -> Tensor:
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import fully_shard

    from sft_play.training.trainer import reduce_in_fp32

    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    reduce_in_fp32(plugin)
    sharded = model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(
            layer, mesh=distributed.device_mesh.init_device_mesh("cpu", (2,)), mp_policy=plugin.mixed_precision_policy
        )
    for step in range(MICRO_STEPS):
        loss_of(sharded, distributed.get_rank(), step).backward()
    return torch.cat([parameter.grad.full_tensor().reshape(-1) for parameter in sharded.parameters()])


def under_deepspeed(stage: int) -> Tensor:
    from deepspeed.utils import safe_get_full_grad

    import deepspeed
    from sft_play.launch.deepspeed import batch_numbers, deepspeed_settings

    batch = batch_numbers(micro_batch=3, accumulation=MICRO_STEPS, world_size=2)
    settings = deepspeed_settings(
        stage=stage, device="cpu", precision="bf16", batch=batch, clipping=0.0, hidden_size=48
    )
    plain = model()
    engine, *_ = deepspeed.initialize(model=plain, optimizer=torch.optim.AdamW(plain.parameters()), config=settings)
    for step in range(MICRO_STEPS):
        engine.backward(loss_of(engine, distributed.get_rank(), step), scale_wrt_gas=False)
        if step < MICRO_STEPS - 1:
            engine.step()
    return torch.cat([safe_get_full_grad(parameter).reshape(-1) for parameter in engine.module.parameters()])


def main() -> None:
    strategy = sys.argv[1]
    if strategy == "fsdp2":
        distributed.init_process_group("gloo")
    else:
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}  # as a run does: nothing is compiled
        deepspeed.init_distributed("gloo")
    expected = reference()
    gradients = under_fsdp2() if strategy == "fsdp2" else under_deepspeed(int(strategy[-1]))
    error = float((gradients.double() - expected).norm() / expected.norm())
    if distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({"error": error, "dtype": str(gradients.dtype)}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
