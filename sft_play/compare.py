"""`make compare RUNS="a b"`: runs side by side, with paired intervals, and the answers that differ most."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from sft_play.errors import UserError
from sft_play.evaluation.sides import Side, changed_settings, common_rows, read_sides, shared_benchmarks, shared_metrics
from sft_play.runs.folder import label_of_metric, metrics_of

if TYPE_CHECKING:
    from sft_play.config.call import Call

ROWS = 5
BYTES = " (bytes)"
SPECIAL = re.compile(r"<\|[^|<>\n]{1,40}\|>|</?s>|\[/?INST\]|<(?:bos|eos|(?:start|end)_of_turn)>")
"""Tokens by which chat templates part turns: of a prompt only its text is shown."""
LEAST_WIDTH = 100
"""Columns of the output where it does not go to a terminal."""


def main(call: Call) -> int:
    """Compares, and prints tables, or JSON."""
    if "RUNS" not in call.options:
        raise UserError("`RUNS` is missing", hint='make compare RUNS="first second", or RUNS="run@base run@step-000040 run"')
    rows = call.integer("ROWS")
    sides = read_sides(call.options["RUNS"].replace(",", " ").split(), call.options.get("DATA"))
    result = compare(sides, call.options.get("METRIC"), ROWS if rows is None else rows)
    if call.json:
        print(json.dumps(result, indent=2, ensure_ascii=False, default=str))
    else:
        show(result)
    return 0


def compare(sides: Sequence[Side], wanted: str | None, count: int) -> dict[str, Any]:
    """Returns everything that is shown. `wanted` is the metric by which `count` rows are chosen. Raises `UserError`."""
    rows, notes = common_rows(sides)
    metrics = shared_metrics(sides)
    metric = _metric(wanted, metrics, sides)
    if not metrics:
        notes.append("no score of answers is common to all; `make eval` scores answers, with EVAL_METRICS= for the same metrics")
    return {
        "runs": [side.name for side in sides],
        "folders": [str(side.folder) for side in sides],
        "settings": changed_settings(sides),
        "facts": _facts(sides),
        "losses": {key: [side.scores[key] for side in sides] for key in ("loss", "perplexity")},
        "scores": {name: [metrics_of(side.scores)[name] for side in sides] for name in metrics},
        "differences": {name: _differences(sides, rows, name) for name in metrics} if rows else {},
        "benchmarks": shared_benchmarks(sides),
        "metric": metric,
        "rows": _rows(sides, rows, metric, count) if metric else [],
        "notes": notes,
    }


def _metric(wanted: str | None, metrics: Sequence[str], sides: Sequence[Side]) -> str | None:
    if wanted is None:
        return "rougeL" if "rougeL" in metrics else next(iter(metrics), None)
    name = wanted.removeprefix("eval_")
    if name in metrics:
        return name
    close = get_close_matches(name, metrics, n=1, cutoff=0.5)
    known = f"all of them have {', '.join(f'`{m}`' for m in metrics) or 'no score of answers'}"
    raise UserError(
        f"`METRIC` is `{wanted}`, which {' or '.join(f'`{s.name}`' for s in sides if name not in metrics_of(s.scores))} lacks",
        hint=f"did you mean `METRIC={close[0]}`? {known}" if close else known,
    )


def _facts(sides: Sequence[Side]) -> dict[str, list[Any]]:
    each = [side.facts() for side in sides]
    return {name: [found.get(name) for found in each] for name in dict.fromkeys(name for found in each for name in found)}


def _differences(sides: Sequence[Side], rows: Sequence[int], metric: str) -> list[dict[str, Any] | None]:
    """Returns each side's paired difference from the first, `None` for the first itself."""
    from sft_play.evaluation.scores import paired_difference

    values = [
        [float(side.answers[row]["scores"][metric]) for row in rows if metric in side.answers[row]["scores"]] for side in sides
    ]
    if len(values[0]) < len(rows):  # a metric of the whole set, with nothing for a single answer
        return [None] * len(sides)
    return [None, *(paired_difference(values[0], other).to_json() for other in values[1:])]


def _rows(sides: Sequence[Side], rows: Sequence[int], metric: str, count: int) -> list[dict[str, Any]]:
    """Returns the `count` rows whose scores lie furthest apart."""
    scored = [(row, [side.answers[row]["scores"].get(metric) for side in sides]) for row in rows]
    apart = [(max(values) - min(values), row, values) for row, values in scored if None not in values]
    apart.sort(key=lambda item: (-item[0], item[1]))
    found = []
    for gap, row, values in apart[:count]:
        first = sides[0].answers[row]
        answers = [{"run": s.name, "answer": s.answers[row]["answer"], "score": v} for s, v in zip(sides, values, strict=True)]
        found.append({"row": row, "gap": gap, "prompt": first["prompt"], "reference": first["reference"], "answers": answers})
    return found


# ---- What the user reads


def show(result: Mapping[str, Any]) -> None:
    """Prints tables for settings, facts and scores, then the rows that differ most."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else max(LEAST_WIDTH, 34 + 48 * len(result["runs"])), highlight=False)

    def table(title: str, lines: Mapping[str, Sequence[Any]]) -> None:
        if not lines:
            return
        console.print(Text(title, style="bold"))
        found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("", *result["runs"]):
            found.add_column(Text(heading), overflow="fold")
        for name, values in lines.items():
            found.add_row(Text(name), *(Text(_shown(value)) for value in values))
        console.print(found)
        console.print()

    table("Configuration: keys that differ", result["settings"])
    table("Training", {name.removesuffix(BYTES): _sizes(name, values) for name, values in result["facts"].items()})
    table("Scores (95 % intervals)", _score_lines(result))
    for part in result["rows"]:
        console.print(Text(f"row {part['row']}: {label_of_metric(result['metric'])} {part['gap']:.3f} apart", style="bold"))
        for label, text in (("prompt", SPECIAL.sub("", part["prompt"])), ("reference", part["reference"])):
            console.print(Text(f"  {label}: {_indented(text)}"))
        for one in part["answers"]:
            console.print(Text(f"  {one['run']} ({one['score']:.3f}): {_indented(one['answer'])}"))
        console.print()
    for note in result["notes"]:
        print(f"note: {note}", file=sys.stderr)


def _sizes(name: str, values: Sequence[Any]) -> list[Any]:
    """Returns bytes as people read them."""
    return [f"{value / 2**30:.2f} GiB" if value and name.endswith(BYTES) else value for value in values]


def _indented(text: str) -> str:
    """Returns a text of several lines that stands clear of the names."""
    return text.strip().replace("\n", "\n    ")


def _score_lines(result: Mapping[str, Any]) -> dict[str, list[Any]]:
    lines: dict[str, list[Any]] = {name: list(values) for name, values in result["losses"].items()}
    for metric, values in result["scores"].items():
        label = label_of_metric(metric)
        lines[label] = [f"{v['mean']:.4f} [{v['low']:.4f}, {v['high']:.4f}], n = {v['n']}" for v in values]
        if found := result["differences"].get(metric):
            lines[f"  {label}, paired difference"] = ["" if d is None else _difference(d) for d in found]
    return lines | {name: list(values) for name, values in result["benchmarks"].items()}


def _difference(value: Mapping[str, Any]) -> str:
    return f"{value['mean']:+.4f} [{value['low']:+.4f}, {value['high']:+.4f}] {value['verdict']}, n = {value['n']}"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, default=str)
