"""`make plan`, and the plan of a run that a scheduler starts on other machines; neither starts nor writes anything."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from sft_play.config.call import Call
from sft_play.config.data_rules import hint_absent, is_glob, names_file
from sft_play.config.layers import Override
from sft_play.config.load import LoadedConfig, override_config, save_config
from sft_play.config.schema import Config
from sft_play.errors import HardwareError, UserError, typed_here
from sft_play.files import is_file_name, typed_path
from sft_play.launch.attempt import obtain_prepared, probe
from sft_play.launch.job import LaunchOptions, job_of, read_options, refuse_early, refuse_files
from sft_play.launch.process import end_by_signals
from sft_play.launch.resume import options_of_run
from sft_play.launch.run_folder import find_run, last_plan
from sft_play.plan.architecture import shape_of
from sft_play.plan.detect import compare_versions
from sft_play.plan.hardware import Hardware
from sft_play.plan.plan import CommandStrategy, LaunchRequest, Plan, command_of
from sft_play.plan.request import DoesNotFitError
from sft_play.plan.show import (
    misfit_json,
    parse_price,
    show_misfit,
    show_plan,
    with_cost,
)
from sft_play.plan.sources import Source, hardware_of, needs_several, parse_source, plan_for
from sft_play.runs.folder import RunFolder, cache_folder
from sft_play.runs.prepared import Prepared, sources_of
from sft_play.text import as_typed, tell

FSDP2 = "LAUNCH_STRATEGY=fsdp2"
"""What `make train-fsdp` means by its name."""
SCHEDULERS = ("slurm", "kubernetes")
"""Commands that describe a job: without `NUM_NODES` it has one machine."""


def main(call: Call) -> int:
    """Print the plan, with `JSON=1` as plan.json, and return 0; show the parts of a misfit before its error."""
    if call.options.get("RUN"):
        find_run(call.options["RUN"])  # reports an unknown run before its missing configuration
    rehearsal = rehearse(call, parse_source(call.options.get("SOURCE"), "known"))
    plan = rehearsal.plan
    for notice in rehearsal.options.notices:
        tell(f"note: {notice}")
    _warn_of_versions(rehearsal)
    if call.json:
        print(json.dumps(plan.to_json(), indent=2))
        return 0
    print(show_plan(plan, why=wants_reasons(call), details=True))
    if not rehearsal.hardware.described:
        print(f"\n  to run it: {_command(call, rehearsal)}")
    return 0


def _warn_of_versions(rehearsal: Rehearsal) -> None:
    """Report what keeps torch from using this machine's GPUs, by its version and the driver's."""
    for problem in compare_versions(rehearsal.hardware) if rehearsal.plan.device == "cuda" else ():
        tell(f"warning: {problem.text}\nhint: {problem.remedy}")


def wants_reasons(call: Call) -> bool:
    """Return whether a command that shows a plan before any run gives its reasons: unless `WHY=0`."""
    return call.flag("WHY") or "WHY" not in call.options


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """What is known about a run before its machines are available."""

    loaded: LoadedConfig
    options: LaunchOptions
    hardware: Hardware
    plan: Plan
    absent: tuple[str, ...]
    """Paths of data that are not on this machine."""

    @property
    def processes(self) -> int:
        """Number of ranks per node."""
        return self.plan.world_size // self.plan.num_nodes

    @property
    def target(self) -> str:
        """The command that trains with this plan, such as `train-distributed`."""
        return command_of(self.plan.strategy)


def rehearse(call: Call, source: Source = "known", seen: tuple[str, ...] = ()) -> Rehearsal:
    """Return the configuration and the plan of a call, for `HARDWARE` or for hardware like this machine's.

    Paths of data that begin with one of `seen` are looked for only where the run trains. Raise `UserError`, after
    showing the parts of what does not fit.
    """
    price = parse_price(call.options.get("PRICE_PER_HOUR"))
    options, loaded = read_options(call, call.load_config(), "auto", rehearsal=True)
    if "RUN" in call.options and not (options.accelerate_config or options.deepspeed):
        run = find_run(call.options["RUN"])
        if run.plan.is_file():
            options = replace(options_of_run(call, run, last_plan(run), rehearsal=True), notices=options.notices)
    hardware = hardware_of(call)  # only now: an accelerate config may ask for the CPU
    if options.accelerate_config and options.cpu and hardware.described and hardware.kind != "cpu":
        hint = "HARDWARE=cpu, or another file"
        raise UserError(f"`HARDWARE` has GPUs, and `{options.accelerate_config}` asks for the CPU", hint=hint)
    request = options.request
    hardware, request = _machines(call, hardware, request)
    if request.command_strategy == "auto" and not needs_several(loaded, hardware, request):
        request = replace(request, command_strategy="single")
    options = replace(options, request=request)
    try:
        if source == "probe":
            _probe(call, loaded, options, hardware)
        plan = plan_for(loaded, hardware, request, _prepared(call), source)
    except DoesNotFitError as error:
        if call.command in SCHEDULERS or hardware.described:  # a command to train would train on this machine
            ways = error.remedies
            error.remedies = tuple(replace(w, command="", variables=w.variables or FSDP2) for w in ways)
        print(json.dumps(misfit_json(error), indent=2) if call.json else show_misfit(error) + "\n", flush=True)
        raise error.without_remedies() from None
    refuse_files(options, plan, loaded.config, shape_of(loaded.config.model))
    paths = [source.path for source in sources_of(loaded.config) if names_file(source.path)]
    absent = tuple(path for path in paths if not (is_glob(path) or path.startswith(seen) or typed_path(path).exists()))
    for path in absent:
        tell(f"warning: the data `{path}` are not on this machine\nhint: {hint_absent(path)}")
    plan = with_cost(plan, hardware, price)
    return Rehearsal(loaded=loaded, options=options, hardware=hardware, plan=plan, absent=absent)


def local_paths(config: Config) -> list[str]:
    """Return the paths of data, models and the chat template that are files or folders of this machine, sorted."""
    sources = (source.path for source in sources_of(config))
    paths = {config.model.name, config.model.tokenizer, config.data.chat_template, *sources} - {None}
    return sorted(
        text
        for text in paths
        if text and (text.startswith(("/", "~", "./", "../")) or (is_file_name(text) and typed_path(text).exists()))
    )


def _machines(call: Call, hardware: Hardware, request: LaunchRequest) -> tuple[Hardware, LaunchRequest]:
    """Return hardware and request for the machines that `HARDWARE` and `NUM_NODES` describe. Raise `HardwareError`.

    Cards on a network are in a machine each, unless `NUM_NODES` or a scheduler says how many machines there are.
    """
    asked = request.num_nodes if "NUM_NODES" in call.options or call.command in SCHEDULERS else None
    if hardware.nodes > 1:
        if "NUM_NODES" in call.options and asked != hardware.nodes:
            text = f"`HARDWARE` describes {hardware.nodes} machines, and NUM_NODES is {asked}"
            raise HardwareError(text, hint="give the number of machines once")
        return hardware, replace(request, num_nodes=hardware.nodes)
    cards = len(hardware.devices)
    if not (asked == 1 and hardware.described and hardware.network and cards > 1):
        return hardware, request
    if hardware.listed == cards:
        raise HardwareError(
            f"`HARDWARE` lists {cards} cards joined by a network, one in each machine, and this is for one machine",
            hint=f"NUM_NODES={cards}; for one machine with all of them, HARDWARE without `@`",
        )
    return replace(hardware, network=None), request


def rehearse_for_nodes(call: Call, seen: tuple[str, ...] = ()) -> Rehearsal:
    """Return the rehearsal whose configuration alone makes this plan when the nodes meet and plan again."""
    try:
        rehearsal = rehearse(call, seen=seen)
    except DoesNotFitError as error:
        if "HARDWARE" not in call.options:
            nodes = "planned for nodes like this machine; HARDWARE=4xH100 describes the cluster's"
            error.hint = "\n      ".join(filter(None, [nodes, error.hint]))
        raise
    _warn_of_versions(rehearsal)
    if not (rehearsal.hardware.network and "HARDWARE" in call.options):
        return rehearsal
    origin = f"HARDWARE={call.options['HARDWARE']}"
    network = Override(key="launch.network", text=rehearsal.hardware.network, origin=origin)
    return replace(rehearsal, loaded=override_config(rehearsal.loaded, [network]))


def _probe(call: Call, loaded: LoadedConfig, options: LaunchOptions, hardware: Hardware) -> None:
    """Prepare model and data, and probe the plan on this machine, which caches the measurements. Raise `UserError`."""
    if hardware.described or options.request.num_nodes > 1:
        raise UserError(
            "`SOURCE=probe` measures on this machine, and the plan is for other hardware",
            hint="SOURCE=trace plans for absent hardware",
        )
    cache_folder().mkdir(parents=True, exist_ok=True)
    job = job_of(call, loaded, options)
    refuse_early(job)
    with end_by_signals(), tempfile.TemporaryDirectory(prefix="probe-", dir=cache_folder()) as folder:
        run = RunFolder(Path(folder) / "run")
        save_config(loaded, run.config)
        obtain_prepared(run)
        probe(job, run, Prepared.load(run.prepared))


def _prepared(call: Call) -> Prepared | None:
    """Return the facts of `RUN`'s preparation, unless an override changes model or data."""
    changed = any(override.key.startswith(("model.", "data.")) for override in call.overrides)
    if not call.options.get("RUN") or changed:
        return None
    run = find_run(call.options["RUN"])
    return Prepared.load(run.prepared) if run.prepared.is_file() else None


def _command(call: Call, rehearsal: Rehearsal) -> str:
    """Return the command that would train with this plan."""
    target, accelerate = rehearsal.target, rehearsal.options.accelerate_config
    if accelerate and rehearsal.loaded.config.launch.strategy == "auto" and "DEEPSPEED_CONFIG" not in call.options:
        target = target.replace("deepspeed", "distributed")
    values = {"ACCELERATE_CONFIG": str(accelerate or ""), **call.options}
    names = ("CONFIG", "NUM_GPUS", "NUM_NODES", "DEEPSPEED_CONFIG", "ACCELERATE_CONFIG")
    options = [f"{name}={values[name]}" for name in names if values.get(name)]
    overrides = (override.origin.removeprefix("make ") for override in call.overrides)
    return typed_here(" ".join(["make", target, *map(as_typed, (*options, *overrides))]))


MEASURED_ALONE = {
    "train.save_strategy": "no",
    "train.eval_strategy": "no",
    "train.load_best_model_at_end": "false",
    "train.report_to": "none",
}
"""Values of keys for a run that is made for its measurements."""


def usual_strategy(call: Call) -> CommandStrategy:
    """Return the strategy of a command that implies none: one process, or several with several GPUs or if asked for."""
    options, loaded = read_options(call, call.load_config(), "auto", rehearsal=True)
    return "auto" if needs_several(loaded, hardware_of(call), options.request) else "single"
