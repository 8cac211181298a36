"""A user's DeepSpeed JSON: comments and `auto` are read, everything wrong is named with its line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import Config, ModelConfig
from sft_play.errors import UserError
from sft_play.launch.deepspeed import GATHERED, NOT_OURS, OLD, REMOVED, ask_deepspeed, read_user_json, resolve
from sft_play.plan.plan import Plan
from tests.plans import rank_plan, simple_plan

CONFIG = Config(model=ModelConfig(name="tiny"))


def make_plan(**changes: Any) -> Plan:
    values = {
        "world_size": 2,
        "backend": "gloo",
        "strategy": "zero2",
        "ranks": (rank_plan(), rank_plan(1)),
        "global_batch_size": 32,
        "steps": 10,
    }
    return simple_plan(**({"optim": "adamw_torch_fused", "warmup_steps": 1} | values | changes))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        read_user_json(write(tmp_path / "ds.json", text))
    return caught.value.render()


def test_comments_and_trailing_commas_are_read_with_the_lines_of_keys(tmp_path: Path) -> None:
    text = (
        '{\n\t// a comment with "quotes" and {braces}\n\t"log_level": "http://not-a-comment", /* b\n'
        '  c */ "zero_optimization": {"stage": 1,},\n}\n'
    )
    user = read_user_json(write(tmp_path / "x.json", text))
    assert user.settings == {"log_level": "http://not-a-comment", "zero_optimization": {"stage": 1}}
    places = [user.place(key) for key in ("log_level", "zero_optimization.stage", "zero_optimization.none", "none")]
    assert [place.rpartition("x.json")[2] for place in places] == [":3", ":4", ":4", ""]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{\n  // x\n  'a': 1\n}", ":3:3"),
        ('{"a": 1', ":1:8"),
        ("", ":1:1"),
        ("[1]", ":1"),
        ('{"a": 1,\n"a": 2}', ":2"),
        ('{"a": ' * 9999, ""),
    ],
)
def test_invalid_json_is_reported_with_its_place(tmp_path: Path, text: str, place: str) -> None:
    assert f"ds.json{place}: " in refusal(tmp_path, text)


def test_every_unsupported_key_is_refused_by_name_and_line(tmp_path: Path) -> None:
    for key in (*REMOVED, *NOT_OURS):
        content = {"zero_optimization": {"stage": 2}, key: {"enabled": True}}
        assert re.search(rf"ds.json:\d+: `{key}` is ", refusal(tmp_path, json.dumps(content, indent=1)))


@pytest.mark.parametrize("part", ["offload_optimizer", "offload_param"])
def test_states_on_nvme_are_refused_since_no_checkpoint_could_hold_them(part: str, tmp_path: Path) -> None:
    text = '{"zero_optimization": {"stage": 3,\n "' + part + '": {"device": "nvme", "nvme_path": "/tmp"}}}'
    assert f'ds.json:2: `zero_optimization.{part}.device` is `"nvme"`' in refusal(tmp_path, text)


@pytest.mark.parametrize(("key", "today"), OLD.items())
def test_old_spellings_are_refused_with_what_is_written_today(tmp_path: Path, key: str, today: str) -> None:
    section, _, name = key.rpartition(".")
    settings: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    (settings[section] if section else settings)[name] = True if section else {"enabled": True}
    message = refusal(tmp_path, json.dumps(settings, indent=1))
    assert f"`{key}` is an old spelling\n\nhint: write {today}" in message and re.search(r"ds.json:\d+: ", message)


AUTOMATIC = """{
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto"}},
  "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "sub_group_size": 1e9, "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": "auto"}
}"""


def test_auto_is_filled_from_the_plan(tmp_path: Path) -> None:
    user = read_user_json(write(tmp_path / "ds.json", AUTOMATIC))
    settings, notices = resolve(user, make_plan(strategy="zero3"), CONFIG, hidden_size=64)
    assert "auto" not in json.dumps(settings)
    assert settings.items() >= {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
    }.items() and settings["bf16"] == {"enabled": False}
    zero = settings["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_param_persistence_threshold"]) == (64 * 64, 640)
    assert isinstance(zero["sub_group_size"], int) and zero["sub_group_size"] == 10**9
    assert "stage3_max_live_parameters" not in zero, "DeepSpeed's own default"
    assert not {"optimizer", "scheduler"} & settings.keys()
    assert len(notices) == 2


@pytest.mark.parametrize("typed", [None, True, False, "auto"])
def test_zero_3_gathers_weights_at_a_save_despite_the_file(tmp_path: Path, typed: object) -> None:
    """Otherwise accelerate refuses the first save, after the steps before it."""
    zero: dict[str, Any] = {"stage": 3} if typed is None else {"stage": 3, GATHERED: typed}
    user = read_user_json(write(tmp_path / "ds.json", json.dumps({"zero_optimization": zero}, indent=1)))
    settings, notices = resolve(user, make_plan(strategy="zero3"), CONFIG, hidden_size=64)
    assert settings["zero_optimization"][GATHERED] is True
    assert [notice.partition("ds.json")[2] for notice in notices] == (
        [f":4: `{GATHERED}` is `false`, but the run uses `true`, or DeepSpeed could not save the model"]
        if typed is False
        else []
    )
    second = read_user_json(write(tmp_path / "two.json", '{"zero_optimization": {"stage": 2}}'))
    assert GATHERED not in resolve(second, make_plan(), CONFIG, hidden_size=64)[0]["zero_optimization"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"train_micro_batch_size_per_gpu": 4', ("is `4`", "uses `2`", "train.batch_size")),
        ('"bf16": {"enabled": true}', ("`bf16.enabled` is `true`", "uses `false`", "fp32")),
        (
            '"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}',
            ("is `0.1`", "uses `0.0002`", "the same under `train.`"),
        ),
        ('"log_level": "auto"', ("nothing decides it",)),
    ],
)
def test_contradictions_name_both_values(tmp_path: Path, text: str, expected: tuple[str, ...]) -> None:
    user = read_user_json(write(tmp_path / "ds.json", f'{{"zero_optimization": {{"stage": 2}},\n{text}}}'))
    with pytest.raises(UserError) as caught:
        resolve(user, make_plan(), CONFIG, hidden_size=64)
    message = caught.value.render()
    assert "ds.json:2: " in message
    assert all(part in message for part in expected), message


REFUSED = """{
  "zero_optimization": {"stage": 2,
    "reduce_bucket_size": -5,
    "offload_optimizer": {
      "device": "cpu",
      "buffer_count": -1}},
  "fp16": {"enabled": false,
    "loss_scale": -1},
  "data_types": {"grad_accum_dtype": "int7"},
  "log_level": "loud",
  "communication_data_type": 16,
  "vocabulary_size": "x",
  "timers": {"throughput": {"enabled": "x"}},
  "compile": {
    "enabled": true}
}"""
BY_MODELS = {
    3: "`zero_optimization.reduce_bucket_size` is `-5`; DeepSpeed says: Input should be greater than 0",
    6: (
        "`zero_optimization.offload_optimizer.buffer_count` is `-1`; DeepSpeed says: Input should be greater than or"
        " equal to 0"
    ),
    8: "`fp16.loss_scale` is `-1`; DeepSpeed says: Value error, fp16.loss_scale must be >= 0",
    9: "`data_types.grad_accum_dtype` is `\"int7\"`; DeepSpeed says: 'int7' is not a valid DtypeEnum",
    10: '`log_level` is `"loud"`; DeepSpeed says: loud is not one of the valid logging levels',
    11: "`communication_data_type` is `16`; DeepSpeed says: ",
    12: '`vocabulary_size` is `"x"`; DeepSpeed says: ',
    13: '`timers.throughput.enabled` is `"x"`; DeepSpeed says: Input should be a valid boolean',
    15: "`compile.enabled` is `true`; DeepSpeed says: Extra inputs are not permitted",
}
RIGHT = {
    3: '    "reduce_bucket_size": 500,',
    6: '      "buffer_count": 4}},',
    8: '    "loss_scale": 0},',
    9: '  "data_types": {"grad_accum_dtype": "fp32"},',
    10: '  "log_level": "info",',
    11: '  "communication_data_type": "fp32",',
    12: '  "vocabulary_size": 1024,',
    13: '  "timers": {},',
    15: '    "deepcompile": false}',
}
"""Line -> what DeepSpeed's models say, and what a user then writes: sections are built one after the other, so not all
are found at once.
"""


@pytest.mark.slow
def test_settings_that_deepspeeds_models_refuse_are_named_with_key_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    text, path = REFUSED, tmp_path / "ds.json"
    errors: dict[int, str] = {}
    for _ in BY_MODELS:
        user = read_user_json(write(path, text))
        settings = resolve(user, make_plan(), CONFIG, hidden_size=64)[0]
        try:
            ask_deepspeed(user, settings)
            break
        except UserError as error:
            reported = re.findall(r"ds\.json:(\d+): (.*)", error.render())
        errors |= {int(line): words for line, words in reported}
        lines = text.splitlines()
        for line, _words in reported:
            lines[int(line) - 1] = RIGHT[int(line)]
        text = "\n".join(lines)
    assert errors.keys() == BY_MODELS.keys()
    assert all(errors[line].startswith(words) for line, words in BY_MODELS.items()), errors
    assert list((tmp_path / "cache" / "deepspeed").iterdir()), "what was accepted is not asked again"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"wandb": {"enabled": true}', "`wandb.enabled` is `true`: `train.report_to: wandb` records the run"),
        ('"data_types": {"grad_acum_dtype": "fp32"}', "unknown DeepSpeed key `data_types.grad_acum_dtype`"),
        ('"prescale_gradients": true', "`prescale_gradients` is `true`: the loss is already scaled"),
        ('"gradient_predivide_factor": 2.0', "`gradient_predivide_factor` is `2.0`"),
        ('"zero_optimization": {"stage": 1, "legacy_stage1": true}', "`zero_optimization.legacy_stage1` is `true`"),
        ('"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}', "ratio` is `0.5`"),
        (
            '"zero_optimization": {"stage": 3, "offload_param": "cpu"}',
            '`zero_optimization.offload_param` is `"cpu"`; expected',
        ),
        ('"zero_optimization": {"stage": true}', "`zero_optimization.stage` is `true`; expected 1, 2 or 3"),
        ('"zero_optimization": {"stage": "2"}', '`zero_optimization.stage` is `"2"`; expected 1, 2 or 3'),
        ('"fp16": true', "`fp16` is `true`; expected an object"),
        ('"flops_profiler": true', "`flops_profiler` is `true`; expected an object"),
        ('"optimizer": {"type": "AdamW", "params": "auto"}', '`optimizer.params` is `"auto"`; expected an object'),
        ('"wall_clock_breakdown": "false"', '`wall_clock_breakdown` is `"false"`; expected true or false'),
        ('"torch_autocast": {"enabled": true}', "`torch_autocast.enabled` is `true`: `train.bf16` decides"),
        ('"tensorboard": {"enabled": true}', "so it would write `DeepSpeedJobName/` where the command was typed"),
        ('"csv_monitor": {"enabled": true, "job_name": "a"}', "so it would write `a/` where"),
        ('"gradient_cliping": 1.0', "unknown DeepSpeed key `gradient_cliping`"),
    ],
)
def test_settings_that_fail_in_deepspeeds_engine_are_refused_with_their_line(
    tmp_path: Path, text: str, message: str
) -> None:
    zero = "" if "zero_opt" in text else ', "zero_optimization": {"stage": 2}'
    assert re.search(rf"ds\.json:2: .*{re.escape(message)}", refusal(tmp_path, f"{{\n{text}{zero}}}"))
    allowed = (
        '{"zero_optimization": {"stage": 1, "legacy_stage1": false}, "wandb": {"enabled": false},'
        ' "tensorboard": {"enabled": true, "output_path": "logs"}, "csv_monitor": {"enabled": false},'
        ' "gradient_predivide_factor": 1.0, "steps_per_print": 1e5, "optimizer": null, "fp16": null}'
    )
    assert read_user_json(write(tmp_path / "ds.json", allowed)).stage == 1


def test_a_section_without_effect_is_named_and_left_out(tmp_path: Path) -> None:
    """DeepSpeed ends the workers for a writer that only its own checkpoints would use."""
    text = '{"zero_optimization": {"stage": 2},\n"checkpoint": {"writer": {"type": "fast"}}}'
    settings, notices = resolve(read_user_json(write(tmp_path / "ds.json", text)), make_plan(), CONFIG, hidden_size=64)
    assert any("ds.json:2: `checkpoint` has no effect here" in notice for notice in notices), notices
    assert "checkpoint" not in settings


def test_contradictory_batch_sizes_of_a_deepspeed_json_are_refused_by_key(tmp_path: Path) -> None:
    text = (
        '{"zero_optimization": {"stage": 2},\n"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps":'
        ' 8,\n"train_batch_size": 10}'
    )
    with pytest.raises(UserError) as caught:
        resolve(read_user_json(write(tmp_path / "ds.json", text)), make_plan(), CONFIG, hidden_size=64)
    product = "`train_micro_batch_size_per_gpu` 2 x `gradient_accumulation_steps` 8 x 2 processes"
    assert f"ds.json:3: `train_batch_size` is `10`, but the run uses `32` ({product})" in caught.value.render()

    typed = replace(CONFIG, train=replace(CONFIG.train, global_batch_size=32))
    alone = write(tmp_path / "alone.json", '{"zero_optimization": {"stage": 2},\n"train_batch_size": 16}')
    with pytest.raises(UserError) as caught:
        resolve(read_user_json(alone), make_plan(), typed, hidden_size=64)
    assert "alone.json:2: `train_batch_size` is `16`, but the run uses `32` (set by `train.global_batch_size`)" in (
        caught.value.render()
    )


def test_gradients_are_fp32_unless_a_users_file_sets_another_type(tmp_path: Path) -> None:
    plan = make_plan(device="cuda", precision="bf16", strategy="zero1")
    silent = read_user_json(
        write(tmp_path / "ds.json", '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}}')
    )
    settings, _ = resolve(silent, plan, CONFIG, hidden_size=64)
    assert settings["communication_data_type"] == settings["data_types"]["grad_accum_dtype"] == "fp32"
    assert settings["bf16"] == {"enabled": True, "immediate_grad_update": True}
    typed = write(
        tmp_path / "ds.json", '{"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "bf16"}}'
    )
    settings, notices = resolve(read_user_json(typed), plan, CONFIG, hidden_size=64)
    assert settings["data_types"] == {"grad_accum_dtype": "bf16"}
    assert any("`data_types.grad_accum_dtype` gradients are summed in `bf16` instead of" in each for each in notices)
    assert "data_types" not in resolve(silent, make_plan(strategy="zero1"), CONFIG, hidden_size=64)[0], "fp32 anyway"
