/* Memory that a fork wipes: the original keeps it, and a clone has zeros there, whenever it
 * starts. */
#include "workload.h"

int main(void) {
	char *page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	must(page != MAP_FAILED && madvise(page, 4096, MADV_WIPEONFORK) == 0);
	page[0] = 7;
	ready(0);
	print_line("state %d", page[0]);
	page[0] = 7;
	for (int round = 1; round < ROUNDS; round++) {
		ready(round);
		must(page[0] == 7);
	}
	ok();
}
