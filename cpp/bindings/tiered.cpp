// TieredShard, and its test against dictionaries.
#include "regrow/tiered.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "arrays.hpp"
#include "regrow/tier_model.hpp"

namespace regrow::bindings {
namespace {

using namespace nb::literals;

TableSettings table_from(const nb::dict& given) {
  const auto number = [&](const char* key) { return nb::cast<int64_t>(given[key]); };
  const auto real = [&](const char* key) { return nb::cast<double>(given[key]); };
  TableSettings table;
  table.rows = number("rows");
  table.dim = number("dim");
  table.k = number("k");
  table.r = number("r");
  table.optimizer = optimizer_from_name(nb::cast<std::string>(given["optimizer"]));
  table.numbers = {real("learning_rate"), real("eps"),      real("beta1"),
                   real("beta2"),         real("momentum"), real("weight_decay")};
  table.seed = nb::cast<uint64_t>(given["seed"]);
  table.init_bound = real("init_bound");
  table.table = number("table");
  return table;
}

TierPolicy policy_from(const std::string& name) {
  if (name == "lru") return TierPolicy::lru;
  if (name == "none") return TierPolicy::none;
  if (name == "self") return TierPolicy::self;
  throw std::invalid_argument("policy must be lru, none or self, not " + name);
}

void construct(TieredShard* shard, const std::vector<nb::dict>& tables, int64_t servers, int64_t server, int64_t rings,
               const std::string& directory, const std::string& io, int threads, bool wipe, uint64_t fingerprint,
               size_t cache_bytes, uint64_t bytes_max, const std::string& policy, uint32_t patience,
               std::optional<uint64_t> at_epoch) {
  TierSettings settings;
  settings.servers = servers;
  settings.server = server;
  settings.rings = rings;
  settings.fingerprint = fingerprint;
  settings.cache_bytes = cache_bytes;
  settings.bytes_max = bytes_max;
  settings.policy = policy_from(policy);
  settings.patience = patience;
  settings.at_epoch = at_epoch;
  std::vector<TableSettings> found;
  for (const nb::dict& table : tables) found.push_back(table_from(table));
  nb::gil_scoped_release release;
  new (shard) TieredShard(settings, found, open_files(directory, io, threads, wipe));
}

void gather(TieredShard& shard, const Input& counts, const Input& slots, const Output& out) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  const auto out_span = write<float>(out, "out");
  nb::gil_scoped_release release;
  shard.gather(counts_span, slots_span, out_span);
}

void update(TieredShard& shard, const Input& counts, const Input& slots, const Input& grads, int64_t step,
            const std::vector<double>& rates) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  const auto grads_span = read<float>(grads, "grads");
  nb::gil_scoped_release release;
  shard.update(counts_span, slots_span, grads_span, step, rates);
}

void assign_untouched(TieredShard& shard, const Input& counts, const Input& slots, const Input& weights) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  const auto weights_span = read<float>(weights, "weights");
  nb::gil_scoped_release release;
  shard.assign_untouched(counts_span, slots_span, weights_span);
}

void read_records(TieredShard& shard, size_t table, int64_t first_slot, int64_t count, const Output& out) {
  const auto out_span = write<float>(out, "out");
  nb::gil_scoped_release release;
  shard.read_records(table, first_slot, count, out_span);
}

void write_records(TieredShard& shard, size_t table, int64_t first_slot, int64_t count, const Input& src) {
  const auto source_span = read<float>(src, "src");
  nb::gil_scoped_release release;
  shard.write_records(table, first_slot, count, source_span);
}

size_t load_rows(TieredShard& shard, size_t table, const Input& ids, const std::vector<Input>& parts,
                 std::optional<size_t> clean_to) {
  const auto ids_span = read<uint32_t>(ids, "ids");
  std::vector<std::span<const float>> values;
  for (const Input& part : parts) values.push_back(read<float>(part, "parts"));
  nb::gil_scoped_release release;
  return shard.load_rows(table, ids_span, values, clean_to);
}

nb::tuple capture_chunk(TieredShard& shard, int64_t bytes_max, bool aside_first) {
  CapturedChunk captured;
  {
    nb::gil_scoped_release release;
    captured = shard.capture_chunk(bytes_max, aside_first);
  }
  return nb::make_tuple(owned(std::move(captured.counts)), owned(std::move(captured.words)));
}

uint64_t fetch(TieredShard& shard, const Input& counts, const Input& slots) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  nb::gil_scoped_release release;
  return shard.fetch(counts_span, slots_span);
}

void note_updates(TieredShard& shard, const Input& counts, const Input& slots) {
  shard.note_updates(read<int32_t>(counts, "counts"), read<uint32_t>(slots, "slots"));
}

TierBug bug_from(const std::string& name) {
  const std::pair<const char*, TierBug> bugs[] = {{"none", TierBug::none},
                                                  {"no_incarnation", TierBug::no_incarnation},
                                                  {"freed_first", TierBug::freed_first},
                                                  {"no_sync", TierBug::no_sync},
                                                  {"pin_ignored", TierBug::pin_ignored},
                                                  {"pinned_not_written", TierBug::pinned_not_written},
                                                  {"home_not_synced", TierBug::home_not_synced},
                                                  {"neighbour_too_new", TierBug::neighbour_too_new},
                                                  {"noted_too_new", TierBug::noted_too_new}};
  for (const auto& [each, bug] : bugs)
    if (name == each) return bug;
  throw std::invalid_argument("there is no bug " + name);
}

nb::tuple run_model(uint64_t seed, uint64_t crashes, const std::string& bug) {
  const TierBug planted = bug_from(bug);
  ModelRun run;
  {
    nb::gil_scoped_release release;
    run = run_tier_model(seed, crashes, planted);
  }
  const std::map<std::string, uint64_t> counts = {{"crashes", run.crashes},
                                                  {"crashes_opening", run.crashes_opening},
                                                  {"went_back", run.went_back},
                                                  {"calls", run.calls},
                                                  {"checkpoints", run.checkpoints},
                                                  {"commits", run.commits},
                                                  {"rows_compared", run.rows_compared},
                                                  {"evictions", run.evictions},
                                                  {"evictions_young", run.evictions_young},
                                                  {"rounds", run.rounds},
                                                  {"damages", run.damages},
                                                  {"damages_found", run.damages_found},
                                                  {"full", run.full}};
  return nb::make_tuple(counts, run.failure);
}

// What was not foreseen here is left to others: the exception goes on.
void translate_errors(const std::exception_ptr& error, void*) {
  const auto raise = [](const char* name, const char* text) {
    const nb::object type = nb::module_::import_("regrow.errors").attr(name);
    PyErr_SetString(type.ptr(), text);
  };
  try {
    std::rethrow_exception(error);
  } catch (const StoreDamaged& damaged) {
    raise("StoreDamaged", damaged.what());
  } catch (const StoreFull& full) {
    raise("StoreFull", full.what());
  } catch (const DiskError& failed) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(failed.code(), failed.what()).ptr());
  }
}

}  // namespace

void bind_tiered(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::register_exception_translator(translate_errors);
  nb::class_<TieredShard>(m, "TieredShard", "The rows of one server, some of them on disk.")
      .def("__init__", &construct, "tables"_a, nb::kw_only(), "servers"_a, "server"_a, "rings"_a, "directory"_a, "io"_a,
           "threads"_a, "wipe"_a, "fingerprint"_a, "cache_bytes"_a, "bytes_max"_a, "policy"_a, "patience"_a,
           "at_epoch"_a.none())
      .def_prop_ro("memory_bytes", &TieredShard::memory_bytes)
      .def("record_floats", &TieredShard::record_floats, "table"_a)
      .def("slots", &TieredShard::slots, "table"_a)
      .def("blocks", &TieredShard::blocks, "table"_a)
      .def("gather", &gather, "counts"_a, "slots"_a, "out"_a)
      .def("update", &update, "counts"_a, "slots"_a, "grads"_a, "step"_a, "rates"_a = std::vector<double>{})
      .def("assign_untouched", &assign_untouched, "counts"_a, "slots"_a, "weights"_a)
      .def("read_records", &read_records, "table"_a, "first_slot"_a, "count"_a, "out"_a)
      .def("write_records", &write_records, "table"_a, "first_slot"_a, "count"_a, "src"_a)
      .def("load_rows", &load_rows, "table"_a, "ids"_a, "parts"_a, "clean_to"_a = nb::none())
      .def(
          "touched", [](const TieredShard& shard, size_t table) { return owned(shard.touched(table)); }, "table"_a)
      .def("add_tenant", &TieredShard::add_tenant, Released())
      .def("dirty_rows", &TieredShard::dirty_rows, "tenant"_a, Released())
      .def("begin_capture", &TieredShard::begin_capture, "tenant"_a, "full"_a, Released())
      .def("capture_chunk", &capture_chunk, "bytes_max"_a, "aside_first"_a = false)
      .def("capture_left", &TieredShard::capture_left)
      .def("capture_side_bytes", &TieredShard::capture_side_bytes)
      .def("end_capture", &TieredShard::end_capture, "durable"_a, Released())
      .def("check_tenant", &TieredShard::check_tenant, "tenant"_a)
      .def("note_updates", &note_updates, "counts"_a, "slots"_a)
      .def("updates_noted", &TieredShard::updates_noted)
      .def("set_updates_noted", &TieredShard::set_updates_noted, "total"_a)
      .def("updates_uncaptured", &TieredShard::updates_uncaptured, "tenant"_a)
      .def_prop_ro("fetch_fd", &TieredShard::fetch_fd)
      .def("fetch", &fetch, "counts"_a, "slots"_a)
      .def("poll_fetched", &TieredShard::poll_fetched, Released())
      .def("release", &TieredShard::release, "ticket"_a, Released())
      .def("upkeep", &TieredShard::upkeep, Released())
      .def("begin_epoch", &TieredShard::begin_epoch)
      .def("poll_complete", &TieredShard::poll_complete, Released())
      .def("hasten", &TieredShard::hasten, "epoch"_a, "seconds_left"_a)
      .def("commit_epoch", &TieredShard::commit_epoch, "epoch"_a, Released())
      .def("tier_report", &TieredShard::report)
      .def_prop_ro("io_description", &TieredShard::io_description)
      .def_prop_ro("is_mapped", &TieredShard::is_mapped);
  m.def("run_tier_model", &run_model, "seed"_a, "crashes"_a, "bug"_a = "none",
        "Runs a tiered store against dictionaries, with crashes: (counts, what was wrong).");
}

}  // namespace regrow::bindings
