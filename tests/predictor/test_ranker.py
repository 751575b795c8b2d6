"""Rankers on disk: whatever is not whole, or not what it says, is refused with the file's name and the cause."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictor import ranker as ranker_module
from predictor.features import SCALARS, Layout
from predictor.ranker import METADATA, RankedDraft, Ranker, RankerError, RankerInfo, find
from predictor.train.export import ranker_bytes
from tests.support.traces import sha

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

NAMES = ("a", "b", "c")
INFO = RankerInfo(
    target=sha("target"),
    target_name="tiny",
    hidden_size=4,
    horizon=16,
    drafts=tuple(RankedDraft(name, sha(name)) for name in NAMES),
    training={"bits": 0.5},
)
LAYOUT = Layout(4, NAMES)


def layers(outputs: int = 3, inputs: int = LAYOUT.size) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    shapes = ((5, inputs), 5, (outputs, 5), outputs)
    w1, b1, w2, b2 = ((0.1 * rng.standard_normal(shape)).astype(np.float32) for shape in shapes)
    return [(w1, b1), (w2, b2)]


def write(folder: Path, info: RankerInfo = INFO, made: Any = None) -> Path:
    path = folder / "ranker.onnx"
    path.write_bytes(ranker_bytes(info, made or layers()))
    return path


def changed(path: Path, change: Any) -> Path:
    """The file with its ONNX model changed."""
    model = onnx.load(path)
    change(model)
    path.write_bytes(model.SerializeToString())
    return path


def set_metadata(text: str) -> Any:
    return lambda model: onnx.helper.set_model_props(model, {METADATA: text})


def with_metadata(**changes: Any) -> Any:
    return set_metadata(json.dumps({**json.loads(INFO.to_text()), **changes}))


def test_it_computes_what_the_layers_say(tmp_path: Path) -> None:
    ranker = Ranker.load(write(tmp_path), target=sha("target"), drafts={name: sha(name) for name in NAMES})
    assert (ranker.info, ranker.names) == (INFO, NAMES)
    x = np.random.default_rng(1).standard_normal(LAYOUT.size).astype(np.float32)
    (w1, b1), (w2, b2) = layers()
    expected = 1 / (1 + np.exp(-(w2 @ np.maximum(w1 @ x + b1, 0) + b2)))
    assert list(ranker.rank(x)) == list(NAMES)
    np.testing.assert_allclose(list(ranker.rank(x).values()), expected, rtol=1e-4)
    np.testing.assert_allclose(ranker.rates(np.stack([x, x]))[1], expected, rtol=1e-4)
    assert ranker.features().layout.size == LAYOUT.size


def test_one_thread_that_does_not_spin(tmp_path: Path, monkeypatch) -> None:
    import onnxruntime as ort

    seen = []
    real = ort.InferenceSession
    monkeypatch.setattr(
        ort, "InferenceSession", lambda content, options, **kw: seen.append(options) or real(content, options, **kw)
    )
    Ranker.load(write(tmp_path))
    (options,) = seen
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_drafts_are_known_by_their_weights(tmp_path: Path) -> None:
    path = write(tmp_path)
    some = Ranker.load(path, drafts={"a": sha("a"), "mine": sha("c"), "b": sha("another b")})
    assert some.names == ("a", "mine")
    x = np.random.default_rng(1).standard_normal(LAYOUT.size).astype(np.float32)
    every = Ranker.load(path).rank(x)
    assert some.rank(x) == {"a": every["a"], "mine": every["c"]}
    assert some.layout.drafts[0] == "a"
    assert some.layout.drafts[2] == "mine"
    assert "b" not in some.layout.drafts
    with pytest.raises(RankerError, match=r"trained with other drafts \(a, b, c\) than are here \(a\)"):
        Ranker.load(path, drafts={"a": sha("another a")})
    with pytest.raises(RankerError, match=r"than are here \(none\)"):
        Ranker.load(path, drafts={})


def test_two_drafts_with_the_same_weights(tmp_path: Path) -> None:
    drafts = tuple(RankedDraft(name, sha("a")) for name in ("a", "b"))
    path = write(tmp_path, dataclasses.replace(INFO, drafts=drafts), layers(2, Layout(4, ["a", "b"]).size))
    ranker = Ranker.load(path, drafts={"b": sha("a"), "a": sha("a")})
    assert len(set(ranker.names)) == len(ranker.names) == 1


def test_another_target(tmp_path: Path) -> None:
    with pytest.raises(RankerError, match=r"ranker.onnx cannot be used: it was made for another target, tiny"):
        Ranker.load(write(tmp_path), target=sha("other"))


def test_features_that_are_none(tmp_path: Path) -> None:
    ranker = Ranker.load(write(tmp_path))
    for bad in (np.nan, np.inf):
        x = np.zeros(LAYOUT.size, np.float32)
        x[3] = bad
        with pytest.raises(RankerError, match="NaN or infinite"):
            ranker.rank(x)
    for shape in ((LAYOUT.size - 1,), (1, LAYOUT.size), ()):
        with pytest.raises(RankerError, match="features of shape"):
            ranker.rank(np.zeros(shape, np.float32))


def test_weights_that_give_nan(tmp_path: Path) -> None:
    made = layers()
    made[0][1][:] = np.nan
    with pytest.raises(RankerError, match=r"ranker.onnx: answered with what is no chance"):
        Ranker.load(write(tmp_path, made=made))


def test_nan_that_comes_with_some_features_only(tmp_path: Path) -> None:
    (w1, b1), (w2, b2) = layers()
    w1[:2, 7], w2[0, :2] = 3e38, (1, -1)
    ranker = Ranker.load(write(tmp_path, made=[(w1, b1), (w2, b2)]))
    x = np.zeros(LAYOUT.size, np.float32)
    ranker.rank(x)
    x[7] = 10  # infinity minus infinity
    with pytest.raises(RankerError, match="no chance"):
        ranker.rank(x)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file(tmp_path: Path, share: float) -> None:
    path = write(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(RankerError, match=r"ranker .*ranker.onnx cannot be used: it"):
        Ranker.load(path)


@pytest.mark.parametrize("content", [b"<html>", b"\x00" * 1000, b"version https://git-lfs.github.com/spec/v1\n"])
def test_what_is_no_ranker(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ranker.onnx"
    path.write_bytes(content)
    with pytest.raises(RankerError, match="it is no ONNX file, or damaged"):
        Ranker.load(path)


def test_files_that_cannot_be_read_or_are_too_big(tmp_path: Path, monkeypatch) -> None:
    for path in (tmp_path / "missing.onnx", tmp_path):
        with pytest.raises(RankerError, match="cannot be read"):
            Ranker.load(path)
    path = write(tmp_path)
    monkeypatch.setattr(ranker_module, "MAX_BYTES", 1000)
    with pytest.raises(RankerError, match="more than 1000 bytes"):
        Ranker.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.ClearField("metadata_props"), "it is an ONNX file, but no ranker"),
        (set_metadata("x" * 300_000), "its metadata have 300000 characters"),
        (set_metadata("not json"), "are no JSON"),
        (set_metadata("[1]"), "no JSON object"),
        (set_metadata("[" * 50_000), "no JSON"),
        (with_metadata(format=2), "its format is not known"),
        (with_metadata(feature_version=0), "it reads features of version 0"),
        (with_metadata(drafts=[]), "its sizes"),
        (with_metadata(drafts=[{"name": "a"}]), "not complete"),
        (with_metadata(drafts=[{"name": "a", "fingerprint": "zz"}]), "'zz' is no sha256"),
        (with_metadata(drafts=[{"name": "a", "fingerprint": sha("a")}] * 3), "names of their own"),
        (with_metadata(drafts=[{"name": n, "fingerprint": sha(n)} for n in "ab"]), "its input is"),
        (with_metadata(target="0"), "is no sha256"),
        (with_metadata(hidden_size=5), "its input is"),
        (with_metadata(hidden_size=1 << 40), "its sizes"),
        (with_metadata(hidden_size="4"), "its sizes"),
        (with_metadata(extra=1), "not complete"),
        (with_metadata(training=[]), "of the wrong kind"),
    ],
)
def test_metadata_that_do_not_fit(tmp_path: Path, change, message) -> None:
    path = changed(write(tmp_path), change)
    with pytest.raises(RankerError, match=message) as caught:
        Ranker.load(path)
    assert str(path) in str(caught.value)


def test_a_network_of_another_shape(tmp_path: Path) -> None:
    with pytest.raises(RankerError, match=r"its output is tensor\(float\) \['n', 2\], not float \[n, 3\]"):
        Ranker.load(write(tmp_path, made=layers(outputs=2)))
    with pytest.raises(RankerError, match="its input is"):
        Ranker.load(write(tmp_path, made=layers(inputs=LAYOUT.size + 1)))

    def renamed(model: Any) -> None:
        model.graph.input[0].name = model.graph.node[0].input[0] = "x"

    with pytest.raises(RankerError, match=r"its inputs are \['x'\], not features alone"):
        Ranker.load(changed(write(tmp_path), renamed))


def test_a_failure_inside_is_a_ranker_error(tmp_path: Path, monkeypatch) -> None:
    ranker = Ranker.load(write(tmp_path))

    class Broken:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def run(self, *args: Any) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            return [self.answer]

    x = np.zeros(LAYOUT.size, np.float32)
    for answer, message in (
        (RuntimeError("boom"), "failed: boom"),
        (np.zeros((1, 2)), "answered with shape"),
        (np.full((1, 3), np.nan), "no chance"),
        (np.full((1, 3), 1.5), "no chance"),
    ):
        monkeypatch.setattr(ranker, "_session", Broken(answer))
        with pytest.raises(RankerError, match=message):
            ranker.rank(x)


def test_finding_the_one_that_fits(tmp_path: Path) -> None:
    drafts = {name: sha(name) for name in NAMES}
    for name, info in (
        ("0-damaged", None),
        ("1-other", dataclasses.replace(INFO, target=sha("other"))),
        ("2-right", INFO),
    ):
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, info or INFO)
        if info is None:
            path.write_bytes(path.read_bytes()[:100])
    found, reasons = find([tmp_path], sha("target"), drafts)
    assert found is not None
    assert found.label.endswith("2-right/ranker.onnx")
    assert len(reasons) == 1  # the damaged one; that there are rankers for other targets is no news
    assert "0-damaged" in reasons[0]
    assert find([tmp_path / "nowhere"], sha("target"), drafts) == (None, [])
    found, reasons = find([tmp_path], sha("target"), {"a": sha("later a")})
    assert found is None
    assert any("trained with other drafts" in reason for reason in reasons)


def test_every_scalar_has_a_place() -> None:
    assert [LAYOUT.scalar(name) - LAYOUT.parts["scalars"].start for name in SCALARS] == list(range(len(SCALARS)))
