"""What families of models differ in: one table, and the names by which Hugging Face says it.

Everything that attnflow decides by a class's, a module's, a parameter's or an option's name, by a
setting of the configuration or by its model_type stands here, and nowhere else. What can be asked
of a model by running it (is it causal? does anything beside attention mix positions?) is not
guessed from names: see probing.py.
"""

from dataclasses import dataclass
from typing import Any

from attnflow.errors import CaptureError

# ---- by model_type ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """What the models of one model_type do unlike most; each default is what most do."""

    # rows of the table of positions before the first token's: max_position_embeddings counts them
    # too, so that fewer tokens fit. None: as many as the padding's id plus one
    unused_positions: int | None = 0
    # images may have another size than the configuration's image_size
    any_image_size: bool = False


ORDINARY = Family()
# fairseq's way, which RoBERTa brought along: the padding has its own row, and positions count from
# there on
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
    # the same, but its code says 1 for the padding's id, whatever the configuration says
    "mpnet": Family(unused_positions=2),
    # these stretch their table of positions to the image that comes, without being asked to
    "dinov2": Family(any_image_size=True),
    "dinov2_with_registers": Family(any_image_size=True),
    "dinov3_vit": Family(any_image_size=True),  # has no such table: positions are rotations
}


def find_family(config: Any) -> Family:
    """The entry of a configuration's model_type; an ordinary one if it has none."""
    return FAMILIES.get(getattr(config, "model_type", ""), ORDINARY)


def count_unused_positions(config: Any) -> int:
    """The rows of a model's table of positions that no token uses."""
    unused = find_family(config).unused_positions
    return int(config.pad_token_id or 0) + 1 if unused is None else unused


# ---- by the class's name ------------------------------------------------------------------------

# what a model is for: no configuration says it, but the head does, and classes are named after it
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


def infer_task(model: Any, config: Any) -> str:
    """What a model is for, by how its class is named."""
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
    "encoder_attention",  # modules of users' own
)
DECODER = "decoder"  # all of transformers' encoder-decoders call it so
# what stands before the patches of an image, by the parameter that it is learned as
IMAGE_MARKS = {
    "cls_token": "[CLS]",  # ViT, DeiT, DINO, BEiT
    "class_embedding": "[CLS]",  # CLIP
    "distillation_token": "[DISTILL]",  # DeiT: a second CLS, taught by another model
}
# parts above the last layer: nothing that attention does passes through them, so that a model which
# predicts nothing may lack their weights
ABOVE_LAYERS = ("pooler",)


def name_part(module: str) -> str:
    """The part of an encoder-decoder that an attention module is: encoder, decoder or cross."""
    if any(word in module for word in CROSS_ATTENTION):
        return "cross"
    return "decoder" if DECODER in module else "encoder"


def list_image_marks(model: Any, config: Any) -> list[str]:
    """The names of the positions that stand before the patches of an image."""
    names = [name for name, _ in model.named_parameters()]
    marks = [
        mark for ending, mark in IMAGE_MARKS.items() if any(name.endswith(ending) for name in names)
    ]
    registers = getattr(config, "num_register_tokens", 0) or 0  # DINOv2 with registers, DINOv3
    return [*dict.fromkeys(marks), *(f"[REG{number}]" for number in range(registers))]


# ---- by settings of the configuration -----------------------------------------------------------

# settings under which a model attends in a way that no graph of tokens can show
REFUSED_SETTINGS = {
    # BigBird and BigBird-Pegasus: random blocks, drawn anew in every pass
    ("attention_type", "block_sparse"): "attends by random blocks, whose weights are not those of a"
    " graph; set attention_type='original_full'",
}
# a causal LM that this setting lets read ahead: Gemma as an encoder, or over its image tokens. In
# every other causal LM what follows must be hidden, and a mask that went missing is an error
READS_AHEAD = "use_bidirectional_attention"


def check_attention(config: Any, name: str) -> None:
    """Refuse a model that its configuration makes attend as no graph can show, by its name."""
    for (setting, value), reason in REFUSED_SETTINGS.items():
        if getattr(config, setting, None) == value:
            raise CaptureError(f"{name} {reason}")


# ---- by options of the attention interface ------------------------------------------------------

# what families hand to transformers' attention functions beside queries, keys, values and mask; the
# weights depend on each of them, and an option that is missing is the ordinary case
SCALING = "scaling"  # of the scores; one by the square root of a head's width if missing
SOFTCAP = "softcap"  # Gemma 2: scores stay between minus and plus this number, by tanh
SCORE_BIAS = "position_bias"  # T5 and MPT: [sequence or 1, head, query, key], added to the scores
# gpt-oss, DeepSeek V4, MiMo: one more score per head, of a key that is no token and has no value
NO_TOKEN_SCORE = "s_aux"
CAUSAL = "is_causal"  # a module's own is_causal if missing, and where it has none, it is causal
WINDOW = "sliding_window"  # a query sees keys less than so many positions away; already in the mask
