"""`make sweep`: one configuration with many values of some keys, each combination an ordinary run, ranked at the
end.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sft_play.config.call import Call, enter_unsloth
from sft_play.config.keys import find_key, variable_name
from sft_play.config.layers import Override, config_path
from sft_play.config.load import flatten, load_config, read_config
from sft_play.config.metrics import BEST, OF_LOSS, VALIDATE, best_model, never_evaluated
from sft_play.config.names import hint_elsewhere, suggest
from sft_play.config.reader import INVALID, Mismatch, read_record, shown
from sft_play.config.schema import Config
from sft_play.config.yaml_files import YamlNode, read_yaml, scalar_text
from sft_play.errors import DataError, UserError, raise_all, typed_here
from sft_play.evaluation.compare import compare, read_sides
from sft_play.evaluation.compare import show as show_comparison
from sft_play.files import typed_path
from sft_play.launch.commands import start_run
from sft_play.launch.rehearse import rehearse, usual_strategy
from sft_play.launch.resume import refuse_changes, started_run
from sft_play.launch.run_folder import choose_name
from sft_play.launch.runs import SWEEP, Summary, list_run
from sft_play.launch.verdict import Outcome
from sft_play.plan.plan import command_of
from sft_play.plan.show import parse_price
from sft_play.runs.folder import RunFolder, metric_rows, runs_folder
from sft_play.runs.gate import eval_command, read_facts
from sft_play.schedulers.slurm import is_queued
from sft_play.schedulers.slurm import main as write_job
from sft_play.text import duration, figure, list_some, plural, table, tell

STOPPED = (130, 143)
OF_SLURM = ("SUBMIT", "HARDWARE", "NUM_NODES")
"""Options that only a job takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The content of a sweep's file."""

    keys: dict[str, Any]
    """Dotted key -> list of values."""
    method: Literal["grid"] = "grid"
    metric: str | None = None
    """Score that ranks the runs: `loss`, `eval_loss`, `eval_rougeL`, ...; default: `train.metric_for_best_model`, or
    `loss` without evaluation.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A combination of values."""

    name: str
    values: Mapping[str, str]
    origin: str

    def __str__(self) -> str:
        return f"{self.name}: " + ", ".join(f"{key}={text}" for key, text in self.values.items())

    def overrides(self) -> tuple[Override, ...]:
        """Return its values as overrides, with `launch.auto_resume`, so that a repeated command continues its run."""
        values = {**self.values, "launch.auto_resume": "true"}
        return tuple(Override(key=key, text=text, origin=f"{SWEEP} {self.origin}") for key, text in values.items())


@dataclass(frozen=True, slots=True)
class Result:
    """A trial and the summary of its run."""

    trial: Trial
    summary: Summary
    longer: bool = False
    """Whether the run has made more steps than the sweep asks for."""
    code: int = 0
    """Exit code of this command's own attempt; a run that failed before its workers started left no files."""

    @property
    def complete(self) -> bool:
        return self.longer or self.summary.state == "finished"

    @property
    def state(self) -> str:
        """How the run ended, as `make runs` says it."""
        state = f"failed ({self.code})" if self.code else self.summary.state
        return f"{state} ({self.summary.risen})" if self.summary.risen else state

    def score(self, metric: str) -> float | None:
        """Return the run's score, or `None` if it is not complete or has no finite value."""
        score = self.summary.loss if metric == "loss" else self.summary.scores.get(metric)
        return score if self.complete and score is not None and math.isfinite(score) else None


def main(call: Call) -> int:
    """Plan all runs, train them in turn or as a Slurm array, and print them ranked; a repeated command continues."""
    for name in ("CONFIG", "SWEEP"):
        if name not in call.options:
            raise UserError(f"`make sweep` needs `{name}`", hint="make sweep CONFIG=my.yaml SWEEP=sweep.yaml")
    if not (slurm := call.flag("SLURM")) and (slurm_only := [name for name in OF_SLURM if name in call.options]):
        raise UserError(
            f"`{slurm_only[0]}` is for a sweep by Slurm",
            hint="SLURM=1, or omit it: runs are trained here, one after the other",
        )
    path, config = typed_path(call.options["SWEEP"]), config_path(call.options["CONFIG"])
    sweep = read_sweep(path)
    for override in call.overrides:
        if override.key in sweep.keys:
            text = f"`{override.key}` was typed, but it is also a key of the sweep"
            raise UserError(text, place=override.origin, hint="give it once")
        if slurm and override.key == "slurm.array" and not override.text.startswith("%"):
            text = "the indices of a sweep's array are those of its runs"
            raise UserError(text, place=override.origin, hint="SLURM_ARRAY=%2 trains two runs at a time")
    loaded = load_config(config, call.overrides).config
    if loaded.tuning.backend == "unsloth":
        enter_unsloth("sweep")
    lora, scales = loaded.tuning.lora, {"tuning.lora.alpha", "tuning.lora.rslora"}
    if "tuning.lora.r" in sweep.keys and not lora.rslora and scales.isdisjoint(sweep.keys):
        tell(f"note: `tuning.lora.alpha` stays {lora.alpha:g}, so each rank has another scale, alpha / r")
    name = choose_name(call.options.get("RUN_NAME") or f"{config.stem}-{path.stem}", config)
    trials = [
        Trial(name=f"{name}-{index:02d}", values=dict(zip(sweep.keys, values, strict=True)), origin=str(path))
        for index, values in enumerate(itertools.product(*sweep.keys.values()), 1)
    ]
    metric = _metric(sweep, load_config(config, [*call.overrides, *trials[0].overrides()]).config, path)
    longer = say_plan(call, trials)
    return by_slurm(call, name, trials, longer, metric) if slurm else in_turn(call, trials, longer, metric)


def in_turn(call: Call, trials: Sequence[Trial], longer: Container[str], metric: str) -> int:
    """Train the runs one after the other, except those that have trained `longer`, and rank all. Return the exit code,
    that of the first failure if a run failed.
    """
    results: list[Result] = []
    for place, trial in enumerate(trials, 1):
        if trial.name in longer:
            results.append(result_of(trial, longer))
            continue
        tell(f"\nsweep: run {place} of {len(trials)}, {trial}")
        trial_call = _call(call, trial.name, *trial.overrides())
        try:
            _, outcome = start_run(trial_call, usual_strategy(trial_call))
        except UserError as error:
            outcome = Outcome(code=error.exit_code, message=error.render())
        except SystemExit as error:  # the process that prepares has reported its own error
            if not isinstance(error.code, int) or error.code in STOPPED:
                raise
            outcome = Outcome(code=error.code)
        if stopped := outcome.late_stop or (outcome.code in STOPPED and outcome.code):
            tell("stopped; the same command continues the sweep")
            return stopped
        if outcome.message:
            tell(outcome.message)
        if outcome.code:
            tell(f"\n{trial.name} failed with code {outcome.code}; the same command tries it again")
        results.append(replace(result_of(trial, longer), code=outcome.code))
    metric = usable_metric(metric, results)
    show(call, rank_results(results, metric), metric)
    return next((result.code for result in results if result.code), 0)


def _metric(sweep: Sweep, config: Config, path: Path) -> str:
    """Return the score that ranks the runs. Raise `UserError` if no run will have it."""
    train, why = config.train, never_evaluated(config)
    metric = sweep.metric or ("loss" if why else train.metric_for_best_model)
    metric = metric if metric == "loss" or metric.startswith("eval_") else f"eval_{metric}"
    if metric != "loss" and why:
        raise UserError(f"runs are ranked by `{metric}`, and {why}", place=str(path), hint=VALIDATE)
    wrong = best_model(replace(config, train=replace(train, metric_for_best_model=metric))) if metric != "loss" else ()
    for conflict in wrong:
        if conflict.key == BEST:
            raise UserError(f"runs are ranked by `{metric}`{conflict.text}", place=str(path), hint=conflict.hint)
    return metric


def by_slurm(call: Call, name: str, trials: Sequence[Trial], longer: Container[str], metric: str) -> int:
    """Rank the complete runs, and write a job array of the others, which `SUBMIT=1` submits."""
    results = [result_of(trial, longer) for trial in trials]
    done = [result for result in results if result.complete]
    if done and not (call.json and len(done) < len(trials)):
        metric = usable_metric(metric, done)
        show(call, rank_results(done, metric), metric)
    tasks = {
        index: (result.trial.name, [f"{variable_name(key)}={text}" for key, text in result.trial.values.items()])
        for index, result in enumerate(results, 1)
        if result not in done
    }
    if not tasks:
        return 0
    if call.flag("SUBMIT") and is_queued(name):
        raise UserError(
            f"the sweep `{name}` is in the queue already",
            hint=f"squeue --me --name={name}; when it has ended, type the same command again",
        )
    throttle = "".join((call.load_config().config.slurm.array or "").partition("%")[1:])
    array = Override(key="slurm.array", text=",".join(map(str, tasks)) + throttle, origin=call.options["SWEEP"])
    return write_job(_call(call, name, array), tasks)


def result_of(trial: Trial, longer: Container[str] = ()) -> Result:
    """Return a trial with its run's current summary."""
    return Result(trial, list_run(RunFolder(runs_folder() / trial.name)), trial.name in longer)


def usable_metric(metric: str, results: Sequence[Result]) -> str:
    """Return the metric that can rank the runs, and print a note if it is another."""
    if metric == "loss" or any(metric in result.summary.scores for result in results):
        return metric
    instead = "eval_loss" if any("eval_loss" in result.summary.scores for result in results) else "loss"
    tell(f"note: no run has `{metric}`; ranked by {'`eval_loss`' if instead != 'loss' else 'the loss of training'}")
    return instead


def read_sweep(path: Path) -> Sweep:
    """Return a sweep file's content. Raise all mismatches together, with their lines."""
    node, problems = read_yaml(path), list[Mismatch]()
    sweep: Any = read_record(node, Sweep, "", problems) if isinstance(node.value, dict) else INVALID
    if sweep is INVALID and not problems:
        problems.append(Mismatch("", node, f"is `{shown(node)}`; expected `keys` with values"))
    if sweep is not INVALID and not sweep.keys:
        problems.append(Mismatch("keys", node, "is empty", "`keys: {train.learning_rate: [1e-4, 3e-4]}`"))
    values: dict[str, list[str]] = {}
    for key, part in node.value["keys"].value.items() if sweep is not INVALID else ():
        if find_key(key) is None:
            word, listed = suggest(key, options=()), "docs/configuration.md lists keys such as `train.learning_rate`"
            hint = hint_elsewhere(key) or (f"did you mean `{word}`?" if word else listed)
            problems.append(Mismatch(key, part, "is not a known key", hint))
        elif isinstance(part.value, list) and part.value:
            values[key] = [_text(value) for value in part.value]
            if len(set(values[key])) < len(values[key]):
                problems.append(Mismatch(key, part, "has a value twice"))
        else:
            problems.append(Mismatch(key, part, f"is `{shown(part)}`; expected a list of values"))
    raise_all(
        [
            UserError(
                f"`{mismatch.key}` {mismatch.problem}" if mismatch.key else f"the sweep {mismatch.problem}",
                place=f"{path}:{mismatch.node.line}",
                hint=mismatch.hint,
            )
            for mismatch in problems
        ]
    )
    return Sweep(keys=values, metric=sweep.metric)


def check_unchanged(trial: Trial) -> None:
    """Raise `UserError` if a trial's run was started with other values, before the file was changed."""
    run = RunFolder(runs_folder() / trial.name)
    if not run.config.is_file():
        return
    overrides = [Override(key=key, text=text, origin=trial.origin) for key, text in trial.values.items()]
    before, now = (flatten(read_config(run.config, values, of_run=False)) for values in ([], overrides))
    for key in trial.values:
        if (old := before.get(key)) != (new := now.get(key)):
            line = read_yaml(Path(trial.origin)).value["keys"].value[key].line
            raise UserError(
                f"`{key}` is {new} for the run `{run.name}`, which was started with {old}",
                place=f"{trial.origin}:{line}",
                hint="restore the value to continue the sweep; RUN_NAME=other starts another one",
            )


def say_plan(call: Call, trials: Sequence[Trial]) -> dict[str, int]:
    """Plan every run, so that a mistake in any is reported before the first starts, and print number, time and cost of
    all. Return the runs that have made more steps than the sweep asks for, with their steps.
    """
    price = parse_price(call.options.get("PRICE_PER_HOUR"))
    for trial in trials:
        check_unchanged(trial)
    seconds, targets = list[float | None](), set[str]()
    longer, extended = dict[str, int](), dict[str, int]()
    for trial in trials:
        try:
            rehearsal = rehearse(_call(call, trial.name, *trial.overrides()))
            plan, past = rehearsal.plan, result_of(trial).summary
            if rehearsal.absent and past.state != "finished" and not call.flag("SLURM"):
                raise DataError(f"there is no `{rehearsal.absent[0]}`")
            is_longer = bool(plan.steps) and past.step > (plan.steps or 0)  # `make resume` trained it on
            if (run := started_run(trial.name)) and not is_longer:
                refuse_changes(call, rehearsal.loaded, run)
        except UserError:
            tell(f"sweep: nothing starts, because of {trial}")
            raise
        targets.add(command_of(plan.strategy))
        if is_longer:
            longer[trial.name] = past.step
        elif past.state != "finished" or plan.steps not in (None, past.steps):
            extended |= {trial.name: past.step} if past.state == "finished" else {}
            share = 1 - min(past.step, plan.steps) / plan.steps if plan.steps else 1.0
            seconds.append(None if plan.total_seconds is None else share * plan.total_seconds)
    if call.flag("SLURM") and len(targets) > 1:
        hint = "type LAUNCH_STRATEGY=, or make a sweep for each"
        raise UserError(
            f"all runs of an array start by one command, and these need {' and '.join(sorted(targets))}", hint=hint
        )
    lines = [f"sweep of {plural(len(trials), 'run')}"]
    lines += table([("run", *trials[0].values), *((trial.name, *trial.values.values()) for trial in trials)])
    forecasts = [forecast for forecast in seconds if forecast is not None]
    of = "in all" if len(seconds) == len(trials) else f"for {len(seconds)} with steps left"
    if not seconds:
        lines.append("all are finished")
    elif len(forecasts) == len(seconds):
        total = sum(forecasts)
        cost = f", cost about {figure(price * total / 3600)}" if price is not None else ""
        lines.append(f"about {duration(total)} {of}, without preparation and start{cost}")
    else:
        lines.append(typed_here("the time is known once the data are prepared (`make data`)"))
    lines += [
        f"{what}: " + list_some([f"{name} ({plural(steps, 'step')})" for name, steps in runs.items()], 8)
        for what, runs in (
            ("trained on from where they finished", extended),
            ("left as they are, since they were trained on", longer),
        )
        if runs
    ]
    print(*lines, sep="\n", file=sys.stderr if call.json else sys.stdout, flush=True)
    return longer


def rank_results(results: Sequence[Result], metric: str) -> list[Result]:
    """Return the finished runs, best first, then the others."""
    sign = 1 if metric.removeprefix("eval_").partition("/")[0] in OF_LOSS else -1
    return sorted(results, key=lambda result: (result.score(metric) is None, sign * (result.score(metric) or 0.0)))


def show(call: Call, results: Sequence[Result], metric: str) -> None:
    """Print the runs, best first."""
    if call.json:
        facts = [
            {
                "run": result.trial.name,
                "values": dict(result.trial.values),
                metric: result.score(metric),
                "state": "failed" if result.code else result.summary.state,
                "code": result.code or result.summary.code,
                "risen": result.summary.risen,
            }
            for result in results
        ]
        print(json.dumps(facts, indent=2))
        return
    scores = [metric, *(["eval_loss"] if any("eval_loss" in result.summary.scores for result in results) else [])]
    scores = list(dict.fromkeys(scores))
    rows = [
        (
            result.trial.name,
            *result.trial.values.values(),
            *("-" if (score := result.score(name)) is None else figure(score, 4) for name in scores),
            result.state,
            str(result.summary.step),
            duration(result.summary.seconds or 0.0),
        )
        for result in results
    ]
    print("", *table([("run", *results[0].trial.values, *scores, "state", "step", "time"), *rows]), sep="\n")
    best = [result.trial.name for result in results if result.score(metric) is not None][:2]
    if not_best := [text for result in results if (text := _worse_at_its_end(result, metric))]:
        print(
            f"\nnote: ranked by the best evaluation, but model/ is that of the last step: {list_some(not_best, 8)};"
            " `train.load_best_model_at_end: true` keeps the best"
        )
    if best:
        print(typed_here(f"\nto use the best: make infer RUN={best[0]}"))
        print(typed_here(f"to train the best on: make resume RUN={best[0]} TRAIN_MAX_STEPS=MORE"))
    if len(best) > 1:
        hint = typed_here(f'make compare RUNS="{" ".join(best)}"')
        try:
            compared = compare(read_sides(best, None), None, 0)
        except UserError:
            print("\nthey have no evaluation in common; to compare their answers:")
            print(
                typed_here(
                    "\n".join([*(f"  {eval_command(RunFolder(runs_folder() / name))}" for name in best), f"  {hint}"])
                )
            )
        else:
            print()
            show_comparison(compared)
            print(f"with answers: {hint}")


def _worse_at_its_end(result: Result, metric: str) -> str:
    """Return a run with its last evaluation if its model has those weights and another evaluation was its best."""
    run, score = RunFolder(runs_folder() / result.trial.name), result.score(metric)
    keeps_best = read_facts(run.config).get("config", {}).get("train", {}).get("load_best_model_at_end")
    evaluations = [row[metric] for row in metric_rows(run.metrics) if row.get("kind") == "eval" and metric in row]
    if score is None or keeps_best or not evaluations or evaluations[-1] == score:
        return ""
    return f"{run.name} ({figure(evaluations[-1], 4)})"


def _call(call: Call, run_name: str, *ours: Override) -> Call:
    """Return the call of a run, or of the job for all runs."""
    options = {name: text for name, text in call.options.items() if name not in ("SWEEP", "PRICE_PER_HOUR", "SLURM")}
    typed = [override for override in call.overrides if override.key not in {each.key for each in ours}]
    return replace(call, options={**options, "RUN_NAME": run_name}, overrides=(*typed, *ours))


def _text(node: YamlNode) -> str:
    """Return a value as typed on a command line."""
    plain = node.plain()
    if isinstance(plain, list | dict):
        return json.dumps(plain)
    return node.text if node.text is not None else scalar_text(plain)
