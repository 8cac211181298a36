"""`make plan` as a user types it (C9), and every preset on the hardware that it names (docs/presets.md)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from sft_play.config.layers import Override
from sft_play.config.load import load_config, save_config
from sft_play.config.schema import ModelConfig
from sft_play.launch.run_folder import record_event
from sft_play.plan.architecture import shape_of
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from tests.conftest import ROOT, Program
from tests.nvml_double import NOT_LOADED, Gpu, Machine
from tests.plans import prepared_rows
from tests.processor_time import importing, seconds_of

KEYS = {
    "world_size",
    "strategy",
    "source",
    "ranks",
    "global_batch_size",
    "steps",
    "tokens_per_second",
    "communication_share",
    "reasons",
}
PARTS = {"frozen", "quant_state", "adapters", "gradients", "optimizer", "activations", "logits", "buffers", "context"}


@pytest.fixture
def tiny_config(tmp_path: Path, tiny: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"model: {{name: {tiny}, max_seq_len: 64}}\ndata: {{train_path: {ROOT}/examples/02_your_jsonl/train.jsonl}}\n"
    )
    return path


def test_the_quickstart_is_planned_without_a_gpu(program: Program, tmp_path: Path) -> None:
    env = Machine(cards=(), broken=NOT_LOADED).environment(tmp_path / "nvml") | {"SFT_PLAY_CACHE": str(tmp_path)}
    done = program("plan", "CONFIG=configs/quickstart.yaml", env=env)
    assert done.code == 0, done.err
    for part in (
        "plan: single on ",
        "accumulation 2 = 8 global / (4 per process x 1 process)",
        "tokens/s (a guess: ",
        "activations",
        "free",
        "to run it: make train CONFIG=configs/quickstart.yaml",
    ):
        assert part in done.out
    assert not (tmp_path / "runs").exists()


def test_a_plan_without_network_needs_a_known_name_or_a_config_json(
    in_process: Program, tiny_config: Path, tiny: Path, tmp_path: Path
) -> None:
    words = ("plan", f"CONFIG={tiny_config}", "HARDWARE=RTX4090", "WHY=0")
    hint = "no more than a folder with its `config.json`, or for these nothing: "
    env = {"HF_HUB_OFFLINE": "1"}
    refused = in_process(*words, "MODEL_NAME=nobody/nothing", env=env)
    refused.refused(4, "nobody/nothing: no such folder, and the hub cannot be reached", hint)
    assert "Qwen/Qwen2.5-7B-Instruct" in refused.err.partition(hint)[2]
    merged = tmp_path / "runs" / "mine" / "merged"
    merged.mkdir(parents=True)
    in_process(*words, "MODEL_NAME=mine/merged", env=env).refused(
        4, f"hint: did you mean `{merged}`? check the network"
    )
    (tmp_path / "bare").mkdir()
    shutil.copy(tiny / "config.json", tmp_path / "bare")
    done = in_process(*words, f"MODEL_NAME={tmp_path / 'bare'}", env=env)
    assert done.code == 0 and "plan: single on RTX4090" in done.out, done.err


def test_json_output_is_that_of_plan_json(in_process: Program, tiny_config: Path) -> None:
    value = in_process(
        "plan", f"CONFIG={tiny_config}", "HARDWARE=2xH100", "NUM_NODES=2", "JSON=1", "TRAIN_GLOBAL_BATCH_SIZE=64"
    ).json
    assert value.keys() >= KEYS and value["ranks"][0]["memory_bytes"].keys() >= PARTS
    assert value["world_size"] == len(value["ranks"]) == 4 and value["global_batch_size"] == 64
    assert Plan.from_json(value).num_nodes == 2
    assert value["ranks"][3]["device"] == "cuda:1"


@pytest.mark.quiet
def test_a_plan_is_made_faster_than_torch_is_imported(program: Program) -> None:
    words = ("plan", "CONFIG=configs/quickstart.yaml", "HARDWARE=2x24GB")
    assert seconds_of(lambda: program(*words))[0] < importing("torch")


def test_a_plan_uses_the_detected_cards(program: Program, tmp_path: Path) -> None:
    env = Machine(cards=(Gpu("NVIDIA H200", 139.8, 138.0, (9, 0)),) * 2).environment(tmp_path / "nvml")
    plan = program("plan", "CONFIG=configs/run_bnb.yaml", "JSON=1", env=env).json
    assert plan["world_size"] == 2 and plan["strategy"] == "ddp" and plan["ranks"][0]["device_name"] == "NVIDIA H200"


def test_typed_files_decide_the_plan(in_process: Program, tiny_config: Path, tmp_path: Path) -> None:
    """DeepSpeed and accelerate files decide as they would in training."""
    own = tmp_path / "own.json"
    own.write_text('{"zero_optimization": {"stage": 1}} // mine\n', encoding="utf-8")
    assert (
        in_process("plan", f"CONFIG={tiny_config}", "HARDWARE=2xH100", f"DEEPSPEED_CONFIG={own}", "JSON=1").json[
            "strategy"
        ]
        == "zero1"
    )
    ours = in_process(
        "plan", f"CONFIG={tiny_config}", "HARDWARE=cpu", "ACCELERATE_CONFIG=accelerate_configs/cpu_fsdp2.yaml", "JSON=1"
    )
    assert ours.json["strategy"] == "fsdp2" and ours.json["world_size"] == 2, ours.err
    shown = in_process("plan", f"CONFIG={tiny_config}", "HARDWARE=cpu", "NUM_GPUS=2", "TRAIN_SEED=7").out
    assert f"to run it: make train-distributed CONFIG={tiny_config} NUM_GPUS=2 TRAIN_SEED=7" in shown


def test_data_that_are_not_here_are_named(in_process: Program, tiny_config: Path) -> None:
    words = (f"CONFIG={tiny_config}", "HARDWARE=cpu", "SOURCE=formula")
    absent = in_process("plan", *words, "DATA_TRAIN_PATH=hotels.jsonl")
    assert absent.code == 0 and "warning: the data `hotels.jsonl` are not on this machine" in absent.err
    near = f"{tiny_config.parent}/{tiny_config.stem[1:]}.yaml"
    assert f"did you mean `{tiny_config}`?" in in_process("plan", *words, f"DATA_TRAIN_PATH={near}").err
    job = in_process("slurm", f"CONFIG={tiny_config}", "HARDWARE=1xH100", "SUBMIT=1", f"DATA_TRAIN_PATH={near}")
    job.refused(4, "not submitted", f"did you mean `{tiny_config}`?")
    for here in (tiny_config, "builtin:docstrings", "someone/hub-dataset", f"{tiny_config.parent}/*.yaml"):
        assert "not on this machine" not in in_process("plan", *words, f"DATA_TRAIN_PATH={here}").err


def test_a_job_that_does_not_fit_this_machine_may_fit_the_cluster(in_process: Program, tiny_config: Path) -> None:
    words = (
        f"CONFIG={tiny_config}",
        "MODEL_NAME=meta-llama/Llama-3.1-70B-Instruct",
        "TUNING_MODE=full",
        "SOURCE=formula",
    )
    for command in ("slurm", "kubernetes"):
        done = in_process(command, *words[:3])
        done.refused(3, "HARDWARE=4xH100 describes the cluster's")
        assert "make train" not in done.out  # what can be typed in addition, not another command
    assert "the cluster's" not in in_process("plan", *words).err


def test_a_run_is_planned_as_it_was_launched(in_process: Program, tiny_config: Path, tmp_path: Path) -> None:
    """`RUN` is planned as it was launched, with its prepared rows."""
    own = Override(key="launch.strategy", text="zero1", origin="LAUNCH_STRATEGY=zero1")
    first = in_process("plan", f"CONFIG={tiny_config}", "HARDWARE=cpu", "NUM_GPUS=2", own.origin, "JSON=1")
    run = tmp_path / "runs" / "before"
    run.mkdir(parents=True)
    (run / "plan.json").write_text(first.out, encoding="utf-8")
    save_config(load_config(tiny_config, [own]), run / "config.json")
    launch = {"command": "auto", "num_gpus": 2, "num_nodes": 1, "deepspeed": None, "fsdp": {}}
    record_event(RunFolder(run), "started", launch=launch)
    prepared_rows(320, longest=40, each=30).save(run / "prepared.json")
    again = in_process("plan", "RUN=before", "HARDWARE=cpu", "JSON=1").json
    assert again["strategy"] == "zero1" and again["steps"] == 30
    assert in_process("plan", "RUN=nothing").code == 5


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (
            ["HARDWARE=2xV100"],
            3,
            ["HARDWARE=2xV100: `V100` has compute capability 7.0, and torch for CUDA 13"],
        ),
        (["HARDWARE=4x P100"], 3, ["torch has no code for `4x P100` any more", "from GeForce RTX 20 and T4 on"]),
        (["HARDWARE=GTX 1080 Ti"], 3, ["torch has no code for `GTX 1080 Ti` any more"]),
        (["HARDWARE=2xH110"], 3, ["HARDWARE=2xH110", "did you mean `H100`?", "a name of docs/hardware.md, such as "]),
        (
            ["HARDWARE=8GB", "TUNING_MODE=full", "MODEL_NAME=Qwen/Qwen2.5-7B-Instruct"],
            3,
            ["not even one row", "TUNING_MODE=qlora"],
        ),
        (
            ["HARDWARE=2xH100", "TUNING_MODE=qlora", "TUNING_QUANTIZATION=int8", "LAUNCH_STRATEGY=zero3"],
            2,
            ["int8 and ZeRO-3"],
        ),
        (
            [
                "HARDWARE=RTX4090+64GB-RAM",
                "TUNING_MODE=full",
                "MODEL_NAME=meta-llama/Llama-3.1-8B-Instruct",
                "DEEPSPEED_CONFIG=deepspeed/zero3_offload.json",
            ],
            3,
            ["offloading needs", "of this machine's memory", "and it has 64.0 GiB", "TUNING_MODE=lora"],
        ),
        (
            [
                "HARDWARE=2xRTX4090@10Gbit",
                "TUNING_MODE=full",
                "MODEL_NAME=Qwen/Qwen2.5-14B-Instruct",
                "LAUNCH_STRATEGY=zero3",
            ],
            3,
            ["  TUNING_MODE=qlora LAUNCH_SLOW_NETWORK=allow: "],
        ),
        (
            ["HARDWARE=RTX3060+RTX3070@10Gbit", "MODEL_NAME=google/gemma-3-27b-it", "LAUNCH_STRATEGY=pipeline"],
            3,
            ["rank 1 (RTX3070) needs ", "nor would they fit so"],
        ),
        (["MODEL_NAME=~no-user/model"], 4, ["there is no such model folder"]),
        (["MODEL_NAME=nobody/never-was"], 4, ["nobody/never-was: no such folder", "or HF_HOME"]),
    ],
)
def test_invalid_calls_of_plan_are_refused(
    in_process: Program, tmp_path: Path, words: list[str], code: int, parts: list[str]
) -> None:
    done = in_process("plan", "CONFIG=configs/quickstart.yaml", *words)
    assert done.code == code and done.err.startswith("error: "), done.out + done.err
    assert not done.out or done.out.startswith("needs ")  # what does not fit is shown part by part
    assert all(part in done.out + done.err for part in parts), done.err
    assert not (tmp_path / "runs").exists()


def test_what_makes_an_unknown_cost_known_can_be_typed(in_process: Program) -> None:
    words = ("plan", "CONFIG=run_bnb", "HARDWARE=RTX4090", "PRICE_PER_HOUR=1")
    shown = in_process(*words).out
    ways = "TRAIN_MAX_STEPS = rows x epochs / 32, or `make data CONFIG=run_bnb`"
    assert f"cost: unknown, since the number of steps is ({ways})\n" in shown
    assert f"steps    known when the data are prepared ({ways})\n" in shown
    costs = in_process(*words, "TRAIN_MAX_STEPS=9", "WHY=0").out
    assert "costs " in costs and "if every row had 2,048 tokens; `make data CONFIG=run_bnb" in costs


@pytest.mark.parametrize(
    ("words", "way"),
    [
        ("rtx4090_sli HARDWARE=2xRTX4090", "LAUNCH_STRATEGY=pipeline"),
        ("run_bnb HARDWARE=8xH100 MODEL_NAME=meta-llama/Llama-3.1-70B-Instruct", "LAUNCH_SEQUENCE_PARALLEL=2"),
    ],
)
def test_a_way_to_share_the_work_that_is_clearly_faster_is_named(in_process: Program, words: str, way: str) -> None:
    call = ["plan", *f"CONFIG={words} WHY=0".split()]
    note, now = re.search(r"FASTER with (.*) s a step instead of ([\d.]+) s\n", in_process(*call).out).groups()
    assert note.startswith(f"{way}: ")
    typed = in_process(*call, way).out
    seconds = note.split(": ")[1]
    assert f", {seconds} s a step" in typed and float(now) > 1.1 * float(seconds) and "FASTER" not in typed


@pytest.mark.parametrize(
    ("strategy", "dtype", "reason"),
    [
        ("fsdp2", "bfloat16", "in float32: fsdp2 updates them in it, and .*, whatever `model.dtype` says .bfloat16."),
        ("zero3", "float32", "in bfloat16: DeepSpeed .* an fp32 copy .*, whatever `model.dtype` says .float32."),
        ("ddp", "bfloat16", "in bfloat16: as configured, without an fp32 copy, .*"),
    ],
)
def test_the_type_of_the_weights_is_the_one_that_the_engine_holds(
    in_process: Program, strategy: str, dtype: str, reason: str
) -> None:
    words = ("CONFIG=run_bnb", "HARDWARE=8xH100", "TUNING_MODE=full", f"LAUNCH_STRATEGY={strategy}")
    assert re.search(f"weights {reason}\n", in_process("plan", *words, f"MODEL_DTYPE={dtype}").out)


def test_a_remedy_is_printed_once_and_can_be_typed(in_process: Program) -> None:
    words = ("plan", "CONFIG=configs/run_bnb.yaml", "HARDWARE=24GB", "TUNING_MODE=full")
    done = in_process(*words)
    assert done.code == 3 and (done.out + done.err).count("TUNING_MODE=lora: ") == 1
    assert "make train" not in done.out, "such a command would train on this machine"
    assert "\n  DEEPSPEED_CONFIG=deepspeed/zero3_offload.json: " in done.out
    assert in_process(*words, "DEEPSPEED_CONFIG=deepspeed/zero3_offload.json").code == 0
    assert max(map(len, (done.out + done.err).splitlines())) <= 180


def test_listed_cards_are_in_one_machine_each(in_process: Program) -> None:
    plan = ("plan", "CONFIG=run_bnb", "HARDWARE=4090+3060@1Gbit")
    in_process(*plan, "NUM_NODES=3").refused(3, "lists 2 cards", "NUM_NODES is 3", "LAUNCH_NETWORK=")
    shown = in_process(*plan, "NUM_NODES=2", "PRICE_PER_HOUR=1", "TRAIN_MAX_STEPS=100", "WHY=0").out
    assert "on RTX4090 + RTX3060" in shown and re.search(r"costs [\d.]+ at PRICE_PER_HOUR", shown)
    in_process(*plan, "NUM_NODES=1").refused(3, "lists 2 cards", "NUM_NODES=2")
    in_process("slurm", *plan[1:]).refused(3, "lists 2 cards", "NUM_NODES=2")
    in_process("plan", "CONFIG=run_bnb", "HARDWARE=2x2x4090@1Gbit", "NUM_NODES=3").refused(3, "describes 2 machines")
    words = ("HARDWARE=4090+3060", "LAUNCH_NETWORK=1Gbit", "NUM_NODES=3")
    assert "on 3 x RTX4090 + 3 x RTX3060" in in_process("plan", "CONFIG=run_bnb", *words).out


def test_cards_on_a_network_are_machines_unless_their_number_is_given(in_process: Program) -> None:
    words = ("CONFIG=run_bnb", "TRAIN_MAX_STEPS=1000", "PRICE_PER_HOUR=24", "JSON=1")
    machine = in_process("plan", *words, "HARDWARE=8xH100").json
    typed = in_process("plan", *words, "HARDWARE=8xH100@400Gbit", "NUM_NODES=1").json
    eight = in_process("plan", *words, "HARDWARE=8xH100@400Gbit").json
    assert typed["cost"] == machine["cost"] and eight["cost"] > 7 * machine["cost"]
    assert any("in a separate machine; NUM_NODES=1" in notice for notice in eight["notices"])
    assert in_process("slurm", *words, "HARDWARE=8xH100@1Gbit").json["plan"]["cost"] == machine["cost"]


def test_stages_are_divided_by_the_memory_of_the_head_that_trains(in_process: Program) -> None:
    """A head in chunks needs little memory at long rows, so equal cards get like stages."""
    for cards, length in (("2xRTX4080", 8192), ("2xRTX4080", 4096), ("3xRTX4070Laptop", 8192)):
        words = (f"HARDWARE={cards}@1Gbit", f"MODEL_MAX_SEQ_LEN={length}", "LAUNCH_STRATEGY=pipeline", "JSON=1")
        plan = in_process("plan", "CONFIG=run_bnb", *words).json
        assert sum(plan["stages"]) == 28 and max(plan["stages"]) <= 15, plan["stages"]


def test_cards_on_pcie_are_not_planned_as_if_they_had_nvlink(in_process: Program) -> None:
    words = ("CONFIG=run_bnb", "TUNING_MODE=full", "LAUNCH_STRATEGY=fsdp2", "JSON=1")
    linked, on_pcie = (in_process("plan", *words, f"HARDWARE=8x{card}").json for card in ("H100", "H100PCIe"))
    assert on_pcie["communication_seconds"] > 10 * linked["communication_seconds"]


def test_a_job_gets_the_memory_that_its_plan_offloads(in_process: Program) -> None:
    words = ("CONFIG=run_bnb", "TUNING_MODE=full", "HARDWARE=8xH100", "DEEPSPEED_CONFIG=deepspeed/zero3_offload.json")
    done = in_process("slurm", *words, "SLURM_MEMORY=100G")
    assert done.code == 0 and "of a node's memory, and slurm.memory is 100G" in done.err, done.err
    assert "of a node's memory" not in in_process("slurm", *words, "SLURM_MEMORY=1T").err
    in_process("slurm", *words, "SLURM_MEMORY=100").refused(2, "a number with `K`, `M`, `G` or `T`")


def test_a_pipeline_shows_layers_and_the_rows_that_every_stage_sees(in_process: Program) -> None:
    words = ["NUM_NODES=3", "HARDWARE=RTX4090+RTX3060+RTX3070@1Gbit", "LAUNCH_STRATEGY=pipeline"]
    shown = in_process("plan", "CONFIG=configs/home_lan.yaml", *words).out
    assert re.search(r"plan: pipeline of 3 stages \(\d+, \d+, \d+ layers\) on RTX4090 \+ RTX3060 \+ RTX3070", shown)
    plan = in_process("plan", "CONFIG=configs/home_lan.yaml", *words, "JSON=1").json
    assert plan["longest_row"] >= plan["row_tokens"] and plan["most_rows"] >= plan["ranks"][0]["micro_batch"]
    assert "are the most in a micro-batch" in shown and "4 micro-batches or more per stage keep all busy" in shown
    assert re.findall(r"^ +\d  RTX\d+ +\d+ +\d+ +(\d+)", shown, re.MULTILINE) == ["24"] * 3, shown
    assert max(map(len, shown.splitlines())) <= 160


@pytest.mark.parametrize(("command", "words"), [("plan", ()), ("train-deepspeed", ("NUM_GPUS=2", "RUN_NAME=never"))])
def test_all_faults_of_a_deepspeed_json_are_reported_before_anything_starts(
    command: str, words: tuple[str, ...], in_process: Program, tiny_config: Path, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text("""{ "train_batchsize": 64, "zero_optimization": { "stage": 2 },
  "optimizer": { "type": "AdamW", "params": { "lr": 0.1 } },
  "scheduler": { "type": "OneCycle" },
  "gradient_clipping": 0.5,
  "train_micro_batch_size_per_gpu": 4,
  "train_batch_size": 24 }""")
    typed = ("TRAIN_BATCH_SIZE=2", "TRAIN_GLOBAL_BATCH_SIZE=16")
    done = in_process(command, f"CONFIG={tiny_config}", f"DEEPSPEED_CONFIG={path}", *typed, *words)
    assert done.code == 2 and done.err.count("error: ") == 6, done.err
    keys = (
        "train_batchsize",
        "optimizer.params.lr",
        "scheduler.type",
        "gradient_clipping",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
    )
    for line, key in enumerate(keys, 1):
        assert re.search(rf"ds\.json:{line}: .*{re.escape(key)}", done.err), done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("variable", "hub"), [("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")])
def test_a_hub_cache_is_found_without_the_hub(
    variable: str, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    for other in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    folder = tmp_path / hub / "models--some--model"
    shutil.copytree(tiny, folder / "snapshots" / "abc123")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc123")
    assert shape_of(ModelConfig(name="some/model")) == shape_of(ModelConfig(name=str(tiny)))


def test_alike_stages_of_a_pipeline_are_shown_once(in_process: Program) -> None:
    words = ("CONFIG=h100_pair", "HARDWARE=16xH100", "LAUNCH_STRATEGY=pipeline", "WHY=0")
    shown = in_process("plan", *words).out
    blocks = re.findall(r"^  ranks? ([^:]+): H100, micro-batch \d+, (at most )?[\d.]+ GiB of", shown, re.MULTILINE)
    assert 3 <= len(blocks) <= 5 and blocks[0] == ("0", "") and blocks[-1] == ("15", ""), shown


def test_operations_of_a_token_are_counted_alike_whatever_shares_it(in_process: Program) -> None:
    typed = ("CONFIG=run_bnb", "TUNING_MODE=lora", "HARDWARE=4xH100", "TRAIN_GRADIENT_CHECKPOINTING=false")

    def operations(words: str) -> float:
        shown = in_process("plan", *typed, words).out
        return float(re.findall(r"a guess: ([\d.]+) GFLOP a token", shown)[0])

    whole = operations("LAUNCH_STRATEGY=ddp")
    assert operations("LAUNCH_SEQUENCE_PARALLEL=4") == operations("LAUNCH_STRATEGY=pipeline") == whole
    assert whole <= operations("LAUNCH_TENSOR_PARALLEL=4") < 1.5 * whole, "each card computes the embeddings"


def test_an_assumed_network_is_named_with_the_key_that_states_it(in_process: Program) -> None:
    words = (
        "CONFIG=run_bnb",
        "TUNING_MODE=lora",
        "HARDWARE=8xH100",
        "NUM_NODES=2",
        "MODEL_NAME=meta-llama/Llama-3.1-70B-Instruct",
    )
    shown = in_process("plan", *words).out
    assert "plan: tensor parallel 4" in shown and "if it is 1 Gbit/s (LAUNCH_NETWORK= states it)" in shown
    assert "plan: fsdp2 on 16 x H100" in in_process("plan", *words, "LAUNCH_NETWORK=400Gbit").out
