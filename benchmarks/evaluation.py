"""`make bench-evaluation`: compare answers per second of our evaluation with one-by-one and batched `generate`.

    python -m benchmarks.evaluation [pairs=1] [rows=200] [tokens=128] [write=docs/benchmarks-evaluation.md]

All three answer the same prompts with the same loaded model, greedily, up to the same end of turn, in one process; each
runs once per pair, in turn, and medians are compared. Ours is all of `score_by_generation`, including scores and
intervals.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness import MODEL, date_and_machine, markdown, options_of, publish
from sft_play.config.load import load_config, save_config
from sft_play.files import write_json
from sft_play.plan.detect import detect
from sft_play.plan.plan import LaunchRequest
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
"""How many times as many answers per second we aim at."""
EVERY = {SINGLE: 4}
"""One prompt at a time takes so long that only every fourth is answered, a sample of all lengths with the same rate."""


class Measurement(NamedTuple):
    """All prompts answered once."""

    seconds: float
    cpu_seconds: float
    """CPU time of this process, which a busy machine changes least."""
    answers: list[str]
    """In the order of the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The common input of all ways."""

    model: Any
    tokenizer: Any
    rows: Sequence[Mapping[str, Any]]
    batch_size: int
    tokens: int
    """The longest answer."""
    device: str


def main(arguments: Sequence[str]) -> int:
    """Measure and publish; return 1 if a goal is missed."""
    numbers, document = options_of(arguments, pairs=1, rows=200, tokens=128)
    with tempfile.TemporaryDirectory(prefix="bench-evaluation-") as folder:
        setting = prepare(Path(folder), numbers["rows"], numbers["tokens"])
    text, good = table(measure(setting, numbers["pairs"]), setting)
    publish(text, document)
    return 0 if good else 1


def prepare(folder: Path, count: int, tokens: int) -> Setting:
    """Return the embedded model and the first built-in rows (it is untuned, so any will do), prepared as by ours."""
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
    plan = plan_for(loaded, detect(), LaunchRequest(), prepared)
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
    return Setting(
        model=model, tokenizer=tokenizer, rows=rows, batch_size=plan.eval_batch_size, tokens=tokens, device=device
    )


def measure(setting: Setting, pairs: int) -> dict[str, list[Measurement]]:
    """Return `pairs` measurements of each way, interleaved."""
    ways: dict[str, Callable[[Setting], list[str]]] = {OURS: ours, SINGLE: one_by_one, BATCHED: batched}
    measurements: dict[str, list[Measurement]] = {name: [] for name in ways}
    for pair in range(pairs):
        for name, way in ways.items():
            started, worked = time.perf_counter(), time.process_time()
            answers = way(setting)
            measurement = Measurement(time.perf_counter() - started, time.process_time() - worked, answers)
            measurements[name].append(measurement)
            print(
                f"pair {pair + 1}: {name:<12}{measurement.seconds:7.1f} s, processor {measurement.cpu_seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    return measurements


def ours(setting: Setting) -> list[str]:
    """Answer and score as `make eval` does."""
    import torch

    from sft_play.evaluation.generation import AnswerSettings
    from sft_play.evaluation.held_out_answers import score_by_generation
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
    """Answer a sample of the prompts, one at a time."""
    return generated(replace(setting, rows=setting.rows[:: EVERY[SINGLE]]), 1)


def batched(setting: Setting) -> list[str]:
    """Answer in batches of the same size as ours, in the order of the data."""
    return generated(setting, setting.batch_size)


def generated(setting: Setting, batch_size: int) -> list[str]:
    """Answer with transformers' `generate` as documented: left padding, greedy, batch by batch."""
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


def table(measurements: Mapping[str, Sequence[Measurement]], setting: Setting) -> tuple[str, bool]:
    """Return the table as markdown, and whether the goals are reached."""
    our_answers, good, rows = measurements[OURS][0].answers, True, list[list[str]]()
    rates = {name: len(values[0].answers) / median(m.seconds for m in values) for name, values in measurements.items()}
    works = {
        name: median(m.cpu_seconds for m in values) / len(values[0].answers) for name, values in measurements.items()
    }
    for name, values in measurements.items():
        compared = [""] * 4
        if name != OURS:
            ratio, theirs = rates[OURS] / rates[name], values[0].answers
            differ = sum(a != b for a, b in zip(our_answers[:: EVERY.get(name, 1)], theirs, strict=True))
            good = good and ratio >= GOALS[name]
            compared = [
                f"{ratio:.2f} times as fast",
                f"{GOALS[name]:g} times",
                f"{works[name] / works[OURS]:.2f} times",
            ]
            compared.append(f"{differ} of {len(theirs)}")
        rows.append([NAMES[name], f"{rates[name]:.2f}", *compared])
    head = ["way", "answers/s", "ours is", "goal", "by processor time", "answers that differ from ours"]
    heading = (
        f"{date_and_machine()}; {len(our_answers)} prompts, batches of {setting.batch_size}, at most {setting.tokens}"
        f" new tokens, medians of {len(measurements[OURS])} interleaved measurements:"
    )
    lines = [
        heading,
        "",
        *markdown(head, rows),
        "",
        "Both goals are reached." if good else "NOT ALL GOALS ARE REACHED.",
    ]
    return "\n".join(lines), good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
