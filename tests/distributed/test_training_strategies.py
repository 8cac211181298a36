"""What sharding must not change: published weights, quantised bases, answers while training; and worlds that are not
the plan's.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from safetensors.torch import load_file, save_file

from sft_play.runs.folder import RunFolder
from sft_play.runs.manifest import verify
from tests.documents import on_page
from tests.tiny_models import build_tiny_llama
from tests.training_runs import (
    Trained,
    Trial,
    column,
    command,
    ended_with,
    logs,
    make_run,
    must_train,
    resume_from,
    rows,
    same_curves,
    same_to_the_bit,
    train,
)

HALVES = ((2, 2), (2, 2))
NO_EVALUATION = ("train.eval_strategy: 'no'", "train.eval_steps: null")


ANSWERS = (
    "train.predict_with_generate: true",
    "train.generation_max_new_tokens: 6",
    "train.load_best_model_at_end: true",
)


@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_sharded_weights_are_published_whole_and_answer_the_same(strategy: str, trained: Trained) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    alone = trained(Trial(settings=ANSWERS))
    run = trained(Trial(strategy=strategy, ranks=HALVES, settings=ANSWERS))
    expected, published = (load_file(r.model / "model.safetensors") for r in (alone, run))
    assert set(published) == set(expected)
    for name, tensor in expected.items():
        assert published[name].dtype == tensor.dtype
        assert torch.allclose(published[name], tensor, atol=2e-5), name
    logits = [AutoModelForCausalLM.from_pretrained(r.model)(torch.arange(4, 30)[None]).logits for r in (alone, run)]
    assert torch.allclose(*logits, atol=1e-4)
    for step in (4, 8):
        answers = [(r.evaluation(step) / "predictions.jsonl").read_text() for r in (alone, run)]
        assert answers[0] == answers[1]
        assert verify(run.checkpoint(step)) is None
    assert column(run, "eval_answers", "eval") == [7, 7]
    for name in ("eval_loss", "eval_rougeL"):
        assert column(run, name, "eval") == pytest.approx(column(alone, name, "eval"), rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("zero3", "full"),
        *(
            pytest.param(*way, marks=pytest.mark.long)
            for way in (
                ("ddp", "full"),
                ("zero2", "full"),
                ("fsdp2", "full"),
                ("ddp", "lora"),
                ("zero3", "lora"),
                ("fsdp2", "lora"),
            )
        ),
    ],
)
def test_head_and_loss_in_chunks_train_what_the_whole_does(strategy: str, mode: str, trained: Trained) -> None:
    """With a trained head, tied to the embedding, and with a frozen one."""
    whole = trained(Trial(mode=mode, settings=ANSWERS))
    run = trained(Trial(strategy=strategy, ranks=HALVES, mode=mode, settings=ANSWERS, plan=(("loss_chunk", 8),)))
    same_curves(run.path, whole.path)
    assert column(run, "eval_answers", "eval") == [7, 7], "answering still gets logits"


@pytest.mark.parametrize(
    "strategy", ["fsdp2", *(pytest.param(strategy, marks=pytest.mark.long) for strategy in ("ddp", "zero2", "zero3"))]
)
def test_a_quantised_base_trains_the_same_under_every_strategy(strategy: str, trained: Trained) -> None:
    """Evaluations between the steps must leave the base unchanged."""
    trial = Trial(mode="qlora", learning_rate=5e-3)
    alone = trained(trial)
    run = trained(Trial(mode="qlora", learning_rate=5e-3, strategy=strategy, ranks=HALVES))
    assert column(run, "loss") == pytest.approx(column(alone, "loss"), abs=2e-5)
    assert column(run, "eval_loss", "eval") == pytest.approx(column(alone, "eval_loss", "eval"), abs=2e-5)
    assert sum(column(alone, "loss")[-3:]) < sum(column(alone, "loss")[:3]) - 0.1, "it learns"


@pytest.mark.parametrize(
    ("strategy", "ranks", "added"),
    [
        ("single", ((4, 2),), ()),
        ("ddp", HALVES, ("launch.local_steps: 4", 'launch.balance: "off"')),
        pytest.param("zero2", HALVES, (), marks=pytest.mark.long),
        pytest.param("fsdp2", HALVES, (), marks=pytest.mark.long),
    ],
)
def test_a_loss_that_is_nan_stops_before_the_update(
    strategy: str, ranks: tuple[tuple[int, int], ...], added: tuple[str, ...], tiny: Path, tmp_path: Path
) -> None:
    """After a warm-up step, the update of step 2 makes weights so large that the loss of step 3 is NaN."""
    settings = ("train.save_steps: 2", *NO_EVALUATION, *added)
    run = make_run(tmp_path / "run", tiny, Trial(strategy=strategy, ranks=ranks, learning_rate=1e20, settings=settings))
    assert train(run).returncode != 0
    end = ended_with(run)
    assert end["code"] == 4
    error = end["error"]
    assert "of step 3 is " in error and "TRAIN_LEARNING_RATE" in error
    assert (
        "the last checkpoint, step-000002, is intact" in error or strategy == "zero2"
    )  # there it may still be being written
    named = json.loads(next(run.logs.glob("bad-rows-rank*.json")).read_text())
    assert named["step"] == 3 and named["rows"]
    assert [row["step"] for row in rows(run)] == [1, 2]
    assert verify(run.checkpoint(2)) is None and run.last.resolve() == run.checkpoint(2).resolve(), (
        "the last good checkpoint is kept"
    )
    assert (
        all(tensor.isfinite().all() for tensor in load_file(run.checkpoint(2) / "model.safetensors").values())
        or not added
    )
    assert not run.model.exists()


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.long) for name in ("zero2", "zero3", "fsdp2"))]
)
def test_the_rank_whose_rows_have_no_loss_is_named(strategy: str, tmp_path: Path) -> None:
    """A row has a token whose embedding is NaN: every rank stops before the update, and that row's rank writes its
    file.
    """
    base = build_tiny_llama(tmp_path / "base", tie_word_embeddings=False)
    run = make_run(tmp_path / "run", base, Trial(strategy=strategy, ranks=HALVES, settings=NO_EVALUATION))
    spoilt = tmp_path / "spoilt"
    shutil.copytree(base, spoilt)
    columns = datasets.load_from_disk(str(run.path / "rows" / "train")).to_dict()
    used = [set(ids) for ids in columns["input_ids"]]
    row = columns["row"].index(5)
    token = next(token for token in used[row] if sum(token in others for others in used) == 1)
    weights = load_file(spoilt / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, spoilt / "model.safetensors", metadata={"format": "pt"})
    prepared = json.loads(run.prepared.read_text())
    prepared["model"]["path"] = str(spoilt)
    run.prepared.write_text(json.dumps(prepared))
    assert train(run).returncode != 0
    end = ended_with(run)
    assert end["code"] == 4, logs(run)
    (path,) = run.logs.glob("bad-rows-rank*.json")
    assert 5 in json.loads(path.read_text())["rows"]
    assert path.name in end["error"]
    assert "the loss of step" in end["error"]


def test_a_resume_between_two_rows_of_metrics_repeats_them(trained: Trained, tmp_path: Path) -> None:
    whole = trained(Trial(settings=("train.logging_steps: 3", "train.dataloader_num_workers: 1")))
    assert [row["step"] for row in rows(whole)] == [3, 4, 6, 8], "also at checkpoints and at the end"
    run = resume_from(whole, tmp_path / "again", 4)
    same_to_the_bit(run, whole)
    assert column(run, "step", "eval") == [4, 8]
    assert len(list(run.tensorboard.iterdir())) == 2, "the curve continues in a second file"
    assert dict(curves(run)["train/loss"]) == pytest.approx(
        dict(zip(column(run, "step"), column(run, "loss"), strict=True))
    )
    shown = {
        "train/grad_norm",
        "rank/loss/0",
        "speed/tokens_per_second",
        "speed/mfu",
        "rank/memory_gib/0",
        "rank/forward_seconds/0",
        "node/network_mb_s/0",
    }
    assert shown | {"eval/loss", "eval/perplexity"} <= set(curves(run))


def test_a_checkpoint_comes_before_its_scores_which_a_resumed_run_takes_up(tiny: Path, tmp_path: Path) -> None:
    """A rate that falls at each evaluation falls alike in a resumed run, which repeats no evaluation."""
    settings = (
        "train.eval_strategy: epoch",
        "train.eval_steps: null",
        "train.save_steps: 3",
        "train.lr_scheduler_type: reduce_lr_on_plateau",
        'train.lr_scheduler_kwargs: {"patience": 0, "threshold": 9.0, "threshold_mode": "abs"}',
        "train.load_best_model_at_end: true",
    )
    whole = must_train(make_run(tmp_path / "run", tiny, Trial(settings=settings)))
    assert column(whole, "step", "eval") == column(whole, "step", "save") == [3, 6, 8]
    assert len(set(column(whole, "learning_rate"))) > 1
    kinds = [json.loads(line)["kind"] for line in whole.metrics.read_text().splitlines()]
    assert kinds.index("save") < kinds.index("eval")
    run = resume_from(whole, tmp_path / "again", 3)
    for name, kind in (("loss", "train"), ("learning_rate", "train"), ("step", "eval"), ("eval_loss", "eval")):
        assert column(run, name, kind) == column(whole, name, kind)
    assert run.best.resolve().name == whole.best.resolve().name


def curves(run: RunFolder) -> dict[str, list[tuple[float, float]]]:
    """Return TensorBoard's curves: name -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_another_strategy_than_planned_is_refused_before_the_first_batch(tiny: Path, tmp_path: Path) -> None:
    """accelerate silently drops DeepSpeed if it believes that there is no GPU: plain DDP would run."""
    run = make_run(tmp_path / "run", tiny, Trial(strategy="zero2", ranks=HALVES))
    train(run, ACCELERATE_USE_CPU="true")
    end = ended_with(run)
    assert end["code"] == 3 and "under MULTI_CPU" in end["error"], logs(run)
    assert not run.metrics.exists()
    assert not run.checkpoints.exists() or not list(run.checkpoints.iterdir())


def test_fewer_processes_than_planned_are_refused(tiny: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tiny, Trial(strategy="ddp", ranks=HALVES))
    _, variables = command(run)
    done = subprocess.run(
        [sys.executable, "-m", "sft_play.train", "--run", str(run.path)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 3
    assert on_page("process-group-not-initialized", done.stdout + done.stderr)
    assert ended_with(run)["code"] == 3
