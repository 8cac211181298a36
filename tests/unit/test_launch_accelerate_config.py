"""Config files that `accelerate config` made: read, or refused with the reason and the line; nothing in them is
ignored.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_play.errors import UserError
from sft_play.launch.settings import LAYERS, AccelerateChoices, read_accelerate_config
from tests.conftest import Program

BASE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: {kind}
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""What `accelerate config` writes, word for word."""


def read(folder: Path, extra: str, kind: str) -> AccelerateChoices:
    path = folder / "acc.yaml"
    path.write_text(BASE.format(kind=kind) + extra)
    return read_accelerate_config(path)


def refusal(folder: Path, extra: str, kind: str) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, extra, kind)
    return caught.value.render()


def test_a_deepspeed_stage_becomes_settings(tmp_path: Path) -> None:
    extra = (
        "deepspeed_config:\n  deepspeed_multinode_launcher: standard\n  gradient_accumulation_steps: 4\n"
        "  offload_optimizer_device: cpu\n"
        "  offload_param_device: none\n  zero3_init_flag: true\n  zero_stage: 3\n  zero3_save_16bit_model: true\n"
    )
    choices = read(tmp_path, extra, "DEEPSPEED")
    assert choices.strategy == "zero"
    assert choices.deepspeed is not None
    assert choices.deepspeed.stage == 3
    assert choices.deepspeed.settings == {
        "gradient_accumulation_steps": 4,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def test_a_deepspeed_file_is_read_and_excludes_other_keys(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}} // mine')
    extra = f"deepspeed_config:\n  deepspeed_config_file: {tmp_path / 'ds.json'}\n  zero3_init_flag: false\n"
    choices = read(tmp_path, extra, "DEEPSPEED")
    assert choices.deepspeed is not None
    assert choices.deepspeed.stage == 1
    assert "uses only the file" in refusal(tmp_path, extra + "  zero_stage: 2\n", "DEEPSPEED")


FSDP = (
    "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n "
    " fsdp_cpu_ram_efficient_loading: true\n  fsdp_offload_params: false\n  fsdp_reshard_after_forward: false\n "
    " fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_activation_checkpointing: true\n"
)


def test_an_fsdp2_file_is_read(tmp_path: Path) -> None:
    choices = read(tmp_path, FSDP, "FSDP")
    assert choices.strategy == "fsdp2"
    assert choices.fsdp == {"fsdp_reshard_after_forward": False}
    assert choices.train["gradient_checkpointing"] is True
    assert len(choices.notices) == 2  # what has no effect here is said


@pytest.mark.parametrize(
    ("extra", "kind", "words"),
    [
        ("", "XLA", ("acc.yaml:3: ", "`distributed_type` is `XLA`; expected `NO`")),
        ("fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n", "FSDP", ("only FSDP2 is supported",)),
        (FSDP.replace("offload_params: false", "offload_params: true"), "FSDP", ("zero3_offload",)),
        (FSDP + "  fsdp_new_thing: 1\n", "FSDP", ("not understood: `fsdp_config.fsdp_new_thing`",)),
        (
            "dynamo_config:\n  dynamo_backend: INDUCTOR\n",
            "MULTI_GPU",
            ("acc.yaml:17: ", "torch.compile is not supported"),
        ),
        ("colour: blue\nshape: round\n", "MULTI_GPU", ("not understood: `colour`, `shape`",)),
        ("num_proceses: 4\n", "MULTI_GPU", ("acc.yaml:17: ", "hint: did you mean `num_processes`?")),
        ("mpirun_config:\n  mpirun_ccl: '1'\n", "MULTI_CPU", ("acc.yaml:17: ", "mpirun is not used")),
        ("ipex_config: {ipex: true}\n", "MULTI_CPU", ("IPEX is not used",)),
        ("deepspeed_config:\n  zero_stage: 2\n", "MULTI_GPU", ("`distributed_type` is `MULTI_GPU`",)),
        (
            "deepspeed_config:\n  deepspeed_multinode_launcher: pdsh\n  zero_stage: 2\n",
            "DEEPSPEED",
            ("expected `standard`",),
        ),
    ],
)
def test_refusals_say_why(tmp_path: Path, extra: str, kind: str, words: tuple[str, ...]) -> None:
    message = refusal(tmp_path, extra, kind)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("deepspeed_config: ds.json", "DEEPSPEED", "`deepspeed_config` is `ds.json`; expected a mapping"),
        ("deepspeed_config: [1]", "MULTI_GPU", "`deepspeed_config` is `[1]`; expected a mapping"),
        ("fsdp_config: full_shard auto_wrap", "FSDP", "`fsdp_config` is `full_shard auto_wrap`; expected a mapping"),
        (
            "deepspeed_config: {deepspeed_config_file: gone.json}",
            "DEEPSPEED",
            "`deepspeed_config_file` is `gone.json`, and there is no such file",
        ),
        ("deepspeed_config: {zero_stage: two}", "DEEPSPEED", '`zero_optimization.stage` is `"two"`'),
        ("main_process_ip: [10.0.0.1]", "MULTI_GPU", "`main_process_ip` is `[10.0.0.1]`; expected text"),
        (
            "main_process_port: 70000",
            "MULTI_GPU",
            "`main_process_port` is `70000`; expected an integer >= 0 and <= 65535",
        ),
        ("main_process_port: '29500'", "MULTI_GPU", "`main_process_port` is `29500`; expected an integer"),
        ("num_machines: 0", "MULTI_GPU", "`num_machines` is `0`; expected an integer >= 1"),
        ("num_processes: 0", "MULTI_GPU", "`num_processes` is `0`; expected an integer >= 1"),
        ("num_processes: true", "MULTI_GPU", "`num_processes` is `true`; expected an integer >= 1"),
        ("machine_rank: 1", "MULTI_GPU", "`machine_rank` is 1; expected 0 to 0, by `num_machines: 1`"),
        ("machine_rank: -1", "MULTI_GPU", "`machine_rank` is `-1`; expected an integer >= 0"),
        ("use_cpu: 'yes'", "MULTI_GPU", "`use_cpu` is `yes`"),
        (
            "fsdp_config: {fsdp_version: 2, fsdp_transformer_layer_cls_to_wrap: [A]}",
            "FSDP",
            "cls_to_wrap` is `[A]`; expected text",
        ),
        (
            "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: FULL_SHARD}",
            "FSDP",
            "is `FULL_SHARD`; expected `true`, `false` or null",
        ),
        (
            "fsdp_config: {fsdp_version: 2}",
            "MULTI_GPU",
            "`fsdp_config` is given, but `distributed_type` is `MULTI_GPU`",
        ),
        ("mixed_precision: true", "MULTI_GPU", "`mixed_precision` is `true`; expected `no`"),
        ("deepspeed_config: {deepspeed_config_file: ''}", "DEEPSPEED", "and there is no such file"),
        ("1: 2\ncolour: blue", "MULTI_GPU", "keys that are not understood: `1`, `colour`"),
    ],
)
def test_values_of_another_kind_are_refused_with_their_line(tmp_path: Path, line: str, kind: str, message: str) -> None:
    lines = [
        base_line
        for base_line in BASE.format(kind=kind).splitlines()
        if base_line.partition(":")[0] != line.partition(":")[0]
    ]
    path = tmp_path / "acc.yaml"
    path.write_text("\n".join([*lines, line]) + "\n")
    with pytest.raises(UserError) as caught:
        read_accelerate_config(path)
    place = f"{path}:{len(lines) + 1}: "
    assert message in caught.value.render() and (place in caught.value.render() or "not understood" in message), (
        caught.value.render()
    )
    assert caught.value.render().count(message) == 1


@pytest.mark.parametrize(
    "line",
    [
        "dynamo_backend: 'NO'",
        "dynamo_backend: NO",
        "dynamo_config: {dynamo_backend: 'NO'}",
        "dynamo_config: {dynamo_backend: 'no'}",
    ],
)
def test_the_default_without_a_compiler_is_accepted(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, f"{line}\n", "MULTI_GPU").strategy == "ddp"


@pytest.mark.parametrize(
    ("line", "kind", "cpu"),
    [("use_cpu: true", "NO", True), ("", "MULTI_CPU", True), ("use_cpu: false", "MULTI_GPU", False)],
)
def test_a_file_may_ask_for_the_cpu(tmp_path: Path, line: str, kind: str, cpu: bool) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text(BASE.format(kind=kind).replace("use_cpu: false\n", f"{line}\n"))
    assert read_accelerate_config(path).cpu is cpu


def test_what_asks_for_nothing_is_noted(tmp_path: Path) -> None:
    empty = "ipex_config:\n  ipex: false\nmpirun_config: {mpirun_ccl: '', mpirun_hostfile: ''}\nnewer_config: {}\n"
    notices = read(tmp_path, empty, "MULTI_CPU").notices
    assert notices == tuple(f"`{name}_config` has no effect here" for name in ("ipex", "mpirun", "newer"))


def test_a_line_of_the_deepspeed_section_is_named(in_process: Program, tmp_path: Path) -> None:
    path = tmp_path / "acc.yaml"
    section = "deepspeed_config:\n  zero_stage: 2\n  gradient_clipping: 0.5\n"
    path.write_text(BASE.format(kind="DEEPSPEED").replace("bf16", "'no'") + section)
    done = in_process("plan", "CONFIG=quickstart", f"ACCELERATE_CONFIG={path}")
    done.refused(2, f"{path}:19: `gradient_clipping` is `0.5`", "(the default of `train.max_grad_norm`)")


def test_layers_to_wrap_are_left_to_the_model(tmp_path: Path) -> None:
    choices = read(tmp_path, FSDP + f"  {LAYERS}: LlamaDecoderLayer\n", "FSDP")
    assert LAYERS not in choices.fsdp
    assert any(f"`{LAYERS}` has no effect here" in notice for notice in choices.notices)
