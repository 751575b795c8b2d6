"""Heads and their reference, digit by digit."""

from __future__ import annotations

import pytest

from edgespec.models.onnx import linear as onnx_linear


@pytest.fixture
def float_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are not rounded to 8 bits: slow, but the same digits however many rows a call has."""
    monkeypatch.setattr(onnx_linear, "_INT8_ACTIVATIONS", 0)
