"""The ranks that train together: their messages, the context of a training, and checks of the world (ADR 4).

All collectives are here, except those for gradients and those of ZeRO and FSDP. Messages are JSON in tensors of bytes,
never pickles, which would run a peer's code.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from sft_play.config.schema import Config
from sft_play.errors import HardwareError, first_line
from sft_play.launch.environment import VARIABLE, key_here, proof, proves
from sft_play.plan.plan import DISTRIBUTED_TYPE, Plan
from sft_play.runs.folder import OWN, RunFolder
from sft_play.runs.stamp import Stamp
from sft_play.training.metrics import MetricsFile
from sft_play.training.process import Activity, launched_world

CPU = torch.device("cpu")
MOST_BYTES = 256 * 2**20
"""Most bytes of one rank's message: a number from a peer must not decide how much memory is allocated."""


Outline = list[tuple[str, list[int], str]]
"""Name, shape and dtype of each tensor."""


def outline(tensors: Mapping[str, Tensor]) -> Outline:
    """Return what a rank must know to receive these tensors."""
    return [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()]


T = TypeVar("T")


class PeerError(Exception):
    """An error of some rank, raised on all of them, so that none waits for another."""


def named(error: BaseException) -> str:
    """Return an error's type and message in one line."""
    return f"{type(error).__name__}: {first_line(error)}"


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among all ranks.

    Each method is a collective: all ranks must call it, in the same order. A single rank waits for nothing.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = CPU
    group_size: int = 1
    """Neighbouring ranks that train the same rows."""
    copies: int = 1
    """How many of them compute all tokens of these rows, each with part of the weights (tensor parallel, stages)."""

    @property
    def data_rank(self) -> int:
        """Index of this rank's group among the groups that train different rows. Not collective."""
        return self.rank // self.group_size

    @property
    def data_world(self) -> int:
        """Number of groups that train different rows. Not collective."""
        return self.world // self.group_size

    @property
    def part(self) -> tuple[int, int]:
        """Index of this rank's slice of its group's lines, and the number of slices. Not collective."""
        return (self.rank % self.group_size, self.group_size) if self.copies == 1 else (0, 1)

    @property
    def model(self) -> tuple[int, int]:
        """Index of the complete model that this rank holds (a slice of), and the number of models. Not collective."""
        return self.rank // self.copies, self.world // self.copies

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes shared files. Not collective."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's JSON-compatible `value`; tuples arrive as lists."""
        if self.world == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        sizes = [int(size) for (size,) in self.table([data.numel()])]
        longest = max(sizes)
        if not 0 <= longest <= MOST_BYTES:
            raise ValueError(f"a rank would send {longest:,} bytes; at most {MOST_BYTES:,} are accepted")
        parts = [torch.empty(longest, dtype=torch.uint8, device=self.device) for _ in sizes]
        distributed.all_gather(parts, pad(data, (0, longest - data.numel())))
        return [json.loads(part[:size].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's JSON-compatible `value`; tuples arrive as lists."""
        return self.gather(value if self.first else None)[0]

    def table(self, numbers: Sequence[float] | Tensor) -> list[list[float]]:
        """Return each rank's `numbers`, equally many on each, as float64."""
        mine = torch.as_tensor(numbers, dtype=torch.float64, device=self.device if self.world > 1 else None)
        if self.world == 1:
            return [mine.tolist()]
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        distributed.all_gather(rows, mine)
        table: list[list[float]] = torch.stack(rows).tolist()
        return table

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of all ranks' `values`, which are on `device`, in place."""
        if self.world > 1:
            distributed.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set on any rank."""
        return flag if self.world == 1 else bool(self.total(torch.tensor(int(flag), device=self.device)).item())

    def first_problem(self, problem: str | None) -> str | None:
        """Return the first problem, prefixed by its rank unless all ranks have one, or `None` if no rank has one."""
        if not self.any(problem is not None):
            return None
        problems = self.gather(problem)
        rank, reason = next((rank, reason) for rank, reason in enumerate(problems) if reason is not None)
        return reason if all(problems) else f"rank {rank}: {reason}"

    def attempt(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which must not contain a collective.

        Raise `PeerError` on every rank if it failed on any; a single rank raises the error itself.
        """
        if self.world == 1:
            return work()
        problem = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - every rank raises it
            problem = named(error)
        if reason := self.first_problem(problem):
            raise PeerError(reason)
        return result

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors to rank 0, which calls `receive` with their `outline`, as bytes: every backend sends those."""
        for tensor in tensors.values():
            distributed.send(tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(self.device), dst=0)

    def receive(self, source: int, outline: Outline) -> dict[str, Tensor]:
        """Return the tensors that rank `source` sends, on the CPU."""
        received = {}
        for name, shape, kind in outline:
            dtype = getattr(torch, kind)
            data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=self.device)
            distributed.recv(data, src=source)
            received[name] = data.cpu().view(dtype).reshape(shape)
        return received


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainContext:
    """The training that callbacks, saving and states belong to."""

    config: Config
    plan: Plan
    run: RunFolder
    stamp: Stamp
    ranks: Ranks
    activity: Activity
    metrics: MetricsFile | None
    """On rank 0."""

    def add_row(self, **row: Any) -> None:
        """Append a row to `metrics.jsonl`, on rank 0."""
        if self.metrics is not None:
            self.metrics.add(row)


def uses_cpu_flag(plan: Plan) -> bool:
    """Return whether to set accelerate's CPU flag, which would silently turn off DeepSpeed and FSDP."""
    return plan.device == "cpu" and not plan.sharded


def join_ranks(plan: Plan, args: Any) -> Ranks:
    """Build torch's process group and let accelerate apply FSDP2 on a CPU; call it after `TrainingArguments`."""
    device = torch.device(args.device)  # this property builds accelerate's state and the process group
    if plan.device == "cpu" and plan.strategy == "fsdp2":
        from accelerate import PartialState
        from accelerate.utils import DistributedType

        # accelerate 1.15 applies its FSDP plugin only to this type (state.py); without it each rank would train alone.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    ranks = Ranks(launched_world()[0], plan.world_size, device, plan.group_size, plan.copies)
    check_peers(plan, ranks)
    return ranks


def group_of(ranks: Ranks, timeout_seconds: float) -> distributed.ProcessGroup:
    """Return the process group of the ranks that train the same rows as this one. Collective over all ranks."""
    group, _ = distributed.new_subgroups(ranks.group_size, timeout=timedelta(seconds=timeout_seconds))
    return group


def replicas_of(ranks: Ranks, timeout_seconds: float) -> distributed.ProcessGroup:
    """Return the process group of the ranks with the same slices but other rows. Collective over all ranks."""
    groups = [list(range(first, ranks.world, ranks.group_size)) for first in range(ranks.group_size)]
    group, _ = distributed.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=timeout_seconds))
    return group


def check_peers(plan: Plan, ranks: Ranks) -> None:
    """Raise `HardwareError` if a rank of another machine does not know the run's key. Collective.

    torch's store accepts whoever reaches its port; a stranger that took a rank's place is detected here, before
    anything is shared.
    """
    if plan.num_nodes == 1 or (key := key_here()) is None:
        return
    words = ranks.gather(secrets.token_hex(32))
    proofs = ranks.gather(proof(key, "rank", ranks.rank, words))
    if wrong := [place for place, answer in enumerate(proofs) if not proves(key, answer, "rank", place, words)]:
        raise HardwareError(
            f"rank {wrong[0]} does not know this run's `{VARIABLE}`: it does not belong to this run, and nothing was"
            " sent to it"
        )


def check_world(plan: Plan, accelerator: Any, gpus: int) -> None:
    """Compare plan, torch and accelerate before the first batch. Raise `HardwareError` naming all three.

    `gpus` is the number of GPUs among which one process would divide its batches (`TrainingArguments.n_gpu`).
    """
    if gpus > 1:
        raise HardwareError(
            f"this process sees {gpus} GPUs and would train under torch's DataParallel; the plan has one GPU per"
            " process",
            hint="start workers through `make`, or show one GPU: CUDA_VISIBLE_DEVICES=0",
        )
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    planned = kind.replace("MULTI_CPU", "MULTI_GPU") == DISTRIBUTED_TYPE[plan.strategy]
    if not plan.world_size == world == accelerator.num_processes or not planned:
        raise HardwareError(
            f"the plan is {plan.strategy} over {plan.world_size} ranks, torch has {world}, "
            f"accelerate has {accelerator.num_processes} under {kind}",
            hint="this run would not train what was planned; please report it with `make doctor JSON=1`",
        )


def ranks_together(context: TrainContext) -> tuple[int, ...]:
    """Return the ranks that see the run folder of rank 0, the same on each. Collective with several machines.

    The launchers have tested that (`launch.agreement.meet`): they see it on node 0, and on other machines whose own
    folder is inside it. They have refused others where every machine writes a part of each checkpoint.
    """
    plan, ranks = context.plan, context.ranks
    if plan.num_nodes == 1:
        return tuple(range(plan.world_size))
    seen = ranks.gather(ranks.rank < plan.ranks_by_node[0] or OWN in os.environ)
    return tuple(rank for rank, sees in enumerate(seen) if sees)


def leave() -> None:
    """Destroy the process group, so that no rank aborts after the work is done."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
