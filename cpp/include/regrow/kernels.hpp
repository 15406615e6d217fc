// The inner loops, as tables of function pointers: one table per instruction set, all giving the same bits.
// Plain pointers and numbers only: the code behind this header is compiled once per instruction set, and any
// inline function it shared with the rest of the program could be linked in its AVX2 form on a CPU without
// it. Callers have checked every bound; kernels check nothing.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace regrow {

enum class Optimizer : int { sgd, momentum, adagrad, rowwise_adagrad, adam, partial_rowwise_adam };
inline constexpr int optimizer_count = 6;

struct UpdateNumbers {
  float learning_rate, eps, beta1, beta2, momentum, weight_decay;
  float bias1, bias2;  // 1 - beta^step
};

// The records of one table: record `slot` starts at base + slot * stride floats.
struct Records {
  float* base;
  size_t stride;
  size_t dim;
  uint64_t* changed;  // one bit per slot, set by every change; see Shard::Table::touched
};

// A lookup in a plan: where its row starts in the rows of the batch (in floats), and whether it is the first
// lookup of that row.
inline constexpr uint32_t lookup_first = 0x80000000u;
inline constexpr uint32_t lookup_offset = 0x7fffffffu;

// One feature of a batch. Bag b holds lookups bag_start[b] .. bag_start[b + 1], or lookup b alone when
// bag_start is null. Bag b's vector is at matrix + b * matrix_stride.
struct Feature {
  const uint32_t* lookups;
  const uint32_t* bag_start;
  size_t matrix_stride;
  size_t dim;
  bool mean;
};

// Multiplication by one number of GF(2^8): the products of both halves of a byte, to be XORed.
struct GfTable {
  uint8_t low[16];
  uint8_t high[16];
  uint8_t coefficient;
};

struct Kernels {
  const char* name;
  uint32_t (*max_u32)(const uint32_t* values, size_t count);
  void (*fill_initial)(float* weights, size_t dim, uint64_t row_key, float bound);
  // out = weights ^ initial weights, bit by bit.
  void (*xor_initial)(float* out, const float* weights, size_t dim, uint64_t row_key, float bound);
  // past_caches: the output is too large to be still in a cache when it is read.
  void (*gather)(const Records& records, const uint32_t* slots, size_t count, float* out, bool past_caches);
  void (*update[optimizer_count])(const Records& records, const uint32_t* slots, size_t count, const float* grads,
                                  const UpdateNumbers& numbers);
  void (*pool)(const Feature& feature, const float* rows, size_t bag_begin, size_t bag_end, float* matrix);
  // Adds only into offsets begin <= offset < end, so that several threads can share a table without a lock.
  void (*unpool)(const Feature& feature, const float* matrix, size_t bag_begin, size_t bag_end, uint32_t offset_begin,
                 uint32_t offset_end, float* grads);
  // Row i is copied to target + index * dim when targets[i] = index | lookup_first, and added there
  // otherwise.
  void (*add_rows)(const uint32_t* targets, size_t count, size_t dim, const float* source, float* target);
  uint32_t (*crc32c)(uint32_t crc, const uint8_t* data, size_t size, const struct Crc32cTables& tables);
  // target = a ^ b; target may be a or b.
  void (*xor_bytes)(uint8_t* target, const uint8_t* a, const uint8_t* b, size_t size);
  // target ^= coefficient * source; they do not overlap.
  void (*gf_xor)(uint8_t* target, const uint8_t* source, size_t size, const GfTable& table);
};

// Tables for CRC-32C: `slices` for eight bytes at a time, `shift` to append `crc32c_lane` zero bytes to a
// register.
inline constexpr size_t crc32c_lane = 1024;
struct Crc32cTables {
  uint32_t slices[8][256];
  uint32_t shift[4][256];
};

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace regrow
