"""A model from scratch: its rules, its shape, its weights and its tokenizer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.config.keys import variables
from sft_play.config.layers import Override
from sft_play.config.load import load_config
from sft_play.config.schema import Config, DataConfig, DataSource, ModelConfig, TrainConfig, TuningConfig
from sft_play.errors import DataError, UserError
from sft_play.files import read_json
from sft_play.model.scratch import resolve
from sft_play.model.tokenizer import end_of_turn_ids, load_tokenizer
from sft_play.plan.architecture import architecture_of, label, shape_of
from tests.conftest import ROOT, Program
from tests.tiny_models import build_tokenizer

DATA = str(ROOT / "examples" / "02_your_jsonl" / "train.jsonl")
SHAPE = ["MODEL_HIDDEN_SIZE=64", "MODEL_ATTENTION_HEADS=4", "MODEL_LAYERS=2", "MODEL_VOCAB_SIZE=600"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["TUNING_MODE=full", *SHAPE[1:2], *SHAPE[3:]],
            "`model.init` is `random`, but `model.hidden_size`, `model.layers` are missing",
        ),
        (
            ["TUNING_MODE=full", *SHAPE, "MODEL_HIDDEN_SIZE=66"],
            "`model.hidden_size` 66 cannot be divided by `model.attention_heads` 4",
        ),
        (SHAPE, "`tuning.mode` is `lora`: adapters over random weights learn little\n\nhint: set `tuning.mode: full`"),
        (
            ["TUNING_MODE=full", *SHAPE, "MODEL_VOCAB_SIZE=100"],
            "`model.vocab_size` is 100, but a byte-level tokenizer has at least 260 tokens",
        ),
        (["TUNING_MODE=full", *SHAPE, "MODEL_NAME=a/b"], "`model.attention_heads`, `model.layers` are both"),
        (
            ["TUNING_MODE=full", *SHAPE, "TUNING_TASK=cpt", "DATA_SOURCES=[{path: a.jsonl, format: messages}]"],
            "hint: set `tuning.task: mixed`",
        ),
        (
            ["TUNING_MODE=full", *SHAPE, "DATA_SOURCES=[{path: a.jsonl}, {path: b, format: text}]"],
            "is `text`, but `tuning.task: sft` learns answers",
        ),
    ],
)
def test_conflicting_options_are_refused_with_a_hint(words: list[str], message: str) -> None:
    settings = dict(word.split("=", 1) for word in ["MODEL_INIT=random", *words])
    overrides = [Override(key=variables()[name], text=text, origin=name) for name, text in settings.items()]
    with pytest.raises(UserError) as error:
        load_config(None, overrides, {})
    assert message in error.value.render()


def scratch(**model: object) -> Config:
    values: dict[str, object] = {
        "init": "random",
        "vocab_size": 600,
        "hidden_size": 64,
        "attention_heads": 4,
        "layers": 2,
        "max_seq_len": 64,
        **model,
    }
    return Config(
        model=ModelConfig(**values),
        tuning=TuningConfig(mode="full"),
        data=DataConfig(sources=[DataSource(path=DATA)]),  # type: ignore[arg-type]
    )


def test_weights_are_created_once_from_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = scratch()
    first = resolve(config)
    assert "training a tokenizer of 600 tokens" in capsys.readouterr().err
    assert resolve(config) == first and not capsys.readouterr().err
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "two"))
    again = resolve(config)
    assert again.fingerprint == first.fingerprint and again.tokenizer_fingerprint == first.tokenizer_fingerprint
    other = resolve(replace(config, train=TrainConfig(seed=1)))
    assert other.fingerprint != first.fingerprint and other.tokenizer_fingerprint == first.tokenizer_fingerprint
    model = AutoModelForCausalLM.from_pretrained(first.path)
    assert sum(p.numel() for p in model.parameters()) == shape_of(config.model).parameters
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    written, planned = read_json(Path(first.path) / "config.json"), architecture_of(config.model)
    assert all(written[key] == value for key, value in planned.items()), written
    assert first.source == "scratch" and first.name == label(config.model)


def test_a_trained_tokenizer_writes_any_text_and_chatml() -> None:
    tokenizer = load_tokenizer(resolve(scratch()).path)
    assert len(tokenizer) == 600 and (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")
    text = "größer 2026 \U0001f600\n\tx"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("2026")["input_ids"]) == list("2026")
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn_ids(tokenizer) == [turn, tokenizer.eos_token_id]


def test_a_given_tokenizer_must_fit_the_vocabulary(tmp_path: Path) -> None:
    build_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(DataError, match=r"`model\.vocab_size` is 600, but the tokenizer has 1024 tokens") as error:
        resolve(scratch(tokenizer=str(tmp_path / "tokenizer")))
    assert "MODEL_VOCAB_SIZE=1024 or more" in (error.value.hint or "")
    resolved = resolve(scratch(tokenizer=str(tmp_path / "tokenizer"), vocab_size=1100))
    assert (
        read_json(Path(resolved.path) / "config.json")["vocab_size"] == 1100
        and len(load_tokenizer(resolved.path)) == 1024
    )
    with pytest.raises(DataError, match="no such tokenizer folder"):
        resolve(scratch(tokenizer="./nowhere"))


def test_a_tokenizers_folder_says_how_many_tokens_a_model_needs(in_process: Program, tmp_path: Path) -> None:
    build_tokenizer(tmp_path)
    tokens = len(load_tokenizer(tmp_path))
    words = ["plan", "CONFIG=quickstart", "MODEL_NAME=", "MODEL_INIT=random", "TUNING_MODE=full", *SHAPE[:3]]
    own = f"MODEL_TOKENIZER={tmp_path}"
    hint = f"MODEL_VOCAB_SIZE={tokens}"
    in_process(*words, own).refused(2, "`model.vocab_size` is missing", f"hint: set {hint},")
    in_process(*words, own, "MODEL_VOCAB_SIZE=270").refused(2, f"has {tokens} tokens", f"hint: {hint} or more")
    done = in_process(*words, own, hint)
    assert re.search(r"room +up to \d+ rows of [\d,]+ tokens would fit\n", done.out), "no row can be longer"
    in_process(*words, f"{own}/nowhere", hint).refused(4, "there is no such tokenizer folder")


def test_a_model_from_scratch_may_copy_another_models_shape(tiny: Path) -> None:
    from safetensors.torch import load_file

    config = scratch(name=str(tiny), vocab_size=None, hidden_size=None, attention_heads=None, layers=None)
    resolved = resolve(config)
    own, written = read_json(tiny / "config.json"), read_json(Path(resolved.path) / "config.json")
    assert all(
        own[key] == written[key] for key in ("hidden_size", "vocab_size", "num_key_value_heads", "intermediate_size")
    )
    old, new = load_file(tiny / "model.safetensors"), load_file(Path(resolved.path) / "model.safetensors")
    assert old.keys() == new.keys() and not old["model.embed_tokens.weight"].equal(new["model.embed_tokens.weight"])
    assert shape_of(config.model).layers == 2 and resolved.name == f"{tiny} (random weights)"
