// The kernels in the instructions every CPU of this architecture has.
#define REGROW_ISA portable
#define REGROW_ISA_NAME "portable"
#include "kernels.inl"
