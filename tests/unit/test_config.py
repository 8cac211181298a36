"""Which layer wins, what contradicts what, interpolation, and configurations that are saved and read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from sft_play.config.keys import schema_keys, variable_name
from sft_play.config.layers import PRESETS
from sft_play.config.load import LoadedConfig, load_config, override_config, read_config, save_config
from sft_play.config.yaml_files import scalar_text
from sft_play.errors import UserError

Write = Callable[..., Path]


def load(path: Path, *words: str, environ: Mapping[str, str] | None = None) -> LoadedConfig:
    return load_config(path, parse_call(["config", *words], COMMANDS, {}).overrides, environ or {})


def refused(path: Path, *words: str, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load(path, *words, environ=environ)
    assert caught.value.exit_code == 2
    return caught.value.render()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "x.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            text if "model:" in text or "extends:" in text else f"model: {{name: m}}\n{text}", encoding="utf-8"
        )
        return path

    return write


# ---- Later layers


def test_a_later_layer_replaces_the_other_way_to_say_a_thing(write: Write) -> None:
    mine = write(
        "extends: quickstart\ndata:\n  train_path: mine.jsonl\n  val_path: held.jsonl\ntrain: {warmup_ratio: 0.1}\n"
    )
    loaded = load(mine)
    assert [s.path for s in loaded.config.data.sources] == ["mine.jsonl"]
    assert [s.path for s in loaded.config.data.validation] == ["held.jsonl"]  # type: ignore[union-attr]
    assert loaded.origins["data.sources"] == f"{mine}:3" == loaded.origins["data.train_path"]
    assert loaded.config.train.warmup_steps is None and loaded.config.train.warmup_ratio == 0.1
    assert loaded.config.train.max_steps == 30
    by_epochs = load(mine, "TRAIN_EPOCHS=2").config.train
    assert (by_epochs.epochs, by_epochs.max_steps) == (2.0, -1), "steps of the preset would hide what was typed"
    assert load(mine, "TRAIN_EPOCHS=2", "TRAIN_MAX_STEPS=9").config.train.max_steps == 9
    typed = load(mine, "DATA_SOURCES=[{path: a}, {path: b}]", "DATA_VALIDATION=0.2", "TRAIN_WARMUP_STEPS=3")
    assert [s.path for s in typed.config.data.sources] == ["a", "b"] and typed.config.data.train_path is None
    assert (
        typed.config.data.validation == 0.2
        and typed.config.data.val_path is None
        and typed.config.train.warmup_steps == 3
    )


def test_a_preset_gives_own_data_neither_its_validation_nor_settings_that_fit_only_its_rows(write: Write) -> None:
    own = load(write("extends: run_cpu\ndata: {train_path: mine.jsonl}\n"))
    assert [s.path for s in own.config.data.sources] == ["mine.jsonl"] and own.config.data.validation is None
    assert (own.config.data.overlong, own.config.train.max_steps) == ("error", -1) and not own.notices
    assert load(PRESETS / "quickstart.yaml").notices == ()
    (note,) = load(PRESETS / "quickstart.yaml", "DATA_TRAIN_PATH=mine.jsonl").notices
    assert (
        "`data.overlong: drop`" in note
        and "`train.max_steps: 30`" in note
        and "`run_cpu`" in note
        and "validation" not in note
    )
    write("data: {train_path: a.jsonl, val_path: b.jsonl}\n", "parent.yaml")
    assert load(write("extends: parent.yaml\ndata: {train_path: c.jsonl}\n")).config.data.val_path == "b.jsonl"


def test_both_ways_in_one_file_are_a_contradiction(write: Write) -> None:
    shown = refused(write("data:\n  train_path: a\n  sources: [{path: b}]\n  val_path: c\n  validation: 0.1\n"))
    assert "x.yaml:3: `data.train_path` and `data.sources` are both given" in shown
    assert "x.yaml:5: `data.val_path` and `data.validation` are both given" in shown


def test_turning_evaluation_off_takes_its_inherited_interval_away(write: Write) -> None:
    write("data: {validation: 0.1}\ntrain: {eval_strategy: steps, eval_steps: 50}\n", "parent.yaml")
    assert load(write("extends: parent.yaml\n"), "TRAIN_EVAL_STRATEGY=epoch").config.train.eval_steps is None
    assert load(write("extends: parent.yaml\ntrain: {eval_steps: 5}\n")).config.train.eval_steps == 5
    assert "`train.eval_steps` is 5" in refused(
        write("data: {validation: 0.1}\ntrain: {eval_strategy: epoch, eval_steps: 5}\n")
    )


def test_several_parents_are_applied_in_order_relative_to_their_file(write: Write) -> None:
    write("train: {seed: 1, epochs: 1}\n", "sub/a.yaml")
    write("extends: a.yaml\ntrain: {seed: 2}\n", "sub/b.yaml")
    loaded = load(write("extends: [sub/b.yaml, quickstart]\nmodel: {name: mine}\n"))
    assert loaded.config.train.seed == 2 and loaded.origins["train.seed"].endswith("sub/b.yaml:2")
    assert (
        loaded.config.train.epochs == 1
        and loaded.config.model.name == "mine"
        and loaded.config.model.max_seq_len == 256
    )


# ---- Environment


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SFT_TRAIN_LEARNIG_RATE", "SFT_TRAIN_LEARNING_RATE"),
        ("SFT_TRAIN_NUM_TRAIN_EPOCHS", "use `TRAIN_EPOCHS`"),
        ("SFT_TUNING_LORA_RANK", "SFT_TUNING_LORA_R"),
        ("SFT_MODEL_XYZZY", "lists every key"),
    ],
)
def test_similar_environment_variables_are_refused(write: Write, name: str, expected: str) -> None:
    assert expected in refused(write(""), environ={name: "1"})


# ---- Interpolation


def test_interpolation_sees_every_layer_and_typed_text_is_never_interpolated(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        "model: {name: 'base-${train.seed}', max_seq_len: '${oc.env:TEST_LENGTH}'}\n"
        "data: {sources: [{path: '${model.name}.jsonl'}]}\n"
        "train: {epochs: '${eval.samples}', save_steps: '${train.logging_steps}', run_name: '\\${kept}'}\n"
    )
    monkeypatch.setenv("TEST_LENGTH", "64")
    loaded = load(
        path, "TRAIN_SEED=9", "TRAIN_LOGGING_STEPS=4", "DATA_VALIDATION=[{path: '${x}'}]", "DATA_SYSTEM=\\${a"
    )
    config = loaded.config
    assert (
        config.model.name == "base-9"
        and config.data.sources[0].path == "base-9.jsonl"
        and config.model.max_seq_len == 64
    )
    assert config.train.epochs == 200.0 and config.train.save_steps == 4 and config.train.extra["run_name"] == "${kept}"
    assert config.data.validation[0].path == "${x}"  # type: ignore[index,union-attr]
    assert config.data.system == "\\${a"
    assert loaded.origins["train.epochs"] == f"{path}:3"


# ---- Saved configurations


def test_a_run_keeps_its_values_when_defaults_change_and_overrides_replace_what_contradicts_them(
    write: Write, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    save_config(load(write("data: {train_path: a, validation: 0.5}\ntrain: {adam_beta1: 0.5}\n")), path)
    value = json.loads(path.read_text(encoding="utf-8"))
    value["config"]["train"]["weight_decay"] = 0.25  # what an older version's default may have been
    path.write_text(json.dumps(value), encoding="utf-8")
    again = read_config(path)
    assert again.config.train.weight_decay == 0.25 and not again.typed("train.weight_decay")
    words = ["DATA_SOURCES=[{path: b}]", "DATA_VAL_PATH=c", "TRAIN_WARMUP_STEPS=3", "TRAIN_ADAM_BETA1=0.6"]
    overrides = parse_call(["config", *words], COMMANDS, {}).overrides
    for config in (read_config(path, overrides).config, override_config(again, overrides).config):
        assert [s.path for s in config.data.sources] == ["b"] and config.data.train_path is None
        assert [s.path for s in config.data.validation] == ["c"]  # type: ignore[union-attr]
        assert config.train.warmup_steps == 3 and config.train.extra["adam_beta1"] == 0.6


def test_a_run_of_an_older_version_is_read_unless_a_key_was_typed_that_is_gone(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    save_config(load(write("data: {train_path: a}\n")), path)
    saved = json.loads(path.read_text())
    saved["config"]["train"]["spike_guard"] = "off"
    path.write_text(json.dumps(saved))
    assert read_config(path).config.data.train_path == "a"
    saved["origins"]["train.spike_guard"] = "x.yaml:4"
    path.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"`train\.spike_guard` is not a key of this version"):
        read_config(path)


def test_every_key_of_the_schema_can_be_typed(write: Write) -> None:
    """Each default, written as a variable, gives the same configuration."""
    path = write("")
    for name, key in schema_keys().items():
        mode = ["TUNING_MODE=qlora"] if name == "tuning.quantization" else []  # it has no effect without
        typed = f"{variable_name(name)}={scalar_text(key.default).strip(chr(34))}"
        if name != "model.name" and key.default is not None:
            assert load(path, typed, *mode).config == load(path, *mode).config, name


# ---- What is typed


def test_spellings_of_other_tools_are_accepted(write: Write) -> None:
    path = write("train: {packing: true}\ntuning: {lora: {target_modules: all-linear}}\n")
    config = load(path).config
    assert config.train.packing == "on" and config.tuning.lora.target_modules == "auto"
    typed = load(path, "TRAIN_PACKING=false", "TUNING_LORA_TARGET_MODULES=q_proj,v_proj").config
    assert typed.train.packing == "off" and typed.tuning.lora.target_modules == ["q_proj", "v_proj"]
    assert load(path, "TUNING_LORA_TARGET_MODULES=q_proj").config.tuning.lora.target_modules == ["q_proj"]


def test_a_path_that_leads_somewhere_from_the_file_only_is_noted(write: Write, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "there.jsonl").touch()
    notices = [
        load(write(text), *words).notices
        for text, *words in (
            ("data: {train_path: data/there.jsonl}\n",),
            ("data: {sources: [{path: data/absent.jsonl}], validation: [{path: data/there.jsonl}]}\n",),
            ("data: {train_path: data/absent.jsonl}\n", "DATA_TRAIN_PATH=data/there.jsonl"),
            (f"data: {{train_path: {tmp_path}/data/there.jsonl}}\n",),
        )
    ]
    there = tmp_path / "data" / "there.jsonl"
    note = f"`data/there.jsonl` counts from the folder in which you typed the command; `{there}` exists"
    assert notices == [(note,), (note,), (), ()]


def test_a_runs_name_is_no_path_beside_its_file(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("manual", "runs/manual"):
        (tmp_path / folder).mkdir(parents=True)
    assert load(write("model: {name: manual}\n")).notices, "texts of the same name"
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    assert not load(write("model: {name: manual}\n")).notices


def test_settings_that_keep_logits_in_evaluation_are_reported_as_without_effect(write: Write) -> None:
    typed = "train: {eval_accumulation_steps: 4, eval_do_concat_batches: true}\n"
    loaded = override_config(load(write(typed)), [])
    assert len(loaded.notices) == 1, "the default, written down, changes nothing either"
    assert "`train.eval_accumulation_steps` has no effect" in loaded.notices[0] and ".yaml:" in loaded.notices[0]
    assert not load(write("")).notices
