"""Bad configuration, as a user types it: exit code 2, one clear message, no traceback, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_play.config.load import load_config, save_config
from sft_play.config.names import MEANT
from sft_play.config.yaml_files import parse_yaml
from sft_play.errors import UserError
from tests.conftest import Program

GOOD = "model: {name: some/model}\ndata: {train_path: rows.jsonl}\n"
TWO = "model: {name: some/model}\ndata:\n  sources: [{path: a.jsonl, "
NAMED = TWO + "name: chat}, {path: docs}]\n  validation: 0.1\n"
WER = ("TRAIN_METRIC_FOR_BEST_MODEL=wer", "TRAIN_PREDICT_WITH_GENERATE=true")
CASES = {
    "missing file": (None, [], "there is no file `"),
    "YAML syntax": ("model: {name: x\ntrain: 1\n", [], "x.yaml:2:6: not YAML"),
    "unknown key": (GOOD + "train:\n  learning_rat: 1\n", [], "x.yaml:4: unknown key `train.learning_rat`"),
    "key of another tool": (GOOD + "lora_r: 8\n", [], "did you mean `tuning.lora.r: 8`?"),
    "datasets": (GOOD + "datasets: [{path: rows.jsonl}]\n", [], "did you mean `data.sources`?"),
    "a file as a section": (
        "model: {name: some/model}\ndata: rows.jsonl\n", [], "`data` is `rows.jsonl`; expected a mapping of its keys"
    ),
    "unknown variable": (GOOD, ["TRAIN_LEARNIG_RATE=1"], "did you mean `TRAIN_LEARNING_RATE=...`?"),
    "short of an option": (GOOD, ["NUM_GPU=2"], "did you mean `NUM_GPUS=...` (processes on this machine)?"),
    "wrong type": (
        GOOD + "train:\n  batch_size: two\n", [],
        "x.yaml:4: `train.batch_size` is `two`; expected an integer >= 1 or `auto`"
    ),
    "no GPUs": (GOOD, ["NUM_GPUS=0"], "`NUM_GPUS` is `0`; expected an integer >= 1"),
    "decided elsewhere": (GOOD, ["TRAIN_OUTPUT_DIR=out"], "use `RUN_NAME`"),
    "no model": ("data: {train_path: rows.jsonl}\n", [], "`model.name` is missing"),
    "early stopping": (
        GOOD + "train: {eval_strategy: 'no', early_stopping_patience: 3}\n", [],
        "while training: `train.eval_strategy` is `no`"
    ),
    "contradiction": (GOOD, ["TRAIN_FP16=true", "TRAIN_BF16=true"], "are both `true`"),
    "pipeline": (GOOD + "launch: {pipeline: 2}\n", [], "`train-distributed LAUNCH_STRATEGY=pipeline`"),
    "deepspeed": (
        GOOD + "launch: {strategy: deepspeed}\n", [],
        "`LAUNCH_STRATEGY=zero2` (or `zero1`, `zero3`), or the command says so: `train-deepspeed`",
    ),
    "a filter that is empty": (TWO + "filter: ''}]\n", [], "`data.sources[0].filter` is empty"),
    "a revision that is empty": (TWO + "revision: ' '}]\n", [], "`data.sources[0].revision` is empty"),
    "a section by another name": (GOOD + "training: {epochs: 3}\n", [], "did you mean `train`?"),
    "another section": (GOOD + "eval: {strategy: steps}\n", [], "did you mean `train.eval_strategy: steps`?"),
    "nearly a tracker": (
        GOOD + "train: {report_to: wandbb}\n", [],
        "names `wandbb`, which is not a tracker\n\nhint: did you mean `wandb`?"
    ),
    "quoted": (GOOD + "train: {epochs: '2'}\n", [], "write the number without quotes"),
    "nearly a preset": ("extends: quikstart\n", [], "did you mean `quickstart`?"),
    "no parent": ("extends: sub/nothing.yaml\n", [], "neither a preset nor a file"),
    "a neighbour": ("extends: x\n", [], "did you mean `x.yaml`, the file next to this one?"),
    "a template of another tool": (
        GOOD, ["DATA_CHAT_TEMPLATE=qwen"],
        "`data.chat_template` is `qwen`, which is neither a template's name nor a file\n\nhint: did you mean `qwen3`?",
    ),
    "a circle": ("extends: x.yaml\n", [], "forms a cycle"),
    "empty": (GOOD, ["TRAIN_EPOCHS="], "TRAIN_EPOCHS=: `train.epochs` is empty; expected a number > 0"),
    "large": (GOOD, ["TRAIN_MAX_STEPS=99999999999999999999"], "-1 or an integer >= 1"),
    "a short name": (GOOD, ["TRAIN_OPTIM=adamw"], "did you mean `adamw_torch`?"),
    "key of a source": (GOOD, ["DATA_SOURCES=[{path: a, formt: b}]"], "did you mean `format`?"),
    "half a letter": (
        GOOD + 'train: {run_name: "a\\ud800"}\n', [],
        "x.yaml:3: `train.run_name` contains a character that no file can contain"
    ),
    "a long path": (GOOD, ["DATA_TRAIN_PATH=" + "a" * 300], "longer than a file's name or path may be"),
    "no module": (GOOD, ["TUNING_LORA_TARGET_MODULES=[]"], "names no module"),
    "negative share": (
        TWO + "weight: -1}, {path: b, weight: 1}]\n", [],
        "x.yaml:3: `data.sources[0].weight` is -1; a share cannot be negative"
    ),
    "half of the shares": (TWO + "weight: 3}, {path: b}]\n", [], "`data.sources[1]` has no `weight`"),
    "one name twice": (TWO + "name: x}, {path: b, name: x}]\n", [], "two sources with the name `x`"),
    "mixed validation": (TWO + "}]\n  validation: [{path: b.jsonl, weight: 1}]\n", [], "validation is not mixed"),
    "half a filter": (TWO + "filter: 'lang =='}]\n", [], "`data.sources[0].filter` cannot be used: invalid syntax"),
    "nearly a metric": (
        GOOD, ["EVAL_METRICS=[rougeL, blue]"],
        "`eval.metrics[1]` is `blue`, which is not a metric\n\nhint: did you mean `bleu`?"
    ),
    "no metric": (GOOD, ["EVAL_METRICS=[happiness]"], ", or evaluate:NAME for one of"),
    "a metric twice": (GOOD, ["EVAL_METRICS=[f1, 'evaluate:my/f1']"], "2 entries that are called `f1`"),
    "no list": (
        GOOD, ["EVAL_METRICS=rougeL,bleu"], "is `rougeL,bleu`; expected a list such as `[a, b]`"
    ),
    "nearly a source": (NAMED, ["TRAIN_METRIC_FOR_BEST_MODEL=loss/chats"], "did you mean `eval_loss/chat`?"),
    "best by answers": (NAMED, ["TRAIN_METRIC_FOR_BEST_MODEL=rougeL"], "set `train.predict_with_generate: true`"),
    "best of unknown": (NAMED + "eval: {metrics: ['evaluate:wer']}\n", WER, "set `train.greater_is_better: true`"),
    "never evaluated": (
        NAMED, ["TRAIN_METRIC_FOR_BEST_MODEL=perplexity", "TRAIN_EVAL_STRATEGY=no"], "`train.eval_strategy` is `no`"
    ),
    "outer steps without local ones": (GOOD, ["LAUNCH_OUTER_MOMENTUM=0.9"], "but `launch.local_steps` is 1"),
    "local steps of shards": (GOOD + "launch: {strategy: zero3, local_steps: 2}\n", [], "`launch.local_steps` is 2"),
    "fp16 in local steps": (
        GOOD + "launch: {local_steps: 2}\n", ["TRAIN_FP16=true"], "with `train.fp16` each rank would skip other steps"
    ),
    "offload without recomputation": (
        GOOD + "train:\n  activation_offload: true\n  gradient_checkpointing: false\n",
        [],
        "x.yaml:4: `train.activation_offload` is `on`, which needs recomputation, but `train.gradient_checkpointing` "
        "is",
    ),
    "DFT of smoothed targets": (
        GOOD + "train:\n  loss: dft\n  label_smoothing_factor: 0.1\n",
        [],
        "x.yaml:5: `train.label_smoothing_factor` is 0.1, which goes with `train.loss: nll`, and that is `dft`",
    ),
    "a pattern that does not compile": (
        GOOD, ['TUNING_LORA_RANK_PATTERN={"(": 8}'], "`tuning.lora.rank_pattern` has `(`: missing )"
    ),
    "adapters' shape under full tuning": (
        GOOD, ["TUNING_MODE=full", "TUNING_LORA_VARIANT=dora"],
        "TUNING_LORA_VARIANT=dora: `tuning.lora.variant` has no effect with `tuning.mode: full`",
    ),
    "quantisation without adapters over it": (
        GOOD + "tuning:\n  quantization: int8\n", [],
        "x.yaml:4: `tuning.quantization` has no effect with `tuning.mode: lora`\n\nhint: TUNING_MODE=qlora",
    ),
    "another tool's checkpoint": (GOOD + "resume_from_checkpoint: x\n", [], "`model.adapter: RUN` starts another"),
    "another tool's adapter": (GOOD + "train:\n  adapter: x\n", [], "`MODEL_ADAPTER=RUN` trains on from"),
    "a number in thousands": (GOOD, ["TRAIN_MAX_STEPS=2k"], "-1 or an integer >= 1\n\nhint: write 2000"),
    "a number with separators": (GOOD + "train: {max_steps: 1_500}\n", [], "hint: write 1500"),
    "an integer with an exponent": (GOOD, ["TRAIN_SAVE_STEPS=2e3"], "hint: write 2000"),
    "a share in percent": (GOOD + "train: {warmup_ratio: 15%}\n", [], ">= 0 and <= 1\n\nhint: write 0.15"),
    "a percentage of rows": (GOOD, ["DATA_VALIDATION=10%"], "hint: write 0.1"),
    "a time in minutes": (GOOD, ["LAUNCH_TIMEOUT_SECONDS=30min"], "hint: write 1800"),
    "bytes in gigabytes": (GOOD, ["SLURM_MEMORY=200GiB"], "such as `200G`\n\nhint: write `200G`"),
    "bytes of a pod": (GOOD, ["KUBERNETES_MEMORY=64GiB"], "hint: write `64Gi`"),
    "a speed of others": (GOOD, ["LAUNCH_NETWORK=10Gbps"], "expected a speed such as `1Gbit`\n\nhint: write `10Gbit`"),
    "another tool's plots": (GOOD + "plot_loss: true\n", [], "omit it: `report.html` of each run"),
    "another tool's overwriting": (GOOD + "train: {overwrite_output_dir: true}\n", [], "omit it: each run has a new"),
    "another tool's folder of data": (GOOD + "dataset_dir: data\n", [], "paths of `data.sources` count from"),
    "another tool's name of a format": (TWO + "format: alpaca}]\n", [], "`format: instruction` is that, and `auto`"),
    "another tool's share": (TWO + "share: 1}]\n", [], "did you mean `weight`?"),
    "another language's filter": (
        TWO + "filter: 'lang = \"en\"'}]\n", [], '`= "en"`: `lang = "en"`\n\nhint: write `==` for `=`; conditions'
    ),
    "another tool's DFT": (GOOD + "train:\n  use_dft: true\n", [], "did you mean `train.loss`?"),
    "another tool's limit of rows": (GOOD + "max_samples: 9\n", [], "`rows` of an entry of `data.sources` limits"),
    "a tracker's project": (GOOD + "train: {project: x}\n", [], "such as `export WANDB_PROJECT=...`"),
    "an effect of no toleration": (
        GOOD + "kubernetes: {tolerations: [{key: gpu, effect: NoScedule}]}\n", [], "NoScedule}`, which is not valid"
    ),
    "another tool's new tokens": (GOOD + "resize_vocab: true\n", [], "did you mean `data.new_tokens`?"),
    "another tool's special tokens": (
        GOOD + "special_tokens: {pad_token: x}\n", [], "omit it: a tokenizer brings its own"
    ),
    "another tool's class": (GOOD + "model_type: LlamaForCausalLM\n", [], "omit it: the files of the model say it"),
    "another tool's tokenizer": (GOOD + "tokenizer_type: AutoTokenizer\n", [], "omit it: the files of the model say"),
    "another tool's padding": (GOOD + "pad_to_sequence_len: true\n", [], "omit it: the plan chooses between padded"),
    "another tool's datasets": (GOOD + "dataset: one,two\n", [], "and `data.sources` several"),
    "another tool's format": (
        GOOD, ["DATA_SOURCES=[{path: a, type: chat_template}]"],
        "`data.sources[0].type` is not a known key\n\nhint: `format: messages` is that, and `auto` finds it"
    ),
    "another tool's columns": (
        GOOD, ["DATA_SOURCES=[{path: a, field_messages: m}]"], "did you mean `columns: {messages: m}`?"
    ),
    "short of a key": (GOOD, ["TRAIN_BATCH=2"], "did you mean `TRAIN_BATCH_SIZE=...`?"),
    "Muon for adapters": (
        GOOD + "train:\n  optim: muon\n", [], "x.yaml:4: `train.optim` is `muon`, which trains a layer's matrices"
    ),
    "an optimizer per micro-batch": (
        GOOD + "train:\n  optim: lomo\n", [], "x.yaml:4: `train.optim` is `lomo`, which updates weights"
    ),
    "elastic pods": (
        GOOD + "kubernetes: {elasticPolicy: {minReplicas: 1}}\n", [], "`kubernetes.max_restarts` starts them again"
    ),
    "unsaved states": (GOOD, ["TRAIN_OPTIM=galore_adamw"], "whose states no checkpoint here can contain"),
    "arguments of another": (
        GOOD, ["TRAIN_OPTIM=sgd", "TRAIN_OPTIM_ARGS=momentum=0.9,beta=1"], "has `beta`, which `sgd` does not take"
    ),
    "arguments of AdamW": (
        GOOD, ["TRAIN_OPTIM_ARGS=foo=3"], "has `foo`, which AdamW (`auto`) does not take"
    ),
    "DoRA as PEFT spells it": (GOOD, ["TUNING_LORA_USE_DORA=true"], "did you mean `TUNING_LORA_VARIANT=dora`?"),
    "a warm-up longer than the run": (
        GOOD, ["TRAIN_MAX_STEPS=3", "TRAIN_WARMUP_STEPS=5"], "hint: TRAIN_WARMUP_STEPS=1, or omit it"
    ),
    "arguments that exclude each other": (
        GOOD, ["TRAIN_OPTIM=sgd", "TRAIN_OPTIM_ARGS=nesterov=true"], "which needs a momentum, and no dampening"
    ),
    "a rate without its sign": (GOOD, ["TRAIN_LEARNING_RATE=2e4"], "`2e4`; expected a number >= 0 and <= 10"),
    "an argument below 0": (
        GOOD, ["TRAIN_OPTIM=rmsprop", "TRAIN_OPTIM_ARGS=alpha=-1"], "is `-1`; expected a number >= 0"
    ),
    "no argument": (GOOD, ["TRAIN_OPTIM=sgd", "TRAIN_OPTIM_ARGS=momentum"], "which is not `name=value`"),
    "a word for a number": (
        GOOD, ["TRAIN_OPTIM=sgd", "TRAIN_OPTIM_ARGS=momentum=much"], "is `much`; expected a number"
    ),
    "betas of SGD": (
        GOOD, ["TRAIN_OPTIM=sgd", "TRAIN_ADAM_BETA1=0.8"], "`train.adam_beta1` is given, but `sgd` does not take it"
    ),
    "no floor": (
        GOOD + "train:\n  lr_scheduler_type: cosine_with_min_lr\n", [],
        "x.yaml:4: `train.lr_scheduler_type` is `cosine_with"
    ),
    "two floors": (
        GOOD + "train:\n  lr_scheduler_type: cosine_warmup_with_min_lr\n"
               "  lr_scheduler_kwargs: {min_lr: 1.0e-5, min_lr_rate: 0.1}\n",
        [],
        "has both `min_lr` and `min_lr_rate`",
    ),
    "no decay": (GOOD, ["TRAIN_LR_SCHEDULER_TYPE=warmup_stable_decay"], "has no `num_decay_steps`"),
    "another's setting": (
        GOOD + "train:\n  lr_scheduler_kwargs: {num_cycle: 2}\n", [],
        "x.yaml:4: `train.lr_scheduler_kwargs` has `num_cycle`, which the",
    ),
    "a setting's type": (
        GOOD, ["TRAIN_LR_SCHEDULER_KWARGS={num_cycles: many}"],
        "`train.lr_scheduler_kwargs.num_cycles` is `many`; expected"
    ),
    "nothing to follow": (
        GOOD, ["TRAIN_LR_SCHEDULER_TYPE=reduce_lr_on_plateau"], "which follows evaluations, but nothing is evaluated"
    ),
    "no warm-up": (
        GOOD, ["TRAIN_LR_SCHEDULER_TYPE=constant", "TRAIN_WARMUP_STEPS=5"], "the schedule `constant` has no warm-up"
    ),
    "never saved": (
        NAMED, ["TRAIN_LOAD_BEST_MODEL_AT_END=true", "TRAIN_SAVE_STRATEGY=no"], "`train.save_strategy` is `no`"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_configuration_is_one_message_and_leaves_nothing(name: str, in_process: Program, tmp_path: Path) -> None:
    text, words, expected = CASES[name]
    file = tmp_path / "x.yaml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    done = in_process("train", f"CONFIG={file}", *words)
    done.refused(2, expected)
    assert done.err.count("error: ") == 1 and done.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_that_is_too_long_is_refused_wherever_it_is_typed(in_process: Program, tmp_path: Path) -> None:
    long, file = "a" * 300, tmp_path / "x.yaml"
    file.write_text(f"extends: {long}\n", encoding="utf-8")
    for words in ([f"CONFIG={long}"], [f"CONFIG={file}"]):
        in_process("train", *words).refused(2, "is longer than a file's name or path may be")


def test_all_problems_of_a_file_are_reported_at_once(in_process: Program, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("model: {name: 1, max_seq_len: x}\ntrain:\n  epochs: -1\n  seeed: 3\ntuning: 4\n", encoding="utf-8")
    done = in_process("plan", f"CONFIG={file}", "TRAIN_SEED=s")
    assert done.code == 2 and done.err.count("error: ") == 5
    for line in (1, 3, 4, 5):
        assert f"x.yaml:{line}: " in done.err
    assert "TRAIN_SEED=s: `train.seed` is `s`" in done.err


PASTED = {
    "load_in_4bit: true": "did you mean `tuning.mode: qlora`?",
    "load_in_8bit: true": "did you mean `tuning.mode: qlora` and `tuning.quantization: int8`?",
    "load_in_8bit: false": "omit it, or set `tuning.mode`",
    "adapter: qlora": "did you mean `tuning.mode: qlora`?",
    "adapter:": "did you mean `tuning.mode: full`?",
    "finetuning_type: lora": "did you mean `tuning.mode: lora`?",
    "quantization_bit: 4": "did you mean `tuning.mode: qlora`?",
    "train_on_inputs: false": "did you mean `train.loss_on: assistant`?",
    "roles_to_train: [assistant]": "did you mean `train.loss_on: assistant`?",
    "lora_target_linear: true": "did you mean `tuning.lora.target_modules: auto`?",
    "flash_attention: true": "did you mean `model.attn_implementation: auto`?",
    "gradient_checkpointing: unsloth": "did you mean `train.gradient_checkpointing: true`?",
    "sample_packing: true": "`train.packing: on`; a step then still counts rows",
    "neat_packing: true": "`train.packing: on`; a step then still counts rows",
    "sample_packing: false": "did you mean `train.packing: off`?",
    "stage: dpo": "training on preferences or rewards is not supported",
    "rl: kto": "training on preferences or rewards is not supported",
    "pref_beta: 0.1": "training on preferences or rewards is not supported",
    "bf16: true": "did you mean `train.bf16: true`?",
    "fp16:": "omit it: it has no value",
    "val_set_size: 0.05": "did you mean `data.validation: 0.05`?",
    "val_set_size: 500": "did you mean `data.validation`?",
    "cutoff_len: 2048": "did you mean `model.max_seq_len: 2048`?",
    "learning_rate: 2e-4": "did you mean `train.learning_rate: 2e-4`?",
    "chat_template: qwen": "did you mean `data.chat_template`?",
    "local_rank: 0": "omit it: the launcher sets it",
    "wandb_entity: me": "`export WANDB_ENTITY=...`",
    "evals_per_epoch: 4": "`train.eval_steps` counts steps",
    "strict: false": "omit it: unknown keys are always refused",
    "trust_remote_code: true": "omit it, or `model.trust_remote_code: true`",
    "pad_token: x": "omit it: the tokenizer has it",
    "hf_token: x": "tokens and passwords come from the environment",
}


def test_the_configuration_of_another_tool_is_translated_key_by_key(in_process: Program, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    for line, hint in PASTED.items():
        file.write_text(f"{GOOD}{line}\n", encoding="utf-8")
        done = in_process("config", f"CONFIG={file}")
        done.refused(2, f"x.yaml:3: unknown key `{line.partition(':')[0]}`")
        assert f"\n\nhint: {hint}" in done.err or (hint.startswith("`") and hint in done.err), (line, done.err)
    file.write_text(GOOD, encoding="utf-8")
    for same in {pair for pairs in MEANT.values() for pair in pairs.split("` and `")}:
        key, value = same.split(": ")
        mode = [] if key == "tuning.mode" else ["TUNING_MODE=qlora"]
        assert in_process("config", f"CONFIG={file}", "DATA_VALIDATION=0.1", *mode, f"{key}={value}").code == 0, same


def test_output_of_config_is_a_valid_configuration(in_process: Program, tmp_path: Path) -> None:
    words = ["TRAIN_LEARNING_RATE=2e-5", 'MODEL_NAME=it\'s a "model" # $HOME\n\tü', "TRAIN_ADAM_BETA2=0.95"]
    shown = in_process("config", "CONFIG=h100_pair", *words)
    assert shown.code == 0 and parse_yaml(shown.out, "shown").plain()["train"]["learning_rate"] == 2e-5
    again = tmp_path / "again.yaml"
    again.write_text(shown.out, encoding="utf-8")
    first, second = (
        in_process("config", f"CONFIG={name}", "JSON=1", *overrides).json
        for name, overrides in (("h100_pair", words), (again, []))
    )
    assert {key: row["value"] for key, row in first.items()} == {key: row["value"] for key, row in second.items()}
    assert first["train.adam_beta2"] == {"value": 0.95, "origin": "TRAIN_ADAM_BETA2=0.95"}
    assert second["train.adam_beta2"]["origin"].startswith(f"{again}:")
    again.write_text(in_process("config", "CONFIG=run_bnb", "TUNING_LORA_R=8").out, encoding="utf-8")
    full = in_process("config", f"CONFIG={again}", "TUNING_MODE=full")
    again.write_text(full.out, encoding="utf-8")
    assert "lora" not in full.out and in_process("config", f"CONFIG={again}").out.count("mode: full") == 1


def test_notices_go_to_stderr_and_configuration_of_a_run_is_shown_with_its_origins(
    in_process: Program, tmp_path: Path
) -> None:
    noticed = in_process("config", "CONFIG=smoke", "JSON=1", env={"NCCL_TIMEOUT": "77", "SFT_TRAIN_SEED": "5"})
    assert noticed.json["launch.timeout_seconds"] == {"value": 77, "origin": "environment NCCL_TIMEOUT=77"}
    assert noticed.json["train.seed"]["origin"] == "environment SFT_TRAIN_SEED=5" and "no library reads" in noticed.err
    run = tmp_path / "runs" / "one"
    save_config(load_config(Path("configs/smoke.yaml"), (), {"SFT_TRAIN_SEED": "5"}), run / "config.json")
    shown = in_process("config", "RUN=one", "TRAIN_EPOCHS=2", "JSON=1").json
    assert shown["train.seed"] == {"value": 5, "origin": "environment SFT_TRAIN_SEED=5"}
    assert shown["train.epochs"] == {"value": 2.0, "origin": "TRAIN_EPOCHS=2"}
    in_process("config", "RUN=two").refused(5, "there is no run in")
    in_process("config", "RUN=one", "CONFIG=smoke").refused(2, "`CONFIG` and `RUN` are both given")


@pytest.mark.parametrize("command", ["resume", "plan", "stop"])
def test_a_folder_that_is_no_run_is_not_to_be_cleaned_up(command: str, in_process: Program, tmp_path: Path) -> None:
    """`RUN=$FOLDER/` with an unset variable is `/`, whose links nobody is to remove."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "sbin").symlink_to("usr/sbin")
    done = in_process(command, f"RUN={tmp_path / 'folder'}")
    done.refused(5, "there is no run ")
    assert "rm " not in done.err


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_configuration_or_an_error(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "main.yaml"
    file.write_bytes(content)
    try:
        load_config(file, (), {})
    except UserError as error:
        assert error.render().startswith("error: ")
