"""One of several ranks that exchange gradients or weights over gloo, and say what came of it: run by `test_compression.py` and others.

    python -m tests.numerics.exchange_ranks RANK WORLD MEETING_FILE OUT_FILE

`OUT_FILE` gets a JSON object with the result of each case. Bytes are those of this network namespace's interfaces, as the kernel counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Linear, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel

from sft_play.training.ranks import Ranks
from sft_play.training.slow_network import LocalSteps, PowerSgd, exchange_of
from tests.contexts import context_of
from tests.plans import simple_plan

WIDTH = 256
STEPS = 6


def sent_bytes() -> int:
    """Returns the bytes that all interfaces of this namespace have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Sequential(Linear(WIDTH, WIDTH), Tanh(), Linear(WIDTH, WIDTH), Tanh(), Linear(WIDTH, 1))


def target(x: Tensor) -> Tensor:
    return (x[:, :8] * torch.linspace(-1, 1, 8)).sum(1, keepdim=True)


def wrapped(kind: str) -> tuple[Any, PowerSgd | None]:
    """Returns a model under DDP with its hook, and PowerSGD's states."""
    ddp = DistributedDataParallel(model_of(), bucket_cap_mb=0.1)
    context = context_of(
        Path(), Ranks(distributed.get_rank(), distributed.get_world_size()),
        plan=simple_plan(strategy="ddp", world_size=distributed.get_world_size(), warmup_steps=None),
        launch={"compression": kind, "powersgd_rank": 4}, train={"seed": 1},
    )  # fmt: skip
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(fp16=False), model=ddp.module, model_wrapped=ddp, state=SimpleNamespace(global_step=0)
    )
    found = exchange_of(context, trainer, lambda: None)
    assert found is None or isinstance(found, PowerSgd)
    return ddp, found


def train(kind: str, rank: int, *, steps: int) -> dict[str, Any]:
    """Returns losses over both ranks' rows, bytes of a later step, and the weights' sum."""
    ddp, powersgd = wrapped(kind)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    rows = torch.Generator().manual_seed(100 + rank)
    losses, sent = [], []
    for step in range(steps):
        if powersgd is not None:
            powersgd.step = step
        distributed.barrier()
        before = sent_bytes()
        x = torch.randn(32, WIDTH, generator=rows)
        loss = (ddp(x) - target(x)).pow(2).mean()
        loss.backward()
        distributed.barrier()
        sent.append(sent_bytes() - before)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        distributed.all_reduce(total)
        losses.append(float(total) / distributed.get_world_size())
    weights = [float(parameter.detach().double().sum()) for parameter in ddp.parameters()]
    return {"losses": losses, "sent": sent[-1], "weights": weights, "error": _norms(powersgd)}


def _norms(powersgd: PowerSgd | None) -> dict[str, float]:
    return {name: float(error.norm()) for name, error in powersgd.error.items()} if powersgd else {}


def outer(rank: int, world: int) -> dict[str, Any]:
    """Three outer steps from weights and token counts that differ, beside torch's own Nesterov on the weighted mean."""
    launch = {"local_steps": 4, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
    trainer: Any = SimpleNamespace(model=model_of(), model_wrapped=SimpleNamespace())
    local = LocalSteps(context_of(Path(), Ranks(rank, world), launch=launch), trainer)
    reference = [one.detach().clone().requires_grad_() for one in local.parameters]
    nesterov = torch.optim.SGD(reference, lr=0.7, momentum=0.9, nesterov=True)
    gaps, back = [], True
    for turn in range(3):
        chance = torch.Generator().manual_seed(10 * turn + rank)
        with torch.no_grad():
            for parameter in local.parameters:
                parameter.add_(torch.randn(parameter.shape, generator=chance), alpha=0.01)
        local.window, local.tokens = 4, (turn + 1) * (rank + 1)
        own = [one.detach().clone() for one in local.parameters]
        shares = [(one + 1) / sum(range(1, world + 1)) for one in range(world)]
        for old, mine in zip(reference, own, strict=True):
            mean = mine * shares[rank]
            distributed.all_reduce(mean)
            old.grad = old.detach() - mean
        with local.averaged():
            seen = [old.detach() - old.grad for old in reference if old.grad is not None]
            gaps.append(_gap(local.parameters, seen))
        back = back and all(torch.equal(one, kept) for one, kept in zip(local.parameters, own, strict=True))
        nesterov.step()
        local.synchronise()
        gaps.append(_gap(local.parameters, reference))
    return {"gap": max(gaps), "back": back, "window": local.window, "tokens": local.tokens}


def _gap(mine: Any, others: Any) -> float:
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(mine, others, strict=True))


def main(arguments: list[str]) -> None:
    """Runs every case."""
    rank, world, meeting, out = int(arguments[0]), int(arguments[1]), arguments[2], Path(arguments[3])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        kind: lambda kind=kind: train(kind, rank, steps=STEPS)  # type: ignore[misc]
        for kind in ("none", "fp16", "bf16")
    }
    cases["powersgd"] = lambda: train("powersgd", rank, steps=60)
    cases["plain60"] = lambda: train("none", rank, steps=60)
    cases["outer"] = lambda: outer(rank, world)
    numbers = sum(parameter.numel() for parameter in model_of().parameters())
    found = {"numbers": numbers, **{name: case() for name, case in cases.items()}}
    out.write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
