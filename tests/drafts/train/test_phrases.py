"""Counting phrases: equal to a slow count by hand, and a draft that appears whole, from answers that are there."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from drafts import zoo
from drafts.manifest import Manifest
from drafts.phrases import CERTAIN, FILE_NAME, LEVELS, PhraseDraft, PhraseTable
from drafts.train.config import TrainTarget
from drafts.train.errors import TrainingError
from drafts.train.export import export_eagle, export_hf
from drafts.train.fit import Example
from drafts.train.phrases import Answer, Limits, PhraseRecipe, build_table
from drafts.train.pipeline import Result, train_draft
from edgespec.cli.drafts_train import starting_draft
from tests.drafts.train.support import quick, records, text, tiny_target, write_prompts
from tests.support.phrases import key_of

EVERYTHING = Limits(least=0.0, near=-1.0)  # no entry is left out


def answers(seed: int, count: int = 30, words: int = 12) -> list[Answer]:
    """Texts with habits: some tokens mostly follow others."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        tokens = [rng.randrange(words) for _ in range(rng.randrange(1, 5))]
        start = len(tokens)
        for _ in range(rng.randrange(0, 25)):
            last = tokens[-1]
            tokens.append((last * 5 + len(tokens) % 2) % words if rng.random() < 0.6 else rng.randrange(words))
        found.append(Answer(f"p{number // 2 if number < 8 else number}", np.array(tokens, np.int32), start))
    return found


def by_hand(given: list[Answer], limits: Limits) -> dict[tuple[int, ...], tuple[int, float]]:
    """n-gram -> (token, chance) by sets, counters and recursion."""
    prompts: dict[tuple[int, ...], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for answer in given:
        tokens = answer.tokens.tolist()
        for end in range(answer.start + 1, len(tokens)):
            for size in range(1, limits.longest + 1):
                if size <= end:
                    prompts[tuple(tokens[end - size : end])][tokens[end]].add(answer.prompt)
    counts = {gram: Counter({token: len(seen) for token, seen in after.items()}) for gram, after in prompts.items()}

    def chance(gram: tuple[int, ...], token: int) -> float:
        shorter = chance(gram[1:], token) if len(gram) > 1 else 0.0
        return (counts[gram][token] + limits.doubt * shorter) / (sum(counts[gram].values()) + limits.doubt)

    kept: dict[tuple[int, ...], tuple[int, float]] = {}
    for gram in sorted(counts, key=len):
        often = [token for token, count in counts[gram].items() if count >= limits.prompts]
        if not often:
            continue
        token = min(often, key=lambda t: (-chance(gram, t), t))
        found = (token, chance(gram, token))
        below = next((kept[gram[cut:]] for cut in range(1, len(gram)) if gram[cut:] in kept), None)
        if below is None:
            worth = found[1] >= limits.least
        else:
            worth = below[0] != token or abs(below[1] - found[1]) > limits.near
        if worth:
            kept[gram] = found
    return kept


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "limits",
    [Limits(), EVERYTHING, Limits(longest=2, prompts=1, doubt=0.0), Limits(longest=6, prompts=3, least=0.4, near=0.05)],
)
def test_a_table_is_what_counting_by_hand_gives(seed: int, limits: Limits) -> None:
    given = answers(seed)
    table, wanted = build_table(given, limits), by_hand(given, limits)
    rows = {key_of(gram): (token, round(chance * CERTAIN)) for gram, (token, chance) in wanted.items()}
    assert len(rows) == len(wanted) > 5
    assert table.sizes == tuple(range(1, limits.longest + 1))
    assert table.keys.tolist() == sorted(rows)
    for key, token, confidence in zip(table.keys.tolist(), table.next.tolist(), table.confidence.tolist()):
        assert token == rows[key][0]
        assert abs(confidence - rows[key][1]) <= 1
    table.check("a table", 12)


def test_the_order_of_the_answers_does_not_matter(tmp_path: Path) -> None:
    given = answers(1)
    build_table(given).write(tmp_path / "one", 12)
    random.Random(0).shuffle(given)
    build_table(given).write(tmp_path / "two", 12)
    assert load_file(tmp_path / "one").keys() == {"keys", "next", "confidence"}  # as other programs read it
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_what_is_left_out_changes_no_guess() -> None:
    given = answers(2, 60)
    small, whole = (PhraseDraft("", build_table(given, limits)) for limits in (Limits(), EVERYTHING))
    assert small.nbytes < whole.nbytes
    found = 0
    for answer in given:
        for end in range(1, len(answer.tokens)):
            mine, full = (draft.find(answer.tokens[:end].tolist()) for draft in (small, whole))
            if mine is not None:
                assert full is not None
                assert mine[0] == full[0]
                assert abs(mine[1] - full[1]) <= 0.1 * CERTAIN + 1
                found += 1
            elif full is not None:
                assert full[1] < 0.3 * CERTAIN  # less than `least`, as far as `near` lets a longer one differ
    assert found > 50


def answer(prompt: str, tokens: list[int], start: int = 1) -> Answer:
    return Answer(prompt, np.array(tokens, np.int32), start)


def test_prompts_are_counted_not_how_often_one_answer_says_it() -> None:
    told_once = build_table([answer("a", [0, 1, 2, 1, 2, 1, 2]), answer("b", [0, 3, 4]), answer("c", [0, 3, 4])])
    assert PhraseDraft("", told_once).find([1]) is None
    assert PhraseDraft("", told_once).find([3]) == (4, round(2 / 5 * CERTAIN))
    with pytest.raises(TrainingError, match="no phrase follows in 2 or more"):
        build_table([answer("a", [0, 1, 2, 1, 2]), answer("a", [0, 1, 2, 3])])  # one prompt, answered twice


def test_only_answers_teach_but_their_phrases_may_begin_in_the_prompt() -> None:
    table = build_table([answer(name, [7, 8, 9, 5, 6], start=3) for name in "ab"], EVERYTHING)
    draft = PhraseDraft("", table)
    for gram in ([7], [8], [9]):  # the first token of an answer comes with the prompt
        assert draft.find(gram) is None
    assert draft.find([5]) is not None
    assert key_of((8, 9, 5)) in table.keys.tolist()


def test_shorter_phrases_break_the_tie_then_the_lower_id_does() -> None:
    even = [[0, 2, 1, 5], [0, 2, 1, 5], [0, 2, 1, 3], [0, 2, 1, 3]]
    draft = PhraseDraft("", build_table([answer(str(n), t) for n, t in enumerate(even)], EVERYTHING))
    assert (draft.find([1]) or (0,))[0] == (draft.find([2, 1]) or (0,))[0] == 3
    more = [*even, [0, 4, 1, 5]]  # 5 is likelier after 1, so it is after (2 1) too
    draft = PhraseDraft("", build_table([answer(str(n), t) for n, t in enumerate(more)], EVERYTHING))
    assert (draft.find([1]) or (0,))[0] == (draft.find([2, 1]) or (0,))[0] == 5


def test_nothing_to_count() -> None:
    for given in ([], [answer("a", [0, 1])], [answer("a", [0], 1)]):
        with pytest.raises(TrainingError, match="needs more prompts"):
            build_table(given)
    for wrong in ({"longest": 0}, {"longest": 9}, {"prompts": 0}, {"doubt": -1.0}):
        with pytest.raises(ValueError, match="make no table"):
            Limits(**wrong)  # type: ignore[arg-type]


def test_its_confidence_is_the_share_of_hits() -> None:
    rng = np.random.default_rng(0)

    def made(count: int) -> dict[str, Example]:
        found = {}
        for number in range(count):
            tokens = [0, 0]
            for _ in range(30):
                likely = rng.random() < (0.9 if tokens[-1] % 2 else 0.5)
                tokens.append((tokens[-1] * 7 + 3) % 20 if likely else int(rng.integers(20)))
            found[f"code/{number}"] = Example(np.array(tokens, np.int32), 1, np.empty((0, 4), np.float16))
        return found

    recipe = PhraseRecipe(20)
    recipe.count(made(400), lambda *seen: None)
    found = recipe.calibration(list(made(200).values()))
    assert found.positions > 1000
    assert found.after < 0.06
    assert found.temperature == 1
    assert {LEVELS[c] for c in recipe.table.confidence.tolist()} >= {4, 6}


def test_sampled_answers_are_the_same_prompt() -> None:
    recipe = PhraseRecipe(20)
    example = Example(np.array([0, 1, 2, 3], np.int32), 1, np.empty((0, 4), np.float16))
    with pytest.raises(TrainingError, match="no phrase"):
        recipe.count({"code/1": example, "code/1@0.7": example}, lambda *seen: None)
    recipe.count({"code/1": example, "code/2@0.7": example}, lambda *seen: None)


# The whole training


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TrainTarget:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files. Questions of one kind end alike: here with the same words."""
    folder = tmp_path_factory.mktemp("prompts")
    code = [{**record, "prompt": f"{record['prompt']} the hen and the hen"} for record in records(24)]
    math = [{"id": str(n), "prompt": f"{text(n + 50)} in the inn in the inn"} for n in range(16)]
    return [write_prompts(folder / "code.jsonl", code), write_prompts(folder / "math.jsonl", math)]


@pytest.fixture(scope="module")
def whole(target: TrainTarget, prompts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(target, prompts, tmp_path_factory.mktemp("whole") / "phrases")


def train(target: TrainTarget, prompts: list[Path], out: Path, kind: str = "phrases", **options) -> Result:
    config = quick(domain="general", name=out.name, kind=kind, max_new_tokens=24)
    result = train_draft(target, prompts, out, config, command="edgespec drafts train", **options)
    assert result is not None
    return result


def test_a_run_gives_an_entry_that_the_zoo_takes(whole: Result, target: TrainTarget) -> None:
    manifest = Manifest.read(whole.folder)
    assert sorted(path.name for path in whole.folder.iterdir()) == ["draft.toml", FILE_NAME]
    assert (manifest.kind, manifest.dtype, manifest.domain) == ("phrases", "none", "general")
    assert manifest.description.startswith("counted in ")
    assert set(manifest.acceptance) == {"code", "math"}
    assert manifest.training is not None
    assert manifest.training.updates == 0
    tokenizer = target.tokenizer.fingerprint()
    facts = zoo.TargetFacts("tiny", target.weights.fingerprint(), 32, 288, tokenizer)
    entry = zoo.read_entry(whole.folder)
    assert all(finding.ok for finding in zoo.verify(entry, facts))
    decoder = target.decoder(64)
    draft = zoo.load(entry, decoder, facts)
    decoder.close()
    assert isinstance(draft, PhraseDraft)
    table = PhraseTable.read(whole.folder / FILE_NAME, 288)
    assert manifest.architecture == {"phrases": len(table.keys), "longest": 4}
    assert (table.next < target.tokenizer.size).all()


def test_it_uses_the_answers_of_another_draft_and_leaves_that_ones_work_alone(
    whole: Result, target: TrainTarget, prompts: list[Path], tmp_path: Path
) -> None:
    train(target, prompts, tmp_path / "general", "head")
    work = tmp_path / ".general.work"
    before = {path: path.read_bytes() for path in work.rglob("*") if path.is_file()}
    stages: list[str] = []
    result = train(target, prompts, tmp_path / "phrases", work=work, progress=lambda stage, *rest: stages.append(stage))
    assert "answers" not in stages
    assert {path: path.read_bytes() for path in work.rglob("*") if path.is_file()} == before
    assert (result.folder / FILE_NAME).read_bytes() == (whole.folder / FILE_NAME).read_bytes()


def test_texts_are_read_without_their_hidden_states(
    whole: Result, target: TrainTarget, prompts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Example] = []
    count = PhraseRecipe.count
    monkeypatch.setattr(
        PhraseRecipe,
        "count",
        lambda self, examples, progress: (seen.extend(examples.values()), count(self, examples, progress))[1],
    )
    monkeypatch.setattr("drafts.train.corpus.free_memory", lambda: 0)  # hidden states of all answers would not fit
    train(target, prompts, tmp_path / "phrases", work=whole.folder.parent / ".phrases.work")
    assert len(seen) > 30
    assert all(example.hidden.nbytes == 0 for example in seen)


def test_held_out_prompts_are_not_counted(
    target: TrainTarget, prompts: list[Path], whole: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[str]] = {}
    monkeypatch.setattr(
        PhraseRecipe, "count", lambda self, examples, progress: seen.update(keys=set(examples)) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        train(target, prompts, tmp_path / "phrases", work=whole.folder.parent / ".phrases.work")
    greedy = {key for key in seen["keys"] if "@" not in key}
    assert len(greedy) == 40 - 3 - 3
    assert len(seen["keys"]) > len(greedy)


def test_other_programs_have_no_format_for_it(whole: Result, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="table of phrases"):
        export_hf(whole.folder, tmp_path / "out")
    with pytest.raises(TrainingError, match="table of phrases"):
        export_eagle(whole.folder, tmp_path / "out", None, [])  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_it_starts_from_no_other_draft(whole: Result, target: TrainTarget, prompts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="phrases from none"):
        train(target, prompts, tmp_path / "phrases", start=whole.folder)
    config = quick(kind="phrases")
    fingerprint = target.weights.fingerprint()
    assert starting_draft("auto", tmp_path / "phrases", config, tmp_path, fingerprint) is None
