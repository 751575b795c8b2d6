"""Training on made-up traces: a rule that holds is learned, one that does not is not; figures say what they count."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from predictor.features import Layout, TextFeatures
from predictor.ranker import RankedDraft, Ranker, RankerInfo
from predictor.traces import TraceDraft, TraceError
from predictor.train import fit as fit_module
from predictor.train.export import ranker_bytes
from predictor.train.figures import Judge, evaluate
from predictor.train.fit import FitConfig, Scaling
from predictor.train.pipeline import train_ranker, unseen
from predictor.train.samples import (
    EVERY,
    GROUPS,
    HORIZON,
    Corpus,
    Watch,
    places,
    read_corpus,
    samples_of,
    split,
    start_features,
)
from tests.support.traces import DRAFTS, HIDDEN, NEW, header, made_up, sha, write_traces

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

QUICK = FitConfig(units=(16,), epochs=25, patience=6, batch=128, learning_rate=3e-3)
LAYOUT = Layout(HIDDEN, DRAFTS)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_traces(tmp_path_factory.mktemp("traces") / "t", 60)


@pytest.fixture(scope="module")
def corpus(traces: Path) -> Corpus:
    return read_corpus([traces])


@pytest.fixture(scope="module")
def made(traces: Path, tmp_path_factory: pytest.TempPathFactory):
    return train_ranker([traces], tmp_path_factory.mktemp("made") / "ranker.onnx", QUICK, ablate=True)


def test_a_rule_is_learned(made, corpus) -> None:
    found = made.figures
    assert found["all"]["top1_within_noise"] > 0.97
    assert found["all"]["top1"] > 0.9
    assert found["all"]["regret"] < 0.03
    assert found["all"]["calibration_error"] < 0.08
    single = found["others"]["best single draft (hindsight)"]
    assert single["top1"] < 0.7
    for expected, seen in found["expected_and_seen"].values():
        assert expected == pytest.approx(seen, abs=0.1)
    for name in ("prompt text", "prompt", "recent"):  # each part alone tells the sides apart
        assert found["inputs"][name]["top1_within_noise"] > 0.9, name
    assert set(made.ablations) == {"prompt", "recent", "prompt and recent", "all"}
    assert all(figures["top1_within_noise"] > 0.9 for figures in made.ablations.values())
    assert set(found["by_domain"]) == set(DRAFTS)
    assert not list(made.path.parent.glob(".*"))


def test_it_ranks_a_text_as_a_live_run_has_it(made) -> None:
    """From tokens and hidden states through TextFeatures, at every stage of a text."""
    ranker = Ranker.load(made.path, target=sha("tiny"), drafts={name: sha(name) for name in DRAFTS})
    right = dict.fromkeys(range(4), 0)
    for seed in range(200, 220):
        text = made_up(seed)
        features = ranker.features()
        features.begin(text.prompt.tolist())
        rows = text.hidden.astype(np.float32)
        vectors = [features.vector(None, None, {}), features.vector(rows[:4], text.prompt_hidden, {})]
        features.push(text.answer[:20].tolist())
        vectors += [features.vector(rows[:24], text.prompt_hidden, {}), features.vector(None, None, {})]
        for stage, vector in enumerate(vectors):
            rates = ranker.rank(vector)
            right[stage] += max(rates, key=rates.__getitem__) == text.domain
    assert all(count >= 17 for count in right.values()), right
    assert ranker.rank(np.zeros(ranker.layout.size, np.float32)).keys() == set(DRAFTS)


def test_what_was_seen_of_the_drafts_counts(tmp_path: Path) -> None:
    """Where nothing else tells which draft is right, acceptance alone does."""
    folder = write_traces(tmp_path / "t", 80, shuffled=True)
    corpus = read_corpus([folder])
    rest, held_out = split(corpus.texts, 0.25, 0)
    fitted = fit_module.fit(corpus, rest, held_out, QUICK, groups=("acceptance",))
    path = tmp_path / "ranker.onnx"
    drafts = tuple(RankedDraft(name, sha(name)) for name in DRAFTS)
    path.write_bytes(ranker_bytes(RankerInfo(sha("tiny"), "tiny", HIDDEN, HORIZON, drafts), fitted.layers))
    ranker = Ranker.load(path)
    vector = np.zeros(ranker.layout.size, np.float32)
    for good in (0, 1):
        vector[ranker.layout.parts["known"]] = 1
        vector[ranker.layout.parts["rates"]] = [0.8, 0.3] if good == 0 else [0.3, 0.8]
        rates = list(ranker.rank(vector).values())
        assert rates[good] > rates[1 - good] + 0.1


def test_shuffled_labels_are_not_learned(tmp_path: Path) -> None:
    """Held-out texts are held out: where labels have nothing to do with the texts, there is nothing to find."""
    folder = write_traces(tmp_path / "t", 80, shuffled=True)
    found = train_ranker([folder], tmp_path / "ranker.onnx", QUICK).figures
    blind = found["inputs"]["prompt and recent"]
    assert 0.2 < blind["top1"] < 0.8
    assert blind["regret"] > 0.1


def test_the_same_seed_gives_the_same_ranker(traces: Path, tmp_path: Path) -> None:
    files = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        config = FitConfig(units=(4,), epochs=2, seed=seed)
        made = train_ranker([traces], tmp_path / f"{name}.onnx", config)
        files.append(Ranker.load(made.path).rates(np.ones((1, LAYOUT.size), np.float32)))
    assert np.array_equal(files[0], files[1])
    assert not np.array_equal(files[0], files[2])


def test_texts_that_were_trained_on_are_left_out(made, corpus) -> None:
    info = Ranker.load(made.path).info
    left = unseen(info, corpus.texts)
    assert len(left) == made.figures["texts"] == 12
    assert sum(info.training["texts"].values()) == 48
    seen = {text.key for text in corpus.texts} - {text.key for text in left}
    assert len(seen) == 48
    other = list(read_corpus([_others(made)]).texts)
    assert unseen(info, other) == other


def _others(made) -> Path:
    return write_traces(made.path.parent / "others", 4, first=1000)


def test_a_split_cuts_between_texts_of_each_domain(corpus) -> None:
    rest, taken = split(corpus.texts, 0.2, 0)
    assert {text.key for text in rest} | {text.key for text in taken} == {text.key for text in corpus.texts}
    assert not {text.key for text in rest} & {text.key for text in taken}
    assert sorted(text.domain for text in taken) == ["left"] * 6 + ["right"] * 6
    again, _ = split(corpus.texts[::-1], 0.2, 0)
    assert {text.key for text in again} == {text.key for text in rest}  # the order of the folder does not matter
    other, _ = split(corpus.texts, 0.2, 1)
    assert {text.key for text in other} != {text.key for text in rest}


@pytest.mark.parametrize("stride", [1, 2])
def test_samples_are_what_a_live_run_has(stride: int) -> None:
    made = header(stride=stride)
    text = made_up(7, made=made)
    samples = samples_of(text, made, LAYOUT, [1, 0])
    assert samples.known.tolist() == list(range(1, NEW, EVERY))
    live = TextFeatures(LAYOUT)
    live.begin(text.prompt.tolist())
    rows, first = text.hidden.astype(np.float32), made.recent  # the row of the first token of the answer
    done = 0
    for place, known in enumerate(samples.known.tolist()):
        live.push(text.answer[done:known].tolist())
        done = known
        end = first + known - 1  # the last known token has not been read yet
        vector = live.vector(rows[max(end - 32, 0) : end], text.prompt_hidden, {})
        assert np.array_equal(samples.features[place], vector)
        column = (known - 1) // stride
        ahead = text.accepts[[1, 0], column : column + HORIZON // stride]
        assert samples.hits[place].tolist() == (ahead > 0).sum(axis=1).tolist()
        assert samples.counts[place] == ahead.shape[1]
        np.testing.assert_allclose(samples.tokens[place], ahead.mean(axis=1), rtol=1e-6)


def test_acceptance_never_looks_ahead() -> None:
    text = samples_of(made_up(3), header(), LAYOUT, [0, 1])
    late = samples_of(made_up(3), header(), LAYOUT, [0, 1])
    late.firsts[:, 20:] = ~late.firsts[:, 20:]
    for seed in range(20):
        (one, known), (other, known_too) = (Watch([t]).look(np.random.default_rng(seed)) for t in (text, late))
        before = text.column <= 20
        assert np.array_equal(one[before], other[before])
        assert np.array_equal(known, known_too)
        assert not one[0].any()
        assert not known[0].any()
        assert ((one >= 0) & (one <= 1)).all()


def test_free_drafts_are_not_ranked(tmp_path: Path) -> None:
    drafts = (
        TraceDraft("left", "phrases", "left", sha("left"), 1, free=True),
        TraceDraft("right", "head", "right", sha("right"), 1),
    )
    corpus = read_corpus([write_traces(tmp_path / "one", 2, drafts=drafts)])
    assert [draft.name for draft in corpus.drafts] == ["right"]
    free = tuple(dataclasses.replace(draft, free=True) for draft in drafts)
    with pytest.raises(TraceError, match="no draft with weights"):
        read_corpus([write_traces(tmp_path / "two", 2, drafts=free)])


def test_folders_must_go_together(traces: Path, tmp_path: Path) -> None:
    both = read_corpus([traces, write_traces(tmp_path / "more", 3, first=500)])
    assert len(both.texts) == 63
    assert len(read_corpus([traces, traces]).texts) == 60  # a text counts once
    for name, changes in (
        ("target", {"target": {"name": "tiny", "fingerprint": sha("other")}}),
        ("drafts", {"drafts": tuple(TraceDraft(n, "head", n, sha(n + "2"), 1) for n in DRAFTS)}),
        ("stride", {"stride": 2}),
    ):
        other = write_traces(tmp_path / name, 1, **changes)
        with pytest.raises(TraceError, match=f"has another {name} than"):
            read_corpus([traces, other])


def test_too_few_texts(tmp_path: Path) -> None:
    folder = write_traces(tmp_path / "t", 2)
    with pytest.raises(ValueError, match="too few"):
        train_ranker([folder], tmp_path / "ranker.onnx", QUICK)
    assert not (tmp_path / "ranker.onnx").exists()


def test_figures_of_known_rankings(corpus) -> None:
    judge = Judge(corpus, corpus.texts)
    perfect, worst = (judge.figures(sign * judge.hits, rates=False) for sign in (1, -1))
    assert (perfect["top1"], perfect["top2"], perfect["top1_within_noise"]) == (1, 1, 1)
    assert worst["top1"] < 0.1
    assert worst["top2"] == 1  # of two
    assert judge.figures(judge.tokens, rates=False)["regret"] == pytest.approx(0)
    assert worst["regret"] > 0.5
    fair = judge.figures((judge.hits / judge.counts[:, None]).astype(np.float32))
    assert fair["calibration_error"] < 1e-6
    assert judge.figures(np.full_like(judge.hits, 1.0 - 1e-6))["calibration_error"] > 0.3
    everything = sum(judge.figures(judge.hits, rates=False, domain=d)["samples"] for d in DRAFTS)
    assert everything == perfect["samples"] == len(judge.hits)


def test_the_noise_that_is_allowed(corpus) -> None:
    """Equal but for as many positions as chance explains: one standard error of the paired difference."""
    judge = Judge(corpus, corpus.texts[:1])
    ahead = judge._chosen[0][0].firsts[:, :HORIZON]
    ahead[:] = False
    ahead[0, :9] = True
    ahead[1, 5:12] = True  # 9 against 7, with 5 + 3 at which one of them is right: 2 <= sqrt(8)
    judge.hits = np.array([[9.0, 7.0]], np.float32)
    judge.tokens = judge.hits
    judge.counts, judge.domains = np.array([16.0]), np.array(["left"])
    judge._differ = np.array([[[0, 8], [8, 0]]], np.float32)
    second = np.array([[0.0, 1.0]], np.float32)
    assert judge.figures(second, rates=False)["top1"] == 0
    assert judge.figures(second, rates=False)["top1_within_noise"] == 1
    judge._differ = np.array([[[0, 2], [2, 0]]], np.float32)  # the 2 are all there is: 2 > sqrt(2)
    assert judge.figures(second, rates=False)["top1_within_noise"] == 0
    fresh = Judge(corpus, corpus.texts[1:2])
    firsts = fresh._chosen[0][0].firsts[:, :HORIZON]
    assert fresh._differ[0, 0, 1] == (firsts[0] != firsts[1]).sum()


def test_scaling_is_folded_exactly() -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((50, LAYOUT.size)).astype(np.float32)
    for name in ("hidden_recent?", "hidden_prompt?"):
        features[:, LAYOUT.scalar(name)] = rng.integers(0, 2, 50)
    features[:, LAYOUT.parts["known"]] = rng.integers(0, 2, (50, 2))
    scaling = Scaling.of(features, LAYOUT)
    weight = rng.standard_normal((3, LAYOUT.size)).astype(np.float32)
    scaled = scaling(torch.from_numpy(features)).numpy()
    np.testing.assert_allclose(features @ scaling.fold(weight).T, scaled @ weight.T, rtol=1e-3, atol=1e-3)
    missing = np.zeros((1, LAYOUT.size), np.float32)
    assert not scaling(torch.from_numpy(missing)).numpy().any()  # what is not there is nothing, not minus the mean


def test_groups_are_dropped_with_their_flags(corpus) -> None:
    data = fit_module._Data(corpus.texts[:4], corpus.layout, np.ones(corpus.layout.size, bool))
    rows = np.arange(len(data.hits)).repeat(20)
    features, _, _ = data.batch(rows, np.random.default_rng(0))
    found = features.numpy()
    flag, part = corpus.layout.scalar("hidden_recent?"), corpus.layout.parts["hidden_recent"]
    assert (found[:, flag] == 0).any()
    assert (found[:, flag] == 1).any()
    assert np.array_equal(found[:, flag] > 0, np.abs(found[:, part]).sum(axis=1) > 0)
    start = start_features(corpus.layout)
    alone = ~found[:, ~start].any(axis=1) & found[:, start].any(axis=1)
    assert 0.05 < alone.mean() < 0.25  # the prompt's text alone
    covered = np.sum([places(corpus.layout, (name,)) for name in GROUPS], axis=0)
    assert (covered == 1).all()  # every number belongs to one group


def test_a_ranker_that_may_see_a_part_ignores_the_rest(made, corpus, tmp_path: Path) -> None:
    rest, _ = split(corpus.texts, 0.2, 0)
    fitted = fit_module.fit(corpus, rest[8:], rest[:8], FitConfig(units=(4,), epochs=1), groups=("text_prompt",))
    weight = fitted.layers[0][0]
    assert weight[:, start_features(corpus.layout)].any()
    assert not weight[:, ~start_features(corpus.layout)].any()


def test_nothing_to_judge(corpus) -> None:
    with pytest.raises(ValueError, match="no text is long enough"):
        evaluate(corpus, [], lambda features: features)
