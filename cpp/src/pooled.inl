// Part of kernels.inl: reading and updating records straight from and to the vectors of bags, for a worker whose only
// server is in the same process. The bits are those of gather and pool, and of unpool and update; what is spared is the
// buffer of distinct rows between them, which is written and read once more than memory would have to be.

template <size_t Dim>
REGROW_INLINE uint32_t number_of(uint32_t lookup, const PlannedRows& rows, size_t dim) {
  return static_cast<uint32_t>(((lookup & lookup_offset) - rows.offset_begin) / length<Dim>(dim));
}

#if defined(__AVX__)

template <size_t Dim>
REGROW_INLINE bool copy_streamed(const float* row, size_t dim_given, float* out) {
  const size_t dim = length<Dim>(dim_given);
  if (dim % line_floats != 0 || reinterpret_cast<uintptr_t>(out) % (line_floats * sizeof(float)) != 0) return false;
  for (size_t c = 0; c < dim; c += line_floats) stream_line(out + c, row + c);
  return true;
}

REGROW_INLINE void end_stream() { __builtin_ia32_sfence(); }

#else

template <size_t Dim>
REGROW_INLINE bool copy_streamed(const float*, size_t, float*) {
  return false;
}

REGROW_INLINE void end_stream() {}

#endif

template <size_t Dim>
void pool_records_dim(const Feature& feature, const PlannedRows& rows, const Records& records, size_t bag_begin,
                      size_t bag_end, float* matrix, bool past_caches) {
  const size_t dim = length<Dim>(feature.dim);
  const size_t ahead = rows_ahead(dim);
  const auto row_of = [&](size_t lookup) __attribute__((always_inline)) {
    return records.base + rows.slots[number_of<Dim>(feature.lookups[lookup], rows, dim)] * records.stride;
  };
  const bool bags = feature.bag_start != nullptr;
  const size_t first = bags ? feature.bag_start[bag_begin] : bag_begin;
  const size_t last = bags ? feature.bag_start[bag_end] : bag_end;
  for (size_t l = first; l < last && l < first + ahead; ++l) prefetch_read(row_of(l), dim);
  for (size_t bag = bag_begin; bag < bag_end; ++bag) {
    const size_t begin = bags ? feature.bag_start[bag] : bag;
    const size_t end = bags ? feature.bag_start[bag + 1] : bag + 1;
    float* __restrict out = matrix + bag * feature.matrix_stride;
    if (begin == end) memset(out, 0, dim * sizeof(float));
    for (size_t l = begin; l < end; ++l) {
      if (l + ahead < last) prefetch_read(row_of(l + ahead), dim);
      const float* __restrict row = row_of(l);
      if (l == begin) {
        if (!past_caches || end - begin > 1 || !copy_streamed<Dim>(row, dim, out))
          memcpy(out, row, dim * sizeof(float));
      } else {
        for (size_t c = 0; c < dim; ++c) out[c] += row[c];
      }
    }
    if (feature.mean && end - begin > 1) {
      const float size = static_cast<float>(end - begin);
      for (size_t c = 0; c < dim; ++c) out[c] /= size;
    }
  }
  if (past_caches) end_stream();
}

template <size_t Dim>
float* place_grads_dim(const Feature& feature, const PlannedRows& rows, const float* matrix, size_t bags,
                       uint32_t number_begin, uint32_t number_end, GradPlace* places, float* sums) {
  const size_t dim = length<Dim>(feature.dim);
  for (size_t bag = 0; bag < bags; ++bag) {
    const size_t begin = feature.bag_start ? feature.bag_start[bag] : bag;
    const size_t end = feature.bag_start ? feature.bag_start[bag + 1] : bag + 1;
    const float size = feature.mean && end > begin ? static_cast<float>(end - begin) : 1.0f;
    const float* __restrict grad = matrix + bag * feature.matrix_stride;
    for (size_t l = begin; l < end; ++l) {
      const uint32_t lookup = feature.lookups[l];
      const uint32_t number = number_of<Dim>(lookup, rows, dim);
      if (number - number_begin >= number_end - number_begin) continue;
      GradPlace& place = places[number];
      const bool is_first = lookup & lookup_first;
      if (is_first && size == 1.0f) {
        place = {grad, false};
        continue;
      }
      if (is_first || !place.is_sum) {
        float* __restrict sum = sums;
        if (is_first) {
          for (size_t c = 0; c < dim; ++c) sum[c] = 0.0f + grad[c] / size;
        } else {
          const float* __restrict only = place.grad;
          for (size_t c = 0; c < dim; ++c) sum[c] = 0.0f + only[c];
        }
        place = {sum, true};
        sums += dim;
        if (is_first) continue;
      }
      float* __restrict sum = const_cast<float*>(place.grad);  // ours: it is a sum
      if (size == 1.0f)
        for (size_t c = 0; c < dim; ++c) sum[c] += grad[c];
      else
        for (size_t c = 0; c < dim; ++c) sum[c] += grad[c] / size;
    }
  }
  return sums;
}

void pool_records(const Feature& feature, const PlannedRows& rows, const Records& records, size_t bag_begin,
                  size_t bag_end, float* matrix, bool past_caches) {
#define REGROW_POOL(Dim) return pool_records_dim<Dim>(feature, rows, records, bag_begin, bag_end, matrix, past_caches)
  switch (feature.dim) {
    case 16:
      REGROW_POOL(16);
    case 32:
      REGROW_POOL(32);
    case 64:
      REGROW_POOL(64);
    case 128:
      REGROW_POOL(128);
    default:
      REGROW_POOL(0);
  }
#undef REGROW_POOL
}

float* place_grads(const Feature& feature, const PlannedRows& rows, const float* matrix, size_t bags,
                   uint32_t number_begin, uint32_t number_end, GradPlace* places, float* sums) {
#define REGROW_PLACE(Dim) \
  return place_grads_dim<Dim>(feature, rows, matrix, bags, number_begin, number_end, places, sums)
  switch (feature.dim) {
    case 16:
      REGROW_PLACE(16);
    case 32:
      REGROW_PLACE(32);
    case 64:
      REGROW_PLACE(64);
    case 128:
      REGROW_PLACE(128);
    default:
      REGROW_PLACE(0);
  }
#undef REGROW_PLACE
}
