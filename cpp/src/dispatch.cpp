#include "regrow/dispatch.hpp"

#include <atomic>
#include <stdexcept>
#include <string>

namespace regrow {
namespace {

// Null where the program or this CPU has no AVX2.
const Kernels* avx2_kernels() {
#if defined(REGROW_HAS_X86_LEVELS)
  __builtin_cpu_init();
  const bool whole_level = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                           __builtin_cpu_supports("sse4.2");
  return whole_level ? &avx2::kernels : nullptr;
#else
  return nullptr;
#endif
}

// Null where the program or this CPU has not all that -march=x86-64-v4 may use.
const Kernels* avx512_kernels() {
#if defined(REGROW_HAS_X86_LEVELS)
  const bool whole_level = avx2_kernels() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512vl");
  return whole_level ? &avx512::kernels : nullptr;
#else
  return nullptr;
#endif
}

// The best first.
const Kernels* found_kernels(std::string_view level) {
  if (level == "avx512") return avx512_kernels();
  if (level == "avx2") return avx2_kernels();
  if (level == "portable") return &portable::kernels;
  throw std::invalid_argument("unknown SIMD level '" + std::string(level) + "'; choose 'avx512', 'avx2' or 'portable'");
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels = found_kernels(simd_levels().front());
  return kernels;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

std::vector<std::string> simd_levels() {
  std::vector<std::string> levels;
  for (const char* level : {"avx512", "avx2", "portable"})
    if (found_kernels(level)) levels.emplace_back(level);
  return levels;
}

void set_simd(std::string_view level) {
  const Kernels* found = found_kernels(level);
  if (!found)
    throw std::invalid_argument("this CPU or build has no '" + std::string(level) + "'; use '" + simd_levels().front() +
                                "'");
  chosen().store(found, std::memory_order_relaxed);
}

}  // namespace regrow
