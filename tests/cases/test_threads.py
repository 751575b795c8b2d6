"""Fault cases "Threads, cancellation, shutdown" that touch one target; more of them are in tests/engine."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from edgespec import Engine, SamplingParams
from edgespec.errors import ModelError
from tests.support.tiny import write_tiny

QUESTION = "the hen and the hen and the"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    folder = write_tiny(tmp_path_factory.mktemp("models") / "target", head_dim=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(tmp_path_factory.mktemp("home")))
        drafts = ["ngram", str(folder)]
        with Engine.from_pretrained(str(folder), drafts=drafts, gamma=3, threads=1, weight_format="float32") as made:
            yield made


def together(jobs: list) -> list:
    """Run all jobs in threads that start at once; their results in order."""
    results, start = [None] * len(jobs), threading.Barrier(len(jobs))

    def work(index: int) -> None:
        start.wait()
        results[index] = jobs[index]()

    workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(jobs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    return results


@pytest.mark.parametrize("neighbours", [1, 2, 4])
def test_a_request_does_not_depend_on_its_neighbours(engine, neighbours):
    """B046, B053: greedy and seeded requests side by side give what each gives alone."""
    settings = [SamplingParams(max_new_tokens=16, ignore_eos=True)]
    settings += [
        SamplingParams(max_new_tokens=16, temperature=t, seed=i, ignore_eos=True) for i, t in enumerate((0.3, 1.0, 1.5))
    ]
    alone = [engine.generate(QUESTION, params).token_ids for params in settings]
    jobs = [lambda p=params: engine.generate(QUESTION, p).token_ids for params in settings[: neighbours + 1]]
    assert together(jobs) == alone[: neighbours + 1]


def test_a_target_that_fails_passes_its_error_on_at_once(engine, monkeypatch):
    """B137: the consumer gets the tokens before the failure, then the exception; the next request is right."""
    expected = engine.generate(QUESTION, SamplingParams(max_new_tokens=8, ignore_eos=True)).token_ids
    forward, calls = engine._target.decoder.forward, []

    def failing(tokens, cache, **options):
        calls.append(len(tokens))
        if len(calls) == 3:
            raise ModelError("no memory left")
        return forward(tokens, cache, **options)

    monkeypatch.setattr(engine._target.decoder, "forward", failing)
    engine.use_draft("off")
    stream = engine.stream(QUESTION, SamplingParams(max_new_tokens=8, ignore_eos=True))
    got, begin = [*next(stream).token_ids, *next(stream).token_ids], time.monotonic()
    with pytest.raises(ModelError, match="no memory left"):
        next(stream)
    assert time.monotonic() - begin < 1
    monkeypatch.undo()
    engine.use_draft("auto")
    assert tuple(got) == expected[:2]
    assert engine.generate(QUESTION, SamplingParams(max_new_tokens=8, ignore_eos=True)).token_ids == expected


def test_engines_can_be_built_while_another_answers(engine, tmp_path: Path, monkeypatch):
    """B006, B139: builds in threads, the same files and different ones, disturb neither each other nor an answer."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    folders = [write_tiny(tmp_path / f"m{i}", seed=i, head_dim=16) for i in range(2)]
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    expected = engine.generate(QUESTION, params).token_ids

    def build(folder: Path) -> tuple[int, ...]:
        with Engine.from_pretrained(str(folder), drafts=None, threads=1) as made:
            return made.generate(QUESTION, params).token_ids

    serial = [build(folder) for folder in folders]
    jobs = [lambda f=folders[i % 2]: build(f) for i in range(6)]
    jobs += [lambda: engine.generate(QUESTION, params).token_ids] * 2
    assert together(jobs) == [serial[i % 2] for i in range(6)] + [expected] * 2


def test_every_way_in_uses_the_same_stop_tokens(engine):
    """B202, B089: text, messages, ids and conversation stop at the same ids, the template's turn end among them."""
    end = engine.tokenizer.special_tokens["<|im_end|>"]
    ids = engine.encode("hi")
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_new_tokens=5, logit_bias={end: 1000.0})
    results = [engine.generate(prompt, params) for prompt in ("hi", messages, ids)]
    results.append(engine.conversation().send("hi", params))
    for result in results:
        assert (result.token_ids, result.text, result.finish_reason) == ((end,), "", "stop")
    ignored = engine.generate("hi", SamplingParams(max_new_tokens=5, logit_bias={end: 1000.0}, ignore_eos=True))
    assert ignored.token_ids == (end,) * 5


def test_flags_of_copied_tokens_are_true_for_guesses_only(engine):
    """B185, B058: per-token draft names, next to log probabilities of the right tokens."""
    engine.use_draft("ngram")
    result = engine.generate(QUESTION * 3, SamplingParams(max_new_tokens=40, ignore_eos=True, logprobs=0))
    engine.use_draft("auto")
    assert set(result.drafts) <= {None, "ngram"}
    assert sum(name == "ngram" for name in result.drafts) == result.stats.accepted_tokens
    assert [entry.token_id for entry in result.logprobs or ()] == list(result.token_ids)
    assert result.stats.rounds + 1 + result.stats.accepted_tokens >= len(result.token_ids)
