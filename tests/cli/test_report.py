"""The status line, the table of counters, and the note about answers that were cut."""

from __future__ import annotations

import dataclasses

import pytest

from edgespec.cli import report
from edgespec.results import GenerationStats
from tests.cli.fakes import result


def test_the_status_line_names_everything() -> None:
    line = report.status_line(result("Hi there.", [1, 2, 3], "stop", "ngram"), 412_000_000)
    assert line == "draft ngram, gamma 4, accepted 75%, 4.00 tokens/round, 10.0 tokens/s, 3 tokens, 412 MB"


def test_the_status_line_of_plain_decoding_claims_no_acceptance() -> None:
    line = report.status_line(result("Hi.", [1, 2], "stop", None), 1_300_000_000)
    assert line == "draft plain, gamma 0, nothing drafted, 1.00 tokens/round, 10.0 tokens/s, 2 tokens, 1.3 GB"
    assert report.status_line(result("Hi.", [1], "cancelled", None), 5).endswith("stopped by you")


def test_the_status_line_tells_energy_and_what_slowed_the_device() -> None:
    answer = result("Hi there.", [1, 2, 3], "stop", "ngram")
    answer.stats.energy_joules, answer.stats.gpu_load = 4.5, 0.63
    answer.stats.device_notes = ["throttled: the GPU is too hot", "memory low: 120 MiB left"]
    line = report.status_line(answer, 412_000_000)
    assert line.endswith(
        "412 MB, 4.5 J, 1.50 J a token, GPU 63% busy, throttled: the GPU is too hot, memory low: 120 MiB left"
    )
    rows = report.details(answer.stats)
    assert sum(row.startswith("device ") for row in rows) == 2
    assert sum(row.startswith("GPU ") and "63%" in row for row in rows) == 1


@pytest.mark.parametrize(
    ("share", "text"),
    [({}, "none"), ({"plain": 3}, "plain"), ({"plain": 1, "code": 3}, "code 75%, plain 25%")],
)
def test_draft_names(share: dict[str, int], text: str) -> None:
    assert report.draft_names(share) == text


@pytest.mark.parametrize(
    ("histogram", "text"), [({}, "0"), ({4: 9}, "4"), ({0: 2, 4: 2}, "0-4 (mean 2.0)"), ({0: 5, 3: 0}, "0")]
)
def test_gamma_is_what_was_used(histogram: dict[int, int], text: str) -> None:
    assert report.gamma_text(GenerationStats(gamma_histogram=histogram)) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (98_362_432, "98 MB"), (1.25e9, "1.2 GB")]
)
def test_sizes(count: float, text: str) -> None:
    assert report.size(count) == text


def test_details_show_every_counter_and_fit_a_terminal() -> None:
    stats = dataclasses.replace(
        result("Hi there.", [1, 2, 3], "stop", "ngram").stats, reused_tokens=5, energy_joules=1.5
    )
    text = "\n".join(report.details(stats))
    for part in (
        "7 tokens, 5 of them kept",
        "700 tokens/s",
        "6 of 8 proposed (75%)",
        "1 + 2 tokens in 0.200 s",
        "100%, 50%",
        "4: 2",
        "500 MB",
        "1.5 J, 0.50 J a token",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_cut_answer_says_why() -> None:
    cut = result("one two", [1, 2], "length", None)
    assert report.finish_note(cut, 2) == "The answer was cut at max_new_tokens = 2."
    assert report.finish_note(cut, 256) == "The context is full."
    assert report.finish_note(result("one", [1], "stop", None), 256) is None
