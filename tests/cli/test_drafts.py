"""`edgespec drafts`: list, show and verify on sets of tiny heads; exit codes, JSON, and what may be imported."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafts import zoo
from drafts.head import FILE_NAME, HeadDraft
from drafts.manifest import MANIFEST, DataSource, Manifest, Training
from edgespec.cli.main import main
from tests.support.draft_sets import edit, write_draft, write_standalone
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(zoo, "BUILT_IN", tmp_path / "shipped")
    return write_tiny(tmp_path / "models" / "tiny", **SHAPE)


@pytest.fixture
def trained(target: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "shipped" / "tiny-set"
    training = Training("edgespec drafts train --target tiny", 3, 1000, 50, 12.5, "general", {"torch": "2.13.0"})
    for seed, name in enumerate(("code", "general")):
        write_draft(
            folder / name,
            target,
            seed=seed,
            description="Made for a test.\nTwo lines.",
            training=training,
            data=(DataSource("own prompts", "CC0-1.0", 40),),
        )
    return folder


@pytest.fixture
def run(target: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(action: str, *words: str, model: Path | None = target) -> tuple[int, str, str]:
        flags = [] if model is None else ["--model", str(model), "--threads", "1", "--weight-format", "float32"]
        code = main(["drafts", action, *words, *flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def as_json(run: Run, action: str, *words: str, **options: Any) -> tuple[int, dict[str, Any]]:
    code, out, err = run(action, *words, "--json", **options)
    assert err == ""
    return code, json.loads(out)


def test_list_is_a_table_with_a_line_a_draft(run: Run, trained: Path) -> None:
    code, out, err = run("list")
    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines[0] == ["NAME", "KIND", "DOMAIN", "MB", "ACCEPTED/ROUND", "TARGET", "STATE"]
    assert lines[1][:3] == ["code", "head", "code"]
    assert lines[1][4:] == ["1.25", "tiny", "ok"]
    assert lines[2][0] == "general"
    code, data = as_json(run, "list")
    assert code == 0
    assert [(row["name"], row["set"], row["state"]) for row in data["drafts"]] == [
        ("code", "tiny-set", "ok"),
        ("general", "tiny-set", "ok"),
    ]
    assert data["drafts"][0]["low"] == 1.2


def test_list_says_what_is_damaged_and_what_is_for_another_target(run: Run, trained: Path, tmp_path: Path) -> None:
    (trained / "code" / FILE_NAME).write_bytes(b"cut")
    other = write_tiny(tmp_path / "models" / "other", seed=9, **SHAPE)
    write_draft(tmp_path / "shipped" / "other" / "math", other)
    (write_draft(tmp_path / "shipped" / "other" / "chat", other) / MANIFEST).write_text("?")
    code, data = as_json(run, "list")
    states = {row["name"]: row["state"] for row in data["drafts"]}
    assert code == 1
    assert states["code"].startswith("damaged: ")
    assert FILE_NAME in states["code"]
    assert states["general"] == "ok"
    assert states["math"].startswith("for another target: draft math was made for another target, other")
    assert states["chat"].startswith("damaged: ")
    assert run("list", "--set", str(tmp_path / "shipped" / "tiny-set"))[0] == 1
    code, out, _ = run("list", "--set", str(trained / "general"))
    assert (code, len(out.splitlines())) == (0, 2)


def test_nothing_to_list(run: Run) -> None:
    assert run("list")[:2] == (0, "There is no draft set on this machine; edgespec drafts train makes one.\n")
    assert run("verify")[:2] == (0, "There is no draft set on this machine; edgespec drafts train makes one.\n")


def test_list_without_the_model_fetches_nothing_and_says_so(run: Run, trained: Path) -> None:
    code, out, _ = run("list", model=None)
    assert code == 0
    assert "ok" in out
    assert "smollm2-135m is not on this machine (edgespec pull fetches it)" in out


def test_show_tells_everything(run: Run, trained: Path) -> None:
    code, out, _ = run("show", "code")
    assert code == 0
    for words in (
        "state         ok",
        "Two lines.",
        "head, int8",
        "Apache-2.0",
        f"{FILE_NAME}: ",
        "hidden_size 32",
        "temperature 1.1, error 3.0%",
        "code: first token 50%, 1.25 accepted a round at gamma 3 (95%: 1.20 to 1.30, 500 rounds)",
        "1000 tokens, 50 updates, 12 s, seed 3, from general (torch 2.13.0)",
        "edgespec drafts train --target tiny",
        "own prompts: 40 prompts, CC0-1.0",
    ):
        assert words in out, words
    made = Manifest.read(trained / "code")
    many = [dataclasses.replace(made.data[0], source=f"source {n}", prompts=n + 1) for n in range(15)]
    dataclasses.replace(made, data=tuple(many)).write(trained / "code")
    shown = run("show", "code")[1]
    assert "source 3: 4 prompts" in shown
    assert "source 2:" not in shown
    assert "and 3 more sources of 6 prompts (--json has them all)" in shown
    made.write(trained / "code")
    code, data = as_json(run, "show", "code")
    assert data["manifest"]["training"]["from"] == "general"
    assert data["state"] == "ok"
    assert run("show", str(trained / "code"))[1] == out
    (trained / "code" / MANIFEST).write_text("?")
    code, out, _ = run("show", "code")
    assert code == 1
    assert "damaged: " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "codee"], "did you mean code?"),
        (["show", "ngram"], "it has no files to show"),
        (["show"], "the following arguments are required: NAME"),
        (["show", "/no/such/folder"], "/no/such/folder"),
        (["verify", "nobody"], "there is no draft 'nobody'"),
        (["list", "--set", "/no/such/folder"], "is no folder"),
        (["list", "--sett", "x"], "unknown flag '--sett'; did you mean --set?"),
        (["lst"], "invalid choice: 'lst'"),
    ],
)
def test_wrong_use_is_a_sentence_and_exit_code_2(run: Run, trained: Path, words: list[str], message: str) -> None:
    code, out, err = run(*words)
    if words == ["show", "/no/such/folder"]:
        assert code == 1
        assert message in out
        return
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_an_empty_folder_is_no_set(run: Run, tmp_path: Path) -> None:
    code, _, err = run("list", "--set", str(tmp_path))
    assert code == 2
    assert "holds no drafts" in err


def test_without_an_action_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafts"]) == 2
    out = capsys.readouterr().out
    assert all(action in out for action in ("list", "show", "verify", "train", "evaluate", "export"))
    assert main(["drafts", "--help"]) == 0
    assert main(["drafts", "verify", "--help"]) == 0
    assert "--offline" in capsys.readouterr().out


def test_verify_tries_every_draft_of_this_model(run: Run, trained: Path, target: Path, tmp_path: Path) -> None:
    write_standalone(trained / "small", target, **SHAPE)
    other = write_tiny(tmp_path / "models" / "other", seed=9, **SHAPE)
    write_draft(tmp_path / "shipped" / "other" / "math", other)
    code, data = as_json(run, "verify")
    assert (code, data["ok"]) == (0, True)
    rows = {row["name"]: row for row in data["drafts"]}
    assert set(rows) == {"code", "general", "small", "math"}
    for name in ("code", "general", "small"):
        assert [check["check"] for check in rows[name]["checks"]] == ["manifest", "files", "target", "weights", "live"]
        assert "the plain text" in rows[name]["checks"][-1]["detail"]
    assert rows["math"]["skipped"]
    code, out, _ = run("verify")
    assert code == 0
    assert "ok    tiny-set/code\n" in out
    assert "skip  other/math\n" in out
    assert out.endswith("3 drafts are as they must be.\n")


def test_verify_says_what_is_wrong(run: Run, trained: Path, target: Path, tmp_path: Path) -> None:
    data = bytearray((trained / "code" / FILE_NAME).read_bytes())
    data[-1] ^= 1
    (trained / "code" / FILE_NAME).write_bytes(data)
    code, out, _ = run("verify")
    assert code == 1
    assert "fail  tiny-set/code\n" in out
    assert "FAILED files: " in out
    assert "sha256" in out
    assert "ok    tiny-set/general\n" in out
    assert out.endswith("1 of 2 drafts failed: code. Copy them again, or make them again.\n")
    assert run("verify", "general", "--offline")[0] == 0
    assert run("verify", "code", "--offline")[0] == 1
    other = write_tiny(tmp_path / "models" / "other", seed=9, **SHAPE)
    code, out, _ = run("verify", "general", "--offline", model=other)  # by name, it is not skipped
    assert code == 1
    assert "FAILED target: draft general was made for another target, tiny" in out


def test_verify_offline_without_the_model(run: Run, trained: Path) -> None:
    code, out, _ = run("verify", "--offline", model=None)
    assert code == 0
    assert "not compared" in out


@pytest.mark.parametrize("fault", ["raises", "silent", "memory"])
def test_verify_notices_a_draft_that_does_not_work(
    run: Run, trained: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Files may be whole and the draft useless all the same."""
    opened = HeadDraft.open

    def broken(self: HeadDraft, states: Any = None) -> Any:
        session = opened(self, states)
        if self.name == "code":
            if fault == "raises":
                raise RuntimeError("surprise")
            monkeypatch.setattr(session, "level", lambda tokens: 0, raising=False)
        return session

    if fault == "memory":
        monkeypatch.setattr(HeadDraft, "slot_bytes", property(lambda self: 1 << 60))
    else:
        monkeypatch.setattr(HeadDraft, "open", broken)
    code, data = as_json_quiet(run, "verify", "code")
    assert code == 1
    last = data["drafts"][0]["checks"][-1]
    assert last["check"] == "live"
    assert {"raises": "surprise", "silent": "nothing was proposed", "memory": "are needed"}[fault] in last["detail"]


def as_json_quiet(run: Run, action: str, *words: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(action, *words, "--json")  # the warning of a failed draft goes to stderr
    return code, json.loads(out)


def test_doctor_and_generate_know_the_set(
    run: Run, trained: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgespec.cli import doctor

    monkeypatch.setattr(doctor, "CHECKS", (doctor._drafts,))
    assert main(["doctor", "--model", str(target)]) == 0
    assert "ok    drafts: 2 for tiny: general, code (" in capsys.readouterr().out
    edit(trained / "code", "bytes = ", "bytes = 9")
    assert main(["doctor", "--model", str(target)]) == 0
    out = capsys.readouterr().out
    assert "1 for tiny: general" in out
    assert "warn  drafts: " in out
    assert main(["doctor"]) == 0
    assert "when smollm2-135m is on this machine" in capsys.readouterr().out
    flags = ["--model", str(target), "--threads", "1", "--weight-format", "float32", "--ignore-eos", "-n", "12"]
    assert main(["generate", "the hen", "--drafts", "general,ngram", "--json", *flags]) == 0
    shares = json.loads(capsys.readouterr().out)["stats"]["draft_share"]
    assert {"general", "ngram"} <= set(shares)
    assert main(["generate", "the hen", "--drafts", "general,,ngram", *flags]) == 2
    assert "wants names with commas between" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["train", "evaluate", "export"])
def test_actions_with_modules_of_their_own_are_imported_when_they_are_meant(
    action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--out")

    def run_it(args: argparse.Namespace) -> int:
        seen.append(args.out)
        return 7

    module = SimpleNamespace(HELP="its help", add_arguments=add_arguments, run=run_it)
    monkeypatch.setitem(sys.modules, f"edgespec.cli.drafts_{action}", module)
    assert main(["drafts", action, "--out", "x"]) == 7
    assert seen == ["x"]
    assert main(["drafts", action, "--ouut", "x"]) == 2
    assert "did you mean --out?" in capsys.readouterr().err


def test_list_imports_no_engine(trained: Path, target: Path) -> None:
    code = (
        "import sys\nfrom edgespec.cli.main import main\nmain(sys.argv[1:])\n"
        "print('IMPORTED', *[name for name in ('torch', 'transformers', 'onnxruntime', 'onnx') if name in sys.modules])"
    )
    words = ["drafts", "list", "--set", str(trained), "--model", str(target)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=180, check=True)
    assert "code" in done.stdout
    assert done.stdout.splitlines()[-1] == "IMPORTED"


def test_the_shipped_sets_hold_no_damage() -> None:
    """Whatever lies in the package: readable, whole, every file listed, and small."""
    sets = zoo.sets()
    entries = [entry for each in sets for entry in each.entries]
    assert [entry.problem for entry in entries if entry.problem] == []
    for entry in entries:
        assert isinstance(entry.manifest, Manifest)
        entry.manifest.verify(entry.folder)
        assert {path.name for path in entry.folder.iterdir()} == {MANIFEST, *entry.manifest.files}
        assert entry.manifest.text() == (entry.folder / MANIFEST).read_text()
    assert sum(entry.manifest.nbytes for entry in entries if entry.manifest) <= 40_000_000
