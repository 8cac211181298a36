"""`make quickstart`: score a real small model, fine-tune it on this machine, and compare it with the base.

It is `make train` between two `make eval`, then `make compare`. Each heavy part runs in a separate process, so that the
first evaluation uses no memory during training.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from sft_play.errors import UserError, typed_here
from sft_play.evaluation.compare import compare, read_sides, show
from sft_play.launch.commands import finish, start_run
from sft_play.launch.job import Job
from sft_play.runs.folder import RunFolder, read_scores
from sft_play.runs.prepared import Prepared
from sft_play.text import tell

if TYPE_CHECKING:
    from sft_play.config.call import Call

SHOWN_ANSWERS = 2


def main(call: Call) -> int:
    """Score the base model, train, score the result, and compare the two."""
    call = replace(call, options={"CONFIG": "quickstart", **call.options})
    started = time.perf_counter()

    def score_base(job: Job, run: RunFolder) -> None:
        _require_validation(run)
        job.plan(Prepared.load(run.prepared)).save(run.plan)
        tell("\n== Before: the model as it is, on rows that training never sees")
        score(run, "CHECKPOINT=base")
        tell("\n== Training")

    run, outcome = start_run(call, "auto" if "NUM_GPUS" in call.options else "single", before_launch=score_base)
    if outcome.code or outcome.late_stop:
        return finish(call, run, outcome) or outcome.late_stop
    if read_scores(run.evaluation(0)) is None:  # a run that `launch.auto_resume` continued
        score(run, "CHECKPOINT=base")
    tell("\n== After: the fine-tuned model, on the same prompts")
    score(run)
    result = compare(read_sides([f"{run.typed}@base", run.typed], None), None, SHOWN_ANSWERS)
    seconds = time.perf_counter() - started
    if call.json:
        print(json.dumps(result | {"seconds": round(seconds, 1)}, indent=2))
    else:
        show(result)
        commands = typed_here(f"  make infer RUN={run.typed}\n  make tensorboard")
        print(f"{seconds:.0f} s in all. Next:\n{commands}")
    return 0


def score(run: RunFolder, *words: str) -> None:
    """Run `make eval RUN=...`, whose output goes to stderr. Raise `SystemExit` with its exit code."""
    arguments = [sys.executable, "-m", "sft_play", "eval", f"RUN={run.path.resolve()}", *words]
    code = subprocess.call(arguments, stdout=sys.stderr)
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


def _require_validation(run: RunFolder) -> None:
    prepared = Prepared.load(run.prepared)
    if prepared.validation is None or not prepared.validation.rows:
        raise UserError(
            "`make quickstart` scores held-out rows, and this configuration has none",
            hint="give `data.validation` (a fraction or sources), or use `make train`",
        )
