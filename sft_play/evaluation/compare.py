"""`make compare RUNS="a b"`: runs side by side, with paired intervals, and the answers that differ most. No torch."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sft_play.config.load import read_config, saved_form
from sft_play.config.metrics import higher_is_better, label_of_metric
from sft_play.errors import CheckpointError, UserError
from sft_play.evaluation.evaluate import BASE, Weights, find_weights
from sft_play.launch.run_folder import find_run, has_started
from sft_play.launch.runs import HOW_RUN, flat_keys, summary_of
from sft_play.plan.plan import Plan
from sft_play.runs.folder import (
    RunFolder,
    metric_rows,
    metrics_of,
    of_memory,
    read_predictions,
    read_scores,
    run_path,
)
from sft_play.runs.gate import eval_command
from sft_play.runs.prepared import Prepared
from sft_play.text import duration, energy, tell

if TYPE_CHECKING:
    from sft_play.config.call import Call
    from sft_play.evaluation.scores import Together

ROWS = 5
LOSSES = ("loss", "perplexity")
BYTES = " (bytes)"
SPECIAL = re.compile(r"<\|[^|<>\n]{1,40}\|>|</?s>|\[/?INST\]|<(?:bos|eos|(?:start|end)_of_turn)>")
"""Tokens that separate turns in chat templates; they are removed from prompts that are shown."""
LEAST_WIDTH = 100
"""Columns of the output when it does not go to a terminal."""
NOT_SETTINGS = ("data.train_path", "data.val_path", *HOW_RUN)
"""Keys that are shorthand for others, or that change nothing that a run learns."""


def main(call: Call) -> int:
    """Compare the runs and print tables, or JSON."""
    if "RUNS" not in call.options:
        raise UserError(
            "`RUNS` is missing", hint='make compare RUNS="first second", or RUNS="run@base run@step-000040 run"'
        )
    rows = call.integer("ROWS")
    sides = read_sides(call.options["RUNS"].replace(",", " ").split(), call.options.get("DATA"))
    result = compare(sides, call.options.get("METRIC"), ROWS if rows is None else rows)
    if call.json:
        print(json.dumps(result, indent=2, ensure_ascii=False, default=str))
    else:
        show(result)
    return 0


def compare(sides: Sequence[Side], metric_name: str | None, count: int) -> dict[str, Any]:
    """Return everything that is shown; `count` rows are chosen by `metric_name`. Raise `UserError`."""
    rows, notes = common_rows(sides)
    scored, answered = [side for side in sides if side.metrics], [side for side in sides if side.answered]
    metrics = [name for name in scored[0].metrics if all(name in side.metrics for side in scored)] if scored else []
    metric = _metric(metric_name, metrics)
    unscored = [side for side in sides if not side.scores]
    notes += [
        f"`{side.name}` has no scores for step {side.weights.step}; score it: {how_to_score(side.run, side.weights)}"
        for side in unscored
    ]
    single = [name for name in metrics if rows and answered[0].score(rows[0], name) is not None]
    if metric and rows and metric not in single:
        instead = f"; METRIC={single[0]} shows some" if single else ""
        notes.append(f"`{metric}` scores all answers together, so none of them are shown{instead}")
    if not unscored and not (metrics and len(scored) == len(sides)):
        notes.append(
            "the runs have no score of answers in common; `make eval` with the same EVAL_METRICS= and with"
            " TRAIN_PREDICT_WITH_GENERATE=true scores answers"
        )
    return {
        "runs": [side.name for side in sides],
        "folders": [str(side.folder) for side in sides],
        "settings": changed_settings(sides),
        "facts": _side_by_side([side.facts() for side in sides]),
        "losses": _side_by_side([side.losses() for side in sides]),
        "scores": {name: [side.metrics.get(name) for side in sides] for name in metrics},
        "labels": _labels(sides),
        "differences": {name: _differences(sides, rows, name) for name in metrics} if rows else {},
        "against": answered[0].name if answered else None,
        "metric": metric,
        "rows": _rows_apart(answered, rows, metric, count) if metric else [],
        "notes": notes,
    }


def _metric(metric_name: str | None, metrics: Sequence[str]) -> str | None:
    """Return the metric by which rows are chosen."""
    if metric_name is None:
        return "rougeL" if "rougeL" in metrics else next(iter(metrics), None)
    name = metric_name.removeprefix("eval_")
    if name not in metrics:
        close = get_close_matches(name, metrics, n=1, cutoff=0.5)
        choices = f"they have in common: {', '.join(f'`{m}`' for m in metrics) or 'no score of answers'}"
        raise UserError(
            f"`METRIC` is `{metric_name}`, which not all of the runs have",
            hint=f"did you mean `METRIC={close[0]}`? {choices}" if close else choices,
        )
    return name


def _labels(sides: Sequence[Side]) -> dict[str, list[Any]]:
    """Return label -> each side's `precision`, `recall`, `f1`; none if a side with scores was not scored by labels."""
    tables = [side.scores.get("classification") or {} for side in sides]
    lines = _side_by_side(tables).items()
    return {
        name: values for name, values in lines if all(v or not s.metrics for v, s in zip(values, sides, strict=True))
    }


def _side_by_side(each: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return name -> the value of each side, `None` for a side without it."""
    return {
        name: [facts.get(name) for facts in each] for name in dict.fromkeys(name for facts in each for name in facts)
    }


def _differences(sides: Sequence[Side], rows: Sequence[int], metric: str) -> list[dict[str, Any] | None]:
    """Return each side's paired difference from the first with answers, `None` for that itself and without answers."""
    from sft_play.evaluation.scores import paired_difference, together

    def score_of(side: Side) -> Together | None:
        if not side.answered:
            return None
        references, answers = ([side.answers[row][key] for row in rows] for key in ("reference", "answer"))
        return together(metric, references, answers, [side.score(row, metric) for row in rows])

    scores = [score_of(side) for side in sides]
    first, more_is_better = next(filter(None, scores), None), higher_is_better(metric) is True
    return [
        asdict(paired_difference(first, other, len(rows), more_is_better=more_is_better))
        if first and other and other is not first
        else None
        for other in scores
    ]


def _rows_apart(sides: Sequence[Side], rows: Sequence[int], metric: str, count: int) -> list[dict[str, Any]]:
    """Return the `count` rows whose scores differ most; rows with equal scores are none of them."""
    scored = {row: [side.score(row, metric) for side in sides] for row in rows}
    gaps = {row: max(values) - min(values) for row, values in scored.items() if None not in values}
    apart = [row for row, gap in gaps.items() if gap > 0]
    entries = []
    for row in sorted(apart, key=lambda row: (-gaps[row], row))[:count]:
        answers = [
            {"run": side.name, "answer": side.answers[row]["answer"], "score": score}
            for side, score in zip(sides, scored[row], strict=True)
        ]
        first = sides[0].answers[row]
        entries.append(
            {
                "row": row,
                "place": first.get("place", ""),
                "gap": gaps[row],
                "prompt": first["prompt"],
                "reference": first["reference"],
                "answers": answers,
            }
        )
    return entries


# ---- What the user reads


def show(result: Mapping[str, Any]) -> None:
    """Print tables of settings, facts and scores, then the rows that differ most."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(
        width=None if sys.stdout.isatty() else max(LEAST_WIDTH, 34 + 48 * len(result["runs"])), highlight=False
    )
    paired = any(any(differences) for differences in result["differences"].values())
    differ = f"; paired differences are from {result['against']}" if paired else ""
    tables = {
        "Configuration: keys that differ": result["settings"],
        "Training": result["facts"],
        f"Scores (95 % intervals{differ})": _score_lines(result),
    }
    for title, lines in tables.items():
        if not lines:
            continue
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("", *result["runs"]):
            table.add_column(Text(heading), overflow="fold")
        for name, values in lines.items():
            table.add_row(Text(name.removesuffix(BYTES)), *(Text(_shown(value, name)) for value in values))
        console.print(Text(title, style="bold"), table, "", sep="\n")
    for part in result["rows"]:
        console.print(
            Text(
                f"row {part['place'] or part['row']}: {label_of_metric(result['metric'])} {part['gap']:.3f} apart",
                style="bold",
            )
        )
        texts = {"prompt": SPECIAL.sub("", part["prompt"]), "reference": part["reference"]}
        texts |= {f"{answer['run']} ({answer['score']:.3f})": answer["answer"] for answer in part["answers"]}
        for label, text in texts.items():
            indented = text.strip().replace("\n", "\n    ")
            console.print(Text(f"  {label}: {indented}"))
        console.print()
    for note in result["notes"]:
        tell(f"note: {note}")


def _score_lines(result: Mapping[str, Any]) -> dict[str, list[Any]]:
    lines: dict[str, list[Any]] = {name: list(values) for name, values in result["losses"].items()}
    for metric, values in result["scores"].items():
        label = label_of_metric(metric)
        lines[label] = [
            f"{v['mean']:.4f} [{v['low']:.4f}, {v['high']:.4f}], n = {v['n']}" if v else "-" for v in values
        ]
        if any(differences := result["differences"].get(metric) or []):
            lines[f"  {label}, paired difference"] = [
                f"{d['mean']:+.4f} [{d['low']:+.4f}, {d['high']:+.4f}] {d['verdict']}, n = {d['n']}" if d else ""
                for d in differences
            ]
    for label, values in result["labels"].items():
        lines[f"  {label}: F1, precision, recall"] = [
            f"{v['f1']:.3f}, {v['precision']:.3f}, {v['recall']:.3f}, n = {v['n']}" if v else "-" for v in values
        ]
    return lines


def _shown(value: Any, name: str) -> str:
    if value is None:
        return "-"
    if name.endswith(BYTES):
        return f"{value / 2**30:.2f} GiB"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return (
        f"{value:,}"
        if type(value) is int
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, default=str)
    )


# The runs that are compared: their evaluations, and the rows that they have in common.


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the runs that are compared."""

    name: str
    """As the user typed it: `run` or `run@step-000040`."""
    run: RunFolder
    weights: Weights
    folder: Path
    """Holds its scores."""
    scores: Mapping[str, Any]
    """Empty if it was not scored yet."""
    answers: Mapping[int, Mapping[str, Any]]
    """Row -> a line of `predictions.jsonl`."""
    settings: Mapping[str, Any]
    """Its configuration: key -> value."""
    tokenizer: str

    @property
    def metrics(self) -> Mapping[str, Any]:
        return metrics_of(self.scores)

    @property
    def answered(self) -> bool:
        """Whether its answers were scored."""
        return bool(self.metrics and self.answers)

    def scored_with(self, key: str) -> Any:
        """Return a setting of the evaluation."""
        return self.scores.get("settings", {}).get(key)

    @property
    def rows(self) -> str | None:
        """Hash of the rows that its losses are of, with their tokens."""
        split = Prepared.load(self.run.prepared).validation  # of scores while training, too
        return cast(str | None, self.scored_with("rows_sha256")) or (split.fingerprint if split else None)

    def score(self, row: int, metric: str) -> Any:
        """Return the score of one answer, `None` for a metric without per-answer scores."""
        return self.answers[row]["scores"].get(metric)

    def losses(self) -> dict[str, float]:
        """Return its losses on held-out rows: as scored, else as measured when it was trained."""
        if self.scores:
            return {key: self.scores[key] for key in LOSSES}
        by_step = {row["step"]: row for row in metric_rows(self.run.metrics) if row.get("kind") == "eval"}
        measured = by_step.get(self.weights.step, {})
        return {key: measured[f"eval_{key}"] for key in LOSSES if f"eval_{key}" in measured}

    def facts(self) -> dict[str, Any]:
        """Return the known facts of its training and size."""
        plan, prepared, summary = Plan.load(self.run.plan), Prepared.load(self.run.prepared), summary_of(self.run)
        facts: dict[str, Any] = {
            "weights": f"{self.weights.label} (step {self.weights.step})",
            "model": prepared.model.name,
            "strategy": summary.strategy,
            "processes": plan.world_size,
            "precision": plan.precision,
            "global batch": plan.global_batch_size,
            "training rows": prepared.train.rows if prepared.train else None,
            "training tokens": prepared.train.tokens if prepared.train else None,
        }
        if self.weights.label != BASE:  # which no training made
            facts |= {
                "learning rate": plan.learning_rate,
                "steps": summary.step or None,
                "time": duration(summary.seconds) if summary.step and summary.seconds else None,
                "tokens/s": summary.tokens_per_second,
                "peak memory (bytes)": summary.peak_memory_bytes,
                "energy": None if summary.energy_kwh is None else energy(summary.energy_kwh),
                "training loss, last step": summary.loss,
            }
        return {name: value for name, value in facts.items() if value is not None}


def read_sides(names: Sequence[str], data: str | None) -> list[Side]:
    """Read each `run` or `run@checkpoint`. Raise `UserError` or `CheckpointError` for missing runs or scores."""
    if len(set(names)) < max(2, len(names)):
        raise UserError(
            f"`RUNS` is `{' '.join(names)}`; expected two or more different runs",
            hint='make compare RUNS="first second", or one run at two steps: RUNS="a@base a"',
        )
    return [_side(name, data) for name in names]


def _side(name: str, data: str | None) -> Side:
    bare, at, checkpoint = name.rpartition("@")
    if not at or run_path(name):
        bare, checkpoint = name, ""
    run = find_run(bare)
    if not run.plan.is_file() or not run.prepared.is_file():
        raise CheckpointError(f"the run `{run.name}` was never launched, so there is nothing to compare")
    weights = find_weights(run, checkpoint or None)
    folder, scores = _evaluation(name, run, weights, data)
    return Side(
        name=name,
        run=run,
        weights=weights,
        folder=folder,
        scores=scores,
        answers={int(line["row"]): line for line in read_predictions(folder)},
        settings=_settings(run),
        tokenizer=Prepared.load(run.prepared).model.tokenizer_fingerprint,
    )


def _evaluation(name: str, run: RunFolder, weights: Weights, data: str | None) -> tuple[Path, Mapping[str, Any]]:
    """Return the folder and scores of these weights on the run's own rows, or on `data` (a path or a folder name).

    The scores are empty if the weights were never scored on anything.
    """
    own = run.evaluation(weights.step)
    folders = [own, *sorted(run.path.glob(f"eval/{own.name}-*"), key=lambda folder: -folder.stat().st_mtime)]
    evaluations = {folder: scores for folder in folders if (scores := read_scores(folder)) is not None}
    for folder, scores in evaluations.items():
        settings = scores["settings"]
        data_names = (settings.get("data"), folder.name.removeprefix(f"{own.name}-"))
        matches = folder == own if data is None else data in data_names
        if not matches:
            continue
        if settings.get("weights") == weights.label and settings.get("weights_sha256") not in (None, weights.content):
            raise CheckpointError(
                f"the scores of `{name}` are older than its weights",
                place=str(folder),
                hint=how_to_score(run, weights, data),
            )
        return folder, scores
    if data is None and not evaluations:
        return own, {}
    others = sorted(str(scores["settings"].get("data")) for folder, scores in evaluations.items() if folder != own)
    raise CheckpointError(
        f"`{name}` has no scores{f' on `{data}`' if data else ''} for step {weights.step}",
        place=str(run.path / "eval"),
        hint=f"score it: {how_to_score(run, weights, data)}"
        + (f"; or compare on the data that it was scored on: DATA={others[0]}" if others and not data else ""),
    )


def how_to_score(run: RunFolder, weights: Weights, data: str | None = None) -> str:
    """Return the command that scores these weights on `data`, else on the run's own rows, or on a file if it has
    none.
    """
    data = data or (None if Prepared.load(run.prepared).validation else "FILE")
    checkpoint = f" CHECKPOINT={weights.label}" if weights.label != "model" else ""
    return f"{eval_command(run)}{checkpoint}{f' DATA={data}' if data else ''}"


def _settings(run: RunFolder) -> dict[str, Any]:
    """Return key -> value of the configuration; for a plain model only the keys that do not concern training."""
    trained = has_started(run)
    return {
        key: value
        for key, value in flat_keys(saved_form(read_config(run.config))["config"])
        if key not in NOT_SETTINGS
        and (trained or key.startswith(("model.", "tuning.")))
        and ("[" not in key or value not in (None, False, "auto", {}))
    }


def changed_settings(sides: Sequence[Side]) -> dict[str, list[Any]]:
    """Return the keys whose values differ, each with the value of every side, `None` for a side without that key.

    A plain model has no keys of training, and therefore does not differ in them.
    """
    settings = _side_by_side([side.settings for side in sides])
    sections = [{key.partition(".")[0] for key in side.settings} for side in sides]
    changed = {}
    for key, values in settings.items():
        present = [value for value, own in zip(values, sections, strict=True) if key.partition(".")[0] in own]
        if any(value != present[0] for value in present):
            changed[key] = values
    return changed


def common_rows(sides: Sequence[Side]) -> tuple[list[int], list[str]]:
    """Return the rows that all sides with answers have, and notes for the user about the others.

    Rows are the same if number, reference and prompt are. Under another tokenizer or template every prompt differs:
    then number and reference are enough, and a note says so.
    """
    notes, answered = list[str](), [side for side in sides if side.answered]
    first = (answered or sides)[0]

    def agreeing(rows: Sequence[int], key: str) -> list[int]:
        return [row for row in rows if all(side.answers[row][key] == first.answers[row][key] for side in answered)]

    same = agreeing([row for row in first.answers if all(row in side.answers for side in answered)], "reference")
    paired = agreeing(same, "prompt")
    template = any(side.tokenizer != first.tokenizer or _template(side) != _template(first) for side in sides)
    if same and not paired and template:
        notes.append("the prompts differ, since templates or tokenizers do; rows are paired by number and reference")
        paired = same
    apart = len(answered) > 1 and not paired
    if apart:
        evals = ", ".join(f"{eval_command(side.run)} DATA=FILE" for side in answered)
        names = " and ".join(f"`{side.name}`" for side in answered)
        notes.append(
            f"{names} answered no row in common, so each loss and score is of other rows; to"
            f" compare them, score all on one file: {evals}, then this command with DATA=FILE"
        )
    for side in sides:
        if not apart and side.answered and (skipped := len(side.answers) - len(paired)):
            notes.append(
                f"{skipped} of {len(side.answers)} answers of `{side.name}` are skipped: not every side has that row"
            )
        if side.scores.get("complete") is False:
            notes.append(f"`{side.name}` was scored only in part: its time budget ended (`eval.max_seconds`)")
        if warning := of_memory(side.scores.get("settings", {})):
            notes.append(f"`{side.name}`: {warning}")
    if len({side.rows for side in sides} - {None}) > 1 and not template and not apart:
        notes.append(
            "the validation rows differ: each loss covers its run's rows, scores of answers cover the common rows"
        )
    for key in ("max_new_tokens", "num_beams"):
        values = [side.scored_with(key) for side in sides if side.answers]
        if len({value for value in values if value is not None}) > 1:
            notes.append(f"the answers were generated with different settings: {key} {', '.join(map(str, values))}")
    return paired, notes


def _template(side: Side) -> list[Any]:
    keys = ("data.style.", "data.chat_template", "data.system")
    return [value for key, value in side.settings.items() if key.startswith(keys)]
