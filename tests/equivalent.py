"""Random mutants (tests/random_mutants.py) that nobody can tell from the product: file, line and change, and why."""

EQUIVALENT: dict[tuple[str, str, str], str] = {}
