/* Files without a name: deleted while open and mapped, replaced, never named at all; removed
 * directories. */
#include "workload.h"
#include <dirent.h>
#include <sys/xattr.h>

static int holds(int fd, const char *text) {
	char found[32] = "";
	return pread(fd, found, sizeof found - 1, 0) == (ssize_t)strlen(text) &&
	       strcmp(found, text) == 0;
}

int main(void) {
	struct stat st;
	int gone = open("/gone", O_RDWR | O_CREAT, 0640);
	must(gone >= 0 && write(gone, "once upon", 9) == 9 && lseek(gone, 4, SEEK_SET) == 4);
	int shared = dup(gone), own = open("/gone", O_RDONLY | O_CLOEXEC);
	int log = open("/gone", O_WRONLY | O_APPEND);
	char *mapped = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, gone, 0);
	char *private = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, gone, 0);
	must(own >= 0 && log >= 0 && mapped != MAP_FAILED && private != MAP_FAILED);
	private[5] = 'U';
	must(fchown(gone, 7, 8) == 0);
	struct timespec times[2] = {{1000, 5}, {2000, 7}};
	must(futimens(gone, times) == 0 && unlink("/gone") == 0);
	/* Sparse, longer than a page, with a partial last page. */
	int sparse = open("/sparse", O_RDWR | O_CREAT | O_EXCL, 0600);
	must(pwrite(sparse, "far", 3, 5000000) == 3 && pwrite(sparse, "near", 4, 0) == 4);
	int marked = fsetxattr(sparse, "user.mark", "x y", 3, 0) == 0;
	must(unlink("/sparse") == 0);
	int old = open("/config", O_RDWR | O_CREAT, 0644), new = open("/new", O_RDWR | O_CREAT, 0644);
	must(write(old, "old", 3) == 3 && write(new, "new!", 4) == 4);
	must(rename("/new", "/config") == 0);
	int never = open("/etc", O_TMPFILE | O_RDWR, 0600);
	must(never >= 0 && write(never, "never", 5) == 5);
	must(mkdir("/dir", 0700) == 0 && mkdir("/dir/sub", 0711) == 0);
	int lost = open("/dir/sub", O_RDONLY | O_DIRECTORY), place = open("/dir/sub", O_PATH);
	must(lost >= 0 && place >= 0 && chdir("/dir/sub") == 0);
	must(rmdir("/dir/sub") == 0 && rmdir("/dir") == 0);
	for (int round = 0; round < ROUNDS; round++) {
		ready(round);
		char c, cwd[64];
		must(lseek(gone, 0, SEEK_CUR) == 4 && read(gone, &c, 1) == 1 && c == ' ');
		must(lseek(shared, 4, SEEK_SET) == 4 && lseek(gone, 0, SEEK_CUR) == 4);
		must(lseek(own, 0, SEEK_CUR) == 0 && fcntl(own, F_GETFD) == FD_CLOEXEC);
		must(fstat(gone, &st) == 0 && st.st_nlink == 0 && st.st_uid == 7 && st.st_gid == 8);
		must((st.st_mode & 07777) == 0640 && st.st_size == 9 + round);
		if (round == 0)
			must(st.st_mtim.tv_sec == 2000 && st.st_mtim.tv_nsec == 7);
		/* All of them refer to one file. */
		must(write(log, "+", 1) == 1 && pread(own, &c, 1, 9 + round) == 1 && c == '+');
		must(mapped[5] == 'u' + round && private[5] == 'U');
		mapped[5]++;
		must(pread(own, &c, 1, 5) == 1 && c == mapped[5]);
		must(fstat(sparse, &st) == 0 && st.st_size == 5000003 && st.st_blocks < 1000);
		must(pread(sparse, &c, 1, 5000002) == 1 && c == 'r');
		must(pread(sparse, &c, 1, 4000000) == 1 && c == 0);
		char mark[8];
		must(!marked || (fgetxattr(sparse, "user.mark", mark, 8) == 3 && mark[2] == 'y'));
		must(holds(old, "old") && holds(new, "new!"));
		must(holds(never, "never"));
		must(getcwd(cwd, sizeof cwd) == 0 && errno == ENOENT);
		must(openat(lost, "x", O_CREAT | O_RDWR, 0600) == -1 && errno == ENOENT);
		must(fstat(place, &st) == 0 && (st.st_mode & 07777) == 0711 && st.st_nlink == 0);
		must(fstat(lost, &st) == 0 && S_ISDIR(st.st_mode));
		must(access("/gone", F_OK) == -1 && access("/dir", F_OK) == -1);
	}
	/* A file that never had a name can get one. */
	char path[32];
	snprintf(path, sizeof path, "/proc/self/fd/%d", never);
	must(linkat(AT_FDCWD, path, AT_FDCWD, "/named", AT_SYMLINK_FOLLOW) == 0);
	must(stat("/named", &st) == 0 && st.st_size == 5);
	ok();
}
