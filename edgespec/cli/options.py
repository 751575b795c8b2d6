"""Flags that several commands share, and the one table of sampling settings behind flags, /set and saved chats."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgespec.cli.terminal import replace_surrogates
from edgespec.errors import ConfigError, ParameterError

if TYPE_CHECKING:
    from edgespec.decoding.params import SamplingParams


def _number(kind: Callable[[str], Any], word: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise ParameterError(f"wants {word}, not '{text}'") from None

    return parse


_integer = _number(int, "a whole number")
_real = _number(float, "a number")


def _switch(text: str) -> bool:
    values = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
    if text.lower() not in values:
        raise ParameterError(f"wants true or false, not '{text}'")
    return values[text.lower()]


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"wants names with commas between, such as code,ngram, not '{text}'")
    return names


def _bias(text: str) -> tuple[int, float]:
    token, equals, value = text.partition("=")
    if not equals:
        raise ParameterError(f"wants TOKEN_ID=VALUE, such as 42=-5, not '{text}'")
    return _integer(token), _real(value)


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of SamplingParams as the command line knows it. many: the flag may be repeated."""

    name: str
    parse: Callable[[str], Any]
    metavar: str
    help: str
    many: bool = False
    short: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-").replace("-ids", "-id")

    def gather(self, values: list[Any]) -> Any:
        """Values of a repeated flag as the field's own type."""
        return dict(values) if self.name == "logit_bias" else tuple(values)


SAMPLING: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("max_new_tokens", _integer, "N", "stop after N new tokens", short="-n"),
        Setting("min_new_tokens", _integer, "N", "no end of the answer before N new tokens"),
        Setting("temperature", _real, "T", "0 = always the likeliest token (default); above 0 = draw at random"),
        Setting("top_k", _integer, "K", "draw from the K likeliest tokens only (0 = no limit)"),
        Setting("top_p", _real, "P", "draw from the likeliest tokens that make up P of the probability (1 = no limit)"),
        Setting("min_p", _real, "P", "drop tokens less likely than P times the likeliest (0 = keep all)"),
        Setting(
            "repetition_penalty", _real, "X", "above 1 = avoid tokens of the prompt and the answer so far (1 = off)"
        ),
        Setting(
            "frequency_penalty", _real, "X", "lower a token's logit by X for each time the answer has it (0 = off)"
        ),
        Setting("presence_penalty", _real, "X", "lower a token's logit by X once the answer has it (0 = off)"),
        Setting("logit_bias", _bias, "ID=VALUE", "add VALUE to the logit of token ID; may be repeated", many=True),
        Setting("stop", replace_surrogates, "TEXT", "end the answer right before TEXT; may be repeated", many=True),
        Setting("stop_token_ids", _integer, "ID", "end the answer at token ID; may be repeated", many=True),
        Setting("ignore_eos", _switch, "", "do not stop at the model's own end token"),
        Setting("seed", _integer, "N", "the same N gives the same draws"),
        Setting(
            "logprobs",
            _integer,
            "K",
            "return log probabilities of each token and of the K likeliest (shown with --json)",
        ),
    )
}


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ParameterError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for every field of SamplingParams; a flag that is not given leaves None (and the field's default)."""
    group = parser.add_argument_group("sampling")
    for setting in SAMPLING.values():
        names = [name for name in (setting.short, setting.flag) if name]
        if setting.parse is _switch:
            group.add_argument(*names, dest=setting.name, action="store_true", default=None, help=setting.help)
        else:
            group.add_argument(
                *names,
                dest=setting.name,
                type=_argument(setting.parse),
                action="append" if setting.many else "store",
                metavar=setting.metavar,
                help=setting.help,
            )


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling settings that were given as flags, as keyword arguments of SamplingParams."""
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    return {name: SAMPLING[name].gather(value) if SAMPLING[name].many else value for name, value in given.items()}


def parse_setting(name: str, text: str) -> Any:
    """The value of `/set name=text`. Repeatable settings take one value or a JSON list (logit_bias: a JSON object)."""
    setting = SAMPLING[name]
    try:
        if not setting.many:
            return setting.parse(text)
        items: Any = json.loads(text) if text.lstrip().startswith(("[", "{")) else [text]
    except json.JSONDecodeError:
        raise ParameterError(f"{name} wants one value or a JSON list, not '{text}'.") from None
    except ParameterError as error:
        raise ParameterError(f"{name} {error}.") from None
    if isinstance(items, dict):
        items = [f"{key}={value}" for key, value in items.items()]
    try:
        return setting.gather([setting.parse(item if isinstance(item, str) else json.dumps(item)) for item in items])
    except ParameterError as error:
        raise ParameterError(f"{name} {error}.") from None


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """SamplingParams of the flags. A value out of range is a ParameterError that names it."""
    from edgespec.decoding.params import SamplingParams

    return SamplingParams.from_dict(sampling_values(args))


def count_value(text: str) -> int | str:
    """'auto' or a whole number >= 0."""
    if text == "auto":
        return text
    if not text.isascii() or not text.isdigit():
        raise ParameterError(f"wants auto or a whole number from 0 up, not '{text}'")
    return int(text)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that choose the model, its drafts and how the engine is built."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "-m", "--model", metavar="MODEL", help="a name of the catalogue, a folder, a .gguf file, or a hub id"
    )
    group.add_argument(
        "--draft",
        action="append",
        metavar="NAME",
        help="auto, off, ngram, a draft or set of this model, or a path; may be repeated",
    )
    group.add_argument(
        "--drafts",
        action="extend",
        type=_names,
        dest="draft",
        metavar="NAME,...",
        help="the same, several names with commas between",
    )
    group.add_argument(
        "--gamma", type=_argument(count_value), metavar="N", help="draft tokens a round: auto, or 0 and up"
    )
    group.add_argument("--threads", type=_argument(_integer), metavar="N", help="threads of the CPU engine")
    group.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda, or torch-cpu (the float32 reference)")
    group.add_argument("--weight-format", metavar="FORMAT", help="exact (the file's own blocks), int8, or float32")
    group.add_argument("--context", type=_argument(_integer), metavar="N", help="longest conversation in tokens")
    group.add_argument("--memory-budget", metavar="SIZE", help="such as 1GiB or 80%%; what does not fit is refused")
    group.add_argument(
        "--resident",
        type=_argument(count_value),
        metavar="K",
        help="drafts held in memory at once: auto (what fits), or 0 and up",
    )
    group.add_argument(
        "--policy", metavar="NAME", help="what decides about drafts (default: edgespec), see docs/policies.md"
    )
    group.add_argument("--load-rate", metavar="SIZE", help="bytes per second at which drafts are read, such as 200MB")
    group.add_argument("--config", metavar="FILE", help="settings from a TOML file; flags go before it")


def add_serving_flags(parser: argparse.ArgumentParser) -> None:
    """Flags about several requests at once, for commands that serve them or plan for it."""
    group = parser.add_argument_group("several requests at once")
    group.add_argument(
        "--max-sessions", type=_argument(_integer), metavar="N", help="requests that run at once, 1 to 16"
    )
    group.add_argument("--max-queue", type=_argument(_integer), metavar="N", help="requests that may wait")
    group.add_argument("--kv-memory", metavar="SIZE", help="memory for keys and values: auto (what fits), or a size")
    group.add_argument(
        "--load-policy", metavar="NAME", help="what decides how many tokens each drafts, see docs/serving.md"
    )
    group.add_argument(
        "--elastic",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let the drafts' memory become keys and values while drafts do not pay (default: on)",
    )


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Flags about what is shown besides the answer."""
    group = parser.add_argument_group("output")
    group.add_argument("--stats", action="store_true", help="print draft, acceptance, speed and memory to stderr")
    group.add_argument("--trace", metavar="FILE", help="write a Chrome trace of the rounds to FILE")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress and no warnings")
    add_debug_flag(group)


def add_debug_flag(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--debug", action="store_true", help="log in detail, and show a traceback when something fails")


def draft_setting(values: list[str]) -> str | list[str]:
    """`--draft` values as RuntimeConfig takes them: 'off', 'auto', or a list of names and paths."""
    if "off" in values and len(set(values)) > 1:
        raise ConfigError("--draft off cannot be combined with other drafts; give one or the other.")
    return values[0] if set(values) in ({"off"}, {"auto"}) else list(dict.fromkeys(values))


def engine_values(args: argparse.Namespace) -> dict[str, Any]:
    """The engine settings that were given as flags, by the names of RuntimeConfig."""
    names = (
        "model",
        "gamma",
        "threads",
        "device",
        "weight_format",
        "context",
        "memory_budget",
        "resident",
        "policy",
        "load_rate",
        "max_sessions",
        "max_queue",
        "kv_memory",
        "load_policy",
        "elastic",
    )
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    if getattr(args, "draft", None):
        given["drafts"] = draft_setting(args.draft)
    return given
