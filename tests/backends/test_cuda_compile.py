# SPDX-License-Identifier: Apache-2.0
"""Every shipped kernel through NVRTC for sm_80 and sm_90a, with no GPU: registers and spills by ptxas's log; bad texts."""

from __future__ import annotations

import warnings

import pytest

import attnrt as at
from attnrt.backends.cuda import append, merge_parts
from attnrt.backends.cuda.joined import FRAME
from attnrt.backends.cuda.machine_code import overwritten_operands
from attnrt.backends.cuda.render import (
    ATTEND,
    DECODE,
    HOPPER,
    MERGE,
    THREADS,
    WIDE,
    entry_names,
    render,
    render_roles,
    threads_of,
    waits,
)
from attnrt.backends.cuda.tables import WIDE as WIDE_TEAM
from attnrt.backends.cuda.tables import WIDE_CTAS, decode_groups, hopper_config, tile_config, traits_for
from attnrt.errors import CompileError
from attnrt.variants import compose

nvrtc = pytest.importorskip("attnrt.backends.cuda.nvrtc")
if nvrtc.why_not_nvrtc() is not None:
    pytest.skip(nvrtc.why_not_nvrtc(), allow_module_level=True)
pytestmark = pytest.mark.compile

v = at.variants
ARCHS = ("sm_80", "sm_90a")
REGISTERS = 65536  # of a multiprocessor, on both


def spec(**changes):
    base = {
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "q_dtype": "bfloat16",
        "variant": v.causal(),
    }
    return at.AttentionSpec(**{**base, **changes})


ALL = (v.rope(64), v.causal(), v.sliding_window(300), v.softcap(20.0), v.alibi(), v.sink_logits(-1.0))
LATENT = {"num_kv_heads": 1, "head_dim": 576, "head_dim_vo": 512, "shared_kv": True, "sm_scale": 0.1}
SPECS = {
    "bf16 128": {},
    "all hooks": {"variant": ALL},
    "fp8 128": {"kv_dtype": "float8_e4m3fn", "variant": (v.causal(), v.fp8_scales())},
    "sigmoid mask": {"variant": (v.custom_mask(), v.sigmoid())},
    "fp16 64": {"q_dtype": "float16", "head_dim": 64},
    "groups of 8": {"num_kv_heads": 4},
    "16 rows": {"num_kv_heads": 2},
    "window, softcap": {"variant": (v.causal(), v.sliding_window(300), v.softcap(20.0), v.sink_logits(-1.0))},
    "bf16 72": {"head_dim": 72},
    "bf16 192/128": {"head_dim": 192, "head_dim_vo": 128},
    "bf16 256": {"head_dim": 256},
    "bf16 512": {"head_dim": 512},
    "latent": LATENT,
}


def forms(s, kernel):
    """The ways in which a kernel is compiled: in one piece (nvcc), by the roles of its warps (NVRTC), if it has them."""
    return dict.fromkeys(((), render_roles(s, kernel)))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SPECS)
def test_registers_and_spills(name, arch):
    s = spec(**SPECS[name])
    found, logs = {}, ""
    for kernel in entry_names(s):
        source = render(s, kernel)
        assert waits(source, (kernel,))
        for roles in forms(s, kernel):
            code, log = nvrtc.compile_kernel(source, (kernel,), roles, arch, name)
            assert code.startswith(b"\x7fELF") and (FRAME in log) == bool(roles)
            assert set(nvrtc.resources(log)) == {kernel}, log
            assert nvrtc.resources(log)[kernel].spilled == 0, log
            found |= nvrtc.resources(log)
            logs += log
    assert found[ATTEND].stack == 0
    assert found[ATTEND].registers * THREADS * tile_config(s).ctas_per_sm <= REGISTERS
    assert found[MERGE].registers <= 128
    if DECODE in found:
        assert found[DECODE].stack <= 640  # of the pairwise fold, nothing in a loop over tiles
        assert found[DECODE].registers * threads_of(s, DECODE) * decode_groups(s) <= REGISTERS
    assert not nvrtc.warnings_of(logs), logs


#: Bytes of spill stores that the Hopper kernel may have (boxes, key by key; then the same with folds): ptxas gives each of
#: its threads 168 registers at entry, the loaders live in 72 or 104, and hooks take theirs from the consumers. By boxes and
#: without hooks it is the warp that reads the plan whose registers spill, once a pass. The more of the two ways of compiling it:
#: by roles it is less where no stage rewrites tiles (plain forms of 128 and less: 0).
HOPPER_SPECS = {
    "bf16 128": ({}, (4, 4, 16, 4)),
    # Three warpgroups of consumers leave the loader 32 registers; theirs spill a few words at the ends of leaves.
    "fp16 64": ({"q_dtype": "float16", "head_dim": 64}, (390, 420, 474, 496)),
    "64, window, sinks": (
        {"head_dim": 64, "variant": (v.causal(), v.sliding_window(300), v.sink_logits(-1.0))},
        (390, 428, 474, 504),
    ),
    "64, softcap": ({"head_dim": 64, "variant": (v.causal(), v.softcap(20.0))}, (16, 4, 16, 4)),
    "192/128": ({"head_dim": 192, "head_dim_vo": 128}, (28, 4, 28, 4)),
    # O takes 128 registers, and the next leaf's first scores are under way while it is written; nothing spills between two
    # whole tiles.
    "256": ({"head_dim": 256}, (128, 72, 184, 112)),
    "128/64, float32": ({"head_dim_vo": 64, "out_dtype": "float32"}, (8, 4, 8, 4)),
    "sigmoid": ({"variant": (v.causal(), v.sigmoid())}, (4, 4, 28, 12)),
    "window, softcap": (
        {"variant": (v.causal(), v.sliding_window(300), v.softcap(20.0))},
        (60, 56, 132, 104),
    ),
    "alibi": ({"variant": (v.causal(), v.alibi())}, (16, 4, 32, 20)),
    # What spills lies at the ends of the loop over tiles, nothing in it.
    "mask": ({"variant": (v.custom_mask(),)}, (44, 32, 108, 96)),
    # 512 threads of 128 registers at entry: the consumers have 200 or 192.
    "e4m3": ({"kv_dtype": "float8_e4m3fn"}, (28, 16, 96, 84)),
    "e4m3 of e4m3": (
        {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "out_dtype": "bfloat16"},
        (8, 8, 120, 128),
    ),
    "e4m3 of e4m3, one level": (
        {
            **{"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "out_dtype": "bfloat16"},
            "two_level": False,
        },
        (4, 4, 36, 32),
    ),
    "rope": ({"variant": (v.causal(), v.rope(128))}, (236, 156, 312, 232)),
    "rope of q": ({"variant": (v.causal(), v.rope(128, keys=False))}, (140, 68, 204, 132)),
}


@pytest.mark.slow  # four forms a spec, half a minute
@pytest.mark.parametrize("name", HOPPER_SPECS)
def test_the_hopper_kernel(name):
    """No product is serialised (C75xx), no more registers spill than known."""
    changes, most = HOPPER_SPECS[name]
    s = spec(**changes)
    for kernel, spilled in zip(HOPPER, most, strict=True):
        source = render(s, kernel)
        assert waits(source, (kernel,))
        for roles in forms(s, kernel):
            code, log = nvrtc.compile_kernel(source, (kernel,), roles, "sm_90a", name)
            assert overwritten_operands(code) == [] and (FRAME in log) == bool(roles)
            used = nvrtc.resources(log)[kernel]
            assert used.registers * threads_of(s, kernel) <= REGISTERS
            assert used.spilled <= spilled, (len(roles), used)
            assert not nvrtc.warnings_of(log), log


def test_what_a_user_is_warned_of():
    """Products that are serialised and more spilled bytes than any shipped kernel has; nothing else."""
    report = nvrtc.NvrtcBackend().report
    log = "ptxas         .     0 bytes stack frame, {} bytes spill stores, 8 bytes spill loads\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, most in HOPPER_SPECS.values():
            report("a kernel", log.format(max(most)) + "(C7519) warpgroup.arrive is injected")
    for text in (log.format(nvrtc.MOST_SPILLED + 4), "(C7510) wgmma.mma_async instructions are serialized"):
        with pytest.warns(RuntimeWarning, match="a kernel: .*(spilled|serialized)"):
            report("a kernel", text)


#: The same of the wide kernel; what spills is the loading warps', which live in 72 registers.
WIDE_SPECS = {
    "bf16 128": ({}, 16),
    "fp16 64": ({"q_dtype": "float16", "head_dim": 64}, 16),
    "window, softcap": (
        {"variant": (v.causal(), v.sliding_window(300), v.softcap(20.0), v.sink_logits(-1.0))},
        16,
    ),
    "alibi": ({"variant": (v.causal(), v.alibi())}, 24),
    "sigmoid, mask": ({"variant": (v.custom_mask(), v.sigmoid())}, 32),
}


@pytest.mark.parametrize("name", WIDE_SPECS)
def test_the_wide_kernel(name):
    changes, most = WIDE_SPECS[name]
    s = spec(**changes)
    source = render(s, WIDE)
    assert waits(source, (WIDE,))
    code, log = nvrtc.compile_source(source, "sm_90a", name)
    assert overwritten_operands(code) == []
    used = nvrtc.resources(log)[WIDE]
    assert used.registers * threads_of(s, WIDE) * WIDE_CTAS <= REGISTERS
    assert used.spilled <= most, used
    assert not nvrtc.warnings_of(log), log


def test_which_specs_the_hopper_kernel_takes():
    """And that nothing else decides: a request's bits are its spec's and its length's."""
    takes = [name for name in SPECS if hopper_config(spec(**SPECS[name])) is not None]
    assert takes == [
        *("bf16 128", "all hooks", "fp8 128", "sigmoid mask", "fp16 64", "groups of 8", "16 rows"),
        *("window, softcap", "bf16 192/128", "bf16 256"),
    ]
    narrow = {"head_dim": 64}
    for changes, rows in (
        ({}, 128),
        (narrow, 192),
        ({**narrow, "variant": (v.causal(), v.sliding_window(9), v.sink_logits(-1.0))}, 192),
        ({**narrow, "variant": v.softcap(20.0)}, 128),
        ({**narrow, "variant": v.custom_mask()}, 128),
        ({**narrow, "variant": v.rope(64)}, 128),
        ({**narrow, "kv_dtype": "float8_e4m3fn"}, 128),
    ):
        s = spec(**changes)
        assert hopper_config(s).rows == rows
        assert [c.q_tile for c in traits_for(s, 132, "batch", hopper=True).classes[1:]] == [rows] * 2
    narrow = {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "out_dtype": "float16"}
    assert hopper_config(spec(**narrow)) == hopper_config(spec(kv_dtype="float8_e4m3fn"))
    for changes in (
        narrow | {"head_dim": 64},
        narrow | {"kv_dtype": "float8_e5m2"},
        narrow | {"variant": v.rope(128)},
        narrow | {"variant": v.sigmoid()},
        {"head_dim": 256, "kv_dtype": "float8_e4m3fn"},
        {"variant": v.rope(24)},
        {"kv_dtype": "float32"},
    ):
        assert hopper_config(spec(**changes)) is None
    for name, changes in SPECS.items():
        s = spec(**changes)
        assert (set(HOPPER) <= set(entry_names(s, hopper=True))) == (name in takes)
        assert not set(HOPPER) & set(entry_names(s))
        classes = traits_for(s, 132, "batch", hopper=True).classes
        wide = hopper_config(s) or tile_config(s)
        assert [c.kv_tile for c in classes[1:]] == [wide.kv_tile] * 2
        token = traits_for(s, 132, "token", hopper=True)
        assert [c.kv_tile for c in token.classes] == [c.kv_tile for c in traits_for(s, 132, "token").classes]
        assert all(team.name == WIDE_TEAM for team in token.teams)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_append_and_copies(kv_dtype, arch):
    source = append.render_append(spec(kv_dtype=kv_dtype), "bfloat16", compose(v.rope(64, interleaved=True)))
    found = nvrtc.resources(nvrtc.compile_source(source, arch, "append")[1])
    assert set(found) == set(append.ENTRIES)
    assert all(used.spilled == 0 and used.stack == 0 for used in found.values()), found


@pytest.mark.parametrize("arch", ARCHS)
def test_merge_of_parts(arch):
    found = nvrtc.resources(nvrtc.compile_source(merge_parts.render_merge_parts("float16"), arch, "merge")[1])
    assert found[merge_parts.MERGE_PARTS].spilled == 0


BAD = {
    "syntax": ("return s +;", "expected an expression"),
    "unknown name": ("return s * nosuchthing;", "nosuchthing"),
    "second line": ("float x = s;\nreturn x * missing;", "missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_in_a_users_text(name):
    text, message = BAD[name]
    s = spec(head_dim=64, variant=(v.causal(), v.cpp("own", logits=text)))
    for roles in forms(s, DECODE):
        with pytest.raises(CompileError, match=message) as caught:
            nvrtc.compile_kernel(render(s, DECODE), (DECODE,), roles, "sm_90a", "the kernel of own")
        assert caught.value.line == (2 if name == "second line" else 1)
        assert message in caught.value.log and "own" in caught.value.log


def test_the_rendered_text_is_the_key():
    """Values of parameters and the layout are data; hooks, dtypes and dims are code."""
    same = [spec(variant=v.sliding_window(n), kv_layout=layout) for n, layout in ((5, "NHD"), (700, "HND"))]
    for kernel in (ATTEND, DECODE, MERGE):
        assert render(same[0], kernel) == render(same[1], kernel)
    assert len({render(spec(**SPECS[name]), ATTEND) for name in SPECS}) == len(SPECS)


def test_the_merge_is_compiled_once_for_all_logits():
    """Its text holds no more of a spec than it reads."""
    plain = render(spec(), MERGE)
    for change in (
        {"variant": (v.rope(64), v.sliding_window(9), v.softcap(20.0), v.alibi(), v.custom_mask())},
        {"variant": v.cpp("own", logits="s * 2.0f", params={"x": 1.0})},
        {"kv_dtype": "float8_e5m2", "variant": v.causal()},
        {"head_dim": 192, "head_dim_vo": 128},
    ):
        assert render(spec(**change), MERGE) == plain, change
    for change in (
        {"variant": v.sink_logits(-1.0)},
        {"variant": v.sigmoid()},
        {"variant": v.cpp("own", output="o * 2.0f")},
        {"out_dtype": "float32"},
        {"head_dim": 64},
        {"num_kv_heads": 4},
    ):
        assert render(spec(**change), MERGE) != plain, change
