"""Head and loss in chunks under every strategy: the same training as all at once in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sft_play.runs.folder import RunFolder
from tests.tiny_models import build_tiny_llama
from tests.training_runs import Trial, column, rows, train_once

HALVES = ((2, 2), (2, 2))
CHUNKED = (("loss_chunk", 8),)
SETTINGS = ("train.predict_with_generate: true", "train.generation_max_new_tokens: 4")
Trained = Callable[[Trial], RunFolder]


@pytest.fixture(scope="module", params=["full", pytest.param("lora", marks=pytest.mark.long)])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("chunked")
    bases = {"full": build_tiny_llama(folder / "tied"), "lora": build_tiny_llama(folder / "untied", tie_word_embeddings=False)}
    return train_once(folder, bases)


WAYS: dict[str, Any] = {
    "single": {}, "ddp": {"ranks": HALVES}, "zero2": {"ranks": HALVES}, "zero3": {"ranks": HALVES}, "fsdp2": {"ranks": HALVES},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param(way, marks=pytest.mark.long if way != "zero3" else ()) for way in WAYS])
def test_chunks_train_what_the_whole_does(strategy: str, mode: str, trained: Trained) -> None:
    """Losses, gradient norms and held-out losses; the trained head is tied to the embedding, the frozen one is not."""
    if mode == "lora" and strategy == "zero2":
        pytest.skip("with full tuning it gathers nothing either")
    whole = trained(Trial(mode=mode, settings=SETTINGS))
    run = trained(Trial(strategy=strategy, mode=mode, settings=SETTINGS, plan=CHUNKED, **WAYS[strategy]))
    for name, kind in (("loss", "train"), ("grad_norm", "train"), ("eval_loss", "eval")):
        assert column(run, name, kind) == pytest.approx(column(whole, name, kind), rel=1e-5), name
    assert [row["eval_answers"] for row in rows(run, "eval")] == [7, 7], "answering still gets logits"
