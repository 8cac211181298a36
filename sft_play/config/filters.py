"""`filter` of a source: a condition over the columns of a row, in a small part of Python's syntax. Nothing is ever executed.

Comparisons (`==`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `not in`, `is None`), `and`, `or`, `not`, numbers, text, lists of them, columns by
their names, and four functions of a column: `len`, `blank` (null, or nothing but spaces), `has` (the row has it, and it is not null),
`number` (of text, as CSV files hold it). `column("my name")` is a column whose name is no word.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from sft_play.config.types import kind_of, names_of
from sft_play.errors import DataError

Row = Mapping[str, Any]
Value = Callable[[Row], Any]

LONGEST = 2_000
"""Characters of an expression: the parser's memory grows with it."""
DEEPEST = 60
"""Levels of an expression: each is a call for every row."""
SYNTAX = 'conditions look like `lang == "en" and score >= 3`, `source in ["a", "b"]`, `not blank(text)`, `len(answer) < 2000`'
COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b, ast.Is: lambda a, b: a is b, ast.IsNot: lambda a, b: a is not b,
}  # fmt: skip
FUNCTIONS = ("len", "blank", "has", "number", "column")


class Condition:
    """A parsed `filter`; calling it with a row tells whether the row is kept. Raises `DataError`."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        source = expression.strip()
        try:
            if len(source) > LONGEST:
                raise DataError(f"`filter` has {len(source)} characters; the most is {LONGEST}", hint=SYNTAX)
            tree = ast.parse(source, mode="eval")
            if _depth(tree.body) > DEEPEST:
                raise DataError("`filter` is nested too deep", hint=SYNTAX)
            self._holds = self._truth(tree.body)
        except SyntaxError as error:
            raise self._problem(error.msg or "invalid syntax", max((error.offset or 1) - 1, 0)) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise DataError(f"`filter` cannot be read: {error or 'nested too deep'}", hint=SYNTAX) from None

    def __call__(self, row: Row) -> bool:
        return bool(self._holds(row))

    def _problem(self, problem: str, column: int) -> DataError:
        source = self.expression.strip()
        return DataError(
            f"`filter` cannot be used: {problem} at character {column + 1}: `{source[:column]}` >>> `{source[column : column + 40]}`"
            if column
            else f"`filter` cannot be used: {problem} at character 1 of `{source[:80]}`",
            hint=SYNTAX,
        )

    def _refused(self, node: ast.AST, problem: str) -> DataError:
        offset = getattr(node, "col_offset", 0)  # in bytes of UTF-8, on the node's line
        lines = self.expression.strip().split("\n")
        line = getattr(node, "lineno", 1) - 1
        before = sum(len(text) + 1 for text in lines[:line])
        return self._problem(problem, before + len(lines[line].encode()[:offset].decode("utf-8", "ignore")))

    def _truth(self, node: ast.expr) -> Value:
        """Returns what computes a condition; a column alone is none, unless it holds true or false."""
        value = self._value(node)

        def truth(row: Row) -> bool:
            found = value(row)
            if found is True or found is False:
                return bool(found)
            raise self._refused(node, f"this is {kind_of(found)}, and neither true nor false")

        return value if isinstance(node, (ast.Compare, ast.BoolOp)) else truth

    def _value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.BoolOp):
            parts = [self._truth(part) for part in node.values]
            every = isinstance(node.op, ast.And)
            return lambda row: all(part(row) for part in parts) if every else any(part(row) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            negated = self._truth(node.operand)
            return lambda row: not negated(row)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.Name):
            return self._column(node.id)
        if isinstance(node, ast.Call):
            return self._call(node)
        constant = self._constant(node)
        return lambda _: constant

    def _constant(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (str, int, float))):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._constant(node.operand)
            if isinstance(value, (int, float)):
                return -value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self._constant(entry) for entry in node.elts]
        raise self._refused(node, f"`{ast.unparse(node)[:40]}` is not part of the language")

    def _comparison(self, node: ast.Compare) -> Value:
        values = [self._value(node.left), *(self._value(part) for part in node.comparators)]
        names = [COMPARE[type(op)] for op in node.ops]
        for op, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, (ast.Is, ast.IsNot)) and not (isinstance(right, ast.Constant) and right.value is None):
                raise self._refused(right, "`is` is for `None` alone; use `==`")

        def compare(row: Row) -> bool:
            found = [value(row) for value in values]
            for name, left, right in zip(names, found, found[1:], strict=False):
                try:
                    if not name(left, right):
                        return False
                except TypeError:
                    raise self._refused(node, f"{kind_of(left)} and {kind_of(right)} cannot be compared so") from None
            return True

        return compare

    def _column(self, name: str) -> Value:
        def look_up(row: Row) -> Any:
            try:
                return row[name]
            except KeyError:
                raise DataError(
                    f"`filter: {self.expression.strip()[:200]}` names the column `{name}`, which is missing; the columns are {names_of(row)}",
                    hint=f'text is written in quotes: `"{name}"`; `has({name})` tells whether a row has the column',
                ) from None  # fmt: skip

        return look_up

    def _call(self, node: ast.Call) -> Value:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in FUNCTIONS:
            raise self._refused(node, f"`{ast.unparse(node.func)[:40]}` is not a function; there are {', '.join(FUNCTIONS)}")
        if len(node.args) != 1 or node.keywords:
            raise self._refused(node, f"`{name}` takes one value")
        argument = node.args[0]
        if name == "column":
            if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                raise self._refused(argument, "`column` takes the name of a column in quotes")
            return self._column(argument.value)
        if name == "has":
            return self._has(argument)
        value = self._value(argument)
        function = {"len": _length, "blank": _blank, "number": _number}[name]

        def call(row: Row) -> Any:
            found = value(row)
            try:
                return function(found)
            except (TypeError, ValueError):
                raise self._refused(node, f"`{name}` of {kind_of(found)}: `{str(found)[:40]}`") from None

        return call

    def _has(self, argument: ast.expr) -> Value:
        if isinstance(argument, ast.Name):
            column = argument.id
        elif isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            column = argument.value
        else:
            raise self._refused(argument, "`has` takes a column")
        return lambda row: row.get(column) is not None


def _depth(node: ast.AST) -> int:
    level, depth = [node], 0
    while level:
        depth += 1
        level = [child for parent in level for child in ast.iter_child_nodes(parent)]
    return depth


def _length(value: Any) -> int:
    return len(value)


def _blank(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, str):
        raise TypeError
    return not value.strip()


def _number(value: Any) -> float | None:
    return None if value is None or value == "" else float(value)
