"""Which ranker belongs to a target and the drafts that are here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drafts.manifest import Manifest
    from predictor.ranker import Ranker


def find_ranker(target: str, manifests: Mapping[str, Manifest], home: Path) -> tuple[Ranker | None, list[str]]:
    """The ranker for drafts with weights, the user's own (below `home`) before the program's; and why others are not.

    target: fingerprint of its weights; a draft may have been made for other weights of the same model. manifests: by
    name. None is no fault: drafts are then chosen by observation.
    """
    if not manifests:
        return None, []
    from predictor.ranker import ZOO, find

    fingerprints = {name: manifest.weights_fingerprint for name, manifest in manifests.items()}
    found, reasons = None, list[str]()
    for each in dict.fromkeys([target, *(manifest.target.fingerprint for manifest in manifests.values())]):
        found, more = find([home / "rankers", ZOO], each, fingerprints)
        reasons += more
        if found is not None:
            break
    return found, list(dict.fromkeys(reasons))
