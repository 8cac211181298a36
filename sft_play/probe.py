"""The worker of a probe: `accelerate launch -m sft_play.probe --run FOLDER`: two steps of the worst batch, and what they needed.

It is the training worker with other rows: the same model, trainer and strategy, no evaluation and no checkpoint.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from sft_play.config.load import read_config
from sft_play.files import write_json
from sft_play.plan.plan import Plan
from sft_play.plan.sources import Probed
from sft_play.runs.prepared import Prepared
from sft_play.train import build_trainer, main, settle_stamp
from sft_play.training.faults import end
from sft_play.training.process import StopRequest, check_launch, import_libraries, launched_world, quiet_libraries


def worst_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return rows for all steps: each as long as the longest, with as many labels as the worst micro-batch has."""
    length = max(2, plan.row_tokens)
    if plan.pack_tokens:  # several in each pack, so that there is a mask between them
        length = max(2, length // _rows_of_a_pack(plan))
    labels = min(length - 1, max(1, round(length * plan.label_share)))
    row = {"input_ids": [1] * length, "labels": [-100] * (length - labels) + [1] * labels}
    return [row | {"row": number} for number in range((plan.steps or 1) * plan.global_batch_size)]


def _rows_of_a_pack(plan: Plan) -> int:
    """Return how many rows each pack takes, so that a step's rows fill two micro-steps (where it has two), or nearly."""
    slots = sum(rank.micro_batch * min(2, rank.accumulation) for rank in plan.ranks[:: plan.group_size])
    return max(2, -(-plan.global_batch_size // slots))


def work(request: StopRequest, _: Path | None, __: TextIO | None) -> int:
    """Train two steps and write what this rank needed."""
    quiet_libraries()
    run = request.run
    config, plan, prepared = read_config(run.config).config, Plan.load(run.plan), Prepared.load(run.prepared)
    import_libraries(config, plan, prepared)
    import torch

    from sft_play.data.store import write_rows
    from sft_play.training.ranks import check_world

    check_launch(plan)
    before = used_bytes()
    stamp = settle_stamp(run, config, plan, prepared, None)
    rank, _world = launched_world()
    rows = run.logs / f"probe-rows-rank{rank}"
    write_rows(worst_rows(plan), rows)
    assert prepared.train is not None
    train = replace(prepared.train, path=str(rows), rows=len(worst_rows(plan)), sources=())
    worst = replace(prepared, train=train, validation=None)
    trainer = build_trainer(request, config, plan, worst, stamp, None)
    check_world(plan, trainer.accelerator, trainer.args.n_gpu)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    trainer.train()
    seconds = (time.perf_counter() - started) / trainer.state.global_step
    write_json(run.logs / f"probe-rank{rank}.json", asdict(measure(rank, plan.ranks[rank].micro_batch, seconds, before)))
    return 0


def used_bytes() -> int:
    """Return the bytes in use on this rank's GPU, by all programs and the driver; 0 where NVML does not say, as for a MIG slice."""
    import pynvml
    import torch

    if not torch.cuda.is_available():
        return 0
    try:
        return int(torch.cuda.device_memory_used(int(os.environ.get("LOCAL_RANK", "0"))))
    except (pynvml.NVMLError, RuntimeError, ValueError):
        return 0


def measure(rank: int, micro_batch: int, seconds: float, before_bytes: int) -> Probed:
    """Return the peaks of this process, on a GPU of which `before_bytes` were held before it began."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        # CUDA's total leaves out what the driver keeps for itself (0.3 to 0.6 GiB), NVML's figures have it in both.
        own = used_bytes() - before_bytes if before_bytes else total - free
        return Probed(
            rank=rank, micro_batch=micro_batch, allocated_bytes=torch.cuda.max_memory_allocated(),
            reserved_bytes=torch.cuda.max_memory_reserved(), device_bytes=own, seconds_per_step=seconds,
        )  # fmt: skip
    import resource

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Probed(
        rank=rank, micro_batch=micro_batch, allocated_bytes=0, reserved_bytes=0, device_bytes=resident, seconds_per_step=seconds
    )  # fmt: skip


if __name__ == "__main__":
    end(main(program=work))
