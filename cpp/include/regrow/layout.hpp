// Where a row lives: pure arithmetic, no directory. The Python twin is src/regrow/core/layout.py and the two
// must agree for every row. Divisions by numbers known beforehand are multiplications by a reciprocal,
// because routing a batch places every distinct row.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace regrow {

inline constexpr int64_t rows_max = (int64_t{1} << 32) - 1;  // rows and slots travel as 32-bit numbers
inline constexpr int64_t dim_max = int64_t{1} << 16;
inline constexpr int64_t servers_max = 4096;

// Divides numbers below 2^32 by a fixed divisor below 2^16, without a branch. With m = floor((2^64 - 1) / d),
// (n + 1) * m / 2^64 falls short of (n + 1) / d by more than nothing and less than 1 / d: its floor is that
// of n / d.
class Divider {
 public:
  explicit Divider(uint32_t divisor) : divisor_(divisor), multiplier_(~uint64_t{0} / divisor) {}

  uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>((static_cast<unsigned __int128>(uint64_t{n} + 1) * multiplier_) >> 64);
  }
  uint32_t divisor() const { return divisor_; }

 private:
  uint32_t divisor_;
  uint64_t multiplier_;
};

struct Place {
  uint32_t server;
  uint32_t slot;
};

// One table over a cluster: k data and r parity members per stripe, `rings` independent rings of servers.
// `table` is the number of the table in the job; it rotates the table's first row.
class Layout {
 public:
  Layout(int64_t servers, int64_t k, int64_t r, int64_t rings, int64_t table)
      : servers_(checked(servers, k, r, rings, table)),
        ring_(static_cast<uint32_t>(servers / rings)),
        shift_(static_cast<uint32_t>(table % ring_)),
        per_k_(static_cast<uint32_t>(k)),
        per_rings_(static_cast<uint32_t>(rings)),
        per_ring_(ring_) {}

  Place place(uint32_t row) const {
    const uint32_t k = per_k_.divisor();
    const uint32_t stripe = per_k_.quotient(row);
    const uint32_t member = row - stripe * k;
    const uint32_t turn = per_rings_.quotient(stripe);  // the stripe's number within its group
    const uint32_t group = stripe - turn * per_rings_.divisor();
    const uint32_t block = per_ring_.quotient(turn);
    // member < k <= ring and shift < ring, so the sum is below 3 * ring: two subtractions replace a modulo.
    uint32_t position = turn - block * ring_ + member + shift_;
    position -= position >= ring_ ? ring_ : 0;
    position -= position >= ring_ ? ring_ : 0;
    return {group * ring_ + position, block * k + member};
  }

  // The row in a slot of a server. In the last block it may be past the end of the table: a hole.
  uint64_t row_of(uint32_t server, uint32_t slot) const {
    const uint64_t k = per_k_.divisor();
    const uint64_t group = per_ring_.quotient(server);
    const uint32_t block = per_k_.quotient(slot);
    const uint64_t member = slot - block * k;
    // As above: below 3 * ring, and not below 0.
    uint64_t first = server - group * ring_ + 2 * uint64_t{ring_} - member - shift_;
    first -= first >= ring_ ? ring_ : 0;
    first -= first >= ring_ ? ring_ : 0;
    const uint64_t turn = uint64_t{block} * ring_ + first;
    return (turn * per_rings_.divisor() + group) * k + member;
  }

  // Slots for a table of `rows` rows, the same on every server.
  uint64_t slots_per_server(uint64_t rows) const {
    const uint64_t k = per_k_.divisor();
    const uint64_t stripes = (rows + k - 1) / k;
    const uint64_t turns = (stripes + per_rings_.divisor() - 1) / per_rings_.divisor();
    return (turns + ring_ - 1) / ring_ * k;
  }

  uint32_t servers() const { return servers_; }

 private:
  static uint32_t checked(int64_t servers, int64_t k, int64_t r, int64_t rings, int64_t table) {
    const auto text = [](int64_t number) { return std::to_string(number); };
    if (servers < 1 || servers > servers_max)
      throw std::invalid_argument("servers must be between 1 and " + text(servers_max) + ", not " + text(servers));
    if (rings < 1 || servers % rings != 0)
      throw std::invalid_argument("rings must divide servers: " + text(servers) + " servers, " + text(rings) +
                                  " rings");
    if (k < 1 || r < 0)
      throw std::invalid_argument("k must be at least 1 and r at least 0, not k=" + text(k) + ", r=" + text(r));
    if (k > servers || r > servers || servers / rings < k + r)
      throw std::invalid_argument("k + r = " + text(k + r) + " members need as many servers in a ring; there are " +
                                  text(servers / rings));
    if (table < 0) throw std::invalid_argument("table must not be negative, not " + text(table));
    return static_cast<uint32_t>(servers);
  }

  uint32_t servers_;
  uint32_t ring_;
  uint32_t shift_;
  Divider per_k_;
  Divider per_rings_;
  Divider per_ring_;
};

}  // namespace regrow
