"""Figures of runs whose numbers are computed by hand."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.reporting import tables
from edgespec.bench.reporting.document import build
from edgespec.bench.specbench.folder import ArmInfo, Record, read_run
from edgespec.errors import ConfigError
from tests.bench.reporting.samples import QA, part_of
from tests.support.runs import failed, record, write_run


def test_speed_ups_by_hand(tmp_path: Path) -> None:
    # plain: 10 tokens in 0.10 s, twice. The arm: 10 tokens in 0.05 s, and in 0.10 s. Prefill: 0.1 s and 20 tokens each.
    part = part_of(
        tmp_path,
        {"plain": [record(1), record(2, **QA)], "arm": [record(1, rounds=(2,) * 5), record(2, **QA)]},
    )
    arm = part["arms"]["arm"]
    assert arm["speedup"]["value"] == pytest.approx((20 / 0.15) / (20 / 0.20))
    assert arm["speedup"]["tokens_per_second"] == pytest.approx(20 / 0.15)
    assert arm["speedup"]["plain_tokens_per_second"] == pytest.approx(100)
    assert arm["by_task"]["mt-bench"]["value"] == pytest.approx(2)
    assert arm["by_task"]["qa"]["value"] == pytest.approx(1)
    assert arm["by_category"]["writing"]["value"] == pytest.approx(2)
    assert arm["least_task"] is None, "of one question each"
    assert arm["whole_turn"]["value"] == pytest.approx((22 / 0.35) / (22 / 0.40))
    assert arm["first_token_s"] == pytest.approx(0.1)
    assert arm["prefill_tokens_per_second"] == pytest.approx(200)
    assert arm["tokens_per_round"] == pytest.approx(20 / 15)
    assert part["arms"]["plain"]["speedup"]["value"] == 1
    assert list(part["arms"]) == ["plain", "arm"]
    assert part["by_task"] == {"mt-bench": 1, "qa": 1}


def test_an_interval_contains_the_truth_and_is_the_same_for_equal_arms(tmp_path: Path) -> None:
    rng = random.Random(7)
    noise = [rng.uniform(0.8, 1.2) for _ in range(60)]
    arm = [record(i + 1, step=0.01 / 1.5 * noise[i]) for i in range(60)]
    part = part_of(tmp_path, {"plain": [record(i + 1) for i in range(60)], "arm": arm, "twin": arm})
    ratio = part["arms"]["arm"]["speedup"]
    assert ratio["low"] < 1.5 < ratio["high"]
    assert 0.02 < ratio["high"] - ratio["low"] < 0.25
    assert part["arms"]["twin"]["speedup"] == ratio
    assert part["arms"]["plain"]["speedup"]["low"] == 1 == part["arms"]["plain"]["speedup"]["high"]


def test_a_few_questions_have_no_interval(tmp_path: Path) -> None:
    part = part_of(tmp_path, {"plain": [record(1), record(2)], "arm": [record(1), failed(2)]})
    ratio = part["arms"]["arm"]["speedup"]
    assert (ratio["value"], ratio["low"], ratio["high"], ratio["questions"]) == (pytest.approx(1), None, None, 1)
    eight = [record(n) for n in range(1, 9)]
    part = part_of(tmp_path / "some", {"plain": eight, "arm": eight[:4]})
    assert part["arms"]["arm"]["speedup"]["low"] is None, "of four of eight"
    for count, known in ((4, False), (5, True)):
        records = [record(n + 1) for n in range(count)]
        part = part_of(tmp_path / str(count), {"plain": records, "arm": records})
        assert (part["arms"]["arm"]["speedup"]["low"] is not None) == known


def test_failed_questions_are_shown_and_left_out_of_both_arms(tmp_path: Path) -> None:
    plain = [record(1), record(2, step=1.0), failed(3), record(4)]
    arm = [record(1, step=0.005), failed(2, "ValueError: no"), record(3, step=0.0001), record(4, step=0.005)]
    part = part_of(tmp_path, {"plain": plain, "arm": arm})
    found = part["arms"]["arm"]
    assert found["speedup"]["value"] == pytest.approx(2)
    assert found["questions"] == {"counted": 2, "failed": ["2"], "plain_failed": ["3"], "missing": 0}
    assert [(e["question"], e["message"]) for e in found["errors"]] == [("2", "ValueError: no")]
    assert found["answers"] == 2
    assert found["tokens"] == 22


def test_an_error_in_one_turn_of_one_repeat_takes_the_whole_question_out(tmp_path: Path) -> None:
    both = [record(1, turn=turn, repeat=repeat) for repeat in (0, 1) for turn in (0, 1)]
    broken = [*both[:3], failed(1, turn=1, repeat=1)]
    part = part_of(tmp_path, {"plain": [*both, record(2)], "arm": [*broken, record(2)]})
    assert part["arms"]["arm"]["questions"]["failed"] == ["1"]
    assert part["arms"]["arm"]["speedup"]["questions"] == 1


def test_plain_that_failed_in_one_group_does_not_count_in_another(tmp_path: Path) -> None:
    plain = [record(1), failed(1, group=1), record(2), record(2, group=1)]
    part = part_of(tmp_path, {"plain": plain, "one": [record(1), record(2)], "two": [record(2, group=1)]})
    assert part["arms"]["plain"]["speedup"]["questions"] == 1
    assert part["arms"]["one"]["speedup"]["questions"] == 2, "its own plain did not fail"


def test_the_median_repeat_counts(tmp_path: Path) -> None:
    steps = (0.005, 0.005, 5.0)
    arm = [record(1, step=step, repeat=repeat) for repeat, step in enumerate(steps)]
    part = part_of(tmp_path, {"plain": [record(1, repeat=repeat) for repeat in range(3)], "arm": arm})
    assert part["arms"]["arm"]["speedup"]["value"] == pytest.approx(2)


def test_the_median_is_that_of_a_repeat_which_was_run(tmp_path: Path) -> None:
    """Sampled texts differ in length: the median of tokens and that of seconds belong to no repeat."""
    arm = [record(1, rounds=(1,) * n, step=s, repeat=i) for i, (n, s) in enumerate([(10, 0.1), (20, 0.2), (60, 0.05)])]
    part = part_of(tmp_path, {"plain": [record(1, step=0.1, repeat=repeat) for repeat in range(3)], "arm": arm})
    assert part["arms"]["arm"]["speedup"]["tokens_per_second"] == pytest.approx(10)


def test_the_headline_is_of_the_first_repeat_and_the_median_stands_beside(tmp_path: Path) -> None:
    plain = [record(q, repeat=repeat) for q in (1, 2) for repeat in range(3)]
    arm = [record(q, repeat=repeat, step=0.005 if repeat else 0.01) for q in (1, 2) for repeat in range(3)]
    part = part_of(tmp_path, {"plain": plain, "arm": arm})
    found = part["arms"]["arm"]
    assert found["speedup"]["value"] == pytest.approx(2)
    assert (found["first_repeat"]["value"], found["first_repeat"]["questions"]) == (pytest.approx(1), 2)
    told = "1.00 times as fast as plain over 2 questions in the first repeat; 2.00 times in the median repeat, with"
    assert tables.headline(part, "arm") == f"arm decodes {told} texts that policies had met before."
    once = part_of(tmp_path / "2", {"plain": plain[::3], "arm": arm[::3]})["arms"]["arm"]
    assert once["first_repeat"] is None
    assert "repeat" not in tables.headline({"arms": {"arm": once}, "asked": 2}, "arm")
    told = {count: tables.conditions({"settings": {"repeats": count}, "runs": []}) for count in (1, 3)}
    assert "policies keep what they learned" in told[3]
    assert told[1] == "repeats: 1"


def test_the_least_task_of_the_headline_is_of_the_same_repeat(tmp_path: Path) -> None:
    """The arm is slow in mt-bench at first, and in qa later on."""
    places: list[dict[str, Any]] = [{}, {}, QA, QA]
    asked = [(q, repeat, place) for q, place in enumerate(places, start=1) for repeat in range(3)]
    plain = [record(q, repeat=repeat, **place) for q, repeat, place in asked]
    arm = [record(q, repeat=r, step=0.02 if (r == 0) == (place == {}) else 0.01, **place) for q, r, place in asked]
    part = part_of(tmp_path, {"plain": plain, "arm": arm})
    assert part["arms"]["arm"]["least_task"]["task"] == "qa"
    first = part["arms"]["arm"]["first_repeat"]["least_task"]
    assert first == {"task": "mt-bench", "value": pytest.approx(0.5), "of": 2}
    assert "in the first repeat; least in mt-bench, 0.50; 0.67 times in the median" in tables.headline(part, "arm")


def test_what_policies_knew_before_the_run_is_said_at_the_head() -> None:
    told = [tables.conditions({"settings": {"keep_memory": kept}, "runs": []}) for kept in (False, True)]
    assert told == ["", "policies began with what they had learned before"]


def test_the_least_task_is_one_of_several_with_two_questions_at_least(tmp_path: Path) -> None:
    rag = {"category": "rag", "task": "rag", "domain": "rag"}
    plain = [record(1), record(2, **QA), record(3, **QA)]
    arm = [record(1, step=0.02), *plain[1:]]
    alone = part_of(tmp_path, {"plain": plain, "arm": arm})
    assert alone["arms"]["arm"]["by_task"]["mt-bench"]["value"] == pytest.approx(0.5)
    assert alone["arms"]["arm"]["least_task"] is None, "there is no other one"
    assert "least" not in tables.headline(alone, "arm")
    more = {"plain": [record(4, **rag), record(5, **rag)], "arm": [record(4, step=0.005, **rag), record(5, **rag)]}
    part = part_of(tmp_path / "2", {"plain": [*plain, *more["plain"]], "arm": [*arm, *more["arm"]]})
    assert part["arms"]["arm"]["least_task"] == {"task": "qa", "value": pytest.approx(1), "of": 2}
    assert "least in qa, 1.00, of the 2 tasks with two questions or more." in tables.headline(part, "arm")


def test_a_run_that_was_interrupted_says_how_much_is_missing(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", {"plain": [record(1), record(2)], "arm": [record(1)]}, finished=False))
    (part,) = build([dataclasses.replace(run, questions=18)])["parts"]
    assert (part["questions"], part["asked"]) == (2, 18)
    assert part["arms"]["arm"]["questions"]["missing"] == 17
    assert "17 of 18 questions are not answered (yet), by this arm or by plain" in part["arms"]["arm"]["warnings"]
    assert "over 1 of 18 questions" in tables.headline(part, "arm")


def test_what_was_skipped_is_said_where_it_is_read(tmp_path: Path) -> None:
    lines = [{"file": "q.jsonl", "line": n, "reason": f"wrong {n}"} for n in (3, 7)]
    one = part_of(tmp_path, {"plain": [record(1)]}, skipped=lines[:1])
    assert "1 line of the question files was skipped (q.jsonl, line 3: wrong 3)" in one["warnings"]
    runs = [read_run(write_run(tmp_path / n, {"plain": [record(n)]}, skipped=lines)) for n in ("4", "5")]
    text = " ".join(build(runs)["parts"][0]["warnings"])
    assert "2 lines of the question files were skipped (q.jsonl, line 3: wrong 3; the others" in text, "not four"


@pytest.mark.parametrize(
    ("plain", "others"),
    [
        ("the file's own blocks (4-bit where the file is)", {"the same file": False, "float32, dequantised": True}),
        ("float32, dequantised", {"the same file": True, "float32, dequantised; prompt lookup": False, "": False}),
    ],
)
def test_arms_with_other_weights_are_marked(tmp_path: Path, plain: str, others: dict[str, bool]) -> None:
    arms = {f"peer:{i}": ArmInfo("peer", weights=weights) for i, weights in enumerate(others)}
    records = {name: [record(1)] for name in ("plain", *arms)}
    part = part_of(tmp_path, records, arms={**arms, "plain": ArmInfo("policy", weights=plain)})
    assert [part["arms"][name]["other_weights"] for name in arms] == list(others.values())
    assert not part["arms"]["plain"]["other_weights"]


def test_turns_are_added_before_the_median(tmp_path: Path) -> None:
    plain = [record(1, turn=turn) for turn in (0, 1)]
    arm = [record(1, step=0.002), record(1, turn=1, step=0.008)]
    part = part_of(tmp_path, {"plain": plain, "arm": arm})
    assert part["arms"]["arm"]["speedup"]["value"] == pytest.approx(0.2 / 0.1)


def test_repeats_and_turns_that_only_one_arm_has_do_not_count(tmp_path: Path) -> None:
    plain = [record(1), record(1, turn=1), record(2), record(3)]
    arm = [record(1, step=0.0001), record(2, step=0.005), record(2, step=0.0001, repeat=1)]
    part = part_of(tmp_path, {"plain": plain, "arm": arm}, finished=False)
    found = part["arms"]["arm"]
    assert found["speedup"]["value"] == pytest.approx(2)
    assert found["questions"]["missing"] == 2
    assert any("2 of 3 questions are not answered" in warning for warning in found["warnings"])
    assert any("--resume" in warning for warning in part["warnings"])


def test_ratios_pair_with_plain_of_the_same_group(tmp_path: Path) -> None:
    plain = [record(1, step=0.01), record(1, step=0.02, group=1)]
    part = part_of(tmp_path, {"plain": plain, "one": [record(1)], "two": [record(1, group=1)]})
    assert part["arms"]["one"]["speedup"]["value"] == pytest.approx(1)
    assert part["arms"]["two"]["speedup"]["value"] == pytest.approx(2)
    assert part["arms"]["two"]["speedup"]["plain_tokens_per_second"] == pytest.approx(50)
    # Regret charges both for the same plain seconds (the median of 0.1 and 0.2), so that the slow hour does not count.
    assert part["regret"]["arms"]["two"] == [pytest.approx(-0.075)]
    assert part["regret"]["arms"]["one"] == [pytest.approx(0)]


def test_empty_and_one_token_answers_add_no_time(tmp_path: Path) -> None:
    empty = {"round_tokens": (), "decode_tokens": 0, "decode_s": 0.0, "seconds": 0.1}
    answers = [record(1), record(2, token_ids=(), first_token_s=None, **empty), record(3, token_ids=(5,), **empty)]
    part = part_of(tmp_path, {"plain": answers, "arm": [record(1, step=0.005), *answers[1:]]})
    arm = part["arms"]["arm"]
    assert arm["speedup"]["value"] == pytest.approx(2)
    assert arm["speedup"]["questions"] == 1, "the others have nothing to time"
    assert arm["tokens"] == 12
    assert arm["first_token_s"] == pytest.approx(0.1)


def test_questions_weigh_the_same_in_both_where_texts_differ(tmp_path: Path) -> None:
    """An arm that is as fast everywhere is not faster for being brief where plain is slow."""
    brief = {"token_ids": (1, 2, 3), "round_tokens": (1, 1), "decode_tokens": 2, "decode_s": 0.1}
    nothing = {"token_ids": (1,), "round_tokens": (), "decode_tokens": 0, "decode_s": 0.0}
    plain = [record(1, step=0.01), record(2, step=0.05), record(3, step=0.05)]
    part = part_of(tmp_path, {"plain": plain, "arm": [record(1, step=0.01), record(2, **brief), record(3, **nothing)]})
    found = part["arms"]["arm"]["speedup"]
    assert found["value"] == pytest.approx(1)
    assert found["questions"] == 2, "of an answer of one token there is no speed, and plain's counts for nothing either"


def test_peers_without_statistics(tmp_path: Path) -> None:
    peer = [record(1, step=0.005, round_tokens=())]
    quiet = [Record(**{**{f: getattr(r, f) for f in Record.__slots__}, "stats": {}}) for r in peer]
    part = part_of(
        tmp_path,
        {"plain": [record(1)], "peer:other": quiet},
        arms={"peer:gone": ArmInfo("peer", "absent", "not installed")},
    )
    found = part["arms"]["peer:other"]
    assert found["speedup"]["value"] == pytest.approx(2)
    assert found["tokens_per_round"] is None
    assert "acceptance_rate" not in found
    gone = part["arms"]["peer:gone"]
    assert (gone["status"], gone["message"], gone["speedup"]["value"]) == ("absent", "not installed", None)
    assert part["regret"] is None, "peers and absent arms are no policies"


def test_counters_of_the_engine(tmp_path: Path) -> None:
    stats = {
        "accepted_tokens": 6, "proposed_tokens": 12, "acceptance_by_position": [0.5, 0.4], "loads": 2, "switches": 1,
        "tries_by_position": [8, 4],
        "draft_share": {"code": 8, "plain": 2}, "gamma_histogram": {"3": 8, "0": 2}, "fallback_share": 0.2,
        "load_seconds_hidden": 0.4, "load_seconds_exposed": 0.1, "predictor_seconds": 0.01, "target_seconds": 0.06,
        "draft_seconds": 0.02, "ranker_seconds": 0.005, "energy_joules": 3.0,
    }  # fmt: skip
    more = stats | {"accepted_tokens": 0, "proposed_tokens": 4, "acceptance_by_position": [0.0], "fallback_share": 0.0}
    more |= {"draft_share": {"math": 5, "plain": 5}, "loads": 0, "tries_by_position": [5]}
    records = [record(1, stats=stats), record(2, rounds=(1,) * 10, stats=more, **QA)]
    part = part_of(tmp_path, {"plain": [record(1), record(2, **QA)], "edgespec": records})
    arm = part["arms"]["edgespec"]
    assert arm["acceptance_rate"] == pytest.approx(6 / 16)
    assert arm["acceptance_by_position"] == pytest.approx([(8 * 0.5 + 5 * 0.0) / 13, 0.4])
    assert arm["draft_share"] == pytest.approx({"code": 0.4, "plain": 0.35, "math": 0.25})
    assert arm["gamma_share"] == pytest.approx({"0": 0.2, "3": 0.8})
    assert arm["fallback_share"] == pytest.approx(0.1)
    assert (arm["loads"], arm["switches"]) == (2, 2)
    assert arm["load_seconds_exposed"] == pytest.approx(0.2)
    shares = {"target": 0.6, "draft": 0.2, "planning": 0.1, "catch-up": 0, "bookkeeping": 0, "other": 0.1}
    assert arm["time_share"] == pytest.approx(shares)
    assert arm["ranker_share"] == pytest.approx(0.05)
    assert arm["joules_per_token"] == pytest.approx(6 / 22)
    assert arm["by_domain"]["qa"]["acceptance_rate"] == 0
    assert arm["by_domain"]["qa"]["draft_share"] == pytest.approx({"math": 0.5, "plain": 0.5})
    assert part["arms"]["plain"]["acceptance_rate"] is None


def test_energy_is_known_only_if_every_answer_tells(tmp_path: Path) -> None:
    records = [record(1, stats={"energy_joules": 1.0}), record(2, stats={"energy_joules": None})]
    part = part_of(tmp_path, {"plain": records})
    assert part["arms"]["plain"]["energy_joules"] is None


def test_places_weigh_by_the_proposals_that_reached_them(tmp_path: Path) -> None:
    one = {"acceptance_by_position": [1.0, 0.5], "tries_by_position": [10, 2], "draft_share": {"code": 10}}
    other = {"acceptance_by_position": [0.0, 1.0], "tries_by_position": [10, 6], "draft_share": {"code": 10}}
    part = part_of(tmp_path, {"plain": [record(1, stats=one), record(2, stats=other)]})
    assert part["arms"]["plain"]["acceptance_by_position"] == pytest.approx([0.5, 7 / 8])
    del other["tries_by_position"]  # as in runs that were measured before they were counted
    part = part_of(tmp_path / "2", {"plain": [record(1, stats=one), record(2, stats=other)]})
    assert part["arms"]["plain"]["acceptance_by_position"] == [], "unknown, and not made up"


def test_parts_that_exceed_the_whole_are_told(tmp_path: Path) -> None:
    good = {"target_seconds": 0.06, "draft_seconds": 0.04}
    part = part_of(
        tmp_path, {"plain": [record(1, stats=good)], "arm": [record(1, stats=good | {"draft_seconds": 0.08})]}
    )
    assert part["arms"]["plain"]["warnings"] == []
    assert sum(part["arms"]["plain"]["time_share"].values()) == pytest.approx(1)
    assert any("more than the whole" in warning for warning in part["arms"]["arm"]["warnings"])
    late = part_of(tmp_path / "2", {"plain": [record(1, seconds=0.1)]})
    assert any("more than the whole" in warning for warning in late["arms"]["plain"]["warnings"])


def test_doubts_are_told(tmp_path: Path) -> None:
    busy = [record(1, disturbance=0.5), record(2, disturbance=0.05)]
    faster = [record(1), record(1, repeat=1, step=0.001)]
    changing = [record(1), record(1, repeat=1, token_ids=tuple(range(11)))]
    less = dataclasses.replace(faster[1], disturbance=0.2)
    part = part_of(tmp_path, {"plain": [*busy, less], "fast": faster, "change": changing})
    warnings = {name: " ".join(arm["warnings"]) for name, arm in part["arms"].items()}
    assert "other processes used more than 10% of the machine in 2 of 3 answers, at most 50%" in warnings["plain"]
    assert "10.00 times as fast as the first" in warnings["fast"]
    assert "changed from one repeat to another: 1" in warnings["change"]
    assert "changed" not in warnings["fast"]
    assert any("not every arm" in warning for warning in part_of(
        tmp_path / "2", {"plain": [record(1), record(2)], "a": [record(1)], "b": [record(1), record(2)]}
    )["warnings"])  # fmt: skip


def test_fallbacks_as_they_were_counted_before_are_told(tmp_path: Path) -> None:
    stats = {"draft_share": {"code": 6, "plain": 4}, "gamma_histogram": {"3": 8, "0": 2}, "fallback_share": 0.3}
    new = record(1, stats=stats)
    old = record(1, stats=stats)
    del old.stats["tries_by_position"]
    part = part_of(tmp_path, {"plain": [record(1)], "new": [new], "old": [old]})
    assert part["arms"]["new"]["warnings"] == []
    assert "its fallback share has the 20.0% of rounds" in part["arms"]["old"]["warnings"][0]


def test_a_run_without_any_answer(tmp_path: Path) -> None:
    part = part_of(tmp_path, {"plain": [], "edgespec": []}, finished=False)
    assert part["questions"] == 0
    assert part["arms"]["edgespec"]["speedup"]["value"] is None
    assert any("no answer of plain" in warning for warning in part["warnings"])


def test_a_run_in_which_plain_failed_throughout(tmp_path: Path) -> None:
    part = part_of(tmp_path, {"plain": [failed(1)], "arm": [record(1)]})
    assert part["arms"]["arm"]["speedup"]["value"] is None
    assert part["arms"]["arm"]["questions"]["plain_failed"] == ["1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_s": float("nan")}, "decode_s is nan"),
        ({"seconds": -1.0}, "seconds is -1.0"),
        ({"first_token_s": float("inf")}, "first_token_s is inf"),
        ({"decode_s": 0.0}, "10 tokens in no time"),
        ({"decode_s": 1e-320}, "10 tokens in no time"),
        ({"decode_tokens": 12}, "decode_tokens is 12 of 11"),
        ({"stats": {"target_seconds": float("nan")}}, "target_seconds is nan"),
        ({"stats": {"loads": "many"}}, "loads is 'many'"),
        ({"stats": {"draft_share": [1, 2]}}, "draft_share is not counts by name"),
        ({"stats": {"draft_share": {"a": -1}}}, "draft_share of a is -1"),
        ({"stats": {"draft_share": {"a": float("nan")}}}, "draft_share of a is nan"),
        ({"stats": {"gamma_histogram": {"a": 1}}}, "gamma_histogram has 'a'"),
        ({"at": float("nan")}, "at is nan"),
        ({"stats": {"by_draft": [1]}}, "by_draft is not counts by name"),
        ({"stats": {"by_draft": {"a": [1, 1, 3]}}}, "not blocks, first, proposed, accepted"),
        ({"stats": {"by_draft": {"a": [1, 1, 3, -1]}}}, "by_draft of a is -1"),
        ({"stats": {"by_draft": {"a": [1, 2, 3, 1]}}}, "more accepted than proposed"),
        ({"stats": {"by_draft": {"a": [1, 1, 3, 4]}}}, "more accepted than proposed"),
        ({"stats": {"fallback_share": 3}}, "fallback_share is 3, more than all"),
        ({"stats": {"acceptance_by_position": ["0.5"]}}, "not a number"),
        ({"stats": {"acceptance_by_position": [0.5, 0.5], "tries_by_position": [3]}}, "of the same places"),
        ({"stats": {"accepted_tokens": 3, "proposed_tokens": 2}}, "accepted_tokens is 3 of 2"),
        ({"round_tokens": (1000,)}, "round_tokens come to 1000 of 11"),
    ],
)
def test_numbers_that_cannot_be_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run = read_run(write_run(tmp_path / "run", {"plain": [record(7)]}))
    run.records["plain"][:] = [record(7, **changes)]
    with pytest.raises(ConfigError, match="question 7") as caught:
        build([run])
    assert message in str(caught.value)
