"""`make inspect`: prepares the data if needed, then shows rows with the loss mask visible, in the terminal or as a page
(`HTML=1`).
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count as numbers
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from sft_play.config.call import Call
from sft_play.config.reader import closest_word
from sft_play.data import IGNORED, WEIGHTS
from sft_play.data.rows import Rows
from sft_play.data.summary import counted_as, left_out_of, rows_cut, summary
from sft_play.errors import UserError, printable
from sft_play.files import typed_path, write_text
from sft_play.launch.runs import short_path
from sft_play.plan.epoch import mixture_of
from sft_play.prepare import prepare
from sft_play.report.page import page_html
from sft_play.runs.prepared import PreparedSplit, row_integers
from sft_play.text import tell

IN_TERMINAL, IN_PAGE = 3, 200
"""Rows that are shown unless `ROWS` says how many."""
SPLITS = ("train", "validation")
TRAINED, SPECIAL = "green bold", "magenta"
WITHOUT_COLOUR = ("«", "»")
"""Marks around trained text where colours are not possible (a file, a pipe)."""
MOST_BINS = 30
"""Most bins of a histogram in the page."""


def main(call: Call) -> int:
    """Show samples and statistics of one split, or write a page about both."""
    config = call.load_config().config
    split = call.options.get("SPLIT", "train")
    if split not in SPLITS:
        hint = f"did you mean `{close}`?" if (close := closest_word(split, SPLITS)) else None
        raise UserError(f"`SPLIT` is `{split}`; expected {' or '.join(f'`{name}`' for name in SPLITS)}", hint=hint)
    as_page = call.flag("HTML")
    if "OUT" in call.options and not as_page:
        raise UserError("`OUT` is where the page goes, and no page is written", hint="add HTML=1")
    rows = call.integer("ROWS", 1) or (IN_PAGE if as_page else IN_TERMINAL)
    prepared, manifests = prepare(config)
    if split not in manifests:
        raise UserError("there is no validation data to inspect", hint="set `data.validation`, or omit SPLIT")
    words = call.options.get("SEARCH")
    samples = {
        name: samples_of(prepared.model.path, manifest, rows, config.train.seed, words)
        for name, manifest in manifests.items()
        if as_page or name == split
    }
    if call.json and not as_page:
        shown = {"split": split, "manifest": manifests[split], "samples": [asdict(sample) for sample in samples[split]]}
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return 0
    mixture = mixture_of(config.data, prepared.train.sources) if prepared.train else None
    mixtures = {"train": mixture.describe() if mixture else ()}
    if as_page:
        splits = {"train": prepared.train, "validation": prepared.validation}
        record = {
            "name": _name(call),
            "model": short_path(prepared.model.name),
            "limit": config.model.max_seq_len,
            "splits": [
                _split_record(name, facts, manifests[name], samples[name], mixtures.get(name, ()))
                for name, facts in splits.items()
                if facts
            ],
        }
        path = typed_path(call.options.get("OUT") or f"inspect-{_name(call)}.html")
        write_text(path, page_html(record))
        return call.show({"page": str(path)}, f"page: {path}")
    # `[/x]` and `:x:` are data here
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    show(console, split, manifests[split], samples[split], mixtures.get(split, ()))
    return 0


def _split_record(
    name: str, facts: PreparedSplit, manifest: Mapping[str, Any], samples: Sequence[Sample], mixture: Sequence[str]
) -> dict[str, Any]:
    """Return a split's facts for the page (`report/static/rows.js`)."""
    label = "training" if name == "train" else name
    # Warnings follow the lines of the split and its sources.
    warnings = summary(label, manifest).splitlines()[1 + len(manifest["sources"]) :]
    return {
        "name": label,
        "counted": counted_as(name),
        **{key: manifest["split"][key] for key in ("rows", "tokens", "label_tokens", "median", "longest")},
        "weighted_rows": manifest["weighted_rows"],
        "at_most_95": manifest["length_quantiles"]["95%"],
        "lengths": histogram(row_integers(facts, "lengths.i32") or ()),
        "labels": histogram(row_integers(facts, "labels.i32") or ()),
        "sources": [
            {key: source[key] for key in ("rows_read", "kept", "cut", "rows", "tokens", "trained_tokens")}
            | {"name": printable(short_path(source["name"])), "skipped": sum(left_out_of(source).values())}
            for source in manifest["sources"]
        ],
        "mixture": [printable(line) for line in mixture],
        "skipped": [printable(short_path(line)) for line in skipped_lines(manifest)],
        "warnings": [printable(line.strip().removeprefix("warning: ")) for line in warnings],
        "samples": [asdict(sample) | {"place": printable(short_path(sample.place))} for sample in samples],
    }


def histogram(values: Sequence[int]) -> dict[str, Any]:
    """Return the number of `values` in each bin `[k * width, (k + 1) * width)`, with the finest round width that needs
    at most `MOST_BINS` bins.
    """
    longest = max(values, default=0)
    width = next(
        width
        for power in numbers()
        for width in (10**power, 2 * 10**power, 5 * 10**power)
        if longest < MOST_BINS * width
    )
    bins = Counter(value // width for value in values)
    return {"width": width, "counts": [bins[bin_] for bin_ in range(longest // width + 1)]}


def samples_of(model: str, manifest: Mapping[str, Any], count: int, seed: int, words: str | None) -> list[Sample]:
    """Return rows of a prepared split: those that contain `words` in any letter case, else some of each source, chosen
    by `seed`.
    """
    from sft_play.model.tokenizer import load_tokenizer

    rows = Rows(manifest["split"]["path"])
    tokenizer = load_tokenizer(Path(model))
    special = frozenset(tokenizer.all_special_ids) | {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    names = [source["name"] for source in manifest["sources"]]
    if words:
        folded = words.casefold()
        holding = (at for at, ids in enumerate(rows["input_ids"]) if folded in tokenizer.decode(ids).casefold())
        indices = list(islice(holding, count))
        if not indices:
            tell(f"no row contains `{words}`")
    else:
        indices = choose_rows(count, seed, list(rows["source"]))
    return [sample_of(index, rows[index], names, tokenizer, special) for index in indices]


def _name(call: Call) -> str:
    return Path(call.options.get("CONFIG") or call.options.get("RUN") or "data").stem


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpan:
    """Neighbouring tokens of one kind."""

    text: str
    trained: bool
    """Whether a loss is computed for these tokens."""
    weight: float
    """How much each of them counts in it; 0 if none is computed."""
    special: bool
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prepared row."""

    index: int
    """Its place in the prepared split, from 0."""
    row: int
    """Its index among the rows that were read, from 0; rows of one split example share it."""
    source: str
    place: str
    """Where it stands, as errors name it."""
    tokens: int
    trained: int
    pieces: tuple[TokenSpan, ...]


def sample_of(index: int, row: Any, sources: Sequence[str], tokenizer: Any, special: frozenset[int]) -> Sample:
    """Return the row at `index` of a prepared dataset with its text; `special` are the ids of special tokens."""
    ids, labels = list(row["input_ids"]), list(row["labels"])
    # The first token is never predicted.
    trained = [position > 0 and label != IGNORED for position, label in enumerate(labels)]
    weights = row.get(WEIGHTS) or map(float, trained)
    kinds = [
        (kind, round(weight, 6) if kind else 0.0, token in special)
        for kind, weight, token in zip(trained, weights, ids, strict=True)
    ]
    pieces, start = [], 0
    for (is_trained, weight, is_special), group in groupby(kinds):
        count = sum(1 for _ in group)
        text = tokenizer.decode(
            ids[start : start + count], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        pieces.append(TokenSpan(text=text, trained=is_trained, weight=weight, special=is_special, tokens=count))
        start += count
    number = row.get("source", 0)
    name = sources[number] if number < len(sources) else ""
    return Sample(
        index=index,
        row=row["row"],
        source=name,
        place=row["place"],
        tokens=len(ids),
        trained=sum(trained),
        pieces=tuple(pieces),
    )


def choose_rows(count: int, seed: int, of_source: Sequence[int]) -> list[int]:
    """Return `count` row indices in order, chosen by `seed`, equally many of each source if it has enough."""
    turns, seen = list[tuple[int, int]](), Counter[int]()
    for index in random.Random(seed).sample(range(len(of_source)), len(of_source)):
        seen[of_source[index]] += 1
        turns.append((seen[of_source[index]], index))
    return sorted(index for _, index in sorted(turns)[:count])


def show(
    console: Console, split: str, manifest: Mapping[str, Any], samples: Sequence[Sample], mixture: Sequence[str] = ()
) -> None:
    """Print a legend, the samples, how sources are mixed (`mixture`), lengths, and what was skipped."""
    if not samples:  # `samples_of` has reported that no row contains the words
        return
    colours = console.color_system is not None
    word = counted_as(split)
    legend = Text(word, style=TRAINED) if colours else Text(word.join(WITHOUT_COLOUR))
    special = Text("special token", style=SPECIAL if colours else "")
    weights = "  [0.3] weight of what follows" if manifest["weighted_rows"] else ""
    console.print(Text.assemble(legend, "  read only  ", special, " ↵ line end", weights))
    for sample in samples:
        title = f"{split} row {sample.place}: {sample.tokens} tokens, {sample.trained} {word}"
        line = "─" if console.encoding.startswith("utf") else "-"
        console.print(f"{printable(title)} ".ljust(console.width, line), style="rule.line")
        console.print(_coloured(sample) if colours else Text(_mark(sample)))
    lengths = ", ".join(
        f"{share} of rows have at most {tokens:,}" for share, tokens in manifest["length_quantiles"].items()
    )
    for line in ("", *(f"mixture: {line}" for line in mixture), f"tokens: {lengths}", *skipped_lines(manifest)):
        console.print(printable(line))
    if len(samples) < manifest["split"]["rows"]:
        console.print(f"{len(samples)} of {manifest['split']['rows']:,} rows; more with ROWS=, SEARCH= or HTML=1")


def _coloured(sample: Sample) -> Text:
    return Text.assemble(
        *(
            Text(text, style=" ".join([TRAINED] * piece.trained + [SPECIAL] * piece.special))
            for piece, text in zip(sample.pieces, _texts(sample), strict=True)
        )
    )


def _mark(sample: Sample) -> str:
    before, after = WITHOUT_COLOUR
    parts = [
        f"{before}{text}{after}" if piece.trained else text
        for piece, text in zip(sample.pieces, _texts(sample), strict=True)
    ]
    return "".join(parts).replace(after + before, "")


def _texts(sample: Sample) -> list[str]:
    """Return the pieces' texts: a line end that is learnt must be seen, and a weight other than 1 where it begins."""
    texts, before = [], 1.0
    for piece in sample.pieces:
        text = printable(piece.text)
        begins = piece.trained and piece.weight != before
        texts.append(
            (f"[{piece.weight:g}] " if begins else "") + (text.replace("\n", "↵\n") if piece.trained else text)
        )
        before = piece.weight if piece.trained else 1.0
    return texts


def skipped_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Return a line for each reason to skip rows of a source, with the first places, and a line for truncated rows."""
    lines = []
    for source in manifest["sources"]:
        for reason, count in left_out_of(source).items():
            places = [example["place"] for example in source.get("left_out", []) if example["reason"] == reason]
            shown = f": {', '.join(places[:3])}{', ...' if count > len(places[:3]) else ''}" if places else ""
            lines.append(f"skipped in {source['name']}: {count:,} ({reason}){shown}")
        if source["cut"]:
            lines.append(f"kept of {source['name']}: {rows_cut(source)}")
    return lines or ["no row was skipped"]
