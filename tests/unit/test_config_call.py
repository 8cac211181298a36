"""Command lines as people type them: every form that is taken, and what is said about the others."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.config.call import Call, parse_call
from sft_play.config.keys import RANGES, REFUSED, find_key, schema_keys, table, variable_name, variables
from sft_play.errors import UserError


def call(*words: str, environ: Mapping[str, str] | None = None) -> Call:
    return parse_call(list(words), COMMANDS, environ or {})


def refused(*words: str, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        call(*words, environ=environ)
    assert caught.value.exit_code == 2
    return caught.value.render()


def given_to_make(variables: Mapping[str, str], flags: str = "") -> dict[str, str]:
    """Returns the environment of a recipe, with values written as GNU make 4.3 writes them."""

    def quoted(value: str) -> str:
        doubled = value.replace("$", "$$").replace("\\", "\\\\")
        return doubled.replace(" ", "\\ ").replace("\t", "\\\t")

    return {"MAKEFLAGS": f"{flags} -- " + " ".join(f"{name}={quoted(value)}" for name, value in variables.items())}


def test_variables_of_an_outer_make_count_only_for_calls_from_make() -> None:
    environ = given_to_make({"TRAIN_SEED": "7", "CONFIG": "x.yaml", "PYTHON": "python3.12"})
    assert call("config", environ=environ).overrides == ()
    from_make = call("config", "--from-make", environ=environ)
    assert from_make.options == {"CONFIG": "x.yaml"}
    assert [(o.key, o.text, o.origin) for o in from_make.overrides] == [("train.seed", "7", "make TRAIN_SEED=7")]


@pytest.mark.parametrize(
    "words",
    [
        ["TRAIN_LEARNING_RATE=1e-4"], ["train.learning_rate=1e-4"], ["--train.learning_rate=1e-4"],
        ["--train.learning_rate", "1e-4"],
    ],
)  # fmt: skip
def test_the_forms_of_one_override(words: list[str]) -> None:
    (override,) = call("config", *words).overrides
    assert (override.key, override.text) == ("train.learning_rate", "1e-4")


def test_nested_keys_further_arguments_and_empty_values_are_overrides() -> None:
    words = ["TUNING_LORA_R=8", "TRAIN_ADAM_BETA2=0.9", "MODEL_REVISION=", "MODEL_NAME==", "--model.dtype", "--x"]
    assert [(o.key, o.text) for o in call("config", *words).overrides] == [
        ("tuning.lora.r", "8"), ("train.adam_beta2", "0.9"), ("model.revision", ""), ("model.name", "="), ("model.dtype", "--x"),
    ]  # fmt: skip


def test_no_two_keys_share_a_variable() -> None:
    names = [*schema_keys(), *(f"train.{field}" for field in table() if f"train.{field}" not in schema_keys())]
    assert len({variable_name(name) for name in names}) == len(names) == len(set(variables().values()))
    assert not set(variables()) & {option for row in COMMANDS.values() for option in row.options}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--load_in_4bit"], "`TUNING_MODE=qlora TUNING_QUANTIZATION=nf4`"),
        (["train", "--json"], "`JSON=1`"),
        (["train", "TRAIN_NOTHING=2"], "lists the keys of `train`"),
        (["train", "XYZZY=2"], "hint: `train` takes `ACCELERATE_CONFIG`, `CONFIG`, `JSON`, "),
        (["train", "TRAIN_SEED=1", "train.seed=2"], "`train.seed` is given twice"),
        (["train", "JSON=perhaps"], "expected `1` or `0`"),
        (["train", "MODEL_NAME=\udcff"], "`MODEL_NAME` is not UTF-8 text"),
        (["gpu-info", "TRAIN_SEED=1"], "takes no configuration keys"),
        (["CONFIG=x"], "expected a command, not `CONFIG=x`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_not_understood_is_refused_with_the_right_name(words: list[str], expected: str) -> None:
    assert expected in refused(*words)


def test_make_e_is_refused_where_something_was_typed() -> None:
    assert "omit `-e`" in refused("config", "--from-make", environ={"MAKEFLAGS": "e -- $(MAKEOVERRIDES)"})
    assert call("config", "--from-make", environ={"MAKEFLAGS": "e"}).options == {}


def test_every_field_of_training_arguments_is_owned_accepted_or_refused_with_a_name_that_exists() -> None:
    options = {option for row in COMMANDS.values() for option in row.options}
    for field in table():
        accepted = find_key(f"train.{field}") is not None
        assert accepted != (field in REFUSED), field
    for field, (instead, why) in REFUSED.items():
        assert field in table() and why
        assert instead is None or instead in options or find_key(instead), field
    assert all(find_key(f"train.{field}") for field in RANGES)
