"""A stranger's text, file, folder or configuration cannot act here, and tokens are refused where they would leak."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sft_play.__main__ import COMMANDS
from sft_play.config.call import parse_call
from sft_play.config.keys import extra_keys, schema_keys
from sft_play.config.layers import Override
from sft_play.config.load import flatten, load_config, read_config, save_config
from sft_play.config.reader import options
from sft_play.config.schema import DataSource, ModelConfig
from sft_play.data.chat import template_sha256
from sft_play.data.sources import read_source
from sft_play.errors import CheckpointError, DataError, UserError, mask, without_tokens
from sft_play.evaluation.generation import prompt_ids
from sft_play.files import read_json
from sft_play.model import tokenizer as tokenizer_module
from sft_play.model.load import read_model
from sft_play.model.resolve import check_folder, check_trained, refuse_foreign_code
from sft_play.model.tokenizer import end_of_turn_ids, load_tokenizer
from sft_play.runs.checkpoints import model_files
from sft_play.runs.folder import CONSENT, may_run
from sft_play.runs.manifest import damage, describe, verify
from tests.conftest import Program
from tests.pickles import Evil
from tests.tiny_models import build_tiny_llama

SECRET = "hf_" + "Planted0Secret" * 3
NASTY = (
    "$(touch pwned)",
    "`touch pwned`",
    "a' ; touch pwned ; '",
    'a" ; touch pwned ; "',
    "a\ntouch pwned\n",
    "| touch pwned",
    "{0.__class__}",
    "${oc.env:HOME}",
    "$$(touch pwned)",
    "$(shell touch pwned)",
    "\\",
    "--config_file=pwned",
    "!!python/object/apply:os.system [touch pwned]",
    "*",
)
TEXT_KEYS = [key.name for key in [*schema_keys().values(), *extra_keys().values()] if str in options(key.annotation)]


def typed(settings: Mapping[str, str]) -> list[Override]:
    return [Override(key=key, text=text, origin="test") for key, text in settings.items()]


# ---- No shell reads a value


@pytest.mark.parametrize("key", TEXT_KEYS)
def test_every_text_key_keeps_a_value_verbatim_or_refuses_it(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    taken = 0
    for value in NASTY:
        try:
            loaded = load_config(None, typed({"model.name": "x/y", key: value}), environ={})
        except UserError:
            continue
        save_config(loaded, tmp_path / "config.json")
        save_config(read_config(tmp_path / "config.json", of_run=False), tmp_path / "config.json")
        read_back = flatten(read_config(tmp_path / "config.json", of_run=False))[key]
        if isinstance(read_back, dict) and value.startswith("{"):
            continue  # a key that takes a mapping reads one
        assert read_back == value or value in str(read_back), f"{key} was given {value!r} and is {read_back!r}"
        taken += 1
    assert {path.name for path in tmp_path.iterdir()} <= {"config.json"}
    assert taken or key not in ("model.name", "data.train_path"), "a check that refuses everything checks nothing"


# ---- Tokens


@pytest.mark.parametrize(
    "text",
    [
        f"model: {{name: {SECRET}}}",
        f"model: {{name: x/y}}\ndata: {{system: 'use {SECRET}'}}",
        f"model: {{name: x/y}}\ndata: {{sources: [{{path: 'a/{SECRET}.jsonl'}}]}}",
        f"model: {{name: x/y, token: {SECRET}}}",
        f"hf_token: {SECRET}\nmodel: {{name: x/y}}",
        f"model: {{name: x/y, max_seq_len: {SECRET}}}",
    ],
    ids=lambda text: text.replace(SECRET, "hf_..."),
)
def test_a_token_in_a_configuration_is_refused_and_not_repeated(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(path, environ={})
    rendered = caught.value.render()
    assert SECRET not in rendered and SECRET[:20] not in rendered
    assert "HF_TOKEN" in rendered or "max_seq_len" in rendered or "hub_token" in rendered


@pytest.mark.parametrize(
    "word", [f"MODEL_NAME={SECRET}", f"HF_TOKEN={SECRET}", f"TRAIN_RUN_NAME={SECRET}", f"RUN={SECRET}", SECRET]
)
def test_a_token_on_the_command_line_is_refused_and_not_repeated(word: str, in_process: Program) -> None:
    done = in_process("config", word)
    assert done.code in (2, 5)
    assert SECRET[:20] not in done.out + done.err, "logs keep what a command prints"


@pytest.mark.parametrize(
    "token",
    [
        "sk-ant-api03-Ab_cd-Planted0Secret0Planted-xyzAA",
        "xoxb-1234-567890123-PlantedSecret0",
        "sk-proj-A-b_cPlanted0Secret0Planted",
        "glpat-Planted0Secret0Planted0.01.0z1abcdefg",
        "hf_Planted0Secret0Planted-Tail_Tail",
        "github_pat_11AA_Planted0Secret0Planted",
    ],
)
def test_no_letter_of_a_token_is_printed(token: str) -> None:
    shown = without_tokens(f"a `{token}` b")
    assert shown.startswith("a `") and shown.endswith("...` b") and not re.search("(?i)planted|tail|secret", shown), (
        shown
    )
    assert without_tokens(f"WANDB_API_KEY={'ab1' * 13}c") == "WANDB_API_KEY=..."


@pytest.mark.parametrize(
    "text",
    [
        "ab1" * 13 + "c",
        "model.revision: " + "0" * 40,
        "sk-learn-something-quite-long",
        "disk-AAAAAAAAAAAAAAAAAAAA",
        "hf_x.jsonl",
    ],
)
def test_text_that_is_not_a_token_is_unchanged(text: str) -> None:
    assert without_tokens(text) == text


@pytest.mark.parametrize("word", ["HF_TOKEN", "train.api_key", "TRAIN_PASSWORD"])
def test_the_value_of_a_key_named_like_a_secret_is_never_repeated(
    word: str, in_process: Program, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"model: {{name: x/y}}\n{word.lower()}: hunter2hunter2\ndata: {{sources: [{{path: x, {word.lower()}:"
        " hunter2hunter2}]}\n"
    )
    for words in (
        ("config", "CONFIG=quickstart", override := f"{word}=hunter2hunter2"),
        ("runs", override),
        ("config", f"CONFIG={path}"),
    ):
        done = in_process(*words)
        assert done.code == 2 and "hunter2" not in done.out + done.err
    done = in_process("config", "CONFIG=quickstart", env={f"SFT_{word.upper().replace('.', '_')}": "hunter2hunter2"})
    assert "hunter2" not in done.out + done.err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", "postgres://u:hunter2@h/d"),
        ("SSH_KEY", "hunter2"),
        ("DATA_PATH", "https://u:hunter2@host/rows.jsonl"),
        ("LICENCE_TEXT", "-----BEGIN hunter2"),
        ("SLURM_JOB", "eyJhbGciOiJI.hunter2.x"),
    ],
)
def test_values_that_look_like_secrets_stay_in_the_environment(
    name: str, value: str, in_process: Program, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model: {{name: x/y}}\ndata: {{train_path: x, system: '${{oc.env:{name}}}'}}\n")
    done = in_process("config", f"CONFIG={path}", env={name: value})
    done.refused(2, "secret")
    assert "hunter2" not in done.out + done.err


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "x1", "(2 letters, not shown)"),
        ("NCCL_PASSWORD", "x1", "(2 letters, not shown)"),
        ("AWS_SECRET_ACCESS_KEY", "x1", "(2 letters, not shown)"),
        ("HF_AUTH", "x1", "(2 letters, not shown)"),
        ("HF_HOME", SECRET, f"({len(SECRET)} letters, not shown)"),
        ("HF_HOME", "/data/hf", "/data/hf"),
        ("HF_ENDPOINT", "https://me:Plan/te@d@hub.example/x", "https://(not shown)@hub.example/x"),
        (
            "HF_ENDPOINT",
            "https://hub.example/x?a=1&access_token=Planted&b=2",
            "https://hub.example/x?a=1&access_token=(not shown)&b=2",
        ),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
    ],
)
def test_secrets_of_the_environment_are_masked(name: str, value: str, shown: str) -> None:
    assert mask(name, value) == shown


# ---- Code that comes with a model


@pytest.mark.parametrize("revision", [None, "main", "a" * 39, "A" * 40])
def test_code_of_the_hub_runs_only_at_a_full_commit(revision: str | None) -> None:
    settings = {"model.name": "x/y", "model.trust_remote_code": "true"} | (
        {"model.revision": revision} if revision else {}
    )
    with pytest.raises(UserError, match="pinned to one commit") as caught:
        load_config(None, typed(settings), environ={})
    assert "40 hexadecimal" in str(caught.value.hint)


def test_code_is_not_trusted_by_an_environment_variable(tmp_path: Path) -> None:
    """A variable that a profile or an image exports would apply to every model; a typed word applies to one command."""
    path, variable = tmp_path / "one.yaml", {"SFT_MODEL_TRUST_REMOTE_CODE": "true"}
    for name in (tmp_path, "x/y"):
        path.write_text(f"model: {{name: {name}, revision: {'a' * 40}}}\ndata: {{train_path: rows.jsonl}}\n")
        with pytest.raises(UserError, match="an environment variable would allow it for every model") as caught:
            load_config(path, environ=variable)
        assert caught.value.place == "environment SFT_MODEL_TRUST_REMOTE_CODE=true"
        assert "MODEL_TRUST_REMOTE_CODE=true with the command" in str(caught.value.hint)
        assert not load_config(path, environ={"SFT_MODEL_TRUST_REMOTE_CODE": "false"}).config.model.trust_remote_code
        answer = typed({"model.trust_remote_code": "true"})
        assert load_config(path, answer, environ=variable).config.model.trust_remote_code
    path.write_text(f"model: {{name: {tmp_path}, trust_remote_code: true}}\ndata: {{train_path: rows.jsonl}}\n")
    assert load_config(path, environ={}).config.model.trust_remote_code


def trainable(folder: Path, model: Path) -> Path:
    """Write the configuration of a run of one step, and its rows."""
    data, config = folder / "d.jsonl", folder / "c.yaml"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    config.write_text(
        f"model: {{name: {model}, max_seq_len: 64}}\ndata: {{train_path: {data}}}\ntuning: {{mode: lora}}\n"
        "train: {max_steps: 1, global_batch_size: 4, eval_strategy: 'no'}\n"
    )
    return config


def change(path: Path, **values: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class MyConfig(LlamaConfig):
    model_type = "mine"
class MyModel(LlamaForCausalLM):
    config_class = MyConfig
class MyTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def with_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a model whose configuration, weights and tokenizer all ask to run `code.py`."""
    folder = build_tiny_llama(tmp_path_factory.mktemp("models") / "mine")
    (folder / "code_of_mine.py").write_text(CODE.format(mark=str(folder / "ran")))
    classes = {"AutoConfig": "code_of_mine.MyConfig", "AutoModelForCausalLM": "code_of_mine.MyModel"}
    change(folder / "config.json", model_type="mine", auto_map=classes)
    mapped = {"AutoTokenizer": ["code_of_mine.MyTokenizer"] * 2}
    change(folder / "tokenizer_config.json", auto_map=mapped, tokenizer_class="MyTokenizer")
    return folder


@pytest.mark.slow
def test_a_models_code_runs_only_with_this_users_consent(with_code: Path, program: Program, tmp_path: Path) -> None:
    """Code needs this user's consent, also for a copied run whose configuration trusts its base's code."""
    mark, config = with_code / "ran", trainable(tmp_path, with_code)
    done = program("train", f"CONFIG={config}", "RUN_NAME=demo", stdin="y\ny\ny\n", timeout=240)
    done.refused(4, "comes with its own Python code")
    assert "accelerate launch" not in done.out
    assert not mark.exists(), "not even when somebody answers `y` to whatever is asked"
    cache = {"SFT_PLAY_CACHE": str(tmp_path / "cache"), "RUNS_DIR": str(tmp_path / "runs")}
    config.write_text(config.read_text().replace("max_seq_len: 64", "max_seq_len: 64, trust_remote_code: true"))
    done = program("train", f"CONFIG={config}", "RUN_NAME=demo", env=cache, timeout=200)
    assert done.code == 0 and mark.exists(), done.err
    mark.unlink()
    stranger = cache | {"SFT_PLAY_CACHE": str(tmp_path / "another-users-cache"), "SFT_PLAY_CONSENT": "model"}
    infer = ("infer", "RUN=demo", "PROMPT=a")
    for command in (infer, ("merge", "RUN=demo"), ("data", f"CONFIG={tmp_path}/runs/demo/config.json")):
        done = program(*command, env=stranger, timeout=240)
        done.refused(4, "MODEL_TRUST_REMOTE_CODE=true")
        assert not mark.exists(), command
    program(*infer, env=cache, timeout=240).refused(4, "MODEL_TRUST_REMOTE_CODE=true")
    done = program(*infer, "MODEL_TRUST_REMOTE_CODE=true", env=stranger, timeout=240)
    assert done.code == 0 and mark.exists(), done.err


@pytest.mark.slow
@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.broad_but("lora-True")
def test_a_merged_model_has_the_code_that_its_base_has(
    with_code: Path, program: Program, tmp_path: Path, mode: str, best: bool
) -> None:
    config, out = trainable(tmp_path, with_code), tmp_path / "runs" / "demo" / "merged"
    text = (
        config.read_text().replace("max_seq_len: 64", "max_seq_len: 64, trust_remote_code: true").replace("lora", mode)
    )
    if best:
        text = text.replace(
            "eval_strategy: 'no'", "eval_strategy: steps, eval_steps: 1, save_steps: 1, load_best_model_at_end: true"
        )
        text = text.replace("data: {", f"data: {{val_path: {shutil.copy(tmp_path / 'd.jsonl', tmp_path / 'v.jsonl')}, ")
    config.write_text(text)
    (with_code / "part_of_mine.py").write_text("")  # that no class of the model is in
    done = program("train", f"CONFIG={config}", "RUN_NAME=demo", timeout=200)
    assert done.code == 0, done.err
    merged = program("merge", "RUN=demo", "MODEL_TRUST_REMOTE_CODE=true", timeout=120)
    assert merged.code == 0 and "make serve" not in merged.err, merged.err
    assert {path.name: path.read_bytes() for path in out.glob("*.py")} == {
        path.name: path.read_bytes() for path in with_code.glob("*.py")
    }
    step = next(word for word in merged.err.split("next: ")[1].split(", ") if "make infer" in word)
    words = step.replace("make ", "").replace("PROMPT=...", "PROMPT=a").split()
    assert program(*words, "TRAIN_GENERATION_MAX_NEW_TOKENS=2", timeout=120).code == 0


@pytest.mark.parametrize(
    "way", ["config.json", "mine.json in a run", "mine.yaml in a run", "mine.yaml in a cache", "own.yaml below a run"]
)
def test_a_copied_configuration_does_not_imply_consent_even_with_omissions(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `config.json` without origins counts as a user's file; a file that a stranger's extends counts as the
    stranger's.
    """

    def load(path: Path, *words: str) -> tuple[bool, bool]:
        monkeypatch.setenv(CONSENT, "")
        parse_call(["data", f"CONFIG={path}", *words], COMMANDS, environ={}).load_config()
        return may_run("model"), may_run("metrics")

    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))
    base = tmp_path / "base"
    base.mkdir()
    folder = tmp_path / ("cache" if way.endswith("cache") else "theirs")
    folder.mkdir()
    if way.endswith("run"):
        (folder / "stamp.json").write_text("{}")
    own = {"model": {"name": str(base), "trust_remote_code": True}, "eval": {"metrics": ["evaluate:any"]}}
    (tmp_path / "own.yaml").write_text(json.dumps(own))
    theirs = folder / way.split(maxsplit=1)[0]
    theirs.write_text(json.dumps({"extends": "../own.yaml"} if way.startswith("own") else own))
    assert load(theirs) == (False, False)
    assert load(theirs, "MODEL_TRUST_REMOTE_CODE=true") == (True, False)
    assert load(theirs, "EVAL_METRICS=[evaluate:any]") == (False, True)
    (tmp_path / "further.yaml").write_text(f"extends: {theirs}\n")
    assert load(tmp_path / "further.yaml") == (False, False)
    assert load(tmp_path / "own.yaml") == (True, True)


def test_code_of_another_repository_is_refused_even_when_trusted(with_code: Path, tmp_path: Path) -> None:
    refuse_foreign_code(with_code)
    for file, value in (("config.json", "evil/repo--code.Config"), ("tokenizer_config.json", [None, "e/r--c.T"])):
        folder = tmp_path / file.removesuffix(".json")
        folder.mkdir()
        (folder / file).write_text(json.dumps({"auto_map": {"AutoAny": value}}))
        with pytest.raises(DataError, match="another repository"):
            refuse_foreign_code(folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "did not finish within"),
        ("{{ 'a' * 10 ** 15 }}", "more memory than there is"),
    ],
)
def test_no_command_waits_for_a_template(
    template: str, message: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "SECONDS", 0.3)
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = template
    turns = [{"role": "user", "content": "a"}]
    for act in (
        lambda: prompt_ids(tokenizer, turns),
        lambda: end_of_turn_ids(tokenizer),
        lambda: template_sha256(tokenizer),
    ):
        with pytest.raises(UserError, match=message) as caught:
            act()
        assert caught.value.exit_code == 4


# ---- Pickles


@pytest.mark.slow
def test_pickled_weights_run_nothing(model: Path, program: Program, tmp_path: Path) -> None:
    import torch

    mark = tmp_path / "ran"
    (model / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Evil(mark)}, model / "pytorch_model.bin")
    for name in ("training_args.bin", "optimizer.pt", "rng_state.pth", "scheduler.pt"):
        (model / name).write_bytes(pickle.dumps(Evil(mark)))
    done = program("train", f"CONFIG={trainable(tmp_path, model)}", "RUN_NAME=demo", timeout=240)
    done.refused(5, "a pickle that contains more than tensors")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["rows.pkl", "rows.pt", "rows.npy", "rows.tar.gz", "rows.py"])
def test_files_that_could_run_or_unpack_are_refused_as_data(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(DataError):
            rows(path)
    assert not (tmp_path / "ran").exists()


# ---- Paths


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Write a file that no source names, and a data folder with a link to it."""
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"prompt": "the", "completion": "secret"}\n')
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return secret


def rows(path: Path | str) -> list[Any]:
    return [row for _, row in read_source(DataSource(path=str(path)))]


def test_links_in_a_folder_of_data_do_not_lead_out(outside: Path) -> None:
    folder = outside.parent / "data"
    (folder / "again.jsonl").symlink_to("rows.jsonl")
    assert len(rows(folder)) == 2, "links inside are fine"
    (folder / "more.jsonl").symlink_to(outside)
    for source in (folder, f"{folder}/*.jsonl"):
        with pytest.raises(DataError, match="outside of the folder"):
            rows(source)
    (folder / "more.jsonl").unlink()
    (folder / "inner").symlink_to(outside.parent, target_is_directory=True)
    assert len(rows(folder)) == 2, "linked folders are not entered"
    with pytest.raises(DataError, match="outside of the folder"):
        rows(f"{folder}/*/secret.jsonl")
    (folder / "named").symlink_to(outside.parent)
    assert len(rows(folder / "rows.jsonl")) == 1
    assert len(rows(outside)) == 1, "what the user names is the user's wish"


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "model")


def refuse_model(folder: Path, message: str) -> None:
    """Assert that `folder` is refused as a base model and as a trained one."""
    with pytest.raises(DataError, match=message):
        check_folder(folder, "x")
    with pytest.raises(CheckpointError, match=message):
        check_trained(folder)


def test_links_in_a_model_folder_do_not_lead_out(model: Path, outside: Path) -> None:
    (model / "LICENSE.txt").symlink_to(outside)
    refuse_model(model, "outside of the folder")
    assert model_files(model) and "LICENSE.txt" not in {path.name for path in model_files(model)}


def test_no_command_waits_for_a_pipe_or_a_device_in_a_folder(model: Path) -> None:
    config = model / "config.json"
    facts = describe(model, [config])
    (model / "extra.json").symlink_to("/dev/zero")
    refuse_model(model, "not a plain file")
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(OSError, match="not a plain file"):
        read_json(config)
    assert damage(model, facts) == "`config.json` is not a plain file"


def test_a_models_own_attention_setting_does_not_overrule_the_plan(model: Path) -> None:
    import torch

    change(model / "config.json", _attn_implementation="a-stranger/kernel")
    read = read_model(model, ModelConfig(name="x"), dtype=torch.float32, attention="sdpa")
    assert read.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("ending", "opener"), [(".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)])
def test_a_file_that_expands_too_much_is_refused(ending: str, opener: Any, tmp_path: Path) -> None:
    path = tmp_path / f"rows.jsonl{ending}"
    with opener(path, "wb") as stream:
        for _ in range(70):
            stream.write(b"x" * 2**20)
    assert path.stat().st_size < 2**18
    with pytest.raises(DataError, match="unpacks to more than 200 times its size"):
        rows(path)


def test_a_snapshot_of_the_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "datasets--x--y" / "blobs", tmp_path / "datasets--x--y" / "snapshots" / "b"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    (blobs / "a").write_text('{"prompt": "a", "completion": "b"}\n')
    (snapshot / "rows.jsonl").symlink_to("../../blobs/a")
    assert len(rows(snapshot)) == 1
    (snapshot / "more.jsonl").symlink_to("../../refs")
    (blobs.parent / "refs").write_text("{}")
    with pytest.raises(DataError, match="outside"):
        rows(snapshot)


@pytest.mark.slow
def test_a_saved_data_set_names_only_its_own_files(outside: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    saved = outside.parent / "saved"
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(saved))
    own = saved / json.loads((saved / "state.json").read_text())["_data_files"][0]["filename"]
    own.rename(outside.parent / "moved.arrow")
    own.symlink_to("../moved.arrow")
    for name in (own.name, "../secret.jsonl", str(outside), "..", "a/../../secret.jsonl"):
        change(saved / "state.json", _data_files=[{"filename": name}])
        with pytest.raises(DataError, match=r"outside|is missing"):
            rows(saved)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_names_only_files_next_to_it(name: str, index: str, model: Path) -> None:
    check_folder(model, "x")
    (model / index).write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": name}}))
    refuse_model(model, "which is not in the folder")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/hostname", "a/../../x"])
def test_a_manifest_names_only_files_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {name: {"bytes": 1, "sha256": "0" * 64}}}))
    assert verify(tmp_path) == f"its manifest names `{name}`, which is not in the folder"


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "-rf", "a\nb", "$(touch x)"])
def test_a_run_name_that_is_a_path_is_refused(name: str, in_process: Program, tmp_path: Path, tiny: Path) -> None:
    before = set(tmp_path.rglob("*"))
    in_process("train", "CONFIG=quickstart", f"MODEL_NAME={tiny}", f"RUN_NAME={name}").refused(2, "RUN_NAME")
    assert set(tmp_path.rglob("*")) == before
