"""Standard benchmarks: tasks of lm-evaluation-harness on a run's weights or a plain model, kept with the other scores.

The package is an optional group, so it is imported only when a benchmark is really run; torch too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.errors import DataError, HardwareError, UserError, first_line
from sft_play.evaluation.subject import Weights
from sft_play.files import file_sha256, text_sha256, write_json
from sft_play.plan.plan import Plan
from sft_play.runs.folder import BENCHMARKS, RunFolder, read_benchmarks
from sft_play.runs.prepared import ResolvedModel

if TYPE_CHECKING:
    from sft_play.config.schema import Config

INSTALL = "`.venv/bin/python -m pip install -c constraints.txt '.[benchmarks]'`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What `BENCHMARKS` and `BENCHMARK_LIMIT` ask for."""

    tasks: tuple[str, ...]
    """Names of tasks and groups, or YAML files that define one."""
    limit: int | None
    """Samples of each task; all where `None`."""

    def key(self, task: str, weights: str) -> str:
        """Returns a hash over all that one task's figures depend on."""
        path = Path(task)
        parts = [task, file_sha256(path) if path.is_file() else None, self.limit, weights, importlib.metadata.version("lm-eval")]
        return text_sha256(json.dumps(parts))


def parse_request(text: str, limit: int | None) -> Request:
    """Returns the request. Raises `UserError` for files that are missing, `HardwareError` where lm-evaluation-harness is not installed."""
    tasks = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not tasks:
        raise UserError("`BENCHMARKS` names no task", hint="BENCHMARKS=arc_easy,hellaswag, or the YAML file of a task")
    for task in tasks:
        if (task.endswith((".yaml", ".yml")) or "/" in task) and not Path(task).is_file():
            raise UserError("there is no such task file", place=task, hint="paths count from the folder in which you typed make")
    if importlib.util.find_spec("lm_eval") is None:
        raise HardwareError("`BENCHMARKS` needs lm-evaluation-harness, which is not installed", hint=INSTALL)
    return Request(tasks=tasks, limit=limit)


def kept_benchmarks(folder: Path, request: Request, weights: str) -> dict[str, Any] | None:
    """Returns what was found before, where all of it was measured with the same weights, tasks, limit and version."""
    found = read_benchmarks(folder) or {}
    kept = found.get("requests", {})
    whole = all(kept.get(task, {}).get("key") == request.key(task, weights) for task in request.tasks)
    return _only(found, request.tasks) if whole else None


def find_model(config: Config) -> ResolvedModel:
    """Returns where a plain model is, fetched when it must be. Raises `DataError`."""
    from sft_play.plan.architecture import offline_unless_reachable

    if not Path(config.model.name).expanduser().is_dir():
        offline_unless_reachable()
    from sft_play.data.templates import chat_format, with_chat
    from sft_play.model.scratch import resolve

    return with_chat(resolve(config), chat_format(config.data))


def run_benchmarks(run: RunFolder, weights: Weights, folder: Path, request: Request, config: Config) -> dict[str, Any]:
    """Runs the tasks that are not kept yet, publishes `benchmarks.json` in `folder` and returns what was asked for.

    Raises `UserError` for unknown tasks, `DataError` for a task whose data cannot be had.
    """
    from sft_play.plan.architecture import offline_unless_reachable

    offline_unless_reachable()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found = read_benchmarks(folder) or {"requests": {}}
    missing = [t for t in request.tasks if found["requests"].get(t, {}).get("key") != request.key(t, weights.content)]
    manager, names = _tasks(missing)

    from sft_play.evaluation.held_out import load_weights
    from sft_play.model.use import best_device

    device = best_device()
    model, tokenizer = load_weights(run, weights.folder, config, device)
    plan = Plan.load(run.plan)
    size = plan.eval_batch_size if config.eval.batch_size == "auto" else config.eval.batch_size
    for task, name in zip(missing, names, strict=True):
        part = _evaluate(model, tokenizer, name, manager, request.limit, size, device)
        found["requests"][task] = {"key": request.key(task, weights.content), "limit": request.limit, "tasks": part}
        found["lm_eval"] = importlib.metadata.version("lm-eval")
        found["tasks"] = {name: value for one in found["requests"].values() for name, value in one["tasks"].items()}
        write_json(folder / BENCHMARKS, found)  # after each task: a later one that fails costs only itself
    return _only(found, request.tasks)


def _only(found: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    wanted = {name: value for task in tasks for name, value in found["requests"][task]["tasks"].items()}
    return {"lm_eval": found["lm_eval"], "tasks": wanted}


def _tasks(wanted: Sequence[str]) -> tuple[Any, list[str]]:
    """Returns lm-evaluation-harness' task manager, with the folders of task files, and the tasks' names."""
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
    """Returns the task or group that a YAML file defines. Raises `UserError` where it defines none."""
    found = re.search(r"^(?:task|group):\s*[\"']?([\w.+-]+)[\"']?\s*(?:#.*)?$", path.read_text(encoding="utf-8"), re.M)
    if found is None:
        raise UserError("the file has no line `task: NAME`, so it defines no task", place=str(path))
    return found.group(1)


def _evaluate(model: Any, tokenizer: Any, name: str, manager: Any, limit: int | None, size: int, device: str) -> dict[str, Any]:
    """Returns for each task of `name` its metrics as lm-evaluation-harness computes them, with n."""
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
