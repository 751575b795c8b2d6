"""onnxruntime-genai as a contender, on the 4-bit graph that its own model builder makes.

The builder re-quantises dequantised weights by rounding, so this graph is a different, lossier model than the file; it
is here for its speed, and nothing compares its text.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.bench.model import bench_folder
from edgespec.bench.peers.base import Recorder
from edgespec.bench.peers.hf import hf_config
from edgespec.errors import ModelError

if TYPE_CHECKING:
    from edgespec.models.weights.opening import WeightFile


def graph_folder(weights: WeightFile) -> Path:
    """Where the graph of these weights, built by the installed version, is kept."""
    version = importlib.metadata.version("onnxruntime-genai")
    return bench_folder() / f"genai-{version}-{weights.fingerprint()[:16]}"


def write_hf_folder(weights: WeightFile, model: Path, folder: Path) -> None:
    """Write dequantised float32 weights, configuration and tokenizer as a folder that transformers can load."""
    from safetensors.numpy import save_file

    from edgespec.models.tokenizer import load_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(weights.spec)))
    tensors = {name: weights.read(name) for name in weights.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_tokenizer(model).save(folder)  # among others tokenizer.json
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def build_graph(model: Path) -> Path:
    """The folder with the 4-bit graph; built on the first call, complete or not there at all."""
    from edgespec.models.weights.opening import open_weights

    with open_weights(model) as weights:
        target = graph_folder(weights)
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as work:
            source, graph = Path(work) / "hf", Path(work) / "graph"
            write_hf_folder(weights, model, source)
            _run_builder(source, graph, Path(work) / "cache")
            shutil.move(graph, target)
    return target


def _run_builder(source: Path, graph: Path, cache: Path) -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(graph)]
    command += ["-p", "int4", "-e", "cpu", "-c", str(cache), "--extra_options", "hf_token=false"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode or not (graph / "genai_config.json").is_file():
        last = (done.stdout.strip().splitlines() or ["no output"])[-1]
        raise ModelError(f"onnxruntime-genai's model builder failed: {last[:300]}")


class GenaiPeer:
    """`Generator` of onnxruntime-genai, greedy, a new one for every prompt."""

    def __init__(self, model: str, threads: int) -> None:
        import onnxruntime_genai as genai

        from edgespec.models.weights.opening import open_weights

        with open_weights(Path(model)) as weights:
            folder = graph_folder(weights)
        config = genai.Config(str(folder))
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._genai = genai
        self._model = genai.Model(config)

    @staticmethod
    def prepare(model: str, threads: int) -> None:
        """Build and keep the graph."""
        build_graph(Path(model))

    def generate(self, ids: list[int], new_tokens: int, eos_ids: Sequence[int] = ()) -> dict[str, Any]:
        """Greedy answer to token ids, up to a token of `eos_ids`; without any, a minimum length keeps it going."""
        length = len(ids) + new_tokens
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(max_length=length, min_length=0 if eos_ids else length, do_sample=False)
        answer: list[int] = []
        recorder = Recorder()
        generator = self._genai.Generator(self._model, params)
        generator.append_tokens(ids)
        while len(answer) < new_tokens and not generator.is_done():
            generator.generate_next_token()
            recorder.emit()
            answer.append(int(generator.get_next_tokens()[0]))
            if answer[-1] in eos_ids:
                break
        return recorder.reply(answer)
