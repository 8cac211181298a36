"""Which modules get a low-rank adapter, and putting the adapters there (PEFT)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from sft_play.config.schema import LoraSettings
from sft_play.errors import UserError
from sft_play.runs.prepared import ResolvedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Where the adapters go, in PEFT's words."""

    modules: list[str] | str
    """Ends of module names, or a regular expression where the ends alone would also match modules outside the text model."""
    parameters: list[str]
    """Ends of the names of fused expert weights (three-dimensional parameters that belong to no linear layer)."""
    conv1d: bool
    """Whether the layers store their weights as (in, out), like GPT-2's `Conv1D`."""
    count: int
    """Modules and parameters that are matched."""
    notes: tuple[str, ...]


def text_prefix(model: nn.Module) -> str:
    """Returns the name of the text model inside a multimodal one (`model.language_model`), or `""` when all of it is text."""
    config = model.config
    if config.get_text_config() is config:
        return ""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")


def free_text_part(model: Any) -> str:
    """Lets the text model and its head train; a vision tower and its projector stay frozen. Returns `text_prefix`."""
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
    """Whether a module is a matrix product that PEFT can adapt: `Linear`, its quantised kinds, or `Conv1D`."""
    return isinstance(module, (nn.Linear, Conv1D)) or (
        hasattr(module, "in_features") and hasattr(module, "out_features") and "Linear" in type(module).__name__
    )


def linear_names(model: nn.Module) -> list[str]:
    """Returns the names of all linear layers of the text model but the head (and classifiers of a mixture's router)."""
    prefix = text_prefix(model)
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if is_linear(module) and module is not head and _inside(name, prefix)]


def expert_names(model: nn.Module) -> list[str]:
    """Returns the names of fused expert weights: parameters with an expert dimension before (out, in)."""
    prefix = text_prefix(model)
    return [name for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name and _inside(name, prefix)]


def find_targets(model: nn.Module, wanted: str | Sequence[str]) -> Targets:
    """Returns where adapters go for `auto` or for typed names (`q_proj`, `self_attn.q_proj`, `experts.gate_up_proj`).

    Raises `UserError` when a typed name matches nothing in the text model, or the head of a model with tied embeddings.
    """
    experts = expert_names(model)
    if wanted == "auto":
        names = linear_names(model)
        parameters: list[str] = []
        notes = (_frozen_experts_note(experts),) if experts else ()
        if not names:
            raise UserError(
                "`tuning.lora.target_modules: auto` finds no linear layer in this model",
                hint=f"type the names of the layers; it holds {_some(sorted({_leaf(n) for n, _ in model.named_modules() if n}))}",
            )
    else:
        assert not isinstance(wanted, str)
        names, parameters = _match_typed(model, wanted, experts)
        notes = ()
    matched = [model.get_submodule(name) for name in names]
    return Targets(
        modules=_shortest(model, names, wanted),
        parameters=sorted({".".join(name.split(".")[-2:]) for name in parameters}),
        conv1d=any(isinstance(module, Conv1D) for module in matched),
        count=len(names) + len(parameters),
        notes=notes,
    )


def _frozen_experts_note(experts: Sequence[str]) -> str:
    typed = ", ".join(sorted({".".join(name.split(".")[-2:]) for name in experts}))
    return (
        f"the {len(experts)} fused expert weights stay frozen: `target_modules: auto` adapts attention and shared layers; "
        f"to adapt experts too, type their names ({typed})"
    )


def _ends(name: str, typed: str) -> bool:
    return name == typed or name.endswith("." + typed)


def _match_typed(model: nn.Module, wanted: Sequence[str], experts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns names of matched modules and of matched expert weights."""
    prefix, head = text_prefix(model), model.get_output_embeddings()
    tied = head is not None and getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    candidates = {
        name: module
        for name, module in model.named_modules()
        if (is_linear(module) or isinstance(module, nn.Embedding)) and (_inside(name, prefix) or module is head)
    }
    modules: dict[str, None] = {}
    parameters: dict[str, None] = {}
    missing: list[str] = []
    for typed in wanted:
        found = [name for name in candidates if _ends(name, typed)]
        found_experts = [name for name in experts if _ends(name, typed)]
        if not found and not found_experts:
            missing.append(typed)
        if tied and any(candidates[name] is head or isinstance(candidates[name], nn.Embedding) for name in found):
            raise UserError(
                f"`tuning.lora.target_modules` names `{typed}`, but this model's head and input embeddings share one weight: "
                "an adapter on one could not be merged without changing the other",
                hint=f"leave `{typed}` out",
            )
        modules.update(dict.fromkeys(found))
        parameters.update(dict.fromkeys(found_experts))
    if missing:
        known = sorted({_leaf(name) for name in candidates} | {".".join(name.split(".")[-2:]) for name in experts})
        quoted = ", ".join(f"`{name}`" for name in missing)
        raise UserError(
            f"`tuning.lora.target_modules` names {quoted}, which this model's text part does not have",
            hint=f"it has {_some(known)}; or `auto` for every linear layer but the head",
        )
    return list(modules), list(parameters)


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _some(names: Iterable[str]) -> str:
    listed = [f"`{name}`" for name in names]
    return ", ".join(listed[:40]) + (f" and {len(listed) - 40} more" if len(listed) > 40 else "")


def _shortest(model: nn.Module, names: Sequence[str], wanted: str | Sequence[str]) -> list[str] | str:
    """Returns the ends of names that match exactly `names`, else a regular expression that does."""
    ends = sorted({_leaf(name) for name in names}) if wanted == "auto" else sorted(set(wanted))
    chosen = set(names)
    ends = [end for end in ends if any(_ends(name, end) for name in names)]
    if not any(_ends(name, end) for name, _ in model.named_modules() if name not in chosen for end in ends):
        return ends
    leaves = "|".join(sorted({re.escape(_leaf(name)) for name in names}))
    prefix = text_prefix(model)
    pattern = rf"{re.escape(prefix)}\..*\.(?:{leaves})" if prefix else ""
    matched = {name for name, _ in model.named_modules() if pattern and re.fullmatch(pattern, name)}
    return pattern if matched == chosen else "|".join(re.escape(name) for name in names)


def add_adapters(
    model: nn.Module, settings: LoraSettings, base: ResolvedModel, dtype: torch.dtype
) -> tuple[Any, tuple[str, ...]]:
    """Returns the model with fresh adapters whose weights are of `dtype`, and notes for the user.

    The base is frozen. Adapters start as the zero function: A is random by torch's seed, B is zero.
    """
    targets = find_targets(model, settings.target_modules)
    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
    config = LoraConfig(
        r=settings.r,
        lora_alpha=alpha,
        lora_dropout=settings.dropout,
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        fan_in_fan_out=targets.conv1d,
        bias="none",
        task_type="CAUSAL_LM",
        revision=base.revision,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)  # peft 0.21's own
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    # Other tools find the base by this: the hub's name where there is one, else the folder.
    adapted.peft_config["default"].base_model_name_or_path = base.name if base.source == "hub" else base.path
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return adapted, targets.notes


def leave_casts_to_autocast(model: nn.Module) -> None:
    """Switches PEFT's cast of inputs to the adapters' type off, for models that only ever run under autocast.

    Autocast would cast the copy straight back to what it was: the numbers are the same, and no layer keeps an input of its own.
    """
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False
