"""`make bench`: train some steps as `make train` does, and compare speed and memory with the plan. Like every complete
run they improve the forecast (`plan/throughput.py`).
"""

from __future__ import annotations

from dataclasses import replace

from sft_play.config.call import Call
from sft_play.config.layers import preset_path
from sft_play.launch.commands import finish, start_run
from sft_play.launch.rehearse import MEASURED_ALONE, usual_strategy
from sft_play.plan.show import beside_forecast
from sft_play.runs.gate import read_facts

SHORT = {"train.max_steps": "10", "train.logging_steps": "1", **MEASURED_ALONE}


def main(call: Call) -> int:
    """Train some steps of CONFIG (default: the quickstart), print speed and memory next to the plan's, and return the
    exit code.
    """
    call = replace(call, options={"CONFIG": str(preset_path("quickstart")), **call.options})
    short = call.with_defaults(SHORT)
    run, outcome = start_run(short, usual_strategy(short))
    if outcome.code:
        return finish(call, run, outcome)
    facts = read_facts(run.training_metrics)
    names = ("tokens_per_second", "steady_tokens_per_second", "training_seconds", "peak_memory_bytes")
    measured = {name: facts.get(name) for name in names}
    return call.show(
        {"run": str(run.path), "measured": measured, "plan": facts.get("forecast")},
        f"\n{run.path}\n{beside_forecast(run)}  plans of similar models on these devices use this run from now on",
    )
