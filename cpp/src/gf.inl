// Part of kernels.inl: XOR and multiplication in GF(2^8), on raw bytes. Targets and sources do not overlap, except
// that xor_bytes may be given one of its sources as its target.

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int8_t SignedBytes __attribute__((vector_size(16)));

#if defined(__AVX512BW__)
typedef char Chars64 __attribute__((vector_size(64)));
typedef short Shorts64 __attribute__((vector_size(64)));
#endif

REGROW_INLINE Bytes load_bytes(const uint8_t* from) {
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

REGROW_INLINE void store_bytes(uint8_t* to, Bytes bytes) { memcpy(to, &bytes, sizeof bytes); }

void xor_bytes(uint8_t* target, const uint8_t* a, const uint8_t* b, size_t size) {
  size_t i = 0;
#if defined(__AVX512BW__)
  for (; i + 64 <= size; i += 64) {
    Chars64 one, other;
    memcpy(&one, a + i, sizeof one);
    memcpy(&other, b + i, sizeof other);
    one ^= other;
    memcpy(target + i, &one, sizeof one);
  }
#endif
  for (; i + 16 <= size; i += 16) store_bytes(target + i, load_bytes(a + i) ^ load_bytes(b + i));
  for (; i < size; ++i) target[i] = a[i] ^ b[i];
}

REGROW_INLINE uint8_t product(uint8_t byte, const GfTable& table) {
  return table.low[byte & 15] ^ table.high[byte >> 4];
}

#if defined(__AVX2__)

typedef char Chars32 __attribute__((vector_size(32)));
typedef char Chars16 __attribute__((vector_size(16)));
typedef short Shorts32 __attribute__((vector_size(32)));
typedef short Shorts16 __attribute__((vector_size(16)));

#if defined(__AVX512BW__)
#define REGROW_TWICE_32                                                                                             \
  0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, \
      31, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, \
      29, 30, 31

REGROW_INLINE Chars64 shuffle(Chars64 table, Chars64 halves) {
  return (Chars64)__builtin_ia32_pshufb512_mask(table, halves, Chars64{}, ~0ull);
}
#endif

// A product is the sum of the products of its two halves of a byte, and a shuffle looks up 32 halves at once.
void gf_xor(uint8_t* __restrict target, const uint8_t* __restrict source, size_t size, const GfTable& table) {
  if (table.coefficient == 1) return xor_bytes(target, target, source, size);
  Chars16 low16, high16;
  memcpy(&low16, table.low, sizeof low16);
  memcpy(&high16, table.high, sizeof high16);
  const Chars32 low = __builtin_shufflevector(low16, low16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1,
                                              2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const Chars32 high = __builtin_shufflevector(high16, high16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0,
                                               1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  size_t i = 0;
#if defined(__AVX512BW__)
  const Chars64 low64 = __builtin_shufflevector(low, low, REGROW_TWICE_32);
  const Chars64 high64 = __builtin_shufflevector(high, high, REGROW_TWICE_32);
  for (; i + 64 <= size; i += 64) {
    Chars64 bytes, sum;
    memcpy(&bytes, source + i, sizeof bytes);
    memcpy(&sum, target + i, sizeof sum);
    sum ^= shuffle(low64, bytes & 15);
    sum ^= shuffle(high64, (Chars64)((Shorts64)bytes >> 4) & 15);
    memcpy(target + i, &sum, sizeof sum);
  }
#endif
  for (; i + 32 <= size; i += 32) {
    Chars32 bytes, sum;
    memcpy(&bytes, source + i, sizeof bytes);
    memcpy(&sum, target + i, sizeof sum);
    sum ^= __builtin_ia32_pshufb256(low, bytes & 15);
    sum ^= __builtin_ia32_pshufb256(high, (Chars32)((Shorts32)bytes >> 4) & 15);
    memcpy(target + i, &sum, sizeof sum);
  }
  if (i + 16 <= size) {
    Chars16 bytes, sum;
    memcpy(&bytes, source + i, sizeof bytes);
    memcpy(&sum, target + i, sizeof sum);
    sum ^= __builtin_ia32_pshufb128(low16, bytes & 15);
    sum ^= __builtin_ia32_pshufb128(high16, (Chars16)((Shorts16)bytes >> 4) & 15);
    memcpy(target + i, &sum, sizeof sum);
    i += 16;
  }
  for (; i < size; ++i) target[i] ^= product(source[i], table);
}

#else

// By hand: doubled seven times, summed where the coefficient has a bit. Doubling shifts a byte, and what falls out
// comes back as the polynomial.
void gf_xor(uint8_t* __restrict target, const uint8_t* __restrict source, size_t size, const GfTable& table) {
  if (table.coefficient == 1) return xor_bytes(target, target, source, size);
  size_t i = 0;
  for (; i + 16 <= size; i += 16) {
    Bytes power = load_bytes(source + i);
    Bytes sum = load_bytes(target + i);
    for (unsigned rest = table.coefficient;;) {
      if (rest & 1) sum ^= power;
      rest >>= 1;
      if (!rest) break;
      power = (power + power) ^ ((Bytes)((SignedBytes)power < 0) & 0x1d);
    }
    store_bytes(target + i, sum);
  }
  for (; i < size; ++i) target[i] ^= product(source[i], table);
}

#endif
