# SPDX-License-Identifier: Apache-2.0
"""Turn a Python function into a variant by calling it once with expression nodes.

``@logits`` takes ``(score, ctx, **params)`` and returns the new score; ``@mask`` takes ``(ctx, **params)``
and returns whether the key is seen. ``output`` takes ``(ctx, d, o, **params)``. Parameters are the function's
remaining arguments: a default makes it optional in ``run``, an annotation ``int`` (or an integer default)
makes it int32, and whether it is a number or an array is read from how the body uses it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn, overload

import numpy as np

from attnrt.errors import ArgumentError
from attnrt.variants.bind import check_default
from attnrt.variants.expr import (
    BOOL,
    CTX_FIELDS,
    FLOAT,
    INT,
    KEY_FIELDS,
    LONG,
    Node,
    as_node,
    cast,
    make,
    topological,
)
from attnrt.variants.untraceable import TraceError, untraceable
from attnrt.variants.variant import Bound, PairMap, Param, Variant, check_bounds, input_node

__all__ = ["CTX", "Ctx", "logits", "mask", "output", "trace_pair", "trace_params"]

HookFunction = Callable[..., Any]
_NUMBERS = {"int": INT, "int32": INT, "int64": LONG, "float": FLOAT, "float32": FLOAT}


class Ctx:
    """What a hook may know of the (query, key, head) it is called for; every field is a traced integer."""

    __slots__ = ("_hidden",)
    _hidden: frozenset[str]

    def __init__(self, hidden: frozenset[str] = frozenset()) -> None:
        object.__setattr__(self, "_hidden", hidden)

    def __getattr__(self, name: str) -> Node:
        if name in CTX_FIELDS and name not in self._hidden:
            return make("ctx", CTX_FIELDS[name], attr=name)
        known = ", ".join(f for f in CTX_FIELDS if f not in self._hidden)
        raise untraceable(f"ctx.{name}", f"fields here: {known}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise untraceable(f"an assignment to ctx.{name}", "ctx is read only")


CTX = Ctx()
#: An output hook runs after the last key: it has no key.
ROW_CTX = Ctx(frozenset(KEY_FIELDS))


def trace_params(fn: HookFunction, first: tuple[str, ...]) -> tuple[dict[str, Node], dict[str, Param]]:
    """Nodes and declarations of the arguments after the leading ``first`` ones."""
    arguments = list(inspect.signature(fn).parameters.values())
    label = f"{fn.__name__}{inspect.signature(fn)}"
    positional = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    if any(a.kind in (a.VAR_KEYWORD, a.VAR_POSITIONAL) for a in arguments):
        raise ArgumentError(label, "must name its parameters: no *args, no **kwargs")
    if len(positional) < len(first):
        raise ArgumentError(label, f"must take ({', '.join(first)}, ...)")
    if any(a.name == "ctx" and i != first.index("ctx") for i, a in enumerate(arguments)):
        raise ArgumentError(label, f"must take ({', '.join(first)}, ...) in this order")
    nodes: dict[str, Node] = {}
    params: dict[str, Param] = {}
    for argument in arguments[len(first) :]:
        default = None if argument.default is argument.empty else argument.default
        dtype = _param_dtype(fn, argument, default)
        nodes[argument.name] = make("param", dtype, attr=argument.name)
        params[argument.name] = Param(name=argument.name, dtype=dtype, default=default)
    return nodes, params


def _param_dtype(fn: HookFunction, argument: inspect.Parameter, default: object) -> str:
    note = argument.annotation
    if note is not argument.empty:
        name = note if isinstance(note, str) else getattr(note, "__name__", str(note))
        name = name.strip("'\"").rpartition(".")[2]  # under deferred annotations: "np.int64", "'int64'"
        if name in _NUMBERS:
            return _NUMBERS[name]
        raise ArgumentError(
            f"{fn.__name__}: annotation of {argument.name}",
            "must be int, float, numpy.int64, int32 or float32",
            name,
        )
    if isinstance(default, np.ndarray):
        return {"i": INT, "u": INT}.get(default.dtype.kind, FLOAT)
    return INT if isinstance(default, int) and not isinstance(default, bool) else FLOAT


def _finish_params(name: str, params: dict[str, Param], roots: tuple[Node, ...]) -> tuple[Param, ...]:
    """Give each parameter the rank with which the body uses it."""
    import dataclasses

    ranks: dict[str, set[int]] = {}
    for node in topological(roots):
        if node.op == "param":
            ranks.setdefault(node.attr, set()).add(0)
        elif node.op == "index":
            ranks.setdefault(node.attr, set()).add(len(node.args))
    done = []
    for param in params.values():
        used = ranks.get(param.name, {0})
        if len(used) > 1:
            raise ArgumentError(
                f"{name}: parameter {param.name}", "must be used with one number of indices", sorted(used)
            )
        done.append(check_default(dataclasses.replace(param, rank=used.pop())))
    return tuple(done)


def _call(fn: HookFunction, *args: object, **params: Node) -> Any:
    """Run the user's function; an error of NumPy's or Python's that hides ours is replaced by ours."""
    try:
        return fn(*args, **params)
    except TraceError:
        raise
    except Exception as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, TraceError):
            found = found.__cause__ or found.__context__
        if isinstance(found, TraceError):
            raise found from error
        raise


def _result(fn: HookFunction, value: Any, want: str) -> Node:
    code = fn.__code__
    if value is None:
        raise TraceError(
            fn.__name__,
            "must return a value",
            None,
            "a branch without return ends in None",
            filename=code.co_filename,
            line=code.co_firstlineno,
        )
    node = as_node(value)
    if (want == BOOL) != (node.dtype == BOOL):
        hint = (
            "return a comparison" if want == BOOL else "return a number: at.variants.where(condition, a, b)"
        )
        raise TraceError(
            fn.__name__,
            f"must return {want}",
            node.dtype,
            hint,
            filename=code.co_filename,
            line=code.co_firstlineno,
        )
    return cast(node, want)


def logits(fn: HookFunction) -> Variant:
    """Variant from a function ``(score, ctx, **params) -> score``.

    Parameters
    ----------
    fn : callable
        ``score`` is the logit so far, float32, already scaled by sm_scale; ``ctx`` has the fields of ``Ctx``.
        Called once, now.

    Returns
    -------
    Variant

    Raises
    ------
    TraceError
        Names the line that cannot be traced and the way out.
    """
    nodes, params = trace_params(fn, ("score", "ctx"))
    root = _result(fn, _call(fn, input_node("score"), CTX, **nodes), FLOAT)
    return Variant(name=fn.__name__, params=_finish_params(fn.__name__, params, (root,)), logits=root)


@overload
def mask(fn: HookFunction) -> Variant: ...
@overload
def mask(*, bounds: tuple[Bound, Bound]) -> Callable[[HookFunction], Variant]: ...


def mask(
    fn: HookFunction | None = None, *, bounds: tuple[Bound, Bound] = (None, None)
) -> Variant | Callable[[HookFunction], Variant]:
    """Variant from a function ``(ctx, **params) -> bool``: True where the query sees the key.

    Parameters
    ----------
    fn : callable
        Called once, now. A conjunction of comparisons of ``ctx.kv_pos`` with values of the row is recognised
        as an interval, which kernels test per tile.
    bounds : (left, right)
        Keys outside qo_pos - left <= kv_pos <= qo_pos + right are never seen, so that the planner may skip
        them; each None (unbounded), a number >= 0, or the name of an int parameter (-1: unbounded). They are
        part of the mask: what is skipped and what is masked cannot differ.
    """
    if fn is None:
        return lambda f: _mask(f, bounds)
    return _mask(fn, bounds)


def _mask(fn: HookFunction, bounds: tuple[Bound, Bound]) -> Variant:
    nodes, params = trace_params(fn, ("ctx",))
    root = _result(fn, _call(fn, CTX, **nodes), BOOL)
    done = _finish_params(fn.__name__, params, (root,))
    check_bounds(fn.__name__, bounds, done)
    return Variant(name=fn.__name__, params=done, mask=root, bounds=bounds)


def output(fn: HookFunction) -> Variant:
    """Variant from a function ``(ctx, d, o, **params) -> o`` on the normalised output, element d of a row."""
    nodes, params = trace_params(fn, ("ctx", "d", "o"))
    root = _result(fn, _call(fn, ROW_CTX, input_node("d"), input_node("o"), **nodes), FLOAT)
    return Variant(name=fn.__name__, params=_finish_params(fn.__name__, params, (root,)), output=root)


def trace_pair(
    fn: HookFunction, dim: int | None, pairing: str
) -> tuple[PairMap, dict[str, Param], tuple[Node, ...]]:
    """Pair map from ``(ctx, d, x0, x1, **params) -> (y0, y1)``; "single": ``(ctx, d, x0) -> y0``."""
    single = pairing == "single"
    nodes, params = trace_params(fn, ("ctx", "d", "x0") if single else ("ctx", "d", "x0", "x1"))
    inputs = [input_node(n) for n in (("d", "x0") if single else ("d", "x0", "x1"))]
    value = _call(fn, CTX, *inputs, **nodes)
    if single:
        roots: tuple[Node, ...] = (_result(fn, value, FLOAT),)
    else:
        if not isinstance(value, tuple) or len(value) != 2:
            raise ArgumentError(fn.__name__, "must return a pair (y0, y1)", type(value).__name__)
        roots = tuple(_result(fn, v, FLOAT) for v in value)
    pair = PairMap(dim=dim, pairing=pairing, y0=roots[0], y1=None if single else roots[1])
    return pair, params, roots
