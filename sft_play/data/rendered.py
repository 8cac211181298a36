"""What a chat template really writes, as one checksum: files may stay the same while the library that renders them changes."""

from __future__ import annotations

import json
from typing import Any

from sft_play.files import text_sha256
from sft_play.model.rendering import write_chat

CONVERSATION = [
    {"role": "system", "content": "Answer \u00abbriefly\u00bb."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": " And\n3 + 3? "},
    {"role": "assistant", "content": "6"},
]
DAY = "01 Jan 2026"


def template_sha256(tokenizer: Any) -> str | None:
    """Returns a sha256 over a sample conversation as the tokenizer's template writes it, with and without the prompt for an answer.

    Templates that write today's date get a fixed one. Returns `None` where there is no template, or one that cannot write the sample
    even without its system turn.
    """
    if not tokenizer.chat_template:
        return None
    import jinja2

    for turns in (CONVERSATION, CONVERSATION[1:]):
        try:
            written = [
                write_chat(tokenizer, turns[:length], add_generation_prompt=prompt, date_string=DAY, strftime_now=lambda _: DAY)
                for length, prompt in ((len(turns), False), (len(turns) - 1, True))
            ]
        except (jinja2.TemplateError, TypeError, KeyError, ValueError):
            continue
        return text_sha256(json.dumps(written))
    return None
