"""`generate`: a prompt in; generated tokens out, with the attention that they were chosen by.

The model generates as usual, and then reads prompt and answer in one pass: that costs a fraction of
weighing edges in every step. Where attention is all that is wanted, it is recorded while the model
generates, with its own cache, which is cheaper still.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np

from attnflow.analysis.generate.edges import RowEdges, TokenEdges
from attnflow.analysis.generate.generation import Generation
from attnflow.analysis.generate.replay import (
    OnePrompt,
    describe_answer,
    open_language_model,
    read_foil_of_tokens,
    read_prompts,
    replay_answers,
)
from attnflow.analysis.generate.sampling import (
    check_generation_options,
    has_plain_steps,
    pad_prompts,
    read_continuations,
    sample_answers,
    sample_tokens,
)
from attnflow.analysis.job import FIRST_WHILE_GENERATING, Job, Plan
from attnflow.analysis.long_inputs import find_segments, goes_by_rows, plan_rows
from attnflow.capturing.capture import assemble_stack, check_mixers
from attnflow.core.checks import check_count
from attnflow.core.choices import Choices
from attnflow.edges.graphs import drop_attention
from attnflow.errors import CaptureError, OptionError
from attnflow.models.attention_calls import (
    LayerWeights,
    check_weights_fit,
    observe_calls,
    record_weights,
    restore_rows,
)
from attnflow.models.attention_weights import fuse
from attnflow.models.chats import Message
from attnflow.models.encoded import Encoded
from attnflow.models.load import ModelLike
from attnflow.models.model import Model
from attnflow.models.predict import Foil, FoilNumber
from attnflow.models.wiring.find import find_wirings
from attnflow.rows.cache import CachedLayers


@overload
def generate(
    model: ModelLike,
    prompt: OnePrompt,
    *,
    max_new_tokens: int = 20,
    heads: str | None = "mean",
    edges: Choices | None = None,
    foil: Foil | None = None,
    **options: Any,
) -> Generation: ...


@overload
def generate(
    model: ModelLike,
    prompt: list[str] | list[list[int]] | list[list[Message]] | list[tuple[int, ...]],
    *,
    max_new_tokens: int = 20,
    heads: str | None = "mean",
    edges: Choices | None = None,
    foil: Foil | None = None,
    **options: Any,
) -> list[Generation]: ...


def generate(
    model: ModelLike,
    prompt: object,
    *,
    max_new_tokens: int = 20,
    heads: str | None = "mean",
    edges: Choices | None = None,
    foil: Foil | None = None,
    **options: Any,
) -> Generation | list[Generation]:
    """Generate from a prompt, or from a list of prompts, and keep the attention.

    Parameters
    ----------
    model
        A causal language model: a `Model`, a name or folder as `load` takes it, or a Hugging Face
        model.
    prompt
        A text, token ids, or the messages of a chat, as `Model.encode` reads them; or a list of
        them, which gives a list. Above 2,048 tokens (of the prompt; if one pass reads it, together
        with the answer) no graph is built: raw attention and rollout are computed as rows on
        demand, and flow is left out.
    max_new_tokens
        The maximum number of tokens.
    heads
        "mean", "max" or "min" fuse heads at once; None keeps every head.
    edges
        The weights of an edge of the graph, one or several, as for `explain`, that
        `Generation.by(method, edges=...)` then takes; its default is attention, or the first of
        them if attention is not among them. Gradient edges take a forward and a backward pass per
        generated token, on demand. Attention and contribution if None.
    foil
        The token that each generated token is contrasted with, for edges that watch it (gradient
        and relevance): they then watch the difference of the two logits. `RUNNER_UP` is the most
        probable token other than the generated one.
    options
        Options of the model's own `generate`: do_sample, temperature, eos_token_id, num_beams,
        assistant_model, stop_strings, ... Refused are inputs_embeds, guidance_scale, code of third
        parties, and several sequences per prompt.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2))
    >>> generate(model, [464, 1994], max_new_tokens=3, eos_token_id=None).rollout()
    <PromptAttention: rollout, 3 generated x 2 prompt tokens x 2 layers>
    """
    job = Job.read(edges=edges, heads=heads, foil=foil)
    model = open_language_model(model, "generate")
    check_count("max_new_tokens", max_new_tokens)
    check_generation_options(model, options)
    prompts, many = read_prompts(model, prompt, "generate")
    check_new_tokens(model, prompts, max_new_tokens)
    plan = job.plan(model, FIRST_WHILE_GENERATING)
    against = read_foil_of_tokens(model, job, plan)
    options |= {"max_new_tokens": max_new_tokens}
    weights = plan.weights.values()
    plain = has_plain_steps(model, options)
    keeps_rows = plain and heads == "mean"
    is_long = [keeps_rows and goes_by_rows(model, len(each.ids), weights) for each in prompts]
    short = [each for each, long in zip(prompts, is_long, strict=True) if not long]
    in_pass = [weight for weight in drop_attention(plan.weights).values() if not weight.rules]
    make = record_answers if plain and not in_pass else sample_and_replay
    batch = iter(make(model, short, heads, options, plan, against) if short else ())
    generations = [
        generate_long(model, each, options, plan) if long else next(batch)
        for each, long in zip(prompts, is_long, strict=True)
    ]
    return generations if many else generations[0]


def check_new_tokens(model: Model, prompts: Sequence[Encoded], max_new_tokens: int) -> None:
    """Refuse prompts that are too long for max_new_tokens more."""
    size = max(len(each.ids) for each in prompts)
    if model.max_length is not None and size + max_new_tokens > model.max_length:
        raise OptionError(
            f"this model takes at most {model.max_length} tokens; got a prompt of {size}"
            f" and max_new_tokens={max_new_tokens}",
            options=[f"max_new_tokens={max_new_tokens}"],
        )


def sample_and_replay(
    model: Model,
    prompts: Sequence[Encoded],
    heads: str | None,
    options: Mapping[str, object],
    plan: Plan,
    foil: FoilNumber | None = None,
) -> list[Generation]:
    """Generate from prompts as the model does by itself, and read all in one pass."""
    check_mixers(model)
    if plan.first is None and drop_attention(plan.weights):
        find_wirings(model)  # edges that are not available are refused before
    answers = sample_answers(model, [prompt.ids for prompt in prompts], options)
    return replay_answers(model, prompts, answers, heads, plan, foil)


# ---- attention alone, recorded while generating -------------------------------------------------


def record_answers(
    model: Model,
    prompts: Sequence[Encoded],
    heads: str | None,
    options: Mapping[str, object],
    plan: Plan,
    foil: FoilNumber | None = None,
) -> list[Generation]:
    """Generate from prompts in one batch, and record attention at each step.

    foil: what edges that watch generated tokens contrast them with.
    """
    check_mixers(model)
    given = [prompt.ids for prompt in prompts]
    length, pads = pad_prompts(given)
    watch = record_weights(model.model, heads)
    outside = not model.probe.interface
    output, calls = sample_tokens(model, given, options, watch, output_attentions=outside)
    if outside:
        calls = [
            LayerWeights("", fuse(restore_rows(layer), heads).cpu().numpy(), None, None)
            for step in output.attentions
            for layer in step
        ]
    continuations = read_continuations(model, given, output, options)
    layers = join_steps(model, calls, length, len(output.logits))
    generations = []
    for place, (ids, new) in enumerate(zip(given, continuations, strict=True)):
        size = len(ids) + len(new.ids) - 1  # the last token was not read
        span = slice(pads[place], pads[place] + size)
        generation = replace(
            describe_answer(model, ids, *new),
            captured=assemble_stack(model, layers, place, span, heads),
            other_edges={
                name: TokenEdges(model, (*ids, *new.ids), len(ids), weight, foil)
                for name, weight in drop_attention(plan.weights).items()
            },
            shown=plan.choices,
        )
        generations.append(generation)
    return generations


def join_steps(
    model: Model, calls: Sequence[LayerWeights], length: int, steps: int
) -> list[LayerWeights]:
    """Join the calls of all steps into one per layer, over all positions.

    length: of the padded prompts. A cache with a sliding window holds only the last keys, so
    columns are counted from the last.
    """
    import torch

    depth = model.depth or len(calls) // steps
    if len(calls) != steps * depth:
        raise CaptureError(
            f"{model.name} has {depth} layers and took {steps} steps, but {len(calls)} attention"
            " calls were recorded"
        )
    size = length + steps - 1
    layers: list[LayerWeights] = []
    for first in calls[:depth]:
        sequences, heads = first.weights.shape[:2]
        check_weights_fit(depth - len(layers), (sequences, heads, size, size))
        weights = np.zeros((sequences, heads, size, size), np.float32)
        share = None if first.no_token_share is None else torch.zeros(sequences, size)
        layers.append(LayerWeights(first.name, weights, share, first.window))
    for number, call in enumerate(calls):
        layer, end = layers[number % depth], length + number // depth  # positions after this step
        rows, keys = call.weights.shape[2:]
        known = min(keys, end)
        layer.weights[:, :, end - rows : end, end - known : end] = call.weights[..., :known]
        if layer.no_token_share is not None and call.no_token_share is not None:
            layer.no_token_share[:, end - rows : end] = call.no_token_share
    return layers


# ---- a long prompt ------------------------------------------------------------------------------


def generate_long(
    model: Model, prompt: Encoded, options: Mapping[str, object], plan: Plan
) -> Generation:
    """Generate from a long prompt and keep queries and keys, from which rows are computed."""
    plan, notes = plan_rows(plan.drop_first())  # rows on default edges would take too long
    check_mixers(model)
    cached = CachedLayers(model)
    output, _ = sample_tokens(model, [prompt.ids], options, observe_calls(model.model, cached.take))
    (new,) = read_continuations(model, [prompt.ids], output, options)
    encoded = model.encode([*prompt.ids, *new.ids[:-1]])
    layers = cached.join(len(encoded.ids))
    return replace(
        describe_answer(model, prompt.ids, *new),
        other_edges={
            name: RowEdges(model, encoded, weight, layers if name == "attention" else None)
            for name, weight in plan.weights.items()
        },
        notes=notes,
        shown=plan.choices,
        segments=find_segments(prompt),
    )
