"""Probing a model once, with two short inputs that differ in one position.

Is it causal? Does it use transformers' attention interface? Does anything but this attention carry
information from one position to another?
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from attnflow.errors import CaptureError
from attnflow.models.attention_calls import (
    AttentionFunction,
    AttentionOutput,
    collect_eager_calls,
    intercept_attention,
)
from attnflow.models.attention_weights import Scoring, compute_weights
from attnflow.models.encoded import (
    list_special_ids,
    read_patch_size,
    read_vision_config,
    select_arguments,
)
from attnflow.models.execution import ModuleCache, evaluating, running
from attnflow.models.families import check_attention, list_image_marks
from attnflow.models.hooks import watch_modules
from attnflow.models.wiring.trace import first_state

if TYPE_CHECKING:
    import torch

    from attnflow.models.model import Model

ProbeInputs: TypeAlias = "dict[str, torch.Tensor]"
Changed = dict[int, int]  # the position that was changed, by the length of the sequence
PROBE_LENGTH = 5  # tokens of a probe
CHANGED = 1e-3  # a state depends on the changed position if it moves by this share of its maximum
AT_ALL = 1e-5  # ... and it does not depend on it at all if it moves by less than this share


@dataclass(frozen=True)
class Probe:
    """Properties of a model, measured with two short inputs."""

    interface: bool  # it uses transformers' attention interface
    causal: bool  # no query sees a later key
    mixer: str | None  # what else carries information between positions, by name and class


probes: ModuleCache[Probe] = ModuleCache()


def probe_model(model: "Model") -> Probe:
    """The probe of a model; each torch module is probed once."""
    return probes.get(model.model, None, lambda: run_probes(model))


def run_probes(model: "Model") -> Probe:
    """The probe of a model's body, else of all of it: heads may need special tokens."""
    check_attention(model.config, model.name)
    base = getattr(model.model, "base_model", model.model)
    if base is not model.model:
        with suppress(CaptureError):
            return probe_module(model, base)
    return probe_module(model, model.model)


def probe_module(model: "Model", module: "torch.nn.Module") -> Probe:
    """The probe of a model, or of its body."""
    arguments, changed = make_probe_inputs(model, module)
    with evaluating(model.model), running(model):
        causal, differing = run_isolated(module, arguments, changed)
        if causal:
            return Probe(True, all(causal), next(iter(differing), None))
        return probe_eager(module, arguments, changed, differing)


def make_probe_inputs(model: "Model", module: "torch.nn.Module") -> tuple[ProbeInputs, Changed]:
    """Arguments of two inputs that differ in one position; that position, by their length."""
    import torch

    if model.is_vision:
        down, across = read_patch_size(model.config)
        size = getattr(read_vision_config(model.config), "image_size", None)
        high, wide = size if isinstance(size, Sequence) else (size or 2 * down,) * 2
        pixels = torch.zeros(2, getattr(model.config, "num_channels", 3), high, wide)
        pixels[1, :, :down, :across] = 1.0
        special = len(list_image_marks(model.model, model.config))
        count = special + (high // down) * (wide // across)
        return {"pixel_values": pixels.to(model.device, model.dtype)}, {count: special}
    special_ids = {
        number for name in ("pad", "bos", "eos") for number in list_special_ids(model.config, name)
    }
    size = model.vocabulary_size
    order = [*range(size // 2, size), *range(size // 2)]
    ordinary = [number for number in order if number not in special_ids | model.marks] or order
    length = min(PROBE_LENGTH, model.max_length or PROBE_LENGTH)
    first, other, *rest = (ordinary * (length + 1))[: length + 1]
    ids = torch.tensor([[first, *rest], [other, *rest]], device=model.device)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    changed = {length: 0}
    if model.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids[:, : length - 1]
        changed[length - 1] = 0
    return select_arguments(module, arguments | {"use_cache": False}), changed


# Two inputs that differ in one position run side by side, while attention lets every position
# attend to itself alone (and at nothing in another sequence). Then no state of another position can
# differ, unless something other than attention carried it there: a state space, a recurrence, a
# convolution, attention outside the interface. It is the first module whose output differs.
def run_isolated(
    module: "torch.nn.Module", arguments: ProbeInputs, changed: Changed
) -> tuple[list[bool], list[str]]:
    """Whether each call of self-attention is causal, and the modules that mix positions."""
    import torch

    causal: list[bool] = []
    differing: list[str] = []
    names = {part: name for name, part in module.named_modules()}

    def attend_to_itself(
        function: AttentionFunction,
        part: "torch.nn.Module",
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        attention_mask: "torch.Tensor | None" = None,
        *rest: object,
        **options: Any,
    ) -> AttentionOutput:
        hides_future = function.hides_future
        scoring = Scoring.read(part, query, key, attention_mask, options, hides_future=hides_future)
        weights = torch.empty(*query.shape[:3], key.shape[2])
        with torch.autocast(query.device.type, enabled=False):
            compute_weights(scoring, None, weights)
        if query.shape[2] != key.shape[2]:  # attention to another sequence
            nothing = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
            return value.new_zeros(nothing), None
        causal.append(not weights.triu(1).any())
        own = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return own.transpose(1, 2).contiguous(), None

    def after(part: "torch.nn.Module", given: tuple[object, ...], output: object) -> None:
        if is_different(output, changed) and not any(is_different(x, changed) for x in given):
            kind = type(part).__name__
            differing.append(f"{names[part]} ({kind})" if names[part] else kind)

    with torch.no_grad(), watch_modules(names, after=after), intercept_attention(attend_to_itself):
        try:
            module(**arguments)
        except Exception:
            if not differing:  # otherwise the mixer is known already
                raise
    return causal, differing


def probe_eager(
    module: "torch.nn.Module", arguments: ProbeInputs, changed: Changed, differing: Sequence[str]
) -> Probe:
    """The probe of a module outside the interface, from the weights that it returns.

    differing: the modules that mix positions, its own attention among them.
    """
    import torch

    with torch.no_grad():
        calls, _ = collect_eager_calls(module, arguments, None)
        own = [call for call in calls if call.weights.shape[2] == call.weights.shape[3]]
        blind = bool(own) and all(not np.triu(call.weights, 1).any() for call in own)
        if own and "input_ids" in arguments and blind != is_blind_ahead(module, arguments):
            raise CaptureError(
                f"{type(module).__name__} gives other weights than it attends by;"
                " load it with attn_implementation='eager'"
            )
    if len(changed) > 1:  # an encoder-decoder outside the interface, which is not captured
        return Probe(False, False, None)
    return Probe(False, blind, next(find_mixers(module) if own else iter(differing), None))


def is_blind_ahead(module: "torch.nn.Module", arguments: ProbeInputs) -> bool:
    """Whether the last token changes no state before it, by the module's own states."""
    ids = arguments["input_ids"].clone()
    other = next(number for number in ids.unique().tolist() if number != int(ids[0, -1]))
    ids[1] = ids[0]
    ids[1, -1] = other  # two inputs that differ in their last token
    changed, seen = {ids.shape[1]: ids.shape[1] - 1}, []

    def after(part: "torch.nn.Module", given: tuple[object, ...], output: object) -> None:
        if is_different(output, changed, AT_ALL):
            seen.append(True)

    with watch_modules(module.modules(), after=after):
        module(**arguments | {"input_ids": ids})
    return not seen


def is_different(value: object, changed: Changed, share: float = CHANGED) -> bool:
    """Whether states [two inputs, position, width] differ beside the position that was changed."""
    state = first_state(value)
    if state is None or state.ndim != 3 or len(state) != 2 or state.shape[1] not in changed:
        return False
    distance = (state[0] - state[1]).float().abs()
    distance[changed[state.shape[1]]] = 0.0
    return bool(distance.max() > share * state.float().abs().max().clamp(min=1e-30))


def find_mixers(module: "torch.nn.Module") -> Iterator[str]:
    """The parts that mix positions by their kind; outside the interface, nothing more is known."""
    import torch

    for name, part in module.named_modules():
        recurrent = isinstance(part, torch.nn.RNNBase | torch.nn.RNNCellBase)
        kernel, stride = (getattr(part, what, None) for what in ("kernel_size", "stride"))
        # a convolution that steps as far as it is wide cuts patches, and mixes nothing beyond them
        overlaps = isinstance(kernel, tuple) and kernel != stride and set(kernel) != {1}
        if recurrent or overlaps:
            yield f"{name} ({type(part).__name__})"
