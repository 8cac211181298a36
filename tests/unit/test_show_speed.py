"""What a finished run is told beside its forecast."""

from __future__ import annotations

from pathlib import Path

from sft_play.files import write_json
from sft_play.plan.show import beside_forecast
from sft_play.runs.folder import RunFolder
from sft_play.runs.progress import energy_kwh


def test_measured_energy_is_beside_its_bound(tmp_path: Path) -> None:
    write_json(RunFolder(tmp_path).training_metrics, {"energy_kwh": 0.75, "forecast": {"energy_kwh": 1.0}})
    assert beside_forecast(RunFolder(tmp_path)) == "  energy   0.75 kWh, forecast 1 kWh (-25%)\n"
    rows = [{"rank_power_watts": watts} for watts in ([100.0, 300.0], [None, 300.0], None, [200.0, 400.0])]
    assert energy_kwh(rows, 3600.0) == 0.5 and energy_kwh([{}], 3600.0) is None
