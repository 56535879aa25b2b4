"""`effective`: attention without the part that no output depends on (Brunner et al. 2020).

The output of a head is W F, with F [key, model width] the projected values. Where there are more
keys than F has dimensions, rows of W have a part in the left null space of F, which changes
nothing: it is taken away. Each row sees some keys only (a causal mask, a window, padding), so its
null space is that of these keys' values, and nothing appears on a hidden key.
"""

from typing import TYPE_CHECKING

from attnflow.capturing.mixing import LayerMix

if TYPE_CHECKING:
    import torch

RANK = 1e-6  # a direction of values this small beside the largest is none


def weigh_effective(mix: LayerMix) -> "torch.Tensor":
    """[head, query, key]: attention projected on what values tell apart; of any sign."""
    import torch

    visible = mix.visible  # [query, key]
    effective = mix.attention.double().clone()
    for seen in torch.unique(visible, dim=0):
        rows = (visible == seen).all(dim=1).nonzero()[:, 0]
        keys = seen.nonzero()[:, 0]
        # the left null space of values times projection is that of values through the projection
        vectors = mix.values[:, keys].double() @ mix.projection.double()  # [head, key, width]
        if len(keys) <= 1:
            continue
        left, sizes, _ = torch.linalg.svd(vectors, full_matrices=False)
        told = sizes > RANK * sizes[:, :1].clamp_min(1e-30)  # [head, direction]
        basis = left * told[:, None, :]  # [head, key, direction]
        part = effective[:, rows][:, :, keys]
        effective[:, rows[:, None], keys[None, :]] = part @ basis @ basis.transpose(1, 2)
    return effective
