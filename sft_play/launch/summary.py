"""`make runs`: one line for each run, which the page and `make compare` show too."""

from __future__ import annotations

import ast
import csv
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.data_rules import FUNCTIONS, Condition
from sft_play.config.metrics import LABELS, OF_LOSS
from sft_play.errors import DataError, UserError
from sft_play.files import read_object
from sft_play.launch.run_folder import FINAL_EVENTS, read_events
from sft_play.launch.runs import holders
from sft_play.plan.show import parse_price
from sft_play.runs.folder import RunFolder, metric_rows, runs_folder
from sft_play.runs.progress import energy_kwh
from sft_play.text import duration, figure, gib, table

SYNTAX = "WHERE=\"eval_loss < 2 and method = lora\", WHERE='state = failed', SORT=-tokens_per_second; `make runs CSV=1` shows all columns"
SINGLE = re.compile(r"""("[^"]*"|'[^']*')|(?<![=!<>])=(?!=)""")
"""Text in quotes, or a single `=`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One run, from its files alone; what is torn or missing is `None`."""

    name: str
    state: str
    """`preparing`, `running`, `finished`, `stopped`, `failed`, `killed` (its launcher is gone), `never started`."""
    code: int | None
    """Exit code of its last launch, where that has ended."""
    step: int
    steps: int | None
    loss: float | None
    """Of the last step in `metrics.jsonl`, nats."""
    best: float | None
    """Best value of `train.metric_for_best_model` among its evaluations."""
    metric: str | None
    scores: Mapping[str, float]
    """Best value of each score of its evaluations: `eval_loss`, `eval_rougeL`, ..."""
    model: str | None
    method: str | None
    data: str | None
    strategy: str | None
    processes: int | None
    tokens_per_second: float | None
    """Of the whole training; before it ends, of the last step."""
    peak_memory_bytes: int | None
    seconds: float | None
    """Spent on optimizer steps; before the end, since the run started."""
    energy_kwh: float | None
    """Of the GPUs, as the driver measured their power; where it was not asked, at most: at their power limits."""
    cost: float | None
    """Of all machines at `PRICE_PER_HOUR`."""
    age_seconds: float
    """Since something last happened to it."""

    def cells(self) -> dict[str, Any]:
        """Return column -> value, each score a column."""
        cells = asdict(self)
        scores = cells.pop("scores")
        return {**cells, **scores}


def summary_of(run: RunFolder, price: float | None = None) -> Summary:
    """Return what is known of a run; `price` is that of one machine's hour."""
    events, state = _first_nodes_events(run), state_of(run)
    config, plan, final = read_object(run.config).get("config", {}), read_object(run.plan), read_object(run.training_metrics)
    rows = metric_rows(run.metrics)
    train = [row for row in rows if row.get("kind") == "train"] or [{}]
    scores = _best_scores([row for row in rows if row.get("kind") == "eval"])
    metric = str(config.get("train", {}).get("metric_for_best_model") or "loss").removeprefix("eval_")
    age = age_of(run)
    begun = next((event["time"] for event in events if isinstance(event.get("time"), (int, float))), None)
    seconds = final.get("training_seconds") or (max(0.0, time.time() - age - begun) if begun else None)
    hours = seconds / 3600 if seconds is not None else None
    peak = max((peak for peak in train[-1].get("rank_memory_gib") or () if peak), default=0.0)  # of a run that goes on
    planned, forecast = plan.get("energy_kwh"), plan.get("total_seconds")
    return Summary(
        name=run.name, state=state, code=events[-1].get("code") if state in FINAL_EVENTS else None,
        step=int(train[-1].get("step", 0)), steps=plan.get("steps"), loss=train[-1].get("loss"),
        best=scores.get(f"eval_{metric}"), metric=metric if f"eval_{metric}" in scores else None, scores=scores,
        model=short_path(str(read_object(run.prepared).get("model", {}).get("name") or config.get("model", {}).get("name") or "")) or None,
        method=config.get("tuning", {}).get("mode"), data=_data(config.get("data", {})), strategy=plan.get("strategy"),
        processes=plan.get("world_size"), tokens_per_second=final.get("tokens_per_second") or train[-1].get("tokens_per_second"),
        peak_memory_bytes=final.get("peak_memory_bytes") or int(peak * 2**30) or None, seconds=seconds,
        energy_kwh=energy_kwh(train, seconds) or (planned * seconds / forecast if planned and seconds and forecast else None),
        cost=price * plan.get("num_nodes", 1) * hours if price is not None and hours is not None else None,
        age_seconds=age,
    )  # fmt: skip


def state_of(run: RunFolder) -> str:
    """Return `Summary.state`, from the run's events and locks alone."""
    events = _first_nodes_events(run)
    last = str(events[-1]["event"]) if events else ""
    launchers = holders(run)
    if last in FINAL_EVENTS and any(one.process and one.process.pid == os.getpid() for one in launchers):
        return last  # its own launcher asks, for the report at the end
    if launchers:
        return "running" if last and last not in FINAL_EVENTS else "preparing"
    return last if last in FINAL_EVENTS else "killed" if last else "never started"


def age_of(run: RunFolder) -> float:
    """Return the seconds since something last happened to a run."""
    touched = [path.stat().st_mtime for path in (run.config, run.events, run.metrics) if path.is_file()]
    return max(0.0, time.time() - max(touched)) if touched else 0.0


def _first_nodes_events(run: RunFolder) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event.get("node", 0) == 0]


def _best_scores(evaluations: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in evaluations:
        for name, value in row.items():
            kind = name.removeprefix("eval_").partition("/")[0]
            if isinstance(value, (int, float)) and (kind in OF_LOSS or kind in LABELS):
                best = min if kind in OF_LOSS else max
                found[name] = best(found.get(name, value), value)
    return found


def _data(section: Mapping[str, Any]) -> str | None:
    sources = section.get("sources") or ([{"path": section["train_path"]}] if section.get("train_path") else [])
    names = [str(one.get("name") or Path(str(one.get("path"))).name) for one in sources if isinstance(one, dict)]
    return ", ".join(names) or None


def short_path(text: str) -> str:
    """Return a text without the folders above this one: a report may be handed on."""
    return text.replace(f"{Path.cwd()}/", "").replace(str(Path.home()), "~")


# The list of all runs.


def main(call: Call) -> int:
    """Print the runs that `WHERE` keeps, by `SORT`, else the newest first."""
    price = parse_price(call.options["PRICE_PER_HOUR"]) if "PRICE_PER_HOUR" in call.options else None
    folders = [path.parent for path in runs_folder().glob("*/config.json")]
    found = sorted((summary_of(RunFolder(path), price) for path in folders), key=lambda one: (one.age_seconds, one.name))
    columns = list(dict.fromkeys(name for one in found for name in one.cells()))
    chosen = [one for one in found if _holds(call.options.get("WHERE"), one, columns)]
    if "SORT" in call.options and found:
        name = call.options["SORT"].removeprefix("-")
        if name not in columns:
            raise UserError(f"`SORT` names the column `{name}`, which is missing", hint=f"the columns are {', '.join(columns)}")
        values: dict[str, Any] = {one.name: one.cells().get(name) for one in chosen}
        known = sorted((one for one in chosen if values[one.name] is not None), key=lambda one: values[one.name])
        known = known[::-1] if call.options["SORT"].startswith("-") else known
        chosen = known + [one for one in chosen if values[one.name] is None]
    if call.json:
        print(json.dumps([one.cells() for one in chosen]))
    elif call.flag("CSV"):
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(one.cells() for one in chosen)
    elif not chosen:
        print(f"no runs in `{runs_folder()}`" if not found else "`WHERE` matches no run")
    else:
        lines = [_shown(one) for one in chosen]
        used = [name for name in lines[0] if any(line[name] != "-" for line in lines)]
        print(*table([used, *([line[name] for name in used] for line in lines)]), sep="\n")
    return 0


def _holds(condition: str | None, run: Summary, columns: list[str]) -> bool:
    """Whether a run fulfils `WHERE`: a `filter` of rows in which `=` compares and a bare word at the right is text."""
    if condition is None:
        return True
    try:
        tree = ast.parse(SINGLE.sub(lambda found: found[1] or "==", condition.strip()), mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                node.comparators = [_word(right, columns) for right in node.comparators]
        expression = ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"`WHERE` is `{condition[:80]}`, which is not a condition", hint=SYNTAX) from None
    # NaN compares with every number, and no comparison holds: a run without a value is left out.
    row = dict.fromkeys(columns, math.nan) | {name: value for name, value in run.cells().items() if value is not None}
    try:
        return Condition(expression, "WHERE", SYNTAX)(row)
    except DataError as error:
        raise UserError(error.message, hint=error.hint) from None


def _word(node: ast.expr, columns: list[str]) -> ast.expr:
    if isinstance(node, (ast.List, ast.Tuple)):
        return ast.List([_word(part, columns) for part in node.elts], ast.Load())
    return ast.Constant(node.id) if isinstance(node, ast.Name) and node.id not in (*columns, *FUNCTIONS) else node


def _shown(one: Summary) -> dict[str, str]:
    def cell(value: float | None, unit: str = "") -> str:
        return f"{figure(value)}{unit}" if value is not None else "-"

    return {
        "run": one.name,
        "state": f"{one.state} ({one.code})" if one.code and one.state == "failed" else one.state,
        "step": f"{one.step}/{one.steps}" if one.steps else str(one.step),
        "loss": f"{one.loss:.4f}" if one.loss is not None else "-",
        "best": f"{one.best:.4f} {one.metric}" if one.best is not None else "-",
        "model": (one.model or "-").rstrip("/").rpartition("/")[2],
        "method": one.method or "-",
        "data": (one.data or "-")[:30],
        "tokens/s": cell(one.tokens_per_second),
        "memory": gib(one.peak_memory_bytes) if one.peak_memory_bytes else "-",
        "time": duration(one.seconds) if one.seconds is not None else "-",
        "energy": cell(one.energy_kwh, " kWh"),
        "cost": cell(one.cost),
        "age": duration(one.age_seconds),
    }
