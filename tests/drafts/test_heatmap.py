"""The picture of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafts import heatmap
from edgespec.errors import DraftError

pytest.importorskip("matplotlib")


def document(values: dict[str, dict[str, float | None]], domains: dict[str, str]) -> dict[str, Any]:
    """values: draft -> domain -> accepted a round; domains: what each draft is for."""
    cells = [
        {"draft": draft, "domain": domain, "prompts": 40, "by_gamma": {"3": {"accepted_per_round": value}}}
        for draft, row in values.items()
        for domain, value in row.items()
    ]
    return {
        "cells": cells,
        "drafts": [{"name": name, "domain": domain} for name, domain in domains.items()],
        "target": {"name": "tiny", "weight_format": "float32"},
    }


EXAMPLE = document(
    {
        "plain": {"code": 0.0, "math": 0.0},
        "ngram": {"code": 0.25, "math": 0.5},
        "code": {"code": 1.25, "math": 0.1},
        "lookup+code": {"code": 1.5, "math": None},
    },
    {"ngram": "", "code": "code", "lookup+code": "code"},
)


def test_every_cell_shows_its_number() -> None:
    figure = heatmap.picture(EXAMPLE, 3)
    shown = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert shown[0] == ["0.25", "0.50", "1.25", "0.10", "draft alone"]
    assert shown[1] == ["1.50", "–", "lookup in front"]
    rows = [[label.get_text() for label in axes.get_yticklabels()] for axes in figure.axes]
    assert rows == [["lookup only", "code"], ["code"]]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["code", "math"]


def test_own_domains_are_framed_and_the_best_is_bold() -> None:
    alone, hybrid = heatmap.picture(EXAMPLE, 3).axes
    frames = [
        (patch.get_x() + patch.get_width() / 2, patch.get_y() + patch.get_height() / 2) for patch in alone.patches
    ]
    assert set(frames) == {(0.0, 1.0)}  # column code, second row
    assert len(hybrid.patches) == len(alone.patches)
    bold = [text.get_text() for text in alone.texts if text.get_fontweight() == "bold"]
    assert bold == ["0.50", "1.25"]


def test_numbers_can_be_read_on_every_colour() -> None:
    from matplotlib import colormaps

    def luminance(colour) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for step in range(101):
        ground = colormaps[heatmap._COLOURS](step / 100)[:3]
        text = (1.0, 1.0, 1.0) if heatmap._readable_on(ground) == "white" else (0.0, 0.0, 0.0)
        high, low = sorted((luminance(ground), luminance(text)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_the_scale_is_ordered_without_colour() -> None:
    from matplotlib import colormaps

    greys = [sum(w * c for w, c in zip((0.299, 0.587, 0.114), colormaps[heatmap._COLOURS](x / 20))) for x in range(20)]
    assert greys == sorted(greys, reverse=True)


def test_it_fits_a_phone(tmp_path: Path) -> None:
    """As wide as a phone's screen shows sharply, taller than wide, and nothing outside its edges."""
    domains = ["chat", "code", "math", "translation", "summarization", "rag", "qa"]
    names = ["ngram", "general", *domains]
    values = {name: dict.fromkeys(domains, 0.5) for name in (*names, *(f"lookup+{n}" for n in names[1:]))}
    large = document(values, {name: name for name in names})
    figure = heatmap.picture(large, 3)
    width, height = figure.get_size_inches()
    assert width == 6.0
    figure.draw_without_rendering()
    for axes in figure.axes:
        box = axes.get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
        assert box.x0 >= 0
        assert box.x1 <= width
        assert box.y1 <= height - 0.5  # below the captions
    heatmap.draw(large, 3, tmp_path / "heatmap.png")
    content = (tmp_path / "heatmap.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20], "big") == 1200


def test_domains_of_a_draft() -> None:
    assert heatmap.own_domains("summarization, rag") == {"summarization", "rag"}
    assert heatmap.own_domains("qa+rag") == {"qa", "rag"}
    assert heatmap.own_domains("") == heatmap.own_domains(None) == frozenset()


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DraftError, match="no draft"):
        heatmap.picture(document({"plain": {"code": 0.0}}, {}), 3)
    monkeypatch.setattr(heatmap, "available", lambda: False)
    with pytest.raises(DraftError, match=r"edgespec\[plots\]"):
        heatmap.draw(EXAMPLE, 3, tmp_path / "heatmap.png")
    assert list(tmp_path.iterdir()) == []
