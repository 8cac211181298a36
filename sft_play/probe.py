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
from sft_play.plan.measured import Probed
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared
from sft_play.train import build, end, main, settle_stamp
from sft_play.training.console import quiet_libraries
from sft_play.training.imports import import_libraries
from sft_play.training.memory_errors import Activity
from sft_play.training.requests import StopRequest
from sft_play.training.world import check_launch, check_world, launched_world


def worst_rows(plan: Plan) -> list[dict[str, Any]]:
    """Returns rows for all steps: each as long as the longest, with as many labels as the worst micro-batch has."""
    length = max(2, plan.row_tokens)
    if plan.pack_tokens:  # several in each pack, so that there is a mask between them
        length = max(2, length // _rows_of_a_pack(plan))
    labels = min(length - 1, max(1, round(length * plan.label_share)))
    row = {"input_ids": [1] * length, "labels": [-100] * (length - labels) + [1] * labels}
    return [row | {"row": number} for number in range((plan.steps or 1) * plan.global_batch_size)]


def _rows_of_a_pack(plan: Plan) -> int:
    """Returns how many rows each pack takes, so that a step's rows fill two micro-steps (where it has two), or nearly."""
    slots = sum(rank.micro_batch * min(2, rank.accumulation) for rank in plan.ranks)
    return max(2, -(-plan.global_batch_size // slots))


def work(run: RunFolder, _: Path | None, __: TextIO | None, doing: Activity, request: StopRequest) -> int:
    """Trains two steps and writes what this rank needed."""
    quiet_libraries()
    config, plan, prepared = read_config(run.config).config, Plan.load(run.plan), Prepared.load(run.prepared)
    import_libraries(config, plan, prepared)
    import torch

    from sft_play.data.store import write_rows

    check_launch(plan)
    before = held()
    stamp = settle_stamp(run, config, plan, prepared, None)
    rank, _world = launched_world()
    rows = run.logs / f"probe-rows-rank{rank}"
    write_rows(worst_rows(plan), rows)
    assert prepared.train is not None
    train = replace(prepared.train, path=str(rows), rows=len(worst_rows(plan)), sources=())
    worst = replace(prepared, train=train, validation=None)
    trainer, _stop, _holdings = build(run, config, plan, worst, stamp, None, doing, request)
    check_world(plan, trainer.accelerator, trainer.args.n_gpu)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    trainer.train()
    seconds = (time.perf_counter() - started) / trainer.state.global_step
    write_json(run.logs / f"probe-rank{rank}.json", asdict(measured(rank, plan.ranks[rank].micro_batch, seconds, before)))
    return 0


def held() -> int:
    """Returns what everybody, the driver included, holds of this rank's GPU, bytes; 0 where NVML does not tell, as of a MIG slice."""
    import pynvml
    import torch

    if not torch.cuda.is_available():
        return 0
    try:
        return int(torch.cuda.device_memory_used(int(os.environ.get("LOCAL_RANK", "0"))))
    except (pynvml.NVMLError, RuntimeError, ValueError):
        return 0


def measured(rank: int, micro_batch: int, seconds: float, before_bytes: int) -> Probed:
    """Returns the peaks of this process, on a GPU of which `before_bytes` were held before it began."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        # CUDA's total leaves out what the driver keeps for itself (0.3 to 0.6 GiB), NVML's figures have it in both.
        own = held() - before_bytes if before_bytes else total - free
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
