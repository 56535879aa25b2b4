"""`generate`: a prompt in, generated tokens out, with the attention that chose them.

The model generates as it does by itself, with its own cache; capture listens, and keeps each step's
fused rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, overload

import numpy as np

from attnflow.analysis.defaults import (
    FIRST_OF_STORIES,
    Plan,
    describe_lack,
    plan_first,
    plan_methods,
)
from attnflow.analysis.generation import Generation
from attnflow.analysis.long_inputs import find_segments, goes_by_rows, plan_rows, read_generated
from attnflow.analysis.pipeline import open_model
from attnflow.capturing.assembly import assemble_stack, check_mixers
from attnflow.capturing.caching import CachedLayers
from attnflow.capturing.following import follow_layers
from attnflow.capturing.prompts import read_prompt
from attnflow.core.checks import check_count
from attnflow.edges.choosing import EdgeWeight, read_edges
from attnflow.edges.stepping import StepEdges, refuse_reruns, split_edges, watch_tokens
from attnflow.errors import CaptureError, OptionError
from attnflow.models.execution import evaluating, running
from attnflow.models.listening import Call, check_room, hearing, listening, restore_rows
from attnflow.models.model import Model
from attnflow.models.weighing import check_heads, fuse

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


Message = dict[str, Any]  # of a chat
OnePrompt = str | tuple[int, ...] | list[int] | list[Message]


@overload
def generate(
    model: Any,
    prompt: OnePrompt,
    *,
    max_new_tokens: int = 20,
    heads: str | None = "mean",
    edges: Any = None,
    **options: Any,
) -> Generation: ...


@overload
def generate(
    model: Any,
    prompt: list[str] | list[list[int]] | list[list[Message]] | list[tuple[int, ...]],
    *,
    max_new_tokens: int = 20,
    heads: str | None = "mean",
    edges: Any = None,
    **options: Any,
) -> list[Generation]: ...


def generate(
    model: Any,
    prompt: Any,
    *,
    max_new_tokens: int = 20,
    heads: str | None = "mean",
    edges: Any = None,
    **options: Any,
) -> Generation | list[Generation]:
    """Generate from a prompt, or from a list of prompts, and keep the attention.

    Parameters
    ----------
    model
        A causal language model: a `Model`, a name or folder as `load` takes it, or a Hugging Face
        model that takes token ids.
    prompt
        A text, token ids, or chat messages; or a list of them, which gives a list. Above 2,048
        tokens no graph is built: raw attention and rollout are computed as rows when they are asked
        for, and flow is left out.
    max_new_tokens
        At most so many tokens.
    heads
        "mean", "max" or "min" fuse heads at once; None keeps every head.
    edges
        What an edge of the graph weighs, one or several, as for `explain`; what `by(method,
        edges=...)` can then be asked for, and the first of which it gives by default if attention
        is not among them. Those of gradients take a pass and its way back per generated token, when
        they are asked for. Attention and contribution if None.
    options
        Those of the model's own `generate`: do_sample, temperature, eos_token_id, ... Beams and
        assisted decoding are refused.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2))
    >>> generate(model, [464, 1994], max_new_tokens=3, eos_token_id=None).rollout()
    <PromptAttention: rollout, 3 generated x 2 prompt tokens x 2 layers>
    """
    model = open_model(model)
    if model.task != "causal LM":
        raise OptionError(f"generate needs a causal LM; {model.name} is for {model.task}")
    check_count("max_new_tokens", max_new_tokens)
    check_heads(heads)
    check_options(model, options)
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int | dict)
    items = prompt if many else [prompt]
    prompts = [prompt_ids(model, item) for item in items]
    for ids in prompts:
        if model.max_length is not None and len(ids) + max_new_tokens > model.max_length:
            raise OptionError(
                f"this model takes at most {model.max_length} tokens; got a prompt of {len(ids)}"
                f" and max_new_tokens={max_new_tokens}"
            )
    plan = plan_first(*FIRST_OF_STORIES) if edges is None else plan_methods(None, edges)
    weights = read_edges(list(plan) if edges is None else edges)
    refuse_reruns(weights)
    run = generate_batch if edges is not None else generate_first
    long = [
        place
        for place, ids in enumerate(prompts)
        if goes_by_rows(model, len(ids), weights.values()) and heads == "mean"
    ]
    short = [place for place in range(len(prompts)) if place not in long]
    stories: dict[int, Generation] = {}
    if short:
        chosen = [prompts[place] for place in short]
        made = run(model, chosen, max_new_tokens, heads, options, weights)
        stories |= dict(zip(short, made, strict=True))
    # nobody waits for edges that were not asked for
    followed = read_edges("attention") if edges is None else weights
    for place in long:
        (story,) = generate_batch(
            model, [prompts[place]], max_new_tokens, heads, options, followed, by_rows=True
        )
        segments = find_segments(read_prompt(model, items[place], False, places=True))
        stories[place] = replace(story, segments=segments)
    finished = [finish_story(stories[place], plan) for place in range(len(prompts))]
    return finished if many else finished[0]


def finish_story(story: Generation, plan: Plan) -> Generation:
    """A generation that knows what a page shows of it, as far as it has that."""
    shown = {name: plan[name] for name in plan if name in story.edges}
    if not story.row_readers:
        return replace(story, shown=shown)
    rows, notes = plan_rows(shown)
    return replace(story, shown=rows, notes=(*story.notes, *notes))


def generate_first(
    model: Model,
    prompts: Sequence[tuple[int, ...]],
    max_new_tokens: int,
    heads: str | None,
    options: dict[str, Any],
    weights: Mapping[str, EdgeWeight],
) -> list[Generation]:
    """Generate with edges that nobody asked for: on attention alone, where a model has none."""
    import torch

    state = torch.get_rng_state()
    try:
        return generate_batch(model, prompts, max_new_tokens, heads, options, weights)
    except CaptureError as error:
        torch.set_rng_state(state)  # sampled tokens are those of the first try
        stories = generate_batch(model, prompts, max_new_tokens, heads, options, {})
        return [replace(story, notes=(describe_lack(weights, error),)) for story in stories]


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
    weights: Mapping[str, EdgeWeight],
    by_rows: bool = False,
) -> list[Generation]:
    """Generate from several prompts, padded on the left: all end where generation starts.

    by_rows: whether only queries and keys are kept, and rows computed when they are asked for.
    """
    import torch

    check_mixers(model)
    longest = max(map(len, prompts))
    pads = [longest - len(ids) for ids in prompts]
    rows = [[model.padding] * pad + list(ids) for pad, ids in zip(pads, prompts, strict=True)]
    seen = [[0] * pad + [1] * len(ids) for pad, ids in zip(pads, prompts, strict=True)]
    given = torch.tensor(rows, device=model.device)
    mask = torch.tensor(seen, device=model.device)
    settings = {"pad_token_id": model.padding, **options}
    settings |= {"max_new_tokens": max_new_tokens, "num_beams": 1, "use_cache": True}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    settings["output_attentions"] = not model.probe.interface and not by_rows
    in_steps, watching = split_edges({} if by_rows else weights)
    collected = StepEdges(model, in_steps, pads, longest, heads) if in_steps else None
    cached = CachedLayers(model)
    watch: AbstractContextManager[list[Call] | None]
    if by_rows:
        watch = hearing(model.model, cached.take)
    elif collected is None:
        watch = listening(model.model, heads)
    else:
        watch = follow_layers(model, collected.finish, heads)
    with evaluating(model.model), torch.no_grad():
        try:
            with running(model), watch as calls:
                output = model.model.generate(input_ids=given, attention_mask=mask, **settings)
        except CaptureError as error:
            if isinstance(error.__cause__, TypeError | ValueError):
                raise OptionError(
                    f"{model.name} cannot generate with {sorted(options)}: {error.__cause__}"
                ) from error
            raise
    if settings["output_attentions"]:
        calls = [
            Call("", fuse(restore_rows(layer), heads).cpu().numpy(), None, None)
            for step in output.attentions
            for layer in step
        ]
    steps = len(output.logits)
    layers = [] if by_rows else join_steps(model, calls or [], longest, steps)
    logits = torch.stack(output.logits, dim=1).float()  # [sequence, step, token]
    chosen = output.sequences[:, longest:]
    probabilities = logits.softmax(dim=-1).gather(2, chosen[:, :steps, None])[..., 0]
    special = frozenset(map(str, getattr(model.tokenizer, "all_special_tokens", ())))
    # transformers pads what ended before others, by more than an end token only here
    otherwise = any(options.get(name) for name in ("stopping_criteria", "stop_strings", "max_time"))
    waiting = settings["pad_token_id"] if otherwise and len(prompts) > 1 else None
    stories = []
    for place, (pad, ids) in enumerate(zip(pads, prompts, strict=True)):
        new = cut_padding(chosen[place].tolist(), stop_ids(model, options), waiting)
        if not torch.isfinite(probabilities[place, : len(new)]).all():
            raise CaptureError(f"the scores of {model.name} must be finite; got NaN or infinity")
        size = len(ids) + len(new) - 1
        tokens = model.names([*ids, *new])[:size]
        graphs = {} if collected is None else collected.make_graphs(place, size, tokens)
        text = (
            "" if model.tokenizer is None else model.tokenizer.decode(new, skip_special_tokens=True)
        )
        stories.append(
            Generation(
                text,
                model.names(new),
                tuple(probabilities[place, : len(new)].tolist()),
                model.names(ids),
                None
                if by_rows
                else assemble_stack(model, layers, place, slice(pad, pad + size), heads),
                special,
                graphs,
                watch_tokens(model, [*ids, *new], len(ids), watching),
                row_readers=read_generated(model, [*ids, *new], len(ids), weights.values(), cached)
                if by_rows
                else {},
            )
        )
    return stories


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
    layers: list[Call] = []
    for first in calls[:depth]:
        sequences, heads = first.weights.shape[:2]
        check_room(depth - len(layers), (sequences, heads, size, size))
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
    """The tokens that end a generation: by an option, a generation_config, or the model's own."""
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
