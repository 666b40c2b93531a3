// SPDX-License-Identifier: Apache-2.0
// The prefill harness with few kernels, for comparing changes: built in a fraction of the time, each build a change.
//   nvcc ... -DPREFILL_TRACE -o steps benchmarks/experiments/prefill_steps.cu; steps [short|all|costs|one S [gather]]
#define PREFILL_MAIN
#include "prefill.cu"

#ifndef STEPS_GATHER
#define STEPS_GATHER false
#endif

// As the runtime plans: sections of 8 MB, a pass priced at 3.5 tiles.
static Setup planned(int page, bool gather, int reps = 12) {
  Setup s = setup(page, gather, 8, 0, reps);
  s.fixed = 3.5;
  return s;
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "short";
  Bench b;
  const int sizes[] = {512, 1024, 2048, 4096, 8192, 16384};
  const double fa3[] = {318.8, 443.9, 569.7, 599.6, 629.5, 655.7},
               fa3_full[] = {495.5, 568.4, 616.8, 655.9, 661.9, 670.8};
  auto square = [](int s) { return Problem{16384 / s, s, s, 16, 16, 128}; };
  if (what == "one") {  // a single launch, for a profiler
    const int s = atoi(argv[2]);
    report<1, 128, 2, CausalVariant, STEPS_GATHER>(b, "one", square(s), planned(argc > 3 ? 1 : 0, argc > 3, 1), 0);
    return 0;
  }
#ifdef STEPS_VARIANTS
  if (what == "variants") {
    for (int s : {2048, 16384}) {
      report<1, 128, 2, CausalVariant>(b, "causal", square(s), planned(0, false), 0);
      report<1, 128, 2, SoftcapVariant>(b, "softcap", square(s), planned(0, false), 0);
      report<1, 128, 2, WindowVariant>(b, "window", square(s), planned(0, false), 0);
      report<1, 128, 2, AlibiVariant>(b, "alibi", square(s), planned(0, false), 0);
      report<1, 128, 2, SigmoidVariant>(b, "sigmoid", square(s), planned(0, false), 0);
    }
    report<1, 64, 3, CausalVariant>(b, "causal", {8, 2048, 2048, 32, 32, 64}, planned(0, false), 0);
    return 0;
  }
#endif
  for (const Problem s : {Problem{3, 333, 333, 4, 4, 128}, Problem{2, 200, 1111, 4, 4, 128}}) {
    for (int workers : {0, 7}) {
      report<1, 128, 2, CausalVariant, STEPS_GATHER>(b, "check", s, setup(0, false, 0, workers, 0), 0);
      report<1, 128, 2, CausalVariant, STEPS_GATHER>(b, "check", s, setup(16, false, 0, workers, 0), 0);
      if (STEPS_GATHER) report<1, 128, 2, CausalVariant, STEPS_GATHER>(b, "check", s, setup(1, true, 0, workers, 0), 0);
    }
  }
#ifdef PREFILL_TRACE
  for (int s : {512, 2048, 16384}) {
    report<1, 128, 2, CausalVariant, STEPS_GATHER>(b, "causal", square(s), planned(0, false, 3), 0);
    print_trace(("causal" + std::to_string(s)).c_str());
    report<1, 128, 2, FullVariant>(b, "full", square(s), planned(0, false, 3), 0);
    print_trace(("full" + std::to_string(s)).c_str());
    if (STEPS_GATHER) {
      report<1, 128, 2, CausalVariant, STEPS_GATHER>(b, "gather", square(s), planned(1, true, 3), 0);
      print_trace(("gather" + std::to_string(s)).c_str());
    }
  }
  return 0;
#endif
  for (int i = 0; i < 6; ++i) {
    if (what == "short" && i > 2 && i < 5) continue;
    for (double fixed : {0.8, 1.5, 2.5, 3.5}) {
      if (fixed != 3.5 && (i > 1 || what != "costs")) continue;
      Setup set = planned(0, false);
      set.fixed = fixed;
      report<1, 128, 2, CausalVariant, STEPS_GATHER>(b, fixed == 3.5 ? "causal" : "causal fixed", square(sizes[i]), set,
                                                     fa3[i]);
    }
    if (STEPS_GATHER)
      report<1, 128, 2, CausalVariant, STEPS_GATHER>(b, "gather", square(sizes[i]), planned(1, true), 0);
    report<1, 128, 2, FullVariant>(b, "full", square(sizes[i]), planned(0, false), fa3_full[i]);
  }
  return 0;
}
