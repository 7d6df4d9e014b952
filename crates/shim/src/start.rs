//! `start` and `delete`: what containerd calls as a program, before there is a shim and after one
//! was killed.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::protobuf::{Message, MessageField};
use containerd_shim_protos::{api, types};
use rustix::fs::FlockOperation;
use serde::Deserialize;

use crate::flag::Flags;
use crate::rootfs;
use crate::runtime::Runtime;

/// Sockets of shims.
const SOCKETS: &str = "/run/dormouse-shim";
/// Annotations by which the containers of a pod name it: containerd's own, and that of its CRI.
const GROUPS: [&str; 2] = ["io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id"];
/// The exit status of a container that was not waited for: SIGKILL.
const KILLED: u32 = 128 + 9;

/// Answers with the address of the shim of the container's pod, which is started unless it runs.
pub fn start(flags: &Flags) -> Result<()> {
    ensure!(!flags.id.is_empty() && !flags.namespace.is_empty(), "-namespace and -id are missing");
    let bundle = std::env::current_dir().context("finding the bundle")?;
    let group = group(&bundle)?.unwrap_or_else(|| flags.id.clone());
    let socket = socket_path(flags, &group);
    let dir = Path::new(SOCKETS);
    make_dir(dir).with_context(|| format!("making {}", dir.display()))?;
    // ORDER: two containers of a pod may be started at once: one binds, the other finds it bound.
    let lock = File::options().create(true).truncate(false).write(true).open(dir.join(".lock"))?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).context("locking the sockets")?;
    if let Some(listener) = bind(&socket)? {
        serve(flags, &bundle, listener)?;
    }
    let address = format!("unix://{}", socket.display());
    // containerd reads it when it is started again.
    fs::write(bundle.join("address.new"), &address).context("writing the address")?;
    fs::rename(bundle.join("address.new"), bundle.join("address"))
        .context("writing the address")?;
    let mut out = std::io::stdout();
    out.write_all(address.as_bytes()).and_then(|()| out.flush()).context("writing the address")
}

fn make_dir(dir: &Path) -> std::io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// The pod that a container belongs to, by its annotations.
fn group(bundle: &Path) -> Result<Option<String>> {
    #[derive(Deserialize)]
    struct Config {
        #[serde(default)]
        annotations: Option<BTreeMap<String, String>>,
    }
    let path = bundle.join("config.json");
    let text = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    let config: Config = serde_json::from_slice(&text).context("config.json: annotations")?;
    let annotations = config.annotations.unwrap_or_default();
    Ok(GROUPS.iter().find_map(|name| annotations.get(*name)).cloned())
}

/// One path for each pod of each namespace of each containerd, within the length limit of an
/// address.
fn socket_path(flags: &Flags, group: &str) -> PathBuf {
    let mut hasher = blake3::Hasher::new();
    for part in [&flags.address, &flags.namespace, group] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    Path::new(SOCKETS).join(&hasher.finalize().to_hex()[..32])
}

/// Binds a socket; `None` where a shim listens there already.
fn bind(socket: &Path) -> Result<Option<UnixListener>> {
    let failed = || format!("binding {}", socket.display());
    let listener = match UnixListener::bind(socket) {
        Err(e) if e.kind() == ErrorKind::AddrInUse => {
            if UnixStream::connect(socket).is_ok() {
                return Ok(None);
            }
            // Of a shim that was killed.
            fs::remove_file(socket).with_context(failed)?;
            UnixListener::bind(socket).with_context(failed)?
        }
        other => other.with_context(failed)?,
    };
    fs::set_permissions(socket, Permissions::from_mode(0o600)).with_context(failed)?;
    Ok(Some(listener))
}

/// Starts the shim. Callers may connect from now on: the socket listens already.
fn serve(flags: &Flags, bundle: &Path, listener: UnixListener) -> Result<()> {
    // containerd reads the output of its shims there; without a reader it is discarded.
    let mut log = OpenOptions::new();
    log.write(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    let log = log.open(bundle.join("log")).map_or_else(|_| Stdio::null(), Stdio::from);
    Command::new("/proc/self/exe")
        .arg0("containerd-shim-dormouse-v2")
        .args([
            "-namespace",
            &flags.namespace,
            "-id",
            &flags.id,
            "-address",
            &flags.address,
            "serve",
        ])
        .stdin(OwnedFd::from(listener))
        .stdout(Stdio::null())
        .stderr(log)
        .current_dir("/")
        .process_group(0)
        .spawn()
        .context("starting the shim")?;
    Ok(())
}

/// Removes a container after its shim has exited.
pub fn delete(flags: &Flags) -> Result<()> {
    let bundle = match flags.bundle.as_str() {
        "" => std::env::current_dir().context("finding the bundle")?,
        path => PathBuf::from(path),
    };
    let runtime = Runtime::of(&bundle)?;
    let out = runtime.command(&["delete", "--force", &flags.id]).output();
    let out = out.with_context(|| format!("executing {}", runtime.program.display()))?;
    ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr).trim());
    rootfs::unmount(&bundle.join("rootfs"))?;
    // Another container's shim may still listen there; a socket without a listener is removed.
    if let Ok(address) = fs::read_to_string(bundle.join("address"))
        && let Some(socket) = address.strip_prefix("unix://")
        && UnixStream::connect(socket).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused)
    {
        let _ = fs::remove_file(socket);
    }
    let response = api::DeleteResponse {
        exit_status: KILLED,
        exited_at: MessageField::some(std::time::SystemTime::now().into()),
        ..Default::default()
    };
    let bytes = response.write_to_bytes().context("writing the answer")?;
    std::io::stdout().write_all(&bytes).context("writing the reply")
}

/// Reports the information about the runtime that containerd 2.x requests.
pub fn info() -> Result<()> {
    let version = types::introspection::RuntimeVersion {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..Default::default()
    };
    let info = types::introspection::RuntimeInfo {
        name: "io.containerd.dormouse.v2".to_owned(),
        version: MessageField::some(version),
        ..Default::default()
    };
    let bytes = info.write_to_bytes().context("writing the answer")?;
    std::io::stdout().write_all(&bytes).context("writing the reply")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_of_a_pod_share_a_socket_and_others_do_not() {
        let flags = |namespace: &str| Flags { namespace: namespace.into(), ..Flags::default() };
        let path = |namespace: &str, group: &str| socket_path(&flags(namespace), group);
        assert_eq!(path("k8s.io", "pod"), path("k8s.io", "pod"));
        assert_ne!(path("k8s.io", "pod"), path("moby", "pod"));
        assert_ne!(path("a", "bc"), path("ab", "c"));
        assert!(path("k8s.io", "pod").as_os_str().len() < 108);
    }

    #[test]
    fn pod_is_named_by_an_annotation() {
        let dir = tempfile::tempdir().expect("a directory");
        let pod_of = |text: &str| {
            fs::write(dir.path().join("config.json"), text).expect("written");
            group(dir.path()).expect("good")
        };
        assert_eq!(pod_of(r#"{"ociVersion": "1.0.2"}"#), None);
        assert_eq!(pod_of(r#"{"annotations": {"a": "b"}}"#), None);
        let text = r#"{"annotations": {"io.kubernetes.cri.sandbox-id": "pod"}}"#;
        assert_eq!(pod_of(text), Some("pod".to_owned()));
    }

    #[test]
    fn socket_without_a_listener_is_taken_over() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("socket");
        let first = bind(&path).expect("bound").expect("new");
        assert!(bind(&path).expect("looked").is_none());
        drop(first);
        assert!(bind(&path).expect("bound").is_some());
    }
}
