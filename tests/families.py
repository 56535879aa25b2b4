"""Tiny seeded models of the families that are tested, made from configurations without a download."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
import transformers as t
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Metaspace, Whitespace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

VOCABULARY = 60
PADDING = 1


def text(config: Any, **options: Any) -> Callable[[], Any]:
    """A small configuration of one of the usual shapes."""
    common = {
        "vocab_size": VOCABULARY,
        "pad_token_id": PADDING,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "max_position_embeddings": 40,
    }
    usual = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    return lambda: config(**{**common, **usual, **options})


GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
ENCODERS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "bert": (t.BertModel, text(t.BertConfig)),
    "roberta": (t.RobertaForSequenceClassification, text(t.RobertaConfig)),
    "distilbert": (
        t.DistilBertForSequenceClassification,
        text(t.DistilBertConfig, dim=32, n_layers=3, n_heads=4, hidden_dim=48),
    ),
    "albert": (t.AlbertModel, text(t.AlbertConfig, embedding_size=16)),
    "electra": (t.ElectraForTokenClassification, text(t.ElectraConfig, embedding_size=16)),
    "mpnet": (t.MPNetModel, text(t.MPNetConfig)),
    "deberta-v2": (
        t.DebertaV2Model,
        text(t.DebertaV2Config, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    ),
    "modernbert": (
        t.ModernBertForMaskedLM,
        text(
            t.ModernBertConfig,
            local_attention=6,
            global_attn_every_n_layers=3,
            cls_token_id=2,
            sep_token_id=3,
        ),
    ),
}
DECODERS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "gpt2": (t.GPT2LMHeadModel, text(t.GPT2Config, n_embd=32, n_layer=3, n_head=4, n_positions=40)),
    "gpt-neox": (t.GPTNeoXForCausalLM, text(t.GPTNeoXConfig)),
    "opt": (t.OPTForCausalLM, text(t.OPTConfig, ffn_dim=48, word_embed_proj_dim=32)),
    "bloom": (t.BloomForCausalLM, text(t.BloomConfig, n_layer=3, n_head=4)),
    "llama": (t.LlamaForCausalLM, text(t.LlamaConfig, **GROUPED)),
    "mistral": (t.MistralForCausalLM, text(t.MistralConfig, sliding_window=4, **GROUPED)),
    "qwen3": (t.Qwen3ForCausalLM, text(t.Qwen3Config, **GROUPED)),
    "gemma2": (
        t.Gemma2ForCausalLM,
        text(
            t.Gemma2Config,
            sliding_window=4,
            attn_logit_softcapping=2.0,
            query_pre_attn_scalar=8,
            **GROUPED,
        ),
    ),
    "gemma3": (
        t.Gemma3ForCausalLM,
        text(t.Gemma3TextConfig, sliding_window=4, query_pre_attn_scalar=8, **GROUPED),
    ),
    "phi3": (t.Phi3ForCausalLM, text(t.Phi3Config, num_key_value_heads=2)),
    "gpt-oss": (
        t.GptOssForCausalLM,
        text(
            t.GptOssConfig, sliding_window=4, num_local_experts=2, num_experts_per_tok=1, **GROUPED
        ),
    ),
}
PAIRS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "t5": (
        t.T5ForConditionalGeneration,
        text(
            t.T5Config,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=3,
            num_heads=4,
            decoder_start_token_id=PADDING,
        ),
    ),
    "bart": (
        t.BartForConditionalGeneration,
        text(
            t.BartConfig,
            d_model=32,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
        ),
    ),
    "marian": (
        t.MarianMTModel,
        text(
            t.MarianConfig,
            d_model=32,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            decoder_start_token_id=PADDING,
        ),
    ),
}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 24,
    "patch_size": 8,
}
VISION: dict[str, tuple[Any, Callable[[], Any]]] = {
    "vit": (t.ViTForImageClassification, lambda: t.ViTConfig(**IMAGE)),
    "deit": (t.DeiTModel, lambda: t.DeiTConfig(**IMAGE)),
    "clip": (t.CLIPVisionModel, lambda: t.CLIPVisionConfig(**IMAGE)),
    "dinov2": (
        t.Dinov2WithRegistersModel,
        lambda: t.Dinov2WithRegistersConfig(**IMAGE, num_register_tokens=4, mlp_ratio=2),
    ),
}
FAMILIES = {**ENCODERS, **DECODERS, **PAIRS, **VISION}
OUTSIDE = ("mpnet", "deberta-v2", "bloom")  # of transformers' attention interface


@cache
def build(family: str, implementation: str | None = None) -> Any:
    """The tiny model of a family, with the same weights every time. implementation: of attention."""
    kind, config = FAMILIES[family]
    configuration = config()
    torch.manual_seed(0)
    options = {} if implementation is None else {"attn_implementation": implementation}
    model = kind._from_config(configuration, **options)
    generator = torch.Generator().manual_seed(1)
    # larger than initial weights usually are, so that attention is far from uniform
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    if getattr(model.config, "decoder_start_token_id", 0) is None:
        model.config.decoder_start_token_id = 2
    return model.eval()


def perturb(family: str, implementation: str | None = None, *, seed: int = 0) -> Any:
    """The family's tiny model with norms, biases and factors that differ from initialisation."""
    model = deepcopy(build(family, implementation)).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def make_input(family: str, count: int = 7) -> Any:
    """An input of the family: an image, or token ids 5, 6, ..."""
    if family in VISION:
        return torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(1))
    return list(range(5, 5 + count))


def word_tokenizer() -> Any:
    """A tokenizer of a dozen words, which pads on the left."""
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *"the key to cabinets is are lost here".split()]
    base = Tokenizer(
        WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    base.pre_tokenizer = Whitespace()
    base.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    return t.PreTrainedTokenizerFast(tokenizer_object=base, padding_side="left", **names)


def space_tokenizer(texts: list[str]) -> Any:
    """A tokenizer that marks the space before a word, trained on these texts, for the vocabulary of these models."""
    base = Tokenizer(BPE())
    base.pre_tokenizer, base.decoder = Metaspace(), MetaspaceDecoder()
    base.train_from_iterator(texts, BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<end>"]))
    return t.PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<end>")


def count_hooks(model: torch.nn.Module) -> int:
    """The forward hooks of all modules."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
