"""`make bench-preparation`: rows a second of `make data` beside a plain `datasets.map(apply_chat_template)`, and the memory of both.

    python -m benchmarks.preparation [rows=200000] [pairs=1] [write=docs/benchmarks-preparation.md]

Each measurement is a whole command in processes of its own, from the start to the end: imports, reading the JSON lines, writing the
rows. Both read the same file of conversations of about 200 tokens and use as many processes. `python -m benchmarks.preparation
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

import psutil

from benchmarks.options import options_of
from benchmarks.training import MODEL, describe_machine
from sft_play.files import write_json, write_text
from sft_play.plan.hardware import cpu_threads

ROWS, PAIRS = 200_000, 1
WORDS = (19, 48)
"""Words of a question, and of an answer about three times as many: 200 tokens on average with the template."""
OURS, PLAIN, AGAIN = "SFT-Play", "map", "again"
NAMES = {
    OURS: "SFT-Play (`make data`)",
    PLAIN: "`load_dataset` and `map(apply_chat_template)`",
    AGAIN: "SFT-Play, the second time",
}
LEAST_SPEED = 0.9
MOST_SECONDS_AGAIN = 2.0
LOOK_SECONDS = 0.3
INTRODUCTION = """# Preparation, compared with a plain `datasets.map`

Written by `python -m benchmarks.preparation write=docs/benchmarks-preparation.md`; do not edit by hand. `make bench-preparation` prints
the same table; `ROWS=20000` makes it shorter.

Conversations of about 200 tokens, SmolLM2-135M-Instruct's tokenizer and template. The plain command renders and tokenises each row;
`make data` also finds the label mask, checks every row, removes copies and writes a manifest. Memory is the most that all processes held (PSS).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One command."""

    seconds: float
    processor_seconds: float
    """Of all its processes: what a busy machine changes least."""
    peak_bytes: int
    tokens: int = 0


def main(arguments: Sequence[str]) -> int:
    """Measures, prints the table, and writes the page when asked; 1 when a bound is missed."""
    if arguments and arguments[0] == PLAIN:
        return plain(*arguments[1:])
    options = options_of(arguments, rows=ROWS, pairs=PAIRS)
    if options is None:
        return 2
    numbers, document = options
    rows, pairs = numbers["rows"], numbers["pairs"]
    found: dict[str, list[Measurement]] = {name: [] for name in NAMES}
    for pair in range(pairs):
        with tempfile.TemporaryDirectory(prefix="bench-preparation-") as folder:
            for name, measurement in measure(Path(folder), rows, seed=pair).items():
                found[name].append(measurement)
                print(f"{NAMES[name]}: {measurement.seconds:.1f} s", file=sys.stderr, flush=True)
    text, good = table(found, rows, pairs)
    print(text)
    if document:
        write_text(Path(document), page(text))
    return 0 if good else 1


def measure(folder: Path, rows: int, seed: int) -> dict[str, Measurement]:
    """Runs both on a new file of conversations, and ours again from the cache."""
    file = write_rows(folder / "rows.jsonl", rows, seed)
    config = folder / "bench.yaml"
    settings = {
        "model": {"name": MODEL, "max_seq_len": 2048},
        "data": {"sources": [{"path": str(file)}], "num_proc": cpu_threads()},
    }
    write_json(config, settings)  # JSON is YAML
    command = [sys.executable, "-m", "sft_play", "data", f"CONFIG={config}", "JSON=1"]
    cache = {"SFT_PLAY_CACHE": str(folder / "cache"), "HF_DATASETS_CACHE": str(folder / "datasets")}
    small = folder / "small.yaml"
    write_rows(folder / "small.jsonl", 10, seed)
    write_json(small, {**settings, "data": {"sources": [{"path": str(folder / "small.jsonl")}], "num_proc": 1}})
    _, output = run_measured([*command[:-2], f"CONFIG={small}", "JSON=1"], cache)  # fetches or unpacks the model
    model = json.loads(output)["model"]["path"]
    ours, output = run_measured(command, cache)
    manifest = json.loads(output)["train"]
    assert manifest["rows_read"] == rows, manifest
    again, _ = run_measured(command, cache)
    work = [sys.executable, "-m", "benchmarks.preparation", PLAIN, str(file), str(folder / "mapped"), model, str(cpu_threads())]
    theirs, output = run_measured(work, cache)
    tokens = manifest["split"]["tokens"]
    return {
        OURS: replace(ours, tokens=tokens),
        PLAIN: replace(theirs, tokens=int(output)),
        AGAIN: again,
    }


def plain(file: str, folder: str, model: str, processes: str) -> int:
    """What people write without this project; prints the number of tokens."""
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
    """Writes conversations of words from Python's own help texts, no two alike."""
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
    """Runs a command to its end; returns its time, the most memory of all its processes, and what it printed. Raises on failure."""
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
    """Returns what the children that have ended, and theirs, have used so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def held_bytes(pid: int) -> int:
    """Returns the memory of a process and its descendants, pages that they share counted once (where the system tells)."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                found = member.memory_full_info()
                total += int(getattr(found, "pss", found.rss))
    return total


def table(found: Mapping[str, Sequence[Measurement]], rows: int, pairs: int) -> tuple[str, bool]:
    """Returns the table as markdown, and whether all bounds hold."""
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {describe_machine()}; {rows:,} rows, {cpu_threads()} processes, "
        f"load average {os.getloadavg()[0]:.0f}, "
        + (f"medians of {pairs} interleaved pairs:" if pairs > 1 else "one measurement each:"),
        "",
        "| | seconds | processor seconds | rows a second | peak memory | tokens |",
        "|---|---|---|---|---|---|",
    ]
    seconds = {name: median(m.seconds for m in values) for name, values in found.items()}
    processor = {name: median(m.processor_seconds for m in values) for name, values in found.items()}
    for name, values in found.items():
        memory = median(m.peak_bytes for m in values) / 2**30
        tokens = f"{values[0].tokens:,}" if values[0].tokens else ""
        speed = f"{rows / seconds[name]:,.0f}" if name != AGAIN else ""
        lines.append(f"| {NAMES[name]} | {seconds[name]:.1f} | {processor[name]:.1f} | {speed} | {memory:.2f} GiB | {tokens} |")
    ratio = seconds[PLAIN] / seconds[OURS]
    good = ratio >= LEAST_SPEED and seconds[AGAIN] <= MOST_SECONDS_AGAIN
    lines += [
        "",
        f"Our speed is {ratio:.2f} times that of the plain `map` ({processor[PLAIN] / processor[OURS]:.2f} by processor time). "
        f"Bounds: at least {LEAST_SPEED} times, and at most {MOST_SECONDS_AGAIN:.0f} s the second time. {'Both hold.' if good else 'NOT BOTH HOLD.'}",
    ]
    return "\n".join(lines), good


def page(text: str) -> str:
    """Returns `docs/benchmarks-preparation.md`."""
    return f"{INTRODUCTION}\n{text}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
