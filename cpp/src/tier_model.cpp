#include "regrow/tier_model.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <sstream>

#include "regrow/crash_disk.hpp"

namespace regrow {
namespace {

constexpr uint64_t calls_max = 100000;  // of a life, which usually ends after some hundreds

using Rows = std::vector<std::vector<float>>;  // records of a table, one behind the other, padding included

struct Failure {
  std::string text;
};

void expect(bool fine, const std::string& text) {
  if (!fine) throw Failure{text};
}

// One store after the other on the same media, until something is wrong.
class Model {
 public:
  Model(uint64_t seed, TierBug bug) : chance_(seed), bug_(bug) {
    const int64_t shapes[][2] = {{30, 1}, {21, 6}, {17, 40}, {9, 130}};  // rows, dim: several to a sector, and less
    for (const auto& [rows, dim] : shapes) {
      TableSettings table;
      table.rows = rows;
      table.dim = dim;
      table.numbers.learning_rate = 0.5;
      table.seed = 5;
      table.init_bound = 1.0;
      table.table = static_cast<int64_t>(tables_.size());
      tables_.push_back(table);
    }
    forget_all();
  }

  void run_life(ModelRun& run) {
    ++run.lives;
    committed_before_ = committed_;
    const uint64_t writes = draw(8) ? draw(40) : draw(300);
    bool is_open = false;
    try {
      open(writes);
      is_open = true;
      if (committed_) {
        ++run.went_back;
        compare_all(run);
      }
      // A life that does not write is stuck.
      for (uint64_t calls = 0; calls < calls_max; ++calls) step(run);
      std::string text = "nothing is written any more:";
      for (const auto& [key, value] : store_->report())
        text += " " + key + " " + std::to_string(static_cast<uint64_t>(value));
      throw Failure{text};
    } catch (const CrashNow&) {
      run.crashes_opening += !is_open;
    } catch (const StoreFull&) {
      ++run.full;
    }
    if (store_) {
      const auto report = store_->report();
      run.evictions += static_cast<uint64_t>(report.at("rows_evicted"));
      run.evictions_young += static_cast<uint64_t>(report.at("rows_evicted_young"));
      run.rounds += static_cast<uint64_t>(report.at("clean_rounds"));
    }
    store_.reset();
    pulls_.clear();
    media_->crash(chance_);
    ++run.crashes;
    choose_epoch();
    if (committed_ && draw(40) == 0) damage(run);
  }

 private:
  uint64_t draw(uint64_t end) { return chance_() % end; }

  void forget_all() {
    media_ = std::make_unique<CrashMedia>();
    committed_ = reported_ = 0;
    snapshots_.clear();
    now_.clear();
    touched_.clear();
  }

  void open(uint64_t writes) {
    TierSettings settings;
    settings.fingerprint = 77;
    settings.cache_bytes = 9000 + draw(3) * 6000;
    settings.segment_bytes = 4096;  // the same in every life
    settings.log_bytes_max = 48 * 4096;
    settings.unwritten_bytes_max = 4 * 4096;
    settings.clean_bytes_max = 4096 * (1 + draw(4));
    settings.clean_from = draw(2) ? 0.25 : 0.875;  // a life is short: most would never clean
    settings.policy = draw(8) ? TierPolicy::lru : TierPolicy::none;
    settings.patience = settings.cache_bytes > 9000 ? 1 : 0;  // lives are short: rows seldom stay for longer
    settings.threads = false;
    settings.bug = bug_;
    if (committed_) settings.at_epoch = committed_;
    store_.reset();
    if (!committed_) forget_all();
    auto disk = std::make_unique<CrashDisk>(*media_, writes, draw(2) == 0);
    store_ = std::make_unique<TieredShard>(settings, tables_, std::move(disk));
    if (now_.empty()) {
      for (size_t t = 0; t < tables_.size(); ++t) {
        now_.push_back(read_table(t));
        touched_.push_back(std::vector<bool>(store_->slots(t)));
      }
    }
    if (committed_) std::tie(now_, touched_) = snapshots_.at(committed_);
  }

  std::vector<float> read_table(size_t t) {
    std::vector<float> records(store_->slots(t) * store_->record_floats(t));
    store_->read_records(t, 0, store_->slots(t), records);
    return records;
  }

  // The coordinator's decision: what it committed, or a later one that all servers said they have.
  void choose_epoch() {
    if (reported_ > committed_ && draw(2)) committed_ = reported_;
    reported_ = committed_;
    std::erase_if(snapshots_, [&](const auto& each) { return each.first > committed_; });
  }

  void compare_all(ModelRun& run) {
    for (size_t t = 0; t < tables_.size(); ++t) {
      const std::vector<float> records = read_table(t);
      compare(t, records, "after going back");
      const std::vector<uint64_t> touched = store_->touched(t);
      for (uint32_t slot = 0; slot < store_->slots(t); ++slot)
        expect((touched[slot / 64] >> (slot % 64) & 1) == touched_[t][slot], "another row is touched");
      run.rows_compared += store_->slots(t);
    }
  }

  void compare(size_t t, const std::vector<float>& records, const char* when) {
    const size_t stride = store_->record_floats(t);
    for (size_t at = 0; at < records.size(); ++at)
      if (records[at] != now_[t][at]) {
        std::ostringstream text;
        text << "slot " << at / stride << " of table " << t << " is wrong " << when << ", epoch " << committed_
             << " (before " << committed_before_ << "): " << records[at] << " instead of " << now_[t][at];
        throw Failure{text.str()};
      }
  }

  // ---- what a server does

  struct Pull {
    std::vector<int32_t> counts;
    std::vector<uint32_t> slots;
    uint64_t ticket;
    bool is_ready;
  };

  void step(ModelRun& run) {
    ++run.calls;
    switch (draw(16)) {
      case 0:
      case 1:
      case 2:
      case 3:
        return pull();
      case 4:
      case 5:
      case 6:
        return push(run);
      case 7:
      case 8:
        store_->upkeep();
        return;
      case 9:
        store_->lanes().pump(Lane::reads, 1 + draw(3));
        return;
      case 10:
        store_->lanes().pump(Lane::writes, 1 + draw(4));
        return;
      case 11:
        return poll();
      case 12:
        if (draw(3) == 0) begin_epoch(run);
        return;
      case 13:
        return commit(run);
      case 14:
        if (draw(4) == 0) write_around();
        return;
      default:
        if (draw(8) == 0) compare_one(run);
        return;
    }
  }

  void pull() {
    if (pulls_.size() > 3) return;
    Pull pull{std::vector<int32_t>(tables_.size()), {}, 0, true};
    for (size_t t = 0; t < tables_.size(); ++t)
      for (uint32_t slot = 0; slot < store_->slots(t); ++slot)
        if (draw(16) == 0 && pull.counts[t] < 3) {
          ++pull.counts[t];
          pull.slots.push_back(slot);
        }
    pull.ticket = store_->fetch(pull.counts, pull.slots);
    pull.is_ready = pull.ticket == 0;
    if (pull.is_ready)
      change(pull);
    else
      pulls_.push_back(std::move(pull));
  }

  void poll() {
    for (const uint64_t ticket : store_->poll_fetched())
      for (Pull& pull : pulls_)
        if (pull.ticket == ticket) pull.is_ready = true;
  }

  // Reads rows that are in memory, compares, and changes them.
  void change(const Pull& pull) {
    size_t floats = 0;
    for (size_t t = 0; t < tables_.size(); ++t) floats += static_cast<size_t>(pull.counts[t] * tables_[t].dim);
    std::vector<float> weights(floats), grads(floats);
    store_->gather(pull.counts, pull.slots, weights);
    for (float& grad : grads) grad = static_cast<float>(static_cast<int>(draw(2001)) - 1000) / 8.0f;
    store_->update(pull.counts, pull.slots, grads, 1);
    size_t at = 0, row = 0;
    for (size_t t = 0; t < tables_.size(); ++t)
      for (int32_t i = 0; i < pull.counts[t]; ++i, ++row) {
        float* record = now_[t].data() + pull.slots[row] * store_->record_floats(t);
        for (int64_t c = 0; c < tables_[t].dim; ++c, ++at) {
          expect(record[c] == weights[at],
                 "slot " + std::to_string(pull.slots[row]) + " of table " + std::to_string(t) + " is wrong in memory");
          record[c] -= 0.5f * grads[at];
        }
        touched_[t][pull.slots[row]] = true;
      }
  }

  void push(ModelRun&) {
    if (pulls_.empty()) return;
    const size_t number = draw(pulls_.size());
    Pull& pull = pulls_[number];
    if (pull.is_ready) change(pull);
    if (pull.is_ready ? draw(3) > 0 : draw(8) == 0) {  // some are given up, some are used again
      store_->release(pull.ticket);
      pulls_.erase(pulls_.begin() + static_cast<std::ptrdiff_t>(number));
    }
  }

  void begin_epoch(ModelRun& run) {
    const uint64_t epoch = store_->begin_epoch();
    snapshots_[epoch] = {now_, touched_};
    ++run.checkpoints;
  }

  void commit(ModelRun& run) {
    reported_ = std::max(reported_, store_->poll_complete());
    if (reported_ <= committed_ || draw(2)) return;
    committed_ = reported_;
    store_->commit_epoch(committed_);
    ++run.commits;
    std::erase_if(snapshots_, [&](const auto& each) { return each.first < committed_; });
  }

  void write_around() {
    const size_t t = draw(tables_.size());
    const uint32_t slot = static_cast<uint32_t>(draw(store_->slots(t)));
    std::vector<float> record(store_->record_floats(t));
    for (int64_t c = 0; c < tables_[t].dim; ++c) record[static_cast<size_t>(c)] = static_cast<float>(draw(1000));
    store_->write_records(t, slot, 1, record);
    std::copy(record.begin(), record.end(), now_[t].begin() + static_cast<std::ptrdiff_t>(slot * record.size()));
    touched_[t][slot] = true;
  }

  void compare_one(ModelRun& run) {
    const size_t t = draw(tables_.size());
    compare(t, read_table(t), "while running");
    run.rows_compared += store_->slots(t);
  }

  // One bit is flipped: it is found, or it was in a place that nobody needs.
  void damage(ModelRun& run) {
    ++run.damages;
    media_->damage(static_cast<DiskFile>(draw(disk_file_count)), chance_);
    try {
      open(UINT64_MAX);
      compare_all(run);
    } catch (const StoreDamaged&) {
      ++run.damages_found;
    }
    store_.reset();
    committed_ = 0;
    forget_all();
  }

  std::mt19937_64 chance_;
  TierBug bug_;
  std::vector<TableSettings> tables_;
  std::unique_ptr<CrashMedia> media_;
  std::unique_ptr<TieredShard> store_;
  uint64_t committed_ = 0, committed_before_ = 0, reported_ = 0;
  Rows now_;
  std::vector<std::vector<bool>> touched_;
  std::map<uint64_t, std::pair<Rows, std::vector<std::vector<bool>>>> snapshots_;
  std::vector<Pull> pulls_;
};

}  // namespace

ModelRun run_tier_model(uint64_t seed, uint64_t crashes, TierBug bug) {
  ModelRun run;
  // A few crashes for each beginning, so that a failure is found again in a moment: its number is its seed.
  constexpr uint64_t crashes_each = 50;
  for (uint64_t number = seed; run.crashes < crashes && run.failure.empty(); ++number) {
    Model model(number, bug);
    const uint64_t end = run.crashes + std::min(crashes_each, crashes - run.crashes);
    try {
      while (run.crashes < end) model.run_life(run);
    } catch (const Failure& failure) {
      run.failure = "seed " + std::to_string(number) + ": " + failure.text;
    } catch (const std::exception& error) {
      run.failure = "seed " + std::to_string(number) + ": " + error.what();
    }
  }
  return run;
}

}  // namespace regrow
