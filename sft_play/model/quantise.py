"""Quantised bases: which settings bitsandbytes gets, and what to do with a base that comes quantised."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from sft_play.config.schema import TuningConfig
from sft_play.errors import HardwareError, UserError
from sft_play.files import read_json
from sft_play.plan.backends import conflict_for
from sft_play.plan.plan import Plan

COMPUTE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Library that transformers needs for each way of quantising that a checkpoint may come with.
_LIBRARIES = {
    "bitsandbytes": "bitsandbytes", "gptq": "gptqmodel", "awq": "gptqmodel", "aqlm": "aqlm", "hqq": "hqq", "eetq": "eetq",
    "compressed-tensors": "compressed_tensors", "quanto": "optimum.quanto", "torchao": "torchao",
    "vptq": "vptq", "higgs": "flute",
}  # fmt: skip


def quantisation_of(folder: Path) -> dict[str, Any] | None:
    """Returns the `quantization_config` that a model folder comes with, or `None` for plain weights."""
    value = read_json(folder / "config.json")
    found = value.get("quantization_config") or (value.get("text_config") or {}).get("quantization_config")
    return dict(found) if found else None


def method_of(quantisation: dict[str, Any]) -> str:
    """Returns the name of the method: `bitsandbytes`, `gptq`, `awq`, ..."""
    method = str(quantisation.get("quant_method") or "")
    if method in ("", "bitsandbytes_4bit", "bitsandbytes_8bit"):
        return "bitsandbytes" if method or quantisation.get("load_in_4bit") or quantisation.get("load_in_8bit") else "unknown"
    return method


def check_existing(quantisation: dict[str, Any], tuning: TuningConfig, strategy: str) -> str:
    """Returns what to tell the user about a base that is already quantised.

    Raises `UserError` for `full` tuning, which needs plain weights, and for a strategy that cannot hold quantised ones;
    `HardwareError` when the method's library is missing.
    """
    method = method_of(quantisation)
    if tuning.mode == "full":
        raise UserError(
            f"the base model comes quantised ({method}), and `tuning.mode: full` cannot train quantised weights",
            hint="use `tuning.mode: qlora`, or the model's unquantised version",
        )
    library = _LIBRARIES.get(method)
    if library and importlib.util.find_spec(library.split(".")[0]) is None:
        raise HardwareError(
            f"the base model comes quantised by `{method}`, and the package `{library}` that reads it is not installed",
            hint=f"`pip install {library.split('.')[0]}`, or use the model's unquantised version with `tuning.mode: qlora`",
        )
    conflict = conflict_for(tuning.backend, "qlora", "int8" if quantisation.get("load_in_8bit") else "nf4", strategy)
    if not conflict and strategy == "zero3" and method != "bitsandbytes":
        conflict = f"`{method}` under ZeRO-3 was not tried: use `ddp`, `zero2` or `fsdp2`"
    if conflict:
        raise UserError(f"the base model comes quantised ({describe(quantisation)}). {conflict}")
    note = f"the base comes quantised ({describe(quantisation)}): it is used as it is and not quantised again"
    if tuning.mode == "qlora":
        note += f"; `tuning.quantization: {tuning.quantization}` has nothing to do"
    if strategy == "fsdp2" and quantisation.get("bnb_4bit_quant_storage", "uint8") in ("uint8", "int8"):
        note += "; its packed bytes are stored as integers, which FSDP2 does not shard: each rank holds all of them"
    return note


def describe(quantisation: dict[str, Any]) -> str:
    """Returns a few words on a quantisation: `bitsandbytes nf4`, `gptq 4 bits`, ..."""
    method = method_of(quantisation)
    if method == "bitsandbytes":
        return f"bitsandbytes {'int8' if quantisation.get('load_in_8bit') else quantisation.get('bnb_4bit_quant_type', 'fp4')}"
    bits = quantisation.get("bits") or quantisation.get("w_bit")
    return f"{method} {bits} bits" if bits else method


def bnb_settings(tuning: TuningConfig, plan: Plan) -> Any:
    """Returns transformers' `BitsAndBytesConfig` for `tuning.mode: qlora`.

    nf4 is quantised doubly (the blocks' scales are quantised too), and fused experts with the linear layers where the plan says so.
    FSDP2 and ZeRO-3 share out a parameter only in a float type, and FSDP2 all of a module's in one: the packed bytes are then stored as
    the adapters' type, else as plain bytes. Raises `UserError` for a strategy that cannot hold quantised weights.
    """
    from transformers import BitsAndBytesConfig

    conflict = conflict_for(tuning.backend, tuning.mode, tuning.quantization, plan.strategy)
    if conflict:
        raise UserError(conflict)
    if tuning.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    storage = getattr(torch, plan.weights_dtype) if plan.strategy in ("fsdp2", "zero3") else torch.uint8
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=COMPUTE_TYPES[plan.precision],
        bnb_4bit_quant_storage=storage,
    )
    if not plan.nf4_experts:
        return settings
    from sft_play.model.experts import with_experts

    return with_experts(settings)
