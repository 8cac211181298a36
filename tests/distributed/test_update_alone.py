"""The update of a step does not depend on how its rows are split: over micro-batches, packs and ranks, nor on a
micro-batch that is halved on the way; for every key and family that may change a row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_play.plan.shape import FLATTENED_MODEL_TYPES, WITHOUT_SDPA
from tests.families import build_family, long_rope
from tests.training_runs import Trial, column, make_run, must_train, resume_from, same_curves, same_to_the_bit

PACK = (("pack_tokens", 64),)
SPLITS: dict[str, dict[str, Any]] = {
    "one row": {"ranks": ((1, 8),)},
    "all rows": {"ranks": ((8, 1),)},
    "packed": {"ranks": ((2, 4),), "plan": PACK},
    "padded": {"ranks": ((4, 2),), "layout": "padded"},
    "two ranks": {"strategy": "ddp", "ranks": ((2, 2), (2, 2))},
}
WEIGHTS = (0.3, None, 1.0, 0.05, 0.7)
"""Of the rows of the case that has this name."""
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "weights": ("llama", ()),
    "weights and dft": ("llama", ("train.loss: dft",)),
    "neftune": ("llama", ("train.neftune_noise_alpha: 15",)),
    "longrope": ("phi3", ()),
    "dft": ("llama", ("train.loss: dft",)),
    "smoothing": ("llama", ("train.label_smoothing_factor: 0.1",)),
    "clipping": ("llama", ("train.max_grad_norm: 0.05",)),
    "adafactor": ("llama", ("train.optim: adafactor", "train.weight_decay: 0.1")),
    "spikes": ("llama", ("train.spike_guard: skip",)),
    "recomputation": ("llama", ("train.gradient_checkpointing: true", "train.kernels: 'off'")),
    "experts": ("qwen3_moe", ()),
    "states": ("mamba2", ()),
}
QUICK = ("neftune", "weights")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_every_split_gives_the_same_losses(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    base = build_family(tmp_path / "base", family, **(long_rope(family) if case == "longrope" else {}))
    optim = next((line.split(": ")[1] for line in settings if "optim" in line), "adamw_torch")
    attention = "eager" if family in WITHOUT_SDPA else "sdpa"
    fields = (
        ("optim", optim),
        ("gradient_checkpointing", case == "recomputation"),
        ("attn_implementation", attention),
    )

    in_lines = family in FLATTENED_MODEL_TYPES

    def trial(split: str) -> Trial:
        own = SPLITS[split] | ({} if in_lines else {"layout": "padded"})
        own["plan"] = (*fields, *own.get("plan", ()))
        own["weights"] = WEIGHTS if "weights" in case else ()
        return Trial(steps=4, settings=("train.save_steps: 2", *settings), learning_rate=1e-2, **own)

    splits = [name for name in SPLITS if in_lines or name != "packed"]
    runs = {name: must_train(make_run(tmp_path / name.replace(" ", "-"), base, trial(name))) for name in splits}
    runs["halved"] = resume_from(runs["all rows"], tmp_path / "halved", 2, trial("one row"))
    for run in runs.values():
        same_curves(run.path, runs["one row"].path)
    if case == "neftune":
        quiet = must_train(make_run(tmp_path / "quiet", base, Trial(steps=4, learning_rate=1e-2)))
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
