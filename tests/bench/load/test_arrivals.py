"""When requests come: rates, bursts, recorded files, and what is refused."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path

import pytest

from edgespec.bench.load import command
from edgespec.bench.load.arrivals import PARTS, Arrival, bursty, mean_rate, poisson, read_trace, scaled, spans, steps
from edgespec.bench.load.preparing import schedule_of
from edgespec.errors import ConfigError


@pytest.mark.parametrize("make", [poisson, bursty, steps])
def test_rate_and_range(make) -> None:
    found = make(2.0, 4000.0, 3)
    assert len(found) == pytest.approx(8000, rel=0.1)
    assert all(0 <= arrival.at < 4000 for arrival in found)
    assert all(a.at <= b.at for a, b in itertools.pairwise(found))
    assert found == make(2.0, 4000.0, 3)
    assert found != make(2.0, 4000.0, 4)


def test_bursts_are_bursts() -> None:
    def spread(found: list[Arrival]) -> float:
        """Variance over mean of the arrivals in pieces of five seconds: 1 for Poisson."""
        counts = [0] * 800
        for arrival in found:
            counts[int(arrival.at / 5)] += 1
        return statistics.variance(counts) / statistics.fmean(counts)

    assert spread(poisson(2.0, 4000.0, 1)) == pytest.approx(1, abs=0.3)
    assert spread(bursty(2.0, 4000.0, 1)) > 3


def test_steps_are_low_and_high_and_low_again() -> None:
    found = steps(2.0, 3000.0, 1)
    counts = [sum(begin <= arrival.at < end for arrival in found) for begin, end in spans(3000.0)]
    assert spans(3000.0) == [(0, 1000), (1000, 2000), (2000, 3000)]
    assert counts == [pytest.approx(500, rel=0.15), pytest.approx(5000, rel=0.05), pytest.approx(500, rel=0.15)]
    assert sum(times for _, times in PARTS) / len(PARTS) == pytest.approx(1.0)


def test_too_many_are_refused() -> None:
    with pytest.raises(ConfigError, match="lower the rate"):
        poisson(1000.0, 1000.0, 0)


def test_stretching() -> None:
    found = scaled([Arrival(0.0), Arrival(1.0), Arrival(4.0, None, 7)], 3.0)
    assert mean_rate(found) == pytest.approx(3.0)
    assert [a.at for a in found] == pytest.approx([0, 0.25, 1.0])
    assert found[2].prompt_tokens == 7


def test_csv(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:47.1805900,120,7\n2023-11-16 18:15:46.6805900,4808,10\n"
    )
    assert read_trace(file) == [
        Arrival(0.0, None, 4808, 10),
        Arrival(pytest.approx(0.5), None, 120, 7),
    ]


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"time": 5, "prompt": "hi"}\n\n{"time": 7.5, "prompt_tokens": 3, "max_new_tokens": 2}\n')
    assert read_trace(file) == [Arrival(0.0, "hi"), Arrival(2.5, None, 3, 2)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "tim,prompt\n1,x\n", "no column 'time': did you mean tim"),
        ("a.csv", "time\n", "no arrivals"),
        ("a.csv", "time\nsoon\n", "line 2: 'time' must be seconds or a date"),
        ("a.csv", "time,prompt_tokens\n1,-3\n", "line 2: 'prompt_tokens' must be a whole number"),
        ("a.jsonl", "[1]\n", "line 1: it is not a JSON object"),
        ("a.jsonl", '{"prompt": "x"}\n', "line 1: it has no 'time'"),
        ("a.jsonl", '{"time": 1, "prompt": 3}\n', "'prompt' must be a text"),
        ("a.jsonl", '{"time": 1, "prompt": "x", "prompt_tokens": 3}\n', "both 'prompt' and 'prompt_tokens'"),
        ("a.jsonl", '{"time": Infinity}\n', "'time' must be seconds"),
        ("a.jsonl", '{"time": 1, "max_new_tokens": true}\n', "'max_new_tokens' must be a whole number"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / name)


def test_prompts_with_line_ends_of_any_kind(tmp_path: Path) -> None:
    text = "one\nline\u2028and\x0bmore\x85"
    (tmp_path / "a.csv").write_text(f'time,prompt\n0,"{text}"\n1,two\n', encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"time": 0, "prompt": text}, ensure_ascii=False) + '\n{"time": 1, "prompt": "two"}', encoding="utf-8"
    )
    for name in ("a.csv", "a.jsonl"):
        assert [one.prompt for one in read_trace(tmp_path / name)] == [text, "two"]


def test_a_field_that_is_too_long_for_csv_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("time,prompt\n0,a\n1," + "x" * 200_000 + "\n")
    with pytest.raises(ConfigError, match=r"a.csv, line 3: field larger"):
        read_trace(tmp_path / "a.csv")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "no.csv")


@pytest.mark.parametrize(
    ("name", "words"),
    [("burst", "did you mean bursty?"), ("x.csv", "known are poisson, bursty, steps")],
)
def test_a_kind_of_arrivals_that_there_is_not(name: str, words: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, int)
    args = parser.parse_args(["--out", "x", "--arrivals", name])
    with pytest.raises(ConfigError) as caught:
        schedule_of(args, ["none"])
    assert f"--arrivals {name} is no file; {words}" == str(caught.value)
