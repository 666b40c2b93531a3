// SPDX-License-Identifier: Apache-2.0
// Runs of bits, little-endian within a byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

// All of `bits` ones, the rest of the last byte zeros.
inline void fill_bits(uint8_t* to, int64_t bits) {
  std::memset(to, 0xFF, size_t((bits + 7) / 8));
  if (bits % 8) to[bits / 8] = uint8_t((1u << (bits % 8)) - 1);
}

// A byte of `to` at a time; reads and writes no byte that holds none of the bits.
inline void copy_bits(uint8_t* to, int64_t to_bit, const uint8_t* from, int64_t from_bit, int64_t count) {
  while (count > 0) {
    const int shift = int(to_bit & 7), n = int(std::min<int64_t>(8 - shift, count)), skip = int(from_bit & 7);
    unsigned bits = unsigned(from[from_bit >> 3]) >> skip;
    if (skip + n > 8) bits |= unsigned(from[(from_bit >> 3) + 1]) << (8 - skip);
    const unsigned mask = ((1u << n) - 1) << shift;
    uint8_t& byte = to[to_bit >> 3];
    byte = uint8_t((byte & ~mask) | ((bits << shift) & mask));
    to_bit += n, from_bit += n, count -= n;
  }
}
