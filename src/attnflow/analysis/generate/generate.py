"""`generate`: a prompt in; generated tokens out, with the attention that they were chosen by.

The model generates as usual, with its own cache, while the fused rows of each step are recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np

from attnflow.analysis.generate.edges import GraphEdges, RowEdges, TokenEdges
from attnflow.analysis.generate.generation import Generation
from attnflow.analysis.generate.replay import (
    OnePrompt,
    open_language_model,
    read_foil_of_tokens,
    read_prompts,
)
from attnflow.analysis.generate.sampling import (
    Continuation,
    check_generation_options,
    pad_prompts,
    read_continuations,
    sample_tokens,
)
from attnflow.analysis.job import FIRST_WHILE_GENERATING, Job, Plan, describe_missing_edges
from attnflow.analysis.long_inputs import find_segments, goes_by_rows, plan_rows
from attnflow.capturing.capture import assemble_stack, check_mixers
from attnflow.capturing.follow import follow_layers
from attnflow.core.checks import check_count
from attnflow.core.choices import Choices
from attnflow.edges.steps import StepEdges, refuse_reruns, split_edges
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
        them, which gives a list. Above 2,048 tokens no graph is built: raw attention and rollout
        are computed as rows on demand, and flow is left out.
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
        Options of the model's own `generate`: do_sample, temperature, eos_token_id, ... Beams and
        assisted decoding are refused.

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
    refuse_reruns(plan.weights)
    options |= {"max_new_tokens": max_new_tokens}
    weights = plan.weights.values()
    is_long = [heads == "mean" and goes_by_rows(model, len(each.ids), weights) for each in prompts]
    short = [each.ids for each, long in zip(prompts, is_long, strict=True) if not long]
    batch = iter(generate_batch(model, short, heads, options, plan, against) if short else ())
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


# ---- prompts with a graph -----------------------------------------------------------------------


def generate_batch(
    model: Model,
    prompts: Sequence[tuple[int, ...]],
    heads: str | None,
    options: Mapping[str, object],
    plan: Plan,
    foil: FoilNumber | None = None,
) -> list[Generation]:
    """Generate from prompts in one batch, and record attention and edges at each step.

    Default edges that turn out not to be available are left out, with a note. foil: what edges that
    watch generated tokens contrast them with.
    """
    check_mixers(model)
    length, pads = pad_prompts(prompts)
    in_steps, watching = split_edges(plan.weights)
    steps, notes = None, list[str]()
    watch = record_weights(model.model, heads)
    if in_steps:
        try:
            steps = StepEdges(model, in_steps, pads, length, heads)
        except CaptureError as error:  # before anything is generated
            if plan.first is None:
                raise
            notes.append(describe_missing_edges(plan.first, error))
            plan = plan.drop_first()
    if steps is not None:
        give_up = None if plan.first is None else steps.give_up
        watch = follow_layers(model, steps.add_layer, heads, give_up)
    outside = not model.probe.interface
    output, calls = sample_tokens(model, prompts, options, watch, output_attentions=outside)
    if outside:
        calls = [
            LayerWeights("", fuse(restore_rows(layer), heads).cpu().numpy(), None, None)
            for step in output.attentions
            for layer in step
        ]
    continuations = read_continuations(model, prompts, output, options)
    if steps is not None and steps.failure is not None:
        notes.append(describe_missing_edges(str(plan.first), steps.failure))
        steps, plan = None, plan.drop_first()
    layers = join_steps(model, calls, length, len(output.logits))
    generations = []
    for place, (ids, new) in enumerate(zip(prompts, continuations, strict=True)):
        generation = describe_continuation(model, ids, new)
        size = len(ids) + len(new.ids) - 1  # the last token was not read
        names = (*generation.prompt, *generation.tokens)[:size]
        graphs = {} if steps is None else steps.make_graphs(place, size, names)
        every = (*ids, *new.ids)
        span = slice(pads[place], pads[place] + size)
        generation = replace(
            generation,
            captured=assemble_stack(model, layers, place, span, heads),
            other_edges={
                **{name: GraphEdges(name, graph) for name, graph in graphs.items()},
                **{
                    name: TokenEdges(model, every, len(ids), weight, foil)
                    for name, weight in watching.items()
                },
            },
            notes=tuple(notes),
            shown=plan.choices,
        )
        generations.append(generation)
    return generations


def describe_continuation(model: Model, prompt: tuple[int, ...], new: Continuation) -> Generation:
    """The tokens of a generation, their probabilities and text, without attention."""
    tokenizer = model.tokenizer
    return Generation(
        text="" if tokenizer is None else tokenizer.decode(new.ids, skip_special_tokens=True),
        tokens=model.names(new.ids),
        probabilities=new.probabilities,
        prompt=model.names(prompt),
        captured=None,
        special=frozenset(map(str, getattr(tokenizer, "all_special_tokens", ()))),
    )


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
        describe_continuation(model, prompt.ids, new),
        other_edges={
            name: RowEdges(model, encoded, weight, layers if name == "attention" else None)
            for name, weight in plan.weights.items()
        },
        notes=notes,
        shown=plan.choices,
        segments=find_segments(prompt),
    )
