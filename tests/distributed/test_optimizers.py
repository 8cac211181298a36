"""Every word of `train.optim` and `train.lr_scheduler_type` runs as transformers runs it, or is refused before anything
is prepared.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR

from sft_play.config.keys import table
from sft_play.config.optimizers import OPTIMIZERS, SETTINGS_OF
from sft_play.data.batches import Collator, GlobalBatchSampler
from sft_play.data.rows import Rows
from sft_play.plan.epoch import RowOrder
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared
from sft_play.training.loss import label_tokens, token_loss_sum
from tests.conftest import Program
from tests.documents import ROOT
from tests.training_runs import (
    GLOBAL_BATCH,
    TRAIN_ROWS,
    Trial,
    column,
    make_run,
    must_train,
    resume_from,
    same_to_the_bit,
    weights,
)

QUIET = ("train.save_strategy: 'no'", "train.eval_strategy: 'no'", "train.eval_steps: null")
WORDS, SCHEDULES = table()["optim"]["choices"], table()["lr_scheduler_type"]["choices"]
NEEDED: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5, "warmup_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 1},
    "polynomial": {"power": 2.0},
    "cosine_with_restarts": {"num_cycles": 2},
}
BY_METRIC = ("reduce_lr_on_plateau", "greedy")


def outcome(word: str) -> str:
    """Return the outcome that docs/training.md must list for an optimizer."""
    chosen = OPTIMIZERS[word]
    if chosen.refused:
        return "refused"
    return f"needs `{chosen.pip}`" if chosen.pip else "bitsandbytes" if chosen.bitsandbytes else "runs"


def test_every_optimizer_has_an_outcome_that_the_page_documents() -> None:
    assert OPTIMIZERS.keys() == {"auto", "muon", *WORDS}
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    outcomes = {word: cells[2] for cells in rows for word in re.findall(r"`(\w+)`", cells[1])}
    for word in [*WORDS, "muon"]:
        assert outcome(word) in outcomes[word], word
    for word in SCHEDULES:
        assert set(re.findall(r"`(\w+)`", outcomes[word])) >= set(SETTINGS_OF[word]), word


def test_a_schedule_takes_what_transformers_gives_it() -> None:
    common = {"self", "optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "verbose"}
    functions = {kind.value: function for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    functions |= {
        "reduce_lr_on_plateau": torch.optim.lr_scheduler.ReduceLROnPlateau.__init__,
        "greedy": GreedyLR.__init__,
    }
    assert functions.keys() == SETTINGS_OF.keys() == set(SCHEDULES)
    for word, function in functions.items():
        assert set(inspect.signature(function).parameters) - common == set(SETTINGS_OF[word]), word


@pytest.mark.parametrize(
    "word",
    [
        (
            word
            if word in ("polynomial", "cosine_warmup_with_min_lr", "greedy")
            else pytest.param(word, marks=pytest.mark.long)
        )
        for word in SCHEDULES
    ],
)
def test_a_schedule_runs_on_transformers_curve(word: str, tiny: Path, tmp_path: Path) -> None:
    extra = tuple(f"train.lr_scheduler_kwargs.{name}: {value}" for name, value in NEEDED.get(word, {}).items())
    evaluated = ("train.save_strategy: 'no'", "train.eval_steps: 1") if word in BY_METRIC else QUIET
    trial = Trial(steps=4, settings=(f"train.lr_scheduler_type: {word}", *evaluated, *extra))
    run = must_train(make_run(tmp_path / "run", tiny, trial))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=trial.learning_rate)
    schedule = get_scheduler(
        word, optimizer, num_warmup_steps=1, num_training_steps=4, scheduler_specific_kwargs=NEEDED.get(word) or None
    )
    expected = []
    for step in range(4):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step(*([column(run, "eval_loss", "eval")[step]] if word in BY_METRIC else []))
    assert column(run, "learning_rate") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("word", [word for word in WORDS if OPTIMIZERS[word].refused or OPTIMIZERS[word].pip])
def test_an_optimizer_is_refused_by_name_or_with_its_package(
    word: str, tiny: Path, tmp_path: Path, in_process: Program
) -> None:
    rows, config = tmp_path / "rows.jsonl", tmp_path / "x.yaml"
    rows.write_text('{"text": "some words"}\n')
    config.write_text(
        f"model: {{name: {tiny}, max_seq_len: 64}}\ntuning: {{task: cpt}}\ndata: {{train_path: {rows}}}\n"
        f"train:\n  optim: {word}\n  save_strategy: 'no'\n"
    )
    chosen = OPTIMIZERS[word]
    if chosen.refused:
        in_process("train", f"CONFIG={config}").refused(2, f"x.yaml:5: `train.optim` is `{word}`, wh")
    elif importlib.util.find_spec(chosen.module):
        assert in_process("plan", f"CONFIG={config}").code == 0
    else:
        hint = f"install -c constraints.txt {chosen.pip}"
        in_process("train", f"CONFIG={config}").refused(3, f"`train.optim` is `{word}`, which needs", hint)
    assert not (tmp_path / "runs").exists()


RUNNING = [word for word in OPTIMIZERS if word != "auto" and not OPTIMIZERS[word].refused]


@pytest.mark.parametrize(
    "word",
    [
        word if word in ("paged_adamw_8bit", "adafactor") else pytest.param(word, marks=pytest.mark.long)
        for word in RUNNING
    ],
)
@pytest.mark.broad
def test_an_optimizer_runs_and_is_restored(word: str, tiny: Path, tmp_path: Path) -> None:
    chosen = OPTIMIZERS[word]
    if chosen.module and not importlib.util.find_spec(chosen.module):
        pytest.skip(f"{chosen.pip} is not installed")
    settings = ("train.save_steps: 2", *QUIET[1:])
    steps = 8 if word == "schedule_free_radam" else 4  # it makes no update before the sixth
    trial = Trial(steps=steps, settings=(f"train.optim: {word}", *settings), plan=(("optim", word),))
    run = must_train(make_run(tmp_path / "run", tiny, trial))
    before, after = load_file(tiny / "model.safetensors"), weights(run)
    assert all(not torch.equal(before[name], after[name]) for name in after)
    same_to_the_bit(resume_from(run, tmp_path / "again", steps - 2, trial), run)


def plain_steps(run: RunFolder, model: Any, begin: Callable[[], Any]) -> Iterator[float]:
    """Yield the loss of each of the run's steps in plain torch, with the clipped gradients in place."""
    prepared, collate = Prepared.load(run.prepared), Collator("flattened", 3)
    assert prepared.train is not None
    rows, sampler, remaining = (
        Rows(prepared.train.path),
        GlobalBatchSampler(RowOrder(rows=TRAIN_ROWS, seed=42), GLOBAL_BATCH, [(8, 1)], 0),
        8,
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in list(sampler)[:remaining]:
            begin()
            inputs = collate([rows[index] for index in batch])
            loss = token_loss_sum(model, inputs) / label_tokens(inputs)
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            yield float(loss.detach())
            remaining -= 1


def test_muon_updates_the_layers_matrices_and_adamw_the_rest(tiny: Path, tmp_path: Path) -> None:
    """As torch's own two optimizers with one rate do, whatever the split; and such a run is resumed."""
    settings = ("train.optim: muon", "train.lr_scheduler_type: linear", "train.weight_decay: 0.1", *QUIET[1:])
    trial = Trial(settings=settings, plan=(("optim", "muon"),))
    run = must_train(make_run(tmp_path / "run", tiny, trial))

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    named = dict(model.named_parameters())
    begin = {name: value.detach().clone() for name, value in named.items()}
    layers = {name for name, value in named.items() if ".layers." in name and value.dim() == 2}
    ends = {"weight_decay": 0.1, "params": [v for n, v in named.items() if n not in layers and v.dim() == 2]}
    norms = {"weight_decay": 0.0, "params": [value for value in named.values() if value.dim() == 1]}
    matrices = [named[name] for name in layers]
    muon = torch.optim.Muon(matrices, lr=2e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizers = [muon, torch.optim.AdamW([ends, norms], lr=2e-3)]
    schedules = [get_scheduler("linear", part, num_warmup_steps=1, num_training_steps=8) for part in optimizers]
    losses = []
    for loss in plain_steps(run, model, model.train):
        losses.append(loss)
        for part in [*optimizers, *schedules]:
            part.step()
    assert column(run, "loss") == pytest.approx(losses, rel=1e-5)
    saved = weights(run)
    for name, value in named.items():
        # Muon's iterations are in bf16, where the last bit of a gradient can be 0.4 % of an update, or more of a single
        # element's; which these are depends on the processor.
        torch.testing.assert_close(saved[name], value.detach(), rtol=1e-3, atol=1e-3)
        assert (saved[name] - value.detach()).norm() <= 0.05 * (value.detach() - begin[name]).norm(), name

    same_to_the_bit(resume_from(run, tmp_path / "again", 4, trial), run)
    two = Trial(settings=settings, plan=trial.plan, strategy="ddp", ranks=((2, 2), (2, 2)))
    on_two = resume_from(run, tmp_path / "two", 4, two)
    assert column(on_two, "loss") == pytest.approx(losses, rel=1e-4)
    adam = Trial(settings=settings, plan=(("optim", "adamw_torch_fused"),))
    with pytest.raises(AssertionError, match="`optimizer` was `muon` and is `adamw_torch`"):
        resume_from(run, tmp_path / "adam", 4, adam)


def test_schedule_free_weights_are_averaged_for_scores_and_saves(tiny: Path, tmp_path: Path) -> None:
    """Compare with plain torch step by step: evaluation and files use the averaged weights, training continues from the
    others.
    """
    settings = ("train.optim: schedule_free_adamw", "train.lr_scheduler_type: constant", "train.eval_steps: 4")
    trial = Trial(settings=settings, plan=(("optim", "schedule_free_adamw"),))
    run = must_train(make_run(tmp_path / "run", tiny, trial))

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.train()
    optimizer = schedulefree.AdamWScheduleFree(
        model.parameters(), lr=trial.learning_rate, warmup_steps=1, weight_decay=0.0
    )
    prepared, losses = Prepared.load(run.prepared), []
    assert prepared.validation is not None
    held_out = Rows(prepared.validation.path)
    for step, _ in enumerate(plain_steps(run, model, optimizer.train), 1):
        optimizer.step()
        if step % 4 == 0:
            optimizer.eval()
            scored = Collator("flattened", 3)([held_out[index] for index in range(len(held_out))])
            with torch.no_grad():
                losses.append(float(token_loss_sum(model, scored) / label_tokens(scored)))
    assert column(run, "eval_loss", "eval") == pytest.approx(losses, rel=1e-5)
    saved = weights(run)
    for name, value in model.named_parameters():
        torch.testing.assert_close(saved[name], value.detach(), rtol=1e-4, atol=5e-6)
    same_to_the_bit(resume_from(run, tmp_path / "again", 4, trial), run)
