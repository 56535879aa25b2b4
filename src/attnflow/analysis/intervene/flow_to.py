"""`flow_to`: the maximum flow to a word of a text, for its minimum cut to be cut."""

from attnflow.analysis.intervene.change import Change, find_blanked
from attnflow.core.choices import Choices
from attnflow.core.flow.max_flow import MaxFlow
from attnflow.core.methods import max_flow
from attnflow.edges.graphs import attention_graph
from attnflow.models.encoded import OneSequence
from attnflow.models.load import ModelLike, open_model
from attnflow.models.predict import Foil


def flow_to(
    model: ModelLike,
    inputs: OneSequence,
    change: Change,
    *,
    edges: Choices = "attention",
    position: int | None = None,
    target: int | str | None = None,
    foil: Foil | None = None,
) -> MaxFlow:
    """The maximum flow from the position of the prediction to tokens taken together.

    change: its `blank` names the tokens. edges: one kind. target, foil: watched by gradients.

    >>> flow_to("verb-number", "the keys to the cabinet", Change(blank="keys")).targets
    (2,)
    """
    model = open_model(model)
    encoded = model.encode(inputs)
    places = find_blanked(change.blank, encoded)
    graph = attention_graph(
        model, encoded, edges=edges, target=target, foil=foil, position=position
    )
    return max_flow(
        graph, source=(graph.depth, model.locate(encoded, position)), target=(0, places)
    )
