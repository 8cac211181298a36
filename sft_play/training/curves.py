"""TensorBoard: loss aggregated and per rank, speed, MFU, memory and GPU use, beside the learning rate and gradient norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "memory_gib": "memory/rank0_gib",
}


class Curves(TrainerCallback):
    """Writes what is logged as scalars into `tb/`; a resumed run goes on where its checkpoint was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=state.global_step + 1 if state.global_step else 0)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.writer is None or not logs:
            return
        for name, value in logs.items():
            if name in NAMES and value is not None:
                self.writer.add_scalar(NAMES[name], value, state.global_step)
            elif name.startswith("eval_") and isinstance(value, (int, float)):
                self.writer.add_scalar(f"eval/{name.removeprefix('eval_')}", value, state.global_step)
        for rank, loss in enumerate(logs.get("rank_loss", [])):
            self.writer.add_scalar(f"rank_loss/{rank}", loss, state.global_step)
        if "loss" in logs:
            self._devices(state.global_step)

    def _devices(self, step: int) -> None:
        if not torch.cuda.is_available():
            return
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            self.writer.add_scalar(f"gpu/{index}/memory_gib", (total - free) / 2**30, step)
            try:
                self.writer.add_scalar(f"gpu/{index}/utilisation", torch.cuda.utilization(index), step)
            except (ModuleNotFoundError, RuntimeError):  # no NVML on this machine
                continue

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.writer is not None:
            self.writer.close()
