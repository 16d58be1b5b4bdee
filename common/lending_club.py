"""Lending Club's loans: a table of real borrowers, for linear and logistic regression."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DatasetError

TARGETS = ("int_rate", "class")
_STATES = (
    "AK AL AR AZ CA CO CT DC DE FL GA HI IA ID IL IN KS KY LA MA MD ME MI MN MO MS MT NC ND NE NH NJ NM NV NY OH OK OR "
    "PA RI SC SD TN TX UT VA VT WA WI WV WY"
)
_CODES: dict[str, list[str]] = {
    "term": ["term_36", "term_60"],
    "addr_state": _STATES.split(),
    "verification_status": ["Not_Verified", "Source_Verified", "Verified"],
    "emp_length": ["emp_unk", "emp_lt_1", *(f"emp_{years}" for years in range(1, 10)), "emp_ge_10"],
}
# What a column is divided by, after it was cut there: round figures that anyone can name, not statistics of the data.
_LIMITS = {
    "funded_amnt": 40_000,
    "annual_inc": 250_000,
    "delinq_2yrs": 10,
    "inq_last_6mths": 6,
    "revol_util": 100,
    "acc_now_delinq": 2,
    "open_il_6m": 20,
    "open_il_12m": 6,
    "open_il_24m": 10,
    "total_bal_il": 200_000,
    "all_util": 150,
    "inq_fi": 10,
    "inq_last_12m": 15,
    "delinq_amnt": 20_000,
    "num_il_tl": 40,
    "total_il_high_credit_limit": 250_000,
}
_RATE_UNIT = 10.0  # the target is the interest rate in tens of percent: numbers near 1
FEATURES = len(_CODES) + len(_LIMITS)
_TEST_SHARE = 0.2
_SPLIT_SEED = 1


def read(path: Path, target: str = "int_rate") -> dict[str, NDArray[Any]]:
    """Return the loans of a CSV file: 20 features in [0, 1], and the target; a fifth of them, at random, is the test.

    ``int_rate`` is the interest rate in tens of percent (float32), for regression; ``class`` is 1 for a loan that went
    bad, for classification. ``sub_grade`` encodes the rate and is left out, and so is what only the future tells.
    Words become whole numbers as in compressive-laplace, then all columns are divided by public limits.
    """
    if target not in TARGETS:
        raise DatasetError(f"expected a target of {path} that is one of {', '.join(TARGETS)}, got {target!r}")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        raise DatasetError(f"no file {path}: expected the CSV table of Lending Club's loans") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    wanted = [*_CODES, *_LIMITS, "int_rate", "Class"]
    missing = [name for name in wanted if not rows or name not in rows[0]]
    if missing:
        raise DatasetError(
            f"{path} lacks the columns {', '.join(missing)}: it is not the table of Lending Club's loans"
        )
    columns = [_coded(path, rows, name, codes) for name, codes in _CODES.items()]
    columns += [np.clip(_numbers(path, rows, name) / limit, 0, 1) for name, limit in _LIMITS.items()]
    inputs = np.stack(columns, axis=1).astype(np.float32)  # (loans, features)
    targets: NDArray[Any]
    if target == "int_rate":
        targets = (_numbers(path, rows, "int_rate") / _RATE_UNIT).astype(np.float32)
    else:
        targets = np.rint(_coded(path, rows, "Class", ["good", "bad"])).astype(np.int64)
    order = np.random.Generator(np.random.Philox(key=_SPLIT_SEED)).permutation(len(rows))
    cut = round(_TEST_SHARE * len(rows))
    return {
        "train_inputs": inputs[order[cut:]],
        "train_targets": targets[order[cut:]],
        "test_inputs": inputs[order[:cut]],
        "test_targets": targets[order[:cut]],
    }


def _coded(path: Path, rows: list[dict[str, str]], name: str, codes: list[str]) -> NDArray[np.float64]:
    numbers = {code: number / (len(codes) - 1) for number, code in enumerate(codes)}
    try:
        return np.array([numbers[row[name]] for row in rows])
    except KeyError as error:
        raise DatasetError(f"{path}: expected {name} to be one of {', '.join(codes)}, got {error}") from None


def _numbers(path: Path, rows: list[dict[str, str]], name: str) -> NDArray[np.float64]:
    try:
        numbers = np.array([float(row[name]) for row in rows])
    except (TypeError, ValueError) as error:
        raise DatasetError(f"{path}: expected numbers in column {name}: {error}") from None
    if not np.isfinite(numbers).all():
        raise DatasetError(f"{path}: expected finite numbers in column {name}")
    return numbers
