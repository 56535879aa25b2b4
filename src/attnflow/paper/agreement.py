"""Sentences up to their verb, with the verb's number, and their split into train, dev and test.

The files are those of Linzen, Dupoux and Goldberg (2016).
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnflow.core.io.files import read_lines
from attnflow.errors import FileError

LABEL_OF_TAG = {"VBZ": "singular", "VBP": "plural"}
# of the 18 columns of the full corpus
NEEDED_COLUMNS = ("sentence", "verb_pos", "verb_index", "n_diff_intervening")
# the number of attractors of all rows, from the name of their file
ATTRACTORS_IN_NAME = re.compile(r"numpred\.test\.(\d+)$")


@dataclass(frozen=True)
class Sentence:
    """The words before a verb, and the number of that verb."""

    words: tuple[str, ...]
    label: str  # "singular" or "plural"
    source: str  # the name of its file, or "grammar"
    # nouns of the other number between subject and verb; None if they were not counted
    attractors: int | None = None

    @property
    def text(self) -> str:
        """The words as the vocabulary reads them."""
        return " ".join(self.words)

    @property
    def side(self) -> str:
        """train, dev or test, by the first four words: rows that begin alike stay together."""
        octets = hashlib.blake2b(" ".join(self.words[:4]).encode(), digest_size=8).digest()
        percentile = int.from_bytes(octets, "big") % 100
        return "test" if percentile < 10 else "dev" if percentile < 15 else "train"


def read_agreement(paths: Iterable[Path]) -> list[Sentence]:
    """All sentences of files, and of folders that hold such files.

    Files are numpred.*, or the full corpus as .tsv or .tsv.gz. A file is read once, however often
    it is named.
    """
    sentences: list[Sentence] = []
    for file in dict.fromkeys(file for path in paths for file in list_files(path)):
        rows = list(read_sentences(file))
        if not rows:
            raise FileError(
                f"{file} is empty: "
                "rows such as 'VBZ', a tab, and the words before the verb are needed"
            )
        sentences += rows
    return sentences


def list_files(path: Path) -> list[Path]:
    """The file at a path, or the data files of the folder there, sorted by name."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileError(
            f"{path} does not exist: give a folder with numpred.* files, or one such file"
        )
    files = sorted(
        file
        for pattern in ("numpred.*", "*.tsv", "*.tsv.gz")
        for file in path.glob(pattern)
        if file.is_file()
    )
    if not files:
        raise FileError(
            f"{path} holds no data: files named numpred.* or ending in .tsv or .tsv.gz are needed"
        )
    return files


def read_sentences(path: Path) -> Iterator[Sentence]:
    """The sentences of a file of two columns, or of the 18 of the full corpus with their header."""
    lines = read_lines(path)
    number, first = next(lines, (0, ""))
    if not number:
        return
    header = first.split("\t")
    if len(header) > 2:
        missing = [name for name in NEEDED_COLUMNS if name not in header]
        if missing:
            raise FileError(
                f"{path}, line {number}: the columns {', '.join(NEEDED_COLUMNS)} are needed; "
                f"{', '.join(missing)} not found"
            )
        places = [header.index(name) for name in NEEDED_COLUMNS]
        for number, line in lines:
            yield read_full_row(path, number, line.split("\t"), places, len(header))
        return
    named = ATTRACTORS_IN_NAME.search(path.name)
    attractors = int(named.group(1)) if named else None
    yield read_short_row(path, number, header, attractors)
    for number, line in lines:
        yield read_short_row(path, number, line.split("\t"), attractors)


def read_short_row(
    path: Path, number: int, cells: Sequence[str], attractors: int | None
) -> Sentence:
    """The sentence of a row such as VBZ, tab, the words before the verb."""
    if len(cells) != 2:
        raise FileError(
            f"{path}, line {number}: two columns are needed, "
            f"VBZ or VBP and the words before the verb; got {len(cells)}"
        )
    return make_sentence(path, number, cells[1].split(), cells[0], attractors)


def read_full_row(
    path: Path, number: int, cells: Sequence[str], places: Sequence[int], width: int
) -> Sentence:
    """The sentence of a row of the full corpus: words before verb_index, which counts from 1."""
    if len(cells) != width:
        raise FileError(
            f"{path}, line {number}: {width} columns are needed, as in the header; got {len(cells)}"
        )
    text, tag, verb, attractors = (cells[place] for place in places)
    if not verb.isdecimal() or not attractors.isdecimal():
        raise FileError(
            f"{path}, line {number}: verb_index and n_diff_intervening must be whole numbers; "
            f"got {verb!r}, {attractors!r}"
        )
    return make_sentence(path, number, text.split()[: int(verb) - 1], tag, int(attractors))


def make_sentence(
    path: Path, number: int, words: Sequence[str], tag: str, attractors: int | None
) -> Sentence:
    """The sentence of a row, if its tag and its words are usable."""
    tag = tag.strip()
    if tag not in LABEL_OF_TAG:
        raise FileError(f"{path}, line {number}: the verb must be VBZ or VBP; got {tag!r}")
    if not words:
        raise FileError(f"{path}, line {number}: there are no words before the verb")
    return Sentence(tuple(words), LABEL_OF_TAG[tag], path.name, attractors)
