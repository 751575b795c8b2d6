"""Recorded texts as a replay wants them, with the rankings that the real ranker would have given in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from drafts.phrases import LEVELS
from edgespec.config import nearest
from edgespec.errors import ConfigError
from predictor.features import FloatArray
from predictor.policies.base import LOOKUP
from predictor.ranker import Ranker, RankerError, find
from predictor.replay import TextTrace
from predictor.traces import TracedText, TraceError, TraceHeader, TraceReader
from predictor.train.samples import samples_of

ORDERS = ("interleaved", "file", "shuffled")
_MOST_KNOWN = 100_000  # answers kept, of about 1 KB each
_KEY = 8  # hex digits by which a ranker's file lists the texts that it was made with
_LEVELS = np.array(LEVELS, np.uint8)


@dataclass(frozen=True)
class Corpus:
    """Texts of one or several trace folders.

    answers: the tokens of each text, by its name (= key of the traces). costs: what was measured when the first folder
    was recorded. rankings: None = there is no ranker. seen: texts left out because the ranker was made with them.
    left_out: drafts that were recorded, and are not replayed.
    """

    header: TraceHeader
    texts: tuple[TextTrace, ...]
    answers: Mapping[str, Sequence[int]]
    costs: Mapping[str, Any]
    rankings: Rankings | None
    seen: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def weighted(self) -> tuple[str, ...]:
        return tuple(draft.name for draft in self.header.drafts if not draft.free)

    @property
    def free(self) -> frozenset[str]:
        return frozenset(draft.name for draft in self.header.drafts if draft.free)


class Rankings:
    """The ranker's answers in recorded texts: features from the recorded tokens and hidden states, as a live run has
    them there, and what was seen of drafts in the very replay. The same question is answered once."""

    def __init__(self, ranker: Ranker) -> None:
        self._ranker = ranker
        self._parts = ranker.layout.parts
        self._places = {name: place for place, name in enumerate(ranker.layout.drafts)}
        self._features: dict[str, tuple[FloatArray, FloatArray]] = {}
        self._known: dict[tuple[str, int, tuple[tuple[str, float], ...]], Mapping[str, float]] = {}

    def learn(self, text: TracedText, header: TraceHeader) -> None:
        """Take in a text: about 1 MB of features, without which it cannot be ranked."""
        begun = self._ranker.features()
        begun.begin(text.prompt.tolist())
        chosen = range(len(header.drafts))
        made = samples_of(text, header, self._ranker.layout, chosen, every=1).features
        self._features[text.key] = begun.vector(None, None, {}), made

    def __call__(self, text: TextTrace, position: int, seen: Mapping[str, float]) -> Mapping[str, float]:
        question = (text.name, position, tuple(sorted(seen.items())))
        known = self._known.get(question)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[question] = self._ranker.rank(self._vector(text.name, position, seen))
        return known

    def _vector(self, name: str, position: int, seen: Mapping[str, float]) -> FloatArray:
        begun, made = self._features[name]
        vector = (begun if position == 0 else made[position - 1]).copy()
        rates, known = self._parts["rates"].start, self._parts["known"].start
        for draft, rate in seen.items():
            place = self._places.get(draft)
            if place is not None:
                vector[rates + place], vector[known + place] = rate, 1
        return vector


def read_corpus(
    folders: Sequence[Path],
    *,
    drafts: Sequence[str] | None = None,
    ranker: Path | str | None = None,
    all_texts: bool = False,
) -> Corpus:
    """The texts of these folders, recorded alike, each prompt once.

    drafts: as in `with_drafts`; nothing of the others is left. ranker: a file, "off", or None for the one that goes
    with the target (the user's, or the one that comes along). all_texts: keep those that the ranker was made with, in
    which it looks better than it is. Raises ConfigError for folders that are damaged, do not go together, have no
    confidences or not every position, or leave nothing.
    """
    try:
        readers = [TraceReader(folder) for folder in folders]
        recorded = _header(readers)
        header = with_drafts(recorded, drafts)
        rows = [recorded.names.index(name) for name in header.names]
        found = _ranker(header, ranker)
        rankings = None if found is None else Rankings(found)
        made_with = set() if found is None or all_texts else _made_with(found)
        texts: dict[str, TextTrace] = {}
        answers: dict[str, Sequence[int]] = {}
        left_out = set()
        for reader in readers:
            for text in reader:
                if text.key[:_KEY] in made_with:
                    left_out.add(text.key)
                elif text.key not in texts:
                    kept = _with_rows(text, rows)
                    texts[text.key] = as_trace(kept, header)
                    answers[text.key] = text.answer.tolist()
                    if rankings is not None:
                        rankings.learn(kept, header)
    except (TraceError, RankerError) as error:
        raise ConfigError(f"{str(error).rstrip('.')}.") from error
    if not texts:
        raise ConfigError(
            f"All {len(left_out)} texts were used to make the ranker; record others, or take them all with --all-texts "
            "(the ranker then looks better than it is)."
        )
    without = tuple(name for name in recorded.names if name not in header.names)
    return Corpus(header, tuple(texts.values()), answers, readers[0].costs, rankings, len(left_out), without)


def with_drafts(header: TraceHeader, drafts: Sequence[str] | None) -> TraceHeader:
    """With these drafts only, in this order, as if no others had been there; None = with all. Lookup is always there.

    Raises ConfigError for a draft that was not recorded, one that is there twice, and if none has weights.
    """
    if drafts is None:
        return header
    known = {draft.name: draft for draft in header.drafts}
    names = [name for name in drafts if name != LOOKUP]
    for place, name in enumerate(names):
        if name not in known:
            raise ConfigError(f"--drafts: the draft {name!r} was not recorded; {nearest(name, list(known))}")
        if name in names[:place]:
            raise ConfigError(f"--drafts has {name} twice.")
    if all(known[name].free for name in names):
        raise ConfigError(
            "--drafts names no draft with weights, so that there is nothing to choose from; lookup alone is "
            f"--policies {LOOKUP}."
        )
    return replace(header, drafts=tuple(known[name] for name in names))


def _with_rows(text: TracedText, rows: Sequence[int]) -> TracedText:
    """With these of its drafts' rows, in this order."""
    if list(rows) == list(range(len(text.accepts))):
        return text
    chosen = list(rows)
    confidences = None if text.confidences is None else text.confidences[chosen]
    return replace(text, accepts=text.accepts[chosen], confidences=confidences)


def read_header(folders: Sequence[Path]) -> TraceHeader:
    """What the folders have in common. Raises ConfigError as `read_corpus` does; no text is read."""
    try:
        return _header([TraceReader(folder) for folder in folders])
    except TraceError as error:
        raise ConfigError(f"{str(error).rstrip('.')}.") from error


def _header(readers: Sequence[TraceReader]) -> TraceHeader:
    header = readers[0].header
    for reader in readers[1:]:
        other = reader.header
        differs = [
            name
            for name in ("target", "drafts", "gamma_max", "stride", "confidences", "hidden_size")
            if getattr(other, name) != getattr(header, name)
        ]
        if differs:
            raise ConfigError(
                f"{reader.folder} was recorded with other {', '.join(differs)} than {readers[0].folder}: "
                "simulate them apart."
            )
    if header.stride != 1 or not header.confidences:
        raise ConfigError(
            f"{readers[0].folder} does not hold what rounds are made of: record with --stride 1 --confidences."
        )
    return header


def as_trace(text: TracedText, header: TraceHeader) -> TextTrace:
    """A text for the replay. What free drafts had to go on is told by their first token's confidence."""
    levels = {}
    if text.confidences is not None:
        for row, draft in enumerate(header.drafts):
            if draft.free:
                first = text.confidences[row, :, 0]
                levels[draft.name] = np.where(first > 0, _LEVELS[first], 0).astype(np.uint8)
    return TextTrace(**text.replay(), name=text.key, levels=levels)


def _ranker(header: TraceHeader, wanted: Path | str | None) -> Ranker | None:
    from edgespec import catalog
    from predictor.ranker import ZOO

    if wanted == "off":
        return None
    target = str(header.target["fingerprint"])
    drafts = {draft.name: draft.fingerprint for draft in header.drafts if not draft.free}
    if wanted is not None:
        return Ranker.load(Path(wanted), target=target, drafts=drafts)
    found, reasons = find((catalog.home(None) / "rankers", ZOO), target, drafts)
    if found is None and reasons:
        raise ConfigError(f"{reasons[0]} Simulate without one with --ranker off.")
    return found


def _made_with(ranker: Ranker) -> set[str]:
    """The keys that a ranker's file lists, shortened."""
    listed = ranker.info.training.get("seen", "")
    return {listed[at : at + _KEY] for at in range(0, len(listed), _KEY)} if isinstance(listed, str) else set()


def ordered(texts: Sequence[TextTrace], order: str, seed: int = 0) -> tuple[TextTrace, ...]:
    """Texts as recorded ("file"), one of each domain in turn ("interleaved"), or shuffled by a seed."""
    if order == "shuffled":
        return tuple(texts[place] for place in np.random.default_rng(seed).permutation(len(texts)))
    if order == "file":
        return tuple(texts)
    queues: dict[str, list[TextTrace]] = {}
    for text in texts:
        queues.setdefault(text.domain, []).append(text)
    longest = max(map(len, queues.values()), default=0)
    return tuple(queue[place] for place in range(longest) for queue in queues.values() if place < len(queue))


def limited(texts: Sequence[TextTrace], limit: int | None) -> tuple[TextTrace, ...]:
    """At most `limit` texts of each domain, evenly spread."""
    if limit is None:
        return tuple(texts)
    kept: set[str] = set()
    for domain in {text.domain for text in texts}:
        mine = [text.name for text in texts if text.domain == domain]
        count = min(limit, len(mine))
        kept |= {mine[place * len(mine) // count] for place in range(count)}
    return tuple(text for text in texts if text.name in kept)


def shortened(text: TextTrace, tokens: int) -> TextTrace:
    """The text with an answer of at most so many tokens (2 or more)."""
    columns = tokens - 1
    if text.accepts.shape[1] <= columns:
        return text
    left = np.minimum(np.arange(columns, 0, -1), 255).astype(np.uint8)  # nothing is right beyond the end
    return replace(
        text,
        accepts=np.minimum(text.accepts[:, :columns], left),
        lookup_level=text.lookup_level[:columns],
        lookup_accepts=np.minimum(text.lookup_accepts[:columns], left),
        confidences=None if text.confidences is None else text.confidences[:, :columns],
        levels={name: level[:columns] for name, level in text.levels.items()},
    )
