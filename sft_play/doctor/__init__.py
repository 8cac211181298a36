"""`make doctor`: what in this environment will or may go wrong, each finding with its id, severity and remedy.

Every check stands alone and needs nothing but the standard library, so that the doctor also works where packages are missing.
`docs/doctor.md` lists the findings.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from sft_play.doctor import checks, gpu, system
from sft_play.doctor.checks import Check, Context, Finding

if TYPE_CHECKING:
    from sft_play.config.call import Call

CHECKS: tuple[Check, ...] = (*checks.SOFTWARE_CHECKS, *gpu.CHECKS, *system.CHECKS, *checks.NETWORK_CHECKS)
MARKS = {"error": "ERROR", "warning": "WARN ", "note": "note "}


def main(call: Call) -> int:
    """Runs every check; returns 3 when one found an error, else 0."""
    config = call.load_config().config if "CONFIG" in call.options else None
    return report(examine(Context(model_name=(config.model.name or None) if config else None)), as_json=call.json)


def examine(context: Context) -> list[Finding]:
    """Returns the findings of all checks, errors first."""
    findings = [finding for check in CHECKS for finding in check(context)]
    return sorted(findings, key=lambda f: list(MARKS).index(f.severity))


def report(findings: list[Finding], *, as_json: bool) -> int:
    """Prints the findings; returns the exit code."""
    counts = {severity: sum(f.severity == severity for f in findings) for severity in MARKS}
    if as_json:
        print(json.dumps({"checks": len(CHECKS), "counts": counts, "findings": [f.to_json() for f in findings]}, indent=2))
    else:
        for finding in findings:
            print(f"{MARKS[finding.severity]}  {finding.id}: {finding.text}\n       remedy: {finding.remedy}")
        told = ", ".join(f"{counts[kind]} {kind}{'' if counts[kind] == 1 else 's'}" for kind in ("error", "warning", "note"))
        print(f"{len(CHECKS)} checks: {told}")
    sys.stdout.flush()
    return 3 if counts["error"] else 0
