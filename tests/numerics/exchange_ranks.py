"""One of several ranks that exchange gradients or weights over gloo, and say what came of it: run by `test_compression.py` and others.

    python -m tests.numerics.exchange_ranks RANK WORLD MEETING_FILE OUT_FILE

`OUT_FILE` gets a JSON object with the result of each case. Bytes are those of this network namespace's interfaces, as the kernel counts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Linear, Sequential, Tanh
from torch.nn.parallel import DistributedDataParallel

from sft_play.training.ranks import Ranks
from sft_play.training.readings import Lap, Stopwatch
from sft_play.training.slow_network import LocalSteps, PowerSgd, exchange_of
from tests.contexts import context_of
from tests.plans import simple_plan

WIDTH = 256
STEPS = 6
LATE = 0.7


def sent_bytes() -> int:
    """Returns the bytes that all interfaces of this namespace have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Sequential(Linear(WIDTH, WIDTH), Tanh(), Linear(WIDTH, WIDTH), Tanh(), Linear(WIDTH, 1))


def target(x: Tensor) -> Tensor:
    return (x[:, :8] * torch.linspace(-1, 1, 8)).sum(1, keepdim=True)


def nothing() -> None:
    """What a trainer that measures nothing does when gradients are there."""


def wrapped(kind: str, *, guard: str = "report", computed: Callable[[], None] = nothing) -> tuple[Any, PowerSgd | None]:
    """Returns a model under DDP with its hook, and PowerSGD's states."""
    ddp = DistributedDataParallel(model_of(), bucket_cap_mb=0.1)
    context = context_of(
        Path(), Ranks(distributed.get_rank(), distributed.get_world_size()),
        plan=simple_plan(strategy="ddp", world_size=distributed.get_world_size(), warmup_steps=None),
        launch={"compression": kind, "powersgd_rank": 4}, train={"seed": 1, "spike_guard": guard},
    )  # fmt: skip
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(fp16=False), model=ddp.module, model_wrapped=ddp, state=SimpleNamespace(global_step=0)
    )
    found = exchange_of(context, trainer, computed)
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


def backward(ddp: Any, seed: int) -> Tensor:
    """Returns the loss of one micro-step, whose backward pass is made."""
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))
    loss = (ddp(x) - target(x)).pow(2).mean()
    loss.backward()
    return loss.detach()


def waiting(rank: int) -> dict[str, Any]:
    """Seconds that the stopwatch finds where another rank is late by `LATE` seconds in each of two steps."""
    watch = Stopwatch(torch.device("cpu"))
    lap = Lap(watch)
    ddp, powersgd = wrapped("powersgd", computed=watch.computed)
    assert powersgd is not None
    powersgd.step = 1000
    for warm in range(2):  # DDP sorts its buckets anew after the first step
        backward(ddp, warm)
    for turn in range(2):
        distributed.barrier()
        if rank == 1:
            time.sleep(LATE)
        x = torch.randn(32, WIDTH)
        watch.begin({"rows": [turn], "input_ids": torch.zeros(1, 30)})
        loss = (ddp(x) - target(x)).pow(2).mean()
        watch.passed(loss)
        loss.backward()
        watch.enter("optimizer")
    found = lap.take()
    return {
        "seconds": found["forward"] + found["backward"],
        "counts": [found[name] for name in ("rows", "tokens", "micro_steps")],
    }


def states(powersgd: PowerSgd) -> dict[str, dict[str, Tensor]]:
    return {"error": powersgd.error, "basis": powersgd.basis}


def left_out(rank: int) -> dict[str, Any]:
    """Whether an update that is left out leaves PowerSGD as it was, whether one that is made does not, and what stays in memory."""
    ddp, powersgd = wrapped("powersgd", guard="skip")
    assert powersgd is not None
    powersgd.step = 1000
    backward(ddp, rank)
    powersgd.settle(made=True)
    before = {kind: {name: one.clone() for name, one in held.items()} for kind, held in states(powersgd).items()}
    backward(ddp, 10 + rank)
    changed = not _same(before, states(powersgd))
    powersgd.settle(made=False)
    undone = _same(before, states(powersgd))
    backward(ddp, 20 + rank)
    powersgd.settle(made=True)
    return {
        "changed": changed,
        "undone": undone,
        "made": not _same(before, states(powersgd)),
        "kept": powersgd.before is not None,
    }


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[kind][name], other[kind][name]) for kind in one for name in one[kind])


def buffers(rank: int, world: int) -> dict[str, Any]:
    """A first local step in which rank 0 has no rows, with buffers that DDP would send."""
    model = model_of()
    model.register_buffer("angles", torch.zeros(4))
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    local = local_steps(ddp, model, world=world)
    if rank:
        backward(ddp, rank)
    local.tokens, local.window = rank, 1
    local.synchronise()
    return {"window": local.window}


def _norms(powersgd: PowerSgd | None) -> dict[str, float]:
    return {name: float(error.norm()) for name, error in powersgd.error.items()} if powersgd else {}


def local_steps(wrapped: Any, model: Any, *, world: int) -> LocalSteps:
    launch = {"local_steps": 4, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
    trainer: Any = SimpleNamespace(model=model, model_wrapped=wrapped)
    return LocalSteps(context_of(Path(), Ranks(distributed.get_rank(), world), launch=launch), trainer)


def outer(rank: int, world: int) -> dict[str, Any]:
    """Three outer steps from weights and token counts that differ, beside torch's own Nesterov on the weighted mean."""
    local = local_steps(SimpleNamespace(), model_of(), world=world)
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
    cases["waiting"] = lambda: waiting(rank)
    cases["left out"] = lambda: left_out(rank)
    cases["buffers"] = lambda: buffers(rank, world)
    cases["outer"] = lambda: outer(rank, world)
    numbers = sum(parameter.numel() for parameter in model_of().parameters())
    found = {"numbers": numbers, **{name: case() for name, case in cases.items()}}
    out.write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
