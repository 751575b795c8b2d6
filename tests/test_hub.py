"""Hub models: from the cache without a network, only the files that are read, and a sentence for each failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from edgespec import catalog, hub
from edgespec.errors import CatalogError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cache_model(home: Path, repo: str, files: dict[str, str]) -> Path:
    """A model in the layout of the hub's cache; returns the snapshot folder."""
    root = home / "hub" / ("models--" + repo.replace("/", "--"))
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    for number, (name, text) in enumerate(files.items()):
        blob = root / "blobs" / f"{number:040x}"
        blob.write_text(text)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_cached_models_resolve_offline(tmp_path: Path) -> None:
    """In its own process, since the hub's client reads its variables when it is imported."""
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    whole = {
        "config.json": "{}",
        "tokenizer.json": "{}",
        "model-1.safetensors": "",
        "model-2.safetensors": "",
        "model.safetensors.index.json": index,
    }
    expected = {
        "org/one": str(
            cache_model(tmp_path, "org/one", {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""})
        ),
        "org/shards": str(cache_model(tmp_path, "org/shards", whole)),
        "org/gguf": str(cache_model(tmp_path, "org/gguf", {"m.gguf": ""}) / "m.gguf"),
        "org/two:b.gguf": str(cache_model(tmp_path, "org/two", {"a.gguf": "", "b.gguf": ""}) / "b.gguf"),
    }
    cache_model(
        tmp_path, "org/lacks-shard", {name: text for name, text in whole.items() if name != "model-2.safetensors"}
    )
    code = (
        "import sys, json; from edgespec import catalog; from edgespec.errors import EdgespecError\n"
        "def answer(name):\n"
        "    try: return str(catalog.resolve(name))\n"
        "    except EdgespecError as error: return 'ERROR ' + str(error)\n"
        "print(json.dumps({name: answer(name) for name in sys.argv[1:]}))"
    )
    names = [*expected, "org/lacks-shard", "org/unknown", "org/two:c.gguf"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    env.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code, *names], env=env, capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)
    assert {name: answers[name] for name in expected} == expected
    for name in names[len(expected) :]:
        repo = name.partition(":")[0]
        assert answers[name].startswith(f"ERROR {repo} is not whole in the hub's cache on this machine"), answers[name]


class FakeHub:
    """Stands in for the hub's client; `files` is what the repository has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str]) -> None:
        self.files, self.folder = files, tmp_path / "snapshot"
        self.folder.mkdir()
        self.error: Exception | None = None
        self.asked: list[dict[str, Any]] = []
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.hf_hub_download)

    def list_repo_files(self, repo: str) -> list[str]:
        if self.error is not None:
            raise self.error
        return self.files

    def snapshot_download(self, repo: str, **options: Any) -> str:
        if options.get("local_files_only"):
            raise blank(errors.LocalEntryNotFoundError)
        self.asked.append(options)
        for name in huggingface_hub.utils.filter_repo_objects(
            self.files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
        ):
            (self.folder / name).write_text("")
        return str(self.folder)

    def hf_hub_download(self, repo: str, filename: str) -> str:
        if self.error is not None:
            raise self.error
        if filename not in self.files:
            raise blank(errors.EntryNotFoundError)
        (self.folder / filename).write_text("")
        return str(self.folder / filename)


def blank(kind: type[Exception]) -> Exception:
    """An error of the hub's client without the reply that its constructor wants."""
    return kind.__new__(kind, "")


def test_only_safe_files_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
    bad = [
        "pytorch_model.bin",
        "model.pt",
        "modeling_x.py",
        "onnx/model.safetensors",
        "model-old/a.safetensors",
        "consolidated.safetensors",
        "README.md",
    ]
    fake = FakeHub(monkeypatch, tmp_path, [*good, "model.safetensors", *bad])
    assert catalog.resolve("org/name") == fake.folder
    assert sorted(os.listdir(fake.folder)) == sorted([*good, "model.safetensors"])


def test_gguf_repositories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeHub(monkeypatch, tmp_path, ["README.md", "m-Q4.gguf"])
    assert catalog.resolve("org/name") == fake.folder / "m-Q4.gguf"
    fake.files += ["m-Q8.gguf"]
    with pytest.raises(CatalogError, match=r"2 GGUF files \(m-Q4.gguf, m-Q8.gguf\): name one, as org/name:m-Q4.gguf"):
        catalog.resolve("org/name")
    assert catalog.resolve("org/name:m-Q8.gguf") == fake.folder / "m-Q8.gguf"
    with pytest.raises(CatalogError, match=r"org/name on the hub has no file m-Q9.gguf"):
        catalog.resolve("org/name:m-Q9.gguf")


def test_pickles_alone_are_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeHub(monkeypatch, tmp_path, ["config.json", "tokenizer.json", "pytorch_model.bin"])
    with pytest.raises(CatalogError, match="org/name on the hub has neither safetensors nor GGUF weights"):
        catalog.resolve("org/name")
    assert fake.asked == []


def test_weights_without_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeHub(monkeypatch, tmp_path, ["model.safetensors"])
    with pytest.raises(CatalogError, match=r"org/name .* has no config\.json"):
        catalog.resolve("org/name")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (blank(errors.GatedRepoError), "org/name is gated on the hub: accept its terms"),
        (blank(errors.RepositoryNotFoundError), "org/name is not on the hub, or is private"),
        (blank(errors.OfflineModeIsEnabled), "org/name is not whole in the hub's cache"),
        (ConnectionError("refused"), "org/name is not whole in the hub's cache"),
        (type("ConnectError", (Exception,), {})("no route"), "org/name is not whole in the hub's cache"),
        (RuntimeError("server on fire\nmore"), "org/name cannot be fetched from the hub: RuntimeError: server on fire"),
    ],
)
def test_failures_are_sentences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, text: str) -> None:
    FakeHub(monkeypatch, tmp_path, []).error = error
    with pytest.raises(CatalogError) as caught:
        catalog.pull("org/name")
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def test_a_whole_cached_model_is_not_asked_for_again_unless_pulled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeHub(monkeypatch, tmp_path, ["config.json", "tokenizer.json", "model.safetensors"])
    monkeypatch.setattr(hub, "cached", lambda _repo, _filename: tmp_path)
    assert catalog.resolve("org/name") == tmp_path
    assert fake.asked == []
    assert catalog.pull("org/name") == fake.folder
    fake.error = ConnectionError("no route")
    assert catalog.pull("org/name") == tmp_path  # whole, so being offline is no reason to fail


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("{", "cannot be read"),
        ('{"weight_map": []}', "cannot be read"),
        ('{"weight_map": {"a": "x"}}', "x of its 1 weight files"),
    ],
)
def test_missing_part_reads_the_index(tmp_path: Path, index: str, problem: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "tokenizer.json" in (hub.missing_part(tmp_path) or "")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "neither" in (hub.missing_part(tmp_path) or "")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert problem in (hub.missing_part(tmp_path) or "")
