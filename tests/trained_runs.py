"""Run folders whose weights are made up: built in a second, for tests of what comes after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_play.runs.folder import RunFolder
from tests.plans import simple_plan


def make_run(
    path: Path, base: Path, mode: str = "lora", *, tuning: str = "", plan: dict[str, Any] | None = None
) -> RunFolder:
    """Publish a run in `path` whose adapters (or weights, for `full`) were moved at random, seeded, away from `base`.

    `tuning` is further YAML of that section (`quantization: int8`).
    """
    import torch

    from sft_play.config.load import load_config, save_config
    from sft_play.model.load import load_for_training
    from sft_play.model.resolve import resolve_model
    from sft_play.plan.plan import make_stamp
    from sft_play.runs.prepared import Prepared

    path.mkdir(parents=True)
    run, document = RunFolder(path), path.parent / f"{path.name}.yaml"
    document.write_text(
        f"model:\n  name: {base}\ntuning:\n  mode: {mode}\n  {tuning}\ndata:\n  train_path: unused.jsonl\n"
    )
    loaded = load_config(document)
    chosen = simple_plan(**(plan or {}))
    prepared = Prepared(model=resolve_model(loaded.config.model), train=None, validation=None)
    model, tokenizer = load_for_training(loaded.config, chosen, prepared)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or (mode == "full" and parameter.requires_grad):
            parameter.data += torch.randn_like(parameter) * 0.05
    save_config(loaded, run.config)
    chosen.save(run.plan)
    prepared.save(run.prepared)
    model.save_pretrained(run.model)
    tokenizer.save_pretrained(run.model)
    for folder in (run.path, run.model):
        make_stamp(loaded.config, chosen, prepared).save(folder)
    return run
