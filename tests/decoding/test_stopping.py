"""Answer: text, ids, drafts, logprobs and stream all end at the same place, as judged by a plain reference."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec.decoding import stopping
from edgespec.decoding import text as text_module
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stopping import Answer
from edgespec.models.tokenizer import Tokenizer
from edgespec.results import TokenLogprob
from tests.support.answers import reference
from tests.support.mutants import mutant
from tests.support.tokenizers import byte_ids, byte_level, sentencepiece


def fake_logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -float(token), (), 0.0)


def run(
    tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams, stop_ids: set[int], last: str, seed: int
) -> Answer:
    """Push `ids`, take at places chosen by `seed`, and check that what was taken never has to be taken back."""
    rng = random.Random(seed)
    answer = stopping.Answer(params, tokenizer, stop_ids=frozenset(stop_ids))
    text, tokens, drafts = "", [], []
    for count, token in enumerate(ids, 1):
        if answer.finish_reason:
            break
        reason = answer.push(token, f"d{count}", fake_logprob(token))
        assert reason == answer.finish_reason
        if rng.random() < 0.6:
            more = answer.take()
            text, tokens, drafts = text + more[0], tokens + more[1], drafts + more[2]
            assert text.startswith(tokenizer.decode(tokens)) or answer.finish_reason
    assert answer.finish(last) == answer.finish_reason  # type: ignore[arg-type]
    more = answer.take()
    assert text + more[0] == answer.text
    assert tokens + more[1] == answer.token_ids
    assert drafts + more[2] == answer.drafts == [f"d{n}" for n in range(1, len(answer.token_ids) + 1)]
    assert answer.take() == ("", [], [])
    assert answer.logprobs == (None if params.logprobs is None else [fake_logprob(t) for t in answer.token_ids])
    return answer


def check(ids: Sequence[int], params: SamplingParams, stop_ids: Iterable[int] = (), seed: int = 0) -> Answer:
    tokenizer = byte_level()
    answer = run(tokenizer, ids, params, set(stop_ids), "cancelled", seed)
    expected = reference(tokenizer, ids, params, set(stop_ids), "cancelled")
    assert (answer.text, answer.token_ids, answer.finish_reason) == expected
    return answer


def ids_of(text: str | bytes) -> list[int]:
    """One id a byte."""
    return [byte_ids()[b] for b in (text if isinstance(text, bytes) else text.encode())]


# --- limits and stop ids --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", range(9))
@pytest.mark.parametrize("eos_at", [None, 0, 1, 4, 7])
def test_limits_and_stop_ids(limit: int, eos_at: int | None) -> None:  # B002, B004, B010, B077, B083, B091
    ids = ids_of("abcdefgh")
    stop_ids = set() if eos_at is None else {ids[eos_at]}
    answer = check(ids, SamplingParams(max_new_tokens=limit), stop_ids, seed=limit)
    full = len(ids) if eos_at is None else eos_at + 1
    assert len(answer.token_ids) == min(limit, full)
    if limit:
        assert answer.finish_reason == (
            "stop" if limit >= full and eos_at is not None else "length" if limit <= 8 else None
        )


def test_the_reporters_block() -> None:  # B010
    block = [10, 11, 99, 20, 21, 22]
    tokenizer = byte_level()
    for stop, expected, reason in ((99, [10, 11, 99], "stop"), (22, [10, 11, 99, 20, 21], "length")):
        answer = Answer(SamplingParams(max_new_tokens=5), tokenizer, stop_ids=frozenset({stop}))
        for token in block:
            if answer.push(token):
                break
        assert (answer.token_ids, answer.finish_reason) == (expected, reason)
        assert answer.text == tokenizer.decode([t for t in expected if t != stop])


def test_stop_on_the_last_token_wins() -> None:
    ids = ids_of("abcd")
    assert check(ids, SamplingParams(max_new_tokens=4), {ids[3]}).finish_reason == "stop"
    answer = check(ids, SamplingParams(max_new_tokens=4, stop="cd"))
    assert (answer.text, answer.finish_reason) == ("ab", "stop")


def test_nothing_may_follow() -> None:
    answer = Answer(SamplingParams(max_new_tokens=1), byte_level(), stop_ids=frozenset())
    answer.push(50)
    with pytest.raises(RuntimeError, match="over"):
        answer.push(51)
    assert answer.finish("cancelled") == "length"
    assert answer.token_ids == [50]
    nothing = Answer(SamplingParams(max_new_tokens=0), byte_level(), stop_ids=frozenset())
    assert nothing.finish_reason == "length"
    assert nothing.take() == ("", [], [])


def test_stop_token_ids_always_stop() -> None:
    """For ignore_eos the caller leaves the EOS ids out; the request's own stop ids hold in any case."""
    ids = [2, *ids_of("ab"), 1, *ids_of("c")]
    assert check(ids, SamplingParams(stop_token_ids=(1,), ignore_eos=True)).token_ids == ids[:4]
    assert check(ids, SamplingParams(), {2}).token_ids == [2]  # B091: the very first


def test_stop_string_that_is_a_special_token() -> None:
    """Its text is never shown, so it could not be found there; silently ignoring it would be worse."""
    ids = [*ids_of("ab"), 1, *ids_of("c")]
    answer = check(ids, SamplingParams(stop=["<|im_start|>"]))
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("ab", ids[:3], "stop")
    assert check(ids, SamplingParams(stop=["<|im_start|>"], min_new_tokens=4)).finish_reason == "cancelled"
    spelled = ids_of("a<|im_start|>b")  # as ordinary text it is an ordinary stop string
    assert check(spelled, SamplingParams(stop=["<|im_start|>"])).text == "a"


# --- stop strings ---------------------------------------------------------------------------------------------------

SPEECH = (
    ids_of("ab")
    + [259, 262, 262]
    + ids_of("你é")
    + [260, 266]
    + ids_of(b"\xe4\xbd A\xffA\xf0\x9f")
    + [0, 259]
    + ids_of("aab")
)


def test_every_window_as_stop_string() -> None:  # B003, B017
    tokenizer = byte_level()
    tried = 0
    for width in (1, 2, 3):
        for at in range(len(SPEECH) - width + 1):
            stop = tokenizer.decode(SPEECH[at : at + width])
            if stop:
                answer = check(SPEECH, SamplingParams(stop=stop, logprobs=0), seed=at)
                assert answer.finish_reason == "stop" or "\ufffd" in stop  # windows may cut a character
                tried += 1
    assert tried > 70


@pytest.mark.parametrize(
    "text, stops, shown",
    [
        ("abcabd", ["abd"], "abc"),
        ("aaab", ["aab"], "a"),  # a partial match that fails begins another one
        ("ababac", ["abac"], "ab"),
        ("say END now", ["END", "say END"], ""),  # the one that begins first
        ("hello", ["lo", "l"], "he"),
        ("xay", ["a", "ab"], "x"),
        ("EN", ["END"], "EN"),  # B104: never completed, shown at the end
        ("ENEND", ["END"], "EN"),  # B103
        ("a\n\n\nb", ["\n\n"], "a"),
        ("END", ["END"], ""),
        ("stop", ["STOP"], "stop"),
        ("héé!", ["éé"], "h"),
        ("aaaa" * 8 + "b", ["a" * 32 + "b"], ""),
    ],
)
def test_stop_strings(text: str, stops: list[str], shown: str) -> None:
    for seed in range(4):
        answer = check(ids_of(text), SamplingParams(stop=stops), seed=seed)
        assert answer.text == shown
        assert answer.token_ids == ids_of(shown)
        assert (answer.finish_reason == "stop") is (shown != text)


def test_stop_inside_a_token() -> None:  # B003: "he" + "ll" + " the": ends in the middle of a token
    ids = [259, 260, 262]
    tokenizer = byte_level()
    assert tokenizer.decode(ids) == "hell the"
    answer = check(ids, SamplingParams(stop="l t"))
    assert (answer.text, answer.token_ids) == ("hel", [259, 260])
    answer = check(ids, SamplingParams(stop="ll"))
    assert (answer.text, answer.token_ids) == ("he", [259])
    answer = check(ids, SamplingParams(stop="the"))
    assert (answer.text, answer.token_ids) == ("hell ", ids)


def test_stop_in_the_prompt_only() -> None:  # B003: an answer begins after it, and a half of it there does not count
    for answer_text in ("D and so on", "nothing"):
        assert check(ids_of(answer_text), SamplingParams(stop="END")).text == answer_text


def test_minimum_holds_stop_strings_back() -> None:
    ids = ids_of("abXYabXYcd")
    for minimum, shown in ((0, "ab"), (4, "ab"), (5, "abXYab"), (8, "abXYab"), (9, "abXYabXYcd")):
        assert check(ids, SamplingParams(stop="XY", min_new_tokens=minimum)).text == shown
    # "aa" completes at every a: the first one allowed begins one character before the minimum
    assert check(ids_of("aaaa"), SamplingParams(stop="aa", min_new_tokens=3)).text == "a"


def test_flush_passes_the_same_filters() -> None:  # B104
    half = ids_of("ab" + "你")[:-1]
    assert check(half, SamplingParams(stop="b\ufffd")).text == "a"
    answer = check(half, SamplingParams(max_new_tokens=4, stop="b\ufffd"))
    assert (answer.text, answer.finish_reason) == ("a", "stop")
    assert check(half, SamplingParams(max_new_tokens=4)).text == "ab\ufffd"  # B016: as decode() shows it
    stopped = check([*half, 2], SamplingParams(), {2})
    assert (stopped.text, stopped.token_ids[-1]) == ("ab\ufffd", 2)


# --- streaming ------------------------------------------------------------------------------------------------------


def deltas(ids: Sequence[int], params: SamplingParams) -> list[tuple[str, list[int]]]:
    answer = stopping.Answer(params, byte_level(), stop_ids=frozenset({2}))
    out = []
    for token in ids:
        reason = answer.push(token)
        out.append(answer.take()[:2])
        if reason:
            return out
    answer.finish("cancelled")
    return [*out, answer.take()[:2]]


def test_only_the_beginning_of_a_stop_is_held() -> None:  # B104
    ids = ids_of("aENxEND")
    assert [text for text, _ in deltas(ids, SamplingParams(stop="END"))] == ["a", "", "", "ENx", "", "", ""]
    assert [text for text, _ in deltas(ids[:3], SamplingParams(stop="END"))] == ["a", "", "", "EN"]
    assert [text for text, _ in deltas(ids, SamplingParams())] == [*"aENxEND", ""]


def test_tokens_wait_for_their_text() -> None:
    a, b = ids_of("ab")
    assert deltas([a, *ids_of("é"), b], SamplingParams()) == [
        ("a", [a]),
        ("", []),
        ("é", ids_of("é")),
        ("b", [b]),
        ("", []),
    ]
    # " the" (262 is " the"): its last letter may begin the stop string, so the text comes and the token does not
    assert byte_level().decode([262]) == " the"
    assert deltas([262, a], SamplingParams(stop="ex")) == [(" th", []), ("ea", [262, a]), ("", [])]
    # a special token shows nothing: a stop string after it would take it along, so it waits, but only if there is one
    assert deltas([a, 0, b], SamplingParams(stop="bx")) == [("a", [a]), ("", []), ("", []), ("b", [0, b])]
    assert deltas([a, 0, b], SamplingParams()) == [("a", [a]), ("", [0]), ("b", [b]), ("", [])]


def test_text_as_it_is() -> None:  # B100, B101
    for text in ("  first", "\n\nfirst", "x != y and a.b == c", "':' 'search'"):
        assert "".join(t for t, _ in deltas(byte_level().encode(text), SamplingParams(stop="zz"))) == text


def test_sentencepiece() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("hello 你 a lo. é")
    for stop in (["zz"], ["你"], [" a l"], ["."], ["你 a", "o."]):
        answer = run(tokenizer, ids, SamplingParams(stop=stop), set(), "cancelled", seed=1)
        full = tokenizer.decode(ids)
        cut = min((full.index(s) for s in stop if s in full), default=len(full))
        assert answer.text == full[:cut]
        count = len(answer.token_ids)
        assert tokenizer.decode(answer.token_ids).startswith(answer.text)
        assert not tokenizer.decode(ids[: count - 1]).startswith(answer.text)


TEXT_IDS = st.lists(
    st.one_of(
        st.sampled_from(ids_of(b"aab\xe4\xbd\xa0\xc3\xa9\xff")), st.sampled_from([0, 1, 2, 259, 260, 262, 266, 275])
    ),
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(
    ids=TEXT_IDS,
    stops=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=3),
    limit=st.integers(0, 16),
    minimum=st.integers(0, 4),
    stop_ids=st.sampled_from([set(), {2}, {2, 259}]),
    seed=st.integers(0, 9),
)
@example(ids=ids_of(b"\xe4A"), stops=[(1, 1)], limit=9, minimum=0, stop_ids=set(), seed=0)
@example(ids=ids_of(b"a\xe4\xbdb"), stops=[(2, 1)], limit=9, minimum=0, stop_ids=set(), seed=1)
@example(ids=[*ids_of(b"a"), 0, *ids_of(b"b")], stops=[(1, 1)], limit=9, minimum=0, stop_ids=set(), seed=2)
def test_any_answer(
    ids: list[int], stops: list[tuple[int, int]], limit: int, minimum: int, stop_ids: set[int], seed: int
) -> None:
    text = byte_level().decode(ids)
    found = [text[at : at + length] for at, length in stops if text[at : at + length]]
    check(ids, SamplingParams(limit, stop=found, min_new_tokens=min(minimum, limit), logprobs=0), stop_ids, seed=seed)


def test_long_answers_are_linear() -> None:
    """Every piece is looked at once: characters fed to the matcher equal the text's length."""
    fed = 0
    original = stopping._StopString._extend

    def counted(self: Any, length: int, character: str) -> int:
        nonlocal fed
        fed += 1
        return original(self, length, character)

    with pytest.MonkeyPatch.context() as patch:
        answer = Answer(SamplingParams(10**6, stop="ab" * 50 + "c"), byte_level(), stop_ids=frozenset())
        patch.setattr(stopping._StopString, "_extend", counted)
        for token in ids_of("ab") * 2000:
            answer.push(token)
            answer.take()
    assert fed == 4000
    answer.finish("cancelled")
    assert answer.text == "ab" * 2000


# --- do these tests notice? -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old, new",
    [
        ("[0] >= length:", "[0] > length:"),  # one token too many
        ("[0] >= length:", "[0] >= length - 1:"),  # one too few
        ("[:length]", "[: length + 1]"),
        ("del self.token_ids[keep:], self.drafts[keep:]", "del self.token_ids[keep:]"),
        ("del self.logprobs[keep:]", "pass"),
        (">= self._params.max_new_tokens", "> self._params.max_new_tokens"),
        (">= self._params.min_new_tokens", "> self._params.min_new_tokens"),
        ("max((stop.matched for stop in self._stops), default=0)", "0"),
        ("max((stop.matched for stop in self._stops), default=0)", "len(self._stops)"),
        ("self.matched = self._shorter[self.matched]", "self.matched = 0"),
        ("length = self._shorter[length]", "length = 0"),
        ("if spans[self._scanned] != NO_TEXT or not self._stops:", "if True:"),
        ("[1] <= self._taken_length", "[1] <= self._length"),
        ("self._add_text(self._decoder.flush())", "pass"),
        ("if token in self._stop_ids or", "if token in self._stop_ids and len(self.token_ids) > 1 or"),
        ("return min(starts, default=None)", "return max(starts, default=None)"),
        ("stop_ids.union(params.stop_token_ids)", "stop_ids"),
        ("keep = len(spans)", "keep = len(spans) - 1"),
    ],
)
def test_planted_faults(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    broken = mutant(stopping, old, new)
    monkeypatch.setattr(stopping, "Answer", broken.Answer)
    monkeypatch.setitem(globals(), "Answer", broken.Answer)
    assert noticed(
        test_every_window_as_stop_string,
        lambda: test_limits_and_stop_ids(4, 7),
        lambda: test_stop_strings("aaab", ["aab"], "a"),
        lambda: test_stop_strings("ababac", ["abac"], "ab"),
        lambda: test_stop_strings("say END now", ["END", "say END"], ""),
        test_stop_token_ids_always_stop,
        test_stop_inside_a_token,
        test_minimum_holds_stop_strings_back,
        test_flush_passes_the_same_filters,
        test_only_the_beginning_of_a_stop_is_held,
        test_tokens_wait_for_their_text,
    )


def test_planted_faults_in_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new in (("start += 1", "start += 0"), ("self._length + self.pending)", "self._length)")):
        monkeypatch.setattr(stopping, "IncrementalDecoder", mutant(text_module, old, new).IncrementalDecoder)
        assert noticed(test_every_window_as_stop_string, test_tokens_wait_for_their_text)


def noticed(*checks: Callable[[], Any]) -> bool:
    for test in checks:
        try:
            test()
        except (AssertionError, IndexError):
            return True
    return False
