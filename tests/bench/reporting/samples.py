"""A run with everything a report shows, made from numbers that look like a small machine's."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.bench.reporting.document import build
from edgespec.bench.specbench.folder import TRACES, ArmInfo, Record, file_name, read_run
from tests.support.runs import failed, record, write_run

TASKS = {
    "writing": ("mt-bench", "chat"), "coding": ("mt-bench", "code"), "math": ("mt-bench", "math"),
    "translation": ("translation", "translation"), "summarization": ("summarization", "summarization"),
    "qa": ("qa", "qa"), "math_reasoning": ("math_reasoning", "math"), "rag": ("rag", "rag"),
}  # fmt: skip
DRAFTS = ("general", "code", "math", "qa")
# Tokens a round of each arm by domain; anything else gets the first.
ARMS: dict[str, dict[str, float]] = {
    "plain": {"": 1.0},
    "ngram": {"": 1.15, "rag": 1.9, "summarization": 1.6},
    "static:general@3": {"": 1.8},
    "static:code@3": {"": 1.4, "code": 2.2},
    "static:math@3": {"": 1.4, "math": 2.4},
    "mab-async": {"": 1.7, "rag": 2.0},
    "memspec": {"": 1.8, "code": 2.0, "math": 2.1},
    "edgespec": {"": 2.0, "code": 2.3, "math": 2.5, "rag": 2.6},
}
QA = {"category": "qa", "task": "qa", "domain": "qa"}


def part_of(path: Path, records: Mapping[str, Iterable[Record]], **settings: Any) -> dict[str, Any]:
    """The one part of a run with these records."""
    document = build([read_run(write_run(path / "run", records, **settings))])
    (part,) = document["parts"]
    return part


def sample_run(path: Path, *, questions: int = 3, repeats: int = 1, seed: int = 1) -> Path:
    """Every category, ten arms (one absent, a peer, one with an error), and the time line of one policy."""
    rng = random.Random(seed)
    records: dict[str, list[Record]] = {name: [] for name in (*ARMS, "peer:llama.cpp-lookup")}
    for number in range(questions * len(TASKS)):
        category = list(TASKS)[number % len(TASKS)]
        task, domain = TASKS[category]
        for repeat in range(repeats):
            for name in records:
                rates, place = ARMS.get(name, {"": 1.3}), {"category": category, "task": task, "domain": domain}
                rate = rates.get(domain, rates[""])
                records[name].append(_answer(name, number, rate, rng, **place, repeat=repeat))
    last = records["edgespec"][-1]
    records["edgespec"][-1] = failed(
        last.question_id, "WorkerFailure: the worker was ended by signal 9 (SIGKILL)", **_place(last)
    )
    other = records["memspec"][3]
    records["memspec"][3] = replace(other, token_ids=(*other.token_ids[:20], 7, *other.token_ids[21:]))
    arms = {
        "peer:flashspec": ArmInfo("peer", "absent", "No module named 'flashspec'"),
        "peer:llama.cpp-lookup": ArmInfo("peer", "ok", "", "the same file", 210 << 20),
    }
    folder = write_run(path, records, arms=arms, settings={"max_new_tokens": 128, "repeats": repeats})
    trace = path / TRACES / f"{file_name('edgespec')}.json"
    last_ones = [(r.domain, len(r.round_tokens)) for r in records["edgespec"][-6:-1]]
    trace.write_text(json.dumps(sample_trace(rng, last_ones)), encoding="utf-8")
    return folder


def _answer(name: str, number: int, rate: float, rng: random.Random, **place: Any) -> Record:
    rate = max(1.0, rate * rng.uniform(0.85, 1.15))
    count = 60 if name == "plain" else int(60 / rate)
    rounds = [60 // count + (place < 60 % count) for place in range(count)]
    drafted = 0 if name == "plain" else count
    shares = {"plain": count - drafted}
    if name.startswith("static:"):
        shares[name[7:-2]] = drafted
    elif name == "ngram":
        shares["ngram"] = drafted
    elif drafted:
        own = place["domain"] if place["domain"] in DRAFTS else "general"
        shares |= {own: drafted * 3 // 4, "ngram": drafted - drafted * 3 // 4}
    step = 0.045 if name == "plain" else 0.052
    kept = sum(rounds) - count
    tallies = {
        draft: [n, round(n * (0.72 if draft == place["domain"] else 0.5)), 3 * n, kept * n // drafted]
        for draft, n in shares.items()
        if draft != "plain" and n
    }
    held = name in ("edgespec", "memspec", "mab-async")
    made = record(
        number + 1,
        rounds=rounds,
        step=step,
        order=number,
        at=1.9e9 + 5000.0 * place["repeat"] + 40.0 * number + 4.0 * (list(ARMS).index(name) if name in ARMS else 9),
        rss_bytes=int((310 + 25 * (name != "plain") + 0.4 * number + rng.uniform(0, 4)) * 2**20),
        stats={
            "draft_share": shares,
            "by_draft": tallies,
            "accepted_tokens": kept,
            "proposed_tokens": 3 * drafted,
            "acceptance_by_position": [0.6, 0.5, 0.4] if drafted else [],
            "tries_by_position": [drafted, drafted // 2, drafted // 4] if drafted else [],
            "fallback_share": 0.06 if held else 0.0,
            "loads": int(held and rng.random() < 0.6),
            "load_seconds_hidden": 0.2 if held else 0.0,
            "switches": 2 * held,
            "target_seconds": 0.8 * step * count,
            "draft_seconds": 0.1 * step * drafted,
            "predictor_seconds": 0.012 * step * count,
            "gamma_histogram": {"3": drafted, "0": count - drafted},
        },
        **place,
    )
    return replace(made, stats={}, round_tokens=()) if name.startswith("peer") else made


def _place(of: Record) -> dict[str, Any]:
    return {name: getattr(of, name) for name in ("category", "domain", "task", "repeat", "turn", "order")}


def sample_trace(rng: random.Random, answers: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Answers (domain, rounds) on two slots: each domain's draft is loaded soon after its answer has begun."""
    events: list[dict[str, Any]] = []

    def add(name: str, lane: str, begin: float, seconds: float, **args: Any) -> None:
        events.append({"ph": "X", "name": name, "cat": lane, "ts": begin * 1e6, "dur": seconds * 1e6, "args": args})

    now, held = 0.0, ["general", "qa"]
    for domain, rounds in answers:
        began = now
        add("prefill", "rounds", now, 0.25, width=200)
        start = now + 0.05
        arrives = 0.0
        if domain not in held:
            add(f"evict {held[0]}", "loads", start, 0.01, reason=f"{domain} is worth more")
            add(f"load {domain}", "loads", start + 0.01, 0.55, reason=f"{domain} is worth more")
            held, arrives = [held[1], domain], start + 0.56
        now += 0.25
        for _ in range(rounds):
            away = now < arrives
            draft = "ngram" if rng.random() < 0.2 else None if rng.random() < 0.08 else held[0] if away else domain
            seconds = rng.uniform(0.04, 0.06)
            add("round", "rounds", now, seconds, draft=draft, gamma=3 if draft else 0, accepted=rng.randint(0, 3))
            now += seconds + 0.002
        add("answer", "answers", began, now - began, domain=domain)
        now += 20.0  # in which other arms run
    return {"traceEvents": events, "otherData": {"dropped_events": 0}}
