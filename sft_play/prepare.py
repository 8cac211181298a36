"""`python -m sft_play.prepare --run runs/NAME`: finds the model and prepares the data, once, before any process group exists.

Writes `prepared.json` into the run's folder. Prints what it took and what it left out.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

from sft_play.config.load import read_config
from sft_play.errors import UserError
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared, PreparedSplit
from sft_play.runs.prepared_index import remember


def main(arguments: list[str] | None = None) -> int:
    """Prepares one run and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, with config.json")
    run = RunFolder(parser.parse_args(arguments).run)
    try:
        prepare_run(run)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def prepare_run(run: RunFolder) -> Prepared:
    """Resolves the model, prepares the data, writes `prepared.json` and returns it. Raises `DataError`."""
    _quiet()
    from sft_play.data.prepare import prepare_data
    from sft_play.model.resolve import resolve_model, says
    from sft_play.model.tokenizer import load_tokenizer

    config = read_config(run.config).config
    model = resolve_model(config.model)
    _tell(says(model))
    train, validation = prepare_data(config, model, load_tokenizer(model.path))
    _tell(_summary("training data", train))
    if validation:
        _tell(_summary("validation data", validation))
    prepared = Prepared(model=model, train=train, validation=validation)
    prepared.save(run.prepared)
    remember(config, prepared)
    return prepared


def _summary(name: str, split: PreparedSplit) -> str:
    share = split.label_tokens / split.tokens
    dropped = f"; {split.dropped} rows left out (longer than model.max_seq_len)" if split.dropped else ""
    return (
        f"{name}: {split.rows:,} rows, {split.tokens:,} tokens, {share:.0%} of them trained, "
        f"median row {split.median}, longest {split.longest}{dropped}"
    )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _quiet() -> None:
    """Keeps libraries from talking about what this program says itself."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
