"""The heavy packages of a worker, imported without those that its run does not use."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from sft_play.config.schema import Config
from sft_play.plan.choices import GPU_ONLY_OPTIMIZERS
from sft_play.plan.plan import Plan
from sft_play.runs.prepared import Prepared


def import_libraries(config: Config, plan: Plan, prepared: Prepared) -> None:
    """Imports torch, transformers, accelerate and PEFT; call before anything else does.

    PEFT and accelerate import bitsandbytes and DeepSpeed only because they are installed: where the plan has no use for them, `None` in
    `sys.modules` makes them look absent (Python's reference, 5.3.1). transformers' `Trainer` does the same with `datasets`, which user
    code may still want, so that is hidden during this import alone. Garbage collection rests meanwhile (a fifth of the time), and never
    again walks over what was imported.
    """
    gc.disable()
    absent = {"deepspeed": not plan.strategy.startswith("zero"), "bitsandbytes": not uses_bitsandbytes(config, plan, prepared)}
    for name in [name for name, is_absent in absent.items() if is_absent and not config.model.trust_remote_code]:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    hides_datasets = sys.modules.setdefault("datasets", None) is None  # type: ignore[arg-type]
    import sft_play.training.trainer  # noqa: F401

    if hides_datasets:
        del sys.modules["datasets"]
    gc.freeze()
    gc.enable()


def uses_bitsandbytes(config: Config, plan: Plan, prepared: Prepared) -> bool:
    """Whether weights are quantised, or may be (by Unsloth, or in the base as it comes), or an optimizer's states are."""
    from sft_play.model.quantise import quantisation_of

    return (
        config.tuning.mode == "qlora"
        or config.tuning.backend == "unsloth"
        or plan.optim in GPU_ONLY_OPTIMIZERS
        or "8bit" in plan.optim
        or quantisation_of(Path(prepared.model.path)) is not None
    )
