"""Every small change of a Python file that a test should notice."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from tests.reach import probes

_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
_SYMMETRIC = {"array_equal", "equal", "gcd", "hypot", "isclose", "max", "maximum", "min", "minimum"}
_LOGGING = {"debug", "error", "exception", "flower_log", "info", "log", "warn", "warning"}


_SAME = {"copy", "highlight", "strict"}  # keywords that change speed or colours alone, or say what is so anyway


@dataclass(frozen=True, slots=True)
class Mutant:
    """What stands in a file in the place of the bytes from ``start`` to ``end``.

    ``probe`` is the line whose run a test must reach to notice; at import, where there is none, ``names`` are defined.
    """

    file: str
    kind: str
    line: int
    text: str
    change: str
    start: int
    end: int
    after: str
    probe: int | None
    names: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what names the mutant as long as its line is the same, wherever that is in the file."""
        return self.file, self.text, self.change

    @property
    def name(self) -> str:
        """Return what tells it from every other mutant of the same code."""
        return f"{self.file}:{self.line}  {self.change}  (at {self.start})"

    def applied(self, source: str) -> str:
        """Return the file with the change."""
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file; of equal changes of equal lines, all but the first have a number."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for mutant in _Search(file, source).of_block(ast.parse(source).body, None, ()):
        counts[mutant.key] += 1
        again = counts[mutant.key]
        yield mutant if again == 1 else replace(mutant, change=f"{mutant.change} (number {again})")


class _Search:
    def __init__(self, file: str, source: str) -> None:
        self._file, self._lines, self._probes = file, source.encode().splitlines(keepends=True), probes(source)
        self._data = source.encode()

    def of_block(self, block: list[ast.stmt], probe: int | None, names: tuple[str, ...]) -> Iterator[Mutant]:
        for statement in block:
            at = statement.lineno if statement.lineno in self._probes else probe
            yield from self._of_node(statement, at, names)

    def _of_node(self, node: ast.AST, probe: int | None, names: tuple[str, ...]) -> Iterator[Mutant]:
        if _is_declaration(node):
            return
        if isinstance(node, ast.Assign | ast.AnnAssign) and probe is None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = tuple(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
        for kind, first, last, after in self._changes(node):
            start, end = self._start(first), self._end(last)
            change = f"{_flat(self._data[start:end].decode())} -> {_flat(after)}"
            text = self._lines[first.lineno - 1].decode().strip()
            yield Mutant(self._file, kind, first.lineno, text, change, start, end, after, probe, names)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = [each.lineno for each in node.body if each.lineno in self._probes]
            yield from self._of_node(
                node.args, lines[0] if lines else probe, names
            )  # defaults matter where it is called
            yield from self.of_block(node.body, probe, names)
            return
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "decorator_list", "type_params"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.stmt):
                        yield from self.of_block([child], probe, names)
                    elif isinstance(child, ast.AST):
                        yield from self._of_node(child, probe, names)

    def _changes(self, node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.expr | ast.stmt, str]]:
        """Yield the kind of a change, the first and the last node that it replaces, and by what."""
        match node:
            case ast.Raise() if "NotImplementedError" not in ast.unparse(node):
                yield "raise dropped", node, node, "pass"
            case ast.Expr(ast.Call()) | ast.Delete() | ast.Continue() | ast.Break():
                yield "statement deleted", node, node, "pass"
            case ast.Assign([ast.Attribute() | ast.Subscript()]):
                yield "statement deleted", node, node, "pass"
            case ast.AugAssign():
                yield "statement deleted", node, node, "pass"
                if other := _OTHER.get(type(node.op)):
                    yield "arithmetic", node, node, ast.unparse(ast.AugAssign(node.target, other(), node.value))
            case ast.Compare():
                for number, operator in enumerate(node.ops):
                    operators = [*node.ops[:number], _OTHER[type(operator)](), *node.ops[number + 1 :]]
                    yield "comparison", node, node, ast.unparse(ast.Compare(node.left, operators, node.comparators))
            case ast.BoolOp():
                yield "and/or", node, node, ast.unparse(ast.BoolOp(_OTHER[type(node.op)](), node.values))
            case ast.UnaryOp(ast.Not()):
                yield "not dropped", node, node, ast.unparse(node.operand)
            case ast.BinOp() if type(node.op) in _OTHER and not (_is_string(node.left) or _is_string(node.right)):
                yield "arithmetic", node, node, ast.unparse(ast.BinOp(node.left, _OTHER[type(node.op)](), node.right))
            case ast.Constant(bool(value)):
                yield "boolean", node, node, str(not value)
            case ast.Constant(int(value) | float(value)):
                yield "number", node, node, repr(value + 1 if isinstance(value, int) else value * 2 or 1.0)
            case ast.Call() if ast.unparse(node.func).rpartition(".")[2] not in _SYMMETRIC:
                for one, two in pairwise(node.args):
                    starred = isinstance(one, ast.Starred) or isinstance(two, ast.Starred)
                    if not starred and ast.dump(one) != ast.dump(two):
                        between = self._data[self._end(one) : self._start(two)].decode()
                        yield "arguments swapped", one, two, self._source(two) + between + self._source(one)

    def _source(self, node: ast.expr) -> str:
        return self._data[self._start(node) : self._end(node)].decode()

    def _start(self, node: ast.stmt | ast.expr) -> int:
        return sum(map(len, self._lines[: node.lineno - 1])) + node.col_offset

    def _end(self, node: ast.stmt | ast.expr) -> int:
        return sum(map(len, self._lines[: (node.end_lineno or 1) - 1])) + (node.end_col_offset or 0)


def _is_declaration(node: ast.AST) -> bool:
    """Tell of what a test has no business with: asserts, logs, texts, what only a script or a type checker runs."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("__name__ == '__main__'", "TYPE_CHECKING")
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.unparse(node.value.func).rpartition(".")[2] in _LOGGING
    return isinstance(node, ast.Assert | ast.JoinedStr) or (isinstance(node, ast.keyword) and node.arg in _SAME)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _flat(text: str) -> str:
    return " ".join(text.split())
