"""Which sets of models on the hub fit this device, by the same numbers as the engine plans with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from drafts.hub_sets import HubModel, HubSet, SetFit, hub_sets
from edgespec.memory.plan import DraftNeed, MemoryPlan
from edgespec.models.footprint import Footprint
from edgespec.models.spec import required_tensors
from edgespec.models.weights.opening import WeightFile
from edgespec.models.weights.quantised import Layout

CONTEXT = 2048  # tokens that sets are planned for
_SUPER_BLOCK = 256  # numbers of a block of Q6_K


class _Headers:
    """Of a model that is not here: what a `WeightFile` tells without reading any weight.

    In 4 bits as llama.cpp quantises: everything in Q4_0, but the matrix that makes logits in Q6_K, or in Q8_0 where
    blocks of Q6_K do not fit its rows.
    """

    def __init__(self, model: HubModel) -> None:
        self.spec = model.spec
        self._shapes = required_tensors(model.spec)
        self._four_bits = model.build().name == "q4_0"
        self._head = "model.embed_tokens.weight" if model.spec.tie_embeddings else "lm_head.weight"

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def by_rows(self, name: str) -> bool:
        return True

    def layout(self, name: str) -> Layout | None:
        shape = self._shapes[name]
        if not self._four_bits or len(shape) != 2:
            return None
        if name != self._head:
            return Layout(4, 32, "symmetric")
        return Layout(8, 32, "symmetric") if shape[1] % _SUPER_BLOCK else None


def fitting(
    size_of: Callable[[WeightFile], Footprint],
    budget_of: Callable[[Footprint], int],
    *,
    context: int = CONTEXT,
    sets: Sequence[HubSet] | None = None,
) -> list[SetFit]:
    """How each set fits, in its preferred builds and with the drafts that it brings unasked.

    size_of: what the engine takes for a model. budget_of: bytes that may be used, also those that the engine's library
    takes when it starts.
    """
    return [_fit(each, size_of, budget_of, context) for each in (hub_sets() if sets is None else sets)]


def _fit(
    each: HubSet,
    size_of: Callable[[WeightFile], Footprint],
    budget_of: Callable[[Footprint], int],
    context: int,
) -> SetFit:
    def size(model: HubModel) -> Footprint:
        return size_of(cast(WeightFile, _Headers(model)))

    target, drafts = size(each.target), {draft.name: size(draft).slot(context) for draft in each.chosen()}
    beside, needs = {**target.before(), **target.beside(context)}, [DraftNeed(*pair) for pair in drafts.items()]
    plan = MemoryPlan(target.weights, beside, context, target.cache, needs, budget_of(target))
    return SetFit(each.name, plan.budget - plan.room, drafts, plan.budget, -1 if plan.refused else plan.slots)
