# SPDX-License-Identifier: Apache-2.0
"""Programs of a kernel's roles joined in PTX: names, scopes, what is refused; the same kernels by NVRTC."""

from __future__ import annotations

import re

import pytest

from attnrt import AttentionSpec, variants
from attnrt.backends.cuda.joined import FRAME, NotJoined, framed, join
from attnrt.backends.cuda.render import ATTEND, DECODE, HOPPER, MERGE, WIDE, render, render_roles
from attnrt.errors import CompileError

HEAD = "//\n// a compiler's\n.version 9.0\n.target sm_90a\n.address_size 64\n\n"
ENTRY = """\t// .globl\tkernel
.visible .entry kernel(
\t.param .align 8 .b8 kernel_param_0[16]
)
.maxntid 64
{
\t.reg .b32 \t%r<3>;

BODY
\tret;

}
"""


def program(body, beside=""):
    return HEAD + beside + ENTRY.replace("BODY", body)


FUNCTION = """.func  (.param .b32 func_retval0) help(
\t.param .b32 help_param_0
)
;
.func  (.param .b32 func_retval0) help(
\t.param .b32 help_param_0
)
{
\tret;

}
"""


def test_bodies_stand_in_scopes_of_their_own():
    text = join([program("\tbra attnrt_role_1; // go"), program("\tmov.u32 %r1, 5;")], "kernel")
    assert text.count(".entry") == 1 and "//" not in text and ".version" not in text
    entry = re.sub(r"\s+", " ", text)
    assert entry.endswith(
        ".maxntid 64 { { .reg .b32 %r<3>; bra attnrt_role_1; ret; } attnrt_role_1: { .reg .b32 %r<3>; mov.u32 %r1, 5; ret; } }"
    )


def test_three_roles():
    bodies = ["\tbra attnrt_role_2;\n\tbra attnrt_role_1;", "\tmov.u32 %r1, 1;", "\tmov.u32 %r1, 2;"]
    text = join([program(body) for body in bodies], "kernel")
    assert (
        text.index("attnrt_role_1:")
        < text.index("%r1, 1;")
        < text.index("attnrt_role_2:")
        < text.index("%r1, 2;")
    )


def test_what_programs_define_keeps_apart():
    """Of one name and not of one text: each body calls its own; a longer name, and what is only declared, stay as they are."""
    shared = (
        ".extern .shared .align 16 .b8 ring[];\n.extern .func  (.param .b32 func_retval0) vprintf\n(\n)\n;\n"
    )
    call = "\tcall (%r1), help, (%r2);\n\tmov.u32 %r2, ring;\n\tmov.u32 %r2, helper;\n\tcall vprintf;"
    helper = ".const .align 4 .b8 helper[8] = {1, 2, 3, 4, 5, 6, 7, 8};\n"
    first, second = (shared + helper + FUNCTION.replace("\tret;", f"\t// {i}\n\tret;") for i in "ab")
    text = join([program("\tbra attnrt_role_1;\n" + call, first), program(call, second)], "kernel")
    bodies = text.split("attnrt_role_1:")
    assert "help, " in bodies[0] and "help$role1, " in bodies[1] and "help, " not in bodies[1]
    assert "helper;" in bodies[0] and "helper$role1;" in bodies[1]
    assert text.count("ring[];") == 1 and text.count("ring;") == 2
    assert text.count("call vprintf") == 2 and "vprintf$" not in text
    assert len(re.findall(r"^\.func.*\bhelp\(", text, re.M)) == 2
    assert len(re.findall(r"^\.func.*\bhelp\$role1\(", text, re.M)) == 2


def test_variables_that_a_later_role_does_not_read_are_left_out():
    beside = (
        ".global .align 4 .u32 bytes = 7;\n.global .align 4 .u32 seen = 8;\n"
        ".global .align 8 .u64 at[1] = {seen};\n.global .align 8 .u64 mine[1] = {generic(at)};\n"
    )
    text = join([program("\tbra attnrt_role_1;", beside), program("\tmov.u64 %r1, mine;", beside)], "kernel")
    names = re.findall(r"^\.global.* ([\w$]+)(?:\[1\])? =", text, re.M)
    assert names == ["bytes", "seen", "at", "mine", "seen$role1", "at$role1", "mine$role1"]
    assert "mine$role1[1] = {generic(at$role1)};" in text


SIZE = ".global .align 4 .u32 attnrt_smem_bytes = 7;\n"
BEGINS = program("\tbra attnrt_role_1;")
REFUSED = {
    "another head": [BEGINS, program("").replace(".maxntid 64", ".maxntid 32")],
    "another entry": [BEGINS, program("").replace("kernel", "other")],
    "two entries": [BEGINS, program("", ENTRY.replace("kernel", "other"))],
    "no entry": [BEGINS, HEAD],
    "a role that nobody hands over to": [program(""), program("")],
    "a role that is not there": [BEGINS.replace("bra", "bra attnrt_role_2;\nbra"), program("")],
    "static shared memory": [BEGINS, program("", ".shared .align 4 .b8 mine[16];\n")],
    "static shared memory of a name": [BEGINS, program("", ".visible .shared .align 4 .u32 mine;\n")],
    "another size": [program("\tbra attnrt_role_1;", SIZE), program("", SIZE.replace("7", "8"))],
    "a size that one program says": [BEGINS, program("", SIZE)],
    "half a text": [BEGINS, program("")[:-5]],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_joined(name):
    with pytest.raises(NotJoined):
        join(REFUSED[name], "kernel")


def spec(*more, **changes):
    base = {"num_qo_heads": 8, "num_kv_heads": 8, "head_dim": 128, "q_dtype": "bfloat16"}
    return AttentionSpec(**{**base, **changes}, variant=(variants.causal(), *more))


def bent(by):
    @variants.logits
    def bend(score, ctx):
        return score + by * score * score

    return bend


def test_who_brings_keys_has_one_text_for_many_variants():
    """Logits are a matter of those that compute; whether there are any, whether they ask where keys are, bounds, and hooks
    on q are not."""
    first = {name: render_roles(spec(bent(0.5)), name)[0] for name in (DECODE, *HOPPER)}
    assert len(set(first.values())) == len(first)
    for other in (spec(bent(0.25)), spec(variants.cpp("own", logits="s * s"))):
        for name, text in first.items():
            assert render_roles(other, name)[0] == text
            assert render_roles(other, name)[1] != render_roles(spec(bent(0.5)), name)[1]
    for other in (spec(variants.alibi()), spec(variants.sigmoid()), spec(variants.softcap(9.0))):
        for name, text in first.items():  # but for the parameters
            told = render_roles(other, name)[0]
            flags = [
                re.findall(rf"{flag} = (true|false)", x)
                for x in (told, text)
                for flag in ("has_logits", "logits_need_keys")
            ]
            assert flags[:2] == flags[2:]
    reads = spec(variants.cpp("own", logits="s + ctx.kv_pos"))
    assert render_roles(reads, DECODE)[0] == first[DECODE]
    assert render_roles(reads, HOPPER[0])[0] != first[HOPPER[0]]  # tables of keys
    for other in (spec(), spec(bent(0.5), variants.rope(128)), spec(bent(0.5), variants.sliding_window(9))):
        assert render_roles(other, DECODE)[0] != first[DECODE]


def test_which_kernels_are_compiled_by_roles():
    plain, fp8 = spec(), spec(kv_dtype="float8_e4m3fn")
    others = (ATTEND, MERGE, WIDE)
    assert [len(render_roles(plain, name)) for name in (*others, DECODE, *HOPPER)] == [0] * 3 + [2] * 5
    assert [len(render_roles(fp8, name)) for name in (*others, DECODE, *HOPPER)] == [0] * 3 + [2] + [0] * 4
    assert [len(render_roles(spec(variants.rope(128)), name)) for name in HOPPER] == [3] * 4


@pytest.fixture
def nvrtc():
    module = pytest.importorskip("attnrt.backends.cuda.nvrtc")
    if module.why_not_nvrtc() is not None:
        pytest.skip(module.why_not_nvrtc())
    return module


@pytest.mark.compile
def test_a_frame_hands_text_on_to_the_assembler(nvrtc):
    ptx = join([program("\tbra attnrt_role_1;"), program("\tmov.u32 %r1, 5;")], "kernel")
    code, log = nvrtc.compile_source(framed(ptx), "sm_90a", "a kernel")
    assert set(nvrtc.resources(log)) == {"kernel"} and FRAME in log and b"kernel" in code
    with pytest.raises(CompileError, match="NVRTC") as caught:
        nvrtc.compile_source(framed(ptx.replace("mov.u32", "move")), "sm_90a", "a kernel")
    assert "move" in caught.value.log


@pytest.mark.compile
def test_what_variants_share_is_compiled_once(nvrtc, monkeypatch):
    """Two variants: three programs, and the same kernel again from what is kept."""
    asked, ptx_of = [], nvrtc._ptx_of

    def counted(source, options, label):
        asked.append(source)
        return ptx_of(source, options, label)

    monkeypatch.setattr(nvrtc, "_ptx_of", counted)
    for by in (0.515625, 0.265625):
        s = spec(bent(by), head_dim=64)
        code, log = nvrtc.compile_kernel(render(s, DECODE), (DECODE,), render_roles(s, DECODE), "sm_90a", "x")
        assert code.startswith(b"\x7fELF") and set(nvrtc.resources(log)) == {DECODE}
    later = [text for text in asked if not text.startswith("#define ATTNRT_ROLE 0")]
    assert len(later) == 2 and len(asked) <= 3


@pytest.mark.compile
def test_a_hooks_own_shared_memory_and_tables(nvrtc):
    """What a hook holds beside its code comes along, under whatever name."""
    text = "__shared__ float x[4];\nstatic const float y[4] = {1, 2, 3, 5};\nx[0] = s;\nreturn x[0] * y[ctx.kv_pos & 3];"
    s = spec(variants.cpp("own", logits=text), head_dim=64)
    code, log = nvrtc.compile_roles(render_roles(s, DECODE), DECODE, "sm_90a", "x")
    assert code.startswith(b"\x7fELF") and set(nvrtc.resources(log)) == {DECODE}


@pytest.mark.compile
def test_what_is_not_joined_is_compiled_in_one_piece(nvrtc, monkeypatch):
    def refuse(programs, name):
        raise NotJoined("static shared memory")

    monkeypatch.setattr(nvrtc, "join", refuse)
    s = spec(bent(0.5), head_dim=64)
    _, log = nvrtc.compile_kernel(render(s, DECODE), (DECODE,), render_roles(s, DECODE), "sm_90a", "x")
    assert set(nvrtc.resources(log)) == {DECODE} and FRAME not in log


@pytest.mark.compile
def test_assembly_that_the_assembler_refuses(nvrtc):
    """The error is that of the kernel in one piece, with its log."""
    s = spec(variants.cpp("own", logits='asm volatile("nonsense;");\nreturn s;'), head_dim=64)
    roles = render_roles(s, DECODE)
    with pytest.raises(NotJoined):
        nvrtc.compile_roles(roles, DECODE, "sm_90a", "x")
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_kernel(render(s, DECODE), (DECODE,), roles, "sm_90a", "x")
    assert "nonsense" in caught.value.log and not isinstance(caught.value.__context__, NotJoined)
