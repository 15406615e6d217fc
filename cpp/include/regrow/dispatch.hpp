// Which instruction set the kernels use: the best this CPU has, or what a test or benchmark asked for.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "regrow/kernels.hpp"

namespace regrow {

const Kernels& kernels();
std::vector<std::string> simd_levels();  // what this CPU and build have, the best first
void set_simd(std::string_view level);   // one of them; throws std::invalid_argument

}  // namespace regrow
