"""Documents of each kind, written by the libraries that read them or by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_pdf(
    path: Path, pages: Sequence[Sequence[str]], *, picture: bool = False, password: str | None = None
) -> Path:
    """Write a PDF with these lines on each page; `picture` puts an image on each page."""
    import pypdf
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject, NumberObject

    writer = pypdf.PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for lines in pages:
        page = writer.add_blank_page(width=595, height=842)
        resources = DictionaryObject({NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})})
        content = DecodedStreamObject()
        shown = "".join(f"({line}) Tj 0 -14 Td " for line in lines)
        content.set_data(
            (f"BT /F1 12 Tf 60 780 Td {shown}ET" if lines else "q 100 0 0 100 0 0 cm /I1 Do Q").encode("latin-1")
        )
        if picture:
            image = DecodedStreamObject()
            image.set_data(b"\x00" * 16)
            for key, value in {"/Width": 4, "/Height": 4, "/BitsPerComponent": 8}.items():
                image[NameObject(key)] = NumberObject(value)
            for key, name in {"/Type": "/XObject", "/Subtype": "/Image", "/ColorSpace": "/DeviceGray"}.items():
                image[NameObject(key)] = NameObject(name)
            resources[NameObject("/XObject")] = DictionaryObject({NameObject("/I1"): writer._add_object(image)})
        page[NameObject("/Resources")] = resources
        page[NameObject("/Contents")] = writer._add_object(content)
    if password is not None:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)
    return path


def write_docx(path: Path) -> Path:
    """Write a heading, a paragraph, a table with a merged cell, and another paragraph."""
    import docx

    document = docx.Document()
    document.core_properties.title = "Pump handbook"
    document.add_heading("Pumps", 1)
    document.add_paragraph("A pump moves water.")
    table = document.add_table(2, 3)
    for row in range(2):
        for column in range(3):
            table.cell(row, column).text = f"r{row}c{column}"
    table.cell(0, 0).merge(table.cell(0, 1)).text = "both"
    document.add_paragraph("After the table.")
    document.save(str(path))
    return path


PAGE = """<html><head><title>Valves &amp; more</title><script>var x = 1;</script></head><body>
<nav><a href="a">Home</a> <a href="b">Products</a></nav><main><article><h1>Valves</h1>
<p>A valve stops water when it is closed by hand or by a motor, and lets it through when it is open.</p>
<p>It must be greased once a year, and checked for leaks whenever the pressure falls without a reason.</p>
<ul><li>gate valve</li><li>ball valve</li></ul></article></main><footer>All rights reserved</footer></body></html>"""
