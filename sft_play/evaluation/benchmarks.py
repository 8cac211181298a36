"""Run standard benchmarks: tasks of lm-evaluation-harness, an optional package.

It is imported only when a benchmark really runs, like torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.errors import DataError, HardwareError, UserError, first_line
from sft_play.files import file_sha256, text_sha256, write_json
from sft_play.plan.architecture import offline_unless_reachable
from sft_play.plan.plan import Plan
from sft_play.runs.folder import BENCHMARKS, RunFolder, read_benchmarks
from sft_play.text import tell

if TYPE_CHECKING:
    from sft_play.config.schema import Config

INSTALL = "`.venv/bin/python -m pip install -c constraints.txt '.[benchmarks]'`"


def lines(figures: Mapping[str, Any]) -> list[str]:
    """Return a line for each task and metric."""
    return [
        f"{task:<12} {name} {value['value']:.4f}"
        + (f" +- {value['stderr']:.4f}" if value.get("stderr") is not None else "")
        + f"   n = {part['n']}"
        for task, part in figures.get("tasks", {}).items()
        for name, value in part["metrics"].items()
    ]


def parse_tasks(text: str) -> list[str]:
    """Return the tasks of `BENCHMARKS`.

    Raise `UserError` for a missing task file, and `HardwareError` if lm-evaluation-harness is not installed.
    """
    tasks = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not tasks:
        raise UserError("`BENCHMARKS` names no task", hint="BENCHMARKS=arc_easy,hellaswag, or the YAML file of a task")
    for task in tasks:
        if (task.endswith((".yaml", ".yml")) or "/" in task) and not Path(task).is_file():
            raise UserError(
                "there is no such task file",
                place=task,
                hint="paths are relative to the folder in which you typed the command",
            )
    if importlib.util.find_spec("lm_eval") is None:
        raise HardwareError("`BENCHMARKS` needs lm-evaluation-harness, which is not installed", hint=INSTALL)
    return tasks


def _key(task: str, limit: int | None, weights: str) -> str:
    """Return a hash over everything that a task's figures depend on."""
    content = file_sha256(Path(task)) if Path(task).is_file() else None
    return text_sha256(json.dumps([task, content, limit, weights, importlib.metadata.version("lm-eval")]))


def measure(
    run: RunFolder,
    weights: Path | None,
    content: str,
    folder: Path,
    tasks: Sequence[str],
    limit: int | None,
    config: Config,
) -> dict[str, Any]:
    """Run the tasks not yet measured with these weights, save them in `benchmarks.json`, and return all of `tasks`.

    `weights` is `model/` or a checkpoint, `None` for the base; `content` is the hash of the weights. Raise `UserError`
    for unknown tasks, and `DataError` for a task whose data cannot be loaded.
    """
    measured = read_benchmarks(folder) or {"requests": {}}
    keys = {task: _key(task, limit, content) for task in tasks}
    missing = [task for task in tasks if measured["requests"].get(task, {}).get("key") != keys[task]]
    if missing:
        offline_unless_reachable()
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        manager, names = _tasks(missing)

        from sft_play.evaluation.held_out import load_weights
        from sft_play.model.use import best_device

        device = best_device()
        model, tokenizer = load_weights(run, weights, config, device)
        size = Plan.load(run.plan).eval_batch_size if config.eval.batch_size == "auto" else config.eval.batch_size
        for task, name in zip(missing, names, strict=True):
            part = _evaluate(model, tokenizer, name, manager, limit, size, device)
            measured["requests"][task] = {"key": keys[task], "limit": limit, "tasks": part}
            measured["lm_eval"] = importlib.metadata.version("lm-eval")
            measured["tasks"] = {
                name: value for request in measured["requests"].values() for name, value in request["tasks"].items()
            }
            # Written after each task, so that a later failure costs only its own task.
            write_json(folder / BENCHMARKS, measured)
    else:
        tell("already measured: weights, tasks and versions are the same")
    figures = {name: value for task in tasks for name, value in measured["requests"][task]["tasks"].items()}
    return {"lm_eval": measured["lm_eval"], "tasks": figures}


def _tasks(tasks: Sequence[str]) -> tuple[Any, list[str]]:
    """Return lm-evaluation-harness's task manager, which includes the folders of task files, and the tasks' names."""
    from lm_eval.tasks import TaskManager

    files = [Path(task) for task in tasks if Path(task).is_file()]
    manager = TaskManager(include_path=sorted({str(path.parent.resolve()) for path in files}) or None)
    names = [_name_in(Path(task)) if Path(task).is_file() else task for task in tasks]
    for name in names:
        if not manager.match_tasks([name]):
            close = get_close_matches(name, manager.all_tasks, n=3, cutoff=0.6)
            hint = (
                f"did you mean {' or '.join(f'`{c}`' for c in close)}?"
                if close
                else "`lm-eval ls tasks` lists all of them"
            )
            raise UserError(f"lm-evaluation-harness has no task `{name}`", hint=hint)
    return manager, names


def _name_in(path: Path) -> str:
    """Return the task or group that a YAML file defines. Raise `UserError` if it defines none."""
    match = re.search(r"^(?:task|group):\s*[\"']?([\w.+-]+)[\"']?\s*(?:#.*)?$", path.read_text(encoding="utf-8"), re.M)
    if match is None:
        raise UserError("the file has no line `task: NAME`, so it defines no task", place=str(path))
    return match.group(1)


def _evaluate(
    model: Any, tokenizer: Any, name: str, manager: Any, limit: int | None, size: int, device: str
) -> dict[str, Any]:
    """Return the metrics of each task of `name`, with their number of samples."""
    from datasets.exceptions import DatasetsError
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size, device=device)
    try:
        results = simple_evaluate(model=wrapped, tasks=[name], task_manager=manager, limit=limit, log_samples=False)
    except (OSError, DatasetsError, ValueError) as error:
        first = first_line(error)
        hint = "the hub must be reachable the first time, or name a task file whose data is local"
        raise DataError(f"the benchmark could not be run: {first[:300]}", place=name, hint=hint) from error
    assert results is not None, "rank 0 gets the results"
    return {task: _metrics(results, task, values) for task, values in results["results"].items()}


def _metrics(results: Mapping[str, Any], task: str, values: Mapping[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for key, value in values.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = values.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered == "none" else f"{metric} ({filtered})"
        figures[name] = {"value": float(value), "stderr": float(error) if isinstance(error, (int, float)) else None}
    samples = results.get("n-samples", {}).get(task, {}).get("effective")
    return {"n": samples, "version": results.get("versions", {}).get(task), "metrics": figures}
