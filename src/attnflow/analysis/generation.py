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

from attnflow.capturing.assembly import assemble_stack, check_mixers
from attnflow.core.attention import Attention
from attnflow.core.files import PICTURES, by_ending, dump_json, known_ending, write_csv, write_file
from attnflow.core.graph import RESIDUAL, AttentionGraph, Floats, check_whole
from attnflow.core.methods import flow as attention_flow
from attnflow.core.results import measure_spread
from attnflow.errors import CaptureError, OptionError, ShareWarning
from attnflow.models.execution import evaluating, running
from attnflow.models.listening import Call, listening, restore_rows
from attnflow.models.model import Model
from attnflow.models.weighing import check_heads, fuse
from attnflow.notices import give_notice

# English function words: rollout favours them, because nearly every token looks at them
COMMON_WORDS_TEXT = """
a an the this that these those some any each every no not and or but nor so yet if then than as of to in on at by for from with
into onto over under about after before between through during against without within up down out off is are was were be been
being am do does did done have has had having will would shall should can could may might must i you he she it we they me him
her us them my your his its our their mine yours hers ours theirs myself yourself himself herself itself ourselves themselves
who whom whose which what when where why how there here also just only very too
"""
COMMON_WORDS = frozenset(COMMON_WORDS_TEXT.split())
LITTLE = 0.01  # a kept share below this is warned of


@dataclass(frozen=True, eq=False)
class PromptAttention:
    """M: how much each prompt token reached each generated one, in each layer.

    values: [generated token, prompt token, layer]; np.asarray gives them too. prompt, generated:
    the tokens' names. kept: [generated token, layer], the share of each row that `filtered` kept,
    before the rest was made to sum to 1; None if nothing was filtered.
    """

    values: Floats  # [generated, prompt, layer]
    method: str
    prompt: tuple[str, ...]
    generated: tuple[str, ...]
    layers: tuple[int, ...]
    special: frozenset[str] = frozenset()
    kept: Floats | None = None  # [generated, layer]

    @cached_property
    def spread(self) -> Floats:
        """[generated token, layer]: 0 where a row is even over the prompt, 1 where all is on one."""
        rows = self.values.transpose(0, 2, 1)  # [generated, layer, prompt]
        return measure_spread(rows, np.ones(rows.shape, bool))

    def filtered(
        self,
        *,
        words: Collection[str] = COMMON_WORDS,
        punctuation: bool = True,
        special: bool = True,
    ) -> "PromptAttention":
        """The same without some prompt tokens, the rest summing to 1 again.

        `.kept` says how much of each row the rest was; a warning says where it was next to nothing,
        since then what is shown is the noise that filtering left.

        Parameters
        ----------
        words
            Words to take out, in lower case; English function words by default.
        punctuation, special
            Whether to take out punctuation, and the tokenizer's special tokens.
        """
        unwanted = {word.lower() for word in words}

        def stays(token: str) -> bool:
            if token in self.special:
                return not special
            return not is_common(token, unwanted, punctuation)

        places = [place for place, token in enumerate(self.prompt) if stays(token)]
        if not places:
            raise OptionError(
                "filtering must leave at least one prompt token; got none:"
                " give words=() or punctuation=False"
            )
        whole = self.values.sum(axis=1)  # [generated, layer]
        values = self.values[:, places]
        sums = values.sum(axis=1)
        kept = np.divide(sums, whole, out=np.zeros_like(sums), where=whole > 0)
        kept = kept if self.kept is None else kept * self.kept
        if kept[:, -1].min() < LITTLE:
            give_notice(
                f"filtering kept {kept[:, -1].min():.2g} of a row of {self.method}: what is shown"
                " is what the tokens that were taken out left over; look at it unfiltered",
                ShareWarning,
            )
        below = sums[:, None]
        values = np.divide(values, below, out=np.zeros_like(values), where=below > 0)
        prompt = tuple(self.prompt[place] for place in places)
        return replace(self, values=values, prompt=prompt, kept=kept)

    def rows(self) -> Iterator[tuple[int, str, int, str, int, float]]:
        """(generated, generated_token, prompt, prompt_token, layer, value) for each value."""
        for i, new in enumerate(self.generated):
            for j, old in enumerate(self.prompt):
                for layer, value in zip(self.layers, self.values[i, j].tolist(), strict=True):
                    yield i, new, j, old, layer, value

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write .csv (one line a value), .json or .npz, by the ending of the name."""
        header = ["generated", "generated_token", "prompt", "prompt_token", "layer", "value"]
        content: dict[str, Any] = {
            "method": self.method,
            "prompt": self.prompt,
            "generated": self.generated,
            "layers": self.layers,
        }
        if self.kept is not None:
            content["kept"] = self.kept.tolist()
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
            from attnflow.show import figures

            return figures.generation(self.rollout()).save(path)
        from attnflow.show.page import generation_page

        return write_file(
            path, lambda file: file.write(generation_page(self).encode(errors="backslashreplace"))
        )

    def _repr_html_(self) -> str:
        from attnflow.show.page import framed, generation_page

        return framed(generation_page(self))

    def __repr__(self) -> str:
        return f"<Generation: {len(self.tokens)} tokens after a prompt of {self.size}: {self.text[:60]!r}>"


# options of the model's own `generate` that would make attention of something else than the named
# prompt, or of more than one sequence per prompt
REFUSED = {
    "inputs_embeds": "the prompt is what is explained, so it must be given as text or token ids",
    "inputs": "give the prompt as the prompt",
    "input_ids": "give the prompt as the prompt",
    "attention_mask": "it belongs to the prompt",
    "assistant_model": "a second model would choose tokens whose attention is not recorded",
    "prompt_lookup_num_tokens": "tokens that are guessed and thrown away would be recorded",
    "assistant_early_exit": "tokens that are guessed and thrown away would be recorded",
    "prefill_chunk_size": "the prompt is read at once",
    "guidance_scale": "a second prompt would be read beside this one",
    "custom_generate": "it is code of somebody else's",
    "trust_remote_code": "attnflow runs no code of a model's own",
}
ONE_SEQUENCE = ("num_beams", "num_beam_groups", "num_return_sequences")


def generate(
    model: Any,
    prompt: Any,
    *,
    max_new_tokens: int = 20,
    heads: str | None = "mean",
    **options: Any,
) -> Any:
    """Generate from a prompt, or from a list of prompts, and keep the attention.

    Parameters
    ----------
    model
        A causal language model: a `Model`, or a Hugging Face model that takes token ids.
    prompt
        A text, token ids, or chat messages.
    max_new_tokens
        At most so many tokens.
    heads
        "mean", "max" or "min" fuse heads at once; None keeps every head.
    options
        Those of the model's own `generate`: do_sample, temperature, eos_token_id, ... Beams and
        assisted decoding are refused.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2))
    >>> generate(model, [464, 1994], max_new_tokens=3, eos_token_id=None).rollout()
    <PromptAttention: rollout, 3 generated x 2 prompt tokens x 2 layers>
    """
    model = model if isinstance(model, Model) else Model(model)
    if model.task != "causal LM":
        raise OptionError(f"generate needs a causal LM; {model.name} is for {model.task}")
    check_whole("max_new_tokens", max_new_tokens)
    check_heads(heads)
    check_options(model, options)
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int | dict)
    prompts = [prompt_ids(model, each) for each in (prompt if many else [prompt])]
    for ids in prompts:
        if model.max_length is not None and len(ids) + max_new_tokens > model.max_length:
            raise OptionError(
                f"this model takes at most {model.max_length} tokens; got a prompt of {len(ids)}"
                f" and max_new_tokens={max_new_tokens}"
            )
    found = generate_batch(model, prompts, max_new_tokens, heads, options)
    return found if many else found[0]


def check_options(model: Model, options: dict[str, Any]) -> None:
    """Refuse options, given or in a generation_config, that capture cannot follow."""
    given = options.get("generation_config")
    if isinstance(given, dict):
        raise OptionError("generation_config must be a GenerationConfig; got a dict: unpack it")
    config = model.model.generation_config if given is None else given

    def find_setting(name: str) -> object:
        value = options.get(name)
        return getattr(config, name, None) if value is None else value

    for name, reason in REFUSED.items():
        value = find_setting(name)
        off = value is None or value is False or (name == "guidance_scale" and value == 1)
        if not off:
            raise OptionError(f"generate takes no {name}: {reason}; leave it out")
    for name in ONE_SEQUENCE:
        if given is None and name == "num_beams" and name not in options:
            continue  # a model's own beams are switched off
        value = find_setting(name)
        if value not in (None, 1):
            raise OptionError(
                f"generate follows one sequence per prompt, so {name} must be 1; got {value}"
            )


def prompt_ids(model: Model, prompt: Any) -> tuple[int, ...]:
    """The token ids of a text, of ids, or of chat messages."""
    if isinstance(prompt, Iterable) and not isinstance(prompt, str):
        prompt = list(prompt)
        if prompt and isinstance(prompt[0], dict):
            if getattr(model.tokenizer, "chat_template", None) is None:
                raise OptionError(
                    "chat messages need a tokenizer with a chat template, and this one has none;"
                    " give a text"
                )
            text = model.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False
            )
            prompt = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    return model.encode(prompt).ids


def generate_batch(
    model: Model,
    prompts: Sequence[tuple[int, ...]],
    max_new_tokens: int,
    heads: str | None,
    options: dict[str, Any],
) -> list[Generation]:
    """Generate from several prompts, padded on the left: all end where generation starts."""
    import torch

    check_mixers(model)
    longest = max(map(len, prompts))
    pads = [longest - len(ids) for ids in prompts]
    rows = [[model.padding] * pad + list(ids) for pad, ids in zip(pads, prompts, strict=True)]
    seen = [[0] * pad + [1] * len(ids) for pad, ids in zip(pads, prompts, strict=True)]
    given, mask = (torch.tensor(each, device=model.device) for each in (rows, seen))
    settings = {"pad_token_id": model.padding, **options}
    settings |= {"max_new_tokens": max_new_tokens, "num_beams": 1, "use_cache": True}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    settings["output_attentions"] = not model.probe.interface
    with evaluating(model.model), torch.no_grad():
        try:
            with running(model), listening(model.model, heads) as calls:
                output = model.model.generate(input_ids=given, attention_mask=mask, **settings)
        except CaptureError as error:
            if isinstance(error.__cause__, TypeError | ValueError):
                raise OptionError(
                    f"{model.name} cannot generate with {sorted(options)}: {error.__cause__}"
                ) from error
            raise
    if not model.probe.interface:
        calls = [
            Call("", fuse(restore_rows(layer), heads).cpu().numpy(), None, None)
            for step in output.attentions
            for layer in step
        ]
    steps = len(output.logits)
    layers = join_steps(model, calls, longest, steps)
    logits = torch.stack(output.logits, dim=1).float()  # [sequence, step, token]
    chosen = output.sequences[:, longest:]
    probabilities = logits.softmax(dim=-1).gather(2, chosen[:, :steps, None])[..., 0]
    special = frozenset(map(str, getattr(model.tokenizer, "all_special_tokens", ())))
    # transformers fills up with padding what ended before others, by more than an end token only here
    otherwise = any(options.get(name) for name in ("stopping_criteria", "stop_strings", "max_time"))
    waiting = settings["pad_token_id"] if otherwise and len(prompts) > 1 else None
    found = []
    for place, (pad, ids) in enumerate(zip(pads, prompts, strict=True)):
        new = cut_padding(chosen[place].tolist(), stop_ids(model, options), waiting)
        if not torch.isfinite(probabilities[place, : len(new)]).all():
            raise CaptureError(f"the scores of {model.name} must be finite; got NaN or infinity")
        attention = assemble_stack(model, layers, place, slice(pad, longest + len(new) - 1), heads)
        text = (
            "" if model.tokenizer is None else model.tokenizer.decode(new, skip_special_tokens=True)
        )
        found.append(
            Generation(
                text,
                model.names(new),
                tuple(probabilities[place, : len(new)].tolist()),
                model.names(ids),
                attention,
                special,
            )
        )
    return found


def join_steps(model: Model, calls: Sequence[Call], longest: int, steps: int) -> list[Call]:
    """One call per layer over all positions, from the calls of all steps, each at its positions.

    A cache with a sliding window holds only the last keys, so columns are counted from the last.
    """
    import torch

    depth = model.depth or len(calls) // steps
    if len(calls) != steps * depth:
        raise CaptureError(
            f"{model.name} has {depth} layers and took {steps} steps, but {len(calls)} attention"
            " calls were recorded"
        )
    size = longest + steps - 1
    layers = []
    for first in calls[:depth]:
        sequences, heads = first.weights.shape[:2]
        weights = np.zeros((sequences, heads, size, size), np.float32)
        share = None if first.no_token_share is None else torch.zeros(sequences, size)
        layers.append(Call(first.name, weights, share, first.window))
    for number, call in enumerate(calls):
        layer, end = layers[number % depth], longest + number // depth  # positions after this step
        rows, keys = call.weights.shape[2:]
        known = min(keys, end)
        layer.weights[:, :, end - rows : end, end - known : end] = call.weights[..., :known]
        if layer.no_token_share is not None and call.no_token_share is not None:
            layer.no_token_share[:, end - rows : end] = call.no_token_share
    return layers


def stop_ids(model: Model, options: dict[str, Any]) -> set[int]:
    """The tokens that end a generation: as an option, in a generation_config, or the model's own."""
    config = options.get("generation_config") or model.model.generation_config
    end: Any = options.get("eos_token_id", getattr(config, "eos_token_id", None))
    end = end.tolist() if hasattr(end, "tolist") else end
    return set() if end is None else {end} if isinstance(end, int) else {int(each) for each in end}


def cut_padding(tokens: Sequence[int], ends: set[int], waiting: int | None) -> list[int]:
    """Generated tokens up to the one that ended them; the rest waited for longer sequences.

    waiting: what stands at the end of a sequence that may have ended by something else.
    """
    count = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
    if count == len(tokens) and ends and waiting is not None:
        while count > 1 and tokens[count - 1] == waiting:
            count -= 1
    return list(tokens[:count])
