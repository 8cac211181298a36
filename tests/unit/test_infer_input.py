"""Prompts from files: texts and JSON lines, and every bad line by its number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.errors import DataError, UserError
from sft_play.infer import read_prompts


def test_a_text_file_holds_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text('  first \n\n{"prompt": "taken as text"}\nthird', encoding="utf-8")
    rows = read_prompts(path)
    assert [row.messages for row in rows] == [
        [{"role": "user", "content": text}] for text in ("first", '{"prompt": "taken as text"}', "third")
    ]
    assert [row.place for row in rows] == [f"{path}:{line}" for line in (1, 3, 4)]


def test_json_lines_hold_prompts_and_conversations(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?", "name": "dropped"}]
    path.write_text("\n".join(map(json.dumps, [{"prompt": "two\nlines", "id": 1}, {"messages": messages}])))
    first, second = read_prompts(path)
    assert first.messages == [{"role": "user", "content": "two\nlines"}]
    assert [message["content"] for message in second.messages] == ["Be brief.", "Why?"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "not JSON"),
        ("[1]", "expected an object"),
        ('{"text": "x"}', "expected an object with `prompt`"),
        ('{"prompt": 3}', "`prompt` is not a text"),
        ('{"prompt": " "}', "`prompt` is not a text, or empty"),
        ('{"messages": []}', "`messages` is not a list of"),
        ('{"messages": [{"role": "user"}]}', "`messages` is not a list of"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "nothing to answer"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n{line}\n')
    with pytest.raises(UserError) as caught:
        read_prompts(path)
    text = caught.value.render()
    assert caught.value.exit_code == 4
    assert text.count(words) == 2
    assert f"{path}:2: " in text
    assert f"{path}:3: " in text


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00bad"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "questions.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"no prompts|UTF-8"):
        read_prompts(path)


def test_reading_input_needs_no_torch() -> None:
    code = "import sft_play.infer, sft_play.export, sft_play.serve, sys; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout == "False\n"
    )


def test_characters_that_end_lines_elsewhere_are_content(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "one\u2028line"}\n', encoding="utf-8")
    assert [row.messages[0]["content"] for row in read_prompts(path)] == ["one\u2028line"]


def test_the_questions_are_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "questions.txt"
    path.write_text("first\n", encoding="utf-8")
    for output, words in ((path, "is the same file as `INPUT`"), (tmp_path / "none" / "a.jsonl", "cannot be written")):
        command = [sys.executable, "-m", "sft_play", "infer", "RUN=any", f"INPUT={path}", f"OUTPUT={output}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and words in done.stderr
    assert path.read_text(encoding="utf-8") == "first\n"
