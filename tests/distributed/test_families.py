"""Every decoder family trains, resumes, merges and answers under LoRA and full tuning, and its row in `docs/models.md`
says what was tuned.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.render_models import PAGE, adapted_cell, read_table, trained_cell
from tests.families import FAMILIES
from tests.family_facts import check_published
from tests.family_runs import Road, travel, weights

IN_MAKE_TEST = ("gemma4_text", "llama", "qwen3_5_text")
IN_CI = (*IN_MAKE_TEST, "deepseek_v3", "gemma3", "gpt2", "gpt_oss", "nemotron_h")
"""One of each kind: latent attention and experts that PEFT would adapt, an image tower, embeddings of each layer,
`Conv1D`, sinks, packed rows, a state space, linear attention.
"""
ROWS = read_table(PAGE.read_text(encoding="utf-8"))
"""Family -> rows, what LoRA adapts, what `full` trains."""


def tier(name: str) -> pytest.MarkDecorator | tuple[()]:
    return () if name in IN_MAKE_TEST else pytest.mark.broad if name in IN_CI else pytest.mark.long


CASES = [
    pytest.param(name, mode, id=f"{name}-{mode}", marks=tier(name) if mode == "lora" else pytest.mark.long)
    for name in FAMILIES
    for mode in ("lora", "full")
] + [
    pytest.param(name, "qlora", id=f"{name}-qlora", marks=pytest.mark.long)
    for name in ("glm4_moe", "gpt_oss", "qwen3_moe")
]


def check_lora(road: Road) -> None:
    """Assert that all modules of the plan, and no router or routed expert, have trained adapters."""
    assert road.plan and road.trained
    adapter = weights(road.trained)
    parts = {part for name in road.adapted() for part in name.split(".")}
    assert not parts & {"experts", "gate", "router", "wg"}
    assert sum(tensor.nbytes for tensor in adapter.values()) == road.plan.ranks[0].memory_bytes["adapters"]
    assert all(tensor.abs().max() > 0 for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_family_trains_resumes_merges_and_answers(name: str, mode: str, cache: Path, tmp_path: Path) -> None:
    road = travel(name, mode, tmp_path, cache)
    assert not road.at, f"{road.at}: {road.refused}"
    assert road.trained and road.resumed
    if mode != "full":
        check_lora(road)
        assert adapted_cell(road) == ROWS[name][1]
    else:
        assert trained_cell(road) == ROWS[name][2]
    again = weights(road.resumed)
    assert all(torch.equal(tensor, again[key]) for key, tensor in weights(road.trained).items())


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=tier(name)) for name in FAMILIES])
def test_a_published_model_of_each_family_keeps_what_its_base_has(name: str, tmp_path: Path) -> None:
    check_published(name, tmp_path)
