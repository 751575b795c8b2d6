"""Who takes part: policies of docs/policies.md and other engines, each with what its worker is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec import catalog
from edgespec.bench.peers.registry import PREFIX, peers
from edgespec.bench.specbench.folder import PLAIN
from edgespec.config import RuntimeConfig, nearest
from edgespec.draft_loading import draft_label, sources
from edgespec.errors import ConfigError
from edgespec.models.weights.opening import open_weights
from predictor.costs import CostTable
from predictor.policies import POLICIES, make_policy

if TYPE_CHECKING:
    from drafts.zoo import TargetFacts
    from edgespec.bench.peers.base import Contender

NGRAM, STATIC, ALL_STATICS = "ngram", "static", "all-statics"
STATIC_GAMMA = 3
ORACLES = ("oracle-static", "oracle-dynamic")
_ENGINE_PACKAGES = ("edgespec", "numpy", "onnxruntime", "tokenizers")
_INSTALLED_AS = {"llama_cpp": "llama-cpp-python", "onnxruntime_genai": "onnxruntime-genai"}  # by what is imported
POLICY_FACTORY = "edgespec.bench.specbench.worker:PolicyArm"
_WEIGHTS = {
    "exact": "the file's own blocks (4-bit where the file is)",
    "int8": "8-bit blocks",
    "float32": "float32, dequantised",
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One policy or peer. factory: "module:Class" in the worker, made with `options`. weights: in words.

    missing: why it cannot take part here, None if it can. nbytes: of memory that it needs, about.
    """

    name: str
    kind: str
    factory: str
    options: dict[str, Any] = field(default_factory=dict)
    weights: str = ""
    missing: str | None = None
    nbytes: int = 0

    @property
    def is_policy(self) -> bool:
        return self.kind == "policy"


def split_specs(text: str) -> list[str]:
    """ "plain,static:code@4;memspec,n=8" -> the specs; a comma before "name=" belongs to the spec before it."""
    specs: list[str] = []
    for part in text.replace(";", ",").split(","):
        if "=" in part and specs:
            specs[-1] += f",{part.strip()}"
        elif part.strip():
            specs.append(part.strip())
    if not specs or len(set(specs)) < len(specs):
        raise ConfigError(f"--policies {text!r}: give policies, each once, with commas between")
    return specs


def expanded(specs: Sequence[str], drafts: Sequence[str]) -> list[str]:
    """`plain` put in front where it is not named, "all-statics" as one `static` for every draft, and "static" alone as
    that of the first draft, if there is any."""
    found = [] if PLAIN in specs else [PLAIN]
    meant = {STATIC: drafts[:1], ALL_STATICS: drafts}
    for spec in specs:
        found += [f"static:{draft}@{STATIC_GAMMA}" for draft in meant[spec]] if spec in meant else [spec]
    return list(dict.fromkeys(found))


def check(specs: Sequence[str], drafts: Sequence[str], slots: int | None) -> None:
    """ConfigError for a policy or peer that is not known, or a draft that there is not. Nothing is loaded."""
    known = [PREFIX + peer.name for peer in peers()]
    for spec in specs:
        if spec.startswith(PREFIX):
            if spec not in known:
                raise ConfigError(f"--policies: the peer {spec!r} is not known; {nearest(spec, known)}")
        elif spec.split(",")[0].split("@")[0] in ORACLES:
            raise ConfigError(f"--policies: {spec} knows the future of a text; use 'edgespec bench simulate' for it")
        elif spec not in (NGRAM, STATIC, ALL_STATICS):
            try:
                make_policy(spec, CostTable(), drafts, capacity=slots or 1)
            except ValueError as error:
                more = f"; and there are {NGRAM}, {STATIC}, {ALL_STATICS} and {', '.join(known)}"
                raise ConfigError(f"--policies: {error}{'' if spec.startswith(POLICIES) else more}") from error


@dataclass(frozen=True, slots=True)
class DraftFile:
    """One draft with files. weighty: it has weights, which come and go, so that a policy can hold and name it."""

    name: str
    fingerprint: str
    weighty: bool = True


def drafts_of(config: RuntimeConfig, facts: TargetFacts) -> list[DraftFile]:
    """The drafts with files that the configuration means, by their manifests and headers alone."""
    found: dict[str, DraftFile] = {}
    for source in sources(config, facts):
        if source == NGRAM:
            continue
        if isinstance(source, str):
            draft = _checkpoint(source, config, found)
        elif source.manifest is not None and not source.problem:
            weighty = source.manifest.kind != "phrases"
            draft = DraftFile(draft_label(source.name, found), source.manifest.weights_fingerprint, weighty)
        else:
            continue  # the engine says what is wrong with it
        found[draft.name] = draft
    return list(found.values())


def _checkpoint(source: str, config: RuntimeConfig, taken: Collection[str]) -> DraftFile:
    """A model used as a draft; one that is not on this machine yet has no fingerprint."""
    path = catalog.located(source, home=config.home)
    if path is None:
        return DraftFile(draft_label(source, taken), "")
    with open_weights(path) as weights:
        return DraftFile(draft_label(source, taken), weights.fingerprint())


def policy_arm(spec: str, config: RuntimeConfig, *, nbytes: Mapping[bool, int]) -> Arm:
    """nbytes: what an engine needs, with drafts and without."""
    if spec == PLAIN:
        config = config.replace(drafts="off", gamma="auto")
    elif spec == NGRAM:
        config = config.replace(drafts=[NGRAM], policy="edgespec", gamma="auto")
    else:
        config = config.replace(policy=spec, gamma="auto")
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "sources"}
    options = {"config": {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}}
    with_drafts = spec not in (PLAIN, NGRAM)
    return Arm(
        spec, "policy", POLICY_FACTORY, options, _WEIGHTS[config.weight_format], nbytes=nbytes.get(with_drafts, 0)
    )


def packages(names: Collection[str], device: str) -> set[str]:
    """What these arms compute with, as it is installed: the engine's packages, for plain is always there, and those of
    peers. device: of the engine, never "auto"."""
    used = {*_ENGINE_PACKAGES, *(() if device == "cpu" else ("torch",))}
    for peer in peers():
        if PREFIX + peer.name in names:
            used.update(_INSTALLED_AS.get(module, module) for module in peer.packages)
    return used


def peer_arm(spec: str, known: Sequence[Contender], model: Path, threads: int, *, nbytes: int, greedy: bool) -> Arm:
    """nbytes: what a peer needs."""
    peer = next(peer for peer in known if PREFIX + peer.name == spec)
    missing = peer.missing(model) or (None if greedy else "it is only asked greedily, which a temperature is not")
    options = {"model": str(model), "threads": threads, **peer.options}
    return Arm(spec, "peer", peer.factory, options, peer.weights, missing, nbytes)
