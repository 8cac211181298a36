"""`make report RUN=`: one HTML file with everything that a run left, for a browser without a network."""

from __future__ import annotations

import json
from pathlib import Path

from sft_play.config.call import Call
from sft_play.errors import UserError
from sft_play.files import write_text
from sft_play.launch.run_folder import find_run
from sft_play.report.page import page_html
from sft_play.report.record import record_of
from sft_play.runs.folder import RunFolder


def main(call: Call) -> int:
    """Writes `report.html` into the run's folder, or `OUT`."""
    if not call.options.get("RUN"):
        raise UserError("`make report` needs `RUN=name-or-folder`", hint="`make runs` lists the runs")
    run = find_run(call.options["RUN"])
    path = write_report(run, Path(call.options["OUT"]) if call.options.get("OUT") else None)
    print(json.dumps({"run": str(run.path), "report": str(path)}) if call.json else f"report: {path}")
    return 0


def write_report(run: RunFolder, path: Path | None = None) -> Path:
    """Writes a run's report and returns where. Raises `OSError`."""
    path = path or run.report
    write_text(path, page_html(record_of(run)))
    return path
