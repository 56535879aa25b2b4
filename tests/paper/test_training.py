"""The training loop and the sentiment recipe.

Resumed runs equal unbroken ones; nothing is overwritten or half-written.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import attnflow as af
from attnflow.models.bundled.verb_number import VerbNumber, VerbNumberConfig
from attnflow.paper import checkpoint, sentiment, training
from attnflow.paper.sentiment import read_sst2, train_sentiment
from attnflow.paper.training import Optimiser, Outcome, TrainingTask, run_training

WORDS = 12
FINISHED = ["model.safetensors", "training.log"]  # what a folder holds in the end
STATE = Path("checkpoint") / "state.safetensors"


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight made-up rows: the label says whether the word after CLS is an even one."""
    chance = torch.Generator().manual_seed(step)
    ids = torch.randint(3, WORDS, (8, 5), generator=chance)
    ids[:, 0] = 2
    return ids, ids[:, 1] % 2


def verb_task(**changes: Any) -> TrainingTask[Any]:
    torch.manual_seed(0)
    module = VerbNumber(
        VerbNumberConfig(
            WORDS,
            num_hidden_layers=1,
            num_attention_heads=2,
            hidden_size=16,
            max_position_embeddings=8,
        )
    )
    dev = rows(10_000)

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return torch.nn.functional.cross_entropy(module(batch[0]).logits, batch[1])

    def measure() -> float:
        assert not module.training
        return float((module(dev[0]).logits.argmax(dim=-1) == dev[1]).float().mean())

    usual = {
        "steps": 40,
        "batch_at": rows,
        "loss": loss,
        "measure": measure,
        "every": 10,
        "optimiser": Optimiser(learning_rate=0.02),
    }
    return TrainingTask(**{"module": module, **usual, **changes})


def saver(folder: Path) -> Callable[[Any], None]:
    """Writes every weight, as a recipe's `save` would."""
    return lambda module: save_file(
        {name: value.contiguous() for name, value in module.state_dict().items()},
        folder / "model.safetensors",
    )


def run(
    folder: Path, *, resume: bool = False, seed: int = 0, report: Any = None, **changes: Any
) -> Outcome:
    return run_training(
        verb_task(**changes), folder, seed=seed, resume=resume, save=saver(folder), report=report
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def interrupted(folder: Path, at: int = 15, **changes: Any) -> None:
    """A training in which ctrl-C is pressed while the batch of a step is made."""

    def batch_at(step: int) -> Any:
        if step == at:
            os.kill(os.getpid(), signal.SIGINT)
        return rows(step)

    with pytest.raises(KeyboardInterrupt):
        run(folder, batch_at=batch_at, **changes)


# ---- what a training does ------------------------------------------------------------------------


def test_training_lowers_the_loss_and_reports_each_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    outcome = run(tmp_path / "out", steps=100, every=20, report=lines.append)
    assert [line.split(":")[0] for line in lines] == [
        f"step {step} of 100" for step in (20, 40, 60, 80, 100)
    ]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert losses[-1] < losses[0] / 2
    assert outcome.accuracy == 1.0
    assert outcome.steps == 100
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FINISHED
    assert capsys.readouterr() == ("", "")


def test_the_result_is_the_best_on_dev_and_not_the_last(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []
    accuracies = [0.5, 0.9, 0.7, 0.9]
    task = verb_task()

    def measure() -> float:
        seen.append(task.module.classifier.weight.clone())
        return accuracies[len(seen) - 1]

    found = verb_task(module=task.module, loss=task.loss, measure=measure)
    outcome = run_training(found, tmp_path, seed=0, resume=False, save=saver(tmp_path))
    assert outcome.accuracy == 0.9
    assert torch.equal(weights(tmp_path)["classifier.weight"], seen[1])


def test_it_stops_by_itself_after_patience(tmp_path: Path) -> None:
    accuracies = iter([0.5, 0.6, 0.6, 0.1])
    assert (
        run(tmp_path, steps=1000, every=2, patience=2, measure=lambda: next(accuracies)).steps == 8
    )


def test_dev_is_measured_on_the_moving_average_and_training_goes_on_from_the_last_weights(
    tmp_path: Path,
) -> None:
    task = verb_task()
    expected = {name: value.detach().clone() for name, value in task.module.named_parameters()}
    present: list[torch.Tensor] = []
    measured: list[torch.Tensor] = []

    def batch_at(step: int) -> Any:
        present.append(task.module.classifier.weight.detach().clone())
        return rows(step)

    def measure() -> float:
        measured.append(task.module.classifier.weight.clone())
        return 0.5

    found = verb_task(
        module=task.module,
        loss=task.loss,
        batch_at=batch_at,
        measure=measure,
        average=0.9,
        steps=4,
        every=2,
    )
    run_training(found, tmp_path, seed=0, resume=False, save=lambda module: None)
    average = expected["classifier.weight"]
    for step in (1, 2):
        average = torch.lerp(average, present[step], 1 - (1 + step) / (10 + step))
    torch.testing.assert_close(measured[0], average)
    assert not torch.equal(present[2], measured[0])


def test_a_seed_gives_the_same_weights_again_and_leaves_the_callers_random_numbers_alone(
    tmp_path: Path,
) -> None:
    run(tmp_path / "one")
    task = verb_task()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run_training(task, tmp_path / "two", seed=0, resume=False, save=saver(tmp_path / "two"))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert_same_bits(tmp_path / "one", tmp_path / "two")
    run(tmp_path / "three", seed=1)
    assert not torch.equal(
        weights(tmp_path / "one")["classifier.weight"],
        weights(tmp_path / "three")["classifier.weight"],
    )


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_rate_rises_then_falls_towards_zero(decay: Any) -> None:
    rates = [
        Optimiser(learning_rate=1.0, warm_up=0.2, decay=decay).rate_at(step, 50)
        for step in range(50)
    ]
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.03


def test_a_parameter_has_its_own_rate_and_frozen_ones_stay(tmp_path: Path) -> None:
    task = verb_task()
    task.module.position_embedding.requires_grad_(False)
    before = {name: value.detach().clone() for name, value in task.module.named_parameters()}
    slow = verb_task(
        module=task.module,
        loss=task.loss,
        measure=task.measure,
        scale=lambda name: float("classifier" in name),
    )
    run_training(slow, tmp_path, seed=0, resume=False, save=saver(tmp_path))
    moved = {
        name for name, value in weights(tmp_path).items() if not torch.equal(value, before[name])
    }
    assert moved == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more; got 0"),
        ({"every": 0}, "every must be 1 or more; got 0"),
        ({"average": 1.0}, "average must be between 0 and 1; got 1.0"),
        ({"patience": 0}, "patience must be 1 or more; got 0"),
    ],
)
def test_a_task_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(af.OptionError, match=message):
        verb_task(**changes)


def test_an_optimiser_out_of_range_is_refused() -> None:
    with pytest.raises(af.OptionError, match="learning_rate must be above 0; got 0"):
        Optimiser(learning_rate=0)
    with pytest.raises(af.OptionError, match="decay must be linear or cosine; got steep"):
        Optimiser(learning_rate=1.0, decay="steep")  # type: ignore[arg-type]


def test_a_loss_that_is_no_number_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        af.OptionError,
        match="the loss must stay finite; got nan at step 1: lower the learning rate",
    ):
        run(tmp_path, loss=lambda batch: torch.tensor(float("nan"), requires_grad=True))


# ---- broken off and continued --------------------------------------------------------------------

KILLED = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from tests.paper.test_training import rows, run
    def batch_at(step):
        if step == 35:
            time.sleep(60)  # it never ends before it is killed
        return rows(step)
    run(Path(sys.argv[1]), average=0.9, every=1, batch_at=batch_at)
    """
)


def kill_in_the_middle(folder: Path) -> None:
    """A real process that writes a checkpoint at every step is killed some time after the first."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    end = time.monotonic() + 60
    while not (folder / STATE).exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_killed_training_resumes_to_the_same_weights_bit_for_bit(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kill_in_the_middle(tmp_path / "killed")
        assert 0 < checkpoint.read_checkpoint(tmp_path / "killed" / STATE)[1]["step"] <= 35
        resumed = run(tmp_path / "killed", resume=True, average=0.9, every=1)
        unbroken = run(tmp_path / "unbroken", average=0.9, every=1)
    finally:
        torch.set_num_threads(threads)
    assert (resumed.steps, resumed.accuracy) == (unbroken.steps, unbroken.accuracy)
    assert_same_bits(tmp_path / "killed", tmp_path / "unbroken")
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == FINISHED


@pytest.mark.parametrize("at", [3, 9, 15])  # before the first measurement, at one, between two
def test_ctrl_c_writes_a_checkpoint_and_says_how_to_go_on(tmp_path: Path, at: int) -> None:
    lines: list[str] = []
    interrupted(tmp_path / "broken", at, average=0.9, report=lines.append)
    assert lines[-1] == f"stopped at step {at + 1} of 40; pass --resume to continue"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run(tmp_path / "broken", resume=True, average=0.9, report=lines.append)
    whole: list[str] = []
    run(tmp_path / "whole", average=0.9, report=whole.append)
    assert_same_bits(tmp_path / "broken", tmp_path / "whole")
    assert [line for line in lines if line.startswith("step")] == whole


def test_a_save_that_failed_is_tried_again_by_resume(tmp_path: Path) -> None:
    def full(module: Any) -> None:
        raise af.FileError("cannot write: No space left on device")

    with pytest.raises(af.FileError, match="No space left"):
        run_training(verb_task(), tmp_path, seed=0, resume=False, save=full)
    assert run(tmp_path, resume=True).steps == 40
    assert sorted(path.name for path in tmp_path.iterdir()) == FINISHED


def test_a_write_that_fails_leaves_the_old_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def half(file: Any, data: bytes) -> None:
        nonlocal written
        written += 1
        file.write(data if written == 1 else data[: len(data) // 2])
        if written > 1:
            file.flush()
            with open("/dev/full", "wb", buffering=0) as full:  # a real "No space left on device"
                full.write(b"x")

    monkeypatch.setattr(training, "write_through", half)
    with pytest.raises(
        af.FileError, match=r"cannot write .*state\.safetensors: No space left on device"
    ):
        run(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "checkpoint").iterdir()] == [
        "state.safetensors"
    ]
    assert checkpoint.read_checkpoint(tmp_path / "out" / STATE)[1]["step"] == 10
    monkeypatch.undo()
    run(tmp_path / "out", resume=True)
    run(tmp_path / "whole")
    assert_same_bits(tmp_path / "out", tmp_path / "whole")


def test_what_a_killed_write_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / ".attnflow-abc").write_bytes(b"half")
    (tmp_path / ".attnflow-def").write_bytes(b"half")
    run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FINISHED


# ---- refusals ------------------------------------------------------------------------------------


def refusal(folder: Path, **options: Any) -> str:
    """The one line of the error; what is in the folder must stay as it is."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(af.FileError) as error:
        run(folder, **options)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return str(error.value)


def test_a_finished_model_is_not_overwritten(tmp_path: Path) -> None:
    run(tmp_path)
    for resume in (False, True):
        assert (
            refusal(tmp_path, resume=resume)
            == f"{tmp_path} already holds a model; choose another --out"
        )


def test_an_unfinished_training_is_not_overwritten(tmp_path: Path) -> None:
    interrupted(tmp_path)
    assert refusal(tmp_path) == (
        f"{tmp_path} holds an unfinished training; "
        "pass --resume to continue it, or choose another --out"
    )


def test_resume_needs_a_checkpoint(tmp_path: Path) -> None:
    assert refusal(tmp_path / "new", resume=True) == (
        f"{tmp_path / 'new'} holds no checkpoint to resume from; "
        "leave --resume out to start from the beginning"
    )
    assert not (tmp_path / "new").exists()


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert (
        refusal(tmp_path)
        == f"{tmp_path} must be new or empty; it holds thesis.txt: choose another --out"
    )
    assert "is a file: choose another --out" in refusal(tmp_path / "thesis.txt")
    (tmp_path / "mine" / "checkpoint").mkdir(parents=True)
    (tmp_path / "mine" / "checkpoint" / "thesis.txt").write_text("years of work")
    assert refusal(tmp_path / "mine") == (
        f"{tmp_path / 'mine'} must be new or empty; "
        "it holds checkpoint/thesis.txt: choose another --out"
    )


def test_a_folder_that_cannot_be_made_is_one_line() -> None:
    with pytest.raises(
        af.FileError, match=r"cannot write to '/proc/nowhere/out': .*; choose another --out"
    ):
        run(Path("/proc/nowhere/out"))
    with pytest.raises(af.FileError, match=r"cannot write to 'a.x00b': .*; choose another --out"):
        run(Path("a\0b"))


def test_other_options_than_the_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    interrupted(tmp_path, options={"data": "abc"})
    same = {"resume": True, "options": {"data": "abc"}}
    start = f"{tmp_path / STATE} is of a training with other options or data: "
    end = "; give the same, or choose another --out"
    assert (
        refusal(tmp_path, resume=True, options={"data": "xyz"})
        == f"{start}data was abc, is xyz{end}"
    )
    assert (
        refusal(tmp_path, **same, seed=1, steps=50)
        == f"{start}seed was 0, is 1, steps was 40, is 50{end}"
    )
    assert "learning_rate was 0.02, is 0.5" in refusal(
        tmp_path, **same, optimiser=Optimiser(learning_rate=0.5)
    )
    assert "rates was" in refusal(tmp_path, **same, scale=lambda name: 2.0)
    assert "model was" in refusal(tmp_path, **same, module=torch.nn.Linear(2, 2))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, path)


@pytest.mark.parametrize("damage", [cut, flip, empty, foreign])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    interrupted(tmp_path)
    damage(tmp_path / STATE)
    message = refusal(tmp_path, resume=True)
    assert message.startswith(f"the checkpoint {tmp_path / STATE} is damaged (")
    assert message.endswith("; delete it, or choose another --out")


# ---- sentiment -----------------------------------------------------------------------------------


def test_read_sst2_takes_plain_files_and_glues(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes(
        "a joy \x85 for ever\t1\nsentence\tlabel\t".encode().rsplit(b"\n", 1)[0] + b"\na bore\t0"
    )
    assert read_sst2(path) == [("a joy \x85 for ever", 1), ("a bore", 0)]
    path.write_bytes(b"\xef\xbb\xbfsentence\tlabel\r\na joy\t1\r\n")
    assert read_sst2(path) == [("a joy", 1)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"a joy\t1\na bore 0\n",
            ", line 2: a line must be a sentence, a tab, 0 or 1; got 'a bore 0'",
        ),
        (
            b"a joy\t1\t1\n",
            ", line 1: a line must be a sentence, a tab, 0 or 1; got 'a joy\\t1\\t1'",
        ),
        (b" \t1\n", ", line 1: a line must be a sentence, a tab, 0 or 1; got ' \\t1'"),
        (
            b"a joy\t1\na bore\t2\n",
            ", line 2: a label must be 0 (negative) or 1 (positive); got '2'",
        ),
        (
            b"a joy\t1\nsentence\tlabel\n",
            ", line 2: a label must be 0 (negative) or 1 (positive); got 'label'",
        ),
        (
            b"a joy\t1\na b\xe9b\xe9\t1\n",
            ", line 2: not UTF-8 (invalid continuation byte); save the file as UTF-8",
        ),
        (b"", " holds no sentences; each line must be a sentence, a tab, 0 or 1"),
        (b"sentence\tlabel\n", " holds no sentences; each line must be a sentence, a tab, 0 or 1"),
    ],
)
def test_read_sst2_names_file_and_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "dev.tsv"
    path.write_bytes(data)
    with pytest.raises(af.FileError) as error:
        read_sst2(path)
    assert str(error.value) == f"{path}{message}"


def test_read_sst2_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(af.FileError) as error:
        read_sst2(tmp_path / "dev.tsv")
    assert str(error.value) == f"cannot read {tmp_path / 'dev.tsv'}: No such file or directory"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder without a classifier, with its tokenizer."""
    # not above: the process that is killed needs neither, and starts twice as fast
    import transformers

    from tests.families import word_tokenizer

    folder = tmp_path_factory.mktemp("base")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 8,
    }
    torch.manual_seed(0)
    encoder = transformers.BertModel(
        transformers.BertConfig(vocab_size=13, pad_token_id=1, **sizes)
    )
    for parameter in (
        encoder.parameters()
    ):  # larger than the usual start: the embeddings stay as they are, so words must differ
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape) * 0.3
    encoder.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A word decides, "here" or "lost"; one sentence is longer than the model takes."""
    folder = tmp_path_factory.mktemp("data")
    good = [
        "the key is here",
        "here",
        "cabinets are here",
        "here to the key to the cabinets to the key",
    ]
    lines = [
        *(f"{each}\t1" for each in good),
        *(f"{each.replace('here', 'lost')}\t0" for each in good),
    ]
    for name, times in (("train", 20), ("dev", 1), ("test", 2)):
        (folder / f"{name}.tsv").write_text("\n".join(lines * times) + "\n")
    return folder


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentiment, "RATE", 0.02)


@pytest.mark.usefixtures("_fast")
def test_a_trained_classifier_is_a_folder_that_attnflow_loads(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    result = train_sentiment(base, data, tmp_path / "out", epochs=8, report=lines.append)
    assert (result.dev, result.test, result.folder) == (1.0, 1.0, tmp_path / "out")
    assert capsys.readouterr() == ("", "")
    assert lines[-1].startswith(f"step {result.steps} of 40: loss ")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert not [name for name in names if name.startswith(".") or name == "checkpoint"]
    assert (
        len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    )  # who may read the card may read the weights
    model = af.load(tmp_path / "out")
    assert [label for label, _ in model.predict(["the key is here", "the key is lost"])] == [
        "positive",
        "negative",
    ]
    assert (af.capture(model, "the key is here").tokens or ())[0] == "[CLS]"
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "| test (measured once) | 16 | 1.0000 |" in readme
    assert (
        f"attnflow train sentiment --base={base} --data={data} --out={tmp_path / 'out'} "
        "--epochs=8 --seed=0" in readme
    )


def test_a_classifier_broken_off_is_continued_bit_for_bit(
    base: Path, data: Path, tmp_path: Path
) -> None:
    def stop(line: str) -> None:
        if line.startswith("step 3 "):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_sentiment(base, data, tmp_path / "broken", epochs=2, report=stop)
    with pytest.raises(af.FileError, match=r"data was .*, is .*; give the same"):
        train_sentiment(base, data, tmp_path / "broken", epochs=2, limit=150, resume=True)
    (tmp_path / "broken" / ".attnflow-x").mkdir()  # as a save leaves it that is killed
    (tmp_path / "broken" / ".attnflow-x" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "broken" / "config.json").write_text("{}")
    train_sentiment(base, data, tmp_path / "broken", epochs=2, resume=True)
    train_sentiment(base, data, tmp_path / "whole", epochs=2)
    assert_same_bits(tmp_path / "broken", tmp_path / "whole")
    names = [
        sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("broken", "whole")
    ]
    assert names[0] == names[1]
    assert (tmp_path / "broken" / "config.json").read_text() == (
        tmp_path / "whole" / "config.json"
    ).read_text()


def test_limit_takes_the_first_sentences(base: Path, data: Path, tmp_path: Path) -> None:
    assert train_sentiment(base, data, tmp_path / "out", epochs=1, limit=33).steps == 2
    assert "| train | 33 | |" in (tmp_path / "out" / "README.md").read_text()


def test_batches_hold_every_sentence_once_and_follow_from_seed_and_epoch() -> None:
    examples = [sentiment.EncodedSentence((number,) * (number % 7 + 1), 0) for number in range(100)]
    batches = sentiment.make_batches(examples, 0, 0)
    assert sorted(each.ids for batch in batches for each in batch) == sorted(
        each.ids for each in examples
    )
    assert [len(batch) for batch in batches].count(sentiment.BATCH_SENTENCES) == 3
    assert batches == sentiment.make_batches(examples, 0, 0)
    assert batches != sentiment.make_batches(examples, 0, 1)
    assert batches != sentiment.make_batches(examples, 1, 0)


def test_a_classifier_refuses_before_it_loads_anything(
    base: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(af.FileError, match="already holds a model; choose another --out"):
        train_sentiment("no such folder", data, tmp_path)
    with pytest.raises(af.OptionError, match="epochs must be 1 or more; got 0"):
        train_sentiment(base, data, tmp_path / "out", epochs=0)
    with pytest.raises(af.OptionError, match="limit must be 1 or more; got 0"):
        train_sentiment(base, data, tmp_path / "out", limit=0)
    with pytest.raises(af.FileError, match=r"cannot read .*train\.tsv"):
        train_sentiment(base, tmp_path, tmp_path / "out")


def test_a_base_that_is_no_encoder_is_one_line(data: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    with pytest.raises(
        af.FileError, match="the base must be the folder of an encoder and its tokenizer; got "
    ):
        train_sentiment(tmp_path / "base", data, tmp_path / "out")


def test_a_classifier_whose_save_fails_leaves_no_half_of_it(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def full(self: Any, folder: Path, **_: Any) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.BertForSequenceClassification, "save_pretrained", full)
        with pytest.raises(
            af.FileError,
            match=r"cannot write .*: No space left on device; pass --resume to try again",
        ):
            train_sentiment(base, data, tmp_path / "out", epochs=1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoint",
        "training.log",
    ]
    train_sentiment(base, data, tmp_path / "out", epochs=1, resume=True)
    assert af.load(tmp_path / "out").task == "sequence classification"
