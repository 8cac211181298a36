"""Divide a model among ranks: layers or packed lines in slices, or layers in the stages of a pipeline.

Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053, section 3): a rank computes its share of the attention heads
and of the feed-forward units, and holds rows of the layers into them and columns of the layers out of them. All ranks
of a group read the same rows of data. The input of a region's first layers is common, so its gradients are summed; the
outputs of its last layers are summed. Every rank holds and computes everything else (embeddings, norms, head).

Sequence parallelism (Ulysses, Jacobs et al. 2023, arXiv 2309.14509): an all-to-all turns each rank's slice of a line
with all heads into the complete line with its share of the heads; `kernels.varlen_attention` computes them with rows
kept apart, as in one process; another all-to-all turns them back. Everything else in a layer works token by token.

Pipelines: the model's class is subclassed before its weights are read, so that no rank ever holds, or quantises,
another stage's layers. Layers keep their numbers: those of other stages are replaced by `Skipped`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from sft_play.model.kernels import COMPUTE_TYPES, compute_dtype, varlen_attention
from sft_play.plan.shape import LAYER_OUTPUTS, VARLEN

STYLES = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce"})
"""The styles of transformers' plans (`base_model_tp_plan`) that are supported here."""
COMMON = "_common_input"
"""Attribute of a module: the common input of its layers."""
SLICE = "tensor_slice"
"""Attribute of a parameter: the slice that this rank holds."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows (`dim` 0) or columns (1) `[start, end)` of a parameter of `shape`."""

    dim: int
    start: int
    end: int
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return a copy of this slice of the complete parameter, so that the rest can be freed."""
        return whole.narrow(self.dim, self.start, self.end - self.start).clone(memory_format=torch.contiguous_format)


def slice_of(parameter: Tensor) -> Slice | None:
    """Return this rank's slice of a parameter, or `None` if it holds all of it."""
    return getattr(parameter, SLICE, None)


class Slicer:
    """Slice a model for one rank of a group, and sum what the ranks compute in parts."""

    def __init__(self, rank: int, ranks: int, group: ProcessGroup | None = None) -> None:
        """Take the `group` of all `ranks`; without it nothing is sent, as in a memory trace."""
        self.rank, self.ranks, self.group = rank, ranks, group
        self.replicas: ProcessGroup | None = None
        """The ranks among which the same slices are sharded."""
        self.shared: list[nn.Parameter] = []
        """Parameters that every rank holds, with gradients of which each computes a part."""

    def cut(self, model: nn.Module) -> None:
        """Slice a model, adapters included, that is the same on every rank."""
        base = without_adapters(model)
        decoder = base.get_decoder()
        for pattern, style in base.config.get_text_config().base_model_tp_plan.items():
            assert style in STYLES, "`TENSOR_PARALLEL_MODEL_TYPES` has no such family"
            name_pattern = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
            for name, module in list(decoder.named_modules()):
                if not name_pattern.fullmatch(name):
                    continue
                parent = decoder.get_submodule(name.rpartition(".")[0])
                if style == "replicated_with_grad_allreduce":
                    self.shared += module.parameters()
                else:
                    self._cut_layer(module, parent, rows=style == "colwise")
                if style == "rowwise":  # Apertus's activation has weights
                    self.shared += getattr(parent, "act_fn", nn.Identity()).parameters()

    def shard(self, model: Any, replicas: ProcessGroup, precision: str) -> None:
        """Shard the slices among `replicas`, the ranks with the same slices (FSDP2), as accelerate does for a model.

        Slices of columns are sharded by columns, so that a rank's part of a parameter is always rows or columns.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor import Shard

        def by_columns(parameter: nn.Parameter) -> Shard | None:
            part = slice_of(parameter)
            return Shard(1) if part is not None and part.dim else None

        narrow = None if precision == "fp32" else COMPUTE_TYPES[precision]
        for parameter in model.parameters() if narrow else ():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        names = {id(weight): name for name, weight in model.named_parameters()}
        slices = {name: part for name, weight in model.named_parameters() if (part := slice_of(weight)) is not None}
        shared = [names[id(weight)] for weight in self.shared]
        policy = MixedPrecisionPolicy(narrow, torch.float32, narrow) if narrow else MixedPrecisionPolicy()
        mesh = DeviceMesh.from_group(replicas, "cuda" if torch.cuda.is_available() else "cpu")
        holder, name = list_of_layers(model)
        for module in (*getattr(holder, name), model):
            fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=by_columns)
        sharded = dict(model.named_parameters())
        for name, part in slices.items():
            setattr(sharded[name], SLICE, part)
        self.shared, self.replicas = [sharded[name] for name in shared], replicas

    def _cut_layer(self, layer: Any, parent: nn.Module, *, rows: bool) -> None:
        linear = getattr(layer, "base_layer", layer)
        assert type(linear) is nn.Linear, type(linear)
        self._narrow(linear, "weight", 0 if rows else 1)
        if rows and linear.bias is not None:
            self._narrow(linear, "bias", 0)
        linear.out_features, linear.in_features = linear.weight.shape
        for a, b in zip(getattr(layer, "lora_A", {}).values(), getattr(layer, "lora_B", {}).values(), strict=True):
            part, common = (b, a) if rows else (a, b)
            self._narrow(part, "weight", 0 if rows else 1)
            part.out_features, part.in_features = part.weight.shape
            self.shared.append(common.weight)
        if rows:
            layer.register_forward_pre_hook(partial(self._before, parent))
            return
        bias = linear.bias
        if bias is not None:  # it must be added once, to the sum
            layer.__dict__.pop("forward", None)  # `lora.fuse_adapters` would add the bias on every rank
            linear.forward = lambda x: functional.linear(x, linear.weight)
        layer.register_forward_hook(partial(self._after, parent, bias))

    def _before(self, parent: nn.Module, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Sum the gradient of the common input of a region's first layers, once for all layers that read it."""
        seen: tuple[Tensor, Tensor] | None = parent.__dict__.get(COMMON)
        if seen is None or seen[0] is not inputs[0]:
            seen = parent.__dict__[COMMON] = (inputs[0], _Copy.apply(inputs[0], self))
        return (seen[1], *inputs[1:])

    def _after(self, parent: nn.Module, bias: Tensor | None, _: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        """Sum the ranks' outputs of a region's last layer."""
        parent.__dict__.pop(COMMON, None)  # otherwise it would be kept until the next pass
        total: Tensor = _Sum.apply(output, self)
        return total if bias is None else total + bias.to(total.dtype)

    def _narrow(self, module: nn.Module, name: str, dim: int) -> None:
        whole = module.get_parameter(name)
        size = whole.shape[dim] // self.ranks
        assert size * self.ranks == whole.shape[dim], (name, tuple(whole.shape), self.ranks)
        part = Slice(dim, self.rank * size, (self.rank + 1) * size, tuple(whole.shape))
        mine = nn.Parameter(part.of(whole.data), requires_grad=whole.requires_grad)
        setattr(mine, SLICE, part)
        setattr(module, name, mine)

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the group, in place."""
        if self.group is not None:
            distributed.all_reduce(tensor, group=self.group)
        return tensor

    def share_gradients(self) -> None:
        """Complete the gradients of `shared`, once after the backward passes of a step. Collective over the group."""
        gradients = [local_part(parameter.grad) for parameter in self.shared if parameter.grad is not None]
        if gradients:
            flat = self.add_up(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, summed in zip(
                gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
            ):
                gradient.copy_(summed.view_as(gradient))

    def clip(self, parameters: Iterator[nn.Parameter], max_norm: float) -> Tensor:
        """Clip all gradients to `max_norm`, and return their norm. Collective over all ranks."""
        trained = [weight for weight in parameters if weight.grad is not None]
        sums = torch.zeros(2, device=trained[0].device)
        for weight in trained:
            sliced = slice_of(weight) is not None
            sums[int(sliced)] += torch.linalg.vector_norm(local_part(weight.grad), dtype=torch.float32).square()
        if self.replicas is not None:
            distributed.all_reduce(sums, group=self.replicas)
        norm: Tensor = (sums[0] + self.add_up(sums[1].clone())).sqrt()
        clip_grads_with_norm_(trained, max_norm, norm)
        return norm

    def whole_state(self, mine: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a state dict with complete parameters. Collective over all ranks."""
        state = {}
        for name, value in mine.items():
            tensor, part = value.detach(), slice_of(value)
            tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if part is not None:
                parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
                distributed.all_gather(parts, tensor.contiguous(), group=self.group)
                tensor = torch.cat(parts, part.dim)
            state[name] = tensor
        return state


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor` as a plain tensor: a DTensor's shard, or the tensor itself."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


class _Copy(torch.autograd.Function):
    """The identity, whose gradient is the sum over the group ("f" in the paper)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slicer: Slicer) -> Tensor:
        ctx.slicer = slicer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.slicer.add_up(gradients[0].clone(memory_format=torch.contiguous_format)), None


class _Sum(torch.autograd.Function):
    """The sum over the group, whose gradient is the identity ("g" in the paper)."""

    @staticmethod
    def forward(_: Any, x: Tensor, slicer: Slicer) -> Tensor:
        return slicer.add_up(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def share_heads(group: ProcessGroup) -> None:
    """Make `attn_implementation="varlen"` compute lines that are sliced over the ranks of `group`, in this process."""
    AttentionInterface.register(VARLEN, partial(sliced_attention, group))


def sliced_attention(
    group: ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Return [1, t, H, V], as `varlen_attention` does, for this rank's slice of a line.

    It is `query` [1, H, t, D], `key` [1, K, t, D] and `value` [1, K, t, V]; `settings` has the lengths of the complete
    line. The number of ranks must divide H. Collective over the group.
    """
    ranks, dtype = group.size(), compute_dtype(value)
    parts = [_by_rank(states.to(dtype), ranks) for states in (query, key, value)]
    sizes = [part.shape[2:] for part in parts]
    line = _exchange(torch.cat([part.flatten(2) for part in parts], 2), group).flatten(0, 1)
    states = line.split([size.numel() for size in sizes], 1)
    query, key, value = (
        flat.unflatten(1, size).transpose(0, 1)[None] for flat, size in zip(states, sizes, strict=True)
    )
    sinks = None if s_aux is None else s_aux.chunk(ranks)[group.rank()]
    attended, _ = varlen_attention(module, query, key, value, attention_mask, s_aux=sinks, **settings)
    return _exchange(attended[0].unflatten(0, (ranks, -1)), group).transpose(0, 1).flatten(1, 2)[None], None


def _by_rank(states: Tensor, ranks: int) -> Tensor:
    """Return [N, t, H / N, D] for [1, H, t, D]: each rank's heads, repeated as in grouped attention to suit N."""
    heads = states[0].repeat_interleave(math.lcm(states.shape[1], ranks) // states.shape[1], 0)
    return heads.unflatten(0, (ranks, -1)).transpose(1, 2)


def _exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Send part i to rank i of the group, and replace it by rank i's part; gradients go back the same way."""
    parts = parts.contiguous()
    received: Tensor = all_to_all_single(torch.empty_like(parts), parts, group=group)
    return received


class Skipped(nn.Module):
    """The stand-in for a layer of another stage: returns its input in the form of the family's layer outputs."""

    def __init__(self, answers: int, index: int) -> None:
        super().__init__()
        self.answers, self.index = answers, index

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return the hidden states [B, T, H], and advance a cache, since models ask any layer for its length."""
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


def without_adapters(model: Any) -> Any:
    """Return the model without its adapters' wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def list_of_layers(model: Any) -> tuple[nn.Module, str]:
    """Return the module with the text model's list of layers, and its name there. Raise `ValueError` if none."""
    base = without_adapters(model)
    count = base.config.get_text_config().num_hidden_layers
    for module in base.get_decoder().modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, name
    raise ValueError("its layers are not one list")


class NoEmbedding(nn.Module):
    """The stand-in for the embedding in a stage after the first, which gets hidden states."""

    weight: Tensor | None = None

    def forward(self, _: Tensor) -> Tensor:
        raise RuntimeError("this stage has no embedding")


OTHERS, OUTLINE = "_layers_of_all_stages", "_outline"


def stage_class(family: Any, first: int, last: int) -> Any:
    """Return a subclass of `family` with only the layers `[first, last)`; the others stay on the meta device."""

    def build(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        family.__init__(self, config, *arguments, **named)
        cut(self, first, last)

    return type(family.__name__, (family,), {"__init__": build, "__module__": family.__module__})


def cut(model: Any, first: int, last: int) -> None:
    """Keep the layers `[first, last)`, the embedding for the first stage (or a tied head), the head for the last."""
    text, (holder, name) = model.config.get_text_config(), list_of_layers(model)
    layers, answers = list(getattr(holder, name)), LAYER_OUTPUTS.get(model.config.model_type, 0)
    model.__dict__[OTHERS] = layers
    stage_layers = range(first, last)
    setattr(
        holder,
        name,
        nn.ModuleList(
            layer if index in stage_layers else Skipped(answers, index) for index, layer in enumerate(layers)
        ),
    )
    ends = last == text.num_hidden_layers
    if first > 0 and not (ends and text.tie_word_embeddings):
        model.set_input_embeddings(NoEmbedding())
    if not ends:
        model.set_output_embeddings(nn.Identity())
        model.all_tied_weights_keys = {}


@contextlib.contextmanager
def all_layers(model: Any) -> Iterator[None]:
    """Give a stage all layers in the body, others' without weights, so that adapters are drawn as in one process."""
    holder, name = list_of_layers(model)
    mine, whole = getattr(holder, name), model.__dict__.pop(OTHERS)
    setattr(holder, name, nn.ModuleList(whole))
    yield
    setattr(holder, name, mine)


def keep_outline(adapted: Any) -> None:
    """Keep a copy of the model with all layers and adapters but no weights, by which PEFT writes all adapters."""
    nothing = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for parameter in adapted.parameters()
    }
    adapted.__dict__[OUTLINE] = copy.deepcopy(adapted, nothing)


def outline_of(model: Any) -> Any:
    """Return the object that writes a model's weights: its outline, or the model itself."""
    return model.__dict__.get(OUTLINE, model)


def freeze_others(model: Any) -> None:
    """Freeze the model's last norm in stages before the last, which trains it."""
    base = without_adapters(model)
    if not isinstance(base.get_output_embeddings(), nn.Identity):
        return
    holder, name = list_of_layers(base)
    embedding = base.get_input_embeddings()
    for child, module in holder.named_children():
        if child != name and module is not embedding:
            module.requires_grad_(False)


class Stage:
    """Run the layers of a stage, from hidden states instead of tokens to hidden states instead of logits."""

    def __init__(self, model: Any, first: int, last: int) -> None:
        """Take a `model` of `stage_class`, with or without adapters."""
        base = without_adapters(model)
        text = base.config.get_text_config()
        self.model, self.base, self.decoder = model, base, base.get_decoder()
        self.begins, self.ends = first == 0, last == text.num_hidden_layers
        self.hidden = text.hidden_size
        embedding = base.get_input_embeddings().weight
        shares = text.tie_word_embeddings and self.begins != self.ends and embedding is not None
        self.shared = [embedding] if shares and embedding.requires_grad else []
        """Weights that the first and the last stage both hold and train."""
        self._received: Tensor | None = None
        self._produced: Tensor | None = None
        holder, name = list_of_layers(model)
        owned = list(getattr(holder, name))
        owned[first].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self.ends:
            owned[last - 1].register_forward_hook(self._leave)

    def _enter(
        self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._received is None:
            return None
        if arguments:
            return (self._received, *arguments[1:]), named
        return arguments, {**named, "hidden_states": self._received}

    def _leave(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        self._produced = output[0] if isinstance(output, tuple) else output

    def inputs_of(self, inputs: dict[str, Any], hidden: Tensor | None) -> dict[str, Any]:
        """Return a batch's inputs for this stage, which uses the previous stage's `hidden` [B, T, H] from now on."""
        self._received = hidden
        if hidden is None:
            return inputs
        return {**{name: value for name, value in inputs.items() if name != "input_ids"}, "inputs_embeds": hidden}

    def run_layers(self, inputs: dict[str, Any], hidden: Tensor | None) -> tuple[Tensor, Any]:
        """Return the hidden states [B, T, H] after this stage's last layer, and what the decoder returned."""
        self._produced = None
        decoder_inputs = {name: value for name, value in inputs.items() if name != "logits_to_keep"}
        output = self.decoder(**{"use_cache": False, **self.inputs_of(decoder_inputs, hidden)})
        assert self._produced is not None
        output_hidden, self._produced, self._received = self._produced, None, None
        return output_hidden, output
