"""attnflow: which input tokens does a Transformer look at?

From attention weights to token attention, by raw attention, attention rollout and attention flow.

>>> import attnflow as af
>>> attention = af.Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"])
>>> af.rollout(attention).at(position=0)
array([0.6875, 0.3125])
"""

import lazy_loader

__version__ = "0.4.0"

# The stub beside this file lists the public names. Each is imported when it is first used, so that
# a program which only multiplies matrices does not wait for torch.
__getattr__, _, _public = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted(set(_public) - {"figures"})  # which is a module


def __dir__() -> list[str]:
    """The public names, without the packages that define them."""
    return sorted([*__all__, "__doc__", "__version__", "figures"])
