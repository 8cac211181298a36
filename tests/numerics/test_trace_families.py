"""Activations of every family: a few traced layers of each kind represent all layers of a real step."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sft_play.plan.shape import VARLEN_MODEL_TYPES
from sft_play.plan.sources import Case
from sft_play.trace.build import model_of
from sft_play.trace.run import observe, trace
from tests.families import COMPOSITE, FAMILIES, OWN, plain_attention, tiny_config
from tests.numerics.test_trace import MODES, PLAIN, peaks_of

QUICK = {"deepseek_v3", "nemotron_h", "qwen3_next"}
LAYERS = 6


def deeper(name: str) -> Any:
    """Return the family's tiny configuration with more layers of the same kinds."""
    if name == "nemotron_h":
        return tiny_config(name)  # it has four kinds
    own = OWN.get(COMPOSITE[name][0] if name in COMPOSITE else name, {})
    kinds = {
        key: value * (LAYERS // len(value))
        for key, value in own.items()
        if isinstance(value, list) and len(value) in {2, 3} and not isinstance(value[0], tuple)
    }
    return tiny_config(name, num_hidden_layers=LAYERS, **kinds)


def stands_for_all(case: Case) -> None:
    most = max(sum(parts.values()) for parts in trace(case)["moments"].values())
    real = max(peak.total for peak in peaks_of(observe(case, model_of(case), real=True)).values())
    assert most == pytest.approx(real, rel=0.001)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FAMILIES]
)
def test_few_traced_layers_of_a_family_represent_all(name: str) -> None:
    """Rows in the layout and under the attention that are planned on a CPU."""
    by_lengths = name in VARLEN_MODEL_TYPES
    case = replace(
        PLAIN,
        architecture=json.loads(deeper(name).to_json_string()),
        layout="flattened" if by_lengths else "unmasked",
        rows=2,
        attention="varlen" if by_lengths else plain_attention(name),
        **MODES["lora fp32"],
    )
    stands_for_all(case)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("qwen3_5_text", 1600), *(pytest.param(name, 160, marks=pytest.mark.long) for name in ("jamba", "mamba"))],
)
def test_short_rows_represent_long_ones_if_a_state_is_computed_in_sequence(name: str, tokens: int) -> None:
    case = replace(
        PLAIN,
        architecture=json.loads(tiny_config(name).to_json_string()),
        layout="padded",
        rows=1,
        row_tokens=tokens,
        labels=tokens,
        loss_chunk=32,
        attention=plain_attention(name),
        accumulates=False,
        **MODES["lora fp32"],
    )
    stands_for_all(case)
