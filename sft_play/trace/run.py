"""Traces a case: fake tensors, or real ones for comparison, through the same code; few layers stand for many."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sft_play.plan.trace_case import Case
from sft_play.trace import allocator, build
from sft_play.trace.expandable import ExpandableAllocator
from sft_play.trace.step import MOMENTS, StepTrace, batch_of, real_branches
from sft_play.trace.tracker import Peak, StorageTracker

DEEPER = 8
"""Layers of the model whose loss between blocks is compared with that of the smallest."""

STEP_TOKENS = {"token": 32, "chunk": 64}
"""Tokens by which the two short rows differ that are traced in place of a long one, where a state is computed token by token (Mamba's first
kind without its kernels) or chunk by chunk (gated delta rules): a trace of the long row would take minutes."""


def trace(case: Case) -> dict[str, Any]:
    """Returns the moments of the whole model, extrapolated from few layers, its counts, and what an allocator would lose.

    Every quantity is affine in the number of layers of each kind, moment by moment (tried: docs/planning.md), so a model with the
    fewest layers and one with one layer more of each kind say it all.
    """
    model = build.model_of(case)
    short = _short_rows(case, model)
    return _lengthened(case, short) if short else _deepened(case, model, losses=case.device == "cuda")


def _deepened(case: Case, model: Any, *, losses: bool) -> dict[str, Any]:
    """Returns the trace of the whole model by those of few layers."""
    kinds = build.layer_kinds(build.decoder_layers(model))
    smallest, grown, counts = build.depths(kinds)
    base, events, base_counts = observe(case, build.with_layers(model, smallest), log=losses)
    steps = {kind: observe(case, build.with_layers(model, layers), log=losses) for kind, layers in grown.items()}
    missing = {kind: counts[kind] - Counter(kinds[index] for index in smallest)[kind] for kind in steps}
    moments = {
        moment: _extrapolated(peak.parts, {k: s[0][moment].parts for k, s in steps.items() if moment in s[0]}, missing)
        for moment, peak in base.items()
    }
    return {
        "moments": moments,
        "operations": {moment: peak.operation for moment, peak in base.items()},
        "counts": _extrapolated(base_counts, {k: s[2] for k, s in steps.items()}, missing),
        **(_losses(case, model, smallest, [events, *(step[1] for step in steps.values())]) if losses else {}),
    }


def _short_rows(case: Case, model: Any) -> tuple[int, int] | None:
    """Returns the tokens of two short rows in which everything is affine, or `None` where the row itself is traced.

    They have two chunks at least (one alone is another case), as many tokens left over in the last one as the long row, and labels for two
    chunks of the head, if that has such. Two traces are to save time.
    """
    delta = any("Delta" in type(module).__name__ for module in model.modules())
    scanned = any(name.endswith("A_log") and p.dim() == 2 for name, p in model.named_parameters())
    if not (delta or scanned):
        return None
    step = STEP_TOKENS["chunk" if delta else "token"] * (2 if case.packed else 1)
    labelled = 2 * case.loss_chunk * case.row_tokens / case.labels if case.labels > case.loss_chunk else 0
    first = case.row_tokens % step + step * math.ceil(max(2 * step if delta else step, labelled) / step)
    return (first, first + step) if case.row_tokens > (8 if delta else 2) * (first + step) else None


def _lengthened(case: Case, short: tuple[int, int]) -> dict[str, Any]:
    """Returns the trace of long rows by two of short ones. What an allocator loses is not affine, and left to the formula."""
    rows = [replace(case, row_tokens=n, labels=max(1, case.labels * n // case.row_tokens)) for n in short]
    first, second = (_deepened(one, build.model_of(one), losses=False) for one in rows)
    more = {"tokens": (case.row_tokens - short[0]) / (short[1] - short[0])}
    moments = {
        moment: _extrapolated(parts, {"tokens": second["moments"].get(moment, parts)}, more)
        for moment, parts in first["moments"].items()
    }
    return {**second, "moments": moments}


def _losses(case: Case, model: Any, smallest: Sequence[int], logs: list[list[allocator.Event]]) -> dict[str, int]:
    """Returns what each kind of allocator loses between blocks of the whole model, from `logs`, of which the first has the `smallest` layers.

    Where activations are kept the loss grows with the layers, but unevenly: a model with several more layers tells its slope. With
    recomputation it does not grow (replays of all layers: docs/planning.md).
    """
    few, whole = len(smallest), len(build.decoder_layers(model))
    depth = few if case.gradient_checkpointing else min(whole, max(DEEPER, few + 1))
    more = [index for index in range(whole) if index not in smallest][: depth - few]
    deeper = observe(case, build.with_layers(model, sorted([*smallest, *more])), log=True)[1] if more else []
    found: dict[str, int] = {}
    for name, make in (("lost_bytes", ExpandableAllocator), ("lost_bytes_native", allocator.CachingAllocator)):
        lost = [allocator.lost_bytes(events, make) for events in logs]
        if more:
            most = allocator.lost_bytes(deeper, make)
            lost += [most, int(most + (most - lost[0]) / (depth - few) * (whole - depth))]
        found[name] = max(lost)
    return found


def _extrapolated(
    base: Mapping[str, int], grown: Mapping[str, Mapping[str, int]], missing: Mapping[str, float]
) -> dict[str, int]:
    names = set(base).union(*(set(parts) for parts in grown.values()))
    return {
        name: int(
            base.get(name, 0) + sum(missing[kind] * (parts.get(name, 0) - base.get(name, 0)) for kind, parts in grown.items())
        )
        for name in sorted(names)
    }


def observe(
    case: Case, model: Any, *, real: bool = False, log: bool = False
) -> tuple[dict[str, Peak], list[tuple[int, int, int]], dict[str, int]]:
    """Returns the peak of each moment, the allocator's events and the counts of a model of the meta device, which it changes.

    `real` computes with real tensors of zeros, on the same device, for comparison.
    """
    model = build.build(case, model)
    device = "cuda" if case.device == "cuda" and torch.cuda.is_available() else "cpu"
    text = model.config.get_text_config()
    with _tensors(real), real_branches(case):
        build.materialise(model, device)
        if case.autocast:
            build.under_autocast(model, case.precision, device)
        tracker = StorageTracker(device=case.device, logit_width=int(text.vocab_size), log=log)
        for tensor, part in build.parts_of(model, case):
            tracker.hold(tensor, part)
        batch = batch_of(case, device)
        layers = [layer for layer in build.decoder_layers(model) if not isinstance(layer, build.Skipped)]
        steps = StepTrace(model, layers, case, tracker)
        counts = _counts(model)
        with tracker:
            steps.run(batch)
    peaks = {moment: tracker.peaks[moment] for moment in MOMENTS if moment in tracker.peaks}
    return peaks, tracker.events or [], counts


@contextlib.contextmanager
def _tensors(real: bool) -> Iterator[None]:
    if real:
        yield
        return
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _counts(model: torch.nn.Module) -> dict[str, int]:
    """Returns elements that train and bytes that are held."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return {
        "trained": sum(p.numel() for p in trained),
        "trained_bytes": sum(p.numel() * p.element_size() for p in trained),
        "frozen_bytes": sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad),
    }
