"""What each way of loading and quantising a base needs and rules out: known before anything is launched, without torch."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sft_play.config.schema import Config, TuningConfig
    from sft_play.plan.hardware import Hardware

NO_UNSLOTH = "the package `unsloth`"
UNSLOTH_HINT = (
    "`tuning.backend: bnb` runs everywhere; no release of Unsloth installs beside these versions of transformers and datasets "
    "(docs/models.md#unsloth-tuningbackend-unsloth)"
)


def missing_for(backend: str, hardware: Hardware) -> str | None:
    """Returns what `tuning.backend` lacks on this hardware, as the text of an error, or `None` when nothing is missing."""
    if backend == "bnb":
        return None if _installed("bitsandbytes") else "`tuning.backend: bnb` needs the package `bitsandbytes`, which is missing"
    lacking = []
    if not _installed("unsloth"):
        lacking.append(NO_UNSLOTH)
    if hardware.kind != "cuda":
        lacking.append("an NVIDIA GPU (none is seen here)")
    return f"`tuning.backend: unsloth` needs {' and '.join(lacking)}" if lacking else None


def conflict_for(backend: str, mode: str, quantization: str, strategy: str) -> str | None:
    """Returns why this backend or quantisation cannot go with a strategy of the plan, or `None` when it can.

    `strategy` is `single`, `ddp`, `zero1` to `zero3` or `fsdp2`. Reasons were measured with the pinned versions:
    docs/models.md says how.
    """
    if backend == "unsloth" and strategy not in ("single", "ddp"):
        return (
            f"`tuning.backend: unsloth` and `{strategy}` do not go together: Unsloth replaces the model's forward pass by "
            "kernels that need whole weights on every GPU. It allows one GPU, or `ddp` with a whole copy on each"
        )
    if backend == "unsloth" and mode == "qlora" and quantization == "int8":
        return "`tuning.backend: unsloth` quantises to nf4: use `tuning.quantization: nf4`, or `tuning.backend: bnb` for int8"
    if mode == "qlora" and quantization == "int8" and strategy == "zero3":
        return (
            "int8 and ZeRO-3 do not go together: bitsandbytes keeps the whole int8 weights in a second place (`CB`), so that nothing "
            "would be shared out. Use `tuning.quantization: nf4`, or `zero2`"
        )
    if mode == "qlora" and quantization == "int8" and strategy == "fsdp2":
        return (
            "int8 and FSDP2 do not go together: FSDP2 replaces each weight by a shard of it, and bitsandbytes' int8 weights lose "
            "their scales by that (`'Parameter' object has no attribute 'CB'`). Use `tuning.quantization: nf4`, or `ddp`"
        )
    return None


def may_quantise(config: Config) -> bool:
    """Whether `TUNING_MODE=qlora` would change something, and be taken: random weights are trained whole."""
    return config.tuning.mode != "qlora" and config.model.init != "random"


def quantises_experts(tuning: TuningConfig, strategy: str) -> bool:
    """Whether fused experts are held in nf4 like linear layers.

    int8 has no form for them, FSDP2 and ZeRO-3 would have to shard their packed bytes, and PEFT 0.21 puts no adapters over such a weight.
    """
    typed = tuning.lora.target_modules
    adapted = not isinstance(typed, str) and any("experts." in name for name in typed)
    return (
        (tuning.mode, tuning.backend, tuning.quantization) == ("qlora", "bnb", "nf4")
        and strategy not in ("fsdp2", "zero3")
        and not adapted
    )


def layout_for(backend: str) -> str | None:
    """Returns the batch layout that a backend insists on, or `None` when any will do.

    Unsloth's kernels tell rows apart by an attention mask only, not by position ids that restart.
    """
    return "padded" if backend == "unsloth" else None


def fuses_adapters(strategy: str) -> bool:
    """Whether a linear layer and its adapter run as one function (`model.kernels`).

    That needs weights that are whole outside their own forward pass: ZeRO-3 and FSDP2 gather them in hooks.
    """
    return strategy in ("single", "ddp", "zero1", "zero2")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
