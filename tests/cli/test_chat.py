"""The chat on a scripted engine: its commands, its failures, Ctrl-C, and what it does with pipes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import chat, commands, lineinput
from edgespec.cli.main import main
from edgespec.cli.terminal import Output
from edgespec.errors import ModelError, PromptError
from tests.cli.fakes import FakeEngine, Script

Talk = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def talk(engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """talk(*lines, flags=[...]): a chat where a person types `lines`; returns (exit code, answers, everything else).

    A line may be an exception that the reader raises, or a function that is called in its place.
    """

    def run(*lines: Any, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
        waiting = list(lines)

        class Reader:
            def read(self) -> str:
                while waiting and callable(waiting[0]) and not isinstance(waiting[0], type):
                    waiting.pop(0)()
                line = waiting.pop(0) if waiting else EOFError
                if isinstance(line, str):
                    return line
                raise line

        monkeypatch.setattr(chat, "is_terminal", lambda stream: True)
        monkeypatch.setattr(lineinput, "make_reader", lambda complete, history: Reader())
        code = main(["chat", *flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def contents(request: dict[str, Any]) -> list[str]:
    return [message["content"] for message in request["prompt"]]


def test_turns_see_the_earlier_ones(engine: type[FakeEngine], talk: Talk) -> None:
    code, out, err = talk("hi", "   ", "", "more")
    assert code == 0
    assert out == "Hello there.\nHello there.\n"
    assert [contents(request) for request in engine.requests] == [["hi"], ["hi", "Hello there.", "more"]]
    assert "smollm2-135m" in err
    assert "drafts: ngram" in err
    assert engine.closed == 1


@pytest.mark.parametrize("command", ["/exit", "/quit", "/EXIT  "])
def test_leaving(engine: type[FakeEngine], talk: Talk, command: str) -> None:
    assert talk(command, "never asked")[:2] == (0, "")
    assert not engine.requests


# B155
def test_ctrl_c_twice_at_the_prompt_leaves(engine: type[FakeEngine], talk: Talk) -> None:
    code, _, err = talk(KeyboardInterrupt, "hi", KeyboardInterrupt, KeyboardInterrupt, "never asked")
    assert code == 130
    assert len(engine.requests) == 1
    assert "Ctrl-C again leaves" in err


# B155
def test_ctrl_c_stops_an_answer_and_keeps_what_was_shown(engine: type[FakeEngine], talk: Talk) -> None:
    def press() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "two "

    engine.reset(Script(pieces=["one ", press, "three"]))
    code, out, _ = talk("hi", lambda: setattr(engine, "script", Script()), "more")
    assert code == 0
    assert out == "one two \nHello there.\n"
    assert contents(engine.requests[1]) == ["hi", "one two ", "more"]


def test_an_answer_stopped_before_its_first_word_leaves_no_turn(engine: type[FakeEngine], talk: Talk) -> None:
    def press() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    engine.reset(Script(pieces=[press, "never"]))
    talk("hi", lambda: setattr(engine, "script", Script()), "more")
    assert contents(engine.requests[1]) == ["more"]


def test_a_second_ctrl_c_drops_the_turn_and_a_third_leaves(engine: type[FakeEngine], talk: Talk) -> None:
    def press_twice() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return "never"

    engine.reset(Script(pieces=["one ", press_twice]))
    code, out, err = talk("hi", KeyboardInterrupt)
    assert (code, out) == (130, "one \n")
    assert "this turn is dropped" in err
    engine.reset(Script(pieces=["one ", press_twice]))
    talk("hi", lambda: setattr(engine, "script", Script()), "more")
    assert contents(engine.requests[1]) == ["more"]


@pytest.mark.parametrize(
    "error", [PromptError("The context is full."), RuntimeError("broken"), OSError(5, "disk gone")]
)
def test_a_failed_turn_leaves_no_trace_and_the_chat_goes_on(
    engine: type[FakeEngine], talk: Talk, error: Exception
) -> None:
    engine.reset(Script(pieces=["one ", error]))
    code, out, err = talk("hi", lambda: setattr(engine, "script", Script()), "more")
    assert code == 0
    assert out == "one \nHello there.\n"
    assert str(error) in err
    assert "Traceback" not in err
    assert contents(engine.requests[1]) == ["more"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/hepl", "did you mean /help?"),
        ("/zzzzz", "/help lists the commands"),
        ("/", "There is no command /"),
        ("/usr/bin/env what is it", "two slashes"),
        ("/clear everything", "/clear takes no argument"),
        ("/regen", "Nothing has been asked yet"),
        ("/undo", "Nothing has been asked yet"),
        ("/stats", "no statistics before the first answer"),
        ("/set temperature", "/set wants NAME=VALUE"),
        ("/set temprature=1", "did you mean temperature?"),
        ("/set temperature=hot", "temperature wants a number, not 'hot'"),
        ("/set temperature=-1", "temperature is -1"),
        ("/set temperature=nan", "temperature is nan"),
        ("/set max_new_tokens=1.5", "max_new_tokens wants a whole number"),
        ("/set ignore_eos=maybe", "ignore_eos wants true or false"),
        ("/set logit_bias=5", "logit_bias wants TOKEN_ID=VALUE"),
        ("/set stop=[1,", "stop wants one value or a JSON list"),
        ("/set gamma=-1", "gamma wants auto or a whole number"),
        ("/set gamma=1000", "gamma = 1000"),
        ("/draft code", "There is no draft 'code'"),
        ("/save", "/save wants a file name"),
        ("/load /no/such.json", "/no/such.json"),
        ("/read /no/such.txt", "'/no/such.txt' cannot be read"),
    ],
)
def test_wrong_commands_say_so_and_never_end_the_chat(
    engine: type[FakeEngine], talk: Talk, line: str, words: str
) -> None:
    code, out, err = talk(line, "hi")
    assert (code, out) == (0, "Hello there.\n")
    assert words in err
    assert "error: " in err
    assert contents(engine.requests[0]) == ["hi"]


def test_two_slashes_send_a_message(engine: type[FakeEngine], talk: Talk) -> None:
    talk("//exit is a command")
    assert contents(engine.requests[0]) == ["/exit is a command"]


def test_help_names_every_command(talk: Talk) -> None:
    err = talk("/help")[2]
    for name in [*commands.COMMANDS, "quit", "reset"]:
        assert f"/{name}" in err
    assert "Ctrl-C stops an answer; what was shown so far stays in the chat" in err


@pytest.mark.parametrize("command", ["/clear", "/reset"])
def test_clear_forgets_turns_and_files_but_not_the_system_message(
    engine: type[FakeEngine], talk: Talk, command: str, tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("secret")
    talk("hi", f"/read {tmp_path / 'note.txt'}", command, "more", flags=("--system", "be terse"))
    assert contents(engine.requests[1]) == ["be terse", "more"]


def test_undo_drops_the_last_turn(engine: type[FakeEngine], talk: Talk) -> None:
    err = talk("hi", "more", "/undo", "other")[2]
    assert contents(engine.requests[2]) == ["hi", "Hello there.", "other"]
    assert "more" in err


def test_regen_asks_the_last_question_again(engine: type[FakeEngine], talk: Talk) -> None:
    err = talk("hi", "more", "/regen", "/set temperature=0.8", "/regen", "/set seed=1", "/regen")[2]
    assert [contents(request) for request in engine.requests[1:]] == [["hi", "Hello there.", "more"]] * 4
    assert err.count("Temperature is 0") == 1
    assert err.count("The seed is fixed") == 1


def test_a_failed_regen_keeps_the_old_answer(engine: type[FakeEngine], talk: Talk) -> None:
    talk("hi", lambda: setattr(engine, "script", Script(pieces=["new", RuntimeError("broken")])), "/regen", "more")
    assert contents(engine.requests[-1]) == ["hi", "Hello there.", "more"]


def test_system_message_is_shown_set_and_removed(engine: type[FakeEngine], talk: Talk) -> None:
    err = talk("/system", "/system be kind", "hi", "/system", "/system off", "more")[2]
    assert "There is no system message." in err
    assert "System message: be kind" in err
    assert contents(engine.requests[0]) == ["be kind", "hi"]
    assert contents(engine.requests[1]) == ["hi", "Hello there.", "more"]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature=0.5", "temperature", 0.5),
        ("/set top-p = 0.9", "top_p", 0.9),
        ("/set max_new_tokens=12", "max_new_tokens", 12),
        ("/set stop=END", "stop", ("END",)),
        ('/set stop=["a", "b=c"]', "stop", ("a", "b=c")),
        ("/set stop_token_ids=[5, 7]", "stop_token_ids", (5, 7)),
        ("/set logit_bias=5=-3", "logit_bias", {5: -3.0}),
        ('/set logit_bias={"5": -3, "6": 1}', "logit_bias", {5: -3.0, 6: 1.0}),
        ("/set ignore_eos=true", "ignore_eos", True),
        ("/set seed=3", "seed", 3),
        ("/set logprobs=2", "logprobs", 2),
    ],
)
def test_set_changes_the_next_answers(engine: type[FakeEngine], talk: Talk, line: str, name: str, value: Any) -> None:
    talk("before", line, "/set", "after", f"/set {name}=default", "reset")
    values = [getattr(request["params"], name) for request in engine.requests]
    assert values[1] == value
    assert values[0] != value
    assert values[2] == values[0]


def test_set_gamma(engine: type[FakeEngine], talk: Talk) -> None:
    talk("a", "/set gamma=3", "b", "/set gamma=auto", "c")
    assert [request["gamma"] for request in engine.requests] == ["auto", 3, "auto"]


def test_draft_shows_and_chooses(engine: type[FakeEngine], talk: Talk) -> None:
    engine.reset(Script(drafts={"ngram": "active", "code": "failed: it is cut short"}))
    err = talk("/draft", "/draft off", "a", "/draft ngram", "b", "/draft auto", "c")[2]
    assert re.search(r"^code +ngram +- +- +failed: it is cut short$", err, re.MULTILINE)
    assert "code (failed)" in err
    assert [request["draft"] for request in engine.requests] == ["off", "ngram", "auto"]


def test_stats_are_of_the_last_answer_and_of_all(engine: type[FakeEngine], talk: Talk) -> None:
    err = talk("a", "b", "/stats")[2]
    assert "all answers: 2, 6 tokens, 10.0 tokens/s, accepted 75%" in err
    assert "6 of 8 proposed (75%)" in err


def test_save_and_load(engine: type[FakeEngine], talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "my chat.json"
    talk("/system be kind", "/set top_k=5", "hi", f"/save {file}")
    assert json.loads(file.read_text())["messages"][0] == {"role": "user", "content": "hi"}
    engine.reset()
    talk("other", f'/load "{file}"', "more", flags=("--temperature", "1"))
    assert contents(engine.requests[1]) == ["be kind", "hi", "Hello there.", "more"]
    assert engine.requests[1]["params"].top_k == 5
    assert engine.requests[1]["params"].temperature == 0  # the saved settings, not a mixture


def test_a_bad_file_leaves_the_chat_unchanged(engine: type[FakeEngine], talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    talk("hi", f"/save {file}")
    data = json.loads(file.read_text())
    data["params"] = {"temperature": -1}
    file.write_text(json.dumps(data))
    engine.reset()
    err = talk("other", f"/load {file}", "more", flags=("--top-k", "3"))[2]
    assert "temperature" in err
    assert contents(engine.requests[1]) == ["other", "Hello there.", "more"]
    assert engine.requests[1]["params"].top_k == 3


def test_read_puts_files_before_the_next_message_only(engine: type[FakeEngine], talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"x = 1\r\n")
    (tmp_path / "b.txt").write_text("two\n")
    talk(f"/read {tmp_path / 'a.py'}", f"/read {tmp_path / 'b.txt'}", "explain", "more")
    assert contents(engine.requests[0]) == ["a.py:\nx = 1\n\nb.txt:\ntwo\n\nexplain"]
    assert contents(engine.requests[1])[-1] == "more"


def test_files_stay_attached_when_the_turn_fails(engine: type[FakeEngine], talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("long")
    engine.reset(Script(pieces=[ModelError("it broke")]))
    talk(f"/read {tmp_path / 'a.txt'}", "sum up", lambda: setattr(engine, "script", Script()), "again")
    assert contents(engine.requests[1]) == ["a.txt:\nlong\n\nagain"]


def test_a_file_that_is_too_long_does_not_jam_the_chat(engine: type[FakeEngine], talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("long")
    engine.reset(Script(pieces=[PromptError("The prompt is too long.")]))
    err = talk(f"/read {tmp_path / 'a.txt'}", "sum up", lambda: setattr(engine, "script", Script()), "again")[2]
    assert "too long. What /read had attached was dropped." in err
    assert contents(engine.requests[1]) == ["again"]


@pytest.mark.parametrize(
    ("data", "words"), [(b"a\x00b", "NUL"), (b"\xff", "UTF-8"), (b"", "is empty"), (b"x" * (1 << 21), "larger")]
)
def test_read_refuses_what_is_no_text(talk: Talk, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    err = talk(f"/read {tmp_path / 'file'}")[2]
    assert words in err


def test_completion(engine: type[FakeEngine], tmp_path: Path) -> None:
    from edgespec.config import RuntimeConfig
    from edgespec.decoding.params import SamplingParams

    model = engine(RuntimeConfig())
    state = chat.Chat(model, SamplingParams(), system=None, answers=Output(None), notes=Output(None))  # type: ignore[arg-type]
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "nested").mkdir()
    assert commands.complete(state, "/re") == (3, ["/regen", "/read"])
    assert commands.complete(state, "/draft ") == (0, ["ngram", "auto", "off"])
    assert commands.complete(state, "/set temp") == (4, ["temperature="])
    length, files = commands.complete(state, f"/read {tmp_path}/n")
    assert length == len(f"{tmp_path}/n")
    assert files == [f"{tmp_path}/nested/", f"{tmp_path}/notes.txt"]
    assert commands.complete(state, "hello /re") == (0, [])
    assert commands.complete(state, "/undo x") == (0, [])


def piped(engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, data: bytes, *flags: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    return main(["chat", *flags])


# B025
@pytest.mark.parametrize("data", [b"hi", b"hi\n", b"\n\nhi\r\n\n"])
def test_a_pipe_is_one_question(
    engine: type[FakeEngine], data: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(engine, monkeypatch, data) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("Hello there.\n", "")
    assert [contents(request) for request in engine.requests] == [["hi"]]


def test_a_pipe_is_not_read_for_commands(engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped(engine, monkeypatch, b"/exit\nsecond line\n", "--system", "s") == 0
    assert contents(engine.requests[0]) == ["s", "/exit\nsecond line"]


# B025
@pytest.mark.parametrize("data", [b"", b"\n", b" \t\r\n\n"])
def test_blank_input_loads_no_model(engine: type[FakeEngine], data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert piped(engine, monkeypatch, data) == 0
    assert not engine.loads


def test_stats_of_a_piped_question_go_to_stderr(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(engine, monkeypatch, b"hi", "--stats") == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello there.\n"
    assert "accepted 75%" in captured.err


def test_errors_of_a_piped_question_set_the_exit_code(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.reset(Script(pieces=[PromptError("The prompt is too long.")]))
    assert piped(engine, monkeypatch, b"hi") == 2
    assert capsys.readouterr().err == "error: The prompt is too long.\n"
