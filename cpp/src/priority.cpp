#include "regrow/priority.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "regrow/buffer.hpp"
#include "regrow/init.hpp"
#include "regrow/thread_pool.hpp"

namespace regrow {
namespace {

constexpr size_t bytes_ahead = 32;  // bytes lie close together, and one row takes a nanosecond
constexpr uint64_t places_ahead = 12;
constexpr size_t words_per_task = size_t{1} << 12;
constexpr uint32_t bucket_count = 1 << 16;
constexpr size_t full_least = 16;
constexpr int dense_rows = 16;  // of a word of 64: then it is faster to look at all

template <typename Body>
void for_words(size_t words, Body&& body) {
  ThreadPool::shared().parallel_for((words + words_per_task - 1) / words_per_task, [&](size_t task, size_t) {
    body(task * words_per_task, std::min(words, (task + 1) * words_per_task));
  });
}

template <typename Body>
void for_bits(uint64_t bits, size_t word, Body&& body) {
  for (; bits; bits &= bits - 1) body(static_cast<uint32_t>(word * 64 + static_cast<size_t>(std::countr_zero(bits))));
}

bool bit_at(const std::vector<uint64_t>& words, uint32_t slot) { return words[slot / 64] >> (slot % 64) & 1; }

void set_bit(std::vector<uint64_t>& words, uint32_t slot) { words[slot / 64] |= uint64_t{1} << (slot % 64); }

void clear_bit(std::vector<uint64_t>& words, uint32_t slot) { words[slot / 64] &= ~(uint64_t{1} << (slot % 64)); }

size_t count_bits(const std::vector<uint64_t>& words) {
  size_t bits = 0;
  for (const uint64_t word : words) bits += static_cast<size_t>(std::popcount(word));
  return bits;
}

size_t words_of(uint32_t slots) { return (size_t{slots} + 63) / 64; }

}  // namespace

PriorityKind priority_from_name(std::string_view name) {
  constexpr std::array<std::string_view, 4> names{"none", "mfu", "ssu", "scar"};
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return static_cast<PriorityKind>(i);
  throw std::invalid_argument("a priority is none, mfu, ssu or scar, not " + std::string(name));
}

// ---- counts

RowCounts::RowCounts(uint32_t slots)
    : slots_(slots), arena_(size_t{slots} + 7), low_(reinterpret_cast<uint8_t*>(arena_.data())) {
  arena_.touch_new();  // while nobody waits: the first pushes would take fifteen times as long
}

void RowCounts::add(const uint32_t* slots, size_t count) {
  size_t wraps = 0;
  for (size_t i = 0; i < count && i < bytes_ahead; ++i) __builtin_prefetch(low_ + slots[i], 1, 3);
  for (size_t i = 0; i < count; ++i) {
    if (i + bytes_ahead < count) __builtin_prefetch(low_ + slots[i + bytes_ahead], 1, 3);
    wraps += ++low_[slots[i]] == 0;
  }
  if (wraps) wraps_.fetch_add(wraps, std::memory_order_relaxed);
}

// A byte that was full is zero now, and no other row of the call has a zero.
void RowCounts::settle(const uint32_t* slots, size_t count) {
  try {
    reserve(wraps_.load(std::memory_order_relaxed));
  } catch (...) {
    for (size_t i = 0; i < count; ++i) --low_[slots[i]];
    wraps_.store(0, std::memory_order_relaxed);
    throw;
  }
  for (size_t i = 0; i < count; ++i)
    if (!low_[slots[i]]) add_full(slots[i], 1);
  wraps_.store(0, std::memory_order_relaxed);
}

RowCounts::Full* RowCounts::place_of(uint32_t slot) {
  const size_t mask = full_.size() - 1;
  size_t place = (slot * 0x9e3779b97f4a7c15u >> 32) & mask;
  while (full_[place].slot_after && full_[place].slot_after != slot + 1) place = (place + 1) & mask;
  return &full_[place];
}

// Rows that were captured meanwhile give up their places only here: those that were full will be full again.
void RowCounts::reserve(size_t more) {
  if (2 * (full_used_ + more) <= full_.size()) return;
  const auto in_use = [](const Full& full) { return full.times > 0; };
  const auto used = static_cast<size_t>(std::count_if(full_.begin(), full_.end(), in_use));
  std::vector<Full> before(std::bit_ceil(std::max(full_least, 2 * (used + more))));
  full_.swap(before);
  full_used_ = 0;
  for (const Full& full : before)
    if (full.times) add_full(full.slot_after - 1, full.times);
}

void RowCounts::add_full(uint32_t slot, uint32_t times) {
  Full* full = place_of(slot);
  full_used_ += !full->slot_after;
  full->slot_after = slot + 1;
  full->times += times;
}

uint64_t RowCounts::at(uint32_t slot) const {
  const Full* full = full_.empty() ? nullptr : const_cast<RowCounts*>(this)->place_of(slot);
  return low_[slot] + (full && full->slot_after ? uint64_t{full->times} * 256 : 0);
}

std::vector<uint64_t> RowCounts::find_full() const {
  std::vector<uint64_t> found;
  for (const Full& full : full_) {
    if (!full.times) continue;
    if (found.empty()) found.assign(words_of(slots_), 0);
    set_bit(found, full.slot_after - 1);
  }
  return found;
}

// Of rows of one bitmap that are not in the other. Most bits of a word are set or few are. Four histograms, so that
// equal counts in a row do not wait for each other; the second half of each is for rows that do not count.
void RowCounts::count_lows(const std::vector<uint64_t>& rows, const std::vector<uint64_t>& except, size_t first,
                           size_t end, std::array<Lows, 4>& lows) const {
  for (size_t word = first; word < end; ++word) {
    const uint64_t bits = rows[word] & ~except[word];
    if (std::popcount(bits) < dense_rows) {
      for_bits(bits, word, [&](uint32_t slot) { ++lows[0][low_[slot]]; });
      continue;
    }
    const size_t slots = std::min<size_t>(64, slots_ - word * 64);
    for (size_t i = 0; i < slots; ++i) ++lows[i % 4][low_[word * 64 + i] | (~bits >> i & 1) << 8];
  }
}

// A bit for each of the 64 rows of a word: whether its byte is above `least`. Eight bytes at a time: the seven low bits
// of each are compared by an addition that carries into the eighth.
uint64_t RowCounts::find_above(size_t word, uint32_t least) const {
  constexpr uint64_t ones = 0x0101010101010101u, sevens = 0x7f * ones, tops = 0x80 * ones;
  uint64_t found = 0;
  for (size_t i = 0; i < 64 && word * 64 + i < slots_; i += 8) {
    uint64_t bytes;
    std::memcpy(&bytes, low_ + word * 64 + i, sizeof bytes);
    const uint64_t carried = (bytes & sevens) + (least < 128 ? 127 - least : 255 - least) * ones;
    const uint64_t above = (least < 128 ? carried | bytes : carried & bytes) & tops;
    found |= ((above >> 7) * 0x0102040810204080u >> 56) << i;
  }
  return found;
}

size_t RowCounts::bytes() const { return arena_.bytes() + full_.size() * sizeof(Full); }

RowCounts::Held RowCounts::make_held(size_t rows) const {
  Held held;
  held.low.reserve(rows);
  held.full.reserve(full_used_);
  return held;
}

void RowCounts::take(const std::vector<uint64_t>& rows, size_t first, size_t end, Held& held) {
  for (size_t word = first; word < end; ++word)
    for_bits(rows[word], word, [&](uint32_t slot) {
      held.low.push_back(std::exchange(low_[slot], 0));
      held.sum += held.low.back();
    });
}

void RowCounts::take_full(const std::vector<uint64_t>& rows, Held& held) {
  for (Full& full : full_) {
    if (!full.times || !bit_at(rows, full.slot_after - 1)) continue;
    held.sum += uint64_t{full.times} * 256;
    held.full.emplace_back(full.slot_after - 1, std::exchange(full.times, 0));
  }
}

void RowCounts::reserve_back(const std::vector<uint64_t>& rows, const Held& held) {
  size_t wraps = 0;  // bytes that are full only together
  const uint8_t* low = held.low.data();
  for (size_t word = 0; word < rows.size(); ++word)
    for_bits(rows[word], word, [&](uint32_t slot) { wraps += low_[slot] + *low++ > 255; });
  reserve(wraps + held.full.size());
}

void RowCounts::give_back(const std::vector<uint64_t>& rows, const Held& held) {
  const uint8_t* low = held.low.data();
  for (size_t word = 0; word < rows.size(); ++word)
    for_bits(rows[word], word, [&](uint32_t slot) {
      if (low_[slot] + *low > 255) add_full(slot, 1);
      low_[slot] = static_cast<uint8_t>(low_[slot] + *low++);
    });
  for (const auto& [slot, times] : held.full) add_full(slot, times);
}

// ---- priority

RowPriority::RowPriority(const Settings& settings) : counts(settings.slots), settings_(settings) {
  if (settings.kind == PriorityKind::ssu) {
    list_.reserve(settings.rows_max);
    listed_.assign(words_of(settings.slots), 0);
  } else if (settings.kind == PriorityKind::scar) {
    copies_arena_.emplace(settings.slots * settings.dim * sizeof(float));
    copies_ = reinterpret_cast<float*>(copies_arena_->data());
  }
}

size_t RowPriority::bytes() const {
  return counts.bytes() + list_.capacity() * sizeof(uint32_t) + (listed_.size() + stale_.size()) * sizeof(uint64_t) +
         (copies_arena_ ? copies_arena_->bytes() : 0);
}

void RowPriority::sample(const uint32_t* slots, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (i + bytes_ahead < count) __builtin_prefetch(listed_.data() + slots[i + bytes_ahead] / 64, 1, 3);
    if (!bit_at(listed_, slots[i])) insert(slots[i]);
  }
}

// Into a full list it goes in the place of another. Chance is a function of how often that happened before: so it is
// known who is next, and what will be needed of it is fetched ahead.
void RowPriority::insert(uint32_t slot) {
  set_bit(listed_, slot);
  if (list_.size() < settings_.rows_max) {
    list_.push_back(slot);
    return;
  }
  const auto place = [&](uint64_t number) {
    const uint64_t chance = mixed64(settings_.key + number * 0x9e3779b97f4a7c15u);
    return list_.data() + static_cast<size_t>(static_cast<unsigned __int128>(chance) * list_.size() >> 64);
  };
  __builtin_prefetch(place(evicted_ + 2 * places_ahead), 1, 3);
  __builtin_prefetch(listed_.data() + *place(evicted_ + places_ahead) / 64, 1, 3);
  clear_bit(listed_, std::exchange(*place(++evicted_), slot));
}

// Larger ranks first, then, of equals, in the order of slots from the turn on. Nothing is sorted: a histogram of ranks
// finds the last that is chosen. Of `mfu` a rank is the count of a row: rows whose byte was full have more than any
// other that was not, and are chosen before; of the others it is the byte. Of `scar` a rank is the change of a row, and
// the histogram is of its upper half; of the bucket in which the last one is, all ranks are looked at. Of `ssu` it is
// whether a row is on the list.
RowPriority::Choosing RowPriority::begin(size_t dirty_rows, bool all) const {
  using Phase = Choosing::Phase;
  Choosing made;
  const bool chooses = !all && dirty_rows > settings_.rows_max;
  made.count = chooses ? settings_.rows_max : dirty_rows;
  made.held.counts = counts.make_held(made.count);
  if (settings_.kind == PriorityKind::ssu) made.held.list.reserve(settings_.rows_max);
  made.phase = Phase::counts;
  if (!chooses) return made;
  const size_t words = words_of(settings_.slots);
  const auto parts = static_cast<size_t>(ThreadPool::shared().size());
  made.rows.assign(words, 0);
  made.equal.assign(words, 0);
  made.phase = settings_.kind == PriorityKind::ssu ? Phase::turns : Phase::ranks;
  if (settings_.kind == PriorityKind::mfu) made.lows.assign(parts, {});
  if (settings_.kind == PriorityKind::scar) {
    made.buckets.assign(parts, std::vector<uint32_t>(bucket_count, 0));
    made.ranks = Buffer<uint32_t>(settings_.slots);
  }
  return made;
}

bool RowPriority::choose(Choosing& choosing, const Bits& dirty, const Records& records, const PendingRows* aside,
                         size_t words) {
  using Phase = Choosing::Phase;
  const size_t end = std::min(dirty.size(), choosing.word + std::min(words, dirty.size()));
  switch (choosing.phase) {
    case Phase::ranks:
      find_ranks(choosing, dirty, records, aside, end);
      if (end == dirty.size()) find_last(choosing);
      break;
    case Phase::exact:
      find_exact(choosing, dirty, end);
      break;
    case Phase::marks:
      mark(choosing, dirty, end);
      break;
    case Phase::turns:
      take_turns(choosing, dirty);
      choosing.phase = Phase::counts;
      return true;
    case Phase::counts:
      take_counts(choosing, dirty, end);
      break;
    case Phase::done:
      return false;
  }
  choosing.word = end;
  if (end < dirty.size()) return true;
  choosing.word = 0;
  if (choosing.phase == Phase::ranks)
    choosing.phase = settings_.kind == PriorityKind::scar ? Phase::exact : Phase::marks;
  else if (choosing.phase == Phase::exact)
    choosing.phase = Phase::marks;
  else
    choosing.phase = choosing.phase == Phase::marks ? Phase::turns : Phase::done;
  return choosing.phase != Phase::done;
}

void RowPriority::find_ranks(Choosing& choosing, const Bits& dirty, const Records& records, const PendingRows* aside,
                             size_t end) {
  const size_t words = end - choosing.word;
  const size_t parts = std::max(choosing.lows.size(), choosing.buckets.size());
  if (settings_.kind == PriorityKind::mfu && !choosing.word) {
    Bits full = counts.find_full();  // those go first; they have no place in a histogram of bytes
    for (size_t word = 0; word < full.size(); ++word) choosing.rows[word] = full[word] & dirty[word];
  }
  ThreadPool::shared().parallel_for(parts, [&](size_t part, size_t) {
    const size_t first = choosing.word + words * part / parts;
    const size_t stop = choosing.word + words * (part + 1) / parts;
    if (settings_.kind == PriorityKind::mfu) {
      counts.count_lows(dirty, choosing.rows, first, stop, choosing.lows[part]);
      return;
    }
    for (size_t word = first; word < stop; ++word)
      for_bits(dirty[word], word, [&](uint32_t slot) {
        const uint32_t rank = choosing.ranks[slot] = find_change(slot, records, aside);
        ++choosing.buckets[part][rank >> 16];
      });
  });
}

// The histogram is complete: which is the last rank, or bucket, of which some are chosen?
void RowPriority::find_last(Choosing& choosing) {
  const size_t chosen = settings_.kind == PriorityKind::mfu ? count_bits(choosing.rows) : 0;
  if (chosen >= settings_.rows_max) return find_last_full(choosing);
  const auto rows_of = [&](uint32_t rank) {
    size_t rows = 0;
    for (const auto& part : choosing.buckets) rows += part[rank];
    for (const auto& part : choosing.lows)
      for (const RowCounts::Lows& histogram : part) rows += histogram[rank];
    return rows;
  };
  choosing.left = settings_.rows_max - chosen;
  choosing.last = settings_.kind == PriorityKind::mfu ? 255 : bucket_count - 1;
  for (size_t rows; choosing.left > (rows = rows_of(choosing.last)); --choosing.last) choosing.left -= rows;
  if (settings_.kind == PriorityKind::scar) choosing.exact.reserve(rows_of(choosing.last));
}

// More rows than there is room for were updated more often than a byte counts. That is rare, and not done in slices.
void RowPriority::find_last_full(Choosing& choosing) {
  std::vector<std::pair<uint64_t, uint32_t>> full;
  for (size_t word = 0; word < choosing.rows.size(); ++word)
    for_bits(choosing.rows[word], word, [&](uint32_t slot) { full.emplace_back(counts.at(slot), slot); });
  const auto last = full.begin() + static_cast<ptrdiff_t>(settings_.rows_max) - 1;
  std::nth_element(full.begin(), last, full.end(), std::greater<>());
  const uint64_t least = last->first;
  for (const auto& [count, slot] : full) {
    if (count <= least) clear_bit(choosing.rows, slot);
    if (count == least) set_bit(choosing.equal, slot);
  }
  choosing.last = UINT32_MAX;
}

void RowPriority::find_exact(Choosing& choosing, const Bits& dirty, size_t end) const {
  for (size_t word = choosing.word; word < end; ++word)
    for_bits(dirty[word], word, [&](uint32_t slot) {
      if (choosing.ranks[slot] >> 16 == choosing.last) choosing.exact.push_back(choosing.ranks[slot]);
    });
  if (end < dirty.size()) return;
  const auto last = choosing.exact.begin() + static_cast<ptrdiff_t>(choosing.left) - 1;
  std::nth_element(choosing.exact.begin(), last, choosing.exact.end(), std::greater<>());
  choosing.last = *last;
}

// Which rows are above the last rank, and which are of it.
void RowPriority::mark(Choosing& choosing, const Bits& dirty, size_t end) const {
  const uint32_t last = choosing.last;
  const size_t first = choosing.word;
  for_words(end - first, [&](size_t from, size_t to) {
    for (size_t word = first + from; word < first + to; ++word) {
      if (!dirty[word]) continue;
      if (settings_.kind == PriorityKind::mfu) {
        if (last == UINT32_MAX) continue;  // of rows that were very often updated, it is known
        const uint64_t others = dirty[word] & ~choosing.rows[word];
        const uint64_t more = counts.find_above(word, last);
        choosing.equal[word] = others & ~more & (last ? counts.find_above(word, last - 1) : ~uint64_t{0});
        choosing.rows[word] |= others & more;
        continue;
      }
      for_bits(dirty[word], word, [&](uint32_t slot) {
        const uint32_t rank = choosing.ranks[slot];
        choosing.rows[word] |= uint64_t{rank > last} << (slot % 64);
        choosing.equal[word] |= uint64_t{rank == last} << (slot % 64);
      });
    }
  });
}

// All that are above, and of those that are equal, as many as there is room for, from the turn on.
void RowPriority::take_turns(Choosing& choosing, const Bits& dirty) {
  Bits& rows = choosing.rows;
  Bits& equal = choosing.equal;
  const size_t words = dirty.size();
  if (settings_.kind == PriorityKind::ssu) {
    for (size_t word = 0; word < words; ++word) {
      rows[word] = dirty[word] & listed_[word];
      equal[word] = dirty[word] & ~listed_[word];
    }
    if (count_bits(rows) >= settings_.rows_max) {  // the list is all there is room for
      equal.swap(rows);
      std::fill(rows.begin(), rows.end(), 0);
    }
  }
  size_t left = settings_.rows_max - count_bits(rows);
  const uint32_t turn = turn_;
  // Round once: the word of the turn is visited twice, its upper bits first.
  for (size_t visit = 0; left && visit <= words; ++visit) {
    const size_t word = (turn / 64 + visit) % words;
    const uint64_t upper = ~uint64_t{0} << (turn % 64);
    const uint64_t mine = visit == 0 ? upper : visit == words ? ~upper : ~uint64_t{0};
    uint64_t bits = equal[word] & mine;
    while (static_cast<size_t>(std::popcount(bits)) > left) bits &= ~std::bit_floor(bits);
    if (!bits) continue;
    left -= static_cast<size_t>(std::popcount(bits));
    rows[word] |= bits;
    turn_ = static_cast<uint32_t>(word * 64 + static_cast<size_t>(std::bit_width(bits))) % settings_.slots;
  }
}

// How far the weights are from those last captured, squared, as the bits of a float: they rise with it.
uint32_t RowPriority::find_change(uint32_t slot, const Records& records, const PendingRows* aside) const {
  if (!stale_.empty() && bit_at(stale_, slot)) return std::bit_cast<uint32_t>(__builtin_inff());
  const bool changed = aside && aside->pending(slot);  // since the capture began
  const float* weights = changed ? aside->saved(slot) : records.base + slot * records.stride;
  const float* before = copy(slot);
  double sum = 0;
  for (size_t i = 0; i < records.dim; ++i) {
    const double change = double{weights[i]} - double{before[i]};
    sum += change * change;
  }
  return std::bit_cast<uint32_t>(sum < double{FLT_MAX} ? static_cast<float>(sum) : FLT_MAX);  // or is no number
}

void RowPriority::take_counts(Choosing& choosing, const Bits& dirty, size_t end) {
  const Bits& rows = choosing.rows.empty() ? dirty : choosing.rows;
  counts.take(rows, choosing.word, end, choosing.held.counts);
  if (end < dirty.size()) return;
  counts.take_full(rows, choosing.held.counts);
  for (const uint32_t slot : list_) clear_bit(listed_, slot);
  choosing.held.list.swap(list_);  // which has as much room
}

void RowPriority::reserve_end(const Bits& rows, const Held& held, bool durable) {
  if (durable) return;
  if (settings_.kind == PriorityKind::scar) stale_.resize(rows.size(), 0);
  counts.reserve_back(rows, held.counts);
}

void RowPriority::end(const Bits& rows, const Held& held, bool durable) {
  for (size_t word = 0; word < stale_.size(); ++word)
    stale_[word] = durable ? stale_[word] & ~rows[word] : stale_[word] | rows[word];
  if (durable) return;
  counts.give_back(rows, held.counts);
  // What was on the list is on it again, as far as there is room: what came meanwhile is newer.
  for (const uint32_t slot : held.list)
    if (list_.size() < settings_.rows_max && !bit_at(listed_, slot)) insert(slot);
}

}  // namespace regrow
