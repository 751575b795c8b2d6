"""An evaluation's document as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drafts.figures import LEAST_FOR_INTERVAL
from drafts.heatmap import own_domains

UNKNOWN = "-"
Document = Mapping[str, Any]
Cell = Mapping[str, Any]


def shown_gamma(gammas: list[int]) -> int:
    """The gamma that tables and picture show: 3 if it was asked for, else the largest."""
    return 3 if 3 in gammas else max(gammas)


def tables(document: Document, console: Console) -> None:
    """Print an evaluation: acceptance, positions, predicted speed, differences, drafts, and what was left out."""

    def show(title: str, table: Table) -> None:
        console.print(f"\n{title}", style="bold", highlight=False, markup=False)
        console.print(table)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    gamma = shown_gamma(document["parameters"]["gammas"])
    key = str(gamma)
    target = document["target"]
    say(
        f"{target['name']}, {target['weight_format']} weights on {target['device']}; "
        f"{document['prompts']['used']} prompts, greedy, at most {document['parameters']['max_new_tokens']} new tokens"
    )

    def by_gamma(cell: Cell) -> Cell:
        return cell["by_gamma"][key]  # type: ignore[no-any-return]

    title = f"Accepted draft tokens a round, gamma {gamma} (below it: 95% interval; the target's own token not counted)"
    show(title, _grid(document, lambda cell: _with_interval(by_gamma(cell), "accepted_per_round")))
    title = f"Acceptance by position, gamma {gamma}, given the ones before"
    show(title, _grid(document, lambda cell: _positions(by_gamma(cell))))
    title = "First token right, over all positions of the answers"
    show(title, _grid(document, lambda cell: _with_interval(cell["first_token"], "share")))
    show("Predicted speed-up, from measured costs (1.50x at 2: with gamma 2, the best one)", _grid(document, _best))
    if document["differences"]:
        against = document["parameters"]["against"]
        title = f"Accepted tokens a round at gamma {gamma} minus those of {against} (bold: the interval leaves 0 out)"
        show(title, _differences(document, gamma))
    show("Drafts alone", _drafts(document, key))
    if any("+" in cell["draft"] for cell in document["cells"]):
        say("A+B: A is asked first, and B where A has nothing; lookup is the draft ngram.")
    if min(document["prompts"]["domains"].values(), default=LEAST_FOR_INTERVAL) < LEAST_FOR_INTERVAL:
        say(f"Domains with fewer than {LEAST_FOR_INTERVAL} prompts have no intervals.")
    for draft in document["drafts"]:
        if draft["reason"]:
            say(f"{draft['name']} was not evaluated: {draft['reason']}")
    _skipped(document["prompts"]["skipped"], console)


def _grid(document: Document, show: Callable[[Cell], str]) -> Table:
    """Drafts by domains; a draft's own domains are bold."""
    cells = {(cell["draft"], cell["domain"]): cell for cell in document["cells"]}
    domains = list(dict.fromkeys(domain for _, domain in cells))
    own = {draft["name"]: own_domains(draft["domain"]) for draft in document["drafts"]}
    table = Table()
    table.add_column("draft", no_wrap=True)
    for domain in domains:
        table.add_column(f"{domain}\n({document['prompts']['domains'][domain]})", justify="right", overflow="fold")
    for name in dict.fromkeys(draft for draft, _ in cells):
        mine = own.get(name, frozenset())
        texts = [(domain in mine, show(cells[(name, domain)])) for domain in domains]
        table.add_row(name, *(Text(text, style="bold" if is_own else "") for is_own, text in texts))
    return table


def _with_interval(figure: Mapping[str, Any], name: str) -> str:
    low, high = figure["low"], figure["high"]
    interval = "" if low is None or figure[name] == 0 else f"\n{low:.2f} – {high:.2f}"
    return _number(figure[name]) + interval


def _positions(figure: Mapping[str, Any]) -> str:
    return " ".join(_number(share).removeprefix("0") for share in figure["acceptance_by_position"]) or UNKNOWN


def _best(cell: Cell) -> str:
    best = cell["best"]
    if best is None:
        return UNKNOWN
    return f"{best['speedup']:.2f}x at {best['gamma']}" if best["gamma"] else "plain"


def _differences(document: Document, gamma: int) -> Table:
    found = [d for d in document["differences"] if d["gamma"] == gamma]
    domains = list(dict.fromkeys(d["domain"] for d in found))
    by_row = {(d["draft"], d["domain"]): d for d in found}
    table = Table()
    table.add_column("draft", no_wrap=True)
    for domain in domains:
        table.add_column(domain, justify="right", overflow="fold")
    for name in dict.fromkeys(d["draft"] for d in found):
        table.add_row(name, *(_difference(by_row[(name, domain)]) for domain in domains))
    return table


def _difference(figure: Mapping[str, Any]) -> Text:
    if figure["difference"] is None:
        return Text(UNKNOWN)
    low, high = figure["low"], figure["high"]
    if low is None:
        return Text(f"{figure['difference']:+.2f}")
    clear = low > 0 or high < 0
    return Text(f"{figure['difference']:+.2f}\n{low:+.2f} – {high:+.2f}", style="bold" if clear else "")


def _drafts(document: Document, key: str) -> Table:
    """One line a draft: what it is and what a step of it costs."""
    plain = float(document["costs"]["verify"]["1"])
    table = Table()
    for name in ("draft", "kind", "domain"):
        table.add_column(name, no_wrap=True)
    for name in ("size", "ms a token", "of a plain step", "vocabulary covers", "calibration error"):
        table.add_column(name, justify="right")
    for draft in document["drafts"]:
        if draft["reason"] or draft["kind"] in ("plain", "hybrid"):
            continue
        seconds = draft["seconds_per_token"].get(key)
        table.add_row(
            draft["name"],
            draft["kind"],
            draft["domain"] or UNKNOWN,
            f"{draft['bytes'] / 1e6:.1f} MB" if draft["bytes"] else UNKNOWN,
            UNKNOWN if seconds is None else f"{seconds * 1e3:.2f}",
            UNKNOWN if seconds is None else f"{seconds / plain:.1%}",
            UNKNOWN if draft["coverage"] is None else f"{draft['coverage']:.1%}",
            _number(draft["calibration_error"], 3),
        )
    return table


def _skipped(skipped: list[Mapping[str, Any]], console: Console, most: int = 5) -> None:
    if not skipped:
        return
    console.print(f"{len(skipped)} lines of the prompt files were skipped:", highlight=False)
    for entry in skipped[:most]:
        console.print(
            f"  {entry['file']}, line {entry['line']}: {entry['reason']}", highlight=False, markup=False, soft_wrap=True
        )
    if len(skipped) > most:
        console.print(f"  and {len(skipped) - most} more (--json or --out lists them all)", highlight=False)


def _number(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"
