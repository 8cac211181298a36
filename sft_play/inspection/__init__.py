"""`make inspect`: prepares the data if needed, then shows rows with the loss mask visible; `HTML=1` writes a page."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.schema import Config
from sft_play.errors import UserError
from sft_play.files import write_text
from sft_play.inspection.show import Sample, SplitView, chosen, holding, render, sample_of, show
from sft_play.plan.mixture import mixture_of
from sft_play.prepare import prepare
from sft_play.runs.prepared import PreparedSplit, row_integers

IN_TERMINAL, IN_PAGE = 3, 200
"""Rows that are shown unless `ROWS` says how many."""
SPLITS = ("train", "validation")


def main(call: Call) -> int:
    """Show samples and statistics of one split, or of both in a page."""
    config = call.load_config().config
    split = call.options.get("SPLIT", "train")
    if split not in SPLITS:
        raise UserError(f"`SPLIT` is `{split}`; expected {' or '.join(f'`{name}`' for name in SPLITS)}")
    html = call.options.get("HTML", "0")
    if html not in ("0", "1"):
        raise UserError(f"`HTML` is `{html}`; expected `1` or `0`")
    if "OUT" in call.options and html != "1":
        raise UserError("`OUT` is where the page goes, and no page is written", hint="add HTML=1")
    count = call.integer("ROWS", 1) or (IN_PAGE if html == "1" else IN_TERMINAL)
    prepared, manifests = prepare(config)
    if split not in manifests:
        raise UserError("there is no validation data to inspect", hint="set `data.validation`, or omit SPLIT")
    mixture = mixture_of(config.data, prepared.train.sources) if prepared.train else None
    words = call.options.get("SEARCH")
    found = {
        name: samples_of(config, prepared.model.path, manifest, count, words)
        for name, manifest in manifests.items()
        if html == "1" or name == split
    }
    if html == "1":
        path = Path(call.options.get("OUT") or f"inspect-{_name(call)}.html")
        mixed = {"train": mixture} if mixture else {}
        splits = [
            SplitView(
                name=name, manifest=manifest, samples=found[name], rows=_lengths_and_trained(manifest), mixture=mixed.get(name)
            )
            for name, manifest in manifests.items()
        ]  # fmt: skip
        write_text(path, render(_name(call), config.model.max_seq_len, splits))
        print(json.dumps({"page": str(path)}) if call.json else f"page: {path}")
    elif call.json:
        shown = {"split": split, "manifest": manifests[split], "samples": [asdict(sample) for sample in found[split]]}
        print(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        show(split, manifests[split], found[split], words, mixture if split == "train" else None)
    return 0


def samples_of(config: Config, model: str, manifest: Mapping[str, Any], count: int, words: str | None) -> list[Sample]:
    """Return rows of a prepared split: those that hold `words`, else some of each source, chosen by `train.seed`."""
    import datasets

    from sft_play.model.tokenizer import load_tokenizer

    rows = datasets.load_from_disk(manifest["split"]["path"])
    tokenizer = load_tokenizer(Path(model))
    special = frozenset(tokenizer.all_special_ids) | {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    names = [source["name"] for source in manifest["sources"]]
    if words:
        decode = tokenizer.batch_decode
        indices: Sequence[int] = list(islice(holding(rows, words, decode), count))
        if not indices:
            print(f"no row holds `{words}`", file=sys.stderr)
    else:
        indices = chosen(rows, count, config.train.seed, rows["source"])
    return [sample_of(index, rows[index], names, tokenizer, special) for index in indices]


def _lengths_and_trained(manifest: Mapping[str, Any]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the tokens and the trained tokens of every row of a split."""
    split = PreparedSplit.from_json(manifest["split"])
    lengths, trained = row_integers(split, "lengths.i32"), row_integers(split, "labels.i32")
    assert lengths is not None and trained is not None, "every split that this version prepares has them"
    return lengths, trained


def _name(call: Call) -> str:
    return Path(call.options.get("CONFIG") or call.options.get("RUN") or "data").stem
