"""Whatever bytes a configuration holds, it is accepted or refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_play.config.load import load_config, read_config, save_config
from sft_play.errors import CheckpointError, UserError

FEW = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
)


@FEW
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_configuration_or_an_error(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "main.yaml"
    file.write_bytes(content)
    try:
        load_config(file, (), {})
    except UserError as error:
        assert error.render().startswith("error: ")


@FEW
@given(data=st.data())
def test_a_run_s_damaged_configuration_is_an_error(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    save_config(load_config(Path("configs/smoke.yaml"), (), {}), file)
    branch: Any = (whole := json.loads(file.read_text(encoding="utf-8")))
    for _ in range(data.draw(st.integers(0, 2))):
        inner = [name for name in branch if isinstance(branch[name], dict) and branch[name]]
        branch = branch[data.draw(st.sampled_from(inner))] if inner else branch
    branch[data.draw(st.sampled_from([*branch, "new"]))] = data.draw(VALUES)
    text = json.dumps(whole)
    file.write_text(text[: data.draw(st.just(len(text)) | st.integers(0, len(text)))], encoding="utf-8")
    try:
        read_config(file)
    except (CheckpointError, UserError) as error:
        assert error.render().startswith("error: ")
