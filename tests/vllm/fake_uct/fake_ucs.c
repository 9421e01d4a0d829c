/* A stand-in for libucs below it: type 3 is the pid namespace. */

#include <stdint.h>

uint32_t ucs_sys_get_ns(int type)
{
    return type == 3 ? 4026531836u : 0;
}
