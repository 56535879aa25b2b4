"""What differs between families of models, and the names that Hugging Face uses for it.

Every decision by the name of a class, module, parameter or option, by a setting of the
configuration or by its model_type stands here. What a run of the model can show (is it causal?
does anything beside attention mix positions?) is not inferred from names: see probe.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnflow.errors import CaptureError

if TYPE_CHECKING:
    import torch

# ---- by model_type ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How the models of one model_type differ from most; defaults are those of most models."""

    # rows of the table of positions before the first token's: max_position_embeddings counts them
    # too, so that fewer tokens fit. None: as many as the padding's id plus one
    unused_positions: int | None = 0
    # images may have another size than the configuration's image_size
    any_image_size: bool = False


ORDINARY = Family()
# as in fairseq and RoBERTa: the padding has a row of its own, and positions count from there on
AFTER_PADDING = Family(unused_positions=None)
FAMILIES: dict[str, Family] = {
    "camembert": AFTER_PADDING,
    "data2vec-text": AFTER_PADDING,
    "esm": AFTER_PADDING,
    "ibert": AFTER_PADDING,
    "lilt": AFTER_PADDING,
    "longformer": AFTER_PADDING,
    "luke": AFTER_PADDING,
    "markuplm": AFTER_PADDING,
    "roberta": AFTER_PADDING,
    "roberta-prelayernorm": AFTER_PADDING,
    "xlm-roberta": AFTER_PADDING,
    "xlm-roberta-xl": AFTER_PADDING,
    "xmod": AFTER_PADDING,
    # the same, but its code has 1 for the padding's id, whatever the configuration has
    "mpnet": Family(unused_positions=2),
    # these interpolate their table of positions to the size of the image
    "dinov2": Family(any_image_size=True),
    "dinov2_with_registers": Family(any_image_size=True),
    "dinov3_vit": Family(any_image_size=True),  # has no such table: positions are rotations
}


def find_family(config: object) -> Family:
    """The entry of a configuration's model_type; an ordinary one if it has none."""
    return FAMILIES.get(getattr(config, "model_type", ""), ORDINARY)


def count_unused_positions(config: object) -> int:
    """The rows of a model's table of positions that no token uses."""
    unused = find_family(config).unused_positions
    return int(getattr(config, "pad_token_id", 0) or 0) + 1 if unused is None else unused


# ---- by the class's name ------------------------------------------------------------------------

# the task of a model: configurations do not name it, but classes are named after their heads
TASKS = {
    "ForSequenceClassification": "sequence classification",
    "VerbNumber": "sequence classification",  # the model that ships with attnflow
    "ForTokenClassification": "token classification",
    "ForImageClassification": "image classification",
    "ForMaskedLM": "masked LM",
    "ForConditionalGeneration": "sequence to sequence",
    "MTModel": "sequence to sequence",  # MarianMTModel and FSMT's, older than the naming
    "ForCausalLM": "causal LM",
    "LMHeadModel": "causal LM",  # GPT-2's and OpenAI GPT's, older than the naming
}
HEADLESS = ("encoder", "encoder-decoder")  # tasks of models that predict nothing
LANGUAGE = ("masked LM", "causal LM", "sequence to sequence")  # tasks whose classes are tokens


def infer_task(model: object, config: object) -> str:
    """The task of a model, by the name of its class."""
    name = type(model).__name__
    for ending, task in TASKS.items():
        if name.endswith(ending):
            return task
    pair = getattr(config, "is_encoder_decoder", False)
    return "encoder-decoder" if pair else "encoder"


# ---- by names of modules and parameters ---------------------------------------------------------

# the two attentions of a decoder layer call the same interface with tensors of the same shape, so
# that only the module's name tells which sequence the keys are of
CROSS_ATTENTION = (
    "encoder_attn",  # BART, Marian, Pegasus, M2M100, Whisper
    "EncDecAttention",  # T5, mT5, UMT5, Switch
    "crossattention",  # BERT, RoBERTa and GPT-2 as decoders
    "cross_att",  # T5Gemma's and ProphetNet's cross_attn
    "encoder_attention",  # custom modules
)
DECODER = "decoder"  # in all encoder-decoders of transformers
# the positions before the patches of an image, by the name of their learned parameter
IMAGE_MARKS = {
    "cls_token": "[CLS]",  # ViT, DeiT, DINO, BEiT
    "class_embedding": "[CLS]",  # CLIP
    "distillation_token": "[DISTILL]",  # DeiT: a second CLS, taught by another model
}
# parts above the last layer: attention does not pass through them, so a model without a head may
# lack their weights
ABOVE_LAYERS = ("pooler",)


def name_part(module: str) -> str:
    """The part of an encoder-decoder that an attention module is: encoder, decoder or cross."""
    if any(word in module for word in CROSS_ATTENTION):
        return "cross"
    return "decoder" if DECODER in module else "encoder"


def list_image_marks(model: "torch.nn.Module", config: object) -> list[str]:
    """The names of the positions that stand before the patches of an image."""
    names = [name for name, _ in model.named_parameters()]
    marks = [
        mark for ending, mark in IMAGE_MARKS.items() if any(name.endswith(ending) for name in names)
    ]
    registers = getattr(config, "num_register_tokens", 0) or 0  # DINOv2 with registers, DINOv3
    return [*dict.fromkeys(marks), *(f"[REG{number}]" for number in range(registers))]


# ---- by settings of the configuration -----------------------------------------------------------

# settings under which attention is not a graph of tokens
REFUSED_SETTINGS = {
    # BigBird and BigBird-Pegasus: random blocks, drawn anew in every pass
    ("attention_type", "block_sparse"): "attends by random blocks, whose weights are not those of a"
    " graph; set attention_type='original_full'",
}
# a causal LM that this setting lets read ahead: Gemma as an encoder, or over its image tokens. In
# every other causal LM what follows must be hidden, and a mask that went missing is an error
READS_AHEAD = "use_bidirectional_attention"


def check_attention(config: object, name: str) -> None:
    """Refuse a model whose attention is not a graph of tokens. name: the model's."""
    for (setting, value), reason in REFUSED_SETTINGS.items():
        if getattr(config, setting, None) == value:
            raise CaptureError(f"{name} {reason}")


# ---- by options of the attention interface ------------------------------------------------------

# what families pass to transformers' attention functions beside queries, keys, values and mask; the
# weights depend on each option, and most families leave it out
SCALING = "scaling"  # of the scores; one by the square root of a head's width if missing
SOFTCAP = "softcap"  # Gemma 2: scores stay between minus and plus this number, by tanh
SCORE_BIAS = "position_bias"  # T5 and MPT: [sequence or 1, head, query, key], added to the scores
# gpt-oss, DeepSeek V4, MiMo: one more score per head, of a key that is not a token and has no value
NO_TOKEN_SCORE = "s_aux"
CAUSAL = "is_causal"  # a module's own is_causal if missing, and where it has none, it is causal
WINDOW = "sliding_window"  # a query sees keys less than this many positions away, by the mask
