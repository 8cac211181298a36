"""`make bench-preparation`: compare speed and memory of `make data` and `datasets.map(apply_chat_template)`.

    python -m benchmarks.preparation [rows=200000] [pairs=1] [write=docs/benchmarks-preparation.md]

Each measurement is a complete command in new processes: imports, reading the JSON lines, writing the rows. Both read
the same file of conversations of about 200 tokens with the same number of processes. `python -m benchmarks.preparation
map FILE FOLDER MODEL PROCESSES` is the plain one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import psutil

from benchmarks.harness import MODEL, date_and_machine, markdown, options_of, publish
from sft_play.files import write_json
from sft_play.plan.hardware import cpu_threads

WORDS = (19, 48)
"""Range of words in a question; an answer has about three times as many: 200 tokens on average with the template."""
OURS, PLAIN, AGAIN = "SFT-Play", "map", "again"
NAMES = {
    OURS: "SFT-Play (`make data`)",
    PLAIN: "`load_dataset` and `map(apply_chat_template)`",
    AGAIN: "SFT-Play, the second time",
}
LEAST_SPEED = 0.9
MOST_SECONDS_AGAIN = 2.0
LOOK_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The measurement of a command."""

    seconds: float
    processor_seconds: float
    """CPU time of all its processes, which a busy machine changes least."""
    peak_bytes: int
    tokens: int = 0


def main(arguments: Sequence[str]) -> int:
    """Measure and publish; return 1 if a bound is missed."""
    if arguments and arguments[0] == PLAIN:
        return plain(*arguments[1:])
    numbers, document = options_of(arguments, rows=200_000, pairs=1)
    measurements: dict[str, list[Measurement]] = {name: [] for name in NAMES}
    for pair in range(numbers["pairs"]):
        with tempfile.TemporaryDirectory(prefix="bench-preparation-") as folder:
            for name, measurement in measure(Path(folder), numbers["rows"], seed=pair).items():
                measurements[name].append(measurement)
                print(f"{NAMES[name]}: {measurement.seconds:.1f} s", file=sys.stderr, flush=True)
    text, good = table(measurements, numbers["rows"])
    publish(text, document)
    return 0 if good else 1


def measure(folder: Path, rows: int, seed: int) -> dict[str, Measurement]:
    """Run both on a new file of conversations, and ours once more from the cache."""
    cache = {"SFT_PLAY_CACHE": str(folder / "cache"), "HF_DATASETS_CACHE": str(folder / "datasets")}

    def prepare(count: int) -> tuple[Measurement, dict[str, Any]]:
        config, file = folder / f"{count}.yaml", folder / f"{count}.jsonl"
        if not file.exists():
            write_rows(file, count, seed)
        data = {"sources": [{"path": str(file)}], "num_proc": cpu_threads() if count == rows else 1}
        write_json(config, {"model": {"name": MODEL, "max_seq_len": 2048}, "data": data})  # JSON is YAML
        command = [sys.executable, "-m", "sft_play", "data", f"CONFIG={config}", "JSON=1"]
        measured, output = run_measured(command, cache)
        return measured, json.loads(output)

    model = prepare(10)[1]["model"]["path"]  # downloads or unpacks it
    (ours, facts), (again, _) = prepare(rows), prepare(rows)
    assert [source["rows_read"] for source in facts["train"]["sources"]] == [rows], facts["train"]
    words = [PLAIN, str(folder / f"{rows}.jsonl"), str(folder / "mapped"), model, str(cpu_threads())]
    theirs, output = run_measured([sys.executable, "-m", "benchmarks.preparation", *words], cache)
    tokens = facts["train"]["split"]["tokens"]
    return {OURS: replace(ours, tokens=tokens), PLAIN: replace(theirs, tokens=int(output)), AGAIN: again}


def plain(file: str, folder: str, model: str, processes: str) -> int:
    """Prepare as people do without this project, and print the number of tokens."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = datasets.load_dataset("json", data_files=file, split="train")

    def encode(row: Mapping[str, object]) -> dict[str, object]:
        ids = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
        return {"input_ids": ids, "length": len(ids)}

    mapped = rows.map(encode, num_proc=int(processes), remove_columns=rows.column_names)
    mapped.save_to_disk(folder)
    print(sum(mapped["length"]))
    return 0


def write_rows(path: Path, count: int, seed: int) -> Path:
    """Write distinct conversations of words from Python's own help texts."""
    chance = random.Random(seed)
    words = " ".join(topics.values()).split()

    def piece(number: int) -> str:
        start = chance.randrange(len(words) - number)
        return " ".join(words[start : start + number])

    with path.open("w", encoding="utf-8") as stream:
        for index in range(count):
            size = chance.randint(*WORDS)
            turns = [
                {"role": "user", "content": f"{index}: {piece(size)}"},
                {"role": "assistant", "content": piece(round(2.2 * size))},
            ]
            stream.write(json.dumps({"messages": turns}) + "\n")
    return path


def run_measured(arguments: Sequence[str], extra: Mapping[str, str]) -> tuple[Measurement, str]:
    """Run a command to its end; return its time, its processes' peak memory, and its output. Raise on failure."""
    environment = {
        **os.environ,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **extra,
    }
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        began, before = time.monotonic(), processor_seconds()
        process = subprocess.Popen(arguments, env=environment, stdout=output, stderr=errors)
        peak = 0
        while process.poll() is None:
            peak = max(peak, held_bytes(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
        seconds = time.monotonic() - began
        output.seek(0)
        if process.returncode:
            errors.seek(0)
            sys.stderr.write(errors.read().decode(errors="replace")[-4000:])
            raise SystemExit(f"failed with code {process.returncode}: {' '.join(arguments)}")
        used = processor_seconds() - before
        return Measurement(seconds=seconds, processor_seconds=used, peak_bytes=peak), output.read().decode()


def processor_seconds() -> float:
    """Return the CPU time of all ended children and their descendants so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def held_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants; shared pages count once, if the system reports them."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                memory = member.memory_full_info()
                total += int(getattr(memory, "pss", memory.rss))
    return total


def table(measurements: Mapping[str, Sequence[Measurement]], rows: int) -> tuple[str, bool]:
    """Return the table as markdown, and whether all bounds hold."""
    seconds = {name: median(m.seconds for m in values) for name, values in measurements.items()}
    processor = {name: median(m.processor_seconds for m in values) for name, values in measurements.items()}
    cells = []
    for name, values in measurements.items():
        memory, tokens = median(m.peak_bytes for m in values) / 2**30, values[0].tokens
        speed = f"{rows / seconds[name]:,.0f}" if name != AGAIN else ""
        counted = f"{tokens:,}" if tokens else ""
        cells.append(
            [NAMES[name], f"{seconds[name]:.1f}", f"{processor[name]:.1f}", speed, f"{memory:.2f} GiB", counted]
        )
    ratio = seconds[PLAIN] / seconds[OURS]
    good = ratio >= LEAST_SPEED and seconds[AGAIN] <= MOST_SECONDS_AGAIN
    heading = f"{date_and_machine()}; {rows:,} rows, {cpu_threads()} processes, medians of {len(measurements[OURS])}:"
    bounds = (
        f"Our speed is {ratio:.2f} times that of the plain `map` ({processor[PLAIN] / processor[OURS]:.2f} by processor"
        f" time). Bounds: at least {LEAST_SPEED} times, and at most {MOST_SECONDS_AGAIN:.0f} s the second time."
        f" {'Both hold.' if good else 'NOT ALL HOLD.'}"
    )
    head = ["", "seconds", "processor seconds", "rows a second", "peak memory", "tokens"]
    return "\n".join([heading, "", *markdown(head, cells), "", bounds]), good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
