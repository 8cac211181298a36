"""`python -m tests.fake_cuda.worker JOBS.json [GUARD]`: runs the project's worker for each job, and reports what it had
and where it waited.

A job is {"run": folder, "arguments": [of accelerate launch], "environment": {...}, "report": file}, and runs in a
process forked from here. With `GUARD` (see `guard.py`) it runs on the fake GPUs of the machine in `NVML_DOUBLE`: torch
and the worker's modules are imported once, then one job runs after another. Without, all run at once on the devices
that are really here.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock


def main(jobs: str, guard: str = "") -> None:
    """Run the jobs; each writes its report."""
    if guard:
        ctypes.CDLL(guard)  # before torch looks for its hooks
        importlib.import_module("sft_play.model.load")
        importlib.import_module("sft_play.training.trainer")
    children = []
    for job in json.loads(Path(jobs).read_text(encoding="utf-8")):
        children.append(os.fork())
        if children[-1] == 0:
            _end(job, fake=bool(guard))
        if guard:
            os.waitpid(children.pop(), 0)
    for child in children:
        os.waitpid(child, 0)


def _end(job: dict[str, Any], *, fake: bool) -> NoReturn:
    """Run a job in this process, which is its own, and write errors into its report."""
    log = os.open(f"{job['report']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.environ.update(_launched(job["arguments"]))
    sys.path[:0] = [part for part in job["environment"].get("PYTHONPATH", "").split(":") if part]
    sys.modules.pop("pynvml", None)  # torch has imported the real one; the job's driver is the double on its path
    report: dict[str, Any] = {}
    try:
        _run(job, report, fake=fake)
    except BaseException:  # noqa: BLE001 - all of it stands in the report
        report["error"] = traceback.format_exc()
    Path(job["report"]).write_text(json.dumps(report), encoding="utf-8")
    os._exit(0)


def _launched(arguments: list[str]) -> dict[str, str]:
    """Return what `accelerate launch` with these arguments hands to its workers."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    options = _validate_launch_command(launch_command_parser().parse_args(arguments))[0]
    if "WORLD_SIZE" not in os.environ:
        return prepare_simple_launcher_cmd_env(options)[1]
    ranks = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    return prepare_multi_gpu_env(options) | ranks


def _run(job: dict[str, Any], report: dict[str, Any], *, fake: bool) -> None:
    """Run the whole worker, from its arguments to the published model."""
    import torch

    import sft_play.train as worker
    from sft_play.runs.folder import RunFolder
    from sft_play.training.process import Activity
    from sft_play.training.stop_request import StopRequest
    from tests.fake_cuda.gpus import fake_gpus, visible
    from tests.fake_cuda.waits import DeviceWaits, Waits

    run, waits = RunFolder(Path(job["run"])), Waits() if fake else DeviceWaits()
    with ExitStack() as stack:
        if fake:
            cards = visible(json.loads(Path(os.environ["NVML_DOUBLE"]).read_text(encoding="utf-8")), os.environ)
            report["visible"] = [card.uuid for card in cards]
            report["contexts"] = stack.enter_context(fake_gpus(cards))
            stack.enter_context(fake_peers(report))
            stack.enter_context(fake_weights())
        stack.enter_context(watched(waits, report))
        stack.enter_context(waits)
        report["code"] = worker.work_with_heartbeat(StopRequest(run=run, rank=0, activity=Activity()), None, None)
    if not fake and torch.cuda.is_available():
        report["contexts"] = [
            card for card in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(card)
        ]
    report["waits"] = [
        {"phase": key[0], "what": key[1], "where": key[2], "count": count} for key, count in waits.log.items()
    ]
    for name in ("matmuls", "attention"):
        counts = getattr(waits, name)
        report[name] = {
            phase: {what: n for (p, what), n in counts.items() if p == phase} for phase in ("forward", "backward")
        }


@contextmanager
def fake_peers(report: dict[str, Any]) -> Iterator[None]:
    """Stand in for the other ranks: collective operations end at once, and DDP averages nothing."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from sft_play.training.ranks import Ranks

    class Replica(torch.nn.Module):
        """What the worker sees of `DistributedDataParallel`, whose C++ part would read the values of parameters."""

        def __init__(self, module: Any, **named: Any) -> None:
            super().__init__()
            self.module = module
            report["ddp"] = named["device_ids"]

        def forward(self, *arguments: Any, **named: Any) -> Any:
            return self.module(*arguments, **named)

        def no_sync(self) -> Any:
            return nullcontext()

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=world)
    # What peers say is read as JSON out of a tensor's bytes, and a fake tensor has none. It replaces no logic: each
    # rank says what this one does.
    with (
        mock.patch("torch.nn.parallel.DistributedDataParallel", Replica),
        mock.patch.object(Ranks, "gather", lambda self, value: [value] * self.world),
        mock.patch.object(Ranks, "broadcast", lambda _, value: value),
    ):
        yield


@contextmanager
def fake_weights() -> Iterator[None]:
    """Read models on the CPU, then replace each weight by an empty fake one on its device; saved weights are zeros."""
    import torch
    from peft import PeftModel
    from torch.utils._python_dispatch import _disable_current_modes
    from transformers import AutoModelForCausalLM, PreTrainedModel

    read = AutoModelForCausalLM.from_pretrained

    def from_pretrained(folder: str, *, device_map: Any = None, attn_implementation: str, **arguments: Any) -> Any:
        with _disable_current_modes():
            model, info = read(folder, attn_implementation="sdpa", **arguments)
        to, weights = (device_map or {"": "cpu"})[""], {}
        for module in model.modules():
            for kind in (module._parameters, module._buffers):
                for name, real in kind.items():
                    if real is not None:
                        if id(real) not in weights:  # tied weights stay one
                            fake = torch.empty(real.shape, dtype=real.dtype, device=to)
                            weights[id(real)] = (
                                torch.nn.Parameter(fake, requires_grad=real.requires_grad)
                                if kind is module._parameters
                                else fake
                            )
                        kind[name] = weights[id(real)]
            if hasattr(module, "config"):
                module.config._attn_implementation_internal = attn_implementation
        if device_map:
            model.hf_device_map = device_map
        return model, info

    def saving(save: Any) -> Any:
        def save_pretrained(self: Any, folder: str, *, state_dict: dict[str, Any], **named: Any) -> Any:
            with _disable_current_modes():
                storages = {name: tensor.untyped_storage()._cdata for name, tensor in state_dict.items()}
                weights = {
                    storages[name]: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state_dict.items()
                }
                return save(
                    self, folder, state_dict={name: weights[storage] for name, storage in storages.items()}, **named
                )

        return save_pretrained

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(AutoModelForCausalLM, "from_pretrained", from_pretrained))
        for kind in (PreTrainedModel, PeftModel):
            stack.enter_context(mock.patch.object(kind, "save_pretrained", saving(kind.save_pretrained)))
        yield


@contextmanager
def watched(waits: Any, report: dict[str, Any]) -> Iterator[None]:
    """Track the phases of a step, and report the trainer's state at its beginning and end."""
    import torch
    from accelerate import Accelerator

    from sft_play.training.pipeline import Pipeline
    from sft_play.training.trainer import SftTrainer

    def phase(name: str, function: Any, after: str) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            waits.phase = name
            try:
                return function(*arguments, **named)
            finally:
                waits.phase = after

        return called

    train = SftTrainer.train

    def trained(self: Any, *arguments: Any, **named: Any) -> Any:
        result = train(self, *arguments, **named)
        report.update(facts(self))
        return result

    def attention(*arguments: Any, **named: Any) -> Any:
        waits.attention[waits.phase, "sdpa"] += 1
        return plain(*arguments, **named)

    plain = torch.nn.functional.scaled_dot_product_attention
    with (
        mock.patch.object(SftTrainer, "train", trained),
        mock.patch.object(SftTrainer, "training_step", phase("forward", SftTrainer.training_step, "step")),
        mock.patch.object(Accelerator, "backward", phase("backward", Accelerator.backward, "forward")),
        mock.patch.object(Pipeline, "_backward", phase("backward", Pipeline._backward, "forward")),
        mock.patch.object(
            SftTrainer, "_get_num_items_in_batch", phase("begin", SftTrainer._get_num_items_in_batch, "step")
        ),
        mock.patch("torch.nn.functional.scaled_dot_product_attention", attention),
    ):
        yield


def kind(tensor: Any) -> str:
    """Return device and type, such as `cuda:0 bfloat16`."""
    return f"{tensor.device} {tensor.dtype}".replace("torch.", "")


def facts(trainer: Any) -> dict[str, Any]:
    """Return a trained trainer's devices, types and wrappers."""
    import torch

    engine = trainer.optimizer.optimizer
    states = [value for state in engine.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    scaler = trainer.accelerator.scaler
    return {
        "steps": trainer.state.global_step,
        "n_gpu": trainer.args.n_gpu,
        "data_parallel": isinstance(trainer.model_wrapped, torch.nn.DataParallel),
        "optimizer": type(engine).__name__,
        "fused": bool(engine.param_groups[0].get("fused")),
        "parameters": Counter(
            f"{'trained' if p.requires_grad else 'frozen'} {kind(p)}" for p in trainer.model.parameters()
        ),
        "states": Counter(map(kind, states)),
        "scaler": type(scaler).__name__ if scaler is not None and scaler.is_enabled() else None,
        "mixed_precision": trainer.accelerator.mixed_precision,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
