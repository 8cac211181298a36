"""`make soak`: kills a training at random moments, starts it again by the same command, and compares it with an undisturbed one.

The kills come from outside: SIGKILL to real processes of a real run, at moments chosen by wall time or by what the run writes
anyway. Nothing in the product knows of them. What was done is kept, so that a soak goes on in chunks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_play.config.keys import variable_name
from sft_play.errors import UserError
from sft_play.launch.run_folder import choose_name, ended_by_signals
from sft_play.runs.folder import runs_folder
from sft_play.soak.campaign import Soak, ensure_reference, kill_and_go_on, tell
from sft_play.soak.material import write_material
from sft_play.soak.report import as_json, as_text, load_state, write_table

if TYPE_CHECKING:
    from sft_play.config.call import Call

KILLS, SEED = 20, 1
COMMANDS = {
    "single": ("train",),
    "ddp": ("train-distributed", "NUM_GPUS=2", "LAUNCH_STRATEGY=ddp"),
    "zero1": ("train-deepspeed", "NUM_GPUS=2", "LAUNCH_STRATEGY=zero1"),
    "zero2": ("train-deepspeed", "NUM_GPUS=2", "LAUNCH_STRATEGY=zero2"),
    "zero3": ("train-deepspeed", "NUM_GPUS=2", "LAUNCH_STRATEGY=zero3"),
    "fsdp2": ("train-fsdp", "NUM_GPUS=2"),
}


def main(call: Call) -> int:
    """Runs one chunk of `KILLS` kills and prints the table of all chunks; returns 1 when anything was not as promised."""
    strategy = call.options.get("STRATEGY", "ddp")
    if strategy not in COMMANDS:
        raise UserError(f"`STRATEGY` is `{strategy}`; expected {', '.join(f'`{name}`' for name in COMMANDS)}")
    kills, seed = call.integer("KILLS"), call.integer("SEED")
    folder = runs_folder().resolve() / choose_name(call.options.get("RUN_NAME", f"soak-{strategy}"), None)
    if (folder / "config.json").exists():
        raise UserError(f"`{folder}` is a run", hint="choose another RUN_NAME for the soak")
    with ended_by_signals():
        soak = prepare_soak(call, folder, strategy, SEED if seed is None else seed)
        tell(f"soak {folder}: {len(soak.state.kills)} kills so far")
        ensure_reference(soak)
        kill_and_go_on(soak, KILLS if kills is None else kills)
    state = soak.state
    if "OUT" in call.options:
        write_table(Path(call.options["OUT"]), state)
    print(json.dumps(as_json(state), indent=2) if call.json else as_text(state))
    return 0 if all(one.equal for one in state.comparisons) and not state.problems else 1


def prepare_soak(call: Call, folder: Path, strategy: str, seed: int) -> Soak:
    """Returns the soak in `folder`, new or to be gone on with. Raises `UserError`."""
    overrides = [f"{variable_name(one.key)}={one.text}" for one in call.overrides]
    config = call.options.get("CONFIG")
    if config:
        call.load_config()  # a mistake in it is told before anything starts
    settings: dict[str, Any] = {"strategy": strategy, "seed": seed, "config": config, "overrides": overrides}
    state = load_state(folder / "state.json", settings)
    if not state.path.is_file():
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"`{folder}` exists and is no soak", hint="choose another RUN_NAME")
        state.save()
    if config is None:
        config = str(write_material(folder, seed))
    words = [*COMMANDS[strategy], f"CONFIG={config}", "LAUNCH_AUTO_RESUME=true", "LAUNCH_BALANCE=off", *overrides]
    return Soak(folder=folder, state=state, words=words, own_cache=call.options.get("CONFIG") is None)
