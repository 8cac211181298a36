"""`python -m sft_play.prepare --run runs/NAME`: finds the model and prepares the data, once, before any process group exists.

Writes `prepared.json` into the run's folder. Prints what it took and what it left out.
"""

from __future__ import annotations

import argparse
import errno
import functools
import logging
import os
import sys
import warnings
from pathlib import Path

from sft_play.config.load import read_config
from sft_play.config.schema import Config
from sft_play.errors import HardwareError, UserError
from sft_play.launch.console import console_may_go
from sft_play.runs.folder import RunFolder, cache_folder
from sft_play.runs.prepared import Prepared, PreparedSplit
from sft_play.runs.prepared_index import remember


def main(arguments: list[str] | None = None) -> int:
    """Prepares one run and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, with config.json")
    run = RunFolder(parser.parse_args(arguments).run)
    try:
        with console_may_go():
            prepare_run(run)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        refused = _disk_problem(error)
        if refused is None:
            raise
        print(refused.render(), file=sys.stderr)
        return refused.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _disk_problem(error: OSError) -> HardwareError | None:
    """Returns what to say when a disk is full or cannot be written; `None` when the error is another one."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return None
    return HardwareError(
        f"the model or the prepared data cannot be written: {error.strerror or error}",
        place=str(error.filename or cache_folder()),
        hint=f"the cache is `{cache_folder()}`: free some space there, or set SFT_PLAY_CACHE to another folder",
    )


def prepare_run(run: RunFolder) -> Prepared:
    """Resolves the model, prepares the data, writes `prepared.json` and returns it. Raises `DataError`."""
    config = read_config(run.config).config
    _quiet()
    _offline_when_unreachable(config)
    from sft_play.data.prepare import prepare_data
    from sft_play.model.scratch import resolve, says
    from sft_play.model.tokenizer import load_tokenizer

    model = resolve(config)
    _tell(says(config, model))
    train, validation = prepare_data(config, model, functools.cache(lambda: load_tokenizer(model.path)))
    _tell(_summary("training data", train))
    if validation:
        _tell(_summary("validation data", validation))
    prepared = Prepared(model=model, train=train, validation=validation)
    prepared.save(run.prepared)
    remember(config, prepared)
    return prepared


def _offline_when_unreachable(config: Config) -> None:
    """Sets the libraries' offline mode, before they are imported, where the hub is wanted but does not answer.

    They would retry for half a minute; offline they take what is cached, or say at once what is missing.
    """
    from sft_play.data.read import is_hub
    from sft_play.plan.hub import hub_reachable

    sources = [*config.data.sources, *(config.data.validation if isinstance(config.data.validation, list) else [])]
    names = [name for name in (config.model.name, config.model.tokenizer) if name and name != "train"]
    wanted = any(not Path(name).expanduser().is_dir() for name in names) or any(is_hub(source) for source in sources)
    if wanted and not hub_reachable():
        os.environ["HF_HUB_OFFLINE"] = "1"


def _summary(name: str, split: PreparedSplit) -> str:
    share = split.label_tokens / split.tokens
    dropped = f"; {split.dropped} rows left out (longer than model.max_seq_len)" if split.dropped else ""
    dropped += f"; {split.truncated} rows cut to model.max_seq_len" if split.truncated else ""
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
