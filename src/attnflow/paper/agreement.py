"""Sentences up to their verb, with the verb's number: the files of Linzen, Dupoux and Goldberg (2016), and the split of our model."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnflow.core.files import read_lines
from attnflow.errors import FileError

NUMBERS = {"VBZ": "singular", "VBP": "plural"}
COLUMNS = (
    "sentence",
    "verb_pos",
    "verb_index",
    "n_diff_intervening",
)  # of the full corpus, which has 18
ATTRACTORS = re.compile(r"numpred\.test\.(\d+)$")  # what the name of a file says of all its rows


@dataclass(frozen=True)
class Sentence:
    """The words before a verb, and the number of that verb."""

    words: tuple[str, ...]
    label: str  # "singular" or "plural"
    source: str  # the name of its file, or "grammar"
    attractors: int | None = (
        None  # nouns of the other number between subject and verb; None if nobody counted
    )

    @property
    def text(self) -> str:
        """The words as the vocabulary reads them back."""
        return " ".join(self.words)

    @property
    def side(self) -> str:
        """train, dev or test, by the first four words alone, so that rows that begin alike never stand on two sides."""
        digest = hashlib.blake2b(" ".join(self.words[:4]).encode(), digest_size=8).digest()
        place = int.from_bytes(digest, "big") % 100
        return "test" if place < 10 else "dev" if place < 15 else "train"


def read_agreement(paths: Iterable[Path]) -> list[Sentence]:
    """All sentences of files (numpred.*, or the full corpus as .tsv or .tsv.gz) and of folders that hold such files."""
    found: list[Sentence] = []
    for file in dict.fromkeys(
        file for path in paths for file in files_of(path)
    ):  # each once, however often it is named
        rows = list(read_file(file))
        if not rows:
            raise FileError(
                f"{file} is empty: rows such as 'VBZ', a tab, and the words before the verb are needed"
            )
        found += rows
    return found


def files_of(path: Path) -> list[Path]:
    """The files that are meant by a path, in the order of their names."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileError(
            f"{path} does not exist: give a folder with numpred.* files, or one such file"
        )
    found = sorted(
        each
        for pattern in ("numpred.*", "*.tsv", "*.tsv.gz")
        for each in path.glob(pattern)
        if each.is_file()
    )
    if not found:
        raise FileError(
            f"{path} holds no data: files named numpred.* or ending in .tsv or .tsv.gz are needed"
        )
    return found


def read_file(path: Path) -> Iterator[Sentence]:
    """The sentences of one file, by its form: two columns, or the 18 of the full corpus under their header."""
    lines = read_lines(path)
    number, first = next(lines, (0, ""))
    if not number:
        return
    header = first.split("\t")
    if len(header) > 2:
        missing = [name for name in COLUMNS if name not in header]
        if missing:
            raise FileError(
                f"{path}, line {number}: the columns {', '.join(COLUMNS)} are needed; {', '.join(missing)} not found"
            )
        places = [header.index(name) for name in COLUMNS]
        for number, line in lines:
            yield full_row(path, number, line.split("\t"), places, len(header))
        return
    named = ATTRACTORS.search(path.name)
    attractors = int(named.group(1)) if named else None
    yield short_row(path, number, header, attractors)
    for number, line in lines:
        yield short_row(path, number, line.split("\t"), attractors)


def short_row(path: Path, number: int, cells: Sequence[str], attractors: int | None) -> Sentence:
    """A row such as VBZ, tab, the words before the verb."""
    if len(cells) != 2:
        raise FileError(
            f"{path}, line {number}: two columns are needed, VBZ or VBP and the words before the verb; got {len(cells)}"
        )
    return sentence(path, number, cells[1].split(), cells[0], attractors)


def full_row(
    path: Path, number: int, cells: Sequence[str], places: Sequence[int], width: int
) -> Sentence:
    """A row of the full corpus: the words of the sentence before place verb_index, which counts from 1."""
    if len(cells) != width:
        raise FileError(
            f"{path}, line {number}: {width} columns are needed, as in the header; got {len(cells)}"
        )
    text, label, verb, attractors = (cells[place] for place in places)
    if not verb.isdecimal() or not attractors.isdecimal():
        raise FileError(
            f"{path}, line {number}: verb_index and n_diff_intervening must be whole numbers; got {verb!r}, {attractors!r}"
        )
    return sentence(path, number, text.split()[: int(verb) - 1], label, int(attractors))


def sentence(
    path: Path, number: int, words: Sequence[str], label: str, attractors: int | None
) -> Sentence:
    label = label.strip()
    if label not in NUMBERS:
        raise FileError(f"{path}, line {number}: the verb must be VBZ or VBP; got {label!r}")
    if not words:
        raise FileError(f"{path}, line {number}: there are no words before the verb")
    return Sentence(tuple(words), NUMBERS[label], path.name, attractors)
