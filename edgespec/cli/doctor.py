"""`edgespec doctor`: what this device is, whether edgespec works on it, and what to do where it does not."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from edgespec import __version__
from edgespec.cli import (
    doctor_board,
    doctor_gpu,
    doctor_place,
    doctor_proofs,
    doctor_ranker,
    doctor_storage,
    options,
    runtime,
    show_config,
)
from edgespec.cli.doctor_check import Check, Status
from edgespec.cli.terminal import stdout
from edgespec.errors import ConfigError, EdgespecError
from edgespec.memory.budget import format_bytes as size
from edgespec.telemetry import board
from edgespec.telemetry.system_files import SYSTEM_ROOT, line, text

if TYPE_CHECKING:
    from edgespec.cli.doctor_place import Place

HELP = "check this device and this installation"
FAILED = 1
ROOT = SYSTEM_ROOT  # where boards are looked at, and what their packages are asked with: tests play others
PROBES = doctor_gpu.Probes()
MIN_FREE_MEMORY = 1 << 30
MIN_FREE_DISK = 1 << 30
REQUIRED = ("numpy", "tokenizers", "jinja2", "onnx", "huggingface_hub", "psutil")
OPTIONAL = ("torch", "transformers", "triton")
RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
# What speeds up the CPU engine: integer dot products and wide vectors.
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser("doctor", help=HELP, description=HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_engine_flags(parser)
    options.add_serving_flags(parser)
    options.add_debug_flag(parser)
    parser.set_defaults(run=run, plan=None)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print one line a check, and the memory plan; 1 if any check failed.

    A check that breaks is itself a failure, never an abort.
    """
    output = stdout()
    results = []
    for check in CHECKS:
        for result in _guarded(check, args):
            results.append(result)
            if not args.json:
                output.line(f"{result.status:<4}  {result.name}: {result.detail}")
                if result.advice and not (check is _memory_plan and result.name == "memory plan"):  # it ends the tables
                    output.line(f"      {result.advice}")
    failed = any(result.status == "fail" for result in results)
    if args.json:
        plan = None if args.plan is None else args.plan.to_json()
        output.line(json.dumps({"ok": not failed, "checks": [asdict(result) for result in results], "memory": plan}))
    elif args.plan is not None:
        from edgespec.cli import doctor_memory

        doctor_memory.show(args.plan, output)
    return FAILED if failed else 0


def _guarded(check: Callable[[argparse.Namespace], list[Check]], args: argparse.Namespace) -> list[Check]:
    name = check.__name__.strip("_").replace("_", " ")
    try:
        return check(args)
    except EdgespecError as error:
        return [Check(name, "fail", str(error))]
    except Exception as error:
        return [
            Check(
                name,
                "fail",
                f"{type(error).__name__}: {error}",
                "This is a defect of edgespec or of a package it uses.",
            )
        ]


def _versions(args: argparse.Namespace) -> list[Check]:
    bits = "" if sys.maxsize > 2**32 else " 32-bit"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return [Check("edgespec", "ok", f"{__version__}, Python {platform.python_version()}{bits}, {system}")]


def _packages(args: argparse.Namespace) -> list[Check]:
    """Installed versions, read from their metadata: nothing is imported."""
    found = {name: _version(name) for name in (*RUNTIMES, *REQUIRED, *OPTIONAL)}
    listed = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    checks = [Check("packages", "ok", listed)]
    missing = [name for name in REQUIRED if not found[name]]
    if missing:
        checks.append(
            Check(
                "packages",
                "fail",
                f"missing: {', '.join(missing)}",
                "Install edgespec again: pip install 'edgespec[cpu]'",
            )
        )
    if not any(found[name] for name in RUNTIMES):
        checks.append(
            Check("packages", "fail", "no ONNX Runtime", "Install it: pip install 'edgespec[cpu]', or 'edgespec[cuda]'")
        )
    if all(found[name] for name in RUNTIMES):
        advice = "They overwrite each other's files: uninstall both and install the one you need."
        checks.append(Check("packages", "warn", "onnxruntime and onnxruntime-gpu are both installed", advice))
    return checks


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _providers(args: argparse.Namespace) -> list[Check]:
    try:
        import onnxruntime
    except ImportError as error:
        return [
            Check(
                "providers",
                "fail",
                f"onnxruntime cannot be imported: {error}",
                "Install it: pip install 'edgespec[cpu]'",
            )
        ]
    names = [name.removesuffix("ExecutionProvider") for name in onnxruntime.get_available_providers()]
    return [Check("providers", "ok" if "CPU" in names else "fail", ", ".join(names))]


def _device(args: argparse.Namespace) -> list[Check]:
    model, info = line(ROOT / "proc/device-tree/model"), text(ROOT / "proc/cpuinfo") or ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info.splitlines())}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    from edgespec.models.cpu import usable_cores

    cores, usable = os.cpu_count() or 1, usable_cores()
    name = model or fields.get("model name") or platform.processor() or platform.machine()
    known = ", ".join(flag for flag in FEATURES if flag in flags) or "no known vector features"
    checks = [Check("cpu", "ok", f"{name}; {usable:g} of {cores} cores usable; {known}")]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > usable:
        checks.append(
            Check(
                "load",
                "warn",
                f"{load:.1f} processes want {usable:g} cores",
                "Speed will be low and measurements wrong.",
            )
        )
    return checks


def _board(args: argparse.Namespace) -> list[Check]:
    return doctor_board.checks(ROOT)


def _gpu(args: argparse.Namespace) -> list[Check]:
    return doctor_gpu.checks(ROOT, replace(PROBES, torch=lambda: _torch(args)))


def _torch(args: argparse.Namespace) -> doctor_gpu.TorchFacts | None:
    """What torch says of the GPU, asked once; None where there is none of either."""
    if not hasattr(args, "torch"):
        args.torch = PROBES.torch() if board.detect(ROOT).has_gpu else None
    facts: doctor_gpu.TorchFacts | None = args.torch
    return facts


def _place(args: argparse.Namespace) -> Place | None:
    """Where the engine that is meant would run, None if it cannot: the line "engine" says why."""
    try:
        found = doctor_place.place(runtime.configured(args), board.detect(ROOT), _torch(args), ROOT)
        return replace(found, plain=doctor_gpu.plain(PROBES))
    except ConfigError:
        return None


def _engine(args: argparse.Namespace) -> list[Check]:
    """Which engine would run, and in which memory."""
    place = doctor_place.place(runtime.configured(args), board.detect(ROOT), _torch(args), ROOT)
    return [Check("engine", "ok", f"{place.device}, in {doctor_place.MEMORY[place.topology.kind]}")]


def _memory(args: argparse.Namespace) -> list[Check]:
    from edgespec.memory import topology

    total, available = topology.host_total_bytes(ROOT), topology.host_available_bytes(ROOT)
    detail = f"{size(available)} free of {size(total)} (limits of containers included)"
    held = topology.nvmap_bytes(ROOT)
    if held is not None:
        detail += f"; {size(held)} held by the GPU"
    if available < MIN_FREE_MEMORY:
        return [Check("memory", "warn", detail, "The default model needs about 600 MiB: close other programs.")]
    return [Check("memory", "ok", detail)]


def _blocks_and_swap(args: argparse.Namespace) -> list[Check]:
    return [*doctor_storage.fragmentation(ROOT), *doctor_storage.swap(ROOT), *doctor_storage.desktop(ROOT)]


def _cache(args: argparse.Namespace) -> list[Check]:
    from edgespec import catalog
    from edgespec.memory import topology

    folder = catalog.home(runtime.configured(args).home)
    advice = "Set EDGESPEC_HOME to a folder that you can write to."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return [Check("cache", "fail", f"{folder} cannot be written: {error.strerror or error}", advice)]
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free
    kind = topology.storage_name(folder)
    detail = f"{folder} holds {size(used)}; {size(free)} free on its disk" + (f" ({kind})" if kind else "")
    if free < MIN_FREE_DISK:
        return [Check("cache", "warn", detail, "Free some space, or " + advice[0].lower() + advice[1:])]
    return [Check("cache", "ok", detail)]


def _storage(args: argparse.Namespace) -> list[Check]:
    """How fast models are read: by the largest file that is here."""
    from edgespec import catalog
    from edgespec.memory import topology

    config = runtime.configured(args)
    folder = catalog.located(config.model, home=config.home) or catalog.home(config.home)
    files = [folder] if folder.is_file() else [file for file in folder.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size, default=None)
    speed = None if largest is None else doctor_storage.read_speed(largest)
    return doctor_storage.storage(topology.storage_name(folder, ROOT), speed)


def _configuration(args: argparse.Namespace) -> list[Check]:
    rows = show_config.changed_rows(args)
    return [Check("config", "ok", "; ".join(rows) if rows else "all defaults (edgespec config shows them)")]


def _model(args: argparse.Namespace) -> list[Check]:
    """Whether the model is here, and whether its header reads; nothing is fetched."""
    from edgespec import catalog
    from edgespec.memory import topology
    from edgespec.models.build import planned_bytes
    from edgespec.models.weights.opening import open_weights

    config = runtime.configured(args)
    name = config.model
    path = catalog.located(name, home=config.home)
    if path is None:
        return [
            Check(
                "model",
                "warn",
                f"{name} is not on this machine",
                f"It is fetched when it is first used, or by: edgespec pull {name}",
            )
        ]
    with open_weights(path) as weights:
        spec = weights.spec
        place = _place(args) or doctor_place.Place("cpu", topology.detect("cpu", root=ROOT))
        need = planned_bytes(weights, place.device, config.weight_format)
        where = "" if str(path) == name else f", at {path}"
        detail = f"{name}: {spec.architecture}, {spec.num_layers} layers, context {spec.max_positions}{where}"
    detail += f"; {size(need)} of weights in {doctor_place.MEMORY[place.topology.kind]}"
    if need > place.topology.available_bytes():
        return [Check("model", "fail", detail, "That is more than is free: close programs, or use a smaller model.")]
    return [Check("model", "ok", detail)]


def _drafts(args: argparse.Namespace) -> list[Check]:
    """The draft set of this model: manifests and lengths; `edgespec drafts verify` looks into the files."""
    from drafts import zoo
    from edgespec import catalog
    from edgespec.loading import target_facts

    config = runtime.configured(args)
    facts = target_facts(config)
    if facts is None:
        return [Check("drafts", "ok", f"looked at when {config.model} is on this machine")]
    entries = zoo.for_target(catalog.home(config.home), facts.fingerprint, facts.name, model=facts.model)
    if not entries:
        detail = f"no set was made for {facts.name}; prompt lookup (ngram) alone is used"
        return [Check("drafts", "ok", detail)]
    good, bad = [], []
    for entry in entries:
        try:
            good.append(zoo.usable(entry, facts, hashes=False).name)
        except EdgespecError as error:
            bad.append(Check("drafts", "warn", str(error), "edgespec drafts verify says more."))
    nbytes = sum(e.manifest.nbytes for e in entries if e.manifest is not None and e.name in good)
    detail = f"{len(good)} for {facts.name}: {', '.join(good) or 'none'} (files of {size(nbytes)})"
    return [Check("drafts", "ok", detail), *bad]


def _ranker(args: argparse.Namespace) -> list[Check]:
    return doctor_ranker.checks(runtime.configured(args))


def _memory_plan(args: argparse.Namespace) -> list[Check]:
    """Whether model, context and drafts fit the budget. The plan itself is left in `args` for the table."""
    from edgespec.cli import doctor_memory

    config, place = runtime.configured(args), _place(args)
    if place is None:
        return [Check("memory plan", "warn", "not made: the engine that is asked for cannot run here")]
    report = args.plan = doctor_memory.plan_of(config, place)
    if report is None:
        return [Check("memory plan", "ok", f"made when {config.model} is on this machine")]
    advice = "; ".join(report.plan.advice())
    if report.plan.refused:
        return [Check("memory plan", "fail", doctor_memory.summary(report), advice)]
    named = [Check("drafts", "fail", note, "edgespec drafts list shows what there is.") for note in report.notes]
    named += [Check("policy", "fail", problem, "") for problem in doctor_memory.policy_problems(config, report.plan)]
    left_out = [row.part for row in report.plan.draft_rows() if not row.fits]
    state: Status = "warn" if left_out or not report.plan.fits else "ok"
    return [Check("memory plan", state, doctor_memory.summary(report), advice), *named]


def _sets(args: argparse.Namespace) -> list[Check]:
    """Which sets of models on the hub fit here; nothing is fetched."""
    from edgespec.cli import doctor_memory

    place = _place(args)
    return [] if place is None else [doctor_memory.sets(runtime.configured(args), place)]


def _lossless(args: argparse.Namespace) -> list[Check]:
    return [doctor_proofs.lossless(runtime.engine_class().from_pretrained, _engine_here(args))]


def _bits(args: argparse.Namespace) -> list[Check]:
    return [doctor_proofs.bits(runtime.configured(args).threads, _engine_here(args))]


def _engine_here(args: argparse.Namespace) -> doctor_proofs.Engine:
    """The engine that can be tried out in this process, which runs on no made-up board."""
    place = _place(args) if ROOT == SYSTEM_ROOT else None
    return "cuda" if place is not None and place.device == "cuda" else "cpu"


CHECKS = (
    _versions,
    _packages,
    _providers,
    _device,
    _board,
    _gpu,
    _memory,
    _blocks_and_swap,
    _cache,
    _storage,
    _configuration,
    _engine,
    _model,
    _drafts,
    _ranker,
    _memory_plan,
    _sets,
    _lossless,
    _bits,
)
