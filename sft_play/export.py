"""`make merge RUN=`: the run's adapters merged into their base, as a folder that any tool loads."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sft_play.errors import UserError
from sft_play.launch.run_folder import find_run
from sft_play.runs.checkpoints import weights_folder

if TYPE_CHECKING:
    from sft_play.config.call import Call


def main(call: Call) -> int:
    """Merge, shows the proof and where the model is."""
    if "RUN" not in call.options:
        raise UserError("`RUN` is missing", hint="make merge RUN=name-of-a-run")
    if call.overrides:
        raise UserError(
            f"`make merge` cannot change {', '.join(f'`{o.key}`' for o in call.overrides)} of a trained run",
            hint="it takes RUN, CHECKPOINT and OUT",
        )
    run = find_run(call.options["RUN"])
    weights = weights_folder(run, call.options.get("CHECKPOINT"))
    out = Path(call.options.get("OUT") or run.path / "merged")
    if out.exists():  # before torch is imported, which takes seconds
        raise UserError(
            f"`{out}` exists already, and a merged model overwrites nothing", hint="choose another OUT=, or remove it"
        )
    from sft_play.model.merge import merge

    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # libraries print there; stdout is for the result
        merged = merge(run, weights, out, lambda text: print(text, file=sys.stderr, flush=True))
    if call.json:
        print(json.dumps(merged))
    else:
        seconds = time.perf_counter() - started
        size = f"{merged['parameters']:,} parameters, {merged['dtype']}, {merged['size_bytes'] / 2**20:.1f} MiB"
        print(f"{out}: {size}, in {seconds:.0f} s", flush=True)
        print(
            f"next: make infer MODEL={out} PROMPT=..., make serve MODEL={out}, `vllm serve {out}`, or in Python "
            f'`AutoModelForCausalLM.from_pretrained("{out}")` of transformers',
            file=sys.stderr,
        )
    return 0
