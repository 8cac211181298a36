"""`make eval`: decide which weights are scored on which rows and how, and show saved scores again. No torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.metrics import OF_ANSWERS, label_of_metric
from sft_play.errors import CheckpointError, DataError, UserError
from sft_play.files import file_sha256, read_json, text_sha256, typed_path
from sft_play.launch.run_folder import find_run, has_started
from sft_play.launch.runs import short_path
from sft_play.model.resolve import check_trained, weights_sha256
from sft_play.plan.architecture import shape_of
from sft_play.plan.plan import Plan, make_stamp
from sft_play.runs.adapters import count_trained, run_around
from sft_play.runs.checkpoints import label_of, weights_folder
from sft_play.runs.folder import (
    LEAST_ROWS,
    RunFolder,
    cache_folder,
    data_name,
    metrics_of,
    of_memory,
    read_scores,
    runs_folder,
)
from sft_play.runs.manifest import is_state_file
from sft_play.runs.prepared import Prepared, PreparedSplit, ResolvedModel
from sft_play.runs.stamp import Stamp, compare, own_stamp, refuse
from sft_play.text import as_typed, tell

if TYPE_CHECKING:
    from sft_play.config.call import Call
    from sft_play.config.load import LoadedConfig
    from sft_play.config.schema import Config, DataSource

BASE = "base"
"""`CHECKPOINT=base`: the model before any training."""
SCORING = frozenset(
    {
        "eval.metrics",
        "eval.max_seconds",
        "eval.samples",
        "eval.batch_size",
        "train.predict_with_generate",
        "train.generation_num_beams",
        "train.generation_max_new_tokens",
    }
)
"""Keys that may differ from the run's configuration when its own rows are scored."""
OTHER_ROWS = frozenset(
    {"data.val_path", "data.validation", "data.bad_rows", "data.overlong", "data.num_proc", "model.max_seq_len"}
)
"""Keys that may differ as well when other rows are scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The weights of a run that are scored."""

    label: str
    folder: Path | None
    """`model/` or a checkpoint; `None` for the base."""
    step: int
    content: str
    """sha256 over the files that hold the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRows:
    """The rows to score."""

    split: PreparedSplit
    name: str | None = None
    """Part of the evaluation folder's name; `None` for a run's own validation rows."""
    path: str | None = None
    """As the user typed it; `None` for a run's own."""
    model: ResolvedModel | None = None
    """The model whose tokenizer prepared them; `None` for a run's own."""


def main(call: Call) -> int:
    """Score, or show the saved scores if weights, data and settings are the same."""
    check_options(call)
    run = find_run(call.options["RUN"], writes=True) if "RUN" in call.options else None
    weights = find_weights(run, call.options.get("CHECKPOINT")) if run else None
    loaded = read_settings(call)
    if run and weights and weights.folder:
        check_stamp(run, loaded.config, weights.folder)
    rows = find_rows(call, loaded, run)
    if rows is None or not rows.split.rows:
        named = f"the run `{run.name}`" if run else f"`{call.options.get('CONFIG')}`"
        hint = "DATA=file.jsonl scores other rows; `data.validation` (a fraction or sources) holds rows out of training"
        raise DataError(f"{named} has no validation rows to score", hint=hint)
    if run is None:
        assert rows.model is not None, "only a run has validation rows"
        run = plain_run(loaded, rows.model)
        weights = find_weights(run, BASE)
    assert weights is not None, "a run has weights, and a plain model is its own base"
    folder = run.evaluation(weights.step, rows.name)
    scores = read_scores(folder)
    config = _with_earlier_metrics(loaded.config, scores or {})
    settings = settings_of(config, run, weights, rows)
    # Scores that a time budget cut short are never reused.
    if scores and scores.get("complete") is not False and scores.get("settings", {}).get("key") == settings["key"]:
        tell("already scored: weights, data and settings are the same")
        scores["settings"]["rows_trained"] = settings["rows_trained"]
    else:
        from sft_play.evaluation.held_out import score_run

        scores = score_run(run, weights.folder, rows.split, folder, step=weights.step, config=config, settings=settings)
        if run.report.is_file():
            from sft_play.launch.commands import write_report_of

            write_report_of(run)
    return call.show(
        {"run": run.name, "weights": weights.label, "folder": str(folder), **scores},
        f"run          {run.name}, {whose(run, weights)}",
        *table(scores),
        f"files        {folder}",
    )


def whose(run: RunFolder, weights: Weights) -> str:
    """Return in words which weights these are; a base may be what another run made."""
    if weights.label != BASE:
        return f"{weights.label} (step {weights.step})"
    base = Prepared.load(run.prepared).model
    stamp = own_stamp(Path(base.path))
    return f"base {short_path(base.name)}" + (f", tuned (step {stamp.step})" if stamp else " (step 0)")


def _with_earlier_metrics(config: Config, scores: Mapping[str, Any]) -> Config:
    """Add the built-in metrics of earlier `scores` of the same rows, which new ones replace."""
    earlier = [name for name in metrics_of(scores) if name in OF_ANSWERS and name not in config.eval.metrics]
    return replace(config, eval=replace(config.eval, metrics=[*earlier, *config.eval.metrics])) if earlier else config


def table(scores: Mapping[str, Any]) -> list[str]:
    """Return the lines of the report that the user reads."""
    lines = []
    if data := scores["settings"].get("data"):
        lines.append(f"data         {data}")
    if warning := of_memory(scores["settings"]):
        lines.append(f"warning      {warning}")
    lines.append(f"loss         {scores['loss']:.4f}   over {scores['label_tokens']} label tokens")
    lines.append(f"perplexity   {scores['perplexity']:.6g}")
    for source, part in scores.get("sources", {}).items():
        lines.append(
            f"  {source}: loss {part['loss']:.4f}, perplexity {part['perplexity']:.3f}, {part['label_tokens']} label"
            " tokens"
        )
    for metric, value in metrics_of(scores).items():
        interval = f"95 % interval {value['low']:.4f} to {value['high']:.4f}"
        few = ", too few to compare" if value["n"] < LEAST_ROWS else ""
        lines.append(f"{label_of_metric(metric):<12} {value['mean']:.4f}   {interval}, n = {value['n']}{few}")
    if classification := scores.get("classification"):
        from sft_play.evaluation.scores import label_lines

        lines += ["", *label_lines(classification), ""]
    if scores.get("complete") is False:
        lines.append(
            f"answered     {scores['answers']} of {scores['answers_asked']}: the time budget ended (`eval.max_seconds`)"
        )
    return lines


def find_weights(run: RunFolder, checkpoint: str | None) -> Weights:
    """Return the weights that `CHECKPOINT=` names: `step-000040`, `best`, `last` or `base`.

    `None` means `model/`, or the last checkpoint if there is no `model/`. A folder in which nothing was trained (a
    plain model's) has only its base. Raise `CheckpointError`, which lists the existing checkpoints.
    """
    untrained = not has_started(run) and not run.model.is_dir() and not run.checkpoints.is_dir()
    if checkpoint == BASE or (checkpoint is None and untrained):
        return Weights(label=BASE, folder=None, step=0, content=Prepared.load(run.prepared).model.fingerprint)
    folder = weights_folder(run, checkpoint)
    check_trained(folder)
    step = Stamp.load(folder).step if folder == run.model else int(folder.name.removeprefix("step-"))
    return Weights(label=label_of(run, folder), folder=folder, step=step, content=_content(folder))


def check_stamp(run: RunFolder, config: Config, weights: Path) -> None:
    """Print how this configuration differs from the stamp of `weights`.

    Raise `CheckpointError` for another base, tokenizer, backend or adapter shape.
    """
    now = make_stamp(config, Plan.load(run.plan), Prepared.load(run.prepared))
    for warning in refuse(compare(Stamp.load(weights), now, "eval"), f"`{label_of(run, weights)}`"):
        tell(warning)


def check_options(call: Call) -> None:
    """Raise `UserError` for options that conflict, or that do not determine what is scored."""
    options = call.options
    keys = {override.key for override in call.overrides}
    if "RUN" in options:
        for name, instead in (
            ("MODEL", "CHECKPOINT=base scores the run's base"),
            ("CONFIG", "a run keeps its configuration"),
        ):
            if name in options:
                raise UserError(f"`RUN` and `{name}` are both given", hint=f"give one of them; {instead}")
        call.refuse_keys(SCORING | OTHER_ROWS, "a finished run")
        changed = sorted(keys & (OTHER_ROWS - {"data.val_path", "data.validation"}))
        if changed and not _gives_rows(call):
            raise UserError(
                f"`{changed[0]}` would change how the run's own rows were made",
                hint="use it with other rows only: DATA=file.jsonl",
            )
        return
    if "CHECKPOINT" in options:
        raise UserError(
            "`CHECKPOINT` belongs to a run, and `RUN` is missing", hint="make eval RUN=name-of-a-run CHECKPOINT=best"
        )
    if "MODEL" not in options and "CONFIG" not in options:
        hint = "make eval RUN=name-of-a-run, or make eval MODEL=folder-or-hub-id DATA=file.jsonl"
        raise UserError("`RUN` is missing", hint=hint)
    if "MODEL" in options and "model.name" in keys:
        raise UserError("`MODEL` and `model.name` are both given", hint="give one of them")
    if "CONFIG" not in options and not _gives_rows(call):
        hint = "make eval MODEL=folder-or-hub-id DATA=file.jsonl, or CONFIG= with validation data"
        raise UserError("`MODEL` has no rows, and `DATA` is missing", hint=hint)


def _gives_rows(call: Call) -> bool:
    return "DATA" in call.options or any(o.key in ("data.val_path", "data.validation") for o in call.overrides)


def read_settings(call: Call) -> LoadedConfig:
    """Return the configuration of the run or plain model, with the overrides of this call. Raise `UserError`."""
    from sft_play.config.call import note_consent
    from sft_play.config.layers import Override, config_path
    from sft_play.config.load import load_config, override_config, read_config

    overrides = list(call.overrides)
    if data := call.options.get("DATA"):
        if _gives_rows(replace(call, options={})):
            raise UserError("`DATA` and a key of validation data are both given", hint="give one of them")
        overrides.append(Override(key="data.val_path", text=data, origin=f"DATA={data}"))
    if "RUN" in call.options:
        loaded = read_config(find_run(call.options["RUN"]).config)
    elif "CONFIG" in call.options:
        loaded = load_config(
            config_path(call.options["CONFIG"]), [o for o in overrides if not o.key.startswith("data.val")]
        )
    else:
        name = next((o for o in overrides if o.key == "model.name"), None)
        loaded = load_config(None, [name or Override(key="model.name", text=call.options["MODEL"], origin="MODEL")])
    if "MODEL" in call.options and "CONFIG" in call.options:
        overrides.append(Override(key="model.name", text=call.options["MODEL"], origin="MODEL"))
    task = loaded.config.tuning.task
    if any(o.key in ("data.val_path", "data.validation") for o in overrides):
        # Groups matter where a fraction is held out.
        group_by = loaded.config.data.group_by if all(o.key != "data.val_path" for o in overrides) else None
        bare = replace(loaded.config.data, val_path=None, validation=None, group_by=group_by)
        # Rows of any format are scored, whatever the run learnt.
        tuning = replace(loaded.config.tuning, task="mixed" if "RUN" in call.options else task)
        loaded = replace(loaded, config=replace(loaded.config, data=bare, tuning=tuning))
    loaded = override_config(loaded, overrides)
    rows = loaded.config.data
    sources = rows.sources
    if "MODEL" in call.options and (origin := run_around(typed_path(call.options["MODEL"]))):
        sources = sources or read_config(origin.config).config.data.sources
    if data and isinstance(rows.validation, list) and (form := _read_as(Path(data), sources, task)):
        if form["filter"]:
            tell(f"note: only rows that pass the run's filter are scored: {form['filter']}")
        rows = replace(rows, validation=[replace(source, **form) for source in rows.validation])
        loaded = replace(loaded, config=replace(loaded.config, data=rows))
    note_consent(loaded)
    return loaded if "RUN" in call.options or loaded.typed("model.max_seq_len") else _within_context(loaded)


def _read_as(path: Path, sources: Sequence[DataSource], task: str) -> dict[str, Any]:
    """Return `columns` and `filter` of the first of the run's sources that suits a table's first row.

    Raise `DataError` for a table that has the columns of no source, and of no format that the task takes.
    """
    from sft_play.config.data_rules import MISSING, Condition, look_up, refused_format
    from sft_play.config.yaml_files import scalar_text
    from sft_play.data.formats import FORMATS
    from sft_play.data.readers import TABLES, read_file
    from sft_play.data.sources import rename
    from sft_play.data.streams import kind

    named = [source for source in sources if source.columns or source.filter]
    if not named or kind(path) not in TABLES or not path.is_file():
        return {}
    row = next((row for _, row in read_file(path) if not isinstance(row, DataError)), {})
    problem = None
    for source in named:
        rule = source.filter
        try:
            renamed = rename(row, source.columns)
        except DataError as error:
            problem = problem or (error.message, source.columns)
            continue
        try:
            rule and Condition(rule)({**row, **renamed})
        except DataError:  # the table lacks what the filter reads
            rule = None
        if source.columns or rule:
            return {"columns": source.columns, "filter": rule}
    forms = [form for form, (columns, _) in FORMATS.items() if row.keys() >= set(columns)]
    if row and problem and all(refused_format(task, form) for form in forms):
        message, names = problem
        columns = {new: "NAME" if look_up(row, old) is MISSING else old for new, old in names.items()}
        typed = as_typed(scalar_text([{"path": str(path), "columns": columns}]))
        raise DataError(f"the run's {message}", place=str(path), hint=f"with the file's names: DATA_VALIDATION={typed}")
    return {}


def _within_context(loaded: LoadedConfig) -> LoadedConfig:
    """Lower the default of `model.max_seq_len` to the model's context length, since nobody typed it."""
    model = loaded.config.model
    length = min(model.max_seq_len, shape_of(model).max_positions or model.max_seq_len)
    return replace(loaded, config=replace(loaded.config, model=replace(model, max_seq_len=length)))


def find_rows(call: Call, loaded: LoadedConfig, run: RunFolder | None) -> ScoredRows | None:
    """Return the rows to score, prepared if necessary: the ones the call names, else those of the run or the YAML file.

    Return `None` if there are none. Raise `DataError` for data that cannot be prepared, and `UserError` for a fraction
    without data.
    """
    config = loaded.config
    validation = config.data.validation
    if run is not None and not _gives_rows(call):
        return _own_rows(run)
    if isinstance(validation, list):
        prepared = _prepare(replace(loaded, config=only_rows(config, validation, run)), scored=True)
        split, path = prepared.train, ", ".join(source.path for source in validation)
    elif validation and run is not None:
        raise UserError(
            f"`data.validation` is `{validation}`: a fraction of which data?",
            hint="DATA=file.jsonl scores all rows of a file",
        )
    elif validation:
        prepared = _prepare(loaded)
        split, path = prepared.validation, ", ".join(source.path for source in config.data.sources)
    else:
        return None
    assert split is not None, "preparation returns the rows that it was asked for"
    return ScoredRows(
        split=split, name=data_name(path.partition(", ")[0], split.fingerprint), path=path, model=prepared.model
    )


def _own_rows(run: RunFolder) -> ScoredRows | None:
    split = Prepared.load(run.prepared).validation
    if split is None or not split.rows:
        return None
    if not Path(split.path).is_dir():
        from sft_play.config.load import read_config

        tell(f"the prepared rows are missing from `{split.path}`; preparing them again")
        again = _prepare(read_config(run.config), day=split.day).validation
        if again is None or again.fingerprint != split.fingerprint:
            hint = "restore the data, or score it as it is now: DATA=file.jsonl"
            raise CheckpointError(f"the validation data of the run `{run.name}` has changed since", hint=hint)
        split = again
    return ScoredRows(split=split)


def only_rows(config: Config, sources: list[DataSource], run: RunFolder | None) -> Config:
    """Return the configuration that prepares `sources` with the run's model, template, masks and style."""
    from sft_play.config.schema import EvalConfig, ModelConfig, TrainConfig, TuningConfig

    model = replace(config.model, adapter=None)
    if run is not None and model.init == "random":
        # The run created its model and perhaps its tokenizer: use those, do not create new ones.
        folder = Path(Prepared.load(run.prepared).model.path)
        name = str(folder if folder.is_dir() else run.model)
        model = ModelConfig(name=name, max_seq_len=model.max_seq_len, trust_remote_code=model.trust_remote_code)
    train = TrainConfig(seed=config.train.seed, loss_on=config.train.loss_on)
    data = replace(config.data, sources=sources, validation=None, train_path=None, val_path=None, group_by=None)
    return replace(
        config, model=model, tuning=TuningConfig(task=config.tuning.task), data=data, train=train, eval=EvalConfig()
    )


def _prepare(loaded: LoadedConfig, *, scored: bool = False, day: str | None = None) -> Prepared:
    """Return the prepared data of a configuration, from the cache's index (no torch) or from a separate process."""
    from sft_play.config.load import save_config
    from sft_play.launch.attempt import obtain_prepared
    from sft_play.launch.process import end_by_signals
    from sft_play.runs.prepared import lookup

    if (cached := lookup(loaded.config)) and (day is None or (cached.validation and cached.validation.day == day)):
        if scored and cached.train:
            from sft_play.data.store import MANIFEST
            from sft_play.data.summary import summary

            tell(summary("evaluation", read_json(Path(cached.train.path) / MANIFEST)))
        return cached
    cache_folder().mkdir(parents=True, exist_ok=True)
    with end_by_signals(), tempfile.TemporaryDirectory(prefix="evaluate-", dir=cache_folder()) as folder:
        run = RunFolder(Path(folder) / "run")
        save_config(loaded, run.config)
        obtain_prepared(run, *(["--scored"] if scored else []), day=day)
        return Prepared.load(run.prepared)


def plain_run(loaded: LoadedConfig, model: ResolvedModel) -> RunFolder:
    """Return the run folder, with a plan but no training, that holds the evaluations of a plain model.

    It is named after the model and a hash of its settings, so that the next evaluation of that model finds it.
    """
    from sft_play.config.load import save_config
    from sft_play.config.schema import DataConfig, EvalConfig, TrainConfig
    from sft_play.plan.detect import detect
    from sft_play.plan.plan import LaunchRequest
    from sft_play.plan.sources import plan_for

    # Nothing is trained, but a plan needs a training to fit in memory: use the smallest.
    train = TrainConfig(batch_size=1, global_batch_size=1, gradient_checkpointing=True)
    tuning = replace(loaded.config.tuning, mode="qlora" if loaded.config.tuning.mode == "qlora" else "lora")
    typed_data = loaded.config.data
    data = DataConfig(chat_template=typed_data.chat_template, system=typed_data.system, style=typed_data.style)
    config = replace(loaded.config, data=data, train=train, eval=EvalConfig(), tuning=tuning)
    leaf = Path(config.model.name.rstrip("/")).name or "model"
    shaped = text_sha256(repr([config.model, tuning, data]))
    run = RunFolder(runs_folder() / f"model-{leaf}-{shaped[:8]}")
    prepared = Prepared(model=model, train=None, validation=None)
    if run.plan.is_file() and Prepared.load(run.prepared) == prepared:
        return run
    run.path.mkdir(parents=True, exist_ok=True)
    bare = replace(loaded, config=config)
    save_config(bare, run.config)
    prepared.save(run.prepared)
    plan_for(bare, detect(), LaunchRequest(command_strategy="single"), prepared).save(run.plan)
    return run


def settings_of(config: Config, run: RunFolder, weights: Weights, rows: ScoredRows) -> dict[str, Any]:
    """Return the settings of an evaluation, with `key`: their hash, weights and rows included."""
    prepared, plan = Prepared.load(run.prepared), Plan.load(run.plan)
    settings: dict[str, Any] = {
        "weights": weights.label,
        "weights_sha256": weights.content,
        "base_sha256": prepared.model.fingerprint,
        "rows_sha256": rows.split.fingerprint,
        "data": rows.path,
        "samples": config.eval.samples,
        "metrics": list(config.eval.metrics),
        "max_seconds": config.eval.max_seconds,
        "seed": config.train.seed,
        "batch_size": _batch_size(config, plan, rows.split),
        "generate": config.train.predict_with_generate,
        "num_beams": config.train.generation_num_beams,
        "max_new_tokens": config.train.generation_max_new_tokens,
    }
    key = text_sha256(json.dumps(settings, sort_keys=True))
    own = prepared.train if weights.folder else None
    before = prepared if own or config.tuning.adapter == "merge" else replace(prepared, adapter=None)
    trained = count_trained(rows.split, before, own)
    return {**settings, "key": key, "rows_trained": trained}


def _batch_size(config: Config, plan: Plan, split: PreparedSplit) -> int:
    """Return the plan's rows per batch, or fewer if these rows are longer than the plan assumed."""
    if config.eval.batch_size != "auto":
        return config.eval.batch_size
    planned = max(plan.longest_row, plan.row_tokens, 1)
    longer = max(1.0, split.longest / planned) if plan.longest_row or plan.row_tokens else 1.0
    return max(1, int(plan.eval_batch_size / longer))


def _content(folder: Path) -> str:
    """Return one hash over the names and contents of the weight files and the files that shape them."""
    weights = sorted(
        path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin") and not is_state_file(path.name)
    )
    shaping = ("config.json", "adapter_config.json", "tokenizer.json")
    others = sorted(path for path in folder.iterdir() if path.suffix == ".jinja" or path.name in shaping)
    lines = [f"{path.name} {digest}\n" for path, digest in zip(weights, weights_sha256(weights), strict=True)]
    lines += [f"{path.name} {file_sha256(path)}\n" for path in others]
    return text_sha256("".join(sorted(lines)))
