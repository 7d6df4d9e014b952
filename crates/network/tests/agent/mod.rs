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

/// ```text
/// socket 4|6|u stream|dgram|raw|seqpacket|mptcp   -> number     v6only N
/// bind N ADDRESS    connect N ADDRESS    listen N   -> ok        close N
/// accept N -> number PEER      sockname N     peername N
/// send N ADDRESS TEXT          receive N -> FROM TEXT     echo N ADDRESS -> FROM
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
        let family = match words[1] {
            "4" => AddressFamily::INET,
            "6" => AddressFamily::INET6,
            _ => AddressFamily::UNIX,
        };
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
    let number: usize = words[1].parse().unwrap();
    if words[0] == "close" {
        sockets[number] = None;
        return Ok("ok".into());
    }
    let fd = sockets[number].as_ref().unwrap();
    match words[0] {
        "v6only" => sockopt::set_ipv6_v6only(fd, true)?,
        "bind" if words[2].starts_with(['@', '/']) => rustix::net::bind(fd, &unix(words[2])?)?,
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
