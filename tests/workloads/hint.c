/* How long data is expected to live (F_SET_RW_HINT): of files with a name and without, and in memory. */
#include "workload.h"

enum { GET_HINT = 1035, SET_HINT = 1036 };

int main(void) {
	mkdir("/tmp", 0777);
	make_file("/tmp/gone", "text");
	int files[] = {
		open("/tmp/named", O_CREAT | O_RDWR, 0600),
		open("/tmp/gone", O_RDONLY),
		open("/tmp", O_TMPFILE | O_RDWR, 0600),
		memfd_create("memory", 0),
		open("/dev/shm/memory", O_CREAT | O_RDWR, 0600),
		open("/tmp/none", O_CREAT | O_RDWR, 0600),
	};
	must(unlink("/tmp/gone") == 0);
	for (uint64_t n = 0; n < 6; n++) {
		uint64_t hint = n + 1;
		must(files[n] >= 0 && (n == 5 || fcntl(files[n], SET_HINT, &hint) == 0));
	}
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		for (uint64_t n = 0; n < 6; n++) {
			uint64_t hint = 99;
			must(fcntl(files[n], GET_HINT, &hint) == 0 && hint == (n == 5 ? 0 : n + 1));
		}
	}
	ok();
}
