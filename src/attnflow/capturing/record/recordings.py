"""The result of `record`: `Recordings`, a list with one `Recording` per attention call."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import compress

import numpy as np
import numpy.typing as npt

from attnflow.capturing.capture import stack_shares
from attnflow.core.arrays import Array
from attnflow.core.attention import Attention
from attnflow.core.checks import check_integers
from attnflow.errors import CaptureError, OptionError


@dataclass(frozen=True, eq=False)
class Recording:
    """One call of one attention module.

    Parameters
    ----------
    name
        The module's qualified name, as "layers.0.self_attn"; "" for the recorded module itself.
    weights
        [batch, head, query, key], the head axis 1 if fused; float32, or float64 for a module in
        float64.
    padding
        [batch, key], True for a padded key; None without a padding mask.
    no_token_share
        [batch, query], mean over heads: the share of attention on bias_k and the zero key, which
        belong to no token; None where a module has neither.
    fused
        How heads were fused; None if every head was kept.
    self_attention
        Whether queries and keys are the same sequence.
    forward_pass
        The number of the forward pass inside the with-block, from 0.
    """

    name: str
    weights: Array
    padding: npt.NDArray[np.bool_] | None
    no_token_share: Array | None
    fused: str | None
    self_attention: bool
    forward_pass: int


class Recordings(list[Recording]):
    """All recorded calls, in call order."""

    passes = 0  # forward passes started inside the with-block

    def attention(
        self,
        sequence: int = 0,
        tokens: Iterable[str] | None = None,
        *,
        names: str = "",
        forward_pass: int | None = None,
    ) -> Attention:
        """The self-attention calls as the layers of one `Attention`, without padding.

        Parameters
        ----------
        sequence
            The index of the sequence in the batch.
        tokens
            One name per position; those of padded positions may be left out.
        names
            Selects the calls whose name starts with this pattern; * matches anything, as in
            "decoder.layers.*.self_attn".
        forward_pass
            The number of the forward pass, if several ran inside the with-block.

        >>> import numpy as np
        >>> weights = np.full((1, 1, 2, 2), 0.5)
        >>> call = Recording("layers.0", weights, None, None, "mean", True, 0)
        >>> Recordings([call]).attention(tokens=["the", "key"])
        <Attention: 1 layer, fused heads (mean), 2 positions>
        """
        calls = select_calls(self, names, forward_pass)
        (sequence,) = check_integers([sequence], "sequence")
        batch = min(len(call.weights) for call in calls)
        if not 0 <= sequence < batch:
            raise OptionError(
                f"sequence must be from 0 to {batch - 1}, its place in the batch; got {sequence}"
            )
        size = calls[0].weights.shape[-1]
        paddings = [call.padding[sequence] for call in calls if call.padding is not None]
        real = ~np.any([np.zeros(size, bool), *paddings], axis=0)  # [position]
        if not real.any():
            raise CaptureError(f"sequence {sequence} is padding only; pick one that has tokens")
        if tokens is not None and not isinstance(tokens, str):
            tokens = list(tokens)
            if len(tokens) == size:
                tokens = list(compress(tokens, real))
        shares = [
            None if call.no_token_share is None else call.no_token_share[sequence, real]
            for call in calls
        ]
        return Attention(
            [call.weights[sequence][:, real][:, :, real] for call in calls],
            tokens=tokens,
            fused=calls[0].fused,
            no_token_share=stack_shares(shares),
        )


def select_calls(recordings: Recordings, names: str, forward_pass: int | None) -> list[Recording]:
    """The calls of one stack of layers, or an error that says how to select them."""
    calls = [
        call
        for call in recordings
        if fnmatchcase(call.name, f"{names}*") and forward_pass in (None, call.forward_pass)
    ]
    if not calls:
        which = "" if forward_pass is None else f" in forward pass {forward_pass}"
        raise CaptureError(
            f"no recorded call has a name that starts with {names!r}{which};"
            f" recorded: {list_names(recordings)}"
        )
    passes = sorted({call.forward_pass for call in calls})
    if len(passes) > 1:
        raise CaptureError(
            f"these calls are of {len(passes)} forward passes;"
            f" pick one, as attention(forward_pass={passes[-1]})"
        )
    cross = next((call for call in calls if not call.self_attention), None)
    if cross is not None:
        raise CaptureError(
            f"attention() stacks self-attention, and {cross.name or 'this call'!r} is"
            " cross-attention; pick by name, as attention(names='decoder.layers.*.self_attn'),"
            f" from {list_names(calls)}"
        )
    lengths = sorted({call.weights.shape[-1] for call in calls})
    if len(lengths) > 1:
        raise CaptureError(
            "all layers of one stack must have the same length; got"
            f" {', '.join(map(str, lengths))}; pick by name, as attention(names='encoder'),"
            f" from {list_names(calls)}"
        )
    return calls


def list_names(calls: Sequence[Recording]) -> str:
    """The distinct names of calls, at most six of them."""
    names = list(dict.fromkeys(call.name or "the module itself" for call in calls))
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more if names else "none"
