"""`make report RUN=`: read a run's folder into one record, and show it on a page, standalone or under `make ui`.

A torn, missing or huge file never makes it fail.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.metrics import LABELS, are_labels, higher_is_better, label_of_metric
from sft_play.errors import typed_here
from sft_play.files import finite, read_object, tail, typed_path, write_text
from sft_play.launch.run_folder import find_named_run, read_events
from sft_play.launch.runs import flat_keys, short_path, summary_of
from sft_play.runs.folder import (
    RunFolder,
    cache_folder,
    metric_rows,
    metrics_of,
    of_memory,
    read_predictions,
    read_scores,
)
from sft_play.runs.gate import eval_command, read_facts
from sft_play.runs.progress import answer_scores, describe_model, findings, seconds_left

POINTS = 1_500
"""Most points of a curve; each stretch keeps its lowest and highest loss, so that no spike is lost."""
SAMPLES = 40
LETTERS = 4_000
"""Most characters of a prompt or answer."""
LOG_BYTES = 24_000
"""Bytes shown from the end of each rank's log."""
LOGS = 16
USES = ("infer", "serve", "merge")
"""Commands about a run, besides `eval`, which needs held-out rows."""
TRAIN_FACTS = frozenset({"kind", "step", "epoch"})
SCRIPTS = ("uPlot.iife.min.js", "rows.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'"
)


def main(call: Call) -> int:
    """Write `report.html` into the run's folder, or `OUT`."""
    run = find_named_run(call, writes="OUT" not in call.options)
    path = write_report(run, typed_path(call.options["OUT"]) if call.options.get("OUT") else None)
    return call.show({"run": str(run.path), "report": str(path)}, f"report: {path}")


def write_report(run: RunFolder, path: Path | None = None) -> Path:
    """Write a run's report and return its path. Raise `OSError`."""
    path = path or run.report
    write_text(path, page_html(record_of(run)))
    return path


def record_of(run: RunFolder) -> dict[str, Any]:
    """Return everything that the page shows of a run."""
    config, rows = read_facts(run.config), metric_rows(run.metrics)
    evaluated = [
        (folder, int(name[1]), name[2], scores)
        for folder in sorted(run.path.glob("eval/step-*"))
        if (name := re.fullmatch(r"step-(\d+)(-.+)?", folder.name)) and (scores := read_scores(folder))
    ]
    held_out = read_facts(run.prepared).get("validation")
    return {
        "summary": (summary := summary_of(run)).cells(),
        "seconds_left": seconds_left(rows, summary.steps),
        "use": {
            **{name: typed_here(f"make {name} RUN={short_path(run.typed)}") for name in USES},
            **({"eval": typed_here(short_path(eval_command(run)))} if held_out else {}),
        },
        "config": [
            {
                "key": key,
                "value": value,
                "origin": short_path(str(config.get("origins", {}).get(key.partition("[")[0], ""))),
            }
            for key, value in flat_keys(config.get("config", {}))
        ],
        "plan": read_facts(run.plan),
        "prepared": _prepared(run),
        "stamp": read_object(run.stamp),
        "model": describe_model(run),
        "model_step": (model_step := read_object(run.model / "stamp.json").get("step")),
        "outcomes": outcomes_of(
            rows, [(step, scores) for _, step, other, scores in evaluated if not other], model_step
        ),
        "final": read_facts(run.training_metrics),
        "curves": curves_of(rows),
        "findings": [asdict(finding) for finding in findings(rows)],
        "events": read_events(run),
        "evaluations": [_evaluation(step, scores) for _, step, other, scores in evaluated if not other],
        "other_rows": [_evaluation(step, scores) for _, step, other, scores in evaluated if other],
        "samples": samples_of([(step, folder) for folder, step, other, _ in evaluated if not other]),
        "checkpoints": [
            folder.name + (" (best)" if folder.name == run.best.resolve().name else "")
            for folder in sorted(run.path.glob("checkpoints/step-*"))
            if (folder / "manifest.json").is_file()
        ],
        "logs": {path.stem: _tail(path) for path in _logs(run)},
        "labels": LABELS,
    }


def _evaluation(step: int, scores: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": step,
        "data": short_path(str(scores["settings"].get("data", ""))),
        "warning": of_memory(scores["settings"]),
        "loss": scores.get("loss"),
        "labels": scores.get("classification"),
        "scores": {label_of_metric(name): value for name, value in metrics_of(scores).items()},
    }


def outcomes_of(
    rows: Sequence[Mapping[str, Any]], evaluations: Sequence[tuple[int, Mapping[str, Any]]], model_step: Any
) -> list[dict[str, Any]]:
    """Return what training changed on held-out rows: a `name` and `points`, each a step and a value.

    The points are step 0 and the step of `model/`, or without a step 0 the first, the best and the last.
    """
    values: dict[str, dict[int, float]] = {"loss": {}}
    measured = [(row["step"], row.get("eval_loss"), answer_scores(row)) for row in rows if row.get("kind") == "eval"]
    # The training scored each step alike; `make eval` perhaps other samples.
    scored = [(step, scores.get("loss"), metrics_of(scores)) for step, scores in evaluations]
    means = [(step, loss, {name: score["mean"] for name, score in scores.items()}) for step, loss, scores in scored]
    for step, loss, scores in (*means, *measured):
        for name, value in {"loss": loss, **scores}.items():
            values.setdefault(name, {})[step] = value
    outcomes = []
    for name, by_step in values.items():
        numbers = {step: by_step[step] for step in sorted(by_step) if isinstance(by_step[step], (int, float))}
        if not numbers:
            continue
        steps, higher = list(numbers), higher_is_better(name)
        if steps[0] == 0:
            shown = [0, model_step if model_step in numbers else steps[-1]]
        else:
            best = [] if higher is None else [(max if higher else min)(steps, key=lambda step: numbers[step])]
            shown = sorted({steps[0], *best, steps[-1]})
        outcomes.append({"name": name, "points": [[step, numbers[step]] for step in dict.fromkeys(shown)]})
    return outcomes


def curves_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns of metrics: `train` and `eval`, each with `step` and a list per figure.

    A figure per rank (`rank_loss`) or node is a list of lists, one for each rank or node.
    """
    return {kind: _columns(thin([row for row in rows if row.get("kind") == kind])) for kind in ("train", "eval")}


def thin(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return at most `POINTS` rows: the first, the last, and those with the lowest and highest loss of each stretch."""
    if len(rows) <= POINTS:
        return list(rows)
    indices_kept = {0, len(rows) - 1}
    stretch = len(rows) / ((POINTS - 2) // 2)
    for part in range((POINTS - 2) // 2):
        indices = range(int(part * stretch), int((part + 1) * stretch))
        indices_kept |= {min(indices, key=lambda i: _loss(rows[i])), max(indices, key=lambda i: _loss(rows[i]))}
    return [rows[index] for index in sorted(indices_kept)]


def _loss(row: Mapping[str, Any]) -> float:
    value = row.get("loss", row.get("eval_loss"))
    return value if isinstance(value, (int, float)) else math.inf


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in TRAIN_FACTS]
    columns: dict[str, Any] = {"step": [row["step"] for row in rows]}
    for key in keys:
        values = [row.get(key) for row in rows]
        ranks = max((len(value) for value in values if isinstance(value, list)), default=0)
        if ranks:
            columns[key] = [
                [value[r] if isinstance(value, list) and r < len(value) else None for value in values]
                for r in range(ranks)
            ]
        elif all(value is None or isinstance(value, (int, float)) for value in values):
            columns[key] = values
    return columns


def samples_of(evaluations: Sequence[tuple[int, Path]]) -> list[dict[str, Any]]:
    """Return some answers of the last evaluation, with the first evaluation's answers to the same prompts."""
    predictions: dict[int, list[dict[str, Any]]] = {}
    for step, folder in (*evaluations[:1], *evaluations[-1:]):
        with contextlib.suppress(OSError, ValueError):
            predictions[step] = read_predictions(folder)
    answers, thoughts = (
        {step: {row["row"]: row.get(part, "")[:LETTERS] for row in rows} for step, rows in predictions.items()}
        for part in ("answer", "thought")
    )
    return [
        {
            "row": short_path(row.get("place", "")) or row["row"],
            "prompt": row["prompt"][:LETTERS],
            "reference": (row.get("reference") or "")[:LETTERS],
            "scores": row.get("scores", {}),
            "answers": {step: texts[row["row"]] for step, texts in answers.items() if row["row"] in texts},
            "thoughts": {step: texts[row["row"]] for step, texts in thoughts.items() if texts.get(row["row"])},
        }
        for row in (predictions.get(evaluations[-1][0], []) if evaluations else [])[:SAMPLES]
    ]


def _prepared(run: RunFolder) -> dict[str, Any]:
    """Return the model's name and each split's counts, with its sources if the rows are in this cache or the run."""
    splits, prepared = {}, read_facts(run.prepared)
    for name in ("train", "validation"):
        if split := prepared.get(name):
            rows = Path(split.get("path", "")).resolve()
            ours = any(rows.is_relative_to(folder.resolve()) for folder in (cache_folder(), run.path))
            manifest = read_facts(rows / "manifest.json") if ours else {}
            labels, weights = manifest.get("labels", {}), [part.get("weight") for part in split.get("sources", [])]
            splits[name] = {key: split.get(key) for key in ("rows", "tokens", "label_tokens", "longest", "median")} | {
                "labels": labels if are_labels(labels) else {},
                "sources": [
                    {
                        key: source.get(key)
                        for key in ("rows_read", "kept", "dropped", "duplicates", "cut", "tokens", "trained_tokens")
                    }
                    | {"name": short_path(str(source.get("name"))), "weight": weight}
                    for source, weight in itertools.zip_longest(manifest.get("sources", []), weights)
                    if source
                ],
            }
    return {"model": short_path(str(prepared.get("model", {}).get("name", ""))), "splits": splits}


def _logs(run: RunFolder) -> list[Path]:
    ranks = sorted(
        (path for path in run.logs.glob("rank*.log") if path.stem[4:].isdecimal()), key=lambda path: int(path.stem[4:])
    )
    return [*ranks[:LOGS], *(path for path in [run.logs / "launcher.log"] if path.is_file())]


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        text = tail(path, LOG_BYTES)
        return text if path.stat().st_size <= LOG_BYTES else text.partition("\n")[2]
    return ""


# The page: under the server it references its files, in a report it contains them.


@cache
def page_files() -> dict[str, str]:
    """Return name -> text of the scripts and styles; uPlot 1.6.32 (MIT) is vendored with its licence."""
    folder = files("sft_play.report") / "static"
    return {name: (folder / name).read_text(encoding="utf-8") for name in (*SCRIPTS, *STYLES)}


def page_html(record: dict[str, Any] | None) -> str:
    """Return the page: one that queries a server, or, with a `record` inside, one that needs nothing else.

    The policy allows only scripts and styles with the hashes of ours, whatever a run's data contain.
    """
    template = (files("sft_play.report") / "static" / "page.html").read_text(encoding="utf-8")
    if record is None:
        styles = [f'<link rel="stylesheet" href="page/{name}">' for name in STYLES]
        scripts = [f'<script src="page/{name}"></script>' for name in SCRIPTS]
        parts = {"policy": PAGE_POLICY, "data": ""}
    else:
        texts = page_files()
        styles = [f"<style>{texts[name]}</style>" for name in STYLES]
        scripts = [f"<script>{texts[name]}</script>" for name in SCRIPTS]
        allowed = [
            f"{kind} {' '.join(_hash(texts[name]) for name in names)}"
            for kind, names in (("script-src", SCRIPTS), ("style-src", STYLES))
        ]
        data = json.dumps(finite(record), default=str, ensure_ascii=False, separators=(",", ":"))
        inside = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        parts = {
            "policy": f"default-src 'none'; {'; '.join(allowed)}; img-src data:; base-uri 'none'; form-action 'none'",
            "data": f'<script type="application/json" id="data">{inside}</script>',
        }
    parts |= {"styles": "\n".join(styles), "scripts": "\n".join(scripts)}
    before, _, after = template.partition("{data}")  # data may contain braces, in which nothing is replaced
    return _filled(before, parts) + parts["data"] + _filled(after, parts)


def _filled(template: str, parts: dict[str, str]) -> str:
    for name in ("policy", "styles", "scripts"):
        template = template.replace(f"{{{name}}}", parts[name])
    return template


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
