"""Chain -> the small language that CUTLASS's EVT frontend understands, or a `ChainError` that names the line.

CUTLASS's Python AST frontend takes assignments of binary operations and calls on plain names, wants the result in a
variable `D`, and fails on anything else with an error about its own internals. Here the chain's source is checked
first and rewritten: internal names that cannot clash, one assignment a variable, constants folded, `clamp` and unary
minus spelt out.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import dataclass
from typing import NoReturn

from .. import chain as chain_functions
from ..errors import ChainError
from ..spec import Spec

_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

SUPPORTED = (
    "assignments to a variable, one final return, arguments of the chain, numbers (also global ones), + - * /, unary minus and "
    + ", ".join(chain_functions.FUNCTIONS)
)


@dataclass(frozen=True)
class TracedInput:
    """An input of the visitor tree: its name in the traced source and the chain argument that it stands for."""

    internal: str
    name: str
    kind: str  # "vector" or "scalar"


@dataclass(frozen=True)
class TraceableChain:
    """What goes to CUTLASS's frontend: a function `chain(accum, ...)` in its language, and its inputs."""

    source: str
    inputs: tuple[TracedInput, ...]


def normalize(spec: Spec) -> TraceableChain:
    """Check and rewrite the chain of `spec`. Raises ChainError with file, line, construct and what is supported."""
    return _Normalizer(spec).run()


#: Numbers whose reciprocal is a normal fp32 number.
_SAFE_DIVISOR = 2.0**-126, 2.0**126


class _Normalizer:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        try:
            lines, self.first_line = inspect.getsourcelines(spec.chain)
        except OSError as error:
            raise ChainError(
                f"{spec.name}: expected a chain whose source is in a file, found none ({error}); put it into a .py file"
            ) from None
        self.file = inspect.getsourcefile(spec.chain) or "<chain>"
        self.lines = textwrap.dedent("".join(lines)).splitlines()
        self.function = next(n for n in ast.walk(ast.parse("\n".join(self.lines))) if isinstance(n, ast.FunctionDef))
        self.inputs = tuple(TracedInput(f"in{i}", a.name, a.kind) for i, a in enumerate(spec.arguments))
        self.values: dict[str, ast.expr] = {"accum": ast.Name("accum")}
        self.values |= {i.name: ast.Name(i.internal) for i in self.inputs}
        self.globals = inspect.getclosurevars(spec.chain)
        self.statements: list[ast.Assign] = []
        self.used: set[str] = set()

    def fail(self, node: ast.AST, construct: str) -> NoReturn:
        line = getattr(node, "lineno", 1)
        text = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        raise ChainError(
            f"{self.file}:{self.first_line + line - 1}: chain {self.spec.name!r} cannot be traced: {construct}\n"
            f"    {text}\nSupported are {SUPPORTED}."
        )

    def run(self) -> TraceableChain:
        body = self.function.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
            body = body[1:]
        if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
            self.fail(body[-1] if body else self.function, "expected a final `return expression`")
        for statement in body[:-1]:
            self.assign(statement)
        result = self.expression(body[-1].value)
        self.drop_unused(result)
        if "accum" not in self.used:
            self.fail(body[-1], "the result does not depend on `accum`")
        for item in self.inputs:
            if item.internal not in self.used:
                self.fail(self.function, f"argument {item.name!r} is never used")
        self.emit("D", result)
        arguments = ", ".join(["accum", *(i.internal for i in self.inputs)])
        statements = "".join(f"    {ast.unparse(ast.fix_missing_locations(s))}\n" for s in self.statements)
        return TraceableChain(f"def chain({arguments}):\n{statements}    return D\n", self.inputs)

    def drop_unused(self, result: ast.expr) -> None:
        """Keep the statements that the result depends on; `used` becomes the names that it does depend on."""

        def names(node: ast.AST) -> set[str]:
            return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}

        self.used = names(result)
        kept: list[ast.Assign] = []
        for statement in reversed(self.statements):
            target, value = statement.targets[0], statement.value
            if names(target) & self.used:
                self.used |= names(value)
                kept.append(statement)
        self.statements = kept[::-1]

    def emit(self, target: str, value: ast.expr) -> None:
        self.statements.append(ast.Assign([ast.Name(target)], value, lineno=0))

    def assign(self, statement: ast.stmt) -> None:
        target: ast.expr
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        else:
            self.fail(statement, f"a statement of kind {type(statement).__name__}")
        if not isinstance(target, ast.Name):
            self.fail(statement, f"assignment to {ast.unparse(target)}")
        result = self.expression(value)
        if not isinstance(result, (ast.Name, ast.Constant)):  # a plain name or number needs no node of its own
            name = f"var{len(self.statements)}"
            self.emit(name, result)
            result = ast.Name(name)
        self.values[target.id] = result

    def expression(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Name):
            return self.name(node)
        if isinstance(node, ast.Constant):
            return self.number(node, node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            operand = self.expression(node.operand)
            return operand if isinstance(node.op, ast.UAdd) else self.binary(node, operand, ast.Mult(), ast.Constant(-1.0))
        if isinstance(node, ast.BinOp):
            if type(node.op) not in _OPERATORS:
                self.fail(node, f"the operator {type(node.op).__name__}")
            return self.binary(node, self.expression(node.left), node.op, self.expression(node.right))
        if isinstance(node, ast.Call):
            return self.call(node)
        return self.fail(node, f"an expression of kind {type(node).__name__}: {ast.unparse(node)}")

    def name(self, node: ast.Name) -> ast.expr:
        if node.id in self.values:
            value = self.values[node.id]
            if isinstance(value, ast.Name):
                self.used.add(value.id)
                return ast.Name(value.id)
            return value
        for scope in (self.globals.nonlocals, self.globals.globals):
            if node.id in scope:
                return self.number(node, scope[node.id])
        return self.fail(node, f"the name {node.id!r}, which is no argument, variable or number")

    def number(self, node: ast.expr, value: object) -> ast.Constant:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(node, f"{ast.unparse(node)} = {value!r}, which is no number")
        return ast.Constant(float(value))

    def binary(self, node: ast.expr, left: ast.expr, op: ast.operator, right: ast.expr) -> ast.expr:
        if isinstance(left, ast.Constant) and isinstance(right, ast.Constant):
            expression = ast.fix_missing_locations(ast.Expression(ast.BinOp(left, op, right)))
            try:
                return ast.Constant(float(eval(compile(expression, "<chain>", "eval"))))  # noqa: S307 (two numbers)
            except ZeroDivisionError:
                self.fail(node, "a division of two numbers by zero")
        if isinstance(op, ast.Div) and isinstance(right, ast.Constant):
            divisor = right.value
            # A division takes a dozen instructions an element; the reciprocal's rounding is of the order of an fp32 ulp.
            if isinstance(divisor, float) and _SAFE_DIVISOR[0] <= abs(divisor) <= _SAFE_DIVISOR[1]:
                return ast.BinOp(left, ast.Mult(), ast.Constant(1.0 / divisor))
        return ast.BinOp(left, op, right)

    def function_called(self, node: ast.expr) -> object:
        """What a call's function is when the chain runs: a name alone may stand for another function."""
        if isinstance(node, ast.Attribute):
            return getattr(self.function_called(node.value), node.attr, None)
        if not isinstance(node, ast.Name) or node.id in self.values:
            return None
        return next((scope[node.id] for scope in (self.globals.nonlocals, self.globals.globals) if node.id in scope), None)

    def call(self, node: ast.Call) -> ast.expr:
        called = self.function_called(node.func)
        name = next((n for n in chain_functions.FUNCTIONS if getattr(chain_functions, n) is called), None)
        if name is None:
            self.fail(node, f"a call of {ast.unparse(node.func)}")
        arguments: dict[str, ast.expr] = {}
        try:
            bound = inspect.signature(getattr(chain_functions, name)).bind(*node.args, **{k.arg or "**": k.value for k in node.keywords})
        except TypeError as error:
            self.fail(node, f"a call of {name}: {error}")
        for key, value in bound.arguments.items():
            arguments[key] = self.expression(value)
        values = list(arguments.values())
        if all(isinstance(v, ast.Constant) for v in values):
            self.fail(node, f"a call of {name} on numbers alone")
        if name == "clamp":
            inner = ast.Call(ast.Name("maximum"), values[:2], [])
            return ast.Call(ast.Name("minimum"), [inner, values[2]], [])
        return ast.Call(ast.Name(name), values, [])
