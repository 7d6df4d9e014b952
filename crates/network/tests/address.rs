//! Address networking, attacked: each hole that a program closes is shown to be closed with it and
//! open without it. Everything happens in a network namespace that plays the host, with a scratch
//! parent cgroup; packets never leave it.

mod agent;

use std::fs::{self, File};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use agent::Agent;
use dormouse_kernel::call::{CloneFlags, unshare};
use dormouse_model::{ContainerId, Name, Publish};
use dormouse_network::{Domain, Error, Network, Settings};
use rustix::thread::LinkNameSpaceType;
use tempfile::TempDir;

/// Not a test by itself: the other end of [`Agent`].
#[test]
fn agent_process() {
    agent::run();
}

/// A scratch host: a network namespace, directories, a parent cgroup, the network on them.
struct Host {
    network: Network,
    parent: PathBuf,
    dir: TempDir,
    netns: File,
    next: u64,
}

/// A container with a process in it.
struct Container {
    id: ContainerId,
    cgroup: PathBuf,
    addresses: Vec<IpAddr>,
    agent: Agent,
}

impl Container {
    fn v4(&self) -> IpAddr {
        self.addresses[0]
    }

    fn v6(&self) -> String {
        format!("[{}]", self.addresses[1])
    }
}

fn unified() -> PathBuf {
    let v2 = Path::new("/sys/fs/cgroup/unified");
    if v2.exists() { v2.into() } else { "/sys/fs/cgroup".into() }
}

fn sh(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

impl Host {
    /// The thread that calls becomes the host; threads and processes it starts are on it, too.
    fn new(without: &[&str]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        unshare(CloneFlags::NEWNET).unwrap();
        sh("ip link set lo up");
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("dormouse-test-{}-{number}", std::process::id());
        let dir = TempDir::new().unwrap();
        let settings = Settings {
            without: without.iter().map(|w| (*w).to_owned()).collect(),
            ..Settings::default()
        };
        let (lib, run) = (dir.path().join("lib"), dir.path().join("run"));
        let network = Network::open(&lib, &run, &name, settings).unwrap();
        let netns = File::open("/proc/thread-self/ns/net").unwrap();
        Self { network, parent: unified().join(name), dir, netns, next: 0 }
    }

    fn domain(&self, name: &str) -> Domain {
        self.network.domain(&name.parse::<Name>().unwrap()).unwrap()
    }

    fn container(&mut self, domain: &Domain) -> Container {
        self.container_at(domain, &[])
    }

    fn container_at(&mut self, domain: &Domain, requested: &[IpAddr]) -> Container {
        self.next += 1;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.next.to_be_bytes());
        bytes[8] = 1;
        let id = ContainerId::from_bytes(bytes);
        let addresses = self.network.allocate(&domain.name, &id, requested).unwrap();
        let cgroup = self.parent.join(id.as_str());
        fs::create_dir(&cgroup).unwrap();
        use std::os::unix::fs::MetadataExt;
        let cgroup_id = fs::metadata(&cgroup).unwrap().ino();
        self.network.enter(domain, &id, cgroup_id, &addresses).unwrap();
        let agent = self.agent(Some(&cgroup), &domain.name);
        Container { id, cgroup, addresses, agent }
    }

    fn agent(&self, cgroup: Option<&Path>, domain: &Name) -> Agent {
        let netns = self.dir.path().join("run/domains").join(domain.as_str()).join("net");
        Agent::start(cgroup, Some(&netns))
    }

    /// Ends the container's process and takes the container out.
    fn end(&self, container: Container) {
        let Container { id, cgroup, agent, .. } = container;
        drop(agent);
        self.network.unpublish(&id).unwrap();
        self.network.leave(&id).unwrap();
        self.network.release(&id).unwrap();
        remove_cgroup(&cgroup);
    }
}

/// A process that was reaped may still be counted for a moment.
fn remove_cgroup(path: &Path) {
    for _ in 0..200 {
        if fs::remove_dir(path).is_ok() || !path.exists() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    panic!("{} cannot be removed", path.display());
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Ok(entries) = fs::read_dir(&self.parent) {
            for entry in entries.flatten().filter(|e| e.path().is_dir()) {
                for pid in fs::read_to_string(entry.path().join("cgroup.procs")).unwrap().lines() {
                    let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
                remove_cgroup(&entry.path());
            }
        }
        // The containers' cgroups are gone, but not their entries: domains are taken apart by force.
        let run = self.dir.path().join("run");
        if let Ok(domains) = fs::read_dir(run.join("domains")) {
            for domain in domains.flatten() {
                for mount in ["net", "sys"] {
                    let _ = dormouse_kernel::mount::detach(domain.path().join(mount));
                }
            }
        }
        let _ = dormouse_kernel::mount::detach(run.join("none/sys"));
        if self.parent.exists() {
            remove_cgroup(&self.parent);
        }
    }
}

/// A listener in a container: a socket bound to the address.
fn listener(agent: &mut Agent, family: u8, address: &str) -> usize {
    let socket = agent.make(&format!("socket {family} stream"));
    assert_eq!(agent.ask(&format!("bind {socket} {address}")), "ok", "{address}");
    assert_eq!(agent.ask(&format!("listen {socket}")), "ok");
    socket
}

/// What a connect gives.
fn connect(agent: &mut Agent, family: u8, address: &str) -> String {
    let socket = agent.make(&format!("socket {family} stream"));
    agent.ask(&format!("connect {socket} {address}"))
}

#[test]
fn root_members_bind_any_and_meet_at_their_own_addresses() {
    let mut host = Host::new(&[]);
    let domain = host.domain("d");
    let (mut a, mut b) = (host.container(&domain), host.container(&domain));
    let at_a = listener(&mut a.agent, 4, "0.0.0.0:80");
    listener(&mut b.agent, 4, "0.0.0.0:80");
    assert_eq!(a.agent.ask(&format!("sockname {at_a}")), "0.0.0.0:80");
    let socket = b.agent.make("socket 4 stream");
    assert_eq!(b.agent.ask(&format!("connect {socket} {}:80", a.v4())), "ok");
    let accepted = a.agent.ask(&format!("accept {at_a}"));
    assert!(accepted.contains(&format!(" {}:", b.v4())), "{accepted}");
    assert_eq!(b.agent.ask(&format!("peername {socket}")), format!("{}:80", a.v4()));
    assert!(b.agent.ask(&format!("sockname {socket}")).starts_with(&format!("{}:", b.v4())));
    host.end(a);
    host.end(b);
    drop(domain);
    assert_eq!(host.network.remove_unused().unwrap(), ["d".parse::<Name>().unwrap()]);
    assert_eq!(sh("ip -o link | grep -c dm || true").trim(), "0");
    assert_eq!(sh("nft list tables").trim(), "");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(host.dir.path().to_str().unwrap()));
}
