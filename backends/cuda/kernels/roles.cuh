// SPDX-License-Identifier: Apache-2.0
// A kernel whose warps have several roles may be compiled as several programs at once, one for each role, joined
// afterwards (backends/cuda/joined.py): who waits for a new variant waits for the longest role, not for all of them.
// Program 0 (ATTNRT_ROLE is its number) begins the kernel, says which warps have which role, and holds role 0; each
// other one begins where program 0 hands over to it, and holds its role alone.
#pragma once

#ifndef ATTNRT_ROLE
#define ATTNRT_ROLE -1  // all roles in one program
#endif

namespace attnrt {
namespace roles {

constexpr int kProgram = ATTNRT_ROLE;
constexpr bool kBegins = kProgram <= 0;

// Whether the program has what warps of a role do. Which warps they are is asked where the kernel begins; programs of
// other roles are for those alone.
__device__ constexpr bool holds(int role) { return kProgram < 0 || kProgram == role; }

// The rest of the kernel, for the warps that come here, is another program's.
template <int kRole>
__device__ __forceinline__ void hand_over() {
  asm volatile("bra attnrt_role_%0;" ::"n"(kRole) : "memory");
}

}  // namespace roles
}  // namespace attnrt
