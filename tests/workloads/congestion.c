/* A socket with a congestion control that is a module of the kernel (TCP_CONGESTION). */
#include "workload.h"
#include <netinet/tcp.h>
#include <sys/socket.h>

int main(void) {
	const char *control = "htcp";
	char found[16] = "";
	socklen_t length = sizeof found;
	int own = socket(AF_INET, SOCK_STREAM, 0);
	must(own >= 0 && setsockopt(own, IPPROTO_TCP, TCP_CONGESTION, control, strlen(control)) == 0);
	ready(0);
	must(getsockopt(own, IPPROTO_TCP, TCP_CONGESTION, found, &length) == 0);
	must(strcmp(found, control) == 0);
	ok();
}
