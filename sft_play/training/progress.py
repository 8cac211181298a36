"""The progress of a run in rank 0's log and on its console: step, loss, tokens/s and time left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TextIO

from transformers import TrainerCallback

from sft_play.runs.evaluations import label_of_metric

SECONDS_BETWEEN_LINES = 10.0
NOT_OF_ANSWERS = ("loss", "perplexity", "label_tokens", "loss_rows_per_second")


def evaluation_line(logs: Mapping[str, Any]) -> str:
    """Returns an evaluation in one line: loss, loss of each source, every score of answers, how many were answered."""
    parts = [f"held-out loss {logs['eval_loss']:.4f}"]
    parts += [f"{name.removeprefix('eval_loss/')} {value:.4f}" for name, value in logs.items() if name.startswith("eval_loss/")]
    scores = {name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")}
    if "answers" in scores:
        names = list(scores)[: list(scores).index("answers")]  # the scores of answers come right before their number
        names = [name for name in names if name.partition("/")[0] not in NOT_OF_ANSWERS]
        parts += [f"{label_of_metric(name)} {scores[name]:.3f}" for name in names]
        if scores["answers"] < scores["answers_asked"]:
            parts.append(f"scored {scores['answers']} of {scores['answers_asked']}")
    return ", ".join(parts)


class Progress(TrainerCallback):
    """A plain line now and then, in the log and on the console; where the console is a terminal it has a bar instead."""

    def __init__(self, console: TextIO | None, log: TextIO) -> None:
        self.console = console
        self.log = log
        """The rank's log alone: what is written there does not come on the console as well."""
        self.bar: Any = None
        self.told = 0.0
        self.first_step = 0
        """The step from which this process went on: 0, or the checkpoint's."""
        self.counted: tuple[int, float] | None = None
        """The first step that ended here, and when: what came before it, start-up and skipped rows, tells nothing of later steps."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.told = 0.0
        self.first_step = state.global_step
        self.counted = None
        if self.console is not None and self.console.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=state.max_steps, initial=state.global_step, file=self.console, unit="step", dynamic_ncols=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.counted is None:
            self.counted = (state.global_step, time.monotonic())
            if self.bar is not None:
                self.bar.initial, self.bar.start_t = state.global_step, time.time()  # what tqdm reckons its rate from

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        logs = logs or {}
        if "rank_loss" in logs:
            facts = f"loss {logs['loss']:.4f}, {logs['tokens_per_second']:,.0f} tokens/s"
            if self.bar is not None:
                self.bar.n = state.global_step
                self.bar.set_postfix_str(facts)
            if self._due(state):
                self._line(f"step {state.global_step}/{state.max_steps}: {facts}{self._left(state)}", in_bar=True)
        elif "eval_loss" in logs:
            self._line(f"step {state.global_step}/{state.max_steps}: {evaluation_line(logs)}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def _due(self, state: Any) -> bool:
        now = time.monotonic()
        if state.global_step in (self.first_step + 1, state.max_steps) or now - self.told >= SECONDS_BETWEEN_LINES:
            self.told = now
            return True
        return False

    def _line(self, text: str, *, in_bar: bool = False) -> None:
        """Writes a line to the log, and to the console unless a bar there says the same (`in_bar`)."""
        self.log.write(text + "\n")
        self.log.flush()
        if self.bar is not None:
            if not in_bar:
                self.bar.write(text, file=self.console)
        elif self.console is not None:
            self.console.write(text + "\n")
            self.console.flush()

    def _left(self, state: Any) -> str:
        """Returns `, 1:05 left`, or nothing before a second step has ended."""
        if self.counted is None or state.global_step <= self.counted[0]:
            return ""
        step, when = self.counted
        seconds = (time.monotonic() - when) / (state.global_step - step) * (state.max_steps - state.global_step)
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f", {hours}:{minutes:02d}:{rest:02d} left" if hours else f", {minutes}:{rest:02d} left"
