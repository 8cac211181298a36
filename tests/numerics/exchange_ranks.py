"""One of two ranks that exchange gradients or weights over gloo and write the result: run by `test_compression.py`.

    torchrun -m tests.numerics.exchange_ranks FOLDER

`FOLDER/RANK.json` gets a JSON object with the result of each case. Bytes are those of this network namespace's
interfaces, as the kernel counts.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch.nn import Linear, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel

from sft_play.training.ranks import Ranks
from sft_play.training.slow_network import LocalSteps, local_steps_of
from tests.contexts import context_of
from tests.numerics.rank_processes import answer
from tests.plans import simple_plan

WIDTH = 256
STEPS = 3
"""DDP rebuilds its buckets after the first one."""


def sent_bytes() -> int:
    """Return the bytes that all interfaces of this namespace have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def model_of() -> Any:
    torch.manual_seed(0)
    return Sequential(Linear(WIDTH, WIDTH), Tanh(), Linear(WIDTH, WIDTH), Tanh(), Linear(WIDTH, 1))


def sent_by(kind: str, ranks: Ranks) -> int:
    """Return what a later backward pass under DDP sends with this compression."""
    ddp = DistributedDataParallel(model_of(), bucket_cap_mb=0.1)
    plan = simple_plan(strategy="ddp", world_size=ranks.world, warmup_steps=None)
    context = context_of(Path(), ranks, plan=plan, launch={"compression": kind}, train={"seed": 1})
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(fp16=False), model=ddp.module, model_wrapped=ddp, state=SimpleNamespace(global_step=0)
    )
    local_steps_of(context, trainer)
    sent = 0
    for _ in range(STEPS):
        distributed.barrier()
        before = sent_bytes()
        ddp(torch.randn(32, WIDTH)).pow(2).mean().backward()
        distributed.barrier()
        sent = sent_bytes() - before
    return sent


def outer(ranks: Ranks) -> dict[str, Any]:
    """Compare three outer steps from different weights and token counts to torch's Nesterov on the weighted mean."""
    rank, world = ranks.rank, ranks.world
    launch = {"local_steps": 4, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
    trainer: Any = SimpleNamespace(model=model_of(), model_wrapped=SimpleNamespace())
    local = LocalSteps(context_of(Path(), ranks, launch=launch), trainer)
    reference = [tensor.detach().clone().requires_grad_() for tensor in local.parameters]
    nesterov = torch.optim.SGD(reference, lr=0.7, momentum=0.9, nesterov=True)
    gaps, back = [], True
    for turn in range(3):
        chance = torch.Generator().manual_seed(10 * turn + rank)
        with torch.no_grad():
            for parameter in local.parameters:
                parameter.add_(torch.randn(parameter.shape, generator=chance), alpha=0.01)
        local.window, local.tokens = 4, (turn + 1) * (rank + 1)
        own = [tensor.detach().clone() for tensor in local.parameters]
        share = (rank + 1) / sum(range(1, world + 1))
        for old, mine in zip(reference, own, strict=True):
            mean = mine * share
            distributed.all_reduce(mean)
            old.grad = old.detach() - mean
        with local.averaged():
            gaps.append(_gap(local.parameters, [old.detach() - old.grad for old in reference if old.grad is not None]))
        back = back and all(
            torch.equal(tensor, original) for tensor, original in zip(local.parameters, own, strict=True)
        )
        nesterov.step()
        local.synchronise()
        gaps.append(_gap(local.parameters, reference))
    return {"gap": max(gaps), "back": back, "window": local.window, "tokens": local.tokens}


def _gap(mine: Any, others: Any) -> float:
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(mine, others, strict=True))


def work(rank: int, world: int, _: list[str]) -> dict[str, Any]:
    this = Ranks(rank, world)
    sent = {kind: sent_by(kind, this) for kind in ("none", "fp16", "bf16")}
    return {
        "numbers": sum(parameter.numel() for parameter in model_of().parameters()),
        "sent": sent,
        "outer": outer(this),
    }


if __name__ == "__main__":
    answer(work)
