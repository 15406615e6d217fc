// Runs every kernel on odd sizes, in every instruction set, with one thread and with several, and exits 0 if
// the results agree with each other. Built under the address and undefined-behaviour sanitizers by
// tests/unit/test_sanitizers.py: here memory is what is checked; values are compared with the twins in
// Python.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "regrow/crc32c.hpp"
#include "regrow/dedupe.hpp"
#include "regrow/dispatch.hpp"
#include "regrow/gf.hpp"
#include "regrow/router.hpp"
#include "regrow/shard.hpp"
#include "regrow/sums.hpp"
#include "regrow/thread_pool.hpp"

namespace {

using namespace regrow;

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

std::mt19937_64 chance(1);

// Exactly as long as asked for, on the heap, so that one element too far is caught.
template <typename T>
struct Exact {
  explicit Exact(size_t size) : data(new T[size]()), size(size) {}
  std::unique_ptr<T[]> data;
  size_t size;
  std::span<T> span() { return {data.get(), size}; }
};

Exact<float> random_floats(size_t size) {
  Exact<float> floats(size);
  for (float& value : floats.span()) value = static_cast<float>(chance() % 2001) / 1000.0f - 1.0f;
  return floats;
}

template <typename T>
void add_bytes(std::string& digest, std::span<const T> data) {
  digest.append(reinterpret_cast<const char*>(data.data()), data.size_bytes());
}

template <typename Error, typename Call>
bool throws(Call&& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

// ---- one thing at a time: each returns all it computed, as bytes

std::string shard_digest(size_t dim) {
  std::string digest;
  Shard shard({.servers = 5, .server = 3, .rings = 1, .coding = {}, .recovering = false});
  for (int rule = 0; rule < optimizer_count; ++rule) {
    TableSettings settings;
    settings.rows = 1003 + rule;
    settings.dim = static_cast<int64_t>(dim);
    settings.k = 2;
    settings.r = 1;
    settings.optimizer = static_cast<Optimizer>(rule);
    settings.numbers.learning_rate = 0.1;
    settings.numbers.weight_decay = dim % 2 ? 0.01 : 0.0;
    settings.seed = 7;
    settings.init_bound = 0.5;
    settings.table = rule;
    shard.add_table(settings);
  }
  for (int64_t step = 1; step <= 3; ++step) {
    std::vector<int32_t> counts;
    std::vector<uint32_t> all;
    for (size_t t = 0; t < shard.table_count(); ++t) {
      std::vector<uint32_t> slots(shard.slots(t));
      std::iota(slots.begin(), slots.end(), 0u);
      std::shuffle(slots.begin(), slots.end(), chance);
      slots.resize(slots.size() - static_cast<size_t>(step));
      counts.push_back(static_cast<int32_t>(slots.size()));
      all.insert(all.end(), slots.begin(), slots.end());
    }
    Exact<float> grads = random_floats(all.size() * dim);
    Exact<float> out(all.size() * dim);
    if (step == 2) shard.assign_untouched(counts, all, grads.span());
    shard.update(counts, all, grads.span(), step);
    shard.gather(counts, all, out.span());
    add_bytes<float>(digest, out.span());
    all.back() = shard.slots(shard.table_count() - 1);
    CHECK(throws<std::out_of_range>([&] { shard.update(counts, all, grads.span(), step); }));
    CHECK(throws<std::invalid_argument>([&] { shard.gather(counts, all, out.span().subspan(1)); }));
  }
  for (size_t t = 0; t < shard.table_count(); ++t) {
    Exact<float> records(shard.slots(t) * shard.record_floats(t));
    shard.read_records(t, 0, shard.slots(t), records.span());
    shard.write_records(t, 0, shard.slots(t), records.span());
    add_bytes<float>(digest, records.span());
    add_bytes<uint64_t>(digest, shard.touched(t));
  }
  return digest;
}

// Servers 0 and 2 of a ring of five, k = 3 and r = 2, and the replacement of server 0.
struct Trio {
  static ShardSettings settings(int64_t server, bool recovering) {
    return {.servers = 5, .server = server, .rings = 1, .coding = {{1, 2}, {2, 2}, {3, 2}}, .recovering = recovering};
  }
  explicit Trio(size_t dim) : source(settings(0, false)), holder(settings(2, false)), heir(settings(0, true)) {
    for (Shard* shard : {&source, &holder, &heir})
      for (int64_t rule = 0; rule < 2; ++rule) {
        TableSettings table;
        table.rows = 40003 + 5000 * rule;
        table.dim = static_cast<int64_t>(dim);
        table.k = 3;
        table.r = 2;
        table.optimizer = rule ? Optimizer::rowwise_adagrad : Optimizer::sgd;
        table.numbers.learning_rate = 0.1;
        table.seed = 7;
        table.init_bound = 0.5;
        table.table = rule;
        shard->add_table(table);
      }
  }
  Shard source;
  Shard holder;
  Shard heir;
};

std::vector<uint32_t> random_slots(const Shard& shard, size_t table, size_t less) {
  std::vector<uint32_t> slots(shard.slots(table));
  std::iota(slots.begin(), slots.end(), 0u);
  std::shuffle(slots.begin(), slots.end(), chance);
  slots.resize(slots.size() - less);
  return slots;
}

// Rows of a flush are in no order; their sum is.
void add_flush(std::string& digest, const Shard& shard, const Flush& flush) {
  size_t row = 0;
  const float* delta = flush.deltas.data();
  for (size_t t = 0; t < flush.counts.size(); ++t) {
    Exact<float> sum(shard.record_floats(t));
    uint32_t slots = 0;
    for (int32_t i = 0; i < flush.counts[t]; ++i, delta += sum.size) {
      slots += flush.slots[row++];
      gf_xor(sum.span(), {delta, sum.size}, 1);
    }
    add_bytes<float>(digest, sum.span());
    digest += std::to_string(slots);
  }
}

// Published rows go to the heir as they would after decoding.
void recover(Trio& trio, std::string& digest) {
  for (size_t t = 0; t < trio.heir.table_count(); ++t) {
    for (size_t group = 0; group < 3; ++group) {
      const uint32_t blocks = trio.heir.blocks(t);
      Exact<uint64_t> words((blocks + 63) / 64);
      for (uint32_t block = 0;;) {
        const auto [slots, next] = trio.source.next_touched(t, group, block, 1000);
        for (const uint32_t slot : slots) words.data[slot / 3 / 64] |= uint64_t{1} << (slot / 3 % 64);
        if (next == blocks) break;
        block = next;
      }
      trio.heir.know_touched(group, t, words.span());
      if (group < 2) add_bytes<uint64_t>(digest, trio.holder.parity_touched(0, group, t));
    }
    std::vector<int32_t> counts(trio.heir.table_count(), 0);
    const std::vector<uint32_t> slots = random_slots(trio.heir, t, 3);
    counts[t] = static_cast<int32_t>(slots.size());
    const RowNames missing = trio.heir.prepare(counts, slots);
    Exact<float> relatives(missing.slots.size() * trio.heir.record_floats(t));
    trio.source.published(missing.counts, missing.slots, relatives.span());
    CHECK(trio.heir.put(missing.counts, missing.slots, relatives.span()) == missing.slots.size());
    CHECK(trio.heir.put(missing.counts, missing.slots, relatives.span()) == 0);
    for (uint32_t slot = 0; slot < trio.heir.slots(t); ++slot) {  // the three left out
      counts[t] = 1;
      const RowNames last = trio.heir.prepare(counts, std::span(&slot, 1));
      if (last.slots.empty()) continue;
      Exact<float> relative(trio.heir.record_floats(t));
      trio.source.published(last.counts, last.slots, relative.span());
      CHECK(trio.heir.put(last.counts, last.slots, relative.span()) == 1);
    }
    while (trio.heir.fill(1000)) {
    }
  }
  CHECK(trio.heir.missing_rows() + trio.heir.blank_rows() == 0);
  for (size_t t = 0; t < trio.heir.table_count(); ++t) {
    Exact<float> records(trio.heir.slots(t) * trio.heir.record_floats(t));
    trio.heir.read_records(t, 0, trio.heir.slots(t), records.span());
    add_bytes<float>(digest, records.span());
  }
}

std::string parity_digest(size_t dim) {
  Trio trio(dim);
  std::string digest;
  for (int64_t step = 1; step <= 3; ++step) {
    std::vector<int32_t> counts;
    std::vector<uint32_t> all;
    for (size_t t = 0; t < trio.source.table_count(); ++t) {
      const std::vector<uint32_t> slots = random_slots(trio.source, t, trio.source.slots(t) / 3);
      counts.push_back(static_cast<int32_t>(slots.size()));
      all.insert(all.end(), slots.begin(), slots.end());
    }
    Exact<float> grads = random_floats(all.size() * dim);
    trio.source.update(counts, all, grads.span(), step);
    for (size_t group = 0; group < 2 && step < 3; ++group) {  // those of distances 1 and 2
      const Flush flush = trio.source.take_flush(group);
      trio.holder.parity_apply(0, flush.counts, flush.slots.span(), flush.deltas.span());
      add_flush(digest, trio.source, flush);
      // Every row a second and a third time: what is there twice must do no harm.
      std::vector<int32_t> doubled = {flush.counts[0], 0};
      const size_t rows = static_cast<size_t>(flush.counts[0]);
      const size_t floats = rows * trio.source.record_floats(0);
      trio.holder.parity_apply(0, doubled, flush.slots.span().first(rows), flush.deltas.span().first(floats));
      doubled[0] += 1;
      CHECK(throws<std::invalid_argument>([&] {
        trio.holder.parity_apply(0, doubled, flush.slots.span().first(rows), flush.deltas.span().first(floats));
      }));
      CHECK(throws<std::invalid_argument>(
          [&] { trio.holder.parity_apply(2, flush.counts, flush.slots.span(), flush.deltas.span()); }));
    }
  }
  CHECK(throws<std::out_of_range>([&] { trio.source.take_flush(3); }));
  for (size_t t = 0; t < trio.holder.table_count(); ++t) {
    std::vector<uint32_t> blocks(trio.holder.blocks(t));
    std::iota(blocks.begin(), blocks.end(), 0u);
    Exact<float> parities(blocks.size() * trio.holder.record_floats(t));
    for (const int64_t q : {0, 1}) {
      std::vector<int32_t> counts(trio.holder.table_count(), 0);
      counts[t] = static_cast<int32_t>(blocks.size());
      trio.holder.parity_read(q, counts, blocks, parities.span());
      add_bytes<float>(digest, parities.span());
      add_bytes<uint64_t>(digest, trio.holder.parity_members(t, q, 2 - q));
    }
  }
  recover(trio, digest);
  return digest;
}

// A chunk of captured rows, and back: every row must be what it was. Optimizers are those of Trio.
void take_chunk(Shard& shard, size_t dim, int64_t bytes_max, const std::vector<Exact<float>>& before) {
  const CapturedChunk chunk = shard.capture_chunk(bytes_max, bytes_max % 3 == 1);
  const uint32_t* words = chunk.words.data();
  for (size_t t = 0; t < chunk.counts.size(); ++t) {
    const auto rows = static_cast<size_t>(chunk.counts[t]);
    const std::span<const uint32_t> ids(words, rows);
    CHECK(std::is_sorted(ids.begin(), ids.end(), std::less_equal<>()));
    words += rows;
    std::vector<std::span<const float>> parts;
    for (const size_t width : t ? std::vector<size_t>{dim, 1} : std::vector<size_t>{dim}) {
      parts.emplace_back(reinterpret_cast<const float*>(words), rows * width);
      words += rows * width;
    }
    Trio fresh(dim);
    CHECK(fresh.source.load_rows(t, ids, parts) == rows);
    const size_t stride = shard.record_floats(t);
    Exact<float> records(fresh.source.slots(t) * stride);
    fresh.source.read_records(t, 0, static_cast<int64_t>(fresh.source.slots(t)), records.span());
    const std::vector<uint64_t> touched = fresh.source.touched(t);
    size_t found = 0;
    for (size_t slot = 0; slot < fresh.source.slots(t); ++slot) {
      if (!(touched[slot / 64] >> (slot % 64) & 1)) continue;
      ++found;
      CHECK(std::equal(records.data.get() + slot * stride, records.data.get() + (slot + 1) * stride,
                       before[t].data.get() + slot * stride));
    }
    CHECK(found == rows);
  }
  CHECK(words <= chunk.words.data() + chunk.words.size());
}

// Two tenants; rows change, are flushed and are taken while a capture is under way.
std::string capture_digest(size_t dim) {
  Trio trio(dim);
  Shard& shard = trio.source;
  std::string digest;
  int64_t step = 0;
  const auto update = [&] {
    std::vector<int32_t> counts;
    std::vector<uint32_t> all;
    for (size_t t = 0; t < shard.table_count(); ++t) {
      const std::vector<uint32_t> slots = random_slots(shard, t, shard.slots(t) / 2 + 1);
      counts.push_back(static_cast<int32_t>(slots.size()));
      all.insert(all.end(), slots.begin(), slots.end());
    }
    Exact<float> grads = random_floats(all.size() * dim);
    shard.update(counts, all, grads.span(), ++step);
  };
  update();
  for (size_t tenant = 0; tenant < 2; ++tenant) CHECK(shard.add_tenant() == tenant);
  for (const size_t tenant : {0, 1, 0}) {
    update();
    std::vector<Exact<float>> before;
    for (size_t t = 0; t < shard.table_count(); ++t) {
      before.emplace_back(shard.slots(t) * shard.record_floats(t));
      shard.read_records(t, 0, shard.slots(t), before.back().span());
    }
    const size_t dirty = shard.dirty_rows(tenant);
    shard.begin_capture(tenant, false);
    CHECK(shard.capture_left() == dirty && shard.dirty_rows(tenant) == 0);
    CHECK(throws<std::invalid_argument>([&] { shard.begin_capture(tenant, true); }));
    size_t taken = 0;
    for (int64_t bytes_max = 1;; bytes_max = bytes_max * 7 + 100) {
      if (!shard.capture_left()) break;
      // Now and then in slices, while rows that it will have change.
      while (bytes_max % 2 && shard.prepare_chunk(bytes_max, bytes_max % 3 == 1, 50 + bytes_max / 4)) update();
      take_chunk(shard, dim, bytes_max, before);
      taken = dirty - shard.capture_left();
      digest += std::to_string(taken) + " ";
      update();
      shard.take_flush(taken % 3);
    }
    CHECK(taken == dirty && shard.capture_side_bytes() == 0);
    shard.end_capture(tenant == 0);
    digest += std::to_string(shard.dirty_rows(0)) + " " + std::to_string(shard.dirty_rows(1)) + " ";
  }
  CHECK(throws<std::invalid_argument>([&] { shard.end_capture(true); }));
  return digest;
}

// Each kind of priority; rows noted often enough that a byte does not count them, captures that end either way.
std::string priority_digest(size_t dim) {
  std::string digest;
  for (const char* kind : {"none", "mfu", "ssu", "scar"}) {
    Trio trio(dim);
    Shard& shard = trio.source;
    const size_t tenant = shard.add_tenant();
    std::vector<int64_t> tables(shard.table_count());
    std::iota(tables.begin(), tables.end(), 0);
    shard.set_priority(tenant, priority_from_name(kind), tables, 0.2, 3, 2);
    uint64_t captured = 0;
    for (int64_t step = 1; step < 30; ++step) {
      std::vector<int32_t> counts;
      std::vector<uint32_t> all;
      for (size_t t = 0; t < shard.table_count(); ++t) {
        const std::vector<uint32_t> slots = random_slots(shard, t, shard.slots(t) / 3 + 1);
        counts.push_back(static_cast<int32_t>(slots.size()));
        all.insert(all.end(), slots.begin(), slots.end());
      }
      Exact<float> grads = random_floats(all.size() * dim);
      shard.update(counts, all, grads.span(), step);
      for (int64_t time = 0; time < 40 * (step % 3); ++time) shard.note_updates(counts, all);
      const uint64_t before = shard.updates_uncaptured(tenant);
      shard.begin_capture(tenant, step % 11 == 0);
      uint64_t meanwhile = 0;
      for (bool more = step % 2; more; meanwhile += all.size()) {
        more = shard.choose_captured(static_cast<int64_t>(all.size() / 3 + 1));
        shard.update(counts, all, grads.span(), step);
        shard.note_updates(counts, all);
      }
      const uint64_t has = before + meanwhile - shard.updates_uncaptured(tenant);
      CHECK(has == before - shard.updates_skipped());
      const bool durable = step % 4;
      while (durable && shard.capture_left()) shard.capture_chunk(1000);
      shard.end_capture(durable);
      CHECK(durable || shard.updates_uncaptured(tenant) == before + meanwhile);
      captured += durable ? has : 0;
      digest += std::to_string(has) + " " + std::to_string(shard.capture_skipped()) + " ";
    }
    CHECK(shard.updates_noted() == captured + shard.updates_uncaptured(tenant));
    while (shard.dirty_rows(tenant)) {
      shard.begin_capture(tenant, false);
      while (shard.capture_left()) shard.capture_chunk(1000);
      shard.end_capture(true);
    }
    CHECK(shard.updates_uncaptured(tenant) == 0);
  }
  return digest;
}

std::string gf_digest() {
  std::string digest;
  for (const size_t floats : {0, 1, 3, 4, 7, 8, 12, 20, 33}) {
    Exact<float> target = random_floats(floats);
    Exact<float> source = random_floats(floats);
    for (const int64_t coefficient : {0, 1, 2, 29, 255}) gf_xor(target.span(), source.span(), coefficient);
    add_bytes<float>(digest, target.span());
    if (!floats) continue;
    std::vector<uint32_t> sorted = {1, 4, 9};
    std::vector<uint32_t> slots = {9, 9, 0, 10, 1};
    Exact<float> records = random_floats(3 * floats);
    Exact<float> deltas = random_floats(5 * floats);
    CHECK(xor_matching(sorted, records.span(), static_cast<int64_t>(floats), slots, deltas.span(), 3) == 3);
    add_bytes<float>(digest, records.span());
  }
  return digest;
}

std::string router_digest(bool bags, int64_t servers, int64_t batch) {
  RouterSettings settings;
  settings.rows = {100000, 9, 50, 300};
  settings.dims = {16, 3, 5, 33};
  settings.k = servers == 1 ? std::vector<int64_t>{1, 1, 1, 1} : std::vector<int64_t>{2, 1, 3, 1};
  settings.r = {0, 0, 0, 0};
  settings.table_index = {0, 1, 2, 3};
  settings.mean_pooling = {false, false, true, false};
  settings.expanded = {false, false, false, true};
  settings.feature_tables = {0, 2, 0, 3};
  settings.static_tables = {1};
  settings.servers = servers;
  Router router(settings);
  std::string digest;
  for (int repeat = 0; repeat < 3; ++repeat) {
    std::vector<int32_t> lengths;
    std::vector<int64_t> values;
    for (const int64_t table : settings.feature_tables)
      for (int64_t sample = 0; sample < batch; ++sample) {
        lengths.push_back(bags ? static_cast<int32_t>(chance() % 4) : 1);
        for (int32_t i = 0; i < lengths.back(); ++i)
          values.push_back(static_cast<int64_t>(chance() % static_cast<uint64_t>(settings.rows[table])));
      }
    std::optional<std::span<const int32_t>> given;
    if (bags) given = lengths;
    const Plan plan = router.plan(values, given, batch);
    Exact<float> rows = random_floats(static_cast<size_t>(plan.floats()));
    Exact<float> pooled(static_cast<size_t>(batch) * plan.tables().width);
    Exact<float> grads(rows.size);
    Exact<float> dense(27);
    plan.pool(rows.span(), pooled.span());
    plan.unpool(pooled.span(), grads.span());
    Exact<float> vectors(plan.expanded_floats(3));
    plan.expand(3, rows.span(), vectors.span());
    plan.collapse(3, vectors.span(), grads.span());
    plan.static_get(1, rows.span(), dense.span());
    plan.static_put(1, dense.span(), grads.span());
    add_bytes<int32_t>(digest, plan.counts);
    add_bytes<uint32_t>(digest, plan.slots.span());
    add_bytes<float>(digest, pooled.span());
    add_bytes<float>(digest, grads.span());
    if (!values.empty()) {
      values.back() = 100000;  // too large for every table
      CHECK(throws<std::out_of_range>([&] { router.plan(values, given, batch); }));
    }
  }
  return digest;
}

std::string merge_digest() {
  const std::vector<int32_t> dims = {16, 5, 64};
  std::vector<std::vector<int32_t>> counts;
  std::vector<std::vector<uint32_t>> slots;
  std::vector<Exact<float>> grads;
  std::vector<PushView> parts;
  for (int part = 0; part < 4; ++part) {
    counts.push_back({});
    slots.push_back({});
    size_t floats = 0;
    for (const int32_t dim : dims) {
      counts.back().push_back(static_cast<int32_t>(chance() % 50));
      floats += static_cast<size_t>(counts.back().back() * dim);
      for (int32_t i = 0; i < counts.back().back(); ++i) slots.back().push_back(chance() % 60);
    }
    grads.push_back(random_floats(floats));
  }
  for (size_t part = 0; part < counts.size(); ++part) parts.push_back({counts[part], slots[part], grads[part].span()});
  const SummedPush merged = sum_pushes(dims, parts);
  CHECK(!has_repeated_slots(merged.counts, merged.slots.span()));
  std::string digest;
  for (size_t part = 0; part < counts.size(); ++part)
    digest += has_repeated_slots(counts[part], slots[part]) ? "again " : "once ";
  add_bytes<int32_t>(digest, merged.counts);
  add_bytes<uint32_t>(digest, merged.slots.span());
  add_bytes<float>(digest, merged.grads.span());
  return digest;
}

std::string crc_digest() {
  std::string digest;
  for (const size_t size : {0, 1, 7, 8, 9, 63, 3071, 3072, 3073, 10000}) {
    Exact<uint8_t> data(size);
    for (uint8_t& byte : data.span()) byte = static_cast<uint8_t>(chance());
    digest += std::to_string(crc32c(data.span())) + " ";
  }
  return digest;
}

// Numbers run out after four thousand million keys; a table that starts near the end must start over
// unnoticed.
void dedupe_wraps() {
  Dedupe dedupe(UINT32_MAX - 1000);
  for (int list = 0; list < 100; ++list) {
    std::vector<uint32_t> keys(100);
    for (uint32_t& key : keys) key = chance() % 150;
    Exact<uint32_t> numbers(keys.size());
    Exact<uint32_t> distinct(keys.size());
    dedupe.begin(keys.size(), list % 2 ? 150 : uint64_t{1} << 32);
    CHECK(dedupe.number(std::span<const uint32_t>(keys), numbers.data.get(), distinct.data.get()) == keys.size());
    uint32_t seen = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      const uint32_t number = numbers.data[i] & lookup_offset;
      CHECK(distinct.data[number] == keys[i]);
      CHECK((number == seen) == ((numbers.data[i] & lookup_first) != 0));
      seen += number == seen;
    }
    CHECK(seen == dedupe.found());
  }
}

// Callers that find the pool busy work alone, and the pool may change size between their jobs.
void pool_is_shared() {
  ThreadPool& pool = ThreadPool::shared();
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([&pool, caller] {
      for (size_t tasks = 0; tasks < 200; ++tasks) {
        std::vector<int> done(tasks);
        pool.parallel_for(tasks, [&](size_t task, size_t lane) { done[task] += lane < threads_max ? 1 : 100; });
        for (const int times : done) CHECK(times == 1);
        if (caller == 0 && tasks % 50 == 0) pool.resize(2 + static_cast<int>(tasks / 50));
      }
    });
  for (std::thread& caller : callers) caller.join();
}

std::string all_digests() {
  chance.seed(5);
  std::string digest;
  for (const size_t dim : {1, 7, 8, 16, 33, 64, 128}) digest += shard_digest(dim);
  for (const size_t dim : {1, 16, 33}) digest += parity_digest(dim);
  for (const size_t dim : {1, 16}) digest += capture_digest(dim);
  for (const size_t dim : {1, 16}) digest += priority_digest(dim);
  for (const bool bags : {false, true})
    for (const int64_t servers : {1, 3, 7})
      for (const int64_t batch : {0, 1, 200}) digest += router_digest(bags, servers, batch);
  return digest + merge_digest() + crc_digest() + gf_digest();
}

}  // namespace

int main() {
  dedupe_wraps();
  pool_is_shared();
  std::string first;
  for (const std::string& level : simd_levels())
    for (const int threads : {1, 3}) {
      if (threads == 1 && !first.empty()) continue;  // once: the best form with one thread
      set_simd(level);
      ThreadPool::shared().resize(threads);
      const std::string digest = all_digests();
      if (first.empty()) first = digest;
      CHECK(digest == first);
    }
  ThreadPool::shared().resize(1);
  std::printf("%zu bytes agree\n", first.size());
  return 0;
}
