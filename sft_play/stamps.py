"""`make stamp`: show the stamp of a run, a checkpoint or a model (`RUN=`), or the difference of two (`A=`, `B=`). No
torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.metrics import typed_metrics
from sft_play.errors import CheckpointError, UserError, safe_text, typed_here
from sft_play.files import read_json, typed_path
from sft_play.launch.run_folder import find_run, launches
from sft_play.plan.plan import COMMANDS
from sft_play.runs.checkpoints import checkpoint_folder, checkpoint_names
from sft_play.runs.folder import RunFolder
from sft_play.runs.stamp import LATER, NAME, RULES, Stamp
from sft_play.text import as_typed, table

PURPOSES = ("resume", "merge", "infer", "eval")
USAGE = (
    "make stamp RUN=name, or make stamp A=name B=other; each may be NAME@step-000040, NAME@best, NAME@model, or a"
    " folder"
)


def main(call: Call) -> int:
    """Show one stamp, or the difference of two. Raise `UserError` for names that cannot be combined."""
    names = call.options.keys() & {"RUN", "A", "B"}
    if names == {"A", "B"} and "CHECKPOINT" not in call.options:
        return _show_difference(call)
    if names == {"RUN"}:
        return _show_stamp(call)
    if not names:
        raise UserError("`RUN` is missing", hint=USAGE)
    if names == {"A", "B"}:
        raise UserError("`CHECKPOINT` goes with `RUN`", hint=USAGE)
    if "RUN" in names:
        raise UserError("`RUN` shows one stamp, and `A` and `B` compare two", hint=USAGE)
    raise UserError(f"`{'B' if names == {'A'} else 'A'}` is missing", hint=USAGE)


def find(name: str) -> Path:
    """Return the folder of a run, `NAME@step-000040`, `NAME@best`, `NAME@model`, or a path. Raise `CheckpointError`
    with what exists.
    """
    folder = typed_path(name)
    if "/" in name and (folder / NAME).is_file():
        return folder
    head, at, part = name.rpartition("@")
    if at and head:
        return _part(find_run(head), part)
    if folder.is_dir() and not (folder / "config.json").is_file() and (folder / NAME).is_file():
        return folder
    run = find_run(name)
    if not run.stamp.is_file():
        raise CheckpointError(f"the run `{run.name}` has no stamp: its workers never started", place=str(run.path))
    return run.path


def _part(run: RunFolder, part: str) -> Path:
    if part == "model" and run.model.is_dir():
        return run.model
    if folder := checkpoint_folder(run, part):
        return folder
    names = [*checkpoint_names(run), *(["model"] if run.model.is_dir() else [])]
    hint = f"it has {', '.join(names)}" if names else "it has neither a checkpoint nor a model yet"
    raise CheckpointError(f"the run `{run.name}` has no `{part}`", hint=hint)


def run_again(run: RunFolder) -> str | None:
    """Return the command that repeats a run from its folder, or `None` if its workers never started.

    The plan's choices that depend on free memory are written out.
    """
    try:
        launch, plan, config = launches(run)[0]["launch"], read_json(run.plan), read_json(run.config)["config"]
        words = [COMMANDS[launch["command"]], f"CONFIG={run.config}", f"RUN_NAME={run.again}"]
        many = launch["command"] != "single"
        unequal = plan.get("node_ranks") or []
        words += [f"NUM_GPUS={plan['world_size'] // plan['num_nodes']}"] if many and not unequal else []
        here = f" NUM_GPUS=... (by node: {', '.join(map(str, unequal))})" if unequal else ""
        words += [f"NUM_NODES={plan['num_nodes']} NODE_RANK=... MASTER_ADDR=...{here}"] if plan["num_nodes"] > 1 else []
        words += [f"DEEPSPEED_CONFIG={run.deepspeed}"] if launch["deepspeed"] else []
        if many and not launch["deepspeed"] and config.get("launch", {}).get("strategy", "auto") == "auto":
            words.append(f"LAUNCH_STRATEGY={plan['strategy']}")
        words += _plan_choices(plan, config["train"])
        words += typed_metrics(config.get("eval", {}).get("metrics", []))
    except (CheckpointError, OSError, ValueError, KeyError, TypeError):
        return None
    words = [word if word.startswith("NUM_NODES") else as_typed(word) for word in words]
    return typed_here(" ".join(["make", *words]))


def _plan_choices(plan: Mapping[str, Any], train: Mapping[str, Any]) -> list[str]:
    """Return the plan's values of `auto` keys that depend on free memory, or that typing one of these would change."""
    words = []
    divided = {(rank["micro_batch"], rank["accumulation"]) for rank in plan["ranks"]}
    if len(divided) == 1 and train["batch_size"] == "auto" and train.get("grad_accum", "auto") == "auto":
        words.append(f"TRAIN_BATCH_SIZE={divided.pop()[0]}")
    if train.get("packing", "auto") == "auto":
        words.append(f"TRAIN_PACKING={'on' if plan.get('pack_tokens') else 'off'}")
    if train["gradient_checkpointing"] == "auto":
        words.append(f"TRAIN_GRADIENT_CHECKPOINTING={str(plan['gradient_checkpointing']).lower()}")
    return words


def _show_stamp(call: Call) -> int:
    name = call.options["RUN"]
    folder = find(f"{name}@{call.options['CHECKPOINT']}" if "CHECKPOINT" in call.options else name)
    stamp = Stamp.load(folder)
    is_run = (folder / "events.jsonl").is_file()
    again = run_again(RunFolder(folder)) if is_run else None
    if call.json:
        rules = {field: asdict(rule) for field, rule in RULES.items()}
        return call.show({"folder": str(folder), "stamp": asdict(stamp), "rules": rules, "again": again})
    print(_title(folder, stamp) + "\n")
    rows: list[tuple[str, ...]] = [("", "", *PURPOSES)]
    for field, rule in RULES.items():
        rows += _lines(field, tuple(getattr(rule, purpose) for purpose in PURPOSES), getattr(stamp, field))
    print(*table(rows, widest=44), sep="\n")
    print("\nrefuse, warn, allow: what happens when that field differs")
    if again:
        print(f"\nrun it again: {_one_line(again)}")
    return 0


def _title(folder: Path, stamp: Stamp) -> str:
    return _one_line(f"{folder}, after {_text(stamp.step)} steps" if stamp.step else str(folder))


def differences(a: Stamp, b: Stamp) -> list[dict[str, Any]]:
    """Return every field that differs, with both values and the verdict for each purpose when `a`'s weights are used by
    `b`.
    """
    rows = []
    for field, rule in RULES.items():
        value, other = getattr(a, field), getattr(b, field)
        if value != other:
            unknown = field in LATER and not (value and other)
            verdicts = {purpose: "allow" if unknown else getattr(rule, purpose) for purpose in PURPOSES}
            rows.append({"field": field, "a": value, "b": other, **verdicts, "advice": rule.advice})
    return rows


def _show_difference(call: Call) -> int:
    folders = find(call.options["A"]), find(call.options["B"])
    a, b = (Stamp.load(folder) for folder in folders)
    differing = differences(a, b)
    if call.json:
        facts = {"a": str(folders[0]), "b": str(folders[1]), "steps": [a.step, b.step], "differences": differing}
        return call.show(facts)
    for letter, folder, stamp in zip("AB", folders, (a, b), strict=True):
        print(f"{letter} {_title(folder, stamp)}")
    print()
    if not differing:
        print("the same in every field")
        return 0
    rows: list[tuple[str, ...]] = [("", "A", "B", *PURPOSES)]
    for row in differing:
        rows += _lines(row["field"], tuple(row[purpose] for purpose in PURPOSES), row["a"], row["b"])
    print(*table(rows, widest=44), sep="\n")
    print()
    for row in differing:
        if "refuse" in (row[purpose] for purpose in PURPOSES):
            print(f"`{row['field']}`: {row['advice']}")
    return 0


def _lines(field: str, verdicts: tuple[str, ...], *values: Any) -> Iterator[tuple[str, ...]]:
    """Yield name and texts of a field, a line for each entry of a mapping, with verdicts in the first; of two values
    only differences.
    """
    lines = [(field, *map(_text, values))]
    if any(isinstance(value, Mapping) and value for value in values):
        parts = [value if isinstance(value, Mapping) else {} for value in values]
        names = dict.fromkeys(name for part in parts for name in part)
        entries = {name: [part.get(name) for part in parts] for name in names}
        lines = [
            (_one_line(f"{field}.{name}"), *map(_text, entry))
            for name, entry in entries.items()
            if len(values) == 1 or entry[0] != entry[1]
        ]
    for number, line in enumerate(lines):
        yield (*line, *(verdicts if number == 0 else ("",) * len(PURPOSES)))


def _text(value: Any) -> str:
    if value is None or (isinstance(value, (Mapping, list, tuple)) and not value):
        return "-"
    if isinstance(value, str):
        return f"{value[:12]}..." if len(value) in (40, 64) and value.isalnum() else _one_line(value)
    return _one_line(json.dumps(value, ensure_ascii=False))


def _one_line(text: str) -> str:
    """Return a stranger's text without tokens, line breaks and control characters."""
    return safe_text(text).replace("\n", "\\n")
