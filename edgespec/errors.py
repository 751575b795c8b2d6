"""Errors that edgespec raises on purpose.

Each message is one or two sentences that name the thing (file, tensor, parameter, key) and what to do about it. The
command line prints the message alone and exits with 2; everything else is a defect and keeps its traceback.
"""

from __future__ import annotations


class EdgespecError(Exception):
    """Base of all errors whose message is meant for the user."""


class ConfigError(EdgespecError):
    """A setting, flag or configuration key is unknown or has a value that cannot work."""


class ParameterError(EdgespecError, ValueError):
    """A sampling parameter is out of its range."""


class PromptError(EdgespecError, ValueError):
    """A prompt, message list or chat template cannot be turned into tokens, or does not fit the context."""


class RequestTooLong(PromptError):
    """A prompt with its answer would never fit the memory for keys and values, however long it waits."""


class QueueFullError(EdgespecError):
    """So many requests wait already that no more are taken. retry_after_s: seconds until one may be, at a guess."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelError(EdgespecError):
    """A model's files are missing, incomplete, corrupt, inconsistent, or of an unsupported kind."""


class CatalogError(EdgespecError):
    """A model name is unknown, or its files cannot be fetched."""


class DraftError(EdgespecError):
    """A draft cannot be used with this target. Never fatal for generation: the engine goes on without the draft."""


class MemoryBudgetError(EdgespecError):
    """What was asked for does not fit the memory budget or the memory that is free."""


def in_words(error: BaseException) -> str:
    """An error for people: what edgespec raises on purpose says all itself, anything else has its class in front."""
    if isinstance(error, EdgespecError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
