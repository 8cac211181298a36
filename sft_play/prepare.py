"""Resolve the model and prepare the data once, before any process group exists; print what was used and what was
skipped.

`make data` does only this, also on a machine without a GPU; `python -m sft_play.prepare --run runs/NAME`, which the
launcher starts, writes `prepared.json` into the run's folder.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.load import read_config
from sft_play.config.metrics import LIBRARY
from sft_play.config.schema import Config
from sft_play.errors import DataError, UserError
from sft_play.files import make_once, read_json, text_sha256, translate_disk_errors, typed_path
from sft_play.launch.process import console_may_go, end_by_signals
from sft_play.launch.run_folder import find_run
from sft_play.plan.architecture import check_length, positions_in
from sft_play.plan.epoch import mixture_of
from sft_play.runs.adapters import count_trained, made_folder, parent_of, run_around
from sft_play.runs.folder import RunFolder, cache_folder
from sft_play.runs.prepared import ChatFormat, ParentAdapter, Prepared, ResolvedModel, day_of, remember, sources_of
from sft_play.runs.stamp import MADE
from sft_play.text import tell


def main(arguments: list[str] | None = None) -> int:
    """Prepare one run and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, with config.json")
    parser.add_argument("--day", help="ISO date used as today in the rows, if the chat template writes it")
    parser.add_argument("--scored", action="store_true", help="the rows are for an evaluation, not for training")
    options = parser.parse_args(arguments)
    try:
        with console_may_go(), _stopped_in_order():
            prepare_run(RunFolder(options.run), scored=options.scored, day=options.day)
    except UserError as error:
        tell(error.render())
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def data(call: Call) -> int:
    """Run `make data`: prepare the data of a configuration or of `RUN`; `JSON=1` prints the manifests."""
    config = call.load_config().config
    run = call.options.get("RUN")
    with _stopped_in_order():
        prepared, manifests = prepare(config, day=day_of(find_run(run).prepared) if run else None)
    mixture = mixture_of(config.data, prepared.train.sources) if prepared.train else None
    for line in mixture.describe() if mixture else []:
        tell(f"mixture: {line}")
    contents = {"train": manifests["train"], "validation": manifests.get("validation")}
    lines = (f"{name}: {manifest['split']['path']}" for name, manifest in manifests.items())
    return call.show({"model": asdict(prepared.model), **contents}, *lines)


@contextmanager
def _stopped_in_order() -> Iterator[None]:
    """Let signals end the preparation with its processes and temporary files; report a disk's error in one line."""
    here = threading.current_thread() is threading.main_thread()  # only the main thread can handle signals
    with end_by_signals() if here else nullcontext(), translate_disk_errors(cache_folder(), place_hint):
        yield


def place_hint(full: bool, where: Path) -> str:
    if where.name == RunFolder(where.parent).prepared.name:
        return f"free some space in `{where.parent}`, or make it writable: `df` and `mount` say more"
    if not full and not where.is_relative_to(cache_folder()):
        return "`ls -l` shows who may read and write it"
    return f"the cache is `{cache_folder()}`: free some space there, or set SFT_PLAY_CACHE to another folder"


def prepare_run(run: RunFolder, *, scored: bool = False, day: str | None = None) -> Prepared:
    """Resolve the model, prepare the data, write `prepared.json` and return it. Raise `DataError`."""
    config = read_config(run.config).config
    metrics: list[Any] = []
    if any(name.startswith(LIBRARY) for name in config.eval.metrics):
        from sft_play.evaluation.scores import library_metrics

        metrics = library_metrics(config.eval.metrics)  # a wrong name is reported before anything is downloaded
    before = Prepared.load(run.prepared) if run.prepared.is_file() else None
    prepared, _ = prepare(config, scored=scored, day=day, before=before)
    if metrics and prepared.validation:
        from sft_play.data.rows import Rows

        references = Rows(prepared.validation.path).references(2)
        for metric in metrics:
            metric.check(references)
    prepared.save(run.prepared)
    return prepared


def prepare(
    config: Config, *, scored: bool = False, day: str | None = None, before: Prepared | None = None
) -> tuple[Prepared, Mapping[str, Mapping[str, Any]]]:
    """Resolve the model and prepare the data; return the facts and the manifest of each split. Raise `DataError`.

    `scored` makes messages call the rows evaluation instead of training. `day`, `before`: see `prepare_data`.

    `lookup`, and so `make plan`, can read the facts from then on.
    """
    _quiet()
    _offline_when_unreachable(config)
    from sft_play.data.prepare import prepare_data
    from sft_play.data.summary import summary
    from sft_play.model.resolve import (
        check_trained,
        refuse_other_base,
        refuse_untrusted_code,
        runs_code,
    )
    from sft_play.model.scratch import describe_source, resolve
    from sft_play.model.tokenizer import chat_format, with_chat

    chat = chat_format(config.data)
    bare = resolve(config)
    model = with_chat(bare, chat)
    if (adapter := parent_of(config)) is not None:
        check_trained(Path(adapter.path), ours=False)
        tell(f"adapter: {adapter.name}, from the folder {adapter.path}")
        if config.tuning.adapter == "merge":
            refuse_other_base(adapter, with_chat(bare, _chat_to_compare(adapter, chat, merged=True)))
            base, parts = model, f"{model.fingerprint} {adapter.fingerprint}"
            bare = _made("merged", parts, lambda use, to: use.write_merged_base(config, base, adapter, to))
            model = with_chat(bare, chat)
    if config.data.new_tokens:
        former, parts = model, f"{model.fingerprint} {json.dumps(config.data.new_tokens)}"
        bare = _made("tokens", parts, lambda use, to: use.write_with_new_tokens(config, former, to))
        model = with_chat(bare, chat)
    if adapter is not None and config.tuning.adapter == "continue":
        refuse_other_base(adapter, with_chat(bare, _chat_to_compare(adapter, chat, merged=False)))
    tell(describe_source(config, model))
    check_length(config.model, positions_in(read_json(Path(model.path) / "config.json")))
    trust = config.model.trust_remote_code
    if not (trust and runs_code(Path(model.path))):
        refuse_untrusted_code(Path(model.path), config.model.name)

    @functools.cache
    def tokenizer() -> Any:  # only loaded if rows are not in the cache
        return _tokenizer(model, trust=trust)

    unmodified, manifests = prepare_data(config, model, tokenizer, day, before)
    for name, manifest in manifests.items():
        tell(summary(("evaluation" if scored else "training") if name == "train" else name, manifest))
    prepared = replace(unmodified, adapter=adapter)
    if prepared.validation and (trained := count_trained(prepared.validation, prepared)):
        tell(f"validation rows that an earlier run of these weights was trained on: {trained:,}")
    remember(config, prepared)
    return prepared, manifests


def _chat_to_compare(adapter: ParentAdapter, chat: ChatFormat | None, *, merged: bool) -> ChatFormat | None:
    """Return the chat format that an adapter's tokenizer is compared with: `chat`, or the one of the adapter's run if
    that learnt no conversations or is merged, since then only the tokenizer itself must be the same.
    """
    run = run_around(Path(adapter.path))
    if run is None or not (merged or read_config(run.config).config.tuning.task == "cpt"):
        return chat
    return Prepared.load(run.prepared).model.chat


def _made(what: str, parts: str, write: Callable[[Any, Path], None]) -> ResolvedModel:
    """Return the model that `write` makes, by `sft_play.model.use`, in a cache folder on first use; only that needs
    torch.
    """
    from sft_play.model.resolve import describe_made

    def make(folder: Path) -> None:
        from sft_play.model import use

        folder.mkdir()
        write(use, folder)

    return describe_made(make_once(made_folder(f"{MADE}-{what}-{text_sha256(parts)}"), "config.json", make))


def _tokenizer(model: ResolvedModel, *, trust: bool) -> Any:
    """Return the model's tokenizer, and print how a named template was adapted to it."""
    from sft_play.model.tokenizer import end_note, load_tokenizer

    tokenizer = load_tokenizer(model.path, model.chat, trust=trust)
    note = end_note(model.chat.name, tokenizer) if model.chat and model.chat.name else None
    if note:
        tell(note)
    return tokenizer


def _offline_when_unreachable(config: Config) -> None:
    """Set the libraries' offline mode if the hub is needed but does not answer."""
    from sft_play.data.sources import is_hub
    from sft_play.plan.architecture import offline_unless_reachable

    names = [name for name in (config.model.name, config.model.tokenizer) if name and name != "train"]
    needs_hub = any(not typed_path(name).is_dir() for name in names)
    with suppress(DataError):  # a missing source is refused when it is read, unless it was prepared before
        needs_hub = needs_hub or any(map(is_hub, sources_of(config)))
    if needs_hub:
        offline_unless_reachable()


def _quiet() -> None:
    """Silence libraries about what this program prints itself."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main())
