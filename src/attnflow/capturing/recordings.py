"""What `record` gives: `Recordings`, a list with one `Recording` per call of attention."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

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
        [batch, query], mean over heads: the share of attention that bias_k and the zero key get,
        which are no tokens; None where a module has neither.
    fused
        How heads were fused; None if every head was kept.
    self_attention
        Whether queries and keys are the same sequence.
    forward_pass
        Which forward pass of the recorded module inside the with-block it was of, from 0.
    """

    name: str
    weights: Array
    padding: npt.NDArray[np.bool_] | None
    no_token_share: Array | None
    fused: str | None
    self_attention: bool
    forward_pass: int

    @property
    def sink(self) -> Array | None:
        """The old name of `no_token_share`."""
        warnings.warn(
            "Recording.sink is now called no_token_share: a sink is a token",
            FutureWarning,
            stacklevel=2,
        )
        return self.no_token_share


class Recordings(list[Recording]):
    """All recorded calls, in call order."""

    passes = 0  # forward passes begun inside the with-block

    def attention(
        self,
        sequence: int = 0,
        tokens: Iterable[str] | None = None,
        *,
        names: str = "",
        forward_pass: int | None = None,
    ) -> Attention:
        """The self-attention calls as the layers of one `Attention`, padding cut away.

        Parameters
        ----------
        sequence
            Its place in the batch, from 0.
        tokens
            One name per position, with or without those of padded positions.
        names
            Only calls whose name starts so; a * stands for anything, as in
            "decoder.layers.*.self_attn".
        forward_pass
            Which one, if several ran inside the with-block.

        >>> import numpy as np
        >>> weights = np.full((1, 1, 2, 2), 0.5)
        >>> call = Recording("layers.0", weights, None, None, "mean", True, 0)
        >>> Recordings([call]).attention(tokens=["the", "key"])
        <Attention: 1 layer, fused heads (mean), 2 positions>
        """
        calls = self._select(names, forward_pass)
        (sequence,) = check_integers([sequence], "sequence")
        batch = min(len(call.weights) for call in calls)
        if not 0 <= sequence < batch:
            raise OptionError(
                f"sequence must be from 0 to {batch - 1}, its place in the batch; got {sequence}"
            )
        real = np.ones(calls[0].weights.shape[-1], bool)
        for call in calls:
            if call.padding is not None:
                real &= ~call.padding[sequence]
        if not real.any():
            raise CaptureError(f"sequence {sequence} is padding alone; pick one that has tokens")
        if tokens is not None and not isinstance(tokens, str):
            tokens = list(tokens)
            if len(tokens) == len(real):
                tokens = [token for token, kept in zip(tokens, real, strict=True) if kept]
        shares = [call.no_token_share for call in calls]
        no_token_share = None
        if any(share is not None for share in shares):
            rows = [np.zeros(len(real)) if share is None else share[sequence] for share in shares]
            no_token_share = np.stack(rows)[:, real]
        return Attention(
            [call.weights[sequence][:, real][:, :, real] for call in calls],
            tokens=tokens,
            fused=calls[0].fused,
            no_token_share=no_token_share,
        )

    def _select(self, names: str, forward_pass: int | None) -> list[Recording]:
        """The calls of one stack of layers, or an error that says how to pick them."""
        calls = [
            call
            for call in self
            if fnmatchcase(call.name, f"{names}*") and forward_pass in (None, call.forward_pass)
        ]
        if not calls:
            which = "" if forward_pass is None else f" in forward pass {forward_pass}"
            raise CaptureError(
                f"no recorded call has a name that starts with {names!r}{which};"
                f" recorded: {list_names(self)}"
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
    """The names of calls, once each, not more than fit in a line."""
    names = list(dict.fromkeys(call.name or "the module itself" for call in calls))
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more if names else "none"
