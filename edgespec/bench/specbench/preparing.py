"""From arguments to what is run: questions, arms and settings, all of it checked before a model is loaded."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgespec
from edgespec import catalog
from edgespec.bench.machine import describe, this_command
from edgespec.bench.specbench import arms, fields, questions
from edgespec.bench.specbench.arms import Arm
from edgespec.bench.specbench.folder import PLAIN, STATE, ArmInfo, RunFolder, differing, file_name, unique_files
from edgespec.bench.specbench.harness import Plan
from edgespec.bench.specbench.questions import Question
from edgespec.bench.specbench.schedule import Shard, groups
from edgespec.errors import ConfigError, MemoryBudgetError, ModelError, PromptError
from edgespec.evaluation.prompts import Skipped
from edgespec.files import sha256_of

if TYPE_CHECKING:
    from edgespec.bench.model import PromptEncoder
    from edgespec.config import RuntimeConfig
    from edgespec.memory.plan import MemoryPlan

_WARM_UP = "Say hello, and name three colours."
_PEER_BYTES = 600 << 20  # of a peer beside its weights: torch's code, its own buffers
# What must be as it was when a run is gone on with; a kernel's version, for example, may change.
_SAME_MACHINE = ("cpu", "cores", "threads")
_MADE_OF_AUTO = {"context": "the context", "slots": "drafts in memory at once"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The questions of a run. ids are those of the whole file; mine: of this shard."""

    path: Path
    whole: list[Question]
    skipped: list[Skipped]
    shard: Shard

    @property
    def mine(self) -> list[Question]:
        return self.shard.of(self.whole)


def asked(args: argparse.Namespace) -> Asked:
    """Read, choose and order the questions. ConfigError, PromptError."""
    path = Path(args.questions).expanduser()
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe is empty when it is read once more
        raise ConfigError(f"--questions {path} is no file, and must be one: it is read again, at a --resume too.")
    items, ids, skipped = questions.read_questions(path)
    kept = questions.chosen(items, args.categories, args.limit)
    shard = Shard.parse(args.shard or "1/1")
    found = Asked(path, questions.ordered(kept, ids, args.order, args.seed), skipped, shard)
    if not found.mine:
        raise ConfigError(f"--shard {shard} has no question: there are {len(kept)} in all")
    return found


def fitting(mine: Sequence[Question], encoder: PromptEncoder, context: int) -> tuple[list[Question], list[Skipped]]:
    """The questions whose first turn leaves room for an answer, and why the others are left out."""
    kept, skipped = [], []
    for question in mine:
        try:
            length = len(encoder.chat(question.turns[0]))
            if length >= context:
                raise PromptError(f"its {length} prompt tokens do not fit the context of {context}")
        except PromptError as error:
            skipped.append(Skipped(question.file, question.line, str(error)))
        else:
            kept.append(question)
    if not kept:
        raise PromptError(f"No question can be asked; {skipped[0]}.")
    return kept, skipped


@dataclass(frozen=True, slots=True)
class Setup:
    """The model with the arms on it. nbytes: what an engine needs, with drafts (True) and without. device: as it is
    meant, never "auto"."""

    config: RuntimeConfig
    path: Path
    fingerprint: str
    name: str
    drafts: dict[str, str]
    specs: list[str]
    threads: int
    device: str
    context: int
    nbytes: dict[bool, int]
    peer_bytes: int
    room: int

    @classmethod
    def of(cls, args: argparse.Namespace, config: RuntimeConfig) -> Setup:
        """By headers and manifests alone. ConfigError, ModelError, CatalogError, MemoryBudgetError."""
        from edgespec import loading
        from edgespec.draft_loading import check_names
        from edgespec.memory.budget import parse_budget
        from edgespec.models.build import planned_bytes
        from edgespec.models.cpu import usable_threads
        from edgespec.models.weights.opening import open_weights

        check_names(config)
        path = catalog.resolve(config.model, home=config.home)
        facts = loading.target_facts(config)
        if facts is None:
            raise ModelError(f"the model {config.model} is not on this machine; fetch it with 'edgespec pull'")
        drafts = arms.drafts_of(config, facts)
        names = [draft.name for draft in drafts if draft.weighty]
        arms.check(args.specs, names, config.resident)
        whole, bare = _memory_plan(config), _memory_plan(config.replace(drafts="off"))
        with open_weights(path) as weights:
            floats = planned_bytes(weights, loading.device_of(config), "float32")
        return cls(
            config=config.replace(
                threads=config.threads or usable_threads(), context=whole.context, resident=whole.slots
            ),
            path=path,
            fingerprint=facts.fingerprint,
            name=facts.name,
            drafts={draft.name: draft.fingerprint for draft in drafts},
            specs=arms.expanded(args.specs, names),
            threads=config.threads or usable_threads(),
            device=loading.device_of(config),
            context=whole.context,
            nbytes={True: whole.total, False: bare.total},
            peer_bytes=floats + _PEER_BYTES,
            room=parse_budget("auto", loading.topology_of(config)),
        )

    def arms(self, args: argparse.Namespace, out: Path) -> list[Arm]:
        """All arms, those that are absent too."""
        from edgespec.bench.peers.registry import PREFIX, peers

        assistant = Path(args.assistant).expanduser() if args.assistant else None
        known = peers(assistant=assistant, context=self.context)
        found = []
        for spec in self.specs:
            if spec.startswith(PREFIX):
                greedy = not args.temperature
                arm = arms.peer_arm(spec, known, self.path, self.threads, nbytes=self.peer_bytes, greedy=greedy)
            else:
                memory = None if args.keep_memory else out.resolve() / STATE / file_name(spec)
                config = self.config.replace(policy_memory=memory, home=catalog.home(self.config.home))
                arm = arms.policy_arm(spec, config, nbytes=self.nbytes)
            found.append(arm)
        unique_files(arm.name for arm in found)
        return found


def _memory_plan(config: RuntimeConfig) -> MemoryPlan:
    from edgespec.cli.doctor_memory import plan_of
    from edgespec.memory.budget import format_bytes

    report = plan_of(config)
    assert report is not None  # the model was found just before
    found = report.plan
    if found.refused:
        need, budget = format_bytes(found.total), format_bytes(max(found.budget, 0))
        raise MemoryBudgetError(f"{config.model} needs {need} and may use {budget}: {'; '.join(found.advice())}")
    return found


def settings(args: argparse.Namespace, config: RuntimeConfig, setup: Setup, found: Asked) -> dict[str, Any]:
    """What was asked for: runs that differ in any of it are different runs. (What a machine made of it is beside.)"""
    return {
        "questions": found.path.name,
        "sha256": sha256_of(found.path),
        "model": setup.name,
        "fingerprint": setup.fingerprint,
        "policies": setup.specs,
        "order": args.order,
        "seed": args.seed,
        "categories": args.categories,
        "limit": args.limit,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "repeats": args.repeats,
        "shard": str(found.shard),
        "weight_format": config.weight_format,
        "device": config.device,
        "threads": config.threads,
        "resident": config.resident,
        "load_rate": config.load_rate,
        "memory_budget": config.memory_budget,
        "drafts": config.drafts if config.drafts == "auto" else list(config.drafts),
        "draft_fingerprints": setup.drafts,
        "context": config.context,
        "together": args.together,
        "keep_memory": args.keep_memory,
        "assistant": args.assistant,
    }


def new_run(out: Path, settings: dict[str, Any], setup: Setup, grouped: Sequence[Sequence[str]]) -> RunFolder:
    """A run of which nothing is measured yet. machine: also what was made of the settings on it."""
    machine = {
        **describe(setup.threads),
        "model_path": str(setup.path),
        "context": setup.context,
        "slots": setup.config.resident,
        "groups": [list(group) for group in grouped],
    }
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    settings, machine, command = fields.as_read([settings, machine, this_command()])
    return RunFolder(out, settings, machine, command, started, edgespec.__version__)


def as_before(config: RuntimeConfig, old: RunFolder) -> RuntimeConfig:
    """What was made of "auto" when the run began holds for all of it, whatever memory is free now."""
    context, slots = (old.machine.get(name) for name in _MADE_OF_AUTO)
    return config.replace(
        context=context if config.context is None else config.context,
        resident=slots if config.resident is None else config.resident,
    )


def go_on(old: RunFolder, new: RunFolder, device: str) -> RunFolder:
    """The old run, to be gone on with. device: the engine's. ConfigError names what is not as it was."""
    together = [set(group) for group in old.machine.get("groups", ())]
    pairs = [(name, old.settings.get(name), new.settings.get(name)) for name in {**old.settings, **new.settings}]
    pairs += [(name, old.machine.get(name), new.machine.get(name)) for name in _SAME_MACHINE]
    used = arms.packages({name for group in together for name in group}, device)  # others may come and go
    pairs.append(("versions", _versions(old, used), _versions(new, used)))
    auto = [name for name in _MADE_OF_AUTO if name in old.machine]
    pairs += [(_MADE_OF_AUTO[name], old.machine[name], new.machine.get(name)) for name in auto]
    pairs.append(("edgespec's version", old.version, new.version))
    if "code" in old.machine:  # which the first runs do not tell
        pairs.append(("edgespec's code", old.machine["code"], new.machine.get("code")))
    for name, before, now in pairs:
        if before != now:
            was, now = differing(before, now)
            raise ConfigError(
                f"The run in {old.path} cannot be gone on with: {name} was {was} and is {now} now. Give "
                "the same as then, or --out another folder."
            )
    specs = set(new.settings["policies"])
    if old.machine.get("context") is None or not together or any(PLAIN not in g or g - specs for g in together):
        raise ConfigError(
            f"The run in {old.path} cannot be gone on with: its run.json is damaged, it does not tell which arms were "
            "in memory together. Give --out another folder; 'bench report' still shows what was measured."
        )
    return dataclasses.replace(old, finished=False)


def _versions(run: RunFolder, packages: set[str]) -> dict[str, Any]:
    known = run.machine.get("versions")
    return {name: known[name] for name in sorted(packages & known.keys())} if isinstance(known, dict) else {}


def grouped(found: Sequence[Arm], args: argparse.Namespace, setup: Setup) -> list[list[str]]:
    """Names of the arms that are in memory together."""
    sizes = {arm.name: arm.nbytes for arm in found if arm.missing is None}
    return groups(list(sizes), PLAIN, together=args.together, size=sizes.__getitem__, room=setup.room)


def plan(
    run: RunFolder, found: Mapping[str, Arm], mine: Sequence[Question], args: argparse.Namespace, encoder: PromptEncoder
) -> Plan:
    """In the groups of the run (those of its first start, if it is gone on with). Absent arms take no part."""
    return Plan(
        questions=mine,
        groups=[[found[name] for name in group] for group in run.machine["groups"]],
        repeats=args.repeats,
        max_new_tokens=args.max_new_tokens,
        context=int(run.machine["context"]),
        warm_up=encoder.chat(_WARM_UP),
        temperature=args.temperature,
        retry_errors=args.retry_errors,
    )


def infos(found: Sequence[Arm], run: RunFolder) -> dict[str, ArmInfo]:
    """How each arm stands at the beginning (again). One that had an error keeps it until it is started once more."""
    grouped = {name for group in run.machine["groups"] for name in group}
    infos = {}
    for arm in found:
        missing = arm.missing or ("" if arm.name in grouped else "it was absent when this run began")
        before = run.arms.get(arm.name, ArmInfo(arm.kind))
        broken = not missing and before.status == "error"
        infos[arm.name] = ArmInfo(
            arm.kind,
            "absent" if missing else "error" if broken else "ok",
            before.message if broken else missing,
            arm.weights,
            before.peak_memory_bytes,
        )
    return infos


def open_encoder(path: Path) -> PromptEncoder:
    from edgespec.bench.model import PromptEncoder

    return PromptEncoder(path)
