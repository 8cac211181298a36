"""`make profile`: show where the time of profiled steps went, from the ranks' summaries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from sft_play.config.call import Call
from sft_play.config.layers import config_path
from sft_play.config.load import load_config
from sft_play.config.schema import ProfileSettings
from sft_play.errors import UserError
from sft_play.files import read_object
from sft_play.launch.commands import finish, start_run
from sft_play.launch.rehearse import MEASURED_ALONE, usual_strategy
from sft_play.launch.run_folder import find_run
from sft_play.runs.folder import RunFolder
from sft_play.text import table

START, STEPS = 4, 3
"""Steps of a run that is only made for its profile."""
WORDS = {
    "kernels": "computing",
    "communication": "waiting for communication",
    "copies": "copying",
    "data": "waiting for data",
    "gaps": "nothing to do: Python, starting operators, other ranks",
}


def main(call: Call) -> int:
    """Show the profile of `RUN`, or of a few steps of `CONFIG`."""
    if name := call.options.get("RUN"):
        unused = [*sorted(call.options.keys() - {"RUN", "JSON"}), *(override.origin for override in call.overrides)]
        if unused:
            raise UserError(
                f"`RUN` shows the profile of an existing run, but `{unused[0]}` is for a new one",
                hint="give one of them",
            )
        run = find_run(name)
    else:
        call = _short(call)
        run, outcome = start_run(call, usual_strategy(call))
        if outcome.code:
            return finish(call, run, outcome)
    profiles = summaries(run)
    if not profiles:
        raise UserError(
            f"{run.path} has no profile",
            hint=(
                "TRAIN_PROFILE_STEPS=3 with a training command writes one; `make profile CONFIG=` makes a short run"
                " for it"
            ),
        )
    return call.show(
        profiles,
        *("\n".join([*lines(name, profile), ""]) for name, profile in profiles.items()),
        f"traces for https://ui.perfetto.dev, chrome://tracing or TensorBoard's profiler plugin: {run.profile}",
    )


def summaries(run: RunFolder) -> dict[str, dict[str, Any]]:
    """Return rank -> its summary (`training.profiling`)."""
    paths = sorted(run.profile.glob("rank*.json"), key=lambda path: (len(path.name), path.name))
    return {path.stem: content for path in paths if (content := read_object(path))}


def lines(name: str, profile: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about a rank."""
    last = profile["start"] + profile["steps"] - 1
    yield f"{name}: steps {profile['start']} to {last}, {profile['step_seconds']:.3g} s each"
    yield from table(
        [
            ("", f"{share:.1%}", WORDS.get(kind, kind))
            for kind, share in sorted(profile["shares"].items(), key=lambda item: -item[1])
        ]
    )
    rows = [
        (row["name"][:60], f"{row['calls']:.0f}", f"{1e3 * row['seconds']:.2f}", f"{row['share']:.1%}")
        for row in profile["operators"]
    ]
    yield from table([("operator", "calls", "ms", "of a step"), *rows])


def _short(call: Call) -> Call:
    """Return the call of a run that ends with the profile; `start_run` refuses a call without a configuration."""
    if not (name := call.options.get("CONFIG")):
        return call
    asked, values = ProfileSettings(), dict[str, str]()
    with contextlib.suppress(UserError):  # raised again below
        asked = load_config(config_path(name), call.overrides).config.train.profile
    if not asked.steps:
        values = {"train.profile.start": str(START), "train.profile.steps": str(STEPS)}
        asked = load_config(config_path(name), call.with_defaults(values).overrides).config.train.profile
    values |= {"train.max_steps": str(asked.start + asked.steps - 1), **MEASURED_ALONE}
    return call.with_defaults(values)
