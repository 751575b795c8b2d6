"""A jinja2 environment for chat templates of strangers: no access to Python, and bounds on time and size.

jinja2's sandbox keeps a template away from attributes and callables that matter; it does not keep one from running for
hours or filling the memory. Here every loop step, call, filter, operator and literal passes through a `_Meter`, which
bounds the processor time of a render and the size of every value it makes.
"""

from __future__ import annotations

import datetime as dt
import functools
import inspect
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0  # processor time of one render; real templates take milliseconds
MAX_SIZE = 1 << 22  # characters of any text, and of all texts in any list, that a template makes
_ELEMENT = 32  # what an element of a list or mapping counts for, in characters
_MAX_PRODUCT = 1 << 26  # of the two largest operands of one call: join, replace, center and indent multiply sizes
_MAX_INTEGER_BITS = 1024
_MAX_FORMAT = 10_000
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{3})|%[^A-Za-z%]*(?:\*|\d{3})")  # widths over 99, or computed


class LimitError(Exception):
    """The template takes too long or makes something too large."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Renders as transformers' `apply_chat_template` does: same whitespace rules, extensions, filters and functions."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[LoopControlExtension, _GenerationTag]
        )
        self.meter = _Meter()
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters["tojson"] = _tojson
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}
        self.filters.update(_loop=self._loop, _concat=self._concat, _literal=self._literal)
        self.finalize = self._literal

    def start(self, messages: list[Any]) -> None:
        """Begin a render over `messages`, with a new allowance of time."""
        self.meter = _Meter()
        self.meter.remember(messages)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        metered: nodes.Template = _Instrument(self).visit(tree)
        return metered

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(inspect.unwrap(function), "__self__", None)  # the text in text.replace(...)
        owners = [owner] if isinstance(owner, (str, list, tuple, dict)) else []
        if isinstance(owner, str) and getattr(function, "__name__", "") in ("format", "format_map"):
            self.meter.check_format(owner)
        self.meter.admit([*owners, *args, *kwargs.values()])
        return self.meter.checked(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.meter.check_operator(operator, left, right)
        return self.meter.checked(super().call_binop(context, operator, left, right))

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if name == "format":
                self.meter.check_format(str(args[0]))
            self.meter.admit([*args, *kwargs.values()])
            return self.meter.checked(function(*args, **kwargs))

        return guarded

    def _loop(self, items: Iterable[Any]) -> _MeteredItems:
        return _MeteredItems(items, self.meter)

    def _literal(self, value: Any) -> Any:
        self.meter.step()
        return self.meter.checked(value)

    def _concat(self, values: list[Any]) -> str:
        self.meter.admit(values)
        return self.concat(map(str, values))

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]  # how compiled templates join their output
        kept, length = [], 0
        for piece in pieces:
            length += len(piece)
            if length > MAX_SIZE:
                raise LimitError(f"it makes a text of more than {MAX_SIZE} characters")
            kept.append(piece)
        return "".join(kept)


class _Meter:
    """Bounds of one render."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + MAX_SECONDS
        self._known: dict[int, int] = {}  # id -> size

    def remember(self, value: Any) -> int:
        """Note the sizes of a render's input, which lives as long as the render, so they need no counting again."""
        if not isinstance(value, (list, dict)):
            return self._size(value)
        items = [*value, *value.values()] if isinstance(value, dict) else value
        self._known[id(value)] = size = _ELEMENT + sum(map(self.remember, items))
        return size

    def step(self) -> None:
        if time.thread_time() > self._deadline:
            raise LimitError(f"it runs for more than {MAX_SECONDS:g} seconds")

    def checked(self, value: Any) -> Any:
        if self._size(value) > MAX_SIZE:
            raise LimitError(f"it makes a value of more than {MAX_SIZE} characters")
        return value

    def admit(self, values: list[Any]) -> None:
        """Check the operands of a call before it can make something huge of them."""
        self.step()
        sizes = sorted((abs(v) if isinstance(v, int) else self._size(v) for v in values), reverse=True)
        if sum(sizes) > MAX_SIZE or (len(sizes) > 1 and sizes[0] * sizes[1] > _MAX_PRODUCT):
            raise LimitError("it calls a function with operands that are too large")

    def check_format(self, pattern: str) -> None:
        if len(pattern) > _MAX_FORMAT or _WIDE_FORMAT.search(pattern):
            raise LimitError("it formats with a width that is too large")

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            self.step()
            bits = left.bit_length() * max(1, right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise LimitError("it computes a number that is too large")
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            count, value = (left, right) if isinstance(left, int) else (right, left)
            self.step()
            if not isinstance(value, float) and count * self._size(value) > MAX_SIZE:
                raise LimitError(f"it makes a value of more than {MAX_SIZE} characters")
        else:
            if operator == "%" and isinstance(left, str):
                self.check_format(left)
            self.admit([left, right])

    def _size(self, value: Any) -> int:
        """Characters of all texts in `value` plus its elements, counted no further than needed to exceed MAX_SIZE."""
        total, open_values = 0, [value]
        while open_values and total <= MAX_SIZE:
            item = open_values.pop()
            if isinstance(item, str):
                total += len(item)
            elif id(item) in self._known:
                total += self._known[id(item)]
            else:
                total += _ELEMENT
                open_values.extend(_elements(item))
        return total


def _elements(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, Namespace):
        return [object.__getattribute__(value, "_Namespace__attrs")]
    return ()


class _MeteredItems:
    """What a loop runs over; every step is counted."""

    def __init__(self, items: Iterable[Any], meter: _Meter) -> None:
        self._items = items
        self._meter = meter

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._meter.step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # TypeError without a length, as loop.length expects


class _Instrument(NodeTransformer):
    """Routes the parts of a template that the environment cannot intercept through its metered filters."""

    def __init__(self, environment: TemplateEnvironment) -> None:
        self._environment = environment

    def _through(self, name: str, node: nodes.Expr) -> nodes.Filter:
        through = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        return through.set_environment(self._environment)  # type: ignore[return-value]

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._through("_loop", node.iter)  # type: ignore[arg-type]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        values = nodes.List(node.nodes, lineno=node.lineno).set_environment(self._environment)
        return self._through("_concat", values)  # type: ignore[arg-type]

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._through("_literal", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._through("_literal", node) if node.ctx == "load" else node


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: jinja2's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
