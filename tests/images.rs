//! Images: imported in every way, exported unchanged, and pulled from a registry that fails.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use dormouse_testkit::{Host, Registry, image};

/// Lists a tree as a container sees it: type, mode, owner, links, size, name, target, content.
const LIST: &str = "cd /tree && find . | sort | while read -r f; do \
     stat -c '%F %a %u:%g %h %s %t:%T %N' \"$f\"; \
     [ -f \"$f\" ] && tail -c 1000000 \"$f\" | sha256sum; done; :";

/// A directory with a file of every kind, and busybox to list it.
fn tree(host: &Host) -> PathBuf {
    let dir = host.dir().join("everything");
    let script = format!(
        "cp -a {} {dir} && mkdir {dir}/tree && cd {dir}/tree && \
         echo text >file && chmod 4751 file && ln file hard && ln -s file soft && \
         ln -s /nowhere dangling && mkfifo fifo && mknod node c 1 3 && chmod 666 node && \
         truncate -s 5G sparse && printf end >>sparse && mkdir -m 1777 sticky && : >empty && \
         chown 1000:2000 empty && chown -h 7:8 soft && echo odd >'a name with \\ and spaces' && \
         touch -d @1234567890 file && mkdir -p deep/er/est && echo x >deep/er/est/file",
        image::busybox().display(),
        dir = dir.display()
    );
    host.sh(&script).ok();
    dir
}

#[track_caller]
fn list(host: &Host, name: &str) -> String {
    let words = ["run", "--rm", "--net", "none", name, "sh", "-c", LIST];
    host.dm_within(Duration::from_secs(120), &words).ok()
}

#[test]
fn vm_every_import_yields_the_same_tree() {
    let host = Host::new();
    let dir = tree(&host);
    // The 5 GB hole is hashed in seconds, but under emulation in minutes.
    if dormouse_testkit::slowness() > 1 {
        fs::remove_file(dir.join("tree/sparse")).expect("the file exists");
    }
    host.import(&dir, "dir");
    let expected = list(&host, "dir");
    for part in ["4751 0:0 2", "1000:2000", "fifo", "-> '/nowhere'", "character special"] {
        assert!(expected.contains(part), "'{part}' is missing:\n{expected}");
    }
    let tar = host.dir().join("x.tar");
    host.sh(&format!("tar --sparse -C {} -cf {} .", dir.display(), tar.display())).ok();
    host.import(&tar, "tar");
    assert_eq!(list(&host, "tar"), expected);
    let compressed = host.dir().join("x.tar.gz");
    host.sh(&format!("gzip -1 <{} >{}", tar.display(), compressed.display())).ok();
    host.import(&compressed, "gz");
    assert_eq!(list(&host, "gz"), expected);
    let archive = host.dir().join("saved.tar");
    let archive = archive.to_str().expect("UTF-8");
    let minutes = Duration::from_secs(180);
    host.dm_within(minutes, &["save", "-o", archive, "dir"]).ok();
    host.dm(&["rmi", "dir", "tar", "gz"]).ok();
    host.import(Path::new(archive), "archive");
    assert_eq!(list(&host, "archive"), expected);
}

#[test]
fn vm_layer_whiteouts_hide_lower_files() {
    // An OCI layout of two hand-made layers: the second replaces, deletes and hides.
    let host = Host::new();
    let script = format!(
        "set -e; cd {dir}; mkdir -p one two layout/blobs/sha256; cp -a {busybox}/. one
         mkdir -p one/tree/gone one/tree/opaque one/tree/kept
         echo old >one/tree/changed; echo x >one/tree/gone/file; echo x >one/tree/opaque/old
         echo x >one/tree/deleted; echo x >one/tree/kept/file; echo old >one/tree/becomes
         mkdir -p two/tree/opaque two/tree/becomes
         echo new >two/tree/changed; : >two/tree/.wh.gone; : >two/tree/.wh.deleted
         : >two/tree/opaque/.wh..wh..opq; echo new >two/tree/opaque/new; echo in >two/tree/becomes/file
         blob() {{ s=$(sha256sum <$1 | cut -d' ' -f1); mv $1 layout/blobs/sha256/$s; echo $s; }}
         tar -C one -cf one.tar .; tar -C two -cf two.tar .
         n1=$(stat -c %s one.tar); n2=$(stat -c %s two.tar); d1=$(blob one.tar); d2=$(blob two.tar)
         echo '{{\"architecture\":\"amd64\",\"os\":\"linux\",\"config\":{{\"Cmd\":[\"cat\",\"/tree/changed\"],\
         \"Env\":[\"A=image\"],\"WorkingDir\":\"/tree\",\"User\":\"1000\"}},\
         \"rootfs\":{{\"type\":\"layers\",\"diff_ids\":[\"sha256:'$d1'\",\"sha256:'$d2'\"]}}}}' >config
         nc=$(stat -c %s config); c=$(blob config)
         layer='\"mediaType\":\"application/vnd.oci.image.layer.v1.tar\",\"digest\":\"sha256:'
         echo '{{\"schemaVersion\":2,\"config\":{{\"mediaType\":\"application/vnd.oci.image.config.v1+json\",\
         \"digest\":\"sha256:'$c'\",\"size\":'$nc'}},\"layers\":[{{'$layer$d1'\",\"size\":'$n1'}},\
         {{'$layer$d2'\",\"size\":'$n2'}}]}}' >manifest
         nm=$(stat -c %s manifest); m=$(blob manifest)
         echo '{{\"schemaVersion\":2,\"manifests\":[{{\"mediaType\":\"application/vnd.oci.image.manifest.v1+json\",\
         \"digest\":\"sha256:'$m'\",\"size\":'$nm'}}]}}' >layout/index.json
         echo '{{\"imageLayoutVersion\":\"1.0.0\"}}' >layout/oci-layout",
        dir = host.dir().display(),
        busybox = image::busybox().display()
    );
    host.sh(&script).ok();
    host.import(&host.dir().join("layout"), "layers");
    let run =
        |words: &[&str]| host.dm(&[&["run", "--rm", "--net", "none", "layers"], words].concat());
    assert_eq!(run(&[]).ok(), "new");
    let shown = run(&["sh", "-c", "id -u; echo $A; pwd; find . -type f | sort; cat becomes/file"]);
    let expected = "1000\nimage\n/tree\n./becomes/file\n./changed\n./kept/file\n./opaque/new\nin";
    assert_eq!(shown.ok(), expected);
    let history = host.dm(&["history", "layers"]);
    assert_eq!(history.status, 0, "{history}");
}

#[test]
fn image_commands_tag_commit_diff_export_and_remove() {
    let host = Host::with_busybox();
    host.dm(&["tag", "busybox", "other:1"]).ok();
    let list = host.dm(&["images", "--json"]).ok();
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    let text = list.to_string();
    assert!(text.contains("busybox:latest") && text.contains("other:1"), "{text}");
    let change = "echo changed >/etc/motd; rm /www/index.html; mkdir /made; chown 5:6 /made";
    host.dm(&["run", "--name", "a", "--net", "none", "busybox", "sh", "-c", change]).ok();
    let diff = host.dm(&["diff", "a"]).ok();
    for line in ["A /etc/motd", "D /www/index.html", "A /made"] {
        assert!(diff.lines().any(|l| l == line), "{line}:\n{diff}");
    }
    host.dm(&["commit", "a", "committed"]).ok();
    let script = "cat /etc/motd; ls /www | wc -l; stat -c %u:%g /made";
    let words = ["run", "--rm", "--net", "none", "committed", "sh", "-c", script];
    assert_eq!(host.dm(&words).ok(), "changed\n0\n5:6");
    let tar = host.dir().join("export.tar");
    host.dm(&["export", "-o", tar.to_str().expect("UTF-8"), "a"]).ok();
    let names = host.sh(&format!("tar -tf {}", tar.display())).ok();
    assert!(names.contains("made/") && !names.contains("www/index.html"), "{names}");
    // An image in use by a container is not removed.
    assert_ne!(host.dm(&["rmi", "busybox", "other:1"]).status, 0);
    host.dm(&["rm", "a"]).ok();
    host.dm(&["rmi", "committed"]).ok();
    let _ = host.dm(&["rmi", "busybox"]); // the attempt above may have removed this name
    let _ = host.dm(&["rmi", "other:1"]);
    host.dm(&["prune", "--all"]).ok();
    assert_eq!(host.dm(&["images", "--json"]).ok().trim(), "[]");
    let objects = host.root().join("lib/images/objects");
    let left = host.sh(&format!("find {} -type f | wc -l", objects.display())).ok();
    assert_eq!(left, "0", "objects of no image are left");
}

/// A directory with busybox and a file of `mib` MiB that does not compress.
fn big_tree(host: &Host, name: &str, mib: u32) -> PathBuf {
    let dir = host.dir().join(name);
    let script = format!(
        "cp -a {} {dir} && head -c {mib}M /dev/urandom >{dir}/random",
        image::busybox().display(),
        dir = dir.display()
    );
    host.sh(&script).ok();
    dir
}

#[test]
fn pushed_image_is_pulled_and_run() {
    let host = Host::new();
    let registry = Registry::start(&host);
    let name = registry.name("demo/box:1");
    host.import(&image::busybox(), &name);
    let id = host.inspect(&name)["id"].to_string();
    host.dm(&["push", &name]).ok();
    host.dm(&["rmi", &name]).ok();
    host.dm(&["prune", "--all"]).ok();
    assert_eq!(host.dm(&["images", "--json"]).ok().trim(), "[]");
    host.dm(&["pull", &name]).ok();
    assert_eq!(host.inspect(&name)["id"].to_string(), id, "another image was pulled");
    assert_eq!(host.dm(&["run", "--rm", "--net", "none", &name, "echo", "here"]).ok(), "here");
    // A missing image is reported in one line.
    let line = host.dm(&["pull", &registry.name("demo/none:1")]).fails();
    assert!(line.contains("demo/none"), "{line}");
    host.dm(&["pull", "127.0.0.1:1/demo/box"]).fails();
    // A missing image is pulled by run.
    host.dm(&["rmi", &name]).ok();
    assert_eq!(host.dm(&["run", "--rm", "--net", "none", &name, "echo", "again"]).ok(), "again");
    drop(registry);
}

/// A proxy between the program and its registry that damages answers.
struct Meddler {
    /// Bytes that the registry has sent.
    sent: Arc<AtomicU64>,
    /// Whether the damage is done.
    done: Arc<AtomicBool>,
}

#[derive(Clone, Copy)]
enum Mischief {
    /// Cuts one connection after so many bytes.
    Cut(u64),
    /// Flips one bit of the byte at this place of every connection.
    Flip(u64),
}

const MEDDLER: &str = "127.0.0.1:5001";

impl Meddler {
    fn start(host: &Host, mischief: Mischief) -> Self {
        let sent = Arc::new(AtomicU64::new(0));
        let done = Arc::new(AtomicBool::new(false));
        let this = Self { sent: Arc::clone(&sent), done: Arc::clone(&done) };
        let (ready, is_ready) = std::sync::mpsc::channel();
        host.in_network(move || {
            let listener = TcpListener::bind(MEDDLER).expect("the port is free");
            ready.send(()).expect("the test waits");
            // A new thread starts in the network namespace of its creator.
            for client in listener.incoming().flatten() {
                let server = TcpStream::connect(Registry::ADDRESS).expect("the registry is up");
                let (sent, done) = (Arc::clone(&sent), Arc::clone(&done));
                pass(&client, &server, |_| true);
                let mut seen = 0;
                pass(&server, &client, move |bytes| {
                    let start = seen;
                    seen += bytes.len() as u64;
                    sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                    match mischief {
                        // The first swap returns false, which cuts the connection.
                        Mischief::Cut(at) if seen > at => done.swap(true, Ordering::Relaxed),
                        Mischief::Flip(at) if (start..seen).contains(&at) => {
                            bytes[(at - start) as usize] ^= 0x10;
                            done.store(true, Ordering::Relaxed);
                            true
                        }
                        _ => true,
                    }
                });
            }
        });
        is_ready.recv().expect("the listener is up");
        this
    }
}

/// Copies one direction of a connection on a thread of its own, until end of file or until `keep`
/// returns false.
fn pass(
    from: &TcpStream,
    to: &TcpStream,
    mut keep: impl FnMut(&mut [u8]) -> bool + Send + 'static,
) {
    let mut from = from.try_clone().expect("a socket can be duplicated");
    let mut to = to.try_clone().expect("a socket can be duplicated");
    std::thread::spawn(move || {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if !keep(&mut buffer[..count]) || to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        // Ignored: the other side may have closed first.
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}

#[test]
fn interrupted_layer_download_resumes() {
    let host = Host::new();
    let registry = Registry::start(&host);
    let name = registry.name("demo/big:1");
    host.import(&big_tree(&host, "big", 24), &name);
    host.dm_within(Duration::from_secs(120), &["push", &name]).ok();
    host.dm(&["rmi", &name]).ok();
    host.dm(&["prune", "--all"]).ok();
    let meddler = Meddler::start(&host, Mischief::Cut(12 << 20));
    let other = format!("{MEDDLER}/demo/big:1");
    host.dm_within(Duration::from_secs(120), &["pull", &other]).ok();
    assert!(meddler.done.load(Ordering::Relaxed), "nothing was cut");
    let sent = meddler.sent.load(Ordering::Relaxed);
    assert!(sent < 30 << 20, "{sent} bytes sent: the layer was fetched again from its start");
    let words = ["run", "--rm", "--net", "none", &other, "sh", "-c", "sha256sum </random"];
    let inside = host.dm(&words).ok();
    assert_eq!(inside, host.sh(&format!("sha256sum <{}/big/random", host.dir().display())).ok());
}

#[test]
fn wrong_digest_is_refused_and_leaves_nothing() {
    let host = Host::new();
    let registry = Registry::start(&host);
    let name = registry.name("demo/big:1");
    host.import(&big_tree(&host, "big", 4), &name);
    host.dm_within(Duration::from_secs(120), &["push", &name]).ok();
    host.dm(&["rmi", &name]).ok();
    host.dm(&["prune", "--all"]).ok();
    let meddler = Meddler::start(&host, Mischief::Flip(3 << 20));
    let other = format!("{MEDDLER}/demo/big:1");
    let out = host.dm_within(Duration::from_secs(120), &["pull", &other]);
    assert!(meddler.done.load(Ordering::Relaxed), "nothing was changed");
    let line = out.fails();
    assert!(
        line.contains("digest") || line.contains("corrupt") || line.contains("sha256"),
        "{line}"
    );
    assert_eq!(host.dm(&["images", "--json"]).ok().trim(), "[]");
    host.dm(&["prune", "--all"]).ok();
    let used = host.sh(&format!("du -sm {}/lib/images", host.root().display())).ok();
    let used: u32 = used.split_whitespace().next().and_then(|n| n.parse().ok()).expect("a number");
    assert!(used < 3, "{used} MB are left");
}

#[test]
fn big_second_image_costs_its_difference() {
    let host = Host::new();
    let used = || -> u64 {
        let out = host.sh(&format!("du -sk {}/lib/images", host.root().display())).ok();
        out.split_whitespace().next().and_then(|n| n.parse().ok()).expect("a number")
    };
    host.import(&image::software(), "one");
    let first = used();
    let more = host.dir().join("more.tar");
    let script = format!(
        "cp {} {more} && mkdir -p {dir}/srv && echo one more >{dir}/srv/file && \
         tar -C {dir} -rf {more} srv/file",
        image::software().display(),
        more = more.display(),
        dir = host.dir().display()
    );
    host.sh(&script).ok();
    host.import(&more, "two");
    let second = used() - first;
    assert!(second < first / 50, "{first} kB, then {second} kB for one more file");
    // The same file of both images shares page cache.
    for name in ["one", "two"] {
        host.dm(&["run", "-d", "--name", name, name, "sleep", "100000"]).ok();
    }
    let inode = |name: &str| {
        let pid = host.inspect(name)["pid"].to_string();
        host.sh(&format!("awk '/libc.so/ {{print $4, $5; exit}}' /proc/{pid}/maps")).ok()
    };
    assert!(!inode("one").is_empty());
    let cached = |name: &str| {
        let pid = host.inspect(name)["pid"].to_string();
        let script = format!("awk '/^Shared_Clean/ {{s += $2}} END {{print s}}' /proc/{pid}/smaps");
        host.sh(&script).ok().trim().parse::<u64>().expect("a number")
    };
    assert!(cached("one") > 500 && cached("two") > 500, "pages of files are shared");
}

/// `load` takes the archives of `save` and of docker, from a file and from standard input, and a name in
/// its short and its full form is the same image.
#[test]
fn archives_are_loaded_and_short_names_find_their_images() {
    let host = Host::with_busybox();
    let (oci, docker) = (host.dir().join("oci.tar"), host.dir().join("docker.tar"));
    let (oci_text, docker_text) = (oci.display().to_string(), docker.display().to_string());
    host.dm(&["tag", "busybox", "docker.io/library/x:1"]).ok();
    host.dm(&["save", "-q", "-o", &oci_text, "docker.io/library/x:1"]).ok();
    let id = host.inspect("busybox")["id"].as_str().expect("an id").to_owned();
    // The same image as `docker save` writes it, with two names.
    let script = format!(
        "mkdir {dir} && cd {dir} && tar -xf {oci_text} && \
         blob() {{ printf 'blobs/sha256/%s' \"${{1#sha256:}}\"; }} && \
         set -- $(grep -rl '\"rootfs\"' blobs) && config=$1 && layer= && \
         for f in blobs/sha256/*; do case $(head -c 1 $f) in '{{') ;; *) layer=$f;; esac; done && \
         mkdir ../d && cp $config ../d/config.json && \
         {{ zstd -dc $layer 2>/dev/null || gzip -dc $layer 2>/dev/null || cat $layer; }} > ../d/layer.tar && \
         cd ../d && \
         printf '[{{\"Config\":\"config.json\",\"RepoTags\":[\"y:1\",\"localhost/z:2\"],' > manifest.json && \
         printf '\"Layers\":[\"layer.tar\"]}}]' >> manifest.json && \
         tar -cf {docker_text} manifest.json config.json layer.tar",
        dir = host.dir().join("o").display()
    );
    host.sh(&script).ok();
    host.dm(&["rmi", "-f", "busybox"]).ok();
    assert_eq!(host.dm(&["images", "-q"]).ok(), "");
    assert_eq!(
        host.dm(&["load", "-q", "-i", &oci_text]).ok(),
        "Loaded image: docker.io/library/x:1"
    );
    let run = |name: &str| host.dm(&["run", "--rm", "--net", "none", name, "echo", "runs"]);
    for name in ["x:1", "library/x:1", "docker.io/x:1", "docker.io/library/x:1"] {
        assert_eq!(run(name).ok(), "runs", "{name}");
        assert_eq!(host.inspect(name)["id"], id, "{name}");
    }
    host.dm(&["run", "--pull", "never", "quay.io/library/x:1", "true"]).err(125);
    let bytes = fs::read(&docker).expect("written");
    let loaded = host.dm_with_input(&bytes, &["load"]).ok();
    assert_eq!(
        loaded,
        "Loaded image: docker.io/library/x:1\nLoaded image: localhost/z:2\nLoaded image: y:1"
    );
    for name in ["y:1", "docker.io/library/y:1", "z:2", "localhost/z:2"] {
        assert_eq!(run(name).ok(), "runs", "{name}");
    }
    // A short name removes the name that it stands for, and not the image.
    assert_eq!(host.dm(&["rmi", "x:1"]).ok(), "untagged docker.io/library/x:1");
    assert_eq!(run("y:1").ok(), "runs");
    // Neither a root file system nor garbage is an archive of images.
    let root = host.dir().join("root.tar").display().to_string();
    host.sh(&format!("tar -C {} -cf {root} etc", image::busybox().display())).ok();
    for bad in [&root, "/etc/passwd", "/nowhere"] {
        let line = host.dm(&["load", "-i", bad]).err(125);
        assert!(line.contains(bad), "{line}");
    }
    let line = host.dm_with_input(b"garbage", &["load"]).err(125);
    assert!(line.contains("standard input"), "{line}");
}
