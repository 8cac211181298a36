"""Reading a causal language model from a folder, or saying clearly why it cannot be read."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from sft_play.config.schema import ModelConfig
from sft_play.errors import CheckpointError, DataError, HardwareError
from sft_play.model import varlen
from sft_play.model.folder import code_not_trusted, is_about_trust, refuse_embedded_adapter, runs_code
from sft_play.plan.layouts import WITHOUT_SDPA

TEXT_WITHIN = frozenset({
    "aya_vision", "cohere2_vision", "exaone4_5", "glm4v", "glm4v_moe", "internvl", "kimi_k25", "lfm2_vl", "llava", "mistral3", "qwen2_5_vl",
    "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
})  # fmt: skip
"""Image and text models whose text part trains like a language model (`tests/numerics/test_image_text.py`)."""


def model_class(settings: Any) -> Any:
    """Returns transformers' class for a model whose text part is trained. Raises `DataError` for a family that has none."""
    if type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING or not type(settings).__module__.startswith("transformers."):
        return AutoModelForCausalLM
    if settings.model_type in TEXT_WITHIN:
        return AutoModelForImageTextToText
    raise DataError(
        f"`{settings.model_type}` is not a language model of transformers, nor one of the image and text models whose text part is "
        f"trained here ({', '.join(sorted(TEXT_WITHIN))})",
        hint="take the text model of the same family, where there is one",
    )


def read_model(
    folder: Path,
    settings: ModelConfig,
    *,
    dtype: torch.dtype,
    attention: str | None = None,
    quantization_config: Any = None,
    device: str | None = None,
) -> Any:
    """Reads a causal language model from a local folder, without network.

    Raises `CheckpointError` when weights are missing, of another shape, or unreadable; `DataError` for one that needs code of its
    own that is not trusted; `UserError` for an architecture that transformers does not know.
    """
    refuse_embedded_adapter(folder, str(folder))
    varlen.register()
    arguments: dict[str, Any] = {"device_map": {"": device}} if device else {}
    if quantization_config is not None:
        arguments["quantization_config"] = quantization_config
    trust = settings.trust_remote_code and runs_code(folder)
    trusted = {"trust_remote_code": trust, "local_files_only": True}
    try:
        # Read first: `_attn_implementation` in a `config.json` would overrule the argument below, which it does not overrule here.
        config = AutoConfig.from_pretrained(str(folder), **trusted)
        model, info = model_class(config).from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            attn_implementation=attention or ("eager" if config.model_type in WITHOUT_SDPA else "sdpa"),
            output_loading_info=True,
            **trusted,
            **arguments,
        )
    except pickle.UnpicklingError as error:  # torch's `weights_only`: nothing of the file has run
        raise CheckpointError(
            f"the weights of `{settings.name}` are a pickle that holds more than tensors, and is not loaded", place=str(folder),
            hint="do not trust this model; take one with safetensors",
        ) from error  # fmt: skip
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if not trust and is_about_trust(error):
            raise code_not_trusted("model", str(folder)) from error
        raise CheckpointError(f"the model `{settings.name}` cannot be loaded: {first_lines(error)}", place=str(folder)) from error
    except ImportError as error:
        hint = "install what the message names, or use another version of the model"
        raise HardwareError(f"the model `{settings.name}` needs a package: {first_lines(error)}", hint=hint) from error
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(f"`{name}`" for name in missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(
            f"the weights of `{settings.name}` lack {shown}; random values in their place would spoil the model",
            place=str(folder),
            hint="the files are incomplete or of another architecture than `config.json` says: fetch the model again",
        )
    keep_quantised_weights(model)
    if quantization_config is not None and device in (None, "cpu"):
        _let_go_of_files(model)
    varlen.keep_rows_apart(model)
    return model


def _let_go_of_files(model: Any) -> None:
    """Copies what was not quantised. On a CPU it lies in the mapped files, whose pages, all read to quantise the rest, would stay too."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.clone()


def keep_quantised_weights(model: Any) -> None:
    """Makes bitsandbytes 0.50 leave nf4 weights as they are.

    On CPUs with AVX512-BF16 it repacks them the first time they run in evaluation mode, which rounds their scales for good to
    bf16: training would go on over another base, and scores would depend on the machine.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def first_lines(error: BaseException) -> str:
    """Returns the part of a library's error that is worth showing."""
    return " ".join(str(error).strip().splitlines()[:3])


def tell(*notes: str) -> None:
    """Prints notes once, from the first process."""
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(note, file=sys.stderr, flush=True)
