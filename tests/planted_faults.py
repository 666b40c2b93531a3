# SPDX-License-Identifier: Apache-2.0
"""The planted faults themselves: what each one substitutes, and the test that must turn red (mutants.py plants them)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault.

    Attributes
    ----------
    name : str
    file : str
        Below the root.
    old, new : str
        ``old`` must be in the file exactly once.
    test : str
        What must fail: pytest's arguments below tests/.
    kind : {"python", "native"}
        "native": a header of the CPU backend.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    kind: str = "python"


PYTHON = (
    Mutant(
        name="window off by one",
        file="variants/intervals.py",
        old="end = sat_sub(CTX.qo_pos, distance) if is_left",
        new="end = sat_sub(sat_sub(CTX.qo_pos, distance), 1) if is_left",
        test="cases/test_variant.py -k c26_window_counts",
    ),
    Mutant(
        name="causal is top-left",
        file="formats/requests.py",
        old="pos = iota(total) + np.repeat(kv_lens - indptr[1:], lens) if",
        new="pos = iota(total) - np.repeat(indptr[:-1], lens) if",
        test="cases/test_variant.py -k c47",
    ),
    Mutant(
        name="fold in another order",
        file="backends/reference/merge.py",
        old="            for slot in slots[begin:end]\n            ]\n",
        new="            for slot in slots[begin:end]\n            ][::-1]\n",
        test="attnrt/test_mutants.py -k fold_in_another_order",
    ),
    Mutant(
        name="fp8 without saturation",
        file="backends/reference/views.py",
        old='_FP8_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}',
        new="_FP8_MAX: dict[str, float] = {}",
        test="attnrt/test_append.py -k nearest_even_and_saturates",
    ),
    Mutant(
        name="the last keys of a leaf are dropped",
        file="backends/reference/attend.py",
        old="            min(first + CHUNK, end),",
        new="            min(first + CHUNK, end - 1),",
        test="cases/test_kernel.py -k 'c04 and reference'",
    ),
    Mutant(
        name="an unseen V is multiplied",
        file="backends/reference/attend.py",
        old="    terms[:, 1:][~visible] = 0.0",
        new="    terms[:, 1:] += 0.0",
        test="attnrt/test_mutants.py -k masked_by_multiplying",
    ),
    Mutant(
        name="lse in base 2",
        file="backends/reference/attend.py",
        old="lse = np.where(empty, -np.inf, (m + np.log2(l)) * LN2)",
        new="lse = np.where(empty, -np.inf, m + np.log2(l))",
        test="cases/test_kernel.py -k 'c06 and reference'",
    ),
    Mutant(
        name="a sink in every leaf",
        file="backends/reference/attend.py",
        old="    l = total[:, -1] if here.softmax else",
        new="    sink = here.hooks.sink(ctx)\n    l = total[:, -1] + (0 if sink is None else any_seen) if here.softmax else",
        test="cases/test_variant.py -k 'c69 and reference'",
    ),
    Mutant(
        name="leaves end with a page",
        file="backends/reference/attend.py",
        old='        begin = max(item["kv_begin"], ruler.start(leaf))\n        end = min(item["kv_end"], ruler.start(leaf + 1))',
        new=(
            "        page = here.k.shape[1]\n"
            '        begin = max(item["kv_begin"], ruler.start(leaf) // page * page)\n'
            '        end = min(item["kv_end"], -(-ruler.start(leaf + 1) // page) * page)'
        ),
        test="attnrt/test_bitwise.py -k 'page_size and reference'",
    ),
    Mutant(
        name="a row without keys is skipped",
        file="backends/reference/attend.py",
        old="        start = time.perf_counter_ns()\n",
        new='        start = time.perf_counter_ns()\n        if item["kv_begin"] >= item["kv_end"]:\n            continue\n',
        test="cases/test_kernel.py -k 'c03 and reference'",
    ),
    Mutant(
        name="workers swap items of different sections",
        file="scheduler/level.py",
        old="sections[given] == sections[got] and ",
        new="",
        test="scheduler/test_level.py -k are_levelled",
    ),
    Mutant(
        name="a prefix is cut inside a leaf",
        file="scheduler/plan.py",
        old="        parts, limits = aligned.parts, aligned.limits\n",
        new="        limits = (None,) * len(parts)\n",
        test="cases/test_one_request.py formats/test_run.py -k 'sha256 or forms_of_one_index'",
    ),
    Mutant(
        name="K's strides for V",
        file="attnrt/runtime.py",
        old="else form.v.view(v, size, None),",
        new="else form.k.view(v, size, None),",
        test="cases/test_format.py -k c40",
    ),
    Mutant(
        name="one part's strides for all in a merge",
        file="attnrt/merge.py",
        old="    parts = [x.numpy() for x in call.v]\n",
        new=(
            "    first = call.v[0].numpy().strides\n"
            "    parts = [np.lib.stride_tricks.as_strided(x.numpy(), strides=first) for x in call.v]\n"
        ),
        test="cases/test_kernel.py -k c71",
    ),
    Mutant(
        name="a mask that the variant does not name is ignored",
        file="attnrt/machine.py",
        old="spec = with_mask(self.spec) if features.masked else self.spec",
        new="spec = self.spec",
        test="cases/test_plan.py -k 'c31 or c109'",
    ),
    Mutant(
        name="limits may be passed by one",
        file="attnrt/layout.py",
        old="if given is not None and needed > given:",
        new="if given is not None and needed > given + 1:",
        test="cases/test_workspace.py -k c17",
    ),
    Mutant(
        name="rows are not compared with the plan",
        file="attnrt/operands.py",
        old="        if self.q.shape[0] != needs.num_rows:",
        new="        if self.q.shape[0] < 0:",
        test="cases/test_plan.py -k c42",
    ),
    Mutant(
        name="pairs of the other convention",
        file="variants/rotary.py",
        old='"interleaved" if interleaved else "half"',
        new='"half" if interleaved else "interleaved"',
        test="cases/test_variant.py -k 'c74 and reference'",
    ),
    Mutant(
        name="headers are not in the key",
        file="backends/cpu/jit.py",
        old='" ".join(_options(family)), _headers_hash(), render(variant))',
        new='" ".join(_options(family)), render(variant))',
        test="cases/test_jit.py -k c44",
    ),
    Mutant(
        name="slopes are one geometric series",
        file="variants/linear_bias.py",
        old="    lower = 1 << (int(num_heads).bit_length() - 1)\n",
        new="    lower = int(num_heads)\n",
        test="cases/test_variant.py -k 'c38 and reference'",
    ),
)

HEADERS = "backends/cpu/include/attnrt_cpu/"
NATIVE_MUTANTS = (
    Mutant(
        name="page offsets in 32 bits",
        file=HEADERS + "resolve.h",
        old="        tile.k[j + i] = page * call.k.stride_page + ",
        new="        tile.k[j + i] = static_cast<int32_t>(page * call.k.stride_page) + ",
        test="cases/test_kernel.py -k 'c19 and cpu'",
        kind="native",
    ),
    Mutant(
        name="states fold from the right",
        file=HEADERS + "merge.h",
        old="      const int64_t slot = call.plan.merge_slots[i];",
        new="      const int64_t slot = call.plan.merge_slots[row.slot_end - 1 - i + row.slot_begin];",
        test="cases/test_one_request.py -k 'sha256 and not reference'",
        kind="native",
    ),
    Mutant(
        name="the last tile is dropped",
        file=HEADERS + "few.h",
        old="    for (int64_t at = first; at < hi; at += kv_tile) {",
        new="    for (int64_t at = first; at + kv_tile <= hi || at == first; at += kv_tile) {",
        test="cases/test_kernel.py -k 'c09 and cpu'",
        kind="native",
    ),
    Mutant(
        name="holes are seen",
        file=HEADERS + "softmax.h",
        old="seen[j] = tile.live[j];",
        new="seen[j] = -1;",
        test="cases/test_fuzz.py -k 'nan_everywhere and cpu'",
        kind="native",
    ),
    Mutant(
        name="lse keeps base 2",
        file=HEADERS + "state.h",
        old="static_cast<double>(m) * LN_2 + log(",
        new="static_cast<double>(m) + log2(",
        test="cases/test_kernel.py -k 'c06 and cpu'",
        kind="native",
    ),
)

KERNELS = "backends/cuda/kernels/"
EMULATED, EMULATED_HOPPER = "backends/test_cuda_emulated.py", "backends/test_cuda_emulated_hopper.py"
EMULATED_INDEXES, EMULATED_WIDE = (
    "backends/test_cuda_emulated_indexes.py",
    "backends/test_cuda_emulated_wide.py",
)
#: Seen by tests over the emulated kernels, which need no GPU.
CUDA_MUTANTS = (
    Mutant(
        name="half of a first pass's keys stays behind",
        file=KERNELS + "hopper_passes.cuh",
        old="    if (lane_ < kItemsBegin - 32) keys[lane_ + 32 - kKeys] = line[1];\n",
        new="",
        test=EMULATED_HOPPER + " -k first_passes",
    ),
    Mutant(
        name="page offsets in 32 bits (CUDA)",
        file=KERNELS + "loader.cuh",
        old="return static_cast<long long>(page) * kv.stride_page +",
        new="return static_cast<int>(page * kv.stride_page) +",
        test=EMULATED_HOPPER + " -k strides_of_any",
    ),
    Mutant(
        # To fold it by its weight would be no fault: 0 beside a state that is not empty, and two empty ones finish as one.
        name="an empty state resets the maximum",
        file=KERNELS + "state.cuh",
        old="f = {ma, la, 1.0f, 0.0f, 1};",
        new="f = {mb, la, 1.0f, 0.0f, 1};",
        test=EMULATED_INDEXES + " -k 'true_lengths and causal'",
    ),
    Mutant(
        name="32 states fold from the right",
        file=KERNELS + "merge_states.cuh",
        old="const unsigned mine = state_of(first + min(lane_, count - 1), head);",
        new="const unsigned mine = state_of(first + count - 1 - min(lane_, count - 1), head);",
        test=EMULATED + " -k test_workers",
    ),
    Mutant(
        name="states after the 32 at hand are those at hand",
        file=KERNELS + "merge_stream.cuh",
        old="const unsigned states = n < 0 || n % kLanes + kPlaces < kLanes ? a.now : a.next;",
        new="const unsigned states = a.now;",
        test=EMULATED + " -k 'many_states and 128'",
    ),
    Mutant(
        name="states come through stages that are still wanted",
        file=KERNELS + "decode_merge.cuh",
        old="      if (rows.last && !plan.pairwise) {",
        new="      if (!plan.pairwise) {",
        test=EMULATED + " -k decode_merges_many",
    ),
    Mutant(
        name="a folded run's ends cost what stored ones do",
        file="scheduler/costs.py",
        old='"folded" if fold else "stored"',
        new='"stored"',
        test="scheduler/test_plan_native.py -k drafts",
    ),
    Mutant(
        name="workers that begin late begin with nothing",
        file="scheduler/costs.py",
        old="return [0.0 if worker % count < self.early else self.ahead for worker",
        new="return [0.0 for worker",
        test="scheduler/test_plan_native.py -k mixed_batches",
    ),
    Mutant(
        name="a team's workers lie side by side",
        file="scheduler/assign.py",
        old="lengths[[i // 2 * (num_workers // 2) // pairs * 2 + i % 2 for i in range(busy)]]",
        new="lengths[:busy]",
        test="scheduler/test_assign.py -k spread_by_twos",
    ),
    Mutant(
        name="one call plans on the stream of nobody",
        file="attnrt/api.py",
        old='stream=None if attn.device.kind == "cpu" else attn._runtime.ops.stream(None, q_view)',
        new="stream=None",
        test="backends/test_cuda_driver.py -k one_call",
    ),
    Mutant(
        name="a round for nothing leaves its maximum behind (wide)",
        file=KERNELS + "wide.cuh",
        old="        before = 0;\n        m[0] = m[1] = neg_inf();",
        new="        before = 0;",
        test=EMULATED_WIDE + " -k 'behind and variant0'",
    ),
    Mutant(
        name="tiles start at the item",
        file=KERNELS + "cursor.cuh",
        old="leaf_start + (from - leaf_start) / kTile * kTile;",
        new="from;",
        test=EMULATED_INDEXES + " -k 'forms_of_one_index and 450'",
    ),
    Mutant(
        name="dead keys are loaded",
        file=KERNELS + "loader.cuh",
        old="bool live = offset >= at.item->kv_begin && offset < min(at.item->kv_end, ",
        new="bool live = offset >= 0 && offset < max(at.item->kv_end, ",
        test=EMULATED + " -k 'test_variants and full'",
    ),
    Mutant(
        name="a row of decode sees its neighbour's keys",
        file=KERNELS + "decode.cuh",
        old="bits = bits << 1 | (seen(rows, mask, r, row, c, key_of(half), span) ? 1u : 0u);",
        new="bits = bits << 1 | (seen(rows, mask, r ^ 1, row, c, key_of(half), span) ? 1u : 0u);",
        test=EMULATED + " -k 'test_groups or rows_in_passes'",
    ),
    Mutant(
        name="decode counts a row's states as one",
        file=KERNELS + "decode.cuh",
        old="Merges::count(meta_, plan(), rows, rows.fold ? 1 : leaf);",
        new="Merges::count(meta_, plan(), rows, 1);",
        test=EMULATED + " -k cuts",
    ),
    Mutant(
        name="warps that load for one group take no turns",
        file=KERNELS + "decode_loader.cuh",
        old="      skip_ = team_.size;\n",
        new="      skip_ = 1;\n",
        test=EMULATED + " -k cuts",
    ),
    Mutant(
        name="warps that load for one group run passes ahead",
        file=KERNELS + "decode_loader.cuh",
        old="    if (team_.size > 1) {\n#pragma unroll 1",
        new="    if (team_.size > 9) {\n#pragma unroll 1",
        test=EMULATED + " -k passes_of_warps",
    ),
    Mutant(
        name="a counter is left as it is",
        file=KERNELS + "decode_merge.cuh",
        old="      if (last) *counter = 0;\n",
        new="",
        test=EMULATED + " -k cuts",
    ),
    Mutant(
        name="bits of a tile end one key early (Hopper)",
        file=KERNELS + "hopper_masks.cuh",
        old="__funnelshift_rc(0xffffffffu, 0u, max(32 - n, 0))",
        new="__funnelshift_rc(0xffffffffu, 0u, max(33 - n, 0))",
        test=EMULATED_HOPPER + " -k a_mask_of_bits",
    ),
    Mutant(
        name="a run of keys ends one key late (Hopper)",
        file=KERNELS + "hopper_masks.cuh",
        old="from / 8 * 2 + min(from % 8, 2)",
        new="from / 8 * 2 + min(from % 8 + 1, 2)",
        test=EMULATED_HOPPER + " -k 'boxes_and_keys and 16'",
    ),
    Mutant(
        name="rows that see nothing above 0 follow their least score (Hopper)",
        file=KERNELS + "hopper_softmax.cuh",
        old="if (__any_sync(0xffffffffu, (a | b) < 0)) {",
        new="if (false) {",
        test=EMULATED_HOPPER + " -k 'courses and negative'",
    ),
    Mutant(
        name="a maximum moves and its weights do not (Hopper)",
        file=KERNELS + "hopper_softmax.cuh",
        old="m[half] = stays ? m[half] : x;",
        new="m[half] = x;",
        test=EMULATED_HOPPER + " -k 'courses and slowly'",
    ),
    Mutant(
        name="a warpgroup without rows forgets an item without leaves (Hopper)",
        file=KERNELS + "hopper_buffers.cuh",
        old="    int leaf = item.leaf_begin;\n#pragma unroll 1\n    do {",
        new="    int leaf = item.leaf_begin;\n#pragma unroll 1\n    if (leaf < item.leaf_end) do {",
        test=EMULATED_HOPPER + " -k warpgroups_without_rows",
    ),
    Mutant(
        name="sums of 8-bit products are not kept where a leaf ends (Hopper)",
        file=KERNELS + "hopper_attend.cuh",
        old="      if constexpr (L::kKeeps) keep(x);\n      if (x.offset >= x.stop) break;\n",
        new="      if (x.offset >= x.stop) break;\n      if constexpr (L::kKeeps) keep(x);\n",
        test=EMULATED_HOPPER + " -k under_bounds",
    ),
    Mutant(
        name="the rest of a page is not cleared (Hopper)",
        file=KERNELS + "hopper_boxes.cuh",
        old="for (int after = 0; after < 2; ++after) {",
        new="for (int after = 0; after < 1; ++after) {",
        test=EMULATED_HOPPER + " -k 'bitwise and poison'",
    ),
    Mutant(
        name="a state is read before all lanes have written it (wide)",
        file=KERNELS + "wide_results.cuh",
        old="    __syncwarp();\n    float* const acc =",
        new="    float* const acc =",
        test=EMULATED_WIDE + " -k 'cuts or shared_prefix'",
    ),
    Mutant(
        name="states of leaves lie on each other (wide)",
        file=KERNELS + "wide_results.cuh",
        old="partial_acc + leaf * static_cast<long long>(pass.leaf_states) * L::kDim",
        new="partial_acc",
        test=EMULATED_WIDE + " -k 'cuts or shared_prefix'",
    ),
    Mutant(
        name="an interval ends one key late (wide)",
        file=KERNELS + "wide.cuh",
        old="first + L::kTile - 1) - (first - 1);",
        new="first + L::kTile - 1) - (first - 2);",
        test=EMULATED_WIDE + " -k drafts",
    ),
    Mutant(
        name="pairs of a gathered row turn by those of the first",
        file=KERNELS + "gather.cuh",
        old="Variant::key(params, c, first + d, x[d][0], x[d][1]);",
        new="Variant::key(params, c, d, x[d][0], x[d][1]);",
        test="backends/test_cuda_emulated_append.py -k rotation_of_gathered",
    ),
    Mutant(
        name="a tile of which a row sees less counts as whole (wide)",
        file=KERNELS + "wide_loader.cuh",
        old="(begin + L::kTile - 1 <= rows.high_min)",
        new="(begin <= rows.high_min)",
        test=EMULATED_WIDE + " -k drafts",
    ),
    Mutant(
        name="the next leaf's maximum changes one that has ended (wide)",
        file=KERNELS + "wide.cuh",
        old="{ended ? 1.0f : shrink[0], ended ? 1.0f : shrink[1]}",
        new="{shrink[0], shrink[1]}",
        test=EMULATED_WIDE + " -k 'cuts or shared_prefix'",
    ),
    Mutant(
        name="a scale that is not positive keeps the order (wide)",
        file=KERNELS + "wide.cuh",
        old="const bool raw = kRaw && p.sm_scale > 0.0f;",
        new="const bool raw = kRaw;",
        test=EMULATED_WIDE + " -k scales",
    ),
    Mutant(
        name="rows of a line are one (wide)",
        file=KERNELS + "wide_loader.cuh",
        old="line.qo_row + query - item.q_begin",
        new="line.qo_row",
        test=EMULATED_WIDE + " -k drafts",
    ),
    Mutant(
        name="keys of a V that is turned round lie as in memory",
        file=KERNELS + "hopper_rewrite.cuh",
        old="even = 0x6420, odd = 0x7531;",
        new="even = 0x5410, odd = 0x7632;",
        test=EMULATED_HOPPER + " -k '8_bit_numbers and causal'",
    ),
    Mutant(
        name="a V is turned round before all of it has been read",
        file=KERNELS + "hopper_rewrite.cuh",
        old="    ptx::bar_sync(bar, 128);\n",
        new="",
        test=EMULATED_HOPPER + " -k '8_bit_numbers and causal'",
    ),
    Mutant(
        name="states of weights in 8 bits do not say from where they count",
        file=KERNELS + "hopper_results.cuh",
        old="this->lifted(__fmul_rn(m[half], unit(half)))",
        new="__fmul_rn(m[half], unit(half))",
        test=EMULATED_HOPPER + " -k '8_bit_numbers and causal'",
    ),
    Mutant(
        name="weights in 8 bits rise as far as in 16",
        file=KERNELS + "hopper_softmax.cuh",
        old="kSlack = L::kNarrow ? 0.5f : 8.0f;",
        new="kSlack = 8.0f;",
        test=EMULATED_HOPPER + " -k 'scores_in_8_bits and slowly'",
    ),
    Mutant(
        name="sums that are kept miss maxima that come after them",
        file=KERNELS + "hopper_attend.cuh",
        old="x.scale[0] = __fmul_rn(x.scale[0], x.shrink[0]);",
        new="",
        test=EMULATED_HOPPER + " -k 'scores_in_8_bits and slowly'",
    ),
    Mutant(
        name="O is kept and goes on as well",
        file=KERNELS + "hopper_attend.cuh",
        old="    x.kept = true;\n    x.add = false;\n",
        new="    x.kept = true;\n",
        test=EMULATED_HOPPER + " -k '8_bit_numbers and causal'",
    ),
    Mutant(
        name="scores that are scaled forget their scale",
        file=KERNELS + "hopper_rows.cuh",
        old="Variant::unit(row.hook) * fabsf(p_.sm_scale) * kLog2e",
        new="fabsf(p_.sm_scale) * kLog2e",
        test=EMULATED_HOPPER + " -k '8_bit_numbers and scales'",
    ),
    Mutant(
        name="rounds of late rows lie on each other",
        file=KERNELS + "hopper_results.cuh",
        old="store16(to + round * 64, late.piece[half]);",
        new="store16(to, late.piece[half]);",
        test=EMULATED_HOPPER + " -k rows_written_beside",
    ),
)
MUTANTS = (*PYTHON, *NATIVE_MUTANTS, *CUDA_MUTANTS)
