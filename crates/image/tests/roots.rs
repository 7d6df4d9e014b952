//! Root file systems: the container's view, the cost of its changes, and images made from them.

mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use dormouse_image::{Change, Commit, Image, Lower, Metadata, Silent, Store, Volume, assemble};
use dormouse_kernel::ErrorKind;
use support::{Scratch, Tar, chain, ids, in_own_mounts, userns};

/// A container's root: the mount, as a path that works while it lives.
struct Root {
    mount: OwnedFd,
    upper: OwnedFd,
    lower: Lower,
}

impl Root {
    fn of(scratch: &Scratch, image: &Image, name: &str) -> Self {
        let lower = scratch.store.rootfs(&image.id).unwrap();
        let dir = scratch.path(name);
        let volume = match dir.exists() {
            true => Store::open_upper(&dir),
            false => Store::create_upper(&dir, &ids(), &lower),
        };
        let (upper, work) = volume.unwrap();
        let volume = Volume { upper: &upper, work: &work, volatile: false };
        let mount = assemble(&lower, Some(userns().as_fd()), Some(volume), None).unwrap().root;
        Self { mount, upper, lower }
    }

    fn path(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.mount.as_raw_fd()).into()
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    fn changes(&self, store: &Store) -> Vec<String> {
        let list = store.diff(&self.lower, self.upper.as_fd(), &ids()).unwrap();
        let show =
            |c: Change| format!("{} {}", c.kind.letter(), String::from_utf8(c.path).unwrap());
        list.into_iter().map(show).collect()
    }
}

fn owner(path: impl AsRef<Path>) -> (u32, u32) {
    let meta = fs::symlink_metadata(path).unwrap();
    (meta.uid(), meta.gid())
}

fn host(id: u32) -> u32 {
    ids().to_host(id).unwrap()
}

fn xattr(path: impl AsRef<Path>, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 4096];
    let n = rustix::fs::getxattr(path.as_ref(), name, &mut value[..]).ok()?;
    value.truncate(n);
    Some(value)
}

/// A file capability of version 2: CAP_NET_RAW, permitted and effective.
const NET_RAW: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A tree with one of everything.
fn everything(dir: &Path) {
    fs::create_dir_all(dir.join("etc/conf.d")).unwrap();
    fs::write(dir.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\n").unwrap();
    fs::write(dir.join("etc/conf.d/a"), [b'a'; 500]).unwrap();
    fs::write(dir.join("etc/conf.d/b"), [b'b'; 500]).unwrap();
    fs::write(dir.join("empty"), "").unwrap();
    fs::write(dir.join("big"), vec![7; 3 << 20]).unwrap();
    fs::hard_link(dir.join("big"), dir.join("etc/big2")).unwrap();
    symlink("/etc/passwd", dir.join("link")).unwrap();
    symlink("x".repeat(3000), dir.join("long-link")).unwrap();
    fs::write(dir.join("setuid"), [b's'; 100]).unwrap();
    std::os::unix::fs::chown(dir.join("setuid"), Some(12), Some(34)).unwrap();
    fs::set_permissions(dir.join("setuid"), fs::Permissions::from_mode(0o6755)).unwrap();
    fs::write(dir.join("capable"), [b'c'; 100]).unwrap();
    let set = |name: &str, key: &str, value: &[u8]| {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(dir.join(name), key, value, flags).unwrap();
    };
    set("capable", "security.capability", &NET_RAW);
    set("capable", "user.note", b"line\nline");
    set("etc", "user.dir", b"d");
    set("capable", "trusted.overlay.redirect", b"/etc/shadow");
    set("capable", "trusted.other", b"x");
    let cwd = rustix::fs::CWD;
    let mode = rustix::fs::Mode::from_raw_mode(0o666);
    let make = |name: &str, kind, rdev| {
        rustix::fs::mknodat(cwd, dir.join(name), kind, mode, rdev).unwrap();
    };
    make("null", rustix::fs::FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    make("disk", rustix::fs::FileType::BlockDevice, rustix::fs::makedev(254, 700));
    make("pipe", rustix::fs::FileType::Fifo, 0);
    let sparse = fs::File::create(dir.join("sparse")).unwrap();
    sparse.set_len(5 << 30).unwrap();
    sparse.write_all_at(b"end", (5 << 30) - 3).unwrap();
    fs::set_permissions(dir, fs::Permissions::from_mode(0o751)).unwrap();
}

/// The same checks for both kinds of metadata, through overlay and id map.
fn container_sees_the_tree(metadata: Metadata) {
    in_own_mounts(|| {
        let scratch = Scratch::with(metadata);
        let tree = scratch.path("tree");
        everything(&tree);
        let image = scratch.import_path(&tree).unwrap();
        let root = Root::of(&scratch, &image, "c");
        assert_eq!(root.read("etc/passwd"), "root:x:0:0::/root:/bin/sh\n");
        assert_eq!(root.read("empty"), "");
        assert_eq!(fs::read(root.path("big")).unwrap(), vec![7; 3 << 20]);
        let big = fs::metadata(root.path("big")).unwrap();
        assert_eq!((big.ino(), big.nlink()), {
            let other = fs::metadata(root.path("etc/big2")).unwrap();
            (other.ino(), 2)
        });
        assert_eq!(fs::read_link(root.path("link")).unwrap(), Path::new("/etc/passwd"));
        assert_eq!(fs::read_link(root.path("long-link")).unwrap().as_os_str().len(), 3000);
        assert_eq!(owner(root.path("setuid")), (host(12), host(34)));
        assert_eq!(owner(root.path("etc/passwd")), (host(0), host(0)));
        let setuid = fs::metadata(root.path("setuid")).unwrap();
        assert_eq!(setuid.permissions().mode() & 0o7777, 0o6755);
        assert_eq!(xattr(root.path("capable"), "user.note").unwrap(), b"line\nline");
        assert_eq!(xattr(root.path("etc"), "user.dir").unwrap(), b"d");
        assert_eq!(xattr(root.path("capable"), "trusted.other"), None);
        assert_eq!(fs::read(root.path("capable")).unwrap(), [b'c'; 100]);
        let was = fs::metadata(tree.join("etc/passwd")).unwrap();
        let now = fs::metadata(root.path("etc/passwd")).unwrap();
        assert_eq!((was.mtime(), was.mtime_nsec()), (now.mtime(), now.mtime_nsec()));
        let null = fs::metadata(root.path("null")).unwrap();
        assert!(null.file_type().is_char_device());
        assert_eq!(null.rdev(), rustix::fs::makedev(1, 3));
        let disk = fs::metadata(root.path("disk")).unwrap();
        assert_eq!(disk.rdev(), rustix::fs::makedev(254, 700));
        // Device nodes are shown and cannot be opened.
        let opened = fs::File::open(root.path("null"));
        assert_eq!(opened.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
        assert!(fs::symlink_metadata(root.path("pipe")).unwrap().file_type().is_fifo());
        let sparse = fs::File::open(root.path("sparse")).unwrap();
        assert_eq!(sparse.metadata().unwrap().len(), 5 << 30);
        let mut end = [0; 4];
        sparse.read_exact_at(&mut end, (5 << 30) - 4).unwrap();
        assert_eq!(&end, b"\0end");
        let top = fs::metadata(root.path(".")).unwrap();
        assert_eq!((top.permissions().mode() & 0o7777, top.uid()), (0o751, host(0)));
        // Writing one name of a hard link writes the other.
        fs::OpenOptions::new()
            .append(true)
            .open(root.path("big"))
            .unwrap()
            .write_all(b"!")
            .unwrap();
        assert_eq!(fs::metadata(root.path("etc/big2")).unwrap().len(), (3 << 20) + 1);
        fs::rename(root.path("etc/conf.d"), root.path("etc/conf.e")).unwrap();
        assert_eq!(fs::read(root.path("etc/conf.e/a")).unwrap(), [b'a'; 500]);
        // The image is as it was, and a second container does not see the first.
        let other = Root::of(&scratch, &image, "d");
        assert_eq!(fs::metadata(other.path("big")).unwrap().len(), 3 << 20);
        assert!(other.path("etc/conf.d/a").exists());
        // Without a volume it cannot be written.
        let read_only = assemble(&root.lower, Some(userns().as_fd()), None, None).unwrap().root;
        let path = format!("/proc/self/fd/{}/x", read_only.as_raw_fd());
        let error = fs::write(path, "x").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    });
}

#[test]
fn root_container_sees_the_tree_from_erofs() {
    container_sees_the_tree(Metadata::Erofs);
}

#[test]
fn root_container_sees_the_tree_from_stubs() {
    container_sees_the_tree(Metadata::Stub);
}

/// The upper of a container works again after everything was unmounted, as after a reboot.
#[test]
fn root_upper_outlives_its_mounts_and_fits_no_other_image() {
    in_own_mounts(|| {
        let scratch = Scratch::new();
        let image = scratch.import(&Tar::default().file("f", &[1; 100]).end()).unwrap();
        let root = Root::of(&scratch, &image, "c");
        fs::write(root.path("own"), "mine").unwrap();
        fs::set_permissions(root.path("f"), fs::Permissions::from_mode(0o600)).unwrap();
        drop(root);
        scratch.store.unmount_all().unwrap();
        assert_eq!(fs::read_dir(scratch.path("run")).unwrap().count(), 1, "only the lock is left");
        let root = Root::of(&scratch, &image, "c");
        assert_eq!(root.read("own"), "mine");
        assert_eq!(fs::read(root.path("f")).unwrap(), [1; 100]);
        // Changing only the mode copied no data.
        let upper = scratch.path("c/upper/f");
        assert_eq!(xattr(&upper, "trusted.overlay.metacopy").unwrap(), b"");
        drop(root);
        Store::remove_upper(&scratch.path("c")).unwrap();
        Store::remove_upper(&scratch.path("c")).unwrap();
        assert!(!scratch.path("c").exists());
    });
}

#[test]
fn root_diff_lists_what_a_container_changed() {
    in_own_mounts(|| {
        let scratch = Scratch::new();
        let tree = scratch.path("tree");
        everything(&tree);
        let image = scratch.import_path(&tree).unwrap();
        let root = Root::of(&scratch, &image, "c");
        assert_eq!(root.changes(&scratch.store), Vec::<String>::new());
        fs::write(root.path("etc/new"), "n").unwrap();
        fs::write(root.path("etc/conf.d/a"), "changed").unwrap();
        fs::remove_file(root.path("link")).unwrap();
        fs::create_dir(root.path("dir")).unwrap();
        fs::write(root.path("dir/file"), "f").unwrap();
        fs::set_permissions(root.path("setuid"), fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(
            root.changes(&scratch.store),
            [
                "A /dir",
                "A /dir/file",
                "C /etc",
                "C /etc/conf.d",
                "C /etc/conf.d/a",
                "A /etc/new",
                "D /link",
                "C /setuid"
            ]
        );
        // Opened for writing, and nothing written.
        let again = Root::of(&scratch, &image, "d");
        drop(fs::OpenOptions::new().append(true).open(again.path("etc/conf.d/a")).unwrap());
        assert_eq!(again.changes(&scratch.store), Vec::<String>::new());
        // Written, and given its old time.
        let time = fs::metadata(again.path("etc/conf.d/b")).unwrap().modified().unwrap();
        let file = fs::OpenOptions::new().write(true).open(again.path("etc/conf.d/b")).unwrap();
        file.write_all_at(b"B", 0).unwrap();
        file.set_modified(time).unwrap();
        drop(file);
        assert_eq!(again.changes(&scratch.store), ["C /etc", "C /etc/conf.d", "C /etc/conf.d/b"]);
    });
}

#[test]
fn root_only_a_container_without_changes_has_none() {
    in_own_mounts(|| {
        let scratch = Scratch::new();
        let tree = scratch.path("tree");
        everything(&tree);
        let image = scratch.import_path(&tree).unwrap();
        let may_have_changes =
            |root: &Root| Store::may_have_changes(&root.lower, root.upper.as_fd(), &ids()).unwrap();
        let root = Root::of(&scratch, &image, "c");
        root.read("etc/passwd");
        assert!(!may_have_changes(&root), "it was read");
        for (number, change) in [
            (|root| fs::write(root.path("new"), "n").unwrap()) as fn(&Root),
            |root| fs::write(root.path("etc/conf.d/a"), "changed").unwrap(),
            |root| fs::remove_file(root.path("link")).unwrap(),
            |root| fs::set_permissions(root.path("."), fs::Permissions::from_mode(0o711)).unwrap(),
            |root| std::os::unix::fs::chown(root.path("."), Some(host(33)), None).unwrap(),
            |root| {
                let flags = rustix::fs::XattrFlags::empty();
                rustix::fs::setxattr(root.path("."), "user.mine", b"1", flags).unwrap();
            },
        ]
        .into_iter()
        .enumerate()
        {
            let root = Root::of(&scratch, &image, &format!("c{number}"));
            change(&root);
            assert!(may_have_changes(&root), "change {number}");
        }
    });
}

#[test]
fn root_undated_commits_of_the_same_files_are_one_image() {
    in_own_mounts(|| {
        let scratch = Scratch::new();
        let tree = scratch.path("tree");
        everything(&tree);
        let image = scratch.import_path(&tree).unwrap();
        let Root { upper, lower, mount } = {
            let root = Root::of(&scratch, &image, "c");
            fs::write(root.path("new"), "n").unwrap();
            root
        };
        drop(mount);
        let commit = |undated| {
            let commit = Commit { undated, ..Commit::default() };
            let made =
                scratch.store.commit(Some(&image), &lower, upper.as_fd(), &ids(), &commit, &Silent);
            made.unwrap()
        };
        let (dated, undated) = (commit(false), commit(true));
        // Dates are in seconds.
        std::thread::sleep(std::time::Duration::from_millis(1100));
        assert_eq!(commit(true), undated);
        assert_ne!(commit(false), dated);
    });
}

/// A committed image equals its container: owners, renamed directories, replaced ones, removed
/// names.
#[test]
fn root_committed_image_equals_its_container() {
    in_own_mounts(|| {
        let scratch = Scratch::new();
        let tree = scratch.path("tree");
        everything(&tree);
        let image = scratch.import_path(&tree).unwrap();
        let root = Root::of(&scratch, &image, "c");
        fs::rename(root.path("etc/conf.d"), root.path("conf")).unwrap();
        fs::create_dir(root.path("etc/conf.d")).unwrap();
        fs::write(root.path("etc/conf.d/only"), [b'o'; 90]).unwrap();
        fs::remove_file(root.path("etc/passwd")).unwrap();
        fs::create_dir(root.path("etc/passwd")).unwrap();
        fs::remove_file(root.path("pipe")).unwrap();
        fs::set_permissions(root.path("big"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(root.path("owned"), [b'w'; 90]).unwrap();
        std::os::unix::fs::chown(root.path("owned"), Some(host(33)), Some(host(65_534))).unwrap();
        for name in ["etc/conf.d", "etc/conf.d/only", "etc/passwd"] {
            std::os::unix::fs::chown(root.path(name), Some(host(0)), Some(host(0))).unwrap();
        }
        // As setcap in the container would: version 3, the container's root.
        let mut capability = NET_RAW.to_vec();
        capability[3] = 3;
        capability.extend_from_slice(&host(0).to_le_bytes());
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(root.path("owned"), "security.capability", &capability, flags)
            .unwrap();
        // An access control list that names user 33.
        let acl: Vec<u8> = [
            (1u16, 6u16, u32::MAX),
            (2, 4, host(33)),
            (4, 4, u32::MAX),
            (16, 6, u32::MAX),
            (32, 4, u32::MAX),
        ]
        .iter()
        .fold(2u32.to_le_bytes().to_vec(), |mut acl, (tag, perm, id)| {
            acl.extend_from_slice(&tag.to_le_bytes());
            acl.extend_from_slice(&perm.to_le_bytes());
            acl.extend_from_slice(&id.to_le_bytes());
            acl
        });
        rustix::fs::setxattr(root.path("etc/conf.d/only"), "system.posix_acl_access", &acl, flags)
            .unwrap();
        let commit = Commit {
            name: Some("changed:1".parse().unwrap()),
            changes: vec!["CMD [\"/bin/x\"]".to_owned()],
            ..Commit::default()
        };
        // The container stops: its root is mounted nowhere.
        let Root { upper, lower, mount } = root;
        drop(mount);
        let id = scratch
            .store
            .commit(Some(&image), &lower, upper.as_fd(), &ids(), &commit, &Silent)
            .unwrap();
        let export = |lower: &Lower, upper: &OwnedFd, name: &str| {
            let mut tar = Vec::new();
            scratch.store.export(lower, Some(upper.as_fd()), &ids(), &mut tar).unwrap();
            fs::write(scratch.path(name), &tar).unwrap();
        };
        export(&lower, &upper, "one.tar");
        let root = Root::of(&scratch, &image, "c");
        let made = scratch.store.find("changed:1").unwrap();
        assert_eq!((&made.id, made.layers.len()), (&id, 2));
        let cmd = made.config.config().as_ref().unwrap().cmd().clone();
        assert_eq!(cmd.unwrap(), ["/bin/x"]);
        assert_eq!(made.layers[0], image.layers[0]);
        let new = Root::of(&scratch, &made, "d");
        assert_eq!(new.changes(&scratch.store), Vec::<String>::new());
        for name in ["conf/a", "conf/b", "etc/conf.d/only", "big", "owned", "capable", "empty"] {
            let read = |root: &Root| fs::read(root.path(name)).unwrap();
            assert_eq!(read(&new), read(&root), "{name}");
            assert_eq!(owner(new.path(name)), owner(root.path(name)), "{name}");
            let mode = |root: &Root| fs::metadata(root.path(name)).unwrap().mode();
            assert_eq!(mode(&new), mode(&root), "{name}");
        }
        assert!(!new.path("etc/conf.d/a").exists());
        assert!(!new.path("pipe").exists());
        assert!(new.path("etc/passwd").is_dir());
        assert_eq!(owner(new.path("owned")), (host(33), host(65_534)));
        assert_eq!(fs::metadata(new.path("big")).unwrap().nlink(), 2);
        export(&new.lower, &new.upper, "two.tar");
        let listed = |name: &str| {
            let out = Command::new("tar").arg("-tvf").arg(scratch.path(name)).output().unwrap();
            assert!(out.status.success());
            String::from_utf8(out.stdout).unwrap()
        };
        assert_eq!(listed("one.tar"), listed("two.tar"));
        assert!(listed("one.tar").contains("33/65534"), "{}", listed("one.tar"));
        // And the exported tree can be imported.
        let again = scratch.import_path(&scratch.path("one.tar")).unwrap();
        let again = Root::of(&scratch, &again, "e");
        assert_eq!(fs::read(again.path("conf/a")).unwrap(), [b'a'; 500]);
        assert_eq!(
            xattr(again.path("etc/conf.d/only"), "system.posix_acl_access"),
            xattr(root.path("etc/conf.d/only"), "system.posix_acl_access")
        );
    });
}

/// The same tar, the same layer; what a layer hides is hidden.
#[test]
fn root_layers_hide_and_replace_as_in_the_oci_specification() {
    in_own_mounts(|| {
        let scratch = Scratch::new();
        let import = scratch.store.begin().unwrap();
        let layers = [
            Tar::default()
                .dir("d")
                .file("d/a", b"1")
                .file("d/b", b"1")
                .dir("o")
                .file("o/x", b"1")
                .symlink("lib", "usr/lib")
                .dir("usr/lib")
                .file("f", b"1")
                .dir("t")
                .file("t/x", b"1")
                .end(),
            Tar::default()
                .file("d/.wh.a", b"")
                .file("d/c", b"2")
                .file("o/.wh..wh..opq", b"")
                .file("o/y", b"2")
                .file("lib/z", b"2")
                .link("f2", "f")
                .file(".wh..wh.plnk", b"")
                .file("t", b"2")
                .symlink("s", "usr")
                .file("s/lib/in", b"2")
                .end(),
        ];
        let ids: Vec<String> = layers
            .iter()
            .map(|tar| {
                let layer = import.layer(&mut &tar[..], Default::default(), &Silent).unwrap();
                format!("\"{}\"", layer.diff_id)
            })
            .collect();
        let config = format!(
            r#"{{"architecture":"amd64","os":"linux","rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
            ids.join(",")
        );
        let new =
            dormouse_image::NewImage { config: config.as_bytes(), manifest: None, name: None };
        let id = import.image(new).unwrap();
        drop(import);
        let image = scratch.store.find(&id).unwrap();
        let root = Root::of(&scratch, &image, "c");
        let there = |name: &str| root.path(name).symlink_metadata().is_ok();
        assert!(!there("d/a") && there("d/b") && there("d/c"));
        assert!(!there("o/x") && there("o/y"));
        assert!(!there(".wh..wh.plnk") && !there("d/.wh.a") && !there("o/.wh..wh..opq"));
        // A symlink of a lower layer is replaced, one of the same layer is followed.
        assert_eq!(root.read("lib/z"), "2");
        assert!(!fs::symlink_metadata(root.path("lib")).unwrap().is_symlink());
        assert_eq!(root.read("usr/lib/in"), "2");
        assert_eq!(fs::metadata(root.path("f")).unwrap().nlink(), 2);
        assert_eq!(root.read("t"), "2");
    });
}

/// A program with a file capability has it inside of the user namespace, as an ordinary user.
#[test]
fn root_file_capabilities_work_inside() {
    if std::env::var_os("DORMOUSE_PROBE").is_some() {
        let sets = rustix::thread::capabilities(None).unwrap();
        println!(
            "effective {:#x} uid {}",
            sets.effective.bits(),
            rustix::process::getuid().as_raw()
        );
        return;
    }
    in_own_mounts(|| {
        let scratch = Scratch::new();
        let tree = scratch.path("tree");
        fs::create_dir(&tree).unwrap();
        fs::set_permissions(&tree, fs::Permissions::from_mode(0o755)).unwrap();
        let copy = |name: &str| {
            fs::copy(std::env::current_exe().unwrap(), tree.join(name)).unwrap();
            fs::set_permissions(tree.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        };
        copy("capable");
        copy("plain");
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(tree.join("capable"), "security.capability", &NET_RAW, flags).unwrap();
        let image = scratch.import_path(&tree).unwrap();
        let root = Root::of(&scratch, &image, "c");
        let at = scratch.path("at");
        fs::create_dir(&at).unwrap();
        dormouse_kernel::mount::attach(root.mount.as_fd(), rustix::fs::CWD, &at).unwrap();
        let namespace = userns();
        // Not closed on exec: nsenter opens it by its number.
        rustix::io::fcntl_setfd(&namespace, rustix::io::FdFlags::empty()).unwrap();
        let run = |name: &str| {
            let out = Command::new("nsenter")
                .arg(format!("--user=/proc/self/fd/{}", namespace.as_raw_fd()))
                .args(["--setuid=1000", "--setgid=1000"])
                .arg(format!("--root={}", at.display()))
                .arg(format!("/{name}"))
                .args(["--exact", "root_file_capabilities_work_inside", "--nocapture"])
                .env("DORMOUSE_PROBE", "1")
                .output()
                .unwrap();
            String::from_utf8_lossy(&out.stdout).into_owned()
                + &String::from_utf8_lossy(&out.stderr)
        };
        let (capable, plain) = (run("capable"), run("plain"));
        dormouse_kernel::mount::detach(&at).unwrap();
        assert!(capable.contains("effective 0x2000 uid 1000"), "{capable}");
        assert!(plain.contains("effective 0x0 uid 1000"), "{plain}");
    });
}

/// A disk that is too small: refused before it is full, with nothing left and the store as before.
#[test]
fn root_full_disk_leaves_the_store_as_it_was() {
    in_own_mounts(|| {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let disk = dir.path().join("disk");
        fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
        let at = dir.path().join("at");
        fs::create_dir(&at).unwrap();
        let run = |program: &str, args: &[&Path]| {
            let out = Command::new(program).args(args).output().unwrap();
            assert!(out.status.success(), "{program}: {}", String::from_utf8_lossy(&out.stderr));
        };
        run("mkfs.ext4", &[Path::new("-q"), &disk]);
        run("mount", &[Path::new("-o"), Path::new("loop"), &disk, &at]);
        let store = Scratch::open(&at, Metadata::Erofs);
        let small = dir.path().join("small.tar");
        fs::write(&small, Tar::default().file("small", &[1; 1000]).end()).unwrap();
        let kept = store.import(&small, None, &Silent).unwrap();
        let before = support::files(&at.join("lib")).len();
        let free = || rustix::fs::statvfs(&at).unwrap().f_bavail;
        let free_before = free();
        // Many small files, a few large ones, one larger than the disk: 80 MB each.
        let many = (0..4000u32).fold(Tar::default(), |tar, i| {
            tar.file(&format!("f{i}"), &i.to_le_bytes().repeat(5000))
        });
        let few =
            (0..10u8).fold(Tar::default(), |tar, i| tar.file(&format!("f{i}"), &vec![i; 8 << 20]));
        let one = Tar::default().file("f", &vec![3; 80 << 20]);
        for (what, tar) in [("many", many), ("few", few), ("one", one)] {
            let path = dir.path().join("big.tar");
            fs::write(&path, tar.end()).unwrap();
            // Compressed, so that its length does not reveal the size.
            let packed = dir.path().join("big.tar.zst");
            fs::write(&packed, zstd::encode_all(fs::File::open(&path).unwrap(), 1).unwrap())
                .unwrap();
            for path in [&path, &packed] {
                let error = store.import(path, None, &Silent).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Limit, "{what}: {}", chain(&error));
                assert!(chain(&error).contains("no room"), "{what}: {}", chain(&error));
                assert_eq!(support::files(&at.join("lib")).len(), before, "{what}");
                assert!(free() + 1024 > free_before, "{what}: the space is given back");
                assert_eq!(store.list().unwrap().len(), 1);
            }
        }
        assert_eq!(store.find(&kept).unwrap().id, kept);
        drop(store);
        run("umount", &[&at]);
    });
}

/// Two images that share a file share its pages: the object is one inode.
#[test]
fn root_shared_files_are_cached_once() {
    in_own_mounts(|| {
        let scratch = Scratch::new();
        let shared = vec![9; 4 << 20];
        let image = |own: &[u8]| {
            scratch.import(&Tar::default().file("shared", &shared).file("own", own).end()).unwrap()
        };
        let (a, b) = (image(&[1; 100]), image(&[2; 100]));
        let (a, b) = (Root::of(&scratch, &a, "a"), Root::of(&scratch, &b, "b"));
        let objects = support::files(&scratch.path("lib/objects"));
        let shared = objects.iter().find(|o| fs::metadata(o).unwrap().len() == 4 << 20).unwrap();
        let object = fs::File::open(shared).unwrap();
        object.sync_all().unwrap();
        rustix::fs::fadvise(&object, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let cached = || {
            let out =
                Command::new("fincore").args(["-nb", "-o", "RES"]).arg(shared).output().unwrap();
            String::from_utf8(out.stdout).unwrap().trim().parse::<u64>().unwrap()
        };
        assert_eq!(cached(), 0);
        let mut bytes = Vec::new();
        fs::File::open(a.path("shared")).unwrap().read_to_end(&mut bytes).unwrap();
        assert_eq!(cached(), 4 << 20, "read through one image");
        let reads = || -> u64 {
            let text = fs::read_to_string("/proc/thread-self/io").unwrap();
            let line = text.lines().find(|l| l.starts_with("read_bytes")).unwrap();
            line.split(' ').nth(1).unwrap().parse().unwrap()
        };
        let before = reads();
        bytes.clear();
        fs::File::open(b.path("shared")).unwrap().read_to_end(&mut bytes).unwrap();
        assert_eq!(reads(), before, "the other image reads it from memory");
        assert_eq!(cached(), 4 << 20);
    });
}
