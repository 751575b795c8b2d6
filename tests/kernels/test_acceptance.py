"""Greedy and rejection acceptance over a block, on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgespec.kernels import ops, reference
from tests.kernels.cases import generator, normal, tuned


def greedy(logits: Tensor, proposed: list[int]) -> list[int]:
    """(accepted, next token) of one block."""
    tokens = torch.tensor([[0, *proposed]], dtype=torch.int64, device=logits.device)
    begins, ends = torch.zeros_like(tokens[:, 0]), torch.full_like(tokens[:, 0], len(proposed))
    return list(ops.accept_greedy(ops.best_tokens(logits)[None], tokens, begins, ends)[0].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 17])
def test_greedy_stops_at_the_first_difference(
    rows: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, {"sampling": {"chunk": 64}})
    logits = normal(rows, rows, 131, dtype=dtype, device=device)
    best = logits.cpu().float().numpy().argmax(axis=1).tolist()
    assert greedy(logits, best[:-1]) == [rows - 1, best[-1]]
    for wrong in {0, rows // 2, rows - 2} & set(range(rows - 1)):
        guesses = [*best[:wrong], (best[wrong] + 1) % 131, *best[wrong + 1 : -1]]
        assert greedy(logits, guesses) == [wrong, best[wrong]]


def test_of_equal_logits_the_lowest_token_wins(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, {"sampling": {"chunk": 16}})
    logits = torch.zeros(1, 70, device=device)
    assert greedy(logits, []) == [0, 0]
    logits[0, [50, 33, 34]] = 1.0
    assert greedy(logits, []) == [0, 33]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["triton", "torch"])
def test_a_row_that_cannot_be_used_gives_no_token(
    bad: float, side: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, {"sampling": {"chunk": 16}})
    ops.use("triton" if side == "triton" else "torch")
    logits = normal(1, 3, 40, device=device)
    best = logits.argmax(dim=1).tolist()
    logits[1, 37] = bad
    assert greedy(logits, best[:2]) == [1, -1]
    assert greedy(logits, [best[0] ^ 1, 0]) == [0, best[0]]  # a bad row behind the cut does not matter
    assert greedy(torch.full((1, 40), float("-inf"), device=device), []) == [0, -1]


@pytest.mark.parametrize("side", ["triton", "torch"])
def test_a_guess_that_is_no_token_never_stands(side: str, device: torch.device) -> None:
    """Not even before a damaged row, whose own token is -1 too, or where the first and the last token are likely."""
    ops.use("triton" if side == "triton" else "torch")
    logits = normal(1, 3, 40, device=device)
    best = logits.argmax(dim=1).tolist()
    logits[1, 37] = float("nan")
    assert greedy(logits, [best[0], -1]) == [1, -1]
    p = torch.zeros(2, 20, device=device)
    p[:, 0] = p[:, 19] = 0.5
    for q in (None, p[:1]):
        proposed, uniforms = torch.tensor([-1], device=device), torch.tensor([0.25, 0.75], device=device)
        assert ops.accept_sampled(p, q, proposed, uniforms).tolist() == [0, 19]


def distributions(seed: int, rows: int, vocabulary: int, device: torch.device, sharp: float = 3.0) -> Tensor:
    return torch.softmax(normal(seed, rows, vocabulary) * sharp, dim=-1).to(device)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 6])
def test_sampled_is_the_reference(
    rows: int, one_hot: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, {"sampling": {"chunk": 32}})
    seen = set()
    for seed in range(5):
        p = distributions(seed, rows, 101, device, sharp=7.0 if one_hot else 3.0)
        q = distributions(seed, rows, 101, device, sharp=2.0)[: rows - 1]  # likes what p likes, less so
        drawn = [int(torch.multinomial(row.cpu(), 1, generator=generator(seed))) for row in q]
        proposed = p[:-1].argmax(dim=1) if one_hot else torch.tensor(drawn, dtype=torch.int64, device=device)
        uniforms = torch.rand(rows, generator=generator(seed + 50)).to(device)
        given = None if one_hot else q
        result = ops.accept_sampled(p, given, proposed, uniforms).tolist()
        exact = reference.accept_sampled(p.double(), None if one_hot else q.double(), proposed, uniforms).tolist()
        assert result == exact
        seen.add(result[0])
    assert rows == 1 or len(seen) > 1, "the cases must reach rejection at several places"


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24])
def test_the_ends_of_a_distribution_are_tokens_that_can_be_drawn(
    uniform: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(monkeypatch, {"sampling": {"chunk": 16}})
    p = torch.zeros(1, 90, device=device)
    p[0, 21:70] = 1 / 49
    none = torch.zeros(0, dtype=torch.int64, device=device)
    token = ops.accept_sampled(p, None, none, torch.tensor([uniform], device=device)).tolist()[1]
    assert token == (21 if uniform == 0.0 else 69)


def test_a_certain_guess_that_falls_is_not_drawn_again(device: torch.device) -> None:
    p = torch.zeros(2, 20, device=device)
    p[0, 4], p[0, 9] = 0.75, 0.25
    proposed = torch.tensor([4], device=device)
    for u in (0.0, 0.4, 0.99):
        uniforms = torch.tensor([0.8, u], device=device)
        assert ops.accept_sampled(p, None, proposed, uniforms).tolist() == [0, 9]


def test_a_rejection_that_leaves_nothing_draws_from_the_target(device: torch.device) -> None:
    """Only rounding gets there: here a guess outside the vocabulary, with q equal to p."""
    p = torch.zeros(2, 20, device=device)
    p[0, 7] = 1.0
    result = ops.accept_sampled(p, p[:1], torch.tensor([25], device=device), torch.tensor([0.5, 0.5], device=device))
    assert result.tolist() == [0, 7]
    result = ops.accept_sampled(p[1:], None, result[:0], torch.tensor([0.5], device=device))
    assert result.tolist() == [0, -1]


def law(p: Tensor, q: Tensor, rule: object = reference.accept_sampled, steps: int = 40) -> Tensor:
    """The distribution of the first token under `rule`, over a fine grid of uniforms and all guesses drawn from q."""
    total = torch.zeros(p.shape[1], dtype=torch.float64)
    grid = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    for guess, chance in enumerate(q[0].tolist()):
        proposed = torch.tensor([guess])
        for u in grid:
            for v in grid:
                accepted, token = rule(p, q, proposed, torch.stack((u, v))).tolist()  # type: ignore[operator]
                total[guess if accepted else token] += chance / steps**2
                if accepted:
                    break
            if accepted:  # the second uniform does not matter: count the rest of its column at once
                total[guess] += chance * (steps - 1) / steps**2
    return total


def test_the_rule_has_the_targets_law_and_a_sabotaged_one_has_not() -> None:
    p, q = torch.tensor([[0.5, 0.2, 0.3], [1, 0, 0]]).double(), torch.tensor([[0.2, 0.7, 0.1]]).double()
    assert torch.allclose(law(p, q, steps=20), p[0], atol=0.03)

    def sabotaged(p: Tensor, q: Tensor, proposed: Tensor, uniforms: Tensor) -> Tensor:
        return reference.accept_sampled(p, q.sqrt(), proposed, uniforms)

    assert not torch.allclose(law(p, q, sabotaged, steps=20), p[0], atol=0.06)


@pytest.mark.parametrize("side", ["triton", "torch"])
def test_several_blocks_at_once(side: str, device: torch.device) -> None:
    """Blocks that begin and end at other rows, and one that only fills the shape up; against counting by hand."""
    ops.use("triton" if side == "triton" else "torch")
    drawn, seen = generator(3), set()
    for _ in range(20):
        best = torch.randint(-1, 3, (5, 7), generator=drawn)
        tokens = torch.randint(-1, 3, (5, 7), generator=drawn)
        tokens[:, 1:] = torch.where(torch.rand(5, 6, generator=drawn) < 0.8, best[:, :-1], tokens[:, 1:])
        begins, ends = [0, 2, 3, 0, 6], [6, 5, 3, 0, 6]
        made = ops.accept_greedy(
            *(each.to(device) for each in (best, tokens, torch.tensor(begins), torch.tensor(ends)))
        )
        for sequence, (begin, end) in enumerate(zip(begins, ends)):
            row = begin
            while row < end and tokens[sequence, row + 1] == best[sequence, row] >= 0:
                row += 1
            assert made[sequence].tolist() == [row - begin, best[sequence, row]]
            seen.add(row - begin)
    assert len(seen) > 2
