"""One evaluation: record (or find) each prompt's answer, replay every draft on it, and put the figures together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafts.base import Draft
from drafts.evaluate import LookupFirst, Plain, Trajectory, coverage, first_token, reads_hidden, score
from drafts.figures import Bootstrap, PromptScores, difference, figures, summary
from drafts.heatmap import own_domains
from drafts.ngram import NgramDraft
from drafts.phrases import PhraseDraft
from drafts.recording import record
from edgespec.decoding.session import Session
from edgespec.errors import PromptError
from edgespec.evaluation.prompts import Item, Skipped
from edgespec.evaluation.trajectories import TrajectoryStore
from edgespec.models.base import Decoder
from predictor.costs import CostTable

_log = logging.getLogger(__name__)

_REPEATS = 7  # of each width, at the usual length of a conversation

Encode = Callable[[list[dict[str, str]]], list[int]]  # messages -> token ids


@dataclass
class Row:
    """One draft (or hybrid) of the evaluation. domain: what the draft is for, or "". reason: why it could not be
    evaluated, None if it was."""

    draft: Draft
    domain: str = ""
    reason: str | None = None
    scores: dict[str, PromptScores] = field(default_factory=dict)  # by the prompt's key

    @property
    def name(self) -> str:
        return self.draft.name


@dataclass(frozen=True, slots=True)
class Settings:
    gammas: tuple[int, ...] = (1, 2, 3, 5)
    max_new_tokens: int = 128
    floor: float = 0.0
    seed: int = 0
    window: int = 256


class Evaluation:
    """Drafts on prompts. `add` takes in one prompt after the other; `figures` puts all together.

    session: of an engine with the target; its drafts are not used. drafts: to be judged; they get further rows with
    others in front, see `with_hybrids`. encode: messages to token ids as the engine would. domains: what the drafts are
    for, by name.
    """

    def __init__(
        self,
        session: Session,
        encode: Encode,
        drafts: Sequence[Draft],
        settings: Settings,
        store: TrajectoryStore,
        *,
        domains: Mapping[str, str] | None = None,
    ) -> None:
        self._session = session
        self._encode = encode
        self.settings = settings
        self._store = store
        known = domains or {}
        self.rows = [Row(draft, known.get(behind(draft).name, "")) for draft in with_hybrids(drafts)]
        self.items: dict[str, Item] = {}
        self.skipped: list[Skipped] = []
        self.answer_tokens: dict[str, int] = {}
        self._lengths: list[int] = []

    def add(self, item: Item) -> None:
        """Record and replay one prompt; one that does not fit is noted in `skipped`."""
        try:
            trajectories = self._record(item)
        except PromptError as error:
            self.skipped.append(Skipped(item.file, item.line, str(error)))
            return
        if all(len(trajectory.answer) < 2 for trajectory in trajectories):
            self.skipped.append(Skipped(item.file, item.line, "the target's answer is empty"))
            return
        key = f"{item.file}:{item.line}"
        self.items[key] = item
        self.answer_tokens[key] = sum(len(trajectory.answer) for trajectory in trajectories)
        self._lengths += [len(t.prompt) + len(t.answer) // 2 for t in trajectories]
        for row in self.rows:
            if row.reason is None:
                self._replay(row, key, trajectories)

    def _record(self, item: Item) -> list[Trajectory]:
        """The recorded answers to all turns; later ones follow the target's own answers to those before."""
        session, settings = self._session, self.settings
        messages: list[dict[str, str]] = []
        made = []
        for turn in item.turns:
            messages.append({"role": "user", "content": turn})
            prompt = session.check(self._encode(messages))
            room = session.context - len(prompt)
            if room < settings.max_new_tokens:
                raise PromptError(
                    f"the prompt has {len(prompt)} tokens, which leaves room for {room} of the "
                    f"{settings.max_new_tokens} new ones in the context of {session.context}"
                )
            trajectory = self._store.get(prompt, lambda prompt=prompt: self._plain(prompt))  # type: ignore[misc]
            made.append(trajectory)
            messages.append({"role": "assistant", "content": session.tokenizer.decode(trajectory.answer)})
        return made

    def _plain(self, prompt: list[int]) -> Trajectory:
        session, settings = self._session, self.settings
        return record(
            session.target,
            prompt,
            settings.max_new_tokens,
            eos_ids=session.eos_ids,
            token_count=session.token_count,
            window=settings.window,
        )

    def _replay(self, row: Row, key: str, trajectories: Iterable[Trajectory]) -> None:
        """Judge one draft on one prompt. Its failure ends its row, not the evaluation."""
        vocabulary = getattr(row.draft, "vocab_ids", None)  # of drafts with a reduced one
        total = PromptScores()
        try:
            for trajectory in trajectories:
                floor = self.settings.floor
                rounds = {gamma: score(row.draft, trajectory, gamma, floor=floor) for gamma in self.settings.gammas}
                covered = None if vocabulary is None else coverage(vocabulary, [trajectory])
                total.add(PromptScores(rounds, first_token(row.draft, trajectory), covered))
        except Exception as error:
            row.reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            _log.warning("draft %s failed and is left out: %s", row.name, row.reason)
            return
        row.scores[key] = total

    def domains(self) -> dict[str, list[str]]:
        """Domain -> keys of its prompts, in the order in which they came."""
        found: dict[str, list[str]] = {}
        for key, item in self.items.items():
            found.setdefault(item.domain, []).append(key)
        return found

    def measure(self) -> CostTable:
        """Time the target's steps at the usual length of these conversations."""
        widths = range(1, max(self.settings.gammas) + 2)
        reading = any(reads_hidden(row.draft) for row in self.rows)
        return measure_costs(self._session.target, self.usual_length, widths, hidden=reading)

    @property
    def usual_length(self) -> int:
        """Tokens of a conversation in the middle of its answer (the median)."""
        return sorted(self._lengths)[len(self._lengths) // 2]

    def summary(self, row: Row) -> dict[str, Any]:
        """What holds for a draft as a whole, on the prompts of its own domains if there are any."""
        if row.reason is not None:
            return {}
        own = own_domains(row.domain)
        keys = [key for key, item in self.items.items() if item.domain in own] or list(self.items)
        return summary([row.scores[key] for key in keys])

    def by_prompt(self) -> list[dict[str, Any]]:
        """The counters behind the figures: for each prompt and draft, gamma -> [accepted, rounds]."""
        judged = [row for row in self.rows if row.reason is None]
        return [
            {
                "id": item.name,
                "domain": item.domain,
                "category": item.category,
                "file": item.file,
                "line": item.line,
                "answer_tokens": self.answer_tokens[key],
                "accepted_and_rounds": {
                    row.name: {str(g): [s.accepted, s.rounds] for g, s in row.scores[key].rounds.items()}
                    for row in judged
                },
            }
            for key, item in self.items.items()
        ]

    def figures(self, costs: CostTable | None, against: str | None) -> dict[str, Any]:
        """Figures by draft and domain, and by draft and category where those differ; differences from `against`."""
        verify = None if costs is None else costs.verify
        by_domain = self.domains()
        by_category: dict[str, list[str]] = {}
        for key, item in self.items.items():
            by_category.setdefault(item.category, []).append(key)
        judged = [row for row in self.rows if row.reason is None]
        return {
            "cells": self._cells(judged, by_domain, verify, "domain"),
            "categories": []
            if by_category.keys() == by_domain.keys()
            else self._cells(judged, by_category, verify, "category"),
            "differences": self._differences(judged, by_domain, against),
        }

    def _cells(
        self, rows: Iterable[Row], groups: Mapping[str, list[str]], verify: Any, label: str
    ) -> list[dict[str, Any]]:
        cells = []
        for group, keys in groups.items():
            bootstrap = Bootstrap(group, len(keys), self.settings.seed)
            cells += [
                {"draft": row.name, label: group, **figures([row.scores[key] for key in keys], bootstrap, verify)}
                for row in rows
            ]
        return cells

    def _differences(
        self, rows: Sequence[Row], groups: Mapping[str, list[str]], against: str | None
    ) -> list[dict[str, Any]]:
        known = {row.name: row for row in rows}
        if against not in known:
            return []
        found = []
        for group, keys in groups.items():
            bootstrap = Bootstrap(group, len(keys), self.settings.seed)
            for row in rows:
                other = known.get(row.name.removesuffix(behind(row.draft).name) + against)
                if other is None or other is row:
                    continue
                mine, theirs = [row.scores[key] for key in keys], [other.scores[key] for key in keys]
                found += [
                    {
                        "draft": row.name,
                        "against": other.name,
                        "domain": group,
                        "gamma": gamma,
                        **difference(mine, theirs, gamma, bootstrap),
                    }
                    for gamma in self.settings.gammas
                ]
        return found


def with_hybrids(drafts: Sequence[Draft]) -> list[Draft]:
    """The rows of an evaluation: plain, the drafts, and if lookup is there, all others with lookup in front, and every
    model with lookup and then phrases in front (of the first table, if there is one)."""
    lookup = next((draft for draft in drafts if isinstance(draft, NgramDraft)), None)
    others = [draft for draft in drafts if draft is not lookup]
    if lookup is None:
        return [Plain(), *others]
    tables = [draft for draft in others if isinstance(draft, PhraseDraft)]
    models = [draft for draft in others if draft not in tables]
    rows: list[Draft] = [Plain(), lookup, *others, *(LookupFirst(draft, lookup) for draft in others)]
    return rows + [LookupFirst(draft, lookup, table) for table in tables[:1] for draft in models]


def behind(draft: Draft) -> Draft:
    """The draft behind what is in front of it; itself if it is no hybrid."""
    return draft.draft if isinstance(draft, LookupFirst) else draft


def measure_costs(target: Decoder, position: int, widths: Iterable[int], *, hidden: bool = False) -> CostTable:
    """Seconds of one target forward by width, median of several, after `position` tokens.

    hidden: steps over several tokens give hidden states too, as for a draft that reads them; a plain step does not.
    """
    widths = list(widths)
    position = max(min(position, target.spec.max_positions - max(widths)), 0)
    cache = target.new_cache(position + max(widths))
    for begin in range(0, position, 256):
        target.forward([0] * min(256, position - begin), cache, logits=0)

    def forward(width: int) -> None:
        cache.crop(position)
        target.forward([0] * width, cache, hidden=hidden and width > 1)

    table = CostTable()
    table.measure(forward, widths, repeats=_REPEATS)
    return table
