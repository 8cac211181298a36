"""`make eval RUN=`: loss, perplexity and ROUGE of a run's model on its validation rows, kept and shown again at once."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.errors import UserError
from sft_play.files import file_sha256, read_json
from sft_play.launch.run_folder import find_run
from sft_play.model.folder import check_trained
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared
from sft_play.runs.stamp import Stamp, compare, make_stamp, refuse
from sft_play.runs.weights import label_of, weights_folder

if TYPE_CHECKING:
    from sft_play.config.call import Call
    from sft_play.config.schema import Config

ALLOWED = frozenset(
    {
        "eval.samples",
        "eval.batch_size",
        "train.predict_with_generate",
        "train.generation_num_beams",
        "train.generation_max_new_tokens",
    }
)
"""What may differ from the run's configuration; anything else would score another model or other rows."""
BASE = "base"
"""`CHECKPOINT=base`: the model before any training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Which weights of a run are scored."""

    label: str
    folder: Path | None
    """`model/` or a checkpoint; `None` for the base."""
    step: int
    content: str
    """sha256 over the files that hold the weights."""


def main(call: Call) -> int:
    """Scores, or shows the kept scores when weights, data and settings are the same."""
    run = find_run(_required(call.options, "RUN"))
    config = _configuration(call, run)
    weights = find_weights(run, call.options.get("CHECKPOINT"))
    _check_stamp(run, config, weights)
    settings = _settings(config, run, weights)
    scores = kept_scores(run, weights.step, settings)
    if scores is None:
        from sft_play.training.evaluation import score_run

        scores = score_run(run, weights.folder, step=weights.step, config=config, settings=settings)
    else:
        print("scored before: weights, data and settings are the same", file=sys.stderr)
    folder = run.evaluation(weights.step)
    if call.json:
        print(json.dumps({"run": run.name, "weights": weights.label, "folder": str(folder), **scores}, indent=2))
    else:
        print(table(run.name, weights, scores, folder))
    return 0


def find_weights(run: RunFolder, wanted: str | None) -> Weights:
    """Returns the weights that `CHECKPOINT=` names (`step-000040`, `best`, `last`, `base`); `model/`, else the last, for `None`.

    Raises `CheckpointError` when there are none, with those that exist.
    """
    if wanted == BASE:
        return Weights(label=BASE, folder=None, step=0, content=Prepared.load(run.prepared).model.fingerprint)
    folder = weights_folder(run, wanted)
    check_trained(folder)
    step = Stamp.load(folder).step if folder == run.model else int(folder.name.removeprefix("step-"))
    return Weights(label=label_of(run, folder), folder=folder, step=step, content=_content(folder))


def kept_scores(run: RunFolder, step: int, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns earlier scores that were made of the same weights and rows in the same way."""
    folder = run.evaluation(step)
    try:
        scores: dict[str, Any] = read_json(folder / "scores.json")
    except (OSError, json.JSONDecodeError):
        return None
    complete = not scores.get("answers") or (folder / "predictions.jsonl").is_file()
    return scores if complete and scores.get("settings", {}).get("key") == settings["key"] else None


def table(name: str, weights: Weights, scores: Mapping[str, Any], folder: Path) -> str:
    """Returns what the user reads."""
    lines = [
        f"run          {name}, {'untuned base' if weights.label == BASE else weights.label} (step {scores['step']})",
        f"loss         {scores['loss']:.4f}   over {scores['label_tokens']} label tokens",
        f"perplexity   {scores['perplexity']:.3f}",
    ]
    for metric, label in (("rouge1", "ROUGE-1"), ("rouge2", "ROUGE-2"), ("rougeL", "ROUGE-L")):
        if metric in scores:
            value = scores[metric]
            interval = f"95 % interval {value['low']:.4f} to {value['high']:.4f}"
            lines.append(f"{label}      {value['mean']:.4f}   {interval}, n = {value['n']}")
    lines.append(f"files        {folder}")
    return "\n".join(lines)


def _configuration(call: Call, run: RunFolder) -> Config:
    refused = sorted({override.key for override in call.overrides} - ALLOWED)
    if refused:
        raise UserError(
            f"`make eval` cannot change {', '.join(f'`{key}`' for key in refused)} of a finished run",
            hint=f"it takes {', '.join(sorted(key.upper().replace('.', '_') for key in ALLOWED))}",
        )
    from sft_play.config.load import override_config, read_config

    loaded = read_config(run.config)
    return (override_config(loaded, call.overrides) if call.overrides else loaded).config


def _check_stamp(run: RunFolder, config: Config, weights: Weights) -> None:
    """Raises `CheckpointError` when the weights were made by another base, tokenizer, backend or adapter shape."""
    if weights.folder is None:
        return
    now = make_stamp(config, Plan.load(run.plan), Prepared.load(run.prepared))
    for warning in refuse(compare(Stamp.load(weights.folder), now, "eval"), f"`{weights.label}`"):
        print(warning, file=sys.stderr)


def _settings(config: Config, run: RunFolder, weights: Weights) -> dict[str, Any]:
    """Returns how the scores are made, with `key`: a hash over that, the weights and the rows."""
    prepared, plan = Prepared.load(run.prepared), Plan.load(run.plan)
    settings: dict[str, Any] = {
        "weights": weights.label,
        "weights_sha256": weights.content,
        "base_sha256": prepared.model.fingerprint,
        "rows_sha256": prepared.validation.fingerprint if prepared.validation else None,
        "samples": config.eval.samples,
        "seed": config.train.seed,
        "batch_size": plan.eval_batch_size if config.eval.batch_size == "auto" else config.eval.batch_size,
        "generate": config.train.predict_with_generate,
        "num_beams": config.train.generation_num_beams,
        "max_new_tokens": config.train.generation_max_new_tokens,
    }
    return {**settings, "key": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()}


def _content(folder: Path) -> str:
    """Returns one hash over the names and contents of the weights and what shapes them."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".jinja") or path.name in (
            "config.json",
            "adapter_config.json",
            "tokenizer.json",
        ):
            digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def _required(options: Mapping[str, str], name: str) -> str:
    if name not in options:
        raise UserError(f"`{name}` is missing", hint=f"make eval {name}=name-of-a-run")
    return options[name]
