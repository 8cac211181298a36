"""Ranks that answer rows whose references are the model's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from sft_play.evaluation.generation import AnswerSettings
from sft_play.evaluation.held_out_answers import score_by_generation
from sft_play.model.tokenizer import load_tokenizer
from sft_play.training.ranks import Ranks
from tests.numerics.rank_processes import answer


def work(rank: int, world: int, words: list[str]) -> dict[str, Any]:
    folder, settings = Path(words[0]), AnswerSettings(batch_size=2, max_new_tokens=6)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load_tokenizer(folder)
    rows = [{"row": i, "prompt_ids": [300 + i, 301, 302 + i], "reference": "one"} for i in range(6)]
    alone = score_by_generation(model, tokenizer, rows, settings).predictions
    own = [row | {"reference": prediction.answer} for row, prediction in zip(rows, alone, strict=True)]
    together = score_by_generation(model, tokenizer, own, settings, metrics=["exact_match"], ranks=Ranks(rank, world))
    return {"exact_match": together.scores["exact_match"].mean}


if __name__ == "__main__":
    answer(work)
