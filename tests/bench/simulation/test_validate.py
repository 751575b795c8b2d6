"""Validation: a run that was itself made by the replay is reproduced; one that was not is said to differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.reporting.document import build
from edgespec.bench.simulation import tables
from edgespec.bench.simulation.scenario import Base, Setting, simulate
from edgespec.bench.simulation.texts import read_corpus, shortened
from edgespec.bench.simulation.validate import check, doubts, matched, run_costs, same_drafts, validated
from edgespec.bench.specbench.arms import expanded, split_specs
from edgespec.bench.specbench.command import DEFAULT_POLICIES
from edgespec.bench.specbench.folder import Record, RunFolder, read_run
from edgespec.errors import ConfigError
from predictor.costs import CostTable
from tests.bench.simulation import made
from tests.bench.simulation.test_command import simulate as run_command
from tests.support.runs import record, write_run
from tests.support.traces import NEW

ARMS = ("plain", "static:left@3", "static:right@2", "memspec@3", "edgespec")
OVERHEAD = 0.0005
ASKED = {"resident": None, "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return made.base(tmp_path_factory.mktemp("validate") / "traces")


def turns(
    base: Base, arm: str, slower: float = 1.0, *, resident: int = 2, new: int = NEW, planning: float = 0.0, **more: Any
) -> list[Record]:
    """What a run would have kept of the replay of one policy. planning: seconds of a round, beside all others."""
    device = replace(base, overhead=OVERHEAD)
    outcome = simulate(device, Setting(arm, order="file", resident=resident, new_tokens=new))
    found = []
    for number, (text, of_text) in enumerate(zip(base.corpus.texts, outcome.texts)):
        answer = tuple(base.corpus.answers[text.name])[:new]
        gamma = 0 if arm == "plain" else int(arm.split("@")[1]) if arm.startswith("static") else 3
        idle = of_text.share.get("plain", 0)
        drafted = of_text.rounds - idle
        target = idle * base.costs.verify(1) + drafted * base.costs.verify(gamma + 1)
        drafts = gamma * drafted * 0.0004
        stats: dict[str, Any] = {
            "rounds": of_text.rounds,
            "target_seconds": target,
            "draft_seconds": drafts,
            "catch_up_seconds": max(of_text.seconds - target - drafts - OVERHEAD * of_text.rounds, 0.0),
            "predictor_seconds": planning * of_text.rounds,
            "draft_share": dict(of_text.share),
            "gamma_histogram": {"0": idle, str(gamma or 1): drafted},
        }
        seconds = (of_text.seconds + planning * of_text.rounds) * slower
        found.append(
            record(
                number + 1, prompt_tokens=text.prompt_length, token_ids=answer, decode_tokens=len(answer) - 1,
                decode_s=seconds, seconds=seconds + 0.1, domain=text.domain, stats=stats, round_tokens=(), **more,
            )
        )  # fmt: skip
    return found


def run_folder(base: Base, path: Path, machine: Any = None, **slower: float) -> Path:
    records = {arm: turns(base, arm, slower.get(arm.split(":")[0].split("@")[0], 1.0)) for arm in ARMS}
    return write_run(path, records, settings=ASKED, machine={"slots": 2, **(machine or {})})


def errors(found: Any) -> dict[str, float]:
    return {row["arm"]: row["error"] for row in found["rows"]}


def test_costs_are_found_again(base: Base, tmp_path: Path) -> None:
    found = matched(base.corpus, read_run(run_folder(base, tmp_path / "run")))
    assert [text.name for text in found.texts] == [text.name for text in base.corpus.texts]
    costs, overhead = run_costs(found, base.corpus, base.costs)
    assert costs.verify(1) == pytest.approx(0.010)
    assert costs.verify(4) == pytest.approx(0.0115, rel=0.02)
    assert costs.draft("left") == pytest.approx(0.0004, rel=0.05)
    assert overhead == pytest.approx(OVERHEAD, rel=0.2)


def test_a_run_of_the_replay_is_reproduced_and_a_slower_one_is_not(base: Base, tmp_path: Path) -> None:
    found = validated(base, read_run(run_folder(base, tmp_path / "run")))
    assert [row["arm"] for row in found["rows"]] == list(ARMS[1:])
    assert max(map(abs, errors(found).values())) < 0.05
    slower = validated(base, read_run(run_folder(base, tmp_path / "slow", edgespec=1.2)))
    assert errors(slower)["edgespec"] > 0.1
    assert abs(errors(slower)["memspec@3"]) < 0.05
    assert (slower["agree"], slower["predicted"]) == (1, 2)


def test_arms_that_the_costs_are_from_are_not_counted_as_agreeing(base: Base, tmp_path: Path) -> None:
    found = validated(base, read_run(run_folder(base, tmp_path / "run")))
    assert [row["fitted"] for row in found["rows"]] == [True, True, False, False]
    assert (found["agree"], found["predicted"]) == (2, 2)
    table = tables.validation(found)
    assert [row[-1] for row in table.rows] == ["fitted", "fitted", "predicted", "predicted"]
    assert "2 of 2 predicted ones agree" in table.note


def test_as_many_drafts_as_the_run_held_are_simulated_also_where_that_was_not_asked_for(
    base: Base, tmp_path: Path
) -> None:
    records = {arm: turns(base, arm, resident=1) for arm in ARMS}
    path = write_run(tmp_path / "run", records, settings=ASKED, machine={"slots": 1})
    found = validated(base, read_run(path))
    assert found["resident"] == 1
    assert max(map(abs, errors(found).values())) < 0.05
    both = validated(base, read_run(write_run(tmp_path / "both", records, settings=ASKED, machine={"slots": 2})))
    loads = [{row["arm"]: row["loads"] for row in each["rows"]}["static:right@2"] for each in (found, both)]
    assert loads == [1, 0]
    for machine, settings in (({"slots": "x"}, {}), ({"slots": None}, {"resident": "x"}), ({}, {"resident": None})):
        wrong = write_run(tmp_path / f"wrong{machine}", records, settings={**ASKED, **settings}, machine=machine)
        with pytest.raises(ConfigError, match="not a whole number"):
            validated(base, read_run(wrong))


def test_measured_is_what_the_report_says(base: Base, tmp_path: Path) -> None:
    """Two groups, the second on a machine that had become slower, and repeats that differ."""
    records: dict[str, list[Record]] = {"plain": [], "static:left@3": [], "memspec@3": []}
    for repeat, noise in enumerate((1.0, 1.5, 1.1)):
        records["plain"] += turns(base, "plain", noise, repeat=repeat, group=0)
        records["plain"] += turns(base, "plain", 1.3 * noise, repeat=repeat, group=1)
        records["static:left@3"] += turns(base, "static:left@3", noise, repeat=repeat, group=0)
        records["memspec@3"] += turns(base, "memspec@3", 1.3 * noise, repeat=repeat, group=1)
    run = read_run(write_run(tmp_path / "run", records, settings={**ASKED, "repeats": 3}, machine={"slots": 2}))
    arms = build([run])["parts"][0]["arms"]
    for row in validated(base, run)["rows"]:
        assert row["measured"] == pytest.approx(arms[row["arm"]]["speedup"]["value"])


def test_other_engines_take_nothing_away(base: Base, tmp_path: Path) -> None:
    records = {arm: turns(base, arm) for arm in ("plain", "static:left@3")}
    records["peer:other"] = [replace(turn, token_ids=tuple(range(NEW))) for turn in records["plain"]]
    path = write_run(tmp_path / "run", records, settings=ASKED, machine={"slots": 2})
    found = validated(base, read_run(path))
    assert (found["texts"], [row["arm"] for row in found["rows"]]) == (8, ["static:left@3"])


def test_the_limit_is_that_of_the_run(base: Base, tmp_path: Path) -> None:
    records = {arm: turns(base, arm, new=20) for arm in ARMS}
    run = read_run(write_run(tmp_path / "run", records, settings={**ASKED, "max_new_tokens": 20}, machine={"slots": 2}))
    found = validated(base, run)
    assert max(map(abs, errors(found).values())) < 0.05
    assert found["rows"][0]["tokens"] == 8 * 19
    longer = read_run(
        write_run(tmp_path / "long", records, settings={**ASKED, "max_new_tokens": 30}, machine={"slots": 2})
    )
    assert validated(base, longer)["rows"][0]["seconds"] != found["rows"][0]["seconds"]  # blocks reach beyond the end


def test_planning_is_what_the_run_measured(base: Base, tmp_path: Path) -> None:
    records = {arm: turns(base, arm, planning=0.002 if arm == "edgespec" else 0.0) for arm in ARMS}
    found = validated(base, read_run(write_run(tmp_path / "run", records, settings=ASKED, machine={"slots": 2})))
    rows = {row["arm"]: row for row in found["rows"]}
    assert 0.001 < rows["edgespec"]["planning_seconds"] <= 0.002
    assert abs(rows["edgespec"]["error"]) < 0.05
    assert rows["memspec@3"]["planning_seconds"] == 0


def test_only_turns_that_were_recorded_are_compared(base: Base, tmp_path: Path) -> None:
    records = {arm: turns(base, arm) for arm in ("plain", "static:left@3")}
    first = records["plain"][0]
    records["plain"][0] = replace(first, token_ids=(*first.token_ids[:-1], 9999))  # another text
    records["static:left@3"][1] = replace(records["static:left@3"][1], error="it fell over")
    found = matched(base.corpus, read_run(write_run(tmp_path / "run", records)))
    assert [text.name for text in found.texts] == [text.name for text in base.corpus.texts[2:]]
    assert {r.question_id for of_arm in found.run.records.values() for r in of_arm} == set("345678")


def test_equal_answers_to_prompts_of_one_length_serve_one_question_each(base: Base, tmp_path: Path) -> None:
    texts = list(base.corpus.texts)
    twin = replace(texts[0], name="twin")
    answers = {**base.corpus.answers, "twin": base.corpus.answers[texts[0].name]}
    corpus = replace(base.corpus, texts=(texts[0], twin), answers=answers)
    records = {arm: turns(base, arm)[:1] for arm in ("plain", "static:left@3")}
    for turn in list(records["plain"]):
        records["plain"].append(replace(turn, question_id="again", order=7))
    records["static:left@3"].append(replace(records["static:left@3"][0], question_id="again", order=7))
    found = matched(corpus, read_run(write_run(tmp_path / "run", records)))
    assert [text.name for text in found.texts] == [texts[0].name, "twin"]


def test_answers_of_a_few_tokens_are_found(base: Base, tmp_path: Path) -> None:
    records = {arm: turns(base, arm, new=4)[:1] for arm in ("plain", "static:left@3")}
    found = matched(base.corpus, read_run(write_run(tmp_path / "run", records)))
    assert found.texts[0].accepts.shape[1] == 3
    assert found.texts[0].name == shortened(base.corpus.texts[0], 4).name


def test_runs_that_say_nothing_are_refused(base: Base, tmp_path: Path) -> None:
    def refused(name: str, records: Any) -> str:
        run = read_run(write_run(tmp_path / name, records, settings=ASKED, machine={"slots": 2}))
        with pytest.raises(ConfigError) as caught:
            validated(base, run)
        return str(caught.value)

    other = {"plain": [replace(turn, prompt_tokens=999) for turn in turns(base, "plain")]}
    assert "bench record" in refused("other", other)
    assert "static" in refused("plain", {"plain": turns(base, "plain")})


def test_costs_of_drafts_without_a_static_arm_are_guessed_from_the_others(base: Base, tmp_path: Path) -> None:
    records = {arm: turns(base, arm) for arm in ("plain", "static:left@3")}
    found = matched(base.corpus, read_run(write_run(tmp_path / "run", records)))
    costs, _ = run_costs(found, base.corpus, CostTable({1: 1.0}))
    assert costs.draft("right") == pytest.approx(costs.draft("left"))


def test_a_run_without_a_fixed_policy_is_refused_before_anything_is_replayed(base: Base, tmp_path: Path) -> None:
    records = {arm: turns(base, arm) for arm in ("plain", "memspec@3")}
    with pytest.raises(ConfigError, match="with static or all-statics among its --policies"):
        check(read_run(write_run(tmp_path / "run", records)))
    usual = expanded(split_specs(DEFAULT_POLICIES), ["left", "right"])
    check(read_run(write_run(tmp_path / "usual", {arm: turns(base, "plain") for arm in usual})))


def test_an_answer_that_ended_is_not_taken_for_the_beginning_of_another(base: Base, tmp_path: Path) -> None:
    """Prompts of one length, and one answer begins like the other."""
    longer = base.corpus.texts[0]
    short = replace(shortened(longer, 4), name="short")
    answers = {**base.corpus.answers, "short": list(base.corpus.answers[longer.name])[:4]}
    corpus = replace(base.corpus, texts=(longer, short), answers=answers)
    records = {arm: turns(base, arm, new=4)[:1] for arm in ("plain", "static:left@3")}
    found = matched(corpus, read_run(write_run(tmp_path / "run", records)))
    assert [text.name for text in found.texts] == ["short"]


def test_a_run_with_other_drafts_than_are_replayed_is_refused(base: Base, tmp_path: Path) -> None:
    def run(*names: str) -> RunFolder:
        settings = {**ASKED, "draft_fingerprints": dict.fromkeys(names, "f")}
        records = {arm: turns(base, arm) for arm in ("plain", "static:left@3", "edgespec")}
        return read_run(write_run(tmp_path / "".join(names), records, settings=settings, machine={"slots": 2}))

    recorded = base.corpus.header.names
    same_drafts(run(*recorded), recorded, recorded)
    same_drafts(run("left"), ["left"], recorded)
    with pytest.raises(ConfigError, match="give --drafts left,words"):
        same_drafts(run("left", "words"), recorded, recorded)
    with pytest.raises(ConfigError, match="had third, which these traces lack"):
        same_drafts(run("left", "third"), recorded, recorded)


def test_the_command_compares_a_run_of_fewer_drafts_with_those(
    base: Base, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = read_corpus([made.folder(tmp_path / "traces")], drafts=["left"], ranker="off")
    records = {arm: turns(replace(base, corpus=corpus), arm) for arm in ("plain", "static:left@3", "edgespec")}
    settings = {**ASKED, "draft_fingerprints": {"left": "f"}}
    path = write_run(tmp_path / "run", records, settings=settings, machine={"slots": 2})
    asked = (str(tmp_path / "traces"), "--validate", str(path))
    with pytest.raises(ConfigError, match="give --drafts left"):
        run_command(*asked)
    assert run_command(*asked, "--drafts", "left", "--json") == 0
    found = json.loads(capsys.readouterr().out)["validation"]
    assert max(map(abs, errors(found).values())) < 0.05


def of_questions(base: Base, path: Path, count: int, asked: int, *, finished: bool) -> RunFolder:
    """A run that has come to `count` of its questions."""
    records = {arm: turns(base, arm)[:count] for arm in ARMS}
    run = read_run(write_run(path, records, settings=ASKED, machine={"slots": 2}, finished=finished))
    return replace(run, questions=asked)


def test_a_run_that_is_not_finished_is_said_to_be(base: Base, tmp_path: Path) -> None:
    run = of_questions(base, tmp_path / "run", 6, 8, finished=False)
    run.records["edgespec"].pop()  # it is its turn
    assert doubts(run, validated(base, run)) == [
        "The run is not finished: all its policies have answered 5 of 8 questions."
    ]
    whole = of_questions(base, tmp_path / "whole", 8, 8, finished=True)
    assert doubts(whole, validated(base, whole)) == []
    none = of_questions(base, tmp_path / "none", 1, 8, finished=False)
    none.records["edgespec"].clear()
    with pytest.raises(ConfigError, match="is not finished"):
        validated(base, none)


def test_questions_that_are_not_compared_are_counted(base: Base, tmp_path: Path) -> None:
    run = of_questions(base, tmp_path / "run", 8, 8, finished=True)
    for place in (0, 1):
        run.records["edgespec"][place] = replace(run.records["edgespec"][place], token_ids=(1, 2, 3), decode_tokens=2)
    (told,) = doubts(run, validated(base, run))
    assert told.startswith("The comparison has 6 of 8 questions: ")


def test_few_answers_give_no_verdict(base: Base, tmp_path: Path) -> None:
    def note(count: int) -> str:
        run = of_questions(base, tmp_path / f"run{count}", count, count, finished=True)
        found = validated(base, run)
        assert (found["agree"] is None) == any("no verdict" in text for text in doubts(run, found)) == (count < 5)
        return tables.validation(found).note

    assert note(1).startswith("No verdict: 1 answer, and of fewer than 5 there is none.")
    assert note(4).startswith("No verdict: 4 answers, ")
    assert note(5).startswith("2 of 2 predicted ones agree within 5%, over 5 answers.")


@pytest.mark.parametrize(
    ("agree", "predicted", "words"),
    [
        (1, 1, "1 of 1 predicted one agrees"),
        (0, 1, "0 of 1 predicted one agrees"),
        (1, 2, "1 of 2 predicted ones agrees"),
        (0, 2, "0 of 2 predicted ones agree within"),
        (0, 0, "None is predicted"),
    ],
)
def test_one_agrees_and_two_agree(agree: int, predicted: int, words: str) -> None:
    found = {"rows": [], "agree": agree, "predicted": predicted, "within": 0.05, "texts": 9}
    assert tables.validation(found).note.startswith(words)


def test_the_tables_beside_a_validation_say_that_their_costs_are_others(
    base: Base, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(
        tmp_path / "run", {arm: turns(base, arm)[:3] for arm in ARMS}, settings=ASKED, machine={"slots": 1},
        finished=False,
    )  # fmt: skip
    asked = (str(made.folder(tmp_path / "traces")), "--validate", str(path))
    assert run_command(*asked, "--policies", "memspec@3") == 0
    upper, lower = capsys.readouterr().out.split("Simulated against measured, at the run's own costs")
    assert "Policies, at costs measured with the traces" in upper
    assert "Mind: The run is not finished: all its policies have answered 3 of 3 questions." in upper
    assert "Planning costs nothing" in upper
    assert "Planning costs nothing" not in lower
    assert run_command(*asked) == 0
    alone = capsys.readouterr().out
    first = alone.splitlines()[0]
    assert first.startswith("Simulated. 3 texts ")
    assert first.endswith(" 1 in memory, costs of the run.")
    assert "Planning costs nothing" not in alone
