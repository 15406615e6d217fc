// Reading and updating rows for a worker in the same process, straight to and from the vectors of its bags.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "regrow/dispatch.hpp"
#include "regrow/router.hpp"
#include "regrow/shard.hpp"
#include "regrow/thread_pool.hpp"

namespace regrow {
namespace {

// Bags of one feature that a thread takes at a time: most of the time its prefetches are running.
constexpr size_t bags_per_task = 512;
// Vectors of more bytes than this are no longer in a cache when the model reads them.
constexpr size_t cached_bytes_max = 16 << 20;

}  // namespace

void Shard::check_pooled(const Plan& plan, size_t floats) const {
  const RouterTables& router = plan.tables();
  if (router.servers != 1 || settings_.servers != 1)
    throw std::invalid_argument("rows are pooled here only where there is one server, not " +
                                std::to_string(std::max<int64_t>(router.servers, settings_.servers)));
  if (floats != plan.batch() * router.width)
    throw std::invalid_argument("the matrix must have " + std::to_string(plan.batch() * router.width) +
                                " floats, not " + std::to_string(floats));
  check_counts(plan.counts, plan.slots.span());
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (router.tables[t].dim != tables_[t].records.dim)
      throw std::invalid_argument("the plan's rows of table " + std::to_string(t) + " have " +
                                  std::to_string(router.tables[t].dim) + " floats, those here " +
                                  std::to_string(tables_[t].records.dim));
    if (router.tables[t].is_static || router.tables[t].is_expanded)
      throw std::invalid_argument("table " + std::to_string(t) + " is not pooled");
  }
  check_ranges(plan.counts, plan.slots.span());
  if (recovering_) check_present(plan.counts, plan.slots.span());
}

void Shard::gather_pooled(const Plan& plan, std::span<float> out) const {
  check_pooled(plan, out.size());
  const Kernels& kernel = kernels();
  const RouterTables& router = plan.tables();
  const size_t pieces = (plan.batch() + bags_per_task - 1) / bags_per_task;
  const bool past_caches = out.size_bytes() >= cached_bytes_max;
  ThreadPool::shared().parallel_for(router.feature_tables.size() * pieces, [&](size_t task, size_t) {
    const size_t f = task / pieces;
    const size_t begin = task % pieces * bags_per_task;
    const size_t t = router.feature_tables[f];
    kernel.pool_records(plan.feature(f), plan.rows_of(t), tables_[t].records, begin,
                        std::min(plan.batch(), begin + bags_per_task), out.data() + router.feature_columns[f],
                        past_caches);
  });
}

void Shard::update_pooled(const Plan& plan, std::span<const float> grad, int64_t step) {
  check_pooled(plan, grad.size());
  const std::vector<UpdateNumbers> numbers = numbers_of(step);
  reserve_room(plan.counts);
  const Kernels& kernel = kernels();
  const RouterTables& router = plan.tables();
  // Kept from call to call. Of the sums only rows that occur more than once touch any.
  thread_local Buffer<GradPlace> places_of_thread;
  thread_local Buffer<float> sums_of_thread;
  if (places_of_thread.size() < plan.slots.size()) places_of_thread = Buffer<GradPlace>(plan.slots.size());
  if (sums_of_thread.size() < static_cast<size_t>(plan.floats()))
    sums_of_thread = Buffer<float>(static_cast<size_t>(plan.floats()));
  GradPlace* const all_places = places_of_thread.data();
  float* const all_sums = sums_of_thread.data();
  ThreadPool& pool = ThreadPool::shared();
  // Tables are independent. With few of them, threads share each by ranges of rows.
  const auto threads = static_cast<size_t>(pool.size());
  const size_t parts = threads == 1 || tables_.size() >= 4 * threads ? 1 : threads;
  pool.parallel_for(tables_.size() * parts, [&](size_t task, size_t) {
    const size_t t = task / parts;
    const PlannedRows rows = plan.rows_of(t);
    const auto count = static_cast<size_t>(plan.counts[t]);
    const auto begin = static_cast<uint32_t>(count * (task % parts) / parts);
    const auto end = static_cast<uint32_t>(count * (task % parts + 1) / parts);
    if (begin == end) return;
    GradPlace* places = all_places + (rows.slots - plan.slots.data());
    float* sums = all_sums + rows.offset_begin + size_t{begin} * router.tables[t].dim;
    for (const uint32_t f : router.tables[t].features)
      sums = kernel.place_grads(plan.feature(f), rows, grad.data() + router.feature_columns[f], plan.batch(), begin,
                                end, places, sums);
    const Table& table = tables_[t];
    if (table.pending) table.pending->save(rows.slots + begin, end - begin);
    if (table.aside) table.aside->save(rows.slots + begin, end - begin);
    kernel.update_scattered[static_cast<size_t>(table.settings.optimizer)](table.records, rows.slots + begin,
                                                                           end - begin, places + begin, numbers[t]);
  });
}

}  // namespace regrow
