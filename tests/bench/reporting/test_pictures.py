"""Pictures: what they show of the figures, and that they stand in a page without harm."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.reporting import pictures, pictures_time, style
from edgespec.bench.reporting.document import build
from edgespec.bench.reporting.html import drawn
from edgespec.bench.specbench.folder import read_run
from edgespec.errors import ConfigError
from tests.bench.reporting.samples import sample_run
from tests.support.runs import record, write_run

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the sample run."""
    document = build([read_run(sample_run(tmp_path_factory.mktemp("sample") / "run"))])
    found: dict[str, Any] = document["parts"][0]
    return found


def texts(figure: Any) -> list[str]:
    """Everything that is written in a figure."""
    (axes,) = figure.axes
    labels = [label.get_text() for label in [*axes.get_yticklabels(), *axes.get_xticklabels()]]
    return [*labels, *(text.get_text() for text in axes.texts)]


def test_speed_ups_show_arms_fastest_first_with_their_numbers(part: dict[str, Any]) -> None:
    with style.drawing():
        first, *tasks = pictures.speedups(part)
    assert [task.title for task in tasks] == [f"… in {task} ({count})" for task, count in part["by_task"].items()]
    arms = part["arms"]
    names = sorted((n for n in arms if n != "plain" and arms[n]["answers"]), key=lambda n: -arms[n]["speedup"]["value"])
    (axes,) = first.figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"{n} (23)" if n == "edgespec" else n for n in names], "it failed at one of 24"
    assert [text.get_text() for text in axes.texts] == [f"{arms[n]['speedup']['value']:.2f}" for n in names]
    bars = {tuple(line.get_xdata()) for line in axes.lines}
    assert (arms["memspec"]["speedup"]["low"], arms["memspec"]["speedup"]["high"]) in bars
    spans = {picture.figure.axes[0].get_xlim() for picture in (first, *tasks)}
    assert len(spans) == 1, "pictures that are compared have one axis"


def test_heat_maps_show_every_number(part: dict[str, Any]) -> None:
    with style.drawing():
        made = {picture.name: picture for picture in pictures.heat_maps(part)}
    assert set(made) == {"map-acceptance-rate", "map-tokens-per-round", "drafts-0", "drafts-1", "drafts-2"}
    assert made["drafts-0"].title == "Drafts used by edgespec, % of rounds", "ours first"
    shown = texts(made["map-tokens-per-round"].figure)
    rate = part["arms"]["edgespec"]["by_domain"]["rag"]["tokens_per_round"]
    assert f"{rate:.1f}" in shown
    assert {"edgespec", "ngram", "rag"} <= set(shown)
    assert not {"plain", "peer:llama.cpp-lookup"} & set(shown), "they propose nothing, or do not tell"
    assert {"ngram", "code"} <= set(texts(made["drafts-0"].figure))


def test_lines_along_the_run(part: dict[str, Any]) -> None:
    with style.drawing():
        (regret,) = pictures_time.regret(part)
        (memory,) = pictures_time.memory(part)
        (line,) = pictures_time.time_lines(part)
    last = part["regret"]["arms"]["edgespec"][-1]
    assert f"edgespec {last:.3g} s" in texts(regret.figure)
    assert any(text.startswith("plain ") for text in texts(memory.figure))
    assert "1 " in " ".join(texts(line.figure))
    assert {"ngram", "plain", "math"} <= set(texts(line.figure))
    for picture in (regret, memory):
        (axes,) = picture.figure.axes
        heights = sorted(text.xy[1] for text in axes.texts)
        low, high = axes.get_ylim()
        gap = min(b - a for a, b in itertools.pairwise(heights))
        assert gap / (high - low) * style.size(axes)[1] > 0.1, "inches: no label lies over another"


def test_plain_does_not_flatten_the_others(part: dict[str, Any]) -> None:
    few = {**part["regret"], "arms": {"plain": [5.0, 90.0], "edgespec": [0.1, 0.2], "memspec": [0.2, 0.3]}}
    few["questions"] = ["1", "2"]
    with style.drawing():
        (picture,) = pictures_time.regret({**part, "regret": few})
    assert "lost 90 s, beyond the picture" in picture.caption
    assert not any(text.startswith("plain") for text in texts(picture.figure))


def test_pictures_stand_on_one_page(part: dict[str, Any]) -> None:
    made = [picture for group in drawn(part, "p0").values() for picture in group]
    assert len(made) == 1 + len(part["by_task"]) + 5 + 3
    ids: list[str] = []
    for picture in made:
        root = ET.fromstring(picture["svg"])
        here = [node.get("id", "") for node in root.iter() if node.get("id")]
        ids += here
        links = {node.get("{http://www.w3.org/1999/xlink}href", "#")[1:] for node in root.iter()} - {""}
        assert links <= set(here), "glyphs are found under their new names"
        assert root.get("role") == "img"
        assert root.get("width") is None
        assert "var(--ink)" in picture["svg"]
        assert style.INK not in picture["svg"]
    assert len(ids) == len(set(ids))


def test_a_picture_is_the_same_every_time(part: dict[str, Any]) -> None:
    with style.drawing():
        one, other = (style.svg(next(pictures.speedups(part)).figure, "x", "t") for _ in range(2))
    assert one == other


def test_names_are_texts_not_formulas(tmp_path: Path) -> None:
    odd = "static:$\\frac{a$@3"
    place = {"category": "<b>&</b>", "task": "$x_", "domain": "-->é\u4e2d"}
    records = {
        "plain": [record(i, **place) for i in (1, 2)],
        odd: [record(i, rounds=(2,) * 5, **place) for i in (1, 2)],
    }
    stats = {"proposed_tokens": 4, "accepted_tokens": 2, "draft_share": {"<i>": 3, "plain": 1}}
    records["memspec"] = [record(i, stats=stats, **place) for i in (1, 2)]
    part = build([read_run(write_run(tmp_path / "run", records))])["parts"][0]
    made = [picture for group in drawn(part, "p0").values() for picture in group]
    assert len(made) >= 4
    for picture in made:
        assert ET.fromstring(picture["svg"]).get("aria-label") == picture["title"]


def test_places_of_labels() -> None:
    assert style.apart([5.0, 1.0], 1.0, 0.0, 10.0) == [5.0, 1.0]
    assert style.apart([5.0, 5.0, 5.2], 1.0, 0.0, 10.0) == [5.0, 6.0, 7.0]
    assert style.apart([9.8, 9.9], 1.0, 0.0, 10.0) == [9.0, 10.0]


def test_long_names_keep_both_ends() -> None:
    assert style.shortened("memspec") == "memspec"
    short = style.shortened("static:a-draft-with-a-long-name@4", 20)
    assert len(short) == 20
    assert short.startswith("static:")
    assert short.endswith("@4")


def test_every_colour_is_found_again_in_the_page() -> None:
    lights = [light for light, _ in style.COLOURS.values()]
    assert len(set(lights)) == len(lights)
    assert all(f"--{name}:" in style.css() for name in style.COLOURS)


def test_without_matplotlib_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "available", lambda: False)
    with pytest.raises(ConfigError, match="pip install"), style.drawing():
        pass
