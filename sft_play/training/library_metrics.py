"""Metrics of the `evaluate` library: from the hub, from its cache, or from a local folder or script. No torch of our own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sft_play.config.metrics import LIBRARY, library_parts, short_name
from sft_play.errors import DataError, first_line
from sft_play.files import typed_path
from sft_play.runs.consent import may_run
from sft_play.training.scores import Interval, mean_interval, resamples

FEW_RESAMPLES = 100
"""For a metric that is no mean of single scores: each resample computes the whole metric anew."""


class LibraryMetric:
    """`evaluate:NAME_OR_PATH[:SCORE]`."""

    def __init__(self, metric: str) -> None:
        """Loads it. Raises `DataError` when it cannot be loaded, or computes no number from texts."""
        self.metric, self.name = metric, short_name(metric)
        self.where, self.score = library_parts(metric)
        self._module = _load(self.metric, self.where)

    def check(self) -> None:
        """Computes the metric of two answers. Raises `DataError` when no number comes of it."""
        self.compute(["the first text", "another one"], ["the first text", "a different one"])

    def compute(self, references: Sequence[str], answers: Sequence[str]) -> float:
        """Returns the metric of all answers together. Raises `DataError` when it fails or returns no single number."""
        try:
            found = self._module.compute(predictions=list(answers), references=list(references))
        except Exception as error:  # a stranger's code raises anything
            said = first_line(error)
            hint = "metrics of answers take two lists of texts, `predictions` and `references`"
            raise DataError(f"the metric `{self.metric}` cannot score texts: {said}", hint=hint) from error
        return self._number(found or {})

    def each(self, references: Sequence[str], answers: Sequence[str]) -> list[float] | None:
        """Returns the metric of each answer alone, where their mean is the metric of all; else `None`."""
        single = [self.compute([reference], [answer]) for reference, answer in zip(references, answers, strict=True)]
        total = self.compute(references, answers)
        is_mean = math.isclose(sum(single) / len(single), total, rel_tol=1e-6, abs_tol=1e-9)
        return single if is_mean else None

    def whole(self, references: Sequence[str], answers: Sequence[str], each: Sequence[float] | None) -> Interval:
        """Returns the metric of all answers; its interval from single scores, or from the metric of resampled answers."""
        if each is not None:
            return mean_interval(each)
        total = self.compute(references, answers)
        again = [
            self.compute([references[i] for i in picks], [answers[i] for i in picks])
            for picks in resamples(len(answers), times=FEW_RESAMPLES)
        ]
        return Interval.around(total, again, n=len(answers))

    def _number(self, found: Mapping[str, Any]) -> float:
        numbers = {name: float(value) for name, value in found.items() if _is_number(value)}
        wanted = self.score or (next(iter(numbers)) if len(numbers) == 1 else Path(self.where).stem)
        if wanted not in numbers:
            known = ", ".join(f"`{LIBRARY}{self.where}:{name}`" for name in numbers)
            problem = f"has no score `{self.score}`" if self.score else "has several scores" if numbers else "returns no number"
            raise DataError(f"the metric `{self.metric}` {problem}", hint=f"one of {known}" if known else None)
        if not math.isfinite(numbers[wanted]):
            raise DataError(f"the metric `{self.metric}` returned {numbers[wanted]}")
        return numbers[wanted]


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def _load(metric: str, where: str) -> Any:
    """Returns the library's module for `where`; its files go to a folder of this process, since ranks share nothing here."""
    path = typed_path(where)
    local, reached = path.exists(), True
    if not local and (where.startswith((".", "/", "~")) or where.endswith(".py")):
        raise DataError(f"the metric `{metric}` is not there: no folder or script `{where}`", hint="a folder holds NAME/NAME.py")
    if not may_run(path.resolve() if local else where, "metrics"):
        raise DataError(
            f"the metric `{metric}` is Python code, which the configuration of a run asks for, and is not run unasked",
            hint=f"read that code; to let it run, type EVAL_METRICS={metric} with the command; in a run's folder it"
            " is never run: copy it elsewhere first",
        )
    if not local:
        from sft_play.plan.hub import offline_unless_reachable

        reached = offline_unless_reachable()
    import evaluate

    evaluate.disable_progress_bar()
    try:
        return evaluate.load(str(path) if local else where, keep_in_memory=True)
    except ImportError as error:
        raise DataError(f"the metric `{metric}` needs a package that is not installed: {error}") from error
    except Exception as error:  # the library raises many kinds for what is one thing: it cannot be had
        said = first_line(error)
        if not reached:
            said = "the hub does not answer, and nothing of that name is kept from before"
        hint = "check the name at https://huggingface.co/evaluate-metric, or give a local folder: evaluate:path/to/metric"
        raise DataError(f"the metric `{metric}` cannot be loaded: {said}", hint=hint) from error


def check_library_metrics(names: Sequence[str]) -> None:
    """Loads and tries every metric of the library among `names`. Raises `DataError`."""
    for name in names:
        if name.startswith(LIBRARY):
            LibraryMetric(name).check()
