"""Puts the runs of bench.sh together: one JSON object on stdout. Standard library only."""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

KINDS = ("plain", "drafts")
WARM_UP = 0
RAIL = re.compile(r"\b([A-Z]\w*) (\d+)(?:mW)?/\d+")
# What the whole board takes: one of these rails, or the sum of those. As in edgespec/telemetry/rails.py.
INPUTS = ("VDD_IN", "VIN", "POM_5V_IN")
AGX_PARTS = ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")
HOT = re.compile(r"\b(?:tj|gpu|cpu)@(\d+(?:\.\d+)?)C", re.IGNORECASE)


def runs_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The statistics of the counted runs, in order."""
    found = []
    for path in folder.glob(f"{kind}-*.json"):
        number = int(path.stem.rpartition("-")[2])
        if number != WARM_UP:
            found.append((number, json.loads(path.read_text(encoding="utf-8"))))
    return [{"run": number, "tokens": len(r["token_ids"]), **r["stats"]} for number, r in sorted(found)]


def middle(runs: list[dict[str, Any]], key: str) -> float | None:
    values = [run[key] for run in runs if isinstance(run.get(key), (int, float))]
    return round(statistics.median(values), 3) if values else None


def watts_of(line: str) -> float | None:
    """Of the whole board, where the line tells it."""
    rails = {name: int(milliwatts) for name, milliwatts in RAIL.findall(line)}
    total = next((rails[name] for name in INPUTS if name in rails), None)
    if total is None and rails.keys() >= set(AGX_PARTS):
        total = sum(rails[name] for name in AGX_PARTS)
    return None if total is None else total / 1000


def telemetry(text: str) -> dict[str, Any]:
    """Power of the whole board and the highest temperature in lines of tegrastats; null for what they do not say."""
    watts = [found for line in text.splitlines() if (found := watts_of(line)) is not None]
    degrees = [float(match[1]) for match in HOT.finditer(text)]
    return {
        "lines": len(text.splitlines()),
        "mean_watts": round(statistics.fmean(watts), 3) if watts else None,
        "peak_watts": max(watts) if watts else None,
        "peak_celsius": max(degrees) if degrees else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("model", "draft", "edgespec"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--finding", nargs="*", default=[])
    args = parser.parse_args()
    runs = {kind: runs_of(args.folder, kind) for kind in KINDS}
    speed = {kind: middle(runs[kind], "tokens_per_second") for kind in KINDS}
    both = speed["plain"] and speed["drafts"]
    result = {
        "edgespec": args.edgespec,
        "model": args.model,
        "draft": args.draft,
        "tokens_asked": args.tokens,
        "preflight": args.finding,
        "board": json.loads((args.folder / "board.json").read_text(encoding="utf-8")),
        "median_tokens_per_second": speed,
        "speedup": round(speed["drafts"] / speed["plain"], 3) if both else None,
        "tegrastats": telemetry((args.folder / "tegrastats.log").read_text(encoding="utf-8", errors="replace")),
        "runs": runs,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
