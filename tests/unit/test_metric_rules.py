"""Metrics are checked before the launch: names, directions, and whether anything measures them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_play.config.layers import Override
from sft_play.config.load import load_config
from sft_play.config.metrics import metrics_hint
from sft_play.config.rules import check_rules
from sft_play.config.schema import Config, DataConfig, DataSource, EvalConfig, ModelConfig, TrainConfig
from sft_play.errors import UserError

TWO = [DataSource(path="chat.jsonl", name="chat"), DataSource(path="docs")]
HELD_OUT = DataConfig(sources=TWO, validation=0.1)


def config(*, data: DataConfig = HELD_OUT, metrics: list[str] | None = None, **train: Any) -> Config:
    evaluation = EvalConfig() if metrics is None else EvalConfig(metrics=metrics)
    return Config(model=ModelConfig(name="x"), data=data, train=TrainConfig(**train), eval=evaluation)


def problems(checked: Config) -> list[str]:
    return [problem.render() for problem in check_rules(checked, {})]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["rougeL", "blue"], ["`eval.metrics[1]` is `blue`", "did you mean `bleu`?"]),
        (["happiness"], ["is no metric", "one of rouge1, rouge2,", "or evaluate:NAME"]),
        (["f1", "evaluate:my/f1"], ["2 entries that are called `f1`"]),
    ],
)
def test_misspelt_and_repeated_metrics_are_refused(metrics: list[str], words: list[str]) -> None:
    found = "\n".join(problems(config(metrics=metrics)))
    assert all(word in found for word in words), found


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("rogueL,blue", "did you mean `rougeL` and `bleu`? a list is written `[rougeL, bleu]`"),
        ("", None),
    ],
)
def test_text_in_the_place_of_a_list_gets_the_right_name_first_and_then_the_brackets(typed: str, hint: str | None) -> None:
    assert metrics_hint(typed) == hint
    with pytest.raises(UserError) as caught:
        load_config(Path("configs/smoke.yaml"), [Override(key="eval.metrics", text=typed, origin=f"EVAL_METRICS={typed}")], {})
    said = caught.value.render()
    assert said.startswith(f"error: EVAL_METRICS={typed}: `eval.metrics` is `{typed}`; expected a list") and (hint or "") in said


@pytest.mark.parametrize(
    ("train", "metrics", "words"),
    [
        ({"metric_for_best_model": "eval_perplexity/docs"}, None, []),
        ({"metric_for_best_model": "loss/chats"}, None, ["did you mean `eval_loss/chat`?"]),
        ({"metric_for_best_model": "rougeL"}, None, ["no answers are generated while training", "predict_with_generate: true"]),
        ({"metric_for_best_model": "wer", "predict_with_generate": True}, ["evaluate:wer"], ["train.greater_is_better"]),
        ({"metric_for_best_model": "perplexity", "eval_strategy": "no"}, None, ["nothing is evaluated", "eval_strategy"]),
        ({"load_best_model_at_end": True, "save_strategy": "no"}, None, ["`train.save_strategy` is `no`"]),
    ],
)
def test_the_best_models_metric_is_checked(train: dict[str, Any], metrics: list[str] | None, words: list[str]) -> None:
    found = "\n".join(problems(config(metrics=metrics, **train)))
    assert all(word in found for word in words), found
    assert bool(found) == bool(words), found


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (
            "[{path: a.jsonl, weight: -1}, {path: b.jsonl, weight: 1}]",
            "`data.sources[0].weight` is -1; a share cannot be negative",
        ),
        ("[{path: a.jsonl, weight: 3}, {path: b.jsonl}]", "`data.sources[1]` has no `weight`"),
        ("[{path: a.jsonl, name: x}, {path: b.jsonl, name: x}]", "two sources with the name `x`"),
        ("[{path: a.jsonl, format: sharegtp}]", "did you mean `sharegpt`"),
        ("[{path: a.jsonl}]\n  validation: [{path: b.jsonl, weight: 1}]", "validation is not mixed"),
        ("[{path: a.jsonl, filter: 'lang =='}]", "`data.sources[0].filter` cannot be used: invalid syntax"),
    ],
)
def test_what_a_source_cannot_mean_is_refused_with_its_place(sources: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model:\n  name: x/y\ndata:\n  sources: {sources}\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_config(path, environ={})
    assert said in caught.value.render()
    assert f"{path}:" in caught.value.render()
