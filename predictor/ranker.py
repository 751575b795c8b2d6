"""The ranker: from features of a text to every draft's chance that its first token is accepted in the rounds ahead.

A small network as an ONNX file, run by ONNX Runtime on one thread that does not spin. The file says in its metadata
which drafts it knows (by the sha256 of their weights), for which target, and how it was trained. Nothing in the file is
trusted: sizes, names, shapes and numbers are checked when it is loaded, and every answer is checked again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from predictor.features import VERSION, FloatArray, Layout, TextFeatures

FORMAT = 1
METADATA = "edgespec.ranker"  # the one entry of the file's metadata, a JSON object
INPUT, OUTPUT = "features", "rates"
MAX_BYTES = 16 << 20  # of the file
MAX_METADATA = 256 << 10  # characters
ZOO = Path(__file__).parent / "zoo"  # rankers that come with the program: <target>/ranker.onnx
MAX_DRAFTS = 64
MAX_HIDDEN = 1 << 16
_SHA256 = re.compile(r"[0-9a-f]{64}")


class RankerError(Exception):
    """A ranker cannot be used, or gave an answer that is none; the message names the file and the cause."""


@dataclass(frozen=True, slots=True)
class RankedDraft:
    """A draft that a ranker knows. fingerprint: sha256 (hex) of its weights, as in the traces."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class RankerInfo:
    """What a ranker's file says of itself.

    target: fingerprint (sha256, hex) of the target's weights. horizon: positions ahead that its rates are for.
    training: facts for people.
    """

    target: str
    target_name: str
    hidden_size: int
    horizon: int
    drafts: tuple[RankedDraft, ...]
    training: Mapping[str, Any] = field(default_factory=dict)
    feature_version: int = VERSION

    def to_text(self) -> str:
        """The metadata of the file."""
        data = {**asdict(self), "training": dict(self.training), "format": FORMAT}
        return json.dumps(data, allow_nan=False)

    @classmethod
    def from_text(cls, text: str) -> RankerInfo:
        """Raises ValueError with what is wrong."""
        if len(text) > MAX_METADATA:
            raise ValueError(f"its metadata have {len(text)} characters, more than {MAX_METADATA}")
        data = _object(text)
        if data.pop("format", None) != FORMAT:
            raise ValueError("its format is not known; this version of edgespec is too old, or the file is no ranker")
        try:
            drafts = tuple(RankedDraft(**draft) for draft in data.pop("drafts"))
            info = cls(drafts=drafts, **data)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"its metadata are not complete ({error})") from None
        info._check()
        return info

    def _check(self) -> None:
        if self.feature_version != VERSION:
            raise ValueError(f"it reads features of version {self.feature_version}, these are {VERSION}; train it anew")
        sizes = ((self.hidden_size, MAX_HIDDEN), (self.horizon, 1 << 12), (len(self.drafts), MAX_DRAFTS))
        if not all(isinstance(size, int) and 1 <= size <= most for size, most in sizes):
            raise ValueError("its sizes are none that a ranker has")
        names = [draft.name for draft in self.drafts]
        if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
            raise ValueError(f"its drafts need names of their own, not {names}")
        for word in (self.target, *(draft.fingerprint for draft in self.drafts)):
            if not isinstance(word, str) or not _SHA256.fullmatch(word):
                raise ValueError(f"{word!r} is no sha256")
        if not isinstance(self.target_name, str) or not isinstance(self.training, dict):
            raise ValueError("its metadata have values of the wrong kind")


def _object(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("its metadata are no JSON") from None
    if not isinstance(data, dict):
        raise ValueError("its metadata are no JSON object")
    return data


class Ranker:
    """A ranker that is ready. `names` are the drafts that `rank` answers for.

    Used by one thread at a time.
    """

    def __init__(self, label: str, info: RankerInfo, session: Any, names: Sequence[str | None]) -> None:
        """names: for each draft of `info`, what it is called here, None for one that is not here."""
        self.label = label
        self.info = info
        self._session = session
        self._columns = {name: place for place, name in enumerate(names) if name is not None}
        # A draft that is not here keeps its place, under a name that no draft has.
        self.layout = Layout(info.hidden_size, [name or f"({i})" for i, name in enumerate(names)])

    @classmethod
    def load(cls, path: Path, *, target: str | None = None, drafts: Mapping[str, str] | None = None) -> Ranker:
        """The ranker in a file.

        target: fingerprint of the target's weights, None leaves the check out. drafts: name -> fingerprint of those
        that are here; the ones that the ranker was trained with are ranked, under the names they have here. None = all
        that it knows. Raises RankerError for a file that is damaged, made for another target, or knows none of them.
        """
        content = _read(path)
        session = _session(path, content)
        try:
            info = RankerInfo.from_text(_metadata(session))
            if target is not None and info.target != target:
                raise _OtherTarget(
                    f"it was made for another target, {info.target_name} (weights {info.target[:12]}..., these are "
                    f"{target[:12]}...); train one with 'edgespec predictor train'"
                )
            ranker = cls(str(path), info, session, _names(info, drafts))
            ranker._check_shapes()
        except ValueError as error:
            raise RankerError(f"ranker {path} cannot be used: {error}.") from error
        ranker.rates(np.zeros((1, ranker.layout.size), np.float32))
        return ranker

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def features(self) -> TextFeatures:
        """Empty features of a text, as this ranker reads them."""
        return TextFeatures(self.layout)

    def rank(self, features: FloatArray) -> dict[str, float]:
        """For each draft the chance, 0 to 1, that its first token is accepted, on average over the positions ahead.

        features: what `TextFeatures.vector` gave. Raises RankerError for other shapes, numbers that are none, and
        whatever goes wrong inside.
        """
        if features.shape != (self.layout.size,):
            raise RankerError(f"ranker {self.label}: features of shape {features.shape}, not ({self.layout.size},).")
        row = self.rates(features[None])[0].tolist()
        return {name: row[place] for name, place in self._columns.items()}

    def rates(self, features: FloatArray) -> FloatArray:
        """`rank` for many texts: float32 [n, size] -> [n, drafts of the file], in the file's order."""
        if not np.isfinite(features).all():
            raise RankerError(f"ranker {self.label}: the features have NaN or infinite values.")
        try:
            (rates,) = self._session.run([OUTPUT], {INPUT: np.ascontiguousarray(features, np.float32)})
        except Exception as error:  # ONNX Runtime raises classes of its own, all derived from Exception
            raise RankerError(f"ranker {self.label} failed: {str(error)[:200]}.") from error
        if rates.shape != (len(features), len(self.info.drafts)):
            raise RankerError(f"ranker {self.label}: answered with shape {rates.shape}.")
        if not ((rates >= 0) & (rates <= 1)).all():  # also true for NaN
            raise RankerError(f"ranker {self.label}: answered with what is no chance (NaN, or outside 0 to 1).")
        return np.asarray(rates, np.float32)

    def _check_shapes(self) -> None:
        for what, found, name, size in (
            ("input", self._session.get_inputs(), INPUT, self.layout.size),
            ("output", self._session.get_outputs(), OUTPUT, len(self.info.drafts)),
        ):
            if [each.name for each in found] != [name]:
                raise ValueError(f"its {what}s are {[each.name for each in found]}, not {name} alone")
            shape, kind = list(found[0].shape), found[0].type
            if len(shape) != 2 or isinstance(shape[0], int) or shape[1] != size or kind != "tensor(float)":
                raise ValueError(f"its {what} is {kind} {shape}, not float [n, {size}]")


class _OtherTarget(ValueError):
    """The ranker is whole, and for another target."""


def find(folders: Iterable[Path], target: str, drafts: Mapping[str, str]) -> tuple[Ranker | None, list[str]]:
    """The first usable ranker of folder/*/*.onnx for this target and some of these drafts, and why others are not.

    Rankers for other targets are passed over in silence. Arguments as in `Ranker.load`. Never raises RankerError.
    """
    reasons: list[str] = []
    for folder in folders:
        for path in sorted(folder.glob("*/*.onnx")):
            try:
                return Ranker.load(path, target=target, drafts=drafts), reasons
            except RankerError as error:
                if not isinstance(error.__cause__, _OtherTarget):
                    reasons.append(str(error))
    return None, reasons


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise RankerError(f"ranker {path} cannot be read: {error.strerror or error}.") from error
    if len(content) > MAX_BYTES:
        raise RankerError(f"ranker {path} cannot be used: it has more than {MAX_BYTES} bytes.")
    if not content:
        raise RankerError(f"ranker {path} cannot be used: it is empty.")
    return content


def _session(path: Path, content: bytes) -> Any:
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise RankerError(f"ranker {path} needs ONNX Runtime: pip install 'edgespec[cpu]'.") from error
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise RankerError(
            f"ranker {path} cannot be used: it is no ONNX file, or damaged ({str(error)[:120]})."
        ) from None


def _metadata(session: Any) -> str:
    found = session.get_modelmeta().custom_metadata_map
    if METADATA not in found:
        raise ValueError("it is an ONNX file, but no ranker: it does not say which drafts it knows")
    return str(found[METADATA])


def _names(info: RankerInfo, drafts: Mapping[str, str] | None) -> list[str | None]:
    """What each draft of the ranker is called here."""
    if drafts is None:
        return [draft.name for draft in info.drafts]
    # A name that both use goes to its own draft where two drafts have the same weights.
    here = {print_: name for name, print_ in drafts.items()}
    known = {draft.name: draft.fingerprint for draft in info.drafts}
    here.update({print_: name for name, print_ in drafts.items() if known.get(name) == print_})
    names: list[str | None] = []
    for draft in info.drafts:
        name = here.get(draft.fingerprint)
        names.append(name if name not in names else None)
    if not any(names):
        raise ValueError(
            f"it was trained with other drafts ({', '.join(draft.name for draft in info.drafts)}) than are here "
            f"({', '.join(drafts) or 'none'}), or earlier ones; train it anew with 'edgespec predictor train'"
        )
    return names
