"""`make quickstart`: score a real small model, fine-tune it on this machine, and score it again on the same prompts.

It is `make train` with two evaluations. Each heavy part runs in a separate process, so that the first evaluation uses
no memory during training.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.metrics import label_of_metric
from sft_play.errors import UserError, typed_here
from sft_play.launch.commands import finish, start_run
from sft_play.launch.job import Job
from sft_play.runs.folder import PREDICTIONS, RunFolder, read_predictions
from sft_play.runs.prepared import Prepared
from sft_play.text import table, tell

if TYPE_CHECKING:
    from sft_play.config.call import Call

SHOWN_ANSWERS = 5
WIDTH = 110
METRICS = ("rouge1", "rouge2", "rougeL")


def main(call: Call) -> int:
    """Score the base model, train, score the result, and compare the two."""
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
    if not before:  # a run that `launch.auto_resume` continued
        before.update(score(run, "base"))
    tell("\n== After: the fine-tuned model, on the same prompts")
    after = score(run, None)
    result = compare(run, before, after)
    if call.json:
        print(json.dumps(result | {"seconds": round(time.perf_counter() - started, 1)}, indent=2))
    else:
        print(report(result))
        commands = typed_here(f"  make infer RUN={run.typed}\n  make tensorboard")
        print(f"\n{time.perf_counter() - started:.0f} s in all. Next:\n{commands}")
    return 0


def score(run: RunFolder, checkpoint: str | None) -> dict[str, Any]:
    """Run `make eval RUN=... CHECKPOINT=... JSON=1` and return its output. Raise `SystemExit` with its exit code."""
    arguments = [sys.executable, "-m", "sft_play", "eval", f"RUN={run.path.resolve()}", "JSON=1"]
    arguments += [f"CHECKPOINT={checkpoint}"] if checkpoint else []
    process = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        raise SystemExit(process.returncode if process.returncode > 0 else 128 - process.returncode)
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def compare(run: RunFolder, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return both evaluations side by side with some answers, and assert that the prompts are the same."""
    folders = {name: Path(part["folder"]) for name, part in (("before", before), ("after", after))}
    answers = [read_predictions(folder) for folder in folders.values()]
    assert [(a["row"], a["prompt"]) for a in answers[0]] == [(a["row"], a["prompt"]) for a in answers[1]], (
        "the same prompts"
    )
    return {
        "run": run.name,
        "before": {name: before[name] for name in before if name not in ("run", "folder")},
        "after": {name: after[name] for name in after if name not in ("run", "folder")},
        "loss_fell": after["loss"] < before["loss"],
        "rougeL_beyond_interval": "rougeL" in after and after["rougeL"]["low"] > before["rougeL"]["high"],
        "answers": [
            {name: old[name] for name in ("row", "prompt", "reference")}
            | {"before": old["answer"], "after": new["answer"]}
            for old, new in list(zip(*answers, strict=True))[:SHOWN_ANSWERS]
        ],
        "predictions": {name: str(folder / PREDICTIONS) for name, folder in folders.items() if answers[0]},
    }


def report(result: Mapping[str, Any]) -> str:
    """Return the comparison as text."""
    before, after = result["before"], result["after"]
    lines = (
        ["", f"== {result['run']}: {len(result['answers'])} held-out answers before and after"]
        if result["answers"]
        else []
    )
    for answer in result["answers"]:
        lines += ["", *_wrap("prompt   ", _question(answer["prompt"]))]
        lines += _wrap("wanted   ", answer["reference"]) + _wrap("before   ", answer["before"])
        lines += _wrap("after    ", answer["after"])
    scored = [name for name in METRICS if name in after]
    rows = [
        ("held-out", "before", "after"),
        *((name, f"{before[name]:.4g}", f"{after[name]:.4g}") for name in ("loss", "perplexity")),
    ]
    lines += [
        "",
        *table([*rows, *((label_of_metric(name), _interval(before[name]), _interval(after[name])) for name in scored)]),
    ]
    if "rougeL" in after:
        lines.append(f"(n = {after['rougeL']['n']} answers, 95 % bootstrap intervals)")
    lines += [f"answers {name:<7}{path}" for name, path in result["predictions"].items()]
    return "\n".join(lines)


def _require_validation(run: RunFolder) -> None:
    prepared = Prepared.load(run.prepared)
    if prepared.validation is None or not prepared.validation.rows:
        raise UserError(
            "`make quickstart` scores held-out rows, and this configuration has none",
            hint="give `data.validation` (a fraction or sources), or use `make train`",
        )


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _question(prompt: str) -> str:
    """Return the last user turn of a ChatML prompt, else the prompt."""
    return prompt.rsplit("<|im_start|>user\n", 1)[-1].split("<|im_end|>", 1)[0].strip()


def _wrap(label: str, text: str) -> list[str]:
    """Return `text` after `label`, at most 12 lines, with its line breaks."""
    lines = [
        part for line in text.splitlines() or [""] for part in textwrap.wrap(line, WIDTH, drop_whitespace=False) or [""]
    ]
    lines = lines if len(lines) <= 12 else [*lines[:11], "..."]
    return [f"{label if index == 0 else ' ' * len(label)}{line}".rstrip() for index, line in enumerate(lines)]
