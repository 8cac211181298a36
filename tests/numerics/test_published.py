"""Everything in a base's folder that is not trained is in every published full model, or the base is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from sft_play.config.schema import ModelConfig
from sft_play.errors import CheckpointError
from sft_play.model.load import read_model
from sft_play.model.use import merge
from tests.carried_bases import (
    build_with,
    change_config,
    extra,
    layer_again,
    predicting_head,
    predicting_layer,
    predicting_part,
    weights,
)
from tests.families import FAMILIES, build_family, tiny_config
from tests.family_runs import travel
from tests.tiny_models import build_tiny_llama, save_model
from tests.trained_runs import make_run

IDS = torch.arange(4, 24)[None]


def read(folder: Path) -> Any:
    return read_model(folder, ModelConfig(name=str(folder)), dtype=torch.float32)


CARRIED: dict[str, tuple[str, Callable[..., Any]]] = {
    "a layer that predicts": ("glm4_moe", predicting_layer),
    "the same of a latent attention": ("deepseek_v3", predicting_layer),
    "a head that predicts": ("qwen3_5_text", predicting_head),
    "a head for scores": ("llama", extra("score.weight", 1, 64)),
    "angles that old releases saved": ("llama", extra("model.layers.*.self_attn.rotary_emb.inv_freq", 8)),
}
REFUSED: dict[str, tuple[str, Callable[..., Any], str]] = {
    "biases": (
        "llama",
        extra("model.layers.*.self_attn.q_proj.bias", 64),
        r"`model\.layers\.0\.self_attn\.q_proj\.bias`",
    ),
    "norms": ("llama", extra("model.layers.*.self_attn.q_norm.weight", 16), r"q_norm"),
    "a bias of the head": ("llama", extra("lm_head.bias", 1088), r"`lm_head\.bias`"),
    "scales of a quantisation": (
        "qwen3",
        extra("model.layers.*.mlp.up_proj.weight_scale_inv", 1, 1),
        "weight_scale_inv",
    ),
    "one more layer": ("llama", layer_again, "which the model in `config.json` does not have"),
    "one more layer of experts": ("glm4_moe", layer_again, "which the model in `config.json` does not have"),
    "one more layer of gpt2": ("gpt2", layer_again, "which the model in `config.json` does not have"),
}


@pytest.mark.parametrize("kind", CARRIED)
def test_a_merged_model_has_what_the_class_does_not_take(kind: str, tmp_path: Path) -> None:
    family, extra = CARRIED[kind]
    base = build_with(tmp_path / "base", family, extra)
    run = make_run(tmp_path / "run", base)
    merge(run, run.model, tmp_path / "out")
    before, after = weights(base), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    own = AutoModelForCausalLM.from_pretrained(base).state_dict().keys()
    assert all(torch.equal(before[name], after[name]) for name in before if name not in own and "experts" not in name)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert not torch.equal(plain(IDS).logits, AutoModelForCausalLM.from_pretrained(base)(IDS).logits)


def test_tensors_of_pickled_and_divided_bases_are_carried(tmp_path: Path) -> None:
    base = build_with(tmp_path / "base", "qwen3_5_text", predicting_head)
    before = weights(base)
    torch.save(before, base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    run = make_run(tmp_path / "run", base)
    merge(run, run.model, tmp_path / "out")
    first = [name for name in before if "layers.0" in name]
    index = {name: f"{int(name in first)}.safetensors" for name in before}
    for file in set(index.values()):
        save_file(
            {name: tensor for name, tensor in before.items() if index[name] == file},
            base / file,
            metadata={"format": "pt"},
        )
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (base / "pytorch_model.bin").unlink()
    again = make_run(tmp_path / "again", base)
    merge(again, again.model, tmp_path / "out-again")
    for folder in ("out", "out-again"):
        after = weights(tmp_path / folder)
        assert after.keys() == before.keys() and all(
            torch.equal(before[name], after[name]) for name in before if "mtp" in name
        )


@pytest.mark.parametrize("kind", REFUSED)
def test_a_base_with_weights_that_would_change_its_answers_is_refused(kind: str, tmp_path: Path) -> None:
    family, extra, message = REFUSED[kind]
    base = build_with(tmp_path, family, extra)
    with pytest.raises(CheckpointError) as caught:
        read(base)
    assert re.search(message, caught.value.render())
    if layer_again is extra:
        change_config(base, **({"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3, "layer_types": None}))
        read(base)  # the hint, followed


QUICK = ("gemma3", "gpt_oss", "qwen3_5")


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_no_family_is_refused(family: str, tmp_path: Path) -> None:
    read(build_family(tmp_path, family))


def test_full_tuning_and_a_merge_publish_the_prediction_layer(cache: Path, tmp_path: Path) -> None:
    for mode in ("lora", "full"):
        base = build_with(tmp_path / mode / "base", "glm4_moe", predicting_layer)
        road = travel("glm4_moe", mode, tmp_path / mode, cache)
        assert not road.at, road.refused
        assert road.trained and road.resumed
        published = [tmp_path / mode / "merged-lora"] if mode == "lora" else [road.trained, road.resumed]
        for folder in published:
            before, after = weights(base), weights(folder)
            assert before.keys() == after.keys()
            carried = [name for name in before if "layers.2." in name]
            assert len(carried) == 29 and all(torch.equal(before[name], after[name]) for name in carried)
            config = json.loads((folder / "config.json").read_text())
            assert config["num_nextn_predict_layers"] == 1 and config["use_cache"], "which training turns off"


def test_transformers_drafts_with_the_head_of_a_merged_model(tmp_path: Path) -> None:
    base = build_with(tmp_path / "base", "mellum", predicting_part, num_mtp_layers=1)
    run = make_run(tmp_path / "run", base)
    merge(run, run.model, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    drafted, alone = (
        plain.generate(IDS, max_new_tokens=8, do_sample=False, eos_token_id=None, **draft)
        for draft in ({"use_mtp": True}, {})
    )
    assert torch.equal(drafted, alone)


def test_a_model_whose_text_part_was_trained_keeps_its_tower(tmp_path: Path) -> None:
    config = tiny_config("qwen3_5")
    config.tie_word_embeddings = False
    base, ids = tmp_path / "base", IDS
    whole = save_model(
        AutoModelForImageTextToText.from_config(config), base
    ) and AutoModelForImageTextToText.from_pretrained(base)
    run = make_run(tmp_path / "run", base)
    merge(run, run.model, tmp_path / "out")
    merged, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    towers = [{name: p for name, p in network.named_parameters() if "visual" in name} for network in (whole, merged)]
    assert towers[0] and all(torch.equal(p, towers[1][name]) for name, p in towers[0].items())
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        logits, before = merged(ids).logits, whole(ids).logits
        assert torch.allclose(logits, text(ids).logits, atol=1e-6) and (logits - before).abs().max() > 1e-3


def build_untied(folder: Path) -> Path:
    """Write a model whose files have a separate head, although its configuration ties it to the embedding."""
    build_tiny_llama(folder, tie_word_embeddings=False)
    change_config(folder, tie_word_embeddings=True)
    return folder


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_head_that_the_configuration_ties_stays_separate(mode: str, cache: Path, tmp_path: Path) -> None:
    build_untied(tmp_path / "base")
    road = travel("llama", mode, tmp_path, cache)
    assert not road.at, road.refused
    assert road.trained
    folder = tmp_path / "merged-lora" if mode == "lora" else road.trained
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(plain.lm_head.weight, plain.get_input_embeddings().weight)
    assert torch.equal(plain.lm_head.weight, weights(folder)["lm_head.weight"])


WITHOUT_EFFECT = {
    "do_sample": False,
    "temperature": 0.9,
    "top_p": 0.8,
    "repetition_penalty": 1.1,
    "eos_token_id": [2],
    "pad_token_id": 3,
}


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_settings_of_generation_without_effect_are_copied(mode: str, cache: Path, tmp_path: Path) -> None:
    build_tiny_llama(tmp_path / "base", eos_token_id=0)  # training aligns it with the tokenizer's
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(WITHOUT_EFFECT))
    road = travel("llama", mode, tmp_path, cache)
    assert not road.at, road.refused
    assert road.trained
    folder = tmp_path / "merged-lora" if mode == "lora" else road.trained
    assert json.loads((folder / "generation_config.json").read_text()) == WITHOUT_EFFECT


@pytest.mark.parametrize(
    "settings",
    [
        {"pad_token_id": -1, "_from_model_config": True, "temperature": 0.9},
        {"num_return_sequences": 3},
        ["temperature"],
    ],
    ids=["padding that is no token", "settings that do not load", "no object"],
)
def test_generation_settings_that_transformers_refuses_do_not_matter(
    settings: Any, cache: Path, tmp_path: Path
) -> None:
    build_tiny_llama(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(settings))
    road = travel("llama", "lora", tmp_path, cache)
    assert not road.at, road.refused
    published = json.loads((tmp_path / "merged-lora" / "generation_config.json").read_text())
    copied = {} if isinstance(settings, list) else {name: settings[name] for name in settings if name[0] != "_"}
    assert published | copied | {"eos_token_id": [2], "pad_token_id": 3} == published
    assert "_from_model_config" not in published, "older transformers would go by `config.json` instead"
