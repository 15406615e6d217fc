// The rows of one server: for every table an arena of records [weights | optimizer state] and a bit per row
// that says whether it was ever changed. Every method checks all it was given before it changes anything.
// A method may be called while another reads; calls that change rows are the caller's to keep apart.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "regrow/arena.hpp"
#include "regrow/layout.hpp"
#include "regrow/optimizers.hpp"

namespace regrow {

struct TableSettings {
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t k = 1;
  int64_t r = 0;
  Optimizer optimizer = Optimizer::sgd;
  OptimizerSettings numbers;
  uint64_t seed = 0;
  double init_bound = 0.0;
  int64_t table = 0;  // its number in the job: part of its placement and of its initial values
};

// What one table takes on one server, in bytes; the same on every server.
size_t shard_bytes(int64_t rows, int64_t dim, int64_t k, int64_t r, int64_t groups, int64_t servers,
                   Optimizer optimizer);

class Shard {
 public:
  Shard(int64_t servers, int64_t server, int64_t groups);
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  size_t add_table(const TableSettings& settings);

  size_t table_count() const { return tables_.size(); }
  size_t memory_bytes() const;
  uint32_t slots(size_t table) const { return at(table).slots; }
  size_t record_floats(size_t table) const { return at(table).records.stride; }
  int64_t servers() const { return servers_; }
  int64_t server() const { return server_; }

  // `counts` says how many of `slots` belong to table 0, table 1, ...; floats are the rows in the same order.
  void gather(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<float> out) const;
  void update(std::span<const int32_t> counts, std::span<const uint32_t> slots, std::span<const float> grads,
              int64_t step);
  void assign_untouched(std::span<const int32_t> counts, std::span<const uint32_t> slots,
                        std::span<const float> weights);

  void read_records(size_t table, int64_t first_slot, int64_t count, std::span<float> out) const;
  void write_records(size_t table, int64_t first_slot, int64_t count, std::span<const float> source);
  std::span<const uint64_t> touched(size_t table) const;

 private:
  struct Table {
    TableSettings settings;
    Layout layout;
    uint32_t slots;
    Arena arena;
    Records records;
  };
  struct Run;  // a piece of a call that lies within one table

  const Table& at(size_t table) const;
  void check_call(std::span<const int32_t> counts, std::span<const uint32_t> slots, size_t floats) const;
  void check_range(size_t table, int64_t first_slot, int64_t count, size_t floats) const;
  template <typename Body>
  void for_runs(std::span<const int32_t> counts, std::span<const uint32_t> slots, Body&& body) const;
  void fill_initial(const Table& table) const;

  int64_t servers_;
  int64_t server_;
  int64_t groups_;
  std::vector<Table> tables_;
};

}  // namespace regrow
