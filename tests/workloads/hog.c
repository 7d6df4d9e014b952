/* Fills MEGABYTES of memory, and then checks all of it. The first AT_ONCE are filled at once, then PER_SECOND. It
 * answers connections to port 80 meanwhile, each with the number of megabytes that it has filled. When all are filled,
 * it checks all of them again before each answer. */
#include "workload.h"
#include <arpa/inet.h>
#include <pthread.h>
#include <sys/socket.h>

#define MB (1 << 20)
static uint64_t *memory;
static long all;
static volatile long filled;
static volatile int is_checked;

/* The value of a word: no page is like another, or like that of another program. */
static uint64_t word(uint64_t at) {
	return (at + 1) * 0x9e3779b97f4a7c15ull;
}

static void check(void) {
	for (uint64_t n = 0; n < all * MB / sizeof *memory; n++)
		must(memory[n] == word(n));
}

static void *serve(void *listener) {
	for (;;) {
		char text[32];
		int peer = accept((int)(long)listener, 0, 0);
		must(peer >= 0);
		if (is_checked)
			check();
		int n = snprintf(text, sizeof text, "%ld\n", filled);
		/* A client that has gone needs no answer. */
		send(peer, text, n, MSG_NOSIGNAL);
		close(peer);
	}
	return 0;
}

static long number(const char *name) {
	const char *text = getenv(name);
	must(text != NULL);
	return atol(text);
}

int main(void) {
	all = number("MEGABYTES");
	long at_once = number("AT_ONCE"), rate = number("PER_SECOND");
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(80)};
	int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
	must(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
	must(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 64) == 0);
	pthread_t thread;
	must(pthread_create(&thread, 0, serve, (void *)(long)listener) == 0);
	memory = mmap(0, all * MB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	must(memory != MAP_FAILED);
	/* Small pages, so that the memory grows evenly. */
	madvise(memory, all * MB, MADV_NOHUGEPAGE);
	print_line("ready 0");
	long words = MB / sizeof *memory;
	for (long mb = 0; mb < all; mb++) {
		for (long n = 0; n < words; n++)
			memory[mb * words + n] = word(mb * words + n);
		filled = mb + 1;
		if (filled >= at_once)
			nap(1000 / rate);
	}
	check();
	is_checked = 1;
	print_line("ok");
	for (;;)
		pause();
}
