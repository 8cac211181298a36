"""`make config` and the files rendered from the schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scripts import render_reference
from sft_play.config.yaml_files import read_plain_yaml
from tests.conftest import Program
from tests.contract.test_makefile import HERE, make
from tests.documents import ROOT
from tests.processor_time import importing, seconds_of

PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
SCHEMA = jsonschema.Draft7Validator(json.loads((ROOT / "configs" / "schema.json").read_text(encoding="utf-8")))


# make removes spaces before a value, so those cannot be typed to it
typed_text = (
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    .map(str.lstrip)
    .filter(
        lambda text: bool(text) and not text.startswith("~")  # a user's folder, refused where there is no such user
    )
)


@settings(max_examples=15)
@example("a b")
@example('it\'s "quoted"')
@example("$HOME $(shell touch pwned) ${x} `id` $$")
@example("back\\slash \\ end\\")
@example("# no comment; | & * ? [a] {b}")
@example("-- --x=y")
@example("two\nlines\tand a tab\\\n")
@given(typed_text)
def test_any_text_survives_make_and_shell(value: str) -> None:
    done = make(*HERE, "config", "CONFIG=configs/smoke.yaml", "JSON=1", f"MODEL_NAME={value}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model.name"] == {"value": value, "origin": f"make MODEL_NAME={value}"}
    assert not (ROOT / "pwned").exists()


@pytest.mark.quiet
@pytest.mark.parametrize(
    "words", [("config", "CONFIG=configs/quickstart.yaml"), ("gpu-info",)], ids=["config", "gpu-info"]
)
def test_quick_commands_answer_within_half_a_second(program, words: tuple[str, ...]) -> None:
    """Compare processor time with that of `import torch` (1.8 s on a quiet machine), which a busy machine slows too."""
    seconds = min(seconds_of(lambda: program(*words))[0] for _ in range(3))
    assert seconds < 0.3 * importing("torch"), seconds


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_fits_the_schema_for_editors(preset: Path) -> None:
    assert [problem.message for problem in SCHEMA.iter_errors(read_plain_yaml(preset))] == []


def test_the_schema_for_editors_knows_the_types_of_a_source() -> None:
    source = {
        "path": "a.jsonl",
        "weight": 0.5,
        "columns": {"question": "frage"},
        "name": None,
        "split": "${data.split}",
    }
    assert SCHEMA.is_valid({"data": {"sources": [source]}})
    for wrong in ({"weight": "much"}, {"rows": 0}, {"colums": {}}):
        assert not SCHEMA.is_valid({"data": {"sources": [source | wrong]}}), wrong


@pytest.mark.slow
def test_rendered_files_are_up_to_date() -> None:
    rendered = {
        render_reference.TABLE: render_reference.render_table(),
        ROOT / "docs" / "configuration.md": render_reference.render_document(),
        ROOT / "configs" / "schema.json": render_reference.render_schema(),
    }
    assert [path for path, text in rendered.items() if path.read_text(encoding="utf-8") != text] == [], (
        "run `make render`"
    )


def test_a_data_file_as_configuration_is_refused_with_the_right_key(in_process: Program, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    in_process("train", f"CONFIG={rows}").refused(2, f"DATA_TRAIN_PATH={rows}")
