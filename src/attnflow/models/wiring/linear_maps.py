"""Projections, norms and factors as linear maps, measured by running modules on a few vectors."""

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnflow.errors import CaptureError

if TYPE_CHECKING:
    import torch

# how far the parts may be from the whole, as a share of its own length, by bytes per number
MISSING = {8: 1e-6, 4: 1e-3, 2: 3e-2}
HOOKS = [f"_forward{side}_hooks{form}" for side in ("", "_pre") for form in ("", "_with_kwargs")]


@dataclass(frozen=True)
class Gain:
    """A norm, or a factor per channel: a linear map up to a scale per position.

    u -> scale * weight * (u - mean(u) if centred) + offset
    """

    weight: "torch.Tensor"  # [width]
    offset: "torch.Tensor"  # [width]
    centred: bool

    def turn(self, vectors: "torch.Tensor") -> "torch.Tensor":
        """Apply the map to vectors [..., width], without its scale and offset."""
        if self.centred:
            vectors = vectors - vectors.mean(dim=-1, keepdim=True)
        return vectors * self.weight

    def fit_scale(
        self, entered: "torch.Tensor", left: "torch.Tensor", name: str, dtype: "torch.dtype"
    ) -> "torch.Tensor":
        """[position, 1]: its scale, from its inputs and outputs [position, width].

        dtype: the model's.
        """
        turned = self.turn(entered)
        target = left - self.offset
        length = turned.pow(2).sum(dim=-1, keepdim=True).clamp_min(1e-30)
        scale = (turned * target).sum(dim=-1, keepdim=True) / length
        check_parts(scale * turned, target, left, f"the norm {name}", dtype)
        return scale


class ModuleReader:
    """The projections and norms of a model as linear maps; each is measured once."""

    def __init__(self, model: "torch.nn.Module") -> None:
        self.modules = dict(model.named_modules())
        self.projections: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.gains: dict[str, Gain] = {}

    def projection(self, name: str, width: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """[width, model width] and [model width]: the weight and bias of a projection."""
        if name not in self.projections:
            self.projections[name] = read_projection(self.modules[name], width)
        return self.projections[name]

    def gain(self, name: str, width: int, device: "torch.device") -> Gain:
        """The map of a norm or factor."""
        if name not in self.gains:
            self.gains[name] = read_gain(self.modules[name], name, width, device)
        return self.gains[name]


def copy_module(module: "torch.nn.Module") -> "torch.nn.Module":
    """A copy of a module in float32, without its hooks."""
    # other threads may add hooks meanwhile: each table of hooks is copied in one step
    tables = [table for part in module.modules() for table in (getattr(part, key) for key in HOOKS)]
    copy = deepcopy(module, {id(table): table.copy() for table in tables}).float()
    copy._forward_hooks.clear()
    copy._forward_pre_hooks.clear()
    return copy


def read_gain(module: "torch.nn.Module", name: str, width: int, device: "torch.device") -> Gain:
    """The map of a norm or factor, measured on a few vectors."""
    import torch

    generator = torch.Generator().manual_seed(0)
    probe = 100 * (torch.rand(width, generator=generator) + 0.5)  # large beside any epsilon
    probe[::2] *= -1

    plain_module = copy_module(module)

    def run(vector: "torch.Tensor") -> "torch.Tensor":
        try:
            with torch.no_grad():
                return plain_module(vector.to(device)[None, None])[0, 0].double().cpu()
        except Exception as error:
            raise CaptureError(
                f"{name} ({type(module).__name__}), which the attention's output passes, was not"
                f" understood: {type(error).__name__}: {error}; use attention edges"
            ) from error

    offset = run(torch.zeros(width))
    plain, shifted, doubled = run(probe), run(probe + 30.0), run(2 * probe)
    tolerance = 1e-3 * float(plain.norm())
    centred = float((shifted - plain).norm()) < tolerance
    start = probe.double()
    if centred:
        start = start - start.mean()
    linear = float((doubled - offset - 2 * (plain - offset)).norm()) < tolerance
    length = 1.0 if linear else float(start.pow(2).mean().sqrt())
    weight = (plain - offset) / (start / length)
    return Gain(weight.float().to(device), offset.float().to(device), centred)


def read_projection(module: "torch.nn.Module", width: int) -> tuple["torch.Tensor", "torch.Tensor"]:
    """[width, model width] and [model width]: the weight and bias of a projection.

    Measured on unit vectors, so that adapters and quantised weights are included.
    """
    import torch

    if type(module) is torch.nn.Linear:
        matrix = module.weight.detach().float().T
        bias = torch.zeros(matrix.shape[1]) if module.bias is None else module.bias.detach().float()
        return matrix, bias.to(matrix.device)
    copy = copy_module(module)
    weight = next(iter(copy.parameters()), None)  # quantised weights are not parameters
    with torch.no_grad():
        units = torch.eye(width, device=None if weight is None else weight.device)[None]
        try:
            bias = copy(torch.zeros_like(units[:, :1]))[0, 0]
            return copy(units)[0] - bias, bias
        except Exception as error:
            raise CaptureError(
                f"the output projection {type(module).__name__} cannot be read:"
                f" {type(error).__name__}: {error}; use attention edges"
            ) from error


def check_parts(
    parts: "torch.Tensor",
    whole: "torch.Tensor",
    observed: "torch.Tensor",
    what: str,
    dtype: "torch.dtype",
) -> None:
    """Refuse parts [position, width] that differ from the whole by more than a tolerance."""
    missing = (parts - whole).norm(dim=-1)
    length = whole.norm(dim=-1).clamp_min(1e-6 * float(observed.norm(dim=-1).max()) + 1e-30)
    worst = float((missing / length).max())
    if not worst <= MISSING[min(8, dtype.itemsize)]:
        raise CaptureError(
            f"{what} was not understood: its parts miss what was observed by {worst:.2g} of its"
            " length; use attention edges"
        )
