"""From traces to samples: the features of a text at many positions, and how often each draft is right from there on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from predictor.features import RECENT, SCALARS, FloatArray, Layout, TextFeatures
from predictor.ranker import RankedDraft
from predictor.traces import TracedText, TraceError, TraceHeader, TraceReader

HORIZON = 16  # positions ahead that count
EVERY = 4  # positions from one sample to the next: about a round or two apart
MEMORY = 0.8  # of what was seen of a draft's first guesses, from one look at it to the next
_DENSITIES = (0.0, 0.0, 0.03, 0.1, 0.4)  # of positions at which a draft was looked at, drawn for each text and draft

BoolArray = npt.NDArray[np.bool_]

# What a vector may lack: parts, and the scalars that belong to them.
GROUPS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hidden_recent": (("hidden_recent",), ("hidden_recent?",)),
    "hidden_prompt": (("hidden_prompt",), ("hidden_prompt?",)),
    "text_recent": (("text_recent",), ("recent?", "recent_share", "new_length", "copied", "run")),
    "text_prompt": (("text_prompt",), ("prompt_length",)),
    "acceptance": (("rates", "known"), ()),
}
PROMPT = ("hidden_prompt", "text_prompt")
RECENTLY = ("hidden_recent", "text_recent")


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples of one text.

    features: float32 [n, size], without acceptance. known: int [n], tokens of the answer that are known at each. hits:
    float32 [n, drafts], first tokens that are right over the next positions; counts: float32 [n], how many those are.
    tokens: float32 [n, drafts], mean accepted tokens of a whole block over the same positions. firsts: bool [drafts,
    columns], whether the first token is right at each column of the traces; column: int [n], that of each sample.
    """

    key: str
    domain: str
    features: FloatArray
    known: npt.NDArray[np.int64]
    hits: FloatArray
    counts: FloatArray
    tokens: FloatArray
    firsts: BoolArray
    column: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts of one or several folders, all with the same drafts and target."""

    layout: Layout
    drafts: tuple[RankedDraft, ...]
    domains: tuple[str, ...]  # what each draft was made for
    target: str
    target_name: str
    stride: int
    gamma_max: int
    texts: tuple[Samples, ...]

    @property
    def horizon(self) -> int:
        return max(HORIZON // self.stride, 1)


def read_corpus(folders: Sequence[Path], *, every: int = EVERY) -> Corpus:
    """All texts of the folders, one after the other (only the samples stay in memory).

    Drafts without weights are left out: they are always there. TraceError if a folder is damaged, or does not go with
    the first one.
    """
    if not folders:
        raise ValueError("no folders")
    readers = [TraceReader(folder) for folder in folders]
    header = readers[0].header
    for reader in readers[1:]:
        _same(header, reader.header, readers[0].folder, reader.folder)
    chosen = [place for place, draft in enumerate(header.drafts) if not draft.free]
    if not chosen:
        raise TraceError(f"{folders[0]}: has no draft with weights, so there is nothing to rank")
    drafts = [header.drafts[place] for place in chosen]
    layout = Layout(header.hidden_size, [draft.name for draft in drafts])
    texts: dict[str, Samples] = {}
    for reader in readers:
        for text in reader:
            if text.key not in texts:
                texts[text.key] = samples_of(text, header, layout, chosen, every=every)
    return Corpus(
        layout=layout,
        drafts=tuple(RankedDraft(draft.name, draft.fingerprint) for draft in drafts),
        domains=tuple(draft.domain for draft in drafts),
        target=str(header.target["fingerprint"]),
        target_name=str(header.target.get("name", "")),
        stride=header.stride,
        gamma_max=header.gamma_max,
        texts=tuple(texts.values()),
    )


def _same(first: TraceHeader, other: TraceHeader, folder: Path, other_folder: Path) -> None:
    for what, mine, theirs in (
        ("target", first.target["fingerprint"], other.target["fingerprint"]),
        ("drafts", [(d.name, d.fingerprint) for d in first.drafts], [(d.name, d.fingerprint) for d in other.drafts]),
        ("hidden size", first.hidden_size, other.hidden_size),
        ("stride", first.stride, other.stride),
        ("gamma", first.gamma_max, other.gamma_max),
    ):
        if mine != theirs:
            raise TraceError(f"{other_folder}: has another {what} than {folder}; use folders recorded alike")


def samples_of(
    text: TracedText, header: TraceHeader, layout: Layout, chosen: Sequence[int], *, every: int = EVERY
) -> Samples:
    """One text's samples: at its first column, and at every `every`-th position from there."""
    known = text.known(header.stride)
    column = np.arange(0, len(known), max(every // header.stride, 1))
    accepts = text.accepts[list(chosen)].astype(np.float32)
    hits, counts = _ahead((accepts > 0).astype(np.float32), column, max(HORIZON // header.stride, 1))
    tokens, _ = _ahead(accepts, column, max(HORIZON // header.stride, 1))
    features = _features(text, known[column], layout)
    return Samples(
        key=text.key,
        domain=text.domain,
        features=features,
        known=known[column],
        hits=hits,
        counts=counts,
        tokens=tokens / counts[:, None],
        firsts=accepts > 0,
        column=column,
    )


def _ahead(values: FloatArray, column: npt.NDArray[np.int64], horizon: int) -> tuple[FloatArray, FloatArray]:
    """Sums [n, drafts] of `values` [drafts, columns] over the next `horizon` columns, and how many there are [n]."""
    total = np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1, dtype=np.float64)], axis=1)
    end = np.minimum(column + horizon, values.shape[1])
    sums = (total[:, end] - total[:, column]).T
    return sums.astype(np.float32), (end - column).astype(np.float32)


def _features(text: TracedText, known: npt.NDArray[np.int64], layout: Layout) -> FloatArray:
    """Vectors as a live run has them after `known` tokens of the answer, without acceptance: float32 [n, size]."""
    made = TextFeatures(layout)
    made.begin(text.prompt.tolist())
    answer = text.answer.tolist()
    hidden = text.hidden.astype(np.float32)
    # The last known token was not read yet: rows reach up to the one before it.
    behind = len(text.answer) - 1 - len(hidden)  # answer tokens that are known where the first row is the last one, - 1
    rows, done = [], 0
    for count in known.tolist():
        made.push(answer[done:count])
        done = count
        end = count - 1 - behind
        rows.append(made.vector(hidden[max(end - RECENT, 0) : end], text.prompt_hidden, {}))
    return np.stack(rows)


def places(layout: Layout, groups: Iterable[str]) -> BoolArray:
    """bool [size]: the numbers that belong to these of `GROUPS`."""
    mask = np.zeros(layout.size, bool)
    for group in groups:
        parts, scalars = GROUPS[group]
        for part in parts:
            mask[layout.parts[part]] = True
        for scalar in scalars:
            mask[layout.scalar(scalar)] = True
    return mask


def start_features(layout: Layout) -> BoolArray:
    """The numbers that are there before the prompt was read."""
    return places(layout, ("text_prompt",))


class Watch:
    """What live runs could know of each draft's first guesses at the samples of some texts.

    Each draft is looked at at random positions, as often as the draft that runs, as one that only guesses along now and
    then, or never; older looks count for less, and only positions before a sample count.
    """

    def __init__(self, texts: Sequence[Samples]) -> None:
        self._columns = [text.firsts.shape[1] for text in texts]
        self._firsts = np.zeros((max(self._columns), len(texts), len(texts[0].firsts)), bool)
        for place, text in enumerate(texts):
            self._firsts[: text.firsts.shape[1], place] = text.firsts.T
        self._column = np.concatenate([text.column for text in texts])
        self._text = np.repeat(np.arange(len(texts)), [len(text.column) for text in texts])

    def look(self, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
        """(rates, known) at each sample of all texts, float32 [n, drafts]: 0 where nothing was seen."""
        shape = self._firsts.shape
        looked = rng.random(shape) < rng.choice(_DENSITIES, (1, *shape[1:]))
        rates, knowns = np.zeros(shape, np.float32), np.zeros(shape, bool)
        rate, known = np.zeros(shape[1:], np.float32), np.zeros(shape[1:], bool)
        for at in range(shape[0]):
            rates[at], knowns[at] = rate, known
            kept = np.where(known, np.float32(MEMORY), np.float32(0))
            rate = np.where(looked[at], kept * rate + (1 - kept) * self._firsts[at], rate)
            known = known | looked[at]
        where = self._column, self._text
        return rates[where], knowns[where].astype(np.float32)


def split(texts: Sequence[Samples], share: float, seed: int) -> tuple[list[Samples], list[Samples]]:
    """(the rest, about `share` of the texts of each domain): whole texts, by a hash of their prompts."""
    rest, taken = [], []
    for domain in sorted({text.domain for text in texts}):
        of_domain = [text for text in texts if text.domain == domain]
        of_domain.sort(key=lambda text: hashlib.sha256(f"{seed}:{text.key}".encode()).hexdigest())
        count = round(share * len(of_domain))
        taken += of_domain[:count]
        rest += of_domain[count:]
    return rest, taken


assert {scalar for _, scalars in GROUPS.values() for scalar in scalars} == set(SCALARS)
