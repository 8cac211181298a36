"""Documents (txt, md, rst, html, docx, pdf) to clean text with their source, by libraries made for each kind.

`read_document` gives a `Document`, or a `Skipped` with its reason where a file is whole but holds no text (empty, or pictures of
pages). A file that cannot be read (damaged, encrypted, not UTF-8) is a `DataError` with its place.
"""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sft_play.data.encodings import CONVERT, refuse_wide
from sft_play.data.left import EMPTY, SCANNED
from sft_play.data.pdf import pdf_text
from sft_play.errors import DataError, first_line

PLAIN = (".txt", ".text", ".md", ".markdown", ".rst")
HTML = (".html", ".htm", ".xhtml")
DOCUMENTS = (*PLAIN, *HTML, ".docx", ".pdf")
"""Endings of the files that are read as one document each."""
OLE = b"\xd0\xcf\x11\xe0"
"""How Office files begin that are encrypted, or of the kind before 2007."""

_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]")
"""Soft hyphen, zero-width space, word joiner, byte order mark. Joiners that scripts and emoji need stay."""
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_BLANK_LINES = re.compile(r"\n{3,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document as clean text."""

    text: str
    path: str
    """The file it came from."""
    title: str | None = None
    """What html and docx name as their title."""
    note: str | None = None
    """What was left out: `2 of 9 pages are pictures without text`."""

    def row(self) -> Mapping[str, Any]:
        """Returns the columns that readers, filters and formats see."""
        return {"text": self.text, "path": self.path, "title": self.title}


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A file, or a row, that is whole but gives nothing to learn: said and counted."""

    reason: str
    place: str


def read_document(path: Path, data: bytes | None = None) -> Document | Skipped:
    """Returns the text of a file. Raises `DataError` where it cannot be read, `OSError` where it cannot be opened.

    `data` is the file's content where it was unpacked already; the kind goes by the ending of `path` in any case.
    """
    suffix, place = path.suffix.lower(), str(path)
    content = path.read_bytes() if data is None else data
    if not content.strip():
        return Skipped(reason=EMPTY, place=place)
    reader: Callable[[bytes, str], _Read] = _plain
    if suffix in HTML:
        reader = _html
    elif suffix == ".docx":
        reader = _docx
    elif suffix == ".pdf":
        reader = _pdf
    read = reader(content, place)
    text = clean(read.text)
    if not text:
        return Skipped(reason=SCANNED if read.pictures else EMPTY, place=place)
    title = " ".join(clean(read.title or "").split()) or None
    return Document(text=text, path=place, title=title, note=read.note)


def clean(text: str) -> str:
    """Returns text in Unicode's composed form with plain spaces and line ends, without control characters.

    Indentation stays, since code and lists mean something by it; spaces at line ends and more than one blank line go.
    """
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").replace("\v", "\n"))
    text = _SPACES.sub(" ", _INVISIBLE.sub("", text)).replace("\u2028", "\n").replace("\u2029", "\n\n")
    if any(unicodedata.category(mark) == "Cc" for mark in set(text) - {"\n", "\t"}):
        text = "".join(mark for mark in text if mark in "\n\t" or unicodedata.category(mark) != "Cc")
    lines = "\n".join(line.rstrip() for line in text.split("\n"))
    return _BLANK_LINES.sub("\n\n", lines).strip("\n").rstrip()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    text: str
    title: str | None = None
    pictures: bool = False
    note: str | None = None


def _plain(data: bytes, place: str) -> _Read:
    refuse_wide(data[:4], place)
    try:
        return _Read(text=data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, byte = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise DataError(
            f"is not UTF-8 text: byte {byte} of the line",
            place=f"{place}:{line}",
            hint=CONVERT,
        ) from None


def _html(data: bytes, place: str) -> _Read:
    """Returns the main content of a page without navigation; all its text where no main content is found."""
    import logging

    import trafilatura
    from lxml import html
    from lxml.etree import LxmlError

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # it logs every page in which it finds nothing
    try:
        tree = html.document_fromstring(data)
    except (LxmlError, ValueError) as error:
        raise DataError(f"is not HTML: {first_line(error)}", place=place) from None
    found, pictures = tree.find(".//title"), tree.find(".//img") is not None
    title = found.text_content() if found is not None else None
    text = trafilatura.extract(data, include_comments=False, include_tables=True) or trafilatura.html2txt(data)
    if not text:  # too short for trafilatura to look at
        for hidden in tree.xpath("//head | //script | //style | //noscript | //template"):
            hidden.drop_tree()
        text = tree.text_content()
    return _Read(text=text, title=title, pictures=pictures)


def _docx(data: bytes, place: str) -> _Read:
    """Returns paragraphs and tables in order; cells of a table's row are separated by ` | `."""
    import zipfile

    import docx
    from docx.opc.exceptions import OpcError
    from lxml.etree import LxmlError

    if data.startswith(OLE):
        raise DataError("is encrypted, or of Word before 2007", place=place, hint="save it without a password, as docx")
    try:
        document = docx.Document(io.BytesIO(data))
        text = "\n".join(_block(block) for block in document.iter_inner_content())
        pictures = any("image" in rel.reltype for rel in document.part.rels.values())
        return _Read(text=text, title=document.core_properties.title, pictures=pictures)
    except (OpcError, LxmlError, zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError, AttributeError) as error:
        first = first_line(error)
        raise DataError(f"is not a docx file that can be read: {first}", place=place, hint="open and save it again") from None


def _block(block: Any) -> str:
    """Returns a paragraph's or a table's text, a blank line after it."""
    from docx.table import Table

    if not isinstance(block, Table):
        return f"{block.text}\n"
    lines = []
    for row in block.rows:
        cells, last = [], None
        for cell in row.cells:
            if cell._tc is last:  # a merged cell is listed once for each column it spans
                continue
            last = cell._tc
            cells.append(" ".join(part for item in cell.iter_inner_content() if (part := " ".join(_block(item).split()))))
        lines.append(" | ".join(cells))
    return "\n".join(lines) + "\n"


def _pdf(data: bytes, place: str) -> _Read:
    text, pages, pictures = pdf_text(data, place)
    note = f"{pictures} of {pages} pages are pictures without text" if pictures else None
    return _Read(text=text, pictures=pictures > 0, note=note)
