"""Run folders made by hand, small enough to train within seconds, and the workers started as the launcher starts
them.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from sft_play.files import write_json, write_text
from sft_play.launch.attempt import worker_arguments
from sft_play.launch.deepspeed import settings_of
from sft_play.launch.environment import Node, free_port, loopback_interface, worker_environment
from sft_play.launch.settings import accelerate_yaml
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared, PreparedSplit
from tests.conftest import metrics
from tests.plans import rank_plan, simple_plan

TRAIN_ROWS, VALIDATION_ROWS, GLOBAL_BATCH, STEPS = 20, 7, 8, 8
"""20 rows in batches of 8: every third step is a partial one, and 8 steps cross two epochs."""
HIDDEN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One way to train the same rows."""

    strategy: str = "single"
    ranks: tuple[tuple[int, int], ...] = ((4, 2),)
    """Micro-batch and accumulation of each rank."""
    mode: str = "full"
    layout: str = "flattened"
    settings: tuple[str, ...] = ()
    """Further lines of YAML, as `train.epochs: 1`."""
    steps: int = STEPS
    learning_rate: float = 2e-3
    plan: tuple[tuple[str, Any], ...] = ()
    """Further fields of the plan."""
    weights: tuple[float | None, ...] = ()
    """Of the training rows, in turn."""


def make_rows(folder: Path, count: int, *, seed: int, weights: Sequence[float | None] = ()) -> PreparedSplit:
    """Write `count` ragged rows of random tokens; the trained share differs much between rows, and one row has one
    target. `weights`: in turn, of all of a row's tokens.
    """
    import datasets

    chooser = random.Random(seed)
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "row": [], "prompt_ids": [], "reference": []}
    for row in range(count):
        length = chooser.randint(4, 40)
        ids = [chooser.randrange(4, 1024) for _ in range(length)]
        start = length - 1 if row == 0 else chooser.randrange(1, length)
        columns["input_ids"].append(ids)
        columns["labels"].append([-100] * start + ids[start:])
        columns["row"].append(row)
        columns["prompt_ids"].append(ids[:start])
        columns["reference"].append(f"the answer number {row}")
    if weights:
        each = zip(columns["labels"], itertools.cycle(weights), strict=False)
        columns["weights"] = [
            None if weight is None else [weight * (label != -100) for label in labels] for labels, weight in each
        ]
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder))
    lengths = sorted(map(len, columns["input_ids"]))
    trained = sum(label != -100 for labels in columns["labels"] for label in labels[1:])
    return PreparedSplit(
        path=str(folder),
        rows=count,
        dropped=0,
        tokens=sum(lengths),
        label_tokens=trained,
        longest=lengths[-1],
        median=lengths[count // 2],
        fingerprint=f"rows-{seed}",
    )


def make_plan(trial: Trial) -> Plan:
    """Return the plan of a trial on the CPU."""
    world = len(trial.ranks)
    ranks = tuple(
        rank_plan(rank, micro_batch=micro, accumulation=steps) for rank, (micro, steps) in enumerate(trial.ranks)
    )
    per_epoch = -(-TRAIN_ROWS // GLOBAL_BATCH)
    return simple_plan(
        **{
            "world_size": world,
            "backend": "none" if world == 1 else "gloo",
            "strategy": trial.strategy,
            "ranks": ranks,
            "global_batch_size": GLOBAL_BATCH,
            "steps": trial.steps,
            "steps_per_epoch": per_epoch,
            "warmup_steps": 1,
            "eval_batch_size": 2,
            "tokens_per_second": 1000.0,
            "mfu": 0.1,
            "layout": trial.layout,
            "learning_rate": trial.learning_rate,
            **dict(trial.plan),
        }
    )


def make_run(path: Path, base: Path, trial: Trial) -> RunFolder:
    """Write a run folder that is ready for its workers."""
    from sft_play.config.load import load_config, save_config
    from sft_play.model.resolve import resolve_model

    path.mkdir(parents=True)
    run, document = RunFolder(path), path.parent / f"{path.name}.yaml"
    lines = [
        f"model.name: {base}",
        "model.max_seq_len: 64",
        f"tuning.mode: {trial.mode}",
        *([] if trial.mode == "full" else ["tuning.lora.r: 4"]),
        "data.train_path: unused.jsonl",
        "data.val_path: unused.jsonl",
        "train.max_steps: 8",
        "train.save_steps: 4",
        "train.eval_strategy: steps",
        "train.eval_steps: 4",
        f"train.global_batch_size: {GLOBAL_BATCH}",
        *trial.settings,
    ]
    document.write_text(nested_yaml(lines), encoding="utf-8")
    loaded = load_config(document)
    save_config(loaded, run.config)
    make_plan(trial).save(run.plan)
    Prepared(
        model=resolve_model(loaded.config.model),
        train=make_rows(path / "rows" / "train", TRAIN_ROWS, seed=1, weights=trial.weights),
        validation=make_rows(path / "rows" / "validation", VALIDATION_ROWS, seed=2),
    ).save(run.prepared)
    return run


def nested_yaml(lines: Sequence[str]) -> str:
    """Return `section.key: value` lines as nested YAML; a later line wins."""
    return OmegaConf.to_yaml(OmegaConf.from_dotlist([line.replace(": ", "=", 1) for line in lines]))


def command(run: RunFolder, checkpoint: Path | None = None, **environment: str) -> tuple[list[str], dict[str, str]]:
    """Write the launch files of a run; return argv and environment of its workers, as `launch.commands` makes
    them.
    """
    plan, node = Plan.load(run.plan), Node(master_port=free_port(), interface=loopback_interface())
    if plan.strategy.startswith("zero"):
        write_json(run.deepspeed, settings_of(plan, clipping=1.0, hidden_size=HIDDEN))
    write_text(run.accelerate, accelerate_yaml(plan, node, run, fsdp={}))
    variables = worker_environment(plan, node, os.environ | {"OMP_NUM_THREADS": "1"}, cpu_threads=2).variables
    return worker_arguments(run, node, checkpoint=checkpoint), {**variables, **environment}


def train(run: RunFolder, checkpoint: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the workers of `run` to their end."""
    arguments, variables = command(run, checkpoint, **environment)
    return subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=400, check=False)


def must_train(run: RunFolder, checkpoint: Path | None = None) -> RunFolder:
    """Train as `train` does, and fail with the logs of the ranks."""
    done = train(run, checkpoint)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(run)}"
    return run


def logs(run: RunFolder) -> str:
    """Return the ends of all rank logs."""
    return "\n".join(
        f"== {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in sorted(run.logs.glob("rank*.log"))
    )


def ended_with(run: RunFolder) -> dict[str, Any]:
    """Return what the first worker that failed recorded: `code`, `error`, ...

    torchrun ends the other ranks after the first failure, so any of them may lack a record.
    """
    records = [json.loads(path.read_text()) for path in run.logs.glob("exit-rank*.json")]
    failed = [record for record in records if record["code"]]
    assert failed, logs(run)
    return min(failed, key=lambda record: float(record["time"]))


def copy_run(run: RunFolder, path: Path) -> RunFolder:
    """Copy a run folder, links included, so that it can be resumed elsewhere."""
    shutil.copytree(run.path, path, symlinks=True)
    return RunFolder(path)


def resume_from(run: RunFolder, path: Path, step: int, now: Trial | None = None) -> RunFolder:
    """Train a copy of a run that lost everything after a checkpoint, under the plan of `now` if set."""
    copy = copy_run(run, path)
    for checkpoint in copy.checkpoints.glob("step-*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)
    for link in (copy.last, copy.best):
        if not link.exists():
            link.unlink(missing_ok=True)
    shutil.rmtree(copy.model, ignore_errors=True)
    if now is not None:
        make_plan(now).save(copy.plan)
    return must_train(copy, copy.checkpoint(step))


Trained = Callable[[Trial], RunFolder]


def train_once(folder: Path, base: Path) -> Trained:
    """Return a function that trains each trial of a base once; its runs are read-only."""

    @functools.cache
    def trained(trial: Trial) -> RunFolder:
        return must_train(make_run(folder / f"run{len(list(folder.glob('run*')))}", base, trial))

    return trained


def rows(run: RunFolder, kind: str = "train") -> list[dict[str, Any]]:
    """Return the rows of one kind in `metrics.jsonl`."""
    return metrics(run.path, kind)


def column(run: RunFolder, name: str, kind: str = "train") -> list[float]:
    """Return one column of `metrics.jsonl`."""
    return [row[name] for row in rows(run, kind)]


def same_curves(run: Path, reference: Path, first: int = 0, *, within: float = 1e-5) -> None:
    """Assert that the steps after `first` of two runs have equal losses, gradient norms and held-out losses."""
    for kind, names in (("train", ("step", "learning_rate", "loss", "grad_norm")), ("eval", ("step", "eval_loss"))):
        actual, expected = (
            [row for row in metrics(folder, kind) if row["step"] > first] for folder in (run, reference)
        )
        for name in names:
            tolerance = 0.0 if name in ("step", "learning_rate") else within
            assert [row[name] for row in actual] == pytest.approx(
                [row[name] for row in expected], rel=within, abs=tolerance
            ), name


EXACT = ("step", "loss", "grad_norm", "learning_rate", "rank_loss", "rank_tokens")


def same_to_the_bit(run: RunFolder, reference: RunFolder) -> None:
    """Assert that all steps and the published weights of two runs are equal."""
    assert [[row[name] for name in EXACT] for row in rows(run)] == [
        [row[name] for name in EXACT] for row in rows(reference)
    ]
    actual, expected = weights(run), weights(reference)
    assert actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    """Return the published weights."""
    return {name: tensor for file in run.model.glob("*model*.safetensors") for name, tensor in load_file(file).items()}


def holdings(run: RunFolder) -> list[Mapping[str, Any]]:
    """Return what each rank held."""
    return [json.loads(run.rank_holdings(rank).read_text()) for rank in range(Plan.load(run.plan).world_size)]
