"""Samples in the terminal: trained tokens coloured, special tokens framed, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from sft_play.data.manifest import counted_as, rows_cut
from sft_play.errors import printable
from sft_play.inspection.samples import Piece, Sample
from sft_play.plan.mixture import Mixture

TRAINED, SPECIAL, READ = "green", "magenta", "default"
WITHOUT_COLOUR = ("«", "»")
"""Around what is trained where nothing can be coloured (a file, a pipe)."""


def show(split: str, manifest: Mapping[str, Any], samples: Sequence[Sample], words: str | None, mixture: Mixture | None) -> None:
    """Prints a legend, the samples, how sources are mixed and what was left out."""
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
    """Returns a line for each reason for which rows of a source were left out, with the first places, and one for rows that were cut."""
    lines = []
    for source in manifest["sources"]:
        reasons = {**source["dropped"], **({"duplicate": source["duplicates"]} if source["duplicates"] else {})}
        for reason, count in reasons.items():
            places = [example["place"] for example in source.get("left_out", []) if example["reason"] == reason]
            shown = f": {', '.join(places[:3])}{', ...' if count > len(places[:3]) else ''}" if places else ""
            lines.append(f"left out of {printable(source['name'])}: {count:,} {reason}{printable(shown)}")
        if source["cut"]:
            lines.append(f"kept of {printable(source['name'])}: {rows_cut(source)}")
    return lines or ["no row was left out"]
