// The kernels for x86-64-v3 (AVX2, 2013 and later), compiled with -march=x86-64-v3; empty elsewhere.
#if defined(__AVX2__)
#define REGROW_ISA avx2
#define REGROW_ISA_NAME "avx2"
#include "kernels.inl"
#endif
