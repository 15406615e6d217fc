// The field the parities are computed in: GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1. Adding is XOR.
// The twin is src/regrow/core/coding.py; the loops over bytes are in src/gf.inl.
#pragma once

#include <cstdint>
#include <span>

#include "regrow/kernels.hpp"

namespace regrow {

uint8_t gf_product(uint8_t a, uint8_t b);
uint8_t gf_inverse(uint8_t a);  // of 0: 0

// What data member `member` is multiplied by in parity q of r. A Cauchy matrix with its first row and column scaled
// to ones: every square part of it can be inverted, one parity is a plain XOR, and so is every replica (k = 1).
uint8_t gf_coefficient(uint32_t q, uint32_t member, uint32_t r);

// Whether r parities over k members can be told apart: with more than one of each, the field must have k + r elements.
bool gf_codable(int64_t k, int64_t r);

const GfTable& gf_table(uint8_t coefficient);

// target ^= coefficient * source, on raw bytes. ValueErrors as in shard.hpp.
void gf_xor(std::span<float> target, std::span<const float> source, int64_t coefficient);

// Record i, of `floats` floats, belongs to slots_sorted[i] (strictly rising). Each delta whose slot is among them is
// multiplied and XORed into its record; returns how many were.
size_t xor_matching(std::span<const uint32_t> slots_sorted, std::span<float> records, int64_t floats,
                    std::span<const uint32_t> slots, std::span<const float> deltas, int64_t coefficient);

}  // namespace regrow
