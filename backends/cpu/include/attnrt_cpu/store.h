// SPDX-License-Identifier: Apache-2.0
// append(): rows of K or V into the pool, scaled and rounded on the way; rows of the pool's own type whose scale is 1
// are copied bit by bit.

static int store_rows(const attnrt_store* call) {
  const attnrt_store& s = *call;
  const int padded = (s.head_dim + W - 1) / W * W;
  if (!scratch().reserve(sizeof(float) * static_cast<size_t>(padded))) return 1;
  float* x = reinterpret_cast<float*>(scratch().memory);
  const WidenRow widen = loops.widen[s.src_dtype];
  const int64_t num_slots = s.dst.num_pages * s.dst.page_size, size = element_size(s.dst_dtype);
  const bool same = s.src_dtype == s.dst_dtype;
  for (int64_t row = 0; row < s.num_rows; ++row) {
    const int64_t slot = s.slots[row];
    if (slot < 0 || slot >= num_slots) continue;
    const int64_t page = slot / s.dst.page_size, token = slot - page * s.dst.page_size;
    for (int head = 0; head < s.num_heads; ++head) {
      const int64_t from = row * s.src_stride_row + head * s.src_stride_head;
      const int64_t to = page * s.dst.stride_page + token * s.dst.stride_token + head * s.dst.stride_head;
      char* out = static_cast<char*>(const_cast<void*>(s.dst.ptr)) + to * size;
      const float scale = s.scale ? s.scale[head * s.scale_stride_head] : 1.0f;
      if (same && scale == 1.0f) {
        __builtin_memcpy(out, static_cast<const char*>(s.src) + from * size, static_cast<size_t>(s.head_dim * size));
        continue;
      }
      widen(s.src, from, s.head_dim, padded, x);
      for (int d = 0; d < s.head_dim; ++d) store_element(out, d, s.dst_dtype, x[d] / scale);
    }
  }
  return 0;
}

// Copy whole pages, token by token and head by head: the pool may be a strided view.
static int copy_pages(const attnrt_page_copy* call) {
  const attnrt_page_copy& c = *call;
  char* memory = static_cast<char*>(const_cast<void*>(c.pool.ptr));
  const size_t bytes = static_cast<size_t>(c.head_dim) * static_cast<size_t>(c.element_size);
  for (int64_t i = 0; i < c.num_pages; ++i)
    for (int64_t token = 0; token < c.pool.page_size; ++token)
      for (int64_t head = 0; head < c.num_heads; ++head) {
        const int64_t inside = token * c.pool.stride_token + head * c.pool.stride_head;
        __builtin_memcpy(memory + (c.to[i] * c.pool.stride_page + inside) * c.element_size,
                         memory + (c.from[i] * c.pool.stride_page + inside) * c.element_size, bytes);
      }
  return 0;
}
