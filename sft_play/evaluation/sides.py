"""What evaluations of several runs left, and which of their rows can be compared. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.errors import CheckpointError, DataError, UserError
from sft_play.evaluation.subject import Weights, find_weights
from sft_play.launch.run_folder import find_run, has_started
from sft_play.launch.summary import summary_of
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder, metrics_of, read_benchmarks, read_predictions, read_scores, run_path
from sft_play.runs.prepared import Prepared

if TYPE_CHECKING:
    from sft_play.config.schema import Config


NOT_SETTINGS = ("data.train_path", "data.val_path")
"""Keys that only stand for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the compared."""

    name: str
    """As the user said: `run` or `run@step-000040`."""
    run: RunFolder
    weights: Weights
    folder: Path
    """Where its scores are."""
    scores: Mapping[str, Any]
    answers: Mapping[int, Mapping[str, Any]]
    """Row -> a line of `predictions.jsonl`."""
    settings: Mapping[str, Any]
    """Its configuration: key -> value."""
    tokenizer: str

    def facts(self) -> dict[str, Any]:
        """Returns what is known of its training and size."""
        found: dict[str, Any] = {"weights": f"{self.weights.label} (step {self.weights.step})"}
        plan, prepared, one = Plan.load(self.run.plan), Prepared.load(self.run.prepared), summary_of(self.run)
        found |= {"model": prepared.model.name, "strategy": plan.strategy, "processes": plan.world_size}
        found |= {"precision": plan.precision, "global batch": plan.global_batch_size}
        if prepared.train:
            found |= {"training rows": prepared.train.rows, "training tokens": prepared.train.tokens}
        found |= {
            "steps": one.step or None,
            "training seconds": one.seconds if one.step else None,
            "tokens/s": one.tokens_per_second,
        }
        found |= {
            "peak memory (bytes)": one.peak_memory_bytes,
            "energy (kWh)": one.energy_kwh,
            "training loss, last step": one.loss,
        }
        return {name: value for name, value in found.items() if value is not None}


def read_sides(names: Sequence[str], data: str | None) -> list[Side]:
    """Returns what is known of each `run` or `run@checkpoint`. Raises `UserError` or `CheckpointError` for what is missing."""
    if len(names) < 2:
        raise UserError(f"`RUNS` names {len(names)} run; expected two or more", hint='make compare RUNS="first second"')
    if len(set(names)) < len(names):
        raise UserError("`RUNS` names a run twice", hint="one run at two steps: make compare RUNS='a@base a'")
    return [_side(name, data) for name in names]


def _side(name: str, data: str | None) -> Side:
    from sft_play.config.load import read_config

    bare, at, checkpoint = name.rpartition("@")
    if not at or run_path(name):
        bare, checkpoint = name, ""
    run = find_run(bare)
    if not run.plan.is_file() or not run.prepared.is_file():
        raise CheckpointError(f"the run `{run.name}` was never launched, so there is nothing to compare")
    weights = find_weights(run, checkpoint or None)
    folder = _evaluation(name, run, weights, data)
    scores = read_scores(folder)
    assert scores is not None, "_evaluation returns only what has scores"
    config = read_config(run.config).config
    return Side(
        name=name,
        run=run,
        weights=weights,
        folder=folder,
        scores=scores,
        answers={int(line["row"]): line for line in read_predictions(folder)},
        settings=_settings(config, trained=has_started(run)),
        tokenizer=Prepared.load(run.prepared).model.tokenizer_fingerprint,
    )


def _evaluation(name: str, run: RunFolder, weights: Weights, data: str | None) -> Path:
    """Returns the folder with the scores of these weights on the run's own rows, or on `data`: its path, or a folder's name."""
    base = run.evaluation(weights.step).name
    all_of_step = [run.evaluation(weights.step), *sorted(run.path.glob(f"eval/{base}-*"))]
    known = {folder: scores for folder in all_of_step if (scores := read_scores(folder)) is not None}
    if data is None:
        found = [folder for folder in known if folder.name == base]
    else:
        found = [f for f, scores in known.items() if data in (scores["settings"].get("data"), f.name.removeprefix(f"{base}-"))]
    if not found:
        how = f"make eval RUN={run.name}" + (f" CHECKPOINT={weights.label}" if weights.label != "model" else "")
        how += f" DATA={data}" if data else ""
        others = sorted(str(scores["settings"].get("data")) for folder, scores in known.items() if folder.name != base)
        hint = f"score it: {how}" + (f"; or compare what it was scored on: DATA={others[0]}" if others and not data else "")
        of_step = f"{f' on `{data}`' if data else ''} of its step {weights.step}"
        raise CheckpointError(f"`{name}` has no scores{of_step}", place=str(run.path / "eval"), hint=hint)
    chosen = max(found, key=lambda folder: (folder / "scores.json").stat().st_mtime)
    made_of = known[chosen]["settings"]
    if made_of.get("weights") == weights.label and made_of.get("weights_sha256") not in (None, weights.content):
        raise CheckpointError(
            f"the scores of `{name}` are older than its weights", place=str(chosen), hint=f"make eval RUN={run.name}"
        )
    return chosen


def _settings(config: Config, *, trained: bool) -> dict[str, Any]:
    """Returns key -> value; of a plain model without what is about training, which it never had."""
    plain = dataclasses.replace(config, train=dataclasses.replace(config.train, extra=dict(config.train.extra)))
    found = _flat(dataclasses.asdict(plain))
    for key in ("data.sources", "data.validation"):
        if isinstance(found[key], list):
            found[key] = [{k: v for k, v in source.items() if v not in (None, False, "auto", {})} for source in found[key]]
    return {key: value for key, value in found.items() if trained or key.partition(".")[0] in ("model", "tuning")}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and (value or not prefix):
        parts = [_flat(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items()]
        return {key: inner for part in parts for key, inner in part.items()}
    return {prefix: value}


def changed_settings(sides: Sequence[Side]) -> dict[str, list[Any]]:
    """Returns the keys in which the configurations differ, each with one value a side; `None` where a side has no such key."""
    keys = dict.fromkeys(key for side in sides for key in side.settings if key not in NOT_SETTINGS)
    found: dict[str, list[Any]] = {}
    for key in keys:
        known = [side.settings[key] for side in sides if key in side.settings]
        if any(value != known[0] for value in known):
            found[key] = [side.settings.get(key) for side in sides]
    return found


def shared_metrics(sides: Sequence[Side]) -> list[str]:
    """Returns the metrics that every side has, in the first one's order."""
    return [name for name in metrics_of(sides[0].scores) if all(name in metrics_of(side.scores) for side in sides)]


def shared_benchmarks(sides: Sequence[Side]) -> dict[str, list[float]]:
    """Returns standard benchmarks that every side has: `task metric` -> one value a side."""
    each = []
    for side in sides:
        tasks = (read_benchmarks(side.run.evaluation(side.weights.step)) or {}).get("tasks", {})
        each.append({f"{t} {m}": v["value"] for t, part in tasks.items() for m, v in part["metrics"].items()})
    return {name: [found[name] for found in each] for name in each[0] if all(name in found for found in each)}


def common_rows(sides: Sequence[Side]) -> tuple[list[int], list[str]]:
    """Returns the rows that all sides answered, and what the user must know about the others.

    Rows are the same when number and reference are, and the prompt, unless another tokenizer or template wrote it: then
    every prompt differs, and that is said. Raises `DataError` when no row is common.
    """
    first, notes = sides[0], []
    numbers = [row for row in first.answers if all(row in side.answers for side in sides)]
    same = [row for row in numbers if all(side.answers[row]["reference"] == first.answers[row]["reference"] for side in sides)]
    asked = [row for row in same if all(side.answers[row]["prompt"] == first.answers[row]["prompt"] for side in sides)]
    template = any(side.tokenizer != first.tokenizer or _template(side.settings) != _template(first.settings) for side in sides)
    if same and not asked and template:
        notes.append("the prompts differ, since templates or tokenizers do; rows are paired by number and reference")
        asked = same
    if all(side.answers for side in sides) and not asked:
        raise DataError(
            f"{' and '.join(f'`{side.name}`' for side in sides)} answered no row in common: their validation data differ",
            hint="score them on the same rows: make eval RUN=... DATA=file.jsonl for each, then make compare ... DATA=file.jsonl",
        )
    for side in sides:
        if left := len(side.answers) - len(asked):
            notes.append(f"{left} of {len(side.answers)} answers of `{side.name}` are left out: not every side has that row")
    if len({side.scores["settings"].get("rows_sha256") for side in sides} - {None}) > 1 and not template:
        notes.append("the validation rows are not all the same: losses are of different rows, answers of the common ones")
    for key in ("max_new_tokens", "num_beams"):
        made = [side.scores["settings"].get(key) for side in sides if side.answers]
        if len({value for value in made if value is not None}) > 1:
            notes.append(f"the answers were made differently: {key} {', '.join(map(str, made))}")
    for side in sides:
        if side.scores.get("complete") is False:
            notes.append(f"`{side.name}` was scored in part only: its time budget ended (`eval.max_seconds`)")
    return asked, notes


def _template(settings: Mapping[str, Any]) -> list[Any]:
    return [
        value for key, value in settings.items() if key.startswith("data.style.") or key in ("data.chat_template", "data.system")
    ]
