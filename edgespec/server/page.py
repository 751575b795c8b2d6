"""The page at `/`: one file, allowed to run what is in it and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from importlib import resources

from starlette.responses import HTMLResponse


@lru_cache(maxsize=1)
def _page() -> tuple[str, str]:
    """The page, and the policy that lets its own script and style run by their hashes."""
    text = resources.files("edgespec.server").joinpath("page.html").read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {_hashes(text, 'script')}",
        f"style-src {_hashes(text, 'style')}",
        "connect-src 'self'",
        "img-src data:",  # its icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
    return text, "; ".join(policy)


def page() -> HTMLResponse:
    text, policy = _page()
    headers = {"content-security-policy": policy, "x-frame-options": "DENY", "cache-control": "no-cache"}
    return HTMLResponse(text, headers=headers)


def _hashes(text: str, tag: str) -> str:
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
