"""`edgespec demo`: four prompts of four domains, each decoded plainly and with drafts, side by side."""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgespec.cli import options, report, runtime
from edgespec.cli.terminal import Output, interrupt_calls, stdout

if TYPE_CHECKING:
    from edgespec.decoding.params import SamplingParams
    from edgespec.engine import Engine
    from edgespec.results import GenerationResult

INTERRUPTED = 130
HELP = "answer four prompts of four domains and show what the drafts did"
NEW_TOKENS = 96
REPEATS = 2  # of each way, interleaved, so that a busy moment does not hit one of them alone

PROMPTS = {
    "code": """\
Reformat this module: one blank line between the functions instead of two. Write out the whole module.

```python
def celsius_to_fahrenheit(celsius):
    return celsius * 9 / 5 + 32


def fahrenheit_to_celsius(fahrenheit):
    return (fahrenheit - 32) * 5 / 9


def average(values):
    return sum(values) / len(values)
```""",
    "maths": "A baker fills 14 trays with 12 rolls each and sells 95 rolls. How many are left? Show the steps.",
    "summary": """\
Summarise the passage in two sentences, with its own words where you can.

The old lighthouse at Carrow Point was built from grey granite in 1871, after three ships had been lost on the reef
in a single winter. Its lamp burned whale oil at first, then paraffin, and was turned by a clockwork that the keeper had
to wind every four hours. In 1962 the lamp was changed to electric light, and the last keeper left the tower two years
later. Today the lighthouse at Carrow Point is a small museum, and the clockwork is still wound once a year, on the day
it was first lit.""",
    "chat": "I have a free Saturday, a bicycle and about ten euros. What could I do with the day?",
}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser("demo", help=HELP, description=HELP)
    parser.add_argument(
        "-n",
        "--max-new-tokens",
        type=int,
        default=NEW_TOKENS,
        metavar="N",
        help="tokens per answer (default %(default)s)",
    )
    options.add_engine_flags(parser)
    options.add_output_flags(parser)
    parser.set_defaults(run=run)
    return parser


@dataclass(slots=True)
class Side:
    """One way of decoding: its answer, and its speed over all repeats (each answer's first token left out)."""

    result: GenerationResult | None = None
    tokens: int = 0
    seconds: float = 0.0

    def add(self, result: GenerationResult) -> None:
        self.result = self.result or result
        self.tokens += max(0, result.stats.new_tokens - 1)
        self.seconds += result.stats.decode_seconds

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def run(args: argparse.Namespace) -> int:
    from edgespec.decoding.params import SamplingParams

    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    output = stdout()
    totals = (Side(), Side())
    config = runtime.configured(args)
    with runtime.open_engine(args, config) as engine:
        output.line(runtime.describe(engine, config), dim=True)
        _warm_up(engine, dataclasses.replace(params, max_new_tokens=8))
        for domain, prompt in PROMPTS.items():
            output.line()
            output.line(f"[{domain}] {_question(prompt)}")
            output.line("answer:", dim=True)
            sides = _both_ways(engine, prompt, params, output)
            if sides is None:
                return INTERRUPTED
            output.line(_verdict(engine, prompt, params, *sides), dim=True)
            if args.stats and sides[1].result is not None:
                for row in report.details(sides[1].result.stats):
                    output.line(row, dim=True)
            for total, side in zip(totals, sides):
                total.tokens += side.tokens
                total.seconds += side.seconds
    output.line()
    output.line(f"All four: {_ratio(*totals)}.")
    return 0


def _question(prompt: str) -> str:
    """Its first line, and how much of it is not shown."""
    first, _, rest = prompt.partition("\n")
    return f"{first} (with a text of {len(rest.split())} words)" if rest.strip() else first


def _warm_up(engine: Engine, params: SamplingParams) -> None:
    for draft in ("off", "auto"):
        engine.use_draft(draft)
        engine.generate("Say hello, say hello, say hello.", params)


def _both_ways(engine: Engine, prompt: str, params: SamplingParams, output: Output) -> tuple[Side, Side] | None:
    """(plain, with drafts); the first answer with drafts is shown as it comes. None if Ctrl-C was pressed."""
    plain, drafted = Side(), Side()
    for repeat in range(REPEATS):
        for side, draft in ((drafted, "auto"), (plain, "off")):
            engine.use_draft(draft)
            with closing(engine.stream(prompt, params)) as stream, interrupt_calls(stream.cancel) as pressed:
                for delta in stream:
                    if side is drafted and repeat == 0:
                        output.write(delta.text)
                side.add(stream.result)
            output.fresh_line()
            if pressed.is_set():
                return None
    engine.use_draft("auto")
    return plain, drafted


def _verdict(engine: Engine, prompt: str, params: SamplingParams, plain: Side, drafted: Side) -> str:
    assert plain.result is not None
    assert drafted.result is not None
    stats = drafted.result.stats
    accepted = f"accepted {stats.acceptance_rate:.0%}" if stats.proposed_tokens else "nothing drafted"
    equality = _equality(engine, prompt, params, plain.result, drafted.result)
    return (
        f"-> drafts {report.draft_names(stats.draft_share)}; {accepted}; "
        f"{stats.mean_tokens_per_round:.2f} tokens/round; {_ratio(plain, drafted)}; {equality}"
    )


def _ratio(plain: Side, drafted: Side) -> str:
    ratio = f"{drafted.speed / plain.speed:.2f}x" if plain.speed and drafted.speed else "no ratio"
    return f"{drafted.speed:.1f} tokens/s, plain {plain.speed:.1f} tokens/s: {ratio}"


def _equality(
    engine: Engine, prompt: str, params: SamplingParams, plain: GenerationResult, drafted: GenerationResult
) -> str:
    """Whether both gave the same tokens; where not, the gap between the two best logits of the plain run there."""
    if plain.token_ids == drafted.token_ids:
        return "same tokens as plain decoding"
    pairs = zip(plain.token_ids, drafted.token_ids)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain.token_ids), len(drafted.token_ids)))
    engine.use_draft("off")
    again = engine.generate(prompt, dataclasses.replace(params, logprobs=1))
    engine.use_draft("auto")
    where = f"leaves plain decoding at token {position + 1}"
    if again.logprobs is None or position >= len(again.logprobs):
        return where
    return f"{where}, where its two best logits are {again.logprobs[position].margin:.4f} apart"
