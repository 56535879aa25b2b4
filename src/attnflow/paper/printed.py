"""Tables 1 to 3 as the paper prints them."""

from dataclasses import dataclass

MeanAndDeviation = tuple[float, float]  # mean and standard deviation


@dataclass(frozen=True)
class Printed:
    """A table as the paper prints it: a row of cells per method, a cell per layer."""

    title: str
    against: str
    layers: tuple[int, ...]
    cells: dict[str, tuple[MeanAndDeviation, ...]]
    examples: int


def read_cells(row: str) -> tuple[MeanAndDeviation, ...]:
    """The cells of a row as the paper prints it, each mean±deviation."""
    pairs = (cell.split("±") for cell in row.split())
    return tuple((float(mean), float(deviation)) for mean, deviation in pairs)


PRINTED_TABLES = {
    "table1": Printed(
        "Table 1: token attention of CLS against blank-out, verb-number model",
        "blank_out",
        (1, 2, 3, 4, 5, 6),
        {
            "raw": read_cells("0.69±0.27 0.10±0.43 -0.11±0.49 -0.09±0.52 0.20±0.45 0.29±0.39"),
            "rollout": read_cells("0.32±0.26 0.38±0.27 0.51±0.26 0.62±0.26 0.70±0.25 0.71±0.24"),
            "flow": read_cells("0.32±0.26 0.44±0.29 0.70±0.25 0.70±0.22 0.71±0.22 0.70±0.22"),
        },
        2000,
    ),
    "table2": Printed(
        "Table 2: token attention of CLS against input gradients, verb-number model",
        "input_gradient",
        (1, 2, 3, 4, 5, 6),
        {
            "raw": read_cells("0.53±0.33 0.16±0.38 -0.06±0.42 0.00±0.47 0.24±0.40 0.46±0.35"),
            "rollout": read_cells("0.22±0.31 0.27±0.32 0.39±0.32 0.47±0.32 0.53±0.32 0.54±0.31"),
            "flow": read_cells("0.22±0.31 0.31±0.34 0.54±0.32 0.61±0.28 0.60±0.28 0.61±0.28"),
        },
        2000,
    ),
    "table3": Printed(
        "Table 3: token attention against input gradients, DistilBERT on SST-2",
        "input_gradient",
        (1, 3, 5, 6),
        {
            "raw": read_cells("0.12±0.21 0.09±0.21 0.08±0.20 0.09±0.21"),
            "rollout": read_cells("0.11±0.19 0.12±0.21 0.13±0.21 0.13±0.20"),
            "flow": read_cells("0.11±0.19 0.11±0.21 0.12±0.22 0.14±0.21"),
        },
        100,
    ),
}
