"""A request that was admitted: its generation, and its way back to whoever submitted it."""

from __future__ import annotations

import itertools
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from edgespec.serving.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgespec.accounts import Account
    from edgespec.decoding.round import Generation
    from edgespec.decoding.session import Session

_log = logging.getLogger(__name__)
_keys = itertools.count()


class Active:
    """Belongs to the serving thread.

    key: a number of its own. prefilling: until its first token. over: it was taken to its end, or failed. withdraw:
    takes its vote on the working set back.
    """

    def __init__(
        self, request: Request, generation: Generation, account: Account, withdraw: Callable[[], None] = lambda: None
    ) -> None:
        self.request, self.generation = request, generation
        self.key = next(_keys)
        self._account, self._withdraw = account, withdraw
        self.prefilling = True
        self.begun = False
        self.over = False
        self.first_tokens = 0
        request.become("prefill")

    @property
    def session(self) -> Session:
        return self.generation.session

    def begin(self) -> None:
        """Before the first piece of its prompt."""
        self.begun = True
        self.generation.begin()

    def prefilled(self) -> None:
        """Its first token is there."""
        self.prefilling = False
        self.first_tokens = 1
        self.request.become("running")
        share = getattr(self.session.cache, "share", None)
        if share is not None:
            share(self.session.tokens[: self.session.valid])

    def deliver(self) -> None:
        """Hand on what has become certain, and end it if that was all. Does not raise: what fails it fails it alone."""
        if self.over:
            return
        try:
            self._deliver()
        except BaseException as error:
            self.fail(error)

    def _deliver(self) -> None:
        if self.generation.over:
            self.generation.close()
        delta = self.generation.take()
        if delta is not None:
            self.request.push(delta)
        if self.generation.over:
            self._end(None)

    def fail(self, error: BaseException) -> None:
        """Something was raised while it was this one's turn."""
        if self.over:
            return
        try:
            self.generation.abandon()
        except BaseException:
            _log.exception("%s cannot be ended as it should", self.request.id)
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Whatever fails on the way: its memory and its vote are given back, and whoever waits is told."""
        if self.over:
            return
        self.over = True
        result = None
        try:
            with ExitStack() as stack:
                stack.callback(self._withdraw)
                stack.callback(self.session.close)
                result = self.generation.result
                self._account.end()
                result = self._account.complete(result)
        except BaseException as problem:
            _log.exception("%s cannot be closed as it should", self.request.id)
            error = error or (problem if result is None else None)
        if error is not None:
            self.request.fail(error)
        else:
            assert result is not None
            self.request.end(result)
