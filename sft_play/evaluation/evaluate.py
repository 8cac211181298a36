"""`make eval`: loss, perplexity and scored answers of a run, a checkpoint or a plain model; kept, and shown again at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.metrics import label_of_metric
from sft_play.errors import DataError
from sft_play.evaluation.subject import (
    BASE,
    Rows,
    Weights,
    check_options,
    check_stamp,
    find_rows,
    find_weights,
    plain_run,
    read_settings,
    settings_of,
)
from sft_play.launch.run_folder import find_run
from sft_play.runs.folder import BENCHMARKS, LEAST_ROWS, RunFolder, metrics_of, read_benchmarks, read_scores

if TYPE_CHECKING:
    from sft_play.config.call import Call
    from sft_play.config.load import LoadedConfig
    from sft_play.config.schema import Config


def main(call: Call) -> int:
    """Scores, or shows the kept scores when weights, data and settings are the same."""
    check_options(call)
    run = find_run(call.options["RUN"]) if "RUN" in call.options else None
    weights = find_weights(run, call.options.get("CHECKPOINT")) if run else None
    loaded = read_settings(call)
    if run and weights and weights.folder:
        check_stamp(run, loaded.config, weights.folder, "eval")
    if "BENCHMARKS" in call.options:
        return _benchmarks(call, loaded, run, weights)
    rows = find_rows(call, loaded, run)
    if rows is None or not rows.split.rows:
        named = f"the run `{run.name}`" if run else f"`{call.options.get('CONFIG')}`"
        hint = "DATA=file.jsonl scores other rows; `data.validation` (a fraction or sources) holds some out when training"
        raise DataError(f"{named} has no validation rows to score", hint=hint)
    if run is None:
        assert rows.model is not None, "only a run has rows of its own"
        run = plain_run(loaded, rows.model)
        weights = find_weights(run, BASE)
    assert weights is not None, "a run has weights, and a plain model is its own base"
    scores = _scores(loaded.config, run, weights, rows)
    folder = run.evaluation(weights.step, rows.name)
    if call.json:
        print(json.dumps({"run": run.name, "weights": weights.label, "folder": str(folder), **scores}, indent=2))
    else:
        print(table(run.name, weights, scores, folder))
    return 0


def _scores(config: Config, run: RunFolder, weights: Weights, rows: Rows) -> dict[str, Any]:
    settings = settings_of(config, run, weights, rows)
    folder = run.evaluation(weights.step, rows.name)
    scores = kept_scores(folder, settings)
    if scores is not None:
        print("scored before: weights, data and settings are the same", file=sys.stderr)
        return scores
    from sft_play.evaluation.held_out import score_run

    return score_run(run, weights.folder, rows.split, folder, step=weights.step, config=config, settings=settings)


def _benchmarks(call: Call, loaded: LoadedConfig, run: RunFolder | None, weights: Weights | None) -> int:
    from sft_play.evaluation.benchmarks import find_model, kept_benchmarks, parse_request, run_benchmarks

    request = parse_request(call.options["BENCHMARKS"], call.integer("BENCHMARK_LIMIT", minimum=1))
    if run is None:
        run = plain_run(loaded, find_model(loaded.config))
    weights = weights or find_weights(run, BASE)
    folder = run.evaluation(weights.step)
    found = kept_benchmarks(folder, request, weights.content)
    if found is None:
        found = run_benchmarks(run, weights, folder, request, loaded.config)
    else:
        print("measured before: weights, tasks and versions are the same", file=sys.stderr)
    if call.json:
        print(json.dumps({"run": run.name, "weights": weights.label, "folder": str(folder), **found}, indent=2))
    else:
        print(
            _heading(run.name, weights, weights.step)
            + "\n"
            + "\n".join(benchmark_lines(found))
            + f"\nfiles        {folder / BENCHMARKS}"
        )
    return 0


def kept_scores(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns earlier scores that were made of the same weights and rows in the same way, and of all rows that were asked for.

    Scores that a time budget cut short (`complete: false`) are never taken for whole.
    """
    scores = read_scores(folder)
    if scores is None or scores.get("complete") is False:
        return None
    return scores if scores.get("settings", {}).get("key") == settings["key"] else None


def table(name: str, weights: Weights, scores: Mapping[str, Any], folder: Path) -> str:
    """Returns what the user reads."""
    lines = [_heading(name, weights, scores["step"])]
    if data := scores["settings"].get("data"):
        lines.append(f"data         {data}")
    lines.append(f"loss         {scores['loss']:.4f}   over {scores['label_tokens']} label tokens")
    lines.append(f"perplexity   {scores['perplexity']:.3f}")
    for source, part in scores.get("sources", {}).items():
        lines.append(
            f"  {source}: loss {part['loss']:.4f}, perplexity {part['perplexity']:.3f}, {part['label_tokens']} label tokens"
        )
    for metric, value in metrics_of(scores).items():
        interval = f"95 % interval {value['low']:.4f} to {value['high']:.4f}"
        few = ", too few to compare" if value["n"] < LEAST_ROWS else ""
        lines.append(f"{label_of_metric(metric):<12} {value['mean']:.4f}   {interval}, n = {value['n']}{few}")
    if scores.get("complete") is False:
        lines.append(f"answered     {scores['answers']} of {scores['answers_asked']}: the time budget ended (`eval.max_seconds`)")
    if speed := scores.get("speed"):
        lines.append(f"speed        {_speed(speed)}")
    lines += benchmark_lines(read_benchmarks(folder) or {})
    lines.append(f"files        {folder}")
    return "\n".join(lines)


def benchmark_lines(found: Mapping[str, Any]) -> list[str]:
    """Returns one line for each task and metric of standard benchmarks."""
    return [
        f"{task:<12} {name} {value['value']:.4f}"
        + (f" +- {value['stderr']:.4f}" if value.get("stderr") is not None else "")
        + f"   n = {part['n']}"
        for task, part in found.get("tasks", {}).items()
        for name, value in part["metrics"].items()
    ]


def _heading(name: str, weights: Weights, step: int) -> str:
    return f"run          {name}, {'untuned base' if weights.label == BASE else weights.label} (step {step})"


def _speed(speed: Mapping[str, Any]) -> str:
    text = f"loss {speed['loss_rows_per_second']:.1f} rows/s"
    if speed.get("answers_per_second"):
        text += f", answers {speed['answers_per_second']:.2f}/s ({speed['answer_tokens_per_second']:.0f} tokens/s)"
    return text
