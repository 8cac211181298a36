"""Documents become clean text or are refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.data.documents import SCANNED, Document, clean, join_pages
from sft_play.data.documents import read_document as read_content
from sft_play.data.readers import read_file
from sft_play.errors import DataError
from tests.sample_documents import PAGE, write_docx, write_pdf


def read_document(path: Path) -> Document | str:
    return read_content(path.read_bytes(), path.suffix, str(path))


def read(path: Path) -> Document:
    document = read_document(path)
    assert isinstance(document, Document), document
    return document


def test_plain_text_keeps_indentation_and_loses_what_is_invisible(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_bytes("\ufeff# Title\r\n\r\n\r\n\r\n    code()  \r\ne\u0301\u00a0x\u200by\x07\x00z\ttab\f\n\n".encode())
    document = read(path)
    assert document.text == "# Title\n\n    code()\né xyz\ttab"
    assert clean("\u0928\u094d\u200d\u0928") == "\u0928\u094d\u200d\u0928"  # a joiner that Devanagari needs


def test_html_gives_its_content_and_title_without_navigation(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text(PAGE, encoding="utf-8")
    document = read(path)
    assert (
        document.title == "Valves & more" and "A valve stops water" in document.text and "ball valve" in document.text
    )
    assert all(word not in document.text for word in ("Home", "Products", "All rights", "var x"))


def test_docx_gives_paragraphs_and_tables_in_order(tmp_path: Path) -> None:
    document = read(write_docx(tmp_path / "a.docx"))
    assert document.title == "Pump handbook"
    assert document.text == "Pumps\n\nA pump moves water.\n\nboth | r0c2\nr1c0 | r1c1 | r1c2\n\nAfter the table."


def test_docx_gives_what_forms_and_tracked_changes_wrap(tmp_path: Path) -> None:
    import docx
    from docx.oxml import parse_xml
    from docx.oxml.ns import nsdecls

    def run(words: str) -> str:
        return f"<w:r><w:t xml:space='preserve'>{words}</w:t></w:r>"

    deleted = "<w:del w:id='2' w:author='x'><w:r><w:delText>old </w:delText></w:r></w:del>"
    inline = f"<w:sdt><w:sdtContent>{run('field ')}</w:sdtContent></w:sdt><w:smartTag>{run('Ulm')}</w:smartTag>"
    contents = "<w:sdtPr><w:docPartObj><w:docPartGallery w:val='Table of Contents'/></w:docPartObj></w:sdtPr>"
    ruby = f"<w:r><w:ruby><w:rt>{run('kana')}</w:rt><w:rubyBase>{run('word')}</w:rubyBase></w:ruby></w:r>"
    document = docx.Document()
    for at, block in enumerate(
        (
            f"<w:sdt DECL>{contents}<w:sdtContent><w:p>{run('Pumps 1')}</w:p></w:sdtContent></w:sdt>",
            f"<w:sdt DECL><w:sdtContent><w:p>{run('A form.')}</w:p></w:sdtContent></w:sdt>",
            f"<w:p DECL>{run('A ')}<w:ins w:id='1' w:author='x'>{run('new ')}</w:ins>{deleted}{inline}</w:p>",
            f"<w:p DECL><w:r><w:rPr><w:vanish/></w:rPr><w:t>secret</w:t></w:r>{run('Say ')}{ruby}</w:p>",
            "<w:p DECL><w:r><w:footnoteReference w:id='2'/></w:r></w:p>",
        )
    ):
        document.element.body.insert(at, parse_xml(block.replace("DECL", nsdecls("w"))))
    document.save(str(tmp_path / "a.docx"))
    result = read(tmp_path / "a.docx")
    assert result.text == "A form.\n\nA new field Ulm\n\nSay word" and result.note == "its notes are left out"


def test_pdf_joins_pages_and_undoes_hyphens(tmp_path: Path) -> None:
    pages = [
        ["The docu-", "ment of the well-known", "maker is"],
        ["complete. A well-", "known one. Franco-", "Prussian."],
    ]
    document = read(write_pdf(tmp_path / "a.pdf", pages))
    assert (
        document.text == "The document of the well-known\nmaker is\ncomplete. A well-known one. Franco-Prussian."
        and not document.note
    )


def test_headers_footers_and_page_numbers_are_removed() -> None:
    pages = [f"Manual 7\nText of page {word}.\nPage {number} of 4" for number, word in enumerate("abcd", 1)]
    assert join_pages(pages) == "Text of page a.\n\nText of page b.\n\nText of page c.\n\nText of page d."
    assert join_pages(pages[:2]).startswith("Manual 7")  # two pages are too few to tell


def test_scanned_and_empty_documents_are_skipped_with_the_reason(tmp_path: Path) -> None:
    scanned = read_document(write_pdf(tmp_path / "scan.pdf", [[], []], picture=True))
    assert scanned == SCANNED
    partly = read(write_pdf(tmp_path / "partly.pdf", [["Words."], []], picture=True))
    assert partly.text == "Words." and partly.note == "1 of 2 pages are pictures without text"
    (tmp_path / "empty.txt").write_text(" \n\x00")
    (tmp_path / "empty.html").write_text("<html><body></body></html>")
    for name in ("empty.txt", "empty.html"):
        assert read_document(tmp_path / name) == "no text"
    assert read_document(write_pdf(tmp_path / "blank.pdf", [[]])) == "no text"


@pytest.mark.parametrize("name", ["a.docx", "a.pdf"])
@pytest.mark.parametrize("keep", [40, 0.5])
def test_damaged_files_are_errors_with_their_place(tmp_path: Path, name: str, keep: float) -> None:
    path = tmp_path / name
    whole = (write_docx(path) if name == "a.docx" else write_pdf(path, [["Words."]])).read_bytes()
    path.write_bytes(whole[: int(keep if keep > 1 else keep * len(whole))])
    with pytest.raises(DataError) as error:
        read_document(path)
    assert error.value.place == str(path) and error.value.hint


def test_encrypted_files_are_errors_but_an_empty_password_opens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="encrypted") as error:
        read_document(write_pdf(tmp_path / "a.pdf", [["Secret."]], password="key"))
    assert "without a password" in (error.value.hint or "")
    assert read(write_pdf(tmp_path / "b.pdf", [["Open."]], password="")).text == "Open."
    (tmp_path / "a.docx").write_bytes(b"\xd0\xcf\x11\xe0" + b"\0" * 600)
    with pytest.raises(DataError, match="encrypted, or of Word before 2007"):
        read_document(tmp_path / "a.docx")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"question": "q", "answer": "a"}\n{"question": "q2", "answer": "a2"}\n', "contains rows as JSON"),
        ('[\n {"question": "q"}\n]', "contains rows as JSON"),
        ("{\\rtf1\\ansi words}", "is RTF"),
        ("<!DOCTYPE html>\n<html><body>404</body></html>", "is HTML"),
        ("%PDF-1.4\n", "is a PDF"),
        ("%!PS-Adobe-3.0\n", "is PostScript"),
    ],
)
def test_plain_text_of_another_kind_is_refused_with_its_ending(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content)
    [(place, error)] = read_file(tmp_path / "a.txt")
    assert isinstance(error, DataError) and error.message.startswith(problem) and error.hint
    assert place == error.place == str(tmp_path / "a.txt")
    (tmp_path / "b.md").write_text(f"An example:\n\n{content}")
    assert read(tmp_path / "b.md").text.startswith("An example:")


@pytest.mark.parametrize("content", ["Привет".encode("utf-16-le"), b"name" + bytes(60) + b"0644" + bytes(60) + b"text"])
def test_what_is_mostly_control_characters_is_no_text(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match="so many control characters"):
        read_document(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes("Text: 日本語".encode("iso-2022-jp"))
    with pytest.raises(DataError, match="is ISO-2022-JP"):
        read_document(tmp_path / "a.txt")


def test_colours_of_a_terminal_are_removed_and_marks_of_xml_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\x1b[1;31mred\x1b[0m [31m")
    assert read(tmp_path / "a.txt").text == "red [31m"
    for words in ("<?xml version='1.0'?>\n<page>x</page>", '<doc id="1">\nBerlin\n</doc>\n'):
        (tmp_path / "a.txt").write_text(words)
        assert "is XML" in str(read(tmp_path / "a.txt").note) and read(tmp_path / "a.txt").text == words.strip()
    (tmp_path / "a.md").write_text("<p>A logo</p>\n\n# Pumps <x>")
    assert read(tmp_path / "a.md").note is None


def test_html_in_utf8_that_does_not_say_so_has_the_right_title_and_its_folded_answers(tmp_path: Path) -> None:
    folded = '<div style="display: none">An answer.</div>'
    (tmp_path / "a.html").write_text(
        f"<html><head><title>Café</title></head><body><p>Ein Café?</p>{folded}</body></html>", encoding="utf-8"
    )
    result = read(tmp_path / "a.html")
    assert (result.text, result.title) == ("Ein Café?\nAn answer.", "Café")
