"""Asks the world, then checks it: the plan's, torch's and accelerate's idea of ranks and strategy must be one (ADR 4)."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from sft_play.errors import CheckpointError, HardwareError
from sft_play.launch.key import VARIABLE, key_here, new_word, proof, proves
from sft_play.plan.plan import Plan
from sft_play.runs.manifest import SHARDED

EXPECTED = {
    "single": ("NO",),
    "ddp": ("MULTI_GPU", "MULTI_CPU"),
    "zero1": ("DEEPSPEED",),
    "zero2": ("DEEPSPEED",),
    "zero3": ("DEEPSPEED",),
    "fsdp2": ("FSDP",),
}
"""Strategy of the plan -> what accelerate may call it."""


def launched_world() -> tuple[int, int]:
    """Returns (rank, world size) as the launcher set them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_launch(plan: Plan) -> None:
    """Raises `HardwareError` when another number of processes was started than planned."""
    _, world = launched_world()
    if world != plan.world_size:
        raise HardwareError(
            f"{world} processes were started, but the plan is for {plan.world_size}",
            hint="start workers through `make`, or give `accelerate launch` the run's own accelerate.yaml",
        )


def uses_cpu_flag(plan: Plan) -> bool:
    """Whether accelerate must be told that there is no GPU. With DeepSpeed and FSDP the flag would silently turn them off."""
    return plan.device == "cpu" and plan.strategy in ("single", "ddp")


def prepare_state(plan: Plan, args: Any) -> None:
    """Builds torch's process group, and makes accelerate apply FSDP2 on a CPU. Call after `TrainingArguments` was made."""
    _ = args.device  # builds accelerate's state and the process group
    if plan.device == "cpu" and plan.strategy == "fsdp2":
        from accelerate import PartialState
        from accelerate.utils import DistributedType

        # accelerate 1.15 applies its FSDP plugin only to this type (state.py); without it each rank would train alone.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    check_peers(plan)


def check_peers(plan: Plan) -> None:
    """Raises `HardwareError` where a rank of another machine does not know the run's key. Collective.

    torch's store takes whoever reaches its port; a stranger that took a rank's place there is found here, before anything is shared.
    """
    from sft_play.training.ranks import gather

    if plan.num_nodes == 1 or (key := key_here()) is None:
        return
    words, rank = gather(new_word()), launched_world()[0]
    proofs = gather(proof(key, "rank", rank, words))
    if wrong := [place for place, given in enumerate(proofs) if not proves(key, given, "rank", place, words)]:
        raise HardwareError(
            f"rank {wrong[0]} does not know this run's `{VARIABLE}`: it is a stranger's, and nothing was sent to it"
        )


def check_world(plan: Plan, accelerator: Any, gpus: int) -> None:
    """Compares plan, torch and accelerate before the first batch. Raises `HardwareError` naming all three.

    `gpus`: how many one process would divide its batches between (`TrainingArguments.n_gpu`).
    """
    import torch

    if gpus > 1:
        raise HardwareError(
            f"this process sees {gpus} GPUs and would train under torch's DataParallel; the plan is one card for each process",
            hint="start workers through `make`, or show one card: CUDA_VISIBLE_DEVICES=0",
        )

    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    found = torch.distributed.get_world_size() if grouped else 1
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if not plan.world_size == found == accelerator.num_processes or kind not in EXPECTED[plan.strategy]:
        raise HardwareError(
            f"the plan is {plan.strategy} over {plan.world_size} ranks, torch has {found}, "
            f"accelerate has {accelerator.num_processes} under {kind}",
            hint="this run would not train what was planned; please report it with `make doctor JSON=1`",
        )


def ranks_together(plan: Plan, folder: Path) -> tuple[int, ...]:
    """Returns the ranks that see the run folder of rank 0, the same on each. Collective where there are several machines.

    The disk itself is asked: rank 0 writes a file with a random name, the others look for it.
    """
    from sft_play.training.ranks import from_rank_0, gather

    if plan.num_nodes == 1 or plan.world_size == 1:
        return tuple(range(plan.world_size))
    mark: str | None = None
    if launched_world()[0] == 0:
        with contextlib.suppress(OSError):  # a folder that cannot be written says so again, and better, when a checkpoint is
            name = f".seen-{secrets.token_hex(8)}"
            (folder / name).touch()
            mark = name
    mark = from_rank_0(mark)
    seen = gather(mark is None or (folder / mark).exists())
    if launched_world()[0] == 0 and mark is not None:
        with contextlib.suppress(OSError):
            (folder / mark).unlink()
    return tuple(rank for rank, one in enumerate(seen) if one)


def check_folders(plan: Plan, save_strategy: str, together: Collection[int]) -> None:
    """Raises `CheckpointError` where a checkpoint could not be complete: parts of the states on machines with run folders of their own."""
    apart = [str(rank) for rank in range(plan.world_size) if rank not in together]
    if apart and plan.strategy in SHARDED and save_strategy != "no":
        raise CheckpointError(
            f"under {plan.strategy} every machine writes a part of each checkpoint, and rank {', '.join(apart)} does not see the run folder"
            " of rank 0",
            hint="let RUNS_DIR be a folder that all machines share, or take `make train-distributed` with `launch.strategy: ddp`, or set"
            " `train.save_strategy: no`",
        )


def check_start(checkpoint: Path | None) -> None:
    """Raises `CheckpointError` on every rank when they would go on from different checkpoints: machines with a run folder each."""
    from sft_play.training.ranks import gather

    starts = gather(checkpoint.name if checkpoint else "its start")
    if len(set(starts)) > 1:
        told = ", ".join(f"rank {rank} from {start}" for rank, start in enumerate(starts))
        raise CheckpointError(
            f"the ranks would go on from different checkpoints: {told}",
            hint="let RUNS_DIR be a folder that all machines share, or copy the run's `checkpoints/` from node 0 to the others",
        )


def leave() -> None:
    """Takes the process group down, so that no rank aborts after the work is done."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
