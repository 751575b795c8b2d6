"""Running a fit to its end: checkpoints from which it goes on bit for bit, a stop when it diverges, several devices."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from drafts.train.errors import TrainingError, unwritable
from drafts.train.fit import Diverged
from edgespec.files import write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from drafts.train.corpus import Progress
    from drafts.train.fit import HeadFit

_log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 60.0
_WORSE = 4.0  # times the first loss (which grows with the steps, at most 2.5 times): the training has run away
_NEWEST = 0.05  # share of the newest update in the means shown


@dataclass(slots=True)
class Fitted:
    """What a fit came to. loss, accuracy: running means at its end. seconds: of all runs together."""

    loss: float = math.nan
    accuracy: float = math.nan
    seconds: float = 0.0
    first_loss: float = math.nan

    def see(self, seen: Mapping[str, float]) -> None:
        """Take in one update."""
        share = max(_NEWEST, 1 / seen["update"])
        old = (0.0, 0.0) if math.isnan(self.loss) else (self.loss, self.accuracy)
        self.loss = old[0] + share * (seen["loss"] - old[0])
        self.accuracy = old[1] + share * (seen["accuracy"] - old[1])
        self.first_loss = seen["loss"] if math.isnan(self.first_loss) else self.first_loss


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that `torchrun` started; alone without it."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            torch.distributed.barrier()

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """This process' part of `items`, about as many for each; all where there are too few to go round."""
        return items[self.rank :: self.world] if len(items) >= 4 * self.world else items

    def same_start(self, module: torch.nn.Module) -> None:
        """Give all processes the first one's weights."""
        for value in module.parameters() if self.world > 1 else ():
            torch.distributed.broadcast(value.data, 0)

    def average(self, module: torch.nn.Module) -> None:
        """Replace each gradient by the mean over the processes."""
        for value in module.parameters() if self.world > 1 else ():
            if value.grad is not None:
                torch.distributed.all_reduce(value.grad)
                value.grad /= self.world


@contextmanager
def ranks(device: str) -> Iterator[Ranks]:
    """The processes that train together, joined for the time of the block."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # The others wait while the first one writes answers, which may take hours.
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(days=2))
    try:
        yield Ranks(torch.distributed.get_rank(), world)
    finally:
        torch.distributed.destroy_process_group()


def run_fit(
    fit: HeadFit,
    file: Path,
    bound: str,
    progress: Progress,
    *,
    alone: Ranks | None = None,
) -> Fitted:
    """Do the updates that are left and return how it went; `file` holds the state, the finished one too.

    bound: what the state depends on; a checkpoint of something else, or a damaged one, is not used (one warning).
    Raises TrainingError when the loss is no number or runs away (the checkpoint before it stays), and when the disk is
    full.
    """
    where = alone or Ranks()
    total = fit.config.updates
    done = _restore(fit, file, bound)
    where.same_start(fit.module)
    begin = saved_at = time.monotonic()
    before = done.seconds

    def seen(values: Mapping[str, float]) -> None:
        nonlocal saved_at
        done.see(values)
        number, now = int(values["update"]), time.monotonic()
        done.seconds = before + now - begin
        if values["loss"] > _WORSE * max(done.first_loss, math.log(len(fit._rows))):
            raise Diverged(f"the loss went from {done.first_loss:.2f} to {values['loss']:.2f} at update {number}")
        if where.first and (now - saved_at >= CHECKPOINT_SECONDS or number == total):
            _save(fit, file, bound, done, number)
            saved_at = time.monotonic()
        progress("fit", number, total, f"loss {done.loss:.3f}, first token right {done.accuracy:.0%}")

    try:
        fit.run(seen)
    except Diverged as error:
        kept = f"The last good state is in {file}." if file.exists() else "There was no checkpoint before it."
        raise TrainingError(
            f"the training diverged: {error}. {kept} Train again with a lower --learning-rate and --restart; the "
            "answers stay."
        ) from error
    return done


def _save(fit: HeadFit, file: Path, bound: str, done: Fitted, number: int) -> None:
    state = fit.state() | {"update": torch.tensor(number)}
    state = {name: value.cpu().contiguous() for name, value in state.items()}
    if not all(bool(torch.isfinite(value).all()) for value in state.values()):
        raise Diverged(f"the weights are no numbers after update {number}")
    facts = {"loss": done.loss, "accuracy": done.accuracy, "seconds": done.seconds, "first_loss": done.first_loss}
    metadata = {"bound": bound, "digest": _digest(state), "facts": json.dumps(facts)}
    try:
        write_bytes(file, save(state, metadata=metadata))
    except OSError as error:
        raise unwritable(file, error, "The answers and the last checkpoint stay.") from error


def _restore(fit: HeadFit, file: Path, bound: str) -> Fitted:
    for left in file.parent.glob(f".{file.name}.*"):  # of a write that was killed
        left.unlink(missing_ok=True)
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return Fitted()
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read ({error.strerror}).") from error
    try:
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length])["__metadata__"]
        state = load(content)
        if metadata["digest"] != _digest(state):
            raise ValueError("its content has changed")
        facts = json.loads(metadata["facts"])
        found = Fitted(facts["loss"], facts["accuracy"], facts["seconds"], facts["first_loss"])
    except Exception as error:  # safetensors raises classes of its own
        _log.warning("%s is damaged (%s); the fit starts again", file, str(error)[:100])
        return Fitted()
    if metadata["bound"] != bound:
        _log.warning("%s belongs to other answers or settings; the fit starts again", file)
        return Fitted()
    fit.load(state)
    return found


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name}:{tuple(tensors[name].shape)}:{tensors[name].dtype}".encode())
        digest.update(tensors[name].cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# Called with the module after every backward pass; see `HeadFit`.
Reduce = Callable[[Any], None]
