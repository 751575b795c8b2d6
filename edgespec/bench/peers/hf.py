"""transformers as a contender, float32 on the same dequantised weights: plain, with prompt lookup, or assisted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.bench.peers.base import Recorder
from edgespec.errors import ConfigError, DraftError, ModelError
from edgespec.models.spec_writer import config_of

if TYPE_CHECKING:
    from edgespec.models.spec import ModelSpec


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    """config.json (transformers 5) of a model with this spec. Raises ModelError for what its class cannot express."""
    try:
        if spec.rope.kind == "factors":
            raise ModelError("transformers has no rotary embedding that is scaled by a table.")
        return {**config_of(spec), "dtype": "float32"}
    except ModelError as error:
        raise ModelError(f"{str(error).rstrip('.')}; leave this peer out.") from error


def build_model(path: Path) -> Any:
    """transformers' own class, float32, with the weights of the model at `path`; one tensor is read at a time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from edgespec.models.weights.opening import open_weights

    with open_weights(path) as weights, torch.no_grad():
        settings = hf_config(weights.spec)
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        # No end token in the configuration: the benchmark wants the same number of tokens from everyone.
        config.eos_token_id = None
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights.read(name)))
    model.generation_config.eos_token_id = None
    return model.eval()


def load_assistant(folder: Path, target: Path) -> Any:
    """The checkpoint in `folder` as transformers loads it, float32. ConfigError unless its ids mean the target's."""
    import torch
    from transformers import AutoModelForCausalLM

    from edgespec.models.tokenizer import compare_vocabularies, load_tokenizer

    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"the assistant {folder} is no Hugging Face checkpoint (no config.json); "
            "'edgespec drafts export --format hf' makes one of a standalone draft."
        )
    try:
        compare_vocabularies(load_tokenizer(target), load_tokenizer(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (DraftError, ModelError, OSError, ValueError) as error:
        raise ConfigError(f"the assistant {folder} cannot be used: {error}") from error
    return model.eval()


class _TokenClock:
    """transformers' streamer: the first call brings the prompt, each later one the tokens of a step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        if self._prompt_seen:
            self._recorder.emit(int(tokens.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        pass


class TransformersPeer:
    """`generate` of transformers, greedy.

    lookup: > 0 turns on its prompt lookup with that many tokens. assistant: folder of a checkpoint that drafts for it
    (assisted generation, everything else as transformers has it by default).
    """

    def __init__(self, model: str, threads: int, lookup: int = 0, assistant: str | None = None) -> None:
        import torch

        torch.set_num_threads(threads)
        self._drafting: dict[str, Any] = {"prompt_lookup_num_tokens": lookup} if lookup else {}
        if assistant is not None:
            self._drafting["assistant_model"] = load_assistant(Path(assistant), Path(model))
        self._model = build_model(Path(model))

    def generate(self, ids: list[int], new_tokens: int, eos_ids: Sequence[int] = ()) -> dict[str, Any]:
        """Greedy answer to token ids, up to a token of `eos_ids`."""
        import torch

        prompt = torch.tensor([ids])
        ends = {"eos_token_id": list(eos_ids)} if eos_ids else {}
        recorder = Recorder()
        with torch.inference_mode():
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=_TokenClock(recorder),
                **ends,
                **self._drafting,
            )
        return recorder.reply(output[0, len(ids) :].tolist(), recorder.rounds() if self._drafting else None)
