"""What holds for all scripts: shellcheck, help, refused arguments; the container's recipe; the check of the GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.boards import SCRIPTS, run

ROOT = SCRIPTS.parents[1]
ALL = sorted(path for path in SCRIPTS.rglob("*.sh"))
RUNNABLE = [str(path.relative_to(SCRIPTS)) for path in ALL if path.name != "lib.sh"]


def test_shellcheck_finds_nothing() -> None:
    command = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if command is None:
        pytest.skip("shellcheck is not installed (it comes with the dev extra)")
    done = subprocess.run([command, "-x", *ALL], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_script_explains_itself_and_refuses_what_it_does_not_know(name: str) -> None:
    path = SCRIPTS / name
    text = path.read_text()
    assert path.stat().st_mode & 0o111
    assert text.startswith("#!/usr/bin/env bash\n# Usage: ")
    assert "\nset -euo pipefail\n" in text
    assert len(text.splitlines()) < 400
    done = run(name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: {path.name}")
    assert "source" not in done.stdout.splitlines()
    unknown = run(name, "--frobnicate")
    assert unknown.returncode == 1
    assert "unknown argument '--frobnicate'" in unknown.stderr


def test_the_docs_name_every_script_and_no_other() -> None:
    text = (ROOT / "docs/jetson.md").read_text()
    named = set(re.findall(r"scripts/jetson/([\w/.]+)", text)) - {""}
    assert all((SCRIPTS / name).exists() for name in named)
    assert all(Path(name).name in text for name in RUNNABLE)


def test_the_containers_recipe_fits_this_checkout() -> None:
    text = (SCRIPTS / "Dockerfile").read_text()
    head = re.match(r"#---\n((?:# [a-z]+: .*\n)+)#---\n", text)
    assert head is not None
    assert {line.split(":")[0][2:] for line in head[1].splitlines()} >= {"name", "depends", "requires"}
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert copied
    assert all((ROOT / word).exists() for word in copied)
    assert text.index("ARG BASE_IMAGE") < text.index("FROM ${BASE_IMAGE}")


@pytest.mark.parametrize(
    ("modules", "code", "words"),
    [
        ({}, 1, "fail  torch cannot be imported"),
        ({"torch": "class cuda:\n is_available = staticmethod(lambda: False)\n__version__ = '2'"}, 1, "sees no GPU"),
        (
            {
                "torch": "float16 = 1\n__version__ = '2'\nclass cuda:\n is_available = staticmethod(lambda: True)\n"
                "def ones(*a, **k): raise RuntimeError('no kernel image is available')"
            },
            1,
            "cannot multiply on the GPU: no kernel image",
        ),
        (
            {
                "torch": "float16 = 1\n__version__ = '2'\n"
                "class ones:\n def __init__(self, *a, **k): pass\n def __matmul__(self, o): return self\n"
                " def float(self): return self\n def sum(self): return 256.0 ** 3\n"
                "class cuda:\n is_available = staticmethod(lambda: True)\n"
                " get_device_capability = staticmethod(lambda: (8, 7))\n"
                " get_device_name = staticmethod(lambda: 'Orin')",
                "onnxruntime": "__version__ = '1'\nget_available_providers = lambda: ['CPUExecutionProvider']",
            },
            0,
            "has no CUDA provider",
        ),
    ],
)
def test_the_check_of_the_gpu(tmp_path: Path, modules: dict[str, str], code: int, words: str) -> None:
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-S", SCRIPTS / "verify_gpu.py"],  # -S: without the packages that are installed here
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == code
    assert words in done.stdout
