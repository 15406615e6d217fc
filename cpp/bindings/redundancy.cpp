// The Shard's methods for parities and recovery, and the loops of decoding.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <utility>

#include "arrays.hpp"
#include "regrow/gf.hpp"
#include "regrow/shard.hpp"

namespace regrow::bindings {
namespace {

using namespace nb::literals;

nb::tuple take_flush(Shard& shard, size_t group, bool keep) {
  Flush flush;
  {
    nb::gil_scoped_release release;
    flush = shard.take_flush(group, keep);
  }
  return nb::make_tuple(owned(std::move(flush.counts)), owned(std::move(flush.slots)), owned(std::move(flush.deltas)));
}

void published(const Shard& shard, const Input& counts, const Input& slots, const Output& out) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  const auto out_span = write<float>(out, "out");
  nb::gil_scoped_release release;
  shard.published(counts_span, slots_span, out_span);
}

nb::tuple next_touched(const Shard& shard, size_t table, size_t group, int64_t block_first, int64_t rows_max) {
  std::pair<std::vector<uint32_t>, uint32_t> found;
  {
    nb::gil_scoped_release release;
    found = shard.next_touched(table, group, block_first, rows_max);
  }
  return nb::make_tuple(owned(std::move(found.first)), found.second);
}

void parity_apply(Shard& shard, int64_t source, const Input& counts, const Input& slots, const Input& deltas) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  const auto deltas_span = read<float>(deltas, "deltas");
  nb::gil_scoped_release release;
  shard.parity_apply(source, counts_span, slots_span, deltas_span);
}

void parity_read(const Shard& shard, int64_t q, const Input& counts, const Input& blocks, const Output& out) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto blocks_span = read<uint32_t>(blocks, "blocks");
  const auto out_span = write<float>(out, "out");
  nb::gil_scoped_release release;
  shard.parity_read(q, counts_span, blocks_span, out_span);
}

void parity_add(const Shard& shard, int64_t q, const Input& counts, const Input& blocks, const Output& records) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto blocks_span = read<uint32_t>(blocks, "blocks");
  const auto records_span = write<float>(records, "records");
  nb::gil_scoped_release release;
  shard.parity_add(q, counts_span, blocks_span, records_span);
}

void know_touched(Shard& shard, size_t group, size_t table, const Input& words) {
  const auto words_span = read<uint64_t>(words, "words");
  nb::gil_scoped_release release;
  shard.know_touched(group, table, words_span);
}

nb::tuple prepare(Shard& shard, const Input& counts, const Input& slots) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  RowNames missing;
  {
    nb::gil_scoped_release release;
    missing = shard.prepare(counts_span, slots_span);
  }
  return nb::make_tuple(owned(std::move(missing.counts)), owned(std::move(missing.slots)));
}

size_t put(Shard& shard, const Input& counts, const Input& slots, const Input& relatives) {
  const auto counts_span = read<int32_t>(counts, "counts");
  const auto slots_span = read<uint32_t>(slots, "slots");
  const auto relatives_span = read<float>(relatives, "relatives");
  nb::gil_scoped_release release;
  return shard.put(counts_span, slots_span, relatives_span);
}

}  // namespace

void bind_redundancy(nb::class_<Shard>& shard) {
  shard.def_prop_ro("redundancy_bytes", &Shard::redundancy_bytes)
      .def("blocks", &Shard::blocks, "table"_a)
      .def("pending_rows", &Shard::pending_rows, "group"_a)
      .def("pending_bytes", &Shard::pending_bytes)
      .def("take_flush", &take_flush, "group"_a, "keep"_a = false)
      .def("published", &published, "counts"_a, "slots"_a, "out"_a)
      .def("next_touched", &next_touched, "table"_a, "group"_a, "block_first"_a, "rows_max"_a)
      .def("parity_apply", &parity_apply, "source"_a, "counts"_a, "slots"_a, "deltas"_a)
      .def("parity_add", &parity_add, "q"_a, "counts"_a, "blocks"_a, "records"_a)
      .def("parity_read", &parity_read, "q"_a, "counts"_a, "blocks"_a, "out"_a)
      .def(
          "parity_members",
          [](const Shard& self, size_t table, int64_t q, int64_t member) {
            const auto words = self.parity_members(table, q, member);
            return nb::ndarray<nb::numpy, const uint64_t>(words.data(), {words.size()});
          },
          "table"_a, "q"_a, "member"_a, nb::rv_policy::reference_internal)
      .def(
          "parity_touched",
          [](const Shard& self, int64_t source, size_t group, size_t table) {
            return copied(self.parity_touched(source, group, table));
          },
          "source"_a, "group"_a, "table"_a)
      .def("parity_void", &Shard::parity_void, "table"_a, "q"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("know_touched", &know_touched, "group"_a, "table"_a, "words"_a)
      .def("prepare", &prepare, "counts"_a, "slots"_a)
      .def("put", &put, "counts"_a, "slots"_a, "relatives"_a)
      .def("missing_rows", &Shard::missing_rows, "group"_a = nb::none())
      .def("blank_rows", &Shard::blank_rows)
      .def("fill", &Shard::fill, "rows_max"_a, nb::call_guard<nb::gil_scoped_release>());
}

void bind_gf(nb::module_& m) {
  m.def(
      "gf_xor",
      [](const Output& target, const Input& source, int64_t coefficient) {
        const auto target_span = write<float>(target, "target");
        const auto source_span = read<float>(source, "source");
        nb::gil_scoped_release release;
        gf_xor(target_span, source_span, coefficient);
      },
      "target"_a, "source"_a, "coefficient"_a, "target ^= coefficient * source, on raw bytes.");
  m.def(
      "xor_matching",
      [](const Input& slots_sorted, const Output& records, int64_t floats, const Input& slots, const Input& deltas,
         int64_t coefficient) {
        const auto sorted_span = read<uint32_t>(slots_sorted, "slots_sorted");
        const auto records_span = write<float>(records, "records");
        const auto slots_span = read<uint32_t>(slots, "slots");
        const auto deltas_span = read<float>(deltas, "deltas");
        nb::gil_scoped_release release;
        return xor_matching(sorted_span, records_span, floats, slots_span, deltas_span, coefficient);
      },
      "slots_sorted"_a, "records"_a, "floats"_a, "slots"_a, "deltas"_a, "coefficient"_a,
      "XORs multiples of deltas into the records of the same slots; returns how many.");
}

}  // namespace regrow::bindings
