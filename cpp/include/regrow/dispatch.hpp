// Which instruction set the kernels use: the best this CPU has, or what a test or benchmark asked for.
#pragma once

#include <string_view>

#include "regrow/kernels.hpp"

namespace regrow {

const Kernels& kernels();
void set_simd(std::string_view level);  // "avx2" or "portable"; throws std::invalid_argument

}  // namespace regrow
