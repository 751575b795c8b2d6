"""From the text of a policy, as in `--policy static:code@4`, to the policy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from predictor.costs import CostTable
from predictor.policies.armed import Exp3Policy, HedgePolicy, UcbPolicy
from predictor.policies.base import LOOKUP, Policy
from predictor.policies.edgespec import EdgePolicy
from predictor.policies.fixed import PlainPolicy, StaticPolicy
from predictor.policies.memspec import MemSpecPolicy
from predictor.policies.nightjar import NightjarPolicy
from predictor.policies.oracle import Foresight, OracleDynamic, OracleStatic

GAMMA = 4  # of the published baselines, where they have one
NIGHTJAR_GAMMA = 3  # the longest, in most of its scripts
MAX_GAMMA = 64
_SPEC = re.compile(r"(?P<name>[^:@,]+)(:(?P<draft>[^@,]+))?(@(?P<gamma>[^,]*))?(?P<options>(,[^,]+)*)")


@dataclass
class _Request:
    """A taken-apart spec, with what policies are made of."""

    name: str
    draft: str | None
    gamma: int | None
    options: dict[str, str]
    costs: CostTable
    drafts: tuple[str, ...]
    gamma_max: int
    rng: np.random.Generator
    ahead: Foresight | None
    free: tuple[str, ...]
    used: set[str] = field(default_factory=set)

    def common(self) -> dict[str, bool | int]:
        """Options that every published policy has."""
        return {"lookup": self.flag("lookup", True), "interval": self.count("n", 4)}

    def flag(self, key: str, default: bool) -> bool:
        self.used.add(key)
        value = self.options.get(key)
        if value not in (None, "on", "off"):
            raise ValueError(f"policy {self.name}: {key} is on or off, not {value!r}")
        return default if value is None else value == "on"

    def count(self, key: str, default: int) -> int:
        self.used.add(key)
        value = self.options.get(key)
        if value is None:
            return default
        if not value.isdecimal() or not 1 <= int(value) <= 1000:
            raise ValueError(f"policy {self.name}: {key} is a number of rounds from 1 to 1000, not {value!r}")
        return int(value)

    def number(self, key: str, default: float) -> float:
        self.used.add(key)
        try:
            value = float(self.options.get(key, default))
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1000:
            raise ValueError(f"policy {self.name}: {key} is a number from 0 to 1000, not {self.options[key]!r}")
        return value

    def foresight(self) -> Foresight:
        if self.ahead is None:
            raise ValueError(f"policy {self.name} knows the future, which only a replay of recorded texts does")
        return self.ahead


def _plain(r: _Request) -> Policy:
    return PlainPolicy(r.costs, r.drafts)


def _static(r: _Request) -> Policy:
    if r.draft is None:
        raise ValueError(f"policy static needs a draft, as in static:{r.drafts[0] if r.drafts else LOOKUP}@{GAMMA}")
    return StaticPolicy(r.costs, r.drafts, r.draft, r.gamma or GAMMA, lookup=r.flag("lookup", True))


def _ucb(r: _Request) -> Policy:
    c = r.number("c", 2.0) if r.name != "ucbspec" else 2.0
    wait = r.name == "mab-sync"
    return UcbPolicy(r.name, r.costs, r.drafts, r.gamma or GAMMA, wait=wait, c=c, **r.common())  # type: ignore[arg-type]


def _exp3(r: _Request) -> Policy:
    return Exp3Policy(r.costs, r.drafts, r.gamma or GAMMA, r.rng, **r.common())  # type: ignore[arg-type]


def _hedge(r: _Request) -> Policy:
    return HedgePolicy(r.costs, r.drafts, r.gamma or GAMMA, r.rng, **r.common())  # type: ignore[arg-type]


def _nightjar(r: _Request) -> Policy:
    gamma = r.gamma or min(NIGHTJAR_GAMMA, r.gamma_max)
    return NightjarPolicy(r.costs, r.drafts, gamma, r.rng, draft=r.draft, **r.common())  # type: ignore[arg-type]


def _memspec(r: _Request) -> Policy:
    return MemSpecPolicy(r.costs, r.drafts, r.gamma or GAMMA, **r.common())  # type: ignore[arg-type]


def _oracle(r: _Request) -> Policy:
    kind = OracleStatic if r.name == "oracle-static" else OracleDynamic
    foresight = r.foresight()
    return kind(r.costs, r.drafts, r.gamma, r.gamma_max, foresight, free=r.free, **r.common())  # type: ignore[arg-type]


def _edgespec(r: _Request) -> Policy:
    return EdgePolicy(r.costs, r.drafts, r.gamma or r.gamma_max)


_MAKERS: Mapping[str, Callable[[_Request], Policy]] = {
    "edgespec": _edgespec,
    "plain": _plain,
    "static": _static,
    "mab-sync": _ucb,
    "mab-async": _ucb,
    "ucbspec": _ucb,
    "exp3spec": _exp3,
    "hedge": _hedge,
    "nightjar": _nightjar,
    "memspec": _memspec,
    "oracle-static": _oracle,
    "oracle-dynamic": _oracle,
}
POLICIES = tuple(_MAKERS)
_WITH_DRAFT = ("static", "nightjar")


def make_policy(
    spec: str,
    costs: CostTable,
    drafts: Sequence[str],
    *,
    capacity: int,
    gamma_max: int = 8,
    seed: int = 0,
    trace: Foresight | None = None,
    free: Collection[str] = (LOOKUP,),
) -> Policy:
    """The policy that `spec` names: `name[:draft][@gamma][,option=value]...`.

    drafts: those with weights, in a fixed order; free: those without, which `static` may name as well. capacity: slots.
    trace: what oracles look ahead in (a `Replay`). Options of the published ones: lookup=on|off (lookup first), n
    (rounds between scheduling points), c (of the UCB baselines). Raises ValueError with what to write instead.
    """
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        raise ValueError(f"policy {spec!r}: write name[:draft][@gamma][,option=value], as in static:code@4")
    name, draft = match["name"].strip(), match["draft"]
    if name not in _MAKERS:
        near = difflib.get_close_matches(name, POLICIES, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(POLICIES)}"
        raise ValueError(f"policy {name!r} is not known; {hint}")
    if capacity < 0:
        raise ValueError(f"policy {name}: a capacity of {capacity} slots is none")
    if draft is not None:
        _check_draft(name, draft, [*drafts, *free] if name == "static" else list(drafts))
    options = dict(_option(name, text) for text in match["options"].split(",") if text)
    rng = np.random.default_rng(seed)
    gamma = _gamma(name, match["gamma"])
    request = _Request(name, draft, gamma, options, costs, tuple(drafts), gamma_max, rng, trace, tuple(free))
    policy = _MAKERS[name](request)
    unknown = sorted(set(options) - request.used)
    if unknown:
        known = ", ".join(sorted(request.used)) or "none"
        raise ValueError(f"policy {name}: option {unknown[0]!r} is not known; its options are: {known}")
    return policy


def _check_draft(name: str, draft: str, known: list[str]) -> None:
    if name not in _WITH_DRAFT:
        raise ValueError(f"policy {name} chooses its drafts itself; leave out ':{draft}'")
    if draft not in known:
        near = difflib.get_close_matches(draft, known, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
        raise ValueError(f"policy {name}: draft {draft!r} is not known; {hint}")


def _gamma(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if name == "plain":
        raise ValueError("policy plain drafts nothing; leave out the gamma")
    if not text.isdecimal() or not 1 <= int(text) <= MAX_GAMMA:
        raise ValueError(f"policy {name}: gamma is a number from 1 to {MAX_GAMMA}, not {text!r}")
    return int(text)


def _option(name: str, text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"policy {name}: write options as option=value, not {text!r}")
    return key.strip(), value.strip()
