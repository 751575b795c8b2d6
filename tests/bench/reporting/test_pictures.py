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
    assert set(made) == {"map-acceptance", "map-tokens-per-round", "drafts-0", "drafts-1", "drafts-2"}
    assert made["drafts-0"].title == "Drafts used by edgespec, % of rounds", "ours first"
    shown = texts(made["map-tokens-per-round"].figure)
    rate = part["arms"]["edgespec"]["by_domain"]["rag"]["tokens_per_round"]
    assert f"{rate:.1f}" in shown
    assert {"edgespec", "ngram", "rag"} <= set(shown)
    assert not {"plain", "peer:llama.cpp-lookup"} & set(shown), "they propose nothing, or do not tell"
    assert {"ngram", "code"} <= set(texts(made["drafts-0"].figure))


def test_drafts_stand_by_domains_with_how_many_blocks_are_behind_each(part: dict[str, Any]) -> None:
    cells = {"code": {"first_share": 0.62, "blocks": 1234}, "chat": {"first_share": 0.4, "blocks": 49}}
    few = {"domains": ["chat", "code", "qa"], "drafts": {"code": cells}, "least_blocks": 50, "left_out": None}
    with style.drawing():
        picture = next(pictures.heat_maps({**part, "draft_map": few}))
        rows = [label.get_text() for label in next(pictures.heat_maps(part)).figure.axes[0].get_yticklabels()]
    assert picture.name == "map-acceptance"
    (axes,) = picture.figure.axes
    assert [text.get_text() for text in axes.texts] == ["40", "49", "62", "1.2k", "–"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["chat", "code", "qa"]
    pale, coloured, empty = (patch.get_facecolor() for patch in axes.patches)
    assert pale == empty != coloured, "a share of few blocks has no colour"
    assert rows == ["code", "math", "qa", "general", "ngram"]
    with style.drawing():
        assert next(pictures.heat_maps({**part, "draft_map": {**few, "drafts": {}}})).name == "map-tokens-per-round"


def test_counts_take_little_room() -> None:
    counts = {0: "0", 999: "999", 1234: "1.2k", 9949: "9.9k", 9951: "10k", 123_456: "123k"}
    assert {count: style.thousands(count) for count in counts} == counts


def test_lines_along_the_run(part: dict[str, Any]) -> None:
    with style.drawing():
        (regret,) = pictures_time.regret(part)
        (memory,) = pictures_time.memory(part)
        (line,) = pictures_time.time_lines(part)
    last = part["regret"]["arms"]["edgespec"][-1]
    assert f"edgespec {last:+.1f} s".replace("-", "\N{MINUS SIGN}") in texts(regret.figure)
    best = part["regret"]["best_fixed"]
    assert f"{best} 0 s" in texts(regret.figure), "what the others are measured by has its name"
    assert best in regret.caption
    ends = {line.get_xdata()[-1] for line in regret.figure.axes[0].lines}
    assert ends == {part["regret"]["tokens"][-1]}
    clock = max(points[-1][0] for points in part["memory"]["arms"].values())
    assert max(line.get_xdata()[-1] for line in memory.figure.axes[0].lines) == clock
    assert "started anew" not in memory.caption
    with style.drawing():
        (again,) = pictures_time.memory({**part, "memory": {**part["memory"], "begins": [0.0, 40.0]}})
    assert [40.0, 40.0] in [list(line.get_xdata()) for line in again.figure.axes[0].lines]
    assert "started anew: a --resume" in again.caption
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
    few |= {"questions": ["1", "2"], "tokens": [60, 120]}
    with style.drawing():
        (picture,) = pictures_time.regret({**part, "regret": few})
    assert "Plain lost 90 s, beyond the picture" in picture.caption
    assert not any(text.startswith("plain") for text in texts(picture.figure))
    assert {"edgespec +0.20 s", "memspec +0.30 s"} <= set(texts(picture.figure))


def test_what_regret_is_measured_by_has_its_name_among_many(part: dict[str, Any]) -> None:
    learners = [f"learner{number}" for number in range(9)]
    found = {
        "questions": ["1", "2"], "tokens": [10, 20], "plain_seconds": 1.0, "best_fixed": "ngram",
        "arms": {"plain": [0.1, 0.2], "ngram": [0.0, 0.0], **{name: [-100.0, -200.0] for name in learners}},
    }  # fmt: skip
    arms = {**part["arms"], **dict.fromkeys(learners, part["arms"]["memspec"])}
    with style.drawing():
        (picture,) = pictures_time.regret({**part, "regret": found, "arms": arms})
    assert {"ngram 0 s", "learner0 \N{MINUS SIGN}200 s"} <= set(texts(picture.figure))
    assert len(picture.figure.axes[0].lines) == len(found["arms"]), "the others without"


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
    stats |= {"by_draft": {"<i>": [3, 1, 4, 2]}}
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
