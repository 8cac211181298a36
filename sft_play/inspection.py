"""`make inspect`: prepares the data if needed, then shows rows with the loss mask visible, in the terminal or as a page (`HTML=1`)."""

from __future__ import annotations

import html
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from sft_play.config.call import Call
from sft_play.config.reader import record_of
from sft_play.data.chat import IGNORED
from sft_play.data.manifest import counted_as, rows_cut
from sft_play.data.store import Rows
from sft_play.errors import UserError, printable
from sft_play.files import write_text
from sft_play.plan.mixture import Mixture, mixture_of
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
    as_page = call.flag("HTML")
    if "OUT" in call.options and not as_page:
        raise UserError("`OUT` is where the page goes, and no page is written", hint="add HTML=1")
    count = call.integer("ROWS", 1) or (IN_PAGE if as_page else IN_TERMINAL)
    prepared, manifests = prepare(config)
    if split not in manifests:
        raise UserError("there is no validation data to inspect", hint="set `data.validation`, or omit SPLIT")
    mixture = mixture_of(config.data, prepared.train.sources) if prepared.train else None
    words = call.options.get("SEARCH")
    found = {
        name: samples_of(prepared.model.path, manifest, count, config.train.seed, words)
        for name, manifest in manifests.items()
        if as_page or name == split
    }
    if as_page:
        path = Path(call.options.get("OUT") or f"inspect-{_name(call)}.html")
        splits = [
            SplitView(name=name, manifest=manifest, samples=found[name], mixture=mixture if name == "train" else None)
            for name, manifest in manifests.items()
        ]
        write_text(path, render(_name(call), config.model.max_seq_len, splits))
        print(json.dumps({"page": str(path)}) if call.json else f"page: {path}")
    elif call.json:
        shown = {"split": split, "manifest": manifests[split], "samples": [asdict(sample) for sample in found[split]]}
        print(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        show(split, manifests[split], found[split], words, mixture if split == "train" else None)
    return 0


def samples_of(model: str, manifest: Mapping[str, Any], count: int, seed: int, words: str | None) -> list[Sample]:
    """Return rows of a prepared split: those that hold `words` in any letter case, else some of each source, chosen by `seed`."""
    from sft_play.model.tokenizer import load_tokenizer

    rows = Rows(manifest["split"]["path"])
    tokenizer = load_tokenizer(Path(model))
    special = frozenset(tokenizer.all_special_ids) | {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    names = [source["name"] for source in manifest["sources"]]
    if words:
        wanted = words.casefold()
        holding = (at for at, ids in enumerate(rows["input_ids"]) if wanted in tokenizer.decode(ids).casefold())
        indices = list(islice(holding, count))
        if not indices:
            print(f"no row holds `{words}`", file=sys.stderr)
    else:
        indices = chosen(count, seed, list(rows["source"]))
    return [sample_of(index, rows[index], names, tokenizer, special) for index in indices]


def _name(call: Call) -> str:
    return Path(call.options.get("CONFIG") or call.options.get("RUN") or "data").stem


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Neighbouring tokens of one kind."""

    text: str
    trained: bool
    """Whether a loss is computed for these tokens."""
    special: bool
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One prepared row."""

    index: int
    """Its place in the prepared split, from 0."""
    row: int
    """Where it stood among the rows that were read, from 0; rows of one split example share it."""
    source: str
    tokens: int
    trained: int
    pieces: tuple[Piece, ...]


def sample_of(index: int, row: Any, sources: Sequence[str], tokenizer: Any, special: frozenset[int]) -> Sample:
    """Return the row at `index` of a prepared dataset with its text. `special`: ids that are shown as special tokens."""
    ids, labels = list(row["input_ids"]), list(row["labels"])
    trained = [position > 0 and label != IGNORED for position, label in enumerate(labels)]  # nothing predicts the first token
    kinds = [(kind, token in special) for kind, token in zip(trained, ids, strict=True)]
    pieces, start = [], 0
    for (is_trained, is_special), group in groupby(kinds):
        count = sum(1 for _ in group)
        text = tokenizer.decode(ids[start : start + count], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        pieces.append(Piece(text=text, trained=is_trained, special=is_special, tokens=count))
        start += count
    number = row.get("source", 0)
    name = sources[number] if number < len(sources) else ""
    return Sample(index=index, row=row["row"], source=name, tokens=len(ids), trained=sum(trained), pieces=tuple(pieces))


def chosen(count: int, seed: int, of_source: Sequence[int]) -> list[int]:
    """Return `count` row indices in order: the same number of each source as far as it has them, chosen by `seed`."""
    by_source: dict[int, list[int]] = {}
    for index, source in enumerate(of_source):
        by_source.setdefault(source, []).append(index)
    shuffler = random.Random(seed)
    for indices in by_source.values():
        shuffler.shuffle(indices)
    taken: list[int] = []
    for turn in range(max(map(len, by_source.values()), default=0)):
        taken += [indices[turn] for _, indices in sorted(by_source.items()) if turn < len(indices)]
        if len(taken) >= count:
            break
    return sorted(taken[:count])


# Samples in the terminal: trained tokens coloured, special tokens framed, and what was skipped.


TRAINED, SPECIAL, READ = "green", "magenta", "default"
WITHOUT_COLOUR = ("«", "»")
"""Around what is trained where nothing can be coloured (a file, a pipe)."""


def show(split: str, manifest: Mapping[str, Any], samples: Sequence[Sample], words: str | None, mixture: Mixture | None) -> None:
    """Print a legend, the samples, how sources are mixed and what was skipped."""
    if words and not samples:  # that no row holds them is said already
        return
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)  # `[/x]` and `:x:` are data here
    colours = console.color_system is not None
    word = counted_as(split)
    legend = Text(word, style=f"{TRAINED} bold") if colours else Text(word.join(WITHOUT_COLOUR))
    console.print(Text.assemble(legend, "  read only  ", Text("special token", style=SPECIAL if colours else ""), " ↵ line end"))
    for sample in samples:
        title = f"{split} row {sample.index} of {sample.source}: {sample.tokens} tokens, {sample.trained} {word}"
        console.print(Rule(printable(title), align="left", characters="─" if console.encoding.startswith("utf") else "-"))
        console.print(Text.assemble(*(_coloured(piece) for piece in sample.pieces)) if colours else Text(_marked(sample)))
    console.print()
    for line in mixture.describe() if mixture else []:
        console.print(f"mixture: {printable(line)}")
    for line in left_out(manifest):
        console.print(line)
    if words is None and len(samples) < manifest["split"]["rows"]:
        console.print(f"{len(samples)} of {manifest['split']['rows']:,} rows; more with ROWS=, SEARCH= or HTML=1")


def _coloured(piece: Piece) -> Text:
    style = SPECIAL if piece.special else TRAINED if piece.trained else READ
    return Text(_with_line_ends(piece), style=f"{style} bold" if piece.trained else style)


def _marked(sample: Sample) -> str:
    before, after = WITHOUT_COLOUR
    text = "".join(
        f"{before}{_with_line_ends(piece)}{after}" if piece.trained else printable(piece.text) for piece in sample.pieces
    )
    return text.replace(after + before, "")


def _with_line_ends(piece: Piece) -> str:
    """A line end that is learnt must be seen."""
    text = printable(piece.text)
    return text.replace("\n", "↵\n") if piece.trained else text


def left_out(manifest: Mapping[str, Any]) -> list[str]:
    """Return a line for each reason for which rows of a source were skipped, with the first places, and one for rows that were cut."""
    lines = []
    for source in manifest["sources"]:
        reasons = {**source["dropped"], **({"duplicate": source["duplicates"]} if source["duplicates"] else {})}
        for reason, count in reasons.items():
            places = [example["place"] for example in source.get("left_out", []) if example["reason"] == reason]
            shown = f": {', '.join(places[:3])}{', ...' if count > len(places[:3]) else ''}" if places else ""
            lines.append(f"skipped in {printable(source['name'])}: {count:,} ({reason}){printable(shown)}")
        if source["cut"]:
            lines.append(f"kept of {printable(source['name'])}: {rows_cut(source)}")
    return lines or ["no row was skipped"]


# One self-contained HTML page: samples with the mask visible, histograms, the mixture, and a search. No script from elsewhere.


BINS = 20
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6773; --line: #d8dee4; --paper: #ffffff; --panel: #f6f8fa;
  --trained: #d3f4dc; --trained-ink: #0b5a24; --special: #8250df; --bar: #3b82c4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa5b1; --line: #30363d; --paper: #0d1117; --panel: #161b22;
  --trained: #12361f; --trained-ink: #7ee2a0; --special: #c297ff; --bar: #58a6ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
p.lead { color: var(--soft); margin: .2rem 0 1rem; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin-bottom: 1rem; } .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
figure { margin: 0; padding: .8rem; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; }
figcaption { font-size: .9rem; color: var(--soft); margin-bottom: .4rem; } svg { width: 100%; height: auto; display: block; }
svg rect { fill: var(--bar); } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.share { height: .7rem; background: var(--bar); border-radius: 3px; min-width: 1px; }
.tools { display: flex; flex-wrap: wrap; gap: .6rem; align-items: center; position: sticky; top: 0; background: var(--paper); padding: .6rem 0; }
input, select { font: inherit; padding: .35rem .6rem; border: 1px solid var(--line); border-radius: 6px; background: var(--panel); color: inherit; }
input { flex: 1 1 16rem; } #count { color: var(--soft); }
article { border: 1px solid var(--line); border-radius: 8px; margin: .8rem 0; overflow: hidden; }
article header { background: var(--panel); padding: .3rem .8rem; color: var(--soft); font-size: .9rem; }
pre { margin: 0; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.55 ui-monospace, monospace; }
.t { background: var(--trained); color: var(--trained-ink); } .s { color: var(--special); font-weight: 600; } .t.s { text-decoration: underline; }
"""
SCRIPT = """
const rows = [...document.querySelectorAll('article')], words = document.getElementById('words'), which = document.getElementById('which');
function filter() {
  const wanted = words.value.toLowerCase(); let shown = 0;
  for (const row of rows) {
    const fits = (!which.value || row.dataset.of === which.value) && row.textContent.toLowerCase().includes(wanted);
    row.hidden = !fits; shown += fits;
  }
  document.getElementById('count').textContent = shown + ' of ' + rows.length + ' samples';
}
words.addEventListener('input', filter); which.addEventListener('change', filter); filter();
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitView:
    """What the page shows of a split."""

    name: str
    manifest: Mapping[str, Any]
    samples: Sequence[Sample]
    mixture: Mixture | None
    """How an epoch mixes the sources, where they have weights."""


def render(name: str, limit: int, splits: Sequence[SplitView]) -> str:
    """Return the page. `limit` is `model.max_seq_len`."""
    title = f"Data of {html.escape(name)}"
    parts = [
        "<!doctype html>", f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<style>{STYLE}</style></head><body>", f"<h1>{title}</h1>",
        '<p class="lead">What training will see, token by token. <span class="t">Green is learnt</span>, the rest is only read; '
        '<span class="s">violet</span> is a special token.</p>',
    ]  # fmt: skip
    for split in splits:
        parts += [f"<h2>{split.name.capitalize()}</h2>", _sources(split), _charts(limit, split.manifest)]
        lines = [*(split.mixture.describe() if split.mixture else ()), *left_out(split.manifest)]
        parts += [f'<p class="lead">{html.escape(line)}</p>' for line in lines]
    parts += ["<h2>Samples</h2>", _tools(splits)]
    parts += [_sample(split.name, sample) for split in splits for sample in split.samples]
    parts += [f"<script>{SCRIPT}</script></body></html>"]
    return "\n".join(parts) + "\n"


def _sources(split: SplitView) -> str:
    sources = split.manifest["sources"]
    repeats = split.mixture.repeats if split.mixture else (1.0,) * len(sources)
    learnt = [source["trained_tokens"] * times for source, times in zip(sources, repeats, strict=True)]
    total = max(1.0, sum(learnt))
    words = ("source", "format", "share of what is trained in an epoch")
    heads = (*words[:2], "read", "kept", "skipped", "rows", "times an epoch", "tokens", "trained", words[2])
    row = "".join(f"<th>{head}</th>" if head in words else f'<th class="n">{head}</th>' for head in heads)
    lines = [f'<div class="scroll"><table><tr>{row}</tr>']
    for source, times, tokens in zip(sources, repeats, learnt, strict=True):
        counts = (source["rows_read"], source["kept"], sum(source["dropped"].values()) + source["duplicates"], source["rows"])
        numbers = [*(f"{n:,}" for n in counts), f"{times:.3g}", f"{source['tokens']:,}", f"{source['trained_tokens']:,}"]
        cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
        lines.append(
            f"<tr><td>{html.escape(source['name'])}</td><td>{html.escape(source['format'] or 'no row')}</td>{cells}"
            f'<td><div class="share" style="width:{tokens / total:.1%}"></div>{tokens / total:.1%}</td></tr>'
        )
    return "".join(lines) + "</table></div>"


def _charts(limit: int, manifest: Mapping[str, Any]) -> str:
    split = record_of(manifest["split"], PreparedSplit)
    lengths, trained = row_integers(split, "lengths.i32"), row_integers(split, "labels.i32")
    assert lengths is not None and trained is not None, "every split that this version prepares has them"
    shares = [count / length for count, length in zip(trained, lengths, strict=True)]
    longest = f"tokens of a row; the longest has {max(lengths):,} of {limit:,} that it may have"
    return (
        f'<div class="charts">{_histogram(longest, lengths, max(lengths))}'
        f"{_histogram('share of a row that is trained', [100 * share for share in shares], 100, unit=' %')}</div>"
    )


def _histogram(caption: str, values: Sequence[float], most: float, unit: str = "") -> str:
    """Return a figure with equal bins from 0 to `most`."""
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int(value * BINS / max(most, 1)))] += 1
    highest = max(counts)
    bars = "".join(
        f'<rect x="{index * 20 + 1}" y="{110 - 100 * count / highest:.1f}" width="18" height="{100 * count / highest:.1f}">'
        f"<title>{most * index / BINS:,.0f} to {most * (index + 1) / BINS:,.0f}{unit}: {count:,} rows</title></rect>"
        for index, count in enumerate(counts)
    )
    marks = "".join(
        f'<text x="{x}" y="126" text-anchor="{anchor}">{value:,.0f}{unit}</text>'
        for x, anchor, value in ((0, "start", 0), (200, "middle", most / 2), (400, "end", most))
    )
    top = f'<text x="400" y="-4" text-anchor="end">highest bar: {highest:,} rows</text>'
    return f'<figure><figcaption>{caption}</figcaption><svg viewBox="0 -16 400 146" role="img">{bars}{marks}{top}</svg></figure>'


def _tools(splits: Sequence[SplitView]) -> str:
    kinds = list(dict.fromkeys(f"{split.name}: {sample.source}" for split in splits for sample in split.samples))
    options = "".join(f"<option>{html.escape(kind)}</option>" for kind in kinds)
    return (
        '<div class="tools"><input id="words" type="search" placeholder="search in the samples" aria-label="search">'
        f'<select id="which" aria-label="source"><option value="">all sources</option>{options}</select><span id="count"></span></div>'
    )


def _sample(split: str, sample: Sample) -> str:
    kind = html.escape(f"{split}: {sample.source}", quote=True)
    head = f"{split} row {sample.index} of {html.escape(sample.source)}: {sample.tokens:,} tokens, {sample.trained:,} trained"
    body = "".join(_piece(piece) for piece in sample.pieces)
    return f'<article data-of="{kind}"><header>{head}</header><pre>{body}</pre></article>'


def _piece(piece: Piece) -> str:
    kinds = " ".join(mark for mark, given in (("t", piece.trained), ("s", piece.special)) if given)
    text = html.escape(piece.text)
    if piece.trained:  # a trained line end must be seen
        text = text.replace("\n", "↵\n")
    return f'<span class="{kinds}">{text}</span>' if kinds else text
