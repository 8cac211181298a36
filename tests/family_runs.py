"""Takes a family through plan, preparation, two steps, a resume, a merge and an answer, each in a process forked from
here.

Only the launcher is omitted, since it would import torch each time: the work is that of `make train`, `make resume`,
`make merge` and `make infer`, called as they call it.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from sft_play import train
from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from sft_play.config.load import save_config
from sft_play.errors import UserError
from sft_play.launch.attempt import write_launch_files
from sft_play.launch.job import job_of, read_options, refuse_early
from sft_play.plan import architecture
from sft_play.plan.plan import Plan
from sft_play.plan.shape import pattern_of
from sft_play.prepare import prepare_run
from sft_play.runs.folder import RunFolder
from sft_play.trace.__main__ import answers
from tests.conftest import Done, call_program, called, environment
from tests.families import build_family
from tests.training_runs import copy_run, nested_yaml

SETTINGS = (
    "model.max_seq_len: 64",
    "train.max_steps: 2",
    "train.save_steps: 1",
    "train.global_batch_size: 4",
    "train.batch_size: 1",
    "train.learning_rate: 1e-2",
    "train.warmup_steps: 0",
    "train.report_to: none",
)
OWN = {"phimoe": {"router_jitter_noise": 0.5}}
"""Its router has a gradient only where another expert comes within this share of the best; `families.COMMON` says 0,
for rows that repeat.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Road:
    """How far a family came in one mode."""

    refused: str = ""
    """What the plan said before any data were prepared, or the first step that failed."""
    at: str = ""
    """The step that refused or failed; empty when all of them went through."""
    base: Path
    plan: Plan | None = None
    trained: Path | None = None
    """The folder of the trained weights."""
    resumed: Path | None = None
    """The folder of the same weights, after a resume from the first step."""

    def adapted(self) -> list[str]:
        """Return the names of the modules that have adapters, in the model's order."""
        assert self.trained
        return list(
            dict.fromkeys(name.split(".lora_")[0].removeprefix("base_model.model.") for name in weights(self.trained))
        )

    def untouched(self) -> list[str]:
        """Return the names, with `*` for numbers, of weights that training left unchanged in every layer (no token may
        reach an expert).
        """
        assert self.trained
        after, before = weights(self.trained), weights(self.base)
        changed = {
            pattern_of(name)
            for name, tensor in before.items()
            if name in after and not torch.equal(tensor, after[name])
        }
        return sorted({pattern_of(name) for name in before} - changed)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder's safetensors files."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def in_child(work: Callable[[], Done]) -> Done:
    """Return what `work` returns in a forked process: what torch, transformers and accelerate keep per process is its
    own.
    """
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_send, args=(work, sender))
    child.start()
    sender.close()
    try:
        done: Done = receiver.recv()
    except EOFError:
        child.join()
        done = Done(child.exitcode or 1, "", f"the process ended with {child.exitcode}")
    child.join()
    return done


def _send(work: Callable[[], Done], sender: Connection) -> None:
    sys.modules.setdefault("deepspeed", None)  # type: ignore[arg-type]  # as in workers; saving would import it
    torch.set_num_threads(1)  # tiny models wait for threads, mostly
    resident: Any = SimpleNamespace(ask=answers, close=lambda: None)  # torch is here already
    architecture.running_tracer = functools.cache(lambda: resident)
    sender.send(work())
    sender.close()
    os._exit(0)


def preload() -> None:
    """Import and computes what every step needs, once for all children."""
    import sft_play.data.prepare
    import sft_play.evaluation.generation
    import sft_play.model.use
    import sft_play.training.trainer  # noqa: F401

    get_checkpoint_conversion_mapping("llama")


def travel(name: str, mode: str, folder: Path, cache: Path) -> Road:
    """Take one family through one mode; stops at the first step that is refused."""
    preload()
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": "w" * (1 + i % 5), "completion": "x y " * (1 + i % 3)}) + "\n" for i in range(1, 13)
        )
    )
    base = folder / "base"
    if not base.is_dir():
        in_child(lambda: Done(0, str(build_family(base, name, **OWN.get(name, {}))), ""))
    run, env = RunFolder(folder / "runs" / f"{name}-{mode}"), environment(cache, folder / "runs")
    config = folder / f"{mode}.yaml"
    config.write_text(
        nested_yaml(
            [f"model.name: {base}", f"data.train_path: {rows}", f"tuning.mode: {mode}", *SETTINGS]
            + (["tuning.lora.r: 2"] if mode != "full" else [])
        ),
        encoding="utf-8",
    )
    again, merged = RunFolder(folder / "runs" / f"{name}-{mode}-again"), folder / f"merged-{mode}"

    def resume() -> Done:
        shutil.rmtree(copy_run(run, again.path).model)
        return worker(again, env, "--resume", str(again.checkpoint(1)))

    steps: Mapping[str, Callable[[], Done]] = {
        "plan": lambda: called(lambda: plan_and_prepare(run, config), env),
        "train": lambda: worker(run, env),
        "resume": resume,
        "merge": lambda: (
            call_program(["merge", f"RUN={run.path}", f"OUT={merged}"], env) if mode != "full" else Done(0, "", "")
        ),
        "infer": lambda: call_program(
            [
                "infer",
                f"MODEL={merged if mode != 'full' else run.model}",
                "PROMPT=why",
                "TRAIN_GENERATION_MAX_NEW_TOKENS=3",
                "JSON=1",
            ],
            env,
        ),
    }
    for at, step in steps.items():
        if (done := in_child(step)).code:
            return Road(base=base, at=at, refused=done.err, plan=Plan.load(run.plan) if run.plan.exists() else None)
    return Road(base=base, plan=Plan.load(run.plan), trained=run.model, resumed=again.model)


def worker(run: RunFolder, env: Mapping[str, str], *words: str) -> Done:
    """Train as a worker does, which writes why it failed into the run's folder."""
    done = called(lambda: train.main(["--run", str(run.path), *words]), env)
    return replace(done, err=json.loads(run.rank_exit(0).read_text())["error"])


def plan_and_prepare(run: RunFolder, config: Path) -> int:
    """Do what `make train` does before its workers start."""
    try:
        call = parse_call(
            ["train", f"CONFIG={config}", "SOURCE=formula"], COMMANDS
        )  # traces are test_trace_families.py's
        options, loaded = read_options(call, call.load_config(), "single")
        job = job_of(call, loaded, options)
        refuse_early(job)
        run.path.mkdir(parents=True)
        save_config(loaded, run.config)
        write_launch_files(job, job.plan(prepare_run(run)), run)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    return 0
