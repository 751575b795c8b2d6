"""What an import may cost, and the walls between the packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "onnxruntime", "onnx", "huggingface_hub", "tokenizers", "numpy")
# They import no others of ours, apart from each other.
LEAVES = ("edgespec.errors", "edgespec.files")
MODELS_MAY = ("edgespec.models", "edgespec.kernels", *LEAVES)
TORCH_MODULES = (
    "predictor.train",
    "edgespec.models.reference",
    "edgespec.models.cuda",
    "edgespec.kernels",
    "edgespec.bench",
    "drafts.train",
)


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("edgespec", ""),
        ("edgespec.catalog", ""),
        ("edgespec.config", ""),
        ("edgespec.telemetry.trace", ""),
        ("edgespec.models.checks", "numpy"),
        ("edgespec.models.kv.plain", "numpy"),
    ],
)
def test_light_modules_import_nothing_heavy(module: str, allowed: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == allowed


def test_public_names_come_when_they_are_asked_for() -> None:
    assert set(edgespec.__all__) == {*edgespec._HOMES, "__version__"}
    for name in edgespec.__all__:
        assert getattr(edgespec, name) is not None
        assert name in dir(edgespec)
    from edgespec.results import TextDelta

    assert edgespec.TextDelta is TextDelta
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        edgespec.Engin  # noqa: B018


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(tree: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """Imported module names: of the whole file, or only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom):
            yield f"relative import in line {node.lineno}"
        elif everywhere or not _deferred(node):
            yield from imports(node, everywhere=everywhere)


def _deferred(node: ast.AST) -> bool:
    """Whether the node's body does not run at import: functions, and blocks for type checkers."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith((package + ".", package + "_")) for package in packages)


@pytest.mark.parametrize(
    ("package", "forbidden", "allowed"),
    [
        ("predictor", ("edgespec", "drafts", "torch", "transformers"), ()),
        ("drafts", ("edgespec", "predictor"), ("edgespec.models", "edgespec.errors", "edgespec.files")),
        ("edgespec/models", ("edgespec", "drafts", "predictor"), MODELS_MAY),
        ("edgespec/kernels", ("edgespec", "drafts", "predictor"), ("edgespec.kernels", "edgespec.errors")),
        ("edgespec/memory", ("edgespec.cli", "edgespec.engine", "edgespec.decoding", "predictor"), ()),
        ("edgespec/decoding", ("edgespec.cli", "edgespec.engine", "edgespec.bench", "torch"), ()),
    ],
)
def test_imports_point_one_way(package: str, forbidden: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for path in sources(package):
        for name in imports(ast.parse(path.read_text(encoding="utf-8")), everywhere=True):
            wrong = within(name, forbidden) and not within(name, allowed)
            wrong = wrong and not (within(name, ("torch",)) and within(module_name(path), TORCH_MODULES))
            assert not wrong, f"{path.relative_to(ROOT)} imports {name}"
            assert not name.startswith("relative"), f"{path.relative_to(ROOT)}: {name}"


def test_torch_is_imported_only_where_it_is_the_engine() -> None:
    for path in [*sources("edgespec"), *sources("drafts"), *sources("predictor")]:
        if within(module_name(path), TORCH_MODULES):
            continue
        names = set(imports(ast.parse(path.read_text(encoding="utf-8")), everywhere=False))
        heavy = {name for name in names if within(name, ("torch", "transformers"))}
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy} when it is imported"


@pytest.mark.parametrize("leaf", ["errors.py", "files.py"])
def test_leaves_import_nothing_of_ours(leaf: str) -> None:
    tree = ast.parse((ROOT / "edgespec" / leaf).read_text(encoding="utf-8"))
    assert not any(within(name, ("edgespec", "drafts", "predictor")) for name in imports(tree, everywhere=True))
