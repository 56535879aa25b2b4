"""Damaged model folders, at the doors `af.load` and `af.capture`.

Each gives an error of one line, or sound attention; no folder's own code runs.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attnflow as af
from tests.families import build, word_tokenizer
from tests.hostile.arrays import Draw, check_sound
from tests.hostile.damage import ODD, damage_bytes, damage_head, damage_json, dump, odd_json
from tests.hostile.tries import Result, complain, refusal, run_tries

FAMILIES = ["bert", "roberta", "distilbert", "electra", "modernbert"]
FAMILIES += ["gpt2", "llama", "mistral", "gemma2", "t5", "bart"]
TEXT = "the key to the cabinets is lost"
WHOLE = "nothing"  # a damage that is none: the doors must be open
WEIGHTS, CONFIG = "model.safetensors", "config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
QUERY = re.compile(
    r"query|q_proj|q_lin|c_attn|Wqkv|\.q\."
)  # weights that every family attends with

Damage = Callable[[Draw, Path], object]


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these folders."""
    base = save_families(folder / "families")
    return run_tries(partial(attempt, base), "models", numbers, seed, folder, seconds=60)


def save_families(base: Path) -> Path:
    """Each family's tiny model with a tokenizer, in a folder of its own."""
    for family in FAMILIES:
        build(family).save_pretrained(base / family)
        word_tokenizer().save_pretrained(base / family)
    return base


def attempt(base: Path, draw: Draw, number: int, folder: Path) -> str | None:
    """Damage one folder, load it and capture; what is wrong, if anything."""
    damages = [*REFUSED, *DOUBTFUL]
    name = damages[number % len(damages)]
    family = draw.choice(FAMILIES)
    place = folder / "model"
    shutil.copytree(base / family, place)
    {**REFUSED, **DOUBTFUL}[name](draw, place)
    found = complain(lambda: judge(place))
    if (folder / "ran").exists():
        found = "the folder's own code ran"
    if found == "taken" and name in REFUSED:
        found = "it was loaded, and gave attention"
    if found == "refused" and name == WHOLE:
        found = "it was refused"
    return None if found in ("taken", "refused") else f"{family}, {name}: {found}"


def judge(place: Path) -> str:
    """Whether a folder was "refused", "taken" with sound attention, or what is bad."""
    try:
        found = af.capture(af.load(place), TEXT)
    except af.AttnFlowError as error:
        return refusal(error) or "refused"
    return check_sound(found) or "taken"


# ---- damage to weights -------------------------------------------------------------------------


def change(file: str, damage: Callable[[Draw, bytes], bytes]) -> Damage:
    """Damage to the bytes of one file."""

    def damaged(draw: Draw, place: Path) -> None:
        path = place / file
        path.write_bytes(damage(draw, path.read_bytes()))

    return damaged


def change_tensors(damage: Callable[[Draw, dict[str, Any], str], object]) -> Damage:
    """Damage to the tensors by name, one of the queries' among them."""

    def damaged(draw: Draw, place: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(place / WEIGHTS)
        damage(draw, tensors, draw.choice([name for name in tensors if QUERY.search(name)]))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / WEIGHTS)

    return damaged


def fill(draw: Draw, tensors: dict[str, Any], name: str) -> None:
    """Numbers that are none."""
    tensors[name] = tensors[name].clone().fill_(draw.choice([float("nan"), float("inf"), 1e38]))


def cast(draw: Draw, tensors: dict[str, Any], name: str) -> None:
    """Another type of numbers, for one tensor or all."""
    import torch

    kinds = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
    kind = draw.choice([*kinds, torch.float8_e4m3fn])
    for each in draw.choice([[name], list(tensors)]):
        tensors[each] = tensors[each].to(kind)


def split(draw: Draw, place: Path) -> None:
    """Weights in several files, by an index that names what is missing, elsewhere or no file."""
    (place / WEIGHTS).rename(place / "model-00001-of-00002.safetensors")
    file = draw.choice(
        ["model-00002-of-00002.safetensors", "../../outside.safetensors", "", "..", None, 3]
    )
    index = {"metadata": {}, "weight_map": draw.choice([{"a": file}, {}, [file], None, file])}
    (place / f"{WEIGHTS}.index.json").write_bytes(dump(index))


# ---- damage to JSON ----------------------------------------------------------------------------


def change_json(file: str, damage: Callable[[Draw, Any], Any]) -> Damage:
    """Damage to what a JSON file says."""

    def damaged(draw: Draw, place: Path) -> None:
        path = place / file
        path.write_bytes(dump(damage(draw, json.loads(path.read_text(encoding="utf-8")))))

    return damaged


def change_number(draw: Draw, config: dict[str, Any]) -> dict[str, Any]:
    """A size or count of the model that its weights do not have."""
    names = [name for name, value in config.items() if isinstance(value, int | float)]
    odd = [0, -1, 1, 3, 5, 10**6, 10**9, 2**31, 2**63, 10**30, 0.5, float("nan"), True, None]
    return {**config, draw.choice(names): draw.choice(odd)}


def change_name(draw: Draw, config: dict[str, Any]) -> dict[str, Any]:
    """What the model calls itself."""
    names = [
        "bert",
        "gpt2",
        "t5",
        "vit",
        "rwkv",
        "mamba",
        "verb-number",
        "whisper",
        "clip",
        "no-such",
    ]
    classes = [
        "BertModel",
        "GPT2LMHeadModel",
        "AutoModel",
        "PreTrainedModel",
        "BertTokenizer",
        "logging",
    ]
    classes += [
        "pipeline",
        "BertConfig",
        "__doc__",
        "__class__",
        "utils",
        "no.such",
        "LlamaForCausalLM",
    ]
    changes: list[dict[str, Any]] = [
        {"model_type": draw.choice([*names, *ODD])},
        {
            "architectures": draw.choice(
                [[draw.choice(classes)], draw.choice(classes), draw.choice(ODD)]
            )
        },
    ]
    return {**config, **draw.choice(changes)}


# ---- code in a folder --------------------------------------------------------------------------

PROGRAM = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import BertConfig as Config, BertModel as Model
from transformers import PreTrainedTokenizerFast as Tokenizer
"""
# classes that load a model by its configuration, and look for code first where they know none
AUTO = ["AutoModelForVideoClassification", "AutoModelForImageTextToText", "AutoModelForCTC"]
AUTO += ["AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoBackbone"]


def add_code(draw: Draw, place: Path, named: str) -> None:
    """A Python file that leaves a mark when it runs, and the entries that may name it."""
    marker = str(place.parent / "ran")
    for module in ("evil", "custom_generate/generate"):
        (place / module).parent.mkdir(exist_ok=True)
        (place / f"{module}.py").write_text(PROGRAM.format(marker=marker))
    auto_map: dict[str, Any] = dict.fromkeys(AUTO, "evil.Model")
    auto_map |= {"AutoConfig": "evil.Config", "AutoTokenizer": [None, "evil.Tokenizer"]}
    auto_map |= dict.fromkeys(["AutoProcessor", "AutoImageProcessor"], "evil.Tokenizer")
    config = json.loads((place / CONFIG).read_text(encoding="utf-8"))
    config["auto_map"] = auto_map
    if named == "architecture":
        del auto_map["AutoConfig"]
        config["architectures"] = [draw.choice(AUTO)]
    elif named == "type":
        config["model_type"] = draw.choice(["evil", "llava", "vit", "clip", None])
    else:
        config["tokenizer_class"] = draw.choice(["evil.Tokenizer", "Tokenizer", "EvilTokenizer"])
        classes = ["Tokenizer", "EvilTokenizer", "PreTrainedTokenizerFast", None]
        content = {"tokenizer_class": draw.choice(classes), "auto_map": auto_map}
        (place / TOKENIZER_CONFIG).write_bytes(dump(content))
        (place / TOKENIZER).unlink() if draw.random() < 0.5 else None
    (place / CONFIG).write_bytes(dump(config))
    for other in ("processor_config.json", "preprocessor_config.json", "generation_config.json"):
        if draw.random() < 0.3:
            content = {"auto_map": auto_map, "processor_class": "Tokenizer"}
            (place / other).write_bytes(dump(content))


def template(draw: Draw, config: dict[str, Any]) -> dict[str, Any]:
    """A chat template that is a program."""
    attack = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for a in range(10**9) %}x{% endfor %}"
    )
    return {**config, "chat_template": attack}


def beyond(draw: Draw, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer whose numbers the model does not know."""
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        word: number + draw.choice([50, 10**6, 2**31]) for word, number in words.items()
    }
    return tokenizer


def remove(draw: Draw, place: Path) -> None:
    """Some files less."""
    files = sorted(place.iterdir())
    for path in draw.sample(files, k=draw.randint(1, len(files))):
        path.unlink()


def misplace(draw: Draw, place: Path) -> None:
    """A folder, a link to itself, a pipe or another file under a file's name."""
    path = place / draw.choice([WEIGHTS, CONFIG, TOKENIZER, TOKENIZER_CONFIG])
    path.unlink()
    kind = draw.choice(["folder", "loop", "nowhere", "other"])
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "nowhere":
        path.symlink_to(place / "no such file")
    else:
        shutil.copy(place / draw.choice(sorted(each.name for each in place.iterdir())), path)


# what must not be loaded
REFUSED: dict[str, Damage] = {
    "weights cut off": change(
        WEIGHTS, lambda draw, content: content[: draw.randrange(len(content))]
    ),
    "a tensor missing": change_tensors(lambda draw, tensors, name: tensors.pop(name)),
    "a tensor of another size": change_tensors(
        lambda draw, tensors, name: tensors.update({name: tensors[name][..., :-1]})
    ),
    "a tensor renamed": change_tensors(
        lambda draw, tensors, name: tensors.update(x=tensors.pop(name))
    ),
    "weights that are text": change(WEIGHTS, lambda draw, content: b"version https://git-lfs"),
    "weights that are a pickle": change(WEIGHTS, lambda draw, content: b"\x80\x04\x95\x00." * 50),
    "no weights": lambda draw, place: (place / WEIGHTS).unlink(),
    "no config": lambda draw, place: (place / CONFIG).unlink(),
    "no folder": lambda draw, place: shutil.rmtree(place),
    "tokens that the model does not know": change_json(TOKENIZER, beyond),
}
# what may be loaded, if sound attention comes out
DOUBTFUL: dict[str, Damage] = {
    WHOLE: lambda draw, place: None,
    "bytes of the weights": change(WEIGHTS, damage_bytes),
    "head of the weights": change(WEIGHTS, lambda draw, content: damage_head(draw, content, 600)),
    "length of the head": change(WEIGHTS, lambda draw, content: draw.randbytes(8) + content[8:]),
    "numbers that are none": change_tensors(fill),
    "numbers of another type": change_tensors(cast),
    "an index of weights": split,
    "config: a number": change_json(CONFIG, change_number),
    "config: a number or two": change_json(
        CONFIG, lambda draw, c: change_number(draw, change_number(draw, c))
    ),
    "config: any value": change_json(CONFIG, damage_json),
    "config: names": change_json(CONFIG, change_name),
    "config: bytes": change(CONFIG, odd_json),
    "tokenizer: any value": change_json(TOKENIZER, damage_json),
    "tokenizer: bytes": change(TOKENIZER, odd_json),
    "tokenizer's config: any value": change_json(TOKENIZER_CONFIG, damage_json),
    "tokenizer's config: bytes": change(TOKENIZER_CONFIG, odd_json),
    "a template": change_json(TOKENIZER_CONFIG, template),
    "files missing": remove,
    "files misplaced": misplace,
    "code: architecture": partial(add_code, named="architecture"),
    "code: type": partial(add_code, named="type"),
    "code: tokenizer": partial(add_code, named="tokenizer"),
}
