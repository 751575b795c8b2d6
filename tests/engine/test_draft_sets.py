"""Engines with draft sets: what "auto", names, sets and paths load; what is refused; the text never changes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from drafts import zoo
from drafts.head import FILE_NAME
from drafts.manifest import MANIFEST, Acceptance
from edgespec import SamplingParams
from edgespec.draft_loading import load_draft
from edgespec.errors import ConfigError, DraftError
from edgespec.loading import target_facts
from tests.support.draft_sets import edit, write_draft, write_standalone
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import GREEDY, QUESTION, SHAPE, load, plain


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(zoo, "BUILT_IN", tmp_path / "shipped")
    return write_tiny(tmp_path / "models" / "tiny", **SHAPE)


@pytest.fixture
def trained(target: Path, tmp_path: Path) -> Path:
    """A set of three heads for the target."""
    folder = tmp_path / "home" / "drafts" / "tiny-set"
    for seed, name in enumerate(("code", "general", "math")):
        write_draft(folder / name, target, seed=seed)
    return folder


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
def test_auto_is_lookup_and_the_set_made_for_this_target(target, trained, caplog, device):
    with caplog.at_level(logging.WARNING), load(target, device=device) as engine:
        assert engine.drafts == dict.fromkeys(("ngram", "general", "code", "math"), "active")
        infos = {info.name: info for info in engine.draft_infos()}
        assert (infos["code"].kind, infos["code"].domain) == ("head", "code")
        assert infos["ngram"].domain == ""
        assert infos["math"].nbytes > 0
        text = plain(engine, QUESTION)
        assert engine.generate(QUESTION, GREEDY).token_ids == text
        for name in ("code", "math", "general"):
            engine.use_draft(name)
            engine.gamma = 3
            result = engine.generate(QUESTION, GREEDY)
            assert result.token_ids == text
            assert set(result.stats.draft_share) >= set(engine.drafts)
            assert result.stats.draft_share[name] > 0
    assert warnings(caplog) == []


def test_another_target_gets_lookup_alone(target, trained, tmp_path, caplog):
    other = write_tiny(tmp_path / "models" / "other", seed=5, **SHAPE)
    with caplog.at_level(logging.WARNING), load(other) as engine:
        assert list(engine.drafts) == ["ngram"]
    assert warnings(caplog) == []


def test_names_sets_and_paths(target, trained, tmp_path):
    path = str(trained / "math")
    checkpoint = str(write_tiny(tmp_path / "models" / "draft", seed=3, **SHAPE))
    for drafts, names in (
        ("code", ["code"]),
        (["code", "ngram"], ["code", "ngram"]),
        ("tiny-set", ["general", "code", "math"]),
        (path, ["math"]),
        (["math", path, "math"], ["math"]),
        (["tiny-set", "ngram", "ngram"], ["general", "code", "math", "ngram"]),
        (str(trained), ["code", "general", "math"]),
        ([path, checkpoint], ["math", "draft"]),
        (str(Path(checkpoint) / "model.safetensors"), ["model"]),
    ):
        with load(target, drafts=drafts) as engine:
            assert engine.drafts == dict.fromkeys(names, "active"), drafts


def test_a_name_that_is_none_lists_those_there_are(target, trained):
    with pytest.raises(ConfigError, match="did you mean code"):
        load(target, drafts=["codee", "ngram"])
    with load(target, drafts=["ngram"]) as engine:
        assert "Drafts of this target are general, code, math" in engine.add_draft("codee").status
        assert engine.drafts["ngram"] == "active"


def test_a_draft_of_another_target_is_one_warning_and_the_text_goes_on(target, trained, tmp_path, caplog):
    other = write_tiny(tmp_path / "models" / "other", seed=5, **SHAPE)
    with caplog.at_level(logging.WARNING), load(other, drafts=["code", "ngram"], gamma=3) as engine:
        assert "made for another target, tiny" in engine.drafts["code"]
        assert engine.generate(QUESTION, GREEDY).token_ids == plain(engine, QUESTION)
        with pytest.raises(DraftError, match="code"):
            engine.use_draft("code")
    assert len(warnings(caplog)) == 1
    assert "code" in warnings(caplog)[0]


@pytest.mark.parametrize("damage", ["cut", "bits", "toml", "gone", "outside", "loop", "huge"])
def test_a_damaged_draft_is_one_warning_and_the_others_work(target, trained, tmp_path, caplog, damage):
    path = trained / "code" / FILE_NAME
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[:-100])
    elif damage == "bits":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "toml":
        (trained / "code" / MANIFEST).write_text("name = [")
    elif damage == "huge":
        (trained / "code" / MANIFEST).write_bytes(b"#" * (1 << 20))
    else:
        path.unlink()
        if damage == "outside":
            (tmp_path / "elsewhere").write_bytes(data)
            path.symlink_to(tmp_path / "elsewhere")
        elif damage == "loop":
            path.symlink_to(path)
    with caplog.at_level(logging.WARNING), load(target, gamma=3) as engine:
        assert engine.drafts["code"].startswith("failed: ")
        assert [name for name, state in engine.drafts.items() if state == "active"] == ["ngram", "general", "math"]
        assert engine.generate(QUESTION, GREEDY).token_ids == plain(engine, QUESTION)
        assert {info.name: info.nbytes for info in engine.draft_infos()}["code"] == 0
    assert len(warnings(caplog)) == 1
    assert "code" in warnings(caplog)[0]


def test_a_set_that_is_removed_while_it_is_used_is_missed_by_nobody(target, trained, caplog):
    with caplog.at_level(logging.WARNING), load(target, drafts=["code"], gamma=2) as engine:
        before = engine.generate(QUESTION, GREEDY)
        shutil.rmtree(trained)
        again = engine.generate(QUESTION, GREEDY)
        assert again.token_ids == before.token_ids
        assert again.stats.draft_share["code"] > 0
        assert engine.add_draft("math").status.startswith("failed: ")
    with load(target) as engine:
        assert list(engine.drafts) == ["ngram"]


def test_heads_get_the_slots_that_fit_and_are_refused_before_they_are_read(target, trained, monkeypatch):
    with load(target, drafts=None, context=256) as engine:
        planned = sum(engine._target.planned.values())
    with load(target, context=256) as engine:
        heads = [status.draft for status in engine._statuses.values() if status.loadable]
        always = sum(draft.conversation_bytes for draft in heads)
        one = max(draft.slot_bytes for draft in heads)
        assert engine.working_set.slots == len(heads)
    with load(target, context=256, memory_budget=planned + always + one + 1000) as engine:
        assert engine.working_set.slots == 1
        states = [engine.drafts[draft.name] for draft in heads]
        assert states.count("active") == 1
        assert set(states) <= {"active", "cold", "warm"}
        assert engine._target.planned["1 draft slots"] == one
        assert one >= max(info.nbytes for info in engine.draft_infos())
        assert engine.generate(QUESTION, GREEDY).token_ids == plain(engine, QUESTION)
    monkeypatch.setattr(zoo, "read_head", lambda *_: pytest.fail("it was read"))
    with load(target, drafts=["code"], context=256, memory_budget=planned + always + 1000) as engine:
        assert "are needed" in engine.drafts["code"]
        assert engine.generate(QUESTION, GREEDY).stats.draft_share.get("code", 0) == 0


def test_as_many_drafts_are_held_as_were_asked_for(target, trained):
    with load(target, resident=2) as engine:
        assert engine.working_set.slots == 2
        assert engine.generate(QUESTION, GREEDY).token_ids == plain(engine, QUESTION)
    with load(target, resident=0) as engine:
        assert engine.drafts["code"] == "cold"
        assert engine.generate(QUESTION, GREEDY).token_ids == plain(engine, QUESTION)


def test_a_standalone_draft_of_a_set(target, trained):
    write_standalone(trained / "small", target, **SHAPE)
    with load(target, drafts=["small"], gamma=2) as engine:
        result = engine.generate(QUESTION, GREEDY)
        assert result.token_ids == plain(engine, QUESTION)
        assert result.stats.draft_share["small"] > 0
    (trained / "small" / "config.json").write_text("{}")
    with load(target, drafts=["small"]) as engine:
        assert "config.json" in engine.drafts["small"]


def test_the_planner_starts_from_what_was_measured(target, trained):
    write_draft(
        trained / "chat",
        target,
        acceptance={"chat": Acceptance(0.8, 1.5, 1.4, 1.6, 9), "code": Acceptance(0.2, 0.2, 0.1, 0.3, 9)},
    )
    with load(target) as engine:
        assert engine._held.policy._arm("chat", 1).rates()[0] == pytest.approx(0.9 * 0.5)
        assert engine._held.policy._arm("code", 1).rates()[0] == pytest.approx(0.9 * 0.5)
    edit(trained / "chat", "first = 0.8", "first = 0.6")
    with load(target) as engine:
        assert engine._held.policy._arm("chat", 1).rates()[0] == pytest.approx(0.9 * 0.4)


def test_shadows_of_heads_are_made_and_paid_for(target, trained):
    """Under "auto" a head that does not run is scored too, and the text is the plain one."""
    with load(target, drafts=["code", "general", "math"], gamma="auto") as engine:
        params = SamplingParams(max_new_tokens=100, ignore_eos=True)
        result = engine.generate(QUESTION, params)
        assert result.token_ids == plain(engine, QUESTION, params)
        tried = {name: engine._held.policy._arm(name, 1)._long.tried[0][1] for name in ("code", "general", "math")}
        assert all(tries >= 1 for tries in tried.values())


def test_steps_are_timed_before_the_first_request_once_for_an_architecture(target, trained, monkeypatch):
    with load(target) as engine:
        costs = engine._held.policy.costs
        key = zoo.head_spec(zoo.read_entry(trained / "code").manifest).key
        assert costs.to_json()["drafts"].keys() == {key}
        assert costs.draft("code") == costs.draft("math") == costs.draft("general")
    with load(target, drafts=None) as engine:
        assert engine._held.policy.costs.to_json()["drafts"].keys() == {key}  # kept for the next start
        assert engine.add_draft("code").status == "active"
        assert engine._held.policy.costs.knows("code")


def test_a_draft_that_fails_while_it_is_timed_is_given_up(target, trained, monkeypatch, caplog):
    def broken(self, tokens, gamma, choose, *, floor=0.0):
        raise DraftError("surprise")

    monkeypatch.setattr("drafts.head_session.HeadSession.propose", broken)
    with caplog.at_level(logging.WARNING), load(target, drafts=["code", "ngram"]) as engine:
        assert "surprise" in engine.drafts["code"]
        assert engine.generate(QUESTION, GREEDY).token_ids == plain(engine, QUESTION)
    assert len(warnings(caplog)) == 1


def test_load_draft_takes_one_draft_not_a_set(target, trained):
    with load(target, drafts=None) as engine:
        loaded = load_draft("tiny-set", engine.config, engine._target, None)
        assert "is a set of drafts (general, code, math)" in str(loaded.status)
        assert load_draft("code", engine.config, engine._target, None, taken=["code"]).status.name == "code-2"
        assert engine.target_facts == target_facts(engine.config)
