"""`make plan` of families that the formulas do not know: counted on the model itself and traced, or refused with the
reason.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_play.plan import architecture
from tests.conftest import Program
from tests.families import tiny_model

PLAN = ("plan", "CONFIG=configs/quickstart.yaml", "HARDWARE=cpu", "MODEL_MAX_SEQ_LEN=64")


@pytest.mark.pinned
def test_a_model_as_its_family_saves_it_is_counted_and_traced(program: Program, tmp_path: Path) -> None:
    """transformers saves nemotron_h without `num_hidden_layers`."""
    model = tiny_model("nemotron_h", "meta")
    model.config.save_pretrained(tmp_path)
    assert "num_hidden_layers" not in json.loads((tmp_path / "config.json").read_text())
    words, env = (
        (*PLAN, f"MODEL_NAME={tmp_path}", "TUNING_MODE=full", "JSON=1"),
        {"SFT_PLAY_CACHE": str(tmp_path / "cache")},
    )
    plan = program(*words, env=env).json
    assert plan["source"] == "trace"
    assert (
        "the formulas do not know `nemotron_h`: parameters and adapters are counted on the model itself, activations"
        " are traced" in plan["reasons"].values()
    )
    assert plan["ranks"][0]["memory_bytes"]["trained"] == 4 * sum(p.numel() for p in model.parameters())
    formula = program(*words, "SOURCE=formula", env=env).json
    assert formula["ranks"][0]["memory_bytes"]["trained"] == plan["ranks"][0]["memory_bytes"]["trained"]
    assert formula["source"] == "formula" and any(
        "as if it were a Llama" in reason for reason in formula["reasons"].values()
    )


def test_adapters_and_experts_of_a_mixture_are_described(program: Program, tmp_path: Path) -> None:
    """Its router is no linear layer."""
    tiny_model("glm4_moe", "meta").config.save_pretrained(tmp_path)
    words = (*PLAN, f"MODEL_NAME={tmp_path}", "SOURCE=formula")
    done = program(*words, "TUNING_MODE=qlora", "TUNING_LORA_TARGET_MODULES=[mlp.gate]")
    assert (
        done.code == 2
        and "`mlp.gate` (it routes tokens to experts), where" in done.err
        and "experts.gate_up_proj" in done.err
    )
    done = program(*words, "TUNING_MODE=qlora", "TUNING_QUANTIZATION=int8")
    assert "GiB in all instead of" in done.out, done.err
    done = program(*words, "TUNING_MODE=full", "TRAIN_OPTIM=muon")
    assert done.code == 2 and "`muon`, which takes single matrices" in done.err, done.err


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("nobody_knows_it", "does not know `model_type: nobody_knows_it`"),
        ("paligemma", "`paligemma` is not a language model of transformers"),
    ],
)
@pytest.mark.broad_but("paligemma")
def test_a_model_that_is_not_trained_here_is_refused_before_the_data(
    program: Program, tmp_path: Path, family: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    done = program(*PLAN, f"MODEL_NAME={tmp_path}")
    assert done.code == 4 and f"error: {tmp_path}/config.json: " in done.err and message in done.err, done.err


@pytest.mark.parametrize(
    ("settings", "words", "message"),
    [
        ({"load_in_4bit": True}, ["TUNING_MODE=full"], "(bitsandbytes fp4), and `tuning.mode: full` cannot train"),
        ({"load_in_8bit": True}, ["TUNING_MODE=lora", "NUM_GPUS=2", "LAUNCH_STRATEGY=zero3"], "int8 and ZeRO-3"),
        ({"quant_method": "fbgemm_fp8"}, ["TUNING_MODE=lora"], "by `fbgemm_fp8`, and adapters over such a base"),
        ({"quant_method": "gptq", "bits": 4}, ["TUNING_MODE=qlora"], "by `gptq`, and adapters over such a base"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
@pytest.mark.broad_but("ZeRO-3")
def test_a_quantised_base_that_cannot_be_tuned_so_is_refused_before_its_weights(
    family: str, settings: dict[str, object], words: list[str], message: str, in_process: Program, tmp_path: Path
) -> None:
    config = tiny_model(family, "meta").config.to_dict() | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    in_process(*PLAN, f"MODEL_NAME={tmp_path}", "SOURCE=formula", *words).refused(
        2, "the base model is quantised", message
    )


def test_typed_targets_of_one_layer_count_once_and_a_shared_head_is_refused(program: Program, tmp_path: Path) -> None:
    tiny_model("llama", "meta", tie_word_embeddings=True).config.save_pretrained(tmp_path)
    words = (*PLAN, f"MODEL_NAME={tmp_path}", "SOURCE=formula", "TUNING_MODE=lora", "TUNING_LORA_R=2")
    done = program(*words, "TUNING_LORA_TARGET_MODULES=[layers.1.self_attn.q_proj]")
    assert f"adapters of rank 2 on q_proj: {2 * (64 + 64)} parameters" in done.out, done.err
    done = program(*words, "TUNING_LORA_TARGET_MODULES=[lm_head]")
    assert done.code == 2 and "share one weight in this model" in done.err, done.err


@pytest.mark.broad
def test_a_late_answer_is_not_that_of_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hurried:
        hurried.setattr(architecture, "TRACE_SECONDS", 0.01)
        assert "took longer" in architecture.running_tracer().ask([{"count": {}}])[0]["error"]
    answers = architecture.running_tracer().ask([{"count": {"model_type": "nobody_knows_it"}}])
    architecture.end_tracer()
    assert "nobody_knows_it" in answers[0]["error"]


def test_a_saved_layer_is_traced_and_a_saved_embedding_is_not(program: Program, tmp_path: Path) -> None:
    env, save = {"SFT_PLAY_CACHE": str(tmp_path)}, "TUNING_LORA_MODULES_TO_SAVE="
    sources = [program(*PLAN, "JSON=1", f"{save}[{name}]", env=env).json["source"] for name in ("norm", "embed_tokens")]
    assert sources == ["trace", "formula"]


@pytest.mark.parametrize(
    "word, message, hint",
    [
        ("MODULES_TO_SAVE=[lm_hed]", "names `lm_hed`, which this model does not have", "`lm_head`"),
        ("RANK_PATTERN={down_prj: 4}", "names `down_prj`, which is no module", "did you mean `down_proj`?"),
        ("TARGET_MODULES=[v_prj]", "names `v_prj`", "did you mean `v_proj`?"),
        (r"TARGET_MODULES=.*\.(q|v)_proj", "takes no adapter", "instead of regular expressions"),
        ("TARGET_MODULES=[layers.*.self_attn.q_proj]", "takes no adapter", "instead of regular expressions"),
        ("TARGET_MODULES=[layers.99.self_attn.q_proj]", "takes no adapter", "`auto` for every linear layer"),
    ],
)
def test_a_name_that_no_module_has_is_refused_by_the_plan(
    program: Program, tmp_path: Path, word: str, message: str, hint: str
) -> None:
    done = program(*PLAN, f"TUNING_LORA_{word}", env={"SFT_PLAY_CACHE": str(tmp_path)})
    assert done.code == 2 and message in done.err and hint in done.err.partition("hint:")[2], done.err


def test_a_pattern_of_some_layers_is_planned(program: Program) -> None:
    assert program(*PLAN, "SOURCE=formula", r"TUNING_LORA_ALPHA_PATTERN={'layers\.1?[0-3]\..*v_proj': 4}").code == 0
