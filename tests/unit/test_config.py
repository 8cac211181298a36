"""The configuration as its users meet it: files, `extends`, environment, overrides, origins and messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.config.command_line import parse_call
from sft_play.config.load import LoadedConfig, load_config, override_config, read_config, save_config
from sft_play.errors import UserError

MINIMAL = "model: {name: some/model}\n"


def load(path: Path, *words: str, environ: dict[str, str] | None = None) -> LoadedConfig:
    return load_config(path, parse_call(["config", *words], COMMANDS).overrides, environ or {})


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str, name: str = "x.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def message(action) -> str:
    with pytest.raises(UserError) as caught:
        action()
    assert caught.value.exit_code == 2
    return caught.value.render()


def test_values_as_other_tools_write_them(file) -> None:
    path = file(MINIMAL + "train: {packing: true}\ntuning: {lora: {target_modules: all-linear}}\n")
    config = load(path).config
    assert config.train.packing == "on" and config.tuning.lora.target_modules == "auto"
    typed = load(path, "TRAIN_PACKING=false", "TUNING_LORA_TARGET_MODULES=q_proj,v_proj").config
    assert typed.train.packing == "off" and typed.tuning.lora.target_modules == ["q_proj", "v_proj"]
    assert load(path, "TUNING_LORA_TARGET_MODULES=q_proj").config.tuning.lora.target_modules == ["q_proj"]
    assert "`RUNS=a`" in message(lambda: parse_call(["compare", "RUN=a"], COMMANDS))
    assert "`RUN=a`" in message(lambda: parse_call(["eval", "RUNS=a"], COMMANDS))


def test_every_value_knows_where_it_came_from(file) -> None:
    parent = file(MINIMAL + "train:\n  epochs: 2\n  seed: 7\n", "parent.yaml")
    child = file("extends: parent.yaml\ntrain:\n  epochs: 5\n", "child.yaml")
    loaded = load(child, "TRAIN_LEARNING_RATE=1e-4", environ={"SFT_TRAIN_WEIGHT_DECAY": "0.1"})
    assert loaded.config.train.epochs == 5.0 and loaded.origins["train.epochs"] == f"{child}:3"
    assert loaded.config.train.seed == 7 and loaded.origins["train.seed"] == f"{parent}:4"
    assert loaded.config.train.learning_rate == 1e-4 and loaded.origins["train.learning_rate"] == "TRAIN_LEARNING_RATE=1e-4"
    assert loaded.config.train.weight_decay == 0.1 and "SFT_TRAIN_WEIGHT_DECAY" in loaded.origins["train.weight_decay"]
    assert loaded.origins["train.optim"] == "default" and not loaded.typed("train.optim")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("load_in_4bit: true", ["`tuning.mode: qlora` and `tuning.quantization: nf4`"]),
        ("train: {per_device_train_batch_size: 8}", ["train.batch_size"]),
        ("train: {adam_beta1: 2}", ["train.adam_beta1"]),
        ("train: {bf16: yes}", ["`yes`", "write `true`"]),
        ("train: {metric_for_best_model: rougel}", ["eval_rougeL"]),
        ("launch: {backend: mpi}", ["mpi"]),
        ("train:\n  epochs: ${train.nothing}", ["x.yaml:3", "train.epochs"]),
        ("train: {learning_rate: .nan}", ["train.learning_rate"]),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_a_hint(file, text: str, expected: list[str]) -> None:
    path = file(("" if text.startswith("model") else MINIMAL) + text + "\n")
    shown = message(lambda: load(path))
    assert shown.startswith("error: ") and "Traceback" not in shown
    for part in expected:
        assert part in shown, shown


def test_a_missing_file_suggests_one_that_exists() -> None:
    shown = message(lambda: parse_call(["config", "CONFIG=configs/quikstart.yaml"], COMMANDS).load_config())
    assert "configs/quickstart.yaml" in shown


def test_settings_of_an_evaluation_that_keeps_logits_are_said_to_have_no_effect(file) -> None:
    typed = "train: {eval_accumulation_steps: 4, eval_do_concat_batches: true}\n"
    loaded = override_config(load(file(MINIMAL + typed)), [])
    assert len(loaded.notices) == 1, "the default, written down, changes nothing either"
    assert "`train.eval_accumulation_steps` has no effect" in loaded.notices[0] and ".yaml:" in loaded.notices[0]
    assert not load(file(MINIMAL)).notices


def test_a_saved_configuration_is_read_back_with_its_origins(file, tmp_path: Path) -> None:
    loaded = load(
        file(MINIMAL), "TRAIN_ADAM_BETA2=0.95", "DATA_TRAIN_PATH=a.jsonl", "DATA_VALIDATION=[{path: v.jsonl}]", "MODEL_NAME=${x}"
    )
    save_config(loaded, tmp_path / "config.json")
    again = read_config(tmp_path / "config.json")
    assert again.config == loaded.config and dict(again.origins) == dict(loaded.origins)
    longer = override_config(again, parse_call(["config", "TRAIN_MAX_STEPS=9"], COMMANDS).overrides)
    assert longer.config.train.max_steps == 9 and longer.config.train.extra["adam_beta2"] == 0.95
