#include "regrow/dispatch.hpp"

#include <atomic>
#include <stdexcept>
#include <string>

namespace regrow {
namespace {

// Null where the program or this CPU has no AVX2.
const Kernels* avx2_kernels() {
#if defined(REGROW_HAS_AVX2)
  __builtin_cpu_init();
  const bool whole_level = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                           __builtin_cpu_supports("sse4.2");
  return whole_level ? &avx2::kernels : nullptr;
#else
  return nullptr;
#endif
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels = avx2_kernels() ? avx2_kernels() : &portable::kernels;
  return kernels;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

void set_simd(std::string_view level) {
  if (level == "portable") {
    chosen().store(&portable::kernels, std::memory_order_relaxed);
  } else if (level == "avx2") {
    if (!avx2_kernels()) throw std::invalid_argument("this CPU or build has no AVX2; use 'portable'");
    chosen().store(avx2_kernels(), std::memory_order_relaxed);
  } else {
    throw std::invalid_argument("unknown SIMD level '" + std::string(level) + "'; choose 'avx2' or 'portable'");
  }
}

}  // namespace regrow
