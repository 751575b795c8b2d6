"""The settings of a run: defaults, a TOML file, EDGESPEC_* variables and arguments, the later ones winning.

Strict: a key that is not known or a value that cannot work is refused, naming key, value and where it was given.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import platformdirs

from edgespec.catalog import DEFAULT_MODEL
from edgespec.errors import ConfigError
from edgespec.memory.budget import parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Device = Literal["auto", "cpu", "cuda", "torch-cpu"]
WeightFormat = Literal["exact", "int8", "float32"]
MAX_GAMMA = 64
DEFAULT_POLICY = "edgespec"

# Variables of the same prefix that are not settings of a run.
OTHER_VARIABLES = ("EDGESPEC_API_KEY", "EDGESPEC_CONFIG", "EDGESPEC_DEBUG")


class Setting(NamedTuple):
    """One row of what is in force: the key, its value, and where the value came from."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class RuntimeConfig:
    """What an engine is built from.

    drafts: "auto", or the names and paths of drafts; () is plain decoding. gamma: proposed tokens per round, 0 to 64.
    device: "auto" is the GPU's engine where torch finds a GPU that works, else the CPU's.
    threads, context: None leaves the choice to the engine. memory_budget: bytes, "1GiB", "80%" or "auto".
    resident: drafts with weights that are held at once, None = as many as fit. policy: what decides about draft, gamma
    and working set, see docs/policies.md. load_rate: bytes per second at which drafts are read, None = no limit.
    policy_memory: folder where what policies learned is kept, None for one in `home`.
    home: folder for models and prepared files, None for the platform's cache folder.
    For several requests at once: max_sessions of them run, 1 to 16, and max_queue wait. kv_memory: bytes for their keys
    and values, "auto" = what the plan leaves. load_policy: what decides how many tokens each drafts, see
    docs/serving.md. elastic: whether the drafts' memory may become keys and values while drafts do not pay.
    Each value is checked when the object is made; ConfigError names what is wrong.
    """

    model: str = DEFAULT_MODEL
    drafts: Literal["auto"] | tuple[str, ...] = "auto"
    gamma: Literal["auto"] | int = "auto"
    device: Device = "auto"
    weight_format: WeightFormat = "exact"
    threads: int | None = None
    context: int | None = None
    memory_budget: str | int = "auto"
    resident: int | None = None
    policy: str = DEFAULT_POLICY
    load_rate: int | None = None
    policy_memory: Path | None = None
    home: Path | None = None
    max_sessions: int = 8
    max_queue: int = 256
    kv_memory: Literal["auto"] | int = "auto"
    load_policy: str = DEFAULT_POLICY
    elastic: bool = True
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for key, read in _READERS.items():
            object.__setattr__(self, key, _checked(key, getattr(self, key), read, self.sources.get(key, "arguments")))

    @classmethod
    def load(
        cls, file: str | os.PathLike[str] | None = None, env: Mapping[str, str] | None = None, **arguments: Any
    ) -> RuntimeConfig:
        """Arguments over environment over file over defaults. An argument that is None was not given.

        file: a TOML file; without it the one EDGESPEC_CONFIG names, else edgespec/config.toml in the platform's
        configuration folder if that exists. env: the environment, os.environ by default. Raises ConfigError.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for source, layer in (_file_layer(file, env), _environment_layer(env), _argument_layer(arguments)):
            for key, value in layer.items():
                origin = source.format(name=_VARIABLES[key], flag=_flag(key))
                values[key] = _checked(key, value, _READERS[key], origin)
                sources[key] = origin
        return cls(**values, sources=sources)

    def replace(self, **changes: Any) -> RuntimeConfig:
        """A copy with other values, as from arguments."""
        source, layer = _argument_layer(changes)
        sources = {**self.sources, **{key: source.format(flag=_flag(key)) for key in layer}}
        return dataclasses.replace(self, **layer, sources=sources)

    def describe(self) -> list[Setting]:
        """Each setting with its value and where it came from, for `doctor` and logs."""
        return [Setting(key, getattr(self, key), self.sources.get(key, "default")) for key in _READERS]


def default_file() -> Path:
    """Where the configuration file is looked for when none is named."""
    return platformdirs.user_config_path("edgespec", appauthor=False) / "config.toml"


def nearest(name: str, known: list[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def _file_layer(file: str | os.PathLike[str] | None, env: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    named = file or env.get("EDGESPEC_CONFIG")
    path = Path(named).expanduser() if named else default_file()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if not named:
            return "", {}
        raise ConfigError(f"the configuration file {path} is not there: check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the configuration file {path} cannot be read: {reason}") from error
    try:
        layer = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}") from error
    for key in layer:
        if key not in _READERS:
            raise ConfigError(f"unknown key {key!r} in {path}: {nearest(key, list(_READERS))}")
    return _brace_free(path), layer


def _environment_layer(env: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    keys = {variable: key for key, variable in _VARIABLES.items()}
    layer: dict[str, Any] = {}
    for variable, text in env.items():
        if not variable.startswith("EDGESPEC_") or variable in OTHER_VARIABLES:
            continue
        if variable not in keys:
            raise ConfigError(
                f"unknown environment variable {variable}: {nearest(variable, [*keys, *OTHER_VARIABLES])}"
            )
        if text.strip():  # set but empty is not set
            layer[keys[variable]] = _from_text(keys[variable], text.strip())
    return "environment variable {name}", layer


def _argument_layer(arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    for key in arguments:
        if key not in _READERS:
            raise ConfigError(f"unknown setting {key!r}: {nearest(key, list(_READERS))}")
    return "argument {flag}", {key: value for key, value in arguments.items() if value is not None}


def _from_text(key: str, text: str) -> Any:
    """A variable's text as the value a TOML file would hold; what cannot be one stays text and is refused later."""
    if key == "drafts":
        return [part.strip() for part in text.split(",") if part.strip()] if text not in _DRAFT_WORDS else text
    if key in _NUMBERS and text.lstrip("-").isdigit():
        return int(text)
    return text


def _checked(key: str, value: Any, read: Callable[[Any], Any], source: str) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ConfigError(f"{key} = {value!r} ({source}) cannot work: {error}") from error


_DRAFT_WORDS = ("auto", "off")
_NUMBERS = ("gamma", "threads", "context", "resident", "max_sessions", "max_queue")
_SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
MAX_SESSIONS = 16


def _read_model(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not str(value).strip():
        raise ValueError("give a catalogue name, a folder, a .gguf file or a hub id")
    return str(value)


def _read_drafts(value: Any) -> Literal["auto"] | tuple[str, ...]:
    """ "off" is (); one name alone is a list of one. In a list, "auto" stands for all that fit the target."""
    if value in ("auto", ["auto"], ("auto",)):
        return "auto"
    names = [] if value == "off" else [value] if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, (str, os.PathLike)) for name in names):
        raise ValueError("give auto, off, or a list of draft names and paths")
    texts = tuple(str(name) for name in names)
    if any(not text.strip() or text == "off" for text in texts):
        raise ValueError("off and empty names cannot stand in a list of drafts")
    return texts


def _read_gamma(value: Any) -> Literal["auto"] | int:
    if value == "auto":
        return "auto"
    return _whole_number(value, 0, MAX_GAMMA, f"give auto or a whole number from 0 to {MAX_GAMMA}")


def _read_count(value: Any) -> int | None:
    if value is None or value == "auto":
        return None
    return _whole_number(value, 1, 1 << 31, "give auto or a whole number above 0")


def _read_resident(value: Any) -> int | None:
    if value is None or value == "auto":
        return None
    return _whole_number(value, 0, 1 << 16, "give auto or a whole number, 0 and up")


def _read_policy(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("give the name of a policy, such as edgespec")
    return value.strip()


LEAST_LOAD_RATE = 64 << 10  # bytes per second: a mistyped "200" would keep a start waiting for hours


def _read_rate(value: Any) -> int | None:
    if value is None or value == "auto":
        return None
    advice = "give bytes per second, or a form such as 200MB or 1GiB"
    try:
        rate = parse_bytes(value, None)
    except ConfigError as error:
        raise ValueError(advice) from error
    if rate < LEAST_LOAD_RATE:
        raise ValueError(f"{rate} bytes a second are slower than any storage; {advice}")
    return rate


def _read_sessions(value: Any) -> int:
    return _whole_number(value, 1, MAX_SESSIONS, f"give a whole number from 1 to {MAX_SESSIONS}")


def _read_queue(value: Any) -> int:
    return _whole_number(value, 1, 1 << 20, "give a whole number above 0")


def _read_kv(value: Any) -> Literal["auto"] | int:
    if value == "auto":
        return "auto"
    try:
        return parse_bytes(value, None)
    except ConfigError as error:
        raise ValueError("give bytes, or a form such as 500MB, 1GiB or auto") from error


def _read_switch(value: Any) -> bool:
    value = _SWITCH.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise ValueError("give true or false")
    return value


def _whole_number(value: Any, least: int, most: int, advice: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(advice)
    return value


def _read_choice(choices: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"give one of {', '.join(choices)}")
        return str(value)

    return read


def _read_budget(value: Any) -> str | int:
    if value == "auto":
        return "auto"
    try:
        parse_bytes(value, 1 << 60)
    except ConfigError as error:
        raise ValueError("give bytes, or a form such as 1GiB, 800MB, 80% or auto") from error
    return str(value) if isinstance(value, str) else int(value)


def _read_folder(value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not str(value).strip():
        raise ValueError("give the path of a folder")
    return Path(value).expanduser()


def _brace_free(path: Path) -> str:
    return f"file {path}".replace("{", "{{").replace("}", "}}")


def _flag(key: str) -> str:
    return key.replace("_", "-")


_READERS: dict[str, Callable[[Any], Any]] = {
    "model": _read_model,
    "drafts": _read_drafts,
    "gamma": _read_gamma,
    "device": _read_choice(get_args(Device)),
    "weight_format": _read_choice(get_args(WeightFormat)),
    "threads": _read_count,
    "context": _read_count,
    "memory_budget": _read_budget,
    "resident": _read_resident,
    "policy": _read_policy,
    "load_rate": _read_rate,
    "policy_memory": _read_folder,
    "home": _read_folder,
    "max_sessions": _read_sessions,
    "max_queue": _read_queue,
    "kv_memory": _read_kv,
    "load_policy": _read_policy,
    "elastic": _read_switch,
}
_VARIABLES = {key: f"EDGESPEC_{key.upper()}" for key in _READERS}
