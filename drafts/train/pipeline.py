"""From prompts to a draft in four stages: answers, fit, calibrate, entry. Each goes on where an earlier run stopped.

All intermediate files are in the work folder: `corpus/` (answers with hidden states), `state.json` (configuration and
what is done), `fit.safetensors` (weights and optimizer). The draft's own folder appears whole, or not at all.

A table of phrases is not fitted but counted, in a second: of a work folder it uses the answers alone, so that it can
share the folder of another draft of the same prompts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafts.manifest import MANIFEST, Manifest
from drafts.train.config import TrainConfig, TrainTarget, check_name
from drafts.train.corpus import Binding, Corpus, Progress, make_requests
from drafts.train.errors import TrainingError, unwritable
from drafts.train.fitting import Ranks, ranks
from drafts.train.phrases import PhraseRecipe
from drafts.train.prompts import PromptSet, load_prompts
from edgespec.files import sha256_of, write_text
from edgespec.models.onnx.graph_version import GRAPH_VERSION

if TYPE_CHECKING:
    from drafts.train.calibrate import Calibration
    from drafts.train.fit import Example
    from drafts.train.fitting import Fitted
    from drafts.train.kinds import Recipe
    from drafts.train.writer import BatchWriter

_log = logging.getLogger(__name__)

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Result:
    """The finished draft. skipped: one line for each kind of prompt that was left out."""

    folder: Path
    manifest: Manifest
    calibration: Calibration
    fitted: Fitted
    skipped: list[str]


def train_draft(
    target: TrainTarget,
    files: Sequence[Path],
    out: Path,
    config: TrainConfig,
    *,
    work: Path | None = None,
    start: Path | None = None,
    exclude: Path | None = None,
    restart: bool = False,
    command: str = "",
    progress: Progress = lambda stage, done, total, note: None,
) -> Result | None:
    """Make the draft `out`. None in a process of `torchrun` other than the first.

    work: the folder for what is kept between runs, by default a hidden one beside `out`. start: folder of the draft to
    start from. restart: forget an earlier run with another configuration, and replace a draft that is there; answers
    that still fit are used again. Raises TrainingError, and what files and target raise, all with a sentence to act on.
    """
    from drafts.train.kinds import recipe_for

    with ranks(config.device) as where:
        _check_out(out, restart)
        for file in files if len(files) > 1 else ():
            check_name(f"{file}: the file's name is its group's, and", file.stem)
        positions = min(config.positions, target.weights.spec.max_positions)
        if positions <= config.max_new_tokens:
            raise TrainingError(
                f"{target.name}: {positions} positions have no room for {config.max_new_tokens} tokens."
            )
        recipe = recipe_for(target, config, start)
        prompts = load_prompts(
            files,
            target.encode,
            positions - config.max_new_tokens,
            domain=config.domain,
            exclude=exclude,
            limit=config.limit,
        )
        for line in prompts.skipped.lines() if where.first else ():
            _log.warning("skipped %s", line)
        run = _Run(
            target, config, work or out.parent / f".{out.name}.work", prompts, positions, recipe, where, progress
        )
        run.prepare(start, restart)
        examples = run.answers(restart)
        fitted = run.fit(examples)
        if not where.first:
            where.wait()
            return None
        calibration = run.calibrate(examples)
        manifest = run.entry(out, calibration, fitted, start, command)
        where.wait()
        return Result(out, manifest, calibration, fitted, prompts.skipped.lines())


class _Run:
    """One training with its work folder."""

    def __init__(
        self,
        target: TrainTarget,
        config: TrainConfig,
        work: Path,
        prompts: PromptSet,
        positions: int,
        recipe: Recipe | PhraseRecipe,
        where: Ranks,
        progress: Progress,
    ) -> None:
        self.target, self.config, self.work, self.prompts = target, config, work, prompts
        self.recipe, self.where = recipe, where
        self.progress: Progress = progress if where.first else lambda stage, done, total, note: None
        self._positions = positions
        requests = make_requests(
            prompts, max_new_tokens=config.max_new_tokens, sampled=config.sampled, seed=config.seed
        )
        binding = Binding(
            target.weights.fingerprint(),
            target.tokenizer.fingerprint(),
            GRAPH_VERSION,
            {
                "max_new_tokens": config.max_new_tokens,
                "batch": config.batch,
                "positions": positions,
                "device": config.device,
                "dtype": config.dtype,
                "eos_ids": list(target.eos_ids),
            },
            target.weights.spec.hidden_size,
            config.window,
        )
        self.corpus = Corpus(work / "corpus", binding, requests, hidden=not isinstance(recipe, PhraseRecipe))
        self._identity: dict[str, Any] = {}
        self._bound = ""
        self._updates = 0

    def prepare(self, start: Path | None, restart: bool) -> None:
        """Refuse a work folder of another configuration; write down the one of this run. Not for phrases."""
        identity = {
            "target": self.target.weights.fingerprint(),
            "tokenizer": self.target.tokenizer.fingerprint(),
            "prompts": _digest(self.prompts),
            "from": sha256_of(start / MANIFEST) if start else "",
            **asdict(self.config),
        }
        self._identity = json.loads(json.dumps(identity))
        self._bound = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()
        if not self.where.first or isinstance(self.recipe, PhraseRecipe):
            return
        file = self.work / "state.json"
        saved = _saved_state(file)
        changed = [name for name, value in self._identity.items() if saved and saved.get(name) != value]
        if changed and not restart:
            details = ", ".join(f"{n} ({_short(saved.get(n))} then, {_short(self._identity[n])} now)" for n in changed)
            raise TrainingError(
                f"{self.work}: belongs to a training with another configuration: {details}. Give the same flags to go "
                "on with it, another --work, or --restart to begin anew (answers that still fit are used again)."
            )
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            if restart:
                self._checkpoint.unlink(missing_ok=True)
            write_text(file, json.dumps({"format": _FORMAT, "configuration": self._identity}, indent=1))
        except OSError as error:
            raise unwritable(file, error, "Nothing was changed.") from error

    @property
    def _checkpoint(self) -> Path:
        return self.work / "fit.safetensors"

    def answers(self, restart: bool) -> dict[str, Example]:
        """Stage 1 (and 2): the target's answers with its hidden states."""
        if self.where.first:
            self.corpus.write(self._writer, self.progress, restart=restart)
        self.where.wait()
        return self.corpus.examples(self.progress)

    def _writer(self) -> BatchWriter:
        import torch

        from drafts.train.writer import BatchWriter

        config = self.config
        return BatchWriter(
            self.target.weights,
            eos_ids=self.target.eos_ids,
            token_count=self.target.tokenizer.size,
            batch=config.batch,
            positions=self._positions,
            window=config.window,
            device=config.device,
            dtype=getattr(torch, config.dtype),
        )

    def fit(self, examples: dict[str, Example]) -> Fitted:
        """Stage 3: the weights, or the counts."""
        from drafts.train.fitting import run_fit

        held = {prompt.key for prompt in self.prompts.held_out}
        taught = {key: example for key, example in examples.items() if key not in held and example.anchors > 1}
        if not taught:
            raise TrainingError(f"{self.target.name} ends every answer at once; these prompts teach a draft nothing.")
        if isinstance(self.recipe, PhraseRecipe):
            return self.recipe.count(taught, self.progress)
        train = list(taught.values())
        total = sum(example.anchors for example in train)
        updates = self.config.updates or max(1, round(total * self.config.epochs / self.config.tokens_per_update))
        self._updates = updates
        fit = self.recipe.prepare(train, updates, self.where)
        bound = hashlib.sha256(f"{self._bound}:{self.corpus.digest}".encode()).hexdigest()
        return run_fit(fit, self._checkpoint, bound, self.progress, alone=self.where)

    def calibrate(self, examples: dict[str, Example]) -> Calibration:
        """Stage 4: the temperature, with the weights as they will be shipped."""
        from drafts.train.calibrate import calibrate

        held = [examples[prompt.key] for prompt in self.prompts.held_out if examples[prompt.key].anchors > 1]
        self.progress("calibrate", 0, 1, "")
        recipe = self.recipe
        found = recipe.calibration(held) if isinstance(recipe, PhraseRecipe) else calibrate(recipe.judged(held))
        self.progress("calibrate", 1, 1, f"temperature {found.temperature:.2f}, error {found.after:.3f}")
        return found

    def entry(self, out: Path, calibration: Calibration, fitted: Fitted, start: Path | None, command: str) -> Manifest:
        """Stage 5: the draft's folder, built out of sight, measured, and put in place."""
        from drafts.train.entry import make_manifest, measured

        config, recipe = self.config, self.recipe
        hidden = out.parent / f".{out.name}.new"
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir()
            recipe.write(hidden)
            manifest = make_manifest(
                hidden,
                self.target,
                config,
                recipe,
                self.corpus,
                self.prompts,
                calibration=calibration,
                fitted=fitted,
                updates=self._updates,
                start=start.name if start else "",
                command=command,
            )
            found = measured(hidden, self.target, config, recipe, self.prompts, calibration.temperature, self.progress)
            manifest = replace(manifest, acceptance=found)
            manifest.write(hidden)
            _put_in_place(hidden, out)
        except OSError as error:
            raise unwritable(out, error, f"The fitted weights stay in {self.work}.") from error
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        return manifest


def _digest(prompts: PromptSet) -> str:
    texts = [[p.key, p.text, p.source, p.licence] for p in (*prompts.train, *prompts.held_out)]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _check_out(out: Path, restart: bool) -> None:
    """Nothing that is no draft is ever replaced, and a draft only when asked."""
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST).exists()):
        raise TrainingError(f"{out}: exists and is no draft; give --out a folder that is not there yet.")
    if (out / MANIFEST).exists() and not restart:
        raise TrainingError(f"{out}: there is a draft already; give another --out, or --restart to replace it.")


def _put_in_place(hidden: Path, out: Path) -> None:
    old = out.parent / f".{out.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    try:
        hidden.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _saved_state(file: Path) -> dict[str, Any]:
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        configuration = saved["configuration"]
        if saved["format"] != _FORMAT or not isinstance(configuration, dict):
            raise ValueError
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        _log.warning("%s is damaged; what is left of that training is checked by its own marks", file)
        return {}
    return configuration


def _short(value: Any) -> str:
    return str(value) if len(str(value)) <= 24 else f"{str(value)[:12]}..."
