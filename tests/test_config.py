"""Settings: who wins, what is refused and how it is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec import config
from edgespec.config import RuntimeConfig
from edgespec.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "default_file", lambda: tmp_path / "default.toml")
    for name in [name for name in os.environ if name.startswith("EDGESPEC_")]:
        monkeypatch.delenv(name)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults() -> None:
    settings = RuntimeConfig.load(env={})
    assert settings == RuntimeConfig()
    assert (settings.model, settings.drafts, settings.gamma) == ("smollm2-135m", "auto", "auto")
    assert {row.source for row in settings.describe()} == {"default"}


def test_arguments_win_over_environment_over_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", 'model = "file"\nthreads = 1\ngamma = 1\nmemory_budget = "1GiB"\n')
    env = {"EDGESPEC_THREADS": "2", "EDGESPEC_GAMMA": "2", "EDGESPEC_CONFIG": str(file), "OTHER": "x"}
    settings = RuntimeConfig.load(env=env, gamma=3, device=None)
    assert (settings.model, settings.threads, settings.gamma, settings.device) == ("file", 2, 3, "auto")
    sources = {row.key: (row.value, row.source) for row in settings.describe()}
    assert sources["model"] == ("file", f"file {file}")
    assert sources["threads"] == (2, "environment variable EDGESPEC_THREADS")
    assert sources["gamma"] == (3, "argument gamma")
    assert sources["context"] == (None, "default")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("model", "org/name", "org/name"),
        ("drafts", "ngram, ./my-draft", ("ngram", "./my-draft")),
        ("drafts", "auto", "auto"),
        ("drafts", "off", ()),
        ("gamma", "0", 0),
        ("gamma", "auto", "auto"),
        ("device", "torch-cpu", "torch-cpu"),
        ("weight_format", "float32", "float32"),
        ("threads", "4", 4),
        ("threads", "auto", None),
        ("context", "4096", 4096),
        ("memory_budget", "80%", "80%"),
        ("home", "/data", Path("/data")),
        ("max_sessions", "4", 4),
        ("max_queue", "20", 20),
        ("kv_memory", "1GiB", 1 << 30),
        ("kv_memory", "auto", "auto"),
        ("load_policy", "fixed:3", "fixed:3"),
        ("elastic", "off", False),
    ],
)
def test_every_setting_from_each_place(tmp_path: Path, key: str, text: str, value: object) -> None:
    """The same value from the environment, a file and an argument; no key is parsed and then lost."""
    in_file = text.split(", ") if "," in text else int(text) if text.isdigit() else text
    literal = repr(in_file).replace("'", '"')
    file = write(tmp_path / "b.toml", f"{key} = {literal}\n")
    for settings in (
        RuntimeConfig.load(env={f"EDGESPEC_{key.upper()}": text}),
        RuntimeConfig.load(file, env={}),
        RuntimeConfig.load(env={}, **{key: in_file}),
        RuntimeConfig(**{key: in_file}),
    ):
        assert getattr(settings, key) == value


def test_every_field_has_a_reader() -> None:
    assert {*config._READERS, "sources"} == set(RuntimeConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_buget = 1", "unknown key 'memory_buget' in {file}: did you mean memory_budget?"),
        ("xyz = 1", "unknown key 'xyz' in {file}: known are model, drafts"),
        ("[engine]\nmodel = 'x'", "unknown key 'engine'"),
        ("gamma = true", "gamma = True (file {file}) cannot work: give auto or a whole number from 0 to 64"),
        ("gamma = 65", "gamma = 65"),
        ("gamma = -1", "gamma = -1"),
        ("gamma = 2.0", "gamma = 2.0"),
        ("threads = 0", "threads = 0 (file {file}) cannot work: give auto or a whole number above 0"),
        ("threads = '4'", "threads = '4'"),
        ("context = nan", "context = nan"),
        ("device = 'gpu'", "device = 'gpu' (file {file}) cannot work: give one of auto, cpu, cuda, torch-cpu"),
        ("device = ['cpu']", "device = ['cpu']"),
        (
            "memory_budget = '1 cup'",
            "memory_budget = '1 cup' (file {file}) cannot work: give bytes, or a form such as 1GiB",
        ),
        ("memory_budget = -1", "memory_budget = -1"),
        ("memory_budget = 1.5", "memory_budget = 1.5"),
        ("model = ''", "model = ''"),
        ("model = 1", "model = 1"),
        ("drafts = ['ngram', 'off']", "cannot stand in a list of drafts"),
        ("drafts = [1]", "drafts = [1]"),
        ("home = 3", "home = 3"),
        ("model = ", "{file} is not valid TOML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "c{x}.toml", text)
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.load(file, env={})
    assert message.replace("{file}", str(file)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("EDGESPEC_MODLE", "x", "unknown environment variable EDGESPEC_MODLE: did you mean EDGESPEC_MODEL?"),
        ("EDGESPEC_THREADS", "two", "threads = 'two' (environment variable EDGESPEC_THREADS) cannot work"),
        ("EDGESPEC_GAMMA", "1.5", "gamma = '1.5' (environment variable EDGESPEC_GAMMA)"),
    ],
)
def test_a_bad_variable_is_refused(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.load(env={variable: text})
    assert message in str(caught.value)


def test_a_bad_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'gama': did you mean gamma"):
        RuntimeConfig.load(env={}, gama=3)
    with pytest.raises(ConfigError, match=r"gamma = 99 \(argument gamma\)"):
        RuntimeConfig.load(env={}, gamma=99)
    with pytest.raises(ConfigError, match="gamma = 99"):
        RuntimeConfig(gamma=99)
    with pytest.raises(ConfigError, match="gamma = 99"):
        RuntimeConfig().replace(gamma=99)


def test_a_bad_value_that_is_overridden_is_still_refused() -> None:
    with pytest.raises(ConfigError, match="EDGESPEC_GAMMA"):
        RuntimeConfig.load(env={"EDGESPEC_GAMMA": "many"}, gamma=2)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert RuntimeConfig.load(env={}) == RuntimeConfig()  # the default place may be empty
    with pytest.raises(ConfigError, match=r"none\.toml is not there"):
        RuntimeConfig.load(tmp_path / "none.toml", env={})
    with pytest.raises(ConfigError, match=r"none\.toml is not there"):
        RuntimeConfig.load(env={"EDGESPEC_CONFIG": str(tmp_path / "none.toml")})
    with pytest.raises(ConfigError, match="cannot be read"):
        RuntimeConfig.load(tmp_path, env={})
    (tmp_path / "latin.toml").write_bytes(b"model = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        RuntimeConfig.load(tmp_path / "latin.toml", env={})
    write(tmp_path / "default.toml", "gamma = 5")
    assert RuntimeConfig.load(env={}).gamma == 5


def test_replace_keeps_the_rest_and_names_its_source() -> None:
    settings = RuntimeConfig.load(env={"EDGESPEC_GAMMA": "2"}).replace(threads=3)
    assert (settings.gamma, settings.threads) == (2, 3)
    sources = {row.key: row.source for row in settings.describe()}
    assert (sources["gamma"], sources["threads"]) == ("environment variable EDGESPEC_GAMMA", "argument threads")
