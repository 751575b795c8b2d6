"""From what a user calls drafts ("auto", names, sets, paths, checkpoints) to drafts that fit the target."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drafts import hub_sets, zoo
from drafts.base import Draft, DraftSession, LoadControl, Slot
from drafts.manifest import MANIFEST, RESERVED, Manifest
from drafts.ngram import NgramDraft
from drafts.standalone import Checkpoint, StandaloneDraft
from drafts.zoo import Entry
from edgespec import catalog
from edgespec.config import RuntimeConfig, nearest
from edgespec.decoding.session import DraftStatus
from edgespec.errors import CatalogError, ConfigError, DraftError, EdgespecError, in_words
from edgespec.loading import (
    Target,
    check_memory,
    decoder_for,
    device_of,
    footprint_of,
    target_facts,
    threads_of,
    tokenizer_of,
    usual_gammas,
)
from edgespec.models.tokenizer import compare_vocabularies
from edgespec.models.weights.opening import open_weights

if TYPE_CHECKING:
    from drafts.hub_sets import HubSet
    from drafts.states import HiddenStates
    from drafts.zoo import TargetFacts
    from edgespec.download import Progress
    from edgespec.models.base import Decoder

IMAGES = "draft-images"  # under the home folder: what is made of heads once, see `drafts.head_image`


@dataclass(frozen=True)
class LoadedDraft:
    """A draft with its health, and the folder of a set it came from (None for ngram and plain checkpoints)."""

    status: DraftStatus
    entry: Entry | None = None

    @property
    def manifest(self) -> Manifest | None:
        return None if self.entry is None else self.entry.manifest


def load_drafts(
    config: RuntimeConfig,
    target: Target,
    progress: Progress | None,
) -> Iterator[LoadedDraft]:
    """All drafts of the configuration, sets expanded. One that cannot be used has its reason in the status.

    Of those with weights only manifests and headers are read and lengths are checked; a working set loads them, and
    plans its slots. What is free is loaded and added to the target's plan. Where none of those that were named can be
    used, lookup takes their place: it costs nothing, and is better than plain decoding.
    """
    taken: set[str] = set()
    useful = False
    for source in sources(config, target.facts):
        loaded = _load(source, config, target, progress, taken)
        if loaded.status.name not in taken:  # ngram, asked for twice
            taken.add(loaded.status.name)
            useful = useful or loaded.status.active
            yield loaded
    if taken and not useful:
        yield LoadedDraft(DraftStatus(NgramDraft()))


def load_draft(
    name: str,
    config: RuntimeConfig,
    target: Target,
    progress: Progress | None,
    *,
    taken: Collection[str] = (),
) -> LoadedDraft:
    """The one draft `name`: "ngram", a draft of this target's set, a draft folder, or a checkpoint.

    taken: names that other drafts have already; this one gets another. Failures are noted in the status.
    """
    meant = named(name, config, target.facts)
    if len(meant) != 1:
        several = ", ".join(source if isinstance(source, str) else source.name for source in meant)
        return _failed(name, DraftError(f"{name} is a set of drafts ({several}); name one of them"), None)
    return _load(meant[0], config, target, progress, taken)


def check_names(config: RuntimeConfig) -> None:
    """Refuse a word that no draft, set or model is called by: a misspelling, seen before anything is loaded.

    What has the form of a path or of a hub id is not judged here: a draft that has gone costs speed, and no start.
    Raises ConfigError with the nearest name that there is.
    """
    home = catalog.home(config.home)
    for name in () if config.drafts == "auto" else config.drafts:
        if not _may_be(name, home):
            near = nearest(name, ["auto", "ngram", *_known(config, home)])
            near += "" if near.endswith("?") else "."
            source = config.sources.get("drafts", "argument drafts")
            raise ConfigError(
                f"there is no draft {name!r} ({source}): {near} Else give the path of one, or a hub id (org/name)"
            )


def _may_be(name: str, home: Path) -> bool:
    """Whether a draft can be meant by that name."""
    if name in ("auto", "ngram") or re.search(r"[/\\]|^[.~]|\.(gguf|safetensors)$", name) or os.path.exists(name):
        return True
    if catalog.find(name) is not None or hub_sets.find(name) is not None:
        return True
    return any(name == each.name or name in (e.name for e in each.entries) for each in zoo.sets(home))


def _known(config: RuntimeConfig, home: Path) -> list[str]:
    """Drafts of the target first, if its headers can be read; else those of all sets."""
    try:
        facts = target_facts(config)
    except (EdgespecError, OSError):
        facts = None
    if facts is not None:
        return [entry.name for entry in zoo.for_target(home, facts.fingerprint, facts.name, model=facts.model)]
    return list(dict.fromkeys(entry.name for each in zoo.sets(home) for entry in each.entries))


def named(name: str, config: RuntimeConfig, facts: TargetFacts) -> list[str | Entry]:
    """What a name means: drafts of sets, or the name itself where it is no draft of one.

    "auto" means all that fit the target. Else, in this order: "ngram"; a draft of this target's set; a set; a set of
    models on the hub; a draft folder or the folder of a set; a draft of another target's set (which is then refused
    with the reason); else a checkpoint by path, catalogue name or hub id.
    """
    if name == "auto":
        return ["ngram", *automatic(config, facts)]
    if name == "ngram":
        return [name]
    home = catalog.home(config.home)
    of_target = zoo.for_target(home, facts.fingerprint, facts.name, model=facts.model)
    own = [entry for entry in of_target if entry.name == name]
    if own:
        return [own[0]]
    sets = zoo.sets(home)
    for each in sets:
        if each.name == name and each.entries:
            # Of a set with drafts for this target, only those: the rest is not meant.
            ours = of_target if each.serves(facts.fingerprint, facts.model) else []
            return [e for e in ours if e.folder.parent == each.folder] or list(each.entries)
    on_hub = hub_sets.find(name)
    if on_hub is not None:
        return [*(_pulled(on_hub, home) or [draft.build().model for draft in on_hub.chosen()])]
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / MANIFEST).exists():
            return [zoo.read_entry(path)]
        return list(zoo.read_set(path).entries) or [name]
    others = [entry for each in sets for entry in each.entries if entry.name == name]
    return [others[0]] if others else [name]


def automatic(config: RuntimeConfig, facts: TargetFacts) -> list[str | Entry]:
    """The drafts with weights that "auto" means: those made for the target, and of the hub's set what was pulled."""
    home = catalog.home(config.home)
    on_hub = hub_sets.for_model(config.model)
    return [
        *zoo.for_target(home, facts.fingerprint, facts.name, model=facts.model),
        *(_pulled(on_hub, home) if on_hub else []),
    ]


def _pulled(on_hub: HubSet, home: Path) -> list[str]:
    """The set's drafts that are on this machine, each in the first build that is. The network is not asked."""
    found = []
    for draft in on_hub.drafts:
        here = [b.model for b in draft.builds.values() if catalog.located(b.model, home=home) is not None]
        found += here[:1]
    return found


def draft_label(name: str, taken: Collection[str]) -> str:
    """A short name for the draft at a path or hub id: its last part, numbered if it is taken or a word of its own."""
    label = re.sub(r"\.(gguf|safetensors)$", "", re.split(r"[/\\:]", name.rstrip("/\\"))[-1]) or "draft"
    found, number = label, 2
    while found in taken or found in RESERVED:
        found, number = f"{label}-{number}", number + 1
    return found


def sources(config: RuntimeConfig, facts: TargetFacts) -> list[str | Entry]:
    """All drafts that the configuration means, each once, "ngram" among them; nothing is loaded for that."""
    found: list[str | Entry] = []
    for name in ("auto",) if config.drafts == "auto" else config.drafts:
        found += [each for each in named(name, config, facts) if isinstance(each, str) or each not in found]
    return found


def _load(
    source: str | Entry,
    config: RuntimeConfig,
    target: Target,
    progress: Progress | None,
    taken: Collection[str],
) -> LoadedDraft:
    if source == "ngram":
        return LoadedDraft(DraftStatus(NgramDraft()))
    entry = source if isinstance(source, Entry) else None
    label = draft_label(source if isinstance(source, str) else source.name, taken)
    try:
        draft: Draft
        if isinstance(source, str):
            draft = _checkpoint(label, source, config, target, progress)
        else:
            draft = _of_set(label, source, config, target)
        return LoadedDraft(DraftStatus(draft), entry)
    except Exception as error:  # whatever a broken file raises anywhere: a draft can only cost speed
        return _failed(label, error, entry)


def _failed(label: str, error: Exception, entry: Entry | None) -> LoadedDraft:
    kind = "standalone" if entry is None or entry.manifest is None else entry.manifest.kind
    status = DraftStatus(_Unusable(label, kind))
    status.failed(error)
    status.reason = status.reason or in_words(error)  # loading is not tried again
    return LoadedDraft(status, entry)


class _Unusable:
    """Stands for a draft that could not be loaded, so that its status can be shown."""

    nbytes = 0
    reads_hidden = False

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind

    def open(self, states: HiddenStates | None = None) -> DraftSession:
        raise DraftError(f"draft {self.name} was not loaded")

    def close(self) -> None:
        pass


def _of_set(label: str, entry: Entry, config: RuntimeConfig, target: Target) -> Draft:
    manifest = zoo.usable(entry, target.facts, hashes=False)
    if manifest.kind == "standalone":
        return _standalone(label, entry.folder, config, target, manifest)
    free = manifest.kind == "phrases"
    own = {f"draft {label}": manifest.nbytes} if free else {}
    if free:
        check_memory(config, own, target.planned, to_come=target.to_come)
    images = catalog.home(config.home) / IMAGES
    draft = zoo.unloaded(entry, target.decoder, target.facts, name=label, threads=threads_of(config), images=images)
    if not free:
        _open_tables(target.decoder)
    target.planned |= own
    return draft


def _open_tables(decoder: Decoder) -> None:
    """Let the target find its tables now: the first row that is asked for takes long, and no round may wait for it."""
    decoder.embed([0])
    if not decoder.spec.tie_embeddings:
        decoder.head_rows([0])


def _checkpoint(
    label: str, name: str, config: RuntimeConfig, target: Target, progress: Progress | None
) -> StandaloneDraft:
    try:
        path = catalog.resolve(name, home=config.home, progress=progress)
    except CatalogError as error:
        known = zoo.for_target(catalog.home(config.home), target.facts.fingerprint, model=target.facts.model)
        if not known or "/" in name:
            raise
        raise DraftError(f"{error}. Drafts of this target are {', '.join(entry.name for entry in known)}") from None
    return _standalone(label, path, config, target)


def _standalone(
    label: str, path: Path, config: RuntimeConfig, target: Target, manifest: Manifest | None = None
) -> StandaloneDraft:
    home = catalog.home(config.home)
    with open_weights(path) as weights:
        tokenizer = tokenizer_of(path, weights, home)
        compare_vocabularies(target.tokenizer, tokenizer)
        positions = min(target.context, weights.spec.max_positions)
        size = footprint_of(config, weights)
        tokens = min(target.tokenizer.size, target.facts.vocab_size)
        rows = min(tokens, weights.spec.vocab_size)
        known = weights.stamps(), weights.fingerprint()
        build = partial(_build, label, path, known, positions, rows, config, manifest)
        checkpoint = Checkpoint(
            weights.spec, size.slot(positions), _files(path, manifest), build, size.cache(positions)
        )
    return StandaloneDraft(label, checkpoint, tokens, max_positions=positions)


def _files(path: Path, manifest: Manifest | None) -> tuple[Path, ...]:
    """The files of a checkpoint that hold its weights."""
    if manifest is not None:
        return tuple(path / name for name in manifest.files)
    return (path,) if path.is_file() else tuple(sorted(path.glob("*.safetensors")))


def _build(
    label: str,
    path: Path,
    known: tuple[list[tuple[str, int, int]], str],
    positions: int,
    rows: int,
    config: RuntimeConfig,
    manifest: Manifest | None,
    slot: Slot,
    control: LoadControl,
) -> Decoder:
    """The decoder of a checkpoint, which must still be the one that it was.

    known: the stamps of its files then, and its fingerprint. rows: of its head that are tokens.

    On a CUDA device it takes over what the last draft of its form left in `slot`, with its graphs.
    """
    if manifest is not None:
        for name in manifest.files:
            control.checkpoint()
            zoo.verify_file(path, name, manifest, control)
    control.checkpoint()
    with open_weights(path, control.read) as weights:
        stamps, fingerprint = known
        if weights.stamps() != stamps and weights.fingerprint() != fingerprint:
            raise DraftError(f"{path}: is another checkpoint than when draft {label} was added; add it again")
        control.checkpoint()
        anew = partial(decoder_for, config, weights, positions, catalog.home(config.home), control.checkpoint)
        if device_of(config) != "cuda" or not hasattr(slot, "kept"):
            return anew()
        from edgespec.models.cuda.slots import load_into

        decoder = load_into(slot, weights, positions, anew, control.checkpoint)  # type: ignore[arg-type]
        decoder.prepare_guesses(rows, usual_gammas(config))
        return decoder
