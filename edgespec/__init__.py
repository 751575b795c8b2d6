"""edgespec: speculative decoding for one target model and many small drafts.

The public names are imported when they are first used, so that `import edgespec` stays quick and loads neither torch
nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Engine": "edgespec.engine",
    "SamplingParams": "edgespec.decoding.params",
    "RuntimeConfig": "edgespec.config",
    "GenerationResult": "edgespec.results",
    "GenerationStats": "edgespec.results",
    "TextDelta": "edgespec.results",
    "TokenLogprob": "edgespec.results",
    "EdgespecError": "edgespec.errors",
}

__all__ = [
    "EdgespecError",
    "Engine",
    "GenerationResult",
    "GenerationStats",
    "RuntimeConfig",
    "SamplingParams",
    "TextDelta",
    "TokenLogprob",
    "__version__",
]

if TYPE_CHECKING:
    from edgespec.config import RuntimeConfig
    from edgespec.decoding.params import SamplingParams
    from edgespec.engine import Engine
    from edgespec.errors import EdgespecError
    from edgespec.results import GenerationResult, GenerationStats, TextDelta, TokenLogprob


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'edgespec' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
