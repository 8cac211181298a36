"""`make card RUN=` and `make push RUN= REPO=`: write a run's model card, and upload to the hub (only with `YES=1`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.load import read_config
from sft_play.config.metrics import label_of_metric
from sft_play.errors import CheckpointError, DataError, HardwareError, UserError, typed_here
from sft_play.files import file_sha256, read_object, typed_path, write_text
from sft_play.launch.run_folder import find_named_run
from sft_play.launch.runs import summary_of
from sft_play.plan.plan import Plan
from sft_play.runs.adapters import MERGED, ancestors_of
from sft_play.runs.checkpoints import kind_of, label_of, model_files, weight_files, weights_folder
from sft_play.runs.folder import RunFolder, metric_rows, metrics_of, of_memory, read_scores
from sft_play.runs.gate import read_facts
from sft_play.runs.prepared import Prepared, common_system
from sft_play.runs.stamp import MADE, Stamp
from sft_play.text import duration, gib, plural, tell

CARD, ADAPTER = "README.md", "adapter_config.json"
PUSHED = re.compile(
    r"(adapter_model|model)[\w.-]*\.safetensors(\.index\.json)?"
    r"|[\w.-]+\.(model|jinja)|(vocab|merges)\.txt|(LICEN[CS]E|NOTICE)[\w.-]*"
    r"|(adapter_config|config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|chat_template|preprocessor_config|processor_config|tekken)\.json"
)
"""Names of the files that are uploaded; other files next to the weights are not."""
TOKEN_HINT = "set HF_TOKEN to a token with write access (huggingface.co/settings/tokens), or type `hf auth login`"
HUB_ADDRESS = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)|([^/]+/[^/]+)/$")
MOST_SOURCES = 20
COPY = (
    "It was trained on a copy of the base whose weights were quantised to 4 bits (Q4_1), not on the hub's; any scores"
    " are of that copy too.\n"
)


def main(call: Call) -> int:
    """Write the card into the model's folder, or to `OUT`."""
    run, weights = _weights(call)
    path = typed_path(call.options["OUT"]) if call.options.get("OUT") else weights / CARD
    write_text(path, card_of(run, weights))
    if note := _base_note(run, weights):
        tell(note)
    return call.show({"run": str(run.path), "card": str(path)}, f"card: {path}")


def push(call: Call) -> int:
    """Show what would be uploaded and where; upload it with `YES=1`, and only then ask the hub."""
    repo = call.options.get("REPO")
    if not repo:
        raise UserError("`make push` needs `REPO=owner/name`", hint="where on the hub the model goes; YES=1 uploads it")
    private = call.flag("PRIVATE") or "PRIVATE" not in call.options
    run, weights = _weights(call)
    if call.flag("MERGED"):
        weights = _merged(run, weights)
    elif kind_of(weights) == "adapter" and Prepared.load(run.prepared).model.source == MADE:
        raise UserError(
            "the adapter's base was made on this machine, and nobody else has it",
            hint=f"make merge RUN={run.typed}, then push all weights: make push RUN={run.typed} REPO={repo} MERGED=1",
        )
    files = {
        path.name: _without_paths(path, run, weights) if path.suffix == ".json" else path
        for path in model_files(weights)
        if PUSHED.fullmatch(path.name)
    }
    card = card_of(run, weights)
    _check_name(repo)
    facts = {
        "repo": repo,
        "private": private,
        "files": {
            CARD: len(card.encode()),
            **{
                name: len(content) if isinstance(content, bytes) else content.stat().st_size
                for name, content in files.items()
            },
        },
        "note": _base_note(run, weights),
    }
    if not call.json:
        print(typed_here("\n".join(_described(facts, run, weights))), flush=True)
    if not call.flag("YES"):
        return call.show({**facts, "card": card, "uploaded": None}, f"\n{card}\nnothing was uploaded; YES=1 does it")
    commit = _upload(repo, private, f"{run.name}, {label_of(run, weights)}", {CARD: card.encode(), **files})
    return call.show({**facts, "uploaded": commit}, f"uploaded: {commit}")


def _without_paths(path: Path, run: RunFolder, weights: Path) -> Path | bytes:
    """Return a file's content with the base named as in the card, not by a path, or the path if nothing changes."""
    stamp, prepared = Stamp.load(weights), Prepared.load(run.prepared)
    if path.name == ADAPTER:
        settings = read_object(path) | {"base_model_name_or_path": stamp.public_base[0]}
        return f"{json.dumps(settings, indent=2)}\n".encode()
    text = path.read_text(encoding="utf-8")
    folders = {prepared.model.path, str(weights), str(run.path), str(run.path.resolve())}
    if not stamp.public_base[1]:
        folders |= {stamp.base_model, str(Path(stamp.base_model).resolve())}
    public = text
    for folder in sorted((folder for folder in folders if "/" in folder), key=len, reverse=True):
        public = public.replace(json.dumps(folder), json.dumps(stamp.public_base[0]))
    return path if public == text else public.encode()


def _base_note(run: RunFolder, weights: Path) -> str | None:
    """Return why nobody else can load adapters, with remedies, or `None` if the base is on the hub."""
    base, on_hub = Stamp.load(weights).public_base
    if kind_of(weights) != "adapter" or on_hub:
        return None
    merge = "" if (run.path / MERGED).is_dir() else f"make merge RUN={run.typed} && "
    return (
        f"note: nobody else can load these adapters: their base, `{base}`, is a folder of this machine; publish that"
        f" too and name it in {ADAPTER}, or push all weights: {merge}make push RUN={run.typed} REPO=owner/name MERGED=1"
    )


def _merged(run: RunFolder, weights: Path) -> Path:
    """Return the folder into which `make merge` merged these weights. Raise `CheckpointError`."""
    folder, hint = run.path / MERGED, f"make merge RUN={run.typed}"
    if not (folder / "stamp.json").is_file():
        raise CheckpointError("there are no merged weights", place=str(folder), hint=hint)
    source = read_object(folder / "stamp.json").get("merged_from")
    if isinstance(source, dict) and source.get("sha256") != {
        path.name: file_sha256(path) for path in weight_files(weights)
    }:
        raise CheckpointError(
            "these were merged from other weights", place=str(folder), hint=f"remove the folder, then {hint}"
        )
    return folder


def _weights(call: Call) -> tuple[RunFolder, Path]:
    run = find_named_run(call, writes=call.command == "card" and "OUT" not in call.options)
    return run, weights_folder(run, call.options.get("CHECKPOINT"))


def _described(facts: dict[str, Any], run: RunFolder, weights: Path) -> Iterator[str]:
    visible = "private" if facts["private"] else "public"
    where = f"https://huggingface.co/{facts['repo']}, a new {visible} repository or one that exists"
    yield f"{run.name} ({label_of(run, weights)}) to {where} (not compared with the hub):"
    for name, length in facts["files"].items():
        yield f"  {length:>14,}  {name}"
    yield f"  {sum(facts['files'].values()):>14,}  bytes in all; no optimizer states, logs, data or stamp"
    if facts["note"]:
        yield facts["note"]


def card_of(run: RunFolder, weights: Path) -> str:
    """Return the card: use, base, data counts, hyperparameters, scores with intervals, hardware and time.

    The header follows the hub's specification (`huggingface_hub.ModelCardData`). It contains no path of this machine.
    """
    from huggingface_hub import ModelCardData

    stamp, plan, prepared = Stamp.load(weights), Plan.load(run.plan), Prepared.load(run.prepared)
    config = read_config(run.config).config
    adapter = kind_of(weights) == "adapter"
    base, on_hub = _plain(stamp.public_base[0]), stamp.public_base[1]
    ancestors = ancestors_of(prepared)
    first, first_on_hub = ancestors[0][1].public_base if ancestors else (base, on_hub)
    chain = [(older.name, taken.step, Prepared.load(older.prepared)) for older, taken in ancestors]
    chain.append((run.name, stamp.step, prepared))
    header = ModelCardData(
        base_model=base if on_hub else first if first_on_hub and not adapter else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["sft-play", "sft", config.tuning.mode],
        datasets=[
            source.path
            for source in config.data.sources or ()
            if source.path.count("/") == 1 and not Path(source.path).exists()
        ]
        or None,
        model_name=run.name,
    )
    lines = [
        f"---\n{header.to_yaml()}\n---\n",
        f"# {_plain(run.name)}\n",
        f"{'LoRA adapters for' if adapter else 'All weights, tuned from'} `{base}`, trained with SFT-Play.\n",
        *(_ancestry(_plain(first), chain) if ancestors else []),
        *([COPY] if chain[0][2].model.source == "embedded" else []),
        "## Use\n",
        *_use(base, adapter, on_hub, plan, chats=config.tuning.task != "cpt", begins=common_system(run) is not None),
        "## Data\n",
        *_data(chain),
        "\n## Training\n",
        "| | |\n|---|---|",
        *(
            f"| {name} | {_plain(value)} |"
            for name, value in _facts(stamp, plan, read_facts(run.training_metrics), summary_of(run).seconds)
            if value
        ),
        "\n## Results\n",
        *_results(run, stamp.step),
        "\n## Versions\n",
        ", ".join(
            _plain(f"{name} {version}") for name, version in stamp.versions.items() if version != "not installed"
        ),
    ]
    return "\n".join(lines) + "\n"


Link = tuple[str, int, Prepared]
"""A run's name, the step of its weights, and what it was trained on."""


def _ancestry(base: str, chain: list[Link]) -> Iterator[str]:
    steps = [f"`{_plain(name)}` ({plural(step, 'step')})" for name, step, _ in chain]
    yield f"Its weights were trained from `{base}` by these runs, one on the other: {', '.join(steps)}.\n"


def _data(chain: list[Link]) -> Iterator[str]:
    """Yield the table of the rows that were trained, of all runs of the chain, and of those that were held out."""
    splits = [(name, "training", prepared.train) for name, _, prepared in chain]
    splits += [(name, "held out", prepared.validation) for name, _, prepared in chain]
    sources = [(name, kind, source) for name, kind, split in splits if split for source in split.sources[:MOST_SOURCES]]
    several, weighted = len(chain) > 1, any(source.weight is not None for *_, source in sources)
    columns = [*(["run"] if several else []), "split", "source"]
    numbers = ["rows", "tokens", "trained tokens", *(["weight"] if weighted else [])]
    yield f"| {' | '.join([*columns, *numbers])} |\n|{'---|' * len(columns)}{'---:|' * len(numbers)}"
    for name, kind, source in sources:
        weight = "–" if source.weight is None else f"{source.weight:g}"
        cells = [*([_plain(name)] if several else []), kind, _name(source.name)]
        cells += [f"{count:,}" for count in (source.rows, source.tokens, source.label_tokens)]
        yield f"| {' | '.join([*cells, *([weight] if weighted else [])])} |"


def _use(base: str, adapter: bool, on_hub: bool, plan: Plan, *, chats: bool, begins: bool) -> list[str]:
    """Return the section; `chats`: conversations were trained; `begins`: all began with one system turn."""
    dtype = "bfloat16" if plan.precision == "bf16" else "float32"
    load = (
        "from peft import AutoPeftModelForCausalLM\n\nmodel = AutoPeftModelForCausalLM.from_pretrained(FOLDER, "
        if adapter
        else "from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained(FOLDER, "
    )
    first = '{"role": "system", "content": "..."}, ' if begins else ""  # the text may be private
    note = f"The base, `{base}`, is loaded with it." if adapter else ""
    if adapter and not on_hub:
        note = f"The base, `{base}`, is not published here: put its name or folder into `{ADAPTER}` first."
    inputs = (
        f'messages = [{first}{{"role": "user", "content": "..."}}]\n'
        'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt",'
        " return_dict=True)\n"
        if chats
        else 'inputs = tokenizer("The beginning of a text", return_tensors="pt")\n'
    )
    return [
        (
            f'```python\nfrom transformers import AutoTokenizer\n{load}dtype="{dtype}")\ntokenizer ='
            f" AutoTokenizer.from_pretrained(FOLDER)\n{inputs}answer = model.generate(**inputs, max_new_tokens=200)\n"
            'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))\n```\n'
        ),
        f"`FOLDER` is this repository's name or a copy of it. {note}\n",
    ]


def _facts(stamp: Stamp, plan: Plan, final: dict[str, Any], seconds: float | None) -> Iterator[tuple[str, str]]:
    yield "method", stamp.mode + (f", rank {stamp.lora['r']}, alpha {stamp.lora['alpha']:g}" if stamp.lora else "")
    if parent := stamp.parent:
        use = "trained further" if parent["use"] == "continue" else "merged into the base"
        name = parent["name"] if parent["name"].count("/") == 1 else Path(parent["name"]).name
        yield "started from", f"the adapter {name}, {use}"
    yield (
        "steps",
        (
            f"{final.get('steps') or stamp.step} of {stamp.global_batch_size} rows, up to {stamp.max_seq_len:,} tokens"
            " each"
        ),
    )
    yield (
        "optimizer",
        f"{plan.optim}, learning rate {plan.learning_rate:g}, {plural(plan.warmup_steps or 0, 'step')} of warm-up",
    )
    yield "precision", f"{stamp.precision}, weights in {stamp.weights_dtype}"
    yield "seed", str(stamp.seed)
    devices = ", ".join(dict.fromkeys(rank.device_name for rank in plan.ranks)) or plan.device
    yield "hardware", f"{plan.world_size} x {devices}, {stamp.strategy}"
    yield "time", duration(seconds) if seconds else ""
    yield "speed", f"{final['tokens_per_second']:,.0f} tokens/s" if final.get("tokens_per_second") else ""
    yield "peak memory", gib(final["peak_memory_bytes"]) if final.get("peak_memory_bytes") else ""


def _results(run: RunFolder, step: int) -> Iterator[str]:
    """Yield the scores on the run's held-out rows, and on other rows that these weights answered."""
    begin, end = run.evaluation(0), run.evaluation(step)
    before, after = read_scores(begin) or {}, read_scores(end)
    losses = {row["step"]: row.get("eval_loss") for row in metric_rows(run.metrics) if row.get("kind") == "eval"}
    losses = {at: loss for at, loss in losses.items() if at <= step and loss is not None}
    if after:
        yield from _scores("held-out rows", before or {"loss": losses.get(0)}, after)
    elif losses.keys() - {0}:
        at = max(losses)
        start = f", {losses[0]:.4f} before training" if 0 in losses else ""
        yield f"Loss on held-out rows, measured while training: {losses[at]:.4f} at step {at}{start}."
    else:
        yield "This model was not scored on the rows that its run held out."
    for folder in sorted(end.parent.glob(f"{end.name}-*")):
        if other := read_scores(folder):
            name = _plain(Path(str(other["settings"].get("data"))).name)
            yield ""
            yield from _scores(
                f"`{name}`", read_scores(begin.with_name(folder.name.replace(end.name, begin.name))) or {}, other
            )


def _scores(rows: str, before: Mapping[str, Any], after: dict[str, Any]) -> Iterator[str]:
    if warning := of_memory(after["settings"]):
        yield f"**{warning}.**\n"

    def cell(scores: Mapping[str, Any], name: str) -> str:
        value = scores.get(name)
        if isinstance(value, dict):
            return f"{value['mean']:.4f} [{value['low']:.4f}, {value['high']:.4f}]"
        return f"{value:.4f}" if isinstance(value, (int, float)) else "–"

    answers = max((score["n"] for score in metrics_of(after).values()), default=0)
    yield f"On {rows}" + (f", with 95 % intervals over {plural(answers, 'answer')}:\n" if answers else ":\n")
    yield "| | before | after |\n|---|---:|---:|"
    for name in ("loss", *metrics_of(after)):
        yield f"| {_plain(label_of_metric(name))} | {cell(before, name)} | {cell(after, name)} |"


def _name(source: str) -> str:
    """Return the name of a data source: a hub id or a file name, never a path, without Markdown characters."""
    text = source if source.count("/") == 1 and not Path(source).exists() else Path(source).name
    return _plain(text)


def _plain(text: str) -> str:
    """Replace Markdown's and HTML's special characters, since a run's files may come from a stranger."""
    return "".join(letter if letter not in "|<>[]`\n\r\\" else "_" for letter in text)


# ---- The hub


def _check_name(repo: str) -> None:
    """Raise `UserError` if `REPO` is not a repository name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if address := HUB_ADDRESS.match(repo):
        raise UserError(f"`REPO` is `{repo}`; expected `owner/name`", hint=f"REPO={address[1] or address[2]}")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"`REPO` is `{repo}`; expected `owner/name`", hint=str(error).splitlines()[0]) from None
    if repo.count("/") != 1:
        raise UserError(f"`REPO` is `{repo}`; expected `owner/name`")


def _upload(repo: str, private: bool, message: str, files: dict[str, Path | bytes]) -> str:
    """Create the repository if needed, upload all files in one commit, and return the commit's address.

    Raise `DataError` or `HardwareError`.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if not get_token():
        raise HardwareError("no token for the hub is set", hint=TOKEN_HINT)
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()]
        tell(f"uploading {len(files)} files ...")
        return str(api.create_commit(repo, operations, commit_message=message).commit_url)
    except HfHubHTTPError as error:
        raise _refused(repo, error) from error
    except HfHubHTTPError.__bases__ as error:  # `OSError` and the errors of the HTTP library that the client uses
        raise HardwareError(
            "the hub cannot be reached; nothing was changed there",
            hint="check the network, HF_ENDPOINT and HF_HUB_OFFLINE",
        ) from error


def _refused(repo: str, error: Exception) -> DataError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return DataError(f"the hub refused the upload: the token may not write to `{repo}`", hint=TOKEN_HINT)
    return DataError(
        f"the hub answered: {str(error).splitlines()[0]}",
        place=repo,
        hint="try again later; a commit is either complete or absent",
    )
