"""The page's files put together: for the server by reference, for a report with everything inside."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

from sft_play.files import finite

SCRIPTS = ("uPlot.iife.min.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")
PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"


@cache
def page_files() -> dict[str, str]:
    """Returns name -> text of the scripts and styles. uPlot 1.6.32 (MIT) is vendored with its licence."""
    folder = files("sft_play.report") / "static"
    return {name: (folder / name).read_text(encoding="utf-8") for name in (*SCRIPTS, *STYLES)}


def page_html(record: dict[str, Any] | None) -> str:
    """Returns the page: one that asks a server, or with a `record` inside, one that needs nothing else.

    Of scripts and styles only those of these very bytes may run (their hashes are the policy), whatever a run's data hold.
    """
    template = (files("sft_play.report") / "static" / "page.html").read_text(encoding="utf-8")
    if record is None:
        styles = [f'<link rel="stylesheet" href="page/{name}">' for name in STYLES]
        scripts = [f'<script src="page/{name}"></script>' for name in SCRIPTS]
        parts = {"policy": PAGE_POLICY, "data": ""}
    else:
        texts = page_files()
        styles = [f"<style>{texts[name]}</style>" for name in STYLES]
        scripts = [f"<script>{texts[name]}</script>" for name in SCRIPTS]
        allowed = [
            f"{kind} {' '.join(_hash(texts[name]) for name in names)}"
            for kind, names in (("script-src", SCRIPTS), ("style-src", STYLES))
        ]
        data = json.dumps(finite(record), default=str, ensure_ascii=False, separators=(",", ":"))
        inside = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        parts = {
            "policy": f"default-src 'none'; {'; '.join(allowed)}; img-src data:; base-uri 'none'; form-action 'none'",
            "data": f'<script type="application/json" id="data">{inside}</script>',
        }
    parts |= {"styles": "\n".join(styles), "scripts": "\n".join(scripts)}
    before, _, after = template.partition("{data}")  # data may hold braces; nothing is replaced inside it
    return _filled(before, parts) + parts["data"] + _filled(after, parts)


def _filled(template: str, parts: dict[str, str]) -> str:
    for name in ("policy", "styles", "scripts"):
        template = template.replace(f"{{{name}}}", parts[name])
    return template


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
