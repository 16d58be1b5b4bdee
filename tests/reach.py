"""Which statements of the product run: a call before each of them writes it down, in every process of a test.

The product of a copy imports this file, so it imports nothing that takes long.
"""

import ast
import os
from collections.abc import Iterator
from contextlib import suppress

FILE, _CONTEXT = "FEDSIEVE_REACH", "FEDSIEVE_REACH_CONTEXT"
_seen: set[tuple[str, int]] = set()


def reached(file: str, line: int) -> None:
    """Write down, once in a context, that a statement runs."""
    if (file, line) not in _seen:
        _seen.add((file, line))
        if FILE in os.environ:
            row = f"{os.environ.get(_CONTEXT, '')}\t{file}\t{line}\n"
            # A test may have filled the disk.
            with suppress(OSError), open(os.environ[FILE], "ab", buffering=0) as notes:  # noqa: PTH123
                notes.write(row.encode())


def begin(context: str) -> str:
    """Say on whose behalf statements run from now on, also in processes that start now; return what was said before."""
    before = os.environ.get(_CONTEXT, "")
    os.environ[_CONTEXT] = context
    _seen.clear()
    return before


def instrumented(file: str, source: str) -> str:
    """Return the source of a file of the product with a call before every statement in its functions."""
    lines = source.splitlines(keepends=True)
    body = ast.parse(source).body
    for line in sorted(probes(source), reverse=True):
        indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
        lines.insert(line - 1, f"{indent}_reached_({file!r}, {line})\n")
    documented = bool(body) and isinstance(body[0], ast.Expr)
    lines.insert((body[0].end_lineno or 0) if documented else 0, "from tests.reach import reached as _reached_\n")
    return "".join(lines)


def probes(source: str) -> set[int]:
    """Return the first lines of the statements before which a call can stand."""
    lines = source.splitlines()
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in _first_lines(node)
        if lines[line - 1].lstrip().partition(" ")[0] != "elif"
    }


def _first_lines(node: ast.AST) -> Iterator[int]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and not _is_docstring(child):
            yield min([child.lineno, *(each.lineno for each in getattr(child, "decorator_list", ()))])
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _first_lines(child)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
