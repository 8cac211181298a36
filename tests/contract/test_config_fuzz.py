"""Whatever bytes a configuration holds, it is accepted or refused in words."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_play.config.load import load_config
from sft_play.errors import UserError

FEW = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FEW
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_configuration_or_an_error(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "main.yaml"
    file.write_bytes(content)
    try:
        load_config(file, (), {})
    except UserError as error:
        assert error.render().startswith("error: ")
