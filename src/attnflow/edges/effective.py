"""`effective`: attention without the part that changes no output (Brunner et al. 2020).

The output of a head is W F, with F [key, model width] the projected values. Where there are more
keys than F has dimensions, rows of W have a part in the left null space of F, which changes
nothing: it is taken away. Each row sees some keys only (a causal mask, a window, padding), so its
null space is that of these keys' values, and nothing appears on a hidden key.
"""

from typing import TYPE_CHECKING

from attnflow.capturing.mix import LayerMix

if TYPE_CHECKING:
    import torch

RANK = 1e-6  # a direction of values this small relative to the largest does not count


def weigh_effective(mix: LayerMix) -> "torch.Tensor":
    """[head, query, key]: attention projected on the span of the values; of any sign."""
    import torch

    visible = mix.visible  # [query, key]
    effective = mix.attention.double().clone()
    # values times projection, in an orthonormal basis of what the projection writes: the same
    # left null space and singular values, in as many columns as a head is wide
    written = torch.linalg.qr(mix.projection.double().transpose(1, 2), mode="r").R
    vectors = mix.values.double() @ written.transpose(1, 2)  # [head, key, head width]
    independent: list[torch.Tensor] = []  # sets of keys whose vectors are independent
    sets = torch.unique(visible, dim=0)
    for seen in sets[sets.sum(dim=1).argsort(descending=True)]:
        if any(not (seen & ~wider).any() for wider in independent):
            continue  # a subset of independent vectors: nothing to take away
        rows = (visible == seen).all(dim=1).nonzero()[:, 0]
        keys = seen.nonzero()[:, 0]
        if len(keys) <= 1:
            continue
        few = len(keys) <= vectors.shape[2]
        basis, triangle = torch.linalg.qr(vectors[:, keys].mT if few else vectors[:, keys])
        if are_independent(triangle):
            if few:
                independent.append(seen)
                continue
        else:
            basis, sizes, _ = torch.linalg.svd(vectors[:, keys], full_matrices=False)
            counts = sizes > RANK * sizes[:, :1].clamp_min(1e-30)  # [head, direction]
            basis = basis * counts[:, None, :]
        part = effective[:, rows][:, :, keys]  # basis: [head, key, direction]
        effective[:, rows[:, None], keys[None, :]] = part @ basis @ basis.mT
    return effective


def are_independent(triangle: "torch.Tensor") -> bool:
    """Whether a triangle [head, direction, direction] has full rank in every head.

    Its smallest singular value is at least 1 / |inverse|, its largest at most |triangle|.
    """
    import torch

    identity = torch.eye(triangle.shape[1]).to(triangle)
    inverse = torch.linalg.solve_triangular(triangle, identity, upper=True)
    condition = torch.linalg.matrix_norm(triangle) * torch.linalg.matrix_norm(inverse)
    return bool((condition < 1 / RANK).all())  # NaN and infinity are not
