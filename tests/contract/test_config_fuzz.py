"""Ten thousand wrong configurations: each is accepted with all that was typed, or refused in words; none breaks or hangs."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_play.config.keys import schema_keys, variable_name
from sft_play.config.load import load_config, save_config
from sft_play.errors import CheckpointError, UserError
from tests.fuzzing import call_main, clock, judge, wrong_with_error
from tests.mutations import MAIN, bases, make_case

IN_PROCESS = {"default": 1_000, "long": 10_000}
PLANNED = 40
"""One of so many accepted configurations is planned too."""
HARDWARE = "2x24GB"


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No key from the environment, and no cache or run of anybody's."""
    for name in [name for name in os.environ if name.startswith("SFT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield


@pytest.mark.parametrize("count", [IN_PROCESS["default"], pytest.param(IN_PROCESS["long"], marks=pytest.mark.long)])
def test_mutated_files_and_overrides_are_accepted_whole_or_refused_in_words(count: int, quiet: None) -> None:
    texts, codes, problems = bases(), Counter[int | None](), []
    first = 0 if count == IN_PROCESS["default"] else IN_PROCESS["default"]
    for number in range(first, first + count):
        case = make_case(number, texts)
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            outcome = judge(case, Path(folder), again=number % 10 == 0)
            problem = outcome.problem
            if problem is None and outcome.code == 0 and number % PLANNED == 0:
                problem = wrong_with_plan(Path(folder) / MAIN, case.words)
        codes[outcome.code] += 1
        if problem:
            problems.append(f"{problem}\n{case.show()}")
    assert not problems, f"{len(problems)} of {count} cases:\n" + "\n\n".join(problems[:5])
    # A mutation that never gets past the parser proves little, and one that always passes proves nothing.
    assert codes[0] > count / 20 and codes[2] > count / 3, codes


def wrong_with_plan(path: Path, words: tuple[str, ...] | list[str]) -> str | None:
    """Returns what is wrong with the plan of an accepted configuration, if anything; the command ends with 0, 2, 3 or 4."""
    words = [word for word in words if not word.startswith(("JSON=", "HARDWARE=", "NUM_GPUS="))]
    code, out, err = call_main(["plan", f"CONFIG={path}", f"HARDWARE={HARDWARE}", "SOURCE=formula", "JSON=1", *words], seconds=10)
    if code is None:
        return f"the plan breaks: {err}"
    if code not in (0, 2, 3, 4):
        return f"the plan ends with {code}: {err}"
    if code == 0:
        json.loads(out, parse_constant=_refused)
        return None
    return wrong_with_error(err) if code != 3 else None  # what does not fit is told by its parts


def _refused(name: str) -> Any:
    raise AssertionError(f"{name} in JSON")


TEXT_KEYS = sorted(
    key.name for key in schema_keys().values() if str in (key.annotation, *getattr(key.annotation, "__args__", ()))
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from(TEXT_KEYS),
    text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40),
)
def test_typed_text_is_kept_letter_for_letter(key: str, text: str, quiet: None) -> None:
    code, out, err = call_main(["config", "CONFIG=quickstart", f"{variable_name(key)}={text}", "JSON=1"])
    if code == 0:
        value = json.loads(out)[key]["value"]
        assert value == text or (value is None and text == "null")
    else:
        assert code == 2 and wrong_with_error(err) is None, err


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_configuration_or_an_error(content: bytes, quiet: None, tmp_path: Path) -> None:
    file = tmp_path / MAIN
    file.write_bytes(content)
    code, _, err = call_main(["config", f"CONFIG={file}"])
    assert code in (0, 2) and (code == 0 or wrong_with_error(err) is None), err


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_run_s_damaged_configuration_is_an_error(data: st.DataObject, quiet: None, tmp_path: Path) -> None:
    file = tmp_path / "runs" / "one" / "config.json"
    save_config(load_config(Path("configs/smoke.yaml"), (), {}), file)
    whole = json.loads(file.read_text(encoding="utf-8"))
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    values = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    )
    branch: Any = whole
    for _ in range(data.draw(st.integers(0, 2))):
        inner = [name for name in branch if isinstance(branch[name], dict) and branch[name]]
        branch = branch[data.draw(st.sampled_from(inner))] if inner else branch
    branch[data.draw(st.sampled_from([*branch, "new"]))] = data.draw(values)
    file.write_text(json.dumps(whole), encoding="utf-8")
    code, _, err = call_main(["config", "RUN=one"])
    assert code in (0, 2, 5) and (code == 0 or wrong_with_error(err) is None), err
    with clock(2), pytest.raises((CheckpointError, UserError)):
        file.write_text(
            data.draw(st.sampled_from(["", "{", "[" * 20_000, "5", "\ufeff{}", '{"config": 5}', "null"])), encoding="utf-8"
        )
        from sft_play.config.load import read_config

        read_config(file)


def through_the_command(program: Any, tmp_path: Path, numbers: range) -> Counter[int]:
    """Runs the cases of these numbers as processes, `plan` for every third, and checks how each ends."""
    texts, codes = bases(), Counter[int]()
    for number in numbers:
        case = make_case(number, texts)
        folder = tmp_path / str(number)
        folder.mkdir()
        path = case.write(folder)
        words = [word for word in case.words if word.isascii() or "\udcff" not in word]
        command = ["plan", "HARDWARE=2x24GB", "SOURCE=formula"] if number % 3 == 0 else ["config"]
        done = program(command[0], f"CONFIG={path}", *command[1:], *words, timeout=60)
        codes[done.code] += 1
        assert done.code in (0, 2, 3, 4, 5), f"{done.err}\n{case.show()}"
        assert "Traceback" not in done.err, f"{done.err}\n{case.show()}"
        assert done.code in (0, 3) or wrong_with_error(done.err) is None, f"{wrong_with_error(done.err)}\n{case.show()}"
    return codes


def test_some_wrong_configurations_through_the_command(program, tmp_path: Path) -> None:
    assert sum(through_the_command(program, tmp_path, range(20_000, 20_010)).values()) == 10


@pytest.mark.long
def test_a_hundred_wrong_configurations_through_the_command(program, tmp_path: Path) -> None:
    codes = through_the_command(program, tmp_path, range(30_000, 30_100))
    assert sum(codes.values()) == 100 and codes[2] > 30, codes
