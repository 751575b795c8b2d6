"""Exit codes, sentences instead of tracebacks, and what `edgespec --help` may import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from edgespec import __version__
from edgespec.cli.main import main
from edgespec.errors import ModelError
from tests.cli.fakes import FakeEngine, Script

HEAVY = (
    "numpy",
    "torch",
    "transformers",
    "onnxruntime",
    "onnx",
    "rich",
    "prompt_toolkit",
    "huggingface_hub",
    "tokenizers",
)


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["chat", "--help"], ["doctor", "-h"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("usage: edgespec")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"edgespec {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generat"], "unknown command 'generat'; did you mean generate?"),
        (["zzz"], "known are generate, chat"),
        (["generate", "hi", "--temprature", "1"], "unknown flag '--temprature'; did you mean --temperature?"),
        (["generate", "hi", "--temp", "1"], "unknown flag '--temp'"),  # no guessing from abbreviations
        (["generate", "hi", "there"], "unknown extra argument 'there'"),
        (["generate", "hi", "--max-new-tokens", "many"], "wants a whole number, not 'many'"),
        (["generate", "hi", "--gamma", "-1"], "wants auto or a whole number from 0 up"),
        (["generate", "hi", "--logit-bias", "5"], "wants TOKEN_ID=VALUE"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--temperature", "nan"], "temperature"),
        (["generate", "hi", "--max-new-tokens", "-1"], "max_new_tokens"),
        (["generate", "hi", "--device", "gpu"], "device = 'gpu'"),
        (["generate", "hi", "--weight-format", "int2"], "weight_format = 'int2'"),
        (["generate", "hi", "--threads", "0"], "threads = 0"),
        (["generate", "hi", "--memory-budget", "lots"], "memory_budget = 'lots'"),
        (["generate", "hi", "--config", "/no/such.toml"], "/no/such.toml"),
        (["generate", "hi", "--draft", "off", "--draft", "ngram"], "--draft off cannot be combined"),
        (["generate", "hi", "--trace", "/no/such/folder/t.json"], "/no/such/folder/t.json"),
        (["generate"], "No prompt was given"),
        (["generate", ""], "The prompt is empty"),
        (["generate", " \n"], "The prompt is empty"),
        (["generate", "hi", "--prompt", "ho"], "Both PROMPT and --prompt"),
        (["generate", "hi", "--prompt-file", "x"], "Both a prompt and --prompt-file"),
        (["generate", "--prompt-file", "/no/such.txt"], "'/no/such.txt' cannot be read"),
        (["generate", "hi", "--json", "--stream"], "cannot be combined with --stream"),
        (["generate", "hi", "--raw", "--system", "x"], "cannot be combined with --raw"),
    ],
)
def test_wrong_input_is_a_sentence_and_exit_code_2(
    engine: type[FakeEngine], argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1
    assert not engine.loads  # refused before a model is touched


def test_unknown_environment_variable_is_refused(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_GAMA", "4")
    assert main(["generate", "hi"]) == 2
    assert "EDGESPEC_GAMMA" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ModelError("The file x.gguf is cut short."), 2, "error: The file x.gguf is cut short.\n"),
        (RuntimeError("two\nlines"), 1, "error: RuntimeError: two lines (run with --debug to see where)\n"),
        (MemoryError(), 1, "out of memory"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_errors_end_in_a_code_and_at_most_one_line(
    engine: type[FakeEngine], error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for script in (Script(load_error=error), Script(pieces=["text", error])):
        engine.reset(script)
        assert main(["generate", "hi"]) == code
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == (1 if words else 0)
        assert engine.closed == (script.load_error is None)


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_debug_shows_the_traceback(
    engine: type[FakeEngine], how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.reset(Script(load_error=ModelError("The file is cut short.")))
    if how == "variable":
        monkeypatch.setenv("EDGESPEC_DEBUG", "1")
    assert main(["generate", "hi", *(["--debug"] if how == "flag" else [])]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: The file is cut short.\n")


def test_bench_is_only_imported_when_it_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    seen = []

    def add_parser(subparsers: object) -> None:
        subparsers.add_parser("bench").add_argument("--rounds", type=int)  # type: ignore[attr-defined]

    def run(args: object) -> int:
        seen.append(args.rounds)  # type: ignore[attr-defined]
        return 5

    monkeypatch.setitem(sys.modules, "edgespec.bench.cli", SimpleNamespace(add_parser=add_parser, run=run))
    assert main(["bench", "--rounds", "3"]) == 5
    assert seen == [3]
    assert main(["--help"]) == 0


def imported_by(argv: list[str]) -> set[str]:
    """Which of the heavy packages a command line imports, in a process of its own."""
    code = (
        "import sys\nfrom edgespec.cli.main import main\nmain(sys.argv[1:])\n"
        f"print('IMPORTED', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=180, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["generate", "hi", "--temperature", "-1"]])
def test_help_and_wrong_input_import_nothing_heavy(argv: list[str]) -> None:
    assert imported_by(argv) == set()


@pytest.mark.parametrize("module", ["edgespec.cli.main", "edgespec.cli.chat", "edgespec.engine"])
def test_ctrl_c_while_modules_are_imported_ends_quietly(module: str) -> None:
    """Importing takes seconds on a small board, and that is when one notices a misspelt prompt."""
    code = (
        "import runpy, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "sys.argv = ['edgespec', 'generate', 'hi']\n"
        "runpy.run_module('edgespec', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_console_script_is_the_module() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '\nedgespec = "edgespec.__main__:main"\n' in project
