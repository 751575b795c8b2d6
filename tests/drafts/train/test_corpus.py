"""Answers on disk: whole parts, bound to what they depend on, the same bytes after any interruption."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drafts.train import corpus as module
from drafts.train.config import TrainTarget
from drafts.train.corpus import Binding, Corpus, make_requests, read_part
from drafts.train.errors import TrainingError
from drafts.train.prompts import load_prompts
from drafts.train.writer import BatchWriter, Request, Written
from tests.drafts.train.support import records, tiny_target, write_prompts

BINDING = Binding("target", "tokenizer", 1, {"batch": 4}, 8, 6)


class Scripted:
    """Writes answers that depend on the request alone; can be told to fail at an answer."""

    def __init__(self, fail_at: int = -1, error: BaseException | None = None) -> None:
        self.answered: list[str] = []
        self._fail_at, self._error = fail_at, error

    def write(self, requests: Sequence[Request], progress=lambda tokens: None) -> Iterator[Written]:
        for request in reversed(requests):
            if len(self.answered) == self._fail_at and self._error is not None:
                raise self._error
            self.answered.append(request.key)
            rng = np.random.default_rng(list(request.key.encode()))
            answer = rng.integers(0, 50, rng.integers(1, request.max_new_tokens + 1)).tolist()
            rows = min(6, len(request.prompt)) + len(answer) - 1
            progress(len(answer))
            yield Written(request, answer, rng.standard_normal((rows, 8)).astype(np.float16))


def nothing(stage: str, done: float, total: float, note: str) -> None:
    pass


def requests(count: int = 22) -> list[Request]:
    return [Request(f"code/p-{n}", list(range(1, 3 + n % 9)), 5) for n in range(count)]


def made(folder: Path, binding: Binding = BINDING, **options) -> Corpus:
    return Corpus(folder, binding, requests(**options), part=8)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_answers_come_back_as_they_were_written(tmp_path: Path) -> None:
    corpus = made(tmp_path / "corpus")
    seen = []
    corpus.write(Scripted, lambda *what: seen.append(what))
    assert [(stage, done, total) for stage, done, total, _ in seen] == [("answers", n + 1, 22) for n in range(22)]
    assert "tokens/s" in seen[-1][3]
    examples = corpus.examples()
    assert set(examples) == {request.key for request in requests()}
    total = 0
    for written in Scripted().write(requests()):
        example = examples[written.request.key]
        assert example.tokens.tolist() == [*written.request.prompt, *written.answer]
        assert example.answer_start == len(written.request.prompt)
        np.testing.assert_array_equal(example.hidden, written.hidden)
        total += len(written.answer)
    assert corpus.answer_tokens == total
    assert sorted(content(tmp_path / "corpus")) == ["corpus.json", *(f"part-0000{n}.safetensors" for n in range(3))]


@pytest.mark.parametrize("fail_at", [0, 3, 8, 15, 21])
def test_interrupted_anywhere_it_goes_on_to_the_same_bytes(tmp_path: Path, fail_at: int) -> None:
    made(tmp_path / "whole").write(Scripted, nothing)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "cut").write(lambda: Scripted(fail_at, KeyboardInterrupt()), nothing)
    second = Scripted()
    made(tmp_path / "cut").write(lambda: second, nothing)
    assert len(second.answered) == 22 - fail_at // 8 * 8
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_a_finished_corpus_needs_no_writer(tmp_path: Path) -> None:
    made(tmp_path).write(Scripted, nothing)

    def refuse() -> Scripted:
        raise AssertionError("a writer was made")

    made(tmp_path).write(refuse, nothing)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _swap(path: Path) -> None:
    shutil.copyfile(path.with_name("part-00000.safetensors"), path)


@pytest.mark.parametrize("damage", [_flip, _cut, _swap, Path.unlink])
def test_damaged_and_foreign_parts_are_made_again(tmp_path: Path, damage, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path).write(Scripted, nothing)
    before = content(tmp_path)
    damage(tmp_path / "part-00001.safetensors")
    if damage is not Path.unlink:
        with pytest.raises(TrainingError, match=r"part-00001\.safetensors: is missing or damaged"):
            made(tmp_path).examples()
    again = Scripted()
    made(tmp_path).write(lambda: again, nothing)
    assert len(again.answered) == 8
    assert content(tmp_path) == before
    assert ("part-00001.safetensors is damaged; it is made again" in caplog.text) == (damage is not Path.unlink)


@pytest.mark.parametrize("damage", [_cut, Path.unlink, lambda path: path.write_text('{"format": 1, "bound": 3}')])
def test_without_its_index_everything_is_made_again(tmp_path: Path, damage, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path).write(Scripted, nothing)
    before = content(tmp_path)
    damage(tmp_path / "corpus.json")
    again = Scripted()
    made(tmp_path).write(lambda: again, nothing)
    assert len(again.answered) == 22
    assert content(tmp_path) == before
    assert "corpus.json" in caplog.text


@pytest.mark.parametrize(
    ("binding", "count", "message"),
    [
        (replace(BINDING, target="other"), 22, "another target"),
        (replace(BINDING, tokenizer="other"), 22, "before the target's tokenizer changed"),
        (replace(BINDING, graph_version=2), 22, "another version of edgespec"),
        (replace(BINDING, writer={"batch": 5}), 22, "batch 4 there, 5 here"),
        (BINDING, 21, "for other prompts"),
    ],
)
def test_answers_of_something_else_are_refused(tmp_path: Path, binding: Binding, count: int, message: str) -> None:
    made(tmp_path).write(Scripted, nothing)
    before = content(tmp_path)
    with pytest.raises(TrainingError, match=message) as caught:
        made(tmp_path, binding, count=count).write(Scripted, nothing)
    assert "--work" in str(caught.value)
    assert "--restart" in str(caught.value)
    assert content(tmp_path) == before
    made(tmp_path, binding, count=count).write(Scripted, nothing, restart=True)
    assert len(made(tmp_path, binding, count=count).examples()) == count


def test_restart_keeps_answers_that_fit(tmp_path: Path) -> None:
    made(tmp_path).write(Scripted, nothing)
    again = Scripted()
    made(tmp_path).write(lambda: again, nothing, restart=True)
    assert again.answered == []


def test_a_full_disk_is_told_and_the_run_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "whole").write(Scripted, nothing)
    real, calls = module.write_bytes, []

    def full(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(module, "write_bytes", full)
    with pytest.raises(TrainingError, match=r"No space left on device.*1 of 3 parts are finished and stay.*make room"):
        made(tmp_path / "full").write(Scripted, nothing)
    assert sorted(content(tmp_path / "full")) == ["corpus.json", "part-00000.safetensors"]
    made(tmp_path / "full").write(Scripted, nothing)
    assert content(tmp_path / "full") == content(tmp_path / "whole")


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="cannot be written"):
        made(tmp_path / "file" / "corpus").write(Scripted, nothing)


def test_what_a_killed_write_left_is_removed(tmp_path: Path) -> None:
    made(tmp_path).write(Scripted, nothing)
    before = content(tmp_path)
    (tmp_path / ".part-00001.safetensors.x7").write_bytes(b"half")
    made(tmp_path).write(Scripted, nothing)
    assert content(tmp_path) == before


def test_more_than_memory_or_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = made(tmp_path).largest_bytes
    monkeypatch.setattr(module, "free_memory", lambda: need)
    with pytest.raises(TrainingError, match=r"22 requests take up to .* MiB, and .* of memory are free"):
        made(tmp_path).write(Scripted, nothing)
    monkeypatch.undo()
    usage = shutil.disk_usage(tmp_path)._replace(free=need - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(TrainingError, match="are free on its disk: make room"):
        made(tmp_path).write(Scripted, nothing)
    assert content(tmp_path) == {}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TrainTarget:
    return tiny_target(tmp_path_factory.mktemp("target"))


def test_the_real_writer_makes_the_same_bytes_twice(target: TrainTarget, tmp_path: Path) -> None:
    prompts = load_prompts([write_prompts(tmp_path / "p.jsonl", records(16))], target.encode, 80, domain="code")
    wanted = make_requests(prompts, max_new_tokens=6, sampled=0.5, seed=3)
    assert len({request.key for request in wanted}) == len(wanted)
    sampled = [request for request in wanted if request.temperature]
    assert 0 < len(sampled) < 16
    assert {request.key.split("@")[0] for request in sampled} <= {p.key for p in prompts.train}

    def writer() -> BatchWriter:
        return BatchWriter(target.weights, eos_ids=(), token_count=280, batch=4, positions=96, window=8)

    binding = Binding(target.weights.fingerprint(), "t", 1, {}, 32, 8)
    for name in ("one", "two"):
        Corpus(tmp_path / name, binding, wanted, part=8).write(writer, nothing)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_parts_hold_keys_and_lengths_in_the_open(tmp_path: Path) -> None:
    made(tmp_path).write(Scripted, nothing)
    part = (tmp_path / "part-00000.safetensors").read_bytes()
    header = json.loads(part[8 : 8 + int.from_bytes(part[:8], "little")])
    assert set(header) == {
        "__metadata__", "tokens", "prompt_lengths", "answer_lengths", "hidden_lengths", "hidden"
    }  # fmt: skip
    assert header["hidden"]["dtype"] == "F16"
    assert list(read_part(part)) == sorted(f"code/p-{n}" for n in range(8))
