//! Page cache of images: it is charged to a cgroup of its own, and to no container.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use dormouse_testkit::{Host, image, soon, wait_until};
use serde_json::Value;

use crate::contracts::id;
use crate::guarantees::{all_bytes, small_host};

/// The size of a file of an image, in megabytes.
const FILE_MB: u64 = 48;
/// What a container may be charged for, in megabytes: its processes, and names of files.
const OWN_MB: u64 = 12;

/// A file of a memory cgroup below the one of all containers, by its name in v1 or in v2; `None` without the cgroup.
fn read(host: &Host, below: &str, v1: &str, v2: &str) -> Option<String> {
    let places = host.cgroups();
    let mut files = places.iter().flat_map(|dir| [v1, v2].map(|file| dir.join(below).join(file)));
    files.find_map(|file| fs::read_to_string(file).ok())
}

/// All memory that is charged to a cgroup, in megabytes.
#[track_caller]
fn charged_mb(host: &Host, below: &str) -> u64 {
    let text = read(host, below, "memory.usage_in_bytes", "memory.current").expect("a cgroup");
    text.trim().parse::<u64>().expect("a number") >> 20
}

/// Imports an image with a large file, of data that is neither zero nor repeated.
#[track_caller]
fn import_large(host: &Host, name: &str, seed: u64) {
    let tree = host.root().join(format!("tree-{name}"));
    fs::create_dir_all(tree.join("bin")).expect("writable");
    fs::copy("/bin/busybox", tree.join("bin/busybox")).expect("a static busybox");
    fs::set_permissions(tree.join("bin/busybox"), PermissionsExt::from_mode(0o755)).expect("done");
    let mut number = seed;
    let words = (0..FILE_MB << 17).flat_map(|_| {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        number.to_ne_bytes()
    });
    fs::write(tree.join("large"), words.collect::<Vec<u8>>()).expect("written");
    host.import(&tree, name);
    fs::remove_dir_all(&tree).expect("removed");
}

fn start(host: &Host, name: &str, of: &str) {
    host.dm(&["run", "-d", "--name", name, of, "/bin/busybox", "sleep", "100000"]).ok();
}

#[track_caller]
fn read_large(host: &Host, name: &str) {
    host.dm(&["exec", name, "/bin/busybox", "sh", "-c", "/bin/busybox cat /large >/dev/null"]).ok();
}

fn info(host: &Host) -> Value {
    serde_json::from_str(&host.dm(&["info", "--json"]).ok()).expect("JSON")
}

#[test]
fn vm_files_of_an_image_are_charged_to_no_container() {
    let host = Host::new();
    import_large(&host, "large", 1);
    assert_eq!(read(&host, "images", "cgroup.procs", "cgroup.procs").as_deref(), Some(""));
    let cached = charged_mb(&host, "images");
    assert!(cached >= FILE_MB, "{cached} MB");
    for name in ["a", "b"] {
        start(&host, name, "large");
        read_large(&host, name);
        let own = charged_mb(&host, &id(&host, name));
        assert!(own < OWN_MB, "{name}: {own} MB");
    }
    let info = info(&host);
    let shown = info["image_memory_bytes"].as_u64().expect("bytes") >> 20;
    assert!(shown >= FILE_MB, "{info}");
    assert!(info["image_memory_low_bytes"].as_u64() > Some(0), "{info}");
    let stats = host.dm(&["stats", "--no-stream"]).ok();
    assert!(stats.contains("images have"), "{stats}");
    // The end of a reader changes nothing.
    host.dm(&["rm", "--force", "a"]).ok();
    let cached = charged_mb(&host, "images");
    assert!(cached >= FILE_MB, "{cached} MB");
    start(&host, "c", "large");
    read_large(&host, "c");
    let own = charged_mb(&host, &id(&host, "c"));
    assert!(own < OWN_MB, "c: {own} MB");
}

#[test]
fn vm_cgroup_of_images_ends_with_those_of_containers() {
    let host = Host::with_busybox();
    let exists = || read(&host, "images", "cgroup.procs", "cgroup.procs").is_some();
    assert!(exists());
    host.dm(&["run", "--rm", "busybox", "true"]).ok();
    assert!(wait_until(soon(), || !exists()), "{:?}", host.cgroups());
    // The next import makes it again.
    host.import(&image::busybox(), "again");
    assert!(exists());
}

#[test]
fn vm_import_of_a_killed_command_leaves_no_process_in_the_cgroup_of_images() {
    let host = Host::with_busybox();
    let fifo = host.root().join("stream.tar");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .expect("a fifo");
    let path = fifo.to_str().expect("a path").to_owned();
    // It waits in open(2) for a writer.
    let mut import =
        host.dormouse(&["import", "--name", "slow", &path]).spawn().expect("a program");
    let procs = || read(&host, "images", "cgroup.procs", "cgroup.procs").unwrap_or_default();
    let is_inside = || procs().lines().any(|pid| pid == import.id().to_string());
    assert!(wait_until(soon(), is_inside), "{:?}", procs());
    // While it runs, neither the end of the last container nor a start is disturbed.
    host.dm(&["run", "--rm", "busybox", "true"]).ok();
    host.dm(&["run", "--rm", "busybox", "true"]).ok();
    import.kill().expect("a process");
    import.wait().expect("a status");
    assert_eq!(procs(), "");
    host.import(&image::busybox(), "again");
    host.dm(&["run", "--rm", "again", "true"]).ok();
}

/// Beside a guarantee, images are in the same room as containers.
#[test]
fn vm_images_take_no_guaranteed_memory() {
    let host = small_host();
    host.dm(&["run", "-d", "--name", "x", "--memory-min", "150m", "busybox", "sleep", "100000"])
        .ok();
    for (name, seed) in [("one", 2), ("two", 3), ("three", 4)] {
        import_large(&host, name, seed);
    }
    let number = |below: &str, v1: &str, v2: &str| {
        let text = read(&host, below, v1, v2).expect("a cgroup");
        text.trim().parse::<u64>().unwrap_or(u64::MAX) >> 20
    };
    let is_v1 = read(&host, "images", "memory.limit_in_bytes", "").is_some();
    if is_v1 {
        // The least limit, of which what is used is no room of the others.
        let (limit, used) =
            (number("images", "memory.limit_in_bytes", ""), charged_mb(&host, "images"));
        assert_eq!(limit, 128);
        assert!(used <= 128, "{used} MB");
        host.dm(&["run", "-d", "--name", "y", "--memory-min", "10m", "busybox", "sleep", "9999"])
            .ok();
        host.dm(&["run", "-d", "--name", "z", "busybox", "sleep", "9999"]).ok();
        let ceiling = number(&id(&host, "z"), "memory.limit_in_bytes", "");
        assert!((240 - 128..=240 - FILE_MB).contains(&ceiling), "{ceiling} MB beside {used} MB");
    } else {
        let [images, all] = ["images", ""].map(|below| number(below, "", "memory.low"));
        assert_eq!((images, all), (12, 12), "a 32nd of the room");
    }
    host.dm(&["rm", "--force", "--all"]).ok();
}

#[test]
fn memory_of_images_is_a_setting() {
    let host = Host::with_busybox();
    let config: PathBuf = host.root().join("etc/config.toml");
    let text = fs::read_to_string(&config).expect("the settings");
    let set = |value: &str| {
        let section =
            format!("[contract]\nhost-memory-reserve = \"0\"\nimages-memory = \"{value}\"\n");
        fs::write(&config, format!("{text}{section}")).expect("written");
    };
    set("10%");
    let low = info(&host)["image_memory_low_bytes"].as_u64().expect("bytes");
    assert!(low.abs_diff(all_bytes() / 10) <= 1, "{low}");
    set("much");
    let out = host.dm(&["run", "--rm", "--memory-min", "10m", "busybox", "true"]);
    assert!(out.status != 0 && out.stderr.contains("images-memory 'much'"), "{out}");
}
