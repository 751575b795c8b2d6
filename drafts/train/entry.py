"""The draft as an entry of the zoo: its manifest, and the acceptance measured with the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafts.evaluate import Trajectory
from drafts.manifest import MANIFEST, Acceptance, Confidence, DataSource, FileInfo, Manifest, TargetBuild, Training
from drafts.recording import record
from drafts.train.measure import acceptance
from edgespec.models.onnx.graph_version import GRAPH_VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from drafts.train.calibrate import Calibration
    from drafts.train.config import TrainConfig, TrainTarget
    from drafts.train.corpus import Corpus, Progress
    from drafts.train.fitting import Fitted
    from drafts.train.kinds import Product
    from drafts.train.prompts import Prompt, PromptSet

_MOST_SOURCES = 200


def make_manifest(
    folder: Path,
    target: TrainTarget,
    config: TrainConfig,
    recipe: Product,
    corpus: Corpus,
    prompts: PromptSet,
    *,
    calibration: Calibration,
    fitted: Fitted,
    updates: int,
    start: str,
    command: str,
) -> Manifest:
    """What is known before anything is measured. folder: with the draft's files."""
    from importlib.metadata import version

    import torch

    spec = target.weights.spec
    how = "counted in" if config.kind == "phrases" else "fitted to"
    files = {path.name: FileInfo.of(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    return Manifest(
        name=config.name,
        kind=config.kind,
        domain=config.domain,
        description=f"{how} {corpus.answer_tokens} tokens of {target.name}'s own answers ({config.domain})",
        licence=config.licence,
        dtype=recipe.dtype,
        target=TargetBuild(
            target.name,
            target.weights.fingerprint(),
            target.tokenizer.fingerprint(),
            spec.hidden_size,
            spec.vocab_size,
            GRAPH_VERSION,
            (target.measured_with,),
            target.weights.model_fingerprint(),
        ),
        files=files,
        architecture=recipe.architecture(),
        confidence=Confidence(round(calibration.temperature, 4), round(calibration.after, 4)),
        training=Training(
            command,
            config.seed,
            corpus.answer_tokens,
            updates,
            round(fitted.seconds, 1),
            start,
            {"torch": torch.__version__, "edgespec": version("edgespec")},
        ),
        data=data_sources(prompts),
    )


def data_sources(prompts: PromptSet) -> tuple[DataSource, ...]:
    """Where the prompts came from; of very many sources the smallest are put together by licence."""
    counts = sorted(prompts.sources().items(), key=lambda item: (-item[1], item[0]))
    listed = [DataSource(_line(source), _line(licence), count) for (source, licence), count in counts[:_MOST_SOURCES]]
    rest: dict[str, int] = {}
    for (_, licence), count in counts[_MOST_SOURCES:]:
        rest[licence] = rest.get(licence, 0) + count
    others = [DataSource("others", _line(licence), count) for licence, count in list(rest.items())[:40]]
    return (*listed, *others)


def measured(
    folder: Path,
    target: TrainTarget,
    config: TrainConfig,
    recipe: Product,
    prompts: PromptSet,
    temperature: float,
    progress: Progress,
) -> dict[str, Acceptance]:
    """Acceptance by group, on held-out prompts answered by the engine itself."""
    groups = {group: _picked(prompts, group, config.measured) for group in prompts.groups}
    total = sum(map(len, groups.values()))
    longest = max(len(prompt.ids) for picked in groups.values() for prompt in picked) + config.max_new_tokens
    decoder = target.decoder(longest)
    try:
        draft = recipe.draft(folder, config.name, temperature, decoder)
        try:
            found, done = {}, 0
            for group, picked in groups.items():
                trajectories: list[Trajectory] = []
                for prompt in picked:
                    trajectories.append(
                        record(
                            decoder,
                            prompt.ids,
                            config.max_new_tokens,
                            eos_ids=target.eos_ids,
                            token_count=target.tokenizer.size,
                            window=config.window,
                        )
                    )
                    done += 1
                    progress("measure", done, total, group)
                found[group] = acceptance(draft, trajectories, group, seed=config.seed)
            return found
        finally:
            draft.close()
    finally:
        decoder.close()


def _picked(prompts: PromptSet, group: str, count: int) -> list[Prompt]:
    return [prompt for prompt in prompts.held_out if prompt.group == group][:count]


def _line(text: str) -> str:
    """`text` as a manifest takes it: one printable line."""
    line = "".join(character if character.isprintable() else " " for character in text).strip()
    return line[:300] or "unknown"
