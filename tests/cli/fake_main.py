"""`python -m tests.cli.fake_main ARGS`: the real command line on a scripted engine, for tests that need a process.

The script comes as JSON in FAKE_SCRIPT: the fields of Script.
"""

from __future__ import annotations

import json
import os
import sys

from edgespec.cli import runtime
from edgespec.cli.main import main
from tests.cli.fakes import FakeEngine, Script

if __name__ == "__main__":
    FakeEngine.reset(Script(**json.loads(os.environ.get("FAKE_SCRIPT", "{}"))))
    runtime.engine_class = lambda: FakeEngine  # type: ignore[assignment,return-value]
    sys.exit(main())
