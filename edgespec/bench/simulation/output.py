"""Writes what was simulated: simulation.json with every figure, simulation.md, and simulation.html with pictures."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from drafts.figures import LEAST_FOR_INTERVAL
from edgespec.bench.reporting import style
from edgespec.bench.reporting.html import TEMPLATE
from edgespec.bench.reporting.markdown import block, escape, mind, terms
from edgespec.bench.reporting.tables import Table
from edgespec.bench.simulation import tables
from edgespec.bench.simulation.pictures import pictures
from edgespec.errors import ConfigError
from edgespec.files import write_text

_log = logging.getLogger(__name__)

TITLE = "Simulated policies"
FILES = ("simulation.json", "simulation.md", "simulation.html")
DEFINITIONS = {
    "x plain": "seconds of plain decoding over seconds of the policy, of the same recorded answers; prefill left out",
    "95%": "interval by bootstrap over texts: what other texts of the kind might give, on this very device; none below "
    f"{LEAST_FOR_INTERVAL} texts, and of fewer than about 20 it is narrower than it ought to be",
    "a domain (N)": "x plain over the N texts of that domain",
    "tok/round": "tokens emitted by each target forward after the prompt's, the target's own (corrected or bonus) "
    "token included",
    "fallback": "share of rounds in which the draft that the policy wanted most could not run (away, or still reading "
    "the text); as `fallback_share` of a live run",
    "loads, switches": "drafts that were read into memory; rounds with another draft than the one that ran before",
    "load ratio": "seconds of a load over seconds of a plain step",
    "oracle-static": "the best draft, gamma and use of lookup of each text, known in advance",
    "oracle-dynamic": "every N rounds what takes the fewest seconds to the end of the text, known in advance, loads "
    "and reading included: one draft (phrases, too), one gamma, lookup first or not. What later switches will cost is "
    "estimated. Mostly above policies that choose every N rounds, and no bound; one that chooses anew in every round, "
    "or ends blocks early by confidence, may do better where that pays",
    "planning": "what policies take to plan and to learn costs nothing here, unless a run that is validated against "
    "has measured it: a report of 'bench specbench' has it as a share of the time",
    "catch-up, shadows": "share of the decode seconds in which drafts read what they missed, and guess "
    "only to be compared",
}


def writable(out: Path) -> None:
    """Make the folder. Raises ConfigError if that cannot be done: before anything is simulated."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; choose another folder with --out.") from error


def publish(document: Mapping[str, Any], out: Path) -> None:
    """Write all files into the folder. Raises ConfigError if that cannot be done."""
    texts = (json.dumps(document, indent=1, allow_nan=False) + "\n", markdown(document), html(document))
    try:
        for name, content in zip(FILES, texts):
            write_text(out / name, content)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from error


def markdown(document: Mapping[str, Any]) -> str:
    """The tables, and what their words mean."""
    blocks = [f"# {TITLE}", escape(document["about"])]
    blocks += mind(document["warnings"])
    blocks += [block(table, level=2) for table in tables.all_tables(document)]
    blocks.append(terms(DEFINITIONS))
    blocks.append(block(how(document), level=2))
    return "\n\n".join(blocks) + "\n"


def html(document: Mapping[str, Any]) -> str:
    """One page that needs nothing else, like a run's report. Without matplotlib it says that it has no pictures."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made = tables.all_tables(document)
    part = {
        "machine": document["device"]["name"] if document["device"] else "Costs as measured",
        "headline": tables.SIMULATED,
        "warnings": document["warnings"],
        "pictures": _drawn(document) if style.available() else {},
        "tables": made,
        "left_out": [],
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=TITLE,
        conditions=document["about"],
        css=Markup(style.css()),
        parts=[part],
        definitions=DEFINITIONS,
        others=[how(document)],
        no_pictures="" if style.available() else style.HOW_TO_INSTALL,
    )


def how(document: Mapping[str, Any]) -> Table:
    """The command, and what it was made of."""
    rows = [
        ["command", document["command"]],
        ["traces", ", ".join(document["traces"])],
        ["target", str(document["target"].get("name", "not named"))],
        ["drafts with weights", ", ".join(document["drafts"])],
        ["texts left out, as the ranker was made with them", str(document["seen_texts_left_out"])],
        ["the replay itself", tables.pace(document["replayed"]) or "none of a policy that drafts"],
    ]
    return Table("Settings", ["setting", "value"], rows)


def _drawn(document: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    with style.drawing():
        found = [
            {"title": p.title, "caption": p.caption, "svg": Markup(style.svg(p.figure, p.name, p.title))}
            for p in pictures(document)
        ]
    return {"Pictures": found} if found else {}
