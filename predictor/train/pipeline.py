"""`edgespec predictor train`: from folders of traces to a ranker's file with its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from predictor.files import write_whole
from predictor.ranker import Ranker, RankerInfo
from predictor.train.export import ranker_bytes
from predictor.train.figures import evaluate
from predictor.train.fit import FitConfig, Fitted, fit
from predictor.train.samples import GROUPS, PROMPT, RECENTLY, Corpus, Samples, read_corpus, split

HELD_OUT = 0.2  # of each domain's texts: for the figures alone
STOPPING = 0.15  # of the others: they say when the fit ends
MOST_KEYS = 10_000  # of texts that a ranker's file lists as seen
_KEY = 8  # hex digits of each

ABLATIONS = {
    "prompt": PROMPT,
    "recent": RECENTLY,
    "prompt and recent": (*PROMPT, *RECENTLY),
    "all": tuple(GROUPS),
}


@dataclass(frozen=True, slots=True)
class Made:
    """A ranker that was made. figures: of `figures.evaluate` on held-out texts; ablations: by what it may see."""

    path: Path
    figures: dict[str, Any]
    ablations: dict[str, Any]
    seconds: float


def train_ranker(
    folders: Sequence[Path],
    out: Path,
    config: FitConfig | None = None,
    *,
    ablate: bool = False,
    command: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> Made:
    """Train on the folders' texts, write `out`, and judge the file that was written on texts it has not seen.

    ablate: also train one ranker for each part of the input alone. Raises TraceError, OSError, ValueError for too few
    texts.
    """
    begin = time.monotonic()
    config = config or FitConfig()
    corpus = read_corpus(folders)
    rest, held_out = split(corpus.texts, HELD_OUT, config.seed)
    training, stopping = split(rest, STOPPING, config.seed + 1)
    if not (training and stopping and held_out):
        raise ValueError(
            f"{len(corpus.texts)} texts are too few to train and to judge a ranker: "
            "record some 10 of every domain at least"
        )
    progress(f"{len(training)} texts to train on, {len(stopping)} to stop by, {len(held_out)} held out")
    fitted = fit(corpus, training, stopping, config, progress=progress)
    progress(f"kept: pass {fitted.best + 1}, {fitted.losses[fitted.best]:.4f} bits a token")
    info = _info(corpus, rest, config, fitted, time.monotonic() - begin, command)
    write_whole(out, ranker_bytes(info, fitted.layers))
    found = evaluate(corpus, held_out, Ranker.load(out, target=corpus.target).rates)
    ablations = _ablations(corpus, training, stopping, held_out, config, out, progress) if ablate else {}
    return Made(out, found, ablations, time.monotonic() - begin)


def _info(
    corpus: Corpus, seen: Sequence[Samples], config: FitConfig, fitted: Fitted, seconds: float, command: str
) -> RankerInfo:
    domains: dict[str, int] = {}
    for text in seen:
        domains[text.domain] = domains.get(text.domain, 0) + 1
    return RankerInfo(
        target=corpus.target,
        target_name=corpus.target_name,
        hidden_size=corpus.layout.hidden_size,
        horizon=corpus.horizon * corpus.stride,
        drafts=corpus.drafts,
        training={
            "command": command,
            "config": {**asdict(config), "units": list(config.units)},
            "texts": domains,
            "passes": fitted.best + 1,
            "bits": round(min(fitted.losses), 4),
            "seconds": round(seconds, 1),
            "seen": "".join(text.key[:_KEY] for text in seen[:MOST_KEYS]),
        },
    )


def unseen(info: RankerInfo, texts: Sequence[Samples]) -> list[Samples]:
    """The texts that a ranker was not made with, as far as its file says."""
    listed = info.training.get("seen", "")
    keys = {listed[at : at + _KEY] for at in range(0, len(listed), _KEY)} if isinstance(listed, str) else set()
    return [text for text in texts if text.key[:_KEY] not in keys]


def _ablations(
    corpus: Corpus,
    training: Sequence[Samples],
    stopping: Sequence[Samples],
    held_out: Sequence[Samples],
    config: FitConfig,
    out: Path,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Figures of rankers that were trained to see only parts of the input."""
    found = {}
    file = out.with_name(f".{out.name}.ablation")
    try:
        for name, groups in ABLATIONS.items():
            progress(f"only {name}")
            fitted = fit(corpus, training, stopping, config, groups=groups)
            write_whole(file, ranker_bytes(_info(corpus, (), config, fitted, 0.0, ""), fitted.layers))
            figures = evaluate(corpus, held_out, Ranker.load(file).rates)
            found[name] = figures["inputs"]["all" if "acceptance" in groups else "prompt and recent"]
    finally:
        file.unlink(missing_ok=True)
    return found
