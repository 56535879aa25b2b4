"""Loading: data never becomes code, no weight is made up, and a damaged folder is one line."""

import contextlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import attnflow as af
from attnflow.models import load as loading
from attnflow.models.files import HUB_PATIENCE
from tests.families import build, word_tokenizer

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of whole models, never changed."""
    place = tmp_path_factory.mktemp("models")
    for family in ("bert", "roberta", "gpt2", "llama"):
        build(family).save_pretrained(place / family)
        word_tokenizer().save_pretrained(place / family)
    build("vit").save_pretrained(place / "vit")
    (place / "vit" / "preprocessor_config.json").write_text(
        '{"image_processor_type": "ViTImageProcessor", "size": {"height": 24, "width": 24}}'
    )
    return place


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copied(family: str) -> Path:
        return Path(shutil.copytree(saved / family, tmp_path / family))

    return copied


def change(file: str = "config.json", **values: Any) -> Damage:
    """Other values in a JSON file, which is made if there is none."""

    def do(folder: Path) -> None:
        path = folder / file
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(found | values))

    return do


def write(file: str, content: bytes) -> Damage:
    return lambda folder: (folder / file).write_bytes(content)


def delete(file: str) -> Damage:
    return lambda folder: os.remove(folder / file)


def cut(file: str) -> Damage:
    def do(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: len(content) // 2])

    return do


def rewrite(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    """Other weights."""

    def do(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return do


def drop(part: str) -> Damage:
    """Without the weights that have this in their names."""
    return rewrite(lambda weights: {name: w for name, w in weights.items() if part not in name})


# ---- data never becomes code --------------------------------------------------------------------

CODE = """
from pathlib import Path
(Path({place!r}) / "marker").write_text("code has run")
import transformers
Config, Model = transformers.BertConfig, transformers.BertModel
Tokenizer, Images = transformers.PreTrainedTokenizerFast, transformers.ViTImageProcessor
"""
VIDEO = {"AutoModelForVideoClassification": "own.Model"}
OWN_CODE = {
    "config": ("bert", change(model_type="own", auto_map={"AutoConfig": "own.Config"})),
    "model": (
        "bert",
        change(architectures=["AutoModelForVideoClassification"], auto_map=VIDEO),
    ),
    "another Auto class": (
        "bert",
        change(
            architectures=["AutoModelForDepthEstimation"],
            auto_map={"AutoModelForDepthEstimation": "own.Model"},
        ),
    ),
    "a class of its own": (
        "bert",
        change(architectures=["OwnModel"], auto_map={"AutoModel": "own.Model"}),
    ),
    "a part": ("bert", change(text_config={"auto_map": {"AutoModel": "own.Model"}})),
    "a kernel": ("bert", change(attn_implementation="somebody/kernel")),
    "tokenizer": (
        "bert",
        change(
            "tokenizer_config.json",
            tokenizer_class="OwnTokenizer",
            auto_map={"AutoTokenizer": ["own.Tokenizer", None]},
        ),
    ),
    "tokenizer by an Auto class": (
        "bert",
        lambda folder: [
            change(auto_map=VIDEO)(folder),
            change("tokenizer_config.json", tokenizer_class="AutoModelForVideoClassification")(
                folder
            ),
        ],
    ),
    "tokenizer by an Auto class with an ending": (
        "bert",
        lambda folder: [
            change(auto_map=VIDEO)(folder),
            change("tokenizer_config.json", tokenizer_class="AutoModelForVideoClassificationFast")(
                folder
            ),
        ],
    ),
    "tokenizer in config.json": (
        "bert",
        lambda folder: [
            change(auto_map=VIDEO, tokenizer_class="AutoModelForVideoClassification")(folder),
            delete("tokenizer_config.json")(folder),
        ],
    ),
    "image processor": (
        "vit",
        change(
            "preprocessor_config.json",
            image_processor_type="OwnImages",
            auto_map={"AutoImageProcessor": "own.Images"},
        ),
    ),
    "image processor by the older name of its class": (
        "vit",
        lambda folder: [
            change(auto_map=VIDEO)(folder),
            change(
                "preprocessor_config.json",
                image_processor_type=None,
                feature_extractor_type="AutoModelForVideoClassification",
            )(folder),
        ],
    ),
    "image processor by an Auto class": (
        "vit",
        lambda folder: [
            change(auto_map=VIDEO)(folder),
            change(
                "preprocessor_config.json", image_processor_type="AutoModelForVideoClassification"
            )(folder),
        ],
    ),
}


@pytest.mark.parametrize("what", OWN_CODE)
def test_a_folders_own_code_never_runs(
    what: str, copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, do = OWN_CODE[what]
    folder = copy(family)
    do(folder)
    (folder / "own.py").write_text(CODE.format(place=str(folder)))
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr(sys, "stdin", answers)
    with pytest.raises(af.FileError) as error:
        af.load(folder)
    assert "\n" not in str(error.value)
    assert not (folder / "marker").exists()
    assert answers.tell() == 0  # nothing was asked


@pytest.mark.parametrize("what", ["config", "model", "tokenizer by an Auto class"])
def test_saying_yes_to_the_command_line_runs_nothing(
    what: str, copy: Callable[[str], Path]
) -> None:
    family, do = OWN_CODE[what]
    folder = copy(family)
    do(folder)
    (folder / "own.py").write_text(CODE.format(place=str(folder)))
    done = subprocess.run(
        [sys.executable, "-m", "attnflow", "explain", "the key", "--model", str(folder)],
        input="y\n" * 9,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("attnflow: ")
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("name", ["Auto", "PreTrainedModel", "BertPreTrainedModel", "pipeline"])
def test_only_model_classes_of_transformers_are_architectures(
    name: str, copy: Callable[[str], Path]
) -> None:
    folder = copy("bert")
    change(architectures=[name])(folder)
    with pytest.raises(af.FileError, match=f"architectures names {name!r}"):
        af.load(folder)


def test_a_config_without_architectures_is_loaded_by_its_type(copy: Callable[[str], Path]) -> None:
    folder = copy("bert")
    change(architectures=None)(folder)
    assert repr(af.load(folder)) == "<Model: BertModel, encoder>"


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "do", "message"),
    [
        ("roberta", drop("classifier"), r"4 weights of Roberta\w+ are .*classifier.dense.bias"),
        ("bert", drop("layer.1."), r"16 weights of BertModel .* and 13 more"),
        ("bert", rewrite(lambda w: {f"x.{name}": w[name] for name in w}), "would be random"),
        ("bert", rewrite(lambda w: {}), "would be random"),
        ("bert", change(architectures=["BertForMaskedLM"]), "cls.predictions"),
        ("bert", change(intermediate_size=40), r"stored as \[48, 32\], should be \[40, 32\]"),
        ("gpt2", drop("wte"), "transformer.wte.weight"),
        ("llama", drop("lm_head"), "lm_head.weight"),
    ],
)
def test_a_weight_that_would_be_random_is_an_error(
    family: str, do: Damage, message: str, copy: Callable[[str], Path]
) -> None:
    folder = copy(family)
    do(folder)
    with pytest.raises(af.FileError, match=message):
        af.load(folder)


@pytest.mark.parametrize(("family", "part"), [("bert", "pooler"), ("gpt2", "lm_head")])
def test_what_attention_does_not_pass_or_what_is_tied_may_be_missing(
    family: str, part: str, copy: Callable[[str], Path]
) -> None:
    folder = copy(family)
    drop(part)(folder)
    found = af.capture(af.load(folder), "the key is lost")
    expected = af.capture(af.Model(build(family), word_tokenizer()), "the key is lost")
    assert abs(found.weights - expected.weights).max() < 1e-6


# ---- damaged folders ----------------------------------------------------------------------------

DAMAGES: dict[str, tuple[str, Damage]] = {
    "cut weights": ("bert", cut("model.safetensors")),
    "no safetensors": ("bert", write("model.safetensors", b"null")),
    "cut config": ("bert", cut("config.json")),
    "a list for a config": ("bert", write("config.json", b"[]")),
    "a config that is not UTF-8": ("bert", write("config.json", b"\xff\xfe{}")),
    "a deep config": ("bert", write("config.json", b'{"a":' * 100_000)),
    "no config": ("bert", delete("config.json")),
    "a text for a number": ("bert", change(hidden_size="32")),
    "null for a number": ("llama", change(num_key_value_heads=None, head_dim=[])),
    "a negative number": ("bert", change(vocab_size=-1)),
    "a number of 31 digits": ("bert", change(hidden_size=10**30)),
    "heads that do not fit": ("bert", change(num_attention_heads=7)),
    "a type that does not exist": ("bert", change(dtype="colour")),
    "null for a tokenizer": ("bert", write("tokenizer.json", b"null")),
    "cut tokenizer": ("bert", cut("tokenizer.json")),
    "a tokenizer that panics": (
        "bert",
        change(
            "tokenizer.json",
            normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        ),
    ),
    "options of a tokenizer and no vocabulary": (
        "bert",
        delete("tokenizer.json"),
    ),
    "null for an image processor": ("vit", write("preprocessor_config.json", b"null")),
    "labels without numbers": ("roberta", change(id2label={"x": "y"})),
    "a shard that is missing": (
        "bert",
        lambda folder: [
            (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
            write(
                "model.safetensors.index.json",
                b'{"metadata": {}, "weight_map": {"x": "model-00002-of-00002.safetensors"}}',
            )(folder),
        ],
    ),
    "an empty GGUF file": (
        "bert",
        lambda folder: [
            delete("model.safetensors")(folder),
            write("model.gguf", b"GGUF")(folder),
        ],
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_folder_is_one_line(
    what: str, copy: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    family, do = DAMAGES[what]
    folder = copy(family)
    do(folder)
    with pytest.raises(af.FileError) as error:
        af.load(folder)
    assert "\n" not in str(error.value)
    assert "LOAD REPORT" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "sizes",
    [
        {"vocab_size": 10**9},
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": 9_999},
        {"hidden_size": 10**6},
        {"num_labels": 10**9},
    ],
)
def test_a_size_that_the_weights_do_not_have_is_refused_before_it_fills_the_memory(
    sizes: dict[str, Any], copy: Callable[[str], Path]
) -> None:
    folder = copy("bert")
    change(**sizes)(folder)
    began = time.perf_counter()
    with pytest.raises(af.FileError, match=r"must be at most|far larger than its weights"):
        af.load(folder)
    assert time.perf_counter() - began < 60


def test_a_folder_without_files_of_a_tokenizer_has_none(copy: Callable[[str], Path]) -> None:
    folder = copy("bert")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert af.load(folder).tokenizer is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_an_error_of_a_file(
    error: type[BaseException], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise error

    monkeypatch.setattr(loading, "load_files", interrupt)
    with pytest.raises(error):
        af.load(saved / "bert")


def test_logs_are_held_back_for_one_thread_and_only_if_it_fails() -> None:
    logger = logging.getLogger("transformers.test")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("transformers").addHandler(handler)
    try:
        with contextlib.suppress(ValueError), loading.hold_back_logs():
            logger.warning("lost")
            other = threading.Thread(target=logger.warning, args=("another thread",))
            other.start()
            other.join()
            raise ValueError
        with loading.hold_back_logs():
            logger.warning("kept")
            assert "kept" not in stream.getvalue()
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert stream.getvalue().split("\n") == ["another thread", "kept", ""]
    assert handler.filters == []


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": 10**9},
        {"num_hidden_layers": 10**6},
        {"hidden_size": "128"},
        {"num_attention_heads": 7},
        {"pad_token_id": 10**9},
        {"id2label": {"0": None, "1": "plural"}},
        {"id2label": []},
        {"dropout": "x"},
    ],
)
def test_the_bundled_kind_of_model_is_checked_by_its_weights(
    values: dict[str, Any], tmp_path: Path
) -> None:
    weights = Path(af.__file__).parent / "models" / "bundled" / "weights"
    folder = Path(shutil.copytree(weights, tmp_path / "copy"))
    change(**values)(folder)
    with pytest.raises(af.FileError, match="is not a verb-number model"):
        af.load(folder)


# ---- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        "./modle",
        "../modle",
        "~/modle",
        "/modle",
        "modle/",
        "a/b/modle",
        "a\\modle",
        "runs/modle",
        "two words",
        "nul\0",
        Path("modle"),
    ],
)
def test_a_mistyped_folder_is_said_at_once_and_no_hub_is_asked(
    name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise AssertionError("the hub was asked")

    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.model_info", ask)
    with pytest.raises(af.FileError, match="no such folder"):
        af.load(name)


def test_the_home_folder_is_expanded(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(copy("bert").parent))
    assert af.load("~/bert").name == "BertModel"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_says_to_give_its_folder(file: str, saved: Path) -> None:
    with pytest.raises(af.FileError, match=r"is a file; give the folder that it is in: .*bert"):
        af.load(saved / "bert" / file)


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing"])
def test_an_unreachable_hub_takes_seconds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    began = time.perf_counter()
    with pytest.raises(af.FileError, match=f"cannot load {name}: there is no such folder here, "):
        af.load(name)
    assert time.perf_counter() - began < HUB_PATIENCE


def test_without_the_hub_the_cache_is_taken(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--somebody--tiny"
    shutil.copytree(saved / "bert", repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = af.load("somebody/tiny")
    assert model.name == "BertModel"
    assert model.encode("the key").tokens == ("[CLS]", "the", "key", "[SEP]")
