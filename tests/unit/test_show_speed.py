"""What a finished run is told beside its forecast."""

from __future__ import annotations

from pathlib import Path

from sft_play.files import write_json
from sft_play.plan.show import beside_forecast
from sft_play.runs.folder import RunFolder


def test_a_speed_far_from_the_forecast_has_a_cause(tmp_path: Path) -> None:
    def told(speed: float) -> str:
        forecast = {"tokens_per_second": 1000.0, "basis": "a prior, not measured here"}
        write_json(
            RunFolder(tmp_path).training_metrics, {"tokens_per_second": speed, "training_seconds": 5.0, "forecast": forecast}
        )
        return beside_forecast(RunFolder(tmp_path))

    assert "`make bench` measures it" in told(80.0) and "start-up counts in so short a run" in told(80.0)
    assert "unlike the forecast" not in told(900.0)
