"""What a mechanism hands to the coding."""

from dataclasses import dataclass

from common.coding import Values
from common.mask import Indices


@dataclass(frozen=True, slots=True)
class Upload:
    """Private values. ``indices`` are the coordinates that the site chose, sorted; None where the plan names them."""

    values: Values
    indices: Indices | None = None
