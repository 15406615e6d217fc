// The kernels for x86-64-v4 (AVX-512), compiled with -march=x86-64-v4; empty elsewhere.
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define REGROW_ISA avx512
#define REGROW_ISA_NAME "avx512"
#include "kernels.inl"
#endif
