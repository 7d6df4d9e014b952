/* Clocks that began with the host: they never go back, the vdso agrees with the system call, and a
 * timer expires at its absolute time. */
#include "workload.h"
#include <poll.h>
#include <sys/timerfd.h>

static const clockid_t clocks[] = {CLOCK_MONOTONIC, CLOCK_BOOTTIME};

int main(void) {
	int64_t last[2];
	for (int round = 0; round < ROUNDS; round++) {
		int timers[2];
		/* So that the timer may expire before, during and after the checkpoint. */
		const int64_t in = 400000000ll;
		for (int n = 0; n < 2; n++) {
			last[n] = quick(clocks[n]);
			struct itimerspec at = {.it_value = {(last[n] + in) / 1000000000,
							     (last[n] + in) % 1000000000}};
			timers[n] = timerfd_create(clocks[n], 0);
			must(timers[n] >= 0);
			must(timerfd_settime(timers[n], TFD_TIMER_ABSTIME, &at, 0) == 0);
		}
		ready(round);
		for (int n = 0; n < 2; n++) {
			int64_t a = quick(clocks[n]), b = slow(clocks[n]), c = quick(clocks[n]);
			must(last[n] <= a && a <= b && b <= c);
			struct pollfd polled = {.fd = timers[n], .events = POLLIN};
			must(poll(&polled, 1, 30000) == 1);
			must(quick(clocks[n]) >= last[n] + in);
			close(timers[n]);
		}
		struct timespec at = {.tv_sec = quick(CLOCK_MONOTONIC) / 1000000000};
		must(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, 0) == 0);
	}
	ok();
}
