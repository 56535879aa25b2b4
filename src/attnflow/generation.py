"""`generate`: a prompt in, generated tokens out, each with its token attention over the prompt.

The model generates as it does by itself, with its own cache; capture listens, and keeps each step's fused rows. Position m-1+i is the
one that predicted the i-th generated token, for a prompt of m tokens; so row i of every result belongs to that position.
"""

import os
import string
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnflow.attention import Attention
from attnflow.capture import Call, checked, fuse, listening
from attnflow.errors import CaptureError, OptionError
from attnflow.files import PICTURES, by_ending, dump_json, known_ending, write_csv, write_file
from attnflow.graph import RESIDUAL, AttentionGraph, Floats, check_whole
from attnflow.methods import flow as attention_flow
from attnflow.models import Model, evaluating

# English function words: rollout favours them, because nearly every token looks at them
COMMON_WORDS_TEXT = """
a an the this that these those some any each every no not and or but nor so yet if then than as of to in on at by for from with
into onto over under about after before between through during against without within up down out off is are was were be been
being am do does did done have has had having will would shall should can could may might must i you he she it we they me him
her us them my your his its our their mine yours hers ours theirs myself yourself himself herself itself ourselves themselves
who whom whose which what when where why how there here also just only very too
"""
COMMON_WORDS = frozenset(COMMON_WORDS_TEXT.split())


@dataclass(frozen=True, eq=False)
class PromptAttention:
    """M: how much each prompt token reached each generated one, in each layer.

    values: [generated token, prompt token, layer]; np.asarray gives them too. prompt, generated: the tokens' names.
    """

    values: Floats  # [generated, prompt, layer]
    method: str
    prompt: tuple[str, ...]
    generated: tuple[str, ...]
    layers: tuple[int, ...]
    special: frozenset[str] = frozenset()

    def filtered(
        self,
        *,
        words: Collection[str] = COMMON_WORDS,
        punctuation: bool = True,
        special: bool = True,
    ) -> "PromptAttention":
        """The same without some prompt tokens (common words, punctuation, special tokens), the rest summing to 1 again."""
        unwanted = {word.lower() for word in words}

        def stays(token: str) -> bool:
            return (
                not special
                if token in self.special
                else not is_common(token, unwanted, punctuation)
            )

        kept = [place for place, token in enumerate(self.prompt) if stays(token)]
        if not kept:
            raise OptionError(
                "filtering must leave at least one prompt token; got none: give words=() or punctuation=False"
            )
        values = self.values[:, kept]
        sums = values.sum(axis=1, keepdims=True)
        values = np.divide(values, sums, out=np.zeros_like(values), where=sums > 0)
        return replace(self, values=values, prompt=tuple(self.prompt[place] for place in kept))

    def rows(self) -> Iterator[tuple[int, str, int, str, int, float]]:
        """(generated, generated_token, prompt, prompt_token, layer, value) for each value."""
        for i, new in enumerate(self.generated):
            for j, old in enumerate(self.prompt):
                for layer, value in zip(self.layers, self.values[i, j].tolist(), strict=True):
                    yield i, new, j, old, layer, value

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write .csv (one line a value), .json or .npz, by the ending of the name."""
        header = ["generated", "generated_token", "prompt", "prompt_token", "layer", "value"]
        content = {
            "method": self.method,
            "prompt": self.prompt,
            "generated": self.generated,
            "layers": self.layers,
        }
        arrays: dict[str, Any] = {name: np.array(value) for name, value in content.items()}
        return by_ending(
            path,
            {
                ".csv": lambda file: write_csv(file, header, self.rows()),
                ".json": lambda file: file.write(
                    dump_json({**content, "values": self.values.tolist()}).encode()
                ),
                ".npz": lambda file: np.savez_compressed(file, values=self.values, **arrays),
            },
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.values, dtype=dtype) if copy else np.asarray(self.values, dtype=dtype)

    def __repr__(self) -> str:
        return "<PromptAttention: {}, {} generated x {} prompt tokens x {} layers>".format(
            self.method, *self.values.shape
        )


def is_common(token: str, words: Collection[str] = COMMON_WORDS, punctuation: bool = True) -> bool:
    """Whether a token is one of these words (lower case), or punctuation; the marks of tokenizers do not count."""
    text = (
        token.removeprefix("##").replace("Ġ", "").replace("▁", "").replace("Ċ", "").strip().lower()
    )
    return text in words or (
        punctuation and all(character in string.punctuation for character in text)
    )


@dataclass(frozen=True, eq=False)
class Generation:
    """What a model generated, and the attention that it had while doing so.

    attention: over the prompt and all generated tokens but the last, which no position looked at.
    """

    text: str
    tokens: tuple[str, ...]  # generated
    probabilities: tuple[float, ...]  # of each generated token, when it was chosen
    prompt: tuple[str, ...]
    attention: Attention  # [layer, 1, position, position]
    special: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """The number of prompt tokens, m."""
        return len(self.prompt)

    @cached_property
    def _positions(self) -> range:
        return range(
            self.size - 1, self.attention.size
        )  # those that predicted the generated tokens

    def raw(
        self,
        *,
        residual: float = RESIDUAL,
        without: Sequence[int] = (),
        normalize: str | None = None,
    ) -> PromptAttention:
        """Raw attention over the prompt: [generated, prompt, layer]."""
        return self._result("raw", residual, without, normalize)

    def rollout(
        self,
        *,
        residual: float = RESIDUAL,
        without: Sequence[int] = (),
        normalize: str | None = None,
    ) -> PromptAttention:
        """Attention rollout over the prompt: [generated, prompt, layer]. normalize=None is the plain slice of each row."""
        return self._result("rollout", residual, without, normalize)

    def flow(
        self,
        *,
        residual: float = RESIDUAL,
        without: Sequence[int] = (),
        normalize: str | None = None,
    ) -> PromptAttention:
        """Attention flow to the prompt: [generated, prompt, layer]. normalize=None gives the maximum flows."""
        return self._result("flow", residual, without, normalize)

    def _result(
        self, method: str, residual: float, without: Sequence[int], normalize: str | None
    ) -> PromptAttention:
        if normalize not in ("sum", "receptive_field", None):
            raise OptionError(
                f"unknown normalize {normalize!r}; choose from 'sum', 'receptive_field' or None"
            )
        graph = self.attention.graph(residual=residual, without=without)
        if self.size - 1 in graph.removed or any(
            position in graph.removed for position in self._positions
        ):
            raise OptionError(
                f"without must leave the positions from {self.size - 1} on, which predicted; got {list(without)}"
            )
        values = self._values(method, graph)
        if normalize == "receptive_field":
            field = self._values(method, graph.uniform())
            np.divide(values, field, out=values, where=field > 0)
        if normalize is not None:
            sums = values.sum(axis=1, keepdims=True)
            np.divide(values, sums, out=values, where=sums > 0)
        layers = tuple(range(1, graph.depth + 1))
        return PromptAttention(values, method, self.prompt, self.tokens, layers, self.special)

    def _values(self, method: str, graph: AttentionGraph) -> Floats:
        """[generated, prompt, layer], as the method gives it."""
        rows = slice(self.size - 1, None)
        if method == "raw":
            values = graph.weights[:, rows, : self.size]  # [layer, generated, prompt]
        elif method == "rollout":
            rolled = np.eye(
                graph.size, self.size
            )  # [position, prompt]: only the prompt's columns travel
            layers = []
            for edges in graph.edges:
                rolled = edges @ rolled
                layers.append(rolled[rows])
            values = np.stack(layers)
        else:
            every = attention_flow(
                graph, layers=range(1, graph.depth + 1), positions=self._positions, normalize=None
            )
            values = every.values[:, :, : self.size]
        return np.ascontiguousarray(values.transpose(1, 2, 0))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the interactive page (.html), or rollout in the top layer as a picture (.png, .svg, .pdf), by the ending of the name.

        The numbers are written by what `raw`, `rollout` and `flow` return.
        """
        if known_ending(path, [".html", *PICTURES]) in PICTURES:
            from attnflow import figures

            return figures.generation(self.rollout()).save(path)
        from attnflow.page import generation_page

        return write_file(
            path, lambda file: file.write(generation_page(self).encode(errors="backslashreplace"))
        )

    def _repr_html_(self) -> str:
        from attnflow.page import framed, generation_page

        return framed(generation_page(self))

    def __repr__(self) -> str:
        return f"<Generation: {len(self.tokens)} tokens after a prompt of {self.size}: {self.text[:60]!r}>"


def generate(model: Any, prompt: Any, *, max_new_tokens: int = 20, **options: Any) -> Any:
    """Generate from a prompt (a text, token ids, or chat messages), or from a list of prompts, and keep the attention.

    options are those of the model's own `generate`: do_sample, temperature, eos_token_id, ...; beams are refused.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2))
    >>> generate(model, [464, 1994], max_new_tokens=3, eos_token_id=None).rollout()
    <PromptAttention: rollout, 3 generated x 2 prompt tokens x 2 layers>
    """
    model = model if isinstance(model, Model) else Model(model)
    if model.task != "causal LM":
        raise OptionError(f"generate needs a causal LM; {model.name} is for {model.task}")
    check_whole("max_new_tokens", max_new_tokens)
    for name in ("num_beams", "num_beam_groups", "num_return_sequences"):
        if options.get(name, 1) != 1:
            raise OptionError(
                f"generate follows one sequence a prompt, so {name} must be 1; got {options[name]}"
            )
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int | dict)
    prompts = [prompt_ids(model, each) for each in (prompt if many else [prompt])]
    for ids in prompts:
        if model.longest is not None and len(ids) + max_new_tokens > model.longest:
            raise OptionError(
                f"this model takes at most {model.longest} tokens; got a prompt of {len(ids)} and max_new_tokens={max_new_tokens}"
            )
    found = generate_batch(model, prompts, max_new_tokens, options)
    return found if many else found[0]


def prompt_ids(model: Model, prompt: Any) -> tuple[int, ...]:
    """The token ids of a text, of ids, or of chat messages."""
    if isinstance(prompt, Iterable) and not isinstance(prompt, str):
        prompt = list(prompt)
        if prompt and isinstance(prompt[0], dict):
            if getattr(model.tokenizer, "chat_template", None) is None:
                raise OptionError(
                    "chat messages need a tokenizer with a chat template, and this one has none; give a text"
                )
            text = model.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False
            )
            prompt = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    return model.encode(prompt).ids


def generate_batch(
    model: Model, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, options: dict[str, Any]
) -> list[Generation]:
    """Generate from several prompts, padded on the left, so that all of them end where generation starts."""
    import torch

    longest = max(map(len, prompts))
    pads = [longest - len(ids) for ids in prompts]
    given = torch.tensor(
        [[model.padding] * pad + list(ids) for pad, ids in zip(pads, prompts, strict=True)],
        device=model.model.device,
    )
    mask = torch.tensor(
        [[0] * pad + [1] * len(ids) for pad, ids in zip(pads, prompts, strict=True)],
        device=model.model.device,
    )
    settings = {
        "pad_token_id": model.padding,
        **options,
        "max_new_tokens": max_new_tokens,
        "num_beams": 1,
    }
    settings |= {"return_dict_in_generate": True, "output_logits": True, "use_cache": True}
    with evaluating(model.model), torch.no_grad():
        if not uses_interface(model):
            settings["output_attentions"] = True
        try:
            with listening(model.model, "mean") as calls:
                output = model.model.generate(input_ids=given, attention_mask=mask, **settings)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"{model.name} cannot generate with {sorted(options)}: {error}"
            ) from error
        if "output_attentions" in settings:
            calls = [
                Call("", fuse(layer.float(), "mean").cpu().numpy(), None, None)
                for step in output.attentions
                for layer in step
            ]
    steps = len(output.logits)
    depth = model.model.config.num_hidden_layers
    if len(calls) != steps * depth:
        raise CaptureError(
            f"{model.name} has {depth} layers and took {steps} steps, but {len(calls)} attention calls were heard"
        )
    weights = place_rows(calls, depth, longest, steps)
    logits = torch.stack(output.logits, dim=1).float()  # [sequence, step, token]
    chosen = output.sequences[:, longest:]
    probabilities = logits.softmax(dim=-1).gather(2, chosen[:, :steps, None])[..., 0]
    ends = stops(model, options)
    found = []
    for place, (pad, ids) in enumerate(zip(pads, prompts, strict=True)):
        new = chosen[place].tolist()
        count = next((index + 1 for index, token in enumerate(new) if token in ends), len(new))
        size = longest + count - 1
        attention = checked(
            model,
            weights[:, place, :, pad:size, pad:size],
            fused="mean",
            causal=True if size - pad > 1 else None,
        )
        text = (
            ""
            if model.tokenizer is None
            else model.tokenizer.decode(new[:count], skip_special_tokens=True)
        )
        special = frozenset(map(str, getattr(model.tokenizer, "all_special_tokens", ())))
        chances = tuple(probabilities[place, :count].tolist())
        found.append(
            Generation(
                text, model.names(new[:count]), chances, model.names(ids), attention, special
            )
        )
    return found


def uses_interface(model: Model) -> bool:
    """Whether the model's attention can be heard: found out on one token."""
    import torch

    with listening(model.model, "mean") as calls:
        one = torch.ones((1, 1), dtype=torch.long, device=model.model.device)
        model.model(input_ids=one, attention_mask=one)
    return bool(calls)


def place_rows(
    calls: Sequence[Call], depth: int, longest: int, steps: int
) -> npt.NDArray[np.float32]:
    """[layer, sequence, 1, position, position]: each step's rows at their positions.

    A cache with a sliding window holds only the last keys, so the columns are counted from the last one.
    """
    size = longest + steps - 1
    weights = np.zeros((depth, calls[0].weights.shape[0], 1, size, size), np.float32)
    for number, call in enumerate(calls):
        layer, step = number % depth, number // depth
        rows, keys = call.weights.shape[2:]
        end = longest + step  # positions that there are after this step
        seen = min(keys, end)
        weights[layer, :, :, end - rows : end, end - seen : end] = (
            call.weights[..., :seen] if keys > end else call.weights
        )
    return weights


def stops(model: Model, options: dict[str, Any]) -> set[int]:
    """The tokens that end a generation."""
    end = options.get("eos_token_id", getattr(model.model.generation_config, "eos_token_id", None))
    return set() if end is None else {end} if isinstance(end, int) else set(end)
