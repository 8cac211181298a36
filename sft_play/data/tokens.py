"""Texts of rows to tokens, such that a row is, token by token, what inference sees and then has to write."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from sft_play.data.template import IGNORED, Encoded, RowText
from sft_play.errors import DataError

PROBES = ("a", " a", "a b", "\n\na", "  a\n", "1. \u00e9")
ANCHOR = "\n"


class RowTokens:
    """Tokenises rows with one tokenizer."""

    def __init__(self, tokenizer: Any, stops: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stops = frozenset(stops)
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # a folder may say otherwise; a row is never cut or padded here
        self._backend.no_padding()
        self._direct = all(self._fast([text])[0] == self._slow([text])[0] for text in PROBES)
        self._sharp = self._ends_are_sharp()
        self._plain = self._sharp and self._continues_plainly()

    def batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each text, without any that the tokenizer would add: the template writes its own."""
        return self._fast(texts) if self._direct else self._slow(texts)

    def rows(self, groups: Sequence[Sequence[RowText]]) -> list[list[Encoded] | DataError]:
        """Returns the rows of each group in tokens, tokenised together; an error for a group that cannot be exact."""
        if not self._plain:
            return [self._group(group) for group in groups]
        quick = [[not row.untrained for row in group] for group in groups]
        texts = [
            text
            for group, fits in zip(groups, quick, strict=True)
            for r, fit in zip(group, fits, strict=True)
            if fit
            for text in _pieces(r)
        ]
        tokens = iter(self.batch(texts))
        return [self._quick_group(group, fits, tokens) for group, fits in zip(groups, quick, strict=True)]

    def _quick_group(
        self, group: Sequence[RowText], fits: Sequence[bool], tokens: Iterator[list[int]]
    ) -> list[Encoded] | DataError:
        found: list[Encoded] = []
        problem: DataError | None = None
        for row, fit in zip(group, fits, strict=True):
            try:
                found += (
                    [self._quick(row, tokens)]
                    if fit and not row.earlier
                    else self._with_earlier(row, tokens)
                    if fit
                    else self._slow_row(row)
                )
            except DataError as error:
                problem = problem or error
        return problem or found

    def _quick(self, row: RowText, tokens: Iterator[list[int]]) -> Encoded:
        prompt, answer = next(tokens), next(tokens)
        ids = prompt + answer
        self._check_bos(ids)
        return Encoded(ids, ids if row.everything else [IGNORED] * len(prompt) + answer, prompt, row.reference)

    def _with_earlier(self, row: RowText, tokens: Iterator[list[int]]) -> list[Encoded]:
        """Returns a row whose prompt holds learnt answers: its pieces must be the tokens of the whole prompt."""
        prompt, answer = next(tokens), next(tokens)
        pieces = [next(tokens) for _ in range(2 * len(row.earlier))]
        labels: list[int] = []
        same = True
        for between, said in zip(pieces[::2], pieces[1::2], strict=True):
            start = len(labels) + len(between)
            same = same and prompt[len(labels) : start] == between and prompt[start : start + len(said)] == said
            labels += [IGNORED] * len(between) + said
        if not same:
            return self._slow_row(row)
        ids = prompt + answer
        self._check_bos(ids)
        return [Encoded(ids, labels + [IGNORED] * (len(prompt) - len(labels)) + answer, prompt, row.reference)]

    def _group(self, group: Sequence[RowText]) -> list[Encoded] | DataError:
        try:
            return list(itertools.chain.from_iterable(self._slow_row(row) for row in group))
        except DataError as error:
            return error

    def _slow_row(self, row: RowText) -> list[Encoded]:
        """Returns a row, after rows of their own for earlier answers whose tokens the whole row would change."""
        prompt = self.batch([row.prompt])[0]
        answer = self._continued(row.prompt, prompt, row.answer)
        ids = prompt + answer
        self._check_bos(ids)
        if row.everything:
            return [Encoded(ids, self._without(row, ids, len(prompt)), prompt, row.reference)]
        labels = [IGNORED] * len(prompt) + answer
        alone: list[Encoded] = []
        for span in row.earlier:
            before = self.batch([row.prompt[: span.start]])[0]
            said = self._continued(row.prompt[: span.start], before, row.prompt[span.start : span.end])
            start, end = len(before), len(before) + len(said)
            if prompt[:end] == before + said:
                labels[start:end] = said
            else:
                alone.append(Encoded(before + said, [IGNORED] * start + said, before, span.reference))
        return [*alone, Encoded(ids, labels, prompt, row.reference)]

    def _continued(self, prompt: str, prompt_ids: list[int], answer: str) -> list[int]:
        """Returns the tokens that a model writes after `prompt_ids` to have written `answer`.

        Tokenizers that mark the beginning of a text (`\u2581`) would mark that of an answer, which is none.
        """
        if self._plain:
            return self.batch([answer])[0]
        whole, anchored, anchor = self.batch([prompt + answer, ANCHOR + answer, ANCHOR])
        if whole[: len(prompt_ids)] == prompt_ids:
            return whole[len(prompt_ids) :]
        if anchored[: len(anchor)] == anchor:
            return anchored[len(anchor) :]
        raise DataError(
            "the tokenizer joins the start of an answer to the prompt before it, so training would see other tokens than inference",
            hint="use a template that ends the generation prompt with a special token or a line end: `data.chat_template`",
        )

    def _without(self, row: RowText, ids: list[int], prompt: int) -> list[int]:
        """Returns the labels of a row of which everything is learnt but some parts; `prompt` is its number of prompt tokens."""
        labels = list(ids)
        offsets = self.tokenizer(row.prompt, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        for span in row.untrained:
            for index, (low, high) in enumerate(offsets):
                if low < span.end and high > span.start:
                    labels[index] = IGNORED
            if span.end > len(row.prompt):
                labels[prompt:] = [IGNORED] * (len(ids) - prompt)
        if all(label == IGNORED for label in labels[1:]):
            raise DataError("no token of the row is learnt: every turn has `train: false`")
        return labels

    def _check_bos(self, ids: Sequence[int]) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[0] == bos and bos not in self.stops and ids[1:2] == [bos]:
            raise DataError(
                "the chat template writes the beginning-of-sequence token twice", hint="take one `bos_token` out of the template"
            )

    def _fast(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def _slow(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        found = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return [list(ids) for ids in found]

    def _ends_are_sharp(self) -> bool:
        """Whether the end of a turn splits the text before anything else does, so that what follows never changes what precedes."""
        added = self.tokenizer.added_tokens_decoder
        return all(
            index in added and not (added[index].lstrip or added[index].rstrip or added[index].normalized) for index in self.stops
        )

    def _continues_plainly(self) -> bool:
        """Whether a text has the same tokens at the beginning as after a special token, and nothing is added to it."""
        stop = next(iter(self.stops))
        mark = str(self.tokenizer.convert_ids_to_tokens(stop))
        if str(self.tokenizer.convert_ids_to_tokens(self.batch(["a"])[0][0])) != "a":
            return False
        return all(self.batch([mark + text])[0] == [stop, *self.batch([text])[0]] for text in PROBES)


def _pieces(row: RowText) -> Iterator[str]:
    """Yields the texts that are tokenised for a row: prompt, answer, then what stands before each earlier answer, and that answer."""
    yield row.prompt
    yield row.answer
    reached = 0
    for span in row.earlier:
        yield row.prompt[reached : span.start]
        yield row.prompt[span.start : span.end]
        reached = span.end
