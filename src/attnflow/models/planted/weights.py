"""The weights of planted models: set by hand, so that the role of each part is known.

The stream of a position is a sum of *features*, orthogonal vectors of length LENGTH whose entries
sum to zero: the word, its position, its meaning, what was read. Layer norm takes the mean, which is
zero, and divides by the length, which is the root of the number of features in the sum: so it is a
known factor, and every matrix is written in terms of features.

    layer 1   attention: decoys; in relay, each position takes the word that follows it
              feed-forward: from a word to its meaning
    layer 2   attention: CLS gathers meanings; decoys
              feed-forward: from what was gathered to the result, which the classifier reads

Decoys attend to the first word, the last word, all words evenly, or themselves. The first kind has
the same value for every key, so that it adds the same vector whatever it attends to; the others are
not read by the projection. None of them changes the answer.
"""

from collections.abc import Hashable, Sequence
from itertools import count

import torch
from torch import Tensor, nn

from attnflow.models.bundled.verb_number import (
    CLS,
    SPECIAL,
    UNK,
    Encoding,
    VerbNumber,
    VerbNumberConfig,
    Vocabulary,
)
from attnflow.models.encode import WORD
from attnflow.models.planted.planted import FILLER, split_text

WIDTH, HEADS, LAYERS = 64, 4, 2
HEAD_WIDTH = WIDTH // HEADS
# of a feature: two of them have the length that layer norm gives
FEATURE_LENGTH = (WIDTH / 2) ** 0.5
SURE = 16.0  # a score that is larger by this much takes all attention
STEP = 4.0  # how much more the next position scores where later ones are preferred


class PlantedForSequenceClassification(VerbNumber):
    """A Transformer of the verb-number model's blocks, with weights that follow a rule."""


class Words(Vocabulary):
    """A tokenizer of whole words with spaces between them; others are refused.

    >>> Words([*SPECIAL, "red", "so"], least=1, most=3)("so red")["input_ids"]
    [2, 4, 3]
    """

    def __init__(self, words: Sequence[str], *, least: int, most: int) -> None:
        super().__init__(words)
        self.least, self.most = least, most

    def __call__(self, text: str, **_: object) -> Encoding:
        """CLS and the ids of a text's words; [UNK] may stand for any of them."""
        known = (*self.words[len(SPECIAL) :], UNK)
        words = split_text(text, known, self.least, self.most)
        spans = [(0, 0), *(match.span() for match in WORD.finditer(text))]
        return Encoding([self.ids[word] for word in (CLS, *words)], [CLS, *words], spans)


class Features:
    """Names of features, each with a vector of its own: rows of the cosine transform."""

    def __init__(self) -> None:
        steps = torch.arange(WIDTH, dtype=torch.float64)
        rows = torch.cos(torch.pi / WIDTH * steps[:, None] * (steps + 0.5))
        # [feature, width]: orthonormal; all sum to zero but the first, which is not used
        self.rows = (rows * (2 / WIDTH) ** 0.5).float()
        self.places: dict[tuple[str, Hashable], int] = {}

    def __call__(self, group: str, name: Hashable = None) -> Tensor:
        """[width]: the vector of a feature, of length 1."""
        place = self.places.setdefault((group, name), len(self.places) + 1)
        return self.rows[place]


class WeightWriter:
    """Writes the weights of one model, feature by feature."""

    def __init__(self, module: VerbNumber) -> None:
        self.module = module
        self.features = Features()
        self.units = [count() for _ in module.blocks]  # of the feed-forward networks, not yet used

    def rows_of(self, part: int, head: int) -> slice:
        """Where queries (0), keys (1) or values (2) of a head are in the projection."""
        start = (part * HEADS + head) * HEAD_WIDTH
        return slice(start, start + HEAD_WIDTH)

    def project(
        self, layer: int, head: int, part: int, place: int, feature: Tensor, size: float
    ) -> None:
        """Let one dimension of a head's queries, keys or values read a feature."""
        weight = self.module.blocks[layer].attention.query_key_value.weight
        weight[self.rows_of(part, head)][place] += size * feature

    def set_query(self, layer: int, head: int, size: float) -> None:
        """Let every query of a head be the same."""
        bias = self.module.blocks[layer].attention.query_key_value.bias
        bias[self.rows_of(0, head)][0] = size

    def write(self, layer: int, head: int, place: int, feature: Tensor, size: float) -> None:
        """Let one dimension of what a head gives be added to the stream as a feature."""
        weight = self.module.blocks[layer].attention.output.weight
        weight[:, head * HEAD_WIDTH + place] += size * feature

    def add_unit(
        self, layer: int, read: Tensor, threshold: float, written: Tensor, size: float
    ) -> None:
        """One unit of a feed-forward network: GELU(8 * (read - threshold)), 4 if read is 0.5 more.

        read: a vector whose product with the normed stream is about 1 where the unit is to work.
        size: the length of what is written then.
        """
        first, _, second = self.module.blocks[layer].feed_forward
        unit = next(self.units[layer])
        first.weight[unit], first.bias[unit] = 8 * read, -8 * threshold
        second.weight[:, unit] += size / 4 * written

    # ---- decoys ---------------------------------------------------------------------------------

    def add_first(self, layer: int, head: int, scale: float) -> None:
        """Every position attends to the first word; values are the same whatever is there."""
        self.set_query(layer, head, SURE * HEAD_WIDTH**0.5)
        self.project(layer, head, 1, 0, self.features("position", 1), 1 / scale)
        bias = self.module.blocks[layer].attention.query_key_value.bias
        bias[self.rows_of(2, head)][0] = 1.0
        self.write(layer, head, 0, self.features("constant", layer), FEATURE_LENGTH)

    def add_last(self, layer: int, head: int, scale: float, positions: int) -> None:
        """Every position attends to the last word, without effect."""
        self.set_query(layer, head, HEAD_WIDTH**0.5)
        for place in range(positions):
            self.project(layer, head, 1, 0, self.features("position", place), STEP * place / scale)

    def add_own(self, layer: int, head: int, scale: float, positions: int, ahead: int = 0) -> None:
        """Every position attends to itself, or at the next one."""
        for place in range(positions - ahead):
            query, key = self.features("position", place), self.features("position", place + ahead)
            self.project(layer, head, 0, place, query, SURE * HEAD_WIDTH**0.5 / scale)
            self.project(layer, head, 1, place, key, 1 / scale)


def measure_feature(features: float) -> float:
    """The size of one feature in a normed stream that is the sum of several."""
    return float((WIDTH / features) ** 0.5)


def build_transformer(
    name: str, kinds: dict[str, str], labels: Sequence[str], k: int | None, most: int
) -> tuple[VerbNumber, Words]:
    """The model that follows a rule, and its tokenizer.

    kinds: of each word. k: the word that is copied. most: words of a text.
    """
    vocabulary = Words([*SPECIAL, *kinds], least=k or 1, most=most)
    config = VerbNumberConfig(
        len(vocabulary),
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        hidden_size=WIDTH,
        max_position_embeddings=most + 1,
        dropout=0.0,
        model_type=f"planted-{name}",
        id2label=dict(enumerate(labels)),
    )
    with torch.random.fork_rng(devices=[]):  # drawing the initial weights leaves no trace
        module = PlantedForSequenceClassification(config)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                for weight in part.parameters():
                    weight.zero_()
        write_weights(WeightWriter(module), name, kinds, vocabulary.ids, k)
    return module.eval(), vocabulary


def write_weights(
    writer: WeightWriter, name: str, kinds: dict[str, str], ids: dict[str, int], k: int | None
) -> None:
    """All weights of a model whose weights are zero."""
    features, module = writer.features, writer.module
    words = {CLS: FILLER, UNK: FILLER} | kinds  # PAD is never seen
    positions = module.config.max_position_embeddings
    for word in words:
        module.token_embedding.weight[ids[word]] = FEATURE_LENGTH * features("word", word)
    for place in range(positions):
        module.position_embedding.weight[place] = FEATURE_LENGTH * features("position", place)
    moves = name == "relay"
    # features in the stream: where layer 1 attends, where it feeds forward, and so on
    held = [2, 3 + moves, 4 + moves, 5 + moves]

    scale = measure_feature(held[0])
    writer.add_first(0, 0, scale)
    writer.add_last(0, 1, scale, positions)
    writer.add_own(0, 2, scale, positions, ahead=int(moves))  # head 3 attends to all evenly
    for place, word in enumerate(words if moves else ()):
        writer.project(0, 2, 2, place, features("word", word), 1 / scale)
        writer.write(0, 2, place, features("moved", word), FEATURE_LENGTH)

    scale = measure_feature(held[1])
    for word, kind in words.items():
        read = features("moved" if moves else "word", word) / scale
        writer.add_unit(0, read, 0.5, features("meaning", kind), FEATURE_LENGTH)

    scale = measure_feature(held[2])
    writer.add_first(1, 2, scale)
    writer.add_last(1, 3, scale, positions)
    plans = {
        "copy": write_copy,
        "relay": write_copy,
        "conjunction": write_conjunction,
        "majority": write_majority,
        "last": write_last,
    }
    plans[name](writer, scale, held[3], (k or 0) - moves)


def ask_as_cls(writer: WeightWriter, head: int, scale: float) -> None:
    """Let CLS ask in layer 2, with a score of 1 for keys of size 1; others attend to all evenly."""
    cls = writer.features("word", CLS)
    writer.project(1, head, 0, 0, cls, HEAD_WIDTH**0.5 / scale)


def write_copy(writer: WeightWriter, scale: float, held: int, place: int) -> None:
    """CLS attends to one position, and copies its meaning."""
    features, classifier = writer.features, writer.module.classifier
    ask_as_cls(writer, 0, scale)
    writer.add_own(1, 1, scale, writer.module.config.max_position_embeddings)
    writer.project(1, 0, 1, 0, features("position", place), SURE / scale)
    for number, word in writer.module.config.id2label.items():
        writer.project(1, 0, 2, number, features("meaning", word), 1 / scale)
        writer.write(1, 0, number, features("gathered", word), FEATURE_LENGTH)
        read = features("gathered", word) / measure_feature(held + 1)
        writer.add_unit(1, read, 0.5, features("result", word), 2 * FEATURE_LENGTH)
        classifier.weight[number] = features("result", word)


def write_conjunction(writer: WeightWriter, scale: float, held: int, _: int) -> None:
    """CLS attends to each of two markers with one head, and to itself if there is none."""
    features, classifier = writer.features, writer.module.classifier
    read = torch.zeros(WIDTH)
    for head, kind in enumerate(("salt", "pepper")):
        ask_as_cls(writer, head, scale)
        writer.project(1, head, 1, 0, features("meaning", kind), SURE / scale)
        writer.project(1, head, 1, 0, features("word", CLS), SURE / 2 / scale)
        writer.project(1, head, 2, 0, features("meaning", kind), 1 / scale)
        writer.write(1, head, 0, features("gathered", kind), FEATURE_LENGTH)
        read += features("gathered", kind) / measure_feature(held + 2)
    writer.add_unit(1, read, 1.5, features("result"), 2 * FEATURE_LENGTH)  # one alone is not enough
    classifier.weight[0], classifier.weight[1] = -features("result") / 2, features("result") / 2
    classifier.bias[0] = measure_feature(held + 2 + 4)  # half of what the result gives


def write_majority(writer: WeightWriter, scale: float, held: int, _: int) -> None:
    """CLS attends to all positions evenly: the mean is fruit minus animals, by the length."""
    features, classifier = writer.features, writer.module.classifier
    writer.add_own(1, 1, scale, writer.module.config.max_position_embeddings)
    writer.project(1, 0, 2, 0, features("meaning", "fruit"), 1 / scale)
    writer.project(1, 0, 2, 0, features("meaning", "animal"), -1 / scale)
    writer.write(1, 0, 0, features("gathered"), 2 * FEATURE_LENGTH)
    for sign in (1, -1):  # GELU(x) - GELU(-x) is x
        read = sign * features("gathered") / measure_feature(held)
        writer.add_unit(1, read, 0.0, sign * features("result"), FEATURE_LENGTH)
    classifier.weight[0], classifier.weight[1] = -features("result") / 2, features("result") / 2
    # half of what the smallest majority of the longest text gives
    longest = writer.module.config.max_position_embeddings
    classifier.bias[0] = 0.5 * measure_feature(held) * 4 / longest


def write_last(writer: WeightWriter, scale: float, held: int, _: int) -> None:
    """CLS attends to words with a colour, the later the more."""
    features, classifier = writer.features, writer.module.classifier
    positions = writer.module.config.max_position_embeddings
    ask_as_cls(writer, 0, scale)
    writer.add_own(1, 1, scale, positions)
    for place in range(positions):
        writer.project(1, 0, 1, 0, features("position", place), STEP * place / scale)
    for number, (kind, sign) in enumerate({"cold": -1, "warm": 1}.items()):
        writer.project(1, 0, 1, 0, features("meaning", kind), (STEP * positions + SURE) / scale)
        writer.project(1, 0, 2, 0, features("meaning", kind), sign / scale)
        read = sign * features("gathered") / measure_feature(held + 1)
        writer.add_unit(1, read, 0.5, features("result", kind), 2 * FEATURE_LENGTH)
        classifier.weight[number] = features("result", kind)
    writer.write(1, 0, 0, features("gathered"), FEATURE_LENGTH)
    classifier.bias[0] = 0.5  # cold if there is nothing to read
