"""Fidelity: the numbers for rows that are known, over decoders that return them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from edgespec.bench import fidelity
from edgespec.errors import PromptError
from edgespec.models.base import ForwardOutput


class RowDecoder:
    """Logits and hidden states by token id, whatever the position; checks that its cache is filled in order."""

    def __init__(self, logits, hidden):
        self.logits, self.hidden = np.asarray(logits, np.float32), np.asarray(hidden, np.float32)
        self.read: list[list[int]] = []

    def new_cache(self, capacity=None):
        self.read.append([])
        return self.read[-1]

    def forward(self, tokens, cache, *, logits=None, hidden=False):
        cache.extend(tokens)
        return ForwardOutput(self.logits[list(tokens)], self.hidden[list(tokens)])


def test_known_rows():
    reference = RowDecoder(np.log([[0.5, 0.5], [0.9, 0.1]]), [[1, 0], [0, 2]])
    decoder = RowDecoder(np.log([[0.75, 0.25], [0.2, 0.8]]), [[5, 0], [2, 2]])
    found = fidelity.compare(reference, decoder, [[0, 1], [0]]).to_dict()
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    second = 0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8)
    assert found["positions"] == 3
    assert found["kl_mean"] == pytest.approx((2 * first + second) / 3, rel=1e-5)
    assert found["kl_max"] == pytest.approx(second, rel=1e-5)
    assert found["top1_agreement"] == pytest.approx(2 / 3)
    assert found["cosine_mean"] == pytest.approx((2 + math.sqrt(0.5)) / 3)
    assert found["cosine_min"] == pytest.approx(math.sqrt(0.5))


def test_equal_decoders_are_equal_and_a_scaled_one_is_not():
    rng = np.random.default_rng(0)
    logits, hidden = rng.normal(size=(9, 30)) * 9, rng.normal(size=(9, 4))
    same = fidelity.compare(RowDecoder(logits, hidden), RowDecoder(logits, hidden), [range(9)]).to_dict()
    assert (same["kl_max"], same["top1_agreement"]) == (0.0, 1.0)
    assert same["cosine_min"] == pytest.approx(1.0)
    other = fidelity.compare(RowDecoder(logits, hidden), RowDecoder(logits * 1.5, hidden), [range(9)]).to_dict()
    assert other["kl_mean"] > 0.01
    assert other["top1_agreement"] == 1.0


def test_every_sequence_is_read_whole_in_order_and_with_a_cache_of_its_own(monkeypatch):
    monkeypatch.setattr(fidelity, "CHUNK", 4)
    reference, decoder = (RowDecoder(np.eye(20), np.eye(20)) for _ in range(2))
    steps: list[int] = []
    sequences = [list(range(10)), [3, 4]]
    assert fidelity.compare(reference, decoder, sequences, steps.append).positions == 12
    assert reference.read == decoder.read == sequences
    assert steps == [4, 4, 2, 2]


def test_windows_keep_the_order_and_stop_at_the_limit():
    assert fidelity.windows([range(5), range(3)], None, size=2) == [[0, 1], [2, 3], [4], [0, 1], [2]]
    assert fidelity.windows([range(5), range(3)], 6, size=2) == [[0, 1], [2, 3], [4], [0]]
    assert fidelity.windows([[]], None) == []


def test_questions(tmp_path):
    path = tmp_path / "q.jsonl"
    lines = [json.dumps({"question_id": 1, "turns": ["Who?", "Why?"]}), "", json.dumps({"turns": ["What?"]})]
    path.write_text("\n".join(lines))
    assert fidelity.read_questions(path) == ["Who?", "What?"]


@pytest.mark.parametrize("line", ["{", "{}", '{"turns": []}', '{"turns": [3]}', "[1]", ""])
def test_files_that_hold_no_questions(tmp_path, line):
    path = tmp_path / "q.jsonl"
    path.write_text(line)
    with pytest.raises(PromptError, match=r"q\.jsonl"):
        fidelity.read_questions(path)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for name in ("bytes", "nowhere"):
        with pytest.raises(PromptError, match=name):
            fidelity.read_text(tmp_path / name)
