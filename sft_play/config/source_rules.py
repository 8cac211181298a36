"""Rules of the entries of `data.sources` and `data.validation`. As those of `config.rules`: no effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sft_play.config.filters import Condition
from sft_play.config.rule import Origins, problem
from sft_play.config.schema import Config, DataSource
from sft_play.config.yaml_source import scalar_text
from sft_play.errors import DataError, UserError


def entries(config: Config, origins: Origins) -> Iterator[UserError]:
    """What no single source can mean."""
    for key, index, source in _sources(config):
        name = f"{key}[{index}]"
        if source.rows is not None and source.rows < 1:
            yield problem(
                origins,
                key,
                f"`{name}.rows` is {scalar_text(source.rows)}; expected an integer >= 1",
                "leave it out to take all rows",
            )
        for text in ("filter", "name", "split", "config", "revision"):
            given = getattr(source, text)
            if given is not None and not given.strip():
                yield problem(origins, key, f"`{name}.{text}` is empty", "leave it out")
        for new, old in source.columns.items():
            if not isinstance(new, str) or not isinstance(old, str) or not new.strip() or not old.strip():
                yield problem(
                    origins, key, f"`{name}.columns` has the entry `{new}: {old}`; expected the names of two columns",
                    "`columns` is written `{question: name in the file}`",
                )  # fmt: skip
                break


def filters(config: Config, origins: Origins) -> Iterator[UserError]:
    """Each `filter` can be read; what it says of a row is seen when there are rows."""
    for key, index, source in _sources(config):
        if source.filter is None or not source.filter.strip():
            continue
        try:
            Condition(source.filter)
        except DataError as error:
            told = error.message.removeprefix("`filter` ")
            yield problem(origins, key, f"`{key}[{index}].filter` {told}", error.hint)


def names(config: Config, origins: Origins) -> Iterator[UserError]:
    """Scores and counts are told by name, so no two sources of a split share one."""
    for key, sources in _lists(config):
        said = [source.name for source in sources if source.name is not None]
        twice = sorted(name for name, count in Counter(said).items() if count > 1)
        if twice:
            yield problem(
                origins, key, f"`{key}` has two sources with the name `{twice[0]}`", "counts and scores are told by name"
            )


def weights(config: Config, origins: Origins) -> Iterator[UserError]:
    """Weights are shares: none is negative, some are not 0, and either every training source has one or none has."""
    for key, index, source in _sources(config):
        if source.weight is not None and source.weight < 0:
            yield problem(
                origins, key, f"`{key}[{index}].weight` is {source.weight:g}; a share cannot be negative", "0 leaves a source out"
            )  # fmt: skip
        elif source.weight is not None and key == "data.validation":
            yield problem(
                origins, key, f"`{key}[{index}].weight` is {source.weight:g}, but validation is not mixed: every row is scored",
                "leave it out; `rows` limits a source",
            )  # fmt: skip
    given = [source.weight for source in config.data.sources]
    if any(weight is not None and weight < 0 for weight in given):
        return
    missing = [index for index, weight in enumerate(given) if weight is None]
    if missing and len(missing) < len(given):
        yield problem(
            origins, "data.sources", f"`data.sources[{missing[0]}]` has no `weight`, though other sources have one",
            "give every source a weight, or none: then each row is taken once",
        )  # fmt: skip
    elif given and not missing and not any(given):
        yield problem(
            origins, "data.sources", "all weights of `data.sources` are 0, so nothing would be trained", "leave them out"
        )


def _lists(config: Config) -> Iterator[tuple[str, list[DataSource]]]:
    yield "data.sources", config.data.sources
    if isinstance(config.data.validation, list):
        yield "data.validation", config.data.validation


def _sources(config: Config) -> Iterator[tuple[str, int, DataSource]]:
    for key, sources in _lists(config):
        for index, source in enumerate(sources):
            yield key, index, source


RULES = (entries, filters, names, weights)
