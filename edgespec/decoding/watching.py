"""What looks after the working set while an answer is made, as the rounds see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from predictor.planner import Candidate, Observation

if TYPE_CHECKING:
    from edgespec.decoding.session import Session


class Steering(Protocol):
    """Looks after the working set while one answer is made. Nothing here may raise, nor wait within a round."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Before the prefill."""

    def chunk(self) -> None:
        """Between two chunks of the prefill."""

    def first(self, tokens: Sequence[int], session: Session) -> None:
        """The answer's first token, which comes with the prefill."""

    def round(self, observation: Observation, emitted: Sequence[int], session: Session) -> None:
        """After a round, outside of its lease."""

    def saw(self, draft: str, right: bool) -> None:
        """The first token that a draft guessed, as what ran or as a shadow, was judged."""

    def read_up(self, draft: str, tokens: int, seconds: float) -> None:
        """A draft read so many tokens that it had missed."""

    def preferred(self) -> str | None:
        """The draft that is wanted most, resident or not."""

    def reads(self) -> str | None:
        """The draft that reads up on the text before others do."""

    def pays_to_read(self, lagging: Candidate, candidates: Sequence[Candidate]) -> bool | None:
        """Whether the draft that reads before others should read what it missed; None = nobody can say."""

    def informed(self) -> bool | None:
        """Whether something says how each draft would do, without its reading the text."""
