// Rows that are read and written whether or not they are in memory. What is on disk is read in large pieces and does
// not come into the cache; what is written goes to the log.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "regrow/tiered.hpp"
#include "table_rules.hpp"

namespace regrow {
namespace {

constexpr size_t rows_at_a_time = 8192;
constexpr uint64_t gap_bytes_max = 16 << 10;  // to read so much for nothing is cheaper than another read

}  // namespace

bool TieredShard::find_in_memory(RowRef row, float* record) {
  const Table& table = tables_[row.table];
  if (const uint32_t frame = table.frames.find(row.slot); frame != SlotMap::none) {
    std::memcpy(record, frames_of(table).record(frame), table.record_bytes());
    return true;
  }
  if (const uint32_t place = table.places.find(row.slot); place != SlotMap::none) {
    const std::byte* entry = log_->in_memory(place);
    if (!entry) return copy_mapped(locate(row, 0, place), record);
    std::memcpy(record, entry + sizeof(LogHeader), table.record_bytes());
    ++counters_.rows_from_memory;
    return true;
  }
  if (is_homed(row)) return copy_mapped(locate(row, 0, SlotMap::none), record);
  write_initial(table, row.slot, record);
  ++counters_.rows_initial;
  return true;
}

// A record out of files that are mapped, if it is what was written. If it is not, it is read as from any disk, and
// named then.
bool TieredShard::copy_mapped(const ReadPlan::Wanted& wanted, float* record) {
  ReadPlan::Wanted there = wanted;
  there.found = disk_->view(wanted.file, wanted.offset, wanted.bytes);
  const float* found = there.found ? checked(there) : nullptr;
  if (!found) return false;
  std::memcpy(record, found, tables_[wanted.row.table].record_bytes());
  ++(wanted.file == DiskFile::log ? counters_.rows_read_log : counters_.rows_read_home);
  ++counters_.reads;
  return true;
}

// Of a row that is on disk: which bytes have it. `place`: in the log, or none.
TieredShard::ReadPlan::Wanted TieredShard::locate(RowRef row, uint32_t number, uint32_t place) const {
  const Table& table = tables_[row.table];
  if (place != SlotMap::none)
    return {DiskFile::log, log_->offset_of(place), sizeof(LogHeader) + table.record_bytes(), row, number, place};
  const uint64_t offset = table.home.group_begin(table.home.group_of(row.slot)) + table.home.within(row.slot);
  return {DiskFile::home, offset, table.home.row_bytes, row, number, SlotMap::none};
}

void TieredShard::plan_row(RowRef row, uint32_t number, ReadPlan& plan) const {
  plan.rows.push_back(locate(row, number, tables_[row.table].places.find(row.slot)));
}

// Rows whose blocks are next to each other, or not far apart, are read by one piece.
void TieredShard::build_plan(ReadPlan& plan, uint64_t gap_max) const {
  std::sort(plan.rows.begin(), plan.rows.end(), [](const ReadPlan::Wanted& a, const ReadPlan::Wanted& b) {
    return a.file != b.file ? a.file < b.file : a.offset < b.offset;
  });
  const uint64_t block = page_bytes_;
  std::vector<size_t> piece_of;
  for (const ReadPlan::Wanted& row : plan.rows) {
    const uint64_t begin = row.offset / block * block;
    const uint64_t end = (row.offset + row.bytes + block - 1) / block * block;
    Piece* last = plan.pieces.empty() ? nullptr : &plan.pieces.back();
    if (last && last->file == row.file && begin <= last->offset + last->bytes + gap_max)
      last->bytes = std::max<uint64_t>(last->bytes, end - last->offset);
    else
      plan.pieces.push_back({row.file, begin, nullptr, end - begin});
    piece_of.push_back(plan.pieces.size() - 1);
  }
  size_t bytes = 0;
  for (const Piece& piece : plan.pieces) bytes += piece.bytes;
  plan.memory = AlignedBytes(bytes);
  bytes = 0;
  for (Piece& piece : plan.pieces) {
    piece.data = plan.memory.data() + bytes;
    bytes += piece.bytes;
  }
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const Piece& piece = plan.pieces[piece_of[i]];
    plan.rows[i].found = piece.data + (plan.rows[i].offset - piece.offset);
  }
}

// The record, if it is that of the row and has its checksum.
const float* TieredShard::checked(const ReadPlan::Wanted& wanted) const {
  const Table& table = tables_[wanted.row.table];
  if (wanted.file == DiskFile::log) {
    LogHeader header;
    std::memcpy(&header, wanted.found, sizeof header);
    const std::byte* record = wanted.found + sizeof header;
    const bool fine = header.table == wanted.row.table && header.slot == wanted.row.slot &&
                      header.crc == entry_checksum(header, record, table.record_bytes());
    return fine ? reinterpret_cast<const float*>(record) : nullptr;
  }
  HomeHeader header;
  std::memcpy(&header, wanted.found, sizeof header);
  const std::byte* record = wanted.found + sizeof header;
  const uint32_t crc = home_checksum(wanted.row.table, wanted.row.slot, record, table.record_bytes());
  return header.crc == crc ? reinterpret_cast<const float*>(record) : nullptr;
}

// The records of rows, in the order of their slots, to out.
void TieredShard::read_rows(size_t index, std::span<const uint32_t> slots, float* out) {
  const Table& table = tables_[index];
  for (size_t first = 0; first < slots.size(); first += rows_at_a_time) {
    ReadPlan plan;
    for (size_t i = first; i < std::min(slots.size(), first + rows_at_a_time); ++i) {
      const RowRef row{static_cast<uint32_t>(index), slots[i]};
      if (!find_in_memory(row, out + i * table.stride)) plan_row(row, static_cast<uint32_t>(i), plan);
    }
    if (plan.rows.empty()) continue;
    build_plan(plan, gap_bytes_max);
    disk_->read(plan.pieces);
    std::string damaged;
    for (const ReadPlan::Wanted& wanted : plan.rows) {
      const float* record = checked(wanted);
      if (!record) damaged += (damaged.empty() ? "" : ", ") + name(wanted.row);
      if (record) std::memcpy(out + wanted.number * table.stride, record, table.record_bytes());
    }
    if (!damaged.empty()) throw StoreDamaged("not what was written: " + damaged);
  }
}

// Waits until the log can take one more record.
void TieredShard::make_room() {
  while (!may_leave()) {
    settle();
    if (may_leave()) return;
    if (!full_text_.empty()) throw StoreFull(full_text_);
    if (dirty_old_) write_epoch();
    if (clean()) continue;
    if (lanes_->is_idle(Lane::writes)) {
      log_->flush();
      if (lanes_->is_idle(Lane::writes) && !cleaning_)
        throw StoreFull("the log has all the " + std::to_string(settings_.log_bytes_max) +
                        " bytes it may have, and no checkpoint was committed that would free some");
    }
    lanes_->wait(Lane::writes, lanes_->submit(Lane::writes, {}));
  }
}

// Who writes around the cache may do so for long without any upkeep. Then the log is cleaned as it goes, as far as it
// may be, or else places in it would take more memory than is allowed.
void TieredShard::clean_excess() {
  is_hurried_ = true;
  while (log_->used() * settings_.segment_bytes > log_bytes_target_) {
    settle();
    if (!full_text_.empty() || (!cleaning_ && !begin_round())) break;
    if (!clean() && cleaning_) lanes_->wait(Lane::writes, cleaning_->job);
  }
  is_hurried_ = false;
}

// A change of one row as a whole, wherever it is. What a capture needs of it was kept.
void TieredShard::write_row(Table& table, uint32_t slot, const float* record) {
  mark_changed(table, slot);
  const auto index = static_cast<uint16_t>(&table - tables_.data());
  if (const uint32_t frame = table.frames.find(slot); frame != SlotMap::none) {
    before_change(table, slot, frame);
    std::memcpy(frames_of(table).record(frame), record, table.record_bytes());
    return;
  }
  clean_excess();
  make_room();
  put_place(table, slot, log_->append(index, slot, static_cast<uint32_t>(epoch_), {record, table.stride}));
  ++counters_.rows_around;
}

// Rows that are being read would come back as they were. Everybody waits for them.
void TieredShard::finish_reads() {
  for (const Ticket& ticket : tickets_)
    if (ticket.reading) lanes_->wait(Lane::reads, ticket.job);
  if (lanes_->failure(Lane::reads)) throw StoreDamaged(lanes_->failure_text(Lane::reads));
  std::vector<std::string> damaged;
  for (Ticket& ticket : tickets_)
    if (ticket.reading && lanes_->is_done(Lane::reads, ticket.job)) take_reads(ticket, damaged);
  damaged_.insert(damaged_.end(), damaged.begin(), damaged.end());
  forget_given_up();
  lanes_->ring();
}

void TieredShard::keep_aside_all(size_t index, std::span<const uint32_t> slots) {
  Table& table = tables_[index];
  if (!capturing_ || !table.tracking->rows_left) return;
  std::vector<uint32_t> wanted;
  for (const uint32_t slot : slots)
    if (table.tracking->left[slot / 64] >> (slot % 64) & 1 && table.tracking->aside.find(slot) == SlotMap::none)
      wanted.push_back(slot);
  Buffer<float> records(wanted.size() * table.stride);
  read_rows(index, wanted, records.data());
  for (size_t i = 0; i < wanted.size(); ++i) keep_aside(table, wanted[i], records.data() + i * table.stride);
}

void TieredShard::assign_untouched(std::span<const int32_t> counts, std::span<const uint32_t> slots,
                                   std::span<const float> weights) {
  check_call(counts, slots, weights.size());
  finish_reads();
  const float* source = weights.data();
  const uint32_t* slot = slots.data();
  for (size_t t = 0; t < counts.size(); ++t) {
    Table& table = tables_[t];
    std::vector<float> record(table.stride);
    for (int32_t i = 0; i < counts[t]; ++i, ++slot, source += table.dim) {
      if (table.touched(*slot)) continue;  // so it is in no capture, and nothing is kept aside
      std::copy(source, source + table.dim, record.begin());
      write_row(table, *slot, record.data());
    }
  }
}

void TieredShard::read_records(size_t table, int64_t first_slot, int64_t count, std::span<float> out) {
  check_range(table, first_slot, count, out.size());
  std::vector<uint32_t> slots(static_cast<size_t>(count));
  std::iota(slots.begin(), slots.end(), static_cast<uint32_t>(first_slot));
  read_rows(table, slots, out.data());
}

void TieredShard::write_records(size_t table, int64_t first_slot, int64_t count, std::span<const float> source) {
  check_range(table, first_slot, count, source.size());
  finish_reads();
  std::vector<uint32_t> slots(static_cast<size_t>(count));
  std::iota(slots.begin(), slots.end(), static_cast<uint32_t>(first_slot));
  keep_aside_all(table, slots);
  for (size_t i = 0; i < slots.size(); ++i)
    write_row(tables_[table], slots[i], source.data() + i * tables_[table].stride);
}

size_t TieredShard::load_rows(size_t table, std::span<const uint32_t> ids,
                              const std::vector<std::span<const float>>& values, std::optional<size_t> clean_to) {
  Table& found = at(table);
  if (clean_to) check_tenant(*clean_to);
  const std::vector<RecordPart> parts = record_parts(found.settings);
  if (values.size() != parts.size())
    throw std::invalid_argument("rows of table " + std::to_string(table) + " have " + std::to_string(parts.size()) +
                                " parts, not " + std::to_string(values.size()));
  for (size_t p = 0; p < parts.size(); ++p)
    if (values[p].size() != ids.size() * parts[p].width)
      throw std::invalid_argument("part " + std::to_string(p) + " of " + std::to_string(ids.size()) + " rows has " +
                                  std::to_string(ids.size() * parts[p].width) + " floats; the array has " +
                                  std::to_string(values[p].size()));
  const uint32_t most = ids.empty() ? 0 : kernels().max_u32(ids.data(), ids.size());
  if (!ids.empty() && most >= found.settings.rows)
    throw std::out_of_range("there is no row " + std::to_string(most) + " in table " + std::to_string(table));
  finish_reads();
  std::vector<std::pair<uint32_t, size_t>> rows;  // slot, number
  for (size_t i = 0; i < ids.size(); ++i)
    if (const Place place = found.layout.place(ids[i]); place.server == settings_.server)
      rows.emplace_back(place.slot, i);
  std::sort(rows.begin(), rows.end());
  std::vector<uint32_t> slots;
  for (const auto& [slot, number] : rows) slots.push_back(slot);
  keep_aside_all(table, slots);
  std::vector<float> record(found.stride);
  for (const auto& [slot, number] : rows) {
    // Padding stays as it is: it was never anything but zeros, unless write_records() said so of a row in memory.
    const uint32_t frame = found.frames.find(slot);
    const bool has_padding = parts.back().first + parts.back().width < found.stride;
    if (has_padding && frame != SlotMap::none)
      std::memcpy(record.data(), frames_of(found).record(frame), found.record_bytes());
    else if (has_padding && found.touched(slot))
      read_rows(table, {&slot, 1}, record.data());
    else
      std::fill(record.begin(), record.end(), 0.0f);
    for (size_t p = 0; p < parts.size(); ++p)
      std::memcpy(record.data() + parts[p].first, values[p].data() + number * parts[p].width,
                  parts[p].width * sizeof(float));
    write_row(found, slot, record.data());
  }
  return rows.size();
}

}  // namespace regrow
