"""Commands from other guides are accepted, or refused with a suggestion that works as typed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.render_presets import MADE_FOR
from sft_play.__main__ import COMMANDS
from sft_play.config.call import Call, parse_call
from sft_play.config.load import load_config
from sft_play.config.names import ALIASES, INSTEAD
from sft_play.errors import UserError
from sft_play.runs.folder import cache_folder, runs_folder
from tests.conftest import ROOT, Program, environment
from tests.launcher import tiny_config
from tests.unit.test_config_call import refused

TYPED: dict[str, tuple[list[str], str]] = {
    "backend nccl": (["train-distributed", "--backend", "nccl"], "LAUNCH_BACKEND=..."),
    "output folder": (["train", "OUTPUT_DIR=/data/runs"], "export RUNS_DIR="),
    "second of two machines": (
        ["train-distributed", "--world-size", "16", "--rank", "8"],
        "`NUM_GPUS=...` (processes on this machine)?",
    ),
    "processes": (["train-distributed", "--nproc_per_node=gpu"], "NUM_GPUS=..."),
    "CPU": (["train", "--cpu"], "`export CUDA_VISIBLE_DEVICES=`"),
    "bare file": (["train", "my.yaml"], "CONFIG=my.yaml"),
}
GOOD = "data: {train_path: a.jsonl, val_path: b.jsonl}\ntrain: {eval_strategy: steps, eval_steps: 5}\n"


def suggestions(message: str) -> list[list[str]]:
    """Return each `NAME=value ...` in backticks of the hints, with its command if any, but not those with an open
    value.
    """
    hints = " ".join(re.findall(r"^hint: (.*)$", message, re.M))
    commands = [re.split(r" (?=[A-Z_]+=)", text) for text in re.findall(r"`((?:train-\S+ )?[A-Z_]+=[^`]*)`", hints)]
    return [words for words in commands if not any(word.endswith("=...") for word in words)]


def accepted(command: str, words: list[str], folder: Path) -> Call:
    """Parse and load what is typed over the configuration of a pretrained model, or of one with random weights."""
    call = parse_call(words if words[0].startswith("train-") else [command, *words], COMMANDS)
    for model in (
        "{name: m}",
        "{init: random, vocab_size: 512, hidden_size: 64, attention_heads: 1, layers: 2, tokenizer: t}",
    ):
        (folder / "x.yaml").write_text(
            f"model: {model}\n{GOOD}tuning: {{mode: {'lora' if 'name' in model else 'full'}}}\n", encoding="utf-8"
        )
        with contextlib.suppress(UserError):
            load_config(folder / "x.yaml", call.overrides, {})
            return call
    load_config(folder / "x.yaml", call.overrides, {})
    return call


@pytest.mark.parametrize("name", TYPED)
def test_each_mistyped_word_is_refused_with_the_right_one(name: str, tmp_path: Path) -> None:
    words, right = TYPED[name]
    message = refused(*words)
    assert right in message, message
    for suggestion in suggestions(message):
        accepted(words[0], suggestion, tmp_path)


VALUES = (
    "true",
    "2",
    "auto",
    "bf16",
    "some/text",
    "[a, b]",
    "no",
    "fp16",
    "nccl",
    "gpu:2",
    "host:29500",
    "0.1",
    "",
)


def test_every_suggestion_is_accepted_as_shown(tmp_path: Path) -> None:
    wrong, seen = [], set()
    for alias in {*ALIASES, *INSTEAD}:
        for value in VALUES:
            for command in ("train-distributed", "train", "resume", "slurm")[: 4 if value == "2" else 2]:
                message = refused(command, f"--{alias}={value}")
                for words in suggestions(message):
                    if (command, *words) in seen:
                        continue
                    seen.add((command, *words))
                    try:
                        accepted(command, words, tmp_path)
                    except UserError as error:
                        wrong.append(f"{command} --{alias}={value}: {words}: {error.render()}")
    assert not wrong, "\n".join(wrong)


# ---- Batches


PRESETS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


def test_two_typed_numbers_outrank_the_global_batch_of_a_file(in_process: Program) -> None:
    words = ("TRAIN_BATCH_SIZE=1", "TRAIN_GRAD_ACCUM=32", "SOURCE=formula")
    done = in_process("plan", "CONFIG=h100_pair", "HARDWARE=2xH200", *words)
    assert done.code == 0 and "they outrank `train.global_batch_size`" in done.err, done.err
    assert "  note     global batch 64 = 1 per device x 32 accumulation x 2 devices: " in done.out


# ---- Trackers


@pytest.mark.skipif(importlib.util.find_spec("swanlab") is not None, reason="swanlab is installed")
def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(in_process: Program, tmp_path: Path) -> None:
    words = ("CONFIG=quickstart", "TRAIN_REPORT_TO=[tensorboard, swanlab]")
    message = "`train.report_to` names `swanlab`, which is not installed here"
    in_process("train", *words, "RUN_NAME=never").refused(
        3, f"error: {message}", "-m pip install -c constraints.txt swanlab"
    )
    assert not (tmp_path / "runs").exists()
    for command, *arguments in (["plan"], ["slurm", f"OUT={tmp_path}/s/"], ["kubernetes", f"OUT={tmp_path}/k/"]):
        done = in_process(command, *words, *arguments)
        assert done.code == 0 and message in done.err, done.err


# ---- Environment


OF_LAUNCH = [
    "RUN_NAME", "NUM_NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_CONFIG", "DEEPSPEED_CONFIG",
    "SOURCE", "JSON", "CONFIG", "SFT_NUM_GPUS", "SFT_RUN_NAME", "SFT_CONFIG",
]  # fmt: skip


@pytest.mark.parametrize("name", OF_LAUNCH)
def test_an_option_in_the_environment_is_refused_with_what_to_type(
    in_process: Program, tmp_path: Path, name: str
) -> None:
    """Otherwise a second machine would start a separate run."""
    option = name.removeprefix("SFT_")
    words = ["train-deepspeed", *(["CONFIG=smoke"] if option != "CONFIG" else [])]
    done = in_process(*words, env={name: "a b"})
    done.refused(
        2,
        f"environment: `{name}` is in the environment",
        f"type `train-deepspeed {option}='a b' ...`",
        f"`unset {name}`",
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TRAIN_MAX_STEPS", "type `plan TRAIN_MAX_STEPS=5 ...`; to ignore them: `unset TRAIN_MAX_STEPS`"),
        ("MODEL_NAME", "`MODEL_NAME` is in the environment"),
        ("SFT_PLAY_CASHE", "unknown variable `SFT_PLAY_CASHE`\n\nhint: did you mean `SFT_PLAY_CACHE`?"),
        ("SFT_PLAY_RUNS_DIR", "unknown variable `SFT_PLAY_RUNS_DIR`\n\nhint: `unset SFT_PLAY_RUNS_DIR`"),
    ],
)
def test_a_key_or_a_misspelt_name_in_the_environment_is_not_ignored(
    in_process: Program, name: str, message: str
) -> None:
    in_process("plan", "CONFIG=smoke", env={name: "5"}).refused(2, "error: environment: ", message)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("plan CONFIG=", 2),
        ("plan CONFIG=smoke ACCELERATE_CONFIG=", 2),
        ("plan CONFIG=smoke DEEPSPEED_CONFIG=", 2),
        ("data CONFIG=demo.yaml DATA_TRAIN_PATH=", 4),
        ("data CONFIG=demo.yaml DATA_CHAT_TEMPLATE=", 4),
        ("setup-accelerate OUT=", 2),
    ],
)
def test_a_pipe_or_a_device_is_no_file(in_process: Program, tmp_path: Path, tiny: Path, words: str, code: int) -> None:
    """`<(command)` of a shell is a pipe, which gives what is in it only once."""
    config, pipe = tiny_config(tmp_path, tiny), tmp_path / "pipe"
    os.mkfifo(pipe)
    typed = words.replace("demo.yaml", str(config)).split()
    in_process(*typed[:-1], f"{typed[-1]}{pipe}").refused(code, "error: ", str(pipe), "it is not a plain file")
    assert pipe.is_fifo()


@pytest.mark.cold
@pytest.mark.parametrize("file", ["yaml/__init__.py", "psutil.py", "transformers.py"])
def test_a_file_of_pythonpath_in_a_librarys_place_is_named(program: Program, tmp_path: Path, file: str) -> None:
    shadow = tmp_path / "lib" / file
    shadow.parent.mkdir(parents=True)
    shadow.write_text("raise RuntimeError\n")
    done = program("plan", "CONFIG=smoke", env={"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'lib'}"})
    done.refused(3, f"error: PYTHONPATH: `{shadow}` is imported instead of the library")


@pytest.mark.cold
def test_another_version_of_a_library_on_pythonpath_is_the_users_choice(program: Program, tmp_path: Path) -> None:
    import yaml

    shutil.copytree(Path(yaml.__file__).parent, tmp_path / "yaml")
    done = program("config", "CONFIG=smoke", env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert done.code == 0, done.err


def test_a_home_that_no_shell_has_replaced_is_meant(
    in_process: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container's ENV, a unit of systemd, or zsh; a folder `~` would be made here."""
    (tmp_path / "a.yaml").write_text("extends: smoke\n")
    for name, text in {"HOME": str(tmp_path), "RUNS_DIR": "~/r", "SFT_PLAY_CACHE": "~/c"}.items():
        monkeypatch.setenv(name, text)
    assert (runs_folder(), cache_folder()) == (tmp_path / "r", tmp_path / "c")
    assert in_process("config", "CONFIG=~/a.yaml", env={"HOME": str(tmp_path)}).code == 0
    assert in_process("setup-accelerate", "OUT=~/o.yaml", env={"HOME": str(tmp_path)}).code == 0
    assert (tmp_path / "o.yaml").is_file()


def test_names_that_other_programs_set_are_not_refused(in_process: Program) -> None:
    ours = {"SLURM_ACCOUNT": "x", "KUBERNETES_NAMESPACE": "x", "SFT_PLAY_TEST_COLD": "1", "SFT_TRAIN_MAX_STEPS": "5"}
    (refused := in_process("serve", env={"HOST": "x86_64-conda-linux-gnu", "RUN": "x"})).refused(2, "RUN=x")
    assert "HOST" not in refused.err
    ours |= {
        "SFT_PLAY_SERVICE_HOST": "10.0.0.1",
        "SFT_PLAY_PORT": "tcp://10.0.0.1:80",
        "SFT_PLAY_PORT_80_TCP_ADDR": "x",
    }
    done = in_process("config", "CONFIG=smoke", env=ours)
    assert done.code == 0 and "environment SFT_TRAIN_MAX_STEPS=5" in done.out, done.err


def test_each_command_names_all_its_options_in_the_environment(in_process: Program) -> None:
    for command, row in COMMANDS.items():
        options = [name for name in row.options if name != "HOST"]
        if options:
            done = in_process(command, env=dict.fromkeys(options, "x"))
            assert done.code == 2 and all(f"{name}=" in done.err for name in options), done.err
    in_process("cluster-status", "CLUSTER=home", env={"CLUSTER_HOSTS": "a"}).refused(2, "CLUSTER_HOSTS=a")


def test_typed_options_win_over_the_environment_and_empty_ones_are_ignored(in_process: Program) -> None:
    done = in_process("config", "CONFIG=smoke", "JSON=1", env={"CONFIG": "other", "RUN": "", "NUM_NODES": "2"})
    assert done.code == 0 and done.json["train.seed"], done.err


def test_a_number_of_threads_that_is_none_is_refused_before_accelerate_reads_it(in_process: Program) -> None:
    done = in_process("train", "CONFIG=smoke", env={"OMP_NUM_THREADS": "4,2"})
    done.refused(2, "environment: `OMP_NUM_THREADS` is `4,2`; expected a number of threads")


def test_a_network_interface_that_this_machine_lacks_is_named(in_process: Program, tmp_path: Path, tiny: Path) -> None:
    words = ("train-distributed", "NUM_GPUS=2", f"CONFIG={tiny_config(tmp_path, tiny)}")
    done = in_process(*words, env={"GLOO_SOCKET_IFNAME": "lo,eth99"})
    done.refused(3, "environment: `GLOO_SOCKET_IFNAME` names `eth99`, but this machine has ", "unset it")


@pytest.mark.parametrize("words", [["help"], ["config", "CONFIG=smoke", "JSON=1"]])
def test_output_to_a_full_disk_is_one_error(words: list[str], cache: Path, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sft_play", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
            cwd=ROOT,
            env=environment(cache, tmp_path / "runs"),
        )
    message = "error: the output cannot be written: no space is left on the disk\n"
    assert (done.returncode, done.stderr) == (3, message)


@pytest.mark.parametrize("words", [["train", "CONFIG=smoke"], ["runs"], ["init"]])
def test_a_working_folder_that_was_removed_is_named(words: list[str], cache: Path, tmp_path: Path) -> None:
    lines = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    done = subprocess.run(
        ["/bin/sh", "-c", lines, "sh", sys.executable, "-m", "sft_play", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env=environment(cache, tmp_path / "runs"),
    )
    assert done.returncode == 2 and "error: the working folder has been removed\n" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


# ---- Presets and accelerate's default file


@pytest.mark.broad
def test_each_preset_fits_its_hardware(in_process: Program) -> None:
    for_gpus = {name for name in PRESETS if name not in ("quickstart", "run_cpu", "cpu_qwen3_5")}
    assert for_gpus == MADE_FOR.keys()
    for name, hardware in MADE_FOR.items():
        assert in_process("plan", f"CONFIG={name}", f"HARDWARE={hardware}", "SOURCE=formula").code == 0


SEVERAL = (
    "distributed_type: MULTI_GPU\nnum_machines: 3\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port:"
    " 29500\nnum_processes: 3\n"
)
TWO = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n"
DEFAULTS: dict[str, tuple[str, list[str], str, str]] = {
    "several machines are planned": (SEVERAL, ["plan"], "asks for 3 machines, so it is read", "3 nodes, each with"),
    "several machines need a name": (SEVERAL, ["train-distributed"], "every node needs `RUN_NAME` too", ""),
    "what is typed wins": (SEVERAL, ["plan", "NUM_NODES=1"], "accelerate's default file is not read", ""),
    "a strategy": (
        TWO, ["plan"], "asks for `FSDP`", "plan: fsdp2"
    ),
    "other processes": (TWO, ["plan", "NUM_GPUS=1"], "accelerate's default file is not read", "plan: single"),
    "the same processes": (TWO, ["plan", "NUM_GPUS=2"], "asks for `FSDP`", "strategy fsdp2: the accelerate config"),
    "another precision": (
        TWO + "mixed_precision: 'no'\n", ["plan", "TRAIN_BF16=true"], "default file is not read", "plan: single"
    ),
    "a section that is refused": (
        "distributed_type: DEEPSPEED\ndeepspeed_config: a\n", ["plan"], "default_config.yaml:2: `deepspeed_config`", ""
    ),
    "a strategy that is refused": (
        "distributed_type: XLA\n", ["plan"], "`distributed_type` is `XLA`; expected `NO`", ""
    ),
    "plain": ("distributed_type: 'NO'\nmixed_precision: fp16\n", ["plan"], "to use it: ACCELERATE_CONFIG=", ""),
    "schedulers": (SEVERAL, ["slurm", "OUT={folder}/"], "", ""),
}  # fmt: skip


def test_impossible_settings_of_an_accelerate_file_name_the_file(in_process: Program, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "distributed_type: MULTI_CPU\nmixed_precision: fp16\nuse_cpu: true\nnum_processes: 2\n", encoding="utf-8"
    )
    for command in ("plan", "train-distributed"):
        done = in_process(command, "CONFIG=quickstart", f"ACCELERATE_CONFIG={path}")
        done.refused(
            3, f"error: {path}:2: `mixed_precision` is `fp16`, but fp16", "hint: write `mixed_precision: 'no'`"
        )


@pytest.mark.parametrize("name", DEFAULTS)
def test_accelerates_default_file_is_read_refused_or_noted(name: str, in_process: Program, tmp_path: Path) -> None:
    text, words, message, shown = DEFAULTS[name]
    path = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    words = [word.format(folder=tmp_path) for word in words]
    done = in_process(words[0], "CONFIG=configs/quickstart.yaml", *words[1:], env={"HF_HOME": str(tmp_path / "hf")})
    assert message in done.err if message else "default file" not in done.err, done.err
    assert (
        ("error: " in done.err)
        == (done.code != 0)
        == (name in ("several machines need a name", "a strategy that is refused", "a section that is refused"))
    )
    assert shown in done.out, done.out
