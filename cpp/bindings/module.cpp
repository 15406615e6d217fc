// regrow._kernels: a table of contents. Each bind_ function is in the file of that name; the stub that describes
// all of it to a reader and a type checker is src/regrow/_kernels.pyi.
#include <nanobind/nanobind.h>

namespace regrow::bindings {
void bind_system(nanobind::module_& m);   // instruction set, threads, memory, checksum
void bind_shard(nanobind::module_& m);    // Shard, shard_bytes, sum_pushes, has_repeated_slots: a server's side
void bind_tiered(nanobind::module_& m);   // TieredShard, run_tier_model: a server's side with rows on disk
void bind_gf(nanobind::module_& m);       // gf_xor, xor_matching: a decoder's side
void bind_places(nanobind::module_& m);   // take_places, mark_places, ...: likewise, what is to be decoded
void bind_router(nanobind::module_& m);   // Router, Plan: a worker's side
void bind_fold(nanobind::module_& m);     // newest_rows, gather_rows: a merger's side
void bind_criteo(nanobind::module_& m);   // parse_criteo, skip_lines: a data file's text to arrays
void bind_samples(nanobind::module_& m);  // SampleParser: columns to arrays, as a schema says
}  // namespace regrow::bindings

NB_MODULE(_kernels, m) {
  using namespace regrow::bindings;
  bind_system(m);
  bind_shard(m);
  bind_tiered(m);
  bind_gf(m);
  bind_places(m);
  bind_router(m);
  bind_fold(m);
  bind_criteo(m);
  bind_samples(m);
}
