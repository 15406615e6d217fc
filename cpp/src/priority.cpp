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

// Of rows of one bitmap that are not in the other. Most bits of a word are set or few are.
std::array<size_t, 256> RowCounts::count_lows(const std::vector<uint64_t>& rows,
                                              const std::vector<uint64_t>& except) const {
  const auto parts = static_cast<size_t>(ThreadPool::shared().size());
  // Four histograms, so that equal counts in a row do not wait for each other; the second half of each is for the rest.
  using Lows = std::array<std::array<uint32_t, 512>, 4>;
  std::vector<Lows> found(parts, Lows{});
  ThreadPool::shared().parallel_for(parts, [&](size_t part, size_t) {
    for (size_t word = rows.size() * part / parts; word < rows.size() * (part + 1) / parts; ++word) {
      const uint64_t bits = rows[word] & ~except[word];
      if (std::popcount(bits) < dense_rows) {
        for_bits(bits, word, [&](uint32_t slot) { ++found[part][0][low_[slot]]; });
        continue;
      }
      const size_t end = std::min<size_t>(64, slots_ - word * 64);
      for (size_t i = 0; i < end; ++i) ++found[part][i % 4][low_[word * 64 + i] | (~bits >> i & 1) << 8];
    }
  });
  std::array<size_t, 256> lows{};
  for (const Lows& part : found)
    for (const auto& histogram : part)
      for (size_t low = 0; low < lows.size(); ++low) lows[low] += histogram[low];
  return lows;
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

RowCounts::Held RowCounts::make_held() const {
  Held held;
  held.low.resize(slots_);
  held.full.reserve(full_used_);
  return held;
}

void RowCounts::take(const std::vector<uint64_t>& rows, Held& held) {
  std::atomic<uint64_t> sum{0};
  for_words(rows.size(), [&](size_t first, size_t end) {
    uint64_t found = 0;
    for (size_t word = first; word < end; ++word)
      for_bits(rows[word], word, [&](uint32_t slot) { found += held.low[slot] = std::exchange(low_[slot], 0); });
    sum.fetch_add(found, std::memory_order_relaxed);
  });
  for (Full& full : full_) {
    if (!full.times || !bit_at(rows, full.slot_after - 1)) continue;
    sum += uint64_t{full.times} * 256;
    held.full.emplace_back(full.slot_after - 1, std::exchange(full.times, 0));
  }
  held.sum = sum.load(std::memory_order_relaxed);
}

void RowCounts::reserve_back(const std::vector<uint64_t>& rows, const Held& held) {
  size_t wraps = 0;  // bytes that are full only together
  for (size_t word = 0; word < rows.size(); ++word)
    for_bits(rows[word], word, [&](uint32_t slot) { wraps += low_[slot] + held.low[slot] > 255; });
  reserve(wraps + held.full.size());
}

void RowCounts::give_back(const std::vector<uint64_t>& rows, const Held& held) {
  for (size_t word = 0; word < rows.size(); ++word)
    for_bits(rows[word], word, [&](uint32_t slot) {
      if (low_[slot] + held.low[slot] > 255) add_full(slot, 1);
      low_[slot] = static_cast<uint8_t>(low_[slot] + held.low[slot]);
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

// Larger ranks first, then, of equals, in the order of slots from the turn on. Nothing is sorted: a histogram over
// buckets, which rise with ranks, finds the bucket in which the last chosen rank is. Buckets below `bucket_exact_end`
// have one rank each; of the others, that one's ranks are looked at.
template <typename Rank, typename Bucket>
RowPriority::Choice RowPriority::choose_by(const Bits& dirty, uint32_t bucket_exact_end, Rank&& rank,
                                           Bucket&& bucket) const {
  const size_t words = dirty.size();
  const auto parts = static_cast<size_t>(ThreadPool::shared().size());
  std::vector<std::vector<uint32_t>> rows(parts, std::vector<uint32_t>(bucket_count, 0));
  ThreadPool::shared().parallel_for(parts, [&](size_t part, size_t) {
    for (size_t word = words * part / parts; word < words * (part + 1) / parts; ++word)
      for_bits(dirty[word], word, [&](uint32_t slot) { ++rows[part][bucket(rank(slot))]; });
  });
  size_t left = settings_.rows_max;
  size_t in_bucket = 0;
  uint32_t last_bucket = bucket_count;
  do {
    left -= in_bucket;
    --last_bucket;
    in_bucket = 0;
    for (const auto& part : rows) in_bucket += part[last_bucket];
  } while (left > in_bucket);
  uint32_t last_rank = last_bucket;
  if (last_bucket >= bucket_exact_end) {
    std::vector<uint32_t> ranks;
    for (size_t word = 0; word < words; ++word)
      for_bits(dirty[word], word, [&](uint32_t slot) {
        if (bucket(rank(slot)) == last_bucket) ranks.push_back(rank(slot));
      });
    const auto last = ranks.begin() + static_cast<ptrdiff_t>(left) - 1;
    std::nth_element(ranks.begin(), last, ranks.end(), std::greater<>());
    last_rank = *last;
  }
  Bits above(words, 0);
  Bits equal(words, 0);
  for_words(words, [&](size_t first, size_t end) {
    for (size_t word = first; word < end; ++word)
      for_bits(dirty[word], word, [&](uint32_t slot) {
        const uint32_t of = rank(slot);
        above[word] |= uint64_t{of > last_rank} << (slot % 64);
        equal[word] |= uint64_t{of == last_rank} << (slot % 64);
      });
  });
  return take_turns(std::move(above), equal);
}

// All that are above, and of those that are equal, as many as there is room for, from the turn on.
RowPriority::Choice RowPriority::take_turns(Bits&& above, const Bits& equal) const {
  Choice choice{std::move(above), turn_};
  const size_t words = equal.size();
  size_t left = settings_.rows_max - count_bits(choice.rows);
  // Round once: the word of the turn is visited twice, its upper bits first.
  for (size_t visit = 0; left && visit <= words; ++visit) {
    const size_t word = (turn_ / 64 + visit) % words;
    const uint64_t upper = ~uint64_t{0} << (turn_ % 64);
    const uint64_t mine = visit == 0 ? upper : visit == words ? ~upper : ~uint64_t{0};
    for (uint64_t bits = equal[word] & mine; left && bits; bits &= bits - 1, --left) {
      const auto bit = static_cast<uint32_t>(std::countr_zero(bits));
      choice.rows[word] |= uint64_t{1} << bit;
      choice.next = static_cast<uint32_t>(word * 64 + bit + 1) % settings_.slots;
    }
  }
  return choice;
}

// Those with more updates first. A row whose byte was full has more than any other that was not; of the others a
// histogram of bytes says which is the last count to be chosen, and eight bytes are compared with it at a time.
RowPriority::Choice RowPriority::choose_counted(const Bits& dirty) const {
  Bits full = counts.find_full();
  full.resize(dirty.size(), 0);
  for (size_t word = 0; word < dirty.size(); ++word) full[word] &= dirty[word];
  const size_t full_rows = count_bits(full);
  if (full_rows >= settings_.rows_max)
    return choose_by(
        full, bucket_count - 1,
        [&](uint32_t slot) { return static_cast<uint32_t>(std::min<uint64_t>(counts.at(slot), UINT32_MAX)); },
        [](uint32_t rank) { return std::min(rank, bucket_count - 1); });
  const std::array<size_t, 256> rows = counts.count_lows(dirty, full);
  uint32_t last = 255;
  for (size_t left = settings_.rows_max - full_rows; left > rows[last]; --last) left -= rows[last];
  Bits equal(dirty.size(), 0);
  for_words(dirty.size(), [&](size_t first, size_t end) {
    for (size_t word = first; word < end; ++word) {
      if (!dirty[word]) continue;
      const uint64_t others = dirty[word] & ~full[word];
      const uint64_t more = counts.find_above(word, last);
      equal[word] = others & ~more & (last ? counts.find_above(word, last - 1) : ~uint64_t{0});
      full[word] |= others & more;
    }
  });
  return take_turns(std::move(full), equal);
}

RowPriority::Choice RowPriority::choose(const Bits& dirty, const Records& records) const {
  if (settings_.kind == PriorityKind::mfu) return choose_counted(dirty);
  if (settings_.kind == PriorityKind::scar) {
    Buffer<uint32_t> ranks(settings_.slots);
    find_changes(dirty, records, ranks.data());
    return choose_by(dirty, 0, [&](uint32_t slot) { return ranks[slot]; }, [](uint32_t rank) { return rank >> 16; });
  }
  Bits listed(dirty.size()), others(dirty.size());
  for (size_t word = 0; word < dirty.size(); ++word) {
    listed[word] = dirty[word] & listed_[word];
    others[word] = dirty[word] & ~listed_[word];
  }
  if (count_bits(listed) < settings_.rows_max) return take_turns(std::move(listed), others);
  return take_turns(Bits(dirty.size(), 0), listed);  // the list is all there is room for
}

// How far the weights are from those last captured, squared, as the bits of a float: they rise with it.
void RowPriority::find_changes(const Bits& dirty, const Records& records, uint32_t* ranks) const {
  for_words(dirty.size(), [&](size_t first, size_t end) {
    for (size_t word = first; word < end; ++word)
      for_bits(dirty[word], word, [&](uint32_t slot) {
        const float* weights = records.base + slot * records.stride;
        const float* before = copy(slot);
        double sum = 0;
        for (size_t i = 0; i < records.dim; ++i) {
          const double change = double{weights[i]} - double{before[i]};
          sum += change * change;
        }
        float rank = sum < double{FLT_MAX} ? static_cast<float>(sum) : FLT_MAX;  // also of what is not a number
        if (!stale_.empty() && bit_at(stale_, slot)) rank = __builtin_inff();
        ranks[slot] = std::bit_cast<uint32_t>(rank);
      });
  });
}

RowPriority::Held RowPriority::make_held() const {
  Held held{counts.make_held(), {}};
  if (settings_.kind == PriorityKind::ssu) held.list.reserve(settings_.rows_max);
  return held;
}

uint64_t RowPriority::begin(const Bits& rows, std::optional<uint32_t> next, Held& held) {
  counts.take(rows, held.counts);
  if (next) turn_ = *next;
  for (const uint32_t slot : list_) clear_bit(listed_, slot);
  held.list.swap(list_);  // which has as much room
  return held.counts.sum;
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
