// The inner loops, compiled once per instruction set into namespace REGROW_ISA. Everything here is either in
// the anonymous namespace or in that namespace, and only C headers are included: see kernels.hpp for why.
// Sums over a row use eight lanes and combine them in one fixed order, and contraction into fused
// multiply-adds is off, so every instruction set gives the same bits.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "regrow/kernels.hpp"

#define REGROW_INLINE inline __attribute__((always_inline))
#define REGROW_PREFETCH_READ(address) __builtin_prefetch((address), 0, 3)
#define REGROW_PREFETCH_WRITE(address) __builtin_prefetch((address), 1, 3)

namespace regrow::REGROW_ISA {
namespace {

typedef float Lanes __attribute__((vector_size(32)));

constexpr size_t line_floats = 16;

// How far ahead rows are requested: enough lines in flight to cover a miss to memory, in whole rows. (On a
// Zen 3, anything from 24 to 160 lines took the same time within the spread.)
constexpr size_t lines_ahead = 96;
constexpr size_t rows_ahead_min = 4;
constexpr size_t rows_ahead_max = 16;

REGROW_INLINE size_t rows_ahead(size_t row_floats) {
  const size_t lines = row_floats / line_floats + 1;
  const size_t rows = lines_ahead / lines;
  return rows < rows_ahead_min ? rows_ahead_min : rows > rows_ahead_max ? rows_ahead_max : rows;
}

REGROW_INLINE void prefetch_read(const float* row, size_t floats) {
  for (size_t i = 0; i < floats; i += line_floats) REGROW_PREFETCH_READ(row + i);
  REGROW_PREFETCH_READ(row + floats - 1);  // a row that begins in mid-line reaches into one line more
}

REGROW_INLINE void prefetch_write(float* row, size_t floats) {
  for (size_t i = 0; i < floats; i += line_floats) REGROW_PREFETCH_WRITE(row + i);
  REGROW_PREFETCH_WRITE(row + floats - 1);
}

// A length known when compiling (Dim > 0), or not (Dim = 0).
template <size_t Dim>
REGROW_INLINE size_t length(size_t dim) {
  return Dim ? Dim : dim;
}

uint32_t max_u32(const uint32_t* values, size_t count) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) most = values[i] > most ? values[i] : most;
  return most;
}

// ---- initial values

REGROW_INLINE float initial_weight(uint32_t low, uint32_t high, size_t column, float bound) {
  uint32_t x = low + static_cast<uint32_t>(column) * 0x9e3779b9u;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= high;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  const float unit = static_cast<float>(static_cast<int32_t>(x >> 8)) * 0x1p-23f - 1.0f;  // exact
  return unit * bound;
}

void fill_initial(float* weights, size_t dim, uint64_t row_key, float bound) {
  const uint32_t low = static_cast<uint32_t>(row_key);
  const uint32_t high = static_cast<uint32_t>(row_key >> 32);
  for (size_t column = 0; column < dim; ++column) weights[column] = initial_weight(low, high, column, bound);
}

void xor_initial(float* __restrict out, const float* __restrict weights, size_t dim, uint64_t row_key, float bound) {
  const uint32_t low = static_cast<uint32_t>(row_key);
  const uint32_t high = static_cast<uint32_t>(row_key >> 32);
  for (size_t column = 0; column < dim; ++column) {
    const float initial = initial_weight(low, high, column, bound);
    uint32_t bits, weight;
    memcpy(&bits, &initial, sizeof bits);
    memcpy(&weight, weights + column, sizeof weight);
    bits ^= weight;
    memcpy(out + column, &bits, sizeof bits);
  }
}

// ---- gather

template <size_t Dim>
void gather_dim(const Records& records, const uint32_t* slots, size_t count, float* out) {
  const size_t dim = length<Dim>(records.dim);
  const size_t ahead = rows_ahead(dim);
  const float* base = records.base;
  const size_t stride = records.stride;
  for (size_t i = 0; i < count && i < ahead; ++i) prefetch_read(base + slots[i] * stride, dim);
  for (size_t i = 0; i < count; ++i) {
    if (i + ahead < count) prefetch_read(base + slots[i + ahead] * stride, dim);
    memcpy(out + i * dim, base + slots[i] * stride, dim * sizeof(float));
  }
}

#if defined(__AVX__)

typedef float Quad __attribute__((vector_size(16)));

REGROW_INLINE Lanes two_quads(const float* first, const float* second) {
  Quad quads[2];
  memcpy(&quads[0], first, sizeof(Quad));
  memcpy(&quads[1], second, sizeof(Quad));
  return __builtin_shufflevector(quads[0], quads[1], 0, 1, 2, 3, 4, 5, 6, 7);
}

// A whole line, past the caches.
REGROW_INLINE void stream_line(float* line, const float* source) {
#if defined(__AVX512F__)
  typedef float Line __attribute__((vector_size(64)));
  Line floats;
  memcpy(&floats, source, sizeof floats);
  __builtin_ia32_movntps512(line, floats);
#else
  __builtin_ia32_movntps256(line, two_quads(source, source + 4));
  __builtin_ia32_movntps256(line + 8, two_quads(source + 8, source + 12));
#endif
}

// As above, but past the caches, straight to memory: that spares reading lines which are about to be
// overwritten whole. Lines must be written whole and at once, or it costs more than it gains. So with rows
// that begin `Past` floats after the beginning of a line, the line that two rows share is put together from
// both.
template <size_t Dim, size_t Past>
void stream_dim(const Records& records, const uint32_t* slots, size_t count, float* out) {
  constexpr size_t head = (line_floats - Past) % line_floats;  // of a row, in the line of the row before
  const size_t dim = length<Dim>(records.dim);
  const size_t ahead = rows_ahead(dim);
  const size_t stride = records.stride;
  const float* before = nullptr;
  float* line = out + head;
  for (size_t i = 0; i < count && i < ahead; ++i) prefetch_read(records.base + slots[i] * stride, dim);
  for (size_t i = 0; i < count; ++i) {
    if (i + ahead < count) prefetch_read(records.base + slots[i + ahead] * stride, dim);
    const float* row = records.base + slots[i] * stride;
    if constexpr (Past != 0) {
      if (i == 0) {
        memcpy(out, row, head * sizeof(float));
      } else {
        const float* tail = before + dim - Past;
        const auto quad = [=](size_t at) { return at < Past ? tail + at : row + (at - Past); };
        __builtin_ia32_movntps256(line, two_quads(quad(0), quad(4)));
        __builtin_ia32_movntps256(line + 8, two_quads(quad(8), quad(12)));
        line += line_floats;
      }
    }
    for (size_t c = head; c + line_floats <= dim; c += line_floats, line += line_floats) stream_line(line, row + c);
    before = row;
  }
  if constexpr (Past != 0) memcpy(line, before + dim - Past, Past * sizeof(float));
  __builtin_ia32_sfence();  // before another thread is told of the rows
}

template <size_t Dim>
bool streamed(const Records& records, const uint32_t* slots, size_t count, float* out) {
  if (length<Dim>(records.dim) % line_floats != 0 || count == 0) return false;
  switch (reinterpret_cast<uintptr_t>(out) % (line_floats * sizeof(float))) {
    case 0:
      return stream_dim<Dim, 0>(records, slots, count, out), true;
    case 16:
      return stream_dim<Dim, 4>(records, slots, count, out), true;
    case 32:
      return stream_dim<Dim, 8>(records, slots, count, out), true;
    case 48:
      return stream_dim<Dim, 12>(records, slots, count, out), true;
    default:
      return false;
  }
}

#else

template <size_t Dim>
bool streamed(const Records&, const uint32_t*, size_t, float*) {
  return false;
}

#endif

template <size_t Dim>
void gather_either(const Records& records, const uint32_t* slots, size_t count, float* out, bool past_caches) {
  if (!past_caches || !streamed<Dim>(records, slots, count, out)) gather_dim<Dim>(records, slots, count, out);
}

void gather(const Records& records, const uint32_t* slots, size_t count, float* out, bool past_caches) {
  switch (records.dim) {
    case 8:
      return gather_dim<8>(records, slots, count, out);
    case 16:
      return gather_either<16>(records, slots, count, out, past_caches);
    case 32:
      return gather_either<32>(records, slots, count, out, past_caches);
    case 64:
      return gather_either<64>(records, slots, count, out, past_caches);
    case 128:
      return gather_either<128>(records, slots, count, out, past_caches);
    default:
      return gather_either<0>(records, slots, count, out, past_caches);
  }
}

// ---- optimizers

// Lane l sums elements l, l + 8, ...
template <size_t Dim>
REGROW_INLINE float sum_of_squares(const float* values, size_t dim_given) {
  const size_t dim = length<Dim>(dim_given);
  Lanes lanes = {0, 0, 0, 0, 0, 0, 0, 0};
  size_t i = 0;
  for (; i + 8 <= dim; i += 8) {
    Lanes part;
    memcpy(&part, values + i, sizeof part);
    lanes += part * part;
  }
  if (i < dim) {
    Lanes part = {0, 0, 0, 0, 0, 0, 0, 0};  // adding 0 changes no lane: a sum of squares is never -0
    memcpy(&part, values + i, (dim - i) * sizeof(float));
    lanes += part * part;
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

template <Optimizer Rule, size_t Dim>
REGROW_INLINE void update_row(float* record, const float* __restrict grad, size_t dim_given, const UpdateNumbers& n) {
  const size_t dim = length<Dim>(dim_given);
  float* __restrict weights = record;
  float* __restrict state = record + dim;
  if constexpr (Rule == Optimizer::sgd) {
    for (size_t i = 0; i < dim; ++i) weights[i] -= n.learning_rate * grad[i];
  } else if constexpr (Rule == Optimizer::momentum) {
    for (size_t i = 0; i < dim; ++i) {
      state[i] = n.momentum * state[i] + grad[i];
      weights[i] -= n.learning_rate * state[i];
    }
  } else if constexpr (Rule == Optimizer::adagrad) {
    for (size_t i = 0; i < dim; ++i) {
      state[i] += grad[i] * grad[i];
      weights[i] -= n.learning_rate * grad[i] / (__builtin_sqrtf(state[i]) + n.eps);
    }
  } else if constexpr (Rule == Optimizer::rowwise_adagrad) {
    const float sum = state[0] + sum_of_squares<Dim>(grad, dim) / static_cast<float>(dim);
    state[0] = sum;
    const float rate = n.learning_rate / (__builtin_sqrtf(sum) + n.eps);
    for (size_t i = 0; i < dim; ++i) weights[i] -= rate * grad[i];
  } else {
    constexpr bool rowwise = Rule == Optimizer::partial_rowwise_adam;
    float* __restrict first = state;
    float* __restrict second = state + dim;  // one number when rowwise
    const float keep1 = 1.0f - n.beta1;
    const float keep2 = 1.0f - n.beta2;
    float row_root = 0.0f;
    if constexpr (rowwise) {
      const float mean = sum_of_squares<Dim>(grad, dim) / static_cast<float>(dim);
      second[0] = n.beta2 * second[0] + keep2 * mean;
      row_root = __builtin_sqrtf(second[0] / n.bias2) + n.eps;
    }
    for (size_t i = 0; i < dim; ++i) {
      first[i] = n.beta1 * first[i] + keep1 * grad[i];
      float root = row_root;
      if constexpr (!rowwise) {
        second[i] = n.beta2 * second[i] + keep2 * (grad[i] * grad[i]);
        root = __builtin_sqrtf(second[i] / n.bias2) + n.eps;
      }
      float change = first[i] / n.bias1 / root;
      if (n.weight_decay != 0.0f) change += n.weight_decay * weights[i];
      weights[i] -= n.learning_rate * change;
    }
  }
}

// Threads may share a word of the bitmap. Most rows were changed before: looking first spares the atomic
// write.
REGROW_INLINE void mark(uint64_t* changed, uint32_t slot) {
  uint64_t* word = changed + slot / 64;
  const uint64_t bit = uint64_t{1} << (slot % 64);
  if (!(__atomic_load_n(word, __ATOMIC_RELAXED) & bit)) __atomic_fetch_or(word, bit, __ATOMIC_RELAXED);
}

template <Optimizer Rule, size_t Dim>
void update_dim(const Records& records, const uint32_t* slots, size_t count, const float* grads,
                const UpdateNumbers& numbers) {
  constexpr bool adam = Rule == Optimizer::adam || Rule == Optimizer::partial_rowwise_adam;
  const UpdateNumbers n = numbers;
  const size_t dim = length<Dim>(records.dim);
  const size_t stride = records.stride;
  const size_t ahead = rows_ahead(stride);
  const bool decays = !adam && n.weight_decay != 0.0f;
  // Where the gradient with the decay added goes; dims are bounded (dim_max), so the stack holds any row.
  float* decayed = decays ? static_cast<float*>(__builtin_alloca(dim * sizeof(float))) : nullptr;
  const auto prefetch = [&](uint32_t slot) __attribute__((always_inline)) {
    prefetch_write(records.base + slot * stride, stride);
    REGROW_PREFETCH_WRITE(records.changed + slot / 64);
  };
  for (size_t i = 0; i < count && i < ahead; ++i) prefetch(slots[i]);
  for (size_t i = 0; i < count; ++i) {
    if (i + ahead < count) prefetch(slots[i + ahead]);
    float* record = records.base + slots[i] * stride;
    const float* grad = grads + i * dim;
    if (decays) {
      for (size_t c = 0; c < dim; ++c) decayed[c] = grad[c] + n.weight_decay * record[c];
      grad = decayed;
    }
    update_row<Rule, Dim>(record, grad, dim, n);
    mark(records.changed, slots[i]);
  }
}

template <Optimizer Rule>
void update(const Records& records, const uint32_t* slots, size_t count, const float* grads,
            const UpdateNumbers& numbers) {
  switch (records.dim) {
    case 8:
      return update_dim<Rule, 8>(records, slots, count, grads, numbers);
    case 16:
      return update_dim<Rule, 16>(records, slots, count, grads, numbers);
    case 32:
      return update_dim<Rule, 32>(records, slots, count, grads, numbers);
    case 64:
      return update_dim<Rule, 64>(records, slots, count, grads, numbers);
    case 128:
      return update_dim<Rule, 128>(records, slots, count, grads, numbers);
    default:
      return update_dim<Rule, 0>(records, slots, count, grads, numbers);
  }
}

// ---- pooling

constexpr size_t lookups_ahead = 8;

template <size_t Dim>
void pool_dim(const Feature& feature, const float* rows, size_t bag_begin, size_t bag_end, float* matrix) {
  const size_t dim = length<Dim>(feature.dim);
  const uint32_t* lookups = feature.lookups;
  if (!feature.bag_start) {
    for (size_t bag = bag_begin; bag < bag_end; ++bag) {
      if (bag + lookups_ahead < bag_end) prefetch_read(rows + (lookups[bag + lookups_ahead] & lookup_offset), dim);
      memcpy(matrix + bag * feature.matrix_stride, rows + (lookups[bag] & lookup_offset), dim * sizeof(float));
    }
    return;
  }
  const size_t last = feature.bag_start[bag_end];
  for (size_t bag = bag_begin; bag < bag_end; ++bag) {
    const size_t begin = feature.bag_start[bag];
    const size_t end = feature.bag_start[bag + 1];
    float* __restrict out = matrix + bag * feature.matrix_stride;
    if (begin == end) {
      memset(out, 0, dim * sizeof(float));
      continue;
    }
    for (size_t l = begin; l < end; ++l) {
      if (l + lookups_ahead < last) prefetch_read(rows + (lookups[l + lookups_ahead] & lookup_offset), dim);
      const float* __restrict row = rows + (lookups[l] & lookup_offset);
      if (l == begin)
        memcpy(out, row, dim * sizeof(float));
      else
        for (size_t c = 0; c < dim; ++c) out[c] += row[c];
    }
    if (feature.mean && end - begin > 1) {
      const float size = static_cast<float>(end - begin);
      for (size_t c = 0; c < dim; ++c) out[c] /= size;
    }
  }
}

// The first gradient of a row replaces what was there (0 + g, as if the row had been zeroed), later ones are
// added.
REGROW_INLINE void add_row(uint32_t lookup, const float* __restrict grad, size_t dim, float size, float* grads) {
  float* __restrict out = grads + (lookup & lookup_offset);
  const bool first = lookup & lookup_first;
  if (size == 1.0f) {
    if (first)
      for (size_t c = 0; c < dim; ++c) out[c] = 0.0f + grad[c];
    else
      for (size_t c = 0; c < dim; ++c) out[c] += grad[c];
  } else if (first) {
    for (size_t c = 0; c < dim; ++c) out[c] = 0.0f + grad[c] / size;
  } else {
    for (size_t c = 0; c < dim; ++c) out[c] += grad[c] / size;
  }
}

template <size_t Dim>
void unpool_dim(const Feature& feature, const float* matrix, size_t bag_begin, size_t bag_end, uint32_t offset_begin,
                uint32_t offset_end, float* grads) {
  const size_t dim = length<Dim>(feature.dim);
  const uint32_t* lookups = feature.lookups;
  const size_t stride = feature.matrix_stride;
  const auto ours = [=](uint32_t lookup) {
    return (lookup & lookup_offset) - offset_begin < offset_end - offset_begin;
  };
  if (!feature.bag_start) {
    for (size_t bag = bag_begin; bag < bag_end; ++bag) {
      if (bag + lookups_ahead < bag_end) {
        const uint32_t later = lookups[bag + lookups_ahead];
        if (ours(later)) {
          prefetch_write(grads + (later & lookup_offset), dim);
          prefetch_read(matrix + (bag + lookups_ahead) * stride, dim);
        }
      }
      if (ours(lookups[bag])) add_row(lookups[bag], matrix + bag * stride, dim, 1.0f, grads);
    }
    return;
  }
  const size_t last = feature.bag_start[bag_end];
  for (size_t bag = bag_begin; bag < bag_end; ++bag) {
    const size_t begin = feature.bag_start[bag];
    const size_t end = feature.bag_start[bag + 1];
    const float size = feature.mean ? static_cast<float>(end - begin) : 1.0f;
    for (size_t l = begin; l < end; ++l) {
      if (l + lookups_ahead < last && ours(lookups[l + lookups_ahead]))
        prefetch_write(grads + (lookups[l + lookups_ahead] & lookup_offset), dim);
      if (ours(lookups[l])) add_row(lookups[l], matrix + bag * stride, dim, size, grads);
    }
  }
}

void pool(const Feature& feature, const float* rows, size_t bag_begin, size_t bag_end, float* matrix) {
  switch (feature.dim) {
    case 8:
      return pool_dim<8>(feature, rows, bag_begin, bag_end, matrix);
    case 16:
      return pool_dim<16>(feature, rows, bag_begin, bag_end, matrix);
    case 32:
      return pool_dim<32>(feature, rows, bag_begin, bag_end, matrix);
    case 64:
      return pool_dim<64>(feature, rows, bag_begin, bag_end, matrix);
    case 128:
      return pool_dim<128>(feature, rows, bag_begin, bag_end, matrix);
    default:
      return pool_dim<0>(feature, rows, bag_begin, bag_end, matrix);
  }
}

void unpool(const Feature& feature, const float* matrix, size_t bag_begin, size_t bag_end, uint32_t offset_begin,
            uint32_t offset_end, float* grads) {
#define REGROW_UNPOOL(Dim) return unpool_dim<Dim>(feature, matrix, bag_begin, bag_end, offset_begin, offset_end, grads)
  switch (feature.dim) {
    case 8:
      REGROW_UNPOOL(8);
    case 16:
      REGROW_UNPOOL(16);
    case 32:
      REGROW_UNPOOL(32);
    case 64:
      REGROW_UNPOOL(64);
    case 128:
      REGROW_UNPOOL(128);
    default:
      REGROW_UNPOOL(0);
  }
#undef REGROW_UNPOOL
}

template <size_t Dim>
void merge_dim(const uint32_t* targets, size_t count, size_t dim_given, const float* source, float* target) {
  const size_t dim = length<Dim>(dim_given);
  for (size_t i = 0; i < count; ++i) {
    if (i + lookups_ahead < count)
      prefetch_write(target + size_t{targets[i + lookups_ahead] & lookup_offset} * dim, dim);
    float* __restrict out = target + size_t{targets[i] & lookup_offset} * dim;
    const float* __restrict row = source + i * dim;
    if (targets[i] & lookup_first)
      memcpy(out, row, dim * sizeof(float));
    else
      for (size_t c = 0; c < dim; ++c) out[c] += row[c];
  }
}

void add_rows(const uint32_t* targets, size_t count, size_t dim, const float* source, float* target) {
  switch (dim) {
    case 16:
      return merge_dim<16>(targets, count, dim, source, target);
    case 64:
      return merge_dim<64>(targets, count, dim, source, target);
    default:
      return merge_dim<0>(targets, count, dim, source, target);
  }
}

// ---- CRC-32C

REGROW_INLINE uint64_t load64(const uint8_t* data) {
  uint64_t word;
  memcpy(&word, data, sizeof word);
  return word;
}

#if defined(__SSE4_2__)

REGROW_INLINE uint32_t crc_word(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(__builtin_ia32_crc32di(crc, word));
}

REGROW_INLINE uint32_t crc_shifted(uint32_t crc, const Crc32cTables& tables) {
  return tables.shift[0][crc & 255] ^ tables.shift[1][crc >> 8 & 255] ^ tables.shift[2][crc >> 16 & 255] ^
         tables.shift[3][crc >> 24];
}

// The instruction takes three cycles but one can start every cycle: three lanes run side by side.
uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t size, const Crc32cTables& tables) {
  crc = ~crc;
  for (; size >= 3 * crc32c_lane; size -= 3 * crc32c_lane, data += 3 * crc32c_lane) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < crc32c_lane; i += 8) {
      crc = crc_word(crc, load64(data + i));
      second = crc_word(second, load64(data + crc32c_lane + i));
      third = crc_word(third, load64(data + 2 * crc32c_lane + i));
    }
    crc = crc_shifted(crc_shifted(crc, tables) ^ second, tables) ^ third;
  }
  for (; size >= 8; size -= 8, data += 8) crc = crc_word(crc, load64(data));
  for (; size; --size, ++data) crc = __builtin_ia32_crc32qi(crc, *data);
  return ~crc;
}

#else

uint32_t crc32c(uint32_t crc, const uint8_t* data, size_t size, const Crc32cTables& tables) {
  const auto& slices = tables.slices;
  crc = ~crc;
  for (; size >= 8; size -= 8, data += 8) {
    uint32_t low = crc;
    for (int byte = 0; byte < 4; ++byte) low ^= uint32_t{data[byte]} << (8 * byte);
    crc = slices[7][low & 255] ^ slices[6][low >> 8 & 255] ^ slices[5][low >> 16 & 255] ^ slices[4][low >> 24] ^
          slices[3][data[4]] ^ slices[2][data[5]] ^ slices[1][data[6]] ^ slices[0][data[7]];
  }
  for (; size; --size, ++data) crc = crc >> 8 ^ slices[0][(crc ^ *data) & 255];
  return ~crc;
}

#endif

// ---- parity

#include "gf.inl"

}  // namespace

extern const Kernels kernels = {
    REGROW_ISA_NAME,
    max_u32,
    fill_initial,
    xor_initial,
    gather,
    {update<Optimizer::sgd>, update<Optimizer::momentum>, update<Optimizer::adagrad>,
     update<Optimizer::rowwise_adagrad>, update<Optimizer::adam>, update<Optimizer::partial_rowwise_adam>},
    pool,
    unpool,
    add_rows,
    crc32c,
    xor_bytes,
    gf_xor,
};

}  // namespace regrow::REGROW_ISA
