"""From a configuration to loaded parts: the target with its tokenizer and measured costs, and drafts that fit it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drafts.base import Draft, DraftSession
from drafts.ngram import NgramDraft
from drafts.standalone import StandaloneDraft
from edgespec import catalog
from edgespec.config import RuntimeConfig
from edgespec.decoding.session import DraftStatus
from edgespec.errors import DraftError, EdgespecError, ModelError
from edgespec.memory.budget import check_fits, parse_budget
from edgespec.memory.topology import detect
from edgespec.models.base import Decoder
from edgespec.models.build import build_decoder, planned_bytes
from edgespec.models.tokenizer import Tokenizer, compare_vocabularies, load_tokenizer
from edgespec.models.weights import WeightFile, open_weights
from predictor.costs import CostTable

if TYPE_CHECKING:
    from edgespec.download import Progress

_log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 8192  # longer ones have to be asked for: the KV of an unused long context is a promise of memory
_LEAST_CONTEXT = 512
_WORKSPACE = 160 << 20  # the interpreter, ONNX Runtime's code and arena, and activations of a prefill chunk (measured)
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

    def measure_costs(self) -> None:
        """Time a forward of each width, unless an earlier run on this device did."""
        if self.costs.measured:
            return
        cache = self.decoder.new_cache(_COST_POSITION + max(_COST_WIDTHS))
        self.decoder.forward([0] * _COST_POSITION, cache, logits=0)

        def forward(width: int) -> None:
            cache.crop(_COST_POSITION)
            self.decoder.forward([0] * width, cache)

        self.costs.measure(forward, _COST_WIDTHS)

    def close(self) -> None:
        self.decoder.close()
        if self.costs.measured:
            with suppress(OSError):  # only a saving of half a second at the next start
                _write_atomically(self.costs_file, json.dumps(self.costs.to_json()))


def load_target(config: RuntimeConfig, progress: Progress | None) -> Target:
    """Find (or fetch), check, and load the model. Refuses what does not fit in memory before reading any weight."""
    path = catalog.resolve(config.model, home=config.home, progress=progress)
    home = catalog.home(config.home)
    with open_weights(path) as weights:
        context = _fitting_context(config, weights)
        tokenizer = _tokenizer(path, weights, home)
        decoder = build_decoder(
            weights,
            device=_device(config),
            weight_format=config.weight_format,
            threads=config.threads,
            positions=context,
            cache_dir=home / "graphs",
        )
        costs_file = home / "costs" / f"{_cost_key(config, weights)}.json"
    return Target(decoder, tokenizer, context, _saved_costs(costs_file), costs_file)


def load_draft(name: str, config: RuntimeConfig, target: Target, progress: Progress | None) -> DraftStatus:
    """The draft `name`: "ngram", or a model that shares the target's tokenizer. Failures are noted in the status."""
    if name == "ngram":
        return DraftStatus(NgramDraft())
    label = Path(name).stem or name
    try:
        return DraftStatus(_standalone(label, name, config, target, progress))
    except (EdgespecError, OSError, MemoryError) as error:
        status = DraftStatus(_Unusable(label))
        status.failed(error)
        return status


class _Unusable(Draft):
    """Stands for a draft that could not be loaded, so that its status can be shown."""

    kind = "standalone"
    nbytes = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self) -> DraftSession:
        raise DraftError(f"draft {self.name} was not loaded")

    def close(self) -> None:
        pass


def _standalone(
    label: str, name: str, config: RuntimeConfig, target: Target, progress: Progress | None
) -> StandaloneDraft:
    path = catalog.resolve(name, home=config.home, progress=progress)
    home = catalog.home(config.home)
    with open_weights(path) as weights:
        tokenizer = _tokenizer(path, weights, home)
        compare_vocabularies(target.tokenizer, tokenizer)
        _check_memory(config, {f"draft {label}": planned_bytes(weights, _device(config), config.weight_format)})
        decoder = build_decoder(
            weights,
            device=_device(config),
            weight_format=config.weight_format,
            threads=config.threads,
            positions=target.context,
            cache_dir=home / "graphs",
        )
    return StandaloneDraft(label, decoder, target.tokenizer.size, max_positions=target.context)


def _device(config: RuntimeConfig) -> str:
    return "cpu" if config.device == "auto" else config.device


def _fitting_context(config: RuntimeConfig, weights: WeightFile) -> int:
    """The context asked for, if it fits the budget; else the longest that does, up to the model's own or 8192."""
    spec = weights.spec
    position = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    need = {"target": planned_bytes(weights, _device(config), config.weight_format), "workspace": _WORKSPACE}
    if config.context is not None:
        if config.context > spec.max_positions:
            raise ModelError(
                f"a context of {config.context} is more than the {spec.max_positions} positions of {weights.path}"
            )
        _check_memory(config, need | {"KV cache": config.context * position})
        return config.context
    longest = min(DEFAULT_CONTEXT, spec.max_positions)
    topology = detect(_device(config))
    room = min(parse_budget(config.memory_budget, topology), topology.available_bytes()) - sum(need.values())
    context = min(longest, max(room // position, min(_LEAST_CONTEXT, longest)))
    _check_memory(config, need | {"KV cache": context * position})
    return int(context)


def _check_memory(config: RuntimeConfig, need: dict[str, int]) -> None:
    topology = detect(_device(config))
    check_fits(need, parse_budget(config.memory_budget, topology), topology.available_bytes())


def _tokenizer(path: Path, weights: WeightFile, home: Path) -> Tokenizer:
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
    text = f"{weights.fingerprint()}:{config.device}:{config.weight_format}:{config.threads}:{device}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _saved_costs(file: Path) -> CostTable:
    try:
        return CostTable.from_json(json.loads(file.read_text()))
    except (OSError, ValueError):
        return CostTable()


def _write_atomically(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as scratch:
        scratch.write(text)
    os.replace(scratch.name, file)
