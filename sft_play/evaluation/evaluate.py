"""`make eval`: loss, perplexity and scored answers of a run, a checkpoint or a plain model, or standard benchmarks; kept, shown again at once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.metrics import label_of_metric
from sft_play.errors import DataError, HardwareError, UserError, first_line
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
from sft_play.files import file_sha256, text_sha256, write_json
from sft_play.launch.run_folder import find_run
from sft_play.plan.architecture import offline_unless_reachable
from sft_play.plan.plan import Plan
from sft_play.runs.folder import BENCHMARKS, LEAST_ROWS, RunFolder, metrics_of, read_benchmarks, read_scores
from sft_play.runs.prepared import ResolvedModel

if TYPE_CHECKING:
    from sft_play.config.call import Call
    from sft_play.config.load import LoadedConfig
    from sft_play.config.schema import Config

INSTALL = "`.venv/bin/python -m pip install -c constraints.txt '.[benchmarks]'`"


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
    tasks, limit = parse_tasks(call.options["BENCHMARKS"]), call.integer("BENCHMARK_LIMIT", minimum=1)
    if run is None:
        run = plain_run(loaded, find_model(loaded.config))
    weights = weights or find_weights(run, BASE)
    folder = run.evaluation(weights.step)
    found = run_benchmarks(run, weights, folder, tasks, limit, loaded.config)
    if call.json:
        print(json.dumps({"run": run.name, "weights": weights.label, "folder": str(folder), **found}, indent=2))
    else:
        lines = [_heading(run.name, weights, weights.step), *benchmark_lines(found), f"files        {folder / BENCHMARKS}"]
        print("\n".join(lines))
    return 0


def kept_scores(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return earlier scores that were made of the same weights and rows in the same way, and of all rows that were asked for.

    Scores that a time budget cut short (`complete: false`) are never taken for whole.
    """
    scores = read_scores(folder)
    if scores is None or scores.get("complete") is False:
        return None
    return scores if scores.get("settings", {}).get("key") == settings["key"] else None


def table(name: str, weights: Weights, scores: Mapping[str, Any], folder: Path) -> str:
    """Return what the user reads."""
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
    """Return one line for each task and metric of standard benchmarks."""
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


# Standard benchmarks: tasks of lm-evaluation-harness, an optional package that is imported only when one is really run; torch too.


def parse_tasks(text: str) -> list[str]:
    """Return the tasks. Raise `UserError` for files that are missing, `HardwareError` where lm-evaluation-harness is not installed."""
    tasks = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not tasks:
        raise UserError("`BENCHMARKS` names no task", hint="BENCHMARKS=arc_easy,hellaswag, or the YAML file of a task")
    for task in tasks:
        if (task.endswith((".yaml", ".yml")) or "/" in task) and not Path(task).is_file():
            raise UserError("there is no such task file", place=task, hint="paths count from the folder in which you typed make")
    if importlib.util.find_spec("lm_eval") is None:
        raise HardwareError("`BENCHMARKS` needs lm-evaluation-harness, which is not installed", hint=INSTALL)
    return tasks


def _key(task: str, limit: int | None, weights: str) -> str:
    """Return a hash over all that one task's figures depend on."""
    content = file_sha256(Path(task)) if Path(task).is_file() else None
    return text_sha256(json.dumps([task, content, limit, weights, importlib.metadata.version("lm-eval")]))


def find_model(config: Config) -> ResolvedModel:
    """Return where a plain model is, fetched when it must be. Raise `DataError`."""
    if not Path(config.model.name).expanduser().is_dir():
        offline_unless_reachable()
    from sft_play.model.scratch import resolve
    from sft_play.model.tokenizer import chat_format, with_chat

    return with_chat(resolve(config), chat_format(config.data))


def run_benchmarks(
    run: RunFolder, weights: Weights, folder: Path, tasks: Sequence[str], limit: int | None, config: Config
) -> dict[str, Any]:
    """Run the tasks that were not measured with these weights yet, keep them in `benchmarks.json`, and return what was asked for.

    Raise `UserError` for unknown tasks, `DataError` for a task whose data cannot be had.
    """
    found = read_benchmarks(folder) or {"requests": {}}
    keys = {task: _key(task, limit, weights.content) for task in tasks}
    missing = [task for task in tasks if found["requests"].get(task, {}).get("key") != keys[task]]
    if missing:
        offline_unless_reachable()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        manager, names = _tasks(missing)

        from sft_play.evaluation.held_out import load_weights
        from sft_play.model.use import best_device

        device = best_device()
        model, tokenizer = load_weights(run, weights.folder, config, device)
        size = Plan.load(run.plan).eval_batch_size if config.eval.batch_size == "auto" else config.eval.batch_size
        for task, name in zip(missing, names, strict=True):
            part = _evaluate(model, tokenizer, name, manager, limit, size, device)
            found["requests"][task] = {"key": keys[task], "limit": limit, "tasks": part}
            found["lm_eval"] = importlib.metadata.version("lm-eval")
            found["tasks"] = {name: value for one in found["requests"].values() for name, value in one["tasks"].items()}
            write_json(folder / BENCHMARKS, found)  # after each task: a later one that fails costs only itself
    else:
        print("measured before: weights, tasks and versions are the same", file=sys.stderr)
    wanted = {name: value for task in tasks for name, value in found["requests"][task]["tasks"].items()}
    return {"lm_eval": found["lm_eval"], "tasks": wanted}


def _tasks(wanted: Sequence[str]) -> tuple[Any, list[str]]:
    """Return lm-evaluation-harness' task manager, with the folders of task files, and the tasks' names."""
    from lm_eval.tasks import TaskManager

    files = [Path(task) for task in wanted if Path(task).is_file()]
    manager = TaskManager(include_path=sorted({str(path.parent.resolve()) for path in files}) or None)
    names = [_name_in(Path(task)) if Path(task).is_file() else task for task in wanted]
    for name in names:
        if not manager.match_tasks([name]):
            close = get_close_matches(name, manager.all_tasks, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(f'`{c}`' for c in close)}?" if close else "`lm-eval ls tasks` lists all of them"
            raise UserError(f"lm-evaluation-harness has no task `{name}`", hint=hint)
    return manager, names


def _name_in(path: Path) -> str:
    """Return the task or group that a YAML file defines. Raise `UserError` where it defines none."""
    found = re.search(r"^(?:task|group):\s*[\"']?([\w.+-]+)[\"']?\s*(?:#.*)?$", path.read_text(encoding="utf-8"), re.M)
    if found is None:
        raise UserError("the file has no line `task: NAME`, so it defines no task", place=str(path))
    return found.group(1)


def _evaluate(model: Any, tokenizer: Any, name: str, manager: Any, limit: int | None, size: int, device: str) -> dict[str, Any]:
    """Return for each task of `name` its metrics as lm-evaluation-harness computes them, with n."""
    from datasets.exceptions import DatasetsError
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size, device=device)
    try:
        results = simple_evaluate(model=wrapped, tasks=[name], task_manager=manager, limit=limit, log_samples=False)
    except (OSError, DatasetsError, ValueError) as error:
        first = first_line(error)
        hint = "the hub must be reachable the first time, or name a task file whose data are here"
        raise DataError(f"the benchmark could not be run: {first[:300]}", place=name, hint=hint) from error
    assert results is not None, "only other ranks get nothing"
    return {task: _metrics(results, task, values) for task, values in results["results"].items()}


def _metrics(results: Mapping[str, Any], task: str, values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered == "none" else f"{metric} ({filtered})"
        found[name] = {"value": float(value), "stderr": float(error) if isinstance(error, (int, float)) else None}
    samples = results.get("n-samples", {}).get(task, {}).get("effective")
    return {"n": samples, "version": results.get("versions", {}).get(task), "metrics": found}
