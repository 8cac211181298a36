"""Every decoder family goes the whole road under LoRA and full tuning, or is refused by name before any data are prepared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.families import FAMILIES
from tests.family_runs import Road, travel

IN_MAKE_TEST = ("gemma3", "gpt_oss", "llama")
"""One of several kinds: an image tower, sinks and fused experts, rows that are packed."""
REFUSED: dict[str, str] = {}
"""Family -> what the plan says of it."""
UNTOUCHED = {
    "deepseek_v32": ".indexer.",
    "glm_moe_dsa": ".indexer.",
    "gemma3": "vision",
    "gemma4": "vision",
    "mistral3": "vision",
    "qwen3_vl": "visual",
}
"""Family -> part of the names of weights that full tuning leaves as they were."""
ROUTERS = ("gate", "router", "wg")
CASES = [
    pytest.param(name, mode, id=f"{name}-{mode}", marks=[] if name in IN_MAKE_TEST and mode == "lora" else pytest.mark.long)
    for name in FAMILIES
    for mode in ("lora", "full")
] + [pytest.param(name, "qlora", id=f"{name}-qlora", marks=pytest.mark.long) for name in ("glm4_moe", "gpt_oss", "qwen3_moe")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a folder's safetensors files."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def check_lora(road: Road) -> None:
    """What the plan counts has adapters, all of them trained; no router has one, and no routed expert."""
    assert road.plan and road.trained
    settings, found = json.loads((road.trained / "adapter_config.json").read_text()), weights(road.trained)
    modules = {name.rsplit(".lora_", 1)[0] for name in found}
    assert all(
        name.endswith(".weight") for name in settings["target_parameters"] or ()
    )  # linear layers that PEFT alone would rename
    assert not [name for name in modules if ".experts" in name]
    assert not [name for name in modules if name.rsplit(".", 1)[-1] in ROUTERS]
    assert sum(tensor.nbytes for tensor in found.values()) == road.plan.ranks[0].memory_bytes["adapters"]
    assert all(tensor.abs().max() > 0 for name, tensor in found.items() if "lora_B" in name)


def check_full(name: str, road: Road, base: Path) -> None:
    """Every weight has been trained but those that say so."""
    assert road.trained
    before, after = weights(base), weights(road.trained)
    assert before.keys() == after.keys()
    same = [key for key in before if torch.equal(before[key], after[key])]
    assert not [key for key in same if name not in UNTOUCHED or UNTOUCHED[name] not in key]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_family_goes_the_whole_road(name: str, mode: str, cache: Path, tmp_path: Path) -> None:
    road = travel(name, mode, tmp_path, cache)
    if name in REFUSED:
        assert road.at == "plan" and REFUSED[name] in road.refused
        return
    assert not road.at, f"{road.at}: {road.refused}"
    assert road.trained and road.resumed
    check_lora(road) if mode != "full" else check_full(name, road, tmp_path / "base")
    again = weights(road.resumed)
    assert all(torch.equal(tensor, again[key]) for key, tensor in weights(road.trained).items())
