"""The text of a PDF: pages joined, what repeats on every page left out, hyphens at line ends undone."""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sft_play.errors import DataError, first_line
from sft_play.model.rendering import in_time

LEAST_SECONDS, SECONDS_PER_MIB = 60.0, 60.0
"""CPU time that a file's pages may take; a few KiB may name one page's commands a thousand times."""
REPEATED_PAGES = 3
"""From so many pages on, a first or last line that most of them share is a header or footer."""

_HYPHEN = re.compile(r"(?<![\w-])([^\W\d_]{2,})-\n[ \t]*([^\W\d_]+)")
_HYPHENATED = re.compile(r"(?<![\w-])[^\W\d_]+-[^\W\d_]+(?!\w)")
_INLINE_PICTURE = re.compile(rb"(?<!\S)BI\s[^>]{0,500}?\sID\s", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?:;\"'”’)\]]\s*$")


def pdf_text(data: bytes, place: str) -> tuple[str, int, int]:
    """Returns the text, the number of pages, and how many of them are pictures without text. Raises `DataError`."""
    import pypdf
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it mends small faults, and says each
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):  # many are only protected against changes, with an empty password
            raise FileNotDecryptedError("a password is needed")
        seconds = LEAST_SECONDS + SECONDS_PER_MIB * len(data) / 2**20
        with in_time(
            seconds,
            f"is not read after {seconds:.0f} s of computing",
            place=place,
            hint="take it out of the data, or save its text",
        ):
            pages = [(page.extract_text() or "").replace("\r\n", "\n").replace("\r", "\n") for page in reader.pages]
        pictures = sum(not text.strip() and _has_picture(page) for text, page in zip(pages, reader.pages, strict=True))
    except (FileNotDecryptedError, DependencyError) as error:
        raise DataError(f"is encrypted: {error}", place=place, hint="save it without a password (`qpdf --decrypt`)") from None
    # A damaged file meets pypdf's own errors or Python's, depending on where the damage is: 0 columns of a predictor, or 0 units of a
    # font, are divided by; a filter or a method of encryption that pypdf does not know is "not implemented".
    except (PyPdfError, ValueError, TypeError, KeyError, IndexError, AttributeError, OSError, RecursionError, AssertionError,
            ZeroDivisionError, NotImplementedError) as error:  # fmt: skip
        first = first_line(error)
        raise DataError(f"is not a PDF that can be read: {first}", place=place, hint="fetch or save it again") from None
    return join_pages(pages), len(pages), pictures


def _has_picture(page: Any) -> bool:
    """Whether a page shows an image, looked for in its resources and commands without decoding any."""
    resources = page.get("/Resources")
    objects = resources.get_object().get("/XObject") if resources is not None else None
    found = objects.get_object().values() if objects is not None else []
    if any(item.get_object().get("/Subtype") in ("/Image", "/Form") for item in found):
        return True
    content = page.get_contents()
    return content is not None and _INLINE_PICTURE.search(content.get_data()) is not None


def join_pages(pages: Sequence[str]) -> str:
    """Returns the pages as one text: a paragraph that goes on over the page's end is not broken by a blank line."""
    text = ""
    for page in without_running_lines(pages):
        if text and page:
            text += "\n\n" if _SENTENCE_END.search(text) else "\n"
        text += page
    return without_hyphens(text)


def without_running_lines(pages: Sequence[str]) -> list[str]:
    """Leaves out headers, footers and page numbers: first or last lines that more than half of the pages share, digits aside."""
    split = [page.strip().split("\n") for page in pages]
    if len(pages) < REPEATED_PAGES:
        return ["\n".join(lines) for lines in split]
    for at in (0, -1):
        counts = Counter(_shape(lines[at]) for lines in split if lines)
        running = {shape for shape, count in counts.items() if shape and count > len(pages) / 2}
        for lines in split:
            if lines and _shape(lines[at]) in running:
                del lines[at]
    return ["\n".join(lines).strip("\n") for lines in split]


def _shape(line: str) -> str:
    return re.sub(r"\d+", "0", line.strip())


def without_hyphens(text: str) -> str:
    """Joins words that a line's end broke, careful with real hyphens.

    `docu-⏎ment` becomes `document`. Where the text writes the word with its hyphen elsewhere (`well-known`), or what follows begins
    with a capital (`Franco-⏎Prussian`), the hyphen stays and the word moves up.
    """
    written = set(_HYPHENATED.findall(text))

    def joined(match: re.Match[str]) -> str:
        before, after = match.groups()
        hyphenated = f"{before}-{after}"
        return hyphenated if after[0].isupper() or hyphenated in written else before + after

    return _HYPHEN.sub(joined, text)
