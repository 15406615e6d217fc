// A worker's side of a batch: which distinct rows it needs, on which server each lives, and how they become
// (and receive gradients from) one vector per bag. A Plan serves both the pull and the push of its batch.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "regrow/buffer.hpp"
#include "regrow/dedupe.hpp"
#include "regrow/layout.hpp"

namespace regrow {

struct RouterSettings {
  std::vector<int64_t> rows, dims, k, r, table_index;  // per table
  std::vector<bool> mean_pooling;                      // per table
  std::vector<bool> expanded;                          // per table: its rows are wanted one by one, not pooled
  std::vector<int64_t> feature_tables;                 // the table each feature looks up in
  std::vector<int64_t> static_tables;                  // tables all of whose rows are in every plan
  int64_t servers = 1;
  int64_t rings = 1;
};

// What never changes between the batches of a router; plans share it.
struct RouterTables {
  struct Table {
    uint32_t rows;
    uint32_t dim;
    bool mean;
    bool is_expanded;
    bool is_static;
    Layout layout;
    std::vector<uint32_t> features;
    // Static tables only: every row's place and its number among the table's rows on that server.
    std::vector<Place> places;
    std::vector<uint32_t> ranks;
    std::vector<int32_t> server_counts;
  };
  explicit RouterTables(const RouterSettings& settings);

  std::vector<Table> tables;
  std::vector<uint32_t> feature_tables;
  std::vector<size_t> feature_columns;  // where each feature's vector begins in a pooled row
  size_t width = 0;                     // floats in a pooled row
  uint32_t servers;
};

class Plan {
 public:
  std::vector<int32_t> counts;  // [server][table]
  Buffer<uint32_t> slots;       // [server][table][order of first occurrence]
  std::vector<int64_t> row_start;
  std::vector<int64_t> float_start;
  int64_t lookups = 0;
  int64_t distinct = 0;  // rows that were looked up; static rows are not
  int64_t floats() const { return float_start.back(); }
  size_t batch() const { return batch_; }
  const RouterTables& tables() const { return *tables_; }

  void pool(std::span<const float> rows, std::span<float> out) const;
  void unpool(std::span<const float> grad, std::span<float> grads) const;
  // Of a feature whose table is expanded: one vector for each of its ids, in their order; and the way back, feature
  // after feature in ascending order.
  size_t expanded_floats(int64_t feature) const;
  void expand(int64_t feature, std::span<const float> rows, std::span<float> out) const;
  void collapse(int64_t feature, std::span<const float> grad, std::span<float> grads) const;
  void static_get(int64_t table, std::span<const float> rows, std::span<float> out) const;
  void static_put(int64_t table, std::span<const float> source, std::span<float> grads) const;

 private:
  friend class Router;
  Feature feature(size_t index) const;
  Feature expanded_feature(int64_t index) const;
  size_t feature_begin(size_t feature) const {  // in lookups_
    return bag_start_.size() ? bag_start_[feature * batch_] : feature * batch_;
  }
  const RouterTables::Table& static_table(int64_t table, size_t rows_floats, size_t table_floats) const;
  size_t float_base(size_t server, size_t table) const { return float_base_[server * tables_->tables.size() + table]; }

  std::shared_ptr<const RouterTables> tables_;
  size_t batch_ = 0;
  Buffer<uint32_t> lookups_;        // one per value, as in kernels.hpp
  Buffer<uint32_t> bag_start_;      // empty when every bag has one id
  std::vector<size_t> float_base_;  // [server][table]: where its rows begin
};

class Router {
 public:
  explicit Router(const RouterSettings& settings);
  Router(const Router&) = delete;
  Router& operator=(const Router&) = delete;
  ~Router();

  const RouterTables& tables() const { return *tables_; }

  // Values are feature-major; `lengths` has one entry per (feature, sample), or nothing when all are one.
  Plan plan(std::span<const int64_t> values, std::optional<std::span<const int32_t>> lengths, int64_t batch);

 private:
  struct Wrong;  // the first id out of range, if any
  struct Placed;
  struct Work;
  void find_bags(Plan& plan, std::span<const int64_t> values, std::optional<std::span<const int32_t>> lengths,
                 int64_t batch) const;
  void begin_plan(Plan& plan, Work& work, size_t lookups) const;
  void number_table(Plan& plan, Work& work, std::span<const int64_t> values, size_t table, size_t lane);
  void lay_out(Plan& plan, Work& work) const;
  void place_table(Plan& plan, const Work& work, size_t table) const;

  std::shared_ptr<const RouterTables> tables_;
  std::mutex mutex_;  // the scratch below serves one plan at a time
  struct Lane {
    Dedupe dedupe;
    std::vector<uint32_t> ranks;
  };
  std::unique_ptr<Work> work_;
  std::vector<Lane> lanes_;
};

}  // namespace regrow
