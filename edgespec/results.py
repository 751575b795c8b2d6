"""What a request returns: the same objects for the Python API, the command line and files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probabilities at one generated position, from the target's raw logits (before bias, penalties, temperature).

    margin: top-1 minus top-2 logit of that row; a margin near 0 is a near tie, which other widths or formats may flip.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    margin: float


@dataclass(frozen=True, slots=True)
class TextDelta:
    """One piece of a stream. Concatenated `text` and `token_ids` equal the final result's exactly.

    accepted: how many of `token_ids` were guessed by a draft. draft: the one of the round that completed this piece,
    None for a plain round. (Tokens that were held back, see `Answer`, may come from earlier rounds.) finish_reason is
    None on all pieces but the last. logprobs: one entry per token of this piece, None unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    draft: str | None
    accepted: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


class DraftTally(NamedTuple):
    """What came of one draft's blocks. blocks: how many it proposed; first: of these, the ones whose first token stood.

    proposed, accepted: tokens, counted as in GenerationStats.
    """

    blocks: int = 0
    first: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(slots=True)
class GenerationStats:
    """Counters and seconds of one request. Decode figures leave out prefill; load times count completion.

    tokens_per_second: tokens after the first, over the seconds from the first to the last emitted token.
    mean_tokens_per_round: emitted tokens per target forward in the decode phase, bonus / corrected token included.
    round_tokens: the same one by one, without what a stop string took back; with the prefill's token they add up to
    new_tokens.
    acceptance_rate: accepted / proposed draft tokens; acceptance_by_position[i]: accepted share of the proposals that
    reached position i; tries_by_position[i]: how many those were.
    draft_share: rounds by draft name ("plain" = no draft was used).
    by_draft: what came of the blocks of each draft that proposed any.
    gamma_histogram: rounds by planned gamma, after the limit on new tokens; 0 = plain step.
    peak_memory_bytes: of the process since it started.
    fallback_share: share of rounds in which the draft that the policy wanted most could not run, because it was not
    resident or still had to read.
    loads: drafts that became resident while this answer was made. load_seconds_hidden: of their loads, beside the
    rounds; load_seconds_exposed: in which rounds waited (0 except under the policy "mab-sync").
    target_seconds: of forwards; where requests shared one, each counts the whole of it.
    catch_up_seconds: in which drafts read what they had missed of the conversation, ahead of a block.
    energy_joules: of the whole board from the begin of the request to its end, prefill included; None where the board
    does not measure it throughout. gpu_load: 0 to 1, the mean of a look a second; None where it is not told.
    device_notes: what slowed the device down meanwhile (heat, current, short memory).
    predictor_seconds: planning, learning and features, on the decoding thread. ranker_seconds: beside it.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    time_to_first_token_s: float = 0.0
    tokens_per_second: float = 0.0
    prefill_tokens_per_second: float = 0.0
    rounds: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    mean_tokens_per_round: float = 0.0
    round_tokens: list[int] = field(default_factory=list)
    acceptance_rate: float = 0.0
    acceptance_by_position: list[float] = field(default_factory=list)
    tries_by_position: list[int] = field(default_factory=list)
    draft_share: dict[str, int] = field(default_factory=dict)
    by_draft: dict[str, DraftTally] = field(default_factory=dict)
    fallback_share: float = 0.0
    switches: int = 0
    loads: int = 0
    load_seconds_hidden: float = 0.0
    load_seconds_exposed: float = 0.0
    gamma_histogram: dict[int, int] = field(default_factory=dict)
    predictor_seconds: float = 0.0
    ranker_seconds: float = 0.0
    catch_up_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    peak_memory_bytes: int = 0
    energy_joules: float | None = None
    gpu_load: float | None = None
    device_notes: list[str] = field(default_factory=list)

    @property
    def joules_per_token(self) -> float | None:
        """Of each new token, with its share of the prefill; None where the energy is not measured."""
        return None if self.energy_joules is None or not self.new_tokens else self.energy_joules / self.new_tokens

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished (or cancelled) answer.

    token_ids end with the stop token if one ended the answer (its text is not in `text`). With a stop string, `text`
    ends right before it and token_ids end with the last token that contributes to `text`. drafts[i]: name of the draft
    that guessed token i, or None if the target chose it (corrected, bonus, plain). logprobs: one entry per token, or
    None unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    stats: GenerationStats
    drafts: tuple[str | None, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
