"""Adapters of every family: on the layers that were planned, each with a gradient, and read back by PEFT alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from sft_play.config.reader import record_of
from sft_play.config.schema import Config, LoraSettings, ModelConfig, TuningConfig
from sft_play.errors import UserError
from sft_play.model.lora import add_adapters, expert_names, find_targets, read_adapter
from sft_play.plan.shape import ModelShape, check_targets
from sft_play.runs.prepared import ResolvedModel
from sft_play.trace.run import count
from tests.families import FAMILIES, HYBRIDS, MIXTURES, tiny_config, tiny_model

BASE = ResolvedModel(name="base", path=".", source="folder", revision=None, fingerprint="", tokenizer_fingerprint="")
IDS = torch.randint(10, 1000, (2, 40), generator=torch.Generator().manual_seed(1))


def adapted(name: str, targets: Any = "auto") -> Any:
    """Return a tiny model with adapters that are no longer the zero function."""
    return grown(add_adapters(grown(tiny_model(name)), LoraSettings(r=2, target_modules=targets), BASE, torch.float32))


def grown(model: Any) -> Any:
    """Give small numbers to every parameter that starts as zeros, since it would hide what precedes it."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        computed: torch.Tensor = model.eval()(input_ids=IDS).logits
    return computed


def assert_read_back(name: str, model: Any, folder: Path) -> None:
    """Assert that PEFT alone and our loading give the logits of `model`, before and after merging."""
    expected = logits(model)
    model.save_pretrained(folder)
    for read in (
        lambda base: PeftModel.from_pretrained(base, str(folder)),
        lambda base: read_adapter(base, folder),
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys.*")
            again = read(grown(tiny_model(name)))
        for actual in (logits(again), logits(again.merge_and_unload())):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[] if name in ("gpt2", "gemma3", "llama") or name in MIXTURES + HYBRIDS else [pytest.mark.long]
        )
        for name in FAMILIES
        if type(tiny_config(name)) in AutoModelForCausalLM._model_mapping
    ],
)
@pytest.mark.broad_but("llama", "qwen3_moe", "gpt2", "mamba")
def test_auto_adapts_the_planned_modules_and_peft_reads_them_back(name: str, tmp_path: Path) -> None:
    planned = find_targets(tiny_model(name, "meta"), "auto").modules
    model = adapted(name)
    placed = {
        n.split(".lora_A")[0].removeprefix("base_model.model.") for n, _ in model.named_parameters() if "lora_A" in n
    }
    assert placed == set(planned)
    assert not {"router", "gate", "wg", "experts", "indexer"} & {part for n in placed for part in n.split(".")}
    model.train()(input_ids=IDS).logits.float().pow(2).sum().backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not without, "adapters that nothing trains"
    assert_read_back(name, model, tmp_path)


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss", "llama4_text", "nemotron_h", "qwen3_moe"])
def test_experts_that_are_typed_are_adapted_and_read_back(name: str, tmp_path: Path) -> None:
    experts = expert_names(tiny_model(name, "meta"))
    typed = sorted({".".join(n.split(".")[-2:]) for n in experts})
    model = adapted(name, ["q_proj", *typed])
    assert set(model.base_model.targeted_parameter_names) == set(experts)
    model.train()(input_ids=IDS).logits.float().pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if p.requires_grad)
    assert_read_back(name, model, tmp_path)


def test_names_that_peft_would_rewrite_survive_saving(tmp_path: Path) -> None:
    model = adapted("glm4_moe", ["q_proj", "shared_experts.gate_proj"])
    assert_read_back("glm4_moe", model, tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["target_modules"] == ["q_proj"]
    assert saved["target_parameters"] == ["shared_experts.gate_proj.weight"]


@pytest.mark.parametrize(
    ("name", "typed", "why"),
    [
        ("hunyuan_v1_moe", "wg", "it routes tokens to experts"),
        ("llama4_text", "router", "it routes tokens to experts"),
        ("nemotron_h", "out_proj", "`NemotronHMamba2Mixer` reads its weight directly, which bypasses an adapter"),
        ("deepseek_v4", "o_a_proj", "PEFT cannot adapt a `DeepseekV4GroupedLinear`"),
        ("glm_moe_dsa", "indexer.wk", "it selects tokens, and no gradient reaches it"),
    ],
)
def test_a_layer_that_takes_no_adapter_is_refused_with_the_reason(name: str, typed: str, why: str) -> None:
    """By the plan, with the reason, and by the model itself."""
    shape = record_of(count(tiny_config(name).to_dict()), ModelShape)
    with pytest.raises(UserError) as caught:
        check_targets(lora(["o_proj", typed, "nothing"]), shape)
    assert f"`{typed}` ({why}), `nothing`" in caught.value.message
    assert caught.value.hint is not None and "down_proj" in caught.value.hint and f"{typed}," not in caught.value.hint
    with pytest.raises(UserError, match=f"names `{typed}`, where this model's text part takes no adapter"):
        find_targets(tiny_model(name, "meta"), [typed])


def lora(targets: list[str], **settings: Any) -> Config:
    return Config(
        model=ModelConfig(name="base"),
        tuning=TuningConfig(mode="lora", lora=LoraSettings(target_modules=targets, **settings)),
    )


def test_adapters_on_experts_are_planned_and_have_no_dropout() -> None:
    shape = record_of(count(tiny_config("qwen3_moe").to_dict()), ModelShape)
    typed = ["q_proj", "experts.down_proj"]
    model = add_adapters(tiny_model("qwen3_moe"), LoraSettings(r=2, target_modules=typed), BASE, torch.float32)
    assert shape.adapter_parameters(LoraSettings(r=2, target_modules=typed)) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    check_targets(lora(typed), shape)
    with pytest.raises(UserError, match="adapters on fused experts have no dropout"):
        check_targets(lora(typed, dropout=0.1), shape)
    with pytest.raises(UserError, match="names `down_proj`"):
        check_targets(lora(["q_proj", "down_proj"]), shape)
