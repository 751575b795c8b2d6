"""What every test leaves behind as it found it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet_again() -> Iterator[None]:
    """What a command line did to the loggers (levels of --quiet and --debug, handlers) ends with its test."""
    yield
    for name in ("edgespec", "drafts", "predictor"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
