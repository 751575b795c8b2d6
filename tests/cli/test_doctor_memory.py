"""The memory plan of `edgespec doctor`: from headers and manifests, as a table and as JSON, with what to change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from drafts.head_file import HeadFile
from edgespec import loading, selftest
from edgespec.cli import doctor_memory, doctor_place
from edgespec.cli.doctor_place import Place
from edgespec.cli.main import main
from edgespec.config import RuntimeConfig
from edgespec.memory.topology import Topology
from edgespec.models.weights.opening import WeightFile
from tests.support.draft_sets import write_draft, write_standalone
from tests.support.phrases import write_phrases
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE

MIB = 1 << 20


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run", lambda load: selftest.SelfTest(48, 40, None))
    monkeypatch.setattr(selftest, "same_bits", lambda threads: {})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny", **SHAPE)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 GiB, all of it free."""
    machine = Topology("discrete", 8 << 30, lambda: (8 << 30, 8 << 30), name="Test Board")
    monkeypatch.setattr(doctor_place, "place", lambda *_asked: Place("cpu", machine))
    monkeypatch.setattr(doctor_memory, "of_engine", lambda _config: Place("cpu", machine))


def doctor(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    code = main(["doctor", "--json", *flags])
    data = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in data["checks"]}
    return code, checks["memory plan"], data["memory"]


def settings(model: Path, *drafts: Path, **values: Any) -> RuntimeConfig:
    return RuntimeConfig.load(model=str(model), drafts=[str(draft) for draft in drafts], **values)


def test_the_plan_says_what_the_engine_plans(model: Path, tmp_path: Path, free: None) -> None:
    """The same numbers as `loading` refuses by, and as the drafts say of themselves."""
    head, checkpoint = write_draft(tmp_path / "code", model), write_standalone(tmp_path / "big", model, **SHAPE)
    config = settings(model, head, checkpoint, context=128)
    report = doctor_memory.plan_of(config)
    assert report is not None
    target = loading.load_target(config, None)
    try:
        from edgespec.draft_loading import load_draft

        for part, planned in (("target", "target"), ("workspace", "workspace"), ("KV cache of 128 tokens", "KV cache")):
            row = next(row for row in report.plan.rows() if row.part == part)
            assert row.nbytes == target.planned[planned]
        for path in (head, checkpoint):
            draft: Any = load_draft(str(path), config, target, None).status.draft
            need = next(need for need in report.plan.drafts if need.name in (path.name, str(path)))
            assert need.slot == draft.slot_bytes
            assert need.always == getattr(draft, "conversation_bytes", 0)
            draft.close()
    finally:
        target.close()


def test_a_plan_that_fits(model: Path, tmp_path: Path, free: None, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = [write_draft(tmp_path / name, model) for name in ("code", "math")]
    flags = ["--model", str(model), *(word for draft in drafts for word in ("--draft", str(draft)))]
    code, check, memory = doctor(capsys, *flags)
    assert code == 0
    assert (check["status"], check["advice"]) == ("ok", "")
    assert "2 of 2 drafts with weights in memory at once (K = 2)" in check["detail"]
    assert memory["slots"] == 2
    assert memory["device"] == {
        "kind": "discrete",
        "name": "Test Board",
        "soc": "",
        "total_bytes": 8 << 30,
        "available_bytes": 8 << 30,
    }
    assert [part["part"].split()[0] for part in memory["parts"]] == [
        "target", "workspace", "KV", "drafts,", "2", "total",
    ]  # fmt: skip
    assert [draft["part"] for draft in memory["drafts"]] == ["code", "math"]
    assert all(draft["fits"] for draft in memory["drafts"])
    assert main(["doctor", *flags]) == 0
    out = capsys.readouterr().out
    assert "Memory plan (Test Board, the GPU's own memory, 8.0 GiB free now)" in out
    assert "│ 2 draft slots of " in out
    assert "NO" not in out.partition("Memory plan (")[2]
    assert "- a loaded draft takes several times its file: " in out


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_to_change(
    model: Path, tmp_path: Path, free: None, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = write_draft(tmp_path / "code", model)
    flags = ["--model", str(model), "--draft", str(draft)]
    code, check, memory = doctor(capsys, *flags, "--memory-budget", "160MiB", "--context", "256")
    assert (code, check["status"]) == (1, "fail")
    assert "are missing: as it is, this is refused" in check["advice"]
    assert "--memory-budget" in check["advice"]
    assert memory["fits"] is False
    assert memory["parts"][-1]["left"] < 0
    main(["doctor", *flags, "--memory-budget", "160MiB", "--context", "256"])
    out = capsys.readouterr().out
    assert re.search(r"│ NO +│ \d+\.\d KiB missing +│", out)
    assert out.count("are missing: as it is, this is refused") == 1  # below the tables, not beside the check as well
    needed = next(word for word in check["advice"].split() if word.endswith("MiB") and word[:-3].isdigit())
    code, check, memory = doctor(capsys, *flags, "--memory-budget", needed, "--context", "256")
    assert memory["fits"] is True


def test_drafts_that_do_not_fit_are_a_warning(
    model: Path, tmp_path: Path, free: None, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = (
        write_draft(tmp_path / "code", model),
        write_standalone(tmp_path / "large", model, vocab_size=4096, **SHAPE),
    )
    config = settings(model, small, large, context=128)
    report = doctor_memory.plan_of(config)
    assert report is not None
    sizes = sorted(draft.slot for draft in report.plan.drafts)
    budget = report.plan.total - report.plan.slots * report.plan.slot_bytes + sizes[0] + 10
    flags = ["--model", str(model), "--draft", str(small), "--draft", str(large), "--context", "128"]
    code, check, memory = doctor(capsys, *flags, "--memory-budget", str(budget))
    assert (code, check["status"]) == (0, "warn")
    assert memory["slots"] == 1
    assert [draft["fits"] for draft in memory["drafts"]] == [True, False]
    assert memory["drafts"][1]["left"] == sizes[0] - sizes[1]
    assert "is left out: one slot for it needs" in check["advice"]


def test_too_many_asked_for_is_refused(
    model: Path, tmp_path: Path, free: None, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = [write_draft(tmp_path / name, model) for name in ("code", "math")]
    report = doctor_memory.plan_of(settings(model, *drafts, context=128))
    assert report is not None
    one = report.plan.total - report.plan.slot_bytes
    flags = ["--model", str(model), *(word for draft in drafts for word in ("--draft", str(draft)))]
    flags += ["--context", "128", "--memory-budget", str(one)]
    code, check, memory = doctor(capsys, *flags, "--resident", "2")
    assert (code, memory["slots"]) == (1, 2)
    assert "--resident 1 fits" in check["advice"]
    code, check, memory = doctor(capsys, *flags)
    assert (code, memory["slots"]) == (0, 1)


def test_tables_of_phrases_and_damaged_drafts(model: Path, tmp_path: Path, free: None) -> None:
    table = write_phrases(tmp_path / "phrases", model)
    damaged = write_draft(tmp_path / "damaged", model)
    (damaged / "draft.toml").write_text("no toml")
    report = doctor_memory.plan_of(settings(model, table, damaged, tmp_path / "nothing"))
    assert report is not None
    (need,) = report.plan.drafts
    assert need.slot == 0
    assert need.always > 0
    assert len(report.notes) == 2
    assert report.notes[0].startswith("draft damaged is not in the plan: ")


def test_no_plan_without_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    _, check, memory = doctor(capsys)
    assert (check["status"], memory) == ("ok", None)
    assert "made when smollm2-135m is on this machine" in check["detail"]


def test_nothing_is_loaded_for_it(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes come from headers and manifests: no matrix is read; fingerprints read norm vectors and some bytes."""
    read = WeightFile.read

    def refused(*arguments: Any, **_options: object) -> Any:
        if isinstance(arguments[0], WeightFile) and arguments[1].endswith("norm.weight"):
            return read(*arguments)
        raise AssertionError("weights are read")

    drafts = write_draft(tmp_path / "code", model), write_standalone(tmp_path / "big", model, **SHAPE)
    refusing = ((loading, "build_decoder"), (HeadFile, "read"), (WeightFile, "read"), (WeightFile, "quantised"))
    for owner, name in refusing:
        monkeypatch.setattr(owner, name, refused)
    report = doctor_memory.plan_of(settings(model, *drafts))
    assert report is not None
    assert len(report.plan.drafts) == 2
