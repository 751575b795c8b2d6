"""The command line on the real engine and a tiny model: what only shows when all parts are together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.main import main
from edgespec.cli.terminal import neutralise
from tests.cli.pseudo_terminal import PseudoTerminal, python
from tests.support.tiny import write_tiny

PROMPT = "the in the in the in"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=7, head_dim=16, max_position_embeddings=8192))


def ask(capsys: pytest.CaptureFixture[str], model: str, *flags: str) -> dict[str, Any]:
    argv = ["generate", PROMPT, "-m", model, "--weight-format", "float32", "-n", "40", "--ignore-eos", "--json", *flags]
    assert main(argv) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_drafts_and_gamma_do_not_change_the_answer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ask(capsys, model, "--draft", "off")
    assert plain["stats"]["proposed_tokens"] == 0
    assert len(plain["token_ids"]) == 40
    for flags in (["--gamma", "1"], ["--gamma", "8"], []):
        drafted = ask(capsys, model, "--draft", "ngram", *flags)
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["text"] == plain["text"]
    assert ask(capsys, model, "--draft", "ngram", "--gamma", "4")["stats"]["accepted_tokens"] > 0


def test_flags_reach_the_answer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = ask(capsys, model)
    first = plain["token_ids"][0]
    assert first not in ask(capsys, model, "--logit-bias", f"{first}=-1000")["token_ids"]
    stopped = ask(capsys, model, "--stop-token-id", str(plain["token_ids"][3]))
    assert stopped["finish_reason"] == "stop"
    assert len(stopped["token_ids"]) <= 4
    sampled = [ask(capsys, model, "--temperature", "1", "--seed", seed)["token_ids"] for seed in ("1", "1", "2")]
    assert sampled[0] == sampled[1] != sampled[2]
    assert len(ask(capsys, model, "--logprobs", "2")["logprobs"][0]["top"]) == 2


def test_the_trace_holds_the_rounds(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    ask(capsys, model, "--trace", str(file))
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    assert "prefill" in names
    assert len(names) > 10


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-m", "/no/such/model"], "/no/such/model"),
        (["--logit-bias", "99999=1"], "99999"),
        (["--context", "10"], "context"),
        (["--memory-budget", "1MB"], "memory budget"),
    ],
)
def test_wrong_input_is_a_sentence(
    model: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", PROMPT * 20, "-m", model, *flags]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("data", [b"", b"<html>", b"version https://git-lfs.github.com/spec/v1\n", b"\x00" * 500])
def test_damaged_weights_are_a_sentence(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(data)
    assert main(["generate", "hi", "-m", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "model.safetensors" in err
    assert err.count("\n") == 1


def test_a_draft_that_cannot_be_used_is_one_warning(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny(tmp_path / "other", tokenizer_size=270, head_dim=16)
    tokens = json.loads((other / "tokenizer.json").read_text())
    tokens["model"]["vocab"]["w268"], tokens["model"]["vocab"]["w269"] = 269, 268
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    argv = ["generate", PROMPT, "-m", model, "-n", "5", "--draft", str(other), "--draft", "ngram"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err.count("warning: ") == 1
    assert "other" in captured.err
    assert captured.out


def test_generate_on_cpu_never_imports_torch(model: str) -> None:
    code = (
        "import sys\nfrom edgespec.cli.main import main\ncode = main(sys.argv[1:])\n"
        "print('IMPORTED', code, *[name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    argv = ["generate", PROMPT, "-m", model, "-n", "5", "--no-stream"]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.splitlines()[-1] == "IMPORTED 0"


# B155, on the real engine: what was shown of a stopped answer is what the chat keeps
def test_ctrl_c_in_a_real_chat(model: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    flags = ["-m", model, "--weight-format", "float32", "--ignore-eos", "--gamma", "0"]
    length = ["-n", "8000", "--context", "8192"]  # seconds, even for a tiny model
    with PseudoTerminal(python("edgespec", "chat", *flags, *length), {"NO_COLOR": "1"}) as screen:
        screen.wait_for(">")
        screen.type("go on\r")
        screen.wait_for("w")  # something of the answer
        screen.type("\x03")
        screen.wait_for("stopped by you")
        screen.wait_for(">")
        screen.type(f"/save {saved}\r")
        screen.wait_for("Saved 2 messages")
        screen.type("/exit\r")
        assert screen.exit_code() == 0
    answer = json.loads(saved.read_text())["messages"][1]["content"]
    assert answer
    shown = _without_echo(screen.raw.decode("utf-8", "replace"))
    before, _, after = shown.partition(_without_echo(neutralise(answer)).removesuffix("\n"))
    assert before.endswith("\x1b[?2004l")  # the prompt gave the screen back
    assert after.startswith("\ndraft plain")  # and nothing more was shown


def _without_echo(text: str) -> str:
    """`text` without the terminal's own line ends and its echo of Ctrl-C."""
    return text.replace("\r\n", "\n").replace("^C", "").replace("\\x0d", "")
