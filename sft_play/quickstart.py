"""`make quickstart`: a real small model is scored, fine-tuned on this machine, and scored again on the same prompts.

The road is that of `make train`; only the two evaluations are added. Each heavy part runs in a process of its own, so that
nothing of the first evaluation is in memory while the model is trained.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sft_play.errors import UserError
from sft_play.evaluation.compare import compare, read_sides, show
from sft_play.launch.commands import finish, start_run
from sft_play.launch.job import Job
from sft_play.runs.folder import PREDICTIONS, RunFolder
from sft_play.runs.prepared import Prepared
from sft_play.text import tell

if TYPE_CHECKING:
    from sft_play.config.call import Call

SHOWN_ANSWERS = 5


def main(call: Call) -> int:
    """Scores the base, trains, scores the result, and compares the two."""
    call = replace(call, options={"CONFIG": "quickstart", **call.options})
    started = time.perf_counter()
    before: dict[str, Any] = {}

    def score_base(job: Job, run: RunFolder) -> None:
        _require_validation(run)
        job.plan(Prepared.load(run.prepared)).save(run.plan)
        tell("\n== Before: the model as it is, on rows that training never sees")
        before.update(score(run, "base"))
        tell("\n== Training")

    run, outcome = start_run(call, "auto" if "NUM_GPUS" in call.options else "single", before_launch=score_base)
    if outcome.code:
        return finish(call, run, outcome)
    if not before:  # a run that `launch.auto_resume` went on with
        before.update(score(run, "base"))
    tell("\n== After: the fine-tuned model, on the same prompts")
    after = score(run, None)
    compared = compare(read_sides([f"{run.name}@base", run.name], None), None, SHOWN_ANSWERS)
    result, seconds = facts(compared, before, after), time.perf_counter() - started
    if call.json:
        print(json.dumps(result | {"seconds": round(seconds, 1)}, indent=2))
    else:
        show(compared)
        for name, path in result["predictions"].items():
            print(f"answers {name:<7}{path}")
        print(f"\n{seconds:.0f} s in all. Next:\n  make infer RUN={run.name}\n  make tensorboard")
    return 0


def score(run: RunFolder, checkpoint: str | None) -> dict[str, Any]:
    """Run `make eval RUN=... CHECKPOINT=... JSON=1` and returns its answer. Raise `SystemExit` with its exit code."""
    arguments = [sys.executable, "-m", "sft_play", "eval", f"RUN={run.path.resolve()}", "JSON=1"]
    arguments += [f"CHECKPOINT={checkpoint}"] if checkpoint else []
    process = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        raise SystemExit(process.returncode if process.returncode > 0 else 128 - process.returncode)
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def facts(compared: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return both evaluations side by side, with the answers that lie furthest apart."""
    scores = {
        name: {k: v for k, v in part.items() if k not in ("run", "folder")}
        for name, part in (("before", before), ("after", after))
    }
    return {
        "run": after["run"],
        **scores,
        "loss_fell": after["loss"] < before["loss"],
        "rougeL_beyond_interval": "rougeL" in after and after["rougeL"]["low"] > before["rougeL"]["high"],
        "answers": [
            {name: row[name] for name in ("row", "prompt", "reference")}
            | {name: one["answer"] for name, one in zip(("before", "after"), row["answers"], strict=True)}
            for row in compared["rows"]
        ],
        "predictions": {
            name: f"{folder}/{PREDICTIONS}"
            for name, folder in zip(scores, compared["folders"], strict=True)
            if compared["scores"]
        },
    }


def _require_validation(run: RunFolder) -> None:
    prepared = Prepared.load(run.prepared)
    if prepared.validation is None or not prepared.validation.rows:
        raise UserError(
            "`make quickstart` scores held-out rows, and this configuration has none",
            hint="give `data.validation` (a fraction or sources), or use `make train`",
        )
