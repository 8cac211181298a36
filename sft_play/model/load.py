"""Read the base model from a folder and prepare it for training, by our own code or by Unsloth."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    set_seed,
)
from transformers.utils import logging

from sft_play import text
from sft_play.config.schema import Config, ModelConfig, TuningConfig
from sft_play.errors import CheckpointError, DataError, HardwareError, UserError
from sft_play.model import kernels, lora, published
from sft_play.model.parallel import all_layers, freeze_others, keep_outline, stage_class
from sft_play.model.published import model_class
from sft_play.model.resolve import code_not_trusted, is_about_trust, quantization_in, refuse_embedded_adapter, runs_code
from sft_play.model.rope import choose_factors_by_row
from sft_play.model.tokenizer import load_tokenizer
from sft_play.plan.plan import Plan
from sft_play.plan.shape import SILU, fuses_adapters
from sft_play.runs.prepared import Prepared


def load_for_training(config: Config, plan: Plan, prepared: Prepared) -> tuple[Any, Any]:
    """Return (model, tokenizer): trained parameters require gradients, all others are frozen, the cache is off.

    The model is on the CPU, or on this process's GPU unless a sharding engine places it (ZeRO-3, FSDP2). Every rank
    draws the same new weights, since the seed is set here. For ZeRO-3, `TrainingArguments` with the DeepSpeed
    configuration must exist already, so that transformers shards while it loads. Raise `UserError`, `CheckpointError`
    or `HardwareError`.
    """
    tokenizer = load_tokenizer(prepared.model.path, prepared.model.chat, trust=config.model.trust_remote_code)
    if config.tuning.backend == "unsloth":
        return _load_unsloth(config, plan, prepared, tokenizer), tokenizer
    set_seed(config.train.seed)
    model = load_base(config, plan, prepared)
    require_embeddings(tokenizer, model.config.get_text_config().vocab_size, prepared)
    model.config.get_text_config().use_cache = False
    if plan.kernels == "liger":
        use_kernels(model)
    if config.tuning.mode == "full":
        if prefix := lora.free_text_part(model):
            # Under ZeRO-3 a parameter is a shard, and `ds_numel` its complete size.
            frozen = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if not p.requires_grad)
            note = f"multimodal model: `{prefix}` and the head are tuned"
            tell(f"{note}; {frozen:,} parameters of vision tower and projector are frozen")
    else:
        model = _adapted(model, config, plan, prepared, tokenizer)
    if plan.stages:
        freeze_others(model)
    if plan.loss_chunk:
        kernels.chunk_head(model, plan.loss_chunk)
    if plan.gradient_checkpointing and config.tuning.mode != "full":
        model.enable_input_require_grads()
    return model, tokenizer


def _adapted(model: Any, config: Config, plan: Plan, prepared: Prepared, tokenizer: Any) -> Any:
    """Return the frozen model with trainable adapters."""
    model.requires_grad_(False)
    # Set again: loading may have drawn numbers for weights that it then read, and not equally many on every rank.
    set_seed(config.train.seed)
    with all_layers(model) if plan.stages else contextlib.nullcontext():
        dtype = adapter_dtype(config, plan)
        if parent := continued(config, prepared):
            model = lora.continue_adapter(model, parent, prepared.model, config.tuning.lora.dropout, dtype)
        else:
            tokens = tokenizer.convert_tokens_to_ids(list(config.data.new_tokens))
            model = lora.add_adapters(model, config.tuning.lora, prepared.model, dtype, tokens)
        if plan.stages:
            keep_outline(model)
    if plan.precision != "fp32" and not plan.zero:
        lora.leave_casts_to_autocast(model)
    if fuses_adapters(plan.strategy, config.tuning.lora):
        lora.fuse_adapters(model)
    return model


def continued(config: Config, prepared: Prepared) -> Path | None:
    """Return the folder of the adapter to continue, or `None` if adapters are new or merged into the base."""
    return Path(prepared.adapter.path) if prepared.adapter and config.tuning.adapter == "continue" else None


def require_embeddings(tokenizer: Any, embeddings: int, prepared: Prepared) -> None:
    """Raise `DataError` if prepared rows contain a token without an embedding, which a tokenizer may have."""
    if max(tokenizer.get_vocab().values()) < embeddings:
        return
    from sft_play.data.rows import Rows

    for split in (prepared.train, prepared.validation):
        if split is not None and (foreign := Rows(split.path).first_token_from(embeddings)):
            token, source = foreign
            raise DataError(
                f"a row contains the token `{tokenizer.convert_ids_to_tokens(token)}` (number {token}), but the model's"
                f" embeddings have {embeddings} rows, and its tokenizer {len(tokenizer)} tokens",
                place=split.sources[source].name if source < len(split.sources) else prepared.model.name,
                hint=(
                    "remove that text from the data; or download tokenizer and weights again, if they belong to"
                    " different models"
                ),
            )


def load_base(config: Config, plan: Plan, prepared: Prepared) -> Any:
    """Return the base model for training: in the plan's type, or quantised."""
    folder = Path(prepared.model.path)
    existing = quantization_in(folder)
    settings = None
    if existing:
        tell(quantisation_note(existing, config.tuning))
    elif config.tuning.mode == "qlora":
        settings = bnb_settings(config.tuning, plan)
    return read_model(
        folder,
        config.model,
        dtype=getattr(torch, plan.weights_dtype),
        attention=plan.attn_implementation,
        quantization_config=settings,
        # Sharded from the CPU layer by layer, since the complete quantised base need not fit on the GPU.
        device="cpu" if settings is not None and plan.strategy == "fsdp2" else _placement(plan),
        layers=plan.layers_of(int(os.environ.get("RANK", "0"))) if plan.stages else None,
    )


def adapter_dtype(config: Config, plan: Plan) -> torch.dtype:
    """Return the type of the adapters' weights.

    It is fp32, except over a quantised base in bf16: there autocast keeps no fp32 copies of inputs, and fp32 adapters
    would add one for each layer. fp16 needs fp32 adapters for its loss scaling.
    """
    if config.tuning.mode == "qlora" and plan.weights_dtype == "bfloat16":
        return torch.bfloat16
    return torch.float32


def _placement(plan: Plan) -> str | None:
    """Return the device to load to, or `None` if weights are sharded first."""
    if plan.device != "cuda" or plan.gathers or plan.copies > 1:
        return None
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def settings_of(architecture: dict[str, Any]) -> Any:
    """Return the complete model's configuration. Raise `DataError` for a family that transformers does not know."""
    values = copy.deepcopy(architecture)
    family = values.pop("model_type", None)
    if family not in CONFIG_MAPPING:
        if values.get("auto_map"):
            raise code_not_trusted("model", "config.json")
        raise DataError(
            f"transformers {transformers.__version__} does not know `model_type: {family}`",
            hint="a newer version may know it",
        )
    for own in ("quantization_config", "auto_map", "architectures", "torch_dtype", "dtype"):
        values.pop(own, None)
    return CONFIG_MAPPING[family].from_dict(PreTrainedConfig._decode_special_floats(values))


def read_model(
    folder: Path,
    settings: ModelConfig,
    *,
    dtype: torch.dtype,
    attention: str | None = None,
    quantization_config: Any = None,
    device: str | None = None,
    layers: tuple[int, int] | None = None,
) -> Any:
    """Read a causal language model, or its layers `[first, end)`, from a local folder, without network.

    Raise `CheckpointError` if weights are missing, of another shape, or unreadable; `DataError` for a model that needs
    its own code, which is not trusted; `UserError` for an architecture that transformers does not know.
    """
    refuse_embedded_adapter(folder, str(folder))
    if not sys.stderr.isatty():  # in a file a progress bar gives a line for each step
        logging.disable_progress_bar()
    kernels.register()
    arguments: dict[str, Any] = {"device_map": {"": device}} if device else {}
    if quantization_config is not None:
        arguments["quantization_config"] = quantization_config
    trust = settings.trust_remote_code and runs_code(folder)
    trusted = {"trust_remote_code": trust, "local_files_only": True}
    with _explaining(settings.name, folder, trust=trust):
        # Read first, because otherwise `_attn_implementation` in a `config.json` would override the argument below.
        config = AutoConfig.from_pretrained(str(folder), **trusted)
        family = model_class(config)
        model, info = (stage_class(family._model_mapping[type(config)], *layers) if layers else family).from_pretrained(
            str(folder),
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            generation_config=GenerationConfig(),  # answers go by our settings; the folder's may not even be readable
            **trusted,
            **arguments,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        shown = text.list_some([f"`{name}`" for name in missing], 3)
        raise CheckpointError(
            f"the weights of `{settings.name}` lack {shown}; random values in their place would spoil the model",
            place=str(folder),
            hint="the files are incomplete, or `config.json` names another architecture: download the model again",
        )
    existing = quantization_in(folder)
    plain = not existing or existing.startswith("bitsandbytes")
    published.note_base(model, folder, takes_code=trust, stage=layers is not None, plain=plain)
    keep_quantised_weights(model)
    if quantization_config is not None and device in (None, "cpu"):
        let_go_of_files(model)
    kernels.keep_rows_apart(model)
    choose_factors_by_row(model)
    return model


@contextlib.contextmanager
def _explaining(name: str, folder: Path, *, trust: bool) -> Iterator[None]:
    """Turn what libraries raise while they read a model into our errors."""
    try:
        yield
    except pickle.UnpicklingError as error:  # from torch's `weights_only`: none of the file's code has run
        raise CheckpointError(
            f"the weights of `{name}` are a pickle that contains more than tensors, and is not loaded",
            place=str(folder),
            hint="do not trust this model; use one with safetensors",
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if not trust and is_about_trust(error):
            raise code_not_trusted("model", str(folder)) from error
        raise CheckpointError(
            f"the model `{name}` cannot be loaded: {first_lines(error)}", place=str(folder)
        ) from error
    except ImportError as error:
        hint = "install what the message names, or use another version of the model"
        raise HardwareError(f"the model `{name}` needs a package: {first_lines(error)}", hint=hint) from error


def first_lines(error: BaseException) -> str:
    """Return the first lines of a library's error, which are worth showing."""
    return " ".join(str(error).strip().splitlines()[:3])


def tell(*notes: str) -> None:
    """Print notes once, from the first process."""
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            text.tell(note)


# Quantised bases: the settings for bitsandbytes, and the handling of a base that is already quantised.


def quantisation_note(quantisation: str, tuning: TuningConfig) -> str:
    """Return a note for the user about a base that is already quantised."""
    note = f"the base is quantised ({quantisation}): it is used as it is and not quantised again"
    if tuning.mode == "qlora":
        note += f"; `tuning.quantization: {tuning.quantization}` has no effect"
    return note


def bnb_settings(tuning: TuningConfig, plan: Plan) -> Any:
    """Return transformers' `BitsAndBytesConfig` for `tuning.mode: qlora`.

    nf4 uses double quantisation (of the blocks' scales too), for fused experts as well if the plan says so. FSDP2 and
    ZeRO-3 shard a parameter only in a float type, and FSDP2 all of a module's parameters in the same type: the packed
    bytes are then stored in the adapters' type, else as plain bytes.
    """
    if tuning.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    storage = getattr(torch, plan.weights_dtype) if plan.gathers else torch.uint8
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=kernels.COMPUTE_TYPES[plan.precision],
        bnb_4bit_quant_storage=storage,
    )
    if not plan.nf4_experts:
        return settings
    return with_experts(settings)


WITH_EXPERTS = "bitsandbytes_with_experts"
"""Name of our method among those of transformers."""


def with_experts(settings: Any) -> Any:
    """Make transformers quantise fused experts too while it loads them, to nf4 like linear layers.

    It uses blocks of 64 with quantised scales. A layer's experts are expanded when they compute (bitsandbytes'
    parametrisation).
    """
    _register_quantizer()
    settings.quant_method = WITH_EXPERTS
    return settings


@cache
def _register_quantizer() -> None:
    """Register our method with transformers, when it is first needed, since this imports bitsandbytes."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers.auto import register_quantizer
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.quantizers.quantizers_utils import get_module_from_name

    class Quantise(Bnb4bitQuantize):
        def convert(
            self, input_dict: dict[str, Any], model: Any = None, missing_keys: Any = None, **others: Any
        ) -> dict[str, Any]:
            layers = {}
            for name, value in input_dict.items():
                module, leaf = get_module_from_name(model, name)
                if not lora.is_expert(name, module._parameters[leaf]):
                    layers[name] = value
                    continue
                weight, dtype = value[0] if isinstance(value, list) else value, module._parameters[leaf].dtype
                setattr(module, leaf, nn.Parameter(weight, requires_grad=False))
                replace_parameter_4bit(module, leaf, compress_statistics=True, quant_type="nf4")
                module.parametrizations[leaf][0].quant_state.dtype = dtype  # otherwise the file's dtype
                module._is_hf_initialized = True
                missing_keys.discard(name)
            return dict(super().convert(layers, model=model, missing_keys=missing_keys, **others))

    @register_quantizer(WITH_EXPERTS)
    class Quantizer(Bnb4BitHfQuantizer):
        def param_needs_quantization(self, model: Any, param_name: str, **others: Any) -> bool:
            module, leaf = get_module_from_name(model, param_name)
            own = module._parameters.get(leaf)
            return super().param_needs_quantization(model, param_name, **others) or (
                own is not None and lora.is_expert(param_name, own)
            )

        def get_quantize_ops(self) -> Quantise:
            return Quantise(self)


def let_go_of_files(model: Any) -> None:
    """Copy tensors that were not quantised out of the mapped files.

    On a CPU they would keep all the files' pages, which were read to quantise the rest, in memory.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.clone()


def keep_quantised_weights(model: Any) -> None:
    """Let bitsandbytes 0.50 multiply by the same weights in every pass, training or not, whatever else is in the pass.

    On CPUs with AVX512-BF16 it repacks nf4 when it first runs in evaluation mode, which permanently rounds the scales
    to bf16: training would continue over another base, and scores would depend on the machine. On a GPU, and outside
    training, LLM.int8 rounds its inputs too, except in columns where any row of the pass has an outlier: a row would
    compute otherwise in another micro-batch.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
        if type(module).__name__ == "Linear8bitLt":
            module.forward = MethodType(_multiply_by_int8, module)


def _multiply_by_int8(self: Any, x: torch.Tensor) -> Any:
    """Compute an int8 layer of bitsandbytes as it trains on CPUs: only the weights are rounded."""
    from bitsandbytes.autograd._functions import MatMul8bitFp

    if self.weight.CB is not None:
        self.init_8bit_state()
    bias = None if self.bias is None else self.bias.to(x.dtype)
    return MatMul8bitFp.apply(x, self.weight, None, bias, self.state)


def _load_unsloth(config: Config, plan: Plan, prepared: Prepared, tokenizer: Any) -> Any:
    """Return the model to train, as `load_for_training` does: adapters require gradients, or all for `full`.

    The tokenizer is ours, because Unsloth would change its own. Raise `UserError` for adapters that it does not make.
    """
    folder, tuning = Path(prepared.model.path), config.tuning
    existing = quantization_in(folder)
    four_bit = existing == "bitsandbytes nf4" if existing else tuning.mode == "qlora"
    # Unsloth patches transformers when it is imported, so this import is the switch and must not happen elsewhere.
    from unsloth import FastLanguageModel

    checkpointing = "unsloth" if plan.gradient_checkpointing else False
    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(folder),
        max_seq_length=config.model.max_seq_len,
        dtype=getattr(torch, plan.weights_dtype),
        load_in_4bit=four_bit,
        load_in_16bit=not four_bit and tuning.mode != "full",
        full_finetuning=tuning.mode == "full",
        device_map={"": int(os.environ.get("LOCAL_RANK", "0"))},
        use_gradient_checkpointing=checkpointing,
        trust_remote_code=config.model.trust_remote_code and runs_code(folder),
        # Otherwise Unsloth would load its own quantised upload of a model with a known name.
        use_exact_model_name=True,
        local_files_only=True,
    )
    published.note_base(model, folder, takes_code=config.model.trust_remote_code and runs_code(folder))
    require_embeddings(tokenizer, model.config.get_text_config().vocab_size, prepared)
    if tuning.mode != "full":
        targets = lora.find_targets(model, tuning.lora.target_modules)
        # Unsloth would train these completely.
        whole = [name for name in targets.modules if name.endswith(("lm_head", "embed_tokens"))]
        if refused := [*targets.parameters, *whole]:
            raise UserError(
                f"`tuning.backend: unsloth` makes no adapter on `{refused[0]}`", hint="`tuning.backend: bnb`"
            )
        model = FastLanguageModel.get_peft_model(
            model,
            r=tuning.lora.r,
            lora_alpha=tuning.lora.alpha,
            lora_dropout=tuning.lora.dropout,
            target_modules=lora.pattern_of(model, targets.modules),
            bias="none",
            use_gradient_checkpointing=checkpointing,
            random_state=config.train.seed,
            max_seq_length=config.model.max_seq_len,
        )
        if parent := continued(config, prepared):
            lora.load_weights(model, parent)
    model.config.get_text_config().use_cache = False
    return _select_positions(model)


def _select_positions(model: Any) -> Any:
    """Make `logits_to_keep` accept a tensor of positions, as transformers' models do and Unsloth's do not.

    The head then runs on every position and the requested logits are selected: correct, but without the saving.
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


def use_kernels(model: Any) -> None:
    """Use Liger's kernels, except for the loss, which ours computes in chunks; call before adapters are added.

    Parameters and names do not change. Rotary embeddings are replaced in the family's module, for all models of this
    process.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(
        model,
        rope=True,
        rms_norm=True,
        swiglu=model.config.hidden_act in SILU,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )
