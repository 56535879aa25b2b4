"""What a model is made of, what enters it and what it predicts: asked of it, not guessed."""

import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from hypothesis import given
from hypothesis import strategies as st

import attnflow as af
from attnflow.models.encoded import Encoded, batches
from attnflow.models.execution import evaluating
from attnflow.models.families import FAMILIES
from tests.families import GROUPED, IMAGE, build, text, word_tokenizer

IDS = [7, 23, 41, 9, 55]


def make(kind: Any, config: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return kind(config()).eval()


def assert_predicts(found: tuple[str, float] | None, label: str, probability: float) -> None:
    assert found is not None
    assert found[0] == label
    assert found[1] == pytest.approx(probability, abs=1e-6)


# ---- mixers -------------------------------------------------------------------------------------

SSM = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
DELTA = {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHER_MIXERS = {
    "a state space beside attention": (
        t.FalconH1ForCausalLM,
        text(t.FalconH1Config, num_key_value_heads=2, mamba_n_groups=1, mamba_chunk_size=4, **SSM),
        r"layers\.0\.mamba \(FalconH1Mixer\)",
    ),
    "a convolution in some layers": (
        t.Lfm2ForCausalLM,
        text(t.Lfm2Config, num_key_value_heads=2, full_attn_idxs=[1]),
        r"layers\.0\.conv \(Lfm2ShortConv\)",
    ),
    "linear attention": (
        t.Qwen3NextForCausalLM,
        text(
            t.Qwen3NextConfig,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            shared_expert_intermediate_size=16,
            **GROUPED,
            **DELTA,
            **EXPERTS,
        ),
        r"linear_attn \(Qwen3NextGatedDeltaNet\)",
    ),
    "a recurrence": (
        t.RwkvForCausalLM,
        lambda: t.RwkvConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2),
        r"blocks\.0\.attention",
    ),
    "a Fourier transform": (
        t.FNetModel,
        lambda: t.FNetConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2),
        r"fourier",
    ),
    "a convolution over the values of the model's own attention": (
        t.NystromformerModel,
        text(t.NystromformerConfig, num_landmarks=5, segment_means_seq_len=5, conv_kernel_size=3),
        r"attention\.self\.conv \(Conv2d\)",
    ),
    "a convolution beside the model's own attention": (
        t.DebertaV2Model,
        text(t.DebertaV2Config, conv_kernel_size=3),
        r"encoder\.conv\.conv \(Conv1d\)",
    ),
}


@pytest.mark.parametrize("mixer", OTHER_MIXERS)
def test_a_model_that_mixes_positions_otherwise_is_refused_by_the_mixers_name(mixer: str) -> None:
    kind, config, message = OTHER_MIXERS[mixer]
    with pytest.raises(af.CaptureError, match=f"by more than attention .*: .*{message}"):
        af.capture(make(kind, config), IDS)


def test_generation_refuses_other_mixers_too() -> None:
    kind, config, message = OTHER_MIXERS["a state space beside attention"]
    with pytest.raises(af.CaptureError, match=message):
        af.generate(make(kind, config), IDS, max_new_tokens=2)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (t.AfmoeForCausalLM, text(t.AfmoeConfig, num_dense_layers=3, sliding_window=4, **GROUPED)),
        (t.LlamaForCausalLM, text(t.LlamaConfig, eos_token_id=[3, 4], **GROUPED)),
        (t.SplinterModel, text(t.SplinterConfig)),
        (t.XLNetModel, lambda: t.XLNetConfig(vocab_size=60, d_model=32, n_layer=2, n_head=4)),
        (t.DINOv3ViTModel, lambda: t.DINOv3ViTConfig(**IMAGE)),
        (t.BeitModel, lambda: t.BeitConfig(**IMAGE)),
    ],
)
def test_models_of_unusual_ways_are_captured_as_they_attend(
    kind: Any, config: Callable[[], Any]
) -> None:
    """Masks by keyword, several end tokens, no mask and no word of causality, a backbone inside."""
    module = make(kind, config)
    vision = kind in (t.DINOv3ViTModel, t.BeitModel)
    pixels = torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(3))
    value: Any = pixels if vision else IDS
    captured = af.capture(module, value, heads=None)
    if hasattr(module, "set_attn_implementation"):
        module.set_attn_implementation("eager")
    given = {"pixel_values": pixels[None]} if vision else {"input_ids": torch.tensor([IDS])}
    with torch.no_grad():
        layers = module(**given, output_attentions=True).attentions
    own = np.stack([layer[0].numpy() for layer in layers])
    assert np.abs(captured.weights - own).max() < 1e-5


def test_weights_that_are_not_those_a_model_attends_by_are_refused() -> None:
    """Under SDPA, Falcon gives weights without its causal mask when it is asked for them."""
    config = text(t.FalconConfig, new_decoder_architecture=False, multi_query=True)
    module = make(t.FalconForSequenceClassification, config)
    with pytest.raises(af.CaptureError, match="gives other weights than it attends by; load it"):
        af.explain(IDS, model=module)
    module.set_attn_implementation("eager")
    assert af.capture(make_eager(module), IDS).causal


def make_eager(module: Any) -> Any:
    """The same weights in a model that attends by its own eager attention."""
    copy = type(module)._from_config(module.config, attn_implementation="eager").eval()
    copy.load_state_dict(module.state_dict())
    return copy


def test_a_probe_leaves_block_sparse_attention_alone() -> None:
    module = make(t.BigBirdModel, text(t.BigBirdConfig, attention_type="block_sparse"))
    with pytest.raises(af.CaptureError, match="set attention_type='original_full'"):
        af.capture(module, IDS)
    assert module.config.attention_type == "block_sparse"


@pytest.mark.parametrize(
    ("module", "value"),
    [
        (lambda: t.ResNetModel(t.ResNetConfig(depths=[1], hidden_sizes=[8])), torch.zeros(3, 8, 8)),
        (lambda: t.CanineModel(t.CanineConfig(hidden_size=8, num_attention_heads=2)), IDS),
    ],
)
def test_models_that_cannot_be_captured_are_one_line(module: Callable[[], Any], value: Any) -> None:
    with pytest.raises(af.CaptureError) as error:
        af.capture(module(), value)
    assert "\n" not in str(error.value)


def test_a_position_from_the_end_is_never_moved_by_padding() -> None:
    class Last(Own):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(input_ids, attention_mask).last_hidden_state[:, -1])

    torch.manual_seed(0)
    model = af.Model(Last().eval(), task="sequence classification", position=-1)
    alone = model.predict([IDS[:3]])[0]
    assert_predicts(model.predict([IDS, IDS[:3]])[1], *alone)


# ---- causality and positions --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "config", "last"),
    [
        (
            t.MixtralForTokenClassification,
            text(t.MixtralConfig, num_local_experts=2, **GROUPED),
            True,
        ),
        (t.Qwen3ForTokenClassification, text(t.Qwen3Config, **GROUPED), True),
        (t.StableLmForTokenClassification, text(t.StableLmConfig, num_key_value_heads=2), True),
        (t.LlamaForSequenceClassification, text(t.LlamaConfig, **GROUPED), True),
        (t.BertForTokenClassification, text(t.BertConfig), False),
        (t.RobertaForSequenceClassification, text(t.RobertaConfig), False),
    ],
)
def test_causality_is_seen_and_everything_uses_one_position(
    kind: Any, config: Callable[[], Any], last: bool
) -> None:
    """A decoder predicts, is explained and is blanked out where its input ends."""
    module = make(kind, config)
    model = af.Model(module)
    expected = len(IDS) - 1 if last else 0
    found = af.explain(IDS, model=model)
    assert (model.is_causal, found.position) == (last, expected)
    with torch.no_grad():
        logits = module(torch.tensor([IDS])).logits[0]
    row = logits[expected] if logits.ndim == 2 else logits
    best = int(row.argmax())
    assert_predicts(found.prediction, model.label(best), float(row.softmax(-1)[best]))
    for importance in found.importance.values():
        assert_predicts(found.prediction, importance.target, importance.probability)


def test_a_given_position_is_where_prediction_and_importance_are_read() -> None:
    model = af.Model(build("llama"))
    for position in (1, 3, -2):
        found = af.explain(IDS, model=model, position=position)
        place = position % len(IDS)
        assert found.position == place
        label, probability = model.predict(IDS[: place + 1])[0]
        assert_predicts(found.prediction, label, probability)
        assert found.importance["blank_out"].probability == pytest.approx(probability)
        later = found.importance["blank_out"].values[place + 1 :]
        assert np.abs(later).max(initial=0.0) < 1e-6  # what comes later is not seen


PREDICTORS: dict[str, tuple[list[Any], list[int]]] = {  # inputs of several lengths, and positions
    "electra": ([IDS, IDS[:3], IDS[1:]], [0, 1, 2, -1, -3]),
    "llama": ([IDS, IDS[:3], IDS[1:]], [0, 1, 2, -1, -3]),
    "modernbert": ([IDS, IDS[:3], IDS[1:]], [0, 1, 2, -1, -3]),
    "t5": ([(IDS, IDS[:3]), (IDS, IDS[2:]), (IDS, IDS)], [5, 6, 8, -1, -2]),
}


@pytest.mark.parametrize("family", PREDICTORS)
def test_a_prediction_is_read_at_the_position_that_is_given(family: str) -> None:
    """Alone, in a batch and in `explain`: the model's own scores at that position."""
    model = af.Model(build(family))
    inputs, positions = PREDICTORS[family]
    encoded = [model.encode(value) for value in inputs]
    for position in positions:
        together = model.predict(inputs, position=position)
        for value, one, predicted in zip(inputs, encoded, together, strict=True):
            place = model.locate(one, position)
            expected = score_at(model, one, place)
            best = int(expected.argmax())
            for found in (predicted, *model.predict([value], position=position)):
                assert_predicts(found, model.label(best), float(expected[best]))
            explained = af.explain(value, model=model, position=position, importance=())
            assert_predicts(explained.prediction, model.label(best), float(expected[best]))
            assert explained.position == place


def score_at(model: af.Model, encoded: Any, place: int) -> Any:
    """The probabilities [class] of the model's own output at a place of the graph."""
    with torch.no_grad():
        logits = model.model(**model.batch([encoded])).logits[0]
    at = place - len(encoded.ids) if model.is_encoder_decoder else place
    probabilities = logits.double().softmax(dim=-1)
    others = [row for row in range(len(logits)) if row != at]
    assert (probabilities[others] - probabilities[at]).abs().amax(dim=-1).min() > 1e-5
    return probabilities[at]


@pytest.mark.parametrize("family", ["electra", "roberta", "llama", "bart", "vit"])
def test_positions_count_from_the_end_or_are_one_line(family: str) -> None:
    model = af.Model(build(family))
    value: Any = torch.zeros(3, 24, 24) if family == "vit" else IDS
    encoded = model.encode(value)
    size = len(encoded.tokens) + len(encoded.decoder_tokens)
    for position in range(-size, 0):
        assert model.locate(encoded, position) == size + position
        assert model.predict(value, position=position) == model.predict(
            value, position=size + position
        )
    for position in (size, -size - 1):
        for ask in (model.locate, model.logit_position):
            with pytest.raises(af.OptionError, match=f"from 0 to {size - 1}; got {position}"):
                ask(encoded, position)
        with pytest.raises(af.OptionError, match=f"from 0 to {size - 1}; got {position}") as error:
            model.predict(value, position=position)
        assert "\n" not in str(error.value)


def test_a_bart_classifier_reads_the_last_of_several_end_tokens() -> None:
    parts = {f"{part}_{what}": 4 for part in ("encoder", "decoder") for what in PARTS}
    options = {"d_model": 32, "decoder_start_token_id": 3, "num_hidden_layers": 2, **parts}
    module = make(t.BartForSequenceClassification, text(t.BartConfig, **options))
    model = af.Model(module)
    ids = [2, 5, 3, 7, 3]
    encoded = model.encode(ids)
    assert model.focal(encoded) == len(ids) + 4
    with torch.no_grad():
        states = module.model(torch.tensor([ids])).last_hidden_state[0]
        scores = module.classification_head(states)  # [decoder position, class]
        own = module(torch.tensor([ids])).logits[0]
    assert torch.allclose(scores[model.focal(encoded) - len(ids)], own, atol=1e-6)
    assert not torch.allclose(scores[2], own, atol=1e-6)
    assert model.focal(model.encode([2, 5, 3, 7, 8])) == len(ids) + 2
    assert model.focal(model.encode([2, 5, 6, 7, 8])) == len(ids) + 4  # it has none


PARTS = ("layers", "attention_heads", "ffn_dim")


# ---- batches ------------------------------------------------------------------------------------


def sized(*lengths: int) -> list[Encoded]:
    return [Encoded((7,) * length, ("x",) * length) for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([5, 5, 5, 5], 10, [[0, 1], [2, 3]]),  # exactly as many tokens as are allowed
        ([5, 5, 5, 5], 9, [[0], [1], [2], [3]]),  # one less
        ([5, 5, 5, 5], 14, [[0, 1], [2, 3]]),
        ([5, 5, 5, 5], 15, [[0, 1, 2], [3]]),
        ([3, 1, 2], 9, [[1, 2, 0]]),  # the longest counts for all: three times three
        ([3, 1, 2], 8, [[1, 2], [0]]),
        ([6, 1], 4, [[1], [0]]),  # an input that is too long alone still runs
        ([2, 2], 1, [[0], [1]]),
        ([], 4, []),
    ],
)
def test_a_batch_holds_as_many_tokens_as_it_may(
    lengths: list[int], budget: int, expected: list[list[int]]
) -> None:
    assert list(batches(sized(*lengths), budget)) == expected


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 60))
def test_batches_hold_every_input_once_and_none_could_be_larger(
    lengths: list[int], budget: int
) -> None:
    cut = list(batches(sized(*lengths), budget))
    assert sorted(place for batch in cut for place in batch) == list(range(len(lengths)))
    for number, batch in enumerate(cut):
        padded = len(batch) * max(lengths[place] for place in batch)
        assert padded <= budget or len(batch) == 1
        if number + 1 < len(cut):
            assert (len(batch) + 1) * lengths[cut[number + 1][0]] > budget


# ---- models of other shapes ---------------------------------------------------------------------


class Own(torch.nn.Module):
    """BERT with a custom head, which reads the second token."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = build("bert")
        self.head = torch.nn.Linear(32, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(states[:, 1])


def test_a_custom_module_is_captured() -> None:
    torch.manual_seed(0)
    module = Own().eval()
    inner = af.capture(build("bert"), IDS)
    assert np.abs(af.capture(module, IDS).weights - inner.weights).max() < 1e-6
    model = af.Model(module, task="sequence classification", position=1)
    found = af.explain(IDS, model=model, target=2)
    assert found.position == 1
    with torch.no_grad():
        expected = module(torch.tensor([IDS]), torch.ones(1, len(IDS)))[0].softmax(-1)
    assert_predicts(found.prediction, str(int(expected.argmax())), float(expected.max()))
    assert found.importance["blank_out"].probability == pytest.approx(float(expected[2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "poetry"}, "unknown task 'poetry'; choose from sequence classification"),
        ({"position": 1.5}, "position must be whole numbers; got 1.5"),
    ],
)
def test_what_a_user_says_of_a_model_is_checked(options: Any, message: str) -> None:
    with pytest.raises(af.OptionError, match=message):
        af.Model(build("bert"), **options)


def test_a_model_says_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the path."""
    assert af.Model(build("bert")).origin is None
    assert af.Model(build("bert"), origin="mine").origin == "mine"
    assert af.load().origin == "verb-number"
    build("bert").save_pretrained(tmp_path / "runs" / "best")
    assert af.load(tmp_path / "runs" / "best").origin == "best"
    monkeypatch.chdir(tmp_path / "runs" / "best")
    assert af.load(".").origin == "best"
    monkeypatch.chdir(tmp_path)
    assert af.load("runs/best/").origin == "best"


def test_compiled_models_are_unwrapped() -> None:
    module = build("roberta")
    compiled = af.Model(torch.compile(module))
    assert compiled.task == "sequence classification"
    assert compiled.predict(IDS) == af.Model(module).predict(IDS)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "each block"])
@pytest.mark.parametrize("edges", ["attention", "norm", "value_zeroing", "relevance"])
def test_models_that_are_compiled_in_place_run_eagerly(edges: str, whole: bool) -> None:
    plain = build("llama")
    module = deepcopy(plain)
    parts = [module] if whole else list(module.model.layers)
    for part in parts:
        part.compile(backend="eager")
    calls = [part._compiled_call_impl for part in parts]
    found = af.attention_graph(module, IDS, edges=edges)
    np.testing.assert_array_equal(found.edges, af.attention_graph(plain, IDS, edges=edges).edges)
    assert [part._compiled_call_impl for part in parts] == calls
    if edges == "attention":
        options: dict[str, Any] = {"max_new_tokens": 2, "eos_token_id": None}
        stories = [af.generate(each, IDS, **options).by("rollout") for each in (module, plain)]
        np.testing.assert_array_equal(stories[0].values, stories[1].values)


@pytest.mark.parametrize("family", ["bert", "llama", "bloom", "gpt-oss"])
def test_capture_works_under_autocast(family: str) -> None:
    plain = af.capture(build(family), IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = af.capture(build(family), IDS)
    assert np.abs(plain.weights - rounded.weights).max() < 0.2
    assert np.abs(rounded.graph().edges.sum(axis=-1) - 1).max() < 1e-9


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        module = t.BertModel(t.BertConfig(hidden_size=8, num_attention_heads=2))
    with pytest.raises(af.OptionError, match="BertModel is on the meta device"):
        af.Model(module)


def test_layers_with_different_numbers_of_heads_are_never_guessed() -> None:
    """The second layer has half the heads of the first."""
    module = make(t.BertModel, text(t.BertConfig))
    attention = module.encoder.layer[1].attention.self
    attention.num_attention_heads, attention.attention_head_size = 2, 16
    attention.scaling = 16**-0.5
    for _ in range(3):
        with pytest.raises(af.CaptureError, match=r"differ in their number of heads \(4, 2\)"):
            af.capture(module, IDS, heads=None)
        assert af.capture(module, IDS).weights.shape == (3, 1, 5, 5)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.predict(IDS),
        lambda model: af.explain(IDS, model=model),
        lambda model: af.blank_out(model, IDS),
        lambda model: af.input_gradient(model, IDS),
        lambda model: af.evaluate(model, [IDS], methods=["raw"]),
    ],
)
def test_scores_that_are_not_finite_are_an_error(ask: Callable[[af.Model], Any]) -> None:
    module = make(t.RobertaForSequenceClassification, text(t.RobertaConfig))
    module.classifier.out_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(af.CaptureError, match=r"scores of RobertaFor.* must be finite; got nan"):
        ask(af.Model(module))


def test_generation_refuses_scores_that_are_not_finite() -> None:
    module = make(t.GPT2LMHeadModel, text(t.GPT2Config, n_embd=32, n_layer=2, n_head=4))
    module.transformer.ln_f.weight.data[0] = float("nan")
    with pytest.raises(af.CaptureError):
        af.generate(module, IDS, max_new_tokens=3)


def test_what_a_model_raises_is_one_line_that_names_it() -> None:
    module = make(t.BertModel, text(t.BertConfig))
    module.encoder.layer[0].attention.self.query = torch.nn.Linear(32, 7)
    with pytest.raises(af.CaptureError, match="BertModel failed on this input: ") as error:
        af.capture(module, IDS)
    assert "\n" not in str(error.value)


# ---- threads ------------------------------------------------------------------------------------


def run_together(work: Callable[[int], None], threads: int = 4) -> None:
    """Call work in several threads at once, and raise what any of them raised."""
    problems: list[BaseException] = []

    def call(number: int) -> None:
        try:
            work(number)
        except BaseException as problem:
            problems.append(problem)

    crew = [threading.Thread(target=call, args=(number,)) for number in range(threads)]
    for each in crew:
        each.start()
    for each in crew:
        each.join()
    if problems:
        raise problems[0]


@pytest.fixture
def noisy() -> Any:
    """A model in train mode, whose dropout changes every number."""
    module = make(
        t.BertForSequenceClassification,
        text(t.BertConfig, hidden_dropout_prob=0.9, attention_probs_dropout_prob=0.9),
    )
    module.train()
    module.bert.encoder.layer[1].eval()
    return module


def test_captures_in_threads_do_not_switch_dropout_on_under_each_other(noisy: Any) -> None:
    before = [part.training for part in noisy.modules()]
    inputs = [IDS, IDS[:3], IDS[::-1], IDS[1:]]
    alone = [af.capture(noisy, ids).weights for ids in inputs]
    gradients = [af.input_gradient(noisy, ids).values for ids in inputs]

    def work(number: int) -> None:
        for _ in range(30):
            assert (af.capture(noisy, inputs[number]).weights == alone[number]).all()
            found = af.input_gradient(noisy, inputs[number]).values
            assert np.abs(found - gradients[number]).max() < 1e-6

    run_together(work)
    assert [part.training for part in noisy.modules()] == before


def test_first_captures_in_threads_probe_a_model_once() -> None:
    for _ in range(5):
        module = make(t.BertModel, text(t.BertConfig))
        found: list[Any] = []
        run_together(lambda _, m=module, f=found: f.append(af.capture(m, IDS).weights))  # type: ignore[misc]
        assert all((each == found[0]).all() for each in found)


def test_eval_blocks_may_overlap_in_any_order(noisy: Any) -> None:
    before = [part.training for part in noisy.modules()]
    first, second, part = evaluating(noisy), evaluating(noisy), evaluating(noisy.bert)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    part.__enter__()
    assert not any(each.training for each in noisy.modules())
    second.__exit__(None, None, None)
    assert not any(each.training for each in noisy.bert.modules())
    part.__exit__(None, None, None)
    assert [each.training for each in noisy.modules()] == before


# ---- what families differ in --------------------------------------------------------------------

NEEDED: dict[str, dict[str, Any]] = {
    "esm": {"position_embedding_type": "absolute", "mask_token_id": 4},
    "lilt": {"hidden_size": 48, "max_2d_position_embeddings": 64},
    "longformer": {"attention_window": 4},
    "xmod": {"languages": ["en"], "default_language": "en"},
}
UNUSED = [kind for kind, family in FAMILIES.items() if family.unused_positions != 0]


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("kind", [*UNUSED, "bert", "opt"])
def test_a_model_takes_as_many_tokens_as_it_has_positions(kind: str, padding: int) -> None:
    options = {"pad_token_id": padding, "num_hidden_layers": 1, **NEEDED.get(kind, {})}
    module = make(t.AutoModel.from_config, text(t.CONFIG_MAPPING[kind], **options))
    most = af.Model(module).max_length
    assert most is not None
    with torch.no_grad():
        module(input_ids=torch.full((1, most), 7))
        with pytest.raises((IndexError, RuntimeError)):
            module(input_ids=torch.full((1, most + 1), 7))


@pytest.mark.parametrize("kind", ["dinov2", "dinov2_with_registers", "dinov3_vit"])
def test_images_of_another_size_enter_where_the_family_takes_them(kind: str) -> None:
    module = make(t.AutoModel.from_config, lambda: t.CONFIG_MAPPING[kind](**IMAGE))
    attention = af.capture(module, torch.randn(3, 32, 40))
    assert attention.grid == (4, 5)
    assert attention.tokens is not None
    assert attention.size == len(attention.tokens)


# ---- what enters --------------------------------------------------------------------------------


def test_padding_by_the_tokenizer_itself_never_enters() -> None:
    class Padding(type(word_tokenizer())):  # type: ignore[misc]
        def __call__(self, *texts: Any, **options: Any) -> Any:
            return super().__call__(
                *texts, **{**options, "padding": "max_length", "max_length": 12}
            )

    tokenizer = word_tokenizer()
    tokenizer.__class__ = Padding
    plain = af.Model(build("bert"), word_tokenizer()).encode("the key is lost")
    assert af.Model(build("bert"), tokenizer).encode("the key is lost") == plain
    assert len(plain.tokens) == 6


def test_words_are_those_of_the_text_not_of_the_tokenizer() -> None:
    model = af.Model(build("bert"), word_tokenizer())
    encoded = model.encode("the key's  lost, here")
    assert encoded.tokens == (
        "[CLS]",
        "the",
        "key",
        "[UNK]",
        "[UNK]",
        "lost",
        "[UNK]",
        "here",
        "[SEP]",
    )
    assert encoded.words == (None, 0, 1, 1, 1, 2, 2, 3, None)
    bundled = af.load().encode("the dog doesn't bark")
    assert bundled.tokens[-3:] == ("does", "n't", "bark") or len(bundled.tokens) == 6
    assert bundled.words == (None, 0, 1, 2, 2, 3)


def test_a_pair_of_texts_is_two_segments() -> None:
    module = make(t.BertForSequenceClassification, text(t.BertConfig, type_vocab_size=2))
    model = af.Model(module, word_tokenizer())
    pair = ("the key", "is lost here")
    encoded = model.encode(pair)
    tokenized = word_tokenizer()(*pair)
    assert list(encoded.ids) == tokenized["input_ids"]
    assert list(encoded.token_types) == [0, 0, 0, 0, 1, 1, 1, 1]
    found = af.explain(pair, model=model)
    with torch.no_grad():
        given = {"return_tensors": "pt", "return_token_type_ids": True}
        logits = module(**word_tokenizer()(*pair, **given)).logits[0]
    best = int(logits.argmax())
    assert_predicts(found.prediction, f"LABEL_{best}", float(logits.softmax(-1)[best]))
    assert_predicts(model.predict([pair, "the key"])[0], f"LABEL_{best}", found.prediction[1])  # type: ignore[index]
    report = af.evaluate(model, [(pair, "LABEL_0")], methods=["raw"], against=["blank_out"])
    assert len(report.examples) == 1


def test_a_pair_is_refused_where_there_is_one_segment() -> None:
    with pytest.raises(af.OptionError, match="a pair of texts is for models with two segments"):
        af.load().encode(("the key", "the cabinets"))


def test_explain_says_that_it_takes_one_input() -> None:
    with pytest.raises(af.OptionError, match="explain takes one input; got a list of 2"):
        af.explain(["the key", "the keys"])  # type: ignore[arg-type]
