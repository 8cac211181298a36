"""Choose the modules that get a low-rank adapter, and add the adapters (PEFT)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import load_peft_weights
from peft.utils import transformers_weight_conversion as conversion
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import ParametrizationList
from transformers.pytorch_utils import Conv1D

from sft_play.config.schema import LoraSettings
from sft_play.errors import CheckpointError, UserError, first_line
from sft_play.files import read_json, write_json
from sft_play.model.kernels import compute_dtype
from sft_play.plan.shape import READ_BY_KERNELS, READ_DIRECTLY, ROUTER, ROUTES
from sft_play.runs.adapters import ADAPTER_WEIGHTS, CONFIG, MUTATING, embeddings_of, peft_settings
from sft_play.runs.folder import model_folder
from sft_play.runs.prepared import ResolvedModel
from sft_play.text import list_some


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """The modules and parameters that get adapters."""

    modules: list[str]
    """Names of linear layers (and of embeddings that the user typed)."""
    parameters: list[str]
    """Names of fused expert weights (three-dimensional parameters outside linear layers)."""


def text_prefix(model: nn.Module) -> str:
    """Return the name of the text model in a multimodal one (`model.language_model`), or `""` for a text model."""
    config = model.config
    if config.get_text_config() is config:
        return ""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")


def free_text_part(model: Any) -> str:
    """Unfreeze the text model and its head, but not a vision tower and its projector. Return `text_prefix`."""
    prefix = text_prefix(model)
    model.requires_grad_(not prefix)
    if prefix:
        model.get_submodule(prefix).requires_grad_(True)
        head = model.get_output_embeddings()
        if head is not None:
            head.requires_grad_(True)
    return prefix


def _inside(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix + ".")


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a matrix product that PEFT can adapt: `Linear`, quantised or not, or `Conv1D`."""
    return isinstance(module, (nn.Linear, Conv1D)) or (
        hasattr(module, "in_features") and hasattr(module, "out_features") and "Linear" in type(module).__name__
    )


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of the text model's linear layers that can take an adapter, without the head."""
    head = model.get_output_embeddings()
    named = _named_layers(model).items()
    return [name for name, module in named if is_linear(module) and module is not head and why_not(model, name) is None]


def _named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module for the text model's linear layers, embeddings and head."""
    prefix, head = text_prefix(model), model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if (is_linear(module) or isinstance(module, nn.Embedding)) and (_inside(name, prefix) or module is head)
    }


def why_not(model: nn.Module, name: str) -> str | None:
    """Return why a linear layer cannot take an adapter, or `None` if it can."""
    module, mixer, leaf = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0]), _leaf(name)
    if ROUTER.search(name):
        return ROUTES
    if ".indexer." in name:
        return "it selects tokens, and no gradient reaches it"
    own = isinstance(module, nn.Linear) and type(module).__module__.startswith("transformers.models.")
    if own and type(module).__name__ != "FalconLinear":
        return f"PEFT cannot adapt a `{type(module).__name__}`"
    if leaf in READ_DIRECTLY or (leaf in READ_BY_KERNELS and hasattr(mixer, "A_log") and hasattr(mixer, "D")):
        return f"`{type(mixer).__name__}` reads its weight directly, which bypasses an adapter"
    return None


def expert_names(model: nn.Module) -> list[str]:
    """Return the names of fused expert weights."""
    prefix = text_prefix(model)
    return [
        f"{name}.{leaf}"
        for name, module in model.named_modules()
        # Parametrizations are expert weights in NF4.
        for leaf, weight in (
            *module.named_parameters(recurse=False),
            *getattr(module, "parametrizations", {}).items(),
        )
        if _inside(name, prefix) and (is_expert(f"{name}.{leaf}", weight) or isinstance(weight, ParametrizationList))
    ]


def is_expert(name: str, weight: nn.Parameter | nn.Module) -> bool:
    """Return whether a parameter is a fused expert weight, with an expert dimension before (out, in)."""
    return "experts" in name and len(getattr(weight, "ds_shape", getattr(weight, "shape", ()))) == 3


def find_targets(model: nn.Module, typed_names: str | Sequence[str]) -> Targets:
    """Return the targets of `auto`, or of typed names (`q_proj`, `self_attn.q_proj`, `experts.gate_up_proj`).

    Raise `UserError` if a name matches nothing, which `plan.shape.check_targets` has refused with the reason unless the
    model has its own code.
    """
    if isinstance(typed_names, str):
        return Targets(modules=linear_names(model), parameters=[])
    candidates = [name for name in _named_layers(model) if why_not(model, name) is None]
    experts = expert_names(model)
    modules, parameters = dict[str, None](), dict[str, None]()
    for typed in typed_names:
        matches = [name for name in candidates if _ends(name, typed)]
        # A name without a dot, such as `down_proj`, means only layers.
        expert_matches = [name for name in experts if _ends(name, typed)] if "." in typed else []
        if not matches and not expert_matches:
            raise UserError(
                f"`tuning.lora.target_modules` names `{typed}`, where this model's text part takes no adapter",
                hint=f"it takes them on {_some(sorted({_leaf(name) for name in candidates}))}",
            )
        modules.update(dict.fromkeys(matches))
        parameters.update(dict.fromkeys(expert_matches))
    return Targets(modules=list(modules), parameters=list(parameters))


def _ends(name: str, typed: str) -> bool:
    return name == typed or name.endswith("." + typed)


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _some(names: Iterable[str]) -> str:
    return list_some([f"`{name}`" for name in names], 40)


def _ends_of(chosen: Sequence[str], everything: Iterable[str], least: int = 1) -> list[str] | None:
    """Return ends of the names `chosen`, of at least `least` parts, that match no other name, or `None`."""
    others = set(everything) - set(chosen)
    for parts in range(least, least + 3):
        ends = sorted({".".join(name.split(".")[-parts:]) for name in chosen})
        if not any(_ends(name, end) for name in others for end in ends):
            return ends
    return None


def pattern_of(model: nn.Module, chosen: Sequence[str]) -> list[str] | str:
    """Return name ends, or a regular expression, that match exactly the modules `chosen`."""
    modules = [name for name, _ in model.named_modules()]
    if ends := _ends_of(chosen, modules):
        return ends
    leaves = "|".join(sorted({re.escape(_leaf(name)) for name in chosen}))
    prefix = text_prefix(model)
    pattern = rf"{re.escape(prefix)}\.(?:.*\.)?(?:{leaves})" if prefix else ""
    matched = {name for name in modules if pattern and re.fullmatch(pattern, name)}
    return pattern if matched == set(chosen) else "|".join(re.escape(name) for name in chosen)


@contextmanager
def as_named() -> Iterator[None]:
    """Stop PEFT from rewriting target names in the body.

    In a mixture of experts PEFT 0.21 interprets `gate_proj`, `up_proj` and `down_proj` as the experts of transformers
    4, where each was a linear layer, and adapts all experts instead of the dense and shared layers of that name
    (`_convert_peft_config_moe`).
    """
    rewrite = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = rewrite


def _as_saved(model: nn.Module, targets: Targets) -> dict[str, Any]:
    """Return changes to the saved configuration by which plain PEFT, which rewrites targets, finds the same layers.

    PEFT does not rewrite `target_parameters`, and `mlp.gate_proj.weight` there gives the same adapter, but without
    dropout.
    """
    family = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type, "")
    rewritten = conversion._MOE_TARGET_MODULE_MAPPING.get(family)
    if rewritten is None:
        return {}
    layers = [name for name in targets.modules if _leaf(name) not in rewritten]
    weights = [f"{name}.weight" for name in targets.modules if _leaf(name) in rewritten]
    changes = {
        "target_modules": set(_ends_of(layers, (name for name, _ in model.named_modules())) or layers),
        "target_parameters": _parameter_ends(model, weights) + _parameter_ends(model, targets.parameters) or None,
    }
    return changes | ({"lora_dropout": 0.0} if weights else {})


def _parameter_ends(model: nn.Module, chosen: Sequence[str]) -> list[str]:
    return _ends_of(chosen, (name for name, _ in model.named_parameters()), least=2) or list(chosen)


def saved_config(base: nn.Module, folder: Path) -> LoraConfig:
    """Return the configuration of a saved adapter of `base`, with linear layers as targets (see `_as_saved`)."""
    config = LoraConfig.from_pretrained(str(folder))
    weights = {name for name in config.target_parameters or () if name.endswith(".weight")}
    if weights:
        layers = [name for name, module in base.named_modules() if is_linear(module)]
        matches = {name for name in layers if any(_ends(f"{name}.weight", end) for end in weights)}
        config.target_modules = {*config.target_modules, *matches}
        config.target_parameters = [name for name in config.target_parameters if name not in weights] or None
    return config


def read_adapter(base: Any, folder: Path, *, trainable: bool = False) -> Any:
    """Return `base` with the adapter of `folder`. Raise `CheckpointError` if weights are missing or do not fit."""
    try:
        with warnings.catch_warnings(), as_named():
            # An adapter with missing weights would load as the zero function, as if it were untrained.
            warnings.filterwarnings("error", message=".*missing adapter keys.*")
            warnings.filterwarnings("ignore", message=CHECKPOINTING, category=FutureWarning)
            mapping = getattr(base, "_checkpoint_conversion_mapping", {})
            adapted = PeftModel.from_pretrained(
                base,
                str(folder),
                config=saved_config(base, folder),
                is_trainable=trainable,
                autocast_adapter_dtype=False,
                torch_device="cpu",
            )
            # PEFT ignores weights of modules that the base lacks, such as a deeper model's, and only tells when asked.
            weights = load_peft_weights(str(folder), device="cpu", key_mapping=mapping)
            unread = set_peft_model_state_dict(adapted, weights).unexpected_keys
            if foreign := [name for name in unread if ".lora_" in name or name.endswith(".bias")]:
                raise ValueError(f"{len(foreign)} of its weights are of modules that the model lacks: `{foreign[0]}`")
            return adapted
    except (RuntimeError, ValueError, UserWarning, OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the adapter does not fit the base model: {' '.join(str(error).split())[:400]}", place=str(folder)
        ) from error


CHECKPOINTING = ".*is_gradient_checkpointing.*"
"""Part of a warning that PEFT 0.21 causes itself."""


def continue_adapter(model: nn.Module, folder: Path, base: ResolvedModel, dropout: float, dtype: torch.dtype) -> Any:
    """Return the frozen model with the adapter of `folder`, trainable and in `dtype`."""
    adapted = read_adapter(model, folder, trainable=True)
    config = adapted.peft_config["default"]
    config.revision, config.inference_mode = base.revision, False
    if config.lora_dropout != dropout:
        config.lora_dropout = dropout
        for layer in (
            module for module in adapted.modules() if isinstance(module, LoraLayer) and len(module.lora_dropout)
        ):
            layer.lora_dropout["default"] = nn.Dropout(p=dropout) if dropout else nn.Identity()
    return _as_trained(adapted, base, dtype)


def load_weights(adapted: Any, folder: Path) -> None:
    """Load the weights of `folder` into a model's adapters. Raise `CheckpointError` if their shapes differ."""
    try:
        result = set_peft_model_state_dict(adapted, load_file(folder / ADAPTER_WEIGHTS))
        missing = [name for name in result.missing_keys if "lora_" in name]
        if wrong := [*missing, *result.unexpected_keys]:
            raise ValueError(f"{len(wrong)} weights differ, such as `{wrong[0]}`")
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"the adapter does not fit the model: {str(error)[:400]}", place=str(folder)) from error


def _as_trained(adapted: Any, base: ResolvedModel, dtype: torch.dtype) -> Any:
    # Other tools find the base by this name, from any folder; where a hub's model was read may be a cache.
    local = base.source == "folder"
    name = str(model_folder(base.name).resolve()) if local else base.name
    adapted.peft_config["default"].base_model_name_or_path = name
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted


def add_adapters(
    model: Any, settings: LoraSettings, base: ResolvedModel, dtype: torch.dtype, new_tokens: Sequence[int] = ()
) -> Any:
    """Return the model with new adapters in `dtype` and a frozen base.

    Adapters start as the zero function: A is random by torch's seed, B is zero.
    """
    targets = check_names(model, settings)
    shape = peft_settings(settings)
    if shape["modules_to_save"] is not None:
        shape["modules_to_save"] = _as_peft_matches(model, shape["modules_to_save"])
    config = LoraConfig(
        **(shape | _trained_rows(model, embeddings_of(settings, len(new_tokens)), shape, new_tokens)),
        ensure_weight_tying=(bool(settings.modules_to_save) or settings.embeddings == "all") and _is_tied(model),
        target_modules=pattern_of(model, targets.modules) if targets.modules else [],
        target_parameters=_parameter_ends(model, targets.parameters) or None,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets.modules),
        task_type="CAUSAL_LM",
        revision=base.revision,
    )
    saved = _as_saved(model, targets)
    with warnings.catch_warnings(), as_named():
        warnings.filterwarnings("ignore", message=CHECKPOINTING, category=FutureWarning)
        try:
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise UserError(f"PEFT refuses this shape of adapters: {first_line(error)}") from error
    placed = {*adapted.base_model.targeted_module_names, *adapted.base_model.targeted_parameter_names}
    assert placed == {*targets.modules, *targets.parameters}, "PEFT put adapters in other places than planned"
    for name, value in saved.items():
        setattr(config, name, value)
    trained = _as_trained(adapted, base, dtype)
    if settings.init in MUTATING:
        trained.initial_adapters = {
            name.replace(".default.", "."): matrix.detach().cpu().clone()
            for name, matrix in trained.named_parameters()
            if ".lora_A." in name or ".lora_B." in name
        }
    return trained


def check_names(model: nn.Module, settings: LoraSettings) -> Targets:
    """Return the targets. Raise `UserError` for names of differing or saved modules that PEFT would apply to nothing,
    or to adapters.
    """
    targets = find_targets(model, settings.target_modules)
    adapted, modules = [*targets.modules, *targets.parameters], [name for name, _ in model.named_modules()]
    patterns = {key: getattr(settings, key) for key in ("rank_pattern", "alpha_pattern")}
    for key, typed in patterns.items():
        for pattern in typed:
            if not any(re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) for name in adapted):
                raise UserError(
                    f"`tuning.lora.{key}` names `{pattern}`, which is no module with an adapter",
                    hint=f"adapters are on {_some(sorted({_leaf(name) for name in adapted}))}",
                )
    for typed in settings.modules_to_save:
        saved = [name for name in modules if _ends(name, typed)]
        if not saved:
            raise UserError(
                f"`tuning.lora.modules_to_save` names `{typed}`, which this model does not have",
                hint=f"it has {_some(sorted({_leaf(name) for name in modules if not _leaf(name).isdigit()} - {''}))}",
            )
        if inside := next((name for name in adapted if any(_inside(name, module) for module in saved)), None):
            raise UserError(
                f"`tuning.lora.modules_to_save` names `{typed}`, but `{inside}` has an adapter",
                hint="leave it out of one: `tuning.lora.target_modules` names the modules with adapters",
            )
    return targets


def _as_peft_matches(model: nn.Module, typed: Iterable[str]) -> list[str]:
    """Return names by which PEFT, which compares the ends of words, saves the same modules: `norm` is also the end of
    `input_layernorm`.
    """
    names = [name for name, _ in model.named_modules()]
    return [f".{end}" if any(n.endswith(end) and not _ends(n, end) for n in names) else end for end in typed]


def _trained_rows(model: Any, rows: str, shape: Mapping[str, Any], new_tokens: Sequence[int]) -> dict[str, Any]:
    """Return PEFT's settings for trained rows of embedding and head."""
    ends = [model.get_input_embeddings(), *([] if _is_tied(model) else [model.get_output_embeddings()])]
    names = [_leaf(name) for name, module in model.named_modules() if any(module is end for end in ends)]
    if rows == "all":
        return {"modules_to_save": list(dict.fromkeys([*(shape["modules_to_save"] or ()), *names]))}
    return {"trainable_token_indices": {name: list(new_tokens) for name in names}} if rows == "new" else {}


def _is_tied(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))


def publish_on_base(adapted: Any, folder: Path) -> None:
    """Rewrite an adapter initialised from the base (`init: pissa`, `olora`) as plain LoRA on the unchanged base.

    It gets twice the rank: the trained matrices minus the initial ones, as in PEFT's `subtract_mutated_init`.
    """
    initial: Mapping[str, Tensor] | None = getattr(adapted, "initial_adapters", None)
    if initial is None:
        return
    path, settings = folder / ADAPTER_WEIGHTS, folder / CONFIG
    weights = load_file(path)
    for name, start in initial.items():
        side, sign = (0, 1) if ".lora_A." in name else (1, -1)
        weights[name] = torch.cat([weights[name], sign * start.to(weights[name].dtype)], dim=side)
    save_file(weights, path, metadata={"format": "pt"})
    saved = read_json(settings)
    scale = 2**0.5 if saved["use_rslora"] else 2
    for rank, alpha in (("r", "lora_alpha"), ("rank_pattern", "alpha_pattern")):
        saved[rank] = _times(saved[rank], 2)
        saved[alpha] = _times(saved[alpha], scale)
    write_json(settings, saved | {"init_lora_weights": True})


def _times(value: Any, factor: float) -> Any:
    return {name: part * factor for name, part in value.items()} if isinstance(value, dict) else value * factor


def leave_casts_to_autocast(model: nn.Module) -> None:
    """Turn off PEFT's cast of inputs to the adapters' type, for models that only run under autocast.

    Autocast would cast the copy straight back: without it the numbers are the same, and no layer keeps its own copy of
    the input.
    """
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False


# A linear layer with its adapter: the same numbers, with fewer passes over memory.
#
# PEFT computes `base(x) + B(A(x)) * scale` as five operations and keeps two results as wide as the layer; over a 4-bit
# base it also copies the result. Here the scale goes to the r-wide side and the sum happens inside the matrix product.
# Over a plain frozen layer one autograd function does all of it, so that both gradients of x meet inside a matrix
# product too.


QUANTISED = "peft.tuners.lora.bnb"
"""PEFT's module of bitsandbytes layers; importing it would import bitsandbytes."""


def fuse_adapters(model: nn.Module) -> int:
    """Replace the forward pass of the model's linear layers with one adapter each; return how many.

    The modules, their parameters and what is saved stay as they are.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer) and _fusible(module)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)


def _fusible(layer: Any) -> bool:
    """Return whether `_forward` can compute a layer: one adapter on a matrix product, without bias or variant."""
    if type(layer) is not LoraLinear and type(layer).__module__ != QUANTISED:
        return False
    if len(layer.lora_A) != 1 or layer.lora_variant or layer.fan_in_fan_out:
        return False
    (name,) = layer.lora_A
    return layer.lora_A[name].bias is None and layer.lora_B[name].bias is None


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    names, base, computed = self.active_adapters, self.base_layer, compute_dtype(x)
    plain = (
        type(base) is nn.Linear and not base.weight.requires_grad and (base.bias is None or not base.bias.requires_grad)
    )
    if self.disable_adapters or self.merged or args or kwargs or len(names) != 1:
        return type(self).forward(self, x, *args, **kwargs)
    (name,) = names
    a, b, dropout = self.lora_A[name].weight, self.lora_B[name].weight, self.lora_dropout[name]
    if not torch.is_autocast_enabled(x.device.type) and any(
        weight.dtype != x.dtype for weight in (a, b, *([base.weight] if plain else []))
    ):
        return type(self).forward(self, x, *args, **kwargs)
    a, b, scale = a.to(computed), b.to(computed), self.scaling[name]
    if plain and isinstance(dropout, nn.Identity):
        bias = None if base.bias is None else base.bias.to(computed)
        y_TO = _Fused.apply(x.to(computed).reshape(-1, x.shape[-1]), base.weight.to(computed), bias, a, b, scale)
        # The view is made out here because Llama 4 adds to it in place, which a view returned by the function forbids.
        return y_TO.view(*x.shape[:-1], b.shape[0])
    y = base(x)
    h_TR = functional.linear(dropout(x).to(computed), a).reshape(-1, a.shape[0])
    y_TO = torch.addmm(y.to(computed).reshape(-1, b.shape[0]), h_TR, b.t(), alpha=scale)
    return y_TO.view(y.shape).to(y.dtype)


class _Fused(torch.autograd.Function):
    """Compute y = x W^T + bias + scale (x A^T) B^T, with gradients for x, A and B; all in one dtype."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        h_TR = x_TI @ a.t()
        y_TO = x_TI @ weight.t() if bias is None else torch.addmm(bias, x_TI, weight.t())
        y_TO.addmm_(h_TR, b.t(), alpha=scale)
        ctx.save_for_backward(x_TI, h_TR, weight, a, b)
        ctx.scale = scale
        return y_TO

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, h_TR, weight, a, b = ctx.saved_tensors
        grad_TR = (grad_TO @ b).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_TO @ weight).addmm_(grad_TR, a)
        return grad_x, None, None, grad_TR.t() @ x_TI, (grad_TO.t() @ h_TR).mul_(ctx.scale), None
