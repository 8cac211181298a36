"""A run's model read again: it is the one that was trained, or it is refused; merged, it still is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_play.errors import CheckpointError
from sft_play.model import use as using
from sft_play.model.use import load_for_use, merge
from sft_play.runs.folder import RunFolder
from tests.families import build_family
from tests.tiny_models import build_tokenizer
from tests.trained_runs import make_run
from tests.training_runs import copy_run

IDS = torch.arange(4, 24)[None]


class Case(NamedTuple):
    base: str
    mode: str = "lora"
    tuning: str = ""


CASES = {
    "lora": Case("llama"),
    "full": Case("llama", "full"),
    "nf4": Case("llama", "qlora"),
    "int8": Case("llama", "qlora", "quantization: int8"),
    "bf16": Case("bf16"),
    "gpt2": Case("gpt2"),
    "gpt2 nf4": Case("gpt2", "qlora"),
    "gemma3": Case("gemma3"),
    "gemma3 nf4": Case("gemma3", "qlora"),
    "nf4 experts": Case("mixture", "qlora"),
    "mixture": Case("mixture"),
    "experts": Case("mixtral", "lora", "lora: {target_modules: [q_proj, experts.down_proj]}"),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    folders = {name: build_family(folder / name, name) for name in ("llama", "gpt2", "mixtral", "gemma3")}
    folders["mixture"] = build_family(folder / "mixture", "glm4_moe")
    folders["bf16"] = folder / "bf16"
    AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.bfloat16).save_pretrained(folders["bf16"])
    build_tokenizer(folders["bf16"])
    return folders


@pytest.fixture(scope="module")
def runs(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: make_run(
            folder / name, bases[case.base], case.mode, tuning=case.tuning, plan={"nf4_experts": name == "nf4 experts"}
        )
        for name, case in CASES.items()
    }


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.Tensor(model(input_ids=IDS).logits.float())


@pytest.mark.parametrize("name", CASES)
def test_merged_models_load_anywhere_and_answer_alike(
    runs: dict[str, RunFolder], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs[name]
    model, tokenizer = load_for_use(run, None, "cpu")
    assert not model.training
    assert model.config.get_text_config().use_cache
    merged = merge(run, run.model, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert str(plain.dtype) == ("torch.bfloat16" if name == "bf16" else "torch.float32")
    apart = (logits(plain) - logits(model)).abs()
    base = logits(AutoModelForCausalLM.from_pretrained(json.loads(run.prepared.read_text())["model"]["path"]))
    assert (logits(model) - base).abs().mean() > 5 * apart.mean(), "tuning moved the model much more than merging did"
    error = capsys.readouterr().err
    if CASES[name].mode != "qlora":
        assert apart.max() <= (0.05 if name == "bf16" else 1e-5) and "quantis" not in error
    else:
        assert "read again unquantised" in error
    if CASES[name].mode != "full":
        assert merged["difference"] <= 1e-5 and "allowed" in error
    made_from = json.loads((tmp_path / "out" / "stamp.json").read_text())["merged_from"]
    assert made_from["run"] == name and all(len(digest) == 64 for digest in made_from["sha256"].values())
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.chat_template == tokenizer.chat_template
    assert plain.generation_config.eos_token_id == [2]
    assert plain.config.get_text_config().use_cache or name == "full", "of a full run, whoever saved it turns it on"
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]


def test_an_adapter_whose_weights_are_missing_is_refused(runs: dict[str, RunFolder], tmp_path: Path) -> None:
    lora = copy_run(runs["lora"], tmp_path / "lora")
    path = lora.model / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({k: v for k, v in weights.items() if "layers.1" not in k}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="does not fit the base model"):
        load_for_use(lora, None, "cpu")


def test_a_merge_that_would_change_the_answers_is_not_published(
    runs: dict[str, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(using, "EXACT", -1.0)  # no difference is small enough
    with pytest.raises(CheckpointError, match="nothing was published"):
        merge(runs["lora"], runs["lora"].model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
