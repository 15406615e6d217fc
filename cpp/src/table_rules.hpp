// Part of the sources of Shard and TieredShard: what settings of a table can be, its initial values, and the parts of
// its records.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "regrow/dispatch.hpp"
#include "regrow/init.hpp"
#include "regrow/shard.hpp"

namespace regrow {

inline std::string text(int64_t number) { return std::to_string(number); }

inline void check_finite(const char* name, double value, double least) {
  if (!(value >= least) || !(value <= 3.0e38))
    throw std::invalid_argument(std::string(name) + " must be a finite number of at least " + std::to_string(least) +
                                ", not " + std::to_string(value));
}

inline void check_share(const char* name, double value) {
  if (!(value >= 0.0 && value < 1.0))
    throw std::invalid_argument(std::string(name) + " must be in [0, 1), not " + std::to_string(value));
}

inline void check_shape(int64_t rows, int64_t dim) {
  if (rows < 1 || rows > rows_max)
    throw std::invalid_argument("rows must be between 1 and " + text(rows_max) + ", not " + text(rows));
  if (dim < 1 || dim > dim_max)
    throw std::invalid_argument("dim must be between 1 and " + text(dim_max) + ", not " + text(dim));
}

inline void check_settings(const TableSettings& settings) {
  check_shape(settings.rows, settings.dim);
  check_finite("learning_rate", settings.numbers.learning_rate, 0.0);
  check_finite("eps", settings.numbers.eps, 0.0);
  check_finite("weight_decay", settings.numbers.weight_decay, 0.0);
  check_finite("init_bound", settings.init_bound, 0.0);
  check_share("beta1", settings.numbers.beta1);
  check_share("beta2", settings.numbers.beta2);
  check_share("momentum", settings.numbers.momentum);
}

// The numbers of every table at one step. `rates`: its learning rate for just this call; none: that of its settings.
template <typename Tables>
std::vector<UpdateNumbers> numbers_of(const Tables& tables, int64_t step, std::span<const double> rates) {
  if (!rates.empty() && rates.size() != tables.size())
    throw std::invalid_argument(std::to_string(rates.size()) + " learning rates for " + std::to_string(tables.size()) +
                                " tables");
  std::vector<UpdateNumbers> numbers;
  for (size_t t = 0; t < tables.size(); ++t) {
    OptimizerSettings settings = tables[t].settings.numbers;
    if (counts_steps(tables[t].settings.optimizer) && step < 1)
      throw std::invalid_argument("step must be at least 1, not " + text(step));
    if (!rates.empty()) settings.learning_rate = rates[t];
    check_finite("learning_rate", settings.learning_rate, 0.0);
    numbers.push_back(numbers_at(settings, step));
  }
  return numbers;
}

inline uint32_t checked_slots(const Layout& layout, int64_t rows) {
  const uint64_t slots = layout.slots_per_server(static_cast<uint64_t>(rows));
  if (slots > static_cast<uint64_t>(rows_max))
    throw std::invalid_argument("a table of " + text(rows) + " rows needs more slots than 32 bits can number");
  return static_cast<uint32_t>(slots);
}

// The initial weights of a row; those of a hole are zero.
inline void write_initial_weights(const Layout& layout, const TableSettings& settings, int64_t server, uint32_t slot,
                                  uint64_t initial_key, float* weights) {
  const uint64_t row = layout.row_of(static_cast<uint32_t>(server), slot);
  const auto dim = static_cast<size_t>(settings.dim);
  if (row >= static_cast<uint64_t>(settings.rows)) {
    std::memset(weights, 0, dim * sizeof(float));
    return;
  }
  kernels().fill_initial(weights, dim, row_key(initial_key, row), static_cast<float>(settings.init_bound));
}

// out = weights ^ the initial weights of their row, which of a hole are zero.
inline void xor_initial_weights(const Layout& layout, const TableSettings& settings, int64_t server, uint32_t slot,
                                uint64_t initial_key, const float* weights, float* out) {
  const uint64_t row = layout.row_of(static_cast<uint32_t>(server), slot);
  const auto dim = static_cast<size_t>(settings.dim);
  if (row >= static_cast<uint64_t>(settings.rows)) {
    std::memcpy(out, weights, dim * sizeof(float));
    return;
  }
  kernels().xor_initial(out, weights, dim, row_key(initial_key, row), static_cast<float>(settings.init_bound));
}

struct RecordPart {  // floats that follow each other
  size_t first;
  size_t width;
};

// Weights, then the optimizer's state: as many parts as wide as the weights as there are, and what is left.
inline std::vector<RecordPart> record_parts(const TableSettings& settings) {
  const auto dim = static_cast<size_t>(settings.dim);
  const size_t end = dim + static_cast<size_t>(state_floats(settings.optimizer, settings.dim));
  std::vector<RecordPart> parts;
  for (size_t first = 0; first < end; first += dim) parts.push_back({first, std::min(dim, end - first)});
  return parts;
}

// The rows in these slots, rising, and the slots in the same order; holes, which no row has, come last and do not
// count.
inline size_t number_rows(const Layout& layout, int64_t table_rows, int64_t server_number, std::span<uint32_t> slots,
                          uint32_t* ids) {
  const auto server = static_cast<uint32_t>(server_number);
  for (size_t i = 0; i < slots.size(); ++i) {
    const uint32_t slot = slots[i];
    // No row has the largest number there is, so a hole that has a larger one need not keep it.
    const auto id = static_cast<uint32_t>(std::min<uint64_t>(layout.row_of(server, slot), UINT32_MAX));
    size_t at = i;  // with k > 1, slots of one block of stripes change places: never by more than k
    for (; at > 0 && ids[at - 1] > id; --at) {
      ids[at] = ids[at - 1];
      slots[at] = slots[at - 1];
    }
    ids[at] = id;
    slots[at] = slot;
  }
  const auto rows = static_cast<uint64_t>(table_rows);
  return static_cast<size_t>(std::lower_bound(ids, ids + slots.size(), rows) - ids);
}

}  // namespace regrow
