"""Models ready to train: types, what is frozen, quantisation, seeds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from sft_play.config.schema import Config, LoraSettings, ModelConfig, TrainConfig, TuningConfig
from sft_play.data.rows import write_rows
from sft_play.errors import CheckpointError, DataError, UserError
from sft_play.model.load import load_for_training
from sft_play.model.resolve import quantization_in
from sft_play.runs.prepared import SourceFacts
from tests.families import build_family
from tests.plans import prepared_model, prepared_rows, simple_plan
from tests.tiny_models import build_tiny_llama, build_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: build_family(folder / name, name) for name in ("llama", "mixtral", "gemma3")}


def load(
    folder: Path,
    *,
    mode: str = "lora",
    plan: dict[str, Any] | None = None,
    seed: int = 42,
    train: Any = None,
    **tuning: Any,
) -> Any:
    config = Config(
        model=ModelConfig(name=str(folder)),
        tuning=TuningConfig(mode=mode, lora=LoraSettings(r=4), **tuning),  # type: ignore[arg-type]
        train=TrainConfig(seed=seed),
    )
    model, tokenizer = load_for_training(config, simple_plan(**(plan or {})), prepared_model(folder, train))
    assert tokenizer.pad_token_id is not None
    assert model.config.get_text_config().use_cache is False
    return model


def test_full_tuning_of_a_multimodal_model_freezes_tower_and_projector(folders: dict[str, Path], capsys: Any) -> None:
    names = [name for name, p in load(folders["gemma3"], mode="full").named_parameters() if p.requires_grad]
    assert names and not [n for n in names if "vision" in n or "projector" in n]
    assert "vision tower and projector are frozen" in capsys.readouterr().err


def test_nf4_is_double_quantised_and_leaves_embeddings_head_and_norms_alone(folders: dict[str, Path]) -> None:
    model = load(folders["llama"], mode="qlora", plan={"weights_dtype": "bfloat16", "precision": "bf16"})
    linear = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    state = linear.weight.quant_state
    assert state.quant_type == "nf4" and state.nested and linear.compute_dtype == torch.bfloat16, (
        "the scales are quantised too"
    )
    types = {n: p.dtype for n, p in model.named_parameters() if p.dtype != torch.uint8}
    assert set(types.values()) == {torch.bfloat16}, "no fp32 upcast of embeddings, head, norms or adapters"
    assert any("embed_tokens" in n for n in types)


def test_experts_that_cannot_be_quantised_stay_as_they_are(folders: dict[str, Path]) -> None:
    model = load(folders["mixtral"], mode="qlora")
    experts = [p for n, p in model.named_parameters() if "experts" in n and "lora" not in n]
    assert {p.dtype for p in experts} == {torch.float32}


def test_the_seed_alone_decides_the_fresh_adapters(folders: dict[str, Path]) -> None:
    torch.rand(7)
    first = {n: p.detach().clone() for n, p in load(folders["llama"]).named_parameters() if p.requires_grad}
    torch.rand(1000)
    again, other = load(folders["llama"]), load(folders["llama"], seed=1)
    assert all(torch.equal(p, first[n]) for n, p in again.named_parameters() if p.requires_grad)
    assert any(not torch.equal(p, first[n]) for n, p in other.named_parameters() if p.requires_grad)


@pytest.fixture(scope="module")
def quantised_base(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = tmp_path_factory.mktemp("nf4")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    AutoModelForCausalLM.from_pretrained(folders["llama"], quantization_config=settings).save_pretrained(folder)
    build_tokenizer(folder)
    return folder


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_a_quantised_base_is_recognised_and_never_quantised_twice(
    folders: dict[str, Path], quantised_base: Path, mode: str, capsys: Any
) -> None:
    assert quantization_in(folders["llama"]) == ""
    model = load(quantised_base, mode=mode)
    assert "is quantised (bitsandbytes nf4): it is used as it is and not quantised again" in capsys.readouterr().err
    fresh = load(folders["llama"], mode="qlora")
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, fresh(input_ids=ids).logits, atol=1e-3)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    weights = load_file(build_tiny_llama(tmp_path) / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lack `model\.layers\.1\.mlp\.up_proj\.weight`"):
        load(tmp_path)


@pytest.mark.parametrize("column", ["input_ids", "prompt_ids"])
def test_a_tokenizer_may_know_tokens_that_no_row_holds(column: str, tmp_path: Path) -> None:
    """As gemma-3-1b-it is published: 262,145 tokens for 262,144 embeddings."""
    base = build_tiny_llama(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.add_tokens(["<image_soft_token>"]) == 1
    tokenizer.save_pretrained(base)
    for last in (1023, 1024):
        rows = [{"input_ids": [5, 6], "prompt_ids": [5], "source": 0}] * 3 + [
            {"input_ids": [5], "prompt_ids": [], "source": 1} | {column: [5, last]}
        ]
        write_rows(rows, tmp_path / str(last))
    sources = tuple(SourceFacts(name=name, rows=3, tokens=6, label_tokens=3) for name in ("one.jsonl", "two.jsonl"))
    unused, used = (prepared_rows(4, path=str(tmp_path / last), sources=sources).train for last in ("1023", "1024"))
    load(base, train=unused)
    with pytest.raises(
        DataError,
        match=r"a row contains the token `<image_soft_token>` \(number 1024\), but the model's embeddings have 1024",
    ) as caught:
        load(base, train=used)
    assert caught.value.place == "two.jsonl"


@pytest.mark.parametrize(
    ("values", "error", "named"),
    [
        ({"num_attention_heads": "4"}, DataError, "`?num_attention_heads.*expected int, got str"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}},
            CheckpointError,
            "cannot be loaded: .*str",
        ),
    ],
    ids=["heads", "rope"],
)
def test_values_of_a_wrong_type_in_the_configuration_are_named(
    values: dict[str, Any], error: type[UserError], named: str, tmp_path: Path
) -> None:
    config = build_tiny_llama(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    with pytest.raises(error, match=named):
        load(tmp_path)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_evaluating_does_not_change_a_quantised_model(quantization: str, tmp_path: Path) -> None:
    model = load(build_tiny_llama(tmp_path), mode="qlora", quantization=quantization).train()
    ids = torch.arange(4, 40)[None]
    before = model(input_ids=ids).logits.detach()
    model.eval()
    with torch.no_grad():
        evaluated = model(input_ids=ids).logits
    model.train()
    again = model(input_ids=ids).logits.detach()
    assert torch.equal(before, again), "training continues over the same base"
    assert torch.allclose(before, evaluated, atol=1e-5)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_row_over_a_quantised_base_does_not_depend_on_outliers_in_another(quantization: str, tmp_path: Path) -> None:
    model = load(build_tiny_llama(tmp_path), mode="qlora", quantization=quantization).eval()
    for name, weight in model.named_parameters():
        if "layernorm" in name:
            weight.data[::5] *= 12  # LLM.int8's threshold is 6
    ids = torch.arange(4, 1020).view(8, -1)
    with torch.no_grad():
        together, alone = model(input_ids=ids).logits, torch.cat([model(input_ids=row[None]).logits for row in ids])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
