"""`python -m sft_play.trace`: reads lines of JSON, each a list of cases to trace and models to count, and answers each
with a line of results.

A separate process, since the plan must not import torch, and torch aborts where fake tensors of an absent device meet
autograd.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from sft_play.errors import UserError

UNUSED = ("bitsandbytes", "deepspeed", "datasets")
"""Imported by libraries only because they are installed, as in `training.process.import_libraries`; `trace.build` needs
no bitsandbytes.
"""


def main() -> int:
    """Answer every line."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not come between
    for name in UNUSED:
        sys.modules[name] = None  # type: ignore[assignment]
    gc.disable()
    import sft_play.trace.run  # noqa: F401

    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        output.write(json.dumps(answers(json.loads(line))) + "\n")
        output.flush()
    return 0


def answers(requests: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is found for each request; `{"error": "..."}` where nothing is, with a `hint` where the user can do
    something; `configured` says that the configuration is wrong, not that the architecture is unknown.
    """
    from sft_play.plan.sources import Case
    from sft_play.trace.run import count, trace

    results: list[dict[str, Any]] = []
    for request in requests:
        try:
            if "count" in request:
                results.append(count(request["count"]))
            else:
                results.append(trace(Case(**request)))
        except UserError as error:
            configured = type(error) is UserError
            results.append({"error": error.message, "hint": error.hint, "configured": configured})
        except Exception as error:  # noqa: BLE001 - any architecture may fail; the plan reports it and continues
            lines = str(error).strip().splitlines() or [""]
            results.append({"error": f"{type(error).__name__}: {lines[0]}"})
    return results


if __name__ == "__main__":
    sys.exit(main())
