"""`make accept-gpu`: check what only a real GPU can show, step by step, offline, with bounds and time limits.

    python -m benchmarks.acceptance [SECONDS=600] [STEPS=0-3,8] [FOLDER=.cache/acceptance]
        [WRITE=docs/benchmarks-gpu.md] [COMMIT=name] [SMALL=FOLDER] [AT_ONCE=0]

A step whose time ends keeps its rows; a step for which too little time is left does not start. FOLDER keeps models,
runs and `results.json`, so that a later call with other STEPS adds to the same page. It needs the packages, but no
network. On a large card (AT_ONCE=1: on any) the steps of the small model run at once, in half of the time: a short
training is mostly its start. SMALL=FOLDER names a model to use instead of SmolLM2-135M-Instruct, if that is not
available; then steps also run on a CPU, with a tiny large model, which tests the steps, but no GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.acceptance_steps import FORTY_GIB, GIB, STEPS, Lab, Row, SkippedError, Step, StepError, started
from benchmarks.harness import introduction, markdown
from sft_play.errors import HardwareError, UserError
from sft_play.files import read_json, write_json, write_text
from sft_play.launch.environment import visible_cards
from sft_play.plan.commands import gpu_facts
from sft_play.plan.detect import detect, require_usable
from sft_play.plan.hardware import Hardware
from sft_play.runs.origin import git_state

DEFAULTS = {
    "SECONDS": "600",
    "STEPS": "",
    "FOLDER": ".cache/acceptance",
    "WRITE": "docs/benchmarks-gpu.md",
    "COMMIT": "",
    "SMALL": "",
    "AT_ONCE": "",
}
GROUPS = ((4, 13), (5, 18), (6,), (12,), (7,), (2,), (3,), (14,))
"""Steps of the small model that may run at once; those of a group share trainings, and run one by one."""
FIRST = (0, 1)
"""Steps that run beside the groups."""
LEAST_SHARE = 0.3
"""Share of its limit that must be left for a step to start."""
WORDS = {True: "yes", False: "**no**", None: ""}


def main(arguments: Sequence[str]) -> int:
    """Run the steps and write results and page; return 0 if all bounds hold, 1 if not, 2 and 3 as all commands."""
    begun = time.monotonic()
    try:
        options, chosen = options_of(arguments)
        small = Path(options["SMALL"]).resolve() if options["SMALL"] else None
        hardware = detect()
        card, on_cpu = hardware.devices[0], hardware.kind == "cpu"
        if on_cpu and not small:
            reason = gpu_facts()["reason"]
            raise HardwareError(
                f"`make accept-gpu` needs an NVIDIA GPU, and {reason}", hint="`make test` runs what a CPU can show"
            )
        if not on_cpu:
            os.environ.update(visible_cards([0], hardware.devices))
            require_usable(hardware, [0], os.environ)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    folder = Path(options["FOLDER"]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(RUNS_DIR=str(folder / "runs"), HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    lab = Lab(folder=folder, card=card.name, memory_bytes=card.memory_bytes, small=small, on_cpu=on_cpu)
    lab.patient = on_cpu or options["AT_ONCE"] == "0"
    results_file, about = folder / "results.json", {"machine": describe(hardware), "small": small.name if small else ""}
    results = read_json(results_file) if results_file.is_file() else {}
    # Results of another GPU, model or version start a new table.
    if about != {name: results.get(name, "") for name in about}:
        results = about | {"steps": {}}
    commit, end, ran = options["COMMIT"] or commit_here(), begun + int(options["SECONDS"]), set[int]()

    def record(number: int, result: Mapping[str, Any]) -> None:
        ran.add(number)
        results["steps"][str(number)] = {**result, "date": time.strftime("%Y-%m-%d"), "commit": commit}
        write_json(results_file, results)
        write_text(Path(options["WRITE"]), page(results))

    at_once = options["AT_ONCE"] == "1" or (not options["AT_ONCE"] and card.memory_bytes >= FORTY_GIB * GIB)
    groups = [part for group in GROUPS if at_once and (part := [n for n in group if n in chosen])]
    alone = [n for n in chosen if not any(n in group for group in groups)]
    with ending(lab):
        for group in groups:
            begin_group(lab, group, options | {"COMMIT": commit, "SECONDS": str(int(options["SECONDS"]) // 2)})
        if 4 in alone:
            lab.begin("cpu")
        for number in sorted(alone, key=lambda n: n not in FIRST):
            if number not in FIRST:
                collect(lab, groups, record)
            if end - time.monotonic() < LEAST_SHARE * STEPS[number].seconds:
                print(f"{number:>2}  {STEPS[number].title}: not started, no time is left", file=sys.stderr, flush=True)
                continue
            result = run_step(lab, STEPS[number], end, partial(record, number))
            print(
                f"{number:>2}  {STEPS[number].title}: {result['state']}, {result['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        collect(lab, groups, record)
    done = [n for n in chosen if n in ran]
    print("\n".join(table([row for n in done for row in results["steps"][str(n)]["rows"]])))
    all_hold = all(results["steps"][str(n)]["state"] in ("holds", "skipped") for n in done)
    return 0 if all_hold and done == chosen else 1


def begin_group(lab: Lab, group: Sequence[int], options: Mapping[str, str]) -> None:
    """Start a call of this program in the background, with the steps of a group and a folder of its own."""
    name = ",".join(map(str, group))
    folder = lab.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").unlink(missing_ok=True)
    words = {**options, "STEPS": name, "FOLDER": str(folder), "WRITE": str(folder / "page.md"), "AT_ONCE": "0"}
    with (lab.folder / f"{name}.log").open("w") as log:
        program = ["-m", "benchmarks.acceptance", *(f"{key}={value}" for key, value in words.items())]
        lab.background[name] = started(program, {}, log, log)


def collect(lab: Lab, groups: Sequence[Sequence[int]], record: Callable[[int, Mapping[str, Any]], None]) -> None:
    """Wait for the groups, which end by their own limits, and `record` what they have."""
    for group in groups:
        name = ",".join(map(str, group))
        if process := lab.background.get(name):
            process.wait()
            del lab.background[name]
            file = lab.folder / name / "results.json"
            for number, result in (read_json(file)["steps"] if file.is_file() else {}).items():
                print(f"{number:>2}  {STEPS[int(number)].title}: {result['state']}", file=sys.stderr, flush=True)
                record(int(number), result)


@contextlib.contextmanager
def ending(lab: Lab) -> Iterator[None]:
    """End everything that a lab started when this program ends, also by SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        lab.close()
        signal.signal(signal.SIGTERM, before)


def options_of(arguments: Sequence[str]) -> tuple[dict[str, str], list[int]]:
    """Return the options and the steps to run. Raise `UserError`."""
    typed = dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := typed.keys() - DEFAULTS.keys():
        raise UserError(f"unknown arguments: {', '.join(sorted(unknown))}; expected {', '.join(DEFAULTS)}")
    options, chosen = DEFAULTS | typed, list[int]()
    if not re.fullmatch(r"[1-9]\d{0,5}", options["SECONDS"]):
        raise UserError(f"`SECONDS` is `{options['SECONDS']}`; expected an integer >= 1")
    for part in (options["STEPS"] or f"0-{max(STEPS)}").split(","):
        match = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3}))?\s*", part)
        numbers = [n for n in STEPS if int(match[1]) <= n <= int(match[2] or match[1])] if match else []
        if not numbers:
            raise UserError(
                f"`STEPS` is `{options['STEPS']}`; expected numbers and ranges from 0 to {max(STEPS)}, such as `3,8-12`"
            )
        chosen += numbers
    return options, [number for number in STEPS if number in chosen]


def run_step(lab: Lab, step: Step, end: float, record: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Run a step until its limit or `end`; `record` its outcome after each row, also a failure with its reason."""
    begun, rows = time.monotonic(), list[Row]()
    lab.deadline = end if lab.patient else min(begun + step.seconds, end)

    def result(state: str, reason: str = "") -> dict[str, Any]:
        outcome = {
            "state": state,
            "reason": reason,
            "seconds": time.monotonic() - begun,
            "rows": [asdict(row) for row in rows],
        }
        record(outcome)
        return outcome

    try:
        for row in step.rows(lab):
            rows.append(row)
            result("failed", "it was ended here")
    except SkippedError as skipped:
        return result("skipped", str(skipped))
    except Exception as error:  # noqa: BLE001 - a failing step must not cost the others
        return result("failed", str(error) if isinstance(error, StepError) else f"{type(error).__name__}: {error}")
    return result("holds" if all(row.holds is not False for row in rows) else "does not hold")


def describe(hardware: Hardware) -> str:
    """Describe the machine and versions on which the figures depend."""
    card, versions = (
        hardware.devices[0],
        ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft")),
    )
    return (
        f"{card.name}, {card.memory_bytes / GIB:.1f} GiB, driver {hardware.driver}, {hardware.cpu_threads} cores;"
        f" {versions}"
    )


def commit_here() -> str:
    """Return the commit of this project's files, marked if they differ from it; `unknown` in a copy without git."""
    state = git_state()
    return f"{state['commit'][:10]}{'-dirty' if state['dirty'] else ''}" if state else "unknown"


def page(results: Mapping[str, Any]) -> str:
    """Return `docs/benchmarks-gpu.md`, or a list of its steps without results."""
    steps = results.get("steps", {})
    small = f" Small model: {results['small']}." if results.get("small") else ""
    machine = (
        f"{results['machine']}.{small}"
        if steps
        else "**Unverified: no GPU was available.** Nothing below is measured yet."
    )
    lines = [introduction("benchmarks-gpu.md"), "", machine]
    not_run = [f"{n} {step.title}" for n, step in sorted(STEPS.items()) if str(n) not in steps]
    lines += ["", f"Not run yet: {'; '.join(not_run)}."] if not_run else []
    rows = list[Mapping[str, Any]]()
    for number, result in sorted(steps.items(), key=lambda item: int(item[0])):
        reason = f": {result['reason']}" if result["reason"] else ""
        took = f"{result['seconds']:.0f} s, {result['date']}, commit {result['commit']}"
        head = Row(f"**{number}. {STEPS[int(number)].title}**", f"{result['state']}{reason} ({took})")
        rows += [asdict(head), *result["rows"]]
    return "\n".join([*lines, "", *table(rows)]) + "\n"


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return rows as a markdown table, or nothing without rows."""
    cells = [(row["what"], row["measured"], row["bound"], WORDS[row["holds"]]) for row in rows]
    plain = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in cells]
    return markdown(["what", "measured", "bound", "holds"], plain) if rows else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
