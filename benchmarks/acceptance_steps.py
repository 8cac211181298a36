"""The acceptance steps: each runs the program as a user does, reads the run's JSON, and yields rows with bounds."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import IO, Any

from benchmarks.acceptance_model import SHAPE, parameters
from benchmarks.memory import sum_without
from benchmarks.training import BATCH_SIZE, LEARNING_RATE, spec_of
from sft_play.files import read_json, read_json_lines, write_json
from sft_play.model.convert import embedded_folder
from sft_play.plan.hardware import find_card
from sft_play.runs.folder import RunFolder, cache_folder

GIB, MIB = 2**30, 2**20
TINY_SHAPE = {"layers": 2, "hidden": 64, "inner": 128, "heads": 4, "kv_heads": 2, "vocabulary": 1024}
SHORT = "TRAIN_MAX_STEPS=10 TRAIN_SAVE_STRATEGY=no"
COMPARED = (
    f"TRAIN_BATCH_SIZE={BATCH_SIZE} TRAIN_GLOBAL_BATCH_SIZE={BATCH_SIZE} TRAIN_LEARNING_RATE={LEARNING_RATE} "
    "TRAIN_LR_SCHEDULER_TYPE=constant TRAIN_WARMUP_STEPS=0 TRAIN_MAX_STEPS=12 TRAIN_SAVE_STRATEGY=no"
)
"""The settings of the other trainers in `benchmarks.training`."""
PACKED = "TRAIN_PACKING=on TRAIN_SAVE_STRATEGY=no"
FORTY_GIB, SEVENTY_GIB, HUNDRED_GIB = 40, 70, 100
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
CURVE = {"fp32": 2e-3, "bf16": 3e-2}
GPU_TESTS = (
    "(fp32 or default or nf4 or int8 or every or varlen or sdpa or waits or plain_kernels or resumes or recorder or"
    " test_packing) and not planned_peak and not bench and not two_ and not killed"
)
"""The tests of `make test-gpu` that take only seconds."""
CONTEXT = "import torch; torch.zeros(1).cuda(); free, all = torch.cuda.mem_get_info(); print((all - free) >> 20)"


@dataclass(frozen=True, slots=True)
class Training:
    """A call of a training command."""

    words: str = ""
    command: str = "train"
    large: bool = False
    """Whether it trains the 8B model, not that of `configs/quickstart.yaml`."""
    layers: int = SHAPE["layers"]
    """Layers of the 8B model."""
    cpu: bool = False


TRAININGS: Mapping[str, Training] = {
    **{
        f"packed, {kind}": Training(f"{PACKED} MODEL_ATTN_IMPLEMENTATION={kind}")
        for kind in ("sdpa", "varlen", "flex_attention", "flash_attention_2")
    },
    "unpacked": Training("TRAIN_PACKING=off TRAIN_SAVE_STRATEGY=no MODEL_ATTN_IMPLEMENTATION=eager"),
    "cpu": Training("TRAIN_BF16=false", cpu=True),
    "fp32": Training("TRAIN_BF16=false"),
    "bf16": Training("TRAIN_BF16=true"),
    "QLoRA, nf4": Training(f"{SHORT} TUNING_MODE=qlora"),
    "QLoRA, int8": Training(f"{SHORT} TUNING_MODE=qlora TUNING_QUANTIZATION=int8"),
    "full": Training(f"{SHORT} TUNING_MODE=full TRAIN_LEARNING_RATE=1e-4"),
    "fp16": Training(f"{SHORT} TRAIN_FP16=true TRAIN_BF16=false"),
    "recomputation": Training(f"{SHORT} TRAIN_GRADIENT_CHECKPOINTING=true"),
    "Muon": Training(f"{SHORT} TUNING_MODE=full TRAIN_OPTIM=muon TRAIN_LEARNING_RATE=1e-3"),
    "8-bit AdamW": Training(f"{SHORT} TUNING_MODE=full TRAIN_OPTIM=adamw_8bit TRAIN_LEARNING_RATE=1e-4"),
    "DoRA": Training(f"{SHORT} TUNING_LORA_VARIANT=dora"),
    "offloaded inputs": Training(f"{SHORT} TRAIN_GRADIENT_CHECKPOINTING=true TRAIN_ACTIVATION_OFFLOAD=on"),
    "profiled": Training(f"{SHORT} TRAIN_PROFILE_STEPS=3"),
    "undisturbed": Training("TRAIN_MAX_STEPS=60"),
    "stopped": Training("TRAIN_MAX_STEPS=60"),
    "8B LoRA": Training(large=True),
    "8B LoRA, sdpa": Training("MODEL_ATTN_IMPLEMENTATION=sdpa", large=True),
    "8B LoRA, plain kernels": Training("TRAIN_KERNELS=off", large=True),
    "8B QLoRA": Training("TUNING_MODE=qlora", large=True),
    "8B QLoRA, int8": Training("TUNING_MODE=qlora TUNING_QUANTIZATION=int8 TRAIN_MAX_STEPS=6", large=True),
    "8B full": Training("TUNING_MODE=full TRAIN_MAX_STEPS=6", large=True),
    "8B full, 16 layers": Training("TUNING_MODE=full TRAIN_MAX_STEPS=6", large=True, layers=16),
    "out of memory": Training(f"{SHORT} TRAIN_BATCH_SIZE=32 TRAIN_GLOBAL_BATCH_SIZE=32 TRAIN_PACKING=off"),
    "generating": Training(f"{SHORT} TRAIN_EVAL_STRATEGY=steps TRAIN_EVAL_STEPS=10 TRAIN_PREDICT_WITH_GENERATE=true"),
    "8B LoRA, 4 rows a step": Training(COMPARED, large=True),
    "LoRA, 4 rows a step": Training(COMPARED),
    "FSDP2": Training(f"{SHORT} NUM_GPUS=1", "train-fsdp"),
    "FSDP2, QLoRA": Training(f"{SHORT} NUM_GPUS=1 TUNING_MODE=qlora", "train-fsdp"),
    "ZeRO-2": Training(f"{SHORT} NUM_GPUS=1", "train-deepspeed"),
    "ZeRO-3, offloaded": Training(
        f"{SHORT} NUM_GPUS=1 DEEPSPEED_CONFIG=deepspeed/zero3_offload.json", "train-deepspeed"
    ),
}
GOALS: Mapping[str, Mapping[str, tuple[int, float | None]]] = {
    "H200": {"8B LoRA": (15_000, None), "8B QLoRA": (8_000, None), "8B full": (9_000, None)},
    "H100": {"8B LoRA": (14_000, None), "8B QLoRA": (12_500, None), "8B full, 16 layers": (15_000, None)},
    "RTX4090": {"8B LoRA": (3_100, 16.0), "8B QLoRA": (2_400, 7.5)},
}
"""Card of the catalogue -> training -> tokens/s, and the most GiB allocated."""
TRL_GOAL = 0.6
STOP_SECONDS = 20
"""Seconds that a program may take to end before it is killed."""
MODES = ("QLoRA, nf4", "QLoRA, int8", "full", "fp16", "recomputation")
NEWER = ("Muon", "8-bit AdamW", "DoRA", "offloaded inputs")
OTHER_KERNELS = ("8B LoRA, sdpa", "8B LoRA, plain kernels", "8B QLoRA, int8")
SHARDED = ("FSDP2", "FSDP2, QLoRA", "ZeRO-2", "ZeRO-3, offloaded")


@dataclass(frozen=True, slots=True)
class Step:
    """A step, its name on the page, and its time limit."""

    title: str
    seconds: int
    rows: Callable[[Lab], Iterator[Row]]


class StepError(Exception):
    """A command did not end as expected; the text is its last error line."""


class SkippedError(Exception):
    """This GPU or environment lacks what the step needs."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement with its bound."""

    what: str
    measured: str
    bound: str = ""
    holds: bool | None = None
    """`None` without a bound."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run, read from its folder."""

    folder: Path

    @property
    def metrics(self) -> dict[str, Any]:
        return dict(read_json(self.folder / "training_metrics.json"))

    @property
    def plan(self) -> dict[str, Any]:
        return dict(read_json(self.folder / "plan.json"))

    def column(self, name: str) -> dict[int, float]:
        """Return step -> value of a column of the training rows."""
        rows = read_json_lines(self.folder / "metrics.jsonl")
        return {row["step"]: row[name] for row in rows if row.get("kind") == "train" and row.get(name) is not None}

    @property
    def tokens_per_second(self) -> float:
        """Median after the first two steps, in which kernels are chosen and memory is allocated."""
        return median(speed for step, speed in self.column("tokens_per_second").items() if step > 2)


@dataclass(kw_only=True, slots=True)
class Lab:
    """The folder, machine and deadline of the commands."""

    folder: Path
    card: str
    memory_bytes: int
    small: Path | None = None
    """A model to use instead of SmolLM2-135M-Instruct."""
    on_cpu: bool = False
    """With a CPU the large model is tiny too: this tests the steps, not a GPU."""
    patient: bool = False
    """Whether the limits of steps do not count: they are those of a card that no other step uses."""
    deadline: float = 0.0
    background: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Trainings that run in the background of the steps."""

    def words(self, training: Training) -> dict[str, str]:
        """Return the variables of a training."""
        words = dict(word.split("=", 1) for word in training.words.split())
        words["CONFIG"] = (
            str(self.model_folder(training.layers) / "8b.yaml") if training.large else "configs/quickstart.yaml"
        )
        if training.large and self.memory_bytes < FORTY_GIB * GIB:
            # The goals of such GPUs bound memory too.
            words = {"TRAIN_BATCH_SIZE": "1", "TRAIN_GRADIENT_CHECKPOINTING": "true"} | words
        if self.small and not training.large:
            words["MODEL_NAME"] = str(self.small)
        return words

    def model_folder(self, layers: int) -> Path:
        """Return the folder of the 8B model with this number of layers."""
        return self.folder if layers == SHAPE["layers"] else self.folder / f"{layers}-layers"

    def needs(self, gib: int) -> None:
        """Raise `SkippedError` on a smaller GPU."""
        if not self.on_cpu and self.memory_bytes < gib * GIB:
            raise SkippedError(f"needs a card of {gib} GiB")

    def call(
        self, *words: str, env: Mapping[str, str] | None = None, stop: Callable[[], bool] | None = None
    ) -> tuple[int, str, str]:
        """Run a Python program until it ends, or the step's time; return code, stdout, stderr.

        SIGTERM is sent when `stop` returns true.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process, late = started(words, env, out, err), False
            try:
                while process.poll() is None and not late:
                    time.sleep(0.01)
                    late = time.monotonic() > self.deadline
                    if stop and stop():
                        process.terminate()
                        stop = None
            finally:
                end(process)
            out.seek(0)
            err.seek(0)
            output = out.read(), err.read()
            if process.returncode:
                sys.stderr.write(f"{' '.join(words)}: code {process.returncode}\n{output[1][-2000:]}\n")
            if late:
                raise StepError(f"`{' '.join(words[:4])}` was stopped: the step's time was over")
            return process.returncode, *output

    def must(self, expected: int, *words: str, **options: Any) -> str:
        """Call a program that must end with this code (`options` as in `call`); return stdout. Raise `StepError`."""
        code, out, err = self.call(*words, **options)
        if code != expected:
            raise StepError(f"`{' '.join(words[1:3])}` ended with code {code}: {last_error(err or out)}")
        return out

    def program(self, command: str, words: Mapping[str, str], **options: Any) -> str:
        """Run `python -m sft_play COMMAND NAME=value ...`, which must succeed; return its stdout."""
        return self.must(0, "-m", "sft_play", command, *(f"{name}={value}" for name, value in words.items()), **options)

    def run(self, name: str) -> Run:
        """Return the run of this training."""
        return Run(self.folder / "runs" / slug(name))

    def started_anew(self, name: str) -> list[str]:
        """Return the command of a training, after removing an earlier run of this name."""
        shutil.rmtree(self.run(name).folder, ignore_errors=True)
        words = self.words(TRAININGS[name]) | {"RUN_NAME": slug(name)}
        return ["-m", "sft_play", TRAININGS[name].command, *(f"{key}={value}" for key, value in words.items())]

    def train(self, name: str, *, code: int = 0, env: Mapping[str, str] | None = None, **options: Any) -> Run:
        """Train under this name and return the run, without its 8B weights, since disks are small."""
        training, run = TRAININGS[name], self.run(name)
        self.must(code, *self.started_anew(name), env={**(HIDDEN if training.cpu else {}), **(env or {})}, **options)
        if training.large:
            shutil.rmtree(run.folder / "model", ignore_errors=True)
        return run

    def begin(self, name: str) -> None:
        """Train in the background, on half of the cores; `trained` waits for it."""
        words, threads = self.started_anew(name), str(max(1, (os.cpu_count() or 1) // 2))
        with (self.folder / f"{slug(name)}.log").open("w") as log:
            self.background[name] = started(words, {**HIDDEN, "OMP_NUM_THREADS": threads}, log, log)

    def trained(self, name: str) -> Run:
        """Return the run of an earlier step or of the background, or train it. Raise `StepError`."""
        run = self.run(name)
        while (process := self.background.get(name)) and process.poll() is None:
            if time.monotonic() > self.deadline:
                raise StepError(f"`{name}`, trained in the background, had not ended when the step's time was over")
            time.sleep(0.1)
        if process and process.returncode:
            log = (self.folder / f"{slug(name)}.log").read_text(encoding="utf-8")
            raise StepError(
                f"`{name}`, trained in the background, ended with code {process.returncode}: {last_error(log)}"
            )
        return run if (run.folder / "training_metrics.json").is_file() else self.train(name)

    def close(self) -> None:
        """End background trainings."""
        for process in self.background.values():
            end(process)


def started(words: Iterable[str], env: Mapping[str, str] | None, out: IO[str], err: IO[str]) -> subprocess.Popen[bytes]:
    """Start a Python program in a new process group."""
    return subprocess.Popen(
        [sys.executable, *words], env={**os.environ, **(env or {})}, stdout=out, stderr=err, start_new_session=True
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program: its launcher ends the workers and saves; if that takes too long, it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def slug(name: str) -> str:
    """Return the run name of a training."""
    return name.replace(", ", "-").replace(" ", "-").lower()


def last_error(text: str) -> str:
    """Return the last line with an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed nothing"
    return next((line for line in reversed(lines) if "rror:" in line), last)[:300]


def require(package: str) -> None:
    """Raise `SkippedError` if a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise SkippedError(f"`{package}` is not installed")


def close(what: str, first: Run, other: Run, most: float) -> Row:
    """Return a row with the largest difference between two loss curves."""
    mine, theirs = first.column("loss"), other.column("loss")
    found = max(abs(mine[step] - theirs[step]) for step in mine.keys() & theirs.keys())
    return Row(f"{what}: largest difference of a step's loss", f"{found:.1e}", f"<= {most:g}", found <= most)


def within_plan(name: str, run: Run) -> Row:
    """Return a row with the peak memory, bounded by the plan."""
    peak, planned = run.metrics["peak_memory_bytes"], run.plan["ranks"][0]["peak_bytes"]
    return Row(f"{name}: most GiB allocated", f"{peak / GIB:.2f}", f"<= {planned / GIB:.2f} (plan)", peak <= planned)


def learns(name: str, run: Run) -> Iterator[Row]:
    """Yield rows: whether the loss falls, and whether memory stays within the plan."""
    losses = list(run.column("loss").values())
    first, last = fmean(losses[:3]), fmean(losses[-3:])
    yield Row(
        f"{name}: loss, mean of the first and the last 3 steps", f"{first:.3f}, {last:.3f}", "falls", last < first
    )
    yield within_plan(name, run)


def each(lab: Lab, names: Iterable[str], rows: Callable[[str, Run], Iterator[Row]]) -> Iterator[Row]:
    """Train one after the other; a failure becomes a row, and the others continue."""
    for name in names:
        try:
            yield from rows(name, lab.train(name))
        except StepError as error:
            yield Row(name, str(error), "trains", False)


def machine(lab: Lab) -> Iterator[Row]:
    """Run `make doctor`, and measure the memory of a bare CUDA context."""
    code, out, err = lab.call("-m", "sft_play", "doctor", "JSON=1")
    if not out.strip():
        raise StepError(f"`doctor` ended with code {code}: {last_error(err)}")
    errors = [f["id"] for f in json.loads(out)["findings"] if f["severity"] == "error"]
    yield Row("errors that `make doctor` finds", ", ".join(errors) or "none", "none", not errors)
    code, out, err = lab.call("-c", CONTEXT)
    yield Row(
        "MiB in use on the card with one bare CUDA context, other programs' included", out.strip() or last_error(err)
    )


def large_model(lab: Lab) -> Iterator[Row]:
    """Write the 8B model and its rows."""
    yield weights_made(lab, SHAPE["layers"])


def weights_made(lab: Lab, layers: int) -> Row:
    """Write the 8B model with this number of layers, and its rows."""
    words = [f"{name}={value}" for name, value in (TINY_SHAPE if lab.on_cpu else SHAPE | {"layers": layers}).items()]
    folder = lab.model_folder(layers)
    folder.mkdir(parents=True, exist_ok=True)
    lab.must(0, "-m", "benchmarks.acceptance_model", str(folder), str(lab.small or embedded_folder()), *words)
    size = sum(path.stat().st_size for path in (folder / "m8b").glob("*.safetensors"))
    return Row("GiB of random bfloat16 weights", f"{size / GIB:.2f}")


def gpu_tests(lab: Lab) -> Iterator[Row]:
    """Run the quick tests of `make test-gpu`, including those of waits for the device."""
    require("xdist")
    words = (
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-k",
        GPU_TESTS,
        "-n",
        "4",
        "--dist",
        "loadfile",
        "tests/numerics",
        "tests/gpu",
    )
    code, out, err = lab.call("-m", *words)
    yield Row("the quick tests of `make test-gpu`", (out or err).strip().splitlines()[-1], "pass", code == 0)


def attention(lab: Lab) -> Iterator[Row]:
    """Compare packed rows under each attention with unpacked rows under eager attention."""
    alone, names = lab.train("unpacked"), [name for name in TRAININGS if name.startswith("packed")]
    if importlib.util.find_spec("flash_attn") is None:
        names.remove("packed, flash_attention_2")
        yield Row("packed, flash_attention_2", "skipped: `flash_attn` is not installed")

    def rows(name: str, run: Run) -> Iterator[Row]:
        yield close(f"{name}, and unpacked", run, alone, 3e-2)
        yield Row(f"{name}: tokens/s", f"{run.tokens_per_second:,.0f}")

    yield from each(lab, names, rows)


def both_devices(lab: Lab) -> Iterator[Row]:
    """Compare the same 30 steps on GPU and CPU."""

    def rows(name: str, run: Run) -> Iterator[Row]:
        yield close(f"{name} on GPU and CPU", run, lab.trained("cpu"), CURVE[name])

    yield from each(lab, ["fp32", "bf16"], rows)


def resumed(lab: Lab) -> Iterator[Row]:
    """Compare a run that is stopped by SIGTERM after step 15 and resumed with an undisturbed run."""
    undisturbed, run = lab.train("undisturbed"), lab.run("stopped")
    lab.train("stopped", code=143, stop=lambda: max(run.column("loss"), default=0) >= 15)
    yield Row("SIGTERM in mid-run: exit code", "143", "143", True)
    lab.program("resume", {"RUN": "stopped"})
    yield close("resumed and undisturbed", run, undisturbed, 1e-3)


def allocated(plan: Mapping[str, Any]) -> int:
    """Return the bytes that torch's allocator provides to the first rank of a plan."""
    return sum_without(plan["ranks"][0]["memory_bytes"])


def predicted(lab: Lab, *names: str) -> Iterator[Row]:
    """Compare memory by trace with two real steps on the longest rows (a probe).

    The probe's record is removed, since it would correct the trace.
    """
    probes = cache_folder() / "probes"
    for name in names:
        words, before = lab.words(TRAININGS[name]), set(probes.glob("*.json"))
        probe = json.loads(lab.program("plan", words | {"SOURCE": "probe", "JSON": "1"}))
        for path in set(probes.glob("*.json")) - before:
            path.unlink()
        planned, measured = (
            allocated(json.loads(lab.program("plan", words | {"SOURCE": "trace", "JSON": "1"}))),
            allocated(probe),
        )
        most = max(0.02 * measured, 100 * MIB)
        yield Row(
            f"{name}: GiB allocated, planned and measured",
            f"{planned / GIB:.2f}, {measured / GIB:.2f}",
            f"within {most / MIB:.0f} MiB",
            abs(planned - measured) <= most,
        )


def large_memory(lab: Lab) -> Iterator[Row]:
    """Compare planned and measured memory of the 8B model."""
    lab.needs(FORTY_GIB)
    yield from predicted(lab, "8B LoRA", "8B QLoRA", *(["8B full"] if lab.memory_bytes >= HUNDRED_GIB * GIB else []))


def fast(lab: Lab, gib: int, *names: str) -> Iterator[Row]:
    """Measure tokens/s with plan, goal and MFU: 6 operations per weight and token, 4 with adapters, plus attention."""
    lab.needs(gib)
    card = find_card(lab.card)

    def rows(name: str, run: Run) -> Iterator[Row]:
        speed, metrics, plan = run.tokens_per_second, run.metrics, run.plan
        length = metrics["tokens"] / (metrics["steps"] * plan["global_batch_size"])
        shape = SHAPE | {"layers": TRAININGS[name].layers}
        operations = (6 if "full" in name else 4) * parameters(shape) + 6 * shape["layers"] * shape["hidden"] * length
        details = f", MFU {operations * speed / card.peak_flops:.0%}" if card and card.peak_flops else ""
        details += f" (plan {plan['tokens_per_second']:,.0f})" if plan["tokens_per_second"] else ""
        least, most = GOALS.get(card.name if card else "", {}).get(name, (None, None))
        bound, holds = (f">= {least:,}", speed >= least) if least else ("", None)
        yield Row(f"{name}: tokens/s", f"{speed:,.0f}{details}", bound, holds)
        yield within_plan(name, run)
        if most:
            peak = metrics["peak_memory_bytes"] / GIB
            yield Row(f"{name}: GiB allocated", f"{peak:.2f}", f"<= {most}", peak <= most)

    yield from each(lab, names, rows)


def every_weight(lab: Lab) -> Iterator[Row]:
    """Measure tokens/s of full tuning: of all layers, on an 80 GB GPU of half of them."""
    layers = 32 if lab.on_cpu or lab.memory_bytes >= HUNDRED_GIB * GIB else 16
    lab.needs(SEVENTY_GIB)
    if layers == 16:
        yield weights_made(lab, layers)
    yield from fast(lab, SEVENTY_GIB, "8B full" if layers == 32 else "8B full, 16 layers")


def out_of_memory(lab: Lab) -> Iterator[Row]:
    """Run out of memory for real: torch may allocate only the weights and 38 % of the rest.

    Batches need 55 % (flattened) to 96 % (padded) of the planned peak, so the micro-batch is halved once or twice.
    """
    words = lab.words(TRAININGS["out of memory"])
    plan = json.loads(lab.program("plan", words | {"JSON": "1"}))
    fixed = sum(
        plan["ranks"][0]["memory_bytes"].get(name, 0) for name in ("frozen", "adapters", "gradients", "optimizer")
    )
    share = (fixed + 0.38 * (allocated(plan) - fixed)) / lab.memory_bytes
    limit = f"expandable_segments:True,per_process_memory_fraction:{share:.5f}"
    run = lab.train("out of memory", env={"PYTORCH_ALLOC_CONF": limit})
    count, steps = len(run.metrics["recoveries"]), len(run.column("loss"))
    yield Row("recoveries", f"{count}, micro-batch 32 -> {run.plan['ranks'][0]['micro_batch']}", ">= 1", count >= 1)
    yield Row("steps after all", str(steps), words["TRAIN_MAX_STEPS"], steps == int(words["TRAIN_MAX_STEPS"]))


def evaluation(lab: Lab) -> Iterator[Row]:
    """Compare scores on GPU and CPU; measure answers/s, answers while training, and a chat."""
    scores = []
    for name, env in (("fp32", {}), ("cpu", HIDDEN)):
        lab.trained(name)
        scores.append(json.loads(lab.program("eval", {"RUN": name, "EVAL_SAMPLES": "80", "JSON": "1"}, env=env)))
    for what, values, most in (
        ("held-out loss", [part["loss"] for part in scores], 0.01),
        ("ROUGE-L", [part["rougeL"]["mean"] for part in scores], 0.02),
    ):
        yield Row(
            f"{what} on GPU and CPU",
            ", ".join(f"{v:.4f}" for v in values),
            f"within {most}",
            abs(values[0] - values[1]) <= most,
        )
    yield Row("answers/s", f"{scores[0]['speed']['answers_per_second']:.1f}")
    yield from each(lab, ["generating"], learns)
    answer = lab.program(
        "infer", {"RUN": "fp32", "PROMPT": "What does this Python function do: def area(r): return 3.14 * r * r"}
    )
    yield Row("`make infer`: letters answered", str(len(answer.strip())))


def forecast_by_run(lab: Lab) -> Iterator[Row]:
    """Run `make bench` twice; the first forecasts the second."""
    lab.needs(FORTY_GIB)
    options = {"CONFIG": lab.words(TRAININGS["8B LoRA"])["CONFIG"], "JSON": "1"}
    for what in ("first", "by the first"):
        bench = json.loads(lab.program("bench", options))
        measured, forecast = bench["measured"]["steady_tokens_per_second"], bench["plan"]["tokens_per_second"]
        off = abs(measured / forecast - 1)
        bound, holds = ("within 15 % of the plan", off <= 0.15) if what == "by the first" else ("", None)
        yield Row(f"tokens/s, {what} (plan {forecast:,.0f})", f"{measured:,.0f}", bound, holds)


def compared_with_trl(lab: Lab) -> Iterator[Row]:
    """Compare training time with TRL's `SFTTrainer` and its defaults, on the same rows, order and adapters."""
    require("trl")
    run = lab.train(
        "8B LoRA, 4 rows a step" if lab.on_cpu or lab.memory_bytes >= FORTY_GIB * GIB else "LoRA, 4 rows a step"
    )
    losses = list(run.column("loss").values())
    with tempfile.TemporaryDirectory(dir=lab.folder) as scratch:
        spec, result = Path(scratch) / "spec.json", Path(scratch) / "result.json"
        write_json(spec, spec_of(RunFolder(run.folder), Path(scratch), len(losses)))
        lab.must(0, "-m", "benchmarks.training", "trl", str(spec), str(result))
        theirs = read_json(result)
    seconds, apart = (
        run.metrics["train_runtime"],
        max(abs(a - b) for a, b in zip(losses, theirs["losses"], strict=True)),
    )
    share = seconds / theirs["seconds"]
    measured = f"{share:.2f} ({seconds:.1f} s, {theirs['seconds']:.1f} s)"
    yield Row("training time as a share of TRL's", measured, f"<= {TRL_GOAL}", share <= TRL_GOAL)
    yield Row("largest difference of a step's loss to TRL's", f"{apart:.1e}", "<= 0.03", apart <= 0.03)


def newer_ways(lab: Lab) -> Iterator[Row]:
    """Train with Muon, 8-bit AdamW, DoRA and offloaded inputs; profile; train on from an adapter."""
    yield from each(lab, NEWER, learns)
    yield close("inputs offloaded and kept", lab.run("offloaded inputs"), lab.trained("recomputation"), 1e-2)
    parent = lab.train("profiled")
    profile = json.loads(lab.program("profile", {"RUN": "profiled", "JSON": "1"}))
    computing = profile["rank0"]["shares"]["kernels"]
    yield Row("profiled: share of the time in kernels", f"{computing:.0%}", "> 0", computing > 0)
    before = list(parent.column("loss").values())
    words = lab.words(TRAININGS["profiled"]) | {"RUN_NAME": "trained-on", "MODEL_ADAPTER": "profiled"}
    shutil.rmtree(lab.run("trained on").folder, ignore_errors=True)
    lab.program("train", words)
    after = list(lab.run("trained on").column("loss").values())
    yield Row(
        "trained on: first losses of the parent and of it",
        f"{before[0]:.3f}, {after[0]:.3f}",
        "falls",
        after[0] < before[0],
    )


STEPS: Mapping[int, Step] = {
    0: Step("the machine", 60, machine),
    1: Step("a model of 8B weights, made here", 150, large_model),
    8: Step("8B: LoRA", 120, lambda lab: fast(lab, 20, "8B LoRA")),
    9: Step("8B: QLoRA, nf4", 120, lambda lab: fast(lab, 12, "8B QLoRA")),
    4: Step("losses on GPU and CPU", 150, both_devices),
    5: Step("nf4, int8, every weight, fp16, recomputation", 240, lambda lab: each(lab, MODES, learns)),
    6: Step("stop and resume", 120, resumed),
    12: Step("out of memory, and the recovery", 120, out_of_memory),
    7: Step("memory, planned and measured", 150, lambda lab: predicted(lab, "bf16", "recomputation", "full")),
    2: Step("quick tests that need a GPU", 180, gpu_tests),
    10: Step("8B: every weight", 240, every_weight),
    16: Step("8B LoRA compared with TRL", 300, compared_with_trl),
    13: Step("evaluation on GPU and CPU", 180, evaluation),
    3: Step("packing under each attention", 150, attention),
    14: Step("one rank under FSDP2 and ZeRO", 200, lambda lab: each(lab, SHARDED, learns)),
    11: Step("8B: memory, planned and measured", 240, large_memory),
    15: Step("forecast by a run", 180, forecast_by_run),
    18: Step("newer ways to train", 240, newer_ways),
    17: Step("8B: other kernels, int8", 240, lambda lab: fast(lab, 20, *OTHER_KERNELS)),
}
"""Ordered by importance to a user, since a call's time may end before the last step."""
