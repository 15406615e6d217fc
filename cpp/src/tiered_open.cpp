// How a TieredShard begins: all new, or as it was at one of its checkpoints. To go back, it reads the bits that say
// which rows are at home, and the log as far as it is known to be durable; nothing else. What it finds there must all
// be right: whatever a crash may have spoiled lies behind that.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>

#include "regrow/tiered.hpp"
#include "table_rules.hpp"

namespace regrow {
namespace {

constexpr uint64_t segment_bytes_least = 1 << 20;
constexpr uint64_t segments_least = 4;
constexpr uint64_t read_bytes = 4 << 20;  // at a time, of what is read in sequence
constexpr size_t segments_read_at_a_time = 8;

// What places in the log may take: see docs/tiered.md for the target it follows from.
constexpr uint64_t places_bytes = 44 << 20;
constexpr double places_bytes_per_row = 0.5;
constexpr double place_entry_bytes = 12.5;

std::string list_damage(const std::vector<std::string>& damaged) {
  constexpr size_t named_max = 8;
  std::string text = std::to_string(damaged.size()) + " damaged: ";
  for (size_t i = 0; i < std::min(named_max, damaged.size()); ++i) text += (i ? ", " : "") + damaged[i];
  return text + (damaged.size() > named_max ? ", and others" : "");
}

uint64_t choose_segment_bytes(uint64_t asked, size_t record_bytes_max, uint64_t page_bytes) {
  uint64_t bytes = asked ? asked : segment_bytes_least;
  const uint64_t least = page_bytes + sizeof(LogHeader) + record_bytes_max;
  while (bytes < (asked ? least : 4 * least)) bytes *= 2;
  return bytes;
}

}  // namespace

TieredShard::TieredShard(const TierSettings& settings, const std::vector<TableSettings>& tables,
                         std::unique_ptr<Disk> disk)
    : settings_(settings), disk_(std::move(disk)), page_bytes_(disk_->block_bytes()) {
  Layout(settings.servers, 1, 0, settings.rings, 0);  // checks servers and rings
  if (settings.server < 0 || settings.server >= settings.servers)
    throw std::invalid_argument("server must be between 0 and " + text(settings.servers - 1) + ", not " +
                                text(settings.server));
  if (tables.empty() || tables.size() >= padding_table)
    throw std::invalid_argument("a store has between 1 and " + text(padding_table - 1) + " tables");
  for (const TableSettings& table : tables) add_table(table, home_end_);
  share_cache();
  uint64_t record_bytes_max = 0, rows = 0, entry_bytes_min = UINT64_MAX;
  for (const Table& table : tables_) {
    record_bytes_max = std::max<uint64_t>(record_bytes_max, table.record_bytes());
    entry_bytes_min = std::min<uint64_t>(entry_bytes_min, table.record_bytes() + sizeof(LogHeader));
    rows += table.slots;
  }
  settings_.segment_bytes = choose_segment_bytes(settings.segment_bytes, record_bytes_max, page_bytes_);
  entry_bytes_max_ = sizeof(LogHeader) + record_bytes_max;
  uint64_t frames_bytes = 0;
  for (const auto& frames : frames_)
    frames_bytes += frames->count() * (sizeof(LogHeader) + frames->stride() * sizeof(float));
  reserve_segments_ = segments_for(frames_bytes) + 1;
  const uint64_t log_bytes_asked = (2 * reserve_segments_ + 8 * segments_least) * settings_.segment_bytes;
  if (!settings_.log_bytes_max)
    settings_.log_bytes_max = !settings.bytes_max              ? home_end_ + log_bytes_asked
                              : settings.bytes_max > home_end_ ? settings.bytes_max - home_end_
                                                               : 0;
  const uint64_t segments_max = std::min(settings_.log_bytes_max, log_bytes_most) / settings_.segment_bytes;
  if (segments_max < reserve_segments_ + segments_least)
    throw std::invalid_argument(
        "of " + std::to_string(settings.bytes_max) + " bytes, rows take " + std::to_string(home_end_) +
        " and the log may have " + std::to_string(settings_.log_bytes_max) +
        " bytes; for a checkpoint of all rows in a cache of " + std::to_string(settings.cache_bytes) +
        " bytes it needs at least " + std::to_string((reserve_segments_ + segments_least) * settings_.segment_bytes));
  const double places = static_cast<double>(places_bytes) + places_bytes_per_row * static_cast<double>(rows);
  const auto target = static_cast<uint64_t>(places / place_entry_bytes) * entry_bytes_min;
  log_bytes_target_ = std::min(segments_max * settings_.segment_bytes, std::max(target, 8 * settings_.segment_bytes));

  lanes_ = std::make_unique<IoLanes>(*disk_, settings.threads);
  LogSettings log;
  log.fingerprint = settings.fingerprint;
  log.segment_bytes = settings_.segment_bytes;
  log.block_bytes = page_bytes_;
  log.segments_max = segments_max;
  log_ = std::make_unique<TierLog>(log, *lanes_);
  if (settings.at_epoch)
    go_back(*settings.at_epoch);
  else
    begin_new();
}

// Memory that the lanes use must outlive them.
TieredShard::~TieredShard() { lanes_.reset(); }

void TieredShard::add_table(const TableSettings& settings, uint64_t home_begin) {
  check_settings(settings);
  if (settings.r)
    throw std::invalid_argument("rows on disk have no parities: table " + text(settings.table) +
                                " has r = " + text(settings.r));
  const Layout layout(settings_.servers, settings.k, 0, settings_.rings, settings.table);
  const uint32_t slots = checked_slots(layout, settings.rows);
  const auto stride = static_cast<size_t>(regrow::record_floats(settings.optimizer, settings.dim));
  const size_t words = (size_t{slots} + 63) / 64;
  const HomeTable home(home_begin, slots, stride * sizeof(float), page_bytes_);
  tables_.push_back({.settings = settings,
                     .layout = layout,
                     .slots = slots,
                     .stride = stride,
                     .dim = static_cast<size_t>(settings.dim),
                     .initial_key = table_key(settings.seed, static_cast<uint64_t>(settings.table)),
                     .frames_index = 0,
                     .home = home,
                     .frames = FrameMap(),
                     .loading = SlotMap(),
                     .places = SlotMap(),
                     .places_before = {SlotMap(), SlotMap()},
                     .changed = Bits(words),
                     .homed = Bits(words),
                     .gone = {},
                     .gone_before = {},
                     .fresh = {},
                     .tracking = {}});
  home_end_ = home.end;
}

// Rows of one size share frames. Sizes of which few bytes exist get all they need, the others the same number of bytes:
// so no table starves, however its rows are used.
void TieredShard::share_cache() {
  std::map<size_t, uint64_t> rows;  // by stride
  for (const Table& table : tables_) rows[table.stride] += table.slots;
  const auto frame_bytes = [](size_t stride) { return stride * sizeof(float) + Frames::bytes_beside; };
  std::vector<std::pair<uint64_t, size_t>> sizes;
  for (const auto& [stride, count] : rows) sizes.emplace_back(count * frame_bytes(stride), stride);
  std::sort(sizes.begin(), sizes.end());
  uint64_t left = settings_.cache_bytes;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto [bytes, stride] = sizes[i];
    const uint64_t share = std::min<uint64_t>(bytes, left / (sizes.size() - i));
    const uint64_t count = share / frame_bytes(stride);
    if (count < 1 || count >= SlotMap::none)
      throw std::invalid_argument("a cache of " + std::to_string(settings_.cache_bytes) + " bytes has room for " +
                                  std::to_string(count) + " rows of " + std::to_string(stride * sizeof(float)) +
                                  " bytes; it needs room for at least one, and fewer than 2^32");
    left -= share;
    const bool is_whole = count >= rows[stride] && settings_.policy != TierPolicy::none;
    uint32_t base = 0;
    for (Table& table : tables_) {
      if (table.stride != stride) continue;
      table.frames_index = frames_.size();
      if (!is_whole && settings_.patience) {
        table.gone.assign(table.words(), 0);
        table.gone_before.assign(table.words(), 0);
      }
      if (!is_whole) continue;
      table.frames.make_whole(base, table.slots);
      table.fresh.assign(table.words(), 0);
      base += table.slots;
    }
    frames_.push_back(std::make_unique<Frames>(stride, count, is_whole, settings_.patience));
  }
}

void TieredShard::begin_new() {
  state_ = {settings_.fingerprint, settings_.segment_bytes, page_bytes_, 0, 0, 1, {Incarnation{}}};
  lanes_->wait(Lane::writes, submit_state({}));
  if (const int code = lanes_->failure(Lane::writes)) throw DiskError(code, lanes_->failure_text(Lane::writes));
  log_->begin(1, {});
}

void TieredShard::go_back(uint64_t epoch) {
  const std::optional<FoundState> found = read_state(*disk_);
  if (!found) throw std::invalid_argument("there is no store in this directory");
  const TierState& state = found->state;
  if (state.fingerprint != settings_.fingerprint)
    throw std::invalid_argument("the files in this directory are those of another job");
  if (state.segment_bytes != settings_.segment_bytes || state.page_bytes != page_bytes_)
    throw std::invalid_argument("the files in this directory have segments of " + std::to_string(state.segment_bytes) +
                                " and pages of " + std::to_string(state.page_bytes) + " bytes; this store would have " +
                                std::to_string(settings_.segment_bytes) + " and " + std::to_string(page_bytes_));
  if (epoch < std::max<uint64_t>(1, state.committed) || epoch > state.complete)
    throw std::invalid_argument("there is no checkpoint " + std::to_string(epoch) + " here; there are " +
                                std::to_string(std::max<uint64_t>(1, state.committed)) + " to " +
                                std::to_string(state.complete));
  if (state.incarnations.back().number >= incarnations_max)
    throw StoreFull("the store was begun " + std::to_string(incarnations_max) + " times, and cannot be once more");
  read_homed();
  scan_log(state, epoch);
  for (Table& table : tables_) {
    table.changed = table.homed;
    table.places.for_each([&](uint32_t slot, uint32_t) { mark_changed(table, slot); });
  }
  state_ = state;
  state_version_ = found->version;
  state_.committed = state_.complete = committed_ = complete_ = epoch;
  epoch_ = epoch + 1;
  Incarnation& before = state_.incarnations.back();
  before.epoch_end = epoch;
  const LogPosition end = std::max(before.log_end, LogPosition{state_.tail - 1, 0});
  const uint64_t number = before.number + 1;
  state_.incarnations.push_back({number, 0, end});
  // The new incarnation is durable before the first byte it writes: or else what comes after a crash could take this
  // one's versions for its own.
  const uint64_t job = submit_state({});
  lanes_->wait(Lane::writes, job);
  if (const int code = lanes_->failure(Lane::writes)) throw DiskError(code, lanes_->failure_text(Lane::writes));
  check_order(lanes_->is_done(Lane::writes, job), "an incarnation writes before it is durable");
  log_->begin(number, end);
}

void TieredShard::read_homed() {
  std::vector<std::string> damaged;
  AlignedBytes bytes(read_bytes);
  for (size_t t = 0; t < tables_.size(); ++t) {
    Table& table = tables_[t];
    const uint64_t end = table.home.rows_begin - table.home.bits_begin;
    for (uint64_t at = 0; at < end; at += read_bytes) {
      const Piece piece{DiskFile::home, table.home.bits_begin + at, bytes.data(), std::min(read_bytes, end - at)};
      disk_->read({&piece, 1});
      counters_.bytes_read_home += piece.bytes;
      for (uint64_t within = 0; within < piece.bytes; within += sector_bytes) {
        const uint64_t number = (at + within) / sector_bytes;
        if (number >= table.home.sectors || read_bit_sector(bytes.data() + within, table.homed, number)) continue;
        damaged.push_back("slots " + std::to_string(number * sector_bits) + " to " +
                          std::to_string(std::min<uint64_t>(table.slots, (number + 1) * sector_bits) - 1) +
                          " of table " + std::to_string(t) + " (home, whether they are there)");
      }
    }
  }
  if (!damaged.empty()) throw StoreDamaged(list_damage(damaged));
}

std::vector<size_t> TieredShard::strides() const {
  std::vector<size_t> strides;
  for (const Table& table : tables_) strides.push_back(table.stride);
  return strides;
}

// Finds the segments in use by their heads. Each number was used by one incarnation only, as far as it counts: the
// first that was left behind at or after it.
void TieredShard::scan_log(const TierState& found, uint64_t epoch) {
  const uint64_t segments = std::min(settings_.log_bytes_max, log_bytes_most) / settings_.segment_bytes;
  const uint64_t last = found.incarnations.back().log_end.sequence;
  std::map<uint64_t, uint64_t> indices;  // by sequence
  std::map<uint64_t, const Incarnation*> lives;
  for (uint64_t sequence = found.tail; sequence <= last; ++sequence) {
    const auto life = std::find_if(found.incarnations.begin(), found.incarnations.end(),
                                   [&](const Incarnation& each) { return each.log_end.sequence >= sequence; });
    lives[sequence] = &*life;
  }
  constexpr uint64_t heads = 256;
  AlignedBytes blocks(heads * page_bytes_);
  for (uint64_t first = 0; first < segments && indices.size() < lives.size(); first += heads) {
    std::vector<Piece> pieces;
    for (uint64_t index = first; index < std::min(segments, first + heads); ++index)
      pieces.push_back(
          {DiskFile::log, index * settings_.segment_bytes, blocks.data() + (index - first) * page_bytes_, page_bytes_});
    disk_->read(pieces);
    counters_.bytes_read_log += pieces.size() * page_bytes_;
    for (uint64_t index = first; index < first + pieces.size(); ++index) {
      const auto head = read_segment_head(blocks.data() + (index - first) * page_bytes_, settings_.fingerprint);
      if (!head) continue;
      const auto life = lives.find(head->sequence);
      const bool counts = life != lives.end() &&
                          (settings_.bug == TierBug::no_incarnation || life->second->number == head->incarnation);
      if (counts) indices[head->sequence] = index;
    }
  }
  LogFound log_found;
  log_found.versions.resize(tables_.size());
  std::vector<Piece> pieces;
  std::vector<std::pair<uint64_t, const Incarnation*>> owners;  // of the pieces: sequence, life
  AlignedBytes memory(segments_read_at_a_time * settings_.segment_bytes);
  const auto read_and_adopt = [&] {
    std::vector<Piece> filled;
    std::copy_if(pieces.begin(), pieces.end(), std::back_inserter(filled),
                 [](const Piece& each) { return each.bytes; });
    disk_->read(filled);
    for (size_t i = 0; i < pieces.size(); ++i)
      adopt_segment(pieces[i], *owners[i].second, owners[i].first, epoch, log_found);
    pieces.clear();
    owners.clear();
  };
  for (const auto& [sequence, life] : lives) {
    const auto index = indices.find(sequence);
    if (index == indices.end()) {
      log_found.damaged.push_back("whatever segment " + std::to_string(sequence) + " of the log had");
      continue;
    }
    const uint64_t bytes = sequence == life->log_end.sequence ? life->log_end.offset : settings_.segment_bytes;
    std::byte* data = memory.data() + pieces.size() * settings_.segment_bytes;
    pieces.push_back({DiskFile::log, index->second * settings_.segment_bytes, data, bytes});
    owners.emplace_back(sequence, life);
    if (pieces.size() == segments_read_at_a_time) read_and_adopt();
  }
  if (!pieces.empty()) read_and_adopt();
  if (!log_found.damaged.empty()) throw StoreDamaged(list_damage(log_found.damaged));
  for (size_t t = 0; t < tables_.size(); ++t) {
    tables_[t].places = SlotMap(log_found.versions[t].size());
    for (const auto& [slot, place] : log_found.versions[t]) tables_[t].places.put(slot, place);
  }
}

void TieredShard::adopt_segment(const Piece& piece, const Incarnation& life, uint64_t sequence, uint64_t epoch,
                                LogFound& log_found) {
  std::vector<std::string>& damaged = log_found.damaged;
  const bool is_last = life.epoch_end == 0;  // the one that is left behind now
  counters_.bytes_read_log += piece.bytes;
  const std::vector<size_t> strides = this->strides();
  LogScan scan({piece.data, piece.bytes}, piece.offset, page_bytes_, strides);
  uint32_t epoch_max = 0;
  while (const auto entry = scan.next()) {
    const LogHeader& header = entry->header;
    const uint64_t end = is_last || settings_.bug == TierBug::no_incarnation ? epoch : life.epoch_end;
    if (header.epoch > end) continue;
    if (header.slot >= tables_[header.table].slots) {
      damaged.push_back("an entry of the log of a slot that does not exist");
      continue;
    }
    log_found.versions[header.table].emplace_back(header.slot, entry->place);
    epoch_max = std::max(epoch_max, header.epoch);
  }
  for (const LogDamage& each : scan.damaged()) damaged.push_back(describe(each));
  log_->adopt(piece.offset / settings_.segment_bytes, sequence, piece.bytes, epoch_max);
}

}  // namespace regrow
