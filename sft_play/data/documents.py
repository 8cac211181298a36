"""Documents (txt, md, rst, html, docx, pdf) to clean text, by a library for each kind."""

from __future__ import annotations

import io
import logging
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sft_play.data.streams import HTML, refuse_other_text, refuse_wide, utf8
from sft_play.errors import DataError, first_line
from sft_play.model.tokenizer import in_time

SCANNED = "pictures without text: it must be read by OCR first"
EMPTY = "no text"
"""Why a document gives nothing to learn."""
OLE = b"\xd0\xcf\x11\xe0"
"""How Office files begin that are encrypted, or of the kind before 2007."""

_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff]")
"""Soft hyphen, zero-width space, word joiner, byte order mark. Joiners that scripts and emoji need stay."""
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
"""What colours a terminal's text."""
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_XML = re.compile(rb"\s*(?:<\?xml|<(\w+)\b[^>]*>.*</\1>\s*\Z)", re.DOTALL)
_BLANK_LINES = re.compile(r"\n{3,}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """What a file contains."""

    text: str
    title: str | None = None
    """What html and docx name as their title."""
    pictures: bool = False
    """Whether it has some."""
    note: str | None = None
    """What was left out: `2 of 9 pages are pictures without text`."""


def read_document(content: bytes, ending: str, place: str) -> Document | str:
    """Return a file's content as clean text, or why it gives nothing to learn. Raise `DataError` if it cannot be
    read.
    """
    if not content.strip():
        return EMPTY
    document = DOCUMENTS[ending](content, place)
    text = clean(document.text)
    if not text:
        return SCANNED if document.pictures else EMPTY
    return replace(document, text=text, title=" ".join(clean(document.title or "").split()) or None)


def clean(text: str) -> str:
    """Return text in Unicode's composed form with plain spaces and line ends, without control characters.

    Indentation stays, since code and lists need it; spaces at line ends and more than one blank line go.
    """
    text = unicodedata.normalize(
        "NFC", _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").replace("\v", "\n")
    )
    text = _SPACES.sub(" ", _INVISIBLE.sub("", text)).replace("\u2028", "\n").replace("\u2029", "\n\n")
    if any(unicodedata.category(mark) == "Cc" for mark in set(text) - {"\n", "\t"}):
        text = "".join(mark for mark in text if mark in "\n\t" or unicodedata.category(mark) != "Cc")
    lines = "\n".join(line.rstrip() for line in text.split("\n"))
    return _BLANK_LINES.sub("\n\n", lines).strip("\n").rstrip()


def _plain(data: bytes, place: str) -> Document:
    refuse_wide(data[:4], place)
    refuse_other_text(data, place)
    try:
        note = "it is XML, whose marks are learnt as they stand" if _XML.match(data) else None
        return Document(text=data.decode("utf-8-sig"), note=note)
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start)
        return Document(
            text=utf8(data.split(b"\n")[number], f"{place}:{number + 1}")
        )  # raises, with the byte of the line


WITHIN_LINES = ("abbr", "b", "cite", "em", "font", "i", "mark", "small", "span", "strong", "sub", "sup", "u")
"""Elements of HTML that begin no line."""


def _html(data: bytes, place: str) -> Document:
    """Return the main content of a page without navigation; all its text where no main content is found."""
    import trafilatura
    from lxml import html
    from lxml.etree import LxmlError, strip_tags

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)  # it logs every page in which it finds nothing
    try:
        tree = trafilatura.load_html(data)  # which knows the encoding better than lxml
        tree = html.document_fromstring(data) if tree is None else tree
    except (LxmlError, ValueError) as error:
        raise DataError(f"is not HTML: {first_line(error)}", place=place) from None
    title_element, pictures = tree.find(".//title"), tree.find(".//img") is not None
    title = title_element.text_content() if title_element is not None else None
    strip_tags(tree, *WITHIN_LINES)  # trafilatura begins a line at each where it finds no main content
    text = trafilatura.extract(tree, include_comments=False, include_tables=True) or trafilatura.html2txt(data)
    if not text:  # too short for trafilatura to look at
        for hidden in tree.xpath("//head | //script | //style | //noscript | //template"):
            hidden.drop_tree()
        text = tree.text_content()
    return Document(text=text, title=title, pictures=pictures)


def _docx(data: bytes, place: str) -> Document:
    """Return paragraphs and tables in order; cells of a table's row are separated by ` | `.

    Tracked changes count as accepted. Notes and text boxes have no place in the order, and are left out.
    """
    import docx
    from docx.opc.exceptions import OpcError
    from docx.oxml.ns import qn
    from lxml.etree import LxmlError

    if data.startswith(OLE):
        raise DataError("is encrypted, or of Word before 2007", place=place, hint="save it without a password, as docx")
    try:
        document = docx.Document(io.BytesIO(data))
        _unwrap(document.element.body)
        text = "\n".join(_block(block) for block in document.iter_inner_content())
        pictures = any("image" in rel.reltype for rel in document.part.rels.values())
        there = [
            what
            for what, tags in LEFT_OUT.items()
            if next(document.element.body.iter(*map(qn, tags)), None) is not None
        ]
        note = f"its {' and '.join(there)} are left out" if there else None
        return Document(text=text, title=document.core_properties.title, pictures=pictures, note=note)
    except (OpcError, LxmlError, zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError, AttributeError) as error:
        problem = f"is not a docx file that can be read: {first_line(error)}"
        raise DataError(problem, place=place, hint="open and save it again") from None


WRAPPERS = ("w:sdt", "w:ins", "w:moveTo", "w:smartTag", "w:fldSimple", "w:customXml")
"""What python-docx does not look into: form fields, inserted text, marked words."""
LEFT_OUT = {
    "notes": ("w:footnoteReference", "w:endnoteReference"),
    "text boxes": ("w:txbxContent",),
    "formulas": ("m:oMath",),
}


def _unwrap(body: Any) -> None:
    """Put the content of each of `WRAPPERS` in its place, but no table of contents, and remove hidden text."""
    from docx.oxml.ns import qn

    for mark in list(body.iter(qn("w:vanish"))):
        run = mark.getparent().getparent()
        if run.tag == qn("w:r") and mark.get(qn("w:val")) not in ("0", "false") and run.getparent() is not None:
            run.getparent().remove(run)
    for ruby in list(body.iter(qn("w:ruby"))):  # of words and how they are spoken, the words
        parent = ruby.getparent()
        at = parent.index(ruby)
        parent[at : at + 1] = [text for base in ruby.iter(qn("w:rubyBase")) for text in base.iter(qn("w:t"))]
    for wrapper in list(body.iter(*map(qn, WRAPPERS))):
        parent, content = wrapper.getparent(), wrapper
        if wrapper.tag == qn("w:sdt"):
            content = wrapper.find(qn("w:sdtContent"))
            gallery = next(wrapper.iter(qn("w:docPartGallery")), None)
            if content is None or (gallery is not None and gallery.get(qn("w:val")) == "Table of Contents"):
                continue
        at = parent.index(wrapper)
        parent[at : at + 1] = list(content)


def _block(block: Any) -> str:
    """Return a paragraph's or a table's text, a blank line after it."""
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
            cells.append(
                " ".join(part for item in cell.iter_inner_content() if (part := " ".join(_block(item).split())))
            )
        lines.append(" | ".join(cells))
    return "\n".join(lines) + "\n"


# The text of a PDF: pages joined, what repeats on every page left out, hyphens at line ends undone.


LEAST_SECONDS, SECONDS_PER_MIB = 60.0, 60.0
"""CPU time that a file's pages may take; a few KiB may name one page's commands a thousand times."""
REPEATED_PAGES = 3
"""From so many pages on, a first or last line that most of them share is a header or footer."""

_HYPHEN = re.compile(r"(?<![\w-])([^\W\d_]{2,})-\n[ \t]*([^\W\d_]+)")
_HYPHENATED = re.compile(r"(?<![\w-])[^\W\d_]+-[^\W\d_]+(?!\w)")
_SENTENCE_END = re.compile(r"[.!?:;\"'”’)\]]\s*$")


def _pdf(data: bytes, place: str) -> Document:
    import pypdf
    from pypdf.errors import DependencyError, FileNotDecryptedError, PyPdfError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it repairs small faults, and says each
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(
            ""
        ):  # many are only protected against changes, with an empty password
            raise FileNotDecryptedError("a password is needed")
        seconds = LEAST_SECONDS + SECONDS_PER_MIB * len(data) / 2**20
        problem = f"is not read after {seconds:.0f} s of computing"
        with in_time(seconds, problem, place=place, hint="remove it from the data, or save its text"):
            pages = [(page.extract_text() or "").replace("\r\n", "\n").replace("\r", "\n") for page in reader.pages]
        pictures = sum(
            not text.strip() and len(page.images) > 0 for text, page in zip(pages, reader.pages, strict=True)
        )
    except (FileNotDecryptedError, DependencyError) as error:
        raise DataError(
            f"is encrypted: {error}", place=place, hint="save it without a password (`qpdf --decrypt`)"
        ) from None
    # A damaged file meets pypdf's own errors or Python's, depending on where the damage is: 0 columns of a predictor,
    # or 0 units of a font, are divided by; a filter or a method of encryption that pypdf does not know is "not
    # implemented".
    except (
        PyPdfError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OSError,
        RecursionError,
        AssertionError,
        ZeroDivisionError,
        NotImplementedError,
    ) as error:
        raise DataError(
            f"is not a PDF that can be read: {first_line(error)}", place=place, hint="fetch or save it again"
        ) from None
    note = f"{pictures} of {len(pages)} pages are pictures without text" if pictures else None
    return Document(text=join_pages(pages), pictures=pictures > 0, note=note)


def join_pages(pages: Sequence[str]) -> str:
    """Return the pages as one text: no blank line breaks a paragraph that continues on the next page."""
    text = ""
    for page in without_running_lines(pages):
        if text and page:
            text += "\n\n" if _SENTENCE_END.search(text) else "\n"
        text += page
    return without_hyphens(text)


def without_running_lines(pages: Sequence[str]) -> list[str]:
    """Leave out headers, footers and page numbers: first or last lines that more than half of the pages share, digits
    aside.
    """
    split = [page.strip().split("\n") for page in pages]
    for at in (0, -1) if len(pages) >= REPEATED_PAGES else ():
        shapes = [re.sub(r"\d+", "0", lines[at].strip()) if lines else "" for lines in split]
        counts = Counter(shapes)
        for lines, shape in zip(split, shapes, strict=True):
            if shape and counts[shape] > len(pages) / 2:
                del lines[at]
    return ["\n".join(lines).strip("\n") for lines in split]


def without_hyphens(text: str) -> str:
    """Join words that were hyphenated at line ends, and keep real hyphens.

    `docu-⏎ment` becomes `document`. Where the text writes the word with its hyphen elsewhere (`well-known`), or what
    follows begins with a capital (`Franco-⏎Prussian`), the hyphen stays and the word moves up.
    """
    written = set(_HYPHENATED.findall(text))

    def joined(match: re.Match[str]) -> str:
        before, after = match.groups()
        hyphenated = f"{before}-{after}"
        return hyphenated if after[0].isupper() or hyphenated in written else before + after

    return _HYPHEN.sub(joined, text)


DOCUMENTS: Mapping[str, Callable[[bytes, str], Document]] = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst"), _plain),
    **dict.fromkeys(HTML, _html),
    ".docx": _docx,
    ".pdf": _pdf,
}
"""Ending of a file that is one document -> what reads it."""
