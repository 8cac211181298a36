"""A row computes the same with any other rows: alone, in micro-batches of any size, in one line, padded, evaluated and
prompted in batches. Whole runs are `tests/distributed/test_update_alone.py`'s.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from sft_play.config.keys import extra_keys, schema_keys
from sft_play.data.batches import Collator
from sft_play.evaluation.generation import AnswerSettings, answer_all
from sft_play.evaluation.held_out import loss_and_tokens
from sft_play.model import kernels
from sft_play.model.rope import choose_factors_by_row, switch_length
from sft_play.plan.shape import FLATTENED_MODEL_TYPES, UNMASKED_MODEL_TYPES
from sft_play.training.loss import token_loss_sum
from sft_play.training.noise import RowNoise
from tests.distributed.test_update_alone import CASES as RUNS
from tests.families import FAMILIES, LONG_ROPE_SWITCH, VOCAB, long_rope, plain_attention, tiny_model

COMPANIES: dict[str, list[list[int]]] = {
    "alone": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "all": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "threes": [[0, 1, 2], [3, 4, 5], [6, 7]],
    "halved": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "packed": [[1, 4], [0, 3, 5], [2, 7], [6]],
}
"""Which rows share a micro-batch."""
SPARSE = {"index_topk": 8, "index_n_heads": 64}
"""As many indexing heads as are published: a few may all score 0, and padding would decide what is selected."""
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, SPARSE if name in ("deepseek_v32", "glm_moe_dsa") else {}) for name in FAMILIES},
    "phi3 with two sets of factors": ("phi3", long_rope("phi3")),
    "phimoe with two sets of factors": ("phimoe", long_rope("phimoe")),
    "llama with dynamic factors": ("llama", DYNAMIC),
}
QUICK = (
    "llama",
    "bloom",
    "gemma2",
    "gpt_oss",
    "mamba2",
    "qwen3_next",
    "deepseek_v3",
    *[name for name in CASES if " " in name],
)


def large(name: str) -> Any:
    """Return a random model with weights large enough to show a token's position."""
    family, own = CASES[name]
    model = tiny_model(family, attention=plain_attention(family), **own).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4 if own else 3)
    return model


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Return rows of 8 to 44 tokens, on both sides of windows, chunks and LongRoPE's switch, and at it."""
    chance = random.Random(5)
    rows_of_tokens = [[chance.randrange(4, 1024) for _ in range(length)] for length in (8, 44, 24, 25, 12, 30, 23, 40)]
    assert {8, 44} < {len(ids) for ids in rows_of_tokens} > {LONG_ROPE_SWITCH, LONG_ROPE_SWITCH + 1}
    return [
        {"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :], "row": i}
        for i, ids in enumerate(rows_of_tokens)
    ]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
@pytest.mark.broad_but("llama", "gemma2", "mamba2")
def test_a_row_computes_the_same_with_any_other_rows(name: str, rows: list[dict[str, Any]], tiny: Any) -> None:
    from transformers import AutoTokenizer

    model, family = large(name), CASES[name][0]
    tokenizer, prompts = AutoTokenizer.from_pretrained(tiny), [row["input_ids"][:22] for row in rows]
    # transformers' own, each row in a separate pass
    expected, gradient = losses_and_gradient(model, (partial(own_loss, model, row) for row in rows))
    with torch.no_grad():
        written = [written_alone(model, tokenizer, prompt) for prompt in prompts]
    kernels.keep_rows_apart(model)
    choose_factors_by_row(model)
    layouts = ["padded", *(["flattened"] if family in FLATTENED_MODEL_TYPES else [])]
    if family in UNMASKED_MODEL_TYPES and switch_length(model) is None:
        layouts.append("unmasked")
    for layout in layouts:
        collate = Collator(layout, 0)
        for company, groups in COMPANIES.items():
            for group in groups:
                with torch.no_grad():
                    measured = loss_and_tokens(model, collate([rows[index] for index in group]))
                counts = [sum(label >= 0 for label in rows[index]["labels"][1:]) for index in group]
                expected_sums = [sum(expected[index] for index in group), sum(counts)]
                assert measured.tolist() == pytest.approx(expected_sums, rel=1e-5), (layout, company, group)
            batches = [collate([rows[index] for index in group]) for group in groups]
            _, same = losses_and_gradient(model, (partial(token_loss_sum, model, batch) for batch in batches))
            assert float((same - gradient).norm() / gradient.norm()) < 1e-5, (layout, company)
    together = answer_all(model, tokenizer, AnswerSettings(max_new_tokens=8, num_beams=1, batch_size=8), prompts)
    compared = [
        ((answer.parts.text.strip(), answer.tokens), (text, count))
        for answer, (text, count, margin) in zip(together, written, strict=True)
        if margin > 1e-5
    ]
    assert len(compared) >= 6, "nearly all answers have no step at which rounding decides between two tokens"
    assert [ours for ours, _ in compared] == [alone for _, alone in compared]


def own_loss(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """Return the summed loss of a row that is alone, by transformers and torch."""
    logits = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1].float()
    return cross_entropy(logits, torch.tensor(row["labels"][1:]), reduction="sum")


def losses_and_gradient(model: Any, losses: Iterable[Callable[[], torch.Tensor]]) -> tuple[list[float], torch.Tensor]:
    """Return losses, each of a pass in training mode, and the gradient of their sum, [all weights]."""
    model.zero_grad()
    model.train()
    numbers = []
    for loss_of in losses:
        loss = loss_of()
        loss.backward()
        numbers.append(float(loss.detach()))
    model.eval()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return numbers, torch.cat([part.flatten() for part in parts])


def written_alone(model: Any, tokenizer: Any, prompt: list[int]) -> tuple[str, int, float]:
    """Return what transformers' own `generate` answers a prompt that is alone, how many tokens, and the least distance
    between the scores of the two likeliest tokens.
    """
    ids = torch.tensor([prompt])
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=pad,
        output_scores=True,
        return_dict_in_generate=True,
    )
    tokens = [token for token in output.sequences[0, len(prompt) :].tolist() if token != end]
    best = [scores[0].topk(2).values for scores in output.scores]
    margin = min(float(first - second) for first, second in best)
    return tokenizer.decode(tokens, skip_special_tokens=True).strip(), len(tokens), margin


def test_the_factors_of_these_rows_make_a_difference(rows: list[dict[str, Any]]) -> None:
    model, collate = large("phi3 with two sets of factors"), Collator("flattened", 0)
    assert switch_length(model) == LONG_ROPE_SWITCH
    with torch.no_grad():
        alone = sum(float(token_loss_sum(model, collate([row]))) for row in rows)
        assert abs(float(token_loss_sum(model, collate(rows))) - alone) > 1e-4 * alone


# Every key says how it meets the split of a step's rows; `CASES` of whole runs are those by which a row may be changed.

SPLIT = {
    "train.batch_size", "train.grad_accum", "train.packing", "train.dataloader_num_workers",
    "train.dataloader_pin_memory", "train.dataloader_persistent_workers", "train.dataloader_prefetch_factor",
    "train.torch_empty_cache_steps", "train.ddp_find_unused_parameters", "train.ddp_broadcast_buffers",
    "train.ddp_bucket_cap_mb", "train.ddp_static_graph", "train.activation_offload", "model.max_seq_len",
}  # fmt: skip
"""They decide the split, or how it is carried out."""
WHOLE = {
    "train.global_batch_size", "train.loss_on", "train.epochs", "train.max_steps", "train.seed", "train.learning_rate",
    "train.lr_scheduler_kwargs", "train.warmup_ratio", "train.warmup_steps",
    "train.adam_beta1", "train.adam_beta2", "train.adam_epsilon", "train.optim_args",
    "train.full_determinism", "train.tf32", "train.bf16", "train.fp16", "train.extra",
    "model.dtype", "model.trust_remote_code", "tuning.task", "tuning.backend", "tuning.lora.r", "tuning.lora.alpha",
}  # fmt: skip
"""The same for all rows of a step, whatever the split; narrow types round otherwise for each."""
RANDOM = {"tuning.lora.dropout"}
"""It draws other numbers for another split."""
BEFORE = re.compile(r"data\.(?!new_tokens)|model\.(?!dtype|attn|trust|max_seq)|tuning\.adapter$")
"""What the rows and the base are, before any are shared out."""
NO_PART = re.compile(
    r"train\.(log|eval|save|generation|hub|trackio|early|metric|profile|report|run_name|project|predict|greater|async"
    r"|debug|skip_memory|include_num|disable|load_best)"
)
"""What is written, scored and kept."""


def test_every_key_that_may_change_an_update_is_listed_by_its_effect_on_the_split() -> None:
    names = {
        name for name in (*schema_keys(), *extra_keys()) if name.startswith(("model.", "tuning.", "data.", "train."))
    }
    lines = [line.split(":")[0] for case in RUNS.values() for line in case.settings]
    tried = {name for name in names for line in lines if line == name or line.startswith(f"{name}.")}
    tried |= {"model.attn_implementation"} & {f"model.{field}" for case in RUNS.values() for field in case.plan}
    tried |= {"tuning.mode"} if {case.mode for case in RUNS.values()} == {"full", "lora", "qlora"} else set()
    others = {name for name in names if NO_PART.match(name) or BEFORE.match(name)}
    assert names - others - SPLIT - WHOLE - RANDOM == tried - others
    assert not tried & (WHOLE | RANDOM)


@pytest.mark.parametrize("layout", ["flattened", "padded"])
def test_noise_goes_by_each_row_and_is_of_neftunes_size(layout: str, rows: list[dict[str, Any]]) -> None:
    embedding = torch.nn.Embedding(VOCAB, 32)
    holder = torch.nn.Module()
    holder.get_input_embeddings = lambda: embedding  # type: ignore[assignment]
    noise, collate = RowNoise(holder, 5.0, 1, (0, 1)), Collator(layout, 0)

    def added(batch: list[dict[str, Any]], step: int = 3) -> list[torch.Tensor]:
        batch_tensors = collate(batch)
        noise.begin(batch_tensors, step)
        added_noise = embedding(batch_tensors["input_ids"]) - embedding.weight[batch_tensors["input_ids"]]
        lengths = [len(row["input_ids"]) for row in batch]
        lines = (
            added_noise[0].split(lengths)
            if layout == "flattened"
            else [line[:length] for line, length in zip(added_noise, lengths, strict=True)]
        )
        return [line.detach() for line in lines]

    for row, together in zip(rows, added(rows), strict=True):
        torch.testing.assert_close(together, added([row])[0])
        most = 5.0 / (len(row["input_ids"]) * 32) ** 0.5  # transformers' size, of a row that is alone in its pass
        assert 0.9 * most < float(together.abs().max()) <= most * (1 + 1e-6)
        assert not torch.equal(together, added([row], step=4)[0])
    embedding.eval()
    assert not any(line.any() for line in added(rows))
