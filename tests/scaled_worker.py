"""A worker that trains with accelerate's loss scaler on a CPU (`python -m tests.scaled_worker`): accelerate makes one
for GPUs only.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import accelerate
import torch

from sft_play import train
from sft_play.training.faults import end


def scale_on_cpus() -> None:
    """Give every later `Accelerator` for fp16 torch's loss scaler and fp16 autocast, as on a GPU."""
    make = accelerate.Accelerator.__init__

    @wraps(make)
    def with_scaler(self: accelerate.Accelerator, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        if self.mixed_precision == "fp16":
            self.scaler, self.native_amp = torch.amp.GradScaler("cpu"), True

    accelerate.Accelerator.__init__ = with_scaler


if __name__ == "__main__":
    scale_on_cpus()
    end(train.main())
