"""Quantised bases: which settings bitsandbytes gets, and what to do with a base that comes quantised."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sft_play.config.schema import TuningConfig
from sft_play.errors import HardwareError, UserError
from sft_play.files import read_json, write_json
from sft_play.plan.plan import Plan
from sft_play.plan.strategies import conflict_for

COMPUTE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Library that transformers needs for each way of quantising that a checkpoint may come with.
_LIBRARIES = {
    "bitsandbytes": "bitsandbytes", "gptq": "gptqmodel", "awq": "gptqmodel", "aqlm": "aqlm", "hqq": "hqq", "eetq": "eetq",
    "compressed-tensors": "compressed_tensors", "quanto": "optimum.quanto", "torchao": "torchao",
    "vptq": "vptq", "higgs": "flute",
}  # fmt: skip


def quantisation_of(folder: Path) -> dict[str, Any] | None:
    """Return the `quantization_config` that a model folder comes with, or `None` for plain weights."""
    value = read_json(folder / "config.json")
    found = value.get("quantization_config") or (value.get("text_config") or {}).get("quantization_config")
    return dict(found) if found else None


def method_of(quantisation: dict[str, Any]) -> str:
    """Return the name of the method: `bitsandbytes`, `gptq`, `awq`, ..."""
    method = str(quantisation.get("quant_method") or "")
    if method in ("", "bitsandbytes_4bit", "bitsandbytes_8bit"):
        return "bitsandbytes" if method or quantisation.get("load_in_4bit") or quantisation.get("load_in_8bit") else "unknown"
    return method


def check_existing(quantisation: dict[str, Any], tuning: TuningConfig, strategy: str) -> str:
    """Return what to tell the user about a base that is already quantised.

    Raise `UserError` for `full` tuning, which needs plain weights, and for a strategy that cannot hold quantised ones;
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
    as_it_is = replace(tuning, mode="qlora", quantization="int8" if quantisation.get("load_in_8bit") else "nf4")
    conflict = conflict_for(as_it_is, strategy)
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


def expand_mxfp4(source: Path, weights: Sequence[Path], target: Path) -> None:
    """Write the model in `source` with its experts in bfloat16, which holds every MXFP4 number exactly, into the new folder `target`.

    One file per layer or so, so that memory holds one at a time; `config.json` comes last.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    print(f"expanding the MXFP4 weights in {source} to bfloat16, this once", file=sys.stderr, flush=True)
    target.mkdir()
    places: dict[str, Any] = {}
    for path in weights:
        file: Any = safe_open(path, framework="pt")
        places |= dict.fromkeys(file.keys(), file)
    shards: dict[str, list[str]] = {}
    for name in places:
        if not (name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in places):
            layer = re.search(r"layers\.(\d+)\.", name)
            shards.setdefault(f"model-{int(layer[1]):05}.safetensors" if layer else "model-rest.safetensors", []).append(name)
    index = {}
    for file, names in shards.items():
        tensors = {}
        for name in names:
            tensor, plain = places[name].get_tensor(name), name.removesuffix("_blocks")
            if plain != name:
                tensor = convert_moe_packed_tensors(tensor, places[f"{plain}_scales"].get_tensor(f"{plain}_scales"))
            tensors[plain], index[plain] = tensor, file
        save_file(tensors, target / file, metadata={"format": "pt"})
    write_json(target / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    for path in source.iterdir():
        if path.is_file() and path not in weights and path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    config = read_json(source / "config.json")
    del config["quantization_config"]
    write_json(target / "config.json", config)


def describe(quantisation: dict[str, Any]) -> str:
    """Return a few words on a quantisation: `bitsandbytes nf4`, `gptq 4 bits`, ..."""
    method = method_of(quantisation)
    if method == "bitsandbytes":
        return f"bitsandbytes {'int8' if quantisation.get('load_in_8bit') else quantisation.get('bnb_4bit_quant_type', 'fp4')}"
    bits = quantisation.get("bits") or quantisation.get("w_bit")
    return f"{method} {bits} bits" if bits else method


def bnb_settings(tuning: TuningConfig, plan: Plan) -> Any:
    """Return transformers' `BitsAndBytesConfig` for `tuning.mode: qlora`.

    nf4 is quantised doubly (the blocks' scales are quantised too), and fused experts with the linear layers where the plan says so.
    FSDP2 and ZeRO-3 share out a parameter only in a float type, and FSDP2 all of a module's in one: the packed bytes are then stored as
    the adapters' type, else as plain bytes. Raise `UserError` for a strategy that cannot hold quantised weights.
    """
    from transformers import BitsAndBytesConfig

    conflict = conflict_for(tuning, plan.strategy)
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
    return with_experts(settings)


WITH_EXPERTS = "bitsandbytes_with_experts"
"""Our method among those of transformers."""


def with_experts(settings: Any) -> Any:
    """Make transformers quantise fused experts too, while they are loaded; nf4 in blocks of 64 with quantised scales, as for linear layers.

    Each layer's are expanded when they compute (bitsandbytes' parametrisation).
    """
    _register_quantizer()
    settings.quant_method = WITH_EXPERTS
    return settings


@cache
def _register_quantizer() -> None:
    """Tell transformers how; here, since it imports bitsandbytes."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers.auto import register_quantizer
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.quantizers.quantizers_utils import get_module_from_name

    from sft_play.model.lora import is_expert

    class Quantise(Bnb4bitQuantize):
        def convert(
            self, input_dict: dict[str, Any], model: Any = None, missing_keys: Any = None, **others: Any
        ) -> dict[str, Any]:
            layers = {}
            for name, value in input_dict.items():
                module, leaf = get_module_from_name(model, name)
                if not is_expert(name, module._parameters[leaf]):
                    layers[name] = value
                    continue
                weight, dtype = value[0] if isinstance(value, list) else value, module._parameters[leaf].dtype
                setattr(module, leaf, nn.Parameter(weight, requires_grad=False))
                replace_parameter_4bit(module, leaf, compress_statistics=True, quant_type="nf4")
                module.parametrizations[leaf][0].quant_state.dtype = dtype  # else that of the file
                module._is_hf_initialized = True
                missing_keys.discard(name)
            return dict(super().convert(layers, model=model, missing_keys=missing_keys, **others))

    @register_quantizer(WITH_EXPERTS)
    class Quantizer(Bnb4BitHfQuantizer):
        def param_needs_quantization(self, model: Any, param_name: str, **others: Any) -> bool:
            module, leaf = get_module_from_name(model, param_name)
            own = module._parameters.get(leaf)
            return super().param_needs_quantization(model, param_name, **others) or (
                own is not None and is_expert(param_name, own)
            )

        def get_quantize_ops(self) -> Quantise:
            return Quantise(self)


def let_go_of_files(model: Any) -> None:
    """Copy what was not quantised. On a CPU it lies in the mapped files, whose pages, all read to quantise the rest, would stay too."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.clone()


def keep_quantised_weights(model: Any) -> None:
    """Make bitsandbytes 0.50 leave nf4 weights as they are.

    On CPUs with AVX512-BF16 it repacks them the first time they run in evaluation mode, which rounds their scales for good to
    bf16: training would go on over another base, and scores would depend on the machine.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
