"""`train.profile`: profile steps of a rank by `torch.profiler`, into a Chrome trace and a JSON summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerCallback

from sft_play.files import write_json
from sft_play.text import tell
from sft_play.training.metrics import Lap, Stopwatch
from sft_play.training.ranks import TrainContext

COSTLIEST = 15
COMMUNICATION = ("nccl", "gloo:", "c10d::", "record_param_comms")
COPIES = ("Memcpy", "aten::copy_", "aten::_to_copy")

Interval = tuple[float, float]


class Profiler(TrainerCallback):
    """Record the steps that `train.profile` names, after one step that warms the profiler up."""

    def __init__(self, context: TrainContext, watch: Stopwatch) -> None:
        self.settings, self.lap, self.done = context.config.train.profile, Lap(watch), False
        self.folder, self.name = context.run.profile, f"rank{context.ranks.rank}"
        self.gpu = context.ranks.device.type == "cuda"
        self.profile: profile | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.folder.mkdir(exist_ok=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 2 == self.settings.start:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])]
            plan = schedule(wait=0, warmup=1, active=self.settings.steps, repeat=1)
            self.profile = profile(activities=activities, schedule=plan, on_trace_ready=self._keep)
            self.profile.start()
        elif state.global_step + 1 == self.settings.start:
            self.lap.take()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.profile:
            self.profile.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.profile:
            self.profile.stop()
        if not self.done:
            tell(f"note: `train.profile` measured nothing: step {self.settings.start} did not run here")

    def _keep(self, trace: profile) -> None:
        """Write the trace and its summary: seconds per step, and how they are spent."""
        self.profile, self.done, lap = None, True, self.lap.take()
        trace.export_chrome_trace(str(self.folder / f"{self.name}.pt.trace.json.gz"))
        events: Sequence[Any] = trace.events() or ()
        steps = [event.time_range for event in events if event.name.startswith("ProfilerStep") and not _on_gpu(event)]
        if not steps:
            return
        count = len(steps)
        wall = max(step.end for step in steps) - min(step.start for step in steps)
        shares = where_time_goes(events, gpu=self.gpu, wall=wall, data=1e6 * lap["data"])
        totals = [row for row in trace.key_averages() if not row.key.startswith("ProfilerStep")]
        spent = {id(row): float(row.self_device_time_total if self.gpu else row.self_cpu_time_total) for row in totals}
        totals = sorted(totals, key=lambda row: -spent[id(row)])[:COSTLIEST]
        write_json(
            self.folder / f"{self.name}.json",
            {
                "start": self.settings.start,
                "steps": count,
                "device": "cuda" if self.gpu else "cpu",
                "step_seconds": wall / 1e6 / count,
                "shares": shares,
                "operators": [
                    {
                        "name": row.key,
                        "calls": row.count / count,
                        "seconds": spent[id(row)] / 1e6 / count,
                        "share": spent[id(row)] / wall,
                    }
                    for row in totals
                ],
            },
        )


def _on_gpu(event: Any) -> bool:
    return bool(event.device_type == DeviceType.CUDA)


def where_time_goes(events: Iterable[Any], *, gpu: bool, wall: float, data: float) -> dict[str, float]:
    """Return how `wall` (microseconds, as `data`) is spent, as shares that add up to 1.

    They are `kernels`, then `communication` and `copies` that no kernel hides, waiting for `data`, and `gaps`, in which
    the device is idle. On a GPU its own events count, on a CPU the time that operators do not pass on to others.
    """
    by_kind: dict[str, list[Interval]] = {"kernels": [], "communication": [], "copies": []}
    for event in events:
        if event.is_user_annotation or event.name.startswith("ProfilerStep") or _on_gpu(event) != gpu:
            continue
        kind = "copies" if event.name.startswith(COPIES) else "kernels"
        if any(word in event.name for word in COMMUNICATION):
            kind = "communication"
        by_kind[kind] += [(event.time_range.start, event.time_range.end)] if gpu else _own_time(event)
    shares, covered, before = {}, list[Interval](), 0.0
    for kind, intervals in by_kind.items():
        covered += intervals
        total = min(length_of_union(covered), wall)
        shares[kind], before = (total - before) / wall, total
    shares["data"] = min(data, wall - before) / wall
    return shares | {"gaps": 1 - sum(shares.values())}


def _own_time(event: Any) -> Iterator[Interval]:
    """Yield the time of a CPU event outside of those that it calls; nothing for nodes of the graph that only call."""
    if event.cpu_children and ("::" not in event.name or "autograd::" in event.name):
        return
    since = event.time_range.start
    for child in sorted((child.time_range for child in event.cpu_children), key=lambda time: time.start):
        yield since, max(since, child.start)
        since = max(since, child.end)
    yield since, max(since, event.time_range.end)


def length_of_union(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
