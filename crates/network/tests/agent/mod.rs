//! A process that performs requested socket operations inside a cgroup and a network namespace:
//! this test program, run again. The process is root of the host with all capabilities, so that
//! only the program under test can refuse, and not the kernel's own rules for containers.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType,
    sockopt,
};
use rustix::thread::LinkNameSpaceType;

const MARK: &str = "agent: ";

/// The other end.
pub struct Agent {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Agent {
    /// Starts an agent in a cgroup (a directory) and a namespace (a path), if given.
    pub fn start(cgroup: Option<&Path>, netns: Option<&Path>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "agent_process", "--nocapture", "--test-threads", "1"]);
        command.env("AGENT", "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(cgroup) = cgroup {
            command.env("AGENT_CGROUP", cgroup);
        }
        if let Some(netns) = netns {
            command.env("AGENT_NETNS", netns);
        }
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut agent = Self { child, input, output };
        assert_eq!(agent.answer(), "ready");
        agent
    }

    fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the agent has died");
            if let Some((_, answer)) = line.split_once(MARK) {
                return answer.trim().to_owned();
            }
        }
    }

    /// Sends one command and returns the reply: see [`obey`].
    pub fn ask(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        self.answer()
    }

    /// A command that makes a socket: its number.
    pub fn make(&mut self, command: &str) -> usize {
        let answer = self.ask(command);
        answer.parse().unwrap_or_else(|_| panic!("{command}: {answer}"))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The agent's side; the test `agent_process` calls it. Does nothing unless this is one.
pub fn run() {
    if std::env::var_os("AGENT").is_none() {
        return;
    }
    if let Some(cgroup) = std::env::var_os("AGENT_CGROUP") {
        std::fs::write(Path::new(&cgroup).join("cgroup.procs"), "0").unwrap();
    }
    if let Some(netns) = std::env::var_os("AGENT_NETNS") {
        let netns = std::fs::File::open(netns).unwrap();
        rustix::thread::move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&netns),
            Some(LinkNameSpaceType::Network),
        )
        .unwrap();
    }
    let say = |text: &str| {
        println!("{MARK}{text}");
        std::io::stdout().flush().unwrap();
    };
    // Tests of bounds hold tens of thousands of sockets.
    let files = rustix::process::Resource::Nofile;
    let mut limit = rustix::process::getrlimit(files);
    limit.current = limit.maximum;
    rustix::process::setrlimit(files, limit).unwrap();
    say("ready");
    let mut sockets: Vec<Option<OwnedFd>> = Vec::new();
    for line in std::io::stdin().lines() {
        let Ok(line) = line else { break };
        match obey(&line, &mut sockets) {
            Ok(answer) => say(&answer),
            Err(error) => say(&name(error)),
        }
    }
}

fn name(error: Errno) -> String {
    // Debug is the number alone on some builds; the tests use these names.
    for (errno, name) in [
        (Errno::ADDRNOTAVAIL, "EADDRNOTAVAIL"),
        (Errno::ADDRINUSE, "EADDRINUSE"),
        (Errno::CONNREFUSED, "ECONNREFUSED"),
        (Errno::PERM, "EPERM"),
        (Errno::AGAIN, "timeout"),
        (Errno::INPROGRESS, "timeout"),
        (Errno::TIMEDOUT, "timeout"),
        (Errno::PROTONOSUPPORT, "EPROTONOSUPPORT"),
        (Errno::NETUNREACH, "ENETUNREACH"),
        (Errno::HOSTUNREACH, "EHOSTUNREACH"),
        (Errno::NOENT, "ENOENT"),
    ] {
        if error == errno {
            return name.to_owned();
        }
    }
    format!("{error}")
}

fn unix(name: &str) -> Result<SocketAddrUnix, Errno> {
    match name.strip_prefix('@') {
        Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
        None => SocketAddrUnix::new(name),
    }
}

fn show(address: SocketAddrAny) -> String {
    match SocketAddr::try_from(address) {
        Ok(address) => address.to_string(),
        Err(_) => "unnamed".to_owned(),
    }
}

fn family(word: &str) -> AddressFamily {
    match word {
        "4" => AddressFamily::INET,
        "6" => AddressFamily::INET6,
        _ => AddressFamily::UNIX,
    }
}

fn stream(family: AddressFamily) -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

fn hold(family: AddressFamily, ip: IpAddr, range: &[&str]) -> Result<Vec<OwnedFd>, Errno> {
    let [from, to] = [0, 1].map(|n| range[n].parse::<u16>().unwrap());
    let bound = |port| {
        let fd = stream(family)?;
        rustix::net::bind(&fd, &SocketAddr::new(ip, port))?;
        Ok(fd)
    };
    (from..=to).map(bound).collect()
}

fn hold_any(family: AddressFamily, count: usize) -> Result<Vec<OwnedFd>, Errno> {
    let listening = |_| {
        let fd = stream(family)?;
        rustix::net::listen(&fd, 1)?;
        Ok(fd)
    };
    (0..count).map(listening).collect()
}

/// The place of an abstract name in the kernel's table: unix_abstract_hash().
fn place(name: &str) -> u32 {
    let mut bytes = AddressFamily::UNIX.as_raw().to_ne_bytes().to_vec();
    bytes.push(0);
    bytes.extend(name.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(2), 0);
    let word = |pair: &[u8]| u32::from(u16::from_ne_bytes([pair[0], pair[1]]));
    let mut sum: u32 = bytes.chunks_exact(2).map(word).sum();
    for _ in 0..2 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let hash = !sum & 0xffff;
    (hash ^ hash >> 8) & 255
}

fn crowd(count: usize, name: &str) -> Result<Vec<OwnedFd>, Errno> {
    let others = (0u32..).map(|n| format!("crowd{n}")).filter(|other| place(other) == place(name));
    let bound = |other: String| {
        let fd = stream(AddressFamily::UNIX)?;
        rustix::net::bind(&fd, &SocketAddrUnix::new_abstract_name(other.as_bytes())?)?;
        Ok(fd)
    };
    others.take(count).map(bound).collect()
}

/// ```text
/// socket 4|6|u stream|dgram|raw|seqpacket|mptcp   -> number     v6only N
/// bind N ADDRESS    connect N ADDRESS    listen N   -> ok        close N
/// accept N -> number PEER      sockname N     peername N
/// bind-address N IP:0   -> ok, without a port (IP_BIND_ADDRESS_NO_PORT)
/// send N ADDRESS TEXT          receive N -> FROM TEXT     echo N ADDRESS -> FROM
/// hold 4|6 IP FROM TO -> number: binds a stream socket of its own to each port of a range
/// hold-any 4|6 NUMBER -> number: has so many sockets listen that were not bound
/// crowd NUMBER @NAME -> number: binds so many stream sockets to other names of the same hash
/// forge N ADDRESS IP: a datagram to ADDRESS with the source IP (IP_PKTINFO, IPV6_PKTINFO)
/// ```
/// An ADDRESS is `IP:PORT` or `@NAME`. Nothing waits longer than half a second.
fn obey(line: &str, sockets: &mut Vec<Option<OwnedFd>>) -> Result<String, Errno> {
    let words: Vec<&str> = line.split(' ').collect();
    let wait = Some(Duration::from_millis(500));
    let keep = |fd: OwnedFd, sockets: &mut Vec<Option<OwnedFd>>| -> Result<usize, Errno> {
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Send, wait)?;
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, wait)?;
        sockets.push(Some(fd));
        Ok(sockets.len() - 1)
    };
    if words[0] == "socket" {
        let family = family(words[1]);
        let (kind, protocol) = match words[2] {
            "stream" => (SocketType::STREAM, None),
            "mptcp" => (SocketType::STREAM, rustix::net::ipproto::MPTCP.into()),
            "dgram" => (SocketType::DGRAM, None),
            "seqpacket" => (SocketType::SEQPACKET, None),
            "ping" => (SocketType::DGRAM, Some(rustix::net::ipproto::ICMP)),
            _ => (SocketType::RAW, Some(rustix::net::ipproto::ICMP)),
        };
        let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?;
        return Ok(keep(fd, sockets)?.to_string());
    }
    let many: Option<Vec<OwnedFd>> = match words[0] {
        "hold" => Some(hold(family(words[1]), words[2].parse().unwrap(), &words[3..])?),
        "hold-any" => Some(hold_any(family(words[1]), words[2].parse().unwrap())?),
        "crowd" => Some(crowd(words[1].parse().unwrap(), &words[2][1..])?),
        _ => None,
    };
    if let Some(many) = many {
        let count = many.len();
        sockets.extend(many.into_iter().map(Some));
        return Ok(count.to_string());
    }
    let number: usize = words[1].parse().unwrap();
    if words[0] == "close" {
        sockets[number] = None;
        return Ok("ok".into());
    }
    let fd = sockets[number].as_ref().unwrap();
    match words[0] {
        "v6only" => sockopt::set_ipv6_v6only(fd, true)?,
        "bind" if words[2].starts_with(['@', '/']) => rustix::net::bind(fd, &unix(words[2])?)?,
        // Without a port, which connect(2) chooses.
        "bind-address" => {
            use nix::sys::socket::{setsockopt, sockopt::IpBindAddressNoPort};
            setsockopt(fd, IpBindAddressNoPort, &true).unwrap();
            rustix::net::bind(fd, &words[2].parse::<SocketAddr>().unwrap())?;
        }
        "bind" => rustix::net::bind(fd, &words[2].parse::<SocketAddr>().unwrap())?,
        "connect" if words[2].starts_with(['@', '/']) => {
            rustix::net::connect(fd, &unix(words[2])?)?;
        }
        "connect" => rustix::net::connect(fd, &words[2].parse::<SocketAddr>().unwrap())?,
        "listen" => rustix::net::listen(fd, 16)?,
        "accept" => {
            let (new, from) = rustix::net::acceptfrom(fd)?;
            let number = keep(new, sockets)?;
            return Ok(format!("{number} {}", from.map_or("unnamed".into(), show)));
        }
        "sockname" => return Ok(show(rustix::net::getsockname(fd)?)),
        "peername" => return Ok(show(rustix::net::getpeername(fd)?.unwrap())),
        "send" => {
            let text = words[3..].join(" ");
            match words[2] {
                "-" => rustix::net::send(fd, text.as_bytes(), SendFlags::empty())?,
                name if name.starts_with('@') => {
                    rustix::net::sendto(fd, text.as_bytes(), SendFlags::empty(), &unix(name)?)?
                }
                to => rustix::net::sendto(
                    fd,
                    text.as_bytes(),
                    SendFlags::empty(),
                    &to.parse::<SocketAddr>().unwrap(),
                )?,
            };
        }
        "echo" => {
            let request = [8, 0, 0, 0, 0, 0, 0, 1];
            let to = words[2].parse::<SocketAddr>().unwrap();
            rustix::net::sendto(fd, &request, SendFlags::empty(), &to)?;
            let mut buffer = [0u8; 64];
            let (_, _, from) = rustix::net::recvfrom(fd, &mut buffer[..], RecvFlags::empty())?;
            return Ok(from.map_or("unnamed".into(), show));
        }
        "forge" => {
            let to = words[2].parse::<SocketAddr>().ok(); // `-` for a connected socket
            return Ok(match forge(fd, to, words[3].parse().unwrap()) {
                Ok(_) => "ok".into(),
                Err(error) => error.to_string().split(':').next().unwrap().to_owned(),
            });
        }
        "receive" => {
            let mut buffer = [0u8; 256];
            let (bytes, _, from) = rustix::net::recvfrom(fd, &mut buffer[..], RecvFlags::empty())?;
            let text = String::from_utf8_lossy(&buffer[..bytes]).into_owned();
            return Ok(format!("{} {text}", from.map_or("unnamed".into(), show)));
        }
        other => panic!("no such command: {other}"),
    }
    Ok("ok".into())
}

fn forge(fd: &OwnedFd, to: Option<SocketAddr>, from: IpAddr) -> nix::Result<usize> {
    use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg};
    use std::os::fd::AsRawFd;
    let text = [std::io::IoSlice::new(b"forged")];
    let to = to.map(SockaddrStorage::from);
    let v4 = |a: std::net::Ipv4Addr| nix::libc::in_addr { s_addr: u32::from(a).to_be() };
    match from {
        IpAddr::V4(from) => {
            let info = nix::libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: v4(from),
                ipi_addr: v4(from),
            };
            let message = [ControlMessage::Ipv4PacketInfo(&info)];
            sendmsg(fd.as_raw_fd(), &text, &message, MsgFlags::empty(), to.as_ref())
        }
        IpAddr::V6(from) => {
            let info = nix::libc::in6_pktinfo {
                ipi6_addr: nix::libc::in6_addr { s6_addr: from.octets() },
                ipi6_ifindex: 0,
            };
            let message = [ControlMessage::Ipv6PacketInfo(&info)];
            sendmsg(fd.as_raw_fd(), &text, &message, MsgFlags::empty(), to.as_ref())
        }
    }
}
