"""Jinja templates that can access only the values they are given, with a limit on their work."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from jinja2 import StrictUndefined, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from agentlightning.errors import ConfigError

MAX_WORK: Final = 2_000_000
"""Maximum number of characters, items, loop turns and calls that a template may cost: about a second."""
_MAX_TOKENS: Final = 20_000
"""Maximum number of tokens of a template, as Jinja's lexer counts them: compiling these takes half a second."""
_TURN: Final = 5
"""Cost of one loop iteration, in items."""
_CALL: Final = 50
_MAX_BITS: Final = 10_000
_MAX_INDENT: Final = 100
_MAX_DIGITS: Final = 3
"""Maximum number of digits in the width of a format."""
_WIDTH: Final = re.compile(r"([%)])[#0\- +]*(\d*)\.?(\*|\d*)")
"""Matches the width of a placeholder such as ``%5.2f``, or of a named one such as ``%(price)5.2f``."""
_FILTERS: Final = (
    "abs capitalize count d default dictsort e escape first float format groupby indent int items join last length "
    "list lower map max min reject rejectattr replace reverse round select selectattr sort string sum title tojson "
    "trim truncate unique upper wordcount"
).split()
_TEXT_METHODS: Final = frozenset("capitalize endswith lower split splitlines startswith strip title upper".split())
_MAPPING_METHODS: Final = frozenset("get items keys values".split())
"""Access to all other attributes of strings and mappings is refused."""


class JinjaEngine:
    """Renders templates that can access only the values they are given, with a limit on their work."""

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Returns the text; raises ConfigError for a wrong template, a missing value or too much work."""
        environment = _Environment()
        try:
            for number, _ in enumerate(environment.lex(template)):
                if number == _MAX_TOKENS:
                    raise SecurityError(f"it has more than {_MAX_TOKENS:,} tokens")
            return environment.from_string(_limit(environment.parse(template))).render(**values)
        except (TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ConfigError(f"jinja prompt template cannot be rendered: {reason}") from error


class _Environment(ImmutableSandboxedEnvironment):
    """Renders one template once, and counts its work."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, keep_trailing_newline=True, finalize=self._bounded)
        self._work = 0
        self.globals = {"range": self.globals["range"], "namespace": Namespace}
        self.filters = {name: self._metered(name, self.filters[name]) for name in _FILTERS}
        self.filters |= {"_bounded": self._bounded, "_counted": self._counted}
        self.concat = self._concat  # type: ignore[method-assign] # as for native templates

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        if isinstance(obj, Mapping):
            return attr in _MAPPING_METHODS
        return isinstance(obj, (LoopContext, Namespace)) and bool(super().is_safe_attribute(obj, attr, value))

    def is_safe_callable(self, obj: Any) -> bool:
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, (Macro, BlockReference)) or obj in (self.globals["range"], Namespace):
            return True
        return isinstance(owner, (str, Mapping, LoopContext)) and super().is_safe_callable(obj)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._spend(_CALL)
        return self._bounded(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(right, 0) if operator == "**" else 1) + right.bit_length()
            if bits > _MAX_BITS:
                raise SecurityError(f"{operator} makes a number of more than {_MAX_BITS} bits")
        elif operator == "*":
            factor = next((side for side in (left, right) if isinstance(side, int)), 1)
            self._spend(_size(left if factor is right else right, self._left) * max(factor, 0))
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else right.values() if isinstance(right, Mapping) else [right]
            self._check(_size_format(left, values, self._left))
        return self._bounded(super().call_binop(context, operator, left, right))

    @property
    def _left(self) -> int:
        return MAX_WORK - self._work

    def _check(self, work: int) -> None:
        """Raises SecurityError if the work exceeds what the template has left."""
        if work > self._left:
            raise SecurityError(f"it produces more than {MAX_WORK:,} characters, items and loop turns")

    def _spend(self, work: int) -> None:
        self._check(work)
        self._work += work

    def _bounded(self, value: Any) -> Any:
        self._spend(_size(value, self._left))
        return value

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._spend(_TURN)
            yield item

    def _concat(self, pieces: Iterable[str]) -> str:
        return "".join([self._bounded(piece) for piece in pieces])

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            args = tuple(list(self._counted(each)) if isinstance(each, (range, Iterator)) else each for each in args)
            given = [*args, *kwargs.values()]
            options = given[2 if name == "tojson" else 1 :]  # tojson also receives a context
            if name in ("indent", "round", "tojson") and any(map(_is_long, options)):
                raise SecurityError(f"{name} takes at most {_MAX_INDENT}")
            if name == "format":
                self._check(_size_format(str(args[0]), options, self._left))
            if name in ("indent", "replace", "join"):  # these repeat an argument for each part of another
                sizes = [_size(each, self._left) for each in given if isinstance(each, (str, list, tuple))]
                self._spend(max(sizes[:1], default=0) * max([1, *sizes[1:]]))
            return self._bounded(function(*args, **kwargs))

        return metered


def _limit(tree: nodes.Template) -> nodes.Template:
    """Makes a template count its loops, and measure its variables, comparisons and joined texts."""

    def through(name: str, node: Any) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    for loop in tree.find_all(nodes.For):
        if loop.recursive:
            raise SecurityError("loops may not be recursive")
        loop.iter = through("_counted", loop.iter)
    for assign in tree.find_all(nodes.Assign):
        assign.node = through("_bounded", assign.node)
    for comparison in tree.find_all(nodes.Compare):
        comparison.expr = through("_bounded", comparison.expr)
        for operand in comparison.ops:
            operand.expr = through("_bounded", operand.expr)
    for block in tree.find_all(nodes.With):
        block.values = [through("_bounded", value) for value in block.values]
    for concat in tree.find_all(nodes.Concat):
        concat.nodes = [through("string", node) for node in concat.nodes]
    return tree


def _size(value: Any, limit: int) -> int:
    """Returns the number of characters and items in a value; stops counting soon after the limit."""
    size, stack = 0, [value]
    while stack and size <= limit:
        each = stack.pop()
        if isinstance(each, (str, bytes)):
            size += len(each)
        elif isinstance(each, Mapping):
            size += len(each)
            stack.extend([*each, *each.values()])
        elif isinstance(each, (list, tuple, set, frozenset)):
            size += len(each)
            stack.extend(each)
        elif isinstance(each, int):
            size += each.bit_length() // 3  # at least its digits
        size += 1
    return size


def _is_long(option: Any) -> bool:
    """Whether an indent, or a number of digits, exceeds the maximum."""
    return isinstance(option, int) and abs(option) > _MAX_INDENT


def _size_format(template: str, values: Iterable[Any], limit: int) -> int:
    """Returns an upper bound of the number of characters that a format produces for its placeholders.

    Refuses a width such as ``%999999d``, and ``%*d``, whose width is a value.
    """
    has_names, widest = "%(" in template, 0
    for found in _WIDTH.finditer(template):
        start, width, precision = found.groups()
        if start == ")" and not has_names:
            continue
        if precision == "*" or max(len(width), len(precision)) > _MAX_DIGITS:
            raise SecurityError(f"the widths of a format have at most {_MAX_DIGITS} digits")
        widest = max(widest, int(width or 0) + int(precision or 0))
    sizes = [len(f"{value:.0f}") if isinstance(value, float) else _size(value, limit) for value in values]
    places = template.count("%")
    # A value is printed once or, if placeholders have names, at any of them.
    return places * widest + (places * max(sizes, default=0) if has_names else sum(sizes))
