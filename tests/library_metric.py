"""A metric of the `evaluate` library in a local folder."""

from __future__ import annotations

from pathlib import Path

SCRIPT = """import datasets, evaluate


class Share(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        each = [float(p == r) for p, r in zip(predictions, references)]
        lengths = sum(map(len, predictions)) / max(1, sum(map(len, references)))
        return RETURNED
"""


def library_metric(folder: Path, name: str, returned: str) -> str:
    """Write `NAME/NAME.py` and return its entry of `eval.metrics`; `returned` is a Python expression over the script's
    names.
    """
    (folder / name).mkdir()
    (folder / name / f"{name}.py").write_text(SCRIPT.replace("RETURNED", returned))
    return f"evaluate:{folder / name}"
