"""Probing a model: what it is made of, asked once, by two short inputs that differ in one position.

Is it causal? Does it ask transformers' attention interface? Does anything but this attention carry
information from one position to another?
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from attnflow.errors import CaptureError
from attnflow.models.execution import evaluating, running
from attnflow.models.families import check_attention, list_image_marks
from attnflow.models.inputs import list_special_ids, read_patch_size, select_arguments
from attnflow.models.listening import Attend, collect_eager_calls, intercepting
from attnflow.models.weighing import compute_weights

if TYPE_CHECKING:
    from attnflow.models.model import Model

LENGTH = 5  # tokens of a probe
CHANGED = 1e-3  # a state that moves by this share of its largest number depends on what was changed
AT_ALL = 1e-5  # ... and by this share, if it is to depend on it at all


@dataclass(frozen=True)
class Probe:
    """What a model is made of, as two short inputs showed."""

    interface: bool  # it asks transformers' attention interface
    causal: bool  # no query sees a later key
    mixer: str | None  # what else carries information between positions, by name and class


probe_lock = threading.RLock()
probes: "WeakKeyDictionary[Any, Probe]" = WeakKeyDictionary()  # by torch module


def probe_model(model: "Model") -> Probe:
    """What a model is made of; each torch module is asked once."""
    with probe_lock:
        if model.model not in probes:
            probes[model.model] = run_probes(model)
        return probes[model.model]


def run_probes(model: "Model") -> Probe:
    """The probe of a model's body, else of all of it: heads may want special tokens."""
    check_attention(model.config, model.name)
    base = getattr(model.model, "base_model", model.model)
    if base is not model.model:
        try:
            return run_probe(model, base)
        except CaptureError:
            pass
    return run_probe(model, model.model)


def run_probe(model: "Model", module: Any) -> Probe:
    """The probe of a model, or of its body."""
    arguments, changed = make_probe_inputs(model, module)
    with evaluating(model.model), running(model):
        return probe_module(module, arguments, changed)


def make_probe_inputs(model: "Model", module: Any) -> tuple[dict[str, Any], dict[int, int]]:
    """Arguments of two inputs that differ in one position; that position, by their length."""
    import torch

    if model.is_vision:
        down, across = read_patch_size(model.config)
        size = getattr(model.config, "image_size", None)
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
    length = min(LENGTH, model.max_length or LENGTH)
    first, other, *rest = (ordinary * (length + 1))[: length + 1]
    ids = torch.tensor([[first, *rest], [other, *rest]], device=model.device)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    changed = {length: 0}
    if model.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids[:, : length - 1]
        changed[length - 1] = 0
    return select_arguments(module, arguments | {"use_cache": False}), changed


# Two inputs that differ in one position run side by side, while attention lets every position
# look at itself alone (and at nothing in another sequence). Then no state of another position can
# differ, unless something that is no attention carried it there: a state space, a recurrence, a
# convolution, attention that does not ask the interface. It is the first module whose output
# differs.
def probe_module(module: Any, arguments: dict[str, Any], changed: dict[int, int]) -> Probe:
    """What a torch module does with the arguments of two inputs that differ in one position.

    changed: that position, by the length of the sequence.
    """
    import torch

    causal: list[bool] = []
    differing: list[str] = []
    thread = threading.get_ident()

    def look_at_itself(
        attend: Attend,
        part: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        weights = torch.empty(shape)
        given = (part, query, key, attention_mask, None, weights, options)
        with torch.autocast(query.device.type, enabled=False):
            compute_weights(*given, hides_future=attend.hides_future)
        if query.shape[2] != key.shape[2]:  # attention to another sequence
            nothing = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
            return value.new_zeros(nothing), None
        causal.append(not weights.triu(1).any())
        own = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return own.transpose(1, 2).contiguous(), None

    def watch(name: str, part: Any) -> Callable[..., None]:
        def note(_: Any, given: Any, output: Any) -> None:
            if threading.get_ident() != thread or not is_different(output, changed):
                return
            if not any(is_different(value, changed) for value in given):
                kind = type(part).__name__
                differing.append(f"{name} ({kind})" if name else kind)

        return note

    with ExitStack() as hooks, torch.no_grad():
        for name, part in module.named_modules():
            hooks.callback(part.register_forward_hook(watch(name, part)).remove)
        with intercepting(look_at_itself):
            try:
                module(**arguments)
            except Exception:
                if not differing:  # else what is wanted is known already
                    raise
    if causal:
        return Probe(True, all(causal), differing[0] if differing else None)
    with torch.no_grad():
        calls, _ = collect_eager_calls(module, arguments, None)
        own = [call for call in calls if call.weights.shape[2] == call.weights.shape[3]]
        blind = bool(own) and all(not np.triu(call.weights, 1).any() for call in own)
        if own and "input_ids" in arguments and blind != is_blind_ahead(module, arguments):
            raise CaptureError(
                f"{type(module).__name__} gives other weights than it attends by;"
                " load it with attn_implementation='eager'"
            )
    if len(changed) > 1:  # an encoder-decoder with attention of its own, which is not captured
        return Probe(False, False, None)
    return Probe(False, blind, next(find_mixers(module) if own else iter(differing), None))


def is_blind_ahead(module: Any, arguments: dict[str, Any]) -> bool:
    """Whether what stands last changes no state before it: asked of the module's own states."""
    ids = arguments["input_ids"].clone()
    other = next(number for number in ids.unique().tolist() if number != int(ids[0, -1]))
    ids[1] = ids[0]
    ids[1, -1] = other  # two inputs that differ in their last token
    changed, seen = {ids.shape[1]: ids.shape[1] - 1}, []
    thread = threading.get_ident()

    def note(_: Any, given: Any, output: Any) -> None:
        if threading.get_ident() == thread and is_different(output, changed, AT_ALL):
            seen.append(True)

    with ExitStack() as hooks:
        for part in module.modules():
            hooks.callback(part.register_forward_hook(note).remove)
        module(**arguments | {"input_ids": ids})
    return not seen


def is_different(output: Any, changed: dict[int, int], share: float = CHANGED) -> bool:
    """Whether states [two inputs, position, width] differ beside the position that was changed."""
    import torch

    output = getattr(output, "last_hidden_state", output)
    while isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return False
    if output.ndim != 3 or len(output) != 2 or output.shape[1] not in changed:
        return False
    distance = (output[0] - output[1]).float().abs()
    distance[changed[output.shape[1]]] = 0.0
    return bool(distance.max() > share * output.float().abs().max().clamp(min=1e-30))


def find_mixers(module: Any) -> Iterator[str]:
    """Parts that mix positions by their kind; outside the interface, that is all that is known."""
    import torch

    for name, part in module.named_modules():
        recurrent = isinstance(part, torch.nn.RNNBase | torch.nn.RNNCellBase)
        kernel, stride = (getattr(part, what, None) for what in ("kernel_size", "stride"))
        # a convolution that steps as far as it is wide cuts patches, and mixes nothing beyond them
        overlaps = isinstance(kernel, tuple) and kernel != stride and set(kernel) != {1}
        if recurrent or overlaps:
            yield f"{name} ({type(part).__name__})"
