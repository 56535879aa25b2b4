"""One measurement of rows or segments of a long input, printed as JSON. long.py runs it in a fresh process on one thread:

python benchmarks/long_one.py forward TOKENS LAYERS     the model alone, without a cache and with the logits of one position
python benchmarks/long_one.py rows TOKENS LAYERS        32 rows of the top layer
python benchmarks/long_one.py segments TOKENS LAYERS    64 segments
python benchmarks/long_one.py norm TOKENS LAYERS        one row of the top layer on these edges ...
python benchmarks/long_one.py contribution TOKENS LAYERS    ... or these, of which a thousandth need not be followed
python benchmarks/long_one.py kernels TOKENS            one layer's attention, its backward pass, and blocks of queries
python benchmarks/long_one.py equal TOKENS LAYERS       rows and segments against the matrices
python benchmarks/long_one.py today TOKENS LAYERS GB    output_attentions=True and products, under a limit of GB above the loaded model
python benchmarks/long_one.py ours TOKENS LAYERS GB     one row, under the same limit
"""

import os

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
)

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
import transformers

import attnflow as af
from attnflow.rows import rows
from attnflow.rows.products import Carrier, Recomputed
from inputs import SEED
from memory import MB, peak_above_start

HEADS, GROUPS, WIDTH, VOCABULARY = 9, 3, 64, 1000
ROWS, SEGMENTS = 32, 64
SKIP = 1e-3  # the share of a row on other edges that need not be followed
Clock = dict[str, float]


def make_model(layers: int, implementation: str = "sdpa") -> af.Model:
    """SmolLM2's shape with the given number of layers, and seeded random weights."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * WIDTH,
        head_dim=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        num_hidden_layers=layers,
        intermediate_size=1536,
        max_position_embeddings=65_536,
    )
    module = transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation)
    model = af.Model(module.eval())
    _ = model.probe  # done once, so not measured
    return model


def make_ids(size: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(SEED)
    found: list[int] = torch.randint(0, VOCABULARY, (size,), generator=generator).tolist()
    return found


def run_forward(model: af.Model, ids: list[int]) -> None:
    """The model, run for the next token only."""
    with torch.no_grad():
        model.model(torch.tensor([ids]), use_cache=False, logits_to_keep=1)


@contextmanager
def timing() -> Iterator[Clock]:
    """CPU seconds of the model's own attention, and of carrying rows or segments beside it."""
    clock: Clock = {"attention": 0.0, "carrying": 0.0}

    def timed(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            begun = time.process_time()
            result = function(*arguments, **options)
            clock[what] += time.process_time() - begun
            return result

        return run

    attend = transformers.AttentionInterface._global_mapping["sdpa"]
    before: list[tuple[Any, str, Callable[..., Any]]] = [
        (rows, "carry_down", rows.carry_down),
        (Carrier, "carry_up", Carrier.carry_up),
    ]
    transformers.AttentionInterface._global_mapping["sdpa"] = timed("attention", attend)
    for owner, name, function in before:
        setattr(owner, name, timed("carrying", function))
    try:
        yield clock
    finally:
        transformers.AttentionInterface._global_mapping["sdpa"] = attend
        for owner, name, function in before:
            setattr(owner, name, function)


def measure(task: Callable[[], object]) -> dict[str, float]:
    """CPU seconds of the parts and in total, and the peak in MB above the loaded model."""
    with timing() as clock:
        begun = time.process_time()
        peak = peak_above_start(task)
        return {**clock, "seconds": time.process_time() - begun, "peak": peak}


def measure_length(what: str, tokens: int, layers: int) -> dict[str, float]:
    """The model alone, with rows, or with segments."""
    model, ids = make_model(layers), make_ids(tokens)
    run_forward(model, ids[:64])
    width = tokens // SEGMENTS
    tasks: dict[str, Callable[[], object]] = {
        "forward": lambda: run_forward(model, ids),
        "rows": lambda: af.rollout_rows(model, ids, positions=range(-ROWS, 0)),
        "segments": lambda: af.rollout_segments(
            model,
            ids,
            segments=[(start * width, (start + 1) * width) for start in range(SEGMENTS)],
            positions=[-1],
            edges="attention",
        ),
    }
    lost: list[float] = []

    def follow(edges: str) -> None:
        found = af.rollout_rows(model, ids, positions=[-1], edges=edges, skip=SKIP)
        lost.append(float(found.lost.max()) if found.lost is not None else 0.0)

    tasks |= {edges: partial(follow, edges) for edges in ("norm", "contribution")}
    kept = layers * tokens * (HEADS + GROUPS) * WIDTH * 4 / MB
    found = {**measure(tasks[what]), "kept": kept, "tokens": tokens, "layers": layers}
    return found | {"lost": sum(lost)}


def measure_kernels(tokens: int) -> dict[str, float]:
    """CPU seconds of one layer's attention, of its backward pass for rows, and of blocks; and the differences of their results."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    query = torch.randn(1, HEADS, tokens, WIDTH)
    key, value = (torch.randn(1, GROUPS, tokens, WIDTH) for _ in range(2))
    given_rows = torch.rand(ROWS, tokens) / tokens
    each = HEADS // GROUPS
    attend = torch.nn.functional.scaled_dot_product_attention

    def attention() -> Any:
        return attend(
            query, key.repeat_interleave(each, 1), value.repeat_interleave(each, 1), is_causal=True
        )

    def backward() -> Any:
        values = torch.zeros(1, HEADS, tokens, WIDTH, requires_grad=True)
        mixed = attend(query, key.repeat_interleave(each, 1), values, is_causal=True)
        given = torch.zeros(1, 1, tokens, WIDTH)
        given[0, 0, :, :ROWS] = given_rows.T
        (found,) = torch.autograd.grad(mixed, values, given.expand_as(mixed))
        return found.mean(1)[0, :, :ROWS].T

    def blocks() -> Any:
        layer = Recomputed(None, query, key, None, {}, True, None)
        return Carrier(0.0).carry_down(layer, given_rows)

    seconds: dict[str, list[float]] = {}
    for _ in range(3):
        for task in (attention, backward, blocks):
            begun = time.process_time()
            task()
            seconds.setdefault(task.__name__, []).append(time.process_time() - begun)
    difference = float((backward() - blocks()).abs().max())
    return {name: float(np.median(found)) for name, found in seconds.items()} | {
        "difference": difference
    }


def measure_equality(tokens: int, layers: int) -> dict[str, float]:
    """The largest differences from the matrices' rollout."""
    model, ids = make_model(layers), make_ids(tokens)
    expected = af.rollout(af.capture(model, ids), layers=[layers], positions=range(-ROWS, 0))
    found = af.rollout_rows(model, ids, positions=range(-ROWS, 0))
    width = tokens // SEGMENTS
    spans = [(start * width, (start + 1) * width) for start in range(SEGMENTS)]
    shares = af.rollout_segments(
        model, ids, segments=spans, positions=range(-ROWS, 0), edges="attention"
    )
    summed = np.stack([expected.values[..., slice(*span)].sum(axis=-1) for span in spans], axis=-1)
    return {
        "rows": float(np.abs(found.values - expected.values).max()),
        "segments": float(np.abs(shares.values[-1:] - summed).max()),
    }


def run_today(model: af.Model, ids: list[int]) -> object:
    """The code without attnflow: all weights, then products of matrices."""
    with torch.no_grad():
        output = model.model(
            torch.tensor([ids]), output_attentions=True, use_cache=False, logits_to_keep=1
        )
        rolled = torch.eye(len(ids))
        for layer in output.attentions:
            rolled = (0.5 * layer[0].mean(dim=0) + 0.5 * torch.eye(len(ids))) @ rolled
    return rolled[-1]


def measure_limited(what: str, tokens: int, layers: int, gigabytes: float) -> dict[str, float]:
    """CPU seconds and peak of one row of rollout; only a mark if memory does not suffice."""
    model, ids = make_model(layers, "eager" if what == "today" else "sdpa"), make_ids(tokens)
    most = psutil.Process().memory_info().vms + int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    begun = time.process_time()
    failed: list[str] = []

    def task() -> None:
        try:
            if what == "today":
                run_today(model, ids)
            else:
                af.rollout_rows(model, ids, positions=[-1])
        except (RuntimeError, MemoryError) as error:
            if "memory" not in f"{type(error).__name__} {error}".lower():
                raise
            failed.append(str(error))

    peak = peak_above_start(task)
    return {"seconds": time.process_time() - begun, "peak": peak, "failed": float(bool(failed))}


def main() -> None:
    """Run one measurement."""
    what, *numbers = sys.argv[1:]
    sizes = [int(number) for number in numbers]
    measures: dict[str, Callable[..., dict[str, float]]] = {
        "kernels": measure_kernels,
        "equal": measure_equality,
    }
    if what in ("today", "ours"):
        found = measure_limited(what, *sizes)
    else:
        found = measures[what](*sizes) if what in measures else measure_length(what, *sizes)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
