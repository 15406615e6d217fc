#include "regrow/router.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "regrow/dispatch.hpp"
#include "regrow/thread_pool.hpp"

namespace regrow {
namespace {

constexpr size_t lookups_max = Dedupe::keys_max;
constexpr size_t floats_max = lookup_first;  // offsets share 32 bits with a flag
// Samples pooled together: their part of the output stays in cache while the features take turns.
constexpr size_t bags_per_task = 64;

std::string text(int64_t number) { return std::to_string(number); }

void check_same_length(const char* name, size_t size, size_t expected) {
  if (size != expected)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(size) + " entries; rows has " +
                                std::to_string(expected));
}

void check_floats(const char* name, size_t size, size_t expected) {
  if (size != expected)
    throw std::invalid_argument(std::string(name) + " must have " + std::to_string(expected) + " floats, not " +
                                std::to_string(size));
}

}  // namespace

RouterTables::RouterTables(const RouterSettings& settings) : servers(static_cast<uint32_t>(settings.servers)) {
  const size_t count = settings.rows.size();
  check_same_length("dims", settings.dims.size(), count);
  check_same_length("k", settings.k.size(), count);
  check_same_length("r", settings.r.size(), count);
  check_same_length("table_index", settings.table_index.size(), count);
  check_same_length("mean_pooling", settings.mean_pooling.size(), count);
  check_same_length("expanded", settings.expanded.size(), count);
  for (size_t t = 0; t < count; ++t) {
    if (settings.rows[t] < 1 || settings.rows[t] > rows_max)
      throw std::invalid_argument("rows[" + std::to_string(t) + "] must be between 1 and " + text(rows_max) + ", not " +
                                  text(settings.rows[t]));
    if (settings.dims[t] < 1 || settings.dims[t] > dim_max)
      throw std::invalid_argument("dims[" + std::to_string(t) + "] must be between 1 and " + text(dim_max) + ", not " +
                                  text(settings.dims[t]));
    tables.push_back({static_cast<uint32_t>(settings.rows[t]),
                      static_cast<uint32_t>(settings.dims[t]),
                      settings.mean_pooling[t],
                      settings.expanded[t],
                      false,
                      Layout(settings.servers, settings.k[t], settings.r[t], settings.rings, settings.table_index[t]),
                      {},
                      {},
                      {},
                      {}});
  }
  for (size_t f = 0; f < settings.feature_tables.size(); ++f) {
    const int64_t t = settings.feature_tables[f];
    if (t < 0 || t >= static_cast<int64_t>(count))
      throw std::invalid_argument("feature_tables[" + std::to_string(f) + "] = " + text(t) + " names no table");
    tables[static_cast<size_t>(t)].features.push_back(static_cast<uint32_t>(f));
    feature_tables.push_back(static_cast<uint32_t>(t));
    feature_columns.push_back(width);
    if (!settings.expanded[static_cast<size_t>(t)]) width += tables[static_cast<size_t>(t)].dim;
  }
  for (const int64_t t : settings.static_tables) {
    if (t < 0 || t >= static_cast<int64_t>(count))
      throw std::invalid_argument("static_tables names table " + text(t) + ", which does not exist");
    Table& table = tables[static_cast<size_t>(t)];
    if (table.is_static) throw std::invalid_argument("static_tables names table " + text(t) + " twice");
    if (!table.features.empty())
      throw std::invalid_argument("table " + text(t) + " is static, so feature " + text(table.features[0]) +
                                  " cannot look up in it");
    table.is_static = true;
    table.server_counts.resize(servers);
    for (uint32_t row = 0; row < table.rows; ++row) {
      const Place place = table.layout.place(row);
      table.places.push_back(place);
      table.ranks.push_back(static_cast<uint32_t>(table.server_counts[place.server]++));
    }
  }
}

// ---- making a plan

struct Router::Wrong {
  size_t index = SIZE_MAX;  // in values
  size_t feature = 0;
  size_t position = 0;  // within the feature's values
  int64_t id = 0;
};

struct Router::Placed {
  uint32_t server;
  uint32_t slot;
  uint32_t rank;  // number among the table's rows on that server
};

// The arrays a plan is made with, kept from plan to plan. A table's part has room for as many rows as it has
// lookups.
struct Router::Work {
  std::vector<size_t> table_begin;  // where each table's part begins
  std::vector<uint32_t> table_distinct;
  Buffer<uint32_t> distinct;     // rows in order of first occurrence
  Buffer<Placed> placed;         // the same rows
  std::vector<size_t> row_base;  // [server][table]: where its slots begin
  std::vector<Wrong> wrong;
};

Router::Router(const RouterSettings& settings)
    : tables_(std::make_shared<const RouterTables>(settings)), work_(std::make_unique<Work>()), lanes_(threads_max) {}

Router::~Router() = default;

void Router::find_bags(Plan& plan, std::span<const int64_t> values, std::optional<std::span<const int32_t>> lengths,
                       int64_t batch) const {
  if (batch < 0 || batch > static_cast<int64_t>(lookups_max))
    throw std::invalid_argument("batch must be between 0 and " + std::to_string(lookups_max) + ", not " + text(batch));
  if (values.size() > lookups_max)
    throw std::invalid_argument("a plan takes at most " + std::to_string(lookups_max) + " ids, not " +
                                std::to_string(values.size()));
  const size_t features = tables_->feature_tables.size();
  const size_t bags = features * static_cast<size_t>(batch);
  plan.batch_ = static_cast<size_t>(batch);
  if (!lengths) {
    if (values.size() != bags)
      throw std::invalid_argument("without lengths every bag has one id: " + std::to_string(features) +
                                  " features of " + text(batch) + " samples need " + std::to_string(bags) +
                                  " values, not " + std::to_string(values.size()));
    return;
  }
  if (lengths->size() != bags)
    throw std::invalid_argument("lengths must have " + std::to_string(bags) + " entries (" + std::to_string(features) +
                                " features of " + text(batch) + " samples), not " + std::to_string(lengths->size()));
  plan.bag_start_ = Buffer<uint32_t>(bags + 1);
  size_t total = 0;
  for (size_t bag = 0; bag < bags; ++bag) {
    plan.bag_start_[bag] = static_cast<uint32_t>(total);
    if ((*lengths)[bag] < 0)
      throw std::invalid_argument("lengths[" + std::to_string(bag) + "] must not be negative, not " +
                                  text((*lengths)[bag]));
    total += static_cast<size_t>((*lengths)[bag]);
    if (total > values.size()) break;
  }
  if (total != values.size())
    throw std::invalid_argument(std::string("lengths add up to ") + (total > values.size() ? "more than " : "") +
                                std::to_string(std::min(total, values.size())) + "; there are " +
                                std::to_string(values.size()) + " values");
  plan.bag_start_[bags] = static_cast<uint32_t>(total);
  // Bags of one id each are usual, and cheaper when said so.
  if (std::ranges::all_of(*lengths, [](int32_t length) { return length == 1; })) plan.bag_start_ = {};
}

// Numbers the table's distinct rows and places them.
void Router::number_table(Plan& plan, Work& work, std::span<const int64_t> values, size_t t, size_t lane) {
  const RouterTables::Table& table = tables_->tables[t];
  if (table.is_static) return;  // numbered and placed once, when the router was made
  const size_t room = work.table_begin[t + 1] - work.table_begin[t];
  uint32_t* distinct = work.distinct.data() + work.table_begin[t];
  Dedupe& dedupe = lanes_[lane].dedupe;
  dedupe.begin(room, table.rows);
  for (const uint32_t f : table.features) {
    const size_t begin = plan.feature_begin(f);
    const std::span<const int64_t> ids = values.subspan(begin, plan.feature_begin(f + 1) - begin);
    const size_t taken = dedupe.number(ids, plan.lookups_.data() + begin, distinct);
    if (taken < ids.size()) {
      work.wrong[t] = {begin + taken, f, taken, ids[taken]};
      return;
    }
  }
  work.table_distinct[t] = dedupe.found();
  const size_t tables = tables_->tables.size();
  Placed* placed = work.placed.data() + work.table_begin[t];
  if (tables_->servers == 1) {  // then a row's slot is its number
    for (uint32_t u = 0; u < dedupe.found(); ++u) placed[u] = {0, distinct[u], u};
    plan.counts[t] = static_cast<int32_t>(dedupe.found());
    return;
  }
  const Layout layout = table.layout;  // a copy of our own stays in registers
  std::vector<uint32_t>& ranks = lanes_[lane].ranks;
  ranks.assign(tables_->servers, 0);
  for (size_t u = 0; u < dedupe.found(); ++u) {
    const Place place = layout.place(distinct[u]);
    placed[u] = {place.server, place.slot, ranks[place.server]++};
  }
  for (size_t s = 0; s < tables_->servers; ++s) plan.counts[s * tables + t] = static_cast<int32_t>(ranks[s]);
}

// Gives every (server, table) its part of the rows.
void Router::lay_out(Plan& plan, Work& work) const {
  const size_t tables = tables_->tables.size();
  size_t row = 0;
  size_t offset = 0;
  plan.float_base_.resize(tables_->servers * tables);
  work.row_base.resize(tables_->servers * tables);
  for (size_t s = 0; s < tables_->servers; ++s) {
    plan.row_start.push_back(static_cast<int64_t>(row));
    plan.float_start.push_back(static_cast<int64_t>(offset));
    for (size_t t = 0; t < tables; ++t) {
      plan.float_base_[s * tables + t] = offset;
      work.row_base[s * tables + t] = row;
      const auto count = static_cast<size_t>(plan.counts[s * tables + t]);
      row += count;
      offset += count * tables_->tables[t].dim;
    }
  }
  plan.row_start.push_back(static_cast<int64_t>(row));
  plan.float_start.push_back(static_cast<int64_t>(offset));
  if (offset >= floats_max)
    throw std::invalid_argument("the rows of this batch have " + std::to_string(offset) + " floats; at most " +
                                std::to_string(floats_max - 1) + " are possible: use a smaller batch");
  plan.slots = Buffer<uint32_t>(row);
  for (const uint32_t distinct : work.table_distinct) plan.distinct += distinct;
}

// Writes the table's slots, and turns the numbers in its lookups into offsets.
void Router::place_table(Plan& plan, const Work& work, size_t t) const {
  const RouterTables::Table& table = tables_->tables[t];
  const size_t tables = tables_->tables.size();
  if (table.is_static) {
    for (size_t row = 0; row < table.rows; ++row)
      plan.slots[work.row_base[table.places[row].server * tables + t] + table.ranks[row]] = table.places[row].slot;
    return;
  }
  uint32_t* offsets = work.distinct.data() + work.table_begin[t];  // the rows are no longer needed
  const Placed* placed = work.placed.data() + work.table_begin[t];
  for (size_t u = 0; u < work.table_distinct[t]; ++u) {
    const size_t at = placed[u].server * tables + t;
    plan.slots[work.row_base[at] + placed[u].rank] = placed[u].slot;
    offsets[u] = static_cast<uint32_t>(plan.float_base_[at] + size_t{placed[u].rank} * table.dim);
  }
  for (const uint32_t f : table.features) {
    const size_t end = plan.feature_begin(f + 1);
    for (size_t i = plan.feature_begin(f); i < end; ++i) {
      const uint32_t lookup = plan.lookups_[i];
      plan.lookups_[i] = offsets[lookup & lookup_offset] | (lookup & lookup_first);
    }
  }
}

// Makes room, and counts the rows of static tables.
void Router::begin_plan(Plan& plan, Work& work, size_t lookups) const {
  const std::vector<RouterTables::Table>& tables = tables_->tables;
  plan.tables_ = tables_;
  plan.lookups = static_cast<int64_t>(lookups);
  plan.lookups_ = Buffer<uint32_t>(lookups);
  plan.counts.assign(tables_->servers * tables.size(), 0);
  work.table_begin.assign(1, 0);
  work.table_distinct.assign(tables.size(), 0);
  work.wrong.assign(tables.size(), Wrong());
  if (work.distinct.size() < lookups) {
    work.distinct = Buffer<uint32_t>(lookups);
    work.placed = Buffer<Placed>(lookups);
  }
  for (size_t t = 0; t < tables.size(); ++t) {
    size_t room = 0;
    for (const uint32_t f : tables[t].features) room += plan.feature_begin(f + 1) - plan.feature_begin(f);
    work.table_begin.push_back(work.table_begin.back() + room);
    for (size_t s = 0; s < tables_->servers && tables[t].is_static; ++s)
      plan.counts[s * tables.size() + t] = tables[t].server_counts[s];
  }
}

Plan Router::plan(std::span<const int64_t> values, std::optional<std::span<const int32_t>> lengths, int64_t batch) {
  std::lock_guard lock(mutex_);
  Work& work = *work_;
  Plan plan;
  find_bags(plan, values, lengths, batch);
  begin_plan(plan, work, values.size());
  ThreadPool& pool = ThreadPool::shared();
  const size_t tables = tables_->tables.size();
  pool.parallel_for(tables, [&](size_t t, size_t lane) { number_table(plan, work, values, t, lane); });
  Wrong wrong;
  for (const Wrong& found : work.wrong)
    if (found.index < wrong.index) wrong = found;
  if (wrong.index != SIZE_MAX)
    throw std::out_of_range("feature " + std::to_string(wrong.feature) + ", position " +
                            std::to_string(wrong.position) + ": id " + text(wrong.id) +
                            " is out of range; its table has " +
                            std::to_string(tables_->tables[tables_->feature_tables[wrong.feature]].rows) + " rows");
  lay_out(plan, work);
  pool.parallel_for(tables, [&](size_t t, size_t) { place_table(plan, work, t); });
  return plan;
}

// ---- using a plan

Feature Plan::feature(size_t index) const {
  const RouterTables::Table& table = tables_->tables[tables_->feature_tables[index]];
  const bool bags = bag_start_.size() != 0;
  return {bags ? lookups_.data() : lookups_.data() + index * batch_,
          bags ? bag_start_.data() + index * batch_ : nullptr, tables_->width, table.dim, table.mean};
}

void Plan::pool(std::span<const float> rows, std::span<float> out) const {
  check_floats("rows", rows.size(), static_cast<size_t>(floats()));
  check_floats("out", out.size(), batch_ * tables_->width);
  const Kernels& kernel = kernels();
  ThreadPool::shared().parallel_for((batch_ + bags_per_task - 1) / bags_per_task, [&](size_t task, size_t) {
    const size_t begin = task * bags_per_task;
    const size_t end = std::min(batch_, begin + bags_per_task);
    for (size_t f = 0; f < tables_->feature_tables.size(); ++f)
      if (!tables_->tables[tables_->feature_tables[f]].is_expanded)
        kernel.pool(feature(f), rows.data(), begin, end, out.data() + tables_->feature_columns[f]);
  });
}

void Plan::unpool(std::span<const float> grad, std::span<float> grads) const {
  check_floats("grad", grad.size(), batch_ * tables_->width);
  check_floats("grads", grads.size(), static_cast<size_t>(floats()));
  const Kernels& kernel = kernels();
  ThreadPool& pool = ThreadPool::shared();
  const std::vector<RouterTables::Table>& tables = tables_->tables;
  // Tables are independent. With few of them, threads share each by ranges of offsets.
  const auto threads = static_cast<size_t>(pool.size());
  const size_t parts = threads == 1 || tables.size() >= 4 * threads ? 1 : threads;
  const auto end = static_cast<size_t>(floats());
  pool.parallel_for(tables.size() * parts, [&](size_t task, size_t) {
    if (tables[task / parts].is_expanded) return;
    const size_t part = task % parts;
    const auto offset_begin = static_cast<uint32_t>(end * part / parts);
    const auto offset_end = static_cast<uint32_t>(end * (part + 1) / parts);
    for (const uint32_t f : tables[task / parts].features)
      kernel.unpool(feature(f), grad.data() + tables_->feature_columns[f], 0, batch_, offset_begin, offset_end,
                    grads.data());
  });
}

Feature Plan::expanded_feature(int64_t index) const {
  if (index < 0 || index >= static_cast<int64_t>(tables_->feature_tables.size()))
    throw std::invalid_argument("feature " + text(index) + " does not exist");
  const RouterTables::Table& table = tables_->tables[tables_->feature_tables[static_cast<size_t>(index)]];
  if (!table.is_expanded) throw std::invalid_argument("feature " + text(index) + " is pooled");
  return {lookups_.data() + feature_begin(static_cast<size_t>(index)), nullptr, table.dim, table.dim, false};
}

size_t Plan::expanded_floats(int64_t index) const {
  const Feature feature = expanded_feature(index);
  const auto f = static_cast<size_t>(index);
  return (feature_begin(f + 1) - feature_begin(f)) * feature.dim;
}

void Plan::expand(int64_t index, std::span<const float> rows, std::span<float> out) const {
  const Feature feature = expanded_feature(index);
  check_floats("rows", rows.size(), static_cast<size_t>(floats()));
  check_floats("out", out.size(), expanded_floats(index));
  kernels().pool(feature, rows.data(), 0, out.size() / feature.dim, out.data());
}

void Plan::collapse(int64_t index, std::span<const float> grad, std::span<float> grads) const {
  const Feature feature = expanded_feature(index);
  check_floats("grad", grad.size(), expanded_floats(index));
  check_floats("grads", grads.size(), static_cast<size_t>(floats()));
  kernels().unpool(feature, grad.data(), 0, grad.size() / feature.dim, 0, static_cast<uint32_t>(floats()),
                   grads.data());
}

const RouterTables::Table& Plan::static_table(int64_t table, size_t rows_floats, size_t table_floats) const {
  if (table < 0 || table >= static_cast<int64_t>(tables_->tables.size()))
    throw std::out_of_range("there is no table " + text(table) + "; this plan has " +
                            std::to_string(tables_->tables.size()));
  const RouterTables::Table& found = tables_->tables[static_cast<size_t>(table)];
  if (!found.is_static) throw std::invalid_argument("table " + text(table) + " is not static");
  check_floats("the rows of the batch", rows_floats, static_cast<size_t>(floats()));
  check_floats("the table", table_floats, size_t{found.rows} * found.dim);
  return found;
}

void Plan::static_get(int64_t index, std::span<const float> rows, std::span<float> out) const {
  const RouterTables::Table& table = static_table(index, rows.size(), out.size());
  for (size_t row = 0; row < table.rows; ++row) {
    const size_t base = float_base(table.places[row].server, static_cast<size_t>(index));
    std::memcpy(out.data() + row * table.dim, rows.data() + base + size_t{table.ranks[row]} * table.dim,
                table.dim * sizeof(float));
  }
}

void Plan::static_put(int64_t index, std::span<const float> source, std::span<float> grads) const {
  const RouterTables::Table& table = static_table(index, grads.size(), source.size());
  for (size_t row = 0; row < table.rows; ++row) {
    const size_t base = float_base(table.places[row].server, static_cast<size_t>(index));
    std::memcpy(grads.data() + base + size_t{table.ranks[row]} * table.dim, source.data() + row * table.dim,
                table.dim * sizeof(float));
  }
}

}  // namespace regrow
