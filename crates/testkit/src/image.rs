//! Root filesystems for tests, made once below `target/testkit`.
//!
//! The first test that needs an image makes it under a lock, and the others wait. A file's name
//! contains a version that is raised when its recipe changes.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub use crate::cache::cache;
use crate::debian;
use crate::process::run;

/// Packages of the large image: one of each kind of common software.
const SOFTWARE: &[&str] = &[
    "systemd-sysv",
    "dbus",
    "iproute2",
    "procps",
    "iputils-ping",
    "ca-certificates",
    "nginx-light",
    "postgresql",
    "postgresql-contrib",
    "redis-server",
    "redis-tools",
    "python3-venv",
    "python3-pip",
    "openjdk-17-jdk-headless",
    "nodejs",
    "openssh-server",
    "openssh-client",
    "gcc",
    "libc6-dev",
    "make",
    "vim-tiny",
    "busybox-static",
];

/// Packages of the image for rounds of use, sleep and checkpoint.
const PROGRAMS: &[&str] = &[
    "apache2",
    "beanstalkd",
    "caddy",
    "cron",
    "dbus",
    "dnsmasq",
    "docker-registry",
    "dovecot-imapd",
    "emacs-nox",
    "etcd-server",
    "faketime",
    "gcc",
    "git",
    "gunicorn",
    "haproxy",
    "influxdb",
    "iproute2",
    "libc6-dev",
    "libgoogle-perftools4",
    "mariadb-server",
    "memcached",
    "mosquitto",
    "nats-server",
    "netdata",
    "nginx-light",
    "nodejs",
    "openjdk-17-jdk-headless",
    "openssh-client",
    "openssh-server",
    "php8.2-fpm",
    "postgresql",
    "procps",
    "prometheus",
    "prometheus-alertmanager",
    "puma",
    "python3",
    "python3-ldap3",
    "python3-psycopg2",
    "python3-pymysql",
    "rabbitmq-server",
    "redis-server",
    "rsync",
    "screen",
    "slapd",
    "squid",
    "starman",
    "systemd-sysv",
    "tmux",
    "unbound",
    "varnish",
    "vim",
];

/// Makes `name` in the cache if it is missing, and returns its path. `make` writes to a path beside
/// it, which is then renamed: an existing name is complete.
pub fn cached(name: &str, make: impl FnOnce(&Path)) -> PathBuf {
    let dir = cache();
    let path = dir.join(name);
    if path.exists() {
        return path;
    }
    fs::create_dir_all(&dir).expect("target can be written");
    let lock = File::create(dir.join(format!("{name}.lock")));
    let lock = lock.expect("target can be written, or `xtask guest` makes this image beforehand");
    lock.lock().expect("a file can be locked");
    if !path.exists() {
        let partial = dir.join(format!("partial-{name}"));
        // Ignored: exists only if a process was killed while making it.
        let _ = fs::remove_dir_all(&partial).or_else(|_| fs::remove_file(&partial));
        make(&partial);
        fs::rename(&partial, &path).expect("a finished image takes its name");
    }
    path
}

/// A directory with busybox under all its names, [`probe()`], and the few files that a C library
/// reads: the smallest image for clients and servers.
pub fn busybox() -> PathBuf {
    let probe = probe();
    let version = probe.file_name().expect("a file name").to_string_lossy().into_owned();
    cached(&format!("busybox-1-{version}"), |dir| {
        for folder in ["bin", "etc", "tmp", "root", "var/tmp", "home/user", "www"] {
            fs::create_dir_all(dir.join(folder)).expect("target can be written");
        }
        let program = ["/bin/busybox", "/usr/bin/busybox"].map(Path::new);
        let program = program.into_iter().find(|path| path.is_file());
        let program = program.expect("package busybox-static is installed");
        fs::copy(program, dir.join("bin/busybox")).expect("busybox can be copied");
        fs::copy(probe, dir.join("bin/probe")).expect("copy the file");
        let mut list = Command::new(program);
        list.arg("--list");
        for name in run(list, b"", Duration::from_secs(10)).ok().lines() {
            if name != "busybox" {
                symlink("busybox", dir.join("bin").join(name)).expect("create the link");
            }
        }
        let passwd = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n\
                      nobody:x:65534:65534::/:/bin/false\n";
        let group = "root:x:0:\nuser:x:1000:\nextra:x:2000:user\nnogroup:x:65534:\n";
        fs::write(dir.join("etc/passwd"), passwd).expect("target can be written");
        fs::write(dir.join("etc/group"), group).expect("target can be written");
        fs::write(dir.join("www/index.html"), "hello from a container\n").expect("written");
        let mode = |path: &str, bits: u32| {
            let permissions = std::os::unix::fs::PermissionsExt::from_mode(bits);
            fs::set_permissions(dir.join(path), permissions).expect("set the mode");
        };
        mode("tmp", 0o1777);
        mode("var/tmp", 0o1777);
        std::os::unix::fs::chown(dir.join("home/user"), Some(1000), Some(1000)).expect("chown");
    })
}

/// The program with all attacks from inside a container, from `tests/inside/attack.c`.
pub fn attack() -> PathBuf {
    compiled("attack")
}

/// Small servers and clients, from `tests/inside/probe.c`.
pub fn probe() -> PathBuf {
    compiled("probe")
}

/// [`busybox()`] with the program that builds kernel state (`tests/inside/state.c`) in `/bin`.
pub fn state() -> PathBuf {
    busybox_with("state")
}

/// [`busybox()`] with the programs that name their clients (`tests/inside/bound.c`) in `/bin`.
pub fn bound() -> PathBuf {
    busybox_with("bound")
}

fn busybox_with(name: &str) -> PathBuf {
    let program = compiled(name);
    let base = busybox();
    let version = program.file_name().expect("a file name").to_string_lossy().into_owned();
    cached(&format!("image-{version}"), |dir| {
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(base).arg(dir);
        run(copy, b"", Duration::from_secs(60)).ok();
        fs::copy(&program, dir.join("bin").join(name)).expect("copy the file");
    })
}

/// A program of `tests/inside`, statically linked so that it runs in any image.
fn compiled(name: &str) -> PathBuf {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    let top = top.expect("the crate lies two folders below the top");
    let dir = top.join("tests/inside");
    let source = dir.join(name).with_extension("c");
    // With its own headers: NAME.c, NAME_PART.h.
    let mut parts: Vec<PathBuf> = fs::read_dir(&dir)
        .expect("a folder of the repository")
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(name))
        .map(|entry| entry.path())
        .collect();
    parts.sort_unstable();
    let text: Vec<u8> =
        parts.iter().flat_map(|part| fs::read(part).expect("a file of the repository")).collect();
    cached(&format!("{name}-{:016x}", crate::leftover::fnv(&text)), |path| {
        let mut compile = Command::new("gcc");
        compile.args(["-O1", "-static", "-Wall", "-Wno-unused-result", "-o"]);
        compile.arg(path).arg(&source).arg("-lm");
        run(compile, b"", Duration::from_secs(60)).ok();
    })
}

/// [`busybox()`] with [`attack()`] in `/bin`, once unchanged and once, called `gain`, set-user-id.
pub fn busybox_with_attack() -> PathBuf {
    let program = attack();
    let base = busybox();
    let name = |path: &Path| path.file_name().expect("a file name").to_string_lossy().into_owned();
    cached(&format!("{}-{}", name(&base), name(&program)), |dir| {
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(base).arg(dir);
        run(copy, b"", Duration::from_secs(60)).ok();
        for (name, mode) in [("attack", 0o755), ("gain", 0o4755)] {
            let path = dir.join("bin").join(name);
            fs::copy(&program, &path).expect("copy the file");
            let permissions = std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(path, permissions).expect("set the mode");
        }
    })
}

/// [`busybox()`] with every program of `tests/workloads` in `/bin`.
///
/// They are one program under many names, because each test imports them. Under emulation, the
/// import of fifty megabytes would take longer than the rest of a test.
///
/// Each is compiled once and kept: all of them take ten seconds, for which the first tests that need them waited
/// whenever one had changed.
pub fn workloads() -> PathBuf {
    let dir = tests().join("workloads");
    let read = |name: &str| fs::read(dir.join(name)).expect("a file of the repository");
    let sources = fs::read_dir(&dir).expect("a file of the repository").flatten();
    let mut names: Vec<String> = sources
        .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".c").map(str::to_owned))
        .collect();
    names.sort_unstable();
    let mut all = read("workload.h");
    names.iter().for_each(|name| all.extend(read(&format!("{name}.c"))));
    let main = main_of(&names);
    all.extend(main.as_bytes());
    let base = busybox();
    cached(&format!("workloads-{:016x}", crate::leftover::fnv(&all)), |image| {
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(base).arg(image);
        run(copy, b"", Duration::from_secs(60)).ok();
        let objects = tempfile::tempdir().expect("a scratch directory");
        let source = objects.path().join("main.c");
        fs::write(&source, main).expect("write the file");
        let program = image.join("bin").join(&names[0]);
        let mut link = Command::new("gcc");
        link.args(["-O1", "-static", "-pthread", "-Wall", "-Werror", "-o"]);
        link.arg(&program).arg(&source);
        // One compiler for each processor.
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            let share = names.len().div_ceil(count);
            let parts = names.chunks(share).map(|part| {
                scope.spawn(move || part.iter().map(|name| workload(name)).collect::<Vec<_>>())
            });
            for part in parts.collect::<Vec<_>>() {
                link.args(part.join().expect("every workload is compiled"));
            }
        });
        run(link, b"", Duration::from_secs(60)).ok();
        for name in &names[1..] {
            let path = image.join("bin").join(name);
            let _ = fs::remove_file(&path); // ignored: few have the name of an applet
            fs::hard_link(&program, path).expect("create the link");
        }
    })
}

/// The object file of a workload, whose `main` has a name of its own.
fn workload(name: &str) -> PathBuf {
    let dir = tests().join("workloads");
    let source = dir.join(name).with_extension("c");
    let read = |path: &Path| fs::read(path).expect("a file of the repository");
    let text = [read(&dir.join("workload.h")), read(&source)].concat();
    cached(&format!("workload-{name}-{:016x}.o", crate::leftover::fnv(&text)), |object| {
        let mut compile = Command::new("gcc");
        compile.args(["-O1", "-pthread", "-Wall", "-Werror", "-c", "-o"]).arg(object).arg(source);
        run(compile, b"", Duration::from_secs(60)).ok();
        let mut rename = Command::new("objcopy");
        rename.arg(format!("--redefine-sym=main=main_{name}")).arg(object);
        run(rename, b"", Duration::from_secs(60)).ok();
    })
}

/// Returns the source of a program that runs the workload of its own name (argv[0]).
fn main_of(names: &[String]) -> String {
    let mut text = String::from("#include <stdio.h>\n#include <string.h>\n");
    names.iter().for_each(|name| text.push_str(&format!("int main_{name}(void);\n")));
    text.push_str(
        "int main(int argc, char **argv) {\n\
         const char *slash = argc ? strrchr(argv[0], '/') : NULL;\n\
         const char *name = slash ? slash + 1 : argc ? argv[0] : \"\";\n",
    );
    for name in names {
        text.push_str(&format!("if (!strcmp(name, \"{name}\")) return main_{name}();\n"));
    }
    text.push_str("return fprintf(stderr, \"no workload is called '%s'\\n\", name), 127;\n}\n");
    text
}

/// The folder `tests` of the repository.
fn tests() -> PathBuf {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    top.expect("the crate lies two folders below the top").join("tests")
}

/// A tar of a small Debian with nginx, some 180 MB.
pub fn nginx() -> PathBuf {
    cached("nginx-1.tar", |path| debian::bootstrap(&["nginx-light"], &as_tar(path), &[]))
}

/// A tar of a Debian with databases, interpreters, a JVM, sshd and systemd, some 900 MB.
pub fn software() -> PathBuf {
    cached("software-2.tar", |path| debian::bootstrap(SOFTWARE, &as_tar(path), &[]))
}

/// A tar of a small Debian with MariaDB, some 420 MB.
pub fn mariadb() -> PathBuf {
    cached("mariadb-1.tar", |path| debian::bootstrap(&["mariadb-server"], &as_tar(path), &[]))
}

/// The directory of a Debian with the servers, editors and interpreters of `tests/rounds.rs`, 2.2 GB. It is the
/// root of containers as it is (`--rootfs`): no test imports it.
pub fn programs() -> PathBuf {
    cached("programs-2", |path| debian::bootstrap(PROGRAMS, path, &[]))
}

/// The directory of a small Debian with servers that customers share, and clients that load them, 670 MB.
pub fn services() -> PathBuf {
    let databases = ["redis-server", "postgresql", "mariadb-server"];
    let others = ["nginx-light", "php8.2-fpm", "dnsmasq-base"];
    let clients = ["redis-tools", "wrk", "dnsperf", "procps"];
    let packages = [&databases[..], &others, &clients].concat();
    cached("services-2", |path| debian::bootstrap(&packages, path, &[]))
}

/// A tar of a small Debian with systemd, dbus and python, some 190 MB.
pub fn systemd() -> PathBuf {
    let packages = ["systemd-sysv", "dbus", "python3"];
    cached("systemd-1.tar", |path| debian::bootstrap(&packages, &as_tar(path), &[]))
}

/// `cached` gives partial names the final extension, so that tools recognize a tar.
fn as_tar(path: &Path) -> PathBuf {
    assert_eq!(path.extension().and_then(|e| e.to_str()), Some("tar"));
    path.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busybox_image_is_cached_and_complete() {
        let dir = busybox();
        assert!(dir.join("bin/busybox").is_file() && dir.join("bin/sh").is_symlink());
        assert_eq!(busybox(), dir);
    }
}
