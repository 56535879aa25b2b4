"""The model that ships with attnflow: is the verb that follows these words singular or plural?

The paper's model: a Transformer encoder of GPT-2 blocks without a causal mask, with a CLS token in
front, whose state in the last layer goes to the classifier. Plain PyTorch; the names in
`VerbNumberConfig` are those of Hugging Face, so that every part of attnflow takes it like any other
model.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from attnflow.core.io.files import write_file
from attnflow.errors import FileError
from attnflow.models.attention_calls import find_attention_function
from attnflow.models.chats import Range
from attnflow.models.files import describe_error

LABELS = ("singular", "plural")
PAD, UNK, CLS = "[PAD]", "[UNK]", "[CLS]"
SPECIAL = (PAD, UNK, CLS)
MODEL_TYPE = "verb-number"


@dataclass(frozen=True)
class VerbNumberConfig:
    """The size of the model; by default that of the paper."""

    vocab_size: int
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    hidden_size: int = 128
    max_position_embeddings: int = 64
    dropout: float = 0.1
    pad_token_id: int = 0
    model_type: str = MODEL_TYPE
    id2label: dict[int, str] = field(default_factory=lambda: dict(enumerate(LABELS)))


@dataclass(frozen=True)
class Output:
    """The output of the model, with the names of Hugging Face."""

    logits: Tensor  # [sequence, label]
    attentions: tuple[Tensor, ...] | None = None  # one per layer: [sequence, head, query, key]


def attend(
    module: "SelfAttention",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attention: the mixed values [sequence, query, head, width], and the weights.

    It is called as transformers' attention functions are, so that it is recorded as they are.
    mask: True for keys that are seen.
    """
    scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    return (module.dropout(weights) @ value).transpose(1, 2), weights


class SelfAttention(nn.Module):
    """Attention of every position to every position that is not padding."""

    def __init__(self, config: VerbNumberConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, state: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """The state [sequence, position, width], mixed; weights [sequence, head, query, key]."""
        sequences, positions, width = state.shape
        projected = self.query_key_value(state).view(
            sequences, positions, 3, self.heads, width // self.heads
        )
        # each [sequence, head, position, width of a head]
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attend_here = find_attention_function(attend)
        mixed, weights = attend_here(self, query, key, value, seen, is_causal=False)
        return self.output(mixed.reshape(sequences, positions, width)), weights


class Block(nn.Module):
    """A GPT-2 block: attention, then a feed-forward network, each normalised and added."""

    def __init__(self, config: VerbNumberConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(config)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, state: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next layer's state [sequence, position, width], and the attention weights."""
        mixed, weights = self.attention(self.attention_norm(state), seen)
        state = state + self.dropout(mixed)
        state = state + self.dropout(self.feed_forward(self.feed_forward_norm(state)))
        return state, weights


class VerbNumber(nn.Module):
    """Token ids in, with CLS first; scores of singular and plural out."""

    def __init__(self, config: VerbNumberConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, len(config.id2label))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> Output:
        """input_ids, attention_mask (0 where there is no token): [sequence, position]."""
        state, attentions = self.states(input_ids, attention_mask)
        return Output(
            self.classifier(state[:, 0]), tuple(attentions) if output_attentions else None
        )

    def states(
        self, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The final states [sequence, position, width], and each layer's attention weights."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        state = self.dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        seen = None if attention_mask is None else (attention_mask != 0)[:, None, None, :]
        attentions = []
        for block in self.blocks:
            state, weights = block(state, seen)
            attentions.append(weights)
        return self.norm(state), attentions

    def get_input_embeddings(self) -> nn.Embedding:
        """The layer that turns ids to vectors."""
        return self.token_embedding


# ---- words --------------------------------------------------------------------------------------

# a text is cut as the Penn Treebank cuts it: "it's" is "it" and "'s", "don't" is "do" and "n't",
# punctuation stands alone
WORD_PIECES = re.compile(
    r"n't\b|'(?:s|m|d|re|ve|ll)\b|\w+(?=n't\b)|\w+(?:[-.]\w+)*|``|''|--|\.\.\.|\S", re.IGNORECASE
)
QUOTES = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-"})
# the class of a word that the vocabulary lacks: the first rule that fits it, as the data writes
# rare words
CLASSES = (
    ("CD", re.compile(r"[\d.,/:-]*\d[\d.,/:-]*(?:st|nd|rd|th|s)?")),
    ("VBG", re.compile(r".{2,}ing")),
    ("VBN", re.compile(r".{2,}ed")),
    ("RB", re.compile(r".{2,}ly")),
    ("JJ", re.compile(r".{2,}(?:ous|ful|less|able|ible|ive|ish|ical|ial|ic|ary|ese)|.{3,}al")),
    ("NN", re.compile(r".*(?:ss|us|is)")),
    (
        "NNS",
        re.compile(r".{2,}s|.*(?:men|people|folk|children|mice|feet|teeth|geese)|.{2,}(?:ae|eaux)"),
    ),
)


def find_words(text: str) -> list[re.Match[str]]:
    """The words and signs of a text, as the vocabulary cuts them.

    >>> [match.group() for match in find_words("The dogs' owner doesn't see it, though.")]
    ['The', 'dogs', "'", 'owner', 'does', "n't", 'see', 'it', ',', 'though', '.']
    """
    return list(WORD_PIECES.finditer(text.translate(QUOTES)))


def classify_word(word: str, *, first: bool = False) -> str:
    """The part-of-speech-like class of a word by its look: NN, NNS, NNP, VBG, VBN, RB, JJ or CD.

    A capital means a name, except in the first word of a text; then endings decide; everything else
    is a singular noun.

    >>> [classify_word(word) for word in ("zorbs", "zorb", "Zorbia", "zorbing", "zorbed")]
    ['NNS', 'NN', 'NNP', 'VBG', 'VBN']
    >>> [classify_word(word) for word in ("zorbly", "zorbous", "1,234")]
    ['RB', 'JJ', 'CD']
    """
    if word[:1].isupper() and not first:
        return "NNP"
    low = word.lower()
    return next((name for name, rule in CLASSES if rule.fullmatch(low)), "NN")


class Encoding(dict[str, list[int] | list[Range]]):
    """The ids of a text and the characters of each token, as in Hugging Face's tokenizers."""

    def __init__(self, ids: list[int], names: list[str], spans: list[Range]) -> None:
        super().__init__(input_ids=ids, offset_mapping=spans)
        self.names = names

    def tokens(self) -> list[str]:
        """The words as the model reads them; an unknown one with its class, as in "zorbs/NNS"."""
        return self.names

    def sequence_ids(self) -> list[int | None]:
        """None for CLS, then 0 per token: they are of the one text."""
        return [None, *[0] * (len(self.names) - 1)]


class Vocabulary:
    """The words that the model knows, in the order of their ids; called as a tokenizer is.

    >>> vocabulary = Vocabulary([*SPECIAL, "the", "NN", "NNS"])
    >>> vocabulary("The zorbs").tokens(), vocabulary("The zorbs")["input_ids"]
    (['[CLS]', 'the', 'zorbs/NNS'], [2, 3, 5])
    """

    is_fast = True  # as in Hugging Face's tokenizers: it knows the characters of each token
    pad_token_id, unk_token_id, cls_token_id = (0, 1, 2)
    all_special_ids = (0, 2)  # UNK stands for a word

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        if self.words[: len(SPECIAL)] != SPECIAL or len(set(self.words)) != len(self.words):
            raise FileError(
                f"a vocabulary must begin with {', '.join(SPECIAL)} and name each word once;"
                f" got {self.words[:3]}"
            )

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each word."""
        return {word: place for place, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def __call__(
        self, text: str, *, truncation: bool = False, max_length: int | None = None, **_: object
    ) -> Encoding:
        """CLS and the ids of a text's words; from its start, if it is cut."""
        matches = find_words(text)
        words, spans = [match.group() for match in matches], [match.span() for match in matches]
        entries = [self.find_entry(word, first=not place) for place, word in enumerate(words)]
        names = [
            entry if entry in (word, word.lower()) else f"{word}/{entry}"
            for word, entry in zip(words, entries, strict=True)
        ]
        end = max_length if truncation else None
        return Encoding(
            [self.cls_token_id, *(self.ids[entry] for entry in entries)][:end],
            [CLS, *names][:end],
            [(0, 0), *spans][:end],
        )

    def find_entry(self, word: str, *, first: bool = False) -> str:
        """The word, its lower case or its class, whichever the model knows first; else UNK."""
        for entry in (word, word.lower()):
            if entry in self.ids:
                return entry
        entry = classify_word(word, first=first)
        return entry if entry in self.ids else UNK

    def ids_of(self, words: Iterable[str]) -> list[int]:
        """The ids of words that are cut already, without CLS."""
        return [
            self.ids[self.find_entry(word, first=not place)] for place, word in enumerate(words)
        ]

    def get_vocab(self) -> dict[str, int]:
        """The id of each word, as Hugging Face calls it."""
        return self.ids

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """The words of ids."""
        return [self.words[number] for number in ids]


# ---- files --------------------------------------------------------------------------------------


def save_verb_number(model: VerbNumber, vocabulary: Vocabulary, folder: Path) -> None:
    """Write vocabulary, configuration and weights, in float16, to a folder.

    Each file is first written under another name, so that none is ever incomplete.
    """
    from safetensors.torch import save as to_bytes

    weights = {
        name: weight.detach().to("cpu", torch.float16).contiguous()
        for name, weight in model.state_dict().items()
    }
    write_file(
        folder / "vocabulary.txt",
        lambda file: file.write("".join(f"{word}\n" for word in vocabulary.words).encode()),
    )
    write_file(
        folder / "config.json",
        lambda file: file.write(json.dumps(asdict(model.config), indent=1).encode()),
    )
    write_file(folder / "model.safetensors", lambda file: file.write(to_bytes(weights)))


def load_verb_number(folder: str | os.PathLike[str]) -> tuple[VerbNumber, Vocabulary]:
    """The model and its vocabulary from a folder that `save_verb_number` wrote."""
    from safetensors.torch import load_file

    place = Path(folder)
    try:
        options = json.loads((place / "config.json").read_text(encoding="utf-8"))
        options["id2label"] = {int(number): label for number, label in options["id2label"].items()}
        config = VerbNumberConfig(**options)
        words = (place / "vocabulary.txt").read_text(encoding="utf-8").split("\n")[:-1]
        weights = load_file(place / "model.safetensors")
        check_config_fits(config, words, weights)
        with torch.device("meta"):  # a wrong size in config.json takes no memory
            model = VerbNumber(config)
        whole = {name: weight.float() for name, weight in weights.items()}
        model.load_state_dict(whole, assign=True)
        return model.eval(), Vocabulary(words)
    except FileError:
        raise
    except Exception as error:  # whatever json, safetensors or torch raise for bad files
        line = describe_error(error)
        raise FileError(f"{place} is not a verb-number model: {line}") from error


def check_config_fits(
    config: VerbNumberConfig, words: Sequence[str], weights: Mapping[str, Tensor]
) -> None:
    """Refuse a configuration that differs from the files; torch compares the sizes of weights."""
    layers = sum(name.endswith("attention_norm.weight") for name in weights)
    if config.num_hidden_layers != layers:
        raise ValueError(
            f"num_hidden_layers must be {layers}, as in its weights; got {config.num_hidden_layers}"
        )
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"num_attention_heads must divide the width {config.hidden_size};"
            f" got {config.num_attention_heads}"
        )
    labels = config.id2label
    named = all(isinstance(label, str) for label in labels.values())
    if list(labels) != list(range(len(labels))) or not named:
        raise ValueError(f"id2label must name the classes from 0 on; got {labels}")
    if len(words) != config.vocab_size:
        raise ValueError(f"vocabulary.txt must have {config.vocab_size} words; it has {len(words)}")
