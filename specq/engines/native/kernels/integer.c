/* The forward pass of forward.c in integer arithmetic (blocks.h). Nothing is fused, so that every instruction set gives
 * the same bits. */
#define INTEGER
#include "forward.c"
