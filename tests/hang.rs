//! A file system (fuse(4)) that stops answering when it is asked to open its file: a process in that call is not
//! ended by SIGKILL. A network file system whose server is gone behaves so.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use dormouse_testkit::Host;
use rustix::mount::MountFlags;

/// Requests (linux/fuse.h).
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const RELEASEDIR: u32 = 29;
const BATCH_FORGET: u32 = 42;

/// Numbers of the root and of its only file.
const ROOT: u64 = 1;
const FILE: u64 = 2;
const TEXT: &[u8] = b"text";

/// ENOENT and ENOSYS.
const NO_ENTRY: i32 = rustix::io::Errno::NOENT.raw_os_error();
const NO_CALL: i32 = rustix::io::Errno::NOSYS.raw_os_error();

/// How long the kernel may keep names and attributes, in seconds.
const VALID_S: u64 = 100_000;

/// The file system, at a directory of a host. Its end answers every request, with an error.
pub(crate) struct Hanging {
    /// The directory. The file in it is `file`.
    pub(crate) place: PathBuf,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    hangs: AtomicBool,
    hung: AtomicU32,
    /// The device, and the unanswered requests.
    device: Mutex<Option<(File, Vec<u64>)>>,
}

impl Hanging {
    /// Mounts it in the mount namespace of a host.
    pub(crate) fn mount(host: &Host) -> Self {
        let place = host.dir().join("hanging");
        fs::create_dir_all(&place).expect("a scratch directory");
        let shared = Arc::new(Shared::default());
        let (at, of_server) = (place.clone(), Arc::clone(&shared));
        let mounted = host.in_mounts(move || mount(&at));
        let device = mounted.join().expect("no panic");
        let again = device.try_clone().expect("a descriptor");
        *shared.device.lock().expect("no panic") = Some((again, Vec::new()));
        std::thread::spawn(move || serve(device, &of_server));
        Self { place, shared }
    }

    /// Lets the next requests to open the file wait, or answers them all.
    pub(crate) fn set_hanging(&self, hangs: bool) {
        self.shared.hangs.store(hangs, Ordering::SeqCst);
        if let Some((device, waiting)) = &mut *self.shared.device.lock().expect("no panic") {
            let waiting = if hangs { Vec::new() } else { std::mem::take(waiting) };
            waiting.into_iter().for_each(|request| answer(device, request, Ok(opened())));
        }
    }

    /// The number of requests that were left without an answer.
    pub(crate) fn hung(&self) -> u32 {
        self.shared.hung.load(Ordering::SeqCst)
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        self.set_hanging(false);
    }
}

fn mount(place: &Path) -> File {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").expect("fuse");
    let fd = device.as_raw_fd();
    let options =
        format!("fd={fd},rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions");
    let options = std::ffi::CString::new(options).expect("no zero byte");
    rustix::mount::mount("hanging", place, "fuse", MountFlags::empty(), &*options)
        .expect("root may mount");
    device
}

fn serve(mut device: File, shared: &Shared) {
    let mut buffer = vec![0; 1 << 20];
    // ENODEV after the unmount.
    while let Ok(length) = device.read(&mut buffer) {
        let request = &buffer[..length];
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().expect("4"));
        let long = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().expect("8"));
        let (kind, unique, node) = (word(4), long(8), long(16));
        let body = &request[40..];
        let reply = match kind {
            INIT => Ok(welcomed()),
            LOOKUP if node == ROOT && body == b"file\0" => Ok(found()),
            LOOKUP => Err(NO_ENTRY),
            GETATTR => Ok([&VALID_S.to_ne_bytes()[..], &[0; 8], &attributes(node)].concat()),
            OPEN if shared.hangs.load(Ordering::SeqCst) => {
                if let Some((_, waiting)) = &mut *shared.device.lock().expect("no panic") {
                    waiting.push(unique);
                }
                shared.hung.fetch_add(1, Ordering::SeqCst);
                continue;
            }
            OPEN | OPENDIR => Ok(opened()),
            READ => Ok(TEXT[long(48).min(TEXT.len() as u64) as usize..].to_vec()),
            STATFS => Ok(vec![0; 80]),
            RELEASE | RELEASEDIR => Ok(Vec::new()),
            FORGET | BATCH_FORGET => continue,
            _ => Err(NO_CALL),
        };
        answer(&mut device, unique, reply);
    }
    *shared.device.lock().expect("no panic") = None;
}

/// `struct fuse_out_header` and the reply.
fn answer(device: &mut File, unique: u64, reply: Result<Vec<u8>, i32>) {
    let (error, body) = match reply {
        Ok(body) => (0, body),
        Err(number) => (-number, Vec::new()),
    };
    let length = (16 + body.len()) as u32;
    let head = [&length.to_ne_bytes()[..], &error.to_ne_bytes(), &unique.to_ne_bytes()].concat();
    let _ = device.write(&[head, body].concat()); // its asker may have been interrupted
}

/// `struct fuse_init_out`.
fn welcomed() -> Vec<u8> {
    let mut all = vec![0; 64];
    let mut put = |at: usize, number: u32| all[at..at + 4].copy_from_slice(&number.to_ne_bytes());
    put(0, 7); // the version
    put(4, 42);
    put(12, 1 << 30); // there are more flags
    put(20, 128 << 10); // the largest write
    put(32, 1 << 8); // FUSE_ALLOW_IDMAP
    all
}

/// `struct fuse_entry_out`.
fn found() -> Vec<u8> {
    let numbers = [FILE, 0, VALID_S, VALID_S, 0];
    let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
    [numbers, attributes(FILE)].concat()
}

/// `struct fuse_open_out`.
fn opened() -> Vec<u8> {
    vec![0; 16]
}

/// `struct fuse_attr`.
fn attributes(node: u64) -> Vec<u8> {
    let size = if node == FILE { TEXT.len() as u64 } else { 0 };
    let mut all: Vec<u8> = [node, size, 1, 1, 1, 1].iter().flat_map(|n| n.to_ne_bytes()).collect();
    let mode: u32 = if node == FILE { 0o100_644 } else { 0o040_755 };
    let words = [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0];
    all.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
    all
}
