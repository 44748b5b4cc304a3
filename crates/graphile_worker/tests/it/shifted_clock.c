// Shifts what a program takes for the time of day by SHIFT seconds. The tests and the torture build it:
//   cc -shared -fPIC -DSHIFT=3600 -o clock.so shifted_clock.c -ldl && LD_PRELOAD=./clock.so date
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, time);
  if (clock == CLOCK_REALTIME) time->tv_sec += SHIFT;
  return result;
}
