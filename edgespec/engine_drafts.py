"""The drafts of an engine, and the working set that holds them, which is made anew when one is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgespec.draft_costs import cost_name
from edgespec.errors import DraftError, EdgespecError, MemoryBudgetError
from edgespec.memory.working_set import DraftState, State
from edgespec.residency import HeldDrafts, hold_drafts

if TYPE_CHECKING:
    from drafts.manifest import Manifest
    from edgespec.config import RuntimeConfig
    from edgespec.decoding.session import DraftStatus
    from edgespec.draft_loading import LoadedDraft
    from edgespec.loading import Target
    from edgespec.telemetry.trace import NullTracer, Tracer

_ROUND_SECONDS = 60.0  # the longest that a round is waited for which uses drafts that have to go


class EngineDrafts:
    """statuses, manifests: by name, in the order in which they were added. held: None until `hold`.

    owner: see `HeldDrafts`.
    """

    def __init__(
        self, config: RuntimeConfig, target: Target, tracer: Tracer | NullTracer, owner: Callable[[], object]
    ) -> None:
        self._config, self._target, self._tracer, self._owner = config, target, tracer, owner
        self.statuses: dict[str, DraftStatus] = {}
        self.manifests: dict[str, Manifest] = {}
        self.held: HeldDrafts | None = None

    def add(self, loaded: LoadedDraft) -> None:
        status, manifest = loaded.status, loaded.manifest
        self.statuses = {**self.statuses, status.name: status}  # another thread may go through them
        self._target.costs.file_under(status.name, cost_name(status.draft))
        if manifest is not None:
            self.manifests[status.name] = manifest

    def weighty(self, name: str) -> bool:
        """Whether this is a draft whose weights come and go."""
        return name in self.statuses and self.statuses[name].loadable

    def hold(self, *, wait: bool = True, resident: int | None = None) -> HeldDrafts:
        """Make the working set of all drafts there are now (again, if there was one), which loads what it begins with.

        wait: until that is there. resident: another number of drafts than what the configuration says. What the one
        before has lent, this one lends from its beginning.
        """
        before = None if self.held is None else self.held.working_set
        if self.held is not None:
            self.held.close(_ROUND_SECONDS)  # what a round still uses would be held twice, or by nobody
        lent = before is not None and before.lent
        config = self._config if resident is None else self._config.replace(resident=resident)
        statuses = list(self.statuses.values())
        self.held = held = hold_drafts(
            config, self._target, statuses, self.manifests, self._tracer, owner=self._owner, wait=wait, lent=lent
        )
        if lent and before is not None and not before.lent:  # it was given back meanwhile, to the one that was known
            held.working_set.take_back("no memory is lent any more")
        return held

    def hold_one_more(self, loaded: LoadedDraft) -> None:
        """Add a draft, and make the working set again; without the draft, if that cannot be."""
        self.add(loaded)
        status = loaded.status
        if not status.loadable:
            return
        had_room = self.held is None or not self.held.no_room
        try:
            held = self.hold()
            if held.no_room and had_room:
                raise MemoryBudgetError(held.no_room)
        except Exception as error:
            status.failed(error if isinstance(error, EdgespecError) else DraftError(f"it cannot be held: {error}"))
            self._hold_the_others()
        except BaseException:  # Ctrl-C: as if it had never been asked for
            self.statuses = {name: each for name, each in self.statuses.items() if each is not status}
            self.manifests.pop(status.name, None)
            self._hold_the_others(wait=False)
            raise

    def _hold_the_others(self, *, wait: bool = True) -> None:
        """The working set as it was; if that cannot be had any more, one without slots, which says why."""
        try:
            self.hold(wait=wait)
        except Exception as error:
            self.hold(resident=0).no_room = str(error)

    def in_words(self) -> dict[str, str]:
        """Name -> what a user wants to know about a draft: can it run now, and if not, why."""
        if self.held is None:
            return {name: str(status) for name, status in self.statuses.items()}
        states, no_room = self.held.working_set.states(), self.held.no_room
        return {name: _in_words(status, states.get(name), no_room) for name, status in self.statuses.items()}

    def why_not(self, name: str) -> str:
        """In words, why a draft cannot be used, after it was waited for."""
        words = self.in_words()[name]
        if self.held is None or not self.weighty(name) or words.startswith("failed"):
            return words
        if self.held.working_set.lent:
            return f"{words}, as the memory of drafts holds keys and values while many requests run"
        if not self.held.working_set.capacity:
            return f"{words}, as memory is too short to hold drafts"
        return f"{words}, as it could not be loaded in time"


def _in_words(status: DraftStatus, state: DraftState | None, no_room: str) -> str:
    if not status.active or not status.loadable:
        return str(status)
    if no_room:
        return f"failed: {no_room}"
    if state is None:  # the working set with it is being made
        return State.COLD.value
    if state.state is State.FAILED:
        return f"failed: {state.reason}"
    return "active" if state.state is State.RESIDENT else state.state.value
