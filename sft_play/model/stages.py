"""One stage of a pipeline: a model that has only some of its decoder layers, and embeddings or head only where they are needed.

The class of the model is subclassed before its weights are read, so that no rank ever holds, or quantises, another stage's layers. Layers keep
their numbers: those of other stages are replaced by `Skipped`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

ANSWERS = {"bamba": 2, "bloom": 2, "falcon": 2, "falcon_h1": 1, "glm_moe_dsa": 2, "gptj": 2, "mpt": 2}
"""How long a tuple a layer returns, by model type; the layers of all others return the hidden states alone."""


class Skipped(nn.Module):
    """A layer that is left out: returns the hidden states that it gets, in the form in which the family's layers return theirs."""

    def __init__(self, answers: int, index: int) -> None:
        super().__init__()
        self.answers, self.index = answers, index

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return the hidden states [B, T, H]; a cache is told how many tokens have passed, since models ask it of any layer."""
        hidden = arguments[0] if arguments else named["hidden_states"]
        cache = named.get("past_key_values", named.get("layer_past", named.get("cache_params")))
        if cache is not None:
            layer = cache.layers[self.index] if self.index < len(cache.layers) else None
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
            if layer is None or isinstance(layer, DynamicLayer):
                tokens = hidden.new_zeros(len(hidden), 1, hidden.shape[1], 1)
                cache.update(tokens, tokens, self.index)
        return (hidden, *(None,) * (self.answers - 1)) if self.answers else hidden


def base_of(model: Any) -> Any:
    """Return the model without its adapters' wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def list_of_layers(model: Any) -> tuple[nn.Module, str]:
    """Return the module that holds the text model's layers, and under which name. Raise `ValueError` where they are not one list."""
    base = base_of(model)
    wanted = base.config.get_text_config().num_hidden_layers
    for module in base.get_decoder().modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == wanted:
                return module, name
    raise ValueError("its layers are not one list")


class NoEmbedding(nn.Module):
    """Stands where a stage after the first has no embedding: it is given hidden states."""

    weight: Tensor | None = None

    def forward(self, _: Tensor) -> Tensor:
        raise RuntimeError("this stage has no embedding")


OTHERS, OUTLINE = "_layers_of_all_stages", "_outline"


def stage_class(family: Any, first: int, last: int) -> Any:
    """Return the model class `family` with the layers `[first, last)` only; the others stay on the meta device, outside the model."""

    def build(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        family.__init__(self, config, *arguments, **named)
        cut(self, first, last)

    return type(family.__name__, (family,), {"__init__": build, "__module__": family.__module__})


def cut(model: Any, first: int, last: int) -> None:
    """Leave the layers `[first, last)`, the embedding where they begin the model (or the head is tied to it), the head where they end it."""
    text, (holder, name) = model.config.get_text_config(), list_of_layers(model)
    layers, answers = list(getattr(holder, name)), ANSWERS.get(model.config.model_type, 0)
    model.__dict__[OTHERS] = layers
    kept = range(first, last)
    setattr(holder, name, nn.ModuleList(one if index in kept else Skipped(answers, index) for index, one in enumerate(layers)))
    ends = last == text.num_hidden_layers
    if first > 0 and not (ends and text.tie_word_embeddings):
        model.set_input_embeddings(NoEmbedding())
    if not ends:
        model.set_output_embeddings(nn.Identity())
        model.all_tied_weights_keys = {}


@contextlib.contextmanager
def all_layers(model: Any) -> Iterator[None]:
    """Within, a stage has the layers of all stages, the others without weights: adapters are then drawn as in one process."""
    holder, name = list_of_layers(model)
    mine, whole = getattr(holder, name), model.__dict__.pop(OTHERS)
    setattr(holder, name, nn.ModuleList(whole))
    yield
    setattr(holder, name, mine)


def keep_outline(adapted: Any) -> None:
    """Keep the outline of a model with all its layers and adapters, without weights: PEFT goes by it to write the adapters of all stages."""
    nothing = {id(one): nn.Parameter(torch.empty_like(one, device="meta"), requires_grad=False) for one in adapted.parameters()}
    adapted.__dict__[OUTLINE] = copy.deepcopy(adapted, nothing)


def outline_of(model: Any) -> Any:
    """Return what writes a model's weights: its outline, or itself."""
    return model.__dict__.get(OUTLINE, model)


def freeze_others(model: Any) -> None:
    """Freeze what a stage before the last has of the model's end: its last norm, which the last stage trains."""
    base = base_of(model)
    if not isinstance(base.get_output_embeddings(), nn.Identity):
        return
    holder, name = list_of_layers(base)
    embedding = base.get_input_embeddings()
    for child, module in holder.named_children():
        if child != name and module is not embedding:
            module.requires_grad_(False)


class Stage:
    """Run the layers of one stage: takes hidden states in place of tokens, gives hidden states in place of logits."""

    def __init__(self, model: Any, first: int, last: int) -> None:
        """`model`: what `stage_class` gave, with adapters or without."""
        base = base_of(model)
        text = base.config.get_text_config()
        self.model, self.base, self.decoder = model, base, base.get_decoder()
        self.begins, self.ends = first == 0, last == text.num_hidden_layers
        self.hidden = text.hidden_size
        embedding = base.get_input_embeddings().weight
        shares = text.tie_word_embeddings and self.begins != self.ends and embedding is not None
        self.shared = [embedding] if shares and embedding.requires_grad else []
        """Weights that the first stage and the last one both hold and train."""
        self._given: Tensor | None = None
        self._found: Tensor | None = None
        holder, name = list_of_layers(model)
        owned = list(getattr(holder, name))
        owned[first].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self.ends:
            owned[last - 1].register_forward_hook(self._leave)

    def _enter(
        self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._given is None:
            return None
        if arguments:
            return (self._given, *arguments[1:]), named
        return arguments, {**named, "hidden_states": self._given}

    def _leave(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        self._found = output[0] if isinstance(output, tuple) else output

    def inputs_of(self, inputs: dict[str, Any], given: Tensor | None) -> dict[str, Any]:
        """Return a batch's inputs for this stage; `given` [B, T, H] are the hidden states of the stage before, until the next call."""
        self._given = given
        if given is None:
            return inputs
        return {**{name: value for name, value in inputs.items() if name != "input_ids"}, "inputs_embeds": given}

    def run_layers(self, inputs: dict[str, Any], given: Tensor | None) -> tuple[Tensor, Any]:
        """Return the hidden states [B, T, H] after this stage's last layer, and what the decoder returned."""
        self._found = None
        wanted = {name: value for name, value in inputs.items() if name != "logits_to_keep"}
        output = self.decoder(**{"use_cache": False, **self.inputs_of(wanted, given)})
        assert self._found is not None
        found, self._found, self._given = self._found, None, None
        return found, output
