"""Variants of one input share what stands before their changes: causal models run it once.

In a causal model a position sees earlier ones only. The keys and values of the original are kept,
and of each variant runs only what follows its first change, under its own attention mask. Whether
the cache of a model allows this is not looked up but tried: one variant also runs whole.
"""

from collections.abc import Iterator, Sequence
from inspect import signature
from typing import TYPE_CHECKING, TypeAlias

from attnflow.analysis.importance.variant import Variant, batch_variants
from attnflow.errors import CaptureError
from attnflow.models.model import Model
from attnflow.notices import give_notice

if TYPE_CHECKING:
    import torch
    import transformers

    Kept: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]  # by layer: keys and values

ARGUMENTS = {"input_ids", "attention_mask", "past_key_values", "use_cache"}
FEWEST_SAVED = 4  # passes of a whole input; keeping the keys and trying take two and a half
EARLY = 8  # what starts in the first eighth of an input saves too little
SPREAD = 4  # starts within a batch differ by at most a quarter of the positions that run
FEWEST_TOKENS = 256  # of a batch: fewer leave a processor idle
MOST_COPIES = 16  # the keys that are copied at a time, in batches of tokens
ALLOWED = 1e-4  # the difference of logits that is rounding, relative to the largest one


def run_shared(
    model: Model, variants: Sequence[Variant], batch_tokens: int
) -> "Iterator[tuple[list[int], torch.Tensor]]":
    """The logits [sequence, class] of variants that share a prefix, by their places in the list.

    Only of those that it pays for; none, with a notice, if the cache of the model does not allow
    it.
    """
    if model.task != "causal LM" or model.is_encoder_decoder:
        return
    families: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place, variant in enumerate(variants):
        start = variant.find_start()
        if start * EARLY > variant.position:
            family = families.setdefault((id(variant.original), variant.position), [])
            family.append((start, place))
    for (_, position), family in families.items():
        if sum(start for start, _ in family) < FEWEST_SAVED * (position + 1):
            continue
        family.sort()
        try:
            kept = keep_original(model, variants[family[0][1]])
            start, place = family[len(family) // 2]
            check_cache(model, kept, variants[place], start)
        except CaptureError as error:
            give_notice(
                f"every variant of an input runs whole, which takes longer: {error}", UserWarning
            )
            return
        for start, places in split_family(family, position + 1, batch_tokens):
            chosen = [variants[place] for place in places]
            yield places, run_rest(model, kept, chosen, start)


def split_family(
    family: Sequence[tuple[int, int]], length: int, batch_tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """Batches of variants, sorted by (start, place): where each batch starts, and its places."""
    done = 0
    while done < len(family):
        start = family[done][0]
        rest = length - start
        count = min(batch_tokens // rest, max(rest // SPREAD, FEWEST_TOKENS // rest))
        count = max(1, min(count, MOST_COPIES * batch_tokens // length))
        yield start, [place for _, place in family[done : done + count]]
        done += count


def keep_original(model: Model, variant: Variant) -> "Kept":
    """The keys and values of the input that a variant was made of, in each layer."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if not ARGUMENTS - {"use_cache"} <= set(signature(model.model.forward).parameters):
        raise CaptureError(f"{model.name} takes no cache of keys and values")
    assert variant.original is not None
    size = variant.position + 1
    cache = DynamicCache()
    arguments = {name: each[:, :size] for name, each in model.batch([variant.original]).items()}
    arguments |= {"past_key_values": cache, "use_cache": True}
    model.logits(arguments, [variant.position])
    layers = [layer for layer in cache.layers if type(layer) is DynamicLayer]
    found = [(layer.keys, layer.values) for layer in layers if layer.keys is not None]
    whole = all(each.ndim == 4 and each.shape[-2] == size for pair in found for each in pair)
    if not found or len(found) < len(cache.layers) or not whole:
        raise CaptureError(f"{model.name} keeps something else than keys and values")
    return found


def check_cache(model: Model, kept: "Kept", variant: Variant, start: int) -> None:
    """Refuse a cache with which a variant has other logits than when it runs whole."""
    import torch

    whole = model.logits(batch_variants(model, [variant]), [variant.position])
    shared = run_rest(model, kept, [variant], start)
    largest = max(1.0, float(whole.abs().max()))
    allowed = max(ALLOWED, 8 * torch.finfo(model.dtype).eps) * largest
    if not float((whole - shared).abs().max()) <= allowed:
        raise CaptureError(f"with a cache {model.name} has other scores")


def run_rest(model: Model, kept: "Kept", variants: Sequence[Variant], start: int) -> "torch.Tensor":
    """[sequence, class]: the logits of variants, of which positions run from `start` on."""
    position = variants[0].position
    arguments = batch_variants(model, variants)
    for name, given in arguments.items():
        first = 0 if name == "attention_mask" else start
        arguments[name] = given[:, first : position + 1]
    arguments |= {
        "past_key_values": make_cache(kept, start, len(variants)),
        "use_cache": True,
    }
    return model.logits(arguments, [position - start] * len(variants))


def make_cache(kept: "Kept", start: int, count: int) -> "transformers.DynamicCache":
    """A cache of the first `start` positions for each of `count` inputs."""
    import torch
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class Prefix(DynamicLayer):  # type: ignore[misc]  # torch is not followed
        """The keys and values of earlier positions, beside which new ones are not kept."""

        def update(
            self, keys: "torch.Tensor", values: "torch.Tensor", *_: object, **__: object
        ) -> "tuple[torch.Tensor, torch.Tensor]":
            return torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)

    cache = DynamicCache()
    for keys, values in kept:
        layer = Prefix()
        layer.lazy_initialization(keys, values)
        layer.keys = keys[:, :, :start].expand(count, -1, -1, -1)
        layer.values = values[:, :, :start].expand(count, -1, -1, -1)
        cache.layers.append(layer)
    return cache
