// SPDX-License-Identifier: Apache-2.0
// What kernels take from outside, included before any compiler target is set: its inline functions must stay portable.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <utility>

#include "attnrt_cpu/abi.h"
#include "attnrt_cpu/scratch.h"
#include "attnrt_variant.h"
