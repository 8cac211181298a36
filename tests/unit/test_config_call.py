"""Command lines as people type them: every accepted form, and the errors for the others."""

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


def test_variables_of_an_outer_make_count_only_for_calls_from_make() -> None:
    environ = {"MAKEFLAGS": " -- TRAIN_SEED=7 CONFIG=x.yaml PYTHON=python3.12"}
    assert call("config", environ=environ).overrides == ()
    from_make = call("config", "--from-make", environ=environ)
    assert from_make.options == {"CONFIG": "x.yaml"}
    assert [(o.key, o.text, o.origin) for o in from_make.overrides] == [("train.seed", "7", "make TRAIN_SEED=7")]


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        ("TRAIN_LEARNING_RATE=1e-4", "train.learning_rate", "1e-4"),
        ("train.learning_rate=1e-4", "train.learning_rate", "1e-4"),
        ("--train.learning_rate=1e-4", "train.learning_rate", "1e-4"),
        ("--model.dtype --x", "model.dtype", "--x"),
        ("TUNING_LORA_R=8", "tuning.lora.r", "8"),
        ("TRAIN_ADAM_BETA2=0.9", "train.adam_beta2", "0.9"),
        ("MODEL_REVISION=", "model.revision", ""),
        ("MODEL_NAME==", "model.name", "="),
    ],
)
def test_overrides_are_accepted_in_every_form(words: str, key: str, text: str) -> None:
    (override,) = call("config", *words.split()).overrides
    assert (override.key, override.text) == (key, text)


def test_no_two_keys_share_a_variable() -> None:
    names = [*schema_keys(), *(f"train.{field}" for field in table() if f"train.{field}" not in schema_keys())]
    assert len({variable_name(name) for name in names}) == len(names) == len(set(variables().values()))
    assert not set(variables()) & {option for row in COMMANDS.values() for option in row.options}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--load_in_4bit"], "`TUNING_MODE=...`?"),
        (["train", "--load_in_8bit", "True"], "`TUNING_MODE=qlora TUNING_QUANTIZATION=int8`?"),
        (["train", "--eos_token", "<|im_end|>"], "`data.chat_template` says how turns end"),
        (["train", "--hf_token", "x"], "`HF_TOKEN` for the hub"),
        (["train", "--json"], "`JSON=...`"),
        (["train", "TRAIN_NOTHING=2"], "lists the keys of `train`"),
        (["train", "XYZZY=2"], "hint: `train` takes `ACCELERATE_CONFIG`, `CONFIG`, `JSON`, "),
        (["train", "TRAIN_SEED=1", "train.seed=2"], "`train.seed` is given twice"),
        (["train", "JSON=perhaps"], "expected `1` or `0`"),
        (["gpu-info", "TRAIN_SEED=1"], "takes no configuration keys"),
        (["CONFIG=x"], "expected a command, not `CONFIG=x`"),
        (["compare", "RUN=a"], "`RUNS=...`"),
        (["eval", "RUNS=a"], "`RUN=...`"),
        (["eval", "RUN_NAME=a"], "`RUN=...`"),
        (["compare", "RUN_NAME=a"], "`RUNS=...`"),
        (["train", "RUN=a"], "`RUN_NAME=...`"),
        (["eval", "job_name=a"], "`RUN=...`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_unknown_keys_are_refused_with_the_right_name(words: list[str], expected: str) -> None:
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
