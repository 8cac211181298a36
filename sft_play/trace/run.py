"""Answers requests: a case is traced, few layers standing for many; a model is counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.pytorch_utils import Conv1D

from sft_play.errors import DataError
from sft_play.model import lora
from sft_play.model.load import settings_of
from sft_play.model.parallel import Skipped
from sft_play.plan.architecture import quantization_of
from sft_play.plan.shape import Counted, Matrices, ModelShape, pattern_of
from sft_play.plan.sources import Case
from sft_play.trace import build
from sft_play.trace.step import BEFORE, Peak, StepTrace, StorageTracker, batch_of, real_branches

STEP_TOKENS = {"token": 32, "chunk": 64}
"""Tokens by which the two short rows differ that are traced in place of a long one, where a state is computed token by
token (Mamba's first kind without its kernels) or chunk by chunk (gated delta rules): a trace of the long row would take
minutes.
"""


def trace(case: Case) -> dict[str, Any]:
    """Return the moments of the whole model, extrapolated from few layers.

    Every quantity is affine in the number of layers of each kind, in each operation of a moment (tried:
    docs/planning.md), so a model with the fewest layers and one with one layer more of each kind say it all.
    """
    model = build.model_of(case)
    short = _short_rows(case, model)
    return _lengthen(case, short) if short else _deepen(case, model)


def _deepen(case: Case, model: Any) -> dict[str, Any]:
    """Return the trace of the whole model by those of few layers."""
    kinds = build.layer_kinds(build.decoder_layers(model))
    smallest, grown, counts = build.depths(kinds)
    base = observe(case, build.with_layers(model, smallest))
    steps = {kind: observe(case, build.with_layers(model, layers)) for kind, layers in grown.items()}
    missing = {kind: counts[kind] - Counter(kinds[index] for index in smallest)[kind] for kind in steps}
    moments = {}
    for moment, places in base.items():
        whole = []
        for operation, peak in places.items():
            deeper = {kind: step.get(moment, {}).get(operation) for kind, step in steps.items()}
            parts = {kind: place.parts for kind, place in deeper.items() if place}
            whole.append(_extrapolate(peak.parts, parts, missing))
        moments[moment] = max(whole, key=lambda parts: sum(parts.values()))
    return {"moments": moments}


def _short_rows(case: Case, model: Any) -> tuple[int, int] | None:
    """Return the tokens of two short rows in which everything is affine, or `None` if the row itself is traced.

    They have two chunks at least (one alone is another case), as many tokens left over in the last one as the long row,
    and labels for two chunks of the head, if that has such. Two traces are to save time.
    """
    delta = any("Delta" in type(module).__name__ for module in model.modules())
    scanned = any(name.endswith("A_log") and p.dim() == 2 for name, p in model.named_parameters())
    if not (delta or scanned):
        return None
    step = STEP_TOKENS["chunk" if delta else "token"] * (2 if case.packed else 1)
    labelled = 2 * case.loss_chunk * case.row_tokens / case.labels if case.labels > case.loss_chunk else 0
    first = case.row_tokens % step + step * math.ceil(max(2 * step if delta else step, labelled) / step)
    return (first, first + step) if case.row_tokens > (8 if delta else 2) * (first + step) else None


def _lengthen(case: Case, short: tuple[int, int]) -> dict[str, Any]:
    """Return the trace of long rows by two of short ones."""
    rows = [replace(case, row_tokens=n, labels=max(1, case.labels * n // case.row_tokens)) for n in short]
    first, second = (_deepen(row_case, build.model_of(row_case)) for row_case in rows)
    growth = {"tokens": (case.row_tokens - short[0]) / (short[1] - short[0])}
    moments = {
        moment: _extrapolate(parts, {"tokens": second["moments"].get(moment, parts)}, growth)
        for moment, parts in first["moments"].items()
    }
    return {"moments": moments}


def _extrapolate(
    base: Mapping[str, int], grown: Mapping[str, Mapping[str, int]], missing: Mapping[str, float]
) -> dict[str, int]:
    names = set(base).union(*(set(parts) for parts in grown.values()))
    return {
        name: int(
            base.get(name, 0)
            + sum(missing[kind] * (parts.get(name, 0) - base.get(name, 0)) for kind, parts in grown.items())
        )
        for name in sorted(names)
    }


def observe(case: Case, model: Any, *, real: bool = False) -> dict[str, dict[str, Peak]]:
    """Return the peaks of each moment's operations of a model of the meta device, which it changes.

    `real` computes with real tensors of zeros, on the same device, for comparison.
    """
    model = build.build(case, model)
    device = "cuda" if case.device == "cuda" and torch.cuda.is_available() else "cpu"
    with nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True):
        build.materialise(model, device)
        tracker = follow(case, model, build.parts_of(model, case), device)
    return {moment: places for moment, places in tracker.places.items() if moment != BEFORE}


def follow(case: Case, model: Any, tensors: Iterable[tuple[Tensor, str]], device: str) -> StorageTracker:
    """Run the case's steps on `device` and return the tracker of them; `held` are the tensors there are before, and
    their parts.
    """
    if case.autocast:  # as `Accelerator.prepare_model` does for mixed precision
        forward = torch.autocast(device_type=device, dtype=build.dtype_of(case.precision))(model.forward)
        model.forward = convert_outputs_to_fp32(forward)
    tracker = StorageTracker(device=case.device, logit_width=int(model.config.get_text_config().vocab_size))
    for tensor, part in tensors:
        tracker.hold(tensor, part)
    layers = [layer for layer in build.decoder_layers(model) if not isinstance(layer, Skipped)]
    steps = StepTrace(model, layers, case, tracker)
    with real_branches(case):
        batch = batch_of(case, device)
        with tracker:
            steps.run(batch)
    return tracker


PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")
"""What families call the experts that a token passes."""


def count(architecture: dict[str, Any]) -> dict[str, Any]:
    """Return the `ModelShape` of a `config.json` as plain data. Raise `DataError` for a model that is not trained
    here.
    """
    family = architecture.get("model_type")
    try:
        settings = settings_of(architecture)
        model = build.on_meta(settings)
    except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise DataError(
            f"transformers cannot build this `{family}` model: {type(error).__name__}: {lines[0]}"
        ) from error
    text = settings.get_text_config()
    layers = build.decoder_layers(model)
    matrices = matrices_of(model)
    lora.free_text_part(model)
    experts = {matrix.name for matrix in matrices if matrix.kind == "experts"}

    def number(*names: str) -> int:
        setting = next((value for value in (_setting(text, name) for name in names) if value), 0)
        return int(max(setting) if isinstance(setting, (list, tuple)) else setting)

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    flash = getattr(model, "_compatible_flash_implementations", None) or ["flash_attention_2"]
    kernels = {
        "sdpa": model._supports_sdpa,
        "flash_attention_2": model._supports_flash_attn and "flash_attention_2" in flash,
    }
    shape = ModelShape(
        model_type=str(family),
        hidden_size=hidden,
        layers=len(layers),
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("qk_head_dim", "head_dim") or hidden // max(1, heads),
        ffn_size=number("moe_intermediate_size") * bool(experts)
        or number("intermediate_size", "ffn_dim", "n_inner")
        or 4 * hidden,
        vocab_size=number("vocab_size"),
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        max_positions=number("max_position_embeddings", "max_seq_len") or 2**31,
        gated=any("gate" in matrix.typed for matrix in matrices),
        experts=number("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") if experts else 0,
        experts_per_token=number(*PER_TOKEN) if experts else 0,
        vision_parameters=sum(p.numel() for p in model.parameters() if not p.requires_grad),
        quantization=quantization_of(architecture),
        attention_dropout=float(getattr(text, "attention_dropout", None) or getattr(text, "attn_pdrop", None) or 0.0),
        sliding_window=number("sliding_window") if getattr(text, "use_sliding_window", True) else 0,
        attention=tuple(name for name, computes in kernels.items() if computes),
        counted=Counted(
            parameters=sum(p.numel() for p in model.parameters()),
            largest_layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
            matrices=matrices,
        ),
    )
    return asdict(shape)


def _setting(text: Any, name: str) -> Any:
    """Return a setting of the text model, a list of all layers' where they differ (Gemma 4's heads), `None` without."""
    try:
        return getattr(text, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return [getattr(text.per_layer_config[index], name) for index in range(text.num_hidden_layers)]


def matrices_of(model: Any) -> tuple[Matrices, ...]:
    """Return every matrix of a model, alike ones of its layers together; a fused weight of experts counts each of
    them.
    """
    head, adapted, prefix = model.get_output_embeddings(), set(lora.linear_names(model)), lora.text_prefix(model)
    counts: Counter[Matrices] = Counter()
    for name, module in model.named_modules():
        inside, pattern = not prefix or name.startswith(f"{prefix}."), pattern_of(name)
        if isinstance(module, nn.Embedding) or module is head:
            if inside or module is head:
                outputs, inputs = module.weight.shape[::-1] if isinstance(module, nn.Embedding) else module.weight.shape
                counts[Matrices(name=pattern, inputs=inputs, outputs=outputs, count=1, kind="ends")] += 1
        elif lora.is_linear(module):
            inputs, outputs = (
                (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)
            )
            plain = type(module) in (nn.Linear, Conv1D)  # others transformers does not give to bitsandbytes
            kind: Any = "linear" if inside else "vision"
            matrix = Matrices(
                name=pattern,
                inputs=inputs,
                outputs=outputs,
                count=1,
                kind=kind,
                auto=name in adapted,
                quantised=plain,
                refused=lora.why_not(model, name) or "",
            )
            counts[matrix] += 1
        elif not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 3 and inside:
                    number, outputs, inputs = parameter.shape
                    full = f"{pattern}.{own}".removesuffix(".weight")
                    counts[Matrices(name=full, inputs=inputs, outputs=outputs, count=1, kind="experts")] += number
    return tuple(Matrices(**{**asdict(matrix), "count": number}) for matrix, number in counts.items())
