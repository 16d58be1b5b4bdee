"""Splitting one data set among simulated sites."""

import numpy as np

from common.errors import DatasetError
from common.mask import Indices

_MIN_RECORDS = 2
_DRAWS = 100  # of a Dirichlet split, until no site is left with too few records


def split(targets: np.ndarray, sites: int, how: str, seed: int) -> list[Indices]:
    """Return the rows of each site, sorted; every row belongs to exactly one site.

    ``iid``              equal shares of a random order
    ``dirichlet:ALPHA``  each class is dealt out by a Dirichlet(ALPHA) draw over the sites
    ``labels:PER_SITE``  each site sees about PER_SITE classes (shards of the rows sorted by class)
    ``sizes:zipf``       random records; site i has a share proportional to 1 / (i + 1)
    """
    if sites < 1 or len(targets) < _MIN_RECORDS * sites:
        raise DatasetError(f"expected at least {_MIN_RECORDS} records a site, got {len(targets)} for {sites} sites")
    rng = np.random.default_rng([seed, 0x9A57])
    kind, _, argument = how.partition(":")
    if kind in ("dirichlet", "labels") and targets.dtype.kind != "i":
        raise DatasetError(f"partition {how!r} deals out classes, but the targets are numbers: use iid or sizes:zipf")
    match kind:
        case "iid" if not argument:
            parts = np.array_split(rng.permutation(len(targets)), sites)
        case "dirichlet":
            parts = _dirichlet(rng, targets, sites, _number(how, argument))
        case "labels":
            parts = _labels(rng, targets, sites, _number(how, argument))
        case "sizes" if argument == "zipf":
            parts = _zipf(rng, len(targets), sites)
        case _:
            raise DatasetError(
                f"unknown partition {how!r}: expected iid, dirichlet:ALPHA, labels:PER_SITE or sizes:zipf"
            )
    return [np.sort(part).astype(np.int64) for part in parts]


def _number(how: str, argument: str) -> float:
    try:
        value = float(argument)
    except ValueError:
        value = 0.0
    if not value > 0 or not np.isfinite(value):
        raise DatasetError(f"expected a number above 0 after the colon, like dirichlet:0.5 or labels:2, got {how!r}")
    return value


def _dirichlet(rng: np.random.Generator, targets: np.ndarray, sites: int, alpha: float) -> list[np.ndarray]:
    for _ in range(_DRAWS):
        shares: list[list[np.ndarray]] = [[] for _ in range(sites)]
        for label in np.unique(targets):
            rows = rng.permutation(np.flatnonzero(targets == label))
            cuts = (np.cumsum(rng.dirichlet(np.full(sites, alpha)))[:-1] * rows.size).astype(int)
            for share, part in zip(shares, np.split(rows, cuts), strict=True):
                share.append(part)
        parts = [np.concatenate(share) for share in shares]
        if min(part.size for part in parts) >= _MIN_RECORDS:
            return parts
    raise DatasetError(
        f"dirichlet:{alpha:g} left a site with fewer than {_MIN_RECORDS} records in {_DRAWS} draws: raise ALPHA, or "
        f"lower the number of sites ({sites})"
    )


def _labels(rng: np.random.Generator, targets: np.ndarray, sites: int, per_site: float) -> list[np.ndarray]:
    shards_each = max(1, round(per_site))
    by_label = rng.permutation(len(targets))
    by_label = by_label[np.argsort(targets[by_label], kind="stable")]
    shards = np.array_split(by_label, sites * shards_each)
    order = rng.permutation(len(shards))
    return [
        np.concatenate([shards[shard] for shard in order[site * shards_each : (site + 1) * shards_each]])
        for site in range(sites)
    ]


def _zipf(rng: np.random.Generator, count: int, sites: int) -> list[np.ndarray]:
    weights = 1 / np.arange(1, sites + 1)
    sizes = _MIN_RECORDS + np.floor((count - _MIN_RECORDS * sites) * weights / weights.sum()).astype(int)
    sizes[0] += count - sizes.sum()
    return np.split(rng.permutation(count), np.cumsum(sizes)[:-1])
