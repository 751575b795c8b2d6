"""From a configuration to a loaded target, with its tokenizer and measured costs. `draft_loading` has the drafts."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from drafts.zoo import TargetFacts
from edgespec import catalog
from edgespec.config import RuntimeConfig
from edgespec.errors import ModelError
from edgespec.files import write_text
from edgespec.memory.budget import check_fits, parse_budget
from edgespec.memory.topology import Topology, detect, is_integrated
from edgespec.models.base import Decoder
from edgespec.models.batching import wait_for
from edgespec.models.build import CUDA_FORMATS, build_decoder, cuda_works
from edgespec.models.cpu import usable_threads
from edgespec.models.footprint import Footprint, footprint
from edgespec.models.tokenizer import Tokenizer, load_tokenizer
from edgespec.models.weights.opening import WeightFile, open_weights
from predictor.costs import CostTable
from predictor.planner import GAMMA_MAX

if TYPE_CHECKING:
    from edgespec.download import Progress

_log = logging.getLogger(__name__)

KV, POOL = "KV cache", "KV pool"  # what the plan has for keys and values: of one conversation, of requests at once
DEFAULT_CONTEXT = 8192  # longer ones have to be asked for: the KV of an unused long context is a promise of memory
_LEAST_CONTEXT = 512
_CONTEXT_STEP = 64
_DRAFTS_ROOM = 96 << 20
_COST_WIDTHS = (1, 2, 3, 4, 6, 9)
_COST_POSITION = 64


@dataclass
class Target:
    """The loaded target and what belongs to it."""

    decoder: Decoder
    tokenizer: Tokenizer
    context: int
    costs: CostTable
    costs_file: Path
    planned: dict[str, int]  # bytes by part; drafts are added as they are loaded
    facts: TargetFacts
    sessions: int = 1  # conversations at once, of which drafts' own memory is planned

    @property
    def position_bytes(self) -> int:
        """Bytes of keys and values of one position, in the precision that the engine keeps them in."""
        return int(getattr(self.decoder, "position_bytes", self.decoder.spec.position_bytes()))

    @property
    def to_come(self) -> int:
        """Bytes that are planned for keys and values and not taken yet: they are, as texts grow.

        Of an engine that does not say what it holds, all of one conversation's.
        """
        planned, held = self.planned.get(KV, 0), getattr(self.decoder, "kv_bytes", None)
        return planned if held is None else max(0, planned + self.planned.get(POOL, 0) - int(held))

    def measure_costs(self) -> None:
        """Time a forward of each width, unless that was done before, here or in an earlier run on this device."""
        widths = [width for width in _COST_WIDTHS if width <= self.context]
        if self.costs.covers(widths):
            return
        start = min(_COST_POSITION, self.context - max(widths))
        cache = self.decoder.new_cache(self.context)
        if start:
            self.decoder.forward([0] * start, cache, logits=0)

        def forward(width: int) -> None:
            cache.crop(start)
            wait_for(self.decoder.forward([0] * width, cache).logits)

        self.costs.measure(forward, widths)

    def close(self) -> None:
        self.decoder.close()
        if self.costs.covers(_COST_WIDTHS):
            with suppress(OSError):  # only a saving of half a second at the next start
                self.costs_file.parent.mkdir(parents=True, exist_ok=True)
                write_text(self.costs_file, json.dumps(self.costs.to_json()))


def load_target(config: RuntimeConfig, progress: Progress | None) -> Target:
    """Find (or fetch), check, and load the model. Refuses what does not fit in memory before reading any weight."""
    path = catalog.resolve(config.model, home=config.home, progress=progress)
    home = catalog.home(config.home)
    with open_weights(path) as weights:
        context, planned = _fitting_context(config, weights)
        tokenizer = tokenizer_of(path, weights, home)
        facts = _facts(config.model, weights, tokenizer)
        decoder = decoder_for(config, weights, context, home)
        try:
            prepare_steps(config, decoder)
        except BaseException:
            decoder.close()
            raise
        costs_file = home / "costs" / f"{_cost_key(config, weights)}.json"
    return Target(decoder, tokenizer, context, _saved_costs(costs_file), costs_file, planned, facts)


def decoder_for(
    config: RuntimeConfig, weights: WeightFile, positions: int, home: Path, pause: Callable[[], None] = lambda: None
) -> Decoder:
    """The engine that `config` asks for, target or draft, for texts of at most `positions`; see `build_decoder`."""
    return build_decoder(
        weights,
        device=device_of(config),
        weight_format=config.weight_format,
        threads=threads_of(config),
        positions=positions,
        cache_dir=home / "graphs",
        pause=pause,
    )


def target_facts(config: RuntimeConfig) -> TargetFacts | None:
    """What drafts must fit, from the headers of the configured model alone; None if it is not on this machine.

    Nothing is fetched and no weight is loaded. Raises ModelError, CatalogError.
    """
    path = catalog.located(config.model, home=config.home)
    if path is None:
        return None
    with open_weights(path) as weights:
        return _facts(config.model, weights, tokenizer_of(path, weights, catalog.home(config.home)))


def _facts(model: str, weights: WeightFile, tokenizer: Tokenizer) -> TargetFacts:
    spec = weights.spec
    name = re.sub(r"\.(gguf|safetensors)$", "", re.split(r"[/\\:]", model.rstrip("/\\"))[-1]) or "target"
    prints = weights.fingerprint(), spec.hidden_size, spec.vocab_size, tokenizer.fingerprint()
    return TargetFacts(name, *prints, weights.model_fingerprint())


def threads_of(config: RuntimeConfig) -> int | None:
    """The threads asked for, at most one a core: more than that take turns, and each round waits for all of them."""
    cores = os.cpu_count() or 1
    if config.threads is None or config.threads <= cores:
        return config.threads
    _warn_of_threads(config.threads, cores)
    return cores


@cache  # each engine asks, of the target and of every draft
def _warn_of_threads(threads: int, cores: int) -> None:
    _log.warning("%d threads on %d cores would slow each other down; %d are used", threads, cores, cores)


def device_of(config: RuntimeConfig) -> str:
    """The engine that is meant. "auto": the GPU's where torch can use one, but the CPU's for a format only that has."""
    if config.device != "auto":
        return config.device
    return "cuda" if config.weight_format in CUDA_FORMATS and cuda_works() else "cpu"


def topology_of(config: RuntimeConfig) -> Topology:
    """The memory that the engine's weights, keys and values take."""
    device = device_of(config)
    if device != "cuda":
        return detect(device)
    from edgespec.models.cuda.memory import device_memory, start

    there = start()  # what CUDA takes for itself is gone before anything is planned
    return detect(device, device_memory=device_memory if there and not is_integrated() else None)


def prepare_steps(config: RuntimeConfig, decoder: Decoder) -> None:
    """Let an engine that captures its steps do so now for what rounds usually verify, not within the first of them.

    Where there is no memory for that, it does without.
    """
    prepare, give_up = getattr(decoder, "prepare_steps", None), getattr(decoder, "without_graphs", None)
    if prepare is None:
        return
    try:
        prepare(range(1, max(usual_gammas(config), default=0) + 2))
        return
    except Exception as error:
        from edgespec.models.cuda.memory import out_of_memory

        if give_up is None or not out_of_memory(error):
            raise
        cause = str(error).partition("\n")[0]
    give_up(f"there is no memory to capture them ({cause})")  # now: the error holds no tensors any more


def usual_gammas(config: RuntimeConfig) -> Sequence[int]:
    """How many tokens a draft is asked for."""
    return range(1, GAMMA_MAX + 1) if config.gamma == "auto" else [config.gamma] if config.gamma else []


def footprint_of(config: RuntimeConfig, weights: WeightFile) -> Footprint:
    """What the engine that is meant takes for these weights."""
    device = device_of(config)
    unified = device == "cuda" and topology_of(config).kind == "unified"
    return footprint(weights, device, config.weight_format, unified=unified)


def _fitting_context(config: RuntimeConfig, weights: WeightFile) -> tuple[int, dict[str, int]]:
    """The context asked for, if it fits the budget; else the longest that does, up to the model's own or 8192.

    Also the plan: bytes by part. One conversation's cache is planned; further ones take theirs as they grow.
    """
    spec, size = weights.spec, footprint_of(config, weights)
    if config.context is not None and config.context > spec.max_positions:
        raise ModelError(
            f"a context of {config.context} is more than the {spec.max_positions} positions of {weights.path}"
        )
    context = config.context
    if context is None:
        topology = topology_of(config)
        gone = 0 if config.memory_budget == "auto" else sum(size.before().values())
        room = min(parse_budget(config.memory_budget, topology) - gone, topology.available_bytes())
        context = fitting_context(config, spec.max_positions, size, room)
    need = {"target": size.weights, **size.beside(context), KV: size.cache(context)}
    check_memory(config, need, size.before())
    return context, {**size.before(), **need}


def fitting_context(config: RuntimeConfig, longest: int, size: Footprint, room: int) -> int:
    """The context where none was asked for: the longest that fits, up to the model's own (`longest`) or 8192.

    room: bytes for all that is still to be taken. What two drafts of the usual size take is left to them, but no more
    than a quarter of what weights leave: without any draft a longer context is of little use.
    """
    longest = min(DEFAULT_CONTEXT, longest)
    room -= size.weights + sum(size.beside(longest).values())
    room -= 0 if config.drafts == () or config.resident == 0 else min(_DRAFTS_ROOM, max(room, 0) // 4)
    least = min(_LEAST_CONTEXT, longest)
    context = min(longest, max(room // size.position, least))
    while context > least and size.cache(context) > room:  # engines take memory for more positions than one asks for
        context = max(least, context - _CONTEXT_STEP)
    return int(context)


def check_memory(
    config: RuntimeConfig, need: dict[str, int], before: Mapping[str, int] | None = None, *, to_come: int = 0
) -> None:
    """Refuse what does not fit beside what was planned before.

    to_come: bytes of what was planned that are not taken yet. Of what is free, they and the new parts are wanted.
    """
    topology = topology_of(config)
    if config.memory_budget != "auto":  # "auto" is what is free now, of which the parts before hold theirs already
        check_fits({**(before or {}), **need}, parse_budget(config.memory_budget, topology))
    promised = {"keys and values to come": to_come} if to_come else {}
    check_fits({**need, **promised}, parse_budget("auto", topology), topology.available_bytes())


def tokenizer_of(path: Path, weights: WeightFile, home: Path) -> Tokenizer:
    """A GGUF file's tokenizer takes long to build from its metadata, so the built one is kept."""
    if not weights.metadata:
        return load_tokenizer(path)
    folder = home / "tokenizers" / weights.fingerprint()[:32]
    with suppress(ModelError, OSError):
        return Tokenizer.load(folder)
    tokenizer = load_tokenizer(path)
    with suppress(OSError):
        tokenizer.save(folder)
    return tokenizer


def _cost_key(config: RuntimeConfig, weights: WeightFile) -> str:
    device = f"{platform.node()}:{platform.machine()}:{platform.processor()}:{os.cpu_count()}"
    threads = threads_of(config) or usable_threads()
    text = f"{weights.fingerprint()}:{device_of(config)}:{config.weight_format}:{threads}:{device}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _saved_costs(file: Path) -> CostTable:
    try:
        return CostTable.from_json(json.loads(file.read_text()))
    except (OSError, ValueError, OverflowError, RecursionError):
        return CostTable()
