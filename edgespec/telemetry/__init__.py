"""What happened when: the event ring and its Chrome trace."""

from __future__ import annotations

from edgespec.telemetry.trace import NULL_TRACER, NullTracer, Tracer

__all__ = ["NULL_TRACER", "NullTracer", "Tracer"]
