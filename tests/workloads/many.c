/* Many open files that look alike, some of them the same. */
#include "workload.h"
#include <sys/eventfd.h>
#include <sys/resource.h>

enum { MANY = 600 };

int main(void) {
	int events[MANY], files[MANY], again[MANY];
	for (int n = 0; n < MANY; n++) {
		events[n] = eventfd(n, EFD_NONBLOCK);
		files[n] = open("/etc/passwd", O_RDONLY);
		must(events[n] >= 0 && files[n] >= 0);
	}
	for (int n = 0; n < MANY; n++)
		must((again[n] = dup(events[MANY - 1 - n])) >= 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		for (int n = 0; n < MANY; n++) {
			uint64_t value = 0, number = n;
			/* Each has its own, and both names of it lead there. */
			must(n == 0 || (read(again[MANY - 1 - n], &value, 8) == 8 && value == number));
			must(write(events[n], &number, 8) == 8);
			must(lseek(files[n], 0, SEEK_CUR) == round && lseek(files[n], round + 1, SEEK_SET) >= 0);
		}
	}
	ok();
}
