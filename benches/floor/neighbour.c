/* A neighbour that misbehaves: neighbour KIND SECONDS [ADDRESS PORT]
 *
 *   hog          uses the time of all CPUs, and does nothing else
 *   forks        makes processes, each of which makes processes
 *   memory       fills memory until a process of it is killed, again and again
 *   write        writes a file of 1 GB through the page cache, again and again
 *   direct       the same past the page cache
 *   read         reads a file of 64 MB past the page cache, again and again
 *   sync         writes 4 kB and has them stored, with four processes
 *   cache        reads a file of 6 GB, which has no blocks: each page is taken from the page cache of others
 *   drop         has the kernel drop the page cache of all programs and libraries of the image
 *   disk         fills its disk, at most 2 GB, and removes everything, again and again
 *   files        makes empty files, at most 50,000, and removes them, again and again
 *   names        looks for files that do not exist, each under another name
 *   inotify      makes as many inotify instances as it gets, with as many watches
 *   aio          makes as many contexts of asynchronous I/O as it gets
 *   connections  connects to ADDRESS, or to a server of its own, without end; the last 200 of each process stay open
 *   syn          sends SYN packets to ADDRESS from ever other ports, and nothing else (needs CAP_NET_RAW)
 *   probe        does what any program may: prints the names of the calls that are refused
 *
 * It ends by itself after SECONDS, and with it, as process 1 of a container, everything that it has made. Files are
 * made in the working directory. LIMIT: 6 GB of memory and 2 GB of disk where no contract has less.
 *
 * Statically linked. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MB (1L << 20)
#define MEMORY_MB 6144
#define DISK_MB 2048
#define FILE_MB 1024
#define READ_MB 64
#define FILES 50000
#define OPEN 200
#define MANY 20000

static time_t end;
static const char *address = "127.0.0.1";
static int port;

static time_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec;
}

/* As process 1 a program has no default action for SIGALRM. */
static void stop(int signal)
{
	_exit(signal != SIGALRM);
}

static void stop_at_end(void)
{
	time_t left = end - now();

	signal(SIGALRM, stop);
	alarm(left > 0 ? (unsigned)left : 1);
}

/* fork(2), whose child ends in time as well. */
static pid_t divide(void)
{
	pid_t child = fork();

	if (!child)
		stop_at_end();
	return child;
}

static void nap(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };

	nanosleep(&t, NULL);
}

static void fail(const char *step)
{
	perror(step);
	exit(1);
}

static void hog(void)
{
	for (long n = sysconf(_SC_NPROCESSORS_ONLN); n > 1 && divide() > 0; n--)
		;
	for (;;)
		for (volatile int i = 0; i < 500; i++)
			;
}

static void forks(void)
{
	/* Ever more refused calls at once would use all memory: the kernel frees what each has made somewhat later. */
	for (;;)
		if (divide() < 0)
			nap(10);
}

static void memory(void)
{
	for (;;) {
		pid_t child = divide();

		if (child > 0) {
			waitpid(child, NULL, 0);
			continue;
		}
		for (long mb = 0; !child && mb < MEMORY_MB; mb++) {
			char *piece = malloc(MB);

			for (long at = 0; piece && at < MB; at += 4096)
				piece[at] = (char)(at + mb + 1);
		}
		if (!child)
			_exit(0);
		nap(1);
	}
}

static void writes(int flags)
{
	int fd = open("written", O_WRONLY | O_CREAT | flags, 0600);
	char *piece = aligned_alloc(4096, MB);

	if (fd < 0 || !piece)
		fail("written");
	memset(piece, 'w', MB);
	/* Without O_TRUNC: ext4 stores a file that was truncated when it is closed, in the name of the writer. */
	for (long at = 0;; at = (at + 1) % FILE_MB)
		if (pwrite(fd, piece, MB, at * MB) != MB)
			nap(1);
}

static void reads(void)
{
	int fd = open("direct", O_RDWR | O_CREAT, 0600);
	char *piece = aligned_alloc(4096, MB);

	if (fd < 0 || !piece)
		fail("direct");
	memset(piece, 'r', MB);
	for (long at = 0; at < READ_MB; at++)
		if (pwrite(fd, piece, MB, at * MB) != MB)
			fail("direct");
	if (fsync(fd) || fcntl(fd, F_SETFL, O_DIRECT))
		fail("direct");
	for (long at = 0;; at = (at + 1) % READ_MB)
		if (pread(fd, piece, MB, at * MB) != MB)
			nap(1);
}

static void syncs(void)
{
	static char page[4096];
	char name[32];
	int fd;

	divide();
	divide();
	snprintf(name, sizeof(name), "synced-%d", (int)getpid());
	fd = open(name, O_WRONLY | O_CREAT, 0600);
	for (long at = 0;; at = (at + 1) % 4096)
		if (pwrite(fd, page, sizeof(page), at * 4096) < 0 || fsync(fd))
			nap(1);
}

static void cache(void)
{
	int fd = open("read", O_RDWR | O_CREAT, 0600);
	char *piece = malloc(MB);

	if (fd < 0 || !piece || ftruncate(fd, MEMORY_MB * MB))
		fail("read");
	for (long at = 0;; at = (at + 1) % MEMORY_MB)
		if (pread(fd, piece, MB, at * MB) < 0)
			nap(1);
}

static int drop_one(const char *path, const struct stat *status, int type, struct FTW *unused)
{
	int fd = type == FTW_F && S_ISREG(status->st_mode) ? open(path, O_RDONLY) : -1;

	(void)unused;
	if (fd >= 0) {
		posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
		close(fd);
	}
	return 0;
}

static void drop(void)
{
	for (;;)
		nftw("/usr", drop_one, 16, FTW_PHYS);
}

static void disk(void)
{
	char *piece = malloc(MB), name[32];

	if (!piece)
		fail("memory");
	memset(piece, 'd', MB);
	for (;;) {
		int count = 0;

		for (int full = 0; !full && count * 16 < DISK_MB; count++) {
			snprintf(name, sizeof(name), "filled-%d", count);
			int fd = open(name, O_WRONLY | O_CREAT, 0600);
			for (int mb = 0; !full && mb < 16; mb++)
				full = write(fd, piece, MB) != MB;
			close(fd);
		}
		while (count-- > 0) {
			snprintf(name, sizeof(name), "filled-%d", count);
			unlink(name);
		}
	}
}

static void files(void)
{
	char name[32];

	for (;;) {
		int count = 0;

		for (int fd = 0; fd >= 0 && count < FILES; count++) {
			snprintf(name, sizeof(name), "empty-%d", count);
			fd = open(name, O_WRONLY | O_CREAT, 0600);
			close(fd);
		}
		while (count-- > 0) {
			snprintf(name, sizeof(name), "empty-%d", count);
			unlink(name);
		}
	}
}

static void names(void)
{
	char name[32];
	struct stat status;

	for (unsigned long n = 0;; n++) {
		snprintf(name, sizeof(name), "none-%lu", n);
		stat(name, &status);
	}
}

static int watcher;

static int watch_one(const char *path, const struct stat *unused, int type, struct FTW *unused_too)
{
	(void)unused;
	(void)type;
	(void)unused_too;
	return inotify_add_watch(watcher, path, IN_MODIFY) < 0;
}

static void inotify(void)
{
	static int all[MANY];

	for (;;) {
		int count = 0;

		while (count < MANY && (watcher = inotify_init1(0)) >= 0) {
			all[count++] = watcher;
			nftw("/usr", watch_one, 16, FTW_PHYS);
		}
		nap(100);
		while (count-- > 0)
			close(all[count]);
	}
}

static void aio(void)
{
	static unsigned long all[MANY];

	for (;;) {
		int count = 0;

		while (count < MANY && !syscall(SYS_io_setup, 1000, &all[count]))
			count++;
		nap(100);
		while (count-- > 0) {
			syscall(SYS_io_destroy, all[count]);
			all[count] = 0;
		}
	}
}

static void serve(int listener)
{
	for (;;) {
		int client = accept(listener, NULL, NULL);

		if (client < 0)
			nap(1);
		else
			close(client);
	}
}

/* A server in a process of its own, at a port that the kernel has chosen. */
static void serve_own(void)
{
	struct sockaddr_in own = { .sin_family = AF_INET };
	socklen_t length = sizeof(own);
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	if (bind(listener, (void *)&own, length) || listen(listener, 4096) ||
	    getsockname(listener, (void *)&own, &length))
		fail("listen");
	port = ntohs(own.sin_port);
	if (!divide())
		serve(listener);
	close(listener);
}

static struct sockaddr_in destination(void)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons((unsigned short)port) };

	if (inet_pton(AF_INET, address, &to.sin_addr) != 1)
		fail(address);
	return to;
}

static void connections(void)
{
	static int open[OPEN];

	if (!port)
		serve_own();
	struct sockaddr_in to = destination();
	divide();
	divide();
	for (unsigned n = 0;; n = (n + 1) % OPEN) {
		if (open[n] > 0)
			close(open[n]);
		open[n] = socket(AF_INET, SOCK_STREAM, 0);
		if (open[n] < 0 || connect(open[n], (void *)&to, sizeof(to)))
			nap(1);
	}
}

static unsigned short checksum(const void *bytes, size_t length, unsigned long sum)
{
	const unsigned short *words = bytes;

	for (size_t n = 0; n < length / 2; n++)
		sum += words[n];
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return (unsigned short)~sum;
}

static void syn(void)
{
	struct sockaddr_in to = destination(), own;
	socklen_t length = sizeof(own);
	int fd = socket(AF_INET, SOCK_RAW, IPPROTO_TCP);

	if (fd < 0 || connect(fd, (void *)&to, sizeof(to)) || getsockname(fd, (void *)&own, &length))
		fail("raw socket");
	for (unsigned n = 1;; n++) {
		struct tcphdr head = { .syn = 1, .doff = 5, .window = htons(64240) };
		struct {
			in_addr_t from, to;
			unsigned short protocol, length;
		} pseudo = { own.sin_addr.s_addr, to.sin_addr.s_addr, htons(IPPROTO_TCP), htons(sizeof(head)) };

		head.source = htons((unsigned short)(1024 + n % 64000));
		head.dest = to.sin_port;
		head.seq = n * 2654435761u;
		unsigned long sum = (unsigned short)~checksum(&pseudo, sizeof(pseudo), 0);
		head.check = checksum(&head, sizeof(head), sum);
		if (send(fd, &head, sizeof(head), 0) < 0)
			nap(1);
	}
}

static int is_any_refused;

static void check(const char *what, int is_done)
{
	if (!is_done)
		printf("%s (%s) ", what, strerror(errno));
	is_any_refused |= !is_done;
}

static void probe(void)
{
	unsigned long context = 0;
	int pair[2];
	pid_t child = fork();

	if (!child)
		_exit(0);
	check("fork", child > 0);
	check("pipe", !pipe(pair));
	check("inotify_init", inotify_init1(0) >= 0);
	check("io_setup", !syscall(SYS_io_setup, 128, &context));
	check("open", open("probed", O_WRONLY | O_CREAT, 0600) >= 0);
	check("socket", socket(AF_INET, SOCK_STREAM, 0) >= 0);
	puts(is_any_refused ? "" : "none");
}

static void direct(void)
{
	writes(O_DIRECT);
}

static void buffered(void)
{
	writes(0);
}

static const struct {
	const char *name;
	void (*run)(void);
} kinds[] = {
	{ "hog", hog },
	{ "forks", forks },
	{ "memory", memory },
	{ "write", buffered },
	{ "direct", direct },
	{ "read", reads },
	{ "sync", syncs },
	{ "cache", cache },
	{ "drop", drop },
	{ "disk", disk },
	{ "files", files },
	{ "names", names },
	{ "inotify", inotify },
	{ "aio", aio },
	{ "connections", connections },
	{ "syn", syn },
	{ "probe", probe },
};

int main(int argc, char **argv)
{
	if (argc != 3 && argc != 5)
		return 2;
	end = now() + atol(argv[2]);
	if (argc == 5) {
		address = argv[3];
		port = atoi(argv[4]);
	}
	stop_at_end();
	for (size_t n = 0; n < sizeof(kinds) / sizeof(*kinds); n++)
		if (!strcmp(kinds[n].name, argv[1]))
			return kinds[n].run(), 0;
	fprintf(stderr, "no kind of neighbour is called '%s'\n", argv[1]);
	return 2;
}
