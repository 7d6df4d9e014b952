/* The program that is checkpointed: a server that answers a byte with a byte at TCP port 7000, with
 * private memory and processes. A 't' first writes to a megabyte of that memory, in 16 pieces all
 * over it.
 *
 *     server MEGABYTES PROCESSES
 *
 * Every page of the memory is different. Its contents resemble those of programs: words, half of
 * them zero.
 */
#include <arpa/inet.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int count, char **words) {
	size_t bytes = (count > 1 ? strtoul(words[1], 0, 10) : 0) << 20;
	int processes = count > 2 ? atoi(words[2]) : 1;
	uint64_t *memory = mmap(0, bytes + 4096, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return 1;
	for (size_t n = 0; n < bytes / 8; n++)
		memory[n] = n % 2 ? 0 : n * 0x9e3779b97f4a7c15;
	for (int n = 1; n < processes; n++)
		if (fork() == 0)
			for (;;)
				pause();
	int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(7000)};
	if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 64) != 0)
		return 2;
	for (;;) {
		char byte;
		int caller = accept(listener, 0, 0);
		if (caller < 0 || read(caller, &byte, 1) != 1)
			byte = 0;
		for (size_t piece = 0; byte == 't' && piece < 16; piece++)
			for (size_t n = 0; n < 16; n++)
				memory[(bytes / 16 * piece / 4096 + n) * 512 + 1]++;
		if (byte != 0 && write(caller, &byte, 1) == 1)
			memory[0]++;
		close(caller);
	}
}
