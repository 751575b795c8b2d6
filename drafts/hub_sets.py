"""Draft sets whose drafts are ordinary models on the Hugging Face hub: which they are, and which fit a memory.

Such a set is a `set.toml` in a folder of `zoo/`, named after its target. It holds no weights and no fingerprints: a
standalone draft is compared with the target token by token when it is loaded, and that decides.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drafts.fields import Table
from drafts.zoo import BUILT_IN
from edgespec.errors import DraftError
from edgespec.models.spec import ModelSpec, RopeSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SET_FILE = "set.toml"
FORMAT = 1
_HUB_MODEL = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+\.gguf)?")


@dataclass(frozen=True)
class Build:
    """One file format of a model: what `catalog.pull` is told, the bytes of its files, and whether terms come first."""

    name: str
    model: str
    bytes: int
    gated: bool

    @classmethod
    def read(cls, name: str, table: Table) -> Build:
        model = table.line("model")
        if not _HUB_MODEL.fullmatch(model):
            raise table.refused("model", f"is {model!r}, and must be a hub id: org/name or org/name:file.gguf")
        return cls(name, model, table.whole("bytes", 1, 1 << 44), table.truth("gated"))


@dataclass(frozen=True)
class HubModel:
    """A model of a set. spec: its sizes, as far as memory depends on them. builds: the one to prefer first."""

    name: str
    licence: str
    parameters: int
    spec: ModelSpec
    source: str
    builds: Mapping[str, Build]
    domain: str = ""
    optional: bool = False

    @classmethod
    def read(cls, table: Table, *, draft: bool) -> HubModel:
        builds = {name: Build.read(name, inner) for name, inner in table.tables("builds", names="build").items()}
        if not builds:
            raise table.refused("builds", "must name at least one file format")
        return cls(
            name=table.name("name"),
            licence=table.line("licence"),
            parameters=table.whole("parameters", 1, 1 << 44),
            spec=_spec(table.table("architecture")),
            source=table.line("source"),
            builds=builds,
            domain=table.name("domain") if draft else "",
            optional=table.truth("optional") if draft else False,
        )

    def build(self, name: str | None = None) -> Build:
        """The build of that name, or the preferred one. Raises DraftError for a name it does not have."""
        if name is None:
            return next(iter(self.builds.values()))
        if name not in self.builds:
            raise DraftError(f"{self.name} has no build {name!r}; it has {', '.join(self.builds)}")
        return self.builds[name]


def _spec(table: Table) -> ModelSpec:
    """What is not told changes no size."""
    kind: Any = table.choice("kind", ("llama", "qwen2", "qwen3"))
    size = partial(table.whole, least=1, most=1 << 24)
    return ModelSpec(
        architecture=kind,
        vocab_size=size("vocab"),
        hidden_size=size("hidden"),
        intermediate_size=size("inner"),
        num_layers=(layers := table.whole("layers", 1, 1 << 10)),
        num_heads=size("heads"),
        num_kv_heads=size("kv_heads"),
        head_dim=size("head"),
        max_positions=1 << 15,
        rms_norm_eps=1e-6,
        rope=RopeSpec(1e6),
        tie_embeddings=table.truth("tied"),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        windows=(None,) * layers,
    )


@dataclass(frozen=True)
class HubSet:
    name: str
    description: str
    target: HubModel
    drafts: tuple[HubModel, ...]

    @classmethod
    def read(cls, path: Path) -> HubSet:
        """The set in a `set.toml`. Raises DraftError with file and key for whatever is not as it must be."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DraftError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError as error:  # not UTF-8, or not TOML
            raise DraftError(f"{path}: is not valid TOML ({error}); install edgespec again") from None
        table = Table(str(path), "", data)
        if table.whole("format", 0, 1 << 20) != FORMAT:
            raise table.refused("format", f"must be {FORMAT}; another version of edgespec wrote this set")
        drafts = tuple(HubModel.read(inner, draft=True) for inner in table.list("draft"))
        found = cls(
            table.name("name"), table.line("description"), HubModel.read(table.table("target"), draft=False), drafts
        )
        names = [draft.name for draft in drafts]
        if not drafts or len(set(names)) != len(names):
            raise table.refused("draft", "must list drafts, each name once")
        table.finish()
        return found

    def chosen(self, names: Sequence[str] = ()) -> tuple[HubModel, ...]:
        """The drafts of those names; without names, all but the optional ones. Raises DraftError for unknown names."""
        if not names:
            return tuple(draft for draft in self.drafts if not draft.optional)
        known = {draft.name: draft for draft in self.drafts}
        for name in names:
            if name not in known:
                raise DraftError(f"the set {self.name} has no draft {name!r}; it has {', '.join(known)}")
        return tuple(known[name] for name in dict.fromkeys(names))


def hub_sets() -> list[HubSet]:
    """All sets, by name. Raises DraftError for one that cannot be read."""
    return [HubSet.read(path) for path in sorted(BUILT_IN.glob(f"*/{SET_FILE}"))]


def find(name: str) -> HubSet | None:
    """The set of that name, or of the target of that name, whatever the case."""
    return next((s for s in hub_sets() if name.lower() in (s.name.lower(), s.target.name.lower())), None)


def for_model(model: str) -> HubSet | None:
    """The set for a model as the user named it: a hub id, a folder or a file, quantised or not.

    A name is only a name: a wrong guess here loads a draft that the comparison of vocabularies then refuses.
    """
    names = [part.lower() for part in re.split(r"[/\\:]", model) if part]
    for each in hub_sets():
        if any(re.fullmatch(re.escape(each.name) + r"([-._].*)?", part) for part in names):
            return each
    return None


@dataclass(frozen=True)
class SetFit:
    """Whether a set fits a memory, all in bytes.

    target: with all that is taken beside it in any case. drafts: a slot for each. room: that there is in all. slots:
    drafts beside the target at once, -1 = not even the target.
    """

    name: str
    target: int
    drafts: Mapping[str, int]
    room: int
    slots: int

    @property
    def fits(self) -> bool:
        return self.slots > 0

    @property
    def text(self) -> str:
        """One line for the user."""
        need, room = _gb(self.target), _gb(max(self.room, 0))
        if self.slots < 0:
            return f"{self.name}: does not fit; its target alone needs about {need} of {room}"
        if not self.slots:
            least = _gb(min(self.drafts.values()))
            return (
                f"{self.name}: the target fits ({need} of {room}), its smallest draft ({least}) does not fit beside it"
            )
        drafts = f"{self.held} of {', '.join(self._able)}"
        return f"{self.name}: fits ({need} of {room} for the target); drafts at once: {drafts}"

    @property
    def held(self) -> str:
        """How many drafts at once, "all" of those of which one fits."""
        return str(self.slots) if self.slots < len(self._able) else "all"

    @property
    def _able(self) -> list[str]:
        return [name for name, nbytes in self.drafts.items() if self.target + nbytes <= self.room]


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
