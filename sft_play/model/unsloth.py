"""The `unsloth` backend: the same adapters over the same base, loaded and run by Unsloth's kernels on NVIDIA GPUs."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from sft_play.config.schema import Config
from sft_play.errors import HardwareError, UserError
from sft_play.model import quantise
from sft_play.model.folder import runs_code
from sft_play.plan.backends import NO_UNSLOTH, UNSLOTH_HINT
from sft_play.plan.plan import Plan
from sft_play.runs.prepared import Prepared

# What Unsloth has fused kernels for; other names work too, through plain PEFT layers.
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def check_available() -> None:
    """Raises `HardwareError` that names what is missing: the package, the GPU, or both."""
    lacking = []
    if importlib.util.find_spec("unsloth") is None:
        lacking.append(NO_UNSLOTH)
    if not torch.cuda.is_available() or torch.version.cuda is None:
        lacking.append("an NVIDIA GPU (none is seen here)")
    if lacking:
        raise HardwareError(f"`tuning.backend: unsloth` needs {' and '.join(lacking)}", hint=UNSLOTH_HINT)


def load(config: Config, plan: Plan, prepared: Prepared) -> Any:
    """Returns the model to train, as `model.load.load_for_training` does: adapters require gradients, or all for `full`.

    The tokenizer stays ours: Unsloth's would be changed on the way. Raises `HardwareError` when Unsloth or the GPU is missing
    and `UserError` for what Unsloth does not do.
    """
    check_available()
    folder = Path(prepared.model.path)
    existing = quantise.quantisation_of(folder)
    if existing is not None:
        quantise.check_existing(existing, config.tuning, plan.strategy)
    four_bit = config.tuning.mode == "qlora" if existing is None else quantise.describe(existing).startswith("bitsandbytes nf4")
    model = _read(config, plan, folder, four_bit=four_bit)
    if config.tuning.mode != "full":
        model = _add_adapters(model, config, plan)
    model.config.get_text_config().use_cache = False
    return _select_positions(model)


def _read(config: Config, plan: Plan, folder: Path, *, four_bit: bool) -> Any:
    if config.tuning.mode == "qlora" and config.tuning.quantization == "int8":
        raise UserError(
            "`tuning.backend: unsloth` quantises to nf4, not int8",
            hint="use `tuning.quantization: nf4`, or `tuning.backend: bnb`",
        )
    return _from_pretrained(
        folder,
        max_seq_len=config.model.max_seq_len,
        four_bit=four_bit,
        full=config.tuning.mode == "full",
        dtype=plan.weights_dtype,
        checkpointing=plan.gradient_checkpointing,
        trust=config.model.trust_remote_code and runs_code(folder),
    )


def _from_pretrained(
    folder: Path, *, max_seq_len: int, four_bit: bool, full: bool, dtype: str, checkpointing: bool, trust: bool
) -> Any:
    # Unsloth patches transformers while it is imported, so this import is the switch, and it must not happen elsewhere.
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(folder),
        max_seq_length=max_seq_len,
        dtype=getattr(torch, dtype),
        load_in_4bit=four_bit,
        load_in_16bit=not four_bit and not full,
        full_finetuning=full,
        device_map={"": int(os.environ.get("LOCAL_RANK", "0"))},
        use_gradient_checkpointing="unsloth" if checkpointing else False,
        trust_remote_code=trust,
        # Our folder and nothing else: else Unsloth takes its own quantised upload of a model with a known name.
        use_exact_model_name=True,
        local_files_only=True,
    )
    return model


def _add_adapters(model: Any, config: Config, plan: Plan) -> Any:
    from unsloth import FastLanguageModel

    settings = config.tuning.lora
    return FastLanguageModel.get_peft_model(
        model,
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=TARGETS if settings.target_modules == "auto" else list(settings.target_modules),
        bias="none",
        use_gradient_checkpointing="unsloth" if plan.gradient_checkpointing else False,
        random_state=config.train.seed,
        max_seq_length=config.model.max_seq_len,
    )


def _select_positions(model: Any) -> Any:
    """Makes `logits_to_keep` accept a tensor of positions, as transformers' models do; Unsloth's forward ignores one.

    The head then runs on every position and the wanted logits are picked out: right, though without the saving.
    """
    inner = model.forward

    def forward(*arguments: Any, logits_to_keep: Any = 0, **named: Any) -> Any:
        if not isinstance(logits_to_keep, torch.Tensor):
            return inner(*arguments, logits_to_keep=logits_to_keep, **named)
        output = inner(*arguments, **named)
        output["logits"] = output["logits"][:, logits_to_keep]
        return output

    model.forward = forward
    return model
