"""Keys that become a command, a path to write or an address come only from this user's words and files, never from a
run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from sft_play.config.keys import extra_keys, find_key, schema_keys, variable_name
from sft_play.config.load import LoadedConfig, load_config, own_words, read_config, save_config
from sft_play.config.reader import options
from sft_play.config.schema import OWN_WORD, Config, ModelConfig, needs_own_word
from sft_play.errors import UserError
from sft_play.launch.deepspeed import load_user_json, settings_from_run
from sft_play.runs.folder import RunFolder

STRANGERS: dict[str, Any] = {
    "launch.notify": "$STRANGERS_NOTIFY",
    "slurm.setup": ["touch pwned"],
    "slurm.options": ["--gres-flags=theirs"],
    "train.report_to": "wandb",
    "kubernetes.image": "evil/image:1",
    "kubernetes.env": {"A_B": "x"},
    "kubernetes.runs_claim": "theirs",
    "kubernetes.token_secret": "mine",
}
READ_ONLY = {
    "data.chat_template", "data.group_by", "data.new_tokens", "data.sources", "data.style.system_prefix",
    "data.style.system_suffix", "data.style.user_prefix", "data.style.user_suffix", "data.system", "data.train_path",
    "data.val_path", "data.validation", "eval.metrics", "launch.network", "model.adapter", "model.name",
    "model.revision", "model.tokenizer", "train.debug", "train.include_num_input_tokens_seen",
    "train.lr_scheduler_kwargs", "train.metric_for_best_model", "train.optim_args",
    "train.run_name", "tuning.lora.alpha_pattern", "tuning.lora.modules_to_save",
    "tuning.lora.rank_pattern", "tuning.lora.target_modules", "slurm.account", "slurm.array", "slurm.constraint",
    "slurm.gpu_type", "slurm.memory", "slurm.partition", "slurm.qos", "slurm.time",
}  # fmt: skip
"""Further keys that hold free text: a file or a hub's repository that is read, a name, or a text with a pattern.
Whoever adds a key decides in which of the two lists it is.
"""


def test_every_key_with_free_text_is_in_one_list_or_the_other() -> None:
    free = {
        key.name
        for key in [*schema_keys().values(), *extra_keys().values()]
        for part in options(key.annotation)
        if part is str
        or "Mapping" in str(part)
        or (getattr(part, "__origin__", part) in (list, dict) and "int" not in str(part))
    }
    assert {key for key in free if not needs_own_word(key)} == READ_ONLY
    assert all(find_key(key) or key.endswith(".") for key in OWN_WORD)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Make a run with a stranger's configuration."""
    monkeypatch.setenv("RUNS_DIR", str(tmp_path / "runs"))
    folder = RunFolder(tmp_path / "runs" / "theirs")
    folder.path.mkdir(parents=True)
    folder.events.write_text("")
    save_config(
        load_config(None, [], environ={"SFT_MODEL_NAME": "x/y", "SFT_DATA_TRAIN_PATH": "rows.jsonl"}), folder.config
    )
    saved = json.loads(folder.config.read_text())
    written: dict[str, Any] = {"launch": {}, "slurm": {}, "kubernetes": {}, "train": {}}
    for key, value in STRANGERS.items():
        section, _, name = key.partition(".")
        inside = saved["config"][section]
        (inside["extra"] if key in extra_keys() else inside)[name] = written[section][name] = value
    folder.config.write_text(json.dumps(saved))
    (folder.path / "theirs.yaml").write_text(
        json.dumps({"model": {"name": "x/y", "trust_remote_code": True, "revision": "a" * 40}, **written})
    )
    return folder


def value_of(loaded: LoadedConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    part = getattr(loaded.config, section)
    value = part.extra.get(name) if key in extra_keys() else getattr(part, name)
    return dict(value) if key == "kubernetes.env" else value


WAYS: dict[str, Callable[[RunFolder, Path], list[str]]] = {
    "RUN": lambda run, _: ["plan", f"RUN={run.path}"],
    "its config.json": lambda run, _: ["plan", f"CONFIG={run.config}"],
    "a YAML in it": lambda run, _: ["plan", f"CONFIG={run.path / 'theirs.yaml'}"],
    "extended": lambda _, own: ["plan", f"CONFIG={own}"],
}


@pytest.mark.parametrize("way", WAYS)
def test_commands_paths_and_addresses_are_not_read_from_a_runs_folder(
    way: str, run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(f"extends: {run.path / 'theirs.yaml'}\n")
    words = WAYS[way](run, own)
    loaded = parse_call(words, COMMANDS, environ={}).load_config()
    error, plain = capsys.readouterr().err, Config(model=ModelConfig())
    for key in STRANGERS:
        section, _, name = key.partition(".")
        default = None if key in extra_keys() else getattr(getattr(plain, section), name)
        assert value_of(loaded, key) == default, key
        assert f"`{key}` is not read from a run's folder: type {variable_name(key)}=..." in error
    assert own_words(loaded) == [] and "model.trust_remote_code" in loaded.of_run
    typed = [*words, "LAUNCH_NOTIFY=$MY_NOTIFY", "KUBERNETES_IMAGE=mine:1", "TRAIN_REPORT_TO=mlflow"]
    again = parse_call(typed, COMMANDS, environ={}).load_config()
    assert again.config.launch.notify == "$MY_NOTIFY" and again.config.kubernetes.image == "mine:1"
    assert sorted(own_words(again)) == ["LAUNCH_NOTIFY=$MY_NOTIFY", "TRAIN_REPORT_TO=mlflow"]


def test_a_users_file_may_set_them(run: RunFolder, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text((run.path / "theirs.yaml").read_text().replace("STRANGERS", "MY"))
    loaded = parse_call(["plan", f"CONFIG={own}"], COMMANDS, environ={}).load_config()
    assert loaded.config.launch.notify == "$MY_NOTIFY" and loaded.config.slurm.setup == ["touch pwned"]
    assert {"LAUNCH_NOTIFY=$MY_NOTIFY", "TRAIN_REPORT_TO=wandb", "MODEL_TRUST_REMOTE_CODE=true"} <= set(
        own_words(loaded)
    )
    save_config(loaded, run.config)
    assert read_config(run.config, of_run=False).config.launch.notify == "$MY_NOTIFY"
    assert read_config(run.config).config.launch.notify is None


@pytest.mark.parametrize(
    "target",
    [
        "$HOME",
        "$PROMPT_COMMAND",
        "$MY_HOOK",
        "https://hooks.slack.com/services/T0000/B0000/abcdefghijklmnop0123",
        "https://me:pw@host/x",
        "https://discord.com/api/webhooks/123456789012345678/abcDEF123456",
        "https://host/x?token=abc",
        "https://host/a1b2c3d4e5f6a7b8c9d0e1",
    ],
)
def test_a_notification_has_a_separate_variable_and_no_secret_is_kept(target: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_call(["plan", "CONFIG=quickstart", f"LAUNCH_NOTIFY={target}"], COMMANDS, environ={}).load_config()
    assert "export MY_NOTIFY" in str(refused.value.hint)
    assert "abcdefghij" not in refused.value.render() and "abcDEF" not in refused.value.render()


def test_deepspeed_settings_of_a_run_write_and_contact_nothing(run: RunFolder, tmp_path: Path) -> None:
    theirs: dict[str, Any] = {
        "zero_optimization": {"stage": 2},
        "csv_monitor": {"enabled": True, "output_path": "/home/me", "job_name": "../../x"},
        "tensorboard": {"enabled": True, "job_name": "../../x"},
        "flops_profiler": {"enabled": True, "output_file": str(tmp_path / "x")},
        "wandb": {"enabled": True, "team": "evil"},
        "comet": {"enabled": True},
        "compile": {"backend": "evil.module"},
        "checkpoint": {"x": 1},
    }
    run.deepspeed.write_text(json.dumps(theirs))
    for user in (settings_from_run(theirs, run.events), load_user_json(run.deepspeed)):
        assert user.settings == {"zero_optimization": {"stage": 2}} and len(user.notices) == 7
    own = tmp_path / "own.json"
    own.write_text(json.dumps(theirs))
    assert load_user_json(own).settings["csv_monitor"]["output_path"] == "/home/me", "a file of one's own is obeyed"
    with pytest.raises(UserError, match="unknown DeepSpeed key"):
        settings_from_run({"zero_optimization": {"stage": 2}, "nonsense": 1}, run.events)
