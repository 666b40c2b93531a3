# SPDX-License-Identifier: Apache-2.0
"""Which tile a spec gets, and what that makes of the machine: the kernels' constants and the traits for the planner.

A tile's keys and the division of them among four warps decide bits, so they come from a fixed table by head_dim and dtype, never
from lengths. Rows per tile and CTAs per SM only decide time. The numbers follow from an occupancy model: registers hold
acc[rows][head_dim_vo / 4] twice (a leaf and the total), shared memory holds Q, P and the stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnrt.dtypes import as_dtype
from attnrt.scheduler.base import NumericClass, Ruler, Sharing, Team, Traits
from attnrt.scheduler.machines import APPEND_RULER, DECODE_RULER, ONE_LEAF

if TYPE_CHECKING:
    from attnrt.spec import AttentionSpec

__all__ = [
    "APPEND_ROWS",
    "DECODE_ROWS",
    "HOPPER",
    "WIDE",
    "HopperConfig",
    "TileConfig",
    "hopper_config",
    "takes_wide",
    "tile_config",
    "traits_for",
]

#: Dtype names to the enumerators of kernels/types.cuh.
ENUMERATORS = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """Constants of one instantiation of the tile kernel (``Config`` of kernels/layout.cuh).

    Attributes
    ----------
    q_type, q_stored_type, kv_type, out_type : str
        Enumerators of ``Dtype``; ``q_type`` is that of the products, in which q is stored unless it has 8 bits.
    group, head_dim, head_dim_vo : int
    m_blocks : int
        16-row blocks per tile.
    kv_tile : int
        Keys per tile.
    stages : int
        Tiles in shared memory, at least 2.
    shared_kv : bool
    ctas_per_sm : int
        For the register budget (__launch_bounds__) and the grid.
    q_blocks : int
        8-row blocks per tile of the decode kernel; 0: it does not take the spec.
    groups : int
        Most groups of a CTA of the decode kernel.
    """

    q_type: str
    q_stored_type: str
    kv_type: str
    out_type: str
    group: int
    head_dim: int
    head_dim_vo: int
    m_blocks: int
    kv_tile: int
    stages: int
    shared_kv: bool
    ctas_per_sm: int
    q_blocks: int
    groups: int

    @property
    def rows(self) -> int:
        """Query-head rows per tile."""
        return 16 * self.m_blocks


def narrow(spec: AttentionSpec) -> bool:
    """Whether q has 8 bits. The Hopper kernel multiplies e4m3 as it is, the other kernels both formats in float16, which holds
    them exactly."""
    return as_dtype(spec.q_dtype).itemsize == 1


def tile_config(spec: AttentionSpec) -> TileConfig:
    """The tile of a spec."""
    wide = max(spec.head_dim, spec.head_dim_vo)
    if wide <= 128:
        m_blocks, kv_tile, stages, ctas = 2, 64, 2, 2
    elif wide <= 256:
        m_blocks, kv_tile, stages, ctas = 1, 32, 2, 2
    else:
        m_blocks, kv_tile, stages, ctas = 1, 32, 2, 1
    return TileConfig(
        q_type="f16" if narrow(spec) else ENUMERATORS[spec.q_dtype],
        q_stored_type=ENUMERATORS[spec.q_dtype],
        kv_type=ENUMERATORS[spec.kv_dtype],
        out_type=ENUMERATORS[spec.out_dtype],
        group=spec.group,
        head_dim=spec.head_dim,
        head_dim_vo=spec.head_dim_vo,
        m_blocks=m_blocks,
        kv_tile=kv_tile,
        stages=stages,
        shared_kv=spec.shared_kv,
        ctas_per_sm=ctas,
        q_blocks=decode_blocks(spec),
        groups=decode_groups(spec),
    )


#: Groups of the decode kernel per multiprocessor, each a worker with 48 KB of stages and 160 threads of 96 registers.
DECODE_GROUPS = 4


def decode_groups(spec: AttentionSpec) -> int:
    """Groups of a CTA of the decode kernel, where shared memory holds so many: what 16 rows with hooks need beside the stages
    leaves no room for the fourth."""
    composed = spec.composed
    hooks = composed.logits is not None or composed.mask is not None
    return DECODE_GROUPS - (hooks and decode_blocks(spec) == 2)


def decode_blocks(spec: AttentionSpec) -> int:
    """8-row blocks of the decode kernel, one or two; 0 where the tile kernel does all: other head dims, hooks that rewrite
    K or V, more query heads per KV head than a tile has rows."""
    dims = spec.head_dim == spec.head_dim_vo and spec.head_dim in (64, 128) and not spec.shared_kv
    plain = spec.composed.key_map is None and spec.composed.value is None
    return -(-spec.group // 8) if dims and plain and spec.group <= 16 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfig:
    """Constants of one instantiation of the Hopper prefill kernel (``Config`` of kernels/hopper_layout.cuh).

    Attributes
    ----------
    kv_tile : int
        Keys per tile; part of the numeric class.
    warpgroups : int
        Consumer warpgroups of 64 rows.
    rewrites : bool
        A warpgroup of its own rewrites tiles between load and multiply.
    """

    kv_tile: int
    warpgroups: int
    rewrites: bool = False

    @property
    def rows(self) -> int:
        """Query-head rows per pass."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a CTA: the consumers, a warpgroup that loads, one that rewrites."""
        return 128 * (self.warpgroups + 1 + self.rewrites)


#: (head_dim, head_dim_vo) that the Hopper kernel takes: two buffers each of K and V, and one or two of Q, fit in shared memory.
HOPPER_DIMS = {
    (64, 64): HopperConfig(kv_tile=128, warpgroups=3),
    (128, 64): HopperConfig(kv_tile=128, warpgroups=2),
    (128, 128): HopperConfig(kv_tile=128, warpgroups=2),
    (192, 128): HopperConfig(kv_tile=128, warpgroups=2),
    (256, 256): HopperConfig(kv_tile=64, warpgroups=2),
}

#: Names of teams: of the kernel for items of many rows, and of the Hopper kernel.
WIDE, HOPPER = "wide", "hopper"

#: Query-head rows of a request up to which it is a decode step: the class of its own bits, on every device.
DECODE_ROWS = 64

#: And up to which it is an append, whose leaves of 4096 keys several workers may take. Longer ones are one leaf.
APPEND_ROWS = 2048

#: K and V that the Hopper kernel's workers read at one time: what stays in an H200's second-level cache beside the Q and the
#: results that pass through it (measured: performance.md).
SECTION_BYTES = 8 << 20
#: Keys that a pass of the Hopper kernel costs beside its own (measured: performance.md).
PASS_KEYS = 192.0
#: What a key costs a pass of one, two or three warpgroups of a kernel that has three (measured: performance.md; one by estimate).
SIZES = ((64, 75), (128, 105), (192, 124))


def hopper_config(spec: AttentionSpec) -> HopperConfig | None:
    """The Hopper kernel's constants for a spec; None where it does not take it: other dims or types, pairs of numbers that
    do not fill four words, V inside K's rows. A matter of the spec alone, being part of what a request's bits depend on."""
    composed = spec.composed
    hooks = [hook for hook in (composed.query, composed.key_map, composed.value) if hook is not None]
    widens = spec.kv_dtype != spec.q_dtype
    types = not widens or spec.kv_dtype in ("float8_e4m3fn", "float8_e5m2")
    words = all(hook.dim is None or hook.dim % (16 if hook.pairing == "half" else 8) == 0 for hook in hooks)
    found = HOPPER_DIMS.get((spec.head_dim, spec.head_dim_vo))
    if found is None or not types or not words or spec.shared_kv:
        return None
    if narrow(spec):  # products of what is stored; V is turned round by the stage that rewrites
        bare = not hooks and composed.use_softmax
        dims = (spec.head_dim, spec.head_dim_vo) == (128, 128)
        taken = bare and dims and spec.q_dtype == spec.kv_dtype == "float8_e4m3fn"
        return replace(found, rewrites=True) if taken else None
    # Three warpgroups of consumers leave 160 registers to each of their threads: what holds more than a row's bounds has two.
    bare = composed.logits is None and composed.mask is None and not composed.reads_index_mask
    if not bare or hooks or widens:
        found = replace(found, warpgroups=2)
    if not hooks and not widens:
        return found
    # 512 threads get 128 registers each at entry, too few for products of 256 columns (ptxas C7602).
    return replace(found, rewrites=True) if spec.head_dim_vo <= 128 else None


#: FLOP per second in whole tiles of the Hopper kernel and bytes per second of the decode kernel on an H200, and seconds that one
#: more kernel in a run costs (performance.md).
FLOPS, BYTES, LAUNCH = 667e12, 4.4e12, 5e-6

#: Part of the multiprocessors that would read all that memory gives, if each read what it can beside the Hopper kernel
#: (performance.md, E22).
OVERLAP = 0.55

#: The decode kernel's workers (performance.md, E11, E17): times its share that one reads at most, at 512 bytes a key, that one
#: loading warp brings, and that it brings from blocks that are no runs of 16 tokens; how much uneven multiprocessors count;
#: seconds of second items, of a merge, and of each state of the row that has most.
ALONE, WARP, SCATTERED, BUSY = 3.3, 2.1, 1.25, 1.0
AGAIN, MERGE, FOLD = 3e-6, 1.8e-6, 0.09e-6

#: Query-head rows of a tile of the wide kernel, and its CTAs per multiprocessor.
WIDE_ROWS, WIDE_CTAS = 64, 2
#: Keys that the end of a leaf costs it: where the leaf's state is stored, and where it is folded (performance.md, E19, E20).
LEAF_STORED, LEAF_FOLDED = 96.0, 48.0


#: Leaves of the decode kernel's rows, by head_dim and bytes of a cache's element, where they were measured against DECODE_RULER
#: (performance.md, E11): a row that has the machine to itself is as slow as its longest leaf.
LEAVES = {
    (128, 2): Ruler(steps=((8, 128), (12, 256), (24, 512), (48, 1024)), tail=2048),
    (128, 1): Ruler(steps=((16, 256), (24, 512), (48, 1024)), tail=2048),
}
#: The same for so few KV heads: long rows of them have too few leaves for all workers (performance.md, E21).
FEW_HEADS = 2
LEAVES_OF_FEW = LEAVES | {(128, 2): Ruler(steps=((8, 128), (12, 256), (120, 512)), tail=1024)}


def decode_ruler(spec: AttentionSpec) -> Ruler:
    """Leaves of decode rows: a matter of the spec alone, for they decide bits."""
    if not decode_blocks(spec):
        return DECODE_RULER
    known = LEAVES_OF_FEW if spec.num_kv_heads <= FEW_HEADS else LEAVES
    return known.get((spec.head_dim, as_dtype(spec.kv_dtype).itemsize), DECODE_RULER)


def takes_wide(spec: AttentionSpec) -> bool:
    """Whether there is a wide kernel of a spec (on sm_90): what the decode kernel takes, with K and V in q's type and no hook
    on q. Elsewhere the tile kernel runs items of many rows, with the same bits."""
    plain = spec.kv_dtype == spec.q_dtype and not narrow(spec)
    return decode_blocks(spec) > 0 and plain and spec.composed.query is None


def _wide_team(team: Team, tile: TileConfig | None, beta_rows: float) -> Team:
    """The crew for items too wide for a tile of the decode kernel, on so many multiprocessors: the wide kernel's, or (``tile``)
    the tile kernel's."""
    if tile is not None:
        workers = team.num_workers * tile.ctas_per_sm
        return replace(team, num_workers=workers, alpha=1.0, beta_rows=beta_rows, fixed=64.0)
    return replace(
        team,
        num_workers=team.num_workers * WIDE_CTAS,
        fixed=128.0,
        unit=WIDE_CTAS / DECODE_GROUPS,
        again=256.0,
        stored=LEAF_STORED,
        folded=LEAF_FOLDED,
    )


def _beside_decode(team: Team, spec: AttentionSpec, config: HopperConfig, key_bytes: int) -> Team:
    """The Hopper kernel's crew where the decode kernel runs beside it: what a key of a pass costs of one that a worker reads."""
    multiply = 2.0 * config.rows * (spec.head_dim + spec.head_dim_vo) / FLOPS
    return replace(team, unit=multiply / (key_bytes * DECODE_GROUPS / BYTES), overlap=OVERLAP)


def _sharing(spec: AttentionSpec, key_bytes: int, unit: float) -> Sharing:
    """Of the decode kernel's workers; ``unit``: seconds of a unit of costs."""
    return Sharing(
        workers=decode_groups(spec),
        alone=max(1.0, ALONE * key_bytes / 512),
        warp=max(1.0, WARP * key_bytes / 512),
        scattered=max(1.0, SCATTERED * key_bytes / 512),
        run=16,
        busy=BUSY,
        again=AGAIN / unit,
        merge=MERGE / unit,
        fold=FOLD / unit,
    )


def traits_for(spec: AttentionSpec, multiprocessors: int, deterministic: str, hopper: bool = False) -> Traits:
    """What the planner needs to know of the kernels on a device with this many multiprocessors.

    With the tile kernel alone, decode and prefill rows have the same bits inside a leaf; only the rulers differ, so "token"
    mode is one class. On a device that has it (``hopper``), the Hopper kernel takes all requests past decode steps.
    """
    config = tile_config(spec)
    many = WIDE_ROWS if hopper and takes_wide(spec) else config.rows
    wide = hopper_config(spec) if hopper and deterministic != "token" else None

    def klass(name: str, max_rows: int | None, ruler: Ruler, kv_tile: int, rows: int) -> NumericClass:
        q_tile = max(rows, spec.group)
        return NumericClass(name=name, max_rows=max_rows, kv_tile=kv_tile, q_tile=q_tile, ruler=ruler)

    if deterministic == "token":
        classes: tuple[NumericClass, ...] = (klass("token", None, DECODE_RULER, config.kv_tile, many),)
    else:
        long = (wide.kv_tile, wide.rows) if wide is not None else (config.kv_tile, many)
        classes = (
            klass("decode", DECODE_ROWS, decode_ruler(spec), config.kv_tile, many),
            klass("append", APPEND_ROWS, APPEND_RULER, *long),
            klass("prefill", None, ONE_LEAF, *long),
        )
    # In units of one key of one KV head read from memory. A tile of 16 rows costs its loads; each further row block adds the
    # multiply of the tile at the rate of mma.sync.
    key_bytes = as_dtype(spec.kv_dtype).itemsize * (
        spec.head_dim + (0 if spec.shared_kv else spec.head_dim_vo)
    )
    beta_rows = (spec.head_dim + spec.head_dim_vo) / (64 * key_bytes)
    teams = []
    if config.q_blocks:
        team = Team(name=WIDE, first_class=0, rows=8 * config.q_blocks, num_workers=multiprocessors)
        teams.append(_wide_team(team, None if many != config.rows else config, beta_rows))
    if wide is not None:
        section = SECTION_BYTES // key_bytes
        team = Team(
            name=HOPPER,
            first_class=1,
            num_workers=multiprocessors,
            fixed=PASS_KEYS,
            section=section,
            tile=wide.kv_tile,
            sizes=SIZES if wide.warpgroups == 3 else (),
        )
        teams.append(_beside_decode(team, spec, wide, key_bytes) if config.q_blocks else team)
    # Seconds that a key costs a worker while all others read as well.
    unit = key_bytes * multiprocessors * DECODE_GROUPS / BYTES
    return Traits(
        name=f"cuda-sm{multiprocessors}",
        num_workers=multiprocessors * (decode_groups(spec) if config.q_blocks else config.ctas_per_sm),
        classes=classes,
        alpha=1.0,
        beta=1.0,
        beta_rows=beta_rows,
        fixed=64.0,
        teams=tuple(teams),
        # Sharing is weighed where it was measured (performance.md, E8).
        launch=LAUNCH / unit if hopper and config.q_blocks else 0.0,
        state=8.0 * (spec.head_dim_vo + 2) / key_bytes,
        repeated=0.4,
        sharing=_sharing(spec, key_bytes, unit) if config.q_blocks else None,
    )
