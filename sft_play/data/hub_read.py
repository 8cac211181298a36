"""Rows of a dataset of the hub: downloaded, or streamed row by row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sft_play.config.schema import DataSource
from sft_play.data.arrow_read import Placed, without_nulls
from sft_play.data.left import LeftOut
from sft_play.errors import DataError, first_line
from sft_play.plan.hub import hub_reachable

DEFAULT_SPLIT = "train"
COMMIT = re.compile("[0-9a-f]{40}")
SECONDS = 30
"""How long the hub may take to say which commit a revision is."""


def read_hub(source: DataSource, hint: str, left: LeftOut) -> Iterator[Placed]:
    """Yields the rows of a hub dataset, whose commit `left` keeps. Raises `DataError`; `hint` says how paths of files are meant."""
    import datasets
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    split = source.split or DEFAULT_SPLIT
    number = 0
    try:
        revision = _commit(source)
        left.commit = revision if revision and COMMIT.fullmatch(revision) else None
        loaded: Any = datasets.load_dataset(
            source.path, source.config, split=split, revision=revision, streaming=source.streaming
        )
        for number, row in enumerate(loaded, 1):
            yield f"{source.path} ({split}), row {number}", {name: without_nulls(value) for name, value in row.items()}
    except (OSError, ValueError, RuntimeError, HfHubHTTPError, httpx2.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise _problem(source, error, number, hint) from error


def _commit(source: DataSource) -> str | None:
    """Returns the commit that the revision stands for. Raises what `huggingface_hub` raises where there is none.

    The library itself takes whatever it has cached of the dataset when a revision is not found, and only logs that.
    """
    from huggingface_hub import HfApi

    if not hub_reachable():
        return source.revision
    return str(HfApi().dataset_info(source.path, revision=source.revision, timeout=SECONDS).sha)


def _problem(source: DataSource, error: Exception, rows: int, hint: str) -> DataError:
    first = first_line(error)
    if rows:
        return DataError(f"reading broke off after row {rows:,}: {first}", place=source.path, hint="try again")
    if not hub_reachable():
        return DataError(
            "there is no such file, and the hub cannot be reached", place=source.path,
            hint=f"check the network, or HF_HOME with a cached copy; {hint}",
        )  # fmt: skip
    return DataError(
        f"neither a file nor a hub dataset that can be loaded: {first}", place=source.path,
        hint="streaming takes whole splits: `rows` limits them" if source.streaming and "[" in (source.split or "")
        else "check the name, `config`, `split`, `revision` and the network; a private dataset needs HF_TOKEN",
    )  # fmt: skip
