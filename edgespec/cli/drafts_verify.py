"""`edgespec drafts verify`: files, target, vocabulary, and a few rounds of every draft beside plain decoding."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from edgespec.cli import drafts, runtime
from edgespec.cli.terminal import stdout

if TYPE_CHECKING:
    from drafts.zoo import Entry, Finding, TargetFacts
    from edgespec.engine import Engine
    from edgespec.results import GenerationResult

NEW_TOKENS = 24
GAMMA = 3
NEAR_TIE = 0.05  # between two logits; less than that may fall either way where blocks are computed otherwise
PROMPT = "Write one short sentence about the sea."
PROMPTS = {
    "code": "Write a Python function that returns the larger of two numbers.",
    "math": "A train goes 60 km in one hour. How far does it go in three hours? Show the steps.",
    "translation": "Translate to English: Guten Morgen, wie geht es dir?",
    "summarization": "Summarise in one sentence: The lighthouse was built in 1871 and is a museum today.",
    "qa": "What is the capital of France?",
    "chat": "I have a free Saturday and a bicycle. What could I do?",
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found about one draft. skipped: it was not asked for by name and is for another target."""

    entry: Entry
    findings: tuple[Finding, ...]
    skipped: bool = False

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)


def run(args: argparse.Namespace) -> int:
    """Print the checks of each draft as they are done; 1 if one fails."""
    config, facts, note = drafts.surroundings(args)
    found = drafts.sets_of(args, config)
    problems = [] if args.names else [each.problem for each in found if each.problem]
    if args.names:
        entries = [drafts.preferred(drafts.find(name, found), facts) for name in args.names]
    else:
        entries = [entry for each in found for entry in each.entries]
    verdicts, output = [], stdout()
    with ExitStack() as stack:
        engine = None
        if entries and not args.offline:
            engine = stack.enter_context(runtime.open_engine(args, config.replace(drafts=(), gamma=GAMMA)))
            facts = engine.target_facts
        for entry in entries:
            verdict = _verdict(entry, facts, engine, named=bool(args.names))
            verdicts.append(verdict)
            if not args.json:
                for line in _lines(verdict):
                    output.line(line)
    good = not problems and all(verdict.ok for verdict in verdicts)
    if args.json:
        output.line(json.dumps({"ok": good, "drafts": [_plain(v) for v in verdicts], "unreadable": problems}))
    else:
        for line in _last_lines(verdicts, problems, note if args.offline else ""):
            output.line(line)
    return 0 if good else drafts.WRONG


def _verdict(entry: Entry, facts: TargetFacts | None, engine: Engine | None, *, named: bool) -> Verdict:
    from drafts import zoo

    made = None if entry.manifest is None else entry.manifest.target
    if not named and facts is not None and made is not None and not made.is_for(facts.fingerprint, facts.model):
        detail = f"skipped: made for another target, {made.name} (name it to check it all the same)"
        return Verdict(entry, (zoo.Finding("target", True, detail),), skipped=True)
    findings = list(zoo.verify(entry, facts, None if engine is None else engine.tokenizer))
    if engine is not None and all(finding.ok for finding in findings):
        findings.append(_live(entry, engine))
    return Verdict(entry, tuple(findings))


def _live(entry: Entry, engine: Engine) -> Finding:
    """A few rounds with the draft alone: the text is the plain one, something was proposed, nothing was raised."""
    from drafts.zoo import Finding
    from edgespec.decoding.params import SamplingParams
    from edgespec.errors import DraftError

    assert entry.manifest is not None
    prompt = PROMPTS.get(entry.manifest.domain, PROMPT)
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    info = engine.add_draft(str(entry.folder))
    if info.status.startswith("failed"):
        return Finding("live", False, info.status)
    engine.use_draft("off")
    plain = engine.generate(prompt, dataclasses.replace(params, logprobs=1))
    try:
        engine.use_draft(info.name)  # where not all are held at once, this brings it in
    except DraftError as error:
        return Finding("live", False, str(error))
    drafted = engine.generate(prompt, params)
    status, stats = engine.drafts[info.name], drafted.stats
    engine.use_draft("off")
    if status != "active":
        return Finding("live", False, status)
    if not stats.proposed_tokens:
        detail = f"nothing was proposed in {stats.rounds} rounds"
        return Finding("live", entry.manifest.kind == "phrases", detail)  # a table need not know this text
    difference = _difference(plain, drafted)
    rounds = f"{stats.accepted_tokens} of {stats.proposed_tokens} proposed tokens accepted in {stats.rounds} rounds"
    good = not difference or difference.startswith("near tie")
    return Finding("live", good, f"{difference or 'the plain text'}; {rounds}")


def _difference(plain: GenerationResult, drafted: GenerationResult) -> str:
    """Where two answers part, and the gap between the two best logits of the plain one there; "" if they do not."""
    if plain.token_ids == drafted.token_ids:
        return ""
    pairs = zip(plain.token_ids, drafted.token_ids)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain.token_ids), len(drafted.token_ids)))
    gap = plain.logprobs[place].margin if plain.logprobs is not None and place < len(plain.logprobs) else float("inf")
    where = f"the text leaves plain decoding at token {place + 1}, where its two best logits are {gap:.4f} apart"
    return f"near tie: {where}" if gap < NEAR_TIE else where


def _lines(verdict: Verdict) -> Iterator[str]:
    entry = verdict.entry
    state = "skip" if verdict.skipped else "ok" if verdict.ok else "fail"
    yield f"{state:<4}  {entry.set_name}/{entry.name}"
    for finding in verdict.findings:
        yield f"      {'' if finding.ok else 'FAILED '}{finding.check}: {finding.detail}"


def _last_lines(verdicts: Sequence[Verdict], problems: Sequence[str], note: str) -> Iterator[str]:
    yield from problems
    if note:
        yield note
    done = [verdict for verdict in verdicts if not verdict.skipped]
    failed = [verdict.entry.name for verdict in done if not verdict.ok]
    if not verdicts:
        yield "There is no draft set on this machine; edgespec drafts train makes one."
    elif failed:
        yield f"{len(failed)} of {len(done)} drafts failed: {', '.join(failed)}. Copy them again, or make them again."
    else:
        yield f"{len(done)} drafts are as they must be."


def _plain(verdict: Verdict) -> dict[str, object]:
    checks = [dataclasses.asdict(finding) for finding in verdict.findings]
    entry = verdict.entry
    return {
        "name": entry.name,
        "set": entry.set_name,
        "folder": str(entry.folder),
        "ok": verdict.ok,
        "skipped": verdict.skipped,
        "checks": checks,
    }
