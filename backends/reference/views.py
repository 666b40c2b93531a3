# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays over the views of a call: the reference reads exactly the memory that a kernel would."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.dtypes import as_dtype
from attnrt.tensor import make_view

if TYPE_CHECKING:
    from attnrt.backends.base import Loaded, PagedView

__all__ = ["Part", "cache_array", "part_arrays", "store"]


def cache_array(view: PagedView, heads: int, dim: int) -> np.ndarray:
    """[num_pages, page_size, heads, dim] over K's or V's memory, with its own strides."""
    shape = (view.num_pages, view.page_size, heads, dim)
    strides = (view.stride_page, view.stride_token, view.stride_head, 1)
    return make_view(view.ptr, shape, view.dtype, strides=strides, owner=view.owner).numpy()


class Part:
    """The arrays of one part as NumPy arrays; the names are those of PartViews."""

    def __init__(self, views: Any) -> None:
        self.block_size: int = views.block_size
        self.heads: int = views.heads
        for name in (field.name for field in fields(views)):
            if name not in ("block_size", "heads"):
                view = getattr(views, name)
                setattr(self, name, None if view is None else view.numpy())

    def __getattr__(self, name: str) -> Any:  # only for the checker: fields are set above
        raise AttributeError(name)


def part_arrays(loaded: Loaded) -> list[Part]:
    """All parts of a loaded plan."""
    return [Part(views) for views in loaded.parts]


_FP8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def store(target: np.ndarray, values: np.ndarray, dtype: str) -> None:
    """Round to nearest even into ``target``; fp8 saturates (its formats would give NaN or infinity)."""
    top = _FP8_MAX.get(dtype)
    if top is not None:
        values = np.clip(values, -top, top)  # NaN stays NaN
    with np.errstate(over="ignore", invalid="ignore"):
        target[...] = values.astype(as_dtype(dtype).numpy)
