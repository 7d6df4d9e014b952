//! Paths from outside against trees that try to lead out.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dormouse_kernel::resolve::{create_directories, create_file, in_root};
use rustix::fs::{Mode, OFlags};

fn open(path: &Path) -> OwnedFd {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).unwrap()
}

fn read(root: &OwnedFd, path: &str) -> Result<String, i32> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK;
    let fd = in_root(root.as_fd(), path, flags, Mode::empty()).map_err(|e| e.errno())?;
    Ok(std::io::read_to_string(fs::File::from(fd)).unwrap())
}

#[test]
fn links_and_dots_stay_inside() {
    let scratch = tempfile::tempdir().unwrap();
    let inside = scratch.path().join("root");
    fs::create_dir_all(inside.join("etc")).unwrap();
    fs::write(inside.join("etc/name"), "inside").unwrap();
    fs::write(scratch.path().join("name"), "outside").unwrap();
    symlink("/etc/name", inside.join("absolute")).unwrap();
    symlink("../../../name", inside.join("upwards")).unwrap();
    symlink("loop", inside.join("loop")).unwrap();
    let root = open(&inside);
    assert_eq!(read(&root, "absolute").as_deref(), Ok("inside"));
    assert_eq!(read(&root, "../../etc/../../etc/name").as_deref(), Ok("inside"));
    assert_eq!(read(&root, "upwards"), Err(libc::ENOENT));
    assert_eq!(read(&root, "loop"), Err(libc::ELOOP));
    assert_eq!(read(&root, "etc/na\0me"), Err(libc::EINVAL));
}

#[test]
fn magic_links_lead_nowhere() {
    let proc = open(Path::new("/proc"));
    assert_eq!(read(&proc, "self/root/etc/passwd"), Err(libc::ELOOP));
    let exe = in_root(proc.as_fd(), "self/exe", OFlags::RDONLY, Mode::empty()).unwrap_err();
    assert_eq!(exe.errno(), libc::ELOOP);
    assert!(read(&proc, "self/comm").is_ok());
}

#[test]
fn directories_are_made_where_links_lead_inside() {
    let scratch = tempfile::tempdir().unwrap();
    let inside = scratch.path().join("root");
    fs::create_dir_all(inside.join("real")).unwrap();
    symlink("/real", inside.join("link")).unwrap();
    symlink("/nowhere/else", inside.join("dangling")).unwrap();
    fs::write(inside.join("file"), "").unwrap();
    let root = open(&inside);
    let mode = Mode::from_raw_mode(0o755);
    let make = |path: &str| create_directories(root.as_fd(), path, mode);
    make("/link//a/./b/").unwrap();
    assert!(inside.join("real/a/b").is_dir());
    make("new/../../other/deep").unwrap();
    assert!(inside.join("other/deep").is_dir() && !scratch.path().join("other").exists());
    make("").unwrap();
    make("/").unwrap();
    assert_eq!(make("file/x").unwrap_err().errno(), libc::ENOTDIR);
    assert_eq!(make("dangling/x").unwrap_err().errno(), libc::EEXIST);
    assert_eq!(make(&"n/".repeat(3000)).unwrap_err().errno(), libc::ENAMETOOLONG);
    assert_eq!(make(&"n".repeat(300)).unwrap_err().errno(), libc::ENAMETOOLONG);

    create_file(root.as_fd(), "/link/etc/hosts", Mode::from_raw_mode(0o644)).unwrap();
    assert!(inside.join("real/etc/hosts").is_file());
    create_file(root.as_fd(), "top", Mode::from_raw_mode(0o644)).unwrap();
    assert!(inside.join("top").is_file());
}

#[test]
fn swapped_directory_never_leads_outside() {
    let scratch = tempfile::tempdir().unwrap();
    let (inside, outside) = (scratch.path().join("root"), scratch.path().join("outside"));
    fs::create_dir_all(&outside).unwrap();
    fs::create_dir_all(inside.join("a")).unwrap();
    symlink("../outside", inside.join("b")).unwrap();
    let root = open(&inside);
    let stop = AtomicBool::new(false);
    let (made, refused) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let (a, b) = (inside.join("a"), inside.join("b"));
            let exchange = rustix::fs::RenameFlags::EXCHANGE;
            while !stop.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(rustix::fs::CWD, &a, rustix::fs::CWD, &b, exchange)
                    .unwrap();
            }
        });
        let mode = Mode::from_raw_mode(0o755);
        // Until both outcomes of the race were seen often enough.
        let (mut made, mut refused) = (0, 0);
        let end = Instant::now() + Duration::from_secs(20);
        while (made < 300 || refused < 300) && Instant::now() < end {
            match create_directories(root.as_fd(), format!("a/{made}/x"), mode) {
                Ok(_) => made += 1,
                Err(_) => refused += 1,
            }
        }
        stop.store(true, Ordering::Relaxed);
        (made, refused)
    });
    assert!(made > 0 && refused > 0, "no race: {made} made, {refused} refused");
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
}
