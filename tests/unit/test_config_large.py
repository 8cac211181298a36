"""Values that no memory, no file system and no stack holds: one clear error each, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.config.load import load_config, read_config, save_config
from sft_play.config.yaml_files import scalar_text
from sft_play.errors import CheckpointError, UserError
from sft_play.plan.plan import Plan
from sft_play.runs.prepared import Prepared
from sft_play.runs.stamp import Stamp

LARGE = ("9" * 309, "0x" + "f" * 300, "0x" + "f" * 5_000)
FORMS = (
    "train: {{max_steps: {}}}", "train: {{learning_rate: {}}}", "train: {{lr_scheduler_kwargs: {{a: {}}}}}",
    "model: {{name: x/y, max_seq_len: {}}}",
)  # fmt: skip


def written(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text if "model:" in text else f"model: {{name: x/y}}\n{text}")
    return path


@pytest.mark.parametrize("number", LARGE, ids=lambda text: f"{text[:3]}-{len(text)}")
@pytest.mark.parametrize(
    "form", [*FORMS, "data: {{sources: [{{path: x, rows: {}}}]}}", "data: {{sources: [{{path: x, weight: {}}}]}}"]
)
def test_integers_of_hundreds_of_digits(form: str, number: str, tmp_path: Path) -> None:
    text = form.format(number) + ("" if "data:" in form else "\ndata: {train_path: x}")
    with pytest.raises(UserError) as caught:
        load_config(written(tmp_path, text), environ={})
    assert number[:20] in caught.value.render() and len(caught.value.render()) < 1_000


def test_a_long_integer_is_written_as_yaml_reads_it() -> None:
    assert scalar_text(16**5_000 - 1) == "0x" + "f" * 5_000 and scalar_text(-12) == "-12"


@pytest.mark.parametrize("where", ["x" * 5_000, "x" * 5_000 + ":y"])
def test_a_metric_that_no_folder_can_be_called(where: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder can be called so"):
        load_config(
            written(tmp_path, f"data: {{train_path: x, validation: 0.1}}\neval: {{metrics: ['evaluate:{where}']}}"), environ={}
        )


@pytest.mark.parametrize("name", ["~nosuchuser9/x", "x" * 5_000])
def test_a_name_that_is_no_folder_with_code_of_its_own(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.name"):
        load_config(written(tmp_path, f"model: {{name: {name}, trust_remote_code: true}}\ndata: {{train_path: x}}"), environ={})


@pytest.mark.parametrize("depth", [100, 900, 50_000])
def test_a_saved_configuration_that_is_nested_too_deep(depth: int, tmp_path: Path) -> None:
    saved = tmp_path / "config.json"
    save_config(load_config(written(tmp_path, "data: {train_path: x}"), environ={}), saved)
    text = saved.read_text().replace('"config": {', f'"config": {{"zzz": {"[" * depth}{"]" * depth}, ', 1)
    saved.write_text(text)
    with pytest.raises(CheckpointError, match="nested"):
        read_config(saved)


@pytest.mark.parametrize("text", ["[" * 50_000, '{"world_size": 1, "num_no', "{}", "[]", "5"])
@pytest.mark.parametrize("kind", [Plan, Prepared, Stamp])
def test_a_file_of_a_run_that_is_cut_or_no_such_file(kind: type[Plan | Prepared | Stamp], text: str, tmp_path: Path) -> None:
    path = tmp_path / "stamp.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        kind.load(tmp_path if kind is Stamp else path)
    assert caught.value.place == str(path)
    assert json.dumps(caught.value.message)
