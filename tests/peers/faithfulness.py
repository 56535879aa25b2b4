"""attnflow's numbers beside those of interpreto, captum and scikit-learn, where definitions agree.

make test-peers

It runs in an environment of its own, .venv-peers: what the peers bring along stays out of the
project's. Every line is a comparison that must hold to the tolerance beside it.

interpreto: Deletion and Insertion are the area under the softmax by trapezoids, a step per token,
special tokens kept, the mask token in place of the others. captum: FeatureAblation of a group of
tokens is the fall of the target's probability without them, which is comprehensiveness at one
threshold, and log_odds and sufficiency by the same way. scikit-learn: the area under
precision_recall_curve.
"""

import sys
import warnings
from typing import Any

import numpy as np
import torch
from captum.attr import FeatureAblation
from interpreto.attributions.base import AttributionOutput, ModelTask
from interpreto.attributions.metrics import Deletion, Insertion
from interpreto.commons.granularity import Granularity
from sklearn.metrics import auc, f1_score, jaccard_score, precision_recall_curve

import attnflow as af
from tests.families import build, word_tokenizer

TEXTS = ["the key to the cabinets is here", "the lost key", "cabinets the the key is lost to here"]
TOLERANCE = 2e-6
failures = 0


def compare(what: str, ours: float, theirs: float, tolerance: float = TOLERANCE) -> None:
    """Print one comparison, and count it if it does not hold."""
    global failures
    good = abs(ours - theirs) <= tolerance
    failures += not good
    mark = "ok " if good else "BAD"
    print(f"{mark} {what}: {ours:.8f} {theirs:.8f} (difference {abs(ours - theirs):.1e})")


def compare_interpreto(model: Any, tokenizer: Any, text: str, scores: Any, target: int) -> None:
    """Deletion and insertion, one input at a time."""
    inputs = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
    output = AttributionOutput(
        attributions=torch.tensor(scores[None], dtype=torch.float32),
        elements=text.split(),
        model_inputs_to_explain=inputs,
        targets=torch.tensor([target]),
        model_task=ModelTask.CLASSIFICATION,
        granularity=Granularity.TOKEN,
    )
    special = np.zeros(len(scores) + 2)
    special[1:-1] = scores
    ours = af.faithfulness(
        af.Model(model, tokenizer),
        text,
        special,
        target=target,
        replacement="mask",
        metrics=["deletion", "insertion"],
    )
    for name, kind in {"deletion": Deletion, "insertion": Insertion}.items():
        theirs, _ = kind(model, tokenizer, n_perturbations=1000).evaluate([output])
        compare(f"interpreto, {name} of {text!r}", ours[name], theirs)


def compare_captum(model: Any, tokenizer: Any, text: str, scores: Any, target: int) -> None:
    """The fall of the probability, and of its logarithm, without the tokens of a threshold."""
    encoded = af.Model(model, tokenizer).encode(text)
    ids = torch.tensor([encoded.ids])
    count = len(scores)
    order = np.argsort(-scores, kind="stable")
    special = np.zeros(count + 2)
    special[1:-1] = scores
    baselines = torch.full_like(ids, tokenizer.mask_token_id)

    def read(logarithm: bool) -> Any:
        def forward(given: torch.Tensor) -> torch.Tensor:
            logs = model(input_ids=given, attention_mask=torch.ones_like(given)).logits.double()
            logs = logs.log_softmax(-1)
            return logs if logarithm else logs.exp()

        return forward

    for percent in (20, 50, 100):
        top = int(np.ceil(count * percent / 100))
        chosen = 1 + order[:top]
        parts = {"comprehensiveness": chosen, "log_odds": chosen}
        parts["sufficiency"] = 1 + order[top:]
        for name, places in parts.items():
            if not len(places):
                continue
            groups = torch.zeros_like(ids)  # group 0 is not looked at: what is taken is group 1
            groups[0, torch.tensor(places.copy())] = 1
            with torch.no_grad():
                fallen = FeatureAblation(read(name == "log_odds")).attribute(
                    ids, baselines=baselines, target=target, feature_mask=groups
                )
            theirs = float(fallen[0, int(places[0])])
            ours = af.faithfulness(
                af.Model(model, tokenizer),
                text,
                special,
                target=target,
                replacement="mask",
                metrics=f"{name}@{percent}",
            )[f"{name}@{percent}"]
            sign = -1 if name == "log_odds" else 1
            compare(f"captum, {name}@{percent} of {text!r}", ours, sign * theirs, 1e-5)


def compare_sklearn(seed: int) -> None:
    """Plausibility of scores with ties."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, 12) / 6
    marks = rng.random(12) < 0.4
    if not marks.any():
        return
    ours = af.plausibility(scores, marks)
    precision, recall, _ = precision_recall_curve(marks, scores)
    compare(f"scikit-learn, auprc {seed}", ours["auprc"], auc(recall, precision))
    chosen = np.zeros(12, bool)
    chosen[np.argsort(-scores, kind="stable")[: marks.sum()]] = True
    compare(f"scikit-learn, token F1 {seed}", ours["token_f1"], f1_score(marks, chosen))
    compare(f"scikit-learn, IoU {seed}", ours["iou"], jaccard_score(marks, chosen))


def main() -> None:
    """Compare everything; the exit status is 1 if something does not hold."""
    warnings.simplefilter("ignore")
    tokenizer = word_tokenizer()
    tokenizer.padding_side = "right"
    for family in ("distilbert", "roberta"):
        model = build(family).eval()
        for number, text in enumerate(TEXTS):
            count = len(text.split())
            scores = np.random.default_rng(number).permutation(count) / count
            for target in (0, 1):
                compare_interpreto(model, tokenizer, text, scores, target)
            compare_captum(model, tokenizer, text, scores, 0)
    for seed in range(10):
        compare_sklearn(seed)
    print(f"{failures} comparisons do not hold" if failures else "all comparisons hold")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
