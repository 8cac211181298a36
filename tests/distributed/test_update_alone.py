"""The update of a step does not depend on how its rows are split: over micro-batches, packs and ranks, nor on a
micro-batch that is halved on the way; for every key and family that may change a row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sft_play.config.optimizers import OPTIMIZERS
from sft_play.plan.shape import FLATTENED_MODEL_TYPES
from sft_play.runs.folder import RunFolder
from tests.conftest import environment
from tests.families import build_family, long_rope, plain_attention
from tests.family_runs import in_child, preload, worker
from tests.training_runs import Trial, column, make_run, must_train, resume_from, same_curves, same_to_the_bit

PACK = (("pack_tokens", 64),)
SPLITS: dict[str, dict[str, Any]] = {
    "one row": {"ranks": ((1, 8),), "plan": (("eval_batch_size", 1),)},
    "all rows": {"ranks": ((8, 1),), "plan": (("eval_batch_size", 8),)},
    "packed": {"ranks": ((2, 4),), "plan": PACK},
    "padded": {"ranks": ((4, 2),), "layout": "padded"},
    "two ranks": {"strategy": "ddp", "ranks": ((2, 2), (2, 2))},
}
"""Rows of a micro-batch, also of an evaluation's, and how they lie in it."""
WEIGHTS = (0.3, None, 1.0, 0.05, 0.7)
"""Of the rows of a case whose name has this word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Keys that change the loss, the gradient or the update, of a family with what its state depends on."""

    settings: tuple[str, ...] = ()
    family: str = "llama"
    own: Mapping[str, Any] = field(default_factory=dict)
    """Of the family's `config.json`."""
    mode: str = "full"
    plan: Mapping[str, Any] = field(default_factory=dict)
    """What the plan makes of the settings."""


def adapters(*settings: str, **own: Any) -> Case:
    """Return a case of adapters with `settings` of `tuning.lora`."""
    return Case(mode="lora", settings=tuple(f"tuning.lora.{line}" for line in settings), **own)


NEFTUNE = ("train.neftune_noise_alpha: 15",)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
RUNNING = [
    word
    for word, chosen in OPTIMIZERS.items()
    if word not in ("auto", "adamw_torch")
    and not chosen.refused
    and (not chosen.module or importlib.util.find_spec(chosen.module))
]
CASES: dict[str, Case] = {
    "weights": Case(),
    "neftune": Case(settings=NEFTUNE),
    "weights and dft": Case(settings=("train.loss: dft",)),
    "dft in chunks": Case(settings=("train.loss: dft",), plan={"loss_chunk": 8}),
    "smoothing": Case(settings=("train.label_smoothing_factor: 0.1",)),
    "smoothing and weights in chunks": Case(settings=("train.label_smoothing_factor: 0.1",), plan={"loss_chunk": 8}),
    "clipping": Case(settings=("train.max_grad_norm: 0.05",)),
    "recomputation": Case(
        settings=("train.gradient_checkpointing: true", "train.kernels: 'off'", *NEFTUNE),
        plan={"gradient_checkpointing": True},
    ),
    "decay": Case(settings=("train.weight_decay: 0.1",)),
    "plateau": Case(settings=("train.lr_scheduler_type: reduce_lr_on_plateau", "train.eval_steps: 1")),
    **{f"optim {word}": Case(settings=(f"train.optim: {word}",), plan={"optim": word}) for word in RUNNING},
    "eager": Case(plan={"attn_implementation": "eager"}),
    "varlen": Case(plan={"attn_implementation": "varlen"}),
    "lora": adapters(),
    "lora with noise": Case(mode="lora", settings=NEFTUNE),
    "dora": adapters("variant: dora"),
    "rslora": adapters("rslora: true"),
    "pissa": adapters("init: pissa"),
    "olora": adapters("init: olora"),
    "orthogonal": adapters("init: orthogonal"),
    "plus": adapters("plus_ratio: 4"),
    "patterns": adapters("rank_pattern.down_proj: 8", "alpha_pattern.down_proj: 4"),
    "whole modules": adapters("modules_to_save: [embed_tokens]"),
    "biases": adapters("bias: all", own={"attention_bias": True}),
    "embeddings": adapters("embeddings: all"),
    "new tokens": Case(mode="lora", settings=("data.new_tokens: ['<|im_start|>']", *NEFTUNE)),
    "experts": adapters("target_modules: [q_proj, experts.gate_up_proj, experts.down_proj]", family="qwen3_moe"),
    "nf4": Case(mode="qlora"),
    "int8": Case(mode="qlora", settings=("tuning.quantization: int8",)),
    "longrope": Case(family="phi3", own=long_rope("phi3")),
    "longrope and experts": Case(family="phimoe", own=long_rope("phimoe")),
    "dynamic rope": Case(own={"rope_parameters": DYNAMIC, "max_position_embeddings": 64}),
    "mixture": Case(family="qwen3_moe"),
    "shared experts": Case(family="deepseek_v3"),
    "states": Case(family="mamba2"),
    "states and attention": Case(family="bamba"),
    "gated states": Case(family="qwen3_next"),
    "capped scores": Case(family="gemma2"),
    "windows": Case(family="gemma3_text"),
    "sinks": Case(family="gpt_oss"),
    "alibi": Case(family="bloom"),
    "embeddings of layers": Case(family="gemma3n_text", settings=NEFTUNE),
}
"""What is random is left out (`tuning.lora.dropout`, a router's jitter): it draws other numbers in another split."""
QUICK = ("neftune",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_every_split_gives_the_same_losses(name: str, cache: Path, tmp_path: Path) -> None:
    preload()
    case = CASES[name]
    base = build_family(tmp_path / "base", case.family, **case.own)
    fields = {"attn_implementation": plain_attention(case.family), **case.plan}
    in_lines, rate = case.family in FLATTENED_MODEL_TYPES, 2e-3

    def trial(split: str) -> Trial:
        own = SPLITS[split] | ({} if in_lines else {"layout": "padded"})
        own["plan"] = (*fields.items(), *own.get("plan", ()))
        own["weights"] = WEIGHTS if "weights" in name else ()
        return Trial(
            steps=4, mode=case.mode, settings=("train.save_steps: 2", *case.settings), learning_rate=rate, **own
        )

    def trained(split: str) -> RunFolder:
        run = make_run(tmp_path / split.replace(" ", "-"), base, trial(split))
        if len(trial(split).ranks) > 1:
            return must_train(run)
        done = in_child(lambda: worker(run, environment(cache, tmp_path)))
        assert not done.code, f"{split}: {done.err}"
        return run

    left_out = [
        *([] if in_lines else ["packed"]),
        *(["padded"] if fields["attn_implementation"] == "varlen" else []),
        *(["two ranks"] if name.startswith("optim") else []),
    ]
    runs = {split: trained(split) for split in SPLITS if split not in left_out}
    runs["halved"] = resume_from(runs["all rows"], tmp_path / "halved", 2, trial("one row"))
    # With iterations in bf16, or states of 8 bits, a gradient's last bit can be 0.4 % of an update.
    within = 1e-4 if any(part in name for part in ("muon", "8bit")) else 1e-5
    for run in runs.values():
        same_curves(run.path, runs["one row"].path, within=within)
    if name == "neftune":
        quiet = must_train(make_run(tmp_path / "quiet", base, Trial(steps=4, learning_rate=rate)))
        assert column(quiet, "loss")[0] != pytest.approx(column(runs["one row"], "loss")[0], rel=1e-5)


@pytest.mark.parametrize("split", ["packed", "two ranks"])
def test_equal_weights_train_like_no_weights_bit_for_bit(split: str, tmp_path: Path) -> None:
    base = build_family(tmp_path / "base", "llama")
    weights: dict[str, tuple[float | None, ...]] = {"none": (), "half": (0.5,), "some": WEIGHTS}
    none, half, some = (
        must_train(make_run(tmp_path / name, base, Trial(steps=4, weights=each, **SPLITS[split])))
        for name, each in weights.items()
    )
    same_to_the_bit(half, none)
    assert column(some, "loss")[0] != pytest.approx(column(none, "loss")[0], rel=1e-5)
    assert column(some, "rank_tokens") == column(none, "rank_tokens"), "tokens are counted, whatever their weight"


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.long) for name in ("zero2", "zero3", "fsdp2"))]
)
def test_inputs_of_layers_in_host_memory_change_nothing_from_a_checkpoint_on(
    strategy: str, tiny: Path, tmp_path: Path
) -> None:
    case: dict[str, Any] = {"strategy": strategy, "ranks": ((2, 2), (2, 2)), "settings": ("train.save_steps: 2",)}
    trial = Trial(**case, steps=4, plan=(("gradient_checkpointing", True),))
    run = must_train(make_run(tmp_path / "run", tiny, trial))
    moved = Trial(**case, steps=4, plan=(*trial.plan, ("activation_offload", True)))
    same_to_the_bit(resume_from(run, tmp_path / "again", 2, moved), run)
