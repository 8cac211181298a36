"""`make bench-evaluation`: answers a second of our evaluation beside one-by-one and batched `generate`.

    python -m benchmarks.evaluation [pairs=1] [rows=200] [tokens=128] [write=docs/benchmarks-evaluation.md]

All three answer the same prompts with the same loaded model, greedily, up to the same end of turn, in one process; each runs once
per pair, in turn, and medians are compared. Ours is the whole `score_by_generation`, scores and intervals included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.options import options_of
from benchmarks.training import MODEL, describe_machine, introduction
from sft_play.config.load import load_config, save_config
from sft_play.files import write_json, write_text
from sft_play.plan.detect import detect
from sft_play.plan.plan import LaunchRequest, Plan
from sft_play.plan.sources import plan_for
from sft_play.runs.folder import RunFolder
from sft_play.runs.prepared import Prepared

OURS, SINGLE, BATCHED = "SFT-Play", "one-by-one", "batched"
NAMES = {
    OURS: "SFT-Play (`make eval`)",
    SINGLE: "`generate`, one prompt at a time",
    BATCHED: "`generate`, batches in the order of the data",
}
GOALS = {SINGLE: 3.0, BATCHED: 1.5}
"""How often as many answers a second we aim at."""
EVERY = {SINGLE: 4}
"""One prompt at a time takes so long that only every fourth is answered: a sample of all lengths, from answers a second alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """All prompts answered once."""

    seconds: float
    cpu_seconds: float
    """Of this process: what a busy machine changes least."""
    answers: tuple[str, ...]
    """In the order of the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all of them get."""

    model: Any
    tokenizer: Any
    rows: Sequence[Mapping[str, Any]]
    batch_size: int
    tokens: int
    """The longest answer."""
    device: str


def main(arguments: Sequence[str]) -> int:
    """Measures, prints the table, and writes it when asked; 1 when a goal is missed."""
    options = options_of(arguments, pairs=1, rows=200, tokens=128)
    if options is None:
        return 2
    numbers, document = options
    pairs, rows, tokens = numbers["pairs"], numbers["rows"], numbers["tokens"]
    with tempfile.TemporaryDirectory(prefix="bench-evaluation-") as folder:
        setting = prepare(Path(folder), rows, tokens)
    found = measure(setting, pairs)
    text, good = table(found, setting.batch_size, tokens)
    print(text)
    if document:
        write_text(Path(document), page(text))
    return 0 if good else 1


def prepare(folder: Path, count: int, tokens: int) -> Setting:
    """Returns the embedded model, and the first built-in rows (the model is untuned, so any will do) as our evaluation prepares them."""
    write_json(
        folder / "bench.yaml",
        {
            "model": {"name": MODEL, "max_seq_len": 512},
            "data": {"sources": [{"path": "builtin:docstrings", "split": "train"}]},
            "train": {"generation_max_new_tokens": tokens},
        },
    )  # JSON is YAML
    run = RunFolder(folder / "run")
    loaded = load_config(folder / "bench.yaml")
    save_config(loaded, run.config)
    subprocess.run([sys.executable, "-m", "sft_play.prepare", "--run", str(run.path)], check=True, stdout=sys.stderr)
    prepared = Prepared.load(run.prepared)
    plan: Plan = plan_for(loaded, detect(), LaunchRequest(), prepared)
    plan.save(run.plan)

    import datasets
    from transformers.utils import logging

    from sft_play.evaluation.held_out import load_weights
    from sft_play.model.use import best_device

    logging.disable_progress_bar()
    assert prepared.train is not None, "the sources hold rows"
    data = datasets.load_from_disk(prepared.train.path)
    device = best_device()
    model, tokenizer = load_weights(run, None, loaded.config, device)
    rows = [data[index] for index in range(min(count, len(data)))]
    return Setting(model=model, tokenizer=tokenizer, rows=rows, batch_size=plan.eval_batch_size, tokens=tokens, device=device)


def measure(setting: Setting, pairs: int) -> dict[str, list[Measurement]]:
    """Returns `pairs` measurements of each way, interleaved."""
    ways: dict[str, Callable[[Setting], list[str]]] = {OURS: ours, SINGLE: one_by_one, BATCHED: batched}
    found: dict[str, list[Measurement]] = {name: [] for name in ways}
    for pair in range(pairs):
        for name, way in ways.items():
            load = os.getloadavg()[0]
            started, worked = time.perf_counter(), time.process_time()
            answers = way(setting)
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - worked
            found[name].append(Measurement(seconds=seconds, cpu_seconds=cpu_seconds, answers=tuple(answers)))
            said = f"pair {pair + 1}: {name:<12}{seconds:7.1f} s, processor {cpu_seconds:.1f} s (load {load:.1f} before)"
            print(said, file=sys.stderr, flush=True)
    return found


def ours(setting: Setting) -> list[str]:
    """Answers and scores as `make eval` does."""
    import torch

    from sft_play.evaluation.answering import AnswerSettings
    from sft_play.evaluation.generate import score_by_generation
    from sft_play.training.ranks import Ranks

    result = score_by_generation(
        setting.model,
        setting.tokenizer,
        setting.rows,
        AnswerSettings(batch_size=setting.batch_size, max_new_tokens=setting.tokens),
        ranks=Ranks(device=torch.device(setting.device)),
    )
    return [prediction.answer for prediction in result.predictions]


def one_by_one(setting: Setting) -> list[str]:
    """Answers each by itself, to a sample of the prompts."""
    return generated(replace(setting, rows=setting.rows[:: EVERY[SINGLE]]), 1)


def batched(setting: Setting) -> list[str]:
    """Answers in batches of the same size as ours, in the order of the data."""
    return generated(setting, setting.batch_size)


def generated(setting: Setting, batch_size: int) -> list[str]:
    """Answers with transformers' `generate`, as its documentation does: left padding by the tokenizer, greedy, batch by batch."""
    import torch

    from sft_play.model.tokenizer import end_of_turn_ids

    stops = list(end_of_turn_ids(setting.tokenizer))
    pad = stops[0] if setting.tokenizer.pad_token_id is None else setting.tokenizer.pad_token_id
    answers: list[str] = []
    for start in range(0, len(setting.rows), batch_size):
        prompts = [list(row["prompt_ids"]) for row in setting.rows[start : start + batch_size]]
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=setting.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=setting.device)
        with torch.no_grad():
            output = setting.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=setting.tokens,
                do_sample=False,
                eos_token_id=stops,
                pad_token_id=pad,
            )
        texts = setting.tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)
        answers += [text.strip() for text in texts]
    return answers


def table(found: Mapping[str, Sequence[Measurement]], batch_size: int, tokens: int) -> tuple[str, bool]:
    """Returns the table as markdown, and whether the goals are reached."""
    ours_first = found[OURS][0].answers
    count, good = len(ours_first), True
    rates = {name: len(values[0].answers) / median(m.seconds for m in values) for name, values in found.items()}
    works = {name: median(m.cpu_seconds for m in values) / len(values[0].answers) for name, values in found.items()}
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {describe_machine()}; {count} prompts, batches of {batch_size}, at most {tokens} new tokens, "
        f"medians of {len(found[OURS])} interleaved measurements:",
        "",
        "| way | answers/s | ours is | goal | by processor time | answers that differ from ours |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in found.items():
        theirs = values[0].answers
        differ = sum(a != b for a, b in zip(ours_first[:: EVERY.get(name, 1)], theirs, strict=True))
        if name == OURS:
            lines.append(f"| {NAMES[name]} | {rates[name]:.2f} | | | | |")
            continue
        ratio = rates[OURS] / rates[name]
        good = good and ratio >= GOALS.get(name, 0.0)
        work = works[name] / works[OURS]
        goal = f"{GOALS[name]:g} times" if name in GOALS else ""
        lines.append(
            f"| {NAMES.get(name, name)} | {rates[name]:.2f} | {ratio:.2f} times as fast | {goal} | {work:.2f} times "
            f"| {differ} of {len(theirs)} |"
        )
    lines += ["", "Both goals are reached." if good else "NOT ALL GOALS ARE REACHED."]
    return "\n".join(lines), good


def page(text: str) -> str:
    """Return `docs/benchmarks-evaluation.md`."""
    return f"{introduction('benchmarks-evaluation.md')}\n\n{text}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
