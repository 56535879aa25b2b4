"""How the verb-number model is trained: two recipes, and the parts in which they differ."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from attnflow.errors import OptionError
from attnflow.paper.augmentation import Mixture


@dataclass(frozen=True)
class Recipe:
    """The options of a training; by default those of the model that ships, the careful recipe."""

    name: str = field(default="careful", compare=False)
    steps: int = 7400
    batch: int = 64
    rate: float = 1.5e-3
    warm_up: float = 0.04
    fall: float = 0.4  # the share of the steps, at the end, over which the rate falls
    decay: float = 0.05
    average: float | None = 0.998  # the decay of the moving average of the weights
    smoothing: float = 0.05  # of labels
    attention_dropout: float = 0.0  # drawing its noise costs a tenth of the time
    blank: float = 0.07  # words that become UNK, so that the model gets to know UNK
    blank_loss: float = 0.3  # the weight of guessing those words
    tag: float = 0.05  # nouns that become NN or NNS, as the data writes rare ones
    mixture: Mixture = field(default_factory=Mixture)
    embedding: float = 4.0  # how much wider than GPT-2's 0.02 the weights start
    position: float = 2.0
    linear: float = 3.0
    shared: bool = True  # whether embeddings of one ending, number or noun have a part in common


CAREFUL = Recipe()
# the sentences as they are, in the shares of their sources
UNCHANGED = Mixture(inner=0.0, grammar=0.0, variants={"plain": 1.0}, flipped=0.0, introduced=0.0)
# the paper tells of its training that blocks are those of GPT-2: weights start at 0.02, dropout 0.1
PLAIN_RECIPE = Recipe(
    "plain",
    steps=3000,
    batch=64,
    average=None,
    smoothing=0.0,
    attention_dropout=0.1,
    blank=0.1,
    blank_loss=0.0,
    tag=0.0,
    mixture=UNCHANGED,
    embedding=1.0,
    position=1.0,
    linear=1.0,
    shared=False,
)
RECIPES: Mapping[str, Recipe] = MappingProxyType({"plain": PLAIN_RECIPE, "careful": CAREFUL})
# the careful recipe without a part takes the options of that part from the plain one
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "blank-loss": ("blank_loss",),
        "augmentation": ("mixture", "tag"),
        "initialisation": ("embedding", "position", "linear", "shared"),
        "length": ("steps",),
        "regularisation": ("average", "smoothing", "attention_dropout", "blank"),
    }
)


def choose_recipe(
    name: str = "careful", *, without: Iterable[str] = (), steps: int | None = None
) -> Recipe:
    """A recipe by its name; parts of the careful one may be left out, and `steps` may be changed.

    >>> choose_recipe("careful", without=["length"]).steps == choose_recipe("plain").steps
    True
    >>> choose_recipe("careful", without=PARTS) == choose_recipe("plain")
    True
    """
    if name not in RECIPES:
        raise OptionError(f"unknown recipe {name!r}; choose from {', '.join(RECIPES)}")
    recipe, parts = RECIPES[name], tuple(without)
    for part in parts:
        if part not in PARTS:
            raise OptionError(f"unknown part {part!r}; choose from {', '.join(PARTS)}")
    if parts and recipe != CAREFUL:
        raise OptionError(
            f"parts are left out of the careful recipe; got recipe {name!r} without"
            f" {', '.join(parts)}: choose --recipe careful"
        )
    changes = {option: getattr(PLAIN_RECIPE, option) for part in parts for option in PARTS[part]}
    if parts:
        changes["name"] = f"{name} without {', '.join(dict.fromkeys(parts))}"
    if steps is not None:
        changes["steps"] = steps
    return replace(recipe, **changes)
