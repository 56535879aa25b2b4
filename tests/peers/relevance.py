"""attnflow's relevance beside that of LXT, the implementation of AttnLRP.

make test-peers

LXT needs an older transformers than attnflow, so each runs in an environment of its own, .venv-peers and
.venv-lxt, and models and results go from one to the other as files:

    .venv-peers/bin/python -m tests.peers.relevance --save FOLDER     attnflow's maps of tiny Llamas
    .venv-lxt/bin/python -m tests.peers.relevance --check FOLDER      LXT's maps beside them
    .venv-lxt/bin/python -m tests.peers.relevance --prompts FILE --model FOLDER --out FILE

The last one computes AttnLRP's input relevance for saved truth prompts (`af.truth_prompts(...).save("prompts.json")`), of
the answer's logit and of its difference to the foil's, for `benchmarks/truth.py --lxt`.

Where the rules are the same, the maps must be: LXT's pieces for attention with fixed weights (of its CP-LRP),
RMS norm and gated MLP (of its AttnLRP), as one map, are `af.relevance`. AttnLRP itself differs in attention alone: it
hands half of the gradient to the values and a quarter each to queries and keys, through the softmax. With
an attention rule that does so, attnflow's map is AttnLRP's.

LXT's README calls layer-wise relevance propagation a patented technology, free of charge for personal and scientific
purposes only. LXT is installed for this comparison alone; attnflow neither needs it nor contains code of it.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5  # of the largest share; LXT's norm computes in float32
LEAST = 1e-2  # what a piece of LXT changes, if it is left out
IDS = [[5, 6, 7, 8, 9, 10, 11], [9, 30, 12, 9, 31, 12, 40, 22, 9, 30], [3, 50]]
SHAPES: dict[str, dict[str, Any]] = {
    "grouped keys": {"num_key_value_heads": 2},
    "tied embeddings": {"tie_word_embeddings": True, "num_hidden_layers": 5},
    "tanh gates": {"hidden_act": "gelu_pytorch_tanh"},
}
PIECES = {"LlamaMLP": "gated MLP", "LlamaRMSNorm": "RMS norm", "modeling_llama": "attention"}


# ---- attnflow's side ----------------------------------------------------------------------------


def make_model(options: dict[str, Any], seed: int) -> Any:
    """A tiny Llama in float64, whose attention is far from uniform."""
    import transformers

    config = transformers.LlamaConfig(
        **{
            "vocab_size": 60,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 40,
            **options,
        }
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        spread = 0.3 if parameter.ndim > 1 else 0.1
        parameter.data += spread * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


def save_maps(folder: Path) -> None:
    """Tiny Llamas, and attnflow's maps of them, by the rules of both."""
    import attnflow as af
    from attnflow.capturing.backward import Watch, run_backward

    def share(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return query / 4, key / 4, value / 2

    like_attnlrp = af.BackwardRule(
        "AttnLRP", attention=share, linear=("norms", "activations", "products")
    )
    for seed, (name, options) in enumerate(SHAPES.items()):
        network = make_model(options, seed)
        network.save_pretrained(folder / name)
        model = af.Model(network)
        cases = []
        for ids in IDS:
            fixed = [af.relevance(model, ids, foil=foil) for foil in (None, af.RUNNER_UP)]
            watch = Watch(None, "logit", like_attnlrp, ("blocks",))
            found = run_backward(model, [model.encode(ids)], {0: watch})
            (target,) = found.gradients[0].targets[0]
            shared = found.states["blocks"] * found.gradients[0].states["blocks"]
            foil = int(found.logits[0].topk(2).indices[1])
            cases.append(
                {
                    "ids": ids,
                    "target": target,
                    "foil": foil,
                    "fixed": fixed[0].values.tolist(),
                    "fixed, foil": fixed[1].values.tolist(),
                    "shared": shared.sum(-1)[0].tolist(),
                    "score": fixed[0].score,
                }
            )
        (folder / f"{name}.json").write_text(json.dumps(cases))


# ---- LXT's side ---------------------------------------------------------------------------------


@contextmanager
def patched(pieces: dict[Any, Any]) -> Iterator[None]:
    """Within this context, Llamas have some pieces of LXT, which patch classes and a module."""
    from lxt.efficient import monkey_patch
    from transformers.models.llama import modeling_llama as llama

    kept = [
        (holder, name, getattr(holder, name))
        for holder, name in [
            (llama.LlamaMLP, "forward"),
            (llama.LlamaRMSNorm, "forward"),
            (torch.nn.Dropout, "forward"),
            (llama, "eager_attention_forward"),
            (llama, "ALL_ATTENTION_FUNCTIONS"),
        ]
    ]
    # LXT's CP-LRP writes into it
    llama.ALL_ATTENTION_FUNCTIONS = dict(llama.ALL_ATTENTION_FUNCTIONS)
    try:
        monkey_patch(llama, pieces)  # warns of what it could not patch
        yield
    finally:
        for holder, name, value in kept:
            setattr(holder, name, value)


def read_pieces() -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
    """LXT's AttnLRP; its pieces for the rules of attnflow; and its CP-LRP."""
    from transformers.models.llama import modeling_llama as llama

    # LXT imports torchvision's vision transformer, to patch it; it must match the build of torch, and no Llama needs it
    vision = ModuleType("torchvision.models.vision_transformer")
    models = ModuleType("torchvision.models")
    vision.nn, models.vision_transformer = torch.nn, vision  # type: ignore[attr-defined]
    sys.modules.setdefault("torchvision.models", models)
    sys.modules.setdefault("torchvision", ModuleType("torchvision"))
    from lxt.efficient.models.llama import attnLRP, cp_LRP

    return attnLRP, {**attnLRP, llama: cp_LRP[llama]}, cp_LRP


def compute_map(
    model: Any, ids: Sequence[int], target: int, foil: int | None = None
) -> tuple[list[float], float]:
    """[token]: input times gradient of the target's logit, or its difference to the foil's; and that."""
    embedded = model.get_input_embeddings()(torch.tensor([list(ids)])).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False, logits_to_keep=1).logits[0, -1]
    score = logits[target] if foil is None else logits[target] - logits[foil]
    (gradient,) = torch.autograd.grad(score, embedded)
    shares: list[float] = (embedded * gradient).detach().double().sum(-1)[0].tolist()
    return shares, float(score.detach())


def differ(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference, of the largest share."""
    first, second = np.array(ours), np.array(theirs)
    return float(np.abs(first - second).max() / np.abs(first).max())


class Comparison:
    """Prints what must hold, and counts what does not."""

    def __init__(self) -> None:
        self.failures = 0

    def tell(self, good: bool, what: str) -> None:
        """One line."""
        self.failures += not good
        print(f"{'ok ' if good else 'BAD'} {what}")


def compare(model: Any, name: str, cases: list[dict[str, Any]], comparison: Comparison) -> None:
    """All maps of one tiny model."""
    attnlrp, fixed, cp_lrp = read_pieces()

    def measure(pieces: dict[Any, Any], ours: str, *, foil: bool = False) -> float:
        with patched(pieces):
            return max(
                differ(
                    case[ours],
                    compute_map(model, case["ids"], case["target"], case["foil"] if foil else None)[
                        0
                    ],
                )
                for case in cases
            )

    for what, pieces, ours, foil in [
        ("LXT's fixed weights, norm and gated MLP, and af.relevance", fixed, "fixed", False),
        ("the same with a foil", fixed, "fixed, foil", True),
        ("AttnLRP, and attnflow with its attention rule", attnlrp, "shared", False),
    ]:
        found = measure(pieces, ours, foil=foil)
        comparison.tell(found <= TOLERANCE, f"{name}: {what} differ by {found:.1e}")
    for piece in fixed:
        label = PIECES.get(piece.__name__.rpartition(".")[2])
        if label is None:  # dropout
            continue
        lesser = {key: patch for key, patch in fixed.items() if key is not piece}
        found = measure(lesser, "fixed")
        comparison.tell(found >= LEAST, f"{name}: without LXT's {label} they differ by {found:.2g}")
    for label, pieces in [("AttnLRP", attnlrp), ("CP-LRP", cp_lrp)]:
        found = measure(pieces, "fixed")
        comparison.tell(
            found >= LEAST, f"{name}: {label} itself and af.relevance differ by {found:.2g}"
        )
    for label, pieces in [("the pieces", fixed), ("AttnLRP", attnlrp)]:
        with patched(pieces):
            totals = [
                sum(compute_map(model, case["ids"], case["target"])[0]) / case["score"]
                for case in cases
            ]
        shown = ", ".join(f"{total:.6f}" for total in totals)
        print(f"    {name}: the shares of {label} add up to {shown} of the logit")


def check_maps(folder: Path) -> None:
    """LXT's maps beside attnflow's; the exit status is 1 if something does not hold."""
    comparison = Comparison()
    for name in SHAPES:
        model = AutoModelForCausalLM.from_pretrained(folder / name, torch_dtype=torch.float64)
        cases = json.loads((folder / f"{name}.json").read_text())
        logits = [compute_map(model.eval(), case["ids"], case["target"])[1] for case in cases]
        found = differ([case["score"] for case in cases], logits)
        comparison.tell(found <= TOLERANCE, f"{name}: the logits differ by {found:.1e}")
        compare(model, name, cases, comparison)
    failures = comparison.failures
    print(f"{failures} comparisons do not hold" if failures else "all comparisons hold")
    sys.exit(bool(failures))


def score_prompts(prompts: Path, folder: Path, out: Path) -> None:
    """AttnLRP's input relevance of the answer's logit, and with the foil's subtracted."""
    files = sorted(each.name for each in folder.glob("*.gguf"))
    options = {"gguf_file": files[0]} if files else {}
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, **options)
    attnlrp, _, _ = read_pieces()
    scores: dict[str, list[list[float]]] = {"AttnLRP": [], "AttnLRP, foil": []}
    kept = json.loads(prompts.read_text())["prompts"]
    totals = []
    with patched(attnlrp):
        for prompt in kept:
            shares, score = compute_map(model.eval(), prompt["ids"], prompt["target"])
            totals.append(sum(shares) / score)
            scores["AttnLRP"].append(shares)
            contrast, _ = compute_map(
                model, *(prompt[key] for key in ("ids", "target", "foil_target"))
            )
            scores["AttnLRP, foil"].append(contrast)
    out.write_text(json.dumps(scores))
    low, middle, high = np.quantile(totals, [0, 0.5, 1])
    print(
        f"{len(kept)} prompts; AttnLRP's shares add up to {middle:.2f} of the logit (median;"
        f" {low:.2f} to {high:.2f})"
    )


def main() -> None:
    """Save attnflow's maps, compare them with LXT's, or score prompts by AttnLRP."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--save", type=Path, metavar="FOLDER", help="attnflow's maps of tiny models"
    )
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="LXT's maps beside them")
    parser.add_argument("--prompts", type=Path, metavar="FILE")
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, metavar="FILE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="'zennit' library is not available")
    warnings.filterwarnings("error", message=".*(patch|Skipping).*")
    if given.save:
        given.save.mkdir(parents=True, exist_ok=True)
        save_maps(given.save)
    elif given.check:
        check_maps(given.check)
    elif given.prompts and given.model and given.out:
        score_prompts(given.prompts, given.model, given.out)
    else:
        parser.error("give --save, --check, or all of --prompts, --model and --out")


if __name__ == "__main__":
    main()
