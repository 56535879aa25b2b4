"""Linearised backward passes: norms, activations and gated products with fixed factors.

With the attention weights, the scale of each norm and the factor of each activation held fixed, a
Transformer is linear in its stream, up to its biases:

    norm            y = w * (x - mean) * s       s is fixed; the mean stays in the gradient
    activation      a(h) = h * (a(h) / h)        the ratio is fixed, where a(0) = 0; otherwise a(h)
                                                 is a factor, which is fixed (sigmoid gates)
    gated product   p = a(g) * u                 each factor gets half of the gradient

So the sum of x * dt/dx over the stream, and of b * dt/db over the biases, is the watched scalar t.

What a module computes decides, not its class: `Lineariser` sees every operation on a tensor that
depends on the stream, and an operation without a rule is an error that names its module. The
forward pass has the values of the model, bit for bit; gradients change only in backward passes
whose rule asks for it, so several rules share one forward pass.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from attnflow.capturing.backward_rule import PLAIN, BackwardRule
from attnflow.errors import CaptureError

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

Compute: TypeAlias = Callable[..., Any]  # an operation of torch
PlainArguments: TypeAlias = tuple[Any, ...]
NamedArguments: TypeAlias = dict[str, Any]

# What is known of a tensor that depends on the stream, besides that it is linear in it. A factor is
# held fixed where it multiplies; it is named after the part that holds it.
LINEARITY = "attnflow_mark"
NORM_FACTOR, GATE_FACTOR = "norms", "activations"
# bounded, and 0 at 0: with a constant added, it is a factor, as in x * (1 + tanh(...)) / 2
BOUNDED = "bounded"
FACTORS = (NORM_FACTOR, GATE_FACTOR)
# inputs of activations below this share of 1 have the ratio of the limit
NEAR_ZERO = 1e-30


class Lineariser(TorchFunctionMode):  # type: ignore[misc]
    """Hands on the gradients of each operation as the rule of the current backward pass says.

    Parameters
    ----------
    names
        The name of each module, for messages.
    """

    def __init__(self, names: "dict[torch.nn.Module, str]") -> None:
        super().__init__()
        self.names = names
        self.rule: BackwardRule = PLAIN  # of the current backward pass
        self.counts = False  # whether constants that are added to the stream are biases by now
        self.biases: torch.Tensor | float = 0.0  # sum of b * dt/db in the current backward pass
        # what constants seem to depend on: autograd visits only what leads to wanted gradients
        self.anchor = torch.zeros((), requires_grad=True)
        self.local = threading.local()  # whether operations of a thread are seen

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Within this context, operations of this thread are seen, unless they are already."""
        if getattr(self.local, "sees", False):
            yield
            return
        with self.seeing(True), self:
            yield

    @contextmanager
    def seeing(self, sees: bool) -> Iterator[None]:
        """Within this context, operations of this thread are seen or not."""
        before = getattr(self.local, "sees", False)
        self.local.sees = sees
        try:
            yield
        finally:
            self.local.sees = before

    def holds(self, part: str) -> bool:
        """Whether the current backward pass holds a part of the model fixed."""
        return part in self.rule.linear

    def count(self, constant: "torch.Tensor | float", gradient: torch.Tensor) -> None:
        """Count a constant that was added to the stream, from the gradient there."""
        if isinstance(constant, torch.Tensor):
            constant = constant.double()
        self.biases = self.biases + (gradient.double() * constant).sum()

    def __torch_function__(
        self,
        func: Compute,
        types: object,
        args: PlainArguments = (),
        kwargs: NamedArguments | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not getattr(self.local, "sees", False) or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        args = tuple(detach_weights(each) for each in args)
        kwargs = {name: detach_weights(each) for name, each in kwargs.items()}
        if not any(map(depends, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        name, in_place = read_name(func)
        if name in ("index_add", "index_copy", "copy", "setitem"):
            return write(func, args, kwargs)
        handle = HANDLERS.get(name, handle_unknown)
        if not in_place:
            return handle(self, func, name, args, kwargs)
        compute = OUT_OF_PLACE.get(name, func)
        entered = args
        if compute is not func and name not in ("add", "sub"):  # which keep nothing of their input
            entered = (set_mark(args[0].clone(), get_mark(args[0])), *args[1:])
        result = handle(self, compute, name, entered, kwargs)
        if result is args[0]:
            return result
        set_mark(args[0].copy_(result), get_mark(result))
        return args[0]

    def refuse(self, what: str) -> CaptureError:
        """The error for an operation without a rule."""
        module = find_module(sys._getframe(1), self.names)
        return CaptureError(
            f"the linearised backward pass has no rule for {module}: it computes {what};"
            " use gradient edges"
        )


# ---- tensors and what is known of them ----------------------------------------------------------


def detach_weights(value: Any) -> Any:
    """Parameters without their gradient: what requires one then depends on the stream."""
    if type(value) is torch.nn.Parameter and value.requires_grad:
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(map(detach_weights, value))
    return value


def depends(value: Any) -> bool:
    """Whether a value, or one of a list, depends on the stream."""
    if isinstance(value, torch.Tensor):
        return bool(value.requires_grad)
    return type(value) in (list, tuple) and any(map(depends, value))


def get_mark(value: Any) -> str | None:
    """What is known of a tensor; None for one that is linear in the stream, and for constants."""
    return getattr(value, LINEARITY, None)


def set_mark(value: Any, mark: str | None) -> Any:
    """Note what is known of a tensor, or of each of several."""
    if isinstance(value, torch.Tensor):
        if mark is not None or get_mark(value) is not None:
            setattr(value, LINEARITY, mark)
    elif isinstance(value, list | tuple):
        for each in value:
            set_mark(each, mark)
    return value


def is_factor(value: Any) -> bool:
    """Whether a tensor is held fixed where it multiplies."""
    return get_mark(value) in FACTORS


def list_live(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among some values, and in lists of them, that depend on the stream."""
    live = []
    for value in values:
        if type(value) in (list, tuple):
            live += list_live(value)
        elif isinstance(value, torch.Tensor) and value.requires_grad:
            live.append(value)
    return live


def read_name(func: Compute) -> tuple[str, bool]:
    """The name of an operation, without underscores, and whether it writes to its first input."""
    name = func.__name__
    if name.startswith("__"):
        name = name.strip("_")
        if name in REFLECTED:
            return name, False
        if name[:1] == "i" and name[1:] in ("add", "sub", "mul", "truediv"):
            return name[1:], True
        return name, False
    if name.endswith("_"):
        return name.rstrip("_"), True
    return name, False


def find_module(frame: FrameType | None, names: "dict[torch.nn.Module, str]") -> str:
    """The innermost module that is running, by its name and class."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and module in names:
            return f"{names[module] or 'the model'} ({type(module).__name__})"
        frame = frame.f_back
    return "a function of the model"


# ---- what is changed in a backward pass ---------------------------------------------------------


class Multiplied(torch.autograd.Function):  # type: ignore[misc]
    """The identity, whose gradient is multiplied where the rule holds a part fixed."""

    @staticmethod
    def forward(
        ctx: "FunctionCtx", lineariser: Lineariser, part: str, factor: float, state: torch.Tensor
    ) -> torch.Tensor:
        ctx.given = lineariser, part, factor
        return state.view_as(state)

    @staticmethod
    def backward(
        ctx: "FunctionCtx", gradient: torch.Tensor
    ) -> tuple[None, None, None, torch.Tensor | None]:
        lineariser, part, factor = ctx.given
        if not lineariser.holds(part):
            return None, None, None, gradient
        return None, None, None, gradient * factor if factor else None


class Activation(torch.autograd.Function):  # type: ignore[misc]
    """An activation with a(0) = 0, as its input times a ratio."""

    @staticmethod
    def forward(
        ctx: "FunctionCtx", lineariser: Lineariser, compute: Compute, state: torch.Tensor
    ) -> torch.Tensor:
        output: torch.Tensor = compute(state)
        ctx.given = lineariser, compute
        ctx.save_for_backward(state, output)
        return output

    @staticmethod
    def backward(ctx: "FunctionCtx", gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        lineariser, compute = ctx.given
        state, output = ctx.saved_tensors
        if not lineariser.holds("activations"):
            return None, None, differentiate_again(compute, state, gradient)
        tiny = state.abs() < NEAR_ZERO
        ratio = output / state.masked_fill(tiny, 1.0)
        if tiny.any():
            zero = torch.zeros(1, dtype=state.dtype, device=state.device)
            limit = differentiate_again(compute, zero, torch.ones_like(zero))
            ratio = torch.where(tiny, limit, ratio)
        return None, None, gradient * ratio


class Norm(torch.autograd.Function):  # type: ignore[misc]
    """A norm of the last dimensions whose scale is held fixed."""

    @staticmethod
    def forward(
        ctx: "FunctionCtx",
        lineariser: Lineariser,
        compute: Compute,
        dimensions: tuple[int, ...],
        is_centred: bool,
        eps: float,
        state: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.given = lineariser, compute, dimensions, is_centred, eps, weight
        ctx.bias = bias if lineariser.counts else None
        ctx.save_for_backward(state)
        output: torch.Tensor = compute(state)
        return output

    @staticmethod
    def backward(ctx: "FunctionCtx", gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        lineariser, compute, dimensions, is_centred, eps, weight = ctx.given
        (state,) = ctx.saved_tensors
        if ctx.bias is not None:
            lineariser.count(ctx.bias, gradient)
        none = (None,) * 5
        if not lineariser.holds("norms"):
            return *none, differentiate_again(compute, state, gradient), None, None
        wide = state.float() if state.element_size() < 4 else state
        if is_centred:
            wide = wide - wide.mean(dim=dimensions, keepdim=True)
        scale = torch.rsqrt(wide.pow(2).mean(dim=dimensions, keepdim=True) + eps)
        turned = scale * (gradient if weight is None else gradient * weight)
        if is_centred:
            turned = turned - turned.mean(dim=dimensions, keepdim=True)
        return *none, turned.to(state.dtype), None, None


class Constant(torch.autograd.Function):  # type: ignore[misc]
    """The identity on a constant that is added to the stream, which is counted."""

    @staticmethod
    def forward(
        ctx: "FunctionCtx", lineariser: Lineariser, anchor: torch.Tensor, constant: torch.Tensor
    ) -> torch.Tensor:
        ctx.given = lineariser, constant
        return constant.view_as(constant)

    @staticmethod
    def backward(ctx: "FunctionCtx", gradient: torch.Tensor) -> tuple[None, None, None]:
        lineariser, constant = ctx.given
        lineariser.count(constant, gradient)
        return None, None, None


class Shift(torch.autograd.Function):  # type: ignore[misc]
    """The identity on a state that a number is added to, which is counted."""

    @staticmethod
    def forward(
        ctx: "FunctionCtx", lineariser: Lineariser, number: float, state: torch.Tensor
    ) -> torch.Tensor:
        ctx.given = lineariser, number
        return state.view_as(state)

    @staticmethod
    def backward(ctx: "FunctionCtx", gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        lineariser, number = ctx.given
        lineariser.count(number, gradient)
        return None, None, gradient


def differentiate_again(
    compute: Compute, state: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """The gradient of an operation as computed by autograd."""
    with torch.enable_grad():
        entered = state.detach().requires_grad_()
        (own,) = torch.autograd.grad(compute(entered), entered, gradient)
    return own


def hold(lineariser: Lineariser, factor: torch.Tensor) -> torch.Tensor:
    """A factor, or a divisor, that is held fixed."""
    held: torch.Tensor = Multiplied.apply(lineariser, get_mark(factor) or NORM_FACTOR, 0.0, factor)
    return held


def count_constant(lineariser: Lineariser, constant: Any, sign: int = 1) -> Any:
    """A constant that is added to the stream, counted as a bias."""
    if not lineariser.counts or not isinstance(constant, torch.Tensor):
        return constant
    return Constant.apply(lineariser, lineariser.anchor, constant)


# ---- operations, by their names ------------------------------------------------------------------


def handle_unknown(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """Comparisons, sizes and what else has no gradient; anything else is refused."""
    result = func(*args, **kwargs)
    if depends(result):
        raise lineariser.refuse(name)
    return result


def keep_structure(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """Operations that are linear in all tensors that they take."""
    # the second tensor of x.type_as(y) gives no values
    given = args[:1] if name in ("to", "type_as", "view_as", "expand_as", "reshape_as") else args
    marks = {get_mark(each) for each in list_live((*given, *kwargs.values()))}
    if marks & set(FACTORS) and marks - set(FACTORS):
        raise lineariser.refuse(f"{name} of the stream and a factor that is held fixed")
    mark = marks.pop() if len(marks) == 1 or marks <= set(FACTORS) else None
    return set_mark(func(*args, **kwargs), mark)


def handle_sum(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """Sums and differences; of one tensor alone, a sum over its elements."""
    if len(list_live(args)) != 1 or len(args) < 2:
        return keep_structure(lineariser, func, name, args, kwargs)
    place = next(number for number, each in enumerate(args[:2]) if depends(each))
    state, constant = args[place], args[1 - place]
    mark = get_mark(state)
    if mark in FACTORS:
        return set_mark(func(*args, **kwargs), mark)
    if mark == BOUNDED:
        return set_mark(func(*args, **kwargs), GATE_FACTOR)
    return func(*count_sum(lineariser, name, state, constant, place, args[2:], kwargs), **kwargs)


def count_sum(
    lineariser: Lineariser,
    name: str,
    state: torch.Tensor,
    constant: Any,
    place: int,
    rest: PlainArguments,
    kwargs: NamedArguments,
) -> PlainArguments:
    """The arguments of a sum of a state and a constant, which is counted."""
    if not lineariser.counts:
        pair = (state, constant)
    elif isinstance(constant, torch.Tensor):
        # a difference hands on the gradient with its sign
        pair = (state, count_constant(lineariser, constant))
    else:
        # state - number subtracts it; number - state hands on minus the gradient of the sum
        sign = -1 if name in ("sub", "rsub") else 1
        number = float(constant) * sign * float(kwargs.get("alpha", 1))
        pair = (Shift.apply(lineariser, number, state), constant)
    return (*(pair if place == 0 else pair[::-1]), *rest)


def handle_product(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """Products per element; where both depend on the stream, a gate or a gated product."""
    first, second = args[:2]
    if not (depends(first) and depends(second)):
        mark = get_mark(first if depends(first) else second)
        return set_mark(func(*args, **kwargs), mark)
    if is_factor(first) and is_factor(second):
        return set_mark(func(*args, **kwargs), get_mark(first))
    if is_factor(first):
        return func(hold(lineariser, first), second, *args[2:], **kwargs)
    if is_factor(second):
        return func(first, hold(lineariser, second), *args[2:], **kwargs)
    halves = [Multiplied.apply(lineariser, "products", 0.5, each) for each in (first, second)]
    return func(*halves, *args[2:], **kwargs)


def handle_quotient(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """Quotients: a divisor is held fixed."""
    first, second = args[:2] if name != "rtruediv" else args[1::-1]
    if not depends(second):
        return set_mark(func(*args, **kwargs), get_mark(first))
    if not depends(first):
        return set_mark(func(*args, **kwargs), NORM_FACTOR)
    if is_factor(first):
        return set_mark(func(*args, **kwargs), get_mark(first))
    return func(first, hold(lineariser, second), *args[2:], **kwargs)


def handle_matrix_product(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """Matrix products and convolutions with weights of the model, and their biases."""
    live = list_live((*args, *kwargs.values()))
    factors = [each for each in live if is_factor(each)]
    if len(factors) == len(live):
        return set_mark(func(*args, **kwargs), get_mark(live[0]))
    if len(live) - len(factors) > 1:
        raise lineariser.refuse(f"{name} of two tensors that both depend on the stream")
    args = tuple(hold(lineariser, each) if is_factor(each) else each for each in args)
    place = BIAS_PLACES.get(name)
    if place is not None and len(args) > place:
        args = (*args[:place], count_constant(lineariser, args[place]), *args[place + 1 :])
    if "bias" in kwargs:
        kwargs = {**kwargs, "bias": count_constant(lineariser, kwargs["bias"])}
    return func(*args, **kwargs)


def handle_activation(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """Functions of each element: by a ratio where they are 0 at 0, else a factor."""
    state, *rest = args if args else (kwargs["input"],)
    options = {key: each for key, each in kwargs.items() if key not in ("inplace", "input")}
    if len(rest) == 1 and isinstance(rest[0], bool) and name != "gelu":
        rest = []  # inplace, by its place

    def compute(entered: torch.Tensor) -> Any:
        return func(entered, *rest, **options)

    if is_factor(state):
        return set_mark(compute(state), get_mark(state))
    with torch.no_grad():
        at_zero = float(compute(torch.zeros(1, dtype=state.dtype, device=state.device)))
    if at_zero != 0:  # also where it is infinite
        return set_mark(compute(state), NORM_FACTOR if name == "rsqrt" else GATE_FACTOR)
    found = Activation.apply(lineariser, compute, state)
    return set_mark(found, BOUNDED if name in ("tanh", "erf") else None)


def handle_power(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """Powers x^n: as x times x^(n - 1)."""
    exponent = {"square": 2.0, "sqrt": 0.5}.get(name)
    if exponent is None:
        given = kwargs["exponent"] if "exponent" in kwargs else args[-1]
        if depends(given) or not depends(args[0]):
            raise lineariser.refuse("a power of the stream's own size")
        exponent = float(given)
    state = args[0]
    if is_factor(state) or exponent <= 0:
        return set_mark(func(*args, **kwargs), get_mark(state) or NORM_FACTOR)
    scaled = Multiplied.apply(lineariser, "activations", 1 / exponent, state)
    return func(scaled, *args[1:], **kwargs)


def make_norm_factor(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """Sizes of the stream: lengths and variances."""
    return set_mark(func(*args, **kwargs), NORM_FACTOR)


def make_gate_factor(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """The weights of a router."""
    return set_mark(func(*args, **kwargs), GATE_FACTOR)


def handle_norm(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """Layer norm and RMS norm as one operation."""
    names = ["input", "normalized_shape", "weight", "bias", "eps"]
    if name == "rms_norm":
        names.remove("bias")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    state, shape, weight = given["input"], given["normalized_shape"], given.get("weight")
    if any(map(depends, (weight, given.get("bias")))):
        raise lineariser.refuse(f"{name} with weights that depend on the stream")
    options = {key: each for key, each in given.items() if key != "input"}
    eps = given.get("eps")
    if eps is None:
        eps = 1e-5 if name == "layer_norm" else torch.finfo(state.dtype).eps
    return Norm.apply(
        lineariser,
        lambda entered: func(entered, **options),
        tuple(range(-len(shape), 0)),
        name == "layer_norm",
        eps,
        state,
        weight,
        given.get("bias"),
    )


def handle_glu(
    lineariser: Lineariser, func: Compute, name: str, args: PlainArguments, kwargs: NamedArguments
) -> Any:
    """A half times the sigmoid of the other half, which is held fixed."""
    state, *rest = args
    axis = kwargs.get("dim", rest[0] if rest else -1)
    value, gate = state.chunk(2, dim=axis)
    gate = Multiplied.apply(lineariser, GATE_FACTOR, 0.0, gate)
    return func(torch.cat([value, gate], dim=axis), dim=axis)


def write(func: Compute, args: PlainArguments, kwargs: NamedArguments) -> Any:
    """Writes into a tensor, which then is what was written."""
    result = func(*args, **kwargs)
    written = list_live((*args[1:], *kwargs.values()))
    for target in (args[0], result):
        if isinstance(target, torch.Tensor) and written:
            set_mark(target, get_mark(written[-1]))
    return result


Handler: TypeAlias = "Callable[[Lineariser, Compute, str, PlainArguments, NamedArguments], Any]"
REFLECTED = ("radd", "rsub", "rmul", "rtruediv", "rmatmul", "rpow", "index", "invert", "int")
# where the bias stands among the arguments
BIAS_PLACES = {"linear": 2, "addmm": 0, "baddbmm": 0, "conv1d": 2, "conv2d": 2, "conv3d": 2}
# what computes the values of an operation that writes to its first input
OUT_OF_PLACE: dict[str, Compute] = {
    name: getattr(torch, name)
    for name in ("add", "sub", "mul", "div", "pow", "clamp", "relu", "tanh", "sigmoid", "sqrt")
} | {"truediv": torch.div, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
STRUCTURE = """
    view reshape view_as reshape_as flatten unflatten transpose t permute swapaxes movedim
    contiguous expand expand_as repeat repeat_interleave squeeze unsqueeze narrow select split
    chunk unbind tile split_with_sizes tensor_split getitem index_select gather take_along_dim
    masked_select cat concat stack hstack vstack pad roll flip clone to float double half bfloat16
    type type_as cpu cuda neg mean cumsum where masked_fill tril triu diagonal dropout alpha_dropout
    topk sort max min amax amin scatter scatter_add index_put masked_scatter unfold fold
    adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d interpolate broadcast_to
    view_as_complex view_as_real broadcast_tensors get as_strided rot90 nan_to_num alias positive
"""
HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(STRUCTURE.split(), keep_structure),
    **dict.fromkeys("add radd sub rsub sum".split(), handle_sum),
    **dict.fromkeys("mul rmul multiply".split(), handle_product),
    **dict.fromkeys("div truediv rtruediv divide".split(), handle_quotient),
    **dict.fromkeys(
        "matmul rmatmul mm bmm linear addmm baddbmm einsum conv1d conv2d conv3d tensordot"
        " _grouped_mm grouped_mm".split(),
        handle_matrix_product,
    ),
    **dict.fromkeys(
        "relu relu6 leaky_relu elu celu selu silu mish gelu hardswish hardsigmoid hardtanh softplus"
        " softsign tanhshrink tanh sigmoid logsigmoid exp expm1 log log1p log2 erf rsqrt reciprocal"
        " abs clamp clip clamp_min clamp_max sin cos threshold".split(),
        handle_activation,
    ),
    **dict.fromkeys("pow square sqrt".split(), handle_power),
    **dict.fromkeys(
        "var std norm vector_norm var_mean std_mean logsumexp".split(), make_norm_factor
    ),
    **dict.fromkeys("softmax log_softmax softmin".split(), make_gate_factor),
    "layer_norm": handle_norm,
    "rms_norm": handle_norm,
    "glu": handle_glu,
}
