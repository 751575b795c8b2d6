"""setup.sh: the right wheels for the board, proven on the GPU, and nothing done twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.boards import Stubs, make_board, run, snapshot

JP6 = "https://pypi.jetson-ai-lab.io/jp6/cu126"


@pytest.fixture
def venv(tmp_path: Path, stubs: Stubs) -> Path:
    """Where the environment will be. python3 -m venv puts stubs there that log like the others."""
    folder = tmp_path / "venv"
    template = tmp_path / "template"
    template.mkdir()
    for name in ("python", "pip", "edgespec"):
        stubs.add(name)
        (stubs.folder / name).rename(template / name)
    stubs.add("python3", f'if [[ "$1" == -m ]]; then mkdir -p "$3/bin" && cp "{template}"/* "$3/bin/"; fi')
    stubs.add("dpkg-query", 'printf "install ok installed"')
    for name in ("apt-get", "add-apt-repository"):
        stubs.add(name)
    return folder


def setup(root: Path, stubs: Stubs, venv: Path, *arguments: str, code: int = 0) -> str:
    done = run("setup.sh", "--root", str(root), "--venv", str(venv), *arguments, stubs=stubs)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def installs(stubs: Stubs) -> list[str]:
    return [call for call in stubs.calls if call.startswith(("pip ", "apt-get ", "add-apt"))]


@pytest.mark.parametrize(
    ("name", "words", "lacks"),
    [
        ("nx-16", f"--index-url {JP6} torch triton onnxruntime-gpu", "[cpu]"),
        ("thor", "install torch onnxruntime-gpu", "jetson-ai-lab"),
        ("x86", "[cpu]", "onnxruntime-gpu"),
    ],
)
def test_wheels_are_chosen_by_l4t(root: Path, stubs: Stubs, venv: Path, name: str, words: str, lacks: str) -> None:
    setup(make_board(root, name), stubs, venv, "--apply")
    pips = "\n".join(installs(stubs))
    assert words in pips
    assert lacks not in pips
    assert any("verify_gpu.py" in call for call in stubs.calls) == (name != "x86")
    assert stubs.calls[-1] == "edgespec doctor"


def test_without_apply_nothing_is_installed(root: Path, stubs: Stubs, venv: Path) -> None:
    before = snapshot(make_board(root, "nx-16"))
    assert "Nothing was changed" in setup(root, stubs, venv)
    assert snapshot(root) == before
    assert not venv.exists()
    assert installs(stubs) == []


def test_an_environment_that_is_there_stays(root: Path, stubs: Stubs, venv: Path) -> None:
    make_board(root, "nx-16")
    setup(root, stubs, venv, "--apply")
    assert "CUDA_MODULE_LOADING=LAZY" in (venv / "edgespec.env").read_text()
    (venv / "mine").touch()
    text = setup(root, stubs, venv, "--apply")
    assert "virtual environment: nothing to do" in text
    assert (venv / "mine").exists()


def test_missing_system_packages_alone_are_installed(root: Path, stubs: Stubs, venv: Path) -> None:
    stubs.add("dpkg-query", 'case "$*" in *gcc*) exit 1 ;; *) printf "install ok installed" ;; esac')
    setup(make_board(root, "nx-16"), stubs, venv, "--apply")
    assert [call for call in installs(stubs) if call.startswith("apt-get")] == ["apt-get install -y gcc"]


@pytest.mark.parametrize(("has", "count"), [("GLIBCXX_3.4.30\0GLIBCXX_3.4.32", 0), ("GLIBCXX_3.4.30", 1)])
def test_libstdcxx_is_renewed_where_the_wheels_want_it(
    root: Path, stubs: Stubs, venv: Path, has: str, count: int
) -> None:
    library = make_board(root, "nx-16") / "usr/lib/aarch64-linux-gnu/libstdc++.so.6"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF\0" + has.encode() + b"\0")
    setup(root, stubs, venv, "--apply")
    assert sum(call.startswith("add-apt-repository") for call in stubs.calls) == count


def test_a_gpu_that_does_not_compute_is_an_error(root: Path, stubs: Stubs, venv: Path, tmp_path: Path) -> None:
    (tmp_path / "template/python").write_text("#!/usr/bin/env bash\nexit 1\n")
    assert "does not work on the GPU" in setup(make_board(root, "nx-16"), stubs, venv, "--apply", code=1)
    assert "edgespec doctor" not in stubs.calls


@pytest.mark.parametrize(
    ("name", "words"), [("agx", "update to JetPack 6"), ("unknown", "mount /etc/nv_tegra_release")]
)
def test_boards_without_wheels_are_refused_before_anything_is_done(
    root: Path, stubs: Stubs, venv: Path, name: str, words: str
) -> None:
    make_board(root, "nx-16" if name == "unknown" else name)
    if name == "unknown":
        (root / "etc/nv_tegra_release").unlink()
    assert words in setup(root, stubs, venv, "--apply", code=1)
    assert installs(stubs) == []
    setup(root, stubs, venv, "--apply", "--index", "https://example.org/simple")
    assert any("https://example.org/simple" in call for call in installs(stubs))


def test_a_python_that_is_too_old_is_refused(root: Path, stubs: Stubs, venv: Path) -> None:
    stubs.add("python3", 'case "$1" in -c) exit 1 ;; *) echo Python 3.8.10 ;; esac')
    assert "python3 is Python 3.8.10" in setup(make_board(root, "nx-16"), stubs, venv, "--apply", code=1)


@pytest.mark.parametrize("flag", ["--venv", "--source", "--index"])
def test_a_flag_without_its_value_is_said_and_nothing_is_done(root: Path, stubs: Stubs, venv: Path, flag: str) -> None:
    assert f"error: {flag} wants a value" in setup(make_board(root, "nx-16"), stubs, venv, "--apply", flag, code=1)
    assert stubs.calls == []


@pytest.mark.parametrize(("name", "told"), [("nx-16", True), ("x86", False)])
def test_an_operation_on_the_gpu_is_announced_where_there_is_one(
    root: Path, stubs: Stubs, venv: Path, name: str, told: bool
) -> None:
    assert ("an operation on the GPU" in setup(make_board(root, name), stubs, venv)) == told


def test_what_was_built_for_the_board_is_not_replaced(root: Path, stubs: Stubs, venv: Path) -> None:
    """By torch or numpy of PyPI, when edgespec's own packages come from there."""
    frozen = "certifi==1\nnumpy==1.26.4\ntorch==2.8.0\ntorchvision==0.23\ntriton @ file:///t.whl\nonnxruntime-gpu==1.23"
    pip = venv.parent / "template" / "pip"
    pip.write_text(pip.read_text() + f'\nif [[ "$1" == freeze ]]; then echo "{frozen}"; fi\n')
    setup(make_board(root, "nx-16"), stubs, venv, "--apply")
    kept = (venv / "constraints.txt").read_text().splitlines()
    assert kept == ["numpy==1.26.4", "torch==2.8.0", "triton @ file:///t.whl", "onnxruntime-gpu==1.23"]
    last = [call for call in installs(stubs) if call.startswith("pip install")][-1]
    assert last.startswith(f"pip install --constraint {venv}/constraints.txt ")
